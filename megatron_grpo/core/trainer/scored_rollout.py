"""One scored rollout, and the check of its episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron_grpo.core.base.errors import RunError
from megatron_grpo.core.grpo.advantages import Advantages
from megatron_grpo.core.metadata import GroupMetadata
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.types import FAULTS, Group, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSamplingResult:
    """Scored groups of one rollout, in the order of their prompt numbers, and statistics of their sampling.

    Args:
        sampled: All groups that were sampled and scored, kept or not.
        num_rounds: Number of rounds: 1, plus one for each time zero-std groups were replaced.
        num_zero_std_dropped: Zero-std groups that were dropped; their prompts count as used.
        num_given_back: Prompts returned to the stream, because there were more usable groups than needed.
    """

    kept: list[GroupMetadata]
    sampled: list[GroupMetadata]
    num_rounds: int
    num_zero_std_dropped: int
    num_given_back: int

    @property
    def num_prompts(self) -> int:
        """Prompts taken from the stream, less those given back."""
        return len(self.sampled) - self.num_given_back


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRolloutInfo:
    """Version and metrics of a rollout whose completions may have tokens of several versions.

    Args:
        version: Version of the weights when it arrives.
        metrics: Metrics of the sampling step.
    """

    version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredRollout:
    """One scored rollout, as the logger receives it.

    Args:
        penalty: Values that `kl_in_reward` subtracted, float64 [num_groups, G].
        local_groups: {index among the kept groups: scored group} for the groups that this rank scored.
        partial: With partial rollouts.
    """

    number: int
    result: DynamicSamplingResult
    advantages: Advantages
    penalty: np.ndarray | None
    local_groups: Mapping[int, ScoredGroup]
    partial: PartialRolloutInfo | None = None


class GroupScorer(Protocol):
    """Scores completions. `run.rewards.reward_manager.RewardManager` is the one of a run, and documents its methods."""

    reward_weights: list[float]
    most_failed_episodes: float

    def __call__(self, groups: Sequence[Group], *, positions: Sequence[int] | None = None) -> list[ScoredGroup]: ...

    def warn_of_sameness(self, rows: Sequence[Sequence[Any]]) -> None: ...


def gather_metadata(scored: Sequence[ScoredGroup]) -> dict[int, GroupMetadata]:
    """Return the metadata of the groups that all ranks have scored, by prompt number. Collective."""
    local = [GroupMetadata.from_group(scored_group) for scored_group in scored]
    return {meta.prompt_number: meta for part in collectives.all_gather_object(local) for meta in part}


class EnvironmentFailuresError(RunError):
    """Error raised if too many episodes of a rollout end because their environment failed."""


def check_failures(metas: Sequence[GroupMetadata], max_share: float) -> None:
    """Check how many episodes of a rollout failed.

    Raises:
        EnvironmentFailuresError: All episodes failed, or a larger share than `max_share`. The message names the most frequent failure.
    """
    episodes = [episode for meta in metas for episode in meta.episodes]
    faults = Counter(episode.fault for episode in episodes if episode.finish_reason in FAULTS)
    count = faults.total()
    if not count or (count < len(episodes) and count <= max_share * len(episodes)):
        return
    sentence, times = faults.most_common(1)[0]
    raise EnvironmentFailuresError(
        f"{count} of {len(episodes)} episodes of a rollout failed because of an environment error (max_failed_episodes {max_share:g}); the "
        f"most frequent error ({times} times): {sentence}."
    )
