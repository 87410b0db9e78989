"""Partial freezing under tuner_type full: the weights that train. Hugging Face names and regular expressions, no tensors, no torch.

The four settings are Megatron-SWIFT's: `freeze_parameters` (name prefixes) and `freeze_parameters_regex` (searched in a name) freeze
weights; `trainable_parameters` and `trainable_parameters_regex` unfreeze some of them. Megatron-SWIFT compares them with the names of one
rank's Megatron modules, whose layers count from 0 on every pipeline stage; here they are compared with the names in the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from megatron_grpo.core.weights.names import tower_entries
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.core.weights.vision_towers import Part, find_part

if TYPE_CHECKING:
    from megatron_grpo.core.settings import TunerConfig

Rule = Callable[[str], bool]  # a tensor's Hugging Face name -> whether it trains


def trains(cfg: TunerConfig) -> Rule:
    """Return a function that tells whether a tensor of the model trains, by its Hugging Face name.

    Under tuner_type lora no tensor of the model trains, only its adapters.
    """
    if cfg.tuner_type != "full":
        return lambda name: False
    frozen = _matcher(cfg.freeze_parameters, cfg.freeze_parameters_regex)
    is_selected = _matcher(cfg.trainable_parameters, cfg.trainable_parameters_regex)
    parts = frozen_parts(cfg)
    return lambda name: is_selected(name) or not (frozen(name) or find_part(name) in parts)


def frozen_parts(cfg: TunerConfig) -> set[Part]:
    """Return the parts that `freeze_llm`, `freeze_vit` and `freeze_aligner` freeze. Text models have only the first part."""
    flags: dict[Part, bool] = {"llm": cfg.freeze_llm, "vit": cfg.freeze_vit, "aligner": cfg.freeze_aligner}
    return {part for part, is_frozen in flags.items() if is_frozen}


def trains_tower(cfg: TunerConfig, shape: ModelShape) -> bool:
    """Return whether any weight of the vision tower trains."""
    return any(map(trains(cfg), (name for entry in tower_entries(shape) for name, _ in entry.hf)))


def trains_all(cfg: TunerConfig, shape: ModelShape) -> bool:
    """Return whether every weight of the model trains."""
    is_whole = not cfg.freeze_llm and (shape.vision is None or not frozen_parts(cfg))
    return is_whole and cfg.tuner_type == "full" and not cfg.freeze_parameters and cfg.freeze_parameters_regex is None


def parameter_trains(names: Iterable[str], rule: Rule) -> bool:
    """Return whether a Megatron parameter trains.

    Args:
        rule: Result of `trains`.

    Raises:
        ValueError: Only some of the tensors train. `run.config.rules.tuner.freezing_problems` reports this beforehand.
    """
    train_flags = {rule(name) for name in names}
    if len(train_flags) != 1:
        raise ValueError(f"{', '.join(names)} are one parameter; a part of it cannot train separately")
    return train_flags.pop()


def _matcher(prefixes: Iterable[str], pattern: str | None) -> Rule:
    beginnings, expression = tuple(prefixes), re.compile(pattern) if pattern is not None else None
    return lambda name: name.startswith(beginnings) or (expression is not None and expression.search(name) is not None)
