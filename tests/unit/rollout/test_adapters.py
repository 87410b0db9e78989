"""How adapters are synced to the sampler, decided from names and sizes."""

from __future__ import annotations

import json

import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.settings import ModelConfig, RolloutConfig, TunerConfig
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.adapters import SLOT_RANKS, lora_sync, slot_rank
from megatron_grpo.run.config.settings import Config
from tests.unit.weights.tiny import make_model_config

DENSE, EXPERTS, LATENT = (ModelShape.from_hf(make_model_config(name)) for name in ("qwen3", "qwen3_moe", "deepseek_v3"))


def plan_adapter(shape=DENSE, *, on_gpu=False, dtype="float32", obstacle=None, sampler=None, **tuner):
    cfg = Config(
        model=ModelConfig(torch_dtype=dtype), tuner=TunerConfig(**{"tuner_type": "lora"} | tuner), rollout=RolloutConfig(vllm_dtype=sampler)
    )
    return lora_sync(cfg, shape, on_gpu=on_gpu, sampler_obstacle=obstacle)


def test_adapter_plan_of_full_tuning_is_none():
    assert plan_adapter(tuner_type="full") is None


@pytest.mark.parametrize(("rank", "slot"), [(1, 1), (2, 8), (8, 8), (9, 16), (129, 256), (257, 320), (321, 512), (512, 512), (513, None)])
def test_slot_rank_is_smallest_that_fits_largest_rank(rank, slot):
    assert slot_rank(rank) == slot
    if slot:
        assert plan_adapter(rank_pattern={"o_proj": rank}, lora_rank=1).slot_rank == slot
        # vLLM refuses a configuration that names more than there is room for, whoever has it.
        assert plan_adapter(rank_pattern={"o_proj": 1}, lora_rank=rank, target_modules=["o_proj"]).slot_rank == slot


def test_adapter_plan_lists_modules_and_last_name_parts():
    found = plan_adapter(target_modules=["linear_qkv"], exclude_modules=["model.layers.0.self_attn.k_proj"])
    layers = DENSE.num_layers
    assert len(found.modules) == 3 * layers - 1 and "model.layers.1.self_attn.k_proj" in found.modules
    assert found.last_name_parts == ["k_proj", "q_proj", "v_proj"] and found.notes == ()
    assert plan_adapter(EXPERTS, on_gpu=True).last_name_parts == [
        "down_proj",
        "experts",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ]
    assert "experts" not in plan_adapter(LATENT, target_modules=["o_proj"]).last_name_parts


@pytest.mark.parametrize(
    ("shape", "on_gpu", "tuner", "reason"),
    [
        (EXPERTS, False, {}, "vLLM needs Triton for adapters on experts, which is not available on a CPU"),
        (EXPERTS, False, {"target_modules": ["linear_qkv"]}, None),
        (EXPERTS, True, {}, None),
        (EXPERTS, None, {}, None),
        (EXPERTS, True, {"target_modules": ["gate_proj", "down_proj"]}, "on all three matrices of all experts of a layer"),
        (EXPERTS, True, {"exclude_modules": ["experts.1.up_proj"]}, "on all three matrices of all experts of a layer"),
        (EXPERTS, True, {"rank_pattern": {r"experts\.1\.up_proj": 3}}, "one rank per matrix"),
        (EXPERTS, True, {"rank_pattern": {"up_proj": 3}}, None),
        (LATENT, True, {}, "vLLM merges kv_b_proj into latent attention when it loads a model, and would ignore its adapter"),
        (LATENT, True, {"exclude_modules": ["kv_b_proj"]}, None),
    ],
)
def test_adapter_unsupported_by_vllm_is_merged_with_reason(shape, on_gpu, tuner, reason):
    found = plan_adapter(shape, on_gpu=on_gpu, **tuner)
    if reason is None:
        assert found.kind == "adapter" and found.slot_rank in SLOT_RANKS and found.notes == ()
        return
    (note,) = found.notes
    assert found.kind == "merged" and found.slot_rank == 0 and note.startswith("Note: the adapter is merged") and reason in note
    with pytest.raises(ConfigError, match=f"vllm_enable_lora true: the adapter cannot be synced separately: .*{reason}"):
        plan_adapter(shape, on_gpu=on_gpu, vllm_enable_lora=True, **tuner)


def test_adapter_rejected_by_sampler_is_merged():
    assert plan_adapter(obstacle="it takes none").notes == (
        "Note: the adapter is merged into the weights for every weight sync: it takes none.",
    )
    with pytest.raises(ConfigError, match="cannot be synced separately: it takes none"):
        plan_adapter(obstacle="it takes none", vllm_enable_lora=True)


def test_adapter_rank_above_vllm_limit_is_merged_with_note(tmp_path):
    config = {"peft_type": "LORA", "r": 600, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (note,) = plan_adapter(adapters=str(tmp_path)).notes
    assert "vLLM supports ranks up to 512, but the adapter's configuration has 600" in note


@pytest.mark.parametrize(
    ("dtype", "sampler", "asked", "warned"),
    [("bfloat16", None, False, True), ("bfloat16", "float32", False, False), ("float32", "bfloat16", False, True),
     ("float32", None, False, False), ("bfloat16", None, None, False), ("bfloat16", None, True, False)],
)  # fmt: skip
def test_adapter_merged_in_bfloat16_gives_a_warning(dtype, sampler, asked, warned):
    found = plan_adapter(dtype=dtype, sampler=sampler, vllm_enable_lora=asked)
    assert found.kind == ("merged" if asked is False else "adapter")
    assert [note.startswith("WARNING") and "98 % of the first step's update" in note for note in found.notes] == [True] * warned
    if warned:
        assert "Leave vllm_enable_lora out" in found.notes[0]
    forced = plan_adapter(EXPERTS, dtype=dtype, sampler=sampler)
    assert len(forced.notes) == 1 + ((sampler or dtype) == "bfloat16") and "Leave vllm_enable_lora out" not in " ".join(forced.notes)
