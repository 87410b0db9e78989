"""Sync of adapters: the sampler's log-probs equal PEFT's, and an adapter that is ignored in any way is detected.

The trainer is a transformers model with PEFT's adapter: the engine and the check are tested, not Megatron.
"""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_grpo.core.rollout.probes import make_sequence
from megatron_grpo.core.settings import ModelConfig, RolloutConfig, TunerConfig
from megatron_grpo.core.trainer.weight_sync import WeightSyncError, WeightSyncManager, check_weights, sync
from megatron_grpo.core.weights.buckets import NO_VERSION, WeightUpdate
from megatron_grpo.core.weights.lora import LoraSync, make_lora_settings
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.adapters import lora_sync
from megatron_grpo.run.assemble.policy import build_policy
from megatron_grpo.run.config.settings import Config
from tests.distributed.test_rollout import PROMPTS, SAMPLING, read_tokens
from tests.parity_cases import join, make_batch, settings, stored_rollout
from tests.ranks import run_ranks
from tests.tiny_models import hf_logprobs, load_tiny, write_tiny

TUNERS = {
    # One part of a fused layer alone, other ranks, other alphas; rslora's scale.
    "all-linear, patterns, rslora": TunerConfig(
        tuner_type="lora", use_rslora=True, lora_rank=4, lora_alpha=3.0, rank_pattern={"k_proj": 2, "layers.1.mlp.up_proj": 11},
        alpha_pattern={"q_proj": 5.0, "down_proj": 1.5},
    ),
    "attention": TunerConfig(tuner_type="lora", target_modules=["linear_qkv", "linear_proj"]),
    "one module of one layer": TunerConfig(tuner_type="lora", lora_rank=1, target_regex=r".*layers\.1\.self_attn\.v_proj"),
}  # fmt: skip


class PeftPolicy:
    """A checkpoint with PEFT's adapter, with the interface of a policy."""

    def __init__(self, path, tuner, dtype="float32", *, seed=0):
        from peft import LoraConfig, get_peft_model

        shape = ModelShape.from_pretrained(path)
        self.path, self.dtype, self.pushes = path, dtype, make_update(path, tuner, dtype)
        self.config = make_lora_settings(tuner, shape).to_peft(self.pushes.modules, str(path))
        model = load_tiny(path, dtype)
        # PEFT's own words for what it would look for in this model: routers are linear to it as well.
        names = {key: value for key, value in self.config.items() if key in LoraConfig.__dataclass_fields__ and key != "peft_type"}
        self.model = get_peft_model(model, LoraConfig(**names)).eval()
        self.model.requires_grad_(False)
        self.chunks = [self.model]
        self.draw(seed)

    def draw(self, seed, std=0.3):
        """Draw new adapters; with std 0 as at the start of a run."""
        for name, parameter in self.adapter_parameters():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
                parameter.normal_(0, std) if std else parameter.zero_()

    def adapter_parameters(self):
        return [(name, parameter) for name, parameter in self.model.named_parameters() if "lora_" in name]

    def adapter(self):
        return {name.removeprefix("base_model.model.").replace(".default.", "."): tensor for name, tensor in self.adapter_parameters()}

    def base(self):
        return load_file(self.path / "model.safetensors").items()

    def merged(self):
        """Return the weights plus adapters, added in float32 and rounded to the weights' dtype."""
        tensors = dict(self.base())
        for name, module in self.model.named_modules():
            if hasattr(module, "lora_A"):
                name = name.removeprefix("base_model.model.") + ".weight"
                tensors[name] = (tensors[name].float() + module.get_delta_weight("default").float()).to(tensors[name].dtype)
        return tensors.items()

    def updates(self, version, *, has_base):
        if self.pushes.kind == "merged":
            yield WeightUpdate(kind="merged", version=version, tensors=self.merged())
            return
        if not has_base:
            yield WeightUpdate(kind="weights", version=NO_VERSION, tensors=self.base())
        yield WeightUpdate(kind="adapter", version=version, tensors=self.adapter().items(), config=self.config)

    @property
    def scorer(self):
        return self

    def score(self, sequences, *, temperature=None):
        return [np.concatenate([[0.0], hf_logprobs(self.model, one.token_ids.tolist()).numpy()]) for one in sequences]

    def on_device(self, part):
        return contextlib.nullcontext()

    def free_memory(self, *, keep="nothing"):
        pass

    @contextlib.contextmanager
    def trial(self):
        kept = [parameter.clone() for _, parameter in self.adapter_parameters()]
        self.draw("a trial")
        (update,) = self.updates(NO_VERSION, has_base=True)
        try:
            yield update
        finally:
            for (_, parameter), old in zip(self.adapter_parameters(), kept, strict=True):
                parameter.copy_(old)


