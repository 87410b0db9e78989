"""Rollouts of a run: prompts are sampled and scored, and become rows that wait to be trained.

Rewards, integers and flags go to every rank. Tokens and log-probs go only to the ranks that will train them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megatron_grpo.core.batching.schedule import TrainingSchedule
from megatron_grpo.core.grpo.advantages import advantages, zero_std_groups
from megatron_grpo.core.metadata import SHARED_FIELDS, GroupMetadata, Rollout, TrainingRows, tokens_by_version
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.rollout.engine import Sampler, SamplingSettings
from megatron_grpo.core.settings import GrpoConfig
from megatron_grpo.core.trainer.generation import RolloutGenerator
from megatron_grpo.core.trainer.sample_buffer import DistributedRows, move_to_dp_ranks, score_rows, send_to_dp_ranks, without_experts
from megatron_grpo.core.trainer.scored_rollout import DynamicSamplingResult, PartialRolloutInfo, ScoredRollout, check_failures
from megatron_grpo.core.types import Completion, Prompt, RowKey, Sample, ScoredGroup

if TYPE_CHECKING:
    from megatron_grpo.core.base.activity import Timers
    from megatron_grpo.core.metadata import Progress
    from megatron_grpo.core.policy.policy import Policy
    from megatron_grpo.core.policy.reference import Reference
    from megatron_grpo.core.types import GlobalBatch

logger = logging.getLogger(__name__)


def dynamic_sampling(
    take: Callable[[int], list[Prompt]],
    give_back: Callable[[int], None],
    generate: Callable[[Sequence[Prompt]], Iterable[GroupMetadata]],
    are_zero_std: Callable[[Sequence[GroupMetadata]], Iterable[bool]],
    *,
    num_groups: int,
    oversample_ratio: float = 1.0,
    dynamic_sample: bool = False,
    max_resample_times: int = 3,
) -> DynamicSamplingResult:
    """Sample and score until there are `num_groups` groups to train on.

    Oversampling cuts the groups beyond `num_groups`, zero-std groups before others. From the first group that is cut and is not zero-std
    on, prompts go back to the stream, so that the next rollout samples them again: no prompt with a training signal is lost.

    Args:
        take: Takes a number of prompts from the stream.
        give_back: Returns a number of the last taken prompts to the stream.
        are_zero_std: Returns which groups are zero-std groups.
        dynamic_sample: Replace groups whose rewards are all equal by groups of further prompts (DAPO, arXiv:2503.14476, section 3.2). Other
            groups are never given up for another round; if there are too few of them, zero-std groups fill the rollout, the oldest first.
        max_resample_times: Largest number of rounds after the first.

    Returns:
        The groups, in the order of their prompts, and statistics of their sampling.
    """
    sampled: list[GroupMetadata] = []
    varied: list[GroupMetadata] = []
    zero_std: list[GroupMetadata] = []
    num_rounds = 0
    while num_rounds == 0 or (dynamic_sample and len(varied) < num_groups and num_rounds <= max_resample_times):
        metas = list(generate(take(num_asked(num_groups - len(varied), oversample_ratio))))
        sampled += metas
        for meta, is_zero_std in zip(metas, are_zero_std(metas), strict=True):
            (zero_std if is_zero_std else varied).append(meta)
        num_rounds += 1
    first_cut = varied[num_groups].prompt_number if len(varied) > num_groups else sampled[-1].prompt_number + 1
    num_given_back = sampled[-1].prompt_number + 1 - first_cut
    give_back(num_given_back)
    used = sorted([*varied[:num_groups], *zero_std[: max(0, num_groups - len(varied))]], key=lambda meta: meta.prompt_number)
    return DynamicSamplingResult(
        kept=used,
        sampled=sampled,
        num_rounds=num_rounds,
        num_given_back=num_given_back,
        num_zero_std_dropped=len(sampled) - num_given_back - num_groups,
    )


def num_asked(num_groups: int, oversample_ratio: float) -> int:
    """Return the number of prompts to sample in a round.

    Exact in decimals: 1.1 times 10 prompts are 11, not 12.

    Args:
        oversample_ratio: Prompts sampled per group needed.
    """
    return math.ceil(num_groups * Fraction(str(oversample_ratio)))


@dataclass(frozen=True, slots=True, kw_only=True)
class KlPenalty:
    """KL penalty of `kl_in_reward` by row: beta * sum over trained tokens of (log p - log p_ref)."""

    policy: Policy
    reference: Reference
    beta: float

    def __call__(self, placed: DistributedRows) -> tuple[np.ndarray, dict[RowKey, np.ndarray]]:
        """Compute the penalties. Collective.

        Returns:
            (penalty of every row, float64 [n], on every rank; log p, float32 [T], of the rows that this data-parallel rank holds).
        """
        cut, parallel = self.policy.cut, self.policy.parallel
        with self.policy.on_device("reference"):
            scored, scored_by_reference = (
                score_rows(placed, score=without_experts(logprobs), cut=cut, parallel=parallel)
                for logprobs in (self.policy.scorer.logprobs, self.reference.logprobs)
            )
        policy, reference = scored.logprobs, scored_by_reference.logprobs
        local = [(*key, self.beta * float((policy[key].astype(np.float64) - reference[key]).sum())) for key in policy]
        penalties = np.empty(len(placed.rows))
        for part in collectives.all_gather_object(np.array(local if parallel.is_model_parallel_src else []).reshape(-1, 3)):
            penalties[placed.rows.find_indices(part[:, 0].astype(np.int64), part[:, 1].astype(np.int64))] = part[:, 2]
        return penalties, move_to_dp_ranks(policy, scored.rows, placed.rows.dp_rank, parallel)


class Teacher(Protocol):
    """Teacher model that scores sampled tokens. `megatron_grpo.plugins.teacher.trainer` has two implementations."""

    def __call__(self, placed: DistributedRows) -> dict[RowKey, np.ndarray]:
        """Score the masked tokens of rows. Collective.

        Args:
            placed: The rows of a rollout.

        Returns:
            Log p of each masked token given those before it in its context, float32 [T], 0 elsewhere; of the rows on this DP rank.
        """


class PromptSource(Protocol):
    """The prompts of a run, in order. `run.data.prompts.PromptStream` documents its methods."""

    def take(self, count: int) -> list[Prompt]: ...

    def give_back(self, count: int) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def find_row(self, number: int) -> int: ...


class MetricsProcessor(Protocol):
    """Metrics of a run. `run.metrics.metrics_logger.MetricsLogger` documents its methods.

    Args:
        timers: Timers of the parts of a step.
    """

    timers: Timers

    def start(self, progress: Progress) -> None: ...

    def rollout(self, rollout: ScoredRollout) -> None: ...

    def step(self, progress: Progress, batch: GlobalBatch, metrics: Mapping[str, float], *, skipped: str | None = None) -> None: ...

    def skipped_step(self, progress: Progress, record: Mapping[str, Any], lines: Sequence[str]) -> None: ...

    def evaluation(self, progress: Progress, evaluated: Any) -> None: ...


class InterruptedSampling(Sampler, Protocol):
    """Completions that continue over weight syncs. `plugins.partial_rollouts.trainer.PartialRollouts` documents its methods."""

    def sampling(self, prompts: Sequence[tuple[Prompt, int]], sampling: SamplingSettings, *, seed: int) -> AbstractContextManager[None]: ...

    def interrupt(self, *, restarts: bool = False) -> None: ...

    def stats(self, first: int) -> dict[str, float]: ...

    def commit(self, first: int) -> None: ...


class Rollouts:
    """Rollouts of a run, sampled synchronously while training waits, or launched ahead and collected later.

    Launched rollouts sample the prompts that come next in the stream. The stream's position is advanced only by rollouts that have been
    collected. So a rollout selects its groups as if its prompts were sampled when it is collected, and a launch that is never collected
    leaves no trace.

    Args:
        penalty: KL penalty subtracted from the rewards; None without one.
        teacher: Scores sampled tokens; None without a teacher.
    """

    def __init__(
        self,
        generator: RolloutGenerator,
        prompts: PromptSource,
        *,
        cfg: GrpoConfig,
        schedule: TrainingSchedule,
        policy: Policy,
        logger: MetricsProcessor,
        penalty: KlPenalty | None = None,
        teacher: Teacher | None = None,
    ):
        self.generator, self.prompts, self.cfg, self.schedule = generator, prompts, cfg, schedule
        self.cut, self.parallel, self.logger, self.penalty, self.teacher = policy.cut, policy.parallel, logger, penalty, teacher
        self.num_groups = schedule.sizes.num_rollout_prompts
        # The generator's sampler, if it interrupts completions at weight syncs; set by the caller.
        self.partial: InterruptedSampling | None = None
        self._under_way: dict[int, int] = {}  # rollout number: prompts being sampled
        self._drained: set[int] = set()

    def sample(self, numbers: Iterable[int], ahead: Iterable[int] = ()) -> list[Rollout]:
        """Sample these rollouts with the engine's current weights. Collective.

        All are sampled and scored first; then the engine sleeps, and everything that needs the trainer's weights is computed.

        Args:
            ahead: Numbers of the rollouts that follow, whose prompts may be sampled in free slots of the engine. What is unfinished when
                `numbers` are complete continues at the next call. Only with `partial`.
        """
        requested = list(numbers)
        if not requested:
            return []
        partial = self.partial
        if partial is None:
            with self.generator.wake_up():
                results = [self._dynamic_sampling() for _ in requested]
            return [self._finish(number, *sampled, drained_at=None) for number, sampled in zip(requested, results, strict=True)]
        window = self._window([*requested, *ahead])
        with self.generator.wake_up(), partial.sampling(window, self.generator.sampling, seed=self.generator.seed):
            results = [self._dynamic_sampling() for _ in requested]
        num_used = sum(result.num_prompts for result, _ in results)
        stats = partial.stats(window[0][0].number + num_used)
        rollouts = [
            self._finish(number, *sampled, drained_at=None, partial=stats) for number, sampled in zip(requested, results, strict=True)
        ]
        partial.commit(window[0][0].number + num_used)
        return rollouts

    def _window(self, numbers: Sequence[int]) -> list[tuple[Prompt, int]]:
        """Return the next prompts of the stream that some rollouts are expected to need, each with the oldest version that it may have."""
        count = num_asked(self.num_groups, self.cfg.oversample_ratio)
        prompts = self.prompts.take(count * len(numbers))
        self.prompts.give_back(len(prompts))
        return [(prompt, self.schedule.oldest_version(numbers[index // count])) for index, prompt in enumerate(prompts)]

    def interrupt(self, *, restarts: bool = False) -> None:
        """Interrupt partial rollouts that are sampled in the background, and keep what they have. Collective.

        Args:
            restarts: Continue them at once, with the same weights.
        """
        if self.partial is not None:
            self.partial.interrupt(restarts=restarts)

    def launch(self, number: int) -> None:
        """Begin to sample a rollout with the engine's current weights. Returns at once. Collective."""
        num_under_way = sum(self._under_way.values())
        count = num_asked(self.num_groups, self.cfg.oversample_ratio)
        self.generator.begin(self.prompts.take(num_under_way + count)[num_under_way:])
        self.prompts.give_back(num_under_way + count)
        self._under_way[number] = count

    def collect(self, numbers: Iterable[int]) -> list[Rollout]:
        """Collect launched rollouts. Collective.

        Args:
            numbers: Numbers of all rollouts that were launched; those already drained are skipped.

        Raises:
            KeyError: Other rollouts were launched.
        """
        missing = [number for number in numbers if number not in self._drained]
        if not missing:
            return []
        if missing != list(self._under_way):
            raise KeyError(f"expected rollouts {list(self._under_way)} to be collected next, got {missing}")
        return self._collect_launched(drained_at=None)

    def drain(self, step: int, *, at_most: float | None = None) -> list[Rollout]:
        """Collect all launched rollouts early, for a checkpoint. `collect` does not return them again. Collective.

        Partial rollouts are only interrupted: the checkpoint has what they have sampled.

        Args:
            at_most: Largest time to wait, in seconds; None for no limit. If it passes, all launched rollouts are dropped.
        """
        self.interrupt(restarts=at_most is None)
        numbers = list(self._under_way)
        if not numbers:
            return []
        if at_most is None or self.generator.wait(at_most):
            self._drained.update(numbers)
            return self._collect_launched(drained_at=step)
        self._under_way = {}
        self.generator.forget()
        if collectives.rank() == 0:
            logger.warning(
                "Rollouts sampled ahead (%s) did not finish within stop_drain_seconds (%g) and are dropped; the resumed run samples "
                "these prompts again with newer weights.",
                ", ".join(map(str, numbers)),
                at_most,
            )
        return []

    def _collect_launched(self, *, drained_at: int | None) -> list[Rollout]:
        self.generator.wait()
        numbers, self._under_way = list(self._under_way), {}
        with self.generator.wake_up():
            results = [self._dynamic_sampling() for _ in numbers]
        self.generator.forget()
        return [self._finish(number, *sampled, drained_at=drained_at) for number, sampled in zip(numbers, results, strict=True)]

    def _dynamic_sampling(self) -> tuple[DynamicSamplingResult, dict[int, ScoredGroup]]:
        cfg = self.cfg
        result = dynamic_sampling(
            self.prompts.take,
            self.prompts.give_back,
            self.generator,
            lambda metas: zero_std_groups([meta.rewards for meta in metas], cfg, self.generator.reward_manager.reward_weights),
            num_groups=self.num_groups,
            oversample_ratio=cfg.oversample_ratio,
            dynamic_sample=cfg.dynamic_sample,
            max_resample_times=cfg.max_resample_times,
        )
        check_failures(result.sampled, self.generator.reward_manager.most_failed_episodes)
        return result, self.generator.take(result.kept)

    def _finish(
        self, number: int, result: DynamicSamplingResult, scored_groups: Mapping[int, ScoredGroup], *, drained_at: int | None,
        partial: Mapping[str, float] | None = None,
    ) -> Rollout:  # fmt: skip
        """Turn the scored groups of a rollout into rows and samples.

        Args:
            scored_groups: The scored groups that this rank generated, by their index in `result.kept`.
            drained_at: Number of optimizer steps done, if the rollout is collected before its own step.
            partial: Metrics of partial rollouts; None without them.
        """
        schedule, metas, version_collected = self.schedule, result.kept, self.schedule.find_version(number)
        _check_versions(number, result.sampled, at_least=schedule.oldest_version(number), at_most=version_collected)
        rows, is_trained = self._rows(number, metas, version_collected)
        completions = self._send_completions(rows, scored_groups)
        placed = DistributedRows(rows=rows, sequences={key: completion.sequence for key, completion in completions.items()})
        penalty, logprobs = None, None
        if self.penalty is not None:
            with self.generator.timers("ref_logprobs"):
                row_penalties, logprobs = self.penalty(placed)
                penalty = row_penalties.reshape(len(metas), -1)
        group_advantages = advantages(
            [meta.rewards for meta in metas], self.cfg, self.generator.reward_manager.reward_weights, kl_penalty=penalty
        )
        teacher_logprobs: Mapping[RowKey, np.ndarray | None] = dict.fromkeys(completions)
        if self.teacher is not None:
            with self.generator.timers("teacher"):
                teacher_logprobs = self.teacher(placed)
        # After everything that may end the run, so that a rollout that is sampled again is logged once.
        partial_info = None if partial is None else PartialRolloutInfo(version=version_collected, metrics=partial)
        self.logger.rollout(ScoredRollout(
            number=number, result=result, advantages=group_advantages, penalty=penalty, local_groups=scored_groups, partial=partial_info,
        ))  # fmt: skip
        size, group_size = self.cut.rows_per_slice, len(metas[0].rewards)
        rows = replace(
            rows,
            is_zero_std=np.repeat(group_advantages.is_zero_std, group_size),
            is_zero_advantage=np.ravel(group_advantages.advantages) == 0.0,
        )
        # The policy's log-probs are the old log-probs of stale slices, if the weights are those of the rollout's own step.
        if logprobs is not None and drained_at in (None, version_collected) and schedule.sizes.old_logprobs != "always":
            needs_old_logprobs = np.array(
                [schedule.needs_old_logprobs(number, slice_index) for slice_index in range(-(-len(rows) // size))]
            )
            rows = replace(rows, has_old_logprobs=needs_old_logprobs[rows.row // size])
        samples = {}
        for key, completion in completions.items():
            index = key[1]
            advantage = group_advantages.advantages[divmod(index, group_size)]
            sample = _sample(rows, index, completion, advantage, teacher_logprobs[key], is_trained=bool(is_trained[index]))
            if schedule.sizes.old_logprobs == "rollout":
                sample = sample.with_old_logprobs(sample.sampler_logprobs, "rollout")
            if rows.has_old_logprobs[index] and logprobs is not None:
                sample = sample.with_old_logprobs(logprobs[key] * sample.mask, "recompute")
            samples[key] = sample
        return Rollout(number=number, rows=rows, samples=samples, num_prompts=result.num_prompts)

    def _send_completions(self, rows: TrainingRows, scored_groups: Mapping[int, ScoredGroup]) -> dict[RowKey, Completion]:
        """Send completions to the data-parallel ranks that train them; return those that this rank holds. Collective."""
        sampled = {
            position * len(scored.group.completions) + i: completion
            for position, scored in scored_groups.items()
            for i, completion in enumerate(scored.group.completions)
        }
        completions = send_to_dp_ranks(
            ((int(rows.dp_rank[row]), (int(rows.rollout[row]), row), completion) for row, completion in sampled.items()), self.parallel
        )
        return {key: completions[key] for key in sorted(completions)}

    def _rows(self, number: int, metas: Sequence[GroupMetadata], version_collected: int) -> tuple[TrainingRows, np.ndarray]:
        """Return the rows of a rollout, and whether the sampled tokens of each may be trained.

        Args:
            version_collected: Weights version at which the rollout arrives, where a ratio against the trainer's log-probs is 1. Against
                the sampler's log-probs it is 1 at the version that sampled.
        """

        def repeat_per_completion(values: Iterable[int]) -> np.ndarray:
            return np.repeat(np.array(list(values), dtype=np.int64), len(metas[0].rewards))

        def flatten_completions(values: Iterable[Iterable[int]], dtype: type = np.int64) -> np.ndarray:
            return np.array(list(chain.from_iterable(values)), dtype=dtype)

        is_trained = flatten_completions((meta.is_trainable for meta in metas), bool)
        version = repeat_per_completion(meta.version for meta in metas)
        spans: list[tuple[int, ...]] = [()] * len(is_trained)
        if any(meta.spans for meta in metas):
            versions = [
                completion_spans for meta in metas for completion_spans in meta.spans or [((meta.version, 0, 0),)] * len(meta.rewards)
            ]
            version = np.array([min(version for version, _, _ in row_spans) for row_spans in versions])
            spans = list(map(_spans, versions))
        row, flags = np.arange(len(is_trained)), np.zeros(len(is_trained), dtype=bool)
        return TrainingRows(
            rollout=np.full_like(row, number),
            row=row,
            prompt_number=repeat_per_completion(meta.prompt_number for meta in metas),
            version=version,
            on_policy_version=version if self.schedule.sizes.old_logprobs == "rollout" else np.full_like(row, version_collected),
            prefix=repeat_per_completion(meta.prefix for meta in metas),
            num_contexts=flatten_completions(map(len, meta.contexts) for meta in metas),
            contexts=flatten_completions(chain.from_iterable(meta.contexts for meta in metas)),
            num_masked=flatten_completions(meta.num_sampled for meta in metas) * is_trained,
            **tokens_by_version(spans),
            is_zero_std=flags,
            is_zero_advantage=flags,
            is_truncated=flatten_completions((meta.is_truncated for meta in metas), bool),
            has_old_logprobs=flags,
            dp_rank=self.cut.find_dp_rank(row),
        ), is_trained


def _sample(
    rows: TrainingRows, index: int, completion: Completion, advantage: float, teacher_logprobs: np.ndarray | None, *, is_trained: bool
) -> Sample:
    sequence = completion.sequence
    return Sample(
        **{name: getattr(rows, name)[index].item() for name in SHARED_FIELDS},
        token_ids=sequence.token_ids,
        mask=sequence.mask & is_trained,
        starts=sequence.starts,
        images=sequence.images,
        experts=sequence.experts,
        mask_offsets=sequence.mask_offsets if is_trained else None,
        mask_ids=sequence.mask_ids if is_trained else None,
        sampler_logprobs=completion.logprobs if is_trained else np.zeros_like(completion.logprobs),
        teacher_logprobs=teacher_logprobs if is_trained else None,
        advantage=float(advantage),
        spans=_spans(completion.versions),
    )


def _spans(versions: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    """Return `Sample.spans` of `Completion.versions`."""
    return () if len({version for version, _, _ in versions}) == 1 else tuple(chain.from_iterable(versions))


def _check_versions(number: int, metas: Sequence[GroupMetadata], *, at_least: int, at_most: int) -> None:
    """Check that each group was sampled by the weights of the training schedule.

    They may be newer than planned: a resumed run samples dropped rollouts again, and servers that were lost sample with the weights they
    get when they return.

    Raises:
        ValueError: A group was sampled by other weights.
    """
    planned = f"version {at_least}" if at_least == at_most else f"version {at_least}, or up to {at_most}"
    for meta in metas:
        versions = {meta.version, *(version for spans in meta.spans for version, _, _ in spans)}
        if wrong := [version for version in sorted(versions) if not at_least <= version <= at_most]:
            raise ValueError(
                f"prompt {meta.prompt_number} of rollout {number} was sampled by weight version {wrong[0]}; the training schedule "
                f"expects {planned}"
            )
