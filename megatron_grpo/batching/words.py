"""How sizes read in the words of whoever typed them: the flags' own names, their values, and the arithmetic between them."""

from __future__ import annotations

from megatron_grpo.batching.sizes import CP, PP, SHORT, TP, WORLD, Derived, Inputs


def remainder(top: int, bottom: int, name: str = "") -> str:
    """`96 = 1 x 64 + 32`, the arithmetic of a broken multiple."""
    return f"{top} = {top // bottom} x {bottom} + {top % bottom}"


class Words:
    """How the sizes read in the user's own terms."""

    def __init__(self, inputs: Inputs, derived: Derived):
        self.inputs, self.derived = inputs, derived

    def flag(self, name: str) -> str:
        mark = "" if name in self.inputs.typed else ", the default"
        return f"{name} ({self.inputs.values[name]}{mark})"

    def size(self, size: str) -> str:
        flags = self.inputs.products[size]
        text = " x ".join(self.flag(flag) for flag in flags)
        return f"{text} = {self.inputs.product(size)}" if len(flags) > 1 else text

    def dp(self) -> str:
        v, replica = self.inputs.values, self.derived.ranks_per_replica
        cut = " x ".join(f"{SHORT[flag]} {v[flag]}" for flag in (TP, PP, CP) if v[flag] != 1)
        return f"dp_size ({v[WORLD] // replica} = {v[WORLD]} ranks / ({cut}))" if cut else f"dp_size ({v[WORLD]})"

    def unit(self) -> str:
        """One micro-step, in completions."""
        if not self.inputs.given("micro"):
            return f"{self.size('global')} / {self.size('accumulation')} = {self.derived.unit}"
        return f"{self.size('micro')} x {self.dp()} = {self.derived.unit}"

    def unit_flags(self) -> tuple[str, ...]:
        if not self.inputs.given("micro"):
            return (*self.inputs.products["global"], *self.inputs.products["accumulation"])
        return (*self.inputs.products["micro"], WORLD, TP, PP, CP)

    def global_batch(self) -> str:
        if self.inputs.given("global"):
            return self.size("global")
        return f"the global batch ({self.size('accumulation')} x {self.unit()}, in all {self.derived.global_batch})"

    def global_flags(self) -> tuple[str, ...]:
        if self.inputs.given("global"):
            return tuple(self.inputs.products["global"])
        return (*self.inputs.products["accumulation"], *self.unit_flags())

    def generation(self) -> str:
        inputs = self.inputs
        if inputs.given("generation"):
            return self.size("generation")
        if inputs.given("window"):
            return f"the rollout ({self.size('window')} x {self.unit()}, in all {self.derived.generation})"
        if inputs.given("steps") and inputs.product("steps") != 1:
            return f"the rollout ({self.global_batch()} x {self.size('steps')} = {self.derived.generation})"
        return f"the rollout ({self.global_batch()}, one optimizer step)"

    def generation_flags(self) -> tuple[str, ...]:
        inputs = self.inputs
        if inputs.given("generation"):
            return tuple(inputs.products["generation"])
        if inputs.given("window"):
            return (*inputs.products["window"], *self.unit_flags())
        return (*(inputs.products["steps"] if inputs.given("steps") else ()), *self.global_flags())
