"""Owns the step from groups to scored groups: every rank scores its share, and all end with the same list.

What goes wrong on one rank travels to the others as a value and is raised on all of them: no rank is left waiting in a collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from megatron_grpo.data.chat import as_completion
from megatron_grpo.errors import RewardError
from megatron_grpo.rewards.protocol import RewardBatch, RewardFunction, Score
from megatron_grpo.rewards.scoring import Scores, score
from megatron_grpo.types import Group, ScoredGroup

_LOG = logging.getLogger(__name__)


def judge(
    groups: Sequence[Group],
    rewards: Sequence[RewardFunction],
    *,
    rank: int = 0,
    world_size: int = 1,
    share: Callable[[Any], Sequence[Any]] | None = None,
    trainer_state: Any = None,
) -> list[ScoredGroup]:
    """Scores every completion of every group with every reward function.

    groups: the same list on every rank. share: gives this rank's object to all and returns all ranks' objects in rank order (a collective);
    not needed where world_size is 1. trainer_state: handed to the functions that ask for it.
    Raises RewardError, with the same message on every rank.
    """
    bounds = shares(len(groups), world_size)
    first_row = sum(len(group.completions) for group in groups[: bounds[rank]])
    batch = as_batch(groups[bounds[rank] : bounds[rank + 1]], first_row=first_row, trainer_state=trainer_state)
    local: Scores | RewardError
    try:
        local = score(rewards, batch)
    except RewardError as error:
        local = error
    everyone = [local] if world_size == 1 else list(share(local))
    errors = [str(result) for result in everyone if isinstance(result, RewardError)]
    if errors:
        raise RewardError("\n".join(errors))
    _warn_once(rewards, everyone, aloud=rank == 0)
    rows = [row for result in everyone for row in result.rows]
    _warn_of_sameness(rewards, rows, aloud=rank == 0)
    ends = list(accumulate(len(group.completions) for group in groups))
    return [ScoredGroup(group=group, rewards=tuple(rows[end - len(group.completions) : end])) for group, end in zip(groups, ends)]


def shares(num_groups: int, world_size: int) -> list[int]:
    """Where each rank's groups begin, and the end: whole groups, as even as they come."""
    return [num_groups * rank // world_size for rank in range(world_size + 1)]


def as_batch(groups: Sequence[Group], *, first_row: int = 0, trainer_state: Any = None) -> RewardBatch:
    """Completions of all groups in TRL's shape. A column that a row lacks is None there.

    first_row: the row of the rollout at which these groups begin.
    """
    names = list(dict.fromkeys(name for group in groups for name in group.prompt.columns))
    pairs = [(group.prompt, place, completion) for group in groups for place, completion in enumerate(group.completions)]
    return RewardBatch(
        prompts=[prompt.raw for prompt, _, _ in pairs],
        completions=[as_completion(prompt.raw, completion.text) for prompt, _, completion in pairs],
        completion_ids=[completion.token_ids for _, _, completion in pairs],
        columns={name: [prompt.columns.get(name) for prompt, _, _ in pairs] for name in names},
        labels=[
            f"row {first_row + row} of the rollout (data-set row {prompt.row}, completion number {place})"
            for row, (prompt, place, _) in enumerate(pairs)
        ],
        trainer_state=trainer_state,
    )


def _warn_once(rewards: Sequence[RewardFunction], everyone: Sequence[Scores], *, aloud: bool) -> None:
    """One line per function and kind of failure, for the whole run, from one rank."""
    by_name = {function.name: function for function in rewards}
    for notice in (notice for result in everyone for notice in result.notices):
        warned = by_name[notice.function].warned
        if notice.kind not in warned:
            warned.add(notice.kind)
            if aloud:
                _LOG.warning("%s Further failures of this kind (%s) are not reported.", notice.message, notice.kind)


def _warn_of_sameness(rewards: Sequence[RewardFunction], rows: Sequence[Sequence[Score]], *, aloud: bool) -> None:
    """One line, once, for a function that has given nothing, or one value, as long as the run has lasted."""
    for function, scores in zip(rewards, zip(*rows)):
        sentence = function.watch.take(scores)
        if sentence is not None and "same" not in function.warned:
            function.warned.add("same")
            if aloud:
                _LOG.warning("Reward `%s` %s", function.name, sentence)
