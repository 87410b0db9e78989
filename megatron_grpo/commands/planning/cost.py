"""Estimate the work of one rollout and its training: matmul FLOPs by phase, bytes of a weight sync and a checkpoint, and packing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_grpo.commands.planning.parameters import FP32, TrainableSpec, WeightRow, elements, padded_vocab, rows_and_channels
from megatron_grpo.commands.planning.sampler import keeps_tower, sync_traffic
from megatron_grpo.commands.planning.summary import most_waiting_rows, old_logprobs_summary
from megatron_grpo.commands.planning.token_counts import ComputeCounts, StepTokens, packing, sequence_tokens
from megatron_grpo.core.batching.batch_sizes import BatchSizes
from megatron_grpo.core.batching.schedule import TrainingSchedule
from megatron_grpo.core.grpo.zero_gradient import zero_gradient_kinds
from megatron_grpo.core.rollout.sampling_mask import max_mask_tokens, samples_from_part
from megatron_grpo.core.weights.names import ShardSplit, WeightEntry, num_parameters, outer_entries, tower_entries
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.core.weights.sizes import CHUNK, DeltaNetShape
from megatron_grpo.run.check import CheckedConfig
from megatron_grpo.run.checkpoint.fingerprints import list_settings
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.models import config_of_teacher
from megatron_grpo.run.sharing import Lengths, PrefixSharing


def estimate_cost(
    checked: CheckedConfig, tuning: TrainableSpec | None, lengths: Lengths | None, sharing: PrefixSharing, step: StepTokens
) -> dict[str, Any]:
    """Return the `cost` object of `plan --json`. Without a model shape, it contains only what the lengths determine.

    Args:
        tuning: Trainable parameters; None without a model shape.
        sharing: Whether each prompt is computed once.
    """
    shape, sizes, cfg, teacher = checked.shape, checked.sizes, checked.config, checked.teacher
    cost: dict[str, Any] = {}
    packings = {"sharing": _sharing(sharing, cfg, step)}
    if shape is not None and tuning is not None:
        flops_apart, flops_shared = (_trained(shape, sizes, cfg, tuning, computed, teacher) for computed in (step.apart, step.shared))
        packings["sharing"] |= {"flops_apart": flops_apart, "flops_shared": flops_shared}
        cost = {
            **_parameters(shape, tuning),
            **_flops(shape, sizes, cfg, tuning, lengths, flops_shared),
            **_bytes(shape, sizes, cfg, tuning),
        }
        prompt, completion = sequence_tokens(cfg, lengths, longest=False)
        if shape.moe and cfg.grpo.router_replay_mode != "disabled":  # int16 expert IDs of every token and MoE layer
            cost["experts"] = _bytes_per_row(sizes, 2 * sum(shape.moe.layers) * shape.moe.topk, prompt + completion)
        if samples_from_part(cfg.rollout):  # upper bound of the sampling mask: token IDs and row offsets. top_p and min_p leave fewer
            cost["kept"] = _bytes_per_row(sizes, 8 + 4 * max_mask_tokens(cfg.rollout), completion)
    if lengths is not None:
        cost["packing"] = packing(sizes, cfg, lengths, sharing.min_saving_ratio)
        if sizes.partial_rollouts:
            from megatron_grpo.plugins.partial_rollouts.plan import forecast

            cost["partial_rollouts"] = forecast(sizes, cfg.rollout, lengths)
    return cost | packings


def _bytes_per_row(sizes: BatchSizes, bytes_per_token: int, tokens: int) -> dict[str, int]:
    """Return the bytes of data stored beside each row: `bytes_per_token` bytes for each of `tokens` tokens."""
    return {
        "bytes_of_token": bytes_per_token,
        "bytes_of_row": bytes_per_token * tokens,
        "bytes_of_rollout": bytes_per_token * tokens * sizes.generation_batch_size,
        "checkpoint_bytes": bytes_per_token * tokens * most_waiting_rows(sizes),
    }


def _sharing(sharing: PrefixSharing, cfg: Config, step: StepTokens) -> dict[str, Any]:
    """Return the `sharing` object: one optimizer step packed with a prompt per completion, and with each prompt once.

    Tokens include alignment.
    """
    return {
        "setting": cfg.batch.share_prefix,
        "shares": sharing.min_saving_ratio is not None,
        "why": sharing.why,
        "sequences": step.shared.sequences,
        "tokens_apart": step.apart.tokens,
        "tokens_shared": step.shared.tokens,
        "groups": len({row.group for row in step.lengths}),
        "pieces": step.shared.pieces,
        "micro_batches_apart": step.apart.micro_batches,
        "micro_batches_shared": step.shared.micro_batches,
        "micro_batches_of_rank_apart": step.micro_batches_of_rank(step.apart),
        "micro_batches_of_rank_shared": step.micro_batches_of_rank(step.shared),
        "bubble_apart": step.bubble(step.apart),
        "bubble_shared": step.bubble(step.shared),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCounts:
    """FLOPs of matrix products; a multiply-add counts as 2.

    Args:
        linears: Forward of the model's own matrices.
        attention: Forward of attention.
        weight_gradients: Weight gradients of the matrices that train.
        recurrence: Forward of the gated delta rule.
        recurrence_backward: Its backward, which computes the forward again.
        adapters: Forward of the trained adapters.
        reference: Forward of the reference's frozen adapters.
    """

    linears: int
    attention: int
    weight_gradients: int
    recurrence: int = 0
    recurrence_backward: int = 0
    adapters: int = 0
    reference: int = 0

    @property
    def forward(self) -> int:
        """FLOPs of the policy's forward."""
        return self.linears + self.attention + self.recurrence + self.adapters

    @property
    def backward(self) -> int:
        """FLOPs of the backward.

        Every matrix computes the gradient of its input, and a trained one also its own. Each of attention's products has two inputs.
        """
        return self.linears + self.weight_gradients + 2 * self.attention + self.recurrence_backward + 2 * self.adapters


