"""Weight sync in buckets: tensors are equal bit for bit to shards that the test joins itself, and collectives and bytes are counted."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from itertools import islice
from types import SimpleNamespace
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_grpo.commands.planning import sampler as push
from megatron_grpo.commands.planning.parameters import TrainableSpec
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.policy import hf_export
from megatron_grpo.core.policy.hf_export import MegatronToHF
from megatron_grpo.core.trainer import weight_sync
from megatron_grpo.core.weights import mapping
from megatron_grpo.core.weights.adapters import trimmed
from megatron_grpo.core.weights.buckets import TensorSlice, fill, joined, num_collectives, peak_bytes
from megatron_grpo.core.weights.hf_files import HfReader
from megatron_grpo.core.weights.lora import A, B
from megatron_grpo.core.weights.names import ShardSplit
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.config.rules.batch_sizes import checked_sizes
from tests import parity_cases as cases
from tests.ranks import RanksFailed, run_ranks
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


def make_settings(model, layout, **changes):
    return cases.settings(torch_dtype=MODELS[model].get("dtype", "float32"), **cases.LAYOUTS[layout].settings, **changes)


def build(path, model, layout, world, **changes):
    return cases.build(path, make_settings(model, layout, **changes), world)


def join_shards(exchange, mine):
    """Return full tensors by Hugging Face name, from what every rank holds, without groups and buckets."""
    p, everyone = exchange.parallel, [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (p.tp_rank, p.etp_rank, {name: tensor.detach().clone() for name, tensor in mine.items()}))
    found = {}
    for name in {name for *_, held in everyone for name in held}:
        which = 1 if exchange.map.entry(name).is_expert else 0
        shards = {ranks[which]: ranks[2][name] for ranks in everyone if name in ranks[2]}
        found.update(exchange.map.export(name, [shards[rank] for rank in sorted(shards)]))
    return found


def draw_like(tensors, what):
    """Return random tensors of mixed dtypes, equal on all ranks that hold a copy."""
    return {
        name: torch.rand(tensor.shape, generator=torch.Generator().manual_seed(crc32(name.encode()))).to(
            [torch.float32, torch.bfloat16, torch.float16][crc32(re.sub(r"\d+", "", name).encode()) % 3]
        )
        for name, tensor in tensors.items()
        if re.match(what, name)
    }


def assert_equal(found, right):
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def collect_tensors(stream):
    """Return all tensors of a receiver that keeps what it was given, like a sampler keeps parts of an incomplete layer."""
    return dict(stream)


def inspect_streams(rank, world, path, model, layout, tamper=None):
    policy = build(path, model, layout, world)
    if tamper is not None:
        tamper()
    mine, p, read = policy.tensors(), policy.parallel, HfReader(path)
    plans = []
    for bucket_bytes in BUCKETS:
        exchange = MegatronToHF(policy.exchange.map, p, bucket_bytes=bucket_bytes)
        plan = exchange.plan(mine, "weights")
        with wire() as counted:
            found = collect_tensors(exchange.stream(mine, "weights"))
        assert counted.collectives == num_collectives(plan.buckets, plan.ranks)
        assert counted.received == sum(bucket.received_bytes(plan.ranks, p.pp_rank) for bucket in plan.buckets)
        for bucket in plan.buckets:
            units = [slot.end - slot.begin for slot in bucket.slots if plan.ranks.travels(slot.part)]
            assert bucket.num_bytes == bucket.memory_bytes(plan.ranks) <= bucket_bytes or units == [1]
        assert_equal(found, {name: read(name) for name in read.names})
        sliced = list(exchange.stream(mine, "weights", in_slices=True))
        assert_equal(dict(joined(sliced)), found)
        assert world == 1 or bucket_bytes > BUCKETS[0] or any(isinstance(tensor, TensorSlice) for _, tensor in sliced)
        assert [sum(tensor.nbytes for name, tensor in sliced if name == one) for one in found] == [found[one].nbytes for one in found]
        first = MegatronToHF(policy.exchange.map, p, bucket_bytes=bucket_bytes, gather=True)
        assert_equal(collect_tensors(first.stream(mine, "weights")), found if rank == 0 else {})
        # A sampler packs a layer when it is complete: whoever holds the experts, no layer is begun before the one before is done.
        layers = [int(match[1]) for name in found if (match := re.match(r"model\.layers\.(\d+)\.", name))]
        assert [layer for layer in dict.fromkeys(layers) for _ in range(layers.count(layer))] == layers
        plans.append([(bucket.stage, bucket.sizes, len(bucket.slots)) for bucket in plan.buckets])
    # Other values of mixed dtypes, where an expert, a layer or a whole stage has nothing; narrow buckets again.
    exchange.bucket_bytes = first.bucket_bytes = BUCKETS[0]
    for kind, what in (("some", r"(?!.*(experts\.1\.|layers\.2\.))"), ("few", r".*layers\.0\.")):
        some = draw_like(mine, what)
        right = join_shards(exchange, some)
        assert_equal(collect_tensors(exchange.stream(some, kind)), right)
        assert_equal(collect_tensors(first.stream(some, kind)), right if rank == 0 else {})
    return plans


def make_plans(path, model, layout, **changes):
    """Return the same plans from the model's shape alone, like `plan`."""
    where = cases.LAYOUTS[layout]
    cfg = make_settings(model, layout, world_size=where.world_size, num_generations=12, global_batch_size=24, **changes)
    shape = ModelShape.from_pretrained(path)
    sizes = checked_sizes(cfg, num_layers=shape.num_layers, num_experts=shape.num_experts)
    tuning, ranks = TrainableSpec.from_config(cfg, shape), push.count_ranks(sizes)
    sent = push.adapters(shape, sizes, cfg, tuning) if tuning.adapter_size else push.weights(shape, sizes, cfg, tuning)
    sent = list(sent)
    return [[(bucket.stage, bucket.sizes, len(bucket.slots)) for bucket in fill(sent, ranks, size)] for size in BUCKETS]


