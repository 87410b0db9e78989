"""Megatron-Core's configuration of a model, and the specification of a stage's layers."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_grpo.core.policy.kernels import Norm, ZeroCenteredRMSNorm
from megatron_grpo.core.policy.layers import (
    FullWidthNorm,
    FusedAttention,
    GatedAttention,
    LatentNorm,
    PackedAttention,
    PackedMLAttention,
    PostNormResidual,
    SinkAttention,
    make_biased_experts,
    with_bias,
)
from megatron_grpo.core.settings import KernelConfig, ModelConfig, ParallelConfig, StepConfig
from megatron_grpo.core.weights.shape import ModelShape


def padded_vocab_size(shape: ModelShape, cfg: StepConfig) -> int:
    """Return the rows of the embedding, padded so that TP divides them evenly."""
    multiple = cfg.model.padded_vocab_multiple * cfg.parallel.tensor_model_parallel_size
    return -(-shape.vocab_size // multiple) * multiple


def transformer_config(
    shape: ModelShape,
    model: ModelConfig,
    layout: ParallelConfig,
    *,
    use_te: bool,
    plain_linears: bool = False,
    kernels: KernelConfig | None = None,
) -> TransformerConfig:
    """Return Megatron-Core's configuration of a model.

    Fusions that need CUDA extensions are off, unless Transformer Engine has them.

    Args:
        plain_linears: See `layer_specs`.
        kernels: The kernel settings; None for the defaults.
    """
    dtype, kernels = getattr(torch, model.torch_dtype), kernels or KernelConfig()
    kind = MLATransformerConfig if shape.mla else TransformerConfig
    expert_fields = _experts(shape, model, kernels) | {"moe_grouped_gemm": use_te and not plain_linears} if shape.moe else {}
    return kind(
        **_dense(shape),
        **(_latent_attention(shape.mla) if shape.mla else {}),
        **expert_fields,
        **_cuts(shape, layout, kernels),
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        pipeline_dtype=dtype,
        # Weights come from the checkpoint, but only initialization marks the tensor-parallel ones. Without the mark they count as
        # replicated, and the gradient norm (so the clipping) includes rank 0's shards only.
        perform_initialization=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        use_te_activation_func=not use_te,  # Megatron's name for one function of both halves of the input: `swiglu`, set in `PolicyModel`
        persist_layer_norm=use_te,
        recompute_granularity=model.recompute_granularity,
        recompute_method=model.recompute_method,
        recompute_num_layers=model.recompute_num_layers,
        recompute_modules=list(model.recompute_modules) if model.recompute_granularity == "selective" else None,
        # Losses are weighted sums (docs/algorithms.md): nothing may divide them by a count of micro-batches or ranks.
        calculate_per_token_loss=True,
        # Megatron checks it for models without experts too: "allgather" does not support lengths that vary between stages.
        moe_token_dispatcher_type=model.moe_token_dispatcher_type if shape.moe else "alltoall",
        fp8=model.fp8_format,
        fp8_recipe=model.fp8_recipe if model.fp8_format else None,
        **model.megatron_extra_kwargs,  # of `run/config/engine_kwargs.yaml`, none of which is set above
    )


def _dense(shape: ModelShape) -> dict[str, Any]:
    return dict(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        layernorm_epsilon=shape.norm_epsilon,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=shape.mlp_bias,
        add_qkv_bias=shape.qkv_bias,
        attention_output_gate=shape.attention_output_gate,
        linear_attention_freq=list(map(int, shape.delta_net.layers)) if shape.delta_net else None,  # checkpoints name each layer's tensors
        softmax_scale=None if shape.mla else shape.find_softmax_scale(0),  # local layers have one each (`PackedAttention.read`)
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )


def _latent_attention(mla: Any) -> dict[str, Any]:
    sharpening = math.sqrt(mla.softmax_scale * math.sqrt(mla.qk_head_dim + mla.qk_pos_emb_head_dim))
    return dict(
        q_lora_rank=mla.q_lora_rank,
        kv_lora_rank=mla.kv_lora_rank,
        qk_head_dim=mla.qk_head_dim,
        qk_pos_emb_head_dim=mla.qk_pos_emb_head_dim,
        v_head_dim=mla.v_head_dim,
        rope_type="rope",  # angles are given; the next two set only the softmax scale, (1 + 0.1 * second * log first)^2 / sqrt(channels)
        rotary_scaling_factor=math.e,
        mscale_all_dim=10 * (sharpening - 1),
    )


def _experts(shape: ModelShape, model: ModelConfig, kernels: KernelConfig) -> dict[str, Any]:
    moe = shape.moe
    assert moe is not None
    return dict(
        num_moe_experts=moe.num_experts,
        moe_router_topk=moe.topk,
        moe_ffn_hidden_size=moe.ffn_hidden_size,
        moe_layer_freq=[int(has_experts) for has_experts in moe.layers],
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_z_loss_coeff=model.moe_z_loss_coeff,
        moe_router_pre_softmax=not moe.norm_topk_prob,
        moe_router_score_function=moe.score_function,
        # Sigmoid routers compute in float32 in every model; the scores of others are rounded as the sampler rounds them.
        moe_router_dtype="fp32" if moe.score_function == "sigmoid" else None,
        moe_router_enable_expert_bias=moe.has_expert_bias,
        moe_router_bias_update_rate=0.0,  # the bias belongs to the policy that samples: balancing would change log-probs without a loss
        moe_router_num_groups=moe.num_groups if moe.is_group_limited else None,
        moe_router_group_topk=moe.group_topk if moe.is_group_limited else None,
        moe_router_topk_scaling_factor=moe.scaling_factor if moe.scaling_factor != 1 else None,
        moe_shared_expert_intermediate_size=moe.shared_ffn_hidden_size,
        moe_shared_expert_gate=moe.has_shared_gate,
        moe_permute_fusion=kernels.moe_permute_fusion,
        moe_shared_expert_overlap=kernels.moe_shared_expert_overlap,
        moe_enable_deepep=kernels.moe_enable_deepep,
    )


def _cuts(shape: ModelShape, layout: ParallelConfig, kernels: KernelConfig) -> dict[str, Any]:
    """Return how the model is sharded, and how stages communicate."""
    interleaved = layout.virtual_pipeline_model_parallel_size is not None
    return dict(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        num_layers_in_first_pipeline_stage=layout.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=layout.decoder_last_pipeline_num_layers,
        microbatch_group_size_per_vp_stage=layout.microbatch_group_size_per_vp_stage,
        account_for_embedding_in_pipeline_split=layout.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=layout.account_for_loss_in_pipeline_split,
        pipeline_model_parallel_layout=layout.pipeline_model_parallel_layout,
        context_parallel_size=layout.context_parallel_size,
        cp_comm_type=kernels.cp_comm_type,
        # A dense model may be in this layout because another model, such as a teacher, has experts; Megatron-Core refuses EP for it.
        expert_model_parallel_size=layout.expert_model_parallel_size if shape.moe else 1,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        # Packed micro-batches differ in length, so each stage sends the next one the length first.
        variable_seq_lengths=layout.pipeline_model_parallel_size > 1,
        # With two stages "next" and "previous" are the same rank, which batched point-to-point calls cannot tell apart.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
    )


def layer_specs(
    shape: ModelShape, config: TransformerConfig, *, use_te: bool, vp_stage: int | None, plain_linears: bool = False
) -> TransformerBlockSubmodules:
    """Return the layers of this stage; on the local spec with the attention and the norms of `policy.layers`.

    Args:
        vp_stage: Index of the chunk in its stage under virtual pipeline parallelism; None without it.
        plain_linears: Every linear layer is a separate module with its own input. Transformer Engine's usual layers contain the norm before
            them, and all experts at once.
    """
    norm = ZeroCenteredRMSNorm if shape.has_zero_centered_norms else Norm
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=use_te, normalization="RMSNorm", vp_stage=vp_stage)
    if shape.delta_net:
        _put_delta_nets(block, shape, config, vp_stage)
    for layer in {id(layer): layer for layer in block.layer_specs}.values():  # layers of a kind share one specification
        attention = layer.submodules.self_attention.submodules
        if attention is None:  # a gated delta net
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
            continue
        if not shape.mla:
            # Megatron has one switch for the biases of the MLP and of the attention; models have them independently.
            attention.linear_qkv = with_bias(attention.linear_qkv, shape.qkv_bias)
            attention.linear_proj = with_bias(attention.linear_proj, shape.attention_out_bias)
        if use_te:
            attention.core_attention = FusedAttention
            layer.submodules.sharded_state_dict_keys_map |= NORMS_IN_CHECKPOINTS
            if plain_linears:
                _take_norms_out(layer, shape.qkv_bias)
            continue
        if shape.moe and shape.moe.has_biases:
            experts = _parts(_parts(layer.submodules.mlp).experts)
            experts.linear_fc2 = make_biased_experts(experts.linear_fc2)
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm if shape.pre_norm else IdentityOp
        if shape.post_norm:
            layer.submodules.self_attn_bda = layer.submodules.mlp_bda = ModuleSpec(PostNormResidual, {"config": config, "norm": norm})
        attention.core_attention = SinkAttention if shape.sinks else PackedAttention
        if shape.attention_output_gate:
            layer.submodules.self_attention.module = GatedAttention
        if shape.mla:
            layer.submodules.self_attention.module = PackedMLAttention
            layer.submodules.self_attention.params |= {"rope_scale": shape.rope.attention_scaling, "interleaved": shape.mla.interleaved}
            attention.kv_layernorm = LatentNorm
            attention.q_layernorm = LatentNorm if shape.mla.q_lora_rank else IdentityOp
        elif shape.qk_norm_is_whole:
            attention.q_layernorm = ModuleSpec(FullWidthNorm, {"heads": shape.num_attention_heads})
            attention.k_layernorm = ModuleSpec(FullWidthNorm, {"heads": shape.num_query_groups})
        elif shape.qk_norm:
            attention.q_layernorm = attention.k_layernorm = norm
    if not use_te:
        block.layer_norm = norm
    return block


def _put_delta_nets(block: TransformerBlockSubmodules, shape: ModelShape, config: TransformerConfig, vp_stage: int | None) -> None:
    """Replace the attention of the layers with the gated delta rule. Which ones these are depends on their numbers in the whole model."""
    from megatron_grpo.core.policy.gated_delta_net import PackedGatedDeltaNet

    assert shape.delta_net is not None
    layout, first = config.pipeline_model_parallel_layout, get_transformer_layer_offset(config, vp_stage=vp_stage)
    numbers = layout.get_layer_id_list(LayerType.decoder, vp_stage=vp_stage) if layout else itertools.count(first)
    shared, copies = list(block.layer_specs), dict[tuple[int, bool], ModuleSpec]()
    for index, (layer, number) in enumerate(zip(shared, numbers)):
        key = id(layer), shape.is_delta_net_layer(number)
        if key not in copies:
            copies[key] = copy.deepcopy(layer)
            if shape.is_delta_net_layer(number):
                copies[key].submodules.self_attention = ModuleSpec(PackedGatedDeltaNet, {"delta": shape.delta_net})
        block.layer_specs[index] = copies[key]


# Checkpoints have Transformer Engine's names of norms, which it fuses with the following linear layer. Megatron's local layers always use
# these names; its layers with Transformer Engine do not for a norm that is not fused, as before experts. Without this map each would lack
# weights in the other's checkpoints.
NORMS_IN_CHECKPOINTS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def _take_norms_out(layer: ModuleSpec, qkv_bias: bool) -> None:
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    layer.submodules.input_layernorm = TENorm
    layer.submodules.self_attention.submodules.linear_qkv = with_bias(TEColumnParallelLinear, qkv_bias)
    layer.submodules.pre_mlp_layernorm = TENorm  # before experts it is one already
    if hasattr(mlp := _parts(layer.submodules.mlp), "linear_fc1"):
        mlp.linear_fc1 = TEColumnParallelLinear


def _parts(spec: ModuleSpec | functools.partial):
    """Return the submodules of an MLP specification. Newer Megatron-Core (0.19) binds them to the function that builds the MLP."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules
