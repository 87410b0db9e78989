"""The nouns of a run. A stage takes one and returns the next: Prompt -> Group -> ScoredGroup -> Sample -> GlobalBatch.

All are frozen: a stage returns a new object and never fills in what an earlier one left out. No torch here: token sequences are numpy
arrays, and become tensors on the policy's device where a micro-batch is run. T counts the tokens of one sequence (of the packed stream in a
micro-batch), C its trained positions, S the sequences in a micro-batch. Log-probs are natural logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

OldLogprobs = Literal["on_policy", "recompute", "cached", "rollout"]
RowKey = tuple[int, int]  # (rollout, row)


def _none() -> np.ndarray:
    return np.zeros(0, dtype=np.int64)


class SamplingMask(NamedTuple):
    """The words that each of n tokens was drawn among, the token itself one of them. None of them: it was drawn among all."""

    at: NDArray[np.int64]  # [n + 1]: where each token's words begin in `ids`
    ids: NDArray[np.int32]  # [m]

    @property
    def counts(self) -> np.ndarray:
        """int64 [n]"""
        return np.diff(self.at)

    @classmethod
    def joined(cls, parts: SequenceOf[SamplingMask]) -> SamplingMask:
        """Of tokens that follow each other."""
        counts = np.concatenate([np.zeros(1, dtype=np.int64), *(part.counts for part in parts)])
        return cls(np.cumsum(counts), np.concatenate([np.zeros(0, dtype=np.int32), *(part.ids for part in parts)]))

    @classmethod
    def all_words(cls, count: int) -> SamplingMask:
        """Of tokens that were drawn among all."""
        return cls(np.zeros(count + 1, dtype=np.int64), np.zeros(0, dtype=np.int32))

    def taken(self, places: np.ndarray) -> SamplingMask:
        """Of these of the tokens, in this order."""
        counts = self.counts[places]
        at = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        return SamplingMask(at, self.ids[np.repeat(self.at[:-1][places] - at[:-1], counts) + np.arange(at[-1])])


class SequenceLengths(NamedTuple):
    """What packing knows of a row. Rows of one group begin alike."""

    contexts: tuple[int, ...]  # tokens of each
    group: tuple[int, int] | None = None  # (rollout, prompt number); None if it shares with none
    prefix: int = 0  # computed tokens that every context of the group begins with, as far as it is known


class TokensToScore(NamedTuple):
    """Tokens that are to be scored from `first` on, each given all before it."""

    ids: tuple[int, ...]
    first: int


class Image(Protocol):
    """What a picture is. Its place is kept beside it, since several contexts may show one picture at several places."""

    @property
    def key(self) -> str:
        """Equal for equal patches alone."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches: frames, rows, columns."""

    @property
    def merge(self) -> int:
        """So many by so many patches are one token."""

    def patches(self) -> np.ndarray:
        """float32 [n, channels]."""

    def data(self) -> bytes:
        """Of its file: what a sampler decodes by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question, tokenised once, with the columns its rewards will need."""

    number: int  # place in the run's stream of prompts, from 0, over all epochs: this is what `plan` prints
    row: int  # row in the data set
    raw: str | SequenceOf[Mapping[str, Any]]  # what the data set holds: a string, or chat messages
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any]  # every other column of the row, by name
    pictures: tuple[tuple[int, Image], ...] = ()  # (place in token_ids, picture)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequence:
    """What can be scored: tokens, and which of them to score. It knows of no advantage and no loss.

    A context is a stretch that attends causally from its own beginning; `starts` says where they begin. The first token of a context is
    never scored, for nothing predicts it.
    """

    token_ids: np.ndarray  # int64 [T]
    mask: np.ndarray  # bool [T]
    starts: tuple[int, ...] = (0,)
    shown: tuple[tuple[int, Image], ...] = ()  # (place in token_ids, picture), ascending
    experts: np.ndarray | None = None  # int16 [T, MoE layers, k]: where the sampler routed each token; -1 routes freely
    kept_at: np.ndarray | None = None  # int64 [masked + 1]: where each masked token's kept words begin in kept_ids
    kept_ids: np.ndarray | None = None  # int32 [m]: the words that top-k, top-p and min-p left; None with kept_at: all of them

    @property
    def contexts(self) -> tuple[RowKey, ...]:
        """(begin, end) of each, in tokens."""
        return tuple(zip(self.starts, (*self.starts[1:], len(self.token_ids)), strict=True))

    @property
    def num_masked(self) -> int:
        return int(self.mask.sum())

    @property
    def kept(self) -> SamplingMask | None:
        """What its masked tokens were drawn among. Raises ValueError where that is told of another number of tokens."""
        if self.kept_at is None or self.kept_ids is None:
            return None
        if len(self.kept_at) != self.num_masked + 1 or self.kept_at[-1] != len(self.kept_ids):
            raise ValueError(
                f"kept words of {len(self.kept_at) - 1} tokens, {len(self.kept_ids)} in all, for {self.num_masked} masked ones"
            )
        return SamplingMask(self.kept_at, self.kept_ids)

    def spread(self, values: np.ndarray) -> np.ndarray:
        """One value per masked token -> float32 [T], 0 elsewhere."""
        spread = np.zeros(len(self.token_ids), dtype=np.float32)
        spread[self.mask] = values
        return spread


