"""What a rollout server knows besides its engine: who owns it, of which version its weights are, what it was sent, and its counts."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from megatron_grpo.servers import wire
from megatron_grpo.servers.wire import LEASE_SECONDS, Claim

if TYPE_CHECKING:
    from megatron_grpo.servers.serve_app import App

MOST_BYTES = 1 << 30  # of pictures that stay
PREFIX = "megatron_grpo_server_"  # of our metrics


class RequestRefusedError(Exception):
    """The caller does not own the server, or means other weights than it has. A sentence (HTTP 409)."""


class Ownership:
    """Changes with claims, releases and pushes. Each of them begins a new tenure, a stretch of time in which the owner and the weights stay
    what they are, and nobody is answered from an older one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._owner: Claim | None = None
        self._heard = 0.0
        self.version: int | None = None  # of the weights; None: nobody has pushed any, or a push has not come to its end
        self.has_base = False  # this owner pushed weights that an adapter can be added to
        self.tenure = 0

    @property
    def owner(self) -> str | None:
        """The run that has the server; None where nobody has, or was not heard of for a lease."""
        return self._owner.run if self._owner is not None and not self._has_lapsed() else None

    def claim(self, claim: Claim) -> bool:
        """The caller has the server. Returns whether it is new here: then there are no weights of anybody's, and no requests.

        A run that was started again takes over at once from its earlier process. Raises Refused for another run while the owner is heard
        of, and for an earlier process of the same run: one that was frozen, and thaws.
        """
        owner = self._owner
        if owner is not None and claim != owner:
            if claim.run != owner.run and not self._has_lapsed():
                silent = self._clock() - self._heard
                raise RequestRefusedError(
                    f"run {owner.run!r} owns this server (heard of {silent:.0f} s ago; the server is free {LEASE_SECONDS:.0f} s after)"
                )
            if claim.run == owner.run and claim.incarnation < owner.incarnation:
                raise RequestRefusedError(f"a later process of run {owner.run!r} owns this server")
        self._heard = self._clock()
        if claim == owner:
            return False
        self._owner = claim
        self._forget()
        return True

    def release(self, incarnation: str | None) -> None:
        self.require(incarnation)
        self._owner = None
        self._forget()

    def require(self, incarnation: str | None) -> None:
        """Renews the lease, also one that has lapsed and that nobody took. Raises Refused where the caller does not own the server."""
        if self._owner is None or incarnation != self._owner.incarnation:
            whose = f"run {self._owner.run!r}" if self._owner else "nobody"
            raise RequestRefusedError(f"this server belongs to {whose}; claim it first")
        self._heard = self._clock()

    def require_version(self, version: int) -> None:
        if self.version is None:
            raise RequestRefusedError(f"this server holds no weights of a version, and version {version} was asked for; push them first")
        if version != self.version:
            raise RequestRefusedError(f"this server holds version {self.version}, and version {version} was asked for")

    def heard(self, tenure: int) -> None:
        """The owner is still reading what it asked for in this tenure."""
        if tenure == self.tenure:
            self._heard = self._clock()

    def begin_push(self, *, keeps_base: bool) -> int:
        """From the first byte of a push there is no version."""
        has_base = self.has_base and keeps_base
        self._forget()
        self.has_base = has_base
        return self.tenure

    def end_push(self, tenure: int, version: int | None, *, is_base: bool) -> int:
        """All of it has come. version None: an adapter is still to come. Raises Refused where somebody has claimed the server since."""
        if tenure != self.tenure:
            raise RequestRefusedError("the server was claimed anew while the push ran, and holds no version")
        self.version, self.has_base = version, is_base
        return self.tenure

    def _has_lapsed(self) -> bool:
        return self._clock() - self._heard >= LEASE_SECONDS

    def _forget(self) -> None:
        self.version, self.has_base, self.tenure = None, False, self.tenure + 1


class SentPictures:
    """Those that were asked for last stay. Whoever asks with one that has gone hears which, and sends it again."""

    def __init__(self, most_bytes: int = MOST_BYTES):
        self.most_bytes = most_bytes
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0

    def take(self, sent: Iterable[wire.SentPicture]) -> dict[str, bytes]:
        """Keeps them; also those that are too many to keep are there for the request that they came with: what is returned."""
        came = {one.key: one.data for one in sent}
        for key, data in came.items():
            self._num_bytes += len(data) - len(self._held.pop(key, b""))
            self._held[key] = data
        while self._num_bytes > self.most_bytes:
            self._num_bytes -= len(self._held.popitem(last=False)[1])
        return came

    def find(self, keys: Iterable[str], came: dict[str, bytes]) -> dict[str, bytes]:
        """Those of these keys that are there. came: with the request itself."""
        found = {}
        for key in keys:
            if key in self._held:
                self._held.move_to_end(key)
            data = came.get(key, self._held.get(key))
            if data is not None:
                found[key] = data
        return found


class ServerMetrics:
    """What it counts about itself, as Prometheus reads it: on prometheus_client's own registry, where vLLM's numbers are."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge

        self.pushes = Counter(PREFIX + "pushes", "Pushes of weights and adapters.", ["kind", "outcome"])
        self.push_seconds = Gauge(PREFIX + "last_push_seconds", "From the call of the last push that came whole to its answer.")
        self.refusals = Counter(PREFIX + "refusals", "Answers that were not 200.", ["status"])
        self.answered = Counter(PREFIX + "answered", "Requests for completions, by how they ended.", ["outcome"])
        self._version = Gauge(PREFIX + "version", "Version of the weights; -1: none.")
        self._running = Gauge(PREFIX + "running_requests", "Requests for completions that are being answered.")

    def watch(self, app: App) -> None:
        """The gauges say what is so when they are read."""
        self._version.set_function(lambda: -1 if app.ownership.version is None else app.ownership.version)
        self._running.set_function(lambda: app.running)

    def text(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest()
