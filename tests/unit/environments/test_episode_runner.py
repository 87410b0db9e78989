"""The episode runner: limits, ends, rewards, seeds and calls of the environment, on scripted turns."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from megatron_grpo.core.rollout.engine import prompt_seed
from megatron_grpo.core.rollout.turns import request_seed
from megatron_grpo.plugins.environments.episode_runner import EpisodeRunner
from megatron_grpo.plugins.environments.protocol import Environment, InvalidReplyError, StepOutput, as_messages, as_step_output
from megatron_grpo.plugins.environments.workers import WorkerPool
from tests.chat_models import DROPS
from tests.unit.environments.scripted import END, QUESTION, run_episodes


class ContinuingEnvironment(Environment):
    closed = 0

    def step(self, turn):
        return StepOutput(messages=[{"role": "user", "content": "more"}], reward=float(turn.number + 1), metrics={"calls": 2})

    def close(self):
        type(self).closed += 1


def test_episode_environment_steps_after_each_turn_with_is_last_flag():
    heard = []

    class RecordingEnvironment(Environment):
        def step(self, turn):
            heard.append((turn.number, turn.text, turn.is_last, [message["content"] for message in turn.messages]))
            return [{"role": "user", "content": "go on"}], 0.0, False

    [one], _ = run_episodes(RecordingEnvironment, lambda key, turn: f"turn {turn}", max_turns=2)
    assert heard == [(0, "turn 0", False, ["q", "turn 0"]), (1, "turn 1", True, ["q", "turn 0", "go on", "turn 1"])]
    assert one.finish_reason == "max_turns" and one.record.numbers.num_turns == 2 and not one.is_failed
    assert one.sequence.mask[-1], "what was heard after the last turn is not encoded"
    assert one.text == "[assistant] turn 0\n[user] go on\n[assistant] turn 1\n[user] go on"


def test_episode_records_rewards_per_turn_sums_metrics_and_closes_once():
    ContinuingEnvironment.closed = 0
    completions, _ = run_episodes(ContinuingEnvironment, "a", n=3)
    assert [one.record.turn_rewards for one in completions] == [(1.0, 2.0, 3.0)] * 3 and ContinuingEnvironment.closed == 3
    assert completions[0].record.numbers.metrics == {"calls": 6.0}


def test_episode_token_budget_covers_all_turns_and_truncated_turn_ends_it():
    asked = []

    class RecordingEnvironment(ContinuingEnvironment):
        def step(self, turn):
            asked.append(turn.number)
            return super().step(turn)

    tail = len("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n") - len("<|im_start|>" * 2 + "<|im_end|>") + 3
    [one], says = run_episodes(RecordingEnvironment, "a" * 9, max_completion_length=10 + tail + 5, max_turns=8)
    assert [most for *_, most in says.asked] == [15 + tail, 5], "drawn and heard are both counted"
    assert one.finish_reason == "length" and asked == [0], "half a tool call is never made"
    assert one.num_sampled == 15 and one.record.turn_rewards == (1.0, None)


def test_episode_token_budget_is_not_restored_by_rewritten_context():
    _, says = run_episodes(ContinuingEnvironment, "aaaa", template=DROPS, max_completion_length=300)
    spent = [300 - most for *_, most in says.asked]
    assert spent[0] == 0 and spent[1] > 5 + 4 and spent[2] == 2 * spent[1]


def test_episode_message_above_budget_is_recorded_but_not_encoded():
    [one], _ = run_episodes(ContinuingEnvironment, "a", max_completion_length=3)
    assert one.finish_reason == "length" and one.sequence.token_ids[one.sequence.mask].tolist()[-1] == END and one.sequence.mask[-1]
    assert one.record.messages[-1]["content"] == "more"


@pytest.mark.parametrize(
    ("count", "says"), [(200, "start returned 219 tokens, but an episode with its turns may have at most 100"), (10**7, "more than the")]
)
def test_episode_start_messages_above_budget_make_it_invalid(count, says):
    class LongOpeningEnvironment(ContinuingEnvironment):
        def start(self, prompt):
            return [{"role": "user", "content": "x" * count}]

    [one], sampler = run_episodes(LongOpeningEnvironment, "a", max_model_len=100)
    assert one.finish_reason == "invalid" and says in one.record.numbers.fault and not sampler.asked and one.version == 4
    assert not one.sequence.mask.any() and len(one.sequence.token_ids) < 100, "the row that is trained is the prompt's"


def test_episode_ends_if_environment_returns_no_messages():
    for answer in (StepOutput(reward=1.0), StepOutput(messages=[{"role": "user", "content": "bye"}], done=True), (None, 1.0, False)):
        kind = type("Ends", (Environment,), {"step": lambda self, turn, answer=answer: answer})
        [one], _ = run_episodes(kind, "a")
        assert one.finish_reason == "done" and one.record.numbers.num_turns == 1


def test_episode_with_failed_start_has_no_sampled_tokens():
    class FailingEnvironment(Environment):
        def __init__(self, columns):
            raise RuntimeError("no sandbox left")

    [one], says = run_episodes(FailingEnvironment, "a")
    assert one.record.numbers.fault == "start raised RuntimeError: no sandbox left" and one.is_failed and not says.asked
    assert not one.sequence.mask.any() and one.sequence.token_ids.tolist() and one.record.messages == ()


def test_episode_turn_seeds_differ_and_first_equals_single_turn_seed():
    """Trap 7: with one for all, every turn repeats the random numbers of the first."""
    seeds = [request_seed(7, 5, 3, turn, n=8) for turn in range(4)]
    assert seeds[0] == prompt_seed(7, 5, 8) + 3 and len(set(seeds)) == 4
    others = {
        request_seed(run, number, place, turn, n=8) for run in (1, 2) for number in range(20) for place in range(8) for turn in (1, 2)
    }
    assert len(others) == 2 * 20 * 8 * 2
    _, says = run_episodes(ContinuingEnvironment, "a", n=2)
    assert sorted(seed for _, _, seed, _ in says.asked) == [0, 1, 2, 1000, 1001, 1002]


def test_episode_open_turns_are_sent_to_new_sampler():
    """Servers that were lost cost their open turns, and no more."""
    from megatron_grpo.core.types import Prompt
    from tests.unit.environments.scripted import ScriptedSampler, make_runner_factory

    where = make_runner_factory(ContinuingEnvironment)
    ids = where.template.encode(where.template.render(QUESTION), where.template.guards())
    play = EpisodeRunner(
        where, [Prompt(number=0, row=0, raw=QUESTION, token_ids=tuple(ids), columns={})], n=2, derive_seed=lambda *key: hash(key) % 99
    )
    says = ScriptedSampler(where.template.tokenizer, lambda key, turn: f"{key[1]} {turn}")
    lost, polled = ScriptedSampler(where.template.tokenizer, says.text), [0]
    real = lost.poll

    def poll():
        polled[0] += 1
        return real() if polled[0] < 3 else []

    lost.poll = poll
    while not (lost.num_running and polled[0] > 3):
        play.advance(lost, 0.05, version=4)
    says.turns = dict(lost.turns)
    while not play.advance(says, 1.0, version=5):
        pass
    known = lost.asked[-lost.num_running :]
    assert says.asked[: len(known)] == known, "the same context, the same seed"
    [group] = play.groups()
    assert {one.finish_reason for one in group.completions} == {"max_turns"}


class SlowEnvironment(Environment):
    def step(self, turn):
        time.sleep(0.2)  # blocks, as a user's may
        return StepOutput(done=True)


def test_worker_pool_runs_calls_concurrently_up_to_limit():
    began = time.monotonic()
    run_episodes(SlowEnvironment, "a", n=16, concurrency=16)
    at_once = time.monotonic() - began
    run_episodes(SlowEnvironment, "a", n=4, concurrency=1)
    assert at_once < 3.0 and time.monotonic() - began - at_once >= 0.8  # one after the other: 3.2 s


@pytest.mark.parametrize("how", ["time.sleep(60)", "asyncio.run(asyncio.sleep(60))"])
def test_process_with_hanging_environment_exits(how):
    """Trap 14: a thread pool is joined at exit, and waits."""
    source = f"""
