"""Activations on one rank: what the backward of the micro-batches in flight needs, and what a vision tower adds on the first stage.

Estimates that say what they assume.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_grpo.batching.batch_sizes import SCORED_TOKENS, BatchSizes
from megatron_grpo.config.config import Config
from megatron_grpo.planning.parameters import BYTES, FP32, Tuning, layers_of_stage, padded_vocab
from megatron_grpo.weights.lora import is_linear
from megatron_grpo.weights.names import Entry, tower_entries
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.sizes import VisionShape

PER_PATCH = 34  # channels a patch and layer, in widths of the tower: what its backward needs (attention without scores, two norms, an MLP)
READ_ATTENTION_INPUT = ("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj")  # all read the same normed tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What linear layers keep for the backward in some of the model's layers, on average over them.

    inputs: share of the layers in which a linear, by its Megatron name, keeps its input: its weight trains, or it has an adapter. One with
    a frozen weight alone keeps none, for only the gradient of its weight needs it.
    inner: channels a token between the two matrices of adapters. copies: elements a micro-batch, of B of fused linears, which is kept with
    a column for each module's A.
    """

    inputs: Mapping[str, float]
    inner: float = 0.0
    copies: float = 0.0

    def input_of(self, *linears: str) -> float:
        return max((self.inputs.get(linear, 0.0) for linear in linears), default=0.0)


def kept_by_linears(shape: ModelShape, sizes: BatchSizes, tuning: Tuning, layers: Sequence[int]) -> Kept:
    """Over these layers, the experts of all ranks taken together."""
    kept: dict[str, float] = defaultdict(float)
    there: dict[str, int] = defaultdict(int)
    inner = copies = 0.0
    rank = tuning.rank
    for row in (row for layer in layers for row in tuning.layers[layer] if is_linear(row.entry)):
        name = row.entry.megatron.removesuffix(".weight").removeprefix("self_attention.")
        adapted = [any(ranks) for ranks in row.adapters] or [False] * len(row.trains)
        there[name] += 1
        kept[name] += sum(has or trains for has, trains in zip(adapted, row.trains, strict=True)) / len(adapted)
        if any(adapted):
            width, share = rank * len(row.entry.hf), sum(adapted) / len(adapted)
            inner += share * width * (shape.moe.topk if shape.moe and row.entry.is_expert else 1)
            copies += share * _copies(row.entry, shape, sizes, width)
    count = max(1, len(layers))
    return Kept(inputs={name: kept[name] / there[name] for name in there}, inner=inner / count, copies=copies / count)


def _copies(entry: Entry, shape: ModelShape, sizes: BatchSizes, width: int) -> float:
    if len(entry.hf) == 1:
        return 0.0
    rows = sum(size[0] for _, size in entry.hf)
    here = shape.num_experts // sizes.layout.ep / sizes.layout.etp if entry.is_expert else 1 / sizes.layout.tp
    return rows * width * here


def layer_bytes(
    shape: ModelShape, sizes: BatchSizes, cfg: Config, kept: Kept, tokens: int, *, without: tuple[str, ...] = (), adapter_size: int = 0
) -> float:
    """What the backward of one layer needs of so many tokens: inputs of its matrix products, norms and attention (flash: no scores).

    without: parts that selective recompute drops ("mlp", "moe", "layernorm"). adapter_size: bytes of an element of adapters.
    """
    hidden = shape.hidden_size / (sizes.layout.tp if cfg.parallel.sequence_parallel else 1)
    query, key = shape.query_size / sizes.layout.tp, shape.key_size / sizes.layout.tp
    drops_mlp = "mlp" in without or "moe" in without
    # A router keeps what it reads, whether it trains or not; so does what is recomputed.
    mlp_input = 1 if shape.moe or drops_mlp else kept.input_of("mlp.linear_fc1")
    normed = 0 if "layernorm" in without else hidden * (kept.input_of(*READ_ATTENTION_INPUT) + mlp_input)
    # Flash attention keeps its output itself, which is what linear_proj reads.
    attention = 2 * query + 2 * key + (query + key) * (shape.qk_norm + shape.qk_norm_is_whole)
    norms = hidden * (2 * shape.pre_norm + 2 * shape.post_norm) * (FP32 / BYTES[cfg.model.torch_dtype] if shape.norms_from_one else 1)
    channels = norms + normed + attention + (0 if drops_mlp else _mlp_channels(shape, sizes, kept))
    return tokens * channels * BYTES[cfg.model.torch_dtype] + adapter_size * (kept.inner * tokens + kept.copies)


