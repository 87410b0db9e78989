"""The socket of a rollout server. Who has not shown the token has little time and little room, and cannot keep its owner out."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

STRANGERS = 128  # connections that have not shown the token; as many again may come before the first of them is closed
SECONDS = 10.0  # that one of them has to say what it wants, its TLS handshake included
SILENCE = 60.0  # seconds between two words of asyncio on the same trouble

Place = tuple[str, int]  # of the other end


class Listener(socket.socket):
    """Accepts for asyncio. Too many strangers: the oldest goes, of the host that has most of them."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.strangers: dict[Place, socket.socket] = {}

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        place = address[:2]
        self.strangers = {known: one for known, one in self.strangers.items() if one.fileno() >= 0} | {place: connection}
        asyncio.get_running_loop().call_later(SECONDS, self._send_away, place, connection)
        if len(self.strangers) > STRANGERS:
            crowded = Counter(host for host, _ in self.strangers).most_common(1)[0][0]
            oldest = next(known for known in self.strangers if known[0] == crowded)
            self._send_away(oldest, self.strangers[oldest])
        return connection, address

    def has_shown_the_token(self, place: Place) -> None:
        """It may stay."""
        self.strangers.pop(place, None)

    def _send_away(self, place: Place, connection: socket.socket) -> None:
        if self.strangers.get(place) is connection:
            del self.strangers[place]
            with suppress(OSError):  # it has gone by itself
                connection.shutdown(socket.SHUT_RDWR)


def now_and_then() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """A handler of asyncio's errors: of accepting alone it has thousands a second where there is no descriptor left."""
    said: dict[str, float] = {}

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        what, now = str(context.get("message")), time.monotonic()
        if now - said.get(what, -SILENCE) >= SILENCE:
            said[what] = now
            loop.default_exception_handler(context)

    return handle
