"""Settings and models that bitwise_parity does not support, and why the bits would differ (docs/proof.md).

Imports no torch, because `plan` uses it too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_grpo.core.base.errors import Problem
from megatron_grpo.core.rollout.sampling_mask import find_mask_flag, samples_from_part, training_structured_outputs
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.config.rules import Rule, broken_rules, make_namespace
from megatron_grpo.run.config.settings import Config

# tools/bitwise_parity.py compares these bit by bit.
PROVEN = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)


def problems(cfg: Config, shape: ModelShape | None) -> list[Problem]:
    """Return the settings that conflict with `bitwise_parity`, which is on.

    Args:
        shape: The model's dimensions; None if unknown.
    """
    return list(broken_rules(RULES, make_namespace(cfg, shape=shape)))


def _cut_words(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the setting that restricts sampling to a part of the vocabulary, and its value that does not."""
    if not samples_from_part(c.cfg.rollout):
        return None
    flag, disabled_value = ("top_p", 1.0) if c.top_p < 1 else ("min_p", 0.0) if c.min_p else ("top_k", 0)
    return {"flag": flag, "off": disabled_value}


# fmt: off
RULES = (
    Rule("bitwise_parity vllm_mode", lambda c: c.vllm_mode == "server",
         "bitwise_parity true: trainer and sampler must share a process. Use colocate.",
         {"vllm_mode": ["colocate"]}),
    Rule("bitwise_parity async_rollout_depth", lambda c: c.cfg.rollout.partial_rollouts,
         "bitwise_parity true: tokens after an interruption (async_rollout_depth {async_rollout_depth}) are sampled from a cache that was "
         "computed in another way. Use async_rollout_depth 0.", {"async_rollout_depth": [0]}),
    Rule("bitwise_parity transformer_impl", lambda c: c.transformer_impl == "transformer_engine",
         "bitwise_parity true: Transformer Engine is not supported; see docs/proof.md. Use local.", {"transformer_impl": ["local"]}),
    Rule("bitwise_parity fp8_format", lambda c: c.fp8_format is not None,
         "bitwise_parity true: FP8 layers need Transformer Engine, which is not supported; see docs/proof.md. Leave fp8_format out."),
    Rule("bitwise_parity tuner_type", lambda c: c.tuner_type == "lora",
         "bitwise_parity true: the sampler applies adapters with other kernels. Use full.", {"tuner_type": ["full"]}),
    Rule("bitwise_parity router_replay_mode", lambda c: c.router_replay_mode != "disabled",
         "bitwise_parity true: expert layers use the sampler's kernel, which computes the routing itself. Use disabled.",
         {"router_replay_mode": ["disabled"]}),
    Rule("bitwise_parity vllm_tensor_parallel_size tensor_model_parallel_size",
         lambda c: c.vllm_tensor_parallel_size != c.tensor_model_parallel_size,
         "bitwise_parity true: the sampler adds partial sums of {vllm_tensor_parallel_size} ranks (vllm_tensor_parallel_size), the trainer "
         "of {tensor_model_parallel_size} (tensor_model_parallel_size). Use vllm_tensor_parallel_size {tensor_model_parallel_size}.",
         lambda c: {"vllm_tensor_parallel_size": [c.tensor_model_parallel_size]}),
    Rule("bitwise_parity vllm_dtype", lambda c: c.vllm_dtype not in (None, c.torch_dtype),
         "bitwise_parity true: the trainer computes in {torch_dtype} (torch_dtype). Leave vllm_dtype out."),
    (
        Rule("bitwise_parity {flag}",
             lambda c: training_structured_outputs(c.cfg.rollout) is not None and {"flag": find_mask_flag(c.cfg.rollout)},
             "bitwise_parity true: a softmax over the tokens that a grammar allows is not supported; see docs/proof.md. Leave it out."),
        Rule("bitwise_parity {flag}", _cut_words,
             "bitwise_parity true: a softmax over a filtered vocabulary is not supported; see docs/proof.md. Use {off:g}.",
             lambda c: {c.flag: [c.off]}),
    ),
    (
        Rule("bitwise_parity model", lambda c: c.shape and c.shape.mla,
             "bitwise_parity true: multi-latent attention is not supported; see docs/proof.md. Use bitwise_parity false."),
        Rule("bitwise_parity model", lambda c: c.shape and c.shape.vision,
             "bitwise_parity true: trainer and sampler use different vision tower implementations. Use bitwise_parity false."),
        Rule("bitwise_parity model", lambda c: c.shape and c.shape.architecture not in PROVEN,
             "bitwise_parity true: {shape.architecture} is not supported; see docs/proof.md. Use bitwise_parity false, or one of "
             f"{', '.join(PROVEN)}."),
        Rule("bitwise_parity model", lambda c: c.shape and any(c.shape.windows or ()),
             "bitwise_parity true: sliding windows are not supported; see docs/proof.md. Use bitwise_parity false."),
        Rule("bitwise_parity model", lambda c: c.shape and c.shape.rope.attention_scaling != 1,
             "bitwise_parity true: with YaRN, the sampler scales cosines and sines, the trainer scales attention scores. Use "
             "bitwise_parity false."),
        Rule("bitwise_parity tensor_model_parallel_size",
             lambda c: c.shape and c.tensor_model_parallel_size > 1 and (c.shape.attention_out_bias or c.shape.mlp_bias),
             "bitwise_parity true: the sampler adds biases before the sum over ranks, the trainer after it. Use 1.",
             {"tensor_model_parallel_size": [1]}),
        Rule("bitwise_parity torch_dtype", lambda c: c.shape and c.torch_dtype == "bfloat16"
             and (c.shape.qkv_bias or c.shape.attention_out_bias or c.shape.mlp_bias),
             "bitwise_parity true: the sampler adds biases before rounding to bfloat16, the trainer after it. Use float32.",
             {"torch_dtype": ["float32"]}),
    ),
)
# fmt: on
