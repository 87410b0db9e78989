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
from tools.torturing.target import Fault, Victim

OFTEN = 10**9
TIMEOUT = 20  # seconds of --reward_timeout
# How it answers, how often, and what the run must say; None where the run must not notice.
RUDE: dict[str, tuple[str, int, str | None]] = {
    "is overloaded briefly": ("503", 3, None),
    "responds with 429": ("429", 3, None),
    "drops connections": ("drop", 3, None),
    "is slow": ("slow", 3, None),
    "answers without a score": ("word", OFTEN, "llm_judge.*no `Score"),
    "answers with an HTML page": ("page", OFTEN, "llm_judge.*not JSON"),
    "rejects the key": ("401", OFTEN, "llm_judge.*401"),
    "redirects to another host": ("302", OFTEN, "Redirects are not followed"),
    "sends an endless response": ("endless", OFTEN, "more than 4 MiB"),
    "never answers": ("silent", OFTEN, "llm_judge.*timed out"),
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
def judged(victim: Victim, how: str = "", times: int = 0) -> Iterator[JudgeProcess]:
    """Within it the victim's runs are judged by such a judge."""
    victim.inputs[victim.inputs.index("--reward_funcs") + 1] = "llm_judge"
    # Not in the victim's folder: a process that has that open is taken for one of the run.
    with TemporaryDirectory(prefix="torture_judge_") as folder:
        judge = JudgeProcess(Path(folder), how, times)
        try:
            url = f"http://127.0.0.1:{judge.port}/v1"
            victim.inputs += ["--llm_judge_url", url, "--llm_judge_model", "m", "--reward_timeout", str(TIMEOUT)]
            yield judge
            if how in ("die", "silent") or times == OFTEN:  # mended
                judge.close()
                judge = JudgeProcess(Path(folder), port=judge.port)
                victim.continues()
            else:
                victim.is_whole()
        finally:
            judge.close()


def misjudged(how: str, times: int, says: str | None) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        victim.bench = replace(victim.bench, reference=victim.bench.reference_of("judged", undisturbed))
        with judged(victim, how, times):
            ended = victim.run()
            ended.must(None, says) if says else ended.must(0)

    return hurt


def undisturbed(victim: Victim) -> None:
    victim.bench = replace(victim.bench, reference=victim.folder)
    with judged(victim):
        victim.run().must(0)


def judges() -> Iterator[Fault]:
    for name, (how, times, says) in RUDE.items():
        promise = UNMOVED if says is None else SENTENCE
        yield Fault(f"judge/{name}", promise, misjudged(how, times, says))
