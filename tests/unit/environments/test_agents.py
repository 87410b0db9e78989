"""Agents over HTTP with the real client libraries, against an engine that records what it sampled."""

# ruff: noqa: E501 - answers, requests and programs stand on one line each

from __future__ import annotations

import json
import socket
import ssl
import threading
import time

import httpx
import openai
import pytest
from anthropic import Anthropic, AuthenticationError, BadRequestError

from megatron_grpo.core.base.errors import RunError
from megatron_grpo.core.rollout.engine import SamplingSettings
from megatron_grpo.plugins.environments import agent_app
from megatron_grpo.plugins.environments.agents import AgentLoop, AgentSampler
from tests.agents import KINDS, TOOLS, Agent, Ledger, compare, parallel, plain, played, prompt, stage
from tests.mistakes import mistake

FORKS = {"edited", "rolled_back", "parallel", "asked_twice", "compacted", "aside"}
RACE = {"parallel", "left_and_asked_again", "retried", "left"}  # what is sampled depends on who came first
CHAT = [{"role": "user", "content": "hi"}]


def make_agent(*kinds):
    def solve(row, endpoint):
        for kind in kinds:
            kind(Agent(endpoint, f"{kind.__name__} {row['prompt']}"))
        return 1.0

    return solve


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_agent_sampled_tokens_are_trained_once_for_any_history_edit(kind):
    ledger = Ledger()
    rows, player = played(make_agent(kind), ledger, n=2)
    count = compare(ledger, player)
    assert [(row.finish_reason, row.record.numbers.fault) for row in rows] == [("done", "")] * 2
    assert count["sampled"] == count["trained"] + count["left out"] and count["trained"] >= 2
    if kind.__name__ not in RACE:
        assert count["left out"] == 2 * (kind.__name__ == "aside")
    assert count["contexts"] > 2 or kind.__name__ not in FORKS


def test_agent_append_only_conversation_is_one_context():
    rows, player = played(make_agent(plain), Ledger(answers=["ok", "The answer is 42.  \n"]), n=2)
    assert [len(row.sequence.contexts) for row in rows] == [1, 1]
    assert [row.record.numbers.num_turns for row in rows] == [3, 3]
    assert rows[0].record.numbers.metrics["agent/openings"] == 0.5, "the agents of a group seed their task by the row alone"


def test_agent_stop_string_equal_to_end_of_turn_is_accepted():
    found = {}

    def solve(row, endpoint):
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        for stop in (["<|im_end|>"], ["<|im_end|>", "<|endoftext|>"], ["<|im_start|>"], ["<|im_end|>", "x"]):
            call = lambda: client.chat.completions.create(model="policy", messages=CHAT, stop=stop)  # noqa: B023, E731 - called in this pass
            found[" ".join(stop)] = find_status(call)[0]
        return 1.0

    played(solve, Ledger(answers=["ok"]))
    assert found == {"<|im_end|>": 200, "<|im_end|> <|endoftext|>": 200, "<|im_start|>": 400, "<|im_end|> x": 400}


def test_agent_sampled_history_keeps_one_context_if_template_drops_thoughts():
    for history, contexts in (("template", 3), ("sampled", 1)):
        ledger = Ledger(answers=["<think>\nshort\n</think>\n\nDone."])
        rows, player = played(make_agent(plain), ledger, n=2, history=history)
        assert [len(row.sequence.contexts) for row in rows] == [contexts] * 2 and compare(ledger, player)["trained"] == 6
    ledger = Ledger()
    rows, player = played(
        make_agent(*[one for one in KINDS if one.__name__ in ("edited", "rolled_back", "forged", "cut", "anthropic")]),
        ledger,
        history="sampled",
    )
    count = compare(ledger, player)
    assert rows[0].finish_reason == "done" and count["sampled"] == count["trained"] == 19


def test_agent_sampling_is_deterministic_for_any_request_order():
    kinds = [kind for kind in KINDS if kind.__name__ not in RACE][:6]
    found = []
    for _ in range(2):
        ledger = Ledger()
        played(make_agent(*kinds), ledger, n=3, prompts=2, max_turns=60, max_contexts=60)
        found.append(sorted((number, place % 3, ids, sampled.token_ids) for (number, place), ids, sampled in ledger.sampled))
    assert found[0] == found[1] and len(found[0]) > 80


