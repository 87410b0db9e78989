"""Malicious endpoints of a judge: hostile responses, and files and messages that must not contain the key."""

from __future__ import annotations

import json
import logging
import pickle
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from megatron_grpo.core.base.errors import ConfigError, RewardError
from megatron_grpo.run.checkpoint.fingerprints import list_settings
from megatron_grpo.run.config.parse import parse
from megatron_grpo.run.config.rules.settings import validate
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.write import as_yaml
from megatron_grpo.run.rewards.scoring import score
from tests.unit.rewards.servers import serve_json
from tests.unit.rewards.test_endpoint_rewards import load, load_judge, make_batch, make_chat_response

KEY = "sesame-0123456789-open"


@contextmanager
def serve_raw(answer):
    """Gives each connection, once its request has come, to `answer(connection)`; yields the server's URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def one(connection):
        with connection:
            try:
                connection.recv(1 << 16)
                answer(connection, stop)
            except OSError:
                pass

    def serve():
        while not stop.is_set():
            try:
                threading.Thread(target=one, args=(listener.accept()[0],), daemon=True).start()
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stop.set()
        listener.close()


def find_error(url, **settings):
    with pytest.raises(RewardError) as caught:
        score([load_judge(url, **settings)], make_batch(["c"]))
    return str(caught.value)


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_judge_redirect_is_not_followed(status):
    asked = []

    def elsewhere(connection, stop):
        asked.append(connection.getpeername())

    with serve_raw(elsewhere) as other:

        def answer(connection, stop):
            head = f"HTTP/1.1 {status} Moved\r\nLocation: {other}/v1?stolen={KEY}\r\nContent-Length: 0\r\n\r\n"
            connection.sendall(head.encode())

        with serve_raw(answer) as url:
            told = find_error(url)
    assert asked == [] and "Redirects are not followed" in told and other in told and KEY not in told


@pytest.mark.parametrize(
    "reply",
    [(401, f"no such key: {KEY}"), (200, f"<html>{KEY}"), (200, {"echo": f"Bearer {KEY}"}), (429, KEY),
     make_chat_response(f"Your key is {KEY}"), (500, f"{{'Authorization': 'Bearer {KEY}'}}")],
)  # fmt: skip
def test_judge_error_does_not_repeat_a_key_echoed_by_server(reply, caplog):
    with serve_json(lambda path, request, headers: reply) as url:
        assert KEY not in find_error(url, reward_timeout=0.3)
        score([load_judge(url, reward_timeout=0.3, reward_on_error="none")], make_batch(["c"]))
    assert KEY not in caplog.text


def test_judge_repr_omits_the_key_and_pickle_raises():
    judge = load_judge("http://127.0.0.1:9").function
    assert KEY not in repr(vars(judge)) + str(vars(judge))
    with pytest.raises(TypeError, match="a key cannot be serialized"):
        pickle.dumps(judge)


def make_endless_answer(head, part, pause=0.0):
    def answer(connection, stop):
        connection.sendall(head)
        while not stop.wait(pause):
            connection.sendall(part)

    return answer


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(make_endless_answer(OK + b"\r\n", b"x" * 65536), "returned more than 4 MiB"),
     (make_endless_answer(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b"x" * 65536 + b"\r\n"), "returned more than 4 MiB"),
     (make_endless_answer(OK + b"Content-Length: 999999999999\r\n\r\n", b"x" * 65536), "returned more than 4 MiB"),
     (make_endless_answer(OK + b"\r\n", b"x", 0.05), "timed out"), (make_endless_answer(b"HTTP/1.1 200 ", b"x", 0.05), "timed out"),
     (make_endless_answer(OK, b"X-A: b\r\n", 0.05), "timed out"),
     (make_endless_answer(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.02), "timed out"),
     (make_endless_answer(OK, b"X: " + b"y" * 65536), "cannot be reached")],
)  # fmt: skip
def test_judge_response_is_limited_in_bytes_and_time(answer, reason):
    started = time.monotonic()
    with serve_raw(answer) as url:
        assert reason in find_error(url, reward_timeout=0.5)
    assert time.monotonic() - started < 10  # each wait on the socket is short: without a deadline of the whole this is for ever


@pytest.mark.parametrize(
    "content",
    ["[" * 500_000, '{"choices": [{"message": {"content": ["a", 1]}}]}', '{"choices": [{"message": {"content": {"a": 1}}}]}',
     '{"choices": 7}', "7" * 10_000, '"text"', json.dumps({"choices": [{"message": {"content": "Score: high"}}]})],
)  # fmt: skip
def test_judge_response_of_wrong_form_fails_only_its_row(content):
    with serve_json(lambda path, request, headers: (200, content)) as url:
        told = find_error(url)
        assert "on row 0, completion 'c'" in told and "raised" not in told
        assert score([load_judge(url, reward_on_error="none")], make_batch(["c"])).rows == ((None,),)


def test_judge_score_above_float_range_is_clamped():
    with serve_json(lambda path, request, headers: make_chat_response("Score: " + "9" * 400)) as url:
        assert load_judge(url).function(prompts=["p"], completions=["c"]) == [1.0]


@pytest.mark.parametrize(
    ("url", "warns"),
    [("http://judge.example:8000", True), ("http://10.0.0.5:8000", True), ("https://judge.example", False),
     ("http://127.0.0.1:8000", False),
     ("http://localhost:8000", False), ("http://[::1]:8000", False), ("http://localhost.example", True)],
)  # fmt: skip
def test_judge_over_http_to_another_machine_gives_a_warning(url, warns, caplog):
    with caplog.at_level(logging.WARNING):
        load_judge(url)
        load("reward_model", reward_model_url=f"{url}/score")
    assert ("the key, prompts and completions are sent to" in caplog.text) == warns
    assert ("reward_model_url is http://: prompts and completions" in caplog.text) == warns
    assert KEY not in caplog.text


def test_judge_key_line_end_is_stripped_and_two_lines_are_rejected(monkeypatch):
    seen = []

    def answer(path, request, headers):
        seen.append(headers["Authorization"])
        return make_chat_response("Score: 10")

    with serve_json(answer) as url:
        monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n")
        assert load_judge(url).function(prompts=["p"], completions=["c"]) == [1.0]
        monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\r\nX-Injected: 1")
        with pytest.raises(ConfigError, match="OPENAI_API_KEY has no valid key") as caught:
            load_judge(url)
    assert seen == [f"Bearer {KEY}"] and KEY not in str(caught.value)


SECRETS = {
    "llm_judge_url": "https://me:open-sesame@judge.example/v1",
    "reward_model_url": "https://judge.example/score?api_key=open-sesame",
    "llm_judge_api_key_env": "sk-open-sesame-0123456789",
    "system": "You are kind. Bearer open-sesame-0123456789",
    "dataset": "s3://id:open-sesame@bucket/data.jsonl",
    "model": "hf_opensesame0123456789opensesame",
    "stop": ["fine", "ghp_opensesame0123456789opensesame"],
}


@pytest.mark.parametrize("name", SECRETS)
def test_secret_as_setting_is_rejected_without_repeating_it(name, tmp_path):
    words = SECRETS[name] if isinstance(SECRETS[name], list) else [SECRETS[name]]
    (tmp_path / "run.yaml").write_text(json.dumps({name: SECRETS[name]}))
    for typed in ([f"--{name}", *words], ["--config", str(tmp_path / "run.yaml")]):
        [problem] = [one for one in validate(parse(typed).config) if name in one.flags]
        assert f"{name} seems to hold" in problem.message and "sesame" not in problem.message


@pytest.mark.parametrize(
    "typed",
    [["--llm_judge_url", "http://127.0.0.1:8000/v1"], ["--reward_model_url", "https://h/score?max_tokens=3&model=a"],
     ["--model", "org/sk-7b"],
     ["--llm_judge_api_key_env", "MY_JUDGE_KEY"], ["--system", "Reach me at me@example.com, or see https://example.com/a@b."],
     ["--dataset", "owner/task-sk-hf_data"]],
)  # fmt: skip
def test_ordinary_settings_are_not_rejected_as_secrets(typed):
    assert [one for one in validate(parse(typed).config) if "seems to hold" in one.message] == []


def test_judge_key_is_not_written_to_files_or_trackers():
    cfg = parse(["--llm_judge_url", "http://127.0.0.1:9/v1", "--llm_judge_api_key_env", "OPENAI_API_KEY"]).config
    assert isinstance(cfg, Config)
    # config.yaml; a checkpoint's manifest; what Metrics gives to a service is the same values.
    assert KEY not in as_yaml(cfg) + json.dumps(list_settings(cfg))
