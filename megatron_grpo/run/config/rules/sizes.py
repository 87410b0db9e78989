"""The size rules, each with its message. docs/batching.md states them in a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from megatron_grpo.core.batching.sizes import (
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
    DerivedSizes,
    Fraction,
    SizeFormatter,
    SizeInputs,
    SizeModel,
    SizeRule,
    cross,
    derive,
    remainder,
)
from megatron_grpo.core.settings import SizeOrigin
from megatron_grpo.run.config.rules.stages import ACCOUNTS, counted_layers


def minimum(inputs: SizeInputs, flag: str) -> int:
    """Return the minimum of a flag. A group of one has nothing to compare with; one chunk per stage is not interleaved.

    Args:
        inputs: The typed sizes.
        flag: The flag.
    """
    if flag == VPP:
        return 2
    return 2 if flag == GROUP and inputs.needs_group else 1


def lower_bounds(inputs: SizeInputs) -> Iterator[SizeRule]:
    """Yield the rules that every size is at least its minimum.

    They come first, and no other rule is checked while one is violated, because Python's -32 % 8 is 0.

    Args:
        inputs: The typed sizes.
    """
    for flag, value in inputs.values.items():
        yield _lower_bound(flag, value, minimum(inputs, flag), inputs.origins.get(flag))


_WHY = {
    VPP: " (leave it out for a plain pipeline)",
    GROUP: " (the advantage compares completions of one prompt; only advantage_estimator reinforce_plus_plus needs no group)",
}


def _lower_bound(flag: str, value: int, least: int, origin: SizeOrigin | None) -> SizeRule:
    origin_text = f" ({origin.text})" if origin and origin.text and origin.name != flag else ""
    text = f"{flag} must be at least {least}, not {value}{origin_text}{_WHY[flag] if least == 2 else ''}"
    return SizeRule(key=f"least {flag}", flags=(flag,), holds=value >= least, text=lambda: text)


def rules(inputs: SizeInputs) -> Iterator[SizeRule]:
    """Yield every rule between sizes; assumes that `lower_bounds` hold.

    Args:
        inputs: The typed sizes.
    """
    v, d = inputs.values, derive(inputs)
    words = SizeFormatter(inputs, d)
    yield SizeRule(
        key="ranks",
        flags=(WORLD, TP, PP, CP),
        ratio=(v[WORLD], d.ranks_per_replica),
        text=lambda: f"{words.flag(WORLD)} must be a multiple of {words.product((TP, PP, CP))}: {remainder(v[WORLD], d.ranks_per_replica)}",
    )
    expert = v[ETP] * v[EP] * v[PP]
    if v[ETP] * v[EP] > 1:  # otherwise "ranks" has said it
        yield SizeRule(
            key="expert ranks",
            flags=(WORLD, ETP, EP, PP),
            ratio=(v[WORLD], expert),
            text=lambda: f"{words.flag(WORLD)} must be a multiple of {words.product((ETP, EP, PP))}: {remainder(v[WORLD], expert)}",
        )
    yield SizeRule(
        key="engine ranks",
        flags=(WORLD, VLLM_TP),
        ratio=(v[WORLD], v[VLLM_TP]),
        text=lambda: (
            f"{words.flag(WORLD)} must be a multiple of {words.flag(VLLM_TP)}, the ranks that share one engine: "
            f"{remainder(v[WORLD], v[VLLM_TP])}"
        ),
    )
    yield from _global_batch_rules(inputs, d, words)
    yield from _rollout_rules(inputs, d, words)
    yield from _interleaving_rules(inputs, d, words)
    yield from _layer_rules(inputs, words)
    yield from _dense_rule(inputs, words)
    yield from _model_rules(inputs, words, inputs.model, "model")
    if inputs.model.teacher is not None:
        yield from _teacher_layer_rule(inputs, words, inputs.model.teacher)
        yield from _model_rules(inputs, words, inputs.model.teacher, "teacher")
    yield SizeRule(
        key="sequence parallel",
        flags=("sequence_parallel", TP),
        holds=inputs.values[TP] > 1 or not inputs.sequence_parallel,
        text=lambda: f"sequence_parallel needs {TP} above 1: a sequence is split over tensor-parallel ranks",
    )


def _global_batch_rules(inputs: SizeInputs, d: DerivedSizes, words: SizeFormatter) -> Iterator[SizeRule]:
    v, unit, glob = inputs.values, d.unit, d.global_batch
    if MICRO not in v:
        yield SizeRule(
            key="micro",
            flags=(*inputs.flags(GLOBAL), ACCUMULATION, WORLD, TP, PP, CP),
            ratio=(d.micro.top, d.micro.bottom),
            after=("ranks",),
            text=lambda: (
                f"{words.flag(GLOBAL)} must be a multiple of "
                f"{words.flag(ACCUMULATION)} x {words.dp()}: a micro-batch would hold {d.micro} completions"
            ),
        )
    elif GLOBAL in v and ACCUMULATION in v:
        yield SizeRule(
            key="batch",
            equal=True,
            ratio=cross(glob, Fraction(v[ACCUMULATION] * unit.top, unit.bottom)),
            after=("ranks",),
            flags=(*inputs.flags(GLOBAL), ACCUMULATION, *words.unit_flags()),
            text=lambda: f"{words.flag(GLOBAL)} must equal {words.accumulated()}. Leave one of the two out, or make them equal",
        )
    elif GLOBAL in v:
        yield SizeRule(
            key="batch",
            ratio=cross(glob, unit),
            after=("ranks",),
            flags=(*inputs.flags(GLOBAL), *words.unit_flags()),
            text=lambda: f"{words.flag(GLOBAL)} must be a multiple of {words.unit()}: {remainder(glob.as_int(), unit.as_int())}",
        )


def _rollout_rules(inputs: SizeInputs, d: DerivedSizes, words: SizeFormatter) -> Iterator[SizeRule]:
    v, unit, gen = inputs.values, d.unit, d.generation
    is_product = GENERATION in v or (GLOBAL in v and not inputs.counts(STEPS, "micro-steps"))
    yield SizeRule(
        key="group",
        ratio=cross(gen, Fraction(d.group)),
        flags=(*words.generation_flags(), GROUP),
        after=() if is_product else ("ranks",),
        text=lambda: f"{words.generation()} must be a multiple of {words.flag(GROUP)}: {remainder(gen.as_int(), d.group)}",
    )
    if GENERATION not in v:
        return
    yield SizeRule(
        key="window",
        ratio=cross(gen, unit),
        after=("ranks", "micro"),
        flags=(*words.generation_flags(), *words.unit_flags()),
        text=lambda: f"{words.flag(GENERATION)} must be a multiple of {words.unit()}: {remainder(gen.as_int(), unit.as_int())}",
    )
    yield from _rollout_of_steps_rules(inputs, d, words)


def _rollout_of_steps_rules(inputs: SizeInputs, d: DerivedSizes, words: SizeFormatter) -> Iterator[SizeRule]:
    """Yield the rules between an explicit rollout size and the optimizer steps that train it."""
    v, glob, gen = inputs.values, d.global_batch, d.generation
    global_after = () if GLOBAL in v else ("ranks", "micro")
    if inputs.counts(STEPS, "micro-steps"):
        yield SizeRule(
            key="conflict",
            holds=False,
            needs_removal=True,
            flags=(*inputs.flags(GENERATION), STEPS),
            text=lambda: f"{words.flag(GENERATION)} and {words.flag(STEPS)} both set the size of a rollout. Keep one of them",
        )
    elif STEPS in v:
        of_steps = Fraction(glob.top * v[STEPS], glob.bottom)
        yield SizeRule(
            key="steps",
            equal=True,
            ratio=cross(gen, of_steps),
            after=global_after,
            text=lambda: (
                f"{words.flag(GENERATION)} must equal {words.rollout_of_steps(of_steps)}. Leave one of the two out, or make them equal"
            ),
            flags=(*words.generation_flags(), *words.global_flags(), STEPS),
        )
    elif inputs.aligned:
        yield SizeRule(
            key="aligned",
            ratio=cross(gen, glob),
            after=global_after,
            flags=(*words.generation_flags(), *words.global_flags()),
            text=lambda: (
                f"{words.flag(GENERATION)} must be a multiple of {words.global_batch()}: {remainder(gen.as_int(), glob.as_int())} "
                "(allow_unaligned_generation true allows it)"
            ),
        )


def _interleaving_rules(inputs: SizeInputs, d: DerivedSizes, words: SizeFormatter) -> Iterator[SizeRule]:
    v = inputs.values
    if VPP not in v:
        return
    yield SizeRule(
        key="chunks",
        flags=(VPP, PP),
        holds=v[PP] > 1,
        text=lambda: f"{words.flag(VPP)} needs {words.name(PP)} above 1: interleaving needs at least two stages",
    )
    yield SizeRule(
        key="interleave",
        ratio=(d.accumulation.top, d.accumulation.bottom * v[PP]),
        after=("ranks", "batch", "micro", "chunks"),
        flags=(*words.global_flags(), *words.unit_flags(), PP, VPP),
        text=lambda: (
            f"the interleaved schedule ({words.name(VPP)} {v[VPP]}) needs a number of micro-steps per optimizer step that is a "
            f"multiple of {words.flag(PP)}; {words.global_batch()} gives {d.accumulation}"
        ),
    )


def _layer_rules(inputs: SizeInputs, words: SizeFormatter) -> Iterator[SizeRule]:
    """Yield the rules on how the model's layers divide into stages and chunks; the first and last stage may have sizes set separately."""
    v, layers = inputs.values, inputs.model.num_layers
    if inputs.parallel.pipeline_model_parallel_layout:  # sets every stage (`batching.stages`)
        return
    if accounts := [name for name in ACCOUNTS if getattr(inputs.parallel, name)]:
        text = f"{' and '.join(accounts)} {'need' if len(accounts) > 1 else 'needs'} {words.name(PP)} above 1"
        yield SizeRule(key="accounts", flags=(*accounts, PP), holds=v[PP] > 1, text=lambda: text)
    model_layers = layers
    layers = counted_layers(inputs.parallel, layers) if layers else layers
    noun = f"the model's {model_layers} layers" + (
        f" and {layers - model_layers} at its ends" if layers and model_layers and layers > model_layers else ""
    )
    ends, chunks = [flag for flag in (FIRST, LAST) if flag in v], v.get(VPP, 1)
    if ends:
        yield SizeRule(key="ends", flags=(*ends, PP), holds=v[PP] > 1, text=lambda: f"{words.flag(ends[0])} needs {words.name(PP)} above 1")
    if chunks > 1:
        yield from (_chunked_end(flag, v[flag], chunks, words) for flag in ends)
    if not layers:
        return
    if not ends:
        yield _even_layers("layers", noun, layers, v, words)
        return
    middle, stages = layers - sum(v[flag] for flag in ends), v[PP] - len(ends)
    is_divisible = middle % (stages * chunks) == 0 and middle > 0 if stages > 0 else middle == 0
    yield SizeRule(
        key="layers",
        flags=(*ends, PP, VPP),
        holds=is_divisible,
        after=("ends",),
        text=lambda: (
            f"the model's {layers} layers less {' and '.join(words.flag(flag) for flag in ends)} leave {middle} for {stages} stages"
            f"{f' of {chunks} chunks' if chunks > 1 else ''}, which does not divide"
        ),
    )


