"""Models of unusual sizes, one of each family: rejected with an error, or equal to transformers. `tools/parity.py --odd` draws more."""

from __future__ import annotations

import json

import pytest
from transformers.utils import logging

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.weights.shape import ModelShape
from tests import odd_sizes as odd
from tests import parity_cases as cases
from tests.odd_draws import KINDS
from tests.tiny_models import FAMILIES, write_tiny

logging.disable_progress_bar()


@pytest.mark.parametrize(("layout", "first"), [("1", 0), ("TP2 SP", 12)])
def test_odd_sizes_are_refused_or_equal_transformers(tmp_path, layout, first):
    found = odd.outcomes(tmp_path, range(first, first + len(FAMILIES)), 0, cases.LAYOUTS[layout])
    wrong = {key: (one.said, changes) for key, (one, changes) in found.items() if one.kind not in ("equal", "refused", "undecided")}
    assert not wrong and len([one for one, _ in found.values() if one.kind == "equal"]) >= 6


def test_odd_sizes_window_mutation_is_detected(tmp_path):
    def widen(policy):
        for chunk in policy.chunks:
            for module in chunk.modules():
                if getattr(module, "window", None):
                    module.window += 1

    found = odd.outcomes(tmp_path, [3, 15], 0, cases.LAYOUTS["1"], tamper=widen)
    windowed = [one for one, changes in found.values() if 0 < (changes.get("sliding_window") or 0) < 9 and one.kind != "refused"]
    assert windowed and all(one.kind == "wrong" and "log-probs" in one.said and "gradient" in one.said for one in windowed)


STRETCHED = {"rope_type": "yarn", "factor": 4.0, "truncate": False}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window must be at least 1 or null, got 0"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias is true"),
        ("olmo3", {"rope_parameters": dict.fromkeys(KINDS, STRETCHED)}, "truncate is false"),
        ("gemma3_text", {"rope_parameters": None, "rope_scaling": STRETCHED}, "truncate is false"),
    ],
)
def test_config_json_values_that_are_computed_differently_are_errors(tmp_path, family, changes, words):
    file = write_tiny(tmp_path, family) / "config.json"
    with pytest.raises(ConfigError, match=words):
        ModelShape.from_hf(json.loads(file.read_text()) | changes)
