"""How long packing a million completions takes, beside sorting as many integers in plain Python in the same process.

    python benchmarks/packing.py

CPU seconds of this process; the ratio is the figure to quote, because it moves less with the machine.
"""

from __future__ import annotations

import time

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_grpo.batching.pack import pack

NUM_COMPLETIONS = 1_000_000


def cpu_seconds(work) -> tuple[float, object]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def main() -> None:
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
        sorting, _ = cpu_seconds(lambda plain=plain: sorted(plain))
        packing, packed = cpu_seconds(lambda n=lengths, m=max_tokens: pack(n, max_tokens=m, dp_size=8, even_length=48_000.0))
        efficiency = lengths.sum() / (sum(map(len, packed)) * max_tokens)
        table.add_row(name, f"{packing:.2f}", f"{sorting:.2f}", f"{packing / sorting:.1f}", f"{efficiency:.4f}")
    Console().print(table)


if __name__ == "__main__":
    main()
