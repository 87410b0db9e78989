"""Estimate the activations of one rank: what the backward of the micro-batches in flight needs, and the vision tower on the first stage.

The estimates state their assumptions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_grpo.commands.planning.parameters import (
    BYTES,
    FP32,
    TrainableSpec,
    elements,
    layers_of_stage,
    padded_vocab,
    rows_and_channels,
)
from megatron_grpo.core.batching.batch_sizes import SCORED_TOKENS, BatchSizes
from megatron_grpo.core.weights.lora import is_linear
from megatron_grpo.core.weights.names import WeightEntry, tower_entries
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.core.weights.sizes import CHUNK, DeltaNetShape
from megatron_grpo.run.config.settings import Config

PER_PATCH = 34  # channels per patch and layer that the backward needs, in tower widths (attention without scores, two norms, an MLP)
READ_ATTENTION_INPUT = (
    "linear_qkv",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_kv_down_proj",
    "in_proj",
)  # all read the same normed tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredActivations:
    """Activations that linear layers store for the backward, averaged over some of the model's layers.

    A linear stores its input if its weight trains or it has an adapter. A linear with only a frozen weight stores none, because only the
    gradient of the weight needs it.

    Args:
        inputs: Share of the layers in which a linear stores its input, by Megatron name.
        inner: Channels per token between the two matrices of adapters.
        delta_nets: Share of the layers that have the gated delta rule instead of attention.
        copies: Elements per micro-batch of the B matrices of fused linears, which are stored with a column for each module's A.
    """

    inputs: Mapping[str, float]
    inner: float = 0.0
    copies: float = 0.0
    delta_nets: float = 0.0

    def find_input_share(self, *linears: str) -> float:
        """Return the largest share of layers in which one of these linears stores its input."""
        return max((self.inputs.get(linear, 0.0) for linear in linears), default=0.0)


def stored_by_linears(shape: ModelShape, sizes: BatchSizes, tuning: TrainableSpec, layers: Sequence[int]) -> StoredActivations:
    """Average what linear layers store over the given layers, over the experts of all ranks together."""
    stored: dict[str, float] = defaultdict(float)
    num_linears: dict[str, int] = defaultdict(int)
    inner = copies = 0.0
    rank = tuning.rank
    for row in (row for layer in layers for row in tuning.layers[layer] if is_linear(row.entry)):
        name = row.entry.megatron.removesuffix(".weight").removeprefix("self_attention.")
        adapted = [any(ranks) for ranks in row.adapters]
        num_linears[name] += 1
        stored[name] += sum(has or trains for has, trains in zip(adapted, row.trains, strict=True)) / len(adapted)
        if any(adapted):
            width, share = rank * len(row.entry.hf), sum(adapted) / len(adapted)
            inner += share * width * (shape.moe.topk if shape.moe and row.entry.is_expert else 1)
            copies += share * _copies(row.entry, shape, sizes, width)
    count = max(1, len(layers))
    return StoredActivations(
        inputs={name: stored[name] / num_linears[name] for name in num_linears}, inner=inner / count, copies=copies / count,
        delta_nets=sum(map(shape.is_delta_net_layer, layers)) / count,
    )  # fmt: skip


def _copies(entry: WeightEntry, shape: ModelShape, sizes: BatchSizes, width: int) -> float:
    if len(entry.hf) == 1:
        return 0.0
    local_experts = shape.num_experts // sizes.layout.ep / sizes.layout.etp if entry.is_expert else 1 / sizes.layout.tp
    return rows_and_channels(entry)[0] * width * local_experts


def layer_bytes(
    shape: ModelShape,
    sizes: BatchSizes,
    cfg: Config,
    stored: StoredActivations,
    tokens: int,
    *,
    recomputed_parts: tuple[str, ...] = (),
    adapter_size: int = 0,
) -> float:
    """Return the bytes that the backward of one layer needs: inputs of matrix products, norms and attention (flash attention: no scores).

    Args:
        tokens: Tokens of the micro-batch on the rank.
        adapter_size: Bytes per element of adapters.
    """
    hidden = shape.hidden_size / (sizes.layout.tp if cfg.parallel.sequence_parallel else 1)
    drops_mlp = "mlp" in recomputed_parts or "moe" in recomputed_parts
    # A router stores its input whether it trains or not; so does a recomputed part.
    mlp_input = 1 if shape.moe or drops_mlp else stored.find_input_share("mlp.linear_fc1")
    normed = 0 if "layernorm" in recomputed_parts else hidden * (stored.find_input_share(*READ_ATTENTION_INPUT) + mlp_input)
    norms = (
        hidden * (2 * shape.pre_norm + 2 * shape.post_norm) * (FP32 / BYTES[cfg.model.torch_dtype] if shape.has_zero_centered_norms else 1)
    )
    channels = norms + normed + _mixer_channels(shape, sizes, cfg, stored) + (0 if drops_mlp else _mlp_channels(shape, sizes, stored))
    return tokens * channels * BYTES[cfg.model.torch_dtype] + adapter_size * (stored.inner * tokens + stored.copies)


def _mixer_channels(shape: ModelShape, sizes: BatchSizes, cfg: Config, stored: StoredActivations) -> float:
    """Return stored channels per token of attention, or of the gated delta rule, on average."""
    query, key = shape.query_size / sizes.layout.tp, shape.key_size / sizes.layout.tp
    # Flash attention stores its own output, which is the input of linear_proj; a gate stores itself in float32 and the gated output.
    attention = 2 * query + 2 * key + (query + key) * (shape.qk_norm + shape.qk_norm_is_whole)
    attention += query * (1 + FP32 / BYTES[cfg.model.torch_dtype]) * shape.attention_output_gate
    if shape.delta_net is None:
        return attention
    rows, values = sum(shape.delta_net.sections) / sizes.layout.tp, shape.delta_net.sections[2] / sizes.layout.tp
    return (1 - stored.delta_nets) * attention + stored.delta_nets * (rows + values * stored.find_input_share("out_proj"))


def recurrence_bytes(delta: DeltaNetShape, sizes: BatchSizes, tokens: int) -> float:
    """Return the bytes that the gated delta rule stores while the backward of one layer runs; float32, measured on a CPU.

    Args:
        tokens: Tokens of the micro-batch on the rank.
    """
    k, v = delta.key_head_dim, delta.value_head_dim
    head_flops = 7.4 * k + 11.1 * v + 7.8 * CHUNK + 3.4 * k * v / CHUNK + 29
    return FP32 * tokens * (delta.num_value_heads * head_flops + 14 * delta.num_key_heads * k) / sizes.layout.tp


def _mlp_channels(shape: ModelShape, sizes: BatchSizes, stored: StoredActivations) -> float:
    """Return stored channels per token: three of the gated activation, and the input of linear_fc2."""
    if not shape.moe:
        return (3 + stored.find_input_share("mlp.linear_fc2")) * shape.ffn_hidden_size / sizes.layout.tp
    experts = "mlp.experts.local_experts.{e}."
    dispatched = (1 + stored.find_input_share(f"{experts}linear_fc1")) * shape.hidden_size
    width = (3 + stored.find_input_share(f"{experts}linear_fc2")) * shape.moe.ffn_hidden_size / sizes.layout.etp
    shared = (3 + stored.find_input_share("mlp.shared_experts.linear_fc2")) * (shape.moe.shared_ffn_hidden_size or 0) / sizes.layout.tp
    return shape.moe.topk * (dispatched + width) + shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Activation bytes on one rank.

    Args:
        training: Bytes for the backward of the micro-batches in flight.
        forward: Bytes of one layer in a forward-only pass, which stores nothing for a backward and has larger micro-batches.
    """

    training: int
    forward: int

    def __add__(self, other: Activations) -> Activations:
        return Activations(training=self.training + other.training, forward=self.forward + other.forward)


