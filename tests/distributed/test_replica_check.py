"""The replica check names differing copies before the optimizer step; tools/replica_faults.py has all other faults and the clean runs."""

from __future__ import annotations

import math

import pytest

from tests import parity_cases as cases
from tests import replica_check_cases as checks
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny

HERE = (
    "loss over the local vocabulary",
    "log-probs off by log(TP) on all ranks",
    "a cut weight that is not marked",
    "a layer with another tensor-parallel group",
    "a bfloat16 weight that is not its float32 copy",
    "an adapter that went its own way",
    "divided by the share's own number of tokens",
    "weights that were not gathered",
    "a moment that drifts",
    "a gradient that is not summed over DP",
    "a copy of an expert",
    "a norm whose parts are not summed over TP",
    "the tied embedding's gradient that is not summed",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: write_tiny(folder / name, **cases.MODELS[name]) for name in ("dense", "MoE")}


@pytest.fixture(scope="module")
def found(models):
    batches = {name: cases.stored_rollout(path, vocab=125, num_steps=2, stale=0) for name, path in models.items()}
    return checks.seeded(HERE, models, batches)


@pytest.mark.parametrize("name", HERE)
def test_replica_check_names_the_fault_and_nothing_before_it(found, name):
    fault, by_rank = checks.FAULTS[name], found[name]
    assert len(set(by_rank)) == 1, "all ranks say the same"
    before, after, gap = by_rank[0]
    assert before is None
    if fault.says is None:
        assert after is None and "nats on a token" in gap
    else:
        assert after.startswith("replica check before optimizer step 2 (all replicas were equal at step 1): ")
        assert fault.says in after.split(";")[0]


def test_replica_check_names_ranks_of_the_differing_copy():
    from megatron_grpo.commands.analysis.replica_check import ReplicaCheckResult, ReplicaMismatch

    one = ReplicaMismatch(kind="gradient", name="w", over="DP", copies=((0, 7), (1, 7), (2, 9), (3, 7)))
    assert str(one) == "values of the gradient of w differ between the data and context parallel ranks 2 and 0, 1, 3"
    finding = str(ReplicaCheckResult(step=41, equal_at=21, mismatches=(one,) * 6))
    assert finding.startswith(
        "replica check before optimizer step 41 (all replicas were equal at step 21): values of the gradient of w"
    ) and finding.endswith("and 2 more")


def test_replica_check_ignores_nan_in_both_precisions(models):
    """The bfloat16 weight and its float32 copy are both NaN, which is not a difference; the gradient check reports it."""

    def body(rank, world):
        from megatron_grpo.commands.analysis.replica_check import _rounded
        from megatron_grpo.core.policy.sharded_state import iterate_runs

        policy = cases.build(models["dense"], cases.settings(torch_dtype="bfloat16"), world)
        before = len(_rounded(policy))
        weight, start, _, states = next(iterate_runs(policy.optimizer))
        states["param"].data.view(-1)[0] = math.nan
        apart = len(_rounded(policy))
        weight.data.view(-1)[start] = math.nan
        return before, apart, len(_rounded(policy))

    assert run_ranks(body, 1, timeout=60) == [(0, 1, 0)]
