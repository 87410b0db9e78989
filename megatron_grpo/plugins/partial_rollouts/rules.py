"""Rules about partial rollouts. No torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_grpo.core.rollout.sampling_mask import find_mask_flag, training_structured_outputs
from megatron_grpo.run.config.rules import Rule


def _depths(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the smaller depths, if completions are interrupted at weight syncs."""
    smaller = [0, 1] if c.vllm_mode == "server" else [0]
    return {"smaller": smaller, "depths": " or ".join(map(str, smaller))} if c.cfg.rollout.partial_rollouts else None


# fmt: off
RULES = (
    Rule("async_rollout_depth {flag}", lambda c: training_structured_outputs(c.cfg.rollout) is not None
         and (depths := _depths(c)) and depths | {"flag": find_mask_flag(c.cfg.rollout)},
         "async_rollout_depth {async_rollout_depth} interrupts completions at weight syncs, and structured outputs begin anew after an "
         "interruption. Omit them, or use async_rollout_depth {depths}.", lambda c: {"async_rollout_depth": c.smaller}),
    Rule("async_rollout_depth router_replay_mode", lambda c: c.router_replay_mode == "R3" and _depths(c),
         "async_rollout_depth {async_rollout_depth} interrupts completions at weight syncs, and the recorded experts of their parts are "
         "not joined. Use router_replay_mode R2 or disabled, or async_rollout_depth {depths}.",
         lambda c: {"router_replay_mode": ["R2", "disabled"], "async_rollout_depth": c.smaller}),
)
# fmt: on
