"""Check plug-ins before a run begins: environments, rollout functions and servers. No torch.

Each package is imported only if the run uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.core.base.errors import Problem
from megatron_grpo.core.settings import Config
from megatron_grpo.core.weights.shape import ModelShape

if TYPE_CHECKING:
    from megatron_grpo.core.images import ImageProcessorSpec
    from megatron_grpo.plugins.environments.protocol import Environment


def environment(cfg: Config, tokenizer: Any) -> type[Environment] | None:
    """Load the class of the run's episodes; None without an environment or tools. Executes the user's code.

    Args:
        cfg: Settings of the run.
        tokenizer: Hugging Face tokenizer.

    Raises:
        ConfigError: If it cannot be loaded.
    """
    from megatron_grpo.plugins.environments.loading import load_environment

    return load_environment(cfg, tokenizer)


def notes_of_template(cfg: Config, environment: type[Environment], tokenizer: Any, model_path: Path) -> list[str]:
    """Return notes for the user on how the chat template renders the turns of episodes.

    Args:
        cfg: Settings of the run.
        environment: Class of the run's episodes.
        tokenizer: The model's tokenizer.
        model_path: The model's directory.

    Raises:
        ConfigError: If the template drops turns.
    """
    from megatron_grpo.plugins.environments.loading import check_template, template_of

    template, flag = template_of(cfg, environment, tokenizer, model_path=model_path), cfg.turns.player
    return check_template(template, environment, history=cfg.turns.turn_history, flag=flag)


def rollout_function(cfg: Config) -> Callable[..., Any] | None:
    """Load the function that `rollout_func` names; None without one. Executes the user's file.

    Args:
        cfg: Settings of the run.

    Raises:
        ConfigError: If it cannot be loaded.
    """
    from megatron_grpo.plugins.environments.loading import load_rollout_func

    return load_rollout_func(cfg)


def problems_of_servers(
    cfg: Config, shape: ModelShape, longest_prompt: int, image_spec: ImageProcessorSpec | None, max_images: int
) -> Sequence[Problem]:
    """Return problems with the rollout servers that already answer.

    Args:
        cfg: Settings of the run.
        shape: The model's shape.
        longest_prompt: Tokens of the longest prompt.
        image_spec: The image processor; None for a text model.
        max_images: Maximum images of a prompt.
    """
    from megatron_grpo.plugins.servers.server_group import needs_of, problems_with_servers
    from megatron_grpo.run.adapters import lora_sync

    lora = lora_sync(cfg, shape, on_gpu=None)
    return problems_with_servers(cfg, needs_of(cfg, shape, longest_prompt, lora, image_spec=image_spec, max_images=max_images))


def problems_of_teacher(cfg: Config, shape: ModelShape, tokenizer: Any, longest_prompt: int) -> Sequence[Problem]:
    """Return problems with the teacher's servers that already answer.

    Args:
        cfg: Settings of the run.
        shape: The policy's shape.
        tokenizer: The policy's tokenizer.
        longest_prompt: Tokens of the longest prompt.
    """
    from megatron_grpo.plugins.teacher.servers import TeacherRequirements, TeacherServerGroup

    return TeacherServerGroup.build(cfg, TeacherRequirements.of(cfg, shape, tokenizer, longest_prompt)).problems()
