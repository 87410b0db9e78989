"""Work of different duration on ranks may take longer than the timeout of a collective."""

from __future__ import annotations

import time

from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.parallel.layout import Layout
from megatron_grpo.core.parallel.state import start
from tests.ranks import run_ranks


def test_ranks_wait_for_a_slow_rank_beyond_the_collective_timeout():
    def run(rank, world):
        import datetime

        import torch.distributed as dist

        start(Layout(world_size=world))
        short = dist.new_group(timeout=datetime.timedelta(seconds=1.0))
        if rank == 1:
            time.sleep(3.0)  # above the group's limit of one second
        collectives.barrier_with_timeout()
        assert collectives.all_gather_object(rank, short) == [0, 1]
        if rank == 1:  # and without it
            time.sleep(3.0)  # above the group's limit of one second
        try:
            collectives.all_gather_object(rank, short)
        except RuntimeError:
            return "ended"
        return "went on"

    assert "ended" in run_ranks(run, 2)
