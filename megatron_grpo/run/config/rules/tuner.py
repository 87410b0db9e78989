"""Tuner settings that do not go together, and names of frozen and trained weights that do not suit the model. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from megatron_grpo.core.base.errors import Problem
from megatron_grpo.core.settings import TunerConfig
from megatron_grpo.core.weights.names import WeightEntry, entries_in_layers, outer_entries
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.core.weights.trainable_parameters import trains, trains_all
from megatron_grpo.run.config.read import format_value
from megatron_grpo.run.config.rules import Rule, broken_rules, changed, make_namespace, typed_fields
from megatron_grpo.run.config.settings import Config

_TOWER = ("freeze_vit", "freeze_aligner")
_FULL_SETTINGS = ("freeze_llm", "freeze_parameters", "freeze_parameters_regex", "trainable_parameters", "trainable_parameters_regex")
_PATTERNS = ("target_regex", "freeze_parameters_regex", "trainable_parameters_regex", "rank_pattern", "alpha_pattern")
# Modules that have adapters in other systems, by their names there and in Megatron.
NO_ADAPTER: Mapping[str, str] = {
    **dict.fromkeys(("all-router", "router", "gate"), "Megatron-Core's router is not a linear layer, and vLLM does not support adapters on "
                                                      "routers"),
    **dict.fromkeys(("all-embedding", "embed_tokens", "word_embeddings", "embedding"), "vLLM does not sample from adapters on embeddings"),
    **dict.fromkeys(("lm_head", "output_layer"), "log-probs are computed without adapters on the head"),
}  # fmt: skip


def are_names_readable(cfg: Config) -> bool:
    """Return whether typed names and regular expressions are valid, so that they can be compared with a model's names."""
    return not any(broken_rules((*PATTERNS, *TARGETS), make_namespace(cfg)))


def _unreadable(c: SimpleNamespace) -> Iterator[dict[str, Any]]:
    for name in _PATTERNS:
        value = getattr(c, name)
        for pattern in value if isinstance(value, dict) else [value] if value is not None else []:
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                yield {"name": name, "pattern": pattern, "error": error}


def _listed(c: SimpleNamespace, names: Iterable[str]) -> dict[str, Any] | None:
    """Return the message fields of one problem about several settings."""
    names = list(names)
    listed = ", ".join(f"{name} ({format_value(getattr(c, name))})" for name in names)
    words = ("these are", "them") if len(names) > 1 else ("this is", "it")
    return {"names": " ".join(names), "told": listed, "these": words[0], "them": words[1]} if names else None


def _changed(c: SimpleNamespace, *names: str) -> list[str]:
    return [setting["name"] for setting in changed(c, *names)]


