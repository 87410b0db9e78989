"""Checks that a model fits a parallel layout, before anything loads. No torch, so that `plan` can use it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from megatron_grpo.core.base.errors import Problem
from megatron_grpo.core.weights.shape import ModelShape

TP, EP, ETP = "tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
VLLM_TP = "vllm_tensor_parallel_size"
_LENGTHS = ("max_prompt_length", "max_completion_length")
_LARGEST = 128  # largest size tried for `nearest`


def layout_problems(shape: ModelShape, *, tp: int = 1, ep: int = 1, etp: int = 1) -> list[Problem]:
    """Return the problems of a model's sizes with these parallel sizes, each with the nearest sizes that work."""
    moe = shape.moe
    return [
        *_problems_of_size(TP, tp, lambda ranks: _tensor_parallel(shape, ranks)),
        *_problems_of_size(EP, ep, lambda ranks: _experts(shape, ranks, "num_experts", moe.num_experts if moe else None)),
        *_problems_of_size(
            ETP, etp, lambda ranks: _experts(shape, ranks, "experts' intermediate size", moe.ffn_hidden_size if moe else None)
        ),
    ]


def engine_problems(shape: ModelShape, ranks: int, *, world_size: int | None = None) -> list[Problem]:
    """Return the problems of one vLLM engine on `ranks` ranks. vLLM cuts heads as Megatron does, but fails only at start-up.

    Args:
        world_size: Ranks of a job that divides its ranks between engines. None: any number of ranks is available.
    """
    sizes = [size for size in range(1, (world_size or _LARGEST) + 1) if world_size is None or world_size % size == 0]
    return _problems_of_size(VLLM_TP, ranks, lambda ranks: _engine_parallel(shape, ranks), sizes=sizes)


def length_problems(shape: ModelShape, longest: int, *, flags: tuple[str, ...] = _LENGTHS) -> list[Problem]:
    """Return the problems of sequences of up to `longest` tokens with the model's position limits.

    Args:
        longest: Tokens of prompt and completion together.
    """
    problems = []
    if shape.max_position_embeddings and longest > shape.max_position_embeddings:
        problems.append(
            f"sequences of up to {longest} tokens are longer than the model's max_position_embeddings ({shape.max_position_embeddings})."
        )
    # vLLM allocates sines and cosines for this many positions, and reads out of bounds beyond them.
    stretched = math.floor(shape.rope.factor * shape.rope.original_max_position_embeddings)
    if not problems and shape.rope.type == "yarn" and longest > stretched:
        problems.append(
            f"sequences of up to {longest} tokens are longer than the range of the model's YaRN rope ({stretched} = factor x "
            f"original_max_position_embeddings). Use at most {stretched} tokens."
        )
    return [Problem(flags=flags, message=message) for message in problems]


def _problems_of_size(
    flag: str, ranks: int, check: Callable[[int], Iterator[str]], *, sizes: Iterable[int] = range(1, _LARGEST + 1)
) -> list[Problem]:
    messages = list(check(ranks))
    if not messages:
        return []
    working = [size for size in sizes if not any(check(size))]
    nearest = ([size for size in working if size < ranks][-1:]) + ([size for size in working if size > ranks][:1])
    use = f" Use {' or '.join(map(str, nearest))}." if nearest else ""
    return [Problem(flags=(flag,), message=f"{flag} ({ranks}): {message}{use}", nearest={flag: nearest}) for message in messages]


def _cut_alike(shape: ModelShape) -> dict[str, int]:
    """Return the sizes that trainer and sampler cut in the same way."""
    sizes = {"num_attention_heads": shape.num_attention_heads}
    if shape.delta_net:
        sizes["linear_num_key_heads"] = shape.delta_net.num_key_heads
    if shape.moe is None or not all(shape.moe.layers):
        sizes["intermediate_size"] = shape.ffn_hidden_size
    return sizes


def _tensor_parallel(shape: ModelShape, tp: int) -> Iterator[str]:
    sizes = _cut_alike(shape)
    if shape.moe and shape.moe.shared_ffn_hidden_size:
        sizes["shared experts' intermediate size"] = shape.moe.shared_ffn_hidden_size
    if shape.mla:  # whose down projections the local spec cuts; Transformer Engine would replicate them
        sizes["kv_lora_rank + qk_rope_head_dim"] = shape.mla.kv_lora_rank + shape.mla.qk_pos_emb_head_dim
        if shape.mla.q_lora_rank:
            sizes["q_lora_rank"] = shape.mla.q_lora_rank
    yield from (_rest(name, size, tp) for name, size in sizes.items() if size % tp)
    groups, rows = shape.num_query_groups, shape.query_size * (1 + shape.attention_output_gate) + 2 * shape.key_size
    if shape.mla is None and groups % tp and tp % groups:
        yield f"must divide the model's num_key_value_heads ({groups}) or be a multiple of it."
    elif shape.mla is None and rows % tp:
        yield _rest("total of query, key and value rows", rows, tp)
    elif shape.qk_norm_is_whole and groups % tp:
        yield f"must divide the model's num_key_value_heads ({groups}), because its key norm covers all heads."


def _engine_parallel(shape: ModelShape, tp: int) -> Iterator[str]:
    yield from (_rest(name, size, tp) for name, size in _cut_alike(shape).items() if size % tp)
    groups = shape.num_query_groups
    if shape.mla is None and groups % tp and tp % groups:
        yield f"must divide the model's num_key_value_heads ({groups}) or be a multiple of it."


def _experts(shape: ModelShape, ranks: int, name: str, size: int | None) -> Iterator[str]:
    if ranks <= 1:
        return
    if size is None:
        yield f"{shape.architecture} has no experts."
    elif size % ranks:
        yield _rest(name, size, ranks)


def _rest(name: str, size: int, ranks: int) -> str:
    return f"must divide the model's {name} ({size}): {size} = {size // ranks} x {ranks} + {size % ranks}."
