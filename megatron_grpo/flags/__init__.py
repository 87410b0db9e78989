"""Command lines and configuration files -> `Config`. Flags, YAML keys, types, units and defaults all come from `config.py`."""

from megatron_grpo.flags.build import Parsed, parse, resolve
from megatron_grpo.flags.table import Dialect, Setting, canonical, names, table

__all__ = ["Dialect", "Parsed", "Setting", "canonical", "names", "parse", "resolve", "table"]
