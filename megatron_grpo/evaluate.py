"""Held-out prompts, answered greedily and scored by the run's own reward functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megatron_grpo.judge import Judge
from megatron_grpo.parallel import collectives
from megatron_grpo.rollout.engine import Sampler, SamplingSettings
from megatron_grpo.types import Prompt


class Evaluator:
    """Scores the sampler's current weights on a fixed list of prompts. Without prompts it is never due."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        sampler: Sampler,
        judge: Judge,
        sampling: SamplingSettings,
        *,
        score: str,
        every: int,
        last_step: int,
    ):
        """score: the reward function that counts. every: optimizer steps between evaluations, 0 for only the first and the last."""
        self.prompts, self.sampler, self.judge, self.sampling = list(prompts), sampler, judge, sampling.greedy()
        self.score, self.every, self.last_step = score, every, last_step

    def is_due(self, steps: Iterable[int]) -> bool:
        """Before the first step, after the last, and every so often between. steps: after any of these numbers of optimizer steps."""
        return bool(self.prompts) and any(step in (0, self.last_step) or (self.every > 0 and step % self.every == 0) for step in steps)

    def run(self) -> dict[str, float]:
        """{reward name: mean over the prompts to which it applies, ..., "mean_length": tokens}; the score first. Collective."""
        with self.sampler.awake():
            groups = self.sampler.generate(self.prompts, self.sampling, seed=0)
        numbers = {prompt.number: place for place, prompt in enumerate(self.prompts)}
        places = [numbers[group.prompt.number] for group in groups]
        scored = self.judge(groups, places=places)
        mine = {place: (one.rewards[0], one.group.completions[0].num_drawn) for place, one in zip(places, scored, strict=True)}
        found = {place: row for part in collectives.from_all(mine) for place, row in part.items()}
        ordered = [found[place] for place in range(len(self.prompts))]
        rewards = np.array([[np.nan if value is None else value for value in row] for row, _ in ordered], dtype=np.float64)
        means = {
            name: float(np.nanmean(column)) for name, column in zip(self.judge.names, rewards.T, strict=True) if not np.isnan(column).all()
        }
        first = {self.score: means[self.score]} if self.score in means else {}
        return first | means | {"mean_length": float(np.mean([length for _, length in ordered]))}
