"""The resolved configuration as YAML that `--config` takes again."""

from __future__ import annotations

from pathlib import Path

from megatron_grpo.base.files import write_whole
from megatron_grpo.config.config import Config

# What another launch may derive differently.
_NOT_WRITTEN = ("derived", "launcher", "implied")


def as_yaml(cfg: Config) -> str:
    """Every setting by section, but for values that follow from others or from the launcher: the file may be used with another layout."""
    import yaml

    sections = {
        group: {name: value for name, value in vars(section).items() if not cfg.sources.get(name, "").startswith(_NOT_WRITTEN)}
        for group, section in cfg.groups().items()
    }
    if cfg.plan.dialect:  # everything has been translated: the file speaks the native vocabulary
        sections["plan"]["dialect"] = None
    if cfg.foreign:
        names = (
            "micro_batch_size",
            "global_batch_size",
            "generation_batch_size",
            "num_generations",
            "num_iterations",
            "allow_unaligned_generation",
        )
        sections["batch"] |= {name: getattr(cfg.batch, name) for name in names}
    return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)


def write_config(cfg: Config, path: str | Path) -> None:
    """Whole or not at all."""
    write_whole(path, as_yaml(cfg))
