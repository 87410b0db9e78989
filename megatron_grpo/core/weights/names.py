"""Table of the Hugging Face tensors that make up each Megatron parameter. Names and sizes only; no tensors, no torch.

A row is an `WeightEntry`. Rows use the parameter names of Megatron's local layer spec; a naming function translates them to those of the
Transformer Engine spec.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from megatron_grpo.core.weights.families import FAMILIES, ModelFamily
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.core.weights.sizes import DeltaNetShape, LayerKind, MlaShape, MoeShape
from megatron_grpo.core.weights.vision_towers import MEGATRON


class TensorFusion(Enum):
    """Way in which the Hugging Face tensors of an entry become one full (TP = 1) Megatron tensor."""

    PLAIN = "the tensor itself"
    QKV = "query, key and value, interleaved by query group: q.. k v | q.. k v | ..."
    GATED_QKV = "as QKV, with a gate behind the queries of each group: q.. gate.. k v | ...; files have each head's gate behind its query"
    DELTA_NET = "of the gated delta rule, interleaved by key head: q k v.. gate.. b.. a.. | ..., or q k v.. | ... for the convolution"
    STACK = "one above the other: gate and up"


class ShardSplit(Enum):
    """Way in which the full tensor is divided over tensor-parallel ranks."""

    REPLICATED = "every rank has all of it"
    COLUMN = "equal runs of dimension 0"
    ROW = "equal runs of dimension 1"
    GATED_COLUMN = "gate and up are cut one by one, so that a rank has matching halves of both"
    VOCAB = "padded with zero rows, then equal runs of dimension 0"


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """One Megatron parameter. Inside a layer, both names are relative to it; `{e}` stands for the expert number.

    Args:
        hf: (name, full size) of each Hugging Face tensor.
        is_expert: Whether it is on one expert-parallel rank, sharded over *expert* tensor parallelism.
        is_buffer: Whether it is not among named_parameters().
        is_copy: Whether it is a second copy of a tensor that another entry exports.
        is_float32: Whether it is stored in float32, whatever the model's dtype is.
    """

    megatron: str
    hf: tuple[tuple[str, tuple[int, ...]], ...]
    packing: TensorFusion
    cut: ShardSplit
    is_expert: bool = False
    is_buffer: bool = False
    is_copy: bool = False
    is_float32: bool = False


def num_units(entry: WeightEntry, rows: int, shape: ModelShape, ranks: int) -> int:
    """Return into how many equal runs of rows a shard can be sliced, such that each has rows of its own in the full tensors, or 0.

    Args:
        ranks: RankCounts that hold the shards.
    """
    if entry.packing in (TensorFusion.PLAIN, TensorFusion.STACK):
        return rows
    whole_groups = entry.packing is not TensorFusion.DELTA_NET and shape.num_query_groups % ranks == 0
    return shape.num_query_groups // ranks if whole_groups else 0


def outer_entries(shape: ModelShape) -> Iterator[WeightEntry]:
    """Yield the parameters outside the layers, with full names."""
    rows = (shape.vocab_size, shape.hidden_size)
    embedding = ((f"{shape.text_prefix}embed_tokens.weight", rows),)
    yield WeightEntry("embedding.word_embeddings.weight", embedding, TensorFusion.PLAIN, ShardSplit.VOCAB)
    yield _norm("decoder.final_layernorm", f"{shape.text_prefix}norm", shape.hidden_size)
    if shape.tied_embeddings:  # exists where the last pipeline stage is not the first
        yield WeightEntry("output_layer.weight", embedding, TensorFusion.PLAIN, ShardSplit.VOCAB, is_copy=True)
    else:
        yield WeightEntry("output_layer.weight", (("lm_head.weight", rows),), TensorFusion.PLAIN, ShardSplit.VOCAB)
    yield from tower_entries(shape)


def tower_entries(shape: ModelShape) -> Iterator[WeightEntry]:
    """Yield the parameters of a vision tower, with full names. They keep their Hugging Face names behind a prefix."""
    tower = FAMILIES[shape.architecture].tower
    if tower and shape.vision:
        for name, size in tower.tensors(shape.vision, shape.hidden_size):
            yield _plain_entry(f"{MEGATRON}{name}", f"{tower.prefix}{name}", size, ShardSplit.REPLICATED)


def layer_entries(shape: ModelShape, kind: LayerKind) -> Iterator[WeightEntry]:
    """Yield the parameters of one layer, with names relative to `decoder.layers.N.` and `ModelShape.layer_prefix`.

    Args:
        kind: Parts of the layer, from `ModelShape.find_layer_kind`.
    """
    hidden = shape.hidden_size
    if shape.pre_norm:
        yield _norm("input_layernorm", "input_layernorm", hidden)
    if kind.delta_net and shape.delta_net:
        yield from _delta_net(shape.hidden_size, shape.delta_net)
    else:
        yield from _latent_attention(shape, shape.mla) if shape.mla else _attention(shape)
    if shape.post_norm:
        yield _norm("self_attn_bda.norm", "post_attention_layernorm", hidden)
        yield _norm("mlp_bda.norm", "post_feedforward_layernorm", hidden)
    if shape.pre_norm:
        yield _norm("pre_mlp_layernorm", "pre_feedforward_layernorm" if shape.post_norm else "post_attention_layernorm", hidden)
    if kind.moe and shape.moe:
        yield from _experts(shape, shape.moe, FAMILIES[shape.architecture])
    else:
        yield from _gated_mlp("mlp", "mlp", hidden, shape.ffn_hidden_size, bias=shape.mlp_bias)


def entries_in_layers(shape: ModelShape) -> Iterator[WeightEntry]:
    """Yield the parameters of all layers, layer by layer and expert by expert, with full names on both sides."""
    for layer in range(shape.num_layers):
        megatron_prefix, hf_prefix = f"decoder.layers.{layer}.", shape.layer_prefix(layer)
        for entry in layer_entries(shape, shape.find_layer_kind(layer)):
            for number in range(shape.num_experts) if entry.is_expert else (0,):
                hf = tuple((hf_prefix + name.format(e=number), size) for name, size in entry.hf)
                yield replace(entry, megatron=megatron_prefix + entry.megatron.format(e=number), hf=hf)


def _attention(shape: ModelShape) -> Iterator[WeightEntry]:
    hidden, gate = shape.hidden_size, shape.attention_output_gate
    sizes = {"q": shape.query_size * (1 + gate), "k": shape.key_size, "v": shape.key_size}
    packing = TensorFusion.GATED_QKV if gate else TensorFusion.QKV
    weights = tuple((f"self_attn.{p}_proj.weight", (size, hidden)) for p, size in sizes.items())
    yield WeightEntry("self_attention.linear_qkv.weight", weights, packing, ShardSplit.COLUMN)
    if shape.qkv_bias:
        biases = tuple((f"self_attn.{p}_proj.bias", (size,)) for p, size in sizes.items())
        yield WeightEntry("self_attention.linear_qkv.bias", biases, packing, ShardSplit.COLUMN)
    if shape.qk_norm_is_whole:
        for name, size in (("q", shape.query_size), ("k", shape.key_size)):
            yield _plain_entry(f"self_attention.{name}_layernorm.weight", f"self_attn.{name}_norm.weight", (size,), ShardSplit.COLUMN)
    elif shape.qk_norm:
        yield _norm("self_attention.q_layernorm", "self_attn.q_norm", shape.head_dim)
        yield _norm("self_attention.k_layernorm", "self_attn.k_norm", shape.head_dim)
    if shape.sinks:
        yield _plain_entry("self_attention.core_attention.sinks", "self_attn.sinks", (shape.num_attention_heads,), ShardSplit.COLUMN)
    yield _plain_entry("self_attention.linear_proj.weight", "self_attn.o_proj.weight", (hidden, shape.query_size), ShardSplit.ROW)
    if shape.attention_out_bias:
        yield _plain_entry("self_attention.linear_proj.bias", "self_attn.o_proj.bias", (hidden,), ShardSplit.REPLICATED)


def _delta_net(hidden: int, delta: DeltaNetShape) -> Iterator[WeightEntry]:
    """Megatron's names of its own GatedDeltaNet. Every cut is an equal run of whole groups (a key head and its value heads)."""
    megatron, hf = "self_attention", "linear_attn"
    keys, _, values, gate, heads, _ = delta.sections
    sizes = {"qkv": 2 * keys + values, "z": gate, "b": heads, "a": heads}
    if delta.is_grouped:
        sizes = {"qkvz": 2 * keys + values + gate, "ba": 2 * heads}
    weights = tuple((f"{hf}.in_proj_{name}.weight", (size, hidden)) for name, size in sizes.items())
    yield WeightEntry(f"{megatron}.in_proj.weight", weights, TensorFusion.DELTA_NET, ShardSplit.COLUMN)
    kernel = ((f"{hf}.conv1d.weight", (2 * keys + values, 1, delta.conv_kernel_dim)),)
    yield WeightEntry(f"{megatron}.conv1d.weight", kernel, TensorFusion.DELTA_NET, ShardSplit.COLUMN)
    for name in ("dt_bias", "A_log"):
        yield replace(_plain_entry(f"{megatron}.{name}", f"{hf}.{name}", (heads,), ShardSplit.COLUMN), is_float32=True)
    yield replace(_norm(f"{megatron}.out_norm", f"{hf}.norm", delta.value_head_dim), is_float32=True)
    yield _plain_entry(f"{megatron}.out_proj.weight", f"{hf}.out_proj.weight", (hidden, values), ShardSplit.ROW)


