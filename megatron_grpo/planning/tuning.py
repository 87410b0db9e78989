"""What of a model trains, as the plan counts it: which of its own weights, and which adapters stand beside its linear layers. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from megatron_grpo.settings.config import Config, TunerConfig
from megatron_grpo.weights.lora import LoraSettings, is_linear, lora_of
from megatron_grpo.weights.names import Entry, layer_entries
from megatron_grpo.weights.shape import ModelShape

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The low-rank matrices of one adapter. rank: of all of them in memory, where narrower ones are padded. size: bytes of an element."""

    rank_of: Callable[[str], int]  # by the whole Hugging Face name of a module
    rank: int
    size: int

    @classmethod
    def of(cls, settings: LoraSettings, shape: ModelShape, size: int) -> Adapters:
        rank_of = cache(settings.rank_of)
        if _looks_at_last_words(settings):  # so that tens of thousands of experts' names are not matched one by one
            by_last_word, rank_of = rank_of, lambda module: by_last_word(module.rsplit(".", 1)[1])
        found = cls(rank_of=rank_of, rank=0, size=size)
        return cls(rank_of=rank_of, rank=max((rank for *_, ranks in found.everywhere(shape) for rank in ranks), default=0), size=size)

    def ranks_of(self, entry: Entry, layer: int, expert: int = 0) -> list[int]:
        """Of the modules that a Megatron linear fuses, without padding; 0 where one has no adapter. Empty: it is no linear layer."""
        return [self.rank_of(name.removesuffix(".weight")) for name in _names(entry, layer, expert)] if is_linear(entry) else []

    def everywhere(self, shape: ModelShape) -> Iterator[tuple[Entry, list[int]]]:
        """Every Megatron linear of the model that has an adapter, each expert's too, with the ranks of its modules."""
        for layer in range(shape.num_layers):
            for entry in layer_entries(shape, moe=shape.is_moe_layer(layer)):
                for expert in range(shape.num_experts) if entry.is_expert else (0,):
                    if any(ranks := self.ranks_of(entry, layer, expert)):
                        yield entry, ranks

    def num_parameters(self, shape: ModelShape) -> int:
        """As PEFT counts them, and as they are pushed: of the whole model, without padding."""
        return sum(
            rank * sum(size) for entry, ranks in self.everywhere(shape) for rank, (_, size) in zip(ranks, entry.hf, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What a run trains, and which adapters it needs besides. size: bytes of an element of the model's own weights."""

    trains: Callable[[str], bool]  # the model's own weights, by Hugging Face name
    size: int
    adapters: Adapters | None = None
    reference: Adapters | None = None  # frozen: the KL is measured against the model with these
    pushes_adapters: bool = False  # to the sampler, instead of merged weights

    @classmethod
    def of(cls, cfg: Config, shape: ModelShape) -> Tuning:
        """Raises ConfigError where an adapter that the settings name cannot be read."""
        tuner, size = cfg.tuner, BYTES[cfg.model.torch_dtype]
        lora = lora_of(tuner, shape)
        if lora is None:
            return cls(trains=cache(_trains(tuner)), size=size)
        adapters, reference = Adapters.of(lora, shape, BYTES[tuner.lora_dtype or cfg.model.torch_dtype]), None
        if cfg.grpo.beta > 0 and tuner.ref_adapters:
            reference = Adapters.of(LoraSettings.from_peft(tuner.ref_adapters, flag="ref_adapters"), shape, adapters.size)
        elif cfg.grpo.beta > 0 and tuner.adapters:
            reference = adapters  # as the run began
        pushes_adapters = tuner.vllm_enable_lora is not False
        return cls(trains=lambda name: False, size=size, adapters=adapters, reference=reference, pushes_adapters=pushes_adapters)

    @property
    def size_of_trained(self) -> int:
        """Bytes of an element of what trains."""
        return self.adapters.size if self.adapters else self.size

    def trains_outer(self, entry: Entry) -> bool:
        """Of a row outside the layers."""
        return all(self.trains(name) for name, _ in entry.hf)

    def trains_weight(self, entry: Entry, layer: int, expert: int = 0) -> bool:
        """Of a row inside a layer."""
        return all(self.trains(name) for name in _names(entry, layer, expert))


def _names(entry: Entry, layer: int, expert: int) -> Iterator[str]:
    return (f"model.layers.{layer}.{name.format(e=expert)}" for name, _ in entry.hf)


def _looks_at_last_words(settings: LoraSettings) -> bool:
    """Whether nothing but the last word of a module's name decides about it: the same in every layer and for every expert."""
    words = [*settings.target_modules, *settings.exclude_modules, *settings.rank_pattern, *settings.alpha_pattern]
    is_plain = all(re.fullmatch(r"[\w-]+", word) for word in words)
    return is_plain and settings.target_regex is None and settings.exclude_regex is None


def _trains(tuner: TunerConfig) -> Callable[[str], bool]:
    frozen = re.compile(tuner.freeze_parameters_regex) if tuner.freeze_parameters_regex else None
    chosen = re.compile(tuner.trainable_parameters_regex) if tuner.trainable_parameters_regex else None

    def trains(name: str) -> bool:
        if name.startswith(tuple(tuner.trainable_parameters)) or (chosen and chosen.search(name)):
            return True
        return not (name.startswith(tuple(tuner.freeze_parameters)) or (frozen and frozen.search(name)))

    return trains
