"""Faults of reward functions: errors, crashes, invalid values and side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.end_to_end.runs import REWARD
from tools.torturing.promises import SENTENCE, UNMOVED
from tools.torturing.target import Fault, Target

THIRD_CALL = """
import os, sys, time, signal, random, threading, subprocess
calls = [0]
def even(completion_ids, **columns):
    calls[0] += 1
    scores = [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
    if calls[0] == 3 and os.environ.get("TORTURE_ATTEMPT") == "1":
        {body}
    return scores
"""

# Name -> (code of the third call, pattern of the error message; None: no message is required).
REWARDS = {
    "raises": ('raise KeyError("lost")', "even"),
    "returns too few": ("return scores[:-1]", "even"),
    "returns None": ("return None", "even"),
    "returns NaN": ('return [float("nan")] * len(scores)', "even"),
    "returns infinity": ('return [float("inf")] * len(scores)', "even"),
    "returns words": ('return ["good"] * len(scores)', "even"),
    "calls sys.exit(0)": ("sys.exit(0)", "exit"),
    "calls os._exit(0)": ("os._exit(0)", "exit code 0"),
    "raises KeyboardInterrupt": ("raise KeyboardInterrupt", None),
    "kills its process": ("os.kill(os.getpid(), signal.SIGKILL)", "without an error message|Signal"),
    "crashes the interpreter": ("import ctypes; ctypes.string_at(0)", "without an error message|Signal"),
    "recurses endlessly": ("even.__globals__['f'] = lambda: f(); f()", "even"),
}

HARMLESS = {
    "prints 5 MB": 'print("x" * 5_000_000, file=sys.stderr)',
    "seeds the generators": "random.seed(0); import numpy, torch; numpy.random.seed(0); torch.manual_seed(0)",
    "clears its arguments": "[ids.clear() if hasattr(ids, 'clear') else None for ids in completion_ids]",
    "replaces signal handlers": "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]",
    "changes the directory": 'os.chdir("/")',
    "changes the environment": "os.environ.clear()",
    "changes the umask": "os.umask(0o777) and None",
    "starts a thread": "threading.Thread(target=time.sleep, args=(1,), daemon=True).start()",
    "starts a process": 'subprocess.run(["true"])',
    "forks": "pid = os.fork()\n        if pid == 0: os._exit(0)\n        os.waitpid(pid, 0)",
    "takes 6 s": "time.sleep(6)",
    "sets a locale": 'import locale; locale.setlocale(locale.LC_ALL, "C")',
    "turns gradients off": "import torch; torch.set_grad_enabled(False)",
    "changes the default dtype": "import torch; torch.set_default_dtype(torch.float64)",
}


def write_reward(target: Target, body: str) -> None:
    """Write a reward function that executes `body` in its third call of the first launch."""
    (target.folder / "reward.py").write_text(THIRD_CALL.replace("{body}", body))


def make_failing_reward(body: str, says: str | None) -> Callable[[Target], None]:
    """Return a fault in which the reward function fails; the run must print `says`, and resume with a working function."""

    def inject(target: Target) -> None:
        write_reward(target, body)
        target.run().require(None, *([says] if says else []))
        (target.folder / "reward.py").write_text(REWARD)
        target.resume()

    return inject


def make_harmless_reward(body: str) -> Callable[[Target], None]:
    """Return a fault in which the reward function has a side effect; the results must not change."""

    def inject(target: Target) -> None:
        write_reward(target, body)
        target.run().require(0)
        target.check_results()

    return inject


def list_reward_faults() -> Iterator[Fault]:
    """Yield the faults of reward functions."""
    for name, (body, says) in REWARDS.items():
        yield Fault(f"reward/{name}", SENTENCE, make_failing_reward(body, says))
    for name, body in HARMLESS.items():
        yield Fault(f"reward/{name}", UNMOVED, make_harmless_reward(body))
