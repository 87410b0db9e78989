"""Gradients that the optimizer may use, and messages for those that it may not."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_grpo.core.policy.gradient_check import (
    FEWEST,
    WINDOW,
    BadMicroBatch,
    GradientStats,
    GradNormSpikeCheck,
    SkipCounter,
    SkippedStep,
)


def check_norms(gradient_check: GradNormSpikeCheck, *norms: float) -> list[bool]:
    return [gradient_check.allows(GradientStats(step=step, norm=norm)) for step, norm in enumerate(norms)]


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
def test_gradient_check_rejects_norm_that_is_not_finite(norm):
    gradient_check = GradNormSpikeCheck()
    assert not gradient_check.allows(GradientStats(step=7, norm=norm)) and gradient_check.reason == "its gradient is not finite"


@pytest.mark.parametrize("norm", [0.0, 1e-30, 1e30])
def test_gradient_check_without_bound_accepts_any_finite_norm(norm):
    gradient_check = GradNormSpikeCheck()
    assert gradient_check.allows(GradientStats(step=0, norm=norm)) is True and gradient_check.reason is None


def test_gradient_check_rejects_norm_above_bound():
    gradient_check = GradNormSpikeCheck(max_norm=2.0)
    assert check_norms(gradient_check, 1.0, 2.0, 2.5, 1.0) == [True, True, False, True]
    assert (
        check_norms(gradient_check, 2.5) == [False] and gradient_check.reason == "its gradient norm 2.5 is above 2 (skip_grad_norm_above)"
    )


def test_gradient_check_compares_with_median_after_enough_steps():
    gradient_check = GradNormSpikeCheck(factor=3.0)
    assert check_norms(gradient_check, *[1.0] * (FEWEST - 1), 50.0) == [True] * FEWEST, "no median yet: the spike is the last of the few"
    assert check_norms(gradient_check, 3.0, 3.1) == [True, False]
    assert gradient_check.reason == "its gradient norm 3.1 is above 3 (skip_grad_norm_factor) x 1, the running median"


def test_gradient_check_median_follows_recent_norms():
    gradient_check = GradNormSpikeCheck(factor=3.0)
    check_norms(gradient_check, *[1.0] * FEWEST)
    assert check_norms(gradient_check, *[10.0] * (FEWEST + 1)) == [False] * FEWEST + [True]
    check_norms(gradient_check, *[10.0] * WINDOW)
    assert gradient_check.state() == {"norms": [10.0] * WINDOW}


def test_gradient_check_median_excludes_zero_and_non_finite_norms():
    """The batch whose groups are all zero-std has a norm of 0; a median of 0 would refuse every other."""
    gradient_check = GradNormSpikeCheck(factor=3.0)
    check_norms(gradient_check, *[0.0] * 50, *[math.inf] * 50, *[2.0] * FEWEST)
    assert gradient_check.state() == {"norms": [2.0] * FEWEST} and check_norms(gradient_check, 5.9, 6.1) == [True, False]


@given(st.lists(st.floats(1e-3, 1e3) | st.sampled_from([0.0, math.inf, math.nan]), max_size=300), st.integers(0, 300))
def test_gradient_check_state_is_restored(norms, at):
    whole, first = GradNormSpikeCheck(max_norm=500.0, factor=2.0), GradNormSpikeCheck(max_norm=500.0, factor=2.0)
    begun = check_norms(first, *norms[:at])
    again = GradNormSpikeCheck(max_norm=500.0, factor=2.0)
    again.restore(json.loads(json.dumps(first.state())))
    assert check_norms(whole, *norms) == begun + check_norms(again, *norms[at:])


@given(st.lists(st.floats(1e-3, 1e3), max_size=200))
def test_gradient_check_equals_naive_median(norms):
    gradient_check, answers = GradNormSpikeCheck(factor=2.0), []
    for place, norm in enumerate(norms):
        last = sorted(norms[max(0, place - WINDOW) : place])
        middle = len(last) // 2
        median = (last[middle] if len(last) % 2 else (last[middle - 1] + last[middle]) / 2) if len(last) >= FEWEST else math.inf
        answers.append(norm <= 2.0 * median)
    assert check_norms(gradient_check, *norms) == answers


def test_skip_counter_counts_total_and_consecutive_skips():
    skips = SkipCounter()
    for refused in (True, True, False, True):
        skips = skips.after(is_skipped=refused)
    assert skips == SkipCounter(total=3, in_a_row=1)


PLACES = {(6, row): dict(rollout=6, row=row, prompt_number=50 + row, dataset_row=row) for row in range(20)}


def test_skipped_step_lines_name_rank_micro_batch_and_rows():
    bad_micro_batches = (
        BadMicroBatch(micro_batch=3, ranks=(1,), norm=math.inf, rows=((6, 5),), what="advantages"),
        BadMicroBatch(micro_batch=4, ranks=(0, 1), norm=12.5, rows=((6, 0), (6, 1))),
    )
    skipped_step = SkippedStep(
        why="its gradient is not finite", skips=SkipCounter(total=1, in_a_row=1), ranks=(1,), bad_micro_batches=bad_micro_batches
    )
    assert skipped_step.lines(PLACES) == [
        "rank 1, micro-batch 3: row 5 of rollout 6 (prompt 55, row 5 of the data set): advantages not finite",
        "ranks 0, 1, micro-batch 4, norm 12.5 alone: row 0 of rollout 6 (prompt 50, row 0 of the data set), "
        "row 1 of rollout 6 (prompt 51, row 1 of the data set)",
    ]
    record = json.loads(json.dumps(skipped_step.record(PLACES)))
    assert record["bad_micro_batches"][0] == {"micro_batch": 3, "ranks": [1], "what": "advantages", "rows": [PLACES[6, 5]]}
    assert (record["why"], record["in_a_row"], record["skipped_iterations"]) == ("its gradient is not finite", 1, 1)


def test_skipped_step_lines_name_some_of_many_rows():
    skipped_step = SkippedStep(
        why="", skips=SkipCounter(), bad_micro_batches=(BadMicroBatch(micro_batch=0, ranks=tuple(range(30)), norm=1.0, rows=tuple(PLACES)),)
    )
    [line] = skipped_step.lines(PLACES)
    assert replace(skipped_step, more=3).lines(PLACES) == [line, "and at least 3 more micro-batches"]
    assert line.startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7, ..., micro-batch 0") and line.endswith("row 7 of the data set), ...")


def test_skipped_step_lines_report_hardware_or_non_finite_weights():
    [line] = SkippedStep(why="", skips=SkipCounter(), ranks=(3,)).lines({})
    assert "not finite on rank 3, but finite when" in line and "check the hardware" in line
    [line] = SkippedStep(why="", skips=SkipCounter(), ranks=(0, 1), weights=((1, "decoder.w"),)).lines({})
    assert line == "the weights are not finite (rank 1: decoder.w), so no further step can succeed"
