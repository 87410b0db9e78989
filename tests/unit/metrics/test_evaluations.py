"""Evaluation files: records, paired changes and completions, after a resume and after a repeated command."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from megatron_grpo.core.metadata import Progress
from megatron_grpo.run.metrics.evaluations import Evaluations, compare_evaluations, describe
from tests.evaluated import evaluated
from tests.loggers import logger_in


def read_lines(folder, name="evaluations.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def make_evaluation(scores, **values):
    return replace(evaluated(0.0), **{"n": 2, "temperature": 1.0, "rows": range(len(scores)), "scores": np.array(scores), **values})


def test_evaluation_record_has_means_errors_pass_at_k_and_unscored_count(tmp_path):
    record = Evaluations(tmp_path).add(3, make_evaluation([[1.0, 0.0], [1.0, 1.0], [np.nan, 2.0], [np.nan, np.nan]]))
    assert read_lines(tmp_path) == [record]
    assert (record["num_prompts"], record["unscored"], record["n"]) == (3, 3, 2)
    assert record["mean@2"] == pytest.approx((0.5 + 1 + 2) / 3)
    assert record["mean@2/stderr"] == pytest.approx(np.std([0.5, 1, 2], ddof=1) / np.sqrt(3))
    assert (record["pass@1"], record["pass@2"]) == (pytest.approx(2.5 / 3), 1.0), "of the third prompt two were not scored"


def test_evaluation_change_is_relative_to_first_with_same_question(tmp_path):
    """Another question, as after other settings on resuming, begins anew."""
    kept = Evaluations(tmp_path)
    kept.add(0, evaluated(0.0, 1.0, question="a"))
    kept.add(1, evaluated(0.5, 0.5, question="a"))
    kept.add(2, evaluated(9.0, 9.0, question="b"))
    kept.add(3, evaluated(1.0, None, question="a"))
    assert [line.get("change") for line in read_lines(tmp_path)] == [None, 0.0, None, 1.0]
    assert [line.get("change/stderr") for line in read_lines(tmp_path)] == [None, 0.5, None, None]
    assert read_lines(tmp_path)[3]["change/since"] == 0


def test_evaluations_after_resume_pair_with_first_and_drop_repeated_steps(tmp_path):
    first = Evaluations(tmp_path)
    for step in (0, 2, 4):
        for name in ("eval", "other"):
            first.add(step, replace(evaluated(step / 10, step / 10, name=name, question="a"), table={"completion": ["x", "y"]}))
    second = Evaluations(tmp_path)
    second.start(2)
    assert [(record["step"], record["name"]) for record in second.records] == [(0, "eval"), (0, "other"), (2, "eval"), (2, "other")]
    assert sorted(path.name for path in tmp_path.glob("evaluations/other/*.parquet")) == ["step_000000.parquet", "step_000002.parquet"]
    for name in ("eval", "other"):  # stopped just after it was evaluated: the resumed run does it again
        second.add(2, evaluated(0.3, 0.3, name=name, question="a"))
    assert [(line["step"], line["mean@1"], line.get("change")) for line in read_lines(tmp_path) if line["name"] == "other"] == [
        (0, 0.0, None), (2, 0.3, 0.3),
    ]  # fmt: skip
    assert len(read_lines(tmp_path, "evaluations/other/prompts.jsonl")) == 2


def test_evaluate_command_appends_to_existing_records(tmp_path):
    for model, score in (("base", 0.0), ("trained", 0.5)):
        kept = Evaluations(tmp_path, replaces=False)
        kept.start()
        kept.add(0, replace(evaluated(score, score, question="a"), table={"completion": ["x", "y"]}), model=model)
    assert [line.get("change") for line in read_lines(tmp_path)] == [None, 0.5] and read_lines(tmp_path)[1]["change/since"] == "base"
    assert sorted(path.name for path in tmp_path.glob("evaluations/eval/*.parquet")) == ["step_000000.parquet", "step_000000_1.parquet"]
    assert "change from base" in [figure for figure, *_ in describe(kept.records)[2]]


def test_evaluation_records_of_an_older_version_are_read(tmp_path):
    (tmp_path / "evaluations.jsonl").write_text('{"step": 0, "right": 0.25, "mean_length": 9.0}\n')
    kept = Evaluations(tmp_path)
    kept.start(5)
    kept.add(4, evaluated(0.5, right=0.5, mean_length=8.0))
    [(before, after)] = kept.first_and_last()
    assert compare_evaluations(before, after) == [("right", 0.25, 0.5), ("mean_length", 9.0, 8.0)]


def test_evaluation_table_shows_sampling_settings_and_sampling_error():
    found = make_evaluation([[1.0, 0.0], [1.0, 1.0]])
    how, heads, rows = describe([{"step": 1} | found.numbers()])
    told = dict(rows)
    assert heads == ["eval"]
    assert how == "2 completions of each prompt at temperature 1"
    assert (told["mean"], told["seed alone"], told["pass@2"]) == ("0.750 ± 0.250", "± 0.250", "1.000") and not any(
        "change" in row for row in told
    )
    how, _, rows = describe([evaluated(0.5).numbers()])
    assert how == "greedy" and "seed alone" not in dict(rows)


@pytest.mark.parametrize("step", [0, 4], ids=["before the first checkpoint", "after one"])
def test_evaluation_interrupted_by_kill_is_not_used_for_comparison(tmp_path, step):
    """It had written what the prompts scored, and not yet its line. Other answers would give changes another sign."""
    dead = Evaluations(tmp_path)
    dead.add(step, evaluated(0.9, 0.9, question="a"))
    (tmp_path / "evaluations.jsonl").unlink()
    metrics = logger_in(tmp_path, console=Console(file=io.StringIO()))
    metrics.start(Progress(step=step))
    metrics.evaluation(Progress(step=step), [evaluated(0.1, 0.1, question="a")])
    metrics.evaluation(Progress(step=step + 1), [evaluated(0.5, 0.5, question="a")])
    assert [line.get("change") for line in read_lines(tmp_path)] == [None, 0.4]
    assert [line["means"] for line in read_lines(tmp_path, "evaluations/eval/prompts.jsonl")] == [[0.1, 0.1], [0.5, 0.5]]


def test_evaluations_of_run_without_checkpoint_are_removed_by_next_run(tmp_path):
    Evaluations(tmp_path).add(0, replace(evaluated(0.9, name="gone", question="a"), table={"completion": ["x"]}))
    logger_in(tmp_path, console=Console(file=io.StringIO())).start(Progress())
    assert not read_lines(tmp_path) and not read_lines(tmp_path, "evaluations/gone/prompts.jsonl") and not list(tmp_path.rglob("*.parquet"))


def test_evaluations_with_missing_records_are_reported_on_resume(tmp_path, caplog):
    kept = Evaluations(tmp_path)
    for step in (0, 2, 4):
        kept.add(step, evaluated(0.5))
    whole = (tmp_path / "evaluations.jsonl").read_text()
    Evaluations(tmp_path).start(4)
    assert not caplog.messages
    (tmp_path / "evaluations.jsonl").write_text(whole[: whole.index("\n") + 5])
    Evaluations(tmp_path).start(4)
    [said] = caplog.messages
    assert "evaluations.jsonl has no line of eval at step [2, 4]: it was cut or removed" in said


def test_evaluate_command_after_partial_line_writes_valid_records(tmp_path, caplog):
    kept = Evaluations(tmp_path, replaces=False)
    kept.add(0, evaluated(0.5, question="a"), model="base")
    for name in ("evaluations.jsonl", "evaluations/eval/prompts.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 0, "na')
    kept = Evaluations(tmp_path, replaces=False)
    kept.start()
    kept.add(0, evaluated(0.7, question="a"), model="trained")
    assert [line["model"] for line in read_lines(tmp_path)] == ["base", "trained"] and read_lines(tmp_path)[1]["change"] == pytest.approx(
        0.2
    )
    assert len(read_lines(tmp_path, "evaluations/eval/prompts.jsonl")) == 2
