"""The GPU check without a GPU: all steps could start, one that could not is reported, and a finished step is not run again."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from tools.gpu_checking import run, steps
from tools.gpu_checking.steps import CommandStep, RunStep, Step

pytestmark = pytest.mark.skipif(bool(run.list_gpus()), reason="there is a GPU: run the check itself")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("check")


def test_gpu_check_without_gpu_reports_all_steps_runnable(folder, capsys):
    assert run.main(["--out", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "No GPU here: nothing was measured." in said and "0 that would not begin" in said


def test_gpu_check_reports_steps_that_cannot_start(folder, monkeypatch):
    first = steps.STEPS[0]
    broken = (
        replace(first, name="a", commands=(RunStep(folder="x", flags={"num_generation": 7}),)),
        replace(first, name="b", commands=(CommandStep(words=(sys.executable, "benchmarks/gpu.py", "t9")),)),
        replace(first, name="b", commands=(CommandStep(words=(sys.executable, "tools/none.py")),)),
        replace(first, name="c", commands=(CommandStep(words=(sys.executable, "-m", "pytest", "tests/gpu/test_none.py")),)),
    )
    monkeypatch.setattr(run, "STEPS", broken)
    told = "\n".join(run.find_problems(folder))
    for words in ("a: ", "num_generation", "benchmarks/gpu.py does not take t9", "there is no tools/none.py", "two steps are called b",
                  "pytest does not collect"):  # fmt: skip
        assert words in told


def _make_step(name: str, code: str, **more) -> Step:
    return Step(name=name, shows="", seconds=20, commands=(CommandStep(words=(sys.executable, "-c", code)),), **more)


def test_gpu_check_records_verdicts_and_skips_finished_steps(tmp_path, capsys):
    mark = tmp_path / "ran"
    chosen = [
        _make_step("good", f"open({str(mark)!r}, 'a').write('x'); print('{{}}')", judge=lambda out, log: "a note"),
        _make_step("bad", "raise SystemExit(4)"),
        _make_step("judged", "print('x')", judge=lambda out, log: "! too much"),
        _make_step("lacking", "", needs=("no_such_package",)),
        _make_step("slow", "import time; time.sleep(60)"),
    ]
    chosen[-1] = replace(chosen[-1], seconds=1)
    for _ in range(2):
        run.Check(tmp_path, minutes=5).run(chosen)
    verdicts = {name: one["verdict"] for name, one in json.loads((tmp_path / run.RESULTS).read_text())["steps"].items()}
    assert verdicts == {"good": "PASS", "bad": "FAIL", "judged": "FAIL", "lacking": "SKIP", "slow": "FAIL"}
    assert mark.read_text() == "x"
    said = capsys.readouterr().out
    assert "PASS good" in said and "ended with 4, not 0" in said and "too much" in said and "no_such_package not installed" in said
    assert "did not end in 1 s" in said
    run.Check(tmp_path, minutes=0).run([_make_step("late", "")])
    assert json.loads((tmp_path / run.RESULTS).read_text())["steps"]["late"]["verdict"] == "SKIP"


def test_gpu_check_judges_fail_on_bad_results(tmp_path):
    (tmp_path / "gap").mkdir()

    def lines(*gaps):
        text = "".join(json.dumps({"sampling/sampling_logp_difference/mean": gap, "reward": gap}) + "\n" for gap in gaps)
        (tmp_path / "gap" / "metrics.jsonl").write_text(text)

    lines(0.01, 0.02)
    assert not steps.judge_gap("gap", 2)(tmp_path, "").startswith("!") and steps.judge_gap("gap", 3)(tmp_path, "").startswith("!")
    lines(0.01, 0.2)
    assert steps.judge_gap("gap", 2)(tmp_path, "").startswith("!")
    lines(*range(12))
    assert not steps.judge_reward_growth("gap")(tmp_path, "").startswith("!")
    lines(*range(12, 0, -1))
    assert steps.judge_reward_growth("gap")(tmp_path, "").startswith("!")
    assert steps.judge_memory_error(tmp_path, "Traceback (most recent call last)").startswith("!")
    assert steps.judge_memory_error(tmp_path, "killed").startswith("!")
    assert steps.judge_memory_error(tmp_path, "vllm_gpu_memory_utilization (0.999): ...") == ""
