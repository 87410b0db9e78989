"""Tool calls in the text of a turn. A call that cannot be read is a call all the same, with an error: its answer says so.

Read as "no call", a slip of the model would be taken for its final answer.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_grpo.base.errors import ConfigError, Problem, said_by

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """error: why it could not be read."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


ReadCalls = Callable[[str], Sequence[ToolCall]]


def read_hermes(text: str) -> list[ToolCall]:
    """Hermes' format, which Qwen uses: a JSON object between tags. What the model thinks (up to `</think>`) calls nothing."""
    said = _behind_thoughts(text)
    if said is None:
        return [ToolCall(error="the call stands in a <think> that has no </think>")] if "<tool_call>" in text else []
    calls = [_of_json(body) for body in _CALL.findall(said)]
    if "<tool_call>" in _CALL.sub("", said):
        calls.append(ToolCall(error="a <tool_call> has no </tool_call>"))
    return calls


def _behind_thoughts(text: str) -> str | None:
    """None for thoughts without an end. A mark among a call's arguments ends none: a thought ends at the first that no call holds."""
    if not text.lstrip().startswith("<think>"):  # the prompt may have begun one all the same
        of_calls = [hit.span(1) for hit in _CALL.finditer(text) if "</think>" in hit[1] and not _of_json(hit[1]).error]
        ends = [hit.end() for hit in re.finditer("</think>", text) if not any(begin <= hit.start() < end for begin, end in of_calls)]
        return text[ends[0] :] if ends else text
    _, has_ended, said = text.partition("</think>")
    return said if has_ended else None


def _of_json(body: str) -> ToolCall:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the call is no JSON: {error}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall(error="the call is no JSON object with a name and arguments")
    return _checked(found["name"], found.get("arguments", {}))


def _checked(name: str, arguments: Any) -> ToolCall:
    if not isinstance(arguments, dict):
        return ToolCall(name=name, error="the arguments are no JSON object")
    return ToolCall(name=name, arguments=arguments)


def reader(name: str, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> ReadCalls:
    """Our own for "hermes"; for others a parser of vLLM. tools: schemas. Raises ConfigError where there is none."""
    if name == "hermes":
        return read_hermes
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise _problem(f"tool_call_parser ({name}) is a parser of vLLM, which is not installed beside the trainer. Use hermes.") from error
    known = ToolParserManager.list_registered()
    if name not in known:
        raise _problem(f"tool_call_parser ({name}): there is none of this name. There are {', '.join(known)}.")
    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
    except Exception as error:
        raise _problem(f"tool_call_parser ({name}) does not take this model's tokenizer: {said_by(error)}") from error
    return _Parser(parser, tools)


def _problem(message: str) -> ConfigError:
    return ConfigError([Problem(flags=("tool_call_parser",), message=message)])


# What a call begins with, in the formats that vLLM's parsers read.
_MARKS = (
    *("<tool_call", "<|tool_call", "<|python_tag|>", "[TOOL_CALLS]", "<\uff5ctool", "<function=", "<function_call", "functools["),
    *("<TOOLCALL>", "<|action_start|>", "<start_function_call>", "<minimax:tool_call", "<invoke "),
)


class _Parser:
    """vLLM's, which says "no call" of one that it cannot read; and that no two threads may use at a time."""

    def __init__(self, parser: Any, tools: Sequence[Mapping[str, Any]]):
        self._parser, self._tools, self._lock = parser, list(tools), threading.Lock()
        names = "|".join(re.escape(tool["function"]["name"]) for tool in tools)
        self._begun = re.compile(rf"""\[\s*({names})\s*\(|["']name["']\s*:\s*["']({names})["']""")  # pythonic, and JSON without a mark

    def __call__(self, text: str) -> list[ToolCall]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(model="", messages=[], tools=self._tools)  # type: ignore[call-arg,arg-type]  # pydantic reads them
        try:
            with self._lock:
                found = self._parser.extract_tool_calls(text, request)
            calls = [self._read(call.function) for call in found.tool_calls] if found.tools_called else []
        except Exception as error:  # noqa: BLE001 - a parser that trips over what a model wrote
            return [ToolCall(error=f"the call cannot be read: {type(error).__name__}")]
        if not calls and (any(mark in text for mark in _MARKS) or self._begun.search(text)):
            return [ToolCall(error="the call cannot be read")]
        return calls

    @staticmethod
    def _read(function: Any) -> ToolCall:
        try:
            arguments = json.loads(function.arguments or "{}")
        except (ValueError, RecursionError) as error:
            return ToolCall(name=function.name, error=f"the arguments are no JSON: {error}")
        return _checked(function.name, arguments)
