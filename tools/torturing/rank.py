"""Rank of a run with an injected fault: the real program with a scripted sampler in place of vLLM.

    torchrun --nproc_per_node 2 tools/torturing/rank.py train ...

Environment variables:

    TORTURE        JSON with the fault: `where` ("package.module:Class.method"), `call` (number of the call, from 1), `rank` and `do`
    TORTURE_PLAIN  if set, no plots are drawn, as without matplotlib: plots take most of the CPU seconds of a small run
    TORTURE_LOG    folder in which each rank writes a file with the time and CPU seconds of each sample, evaluation and step

`do` is a signal for this process ("SIGKILL"), a signal for torchrun ("launcher SIGTERM"), "raise OSError", "exit 0", "clock -3600"
(seconds), "starve" (limit the address space) or "hang 60" (seconds).
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_grpo import cli
from megatron_grpo.core.base import launcher

# Read before the run: a fault may change the clock, and a reward function may clear the environment.
NOW, LOG, ATTEMPT = time.time, Path(os.environ["TORTURE_LOG"]), os.environ["TORTURE_ATTEMPT"]
RANK, FAULT = launcher.read().rank, json.loads(os.environ.get("TORTURE", "null"))


def write_log(what: str, **more) -> None:
    """Append a line to this rank's log.

    Args:
        what: "sample", "trained" or "fault".
        more: Further fields.
    """
    line = {"time": NOW(), "cpu": time.process_time(), "attempt": ATTEMPT, "rank": RANK, "what": what, **more}
    with (LOG / f"rank_{RANK}.jsonl").open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def make_engine(cfg, inputs, parallel):
    """Return a scripted sampler. Random tokens depend on the prompt's number, the completion's index and the weights' version."""
    import numpy as np

    from megatron_grpo.core.rollout.engine import make_completion
    from tests.scripted_engine import ScriptedEngine

    def answer(prompt, index, version):
        rng = np.random.default_rng([prompt.number, index, version])
        tokens = rng.integers(4, 100, int(rng.integers(1, 9))).tolist()
        return make_completion(prompt.token_ids, tokens, [-4.0] * len(tokens), text=" ".join(map(str, tokens)),
                        finish_reason="length" if len(tokens) == 8 else "stop", version=version)  # fmt: skip

    return ScriptedEngine(answer)


def inject_fault(do: str) -> None:
    """Execute a fault.

    Args:
        do: Fault, as described for the module.
    """
    write_log("fault")
    kind, _, rest = do.partition(" ")
    if kind == "launcher":
        supervisor = os.getppid()
        launcher_pid = int(Path(f"/proc/{supervisor}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(launcher_pid, signal.Signals[rest])
    elif kind == "raise":
        raise {"OSError": OSError, "MemoryError": MemoryError, "RuntimeError": RuntimeError}[rest]("made up by tools/torture.py")
    elif kind == "exit":
        os._exit(int(rest))
    elif kind == "clock":
        turned = float(rest)
        time.time = lambda: NOW() + turned
    elif kind == "starve":
        addresses = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses))
    elif kind == "hang":
        time.sleep(float(rest))
    else:
        os.kill(os.getpid(), signal.Signals[kind])


def log_sampled_prompts(engine, prompts, sampling) -> None:
    """Log the prompts of a call of the sampler.

    Greedy sampling is an evaluation. Evaluations sample the same prompts repeatedly, so their names include the weights' version.
    """
    kind = f"evaluation of {engine.version}" if sampling.temperature == 0 else "rollout"
    write_log("sample", prompts=[f"{kind}: {one.number}" for one in prompts])


def wrap_calls(where: str, before=lambda count, args: None, after=lambda count, args: None) -> None:
    """Call `before` and `after` around each call of a function.

    Args:
        where: Function, as "package.module:Class.method".
        before: Called with (number of the call, arguments).
        after: Called with (number of the call, arguments).
    """
    module_name, _, path = where.partition(":")
    owner = importlib.import_module(module_name)
    *owners, name = path.split(".")
    for one in owners:
        owner = getattr(owner, one)
    original, calls = owner.__dict__[name], [0]
    function = original.__func__ if isinstance(original, (classmethod, staticmethod)) else original

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        calls[0] += 1
        before(calls[0], args)
        result = function(*args, **kwargs)
        after(calls[0], args)
        return result

    setattr(owner, name, type(original)(wrapped) if isinstance(original, (classmethod, staticmethod)) else wrapped)


def install_fault() -> None:
    """Install the log and the fault of $TORTURE."""
    wrap_calls("tests.scripted_engine:ScriptedEngine.generate", before=lambda _, args: log_sampled_prompts(*args[:3]))
    wrap_calls("megatron_grpo.core.policy.policy:Policy.train_step", after=lambda _, args: write_log("trained", step=args[0].version))
    if FAULT and FAULT["rank"] in (RANK, None):
        wrap_calls(FAULT["where"], before=lambda count, _: inject_fault(FAULT["do"]) if count == FAULT["call"] else None)


def train_with_fault(argv, parts):
    """Install the fault and run `train`."""
    install_fault()
    return train(argv, parts)


if "TORTURE_PLAIN" in os.environ:
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
train = cli.train
cli.train = train_with_fault

if __name__ == "__main__":
    raise SystemExit(cli.main(engine=make_engine))