def make_update(path, tuner, dtype="float32") -> LoraSync:
    return lora_sync(Config(model=ModelConfig(torch_dtype=dtype), tuner=tuner), ModelShape.from_pretrained(path), on_gpu=False)


def build_engine(policy, rank, world_size, *, tp=1):
    """Build an engine. Imported late: the test process itself never loads vLLM."""
    from megatron_grpo.core.rollout.colocated import ColocatedEngine

    cfg = RolloutConfig(vllm_kv_cache_memory_mb=8, vllm_max_num_seqs=32, vllm_tensor_parallel_size=tp)
    return ColocatedEngine.build(cfg, model_path=policy.path, dtype=policy.dtype, max_model_len=128, seed=0, rank=rank,
                                 world_size=world_size, lora=policy.pushes)  # fmt: skip


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.mark.parametrize(
    ("family", "tuner", "sizes"),
    [("qwen3", "all-linear, patterns, rslora", [1, 2]), ("qwen3_moe", "attention", [1]), ("qwen3", "one module of one layer", [1])],
)
def test_adapter_sync_sampler_logprobs_equal_peft(tmp_path, family, tuner, sizes):
    """sizes: ranks that share one engine."""
    path = write_tiny(tmp_path, family)

    def body(rank, world_size):
        policy = PeftPolicy(path, TUNERS[tuner])
        engine = build_engine(policy, rank, world_size, tp=world_size)
        assert engine.version == 0 and engine.has_base
        base = engine.score(engine.probes())
        for version in (1, 2):
            policy.draw(version)
            before = {name: tensor.clone() for name, tensor in policy.adapter().items()}
            stats = sync(policy, engine, version=version, verify=True)
            assert stats.logp_difference_max < 1e-4 and stats.num_tensors == 2 * len(policy.pushes.modules)
            assert stats.num_bytes == sum(tensor.nbytes for tensor in before.values())
            assert all(torch.equal(before[name], tensor) for name, tensor in policy.adapter().items()), "vLLM scales its own copy"
            assert np.abs(np.array(base) - np.array(engine.score(engine.probes()))).max() > 0.1
        groups = engine.generate(PROMPTS, SAMPLING, seed=1)
        for completion in (completion for group in groups for completion in group.completions):
            assert completion.versions[0][0] == 2
            expected = hf_logprobs(policy.model, completion.sequence.token_ids.tolist(), SAMPLING.temperature)
            assert np.abs(expected.numpy() - completion.logprobs[1:])[completion.sequence.mask[1:]].max() < 1e-4
        with open("/proc/self/fd/2") as log:
            assert "vLLM" not in log.read()
        return read_tokens(groups)

    drawn = [sorted(tokens for found in run_ranks(body, size) for tokens in found) for size in sizes]
    assert len(drawn[0]) == len(PROMPTS) and all(other == drawn[0] for other in drawn), (
        "the same groups, however many ranks share an engine"
    )


def test_adapter_sync_replaces_older_adapter_and_base_sync_drops_it(model_path):
    def body(rank, world_size):
        policy = PeftPolicy(model_path, TUNERS["attention"])
        engine = build_engine(policy, rank, world_size)
        assert policy.pushes.slot_rank == 8
        untouched = engine.score(engine.probes())

        def give(version):
            policy.draw(version)
            return sync(policy, engine, version=version, verify=True)

        give(1)
        # The cure of stale caches, switched off: the name of version 1 also stands for version 2.
        old = engine._adapter.request
        policy.draw(2)
        sync(policy, engine, version=2, verify=False)
        engine._adapter.request = type(old)(old.lora_name, engine._adapter.request.lora_int_id, old.lora_path)
        with pytest.raises(WeightSyncError, match="Only tokens read through the prefix cache differ"):
            check_weights(policy, engine, version=2)
        for version in range(3, 13):
            give(version)
        held = engine._llm.collective_rpc(lambda worker: len(worker.model_runner.lora_manager.list_adapters()))
        assert held == [1], "older adapters leave, so memory stays bounded"

        # All weights anew, as after sleep_level 2: they drop the adapter, and the policy sends it after them.
        engine.load_weights(WeightUpdate(kind="weights", version=NO_VERSION, tensors=policy.base()))
        assert engine.version == NO_VERSION and engine.has_base
        with pytest.raises(WeightSyncError, match="The rollout engine has no weights"):
            engine.generate(PROMPTS, SAMPLING, seed=1)
        np.testing.assert_allclose(engine.score(engine.probes()), untouched, atol=1e-5)
        engine.version, engine.has_base = NO_VERSION, False
        stats = give(13)
        assert stats.num_tensors == len(dict(policy.base())) + len(policy.adapter()) and engine.has_base and engine.version == 13

        # Merged weights are no base of any adapter.
        engine.load_weights(WeightUpdate(kind="merged", version=14, tensors=policy.merged()))
        assert check_weights(policy, engine, version=14).logp_difference_max < 1e-4 and not engine.has_base
        with pytest.raises(WeightSyncError, match="but has no base weights for it"):
            engine.load_weights(WeightUpdate(kind="adapter", version=15, tensors=policy.adapter().items(), config=policy.config))
        assert give(16).num_tensors == stats.num_tensors

    run_ranks(body, 1)


