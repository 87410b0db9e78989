"""The rewards `length` (how near a completion comes to a wanted length) and `soft_overlong` (DAPO's ramp before the length limit)."""

from __future__ import annotations

from typing import Any

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.config.config import Config


class Length:
    """`-|tokens - target| / max_completion_length`: 0 at the wanted length, -1 a whole max_completion_length away."""

    def __init__(self, *, target: int, max_completion_length: int):
        self.target, self.max_completion_length = target, max_completion_length

    def __call__(self, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [-abs(len(token_ids) - self.target) / self.max_completion_length for token_ids in completion_ids]


class SoftOverlong:
    """`min(0, -(tokens - (limit - ramp)) / ramp)`: 0 up to the ramp, -1 at the limit. Source: DAPO, equation 13."""

    def __init__(self, *, limit: int, ramp: int):
        self.limit, self.ramp = limit, ramp

    def __call__(self, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [min(0.0, -(len(token_ids) - (self.limit - self.ramp)) / self.ramp) for token_ids in completion_ids]


def build_length(config: Config) -> Length:
    target, longest = config.rewards.length_target, config.rollout.max_completion_length
    if not 0 <= target <= longest:
        message = f"length_target ({target}) should lie between 0 and max_completion_length ({longest}) tokens."
        raise ConfigError([Problem(flags=("length_target",), message=message, nearest={"length_target": [max(0, min(target, longest))]})])
    return Length(target=target, max_completion_length=longest)


def build_soft_overlong(config: Config) -> SoftOverlong:
    longest = config.rollout.max_completion_length
    limit = longest if config.grpo.soft_max_length is None else config.grpo.soft_max_length
    ramp = config.grpo.soft_cache_length
    problems = []
    if limit > longest:
        message = f"soft_max_length ({limit}) exceeds max_completion_length ({longest}): no completion gets there. Use {longest} or less."
        flags = ("soft_max_length", "max_completion_length")
        problems.append(Problem(flags=flags, message=message, nearest={"soft_max_length": [longest]}))
    if ramp is None or not 1 <= ramp <= limit:
        given = "is not given" if ramp is None else f"is {ramp}"
        usual = max(1, limit // 5)
        message = f"soft_overlong needs soft_cache_length, the width of its ramp, between 1 and soft_max_length ({limit}) tokens; it \
{given}. A fifth of the limit, {usual}, is usual."
        problems.append(Problem(flags=("soft_cache_length",), message=message, nearest={"soft_cache_length": [usual]}))
    if problems or ramp is None:
        raise ConfigError(problems)
    return SoftOverlong(limit=limit, ramp=ramp)
