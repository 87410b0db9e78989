"""The model of one pipeline stage: Megatron-Core's GPTModel, whose head returns log-probs of the trained tokens instead of logits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_grpo.core.parallel.autograd import copy_to_ranks
from megatron_grpo.core.parallel.state import ParallelState
from megatron_grpo.core.parallel.vocab import Slope, linear_logprobs
from megatron_grpo.core.policy.kernels import ACTIVATIONS, RotaryFactors
from megatron_grpo.core.policy.layers import PackedAttention
from megatron_grpo.core.policy.model_config import layer_specs, padded_vocab_size, transformer_config
from megatron_grpo.core.policy.packed_batch import LocalBatch
from megatron_grpo.core.policy.router import replace_routers
from megatron_grpo.core.settings import StepConfig
from megatron_grpo.core.weights.rope import rope_inverse_frequencies
from megatron_grpo.core.weights.shape import ModelShape


class LogProbHead(tensor_parallel.ColumnParallelLinear):
    """Output layer that returns log-probs of given tokens.

    It remains Megatron's module, so hooks and sharding are Megatron's.

    Args:
        in_float32: Whether the matrix product too, not only the softmax, is computed in float32.
    """

    num_valid_rows: int
    vocab_start: int
    in_float32: bool

    def forward(self, hidden, weight, batch: LocalBatch, *, temperature, chunk_size, with_entropy, slope):
        """Compute log-probs and entropies of the targets; equal on all TP ranks.

        Args:
            hidden: Hidden states, [t, 1, H], or [t/tp, 1, H] under sequence parallelism.
            weight: Weight of the tied embedding; None for the layer's own weight.
            chunk_size: Positions whose logits are computed at once.
            slope: See `parallel.vocab`.

        Returns:
            Log-probs, float32 [c]; entropies in nats, float32 [c], or None.
        """
        if self.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            hidden = copy_to_ranks(hidden, self.tp_group)
        hidden, weight = hidden.squeeze(1)[batch.logit_positions], self.weight if weight is None else weight
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
            vocab_mask=batch.sampling_mask,
        )


class PolicyModel(GPTModel):
    """Model of one pipeline stage, or one chunk of it.

    Args:
        index: Index of the chunk in its stage.
        plain_linears: See `model_config.layer_specs`.
        tower: Vision tower, if the model has one and this is its first chunk.
    """

    def __init__(
        self, shape: ModelShape, config: TransformerConfig, cfg: StepConfig, parallel: ParallelState, *, index: int, use_te: bool,
        plain_linears: bool, tower: torch.nn.Module | None,
    ):  # fmt: skip
        vp_stage, rows = index if parallel.layout.vpp else None, padded_vocab_size(shape, cfg)
        super().__init__(
            config,
            layer_specs(shape, config, use_te=use_te, vp_stage=vp_stage, plain_linears=plain_linears),
            vocab_size=rows,
            max_sequence_length=shape.max_position_embeddings,
            pre_process=parallel.is_first_stage and index == 0,
            post_process=parallel.is_last_stage and index == parallel.layout.num_chunks - 1,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="none",  # `forward` gathers the frequencies by position
            vp_stage=vp_stage,
        )  # fmt: skip
        self.temperature, self.chunk_size = cfg.rollout.temperature, cfg.model.logprob_chunk_size
        ropes = [rope_inverse_frequencies(shape, rope)[0] for rope in (shape.rope, shape.local_rope) if rope]
        self.inverse_frequencies = [torch.tensor(rope, dtype=torch.float32, device=torch.cuda.current_device()) for rope in ropes]
        self.embedding_scale = float(torch.tensor(shape.embedding_scale, dtype=config.params_dtype))  # rounded as the sampler rounds it
        self.padding_idx = shape.padding_idx
        self.axes = torch.tensor(shape.rope.axes, dtype=torch.int64, device=torch.cuda.current_device())
        self.vision = None
        if tower is not None and shape.vision:
            from megatron_grpo.core.policy.vision import VisionEncoder

            self.vision = VisionEncoder(tower, config, self.decoder.layers, self.pg_collection.tp, deep=shape.vision.num_deepstack)
        replace_routers(self)
        if not use_te:
            self._use_local_layers(shape)
        if self.post_process:
            rows //= config.tensor_model_parallel_size
            head = self.output_layer
            # Re-classed in place, so that Megatron's parameters, hooks and sharding stay; only forward changes.
            head.__class__ = LogProbHead
            head.in_float32 = cfg.model.cast_lm_head_to_fp32
            head.vocab_start = head.tp_group.rank() * rows
            head.num_valid_rows = max(0, min(rows, shape.vocab_size - head.vocab_start))

    def _use_local_layers(self, shape: ModelShape) -> None:
        limits = {"factor": shape.clamp[0], "limit": shape.clamp[1]} if shape.clamp else {}
        activation = functools.partial(ACTIVATIONS[shape.activation], **limits)
        for module in self.modules():
            if isinstance(module, MLP):
                module.activation_func = activation
            if isinstance(module, PackedAttention) and not shape.mla:
                module.read(shape)
            if shape.post_norm and isinstance(module, TransformerLayer):  # Megatron's own would keep a norm's input in every pass
                module.bias_dropout_add_exec_handler = nullcontext

    def forward(self, batch: LocalBatch, *, with_entropy: bool = False, temperature: float | None = None, slope: Slope | None = None):
        """Run the stage on this rank's part of a micro-batch.

        Args:
            temperature: Divides the logits; None for the sampling temperature of the run.
            slope: Derivative of this micro-batch's loss by a token's log-prob, if that log-prob alone determines it (`parallel.vocab`).

        Returns:
            On the last stage float32 [1 or 2, c]: log-probs, and entropies in nats if asked for. On other stages the hidden states.
        """
        hidden = self.embedding(input_ids=batch.token_ids, position_ids=None) if self.pre_process else None
        if self.padding_idx is not None and hidden is not None and hidden.requires_grad:
            is_padding = self._scattered(batch.token_ids == self.padding_idx).T[..., None]
            hidden.register_hook(lambda gradient: gradient.masked_fill(is_padding, 0.0))
        if self.embedding_scale != 1 and hidden is not None:
            hidden = hidden * self.embedding_scale
        if self.vision is not None and hidden is not None:
            hidden = self.vision.embed_images(hidden, batch)
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
        """Encode the micro-batch's number in a mask, bool [bits, t or t/tp].

        Each token has the binary digits of the number plus one; padding has 0. See `policy.router`.
        """
        number = batch.number + 1
        digits = torch.tensor([number >> bit & 1 for bit in range(number.bit_length())], dtype=torch.bool)
        bits = digits.to(batch.num_references.device)[:, None] & (batch.num_references > 0)
        return self._scattered(bits)

    def _scattered(self, mask):
        """Return the part of a mask [n, t] that belongs to this rank's hidden states: all of it without sequence parallelism."""
        tp = self.pg_collection.tp
        return mask.chunk(tp.size(), dim=1)[tp.rank()] if self.config.sequence_parallel else mask

    def _angles(self, batch: LocalBatch):
        """Return the rotary angles, one row per token, because segments may start at any position.

        Returns:
            Angles [t, 1, 1, rotated channels] for layers that rotate by themselves (latent attention), else None; and the packed stream for
            the attention layers, with their rotations.
        """
        positions = batch.positions.float()
        # With three axes [3, t] each frequency belongs to one of them.
        coordinates = positions[self.axes].T if positions.dim() > 1 else positions[:, None]
        if not self.config.multi_latent_attention:
            rotations = tuple(RotaryFactors.from_angles(coordinates * frequencies) for frequencies in self.inverse_frequencies)
            return None, dataclasses.replace(batch.packed, rotations=rotations)
        angles = coordinates * self.inverse_frequencies[0]
        return torch.cat([angles, angles], dim=-1)[:, None, None, :], batch.packed


