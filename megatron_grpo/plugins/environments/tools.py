"""Tool calling: JSON schemas of Python functions, parsing of tool calls in a turn, and execution of the calls.

A tool call that cannot be parsed is still a call, with an error, and its answer reports that error. Treated as "no call", a syntax error
of the model would be taken for its final answer.
"""

from __future__ import annotations

import inspect
import json
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron_grpo.core.base.errors import config_error, first_line, one_line
from megatron_grpo.core.base.files import parse_json
from megatron_grpo.plugins.environments.protocol import Environment, Message, StepOutput, Turn

Function = Callable[..., Any]
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_UNNAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


class InvalidToolError(ValueError):
    """Error raised if a function cannot be a tool. The message completes a sentence about the function."""


def make_schema(function: Function) -> dict[str, Any]:
    """Return the JSON schema of a function, from its annotations and its Google-style docstring.

    Raises:
        InvalidToolError: The function is a generator, has positional-only or variadic positional parameters, or lacks an annotation or a
            description; the message names what is missing.
    """
    from transformers.utils import get_json_schema

    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidToolError(f"({function.__name__}) is a generator; a tool must return its result")
    if unnamed := [parameter.name for parameter in inspect.signature(function).parameters.values() if parameter.kind in _UNNAMED]:
        raise InvalidToolError(f"({function.__name__}) takes {unnamed[0]} by position only; a call passes arguments by name")
    try:
        return get_json_schema(function)
    except Exception as error:
        raise InvalidToolError(f"has no schema: {one_line(error)}") from error


