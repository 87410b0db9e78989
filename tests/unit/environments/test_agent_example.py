"""Data of the mini-swe-agent example. Third-party agents and environments run in a process with their own packages."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "agent_swe"
EXTRA = os.environ.get("MEGATRON_GRPO_EXTRA_AGENTS")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    words, sys.argv = sys.argv, ["make_data.py", "--out", str(folder), "--max_bugs", "2"]
    try:
        runpy.run_path(str(EXAMPLE / "make_data.py"), run_name="__main__")
    finally:
        sys.argv = words
    return [json.loads(line) for name in ("train", "test") for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_each_task_has_a_bug_that_the_hidden_tests_notice_and_the_repaired_module_passes(rows, tmp_path):
    modules = runpy.run_path(str(EXAMPLE / "make_data.py"))["MODULES"]
    passed = runpy.run_path(str(EXAMPLE / "verdict.py"))["passed"]
    assert len(rows) == 8 and {row["module"] for row in rows} == set(modules)
    for row in rows[:3]:
        module = tmp_path / row["module"]
        module.write_text(row["files"][row["module"]])
        assert passed(row, tmp_path, "", []) == 0.0
        module.write_text(modules[row["module"]][1])
        assert passed(row, tmp_path, "", []) == 1.0
        module.unlink()
        module.symlink_to("/etc/passwd")
        assert passed(row, tmp_path, "", []) == 0.0
        module.unlink()


@pytest.mark.skipif(not EXTRA, reason="MEGATRON_GRPO_EXTRA_AGENTS does not name a folder with the packages of tools/agent_packages.txt")
def test_third_party_agents_run_through_the_endpoint():
    """In a process of its own: verifiers needs an older `openai` than the one that is installed."""
    path = os.pathsep.join([str(Path(EXTRA).resolve()), str(ROOT)])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).with_name("agents_of_others.py"))],
        env={**os.environ, "PYTHONPATH": path}, cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:]