@pytest.mark.parametrize(("model", "layout"), CASES, ids=[f"{model}, {layout}" for model, layout in CASES])
def test_weight_stream_gives_each_rank_exact_tensors_in_planned_collectives(models, model, layout):
    ranks = run_ranks(inspect_streams, cases.LAYOUTS[layout].world_size, str(models(model)), model, layout)
    assert all(plans == make_plans(models(model), model, layout) for plans in ranks)


def stream_to_rank_0(rank, world, path, layout):
    """Return bytes that each rank sends and receives if only rank 0 gets the tensors; the second stream stops after three."""
    policy = build(path, "dense", layout, world)
    exchange = MegatronToHF(policy.exchange.map, policy.parallel, bucket_bytes=BUCKETS[0], gather=True)
    mine, moved = policy.tensors(), {"sent": 0, "received": 0}
    exchange.plan(mine, "weights")
    send, receive = collectives.send, collectives.start_receive
    collectives.send = lambda tensor, to: (moved.update(sent=moved["sent"] + tensor.nbytes), send(tensor, to))
    collectives.start_receive = lambda tensor, source: (moved.update(received=moved["received"] + tensor.nbytes), receive(tensor, source))[
        1
    ]
    with wire() as counted:
        for most in (3, None):
            stream = exchange.stream(mine, "weights")
            found = dict(islice(stream, most))
            stream.close()
            assert len(found) == ((most or len(HfReader(path).names)) if rank == 0 else 0)
    assert counted.collectives == 0
    return moved


def test_weight_stream_to_rank_0_uses_only_ranks_of_the_first_pipeline(models):
    path, layout = str(models("dense")), "TP2 SP DP2"
    where = cases.LAYOUTS[layout]
    cfg = make_settings("dense", layout, world_size=where.world_size, num_generations=12, global_batch_size=24, vllm_mode="server")
    shape = ModelShape.from_pretrained(path)
    sizes = checked_sizes(cfg, num_layers=shape.num_layers, num_experts=0)
    told = push.sync_traffic(shape, sizes, cfg, TrainableSpec.from_config(cfg, shape))
    own = sum(read.nbytes for read in map(HfReader(path), HfReader(path).names))
    first, second, *others = run_ranks(stream_to_rank_0, 4, path, layout)
    assert first["sent"] == 0 and first["received"] == second["sent"] and second["received"] == 0
    assert 0.9 * own < second["sent"] < 1.3 * own  # twice half of what is cut, without what is whole on each, and what is padded
    assert told["collectives"] == 0 and 2 * told["received_bytes"] == first["received"]
    assert others == [{"sent": 0, "received": 0}] * 2


