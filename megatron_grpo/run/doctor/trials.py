"""What a run does, tried small: two ranks add a number, vLLM answers from tiny weights, a step is trained on them."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_grpo.base import launcher
from megatron_grpo.run.doctor.check import Check, bad, good
from megatron_grpo.run.doctor.child import Ended, run, start, wait

SECONDS = 600.0  # for each, on a machine that may be busy
_NEEDS = {
    "two ranks": ("torch",),
    "vLLM's answer": ("torch", "transformers", "vllm"),
    "a training step": ("torch", "megatron-core", "transformers"),
}


def try_out(folder: Path, known: Mapping[str, Check]) -> Iterator[Check]:
    """known: what was found of packages: what needs a broken one is not tried."""
    for name, tried in (("two ranks", _two_ranks), ("vLLM's answer", _vllm), ("a training step", _step)):
        broken = [part for part in _NEEDS[name] if any(known[key].status == "fails" for key in (part, f"{part}-cpu") if key in known)]
        if broken:
            yield bad(name, f"cannot be tried without {' and '.join(broken)}", f"Mend {' and '.join(broken)} first.")
        else:
            yield tried(name, folder)


def _try(which: str, folder: Path) -> Ended:
    return run([sys.executable, "-m", "megatron_grpo.run.doctor.small", which, str(folder)], seconds=SECONDS)


def _two_ranks(name: str, folder: Path) -> Check:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "megatron_grpo.run.doctor.small", "sum", str(folder)]
    ranks = [start(command, env=launcher.environment_of(rank, world_size=2, port=port)) for rank in (0, 1)]
    ended = [wait(rank, seconds=SECONDS) for rank in ranks]
    if why := next((one.why for one in ended if one.why), ""):
        remedy = (
            "Gloo needs a network interface with an address that the host's name leads to: on one machine try GLOO_SOCKET_IFNAME=lo, else "
            "mend /etc/hosts."
        )
        return bad(name, f"two processes of this machine cannot add a number (gloo): {why}", remedy)
    return good(name, "two processes of this machine have added a number (gloo)")


def _vllm(name: str, folder: Path) -> Check:
    ended = _try("answer", folder)
    if ended.why:
        remedy = "Install the vLLM that this package asks for, for this machine's GPUs or CPU, in an environment of its own."
        return bad(name, f"vLLM did not answer from a tiny model: {ended.why}", remedy)
    return good(name, ended.said.splitlines()[-1])


def _step(name: str, folder: Path) -> Check:
    ended = _try("step", folder)
    if ended.why:
        remedy = (
            "Install torch and megatron-core in the versions that this package asks for. If it still fails then, report it, with what "
            "`megatron-grpo doctor --json` says."
        )
        return bad(name, f"a step of a tiny model could not be trained: {ended.why}", remedy)
    return good(name, ended.said.splitlines()[-1])
