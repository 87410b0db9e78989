"""Sampling that has begun before its answers are needed: threads, and waiting together."""

from __future__ import annotations

import threading

import pytest

from megatron_grpo.rollout import ahead
from megatron_grpo.rollout.ahead import InThread, wait_together
from tests.ranks import run_ranks


def test_work_in_a_thread_is_waited_for_and_its_error_is_raised_where_the_result_is_asked_for():
    gate = threading.Event()
    work = InThread(lambda gives_up: gate.wait() and "done", name="work")
    assert not work.wait(0.0) and not work.wait(0.001)
    gate.set()
    assert work.result() == "done" and work.wait() and work.seconds > 0

    def fails(gives_up):
        raise KeyError("no such thing")

    work = InThread(fails, name="work")
    assert work.wait()
    with pytest.raises(KeyError, match="no such thing"):
        work.result()
    work = InThread(lambda gives_up: gives_up.wait(), name="work")
    work.give_up()
    assert work.result() is True


def test_ranks_wait_for_the_slowest_and_agree_when_to_stop():
    def body(rank, world_size):
        from megatron_grpo.rollout import ahead

        ahead.SECONDS_BETWEEN_AGREEMENTS = 0.5
        asked = []

        def is_done(seconds):
            asked.append(seconds)
            return rank == 0 or len(asked) > 2

        in_time = ahead.wait_together(is_done)
        never = ahead.wait_together(lambda seconds: rank == 0, 1.25)
        return in_time, len(asked), never

    assert run_ranks(body, 2) == [(True, 3, False)] * 2


def test_a_limit_is_counted_in_parts_and_not_measured(monkeypatch):
    monkeypatch.setattr(ahead, "SECONDS_BETWEEN_AGREEMENTS", 0.5)
    asked = []
    assert not wait_together(asked.append, 1.25)
    assert asked == [0.5, 0.5, 0.25]
    assert not wait_together(asked.append, 0.0) and asked[3:] == [0.0]
