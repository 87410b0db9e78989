"""Server groups: claims, lost and returning servers, and requests to them. Real HTTP, servers without an engine."""

from __future__ import annotations

import itertools
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from megatron_grpo.core.base.errors import ConfigError, NoRolloutServerError, RunError
from megatron_grpo.plugins.servers import http, requests, server_group, wire
from megatron_grpo.plugins.servers.addresses import Address
from megatron_grpo.plugins.servers.http import Server, ServerGoneError, ServerRefusedError, read_run_name, run_name, start_coroutine
from megatron_grpo.plugins.servers.requests import GenerationRequest
from megatron_grpo.plugins.servers.server_group import ServerRequirements, TrainingServerGroup
from tests.small_server import TOKEN, BrokenConnectionError, SmallServer, all_at_once, answer, certificate_in

SAMPLING = wire.Sampling()


@pytest.fixture
def opened():
    """Closes what a test has opened."""
    things = []
    yield lambda thing: things.append(thing) or thing
    for thing in things:
        thing.close()


SMALL = ServerRequirements(max_model_len=64)


@pytest.fixture
def fleet_of(opened):
    def made(*servers, timeout=5.0, run="ours", incarnation="1", needs=SMALL, addresses=None, token=TOKEN, **more):
        said = []
        found = TrainingServerGroup(
            addresses or (lambda: [server.address for server in servers]), partial(Server, token=token, incarnation=incarnation), run=run,
            incarnation=incarnation, requirements=needs, timeout=timeout, print_line=said.append, **more,
        )  # fmt: skip
        found.said = said
        return opened(found)

    return made


def run_coroutine(work):
    return start_coroutine(work).result(60)


def make_request(count, version=1, n=2):
    requests = {i: wire.Request(key=str(i), ids=(4, 5), seed=1000 + i, n=n, max_tokens=4) for i in range(count)}
    return GenerationRequest(
        requests, SAMPLING, version=version, format_name=lambda number: f"prompt {number} (data-set row {number + 100})"
    )


def prepare_servers(servers, found, version=1):
    found.gather()
    for server in servers:
        server.took(version)


# ---- who is there ----------------------------------------------------------------------------------------------------------------------


def test_server_group_waits_for_all_at_start_and_for_one_later(opened, fleet_of, monkeypatch):
    clock = itertools.count(step=0.1)  # seconds pass by the looks at it, so a machine that is busy elsewhere changes nothing
    monkeypatch.setattr(server_group, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep))
    monkeypatch.setattr(server_group, "SECONDS_BETWEEN_SIGNS", 0.2)
    first, second = opened(SmallServer()), SmallServer()
    address = second.address
    second.close()
    found = fleet_of(addresses=lambda: [first.address, address], timeout=1.0)
    assert [str(member) for member in found.gather()] == [str(first.address)]
    assert any("waiting for rollout servers" in said and str(address) in said and "refused" in said for said in found.said)
    assert found.said[-1].startswith(f"starting without {address}")
    said = len(found.said)
    found.gather()
    assert len(found.said) == said  # it is not waited for again
    again = opened(SmallServer(port=address.port, boot="second"))
    assert {str(member) for member in found.gather()} == {str(first.address), str(again.address)}


def test_server_group_of_restarted_run_starts_with_available_servers(opened, fleet_of):
    first, second = opened(SmallServer()), SmallServer()
    second.close()
    found = fleet_of(first, second, timeout=60.0, waits_for_all=False)
    assert [str(member) for member in found.gather()] == [str(first.address)]
    assert "refused" in found.said[0] and found.said[0].startswith(f"starting without {second.address}")


def test_server_group_without_servers_raises_with_addresses(fleet_of):
    server = SmallServer()
    server.close()
    with pytest.raises(NoRolloutServerError, match=f"within 0.4 s .vllm_server_timeout.: {server.address} .*refused"):
        fleet_of(server, timeout=0.4).gather()
    with pytest.raises(NoRolloutServerError, match="no server has written its address yet"):
        fleet_of(timeout=0.4).gather()


def test_server_group_server_of_other_run_raises_at_start_and_is_skipped_later(opened, fleet_of):
    free, taken = opened(SmallServer()), opened(SmallServer())
    taken.claim = wire.ClaimRequest(run="theirs", incarnation="x")
    with pytest.raises(ConfigError, match="run 'theirs' owns this server"):
        fleet_of(free, taken).gather()
    servers = [free]
    found = fleet_of(addresses=lambda: [server.address for server in servers])
    found.gather()
    servers.append(taken)
    assert [str(member) for member in found.gather()] == [str(free.address)]


