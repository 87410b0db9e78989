"""Adapters for environments of TRL, Megatron-SWIFT and verifiers.

The kind of a class is recognized by its methods, so `--environment` names such a class like any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_grpo.core.base.errors import describe_value
from megatron_grpo.plugins.environments.protocol import Environment, InvalidReplyError, Message, StepOutput, Turn
from megatron_grpo.plugins.environments.tools import ToolEnvironment, make_schema
from megatron_grpo.run.python_objects import copy_for_user


def _apply_after(value: Any, go_on: Callable[[Any], Any]) -> Any:
    """Return `go_on(value)`, or for an awaitable a coroutine that does the same.

    So blocking code stays in its thread, and async code runs on the event loop.
    """
    if not inspect.isawaitable(value):
        return go_on(value)

    async def continued() -> Any:
        result = go_on(await value)
        return await result if inspect.isawaitable(result) else result

    return continued()


class TrlEnvironment(ToolEnvironment):
    """Adapter for TRL's `environment_factory`.

    One object of the class plays one episode. `reset(**row)` may return a text, which is appended to the last message of the prompt. Public
    methods are tools. The result of `get_reward()`, if the class has it, is the reward at the end.
    """

    theirs: type

    def __init__(self, columns: Mapping[str, Any]):
        from pydantic import validate_call

        super().__init__(columns)
        self._object = type(self).theirs()
        self.functions = {name: validate_call(getattr(self._object, name)) for name in public_methods(type(self).theirs)}  # type: ignore[misc]  # set for each class

    def start(self, prompt: Sequence[Message]) -> Any:
        def opening(observation: Any) -> Sequence[Message]:
            if observation is None:
                return prompt
            if not isinstance(observation, str):
                raise InvalidReplyError(f"reset returned {describe_value(observation)}; expected a string or None")
            return [*prompt[:-1], dict(prompt[-1], content=prompt[-1]["content"] + observation)]

        return _apply_after(self._object.reset(prompt=copy_for_user(list(prompt)), **self.columns), opening)

    def step(self, turn: Turn) -> Any:
        def scored(step: StepOutput) -> Any:
            if not (step.done or turn.is_last) or not hasattr(self._object, "get_reward"):
                return step
            return _apply_after(self._object.get_reward(), lambda reward: replace(step, reward=reward))

        return _apply_after(super().step(turn), scored)

    def close(self) -> Any:
        return self._object.close() if hasattr(self._object, "close") else None


def public_methods(cls: type) -> list[str]:
    """Return the names of the methods of a TRL environment that are tools."""
    reserved = ("reset", "get_reward", "close")
    return [name for name, value in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_") and name not in reserved]


class SwiftEnvironment(Environment):
    """Adapter for Megatron-SWIFT's `Env`.

    Its methods, each of which may be async: `reset(config) -> (observation, info, system message)`,
    `step(action) -> (observation, reward, done, info)`, where the action is the messages so far, and `close()`.
    """

    theirs: type

    def __init__(self, columns: Mapping[str, Any]):
        super().__init__(columns)
        self._object = type(self).theirs(copy_for_user(columns.get("env_config") or {}))

    def start(self, prompt: Sequence[Message]) -> Any:
        def opening(returned: Any) -> Sequence[Message]:
            observation, _, system = returned
            system_messages = [message for message in prompt if message["role"] == "system"]
            head = [{"role": "system", "content": system}] if system else system_messages
            return [*head, {"role": "user", "content": observation}] if observation else [*head, *prompt[len(system_messages) :]]

        return _apply_after(self._object.reset(_SwiftConfig(self.columns, prompt)), opening)

    def step(self, turn: Turn) -> Any:
        def answer(returned: Any) -> StepOutput:
            observation, reward, done, _ = returned
            return StepOutput(messages=() if done else ({"role": "user", "content": observation},), reward=reward, done=bool(done))

        return _apply_after(self._object.step(list(turn.messages)), answer)

    def close(self) -> Any:
        return self._object.close() if hasattr(self._object, "close") else None


class _SwiftConfig:
    """Argument of Megatron-SWIFT's `reset`: a request with `messages` and `data_dict`."""

    def __init__(self, columns: Mapping[str, Any], prompt: Sequence[Message]):
        self.messages, self.data_dict = copy_for_user(list(prompt)), dict(columns)


class VerifiersEnvironment(Environment):
    """Adapter for verifiers' `MultiTurnEnv`.

    `env_response(messages, state)` returns messages, or (messages, state); `is_completed(messages, state)` ends the episode. As in
    verifiers, one object serves all episodes, and each episode has its own `state`. The rubric of the environment is not used: name a
    reward function.
    """

    theirs: Any

    def __init__(self, columns: Mapping[str, Any]):
        super().__init__(columns)
        self._state: dict[str, Any] = {"answer": columns.get("answer", ""), "info": columns.get("info") or {}, "turn": 0, **columns}

    def start(self, prompt: Sequence[Message]) -> Any:
        def opening(state: Any) -> Sequence[Message]:
            self._state = state or self._state
            return prompt

        self._state["prompt"] = copy_for_user(list(prompt))
        return _apply_after(self.theirs.setup_state(self._state) if hasattr(self.theirs, "setup_state") else None, opening)

    def step(self, turn: Turn) -> Any:
        self._state["turn"] = turn.number + 1
        messages = list(turn.messages)

        def answer(returned: Any) -> StepOutput:
            if isinstance(returned, tuple) and len(returned) == 2:
                returned, self._state = returned
            return StepOutput(messages=[{"role": "user", "content": returned}] if isinstance(returned, str) else returned)

        def unless_completed(is_completed: Any) -> Any:
            return StepOutput(done=True) if is_completed else _apply_after(self.theirs.env_response(messages, self._state), answer)

        ends = self.theirs.is_completed(messages, self._state) if hasattr(self.theirs, "is_completed") else False
        return _apply_after(ends, unless_completed)


def adapted(cls: type) -> type[Environment] | None:
    """Return an `Environment` class for a class of any supported trainer.

    Returns:
        `cls` itself if it is an `Environment`, an adapter class, or None if its kind is unknown.

    Raises:
        InvalidToolError: A method of a TRL environment cannot be a tool.
    """
    if issubclass(cls, Environment):
        return cls
    name = cls.__name__
    if _has_methods(cls, "env_response"):
        return type(name, (VerifiersEnvironment,), {"theirs": cls()})
    if _has_methods(cls, "reset", "step"):
        return type(name, (SwiftEnvironment,), {"theirs": cls})
    if _has_methods(cls, "reset"):
        schemas = [make_schema(_without_self(getattr(cls, method))) for method in public_methods(cls)]
        return type(name, (TrlEnvironment,), {"theirs": cls, "tools": schemas})
    return None


def _without_self(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the signature of a method without `self`, for its JSON schema."""
    signature = inspect.signature(method)

    def function(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError  # exists for its schema, and is never called

    function.__name__, function.__doc__ = method.__name__, method.__doc__
    function.__annotations__ = {name: hint for name, hint in inspect.get_annotations(method, eval_str=True).items()}
    function.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]  # inspect reads it
    return function


def _has_methods(cls: type, *names: str) -> bool:
    return all(callable(getattr(cls, name, None)) for name in names)
