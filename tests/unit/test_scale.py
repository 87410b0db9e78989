"""Data that one rank receives and holds does not grow with the job, except integers: on 64, 1,024 and 16,384 simulated ranks."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.simulated_ranks import SimulatedCollectives, simulate_rollout_and_two_steps

SIZES = (64, 1024, 16384)
SHORT, LONG = 300, 700  # tokens of a completion; numbers of as many bytes
ROWS_OF_A_RANK = 2


def measure(tmp_path, size, rank, length, *, rows=None):
    rows = ROWS_OF_A_RANK * size if rows is None else rows
    world = SimulatedCollectives(size=size, rank=rank)
    found = simulate_rollout_and_two_steps(world, tmp_path / f"{size}_{rank}_{length}", length=length, groups=rows // 2)
    assert world.sent_to["completions"] <= {rank - rank % world.per_node}, "text leaves its node"
    return found


def sum_sizes(found, kind=None):
    return sum(sum(of_kind.values()) for name, of_kind in found.items() if kind in (None, name))


def measure_by_tokens(tmp_path, size, rank, **settings):
    """(bytes by kind and purpose that come and go with the length of completions, bytes of short ones)"""
    short, long = (measure(tmp_path, size, rank, length, **settings) for length in (SHORT, LONG))
    return {(kind, name): long[kind][name] - short[kind][name] for kind in short for name in short[kind]}, short


@pytest.mark.parametrize("place", ["first", "last"])
def test_rank_data_size_is_independent_of_job_size(tmp_path, place):
    looked_at = SIZES if place == "first" else SIZES[:2]
    found = {size: measure_by_tokens(tmp_path, size, 0 if place == "first" else size - 1) for size in looked_at}
    expected, smallest = found[SIZES[0]]
    assert expected["received", "verdicts, and rows to their homes"] > 0 and expected["held", "samples"] > 0
    assert (expected["received", "completions"] > 0) == (place == "first")  # of its node's other ranks
    rows = {size: ROWS_OF_A_RANK * size for size in looked_at}
    for size in looked_at[1:]:
        tokens, short = found[size]
        assert tokens == pytest.approx(expected, abs=64), f"{size} ranks"
        more = sum_sizes(short) - sum_sizes(smallest)
        assert 0 < more < 200 * (rows[size] - rows[SIZES[0]]), "integers of a row"


def test_rank_share_of_fixed_batch_decreases_with_number_of_ranks(tmp_path):
    rows = ROWS_OF_A_RANK * SIZES[1]
    found = [measure(tmp_path, size, 0, LONG, rows=rows) for size in (16, 64, SIZES[1])]
    for kind, name in (("held", "samples"), ("held", "micro-batches"), ("received", "completions")):
        sizes = [one[kind][name] for one in found]
        assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0] / 30, name


def test_simulated_rank_sizes_equal_real_ones(tmp_path):
    def body(rank, size, folder):
        from tests.simulated_ranks import SimulatedCollectives, simulate_rollout_and_two_steps

        world = SimulatedCollectives(size=size, rank=rank, per_node=2, is_real=True)
        return simulate_rollout_and_two_steps(world, folder / str(rank), length=LONG, groups=2 * size)

    real = run_ranks(body, 4, tmp_path / "real")
    for rank in range(4):
        simulated = simulate_rollout_and_two_steps(
            SimulatedCollectives(size=4, rank=rank, per_node=2), tmp_path / f"made_up_{rank}", length=LONG, groups=8
        )
        for kind in ("sent", "received", "held"):
            assert simulated[kind] == pytest.approx(real[rank][kind], rel=0.05, abs=64), (rank, kind)