def _find_lora_settings(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message fields of a problem for settings of LoRA that are changed, or typed with a value other than off."""
    names = [f.name for f in fields(TunerConfig) if f.name not in ("tuner_type", *_TOWER, *_FULL_SETTINGS)]
    by_hand = names if c.dialect else [setting["name"] for setting in typed_fields(c, *names)]
    typed_names = [name for name in by_hand if name in c.cfg.typed and getattr(c, name)]
    return _listed(c, dict.fromkeys([*_changed(c, *names), *typed_names]))


def _unfrozen_without_freezing(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message fields of a problem for weights excluded from freezing if nothing is frozen.

    A vision tower is frozen by default.
    """
    names_tower = any("visual" in word for word in (*c.trainable_parameters, c.trainable_parameters_regex or ""))
    if names_tower or changed(c, "freeze_llm", "freeze_parameters", "freeze_parameters_regex"):
        return None
    return _listed(c, _changed(c, "trainable_parameters", "trainable_parameters_regex"))


def _moved_tower(c: SimpleNamespace) -> dict[str, Any] | None:
    names = _changed(c, *_TOWER)
    flags, use = (" and ".join(f"{name} {value}" for name in names) for value in ("false", "true"))
    return {"names": " ".join(names), "told": flags, "use": use, "near": {name: [True] for name in names}} if names else None


def _make_rate_rules(rate: str, freeze: str) -> tuple[Rule, Rule]:
    """Return the rules for the learning rate of a part that does not train."""
    return (
        Rule(
            f"{rate} {freeze}",
            lambda c: getattr(c, rate) is not None and getattr(c, freeze) and c.tuner_type == "full",
            f"{rate} ({{{rate}}}) has no effect with {freeze} true. Use {freeze} false, or omit {rate}.",
            {freeze: [False], rate: ["none"]},
        ),
        Rule(
            rate,
            lambda c: getattr(c, rate) is not None and c.tuner_type == "lora",
            f"{rate} ({{{rate}}}) has no effect with tuner_type lora, which trains adapters of the text model only. Omit {rate}.",
            {rate: ["none"]},
        ),
    )


# fmt: off
PATTERNS = (
    Rule("{name}", lambda c: list(_unreadable(c)), "{name} ({pattern}) is not a regular expression: {error}."),
)

TARGETS = (
    Rule("target_regex target_modules", lambda c: c.target_regex is not None and changed(c, "target_modules")
         and _listed(c, ("target_regex", "target_modules")),
         "{told} both select the layers with an adapter. Use one of them.", {"target_regex": ["none"]}),
    Rule("target_modules", lambda c: [{"name": name, "why": NO_ADAPTER[end]} for name in c.target_modules
         if (end := name.rpartition(".")[2]) in NO_ADAPTER],
         "target_modules: adapters on {name} are not supported: {why}. Use all-linear, or names of linear layers of attention and MLPs."),
)

_FULL = (
    Rule("tuner_type {names}", _find_lora_settings,
         "{told}: only supported with tuner_type lora; tuner_type is full. Add tuner_type lora, or omit {them}.",
         {"tuner_type": ["lora"]}),
    Rule("{names}", _unfrozen_without_freezing,
         "{told}: no effect, because no weights are frozen. Freeze the others, for example with freeze_parameters model lm_head."),
)

_LORA = (
    Rule("{names} tuner_type", _moved_tower,
         "{told}: not supported with tuner_type lora; the adapter that is synced to vLLM has no weights of the vision tower. Use {use}, or "
         "tuner_type full.",
         lambda c: {**c.near, "tuner_type": ["full"]}),
    Rule("tuner_type {names}", lambda c: _listed(c, _changed(c, *_FULL_SETTINGS)),
         "{told}: only supported with tuner_type full; tuner_type lora freezes all weights of the model and trains adapters. Omit it; to "
         "leave out layers, use exclude_modules.", {"tuner_type": ["full"]}),
    *TARGETS,
    Rule("lora_dtype torch_dtype", lambda c: c.lora_dtype is not None and c.lora_dtype != c.torch_dtype,
         "lora_dtype ({lora_dtype}) differs from torch_dtype ({torch_dtype}): adapters have the dtype of the model, so that vLLM and the "
         "trainer compute with the same values; the optimizer keeps float32. Omit lora_dtype.",
         lambda c: {"lora_dtype": ["none", c.torch_dtype], "torch_dtype": [c.lora_dtype]}),
    Rule("merge_lora export_hf", lambda c: c.merge_lora and not c.export_hf,
         "merge_lora has no effect with export_hf false. Omit merge_lora, or use export_hf true.",
         {"merge_lora": [False], "export_hf": [True]}),
    Rule("ref_adapters beta", lambda c: c.ref_adapters is not None and c.beta == 0,
         "ref_adapters ({ref_adapters}) is the reference of the KL term, which is disabled with beta 0. Use a beta above 0, for example "
         "0.04, or omit it.", {"ref_adapters": ["none"]}),
)
# fmt: on


def tuner_rules(cfg: Config) -> tuple[Rule, ...]:
    """Return the rules that apply to this tuner."""
    rate_rules = (*_make_rate_rules("vit_lr", "freeze_vit"), *_make_rate_rules("aligner_lr", "freeze_aligner"))
    return (*PATTERNS, *rate_rules, *(_LORA if cfg.tuner.tuner_type == "lora" else _FULL))


def freezing_problems(cfg: TunerConfig, shape: ModelShape) -> list[Problem]:
    """Return the problems of the freezing settings.

    Names that match nothing, that freeze everything, or that match only part of one Megatron parameter are problems. Regular expressions
    must be valid.
    """
    if cfg.tuner_type != "full":
        return []
    parameters = [*outer_entries(shape), *entries_in_layers(shape)]
    selection_problems = [*_missing_parts(cfg, shape), *_unmatched_names(cfg, shape, parameters)]
    if selection_problems or trains_all(cfg, shape):
        return selection_problems
    rule = trains(cfg)
    if not any(rule(name) for entry in parameters if not entry.is_buffer for name, _ in entry.hf):
        parts = ("freeze_llm", "freeze_vit", "freeze_aligner") if shape.vision else ()
        flags = tuple(flag for flag in (*parts, "freeze_parameters", "freeze_parameters_regex") if getattr(cfg, flag))
        thaw = "" if shape.vision is None else " Use freeze_llm, freeze_vit or freeze_aligner false."
        return [Problem(flags=flags, message=f"{' and '.join(flags)} freeze every weight of the model. "
                                             f"Select weights to train with trainable_parameters.{thaw}")]  # fmt: skip
    return [*_parts(cfg, parameters, rule), *_biases_without_weights(cfg, parameters, rule)]


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


def _parts(cfg: TunerConfig, parameters: list[WeightEntry], rule: Callable[[str], bool]) -> Iterator[Problem]:
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


def _biases_without_weights(cfg: TunerConfig, parameters: list[WeightEntry], rule: Callable[[str], bool]) -> Iterator[Problem]:
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
