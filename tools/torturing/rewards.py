"""Reward functions that misbehave."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.end_to_end.runs import REWARD
from tools.torturing.promises import SENTENCE, UNMOVED
from tools.torturing.target import Fault, Victim

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

# What a reward does at its third call -> what must be said, None where the run must not notice.
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


def write_reward(victim: Victim, body: str) -> None:
    (victim.folder / "reward.py").write_text(THIRD_CALL.replace("{body}", body))


def reward_fails(body: str, says: str | None) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        write_reward(victim, body)
        victim.run().must(None, *([says] if says else []))
        (victim.folder / "reward.py").write_text(REWARD)
        victim.continues()

    return hurt


def reward_is_rude(body: str) -> Callable[[Victim], None]:
    def hurt(victim: Victim) -> None:
        write_reward(victim, body)
        victim.run().must(0)
        victim.is_whole()

    return hurt


def of_rewards() -> Iterator[Fault]:
    for name, (body, says) in REWARDS.items():
        yield Fault(f"reward/{name}", SENTENCE, reward_fails(body, says))
    for name, body in HARMLESS.items():
        yield Fault(f"reward/{name}", UNMOVED, reward_is_rude(body))
