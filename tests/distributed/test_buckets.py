"""A push in buckets, bit by bit against shards that are put together by hand, and counted on the wire."""

from __future__ import annotations

import re
from zlib import crc32

import pytest
import torch
import torch.distributed as dist

from megatron_grpo.policy.exchange import WeightExchange
from megatron_grpo.weights.reader import HfReader
from tests import parity_cases as cases
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny
from tests.wire import wire

MODELS = {
    "dense": dict(family="qwen3", tied=True, layers=4, vocab=125, hidden=72, ffn=136),
    "biases": dict(family="qwen2", layers=4, vocab=125, heads=4, head_dim=16, dtype="bfloat16"),
    "MoE": dict(family="qwen3_moe", layers=4, vocab=125, experts=4, ffn=40),
    "MLA": dict(family="deepseek_v3", layers=4, vocab=125, experts=4, dtype="bfloat16"),  # with a float32 bias in the router
}
CASES = [("dense", "1"), ("dense", "TP2"), ("dense", "PP2 VPP2"), ("biases", "TP2 SP PP2"), ("MoE", "EP2"), ("MoE", "TP2 EP2 ETP1"),
         ("MLA", "PP2 EP2"), ("MLA", "TP2 EP2 ETP2")]  # fmt: skip
NARROW = 8 << 10  # bytes: many buckets, and parameters that are larger than one


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def model(name):
        if name not in made:
            made[name] = write_tiny(tmp_path_factory.mktemp(name), **MODELS[name])
        return made[name]

    return model


def build(path, model, layout, world, **changes):
    dtype = MODELS[model].get("dtype", "float32")
    return cases.build(path, cases.settings(torch_dtype=dtype, **cases.LAYOUTS[layout].settings, **changes), world)


def by_hand(exchange, mine):
    """Hugging Face name -> full tensor, from what every rank says it holds: no groups, no buckets."""
    p, everyone = exchange.parallel, [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (p.tp_rank, p.etp_rank, {name: tensor.detach().clone() for name, tensor in mine.items()}))
    found = {}
    for name in {name for *_, held in everyone for name in held}:
        which = 1 if exchange.map.kind(name).is_expert else 0
        shards = {ranks[which]: ranks[2][name] for ranks in everyone if name in ranks[2]}
        found.update(exchange.map.export(name, [shards[rank] for rank in sorted(shards)]))
    return found


def drawn_like(tensors, what):
    """Other values, of dtypes that mix, with the same copies on every rank that holds a copy."""
    return {
        name: torch.rand(tensor.shape, generator=torch.Generator().manual_seed(crc32(name.encode()))).to(
            [torch.float32, torch.bfloat16, torch.float16][crc32(re.sub(r"\d+", "", name).encode()) % 3]
        )
        for name, tensor in tensors.items()
        if re.match(what, name)
    }


def same(found, right):
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def look(rank, world, path, model, layout):
    policy = build(path, model, layout, world)
    mine, p = policy.tensors(), policy.parallel
    for bucket_bytes in (NARROW, 1 << 20):
        exchange = WeightExchange(policy.exchange.map, p, bucket_bytes=bucket_bytes)
        plan = exchange.plan(mine, "weights")
        with wire() as counted:
            found = dict(exchange.stream(mine, "weights"))
        assert counted.collectives == sum(bucket.num_collectives(plan.ranks) for bucket in plan.buckets)
        assert counted.received == sum(bucket.received_bytes(plan.ranks, p.pp_rank) for bucket in plan.buckets)
        assert all(bucket.whole <= bucket_bytes or len(bucket.slots) == 1 for bucket in plan.buckets)
        read = HfReader(path)
        same(found, {name: read(name) for name in read.names})
        # A sampler packs a layer when it is complete: whatever the expert ranks, no layer is begun before the one before is done.
        layers = [int(match[1]) for name in found if (match := re.match(r"model\.layers\.(\d+)\.", name))]
        order = list(dict.fromkeys(layers))
        assert [layer for layer in order for _ in range(layers.count(layer))] == layers
    # Other values of mixed dtypes, where an expert, a layer or a whole stage has nothing.
    for kind, what in (("some", r"(?!.*(experts\.1\.|layers\.2\.))"), ("few", r".*layers\.0\.")):
        some = drawn_like(mine, what)
        same(dict(exchange.stream(some, kind)), by_hand(exchange, {n: t for n, t in some.items() if exchange.map.kind(n).is_exported}))
    with wire() as counted:
        stream = exchange.stream(mine, "weights")
        if rank == world - 1:
            next(stream)
            stream.close()  # and the others are not left waiting
        list(stream)
    assert counted.collectives == sum(bucket.num_collectives(plan.ranks) for bucket in plan.buckets)
    return [bucket.num_collectives(plan.ranks) for bucket in plan.buckets], counted.received


@pytest.mark.parametrize(("model", "layout"), CASES, ids=[f"{model}, {layout}" for model, layout in CASES])
def test_every_rank_gets_every_tensor_bit_for_bit_in_the_planned_collectives(models, model, layout):
    ranks = run_ranks(look, cases.LAYOUTS[layout].world_size, str(models(model)), model, layout)
    assert all(collectives == ranks[0][0] for collectives, _ in ranks)
