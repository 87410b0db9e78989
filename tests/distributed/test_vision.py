"""Models that see, against transformers in float64: log-probs, a step's gradients of language model, aligner and tower, exports, pushes.

A few layouts of each family; `tools/vision_parity.py` runs all of them. Every trap that leaves no error is set here once, as a mutation.
"""

from __future__ import annotations

import functools

import pytest

from tests import parity_cases as cases
from tests import vision_cases as vision
from tests.ranks import run_ranks

# (family, layout, settings): together every layout that is a way of its own to hold, cut or sum what pictures are.
CASES = [
    ("qwen2_5_vl", "1", dict(share_prompts="true", max_tokens_per_micro_batch=96)),
    ("qwen3_vl", "TP2 SP", {}),
    ("qwen2_vl", "PP2 VPP2", {}),
    ("qwen3_vl", "CP2", dict(share_prompts="true")),
    ("qwen2_5_vl", "DP2", dict(vit_lr=4e-3, aligner_lr=1e-3)),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """family -> (checkpoint, two global batches, transformers' log-probs of the first one in float64)."""

    @functools.cache
    def prepare(family: str):
        path = vision.write_vlm(tmp_path_factory.mktemp(family), family)
        batches = vision.rollout(path, num_steps=2)
        return path, batches, vision.logprobs_in_float64(path, batches[0])

    return prepare


@functools.cache
def reference(path, **changes):
    """transformers' two steps on the rollout of a checkpoint."""
    return cases.reference(path, vision.settings(path, vision.ALL_TRAINS | changes), vision.rollout(path, num_steps=2))


@pytest.mark.parametrize(("family", "layout", "changes"), CASES, ids=[f"{family}, {layout}" for family, layout, _ in CASES])
def test_logprobs_gradients_and_exports_are_those_of_transformers(prepared, family, layout, changes):
    path, batches, logprobs = prepared(family)
    rates = {name: value for name, value in changes.items() if name.endswith("_lr")}
    where = vision.LAYOUTS[layout]
    cfg = vision.settings(path, vision.ALL_TRAINS | changes, where.settings)
    for scored, trained in run_ranks(vision.score_and_train, where.world_size, path, cfg, batches):
        assert vision.far(scored, logprobs) < 1e-5
        found = cases.distance(trained, reference(path, **rates))
        assert found.within(), found
