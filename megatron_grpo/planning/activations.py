"""Activations on one rank: what the backward of the micro-batches in flight needs. Estimates that say what they assume."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron_grpo.batching.batch_sizes import SCORED_TOKENS, BatchSizes
from megatron_grpo.config.config import Config
from megatron_grpo.planning.parameters import chunks_of_stage, padded_vocab
from megatron_grpo.planning.tuning import BYTES, Tuning
from megatron_grpo.weights.lora import is_linear
from megatron_grpo.weights.names import Entry, layer_entries
from megatron_grpo.weights.shape import ModelShape

FP32 = 4
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
    for layer in layers:
        for entry in filter(is_linear, layer_entries(shape, moe=shape.is_moe_layer(layer))):
            name = entry.megatron.removesuffix(".weight").removeprefix("self_attention.")
            experts = range(shape.num_experts) if entry.is_expert else (0,)
            adapted = [tuning.adapters is not None and tuning.adapters.is_on(entry, layer, e) for e in experts]
            there[name] += 1
            kept[name] += sum(has or tuning.trains_weight(entry, layer, e) for has, e in zip(adapted, experts, strict=True)) / len(experts)
            if tuning.adapters and any(adapted):
                width, share = tuning.adapters.rank * len(entry.hf), sum(adapted) / len(adapted)
                inner += share * width * (shape.moe.topk if shape.moe and entry.is_expert else 1)
                copies += share * _copies(entry, shape, sizes, width)
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
    numbers = [layer for chunk in chunks_of_stage(shape.num_layers, sizes, cfg, stage) for layer in chunk]
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
