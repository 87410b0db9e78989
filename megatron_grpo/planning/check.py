"""The whole configuration, checked at once: what `train` and `plan` do before anything else. Neither torch nor the model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.batching import stages
from megatron_grpo.batching.batch_sizes import BatchSizes, settled, size_problems
from megatron_grpo.batching.sizes import Model
from megatron_grpo.config import Parsed, names
from megatron_grpo.config.config import Config
from megatron_grpo.config.evaluation import longest_completion
from megatron_grpo.config.rules import in_typed_names
from megatron_grpo.config.validation import validate
from megatron_grpo.grpo import validation as grpo_validation
from megatron_grpo.planning.check_tuner import tuner_problems, with_adapter, with_tower
from megatron_grpo.planning.models import read_shape, read_teacher, rules_of, teacher_problems
from megatron_grpo.policy import same_bits_validation
from megatron_grpo.policy import validation as policy_validation
from megatron_grpo.weights.layout_validation import engine_problems, length_problems
from megatron_grpo.weights.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A configuration that passes, its sizes, and the shapes of its models where their config.json is at hand."""

    config: Config
    sizes: BatchSizes
    shape: ModelShape | None
    parsed: Parsed
    teacher: ModelShape | None = None  # the one of teacher_model


def check_parsed(parsed: Parsed) -> Checked:
    """Check everything that was parsed. The configuration of the result holds the derived sizes too.

    Raises ConfigError with all that is wrong, in the user's words.
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
    return Checked(config=_with_sleep(with_adapter(settled(cfg, sizes))), sizes=sizes, shape=shape, parsed=parsed, teacher=teacher)


def _with_sleep(cfg: Config) -> Config:
    """Where adapters train, vLLM's base waits on the host unless somebody says otherwise: no push brings it, and it would be in the way."""
    if cfg.tuner.tuner_type != "lora" or cfg.rollout.vllm_mode != "colocate" or cfg.sources.get("sleep_level", "default") != "default":
        return cfg
    return cfg.with_values({"sleep_level": 1}, sources={"sleep_level": "derived from tuner_type"})


# Of the model, and of a teacher beside it.
Shapes = tuple[ModelShape | None, ModelShape | None]


def _settings_problems(parsed: Parsed, shapes: Shapes) -> list[Problem]:
    """All but those of parsing and of sizes."""
    cfg, (shape, teacher) = parsed.config, shapes
    longest = (cfg.data.max_prompt_length or 1) + longest_completion(cfg)
    of_stages = list(stages.problems(cfg, shape.num_layers if shape else None))
    of_model: list[Problem] = []
    if shape and not of_stages:
        # Less than one is for the sizes to say.
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
        *same_bits_validation.problems(cfg, shape),
    ]
    found = [in_typed_names(cfg, problem) for problem in others if not set(problem.flags) & parsed.unreadable]
    return [*validate(cfg, parsed.unreadable), *found]


def _with_proven_values(problem: Problem, parsed: Parsed, shapes: Shapes, model: Model) -> Problem:
    """The problem with those of its nearest values with which, when only they are changed, everything passes."""
    proven = {
        flag: good
        for flag, values in problem.nearest.items()
        if (good := [value for value in values if _passes_with(flag, value, parsed, shapes, model)])
    }
    return Problem(flags=problem.flags, message=problem.message, nearest=proven)


def _passes_with(flag: str, value: Any, parsed: Parsed, shapes: Shapes, model: Model) -> bool:
    setting = names().get(flag)
    if setting is None or setting.name == "dialect":  # which decides what all other names mean: they would have to be read anew
        return False
    left = [problem for problem in parsed.problems if list(problem.flags) != [flag] and flag not in problem.nearest]
    config = parsed.config.with_values({setting.name: None if value == "none" and setting.optional else value})
    changed = Parsed(config=config, unreadable=parsed.unreadable - {setting.name})
    return not left and not _settings_problems(changed, shapes) and not size_problems(changed.config, model, others_pass=False)
