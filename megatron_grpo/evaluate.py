"""Held-out prompts, answered greedily and scored by the run's own reward functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatron_grpo.rollout.engine import RolloutEngine, SamplingSettings
from megatron_grpo.types import Group, Progress, Prompt, ScoredGroup


class Evaluator:
    """Scores the sampler's current weights on a fixed list of prompts. Without prompts it is never due."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        judge: Callable[[Sequence[Group]], list[ScoredGroup]],
        reward_names: Sequence[str],
        sampling: SamplingSettings,
        *,
        score: str,
        every: int,
        last_step: int,
    ):
        """score: the reward function that counts. every: optimizer steps between evaluations, 0 for only the first and the last."""
        self.prompts, self.judge, self.reward_names = list(prompts), judge, list(reward_names)
        self.sampling = sampling.greedy()
        self.score, self.every, self.last_step = score, every, last_step

    def is_due(self, progress: Progress) -> bool:
        """Before the first step, after the last, and every so often between."""
        step = progress.step
        between = self.every > 0 and step % self.every == 0
        return bool(self.prompts) and (step == 0 or step == self.last_step or between)

    def run(self, rollout: RolloutEngine) -> dict[str, float]:
        """{reward name: mean over the prompts to which it applies, ..., "mean_length": tokens}; the score first. Collective."""
        with rollout.awake():
            groups = rollout.generate(self.prompts, self.sampling, seed=0)
        scored = self.judge(groups)
        rewards = np.array([[np.nan if value is None else value for value in group.rewards[0]] for group in scored], dtype=np.float64)
        means = {
            name: float(np.nanmean(column)) for name, column in zip(self.reward_names, rewards.T, strict=True) if not np.isnan(column).all()
        }
        first = {self.score: means[self.score]} if self.score in means else {}
        return first | means | {"mean_length": float(np.mean([len(group.completions[0].token_ids) for group in groups]))}
