"""Every rank ends with the same scored groups, or with the same error, however the work was split."""

from __future__ import annotations

import logging
import threading

import pytest

from megatron_grpo.errors import RewardError
from megatron_grpo.judge import as_batch, judge, shares
from megatron_grpo.rewards.protocol import RewardFunction
from megatron_grpo.types import Completion, Group, Prompt
from tests.ranks import run_ranks


def group(number, texts, raw="?", **columns):
    prompt = Prompt(number=number, row=100 + number, raw=raw, token_ids=(1,), columns=columns)
    completions = [Completion(token_ids=(2,) * len(text), logprobs=(0.0,) * len(text), text=text, finish_reason="stop") for text in texts]
    return Group(prompt=prompt, completions=tuple(completions), version=5)


def reward(function, on_error="raise"):
    return RewardFunction(name=function.__name__, function=function, timeout=5, on_error=on_error)


def value(completions, **columns):
    return [float(completion) for completion in completions]


def tokens(completion_ids):
    return [len(token_ids) for token_ids in completion_ids]


GROUPS = [group(number, [str(10 * number + place) for place in range(4)]) for number in range(5)]


def judge_on_threads(world_size, groups, rewards):
    """`judge` on several ranks that really exchange their results, each in a thread; returns what each gave back or raised."""
    barrier, box, results = threading.Barrier(world_size), [None] * world_size, [None] * world_size

    def rank_main(rank):
        def share(local):
            box[rank] = local
            barrier.wait(30)
            everyone = list(box)
            barrier.wait(30)
            return everyone

        try:
            results[rank] = judge(groups, rewards, rank=rank, world_size=world_size, share=share)
        except RewardError as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_one_rank_scores_every_completion_in_order():
    scored = judge(GROUPS, [reward(value), reward(tokens)])
    assert [one.group for one in scored] == GROUPS
    assert scored[2].rewards == ((20.0, 2.0), (21.0, 2.0), (22.0, 2.0), (23.0, 2.0))


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_every_rank_ends_with_the_list_of_a_single_rank(world_size):
    expected = judge(GROUPS, [reward(value), reward(tokens)])
    assert judge_on_threads(world_size, GROUPS, [reward(value), reward(tokens)]) == [expected] * world_size


def test_every_completion_is_scored_by_one_rank_only():
    calls = []

    def counting(completions):
        calls.extend(completions)
        return [0.0] * len(completions)

    judge_on_threads(3, GROUPS, [reward(counting)])
    assert sorted(calls, key=int) == [completion.text for one in GROUPS for completion in one.completions]


def test_shares_are_whole_groups_as_even_as_they_come():
    assert shares(5, 3) == [0, 1, 3, 5]
    assert shares(2, 4) == [0, 0, 1, 1, 2]


def test_an_error_on_one_rank_is_the_same_error_on_all_and_names_the_row_of_the_rollout():
    groups = [*GROUPS[:4], group(4, ["40", "41", "oops", "43"])]
    results = judge_on_threads(3, groups, [reward(value)])
    assert all(isinstance(result, RewardError) for result in results)
    assert len({str(result) for result in results}) == 1
    assert "row 18 of the rollout (data-set row 104, completion number 2), completion 'oops'" in str(results[0])


def test_ranks_of_a_real_process_group_agree():
    def rank_main(rank, world_size):
        import torch.distributed as dist

        def share(local):
            everyone = [None] * world_size
            dist.all_gather_object(everyone, local)
            return everyone

        good = judge(GROUPS, [reward(value)], rank=rank, world_size=world_size, share=share)
        try:
            judge([*GROUPS, group(5, ["no number"])], [reward(value)], rank=rank, world_size=world_size, share=share)
        except RewardError as error:
            return [one.rewards for one in good], str(error)

    first, second = run_ranks(rank_main, 2)
    assert first == second
    assert first[0] == [one.rewards for one in judge(GROUPS, [reward(value)])]
    assert "data-set row 105" in first[1]


def test_failures_that_count_as_none_are_warned_about_once_per_kind(caplog):
    function = reward(value, "none")
    with caplog.at_level(logging.WARNING):
        for text in ("first", "second"):
            scored = judge([group(0, ["1", text])], [function])
            assert scored[0].rewards == ((1.0,), (None,))
    assert [record.message.split(" raised")[0] for record in caplog.records] == ["Reward `value`"]
    assert "completion 'first'. Counted as None. Further failures of this kind (ValueError) are not reported." in caplog.text


def test_rewards_see_prompts_completions_and_columns_as_in_trl():
    chat = [{"role": "user", "content": "1+1?"}]
    batch = as_batch([group(0, ["a", "b"], raw=chat, answer=2), group(1, ["c"], level="hard")], trainer_state="state")
    assert batch.prompts == [chat, chat, "?"]
    assert batch.completions == [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "b"}], "c"]
    assert batch.columns == {"answer": [2, 2, None], "level": [None, None, "hard"]}
    assert batch.trainer_state == "state"


def warnings_of(caplog, function, batches):
    """What is said while `function` judges `batches` rollouts of eight completions."""
    groups = [group(number, ["1", "2", "3", "4"]) for number in range(2)]
    with caplog.at_level(logging.WARNING):
        for _ in range(batches):
            judge(groups, [function])
    return [record.message for record in caplog.records]


def test_a_reward_that_never_applies_is_said_once(caplog):
    def never(completions):
        return [None] * len(completions)

    assert warnings_of(caplog, reward(never), 1) == []
    assert warnings_of(caplog, reward(never), 5) == [
        "Reward `never` has given None for all 16 completions so far: it takes no part in the run. Does it find the columns it looks for?"
    ]


def test_a_reward_that_tells_nothing_apart_is_said_once(caplog):
    def constant(completions):
        return [0.5] * len(completions)

    assert warnings_of(caplog, reward(constant), 5) == [
        "Reward `constant` has given 0.5 for all 16 completions that it judged so far: it teaches nothing while that is so."
    ]


def test_nothing_is_said_of_a_reward_that_tells_completions_apart_once(caplog):
    assert warnings_of(caplog, reward(value), 5) == []
