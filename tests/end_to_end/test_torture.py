"""CI's share of tools/torture.py: real runs, hurt once each."""

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


def test_a_run_that_is_killed_and_one_whose_checkpoint_is_damaged_are_the_undisturbed_run():
    ended = subprocess.run([sys.executable, "tools/torture.py", "--short"], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert f"{len(SHORT)} faults: {len(SHORT)} kept, 0 broken" in ended.stdout


def test_the_table_has_more_than_120_faults_each_by_its_own_name():
    names = [fault.name for fault in FAULTS]
    assert len(names) > 120 and len(set(names)) == len(names) and set(names) >= SHORT
    assert all(fault.promise for fault in FAULTS)


@pytest.mark.parametrize("moment", [*MOMENTS, *MOMENTS_OF_RANK_0])
def test_a_moment_is_a_call_of_something_that_is_there(moment):
    module, _, path = {**MOMENTS, **MOMENTS_OF_RANK_0}[moment][0].partition(":")
    assert callable(reduce(getattr, path.split("."), importlib.import_module(module)))
