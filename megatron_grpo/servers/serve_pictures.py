"""The pictures that a run has sent to a rollout server, by key, up to so many bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from megatron_grpo.servers import wire

MOST_BYTES = 1 << 30


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
