"""What of a model trains, as the plan counts it: which of its own weights, and which adapters stand beside its linear layers. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from megatron_grpo.config.config import Config
from megatron_grpo.rollout.adapters import LoraPush, lora_push
from megatron_grpo.weights.lora import LoraSettings, is_linear, lora_of
from megatron_grpo.weights.names import Entry, layer_entries
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.trains import trains

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """Megatron linears that are alike, as far as adapters go."""

    entry: Entry
    ranks: tuple[int, ...]  # of the modules that it fuses, without padding; 0 where one has no adapter
    count: int  # in the whole model, each expert's too


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The low-rank matrices of one adapter. rank: of all of them in memory, where narrower ones are padded. size: bytes of an element."""

    settings: LoraSettings
    linears: Sequence[Adapted]  # of the whole model
    size: int
    text_prefix: str = "model."  # of Hugging Face names

    @classmethod
    def of(cls, settings: LoraSettings, shape: ModelShape, size: int) -> Adapters:
        found = Counter(
            (entry, tuple(ranks))
            for layer in range(shape.num_layers)
            for entry in filter(is_linear, layer_entries(shape, moe=shape.is_moe_layer(layer)))
            for expert in (range(shape.num_experts) if entry.is_expert else (0,))
            if any(ranks := _ranks(settings, shape.text_prefix, entry, layer, expert))
        )
        linears = [Adapted(entry=entry, ranks=ranks, count=count) for (entry, ranks), count in found.items()]
        return cls(settings=settings, linears=linears, size=size, text_prefix=shape.text_prefix)

    @property
    def rank(self) -> int:
        return max((rank for linear in self.linears for rank in linear.ranks), default=0)

    def is_on(self, entry: Entry, layer: int, expert: int = 0) -> bool:
        """Whether a Megatron linear has an adapter: if any of its modules has one."""
        return is_linear(entry) and any(_ranks(self.settings, self.text_prefix, entry, layer, expert))

    @property
    def num_parameters(self) -> int:
        """As PEFT counts them, and as they are pushed: of the whole model, without padding."""
        return sum(
            linear.count * rank * sum(size)
            for linear in self.linears
            for rank, (_, size) in zip(linear.ranks, linear.entry.hf, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table of weights inside layers: how many parameters of the whole model are it, and how many of them train."""

    entry: Entry
    count: int
    trained: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What a run trains, and which adapters it needs besides. size: bytes of an element of the model's own weights."""

    trains: Callable[[str], bool]  # the model's own weights, by Hugging Face name
    rows: Sequence[Row]  # of all layers
    size: int
    text_prefix: str = "model."  # of Hugging Face names
    adapters: Adapters | None = None
    reference: Adapters | None = None  # frozen: the KL is measured against the model with these
    push: LoraPush | None = None  # how adapters reach the sampler

    @classmethod
    def of(cls, cfg: Config, shape: ModelShape) -> Tuning:
        """Raises ConfigError where an adapter that the settings name cannot be read, or cannot be pushed as they ask."""
        tuner, size = cfg.tuner, BYTES[cfg.model.torch_dtype]
        rule, lora = cache(trains(tuner)), lora_of(tuner, shape)
        rows = _rows(shape, rule)
        if lora is None:
            return cls(trains=rule, rows=rows, size=size, text_prefix=shape.text_prefix)
        adapters, reference = Adapters.of(lora, shape, BYTES[tuner.lora_dtype or cfg.model.torch_dtype]), None
        if cfg.grpo.ref_model:
            pass  # a whole model of its own
        elif cfg.grpo.beta > 0 and tuner.ref_adapters:
            reference = Adapters.of(LoraSettings.from_peft(tuner.ref_adapters, flag="ref_adapters"), shape, adapters.size)
        elif cfg.grpo.beta > 0 and tuner.adapters:
            reference = adapters  # as the run began
        push = lora_push(cfg, shape, on_gpu=None)
        return cls(trains=rule, rows=rows, size=size, text_prefix=shape.text_prefix, adapters=adapters, reference=reference, push=push)

    @property
    def pushes_adapters(self) -> bool:
        """To the sampler, alone; if not, and if there are any, merged into the weights."""
        return self.push is not None and self.push.kind == "adapter"

    @property
    def size_of_trained(self) -> int:
        """Bytes of an element of what trains."""
        return self.adapters.size if self.adapters else self.size

    def trains_outer(self, entry: Entry) -> bool:
        """Of a row outside the layers."""
        return self.trains(entry.hf[0][0])

    def trains_weight(self, entry: Entry, layer: int, expert: int = 0) -> bool:
        """Of a row inside a layer, which trains whole or not at all."""
        return self.trains(next(_names(self.text_prefix, entry, layer, expert)))


def _rows(shape: ModelShape, rule: Callable[[str], bool]) -> list[Row]:
    count: Counter[Entry] = Counter()
    trained: Counter[Entry] = Counter()
    for layer in range(shape.num_layers):
        for entry in layer_entries(shape, moe=shape.is_moe_layer(layer)):
            experts = range(shape.num_experts) if entry.is_expert else range(1)
            count[entry] += len(experts)
            trained[entry] += sum(rule(next(_names(shape.text_prefix, entry, layer, expert))) for expert in experts)
    return [Row(entry=entry, count=count[entry], trained=trained[entry]) for entry in count]


def _ranks(settings: LoraSettings, prefix: str, entry: Entry, layer: int, expert: int) -> list[int]:
    return [settings.rank_of(name.removesuffix(".weight")) for name in _names(prefix, entry, layer, expert)]


def _names(prefix: str, entry: Entry, layer: int, expert: int) -> Iterator[str]:
    return (f"{prefix}layers.{layer}.{name.format(e=expert)}" for name, _ in entry.hf)
