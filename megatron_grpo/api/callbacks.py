"""Callbacks of a run, with the method names of `transformers.TrainerCallback`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_grpo.core.base.errors import config_error
from megatron_grpo.run.python_objects import copy_for_user

METHODS = ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_train_end")


@dataclass
class TrainerState:
    """State that callbacks receive.

    Args:
        global_step: Number of optimizer steps done.
        max_steps: Number of optimizer steps of the run.
        log_history: Metrics of the steps so far in this call of `train`.
        is_world_process_zero: Always true: callbacks run on rank 0, or in the program that started the ranks.
    """

    global_step: int = 0
    max_steps: int = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    is_world_process_zero: bool = True


class TrainerControl:
    """Requests of callbacks. `should_training_stop = True` saves and stops the run.

    Raises:
        ConfigError: If another attribute is set. Settings (save_steps, eval_steps, logging_steps) control the rest.
    """

    def __init__(self) -> None:
        self.should_training_stop = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "should_training_stop":
            message = f"control.{name} is not supported: callbacks can set should_training_stop alone. Use save_steps, eval_steps or "
            raise config_error("callbacks", message + "logging_steps.")
        object.__setattr__(self, name, value)


class CallbackHandler:
    """Caller of the methods that each callback has.

    Args:
        callbacks: The user's objects.
        args: Passed to each method as `args`.

    Raises:
        ConfigError: If an object has none of the supported methods, or is a class.
    """

    def __init__(self, callbacks: Sequence[Any], args: Any):
        for callback in callbacks:
            is_class = isinstance(callback, type)
            if is_class or not any(callable(getattr(callback, name, None)) for name in METHODS):
                problem = f"{callback.__name__} is a class: pass an instance" if is_class else f"{callback!r} has none of the methods"
                raise config_error("callbacks", f"callbacks: {problem}. The methods that are called: {', '.join(METHODS)}.")
        self.callbacks, self.args = list(callbacks), args
        self.state, self.control = TrainerState(), TrainerControl()

    def begin(self, max_steps: int) -> None:
        """Call `on_train_begin`, with a new state and control.

        Args:
            max_steps: Optimizer steps of the whole run.
        """
        self.state, self.control = TrainerState(max_steps=max_steps), TrainerControl()
        self._call("on_train_begin")

    def listen(self, step: int, numbers: Mapping[str, Any]) -> bool:
        """Call the methods for the metrics of a step or an evaluation, and return whether the run is to stop.

        Args:
            step: Number of optimizer steps done.
            numbers: Metrics by name. Those of an evaluation have no `num_tokens`.
        """
        self.state.global_step = step
        if "num_tokens" in numbers:
            self.state.log_history.append(dict(numbers))
            self._call("on_step_end")
            self._call("on_log", logs=dict(numbers))
        else:
            self._call("on_evaluate", metrics=dict(numbers))
        return self.control.should_training_stop

    def end(self) -> None:
        """Call `on_train_end`."""
        self._call("on_train_end")

    def _call(self, method: str, **values: Any) -> None:
        for callback in self.callbacks:
            function: Callable[..., Any] | None = getattr(callback, method, None)
            if function is not None:
                function(self.args, self.state, self.control, **copy_for_user(values))
