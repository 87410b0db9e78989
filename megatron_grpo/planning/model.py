"""What a Hugging Face config.json says about a model's sizes. Read as plain JSON: transformers would cost a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_grpo.batching.sizes import Model
from megatron_grpo.errors import Problem


def read_model_config(model: str) -> tuple[dict[str, Any] | None, list[Problem]]:
    """(config.json of a local checkpoint, problems). None for a name that is not a local path: a Hub name is not looked up here."""
    path = Path(model) if model else None
    if path is None or not path.exists():
        return None, []
    file = path / "config.json" if path.is_dir() else path
    if file.suffix != ".json":
        return None, []
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return None, [Problem(flags=("model",), message=f"model: {file} cannot be read: {error}.")]
    if not isinstance(data, dict):
        return None, [Problem(flags=("model",), message=f"model: {file} does not hold a model's configuration.")]
    return data.get("text_config") or data, []


def shape_of(hf: dict[str, Any]) -> Model:
    """The sizes that the rules of the layout need."""
    heads = hf.get("num_attention_heads")
    return Model(num_layers=hf.get("num_hidden_layers"), num_experts=num_experts(hf), num_attention_heads=heads,
                 num_query_groups=hf.get("num_key_value_heads") or heads)


def num_experts(hf: dict[str, Any]) -> int:
    """0 for a dense model."""
    return hf.get("num_experts") or hf.get("num_local_experts") or hf.get("n_routed_experts") or 0
