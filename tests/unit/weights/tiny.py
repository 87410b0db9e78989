"""Tiny random checkpoints of every supported architecture, written by transformers itself."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

BASE = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "max_position_embeddings": 64,
}
EXPERTS_OF_GLM = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_routed_experts": 4, "num_mtp_layers": 0}
MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "num_experts": 4, "norm_topk_prob": True}
DELTA_NET = {"num_hidden_layers": 4, "head_dim": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 12, "linear_key_head_dim": 6,
             "linear_value_head_dim": 10}  # fmt: skip

# name -> (config class, fields). All can be cut over 4 ranks, except where the name says otherwise.
CHECKPOINTS: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", BASE),
    "llama_all_biases": ("LlamaConfig", {**BASE, "attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("LlamaConfig", {**BASE, "tie_word_embeddings": True}),
    "llama_one_group": ("LlamaConfig", {**BASE, "num_key_value_heads": 1}),
    "llama_no_groups": ("LlamaConfig", {**BASE, "num_key_value_heads": 8}),
    "qwen2": ("Qwen2Config", {k: v for k, v in BASE.items() if k != "head_dim"}),
    "qwen2_tied": ("Qwen2Config", {**{k: v for k, v in BASE.items() if k != "head_dim"}, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", BASE),
    "qwen3_biases": ("Qwen3Config", {**BASE, "attention_bias": True}),
    "qwen3_two_groups": ("Qwen3Config", {**BASE, "num_key_value_heads": 2}),
    "qwen3_odd_for_tp1": ("Qwen3Config", {**BASE, "num_attention_heads": 15, "num_key_value_heads": 5, "intermediate_size": 33}),
    "mistral": ("MistralConfig", BASE),
    "qwen3_moe": ("Qwen3MoeConfig", {**BASE, **MOE}),
    "qwen3_moe_mixed": ("Qwen3MoeConfig", {**BASE, **MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    "qwen3_moe_raw_weights": ("Qwen3MoeConfig", {**BASE, **MOE, "norm_topk_prob": False}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **{k: v for k, v in BASE.items() if k != "head_dim"},
            **MOE,
            "num_hidden_layers": 3,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2_moe_plain": (
        "Qwen2MoeConfig",
        {**BASE, **MOE, "qkv_bias": False, "norm_topk_prob": False, "shared_expert_intermediate_size": 24},
    ),
    "mixtral": ("MixtralConfig", {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **{k: v for k, v in BASE.items() if k != "head_dim"},
            "num_key_value_heads": 8,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 12,
            "q_lora_rank": 20,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 10,
            "n_shared_experts": 2,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {**BASE, **EXPERTS_OF_GLM, "head_dim": 12, "attention_bias": True, "use_qk_norm": True},
    ),
    "glm4_moe_plain": ("Glm4MoeConfig", {**BASE, **EXPERTS_OF_GLM, "partial_rotary_factor": 1.0}),
    "minimax_m2": ("MiniMaxM2Config", {**BASE, "head_dim": 12, "rotary_dim": 6, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOssConfig", {**BASE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "olmo2": ("Olmo2Config", {**{k: v for k, v in BASE.items() if k != "head_dim"}, "attention_bias": True}),
    "olmo3": ("Olmo3Config", {**{k: v for k, v in BASE.items() if k != "head_dim"}, "num_hidden_layers": 4, "sliding_window": 9}),
    "gemma3": ("Gemma3TextConfig", {**BASE, "num_hidden_layers": 4, "sliding_window": 9, "sliding_window_pattern": 2}),
    "qwen3_next_moe": ("Qwen3NextConfig", {**BASE, **DELTA_NET, **MOE, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]}),
    "qwen3_5": ("Qwen3_5TextConfig", {**BASE, **DELTA_NET, "attention_bias": True}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**BASE, **DELTA_NET, **MOE, "shared_expert_intermediate_size": 24}),
}
CHECKPOINTS["glm4_moe_lite"] = (
    "Glm4MoeLiteConfig",
    {k: v for k, v in CHECKPOINTS["deepseek_v3"][1].items() if k != "first_k_dense_replace"},
)
DENSE = [name for name in CHECKPOINTS if "moe" not in name and name not in ("mixtral", "deepseek_v3", "minimax_m2")]
EXPERTS = [name for name in CHECKPOINTS if name not in DENSE]


def make_model_config(name: str) -> dict:
    """The config.json of a tiny checkpoint, parsed."""
    kind, fields = CHECKPOINTS[name]
    config = getattr(transformers, kind)(**fields)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    return {**config.to_dict(), "architectures": config.architectures}


def write_checkpoint(name: str, directory: Path, *, dtype: torch.dtype = torch.float32, **save) -> Path:
    """Writes the tiny checkpoint `name` with random weights everywhere: norms, biases and the experts' bias included."""
    kind, fields = CHECKPOINTS[name]
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**fields)).to(dtype)
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))]:
            tensor.normal_()
    model.save_pretrained(directory, **save)
    return directory
