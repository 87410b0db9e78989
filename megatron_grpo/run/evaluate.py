"""Evaluation on held-out prompts, sampled with the engine's current weights and scored by the run's reward functions.

Only the sampler and the reward functions are shared with training: an evaluation has separate prompts, prompt numbers and seed, and they
are the same every time. So a run samples the same completions whether it is evaluated or not, and two evaluations use the same random
numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_grpo.core.grpo.advantages import total_rewards
from megatron_grpo.core.metadata import GroupMetadata
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.rollout.engine import Sampler, SamplingSettings
from megatron_grpo.core.trainer.scored_rollout import gather_metadata
from megatron_grpo.core.types import FAULTS, Group, Prompt, ScoredGroup
from megatron_grpo.run.config.evaluation import SUM, EvalSampling
from megatron_grpo.run.metrics.evaluations import EACH, EvaluationResult
from megatron_grpo.run.metrics.rollout import count_columns, join_columns, text_columns
from megatron_grpo.run.rewards.reward_manager import RewardManager


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSpec:
    """Prompts, sampling settings and score of each evaluation.

    `seed` is used for evaluations alone and is not the run's.

    Args:
        sets: Held-out sets by name.
        score: Name of the reward function that counts, or SUM.
        pass_threshold: Least score of a correct completion; None: 1, or for SUM the sum of `most`.
        most: For SUM, the largest contribution of each reward to that sum.
        pass_reward: For SUM, the reward by which completions count as right, from 1; "" for the sum itself.
        episodes: Description of the environment and its rules; "" for single-turn prompts.
    """

    sets: Mapping[str, Sequence[Prompt]]
    sampling: SamplingSettings
    score: str
    pass_threshold: float | None = None
    most: Sequence[float] = ()
    pass_reward: str = ""
    seed: int = 0
    episodes: str = ""

    def derive_seed(self, name: str) -> int:
        """Return the run seed of a set for `prompt_seed`: different from that of any training run and of any other set."""
        return int.from_bytes(hashlib.blake2b(f"evaluation {self.seed} of {name}".encode(), digest_size=8).digest(), "big")

    def digest(self, name: str) -> str:
        """Return a digest that is equal if two evaluations sample the same prompts in the same way and so can be paired."""
        parts = (self.sampling, self.score, self.derive_seed(name), self.episodes, [prompt.token_ids for prompt in self.sets[name]])
        return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def make_eval_sampling(training: SamplingSettings, config: EvalSampling) -> SamplingSettings:
    """Return the sampling settings of an evaluation: those of training, with the overrides in `config`.

    Greedy sampling (temperature 0) uses the whole vocabulary, without top-p, top-k and min-p unless `config` sets them.

    Args:
        config: Evaluation settings; None in a field keeps the value of training.
    """
    training = replace(training, returns_sampling_mask=False)  # nothing is trained on these completions
    training = replace(training, top_p=1.0, top_k=0, min_p=0.0) if not config.temperature else training
    overrides = {name: getattr(config, name) for name in ("top_p", "top_k", "min_p", "max_completion_length", "more")}
    return replace(
        training, n=config.n, temperature=config.temperature, **{name: value for name, value in overrides.items() if value is not None}
    )


class Evaluator:
    """Evaluator of the sampler's current weights. Without sets it is never due."""

    def __init__(self, spec: EvaluationSpec, sampler: Sampler, reward_manager: RewardManager, *, eval_steps: int = 0, last_step: int = 0):
        """Set up the evaluator.

        Args:
            sampler: The sampler of training, so that an environment that plays training episodes plays these too.
            eval_steps: Optimizer steps between evaluations, 0 for only the first and the last.
            last_step: Number of optimizer steps of the whole run.
        """
        self.question, self.sampler, self.reward_manager = spec, sampler, reward_manager
        self.every, self.last_step = eval_steps, last_step

    def is_due(self, steps: Iterable[int]) -> bool:
        """Return whether an evaluation is due: before the first step, after the last, and every `every` steps between."""
        has_prompts = any(self.question.sets.values())
        return has_prompts and any(step in (0, self.last_step) or (self.every > 0 and step % self.every == 0) for step in steps)

    def run(self) -> list[EvaluationResult]:
        """Evaluate every set, in order. Collective."""
        spec = self.question
        with self.sampler.wake_up():
            groups_by_name = {
                name: self.sampler.generate(list(prompts), spec.sampling, seed=spec.derive_seed(name))
                for name, prompts in spec.sets.items()
            }
        return [self._scored(name, groups) for name, groups in groups_by_name.items()]

    def _scored(self, name: str, groups: Sequence[Group]) -> EvaluationResult:
        prompts, n = self.question.sets[name], self.question.sampling.n
        numbers = {prompt.number: position for position, prompt in enumerate(prompts)}
        positions = [numbers[group.prompt.number] for group in groups]
        scored = self.reward_manager(groups, positions=positions)
        metadata = gather_metadata(scored)
        rows = [metadata[prompt.number] for prompt in prompts]
        names, spec = self.reward_manager.names, self.question
        rewards = np.array(
            [[[np.nan if value is None else value for value in completion_rewards] for completion_rewards in row.rewards] for row in rows],
            dtype=np.float64,
        ).reshape(len(prompts), n, len(names))
        passed: float | np.ndarray = 1.0
        pass_scores, pass_of = None, ""
        if spec.score == SUM:
            scores = total_rewards(rewards, self.reward_manager.reward_weights)
            passed = total_rewards(np.where(np.isnan(rewards), np.nan, 1.0), spec.most) - 1e-9
            pass_of = f"{SUM} >= {sum(spec.most) if spec.pass_threshold is None else spec.pass_threshold:g}"
            if spec.pass_reward:
                pass_scores, passed, pass_of = rewards[:, :, names.index(spec.pass_reward)], 1.0, spec.pass_reward
        else:
            scores = rewards[:, :, names.index(spec.score)]
        return EvaluationResult(
            name=name, n=n, temperature=spec.sampling.temperature, score=spec.score,
            question=spec.digest(name) + (f" {self.reward_manager.reward_weights}" if spec.score == SUM else ""),
            rows=[prompt.row for prompt in prompts], scores=scores,
            pass_threshold=passed if spec.pass_threshold is None else spec.pass_threshold, pass_scores=pass_scores, pass_of=pass_of,
            others=_means(names, rewards, rows),
            table=self._table(dict(zip(positions, scored, strict=True))),
        )  # fmt: skip

    def _table(self, local: Mapping[int, ScoredGroup]) -> dict[str, list[Any]]:
        """Return all completions by column, in the order of the prompts, on rank 0. Collective."""
        parts = collectives.gather_object({position: self._columns(scored) for position, scored in local.items()})
        groups = {position: columns for part in parts or [] for position, columns in part.items()}
        return join_columns([groups[position] for position in sorted(groups)])

    def _columns(self, scored: ScoredGroup) -> dict[str, list[Any]]:
        rewards = {
            f"rewards/{name}": [None if value is None else float(value) for value in rewards]
            for name, rewards in zip(self.reward_manager.names, zip(*scored.rewards, strict=True), strict=True)
        }
        return {**text_columns(scored.group), **rewards, **count_columns(scored.group)}


def _means(names: Sequence[str], rewards: np.ndarray, rows: Sequence[GroupMetadata]) -> dict[str, float]:
    """Return means over completions: every reward that applies, lengths, and the share cut at the length limit.

    For episodes also the mean number of turns and the number that failed. With several rewards also how often each is 1 or more.
    """
    known_rewards = {name: values[~np.isnan(values)] for name, values in zip(names, np.moveaxis(rewards, -1, 0), strict=True)}
    means = {name: float(values.mean()) for name, values in known_rewards.items() if len(values)}
    if len(names) > 1:
        means |= {EACH + name: float((known_rewards[name] >= 1.0).mean()) for name in means}
    means["mean_length"] = float(np.mean([length for row in rows for length in row.num_sampled]))
    means["clipped_ratio"] = float(np.mean([is_cut for row in rows for is_cut in row.is_truncated]))
    episodes = [episode for row in rows for episode in row.episodes]
    if episodes:
        means["mean_turns"] = float(np.mean([episode.num_turns for episode in episodes]))
        means["failed"] = sum(episode.finish_reason in FAULTS for episode in episodes)
    return means
