"""Callbacks with the method names of transformers, and requests that they cannot make."""

from __future__ import annotations

import pytest

from megatron_grpo.api.callbacks import CallbackHandler
from megatron_grpo.core.base.errors import ConfigError

STEP, SCORES = {"num_tokens": 8, "reward": 0.5}, {"eval/reward": 0.25}


class Recorder:
    def __init__(self, stops_at=None):
        self.calls, self.stops_at = [], stops_at

    def on_train_begin(self, args, state, control, **kwargs):
        self.calls.append(("begin", state.global_step, state.max_steps))

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.stops_at

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.calls.append(("log", state.global_step, logs))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.calls.append(("evaluate", state.global_step, metrics))

    def on_train_end(self, args, state, control, **kwargs):
        self.calls.append(("end", state.global_step, len(state.log_history)))


class LogOnlyCallback:
    def on_log(self, args, state, control, logs=None, **kwargs):
        assert args == "args"


def test_callback_handler_calls_existing_methods_in_order():
    recorder = Recorder()
    callbacks = CallbackHandler([recorder, LogOnlyCallback()], "args")
    callbacks.begin(2)
    assert not callbacks.listen(0, SCORES) and not callbacks.listen(1, STEP)
    callbacks.end()
    assert recorder.calls == [("begin", 0, 2), ("evaluate", 0, SCORES), ("log", 1, STEP), ("end", 1, 1)]


def test_callback_request_to_stop_is_returned():
    callbacks = CallbackHandler([Recorder(stops_at=2)], None)
    callbacks.begin(5)
    assert [callbacks.listen(step, STEP) for step in (1, 2)] == [False, True]
    callbacks.begin(5)
    assert not callbacks.listen(1, STEP)


@pytest.mark.parametrize("name", ["should_save", "should_evaluate", "should_log", "should_epoch_stop"])
def test_callback_requests_other_than_stop_are_rejected(name):
    with pytest.raises(ConfigError, match=f"control.{name} is not supported: callbacks can set should_training_stop alone"):
        setattr(CallbackHandler([], None).control, name, True)


@pytest.mark.parametrize(("bad", "why"), [(Recorder, "Recorder is a class: pass an instance"), (object(), "has none of the methods")])
def test_callback_handler_with_invalid_callback_is_rejected(bad, why):
    with pytest.raises(ConfigError, match=why):
        CallbackHandler([bad], None)
