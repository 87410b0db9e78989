"""Command lines and configuration files -> `Config`.

Flags, YAML keys, types, units and defaults are all defined in core/settings.py and settings.py.
"""

from megatron_grpo.run.config.parse import ParsedConfig, parse, resolve
from megatron_grpo.run.config.table import Setting, canonical, names, table

__all__ = ["ParsedConfig", "Setting", "canonical", "names", "parse", "resolve", "table"]
