"""The size rules, each with its message. docs/batching.md states them in a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_grpo.run.config.rules.stages import ACCOUNTS, counted_layers
from megatron_grpo.run.config.settings import BatchSizeOrigin
from megatron_grpo.run.config.sizes import (
    ACCUMULATION,
    CP,
    EP,
    ETP,
    FIRST,
    GENERATION,
    GLOBAL,
    GROUP,
    LAST,
    MICRO,
    PP,
    STEPS,
    TP,
    VLLM_TP,
    VPP,
    WORLD,
    BatchSizeInputs,
    DerivedSizes,
    ModelDivisors,
    Size,
    format_size,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeRule:
    """One rule on sizes.

    Args:
        key: Name of the rule, unique.
        flags: Flags that take part in it.
        text: Sentence of a violation, without its end.
        ratio: Quotient of two sizes, which must be an integer.
        equal: Whether `ratio` must be 1 instead.
        holds: Further condition; without a `ratio` the only one.
        needs_removal: No value satisfies the rule; one of the flags must be removed.
        after: Keys of rules that must hold before this one is meaningful.
    """

    key: str
    flags: Sequence[str]
    text: str
    ratio: Fraction = Fraction(1)
    equal: bool = False
    holds: bool = True
    needs_removal: bool = False
    after: Sequence[str] = ()

    @property
    def broken(self) -> bool:
        """Whether the rule is violated."""
        return not self.holds or (self.ratio != 1 if self.equal else self.ratio.denominator != 1)

    @classmethod
    def require_multiple(
        cls, key: str, size: Size, divisor: Size, *, after: Sequence[str] = (), reason: str = "", remark: str = ""
    ) -> BatchSizeRule:
        """Return the rule that a size is a multiple of another one.

        Args:
            after: As in `BatchSizeRule`.
            reason: End of the sentence. Default: the division with its remainder, `96 = 1 x 64 + 32`.
        """
        top, bottom = int(size.value), max(1, int(divisor.value))  # below 1 if another rule is broken, whose sentence is said instead
        division = reason or f"{top} = {top // bottom} x {bottom} + {top % bottom}"
        text = f"{size} must be a multiple of {divisor}: {division}{remark}"
        return cls(key=key, flags=(*size.flags, *divisor.flags), ratio=size.value / divisor.value, after=after, text=text)

    @classmethod
    def require_equality(cls, key: str, size: Size, other: Size, *, after: Sequence[str]) -> BatchSizeRule:
        """Return the rule that two sizes, which both determine one, are equal.

        Args:
            after: As in `BatchSizeRule`.
        """
        text = f"{size} must equal {other}. Leave one of the two out, or make them equal"
        return cls(key=key, flags=(*size.flags, *other.flags), ratio=size.value / other.value, equal=True, after=after, text=text)


def minimum(inputs: BatchSizeInputs, flag: str) -> int:
    """Return the minimum of a flag. A group of one has nothing to compare with; one chunk per stage is not interleaved."""
    if flag == VPP:
        return 2
    return 2 if flag == GROUP and inputs.needs_group else 1


def lower_bounds(inputs: BatchSizeInputs) -> Iterator[BatchSizeRule]:
    """Yield the rules that every size is at least its minimum.

    They come first, and no other rule is checked while one is violated, because Python's -32 % 8 is 0.
    """
    for flag, value in inputs.values.items():
        yield _lower_bound(flag, value, minimum(inputs, flag), inputs.origins.get(flag))


_WHY = {
    VPP: " (leave it out for a plain pipeline)",
    GROUP: " (the advantage compares completions of one prompt; only advantage_estimator reinforce_plus_plus needs no group)",
}


def _lower_bound(flag: str, value: int, least: int, origin: BatchSizeOrigin | None) -> BatchSizeRule:
    origin_text = f" ({origin.text})" if origin and origin.text and origin.name != flag else ""
    text = f"{flag} must be at least {least}, not {value}{origin_text}{_WHY[flag] if least == 2 else ''}"
    return BatchSizeRule(key=f"least {flag}", flags=(flag,), holds=value >= least, text=text)


def rules(inputs: BatchSizeInputs) -> Iterator[BatchSizeRule]:
    """Yield every rule between sizes; assumes that `lower_bounds` hold."""
    v, sizes, world = inputs.values, DerivedSizes.from_inputs(inputs), inputs.size(WORLD)
    yield BatchSizeRule.require_multiple("ranks", world, inputs.product(TP, PP, CP))
    if v[ETP] * v[EP] > 1:  # otherwise "ranks" has said it
        yield BatchSizeRule.require_multiple("expert ranks", world, inputs.product(ETP, EP, PP))
    engine = inputs.size(VLLM_TP)
    yield BatchSizeRule.require_multiple("engine ranks", world, engine.with_text(f"{engine}, the ranks that share one engine"))
    yield from _global_batch_rules(inputs, sizes)
    yield from _rollout_rules(inputs, sizes)
    yield from _interleaving_rules(inputs, sizes)
    yield from _layer_rules(inputs)
    yield from _dense_rule(inputs)
    yield from _model_rules(inputs, inputs.model, "model")
    if (teacher := inputs.model.teacher) is not None:
        if teacher.num_layers is not None and teacher.num_layers != inputs.model.num_layers:
            yield _even_layers(inputs, "teacher layers", teacher.num_layers, f"the teacher's {teacher.num_layers} layers")
        yield from _model_rules(inputs, teacher, "teacher")
    yield BatchSizeRule(
        key="sequence parallel",
        flags=("sequence_parallel", TP),
        holds=v[TP] > 1 or not inputs.sequence_parallel,
        text=f"sequence_parallel needs {TP} above 1: a sequence is split over tensor-parallel ranks",
    )


def _global_batch_rules(inputs: BatchSizeInputs, sizes: DerivedSizes) -> Iterator[BatchSizeRule]:
    v, size, unit = inputs.values, inputs.size, sizes.unit
    if MICRO not in v:
        divisor = size(ACCUMULATION) * inputs.dp_size()
        reason = f"a micro-batch would hold {format_size(sizes.micro)} completions"
        yield BatchSizeRule.require_multiple("micro", size(GLOBAL), divisor.with_text(divisor.product), after=("ranks",), reason=reason)
    elif GLOBAL in v and ACCUMULATION in v:
        yield BatchSizeRule.require_equality("batch", size(GLOBAL), size(ACCUMULATION) * unit, after=("ranks",))
    elif GLOBAL in v:
        yield BatchSizeRule.require_multiple("batch", size(GLOBAL), unit, after=("ranks",))


def _rollout_rules(inputs: BatchSizeInputs, sizes: DerivedSizes) -> Iterator[BatchSizeRule]:
    v, size, rollout, global_batch = inputs.values, inputs.size, sizes.generation, sizes.global_batch
    in_micro_steps = inputs.counts(STEPS, "micro-steps")
    is_product = GENERATION in v or (GLOBAL in v and not in_micro_steps)
    named = rollout if GENERATION in v else rollout.with_text(f"a rollout of {rollout} completions")
    yield BatchSizeRule.require_multiple("group", named, size(GROUP), after=() if is_product else ("ranks",))
    if GENERATION not in v:
        return
    yield BatchSizeRule.require_multiple("window", rollout, sizes.unit.with_text(sizes.unit.equation), after=("ranks", "micro"))
    # An explicit size of a rollout, and the optimizer steps that train it.
    global_after = () if GLOBAL in v else ("ranks", "micro")
    if in_micro_steps:
        yield BatchSizeRule(
            key="conflict",
            holds=False,
            needs_removal=True,
            flags=(*rollout.flags, STEPS),
            text=f"{rollout} and {size(STEPS)} both set the size of a rollout. Keep one of them",
        )
    elif STEPS in v:
        yield BatchSizeRule.require_equality("steps", rollout, global_batch * size(STEPS), after=global_after)
    elif inputs.aligned:
        remark = " (allow_unaligned_generation true allows it)"
        yield BatchSizeRule.require_multiple("aligned", rollout, global_batch, after=global_after, remark=remark)


def _interleaving_rules(inputs: BatchSizeInputs, sizes: DerivedSizes) -> Iterator[BatchSizeRule]:
    v, chunks = inputs.values, inputs.name(VPP)
    if VPP not in v:
        return
    text = f"{inputs.describe(VPP)} needs {inputs.name(PP)} above 1: interleaving needs at least two stages"
    yield BatchSizeRule(key="chunks", flags=(VPP, PP), holds=v[PP] > 1, text=text)
    yield BatchSizeRule(
        key="interleave",
        ratio=sizes.accumulation / v[PP],
        after=("ranks", "batch", "micro", "chunks"),
        flags=(*sizes.global_batch.flags, *sizes.unit.flags, PP, VPP),
        text=(
            f"the interleaved schedule ({chunks} {v[VPP]}) needs a number of micro-steps per optimizer step that is a "
            f"multiple of {inputs.describe(PP)}; {sizes.global_batch} gives {format_size(sizes.accumulation)}"
        ),
    )


def _layer_rules(inputs: BatchSizeInputs) -> Iterator[BatchSizeRule]:
    """Yield the rules on how the model's layers divide into stages and chunks; the first and last stage may have sizes set separately."""
    v, stage_flag, own_layers = inputs.values, inputs.name(PP), inputs.model.num_layers
    if inputs.parallel.pipeline_model_parallel_layout:  # sets every stage (`rules.stages`)
        return
    if accounts := [name for name in ACCOUNTS if getattr(inputs.parallel, name)]:
        text = f"{' and '.join(accounts)} {'need' if len(accounts) > 1 else 'needs'} {stage_flag} above 1"
        yield BatchSizeRule(key="accounts", flags=(*accounts, PP), holds=v[PP] > 1, text=text)
    ends, chunks = [flag for flag in (FIRST, LAST) if flag in v], v.get(VPP, 1)
    if ends:
        text = f"{inputs.describe(ends[0])} needs {stage_flag} above 1"
        yield BatchSizeRule(key="ends", flags=(*ends, PP), holds=v[PP] > 1, text=text)
    if chunks > 1:
        for flag in ends:
            yield BatchSizeRule.require_multiple(f"chunked {flag}", inputs.size(flag), inputs.size(VPP))
    if not own_layers:
        return
    layers = counted_layers(inputs.parallel, own_layers)
    if not ends:
        ends_text = f" and {layers - own_layers} at its ends" if layers > own_layers else ""
        yield _even_layers(inputs, "layers", layers, f"the model's {own_layers} layers{ends_text}")
        return
    middle, stages = layers - sum(v[flag] for flag in ends), v[PP] - len(ends)
    yield BatchSizeRule(
        key="layers",
        flags=(*ends, PP, VPP),
        holds=middle % (stages * chunks) == 0 and middle > 0 if stages > 0 else middle == 0,
        after=("ends",),
        text=(
            f"the model's {layers} layers less {' and '.join(map(inputs.describe, ends))} leave {middle} for {stages} stages"
            f"{f' of {chunks} chunks' if chunks > 1 else ''}, which does not divide"
        ),
    )


