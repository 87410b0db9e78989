"""Measure the cost of a checkpoint: time of the training loop, host memory, files, and the work of rank 0, which writes the metadata.

    python benchmarks/saving.py quickstart [steps]     time/checkpoint relative to time/step at --save_steps 1, one run per mode
    python benchmarks/saving.py real                   the save of a small model on 1, 2 and 4 gloo ranks
    python benchmarks/saving.py grids                  every rank of 64, 1,024 and 16,384 GPUs, simulated with the code that saves

The grids use the shapes of a real model, split as Megatron-Core does, and the package's own `boxes`, `divide_tensors` and
`serialize_metadata`. Bytes, pieces, files and metadata are counted. The seconds of rank 0 are measured. The seconds of a copy to the host
are computed from a rate of 50 GB/s.
"""

from __future__ import annotations

import json
import pickle
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the ranks of the tests

import torch
from rich.console import Console
from rich.table import Table

from megatron_grpo.core.policy.sharded_state import boxes
from megatron_grpo.run.checkpoint.distributed import PlacedShard, Shard, divide_tensors, serialize_metadata

TO_HOST = 50e9  # bytes per second from a GPU to pinned memory; `plan` assumes the same
HEADER = 1100  # overhead of a tensor in torch's format, in bytes
STATES = ("param", "exp_avg", "exp_avg_sq")
LATER = pickle.dumps(({"__12345_0.distcp": {"bytes": 2**30, "sha256": "0" * 64}}, "", ()))  # what a rank sends after the first save
Weight = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # name, shape of the shard, shape of the tensor, offset of the shard

MODELS = {
    "Qwen3-8B": dict(layers=36, hidden=4096, heads=32, kv=8, ffn=12288, vocab=151936, experts=0),
    "Qwen2.5-72B": dict(layers=80, hidden=8192, heads=64, kv=8, ffn=29568, vocab=152064, experts=0),
    "Qwen3-235B-A22B": dict(layers=94, hidden=4096, heads=64, kv=4, ffn=1536, vocab=151936, experts=128),
}
GRIDS = [(64, "Qwen3-8B", dict(tp=4, pp=1, ep=1)), (1024, "Qwen2.5-72B", dict(tp=8, pp=4, ep=1)),
         (16384, "Qwen3-235B-A22B", dict(tp=4, pp=2, ep=64))]  # fmt: skip


# ---- simulated ranks ---------------------------------------------------------------------------------------------------------------------


