"""Tuner settings that do not go together, as far as this does not depend on the model (for that, see `weights`). No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from megatron_grpo.core.settings import Config, TunerConfig
from megatron_grpo.core.weights.lora import NO_ADAPTER
from megatron_grpo.run.config.read import format_value
from megatron_grpo.run.config.rules import Rule, broken_rules, changed, settings_of, typed_fields

_TOWER = ("freeze_vit", "freeze_aligner")
_OF_FULL = ("freeze_llm", "freeze_parameters", "freeze_parameters_regex", "trainable_parameters", "trainable_parameters_regex")
_PATTERNS = ("target_regex", "freeze_parameters_regex", "trainable_parameters_regex", "rank_pattern", "alpha_pattern")


def are_names_readable(cfg: Config) -> bool:
    """Return whether typed names and regular expressions are valid, so that they can be compared with a model's names.

    Args:
        cfg: Settings of the run.
    """
    return not any(broken_rules((*PATTERNS, *TARGETS), settings_of(cfg)))


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


def _of_lora(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message fields of a problem for settings of LoRA that are changed, or typed with a value other than off."""
    names = [f.name for f in fields(TunerConfig) if f.name not in ("tuner_type", *_TOWER, *_OF_FULL)]
    by_hand = names if c.dialect else [setting["name"] for setting in typed_fields(c, *names)]
    typed_names = [name for name in by_hand if name in c.cfg.typed and getattr(c, name)]
    return _listed(c, dict.fromkeys([*_changed(c, *names), *typed_names]))


def _unfrozen_without_freezing(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message fields of a problem for weights excluded from freezing if nothing is frozen.

    A vision tower is frozen by default.
    """
    of_tower = any("visual" in word for word in (*c.trainable_parameters, c.trainable_parameters_regex or ""))
    if of_tower or changed(c, "freeze_llm", "freeze_parameters", "freeze_parameters_regex"):
        return None
    return _listed(c, _changed(c, "trainable_parameters", "trainable_parameters_regex"))


def _moved_tower(c: SimpleNamespace) -> dict[str, Any] | None:
    names = _changed(c, *_TOWER)
    flags, use = (" and ".join(f"{name} {value}" for name in names) for value in ("false", "true"))
    return {"names": " ".join(names), "told": flags, "use": use, "near": {name: [True] for name in names}} if names else None


def _of_rate(rate: str, freeze: str) -> tuple[Rule, Rule]:
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
    Rule("tuner_type {names}", _of_lora,
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
    Rule("tuner_type {names}", lambda c: _listed(c, _changed(c, *_OF_FULL)),
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
    """Return the rules that apply to this tuner.

    Args:
        cfg: Settings of the run.
    """
    of_rates = (*_of_rate("vit_lr", "freeze_vit"), *_of_rate("aligner_lr", "freeze_aligner"))
    return (*PATTERNS, *of_rates, *(_LORA if cfg.tuner.tuner_type == "lora" else _FULL))
