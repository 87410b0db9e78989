"""Listening socket of an HTTP server that limits unauthenticated connections, and the exception handler of its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

MAX_UNAUTHENTICATED = 128  # limit for unauthenticated connections, and for the backlog of connections that are not accepted yet
SECONDS = 10.0  # timeout of an unauthenticated connection, including the TLS handshake
SILENCE = 60.0  # seconds between two log lines about the same asyncio error

Place = tuple[str, int]  # (host, port) of a client


class Listener(socket.socket):
    """Listening socket that limits unauthenticated connections, so that they cannot block the owner.

    A connection that has not sent the token is closed after `SECONDS`. If there are more than `MAX_UNAUTHENTICATED` of them, the oldest
    one of the host with the most such connections is closed.

    Attributes:
        unauthenticated: (host, port) -> unauthenticated connection.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.unauthenticated: dict[Place, socket.socket] = {}

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        peer = address[:2]
        self.unauthenticated = {open_peer: stranger for open_peer, stranger in self.unauthenticated.items() if stranger.fileno() >= 0} | {
            peer: connection
        }
        asyncio.get_running_loop().call_later(SECONDS, self._send_away, peer, connection)
        if len(self.unauthenticated) > MAX_UNAUTHENTICATED:
            crowded = Counter(host for host, _ in self.unauthenticated).most_common(1)[0][0]
            oldest = next(stranger_peer for stranger_peer in self.unauthenticated if stranger_peer[0] == crowded)
            self._send_away(oldest, self.unauthenticated[oldest])
        return connection, address

    def has_shown_the_token(self, peer: Place) -> None:
        """Remove a connection from the unauthenticated ones."""
        self.unauthenticated.pop(peer, None)

    def _send_away(self, peer: Place, connection: socket.socket) -> None:
        if self.unauthenticated.get(peer) is connection:
            del self.unauthenticated[peer]
            with contextlib.suppress(OSError):  # the client has already closed it
                connection.shutdown(socket.SHUT_RDWR)


def rate_limited_handler() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Return an asyncio exception handler that logs the same error at most once in `SILENCE` seconds.

    Without file descriptors, accepting connections alone would log thousands of errors per second.
    """
    message: dict[str, float] = {}

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        text, time_now = str(context.get("message")), time.monotonic()
        if time_now - message.get(text, -SILENCE) >= SILENCE:
            message[text] = time_now
            loop.default_exception_handler(context)

    return handle