def test_server_group_claim_of_later_process_ends_earlier_one(opened, fleet_of):
    server = opened(SmallServer())
    old, new = fleet_of(server, incarnation="1"), fleet_of(server, incarnation="2")
    old.gather()
    old.gather()  # as often as it likes
    new.gather()
    with pytest.raises(RunError, match="Another process of this run has claimed"):
        old.gather()
    assert server.claim.incarnation == "2"
    server.claim, server.state = None, replace(server.state, boot="second", owner=None)  # it was started again, which is another thing
    assert new.gather() and server.claim.incarnation == "2"


@pytest.mark.parametrize(
    ("needs", "sentence"),
    [
        (
            ServerRequirements(max_model_len=65),
            "supports sequences of 64 tokens, but prompt plus completion may have 65: .* --vllm_max_model_len 65",
        ),
        (ServerRequirements(max_model_len=64, adapter_rank=8), "does not support adapters, but the run syncs one of rank 8"),
        (ServerRequirements(max_model_len=64, returns_experts=True), "does not return routed experts, .* --router_replay_mode R3"),
        (
            ServerRequirements(max_model_len=64, shape={"hidden_size": 64, "norm_epsilon": 1e-6, "rope.theta": 1e6, "num_layers": 2}),
            r"a model \(m\) that differs from the run's: hidden_size 32 \(the run's: 64\), "
            r"norm_epsilon 1e-05 \(the run's: 1e-06\), "
            r"rope.theta 10000.0 \(the run's: 1000000.0\), windows \[3\] \(the run's: None\)\. Start it with the run's",
        ),
    ],
)  # fmt: skip
def test_server_group_rejects_incompatible_server_with_reason(opened, fleet_of, needs, sentence):
    server = opened(SmallServer())
    shape = {"hidden_size": 32, "norm_epsilon": 1e-5, "rope.theta": 1e4, "num_layers": 2, "windows": [3]}
    server.state = replace(server.state, shape=shape)
    with pytest.raises(ConfigError, match=sentence):
        fleet_of(server, needs=needs).gather()


def test_server_group_server_with_wrong_token_raises_at_start(opened, fleet_of):
    with pytest.raises(ConfigError, match="the token is missing or wrong"):
        fleet_of(opened(SmallServer()), token="another one").gather()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return certificate_in(tmp_path_factory.mktemp("tls"))


def test_server_group_trusts_only_configured_certificates(opened, certificate, tmp_path):
    server = opened(SmallServer(certificate=certificate))
    server.took(1)
    trusted, stranger = (
        Server(server.address, token=TOKEN, incarnation="1", trust=trust) for trust in (http.make_tls_context(str(certificate[0])), None)
    )
    assert run_coroutine(trusted.state(as_owner=False)).version == 1
    with pytest.raises(ServerRefusedError, match="its certificate is not trusted .*; set vllm_server_ca to its CA"):
        run_coroutine(stranger.state(as_owner=False))
    with pytest.raises(ServerGoneError):
        run_coroutine(Server(Address("127.0.0.1", server.address.port), token=TOKEN, incarnation="1").state(as_owner=False))
    (tmp_path / "no.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="no.pem. is not a PEM file with certificates"):
        http.make_tls_context(str(tmp_path / "no.pem"))


def test_server_group_invalid_address_file_raises_at_start_and_is_logged_later(opened, fleet_of):
    server, broken = opened(SmallServer()), False

    def addresses():
        if broken:
            raise ValueError("names, line 1: 'x' is no address")
        return [server.address]

    found = fleet_of(addresses=addresses)
    found.gather()
    broken = True
    assert len(found.gather()) == 1 and found.said == ["servers: names, line 1: 'x' is no address"]
    with pytest.raises(ConfigError, match="servers: names, line 1: 'x' is no address."):
        fleet_of(addresses=addresses).gather()


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (["127.0.0.1", "127.0.0.1"], ["127.0.0.1", "127.0.0.1"]),
        (["10.0.0.1", "192.168.0.1"], ["10.0.0.1", "192.168.0.1"]),
        (["127.0.0.1", "10.0.0.1", "::1"], ["10.0.0.1", "10.0.0.1", "10.0.0.1"]),
    ],
)
def test_rendezvous_address_for_local_server_is_reachable_from_others(seen, told):
    from megatron_grpo.plugins.servers.weight_broadcast import rendezvous_addresses

    assert rendezvous_addresses(seen) == told


