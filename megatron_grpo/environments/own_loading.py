"""The function that `--rollout_func` names. No torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.config.config import Config
from megatron_grpo.rewards.loading import user_object


def load_rollout_func(cfg: Config) -> Callable[..., Any] | None:
    """None where none is named. Runs the user's file. Raises ConfigError where it cannot be called as it will be."""
    spec = cfg.rollout.rollout_func
    if spec is None:
        return None
    found = user_object(spec, flag="rollout_func")
    wrong = None
    if inspect.isclass(found) or not callable(found):
        wrong = f"{spec} is no function"
    elif inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
        wrong = f"{spec} is a coroutine or a generator; it must return its completions. It may call the sampler from threads of its own"
    else:
        try:
            inspect.signature(found).bind((), None)
        except (TypeError, ValueError) as error:
            wrong = f"{spec} is called as {spec.rpartition(':')[2]}(prompts, sampler), which it does not take ({error})"
    if wrong:
        raise ConfigError([Problem(flags=("rollout_func",), message=f"rollout_func: {wrong}.")])
    return found
