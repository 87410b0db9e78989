"""The nouns of a run. A stage takes one and returns the next: Prompt -> Group -> ScoredGroup -> Sample -> GlobalBatch.

All are frozen, slotted and keyword-only: a stage cannot fill in what an earlier one left out. No torch here: token
sequences are numpy arrays, and become tensors on the policy's device where a micro-batch is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

OldLogprobs = Literal["on_policy", "recompute", "cached", "rollout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question, tokenised once, with the columns its rewards will need."""

    number: int  # place in the run's stream of prompts, from 0, over all epochs: this is what `plan` prints
    row: int  # row in the data set
    raw: str | Sequence[Mapping[str, Any]]  # what the data set holds: a string, or chat messages
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any]  # every other column of the row, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled response. `logprobs[t]` is the sampler's own log-probability of `token_ids[t]` (natural log)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A prompt with its `num_generations` completions and the weights version that produced them."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group whose completions have all been judged; the unit over which GRPO compares.

    rewards: [num_generations][num_reward_funcs], `None` where a function does not apply to a completion.
    """

    group: Group
    rewards: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One trainable sequence. Arrays have one entry per token of `token_ids` (prompt, then completion).

    loss_mask[t] says that token t is trained (never true at t = 0); sampler_logprobs[t] is 0 where it is not.
    """

    row: int  # row inside its rollout: prompt row // G, generation row % G
    rollout: int
    prompt_number: int
    version: int  # the weights that sampled it
    token_ids: np.ndarray  # int64 [T]
    loss_mask: np.ndarray  # bool [T]
    sampler_logprobs: np.ndarray  # float32 [T]
    advantage: float
    is_dead: bool  # all rewards of its group are exactly equal
    is_truncated: bool  # ran into max_completion_length

    def spread(self, values: np.ndarray) -> np.ndarray:
        """One value per trained token -> float32 [T], 0 elsewhere."""
        spread = np.zeros(len(self.token_ids), dtype=np.float32)
        spread[self.loss_mask] = values
        return spread

    def anchored(self, logprobs: np.ndarray, by: OldLogprobs) -> AnchoredSample:
        """The sample with the log-probs (float32 [T]) that its ratio is taken against from now on."""
        values = {field.name: getattr(self, field.name) for field in fields(Sample)}
        return AnchoredSample(**values, old_logprobs=logprobs, anchored_by=by)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnchoredSample(Sample):
    """A sample with the log-probs that its ratio is taken against. A stale `Sample` without them cannot be collated.

    Raises ValueError where one is missing (NaN), which the loss would read as on-policy. Only a sampler may leave out single tokens.
    """

    old_logprobs: np.ndarray  # float32 [T], 0 where loss_mask is false; NaN where anchored by a sampler that gave none
    anchored_by: OldLogprobs

    def __post_init__(self) -> None:
        missing = int(np.isnan(self.old_logprobs[self.loss_mask]).sum())
        if missing and self.anchored_by != "rollout":
            raise ValueError(
                f"row {self.row} of rollout {self.rollout} has no old log-prob at {missing} of {int(self.loss_mask.sum())} trained tokens"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of the packed stream that attends causally to itself, and to its parent where it has one.

    start, end: in tokens of the whole stream (before context parallelism cuts it). parent: index of a segment, or -1.
    """

    start: int
    end: int
    parent: int = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """The arrays of one forward pass: sequences packed end to end, `[sequence | sequence | ...]`, in numpy.

    T tokens in the stream, C trained positions in it, S sequences. `predict_at[c]` is the place in the stream whose hidden state
    predicts `targets[c]`. Everything indexed by C is in stream order.
    """

    token_ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T], restart at 0 in every sequence
    segments: tuple[Segment, ...]  # cover the stream: one a sequence of two tokens or more, padded; and one of padding, perhaps
    predict_at: np.ndarray  # int64 [C]
    targets: np.ndarray  # int64 [C]
    sequence: np.ndarray  # int64 [C], 0..S-1: which sequence a trained position belongs to
    weights: np.ndarray  # float64 [C], `u` of algorithms section 1, fixed over the whole global batch
    advantages: np.ndarray  # float32 [C]
    sampler_logprobs: np.ndarray  # float32 [C]
    old_logprobs: np.ndarray  # float32 [C]; NaN where the sequence is on-policy: there `logp.detach()` is the old log-prob
    rows: tuple[tuple[int, int], ...]  # (rollout, row) of each of the S sequences
    is_padding: np.ndarray  # bool [T]: alignment only (context and sequence parallelism)

    @property
    def num_padding_tokens(self) -> int:
        return int(self.is_padding.sum())

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GlobalBatch:
    """One optimizer step: its micro-batches on this DP rank, with token weights already fixed over the whole step."""

    micro_batches: tuple[MicroBatch, ...]
    num_sequences: int  # N of the whole step, over all DP ranks
    num_loss_tokens: int  # sum of the loss mask over the whole step
    num_tokens: int  # tokens of the whole step, prompts included, alignment padding not
    staleness: tuple[int, ...]  # of each sequence of the whole step, in optimizer steps

    @property
    def num_computed_tokens(self) -> int:
        """Of the whole step, alignment padding not: the last token of a sequence predicts nothing and is not computed."""
        return self.num_tokens - len(self.staleness)

    @property
    def metrics(self) -> dict[str, float]:
        computed = sum(micro_batch.num_tokens for micro_batch in self.micro_batches)
        padding = sum(micro_batch.num_padding_tokens for micro_batch in self.micro_batches)
        return {
            "staleness/mean": sum(self.staleness) / len(self.staleness),
            "staleness/max": max(self.staleness),
            "packing/efficiency": 1 - padding / computed,  # of this rank's share
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come. `step` counts optimizer steps done; it is also the version of the weights."""

    step: int = 0
    num_rollouts: int = 0  # sampled so far
    num_prompts: int = 0  # drawn from the stream so far, over all epochs
    num_tokens: int = 0  # trained on so far, prompts included

    def after(self, *, num_rollouts: int = 0, num_prompts: int = 0, num_tokens: int = 0) -> Progress:
        """One optimizer step later: what that step sampled before it, and how many tokens it trained."""
        return Progress(
            step=self.step + 1,
            num_rollouts=self.num_rollouts + num_rollouts,
            num_prompts=self.num_prompts + num_prompts,
            num_tokens=self.num_tokens + num_tokens,
        )
