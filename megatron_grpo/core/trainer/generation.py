"""Generation of scored completions: prompts are sampled, perhaps ahead; the results are checked; and all of them are scored."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from megatron_grpo.core.base.activity import Timers
from megatron_grpo.core.base.errors import RunError
from megatron_grpo.core.batching.prefix_groups import find_prefix
from megatron_grpo.core.metadata import GroupMetadata
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.rollout.engine import ROUNDING, BackgroundSampler, GenerationFuture, Sampler, SamplingSettings, WeightsLostError
from megatron_grpo.core.rollout.sampling_mask import TIES
from megatron_grpo.core.trainer.scored_rollout import GroupScorer, gather_metadata
from megatron_grpo.core.types import Completion, Group, Prompt, ScoredGroup, TokenSequence

if TYPE_CHECKING:
    from megatron_grpo.core.rollout.experts import ExpertLayers

logger = logging.getLogger(__name__)


class RolloutGenerator:
    """Generate and score completions for a list of prompts.

    All ranks receive the per-group metadata; each rank keeps the scored groups it generated until `take()`.

    Completions that were begun ahead are used when their prompts are requested; prompts are identified by their numbers. If the sampler
    loses its weights during a request, the policy's weights are synced again and the request continues. They are newer than the lost ones
    if the policy has trained since the request began. An evaluation uses this object as its `Sampler`.
    """

    def __init__(
        self,
        sampler: Sampler,
        reward_manager: GroupScorer,
        *,
        sampling: SamplingSettings,
        seed: int,
        timers: Timers,
        sync_again: Callable[[], object],
        before_sampling: Callable[[], object] = lambda: None,
        experts: ExpertLayers | None = None,
    ):
        """Set up the generator.

        Args:
            sync_again: Syncs the policy's weights to the sampler. Collective.
            before_sampling: Frees memory for the sampler, each time before it wakes. Collective.
            experts: Checks the recorded experts, if the sampler must return them; None otherwise.
        """
        self.sampler, self.reward_manager, self.sampling, self.seed, self.timers = sampler, reward_manager, sampling, seed, timers
        self._again, self._before, self._experts = sync_again, before_sampling, experts
        self._futures: list[GenerationFuture] = []
        self._begun: set[int] = set()  # numbers of prompts sampled ahead: the same on every rank
        self._landed: dict[int, Group] = {}  # finished groups of this rank, by prompt number
        self._held: dict[int, ScoredGroup] = {}  # by prompt number

    @contextmanager
    def wake_up(self) -> Iterator[None]:
        """Wake the sampler inside the block, as `Sampler.wake_up`."""
        self._before()
        with self.sampler.wake_up():
            yield

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        """Sample as `Sampler.generate`, regardless of what was begun ahead."""
        while True:
            try:
                return self.sampler.generate(prompts, sampling, seed=seed)
            except WeightsLostError:
                self._again()

    def begin(self, prompts: Sequence[Prompt]) -> None:
        """Begin to sample prompts that will be requested later. Returns at once. Collective.

        The sampler must be a `BackgroundSampler`.
        """
        self._futures.append(cast(BackgroundSampler, self.sampler).begin(prompts, self.sampling, seed=self.seed))
        self._begun |= {prompt.number for prompt in prompts}

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the completions that were begun. Collective.

        Args:
            seconds: Largest time to wait; None for no limit.

        Returns:
            Whether all are finished, the same on every rank.
        """
        start = time.perf_counter()
        deadline, took = time.monotonic() + (seconds or 0.0), 0.0
        with self.timers("rollout"):
            for future in self._futures:
                remaining = None if seconds is None else max(0.0, collectives.broadcast_object(deadline - time.monotonic()))
                groups = self._wait_for_groups(future, remaining)
                if groups is None:
                    return False
                self._landed |= {group.prompt.number: group for group in groups}
                took = max(took, future.seconds)
        self._futures = []
        if took:
            self.timers.beside("rollout_overlapped", max(0.0, took - (time.perf_counter() - start)))
        return True

    def _wait_for_groups(self, future: GenerationFuture, seconds: float | None) -> list[Group] | None:
        """Return the groups, or None if they take longer than `seconds`.

        With a limit, lost weights count as too late.
        """
        while future.wait(seconds):
            try:
                return future.groups()
            except WeightsLostError:
                if seconds is not None:
                    break
                self._again()
        return None

    def forget(self) -> None:
        """Drop everything that was begun: its prompts will be sampled again. Collective."""
        for future in self._futures:
            future.drop()
        self._futures, self._begun, self._landed = [], set(), {}

    def groups(self, prompts: Sequence[Prompt]) -> list[Group]:
        """Return this rank's groups of the prompts, in their order, as `Sampler.generate` does. Collective.

        What was begun must have finished (`wait`).

        Args:
            prompts: The prompts. Those that were not begun ahead are sampled now.
        """
        missing = [prompt for prompt in prompts if prompt.number not in self._begun]
        sampled = self.generate(missing, self.sampling, seed=self.seed) if missing else []
        groups_by_number = self._landed | {group.prompt.number: group for group in sampled}
        return [groups_by_number[prompt.number] for prompt in prompts if prompt.number in groups_by_number]

    def __call__(self, prompts: Sequence[Prompt]) -> list[GroupMetadata]:
        """Generate and score the completions of the prompts. Collective.

        Returns:
            The metadata of all groups, in the order of the prompts.

        Raises:
            RewardError: A reward function failed. Raised on every rank.
            InvalidLogprobsError: No completion has valid log-probs. Raised on every rank.
            InvalidSamplingMaskError: A sampling mask is missing or impossible.
            InvalidRoutingError: The recorded experts of a completion are missing or impossible.
        """
        with self.timers("rollout"):
            groups, impossible = exclude_invalid_logprobs(self.groups(prompts))
            impossible = [sentence for part in collectives.all_gather_object(impossible) for sentence in part]
            warning = invalid_logprobs_warning(impossible, self.sampling.n * len(prompts))
            if warning and collectives.rank() == 0:
                logger.warning(warning)
        for sequence in (completion.sequence for group in groups for completion in group.completions):
            if self._experts is not None:
                self._experts.check(sequence)
            if self.sampling.returns_sampling_mask:
                check_sampling_mask(sequence, self.sampling.top_k)
        groups = [replace(group, prefix=find_prefix(group.completions)) for group in groups]
        positions = {prompt.number: position for position, prompt in enumerate(prompts)}
        with self.timers("reward"):
            scored = self.reward_manager(groups, positions=[positions[group.prompt.number] for group in groups])
            metas = gather_metadata(scored)
        self.reward_manager.warn_of_sameness([row for meta in metas.values() for row in meta.rewards])
        self._held |= {group.group.prompt.number: group for group in scored}
        return [metas[prompt.number] for prompt in prompts]

    def take(self, metas: Sequence[GroupMetadata]) -> dict[int, ScoredGroup]:
        """Return the scored groups that this rank generated, and drop all others.

        Args:
            metas: Metadata of the wanted groups, of all ranks.

        Returns:
            {index in `metas`: scored group}.
        """
        scored, self._held = self._held, {}
        return {position: scored[meta.prompt_number] for position, meta in enumerate(metas) if meta.prompt_number in scored}


