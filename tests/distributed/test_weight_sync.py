"""Weight sync to the engine: each silent failure is detected by the check, which must raise when a patch is removed.

The trainer is a transformers model: the engine and the check are tested, not the weight mapping.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_grpo.core.base.errors import WeightsNotFiniteError
from megatron_grpo.core.rollout import vllm_patches
from megatron_grpo.core.rollout.vllm_weights import WeightLoader
from megatron_grpo.core.trainer.weight_sync import WeightSyncError, WeightSyncManager, check_weights, sync
from megatron_grpo.core.weights.buckets import WeightUpdate
from megatron_grpo.core.weights.hf_files import HfReader
from tests.distributed.test_rollout import PROMPTS, SAMPLING, build_engine, read_tokens
from tests.parity_cases import build, settings
from tests.ranks import run_ranks
from tests.tiny_models import HYBRIDS, hf_logprobs, load_tiny, write_tiny

MODELS = {
    "qwen3": False,
    "qwen3-tied": True,
    "qwen3_moe": False,
    "qwen2": False,
    "mixtral": False,
    "glm4_moe": False,
    "qwen2_moe": False,
    "gpt_oss": False,
    "olmo2": False,
    "olmo3": False,
    "gemma3_text": True,
    "qwen3_next": False,
    "qwen3_5_text": True,
    "qwen3_5_moe_text": False,
}  # name -> tied embeddings
BOTH_KINDS = ["linear_attention", "full_attention"]


def load_by_reload():
    """Load each sync with vLLM's own reload."""
    loader = WeightLoader()
    loader.reason = "this test compares with it"
    return loader


def skip_repack(module):
    """Replacement of `vllm_patches.pack` that leaves the CPU kernels' copy of the weights unchanged."""
    if type(module.quant_method).__name__ == "UnquantizedLinearMethod":
        module.weight = torch.nn.Parameter(torch.empty(0, dtype=module.weight.dtype), requires_grad=False)


