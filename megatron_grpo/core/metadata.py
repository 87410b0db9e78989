"""What every rank knows of the data of a step: numbers and flags, without tokens and texts. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from megatron_grpo.core.arrays import RowLengths, empty_index, ragged
from megatron_grpo.core.types import FAULTS, EpisodeNumbers, GlobalBatch, RowKey, Sample, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMetadata:
    """Numbers and flags of a scored group that every rank knows. Its tokens and texts stay on the rank that scored it.

    Args:
        rewards: Reward of each completion by each function, [G, num_reward_funcs].
        contexts: Tokens of each context, [G].
        num_sampled: Sampled tokens, [G].
        is_truncated: Whether the length limit ended it, [G].
        is_refused: Whether the log-probs are invalid, [G].
        episodes: Numbers of each episode, [G]; empty if completions are not episodes.
        mask_sizes: Surviving token IDs, summed over the sampled tokens, [G]; empty without sampling masks.
        max_mask_size: Largest number of surviving token IDs at one position.
        spans: `Completion.versions` of each completion, [G]; empty if all have the version of the group.
    """

    prompt_number: int
    version: int
    prefix: int
    rewards: tuple[tuple[float | None, ...], ...]
    contexts: tuple[tuple[int, ...], ...]
    num_sampled: tuple[int, ...]
    is_truncated: tuple[bool, ...]
    is_refused: tuple[bool, ...]
    episodes: tuple[EpisodeNumbers, ...] = ()
    mask_sizes: tuple[int, ...] = ()
    max_mask_size: int = 0
    spans: tuple[tuple[tuple[int, int, int], ...], ...] = ()

    @property
    def is_trainable(self) -> tuple[bool, ...]:
        """Whether the sampled tokens of each completion may be trained, [G]."""
        is_failed = [episode.finish_reason in FAULTS for episode in self.episodes] or [False] * len(self.is_refused)
        return tuple(not (refused or failed) for refused, failed in zip(self.is_refused, is_failed, strict=True))

    @classmethod
    def from_group(cls, scored: ScoredGroup) -> GroupMetadata:
        """Return the metadata of a scored group."""
        group = scored.group
        sampling_mask = [completion.sequence.sampling_mask for completion in group.completions]
        versions = tuple(completion.versions for completion in group.completions)
        return cls(
            prompt_number=group.prompt.number,
            version=group.version,
            prefix=group.prefix,
            rewards=scored.rewards,
            contexts=tuple(tuple(end - begin for begin, end in completion.sequence.contexts) for completion in group.completions),
            num_sampled=tuple(completion.num_sampled for completion in group.completions),
            is_truncated=tuple(completion.finish_reason == "length" for completion in group.completions),
            is_refused=tuple(completion.is_refused for completion in group.completions),
            episodes=tuple(completion.record.numbers for completion in group.completions if completion.record is not None),
            mask_sizes=tuple(0 if mask is None else len(mask.ids) for mask in sampling_mask) if any(sampling_mask) else (),
            max_mask_size=max((int(mask.counts.max(initial=0)) for mask in sampling_mask if mask is not None), default=0),
            spans=() if len({version for spans in versions for version, _, _ in spans}) == 1 else versions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Rows of one rollout of the training schedule.

    `rows` is the same on every rank; `samples` are those that this data-parallel rank holds.

    Args:
        num_prompts: Prompts taken from the stream, less those given back.
    """

    number: int
    rows: TrainingRows
    samples: Mapping[RowKey, Sample]
    num_prompts: int


# Fields that `Sample` and `TrainingRows` share.
SHARED_FIELDS = ("rollout", "row", "prompt_number", "version", "on_policy_version", "prefix", "is_zero_std", "is_truncated")


