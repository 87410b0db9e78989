"""The output of `watch`, read from files as a run writes them."""

from __future__ import annotations

import json
import re
import time

import pytest

from megatron_grpo.cli import main
from megatron_grpo.commands.analysis import watch
from megatron_grpo.core.base.errors import ConfigError
from tests.unit.analysis.test_run_report import write_run


def run_watch_command(folder, capsys):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(["watch", str(folder)]) == 0
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before, "it changes nothing"
    return capsys.readouterr().out


def test_watch_shows_step_phase_metrics_scores_events_and_completions(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    event = {"step": 30, "time": "2026-01-02T03:04:05+00:00", "kind": "warning", "text": "Something is [odd]."}
    run = write_run(tmp_path / "run", steps=40, events=[event])
    now = {"time": time.time(), "step": 40, "phase": "sampling 3 of 8 completions", "speed": "1 s/step  40 s left"}
    (run / "now.json").write_text(json.dumps(now))
    told = run_watch_command(run, capsys)
    assert re.search(r"run: step 40/80 .* 1 s/step  40 s left", told) and "sampling 3 of 8 completions" in told
    assert re.search(r"reward +0.5 +▁.*█", told) and re.search(r"eval +step 40 +0.750 +▁█", told)
    assert "step 30: Something is [odd]." in told and "Sampled after step 3" in told and "user: 2+2?" in told
    assert "KL" not in told, "it is 0 throughout"


@pytest.mark.parametrize(
    ("steps", "kind", "age", "words"),
    [
        (80, "warning", None, "The run is finished."),
        (40, "stopped", None, "It was stopped."),
        (40, "warning", 100.0, "No sign of the run for 1:40"),
        (40, "stopped", 1.0, "training"),
    ],
)
def test_watch_shows_that_a_run_ended_or_stopped_writing(tmp_path, capsys, steps, kind, age, words):
    event = {"step": steps, "time": "", "kind": kind, "text": "It was stopped."}
    run = write_run(tmp_path / "run", steps=steps, events=[event])
    if age is not None:
        (run / "now.json").write_text(json.dumps({"time": time.time() - age, "step": steps, "phase": "training"}))
    assert run_watch_command(run, capsys).splitlines()[1].startswith(words)


def test_watch_shows_a_run_before_its_first_step(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("run:\n  max_steps: 7\n")
    (tmp_path / "now.json").write_text(json.dumps({"time": time.time(), "step": 0, "phase": "starting vLLM, 0:20"}))
    told = run_watch_command(tmp_path, capsys)
    assert "step 0/7" in told and "starting vLLM, 0:20" in told


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "watch needs one OUTPUT_DIR, not 0."),
        (["a", "b"], "watch needs one OUTPUT_DIR, not 2."),
        (["a", "--twice"], "Unknown argument --twice."),
        (["missing"], "missing has no config.yaml. Name the output_dir of a run that has started."),
    ],
)
def test_watch_command_with_invalid_arguments_raises_config_error(argv, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        watch.run_watch(argv)


def test_spark_line_averages_neighbors_and_is_flat_for_equal_values():
    assert watch.sparkline([(1, 0.0), (2, 7.0)]) == "▁█" and watch.sparkline([(n, 2.0) for n in range(3)]) == "▁▁▁"
    assert len(watch.sparkline([(n, float(n)) for n in range(1000)])) <= watch.WIDTH
