"""Adapters loaded from PEFT's files and exported, in each layout: log-probs, files, and the merged weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_grpo.core.base.errors import ConfigError
from tests import lora_cases
from tests import parity_cases as cases
from tests.ranks import run_ranks
from tests.tiny_models import load_tiny, write_tiny

# What people have: as PEFT's LoraConfig is given it.
KINDS = {
    "defaults of PEFT": dict(r=8, lora_alpha=16),  # query and value alone
    "all-linear, rslora": dict(r=5, lora_alpha=9, use_rslora=True, target_modules="all-linear"),
    "a regular expression": dict(r=4, lora_alpha=8, target_modules=r".*layers\.[02]\.(self_attn\.[qk]_proj|mlp\.down_proj)"),
    "patterns": dict(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"],
                     rank_pattern={"v_proj": 3, r"layers\.1\..*down_proj": 6}, alpha_pattern={"^model.layers.0.self_attn.q_proj": 2}),
    "with exclusions": dict(r=3, lora_alpha=6, target_modules="all-linear", exclude_modules=["o_proj", "layers.1.mlp.up_proj"]),
}  # fmt: skip
TOKENS = [np.random.default_rng(n).integers(4, 120, n).tolist() for n in (7, 12, 5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("model") / "dense", **cases.MODELS["dense"])


def write_peft_adapter(model: Path, out: Path, **config) -> Path:
    """Return an adapter directory that PEFT has written, with random matrices."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    wrapped = get_peft_model(load_tiny(model), LoraConfig(**config))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1)
    wrapped.save_pretrained(str(out))
    return out


def compute_logprobs(model) -> list[np.ndarray]:
    from tests.tiny_models import hf_logprobs

    return [hf_logprobs(model, ids).numpy() for ids in TOKENS]


def loaded(model: Path, adapter: Path):
    from peft import PeftModel

    return PeftModel.from_pretrained(load_tiny(model), str(adapter)).eval()


def find_worst_error(one, other) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def export_adapters(rank, world, model, cfg, adapters, out):
    """Return log-probs with each adapter; export it and the merged model."""
    from megatron_grpo.run.export import export_model
    from megatron_grpo.run.metrics.model_card import ModelCard

    parallel, found = cases.join(cfg, world), {}
    for kind, adapter in adapters.items():
        own = cfg.with_values({"tuner_type": "lora", "adapters": str(adapter), "merge_lora": True})
        policy = cases.build(model, own, world, parallel)
        found[kind] = cases.score_tokens(policy, TOKENS)
        card = ModelCard(cfg=own, source=model)
        export_model(policy, out / kind, cfg=own, source=model, card=card)
    return found


@pytest.mark.parametrize("layout", ["1", "TP2 SP", "PP2 VPP2"])
def test_peft_adapters_load_and_export_exactly(model, tmp_path, layout):
    adapters = {kind: write_peft_adapter(model, tmp_path / "in" / kind, **config) for kind, config in KINDS.items()}
    case = cases.LAYOUTS[layout]
    found = run_ranks(export_adapters, case.world_size, model, cases.settings(**case.settings), adapters, tmp_path / "out", timeout=200)[0]
    for kind, adapter in adapters.items():
        right = loaded(model, adapter)
        assert find_worst_error(compute_logprobs(right), found[kind]) < 2e-5, kind
        assert find_worst_error(compute_logprobs(load_tiny(model)), found[kind]) > 0.05, "the adapter says nothing"
        out = tmp_path / "out" / kind
        before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, out))
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        assert find_worst_error(compute_logprobs(right), compute_logprobs(loaded(model, out))) == 0
        merged = load_file(tmp_path / "out" / f"{kind}_merged" / "model.safetensors")
        for name, tensor in right.merge_and_unload().state_dict().items():
            assert name not in merged or torch.allclose(tensor, merged[name], atol=1e-6), name


def test_exported_adapters_load_in_transformers_and_peft_without_the_base_name(model, tmp_path):
    from peft import AutoPeftModelForCausalLM

    adapter = write_peft_adapter(model, tmp_path / "in", **KINDS["patterns"])
    cfg = cases.settings(model=str(model))
    run_ranks(export_adapters, 1, model, cfg, {"one": adapter}, tmp_path / "out")
    written = tmp_path / "out" / "one"
    assert json.loads((written / "base_model.json").read_text())["fingerprint"].startswith("qwen3 ")
    assert (
        find_worst_error(
            compute_logprobs(AutoPeftModelForCausalLM.from_pretrained(str(written)).eval()), compute_logprobs(loaded(model, adapter))
        )
        < 1e-5
    )  # attention is computed otherwise
    plain = load_tiny(model)
    plain.load_adapter(str(written))
    assert find_worst_error(compute_logprobs(plain), compute_logprobs(loaded(model, adapter))) < 1e-6


