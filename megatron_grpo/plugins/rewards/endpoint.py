"""HTTP requests to scoring endpoints: many concurrent requests, retries, one deadline per batch. Standard library only.

The endpoint is untrusted. The key is only sent to the configured host: redirects are not followed. A request cannot exceed its deadline,
and a response cannot exceed `_LONGEST` bytes including headers. The key never appears in a message, whatever the response repeats.
"""

from __future__ import annotations

import http.client
import io
import json
import logging
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from megatron_grpo.core.base.errors import keep_secret, one_line
from megatron_grpo.core.base.files import parse_json
from megatron_grpo.plugins.servers.addresses import is_loopback
from megatron_grpo.run.rewards.protocol import RowFailure

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0  # seconds between attempts, doubled each time
_WORTH_A_RETRY = (408, 425, 429, 500, 502, 503, 504)
_SHOWN, _READ = 200, 1 << 14  # characters of an error response that are shown, and bytes that are read
_LONGEST = 4 << 20  # bytes of a response

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class NoResponseError(Exception):
    """Error raised if no usable response arrived. The message ends the sentence "reward `name` ..."."""

    def __init__(self, reason: str):
        super().__init__(one_line(reason))


def ask_all(ask: Callable[[Item, float], Answer], items: Sequence[Item], *, concurrency: int, seconds: float) -> list[Answer | RowFailure]:
    """Call `ask(item, deadline)` for all items in threads.

    Args:
        ask: Sends one request. The deadline is on the clock of `time.monotonic`.
        concurrency: Number of threads.

    Returns:
        The responses in the order of `items`; a RowFailure for each call that raised NoResponseError.
    """
    deadline = time.monotonic() + seconds

    def ask_one(item: Item) -> Answer | RowFailure:
        try:
            return ask(item, deadline)
        except NoResponseError as error:
            return RowFailure(kind="endpoint", reason=str(error))

    with ThreadPoolExecutor(max(1, min(concurrency, len(items))), thread_name_prefix="reward-endpoint") as pool:
        return list(pool.map(ask_one, items))


class ApiKey:
    """API key of an endpoint. Its repr is a placeholder, so that tracebacks, loggers and dumps do not reveal it."""

    def __init__(self, secret: str):
        self._secret = secret
        keep_secret(secret)

    def __repr__(self) -> str:
        return "ApiKey(...)"

    def header(self) -> str:
        """Return the value of the Authorization header."""
        return f"Bearer {self._secret}"

    def __reduce__(self) -> Any:
        raise TypeError("a key cannot be serialized")


def post_json(url: str, payload: Any, deadline: float, *, key: ApiKey | None = None) -> Any:
    """Send JSON with POST and return the JSON response. Retries after lost connections and overload until the deadline.

    Args:
        deadline: Deadline on the clock of `time.monotonic`.
        key: API key, if any.

    Raises:
        NoResponseError: With the last reason.
    """
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=json.dumps(payload).encode(), headers=headers)
    if key:
        request.add_unredirected_header("Authorization", key.header())
    opener = _opener(url, deadline)
    pause, reason = _FIRST_PAUSE, "was not contacted"
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            with opener.open(request, timeout=remaining) as response:
                content = response.read(_LONGEST)  # without a limit it would allocate the size that the server announces
            return parse_json(content)
        except urllib.error.HTTPError as error:
            reason = _refusal(error)
            if error.code not in _WORTH_A_RETRY:
                break
        except AnswerTooLongError:
            reason = f"returned more than {_LONGEST >> 20} MiB"
            break
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            reason = f"cannot be reached ({getattr(error, 'reason', None) or error})"
        except ValueError:
            reason = f"returned a response that is not JSON: {one_line(content[:_READ].decode(errors='replace'), max_characters=_SHOWN)}"
            break
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, _LONGEST_PAUSE)
    raise NoResponseError(f"got no score: {url} {reason}")


def _refusal(error: urllib.error.HTTPError) -> str:
    if 300 <= error.code < 400:
        location = one_line(error.headers.get("Location", "nowhere"))
        return f"answered {error.code}: it redirects to {location}. Redirects are not followed; use the final address"
    try:
        text = one_line(error.read(_READ).decode(errors="replace"), max_characters=_SHOWN)
    except (OSError, http.client.HTTPException, AnswerTooLongError):
        text = ""
    return f"answered {error.code} {error.reason}{': ' + text if text else ''}"


class AnswerTooLongError(Exception):
    """Error raised if a response is larger than `_LONGEST` bytes."""


class _BoundedStream(io.RawIOBase):
    """Data from a socket, limited by a deadline and a number of bytes. A socket's timeout only limits each single read."""

    def __init__(self, connection: socket.socket, deadline: float):
        self.connection, self.deadline, self.left = connection, deadline, _LONGEST
        self.stream = connection.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("timed out")
        self.connection.settimeout(remaining)
        count = self.stream.readinto(buffer) or 0
        self.left -= count
        if self.left < 0:
            raise AnswerTooLongError
        return count

    def close(self) -> None:
        self.stream.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, connection: socket.socket, *args: Any, deadline: float, **options: Any):
        super().__init__(connection, *args, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_BoundedStream(connection, deadline))


def _connection(kind: type[http.client.HTTPConnection], deadline: float) -> Any:
    """Return a class of connections whose responses have a deadline."""
    return type(kind.__name__, (kind,), {"response_class": partial(_Response, deadline=deadline)})


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Redirect handler that follows none: the key and the completions are only for the host that the user named."""

    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


def _opener(url: str, deadline: float) -> urllib.request.OpenerDirector:
    class Http(urllib.request.HTTPHandler):
        def http_open(self, request: urllib.request.Request) -> Any:
            return self.do_open(_connection(http.client.HTTPConnection, deadline), request)

    class Https(urllib.request.HTTPSHandler):
        def https_open(self, request: urllib.request.Request) -> Any:
            return self.do_open(_connection(http.client.HTTPSConnection, deadline), request)

    # A proxy from the environment cannot reach this machine's loopback interface.
    proxies = [urllib.request.ProxyHandler({})] if is_local(url) else []
    return urllib.request.build_opener(Http, Https, _NoRedirect, *proxies)


def is_local(url: str) -> bool:
    """Return whether the host of a URL is this machine."""
    host = urllib.parse.urlsplit(url).hostname or ""
    return is_loopback(host) or host.endswith(".localhost")


def warn_of_plain(url: str, flag: str, *, has_key: bool) -> None:
    """Log a warning if prompts, completions or the key are sent unencrypted.

    Args:
        has_key: Whether requests contain a key.
    """
    if url.startswith("http://") and not is_local(url):
        content = "the key, prompts and completions" if has_key else "prompts and completions"
        host = urllib.parse.urlsplit(url).hostname
        _LOG.warning("%s is http://: %s are sent to %s unencrypted. Use https:// outside of a trusted network.", flag, content, host)


def url_fault(url: str) -> str | None:
    """Return what is wrong with the address of an endpoint, as the end of a sentence, or None. The sentence repeats no password."""
    try:
        parts = urllib.parse.urlsplit(url)
        port_is_right = parts.port is None or parts.port > 0
    except ValueError:
        return "is not a valid address"
    if parts.username is not None or parts.password is not None:
        return "contains a user name or a password, which would be written to config.yaml; put a key into an environment variable"
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_right:
        return f"must begin with http:// or https:// and contain a host; got {url!r}"
    return None
