"""Batch and parallelism sizes as arithmetic over the typed numbers, and the text of messages about them (flags, values, origins).

A size is a typed number, one that counts prompts times num_generations, or a fraction of two products (`micro_batch_size x world_size / (tp
x pp x cp)`). Each rule states that one integer is a multiple of another, cross-multiplied so that both are products of typed numbers. This
lets `nearest` solve for any one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_grpo.core.settings import Config, ParallelConfig, SizeOrigin


def remainder(top: int, bottom: int) -> str:
    """Return the arithmetic of a division with a remainder: `96 = 1 x 64 + 32`.

    Args:
        top: The dividend.
        bottom: The divisor.
    """
    return f"{top} = {top // bottom} x {bottom} + {top % bottom}"


class SizeFormatter:
    """Formatter of the flags that determine a size: products with their values, and lists of flags.

    Args:
        inputs: The typed sizes.
        derived: The sizes derived from them.
    """

    def __init__(self, inputs: SizeInputs, derived: DerivedSizes):
        self.inputs, self.derived, self.values = inputs, derived, inputs.values

    def name(self, flag: str) -> str:
        """Return the user's name of a flag.

        Args:
            flag: Name of the setting.
        """
        return self.inputs.names.get(flag, flag)

    def flag(self, flag: str) -> str:
        """Return a flag with its value: `global_batch_size (96)`.

        A flag that was typed under another system's name shows its origin: `global_batch_size 96 (ppo_mini_batch_size 12 x rollout.n 8)`.

        Args:
            flag: Name of the setting.
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
        factors = [flag for flag in flags if self.values[flag] != 1] or flags[:1]
        total = 1
        for flag in factors:
            total *= self.values[flag]
        return _equation([self.flag(flag) for flag in factors], total)

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
        return _equation([self.flag(ACCUMULATION), *self._unit_parts()], self.values[ACCUMULATION] * self.derived.unit.as_int())

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


WORLD, TP, PP, CP = "world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
VPP, EP, ETP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
VLLM_TP, FIRST, LAST = "vllm_tensor_parallel_size", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
PARALLEL = (WORLD, TP, PP, CP, VPP, EP, ETP, FIRST, LAST)
NO_GROUP_NEEDED = ("reinforce_plus_plus",)  # its baseline is the mean of the whole rollout

MICRO, GLOBAL, ACCUMULATION = "micro_batch_size", "global_batch_size", "gradient_accumulation_steps"
GENERATION, STEPS, GROUP, PASSES = "generation_batch_size", "steps_per_generation", "num_generations", "num_iterations"
SIZES = (MICRO, GLOBAL, ACCUMULATION, GENERATION, STEPS, GROUP, PASSES)
DEFAULT_GLOBAL_BATCH_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeModel:
    """Properties of a model that the size rules use; None where unknown. num_experts 0 is a dense model.

    Args:
        num_layers: Number of transformer layers.
        num_experts: Number of routed experts per layer.
        misfits: (tp, ep, etp) -> (flag, sentence) for every division of the model over ranks that leaves a remainder.
        teacher: A second model in the same layout. Its layers are distributed evenly if their number differs from this model's.
    """

    num_layers: int | None = None
    num_experts: int | None = None
    misfits: Callable[[int, int, int], Sequence[tuple[str, str]]] | None = None
    teacher: SizeModel | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeInputs:
    """Numbers that sizes are made of, by flag, each in the unit in which it was typed.

    Args:
        values: Value of each flag that is set.
        typed: The flags that the user set.
        origins: Names and values of another system, for flags that were typed under its names.
        parallel: Pipeline settings that are not numbers.
        names: The user's name of a flag, where it is an alias.
    """

    values: Mapping[str, int]
    typed: frozenset[str]
    origins: Mapping[str, SizeOrigin]
    aligned: bool
    needs_group: bool
    sequence_parallel: bool
    parallel: ParallelConfig
    model: SizeModel
    names: Mapping[str, str]

    def with_value(self, flag: str, value: int) -> SizeInputs:
        """Return a copy in which the user has set a flag.

        Args:
            flag: The flag.
            value: Its value, in the unit in which it was typed.
        """
        return replace(self, values={**self.values, flag: value}, typed=self.typed | {flag})

    def counts(self, flag: str, unit: str) -> bool:
        """Return whether a size is set, and in the given unit.

        Args:
            flag: Flag of the size.
            unit: "completions", "prompts" or "micro-steps".
        """
        return flag in self.values and flag in self.origins and self.origins[flag].unit == unit

    def size(self, flag: str) -> int:
        """Return a size in completions, or in its native unit.

        Args:
            flag: Flag of the size, which is set.
        """
        return self.values[flag] * (self.values[GROUP] if self.counts(flag, "prompts") else 1)

    def flags(self, flag: str) -> tuple[str, ...]:
        """Return the flags that determine a size.

        Args:
            flag: Flag of the size.
        """
        return (flag, GROUP) if self.counts(flag, "prompts") else (flag,)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRule:
    """One rule on sizes.

    Args:
        key: Name of the rule, unique.
        flags: Flags that take part in it.
        text: Returns the sentence of a violation.
        ratio: (multiple, divisor). The first must be an integer multiple of the second.
        equal: Whether both numbers of `ratio` must be equal instead.
        holds: Further condition; without a `ratio` the only one.
        needs_removal: No value satisfies the rule; one of the flags must be removed.
        after: Keys of rules that must hold before this one is meaningful.
    """

    key: str
    flags: Sequence[str]
    text: Callable[[], str]
    ratio: tuple[int, int] = (0, 1)
    equal: bool = False
    holds: bool = True
    needs_removal: bool = False
    after: Sequence[str] = ()

    @property
    def broken(self) -> bool:
        """Whether the rule is violated."""
        multiple, divisor = self.ratio
        is_multiple = multiple == divisor if self.equal else divisor != 0 and multiple % divisor == 0
        return not (self.holds and is_multiple)