def whole(tokens: SequenceOf[int], shown: tuple[tuple[int, Image], ...] = ()) -> Sequence:
    """A sequence of one context in which every token but the first is to be scored."""
    token_ids = np.asarray(tokens, dtype=np.int64)
    return Sequence(token_ids=token_ids, mask=np.arange(len(token_ids)) > 0, shown=shown)


FAULTS = ("error", "timeout", "nonsense")  # how an episode ends by the fault of its environment: it has no reward, and trains nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeNumbers:
    """What every rank knows of an episode, besides what it knows of any completion."""

    ended: str  # "done", "max_turns", "length", or one of FAULTS
    num_turns: int
    seconds: float  # that its environment took
    metrics: Mapping[str, float]  # the environment's own, summed over its turns
    fault: str = ""  # what the environment did, where it is at fault


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """What was said in an episode, for those who judge it and write it down."""

    numbers: EpisodeNumbers
    messages: tuple[Mapping[str, Any], ...]  # from the opening on
    num_opening: int  # of those, the messages that the first turn answers
    turn_rewards: tuple[float | None, ...]  # the environment's, by turn; None where it gave none


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """One sampled response, behind what it answers. `sequence.mask` marks the tokens that the sampler drew itself."""

    sequence: Sequence
    logprobs: np.ndarray  # float32 [T], the sampler's own of each drawn token; 0 elsewhere
    text: str
    ended: str  # "stop" or "length"; of an episode see `EpisodeNumbers`
    versions: tuple[tuple[int, int, int], ...]  # (weights version, begin, end) of each stretch, in tokens of the sequence
    record: EpisodeRecord | None = None  # of an episode
    columns: Mapping[str, Any] | None = None  # what a rollout function says of it to the rewards

    @property
    def version(self) -> int:
        """The oldest weights that drew any of it."""
        return min(version for version, _, _ in self.versions)

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """What follows the opening in the last context: the drawn tokens of a single answer."""
        begin, end = self.sequence.contexts[-1]
        drawn = np.flatnonzero(self.sequence.mask[begin:end])
        return tuple(self.sequence.token_ids[begin + int(drawn[0]) : end].tolist()) if len(drawn) else ()

    @property
    def num_drawn(self) -> int:
        return self.sequence.num_masked

    @property
    def is_refused(self) -> bool:
        """Its log-probs were those of no distribution (`trainer.generation`). Nothing of it is trained; it still counts in N."""
        return bool(np.isnan(self.logprobs).any())

    @property
    def is_failed(self) -> bool:
        """Its environment is at fault. No reward applies to it and nothing of it is trained; it still counts in N."""
        return self.ended in FAULTS


