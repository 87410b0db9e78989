"""How a failed job ends: one message per job, torchrun's error file, and the exit code."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_grpo.core.base.errors import ConfigError, RewardError, RunError, RunInterruptedError
from megatron_grpo.run import failures
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.failures import machine_sentence, report

ROOT = Path(__file__).resolve().parents[3]
SPEAKER = """
import sys, time
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.failures import report
sys.exit(report(ConfigError(sys.argv[1])))
"""


def run_job(folder: Path, texts: list[str]) -> list[subprocess.CompletedProcess]:
    """One process a text, all at once, as ranks of one attempt of torchrun."""
    running = []
    for rank, text in enumerate(texts):
        error_file = folder / "attempt_0" / str(rank) / "error.json"
        error_file.parent.mkdir(parents=True)
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(texts)), "LOCAL_RANK": str(rank), "MASTER_ADDR": "x",
               "MASTER_PORT": "1", "TORCHELASTIC_ERROR_FILE": str(error_file)}  # fmt: skip
        running.append(subprocess.Popen([sys.executable, "-c", SPEAKER, text], cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True))
    return [(process.communicate()[1], process.returncode) for process in running]


def test_config_error_on_all_ranks_is_printed_once_with_exit_code_2(tmp_path):
    ended = run_job(tmp_path, ["no model"] * 4)
    assert [code for _, code in ended] == [2] * 4
    assert sum("no model" in said for said, _ in ended) == 1


def test_config_error_on_one_rank_is_printed(tmp_path):
    ended = run_job(tmp_path, ["no model", "no data here"])
    assert "no model" in ended[0][0] and "no data here" in ended[1][0]


def test_torchrun_root_cause_is_the_rank_that_printed_the_error(tmp_path):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    ended = run_job(tmp_path, ["no model"] * 4)
    [speaker] = [rank for rank, (said, _) in enumerate(ended) if said]
    files = {rank: str(tmp_path / "attempt_0" / str(rank) / "error.json") for rank in range(4)}
    failures = {rank: ProcessFailure(local_rank=rank, pid=1, exitcode=2, error_file=file) for rank, file in files.items()}
    told = ChildFailedError("job", failures)
    assert told.get_first_failure()[0] == speaker
    assert "no model" in str(told).partition("Root Cause")[2]
    assert str(told).count("no model") == 1


@pytest.mark.parametrize(
    "error, code, said",
    [
        (ConfigError("lr is wrong."), 2, "megatron-grpo: 1 problem in the configuration; nothing was started.\n  1. lr is wrong."),
        (RunInterruptedError("stopped after step 3"), 3, "megatron-grpo: stopped after step 3"),
        (RewardError("f failed on row 2"), 1, "megatron-grpo: a reward function failed, and the run ends.\nf failed on row 2"),
        (RunError("rank 1 died"), 1, "megatron-grpo: rank 1 died"),
        (SystemExit(0), 1, "sys.exit(0) before the run was complete"),
    ],
)
def test_exit_codes(capsys, error, code, said):
    assert report(error) == code
    told = capsys.readouterr().err
    assert said in told and "Traceback" not in told


def test_unexpected_error_keeps_traceback_for_torchrun(tmp_path, monkeypatch, capsys):
    error_file = tmp_path / "attempt_0" / "0" / "error.json"
    error_file.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    try:
        {}["missing"]
    except KeyError as error:
        assert report(error) == 1
    assert "Traceback" in capsys.readouterr().err
    assert "Traceback" in json.loads(error_file.read_text())["message"]["extraInfo"]["py_callstack"]


@pytest.mark.parametrize(
    "error, said",
    [
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/x/metrics.jsonl"), "no space is left on the disk for /tmp/x/metrics.jsonl"),
        (RuntimeError("unable to write to file </torch_1>: No space left on device (28)"), "no space is left"),
        (OSError(errno.EROFS, "Read-only file system", "/x"), "/x cannot be written or read: Read-only file system"),
        (OSError(errno.EACCES, "Permission denied", "/x"), "/x cannot be written or read: Permission denied"),
        (OSError(errno.EMFILE, "Too many open files"), "Run `ulimit -n"),
        (RuntimeError("pipe failed: Too many open files"), "Run `ulimit -n"),
        (FileExistsError(errno.EEXIST, "File exists", "/x/hf"), "/x/hf cannot be used"),
        (OSError(errno.ENOSPC, "No space left on device", "/dev/shm/nccl-1"), "docker run --shm-size"),
        (MemoryError(), "no memory, or no thread, is left for this process: it holds "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), "MiB of the machine are free"),
        (RuntimeError("can't start new thread"), "MiB of the machine are free"),
    ],
)
def test_operating_system_errors_become_messages(error, said):
    assert said in machine_sentence(error)


@pytest.mark.parametrize("error", [KeyError("x"), FileNotFoundError(errno.ENOENT, "No such file", "/x"), RuntimeError("shapes differ")])
def test_internal_errors_are_not_reported_as_machine_errors(error):
    assert machine_sentence(error) is None


class OutOfMemoryError(RuntimeError):
    """An error with the name of torch's class."""


ALLOCATOR = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.25 GiB is free. Process 7"


@pytest.mark.parametrize(("file", "error", "words"), [
    ("core/policy/passes.py", OutOfMemoryError(ALLOCATOR), "while training (2.00 GiB requested, 1.25 GiB free)"),
    ("core/policy/hf_export.py", OutOfMemoryError(ALLOCATOR), "weight_sync_bucket_mb"),
    ("core/rollout/vllm_weights.py", OutOfMemoryError(ALLOCATOR), "weight_sync_bucket_mb"),
    ("core/rollout/colocated.py", RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:139"), "vllm_gpu_memory_utilization"),
    ("core/parallel/vocab.py", OutOfMemoryError(ALLOCATOR), "logprob_chunk_size"),
    ("core/policy/policy.py", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "recompute_granularity"),
    ("core/parallel/state.py", RuntimeError("NCCL error: unhandled cuda error ... Cuda failure 2 'out of memory'"), "building the model"),
])  # fmt: skip
def test_gpu_out_of_memory_error_names_settings_that_use_less(file, error, words):
    code = compile("def fail(error):\n    raise error\n", f"/site-packages/megatron_grpo/{file}", "exec")
    names: dict = {}
    exec(code, names)
    with pytest.raises(RuntimeError) as raised:
        names["fail"](error)
    said = machine_sentence(raised.value)
    assert words in said and f"megatron_grpo/{file}:2" in said and "resumes from the last checkpoint" in said


def test_settings_named_in_memory_errors_exist():
    known = {name for section in dataclasses.fields(Config) for name in dir(getattr(Config(), section.name)) if not name.startswith("_")}
    for _, _, remedy in failures._ON_GPU:
        assert set(re.findall(r"\b\w+_\w+\b", remedy)) <= known, remedy