def build_chunks(
    shape: ModelShape, cfg: StepConfig, parallel: ParallelState, *, use_te: bool, plain_linears: bool = False,
    tower: torch.nn.Module | None = None,
) -> list[PolicyModel]:  # fmt: skip
    """Build the model chunks of this rank's stage: one, or `virtual_pipeline_model_parallel_size`.

    Their weights are not loaded yet.

    Args:
        plain_linears: See `model_config.layer_specs`.
        tower: Vision tower; None if the model has none, and on later stages. See `policy.vision`.
    """
    config = transformer_config(shape, cfg.model, cfg.parallel, use_te=use_te, plain_linears=plain_linears, kernels=cfg.kernels)
    kwargs: dict[str, Any] = {"use_te": use_te, "plain_linears": plain_linears}
    chunks = [
        PolicyModel(shape, config, cfg, parallel, index=index, tower=tower if index == 0 else None, **kwargs).to(parallel.device)
        for index in range(parallel.layout.num_chunks)
    ]  # parameters are initialized in params_dtype; a sigmoid router's bias stays float32
    # Megatron-Core 0.19 builds the norms of queries and keys only with this flag. In training the flag makes it sum their gradients over
    # tensor-parallel ranks, which is wrong for a norm over all heads: each rank has the weights of its own heads.
    config.qk_layernorm = shape.qk_norm and not shape.qk_norm_is_whole
    return chunks


def let_gradients_in(chunks: Sequence[GPTModel]) -> None:
    """Make the output of a frozen embedding require a gradient.

    Otherwise Megatron's checkpointed layers receive an input without one and skip their backward: no error, and all gradients are zero.
    """

    def require_grad(module, inputs, output):
        if torch.is_grad_enabled():
            output.requires_grad_(True)

    for chunk in chunks:
        if chunk.pre_process and not chunk.embedding.word_embeddings.weight.requires_grad:
            chunk.embedding.register_forward_hook(require_grad)


def keep_outputs(chunks: Sequence[Any]) -> None:
    """Cache the outputs of the vision towers, so that an image is encoded once. For towers whose weights no longer change."""
    for chunk in chunks:
        if chunk.vision is not None:
            chunk.vision.keeps_outputs = True
