"""Every rule that the sizes must obey, as arithmetic over what the user typed, in any dialect.

A size such as the global batch is a product of typed numbers (`policy_mini_batch_size x n_samples_per_prompt`) or a fraction
of two products (`micro_batch_size x world_size / (tp x pp x cp)`). Each rule says that one whole number is a multiple of
another, cross-multiplied so that both are products of typed numbers. That is what lets `nearest` solve for any one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_grpo.config.config import Config, ParallelConfig

WORLD, TP, PP, CP = "world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
VPP, EP, ETP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
VLLM_TP, FIRST, LAST = "vllm_tensor_parallel_size", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
PARALLEL = (WORLD, TP, PP, CP, VPP, EP, ETP, FIRST, LAST)
NO_GROUP_NEEDED = ("reinforce_plus_plus",)  # its baseline is the mean of the whole rollout

# What a size is made of: the product of the values of these flags.
Product = Sequence[str]
NATIVE: Mapping[str, Product] = {
    "micro": ("micro_batch_size",),
    "global": ("global_batch_size",),
    "accumulation": ("gradient_accumulation_steps",),
    "generation": ("generation_batch_size",),
    "steps": ("steps_per_generation",),
    "group": ("num_generations",),
    "passes": ("num_iterations",),
}
DEFAULT_GLOBAL_BATCH_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What the rules need to know of a model; None where it is not known. num_experts 0: a dense model.

    misfits: (tp, ep, etp) -> (flag, sentence) for every division of the model over ranks that leaves a rest. teacher: a second model in the
    same layout, whose layers are dealt out evenly where it has not as many as this one.
    """

    num_layers: int | None = None
    num_experts: int | None = None
    misfits: Callable[[int, int, int], Sequence[tuple[str, str]]] | None = None
    teacher: Model | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedSizes:
    """The numbers that sizes are made of, by flag name, and how the dialect composes them."""

    values: Mapping[str, int]  # a flag that is left out is absent
    products: Mapping[str, Product]
    typed: frozenset[str]  # of those flags, the ones that the user gave
    aligned: bool
    needs_group: bool
    sequence_parallel: bool
    parallel: ParallelConfig  # how layers are dealt out, besides numbers
    model: Model
    names: Mapping[str, str]  # what the user calls a flag, where it is an alias

    def with_value(self, flag: str, value: int) -> TypedSizes:
        return replace(self, values={**self.values, flag: value}, typed=self.typed | {flag})

    def given(self, size: str) -> bool:
        return all(flag in self.values for flag in self.products.get(size, ("absent",)))

    def product(self, size: str) -> int:
        result = 1
        for flag in self.products[size]:
            result *= self.values[flag]
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`multiple` must be a whole multiple of `divisor` (equal to it where `equal`), or, without them, `holds` must be true.

    after: rules that must hold before this one means anything. needs_removal: no value mends it, one of the flags has to go.
    """

    key: str
    flags: Sequence[str]
    text: Callable[[], str]
    multiple: int = 0
    divisor: int = 1
    equal: bool = False
    holds: bool = True
    needs_removal: bool = False
    after: Sequence[str] = ()

    @property
    def broken(self) -> bool:
        if self.equal:
            return self.multiple != self.divisor or not self.holds
        return not self.holds or self.divisor == 0 or self.multiple % self.divisor != 0


def inputs_of(cfg: Config, model: Model | None = None) -> TypedSizes:
    """The inputs that a configuration holds."""
    products = cfg.products or NATIVE
    values: dict[str, int | None] = {name: getattr(cfg.parallel, name) for name in PARALLEL}
    values[WORLD] = values[WORLD] if values[WORLD] is not None else 1
    values[VLLM_TP] = cfg.rollout.vllm_tensor_parallel_size
    typed = {name for name in values if cfg.sources.get(name, "default") != "default"}
    own = {flag for flags in products.values() for flag in flags}
    native = {flag for flags in NATIVE.values() for flag in flags}
    for flag in own:
        values[flag] = cfg.foreign[flag] if flag in cfg.foreign else getattr(cfg.batch, flag, None) if flag in native else None
        if cfg.sources.get(flag, "default") != "default":
            typed.add(flag)
    whole_step, parts = products.get("global", ()), products.get("accumulation", ())
    if whole_step and parts and values[whole_step[0]] is None and values[parts[0]] is None:
        values[whole_step[0]] = DEFAULT_GLOBAL_BATCH_SIZE
    micro = products["micro"][0]
    if values[micro] is None and not (whole_step and values[whole_step[0]] and parts and values[parts[0]]):
        values[micro] = 1
    if products == NATIVE and values["generation_batch_size"] is None and values["steps_per_generation"] is None:
        values["steps_per_generation"] = 1
    return TypedSizes(
        values={flag: value for flag, value in values.items() if value is not None},
        products=products,
        typed=frozenset(typed),
        aligned=not cfg.batch.allow_unaligned_generation,
        needs_group=cfg.grpo.advantage_estimator not in NO_GROUP_NEEDED and bool(cfg.rewards.reward_funcs or not cfg.grpo.teacher_flag),
        sequence_parallel=cfg.parallel.sequence_parallel,
        parallel=cfg.parallel,
        model=model or Model(),
        names=cfg.typed,
    )


@dataclass(frozen=True, slots=True)
class Fraction:
    """A positive fraction that is not reduced, so that its terms stay products of typed numbers."""

    top: int
    bottom: int = 1

    def whole(self) -> int:
        return self.top // self.bottom

    def __str__(self) -> str:
        return str(self.whole()) if self.top % self.bottom == 0 else f"{self.top / self.bottom:.2f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """The sizes in native terms, in completions; whole numbers once every rule holds."""

    ranks_per_replica: int
    unit: Fraction  # completions in one micro-step, over all DP ranks
    micro: Fraction
    global_batch: Fraction
    generation: Fraction
    accumulation: Fraction
    group: int
    passes: int


def derive(inputs: TypedSizes) -> Derived:
    """Sizes by the definitions of docs/batching.md. Where two ways to say one size are given, the rules compare them."""
    v = inputs.values
    replica = v[TP] * v[PP] * v[CP]
    if inputs.given("micro"):
        unit = Fraction(inputs.product("micro") * v[WORLD], replica)
        micro = Fraction(inputs.product("micro"))
    else:  # a vocabulary that gives the global batch and its accumulation instead
        unit = Fraction(inputs.product("global"), inputs.product("accumulation"))
        micro = Fraction(inputs.product("global") * replica, inputs.product("accumulation") * v[WORLD])
    if inputs.given("global"):
        global_batch = Fraction(inputs.product("global"))
    else:
        global_batch = Fraction(inputs.product("accumulation") * unit.top, unit.bottom)
    if inputs.given("generation"):
        generation = Fraction(inputs.product("generation"))
    elif inputs.given("window"):
        generation = Fraction(inputs.product("window") * unit.top, unit.bottom)
    else:
        steps = inputs.product("steps") if inputs.given("steps") else 1
        generation = Fraction(global_batch.top * steps, global_batch.bottom)
    accumulation = (
        Fraction(inputs.product("accumulation"))
        if inputs.given("accumulation")
        else Fraction(global_batch.top * unit.bottom, global_batch.bottom * unit.top)
    )
    return Derived(
        ranks_per_replica=replica,
        unit=unit,
        micro=micro,
        global_batch=global_batch,
        generation=generation,
        accumulation=accumulation,
        group=inputs.product("group"),
        passes=inputs.product("passes"),
    )