def _mlp_channels(shape: ModelShape, sizes: BatchSizes, kept: Kept) -> float:
    """Three of the gated activation, and what linear_fc2 reads."""
    if not shape.moe:
        return (3 + kept.input_of("mlp.linear_fc2")) * shape.ffn_hidden_size / sizes.layout.tp
    experts = "mlp.experts.local_experts.{e}."
    dispatched = (1 + kept.input_of(f"{experts}linear_fc1")) * shape.hidden_size
    width = (3 + kept.input_of(f"{experts}linear_fc2")) * shape.moe.ffn_hidden_size / sizes.layout.etp
    shared = (3 + kept.input_of("mlp.shared_experts.linear_fc2")) * (shape.moe.shared_ffn_hidden_size or 0) / sizes.layout.tp
    return shape.moe.topk * (dispatched + width) + shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes. forward: of one layer alone, while nothing is kept for a backward, in the larger micro-batches of such a pass."""

    training: int
    forward: int


def activations_of(shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: Tuning, stage: int) -> Callable[[int], Activations]:
    """Of the micro-batches that a stage has in flight (1F1B, or interleaved), by the tokens of one on this rank."""
    numbers = layers_of_stage(shape.num_layers, cfg, stage)
    kept = kept_by_linears(shape, sizes, tuning, numbers)
    return lambda tokens: _activations(shape, sizes, cfg, tuning, stage, kept, len(numbers), tokens)


def _activations(
    shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: Tuning, stage: int, kept: Kept, layers: int, tokens: int
) -> Activations:
    model = cfg.model
    dropped = tuple(model.recompute_modules) if model.recompute_granularity == "selective" else ()

    def of_layer(without: tuple[str, ...], tokens: int = tokens) -> float:
        return layer_bytes(shape, sizes, cfg, kept, tokens, without=without, adapter_size=tuning.size_of_trained)

    full, scored = of_layer(()), of_layer((), max(tokens, SCORED_TOKENS // sizes.layout.cp))
    if model.recompute_granularity == "full":
        unit = model.recompute_num_layers or 1
        begin = tokens * tuning.size * shape.hidden_size / (sizes.layout.tp if cfg.parallel.sequence_parallel else 1)
        recomputed = min(unit, layers) if model.recompute_method == "block" else layers
        saved = -(-recomputed // (1 if model.recompute_method == "block" else unit))
        stored = saved * begin + (layers - recomputed) * full
        working = full * (1 if model.recompute_method == "block" else min(unit, layers))
    else:
        stored, working = layers * of_layer(dropped), full - of_layer(dropped)
    a, chunks = sizes.gradient_accumulation_steps, sizes.layout.num_chunks
    if chunks == 1:
        in_flight: float = min(a, sizes.layout.pp - stage)
    else:
        group = min(cfg.parallel.microbatch_group_size_per_vp_stage or sizes.layout.pp, a)
        in_flight = min(a * chunks, 2 * (sizes.layout.pp - stage - 1) + (chunks - 1) * group + 1) / chunks
    return Activations(training=round(stored * in_flight + working), forward=round(scored))


def logits_bytes(shape: ModelShape, sizes: BatchSizes, cfg: Config, completion: int) -> int:
    """Logits and their gradient exist for one chunk of completion positions at a time, in float32, cut over TP."""
    positions = min(cfg.model.logprob_chunk_size, sizes.micro_batch_size * completion)
    rows = padded_vocab(shape, sizes, cfg) // sizes.layout.tp
    head = 2 * rows * shape.hidden_size * FP32 if cfg.model.cast_lm_head_to_fp32 and cfg.model.torch_dtype != "float32" else 0
    return 2 * positions * rows * FP32 + head  # a copy of the head, and its gradient


# ---- a vision tower ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerPlan:
    """Bytes on a rank of the first stage."""

    patches: int  # of one micro-batch
    activations: Activations
    trains: bool


def tower_plan(shape: ModelShape, cfg: Config, tuning: Tuning, picture_tokens: int) -> TowerPlan | None:
    """None for a model that does not see. picture_tokens: of one micro-batch."""
    vision = shape.vision
    if vision is None:
        return None
    trains = any(map(tuning.trains_outer, tower_entries(shape)))
    patches = picture_tokens * vision.merge**2
    layer = patches * vision.width * tuning.size * PER_PATCH
    return TowerPlan(
        patches=patches,
        trains=trains,
        activations=Activations(training=_kept_by_tower(vision, cfg, tuning, patches, layer, trains), forward=layer),
    )


def _kept_by_tower(vision: VisionShape, cfg: Config, tuning: Tuning, patches: int, layer: int, trains: bool) -> int:
    """A frozen tower works layer by layer. A trained one keeps what each layer reads, and one layer while it is computed again; or all."""
    if not trains:
        return layer
    if not cfg.model.vit_gradient_checkpointing:
        return vision.depth * layer
    return vision.depth * patches * vision.width * tuning.size + layer


def with_tower(found: Activations, tower: Activations, in_flight: int) -> Activations:
    """in_flight: micro-batches of which the first stage keeps what the backward needs."""
    return Activations(training=found.training + tower.training * in_flight, forward=found.forward + tower.forward)


def fewer_layers(shape: ModelShape, sizes: BatchSizes, cfg: Config, rows: Sequence[Mapping[str, Any]], tower_bytes: int) -> dict[str, Any]:
    """By how many layers a tower of so many bytes outweighs the first stage. rows: of each stage, what it holds.

    Stages hold alike where the first has `layers` fewer than the others; `first` is the nearest `decoder_first_pipeline_num_layers` that
    comes out even, None where there is no other stage, or no layer to give away.
    """
    own = rows[0]
    of_layers = sum(own[name] for name in ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes")) - tower_bytes
    layers = tower_bytes / max(of_layers / max(own["num_layers"], 1), 1)
    pp, chunks = sizes.layout.pp, sizes.layout.num_chunks
    least = (shape.vision.num_deepstack if shape.vision else 0) or 1
    legal = [
        first
        for first in range(least * chunks, shape.num_layers)
        if first % chunks == 0 and pp > 1 and (shape.num_layers - first) % ((pp - 1) * chunks) == 0 and first < shape.num_layers
    ]
    even = (shape.num_layers - layers * (pp - 1)) / pp  # where first + layers is what each of the others holds
    return {"layers": round(layers, 1), "first": min(legal, key=lambda first: abs(first - even), default=None)}
