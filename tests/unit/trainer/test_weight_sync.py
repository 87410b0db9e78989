"""The check after a weight sync, on differences made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_grpo.core.trainer import weight_sync
from megatron_grpo.core.trainer.weight_sync import (
    SyncStats,
    WeightSyncManager,
    _EngineDifferences,
    _followed_share,
    _problem,
    _trial_problem,
)
from megatron_grpo.core.weights.buckets import NO_VERSION


def make_report(uncached=0.0, cached=0.0, version=3):
    return _EngineDifferences(version=version, uncached=np.full(10, uncached), cached=np.full(4, cached))


def merge_reports(*found):
    """By the names that engines of ranks have."""
    return {f"rank {rank}": one for rank, one in enumerate(found)}


def test_sync_check_accepts_small_differences():
    assert _problem(merge_reports(*[make_report(uncached=1e-4, cached=1e-4)] * 2), 3, is_low_precision=False) is None
    assert _problem(merge_reports(*[make_report(uncached=0.1, cached=0.3)] * 2), 3, is_low_precision=True) is None


def test_sync_check_bounds_worst_token_in_float32_and_means_in_bfloat16():
    one_bad = make_report()
    one_bad.uncached[3] = 0.6
    assert "max 0.6" in _problem(merge_reports(one_bad), 3, is_low_precision=False)
    assert _problem(merge_reports(one_bad), 3, is_low_precision=True) is None  # a router may flip one token
    assert _problem(merge_reports(make_report(uncached=0.3)), 3, is_low_precision=True)
    assert _problem(merge_reports(make_report(cached=0.5)), 3, is_low_precision=True)  # 4 of 14 tokens: an overall mean would hide them


@pytest.mark.parametrize("is_low_precision", [False, True])
def test_sync_check_rejects_nan(is_low_precision):
    assert _problem(merge_reports(make_report(uncached=float("nan"))), 3, is_low_precision=is_low_precision)
    assert _problem(merge_reports(make_report(cached=float("nan"))), 3, is_low_precision=is_low_precision)


def test_sync_check_hint_depends_on_where_engines_differ():
    assert "prefix cache differ: it was not reset" in _problem(merge_reports(*[make_report(cached=2.0)] * 2), 3, is_low_precision=False)
    assert "Only some engines differ" in _problem(merge_reports(make_report(), make_report(uncached=2.0)), 3, is_low_precision=False)
    assert "All engines differ" in _problem(merge_reports(*[make_report(uncached=2.0)] * 2), 3, is_low_precision=False)
    assert "{'rank 1': 2}" in _problem(merge_reports(make_report(), make_report(version=2)), 3, is_low_precision=False)


def test_sync_check_of_trial_adapter_has_its_own_message():
    assert _problem(merge_reports(make_report(version=NO_VERSION)), NO_VERSION, is_low_precision=False) is None
    problem = _problem(merge_reports(*[make_report(uncached=2.0, version=NO_VERSION)] * 2), NO_VERSION, is_low_precision=False)
    assert "does not sample from the trial adapter" in problem and problem.endswith("or the adapter is ignored.")
    assert "ignored" not in _problem(merge_reports(*[make_report(uncached=2.0)] * 2), 3, is_low_precision=False)


def test_trial_adapter_check_separates_engines_that_apply_and_ignore_it():
    """Means of 0.05 differ less than the 0.2 that a bfloat16 push may, and the noise is as large: 250 tokens tell them apart."""
    rng = np.random.default_rng(0)
    untried = rng.normal(-3, 1, 250)
    tried, noise = untried + rng.normal(0, 0.05, 250), rng.normal(0, 0.05, 250)
    takes, ignores, part = (
        _followed_share(start + noise, tried, untried) for start in (tried, untried, (tried + untried) / 2 - (tried - untried) / 4)
    )
    assert abs(takes[0] - 1) < 3 * takes[1] and abs(ignores[0]) < 3 * ignores[1] and 0.05 < takes[1] < 0.08
    assert _trial_problem(merge_reports(takes, takes)) is None
    assert "ignores the trial adapter or applies only a part of it: " in _trial_problem(merge_reports(takes, ignores))
    assert "only a part of it" in _trial_problem(merge_reports(part))
    assert "only a part of it" in _trial_problem(merge_reports(_followed_share(tried + (tried - untried), tried, untried)))  # scaled twice


def test_trial_adapter_without_effect_is_inconclusive():
    untried, noise = np.full(250, -3.0), np.random.default_rng(0).normal(0, 0.05, 250)
    assert "inconclusive" in _trial_problem(merge_reports(_followed_share(untried, untried, untried)))
    assert "inconclusive" in _trial_problem(merge_reports(_followed_share(untried + noise, untried + 0.01, untried)))
    assert _trial_problem(merge_reports(_followed_share(untried + 0.01 + noise / 10, untried + 0.01, untried))) is None
    assert _trial_problem(merge_reports(_followed_share(untried * np.nan, untried + 1, untried)))


@pytest.mark.parametrize("verify", [True, False])
def test_sync_check_runs_again_for_new_server_if_verification_is_enabled(monkeypatch, verify):
    """Also where nothing is to be pushed: it has the version, from whoever started it."""
    done, joins = [], iter([True, False, True, False, True])
    receiver = SimpleNamespace(version=0, prepare=lambda: next(joins))

    def push(policy, receiver, *, version, verify, is_low_precision):
        receiver.version = version
        done.append(("push", verify))
        return SyncStats()

    monkeypatch.setattr(weight_sync, "sync", push)
    monkeypatch.setattr(weight_sync, "check_weights", lambda *args, **kwargs: done.append("check") or SyncStats())
    monkeypatch.setattr(WeightSyncManager, "_check_adapter", lambda self: done.append("trial"))
    manager = WeightSyncManager(None, receiver, verify=verify)

    def sync_weights(version):
        done.clear()
        manager.sync_weights(version)
        return list(done)

    trial = ["trial"] if verify else []
    assert sync_weights(0) == (["trial", "check"] if verify else [])
    if not verify:
        assert next(joins), "nobody was asked: there is nothing to prove"
    assert sync_weights(1) == [("push", verify)], "no server has joined"
    assert sync_weights(2) == [*trial, ("push", verify)]
    assert sync_weights(3) == [("push", verify)]
    assert sync_weights(4) == [*trial, ("push", verify)]
    assert manager.sync_weights(4) is None