# ---- kinds -----------------------------------------------------------------------------------------------------------------------------

IN_ONE_STAGE = ("dense", "PP2", r".*layers\.0\..*")
ADAPTED = [("dense", "TP2 SP PP2", r".*layers\.0\..*"), ("MoE", "TP2 EP2 ETP2", r".*layers\.1\.mlp\.experts\.3\..*|.*o_proj")]


def push_all_kinds(rank, world, path, model, layout, modules, tamper=None):
    """Stream adapters in some modules only: a stage or an expert rank without adapters takes part."""
    policy = build(path, model, layout, world, tuner_type="lora", target_regex=modules)
    adapters, exchange = policy.adapters, policy.exchange
    exchange.bucket_bytes = adapters.exchange.bucket_bytes = BUCKETS[0]
    if tamper is not None:
        tamper()
    read = HfReader(path)
    adapters.randomize(seed=3)
    for _ in range(2):  # the second time nothing is planned
        pairs = {name: tensor.clone() for name, tensor in adapters.named()}
        gradients = {name: tensor.double() for name, tensor in adapters.tensors().items()}
        assert_equal(dict(adapters.trimmed(gradients, "gradients")), {name: tensor.double() for name, tensor in pairs.items()})
        assert_equal(dict(exchange.stream(policy.tensors(), "weights")), {name: read(name) for name in read.names})
        merged = dict(policy.named_weights())
    assert pairs.keys() == adapters.sizes.keys()
    assert_equal(pairs, dict(trimmed(join_shards(adapters.exchange, adapters.tensors()).items(), adapters.sizes)))
    for name in read.names:
        module = name.removesuffix(".weight")
        change = adapters.settings.compute_lora_scale(module) * (pairs[module + B] @ pairs[module + A]) if module + A in pairs else 0
        assert torch.allclose(merged[name], read(name) + change, atol=1e-5), name
        assert torch.equal(merged[name], read(name)) == (name.removesuffix(".weight") + A not in pairs), name
    return [(bucket.stage, bucket.sizes, len(bucket.slots)) for bucket in adapters.exchange.plan({}, "adapter").buckets]


def plan_kinds(rank, world, path, model, layout, modules, tamper=None):
    """Return the number of collectives of planning on each rank, which must be equal (it is 0), or some ranks wait for ever."""
    adapters = build(path, model, layout, world, tuner_type="lora", target_regex=modules).adapters
    if tamper is not None:
        tamper()
    spoken, all_gather = [], collectives.all_gather_object
    collectives.all_gather_object = lambda value, group=None: spoken.append(value) or [value]
    mine = adapters.tensors()
    for _ in range(2):
        adapters.exchange.plan(mine, "adapter")
        adapters.exchange.plan({name: tensor.double() for name, tensor in mine.items()}, "gradients")
    assert bool(mine) == (rank == 0)
    assert set(all_gather(len(spoken))) == {6}


def test_weight_stream_plan_includes_stage_without_adapters(models):
    run_ranks(plan_kinds, 2, str(models("dense")), *IN_ONE_STAGE)


@pytest.mark.parametrize(("model", "layout", "modules"), ADAPTED, ids=["a stage without", "an expert rank without"])
def test_weight_stream_weights_adapters_and_merged_weights_are_exact(models, model, layout, modules):
    ranks = run_ranks(push_all_kinds, cases.LAYOUTS[layout].world_size, str(models(model)), model, layout, modules)
    assert all(plan == make_plans(models(model), model, layout, tuner_type="lora", target_regex=modules)[0] for plan in ranks)


# ---- a receiver that stops, and one that takes its time --------------------------------------------------------------------------------