def test_adapter_sync_names_missing_modules(model_path):
    def body(rank, world_size):
        policy = PeftPolicy(model_path, TUNERS["attention"])
        engine = build_engine(policy, rank, world_size)

        def offered(change):
            named = dict(change(name, tensor) for name, tensor in policy.adapter().items() if change(name, tensor))
            engine.load_weights(WeightUpdate(kind="adapter", version=1, tensors=named.items(), config=policy.config))

        with pytest.raises(WeightSyncError, match=r"1 modules have an adapter in this run but were not sent \(model.layers.1.self_attn.v_"):
            offered(lambda name, tensor: None if "1.self_attn.v_proj" in name else (name, tensor))
        assert engine.version == NO_VERSION and engine.has_base
        with pytest.raises(WeightSyncError, match=r"1 modules arrived with one of their two matrices \(model.layers.0.self_attn.o_proj\)"):
            offered(lambda name, tensor: None if name == "model.layers.0.self_attn.o_proj.lora_B.weight" else (name, tensor))
        # vLLM itself takes such names without a word, and samples as if they had not come.
        with pytest.raises(WeightSyncError, match=r"2 modules have .* not sent .*; 2 modules were sent but have no adapter in this run"):
            offered(lambda name, tensor: (name.replace("q_proj", "query"), tensor))
        engine._adapter._modules = frozenset(module.replace("q_proj", "query") for module in engine._adapter._modules)
        with pytest.raises(
            WeightSyncError, match=r"2 modules were ignored by vLLM, which has no such .* \(model.layers.0.self_attn.query, "
        ):
            offered(lambda name, tensor: (name.replace("q_proj", "query"), tensor))
        # A module that vLLM knows, in an engine that made no room for it.
        engine._adapter._modules |= {"model.layers.0.mlp.up_proj"}
        a, b = torch.ones(8, 64), torch.ones(128, 8)
        more = {"model.layers.0.mlp.up_proj.lora_A.weight": a, "model.layers.0.mlp.up_proj.lora_B.weight": b}
        engine._adapter._modules = frozenset(module.replace("query", "q_proj") for module in engine._adapter._modules)
        with pytest.raises(WeightSyncError, match=r"1 modules were ignored by vLLM, .* \(model.layers.0.mlp.up_proj\)"):
            engine.load_weights(WeightUpdate(kind="adapter", version=1, tensors=(policy.adapter() | more).items(), config=policy.config))
        engine._adapter._modules = policy.pushes.modules
        assert sync(policy, engine, version=2, verify=True).logp_difference_max < 1e-4

        plain = LoraSync(kind="merged", modules=policy.pushes.modules, slot_rank=0)
        policy.pushes = plain
        with pytest.raises(WeightSyncError, match="was started without LoRA support"):
            build_engine(policy, rank, world_size).load_weights(WeightUpdate(kind="adapter", version=1, tensors=(), config={}))

    run_ranks(body, 1)


