"""LoRA settings: the linear layers with an adapter, their ranks and scales, and the names of the two matrices. No tensors, no torch.

LoRA (Hu et al. 2021, arXiv:2106.09685, section 4.1): W x + scale * B A x, with A [r, in] and B [out, r]. Names and rules are those of
PEFT's LoraConfig, whose files are read and written (`weights.adapters`).

A Megatron linear may fuse several Hugging Face modules: P = 3 in linear_qkv, 2 in linear_fc1. Its adapter is two parameters:
    lora_a [P * rank, in]   the A matrices of its modules, stacked
    lora_b [out, rank]      the B matrices of its modules, packed and cut over ranks exactly like the weight
An adapter's row in the table of weights is therefore the weight's row with other sizes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_grpo.core.base.errors import Problem, problem_with
from megatron_grpo.core.base.files import parse_json
from megatron_grpo.core.weights.families import FAMILIES
from megatron_grpo.core.weights.names import ShardSplit, TensorFusion, WeightEntry, entries_in_layers, layer_entries
from megatron_grpo.core.weights.safetensors_files import file_error
from megatron_grpo.core.weights.shape import ModelShape

if TYPE_CHECKING:
    from megatron_grpo.core.settings import TunerConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of module names in PEFT's files
BASE = "base_model.json"  # beside them: fingerprints of the adapter's base, which PEFT's own files only name
ALL_LINEAR = "all-linear"
AdapterUpdateRequest = Literal["adapter", "merged"]  # how adapters reach a sampler: alone, or merged into the weights
# Unsupported options of PEFT's LoraConfig, with the reason.
UNSUPPORTED_OPTIONS = {
    "lora_bias": "Megatron's frozen linear layers compute no bias gradient, and vLLM ignores adapter biases",
    "modules_to_save": "full layers would train beside the adapter, and vLLM cannot load them; use tuner_type full",
    "use_dora": "its scale is the norm of the merged weight, which a shard does not have, and vLLM does not support it",
    "target_parameters": "adapters are supported on linear layers only; use target_modules",
    "layers_to_transform": "select layers with target_regex, such as .*layers\\.(0|1)\\..*",
    "layers_pattern": "select layers with target_regex",
    "layer_replication": "it changes the model",
    "trainable_token_indices": "adapters are supported on linear layers only, not on embeddings",
    "fan_in_fan_out": "it applies to transposed weights, which these models do not have",
    "alora_invocation_tokens": "adapters apply to every token",
    "use_qalora": "quantized weights are not supported",
    "corda_config": "it changes the base weights",
    "eva_config": "it changes the base weights",
    "loftq_config": "it changes the base weights",
}
A, B = ".lora_A.weight", ".lora_B.weight"  # after the name of a Hugging Face module


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSync:
    """Delivery of a run's adapters to the sampler.

    Args:
        modules: Hugging Face names of the modules that have an adapter.
        slot_rank: max_lora_rank of the sampler; 0 where it receives merged weights.
        notes: Messages for the user.
    """

    kind: AdapterUpdateRequest
    modules: frozenset[str]
    slot_rank: int
    notes: tuple[str, ...] = ()

    @property
    def last_name_parts(self) -> list[str]:
        """Last components of the modules' names, with vLLM's name of the experts."""
        experts = ["experts"] if any(".experts." in name for name in self.modules) else []
        return sorted({name.rsplit(".", 1)[1] for name in self.modules} | {*experts})


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Settings of LoRA, with the fields of PEFT's LoraConfig.

    Patterns are regular expressions matched at the end of a module's name; the first match counts. Only the linear layers of decoder layers
    are considered: routers, embeddings and the head never have an adapter.

    Args:
        rank: Default rank.
        alpha: Default numerator of the scale.
        dropout: Dropout probability on an adapter's input.
        use_rslora: Divide alpha by the root of the rank instead of the rank.
        target_modules: Names, or ends of names, of Hugging Face modules; or `all-linear`.
        target_regex: Regular expression matched against the whole name. Takes precedence over target_modules.
        exclude_modules: Names, or ends of names, of modules without an adapter.
        exclude_regex: Regular expression matched against the whole name of modules without an adapter.
        rank_pattern: Ranks of modules that match a pattern.
        alpha_pattern: Alphas of modules that match a pattern.
    """

    rank: int = 8
    alpha: float = 32.0
    dropout: float = 0.0
    use_rslora: bool = False
    target_modules: Sequence[str] = (ALL_LINEAR,)
    target_regex: str | None = None
    exclude_modules: Sequence[str] = ()
    exclude_regex: str | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    _ranks: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def from_config(cls, cfg: TunerConfig, shape: ModelShape) -> LoraSettings:
        """Return the settings that a run's configuration asks for.

        Megatron's names of linear layers stand for the modules that they fuse in this model.
        """
        return cls(
            rank=cfg.lora_rank,
            alpha=cfg.lora_alpha,
            dropout=cfg.lora_dropout,
            use_rslora=cfg.use_rslora,
            target_modules=tuple(_in_hf_names(cfg.target_modules, shape)),
            target_regex=cfg.target_regex,
            exclude_modules=tuple(_in_hf_names(cfg.exclude_modules, shape)),
            rank_pattern=dict(cfg.rank_pattern),
            alpha_pattern=dict(cfg.alpha_pattern),
        )

    @classmethod
    def from_peft(cls, directory: str | Path, *, flag: str = "adapters") -> LoraSettings:
        """Return the settings in an adapter's adapter_config.json.

        Raises:
            ConfigError: The file is missing or damaged, or asks for something that is not supported.
        """
        config = _read_config(Path(directory), flag)
        if refusals := _refused(config):
            raise file_error(f"{directory}: {'; '.join(refusals)}.", flag)
        targets, excluded = config.get("target_modules") or (ALL_LINEAR,), config.get("exclude_modules") or ()
        if targets == ALL_LINEAR:
            targets = (ALL_LINEAR,)
        return cls(
            rank=config["r"],
            alpha=config["lora_alpha"],
            dropout=config.get("lora_dropout") or 0.0,
            use_rslora=bool(config.get("use_rslora")),
            target_modules=() if isinstance(targets, str) else tuple(targets),
            target_regex=targets if isinstance(targets, str) else None,
            exclude_modules=() if isinstance(excluded, str) else tuple(excluded),
            exclude_regex=excluded if isinstance(excluded, str) else None,
            rank_pattern=dict(config.get("rank_pattern") or {}),
            alpha_pattern=dict(config.get("alpha_pattern") or {}),
        )

    def is_target(self, module: str) -> bool:
        """Return whether a module has an adapter.

        Args:
            module: Full Hugging Face name, such as `model.layers.3.self_attn.q_proj`.
        """
        if _ends(module, self.exclude_modules) or (self.exclude_regex and re.fullmatch(self.exclude_regex, module)):
            return False
        if self.target_regex is not None:
            return re.fullmatch(self.target_regex, module) is not None
        return ALL_LINEAR in self.target_modules or _ends(module, self.target_modules)

    def find_lora_rank(self, module: str) -> int:
        """Return the rank of a module's adapter; 0 if it has none."""
        if module not in self._ranks:
            self._ranks[module] = int(_first_match(self.rank_pattern, module, self.rank)) if self.is_target(module) else 0
        return self._ranks[module]

    def compute_lora_scale(self, module: str) -> float:
        """Return the factor of B A; 0 if the module has no adapter.

        Rank-stabilized LoRA divides alpha by the root of the rank (Kalajdzievski 2023, arXiv:2312.03732).
        """
        rank, alpha = self.find_lora_rank(module), _first_match(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank) if rank else 0.0

    def problems(self, shape: ModelShape) -> list[Problem]:
        """Return a problem for each name or pattern that matches no linear layer. Such a name would silently train nothing."""
        modules = [module.name for module in linear_modules(shape)]
        available = ", ".join(sorted({module.rsplit(".", 1)[1] for module in modules}))
        also = "Megatron's linear_qkv, linear_proj, linear_fc1 and linear_fc2 stand for the layers that they fuse"
        unmatched = {}
        for flag, names in (("target_modules", self.target_modules), ("exclude_modules", self.exclude_modules)):
            unmatched[flag] = [name for name in names if name != ALL_LINEAR and not any(_ends(module, (name,)) for module in modules)]
        for flag, pattern in (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern)):
            unmatched[flag] = [key for key in pattern if not any(_matches(key, module) for module in modules)]
        problems = [
            problem_with(flag, f"{flag}: no linear layer of this model is called {', '.join(names)}. Available: {available}; {also}.")
            for flag, names in unmatched.items()
            if names
        ]
        if not problems and not any(self.find_lora_rank(module) for module in modules):
            flag = "target_modules" if self.target_regex is None else "target_regex"
            subject = f"{flag} ({self.target_regex or ' '.join(self.target_modules)}) without exclude_modules"
            example = f"Names look like {modules[0]} and end in {available}."
            problems.append(problem_with(flag, f"{subject} selects no linear layer of this model. {example}"))
        return problems

    def to_peft(self, modules: Iterable[str], base_model: str, *, is_multimodal: bool = False) -> dict[str, Any]:
        """Return the content of adapter_config.json.

        Patterns are kept as they are. `all-linear` becomes the last parts of the names in `modules`, because PEFT would add routers to it.

        Args:
            is_multimodal: Whether the model has a vision tower. Layers of it have the same last names, so target_modules becomes a pattern
                that excludes the tower.
        """
        targets: str | list[str] = sorted({module.rsplit(".", 1)[1] for module in modules})
        if self.target_regex is not None:
            targets = self.target_regex
        elif ALL_LINEAR not in self.target_modules:
            targets = list(self.target_modules)
        if is_multimodal and not isinstance(targets, str):
            targets = rf"(?!.*\bvisual\.).*\.({'|'.join(map(re.escape, targets))})"
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.use_rslora,
            "target_modules": targets,
            "exclude_modules": self.exclude_regex or list(self.exclude_modules) or None,
            "rank_pattern": dict(self.rank_pattern),
            "alpha_pattern": dict(self.alpha_pattern),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "modules_to_save": None,
        }