MISTAKES = {  # what an agent does that shows it, module, the right line, the wrong one
    "the history is encoded again": ("plain", "trajectory", "return [*([] if parent is None else parent.token_ids), *self.template.encode(rest, self.guards)]",
                                     "return self.template.encode(('' if parent is None else self.template.decode(parent.token_ids)) + rest, self.guards)"),
    "a context that has gone on goes on again": ("parallel", "trajectory", "return None if parent is None or parent.is_continued else parent.context", "return None if parent is None else parent.context"),
    "a fork trains what it forks from": ("rolled_back", "trajectory", "if turn.context is context and", "if (turn.context is context or any(one.parent is turn and one.context is context for one in turns)) and"),
    "a turn that nobody has read is trained": ("left", "trajectory", "return [turn for turn in self.turns if turn.is_read]", "return list(self.turns)"),
    "a turn of no account is trained": ("aside", "agent_session", "for turn in super().trained_turns if not turn.request.is_aside]", "for turn in super().trained_turns]"),
    "an answer is read without its spaces": ("plain", "trajectory", "turn.text + text + turn.end, turn.prefill + text", "turn.text + text + turn.end, turn.prefill + text.strip()"),
    "parallel requests get one seed": ("asked_twice", "agent_session", "self._seeds[digest] += 1", "pass"),
    "the mask begins late": ("plain", "trajectory", "sampled[span.begin : span.end] = True", "sampled[span.begin + 1 : span.end] = True"),
    "log-probs are turned round": ("plain", "trajectory", "values[span.begin : span.end] = span.logprobs", "values[span.begin : span.end] = span.logprobs[::-1]"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_agent_token_accounting_test_detects_planted_errors(name):
    kind, module, right, wrong = MISTAKES[name]
    check_token_account(kind)
    with (
        mistake(f"megatron_grpo.plugins.environments.{module}", right, wrong),
        pytest.raises((AssertionError, StopIteration, RuntimeError)),
    ):
        check_token_account(kind)


def check_token_account(kind: str) -> None:
    """Play two agents and hold what is trained against what was sampled."""
    ledger = Ledger(answers=["ok", "The answer is 42.  \n"] if kind == "plain" else None)
    rows, player = played(make_agent({one.__name__: one for one in KINDS}[kind]), ledger, n=2, most=10)
    count = compare(ledger, player)
    assert all(row.finish_reason == "done" for row in rows)
    assert count["left out"] == {"aside": 2, "left": 2}.get(kind, 0)
    assert count["contexts"] == 2 or kind != "plain"
    assert len(set(ledger.seeds)) == len(ledger.seeds)


# ---- what is refused


def find_status(call) -> tuple[int, str]:
    try:
        call()
    except openai.APIStatusError as error:
        return error.status_code, error.body["code"]
    except (BadRequestError, AuthenticationError) as error:
        return error.status_code, error.body["error"]["message"].rpartition("(")[2].rstrip(")")
    return 200, ""


def test_agent_request_that_changes_distribution_is_rejected_as_protocol_error():
    found, routes = {}, {}

    def solve(row, endpoint):
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
        asked = {
            "n": {"n": 2}, "logit_bias": {"logit_bias": {"5": 1}}, "response_format": {"response_format": {"type": "json_object"}},
            "tool_choice": {"tool_choice": {"type": "function", "function": {"name": "run"}}, "tools": TOOLS}, "logprobs": {"logprobs": True},
            "stop": {"stop": ["x"]}, "image": {"messages": image}, "role": {"messages": [{"role": "judge", "content": "x"}]},
            "empty": {"messages": []}, "max_tokens": {"max_tokens": 0}, "tool": {"tools": [{"type": "web_search"}]},
            "extra": {"extra_body": {"guided_regex": "a+"}}, "type": {"messages": [{"role": "user", "content": 5}]},
        }  # fmt: skip
        for name, more in asked.items():
            found[name] = find_status(lambda: client.chat.completions.create(**{"model": "policy", "messages": CHAT, **more}))  # noqa: B023 - called in this pass
        other = openai.OpenAI(base_url=endpoint.base_url, api_key="x")
        found["another key"] = find_status(lambda: other.chat.completions.create(model="policy", messages=CHAT))
        found["verdict_key"] = find_status(lambda: openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.verdict_key).models.list())
        claude = Anthropic(base_url=endpoint.url, api_key=endpoint.api_key)
        source = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
        found["anthropic"] = find_status(
            lambda: claude.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": [source]}])
        )
        found["previous_response_id"] = find_status(lambda: client.responses.create(model="m", input="x", previous_response_id="resp_1"))
        assert client.models.list().data[0].id == "policy"

        def routed(method, path, key=endpoint.api_key, content=b"{}"):
            return httpx.request(
                method, endpoint.url + path, headers={"authorization": f"Bearer {key}"} if key else {}, content=content
            ).status_code

        paths = ("/v1/models", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/verdict", "/metrics", "/v1/completions", "/")
        routes["without"] = {routed(method, path, key="") for path in paths for method in ("GET", "POST")}
        routes["behind the key"] = {
            routed(method, path) for path in ("/metrics", "/v1/completions", "/health") for method in ("GET", "POST")
        }
        surrogate = json.dumps({"messages": [{"role": "tool", "content": "x", "tool_call_id": "\ud800"}]})
        other_types = [json.dumps({"messages": CHAT} | more) for more in ({"response_format": "json"}, {"text": [1]}, {"stop": 5})]
        bodies = (b"{", b"[]", b"[" * 5000, b"\xff", b"null", "{}".encode("utf-16"), surrogate.encode(), *map(str.encode, other_types))
        routes["no JSON"] = {routed("POST", "/v1/chat/completions", content=one) for one in bodies}
        routes["too large"] = {routed("POST", "/v1/chat/completions", content=b" " * (17 << 20))}
        routes["verdict"] = [routed("POST", "/v1/verdict", key, b'{"reward": ' + value + b"}")
                             for key in (endpoint.api_key, endpoint.verdict_key) for value in (b"1", b"NaN", b'"1"', b"true", b"1e999")]  # fmt: skip
        routes["turns"] = len(Agent(endpoint, "x").hear(Agent(endpoint, "x").ask(CHAT)))
        return 1.0

    ledger = Ledger(answers=["ok"])
    (row,), player = played(solve, ledger)
    assert {name: one for name, one in found.items() if one != (400, "unsupported_parameter")} == {
        "image": (400, "unsupported_content"), "role": (400, "invalid_request"), "empty": (400, "invalid_request"),
        "max_tokens": (400, "invalid_request"), "tool": (400, "unsupported_content"), "type": (400, "invalid_request"),
        "another key": (401, "episode_over"), "verdict_key": (401, "episode_over"), "anthropic": (400, "unsupported_content"),
    }  # fmt: skip
    assert routes == {"without": {401}, "behind the key": {404}, "no JSON": {400}, "too large": {413}, "turns": 1,
                      "verdict": [401, 401, 401, 401, 401, 200, 400, 400, 400, 400]}  # fmt: skip
    assert len(ledger.sampled) == 1 and compare(ledger, player)["trained"] == 1, "a refused request changes nothing"
    assert row.record.numbers.metrics["agent/refused"] >= len(found) - 2


def test_sampling_parameters_of_a_client_are_overruled_counted_and_reported():
    def solve(row, endpoint):
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        for _ in range(2):
            client.chat.completions.create(model="gpt-5", messages=CHAT, temperature=0.0, top_p=0.5, seed=7, presence_penalty=0.0)
        client.chat.completions.create(model="gpt-5", messages=CHAT, temperature=1.0, top_p=1, extra_body={"top_k": -1, "min_p": 0})

    (row,), player = played(solve, Ledger())
    assert set(player.told) == {
        "temperature 0.0 requested, the run's 1.0 used",
        "top_p 0.5 requested, the run's 1.0 used",
        "seed 7 requested, the run's used",
    }
    assert row.record.numbers.metrics["agent/overruled"] == 6


def test_agent_rejected_request_is_not_retried_by_clients():
    seen = []

    def solve(row, endpoint):
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=5)
        began = time.monotonic()
        seen.append(find_status(lambda: client.chat.completions.create(model="m", messages=CHAT, n=2)))
        seen.append(time.monotonic() - began)

    (row,), _ = played(solve, Ledger())
    assert seen[0] == (400, "unsupported_parameter") and row.record.numbers.metrics["agent/refused"] == 1


# ---- limits and ends


def ask_until_refused(row, endpoint):
    a = Agent(endpoint, str(row["prompt"]))
    chat = a.opening()
    try:
        for _ in range(100):
            said = a.ask(chat)
            chat += [said, *a.hear(said)]
    except openai.AuthenticationError as error:
        assert error.body["code"] == "episode_over"
        with pytest.raises(openai.AuthenticationError):
            a.ask(chat)
    return 1.0


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"max_turns": 3}, "max_turns"), ({"max_model_len": 300}, "length"), ({"max_completion_length": 200}, "length"),
     ({"max_contexts": 1, "max_model_len": 500}, "length")],
)  # fmt: skip
def test_agent_episode_at_a_limit_is_trained(limits, reason):
    ledger = Ledger()
    rows, player = played(ask_until_refused, ledger, n=3, **limits)
    assert [row.finish_reason for row in rows] == [reason] * 3
    compare(ledger, player)
    for row in rows:
        length = len(row.sequence.token_ids)
        assert length <= limits.get("max_completion_length", 10**6) + row.sequence.contexts[0][1]
        assert all(end - begin <= limits.get("max_model_len", 8192) for begin, end in row.sequence.contexts)
        assert row.record.turn_rewards[-1] == 1.0