def test_adapter_trial_detects_engine_that_ignores_adapters(model_path):
    def body(rank, world_size):
        policy = PeftPolicy(model_path, TUNERS["one module of one layer"])
        engine = build_engine(policy, rank, world_size)
        policy.draw(0, std=0.0)  # as a run begins: B A is zero, and who ignores it agrees
        real = engine._run
        engine._run = without_adapter(engine)
        WeightSyncManager(policy, engine, verify=False).sync_weights(0)
        check_weights(policy, engine, version=0)
        assert sync(policy, engine, version=1, verify=True).logp_difference_max < 1e-4
        with pytest.raises(WeightSyncError, match="(?s)does not sample from the trial adapter.*or the adapter is ignored"):
            WeightSyncManager(policy, engine, verify=True).sync_weights(1)
        assert engine.version == NO_VERSION

        engine._run = real
        weight_sync = WeightSyncManager(policy, engine, verify=True)
        stats = weight_sync.sync_weights(1)  # the trial is out again: what is pushed after it is the policy
        assert engine.version == 1 and stats.num_tensors == 2 and stats.logp_difference_max < 1e-4
        np.testing.assert_allclose(engine.score(engine.probes()), [p[1:] for p in policy.scorer.score(sequences(engine))], atol=1e-4)
        assert weight_sync.sync_weights(1) is None and weight_sync.sync_weights(2).num_tensors == 2

        # Another engine has taken its place, which ignores adapters: B A is zero, so the scores after the push cannot tell.
        engine._run = without_adapter(engine)
        assert weight_sync.sync_weights(3).logp_difference_max < 1e-4, "the one that was proven is not asked again"
        engine.prepare = lambda: True
        with pytest.raises(WeightSyncError, match="or the adapter is ignored"):
            weight_sync.sync_weights(4)
        engine._run = real
        assert weight_sync.sync_weights(4).num_tensors == 2 and engine.version == 4
        engine.prepare = lambda: False

        weak = PeftPolicy(model_path, TUNERS["one module of one layer"])
        weak.draw = lambda seed, std=0.0: None
        for _, parameter in weak.adapter_parameters():
            parameter.zero_()
        with pytest.raises(WeightSyncError, match="The adapter check is inconclusive: the trial adapter changes"):
            WeightSyncManager(weak, engine, verify=True).sync_weights(5)

        # A run that began with an adapter: the checkpoint, which the engine read by itself, is not its version 0.
        policy.draw(5)
        fresh = build_engine(policy, rank, world_size)
        assert WeightSyncManager(policy, fresh, verify=False).sync_weights(0) is None
        weight_sync = WeightSyncManager(policy, fresh, verify=False, starts_as_checkpoint=False)
        assert (
            weight_sync.sync_weights(0).num_tensors == 2
            and weight_sync.sync_weights(0) is None
            and check_weights(policy, fresh, version=0).logp_difference_max < 1e-4
        )

    run_ranks(body, 1)


def sequences(engine):
    return engine.probes()


def without_adapter(engine):
    """Run requests without an adapter, as vLLM does if it has dropped all names."""
    real = engine._run

    def run(requests):
        kept, engine._adapter.request = engine._adapter.request, None
        try:
            return real(requests)
        finally:
            engine._adapter.request = kept

    return run


