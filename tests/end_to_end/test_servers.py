"""`megatron-grpo serve`: real processes with a tiny model, requests over HTTP, and weight syncs over a real link.

Three servers are started once: a plain one, one that accepts adapters, and one with a MoE model, TLS and router replay. The tests at the
end kill them.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import ssl
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_grpo.plugins.servers import wire
from megatron_grpo.plugins.servers.weight_transfer import LinkError
from tests.servers import TOKEN, BackgroundCall, Server, ServerAnswerError, Trainer, push
from tests.small_server import certificate_in
from tests.tiny_models import hf_logprobs, load_tiny, write_tiny

ROUTES = ("/state", "/metrics", "/claim", "/release", "/join", "/weights", "/adapter", "/generate", "/abort", "/score")
MODULES = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")  # that have an adapter
RANK, ALPHA = 4, 16
WARM = 0.8


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Checkpoints of one architecture with different weights; servers start with the first."""
    folder = tmp_path_factory.mktemp("models")
    return [write_tiny(folder / str(seed), tied=False, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def moe_models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    return [write_tiny(folder / str(seed), "qwen3_moe", seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return certificate_in(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def servers(models, moe_models, certificate, tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    lora = ["--tuner_type", "lora", "--lora_rank", str(RANK), "--target_modules", *(name.rpartition(".")[2] for name in MODULES)]
    cert, key = certificate
    token = folder / "token"
    started = [
        Server(folder / "plain", models[0]), Server(folder / "lora", models[0], *lora),
        Server(folder / "tls", moe_models[0], "--router_replay_mode", "R3", "--vllm_tensor_parallel_size", "2",
               "--ssl_certfile", str(cert), "--ssl_keyfile", str(key), "--metrics", "false", "--token_file",
               str(token), env={"MEGATRON_GRPO_TOKEN": ""}),
    ]  # fmt: skip
    try:
        yield [server.wait() for server in started]
    finally:
        for server in started:
            server.close()


@pytest.fixture(scope="module")
def trainer():
    return Trainer()


@pytest.fixture
def plain(servers):
    servers[0].claim("a run", f"{time.time_ns():020d}")
    return servers[0]


@pytest.fixture
def lora(servers):
    servers[1].claim("a run", f"{time.time_ns():020d}")
    return servers[1]


def read_weights(path: Path) -> list[tuple[str, torch.Tensor]]:
    return list(load_file(path / "model.safetensors").items())


def make_prompts(num: int = 4, length: int = 40) -> list[tuple[int, ...]]:
    return [tuple(row) for row in np.random.default_rng(5).integers(4, 128, (num, length)).tolist()]


def make_request(version: int, *, n: int = 2, max_tokens: int = 12, num: int = 4, **more) -> wire.GenerateRequest:
    requests = tuple(
        wire.Request(key=str(i), ids=ids, seed=1024 * i, n=n, max_tokens=max_tokens) for i, ids in enumerate(make_prompts(num))
    )
    return wire.GenerateRequest(version=version, sampling=wire.Sampling(temperature=WARM), requests=requests, **more)


def find_sample_gap(answers: dict[str, wire.GenerateLine], model) -> float:
    """Return the largest |sampler - transformers| of all sampled tokens' log-probs."""
    worst = 0.0
    for key, ids in enumerate(make_prompts(len(answers))):
        for drawn in answers[str(key)].completions:
            expected = hf_logprobs(model, [*ids, *drawn.tokens.tolist()], WARM)[len(ids) - 1 :].numpy()
            worst = max(worst, float(np.abs(expected - drawn.logprobs).max()))
    return worst


def find_score_gap(server: Server, model) -> float:
    found = wire.decode(wire.ScoreResponse, server.call("/score", wire.ScoreRequest(sequences=tuple(make_prompts(4, 66)))))
    return max(float(np.abs(hf_logprobs(model, list(ids)).numpy() - np.array(row)).max())
               for ids, row in zip(make_prompts(4, 66), found.logprobs, strict=True))  # fmt: skip


def catch_refusal(call) -> tuple[int, str]:
    with pytest.raises(ServerAnswerError) as caught:
        call()
    return caught.value.status, str(caught.value)


# ---- the door


def test_server_without_token_answers_401(servers):
    server, codes, bodies = servers[0], set(), set()
    wrong = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": f"bearer {TOKEN}"}, {"Authorization": ""},
             {"Authorization": f"Basic {TOKEN}"}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": f"Bearer {TOKEN[:-1]}"},
             {"X-Api-Key": TOKEN}, {"Cookie": f"Authorization=Bearer {TOKEN}"}, {"Proxy-Authorization": f"Bearer {TOKEN}"},
             {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
              "Sec-WebSocket-Version": "13"},
             {"X-Forwarded-For": "127.0.0.1", "X-Incarnation": server.incarnation}]  # fmt: skip
    paths = (
        *ROUTES,
        "/",
        "/docs",
        "/openapi.json",
        "/v1/completions",
        "/collective_rpc",
        "/state/",
        "//state",
        "/%73tate",
        f"/state?token={TOKEN}",
    )
    asks = [(method, path, {}) for path in paths for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "PATCH")]
    asks += [(method, path, headers) for headers in wrong for path in ("/state", "/generate", "/nothing") for method in ("GET", "POST")]
    for method, path, headers in asks:
        connection, answer = server.request(method, path, b"{}" if method in ("POST", "PUT") else None, headers)
        with closing(connection):
            codes.add(answer.status)
            bodies.add(answer.read())
    assert codes == {401} and bodies == {wire.encode_error("the token is missing or wrong"), b""}  # HEAD has no body


def test_server_token_in_body_or_incomplete_request_is_rejected(servers):
    """Sends requests that no HTTP library would send."""
    for said in (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /state HTTP/1.0\r\n\r\n",
                 b"GET http://x/state HTTP/1.1\r\nHost: x\r\n\r\n",
                 f"POST /state HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\nAuthorization: Bearer {TOKEN}".encode(),
                 b"GET /state HTTP/1.1\r\nHost: x\r\nAuthorization : Bearer\r\n\r\n", b"\x16\x03\x01\x02\x00", b"\r\n\r\n",
                 b"BREW /state HTTP/1.1\r\nHost: x\r\n\r\n"):  # fmt: skip
        with socket.create_connection((servers[0].host, servers[0].port), timeout=20) as raw:
            raw.sendall(said)
            raw.shutdown(socket.SHUT_WR)
            head = raw.makefile("rb").readline()
        assert head.split(b" ")[1:2] in ([], [b"400"], [b"401"]), (said, head)


def test_server_routes_name_errors_in_requests(servers, plain):
    for path, method, status in (("/nothing", "GET", 404), ("/docs", "GET", 404), ("/v1/models", "GET", 404), ("/state", "DELETE", 405),
                                 ("/generate", "GET", 405), ("/claim", "GET", 405)):  # fmt: skip
        connection, answer = plain.request(method, path)
        with closing(connection):
            assert answer.status == status and wire.decode_error(answer.read())
    for path in ("/claim", "/join", "/weights", "/adapter", "/generate", "/abort", "/score"):
        for body, says in ((b"", "is not JSON"), (b"\xff\xfe", "is not JSON"), (b"[]", "Expected `object`, got `array`"),
                           (b'{"x": 1}', "unknown field `x`")):  # fmt: skip
            connection, answer = plain.request("POST", path, body)
            with closing(connection):
                assert answer.status == 400 and says in wire.decode_error(answer.read())
    assert plain.state().owner == "a run"  # and it lives


def test_server_request_without_claim_is_an_error_and_changes_nothing(plain):
    mine, plain.incarnation = plain.incarnation, "stranger"
    join = wire.JoinRequest(address="127.0.0.1", port=1, first_rank=1, world=2, name="x", seconds=1.0)
    bodies = {"/release": wire.EmptyBody(), "/join": join, "/weights": wire.WeightUpdateRequest(version=1, link="x"),
              "/generate": make_request(1), "/score": wire.ScoreRequest(sequences=()), "/abort": wire.AbortRequest(version=0),
              "/state": None,
              "/adapter": wire.AdapterUpdateRequest(version=1, link="x", config={}, modules=())}  # fmt: skip
    for path, body in bodies.items():
        status, says = catch_refusal(lambda path=path, body=body: plain.call(path, body))
        assert status == 409 and "belongs to run 'a run'; claim it first" in says
    status, says = catch_refusal(lambda: plain.claim("another run", "stranger"))
    assert status == 409 and "run 'a run' owns this server (last request 0 s ago" in says
    status, says = catch_refusal(lambda: plain.claim("a run", "0"))
    assert status == 409 and "a later process of run 'a run'" in says
    plain.incarnation = mine
    assert plain.state().owner == "a run"


# ---- weights


class CancelledError(Exception):
    pass


def give_up(link, server: Server, named) -> None:
    """Send these tensors with wrong values, then cancel the sync."""

    def source():
        for name, tensor in named:
            yield name, torch.randn_like(tensor)
        raise CancelledError

    told = BackgroundCall(lambda: server.state("/weights", wire.WeightUpdateRequest(version=1, link=link.name)))
    with pytest.raises(CancelledError):
        link.send(source(), 5000)
    status, says = catch_refusal(told.answer)
    assert status == 500 and "the trainer cancelled this weight update" in says


def test_server_failed_first_syncs_do_not_affect_the_first_complete_one(plain, trainer, models):
    """They use vLLM's reload, which would count tensors of a failed sync toward the next one. Later syncs use a copy table."""
    link, all_of_them = trainer.link(plain), read_weights(models[1])
    for named in (all_of_them[:4], all_of_them[:9], [item for item in all_of_them if ".q_proj" in item[0] or ".gate_proj" in item[0]]):
        give_up(link, plain, named)
    told = BackgroundCall(lambda: plain.state("/weights", wire.WeightUpdateRequest(version=1, link=link.name)))
    with pytest.raises(LinkError):  # the worker left
        link.send(((n, t[:-1] if "layers.0.mlp.up_proj" in n else t) for n, t in all_of_them * 40), 2000)
    assert catch_refusal(told.answer)[0] == 500 and plain.state().version is None
    link = trainer.link(plain)
    status, says = catch_refusal(
        lambda: push(link, [(n, t) for n, t in all_of_them if "layers.1.mlp.down_proj" not in n], plain, version=1)
    )
    assert status == 500 and "did not change 1 of the engine's weights: model.layers.1.mlp.down_proj.weight" in says
    push(link, all_of_them, plain, version=1)
    assert (
        find_sample_gap(plain.generate(make_request(1)), load_tiny(models[1])) < 1e-4 and find_score_gap(plain, load_tiny(models[1])) < 1e-4
    )


def test_server_answers_only_with_synced_weights_on_all_workers(plain, lora, trainer, models):
    for server in (plain, lora):
        for version in (0, 1):
            status, says = catch_refusal(lambda server=server, version=version: server.call("/generate", make_request(version)))
            assert status == 409 and "has no weights, but version" in says
        assert catch_refusal(lambda server=server: server.call("/score", wire.ScoreRequest(sequences=())))[0] == 409
    link = trainer.link(plain, lora)
    for version in (1, 2):
        states = push(link, read_weights(models[version]), plain, lora, version=version)
        assert [state.version for state in states] == [version] * 2
        model = load_tiny(models[version])
        found = [server.generate(make_request(version)) for server in (plain, lora)]
        assert all(find_sample_gap(answers, model) < 1e-4 for answers in found)
        assert all(find_score_gap(server, model) < 1e-4 for server in (plain, lora))
        for key in found[0]:  # whoever answers: the same tokens
            for one, other in zip(found[0][key].completions, found[1][key].completions, strict=True):
                assert one.tokens.tolist() == other.tokens.tolist() and one.versions == ((version, 0, len(one.tokens)),)
    status, says = catch_refusal(lambda: plain.call("/generate", make_request(1)))
    assert status == 409 and "has version 2, but version 1 was requested" in says


@pytest.mark.parametrize("num", [0, 9])
def test_server_cancelled_sync_leaves_no_version_and_next_is_exact(plain, trainer, models, num):
    link = trainer.link(plain)
    push(link, read_weights(models[2]), plain, version=1)
    give_up(link, plain, read_weights(models[1])[:num])
    assert plain.state().version is None
    push(link, read_weights(models[1]), plain, version=2)
    assert find_sample_gap(plain.generate(make_request(2)), load_tiny(models[1])) < 1e-4


def test_server_missing_tensor_is_named_and_leaves_no_version(plain, trainer, models):
    link = trainer.link(plain)
    push(link, read_weights(models[2]), plain, version=1)
    status, says = catch_refusal(
        lambda: push(link, [(n, t) for n, t in read_weights(models[1]) if "layers.1.mlp.down_proj" not in n], plain, version=2)
    )
    assert status == 500 and "did not change 1 of the engine's weights: model.layers.1.mlp.down_proj.weight" in says
    assert plain.state().version is None and not plain.state().has_base
    push(link, read_weights(models[1]), plain, version=2)
    assert find_score_gap(plain, load_tiny(models[1])) < 1e-4


def test_server_wrong_tensor_is_detected_by_probes_and_wrong_shape_by_server(plain, trainer, models):
    link = trainer.link(plain)
    push(link, [(n, t * 1.5 if "layers.0.mlp.up_proj" in n else t) for n, t in read_weights(models[1])], plain, version=1)
    assert find_score_gap(plain, load_tiny(models[1])) > 1e-2
    told = BackgroundCall(lambda: plain.state("/weights", wire.WeightUpdateRequest(version=2, link=link.name)))
    with pytest.raises(LinkError):  # the worker left, and nobody waits for the limit
        link.send(((n, t[:-1] if "layers.0.mlp.up_proj" in n else t) for n, t in read_weights(models[1]) * 40), 2000)
    assert catch_refusal(told.answer)[0] == 500 and plain.state().version is None
    status, says = catch_refusal(lambda: plain.call("/weights", wire.WeightUpdateRequest(version=2, link=link.name)))
    assert status == 500 and "is closed" in says
    push(trainer.link(plain), read_weights(models[1]), plain, version=2)
    assert find_score_gap(plain, load_tiny(models[1])) < 1e-4


def test_server_sync_over_unjoined_link_is_an_error(plain):
    status, says = catch_refusal(lambda: plain.call("/weights", wire.WeightUpdateRequest(version=1, link="nobody's")))
    assert status == 500 and 'not a member of the link "nobody\'s"; join it first' in says
    join = wire.JoinRequest(address="127.0.0.1", port=1, first_rank=1, world=2, name="x", seconds=1.0)
    status, says = catch_refusal(lambda: plain.call("/join", join))
    assert status == 500 and "worker 0: the trainer's store at 127.0.0.1:1 does not answer" in says


# ---- sampling


def make_long_request(version: int) -> wire.GenerateRequest:
    """Return requests that a server cannot finish during a test: 16 sequences at once, and 1024 with some hundred tokens each."""
    ids = make_prompts(1)[0]
    return wire.GenerateRequest(version=version, sampling=wire.Sampling(temperature=2.0), requests=tuple(
        wire.Request(key=str(i), ids=ids, seed=64 * i, n=16, max_tokens=200) for i in range(64)))  # fmt: skip


def open_stream(server: Server, body: wire.GenerateRequest):
    """Return a stream whose requests are in the engine."""
    connection, stream = server.request("POST", "/generate", wire.encode(body))
    assert stream.status == 200
    until = time.monotonic() + 60
    while server.state().running < len(body.requests) // 2:
        assert time.monotonic() < until
    return connection, stream


def is_idle(server: Server) -> bool:
    until = time.monotonic() + 20
    while server.state().running:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def test_server_disconnected_client_aborts_its_requests(plain, trainer, models):
    push(trainer.link(plain), read_weights(models[1]), plain, version=1)
    connection, stream = open_stream(plain, make_long_request(1))
    stream.close()
    connection.close()
    assert is_idle(plain)
    metrics = plain.call("/metrics").decode()
    assert any(line.startswith("vllm:num_requests_running") for line in metrics.splitlines())


@pytest.mark.parametrize("change", ["claim", "release", "push"])
def test_server_aborts_requests_of_earlier_owner_or_version(plain, trainer, models, change):
    link = trainer.link(plain)
    push(link, read_weights(models[1]), plain, version=1)
    connection, stream = open_stream(plain, make_long_request(1))
    if change == "claim":
        state = plain.claim("a run", f"{time.time_ns():020d}")
    elif change == "release":
        state = plain.state("/release", wire.EmptyBody())
    else:
        (state,) = push(link, read_weights(models[2]), plain, version=2)
    assert state.running == 0 and state.version == (2 if change == "push" else None)
    with closing(connection):
        answers = [answer for line in iter(stream.readline, b"") if (answer := wire.decode_line(wire.GenerateLine, line))]
    assert len(answers) < 64  # who counts lines knows; the server sent none that began under one version and ended under another
    if change == "push":
        assert find_sample_gap(plain.generate(make_request(2)), load_tiny(models[2])) < 1e-4


def test_server_invalid_request_fails_alone_in_its_batch(plain, trainer, models):
    push(trainer.link(plain), read_weights(models[1]), plain, version=1)
    good = make_request(1).requests
    wrong = {
        "long": (dict(ids=(5,) * 250, max_tokens=7), r"its prompt has 250 tokens, and 250 + max_tokens (7) = 257 exceeds"),
        "word": (dict(ids=(5, 10**6)), "out of vocabulary"), "minus": (dict(ids=(-1,)), "out of vocabulary"),
        "empty": (dict(ids=()), "has no tokens"),
        "none": (dict(n=0), "at least 1"), "still": (dict(max_tokens=0), "at least 1"), "seed": (dict(seed=2**63), "between 0 and 2**63"),
        "many": (dict(n=10**9), "n"),
    }  # fmt: skip
    bad = [wire.Request(**({"key": key, "ids": (5, 6), "seed": 1, "n": 1, "max_tokens": 4} | change)) for key, (change, _) in wrong.items()]
    answers = plain.generate(wire.GenerateRequest(version=1, sampling=wire.Sampling(temperature=WARM), requests=(*bad, *good)))
    for key, (_, says) in wrong.items():
        assert says in (answers[key].error or ""), (key, answers[key])
    assert find_sample_gap({key: answers[key] for key in "0123"}, load_tiny(models[1])) < 1e-4
    fits = wire.Request(key="fits", ids=(5,) * 250, seed=0, n=1, max_tokens=6)
    assert plain.generate(wire.GenerateRequest(version=1, sampling=wire.Sampling(), requests=(fits,)))["fits"].error is None
    answers = plain.generate(wire.GenerateRequest(version=1, sampling=wire.Sampling(temperature=-1.0), requests=good))
    assert all("temperature" in (answer.error or "") for answer in answers.values())
    assert catch_refusal(lambda: plain.call("/score", wire.ScoreRequest(sequences=((5,),))))[0] == 400
    assert plain.state().running == 0


def test_server_stream_sends_keepalive_lines(plain, trainer, models):
    push(trainer.link(plain), read_weights(models[1]), plain, version=1)
    connection, stream = open_stream(plain, make_long_request(1))
    engine = plain.find_pid("EngineCore")
    os.kill(engine, signal.SIGSTOP)
    try:
        with closing(connection):
            begun = time.monotonic()
            while stream.readline() != b"\n":
                pass
            assert time.monotonic() - begun < 60  # and not never
            assert plain.state().version == 1  # the HTTP process answers meanwhile
    finally:
        os.kill(engine, signal.SIGCONT)
    assert is_idle(plain)


def test_server_metrics_include_those_of_vllm(plain, trainer, models):
    def numbers():
        lines = plain.call("/metrics").decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line and line[0] != "#")}

    before = numbers()
    assert before["megatron_grpo_server_version"] == -1
    push(trainer.link(plain), read_weights(models[1]), plain, version=6)
    catch_refusal(lambda: plain.call("/generate", make_request(1)))
    plain.generate(make_request(6))
    after = numbers()

    def grew(name):
        return after[name] - before.get(name, 0.0)

    assert after["megatron_grpo_server_version"] == 6 and after["megatron_grpo_server_running_requests"] == 0
    assert grew('megatron_grpo_server_weight_updates_total{kind="weights",outcome="complete"}') == 1
    assert grew('megatron_grpo_server_refusals_total{status="409"}') == 1
    assert grew('megatron_grpo_server_answered_total{outcome="answered"}') == 4
    assert 0 < after["megatron_grpo_server_last_weight_update_seconds"] < 60
    assert sum(grew(name) for name in after if name.startswith("vllm:generation_tokens_total")) > 0


# ---- adapters


def make_adapter(seed: int, num_layers: int = 2) -> dict[str, torch.Tensor]:
    generator, sizes = torch.Generator().manual_seed(seed), {"q_proj": (64, 128), "k_proj": (64, 64), "down_proj": (128, 64)}
    found = {}
    for layer in range(num_layers):
        for module in MODULES:
            inner, out = sizes[module.rpartition(".")[2]]
            name = f"model.layers.{layer}.{module}"
            found[f"{name}.lora_A.weight"] = torch.randn(RANK, inner, generator=generator) * 0.2
            found[f"{name}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * 0.2
    return found


def merge_adapter(path: Path, tensors: dict[str, torch.Tensor]):
    model = load_tiny(path)
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            b = tensors[name.replace("lora_A", "lora_B")]
            model.get_submodule(module).weight.data += ALPHA / RANK * (b @ a)
    return model


def test_server_adapter_sync_needs_complete_adapter_and_own_base(plain, lora, trainer, models):
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": [name.rpartition(".")[2] for name in MODULES],
              "bias": "none", "task_type": "CAUSAL_LM"}  # fmt: skip
    names = tuple(f"model.layers.{layer}.{module}" for layer in range(2) for module in MODULES)
    body = dict(path="/adapter", config=config, modules=names)
    link = trainer.link(lora)
    status, says = catch_refusal(
        lambda: lora.call("/adapter", wire.AdapterUpdateRequest(version=1, link=link.name, config=config, modules=names))
    )
    assert status == 409 and "no base weights of this run" in says
    (state,) = push(link, read_weights(models[1]), lora, version=None)
    assert state.version is None and state.has_base and state.adapter_rank == 8
    for version in (1, 2):
        (state,) = push(link, make_adapter(version).items(), lora, version=version, **body)
        assert state.version == version
        model = merge_adapter(models[1], make_adapter(version))
        assert find_sample_gap(lora.generate(make_request(version)), model) < 1e-4 and find_score_gap(lora, model) < 1e-4
    lacking = {name: tensor for name, tensor in make_adapter(3).items() if "layers.1.mlp" not in name}
    status, says = catch_refusal(lambda: push(link, lacking.items(), lora, version=3, **body))
    assert status == 500 and "1 modules have an adapter in this run but were not sent (model.layers.1.mlp.down_proj)" in says
    other = {name.replace("layers", "leyers"): tensor for name, tensor in make_adapter(3).items()}
    status, says = catch_refusal(lambda: push(link, other.items(), lora, version=3, **body))
    assert status == 500 and "were sent but have no adapter in this run" in says
    assert lora.state().version is None and lora.state().has_base
    push(link, read_weights(models[2]), lora, version=4)  # the base drops every adapter
    assert find_sample_gap(lora.generate(make_request(4)), load_tiny(models[2])) < 1e-4
    push(link, read_weights(models[2]), lora, version=5, kind="merged")
    status, says = catch_refusal(
        lambda: lora.call("/adapter", wire.AdapterUpdateRequest(version=6, link=link.name, config=config, modules=names))
    )
    assert status == 409  # merged weights are no base
    only = trainer.link(plain)
    push(only, read_weights(models[1]), plain, version=1)
    status, says = catch_refusal(
        lambda: plain.call("/adapter", wire.AdapterUpdateRequest(version=2, link=only.name, config=config, modules=names))
    )
    assert status == 500 and "this server does not support adapters" in says


# ---- ends


def test_server_with_lost_engine_exits_and_others_take_next_sync(plain, lora, trainer, models):
    link = trainer.link(plain, lora)
    engine = lora.find_pid("EngineCore")

    def source():
        for number, item in enumerate(read_weights(models[1])):
            if number == 8:
                os.kill(engine, signal.SIGKILL)
            yield item

    told = [
        BackgroundCall(lambda server=server: server.state("/weights", wire.WeightUpdateRequest(version=1, link=link.name)))
        for server in (plain, lora)
    ]
    with pytest.raises(LinkError):
        link.send(source(), 5000)
    assert catch_refusal(told[0].answer)[0] == 500 and plain.state().version is None
    with pytest.raises((ServerAnswerError, OSError, http.client.HTTPException)):
        told[1].answer()
    push(trainer.link(plain), read_weights(models[1]), plain, version=1)
    assert find_sample_gap(plain.generate(make_request(1)), load_tiny(models[1])) < 1e-4
    assert lora.process.wait(60) == 1 and lora.has_left_nothing()
    assert "The engine of this server died" in lora.log.read_text() and not lora.address_file.exists()


def test_server_frozen_during_sync_does_not_have_the_new_weights(plain, trainer, models):
    push(trainer.link(plain), read_weights(models[1]), plain, version=1)
    stopped = plain.worker_pid()
    os.kill(stopped, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            plain.call("/state", timeout=0.5)
    finally:
        os.kill(stopped, signal.SIGCONT)
    status, says = catch_refusal(lambda: plain.call("/generate", make_request(2)))
    assert status == 409 and "has version 1, but version 2 was requested" in says


def test_server_killed_leaves_no_engine_process(plain, trainer, models):
    push(trainer.link(plain), read_weights(models[1]), plain, version=1)
    connection, stream = open_stream(plain, make_long_request(1))
    assert plain.find_pid("EngineCore")
    os.kill(plain.worker_pid(), signal.SIGKILL)
    with closing(connection), pytest.raises((OSError, http.client.HTTPException)):
        while stream.readline():
            pass
        raise ConnectionError("the stream ended")
    assert plain.has_left_nothing() and plain.process.wait(10) != 0


def test_server_tls_generated_token_and_sigterm_during_stream_work(servers, certificate, trainer, moe_models):
    server, folder = servers[2], servers[2].log.parent.parent
    token = (folder / "token").read_text().strip()
    assert len(token) > 40 and (folder / "token").stat().st_mode & 0o777 == 0o600 and token not in server.log.read_text()
    assert server.address_file.read_text() == f"https://127.0.0.1:{server.port}\n" and str(folder / "token") in server.log.read_text()
    with pytest.raises((OSError, http.client.HTTPException)):
        server.request("GET", "/state")  # in the clear
    trust = ssl.create_default_context(cafile=certificate[0])

    def ask(path, body=None, bearer=token):
        connection = http.client.HTTPSConnection("localhost", server.port, timeout=60, context=trust)
        connection.request("GET" if body is None else "POST", path, body and wire.encode(body),
                           {wire.AUTHORIZATION: f"Bearer {bearer}", wire.INCARNATION: "1"})  # fmt: skip
        return connection, connection.getresponse()

    assert ask("/state", bearer=TOKEN)[1].status == 401
    assert ask("/metrics")[1].status == 404
    assert ask("/claim", wire.ClaimRequest(run="r", incarnation="1"))[1].status == 200
    server.call = lambda path, body=None, **_: ask(path, body)[1].read()  # what a link is made with
    assert server.state().returns_experts
    push(trainer.link(server), read_weights(moe_models[1]), server, version=1)
    connection, stream = ask("/generate", make_request(1))
    with closing(connection):
        answers = {answer.key: answer for answer in (wire.decode_line(wire.GenerateLine, line) for line in stream) if answer is not None}
    model = load_tiny(moe_models[1])
    assert find_sample_gap(answers, model) < 1e-4
    for key, ids in enumerate(make_prompts()):
        first, second = answers[str(key)].completions
        for drawn, begin in ((first, 0), (second, len(ids))):  # the prompt's experts come with the first completion alone
            with torch.no_grad():
                routed = model(torch.tensor([[*ids, *drawn.tokens.tolist()]]), output_router_logits=True).router_logits
            expected = np.stack([layer.topk(2, dim=-1).indices.sort(dim=-1).values.numpy() for layer in routed], axis=1)
            assert drawn.experts is not None and np.array_equal(np.sort(drawn.experts, axis=-1), expected[begin:-1])
    connection, stream = ask("/generate", make_long_request(1))
    server.process.terminate()
    with closing(connection):
        lines = stream.read().splitlines()
    assert len([line for line in lines if line]) < 64
    assert server.process.wait(60) == 0 and server.has_left_nothing()
    assert not server.address_file.exists() and "serve: ended" in server.log.read_text()
