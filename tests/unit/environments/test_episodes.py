"""From episodes to rows: rewards, failures, trained tokens, metrics, and when a run ends."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.metadata import GroupMetadata
from megatron_grpo.core.trainer.scored_rollout import EnvironmentFailuresError, check_failures
from megatron_grpo.core.types import FAULTS, Completion, EpisodeNumbers, EpisodeRecord, Group, Prompt, ScoredGroup, TokenSequence
from megatron_grpo.plugins.rewards.rule_based import build_environment
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.metrics.rollout import Completions, episode_stats
from megatron_grpo.run.rewards.protocol import RewardFunction
from megatron_grpo.run.rewards.reward_manager import RewardManager, as_batch
from tests.unit.trainer.test_rollouts import run_rollout

OPENING = ({"role": "user", "content": "q"},)
SAID = ({"role": "assistant", "content": "a"}, {"role": "user", "content": "no"}, {"role": "assistant", "content": "b"})


def make_episode(finish_reason="done", *, fault="", rewards=(0.0, 1.0), starts=(0,), seconds=0.5, **metrics) -> Completion:
    """Two turns: [prompt, prompt, drawn, heard, drawn], or two contexts of them."""
    mask = np.array([False, False, True, False, True] * len(starts))
    numbers = EpisodeNumbers(
        finish_reason=finish_reason,
        num_turns=2,
        seconds=seconds,
        metrics=metrics,
        fault=fault or ("it did" if finish_reason in FAULTS else ""),
    )
    return Completion(
        sequence=TokenSequence(token_ids=np.arange(4, 4 + len(mask)), mask=mask, starts=starts),
        logprobs=np.where(mask, -0.5, 0).astype(np.float32), text="[assistant] a", finish_reason=finish_reason, versions=((0, 2, 5),),
        record=EpisodeRecord(numbers=numbers, messages=(*OPENING, *SAID), num_opening=1, turn_rewards=rewards),
    )  # fmt: skip


def make_group(*completions: Completion, number: int = 0) -> Group:
    prompt = Prompt(number=number, row=number, raw=list(OPENING), token_ids=(4, 5), columns={"answer": "x"})
    return Group(prompt=prompt, completions=completions)


def make_reward(call, name="f") -> RewardFunction:
    return RewardFunction(name=name, function=call, timeout=10.0)


def test_episode_rewards_receive_whole_episodes_and_skip_failed_ones():
    heard = {}

    def reward(completions, messages, turn_rewards, num_turns, finish_reason, answer):
        heard.update(
            completions=completions,
            messages=messages,
            turn_rewards=turn_rewards,
            num_turns=num_turns,
            finish_reason=finish_reason,
            answer=answer,
        )
        return [1.0] * len(completions)

    failed = make_episode("error")
    [scored] = RewardManager([make_reward(reward), make_reward(lambda completions: [2.0] * len(completions), "g")])(
        [make_group(make_episode(), failed, make_episode("max_turns"))]
    )
    assert scored.rewards == ((1.0, 2.0), (None, None), (1.0, 2.0))
    assert heard == {
        "completions": [list(SAID)] * 2, "messages": [[*OPENING, *SAID]] * 2, "turn_rewards": [[0.0, 1.0]] * 2, "num_turns": [2, 2],
        "finish_reason": ["done", "max_turns"], "answer": ["x", "x"],
    }  # fmt: skip


def test_failed_episode_is_excluded_from_means_and_training():
    """Trap 6: scored 0, it would give the other seven an advantage for being there."""
    flags = iter([True, False, False, False])

    def answer(prompt, place, version):
        return replace(make_episode("error" if next(flags) else "done"), versions=((version, 2, 5),))

    rewards = {0: ((None,), (1.0,)), 1: ((1.0,), (0.0,))}
    samples, stats, rows = run_rollout(rewards, answer=answer)
    assert rows.num_masked.tolist() == [0, 2, 2, 2] and not samples[0].mask.any() and not samples[0].sampler_logprobs.any()
    assert [sample.advantage for sample in samples[:2]] == [0.0, 0.0] and samples[2].advantage > 0 > samples[3].advantage
    assert stats["reward"] == pytest.approx(2 / 3) and stats["episodes/failed"] == 1


def test_episode_ended_by_length_is_truncated_and_by_max_turns_is_not():
    verdict = GroupMetadata.from_group(
        ScoredGroup(group=make_group(make_episode("max_turns"), make_episode("length")), rewards=((1.0,), (1.0,)))
    )
    assert verdict.is_truncated == (False, True) and verdict.is_trainable == (True, True)


def make_group_metadata(*finish_reason: str) -> list[GroupMetadata]:
    return [GroupMetadata.from_group(ScoredGroup(group=make_group(make_episode(how)), rewards=((1.0,),))) for how in finish_reason]


def test_run_with_failing_episodes_raises_most_frequent_error():
    check_failures(make_group_metadata("done", "error"), 0.5)
    check_failures(make_group_metadata("done", "done"), 0.0)
    check_failures([], 0.5)
    with pytest.raises(
        EnvironmentFailuresError,
        match=r"2 of 3 episodes of a rollout failed because of an environment error .* the most frequent error \(2 times\): it did",
    ):
        check_failures(make_group_metadata("error", "timeout", "done"), 0.5)
    with pytest.raises(EnvironmentFailuresError, match="2 of 2"):
        check_failures(make_group_metadata("error", "invalid"), 1.0)
    with pytest.raises(EnvironmentFailuresError):
        run_rollout(
            {0: ((None,), (None,)), 1: ((None,), (None,))},
            answer=lambda prompt, place, version: replace(make_episode("timeout"), versions=((version, 2, 5),)),
        )


def test_environment_reward_is_discounted_sum_over_turns():
    config = Config().with_values({"turn_discount": 0.5})
    given = build_environment(config)(completions=[0] * 4, turn_rewards=[[1.0, 2.0, 4.0], [None, None, 8.0], [None], []])
    assert given == [3.0, 2.0, 0.0, 0.0]
    assert build_environment(Config())(completions=[0], turn_rewards=[[1.0, 2.0, 4.0]]) == [7.0]


def test_episode_metrics_by_hand():
    scored = ScoredGroup(
        group=make_group(make_episode(tool_calls=2.0, tool_errors=1.0), make_episode("length", starts=(0, 5), tool_calls=2.0, seconds=1.5)),
        rewards=((1.0,), (0.0,)),
    )
    stats = episode_stats([GroupMetadata.from_group(scored)])
    assert stats["episodes/turns"] == stats["episodes/turns_max"] == 2 and stats["episodes/rewritten"] == 0.5
    assert stats["episodes/drawn_tokens"] == 3.0 and stats["episodes/masked_token_share"] == pytest.approx(1 - 6 / 15)
    assert stats["episodes/environment_seconds"] == 1.0 and stats["episodes/failed"] == 0
    assert stats["episodes/ended/length"] == stats["episodes/ended/done"] == 0.5 and stats["episodes/ended/error"] == 0
    assert stats["environment/tool_calls"] == stats["tools/call_frequency"] == 2.0
    assert stats["environment/tool_errors"] == 0.5 and stats["tools/failure_frequency"] == 0.25


def test_completions_table_shows_turns_and_truncates_large_messages(tmp_path):
    from types import SimpleNamespace

    huge = make_episode("error", fault="step raised KeyError")
    record = replace(huge.record, messages=(*OPENING, {"role": "tool", "content": "x" * 10_000_000}))
    scored = ScoredGroup(group=make_group(replace(huge, record=record)), rewards=((None,),))
    found = SimpleNamespace(
        number=0,
        partial=None,
        advantages=SimpleNamespace(rewards=np.array([[np.nan]]), rewards_per_func=np.array([[[np.nan]]]), advantages=np.array([[0.0]])),
    )
    columns = Completions(tmp_path, reward_names=["f"])._columns(0, scored, found)
    [messages] = columns["messages"]
    assert len(messages) < 200_000 and json.loads(messages)[1]["content"].endswith("(10,000,000 characters)")
    assert columns["fault"] == ["step raised KeyError"] and columns["num_turns"] == [2] and columns["completion"] == ["[assistant] a"]


def test_episode_completion_ids_follow_opening_of_last_context():
    batch = as_batch([make_group(make_episode(starts=(0, 5)))])
    assert list(batch.completion_ids[0]) == [11, 12, 13]


MINE = """
from megatron_grpo.plugins.environments.protocol import Environment
class Fine(Environment):
    def step(self, turn):
        return [], 0.0, True
