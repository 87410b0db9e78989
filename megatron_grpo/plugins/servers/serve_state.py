"""State of a rollout server besides its engine: its owner, the version of its weights, cached images and Prometheus metrics."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from megatron_grpo.plugins.servers import wire
from megatron_grpo.plugins.servers.wire import LEASE_SECONDS, ClaimRequest

if TYPE_CHECKING:
    from megatron_grpo.plugins.servers.serve_app import App

MOST_BYTES = 1 << 30  # capacity of the image cache
PREFIX = "megatron_grpo_server_"  # of metric names


class RequestRefusedError(Exception):
    """Error raised if the caller does not own the server, or expects other weights (HTTP 409). The message is a sentence."""


class Ownership:
    """Owner of a server and version of its weights.

    Every claim, release and weight sync begins a new weight epoch: a period with one owner and one version of the weights. Requests of an
    earlier one are not answered.

    Args:
        clock: Returns the time in seconds.

    Attributes:
        version: Version of the weights; None: no weight sync has completed in this weight epoch.
        has_base: Whether this owner has synced weights that an adapter can be added to.
        weight_epoch: Number of the weight epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._owner: ClaimRequest | None = None
        self._renewed_at = 0.0
        self.version: int | None = None
        self.has_base = False
        self.weight_epoch = 0

    @property
    def owner(self) -> str | None:
        """Name of the run that owns the server; None if no run does, or its lease has expired."""
        return self._owner.run if self._owner is not None and not self._has_lapsed() else None

    def claim(self, claim: ClaimRequest) -> bool:
        """Give the server to the caller.

        A restarted run takes over from its earlier process at once.

        Returns:
            Whether the owner is a new process; then the server has no version and no base weights.

        Raises:
            RequestRefusedError: Another run owns the server and its lease has not expired, or the caller is an earlier process of the
                same run, such as one that was suspended and resumed.
        """
        owner = self._owner
        if owner is not None and claim != owner:
            if claim.run != owner.run and not self._has_lapsed():
                silent = self._clock() - self._renewed_at
                raise RequestRefusedError(
                    f"run {owner.run!r} owns this server (last request {silent:.0f} s ago; it is released {LEASE_SECONDS:.0f} s after that)"
                )
            if claim.run == owner.run and claim.incarnation < owner.incarnation:
                raise RequestRefusedError(f"a later process of run {owner.run!r} owns this server")
        self._renewed_at = self._clock()
        if claim == owner:
            return False
        self._owner = claim
        self._forget()
        return True

    def release(self, incarnation: str | None) -> None:
        """End the ownership of the caller.

        Args:
            incarnation: Incarnation of the caller; None: it sent none.

        Raises:
            RequestRefusedError: The caller does not own the server.
        """
        self.require(incarnation)
        self._owner = None
        self._forget()

    def require(self, incarnation: str | None) -> None:
        """Check that the caller owns the server, and renew its lease, even an expired one if no other run has claimed the server.

        Args:
            incarnation: Incarnation of the caller; None: it sent none.

        Raises:
            RequestRefusedError: The caller does not own the server.
        """
        if self._owner is None or incarnation != self._owner.incarnation:
            owner = f"belongs to run {self._owner.run!r}" if self._owner else "has no owner"
            raise RequestRefusedError(f"this server {owner}; claim it first")
        self._renewed_at = self._clock()

    def require_version(self, version: int) -> None:
        """Check the version of the weights.

        Raises:
            RequestRefusedError: The server has weights of another version or of none.
        """
        if self.version is None:
            raise RequestRefusedError(f"this server has no weights, but version {version} was requested; update the weights first")
        if version != self.version:
            raise RequestRefusedError(f"this server has version {self.version}, but version {version} was requested")

    def renew(self, weight_epoch: int) -> None:
        """Renew the lease, because the owner is reading a response stream.

        Args:
            weight_epoch: Weight epoch in which the response was requested; an earlier one than the current one is ignored.
        """
        if weight_epoch == self.weight_epoch:
            self._renewed_at = self._clock()

    def begin_update(self, *, keeps_base: bool) -> int:
        """Begin a new weight epoch without a version, since weights change from the first byte of a weight sync.

        Args:
            keeps_base: Whether the base weights remain, as in the weight sync of an adapter.

        Returns:
            The number of the weight epoch, for `end_update`.
        """
        has_base = self.has_base and keeps_base
        self._forget()
        self.has_base = has_base
        return self.weight_epoch

    def end_update(self, weight_epoch: int, version: int | None, *, is_base: bool) -> None:
        """Record that a weight sync is complete.

        Args:
            weight_epoch: Result of `begin_update`.
            version: Version of the weights; None: base weights whose adapter follows.
            is_base: Whether an adapter can be added to the weights.

        Raises:
            RequestRefusedError: The server was claimed or released during the weight sync.
        """
        if weight_epoch != self.weight_epoch:
            raise RequestRefusedError("the server was claimed again during the weight update, and has no weights")
        self.version, self.has_base = version, is_base

    def _has_lapsed(self) -> bool:
        return self._clock() - self._renewed_at >= LEASE_SECONDS

    def _forget(self) -> None:
        self.version, self.has_base, self.weight_epoch = None, False, self.weight_epoch + 1


class ImageCache:
    """LRU cache of images. If a request refers to an evicted image, the answer names its key, and the client sends it again.

    Args:
        most_bytes: Capacity in bytes.
    """

    def __init__(self, most_bytes: int = MOST_BYTES):
        self.most_bytes = most_bytes
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0

    def take(self, image_data: Iterable[wire.ImageData]) -> dict[str, bytes]:
        """Add images to the cache.

        Returns:
            All these images by key, for the request itself: some may exceed the capacity and be evicted at once.
        """
        new_images = {image.key: image.data for image in image_data}
        for key, data in new_images.items():
            self._num_bytes += len(data) - len(self._held.pop(key, b""))
            self._held[key] = data
        while self._num_bytes > self.most_bytes:
            self._num_bytes -= len(self._held.popitem(last=False)[1])
        return new_images

    def find(self, keys: Iterable[str], new_images: dict[str, bytes]) -> dict[str, bytes]:
        """Look up images.

        Returns:
            The available images by key.
        """
        result = {}
        for key in keys:
            if key in self._held:
                self._held.move_to_end(key)
            data = new_images.get(key, self._held.get(key))
            if data is not None:
                result[key] = data
        return result


class ServerMetrics:
    """Prometheus metrics of the server, in prometheus_client's default registry, which also holds vLLM's metrics."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge

        self.weight_updates = Counter(PREFIX + "weight_updates", "Weight and adapter updates, by kind and outcome.", ["kind", "outcome"])
        self.weight_update_seconds = Gauge(PREFIX + "last_weight_update_seconds", "Duration of the last successful update in seconds.")
        self.refusals = Counter(PREFIX + "refusals", "Responses other than 200, by status.", ["status"])
        self.answered = Counter(PREFIX + "answered", "Completed requests, by outcome.", ["outcome"])
        self._version = Gauge(PREFIX + "version", "Version of the weights; -1: none.")
        self._running = Gauge(PREFIX + "running_requests", "Requests in progress.")

    def watch(self, app: App) -> None:
        """Let the gauges read their values from `app` at every scrape."""
        self._version.set_function(lambda: -1 if app.ownership.version is None else app.ownership.version)
        self._running.set_function(lambda: app.running)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest()
