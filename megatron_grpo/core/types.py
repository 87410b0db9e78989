"""Data types of a run, in the order in which a completion passes them.

A stage takes one type and returns the next: Prompt -> Group -> ScoredGroup -> Sample -> GlobalBatch. The types of episodes are last. What
every rank knows of these, without tokens and texts, is in `core/metadata.py`.

All are frozen: a stage returns a new object and never fills in what an earlier one left out. This module does not import torch: token
sequences are numpy arrays, and become tensors on the policy's device where a micro-batch is run. T counts the tokens of one sequence (of
the packed stream in a micro-batch), C its trained positions, S the sequences in a micro-batch. Log-probs are natural logs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

import numpy as np

from megatron_grpo.core.arrays import SamplingMask, empty_index

OldLogprobs = Literal["on_policy", "recompute", "cached", "rollout"]
RowKey = tuple[int, int]  # (rollout, row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Tokenised prompt, with the data set columns that its reward functions need.

    Args:
        number: Index in the run's stream of prompts, from 0, over all epochs: the number that `plan` prints.
        row: Row in the data set.
        raw: The prompt as in the data set: a string, or chat messages.
        columns: Every other column of the row, by name.
        images: (index in token_ids, image).
    """

    number: int
    row: int
    raw: str | Sequence[Mapping[str, Any]]
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any]
    images: tuple[tuple[int, Image], ...] = ()


