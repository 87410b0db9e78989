"""Steps with groups of equal rewards: gradients with and without computing these rows, against float64, and the computed rows."""

from __future__ import annotations

import numpy as np
import pytest

from tests import lora_cases
from tests import parity_cases as cases
from tests import vision_cases as vision
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

# Rows 0 and 1, 4 and 5 have advantage 0 in the first step, all rows in the second; row 3 is truncated.
EQUAL = (0, 2)
# rows that are computed: none of them fills a micro-batch in these layouts
COMPUTED = {"grpo": 4, "dapo": 3, "GSPO": 4, "cispo, KL, entropy": 7}
CUT = {
    "grpo": cases.CUTS["2 each"],
    "dapo": cases.CUTS["packed"] | cases.SHARED,  # prompts once
    "GSPO": cases.CUTS["1 each"],
    "cispo, KL, entropy": cases.CUTS["2 each"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    found = {}

    def get(model: str):
        if model not in found:
            path = write_tiny(tmp_path_factory.mktemp("models") / model, **cases.MODELS[model])
            batches = equalize_rewards(cases.stored_rollout(path, num_steps=2, vocab=125))
            right = {loss: cases.reference(path, cases.settings(**chosen), batches) for loss, chosen in cases.ZERO_GRADIENT_LOSSES.items()}
            found[model] = path, batches, right
        return found[model]

    return get


def equalize_rewards(steps):
    """Return rewards that are equal in half of the groups in the first step, and in all groups in the second."""
    first, second = steps
    return [*cases.with_zero_std([first], *EQUAL), *cases.with_zero_std([second], 0, 1, 2, 3)]


def train(rank, world, path, cfg, batches, parallel):
    """Return (result of training, (data-parallel rank, rows computed in each step))."""
    rows = []

    def count(policy):
        take_step = policy.train_step

        def counted(batch):
            rows.append([micro.rows[place][1] for micro in batch.micro_batches for place in np.unique(micro.sequence)])
            return take_step(batch)

        policy.train_step = counted

    return cases.train(rank, world, path, cfg, batches, count, parallel=parallel), (parallel.dp_rank, rows)


def read_computed_rows(by_rank) -> tuple[list[int], list[int]]:
    """Return the rows of both steps from what each rank's `train` returned."""
    replica_rows = dict(rows for _, rows in by_rank).values()
    return tuple(sorted(row for rows in replica_rows for row in rows[step]) for step in (0, 1))


def find_step(made, name: str, *, computes_all: bool):
    """Return {loss: (result of training, rows computed in each step by data-parallel rank)} on each rank."""
    layout = cases.LAYOUTS[name]
    path, batches, _ = made("MoE" if layout.needs_experts else "dense")

    def body(rank, world):
        parallel, found = cases.join(cases.settings(**layout.settings), world), {}
        for loss, chosen in cases.ZERO_GRADIENT_LOSSES.items():
            cfg = cases.settings(**layout.settings | chosen | CUT[loss], compute_zero_advantage_rows=computes_all)
            found[loss] = train(rank, world, path, cfg, batches, parallel)
        return found

    return run_ranks(body, layout.world_size, timeout=200)


@pytest.mark.parametrize("name", cases.ZERO_GRADIENT_LAYOUTS)
def test_zero_gradient_rows_computed_or_not_equal_float64(made, name):
    right = made("MoE" if cases.LAYOUTS[name].needs_experts else "dense")[2]
    left_out, all_rows = (find_step(made, name, computes_all=computes_all) for computes_all in (False, True))
    for loss, num_rows in COMPUTED.items():
        both = [one[loss][0] for one in (left_out[0], all_rows[0])]
        distances = [cases.distance(one[loss][0], right[loss]) for one in (*left_out, *all_rows)]
        assert all(distance.within(loss=1e-5) for distance in distances), (loss, cases.merge_worst(distances))
        assert both[0].losses == pytest.approx(both[1].losses, rel=1e-6, abs=1e-7), loss
        first, second = read_computed_rows([one[loss] for one in left_out])
        assert len(first) == num_rows
        assert len(second) == (7 if "KL" in loss else 0), "a step in which nothing has a gradient"
        assert both[0].grad_norms[1] == both[1].grad_norms[1] == 0.0 or "KL" in loss


@pytest.mark.parametrize("what", ["adapters", "images"])
def test_zero_gradient_rows_with_adapters_and_images_equal_float64(tmp_path, what):
    if what == "adapters":
        path, layout, ways = write_tiny(tmp_path / "model", **cases.MODELS["dense"]), "TP2 SP", cases.CUTS["packed"]
        rollout = cases.stored_rollout(path, num_steps=2, vocab=125)
        ways |= dict(tuner_type="lora", adapters=str(lora_cases.write_random_adapter(path, tmp_path / "adapter")))
    else:
        path, layout, ways = vision.write_vlm(tmp_path / "model", "qwen2_5_vl"), "DP2", vision.ALL_TRAINS | cases.CUTS["1 each"]
        rollout = vision.rollout(path, num_steps=2)
    batches = equalize_rewards(rollout)
    where, options = cases.LAYOUTS[layout], dict(model=str(path)) | ways | cases.SHARED
    right = cases.reference(path, cases.settings(**options), batches)

    def body(rank, world):
        parallel = cases.join(cases.settings(**where.settings), world)
        cfgs = [cases.settings(**where.settings | options, compute_zero_advantage_rows=every) for every in (False, True)]
        return [train(rank, world, path, cfg, batches, parallel) for cfg in cfgs]

    by_rank = run_ranks(body, where.world_size, timeout=200)
    distances = [cases.distance(trained, right) for runs in by_rank for trained, _ in runs]
    assert all(distance.within(loss=1e-5) for distance in distances), cases.merge_worst(distances)
    left_out, all_rows = (read_computed_rows([runs[way] for runs in by_rank]) for way in (0, 1))
    assert (left_out, all_rows) == (([2, 3, 6, 7], []), ([*range(8)], [*range(8)]))
