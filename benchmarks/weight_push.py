"""What a push of weights costs: CPU seconds beside a memcpy of the same bytes, and beside gloo alone, in the same run.

    python benchmarks/weight_push.py [rounds]

A model as the table of weights knows it, without Megatron's modules: shards drawn from names. "load" copies into a sampler's tensors when a
layer is complete, as vLLM's layer-wise reload does. CPU seconds of a rank; medians of interleaved rounds; ratios are the figures to quote.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections import Counter

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from megatron_grpo.parallel.layout import Layout
from megatron_grpo.parallel.state import start
from megatron_grpo.policy.exchange import WeightExchange
from megatron_grpo.weights.buckets import num_collectives
from megatron_grpo.weights.mapping import WeightMap
from megatron_grpo.weights.names import hf_shapes
from megatron_grpo.weights.shape import ModelShape
from tests.ranks import run_ranks
from tests.wire import wire

COMMON = dict(max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False, hidden_act="silu",
              attention_bias=False, num_attention_heads=8, num_key_value_heads=4, head_dim=64)  # fmt: skip
DENSE = COMMON | dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=32000, hidden_size=512, intermediate_size=1536,
                      num_hidden_layers=8)  # fmt: skip
MOE = COMMON | dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", vocab_size=8192, hidden_size=256, intermediate_size=512,
                    num_hidden_layers=5, num_experts=64, num_experts_per_tok=8, moe_intermediate_size=192, norm_topk_prob=True,
                    decoder_sparse_step=1, mlp_only_layers=[])  # fmt: skip
CASES = [("dense", DENSE, {}), ("dense", DENSE, dict(tp=2)), ("dense", DENSE, dict(pp=2)), ("64 experts", MOE, {}),
         ("64 experts", MOE, dict(ep=2)), ("64 experts", MOE, dict(tp=2, etp=2))]  # fmt: skip


def shards(weight_map: WeightMap, read, p) -> dict[str, torch.Tensor]:
    """What a rank holds, each shard in memory of its own."""
    found = {}
    for name in weight_map.megatron_names():
        layer, _, expert = weight_map.place(name)
        stage = min(max(layer, 0) * p.pp_size // weight_map.shape.num_layers, p.pp_size - 1)
        kind = weight_map.kind(name)
        if stage == p.pp_rank and (not kind.is_expert or expert * p.ep_size // weight_map.shape.num_experts == p.ep_rank):
            found[name] = weight_map.load(
                name, read, tp_rank=p.tp_rank, tp_size=p.tp_size, expert_tp_rank=p.etp_rank, expert_tp_size=p.etp_size
            ).clone()
    return found


def layer_of(name: str) -> str:
    match = re.match(r"model\.layers\.\d+\.", name)
    return match[0] if match else name


def measure(rank: int, world: int, config: dict, sizes: dict[str, int], rounds: int):
    p = start(Layout(world_size=world, **sizes))
    shape = ModelShape.from_hf(config)
    weight_map = WeightMap.for_shape(shape, padded_vocab_size=shape.vocab_size)
    held = {name: torch.randn(size, generator=torch.Generator().manual_seed(0)) for name, size in hf_shapes(shape).items()}
    exchange, mine = WeightExchange(weight_map, p), shards(weight_map, held.__getitem__, p)
    plan, waits_for = exchange.plan(mine, "weights"), Counter(map(layer_of, held))
    num_bytes = sum(tensor.nbytes for tensor in held.values())
    source, target = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)

    def stream() -> None:
        for _ in exchange.stream(mine, "weights"):
            pass

    def load() -> None:
        waiting: dict[str, list] = {}
        for name, tensor in exchange.stream(mine, "weights"):
            waiting.setdefault(layer_of(name), []).append((name, tensor))
            if len(waiting[layer_of(name)]) == waits_for[layer_of(name)]:
                for done, value in waiting.pop(layer_of(name)):
                    held[done].copy_(value)

    def gloo_alone() -> None:
        """The same bytes in pieces of the same size, with nothing packed and nothing taken apart."""
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
            if turn:  # the first warms up
                spent[way].append(time.process_time() - begin)
    with wire() as counted:
        stream()
    assert counted.collectives == num_collectives(plan.buckets, plan.ranks)
    return num_bytes, counted.collectives, counted.received, {way: statistics.median(times) for way, times in spent.items()}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    columns = (
        "model",
        "ranks",
        "MB",
        "collectives",
        "MB received",
        "memcpy ms",
        "gloo ms",
        "stream ms",
        "+ load ms",
        "memcpy rate",
        "gloo rate",
    )
    table = Table(*columns, title=f"one push, float32, buckets of 16 MiB, CPU time of a rank, medians of {rounds}")
    for title, config, sizes in CASES:
        world = 2 if sizes else 1
        found = run_ranks(measure, world, config, sizes, rounds, timeout=300)
        num_bytes, collectives, received, _ = found[0]
        ms = {way: 1000 * statistics.mean(one[3][way] for one in found) for way in found[0][3]}
        gloo = ms.get("gloo alone")
        layout = " ".join(f"{name.upper()}{size}" for name, size in sizes.items()) or "1"
        table.add_row(title, layout, f"{num_bytes / 1e6:.0f}", str(collectives), f"{received / 1e6:.0f}", f"{ms['memcpy']:.0f}",
                      f"{gloo:.0f}" if gloo else "-", f"{ms['stream']:.0f}", f"{ms['stream + load']:.0f}",
                      f"{ms['memcpy'] / ms['stream + load']:.2f}", f"{gloo / ms['stream']:.2f}" if gloo else "-")  # fmt: skip
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
