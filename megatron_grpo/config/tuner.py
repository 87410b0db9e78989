"""Settings of the tuner that do not go together, as far as they say so themselves. What they mean for a model is in `weights`. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from megatron_grpo.config.config import Config, TunerConfig
from megatron_grpo.config.read import COMMAND_LINE, shown

# Modules that people give adapters elsewhere, by the names they have there and in Megatron.
NO_ADAPTER: Mapping[str, str] = {
    **dict.fromkeys(("all-router", "router", "gate"), "Megatron-Core's router is no linear layer, and vLLM has none on routers"),
    **dict.fromkeys(("all-embedding", "embed_tokens", "word_embeddings", "embedding"), "vLLM does not sample from adapters on embeddings"),
    **dict.fromkeys(("lm_head", "output_layer"), "log-probs are computed from the head as it is"),
}  # fmt: skip
_TOWER = {"freeze_vit": "vit_lr", "freeze_aligner": "aligner_lr"}  # what may freeze, and the rate at which it trains
_OF_FULL = ("freeze_llm", "freeze_parameters", "freeze_parameters_regex", "trainable_parameters", "trainable_parameters_regex")
_PATTERNS = ("target_regex", "freeze_parameters_regex", "trainable_parameters_regex")
_MAPS = ("rank_pattern", "alpha_pattern")

Pair = tuple[tuple[str, ...], str, dict[str, list[Any]]]


def pairs(cfg: Config) -> Iterator[Pair]:
    """(settings, what is wrong, nearest values) of each problem."""
    yield from _patterns(cfg.tuner)
    yield from _rates(cfg)
    yield from _of_lora(cfg) if cfg.tuner.tuner_type == "lora" else _of_full(cfg)


def are_names_readable(tuner: TunerConfig) -> bool:
    """Whether what is typed as a name or a regular expression is one, so that a model's names may be compared with it."""
    return not any(_patterns(tuner)) and not any(_targets(tuner))


def _patterns(tuner: TunerConfig) -> Iterator[Pair]:
    for name in (*_PATTERNS, *_MAPS):
        value = getattr(tuner, name)
        for pattern in value if name in _MAPS else [value] if value is not None else []:
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                yield (name,), f"{name} ({pattern}) is not a regular expression: {error}.", {}


def _changed(tuner: TunerConfig, names: Iterable[str]) -> list[str]:
    """Those that are not at their defaults. (A file that a run has written names all.)"""
    default = TunerConfig()
    return [name for name in names if getattr(tuner, name) != getattr(default, name)]


def _shown(tuner: TunerConfig, names: Iterable[str]) -> str:
    return ", ".join(f"{name} ({shown(getattr(tuner, name))})" for name in names)


def _asked_for(cfg: Config, names: Iterable[str]) -> list[str]:
    """Those that are changed; and those that somebody typed who did not mean `off`, be it at its default."""
    by_hand = [name for name in names if name in cfg.typed and (cfg.plan.dialect or cfg.sources.get(name) == COMMAND_LINE)]
    return list(dict.fromkeys([*_changed(cfg.tuner, names), *(name for name in by_hand if getattr(cfg.tuner, name))]))


def _rates(cfg: Config) -> Iterator[Pair]:
    """Rates of what does not train."""
    for freeze, rate in _TOWER.items():
        given = getattr(cfg.optimizer, rate)
        if given is not None and getattr(cfg.tuner, freeze) and cfg.tuner.tuner_type == "full":
            yield (
                (rate, freeze),
                f"{rate} ({given}) does nothing while {freeze} is true. Use {freeze} false, or leave {rate} out.",
                {freeze: [False], rate: ["none"]},
            )
        if given is not None and cfg.tuner.tuner_type == "lora":
            yield (
                (rate,),
                f"{rate} ({given}) does nothing: with tuner_type lora adapters of the text model train. Leave {rate} out.",
                {rate: ["none"]},
            )


