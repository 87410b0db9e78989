"""Interrupted completions on servers: requests sent, /abort, and the end. Real HTTP, servers without an engine."""

from __future__ import annotations

import threading
import time
from collections import Counter
from functools import partial

import numpy as np
import pytest

from megatron_grpo.core.base.errors import RunError
from megatron_grpo.plugins.servers import http, wire
from megatron_grpo.plugins.servers.http import Server
from megatron_grpo.plugins.servers.server_group import ServerRequirements, TrainingServerGroup
from megatron_grpo.plugins.servers.server_parts import ServerPartialRollouts
from megatron_grpo.plugins.servers.server_turns import TurnServerLostError
from tests.small_server import TOKEN, BrokenConnectionError, SmallServer


def encode_tokens(request, count, reason):
    """As many tokens, each the number of tokens before it in prompt and completion."""
    tokens = np.arange(len(request.ids), len(request.ids) + count, dtype=np.int32)
    one = wire.SampledCompletion(tokens=tokens, logprobs=np.full(count, -1.0, np.float32), text="t" * count, reason=reason,
                                 versions=((1, 0, count),) if count else ())  # fmt: skip
    return wire.encode_line(wire.GenerateLine(key=request.key, completions=(one,)))


def answer_until_aborted(server, body, *, times=1, counts=None):
    """Requests of one token of prompt end at once; the others have as many tokens as `counts` says when POST /abort has come so often."""
    for request in body.requests:
        if len(request.ids) == 1:
            yield encode_tokens(request, 1, "stop")
    begin = server.aborts
    while server.aborts - begin < times:
        yield b"\n"
        time.sleep(0.01)  # between two looks
    for request in body.requests:
        if len(request.ids) > 1:
            yield encode_tokens(request, (counts or {}).get(request.key, 2), "abort")


@pytest.fixture
def parts_of():
    opened, closed = [], []

    def made(*lines, max_num_seqs=8):
        servers = [SmallServer(one, max_num_seqs=max_num_seqs) for one in lines]
        group = TrainingServerGroup(
            lambda: [server.address for server in servers], partial(Server, token=TOKEN, incarnation="1"), run="ours", incarnation="1",
            requirements=ServerRequirements(max_model_len=64), timeout=5.0, print_line=lambda line: None,
        )  # fmt: skip
        group.gather()
        for server in servers:
            server.took(1)
        parts = ServerPartialRollouts(group, wire.Sampling(), version=1, deaths={})
        opened.extend([parts, *servers])
        closed.append(group)
        return parts, group, servers

    yield made
    for server in opened:
        server.is_frozen = False
    for thing in opened:
        getattr(thing, "abort", getattr(thing, "close", None))()
    for group in closed:
        group.close()


def submit(parts, key, length, **more):
    parts.submit(key, range(length), seed=1, max_tokens=9, num_sampled=more.get("num_sampled", 0))


def wait_until(is_so):
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)  # what is waited for happens in another thread


def test_server_parts_interrupt_returns_sampled_tokens_and_finished_parts(parts_of):
    parts, group, [server] = parts_of(partial(answer_until_aborted, counts={"2/0": 0}))
    for number, length in enumerate((1, 3, 4)):
        submit(parts, (number, 0), length)
    wait_until(lambda: server.asked)
    time.sleep(0.1)  # the whole one arrives, and is not looked at
    found = {key: (turn.token_ids, turn.is_cut, turn.version) for key, turn in parts.interrupt()}
    assert found == {(0, 0): ((1,), False, 1), (1, 0): ((3, 4), True, 1)}  # the third had none yet
    assert parts.num_running == 0 and len(group.used) == 1 and server.aborts == 1
    submit(parts, (3, 0), 1)
    time.sleep(0.1)
    assert len(server.asked) == 1  # nothing is sent after an interruption


