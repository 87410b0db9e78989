"""Messages that contain text of a server, a judge, a user's function or an object: length, control characters and secrets."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from megatron_grpo.core.base.errors import RewardError, first_line, keep_secret, one_line
from megatron_grpo.plugins.rewards.endpoint import ApiKey, NoResponseError, post_json
from megatron_grpo.plugins.servers import wire
from megatron_grpo.plugins.servers.addresses import Address
from megatron_grpo.plugins.servers.http import Server, ServerGoneError, ServerRefusedError, start_coroutine
from megatron_grpo.run.rewards.protocol import RewardBatch, RewardFunction
from megatron_grpo.run.rewards.scoring import score

TOKEN = "a-token-that-nobody-may-read"
NASTY = "\x1b[2J\x1b]0;title\x07\x00\u202eback\x9b1m\ud800\n\r\tend"


def is_fit(text, most):
    return all(one.isprintable() for one in text) and TOKEN not in text and len(text) <= most


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no words")

    __repr__ = __str__


def test_one_line_removes_control_characters_and_secrets_and_limits_length(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sesame-opens-this")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    keep_secret(TOKEN)
    assert one_line(ValueError(NASTY)) == r"\x1b[2J\x1b]0;title\x07\x00\u202eback\x9b1m\ud800   end"
    assert one_line(f"{TOKEN}, sesame-opens-this, false") == "(a secret), (a secret), false"
    assert is_fit(one_line(NASTY * 10**6), 5 * 500) and len(one_line("x" * 10**8)) == 503
    # One that stands across the end is not cut into a piece that could be read.
    assert all("a-token" not in one_line("x" * (500 - n) + TOKEN, max_characters=500) for n in range(len(TOKEN)))
    assert one_line(UnprintableError()) == one_line(UnprintableError(), repr) == "" and one_line("one\ntwo", first_line) == "one"


@contextmanager
def serve_response(raw):
    """Listens, and says just this to the next request; `{token}` in it is what came as Authorization."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            with listener.accept()[0] as connection, connection.makefile("rb") as stream:
                headers = dict(line.decode().strip().split(": ", 1) for line in iter(stream.readline, b"\r\n") if b": " in line)
                stream.read(int(headers.get("Content-Length", 0)))
                try:
                    connection.sendall(raw.replace(b"{token}", headers["Authorization"].encode()))
                except OSError:
                    pass  # who asked has heard enough

        thread = threading.Thread(target=answer)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


ESCAPES = NASTY.replace("\ud800", "").encode()
ECHO = b"you came with {token} " + ESCAPES + b"z" * (1 << 20)


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"HTTP/1.1 401 No\r\n\r\n" + ECHO, ServerRefusedError),
        (b'HTTP/1.1 500 No\r\n\r\n{"error": "{token} \\u001b[2J' + b"z" * 9999 + b'"}', ServerRefusedError),
        (b"HTTP/1.1 401 No\r\n\r\n" + b"[" * 10**6, ServerRefusedError), (ECHO[:5000], ServerGoneError),
        (b'HTTP/1.1 200 OK\r\n\r\n{"{token} \\u001b[2J' + b"z" * 9999 + b'": 1}', wire.MalformedMessageError),
    ],
)  # fmt: skip
def test_server_error_message_has_no_token_no_escapes_and_limited_length(raw, kind):
    with serve_response(raw) as port, pytest.raises(kind) as caught:
        start_coroutine(Server(Address("127.0.0.1", port), token=TOKEN, incarnation="1").state()).result(60)
    assert is_fit(str(caught.value), wire.LONGEST_REFUSAL + 100) and str(caught.value)


def test_judge_error_message_contains_no_part_of_the_key():
    for length in (150, 160, 170, 180, 190, 200):
        raw = b"HTTP/1.1 401 " + ESCAPES.replace(b"\n", b"").replace(b"\r", b"") + b"\r\n\r\n" + b"z" * length + b"{token}" + b"z" * 9999
        with serve_response(raw) as port, pytest.raises(NoResponseError) as caught:
            post_json(f"http://127.0.0.1:{port}", {}, deadline=time.monotonic() + 20, key=ApiKey(TOKEN))
        assert is_fit(str(caught.value), 1000) and "401" in str(caught.value) and TOKEN[:7] not in str(caught.value)


def test_completion_error_message_is_one_line():
    line = b'{"key": "1", "error": "' + TOKEN.encode() + b"\\u001b[2J" + b"z" * 9999 + b'"}\n'
    keep_secret(TOKEN)
    assert is_fit(wire.decode_line(wire.GenerateLine, line).error, wire.LONGEST_REFUSAL + 100)


def loud(completions):
    raise ValueError(f"{TOKEN} {NASTY}" * 10**6)


def mute(completions):
    raise UnprintableError


def leaves(completions):
    raise SystemExit(f"{TOKEN} {NASTY}" * 10**6)


def returns_a_book(completions):
    return [f"{NASTY}{TOKEN}" * 10**6 for _ in completions]


def returns_what_has_no_words(completions):
    return [UnprintableError() for _ in completions]


@pytest.mark.parametrize("function", [loud, mute, leaves, returns_a_book, returns_what_has_no_words])
def test_reward_error_names_the_function_for_any_exception_text(function):
    keep_secret(TOKEN)
    batch = RewardBatch(prompts=["p"], completions=["c"], completion_ids=[[1]], columns={}, labels=["row 0"])
    with pytest.raises(RewardError) as caught:
        score([RewardFunction(name=function.__name__, function=function, timeout=20.0)], batch)
    assert f"`{function.__name__}`" in str(caught.value) and "row 0" in str(caught.value)
    assert is_fit(str(caught.value), 5 * 500)


def test_http_client_error_contains_the_malformed_line():
    """The oracle of what is caught above: http.client puts the line itself into its exception."""
    with serve_response(b"\x1b[2J\r\n") as port:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.putrequest("GET", "/")
        connection.putheader("Authorization", "x")
        connection.endheaders()
        with pytest.raises(http.client.BadStatusLine, match="\x1b"):
            connection.getresponse()
        connection.close()
