"""Validation of the whole configuration, the first step of `train` and `plan`. Loads neither torch nor the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.batching import stages
from megatron_grpo.batching.batch_sizes import BatchSizes, size_problems, with_derived_sizes
from megatron_grpo.batching.sizes import Model
from megatron_grpo.config import Parsed, names
from megatron_grpo.config.config import Config
from megatron_grpo.config.evaluation import longest_completion
from megatron_grpo.config.rules import in_typed_names
from megatron_grpo.config.validation import validate
from megatron_grpo.grpo import validation as grpo_validation
from megatron_grpo.planning.check_tuner import tuner_problems, with_adapter, with_tower
from megatron_grpo.planning.models import read_shape, read_teacher, rules_of, teacher_problems
from megatron_grpo.policy import bitwise_parity_validation
from megatron_grpo.policy import validation as policy_validation
from megatron_grpo.weights.layout_validation import engine_problems, length_problems
from megatron_grpo.weights.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
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
    parsed: Parsed
    teacher: ModelShape | None = None


def check_parsed(parsed: Parsed) -> Checked:
    """Validate everything that was parsed, and derive the sizes.

    Args:
        parsed: Parsed command line.

    Returns:
        The valid configuration, including the derived sizes.

    Raises:
        ConfigError: With all problems, in the names that the user typed.
    """
    if parsed.is_other_task:
        raise ConfigError(parsed.problems)
    shape, model_problems = read_shape(parsed.config.model.model)
    parsed = with_tower(parsed, shape)
    teacher, of_teacher = read_teacher(parsed.config)
    model = rules_of(shape) if shape else Model()
    if parsed.config.grpo.teacher_model:
        model = replace(model, teacher=rules_of(teacher) if teacher else Model())
    cfg, shapes = parsed.config, (shape, teacher)
    problems = [*parsed.problems, *model_problems, *of_teacher, *_settings_problems(parsed, shapes)]
    size_faults = size_problems(cfg, model, others_pass=not problems, unreadable=parsed.unreadable)
    if problems or size_faults:
        raise ConfigError([_with_proven_values(problem, parsed, shapes, model) for problem in problems] + size_faults)
    sizes = BatchSizes.from_config(cfg, model=model)
    groups = grpo_validation.group_problems(
        cfg.grpo, generation=sizes.generation_batch_size, global_batch=sizes.global_batch_size, group=sizes.num_generations,
        passes=sizes.num_iterations,
    )  # fmt: skip
    if groups:
        raise ConfigError([in_typed_names(cfg, problem) for problem in groups])
    return Checked(
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


def _settings_problems(parsed: Parsed, shapes: Shapes) -> list[Problem]:
    """Return all problems except those of parsing and of batch sizes."""
    cfg, (shape, teacher) = parsed.config, shapes
    longest = (cfg.data.max_prompt_length or 1) + longest_completion(cfg)
    of_stages = list(stages.problems(cfg, shape.num_layers if shape else None))
    of_model: list[Problem] = []
    if shape and not of_stages:
        # `size_problems` reports values below one.
        engine_ranks, world_size = max(1, cfg.rollout.vllm_tensor_parallel_size), max(1, cfg.parallel.world_size or 1)
        engine = engine_problems(shape, engine_ranks, world_size=world_size)
        of_model = [*length_problems(shape, longest), *engine, *policy_validation.problems(cfg, shape)]
    if teacher and not of_stages:
        of_model += teacher_problems(cfg, shape, teacher, longest)
    others = [
        *grpo_validation.problems(cfg),
        *of_stages,
        *of_model,
        *tuner_problems(cfg, shape),
        *bitwise_parity_validation.problems(cfg, shape),
    ]
    found = [in_typed_names(cfg, problem) for problem in others if not set(problem.flags) & parsed.unreadable]
    return [*validate(cfg, parsed.unreadable), *found]


def _with_proven_values(problem: Problem, parsed: Parsed, shapes: Shapes, model: Model) -> Problem:
    """Return the problem with only those of its suggested values that make the whole configuration valid when changed alone."""
    proven = {
        flag: good
        for flag, values in problem.nearest.items()
        if (good := [value for value in values if _passes_with(flag, value, parsed, shapes, model)])
    }
    return Problem(flags=problem.flags, message=problem.message, nearest=proven)


def _passes_with(flag: str, value: Any, parsed: Parsed, shapes: Shapes, model: Model) -> bool:
    setting = names().get(flag)
    if setting is None or setting.name == "dialect":  # it defines the meaning of all other names, which would have to be parsed again
        return False
    left = [problem for problem in parsed.problems if list(problem.flags) != [flag] and flag not in problem.nearest]
    config = parsed.config.with_values({setting.name: None if value == "none" and setting.optional else value})
    changed = Parsed(config=config, unreadable=parsed.unreadable - {setting.name})
    return not left and not _settings_problems(changed, shapes) and not size_problems(changed.config, model, others_pass=False)
