"""Rollouts of a run: prompts are answered and judged, and come in as rows that wait to be trained.

What every rank needs travels to every rank: rewards, integers, flags. Tokens and log-probs go to the ranks that will train them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol

import numpy as np

from megatron_grpo.batching.families import prefix_of
from megatron_grpo.batching.split import BatchCut
from megatron_grpo.clock import Clock
from megatron_grpo.data.prompts import PromptStream
from megatron_grpo.grpo.advantages import Advantages, advantages
from megatron_grpo.judge import Judge
from megatron_grpo.metrics.rollout import JudgedRollout
from megatron_grpo.parallel import collectives
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.pending import Scorer, deliver, score_rows
from megatron_grpo.rollout.engine import Sampler, SamplingSettings
from megatron_grpo.rollout.logprobs import refuse_impossible, warning_of
from megatron_grpo.settings.config import GrpoConfig
from megatron_grpo.types import Completion, Extent, Harvest, Prompt, Rollout, Row, RowKey, Sample, ScoredGroup, Verdict
from megatron_grpo.types import Sequence as Scored

logger = logging.getLogger(__name__)


def harvest(
    take: Callable[[int], list[Prompt]],
    give_back: Callable[[int], None],
    ask: Callable[[Sequence[Prompt]], Iterable[Verdict]],
    is_dead: Callable[[Verdict], bool],
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
    sampled: list[Verdict] = []
    live: list[Verdict] = []
    dead: list[Verdict] = []
    num_rounds = 0
    while num_rounds == 0 or (dynamic_sample and len(live) < num_groups and num_rounds <= max_resample_times):
        # Exact in decimals: 1.1 times 10 prompts are 11, not 12.
        asked = math.ceil((num_groups - len(live)) * Fraction(str(oversample_ratio)))
        found = list(ask(take(asked)))
        sampled += found
        for verdict in found:
            (dead if is_dead(verdict) else live).append(verdict)
        num_rounds += 1
    first_cut = live[num_groups].prompt_number if len(live) > num_groups else sampled[-1].prompt_number + 1
    num_given_back = sampled[-1].prompt_number + 1 - first_cut
    give_back(num_given_back)
    kept = sorted([*live[:num_groups], *dead[: max(0, num_groups - len(live))]], key=lambda verdict: verdict.prompt_number)
    return Harvest(
        kept=kept,
        sampled=sampled,
        num_rounds=num_rounds,
        num_given_back=num_given_back,
        num_dead_dropped=len(sampled) - num_given_back - num_groups,
    )


class Asker:
    """Prompts -> verdicts, the same on every rank. Keeps the groups that this rank has judged, until they are taken.

    seed: of the run. clock: told what sampling and judging take.
    """

    def __init__(self, sampler: Sampler, judge: Judge, *, sampling: SamplingSettings, seed: int, clock: Clock):
        self.sampler, self.judge, self.sampling, self.seed, self.clock = sampler, judge, sampling, seed, clock
        self._held: dict[int, ScoredGroup] = {}  # by the prompt's number

    def __call__(self, prompts: Sequence[Prompt]) -> list[Verdict]:
        """In the order of the prompts. Collective; raises RewardError, or ImpossibleLogprobs, on every rank."""
        with self.clock("rollout"):
            groups, impossible = refuse_impossible(self.sampler.generate(prompts, self.sampling, seed=self.seed))
            impossible = [sentence for part in collectives.from_all(impossible) for sentence in part]
            warning = warning_of(impossible, self.sampling.n * len(prompts))
            if warning and collectives.rank() == 0:
                logger.warning(warning)
        groups = [replace(group, prefix=prefix_of(group.completions)) for group in groups]
        places = {prompt.number: place for place, prompt in enumerate(prompts)}
        with self.clock("reward"):
            scored = self.judge(groups, places=[places[group.prompt.number] for group in groups])
            mine = [Verdict.of(one) for one in scored]
            verdicts = {verdict.prompt_number: verdict for part in collectives.from_all(mine) for verdict in part}
        self.judge.warn_of_sameness([row for verdict in verdicts.values() for row in verdict.rewards])
        self._held |= {one.group.prompt.number: one for one in scored}
        return [verdicts[prompt.number] for prompt in prompts]

    def take(self, verdicts: Sequence[Verdict]) -> dict[int, ScoredGroup]:
        """{place among the verdicts: scored group} of those that this rank has judged. What else it held is forgotten."""
        held, self._held = self._held, {}
        return {place: held[verdict.prompt_number] for place, verdict in enumerate(verdicts) if verdict.prompt_number in held}


class Told(Protocol):
    """Who hears of rollouts: the journal."""

    def rollout(self, judged: JudgedRollout) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KlPenalty:
    """beta * sum over trained tokens of (log p - log p_ref), by row: what `kl_in_reward` subtracts."""

    policy: Scorer
    reference: Scorer
    beta: float

    def __call__(
        self, sequences: Mapping[RowKey, Scored], extents: Mapping[RowKey, Extent], homes: Mapping[RowKey, int], *, cut: BatchCut,
        parallel: ParallelState,
    ) -> dict[RowKey, float]:  # fmt: skip
        """Of every row, on every rank. sequences: those that this rank holds. extents, homes: of all rows. Collective."""
        ours, theirs = (
            score_rows(sequences, extents, homes, scorer=scorer, cut=cut, parallel=parallel)[2] for scorer in (self.policy, self.reference)
        )
        mine = {key: self.beta * float((ours[key].astype(np.float64) - theirs[key]).sum()) for key in ours}
        return {key: value for part in collectives.from_all(mine if parallel.is_first_of_share else {}) for key, value in part.items()}


class Rollouts:
    """Samples when it is asked to collect: the engine answers while training waits.

    num_groups: in one rollout. use_sampler_logprobs: stale rows take their ratio against the sampler's own log-probs (`--old_logprobs
    rollout`). journal: hears of every rollout.
    """

    def __init__(
        self,
        asker: Asker,
        prompts: PromptStream,
        *,
        cfg: GrpoConfig,
        num_groups: int,
        use_sampler_logprobs: bool,
        penalty: KlPenalty | None,
        cut: BatchCut,
        parallel: ParallelState,
        journal: Told,
    ):
        self.asker, self.prompts, self.cfg, self.num_groups = asker, prompts, cfg, num_groups
        self.use_sampler_logprobs, self.penalty = use_sampler_logprobs, penalty
        self.cut, self.parallel, self.journal = cut, parallel, journal
        self._launched: list[int] = []

    def launch(self, number: int) -> None:
        """Rollout `number` begins: its prompts are answered by the weights that the engine holds now."""
        self._launched.append(number)

    def collect(self, numbers: Iterable[int]) -> list[Rollout]:
        """The rollouts of these numbers, which must have been launched. Collective.

        All are sampled and judged first; then the engine sleeps, and what needs the trainer's weights is computed.
        """
        wanted = list(numbers)
        if not wanted:
            return []
        if missing := set(wanted) - set(self._launched):
            raise KeyError(f"rollouts {sorted(missing)} were never launched")
        self._launched = [number for number in self._launched if number not in wanted]
        with self.asker.sampler.awake():
            found = [self._harvest() for _ in wanted]
        return [self._finish(number, reaped, held) for number, (reaped, held) in zip(wanted, found, strict=True)]

    def _harvest(self) -> tuple[Harvest, dict[int, ScoredGroup]]:
        cfg = self.cfg
        reaped = harvest(
            self.prompts.take,
            self.prompts.give_back,
            self.asker,
            lambda verdict: bool(advantages([verdict.rewards], cfg, self.asker.judge.reward_weights).is_dead[0]),
            num_groups=self.num_groups,
            oversample_ratio=cfg.oversample_ratio,
            dynamic_sample=cfg.dynamic_sample,
            max_resample_times=cfg.max_resample_times,
        )
        return reaped, self.asker.take(reaped.kept)

    def _finish(self, number: int, reaped: Harvest, mine: Mapping[int, ScoredGroup]) -> Rollout:
        kept, group_size = reaped.kept, len(reaped.kept[0].rewards)
        extents = {
            (number, place * group_size + i): Extent(contexts, (number, verdict.prompt_number), verdict.prefix)
            for place, verdict in enumerate(kept)
            for i, contexts in enumerate(verdict.contexts)
        }
        homes = {key: self.cut.home_of(key[1]) for key in extents}
        drawn = {
            (number, place * group_size + i): completion
            for place, scored in mine.items()
            for i, completion in enumerate(scored.group.completions)
        }
        held = deliver({key: (homes[key], completion) for key, completion in drawn.items()}, self.parallel)
        penalty = None
        if self.penalty is not None:
            with self.asker.clock("ref_logprobs"):
                sequences = {key: completion.sequence for key, completion in held.items()}
                of_rows = self.penalty(sequences, extents, homes, cut=self.cut, parallel=self.parallel)
                penalty = np.array([of_rows[key] for key in extents]).reshape(len(kept), group_size)
        found = advantages([verdict.rewards for verdict in kept], self.cfg, self.asker.judge.reward_weights, kl_penalty=penalty)
        self.journal.rollout(JudgedRollout(number=number, harvest=reaped, advantages=found, penalty=penalty, held=mine))
        rows = tuple(_row(key, kept[key[1] // group_size], key[1] % group_size, found, homes[key]) for key in extents)
        samples = {key: self._sample(key, held[key], kept[key[1] // group_size], found) for key in sorted(held)}
        return Rollout(number=number, rows=rows, samples=samples, num_prompts=reaped.num_prompts)

    def _sample(self, key: RowKey, completion: Completion, verdict: Verdict, found: Advantages) -> Sample:
        place, member = divmod(key[1], len(verdict.rewards))
        sequence, trains = completion.sequence, not completion.is_refused
        sample = Sample(
            rollout=key[0],
            row=key[1],
            prompt_number=verdict.prompt_number,
            prefix=verdict.prefix,
            version=verdict.version,
            fresh_at=verdict.version,
            token_ids=sequence.token_ids,
            mask=sequence.mask & trains,
            starts=sequence.starts,
            shown=sequence.shown,
            experts=sequence.experts,
            kept_at=sequence.kept_at,
            kept_ids=sequence.kept_ids,
            sampler_logprobs=completion.logprobs if trains else np.zeros_like(completion.logprobs),
            advantage=float(found.advantages[place, member]),
            is_dead=bool(found.is_dead[place]),
            is_truncated=completion.ended == "length",
        )
        return sample.anchored(sample.sampler_logprobs, "rollout") if self.use_sampler_logprobs else sample


def _row(key: RowKey, verdict: Verdict, member: int, found: Advantages, home: int) -> Row:
    return Row(
        rollout=key[0],
        row=key[1],
        prompt_number=verdict.prompt_number,
        version=verdict.version,
        fresh_at=verdict.version,
        prefix=verdict.prefix,
        contexts=verdict.contexts[member],
        num_masked=0 if verdict.is_refused[member] else verdict.num_drawn[member],
        is_dead=bool(found.is_dead[key[1] // len(verdict.rewards)]),
        is_truncated=verdict.is_truncated[member],
        home=home,
    )