def peft_name(name: str, shape: ModelShape) -> str:
    """Return the name of a matrix in PEFT's files, without their prefix.

    PEFT uses the module names of transformers, which may differ from those in the model's files.
    """
    tower = FAMILIES[shape.architecture].tower
    return tower.in_memory(name) if tower else name


def own_name(name: str, shape: ModelShape) -> str:
    """Return the name used here from a name in PEFT's files: the inverse of `peft_name`.

    Args:
        name: Name in PEFT's files, without their prefix.
    """
    tower = FAMILIES[shape.architecture].tower
    return tower.on_the_hub(name) if tower else name


def make_lora_settings(cfg: TunerConfig, shape: ModelShape) -> LoraSettings | None:
    """Return the adapter settings of a run; None if it trains weights.

    A run that starts from an adapter trains that one: its file decides everything except dropout, which is not part of an adapter.

    Raises:
        ConfigError: The adapter to start from cannot be used.
    """
    if cfg.tuner_type != "lora":
        return None
    return replace(LoraSettings.from_peft(cfg.adapters), dropout=cfg.lora_dropout) if cfg.adapters else LoraSettings.from_config(cfg, shape)


def _read_config(directory: Path, flag: str) -> dict[str, Any]:
    path = directory / CONFIG
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict) or config.get("peft_type") != "LORA" or not {"r", "lora_alpha"} <= config.keys():
            kind = config.get("peft_type") if isinstance(config, dict) else None
            raise file_error(f"{path} is not a LoRA adapter configuration (peft_type {kind}).", flag)
    except FileNotFoundError:
        raise file_error(f"{directory} is not an adapter: it has no {CONFIG}. PEFT's save_pretrained writes one.", flag) from None
    except (OSError, ValueError) as error:
        raise file_error(f"{path} cannot be read: {error}.", flag) from error
    return config