ATTENTION = dict(r=3, lora_alpha=6, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], rank_pattern={"v_proj": 2})


@pytest.mark.parametrize(("name", "layout"), [("GLM", "TP2 ETP1"), ("gpt-oss", "EP2"), ("OLMo", "PP2"), ("Gemma", "TP2 SP")])
def test_peft_adapters_of_other_families_load_and_export_exactly(tmp_path, name, layout):
    """On attention, and in dense models on the MLP.

    PEFT's files have other names for experts (`test_export_warns_of_modules_that_peft_drops`).
    """
    path, config = write_tiny(tmp_path / "model", **cases.FAMILIES[name]), ATTENTION
    if name not in cases.WITH_EXPERTS:
        config = config | dict(target_modules="all-linear")
    adapter, case = write_peft_adapter(path, tmp_path / "in", **config), cases.LAYOUTS[layout]
    found = run_ranks(export_adapters, case.world_size, path, cases.settings(**case.settings), {"one": adapter}, tmp_path / "out")[0]["one"]
    assert find_worst_error(compute_logprobs(loaded(path, adapter)), found) < 2e-5
    assert find_worst_error(compute_logprobs(load_tiny(path)), found) > 0.02, "the adapter says nothing"
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path / "out" / "one"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert find_worst_error(compute_logprobs(loaded(path, tmp_path / "out" / "one")), compute_logprobs(loaded(path, adapter))) == 0
    merged = load_tiny(tmp_path / "out" / "one_merged")
    assert find_worst_error(compute_logprobs(merged), found) < 2e-5


def test_merged_files_equal_the_merged_policy(model, tmp_path):
    from megatron_grpo.run.export import merge_adapter

    adapter = write_peft_adapter(model, tmp_path / "in", **KINDS["patterns"])
    run_ranks(export_adapters, 1, model, cases.settings(), {"one": adapter}, tmp_path / "out")
    merge_adapter(model, adapter, tmp_path / "merged")
    ours, policy = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", tmp_path / "out" / "one_merged"))
    assert ours.keys() == policy.keys() and all(torch.allclose(ours[name], policy[name], atol=1e-7) for name in ours)


