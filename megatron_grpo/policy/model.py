"""The model of one pipeline stage: Megatron-Core's GPTModel, which answers with log-probs where they are trained, not with logits."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_grpo.config.config import KernelConfig, ModelConfig, ParallelConfig
from megatron_grpo.parallel.autograd import copy_to_ranks
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.parallel.vocab import Slope, linear_logprobs
from megatron_grpo.policy.kernels import ACTIVATIONS, Rotation
from megatron_grpo.policy.layers import (
    AddNormed,
    FusedAttention,
    LatentAttention,
    LatentNorm,
    Norm,
    NormFromOne,
    PackedAttention,
    SinkAttention,
    WholeNorm,
    of_biased_experts,
    with_bias,
)
from megatron_grpo.policy.router import replace_routers
from megatron_grpo.policy.stream import LocalBatch
from megatron_grpo.policy.vision import Vision
from megatron_grpo.weights.rope import rope_inverse_frequencies
from megatron_grpo.weights.shape import ModelShape


def transformer_config(
    shape: ModelShape,
    model: ModelConfig,
    layout: ParallelConfig,
    *,
    use_te: bool,
    plain_linears: bool = False,
    kernels: KernelConfig | None = None,
) -> TransformerConfig:
    """Megatron-Core's configuration of one model. Fusions that need CUDA extensions are off unless Transformer Engine brings them.

    plain_linears: see `layer_specs`.
    """
    dtype = getattr(torch, model.torch_dtype)
    kernels = kernels or KernelConfig()
    interleaved = layout.virtual_pipeline_model_parallel_size is not None
    kind, moe, mla = TransformerConfig, {}, {}
    if shape.mla:
        kind = MLATransformerConfig
        sharpening = math.sqrt(shape.mla.softmax_scale * math.sqrt(shape.mla.qk_head_dim + shape.mla.qk_pos_emb_head_dim))
        mla = dict(
            q_lora_rank=shape.mla.q_lora_rank,
            kv_lora_rank=shape.mla.kv_lora_rank,
            qk_head_dim=shape.mla.qk_head_dim,
            qk_pos_emb_head_dim=shape.mla.qk_pos_emb_head_dim,
            v_head_dim=shape.mla.v_head_dim,
            rope_type="rope",  # angles are given; these two only say the softmax scale, (1 + 0.1 * second * log first)^2 / sqrt(channels)
            rotary_scaling_factor=math.e,
            mscale_all_dim=10 * (sharpening - 1),
        )
    if shape.moe:
        moe = dict(
            num_moe_experts=shape.moe.num_experts,
            moe_router_topk=shape.moe.topk,
            moe_ffn_hidden_size=shape.moe.ffn_hidden_size,
            moe_layer_freq=[int(has_experts) for has_experts in shape.moe.layers],
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            moe_z_loss_coeff=model.moe_z_loss_coeff,
            moe_grouped_gemm=use_te and not plain_linears,
            moe_router_pre_softmax=not shape.moe.norm_topk_prob,
            moe_router_score_function=shape.moe.score_function,
            # Sigmoid routers are computed in float32 wherever they come from; the scores of others are rounded as the sampler rounds them.
            moe_router_dtype="fp32" if shape.moe.score_function == "sigmoid" else None,
            moe_router_enable_expert_bias=shape.moe.has_expert_bias,
            moe_router_bias_update_rate=0.0,  # it belongs to the policy that samples: balancing would move log-probs without a loss
            moe_router_num_groups=shape.moe.num_groups if shape.moe.is_group_limited else None,
            moe_router_group_topk=shape.moe.group_topk if shape.moe.is_group_limited else None,
            moe_router_topk_scaling_factor=shape.moe.scaling_factor if shape.moe.scaling_factor != 1 else None,
            moe_shared_expert_intermediate_size=shape.moe.shared_ffn_hidden_size,
            moe_permute_fusion=kernels.moe_permute_fusion,
            moe_shared_expert_overlap=kernels.moe_shared_expert_overlap,
            moe_enable_deepep=kernels.moe_enable_deepep,
        )
    return kind(
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
        softmax_scale=None if shape.mla else shape.softmax_scale_of(0),  # of local layers: each has its own (`PackedAttention.read`)
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
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
        # Experts may be another model's alone, which is in the same layout (a teacher); Megatron-Core refuses it of a dense one.
        expert_model_parallel_size=layout.expert_model_parallel_size if shape.moe else 1,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        pipeline_dtype=dtype,
        # Packed micro-batches differ in length, so each stage tells the next how much is coming.
        variable_seq_lengths=layout.pipeline_model_parallel_size > 1,
        # With two stages "next" and "previous" are the same rank, which batched point-to-point calls cannot tell apart.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # Weights come from the checkpoint, but only drawing them first marks the tensor-parallel ones: without the mark they count as
        # copies, and the gradient norm (so the clipping) sees rank 0's shards alone.
        perform_initialization=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        use_te_activation_func=not use_te,  # its name for one function over both halves of what comes in: `swiglu`, set in `PolicyModel`
        persist_layer_norm=use_te,
        recompute_granularity=model.recompute_granularity,
        recompute_method=model.recompute_method,
        recompute_num_layers=model.recompute_num_layers,
        recompute_modules=list(model.recompute_modules) if model.recompute_granularity == "selective" else None,
        # Losses are weighted sums (docs/algorithms.md): nothing may divide them by a count of micro-batches or ranks.
        calculate_per_token_loss=True,
        # Megatron checks it even where there are no experts: "allgather" does not go with lengths that vary between stages.
        moe_token_dispatcher_type=model.moe_token_dispatcher_type if shape.moe else "alltoall",
        fp8=model.fp8_format,
        fp8_recipe=model.fp8_recipe if model.fp8_format else None,
        **moe,
        **mla,
        **model.megatron_extra_kwargs,  # of `config/passed_on.yaml`, none of which stands above
    )


def layer_specs(
    shape: ModelShape, config: TransformerConfig, *, use_te: bool, vp_stage: int | None, plain_linears: bool = False
) -> TransformerBlockSubmodules:
    """The layers of this stage. On the local spec, with the attention and the norms of `policy.layers` in place of Megatron's.

    plain_linears: every linear layer is a module of its own that sees its own input. Transformer Engine's usual ones hold the norm before
    them, and all experts at once.
    """
    norm = NormFromOne if shape.norms_from_one else Norm
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=use_te, normalization="RMSNorm", vp_stage=vp_stage)
    for layer in {id(layer): layer for layer in block.layer_specs}.values():  # layers of a kind share one specification
        attention = layer.submodules.self_attention.submodules
        if not shape.mla:
            # Megatron has one switch for the biases of the MLP and of the attention; models have them one by one.
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
            experts.linear_fc2 = of_biased_experts(experts.linear_fc2)
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm if shape.pre_norm else IdentityOp
        if shape.post_norm:
            layer.submodules.self_attn_bda = layer.submodules.mlp_bda = ModuleSpec(AddNormed, {"config": config, "norm": norm})
        attention.core_attention = SinkAttention if shape.sinks else PackedAttention
        if shape.mla:
            layer.submodules.self_attention.module = LatentAttention
            layer.submodules.self_attention.params |= {"rope_scale": shape.rope.attention_scaling, "interleaved": shape.mla.interleaved}
            attention.kv_layernorm = LatentNorm
            attention.q_layernorm = LatentNorm if shape.mla.q_lora_rank else IdentityOp
        elif shape.qk_norm_is_whole:
            attention.q_layernorm = ModuleSpec(WholeNorm, {"heads": shape.num_attention_heads})
            attention.k_layernorm = ModuleSpec(WholeNorm, {"heads": shape.num_query_groups})
        elif shape.qk_norm:
            attention.q_layernorm = attention.k_layernorm = norm
    if not use_te:
        block.layer_norm = norm
    return block


# Checkpoints call norms as Transformer Engine does, which fuses them with the linear layer behind. Megatron's local layers do so always;
# those with Transformer Engine not where a norm stands alone, as before experts. Each would lack weights of the other's checkpoints.
NORMS_IN_CHECKPOINTS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def _take_norms_out(layer: ModuleSpec, qkv_bias: bool) -> None:
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    layer.submodules.input_layernorm = TENorm
    layer.submodules.self_attention.submodules.linear_qkv = with_bias(TEColumnParallelLinear, qkv_bias)
    layer.submodules.pre_mlp_layernorm = TENorm  # before experts it is one already
    if hasattr(mlp := _parts(layer.submodules.mlp), "linear_fc1"):
        mlp.linear_fc1 = TEColumnParallelLinear


def _parts(spec: ModuleSpec | functools.partial):
    """The submodules that a specification of an MLP names. Newer Megatron-Core (0.19) binds them to the function that builds it."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


