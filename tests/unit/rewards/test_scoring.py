"""Failures while scoring: they affect only their rows, and the error names function, row and value."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from megatron_grpo.core.base.errors import RewardError, RunInterruptedError
from megatron_grpo.run.rewards.protocol import RewardBatch, RewardFunction
from megatron_grpo.run.rewards.scoring import score

GOOD, BAD, ROWS = "1", "bad", 16
# Seconds. What hangs hangs for ever, what does not takes microseconds: a machine that stalls for a third of a second finds the same row.
PATIENCE = 1.6
FEW = 4  # rows, so that one that is called alone is given much of it


def make_batch(*bad, rows=ROWS):
    completions = [BAD if row in bad else GOOD for row in range(rows)]
    return RewardBatch(prompts=["p"] * rows, completions=completions, completion_ids=[[1]] * rows, columns={},
                       labels=[f"row {row}" for row in range(rows)])  # fmt: skip


def make_reward(function, on_error="none", timeout=2.0):
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


def asserts(completions):
    if BAD in completions:
        raise AssertionError
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
def test_reward_failure_affects_only_its_rows(function, bad):
    rows = score([make_reward(function)], make_batch(*bad)).rows
    assert rows == tuple((None,) if row in bad else (1.0,) for row in range(ROWS))


@pytest.mark.parametrize("function", [hangs, swallows, hangs_later])
def test_reward_hanging_row_times_out_and_others_are_scored(function):
    rows = score([make_reward(function, timeout=PATIENCE)], make_batch(2, rows=FEW)).rows
    assert rows == ((1.0,), (1.0,), (None,), (1.0,))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "Reward `raises` raised ValueError: could not convert string to float: 'bad' "
                 f"(test_scoring.py line {raises.__code__.co_firstlineno + 1}, in raises) on row 9, completion 'bad'."),
        (asserts, "Reward `asserts` raised AssertionError "
                  f"(test_scoring.py line {asserts.__code__.co_firstlineno + 2}, in asserts) on row 9, completion 'bad'."),
        (miscounts, "Reward `miscounts` returned 15 values for 16 completions; called again for one row alone it returned 0 values for "
                    "1 completion, on row 9, completion 'bad'."),
        (returns_nan, "Reward `returns_nan` returned nan on row 9, completion 'bad'."),
        (returns_text, "Reward `returns_text` returned the str 'high', expected a number or None, on row 9, completion 'bad'."),
    ],
)  # fmt: skip
def test_an_error_names_function_row_and_value(function, message):
    with pytest.raises(RewardError) as error:
        score([make_reward(function, "raise", 60)], make_batch(9))
    assert str(error.value) == message


def test_reward_timeout_error_states_batch_and_row_limits():
    with pytest.raises(RewardError) as error:
        score([make_reward(hangs, "raise", PATIENCE)], make_batch(2, rows=FEW))
    assert str(error.value) == (
        "Reward `hangs` did not return within 1.6 s, nor within 0.4 s when called for one row alone, on row 2, completion 'bad'."
    )


def test_reward_that_fails_once_is_reported_with_first_failure():
    """By the time that its rows are called one by one it has another reason, or none."""
    counts = iter([3, 0])

    def forgets(completions):
        return [1.0] * next(counts, len(completions))

    with pytest.raises(RewardError, match="^Reward `forgets` returned 3 values for 16 completions, on all 16 rows"):
        score([make_reward(forgets, "raise", 60)], make_batch())

    def broken_twice(completions):
        if len(completions) == ROWS:
            return []
        raise ValueError("no rows are left")

    with pytest.raises(
        RewardError, match="^Reward `broken_twice` returned 0 values for 16 completions; called again for one row alone it raised"
    ):
        score([make_reward(broken_twice, "raise", 60)], make_batch())


def test_reward_failure_of_every_row_gives_one_message():
    with pytest.raises(RewardError, match="`returns_nan` returned nan, on all 4 rows; the first is row 0, completion 'bad'.$"):
        score([make_reward(returns_nan, "raise")], make_batch(0, 1, 2, 3, rows=4))


def test_a_reward_that_is_too_large_to_be_averaged_is_refused():
    def huge(completions):
        return [1e308] * len(completions)

    with pytest.raises(
        RewardError, match=r"`huge` returned 1e\+308, which exceeds 1e\+30 and cannot be averaged, on all 16 rows; the first"
    ):
        score([make_reward(huge, "raise", 60)], make_batch())


def test_reward_error_names_all_failing_functions():
    with pytest.raises(RewardError) as error:
        score([make_reward(raises, "raise"), make_reward(returns_nan, "raise"), make_reward(hangs, "none", 0.3)], make_batch(2, rows=4))
    assert [line.split("`")[1] for line in str(error.value).splitlines()] == ["raises", "returns_nan"]


def test_reward_failure_notices_are_printed_once_per_kind():
    def mixed(completions):
        return [float("inf") if row == 3 else "x" if row > 5 else 1 for row in range(len(completions))]

    notices = score([make_reward(mixed)], make_batch()).notices
    assert [(notice.kind, "row 3," in notice.message, "row 6," in notice.message) for notice in notices] == [
        ("not finite", True, False), ("type", False, True)]  # fmt: skip
    assert notices[1].message.endswith("It failed on 10 of 16 rows. Counted as None.")


def test_asynchronous_functions_run_at_the_same_time_as_each_other_and_as_the_rest():
    meeting = threading.Barrier(3)  # which nobody leaves before all three are there

    async def first(completions):
        await asyncio.to_thread(meeting.wait, 60)
        return [1] * len(completions)

    async def second(completions):
        await asyncio.to_thread(meeting.wait, 60)
        return [2] * len(completions)

    def third(completions):
        meeting.wait(60)
        return [3] * len(completions)

    functions = [make_reward(function, "raise", 60) for function in (first, second, third)]
    assert score(functions, make_batch(rows=2)).rows == ((1.0, 2.0, 3.0),) * 2


def test_async_rewards_reuse_event_loop_and_replace_a_blocked_one():
    loops = []

    async def blocks(completions):
        loops.append(asyncio.get_running_loop())
        if BAD in completions:
            time.sleep(20)
        return [1] * len(completions)

    function = make_reward(blocks, timeout=2)
    score([function], make_batch(rows=1))
    score([function], make_batch(rows=1))
    assert score([function], make_batch(0, rows=1)).rows == ((None,),)
    assert score([function], make_batch(rows=1)).rows == ((1.0,),)
    assert loops[0] is loops[1] is loops[2] is not loops[3]


def test_signal_during_scoring_is_not_a_reward_failure():
    def interrupted(completions):
        raise RunInterruptedError

    with pytest.raises(RunInterruptedError):
        score([make_reward(interrupted)], make_batch(rows=2))


def test_scoring_works_away_from_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(score([make_reward(raises)], make_batch(1, rows=2)).rows))
    thread.start()
    thread.join()
    assert results == [((1.0,), (None,))]


def test_reward_alarm_of_user_does_not_clear_the_timeout():
    import signal

    def clears(completions):  # what math-verify does in its own finally
        signal.alarm(0)
        time.sleep(1000)

    with pytest.raises(RewardError, match="did not return within 0.3 s"):
        score([make_reward(clears, "raise", 0.3)], make_batch(rows=1))


def test_score_batch_of_no_completions_is_empty():
    assert score([make_reward(raises)], make_batch(rows=0)).rows == ()


def test_reward_that_cannot_be_interrupted_ends_process_with_stack():
    program = textwrap.dedent("""
        from megatron_grpo.run.rewards import process_isolation as contained
        contained.GRACE = 0.5
        def stuck_in_c(completions):
            return [9 ** 9 ** 9]
        contained.call_before(0.5, lambda: stuck_in_c([""]))
    """)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30,
                           env={"PYTHONPATH": ":".join(sys.path), "PATH": ""})  # fmt: skip
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr and "in stuck_in_c" in ended.stderr
