"""Protocols of the agents' endpoint: OpenAI chat completions, OpenAI responses and Anthropic messages, each to and from `AgentRequest`.

An answer is sampled whole before any of it is sent, so a stream is the same answer in pieces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_grpo.core.rollout.engine import SamplingSettings
from megatron_grpo.plugins.environments.agent_session import AgentRefusalError, AgentRequest, AgentTurn

Body = Mapping[str, Any]
_NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "seed": None}  # of the run, for every client
_REFUSED = ("logit_bias", "logprobs", "top_logprobs", "functions", "function_call", "audio", "prediction", "structured_outputs",
            "guided_json", "guided_regex", "guided_choice", "guided_grammar", "previous_response_id", "conversation")  # fmt: skip
_ROLES = {"developer": "system", "function": "tool"} | {role: role for role in ("system", "user", "assistant", "tool")}
_BILLING = "x-anthropic-billing-header:"  # Claude Code's system block with a new number in every request: no two prompts would match


class ApiProtocol(NamedTuple):
    """One protocol.

    Args:
        events: Events of a stream, as server-sent events.
    """

    read: Callable[[Body], AgentRequest]
    answer: Callable[[AgentTurn], dict[str, Any]]
    events: Callable[[AgentTurn], Iterator[str]]


def invalid_request(message: str, code: str = "invalid_request") -> AgentRefusalError:
    """Return the refusal of a request that the endpoint does not support."""
    return AgentRefusalError(400, code, message)


def unsupported(body: Body, run: SamplingSettings, stop: Sequence[str]) -> AgentRefusalError | None:
    """Return the error for a parameter that changes the sampling distribution and cannot be ignored."""
    if body.get("n") not in (None, 1):
        return invalid_request("n: one answer for each request. Send the request again for another answer.", "unsupported_parameter")
    for name in _REFUSED:
        if body.get(name) not in (None, False, {}, [], ""):
            return invalid_request(f"{name} is not supported by this endpoint. Omit it.", "unsupported_parameter")
    form = body.get("response_format") or (body.get("text") or {}).get("format") or {}
    if form.get("type", "text") != "text":
        return invalid_request(
            "response_format: only text. Set a grammar for the run (vllm_structured_outputs_regex).", "unsupported_parameter"
        )
    choice = body.get("tool_choice")
    choice = choice.get("type") if isinstance(choice, dict) else choice
    if choice not in (None, "auto", "none"):
        return invalid_request(f"tool_choice {choice}: a forced call has another distribution. Use auto or none.", "unsupported_parameter")
    if stop and tuple(stop) != run.stop:
        return invalid_request(
            f"stop {list(stop)}: the run samples with stop {list(run.stop)}. Set --stop for the run.", "unsupported_parameter"
        )
    return None


def overridden_parameters(body: Body, run: SamplingSettings) -> Iterator[str]:
    """Yield a description of each sampling parameter of a request that differs from the run's, which is used instead."""
    neutral = {"top_k": (0, -1), "top_p": (1,), "min_p": (0,)}
    used: dict[str, Any] = {"temperature": run.temperature, "top_p": run.top_p, "top_k": run.top_k, "min_p": run.min_p, **_NEUTRAL}
    for name, value in used.items():
        requested = body.get(name)
        if requested is not None and requested != value and not (requested in neutral.get(name, ()) and value in neutral[name]):
            yield f"{name} {requested!r:.40} requested, the run's {'' if name == 'seed' else f'{value} '}used"


# ---- parts of requests


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in _list(content, "content")]
    for part in parts:
        if part.get("type") not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            raise invalid_request(f"content of type {part.get('type')!r:.40}: this endpoint supports text only.", "unsupported_content")
    return "".join(part["text"] for part in parts)


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(item, (str, dict)) for item in value):
        raise invalid_request(f"{name} must be a list of objects.")
    return value