def _latent_attention(shape: ModelShape, mla: MlaShape) -> Iterator[WeightEntry]:
    hidden, heads, megatron = shape.hidden_size, shape.num_attention_heads, "self_attention"
    query = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    if mla.q_lora_rank:
        yield _plain_entry(
            f"{megatron}.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", (mla.q_lora_rank, hidden), ShardSplit.COLUMN
        )
        yield _norm(f"{megatron}.q_layernorm", "self_attn.q_a_layernorm", mla.q_lora_rank)
        yield _plain_entry(f"{megatron}.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", (query, mla.q_lora_rank), ShardSplit.COLUMN)
    else:
        yield _plain_entry(f"{megatron}.linear_q_proj.weight", "self_attn.q_proj.weight", (query, hidden), ShardSplit.COLUMN)
    down_rows, up_rows = mla.kv_lora_rank + mla.qk_pos_emb_head_dim, heads * (mla.qk_head_dim + mla.v_head_dim)
    yield _plain_entry(
        f"{megatron}.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", (down_rows, hidden), ShardSplit.COLUMN
    )
    yield _norm(f"{megatron}.kv_layernorm", "self_attn.kv_a_layernorm", mla.kv_lora_rank)
    yield _plain_entry(f"{megatron}.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", (up_rows, mla.kv_lora_rank), ShardSplit.COLUMN)
    yield _plain_entry(f"{megatron}.linear_proj.weight", "self_attn.o_proj.weight", (hidden, heads * mla.v_head_dim), ShardSplit.ROW)


