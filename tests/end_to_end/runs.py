"""Inputs of complete runs in this folder: a tiny model, a reward that it learns in seconds, and `megatron-grpo train` on forked ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tiny_models import write_tiny

# Prefers even token ids: a random model scores 0.5, and a few optimizer steps move it.
REWARD = """
def even(completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""


def write_inputs(folder: Path, *, rows: int = 40, family: str = "qwen3", **model: Any) -> list[str]:
    """Write model, data and reward into `folder`; return the flags that name them."""
    folder.mkdir(exist_ok=True)
    write_tiny(folder / "model", family, **({"layers": 2, "tied": True, "std": 0.1} | model))
    lines = [{"prompt": " ".join(str(4 + (7 * i + j) % 100) for j in range(3 + i % 4)), "answer": "x"} for i in range(rows)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "reward.py").write_text(REWARD)
    return [
        *("--model", str(folder / "model")), *("--dataset", str(folder / "data.jsonl")), *("--reward_funcs", f"{folder}/reward.py:even"),
        *("--torch_dtype", "float32"), *("--num_generations", "4"), *("--global_batch_size", "16"), *("--micro_batch_size", "4"),
        *("--max_completion_length", "8"), *("--lr", "1e-3"), *("--vllm_kv_cache_memory_mb", "64"),
    ]  # fmt: skip


def train(rank: int, world_size: int, flags: list[str], draws: bool = False) -> int:
    """Run the command on a rank. For `run_ranks`. draws: also draw plots, a third of the time of a short run."""
    from megatron_grpo.cli import main

    if not draws:
        without_plots()
    return main(["train", *flags])


def without_plots() -> None:
    """Pretend that matplotlib is not installed: plots take as long as the steps of a short run, and have their own tests."""
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # Python's own way to say that an import fails


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def call_after_steps(flags: list[str], steps: int, then: Callable[[], None]) -> None:
    """Call `then`, in a thread of this process, when the run with these flags has recorded this many optimizer steps."""
    file = Path(flags[flags.index("--output_dir") + 1]) / "metrics.jsonl"

    def watch():
        while not file.exists() or len(read_jsonl(file)) < steps:
            time.sleep(0.002)  # between two looks
        then()

    threading.Thread(target=watch, daemon=True).start()


def stop_after_steps(flags: list[str], steps: int) -> None:
    """Send this process the signal of a scheduler after this many steps."""
    call_after_steps(flags, steps, lambda: os.kill(os.getpid(), signal.SIGTERM))