def inputs_of(cfg: Config, model: SizeModel | None = None) -> SizeInputs:
    """Return the sizes that a configuration sets, with defaults.

    Args:
        cfg: The configuration.
        model: Known properties of the model.
    """
    values: dict[str, int | None] = {name: getattr(cfg.parallel, name) for name in PARALLEL}
    values[WORLD] = values[WORLD] if values[WORLD] is not None else 1
    values[VLLM_TP] = cfg.rollout.vllm_tensor_parallel_size
    if cfg.origins:
        values |= {flag: origin.count for flag, origin in cfg.origins.items()}
    else:
        values |= {flag: getattr(cfg.batch, flag) for flag in SIZES}
        if values[GENERATION] is None and values[STEPS] is None:
            values[STEPS] = 1
    if values.get(GLOBAL) is None and values.get(ACCUMULATION) is None:
        values[GLOBAL] = DEFAULT_GLOBAL_BATCH_SIZE
    if values[MICRO] is None and not (values.get(GLOBAL) and values.get(ACCUMULATION)):
        values[MICRO] = 1
    return SizeInputs(
        values={flag: value for flag, value in values.items() if value is not None},
        typed=frozenset(flag for flag in values if cfg.sources.get(flag, "default") != "default"),
        origins=cfg.origins,
        aligned=not cfg.batch.allow_unaligned_generation,
        needs_group=cfg.grpo.advantage_estimator not in NO_GROUP_NEEDED and bool(cfg.rewards.reward_funcs or not cfg.grpo.teacher_flag),
        sequence_parallel=cfg.parallel.sequence_parallel,
        parallel=cfg.parallel,
        model=model or SizeModel(),
        names=cfg.typed,
    )


@dataclass(frozen=True, slots=True)
class Fraction:
    """A positive fraction that is not reduced, so that its terms stay products of typed numbers."""

    top: int
    bottom: int = 1

    def as_int(self) -> int:
        """Return the fraction as an integer, rounded down."""
        return self.top // self.bottom

    def __str__(self) -> str:
        return str(self.as_int()) if self.top % self.bottom == 0 else f"{self.top / self.bottom:.2f}"


def cross(a: Fraction, b: Fraction) -> tuple[int, int]:
    """Return (multiple, divisor) of the rule that `a` is an integer multiple of `b`.

    Args:
        a: The multiple.
        b: The divisor.
    """
    return a.top * b.bottom, a.bottom * b.top


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedSizes:
    """Derived sizes, in completions; integers once every rule holds.

    Args:
        unit: Completions in one micro-step, over all DP ranks.
    """

    ranks_per_replica: int
    unit: Fraction
    micro: Fraction
    global_batch: Fraction
    generation: Fraction
    accumulation: Fraction
    group: int
    passes: int


def derive(inputs: SizeInputs) -> DerivedSizes:
    """Compute the sizes by the definitions of docs/batching.md. Where two settings determine one size, the rules compare them.

    Args:
        inputs: The typed sizes.
    """
    v, size = inputs.values, inputs.size
    replica = v[TP] * v[PP] * v[CP]
    if MICRO in v:
        unit, micro = Fraction(v[MICRO] * v[WORLD], replica), Fraction(v[MICRO])
    else:  # the global batch and its accumulation instead
        unit = Fraction(size(GLOBAL), v[ACCUMULATION])
        micro = Fraction(size(GLOBAL) * replica, v[ACCUMULATION] * v[WORLD])
    global_batch = Fraction(size(GLOBAL)) if GLOBAL in v else Fraction(v[ACCUMULATION] * unit.top, unit.bottom)
    if GENERATION in v:
        generation = Fraction(size(GENERATION))
    elif inputs.counts(STEPS, "micro-steps"):
        generation = Fraction(v[STEPS] * unit.top, unit.bottom)
    else:
        generation = Fraction(global_batch.top * v.get(STEPS, 1), global_batch.bottom)
    return DerivedSizes(
        ranks_per_replica=replica,
        unit=unit,
        micro=micro,
        global_batch=global_batch,
        generation=generation,
        accumulation=Fraction(v[ACCUMULATION]) if ACCUMULATION in v else Fraction(*cross(global_batch, unit)),
        group=v[GROUP],
        passes=v.get(PASSES, 1),
    )