def count_flops(
    shape: ModelShape, tuning: TrainableSpec, tokens: int, *, squares: int, head_positions: int, lengths: Mapping[int, int] | None = None
) -> FlopCounts:
    """Return the FLOPs of a forward and backward over `tokens` tokens.

    Args:
        tokens: Computed tokens.
        squares: Attention work as in `ComputeCounts.squares`; sliding windows reduce it.
        lengths: Sequences by length as in `ComputeCounts.lengths`; None for one sequence of `tokens` tokens.
    """
    lengths = {tokens: 1} if lengths is None else lengths
    squares_of_layers = 0
    for layer in (layer for layer in range(shape.num_layers) if not shape.is_delta_net_layer(layer)):
        window = shape.window(layer) or tokens
        squares_of_layers += squares - sum(count * max(0, length - window) ** 2 for length, count in lengths.items())
    # Causal attention computes half of the tokens x tokens matrix, once for scores and once for values.
    value_size = shape.num_attention_heads * (shape.mla.v_head_dim if shape.mla else shape.head_dim)
    recurrence, recurrence_backward = _recurrence(shape.delta_net) if shape.delta_net else (0, 0)
    head = 2 * head_positions * shape.hidden_size * shape.vocab_size
    products, trained = _products(shape, tuning)
    is_head_trained = all(tuning.trains_outer(entry) for entry in outer_entries(shape) if entry.megatron == "output_layer.weight")
    return FlopCounts(
        linears=2 * products * tokens + head,
        attention=squares_of_layers * (shape.query_size + value_size),
        weight_gradients=2 * trained * tokens + (head if is_head_trained else 0),
        recurrence=recurrence * tokens,
        recurrence_backward=recurrence_backward * tokens,
        adapters=2 * tokens * _adapter_products(shape, tuning.rank, [(row, row.adapters) for row in tuning.rows]),
        reference=2 * tokens * _adapter_products(shape, tuning.reference_rank, [(row, row.reference) for row in tuning.rows]),
    )


def _recurrence(delta: DeltaNetShape) -> tuple[int, int]:
    """Return the FLOPs of the gated delta rule for one token in all its layers: forward, and backward with the forward again.

    A token is multiplied with the tokens of its chunk and with the state, and its chunk solves two triangular systems. The backward of a
    system solves another one and multiplies two whole matrices.
    """
    heads, k, v = delta.num_value_heads * sum(delta.layers), delta.key_head_dim, delta.value_head_dim
    products, systems = heads * (4 * CHUNK * k + 2 * CHUNK * v + 6 * k * v), heads * CHUNK * (k + v)
    return products + systems, 3 * products + 4 * systems