def test_server_parts_unread_at_first_abort_end_at_second(parts_of):
    parts, _, [server] = parts_of(partial(answer_until_aborted, times=2))
    submit(parts, (0, 0), 3)
    wait_until(lambda: server.asked)
    assert [(key, turn.token_ids) for key, turn in parts.interrupt()] == [((0, 0), (3, 4))] and server.aborts == 2


def test_server_parts_aborted_without_abort_are_malformed(parts_of):
    parts, group, [_] = parts_of(lambda server, body: iter([encode_tokens(body.requests[0], 2, "abort")]))
    submit(parts, (0, 0), 3)
    with pytest.raises(TurnServerLostError):
        wait_until(lambda: parts.poll())
    assert not group.used and "abort" in next(iter(group.members.values())).trouble


def test_server_parts_silent_server_costs_one_timeout_and_others_keep_tokens(parts_of, monkeypatch):
    monkeypatch.setattr(http, "SILENCE", 1.0)

    def goes_silent(server, body):
        while server.is_frozen:
            time.sleep(0.01)
        yield b"\n"

    parts, group, [good, silent] = parts_of(answer_until_aborted, goes_silent)
    silent.is_frozen = True
    submit(parts, (0, 0), 3)
    submit(parts, (1, 0), 3)
    wait_until(lambda: good.asked)
    parts.poll()
    start = time.monotonic()
    assert [turn.token_ids for _, turn in parts.interrupt()] == [(3, 4)]
    assert time.monotonic() - start < 30  # POST /abort alone may take 60 s
    assert [str(member) for member in group.used] == [str(good.address)]


def test_server_parts_that_are_abandoned_are_not_sent(parts_of):
    parts, _, [server] = parts_of(answer_until_aborted)
    submit(parts, (0, 0), 3)
    wait_until(lambda: server.asked)
    parts.abort()
    submit(parts, (1, 0), 3)
    time.sleep(0.1)  # several turns of what sends
    assert server.asked == [("0/0",)] and not parts._calls


def test_server_parts_send_whole_groups_in_order_within_capacity(parts_of):
    parts, _, servers = parts_of(answer_until_aborted, answer_until_aborted, max_num_seqs=3)
    for number in range(8):
        for place in range(4):
            submit(parts, (number, place), 3)
    wait_until(lambda: sum(len(keys) for server in servers for keys in server.asked) >= 16)
    time.sleep(0.1)
    sent = [[tuple(map(int, key.split("/"))) for keys in server.asked for key in keys] for server in servers]
    assert sorted(sent[0] + sent[1]) == [(number, place) for number in range(4) for place in range(4)]  # room for 6 a server, by groups
    assert [set(Counter(number for number, _ in keys).values()) for keys in sent] == [{4}, {4}]
    assert len(parts.interrupt()) == 16


def test_server_parts_of_lost_server_are_resent_and_free_slots_are_used(parts_of):
    gate = threading.Event()

    def breaks(server, body):
        yield b"\n"
        gate.wait()
        raise BrokenConnectionError

    def answers(server, body):
        for request in body.requests:
            yield encode_tokens(request, 2, "stop")

    parts, group, [lost, good] = parts_of(breaks, answers, max_num_seqs=1)
    for number in range(9):
        submit(parts, (number, 0), 3)
    wait_until(lambda: lost.asked)
    gate.set()
    wait_until(lambda: sum(map(len, good.asked)) == 9)
    time.sleep(0.1)
    assert sorted(key for key, _ in parts.interrupt()) == [(number, 0) for number in range(9)]
    assert [str(member) for member in group.used] == [str(good.address)]


def test_server_parts_raise_after_three_server_deaths(parts_of):
    def breaks(server, body):
        raise BrokenConnectionError
        yield b""

    parts, group, _ = parts_of(breaks, breaks, breaks, answer_until_aborted)
    submit(parts, (0, 0), 3)
    wait_until(lambda: len(group.used) == 1)
    time.sleep(0.1)
    with pytest.raises(RunError, match="in flight on 3 rollout servers when they died"):
        parts.interrupt()