def stop_early(rank, world, path, tamper=None):
    """Stop streams: one rank fails before the first tensor while another takes three; then one takes one tensor, the other all."""
    policy = build(path, "MoE", "TP2 EP2 ETP1", world)
    policy.exchange.bucket_bytes = BUCKETS[0]
    if tamper is not None:
        tamper()

    class Holder:
        has_base = True

        def load_weights(self, update):
            if rank == 0:
                raise OSError("no room")
            self.found = dict(islice(update.tensors, 3))

    holder = Holder()
    plan = policy.exchange.plan(policy.tensors(), "weights")
    with wire() as counted:
        with pytest.raises(OSError) if rank == 0 else contextlib.nullcontext():
            weight_sync.sync(policy, holder, version=1, verify=False)
        stream = policy.named_weights()
        next(stream)
        if rank == world - 1:
            stream.close()
        assert bool(list(stream)) == (rank < world - 1)
    of_finite_check = 2  # sizes and names of weights that are not finite, before a push that nobody verifies
    assert counted.collectives == 2 * num_collectives(plan.buckets, plan.ranks) + of_finite_check
    assert rank == 0 or len(holder.found) == 3


def test_weight_stream_receiver_that_stops_early_blocks_no_rank(models):
    run_ranks(stop_early, 2, str(models("MoE")))


def hold_one(rank, world, path, model, layout, tamper=None):
    """Return the memory of a receiver that holds one tensor at a time, a view of a bucket: two buckets and no third."""
    policy = build(path, model, layout, world)
    policy.exchange.bucket_bytes = bucket_bytes = 64 << 10
    plan = policy.exchange.plan(policy.tensors(), "weights")
    if tamper is not None:
        tamper()
    start, broadcast, taken, most = collectives.start_gather, collectives.from_member_, [], 0

    def take(self, num_bytes):
        nonlocal most
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        taken.append((StorageWeakRef(memory.untyped_storage()), num_bytes))
        most = max(most, sum(size for one, size in taken if not one.expired()))
        return memory

    def gathered(rows, group):
        theirs = rows.clone()  # gloo's own threads let go of theirs when they like
        start(theirs, group).wait()
        rows.copy_(theirs)
        return SimpleNamespace(wait=lambda: None)

    hf_export.BucketMemory.take, collectives.start_gather = take, gathered
    collectives.from_member_ = lambda tensor, member, group: tensor.copy_(broadcast(tensor.clone(), member, group))
    [update] = policy.updates(1, has_base=True)
    live, names = {tensor.untyped_storage()._cdata for tensor in policy.tensors().values()}, []
    for name, tensor in update.tensors:
        part, in_buckets = getattr(tensor, "part", tensor), {memory.cdata for memory, _ in taken}
        assert part.nbytes <= bucket_bytes // 16 or part.untyped_storage()._cdata in live | in_buckets, name
        names.append(name)
    assert len(names) > len(plan.buckets) > 4
    assert 1.4 * bucket_bytes < most <= 2 * bucket_bytes, most
    assert most <= peak_bytes(plan.buckets, plan.ranks)


@pytest.mark.parametrize("layout", ["EP2", "PP2", "TP2 EP2 ETP1", "PP2 EP2"])
def test_weight_stream_holds_at_most_two_buckets(models, layout):
    run_ranks(hold_one, cases.LAYOUTS[layout].world_size, str(models("MoE")), "MoE", layout)


# ---- each of these must be noticed -----------------------------------------------------------------------------------------------------


def delay_transfers():
    """Delay transfers. This is no fault: nothing is read before it was waited for, as on a slow network."""
    start = collectives.start_gather

    def late(rows, group):
        start(rows, group).wait()
        right = rows.clone()
        rows.zero_()
        return SimpleNamespace(wait=lambda: rows.copy_(right))

    collectives.start_gather = late


def skip_waits():
    delay_transfers()
    hf_export.PendingBucket.wait = lambda self: None


def reuse_bucket():
    memory = {}
    hf_export.BucketMemory.take = lambda self, num_bytes: memory.setdefault(num_bytes, torch.empty(num_bytes, dtype=torch.uint8))


