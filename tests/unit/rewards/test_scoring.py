"""One bad row never loses a rollout, and the error says which function, which row and which value."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from megatron_grpo.errors import Interrupted, RewardError
from megatron_grpo.rewards.protocol import RewardBatch, RewardFunction
from megatron_grpo.rewards.scoring import score

GOOD, BAD, ROWS = "1", "bad", 16


def batch(*bad, rows=ROWS):
    completions = [BAD if row in bad else GOOD for row in range(rows)]
    return RewardBatch(prompts=["p"] * rows, completions=completions, completion_ids=[[1]] * rows, columns={},
                       labels=[f"row {row}" for row in range(rows)])  # fmt: skip


def reward(function, on_error="none", timeout=2.0):
    return RewardFunction(name=function.__name__, function=function, timeout=timeout, on_error=on_error)


def raises(completions):
    return list(map(float, completions))


def miscounts(completions):
    return [1.0 for completion in completions if completion != BAD]


def returns_nan(completions):
    return [float("nan") if completion == BAD else 1 for completion in completions]


def returns_text(completions):
    return ["high" if completion == BAD else 1 for completion in completions]


def hangs(completions):
    for completion in completions:
        while completion == BAD:
            time.sleep(0.01)
    return [1.0] * len(completions)


def swallows(completions):
    for completion in completions:
        while completion == BAD:
            try:
                time.sleep(10)
            except Exception:  # noqa: BLE001 - the point of it
                pass
    return [1.0] * len(completions)


async def raises_later(completions):
    await asyncio.sleep(0)
    return raises(completions)


async def hangs_later(completions):
    if BAD in completions:
        await asyncio.sleep(1000)
    return [1.0] * len(completions)


@pytest.mark.parametrize("function", [raises, miscounts, returns_nan, returns_text, raises_later])
@pytest.mark.parametrize("bad", [(0,), (9,), (15,), (3, 4, 12)])
def test_only_the_bad_rows_go_without_a_score(function, bad):
    rows = score([reward(function)], batch(*bad)).rows
    assert rows == tuple((None,) if row in bad else (1.0,) for row in range(ROWS))


@pytest.mark.parametrize("function", [hangs, swallows, hangs_later])
def test_a_row_that_hangs_is_left_behind_and_the_others_are_scored(function):
    started = time.monotonic()
    rows = score([reward(function, timeout=0.5)], batch(9)).rows
    assert rows == tuple((None,) if row == 9 else (1.0,) for row in range(ROWS))
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "Reward `raises` raised ValueError: could not convert string to float: 'bad' "
                 f"(test_scoring.py line {raises.__code__.co_firstlineno + 1}, in raises) on row 9, completion 'bad'."),
        (miscounts, "Reward `miscounts` returned 0 values for 1 completions on row 9, completion 'bad'."),
        (returns_nan, "Reward `returns_nan` returned nan on row 9, completion 'bad'."),
        (returns_text, "Reward `returns_text` returned the str 'high' where a number or None should be on row 9, completion 'bad'."),
        (hangs, "Reward `hangs` did not answer within 0.5 s, nor within 0.05 s when called for one row alone, on row 9, completion 'bad'."),
    ],
)  # fmt: skip
def test_an_error_names_function_row_and_value(function, message):
    with pytest.raises(RewardError) as error:
        score([reward(function, "raise", 0.5)], batch(9))
    assert str(error.value) == message


def test_a_failure_of_every_row_is_one_sentence():
    with pytest.raises(RewardError, match="`returns_nan` returned nan, on all 4 rows; the first is row 0, completion 'bad'.$"):
        score([reward(returns_nan, "raise")], batch(0, 1, 2, 3, rows=4))


def test_all_failing_functions_are_named_at_once():
    with pytest.raises(RewardError) as error:
        score([reward(raises, "raise"), reward(returns_nan, "raise"), reward(hangs, "none", 0.3)], batch(2, rows=4))
    assert [line.split("`")[1] for line in str(error.value).splitlines()] == ["raises", "returns_nan"]


def test_notices_come_once_per_kind_with_the_first_row():
    def mixed(completions):
        return [float("inf") if row == 3 else "x" if row > 5 else 1 for row in range(len(completions))]

    notices = score([reward(mixed)], batch()).notices
    assert [(notice.kind, "row 3," in notice.message, "row 6," in notice.message) for notice in notices] == [
        ("not finite", True, False), ("type", False, True)]  # fmt: skip
    assert notices[1].message.endswith("It failed on 10 of 16 rows. Counted as None.")


def test_asynchronous_functions_run_at_the_same_time_as_each_other_and_as_the_rest():
    async def first(completions):
        await asyncio.sleep(0.5)
        return [1] * len(completions)

    async def second(completions):
        await asyncio.sleep(0.5)
        return [2] * len(completions)

    def third(completions):
        time.sleep(0.5)
        return [3] * len(completions)

    started = time.monotonic()
    assert score([reward(first), reward(second), reward(third)], batch(rows=2)).rows == ((1.0, 2.0, 3.0),) * 2
    assert time.monotonic() - started < 1.2


def test_an_event_loop_lives_from_batch_to_batch_and_a_blocked_one_is_replaced():
    loops = []

    async def blocks(completions):
        loops.append(asyncio.get_running_loop())
        if BAD in completions:
            time.sleep(3)
        return [1] * len(completions)

    function = reward(blocks, timeout=0.3)
    score([function], batch(rows=1))
    score([function], batch(rows=1))
    assert score([function], batch(0, rows=1)).rows == ((None,),)
    assert score([function], batch(rows=1)).rows == ((1.0,),)
    assert loops[0] is loops[1] is loops[2] is not loops[3]


def test_a_signal_that_ends_the_run_is_no_failure_of_the_reward():
    def interrupted(completions):
        raise Interrupted

    with pytest.raises(Interrupted):
        score([reward(interrupted)], batch(rows=2))


def test_scoring_works_away_from_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(score([reward(raises)], batch(1, rows=2)).rows))
    thread.start()
    thread.join()
    assert results == [((1.0,), (None,))]


def test_the_users_own_alarm_does_not_clear_the_deadline():
    import signal

    def clears(completions):  # what math-verify does in its own finally
        signal.alarm(0)
        time.sleep(1000)

    with pytest.raises(RewardError, match="did not answer within 0.3 s"):
        score([reward(clears, "raise", 0.3)], batch(rows=1))


def test_an_empty_share_has_no_scores():
    assert score([reward(raises)], batch(rows=0)).rows == ()


def test_code_that_cannot_be_interrupted_ends_the_process_and_shows_where_it_is_stuck():
    program = textwrap.dedent("""
        from megatron_grpo.rewards import deadline
        deadline.GRACE = 0.5
        def stuck_in_c(completions):
            return [9 ** 9 ** 9]
        deadline.call_before(0.5, lambda: stuck_in_c([""]))
    """)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30,
                           env={"PYTHONPATH": ":".join(sys.path), "PATH": ""})  # fmt: skip
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr and "in stuck_in_c" in ended.stderr