@pytest.mark.parametrize("changes", [{"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2, "vllm_enable_lora": False}])
def test_adapter_sync_megatron_policy_and_engine_agree_at_trial_and_each_sync(model_path, changes):
    def body(rank, world_size):
        cfg = settings(tuner_type="lora", lora_rank=4, rank_pattern={"v_proj": 3}, **changes)
        shape = ModelShape.from_pretrained(model_path)
        pushes = lora_sync(cfg, shape, on_gpu=False)
        policy = build_policy(cfg, join(cfg, world_size), model_path=model_path, num_steps=1, adapter_sync=pushes.kind)
        engine = build_engine(SimpleNamespace(path=model_path, dtype="float32", pushes=pushes), rank, world_size)
        weight_sync = WeightSyncManager(policy, engine, verify=True)
        first = weight_sync.sync_weights(0)
        assert engine.version == 0 and first.logp_difference_max < 1e-4
        before = engine.score(engine.probes())
        kept = policy.adapters.randomize(1)
        stats = weight_sync.sync_weights(1)
        assert stats.logp_difference_max < 1e-4
        assert np.abs(np.array(before) - np.array(engine.score(engine.probes()))).max() > 0.1
        policy.adapters.restore(kept)
        assert weight_sync.sync_weights(2).logp_difference_max < 1e-4
        np.testing.assert_allclose(engine.score(engine.probes()), before, atol=1e-4)
        return stats.num_tensors, stats.num_bytes

    counts = run_ranks(body, 2)
    shapes = {name: tensor.shape for name, tensor in load_file(model_path / "model.safetensors").items()}
    if "vllm_enable_lora" in changes:
        assert counts == [(len(shapes), 4 * sum(shape.numel() for shape in shapes.values()))] * 2
    else:  # A and B of each module at its own rank
        sizes = [(3 if "v_proj" in name else 4) * sum(shape) for name, shape in shapes.items() if "_proj" in name]
        assert counts == [(2 * len(sizes), 4 * sum(sizes))] * 2


def test_adapter_sync_first_bfloat16_step_reaches_sampler_and_is_lost_when_merged(tmp_path):
    path = write_tiny(tmp_path, "qwen3", dtype="bfloat16", std=0.02)
    module = "model.layers.0.self_attn.o_proj"

    def body(rank, world_size):
        policy = PeftPolicy(path, TUNERS["attention"], "bfloat16")
        engine = build_engine(policy, rank, world_size)
        assert engine.dtype == "bfloat16"
        for name, parameter in policy.adapter_parameters():  # after one step of Adam at lr 1e-5 from B = 0
            parameter.copy_(parameter.sign() * 1e-5 if "lora_B" in name else parameter.uniform_(-0.125, 0.125))
        assert sync(policy, engine, version=1, verify=True).logp_difference_mean < 0.05

        def held(worker):
            layer = worker.model_runner.lora_manager._adapter_manager.modules[module]
            return layer.lora_b_stacked[0][0, 0].double() @ layer.lora_a_stacked[0][0, 0].double()

        tensors, merged, base = policy.adapter(), dict(policy.merged()), dict(policy.base())
        update = 4.0 * tensors[module + ".lora_B.weight"].double() @ tensors[module + ".lora_A.weight"].double()  # alpha / r is 32 / 8
        (adapter_error,) = engine._llm.collective_rpc(held)
        merged_error = merged[module + ".weight"].double() - base[module + ".weight"].double()
        return [float((found - update).norm() / update.norm()) for found in (adapter_error, merged_error)]

    ((adapter_error, merged_error),) = run_ranks(body, 1)
    assert adapter_error < 0.005 and merged_error > 0.8, (adapter_error, merged_error)


def compute_merge_error(policy) -> float:
    """Return the error of the update of all weights, relative to its norm, if it is added in the weights' own dtype."""
    base, adapters, settings = (
        dict(policy.exchange.stream(policy.tensors(), "weights")),
        dict(policy.named_adapters()),
        policy.adapters.settings,
    )
    wrong = right = 0.0
    for name, tensor in policy.named_weights():
        module = name.removesuffix(".weight")
        if module + ".lora_A.weight" in adapters:
            a, b = (adapters[f"{module}.lora_{which}.weight"].double() for which in "AB")
            update = settings.compute_lora_scale(module) * b @ a
            wrong, right = wrong + ((tensor.double() - base[name].double() - update) ** 2).sum(), right + (update**2).sum()
    return float((wrong / right) ** 0.5)


def test_adapter_sync_ten_bfloat16_steps_change_sampler_like_trainer(tmp_path):
    """Compared are the changes of log-probs of two rewarded completions at a learning rate of 1e-5."""
    path = write_tiny(tmp_path, "qwen3", dtype="bfloat16", std=0.02, hidden=256, ffn=256, kv_heads=4, head_dim=64)
    (samples,) = stored_rollout(path, groups=((5, (14, 17)),), stale=0)
    samples = [dataclasses.replace(sample, advantage=1.0) for sample in samples]

    def body(rank, world_size):
        cfg = settings(torch_dtype="bfloat16", tuner_type="lora", lr=1e-5, lr_warmup_iters=0, adam_eps=1e-12, weight_decay=0.0)
        shape = ModelShape.from_pretrained(path)
        pushes = lora_sync(cfg, shape, on_gpu=False)
        policy = build_policy(cfg, join(cfg, world_size), model_path=path, num_steps=10_000, adapter_sync="adapter")
        engine = build_engine(SimpleNamespace(path=path, dtype="bfloat16", pushes=pushes), rank, world_size)
        texts = [make_sequence(sample.token_ids) for sample in samples]
        trained = np.concatenate([sample.mask[1:] for sample in samples])

        def by_trainer():
            return np.concatenate([one[1:] for one in policy.scorer.score(texts, temperature=1.0)])[trained]

        def by_sampler():
            return np.concatenate(engine.score(texts))[trained]

        sync(policy, engine, version=0, verify=False)
        trainer, sampler = by_trainer(), by_sampler()
        for _ in range(10):
            policy.train_step(make_batch(policy, samples, 0))
        assert sync(policy, engine, version=10, verify=True, is_low_precision=True).num_bytes < 2e5
        return by_trainer() - trainer, by_sampler() - sampler, compute_merge_error(policy)

    ((trainer_change, sampler_change, lost),) = run_ranks(body, 1)
    assert trainer_change.min() > 0.005, "every token was rewarded, and has become likelier"
    assert np.linalg.norm(sampler_change - trainer_change) < 0.3 * np.linalg.norm(trainer_change), "one that stayed where it was would be 1"
    assert lost > 0.3, "why merged weights are warned of"
