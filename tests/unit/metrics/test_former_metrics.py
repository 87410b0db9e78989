"""Metrics that a run of an earlier version wrote are read under their current names."""

from __future__ import annotations

import json

import pytest

from megatron_grpo.analysis.report import drift_of, metrics_records
from megatron_grpo.checkpoint.output_files import BestCheckpoint
from megatron_grpo.cli import main
from megatron_grpo.config import parse
from megatron_grpo.config.evaluation import FORMER_METRICS, in_current_metrics
from megatron_grpo.metrics import registry
from megatron_grpo.metrics.records import Records
from megatron_grpo.types import Progress
from tests.unit.checkpoint.test_best import Run
from tests.unit.metrics.test_metrics_logger import journal_in, lines, step

MEAN, LARGEST = "sampling/logp_difference/mean", "sampling/logp_difference/max"


def test_current_names_are_registered_and_former_ones_are_not():
    assert all(map(registry.find, FORMER_METRICS.values())) and not any(map(registry.find, FORMER_METRICS))


@pytest.fixture
def run(tmp_path):
    """Folder of a run of an earlier version; what it holds is removed, because no run of today may write such names."""
    yield tmp_path
    (tmp_path / "metrics.jsonl").unlink()


def test_a_record_is_read_under_current_names(run):
    line = {"step": 1, "loss": 0.5} | dict.fromkeys(FORMER_METRICS, 2.0)
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    current = {"step": 1, "loss": 0.5} | dict.fromkeys(FORMER_METRICS.values(), 2.0)
    assert Records(run / "metrics.jsonl").all() == metrics_records(run) == [current] == [in_current_metrics(current)]


def test_a_rollout_that_an_earlier_version_kept_for_its_step_is_logged_under_current_names(tmp_path):
    (tmp_path / "untold.json").write_text(json.dumps({"step": 0, "stats": {"sampling/kept_words": 2.5}}))
    journal = journal_in(tmp_path)
    journal.start(Progress())
    step(journal, 1)
    [line] = lines(tmp_path)
    assert line["sampling/mask_size"] == 2.5 and "sampling/kept_words" not in line


def test_mismatch_shows_the_drift_of_a_run_whose_lines_have_both_names(run):
    lines = [{"step": 1, MEAN: 0.1, LARGEST: 0.2}, {"step": 2, FORMER_METRICS[MEAN]: 0.3, FORMER_METRICS[LARGEST]: 0.4}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert drift_of(run) == [(1, 0.1, 0.2), (2, 0.3, 0.4)]


def test_the_best_checkpoint_by_a_former_name_stays_the_best(tmp_path):
    before = Run(tmp_path, metric=LARGEST, greater=False, limit=None)
    for number, value in ((1, 0.5), (2, 0.25), (3, 0.75)):
        before.best.record(number, {LARGEST: value})
        before.save(number)
    later = BestCheckpoint(tmp_path / "checkpoints", FORMER_METRICS[LARGEST], greater=False, print_line=lambda text: None)
    later.resume(3, is_saved=True)
    assert later.step == 2


def test_metric_for_best_model_takes_a_former_name_with_a_note(capsys):
    flags = ["--metric_for_best_model", LARGEST, "--save_steps", "5"]
    assert parse(flags).config.run.metric_for_best_model == FORMER_METRICS[LARGEST]
    assert main(["train", *flags, "--print_config"]) == 0
    note = f"Note: --metric_for_best_model {LARGEST} is now --metric_for_best_model {FORMER_METRICS[LARGEST]}.\n"
    assert capsys.readouterr().err == note
