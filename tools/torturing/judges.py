"""Faults of an LLM judge; the judge is `judge_server` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.torturing.promises import SENTENCE, UNMOVED
from tools.torturing.target import Fault, Target

ALWAYS = 10**9
TIMEOUT = 20  # seconds of --reward_timeout
# Name -> (failure, number of requests, pattern of the error message; None: the run must not fail).
JUDGE_FAULTS: dict[str, tuple[str, int, str | None]] = {
    "is overloaded briefly": ("503", 3, None),
    "responds with 429": ("429", 3, None),
    "drops connections": ("drop", 3, None),
    "is slow": ("slow", 3, None),
    "answers without a score": ("word", ALWAYS, "llm_judge.*no `Score"),
    "answers with an HTML page": ("page", ALWAYS, "llm_judge.*not JSON"),
    "rejects the key": ("401", ALWAYS, "llm_judge.*401"),
    "redirects to another host": ("302", ALWAYS, "Redirects are not followed"),
    "sends an endless response": ("endless", ALWAYS, "more than 4 MiB"),
    "never answers": ("silent", ALWAYS, "llm_judge.*timed out"),
    "dies": ("die", 1, "llm_judge.*cannot be reached"),
}


class JudgeProcess:
    """Judge server in a process of its own.

    Args:
        folder: Folder of the file with the port.
        how: Failure, as in `judge_server.Handler`.
        times: Number of requests that fail.
        port: Port of an earlier server; 0 selects a free one.
    """

    def __init__(self, folder: Path, how: str = "", times: int = 0, port: int = 0):
        told = folder / "judge.port"
        told.unlink(missing_ok=True)
        command = [sys.executable, str(Path(__file__).with_name("judge_server.py")), str(told), how, str(times), str(port)]
        self.process = subprocess.Popen(command, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not told.exists() or not told.read_text().endswith("\n"):
            if self.process.poll() is not None:
                raise RuntimeError("the judge of tools/torture.py did not start")
            time.sleep(0.02)
        self.port = int(told.read_text())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def start_judge(target: Target, how: str = "", times: int = 0) -> Iterator[JudgeProcess]:
    """Score the target's runs by a judge while the context is open.

    On exit the target's results are checked; if the judge fails permanently, the run is first resumed with a working judge.
    """
    target.inputs[target.inputs.index("--reward_funcs") + 1] = "llm_judge"
    # Not in the target's folder: processes with open files in there count as processes of the run.
    with TemporaryDirectory(prefix="torture_judge_") as folder:
        judge = JudgeProcess(Path(folder), how, times)
        try:
            url = f"http://127.0.0.1:{judge.port}/v1"
            target.inputs += ["--llm_judge_url", url, "--llm_judge_model", "m", "--reward_timeout", str(TIMEOUT)]
            yield judge
            if how in ("die", "silent") or times == ALWAYS:  # resume with a working judge
                judge.close()
                judge = JudgeProcess(Path(folder), port=judge.port)
                target.resume()
            else:
                target.check_results()
        finally:
            judge.close()


def make_judge_fault(how: str, times: int, says: str | None) -> Callable[[Target], None]:
    """Return a fault in which the judge fails `times` times; the run must print `says`, or end normally if it is None."""

    def inject(target: Target) -> None:
        target.setup = replace(target.setup, reference=target.setup.get_reference("judged", run_undisturbed))
        with start_judge(target, how, times):
            ended = target.run()
            ended.require(None, says) if says else ended.require(0)

    return inject


def run_undisturbed(target: Target) -> None:
    """Run the target with a judge that never fails, as the reference of the other runs."""
    target.setup = replace(target.setup, reference=target.folder)
    with start_judge(target):
        target.run().require(0)


def list_judge_faults() -> Iterator[Fault]:
    """Yield the faults of the judge."""
    for name, (how, times, says) in JUDGE_FAULTS.items():
        promise = UNMOVED if says is None else SENTENCE
        yield Fault(f"judge/{name}", promise, make_judge_fault(how, times, says))
