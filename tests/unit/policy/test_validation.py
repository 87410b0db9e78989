"""Models and settings that Megatron-Core cannot compute are rejected by `plan` and `train` before a model loads."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.parallel.layout import Layout, sequence_alignment
from megatron_grpo.core.policy.requirements import flash_obstacle, rank_multiple
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.config import parse
from megatron_grpo.run.config.rules.policy import attention_channels, machine_problems, problems, sampler_problems, sharing_problems
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.models import find_parity_problems
from megatron_grpo.run.sharing import LEAST_SAVING, decide
from megatron_grpo.run.validate import load_inputs
from tests.checked import check
from tests.tiny_models import write_tiny
from tests.unit.weights.tiny import make_model_config

DEEPSEEK = ModelShape.from_hf(make_model_config("deepseek_v3"))


def list_problems(config: Config | None = None, shape: ModelShape = DEEPSEEK, **moe) -> list[str]:
    shape = dataclasses.replace(shape, moe=dataclasses.replace(shape.moe, **moe))
    return [problem.message for problem in problems(config or Config(), shape)]


def test_models_supported_by_megatron_are_accepted():
    for name in ("qwen3_moe", "qwen3_moe_raw_weights", "mixtral", "deepseek_v3"):
        assert list_problems(shape=ModelShape.from_hf(make_model_config(name))) == []
    assert list_problems(num_groups=4, group_topk=4, topk=3) == []  # all groups: no choice among them
    assert list_problems(topk=1, norm_topk_prob=False, num_groups=None, group_topk=None) == []


@pytest.mark.parametrize(("changes", "words"), [
    ({"norm_topk_prob": False}, "normalizes the weights of the selected experts"),
    ({"topk": 1, "num_groups": None, "group_topk": None}, "num_experts_per_tok 1"),
    ({"num_groups": 4, "group_topk": 2}, "(2 / 2 = 1)"),
    ({"score_function": "softmax", "topk": 1, "num_groups": None, "group_topk": None}, "cannot be trained"),
])  # fmt: skip
def test_router_unsupported_by_megatron_is_rejected(changes, words):
    (message,) = list_problems(**changes)
    assert words in message


def test_latent_attention_is_refused_on_transformer_engine_layers():
    cfg = Config().with_values({"transformer_impl": "transformer_engine"})
    (message,) = list_problems(cfg)
    assert "multi-latent attention" in message
    dense = ModelShape.from_hf(make_model_config("qwen3"))
    assert problems(cfg, dense) == []


@pytest.mark.parametrize(("model", "module"), [("llama_all_biases", "mlp"), ("deepseek_v3", "mla_up_proj"), ("deepseek_v3", "layernorm")])
def test_layers_that_cannot_be_recomputed_are_refused(model, module):
    cfg = Config().with_values({"recompute_granularity": "selective", "recompute_modules": ["core_attn", module]})
    (problem,) = problems(cfg, ModelShape.from_hf(make_model_config(model)))
    assert module in problem.message
    good = cfg.with_values({"recompute_modules": ["core_attn"]})
    assert problems(good, ModelShape.from_hf(make_model_config(model))) == []


def test_plan_refuses_what_the_policy_cannot_compute(tmp_path):
    config = {**make_model_config("deepseek_v3"), "norm_topk_prob": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="normalizes the weights of the selected experts"):
        check(["--model", str(tmp_path), "--max_completion_length", "8"])


def test_a_prompt_too_long_for_the_model_is_named_with_every_other_problem(tmp_path):
    write_tiny(tmp_path / "model", max_positions=16)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": " ".join(["7"] * 10)}) + "\n")
    argv = ["--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "prompts.jsonl"), "--reward_funcs", "length", "--max_steps",
            "1", "--max_completion_length", "8", "--output_dir", str(tmp_path / "out"), "--tensor_model_parallel_size", "3"]  # fmt: skip
    with pytest.raises(ConfigError) as skipped_step:
        load_inputs(parse(argv, launcher_world_size=3))
    said = str(skipped_step.value)
    assert "18 tokens are longer than the model's max_position_embeddings (16)" in said
    assert "num_attention_heads" in said


@pytest.mark.parametrize(("model", "changes", "words"), [
    ("gpt_oss", {"expert_tensor_parallel_size": 2}, "2 would add the biases of GptOssForCausalLM's experts 2 times"),
    ("gpt_oss", {"tuner_type": "lora"}, "GptOssForCausalLM stores the experts of a layer in one tensor"),
    ("gpt_oss", {"tuner_type": "lora", "target_modules": ["q_proj", "down_proj"]}, "Use q_proj k_proj v_proj o_proj, or tuner_type full"),
    ("olmo3", {"transformer_impl": "transformer_engine"}, "sliding-window attention, which Olmo3ForCausalLM has, is supported"),
    ("glm4_moe", {"transformer_impl": "transformer_engine"}, "partial rotary embedding"),
    ("olmo2", {"transformer_impl": "transformer_engine"}, "a norm over all heads"),
])  # fmt: skip
def test_settings_unsupported_by_a_model_family_are_rejected(model, changes, words):
    shape = ModelShape.from_hf(make_model_config(model))
    (problem,) = problems(Config().with_values(changes), shape)
    assert words in problem.message and problems(Config(), shape) == []


def test_adapters_on_attention_of_fused_expert_models_are_accepted():
    shape, words = ModelShape.from_hf(make_model_config("gpt_oss")), {"tuner_type": "lora", "target_modules": ["q_proj", "o_proj"]}
    assert problems(Config().with_values(words), shape) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-5"),
        ({"swiglu_limit": 0.6}, "swiglu_alpha 1.702 and swiglu_limit 7"),
        ({"attention_bias": False}, "attention_bias true"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings false"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "a sliding window in every other layer, from the first"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "YaRN without attention_factor"),
    ],
)
def test_gpt_oss_config_unsupported_by_vllm_is_rejected(changes, words):
    plain = make_model_config("gpt_oss")
    assert sampler_problems(ModelShape.from_hf(plain)) == [] == sampler_problems(ModelShape.from_hf(make_model_config("qwen3_moe")))
    (problem,) = sampler_problems(ModelShape.from_hf(plain | changes))
    assert words in problem.message


WINDOWED = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "num_hidden_layers": 2}


@pytest.mark.parametrize(("model", "changes", "words"), [
    ("qwen3", WINDOWED, "a sliding window (9) in some of its layers"),  # where vLLM's assertion fails
    ("qwen3", WINDOWED | {"max_window_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}, "set use_sliding_window false"),
    ("qwen2_moe", WINDOWED | {"max_window_layers": 2}, "Qwen2MoeForCausalLM with a sliding window"),  # these two it samples without
    ("qwen2", {"head_dim": 32, "num_attention_heads": 4, "hidden_size": 64}, "(64 / 4) for the channels of a head"),
    ("qwen3_5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim 1. Use a model with 2 or more"),
])  # fmt: skip
def test_models_unsupported_by_vllm_are_rejected_on_any_machine(model, changes, words):
    plain = make_model_config(model) | {"head_dim": 32, "hidden_size": 128, "num_attention_heads": 4, "layer_types": None}
    assert sampler_problems(ModelShape.from_hf(plain)) == []
    (problem,) = sampler_problems(ModelShape.from_hf(plain | changes))
    assert words in problem.message


def test_sliding_window_in_all_or_no_layers_is_accepted():
    windowed = make_model_config("qwen3") | WINDOWED | {"layer_types": None}
    for first in (0, 2):
        assert sampler_problems(ModelShape.from_hf(windowed | {"max_window_layers": first})) == []


@pytest.mark.parametrize(("model", "changes", "ranks", "words"), [
    ("qwen3", {"head_dim": 16}, 1, "no CPU kernel for heads of 16 channels. It has kernels for 32, 48, 64"),
    ("llama", {"head_dim": 144}, 1, "heads of 144 channels"),
    ("qwen3_moe", {"moe_intermediate_size": 24}, 1, "and the width of an expert on each rank (24) is not one"),
    ("qwen3_moe", {"moe_intermediate_size": 64}, 4, "the width of an expert on each rank (16) is not one"),
    ("mixtral", {"hidden_size": 48, "intermediate_size": 40}, 1, "hidden_size (48) and the width of an expert on each rank (40) are not"),
])  # fmt: skip
def test_sizes_that_vllms_cpu_kernels_refuse_are_refused_before_the_model_is_loaded(model, changes, ranks, words):
    plain = make_model_config(model) | {"head_dim": 32, "hidden_size": 64}
    wide = plain | {"intermediate_size": 64, "moe_intermediate_size": 64}
    assert (
        sampler_problems(ModelShape.from_hf(wide), on_cpu=True) == [] == sampler_problems(ModelShape.from_hf(plain | changes), ranks=ranks)
    )
    (problem,) = sampler_problems(ModelShape.from_hf(plain | changes), on_cpu=True, ranks=ranks)
    assert words in problem.message


def test_share_prefix_is_enabled_if_window_covers_longest_sequence():
    shape = ModelShape.from_hf(make_model_config("olmo3"))  # windows of 9 tokens
    short = Config().with_values({"max_prompt_length": 4, "max_completion_length": 5, "micro_batch_size": 4})
    assert decide(short, shape).min_saving_ratio == LEAST_SAVING
    longer = short.with_values({"max_completion_length": 6})
    assert "Olmo3ForCausalLM has layers with a sliding window of 9 tokens, and sequences have up to 10" in decide(longer, shape).why
    (problem,) = sharing_problems(longer.with_values({"share_prefix": "true"}), shape)
    assert "true is not supported: Olmo3ForCausalLM has layers" in problem.message


@pytest.mark.parametrize("name", [
    "NemotronHForCausalLM", "DeepseekV32ForCausalLM"
])  # fmt: skip
def test_unsupported_model_families_are_rejected_with_missing_feature(name):
    with pytest.raises(ConfigError, match=f"the architecture {name} is not supported: .*(Mamba-2|sparse attention)"):
        ModelShape.from_hf({**make_model_config("qwen3"), "architectures": [name]})


DROPOUT = {"tuner_type": "lora", "lora_dropout": 0.1}


def test_share_prefix_with_dropout_is_rejected_and_auto_disables_it():
    dense = ModelShape.from_hf(make_model_config("qwen3"))
    (problem,) = sharing_problems(Config().with_values(DROPOUT | {"share_prefix": "true"}), dense)
    assert "lora_dropout (0.1) would use one dropout mask for all copies of a prompt" in problem.message
    assert problem.nearest["share_prefix"] == ["auto", "false"]
    for setting in ("auto", "false"):
        cfg = Config().with_values(DROPOUT | {"share_prefix": setting, "micro_batch_size": 4})
        assert sharing_problems(cfg, dense) == [] and decide(cfg, dense).min_saving_ratio is None


@pytest.mark.parametrize("impl", ["auto", "local", "transformer_engine"])
def test_share_prefix_is_enabled_for_every_layer_kind(impl):
    dense, cfg = ModelShape.from_hf(make_model_config("qwen3")), Config().with_values({"micro_batch_size": 4, "transformer_impl": impl})
    assert decide(cfg, dense).min_saving_ratio == LEAST_SAVING and sharing_problems(cfg.with_values({"share_prefix": "true"}), dense) == []


FP8 = {"fp8_format": "hybrid", "torch_dtype": "bfloat16", "transformer_impl": "transformer_engine"}
WIDE = make_model_config("qwen3") | dict(hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4, head_dim=64)


@pytest.mark.parametrize(("changes", "words"), [
    ({}, None),
    ({"fp8_recipe": "blockwise"}, None),
    ({"transformer_impl": "local"}, "needs Transformer Engine's layers, and transformer_impl is local"),
    ({"torch_dtype": "float32"}, "needs torch_dtype bfloat16, not float32"),
    ({"tensor_model_parallel_size": 16, "fp8_recipe": "blockwise"}, "multiples of 128, but query, key and value rows per rank (160)"),
])  # fmt: skip
def test_fp8_with_unsupported_settings_is_rejected(changes, words):
    found = [
        problem.message for problem in problems(Config().with_values(FP8 | changes), ModelShape.from_hf(WIDE)) if "fp8" in problem.message
    ]
    assert found == [] if words is None else any(words in message for message in found), found


@pytest.mark.parametrize(("has_gpu", "has_te", "capability", "recipe", "words"), [
    (True, True, (9, 0), "tensorwise", None), (True, True, (8, 9), "tensorwise", None),
    (False, True, None, "tensorwise", "no GPU found"),
    (True, False, (9, 0), "tensorwise", "Transformer Engine is not installed (the extra `te`)"),
    (True, True, (8, 0), "tensorwise", "needs a GPU of compute capability 8.9, this one has 8.0. Leave fp8_format out"),
    (True, True, (9, 0), "mxfp8", "needs a GPU of compute capability 10.0, this one has 9.0. Use tensorwise or blockwise"),
])  # fmt: skip
def test_fp8_is_refused_on_a_machine_without_it(has_gpu, has_te, capability, recipe, words):
    cfg = Config().with_values(FP8 | {"transformer_impl": "auto", "fp8_recipe": recipe})
    found = machine_problems(cfg, has_gpu=has_gpu, has_transformer_engine=has_te, capability=capability)
    assert [problem.message for problem in found if words is None or words not in problem.message] == []
    assert bool(found) == (words is not None)


def test_sequence_alignment_is_rounded_up_for_fp8_and_pad_to_multiple_of():
    assert rank_multiple(Config()) == 1
    assert rank_multiple(Config().with_values(FP8)) == 16
    assert rank_multiple(Config().with_values(FP8 | {"fp8_recipe": "blockwise", "pad_to_multiple_of": 48})) == 384
    layout = Layout(world_size=8, tp=2, cp=2)
    assert sequence_alignment(layout, True) == (4, 4) and sequence_alignment(layout, False) == (4, 1)
    assert sequence_alignment(layout, True, 16) == (4, 64) and sequence_alignment(layout, False, 16) == (4, 32)


def test_a_host_optimizer_that_is_not_distributed_is_refused():
    cfg = Config().with_values({"optimizer_cpu_offload": True, "use_distributed_optimizer": False})
    (problem,) = [one for one in problems(cfg, ModelShape.from_hf(WIDE)) if "optimizer_cpu_offload" in one.flags]
    assert problem.nearest["use_distributed_optimizer"] == [True]


@pytest.mark.parametrize(("dtype", "channels", "words"), [
    ("bfloat16", 128, None), ("float16", 256, None), ("bfloat16", 192, None),
    ("float32", 128, "not float32"), ("bfloat16", 264, "up to 256"), ("bfloat16", 100, "multiples of 8"),
])  # fmt: skip
def test_flash_attention_supports_half_precision_and_256_channels(dtype, channels, words):
    assert (words is None and flash_obstacle(dtype, channels) is None) or words in flash_obstacle(dtype, channels)


def test_attention_channels_of_latent_attention_are_those_of_queries():
    assert attention_channels(DEEPSEEK) == DEEPSEEK.mla.qk_head_dim + DEEPSEEK.mla.qk_pos_emb_head_dim
    assert attention_channels(ModelShape.from_hf(make_model_config("qwen3"))) == ModelShape.from_hf(make_model_config("qwen3")).head_dim


def test_bitwise_parity_is_rejected_for_unverified_settings():
    def said(shape, **values):
        return [problem.message for problem in find_parity_problems(Config().with_values({"bitwise_parity": True, **values}), shape)]

    qwen = ModelShape.from_hf(make_model_config("qwen3"))
    yarn = dataclasses.replace(qwen.rope, attention_scaling=1.1)
    assert said(qwen) == said(qwen, torch_dtype="float32") == said(None) == []
    assert (
        list(find_parity_problems(Config(), DEEPSEEK)) == [] and machine_problems(Config(), has_gpu=True, has_transformer_engine=True) == []
    )
    for shape, values, words in (
        (DEEPSEEK, {}, "multi-latent attention"),
        (dataclasses.replace(qwen, architecture="NobodyForCausalLM"), {}, "NobodyForCausalLM is not supported"),
        (dataclasses.replace(qwen, windows=(8,) * qwen.num_layers), {}, "sliding windows"),
        (dataclasses.replace(qwen, rope=yarn), {}, "YaRN"),
        (dataclasses.replace(qwen, qkv_bias=True), {}, "rounding to bfloat16"),
        (
            dataclasses.replace(qwen, attention_out_bias=True),
            dict(tensor_model_parallel_size=2, vllm_tensor_parallel_size=2),
            "adds biases before the sum",
        ),
    ):
        (message,) = said(shape, **values)
        assert message.startswith("bitwise_parity true: ") and words in message
    assert said(dataclasses.replace(qwen, qkv_bias=True), torch_dtype="float32") == []
    (problem,) = machine_problems(Config().with_values({"bitwise_parity": True}), has_gpu=True, has_transformer_engine=True)
    assert "GPU" in problem.message


@pytest.mark.parametrize(("model", "settings", "message"), [
    ("qwen3_5", {"context_parallel_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True},
     "context_parallel_size (4): the gated delta rule distributes key heads over ranks, and linear_num_key_heads (4) is not a multiple of "
     "TP 2 x CP 4. Use fewer ranks."),
    ("qwen3_5", {"transformer_impl": "transformer_engine"},
     "transformer_impl transformer_engine: the gated delta rule, which Qwen3_5ForCausalLM has, is supported by local layers only. Use auto "
     "or local."),
    ("qwen3_5", {"use_distributed_optimizer": False},
     "use_distributed_optimizer false: Qwen3_5ForCausalLM has float32 weights beside bfloat16 ones, which Megatron-Core saves with the "
     "distributed optimizer only. Use true, or torch_dtype float32."),
    ("qwen3_next_moe", {"router_replay_mode": "R3"},
     "router_replay_mode R3: vLLM returns routed experts with prefix caching only, which it does not support for Qwen3NextForCausalLM. Use "
     "R2 or disabled."),
])  # fmt: skip
def test_hybrid_models_with_unsupported_settings_are_rejected(model, settings, message):
    shape = ModelShape.from_hf(make_model_config(model))
    assert [problem.message for problem in problems(Config().with_values(settings), shape)] == [message]
    assert problems(Config(), shape) == []


def test_qwen3_next_with_tied_embeddings_is_rejected():
    tied = {"tie_word_embeddings": True}
    (problem,) = sampler_problems(ModelShape.from_hf(make_model_config("qwen3_next_moe") | tied))
    assert problem.message == (
        "model: vLLM 0.32 does not tie the embeddings of Qwen3NextForCausalLM and would sample from memory that was never written. Use a "
        "checkpoint with tie_word_embeddings false."
    )
    assert sampler_problems(ModelShape.from_hf(make_model_config("qwen3_5") | tied | {"head_dim": 64}), on_cpu=True) == []


@pytest.mark.parametrize(("model", "part"), [("deepseek_v3", "multi-latent attention of Deep"), ("minimax_m2", "the router of MiniMax")])
def test_models_unsupported_by_vllm_on_cpu_are_rejected_on_cpu(model, part):
    shape = ModelShape.from_hf(make_model_config(model))
    (problem,) = sampler_problems(shape, on_cpu=True)
    assert problem.message.startswith(f"model: vLLM 0.32 has no correct CPU kernel for {part}") and sampler_problems(shape) == []