def _no_flags() -> np.ndarray:
    return np.zeros(0, dtype=bool)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingRows:
    """Numbers and flags of rows that wait to be trained, known to every rank: one array per field, rows in ascending (rollout, row).

    The `Sample` of a row is held by all model-parallel ranks of one data-parallel rank, `dp_rank`.

    Args:
        rollout: Rollout of each row, int64 [n], as all columns that are not flags.
        contexts: Tokens of each context, row by row; int64 [contexts].
        num_stretches: Number of stretches of the row that were sampled by one version each; 0 if all its tokens are of `version`.
        stretches: (version, tokens) of each stretch, row by row; int64 [stretches, 2].
        is_zero_std: Whether all rewards of the row's group are equal, bool [n].
        is_zero_advantage: As `Sample.is_zero_advantage`.
        has_old_logprobs: Whether the row has old log-probs by the weights of version `on_policy_version`.
        dp_rank: Data-parallel rank.
    """

    rollout: np.ndarray = field(default_factory=empty_index)
    row: np.ndarray = field(default_factory=empty_index)
    prompt_number: np.ndarray = field(default_factory=empty_index)
    version: np.ndarray = field(default_factory=empty_index)
    on_policy_version: np.ndarray = field(default_factory=empty_index)
    prefix: np.ndarray = field(default_factory=empty_index)
    num_contexts: np.ndarray = field(default_factory=empty_index)
    contexts: np.ndarray = field(default_factory=empty_index)
    num_masked: np.ndarray = field(default_factory=empty_index)
    num_stretches: np.ndarray = field(default_factory=empty_index)
    stretches: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    is_zero_std: np.ndarray = field(default_factory=_no_flags)
    is_truncated: np.ndarray = field(default_factory=_no_flags)
    is_zero_advantage: np.ndarray = field(default_factory=_no_flags)
    has_old_logprobs: np.ndarray = field(default_factory=_no_flags)
    dp_rank: np.ndarray = field(default_factory=empty_index)

    def __len__(self) -> int:
        return len(self.row)

    @property
    def keys(self) -> list[RowKey]:
        """(rollout, row) of each row."""
        return list(zip(self.rollout.tolist(), self.row.tolist(), strict=True))

    @property
    def lengths(self) -> RowLengths:
        """Lengths of the rows, as needed for packing."""
        group = (self.rollout - self.rollout.min(initial=0)) * (self.prompt_number.max(initial=0) + 1) + self.prompt_number
        return RowLengths(group=group, prefix=self.prefix, num_contexts=self.num_contexts, contexts=self.contexts)

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], *, dp_rank: np.ndarray) -> TrainingRows:
        """Return the rows of samples.

        Args:
            dp_rank: Data-parallel rank that holds each sample, int64 [n].
        """
        flags = {"is_zero_std", "is_truncated", "is_zero_advantage"}
        known = {
            name: np.array([getattr(sample, name) for sample in samples], dtype=bool if name in flags else np.int64)
            for name in (*SHARED_FIELDS, "num_masked", "is_zero_advantage")
        }
        contexts = [sample.contexts for sample in samples]
        return cls(
            **known,
            **tokens_by_version(sample.spans for sample in samples),
            num_contexts=np.array([len(spans) for spans in contexts], dtype=np.int64),
            contexts=np.array([end - begin for spans in contexts for begin, end in spans], dtype=np.int64),
            has_old_logprobs=np.array([getattr(sample, "old_logprobs_from", None) == "recompute" for sample in samples], dtype=bool),
            dp_rank=dp_rank,
        )

    @classmethod
    def joined(cls, parts: Sequence[TrainingRows]) -> TrainingRows:
        """Concatenate rows.

        Args:
            parts: Rows in their order.
        """
        return cls(**{field.name: np.concatenate([getattr(part, field.name) for part in (cls(), *parts)]) for field in fields(cls)})

    def take(self, index: np.ndarray) -> TrainingRows:
        """Select rows in the given order.

        Args:
            index: Rows to select, int64 [k].
        """
        chosen = ragged(np.cumsum(self.num_stretches) - self.num_stretches, self.num_stretches, index)
        return TrainingRows(
            **{field.name: getattr(self, field.name)[index] for field in fields(self) if field.name not in ("contexts", "stretches")},
            contexts=self.lengths.take(index).contexts,
            stretches=self.stretches[chosen],
        )

    def find_indices(self, rollout: Any, row: Any) -> np.ndarray:
        """Return the index of each of some rows, int64 [k].

        Args:
            rollout: Rollout of each row, int64 [k].
            row: Its number in the rollout, int64 [k].

        Raises:
            KeyError: A row is not there.
        """
        keys = np.asarray(rollout, dtype=np.int64) << 32 | np.asarray(row, dtype=np.int64)
        known = self.rollout << 32 | self.row
        index = np.minimum(np.searchsorted(known, keys), max(len(known) - 1, 0))
        if lacking := keys[known[index] != keys].tolist() if len(known) else keys.tolist():
            raise KeyError(divmod(lacking[0], 2**32))
        return index


def tokens_by_version(spans: Iterable[Sequence[int]]) -> dict[str, np.ndarray]:
    """Return the columns `num_stretches` and `stretches` of `TrainingRows`.

    Args:
        spans: Of each row, version, begin, end of each stretch, one after another; empty if all its tokens are of one version.
    """
    arrays = [np.array(row_spans, dtype=np.int64).reshape(-1, 3) for row_spans in spans]
    all_spans = np.concatenate([np.zeros((0, 3), dtype=np.int64), *arrays])
    return {
        "num_stretches": np.array([len(array) for array in arrays], dtype=np.int64),
        "stretches": np.stack([all_spans[:, 0], all_spans[:, 2] - all_spans[:, 1]], axis=1),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a run.

    `step` counts optimizer steps done; it is also the version of the weights.

    Args:
        num_rollouts: Rollouts sampled so far.
        num_prompts: Prompts taken from the stream so far, over all epochs.
        num_tokens: Tokens trained on so far, prompts included.
    """

    step: int = 0
    num_rollouts: int = 0
    num_prompts: int = 0
    num_tokens: int = 0

    def add(self, rollouts: Sequence[Rollout]) -> Progress:
        """Return the progress after new rollouts have arrived."""
        num_prompts = self.num_prompts + sum(rollout.num_prompts for rollout in rollouts)
        return replace(self, num_rollouts=self.num_rollouts + len(rollouts), num_prompts=num_prompts)

    def after(self, batch: GlobalBatch) -> Progress:
        """Return the progress one optimizer step later, with the tokens of its batch."""
        return replace(self, step=self.step + 1, num_tokens=self.num_tokens + batch.num_tokens)