def _gated_mlp(
    megatron: str,
    hf: str,
    hidden: int,
    ffn: int,
    *,
    bias: bool = False,
    expert: bool = False,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[WeightEntry]:
    gate, up, down = (f"{hf}.{name}" for name in names)
    yield WeightEntry(
        f"{megatron}.linear_fc1.weight",
        ((f"{gate}.weight", (ffn, hidden)), (f"{up}.weight", (ffn, hidden))),
        TensorFusion.STACK,
        ShardSplit.GATED_COLUMN,
        expert,
    )
    yield WeightEntry(f"{megatron}.linear_fc2.weight", ((f"{down}.weight", (hidden, ffn)),), TensorFusion.PLAIN, ShardSplit.ROW, expert)
    if bias:
        biases = ((f"{gate}.bias", (ffn,)), (f"{up}.bias", (ffn,)))
        yield WeightEntry(f"{megatron}.linear_fc1.bias", biases, TensorFusion.STACK, ShardSplit.GATED_COLUMN, expert)
        yield WeightEntry(f"{megatron}.linear_fc2.bias", ((f"{down}.bias", (hidden,)),), TensorFusion.PLAIN, ShardSplit.REPLICATED, expert)


def _experts(shape: ModelShape, moe: MoeShape, family: ModelFamily) -> Iterator[WeightEntry]:
    hidden, block = shape.hidden_size, family.moe_block
    yield _plain_entry("mlp.router.weight", f"{block}.{family.router}.weight", (moe.num_experts, hidden), ShardSplit.REPLICATED)
    if moe.has_biases:
        yield _plain_entry("mlp.router.bias", f"{block}.{family.router}.bias", (moe.num_experts,), ShardSplit.REPLICATED)
    if moe.has_expert_bias:
        yield replace(
            _plain_entry("mlp.router.expert_bias", f"{block}.{family.expert_bias}", (moe.num_experts,), ShardSplit.REPLICATED),
            is_buffer=True,
            is_float32=True,
        )
    yield from _gated_mlp(
        "mlp.experts.local_experts.{e}", f"{block}.experts.{{e}}", hidden, moe.ffn_hidden_size, bias=moe.has_biases, expert=True,
        names=family.expert_names,
    )  # fmt: skip
    if moe.shared_ffn_hidden_size:
        yield from _gated_mlp("mlp.shared_experts", f"{block}.{family.shared_expert}", hidden, moe.shared_ffn_hidden_size)
    if moe.has_shared_gate:
        yield _plain_entry("mlp.shared_experts.gate_weight", f"{block}.shared_expert_gate.weight", (1, hidden), ShardSplit.REPLICATED)


def _plain_entry(megatron: str, hf: str, size: tuple[int, ...], cut: ShardSplit) -> WeightEntry:
    return WeightEntry(megatron, ((hf, size),), TensorFusion.PLAIN, cut)


def _norm(megatron: str, hf: str, size: int) -> WeightEntry:
    return _plain_entry(f"{megatron}.weight", f"{hf}.weight", (size,), ShardSplit.REPLICATED)


def num_parameters(shape: ModelShape, *, active_only: bool = False) -> int:
    """Return the number of parameters of the whole model. Tied embeddings count once, and vocabulary padding does not count.

    Args:
        active_only: Count only as many experts as a token is routed to.
    """

    def count(entries: Iterable[WeightEntry], experts: int) -> int:
        return sum(math.prod(size) * (experts if entry.is_expert else 1) for entry in entries if not entry.is_copy for _, size in entry.hf)

    experts = 0 if shape.moe is None else shape.moe.topk if active_only else shape.moe.num_experts
    kinds = Counter(map(shape.find_layer_kind, range(shape.num_layers)))
    return count(outer_entries(shape), experts) + sum(n * count(layer_entries(shape, kind), experts) for kind, n in kinds.items())


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the size of every Hugging Face tensor of the model: the content of a checkpoint and of an export."""
    return {name: size for entry in (*outer_entries(shape), *entries_in_layers(shape)) for name, size in entry.hf}


def local_naming(entry: WeightEntry, *, shape: ModelShape, moe: bool) -> WeightEntry:
    """Return the entry unchanged: rows are written for Megatron's own modules (get_gpt_layer_local_spec).

    Args:
        moe: Whether the layer has experts.
    """
    return entry


def transformer_engine_naming(entry: WeightEntry, *, shape: ModelShape, moe: bool) -> WeightEntry:
    """Rename an entry for Transformer Engine modules (get_gpt_layer_with_transformer_engine_spec).

    Norms are part of the linear layer that follows them. The down projections of multi-latent attention are replicated.

    Args:
        moe: Whether the layer has experts.
    """
    if shape.mla is None and entry.megatron == "input_layernorm.weight":
        return replace(entry, megatron="self_attention.linear_qkv.layer_norm_weight")
    if not moe and entry.megatron == "pre_mlp_layernorm.weight":
        return replace(entry, megatron="mlp.linear_fc1.layer_norm_weight")
    if shape.mla is not None:
        for stream in ("q", "kv"):
            if entry.megatron == f"self_attention.{stream}_layernorm.weight":
                return replace(entry, megatron=f"self_attention.linear_{stream}_up_proj.layer_norm_weight")
            if entry.megatron == f"self_attention.linear_{stream}_down_proj.weight":
                return replace(entry, cut=ShardSplit.REPLICATED)  # TELinear with parallel_mode="duplicated"
    return entry


def grouped_experts(entry: WeightEntry) -> WeightEntry:
    """Rename an expert entry for TEGroupedMLP, which holds all experts of a rank in one module with one numbered weight each."""
    if not entry.is_expert:
        return entry
    return replace(entry, megatron=entry.megatron.replace("local_experts.{e}.", "") + "{e}")


NAMINGS = {"local": local_naming, "transformer_engine": transformer_engine_naming}