class Image(Protocol):
    """Preprocessed image.

    Its position in the sequence is kept beside it, since several contexts may contain one image at several positions.
    """

    @property
    def key(self) -> str:
        """Identity of the image. Two images have equal keys only if their patches are equal."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """Number of patches as (frames, rows, columns)."""

    @property
    def merge(self) -> int:
        """Patches per token along each side: `merge` x `merge` patches are one token."""

    def patches(self) -> np.ndarray:
        """Return the patches, float32 [n, channels]."""

    def data(self) -> bytes:
        """Return the bytes of the image file, which the sampler decodes itself."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSequence:
    """Token sequence, with the mask of the tokens to score. It carries no advantage and no loss.

    A context is a stretch that attends causally from its own beginning; `starts` says where the contexts begin. The first token of a
    context is never scored, because no token predicts it.

    Args:
        token_ids: Token IDs, int64 [T].
        mask: Tokens to score, bool [T].
        starts: Index of the first token of each context.
        images: (index in token_ids, image), ascending.
        experts: Where the sampler routed each token; -1 routes freely; int16 [T, MoE layers, k].
        mask_offsets: Offset of each masked token's row in kept_ids, int64 [masked + 1].
        mask_ids: Token IDs that survived top-k, top-p and min-p; None, as mask_offsets: no filtering; int32 [m].
    """

    token_ids: np.ndarray
    mask: np.ndarray
    starts: tuple[int, ...] = (0,)
    images: tuple[tuple[int, Image], ...] = ()
    experts: np.ndarray | None = None
    mask_offsets: np.ndarray | None = None
    mask_ids: np.ndarray | None = None

    @property
    def contexts(self) -> tuple[RowKey, ...]:
        """(begin, end) of each context, in tokens."""
        return tuple(zip(self.starts, (*self.starts[1:], len(self.token_ids)), strict=True))

    @property
    def num_masked(self) -> int:
        """Number of tokens to score."""
        return int(self.mask.sum())

    @property
    def sampling_mask(self) -> SamplingMask | None:
        """Sampling mask of the masked tokens, or None without filtering.

        Raises:
            ValueError: The sampling mask covers another number of tokens than `mask` does.
        """
        if self.mask_offsets is None or self.mask_ids is None:
            return None
        if len(self.mask_offsets) != self.num_masked + 1 or self.mask_offsets[-1] != len(self.mask_ids):
            raise ValueError(
                f"the sampling mask has {len(self.mask_offsets) - 1} rows and {len(self.mask_ids)} token IDs; {self.num_masked} rows "
                "are needed"
            )
        return SamplingMask(self.mask_offsets, self.mask_ids)

    def scatter(self, values: np.ndarray) -> np.ndarray:
        """Scatter one value per masked token to all tokens.

        Args:
            values: [masked].

        Returns:
            float32 [T], 0 at tokens outside the mask.
        """
        spread = np.zeros(len(self.token_ids), dtype=np.float32)
        spread[self.mask] = values
        return spread


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """Sampled completion, together with the prompt that it answers.

    `sequence.mask` marks the tokens that the sampler generated.

    Args:
        logprobs: The sampler's log-prob of each sampled token; 0 elsewhere; float32 [T].
        finish_reason: Finish reason: "stop" or "length"; for an episode see `EpisodeNumbers`.
        versions: (weights version, begin, end) of each stretch, as token indices into the sequence.
        record: Record of the episode; None for a plain completion.
        columns: Extra columns that a rollout function passes to the reward functions.
    """

    sequence: TokenSequence
    logprobs: np.ndarray
    text: str
    finish_reason: str
    versions: tuple[tuple[int, int, int], ...]
    record: EpisodeRecord | None = None
    columns: Mapping[str, Any] | None = None

    @property
    def version(self) -> int:
        """Version of the oldest weights that sampled any part of it."""
        return min(version for version, _, _ in self.versions)

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """Token IDs after the opening in the last context: the sampled tokens of a single answer."""
        begin, end = self.sequence.contexts[-1]
        sampled = np.flatnonzero(self.sequence.mask[begin:end])
        return tuple(self.sequence.token_ids[begin + int(sampled[0]) : end].tolist()) if len(sampled) else ()

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return self.sequence.num_masked

    @property
    def is_refused(self) -> bool:
        """Whether its log-probs are invalid (see `trainer.generation`). Nothing of it is trained; it still counts in N."""
        return bool(np.isnan(self.logprobs).any())

    @property
    def is_failed(self) -> bool:
        """Whether its environment failed. No reward applies to it and nothing of it is trained; it still counts in N."""
        return self.finish_reason in FAULTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Prompt with its `num_generations` completions.

    Args:
        prefix: Length of the common prefix of every context of every completion, in computed tokens.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    prefix: int = 0

    @property
    def version(self) -> int:
        """Version of the oldest weights that sampled any part of it."""
        return min(completion.version for completion in self.completions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """Group with the rewards of all its completions; the unit over which GRPO compares.

    Args:
        group: The prompt and its completions.
        rewards: Reward of each completion by each function, [num_generations, num_reward_funcs]; `None` where a function does not
            apply to a completion.
    """

    group: Group
    rewards: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample(TokenSequence):
    """Trainable sequence: its tokens, its advantage, and the weights that sampled it.

    Args:
        row: Index in its rollout: prompt row // G, generation row % G.
        prefix: Length of its group's common prefix, in computed tokens.
        version: Version of the oldest weights that sampled any part of it.
        spans: Version, begin, end of each stretch, one after another, in tokens; empty if all are of `version`.
        on_policy_version: Weights version at which its ratio is 1 without old log-probs.
        sampler_logprobs: The sampler's log-probs, float32 [T]; 0 where the mask is false, NaN where the sampler gave none.
        teacher_logprobs: The teacher's log-probs, float32 [T]; 0 where the mask is false; None: not scored by a teacher.
        is_zero_std: Whether all rewards of its group are equal up to rounding.
        is_truncated: Whether it reached max_completion_length.
    """

    rollout: int
    row: int
    prompt_number: int
    prefix: int = 0
    version: int
    spans: tuple[int, ...] = ()
    on_policy_version: int
    sampler_logprobs: np.ndarray
    teacher_logprobs: np.ndarray | None = None
    advantage: float
    is_zero_std: bool
    is_truncated: bool

    @property
    def key(self) -> RowKey:
        """(rollout, row) of the sample."""
        return self.rollout, self.row

    @property
    def is_zero_advantage(self) -> bool:
        """Whether its advantage is exactly 0, as in a zero-std group."""
        return self.advantage == 0.0

    def with_old_logprobs(self, logprobs: np.ndarray, by: OldLogprobs) -> SampleWithOldLogprobs:
        """Return the sample with the old log-probs of its importance ratio.

        Args:
            logprobs: float32 [T], 0 where the mask is false.

        Raises:
            ValueError: A trained token has no old log-prob, and `by` is not "rollout".
        """
        values = {field.name: getattr(self, field.name) for field in fields(Sample)}
        return SampleWithOldLogprobs(**values, old_logprobs=logprobs, old_logprobs_from=by)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleWithOldLogprobs(Sample):
    """Sample with the old log-probs of its importance ratio. A stale `Sample` without them cannot be collated.

    Only a sampler may leave out single tokens. Elsewhere a missing (NaN) log-prob is an error, because the loss would read it as on-policy.

    Args:
        old_logprobs: Old log-probs, float32 [T]; 0 where the mask is false; NaN where a sampler gave none.

    Raises:
        ValueError: A trained token has no old log-prob, and they do not come from a sampler.
    """

    old_logprobs: np.ndarray
    old_logprobs_from: OldLogprobs

    def __post_init__(self) -> None:
        missing = int(np.isnan(self.old_logprobs[self.mask]).sum())
        if missing and self.old_logprobs_from != "rollout":
            raise ValueError(
                f"row {self.row} of rollout {self.rollout} has no old log-prob at {missing} of {int(self.mask.sum())} trained tokens"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Arrays of one forward pass: sequences packed end to end, `[sequence | sequence | ...]`, in numpy.

    `logit_positions[c]` is the position in the stream whose hidden state predicts `targets[c]`. Arrays indexed by C are ordered by row, and
    within a row by token.

    Args:
        number: Index in the pass.
        token_ids: Token IDs, int64 [T].
        positions: Position of each token in its context; [3, T] (frame, row, column) if there is an image; int64 [T].
        num_references: Number of contexts that share a token; 0 is alignment padding; int64 [T].
        segments: Parents, then their children (grouped by parent), then segments without parent or child, then padding; they cover the
            stream.
        logit_positions: Position whose logits predict each target, int64 [C]; a position that several contexts share predicts
            several tokens.
        targets: Token to predict at each position, int64 [C].
        sequence: Index of the sequence that each trained position belongs to, 0..S-1; int64 [C].
        num_sequences: Number of sequences S.
        places: Position of each in the stream; -1: not computed; int64 [tokens of all sequences, row by row].
        experts: Experts to replay for each token; -1 routes freely; int16 [T, MoE layers, k].
        sampling_mask: Token IDs that the softmax of each of the C trained positions runs over; None: the whole vocabulary.
        images: Each image once, however many contexts contain it.
        image_positions: Positions of image tokens in the stream, ascending; int64 [n].
        image_token_index: Index of the image token among those of all `images`, int64 [n].
    """

    number: int
    token_ids: np.ndarray
    positions: np.ndarray
    num_references: np.ndarray
    segments: tuple[Segment, ...]
    logit_positions: np.ndarray
    targets: np.ndarray
    sequence: np.ndarray
    num_sequences: int
    num_contexts: int
    places: np.ndarray
    experts: np.ndarray | None = None
    sampling_mask: SamplingMask | None = None
    images: tuple[Image, ...] = ()
    image_positions: np.ndarray = field(default_factory=empty_index)
    image_token_index: np.ndarray = field(default_factory=empty_index)

    def by_sequence(self, values: np.ndarray) -> list[np.ndarray]:
        """Split values by sequence.

        Args:
            values: [C], one value per trained position.

        Returns:
            The values of each of the S sequences.
        """
        return [values[self.sequence == number] for number in range(self.num_sequences)]

    @property
    def is_padding(self) -> np.ndarray:
        """Tokens that are alignment padding only (context and sequence parallelism), bool [T]."""
        return self.num_references == 0

    @property
    def num_padding_tokens(self) -> int:
        """Number of alignment padding tokens."""
        return int(self.is_padding.sum())

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the stream, alignment padding included."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Stretch of the packed stream that attends causally to itself, and to all of its parent if it has one.

    Args:
        start: First token, as an index into the whole stream (before context parallelism splits it).
        end: One past the last token, alignment padding included.
        parent: Index of a segment that has no parent, or -1.
        length: Number of tokens before the alignment padding, which children do not attend to; 0 is a segment of padding.
    """

    start: int
    end: int
    parent: int = -1
    length: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingMicroBatch(MicroBatch):
    """Micro-batch with the inputs of its loss.

    Args:
        rows: Row of each sequence, [S].
        prompts: Prompt number of each sequence, [S].
        token_index: Token index of each trained position in its row, from 0, untrained tokens counted; int64 [C].
        token_weights: Weight of each position, float64 [C]; `u` of docs/algorithms.md section 1, fixed over the whole global batch.
        advantages: Advantage of each position, float32 [C].
        teacher_logprobs: The teacher's log-probs, float32 [C]; NaN where no teacher scored the row.
        sampler_logprobs: The sampler's log-probs, float32 [C]; NaN where the sampler gave none.
        old_logprobs: Old log-probs, float32 [C]; NaN where the sequence is on-policy: there `logp.detach()` is the old log-prob.
        is_compared: Whether old log-probs come from the trainer, so that comparing them with the sampler's is meaningful; bool [C].
    """

    rows: tuple[RowKey, ...]
    prompts: tuple[int, ...]
    token_index: np.ndarray
    token_weights: np.ndarray
    advantages: np.ndarray
    teacher_logprobs: np.ndarray
    sampler_logprobs: np.ndarray
    old_logprobs: np.ndarray
    is_compared: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GlobalBatch:
    """Micro-batches of one optimizer step on this data-parallel rank.

    Token weights are already fixed over the whole step.

    Args:
        step: Optimizer steps done before it.
        num_sequences: N of the whole step, over all data-parallel ranks.
        num_loss_tokens: Sum of the masks over the whole step.
        num_tokens: Tokens of the whole step, prompts included, alignment padding not.
        num_contexts: Contexts of the whole step.
        num_left_out: Sequences of the whole step that are not computed, because they have no gradient; all other counts include them.
        placed: (rollout, row), rank by rank, micro-batch by micro-batch; int64 [computed rows, 2].
        counts: Number of rows of each micro-batch, int64 [data-parallel ranks, micro-batches].
        staleness: Staleness of each sequence of the whole step, in optimizer steps, int64 [N].
        lag: Part of that staleness on arrival, int64 [N], because sampling ran ahead.
        by_token: Metrics of staleness by token, with partial rollouts.
        tokens_by_version: [version, sampled tokens] of each stretch of each sequence of the whole step, in the order of `staleness`, with
            partial rollouts; of a sequence of which nothing is trained an empty list.
    """

    step: int
    micro_batches: tuple[TrainingMicroBatch, ...]
    num_sequences: int
    num_loss_tokens: int
    num_tokens: int
    num_contexts: int
    num_left_out: int = 0
    placed: np.ndarray
    counts: np.ndarray
    staleness: np.ndarray
    lag: np.ndarray
    by_token: Mapping[str, float] = field(default_factory=dict)
    tokens_by_version: list[list[list[int]]] = field(default_factory=list)

    def rows_by_micro_batch(self) -> list[list[list[list[int]]]]:
        """Return (rollout, row) of the rows of the whole step, indexed by micro-batch, data-parallel rank and row."""
        parts = iter(np.split(self.placed, np.cumsum(self.counts.ravel())[:-1]))
        by_rank = [[next(parts).tolist() for _ in rank_counts] for rank_counts in self.counts]
        return [list(rank_parts) for rank_parts in zip(*by_rank, strict=True)]

    @property
    def newest_version(self) -> int:
        """Version of the newest weights that sampled any of its sequences."""
        return self.step - int(self.staleness.min())

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of the whole step that are computed if no sequence is left out, without alignment padding.

        The last token of a context predicts nothing and is not computed.
        """
        return self.num_tokens - self.num_contexts

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the whole step; but `packing/efficiency` and `packing/shared` of this rank's share."""
        computed = sum(micro_batch.num_tokens for micro_batch in self.micro_batches)
        padding = sum(micro_batch.num_padding_tokens for micro_batch in self.micro_batches)
        needed = sum(int(micro_batch.num_references.sum()) for micro_batch in self.micro_batches)
        return {
            "staleness/mean": int(self.staleness.sum()) / len(self.staleness),
            "staleness/max": int(self.staleness.max()),
            "staleness/lag": int(self.lag.sum()) / len(self.lag),
            "packing/completions": len(self.staleness),
            "packing/computed_completions": len(self.staleness) - self.num_left_out,
            "packing/computed_rows": 1 - self.num_left_out / len(self.staleness),
            "packing/efficiency": 1 - padding / max(computed, 1),  # of this rank's share
            "packing/shared": 1 - (computed - padding) / max(needed, 1),  # of this rank's share
            **self.by_token,
        }


FAULTS = ("error", "timeout", "invalid")  # finish reasons of an episode whose environment failed: it has no reward and trains nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """Messages and rewards of an episode, for reward functions and the completions table.

    Args:
        messages: All messages, the opening included.
        num_opening: Number of messages that the first turn answers.
        turn_rewards: Rewards of the environment by turn; None where it gave none.
    """

    numbers: EpisodeNumbers
    messages: tuple[Mapping[str, Any], ...]
    num_opening: int
    turn_rewards: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeNumbers:
    """Numbers of an episode that every rank knows, besides those of any completion.

    Args:
        finish_reason: Finish reason: "done", "max_turns", "length", "max_seconds" (agents alone), or one of FAULTS.
        seconds: Seconds spent in its environment.
        metrics: Metrics of the environment, summed over its turns.
        fault: Description of the environment's failure, if it failed.
    """

    finish_reason: str
    num_turns: int
    seconds: float
    metrics: Mapping[str, float]
    fault: str = ""