def _of_full(cfg: Config) -> Iterator[Pair]:
    tuner = cfg.tuner
    if of_lora := _asked_for(cfg, [f.name for f in fields(TunerConfig) if f.name not in ("tuner_type", *_TOWER, *_OF_FULL)]):
        yield (
            ("tuner_type", *of_lora),
            f"{_shown(tuner, of_lora)}: {'these are' if len(of_lora) > 1 else 'this is'} of tuner_type lora, and tuner_type is full. "
            f"Add tuner_type lora, or leave {'them' if len(of_lora) > 1 else 'it'} out.",
            {"tuner_type": ["lora"]},
        )
    thawed = _changed(tuner, ("trainable_parameters", "trainable_parameters_regex"))
    # A tower is frozen unless somebody says otherwise.
    of_tower = any("visual" in word for word in (*tuner.trainable_parameters, tuner.trainable_parameters_regex or ""))
    if thawed and not of_tower and not _changed(tuner, ("freeze_llm", "freeze_parameters", "freeze_parameters_regex")):
        yield (
            tuple(thawed),
            f"{_shown(tuner, thawed)} takes weights out of what freeze_parameters freezes, and nothing is frozen: all weights train. "
            "Freeze the rest, for example with freeze_parameters model lm_head.",
            {},
        )


def _of_lora(cfg: Config) -> Iterator[Pair]:
    tuner = cfg.tuner
    if moved := _changed(tuner, _TOWER):
        yield (
            (*moved, "tuner_type"),
            f"{' and '.join(f'{name} false' for name in moved)} with LoRA: the tower's weights are not in the adapter that is pushed. Use "
            f"{' and '.join(f'{name} true' for name in moved)}, or tuner_type full.",
            {**{name: [True] for name in moved}, "tuner_type": ["full"]},
        )
    if of_full := _changed(tuner, _OF_FULL):
        yield (
            ("tuner_type", *of_full),
            f"{_shown(tuner, of_full)}: this is of tuner_type full, and tuner_type is lora, which freezes every weight of the model and "
            "trains adapters. Leave it out; exclude_modules names layers without an adapter.",
            {"tuner_type": ["full"]},
        )
    yield from _targets(tuner)
    if tuner.lora_dtype is not None and tuner.lora_dtype != cfg.model.torch_dtype:
        yield (
            ("lora_dtype", "torch_dtype"),
            f"lora_dtype ({tuner.lora_dtype}) differs from torch_dtype ({cfg.model.torch_dtype}): adapters have the dtype of the model, so "
            "that vLLM samples with the very values that the trainer computes with; the optimizer keeps float32. Leave lora_dtype out.",
            {"lora_dtype": ["none", cfg.model.torch_dtype], "torch_dtype": [tuner.lora_dtype]},
        )
    if tuner.merge_lora and not cfg.run.export_hf:
        yield (
            ("merge_lora", "export_hf"),
            "merge_lora says what export_hf writes, and export_hf is false. Leave merge_lora out, or use export_hf true.",
            {"merge_lora": [False], "export_hf": [True]},
        )
    if tuner.ref_adapters is not None and cfg.grpo.beta == 0:
        yield (
            ("ref_adapters", "beta"),
            f"ref_adapters ({tuner.ref_adapters}) is the reference of the KL, and with beta 0 there is none. Give a beta above 0, for "
            "example 0.04, or leave it out.",
            {"ref_adapters": ["none"]},
        )


def _targets(tuner: TunerConfig) -> Iterator[Pair]:
    if tuner.target_regex is not None and _changed(tuner, ("target_modules",)):
        yield (
            ("target_regex", "target_modules"),
            f"{_shown(tuner, ('target_regex', 'target_modules'))} both say which layers have an adapter. Keep one of them.",
            {"target_regex": ["none"]},
        )
    for name in tuner.target_modules:
        if why := NO_ADAPTER.get(name.rpartition(".")[2]):
            yield (
                ("target_modules",),
                f"target_modules: an adapter on {name} is not there: {why}. all-linear means every linear layer of attention and MLPs.",
                {},
            )
