"""What Megatron-Core cannot compute is refused in `plan` and in `train` alike, before a model loads."""

from __future__ import annotations

import dataclasses
import json

import pytest

from megatron_grpo.errors import ConfigError
from megatron_grpo.inputs import read_everything
from megatron_grpo.planning.check import check
from megatron_grpo.planning.sharing import LEAST_SAVING, decide
from megatron_grpo.policy.refused import attention_channels, flash_obstacle, problems, sharing_problems
from megatron_grpo.settings import parse
from megatron_grpo.settings.config import Config
from megatron_grpo.weights.shape import ModelShape
from tests.tiny_models import write_tiny
from tests.unit.weights.tiny import config_of

DEEPSEEK = ModelShape.from_hf(config_of("deepseek_v3"))


def refused(config: Config | None = None, shape: ModelShape = DEEPSEEK, **moe) -> list[str]:
    shape = dataclasses.replace(shape, moe=dataclasses.replace(shape.moe, **moe))
    return [problem.message for problem in problems(config or Config(), shape)]


def test_models_that_megatron_computes_pass():
    for name in ("qwen3_moe", "qwen3_moe_raw_weights", "mixtral", "deepseek_v3"):
        assert refused(shape=ModelShape.from_hf(config_of(name))) == []
    assert refused(num_groups=4, group_topk=4, topk=3) == []  # all groups: no choice among them
    assert refused(topk=1, norm_topk_prob=False, num_groups=None, group_topk=None) == []


@pytest.mark.parametrize(("changes", "words"), [
    ({"norm_topk_prob": False}, "sum to 1"),
    ({"topk": 1, "num_groups": None, "group_topk": None}, "num_experts_per_tok 1"),
    ({"num_groups": 4, "group_topk": 2}, "(2 / 2 = 1)"),
    ({"score_function": "softmax", "topk": 1, "num_groups": None, "group_topk": None}, "cannot be trained"),
])  # fmt: skip
def test_a_router_that_megatron_computes_otherwise_is_refused(changes, words):
    (message,) = refused(**changes)
    assert words in message


def test_latent_attention_is_refused_on_transformer_engine_layers():
    cfg = Config().with_values({"transformer_impl": "transformer_engine"})
    (message,) = refused(cfg)
    assert "multi-latent attention" in message
    dense = ModelShape.from_hf(config_of("qwen3"))
    assert problems(cfg, dense) == []


@pytest.mark.parametrize(("model", "module"), [("llama_all_biases", "mlp"), ("deepseek_v3", "mla_up_proj"), ("deepseek_v3", "layernorm")])
def test_layers_that_cannot_be_recomputed_are_refused(model, module):
    cfg = Config().with_values({"recompute_granularity": "selective", "recompute_modules": ["core_attn", module]})
    (problem,) = problems(cfg, ModelShape.from_hf(config_of(model)))
    assert module in problem.message
    good = cfg.with_values({"recompute_modules": ["core_attn"]})
    assert problems(good, ModelShape.from_hf(config_of(model))) == []


def test_plan_refuses_what_the_policy_cannot_compute(tmp_path):
    config = {**config_of("deepseek_v3"), "norm_topk_prob": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="sum to 1"):
        check(["--model", str(tmp_path), "--max_completion_length", "8"])


def test_a_prompt_too_long_for_the_model_is_named_with_every_other_problem(tmp_path):
    write_tiny(tmp_path / "model", max_positions=16)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": " ".join(["7"] * 10)}) + "\n")
    argv = ["--model", str(tmp_path / "model"), "--dataset", str(tmp_path / "prompts.jsonl"), "--reward_funcs", "length", "--max_steps",
            "1", "--max_completion_length", "8", "--output_dir", str(tmp_path / "out"), "--tensor_model_parallel_size", "3"]  # fmt: skip
    with pytest.raises(ConfigError) as refusal:
        read_everything(parse(argv, launcher_world_size=3))
    said = str(refusal.value)
    assert "18 tokens are longer than the model's max_position_embeddings (16)" in said
    assert "num_attention_heads" in said


