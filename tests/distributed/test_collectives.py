"""Collectives of `core.parallel` on gloo ranks: what is sent, to which ranks, and in which order."""

from __future__ import annotations

from tests.ranks import run_ranks


def test_exchange_delivers_to_named_ranks_in_sender_order():
    def body(rank, world_size):
        import numpy as np

        from megatron_grpo.core.parallel import collectives

        shared = [("from", rank), np.full(1000 * rank, rank)]
        found = collectives.exchange({1: shared, 2: shared} if rank != 1 else {0: ["alone"]})
        nothing = collectives.exchange({})
        return [part if part == ["alone"] else (part[0], len(part[1]), part is shared) for part in found], nothing

    assert run_ranks(body, 3) == [
        ([["alone"]], []),
        ([(("from", 0), 0, False), (("from", 2), 2000, False)], []),
        ([(("from", 0), 0, False), (("from", 2), 2000, True)], []),  # what a rank sends to itself is not copied
    ]


def test_gather_objects_pads_no_object_to_the_longest():
    """One rank sends 300 kB, the others a few bytes."""

    def body(rank, world_size):
        from megatron_grpo.core.parallel import collectives
        from tests.wire import wire

        mine = ["long", bytes(range(256)) * 1200] if rank == 1 else [rank, None]
        with wire() as counted:
            found = collectives.all_gather_object(mine)
        collected = collectives.gather_object(mine)
        by_rank = collectives.all_gather_object(rank, collectives.long_timeout_group())
        assert collected == (found if rank == 0 else None)
        return [one if one[0] != "long" else len(one[1]) for one in found], by_rank, counted.reduced

    for found, by_rank, reduced in run_ranks(body, 3):
        assert found == [[0, None], 307_200, [2, None]] and by_rank == [0, 1, 2]
        assert 307_200 < reduced < 307_200 + 500


def test_add_in_place_with_non_contiguous_tensor_is_an_error():
    def body(rank, world_size):
        import pytest
        import torch

        from megatron_grpo.core.parallel import collectives

        grad = torch.arange(6.0).reshape(2, 3) * (rank + 1)
        with pytest.raises(ValueError, match=r"expected a contiguous tensor, got shape \(3, 2\) with strides \(1, 3\)"):
            collectives.add_(grad.t(), None)
        return collectives.add_(grad, None).tolist(), collectives.max_(torch.tensor([float(rank)]), None).item()

    assert run_ranks(body, 2) == [([[0.0, 3.0, 6.0], [9.0, 12.0, 15.0]], 1.0)] * 2


def test_collectives_without_a_job_are_those_of_one_rank():
    from megatron_grpo.core.parallel import collectives

    assert (collectives.rank(), collectives.num_ranks(), collectives.has_job()) == (0, 1, False)
    assert collectives.all_gather_object("x") == ["x"] and collectives.broadcast_object("x") == "x"
    assert collectives.exchange({0: "x"}) == ["x"] and collectives.all_reduce_max(2.0) == 2.0