def test_agent_contexts_per_episode_are_limited():
    def solve(row, endpoint):
        a = Agent(endpoint, "x")
        for _ in range(3):
            a.ask(a.opening())
        with pytest.raises(openai.AuthenticationError):
            a.ask(a.opening())

    (row,), player = played(solve, Ledger(), max_contexts=3)
    assert (row.finish_reason, len(row.sequence.contexts)) == ("length", 3)


def test_parallel_requests_never_exceed_the_row_together():
    def solve(row, endpoint):
        try:
            parallel(Agent(endpoint, "x"))
        except (openai.AuthenticationError, KeyError):
            pass

    ledger = Ledger()
    rows, player = played(solve, ledger, n=4, max_completion_length=400)
    compare(ledger, player)
    assert all(len(row.sequence.token_ids) <= 400 + row.sequence.contexts[0][1] for row in rows)


class BlockedLedger(Ledger):
    """An engine that samples nothing until it is released."""

    is_released = False

    def poll(self):
        return super().poll() if self.is_released else []


def test_agent_slow_client_is_disconnected_without_blocking_others(monkeypatch):
    from megatron_grpo.plugins import listener

    monkeypatch.setattr(listener, "SECONDS", 0.6)
    monkeypatch.setattr(agent_app, "SECONDS_OF_BODY", 0.6)
    answers = []

    def solve(row, endpoint):
        address = "127.0.0.1", int(endpoint.url.rpartition(":")[2])
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {endpoint.api_key}\r\ncontent-length: 99\r\n\r\n{{"
        opened = [socket.create_connection(address, timeout=10) for _ in range(4)]
        for sent, text in zip(opened, (head, head[:20], "", head.replace(endpoint.api_key, "another")), strict=True):
            sent.sendall(text.encode())
        Agent(endpoint, "x").ask(CHAT)
        for sent in opened:
            with sent, sent.makefile("rb") as answer:
                answers.append(answer.read()[:12].decode())
        return 1.0

    ledger = Ledger()
    (row,), player = played(solve, ledger)
    assert answers == ["HTTP/1.1 408", "", "", "HTTP/1.1 401"]
    assert row.finish_reason == "done" and compare(ledger, player)["trained"] == 1


def test_agent_session_with_too_many_open_requests_gets_429():
    ledger, found = BlockedLedger(), []

    def solve(row, endpoint):
        def ask(number):
            body = {"model": "policy", "messages": [{"role": "user", "content": f"{number}"}]}
            found.append(
                httpx.post(endpoint.base_url + "/chat/completions", json=body, headers={"x-api-key": endpoint.api_key}, timeout=60)
            )

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(32)]
        for one in threads:
            one.start()
        while ledger.num_running < 32:
            time.sleep(0.01)
        ask(32)
        ledger.is_released = True
        for one in threads:
            one.join()

    played(solve, ledger, max_contexts=64, max_turns=64)
    assert (found[0].status_code, found[0].headers["retry-after"], found[0].headers["x-should-retry"]) == (429, "1", "true")
    assert [one.status_code for one in found[1:]] == [200] * 32


def test_agent_example_messages_are_not_treated_as_sampled():
    ledger = Ledger(answers=["<think>\nshort\n</think>\n\nDone."])
    played(make_agent({kind.__name__: kind for kind in KINDS}["shown_examples"]), ledger)
    assert len(ledger.sampled) == 4
    for _, ids, _sampled in ledger.sampled:
        assert ledger.tokenizer.decode(ids).partition("assistant\n")[2].startswith("Done.<|im_end|>")


ENDS = {
    "raises": ("error", "the agent raised ZeroDivisionError"),
    "nothing": ("error", "sent no request"),
    "no reward": ("invalid", "no reward"),
    "nan": ("invalid", "nan"),
    "string": ("invalid", "good"),
    "late": ("timeout", "no reward within 1 s"),
    "late, nothing": ("timeout", "sent no request within 1 s"),
    "async": ("done", ""),
    "verdict": ("done", ""),
}


@pytest.mark.parametrize("how", ENDS)
def test_agent_that_fails_trains_nothing_and_reports_the_reason(how):
    def solve(row, endpoint):
        if how not in ("nothing", "late, nothing"):
            Agent(endpoint, "x").ask(CHAT)
        if how == "verdict":
            headers = {"authorization": f"Bearer {endpoint.verdict_key}"}
            assert httpx.post(endpoint.base_url + "/verdict", json={"reward": 0.25}, headers=headers).status_code == 200
        if how.startswith("late"):
            time.sleep(3)
        return {"raises": lambda: 1 / 0, "nan": lambda: float("nan"), "string": lambda: "good"}.get(
            how, lambda: None if how != "nothing" else 1.0
        )()

    async def coroutine(row, endpoint):
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        await client.chat.completions.create(model="policy", messages=row["prompt"])
        return {"reward": 0.5, "size": 3}

    (row,), _ = played(coroutine if how == "async" else solve, Ledger(), needs_reward=True, timeout=1.0 if how.startswith("late") else 60.0)
    reason, fault = ENDS[how]
    assert row.finish_reason == reason and fault in row.record.numbers.fault
    if how == "async":
        assert row.record.turn_rewards == (0.5,) and row.columns["size"] == 3
    elif how == "verdict":
        assert row.record.turn_rewards == (0.25,)
    else:
        assert not any(row.record.turn_rewards)


def test_agent_at_time_limit_is_trained_if_reward_functions_score_it():
    def solve(row, endpoint):
        Agent(endpoint, "x").ask(CHAT)
        time.sleep(3)

    (row,), _ = played(solve, Ledger(), timeout=1.0)
    assert row.finish_reason == "max_seconds" and row.sequence.mask.any()


def test_agent_key_is_rejected_after_its_episode():
    keys = []

    def solve(row, endpoint):
        keys.append(endpoint)
        a = Agent(endpoint, "x")
        a.ask(CHAT)
        if len(keys) == 2:
            time.sleep(0.3)
            assert find_status(lambda: Agent(keys[0], "x").ask(CHAT)) == (401, "episode_over")
            assert (
                httpx.post(keys[0].base_url + "/verdict", json={"reward": 1}, headers={"x-api-key": keys[0].verdict_key}).status_code == 401
            )
        return 1.0

    rows, _ = played(solve, Ledger(), n=2, concurrency=1)
    assert [row.finish_reason for row in rows] == ["done", "done"]
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(keys[0].url.rpartition(":")[2])), timeout=1)


