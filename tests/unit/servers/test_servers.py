"""Servers as an engine that samples in the background. Real HTTP, servers without an engine."""

from __future__ import annotations

import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from megatron_grpo.core.rollout.engine import ReceiverChangedError, SamplingSettings
from megatron_grpo.core.rollout.experts import InvalidRoutingError
from megatron_grpo.core.types import Prompt
from megatron_grpo.core.weights.buckets import WeightUpdate
from megatron_grpo.plugins.servers import weight_broadcast, wire
from megatron_grpo.plugins.servers.http import Server, ServerGoneError
from megatron_grpo.plugins.servers.requests import GenerationRequest
from megatron_grpo.plugins.servers.server_group import ServerRequirements, TrainingServerGroup
from megatron_grpo.plugins.servers.server_turns import ServerTurns, TurnServerLostError
from megatron_grpo.plugins.servers.servers import ServerEngine
from tests.small_server import TOKEN, BrokenConnectionError, SmallServer, all_at_once, answer
from tests.unit.trainer.test_rollouts import build_generator

SAMPLING = SamplingSettings(n=2, max_completion_length=4)
PROMPTS = [Prompt(number=number, row=number, raw="", token_ids=(4, 5), columns={}) for number in range(6)]


class VersionBroadcaster:
    """A weight broadcaster that sends only the version."""

    def __init__(self, server_group, servers):
        self.server_group, self.servers = server_group, servers

    def send_update(self, update):
        for server in self.servers:
            server.took(update.version)

    def close(self):
        pass


@pytest.fixture
def engine_of():
    opened = []

    def made(*lines, **more):
        servers = [SmallServer(one) for one in lines]
        server_group = TrainingServerGroup(
            lambda: [server.address for server in servers],
            partial(Server, token=TOKEN, incarnation="1"),
            run="ours",
            # fmt: skip
            incarnation="1",
            requirements=ServerRequirements(max_model_len=64),
            timeout=5.0,
            print_line=lambda line: None,
        )
        engine = ServerEngine(lambda: VersionBroadcaster(server_group, servers), tokenizer=None, vocab_size=10, **more)
        sync_version(engine, 1)
        opened.extend([engine, *servers])
        return engine, servers

    yield made
    for thing in opened:
        thing.close()


def sync_version(engine, version):
    engine.load_weights(WeightUpdate(kind="weights", version=version, tensors=()))


def list_answers(groups):
    return {group.prompt.number: (group.version, [one.answer_ids for one in group.completions]) for group in groups}


def test_server_engine_background_answers_equal_synchronous_ones(engine_of):
    gate = threading.Event()

    def late(server, body):
        gate.wait()
        yield from all_at_once(server, body)

    engine, _ = engine_of(late, late)
    flight = engine.begin(PROMPTS, SAMPLING, seed=7)
    assert not flight.wait(0.0)
    gate.set()
    assert flight.wait() and flight.seconds > 0
    ahead = list_answers(flight.groups())
    assert list(ahead) == list(range(6)) and ahead == list_answers(engine.generate(PROMPTS, SAMPLING, seed=7))


def test_server_engine_after_losing_all_servers_answers_rest_with_new_weights(engine_of):
    def dies_after_three(server, body):
        if server.state.version == 4:
            yield from all_at_once(server, body)
            return
        for request in body.requests:
            if int(request.key) > 2:
                raise BrokenConnectionError
            yield wire.encode_line(answer(request, body.version))

    engine, _ = engine_of(dies_after_three)

    def sync_weights():
        engine.prepare()
        sync_version(engine, 4)

    generator = build_generator(engine, sampling=SAMPLING, sync_again=sync_weights)
    generator.begin(PROMPTS)
    assert generator.wait()
    assert {number: version for number, (version, _) in list_answers(generator.groups(PROMPTS)).items()} == {
        0: 1,
        1: 1,
        2: 1,
        3: 4,
        4: 4,
        5: 4,
    }


def test_server_engine_dropped_future_closes_its_connections(engine_of):
    ended = threading.Event()

    def without_end(server, body):
        try:
            while True:
                yield b"\n"  # it is alive
                time.sleep(0.01)
        finally:
            ended.set()

    engine, servers = engine_of(without_end)
    flight = engine.begin(PROMPTS, SAMPLING, seed=7)
    while not servers[0].asked:
        time.sleep(0.01)
    assert not flight.wait(0.0)
    flight.drop()
    assert ended.wait(60), "the server hears that its connection has ended"
    servers[0].lines = all_at_once
    sync_version(engine, 2)
    assert {version for version, _ in list_answers(engine.generate(PROMPTS, SAMPLING, seed=7)).values()} == {2}