def _even_layers(inputs: BatchSizeInputs, key: str, layers: int, noun: str) -> BatchSizeRule:
    """Return the rule that each chunk of each stage has the same number of layers."""
    return BatchSizeRule.require_multiple(key, Size(Fraction(layers), (), (noun,)), inputs.product(PP, VPP))


def _dense_rule(inputs: BatchSizeInputs) -> Iterator[BatchSizeRule]:
    """Yield the rule that expert parallelism needs a model with experts."""
    v, teacher = inputs.values, inputs.model.teacher
    if inputs.model.num_experts != 0 or (teacher is not None and teacher.num_experts != 0):
        return
    reason = "the model has no experts" if teacher is None else "neither the model nor the teacher has experts"
    text = f"{inputs.describe(EP)} and {inputs.describe(ETP)} must be 1: {reason}"
    yield BatchSizeRule(key="dense", flags=(EP, ETP), holds=v[EP] == 1 and v[ETP] == 1, text=text)


def _model_rules(inputs: BatchSizeInputs, model: ModelDivisors, name: str) -> Iterator[BatchSizeRule]:
    """Yield the rules on the experts and dimensions of one model.

    Args:
        name: Its name in messages: model or teacher.
    """
    v, experts = inputs.values, model.num_experts
    if experts:
        verb = "trains" if name == "model" else "scores"
        yield BatchSizeRule.require_multiple(
            f"{name} experts", Size(Fraction(experts), (), (f"the {name}'s {experts} experts",)), inputs.size(EP)
        )
        yield BatchSizeRule(
            key=f"{name} expert sequence",
            flags=(TP, "sequence_parallel"),
            holds=v[TP] == 1 or inputs.sequence_parallel,
            text=f"a mixture-of-experts {name} with {inputs.describe(TP)} {verb} with sequence_parallel true only",
        )
    for number, (flag, sentence) in enumerate(model.misfits(v[TP], v[EP], v[ETP]) if model.misfits else ()):
        text = sentence.replace("the model's", f"the {name}'s")
        yield BatchSizeRule(key=f"{name} {number}", flags=(flag,), holds=False, text=text, after=(f"{name} experts", "dense"))
