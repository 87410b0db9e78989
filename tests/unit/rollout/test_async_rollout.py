"""Sampling in the background: threads, and waiting on all ranks together."""

from __future__ import annotations

import threading

import pytest

from megatron_grpo.core.rollout import turns
from megatron_grpo.core.rollout.engine import SamplingSettings, make_completion
from megatron_grpo.core.rollout.turns import wait_together
from megatron_grpo.core.types import Prompt
from tests.ranks import run_ranks
from tests.scripted_engine import ScriptedEngine

PROMPTS = [Prompt(number=0, row=0, raw="", token_ids=(3,), columns={})]


def test_thread_future_waits_and_raises_error_on_result():
    gate = threading.Event()

    def slow(prompt, place, version):
        gate.wait()
        return make_completion(prompt.token_ids, (4,), (0.0,), text="", finish_reason="stop", version=version)

    def fails(prompt, place, version):
        raise KeyError("no such thing")

    def begun(answer):
        return ScriptedEngine(answer).begin(PROMPTS, SamplingSettings(n=1, max_completion_length=1), seed=0)

    work = begun(slow)
    assert not work.wait(0.0) and not work.wait(0.001)
    gate.set()
    assert len(work.groups()) == 1 and work.wait() and work.seconds > 0
    work = begun(fails)
    assert work.wait()
    with pytest.raises(KeyError, match="no such thing"):
        work.groups()


def test_async_rollout_ranks_wait_for_slowest_and_stop_together():
    def body(rank, world_size):
        from megatron_grpo.core.rollout import turns

        turns.SECONDS_BETWEEN_AGREEMENTS = 0.5
        asked = []

        def is_done(seconds):
            asked.append(seconds)
            return rank == 0 or len(asked) > 2

        in_time = turns.wait_together(is_done)
        never = turns.wait_together(lambda seconds: rank == 0, 1.25)
        return in_time, len(asked), never

    assert run_ranks(body, 2) == [(True, 3, False)] * 2


def test_async_rollout_wait_limit_is_counted_in_intervals(monkeypatch):
    monkeypatch.setattr(turns, "SECONDS_BETWEEN_AGREEMENTS", 0.5)
    asked = []
    assert not wait_together(asked.append, 1.25)
    assert asked == [0.5, 0.5, 0.25]
    assert not wait_together(asked.append, 0.0) and asked[3:] == [0.0]
