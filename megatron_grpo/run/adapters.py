"""Adapters at the edge of a run: their files, and whether they are synced alone or merged. No torch until a file is read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_grpo.core.base.errors import ConfigError, Problem, problem_with
from megatron_grpo.core.field import read_range
from megatron_grpo.core.settings import TunerConfig
from megatron_grpo.core.weights.lora import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    LoraSettings,
    LoraSync,
    linear_modules,
    make_lora_settings,
    own_name,
    own_sizes,
)
from megatron_grpo.core.weights.safetensors_files import stored_shapes
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.config.rules.tuner import NO_ADAPTER
from megatron_grpo.run.config.settings import Config

if TYPE_CHECKING:
    from megatron_grpo.core.weights.adapters import Read

SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of max_lora_rank that vLLM 0.32 supports

# Measured: 1024 x 1024 weights of std 0.02, rank 8, alpha 32, lr 1e-5. The fraction of the update by which the merged weights are wrong.
MERGED_BFLOAT16 = (
    "the adapter is merged into bfloat16 weights for every weight sync, which loses changes below half a rounding step: at lr 1e-5 "
    "98 % of the first step's update, 81 % of the first 10 steps together, 17 % of the first 100. The sampler then uses another policy "
    "than the trainer, and no check detects it."
)


def lora_sync(cfg: Config, shape: ModelShape, *, on_gpu: bool | None, sampler_obstacle: str | None = None) -> LoraSync | None:
    """Return how this run sends its adapters to the sampler; None if it trains weights.

    Args:
        on_gpu: Whether the sampler runs on a GPU; None if the machine is unknown.
        sampler_obstacle: Why this sampler supports no adapters; None if it does, or if that is unknown.

    Raises:
        ConfigError: `vllm_enable_lora true` is impossible, or the adapter to start from cannot be read.
    """
    settings = make_lora_settings(cfg.tuner, shape)
    if settings is None:
        return None
    modules = frozenset(module.name for module in linear_modules(shape) if settings.find_lora_rank(module.name))
    setting, obstacle = cfg.tuner.vllm_enable_lora, adapter_obstacle(settings, shape, on_gpu=on_gpu) or sampler_obstacle
    if setting and obstacle:
        raise ConfigError([Problem(flags=("vllm_enable_lora",), nearest={"vllm_enable_lora": [False]}, message=(
            f"vllm_enable_lora true: the adapter cannot be synced separately: {obstacle}. Leave vllm_enable_lora out to sync merged "
            "weights."))])  # fmt: skip
    if setting or (setting is None and not obstacle):
        return LoraSync(kind="adapter", modules=modules, slot_rank=slot_rank(_named_rank(settings)) or 0)
    notes = []
    if obstacle:
        notes.append(f"Note: the adapter is merged into the weights for every weight sync: {obstacle}.")
    if (cfg.rollout.vllm_dtype or cfg.model.torch_dtype) == "bfloat16":
        remedy = "Use vllm_dtype float32" if obstacle else "Leave vllm_enable_lora out, or use vllm_dtype float32"
        notes.append(f"WARNING: {MERGED_BFLOAT16} {remedy}.")
    return LoraSync(kind="merged", modules=modules, slot_rank=0, notes=tuple(notes))


def slot_rank(rank: int) -> int | None:
    """Return the smallest max_lora_rank of vLLM that fits adapters of this rank; None if none does."""
    return next((slot for slot in SLOT_RANKS if slot >= rank), None)


def _named_rank(settings: LoraSettings) -> int:
    """Return the largest rank in the configuration: vLLM requires room for it, whether or not a module has it."""
    return max([settings.rank, *settings.rank_pattern.values()])


def adapter_obstacle(settings: LoraSettings, shape: ModelShape, *, on_gpu: bool | None) -> str | None:
    """Return why vLLM cannot sample with these adapters, as the end of a sentence; None if it can.

    Args:
        on_gpu: Whether the sampler runs on a GPU; None if the machine is unknown.
    """
    if slot_rank(_named_rank(settings)) is None:
        return f"vLLM supports ranks up to {SLOT_RANKS[-1]}, but the adapter's configuration has {_named_rank(settings)}"
    targeted = [module for module in linear_modules(shape) if settings.find_lora_rank(module.name)]
    if any(module.name.endswith(".kv_b_proj") for module in targeted):
        return "vLLM merges kv_b_proj into latent attention when it loads a model, and would ignore its adapter"
    if any(".linear_attn." in module.name for module in targeted):
        return "adapters on the gated delta rule are not verified in vLLM, which has none on a CPU"
    if any(module.is_expert for module in targeted):
        # None is an unknown machine: most have a GPU.
        return (
            "vLLM needs Triton for adapters on experts, which is not available on a CPU"
            if on_gpu is False
            else _uneven_experts(settings, shape)
        )
    return None


def _uneven_experts(settings: LoraSettings, shape: ModelShape) -> str | None:
    """Return why vLLM cannot stack the adapters of a layer's experts; None if it can.

    Each of the three matrices needs one rank, the same for all experts of the layer.
    """
    ranks: dict[tuple[str, str], set[int]] = defaultdict(set)
    for module in linear_modules(shape):
        if module.is_expert:
            layer, name = module.name.split(".experts.")
            ranks[layer, name.rsplit(".", 1)[1]].add(settings.find_lora_rank(module.name))
    layers = {layer for layer, _ in ranks if any(sizes != {0} for (other_layer, _), sizes in ranks.items() if other_layer == layer)}
    uneven = [f"{layer}.experts" for (layer, _), sizes in ranks.items() if layer in layers and (len(sizes) > 1 or sizes == {0})]
    if not uneven:
        return None
    return f"vLLM needs adapters on all three matrices of all experts of a layer, with one rank per matrix, unlike {uneven[0]}"


# ---- files of PEFT ----


def from_file(directory: str | Path, settings: LoraSettings, shape: ModelShape, *, flag: str = "adapters") -> Read:
    """Return a reader of an adapter that PEFT or `write_adapter` has written.

    Args:
        settings: Settings that its matrices must fit.

    Raises:
        ConfigError: The file does not have exactly the matrices of these settings.
    """
    if problems := adapter_problems(directory, settings, shape, flag=flag):
        raise ConfigError(problems)
    from safetensors import safe_open

    file = safe_open(Path(directory) / WEIGHTS, framework="pt")
    stored = {own_name(name.removeprefix(PREFIX), shape): name for name in file.keys()}
    return lambda name: file.get_tensor(stored[name])


def adapter_problems(directory: str | Path, settings: LoraSettings, shape: ModelShape, *, flag: str) -> list[Problem]:
    """Return the problems of an adapter's files with a model."""
    if faults := [*_numbers(settings), *_expressions(settings)]:
        return [_flag_problem(flag, f"{directory}: its {CONFIG} has {message}") for message in faults]
    if unsupported := [name for name in settings.target_modules if name in NO_ADAPTER]:
        return [_flag_problem(flag, f"{directory}: an adapter on {name} is not supported: {NO_ADAPTER[name]}.") for name in unsupported]
    expected = {PREFIX + name: size for name, size in own_sizes(settings, shape).items()}
    # A target name that matches nothing in this model is harmless: the matrices are compared one by one.
    if not expected and (unfit := settings.problems(shape)):
        return [replace(problem, flags=(flag,), message=f"{flag}: {directory}: {problem.message}") for problem in unfit]
    path = Path(directory) / WEIGHTS
    if not path.is_file():
        pickled = (Path(directory) / "adapter_model.bin").is_file()
        hint = " It has adapter_model.bin: save it as safetensors first." if pickled else " PEFT's save_pretrained writes it."
        return [_flag_problem(flag, f"{directory} has no {WEIGHTS}.{hint}")]
    try:
        stored = stored_shapes(path, flag=flag)
    except ConfigError as error:
        return list(error.problems)
    stored_by_name = {
        PREFIX + own_name(name.removeprefix(PREFIX), shape) if name.startswith(PREFIX) else name: size for name, size in stored.items()
    }
    return [_flag_problem(flag, f"{path} {message}") for message in _differences(stored_by_name, expected)]


