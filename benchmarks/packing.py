"""Measure the time of packing a million completions, individually and in groups, relative to sorting a million integers.

    python benchmarks/packing.py

CPU seconds of this process, minimum of three runs; `sorted()` is plain Python's. Quote the ratio, which depends less on the machine than
seconds do.
"""

from __future__ import annotations

import time

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_grpo.core.batching.pack import pack
from megatron_grpo.core.batching.prefix_groups import Alignment, RowColumns, pack_groups

NUM_COMPLETIONS = 1_000_000


def measure_cpu_seconds(work) -> tuple[float, object]:
    """Return (CPU seconds, result) of a function, minimum of three calls."""
    found = []
    for _ in range(3):
        start = time.process_time()
        result = work()
        found.append(time.process_time() - start)
    return min(found), result


def main() -> None:
    """Measure all cases and print the tables."""
    rng = np.random.default_rng(0)
    cases = {
        "long tail, cut at the limit": (np.clip(rng.lognormal(6.5, 1.0, NUM_COMPLETIONS), 1, 8192), 8192),
        "uniform": (rng.integers(1, 8193, NUM_COMPLETIONS), 16384),
        "no short ones": (rng.integers(200, 32769, NUM_COMPLETIONS), 32768),
    }
    table = Table("lengths", "pack, CPU s", "sorted(), CPU s", "ratio", "efficiency", title=f"{NUM_COMPLETIONS:,} completions, 8 DP ranks")
    for name, (lengths, max_tokens) in cases.items():
        lengths = lengths.astype(np.int64)
        plain = lengths.tolist()
        sorting, _ = measure_cpu_seconds(lambda plain=plain: sorted(plain))
        packing, packed = measure_cpu_seconds(lambda n=lengths, m=max_tokens: pack(n, max_tokens=m, dp_size=8, balance_length=48_000.0))
        efficiency = lengths.sum() / (sum(map(len, packed)) * max_tokens)
        table.add_row(name, f"{packing:.2f}", f"{sorting:.2f}", f"{packing / sorting:.1f}", f"{efficiency:.4f}")
    Console().print(table)
    Console().print(measure_groups(rng))


def measure_groups(rng: np.random.Generator) -> Table:
    """Return the table of packing in groups: computed tokens relative to the minimum, and the fill of micro-batches."""
    title = f"{NUM_COMPLETIONS:,} completions in groups, each prompt once in each micro-batch, 8 DP ranks"
    table = Table("groups of", "prompt", "budget", "pack, CPU s", "fewer tokens", "of possible", "efficiency", title=title)
    for size, prompt, budget in ((8, 200, 16_384), (16, 512, 16_384), (8, 1000, 65_536)):
        computed = prompt - 1 + np.clip(rng.lognormal(6.2, 0.9, NUM_COMPLETIONS), 1, 8192).astype(np.int64)

        def pack_rows(size=size, prompt=prompt, budget=budget, computed=computed):
            rows = RowColumns.from_columns(
                group=np.arange(NUM_COMPLETIONS) // size, prefix=np.full(NUM_COMPLETIONS, prompt), num_contexts=np.ones_like(computed),
                computed=computed, alignment=Alignment(), balance_length=48_000.0,
            )  # fmt: skip
            return rows, pack_groups(rows.worth(rows.group, 1 / 16), max_tokens=budget, dp_size=8)

        seconds, (rows, packed) = measure_cpu_seconds(pack_rows)
        micro_batches = [micro_batch for rank in packed for micro_batch in rank]
        pieces = sum(len(np.unique(rows.group[micro_batch])) for micro_batch in micro_batches)
        apart, tails = int(rows.apart.sum()), int(rows.tail.sum())
        found, least = tails + pieces * prompt, tails + NUM_COMPLETIONS // size * prompt
        table.add_row(
            str(size), str(prompt), f"{budget:,}", f"{seconds:.2f}", f"{apart / found:.2f} x", f"{apart / least:.2f} x",
            f"{found / (len(micro_batches) * budget):.4f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
