"""A model's shape from its config.json, wherever that lies on this machine. Read as plain JSON: transformers would cost a second."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.batching.sizes import Model
from megatron_grpo.weights.families import NOT_YET_BY_NAME
from megatron_grpo.weights.fit import layout_problems
from megatron_grpo.weights.shape import ModelShape

# What a config.json means that names its type only, as one written by hand for `plan` may.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def read_shape(model: str) -> tuple[ModelShape | None, list[Problem]]:
    """(shape, problems) of a checkpoint directory, a config.json, or a Hub name that has been downloaded before.

    (None, []) where there is nothing to read: no model is given, or a Hub name that is not on this machine. Nothing is downloaded.
    """
    file = find_config(model)
    if file is None:
        named = [
            {"architectures": [found]} for name, found in NOT_YET_BY_NAME.items() if re.match(name, model) and not Path(model).exists()
        ]
        return _shape(named[0]) if named else (None, [])
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return None, [Problem(flags=("model",), message=f"model: {file} is not valid JSON: {error}.")]
    if not isinstance(config, dict):
        return None, [Problem(flags=("model",), message=f"model: {file} does not hold a model's configuration.")]
    return _shape(_with_architecture(config))


def _shape(config: dict[str, Any]) -> tuple[ModelShape | None, list[Problem]]:
    try:
        return ModelShape.from_hf(config), []
    except ConfigError as error:
        return None, list(error.problems)


def find_config(model: str) -> Path | None:
    """The config.json of `model`, or None."""
    if not model:
        return None
    path = Path(model)
    if path.is_dir():
        return path / "config.json" if (path / "config.json").is_file() else None
    if path.is_file():
        return path if path.suffix == ".json" else None  # any other file is refused where the model is looked for
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = sorted((cache / f"models--{model.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    return snapshots[-1] if snapshots else None


def _with_architecture(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("architectures") or config.get("model_type") not in ARCHITECTURES:
        return config
    return {**config, "architectures": [ARCHITECTURES[config["model_type"]]]}


def rules_of(shape: ModelShape) -> Model:
    """What the rules of the layout need to know of it."""

    def misfits(tp: int, ep: int, etp: int) -> Sequence[tuple[str, str]]:
        if shape.moe is None:  # experts are dealt out for the other model, or not at all
            ep = etp = 1
        # The nearest values that stand in these sentences are about the model alone; ours are about the whole configuration.
        return [
            (problem.flags[0], problem.message.partition(" Use ")[0].rstrip("."))
            for problem in layout_problems(shape, tp=tp, ep=ep, etp=etp)
        ]

    return Model(num_layers=shape.num_layers, num_experts=shape.moe.num_experts if shape.moe else 0, misfits=misfits)
