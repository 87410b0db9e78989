"""Faults of the machine and the environment: disks, memory, clocks, environment variables."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

from tests.end_to_end.runs import read_jsonl
from tools.torturing.moments import make_injection, raise_at
from tools.torturing.promises import SENTENCE, UNMOVED
from tools.torturing.target import BrokenPromiseError, Fault, Target, UnsupportedFaultError


def fill_disk(size: str) -> Callable[[Target], None]:
    """Return a fault in which output_dir is a file system of `size` that fills up and is then enlarged."""

    def inject(target: Target) -> None:
        target.out.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(target.out)], capture_output=True).returncode:
            raise UnsupportedFaultError("this user may not mount a file system")
        try:
            target.run().require(None, r"[Nn]o space")
            subprocess.run(["mount", "-o", "remount,size=200m", str(target.out)], check=True)
            target.resume()
        finally:
            subprocess.run(["umount", str(target.out)], check=False)

    return inject


def mount_read_only(target: Target) -> None:
    """Mount output_dir read-only; after the repair the run must resume."""
    target.copy_half_done()
    if subprocess.run(["mount", "--bind", str(target.out), str(target.out)], capture_output=True).returncode:
        raise UnsupportedFaultError("this user may not mount a file system")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(target.out)], check=True)
        target.run().require(None, "[Rr]ead-only")
    finally:
        subprocess.run(["umount", str(target.out)], check=False)
    target.resume()


def remove_permissions(target: Target) -> None:
    """Remove the permission to write into output_dir; as root, start the run as another user, because permissions do not apply to root."""
    target.copy_half_done()
    for folder in (target.folder.parent, target.folder):
        folder.chmod(0o755)
    target.log.chmod(0o777)
    become = 'exec setpriv --reuid=65534 --regid=65534 --clear-groups "$0" "$@"' if os.geteuid() == 0 else f"chmod -R a-w {target.out}"
    target.run(before=become).require(None, "[Pp]ermission")
    subprocess.run(["chmod", "-R", "u+w", str(target.folder)], check=True)
    target.resume()


def limit_resource(limit: str, *says: str) -> Callable[[Target], None]:
    """Return a fault that starts the run under a shell command such as "ulimit -n 64".

    Args:
        limit: Shell command.
        says: Patterns that the output must contain.
    """

    def inject(target: Target) -> None:
        target.run(before=limit).require(None, *says)
        target.resume()

    return inject


def set_environment(env: dict[str, str], code: int = 0) -> Callable[[Target], None]:
    """Return a fault that sets environment variables; the results must not change.

    Args:
        env: Environment variables.
        code: Expected exit code.
    """

    def inject(target: Target) -> None:
        target.run(env=env).require(code)
        target.check_results()

    return inject


def use_more_threads(target: Target) -> None:
    """Run with four threads; losses must equal those of one thread to 1e-4."""
    target.run(env={"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}).require(0)
    mine, right = (read_jsonl(out / "metrics.jsonl") for out in (target.out, target.setup.reference / "out"))
    if len(mine) != len(right) or any(abs(one["loss"] - other["loss"]) > 1e-4 for one, other in zip(mine, right, strict=True)):
        raise BrokenPromiseError("the losses differ from those of one thread by more than 1e-4")


def limit_memory(moment: str) -> Callable[[Target], None]:
    """Return a fault that limits the address space of a rank to its current size; the run may fail or go on."""

    def inject(target: Target) -> None:
        ended = target.run(inject=make_injection(moment, "starve", 1))
        if ended.code:
            ended.require(None, "memory")
            target.resume()
        else:
            target.check_results()

    return inject


def move_clock(seconds: int) -> Callable[[Target], None]:
    """Return a fault that moves the clock of all ranks by a number of seconds."""

    def inject(target: Target) -> None:
        target.run(inject=make_injection("training", f"clock {seconds}", None)).require(0)
        target.check_results()

    return inject


def start_second_run(target: Target) -> None:
    """Start a second run in the same output_dir; it must be refused and the first must go on."""
    process = target.begin()
    target.wait_for(process, lambda: any(line["what"] == "trained" for line in target.read_log()))
    first, target.output_file = target.output_file, target.folder / "second"
    second = target.begin("--overwrite_output_dir", "true")
    target.output_file = target.folder / f"output_{target.attempt}"
    code = second.wait(target.setup.patience)
    if code == 0 or "in use by another run" not in target.output_file.read_text():
        raise BrokenPromiseError(f"the second run ended with {code}: {target.output_file.read_text()[-1000:]}")
    target.output_file = first
    target.end(process).require(0)
    target.check_results()


def close_output(target: Target) -> None:
    """Close standard output after 10 bytes, as `torchrun ... | head -1` does."""
    process = target.begin(before="exec > >(head -c 10 > /dev/null)")
    ended = target.end(process)
    if ended.code == 0:
        target.check_results()
    else:
        target.resume()


def list_machine_faults() -> Iterator[Fault]:
    """Yield the faults of disks and memory."""
    for size in ("100k", "900k", "2m"):
        yield Fault(f"disk/full at {size}", SENTENCE, fill_disk(size))
    yield Fault("disk/read-only", SENTENCE, mount_read_only)
    yield Fault("disk/no right to write", SENTENCE, remove_permissions)
    yield Fault("disk/files of at most 200 kB", SENTENCE, limit_resource("ulimit -f 200"))
    yield Fault("disk/64 open files", SENTENCE, limit_resource("ulimit -n 64"))
    yield Fault("memory/address space of 2 GB", SENTENCE, limit_resource("ulimit -v 2000000", "no memory, or no thread"))
    for moment in ("building the model", "sampling", "training", "writing a checkpoint"):
        yield Fault(
            f"memory/limit at the current size, {moment}",
            "an error that names the cause, or the results of an undisturbed run",
            limit_memory(moment),
        )
    for moment in ("building the model", "training", "writing a checkpoint"):
        yield Fault(f"memory/allocation fails, {moment}", SENTENCE, raise_at(moment, "MemoryError"))
        yield Fault(f"disk/input or output error, {moment}", SENTENCE, raise_at(moment, "OSError"))


def list_environment_faults() -> Iterator[Fault]:
    """Yield the faults of clocks, environment variables and standard output."""
    yield Fault("clock/one hour back", UNMOVED, move_clock(-3600))
    yield Fault("clock/one day ahead", UNMOVED, move_clock(86400))
    for name, env in {"no HOME": {"HOME": "/nowhere"}, "locale C": {"LC_ALL": "C"}, "no terminal": {"TERM": "dumb"}}.items():  # fmt: skip
        yield Fault(f"environment/{name}", UNMOVED, set_environment(env))
    yield Fault("environment/four threads", "ends without error; not bit for bit, because threads add in another order", use_more_threads)
    yield Fault("environment/output is closed", "ends without error, or resumes", close_output)
    yield Fault("environment/a second run in output_dir", "refused; the first run continues", start_second_run)