import asyncio, time
from megatron_grpo.plugins.environments.workers import CallTimeoutError, WorkerPool
workers = WorkerPool(concurrency=2, timeout=0.2)
workers.submit("one", lambda: {how})
[found] = workers.take(5.0)
assert isinstance(found.error, CallTimeoutError)
workers.close()
"""
    began = time.monotonic()
    assert subprocess.run([sys.executable, "-c", source], timeout=50).returncode == 0 and time.monotonic() - began < 40


def test_worker_pool_drops_late_result_of_timed_out_call():
    workers = WorkerPool(concurrency=1, timeout=0.1)
    for name in ("slow", "quick"):
        workers.submit(name, (lambda: time.sleep(0.4)) if name == "slow" else (lambda: 7))
    found = []
    while len(workers):
        found += workers.take(0.5)
    assert [(outcome.key, outcome.value) for outcome in found] == [("slow", None), ("quick", 7)]
    time.sleep(0.4)
    assert workers.take(0.05) == []
    workers.close()


@pytest.mark.parametrize(
    "value",
    ["well done", None, ([{"role": "user"}], 0.0, False), ([{"role": "user", "content": "x"}], float("inf"), False), ("x", 0.0, False),
     ([{"role": "user", "content": [{"type": "image"}]}], 0.0, False), StepOutput(metrics={"a": "b"}), StepOutput(done=1),
     (["x"], 0, False), ([{"role": "user", "content": "\ud800"}], 0.0, False), StepOutput(reward=10**400)],
)  # fmt: skip
def test_environment_step_with_invalid_return_value_raises(value):
    with pytest.raises(InvalidReplyError, match="step returned"):
        as_step_output(value)


def test_environment_rewards_accept_numbers_of_any_library():
    import numpy as np

    step = as_step_output(([], np.float32(0.5), np.bool_(True)))
    assert step.reward == 0.5 and step.done is True and as_messages([], source="start") == ()
