"""Random config.json files with unusual but valid sizes, for `tests/odd_sizes.py`."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests import parity_cases as cases
from tests.tiny_models import HYBRIDS, NARROW

LONGEST = 40  # tokens of a sequence
KINDS = ("sliding_attention", "full_attention")
HYBRID_KINDS = ("linear_attention", "full_attention")
MULTIPLES = ("gemma3_text", "llama")  # of the heads are their widths, transformers says
SPARSE = (
    *("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2", "gpt_oss", "qwen3_next"),
    "qwen3_5_moe_text",
)


def draw(rng: random.Random, family: str, layout: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return settings of `write_tiny`. Most of the sizes are divisible by the sizes of `layout`; the others must be rejected."""
    layout = layout or {}
    tp, ep, stages = layout.get(cases.TP, 1), layout.get(cases.EP, 1), layout.get(cases.PP, 1) * layout.get(cases.VPP, 1)
    etp = layout.get(cases.ETP) or tp

    def size(*sizes: int, ranks: int = 1) -> int:
        """Return one of these sizes, usually made a multiple of the number of ranks."""
        chosen = rng.choice(sizes)
        return chosen if rng.random() < 0.05 else -(-chosen // ranks) * ranks

    heads = size(1, 3, 5, 6, 7, 12, ranks=tp)
    groups = [n for n in range(1, heads + 1) if heads % n == 0 and (n % tp == 0 or rng.random() < 0.3)]
    head_dim = rng.choice([6, 10, 14, 24, 40])
    layers = size(1, 2, 3, 5, ranks=stages)
    chosen: dict[str, Any] = {
        "heads": heads, "kv_heads": rng.choice(groups or [heads]), "head_dim": head_dim, "layers": layers, "tied": rng.random() < 0.5,
        "hidden": heads * rng.choice([4, 6, 9]) if family in MULTIPLES else size(22, 27, 36, 45, 60, ranks=tp), "std": 0.1,
        "ffn": size(7, 33, 48, 66, ranks=max(tp, etp)), "vocab": rng.choice([61, 97, 125, 131, 256]), "max_positions": 64,
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 3e-4, 0.01]),
    }  # fmt: skip
    if family in NARROW:  # config.json may name a head_dim all the same
        chosen |= {"hidden_size": chosen.pop("hidden")}
    if rng.random() < 0.03:
        chosen["hidden_activation" if family == "gemma3_text" else "hidden_act"] = rng.choice(["relu", "gelu"])
    if family in SPARSE:
        chosen |= _experts(rng, family, layers, size, ep=ep, etp=etp, tp=tp)
    chosen |= _hybrid(rng, chosen, tp=tp) if family in HYBRIDS else _OWN.get(family, lambda rng, chosen: {})(rng, chosen)
    return chosen | ({"rope_parameters": rope} if (rope := _ropes(rng, family)) else {})


