"""How sizes read in the words of whoever typed them: the flags' own names, their values, and the arithmetic between them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_grpo.batching.sizes import CP, PP, TP, WORLD, Derived, Fraction, TypedSizes


def remainder(top: int, bottom: int) -> str:
    """`96 = 1 x 64 + 32`, the arithmetic of a broken multiple."""
    return f"{top} = {top // bottom} x {bottom} + {top % bottom}"


class Words:
    """How the sizes read in the user's own terms: products of the flags that make them, with their values."""

    def __init__(self, inputs: TypedSizes, derived: Derived):
        self.inputs, self.derived = inputs, derived

    def name(self, flag: str) -> str:
        return self.inputs.names.get(flag, flag)

    def flag(self, flag: str) -> str:
        mark = "" if flag in self.inputs.typed else ", the default"
        return f"{self.name(flag)} ({self.inputs.values[flag]}{mark})"

    def product(self, flags: Sequence[str], *, also: Sequence[str] = ()) -> str:
        """`pipeline_model_parallel_size (2) x context_parallel_size (2) = 4`: those above 1, and those in `also`."""
        v = self.inputs.values
        shown = [flag for flag in flags if v[flag] != 1 or flag in also] or flags[:1]
        total = 1
        for flag in shown:
            total *= v[flag]
        return " x ".join(self.flag(flag) for flag in shown) + (f" = {total}" if len(shown) > 1 else "")

    def size(self, size: str) -> str:
        """A size that is given as such."""
        parts = self._parts(size)
        return _equation(parts, self.inputs.product(size))

    def _parts(self, size: str) -> list[str]:
        return [self.flag(flag) for flag in self.inputs.products[size]]

    def dp(self) -> str:
        v = self.inputs.values
        cut = [f"{self.name(flag)} {v[flag]}" for flag in (TP, PP, CP) if v[flag] != 1]
        world = f"{self.name(WORLD)} {v[WORLD]}"
        return f"dp_size ({' / '.join([world, *cut])} = {v[WORLD] // self.derived.ranks_per_replica})" if cut else f"dp_size ({world})"

    def _unit_parts(self) -> list[str]:
        if not self.inputs.given("micro"):
            return [f"{self.size('global')} / {self.size('accumulation')}"]
        return [*self._parts("micro"), self.dp()]

    def unit(self) -> str:
        """One micro-step, in completions."""
        return f"{' x '.join(self._unit_parts())} = {self.derived.unit}"

    def unit_flags(self) -> tuple[str, ...]:
        if not self.inputs.given("micro"):
            return (*self.inputs.products["global"], *self.inputs.products["accumulation"])
        return (*self.inputs.products["micro"], WORLD, TP, PP, CP)

    def _global_parts(self) -> list[str]:
        if self.inputs.given("global"):
            return self._parts("global")
        return [*self._parts("accumulation"), *self._unit_parts()]

    def global_batch(self) -> str:
        return _equation(self._global_parts(), self.derived.global_batch)

    def accumulated(self) -> str:
        """What gradient accumulation makes of a micro-step."""
        total = self.inputs.product("accumulation") * self.derived.unit.whole()
        return _equation([*self._parts("accumulation"), *self._unit_parts()], total)

    def rollout_of_steps(self, total: Fraction) -> str:
        """What steps_per_generation makes of a global batch."""
        return _equation([*self._global_parts(), *self._parts("steps")], total)

    def global_flags(self) -> tuple[str, ...]:
        if self.inputs.given("global"):
            return tuple(self.inputs.products["global"])
        return (*self.inputs.products["accumulation"], *self.unit_flags())

    def generation(self) -> str:
        inputs = self.inputs
        if inputs.given("generation"):
            return self.size("generation")
        if inputs.given("window"):
            parts = [*self._parts("window"), *self._unit_parts()]
        elif inputs.given("steps") and inputs.product("steps") != 1:
            parts = [*self._global_parts(), *self._parts("steps")]
        else:
            parts = self._global_parts()
        return f"a rollout of {_equation(parts, self.derived.generation)} completions"

    def generation_flags(self) -> tuple[str, ...]:
        inputs = self.inputs
        if inputs.given("generation"):
            return tuple(inputs.products["generation"])
        if inputs.given("window"):
            return (*inputs.products["window"], *self.unit_flags())
        return (*(inputs.products["steps"] if inputs.given("steps") else ()), *self.global_flags())


def _equation(parts: Sequence[str], total: int | Fraction) -> str:
    return f"{' x '.join(parts)} = {total}" if len(parts) > 1 else parts[0]
