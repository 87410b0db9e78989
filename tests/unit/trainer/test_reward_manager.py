"""The reward manager: every rank has the same scored groups, or the same error, for any split of the work."""

from __future__ import annotations

import asyncio
import logging
import time
import tracemalloc

from megatron_grpo.core.base.errors import CancelledError, RewardError
from megatron_grpo.core.rollout.engine import make_completion
from megatron_grpo.core.types import Group, Prompt
from megatron_grpo.run.rewards.protocol import RewardFunction
from megatron_grpo.run.rewards.reward_manager import RewardManager, as_batch
from tests.ranks import run_ranks


def make_group(number, texts, raw="?", **columns):
    prompt = Prompt(number=number, row=100 + number, raw=raw, token_ids=(1,), columns=columns)
    completions = [
        make_completion((1,), (2,) * len(text), (0.0,) * len(text), text=text, finish_reason="stop", version=5) for text in texts
    ]
    return Group(prompt=prompt, completions=tuple(completions))


def make_reward(function, on_error="raise", timeout=5):
    return RewardFunction(name=function.__name__, function=function, timeout=timeout, on_error=on_error)


def value(completions, **columns):
    return [float(completion) for completion in completions]


def tokens(completion_ids):
    return [len(token_ids) for token_ids in completion_ids]


GROUPS = [make_group(number, [str(10 * number + place) for place in range(4)]) for number in range(5)]


def test_reward_manager_on_one_rank_scores_completions_in_order():
    scored = RewardManager([make_reward(value), make_reward(tokens)])(GROUPS)
    assert [one.group for one in scored] == GROUPS
    assert scored[2].rewards == ((20.0, 2.0), (21.0, 2.0), (22.0, 2.0), (23.0, 2.0))


def test_reward_manager_converts_token_ids_to_lists_on_access_only():
    """As Python integers they take ten times the memory: a function with `**columns` gets them one completion at a time."""
    long, seen = [make_group(0, ["1" * 50_000] * 8)], {}

    def all_columns(completions, **columns):
        seen.update(columns)
        return [0.0] * len(completions)

    tracemalloc.start()
    RewardManager([make_reward(all_columns)])(long)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    RewardManager([make_reward(tokens)])(long)
    assert tracemalloc.get_traced_memory()[1] > 8 * 50_000 * 8
    tracemalloc.stop()
    ids = seen["completion_ids"]
    assert ids[3] == [2] * 50_000 and len(ids) == 8 and [len(one) for one in ids[6:]] == [50_000] * 2 and ids[-1] in list(ids)


def test_reward_manager_scores_own_groups_with_default_weight_one():
    calls = []

    def counting(completions):
        calls.extend(completions)
        return [0.0] * len(completions)

    reward_manager = RewardManager([make_reward(counting), make_reward(value)])
    assert (reward_manager.names, reward_manager.reward_weights) == (["counting", "value"], [1.0, 1.0])
    assert RewardManager([make_reward(value)], [0.5]).reward_weights == [0.5]
    assert [one.group for one in reward_manager(GROUPS[1::2], positions=[1, 3])] == GROUPS[1::2]
    assert calls == [completion.text for one in GROUPS[1::2] for completion in one.completions]


def test_reward_manager_raises_error_of_one_rank_on_all_ranks():
    groups = [*GROUPS[:4], make_group(4, ["40", "41", "oops", "43"])]

    def rank_main(rank, world_size):
        reward_manager, places = RewardManager([make_reward(value)]), list(range(rank, 5, world_size))
        good = reward_manager([GROUPS[place] for place in places], positions=places)
        try:
            reward_manager([groups[place] for place in places], positions=places)
        except RewardError as error:
            return [one.rewards for one in good], str(error)

    (first, said), (second, also_said) = run_ranks(rank_main, 2)
    whole = [one.rewards for one in RewardManager([make_reward(value)])(GROUPS)]
    assert (first, second) == (whole[0::2], whole[1::2])
    assert said == also_said
    assert "row 18 of the rollout (data-set row 104, completion number 2), completion 'oops'" in said


def test_reward_manager_warns_once_per_kind_of_ignored_failure(caplog):
    function = make_reward(value, "none")
    with caplog.at_level(logging.WARNING):
        for text in ("first", "second"):
            scored = RewardManager([function])([make_group(0, ["1", text])])
            assert scored[0].rewards == ((1.0,), (None,))
    assert [record.message.split(" raised")[0] for record in caplog.records] == ["Reward `value`"]
    assert "completion 'first'. Counted as None. Further failures of this kind (ValueError) are not reported." in caplog.text


def test_reward_manager_passes_prompts_completions_and_columns_as_trl():
    chat = [{"role": "user", "content": "1+1?"}]
    batch = as_batch([make_group(0, ["a", "b"], raw=chat, answer=2), make_group(1, ["c"], level="hard")], trainer_state="state")
    assert batch.prompts == [chat, chat, "?"]
    assert batch.completions == [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "b"}], "c"]
    assert batch.columns == {"answer": [2, 2, None], "level": [None, None, "hard"]}
    assert batch.trainer_state == "state"


def test_reward_manager_cancels_slow_rewards_on_all_ranks_at_stop():
    """A function that sleeps in the interpreter, one that waits, and one that swallows what it is interrupted with; on one rank alone."""

    def rank_main(rank, world_size):
        began = time.monotonic()

        def sleeping(completions):
            while rank == 1:
                time.sleep(0.01)
            return [0.0] * len(completions)

        async def waiting(completions):
            while rank == 1:
                await asyncio.sleep(0.01)
            return [0.0] * len(completions)

        def deaf(completions):
            for _ in range(2 * (rank == 1)):
                try:
                    time.sleep(60)  # until it is given up
                except BaseException:  # noqa: BLE001 - as a user's function might
                    pass
            return sleeping(completions)

        said = []
        for function in (sleeping, waiting, deaf):
            reward_manager = RewardManager(
                [make_reward(function, timeout=60)], should_cancel=lambda: rank == 1 and time.monotonic() > began + 0.5
            )
            try:
                reward_manager(GROUPS)
            except CancelledError as cancelled:
                said.append(str(cancelled))
        return said, time.monotonic() - began

    for said, seconds in run_ranks(rank_main, 2):
        assert said == ["reward computation was cancelled"] * 3 and seconds < 30


def list_warnings(caplog, function, batches):
    """What is said while `function` judges `batches` rollouts of eight completions."""
    groups = [make_group(number, ["1", "2", "3", "4"]) for number in range(2)]
    with caplog.at_level(logging.WARNING):
        for _ in range(batches):
            reward_manager = RewardManager([function])
            reward_manager.warn_of_sameness([row for one in reward_manager(groups) for row in one.rewards])
    return [record.message for record in caplog.records]


def test_reward_manager_warns_once_of_reward_that_never_applies(caplog):
    def never(completions):
        return [None] * len(completions)

    assert list_warnings(caplog, make_reward(never), 1) == []
    assert list_warnings(caplog, make_reward(never), 5) == [
        "Reward `never` has returned None for all 16 completions so far, so it has no effect. Does it find the columns that it needs?"
    ]


def test_reward_manager_warns_once_of_constant_reward(caplog):
    def constant(completions):
        return [0.5] * len(completions)

    assert list_warnings(caplog, make_reward(constant), 5) == [
        "Reward `constant` has returned 0.5 for all 16 completions that it scored so far, so it has no effect."
    ]


def test_reward_manager_does_not_warn_of_varying_reward(caplog):
    assert list_warnings(caplog, make_reward(value), 5) == []
