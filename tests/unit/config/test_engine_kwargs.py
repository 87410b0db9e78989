"""Keyword arguments for vLLM, Megatron-Core and chat templates, checked against these packages and against settings."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import megatron_grpo
from megatron_grpo.core.rollout.engine import SamplingSettings
from megatron_grpo.run.config import engine_kwargs, sampling_mask
from megatron_grpo.run.config.evaluation import eval_sampling, longest_completion
from megatron_grpo.run.config.rules.settings import validate
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.table import table
from megatron_grpo.run.evaluate import make_eval_sampling
from tests.checked import check
from tests.ranks import run_ranks


def list_problems(**values) -> list[str]:
    return [problem.message for problem in validate(Config().with_values(values))]


@pytest.mark.parametrize(
    ("flag", "given", "sentence"),
    [
        ("vllm_engine_kwargs", {"max_num_batched_tokens": 512, "scheduling_policy": "fcfs"}, None),
        ("vllm_engine_kwargs", {"max_num_batched_token": 512}, "unknown field of vLLM's EngineArgs. Did you mean max_num_batched_tokens?"),
        ("vllm_engine_kwargs", {"max_num_batched_tokens": "many"}, "max_num_batched_tokens is int | None in vLLM's EngineArgs, not 'many'"),
        ("vllm_engine_kwargs", {"stream_interval": True}, "stream_interval is int in vLLM's EngineArgs, not True"),
        ("vllm_engine_kwargs", {"gpu_memory_utilization": 0.5}, "is the setting vllm_gpu_memory_utilization. Use"),
        ("vllm_engine_kwargs", {"speculative_config": {"method": "ngram"}}, "neither a seed nor a resumed run would draw the same again"),
        ("vllm_engine_kwargs", {"quantization": "fp8"}, "the sampler would not compute with the weights that are pushed"),
        ("vllm_engine_kwargs", {"mamba_ssm_cache_dtype": "bfloat16"}, "the trainer keeps the states of a recurrence in float32"),
        ("vllm_engine_kwargs", {"_api_process_count": 2}, "unknown field of"),
        ("megatron_extra_kwargs", {"batch_p2p_sync": False}, None),
        ("megatron_extra_kwargs", {"recompute_granularity": "full"}, "is the setting recompute_granularity. Use"),
        ("megatron_extra_kwargs", {"moe_permute_fusion": True}, "is the setting moe_permute_fusion. Use"),
        ("megatron_extra_kwargs", {"window_size": [4, 4]}, "it belongs to the model, or changes what is computed"),
        ("megatron_extra_kwargs", {"batch_p2p_synk": False}, "Did you mean batch_p2p_sync?"),
        ("megatron_extra_kwargs", {"batch_p2p_sync": "no"}, "batch_p2p_sync is bool in Megatron-Core's TransformerConfig, not 'no'"),
        ("generation_kwargs", {"ignore_eos": True, "skip_special_tokens": False}, None),
        ("generation_kwargs", {"max_tokens": 3}, "is the setting max_completion_length. Use"),
        ("generation_kwargs", {"presence_penalty": 0.5}, "it makes a word's probability depend on which words were said before it"),
        ("generation_kwargs", {"logit_bias": {"5": 1.0}}, "the trainer's softmax does not know of it"),
        ("generation_kwargs", {"min_p": 0.1}, "is the setting min_p. Use"),
        ("generation_kwargs", {"structured_outputs": {"regex": "a"}}, None),
        ("generation_kwargs", {"structured_outputs": "a"}, "is an object such as"),
        ("generation_kwargs", {"structured_outputs": {"regexp": "a"}}, "structured_outputs has no key regexp. Supported"),
        ("generation_kwargs", {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "it has regex and choice"),
        ("generation_kwargs", {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "vllm_engine_kwargs structured"),
        ("generation_kwargs", {"structured_outputs": {"choice": ["b", ""]}}, "Use a list of strings, not empty"),
        ("vllm_structured_outputs_regex", "", "has '' as regex. Use a string, not empty"),
        ("eval_generation_kwargs", {"structured_outputs": {}}, "it has none"),
        ("generation_kwargs", {"logprobs": 3}, "how answers come is arranged here"),
        ("generation_kwargs", {"ignore_eoss": True}, "Did you mean ignore_eos?"),
        ("eval_generation_kwargs", {"presence_penalty": 0.5, "structured_outputs": {"regex": "a"}, "min_tokens": 2}, None),
        ("eval_generation_kwargs", {"temperature": 0.5}, "is the setting eval_temperature. Use"),
        ("chat_template_kwargs", {"add_generation_prompt": False}, "is set by this package for each prompt"),
    ],
)  # fmt: skip
def test_engine_kwargs_key_is_accepted_or_rejected_by_name(flag, given, sentence):
    found = list_problems(**{flag: given})
    assert not found if sentence is None else len(found) == 1 and found[0].startswith(f"{flag}: ") and sentence in found[0], found


def test_megatron_extra_kwargs_do_not_overlap_settings():
    source = ast.parse((Path(megatron_grpo.__file__).parent / "core/policy/model_config.py").read_text())
    functions = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.name != "layer_specs"]
    ours = {keyword.arg for function in functions for call in ast.walk(function) if isinstance(call, ast.Call) for keyword in call.keywords}
    megatron = engine_kwargs.options("megatron_extra_kwargs")
    assert "bias_dropout_fusion" in ours and not ours & {*megatron["may"]}
    assert {*megatron["may"]} <= megatron["fields"].keys() and {*vars(Config().kernels)} <= megatron["here"].keys()
    assert {"cp_comm_type", "moe_permute_fusion"} <= ours & megatron["fields"].keys()


def test_engine_kwargs_rejected_keys_exist_in_vllm():
    for flag in ("generation_kwargs", "eval_generation_kwargs", "vllm_engine_kwargs"):
        told = engine_kwargs.options(flag)
        assert not {*told["here"], *told["refused"], *told["may"]} - told["fields"].keys()
        assert not {*told["here"].values()} - table().keys()
    sampling = engine_kwargs.options("generation_kwargs")["fields"]
    bounds = engine_kwargs.read_class_fields("vllm", "sampling_params.py", "StructuredOutputsParams").keys()
    assert sampling_mask.FIELD in sampling and {*sampling_mask.KINDS, *sampling_mask.ENGINE_OPTIONS, "whitespace_pattern"} == {
        name for name in bounds if not name.startswith("_")
    }


def test_engine_kwargs_values_are_parsed_as_json_if_valid():
    cfg = check(["--vllm_engine_kwargs", '{"stream_interval": 4}', "enable_dbo=false", "--generation_kwargs", "ignore_eos=true",
                 "--chat_template_kwargs", "style=short=yes", "--megatron_extra_kwargs", "offload_modules=[\"qkv\"]"]).config  # fmt: skip
    assert cfg.rollout.vllm_engine_kwargs == {"stream_interval": 4, "enable_dbo": False}
    assert cfg.rollout.generation_kwargs == {"ignore_eos": True} and cfg.data.chat_template_kwargs == {"style": "short=yes"}
    assert cfg.model.megatron_extra_kwargs == {"offload_modules": ["qkv"]}


def test_enable_thinking_and_chat_template_kwargs_must_agree():
    assert list_problems(enable_thinking=False, chat_template_kwargs={"enable_thinking": False}) == []
    [sentence] = list_problems(enable_thinking=False, chat_template_kwargs={"enable_thinking": True})
    assert "differ" in sentence
    data = Config().with_values({"enable_thinking": False, "chat_template_kwargs": {"depth": 2}}).data
    assert data.template_options == {"enable_thinking": False, "depth": 2}


def test_eval_sampling_defaults_to_training_sampling():
    training = {
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "temperature": 0.8,
        "max_completion_length": 100,
        "generation_kwargs": {"ignore_eos": True},
    }
    held_out = {"eval_datasets": {"a": "x"}}
    cfg = Config().with_values({**training, **held_out})

    def drawn(cfg):
        return make_eval_sampling(SamplingSettings.from_config(cfg.rollout, num_generations=16), eval_sampling(cfg))

    how = drawn(cfg)
    assert (how.top_p, how.top_k, how.temperature, how.max_completion_length, how.more) == (0.9, 7, 0.8, 100, {"ignore_eos": True})
    assert (
        how.min_p == 0.1
        and not how.returns_sampling_mask
        and SamplingSettings.from_config(cfg.rollout, num_generations=16).returns_sampling_mask
    )
    own = {"eval_top_p": 1.0, "eval_top_k": 0, "eval_min_p": 0.2, "eval_temperature": 0.5, "eval_max_completion_length": 300,
           "eval_generation_kwargs": {"min_tokens": 2}}  # fmt: skip
    how = drawn(cfg.with_values(own))
    assert how.min_p == 0.2
    assert (how.top_p, how.top_k, how.temperature, how.max_completion_length, how.more) == (1.0, 0, 0.5, 300, {"min_tokens": 2})
    assert longest_completion(cfg.with_values(own)) == 300 and longest_completion(cfg.with_values({**own, "eval_datasets": {}})) == 100
    bounded = cfg.with_values({"vllm_structured_outputs_regex": "a+"})
    assert drawn(bounded).more == {"ignore_eos": True, "structured_outputs": {"regex": "a+"}}
    assert drawn(bounded.with_values(own)).more == {"min_tokens": 2}
    greedy = drawn(cfg.with_values({"eval_temperature": 0.0}))
    assert (greedy.n, greedy.top_p, greedy.top_k, greedy.min_p) == (1, 1.0, 0, 0.0)
    assert any("eval_top_k (5) has no effect with eval_temperature 0" in one for one in list_problems(eval_temperature=0.0, eval_top_k=5))
    [sentence] = list_problems(**held_out, eval_max_completion_length=300, rollout_func="a.py:f")
    assert "eval_max_completion_length (300) is not supported with rollout_func" in sentence


def test_ref_model_without_beta_or_with_ref_adapters_is_rejected():
    from megatron_grpo.run.config.rules.grpo import problems

    assert "beta is 0" in problems(Config().with_values({"ref_model": "x"}))[0].message
    assert "Keep one of them" in problems(Config().with_values({"ref_model": "x", "beta": 0.1, "ref_adapters": "y"}))[0].message
    assert problems(Config().with_values({"ref_model": "x", "beta": 0.1})) == []


def test_megatron_config_contains_extra_kwargs_and_kernel_settings():
    def body(rank, world_size):
        from megatron_grpo.core.policy.model_config import transformer_config
        from megatron_grpo.core.settings import KernelConfig, ModelConfig, ParallelConfig
        from megatron_grpo.core.weights.shape import ModelShape

        hf = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8,
              "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 64, "num_experts": 4, "num_experts_per_tok": 2,
              "moe_intermediate_size": 16, "max_position_embeddings": 64}  # fmt: skip
        shape = ModelShape.from_hf(hf)
        model, layout = ModelConfig(torch_dtype="float32", megatron_extra_kwargs={"batch_p2p_sync": False}), ParallelConfig()
        plain = transformer_config(shape, ModelConfig(torch_dtype="float32"), layout, use_te=False)
        assert (plain.batch_p2p_sync, plain.cp_comm_type, plain.moe_shared_expert_overlap) == (True, None, False)
        asked = transformer_config(shape, model, layout, use_te=False, kernels=KernelConfig(cp_comm_type="a2a"))
        assert (asked.batch_p2p_sync, asked.cp_comm_type) == (False, "a2a")

    run_ranks(body, 1)
