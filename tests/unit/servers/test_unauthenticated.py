"""Clients without the token, on a real listening server without an engine."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time

import pytest

from megatron_grpo.plugins import listener
from megatron_grpo.plugins.servers import wire
from tests.small_server import certificate_in

TOKEN = "the-token-of-these-tests"
KNOWN = {wire.AUTHORIZATION: f"Bearer {TOKEN}"}
SECONDS = 2.0  # that a stranger has
OPEN_FILES = 400  # less than asyncio's queue of connections, as 1,024 are less than uvicorn's
SERVER = """
import asyncio, json, sys
from types import SimpleNamespace
from megatron_grpo.plugins import listener
from megatron_grpo.core.base.cleanup import CleanUp
from megatron_grpo.plugins.servers import serve_lifecycle as life
from megatron_grpo.run.config.settings import Config
from megatron_grpo.core.weights.shape import ModelShape, RopeShape

class NoEngine:
    class Dead(Exception): pass
    is_dead, dtype, returns_experts, adapter_rank, limit_images, max_pixels = False, "float32", False, 0, 0, 0
    max_model_len = max_num_seqs = world_size = 1
    async def check(self): pass
    async def abort(self): pass
    async def join(self, join): await asyncio.sleep(join.seconds)

listener.SECONDS = float(sys.argv[1])
cfg = Config().with_values({"port": 0, "address_file": sys.argv[2], **json.loads(sys.argv[3])})
scheme = "https" if cfg.serve.ssl_certfile else "http"
sizes = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "head_dim", "ffn_hidden_size"), 1)
rope = RopeShape(type="default", dim=2, theta=1e4)
shape = ModelShape(architecture="Qwen3ForCausalLM", vocab_size=9, max_position_embeddings=9, norm_epsilon=1e-6, rope=rope, **sizes)
serving = SimpleNamespace(cfg=cfg, token=sys.argv[4], token_place="here", model_path="m", scheme=scheme, shape=shape)
taken = life.take_port(cfg.serve)
with CleanUp() as clean_up:
    asyncio.run(life._answer(serving, NoEngine(), taken, f"{taken.getsockname()[1]}", clean_up))
"""


class ServerProcess:
    def __init__(self, folder, **settings):
        self.log, address = folder / "log", folder / "address"
        limit = (OPEN_FILES, OPEN_FILES)
        command = [sys.executable, "-c", SERVER, str(SECONDS), str(address), json.dumps(settings), TOKEN]
        self.process = subprocess.Popen(command, stdout=self.log.open("w"), stderr=subprocess.STDOUT,
                                        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit))  # fmt: skip
        until = time.monotonic() + 60
        while not address.exists():
            assert self.process.poll() is None and time.monotonic() < until, self.log.read_text()
            time.sleep(0.02)
        self.port = int(address.read_text())
        self.trust = ssl.create_default_context(cafile=settings["ssl_certfile"]) if settings else None

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def owner(self):
        kind = {"context": self.trust} if self.trust else {}
        return (http.client.HTTPSConnection if kind else http.client.HTTPConnection)("127.0.0.1", self.port, timeout=20, **kind)

    def ask(self, method, path, body=None, incarnation="1"):
        """As the owner does: the status, and what was said."""
        connection = self.owner()
        connection.request(method, path, None if body is None else wire.encode(body), {**KNOWN, wire.INCARNATION: incarnation})
        answer = connection.getresponse()
        said = answer.read()
        connection.close()
        return answer.status, said


@pytest.fixture(scope="module", params=["http", "https"])
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    settings = dict(zip(("ssl_certfile", "ssl_keyfile"), map(str, certificate_in(folder)))) if request.param == "https" else {}
    server = ServerProcess(folder, **settings)
    yield server
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0, server.log.read_text()


def test_server_with_many_idle_connections_still_answers(server):
    idle = []
    for number in range(3 * OPEN_FILES):
        idle.append(server.connect())
        if number % 2:
            idle[-1].sendall(b"GET /state HTTP/1.1\r\nHost: ")
        if number % OPEN_FILES == OPEN_FILES - 1:
            assert server.ask("GET", "/state", incarnation="")[0] in (200, 409)
    assert server.ask("POST", "/claim", wire.ClaimRequest(run="mine", incarnation="1"))[0] == 200
    assert len(os.listdir(f"/proc/{server.process.pid}/fd")) < 2 * listener.MAX_UNAUTHENTICATED + 50
    assert server.log.stat().st_size < 5000, server.log.read_text()[:5000]
    for one in idle:
        one.close()


def test_server_closes_slow_unauthenticated_connections_only(server):
    owner, slow = server.owner(), server.connect()
    owner.request("GET", "/state", headers=KNOWN)
    assert owner.getresponse().read()
    began = time.monotonic()
    with pytest.raises(OSError):  # a byte at a time is no way to stay
        while time.monotonic() < began + 15:
            slow.sendall(b"\x16" if server.trust else b"G")
            time.sleep(0.05)
    assert time.monotonic() - began < SECONDS + 5
    connection = owner.sock
    owner.request("GET", "/state", headers=KNOWN)
    assert owner.getresponse().status == 200 and owner.sock is connection


def test_server_without_token_gives_one_answer_and_limits_headers(server):
    stranger = server.owner()
    stranger.connect()
    stranger = stranger.sock
    stranger.sendall(b"POST /weights HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
    said = b"".join(iter(lambda: stranger.recv(4096), b""))
    assert said.startswith(b"HTTP/1.1 401") and b"onnection: close" in said
    endless = server.owner()
    endless.connect()
    with pytest.raises(OSError):
        for _ in range(1000):
            endless.sock.sendall(b"X-Y: " + b"z" * 10_000 + b"\r\n")


def test_server_join_request_with_invalid_timeout_is_rejected(server):
    assert server.ask("POST", "/claim", wire.ClaimRequest(run="mine", incarnation="1"))[0] == 200
    join = {"address": "127.0.0.1", "port": 1, "first_rank": 1, "world": 2, "name": "a link"}
    for wrong in ({"seconds": 1e12}, {"seconds": -1.0}, {"seconds": 1.0, "world": 10**12}, {"seconds": 1.0, "first_rank": 5}):
        status, said = server.ask("POST", "/join", wire.JoinRequest(**{**join, **wrong}))
        assert status == 400 and b"Join.seconds" in said
    assert server.ask("POST", "/claim", wire.ClaimRequest(run="mine", incarnation="2"))[0] == 200
    assert server.ask("POST", "/join", wire.JoinRequest(**join, seconds=0.01), incarnation="2")[0] == 200
