"""Sampling that has begun before its answers are needed: threads, waiting together, and who takes the answers."""

from __future__ import annotations

import threading

import pytest

from megatron_grpo.rollout import ahead
from megatron_grpo.rollout.ahead import Ahead, InThread, wait_together
from megatron_grpo.rollout.engine import WeightsLost, WeightSyncError
from megatron_grpo.rollout.scripted import ScriptedEngine
from megatron_grpo.trainer.sync import Restoring
from megatron_grpo.weights.update import WeightUpdate
from tests.ranks import run_ranks
from tests.unit.trainer.test_rollouts import SAMPLING, Stream, answer


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


def pushed(engine, version):
    engine.take(WeightUpdate(kind="weights", version=version, tensors=()))


def versions(groups):
    return {group.prompt.number: group.version for group in groups}


def test_answers_that_have_come_in_are_taken_and_others_are_asked_now():
    engine, stream = ScriptedEngine(answer), Stream()
    sampler, prompts = Ahead(engine), stream.take(6)
    sampler.begin(prompts[:2], SAMPLING, seed=0)
    sampler.begin(prompts[2:4], SAMPLING, seed=0)
    with pytest.raises(WeightSyncError, match="version 5 was pushed to the scripted engine while it was answering"):
        pushed(engine, 5)
    assert sampler.land() > 0 and sampler.land() == 0.0
    pushed(engine, 5)
    assert versions(sampler.generate(prompts[1:], SAMPLING, seed=0)) == {1: 0, 2: 0, 3: 0, 4: 5, 5: 5}
    assert versions(sampler.generate(prompts[:2], SAMPLING, seed=0)) == {0: 0, 1: 0}, "asked again, as after prompts were given back"
    sampler.forget()
    assert versions(sampler.generate(prompts[:2], SAMPLING, seed=0)) == {0: 5, 1: 5}


def test_what_does_not_come_in_time_can_be_dropped():
    gate = threading.Event()
    engine = ScriptedEngine(lambda *asked: gate.wait() and answer(*asked))
    sampler, prompts = Ahead(engine), Stream().take(2)
    sampler.begin(prompts, SAMPLING, seed=0)
    assert sampler.land(0.0) is None
    sampler.forget()
    pushed(engine, 1)  # nothing is under way
    gate.set()
    assert versions(sampler.generate(prompts, SAMPLING, seed=0)) == {0: 1, 1: 1}


class Losing(ScriptedEngine):
    """Loses its weights in every flight, once."""

    def begin(self, prompts, sampling, *, seed):
        outer, lost = self, []

        class Flight:
            seconds = 1.0
            dropped = False

            def wait(self, seconds=None):
                return True

            def groups(self):
                if not lost:
                    lost.append(1)
                    raise WeightsLost("all servers are gone")
                return outer.generate(prompts, sampling, seed=seed)

            def drop(self):
                lost.append(1)

        return Flight()


def test_weights_that_are_lost_in_flight_are_pushed_again_as_the_policy_has_them_now():
    engine = Losing(answer)
    sampler, prompts = Ahead(Restoring(engine, lambda: pushed(engine, 4))), Stream().take(2)
    sampler.begin(prompts, SAMPLING, seed=0)
    assert sampler.land() == 1.0
    assert versions(sampler.generate(prompts, SAMPLING, seed=0)) == {0: 4, 1: 4}


def test_who_is_in_a_hurry_does_not_wait_for_servers_to_come_back():
    engine = Losing(answer)
    sampler, prompts = Ahead(Restoring(engine, lambda: pytest.fail("pushed"))), Stream().take(2)
    sampler.begin(prompts, SAMPLING, seed=0)
    assert sampler.land(10.0) is None
    sampler.forget()
