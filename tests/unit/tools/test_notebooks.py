"""Notebooks of examples/notebooks, executed in a kernel of their own on files that the writers of a run made."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from megatron_grpo.core.metadata import Progress
from megatron_grpo.run.metrics import registry
from megatron_grpo.run.metrics.evaluations import EvaluationResult
from tests.loggers import logger_in

jupytext = pytest.importorskip("jupytext", reason="jupytext is not installed (pip install 'megatron-grpo[dev]')")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (pip install 'megatron-grpo[dev]')")
for package in ("ipykernel", "pandas", "matplotlib"):
    pytest.importorskip(package, reason=f"{package} is not installed (pip install 'megatron-grpo[dev]')")

NOTEBOOKS = Path(__file__).resolve().parents[3] / "examples" / "notebooks"
STEPS = 12


def make_evaluation(scores, completions):
    scores = np.array(scores)[:, None]
    rows = range(len(scores))
    table = {
        "dataset_row": [*rows], "generation": [0] * len(rows), "prompt": [f"{row}+1=" for row in rows], "completion": completions,
        "rewards/correct": [*map(float, scores[:, 0])],
    }  # fmt: skip
    return EvaluationResult(
        name="eval", n=1, temperature=0.0, score="correct", question="q", rows=rows, scores=scores, pass_threshold=1.0, table=table
    )


@pytest.fixture
def run(tmp_path):
    """A run of 12 steps whose answers to 2 of 4 prompts become right and to 1 wrong."""
    metrics = logger_in(tmp_path)
    metrics.start(Progress())
    metrics.evaluation(Progress(), [make_evaluation([0.0, 0.0, 1.0, 1.0], ["7", "8", "3", "4"])])
    for step in range(1, STEPS + 1):
        stats = {
            "reward": step / STEPS, "frac_reward_zero_std": 0.25, "grad_norm": 1.0, "sampling/sampling_logp_difference/max": 1e-5 * step,
            "time/step": 1.0, "time/rollout": 0.5, "time/train": 0.375, "time/other": 0.125, "time/rollout_overlapped": 0.25,
        }  # fmt: skip
        assert all(map(registry.find, stats)), "metrics that runs write"
        metrics.log(Progress(step=step, num_tokens=100 * step), stats)
    metrics.evaluation(Progress(step=STEPS), [make_evaluation([1.0, 1.0, 0.0, 1.0], ["1", "2", "9", "4"])])
    metrics.close()
    return tmp_path


def execute(name, monkeypatch, folder, **environment):
    """Execute a notebook, and return the outputs of its cells as one text."""
    notebook = jupytext.read(NOTEBOOKS / name)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, str(value))
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs), outputs


def test_notebooks_are_all_executed_by_these_tests():
    assert {path.name for path in NOTEBOOKS.glob("*.py")} == {"comparing_rewards.py", "reading_a_run.py", "training.py"}


def test_notebook_reading_a_run_shows_rewards_times_and_answers(run, tmp_path, monkeypatch):
    text, outputs = execute("reading_a_run.py", monkeypatch, tmp_path, RUN=run)
    assert "2 better, 1 worse, 1 equal" in text
    assert re.search(r"time/rollout +50.0%", text) and "Warning" not in text and "overlapped" not in text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert "2+1=" in text and "0+1=" not in text, "what is no longer right"


def test_notebook_reading_a_run_raises_on_trainer_sampler_mismatch(run, tmp_path, monkeypatch):
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="the largest difference is 0.00012 nats"):
        execute("reading_a_run.py", monkeypatch, tmp_path, RUN=run, BOUND=1e-4)


def test_notebook_comparing_rewards_shows_zero_std_groups_and_advantages(tmp_path, monkeypatch):
    import pandas

    answers = [("7", "7", "7", "7"), ("5", "15", "25", "4"), ("9", "9", "8", "8")]  # to 3+4=, 7+8= and 4+5=
    rows = [
        {"prompt_number": number, "prompt": prompt, "completion": text}
        for number, (prompt, texts) in enumerate(zip(("3+4=", "7+8=", "4+5="), answers, strict=True))
        for text in texts
    ]
    (tmp_path / "completions").mkdir()
    pandas.DataFrame(rows).to_parquet(tmp_path / "completions" / "step_000001.parquet")
    text, _ = execute("comparing_rewards.py", monkeypatch, tmp_path, RUN=tmp_path)
    assert re.search(r"correct +0.333333\nlast_digit +0.333333", text), "the first group alone has equal rewards"
    assert "last digit right" in text