def test_agent_endpoint_uses_configured_address_and_tls_in_every_rollout(tmp_path):
    from megatron_grpo.plugins.environments.agent_app import EndpointAddress
    from tests.small_server import certificate_in

    certificate, key = map(str, certificate_in(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = EndpointAddress(host="localhost", port=port, certfile=certificate, keyfile=key)

    def solve(row, endpoint):
        assert endpoint.url == f"https://localhost:{port}"
        client = httpx.Client(verify=ssl.create_default_context(cafile=certificate))
        with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=client) as trusting:
            trusting.chat.completions.create(model="policy", messages=CHAT)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://localhost:{port}/v1/models")
        return 1.0

    for _ in range(2):
        (row,), _ = played(solve, Ledger(), address=address)
        assert (row.finish_reason, row.record.numbers.fault) == ("done", "")


def test_agent_endpoint_on_used_port_raises_with_its_settings():
    from megatron_grpo.plugins.environments.agent_app import EndpointAddress

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RunError, match="cannot listen on 127.0.0.1 port .*agent_port"):
        played(lambda row, endpoint: 1.0, Ledger(), address=EndpointAddress(port=taken.getsockname()[1]))


def test_agent_endpoint_url_of_wildcard_address_has_host_name():
    from megatron_grpo.plugins.environments.agent_app import EndpointAddress

    listening, url = EndpointAddress(host="0.0.0.0").listen()
    with listening:
        assert url == f"http://{socket.gethostname()}:{listening.getsockname()[1]}"