def _even_layers(key: str, noun: str, layers: int, v: Mapping[str, int], words: SizeFormatter) -> SizeRule:
    """Return the rule that each chunk of each stage has the same number of layers.

    Args:
        noun: The owner of the layers and their number, for the message.
    """
    chunks = v.get(VPP, 1)
    return SizeRule(
        key=key,
        flags=(PP, VPP),
        ratio=(layers, v[PP] * chunks),
        text=lambda: (
            f"{noun} must be a multiple of {words.product((PP, VPP) if chunks > 1 else (PP,))}: {remainder(layers, v[PP] * chunks)}"
        ),
    )


def _chunked_end(flag: str, layers: int, chunks: int, words: SizeFormatter) -> SizeRule:
    return SizeRule(
        key=f"chunked {flag}",
        flags=(flag, VPP),
        ratio=(layers, chunks),
        text=lambda: f"{words.flag(flag)} must be a multiple of {words.flag(VPP)}: {remainder(layers, chunks)}",
    )


def _teacher_layer_rule(inputs: SizeInputs, words: SizeFormatter, teacher: SizeModel) -> Iterator[SizeRule]:
    layers = teacher.num_layers
    if layers is not None and layers != inputs.model.num_layers:
        yield _even_layers("teacher layers", f"the teacher's {layers} layers", layers, inputs.values, words)


