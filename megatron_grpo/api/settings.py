"""Settings of a Python program as a configuration file: of our GRPOConfig, of TRL's, or of a mapping."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from megatron_grpo.core.base.errors import config_error
from megatron_grpo.run.config.grpo_config import GRPOConfig

SOURCE = "GRPOConfig"  # name of the file: messages say `micro_batch_size (GRPOConfig)`
# Fields that TRL's and transformers' __post_init__ overwrite, so that their values do not show what was passed.
_DERIVED = ("accelerator_config", "dataloader_pin_memory", "debug", "disable_tqdm", "generation_batch_size", "logging_dir",
            "pad_to_multiple_of")  # fmt: skip


def explicit_settings(args: Any) -> dict[str, Any]:
    """Return the settings that a user passed, by name.

    Args:
        args: A GRPOConfig of megatron_grpo or of TRL, a mapping of names to values, or None.

    Raises:
        ConfigError: If it is something else.
    """
    if args is None:
        return {}
    if isinstance(args, GRPOConfig):
        return dict(args.explicit)
    if isinstance(args, Mapping):
        return dict(args)
    if any(base.__module__.startswith("trl.") and base.__name__ == "GRPOConfig" for base in type(args).__mro__):
        return {"dialect": "trl"} | _read_trl_config(args)
    raise config_error("args", f"args is a {type(args).__name__}: pass a GRPOConfig of megatron_grpo or of TRL, or a mapping.")


def _read_trl_config(args: Any) -> dict[str, Any]:
    """Return the fields of TRL's GRPOConfig that differ from their defaults.

    They are compared with the defaults of the fields: an instance of defaults alone cannot be made on a CPU, where bf16 is refused.
    """
    values = {field.name: getattr(args, field.name) for field in fields(args) if field.init and field.name not in _DERIVED}
    values = {field.name: values[field.name] for field in fields(args) if field.name in values and values[field.name] != _default(field)}
    if values.get("bf16"):  # the default: true unless fp16 is
        del values["bf16"]
    if values.get("report_to") == []:
        del values["report_to"]
    if values.get("steps_per_generation") == args.gradient_accumulation_steps:  # as it is derived if neither size is passed
        del values["steps_per_generation"]
    return values


def _default(field: Field) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def write_settings(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Write settings as a YAML file and return the command line that names it.

    Args:
        folder: Folder of the file.
        settings: Values by name.
    """
    import yaml

    path = folder / SOURCE
    path.write_text(
        yaml.safe_dump({name: _as_yaml_value(value, name) for name, value in settings.items()}, sort_keys=False), encoding="utf-8"
    )
    return ["--config", str(path)]


def _as_yaml_value(value: Any, name: str) -> Any:
    """Return a value as YAML can hold it."""
    if isinstance(value, enum.Enum):
        return _as_yaml_value(value.value, name)
    if isinstance(value, Mapping):
        return {str(key): _as_yaml_value(item, name) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_yaml_value(item, name) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):  # a number of NumPy or torch
        return value.item()
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise config_error(name, f"{name} is a {type(value).__name__}, which a setting cannot be: pass text, numbers, lists or dicts of them.")
