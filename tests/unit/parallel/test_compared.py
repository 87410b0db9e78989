"""Ranks that differ all hear the same sentence, over the store alone; those that have the same go on."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_grpo.errors import ConfigError
from megatron_grpo.parallel.compared import refuse_differences

SAME = {"lr": "0.001", "seed": "42", "The model": "qwen3 1"}


def compared(*ranks: dict[str, str]) -> list[list[str]]:
    """What each rank is told."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    told: list[list[str]] = [[] for _ in ranks]

    def compare(rank):
        own = dist.PrefixStore("one", store.clone())
        try:
            refuse_differences(own, ranks[rank], rank=rank, world_size=len(ranks))
        except ConfigError as error:
            told[rank] = [problem.message for problem in error.problems]

    threads = [threading.Thread(target=compare, args=(rank,)) for rank in range(len(ranks))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return told


def test_ranks_that_have_the_same_go_on():
    assert compared(SAME) == [[]]
    assert compared(SAME, dict(reversed(SAME.items())), SAME) == [[], [], []]


@pytest.mark.parametrize(
    "change, told",
    [
        ({"lr": "0.01"}, "lr is not the same for all ranks: rank 0 has 0.001, rank 2 has 0.01."),
        ({"The model": "qwen3 2"}, "The model is not the same for all ranks: rank 0 has qwen3 1, rank 2 has qwen3 2."),
        ({"MAX_PIXELS": "9"}, "MAX_PIXELS is not the same for all ranks: rank 0 has none, rank 2 has 9."),
    ],
)
def test_one_difference_is_one_sentence_on_all_ranks_with_rank_name_and_both_values(change, told):
    found = compared(SAME, SAME, SAME | change, SAME | change)
    assert found == [[f"{told} Give every machine the same."]] * 4


def test_what_rank_0_alone_has_and_several_differences_are_told_at_once():
    found = compared({"seed": "1", "lr": "2", "MIN_PIXELS": "3"}, {"seed": "4", "lr": "2"}, {"seed": "1", "lr": "5", "MIN_PIXELS": "3"})
    assert found[0] == found[1] == found[2]
    assert {told.partition(" is not")[0] for told in found[0]} == {"seed", "MIN_PIXELS", "lr"}
    assert "rank 0 has 3, rank 1 has none" in "".join(found[0])