# ---- the run around it


class TurnLosingLedger(Ledger):
    """An engine that loses its open turns after a few sampled ones."""

    def poll(self):
        return super().poll() if len(self.sampled) < 3 else []


def test_agent_open_turns_are_resent_to_next_engine_with_same_seeds():
    first, second, whole = TurnLosingLedger(), Ledger(), Ledger()
    player = AgentLoop(stage(make_agent(plain)), [prompt(0), prompt(1)], SamplingSettings(n=2, max_completion_length=30_000), seed=3)
    try:
        until = time.monotonic() + 20
        while not (len(first.sampled) >= 3 and first.num_running == 4 - sum(one is not None for one in ())):
            player.advance(first, 0.1, version=7)
            assert time.monotonic() < until
            if len(first.sampled) >= 3 and first.num_running >= 1:
                break
        while not player.advance(second, 0.5, version=7):
            assert time.monotonic() < until
    finally:
        player.close()
    first.sampled += second.sampled
    compare(first, player)
    played(make_agent(plain), whole, n=2, prompts=2)
    assert sorted((ids, sampled.token_ids) for _, ids, sampled in first.sampled) == sorted(
        (ids, sampled.token_ids) for _, ids, sampled in whole.sampled
    )


def test_agent_loop_close_ends_agents_and_endpoint():
    started = threading.Event()

    def solve(row, endpoint):
        started.set()
        Agent(endpoint, "x").ask([{"role": "user", "content": "SLOW"}])

    player = AgentLoop(stage(solve), [prompt()], SamplingSettings(n=2, max_completion_length=1000), seed=3)
    player.advance(Ledger(), 0.1, version=7)
    assert started.wait(5)
    began = time.monotonic()
    player.close()
    assert time.monotonic() - began < 3


def test_agent_unread_responses_are_reported_once_per_rollout(caplog):
    class Engine:
        def play(self, prompts, sampling, begin):
            player = begin(prompts)
            while not player.advance(Ledger(), 0.5, version=7):
                pass
            return player.groups()

    kinds = {kind.__name__: kind for kind in KINDS}
    sampler = AgentSampler(Engine(), stage(make_agent(kinds["left"])))
    for _ in range(2):
        sampler.generate([prompt()], SamplingSettings(n=1, max_completion_length=1000), seed=1)
    assert len([one for one in caplog.messages if "agent/unread" in one]) == 1


def test_agent_rewards_receive_the_conversation_of_the_agent():
    (row,), _ = played(make_agent({kind.__name__: kind for kind in KINDS}["subagents"]), Ledger())
    assert len(row.columns["contexts"]) == len(row.sequence.contexts)
    assert row.record.messages[-1]["role"] == "assistant" and list(row.record.messages) == row.columns["contexts"][-1]
    json.dumps(row.columns["contexts"])