def _dense_rule(inputs: SizeInputs, words: SizeFormatter) -> Iterator[SizeRule]:
    """Yield the rule that expert parallelism needs a model with experts."""
    v, teacher = inputs.values, inputs.model.teacher
    if inputs.model.num_experts != 0 or (teacher is not None and teacher.num_experts != 0):
        return
    reason = "the model has no experts" if teacher is None else "neither the model nor the teacher has experts"
    yield SizeRule(
        key="dense",
        flags=(EP, ETP),
        holds=v[EP] == 1 and v[ETP] == 1,
        text=lambda: f"{words.flag(EP)} and {words.flag(ETP)} must be 1: {reason}",
    )


def _model_rules(inputs: SizeInputs, words: SizeFormatter, model: SizeModel, name: str) -> Iterator[SizeRule]:
    """Yield the rules on the experts and dimensions of one model.

    Args:
        name: Its name in messages: model or teacher.
    """
    v, experts = inputs.values, model.num_experts
    if experts:
        verb = "trains" if name == "model" else "scores"
        yield SizeRule(
            key=f"{name} experts",
            flags=(EP,),
            ratio=(experts, v[EP]),
            text=lambda: f"the {name}'s {experts} experts must be a multiple of {words.flag(EP)}: {remainder(experts, v[EP])}",
        )
        yield SizeRule(
            key=f"{name} expert sequence",
            flags=(TP, "sequence_parallel"),
            holds=v[TP] == 1 or inputs.sequence_parallel,
            text=lambda: f"a mixture-of-experts {name} with {words.flag(TP)} {verb} with sequence_parallel true only",
        )
    for number, (flag, sentence) in enumerate(model.misfits(v[TP], v[EP], v[ETP]) if model.misfits else ()):
        text = sentence.replace("the model's", f"the {name}'s")
        yield SizeRule(key=f"{name} {number}", flags=(flag,), holds=False, text=partial(str, text), after=(f"{name} experts", "dense"))