def make_activation_estimate(
    shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: TrainableSpec, stage: int
) -> Callable[[int], Activations]:
    """Return a function from the tokens of a micro-batch on a rank to the activations of a pipeline stage.

    It counts the micro-batches that the stage has in flight (1F1B or interleaved schedule).
    """
    numbers, model, layout = layers_of_stage(shape.num_layers, cfg, stage), cfg.model, sizes.layout
    stored_inputs, layers = stored_by_linears(shape, sizes, tuning, numbers), len(numbers)
    dropped = tuple(model.recompute_modules) if model.recompute_granularity == "selective" else ()
    in_flight = _in_flight(sizes, cfg, stage)

    def estimate_layer(recomputed_parts: tuple[str, ...], tokens: int) -> float:
        return layer_bytes(shape, sizes, cfg, stored_inputs, tokens, recomputed_parts=recomputed_parts, adapter_size=tuning.size_of_trained)

    def activations(tokens: int) -> Activations:
        full, scored = estimate_layer((), tokens), estimate_layer((), max(tokens, SCORED_TOKENS // layout.cp))
        if model.recompute_granularity == "full":
            is_block, unit = model.recompute_method == "block", model.recompute_num_layers or 1
            begin = tokens * tuning.size * shape.hidden_size / (layout.tp if cfg.parallel.sequence_parallel else 1)
            recomputed = min(unit, layers) if is_block else layers
            stored = -(-recomputed // (1 if is_block else unit)) * begin + (layers - recomputed) * full
            working = full * (1 if is_block else min(unit, layers))
        else:
            stored, working = layers * estimate_layer(dropped, tokens), full - estimate_layer(dropped, tokens)
        passing = recurrence_bytes(shape.delta_net, sizes, tokens) if shape.delta_net and stored_inputs.delta_nets else 0
        return Activations(training=round(stored * in_flight + working + passing), forward=round(scored + passing))

    return activations


def _in_flight(sizes: BatchSizes, cfg: Config, stage: int) -> float:
    """Return the number of micro-batches whose activations a stage stores, measured in the layers of all its chunks."""
    a, pp, chunks = sizes.gradient_accumulation_steps, sizes.layout.pp, sizes.layout.num_chunks
    if chunks == 1:
        return min(a, pp - stage)
    group = min(cfg.parallel.microbatch_group_size_per_vp_stage or pp, a)
    return min(a * chunks, 2 * (pp - stage - 1) + (chunks - 1) * group + 1) / chunks


def logits_bytes(shape: ModelShape, sizes: BatchSizes, cfg: Config, completion: int) -> int:
    """Return the bytes of logits and their gradient: float32, sharded over TP, for one chunk of completion positions at a time.

    With a float32 head (`cast_lm_head_to_fp32`), the head's copy and its gradient are added.
    """
    positions = min(cfg.model.logprob_chunk_size, sizes.micro_batch_size * completion)
    rows = padded_vocab(shape, sizes, cfg) // sizes.layout.tp
    head = 2 * rows * shape.hidden_size * FP32 if cfg.model.cast_lm_head_to_fp32 and cfg.model.torch_dtype != "float32" else 0
    return 2 * positions * rows * FP32 + head  # a copy of the head, and its gradient


# ---- a vision tower ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerCost:
    """The vision tower, which is unsharded on each rank of the first stage.

    Args:
        parameters: Parameters of the tower.
        trainable_parameters: Parameters of the tower that train.
        patches: Image patches of one micro-batch.
        activations: Activation bytes; `training` counts all micro-batches that the stage has in flight.
    """

    parameters: int
    trainable_parameters: int
    patches: int
    activations: Activations


def estimate_tower(shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: TrainableSpec, image_tokens: int) -> TowerCost | None:
    """Return the cost of the vision tower; None for a text model.

    Args:
        image_tokens: Image tokens of one micro-batch.
    """
    vision = shape.vision
    if vision is None:
        return None
    numels = [(elements(entry), tuning.trains_outer(entry)) for entry in tower_entries(shape)]
    trained, patches = sum(numel for numel, trains in numels if trains), image_tokens * vision.merge**2
    begin = patches * vision.width * tuning.size  # input of a layer
    stored = layer = begin * PER_PATCH  # a frozen tower stores one layer at a time
    if trained:  # the inputs of all layers and one layer during recompute, or all layers
        stored = vision.depth * begin + layer if cfg.model.vit_gradient_checkpointing else vision.depth * layer
        stored *= min(sizes.gradient_accumulation_steps, sizes.layout.pp)
    activations = Activations(training=stored, forward=layer)
    return TowerCost(parameters=sum(numel for numel, _ in numels), trainable_parameters=trained, patches=patches, activations=activations)


def fewer_layers(shape: ModelShape, sizes: BatchSizes, rows: Sequence[Mapping[str, Any]], tower_bytes: int) -> dict[str, Any]:
    """Return how many layers a vision tower outweighs on the first stage, and the best legal size of that stage.

    Args:
        rows: Parameters that each stage holds, as in `memory.stages`.
        tower_bytes: Bytes of the tower, activations included.

    Returns:
        {"layers", "first"}. Stages are balanced if the first one has `layers` fewer than the others. `first` is the nearest legal
        `decoder_first_pipeline_num_layers`; None with a single stage or if no split is legal.
    """
    first_stage = rows[0]
    stored_layer_bytes = (
        sum(first_stage[name] for name in ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes")) - tower_bytes
    )
    layers = tower_bytes / max(stored_layer_bytes / max(first_stage["num_layers"], 1), 1)
    pp, chunks = sizes.layout.pp, sizes.layout.num_chunks
    least = (shape.vision.num_deepstack if shape.vision else 0) or 1
    legal = [
        first
        for first in range(least * chunks, shape.num_layers)
        if first % chunks == 0 and pp > 1 and (shape.num_layers - first) % ((pp - 1) * chunks) == 0
    ]
    balanced = (shape.num_layers - layers * (pp - 1)) / pp  # balanced: first + layers equals the size of each other stage
    return {"layers": round(layers, 1), "first": min(legal, key=lambda first: abs(first - balanced), default=None)}
