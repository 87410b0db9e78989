"""The newest supported megatron-core, which does not install on this Python: its unpacked wheel on the path of a new process.

pip download megatron-core==0.19.2 --no-deps --python-version 3.12 --only-binary=:all: && unzip -d core megatron_core-*.whl

MEGATRON_GRPO_EXTRA_CORE=core pytest tests/distributed/test_newer_core.py

Runs every sixth test of each of these files; all of them with MEGATRON_GRPO_ALL_TESTS=1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXTRA = os.environ.get("MEGATRON_GRPO_EXTRA_CORE")
ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not EXTRA, reason="MEGATRON_GRPO_EXTRA_CORE does not name a folder with an unpacked megatron-core wheel")


@pytest.fixture(scope="module")
def environment():
    path = os.pathsep.join([str(Path(EXTRA).resolve()), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    del env["MEGATRON_GRPO_EXTRA_CORE"]
    return env


def test_newer_core_has_another_version(environment):
    code = "import megatron.core; print(megatron.core.__version__)"
    other = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, check=True)
    import megatron.core

    assert other.stdout.split()[-1] != megatron.core.__version__


def test_sampled_tests_pass_on_newer_core(environment):
    names = ("parity", "step_parity", "logprobs", "families", "checkpoint", "router_replay")
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    share = [] if os.environ.get("MEGATRON_GRPO_ALL_TESTS") else ["-p", "tests.every_sixth"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *share, *files],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:]