class LogProbHead(tensor_parallel.ColumnParallelLinear):
    """The output layer, asked for log-probs of given tokens. It stays Megatron's module, so its hooks and its sharding are Megatron's."""

    num_valid_rows: int
    vocab_start: int
    in_float32: bool  # the product, besides the softmax

    def forward(self, hidden, weight, batch: LocalBatch, *, temperature, chunk_size, with_entropy, slope):
        """hidden [t or t/tp, 1, H] -> (logprobs fp32 [c], entropy fp32 [c] or None), equal on all TP ranks."""
        if self.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            hidden = copy_to_ranks(hidden, self.tp_group)
        hidden, weight = hidden.squeeze(1)[batch.predict_at], self.weight if weight is None else weight
        return linear_logprobs(
            hidden.float() if self.in_float32 else hidden,
            weight.float() if self.in_float32 else weight,
            batch.targets,
            temperature=temperature,
            vocab_start=self.vocab_start,
            num_valid_rows=self.num_valid_rows,
            group=self.tp_group if self.tp_group.size() > 1 else None,
            chunk_size=chunk_size,
            with_entropy=with_entropy,
            slope=slope,
            kept=batch.kept,
        )


class PolicyModel(GPTModel):
    """One stage, or one chunk of it. Called with a LocalBatch; the last stage answers with float32 [1 or 2, c]: log-probs, entropies."""

    def __init__(
        self,
        shape: ModelShape,
        config: TransformerConfig,
        *,
        use_te: bool,
        plain_linears: bool,
        padded_vocab_size: int,
        first: bool,
        last: bool,
        vp_stage: int | None,
        temperature: float,
        chunk_size: int,
        in_float32: bool,
        tower: torch.nn.Module | None,
    ):
        """tower: of a model that sees, where this is its first chunk."""
        super().__init__(
            config,
            layer_specs(shape, config, use_te=use_te, vp_stage=vp_stage, plain_linears=plain_linears),
            vocab_size=padded_vocab_size,
            max_sequence_length=shape.max_position_embeddings,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="none",  # frequencies are gathered by position in `forward`
            vp_stage=vp_stage,
        )  # fmt: skip
        self.temperature, self.chunk_size = temperature, chunk_size
        ropes = [rope_inverse_frequencies(shape, rope)[0] for rope in (shape.rope, shape.local_rope) if rope]
        self.inverse_frequencies = [torch.tensor(rope, dtype=torch.float32, device=torch.cuda.current_device()) for rope in ropes]
        self.embedding_scale = float(torch.tensor(shape.embedding_scale, dtype=config.params_dtype))  # rounded as the sampler rounds it
        self.axes = torch.tensor(shape.rope.axes, dtype=torch.int64, device=torch.cuda.current_device())
        self.vision = None
        if tower is not None and shape.vision:
            self.vision = Vision(tower, config, self.decoder.layers, self.pg_collection.tp, deep=shape.vision.num_deepstack)
        replace_routers(self)
        if not use_te:
            limits = {"factor": shape.clamp[0], "limit": shape.clamp[1]} if shape.clamp else {}
            activation = functools.partial(ACTIVATIONS[shape.activation], **limits)
            for module in self.modules():
                if isinstance(module, MLP):
                    module.activation_func = activation
                if isinstance(module, PackedAttention) and not shape.mla:
                    module.read(shape)
                if shape.post_norm and isinstance(module, TransformerLayer):  # Megatron's own would keep what a norm reads in every pass
                    module.bias_dropout_add_exec_handler = nullcontext
        if last:
            rows = padded_vocab_size // config.tensor_model_parallel_size
            head = self.output_layer
            # Re-classed in place, so that Megatron's parameters, hooks and sharding stay; only forward changes.
            head.__class__ = LogProbHead
            head.in_float32 = in_float32
            head.vocab_start = head.tp_group.rank() * rows
            head.num_valid_rows = max(0, min(rows, shape.vocab_size - head.vocab_start))

    def forward(self, batch: LocalBatch, *, with_entropy: bool = False, temperature: float | None = None, slope: Slope | None = None):
        """slope: of this micro-batch's loss, where a token's own log-prob is enough to know it (`parallel.vocab`)."""
        hidden = self.embedding(input_ids=batch.token_ids, position_ids=None) if self.pre_process else None
        if self.embedding_scale != 1 and hidden is not None:
            hidden = hidden * self.embedding_scale
        if self.vision is not None and hidden is not None:
            hidden = self.vision.see(hidden, batch)
        angles, packed = self._angles(batch)
        with self.vision.in_layers() if self.vision is not None else nullcontext():
            hidden = self.decoder(
                hidden_states=hidden,
                attention_mask=None,
                rotary_pos_emb=angles,
                packed_seq_params=packed,
                padding_mask=self._number(batch) if self.config.num_moe_experts else None,
            )
        if not self.post_process:
            return hidden
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logprobs, entropy = self.output_layer(
            hidden,
            weight,
            batch,
            temperature=self.temperature if temperature is None else temperature,
            chunk_size=self.chunk_size,
            with_entropy=with_entropy,
            slope=slope,
        )
        return torch.stack([logprobs, entropy]) if with_entropy else logprobs[None]

    def _number(self, batch: LocalBatch):
        """Bool [bits, t or t/tp]: for each token the binary digits of one more than its micro-batch's number, 0 for padding (see
        `policy.router`)."""
        tp, number = self.pg_collection.tp, batch.number + 1
        digits = torch.tensor([number >> bit & 1 for bit in range(number.bit_length())], dtype=torch.bool)
        bits = digits.to(batch.multiplicity.device)[:, None] & (batch.multiplicity > 0)
        return bits.chunk(tp.size(), dim=1)[tp.rank()] if self.config.sequence_parallel else bits

    def _angles(self, batch: LocalBatch):
        """(angles [t, 1, 1, rotated channels] for layers that rotate by themselves, else None; the stream as the layers take it).

        One row a token: segments may start at any position.
        """
        positions = batch.positions.float()
        # With three axes [3, t] each frequency turns with one of them.
        places = positions[self.axes].T if positions.dim() > 1 else positions[:, None]
        if not self.config.multi_latent_attention:
            rotations = tuple(Rotation.of(places * frequencies) for frequencies in self.inverse_frequencies)
            return None, dataclasses.replace(batch.packed, rotations=rotations)
        angles = places * self.inverse_frequencies[0]
        return torch.cat([angles, angles], dim=-1)[:, None, None, :], batch.packed


