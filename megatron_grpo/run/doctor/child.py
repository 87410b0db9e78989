"""Tries that run in processes of their own, so that a crash there is an answer here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_grpo.base import launcher

_NOTHING = re.compile(r"^(\s|~|\^)*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """why: it failed, as the end of a sentence; "" where it did not. said: its standard output."""

    why: str
    said: str


def run(command: Sequence[str], *, seconds: float, env: Mapping[str, str] | None = None) -> Ended:
    return wait(start(command, env=env), seconds=seconds)


def start(command: Sequence[str], *, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    environment = dict(os.environ)
    launcher.forget(environment)  # it is no rank of whoever asks
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **(env or {})}
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        env=environment, start_new_session=True,
    )  # fmt: skip


def wait(process: subprocess.Popen[str], *, seconds: float) -> Ended:
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Ended(why=f"it did not end within {seconds:g} s", said="")
    code = process.returncode
    if code == 0:
        return Ended(why="", said=out)
    if code < 0:
        return Ended(why=_of_signal(signal.Signals(-code)), said=out)
    lines = [line.strip() for line in err.splitlines() if not _NOTHING.match(line)]
    told = next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception|Exit)\b.*:|megatron-grpo: ", line)), "")
    return Ended(why=(told or (lines[-1] if lines else f"exit code {code}"))[:300], said=out)


def _of_signal(number: signal.Signals) -> str:
    known = {
        signal.SIGILL: "the processor has no such instruction (SIGILL): it was built for another one",
        signal.SIGBUS: "shared memory is full (SIGBUS)",
        signal.SIGKILL: "it was killed (SIGKILL), for want of memory perhaps",
    }
    return known.get(number, f"it crashed ({number.name})")
