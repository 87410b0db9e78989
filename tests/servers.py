"""Rollout servers for tests: real processes, a minimal HTTP client, and a sender of weights."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.plugins.servers import wire
from megatron_grpo.plugins.servers.weight_transfer import Rendezvous, WeightSender
from tests.ranks import ENVIRONMENT

TOKEN = "the-token-of-these-tests"
ASKS = {"MEGATRON_GRPO_TOKEN": TOKEN}  # the environment of a run that asks them
START = 240.0  # seconds; three processes import torch and vLLM, on a machine that does other things too


class ServerAnswerError(Exception):
    """An HTTP answer with another status than 200."""

    def __init__(self, status: int, sentence: str):
        super().__init__(f"{status}: {sentence}")
        self.status = status


class Server:
    """`megatron-grpo serve` in a session of its own, so that all its processes can be found."""

    def __init__(self, folder: Path, model: Path, *flags: str, env: Mapping[str, str] | None = None):
        folder.mkdir(exist_ok=True)
        self.log, self.address_file = folder / "log", folder / "address"
        env = {**os.environ, **ENVIRONMENT, **ASKS, "PYTHONPATH": str(Path(__file__).parent.parent), **(env or {})}
        command = [sys.executable, "-m", "megatron_grpo", "serve", "--model", str(model), "--port", "0", "--torch_dtype", "float32",
                   "--vllm_kv_cache_memory_mb", "32", "--vllm_max_num_seqs", "16",
                   "--address_file", str(self.address_file), *flags]  # fmt: skip
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=self.log.open("w"), stderr=subprocess.STDOUT,
                                        start_new_session=True)  # fmt: skip
        self.incarnation = "1"

    def wait(self) -> Server:
        until = time.monotonic() + START
        while not self.address_file.exists():
            assert self.process.poll() is None and time.monotonic() < until, self.log.read_text()[-4000:]
            time.sleep(0.05)  # between two looks
        self.host, _, port = self.address_file.read_text().strip().partition("://")[2].rpartition(":")
        self.port = int(port)
        return self

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, *, timeout: float = 60.0
    ):
        """Send a request; return connection and answer. The token is sent unless headers are given."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        if headers is None:
            headers = {wire.AUTHORIZATION: f"Bearer {TOKEN}", wire.INCARNATION: self.incarnation}
        connection.request(method, path, body, dict(headers))
        return connection, connection.getresponse()

    def call(self, path: str, body: Any = None, *, timeout: float = 60.0) -> bytes:
        """Return the whole answer. Raises ServerAnswerError."""
        connection, answer = self.request(
            "GET" if body is None else "POST", path, None if body is None else wire.encode(body), timeout=timeout
        )
        try:
            said = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise ServerAnswerError(answer.status, wire.decode_error(said))
        return said

    def state(self, path: str = "/state", body: Any = None, **options: Any) -> wire.ServerState:
        return wire.decode(wire.ServerState, self.call(path, body, **options))

    def claim(self, run: str = "a run", incarnation: str | None = None) -> wire.ServerState:
        self.incarnation = incarnation or self.incarnation
        return self.state("/claim", wire.ClaimRequest(run=run, incarnation=self.incarnation))

    def generate(self, body: wire.GenerateRequest) -> dict[str, wire.GenerateLine]:
        """Return answers by key; those that came before the stream ended."""
        connection, stream = self.request("POST", "/generate", wire.encode(body))
        try:
            if stream.status != 200:
                raise ServerAnswerError(stream.status, wire.decode_error(stream.read()))
            answers = [wire.decode_line(wire.GenerateLine, line) for line in iter(stream.readline, b"")]
        finally:
            connection.close()
        return {answer.key: answer for answer in answers if answer is not None}

    def processes(self) -> list[str]:
        """Return the living processes of its session."""
        found = subprocess.run(["ps", "-eo", "sid=,stat=,pid=,args="], capture_output=True, text=True, check=True).stdout.splitlines()
        rows = [line.split(None, 3) for line in found]
        return [" ".join(row) for row in rows if row[0] == str(self.process.pid) and not row[1].startswith("Z")]

    def worker_pid(self) -> int:
        """Return the process ID of the worker that answers requests: the oldest child of the started process."""
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0])

    def find_pid(self, name: str) -> int:
        return next(int(line.split()[2]) for line in self.processes() if name in line)

    def has_left_nothing(self, seconds: float = 30.0) -> bool:
        until = time.monotonic() + seconds
        while self.processes():
            if time.monotonic() > until:
                return False
            time.sleep(0.05)  # between two looks
        return True

    def close(self) -> None:
        if self.processes():
            os.killpg(self.process.pid, signal.SIGCONT)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Trainer:
    """Rank 0 of weight-transfer links to servers."""

    def __init__(self, seconds: float = 30.0):
        self.meeting, self.seconds, self._number = Rendezvous(), seconds, 0

    def link(self, *servers: Server) -> WeightSender:
        """Return a link to all workers of these servers, which the trainer claims."""
        self._number += 1
        name, first, joins = f"link {self._number}", 1, []
        sizes = [server.state().world_size for server in servers]
        for server, size in zip(servers, sizes, strict=True):
            join = wire.JoinRequest(
                address="127.0.0.1", port=self.meeting.port, first_rank=first, world=1 + sum(sizes), name=name, seconds=self.seconds
            )
            joins.append(BackgroundCall(lambda server=server, join=join: server.call("/join", join)))
            first += size
        link = WeightSender(self.meeting, name=name, world=1 + sum(sizes), local_host="127.0.0.1", seconds=self.seconds)
        for join in joins:
            join.answer()
        return link


class BackgroundCall:
    """A call in a thread: a server answers a sync only after its sender has done its part."""

    def __init__(self, call: Any):
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Any) -> None:
        try:
            self._result = call()
        except BaseException as error:  # noqa: BLE001 - it is raised where the answer is asked for
            self._error = error

    def answer(self, seconds: float = 60.0) -> Any:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "no answer"
        if self._error is not None:
            raise self._error
        return self._result


def push(link: WeightSender, named: Iterable[tuple[str, Any]], *servers: Server, path: str = "/weights", bucket_bytes: int = 20_000,
         **body: Any) -> list[wire.ServerState]:  # fmt: skip
    """Sync weights to all these servers once. Raises the error of the sender, else that of a server."""
    cls = wire.WeightUpdateRequest if path == "/weights" else wire.AdapterUpdateRequest
    asked = [BackgroundCall(lambda server=server: server.state(path, cls(link=link.name, **body))) for server in servers]
    link.send(iter(named), bucket_bytes)
    return [one.answer() for one in asked]
