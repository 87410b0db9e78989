"""What a rollout function of the user's own asks of the other settings. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.config import Config, RolloutConfig
from megatron_grpo.config.tuner import Pair


def pairs(cfg: Config) -> Iterator[Pair]:
    """(settings, what is wrong, nearest values) of each problem."""
    rollout = cfg.rollout
    if rollout.rollout_func is None:
        if "rollout_func_timeout" in cfg.typed and rollout.rollout_func_timeout != RolloutConfig().rollout_func_timeout:
            message = f"rollout_func_timeout ({rollout.rollout_func_timeout:g}) needs a rollout_func. Give one, or leave it out."
            yield ("rollout_func_timeout", "rollout_func"), message, {}
        return
    if cfg.turns.plays:
        flag = "environment" if cfg.turns.environment else "tools"
        yield (
            ("rollout_func", flag),
            f"rollout_func and {flag} both say how a completion comes about. Use {flag} alone, or let the function do it.",
            {"rollout_func": ["none"]},
        )
    if rollout.async_rollout_depth:
        yield (
            ("async_rollout_depth", "rollout_func"),
            f"async_rollout_depth {rollout.async_rollout_depth} does not go with rollout_func: the function would run in the trainer's own "
            "process while it trains, and hold it up. Use async_rollout_depth 0.",
            {"async_rollout_depth": [0]},
        )
    if cfg.grpo.router_replay_mode == "R3":
        yield (
            ("router_replay_mode", "rollout_func"),
            "router_replay_mode R3 does not go with rollout_func: nobody knows which request drew which of the tokens that it returns. Use "
            "R2, or disabled.",
            {"router_replay_mode": ["R2", "disabled"]},
        )