def _products(shape: ModelShape, tuning: TrainableSpec) -> tuple[int, int]:
    """Return the matrix elements that one token uses in the layers, and those of them that train. Experts count on average."""
    total, trained = 0, 0.0
    for row in tuning.rows:
        size, share = sum(math.prod(size) for _, size in row.entry.hf if len(size) == 2), _share(shape, row.entry)
        total += size * round(len(row.trains) * share)
        trained += size * sum(row.trains) * share
    return total, round(trained)


def _adapter_products(shape: ModelShape, rank: int, adapted_rows: Sequence[tuple[WeightRow, Sequence[Sequence[int]]]]) -> int:
    """Return the adapter elements that one token uses; experts count on average.

    The rows of a fused linear are multiplied by the inner channels of all its modules.
    """
    total = 0.0
    for row, adapters in adapted_rows:
        if count := sum(any(ranks) for ranks in adapters):
            rows, inner = rows_and_channels(row.entry)
            total += count * _share(shape, row.entry) * len(row.entry.hf) * (rows + inner)
    return round(rank * total)


def _share(shape: ModelShape, entry: WeightEntry) -> float:
    """Return the share of a weight's copies that a token uses: the routed share for experts, else 1."""
    return shape.moe.topk / shape.moe.num_experts if shape.moe and entry.is_expert else 1.0