def _differences(stored: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for fault, names in (
        ("lacks", expected.keys() - stored.keys()),
        ("has, beyond its configuration,", stored.keys() - expected.keys()),
    ):
        if names:
            yield f"{fault} {len(names)} of this model's matrices: {_shorten(sorted(names))}."
    mismatched = [name for name, size in expected.items() if stored.get(name, size) != size]
    if mismatched:
        first = mismatched[0]
        remark = f" {len(mismatched) - 1} more differ." if len(mismatched) > 1 else ""
        yield f"has {first} with shape {stored[first]}; this model's module with the rank in {CONFIG} needs {expected[first]}.{remark}"


def _numbers(settings: LoraSettings) -> Iterator[str]:
    allowed = read_range(TunerConfig, "lora_rank")
    for name, rank in {"r": settings.rank, **{f"rank_pattern {key}": rank for key, rank in settings.rank_pattern.items()}}.items():
        if not isinstance(rank, int) or not allowed.admits(rank):
            yield f"{name} ({rank}), which must be {allowed}."
    for name, alpha in {
        "lora_alpha": settings.alpha,
        **{f"alpha_pattern {key}": alpha for key, alpha in settings.alpha_pattern.items()},
    }.items():
        if not isinstance(alpha, (int, float)) or not 0 < alpha < float("inf"):
            yield f"{name} ({alpha}), which must be a number above 0."


def _expressions(settings: LoraSettings) -> Iterator[str]:
    for pattern in (settings.target_regex, settings.exclude_regex, *settings.rank_pattern, *settings.alpha_pattern):
        try:
            re.compile(pattern or "")
        except (re.error, RecursionError, OverflowError) as error:
            yield f"a pattern ({pattern}) that is not a regular expression: {error}."


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def _flag_problem(flag: str, message: str) -> Problem:
    return problem_with(flag, f"{flag}: {message}")


def peft_leaves_out(settings: LoraSettings, shape: ModelShape) -> str | None:
    """Return which of these adapters PEFT 0.21 loses when it loads their files, and a remedy; None if it loses none.

    transformers 5 holds the experts of a layer in one tensor, so PEFT converts their matrices. In these models it does so for every module
    with the same last name: adapters of dense layers and of shared experts are dropped without an error.
    """
    expert_words = {module.name.rsplit(".", 1)[1] for module in linear_modules(shape) if module.is_expert}
    targeted = [module for module in linear_modules(shape) if settings.find_lora_rank(module.name)]
    unread = [module.name for module in targeted if not module.is_expert and module.name.rsplit(".", 1)[1] in expert_words]
    if not unread:
        return None
    examples = f"{unread[0]}, ..." if len(unread) > 1 else unread[0]
    return (
        f"PEFT 0.21 loads this adapter without {len(unread)} of its {len(targeted)} modules ({examples}) and reports no error: it treats "
        "these names as experts. Use the merged model (merge_lora true), or exclude these modules with exclude_modules."
    )
