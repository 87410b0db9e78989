"""The table of weight names against real Megatron models on gloo: all parameters are known, have the right sizes, and are loaded.

Local layer spec only: Transformer Engine needs a GPU, so its names are tested in tests/gpu, and here only for their round trip.
"""

from __future__ import annotations

import sys

import pytest
import torch

from megatron_grpo.core.weights.hf_files import HfReader
from megatron_grpo.core.weights.mapping import WeightMap, with_global_numbers
from megatron_grpo.core.weights.shape import ModelShape
from tests.ranks import run_ranks
from tests.unit.weights.tiny import CHECKPOINTS, write_checkpoint

ROWS = 64


class NoCore(torch.nn.Module):
    """A core attention that computes nothing."""

    def __init__(self, **_):
        super().__init__()


def build(shape: ModelShape, *, tp: int, ep: int, etp: int):
    """Return Megatron's GPTModel with its local spec."""
    from megatron_grpo.core.parallel import cpu

    cpu.enable()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    parallel_state.initialize_model_parallel(tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    tensor_parallel.random.model_parallel_cuda_manual_seed(1)
    sizes = dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        qk_layernorm=shape.qk_norm,
        add_qkv_bias=shape.qkv_bias,
        add_bias_linear=shape.mlp_bias,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    if shape.moe:
        moe = shape.moe
        sizes |= dict(
            num_moe_experts=moe.num_experts,
            moe_router_topk=moe.topk,
            moe_ffn_hidden_size=moe.ffn_hidden_size,
            moe_layer_freq=[int(layer) for layer in moe.layers],
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall",
            moe_router_score_function=moe.score_function,
            moe_router_enable_expert_bias=moe.has_expert_bias,
            moe_shared_expert_intermediate_size=moe.shared_ffn_hidden_size,
            moe_router_pre_softmax=not moe.norm_topk_prob,
            moe_router_num_groups=moe.num_groups,
            moe_router_group_topk=moe.group_topk,
            moe_router_topk_scaling_factor=moe.scaling_factor if moe.scaling_factor != 1 else None,
        )
    kind = TransformerConfig
    if shape.mla:
        mla, kind = shape.mla, MLATransformerConfig
        # Megatron-Core believes that it has Transformer Engine whenever its own wrapper of it can be imported.
        sys.modules[MLASelfAttention.__module__].HAVE_TE = False
        sizes |= dict(
            q_lora_rank=mla.q_lora_rank,
            kv_lora_rank=mla.kv_lora_rank,
            qk_head_dim=mla.qk_head_dim,
            v_head_dim=mla.v_head_dim,
            qk_pos_emb_head_dim=mla.qk_pos_emb_head_dim,
            multi_latent_attention=True,
        )
    config = kind(**sizes)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    if shape.mla:  # Megatron's own attention core cannot be built with it on the local spec; it has no parameters
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = NoCore
    return GPTModel(
        config,
        spec,
        vocab_size=ROWS,
        max_sequence_length=64,
        position_embedding_type="none" if shape.mla else "rope",
        share_embeddings_and_output_weights=shape.tied_embeddings,
    )


def fill_and_report(rank, world_size, path, tp, ep, etp):
    """Return what one rank holds after loading, by global name; all sizes are compared with Megatron's."""
    from megatron.core import parallel_state

    reader = HfReader(path)
    shape = ModelShape.from_hf(reader.config)
    model = build(shape, tp=tp, ep=ep, etp=etp)
    weights = WeightMap.for_shape(shape, padded_vocab_size=ROWS)
    experts = shape.moe.num_experts // ep if shape.moe else 0
    held = {}
    for local, tensor in [*model.named_parameters(), *model.named_buffers()]:
        name = with_global_numbers(local, first_expert=parallel_state.get_expert_model_parallel_rank() * experts)
        if not isinstance(tensor, torch.nn.Parameter) and not name.endswith("expert_bias"):
            continue
        shard = weights.load(
            name,
            reader,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            tp_size=tp,
            expert_tp_rank=parallel_state.get_expert_tensor_parallel_rank(),
            expert_tp_size=etp,
        )
        assert shard.shape == tensor.shape, (name, shard.shape, tensor.shape)
        with torch.no_grad():
            tensor.copy_(shard)
        held[name] = tensor.detach().clone()
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank(), held


# q bias without an output bias, or the other way round, is not in Megatron's configuration: the policy builds that layer itself.
# Nor are norms behind attention or over all heads, nor sinks, nor gates of shared experts, nor layers with a state on a CPU;
# tests/distributed/test_families.py loads those.
OWN = (
    "qwen3_biases",
    "qwen2_moe",
    "qwen2_moe_plain",
    "minimax_m2",
    "gpt_oss",
    "olmo2",
    "olmo3",
    "gemma3",
    "qwen3_next_moe",
    "qwen3_5",
    "qwen3_5_moe",
)
SINGLE = [name for name in CHECKPOINTS if name not in OWN]


@pytest.mark.parametrize("name", SINGLE)
def test_weight_names_cover_all_parameters_of_real_models(tmp_path, name):
    path = write_checkpoint(name, tmp_path)
    ((_, _, held),) = run_ranks(fill_and_report, 1, str(path), 1, 1, 1)
    weights = WeightMap.for_shape(ModelShape.from_pretrained(path), padded_vocab_size=ROWS)
    weights.check_held(held)
    reader = HfReader(path)
    exported = dict(pair for parameter in held for pair in weights.export(parameter, [held[parameter]]))
    assert exported.keys() == reader.names
    assert all(torch.equal(exported[name], reader(name)) for name in exported)


@pytest.mark.parametrize(
    "name,tp,ep,etp",
    [
        ("llama_all_biases", 2, 1, 1),
        ("llama_one_group", 4, 1, 1),
        ("qwen3_two_groups", 4, 1, 1),
        ("qwen3_moe_mixed", 2, 2, 1),
        ("mixtral", 2, 1, 2),
        ("mixtral", 2, 2, 2),
        ("deepseek_v3", 2, 2, 1),
    ],
)
def test_weight_names_shards_of_real_models_gather_exactly(tmp_path, name, tp, ep, etp):
    path = write_checkpoint(name, tmp_path)
    ranks = run_ranks(fill_and_report, max(tp, ep * etp), str(path), tp, ep, etp)
    weights = WeightMap.for_shape(ModelShape.from_pretrained(path), padded_vocab_size=ROWS)
    names = {parameter for _, _, held in ranks for parameter in held}
    weights.check_held(names)
    reader, exported = HfReader(path), {}
    for parameter in names:
        by_rank = {}  # data-parallel ranks hold copies: one of each shard will do
        for tp_rank, etp_rank, held in ranks:
            if parameter in held:
                by_rank[etp_rank if weights.entry(parameter).is_expert else tp_rank] = held[parameter]
        exported.update(weights.export(parameter, [by_rank[rank] for rank in sorted(by_rank)]))
    assert exported.keys() == reader.names
    assert all(torch.equal(exported[hf_name], reader(hf_name)) for hf_name in exported)


def project(rank, world_size, path, tp, hidden):
    """Return query, key, value and MLP output of the first layer on this rank, computed by Megatron."""
    from megatron.core import parallel_state

    reader = HfReader(path)
    shape = ModelShape.from_hf(reader.config)
    model = build(shape, tp=tp, ep=1, etp=1)
    weights = WeightMap.for_shape(shape, padded_vocab_size=ROWS)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(weights.load(name, reader, tp_rank=parallel_state.get_tensor_model_parallel_rank(), tp_size=tp))
        layer = model.decoder.layers[0]
        query, key, value = layer.self_attention.get_query_key_value_tensors(hidden)
        out, bias = layer.mlp(hidden)
    return query, key, value, out if bias is None else out + bias


@pytest.mark.parametrize(
    "name,tp",
    [
        ("llama_all_biases", 1),
        ("llama_all_biases", 2),
        ("llama_one_group", 2),
        ("llama_one_group", 4),
        ("qwen3_two_groups", 4),
        ("llama_no_groups", 4),
        ("qwen2", 2),
        ("qwen3", 4),
    ],
)
def test_loaded_layers_compute_what_transformers_computes(tmp_path, name, tp):
    from transformers import AutoModelForCausalLM

    path = write_checkpoint(name, tmp_path)
    hidden = torch.randn(5, 1, 32, generator=torch.Generator().manual_seed(3))
    ranks = run_ranks(project, tp, str(path), tp, hidden)
    layer = AutoModelForCausalLM.from_pretrained(path).model.layers[0]
    attention, shape = layer.self_attn, ModelShape.from_pretrained(path)
    with torch.no_grad():
        query, key, value = (
            proj(hidden).unflatten(-1, (-1, shape.head_dim)) for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if shape.qk_norm:
            query, key = attention.q_norm(query), attention.k_norm(key)
        expected = layer.mlp(hidden)
    torch.testing.assert_close(torch.cat([q for q, _, _, _ in ranks], dim=2), query)
    repeats = max(1, tp // shape.num_query_groups)  # with fewer key/value heads than ranks, neighbors share one
    for place, theirs in ((1, key), (2, value)):
        torch.testing.assert_close(torch.cat([rank[place] for rank in ranks], dim=2), theirs.repeat_interleave(repeats, dim=2))
    for *_, out in ranks:
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def run_experts(rank, world_size, path, hidden):
    """Return the output of the last layer's experts, computed by Megatron."""
    reader = HfReader(path)
    shape = ModelShape.from_hf(reader.config)
    model = build(shape, tp=1, ep=1, etp=1)
    weights = WeightMap.for_shape(shape, padded_vocab_size=ROWS)
    buffers = {name: tensor for name, tensor in model.named_buffers() if name in weights.buffer_names()}
    tensors = {**dict(model.named_parameters()), **buffers}
    weights.check_held(tensors)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(weights.load(name, reader))
        return model.decoder.layers[-1].mlp(hidden)[0]


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_raw_weights", "mixtral", "deepseek_v3"])
def test_loaded_experts_compute_what_transformers_computes(tmp_path, name):
    from transformers import AutoModelForCausalLM

    path = write_checkpoint(name, tmp_path)
    hidden = torch.randn(7, 1, 32, generator=torch.Generator().manual_seed(3))
    (ours,) = run_ranks(run_experts, 1, str(path), hidden)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(path).model.layers[-1].mlp(hidden.transpose(0, 1)).transpose(0, 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
