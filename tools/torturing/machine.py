"""Disks, memory, clocks, and what surrounds a run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator

from tests.end_to_end.runs import records
from tools.torturing.moments import at, raised
from tools.torturing.promises import SENTENCE, UNMOVED
from tools.torturing.target import Broken, Fault, NotHere, Victim


def on_small_disk(size: str) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        victim.out.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(victim.out)], capture_output=True).returncode:
            raise NotHere("this user may not mount a file system")
        try:
            victim.run().must(None, r"[Nn]o space")
            subprocess.run(["mount", "-o", "remount,size=200m", str(victim.out)], check=True)
            victim.continues()
        finally:
            subprocess.run(["umount", str(victim.out)], check=False)

    return hurt


def read_only(victim: Victim) -> None:
    victim.half_done()
    if subprocess.run(["mount", "--bind", str(victim.out), str(victim.out)], capture_output=True).returncode:
        raise NotHere("this user may not mount a file system")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(victim.out)], check=True)
        victim.run().must(None, "[Rr]ead-only")
    finally:
        subprocess.run(["umount", str(victim.out)], check=False)
    victim.continues()


def not_allowed(victim: Victim) -> None:
    """Permission bits are nothing to root, so root runs as somebody else."""
    victim.half_done()
    for folder in (victim.folder.parent, victim.folder):
        folder.chmod(0o755)
    victim.log.chmod(0o777)
    become = 'exec setpriv --reuid=65534 --regid=65534 --clear-groups "$0" "$@"' if os.geteuid() == 0 else f"chmod -R a-w {victim.out}"
    victim.run(before=become).must(None, "[Pp]ermission")
    subprocess.run(["chmod", "-R", "u+w", str(victim.folder)], check=True)
    victim.continues()


def limited(limit: str, *says: str) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        victim.run(before=limit).must(None, *says)
        victim.continues()

    return hurt


def environment(env: dict[str, str], code: int = 0) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        victim.run(env=env).must(code)
        victim.is_whole()

    return hurt


def more_threads(victim: Victim) -> None:
    victim.run(env={"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}).must(0)
    mine, right = (records(out / "metrics.jsonl") for out in (victim.out, victim.bench.reference / "out"))
    if len(mine) != len(right) or any(abs(one["loss"] - other["loss"]) > 1e-4 for one, other in zip(mine, right, strict=True)):
        raise Broken("the losses are not those of one thread, to 1e-4")


def starved(moment: str) -> Callable[[Victim], None]:
    """From then on a rank gets no more memory than it has; what it has may do."""

    def hurt(victim: Victim) -> None:
        ended = victim.run(inject=at(moment, "starve", 1))
        if ended.code:
            ended.must(None, "memory")
            victim.continues()
        else:
            victim.is_whole()

    return hurt


def clock(seconds: int) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        victim.run(inject=at("training", f"clock {seconds}", None)).must(0)
        victim.is_whole()

    return hurt


def second_run(victim: Victim) -> None:
    process = victim.begin()
    victim.until(process, lambda: any(line["what"] == "trained" for line in victim.lines()))
    first, victim.said = victim.said, victim.folder / "second"
    second = victim.begin("--overwrite_output_dir", "true")
    victim.said = victim.folder / f"said_{victim.attempt}"
    code = second.wait(victim.bench.patience)
    if code == 0 or "in use by another run" not in victim.said.read_text():
        raise Broken(f"the second run ended with {code}: {victim.said.read_text()[-1000:]}")
    victim.said = first
    victim.end(process).must(0)
    victim.is_whole()


def closed_output(victim: Victim) -> None:
    """`torchrun ... | head -1`"""
    process = victim.begin(before="exec > >(head -c 10 > /dev/null)")
    ended = victim.end(process)
    if ended.code == 0:
        victim.is_whole()
    else:
        victim.continues()


def of_the_machine() -> Iterator[Fault]:
    for size in ("100k", "900k", "2m"):
        yield Fault(f"disk/full at {size}", SENTENCE, on_small_disk(size))
    yield Fault("disk/read-only", SENTENCE, read_only)
    yield Fault("disk/no right to write", SENTENCE, not_allowed)
    yield Fault("disk/files of at most 200 kB", SENTENCE, limited("ulimit -f 200"))
    yield Fault("disk/64 open files", SENTENCE, limited("ulimit -n 64"))
    yield Fault("memory/address space of 2 GB", SENTENCE, limited("ulimit -v 2000000", "no memory, or no thread"))
    for moment in ("building the model", "sampling", "training", "writing a checkpoint"):
        yield Fault(
            f"memory/limit at the current size, {moment}",
            "an error that names the cause, or the results of an undisturbed run",
            starved(moment),
        )
    for moment in ("building the model", "training", "writing a checkpoint"):
        yield Fault(f"memory/allocation fails, {moment}", SENTENCE, raised(moment, "MemoryError"))
        yield Fault(f"disk/input or output error, {moment}", SENTENCE, raised(moment, "OSError"))


def of_surroundings() -> Iterator[Fault]:
    yield Fault("clock/one hour back", UNMOVED, clock(-3600))
    yield Fault("clock/one day ahead", UNMOVED, clock(86400))
    for name, env in {"no HOME": {"HOME": "/nowhere"}, "locale C": {"LC_ALL": "C"}, "no terminal": {"TERM": "dumb"}}.items():  # fmt: skip
        yield Fault(f"environment/{name}", UNMOVED, environment(env))
    yield Fault("environment/four threads", "ends without error; not bit for bit, because threads add in another order", more_threads)
    yield Fault("environment/output is closed", "ends without error, or resumes", closed_output)
    yield Fault("environment/a second run in output_dir", "refused; the first run continues", second_run)
