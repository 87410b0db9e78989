"""What environments and tools ask of the other settings. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.config import Config, TurnsConfig
from megatron_grpo.config.tuner import Pair

EPISODE_COLUMNS = ("messages", "turn_rewards", "num_turns", "ended")  # that reward functions get of an episode, by these names
REWARD = "environment"  # the built-in reward that is the environment's own


def rules_in_words(cfg: Config) -> str:
    """Who makes the answers, and by which rules: scores of other ones do not compare. "" where a prompt gets one answer."""
    turns = cfg.turns
    if not turns.plays:
        return cfg.rollout.rollout_func or ""
    return f"{turns.environment} {' '.join(turns.tools)} max_turns {turns.max_turns} turn_history {turns.turn_history}"


def pairs(cfg: Config) -> Iterator[Pair]:
    """(settings, what is wrong, nearest values) of each problem."""
    turns = cfg.turns
    if not turns.plays:
        yield from _of_nobody(cfg)
        return
    if turns.tool_call_parser != "hermes" and not turns.tools:
        yield (
            ("tool_call_parser", "tools"),
            f"tool_call_parser ({turns.tool_call_parser}) reads calls of --tools, and there are none: an environment of your own reads the "
            "model's text itself. Leave it out.",
            {"tool_call_parser": ["hermes"]},
        )
    if REWARD in cfg.rewards.reward_funcs and turns.environment is None:
        yield (
            ("reward_funcs", "environment"),
            "reward_funcs environment is what the environment gives turn by turn, and --tools alone give no reward. Name a function that "
            "judges the episode.",
            {},
        )
    if cfg.rollout.async_rollout_depth:
        yield (
            ("async_rollout_depth", "environment" if turns.environment else "tools"),
            f"async_rollout_depth {cfg.rollout.async_rollout_depth} does not go with environments and tools: they would run in the "
            "trainer's own process while it trains, and hold it up. Use async_rollout_depth 0.",
            {"async_rollout_depth": [0]},
        )
    if cfg.grpo.router_replay_mode == "R3":
        yield (
            ("router_replay_mode", "environment" if turns.environment else "tools"),
            "router_replay_mode R3 does not go with environments and tools: the experts of an episode's turns come from several requests, "
            "and are not put together. Use R2, or disabled.",
            {"router_replay_mode": ["R2", "disabled"]},
        )
    if cfg.data.truncation_strategy == "left" and cfg.data.max_prompt_length is not None:
        yield (
            ("truncation_strategy", "environment" if turns.environment else "tools"),
            "truncation_strategy left does not go with environments and tools: it cuts the beginning of a prompt, which the chat template "
            "shows again where it rewrites earlier turns. Use delete, or raise.",
            {"truncation_strategy": ["delete", "raise"]},
        )


def _of_nobody(cfg: Config) -> Iterator[Pair]:
    names = ("max_turns", "turn_history", "turn_discount", "environment_timeout", "max_environment_concurrency", "max_failed_episodes",
             "tool_call_parser")  # fmt: skip
    typed = [name for name in names if getattr(cfg.turns, name) != getattr(TurnsConfig(), name)]
    if typed:
        told = ", ".join(f"{cfg.typed.get(name, name)} ({getattr(cfg.turns, name)})" for name in typed)
        yield tuple(typed), f"{told}: a prompt gets one answer without an environment or tools. Give one, or leave it out.", {}
    if REWARD in cfg.rewards.reward_funcs:
        yield ("reward_funcs", "environment"), "reward_funcs environment needs an environment, which gives it: --environment.", {}