class Mute(Environment):
    pass
class Exits:
    raise_at_import = None
def bare(x):
    return x
"""


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"environment": "mine.py:Nothing"}, "environment: mine.py has no function 'Nothing'"),
        ({"environment": "mine.py:Mute"}, "environment mine.py:Mute has no `step`."),
        ({"environment": "mine.py:bare"}, "environment mine.py:bare is not an environment"),
        ({"environment": "mine"}, "environment (mine) must have the form path/to/file.py:name or package.module:name."),
        ({"tools": ["mine.py:bare"]}, "tools: one of mine.py:bare has no schema: Cannot generate JSON schema for bare because it has no"),
        ({"tools": ["mine.py:bare", "mine.py:bare"]}, "names two functions with the same name"),
    ],
)
def test_environment_or_tool_that_is_invalid_is_rejected_before_load(tmp_path, monkeypatch, values, sentence):
    from megatron_grpo.plugins.environments.loading import load_environment

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(ConfigError) as said:
        load_environment(Config().with_values(values))
    assert sentence in str(said.value)
    assert load_environment(Config().with_values({"environment": "mine.py:Fine"})).__name__ == "Fine"
    assert load_environment(Config()) is None


def test_chat_template_without_tool_results_is_rejected_and_rewriting_one_is_noted():
    """Trap 17: the model would answer without ever having seen the result."""
    from megatron_grpo.plugins.environments.loading import check_template
    from megatron_grpo.plugins.environments.protocol import Environment
    from megatron_grpo.plugins.environments.tools import ToolEnvironment
    from megatron_grpo.plugins.environments.trajectory import ChatTemplate
    from tests.chat_models import DROPS, TEMPLATE, chat_tokenizer

    def look(source, kind, history="template", end_ids=(2,)):
        return check_template(ChatTemplate(chat_tokenizer(source), end_ids=end_ids), kind, history=history, flag="tools")

    assert look(TEMPLATE, Environment) == look(TEMPLATE, ToolEnvironment) == look(DROPS, Environment, "sampled") == []
    assert "rewrites a turn when a message of role user follows it" in look(DROPS, Environment)[0]
    assert "Use --stop_token_ids 2." in look(TEMPLATE, Environment, end_ids=(0,))[0]
    blind = TEMPLATE.replace("message.content + '\\n</tool_response>", "'</tool_response>")
    refuses = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endfor %}" + TEMPLATE
    for source, sentence in (
        (blind, "the chat template drops messages of role tool"),
        (refuses, "rejects messages of role tool.*no tools here"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            look(source, type("T", (ToolEnvironment,), {"tools": [{}]}))
