"""Modules that an adapter's configuration selects, against PEFT on the same file."""

from __future__ import annotations

import json

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists

from megatron_grpo.core.weights.lora import LoraSettings, linear_modules
from megatron_grpo.core.weights.shape import ModelShape
from tests.unit.weights.tiny import make_model_config


@pytest.mark.parametrize(
    "said",
    [
        {"exclude_modules": r"model\.layers\.0"},  # a module's name only begins so
        {"exclude_modules": r"layers\.0\.mlp\.up_proj"},  # it only ends so
        {"exclude_modules": r".*\.[kv]_proj"},
        {"exclude_modules": r"model\.layers\.\d\.self_attn"},
        {"exclude_modules": ["up_proj", "layers.1.self_attn.q_proj"]},
        {"target_modules": r"model\.layers\.0\.mlp"},
        {"target_modules": r".*\.mlp\.\w+", "exclude_modules": r".*layers\.1.*"},
        {"target_modules": ["proj", "q_proj", "0.mlp.up_proj"]},
    ],
    ids=str,
)
def test_lora_modules_equal_peft(tmp_path, said):
    names = [module.name for module in linear_modules(ModelShape.from_hf(make_model_config("qwen3")))]
    config = {"target_modules": sorted({name.rsplit(".", 1)[1] for name in names}), **said}
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}))
    ours, theirs = LoraSettings.from_peft(tmp_path), LoraConfig(r=4, **config)
    found = [name for name in names if ours.is_target(name)]
    assert found == [name for name in names if check_target_module_exists(theirs, name)]
    assert bool(found) == (said != {"target_modules": r"model\.layers\.0\.mlp"})