def test_adapter_of_another_base_is_an_error(model, tmp_path):
    from megatron_grpo.run.export import merge_adapter

    run_ranks(export_adapters, 1, model, cases.settings(), {"one": write_peft_adapter(model, tmp_path / "in", r=2)}, tmp_path / "out")
    other = write_tiny(tmp_path / "other", **cases.MODELS["dense"], seed=1)
    with pytest.raises(ConfigError, match="was trained with another model"):
        merge_adapter(other, tmp_path / "out" / "one", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def export_and_listen(rank, world, model, adapters, out):
    """Return the log lines of each export, by name."""
    import logging

    said = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("megatron_grpo.run.export").addHandler(listener)
    cfg, heard = cases.settings(), {}
    parallel = cases.join(cfg, world)
    for kind, adapter in adapters.items():
        from megatron_grpo.run.export import export_model
        from megatron_grpo.run.metrics.model_card import ModelCard

        own = cfg.with_values({"tuner_type": "lora", "adapters": str(adapter)})
        policy = cases.build(model, own, world, parallel)
        card = ModelCard(cfg=own, source=model)
        export_model(policy, out / kind, cfg=own, source=model, card=card)
        heard[kind], said[:] = list(said), []
    return heard


def test_export_warns_of_modules_that_peft_drops(tmp_path):
    """Beside experts, PEFT 0.21 treats gate_proj, up_proj and down_proj of dense layers and shared experts as experts' matrices."""
    model = write_tiny(tmp_path / "model", "deepseek_v3")
    left_out = [f"{where}.{last}_proj" for where in ("layers.0.mlp", "shared_experts") for last in ("gate", "up", "down")]
    kinds = {"all": lora_cases.LoraSettings(rank=4), "fitting": lora_cases.LoraSettings(rank=4, exclude_modules=left_out)}
    adapters = {kind: lora_cases.write_random_adapter(model, tmp_path / "in" / kind, settings) for kind, settings in kinds.items()}
    heard = run_ranks(export_and_listen, 1, model, adapters, tmp_path / "out")[0]
    assert heard["fitting"] == []
    (said,) = heard["all"]
    assert said.startswith(f"{tmp_path / 'out' / 'all'}: PEFT 0.21 loads this adapter without 6 of its 28 modules (model.layers.0.mlp.")
    assert "merge_lora true" in said and "exclude_modules" in said

    unloaded = {}
    for kind in kinds:
        held, wrapped = load_file(tmp_path / "out" / kind / "adapter_model.safetensors"), loaded(model, tmp_path / "out" / kind)
        there = {name.replace(".default", "") for name, _ in wrapped.named_parameters()}
        # Experts' matrices have other names in transformers' model.
        unloaded[kind] = [name for name in held if ".mlp.experts." not in name and name not in there]
    assert unloaded["fitting"] == []
    assert len(unloaded["all"]) == 12 and all(".layers.0.mlp." in name or ".shared_experts." in name for name in unloaded["all"])


# ---- who the KL is measured against --------------------------------------------------------------------------------------------------


def references(rank, world, model, cfg):
    policy = cases.build(model, cfg, world)
    samples = cases.stored_rollout(model, vocab=125)[0]
    policy.train_step(cases.make_batch(policy, samples, 0))
    with policy.adapters.reference():
        return cases.score_tokens(policy, TOKENS), cases.score_tokens(policy, TOKENS)


@pytest.mark.parametrize("layout", ["1", "TP2 SP", "PP2"])
def test_lora_reference_is_the_initial_policy_unless_another_is_named(model, tmp_path, layout):
    case = cases.LAYOUTS[layout]
    start = lora_cases.write_random_adapter(model, tmp_path / "start")
    sft = write_peft_adapter(model, tmp_path / "sft", **KINDS["all-linear, rslora"])
    base = cases.settings(tuner_type="lora", beta=0.1, target_modules=["q_proj", "down_proj"], **case.settings)
    wanted = {
        None: load_tiny(model),  # a fresh adapter: the model without it
        ("adapters", start): loaded(model, start),
        ("ref_adapters", sft): loaded(model, sft),  # other ranks, and modules that do not train
    }
    for given, right in wanted.items():
        cfg = base.with_values({given[0]: str(given[1])}) if given else base
        for first, again in run_ranks(references, case.world_size, model, cfg):
            assert find_worst_error(first, again) == 0
            assert find_worst_error(first, compute_logprobs(right)) < 2e-5, given


# ---- checkpoints ---------------------------------------------------------------------------------------------------------------------


def save(rank, world, model, cfg, batches, directory):
    from tests.checkpoint_files import write_sharded

    policy = cases.build(model, cfg, world)
    for index, samples in enumerate(batches):
        policy.train_step(cases.make_batch(policy, samples, index))
    write_sharded(policy.sharded_state_dict(is_loading=False), directory)


def list_names(rank, world, directory):
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

    return [part.key for part in load_sharded_metadata(str(directory)).values()]


def take_third_step(rank, world, model, cfg, batches, directory):
    """Take the third step after a resume with a newly drawn adapter: all of its state must come from the files."""
    from megatron_grpo.run.checkpoint.distributed import read_sharded

    policy = cases.build(model, cfg.with_values({"adapters": None, "seed": 7}), world)
    policy.load_sharded_state_dict(read_sharded(policy.sharded_state_dict(is_loading=True), directory))
    policy.train_step(cases.make_batch(policy, batches[2], 2))
    return {name: tensor.numpy().copy() for name, tensor in policy.named_adapters()}


@pytest.mark.parametrize(
    ("kind", "saved", "resumed"),
    [("dense", "1", ["1", "TP2 SP PP2"]), ("dense", "TP2 SP", ["PP2 VPP2", "DP2"]), ("MoE", "EP2", ["TP2 ETP2", "1"])],
)
def test_lora_checkpoint_holds_only_adapters_and_resumes_in_each_layout(tmp_path, kind, saved, resumed):
    model = write_tiny(tmp_path / "model", **cases.MODELS[kind])
    start, batches = lora_cases.write_random_adapter(model, tmp_path / "start"), cases.stored_rollout(model, num_steps=3, vocab=125)
    words = lora_cases.in_settings(lora_cases.ODD)

    def settings(layout, **more):
        return cases.settings(**cases.MODEL_SETTINGS.get(kind, {}) | cases.LAYOUTS[layout].settings | words | more)

    right = run_ranks(cases.train, 1, model, settings("1", adapters=str(start)), batches)[0].weights
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    run_ranks(save, cases.LAYOUTS[saved].world_size, model, settings(saved, adapters=str(start)), batches[:2], directory)
    held = run_ranks(list_names, 1, directory)[0]
    assert held and all(".lora_" in name for name in held), [name for name in held if ".lora_" not in name]
    for layout in resumed:
        for found in run_ranks(take_third_step, cases.LAYOUTS[layout].world_size, model, settings(layout), batches, directory):
            error, name = cases._worst(found, right)
            assert error < 5e-6, (layout, name)  # layouts round by themselves
