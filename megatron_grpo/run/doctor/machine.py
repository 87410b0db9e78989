"""The machine: cores, memory, devices, shared memory, open files, disks."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_grpo.run.doctor.check import Check, bad, good
from megatron_grpo.run.doctor.child import run

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED, LEAST_FILES, LEAST_DISK = 64 * 2**20, 1024, 2**30  # bytes, files, bytes
GOOD_FILES = 65536

_DEVICES = """
import json, torch
found = []
for number in range(torch.cuda.device_count()):
    facts = torch.cuda.get_device_properties(number)
    torch.ones(8, device=f"cuda:{number}").sum().item()
    found.append(f"{facts.name}, {facts.total_memory / 1e9:.0f} GB")
print(json.dumps({"built": torch.version.cuda, "devices": found}))
"""


def look_at_machine() -> Iterator[Check]:
    cores, memory = len(os.sched_getaffinity(0)), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield good("machine", f"{os.uname().nodename}, {os.uname().sysname} {os.uname().release}, {cores} cores, {memory / 1e9:.0f} GB")
    yield _devices()
    yield _shared_memory(SHARED_MEMORY)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < LEAST_FILES:
        more = f"`ulimit -n {GOOD_FILES if hard == resource.RLIM_INFINITY else min(hard, GOOD_FILES)}` before the command"
        yield bad("open files", f"{soft} at a time", f"Ranks and engines open more: {more}.")
    else:
        yield good("open files", f"{soft:,} at a time")
    for name, folder in (("disk", Path.cwd()), ("temporary folder", Path(tempfile.gettempdir()))):
        yield _disk(name, folder)


def _devices() -> Check:
    ended = run([sys.executable, "-c", _DEVICES], seconds=300)
    if ended.why:
        remedy = "Mend torch first; then the driver (nvidia-smi tells its version, and what holds the GPUs)."
        return bad("devices", f"cannot be used: {ended.why}", remedy)
    facts = json.loads(ended.said.splitlines()[-1])
    if devices := facts["devices"]:
        return good("devices", f"{len(devices)} GPUs ({'; '.join(dict.fromkeys(devices))}), torch for CUDA {facts['built']}")
    if Path("/dev/nvidiactl").exists():
        return bad("devices", "there is an NVIDIA driver, and torch sees no GPU",
                   "Install a torch that is built for CUDA and for this driver, or look at CUDA_VISIBLE_DEVICES.")  # fmt: skip
    return good("devices", "no GPU: ranks run on the CPU, with gloo")


def _shared_memory(folder: Path) -> Check:
    name, remedy = "shared memory", "Give it more (docker run --shm-size 16g; in Kubernetes an emptyDir with medium: Memory at /dev/shm)."
    if not folder.is_dir():
        return bad(name, f"{folder} is not there", f"Mount a tmpfs there. {remedy}")
    try:
        with tempfile.TemporaryFile(dir=folder) as stream:
            stream.write(bytes(2**20))
    except OSError as error:
        return bad(name, f"{folder} cannot be written: {error.strerror}", remedy)
    usage = shutil.disk_usage(folder)
    found = f"{usage.total / 2**20:,.0f} MiB, {usage.free / 2**20:,.0f} of them free"
    return good(name, found) if usage.free >= LEAST_SHARED else bad(name, found, remedy)


def _disk(name: str, folder: Path) -> Check:
    found = f"{folder}: {shutil.disk_usage(folder).free / 1e9:,.1f} GB free"
    try:
        with tempfile.TemporaryFile(dir=folder) as stream:
            stream.write(b"x")
    except OSError as error:
        return bad(name, f"{folder} cannot be written: {error.strerror}", "Work in a folder of your own, or set TMPDIR.")
    if shutil.disk_usage(folder).free < LEAST_DISK:
        return bad(name, found, "Free some, or name an --output_dir on another disk: checkpoints are several times as large as the model.")
    return good(name, found)
