"""Between a run and its sampler: prompts are asked, perhaps ahead; what comes with their tokens is checked; and all of it is judged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import numpy as np

from megatron_grpo.base.activity import Timers
from megatron_grpo.base.errors import RunError
from megatron_grpo.batching.prefix_groups import prefix_of
from megatron_grpo.parallel import collectives
from megatron_grpo.rollout.engine import ROUNDING, BackgroundSampler, GenerationFuture, Sampler, SamplingSettings, WeightsLostError
from megatron_grpo.rollout.experts import ExpertLayers
from megatron_grpo.rollout.vllm_requests import TIES
from megatron_grpo.trainer.reward_manager import RewardManager, verdicts_of
from megatron_grpo.types import Completion, Group, GroupMetadata, Prompt, ScoredGroup
from megatron_grpo.types import Sequence as Tokens

logger = logging.getLogger(__name__)


class RolloutGenerator:
    """Prompts -> verdicts, the same on every rank. Keeps the groups that this rank has judged, until they are taken.

    What is begun ahead is taken when its prompts are asked for; prompts are told apart by their numbers. Where the sampler loses its
    weights in the middle of a question, the policy's are pushed again and the question goes on. They are newer than those that were lost
    if the policy has trained since the question was begun. An evaluation has this object as its `Sampler`.
    """

    def __init__(
        self,
        sampler: Sampler,
        judge: RewardManager,
        *,
        sampling: SamplingSettings,
        seed: int,
        clock: Timers,
        again: Callable[[], object],
        before: Callable[[], object] = lambda: None,
        experts: ExpertLayers | None = None,
    ):
        """seed: of the run. clock: told what sampling and judging take. again: gives the sampler the policy's weights. before: makes room
        for the sampler, each time before it wakes. Both are collective. experts: if the sampler must tell which ones it took."""
        self.sampler, self.judge, self.sampling, self.seed, self.clock = sampler, judge, sampling, seed, clock
        self._again, self._before, self._experts = again, before, experts
        self._flights: list[GenerationFuture] = []
        self._begun: set[int] = set()  # numbers of prompts: the same on every rank
        self._landed: dict[int, Group] = {}  # of this rank
        self._held: dict[int, ScoredGroup] = {}  # by the prompt's number

    @contextmanager
    def awake(self) -> Iterator[None]:
        """As `Sampler.awake`."""
        self._before()
        with self.sampler.awake():
            yield

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        """As `Sampler.generate`, whatever was begun."""
        while True:
            try:
                return self.sampler.generate(prompts, sampling, seed=seed)
            except WeightsLostError:
                self._again()

    def begin(self, prompts: Sequence[Prompt]) -> None:
        """They will be asked for later. Returns at once. Needs a `BackgroundSampler`. Collective."""
        self._flights.append(cast(BackgroundSampler, self.sampler).begin(prompts, self.sampling, seed=self.seed))
        self._begun |= {prompt.number for prompt in prompts}

    def wait(self, seconds: float | None = None) -> bool:
        """For what was begun, at most so long; whether all has been answered, the same on every rank. Collective."""
        began = time.perf_counter()
        deadline, took = time.monotonic() + (seconds or 0.0), 0.0
        with self.clock("rollout"):
            for flight in self._flights:
                left = None if seconds is None else max(0.0, collectives.broadcast_object(deadline - time.monotonic()))
                groups = self._groups_of(flight, left)
                if groups is None:
                    return False
                self._landed |= {group.prompt.number: group for group in groups}
                took = max(took, flight.seconds)
        self._flights = []
        if took:
            self.clock.beside("rollout_overlapped", max(0.0, took - (time.perf_counter() - began)))
        return True

    def _groups_of(self, flight: GenerationFuture, seconds: float | None) -> list[Group] | None:
        """None if they take longer. With a limit, lost weights mean that the answers do not come in time."""
        while flight.wait(seconds):
            try:
                return flight.groups()
            except WeightsLostError:
                if seconds is not None:
                    break
                self._again()
        return None

    def forget(self) -> None:
        """What was begun is no longer wanted: the prompts will be asked anew. Collective."""
        for flight in self._flights:
            flight.drop()
        self._flights, self._begun, self._landed = [], set(), {}

    def groups(self, prompts: Sequence[Prompt]) -> list[Group]:
        """As `Sampler.generate`, in the order of the prompts. What was begun must have landed. Collective."""
        others = [prompt for prompt in prompts if prompt.number not in self._begun]
        asked = self.generate(others, self.sampling, seed=self.seed) if others else []
        found = self._landed | {group.prompt.number: group for group in asked}
        return [found[prompt.number] for prompt in prompts if prompt.number in found]

    def __call__(self, prompts: Sequence[Prompt]) -> list[GroupMetadata]:
        """In the order of the prompts. Collective; raises RewardError, or InvalidLogprobsError, on every rank."""
        with self.clock("rollout"):
            groups, impossible = refuse_impossible(self.groups(prompts))
            impossible = [sentence for part in collectives.all_gather_object(impossible) for sentence in part]
            warning = warning_of(impossible, self.sampling.n * len(prompts))
            if warning and collectives.rank() == 0:
                logger.warning(warning)
        for sequence in (completion.sequence for group in groups for completion in group.completions):
            if self._experts is not None:
                self._experts.check(sequence)
            if self.sampling.tells_kept:
                check_kept(sequence, self.sampling.top_k)
        groups = [replace(group, prefix=prefix_of(group.completions)) for group in groups]
        places = {prompt.number: place for place, prompt in enumerate(prompts)}
        with self.clock("reward"):
            scored = self.judge(groups, places=[places[group.prompt.number] for group in groups])
            verdicts = verdicts_of(scored)
        self.judge.warn_of_sameness([row for verdict in verdicts.values() for row in verdict.rewards])
        self._held |= {one.group.prompt.number: one for one in scored}
        return [verdicts[prompt.number] for prompt in prompts]

    def take(self, verdicts: Sequence[GroupMetadata]) -> dict[int, ScoredGroup]:
        """{place among the verdicts: scored group} of those that this rank has judged. What else it held is forgotten."""
        held, self._held = self._held, {}
        return {place: held[verdict.prompt_number] for place, verdict in enumerate(verdicts) if verdict.prompt_number in held}


# ---- log-probs that no distribution has ------------------------------------------------------------------------------------------------


class InvalidLogprobsError(RuntimeError):
    """The sampler's log-probs are those of no distribution: its weights, or its arithmetic, are broken."""


