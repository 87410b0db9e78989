"""How sizes read: the flags' names, their values, what they were typed as in another system, and the arithmetic between them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_grpo.batching.sizes import ACCUMULATION, CP, GENERATION, GLOBAL, MICRO, PP, STEPS, TP, WORLD, Derived, Fraction, TypedSizes


def remainder(top: int, bottom: int) -> str:
    """`96 = 1 x 64 + 32`, the arithmetic of a broken multiple."""
    return f"{top} = {top // bottom} x {bottom} + {top % bottom}"


class Messages:
    """Products of the flags that make a size, with their values; and which flags these are."""

    def __init__(self, inputs: TypedSizes, derived: Derived):
        self.inputs, self.derived, self.values = inputs, derived, inputs.values

    def name(self, flag: str) -> str:
        return self.inputs.names.get(flag, flag)

    def flag(self, flag: str) -> str:
        """`global_batch_size (96)`; of another system's names `global_batch_size 96 (ppo_mini_batch_size 12 x rollout.n 8)`."""
        origin = self.inputs.origins.get(flag)
        if origin and origin.text and (origin.name != flag or origin.unit != "completions"):
            steps = f"{self.values[flag]} {origin.unit}"
            return f"{steps if origin.unit == 'micro-steps' else f'{flag} {self.inputs.size(flag)}'} ({origin.text})"
        mark = "" if flag in self.inputs.typed else ", the default"
        return f"{self.name(flag)} ({self.values[flag]}{mark})"

    def product(self, flags: Sequence[str]) -> str:
        """`pipeline_model_parallel_size (2) x context_parallel_size (2) = 4`: those above 1."""
        shown = [flag for flag in flags if self.values[flag] != 1] or flags[:1]
        total = 1
        for flag in shown:
            total *= self.values[flag]
        return _equation([self.flag(flag) for flag in shown], total)

    def dp(self) -> str:
        v = self.values
        cut = [f"{self.name(flag)} {v[flag]}" for flag in (TP, PP, CP) if v[flag] != 1]
        world = f"{self.name(WORLD)} {v[WORLD]}"
        return f"dp_size ({' / '.join([world, *cut])} = {v[WORLD] // self.derived.ranks_per_replica})" if cut else f"dp_size ({world})"

    def _unit_parts(self) -> list[str]:
        if MICRO not in self.values:
            return [f"{self.flag(GLOBAL)} / {self.flag(ACCUMULATION)}"]
        return [self.flag(MICRO), self.dp()]

    def unit(self) -> str:
        """One micro-step, in completions."""
        return f"{' x '.join(self._unit_parts())} = {self.derived.unit}"

    def unit_flags(self) -> tuple[str, ...]:
        if MICRO not in self.values:
            return (*self.inputs.flags(GLOBAL), ACCUMULATION)
        return (MICRO, WORLD, TP, PP, CP)

    def _global_parts(self) -> list[str]:
        if GLOBAL in self.values:
            return [self.flag(GLOBAL)]
        return [self.flag(ACCUMULATION), *self._unit_parts()]

    def global_batch(self) -> str:
        return _equation(self._global_parts(), self.derived.global_batch)

    def accumulated(self) -> str:
        """What gradient accumulation makes of a micro-step."""
        return _equation([self.flag(ACCUMULATION), *self._unit_parts()], self.values[ACCUMULATION] * self.derived.unit.whole())

    def rollout_of_steps(self, total: Fraction) -> str:
        """What steps_per_generation makes of a global batch."""
        return _equation([*self._global_parts(), self.flag(STEPS)], total)

    def global_flags(self) -> tuple[str, ...]:
        return self.inputs.flags(GLOBAL) if GLOBAL in self.values else (ACCUMULATION, *self.unit_flags())

    def generation(self) -> str:
        if GENERATION in self.values:
            return self.flag(GENERATION)
        if self.inputs.counts(STEPS, "micro-steps"):
            parts = [self.flag(STEPS), *self._unit_parts()]
        else:
            parts = [*self._global_parts(), *([self.flag(STEPS)] if self.values.get(STEPS, 1) != 1 else [])]
        return f"a rollout of {_equation(parts, self.derived.generation)} completions"

    def generation_flags(self) -> tuple[str, ...]:
        if GENERATION in self.values:
            return self.inputs.flags(GENERATION)
        in_micro_steps = self.inputs.counts(STEPS, "micro-steps")
        return (*([STEPS] if STEPS in self.values else []), *(self.unit_flags() if in_micro_steps else self.global_flags()))


def _equation(parts: Sequence[str], total: int | Fraction) -> str:
    return f"{' x '.join(parts)} = {total}" if len(parts) > 1 else parts[0]
