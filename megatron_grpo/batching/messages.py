"""Text of messages about sizes: flag names, their values, their origin in another system, and the arithmetic between them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_grpo.batching.sizes import ACCUMULATION, CP, GENERATION, GLOBAL, MICRO, PP, STEPS, TP, WORLD, Derived, Fraction, TypedSizes


def remainder(top: int, bottom: int) -> str:
    """Return the arithmetic of a division with a remainder: `96 = 1 x 64 + 32`.

    Args:
        top: The dividend.
        bottom: The divisor.
    """
    return f"{top} = {top // bottom} x {bottom} + {top % bottom}"


class Messages:
    """Formats the flags that determine a size as products with their values, and lists these flags.

    Args:
        inputs: The typed sizes.
        derived: The sizes derived from them.
    """

    def __init__(self, inputs: TypedSizes, derived: Derived):
        self.inputs, self.derived, self.values = inputs, derived, inputs.values

    def name(self, flag: str) -> str:
        """Return the user's name of a flag."""
        return self.inputs.names.get(flag, flag)

    def flag(self, flag: str) -> str:
        """Return a flag with its value: `global_batch_size (96)`.

        A flag that was typed under another system's name shows its origin: `global_batch_size 96 (ppo_mini_batch_size 12 x rollout.n 8)`.
        """
        origin = self.inputs.origins.get(flag)
        if origin and origin.text and (origin.name != flag or origin.unit != "completions"):
            steps = f"{self.values[flag]} {origin.unit}"
            return f"{steps if origin.unit == 'micro-steps' else f'{flag} {self.inputs.size(flag)}'} ({origin.text})"
        mark = "" if flag in self.inputs.typed else ", the default"
        return f"{self.name(flag)} ({self.values[flag]}{mark})"

    def product(self, flags: Sequence[str]) -> str:
        """Return the product of the flags above 1: `pipeline_model_parallel_size (2) x context_parallel_size (2) = 4`.

        Args:
            flags: Flags that are set; the first is shown if none is above 1.
        """
        shown = [flag for flag in flags if self.values[flag] != 1] or flags[:1]
        total = 1
        for flag in shown:
            total *= self.values[flag]
        return _equation([self.flag(flag) for flag in shown], total)

    def dp(self) -> str:
        """Return the data-parallel size with its derivation."""
        v = self.values
        cut = [f"{self.name(flag)} {v[flag]}" for flag in (TP, PP, CP) if v[flag] != 1]
        world = f"{self.name(WORLD)} {v[WORLD]}"
        return f"dp_size ({' / '.join([world, *cut])} = {v[WORLD] // self.derived.ranks_per_replica})" if cut else f"dp_size ({world})"

    def _unit_parts(self) -> list[str]:
        if MICRO not in self.values:
            return [f"{self.flag(GLOBAL)} / {self.flag(ACCUMULATION)}"]
        return [self.flag(MICRO), self.dp()]

    def unit(self) -> str:
        """Return one micro-step, in completions."""
        return f"{' x '.join(self._unit_parts())} = {self.derived.unit}"

    def unit_flags(self) -> tuple[str, ...]:
        """Return the flags that determine a micro-step."""
        if MICRO not in self.values:
            return (*self.inputs.flags(GLOBAL), ACCUMULATION)
        return (MICRO, WORLD, TP, PP, CP)

    def _global_parts(self) -> list[str]:
        if GLOBAL in self.values:
            return [self.flag(GLOBAL)]
        return [self.flag(ACCUMULATION), *self._unit_parts()]

    def global_batch(self) -> str:
        """Return the global batch, in completions."""
        return _equation(self._global_parts(), self.derived.global_batch)

    def accumulated(self) -> str:
        """Return the product of a micro-step and gradient accumulation."""
        return _equation([self.flag(ACCUMULATION), *self._unit_parts()], self.values[ACCUMULATION] * self.derived.unit.whole())

    def rollout_of_steps(self, total: Fraction) -> str:
        """Return the product of a global batch and steps_per_generation.

        Args:
            total: The result, in completions.
        """
        return _equation([*self._global_parts(), self.flag(STEPS)], total)

    def global_flags(self) -> tuple[str, ...]:
        """Return the flags that determine the global batch."""
        return self.inputs.flags(GLOBAL) if GLOBAL in self.values else (ACCUMULATION, *self.unit_flags())

    def generation(self) -> str:
        """Return the size of a rollout."""
        if GENERATION in self.values:
            return self.flag(GENERATION)
        if self.inputs.counts(STEPS, "micro-steps"):
            parts = [self.flag(STEPS), *self._unit_parts()]
        else:
            parts = [*self._global_parts(), *([self.flag(STEPS)] if self.values.get(STEPS, 1) != 1 else [])]
        return f"a rollout of {_equation(parts, self.derived.generation)} completions"

    def generation_flags(self) -> tuple[str, ...]:
        """Return the flags that determine the size of a rollout."""
        if GENERATION in self.values:
            return self.inputs.flags(GENERATION)
        in_micro_steps = self.inputs.counts(STEPS, "micro-steps")
        return (*([STEPS] if STEPS in self.values else []), *(self.unit_flags() if in_micro_steps else self.global_flags()))


def _equation(parts: Sequence[str], total: int | Fraction) -> str:
    return f"{' x '.join(parts)} = {total}" if len(parts) > 1 else parts[0]
