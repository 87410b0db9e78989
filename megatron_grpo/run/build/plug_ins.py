"""Configuration -> what plug-in rooms look at before a run begins. Each room is imported where a run has it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.base.errors import Problem
from megatron_grpo.config.config import Config
from megatron_grpo.weights.shape import ModelShape

if TYPE_CHECKING:
    from megatron_grpo.data.image_processing import ImageProcessorSpec
    from megatron_grpo.environments.protocol import Environment
    from megatron_grpo.environments.rehearsal import Played
    from megatron_grpo.types import Prompt


def environment(cfg: Config, tokenizer: Any) -> type[Environment] | None:
    """The class of a run's episodes. Runs the user's code. Raises ConfigError."""
    from megatron_grpo.environments.loading import load_environment

    return load_environment(cfg, tokenizer)


def notes_of_template(cfg: Config, environment: type[Environment], tokenizer: Any, model_path: Path) -> list[str]:
    """What a person should know of what it does to turns. Raises ConfigError where they would not be seen."""
    from megatron_grpo.environments.loading import look_at, template_of

    template, flag = template_of(cfg, environment, tokenizer, model_path=model_path), "environment" if cfg.turns.environment else "tools"
    return look_at(template, environment, history=cfg.turns.turn_history, flag=flag)  # type: ignore[arg-type]  # one of its choices


def rehearsed(
    cfg: Config,
    environment: type[Environment],
    prompts: Sequence[Prompt],
    kinds: Mapping[str, Sequence[str]],
    tokenizer: Any,
    model_path: Path,
) -> dict[str, Played]:
    """Episodes without a model. kinds: what it says at every turn, by prompt."""
    from megatron_grpo.environments.rehearsal import play_rows

    return play_rows(cfg, environment, prompts, kinds, tokenizer, model_path)


def rollout_function(cfg: Config) -> Callable[..., Any] | None:
    """The function that `rollout_func` names. Runs the user's file. Raises ConfigError."""
    from megatron_grpo.environments.loading import load_rollout_func

    return load_rollout_func(cfg)


def problems_of_servers(
    cfg: Config, shape: ModelShape, longest_prompt: int, eyes: ImageProcessorSpec | None, most_pictures: int
) -> Sequence[Problem]:
    """Of rollout servers that answer already. longest_prompt: tokens. most_pictures: of a prompt."""
    from megatron_grpo.rollout.adapters import lora_push
    from megatron_grpo.servers.server_group import needs_of, problems_with_servers

    lora = lora_push(cfg, shape, on_gpu=None)
    return problems_with_servers(cfg, needs_of(cfg, shape, longest_prompt, lora, eyes=eyes, most_pictures=most_pictures))


def problems_of_teacher(cfg: Config, shape: ModelShape, tokenizer: Any, longest_prompt: int) -> Sequence[Problem]:
    """Of servers of a teacher that answer already. longest_prompt: tokens."""
    from megatron_grpo.servers.teachers import TeacherRequirements, TeacherServerGroup

    return TeacherServerGroup.build(cfg, TeacherRequirements.of(cfg, shape, tokenizer, longest_prompt)).problems()