def first_impossible(logprobs: np.ndarray) -> int | None:
    """The place of the first log-prob that no distribution has: NaN, infinite, or above 0."""
    wrong = np.flatnonzero(~np.isfinite(logprobs) | (logprobs > ROUNDING))
    return int(wrong[0]) if len(wrong) else None


def refuse_impossible(groups: Sequence[Group]) -> tuple[list[Group], list[str]]:
    """The groups, in which a completion with an impossible log-prob `is_refused`; and what was seen in each such completion.

    Its tokens cannot be trusted to be draws of the policy, so none of them is trained. Taken as they are, NaN would mean a ratio of 1
    between trainer and sampler, and -inf the largest ratio there is.
    """
    found: list[str] = []

    def judged(group: Group, place: int, completion: Completion) -> Completion:
        drawn = completion.logprobs[completion.sequence.mask]
        wrong = first_impossible(drawn)
        if wrong is None:
            return completion
        found.append(
            f"completion {place} of prompt {group.prompt.number} (row {group.prompt.row} of the data), token {wrong + 1} of "
            f"{len(drawn)}: {drawn[wrong]}"
        )
        return replace(completion, logprobs=np.where(completion.sequence.mask, np.float32(np.nan), np.float32(0.0)))

    kept = [replace(group, completions=tuple(judged(group, place, one) for place, one in enumerate(group.completions))) for group in groups]
    return kept, found


def warning_of(found: Sequence[str], total: int) -> str | None:
    """What a person should be told of the completions refused, of all that were sampled together; None where there are none.

    Raises InvalidLogprobsError where that leaves no completion.
    """
    if not found:
        return None
    said = f"{len(found)} of {total} completions have a log-prob that no distribution has (the first: {found[0]})"
    if len(found) == total:
        raise InvalidLogprobsError(f"{said}. The sampler's weights or its arithmetic are broken.")
    return f"{said}: nothing of them is trained"


# ---- what was left of the vocabulary -----------------------------------------------------------------------------------------------------


class InvalidSamplingMaskError(RunError):
    """The sampler did not say what it left of the vocabulary, or what cannot be. The trainer's softmax would be another one's."""


def check_kept(sequence: Tokens, top_k: int) -> None:
    """Each masked token is one of the different words that it was drawn among, no more of them than may travel. Raises
    InvalidSamplingMaskError.
    """
    try:
        kept = sequence.kept
    except ValueError as error:
        raise InvalidSamplingMaskError(
            f"the sampler does not say of each token of a completion among which words it drew it: {error}."
        ) from error
    if kept is None and not sequence.num_masked:
        return
    if kept is None:
        raise InvalidSamplingMaskError(
            f"the sampler did not say among which words it drew the {sequence.num_masked} tokens of a completion."
        )
    tokens, counts = sequence.token_ids[sequence.mask], kept.counts
    owners = np.repeat(np.arange(len(tokens)), counts)
    has_itself = np.zeros(len(tokens), dtype=bool)
    has_itself[owners[kept.ids == tokens[owners]]] = True
    most = 1 + top_k + TIES
    num_different = len(np.unique(owners << 32 | kept.ids))
    if not has_itself.all() or counts.max(initial=0) > most or num_different < len(kept.ids):
        place = int(np.argmin(has_itself)) if not has_itself.all() else int(np.argmax(counts))
        raise InvalidSamplingMaskError(
            f"the sampler says that it drew token {place} of a completion ({tokens[place]}) among {counts[place]} words: the token itself "
            f"must be one of them, each once, and there are at most {most} with top_k {top_k}."
        )
