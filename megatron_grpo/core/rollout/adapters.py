"""Delivery of a run's adapters to the sampler: alone, or merged into the weights.

Names and sizes without torch, so that `plan` can use them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megatron_grpo.core.base.errors import ConfigError, Problem
from megatron_grpo.core.settings import Config
from megatron_grpo.core.weights.lora import AdapterUpdateRequest, LoraSettings, linear_modules, lora_of
from megatron_grpo.core.weights.shape import ModelShape

SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values of max_lora_rank that vLLM 0.32 supports

# Measured: 1024 x 1024 weights of std 0.02, rank 8, alpha 32, lr 1e-5. The fraction of the update by which the merged weights are wrong.
MERGED_BFLOAT16 = (
    "the adapter is merged into bfloat16 weights for every weight sync, which loses changes below half a rounding step: at lr 1e-5 "
    "98 % of the first step's update, 81 % of the first 10 steps together, 17 % of the first 100. The sampler then uses another policy "
    "than the trainer, and no check detects it."
)


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


def lora_sync(cfg: Config, shape: ModelShape, *, on_gpu: bool | None, sampler_obstacle: str | None = None) -> LoraSync | None:
    """Return how this run sends its adapters to the sampler; None if it trains weights.

    Args:
        cfg: The configuration.
        shape: Shape of the model.
        on_gpu: Whether the sampler runs on a GPU; None if the machine is unknown.
        sampler_obstacle: Why this sampler supports no adapters; None if it does, or if that is unknown.

    Raises:
        ConfigError: `vllm_enable_lora true` is impossible, or the adapter to start from cannot be read.
    """
    settings = lora_of(cfg.tuner, shape)
    if settings is None:
        return None
    modules = frozenset(module.name for module in linear_modules(shape) if settings.rank_of(module.name))
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
    """Return the smallest max_lora_rank of vLLM that fits adapters of this rank; None if none does.

    Args:
        rank: Largest rank of the adapters.
    """
    return next((slot for slot in SLOT_RANKS if slot >= rank), None)


def _named_rank(settings: LoraSettings) -> int:
    """Return the largest rank in the configuration: vLLM requires room for it, whether or not a module has it."""
    return max([settings.rank, *settings.rank_pattern.values()])


def adapter_obstacle(settings: LoraSettings, shape: ModelShape, *, on_gpu: bool | None) -> str | None:
    """Return why vLLM cannot sample with these adapters, as the end of a sentence; None if it can.

    Args:
        settings: LoRA settings of the run.
        shape: Shape of the model.
        on_gpu: Whether the sampler runs on a GPU; None if the machine is unknown.
    """
    if slot_rank(_named_rank(settings)) is None:
        return f"vLLM supports ranks up to {SLOT_RANKS[-1]}, but the adapter's configuration has {_named_rank(settings)}"
    targeted = [module for module in linear_modules(shape) if settings.rank_of(module.name)]
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
            ranks[layer, name.rsplit(".", 1)[1]].add(settings.rank_of(module.name))
    layers = {layer for layer, _ in ranks if any(sizes != {0} for (other_layer, _), sizes in ranks.items() if other_layer == layer)}
    uneven = [f"{layer}.experts" for (layer, _), sizes in ranks.items() if layer in layers and (len(sizes) > 1 or sizes == {0})]
    if not uneven:
        return None
    return f"vLLM needs adapters on all three matrices of all experts of a layer, with one rank per matrix, unlike {uneven[0]}"
