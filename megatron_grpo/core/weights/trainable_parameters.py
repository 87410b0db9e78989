"""Partial freezing under tuner_type full: the weights that train. Hugging Face names and regular expressions, no tensors, no torch.

The four settings are Megatron-SWIFT's: `freeze_parameters` (name prefixes) and `freeze_parameters_regex` (searched in a name) freeze
weights; `trainable_parameters` and `trainable_parameters_regex` unfreeze some of them. Megatron-SWIFT compares them with the names of one
rank's Megatron modules, whose layers count from 0 on every pipeline stage; here they are compared with the names in the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from megatron_grpo.core.base.errors import Problem
from megatron_grpo.core.weights.names import WeightEntry, entries_in_layers, outer_entries, tower_entries
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.core.weights.vision_towers import Part, part_of

if TYPE_CHECKING:
    from megatron_grpo.core.settings import TunerConfig

Rule = Callable[[str], bool]  # a tensor's Hugging Face name -> whether it trains


def trains(cfg: TunerConfig) -> Rule:
    """Return a function that tells whether a tensor of the model trains, by its Hugging Face name.

    Under tuner_type lora no tensor of the model trains, only its adapters.

    Args:
        cfg: Settings of the adapter and of frozen parts.
    """
    if cfg.tuner_type != "full":
        return lambda name: False
    frozen = _matcher(cfg.freeze_parameters, cfg.freeze_parameters_regex)
    is_selected = _matcher(cfg.trainable_parameters, cfg.trainable_parameters_regex)
    parts = frozen_parts(cfg)
    return lambda name: is_selected(name) or not (frozen(name) or part_of(name) in parts)


def frozen_parts(cfg: TunerConfig) -> set[Part]:
    """Return the parts that `freeze_llm`, `freeze_vit` and `freeze_aligner` freeze. Text models have only the first part.

    Args:
        cfg: Settings of the adapter and of frozen parts.
    """
    flags: dict[Part, bool] = {"llm": cfg.freeze_llm, "vit": cfg.freeze_vit, "aligner": cfg.freeze_aligner}
    return {part for part, is_frozen in flags.items() if is_frozen}


def trains_tower(cfg: TunerConfig, shape: ModelShape) -> bool:
    """Return whether any weight of the vision tower trains.

    Args:
        cfg: Settings of the adapter and of frozen parts.
        shape: Shape of the model.
    """
    return any(map(trains(cfg), (name for entry in tower_entries(shape) for name, _ in entry.hf)))


def trains_all(cfg: TunerConfig, shape: ModelShape) -> bool:
    """Return whether every weight of the model trains.

    Args:
        cfg: Settings of the adapter and of frozen parts.
        shape: Shape of the model.
    """
    is_whole = not cfg.freeze_llm and (shape.vision is None or not frozen_parts(cfg))
    return is_whole and cfg.tuner_type == "full" and not cfg.freeze_parameters and cfg.freeze_parameters_regex is None


def parameter_trains(names: Iterable[str], rule: Rule) -> bool:
    """Return whether a Megatron parameter trains.

    Args:
        names: Hugging Face tensors that it consists of.
        rule: Result of `trains`.

    Raises:
        ValueError: Only some of the tensors train. `problems` reports this beforehand.
    """
    train_flags = {rule(name) for name in names}
    if len(train_flags) != 1:
        raise ValueError(f"{', '.join(names)} are one parameter; a part of it cannot train separately")
    return train_flags.pop()


def problems(cfg: TunerConfig, shape: ModelShape) -> list[Problem]:
    """Return the problems of the freezing settings.

    Names that match nothing, that freeze everything, or that match only part of one Megatron parameter are problems. Regular expressions
    must be valid.

    Args:
        cfg: Settings of the adapter and of frozen parts.
        shape: Shape of the model.
    """
    if cfg.tuner_type != "full":
        return []
    parameters = [*outer_entries(shape), *entries_in_layers(shape)]
    selection_problems = [*_missing_parts(cfg, shape), *_unmatched_names(cfg, shape, parameters)]
    if selection_problems or trains_all(cfg, shape):
        return selection_problems
    rule = trains(cfg)
    if not any(rule(name) for entry in parameters if not entry.is_buffer for name, _ in entry.hf):
        flags = tuple(flag for flag in (*_freezing_parts(shape), "freeze_parameters", "freeze_parameters_regex") if getattr(cfg, flag))
        thaw = "" if shape.vision is None else " Use freeze_llm, freeze_vit or freeze_aligner false."
        return [Problem(flags=flags, message=f"{' and '.join(flags)} freeze every weight of the model. "
                                             f"Select weights to train with trainable_parameters.{thaw}")]  # fmt: skip
    return [*_parts(cfg, parameters, rule), *_biases_without_weights(cfg, parameters, rule)]


def _freezing_parts(shape: ModelShape) -> tuple[str, ...]:
    return ("freeze_llm", "freeze_vit", "freeze_aligner") if shape.vision else ()


def _missing_parts(cfg: TunerConfig, shape: ModelShape) -> Iterator[Problem]:
    """Yield problems of the freeze_* settings with a text model, which has one part that must train."""
    if shape.vision is not None:
        return
    if cfg.freeze_llm:
        message = f"freeze_llm true: {shape.architecture} is a text model, so no weight would train. Use freeze_llm false."
        yield Problem(flags=("freeze_llm",), nearest={"freeze_llm": [False]}, message=message)
    for flag in ("freeze_vit", "freeze_aligner"):
        if not getattr(cfg, flag):
            message = f"{flag} false: {shape.architecture} is a text model, without a vision tower. Use {flag} true."
            yield Problem(flags=(flag,), nearest={flag: [True]}, message=message)


def _matcher(prefixes: Iterable[str], pattern: str | None) -> Rule:
    beginnings, expression = tuple(prefixes), re.compile(pattern) if pattern is not None else None
    return lambda name: name.startswith(beginnings) or (expression is not None and expression.search(name) is not None)


def _unmatched_names(cfg: TunerConfig, shape: ModelShape, parameters: list[WeightEntry]) -> Iterator[Problem]:
    """Yield problems of names that match no tensor: what was to be frozen would silently train."""
    names = [name for entry in parameters for name, _ in entry.hf]
    for flag in ("freeze_parameters", "trainable_parameters"):
        for word in getattr(cfg, flag):
            if not any(name.startswith(word) for name in names):
                yield Problem(flags=(flag,), message=f"{flag}: no tensor of this model begins with {word}."
                                                     f"{_name_hint(word, shape, parameters)}")  # fmt: skip
        pattern = getattr(cfg, f"{flag}_regex")
        if pattern is not None and not any(map(re.compile(pattern).search, names)):
            example = f"Use Hugging Face names, such as {names[0]} and {parameters[len(parameters) // 2].hf[0][0]}."
            yield Problem(flags=(f"{flag}_regex",), message=f"{flag}_regex ({pattern}) matches no tensor of this model. {example}")


def _name_hint(word: str, shape: ModelShape, parameters: list[WeightEntry]) -> str:
    if shape.tied_embeddings and (word.startswith("lm_head") or "lm_head.weight".startswith(word)):
        return " The head is tied to the embedding (tie_word_embeddings): use model.embed_tokens.weight for both."
    hf_names = [name for entry in parameters if entry.megatron.startswith(word) for name, _ in entry.hf]
    if hf_names:
        remark = f" and {len(hf_names) - 3} more" if len(hf_names) > 3 else ""
        return f" This is a Megatron module name; the Hugging Face name is {', '.join(hf_names[:3])}{remark}."
    starts = dict.fromkeys(".".join(name.split(".")[:2]) for entry in parameters for name, _ in entry.hf)
    return f" Names begin with {', '.join(starts)}."


def _parts(cfg: TunerConfig, parameters: list[WeightEntry], rule: Rule) -> Iterator[Problem]:
    mixed = [entry for entry in parameters if len({rule(name) for name, _ in entry.hf}) > 1]
    if not mixed:
        return
    first = mixed[0]
    trained, frozen = (", ".join(name for name, _ in first.hf if rule(name) is is_trained) for is_trained in (True, False))
    remark = f" {len(mixed) - 1} more are split in this way." if len(mixed) > 1 else ""
    message = (
        f"{frozen} would be frozen and {trained} would train, but Megatron stores them as one parameter ({first.megatron}), which trains "
        f"completely or not at all.{remark} Select all of them, or none."
    )
    yield Problem(flags=_flags_given(cfg), message=message)


def _biases_without_weights(cfg: TunerConfig, parameters: list[WeightEntry], rule: Rule) -> Iterator[Problem]:
    """Yield a problem where linear_qkv's bias would train while its weight is frozen.

    Megatron-Core's column-parallel linear then gives the bias inside it no gradient.
    """
    by_name = {entry.megatron: [name for name, _ in entry.hf] for entry in parameters}
    for name, bias in by_name.items():
        weight = by_name.get(name.removesuffix(".bias") + ".weight")
        if name.endswith(".linear_qkv.bias") and weight and rule(bias[0]) and not rule(weight[0]):
            yield Problem(flags=_flags_given(cfg), message=f"{', '.join(bias)} would train while {', '.join(weight)} are frozen: "
                                                     "Megatron-Core gives that bias no gradient. Freeze both, or neither.")  # fmt: skip
            return


def _flags_given(cfg: TunerConfig) -> tuple[str, ...]:
    flags = ("freeze_parameters", "freeze_parameters_regex", "trainable_parameters", "trainable_parameters_regex")
    return tuple(flag for flag in flags if getattr(cfg, flag))