def build_chunks(
    shape: ModelShape,
    model: ModelConfig,
    layout: ParallelConfig,
    parallel: ParallelState,
    *,
    use_te: bool,
    plain_linears: bool = False,
    padded_vocab_size: int,
    temperature: float,
    tower: torch.nn.Module | None = None,
    kernels: KernelConfig | None = None,
) -> list[PolicyModel]:
    """The model chunks of this rank's stage: one, or `virtual_pipeline_model_parallel_size`. Weights are not set yet.

    tower: see `policy.vision`; None where the model has none, and on later stages.
    """
    config = transformer_config(shape, model, layout, use_te=use_te, plain_linears=plain_linears, kernels=kernels)
    chunks = []
    for index in range(parallel.layout.num_chunks):
        chunks.append(
            PolicyModel(
                shape,
                config,
                use_te=use_te,
                plain_linears=plain_linears,
                padded_vocab_size=padded_vocab_size,
                first=parallel.is_first_stage and index == 0,
                last=parallel.is_last_stage and index == parallel.layout.num_chunks - 1,
                vp_stage=index if parallel.layout.vpp else None,
                temperature=temperature,
                chunk_size=model.logprob_chunk_size,
                in_float32=model.cast_lm_head_to_fp32,
                tower=tower if index == 0 else None,
            ).to(parallel.device)  # parameters are drawn in params_dtype; a sigmoid router's bias stays float32
        )  # fmt: skip
    # megatron-core 0.19 builds no norm of queries without it; in training it sums the norms' gradients over tensor-parallel ranks, which is
    # wrong for a norm over all heads: each rank has the weights of its own ones.
    config.qk_layernorm = shape.qk_norm and not shape.qk_norm_is_whole
    return chunks


def let_gradients_in(chunks: Sequence[GPTModel]) -> None:
    """Makes the output of a frozen embedding ask for a gradient.

    Otherwise Megatron's checkpointed layers get an input without one, and their backward is skipped: no error, and all gradients zero.
    """

    def ask(module, inputs, output):
        if torch.is_grad_enabled():
            output.requires_grad_(True)

    for chunk in chunks:
        if chunk.pre_process and not chunk.embedding.word_embeddings.weight.requires_grad:
            chunk.embedding.register_forward_hook(ask)