def _limit(value: Any, name: str) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise invalid_request(f"{name} ({value!r:.40}) must be an integer of at least 1.")
    return value


def _stop(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(map(str, value or ()))


def _call(key: Any, name: Any, arguments: Any) -> dict[str, Any]:
    if not isinstance(name, str):
        raise invalid_request("a tool call needs the name of its function.")
    return {"id": str(key), "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}


def _tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    if not isinstance(name, str):
        raise invalid_request("a tool needs a name; this endpoint supports functions only.", "unsupported_content")
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": parameters or {}}}


def _request(body: Body, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], **extra: Any) -> AgentRequest:
    choice = body.get("tool_choice")
    is_without = (choice.get("type") if isinstance(choice, dict) else choice) == "none"
    if not messages:
        raise invalid_request("the request has no messages.")
    return AgentRequest(
        messages=messages, tools=() if is_without else tools, is_streamed=bool(body.get("stream")),
        model=str(body.get("model", "policy")), **extra,
    )  # fmt: skip


def _event(data: Any, name: str = "") -> str:
    return f"event: {name}\n" * bool(name) + f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"


def _name(kind: str, turn: AgentTurn) -> str:
    return f"{kind}-{turn.number}-{turn.seed}"


def _lengths(turn: AgentTurn) -> tuple[int, int]:
    assert turn.span is not None
    return turn.span.begin, turn.span.end - turn.span.begin


def _reason(turn: AgentTurn, cut: str, calls: str, finished: str) -> str:
    assert turn.sampled is not None
    return cut if turn.sampled.is_cut else calls if turn.message.get("tool_calls") else finished


# ---- OpenAI chat completions


def _read_chat(body: Body) -> AgentRequest:
    messages = []
    for message in _list(body.get("messages"), "messages"):
        role = _ROLES.get(str(message.get("role"))) if isinstance(message, dict) else None
        if role is None:
            raise invalid_request(f"a message needs a role of {', '.join(_ROLES)}.")
        chat_message = {"role": role, "content": _text(message.get("content"))} | {
            name: message[name] for name in ("name", "tool_call_id") if isinstance(message.get(name), str)
        }
        if calls := message.get("tool_calls"):
            functions = [(call.get("id"), call.get("function") or {}) for call in _list(calls, "tool_calls")]
            chat_message["tool_calls"] = [_call(key, function.get("name"), function.get("arguments")) for key, function in functions]
        messages.append(chat_message)
    tools = [tool.get("function") or {} for tool in _list(body.get("tools") or [], "tools")]
    return _request(
        body, messages, [_tool(tool.get("name"), tool.get("description"), tool.get("parameters")) for tool in tools],
        max_tokens=_limit(body.get("max_completion_tokens") or body.get("max_tokens"), "max_tokens"), stop=_stop(body.get("stop")),
        has_usage=bool((body.get("stream_options") or {}).get("include_usage")),
    )  # fmt: skip


def _chat_head(turn: AgentTurn, kind: str) -> dict[str, Any]:
    return {"id": _name("chatcmpl", turn), "object": kind, "created": 0, "model": turn.request.model}


def _chat_usage(turn: AgentTurn) -> dict[str, int]:
    prompt, answer = _lengths(turn)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _answer_chat(turn: AgentTurn) -> dict[str, Any]:
    choice = {"index": 0, "message": turn.message, "finish_reason": _reason(turn, "length", "tool_calls", "stop"), "logprobs": None}
    return _chat_head(turn, "chat.completion") | {"choices": [choice], "usage": _chat_usage(turn)}


def _chat_events(turn: AgentTurn) -> Iterator[str]:
    def event(delta: dict[str, Any], reason: str | None = None) -> str:
        return _event(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    head, message = _chat_head(turn, "chat.completion.chunk"), turn.message
    yield event({"role": "assistant", "content": ""})
    for name in ("reasoning_content", "content"):
        if message.get(name):
            yield event({name: message[name]})
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        yield event({"tool_calls": [{"index": index, **call, "function": {"name": function["name"], "arguments": ""}}]})
        yield event({"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]})
    yield event({}, _reason(turn, "length", "tool_calls", "stop"))
    if turn.request.has_usage:
        yield _event(head | {"choices": [], "usage": _chat_usage(turn)})
    yield _event("[DONE]")


# ---- Anthropic messages


def _read_anthropic(body: Body) -> AgentRequest:
    system = body.get("system") or []
    system = [{"type": "text", "text": system}] if isinstance(system, str) else _list(system, "system")
    text = _text([part for part in system if not str(part.get("text")).startswith(_BILLING)])
    messages: list[dict[str, Any]] = [{"role": "system", "content": text}] if text else []
    for message in _list(body.get("messages"), "messages"):
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else _list(content, "content")
        texts, calls = [], []
        for part in parts:
            if part.get("type") == "tool_result":
                messages.append({"role": "tool", "content": _text(part.get("content")), "tool_call_id": str(part.get("tool_use_id"))})
            elif part.get("type") == "tool_use":
                calls.append(_call(part.get("id"), part.get("name"), json.dumps(part.get("input") or {})))
            elif part.get("type") not in ("thinking", "redacted_thinking"):
                texts.append(part)
        if texts or calls or message.get("role") == "assistant":
            role = _ROLES.get(message.get("role"))
            if role is None:
                raise invalid_request("a message needs the role user or assistant.")
            messages.append({"role": role, "content": _text(texts)} | ({"tool_calls": calls} if calls else {}))
    tools = [_tool(tool.get("name"), tool.get("description"), tool.get("input_schema")) for tool in _list(body.get("tools") or [], "tools")]
    max_tokens = _limit(body.get("max_tokens"), "max_tokens")
    return _request(body, messages, tools, max_tokens=max_tokens, stop=_stop(body.get("stop_sequences")))


def _answer_anthropic(turn: AgentTurn) -> dict[str, Any]:
    prompt, answer = _lengths(turn)
    content: list[dict[str, Any]] = [{"type": "text", "text": turn.message["content"]}] if turn.message.get("content") else []
    content += [
        {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": json.loads(call["function"]["arguments"])}
        for call in turn.message.get("tool_calls", ())
    ]
    return {
        "id": _name("msg", turn), "type": "message", "role": "assistant", "model": turn.request.model, "content": content,
        "stop_reason": _reason(turn, "max_tokens", "tool_use", "end_turn"), "stop_sequence": None,
        "usage": {"input_tokens": prompt, "output_tokens": answer},
    }  # fmt: skip


def _anthropic_events(turn: AgentTurn) -> Iterator[str]:
    def event(name: str, /, **data: Any) -> str:
        return _event({"type": name, **data}, name)

    answer_body = _answer_anthropic(turn)
    prompt, answer = _lengths(turn)
    yield event(
        "message_start", message=answer_body | {"content": [], "stop_reason": None, "usage": {"input_tokens": prompt, "output_tokens": 1}}
    )
    for index, block in enumerate(answer_body["content"]):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield event("content_block_start", index=index, content_block=empty)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    yield event("message_delta", delta={"stop_reason": answer_body["stop_reason"], "stop_sequence": None}, usage={"output_tokens": answer})
    yield event("message_stop")


# ---- OpenAI responses


def _read_responses(body: Body) -> AgentRequest:
    input_items = body.get("input")
    items = [{"role": "user", "content": input_items}] if isinstance(input_items, str) else _list(input_items, "input")
    messages: list[dict[str, Any]] = [{"role": "system", "content": _text(body["instructions"])}] if body.get("instructions") else []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            call = _call(item.get("call_id"), item.get("name"), item.get("arguments"))
            if not messages or messages[-1]["role"] != "assistant":  # the calls of one answer are items behind its text
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "content": _text(item.get("output")), "tool_call_id": str(item.get("call_id"))})
        elif kind == "message" and item.get("role") in _ROLES:
            messages.append({"role": _ROLES[item["role"]], "content": _text(item.get("content"))})
        elif kind != "reasoning":
            raise invalid_request(f"an input item of type {kind!r:.40} is not supported by this endpoint.", "unsupported_content")
    tools = [_tool(tool.get("name"), tool.get("description"), tool.get("parameters")) for tool in _list(body.get("tools") or [], "tools")]
    return _request(body, messages, tools, max_tokens=_limit(body.get("max_output_tokens"), "max_output_tokens"))


def _items(turn: AgentTurn) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if turn.message.get("content") or not turn.message.get("tool_calls"):
        part: dict[str, Any] = {"type": "output_text", "text": turn.message.get("content") or "", "annotations": []}
        items.append({"type": "message", "id": _name("msg", turn), "role": "assistant", "status": "completed", "content": [part]})
    return items + [
        {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed", **call["function"]}
        for call in turn.message.get("tool_calls", ())
    ]


def _answer_responses(turn: AgentTurn) -> dict[str, Any]:
    prompt, answer = _lengths(turn)
    is_cut = _reason(turn, "cut", "", "") == "cut"
    usage = {"input_tokens": prompt, "output_tokens": answer, "total_tokens": prompt + answer,
             "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}  # fmt: skip
    return {
        "id": _name("resp", turn), "object": "response", "created_at": 0, "model": turn.request.model, "output": _items(turn),
        "usage": usage, "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None, "error": None, "instructions": None, "metadata": {},
        "parallel_tool_calls": True, "temperature": None, "top_p": None, "tool_choice": "auto", "tools": [],
    }  # fmt: skip


def _responses_events(turn: AgentTurn) -> Iterator[str]:
    number = 0

    def event(name: str, /, **data: Any) -> str:
        nonlocal number
        number += 1
        return _event({"type": name, "sequence_number": number - 1, **data}, name)

    answer_body = _answer_responses(turn)
    yield event(
        "response.created", response=answer_body | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    )
    for index, item in enumerate(answer_body["output"]):
        location = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            part: dict[str, Any] = item["content"][0]
            text = part["text"]
            yield event("response.output_item.added", output_index=index, item=item | {"status": "in_progress", "content": []})
            yield event("response.content_part.added", **location, content_index=0, part=part | {"text": ""})
            yield event("response.output_text.delta", **location, content_index=0, delta=text, logprobs=[])
            yield event("response.output_text.done", **location, content_index=0, text=text, logprobs=[])
            yield event("response.content_part.done", **location, content_index=0, part=part)
        else:
            yield event("response.output_item.added", output_index=index, item=item | {"status": "in_progress", "arguments": ""})
            yield event("response.function_call_arguments.delta", **location, delta=item["arguments"])
            yield event("response.function_call_arguments.done", **location, name=item["name"], arguments=item["arguments"])
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{answer_body['status']}", response=answer_body)


FORMS: Mapping[str, ApiProtocol] = {  # by path
    "/v1/chat/completions": ApiProtocol(_read_chat, _answer_chat, _chat_events),
    "/v1/messages": ApiProtocol(_read_anthropic, _answer_anthropic, _anthropic_events),
    "/v1/responses": ApiProtocol(_read_responses, _answer_responses, _responses_events),
}


def error_body(path: str, refusal: AgentRefusalError) -> dict[str, Any]:
    """Return the body of a refusal in the form of the protocol."""
    if path.startswith("/v1/messages"):
        kind = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
        return {
            "type": "error",
            "error": {"type": kind.get(refusal.status, "invalid_request_error"), "message": f"{refusal} ({refusal.code})"},
        }
    return {"error": {"message": str(refusal), "type": "invalid_request_error", "code": refusal.code, "param": None}}