def _refused(config: Mapping[str, Any]) -> list[str]:
    """Return a reason for each unsupported option in an adapter's configuration."""
    reasons = [f"{name} is not supported: {reason}" for name, reason in UNSUPPORTED_OPTIONS.items() if config.get(name)]
    if config.get("bias", "none") != "none":
        reasons.append(f"bias {config['bias']!r} is not supported: {UNSUPPORTED_OPTIONS['lora_bias']}")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start != "gaussian":
        reasons.append(
            f"init_lora_weights {start!r} is not supported: it changes the base weights, which then differ from those of `model`"
        )
    return reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearModule:
    """A Hugging Face module that can have an adapter, and the Megatron linear that it is part of (both with global numbers).

    Args:
        out: Number of output channels.
        inner: Number of input channels.
        megatron: Megatron's name without `.weight`.
        is_row: Whether tensor parallelism cuts the input channels instead of the output channels.
    """

    name: str
    out: int
    inner: int
    megatron: str
    is_expert: bool
    is_row: bool


@cache
def linear_modules(shape: ModelShape) -> tuple[LinearModule, ...]:
    """Return all linear modules of the whole model, layer by layer.

    Cached: a model with many experts has tens of thousands, and the list is needed often.
    """
    return tuple(
        LinearModule(
            name=name.removesuffix(".weight"),
            out=out,
            inner=inner,
            megatron=entry.megatron.removesuffix(".weight"),
            is_expert=entry.is_expert,
            is_row=entry.cut is ShardSplit.ROW,
        )
        for entry in filter(is_linear, entries_in_layers(shape))
        for name, (out, inner) in entry.hf
    )


