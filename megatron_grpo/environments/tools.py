"""Python functions as tools: their schemas for the chat template, the calls that the model makes of them, and the answers.

A call that cannot be read is a call all the same, with an error: its answer says so. Read as "no call", a slip of the model would be taken
for its final answer.
"""

from __future__ import annotations

import inspect
import json
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron_grpo.base.errors import config_error, first_line, said_by
from megatron_grpo.environments.protocol import Environment, Message, Reply, Turn

Function = Callable[..., Any]
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_UNNAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


class InvalidToolError(ValueError):
    """A function that cannot be shown to a model. The end of a sentence about it."""


def schema_of(function: Function) -> dict[str, Any]:
    """Its JSON schema, from annotations and a docstring as Google writes it. Raises InvalidToolError, which names what is missing."""
    from transformers.utils import get_json_schema

    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidToolError(f"({function.__name__}) yields, and a tool returns its answer")
    if unnamed := [one.name for one in inspect.signature(function).parameters.values() if one.kind in _UNNAMED]:
        raise InvalidToolError(f"({function.__name__}) takes {unnamed[0]} by its place alone, and a call names its arguments")
    try:
        return get_json_schema(function)
    except Exception as error:
        raise InvalidToolError(f"has no schema: {said_by(error)}") from error


# ---- calls in the text of a turn


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
        raise config_error(
            "tool_call_parser", f"tool_call_parser ({name}) is a parser of vLLM, which is not installed beside the trainer. Use hermes."
        ) from error
    known = ToolParserManager.list_registered()
    if name not in known:
        raise config_error("tool_call_parser", f"tool_call_parser ({name}): there is none of this name. There are {', '.join(known)}.")
    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
    except Exception as error:
        raise config_error(
            "tool_call_parser", f"tool_call_parser ({name}) does not take this model's tokenizer: {said_by(error)}"
        ) from error
    return _Parser(parser, tools)


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


# ---- their answers


class ToolEnvironment(Environment):
    """Answers each call of a turn with what the function returns. A turn without a call is for the environment inside, or ends the episode.

    What a tool raises is its answer, for it is the model's business. `tool_set` makes classes of this kind.
    """

    functions: ClassVar[Mapping[str, Function]] = {}
    inner: ClassVar[Callable[[Mapping[str, Any]], Environment] | None] = None
    read: ClassVar[ReadCalls] = staticmethod(read_hermes)

    def __init__(self, columns: Mapping[str, Any]):
        super().__init__(columns)
        make = type(self).inner
        self._inside = make(columns) if make is not None else None

    def start(self, prompt: Sequence[Message]) -> Any:
        return prompt if self._inside is None else self._inside.start(prompt)

    def reply(self, turn: Turn) -> Any:
        """Functions run in this thread; what is to be awaited is returned as a coroutine."""
        calls = type(self).read(turn.text)
        if self._inside is not None and (not calls or turn.is_last or self._are_for_inside(calls)):
            return self._inside.reply(
                turn
            )  # at the last turn too: what a tool says then is heard by nobody, and it may have a reward to give
        if not calls:
            return Reply(done=True)
        begun = [self._begin(call) for call in calls]
        if any(inspect.isawaitable(value) for value, _ in begun):
            return self._awaited(calls, begun)
        return self._reply(calls, begun)

    def _are_for_inside(self, calls: Sequence[ToolCall]) -> bool:
        """The environment inside has tools of its own, and reads their calls itself."""
        theirs = [call.name for call in calls if call.name not in self.functions]
        known = {tool.get("function", tool).get("name") for tool in self._inside.tools} if self._inside is not None else set()
        return len(theirs) == len(calls) and not known.isdisjoint(theirs)

    def close(self) -> Any:
        return None if self._inside is None else self._inside.close()

    async def _awaited(self, calls: Sequence[ToolCall], begun: Sequence[tuple[Any, bool]]) -> Reply:
        found = []
        for value, has_failed in begun:
            if inspect.isawaitable(value):
                value, has_failed = await _outcome(value)
            found.append((value, has_failed))
        return self._reply(calls, found)

    def _reply(self, calls: Sequence[ToolCall], found: Sequence[tuple[Any, bool]]) -> Reply:
        """Names of tools alone are repeated: any other is the model's own words, and may stand in a template's header."""
        told = [(*_as_text(value), has_failed) for value, has_failed in found]
        messages = [
            {"role": "tool", "name": call.name if call.name in self.functions else "unknown", "content": text}
            for call, (text, *_) in zip(calls, told, strict=True)
        ]
        return Reply(messages=messages, metrics={"tool_calls": len(calls), "tool_errors": sum(any(failed) for _, *failed in told)})

    def _begin(self, call: ToolCall) -> tuple[Any, bool]:
        """(what the function returned, or what is said instead; whether it failed)."""
        if call.error:
            return f"Error: {call.error}", True
        if call.name not in self.functions:
            return f"Error: no tool is called {call.name!r}; there are {', '.join(self.functions)}", True
        try:
            return self.functions[call.name](**call.arguments), False
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the model is told what its call did
            return _told(error), True


async def _outcome(value: Awaitable[Any]) -> tuple[Any, bool]:
    try:
        return await value, False
    except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
        return _told(error), True


def _told(error: BaseException) -> str:
    """pydantic's first line counts what is wrong; the model is told what it is."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        wrong = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors(include_url=False, include_context=False)]
        return "Error: " + "; ".join(f"{where}: {what}" if where else what for where, what in wrong)
    first = said_by(error, first_line)
    return f"Error: {type(error).__name__}{': ' * bool(first)}{first}"


def _as_text(value: Any) -> tuple[str, bool]:
    """(what a function returned as text, whether it can be none)."""
    failed = False
    if not isinstance(value, str):
        try:
            try:
                value = json.dumps(value, ensure_ascii=False, default=str)
            except (TypeError, ValueError, RecursionError):  # keys that are no strings, or a loop
                value = str(value)
        except Exception as error:  # noqa: BLE001 - a user's object
            value, failed = _told(error), True
    return value.encode("utf-8", "replace").decode("utf-8"), failed  # half a character is no text


def tool_set(
    functions: Mapping[str, Function], *, inner: type[Environment] | None = None, read: ReadCalls = read_hermes
) -> type[ToolEnvironment]:
    """An environment with these tools. functions: by the name that their schemas have. inner: who answers turns without a call.

    Raises InvalidToolError.
    """
    from pydantic import validate_call
    from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

    schemas = [schema_of(function) for function in functions.values()]
    try:
        checked = {name: validate_call(function) for name, function in functions.items()}
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        raise InvalidToolError(f"has arguments that cannot be checked: {said_by(error)}") from error
    values = {"functions": checked, "tools": [*(inner.tools if inner else ()), *schemas], "inner": inner, "read": staticmethod(read)}
    return type("Tools" if inner is None else f"{inner.__name__}WithTools", (ToolEnvironment,), values)