# ---- invalid log-probs -----------------------------------------------------------------------------------------------------------------


class InvalidLogprobsError(RuntimeError):
    """Error raised if all completions have log-probs that no distribution has: the sampler's weights, or its arithmetic, are broken."""


def first_invalid_logprob(logprobs: np.ndarray) -> int | None:
    """Return the index of the first log-prob that is NaN, infinite, or above 0 by more than rounding; None if all are valid.

    Args:
        logprobs: float [n], in nats.
    """
    invalid = np.flatnonzero(~np.isfinite(logprobs) | (logprobs > ROUNDING))
    return int(invalid[0]) if len(invalid) else None


def exclude_invalid_logprobs(groups: Sequence[Group]) -> tuple[list[Group], list[str]]:
    """Exclude completions with an invalid log-prob from training.

    Their tokens may not be samples of the policy, so none of them is trained. Without this, NaN would mean a ratio of 1 between trainer and
    sampler, and -inf the largest ratio there is.

    Returns:
        The groups, in which such completions have `is_refused`, and a description of each such completion.
    """
    faults: list[str] = []

    def exclude_if_invalid(group: Group, number: int, completion: Completion) -> Completion:
        sampled = completion.logprobs[completion.sequence.mask]
        index = first_invalid_logprob(sampled)
        if index is None:
            return completion
        faults.append(
            f"completion {number} of prompt {group.prompt.number} (row {group.prompt.row} of the data), token {index + 1} of "
            f"{len(sampled)}: {sampled[index]}"
        )
        return replace(completion, logprobs=np.where(completion.sequence.mask, np.float32(np.nan), np.float32(0.0)))

    checked = [
        replace(
            group, completions=tuple(exclude_if_invalid(group, number, completion) for number, completion in enumerate(group.completions))
        )
        for group in groups
    ]
    return checked, faults


