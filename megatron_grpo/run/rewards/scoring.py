"""Score one batch with all reward functions, find failing rows, and apply the policy for failures.

A function that raises, times out or returns the wrong number of scores has failed on its whole batch. It is then called again on halves
of the batch, so that the error can name the row, and, with `--reward_on_error none`, so that only that row loses its score. The message
begins with the first failure, because a function with state may fail differently when it is called on a part.
"""

from __future__ import annotations

import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_grpo.core.base import activity
from megatron_grpo.core.base.errors import RewardError, RunInterruptedError, describe_exception, one_line
from megatron_grpo.run.rewards.process_isolation import (
    EventLoop,
    ExitRequestedError,
    IsolatedCall,
    RewardTimeoutError,
    call_before,
    never_cancel,
)
from megatron_grpo.run.rewards.protocol import RewardBatch, RewardFunction, RowFailure, Score, as_scores, read_text

_LOOP = EventLoop()
_SHORTEST_CALL = 1.0  # minimum seconds for a call on one row (or a tenth of the timeout, if that is less)
_SEARCH_BUDGET = 3.0  # time limit of the search for failing rows, in multiples of the timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardNotice:
    """A failure that became None, or a side effect of a function. Reported once per function and kind."""

    function: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardScores:
    """Scores of one batch.

    Args:
        rows: Scores, [completions, functions].
        notices: Failures that became None, and side effects.
    """

    rows: tuple[tuple[Score, ...], ...]
    notices: tuple[RewardNotice, ...]


def score(functions: Sequence[RewardFunction], batch: RewardBatch, should_cancel: Callable[[], bool] = never_cancel) -> RewardScores:
    """Score every completion with every function.

    The asynchronous functions run concurrently, while the synchronous ones run one after another.

    Args:
        functions: Reward functions of the run.
        batch: Completions to score.
        should_cancel: Polled while functions run; True cancels the scoring.

    Returns:
        Scores in the order of `batch` and `functions`.

    Raises:
        RewardError: If a function whose `on_error` is "raise" failed; the message covers all such functions.
        CancelledError: Soon after `should_cancel()` returned True.
    """
    if not len(batch):
        return RewardScores(rows=(), notices=())
    side_effects: list[list[str]] = [[] for _ in functions]
    calls = [_start(function, batch, effects, should_cancel, function.timeout) for function, effects in zip(functions, side_effects)]
    outcomes = {}
    for index in sorted(range(len(functions)), key=lambda index: functions[index].is_async):  # those that run already come last
        outcomes[index] = calls[index]()
        activity.advance(len(batch))
    columns, errors, notices = [], [], []
    for index, function in enumerate(functions):
        outcome = outcomes[index]
        rows = _search(function, batch, outcome, side_effects[index], should_cancel) if isinstance(outcome, RowFailure) else outcome
        notices += [
            RewardNotice(function=function.name, kind=effect, message=f"Reward `{function.name}` {effect}.")
            for effect in set(side_effects[index])
        ]
        failures = [(row, value) for row, value in enumerate(rows) if isinstance(value, RowFailure)]
        if failures and function.on_error == "raise":
            errors.append(_sentence(function, batch, failures))
        else:
            for kind in dict.fromkeys(value.kind for _, value in failures):
                same_kind = [failure for failure in failures if failure[1].kind == kind]
                notices.append(
                    RewardNotice(function=function.name, kind=kind, message=_sentence(function, batch, same_kind) + " Counted as None.")
                )
        columns.append([None if isinstance(value, RowFailure) else value for value in rows])
    if errors:
        raise RewardError("\n".join(errors))
    return RewardScores(rows=tuple(zip(*columns)) if columns else ((),) * len(batch), notices=tuple(notices))


def _start(
    function: RewardFunction, batch: RewardBatch, side_effects: list[str], should_cancel: Callable[[], bool], seconds: float
) -> Callable[[], list[Score | RowFailure] | RowFailure]:
    """Start a call of a function on a batch if the function is asynchronous; others are called when the result is asked for.

    Returns:
        A callable that returns the scores, or the failure of the whole call.
    """

    def call() -> Any:
        with IsolatedCall(side_effects):
            return function.function(**function.arguments(batch))

    async def call_async() -> Any:
        with IsolatedCall(side_effects):
            return await function.function(**function.arguments(batch))

    if function.is_async:
        wait = _LOOP.start(call_async(), seconds, should_cancel)
    else:
        wait = partial(call_before, seconds, call, should_cancel)
    return partial(_outcome, wait, batch, seconds)