def _experts(rng, family: str, layers: int, size, *, ep: int, etp: int, tp: int) -> dict[str, Any]:
    experts = size(3, 4, 5, 6, 8, ranks=ep)
    found: dict[str, Any] = {"experts": experts, "num_experts_per_tok": rng.randint(2 if rng.random() < 0.9 else 1, experts)}
    width = size(5, 12, 18, ranks=etp)
    if family in ("qwen2_moe", "qwen3_moe"):
        found |= {"norm_topk_prob": _coin(rng), "decoder_sparse_step": rng.choice([1, 1, 2]), "moe_intermediate_size": width}
        found["mlp_only_layers"] = [layer for layer in range(layers) if rng.random() < 0.2]
    if family == "qwen3_next":
        found |= {"norm_topk_prob": _coin(rng), "mlp_only_layers": [layer for layer in range(layers) if rng.random() < 0.2]}
    if family in HYBRIDS or family == "qwen2_moe":
        found |= {"moe_intermediate_size": width, "shared_expert_intermediate_size": -(-rng.choice([7, 24]) // tp) * tp}
    if family in ("deepseek_v3", "glm4_moe", "glm4_moe_lite"):
        groups = [n for n in range(1, experts) if experts % n == 0 and experts // n > 1]
        n_group = rng.choice(groups)
        found |= {
            "n_group": n_group, "topk_group": rng.randint(1, n_group), "norm_topk_prob": rng.random() < 0.95,
            "first_k_dense_replace": rng.choice([0, 1, layers]), "n_shared_experts": rng.choice([1, 1, 2, 0]),
            "routed_scaling_factor": rng.choice([1.0, 0.7, 2.5]), "moe_intermediate_size": -(-width // tp) * tp,
        }  # fmt: skip
        most = experts // n_group * found["topk_group"]
        some = [most, rng.randint(min(2, most), most)] if found["topk_group"] == n_group else [2 * found["topk_group"]]
        found["num_experts_per_tok"] = rng.choice(some) if rng.random() < 0.9 else rng.randint(1, most)
    return found


def _coin(rng) -> bool:
    return rng.random() < 0.5


def _window(rng) -> int:
    return 0 if rng.random() < 0.03 else rng.choice([1, 2, 3, 5, 8, LONGEST - 1, LONGEST, 1000])


def _pattern(rng, layers: int) -> list[str]:
    return rng.choice([[KINDS[0]] * layers, [KINDS[1]] * layers, [rng.choice(KINDS) for _ in range(layers)]])


def _bias(rng, chosen) -> dict[str, Any]:
    return {"attention_bias": _coin(rng)}


def _qwen(rng, chosen) -> dict[str, Any]:
    found: dict[str, Any] = {"use_sliding_window": _coin(rng), "sliding_window": _window(rng), "max_window_layers": rng.randint(0, 3)}
    return found | ({"layer_types": _pattern(rng, chosen["layers"])} if found["use_sliding_window"] and _coin(rng) else {})


def _deepseek(rng, chosen) -> dict[str, Any]:
    return {
        "q_lora_rank": rng.choice([None, 20, 14]), "kv_lora_rank": rng.choice([12, 22]), "qk_nope_head_dim": rng.choice([6, 10]),
        "qk_rope_head_dim": rng.choice([4, 6]), "v_head_dim": rng.choice([6, 14]), "rope_interleave": _coin(rng),
        "num_key_value_heads": chosen["heads"], "attention_bias": rng.random() < 0.1,
    }  # fmt: skip


def _gpt_oss(rng, chosen) -> dict[str, Any]:
    return {
        "sliding_window": _window(rng), "layer_types": _pattern(rng, chosen["layers"]), "swiglu_limit": rng.choice([7.0, 0.3]),
        "swiglu_alpha": rng.choice([1.702, 1.0]), "attention_bias": rng.random() < 0.7,
    }  # fmt: skip


def _hybrid(rng, chosen, *, tp: int) -> dict[str, Any]:
    keys = tp * rng.choice([1, 2, 3])
    kinds = [rng.choice(HYBRID_KINDS) for _ in range(chosen["layers"])]
    kinds[rng.randrange(len(kinds))] = HYBRID_KINDS[1]  # transformers runs no model without attention
    return _bias(rng, chosen) | {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * rng.choice([1, 2, 3]),
        "linear_key_head_dim": rng.choice([5, 12, 20]),
        "linear_value_head_dim": rng.choice([6, 11, 20]),
        "linear_conv_kernel_dim": rng.choice([2, 4, 5]),
        "layer_types": None if chosen["layers"] > 3 and _coin(rng) else kinds,
        "head_dim": rng.choice([8, 12, 16]),
        "std": 0.06,
    }


def _windowed(rng, chosen) -> dict[str, Any]:
    return _bias(rng, chosen) | {"sliding_window": _window(rng), "layer_types": _pattern(rng, chosen["layers"])}


_OWN = {
    "llama": lambda rng, chosen: _bias(rng, chosen) | {"mlp_bias": _coin(rng)},
    "mistral": lambda rng, chosen: {"sliding_window": rng.choice([None, _window(rng)])},
    "mixtral": lambda rng, chosen: {"sliding_window": rng.choice([None, _window(rng)])},
    "qwen2": _qwen,
    "qwen3": lambda rng, chosen: _bias(rng, chosen) | _qwen(rng, chosen),
    "qwen3_moe": lambda rng, chosen: _bias(rng, chosen) | {k: v for k, v in _qwen(rng, chosen).items() if k != "layer_types"},
    "deepseek_v3": _deepseek,
    "glm4_moe_lite": lambda rng, chosen: (
        _deepseek(rng, chosen) | {"first_k_dense_replace": None, "mlp_layer_types": rng.choices(["dense", "sparse"], k=chosen["layers"])}
    ),
    "minimax_m2": lambda rng, chosen: {"rotary_dim": rng.choice([2, 4, 6])},
    "qwen2_moe": lambda rng, chosen: {"qkv_bias": _coin(rng)} | _qwen(rng, chosen),
    "glm4_moe": lambda rng, chosen: _bias(rng, chosen) | {"use_qk_norm": _coin(rng)},
    "gpt_oss": _gpt_oss,
    "olmo2": _bias,
    "olmo3": _windowed,
    "gemma3_text": lambda rng, chosen: (
        _windowed(rng, chosen)
        | {"query_pre_attn_scalar": rng.choice([7, 24, 256]), "final_logit_softcapping": rng.choice([None] * 20 + [30.0])}
    ),
}


def _ropes(rng, family: str) -> dict[str, Any] | None:
    one = partial(_rope, rng, family)
    if family in ("olmo3", "gemma3_text"):
        return {KINDS[0]: one(), KINDS[1]: one()} if rng.random() < 0.7 else None
    return one() if rng.random() < 0.85 else None


def _rope(rng, family: str) -> dict[str, Any]:
    kind = rng.choice(["default", "default", "linear", "llama3", "yarn", "yarn", rng.choice(["dynamic", "longrope", "linear"])])
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice([500.0, 1e4, 1e6])}
    if kind in ("linear", "llama3", "yarn", "dynamic"):
        found["factor"] = rng.choice([4.0, 6.5])
    if kind in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = 16
    if kind == "llama3":
        found |= {"low_freq_factor": rng.choice([1.0, 0.5]), "high_freq_factor": rng.choice([4.0, 2.0])}
    if kind == "yarn":
        found |= rng.choice([{}, {"attention_factor": 1.3}, {"mscale": 0.7, "mscale_all_dim": 1.2}, {"mscale": 0.7}])
        found |= rng.choice([{}, {"beta_fast": 8.0, "beta_slow": 0.5}]) | rng.choice([{}, {"truncate": False}])
    elif family in ("deepseek_v3", "glm4_moe_lite") and _coin(rng):
        found |= {"mscale_all_dim": 1.2, "factor": found.get("factor", 3.0)}
    if kind == "longrope":
        found |= {"short_factor": [1.0], "long_factor": [1.5], "factor": 2.0, "original_max_position_embeddings": 16}
    if family == "glm4_moe" or family in HYBRIDS:
        found["partial_rotary_factor"] = rng.choice([0.5, 0.25, 0.75, 1.0])
    return found


def older_spelling(path: Path) -> None:
    """Return the config.json with the keys of transformers 4: rope scaling in one field, one theta per kind of layer."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    given = config.pop("rope_parameters", None) or {}
    local, whole = (given.get(kind) for kind in KINDS)
    if config["model_type"] == "olmo3" and any(one and one["rope_theta"] != 5e5 for one in (local, whole)):
        return  # its versions read one theta otherwise, so that is refused
    if (local or {}).get("rope_type", "default") != "default":
        return  # had no spelling
    if local and config["model_type"] == "gemma3_text":
        config["rope_local_base_freq"] = local["rope_theta"]
    given = dict(whole or given)
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in given:
            config[key] = given.pop(key)
    if given.get("rope_type", "default") != "default":
        config["rope_scaling"] = given
    file.write_text(json.dumps(config))


def forget(rng: random.Random, path: Path) -> None:
    """Remove up to three keys of config.json, so that the family's defaults apply."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    for key in rng.sample(sorted(config.keys() - {"architectures", "model_type"}), 3):
        del config[key]
    if "layer_types" in config and config["model_type"] in ("gemma3_text", "gpt_oss", "olmo3") and _coin(rng):
        del config["layer_types"]
    if "layer_types" not in config and config["model_type"] == "gemma3_text":
        config["sliding_window_pattern"] = rng.randint(1, 3)
    file.write_text(json.dumps(config))