def iterate_dense_weights(m: dict, tp: int, pp: int, t: int, p: int) -> Iterator[Weight]:
    """Yield the dense weights of one rank.

    Args:
        m: Sizes of the model.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        t: Tensor-parallel rank.
        p: Pipeline-parallel rank.
    """
    hidden, width, stage = m["hidden"], 128, m["layers"] // pp

    def cut(name: str, rows: int, columns: int, by: int) -> Iterator[Weight]:
        shape = (rows // tp, columns) if by == 0 else (rows, columns // tp)
        for layer in range(stage):
            begins = (p * stage + layer, t * shape[0] if by == 0 else 0, 0 if by == 0 else t * shape[1])
            yield name, (1, *shape), (m["layers"], rows, columns), begins

    if p == 0:
        yield "embedding", (m["vocab"] // tp, hidden), (m["vocab"], hidden), (t * (m["vocab"] // tp), 0)
    yield from cut("linear_qkv", (m["heads"] + 2 * max(m["kv"], tp)) * width, hidden, 0)
    yield from cut("linear_proj", hidden, m["heads"] * width, 1)
    if not m["experts"]:
        yield from cut("linear_fc1.gate", m["ffn"], hidden, 0)
        yield from cut("linear_fc1.up", m["ffn"], hidden, 0)
        yield from cut("linear_fc2", hidden, m["ffn"], 1)
    whole = {"input_layernorm": (hidden,), "pre_mlp_layernorm": (hidden,), "q_layernorm": (width,), "k_layernorm": (width,)}
    if m["experts"]:
        whole["router"] = (m["experts"], hidden)
    for name, shape in whole.items():
        for layer in range(stage):
            yield name, (1, *shape), (m["layers"], *shape), (p * stage + layer, *(0 for _ in shape))
    if p == pp - 1:
        yield "final_layernorm", (hidden,), (hidden,), (0,)
        yield "output_layer", (m["vocab"] // tp, hidden), (m["vocab"], hidden), (t * (m["vocab"] // tp), 0)


def iterate_expert_weights(m: dict, pp: int, ep: int, p: int, e: int) -> Iterator[Weight]:
    """Yield the expert weights of one rank.

    Args:
        m: Sizes of the model.
        pp: Pipeline-parallel size.
        ep: Expert-parallel size.
        p: Pipeline-parallel rank.
        e: Expert-parallel rank.
    """
    if not m["experts"]:
        return
    stage, mine = m["layers"] // pp, m["experts"] // ep
    for layer in range(p * stage, (p + 1) * stage):
        for expert in range(e * mine, (e + 1) * mine):
            for name, shape in (("gate", (m["ffn"], m["hidden"])), ("up", (m["ffn"], m["hidden"])), ("fc2", (m["hidden"], m["ffn"]))):
                yield f"experts.{name}", (1, 1, *shape), (m["layers"], m["experts"], *shape), (layer, expert, 0, 0)


def divide_over_replicas(weights: list[Weight], size: int, replicated: set[str]) -> list[list[PlacedShard]]:
    """Return the shards that each of `size` data-parallel ranks writes.

    Args:
        weights: Weights of these ranks.
        size: Number of data-parallel ranks.
        replicated: Names of weights that another tensor-parallel rank writes.
    """
    own = [weight for weight in weights if weight[0] not in replicated]
    given = divide_tensors([[(number, 2 * prod(shape), rank == 0) for number, (_, shape, _, _) in enumerate(own)] for rank in range(size)])
    total = sum(prod(shape) for _, shape, _, _ in weights)
    length = -(-total // size)
    found: list[list[PlacedShard]] = []
    starts, at = [], 0
    for _, shape, _, _ in weights:
        starts.append(at)
        at += prod(shape)
    first = 0
    for rank in range(size):
        pieces = [Shard(own[n][0], own[n][3], own[n][1], own[n][2], torch.bfloat16) for n in given[rank]]
        begin, end = rank * length, min((rank + 1) * length, total)
        while first + 1 < len(weights) and starts[first + 1] <= begin:
            first += 1
        number = first
        while number < len(weights) and starts[number] < end:
            name, shape, whole, begins = weights[number]
            run = max(begin, starts[number]) - starts[number], min(end, starts[number] + prod(shape)) - starts[number]
            for offset, size_ in boxes(*run, shape) if name not in replicated else ():
                begins_of_box = tuple(a + b for a, b in zip(begins, offset, strict=True))
                pieces += [Shard(f"optimizer.state.{state}.{name}", begins_of_box, size_, whole, torch.float32) for state in STATES]
            number += 1
        found.append(place_shards(pieces))
    return found


def place_shards(pieces: list[Shard]) -> list[PlacedShard]:
    """Return the shards with their offsets in the rank's file."""
    result, at = [], 0
    for piece in pieces:
        length = HEADER + prod(piece.shape) * (2 if piece.dtype is torch.bfloat16 else 4)
        result.append(PlacedShard(piece, at, length))
        at += length
    return result


def simulate_grid(world: int, m: dict, tp: int, pp: int, ep: int) -> list[list[PlacedShard]]:
    """Return the shards that each rank writes; replicas share the work.

    Args:
        world: Number of ranks.
        m: Sizes of the model.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        ep: Expert-parallel size.
    """
    dp, expert_dp = world // (tp * pp), world // (pp * ep)
    ranks: list[list[PlacedShard]] = [[] for _ in range(world)]
    norms = {"input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm", "router", "final_layernorm"}
    for p in range(pp):
        for t in range(tp):
            for d, pieces in enumerate(divide_over_replicas(list(iterate_dense_weights(m, tp, pp, t, p)), dp, norms if t else set())):
                ranks[(p * dp + d) * tp + t] += pieces
        for e in range(ep if m["experts"] else 0):
            for d, pieces in enumerate(divide_over_replicas(list(iterate_expert_weights(m, pp, ep, p, e)), expert_dp, set())):
                ranks[p * dp * tp + d * ep + e] += pieces
    return ranks


def measure_grid(world: int, model: str, layout: dict) -> list[str]:
    """Return the row of one simulated grid."""
    m = MODELS[model]
    ranks = simulate_grid(world, m, **layout)
    sizes = [sum(part.length for part in pieces) for pieces in ranks]
    sent = sum(len(pickle.dumps(pieces)) for pieces in ranks)
    before = time.process_time()
    said = serialize_metadata([(f"__{rank}_0.distcp", pieces) for rank, pieces in enumerate(ranks) if pieces])
    seconds = time.process_time() - before
    tracemalloc.start()
    pickle.loads(said)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    stage = sum(prod(shape) for _, shape, _, _ in iterate_dense_weights(m, layout["tp"], layout["pp"], 0, 0))
    stage += sum(prod(shape) for _, shape, _, _ in iterate_expert_weights(m, layout["pp"], layout["ep"], 0, 0))
    return [
        f"{world:,}", f"{model}, {' '.join(f'{name.upper()}{size}' for name, size in layout.items() if size > 1)}",
        f"{statistics.median(map(len, ranks)):.0f} ({max(map(len, ranks))})", f"{sum(1 for pieces in ranks if pieces) / world:.2f}",
        f"{statistics.median(sizes) / 1e9:.3f} ({max(sizes) / 1e9:.3f})", f"{14 * stage / 1e9:.1f}", f"{max(sizes) / TO_HOST:.3f}",
        f"{len(said) / 1e6:.1f}", f"{sent / 1e6:.1f}", f"{world * len(LATER) / 1e6:.2f}", f"{seconds:.1f}", f"{memory / 1e6:.0f}",
    ]  # fmt: skip


def measure_grids() -> Table:
    """Return the table of the simulated grids."""
    counted = ("shards per rank (max)", "files per rank", "GB per rank (max)", "GB of a rank's state", "s of the copy")
    described = (".metadata, MB", "sent to rank 0 at the first save, MB", "later, MB", "written in, CPU s", "read, MB of memory")
    table = Table("GPUs", "model, layout", *counted, *described)
    for world, model, layout in GRIDS:
        table.add_row(*measure_grid(world, model, layout))
    return table


# ---- real ranks --------------------------------------------------------------------------------------------------------------------------


def measure(rank: int, world: int, folder: Path, is_async: bool):
    """Return (seconds of the call of `save`, seconds until the checkpoint is complete), medians of six saves."""
    from megatron_grpo.core.metadata import Progress
    from megatron_grpo.core.parallel import collectives
    from tests.distributed.test_checkpoint import PendingRows, Prompts, SmallPolicy, make_checkpoint_manager

    policy, keeper = SmallPolicy(world, hidden=512, bf16=True), make_checkpoint_manager(folder, async_save=is_async, save_total_limit=1)
    held, whole = [], []
    for step in range(1, 8):
        policy.step()
        collectives.wait_for_all()
        begin = time.perf_counter()
        keeper.save(Progress(step=step), PendingRows(), policy, Prompts())
        held.append(time.perf_counter() - begin)
        keeper.finish()
        whole.append(time.perf_counter() - begin)
    return statistics.median(held[1:]), statistics.median(whole[1:])


def measure_real_saves() -> Table:
    """Return the table of saves on gloo ranks."""
    from tests.ranks import run_ranks

    table = Table("ranks", "", "blocked, ms", "complete after, ms", "MB in files", "files")
    for world in (1, 2, 4):
        for is_async in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                held, whole = run_ranks(measure, world, Path(folder), is_async, timeout=600)[0]
                files = [path for path in Path(folder).rglob("iter_*/**/*") if path.is_file()]
                size = sum(path.stat().st_size for path in files)
            how = "asynchronous" if is_async else "synchronous"
            table.add_row(str(world), how, f"{held * 1e3:.0f}", f"{whole * 1e3:.0f}", f"{size / 1e6:.1f}", str(len(files)))
    return table


# ---- the quickstart ----------------------------------------------------------------------------------------------------------------------


def measure_quickstart(steps: int) -> Table:
    """Return the table of complete runs; `time/checkpoint` is all the time for which a step waited."""
    import subprocess

    table = Table("", "time/step, ms", "time/checkpoint, ms", "share", "share of the worst step", "steps without any save, ms")
    here = Path(__file__).parents[1]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "megatron_grpo", "train"]
    config = ["--config", "examples/quickstart/config.yaml", "--max_steps", str(steps), "--eval_steps", "0", "--export_hf", "false"]
    base = [sys.executable, *ranks, *config]
    medians = {}
    for name, flags in (
        ("none", []),
        ("asynchronous", ["--save_steps", "1", "--async_save", "true"]),
        ("synchronous", ["--save_steps", "1"]),
    ):
        with tempfile.TemporaryDirectory() as out:
            subprocess.run([*base, *flags, "--output_dir", out], cwd=here, check=True, stdout=subprocess.DEVNULL)
            rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()][
                2:
            ]  # the first two steps are a warm-up
        whole, waited = ([row.get(f"time/{what}", 0.0) for row in rows] for what in ("step", "checkpoint"))
        medians[name] = statistics.median(whole)
        if name != "none":
            share = sum(waited) / sum(whole)
            worst = max(one / other for one, other in zip(waited, whole, strict=True))
            step, save = statistics.median(whole) * 1e3, statistics.median(waited) * 1e3
            table.add_row(name, f"{step:.0f}", f"{save:.1f}", f"{share:.1%}", f"{worst:.1%}", f"{medians['none'] * 1e3:.0f}")
    return table


if __name__ == "__main__":
    what = sys.argv[1] if len(sys.argv) > 1 else "grids"
    made = {
        "grids": measure_grids,
        "real": measure_real_saves,
        "quickstart": lambda: measure_quickstart(int(sys.argv[2]) if len(sys.argv) > 2 else 12),
    }[what]()
    Console(width=200).print(made)
