"""Failure reports: once per job for the user, in torchrun's error file, and as an exit code."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from megatron_grpo.core.base import launcher
from megatron_grpo.core.base.errors import (
    EXIT_CONFIG,
    EXIT_CRASH,
    EXIT_INTERRUPTED,
    ConfigError,
    RewardError,
    RunError,
    RunInterruptedError,
    one_line,
)
from megatron_grpo.run import jobs

PREFIX = "megatron-grpo: "
# Package that a command needs and an environment may lack -> how to install it.
INSTALLS = {
    **dict.fromkeys(
        ("torch", "megatron", "transformers", "safetensors", "vllm"),
        "On GPUs: pip install 'megatron-grpo[vllm]'; on CPUs: tools/install.sh of a clone. `plan` does not need it.",
    ),
    **dict.fromkeys(
        ("megatron_grpo_referee", "autograd"), "pip install 'megatron-grpo[referee]'; in a clone: bash tools/install.sh referee."
    ),
}


def report(error: BaseException) -> int:
    """Print why this process ends and return its exit code.

    A message that all ranks share is printed once; an unexpected error is printed by each rank that has one, with its traceback.
    """
    text, code = describe_error(error)
    if code == EXIT_CONFIG or (isinstance(error, RunInterruptedError) and error.is_final):
        jobs.note_end(code)
    if text is not None:
        print_error(text)
        return code
    trace = traceback.format_exc()
    rank = launcher.read().rank
    line = f"{PREFIX}rank {rank}: {type(error).__name__}: {one_line(error, max_characters=4000)}"
    write_error_file(f"{line}\n{trace}")
    print(f"{trace}{line}", file=sys.stderr, flush=True)
    return code


def print_error(text: str) -> None:
    """Print a message once on each machine, by whichever rank comes first, and write it to torchrun's error file.

    Args:
        text: The message, the same on every rank that calls this.
    """
    with _turn(text) as is_first:
        if is_first:
            write_error_file(text)
            print(text, file=sys.stderr, flush=True)
        else:
            write_error_file("This rank ends for the same reason as the first failed rank.", seconds_later=1)


def describe_error(error: BaseException) -> tuple[str | None, int]:
    """Return (message, exit code) for an error; the message is None if only a traceback helps."""
    if isinstance(error, ConfigError):
        count = len(error.problems)
        lines = [f"{PREFIX}{count} problem{'s' if count > 1 else ''} in the configuration; nothing was started."]
        lines += [f"  {number}. {problem}" for number, problem in enumerate(error.problems, 1)]
        return "\n".join(lines), EXIT_CONFIG
    if isinstance(error, RunInterruptedError):
        return f"{PREFIX}{error}", EXIT_INTERRUPTED
    if isinstance(error, RewardError):
        return f"{PREFIX}a reward function failed, and the run ends.\n{error}", EXIT_CRASH
    if isinstance(error, RunError):
        return f"{PREFIX}{error}", EXIT_CRASH
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG and error.filename:
        return f"{PREFIX}{str(error.filename)[:80]!r}... is not a valid path: it contains a name longer than 255 bytes.", EXIT_CONFIG
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in INSTALLS and find_spec(package) is None:
        return f"{PREFIX}this command needs {package}, which is not installed. {INSTALLS[package]}", EXIT_CONFIG
    if isinstance(error, SystemExit):
        return f"{PREFIX}something called sys.exit({error.code!r}) before the run was complete.{_location(error)}", EXIT_CRASH
    sentence = machine_sentence(error)
    return (f"{PREFIX}{sentence}" if sentence else None), EXIT_CRASH


# -- once per job -------------------------------------------------------------------------------------------------------------------------


@contextmanager
def _turn(text: str) -> Iterator[bool]:
    """Yield whether this rank is to print `text`. No other rank leaves this block before it has been printed.

    The ranks share a file; the holder of its lock reads what has been printed. Printing on rank 0 alone is not enough: the first rank that
    exits with an error makes the launcher end all others, and rank 0 may be late. If the printing rank dies with the lock, the kernel frees
    it, and the next one prints. Where ranks share no file, the first rank of each machine prints.
    """
    launched = launcher.read()
    if launched.report_file is None:
        yield launched.is_logging_rank
        return
    try:
        stream = launched.report_file.open("a+")
    except OSError:  # printing twice is better than not at all
        yield True
        return
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # not killed between printing and marking
    try:
        fcntl.flock(stream, fcntl.LOCK_EX)
        mark = hashlib.sha256(text.encode()).hexdigest()
        stream.seek(0)
        is_first = mark not in stream.read().split()
        yield is_first
        if is_first:
            stream.write(mark + "\n")
    finally:
        with suppress(OSError):  # for example a full disk, which may be the reason being reported
            stream.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def write_error_file(text: str, *, seconds_later: int = 0) -> None:
    """Write torchrun's error file, in the form that `torch.distributed.elastic` reads. Its report shows the earliest one as Root Cause.

    Args:
        seconds_later: Added to the timestamp, whose resolution is one second, so that a rank that only follows another is not taken for the
            first.
    """
    path = launcher.read().error_file
    if path is None or path.exists():
        return
    facts = {"py_callstack": text, "timestamp": str(int(time.time()) + seconds_later)}
    with suppress(OSError):  # a report that cannot be written must not hide what it reports
        path.write_text(json.dumps({"message": {"message": text, "extraInfo": facts}}))


# -- what a machine refuses ---------------------------------------------------------------------------------------------------------------

_BY_TEXT = {  # the text in errors of libraries that do not raise OSError
    **{os.strerror(number): number for number in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EROFS, errno.ENOMEM)},
    **dict.fromkeys(("can't allocate memory", "can't start new thread"), errno.ENOMEM),
}


# Out-of-memory messages of torch, CUDA, cuBLAS, NCCL and vLLM's allocator.
_NO_ROOM_ON_GPU = re.compile(r"CUDA ([Ee]rror: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure 2 ")
# (modules of this package, activity, settings that need less memory); the innermost module that the error passed decides.
_ON_GPU = (
    ("rollout/vllm_weights|rollout/vllm_weight_layout|policy/hf_export|trainer/weight_sync.py",
     "syncing weights", "a lower weight_sync_bucket_mb, offload_model true and offload_optimizer true, or sleep_level 2"),
    ("rollout/|partial_rollouts/engine|analysis/vllm_|servers/vllm_worker",
     "sampling or starting vLLM", "a lower vllm_gpu_memory_utilization, vllm_max_num_seqs or vllm_max_model_len, "
     "offload_optimizer true and offload_model true"),
    ("parallel/vocab", "computing log-probs", "a lower logprob_chunk_size"),
    ("policy/|analysis/(replica_check|traced)|train.py|trainer/sample_buffer.py",
     "training", "sleep_level 1, a lower max_tokens_per_micro_batch or micro_batch_size, "
     "recompute_granularity full, more ranks for tensor_model_parallel_size or context_parallel_size, or optimizer_cpu_offload true"),
    ("", "building the model", "more ranks for tensor_model_parallel_size or pipeline_model_parallel_size, or optimizer_cpu_offload true"),
)  # fmt: skip


def _gpu_sentence(error: BaseException) -> str | None:
    """Return a sentence for an out-of-memory error of a GPU; None for all other errors."""
    if type(error).__name__ != "OutOfMemoryError" and not _NO_ROOM_ON_GPU.search(str(error)):
        return None
    location = _location(error)
    doing, remedy = next((doing, remedy) for pattern, doing, remedy in _ON_GPU if re.search(pattern, location))
    requested = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    free = re.search(r"of which ([\d.]+ \w+) is free", str(error))
    facts = f" ({requested[1]} requested{f', {free[1]} free' if free else ''})" if requested else ""
    return (
        f"the GPU has no memory left while {doing}{facts}. To reduce memory: {remedy}. `plan --gpu_memory_gb` estimates what is needed and "
        f"what would fit. The same command resumes from the last checkpoint.{location}"
    )


def machine_sentence(error: BaseException) -> str | None:
    """Return what the machine refused and what helps, for errors that a user can fix; None for all others."""
    if on_gpu := _gpu_sentence(error):
        return on_gpu
    number = error.errno if isinstance(error, OSError) else errno.ENOMEM if isinstance(error, MemoryError) else None
    if number is None:
        number = next((number for text, number in _BY_TEXT.items() if text in str(error)), None)
    path = error.filename if isinstance(error, OSError) else None
    if path is None and (match := re.search(r"(/[\w./+-]+)", str(error))) and not isinstance(error, OSError):
        path = match[1].rstrip(".")
    file_text = f"{path}" if path else "a file"
    location = _location(error)
    if "/dev/shm" in str(path) or (number == errno.ENOSPC and "shared memory" in str(error)):
        size = _mebibytes("/dev/shm")
        return f"shared memory is full: /dev/shm has {size}. Give it more (docker run --shm-size 16g).{location}"
    if number in (errno.ENOSPC, errno.EDQUOT):
        free = f" ({_mebibytes(path)})" if path and _find_folder(path) else ""
        return f"no space is left on the disk for {file_text}{free}. Free disk space, then run the same command again.{location}"
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"{file_text} cannot be written or read: {os.strerror(number)}.{location}"
    if number in (errno.EMFILE, errno.ENFILE):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"the limit of open files is {soft}, and this process needs more. Run `ulimit -n {max(hard, 65536)}` before the "
            f"command.{location}"
        )
    if number == errno.ENOMEM:
        return f"no memory, or no thread, is left for this process: {_memory()}.{location}"
    if number in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST):
        return f"{file_text} cannot be used: {os.strerror(number)}.{location}"
    if number in (errno.EIO, errno.ESTALE):
        return f"the file system of {file_text} fails: {os.strerror(number)}.{location}"
    return None


def _location(error: BaseException) -> str:
    """Return the last place in this package that the error passed, in parentheses."""
    trace: TracebackType | None = error.__traceback__
    location = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if "/megatron_grpo/" in code.co_filename and not code.co_filename.endswith(("run/failures.py", "cli.py")):
            location = f" (megatron_grpo/{code.co_filename.rpartition('/megatron_grpo/')[2]}:{trace.tb_lineno}, {code.co_name})"
        trace = trace.tb_next
    return location


def _memory() -> str:
    """Return the memory of this process, its limits, and the free memory of the machine, in words."""
    lines: list[list[str]] = []
    for name in ("/proc/self/status", "/proc/meminfo"):
        with suppress(OSError):  # not Linux
            lines += [line.split() for line in Path(name).read_text().splitlines()]
    mebibytes = {words[0]: int(words[1]) // 1024 for words in lines if len(words) == 3 and words[2] == "kB"}
    parts = [f"it holds {mebibytes.get('VmRSS:', 0)} MiB ({mebibytes.get('VmSize:', 0)} MiB of addresses)"]
    limits = {"-v": (resource.RLIMIT_AS, 2**20, " MiB"), "-u": (resource.RLIMIT_NPROC, 1, " processes and threads")}
    for flag, (limit, unit, suffix) in limits.items():
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            parts.append(f"`ulimit {flag}` allows {soft // unit}{suffix}")
    return ", ".join([*parts, f"{mebibytes.get('MemAvailable:', 0)} MiB of the machine are free"])


def _find_folder(path: str) -> Path | None:
    return next((folder for folder in (Path(path), *Path(path).parents) if folder.is_dir()), None)


def _mebibytes(path: str) -> str:
    folder = _find_folder(path)
    if folder is None:
        return "nothing"
    usage = shutil.disk_usage(folder)
    return f"{usage.total / 2**20:.0f} MiB, {usage.free / 2**20:.1f} MiB of them free"
