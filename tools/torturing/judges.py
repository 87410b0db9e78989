"""The faults of a judge, which is `judge_server` as a process of its own."""

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
# How it answers, how often, and what the run must say; None where the run must not notice.
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
    """The endpoint as a process of its own. port: where an earlier one was."""

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
    """Within it the target's runs are judged by such a judge."""
    target.inputs[target.inputs.index("--reward_funcs") + 1] = "llm_judge"
    # Not in the target's folder: a process that has that open is taken for one of the run.
    with TemporaryDirectory(prefix="torture_judge_") as folder:
        judge = JudgeProcess(Path(folder), how, times)
        try:
            url = f"http://127.0.0.1:{judge.port}/v1"
            target.inputs += ["--llm_judge_url", url, "--llm_judge_model", "m", "--reward_timeout", str(TIMEOUT)]
            yield judge
            if how in ("die", "silent") or times == ALWAYS:  # mended
                judge.close()
                judge = JudgeProcess(Path(folder), port=judge.port)
                target.resume()
            else:
                target.check_results()
        finally:
            judge.close()


def make_judge_fault(how: str, times: int, says: str | None) -> Callable[[Target], None]:
    def inject(target: Target) -> None:
        target.setup = replace(target.setup, reference=target.setup.get_reference("judged", run_undisturbed))
        with start_judge(target, how, times):
            ended = target.run()
            ended.require(None, says) if says else ended.require(0)

    return inject


def run_undisturbed(target: Target) -> None:
    target.setup = replace(target.setup, reference=target.folder)
    with start_judge(target):
        target.run().require(0)


def list_judge_faults() -> Iterator[Fault]:
    for name, (how, times, says) in JUDGE_FAULTS.items():
        promise = UNMOVED if says is None else SENTENCE
        yield Fault(f"judge/{name}", promise, make_judge_fault(how, times, says))
