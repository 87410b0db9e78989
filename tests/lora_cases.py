"""LoRA by PEFT on transformers in float64, and adapters to compare on.

`tests/parity_cases.py` uses it for settings with tuner_type lora.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from megatron_grpo.core.weights.adapters import initial_adapter
from megatron_grpo.core.weights.lora import PREFIX, LoraSettings, find_module, own_name, own_sizes, peft_name
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.hf_writer import write_adapter

# Three columns in one part of a fused linear, six in a layer's down_proj, two alphas: what a file of PEFT may hold.
ODD = LoraSettings(
    rank=4, alpha=6.0, rank_pattern={"v_proj": 3, r"layers\.1\.mlp.*down_proj": 6, "up_proj": 2}, alpha_pattern={"k_proj": 5.0}
)
# Of models whose experts lie in one tensor.
BESIDE_ATTENTION = LoraSettings(
    rank=4, alpha=6.0, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"), rank_pattern={"v_proj": 3}, alpha_pattern={"k_proj": 5.0}
)


def write_random_adapter(model: str | Path, out: str | Path, settings: LoraSettings = ODD, *, seed: int = 1, std: float = 0.1) -> Path:
    """Write an adapter directory like PEFT's, with random nonzero B matrices, so that each gradient is nonzero."""
    rng, tensors, out = np.random.default_rng(seed), {}, Path(out)
    sizes = own_sizes(settings, ModelShape.from_pretrained(model))
    for name, size in sizes.items():
        scale = std if ".lora_B." in name else size[1] ** -0.5
        tensors[PREFIX + name] = torch.from_numpy(rng.normal(0, scale, size).astype(np.float32))
    out.mkdir(parents=True)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = settings.to_peft(dict.fromkeys(name.rsplit(".lora_", 1)[0] for name in sizes), str(model))
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out


def load_peft_model(path: str | Path, adapter: str | Path, dtype: str = "float64"):
    """Return (model, its trainable parameters by their names in the file without PEFT's prefix)."""
    from tests.tiny_models import load_tiny

    base = load_tiny(path, dtype)
    if any(hasattr(module, "gate_up_proj") for module in base.modules()):
        return _with_experts(base, path, Path(adapter), dtype)
    from peft import PeftModel

    model = PeftModel.from_pretrained(base, str(adapter), is_trainable=True, autocast_adapter_dtype=False)
    shape = ModelShape.from_pretrained(path)
    names = ((name.removeprefix(PREFIX).replace(".default", ""), p) for name, p in model.named_parameters() if p.requires_grad)
    named = {own_name(name, shape): p for name, p in names}
    return model.train(), named


class _Delta(torch.nn.Module):
    """Weight plus scale * B A of one module, or of all experts of a layer, as a parametrization of torch."""

    def __init__(self, pairs):
        super().__init__()
        self.pairs = pairs  # [expert][part] -> (A, B, scale); parts lie one above the other

    def forward(self, weight):
        return weight + torch.stack([torch.cat([s * b @ a for a, b, s in parts]) for parts in self.pairs]).reshape(weight.shape)


def _with_experts(base, path, adapter: Path, dtype: str):
    """Add adapters to experts: transformers 5 holds a layer's experts in one parameter, for which PEFT has other adapters."""
    from tests.parity_cases import _block, _expert_names

    base.requires_grad_(False)
    settings, held, named = LoraSettings.from_peft(adapter), load_file(adapter / "adapter_model.safetensors"), {}

    def pair(module):
        found = []
        for which in ("lora_A", "lora_B"):
            name = f"{module}.{which}.weight"
            named[name] = torch.nn.Parameter(held[PREFIX + name].to(getattr(torch, dtype)))
            found.append(named[name])
        return (*found, settings.compute_lora_scale(module))

    for name, module in list(base.named_modules()):
        if isinstance(module, torch.nn.Linear) and ".layers." in name and settings.find_lora_rank(name):
            torch.nn.utils.parametrize.register_parametrization(module, "weight", _Delta([[pair(name)]]), unsafe=True)
        elif hasattr(module, "gate_up_proj"):
            block, (gate, up, down) = _block(path), _expert_names(path)
            experts = name.replace(".mlp.", f".{block}.")
            for attribute, parts in (("gate_up_proj", (gate, up)), ("down_proj", (down,))):
                if not settings.find_lora_rank(f"{experts}.0.{parts[0]}"):
                    continue
                pairs = [[pair(f"{experts}.{e}.{part}") for part in parts] for e in range(len(module.gate_up_proj))]
                torch.nn.utils.parametrize.register_parametrization(module, attribute, _Delta(pairs), unsafe=True)
    return base.train(), named


def in_settings(settings: LoraSettings) -> dict:
    """Return adapter settings as settings of a run."""
    return dict(tuner_type="lora", lora_rank=settings.rank, lora_alpha=settings.alpha, use_rslora=settings.use_rslora,
                target_modules=list(settings.target_modules), target_regex=settings.target_regex,
                rank_pattern=dict(settings.rank_pattern), alpha_pattern=dict(settings.alpha_pattern))  # fmt: skip


def write_initial_adapter(cfg: Config) -> Path:
    """Return the adapter that a run begins with; draws one and writes it beside the output if none is given."""
    if cfg.tuner.adapters:
        return Path(cfg.tuner.adapters)
    shape = ModelShape.from_pretrained(cfg.model.model)
    settings = LoraSettings.from_config(cfg.tuner, shape)
    sizes = own_sizes(settings, shape)
    read, out = initial_adapter(sizes, cfg.run.seed), Path(tempfile.mkdtemp())
    config = settings.to_peft(dict.fromkeys(map(find_module, sizes)), cfg.model.model, is_multimodal=shape.vision is not None)
    write_adapter(out, ((peft_name(name, shape), read(name)) for name in sizes), config, {})
    return out