class HfCheckpointPolicy:
    """A checkpoint with the interface of a policy."""

    def __init__(self, path, dtype="float32"):
        self.path, self.model = path, load_tiny(path, dtype)
        self.model.model.do_not_compile = True  # vLLM makes a compiling class of one that it takes from transformers (OLMo)
        self.tensors, self.chunks = load_file(path / "model.safetensors"), [self.model]

    def stream(self):
        return iter(self.tensors.items())

    def updates(self, version, *, has_base):
        yield WeightUpdate(kind="weights", version=version, tensors=self.stream())

    def on_device(self, part):
        return contextlib.nullcontext()

    def free_memory(self, *, keep="nothing"):
        pass

    def trial(self):
        return contextlib.nullcontext()

    @property
    def scorer(self):
        return self

    def score(self, sequences, *, temperature=None):
        assert temperature == 1.0
        return [np.concatenate([[0.0], hf_logprobs(self.model, one.token_ids.tolist()).numpy()]) for one in sequences]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Name -> directories of three versions of the same model."""
    made = {}

    def make(name, dtype="float32"):
        if (name, dtype) not in made:
            family = name.partition("-")[0]
            directory = tmp_path_factory.mktemp("models")
            sizes = dict(tied=MODELS[name], dtype=dtype) | ({"layer_types": BOTH_KINDS} if family in HYBRIDS else {})
            if family == "qwen3_next":
                sizes["moe_intermediate_size"] = 64  # on two ranks 32, as vLLM's CPU kernels need
            made[name, dtype] = [write_tiny(directory / str(seed), family, seed=seed, **sizes) for seed in range(3)]
        return made[name, dtype]

    return make


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("qwen3", 1),
        ("qwen3-tied", 1),
        ("qwen3-tied", 2),
        ("qwen3_moe", 1),
        ("qwen3_moe", 2),
        ("qwen2", 2),
        ("mixtral", 1),
        ("glm4_moe", 1),
        ("qwen2_moe", 1),
        ("qwen2_moe", 2),
        ("gpt_oss", 1),
        ("gpt_oss", 2),
        ("olmo2", 1),
        ("olmo3", 1),
        ("gemma3_text", 1),
        ("qwen3_next", 1),
        ("qwen3_next", 2),
        ("qwen3_5_text", 2),
        ("qwen3_5_moe_text", 1),
    ],
)
def test_weight_sync_is_exact_and_each_patch_is_needed(checkpoints, name, tp):
    paths = checkpoints(name)

    def body(rank, world_size):
        policies = [HfCheckpointPolicy(path) for path in paths]  # first: vLLM changes the classes that it takes from transformers
        with build_engine(paths[0], rank, world_size, tp=tp) as engine:
            found = check_weights(policies[0], engine, version=0)
            largest, mean = found.logp_difference_max, found.logp_difference_mean
            assert mean <= largest < 1e-4
            old = engine.generate(PROMPTS, SAMPLING, seed=1)

            stats = sync(policies[1], engine, version=1, verify=True)
            assert stats.num_tensors == len(policies[1].tensors) and stats.logp_difference_max < 1e-4
            assert stats.num_bytes == sum(tensor.nbytes for tensor in policies[1].tensors.values())
            new = engine.generate(PROMPTS, SAMPLING, seed=1)
            assert {group.version for group in new} == {1} and read_tokens(new) != read_tokens(old)
            for group in new:
                for completion in group.completions:
                    expected = hf_logprobs(policies[1].model, completion.sequence.token_ids.tolist(), SAMPLING.temperature)
                    assert np.abs(expected.numpy() - completion.logprobs[1:])[completion.sequence.mask[1:]].max() < 1e-4

            assert engine._weights.table is not None, engine._weights.reason
            engine._weights.pack = skip_repack
            with pytest.raises(WeightSyncError, match="does not sample from the weights of version 2"):
                sync(policies[2], engine, version=2, verify=True)
            engine._weights.pack = vllm_patches.pack
            for version, policy in ((3, policies[2]), (4, policies[0])):
                assert sync(policy, engine, version=version, verify=True).logp_difference_max < 1e-4
            assert read_tokens(engine.generate(PROMPTS, SAMPLING, seed=1)) == read_tokens(old)

    run_ranks(body, tp)


def test_weight_sync_silent_failure_is_detected(checkpoints):
    paths = checkpoints("qwen3")

    def body(rank, world_size):
        with build_engine(paths[0], rank, world_size) as engine:
            policies = [HfCheckpointPolicy(path) for path in paths]
            check_weights(policies[0], engine, version=0)
            good = itertools.cycle(policies[1:])  # so that every push changes every weight
            version = 0

            def give(policy, verify=True):
                nonlocal version
                version += 1
                return sync(policy, engine, version=version, verify=verify)

            def offers(named):
                policy = next(good)
                offer = HfCheckpointPolicy(policy.path)
                offer.stream = lambda: named(policy.tensors)
                return offer

            engine._forget_prefixes = lambda: None
            with pytest.raises(WeightSyncError, match="Only tokens read through the prefix cache differ"):
                give(next(good))
            del engine._forget_prefixes
            give(next(good))

            with pytest.raises(WeightSyncError, match="did not change 1 of the engine's weights: .*o_proj"):
                give(offers(lambda tensors: ((n, t) for n, t in tensors.items() if "1.self_attn.o_proj" not in n)))
            assert engine.version == -1
            with pytest.raises(WeightSyncError, match="The rollout engine has no weights"):
                engine.generate(PROMPTS, SAMPLING, seed=1)
            give(next(good))

            def reuses_one_buffer(tensors):
                buffer = torch.empty(max(tensor.numel() for tensor in tensors.values()))
                for name, tensor in tensors.items():
                    view = buffer[: tensor.numel()].view(tensor.shape)
                    view.copy_(tensor)
                    yield name, view

            give(offers(reuses_one_buffer))  # nothing is held
            ours, engine._weights = engine._weights, load_by_reload()
            with pytest.raises(WeightSyncError, match="All engines differ"):
                give(offers(reuses_one_buffer))
            give(next(good))
            with pytest.raises(WeightSyncError, match="All engines differ"):  # a part of what vLLM calls one weight
                give(offers(lambda tensors: ((n, t) for n, t in tensors.items() if "1.self_attn.k_proj" not in n)))
            engine._weights = ours
            give(next(good))

            shuffled = give(offers(lambda tensors: sorted(tensors.items(), key=lambda item: hash(item[0]) % 1009)))
            assert shuffled.logp_difference_max < 1e-4  # order is the policy's own affair

            # The engine keeps nothing of what it was given.
            before = engine.score(engine.probes())
            policy = HfCheckpointPolicy(paths[0])
            give(policy)
            after = engine.score(engine.probes())
            for tensor in policy.tensors.values():
                tensor.fill_(float("nan"))
            assert engine.score(engine.probes()) == after != before

    run_ranks(body, 1)


def read_engine_state(engine):
    """Return all tensors of the engine's model, bit for bit, and its scores of the probes."""
    (model,) = engine._llm.collective_rpc(lambda worker: worker.model_runner.get_model())
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.contiguous().view(-1).view(torch.uint8).tolist() for name, tensor in tensors}, engine.score(engine.probes())


