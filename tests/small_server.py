"""A rollout server without an engine: real HTTP, and answers and failures that the test defines."""

from __future__ import annotations

import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from megatron_grpo.plugins.servers import wire
from megatron_grpo.plugins.servers.addresses import Address

TOKEN = "the token of these tests"
STATE = wire.ServerState(
    boot="first", version=None, has_base=False, owner=None, running=0, model="m", dtype="float32", world_size=1, max_model_len=64,
    max_num_seqs=8, adapter_rank=0,
)  # fmt: skip

Lines = Callable[["SmallServer", Any], Iterator[bytes]]


def certificate_in(folder: Path) -> tuple[Path, Path]:
    """Write (certificate, key) for two names of this machine. Skips the test if openssl cannot."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2", "-subj",
                           "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"], capture_output=True)  # fmt: skip
    if made.returncode:
        pytest.skip("openssl makes no certificate here")
    return cert, key


class BrokenConnectionError(Exception):
    """The connection ends here."""


def answer(request: wire.Request, version: int, **changes) -> wire.GenerateLine:
    """Return tokens that encode the prompt, the seed and the completion index."""
    drawn = [
        wire.SampledCompletion(
            tokens=np.array([int(request.key), request.seed % 1000, place], np.int32), logprobs=np.full(3, -1.0, np.float32),
            text=request.key, reason="stop", versions=((version, 0, 3),),
        )
        for place in range(request.n)
    ]  # fmt: skip
    return wire.GenerateLine(key=request.key, completions=tuple(replace(one, **changes) for one in drawn))


def all_at_once(server: SmallServer, body: wire.GenerateRequest) -> Iterator[bytes]:
    for request in body.requests:
        yield wire.encode_line(answer(request, body.version))


class SmallServer:
    """A server that listens until `close`.

    lines: function that yields the lines of /generate; it may raise Broken.
    """

    def __init__(self, lines: Lines = all_at_once, *, port: int = 0, certificate: tuple[Path, Path] | None = None, **state):
        self.state, self.lines, self.claim = replace(STATE, **state), lines, None
        self.asked: list[tuple[str, ...]] = []  # keys, by call
        self.claims = self.aborts = 0
        self.is_frozen = False
        self._http = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (_Handler,), {"owner": self}))
        self._http.daemon_threads = True
        self._is_https = certificate is not None
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self._http.server_address[1], self._is_https)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def took(self, version: int) -> None:
        """Set the state after a weight sync."""
        self.state = replace(self.state, version=version, has_base=True)


class _Handler(BaseHTTPRequestHandler):
    owner: SmallServer

    def log_message(self, *words) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, body: bytes | None) -> None:
        server = self.owner
        while server.is_frozen:
            time.sleep(0.01)
        with suppress(BrokenConnectionError, ConnectionError):
            if self.headers.get(wire.AUTHORIZATION) != f"Bearer {TOKEN}":
                return self._send(401, wire.encode_error("the token is missing or wrong"))
            if server.state.is_frozen and self.path != "/state":
                return self._stream(wire.decode(wire.PromptLogprobsRequest, body))
            mine = None if server.state.is_frozen else self.headers.get(wire.INCARNATION)
            is_owner = server.claim is not None and server.claim.incarnation == mine
            if self.path == "/claim":
                claim = wire.decode(wire.ClaimRequest, body)
                if server.claim is not None and server.claim.run != claim.run:
                    return self._send(409, wire.encode_error(f"run {server.claim.run!r} owns this server"))
                server.claim, server.claims = claim, server.claims + 1
                server.state = replace(server.state, owner=claim.run)
            elif (mine is not None or self.path != "/state") and not is_owner:
                return self._send(409, wire.encode_error("this server belongs to somebody else; claim it first"))
            server.aborts += self.path == "/abort"
            if self.path == "/generate":
                return self._generate(wire.decode(wire.GenerateRequest, body))
            self._send(200, wire.encode(server.state))

    def _generate(self, body: wire.GenerateRequest) -> None:
        server = self.owner
        server.asked.append(tuple(request.key for request in body.requests))
        if body.version != server.state.version:
            return self._send(
                409, wire.encode_error(f"this server has version {server.state.version}, but version {body.version} was requested")
            )
        self._stream(body)

    def _stream(self, body) -> None:
        self.send_response(200)
        self.end_headers()
        for line in self.owner.lines(self.owner, body):
            self.wfile.write(line)
            self.wfile.flush()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
