"""Measure what one rank of a large job receives and computes for a rollout and its two optimizer steps, without model and engine.

    python benchmarks/simulated_ranks.py

The training loop's own code runs as one rank of 8, 64 and 1,024; `tests/simulated_ranks.py` makes what the other ranks send. Bytes are
those of pickled objects. CPU seconds include unpickling of received objects but not making them; minimum of three runs. The first table has
the same batch for every number of ranks, the second the same number of completions per rank.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the simulated ranks of the tests

from rich.console import Console
from rich.table import Table

from tests.simulated_ranks import SimulatedCollectives, simulate_rollout_and_two_steps

RANKS, GROUP_SIZE, LENGTH = (8, 64, 1024), 8, 32  # LENGTH: tokens of a completion
GROUPS = {"the same batch": lambda ranks: 2048, "the same completions for each rank": lambda ranks: 2 * ranks}


class TimedWorld(SimulatedCollectives):
    """`World` that counts received bytes and measures its own CPU seconds."""

    seconds, num_bytes = 0.0, 0

    def all_gather_object(self, value: Any, group: Any = None) -> list[Any]:
        return self._timed(super().all_gather_object, value)

    def exchange(self, parts: dict[int, Any]) -> list[Any]:
        return self._timed(super().exchange, parts)

    def _timed(self, work: Any, value: Any) -> list[Any]:
        start = time.process_time()
        # Items are copied separately: the groups of another rank are the same object, which pickle would write only once.
        parts = [
            [pickle.loads(pickle.dumps(item, protocol=5)) for item in part] if isinstance(part, list) else part for part in work(value)
        ]
        pickled = [pickle.dumps(part, protocol=5) for part in parts]
        self.num_bytes += sum(map(len, pickled))
        self.seconds += time.process_time() - start
        return [pickle.loads(part) for part in pickled]


def measure(ranks: int, groups: int) -> tuple[int, float]:
    """Return (bytes received, CPU seconds) of a rank."""
    with tempfile.TemporaryDirectory() as folder:
        world, start = TimedWorld(size=ranks, rank=1), time.process_time()
        simulate_rollout_and_two_steps(world, Path(folder), length=LENGTH, groups=groups, group_size=GROUP_SIZE)
        return world.num_bytes, time.process_time() - start - world.seconds


def main() -> None:
    """Measure all sizes and print the tables."""
    columns = ("ranks", "completions: batch, of a rank", "received, kB", "CPU s", "us for each completion of the batch")
    for title, num_groups in GROUPS.items():
        table = Table(*columns, title=title)
        for ranks in RANKS:
            rows = num_groups(ranks) * GROUP_SIZE
            num_bytes, seconds = map(min, zip(*(measure(ranks, num_groups(ranks)) for _ in range(3)), strict=True))
            cells = f"{num_bytes / 1e3:,.0f}", f"{seconds:.3f}", f"{1e6 * seconds / rows:.1f}"
            table.add_row(f"{ranks:,}", f"{rows:,}, {rows // ranks:,}", *cells)
        Console(width=140).print(table)


if __name__ == "__main__":
    main()
