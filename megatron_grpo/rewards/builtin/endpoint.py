"""Owns asking HTTP endpoints that judge: many requests at one time, retries, one deadline for the whole batch. Standard library only."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from megatron_grpo.rewards.protocol import RowFailure

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 8.0  # seconds between attempts: doubled each time
_WORTH_A_RETRY = (408, 425, 429, 500, 502, 503, 504)
_SHOWN = 200  # characters of a refusal that are repeated

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Unanswered(Exception):
    """No usable answer came; the message ends the sentence "reward `name` ..."."""


def ask_all(ask: Callable[[Item, float], Answer], items: Sequence[Item], *, concurrency: int, seconds: float) -> list[Answer | RowFailure]:
    """`ask(item, deadline)` for all items in threads, in their order; a RowFailure where it raised Unanswered."""
    deadline = time.monotonic() + seconds

    def one(item: Item) -> Answer | RowFailure:
        try:
            return ask(item, deadline)
        except Unanswered as error:
            return RowFailure(kind="endpoint", reason=str(error))

    with ThreadPoolExecutor(max(1, min(concurrency, len(items))), thread_name_prefix="reward-endpoint") as pool:
        return list(pool.map(one, items))


def post_json(url: str, payload: Any, deadline: float, *, headers: Mapping[str, str] | None = None) -> Any:
    """What `url` answers to a POST of JSON. Tries again after lost connections and overload, until the deadline (`time.monotonic`).

    Raises Unanswered with the last reason.
    """
    body = json.dumps(payload).encode()
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json", **(headers or {})})
    # A proxy of the environment cannot reach this machine's loopback, whatever it is set for.
    local = urllib.parse.urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))
    pause, reason = _FIRST_PAUSE, "was not asked"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with opener.open(request, timeout=left) as response:
                content = response.read()
            return json.loads(content)
        except urllib.error.HTTPError as error:
            said = error.read(_SHOWN).decode(errors="replace").strip()
            reason = f"answered {error.code} {error.reason}{': ' + said if said else ''}"
            if error.code not in _WORTH_A_RETRY:
                break
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            reason = f"could not be reached ({getattr(error, 'reason', None) or error})"
        except ValueError:
            reason = f"answered something that is not JSON: {content[:_SHOWN].decode(errors='replace')}"
            break
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, _LONGEST_PAUSE)
    raise Unanswered(f"got no score: {url} {reason}")
