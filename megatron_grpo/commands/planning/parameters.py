"""Parameters of a model as the plan counts them: each tensor of a layer, whether it trains, its adapters, and a rank's share.

Counts are elements, from the table of weights (`weights.names`); the alignment padding in Megatron-Core's buffers is not counted. Does not
import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from megatron_grpo.core.batching.batch_sizes import BatchSizes
from megatron_grpo.core.policy.requirements import BYTES as BYTES_OF_STATE
from megatron_grpo.core.settings import OptimizerConfig
from megatron_grpo.core.weights.lora import LoraSettings, LoraSync, adapter_entries, is_linear, make_lora_settings
from megatron_grpo.core.weights.names import ShardSplit, WeightEntry, layer_entries, outer_entries, tower_entries
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.core.weights.trainable_parameters import trains
from megatron_grpo.run.adapters import lora_sync
from megatron_grpo.run.config.rules.stages import layer_counts
from megatron_grpo.run.config.settings import Config

BYTES = {"float32": 4, "bfloat16": 2}
FP32 = 4

# ---- the whole model ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRow:
    """One row of the table of weights in one layer.

    Args:
        entry: Row of the table of weights.
        layer: Number of the layer.
        trains: Whether the weight trains; one item per expert, or a single item outside experts.
        adapters: Per expert, the adapter ranks of the modules that a fused linear joins, without padding; empty without an adapter.
        reference: The same for the frozen adapters of the reference.
    """

    entry: WeightEntry
    layer: int
    trains: Sequence[bool]
    adapters: Sequence[Sequence[int]]
    reference: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainableSpec:
    """Trainable parameters of a run, and the adapters that it needs.

    Args:
        trains: Returns whether a weight of the model trains, by Hugging Face name.
        layers: Rows of the weights of each layer.
        size: Bytes per element of the model's own weights.
        adapter_size: Bytes per element of adapters; 0 if none train.
        has_second_model: Whether the reference is a separate model.
        adapter_sync: How adapters reach the sampler; None without adapters.
    """

    trains: Callable[[str], bool]
    layers: Sequence[Sequence[WeightRow]]
    size: int
    adapter_size: int = 0
    has_second_model: bool = False
    adapter_sync: LoraSync | None = None

    @classmethod
    def from_config(cls, cfg: Config, shape: ModelShape) -> TrainableSpec:
        """Derive what a run trains from its settings.

        Raises:
            ConfigError: If an adapter that the settings name cannot be read, or cannot be sent to the sampler as requested.
        """
        tuner, has_kl = cfg.tuner, cfg.grpo.beta > 0
        rule, lora, reference = cache(trains(tuner)), make_lora_settings(tuner, shape), None
        if lora is not None and has_kl and not cfg.grpo.ref_model:
            if tuner.ref_adapters:
                reference = LoraSettings.from_peft(tuner.ref_adapters, flag="ref_adapters")
            elif tuner.adapters:
                reference = lora  # as the run began
        return cls(
            trains=rule,
            layers=_layers(shape, rule, lora, reference),
            size=BYTES[cfg.model.torch_dtype],
            adapter_size=BYTES[tuner.lora_dtype or cfg.model.torch_dtype] if lora is not None else 0,
            has_second_model=has_kl and (lora is None or cfg.grpo.ref_model is not None),
            adapter_sync=lora_sync(cfg, shape, on_gpu=None) if lora is not None else None,
        )

    @property
    def rows(self) -> Iterator[WeightRow]:
        """Rows of the weights of all layers."""
        return (row for layer in self.layers for row in layer)

    @property
    def rank(self) -> int:
        """Rank of all adapters in memory, where narrower ones are padded to the widest."""
        return max((rank for row in self.rows for ranks in row.adapters for rank in ranks), default=0)

    @property
    def reference_rank(self) -> int:
        """Rank of the reference's adapters in memory, padded to the widest."""
        return max((rank for row in self.rows for ranks in row.reference for rank in ranks), default=0)

    @property
    def num_adapter_parameters(self) -> int:
        """Adapter parameters of the whole model without padding, as PEFT counts them and as a weight sync sends them."""
        pairs = ((rank, size) for row in self.rows for ranks in row.adapters for rank, (_, size) in zip(ranks, row.entry.hf))
        return sum(rank * sum(size) for rank, size in pairs)

    @property
    def syncs_adapters(self) -> bool:
        """Whether a weight sync sends adapters alone. If not, adapters are merged into the weights."""
        return self.adapter_sync is not None and self.adapter_sync.kind == "adapter"

    @property
    def size_of_trained(self) -> int:
        """Bytes per element of the trained parameters."""
        return self.adapter_size or self.size

    def trains_outer(self, entry: WeightEntry) -> bool:
        """Return whether a weight outside the layers trains."""
        return self.trains(entry.hf[0][0])