# ---- calls in the text of a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call of a turn.

    Args:
        name: Name of the tool.
        error: Why the call could not be parsed; empty if it was.
    """

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


ReadCalls = Callable[[str], Sequence[ToolCall]]


def read_hermes(text: str) -> list[ToolCall]:
    """Parse tool calls in Hermes' format, which Qwen uses: a JSON object between <tool_call> tags.

    Calls inside a thinking block (up to `</think>`) are ignored.

    Returns:
        The calls in order; a call that cannot be parsed has an `error`.
    """
    answer = _text_after_thinking(text)
    if answer is None:
        return [ToolCall(error="the call is inside a <think> without </think>")] if "<tool_call>" in text else []
    calls = [_parse_json_call(body) for body in _CALL.findall(answer)]
    if "<tool_call>" in _CALL.sub("", answer):
        calls.append(ToolCall(error="a <tool_call> without </tool_call>"))
    return calls


def _text_after_thinking(text: str) -> str | None:
    """Return the text after the thinking block, or None if the block has no end.

    A `</think>` inside the arguments of a valid call does not end the block: the block ends at the first one outside all calls.
    """
    if not text.lstrip().startswith("<think>"):  # the generation prompt may have opened a block
        call_spans = [hit.span(1) for hit in _CALL.finditer(text) if "</think>" in hit[1] and not _parse_json_call(hit[1]).error]
        ends = [hit.end() for hit in re.finditer("</think>", text) if not any(begin <= hit.start() < end for begin, end in call_spans)]
        return text[ends[0] :] if ends else text
    _, is_finished, answer = text.partition("</think>")
    return answer if is_finished else None


def _parse_json_call(body: str) -> ToolCall:
    try:
        content = parse_json(body)
    except ValueError as error:
        return ToolCall(error=f"the call is not JSON: {error}")
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        return ToolCall(error="the call is not a JSON object with a name and arguments")
    return _checked(content["name"], content.get("arguments", {}))


def _checked(name: str, arguments: Any) -> ToolCall:
    if not isinstance(arguments, dict):
        return ToolCall(name=name, error="the arguments are not a JSON object")
    return ToolCall(name=name, arguments=arguments)


def reader(name: str, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> ReadCalls:
    """Return a parser of tool calls: `read_hermes` for "hermes", else a parser of vLLM.

    Args:
        name: The setting `tool_call_parser`.

    Raises:
        ConfigError: vLLM is not installed, has no parser of this name, or the parser rejects the tokenizer.
    """
    if name == "hermes":
        return read_hermes
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise config_error("tool_call_parser", f"tool_call_parser ({name}) needs vLLM, which is not installed. Use hermes.") from error
    available = ToolParserManager.list_registered()
    if name not in available:
        raise config_error("tool_call_parser", f"Unsupported tool_call_parser ({name}). Supported: {', '.join(available)}.")
    try:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer)
    except Exception as error:
        raise config_error(
            "tool_call_parser", f"tool_call_parser ({name}) does not support this model's tokenizer: {one_line(error)}"
        ) from error
    return _Parser(parser, tools)


# Marks that begin a tool call in the formats of vLLM's parsers.
MARKS = (
    *("<tool_call", "<|tool_call", "<|python_tag|>", "[TOOL_CALLS]", "<\uff5ctool", "<function=", "<function_call", "functools["),
    *("<TOOLCALL>", "<|action_start|>", "<start_function_call>", "<minimax:tool_call", "<invoke "),
)


class _Parser:
    """Wrapper of a vLLM parser, which reports "no call" for an invalid call and is not thread-safe."""

    def __init__(self, parser: Any, tools: Sequence[Mapping[str, Any]]):
        self._parser, self._tools, self._lock = parser, list(tools), threading.Lock()
        names = "|".join(re.escape(tool["function"]["name"]) for tool in tools)
        self._begun = re.compile(rf"""\[\s*({names})\s*\(|["']name["']\s*:\s*["']({names})["']""")  # pythonic, and JSON without a mark

    def __call__(self, text: str) -> list[ToolCall]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(model="", messages=[], tools=self._tools)  # type: ignore[call-arg,arg-type]  # pydantic reads them
        try:
            with self._lock:
                extracted = self._parser.extract_tool_calls(text, request)
            calls = [self._read(call.function) for call in extracted.tool_calls] if extracted.tools_called else []
        except Exception as error:  # noqa: BLE001 - a parser may raise anything on a model's text
            return [ToolCall(error=f"the call cannot be read: {type(error).__name__}")]
        if not calls and (any(mark in text for mark in MARKS) or self._begun.search(text)):
            return [ToolCall(error="the call cannot be read")]
        return calls

    @staticmethod
    def _read(function: Any) -> ToolCall:
        try:
            arguments = parse_json(function.arguments or "{}")
        except ValueError as error:
            return ToolCall(name=function.name, error=f"the arguments are not JSON: {error}")
        return _checked(function.name, arguments)


# ---- execution of calls


class ToolEnvironment(Environment):
    """Environment that executes tool calls and returns their results as messages of role "tool".

    A turn without a call goes to the inner environment, or ends the episode if there is none. An exception of a tool becomes the content
    of its answer, so that the model can react to it. `tool_set` makes subclasses.

    Attributes:
        functions: The tools by name.
        inner: Class of the inner environment, which answers turns without a call.
        read: Parser of tool calls.
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

    def step(self, turn: Turn) -> Any:
        """Execute the tool calls of a turn, or pass the turn to the inner environment.

        Functions run in the calling thread. If a tool returns an awaitable, the result is a coroutine.
        """
        calls = type(self).read(turn.text)
        if self._inside is not None and (not calls or turn.is_last or self._are_for_inside(calls)):
            # The last turn too: the model would not read a tool's answer, and the inner environment may return a reward.
            return self._inside.step(turn)
        if not calls:
            return StepOutput(done=True)
        results = [self._begin(call) for call in calls]
        if any(inspect.isawaitable(value) for value, _ in results):
            return self._awaited(calls, results)
        return self._output(calls, results)

    def _are_for_inside(self, calls: Sequence[ToolCall]) -> bool:
        """Return whether the calls are to tools of the inner environment, which parses them itself."""
        inner_calls = [call.name for call in calls if call.name not in self.functions]
        inner_names = {tool.get("function", tool).get("name") for tool in self._inside.tools} if self._inside is not None else set()
        return len(inner_calls) == len(calls) and not inner_names.isdisjoint(inner_calls)

    def close(self) -> Any:
        return None if self._inside is None else self._inside.close()

    async def _awaited(self, calls: Sequence[ToolCall], started: Sequence[tuple[Any, bool]]) -> StepOutput:
        results = []
        for value, has_failed in started:
            if inspect.isawaitable(value):
                value, has_failed = await _outcome(value)
            results.append((value, has_failed))
        return self._output(calls, results)

    def _output(self, calls: Sequence[ToolCall], results: Sequence[tuple[Any, bool]]) -> StepOutput:
        """Build the output. An unknown tool name is replaced, since it is text of the model that a template would put into a header."""
        outputs = [(*_as_text(value), has_failed) for value, has_failed in results]
        messages = [
            {"role": "tool", "name": call.name if call.name in self.functions else "unknown", "content": text}
            for call, (text, *_) in zip(calls, outputs, strict=True)
        ]
        return StepOutput(messages=messages, metrics={"tool_calls": len(calls), "tool_errors": sum(any(failed) for _, *failed in outputs)})

    def _begin(self, call: ToolCall) -> tuple[Any, bool]:
        """Call a tool. Returns (its result or an error text, whether it failed)."""
        if call.error:
            return f"Error: {call.error}", True
        if call.name not in self.functions:
            return f"Error: no tool is called {call.name!r}; there are {', '.join(self.functions)}", True
        try:
            return self.functions[call.name](**call.arguments), False
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the error is the answer to the model
            return _error_text(error), True


async def _outcome(value: Awaitable[Any]) -> tuple[Any, bool]:
    try:
        return await value, False
    except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
        return _error_text(error), True


def _error_text(error: BaseException) -> str:
    """Format an exception for the model: for pydantic all errors with their places, since its first line only counts them."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        errors = [(".".join(map(str, detail["loc"])), detail["msg"]) for detail in error.errors(include_url=False, include_context=False)]
        return "Error: " + "; ".join(f"{location}: {text}" if location else text for location, text in errors)
    first = one_line(error, first_line)
    return f"Error: {type(error).__name__}{': ' * bool(first)}{first}"


def _as_text(value: Any) -> tuple[str, bool]:
    """Convert the return value of a tool to text. Returns (text, whether the conversion failed)."""
    failed = False
    if not isinstance(value, str):
        try:
            try:
                value = json.dumps(value, ensure_ascii=False, default=str)
            except (TypeError, ValueError, RecursionError):  # unsupported keys, or a circular reference
                value = str(value)
        except Exception as error:  # noqa: BLE001 - a user's object
            value, failed = _error_text(error), True
    return value.encode("utf-8", "replace").decode("utf-8"), failed  # lone surrogates become "?"


def tool_set(
    functions: Mapping[str, Function], *, inner: type[Environment] | None = None, read_calls: ReadCalls = read_hermes
) -> type[ToolEnvironment]:
    """Make an environment class with tools.

    Args:
        inner: Environment class that answers turns without a call; None: such a turn ends the episode.

    Raises:
        InvalidToolError: A function cannot be a tool.
    """
    from pydantic import validate_call
    from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

    schemas = [make_schema(function) for function in functions.values()]
    try:
        checked = {name: validate_call(function) for name, function in functions.items()}
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        raise InvalidToolError(f"has arguments that cannot be checked: {one_line(error)}") from error
    values = {"functions": checked, "tools": [*(inner.tools if inner else ()), *schemas], "inner": inner, "read": staticmethod(read_calls)}
    return type("Tools" if inner is None else f"{inner.__name__}WithTools", (ToolEnvironment,), values)
