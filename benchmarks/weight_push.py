"""Measure the cost of a weight sync: CPU seconds relative to a memcpy of the same bytes and to plain gloo collectives.

    python benchmarks/weight_push.py [rounds]

The weights are random shards with the names of a model, without Megatron's modules. The first table syncs into a real vLLM engine on one
rank, through vLLM's reload and through the table that is learned from it; "packing" is the time of repacking weights for vLLM's CPU
kernels. The second table uses one and two ranks; "load" copies into the tensors of a sampler. Times are CPU seconds of a rank, medians of
alternating rounds. Quote the ratios.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_grpo.core.parallel.layout import Layout
from megatron_grpo.core.parallel.state import start
from megatron_grpo.core.policy.hf_export import MegatronToHF
from megatron_grpo.core.weights.buckets import TensorSlice, num_collectives
from megatron_grpo.core.weights.mapping import WeightMap
from megatron_grpo.core.weights.names import hf_shapes
from megatron_grpo.core.weights.shape import ModelShape
from tests.distributed.test_rollout import build_engine
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny
from tests.wire import wire

ENGINES = {
    "dense": dict(family="qwen3", vocab=32000, hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, ffn=1536),
    "64 experts": dict(family="qwen3_moe", vocab=8192, hidden=256, layers=5, heads=8, kv_heads=4, head_dim=64, ffn=192, experts=64),
    "dense, not repacked": dict(family="qwen3", vocab=32000, hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, ffn=1536),
    "128 tiny experts": dict(family="qwen3_moe", vocab=128, hidden=64, layers=4, ffn=32, experts=128),
}
COMMON = dict(max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False, hidden_act="silu",
              attention_bias=False, num_attention_heads=8, num_key_value_heads=4, head_dim=64)  # fmt: skip
DENSE = COMMON | dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=32000, hidden_size=512, intermediate_size=1536,
                      num_hidden_layers=8)  # fmt: skip
MOE = COMMON | dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", vocab_size=8192, hidden_size=256, intermediate_size=512,
                    num_hidden_layers=5, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=192, norm_topk_prob=True,
                    decoder_sparse_step=1, mlp_only_layers=[])  # fmt: skip
CASES = [("dense", DENSE, {}), ("dense", DENSE, dict(tp=2)), ("dense", DENSE, dict(pp=2)), ("64 experts", MOE, {}),
         ("64 experts", MOE, dict(ep=2)), ("64 experts", MOE, dict(tp=2, etp=2))]  # fmt: skip


def load_shards(weight_map: WeightMap, read, p) -> dict[str, torch.Tensor]:
    """Return the shards that a rank holds, each in its own memory.

    Args:
        weight_map: Map of the model's weights.
        read: Function that returns a tensor by its Hugging Face name.
        p: Parallel state of the rank.
    """
    found = {}
    for name in weight_map.megatron_names():
        layer, _, expert = weight_map.place(name)
        stage = min(max(layer, 0) * p.pp_size // weight_map.shape.num_layers, p.pp_size - 1)
        kind = weight_map.entry(name)
        if stage == p.pp_rank and (not kind.is_expert or expert * p.ep_size // weight_map.shape.num_experts == p.ep_rank):
            found[name] = weight_map.load(
                name, read, tp_rank=p.tp_rank, tp_size=p.tp_size, expert_tp_rank=p.etp_rank, expert_tp_size=p.etp_size
            ).clone()
    return found


class PeakMemory(TorchDispatchMode):
    """Dispatch mode that measures the peak of the bytes allocated inside and still referenced.

    Args:
        before: Tensors that existed before and are not counted.
    """

    def __init__(self, *before: torch.Tensor):
        super().__init__()
        self._before = {tensor.untyped_storage()._cdata for tensor in before}
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self._before:
                self._found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._found = {key: held for key, held in self._found.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._found.values()))
        return result


def measure(rank: int, world: int, config: dict, sizes: dict[str, int], rounds: int):
    """Return (bytes, collectives, bytes received, peak bytes, median CPU seconds by way) of a sync over `world` ranks.

    Args:
        rank: Rank of this process.
        world: Number of ranks.
        config: config.json of the model.
        sizes: Sizes of the layout.
        rounds: Number of rounds.
    """
    p = start(Layout(world_size=world, **sizes))
    shape = ModelShape.from_hf(config)
    weight_map = WeightMap.for_shape(shape, padded_vocab_size=shape.vocab_size)
    held = {name: torch.randn(size, generator=torch.Generator().manual_seed(0)) for name, size in hf_shapes(shape).items()}
    exchange, mine = MegatronToHF(weight_map, p), load_shards(weight_map, held.__getitem__, p)
    plan = exchange.plan(mine, "weights")
    num_bytes = sum(tensor.nbytes for tensor in held.values())
    source, target = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)

    def stream() -> None:
        for _ in exchange.stream(mine, "weights", in_slices=True):
            pass

    def load() -> None:
        for name, tensor in exchange.stream(mine, "weights", in_slices=True):
            if isinstance(tensor, TensorSlice):
                held[name][tensor.index].copy_(tensor.part)
            else:
                held[name].copy_(tensor)

    def gloo_alone() -> None:
        """Send the same bytes in pieces of the same size without packing."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        for at in range(0, num_bytes, exchange.bucket_bytes):
            piece = target[at : at + exchange.bucket_bytes // 2 * 2]
            piece = piece[: len(piece) // 2 * 2]
            if p.pp_size > 1:
                dist.broadcast(piece, src=0 if at < num_bytes // 2 else 1)
            else:
                gather(piece, source[at : at + len(piece) // 2])

    ways = {"memcpy": lambda: target.copy_(source), "stream": stream, "stream + load": load}
    if world > 1:
        ways["gloo alone"] = gloo_alone
    spent: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, run in ways.items():
            if world > 1:
                dist.barrier()
            begin = time.process_time()
            run()
            if turn:  # the first round is a warm-up
                spent[way].append(time.process_time() - begin)
    with wire() as counted:
        stream()
    assert counted.collectives == num_collectives(plan.buckets, plan.ranks)
    with PeakMemory(*mine.values(), *held.values()) as alive:
        load()
    return num_bytes, counted.collectives, counted.received, alive.peak, {way: statistics.median(times) for way, times in spent.items()}


def push_into_engine(rank: int, world: int, path: Path, rounds: int, is_packed: bool):
    """Return (tensors, bytes, median CPU seconds by way) of syncs into a vLLM engine of this process.

    Args:
        rank: Rank of this process.
        world: Number of ranks.
        path: Path of the model.
        rounds: Number of rounds.
        is_packed: Whether weights are repacked for oneDNN, as by default on a CPU.
    """
    from megatron_grpo.core.rollout import vllm_patches
    from megatron_grpo.core.rollout.vllm_weights import WeightLoader
    from megatron_grpo.core.weights.buckets import WeightUpdate
    from megatron_grpo.core.weights.hf_files import HfReader

    p, shape, read = start(Layout(world_size=1)), ModelShape.from_pretrained(path), HfReader(path)
    weight_map = WeightMap.for_shape(shape, padded_vocab_size=shape.vocab_size)
    exchange, mine = MegatronToHF(weight_map, p), load_shards(weight_map, read, p)
    num_bytes = sum(tensor.nbytes for tensor in mine.values())
    source, target = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
    spent: dict[str, list[float]] = {"memcpy": [], "reload": [], "table": [], "packing": []}
    packing = [0.0]

    def pack(module) -> None:
        begin = time.process_time()
        vllm_patches.pack(module)
        packing[0] += time.process_time() - begin

    if not is_packed:
        import vllm._custom_ops

        vllm._custom_ops._supports_onednn = False
    with build_engine(path, rank, world) as engine:
        loaders = {"reload": WeightLoader(), "table": WeightLoader()}
        loaders["reload"].reason, loaders["table"].pack = "this benchmark measures it", pack
        for turn in range(rounds + 2):  # the first round learns the table, the second is a warm-up
            begin = time.process_time()
            target.copy_(source)
            found = {"memcpy": time.process_time() - begin}
            for way, engine._weights in loaders.items():
                packing[0], begin = 0.0, time.process_time()
                engine.load_weights(WeightUpdate(kind="weights", version=turn, tensors=exchange.stream(mine, "weights", in_slices=True)))
                found[way] = time.process_time() - begin
            found["packing"] = packing[0]
            for way, seconds in found.items() if turn > 1 else ():
                spent[way].append(seconds)
        assert loaders["table"].table is not None
        num_tensors = len(loaders["table"].table.shapes)
    return num_tensors, num_bytes, {way: statistics.median(times) for way, times in spent.items()}


def measure_engines(rounds: int) -> Table:
    """Return the table of syncs into a real engine."""
    table = Table("model", "tensors", "MB", "memcpy ms", "vLLM's reload ms", "by the table ms", "of which packing ms",
                  "us per tensor, reload", "table", "memcpy rate, reload", "table", "without packing",
                  title=f"one sync on one rank into a real engine, float32, CPU time, medians of {rounds}")  # fmt: skip
    for title, model in ENGINES.items():
        with tempfile.TemporaryDirectory() as folder:
            num_tensors, num_bytes, seconds = run_ranks(
                push_into_engine, 1, write_tiny(folder, **model), rounds, "not repacked" not in title, timeout=300
            )[0]
        memcpy, reload, by_table, packing = (1000 * seconds[way] for way in ("memcpy", "reload", "table", "packing"))
        times = (memcpy, reload, by_table, packing, 1000 * reload / num_tensors, 1000 * (by_table - packing) / num_tensors)
        rates = (memcpy / reload, memcpy / by_table, memcpy / (by_table - packing))
        table.add_row(title, str(num_tensors), f"{num_bytes / 1e6:.0f}", *(f"{ms:.0f}" for ms in times), *(f"{rate:.2f}" for rate in rates))
    return table


def main() -> None:
    """Measure all cases and print the tables."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    console = Console(width=170)
    console.print(measure_engines(rounds))
    columns = (
        "model",
        "ranks",
        "MB",
        "collectives",
        "MB received",
        "peak MiB",
        "memcpy ms",
        "gloo ms",
        "stream ms",
        "+ load ms",
        "memcpy rate",
        "gloo rate",
    )
    table = Table(*columns, title=f"one sync, float32, buckets of 16 MiB, CPU time of a rank, medians of {rounds}")
    for title, config, sizes in CASES:
        world = 2 if sizes else 1
        found = run_ranks(measure, world, config, sizes, rounds, timeout=300)
        num_bytes, collectives, received, *_ = found[0]
        peak = max(one[3] for one in found)
        ms = {way: 1000 * statistics.mean(one[4][way] for one in found) for way in found[0][4]}
        gloo = ms.get("gloo alone")
        layout = " ".join(f"{name.upper()}{size}" for name, size in sizes.items()) or "1"
        times = (ms[way] if way in ms else None for way in ("memcpy", "gloo alone", "stream", "stream + load"))
        rates = ms["memcpy"] / ms["stream + load"], gloo / ms["stream"] if gloo else None
        table.add_row(title, layout, *(f"{count:.0f}" for count in (num_bytes / 1e6, collectives, received / 1e6, peak / 2**20)),
                      *("-" if time is None else f"{time:.0f}" for time in times),
                      *("-" if rate is None else f"{rate:.2f}" for rate in rates))  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
