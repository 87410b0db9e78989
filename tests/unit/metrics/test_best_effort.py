"""Failures of plots, tables, trackers and consoles do not end a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megatron_grpo.core.metadata import Progress
from megatron_grpo.run.metrics import reporters
from megatron_grpo.run.metrics.metrics_logger import MetricsLogger
from megatron_grpo.run.metrics.rollout import Completions
from tests.loggers import logger_in
from tests.unit.metrics.test_metrics import make_rollout

ROOT = Path(__file__).resolve().parents[3]


class FailingReporter:
    """A reporter that fails from its second call on."""

    latest = None

    def __init__(self, begin):
        self.logged, FailingReporter.latest = 0, self

    def log(self, step, values):
        self.logged += 1
        if self.logged > 1:
            raise ConnectionError("nobody there")

    def close(self):
        raise SystemExit(1)


def log_steps(metrics: MetricsLogger, number: int):
    metrics.start(Progress())
    for step in range(1, number + 1):
        metrics.log(Progress(step=step, num_tokens=step), {"reward": 1.0, "time/step": 0.1})


def test_reporter_that_fails_is_reported_once_and_disabled(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(reporters.REPORTERS, "tensorboard", FailingReporter)
    metrics = logger_in(tmp_path, config={"report_to": ["tensorboard"]})
    log_steps(metrics, 4)
    metrics.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    said = [record.getMessage() for record in caplog.records]
    assert said == ["tensorboard failed, and the run continues without it: ConnectionError: nobody there"]
    assert FailingReporter.latest.logged == 2


def test_plots_that_cannot_be_written_give_a_warning(tmp_path, caplog):
    (tmp_path / "plots").write_text("in the way")
    metrics = logger_in(tmp_path, config={"save_steps": 1})
    log_steps(metrics, 2)
    metrics.close()
    assert "plots failed, and the run continues without it: FileExistsError" in caplog.text


def test_failed_run_prints_no_summary(tmp_path, capsys):
    metrics = logger_in(tmp_path)
    log_steps(metrics, 4)
    metrics.close(summary=False)
    assert "reward while training" not in capsys.readouterr().out


def test_completions_folder_keeps_files_of_the_user(tmp_path):
    folder = tmp_path / "completions"
    folder.mkdir()
    for name in ("step_mine.parquet", "step_000003.parquet", "step_000003_1.parquet", "step_000001.parquet", "step_.parquet"):
        (folder / name).write_text("")
    Completions(tmp_path, reward_names=["r"]).start(Progress(step=2))
    assert sorted(path.name for path in folder.iterdir()) == ["step_.parquet", "step_000001.parquet", "step_mine.parquet"]


def test_completions_table_that_cannot_be_written_gives_a_warning(tmp_path, caplog):
    (tmp_path / "completions").write_text("in the way")
    assert Completions(tmp_path, reward_names=["right", "short"]).write(make_rollout()) is None
    assert "the run continues without it" in caplog.text


def test_closed_stdout_does_not_end_the_run(tmp_path):
    script = f"""
import sys
from pathlib import Path
from megatron_grpo.core.metadata import Progress
from tests.loggers import logger_in
metrics = logger_in(Path({str(tmp_path)!r}))
metrics.start(Progress())
sys.stdin.readline()  # the reader has gone
for step in range(1, 4):
    metrics.log(Progress(step=step, num_tokens=step), {{"reward": 1.0, "time/step": 0.1}})
    metrics.print_line("a line")
metrics.close()
sys.exit(7)
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    process.stdout.close()
    process.communicate("go\n")
    assert process.returncode == 7
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
