"""What environments and tools ask of the other settings. No torch."""

from __future__ import annotations

from megatron_grpo.config.config import Config

EPISODE_COLUMNS = ("messages", "turn_rewards", "num_turns", "ended")  # that reward functions get of an episode, by these names
REWARD = "environment"  # the built-in reward that is the environment's own


def rules_in_words(cfg: Config) -> str:
    """Who makes the answers, and by which rules: scores of other ones do not compare. "" where a prompt gets one answer."""
    turns = cfg.turns
    if not turns.plays:
        return cfg.rollout.rollout_func or ""
    return f"{turns.environment} {' '.join(turns.tools)} max_turns {turns.max_turns} turn_history {turns.turn_history}"
