"""One rollout, from prompts to samples: SAMPLE and JUDGE of the loop, with the rounds that dynamic sampling adds.

Everything here is the same on every rank: each ends with the same list of samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from megatron_grpo.data.prompts import PromptStream
from megatron_grpo.grpo.advantages import Advantages, advantages, mean, rewards_per_func, total_rewards
from megatron_grpo.metrics import Clock, Completions, rollout_stats
from megatron_grpo.rollout.engine import RolloutEngine, SamplingSettings
from megatron_grpo.rollout.logprobs import is_refused
from megatron_grpo.settings.config import GrpoConfig
from megatron_grpo.types import Group, Prompt, Sample, ScoredGroup

Judge = Callable[[Sequence[Group]], list[ScoredGroup]]
KlPenalty = Callable[[Sequence[Sample]], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Harvest:
    """The scored groups of one rollout, in the order they are numbered; and what it took to get them."""

    scored: list[ScoredGroup]
    sampled: list[ScoredGroup]  # all that were sampled and scored, kept or not
    num_rounds: int  # 1, and one more for each time dead groups were replaced
    num_dead_dropped: int  # their prompts count as used
    num_given_back: int  # prompts that will be asked again: more groups were alive than wanted


def collect(
    take: Callable[[int], list[Prompt]],
    give_back: Callable[[int], None],
    generate: Callable[[Sequence[Prompt]], list[Group]],
    judge: Judge,
    is_dead: Callable[[ScoredGroup], bool],
    *,
    num_groups: int,
    oversample_ratio: float = 1.0,
    dynamic_sample: bool = False,
    max_resample_times: int = 3,
) -> Harvest:
    """Samples and scores until there are `num_groups` groups to train on. They keep the order of their prompts.

    dynamic_sample: groups whose rewards are all equal are replaced by groups of further prompts, in at most `max_resample_times` rounds
    (DAPO, arXiv:2503.14476, section 3.2). A live group is never given up for another round; where live ones do not suffice, dead ones fill
    the rollout, the oldest first. oversample_ratio: every round asks for this many times the prompts it needs. What is beyond `num_groups`
    is cut, dead groups before live ones; from the first live group that is cut on, prompts go back to the stream, so that they are asked
    again by the next rollout: none that can teach something is lost.
    """
    sampled: list[ScoredGroup] = []
    live: list[ScoredGroup] = []
    dead: list[ScoredGroup] = []
    num_rounds = 0
    while num_rounds == 0 or (dynamic_sample and len(live) < num_groups and num_rounds <= max_resample_times):
        # Exact in decimals: 1.1 times 10 prompts are 11, not 12.
        asked = math.ceil((num_groups - len(live)) * Fraction(str(oversample_ratio)))
        found = judge(generate(take(asked)))
        sampled += found
        for group in found:
            (dead if is_dead(group) else live).append(group)
        num_rounds += 1
    first_cut = _number(live[num_groups]) if len(live) > num_groups else _number(sampled[-1]) + 1
    num_given_back = _number(sampled[-1]) + 1 - first_cut
    give_back(num_given_back)
    kept = sorted([*live[:num_groups], *dead[: max(0, num_groups - len(live))]], key=_number)
    return Harvest(scored=kept, sampled=sampled, num_rounds=num_rounds, num_given_back=num_given_back,
                   num_dead_dropped=len(sampled) - num_given_back - num_groups)  # fmt: skip


def _number(scored: ScoredGroup) -> int:
    return scored.group.prompt.number


class Sampler:
    """Rollouts of one run: prompts in, samples with advantages out, and what there is to say about them."""

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        sampling: SamplingSettings,
        prompts: PromptStream,
        judge: Judge,
        reward_names: Sequence[str],
        reward_weights: Sequence[float],
        kl_penalty: KlPenalty | None,
        completions: Completions,
        clock: Clock,
        cfg: GrpoConfig,
        num_groups: int,
        use_sampler_logprobs: bool,
        seed: int,
    ):
        """judge: groups -> scored groups (collective). kl_penalty: samples -> [num_groups, G] to subtract from the rewards, or None.
        use_sampler_logprobs: stale samples take their ratio against the sampler's own log-probs (`--old_logprobs rollout`)."""
        self.engine, self.sampling, self.prompts, self.judge = engine, sampling, prompts, judge
        self.reward_names, self.reward_weights, self.kl_penalty = list(reward_names), list(reward_weights), kl_penalty
        self.completions, self.clock, self.cfg = completions, clock, cfg
        self.num_groups, self.use_sampler_logprobs, self.seed = num_groups, use_sampler_logprobs, seed

    def rollout(self, number: int) -> tuple[list[Sample], dict[str, float]]:
        """Rollout `number` by the engine's current weights: its samples in row order, and its metrics. Collective."""
        cfg = self.cfg
        harvest = collect(
            self.prompts.take,
            self.prompts.give_back,
            self._generate,
            self._judge,
            lambda scored: bool(advantages([scored], cfg, self.reward_weights).is_dead[0]),
            num_groups=self.num_groups,
            oversample_ratio=cfg.oversample_ratio,
            dynamic_sample=cfg.dynamic_sample,
            max_resample_times=cfg.max_resample_times,
        )
        samples = to_samples(harvest.scored, rollout=number)
        penalty = None
        if self.kl_penalty is not None:
            with self.clock("ref_logprobs"):
                penalty = self.kl_penalty(samples).reshape(self.num_groups, -1)
        found = advantages(harvest.scored, cfg, self.reward_weights, kl_penalty=penalty)
        samples = with_advantages(samples, found)
        if self.use_sampler_logprobs:
            samples = [sample.anchored(sample.sampler_logprobs, "rollout") for sample in samples]
        self.completions.write(number, harvest.scored, found)
        stats = rollout_stats(harvest.scored, found, self.reward_names)
        if cfg.dynamic_sample or cfg.oversample_ratio > 1:
            stats |= self._selection_stats(harvest)
        stats["sampling/refused_completions"] = sum(is_refused(one) for each in harvest.sampled for one in each.group.completions)
        if penalty is not None:
            stats["kl_in_reward"] = float(penalty.mean())
        return samples, stats

    def _selection_stats(self, harvest: Harvest) -> dict[str, float]:
        """What was kept is no fair sample of what the policy answers: `dynamic_sample/reward` is over all that was sampled."""
        rewards = total_rewards(rewards_per_func([one.rewards for one in harvest.sampled], len(self.reward_weights)), self.reward_weights)
        return {
            "dynamic_sample/rounds": harvest.num_rounds,
            "dynamic_sample/groups_sampled": len(harvest.sampled),
            "dynamic_sample/dead_groups_replaced": harvest.num_dead_dropped,
            "dynamic_sample/prompts_given_back": harvest.num_given_back,
            "dynamic_sample/reward": mean(rewards).item(),
        }

    def _generate(self, prompts: Sequence[Prompt]) -> list[Group]:
        with self.clock("rollout"):
            return self.engine.generate(prompts, self.sampling, seed=self.seed)

    def _judge(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        with self.clock("reward"):
            return self.judge(groups)


def to_samples(scored: Sequence[ScoredGroup], *, rollout: int) -> list[Sample]:
    """Trainable sequences, row by row: prompt `row // G`, generation `row % G`. Their advantages are still 0 (`with_advantages`)."""
    samples = []
    for scored_group in scored:
        group = scored_group.group
        for completion in group.completions:
            prompt, tokens, refused = group.prompt.token_ids, completion.token_ids, is_refused(completion)
            logprobs = [0.0] * len(tokens) if refused else completion.logprobs
            samples.append(
                Sample(
                    row=len(samples),
                    rollout=rollout,
                    prompt_number=group.prompt.number,
                    version=group.version,
                    token_ids=np.array([*prompt, *tokens], dtype=np.int64),
                    loss_mask=(np.arange(len(prompt) + len(tokens)) >= len(prompt)) & (not refused),
                    sampler_logprobs=np.array([*[0.0] * len(prompt), *logprobs], dtype=np.float32),
                    advantage=0.0,
                    is_dead=False,
                    is_truncated=completion.finish_reason == "length",
                )
            )
    return samples


def with_advantages(samples: Sequence[Sample], found: Advantages) -> list[Sample]:
    """The same samples, each with its advantage, and whether its group was dead."""
    values, dead = found.advantages.ravel(), np.repeat(found.is_dead, found.advantages.shape[1])
    return [
        dataclasses.replace(sample, advantage=float(value), is_dead=bool(is_dead))
        for sample, value, is_dead in zip(samples, values, dead, strict=True)
    ]
