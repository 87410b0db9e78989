"""Small Hugging Face checkpoints with random weights and a real tokenizer, written in milliseconds.

The weights have a standard deviation of 0.2: with 0.02 all next-token distributions of a tiny model are nearly uniform, and a wrong weight
hardly changes a log-prob.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FAMILIES = (
    "qwen3",
    "qwen2",
    "llama",
    "mistral",
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "minimax_m2",
    "gpt_oss",
    "olmo2",
    "olmo3",
    "gemma3_text",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
NARROW = ("qwen2", "qwen2_moe", "olmo2", "olmo3")  # their hidden_size is that of all heads
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNK = range(4)


def write_tiny(
    path: str | Path,
    family: str = "qwen3",
    *,
    tied: bool = False,
    vocab: int = 128,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    ffn: int = 128,
    experts: int = 4,
    max_positions: int = 256,
    dtype: str = "float32",
    seed: int = 0,
    std: float = 0.2,
    **overrides: Any,
) -> Path:
    """Write config, safetensors, generation config and tokenizer into `path`; return it. `overrides` change the model's config.

    vLLM's CPU kernels need head sizes, and `ffn / TP` of experts, in multiples of 32. `hidden` need not be `heads * head_dim` except for
    `NARROW`, where it is made so unless `overrides` has a `hidden_size`. The vocabulary is `<pad> <bos> <eos> <unk>`, then "4" to str(vocab
    - 1): token ID n decodes to "n".
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    path = Path(path)
    common = dict(
        vocab_size=vocab, hidden_size=heads * head_dim if family in NARROW else hidden, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=max_positions, tie_word_embeddings=tied,
        initializer_range=std, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip
    if family not in NARROW or "hidden_size" in overrides:
        common["head_dim"] = head_dim
    if family in ("qwen2_moe", "qwen3_moe"):
        common |= dict(num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=ffn, norm_topk_prob=True, decoder_sparse_step=1)
    if family == "qwen2_moe":
        common |= dict(shared_expert_intermediate_size=ffn // 2)
    if family in ("mixtral", "minimax_m2"):
        common |= dict(num_local_experts=experts, num_experts_per_tok=2)
    if family == "minimax_m2":  # half of each head turns; vLLM needs the others, which transformers does not read
        common |= dict(rotary_dim=head_dim // 2, scoring_func="sigmoid", use_routing_bias=True)
    if family in ("deepseek_v3", "glm4_moe_lite"):  # the first layer dense, the others with experts; all channel counts different
        common |= dict(n_routed_experts=experts, num_experts_per_tok=2, moe_intermediate_size=ffn // 4, n_shared_experts=2, n_group=2,
                       topk_group=1, first_k_dense_replace=1, routed_scaling_factor=1.5, kv_lora_rank=24, q_lora_rank=40,
                       qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16, num_key_value_heads=heads,
                       head_dim=overrides.get("qk_rope_head_dim", 8))  # fmt: skip
    if family == "glm4_moe":  # the first layer dense; half of each head turns
        common |= dict(n_routed_experts=experts, num_experts_per_tok=2, moe_intermediate_size=ffn // 4, n_shared_experts=1, n_group=1,
                       topk_group=1, first_k_dense_replace=1, routed_scaling_factor=1.5, num_mtp_layers=0)  # fmt: skip
    if family == "gpt_oss":  # with the limits that vLLM has for all models
        common |= dict(num_local_experts=experts, num_experts_per_tok=2, sliding_window=9, layer_types=alternating(layers),
                       rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=max_positions / 16, beta_fast=32.0, beta_slow=1.0,
                       truncate=False, original_max_position_embeddings=16))  # fmt: skip
    if family == "gemma3_text":
        common |= dict(query_pre_attn_scalar=24, sliding_window=9, layer_types=alternating(layers))
    if family == "olmo3":
        common |= dict(sliding_window=9, layer_types=alternating(layers))
    common |= make_hybrid_config(family, experts, ffn)
    config = AutoConfig.for_model(family, **(common | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                draw(family, name, parameter, std)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0.0, std)
    kept = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    model.to(getattr(torch, dtype))
    for name, buffer in kept.items():  # float32 in every checkpoint, as transformers keeps it
        model.get_buffer(name).data = buffer
    model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS)
    model.save_pretrained(path)
    _write_tokenizer(path, vocab)
    return path


def make_hybrid_config(family: str, experts: int, ffn: int) -> dict[str, Any]:
    """Return the config of a hybrid: three of four layers are recurrent; in the fourth, half of each head is rotated."""
    if family not in HYBRIDS:
        return {}
    states = dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=12, linear_value_head_dim=20,
                  linear_conv_kernel_dim=4, partial_rotary_factor=0.5)  # fmt: skip
    if family == "qwen3_5_text":
        return states
    shared = dict(shared_expert_intermediate_size=ffn // 2)
    return states | shared | dict(num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=ffn // 4)


def draw(family: str, name: str, parameter: Any, std: float) -> None:
    is_from_one = family.startswith("gemma") or (family in HYBRIDS and "linear_attn" not in name)
    if parameter.dim() > 1:
        parameter.normal_(0.0, std)
    elif "norm" in name:
        parameter.uniform_(0.5, 1.5)  # ones would hide a norm that was never loaded
        parameter.sub_(float(is_from_one))  # whose norms say how far they are from 1
    elif name.endswith("A_log"):
        parameter.uniform_(-3.0, 1.0)  # from a memory of dozens of tokens to one of a few
    else:
        parameter.normal_(0.0, std)  # biases; zeros would hide them


def alternating(layers: int) -> list[str]:
    return [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]


def load_tiny(path: str | Path, dtype: str = "float32") -> Any:
    """Return the transformers model at `path` in eval mode: the reference of comparisons."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    is_multimodal = "vision_config" in json.loads((Path(path) / "config.json").read_text())
    kind = AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="eager").eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped one takes neither float64 nor every width
    return model


def hf_logprobs(model: Any, token_ids: list[int], temperature: float = 1.0) -> Any:
    """Return log p(token_ids[t]

    token_ids[:t]) for t = 1.. as a float32 tensor [len - 1].
    """
    import torch

    ids = torch.tensor([list(token_ids)])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]


def _write_tokenizer(path: Path, vocab: int) -> None:
    word_tokenizer(vocab).save_pretrained(path)


def word_tokenizer(vocab: int) -> Any:
    """Return a tokenizer of words: token ID n is the word "n", after four special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {**{word: n for n, word in enumerate(SPECIAL)}, **{str(n): n for n in range(len(SPECIAL), vocab)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return fast
