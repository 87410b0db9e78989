"""Write core/weights/config_fields.json: the fields of each family's config.json.

    python tools/config_fields.py

Types and defaults come from the configuration classes of the installed transformers. Two lists of the file are maintained by hand: `idle`
fields change nothing that is computed here, and `refused` fields must have their default. All other fields are read.
`tests/unit/weights/test_config_fields.py` checks the file.
"""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from typing import Any

from megatron_grpo.core.weights.families import FAMILIES, FILE

# Fields of config.json that transformers reads although no class declares them: types and default.
ROTARY_FACTOR = "int|float|NoneType"
COMMON_EXTRAS: dict[str, list[Any]] = {
    "is_causal": ["bool", True],
    "per_layer_config": ["NoneType", None],
    "partial_rotary_factor": [ROTARY_FACTOR, None],
    "head_dim": ["int|NoneType", None],
}
HYBRID: dict[str, list[Any]] = {
    "partial_rotary_factor": [ROTARY_FACTOR, 0.25],
    "full_attention_interval": ["int", 4],
    "attn_output_gate": ["bool", True],
    "output_gate_type": ["str|NoneType", None],
}
HYBRIDS = (
    *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
)
FAMILY_EXTRAS = {
    "Glm4MoeForCausalLM": {"partial_rotary_factor": [ROTARY_FACTOR, 0.5]},
    **dict.fromkeys(HYBRIDS, HYBRID),
    "Qwen3VLMoeForConditionalGeneration": {"tie_word_embeddings": ["bool", False]},  # the whole model's, not the text model's
    "MiniMaxM2ForCausalLM": {"rotary_dim": ["int|NoneType", None]},
    "Gemma3ForCausalLM": {"sliding_window_pattern": ["int", 6]},
}
THETAS = {"global": "rope_theta", "local": "rope_local_base_freq"}
KINDS = ("int", "float", "bool", "str", "list", "dict", "NoneType")


def find_classes() -> dict[str, list[type]]:
    """Return the configuration classes of each family: the text model's, if it has its own, then that of the whole model."""
    import transformers
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    kinds = {name: kind for kind, name in {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}.items()}
    found = {"every family": [PreTrainedConfig]}
    for family in FAMILIES:
        whole = CONFIG_MAPPING[kinds[family]] if family != "Gemma3ForCausalLM" else transformers.Gemma3TextConfig
        found[family] = [*filter(None, [whole.sub_configs.get("text_config")]), whole]
    return found


def read_fields(kinds: list[type]) -> dict[str, list[Any]]:
    """Return the JSON types and the default of each field.

    Args:
        kinds: Configuration classes; the first has precedence.
    """
    found = {
        field.name: [_format_type(str(field.type)), _make_json_value(field.default)]
        for kind in reversed(kinds)
        for field in dataclasses.fields(kind)
    }
    theta = kinds[0].default_theta if "rope_parameters" in found else {}
    thetas = theta if isinstance(theta, dict) else {"global": theta}
    return found | {THETAS[layers]: ["int|float", value] for layers, value in thetas.items()}


def _format_type(annotation: str) -> str:
    if "Literal" in annotation:
        return "str|NoneType"
    outer = re.sub(r"dict\[[^]]*\]", "dict", annotation.replace("typing.Any", "str")).replace("None", "NoneType")
    lists = re.findall(r"list\[\w+\]", outer)
    words = re.findall(r"\w+", re.sub(r"(list|tuple)\[[^]]*\]", "", outer))
    return "|".join([kind for kind in KINDS if kind in words] + lists)


def _make_json_value(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else None if value is dataclasses.MISSING else value


def make_table() -> dict[str, Any]:
    """Return the part of the table that transformers determines."""
    common, families = {}, {}
    for family, kinds in find_classes().items():
        fields = read_fields(kinds)
        if family == "every family":
            common = fields | COMMON_EXTRAS
            continue
        names = {alias: name for kind in kinds for alias, name in kind.attribute_map.items()}
        pairs = {**names, **{name: alias for alias, name in names.items()}}
        families[family] = {
            "fields": {name: said for name, said in fields.items() if said != common.get(name)} | FAMILY_EXTRAS.get(family, {}),
            "aliases": {alias: name for alias, name in pairs.items() if name in fields and alias not in fields},
        }
    return {"every family": common, "families": families}


def format_table(table: dict[str, Any]) -> str:
    """Return the text of the file."""
    text = json.dumps({key: value for key, value in table.items() if key != "families"}, indent=None)[:-1] + ', "families": {'
    lines = [*textwrap.wrap(text, 140, break_on_hyphens=False)]
    for family, said in table["families"].items():
        last = "" if family == list(table["families"])[-1] else ","
        lines += textwrap.wrap(f'"{family}": {json.dumps(said)}{last}', 140, break_on_hyphens=False)
    return "\n".join([*lines, "}}"]) + "\n"


if __name__ == "__main__":
    by_hand = {key: json.loads(FILE.read_text(encoding="utf-8"))[key] for key in ("idle", "refused")}
    FILE.write_text(format_table({**by_hand, **make_table()}), encoding="utf-8")
