"""Validation of the whole configuration and of its trainable parameters, the first step of `train` and `plan`. No torch, no model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_grpo.core.base.errors import ConfigError, Problem
from megatron_grpo.core.batching.batch_sizes import BatchSizes
from megatron_grpo.core.weights.lora import LoraSettings, linear_modules
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.adapters import adapter_problems, lora_sync
from megatron_grpo.run.config import names
from megatron_grpo.run.config.evaluation import longest_context
from megatron_grpo.run.config.parse import FrameworkDefaultValue, ParsedConfig
from megatron_grpo.run.config.read import format_value
from megatron_grpo.run.config.rules import grpo as grpo_validation
from megatron_grpo.run.config.rules import in_typed_names, stages
from megatron_grpo.run.config.rules import policy as policy_validation
from megatron_grpo.run.config.rules.batch_sizes import checked_sizes, size_problems, with_derived_sizes
from megatron_grpo.run.config.rules.layout import engine_problems, length_problems
from megatron_grpo.run.config.rules.settings import validate
from megatron_grpo.run.config.rules.tuner import are_names_readable, freezing_problems
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.sizes import ModelDivisors
from megatron_grpo.run.models import find_parity_problems, make_model_divisors, read_shape, read_teacher, teacher_problems

_SEES = "false (vision-language model)"
_TARGETS = ("target_modules", "target_regex", "exclude_modules")


def with_tower(parsed: ParsedConfig, shape: ModelShape | None) -> ParsedConfig:
    """Unfreeze vision tower and aligner where the other system of a dialect trains them, unless the user set otherwise.

    A text model has neither, whatever its script says about images.

    Args:
        shape: Shape of the model; None if its config.json is not on this machine. The unknown default is then reported.

    Returns:
        The parsed command line with `freeze_vit` and `freeze_aligner` set, and with a note for each changed default.
    """
    cfg, system = parsed.config, parsed.system
    if system is None or not system.trains_tower or cfg.tuner.tuner_type == "lora":
        return parsed
    default_source, rule_source = f"{system.title}'s default", f"{system.title}'s rule"
    unsaid = [
        name for name in ("freeze_vit", "freeze_aligner") if cfg.sources.get(name, "default") in ("default", default_source, rule_source)
    ]
    if shape is None:
        unknown = [name for name in unsaid if cfg.sources.get(name, "default") == "default"]
        defaults, values = [FrameworkDefaultValue(name=name, theirs=_SEES, ours="true", used=_SEES) for name in unknown], {}
    else:
        is_multimodal = shape.vision is not None
        moved = [name for name in unsaid if getattr(cfg.tuner, name) == is_multimodal]
        defaults = [FrameworkDefaultValue(name=name, theirs="false", ours="true", used="false") for name in moved if is_multimodal]
        values = dict.fromkeys(moved, not is_multimodal)
    config = cfg.with_values(values, sources=dict.fromkeys(values, default_source))
    return replace(parsed, config=config, defaults=[*parsed.defaults, *defaults])


def tuner_problems(cfg: Config, shape: ModelShape | None) -> list[Problem]:
    """Return problems of module names that match nothing, and of adapters on disk.

    Args:
        shape: Shape of the model; None if its config.json is not on this machine. Only adapter files are checked then.
    """
    tuner, problems = cfg.tuner, list[Problem]()
    is_lora = tuner.tuner_type == "lora"
    for flag, directory in (("adapters", tuner.adapters), ("ref_adapters", tuner.ref_adapters)) if is_lora else ():
        if directory:
            problems += _check_files(cfg, flag, directory, shape)
    if shape is None or not are_names_readable(cfg):
        return problems
    if is_lora and not tuner.adapters:
        problems += LoraSettings.from_config(tuner, shape).problems(shape)
    problems += freezing_problems(tuner, shape)
    return problems or _weight_sync_problems(cfg, shape)


def _weight_sync_problems(cfg: Config, shape: ModelShape) -> list[Problem]:
    """Return the reasons why a valid adapter cannot be sent to the sampler as `vllm_enable_lora true` requires."""
    if not cfg.tuner.vllm_enable_lora:
        return []
    try:
        lora_sync(cfg, shape, on_gpu=None)
    except ConfigError as error:
        return list(error.problems)
    return []


def _check_files(cfg: Config, flag: str, directory: str, shape: ModelShape | None) -> list[Problem]:
    try:
        settings = LoraSettings.from_peft(directory, flag=flag)
    except ConfigError as error:
        return list(error.problems)
    problems = adapter_problems(directory, settings, shape, flag=flag) if shape else []
    return [*problems, *(_contradictions(cfg, settings, shape) if flag == "adapters" and not problems else ())]


def with_adapter(cfg: Config) -> Config:
    """Return the configuration with the ranks, alphas and targets stored in the files of `adapters`.

    Args:
        cfg: Configuration whose adapter files passed `tuner_problems`.
    """
    if cfg.tuner.tuner_type != "lora" or not cfg.tuner.adapters:
        return cfg
    values = _list_settings(LoraSettings.from_peft(cfg.tuner.adapters))
    return cfg.with_values(values, sources=dict.fromkeys(values, "derived from adapters"))


def _list_settings(settings: LoraSettings) -> dict[str, Any]:
    return {
        "lora_rank": settings.rank,
        "lora_alpha": float(settings.alpha),
        "use_rslora": settings.use_rslora,
        "target_modules": list(settings.target_modules),
        "target_regex": settings.target_regex,
        "exclude_modules": list(settings.exclude_modules),
        "rank_pattern": dict(settings.rank_pattern),
        "alpha_pattern": dict(settings.alpha_pattern),
    }


def _contradictions(cfg: Config, stored: LoraSettings, shape: ModelShape | None) -> Iterator[Problem]:
    """Yield a problem for each typed setting that differs from the adapter files.

    The files decide, so a different typed value would not train the stored adapter.
    """
    values = _list_settings(stored)
    conflicting = [name for name in values if name in cfg.typed and name not in _TARGETS and getattr(cfg.tuner, name) != values[name]]
    for name in conflicting:
        message = (
            f"{name} ({format_value(getattr(cfg.tuner, name))}) differs from that of adapters ({format_value(values[name])} in "
            f"\
{cfg.tuner.adapters}), from which the run starts. Omit {name}."
        )
        yield Problem(flags=(name, "adapters"), message=message)
    targets = [name for name in _TARGETS if name in cfg.typed]
    if targets and shape and are_names_readable(cfg):
        selected, stored_targets = _targeted(LoraSettings.from_config(cfg.tuner, shape), shape), _targeted(stored, shape)
        if selected != stored_targets:
            flags_text = ", ".join(f"{name} ({format_value(getattr(cfg.tuner, name))})" for name in targets)
            yield Problem(
                flags=(*targets, "adapters"),
                message=f"{flags_text} selects {_ends(selected)}, but adapters ({cfg.tuner.adapters}), from which the run starts, has "
                f"{_ends(stored_targets)}. Omit {' and '.join(targets)}.",
            )


def _targeted(settings: LoraSettings, shape: ModelShape) -> set[str]:
    return {module.name for module in linear_modules(shape) if settings.is_target(module.name)}


def _ends(modules: set[str]) -> str:
    ends = sorted({module.rsplit(".", 1)[1] for module in modules})
    return f"{len(modules)} layers ({', '.join(ends)})" if modules else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedConfig:
    """A valid configuration.

    Args:
        config: Configuration, with derived sizes filled in.
        sizes: Batch sizes and layout.
        shape: Shape of the policy's model; None if its config.json is not on this machine.
        parsed: Parsed command line that the configuration comes from.
        teacher: Shape of the model of `teacher_model`; None without a teacher or without its config.json.
    """

    config: Config
    sizes: BatchSizes
    shape: ModelShape | None
    parsed: ParsedConfig
    teacher: ModelShape | None = None


def check_parsed(parsed: ParsedConfig) -> CheckedConfig:
    """Validate everything that was parsed, and derive the sizes.

    Returns:
        The valid configuration, including the derived sizes.

    Raises:
        ConfigError: With all problems, in the names that the user typed.
    """
    if parsed.is_other_task:
        raise ConfigError(parsed.problems)
    shape, model_problems = read_shape(parsed.config.model.model)
    parsed = with_tower(parsed, shape)
    teacher, reading_problems = read_teacher(parsed.config)
    model = make_model_divisors(shape) if shape else ModelDivisors()
    if parsed.config.grpo.teacher_model:
        model = replace(model, teacher=make_model_divisors(teacher) if teacher else ModelDivisors())
    cfg, shapes = parsed.config, (shape, teacher)
    problems = [*parsed.problems, *model_problems, *reading_problems, *_settings_problems(parsed, shapes)]
    size_faults = size_problems(cfg, model, others_pass=not problems, unreadable=parsed.unreadable)
    if problems or size_faults:
        raise ConfigError([_with_proven_values(problem, parsed, shapes, model) for problem in problems] + size_faults)
    sizes = checked_sizes(cfg, model=model)
    groups = grpo_validation.group_problems(
        cfg.grpo, generation=sizes.generation_batch_size, global_batch=sizes.global_batch_size, group=sizes.num_generations,
        passes=sizes.num_iterations,
    )  # fmt: skip
    if groups:
        raise ConfigError([in_typed_names(cfg, problem) for problem in groups])
    return CheckedConfig(
        config=_with_sleep(with_adapter(with_derived_sizes(cfg, sizes))), sizes=sizes, shape=shape, parsed=parsed, teacher=teacher
    )


def _with_sleep(cfg: Config) -> Config:
    """Set `sleep_level` to 1 for LoRA in colocated mode, unless the user set it.

    A weight sync sends adapters only, so the base weights wait on the host while the policy trains.
    """
    if cfg.tuner.tuner_type != "lora" or cfg.rollout.vllm_mode != "colocate" or cfg.sources.get("sleep_level", "default") != "default":
        return cfg
    return cfg.with_values({"sleep_level": 1}, sources={"sleep_level": "derived from tuner_type"})


# Shapes of the policy's model and of the teacher.
Shapes = tuple[ModelShape | None, ModelShape | None]


def _settings_problems(parsed: ParsedConfig, shapes: Shapes) -> list[Problem]:
    """Return all problems except those of parsing and of batch sizes."""
    cfg, (shape, teacher) = parsed.config, shapes
    longest = longest_context(cfg, cfg.data.max_prompt_length or 1)
    stage_problems = list(stages.problems(cfg, shape.num_layers if shape else None))
    shape_problems: list[Problem] = []
    if shape and not stage_problems:
        # `size_problems` reports values below one.
        engine_ranks, world_size = max(1, cfg.rollout.vllm_tensor_parallel_size), max(1, cfg.parallel.world_size or 1)
        engine = engine_problems(shape, engine_ranks, world_size=world_size)
        shape_problems = [*length_problems(shape, longest), *engine, *policy_validation.problems(cfg, shape)]
    if teacher and not stage_problems:
        shape_problems += teacher_problems(cfg, shape, teacher, longest)
    unvalidated = [
        *grpo_validation.problems(cfg),
        *stage_problems,
        *shape_problems,
        *tuner_problems(cfg, shape),
        *find_parity_problems(cfg, shape),
    ]
    problems = [in_typed_names(cfg, problem) for problem in unvalidated if not set(problem.flags) & parsed.unreadable]
    return [*validate(cfg, parsed.unreadable), *problems]


def _with_proven_values(problem: Problem, parsed: ParsedConfig, shapes: Shapes, model: ModelDivisors) -> Problem:
    """Return the problem with only those of its suggested values that make the whole configuration valid when changed alone."""
    proven = {
        flag: accepted
        for flag, values in problem.nearest.items()
        if (accepted := [value for value in values if _passes_with(flag, value, parsed, shapes, model)])
    }
    return Problem(flags=problem.flags, message=problem.message, nearest=proven)


def _passes_with(flag: str, value: Any, parsed: ParsedConfig, shapes: Shapes, model: ModelDivisors) -> bool:
    setting = names().get(flag)
    if setting is None or setting.name == "dialect":  # it defines the meaning of all other names, which would have to be parsed again
        return False
    other_problems = [problem for problem in parsed.problems if list(problem.flags) != [flag] and flag not in problem.nearest]
    config = parsed.config.with_values({setting.name: None if value == "none" and setting.optional else value})
    changed = ParsedConfig(config=config, unreadable=parsed.unreadable - {setting.name})
    return not other_problems and not _settings_problems(changed, shapes) and not size_problems(changed.config, model, others_pass=False)
