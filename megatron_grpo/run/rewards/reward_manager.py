"""Scoring of groups by the reward functions: every rank scores the groups that it generated.

An error on one rank is sent to the others as a value and raised on all of them, so no rank is left waiting in a collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from megatron_grpo.core.base import activity
from megatron_grpo.core.base.errors import CancelledError, RewardError
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.types import Completion, EpisodeRecord, Group, Prompt, ScoredGroup
from megatron_grpo.run.data.chat import as_completion
from megatron_grpo.run.rewards.protocol import RewardBatch, RewardFunction, Score
from megatron_grpo.run.rewards.scoring import RewardNotice, RewardScores, score

_LOG = logging.getLogger(__name__)


class RewardManager:
    """Reward functions of a run. Every rank scores the groups that it was given; collective all the same."""

    def __init__(
        self, functions: Sequence[RewardFunction], reward_weights: Sequence[float] = (), *,
        should_cancel: Callable[[], bool] = lambda: False, most_failed_episodes: float = 1.0,
    ):  # fmt: skip
        """Set up the reward functions.

        Args:
            most_failed_episodes: Largest share of a rollout's episodes whose environment may fail.
            reward_weights: One weight per function, or empty for 1 each.
            should_cancel: Returns whether the run has no time left to score.
        """
        self.functions, self.reward_weights = list(functions), list(reward_weights) or [1.0] * len(functions)
        self._should_cancel, self.most_failed_episodes = should_cancel, most_failed_episodes

    @property
    def names(self) -> list[str]:
        """Names of the reward functions."""
        return [function.name for function in self.functions]

    def __call__(self, groups: Sequence[Group], *, positions: Sequence[int] | None = None, trainer_state: Any = None) -> list[ScoredGroup]:
        """Score every completion of this rank's groups with every function. Collective.

        Args:
            positions: Index of each group among all that were sampled together (default: its index here); errors name rows by it.

        Raises:
            RewardError: A reward function failed. Raised on every rank, with the same message.
            CancelledError: The run has no time left to score. Raised on every rank, with the same message.
        """
        batch = as_batch(groups, positions=positions, trainer_state=trainer_state)
        local: RewardScores | RewardError | CancelledError
        try:
            # A call of one function may take its whole timeout without reporting progress.
            pause = max((function.timeout for function in self.functions), default=0.0)
            with activity.phase("scoring rewards", total=len(batch) * len(self.functions), unit="scores", pause=pause, is_alone=True):
                local = score(self.functions, batch, self._should_cancel)
        except (RewardError, CancelledError) as error:
            local = error
        self._agree(local)
        assert isinstance(local, RewardScores)
        scores, no_rewards = iter(local.rows), (None,) * len(self.functions)
        return [
            ScoredGroup(
                group=group, rewards=tuple(no_rewards if completion.is_failed else next(scores) for completion in group.completions)
            )
            for group in groups
        ]

    def warn_of_sameness(self, rows: Sequence[Sequence[Score]]) -> None:
        """Warn once about a function that has returned no value, or a single value, since the run began.

        Args:
            rows: [completions, functions], scores of all that was sampled together; the same on every rank.
        """
        for function, scores in zip(self.functions, zip(*rows)):
            sentence = function.watch.take(scores)
            if sentence is not None and "same" not in function.warned:
                function.warned.add("same")
                if collectives.rank() == 0:
                    _LOG.warning("Reward `%s` %s", function.name, sentence)

    def _agree(self, local: RewardScores | RewardError | CancelledError) -> None:
        """Raise an error of any rank on all ranks, and log notices once, on rank 0."""
        collectives.barrier_with_timeout()  # scoring may take minutes longer for the rows of one rank
        outcomes = collectives.all_gather_object(local.notices if isinstance(local, RewardScores) else local)
        errors = [str(outcome) for outcome in outcomes if isinstance(outcome, RewardError)]
        if errors:
            raise RewardError("\n".join(errors))
        for outcome in outcomes:
            if isinstance(outcome, CancelledError):
                raise outcome
        _warn_once(self.functions, [notice for notices in outcomes for notice in notices], is_logging=collectives.rank() == 0)


class CompletionIds(Sequence[list[int]]):
    """Token IDs of completions. The list of a completion is made when it is read."""

    def __init__(self, completions: Sequence[Completion]):
        self._completions = completions

    def __len__(self) -> int:
        return len(self._completions)

    def __getitem__(self, index: Any) -> Any:
        selected = self._completions[index]
        return CompletionIds(selected) if isinstance(index, slice) else list(selected.answer_ids)

    def __deepcopy__(self, memo: Any) -> CompletionIds:
        return self  # nothing of it can be changed


def as_batch(groups: Sequence[Group], *, positions: Sequence[int] | None = None, trainer_state: Any = None) -> RewardBatch:
    """Return the completions of all groups in TRL's shape.

    A column that a row lacks is None there. A failed episode is left out: it is not scored. For other episodes the columns of
    `episode_columns` are added.

    Args:
        positions: See `RewardManager.__call__`.
    """
    names = list(dict.fromkeys(name for group in groups for name in group.prompt.columns))
    positions = range(len(groups)) if positions is None else positions
    rows = [
        (group.prompt, position * len(group.completions) + number, number, completion)
        for group, position in zip(groups, positions, strict=True)
        for number, completion in enumerate(group.completions)
        if not completion.is_failed
    ]
    records = [completion.record for *_, completion in rows if completion.record is not None]
    own_columns = list(dict.fromkeys(name for *_, completion in rows for name in completion.columns or ()))
    return RewardBatch(
        prompts=[prompt.raw for prompt, *_ in rows],
        completions=[_completion_argument(prompt, completion) for prompt, _, _, completion in rows],
        completion_ids=CompletionIds([completion for *_, completion in rows]),
        columns={name: [prompt.columns.get(name) for prompt, *_ in rows] for name in names}
        | (episode_columns(records) if records else {})
        | {name: [(completion.columns or {}).get(name) for *_, completion in rows] for name in own_columns},
        labels=[f"row {row} of the rollout (data-set row {prompt.row}, completion number {number})" for prompt, row, number, _ in rows],
        trainer_state=trainer_state,
    )


def _completion_argument(prompt: Prompt, completion: Completion) -> Any:
    """Return the completion as reward functions get it.

    For an episode these are all messages after its opening: those of the model, of its tools and of its environment.
    """
    record = completion.record
    if record is None:
        return as_completion(prompt.raw, completion.text)
    return list(record.messages[record.num_opening :])


def episode_columns(records: Sequence[EpisodeRecord]) -> dict[str, list[Any]]:
    """Return the columns that reward functions get for episodes, besides their completions.

    Args:
        records: Record of each episode.
    """
    return {
        "messages": [list(record.messages) for record in records],
        "turn_rewards": [list(record.turn_rewards) for record in records],
        "num_turns": [record.numbers.num_turns for record in records],
        "finish_reason": [record.numbers.finish_reason for record in records],
    }


def _warn_once(functions: Sequence[RewardFunction], notices: Sequence[RewardNotice], *, is_logging: bool) -> None:
    """Log one line per function and kind of failure, for the whole run."""
    by_name = {function.name: function for function in functions}
    for notice in notices:
        warned = by_name[notice.function].warned
        if notice.kind not in warned:
            warned.add(notice.kind)
            if is_logging:
                _LOG.warning("%s Further failures of this kind (%s) are not reported.", notice.message, notice.kind)
