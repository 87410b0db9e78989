"""`environment`: what the environment of an episode gave for its turns, discounted and summed. docs/turns.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_grpo.config.config import Config


def build_environment(config: Config) -> Callable[..., list[float]]:
    discount = config.turns.turn_discount

    def environment(completions: Sequence[object], turn_rewards: Sequence[Sequence[float | None]], **columns: object) -> list[float]:
        """sum over turns t of discount^t r_t. A turn for which nothing was given adds nothing."""
        return [sum(discount**turn * (reward or 0.0) for turn, reward in enumerate(rewards)) for rewards in turn_rewards]

    return environment
