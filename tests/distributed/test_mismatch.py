"""`mismatch` names the operation with a fault, and none in a clean run. tools/mismatch_faults.py has all faults and layouts."""

from __future__ import annotations

import pytest

from tests.mismatch_cases import CLEAN, FAULTS, LAYOUTS, MODELS, find_mismatches, is_right
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

# One child process each: by model and layout, words of the faults' descriptions.
TAKEN = {
    ("dense", "1"): (
        "rope: frequencies",
        "wrong mask: rows",
        "sliding window",
        "temperature",
        "o of layer 1 stale",
        "stale prefix cache",
        "nothing",
    ),
    ("MoE", "1"): ("two experts", "nothing"),
    ("hybrid", "1"): ("decay of layer 1", "out of layer 2", "gates of layer 3", "nothing"),
    ("hybrid", "TP2 SP"): ("in of layer 1 stale on rank 1", "nothing"),
    ("hybrid MoE", "1"): ("decay of layer 2", "nothing"),
    ("hybrid MoE", "TP2 SP ETP2"): ("nothing",),
    ("flat", "1"): ("nothing",),
    ("dense", "TP2 SP"): ("qkv of layer 2 stale on rank 1", "nothing"),
}


@pytest.mark.parametrize(("model", "layout"), TAKEN)
def test_mismatch_names_the_faulty_operation_and_nothing_without_a_fault(tmp_path, model, layout):
    every = FAULTS + CLEAN
    places = [i for i, one in enumerate(every) if (one.model, one.layout) == (model, layout) and one.what.startswith(TAKEN[model, layout])]
    places += [i for i, one in enumerate(every) if (one.model, one.layout) == (model, layout) and "on rank 1" in one.what]
    assert len(places) == len(TAKEN[model, layout])
    paths = [write_tiny(tmp_path / str(seed), **MODELS[model], seed=seed) for seed in (0, 1)]
    found = run_ranks(find_mismatches, LAYOUTS[layout][0], paths, places, timeout=300)
    for place, one in zip(places, found[0], strict=True):
        assert is_right(every[place], one), (every[place].what, one)
        assert bool(one["named"]) == (one["nats"] > 1e-4)  # it was there to be found: log-probs moved
        if "on rank 1" in every[place].what:
            assert one["ranks"] == (1,)
    assert all(one == found[0] for one in found)  # all ranks end with the same exit code


def test_mismatch_faults_are_distinct_and_use_all_models():
    assert len({one.what for one in FAULTS}) == len(FAULTS) >= 20
    assert {one.model for one in FAULTS + CLEAN} == set(MODELS)
