"""What a config.json can say: the fields of each family's configuration class in transformers, as `tools/config_fields.py` wrote them.

No torch and no transformers. A test holds the table against the installed transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Config = Mapping[str, Any]
FILE = Path(__file__).with_name("config_fields.json")
_TABLE = json.loads(FILE.read_text(encoding="utf-8"))
IDLE = frozenset(_TABLE["idle"])  # change nothing that is computed here
REFUSED = frozenset(_TABLE["refused"])  # where they are not what the class makes them
# Sizes that a config.json says of itself: the class' own would be another model's.
_NEEDED = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "n_routed_experts"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_MAY_BE_ZERO = (
    *("first_k_dense_replace", "n_shared_experts", "max_window_layers", "sliding_window", "rms_norm_eps", "swiglu_alpha", "swiglu_limit"),
)
_WORDS = {
    "int|float": "a number", "int": "a whole number", "float": "a number with a point", "bool": "true or false", "str": "a word",
    "dict": "named values", "list[int]": "a list of whole numbers", "list[str]": "a list of words", "NoneType": "null",
}  # fmt: skip


def fields_of(architecture: str) -> dict[str, tuple[str, Any]]:
    """{field: (the kinds of JSON that it takes, its default)}; few of a family that the table does not have."""
    return {**_TABLE["every family"], **_TABLE["families"].get(architecture, {}).get("fields", {})}


def as_the_class_reads(config: Config, architecture: str, require: Callable[[bool, str], None]) -> dict[str, Any]:
    """What config.json says, under the names of the class' fields, and what the class says where it is silent.

    require: told of what the class does not take, and of what is not computed here.
    """
    found = dict(config)
    for alias, name in _TABLE["families"].get(architecture, {}).get("aliases", {}).items():
        if alias in config and name not in IDLE:
            require(config[alias] == config.get(name, config[alias]), f"{alias} is {config[alias]!r}, and {name} is {config.get(name)!r}.")
            found[name] = config[alias]
    for name, (kinds, default) in fields_of(architecture).items():
        require(name in found or name not in _NEEDED, f"{architecture} needs {name}.")
        value = found.setdefault(name, default)
        is_positive = name not in IDLE and name not in REFUSED and name not in _MAY_BE_ZERO
        words = _WORDS.get(kinds) or " or ".join(_WORDS[kind] for kind in kinds.split("|"))
        is_taken = any(_is(value, kind) for kind in kinds.split("|")) and (not is_positive or type(value) not in (int, float) or value > 0)
        require(is_taken, f"{name} must be {words.replace('a ', 'a positive ', is_positive)}, it is {value!r}.")
        is_computed = name not in REFUSED or value in (default, None) or not is_taken
        require(is_computed, f"{name} is {value!r}, which is not computed here. Leave it out, or use {json.dumps(default)}.")
    return found


def _is(value: Any, kind: str) -> bool:
    """As strictly as transformers: true is no number, and 1 has no point."""
    if kind.startswith("list"):
        return isinstance(value, list) and all(type(one).__name__ in kind for one in value)
    return type(value).__name__ == kind
