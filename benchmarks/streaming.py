"""Measure the memory of a data set in a rank and the time until the first prompt, read completely and with `streaming`.

    python benchmarks/streaming.py [MEGABYTES]

Each case runs in its own process, which imports, opens a data set of the given size (default 200; rows of about 1,000 bytes) and reads
4,000 prompts. Memory is the peak of the resident set minus its size before the data set was opened. Seconds are wall-clock time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

TAKEN, LONGEST = 4000, 512
MIB = 1 << 20


class WordTokenizer:
    """Tokenizer with negligible cost: a token per word."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


def write_dataset(path: Path, size: int) -> None:
    """Write a .jsonl file of `size` megabytes."""
    row = 0
    with path.open("w") as stream:
        while stream.tell() < size * 1_000_000:
            words = " ".join(str((7919 * row + index) % 99991) for index in range(100))
            record = {"prompt": f"What comes after {words}?", "answer": row, "steps": [f"{row} and {index}" for index in range(20)]}
            stream.write(json.dumps(record) + "\n")
            row += 1


def read_peak_bytes() -> int:
    """Return the peak of this process's resident set in bytes; `getrusage` would include the parent's."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def convert_to_parquet(path: Path) -> Path:
    """Write the rows as a Parquet file with one row group, as most libraries do, and return its path."""
    import pyarrow
    from pyarrow import parquet

    rows = [json.loads(line) for line in path.open()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path.with_suffix(".parquet"), row_group_size=len(rows))
    return path.with_suffix(".parquet")


def measure(path: str, how: str) -> None:
    """Print the memory and the seconds of one case.

    Args:
        path: Path of the data set.
        how: "whole" or "streaming".
    """
    from pyarrow import parquet  # noqa: F401 - so that its memory is not counted

    from megatron_grpo.run.config.settings import DataConfig
    from megatron_grpo.run.data.prompts import open_stream

    cfg = DataConfig(dataset=path, streaming=how == "streaming", max_prompt_length=LONGEST, load_from_cache_file=False)
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    stream = open_stream(cfg, WordTokenizer(), seed=0)
    stream.take(1)
    first = time.perf_counter() - began
    stream.take(TAKEN - 1)
    seconds = time.perf_counter() - began
    peak = read_peak_bytes() - before
    form = Path(path).suffix
    print(f"{form:>8} {how:>10}: {peak / MIB:8,.0f} MiB peak, first prompt after {first:6.2f} s, {TAKEN:,} prompts after {seconds:6.2f} s")


def main() -> None:
    """Write the data set and measure all cases."""
    if len(sys.argv) == 3:
        return measure(*sys.argv[1:])
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.jsonl"
        write_dataset(path, size)
        print(f"{path.stat().st_size / 1e6:,.0f} MB in {sum(1 for _ in path.open('rb')):,} rows")
        for file in (path, convert_to_parquet(path)):
            for how in ("whole", "streaming"):
                subprocess.run([sys.executable, __file__, str(file), how], check=True)


if __name__ == "__main__":
    main()
