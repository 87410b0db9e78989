"""The part of tools/torture.py that CI runs: real runs with one fault each."""

from __future__ import annotations

import importlib
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest

from tools.torturing.faults import FAULTS, SHORT
from tools.torturing.moments import MOMENTS, MOMENTS_OF_RANK_0

ROOT = Path(__file__).parents[2]


def test_run_killed_stopped_and_damaged_equals_undisturbed_run():
    ended = subprocess.run([sys.executable, "tools/torture.py", "--short"], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert f"{len(SHORT)} faults: {len(SHORT)} kept, 0 broken" in ended.stdout


def test_torture_has_more_than_120_distinct_faults():
    names = [fault.name for fault in FAULTS]
    assert len(names) > 120 and len(set(names)) == len(names) and set(names) >= SHORT
    assert all(fault.promise for fault in FAULTS)


def test_torture_page_lists_existing_faults():
    page = (ROOT / "docs/reliability.md").read_text()
    table = page.partition("<!-- torture -->")[2].partition("<!-- /torture -->")[0]
    _, _, table = table.partition("| family | promise | kept | faults |\n|---|---|---|---|\n")
    promises = {fault.name: fault.promise for fault in FAULTS}
    found = []
    for line in table.splitlines():
        family, promise, kept, names = line.strip("| ").split(" | ")
        faults = [f"{family}/{name}" for name in names.split("; ")]
        assert kept == f"{len(faults)} of {len(faults)}" and {promises[name] for name in faults} == {promise}, faults
        found += faults
    assert len(found) > 120 and len(set(found)) == len(found)


@pytest.mark.parametrize("moment", [*MOMENTS, *MOMENTS_OF_RANK_0])
def test_torture_moments_are_existing_functions(moment):
    module, _, path = {**MOMENTS, **MOMENTS_OF_RANK_0}[moment][0].partition(":")
    assert callable(reduce(getattr, path.split("."), importlib.import_module(module)))