def test_server_group_waits_once_for_frozen_server_and_readds_it(opened, fleet_of, monkeypatch):
    for where in (server_group, http):
        monkeypatch.setattr(where, "CONNECT", 1.0)
    monkeypatch.setattr(server_group, "SECONDS_BETWEEN_SIGNS", 0.1)
    servers = [opened(SmallServer()), opened(SmallServer())]
    found = fleet_of(*servers)
    assert len(found.gather()) == 2
    servers[0].is_frozen = True
    assert len(found.gather()) == 1
    start = time.monotonic()
    for _ in range(5):
        assert len(found.gather()) == 1
    assert time.monotonic() - start < 4  # not a second each
    servers[0].is_frozen = False
    deadline = time.monotonic() + 20
    while len(found.gather()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)  # between two looks


def test_server_group_restarted_server_is_unverified(opened, fleet_of):
    server = opened(SmallServer())
    found = fleet_of(server)
    (member,) = found.gather()
    member.is_proven = True
    assert found.gather()[0].is_proven
    server.state = replace(server.state, boot="second")
    assert not found.gather()[0].is_proven


def test_run_name_is_stored_in_output_dir(tmp_path):
    assert run_name(tmp_path) is None
    name = read_run_name(tmp_path)
    assert name.startswith(f"{tmp_path.name}-") and read_run_name(tmp_path) == run_name(tmp_path) == name


# ---- questions -------------------------------------------------------------------------------------------------------------------------


def test_server_group_splits_prompts_and_keeps_seeds(opened, fleet_of):
    all_asked = threading.Event()

    def once_all_are_asked(server, body):  # on a busy machine the first might have answered all before the last is reached
        if all(one.asked for one in servers):
            all_asked.set()
        assert all_asked.wait(timeout=10)
        yield from all_at_once(server, body)

    servers = [opened(SmallServer(once_all_are_asked)) for _ in range(3)]
    found, asked = fleet_of(*servers), make_request(40)
    prepare_servers(servers, found)
    asked.ask(found)
    assert asked.wait() == 0
    assert {number: drawn[1].tokens.tolist() for number, drawn in asked.answers.items()} == {i: [i, 1000 % 1000 + i, 1] for i in range(40)}
    keys = [key for server in servers for call in server.asked for key in call]
    assert sorted(keys, key=int) == [str(i) for i in range(40)]
    assert {len(call) for server in servers for call in server.asked} <= set(range(1, 5))  # 8 sequences, 2 a prompt


def make_breaking_answer(count, how=BrokenConnectionError):
    """Serves so many prompts over all calls, then breaks every connection."""

    def lines(server, body):
        for request in body.requests:
            server.served = getattr(server, "served", 0) + 1
            if server.served > count:
                if how is not BrokenConnectionError:
                    yield how(request)
                raise BrokenConnectionError
            yield wire.encode_line(answer(request, body.version))

    return lines


@pytest.mark.parametrize("half", [None, b'{"key": "1", "comp'], ids=["between lines", "in a line"])
def test_server_group_resends_prompts_of_dead_server(opened, fleet_of, half):
    bad = opened(SmallServer(make_breaking_answer(3, how=BrokenConnectionError if half is None else lambda request: half)))
    good = opened(SmallServer())
    found, asked = fleet_of(bad, good), make_request(60)
    prepare_servers([bad, good], found)
    asked.ask(found)
    assert asked.wait() == 0 and len(asked.answers) == 60
    assert [member.trouble for member in found.used] == [None] and str(found.used[0]) == str(good.address)
    assert sum("is not used until the next weight sync" in said for said in found.said) == 1


def test_server_group_without_servers_returns_partial_answers_and_continues(opened, fleet_of):
    server = opened(SmallServer(make_breaking_answer(5)))
    found, asked = fleet_of(server), make_request(20)
    prepare_servers([server], found)
    asked.ask(found)
    left = asked.wait()
    assert 0 < left == 20 - len(asked.answers) <= 17
    before = dict(asked.answers)
    server.lines = all_at_once
    asked_before = len(server.asked)
    found.gather()
    asked.ask(found)
    assert asked.wait() == 0
    assert all(asked.answers[number] is drawn for number, drawn in before.items())
    assert {key for call in server.asked[asked_before:] for key in call} == {str(i) for i in range(20)} - {str(i) for i in before}