def _layers(
    shape: ModelShape, rule: Callable[[str], bool], adapters: LoraSettings | None, reference: LoraSettings | None
) -> list[list[WeightRow]]:
    def row(entry: WeightEntry, layer: int) -> WeightRow:
        experts = range(shape.num_experts) if entry.is_expert else (0,)
        names = [[f"{shape.text_prefix}layers.{layer}.{name.format(e=expert)}" for name, _ in entry.hf] for expert in experts]

        def ranks(settings: LoraSettings | None) -> Sequence[Sequence[int]]:
            if settings is None or not is_linear(entry):
                return [()] * len(names)
            return [[settings.find_lora_rank(name.removesuffix(".weight")) for name in modules] for modules in names]

        trained = [rule(modules[0]) for modules in names]
        return WeightRow(entry=entry, layer=layer, trains=trained, adapters=ranks(adapters), reference=ranks(reference))

    numbers = range(shape.num_layers)
    return [[row(entry, layer) for entry in layer_entries(shape, shape.find_layer_kind(layer))] for layer in numbers]


# ---- one rank ----------------------------------------------------------------------------------------------------------------------------


def padded_vocab(shape: ModelShape, sizes: BatchSizes, cfg: Config) -> int:
    """Return the number of embedding rows over all TP ranks, padding included."""
    multiple = cfg.model.padded_vocab_multiple * sizes.layout.tp
    return -(-shape.vocab_size // multiple) * multiple


def layers_of_stage(num_layers: int, cfg: Config, stage: int) -> list[int]:
    """Return the numbers of the layers of a pipeline stage, over all its chunks."""
    begin, layers = 0, list[int]()
    for counts in layer_counts(cfg.parallel, num_layers):
        for stage_index, count in enumerate(counts):
            if stage_index == stage:
                layers += range(begin, begin + count)
            begin += count
    return layers


def elements(entry: WeightEntry) -> int:
    """Return the number of elements of the whole parameter."""
    return sum(math.prod(size) for _, size in entry.hf)


def count_elements(entry: WeightEntry, sizes: BatchSizes) -> int:
    """Return the number of elements of a rank's shard of a weight inside a layer."""
    ranks = 1 if entry.cut is ShardSplit.REPLICATED else sizes.layout.etp if entry.is_expert else sizes.layout.tp
    return elements(entry) // ranks


def rows_and_channels(entry: WeightEntry) -> tuple[int, int]:
    """Return (rows of all modules that a fused Megatron linear joins, input channels that they all read)."""
    return sum(size[0] for _, size in entry.hf), entry.hf[0][1][1]


@dataclass(slots=True)
class ParameterCounts:
    """Elements on one rank.

    Args:
        weights: Elements of the model's own weights.
        adapters: Elements of trained adapters.
        reference: Elements of the reference's frozen adapters.
        helpers: Elements that map the rows of a fused linear to its modules, for adapters.
        trained: Trained elements outside experts.
        trained_experts: Trained elements of experts.
        float32: Elements of the model's own weights that are float32, whatever its dtype is.
        trained_float32: The trained ones among them.
    """

    weights: int = 0
    adapters: int = 0
    reference: int = 0
    helpers: int = 0
    trained: int = 0
    trained_experts: int = 0
    float32: int = 0
    trained_float32: int = 0

    def weights_bytes(self, size: int) -> int:
        """Return the bytes of the model's own weights.

        Args:
            size: Bytes per element in the model's dtype.
        """
        return self.weights * size + self.float32 * (FP32 - size)

    def add(self, row: WeightRow, sizes: BatchSizes, ep_rank: int, *, rank: int, reference_rank: int) -> None:
        """Add a rank's share of one row of weights."""
        entry, numel = row.entry, count_elements(row.entry, sizes)
        count = len(row.trains) // sizes.layout.ep if entry.is_expert else 1
        local = slice(ep_rank * count, (ep_rank + 1) * count) if entry.is_expert else slice(1)
        adapted, referred = ([any(ranks) for ranks in flags[local]] for flags in (row.adapters, row.reference))
        num_adapter = sum(adapted) * _pair(entry, rank, sizes) if any(adapted) else 0
        self.weights += numel * count
        self.float32 += numel * entry.is_float32
        self.trained_float32 += numel * (entry.is_float32 and row.trains[0])
        self.adapters += num_adapter
        self.reference += sum(referred) * _pair(entry, reference_rank, sizes) if any(referred) else 0
        if len(entry.hf) > 1:  # a fused linear is cut by rows
            num_either = sum(a or b for a, b in zip(adapted, referred, strict=True))
            self.helpers += num_either * len(entry.hf) * (numel // entry.hf[0][1][-1])
        trained = sum(row.trains[local]) * numel + num_adapter
        if entry.is_expert:
            self.trained_experts += trained
        else:
            self.trained += trained


def _pair(linear: WeightEntry, rank: int, sizes: BatchSizes) -> int:
    """Elements of both matrices of an adapter on a rank."""
    return sum(count_elements(entry, sizes) for entry in adapter_entries(linear, rank))


def count_parameters(
    shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: TrainableSpec, stage: int, ep_rank: int = 0
) -> ParameterCounts:
    """Count the elements on a rank of a pipeline stage."""
    counts = ParameterCounts()
    for entry, numel in _outside_layers(shape, sizes, cfg, stage):
        counts.weights += numel
        counts.trained += numel * tuning.trains_outer(entry)
    rank, reference_rank = tuning.rank, tuning.reference_rank
    for layer in layers_of_stage(shape.num_layers, cfg, stage):
        for row in tuning.layers[layer]:
            if not row.entry.is_buffer:
                counts.add(row, sizes, ep_rank, rank=rank, reference_rank=reference_rank)
    return counts


def _outside_layers(shape: ModelShape, sizes: BatchSizes, cfg: Config, stage: int) -> Iterator[tuple[WeightEntry, int]]:
    """Yield (weight, elements on a rank) outside the layers of a stage.

    The first stage has the embedding and the vision tower; the last stage has the final norm and the output layer.
    """
    outer = {entry.megatron: entry for entry in outer_entries(shape)}
    vocabulary = padded_vocab(shape, sizes, cfg) * shape.hidden_size // sizes.layout.tp
    if stage == 0:
        yield outer["embedding.word_embeddings.weight"], vocabulary
        yield from ((entry, count_elements(entry, sizes)) for entry in tower_entries(shape))
    if stage == sizes.layout.pp - 1:
        norm = outer["decoder.final_layernorm.weight"]
        yield norm, count_elements(norm, sizes)
        if not shape.tied_embeddings or sizes.layout.pp > 1:
            yield outer["output_layer.weight"], vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticMemory:
    """Memory that a rank holds for the whole run, in bytes.

    Args:
        num_parameters: Parameters of the model and of its adapters in memory (padded to the widest rank).
        num_trainable_parameters: Parameters that train.
        weights_bytes: Model weights.
        adapters_bytes: Adapters, without their scales (a few numbers per linear).
        gradients_bytes: Gradients, one per trainable parameter, float32 unless `main_grads_dtype` is set.
        optimizer_bytes: A rank's share of both Adam moments, and of the main weights of bfloat16 weights, in the dtypes of the settings.
        reference_bytes: Reference, if `beta` requires one: a frozen model, or with adapters nothing or a second set of adapters.
    """

    num_parameters: int
    num_trainable_parameters: int
    weights_bytes: int
    adapters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    reference_bytes: int

    def total(self) -> int:
        """Return the bytes of all parts."""
        return self.weights_bytes + self.adapters_bytes + self.gradients_bytes + self.optimizer_bytes + self.reference_bytes


def static_memory(shape: ModelShape, sizes: BatchSizes, cfg: Config, tuning: TrainableSpec, stage: int, ep_rank: int = 0) -> StaticMemory:
    """Return the bytes of weights, gradients and optimizer state of a rank, for the elements that `count_parameters` counts."""
    counts, size, layout = count_parameters(shape, sizes, cfg, tuning, stage, ep_rank), tuning.size_of_trained, sizes.layout
    trained = owned = counts.trained + counts.trained_experts
    owned_float32 = counts.trained_float32
    if cfg.optimizer.use_distributed_optimizer:
        owned_float32 = -(-owned_float32 // (sizes.dp_size * layout.cp))
        owned = -(-counts.trained // (sizes.dp_size * layout.cp)) + -(-counts.trained_experts // layout.expert_dp_size)
    share_on_gpu = 1 - cfg.optimizer.optimizer_offload_fraction if cfg.optimizer.optimizer_cpu_offload else 1
    optimizer_state_bytes, gradient_bytes = state_bytes(cfg.optimizer, size), BYTES_OF_STATE[cfg.optimizer.main_grads_dtype]
    main_weight_bytes = optimizer_state_bytes - state_bytes(cfg.optimizer, FP32)  # which float32 weights do not have
    return StaticMemory(
        num_parameters=counts.weights + counts.adapters,
        num_trainable_parameters=trained,
        weights_bytes=counts.weights_bytes(tuning.size),
        adapters_bytes=counts.adapters * size + counts.helpers * tuning.size,
        gradients_bytes=trained * gradient_bytes + counts.trained_float32 * (FP32 - gradient_bytes),
        optimizer_bytes=round((owned * optimizer_state_bytes - owned_float32 * main_weight_bytes) * share_on_gpu),
        reference_bytes=counts.weights_bytes(tuning.size) if tuning.has_second_model else counts.reference * size,
    )


def state_bytes(optimizer: OptimizerConfig, size: int) -> int:
    """Return the optimizer bytes per trained weight: both moments, and the main weight unless the weight is float32.

    Args:
        size: Bytes per element of the trained weight.
    """
    main = BYTES_OF_STATE[optimizer.main_params_dtype] if size < FP32 else 0
    return BYTES_OF_STATE[optimizer.exp_avg_dtype] + BYTES_OF_STATE[optimizer.exp_avg_sq_dtype] + main