@pytest.mark.parametrize(("model", "changes", "words"), [
    ("gpt_oss", {"expert_tensor_parallel_size": 2}, "2 would add the biases of GptOssForCausalLM's experts 2 times"),
    ("gpt_oss", {"tuner_type": "lora"}, "GptOssForCausalLM keeps the experts of a layer in one tensor"),
    ("olmo3", {"transformer_impl": "transformer_engine"}, "attention within a window, which Olmo3ForCausalLM has, is computed"),
    ("glm4_moe", {"transformer_impl": "transformer_engine"}, "a rotation of a part of each head"),
    ("olmo2", {"transformer_impl": "transformer_engine"}, "a norm over all heads"),
])  # fmt: skip
def test_what_some_families_have_and_a_setting_has_not_is_refused(model, changes, words):
    shape = ModelShape.from_hf(config_of(model))
    (problem,) = problems(Config().with_values(changes), shape)
    assert words in problem.message and problems(Config(), shape) == []


def test_prompts_are_shared_where_a_window_reaches_over_the_longest_sequence():
    shape = ModelShape.from_hf(config_of("olmo3"))  # windows of 9 tokens
    short = Config().with_values({"max_prompt_length": 4, "max_completion_length": 5, "micro_batch_size": 4})
    assert decide(short, shape).least_saving == LEAST_SAVING
    longer = short.with_values({"max_completion_length": 6})
    assert "Olmo3ForCausalLM has layers that see 9 tokens, where sequences have up to 10" in decide(longer, shape).why
    (problem,) = sharing_problems(longer.with_values({"share_prompts": "true"}), shape)
    assert "true cannot be: Olmo3ForCausalLM has layers" in problem.message


@pytest.mark.parametrize("name", [
    "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "NemotronHForCausalLM", "DeepseekV32ForCausalLM"
])  # fmt: skip
def test_families_that_are_known_and_missing_are_refused_by_name_with_what_is_missing(name):
    with pytest.raises(ConfigError, match=f"the architecture {name} is not supported: its .*(kernels of a GPU|sparse attention)"):
        ModelShape.from_hf({**config_of("qwen3"), "architectures": [name]})


TE = {"transformer_impl": "transformer_engine"}
DROPOUT = {"tuner_type": "lora", "lora_dropout": 0.1}
PARENTS = "share_prompts true needs attention with parents, which Transformer Engine's path has not yet"


@pytest.mark.parametrize(
    ("changes", "words"), [(TE, PARENTS), (DROPOUT, "lora_dropout (0.1) would draw one mask for all copies of a prompt")]
)
def test_sharing_prompts_is_refused_where_it_would_train_something_else_and_auto_leaves_it_off(changes, words):
    dense = ModelShape.from_hf(config_of("qwen3"))
    (problem,) = sharing_problems(Config().with_values(changes | {"share_prompts": "true"}), dense)
    assert words in problem.message and problem.nearest["share_prompts"] == ["auto", "false"]
    for setting in ("auto", "false"):
        cfg = Config().with_values(changes | {"share_prompts": setting, "micro_batch_size": 4})
        assert sharing_problems(cfg, dense) == [] and decide(cfg, dense).least_saving is None


def test_transformer_engine_that_auto_would_take_leaves_prompts_unshared_and_latent_attention_never_takes_it():
    dense, cfg = ModelShape.from_hf(config_of("qwen3")), Config().with_values({"micro_batch_size": 4})
    assert decide(cfg, dense, has_transformer_engine=False).least_saving == LEAST_SAVING
    assert "Transformer Engine" in decide(cfg, dense, has_transformer_engine=True).why
    assert sharing_problems(cfg.with_values({"share_prompts": "true"}), dense, has_transformer_engine=True)
    assert decide(cfg, DEEPSEEK, has_transformer_engine=True).least_saving == LEAST_SAVING


@pytest.mark.parametrize(("dtype", "channels", "words"), [
    ("bfloat16", 128, None), ("float16", 256, None), ("bfloat16", 192, None),
    ("float32", 128, "not float32"), ("bfloat16", 264, "at most 256"), ("bfloat16", 100, "a multiple of 8"),
])  # fmt: skip
def test_flash_attention_takes_half_precision_and_heads_of_up_to_256_channels(dtype, channels, words):
    assert (words is None and flash_obstacle(dtype, channels) is None) or words in flash_obstacle(dtype, channels)


def test_the_heads_of_latent_attention_are_those_of_its_queries():
    assert attention_channels(DEEPSEEK) == DEEPSEEK.mla.qk_head_dim + DEEPSEEK.mla.qk_pos_emb_head_dim
    assert attention_channels(ModelShape.from_hf(config_of("qwen3"))) == ModelShape.from_hf(config_of("qwen3")).head_dim
