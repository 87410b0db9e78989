"""Compare LoRA with training all weights: bytes held, saved and synced, and CPU seconds of a training step.

    python -m benchmarks.lora

One rank, float32. Steps of both alternate on the same stored rollout, and each pair gives a ratio. Quote the median of the ratios, which
depends less on the machine than seconds do. Bytes are those of the tensors that exist after a step.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests import parity_cases as cases
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

PAIRS = 9
MODEL = dict(vocab=2048, hidden=256, layers=6, heads=8, kv_heads=4, head_dim=32, ffn=1024)
GROUPS = tuple((32, (48, 64, 40, 56, 64, 32, 64, 24)) for _ in range(4))
RUNS = {
    "all weights": {},
    "LoRA, all-linear": {"tuner_type": "lora"},
    "LoRA, attention": {"tuner_type": "lora", "target_modules": ["linear_qkv", "linear_proj"]},
}


def sum_bytes(tensors) -> int:
    """Return the bytes of some tensors."""
    return sum(tensor.nelement() * tensor.element_size() for tensor in tensors)


def measure_bytes(policy) -> dict[str, int]:
    """Return the bytes that one rank holds, saves and syncs, by kind."""
    import torch
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    parameters = [p for chunk in policy.wrapped for p in chunk.parameters()]
    buffers = [b for chunk in policy.wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    moments = [
        tensor
        for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
        for state in part.optimizer.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    ]
    saved = policy.sharded_state_dict(is_loading=False)
    apply_factories(saved)
    return {
        "parameters, MB": sum_bytes(parameters),
        "gradients, MB": sum_bytes(b.grad_data for b in buffers),
        "optimizer, MB": sum_bytes(moments),
        "checkpoint, MB": sum_bytes(t.data for t in nested_values(saved) if isinstance(t, ShardedTensor) and t.data is not None),
        "push, MB": sum(sum_bytes([tensor]) for update in policy.updates(1, has_base=True) for _, tensor in update.tensors),
    }


def measure(rank: int, world: int, path: Path):
    """Return the bytes of each run, the CPU seconds of its steps, and the number of tokens of a step."""
    cfgs = {name: cases.settings(lora_rank=8, **changes) for name, changes in RUNS.items()}
    parallel = cases.join(cfgs["all weights"], world)
    policies = {name: cases.build(path, cfg, world, parallel) for name, cfg in cfgs.items()}
    (samples,) = cases.stored_rollout(path, groups=GROUPS, vocab=MODEL["vocab"], stale=0)
    seconds: dict[str, list[float]] = {name: [] for name in RUNS}
    for pair in range(PAIRS + 1):
        for name, policy in policies.items():
            batch = cases.make_batch(policy, samples, 0)
            start = time.process_time()
            policy.train_step(batch)
            if pair:  # the first step allocates the optimizer's state
                seconds[name].append(time.process_time() - start)
    return {name: measure_bytes(policy) for name, policy in policies.items()}, seconds, sum(len(sample.token_ids) for sample in samples)


def main() -> None:
    """Measure all runs and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_tiny(Path(folder) / "model", "qwen3", std=0.05, **MODEL)
        ((held, seconds, tokens),) = run_ranks(measure, 1, path, timeout=600)
    first = next(iter(RUNS))
    for row in held.values():
        row["parameters + gradients + optimizer, MB"] = sum(row[f"{what}, MB"] for what in ("parameters", "gradients", "optimizer"))
    table = Table(
        "",
        *RUNS,
        title=f"rank 8, float32, one rank; steps of {tokens:,} tokens, {PAIRS} pairs; in brackets the ratio to all weights",
    )
    for figure in held[first]:
        cells = [f"{row[figure] / 1e6:.3f} ({row[figure] / held[first][figure]:.3f})" for row in held.values()]
        table.add_row(figure, *cells)
    cells = []
    for times in seconds.values():
        ratios = sorted(own / full for own, full in zip(times, seconds[first], strict=True))
        spread = "" if times is seconds[first] else f", {ratios[0]:.3f} to {ratios[-1]:.3f}"
        cells.append(f"{statistics.median(times):.3f} ({statistics.median(ratios):.3f}{spread})")
    table.add_row("training step, CPU seconds", *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