def test_server_engine_returns_experts_with_prompt_routes_of_first_completion(engine_of):
    def with_experts(server, body):
        for request in body.requests:
            one = answer(request, body.version)
            routes = [np.full((len(request.ids) + 2, 2, 3), int(request.key), dtype=np.int16), np.full((2, 2, 3), 7, dtype=np.int16)]
            drawn = tuple(replace(drawn, experts=told) for drawn, told in zip(one.completions, routes, strict=True))
            yield wire.encode_line(replace(one, completions=drawn))

    engine, _ = engine_of(with_experts, returns_experts=True)
    for group in engine.generate(PROMPTS, SAMPLING, seed=7):
        first, second = (one.sequence.experts for one in group.completions)
        assert first.shape == second.shape == (2 + 3, 2, 3) and first.dtype == np.int16
        assert (first[:4] == group.prompt.number).all() and (second[:2] == first[:2]).all() and (second[2:4] == 7).all()
        assert (first[4] == -1).all() and (second[4] == -1).all()  # the last token, which was not run, routes freely


def test_server_engine_server_without_experts_is_rejected_for_replay(engine_of):
    engine, _ = engine_of(all_at_once, returns_experts=True)
    with pytest.raises(InvalidRoutingError, match="returned no routed experts"):
        engine.generate(PROMPTS, SAMPLING, seed=7)


# ---- calls that are in flight as servers are lost, and taken up again ----------------------------------------------------------------


def answer_turns(body):
    """Answers to turns."""
    for request in body.requests:
        yield wire.encode_line(replace(answer(replace(request, key="0"), body.version), key=request.key))


def wait_until(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)  # nobody tells: what is waited for happens in another thread


def test_server_engine_finishes_turns_of_lost_server_before_weight_sync(engine_of):
    gate = threading.Event()

    def one_breaks(server, body):
        if len(body.requests[0].ids) == 1:
            raise BrokenConnectionError
        gate.wait()
        yield from answer_turns(body)

    engine, [server] = engine_of(one_breaks)
    server_group = engine._broadcaster.server_group
    turns = ServerTurns(server_group, wire.Sampling(), version=1, deaths={})
    for key, ids in (((0, 0), (4, 5)), ((1, 0), (4,))):
        turns.submit(key, ids, seed=7, max_tokens=3)
        turns.poll()
    wait_until(lambda: not server_group.used)
    assert turns.poll() == []  # a push would end the other one
    gate.set()
    found = []
    wait_until(lambda: found.extend(turns.poll()) or found)
    assert [key for key, _ in found] == [(0, 0)]
    with pytest.raises(TurnServerLostError):
        turns.poll()
    assert turns.num_running == 1


@pytest.mark.parametrize("asks", ["prompts", "turns"])
def test_server_engine_call_ended_by_weight_sync_does_not_drop_server(engine_of, asks):
    gate = threading.Event()

    def ends_at_a_push(server, body):
        gate.wait()
        yield b"\n"

    engine, [server] = engine_of(ends_at_a_push)
    server_group = engine._broadcaster.server_group
    if asks == "turns":
        asked = ServerTurns(server_group, wire.Sampling(), version=1, deaths={})
        asked.submit((0, 0), (4, 5), seed=7, max_tokens=3)
        asked.poll()
    else:
        asked = GenerationRequest({0: wire.Request(key="0", ids=(4, 5), seed=7, n=2, max_tokens=3)}, wire.Sampling(), version=1)
        asked.ask(server_group)
    wait_until(lambda: server.asked)
    [member] = server_group.used
    server_group.lose(member, ServerGoneError("another call was cut"))
    engine.prepare()
    sync_version(engine, 2)
    gate.set()
    wait_until(lambda: not asked._flying if asks == "turns" else asked.rests(0))
    assert server_group.used == [member] and len(server.asked) == 1  # nor is it asked on by who was told of older weights
    assert not (asked._deaths if asks == "turns" else asked._router.deaths)


@pytest.mark.parametrize("job", [
    lambda broadcaster: broadcaster.send_update(WeightUpdate(kind="weights", version=2, tensors=())),
    lambda broadcaster: broadcaster.scores([], 2),
], ids=["push", "scores"])  # fmt: skip
def test_server_engine_weight_sync_without_servers_is_repeated(engine_of, job):
    engine, _ = engine_of(all_at_once)
    server_group = engine._broadcaster.server_group
    for member in server_group.used:
        server_group.lose(member, ServerGoneError("its machine has gone"))
    broadcaster = weight_broadcast.WeightBroadcaster(server_group, device=torch.device("cpu"), bucket_bytes=1)
    with pytest.raises(ReceiverChangedError, match="No rollout server is left"):
        job(broadcaster)
    broadcaster.close()