def answered(
    prompt_ids: SequenceOf[int],
    token_ids: SequenceOf[int],
    logprobs: SequenceOf[float],
    *,
    text: str,
    ended: str,
    version: int,
    experts: np.ndarray | None = None,
    shown: tuple[tuple[int, Image], ...] = (),
    kept: SamplingMask | None = None,
) -> Completion:
    """The completion that is one answer to one prompt, which shows these pictures. kept: what each token was drawn among, where not all.
    Raises ValueError where tokens and log-probs are not as many."""
    if len(token_ids) != len(logprobs):
        raise ValueError(f"{len(logprobs)} log-probs for {len(token_ids)} tokens")
    opening = len(prompt_ids)
    tokens = np.array([*prompt_ids, *token_ids], dtype=np.int64)
    values = np.zeros(len(tokens), dtype=np.float32)
    values[opening:] = logprobs
    return Completion(
        sequence=Sequence(
            token_ids=tokens,
            mask=np.arange(len(tokens)) >= opening,
            shown=shown,
            experts=experts,
            kept_at=None if kept is None else kept.at,
            kept_ids=None if kept is None else kept.ids,
        ),
        logprobs=values,
        text=text,
        ended=ended,
        versions=((version, opening, len(tokens)),),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A prompt with its `num_generations` completions."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    prefix: int = 0  # computed tokens that every context of every completion begins with

    @property
    def version(self) -> int:
        return min(completion.version for completion in self.completions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group whose completions have all been judged; the unit over which GRPO compares.

    rewards: [num_generations][num_reward_funcs], `None` where a function does not apply to a completion.
    """

    group: Group
    rewards: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMetadata:
    """What every rank knows of a scored group: numbers and flags. Its tokens and texts stay where it was judged."""

    prompt_number: int
    version: int
    prefix: int
    rewards: tuple[tuple[float | None, ...], ...]  # [G][num_reward_funcs]
    contexts: tuple[tuple[int, ...], ...]  # [G]: tokens of each context
    num_drawn: tuple[int, ...]  # [G]
    is_truncated: tuple[bool, ...]  # [G]: ended by the limit of its length
    is_refused: tuple[bool, ...]  # [G]: its log-probs were those of no distribution
    episodes: tuple[EpisodeNumbers, ...] = ()  # [G], where completions are episodes
    num_kept: tuple[int, ...] = ()  # [G], where it is told: words that their drawn tokens were drawn among, added up over tokens
    most_kept: int = 0  # of one token

    @property
    def trains(self) -> tuple[bool, ...]:
        """[G]: whether its drawn tokens may be trained."""
        is_failed = [episode.ended in FAULTS for episode in self.episodes] or [False] * len(self.is_refused)
        return tuple(not (refused or failed) for refused, failed in zip(self.is_refused, is_failed, strict=True))

    @classmethod
    def of(cls, scored: ScoredGroup) -> GroupMetadata:
        group = scored.group
        kept = [one.sequence.kept for one in group.completions]
        return cls(
            prompt_number=group.prompt.number,
            version=group.version,
            prefix=group.prefix,
            rewards=scored.rewards,
            contexts=tuple(tuple(end - begin for begin, end in one.sequence.contexts) for one in group.completions),
            num_drawn=tuple(one.num_drawn for one in group.completions),
            is_truncated=tuple(one.ended == "length" for one in group.completions),
            is_refused=tuple(one.is_refused for one in group.completions),
            episodes=tuple(one.record.numbers for one in group.completions if one.record is not None),
            num_kept=tuple(0 if one is None else len(one.ids) for one in kept) if any(kept) else (),
            most_kept=max((int(one.counts.max(initial=0)) for one in kept if one is not None), default=0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSamplingResult:
    """The verdicts of one rollout, in the order their groups are numbered; and what it took to get them."""

    kept: list[GroupMetadata]
    sampled: list[GroupMetadata]  # all that were sampled and judged, kept or not
    num_rounds: int  # 1, and one more for each time dead groups were replaced
    num_dead_dropped: int  # their prompts count as used
    num_given_back: int  # prompts that will be asked again: more groups were alive than wanted

    @property
    def num_prompts(self) -> int:
        """Drawn from the stream, less those given back."""
        return len(self.sampled) - self.num_given_back


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample(Sequence):
    """One trainable sequence: its tokens, what they are worth, and who drew them."""

    rollout: int
    row: int  # row inside its rollout: prompt row // G, generation row % G
    prompt_number: int
    prefix: int = 0  # of its group
    version: int  # the weights that sampled it
    fresh_at: int  # the version at which its ratio is 1 without old log-probs
    sampler_logprobs: np.ndarray  # float32 [T], 0 where the mask is false, NaN where the sampler gave none
    teacher_logprobs: np.ndarray | None = None  # float32 [T], 0 where the mask is false; None: no teacher has seen it
    advantage: float
    is_dead: bool  # all rewards of its group are exactly equal
    is_truncated: bool  # ran into max_completion_length

    @property
    def key(self) -> RowKey:
        return self.rollout, self.row

    def anchored(self, logprobs: np.ndarray, by: OldLogprobs) -> SampleWithOldLogprobs:
        """The sample with the log-probs (float32 [T]) that its ratio is taken against from now on."""
        values = {field.name: getattr(self, field.name) for field in fields(Sample)}
        return SampleWithOldLogprobs(**values, old_logprobs=logprobs, anchored_by=by)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleWithOldLogprobs(Sample):
    """A sample with the log-probs that its ratio is taken against. A stale `Sample` without them cannot be collated.

    Raises ValueError where one is missing (NaN), which the loss would read as on-policy. Only a sampler may leave out single tokens.
    """

    old_logprobs: np.ndarray  # float32 [T], 0 where the mask is false; NaN where anchored by a sampler that gave none
    anchored_by: OldLogprobs

    def __post_init__(self) -> None:
        missing = int(np.isnan(self.old_logprobs[self.mask]).sum())
        if missing and self.anchored_by != "rollout":
            raise ValueError(
                f"row {self.row} of rollout {self.rollout} has no old log-prob at {missing} of {int(self.mask.sum())} trained tokens"
            )


# What a sample has and every rank knows of its row.
OF_ROW_AND_SAMPLE = ("rollout", "row", "prompt_number", "version", "fresh_at", "prefix", "is_dead", "is_truncated")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """What every rank knows of a row that waits to be trained. Its `Sample` is with the ranks of one data-parallel share, its home."""

    rollout: int
    row: int
    prompt_number: int
    version: int
    fresh_at: int
    prefix: int = 0
    contexts: tuple[int, ...]  # tokens of each
    num_masked: int
    is_dead: bool
    is_truncated: bool
    is_anchored: bool = False  # has log-probs of the version `fresh_at`
    home: int  # data-parallel rank

    @property
    def key(self) -> RowKey:
        return self.rollout, self.row

    @property
    def extent(self) -> SequenceLengths:
        return SequenceLengths(contexts=self.contexts, group=(self.rollout, self.prompt_number), prefix=self.prefix)

    @classmethod
    def of(cls, sample: Sample, *, home: int) -> TrainingRow:
        contexts = tuple(end - begin for begin, end in sample.contexts)
        is_anchored = isinstance(sample, SampleWithOldLogprobs) and sample.anchored_by == "recompute"
        known = {name: getattr(sample, name) for name in (*OF_ROW_AND_SAMPLE, "num_masked")}
        return cls(**known, contexts=contexts, is_anchored=is_anchored, home=home)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What one number of the timetable yields. `rows` is the same on every rank; `samples` are those whose home this rank is."""

    number: int
    rows: tuple[TrainingRow, ...]
    samples: Mapping[RowKey, Sample]
    num_prompts: int  # drawn from the stream, less those given back


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of the packed stream that attends causally to itself, and to all of its parent where it has one.

    start, end: in tokens of the whole stream (before context parallelism cuts it). parent: index of a segment that has none itself, or -1.
    length: tokens before its alignment padding, which children do not see; 0 is a segment of padding.
    """

    start: int
    end: int
    parent: int = -1
    length: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """The arrays of one forward pass: sequences packed end to end, `[sequence | sequence | ...]`, in numpy.

    `predict_at[c]` is the place in the stream whose hidden state predicts `targets[c]`. What is indexed by C goes row by row, and in a
    row token by token.
    """

    number: int  # its place in the pass
    token_ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T], of each token in its context; [3, T] (frame, row, column) where there is a picture
    multiplicity: np.ndarray  # int64 [T]: contexts that a token stands for; 0 is alignment padding
    # They cover the stream: parents, then their children (those of one parent side by side), then those without relatives, then padding.
    segments: tuple[Segment, ...]
    predict_at: np.ndarray  # int64 [C]; a place that several contexts share predicts several tokens
    targets: np.ndarray  # int64 [C]
    sequence: np.ndarray  # int64 [C], 0..S-1: which sequence a trained position belongs to
    num_sequences: int  # S
    num_contexts: int
    places: np.ndarray  # int64 [tokens of all sequences, row by row]: where each lies in the stream; -1: it is not computed
    experts: np.ndarray | None = None  # int16 [T, MoE layers, k]: the experts that each token is to take; -1 routes freely
    kept: SamplingMask | None = None  # of the C trained positions: the words that their softmax runs over; None: all words everywhere
    pictures: tuple[Image, ...] = ()  # each once, however many contexts show it
    picture_at: np.ndarray = field(default_factory=_none)  # int64 [n], ascending: places whose tokens are pictures'
    picture_token: np.ndarray = field(default_factory=_none)  # int64 [n]: which of the tokens of all `pictures` stands there

    def by_sequence(self, values: np.ndarray) -> list[np.ndarray]:
        """Values of the C trained positions -> those of each of the S sequences."""
        return [values[self.sequence == place] for place in range(self.num_sequences)]

    @property
    def is_padding(self) -> np.ndarray:
        """bool [T]: alignment only (context and sequence parallelism)."""
        return self.multiplicity == 0

    @property
    def num_padding_tokens(self) -> int:
        return int(self.is_padding.sum())

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingMicroBatch(MicroBatch):
    """A micro-batch with what its loss needs."""

    rows: tuple[RowKey, ...]  # of each of the S sequences
    prompts: tuple[int, ...]  # the number of the prompt of each of them
    place: np.ndarray  # int64 [C]: which token of its row each trained one is, from 0, untrained ones counted
    token_weights: np.ndarray  # float64 [C], `u` of algorithms section 1, fixed over the whole global batch
    advantages: np.ndarray  # float32 [C]
    teacher_logprobs: np.ndarray  # float32 [C]; NaN where no teacher has seen the row
    sampler_logprobs: np.ndarray  # float32 [C]; NaN where the sampler gave none
    old_logprobs: np.ndarray  # float32 [C]; NaN where the sequence is on-policy: there `logp.detach()` is the old log-prob
    is_compared: np.ndarray  # bool [C]: old log-probs are the trainer's own, so comparing them with the sampler's means something


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GlobalBatch:
    """One optimizer step: its micro-batches on this data-parallel rank, with token weights already fixed over the whole step."""

    step: int  # optimizer steps done before it
    micro_batches: tuple[TrainingMicroBatch, ...]
    num_sequences: int  # N of the whole step, over all data-parallel ranks
    num_loss_tokens: int  # sum of the masks over the whole step
    num_tokens: int  # tokens of the whole step, prompts included, alignment padding not
    num_contexts: int  # of the whole step
    staleness: tuple[int, ...]  # of each sequence of the whole step, in optimizer steps
    lag: tuple[int, ...]  # of each of them: the part of its staleness that it had when it came in, because sampling ran ahead

    @property
    def newest_version(self) -> int:
        """The newest weights that sampled any of it."""
        return self.step - min(self.staleness)

    @property
    def num_computed_tokens(self) -> int:
        """Of the whole step, alignment padding not: the last token of a context predicts nothing and is not computed."""
        return self.num_tokens - self.num_contexts

    @property
    def metrics(self) -> dict[str, float]:
        computed = sum(micro_batch.num_tokens for micro_batch in self.micro_batches)
        padding = sum(micro_batch.num_padding_tokens for micro_batch in self.micro_batches)
        needed = sum(int(micro_batch.multiplicity.sum()) for micro_batch in self.micro_batches)
        return {
            "staleness/mean": sum(self.staleness) / len(self.staleness),
            "staleness/max": max(self.staleness),
            "staleness/lag": sum(self.lag) / len(self.lag),
            "packing/efficiency": 1 - padding / max(computed, 1),  # of this rank's share
            "packing/shared": 1 - (computed - padding) / max(needed, 1),  # of this rank's share
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come. `step` counts optimizer steps done; it is also the version of the weights."""

    step: int = 0
    num_rollouts: int = 0  # sampled so far
    num_prompts: int = 0  # drawn from the stream so far, over all epochs
    num_tokens: int = 0  # trained on so far, prompts included

    def add(self, found: SequenceOf[Rollout]) -> Progress:
        """With what has come in."""
        num_prompts = self.num_prompts + sum(rollout.num_prompts for rollout in found)
        return replace(self, num_rollouts=self.num_rollouts + len(found), num_prompts=num_prompts)

    def after(self, batch: GlobalBatch) -> Progress:
        """One optimizer step later, with what it trained."""
        return replace(self, step=self.step + 1, num_tokens=self.num_tokens + batch.num_tokens)