def test_server_group_excludes_server_with_stale_weights(opened, fleet_of):
    stale, good = opened(SmallServer()), opened(SmallServer())
    found, asked = fleet_of(stale, good), make_request(30)
    prepare_servers([stale, good], found)
    stale.took(0)
    asked.ask(found)
    assert asked.wait() == 0 and not asked._router.deaths and len(stale.asked) <= 2


def test_server_group_prompt_error_raises_with_prompt(opened, fleet_of):
    def lines(server, body):
        for request in body.requests:
            yield wire.encode_line(wire.GenerateLine(key="7", error="too long") if request.key == "7" else answer(request, body.version))

    servers = [opened(SmallServer(lines)) for _ in range(2)]
    found, asked = fleet_of(*servers), make_request(30)
    prepare_servers(servers, found)
    asked.ask(found)
    with pytest.raises(RunError, match=r"prompt 7 \(data-set row 107\) cannot be completed: too long"):
        asked.wait()
    assert len(found.used) == 2  # no server is to blame


def test_server_group_prompt_that_kills_three_servers_raises(opened, fleet_of):
    def lines(server, body):
        for request in body.requests:
            if request.key == "3":
                raise BrokenConnectionError
            yield wire.encode_line(answer(request, body.version))

    servers = [opened(SmallServer(lines)) for _ in range(4)]
    found, asked = fleet_of(*servers), make_request(16)
    prepare_servers(servers, found)
    with pytest.raises(RunError, match=r"prompt 3 \(data-set row 103\): in flight on 3 rollout servers when they died"):
        for _ in range(4):
            asked.ask(found)
            asked.wait()
            found.gather()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [(dict(reason="abort"), "a completion has finish reason 'abort'"), (dict(versions=((0, 0, 3),)), "the weights of version 0, not 1")],
)
def test_server_group_malformed_answer_drops_server(opened, fleet_of, wrong, sentence):
    def lines(server, body):
        for request in body.requests:
            yield wire.encode_line(answer(request, body.version, **wrong))

    bad, good = opened(SmallServer(lines)), opened(SmallServer())
    found, asked = fleet_of(bad, good), make_request(10)
    prepare_servers([bad, good], found)
    asked.ask(found)
    assert asked.wait() == 0
    assert all(one.reason == "stop" and one.versions[0][0] == 1 for drawn in asked.answers.values() for one in drawn)
    assert any(sentence in said for said in found.said)


def test_server_group_drops_silent_server_but_not_one_with_keepalives(opened, fleet_of, monkeypatch):
    monkeypatch.setattr(http, "SILENCE", 2.0)

    def slow(server, body):
        for request in body.requests:
            for _ in range(15):
                time.sleep(0.2)
                yield b"\n"
            yield wire.encode_line(answer(request, body.version))

    def silent(server, body):
        yield b"\n"
        time.sleep(5)

    good, bad = opened(SmallServer(slow)), opened(SmallServer(silent))
    found, asked = fleet_of(good, bad), make_request(3, n=8)
    prepare_servers([good, bad], found)
    asked.ask(found)
    assert asked.wait() == 0
    assert [str(member) for member in found.used] == [str(good.address)]
    assert not asked._router.deaths  # who stands still was not killed by a prompt
    assert requests.ENDS == ("stop", "length")


def test_server_group_internal_error_raises(opened, fleet_of):
    """Not for ever: who asks again and again would hear of it in threads alone. Such a seed has no JSON."""
    server = opened(SmallServer(all_at_once))
    found = fleet_of(server)
    prepare_servers([server], found)
    ours = wire.Request(key="0", ids=(4, 5), seed=np.int64(7), n=2, max_tokens=4)
    asked = GenerationRequest({**make_request(2).requests, 0: ours}, SAMPLING, version=1)
    asked.ask(found)
    limit = time.monotonic() + 20
    with pytest.raises(TypeError, match="int64 is not JSON"):
        asked.wait(should_cancel=lambda: time.monotonic() > limit)
    assert [str(member) for member in found.used] == [str(server.address)]  # it is no fault of the server's