@pytest.mark.parametrize(
    ("name", "tp", "sent", "dtype"), [("qwen3-tied", 2, "float32", "bfloat16"), ("qwen3_moe", 1, "bfloat16", "float32")]
)
def test_weight_sync_by_copy_table_equals_vllm_reload(checkpoints, name, tp, sent, dtype):
    paths = checkpoints(name, sent)

    def body(rank, world_size):
        with build_engine(paths[0], rank, world_size, tp=tp, dtype=dtype) as engine:
            policies = [HfCheckpointPolicy(path, sent) for path in paths]

            def push_with(loader, number, change=lambda named: named):
                engine._weights = loader
                update = WeightUpdate(kind="weights", version=1, tensors=change(policies[number].tensors.items()))
                engine.load_weights(update)
                return read_engine_state(engine)

            theirs, ours = load_by_reload(), WeightLoader()
            right = [push_with(theirs, number) for number in (0, 1, 2)]
            assert right[0] != right[1] and theirs.table is None
            assert push_with(ours, 1) == right[1] and ours.table is not None, ours.reason  # the push that is watched
            assert push_with(ours, 2) == right[2] and push_with(ours, 0, reverse_order) == right[0]
            table = ours.table

            # What sleep_level 2 does: the weights are gone, and may come to lie elsewhere.
            (model,) = engine._llm.collective_rpc(lambda worker: worker.model_runner.get_model())
            for parameter in model.parameters():
                parameter.data = torch.full_like(parameter.data, float("nan"))
            assert push_with(ours, 1) == right[1] and ours.table is table

            # An error in the middle: the next push is whole, watched or not.
            for loader in (ours, WeightLoader()):
                with pytest.raises(ZeroDivisionError):
                    push_with(loader, 0, break_order)
                assert push_with(loader, 2) == right[2]
                assert engine._weights.table is not None

            # Entries of two tensors of one shape exchanged: the check after a push notices.
            one, other = (next(n for n in table.copies if part in n) for part in ("0.self_attn.q_proj", "1.self_attn.q_proj"))
            table.copies[one], table.copies[other] = table.copies[other], table.copies[one]
            assert push_with(ours, 1) != right[1]

    run_ranks(body, tp)


def reverse_order(items):
    return reversed(list(items))


def break_order(items):
    yield from list(items)[:5]
    raise ZeroDivisionError


def test_weight_sync_without_copy_table_falls_back_to_reload_with_reason(checkpoints):
    paths = checkpoints("qwen3_moe")

    def body(rank, world_size):
        from megatron_grpo.core.rollout import vllm_weight_layout, vllm_weights

        with build_engine(paths[0], rank, world_size) as engine:
            policies, said = [HfCheckpointPolicy(path) for path in paths], []
            vllm_weights.logger.warning = lambda text, why: said.append(why)

            def refused(why):
                """Sync three times, none of them with a copy table."""
                engine._weights = WeightLoader()
                for version in (1, 2, 3):
                    assert sync(policies[version % 2], engine, version=version, verify=True).logp_difference_max < 1e-4
                assert engine._weights.table is None and engine._weights.reason == said.pop() == why and not said

            plain, vllm_weight_layout.PLAIN = vllm_weight_layout.PLAIN, ("UnquantizedLinearMethod",)
            refused("lm_head is loaded by vLLM's UnquantizedEmbeddingMethod")
            vllm_weight_layout.PLAIN = plain

            from_view, vllm_weight_layout.TensorView.from_view = (
                vllm_weight_layout.TensorView.from_view,
                classmethod(swap_queries_and_keys),
            )  # a wrong layout is recorded
            refused("model.layers.0.self_attn.qkv_proj differs when it is loaded without vLLM")
            vllm_weight_layout.TensorView.from_view = from_view

            class Deaf(vllm_weight_layout.WeightLayoutRecorder):  # vLLM transforms a tensor on its way
                def record_names(self, named):
                    return ((name, tensor * 1 if "q_norm" in name else tensor) for name, tensor in super().record_names(named))

            vllm_weights.WeightLayoutRecorder = Deaf
            refused("the source of each part of model.layers.0.self_attn.q_norm.weight is unknown")

    run_ranks(body, 1)


