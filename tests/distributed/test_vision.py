"""Models that see, against transformers in float64: log-probs, a step's gradients of language model, aligner and tower, exports, pushes.

A few layouts of each family; `tools/vision_parity.py` runs all of them. Every trap that leaves no error is set here once, as a mutation.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from tests import parity_cases as cases
from tests import vision_cases as vision
from tests.ranks import run_ranks
from tests.tiny_models import load_tiny

ALL_TRAINS = dict(freeze_vit=False, freeze_aligner=False)
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
        model = load_tiny(path, "float64")
        with cases.float32_means_float64():
            logprobs = [vision.logprobs_of(model, sample, 0.9) for sample in batches[0]]
        return path, batches, logprobs

    return prepare


@functools.cache
def reference(path, steps: int, **changes):
    """transformers' steps on the rollout of a checkpoint."""
    batches = vision.rollout(path, num_steps=steps)
    return cases.reference(path, cases.settings(**ALL_TRAINS | changes), batches)


def score_and_train(rank, world, path, cfg, batches):
    """(log-probs of the first batch before any step, what training comes to). What is exported then is the checkpoint, bit for bit."""
    from megatron_grpo.weights.reader import HfReader

    found = []

    def before(policy):
        read, exported = HfReader(path), dict(policy.named_weights())
        assert exported.keys() == read.names
        assert all(torch.equal(exported[name], read(name)) for name in exported)
        found.append(policy.score(batches[0]))

    return found, cases.train(rank, world, path, cfg, batches, before)


@pytest.mark.parametrize(("family", "layout", "changes"), CASES, ids=[f"{family}, {layout}" for family, layout, _ in CASES])
def test_logprobs_gradients_and_exports_are_those_of_transformers(prepared, family, layout, changes):
    path, batches, logprobs = prepared(family)
    rates = {name: value for name, value in changes.items() if name.endswith("_lr")}
    where = vision.LAYOUTS[layout]
    cfg = cases.settings(**{"share_prompts": "false", "micro_batch_size": 2} | ALL_TRAINS | where.settings | changes)
    for (scored,), trained in run_ranks(score_and_train, where.world_size, path, cfg, batches):
        assert max(np.abs(a - b).max() for a, b in zip(scored, logprobs, strict=True)) < 1e-5
        found = cases.distance(trained, reference(path, 2, **rates))
        assert found.within(), found