def invalid_logprobs_warning(faults: Sequence[str], total: int) -> str | None:
    """Return the warning about refused completions, or None if there are none.

    Args:
        faults: Descriptions of the refused completions, of all ranks.
        total: Number of completions that were sampled together.

    Raises:
        InvalidLogprobsError: All completions were refused.
    """
    if not faults:
        return None
    warning = f"{len(faults)} of {total} completions have an invalid log-prob (NaN, infinite or above 0; the first: {faults[0]})"
    if len(faults) == total:
        raise InvalidLogprobsError(f"{warning}. The sampler's weights or kernels are faulty.")
    return f"{warning}; these completions are not trained"


# ---- sampling masks ----------------------------------------------------------------------------------------------------------------------


class InvalidSamplingMaskError(RunError):
    """Error raised if a sampling mask is missing or impossible: the trainer's softmax would run over other tokens than the sampler's."""


def check_sampling_mask(sequence: TokenSequence, top_k: int) -> None:
    """Check the sampling mask of a sequence.

    Each masked token must be one of the distinct token IDs that survived filtering at its position, and at most `1 + top_k + TIES` may
    survive.

    Raises:
        InvalidSamplingMaskError: The mask is missing or impossible.
    """
    try:
        sampling_mask = sequence.sampling_mask
    except ValueError as error:
        raise InvalidSamplingMaskError(f"The sampler returned an incomplete sampling mask: {error}.") from error
    if sampling_mask is None and not sequence.num_masked:
        return
    if sampling_mask is None:
        raise InvalidSamplingMaskError(f"The sampler returned no sampling mask for the {sequence.num_masked} tokens of a completion.")
    tokens, counts = sequence.token_ids[sequence.mask], sampling_mask.counts
    owners = np.repeat(np.arange(len(tokens)), counts)
    has_itself = np.zeros(len(tokens), dtype=bool)
    has_itself[owners[sampling_mask.ids == tokens[owners]]] = True
    max_size = 1 + top_k + TIES
    num_different = len(np.unique(owners << 32 | sampling_mask.ids))
    if not has_itself.all() or counts.max(initial=0) > max_size or num_different < len(sampling_mask.ids):
        index = int(np.argmin(has_itself)) if not has_itself.all() else int(np.argmax(counts))
        raise InvalidSamplingMaskError(
            f"The sampler returned an invalid sampling mask of {counts[index]} token IDs for token {index} of a completion "
            f"({tokens[index]}): the IDs must be distinct, include the token itself, and be at most {max_size} with top_k {top_k}."
        )
