"""Validation of the trainable parameters and the initial adapter against the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.config.config import Config
from megatron_grpo.config.parsed import ForeignDefault, Parsed
from megatron_grpo.config.read import format_value
from megatron_grpo.config.tuner import are_names_readable
from megatron_grpo.rollout.adapters import lora_sync
from megatron_grpo.weights import trainable_parameters
from megatron_grpo.weights.lora import LoraSettings, linear_modules
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.stored import adapter_problems

_SEES = "false (vision-language model)"
_TARGETS = ("target_modules", "target_regex", "exclude_modules")


def with_tower(parsed: Parsed, shape: ModelShape | None) -> Parsed:
    """Unfreeze vision tower and aligner where the other system of a dialect trains them, unless the user set otherwise.

    A text model has neither, whatever its script says about images.

    Args:
        parsed: Parsed command line.
        shape: Shape of the model; None if its config.json is not on this machine. The unknown default is then reported.

    Returns:
        The parsed command line with `freeze_vit` and `freeze_aligner` set, and with a note for each changed default.
    """
    cfg, system = parsed.config, parsed.system
    if system is None or not system.trains_tower or cfg.tuner.tuner_type == "lora":
        return parsed
    theirs, read = f"{system.title}'s default", f"{system.title}'s rule"
    unsaid = [name for name in ("freeze_vit", "freeze_aligner") if cfg.sources.get(name, "default") in ("default", theirs, read)]
    if shape is None:
        unknown = [name for name in unsaid if cfg.sources.get(name, "default") == "default"]
        told, values = [ForeignDefault(name=name, theirs=_SEES, ours="true", used=_SEES) for name in unknown], {}
    else:
        is_multimodal = shape.vision is not None
        moved = [name for name in unsaid if getattr(cfg.tuner, name) == is_multimodal]
        told = [ForeignDefault(name=name, theirs="false", ours="true", used="false") for name in moved if is_multimodal]
        values = dict.fromkeys(moved, not is_multimodal)
    config = cfg.with_values(values, sources=dict.fromkeys(values, theirs))
    return replace(parsed, config=config, defaults=[*parsed.defaults, *told])


def tuner_problems(cfg: Config, shape: ModelShape | None) -> list[Problem]:
    """Return problems of module names that match nothing, and of adapters on disk.

    Args:
        cfg: Configuration.
        shape: Shape of the model; None if its config.json is not on this machine. Only adapter files are checked then.
    """
    tuner, found = cfg.tuner, list[Problem]()
    is_lora = tuner.tuner_type == "lora"
    for flag, directory in (("adapters", tuner.adapters), ("ref_adapters", tuner.ref_adapters)) if is_lora else ():
        if directory:
            found += _of_files(cfg, flag, directory, shape)
    if shape is None or not are_names_readable(cfg):
        return found
    if is_lora and not tuner.adapters:
        found += LoraSettings.of(tuner, shape).problems(shape)
    found += trainable_parameters.problems(tuner, shape)
    return found or _of_push(cfg, shape)


def _of_push(cfg: Config, shape: ModelShape) -> list[Problem]:
    """Return the reasons why a valid adapter cannot be sent to the sampler as `vllm_enable_lora true` requires."""
    if not cfg.tuner.vllm_enable_lora:
        return []
    try:
        lora_sync(cfg, shape, on_gpu=None)
    except ConfigError as error:
        return list(error.problems)
    return []


def _of_files(cfg: Config, flag: str, directory: str, shape: ModelShape | None) -> list[Problem]:
    try:
        settings = LoraSettings.from_peft(directory, flag=flag)
    except ConfigError as error:
        return list(error.problems)
    found = adapter_problems(directory, settings, shape, flag=flag) if shape else []
    return [*found, *(_contradictions(cfg, settings, shape) if flag == "adapters" and not found else ())]


def with_adapter(cfg: Config) -> Config:
    """Return the configuration with the ranks, alphas and targets stored in the files of `adapters`.

    Args:
        cfg: Configuration whose adapter files passed `tuner_problems`.
    """
    if cfg.tuner.tuner_type != "lora" or not cfg.tuner.adapters:
        return cfg
    values = _settings_of(LoraSettings.from_peft(cfg.tuner.adapters))
    return cfg.with_values(values, sources=dict.fromkeys(values, "derived from adapters"))


def _settings_of(found: LoraSettings) -> dict[str, Any]:
    return {
        "lora_rank": found.rank,
        "lora_alpha": float(found.alpha),
        "use_rslora": found.use_rslora,
        "target_modules": list(found.target_modules),
        "target_regex": found.target_regex,
        "exclude_modules": list(found.exclude_modules),
        "rank_pattern": dict(found.rank_pattern),
        "alpha_pattern": dict(found.alpha_pattern),
    }


def _contradictions(cfg: Config, found: LoraSettings, shape: ModelShape | None) -> Iterator[Problem]:
    """Yield a problem for each typed setting that differs from the adapter files.

    The files decide, so a different typed value would not train the stored adapter.
    """
    values = _settings_of(found)
    typed = [name for name in values if name in cfg.typed and name not in _TARGETS and getattr(cfg.tuner, name) != values[name]]
    for name in typed:
        message = (
            f"{name} ({format_value(getattr(cfg.tuner, name))}) differs from that of adapters ({format_value(values[name])} in "
            f"\
{cfg.tuner.adapters}), from which the run starts. Omit {name}."
        )
        yield Problem(flags=(name, "adapters"), message=message)
    targets = [name for name in _TARGETS if name in cfg.typed]
    if targets and shape and are_names_readable(cfg):
        asked, there = _targeted(LoraSettings.of(cfg.tuner, shape), shape), _targeted(found, shape)
        if asked != there:
            said = ", ".join(f"{name} ({format_value(getattr(cfg.tuner, name))})" for name in targets)
            yield Problem(
                flags=(*targets, "adapters"),
                message=f"{said} selects {_ends(asked)}, but adapters ({cfg.tuner.adapters}), from which the run starts, has "
                f"{_ends(there)}. Omit {' and '.join(targets)}.",
            )


def _targeted(settings: LoraSettings, shape: ModelShape) -> set[str]:
    return {module.name for module in linear_modules(shape) if settings.is_target(module.name)}


def _ends(modules: set[str]) -> str:
    ends = sorted({module.rsplit(".", 1)[1] for module in modules})
    return f"{len(modules)} layers ({', '.join(ends)})" if modules else "none"