def send_from_first_stage():
    broadcast = collectives.from_member_
    collectives.from_member_ = lambda tensor, member, group: broadcast(tensor, 0, group)


def reorder_expert_ranks():
    start = hf_export.WeightSyncPlan.__init__

    def turned(self, *args, **kwargs):
        start(self, *args, **kwargs)
        self._row = dict(zip(self._row, reversed(self._row.values()), strict=True))

    hf_export.WeightSyncPlan.__init__ = turned


def order_experts_by_rank():
    in_order = hf_export.MegatronToHF._owned

    def by_rank(self, name, tensor):
        one = in_order(self, name, tensor)
        return dataclasses.replace(one, place=(one.expert_rank * 1000 + one.place[0], *one.place[1:]))

    hf_export.MegatronToHF._owned = by_rank


def stack_gate_and_up():
    slices = mapping._slices
    mapping._slices = lambda cut, *args: slices(ShardSplit.COLUMN if cut is ShardSplit.GATED_COLUMN else cut, *args)


def drop_slice_offsets():
    hf_export._sliced = lambda tensor, slot: tensor[: slot.rows[1] - slot.rows[0]] if slot.is_slice else tensor


def skip_merge():
    hf_export.LocalTensors.tensor = lambda self, name, slot: self._mine[name].detach()


def merge_all():
    stream = hf_export.MegatronToHF.stream
    hf_export.MegatronToHF.stream = lambda self, mine, kind, prepare=None, **how: stream(
        self, mine, kind, prepare=lambda t: t * 1.01, **how
    )


def plan_by_local_tensors():
    plan = hf_export.MegatronToHF.plan
    hf_export.MegatronToHF.plan = lambda self, mine, kind: plan(self, mine, str(sorted((n, t.dtype) for n, t in mine.items())))


def leave_on_stop():
    def stream(self, mine, prepare, in_slices=False):
        own = self._own(mine, prepare)
        for bucket in self.buckets:
            yield from self._unpack(self._send(bucket, own), own, in_slices)

    hf_export.WeightSyncPlan.stream = torch.no_grad()(stream)


def leave_on_failure():
    weight_sync._CountingIterator.finish = lambda self: None


def send_without_room():
    def stream(self, mine, prepare, in_slices=False):
        own, ahead = self._own(mine, prepare), []
        for bucket in self.buckets:
            ahead.append(self._send(bucket, own))
            if len(ahead) == 2:
                yield from self._unpack(ahead.pop(0), own, in_slices)
        yield from self._unpack(ahead.pop(), own, in_slices)

    hf_export.WeightSyncPlan.stream = torch.no_grad()(stream)


WRONG = {
    skip_waits: (inspect_streams, "MoE", "EP2"),
    reuse_bucket: (inspect_streams, "MoE", "EP2"),
    send_from_first_stage: (inspect_streams, "dense", "PP2 VPP2"),
    reorder_expert_ranks: (inspect_streams, "MoE", "EP2"),
    order_experts_by_rank: (inspect_streams, "MoE", "EP2"),
    stack_gate_and_up: (inspect_streams, "dense", "TP2"),
    drop_slice_offsets: (inspect_streams, "dense", "PP2"),
    skip_merge: (push_all_kinds, *IN_ONE_STAGE),
    merge_all: (push_all_kinds, *IN_ONE_STAGE),
    plan_by_local_tensors: (plan_kinds, *IN_ONE_STAGE),
    leave_on_stop: (stop_early,),
    leave_on_failure: (stop_early,),
    send_without_room: (hold_one, "MoE", "EP2"),
}


@pytest.mark.parametrize("tamper", WRONG, ids=lambda tamper: tamper.__name__.replace("_", " "))
def test_weight_stream_silent_mutation_is_detected(models, tamper):
    body, *where = WRONG[tamper]
    with pytest.raises(RanksFailed):
        run_ranks(body, 2, str(models(where[0] if where else "MoE")), *where, tamper)


def test_weight_stream_waits_for_late_bucket(models):
    run_ranks(inspect_streams, 2, str(models("MoE")), "MoE", "EP2", delay_transfers)
