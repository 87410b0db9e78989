"""A push in buckets, bit by bit against shards that are put together by hand, and counted on the wire."""

from __future__ import annotations

import re
from zlib import crc32

import pytest
import torch
import torch.distributed as dist

from megatron_grpo.planning import push
from megatron_grpo.planning.tuning import Tuning
from megatron_grpo.policy.exchange import WeightExchange
from megatron_grpo.sizing.batch_sizes import BatchSizes
from megatron_grpo.weights import adapters as weights_adapters
from megatron_grpo.weights.adapters import trimmed
from megatron_grpo.weights.buckets import fill, num_collectives
from megatron_grpo.weights.lora import A
from megatron_grpo.weights.reader import HfReader
from megatron_grpo.weights.shape import ModelShape
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
BUCKETS = (8 << 10, 1 << 20)  # bytes: many, and parameters that are larger than one; one or two a stage


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def model(name):
        if name not in made:
            made[name] = write_tiny(tmp_path_factory.mktemp(name), **MODELS[name])
        return made[name]

    return model


def settings_of(model, layout, **changes):
    return cases.settings(torch_dtype=MODELS[model].get("dtype", "float32"), **cases.LAYOUTS[layout].settings, **changes)


def build(path, model, layout, world, **changes):
    return cases.build(path, settings_of(model, layout, **changes), world)


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


def collected(stream):
    """What a receiver has at the end that keeps everything it was given, as a sampler keeps what belongs to an unfinished layer."""
    return dict(stream)


def look(rank, world, path, model, layout, tamper=None):
    policy = build(path, model, layout, world)
    if tamper is not None:
        tamper()
    mine, p, read = policy.tensors(), policy.parallel, HfReader(path)
    plans = []
    for bucket_bytes in BUCKETS:
        exchange = WeightExchange(policy.exchange.map, p, bucket_bytes=bucket_bytes)
        plan = exchange.plan(mine, "weights")
        with wire() as counted:
            found = collected(exchange.stream(mine, "weights"))
        assert counted.collectives == num_collectives(plan.buckets, plan.ranks)
        assert counted.received == sum(bucket.received_bytes(plan.ranks, p.pp_rank) for bucket in plan.buckets)
        assert all(bucket.whole <= bucket_bytes or len(bucket.slots) == 1 for bucket in plan.buckets)
        same(found, {name: read(name) for name in read.names})
        # A sampler packs a layer when it is complete: whoever holds the experts, no layer is begun before the one before is done.
        layers = [int(match[1]) for name in found if (match := re.match(r"model\.layers\.(\d+)\.", name))]
        assert [layer for layer in dict.fromkeys(layers) for _ in range(layers.count(layer))] == layers
        plans.append([(bucket.stage, bucket.sizes, len(bucket.slots)) for bucket in plan.buckets])
    # Other values of mixed dtypes, where an expert, a layer or a whole stage has nothing; narrow buckets again.
    exchange.bucket_bytes = BUCKETS[0]
    for kind, what in (("some", r"(?!.*(experts\.1\.|layers\.2\.))"), ("few", r".*layers\.0\.")):
        some = drawn_like(mine, what)
        same(collected(exchange.stream(some, kind)), by_hand(exchange, some))
    return plans


def planned(path, model, layout, **changes):
    """The same plans from the model's shape alone, as `plan` makes them."""
    where = cases.LAYOUTS[layout]
    cfg = settings_of(model, layout, world_size=where.world_size, num_generations=12, global_batch_size=24, **changes)
    shape = ModelShape.from_pretrained(path)
    sizes = BatchSizes.from_config(cfg, num_layers=shape.num_layers, num_experts=shape.num_experts)
    tuning, ranks = Tuning.of(cfg, shape), push.ranks_of(sizes)
    sent = push.adapters(shape, sizes, cfg, tuning.adapters) if tuning.adapters else push.weights(shape, sizes, cfg, tuning)
    sent = list(sent)
    return [[(bucket.stage, bucket.sizes, len(bucket.slots)) for bucket in fill(sent, ranks, size)] for size in BUCKETS]


@pytest.mark.parametrize(("model", "layout"), CASES, ids=[f"{model}, {layout}" for model, layout in CASES])
def test_every_rank_gets_every_tensor_bit_for_bit_in_the_planned_collectives(models, model, layout):
    ranks = run_ranks(look, cases.LAYOUTS[layout].world_size, str(models(model)), model, layout)
    assert all(plans == planned(models(model), model, layout) for plans in ranks)


# ---- kinds -----------------------------------------------------------------------------------------------------------------------------

ADAPTED = [("dense", "TP2 SP PP2", r".*layers\.0\..*"), ("MoE", "TP2 EP2 ETP2", r".*layers\.1\.mlp\.experts\.3\..*|.*o_proj")]


def push_all_kinds(rank, world, path, model, layout, modules, tamper=None):
    """Adapters in some modules alone: a stage, or an expert rank, that has none takes part all the same."""
    policy = build(path, model, layout, world, tuner_type="lora", target_regex=modules)
    adapters, exchange = policy.adapters, policy.exchange
    exchange.bucket_bytes = adapters.exchange.bucket_bytes = BUCKETS[0]
    if tamper is not None:
        tamper()
    read = HfReader(path)
    with adapters.far_from_zero(seed=3):
        for _ in range(2):  # the second time nothing is planned
            pairs = {name: tensor.clone() for name, tensor in adapters.named()}
            gradients = {name: torch.full_like(tensor, 2.0, dtype=torch.float32) for name, tensor in adapters.tensors().items()}
            assert {name: tensor.shape for name, tensor in adapters.trimmed(gradients, "gradients")} == {
                n: t.shape for n, t in pairs.items()
            }
            same(dict(exchange.stream(policy.tensors(), "weights")), {name: read(name) for name in read.names})
            merged = dict(policy.named_weights())
        assert pairs.keys() == adapters.sizes.keys()
        same(pairs, dict(trimmed(by_hand(adapters.exchange, adapters.tensors()).items(), adapters.sizes)))
        right = weights_adapters.merged(read, pairs.__getitem__, adapters.settings, adapters.sizes)
        for name in read.names:
            assert torch.allclose(merged[name], right(name), atol=1e-5), name
            assert torch.equal(merged[name], read(name)) == (name.removesuffix(".weight") + A not in pairs), name
    return [(bucket.stage, bucket.sizes, len(bucket.slots)) for bucket in adapters.exchange.plan({}, "adapter").buckets]


@pytest.mark.parametrize(("model", "layout", "modules"), ADAPTED, ids=["a stage without", "an expert rank without"])
def test_weights_adapters_and_merged_weights_go_side_by_side(models, model, layout, modules):
    ranks = run_ranks(push_all_kinds, cases.LAYOUTS[layout].world_size, str(models(model)), model, layout, modules)
    assert all(plan == planned(models(model), model, layout, tuner_type="lora", target_regex=modules)[0] for plan in ranks)