def _trained(
    shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: TrainableSpec, computed: ComputeCounts, teacher: ModelShape | None
) -> dict[str, int]:
    """Return the FLOPs of the training ranks' phases for one rollout, with its rows packed as those of this step."""

    def work_of_model(shape: ModelShape, tuning: TrainableSpec) -> FlopCounts:
        return count_flops(
            shape, tuning, computed.tokens, squares=computed.squares, head_positions=computed.scored, lengths=computed.lengths
        )

    work = work_of_model(shape, tuning)
    taught = (
        work_of_model(teacher, TrainableSpec.from_config(config_of_teacher(cfg, teacher, shape), teacher)).forward
        if teacher is not None
        else 0
    )
    rows, sequences = sizes.generation_batch_size, computed.sequences
    period = min(1000, sizes.gradient_accumulation_steps)  # rollouts after which the schedule repeats
    summary = old_logprobs_summary(TrainingSchedule(sizes), period)
    recompute = work.forward if cfg.model.recompute_granularity == "full" else 0
    return {
        "old_logprobs": rows * summary["slices_recomputed"] * work.forward // (summary["slices_total"] * sequences),
        "reference_logprobs": rows * (work.forward - work.adapters + work.reference) // sequences if cfg.grpo.beta > 0 else 0,
        **({"teacher_logprobs": rows * taught // sequences} if teacher is not None else {}),
        "training": sizes.num_iterations * rows * (work.forward + work.backward + recompute) // sequences,
    }


def _flops(
    shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: TrainableSpec, lengths: Lengths | None, trained: dict[str, int]
) -> dict[str, Any]:
    prompt, completion = sequence_tokens(cfg, lengths, longest=False)
    rows, prompts = sizes.generation_batch_size, sizes.num_rollout_prompts
    total = count_flops(shape, tuning, prompt + completion, squares=(prompt + completion) ** 2, head_positions=completion)
    # The sampler's adapters are omitted: a few percent.
    sampled = total.linears + total.attention + total.recurrence
    prompt_alone = count_flops(shape, tuning, prompt, squares=prompt**2, head_positions=1)
    prefill = prompt_alone.linears + prompt_alone.attention + prompt_alone.recurrence
    shares_prompts = cfg.rollout.vllm_enable_prefix_caching and shape.delta_net is None
    phases = {"rollout": (prompts if shares_prompts else rows) * prefill + rows * (sampled - prefill), **trained}
    return {
        "tokens_per_rollout": rows * (prompt + completion),
        "flops_per_rollout": phases,
        "flops_per_rollout_total": sum(phases.values()),
        "backward_forwards": total.backward / total.forward,
        "assumptions": [
            *(
                ["log-probs and training of every completion; a run leaves out those without a gradient, such as groups with equal rewards"]
                if zero_gradient_kinds(list_settings(cfg))
                else []
            ),
            f"every sequence has {prompt} + {completion} tokens ("
            + ("the mean of the file of lengths)" if lengths else "the longest that the settings allow)"),
            "except log-probs and training: packed as in one optimizer step (`sharing`), including alignment in linear layers; the last "
            "token of a sequence is not computed",
            "matrix products only, 2 FLOPs per multiply-add; causal attention at half of the full square; a backward pass costs "
            f"{total.backward / total.forward:.3g} forward passes",
            "per rollout, over all ranks; the output layer at completion positions only",
            f"rollout: prompts are computed once per {'group' if shares_prompts else 'completion'}"
            + " (the sampler has no prefix cache for the gated delta rule)" * (shape.delta_net is not None),
        ],
    }


def _parameters(shape: ModelShape, tuning: TrainableSpec) -> dict[str, int]:
    """Return the parameter counts of the whole model.

    `parameters` excludes adapters. Adapter parameters are counted as PEFT counts them, without padding.
    """
    return {
        "parameters": num_parameters(shape),
        "active_parameters": num_parameters(shape, active_only=True),
        "trainable_parameters": tuning.num_adapter_parameters or _num_trained(shape, tuning, shape.vocab_size),
    }


def _num_trained(shape: ModelShape, tuning: TrainableSpec, rows: int) -> int:
    """Return the number of the model's own parameters that train."""
    total = 0
    for entry in outer_entries(shape):
        if not entry.is_copy and tuning.trains_outer(entry):
            total += rows * shape.hidden_size if entry.cut is ShardSplit.VOCAB else elements(entry)
    return total + sum(elements(row.entry) * sum(row.trains) for row in tuning.rows if not row.entry.is_buffer)


def _bytes(shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: TrainableSpec) -> dict[str, int]:
    """Return the bytes that a weight sync sends and a checkpoint stores, over all ranks.

    `base_push_bytes` is sent once, before the first adapter.
    """
    model_bytes = num_parameters(shape) * tuning.size
    synced = model_bytes - (sum(map(elements, tower_entries(shape))) * tuning.size if keeps_tower(cfg, tuning, shape) else 0)
    adapter = tuning.num_adapter_parameters * tuning.adapter_size if tuning.syncs_adapters else 0
    resends_base = cfg.rollout.sleep_level == 2  # the sampler drops its weights
    return {
        "weight_push_bytes": synced if not adapter else adapter + (model_bytes if resends_base else 0),
        "base_push_bytes": model_bytes if adapter and not resends_base else 0,
        **{f"weight_push_{name}": value for name, value in sync_traffic(shape, sizes, cfg, tuning).items()},
        "checkpoint_bytes": checkpoint_bytes(shape, sizes, cfg, tuning),
    }


def checkpoint_bytes(shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: TrainableSpec) -> int:
    """Return the bytes of a checkpoint's tensors: trained parameters, their float32 optimizer state, and a moving reference.

    Frozen weights are not stored; they are in the model's own files.
    """
    rows, optimizer, size = padded_vocab(shape, sizes, cfg), cfg.optimizer, tuning.size_of_trained
    # The distributed optimizer saves its float32 copy of float32 weights as well.
    state = FP32 * (3 if optimizer.use_distributed_optimizer or size < FP32 else 2)
    if tuning.adapter_size:
        stored = 0
        for row in tuning.rows:
            if count := sum(any(ranks) for ranks in row.adapters):
                channels, inner = rows_and_channels(row.entry)
                stored += count * (len(row.entry.hf) * inner + channels)
        return tuning.rank * stored * (size + state)
    trained = _num_trained(shape, tuning, rows)
    buffers = sum(elements(row.entry) * len(row.trains) for row in tuning.rows if row.entry.is_buffer)
    num_saved = num_parameters(shape) - buffers + (rows - shape.vocab_size) * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    # (elements, trains) of float32 weights in a model of another dtype
    float32 = [(elements(row.entry), sum(row.trains)) for row in tuning.rows if row.entry.is_float32 and not row.entry.is_buffer]
    extra_bytes, trained_more = (
        (FP32 - size) * sum(numbers) for numbers in ((n for n, _ in float32), (n * trains for n, trains in float32))
    )
    model_bytes = num_saved * size + buffers * FP32 + extra_bytes
    follows = cfg.grpo.beta > 0 and cfg.grpo.sync_ref_model
    return (model_bytes if trained == num_saved else trained * size + trained_more) + (model_bytes if follows else 0) + trained * state
