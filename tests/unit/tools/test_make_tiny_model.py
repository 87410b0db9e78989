"""tools/make_tiny_model.py: threads, families and outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import write_tiny

ROOT = Path(__file__).resolve().parents[3]
# Runs the tool as a command does, then says how many threads torch uses and what its children would inherit.
THREADS = """
import os, runpy, sys
sys.argv = ["make_tiny_model.py", *sys.argv[1:]]
runpy.run_path("tools/make_tiny_model.py", run_name="__main__")
import torch
print("THREADS", torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
"""


def test_make_tiny_model_uses_one_thread(tmp_path):
    # With two, on a machine whose cores are busy, each waits for the other: 45 times as long.
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    data = [sys.executable, "examples/quickstart/make_data.py", "--output", str(tmp_path / "data"), "--num_test", "8"]
    subprocess.run(data, cwd=ROOT, env=environment, check=True, capture_output=True)
    command = [sys.executable, "-c", THREADS, "--data", str(tmp_path / "data"), "--output", str(tmp_path / "model"), "--warm_up_steps", "1"]
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert made.stdout.splitlines()[-1:] == ["THREADS 1 1"], made.stdout + made.stderr


def test_make_tiny_model_family_equals_test_model_and_needs_output(tmp_path, monkeypatch, capsys):
    """Any of them: which there are, and that each is right, is of `tests/tiny_models.py`."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the program sets
    monkeypatch.setattr(sys, "path", [*sys.path])
    made = write_tiny(tmp_path / "theirs", "gpt_oss", seed=3)
    from tools.make_tiny_model import main

    monkeypatch.setattr(sys, "argv", ["make_tiny_model.py", "--family", "gpt_oss", "--seed", "3", "--output", str(tmp_path / "ours")])
    main()
    for name in ("config.json", "model.safetensors"):
        assert (made / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()
    monkeypatch.setattr(sys, "argv", sys.argv[:-2])
    with pytest.raises(SystemExit):
        main()
    assert "--family gpt_oss needs an --output" in capsys.readouterr().err


def test_make_tiny_model_hybrid_has_equal_size_and_needs_output(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the program sets
    monkeypatch.setattr(sys, "path", [*sys.path])
    from tools.make_tiny_model import main

    data = ROOT / "examples/quickstart/make_data.py"
    subprocess.run([sys.executable, data, "--output", tmp_path / "data", "--num_test", "8"], check=True, capture_output=True)
    counts = []
    for more in ([], ["--hybrid"]):
        out = tmp_path / f"model{len(more)}"
        words = ["--data", str(tmp_path / "data"), "--warm_up_steps", "0", *more]
        monkeypatch.setattr(sys, "argv", ["make_tiny_model.py", *words, "--output", str(out)])
        main()
        counts.append(json.loads((out / "made_by.json").read_text())["num_parameters"])
    assert counts[1] == pytest.approx(counts[0], rel=0.01)
    monkeypatch.setattr(sys, "argv", sys.argv[:-2])
    with pytest.raises(SystemExit):
        main()
    assert "--hybrid needs an --output" in capsys.readouterr().err