Sizes = Mapping[str, tuple[int, int]]  # of matrices, by the name of PEFT's files without its prefix


def own_sizes(settings: LoraSettings, shape: ModelShape) -> Sizes:
    """Return the size of every adapter matrix of the whole model, each with its module's own rank. Modules without adapter are absent."""
    sizes = {}
    for module in linear_modules(shape):
        if rank := settings.find_lora_rank(module.name):
            sizes[module.name + A], sizes[module.name + B] = (rank, module.inner), (module.out, rank)
    return sizes


def widest_rank(settings: LoraSettings, shape: ModelShape) -> int:
    """Return the largest rank of any module. All matrices of a run have this rank.

    Entries beyond a module's own rank are zero and stay zero, because their gradients are zero too.
    """
    return max((settings.find_lora_rank(module.name) for module in linear_modules(shape)), default=0)


def is_linear(entry: WeightEntry) -> bool:
    """Return whether a row of the table of weights can have an adapter. Routers have other names."""
    return (".linear_" in f".{entry.megatron}" or "_proj." in entry.megatron) and ".weight" in entry.megatron and len(entry.hf[0][1]) == 2


def adapter_entries(entry: WeightEntry, rank: int) -> tuple[WeightEntry, WeightEntry]:
    """Return the rows of `lora_a` and `lora_b` for a weight's row."""
    is_row = entry.cut is ShardSplit.ROW
    inner = tuple((name.removesuffix(".weight") + A, (rank, size[1])) for name, size in entry.hf)
    outer = tuple((name.removesuffix(".weight") + B, (size[0], rank)) for name, size in entry.hf)
    shared = ShardSplit.REPLICATED
    return (
        replace(
            entry,
            megatron=entry.megatron.replace(".weight", ".lora_a"),
            hf=inner,
            packing=TensorFusion.STACK,
            cut=entry.cut if is_row else shared,
        ),
        replace(entry, megatron=entry.megatron.replace(".weight", ".lora_b"), hf=outer, cut=shared if is_row else entry.cut),
    )


def find_module(name: str) -> str:
    """Return the module name in the Hugging Face name of an adapter matrix."""
    return name.rsplit(".lora_", 1)[0]


def _in_hf_names(names: Iterable[str], shape: ModelShape) -> Iterator[str]:
    """Replace Megatron's names of linear layers by those of their modules (linear_fc1 is gate_proj and up_proj). Other names stay."""
    hf_names: dict[str, dict[str, None]] = {}
    for kind in sorted(set(map(shape.find_layer_kind, range(shape.num_layers)))):
        for entry in filter(is_linear, layer_entries(shape, kind)):
            last = entry.megatron.removesuffix(".weight").rsplit(".", 1)[1]
            hf_names.setdefault(last, {}).update({name.removesuffix(".weight").rsplit(".", 1)[1]: None for name, _ in entry.hf})
    for name in names:
        yield from hf_names.get(name, (name,))


def _ends(module: str, names: Iterable[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _matches(key: str, module: str) -> bool:
    return re.match(rf"(.*\.)?({key})$", module) is not None


def _first_match(patterns: Mapping[str, float], module: str, default: float) -> float:
    return next((value for key, value in patterns.items() if _matches(key, module)), default)
