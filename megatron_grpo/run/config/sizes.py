"""Batch and parallelism sizes as products of typed numbers, with their text for messages (flags, values, origins). No torch.

A size is a typed number, one that counts prompts times num_generations, or a product or quotient of such (`micro_batch_size x world_size /
(tp x pp x cp)`). Every flag enters a size linearly, so that `rules.batch_sizes.nearest` can solve for any one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod

from megatron_grpo.core.settings import ParallelConfig
from megatron_grpo.run.config.settings import BatchSizeOrigin, Config

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
class ModelDivisors:
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
    teacher: ModelDivisors | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """A size with the flags that determine it.

    Args:
        value: Its value, in completions unless it is a number of layers, ranks or steps.
        flags: The flags.
        factors: Text of each factor: `global_batch_size (96)`.
    """

    value: Fraction
    flags: tuple[str, ...]
    factors: tuple[str, ...]

    def __mul__(self, other: Size) -> Size:
        return Size(self.value * other.value, (*self.flags, *other.flags), (*self.factors, *other.factors))

    def __truediv__(self, other: Size) -> Size:
        return Size(self.value / other.value, (*self.flags, *other.flags), (f"{self.product} / {other.product}",))

    def with_text(self, text: str) -> Size:
        """Return the size with another text."""
        return replace(self, factors=(text,))

    def __str__(self) -> str:
        return self.equation if len(self.factors) > 1 else self.product

    @property
    def product(self) -> str:
        """Its factors: `micro_batch_size (2) x dp_size (world_size 4)`."""
        return " x ".join(self.factors)

    @property
    def equation(self) -> str:
        """Its factors and its value."""
        return f"{self.product} = {format_size(self.value)}"


def format_size(value: Fraction) -> str:
    """Return a number as text, with two decimals if it is no integer."""
    return str(value) if value.denominator == 1 else f"{float(value):.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeInputs:
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
    origins: Mapping[str, BatchSizeOrigin]
    aligned: bool
    needs_group: bool
    sequence_parallel: bool
    parallel: ParallelConfig
    model: ModelDivisors
    names: Mapping[str, str]

    @classmethod
    def from_config(cls, cfg: Config, model: ModelDivisors | None = None) -> BatchSizeInputs:
        """Return the sizes that a configuration sets, with defaults."""
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
        return cls(
            values={flag: value for flag, value in values.items() if value is not None},
            typed=frozenset(flag for flag in values if cfg.sources.get(flag, "default") != "default"),
            origins=cfg.origins,
            aligned=not cfg.batch.allow_unaligned_generation,
            needs_group=cfg.grpo.advantage_estimator not in NO_GROUP_NEEDED and bool(cfg.rewards.reward_funcs or not cfg.grpo.teacher_flag),
            sequence_parallel=cfg.parallel.sequence_parallel,
            parallel=cfg.parallel,
            model=model or ModelDivisors(),
            names=cfg.typed,
        )

    def with_value(self, flag: str, value: int) -> BatchSizeInputs:
        """Return a copy in which the user has set a flag.

        Args:
            value: Its value, in the unit in which it was typed.
        """
        return replace(self, values={**self.values, flag: value}, typed=self.typed | {flag})

    def counts(self, flag: str, unit: str) -> bool:
        """Return whether a size is set, and in the given unit."""
        return flag in self.values and flag in self.origins and self.origins[flag].unit == unit

    def name(self, flag: str) -> str:
        """Return the user's name of a flag."""
        return self.names.get(flag, flag)

    def describe(self, flag: str) -> str:
        """Return a flag with its value: `global_batch_size (96)`.

        A flag that was typed under another system's name shows its origin: `global_batch_size 96 (ppo_mini_batch_size 12 x rollout.n 8)`.
        """
        origin = self.origins.get(flag)
        if origin and origin.text and (origin.name != flag or origin.unit != "completions"):
            steps = f"{self.values[flag]} {origin.unit}"
            return f"{steps if origin.unit == 'micro-steps' else f'{flag} {self.count(flag)}'} ({origin.text})"
        mark = "" if flag in self.typed else ", the default"
        return f"{self.name(flag)} ({self.values[flag]}{mark})"

    def count(self, flag: str) -> int:
        """Return a size in completions, or in its native unit."""
        return self.values[flag] * (self.values[GROUP] if self.counts(flag, "prompts") else 1)

    def size(self, flag: str) -> Size:
        """Return the size that a flag sets."""
        flags = (flag, GROUP) if self.counts(flag, "prompts") else (flag,)
        return Size(Fraction(self.count(flag)), flags, (self.describe(flag),))

    def product(self, *flags: str) -> Size:
        """Return the product of flags, as text of those above 1: `pipeline_model_parallel_size (2) x context_parallel_size (2) = 4`.

        Args:
            flags: The flags; one that is not set counts as 1. The first is shown if none is above 1.
        """
        factors = [flag for flag in flags if self.values.get(flag, 1) != 1] or flags[:1]
        return Size(Fraction(prod(self.values[flag] for flag in factors)), flags, tuple(map(self.describe, factors)))

    def dp_size(self) -> Size:
        """Return the data-parallel size, with its derivation as text."""
        v = self.values
        cut = [flag for flag in (TP, PP, CP) if v[flag] != 1]
        size = Fraction(v[WORLD], v[TP] * v[PP] * v[CP])
        derivation = " / ".join(f"{self.name(flag)} {v[flag]}" for flag in (WORLD, *cut))
        return Size(size, (WORLD, TP, PP, CP), (f"dp_size ({derivation}{f' = {int(size)}' if cut else ''})",))


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedSizes:
    """Derived sizes, in completions; integers once every rule holds.

    Args:
        unit: Completions in one micro-step, over all DP ranks.
        micro: Completions in a micro-batch.
        accumulation: Micro-steps in an optimizer step.
    """

    unit: Size
    micro: Fraction
    global_batch: Size
    generation: Size
    accumulation: Fraction

    @classmethod
    def from_inputs(cls, inputs: BatchSizeInputs) -> DerivedSizes:
        """Compute the sizes by the definitions of docs/batching.md. Where two settings determine one size, the rules compare them."""
        v, size, dp = inputs.values, inputs.size, inputs.dp_size()
        # Without a micro-batch size there are the global batch and its accumulation.
        unit = size(MICRO) * dp if MICRO in v else size(GLOBAL) / size(ACCUMULATION)
        global_batch = size(GLOBAL) if GLOBAL in v else size(ACCUMULATION) * unit
        if GENERATION in v:
            generation = size(GENERATION)
        elif inputs.counts(STEPS, "micro-steps"):
            generation = size(STEPS) * unit
        else:
            steps = v.get(STEPS, 1)
            generation = Size(
                global_batch.value * steps,
                (*([STEPS] if STEPS in v else []), *global_batch.flags),
                (*global_batch.factors, *([inputs.describe(STEPS)] if steps != 1 else [])),
            )
        return cls(
            unit=unit,
            micro=unit.value / dp.value,
            global_batch=global_batch,
            generation=generation,
            accumulation=Fraction(v[ACCUMULATION]) if ACCUMULATION in v else global_batch.value / unit.value,
        )
