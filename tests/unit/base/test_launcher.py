"""Launcher variables: which are read, and in which module."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_grpo
from megatron_grpo.cli import main
from megatron_grpo.core.base import launcher

PACKAGE = Path(megatron_grpo.__file__).parent
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "one", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x",
            "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_ERROR_FILE": "/tmp/a/attempt_2/1/error.json",
            "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip


def test_launcher_variables_are_read_in_launcher_module_only():
    names = re.compile(r"""["'](RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|SLURM_\w+|TORCHELASTIC_\w+|OMPI_\w+|PMI_\w+)["']""")
    files = [path for path in PACKAGE.rglob("*.py") if names.search(path.read_text())]
    assert sorted(files) == [PACKAGE / "core/base/launcher.py", PACKAGE / "run/jobs.py"]


def test_launch_info_of_torchrun():
    found = launcher.read(TORCHRUN)
    assert (found.rank, found.world_size, found.local_rank, found.problems) == (3, 4, 1, ())
    assert found.is_launched and found.by_torchrun and found.launcher_holds_store and not found.is_logging_rank
    assert str(found.report_file) == "/tmp/a/attempt_2/megatron_grpo.said" and str(found.attempts_file) == "/tmp/a/megatron_grpo.ended"


def test_launch_info_without_launcher_is_rank_0_of_1():
    found = launcher.read({})
    assert (found.rank, found.world_size, found.is_launched, found.is_logging_rank) == (0, 1, False, True)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"RANK": "three"}, "RANK is 'three'"),
        ({"RANK": "4"}, "RANK is 4 and WORLD_SIZE 4: ranks go from 0 to 3"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is ''"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'"),
        ({"RANK": "--3"}, "RANK is '--3'"),
        ({"WORLD_SIZE": "4²"}, "WORLD_SIZE is '4²'"),
        ({"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE is 'two'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
        ({"RANK": None, "WORLD_SIZE": "abc"}, "sets the number of processes, but WORLD_SIZE is 'abc'"),
        ({"RANK": None, "SLURM_NTASKS": "-2"}, "SLURM_NTASKS is '-2'"),
        ({"RANK": None, "NPROC_PER_NODE": "gpu", "NNODES": "0"}, "NPROC_PER_NODE is 'gpu'; NNODES is '0'"),
    ],
)
def test_launch_info_with_invalid_variables_is_rejected(change, said):
    env = {name: value for name, value in (TORCHRUN | change).items() if value is not None}
    [problem] = launcher.read(env).problems
    assert said in problem.message


@pytest.mark.parametrize(
    "env, flags, asked, line",
    [
        ({}, ["--world_size", "8"], "world_size (8)", "torchrun --nproc_per_node 8 -m megatron_grpo train --world_size 8 --dataset 'my "),
        ({"NPROC_PER_NODE": "4"}, [], "NPROC_PER_NODE (4)", "torchrun --nproc_per_node 4 -m megatron_grpo train --dataset 'my data'"),
        ({"NPROC_PER_NODE": "4", "NNODES": "2"}, [], "NPROC_PER_NODE (4, NNODES 2) means 8", "torchrun --nproc_per_node 4 --nnodes 2 "),
        ({"SLURM_NTASKS": "8"}, [], "SLURM_NTASKS (8)", "srun --ntasks 1 torchrun --nproc_per_node 8 -m megatron_grpo train "),
        ({"SLURM_NTASKS": "8", "SLURM_NNODES": "2"}, [], "SLURM_NTASKS (8)", "--ntasks-per-node 1 torchrun --nnodes 2 --nproc_per_node 4 "),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, [], "OMPI_COMM_WORLD_SIZE (2)", "torchrun --nproc_per_node 2 "),
        ({"WORLD_SIZE": "2"}, [], "WORLD_SIZE (2)", "torchrun --nproc_per_node 2 "),
        ({}, ["--tensor_model_parallel_size", "2", "--context_parallel_size", "2"],
         "tensor_model_parallel_size (2) x context_parallel_size (2) means 4", "torchrun --nproc_per_node 4 "),
    ],
)  # fmt: skip
def test_single_process_of_multi_rank_run_is_rejected_with_command(monkeypatch, capsys, env, flags, asked, line):
    for name in ("RANK", "WORLD_SIZE", "SLURM_NTASKS", "NPROC_PER_NODE", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main(["train", *flags, "--dataset", "my data"]) == 2
    said = capsys.readouterr().err
    assert asked in said and line in said


@pytest.mark.parametrize("command", ["train", "plan", "eval", "export", "replay", "compare-losses", "mismatch", "dry-run"])
def test_commands_with_invalid_world_size_are_rejected(monkeypatch, capsys, command):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "abc")
    assert main([command]) == 2
    assert "WORLD_SIZE is 'abc'" in capsys.readouterr().err


def test_commands_in_a_removed_directory_exit_2(monkeypatch, capsys, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["plan", "--world_size", "1"]) == 2
    assert "the working directory of this command has been removed" in capsys.readouterr().err


@pytest.mark.parametrize("files", [16, 24, 100])
def test_too_few_files_are_refused_before_anything_is_imported(files):
    line = f"ulimit -n {files}; exec {sys.executable} -m megatron_grpo train"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert f"the limit of open files is {files}, and train needs more. Run `ulimit -n " in ended.stderr


def test_single_process_run_with_world_size_1_is_accepted(monkeypatch, capsys):
    for name, value in {"NPROC_PER_NODE": "1", "SLURM_NTASKS": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--world_size", "1"]) == 2  # for want of a model
    assert "torchrun" not in capsys.readouterr().err