def _outcome(call: Callable[[], Any], batch: RewardBatch, seconds: float) -> list[Score | RowFailure] | RowFailure:
    try:
        return as_scores(call(), len(batch))
    except RewardTimeoutError:
        return RowFailure(kind="timeout", reason=f"did not return within {seconds:g} s")
    except (RunInterruptedError, RewardError, KeyboardInterrupt):
        raise
    except ExitRequestedError as error:
        return RowFailure(
            kind="end", reason=f"tried to end the process with {one_line(error)}{_user_code_location(error.__cause__ or error)}"
        )
    except BaseException as error:  # noqa: BLE001 - the sandbox: any exception of the user's function is reported with its name
        return RowFailure(kind=type(error).__name__, reason=describe_exception(error) + _user_code_location(error))


def _user_code_location(error: BaseException) -> str:
    """Return the innermost place in the user's code, as text for a message; "" if there is none."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(package)]
    return f" ({os.path.basename(frames[-1].filename)} line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""


def _search(
    function: RewardFunction, batch: RewardBatch, failure: RowFailure, side_effects: list[str], should_cancel: Callable[[], bool]
) -> list[Score | RowFailure]:
    """Find the rows on which a function fails, by bisection, after the call on the whole batch failed.

    With `raise` the search stops at the first failing row. Each part of the batch gets its share of the timeout. Rows that the search
    does not reach within its time limit keep the failure of the whole call. If no part fails when called separately, `none` uses the
    scores of the parts, and `raise` reports the failure of the whole batch, which then belongs to no single row.
    """
    everywhere: list[Score | RowFailure] = [failure] * len(batch)
    if function.keeps_deadline or len(batch) == 1:
        return everywhere
    ends = time.monotonic() + _SEARCH_BUDGET * function.timeout
    scores = list(everywhere)
    # First in, first out: large ranges get their scores before small ones, in case time runs out.
    ranges = deque([(0, len(batch) // 2), (len(batch) // 2, len(batch))])
    while ranges and time.monotonic() < ends:
        first, end = ranges.popleft()
        share = max(min(_SHORTEST_CALL, function.timeout / 10), function.timeout * (end - first) / len(batch))
        outcome = _start(function, batch.part(first, end), side_effects, should_cancel, share)()
        activity.advance(0)
        if not isinstance(outcome, RowFailure):
            scores[first:end] = outcome
        elif end - first > 1:
            middle = (first + end) // 2
            ranges += [(first, middle), (middle, end)]
        else:
            scores[first] = outcome = _merge_row_failure(failure, outcome, share)
            if function.on_error == "raise":
                return [outcome if row == first else None for row in range(len(batch))]  # one row is enough for the error message
    if function.on_error == "raise" and not any(isinstance(value, RowFailure) for value in scores):
        return everywhere
    return scores


def _merge_row_failure(failure: RowFailure, failure_alone: RowFailure, seconds: float) -> RowFailure:
    """Combine the failure of a row called alone with that of the whole batch, if the two differ."""
    if failure_alone.reason == failure.reason:
        return failure_alone
    if failure_alone.kind == failure.kind == "timeout":
        return RowFailure(kind="timeout", reason=f"{failure.reason}, nor within {seconds:g} s when called for one row alone,")
    return RowFailure(kind=failure.kind, reason=f"{failure.reason}; called again for one row alone it {failure_alone.reason},")


def _sentence(function: RewardFunction, batch: RewardBatch, failures: Sequence[tuple[int, RowFailure]]) -> str:
    row, failure = failures[0]
    subject = f"Reward `{function.name}` {failure.reason}"
    if len(batch) > 1 and len(failures) == len(batch) and all(value == failure for _, value in failures):
        return f"{subject.rstrip(',')}, on all {len(batch)} rows; the first is {_row(batch, row)}."
    remark = f" It failed on {len(failures)} of {len(batch)} rows." if len(failures) > 1 else ""
    return f"{subject} on {_row(batch, row)}.{remark}"


def _row(batch: RewardBatch, row: int, width: int = 120) -> str:
    text = read_text(batch.completions[row])
    return f"{batch.labels[row]}, completion {text if len(text) <= width else text[:width] + '...'!r}"