def swap_queries_and_keys(cls, view, whole):
    """Swap queries and keys of a layer, which have equal sizes."""
    offset = view.storage_offset() - whole.storage_offset()
    if tuple(whole.shape) == (256, 64) and tuple(view.shape) == (64, 64):
        offset = {128 * 64: 192 * 64, 192 * 64: 128 * 64}[offset]
    return cls(tuple(view.shape), view.stride(), offset)


@pytest.mark.parametrize("tp", [1, 2])
def test_weight_sync_wrong_weights_on_one_rank_stop_all_ranks(checkpoints, tp):
    paths = checkpoints("qwen3-tied")

    def body(rank, world_size):
        with build_engine(paths[0], rank, world_size, tp=tp) as engine:
            policy, other = HfCheckpointPolicy(paths[1]), HfCheckpointPolicy(paths[2])
            policy.stream = (other if rank == 1 else policy).stream
            with pytest.raises(WeightSyncError) as error:
                sync(policy, engine, version=1, verify=True)
            return str(error.value)

    first, second = run_ranks(body, 2)
    assert first == second and "rank 1: max" in first
    assert ("Only some engines differ" in first and "rank 0" not in first) if tp == 1 else "rank 0: max" in first


def test_weight_sync_skips_weights_that_the_engine_has(checkpoints):
    paths = checkpoints("qwen3")

    def body(rank, world_size):
        with build_engine(paths[0], rank, world_size) as engine:
            assert WeightSyncManager(None, engine, verify=False).sync_weights(0) is None  # no policy is asked for anything
            first = WeightSyncManager(HfCheckpointPolicy(paths[0]), engine, verify=True)
            assert (
                first.sync_weights(0).num_tensors == 0 and engine.version == 0
            )  # the engine read the checkpoint by itself: looked at once
            assert first.sync_weights(0) is None
            with pytest.raises(WeightSyncError, match="does not sample from the weights of version 0"):
                WeightSyncManager(HfCheckpointPolicy(paths[1]), engine, verify=True).sync_weights(0)
            with engine.wake_up():
                assert engine.generate([], SAMPLING, seed=0) == []
            pushed = sync(HfCheckpointPolicy(paths[1]), engine, version=7, verify=False)
            assert pushed.num_tensors and engine.version == 7 and math.isnan(pushed.logp_difference_max)

    run_ranks(body, 1)


def test_weight_sync_nonfinite_weight_is_named(checkpoints):
    """On one of two ranks, whose engines agree with it; with and without the check after a sync."""
    paths, name = checkpoints("qwen3"), "model.layers.1.mlp.up_proj.weight"

    def body(rank, world_size):
        with build_engine(paths[0], rank, world_size) as engine:
            policy, found = HfCheckpointPolicy(paths[1]), []
            if rank == 1:
                for tensor in (policy.tensors[name], policy.model.get_parameter(name).data):
                    tensor[0, 0] = float("nan")
            policy.score = lambda sequences, **how: [np.full(len(one.token_ids), np.nan) for one in sequences]  # as all ranks are told
            for version, verify in ((1, False), (2, True)):
                with pytest.raises(WeightsNotFiniteError) as error:
                    sync(policy, engine, version=version, verify=verify)
                found.append(str(error.value))
            return found

    sentence = f"The run ends: the weights are not finite (rank 1: {name}), so no further step can succeed."
    assert run_ranks(body, 2) == [[sentence] * 2] * 2


def test_weight_sync_bfloat16_passes_and_stale_output_layer_is_detected(checkpoints):
    paths = checkpoints("qwen3-tied", "bfloat16")

    def body(rank, world_size):
        with build_engine(paths[0], rank, world_size, dtype="bfloat16") as engine:
            policies = [HfCheckpointPolicy(path, "bfloat16") for path in paths]
            assert engine.dtype == "bfloat16"
            stats = sync(policies[1], engine, version=1, verify=True)
            engine._weights.pack = skip_repack
            with pytest.raises(WeightSyncError, match="more than a mean of 0.2"):
                sync(policies[2], engine, version=2, verify=True)
            return stats.logp_difference_mean

    (mean,) = run_ranks(body, 1)
    assert 0 < mean < 0.1


