"""Files that the metrics logger writes for an optimizer step."""

from __future__ import annotations

import io
import json
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from megatron_grpo.core.metadata import Progress
from megatron_grpo.core.parallel.collectives import Node
from megatron_grpo.core.trainer.scored_rollout import PartialRolloutInfo
from megatron_grpo.run.assemble.output import version_check
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.metrics.rollout import Completions
from megatron_grpo.run.metrics.summary import LogpDifferenceMonitor
from tests.loggers import logger_in
from tests.unit.metrics.test_metrics import make_rollout


class ManualClock:
    """A clock that the test advances."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def seconds(monkeypatch):
    seconds = ManualClock()
    monkeypatch.setattr(time, "perf_counter", seconds)
    return seconds


def make_logger(folder, **settings):
    return logger_in(
        folder, reward_names=("right", "short"), console=Console(file=io.StringIO(), width=300), total_steps=9, **settings
    )  # fmt: skip


def log_step(logger, number, *, skipped=None, tokens_by_version=(), **metrics):
    rows = [[[[0, 0], [0, 1]], [[0, 4], [0, 5]]], [[[0, 2], [0, 3]], [[0, 6], [0, 7]]]]
    batch = SimpleNamespace(
        rows_by_micro_batch=lambda: rows, staleness=np.array([0, 1]), metrics={"staleness/mean": 0.5}, tokens_by_version=tokens_by_version,
    )  # fmt: skip
    logger.step(Progress(step=number, num_tokens=60 * number), batch, {"loss": 0.5} | metrics, skipped=skipped)


def read_lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def read_console(logger):
    return logger._display.console.file.getvalue()


def test_logger_step_time_starts_at_run_start_or_previous_record(tmp_path, seconds):
    logger = make_logger(tmp_path)
    seconds.pass_(50)  # models load
    logger.start(Progress(step=3, num_tokens=180))
    for number in (4, 5):
        seconds.pass_(1)
        with logger.timers("train"):
            seconds.pass_(4)
        log_step(logger, number)
        with logger.timers("checkpoint"):
            seconds.pass_(7)
    first, second = read_lines(tmp_path)

    def times(line):
        return {name: value for name, value in line.items() if name.startswith("time/")}

    assert times(first) == {"time/other": 1, "time/train": 4, "time/step": 5} and first["tokens_per_second"] == 12
    assert times(second) == {"time/checkpoint": 7, "time/other": 1, "time/train": 4, "time/step": 12} and second["tokens_per_second"] == 5


def test_logger_step_contains_rewards_of_its_own_rollouts_only(tmp_path):
    logger = make_logger(tmp_path)
    logger.start(Progress())
    for number, more in enumerate((0, 10)):
        one = make_rollout(number=number)
        logger.rollout(replace(one, advantages=replace(one.advantages, rewards=one.advantages.rewards + more)))
    log_step(logger, 1)
    log_step(logger, 2)
    first, second = read_lines(tmp_path)
    assert first["reward"] == pytest.approx(1.125 + 5) and first["staleness/mean"] == 0.5
    assert "reward" not in second and "completions/mean_length" not in second and second["loss"] == 0.5
    assert not any("dynamic_sample" in name for name in first)


def test_logger_reports_rollout_of_interrupted_step_after_resume(tmp_path):
    whole, rests = tmp_path / "whole", tmp_path / "rests"
    for folder in (whole, rests):
        folder.mkdir()
        logger = make_logger(folder, selection_weights=[1.0, 1.0])
        logger.start(Progress())
        log_step(logger, 1)
        logger.rollout(make_rollout())
        if folder == rests:
            stats = json.loads(json.dumps(logger.compute_unreported_stats(), default=float))
            logger = make_logger(folder, selection_weights=[1.0, 1.0])
            logger.restored_stats = stats
            assert logger.compute_unreported_stats() == stats  # it may stop again
            logger.start(Progress(step=1, num_tokens=60))
        log_step(logger, 2)
        log_step(logger, 3)
    without_time = [
        [{name: value for name, value in line.items() if "time" not in name and "second" not in name} for line in read_lines(folder)]
        for folder in (whole, rests)
    ]
    assert without_time[0] == without_time[1] and "reward" in without_time[0][1] and "reward" not in without_time[0][2]


def test_logger_omits_restored_stats_after_own_rollout(tmp_path):
    logger = make_logger(tmp_path)
    logger.restored_stats = {"reward": 99.0, "other": 1.0}
    logger.start(Progress())
    logger.rollout(make_rollout())
    log_step(logger, 1)
    log_step(logger, 2)
    first, second = read_lines(tmp_path)
    assert first["reward"] < 99.0 and "other" not in first and "reward" not in second


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_logger_keeps_completions_table_of_rollout_in_checkpoint(tmp_path, num_nodes):
    """Sampled by the weights of the step that is still to be taken."""
    node = Node(number=0, count=num_nodes)
    tables = Completions(tmp_path, reward_names=["right", "short"], node=node)
    [judged] = [replace(make_rollout(number=7), number=7)]
    path = tables.write(judged)
    version = int(re.search(r"step_(\d+)", str(path))[1])
    again = Completions(tmp_path, reward_names=["right", "short"], node=node)
    again.start(Progress(step=version, num_rollouts=8))
    assert path.exists()
    again.start(Progress(step=version, num_rollouts=7))
    assert not path.exists()


def test_logger_reports_dynamic_sampling_metrics_if_enabled(tmp_path):
    logger = make_logger(tmp_path, selection_weights=[1.0, 1.0])
    logger.start(Progress())
    logger.rollout(make_rollout())
    log_step(logger, 1)
    log_step(logger, 2)
    first, second = read_lines(tmp_path)
    assert (first["dynamic_sample/rounds"], first["dynamic_sample/groups_sampled"]) == (1, 2)
    assert (first["dynamic_sample/zero_std_groups_replaced"], first["dynamic_sample/prompts_given_back"]) == (0, 0)
    assert "dynamic_sample/rounds" not in second


def test_logger_schedule_file_has_trained_rows_of_every_rank(tmp_path):
    logger = make_logger(tmp_path)
    logger.start(Progress())
    for number in (1, 2):
        log_step(logger, number)
    rows = [[[[0, 0], [0, 1]], [[0, 4], [0, 5]]], [[[0, 2], [0, 3]], [[0, 6], [0, 7]]]]
    assert read_lines(tmp_path, "schedule.jsonl") == [
        {"step": number, "optimizer_step": number - 1, "rows": rows, "staleness": [0, 1]} for number in (1, 2)
    ]
    again = make_logger(tmp_path)
    again.start(Progress(step=1))
    assert [line["step"] for line in read_lines(tmp_path, "schedule.jsonl")] == [1]
    log_step(again, 2, tokens_by_version=[[[1, 5]], [[0, 3], [1, 4]]])
    assert read_lines(tmp_path, "schedule.jsonl")[1]["tokens_by_version"] == [[[1, 5]], [[0, 3], [1, 4]]]


def test_logger_of_other_ranks_writes_no_schedule(tmp_path):
    logger = make_logger(tmp_path, rank=1)
    logger.start(Progress())
    log_step(logger, 1, skipped="no token is trained")
    assert list(tmp_path.iterdir()) == [] and read_console(logger) == ""


def test_logger_warns_of_skipped_steps_and_drift(tmp_path):
    watch = LogpDifferenceMonitor(bound=0.5, dtype="float32")
    logger = make_logger(tmp_path, watches=[lambda progress, metrics: watch.warning(metrics)])
    logger.start(Progress())
    log_step(logger, 1, **{"sampling/sampling_logp_difference/max": 0.5})
    assert "WARNING" not in read_console(logger) and "optimizer step 1 is skipped" not in read_console(logger)
    log_step(logger, 2, skipped="no token is trained", **{"sampling/sampling_logp_difference/max": 0.75})
    assert "WARNING: trainer and sampler differ by 0.75 nats" in read_console(logger)
    assert "optimizer step 2 is skipped: no token is trained" in read_console(logger)
    watch.metric = "sampling/version_error/max"  # with partial rollouts: of the rollout, and again twice the last
    logger.rollout(replace(make_rollout(), partial=PartialRolloutInfo(version=2, metrics={watch.metric: 1.75})))
    log_step(logger, 3, **{"sampling/sampling_logp_difference/max": 9.0})
    assert "differ by 1.75 nats on a token (sampling/version_error/max; bound 1.5)" in read_console(logger)


def test_logger_skipped_step_is_recorded_and_dropped_after_resume(tmp_path):
    logger = make_logger(tmp_path)
    logger.start(Progress())
    for number in (1, 2):
        log_step(logger, number, skipped="its gradient is not finite")
        logger.skipped_step(Progress(step=number), {"why": "its gradient is not finite", "ranks": [1]}, ["rank 1, micro-batch 0: row 3"])
    assert read_console(logger).count("rank 1, micro-batch 0: row 3") == 2
    assert read_lines(tmp_path, "skipped.jsonl")[1] == {"step": 2, "why": "its gradient is not finite", "ranks": [1]}
    make_logger(tmp_path).start(Progress(step=1))
    assert [line["step"] for line in read_lines(tmp_path, "skipped.jsonl")] == [1]


@pytest.mark.parametrize(("how", "compares"), [({}, True), ({"summary": True}, True), ({"summary": False}, False)])
def test_logger_final_table_is_printed_for_successful_run_only(tmp_path, how, compares):
    logger = make_logger(tmp_path)
    logger.start(Progress())
    for number in (1, 2):
        log_step(logger, number, reward=float(number))
    logger.close(**how)
    assert ("reward while training" in read_console(logger)) == compares


def test_drift_warning_repeats_when_difference_doubles():
    watch = LogpDifferenceMonitor(bound=None, dtype="float32")
    said = [
        watch.warning({"sampling/sampling_logp_difference/max": value}) is not None
        for value in (1e-3, 2e-3, 3.9e-3, 4e-3, 4.1e-3, 8e-3, 8.3e-3)
    ]
    assert said == [False, True, False, False, True, False, True]
    assert LogpDifferenceMonitor(bound=None, dtype="bfloat16").warning({"sampling/sampling_logp_difference/max": 0.9}) is None
    assert LogpDifferenceMonitor(bound=0.0, dtype="bfloat16").warning({"loss": 1.0}) is None
    assert LogpDifferenceMonitor(bound=0.0, dtype="bfloat16").warning({"sampling/sampling_logp_difference/max": 1e-9})


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({}, True),
        ({"tuner_type": "lora"}, True),
        ({"tuner_type": "lora", "lora_dropout": 0.1}, False),
        ({"lora_dropout": 0.1}, True),  # full training has no adapter that drops anything
        ({"tuner_type": "lora", "lora_dropout": 0.1, "logprob_diff_warn": 0.5}, True),
        ({"async_rollout_depth": 1}, False),
    ],
)
def test_drift_warning_with_dropout_requires_explicit_bound(settings, warns):
    watch = version_check(Config().with_values({"torch_dtype": "float32"} | settings))
    assert (watch({"sampling/sampling_logp_difference/max": 0.6}) is not None) == warns