@pytest.mark.parametrize(("layout", "engine_tp"), [({"tensor_model_parallel_size": 2}, 2), ({"pipeline_model_parallel_size": 2}, 1)])
def test_weight_sync_megatron_policy_and_engines_agree_before_and_after(checkpoints, layout, engine_tp):
    paths = checkpoints("qwen3-tied")

    def body(rank, world_size):
        policy = build(paths[0], settings(**layout), world_size)
        policy.exchange.bucket_bytes = 8 << 10  # most tensors travel in slices
        with build_engine(paths[0], rank, world_size, tp=engine_tp) as engine:
            largest = check_weights(policy, engine, version=0).logp_difference_max
            assert largest < 1e-4
            before = engine.score(engine.probes())
            with torch.no_grad():
                for chunk in policy.chunks:
                    for parameter in chunk.parameters():
                        parameter.mul_(1.1)  # the same change under every sharding
            for version in (1, 2):  # through vLLM's reload, and by the table that is learned from it
                stats = sync(policy, engine, version=version, verify=True)
                assert stats.logp_difference_max < 1e-4 and stats.num_tensors == len(HfReader(paths[0]).names)
                assert np.abs(np.array(before) - np.array(engine.score(engine.probes()))).max() > 0.1
                before = engine.score(engine.probes())
                with torch.no_grad():
                    for parameter in policy.tensors().values():
                        parameter.mul_(1.1)
            assert engine._weights.table is not None
            return read_tokens(engine.generate(PROMPTS, SAMPLING, seed=1))

    first, second = run_ranks(body, 2)
    assert len(first) + len(second) == len(PROMPTS)


def test_weight_sync_engine_buffers_at_most_one_moe_layer(tmp_path):
    path = write_tiny(tmp_path, "qwen3_moe", layers=4, experts=8)

    def body(rank, world_size):
        from vllm.model_executor.model_loader.reload import layerwise

        from megatron_grpo.core.rollout.vllm_weight_layout import ModuleWeights, WeightLayoutRecorder

        policy, lessons, filling = build(path, settings(expert_model_parallel_size=2), world_size), [], {}
        listen, targets, finish = WeightLayoutRecorder.__init__, ModuleWeights.targets, ModuleWeights.finish

        def listened(lesson, *arguments):
            listen(lesson, *arguments)
            lessons.append(lesson)

        def begun(unit):
            found = targets(unit)
            filling[unit] = [found[name] for name in unit.packed]
            return found

        def finished(unit, *arguments):
            finish(unit, *arguments)
            del filling[unit]

        WeightLayoutRecorder.__init__, ModuleWeights.targets, ModuleWeights.finish = listened, begun, finished

        def held():
            """Return the bytes that wait in the engine for the rest of their layer."""
            waiting = {id(value): value for info in layerwise.LAYERWISE_INFO.values() for _, bound in info.loaded_weights
                       for value in bound.arguments.values() if isinstance(value, torch.Tensor) and not value.is_meta}  # fmt: skip
            for lesson in lessons:
                waiting |= {id(clone): clone for clone in lesson._clones.values()}
            by_storage = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in waiting.values()}
            return sum(by_storage.values()), sum(tensor.nbytes for tensors in filling.values() for tensor in tensors)

        def pushed(update):
            most, sent, layer = [0, 0], 0, 0

            def watched():
                nonlocal sent, layer
                for name, tensor in update.tensors:
                    yield name, tensor
                    sent, layer = sent + tensor.nbytes, layer + tensor.nbytes * (".layers.1." in name)
                    most[:] = map(max, most, held())

            engine.load_weights(dataclasses.replace(update, tensors=watched()))
            check_weights(policy, engine, version=update.version)
            return *most, layer, sent

        with build_engine(path, rank, world_size) as engine:
            return [pushed(update) for version in (1, 2) for update in policy.updates(version, has_base=True)]

    for watched, by_table in run_ranks(body, 2):
        waiting, _, layer, sent = watched
        assert 0.5 * layer < waiting <= layer < sent / 3.5, "of the push that is watched one layer waits"
        waiting, filling, layer, sent = by_table
        assert waiting == 0 and 0.5 * layer < filling <= layer, "by the table no tensor waits; a CPU's experts are packed together"
