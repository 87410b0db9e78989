"""Test the three ways in which tools/install.sh installs the CPU stack, each in an empty environment, and print a table.

    python tools/try_installs.py --python python3.11 python3.12 --wheels FOLDER --quickstart

Each test uses a fresh clone of the last commit, an empty home directory, and pip without configuration or cache. FOLDER has CPU builds of
torch (torch-*+cpu-*.whl). Way 1 passes it to pip as PIP_FIND_LINKS. Way 2 serves it on 127.0.0.1 in place of PyTorch's index; if FOLDER has
no wheel for that Python, the real index is used. Way 3 has neither. Proxies and certificates of the shell are kept. A test downloads 1 to 3
GB and needs up to 10 GB of disk until it is deleted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("torch", "transformers", "megatron.core", "vllm", "megatron_grpo")
KEPT = re.compile(r"PATH|LANG|TMPDIR|.*(CERT|SSL|CA_BUNDLE|_CERTS_FILE).*|(HTTPS?|NO|ALL)_PROXY", re.IGNORECASE)
NOBODY = "http://127.0.0.1:9/"  # the discard port: a connection is refused at once
HEADINGS = ("way", "taken", "Python", "install s", "GB", "torch", *MODULES, "quickstart")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """HTTP handler that logs nothing."""

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serve_wheels(wheels: list[Path], folder: Path) -> Iterator[str]:
    """Serve a package index on 127.0.0.1 that contains only these wheels of torch, and yield its address."""
    (folder / "torch").mkdir(parents=True)
    for wheel in wheels:
        (folder / "torch" / wheel.name).symlink_to(wheel)
    handler = functools.partial(QuietHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def run_and_show(command: list[str], environment: dict[str, str], folder: Path) -> tuple[bool, str]:
    """Run a command, print its output, and return (whether it succeeded, its last 200 lines)."""
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    lines = []
    try:
        for line in process.stdout:
            print("    " + line, end="", flush=True)
            lines = [*lines[-199:], line]
        return process.wait() == 0, "".join(lines)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the process has ended
            os.killpg(process.pid, signal.SIGKILL)


def try_install(way: int, python: str, wheels: list[Path], index: str | None, quickstart: bool, folder: Path) -> list[str]:
    """Install in `folder` and return a row of the table.

    Args:
        way: Way of the installation: 1, 2 or 3.
        python: Python interpreter.
        wheels: Wheels of torch for this Python.
        index: Address that replaces PyTorch's index; None: the real one.
        quickstart: Whether to run the quickstart too.
        folder: Home directory of the test.
    """
    checkout = folder / "checkout"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
    environment = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
    environment |= {"HOME": str(folder), "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "MEGATRON_GRPO_DEVICE": "cpu"}
    environment |= {"MEGATRON_GRPO_PYTHON": python}
    if way == 1:
        environment["PIP_FIND_LINKS"] = str(wheels[0].parent)
    if index is not None:
        environment["MEGATRON_GRPO_TORCH_INDEX"] = index

    started = time.monotonic()
    installed, said = run_and_show(["bash", "tools/install.sh", "plot"], environment, checkout)
    seconds = time.monotonic() - started
    taken = re.search(r"ready after \d+ s, by way (\d)", said)
    size = subprocess.run(["du", "-s", "-B1000000", str(checkout / ".venv")], capture_output=True, text=True, check=True).stdout.split()[0]

    def run_python(code: str) -> tuple[bool, str]:
        command = [str(checkout / ".venv/bin/python"), "-W", "ignore", "-c", code]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        return done.returncode == 0, done.stdout.strip()

    row = [str(way), taken[1] if taken else "none", ".".join(read_python_version(python)), f"{seconds:.0f}", f"{int(size) / 1000:.1f}"]
    row.append(run_python("import importlib.metadata as m; print(m.version('torch'))")[1] or "none")
    row += ["yes" if run_python(f"import {module}")[0] else "NO" for module in MODULES]
    if not (quickstart and installed):
        return [*row, "not run" if installed else "NO"]
    passed, said = run_and_show(["bash", "examples/quickstart/run.sh"], environment, checkout)
    return [*row, "passed" if passed and "VERDICT: PASSED" in said else "NO"]


def read_python_version(python: str) -> list[str]:
    """Return the version of an interpreter as [major, minor, micro]."""
    code = "import sys; print(*sys.version_info[:3])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def main() -> int:
    """Run the selected tests, print the table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=["python3.11", "python3.12"], help="interpreters")
    parser.add_argument("--way", nargs="+", type=int, choices=(1, 2, 3), default=[1, 2, 3], help="ways of the installation")
    parser.add_argument("--wheels", type=Path, help="folder with CPU builds of torch; without it, way 1 is not tried")
    parser.add_argument("--quickstart", action="store_true", help="also run the quickstart in each environment")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # exit normally, so that temporary folders are deleted

    rows, skipped = [], []
    for python in args.python:
        tag = "cp" + "".join(read_python_version(python)[:2])
        wheels = sorted(args.wheels.resolve().glob(f"torch-*+cpu-{tag}-*.whl")) if args.wheels else []
        for way in args.way:
            if way == 1 and not wheels:
                skipped.append(f"way 1 was not tried with {python}: no wheel torch-*+cpu-{tag}-*.whl in --wheels {args.wheels}")
                continue
            print(f"[try] way {way}, {python}", flush=True)
            with contextlib.ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="try-install-")))
                index = NOBODY if way == 3 else None
                if way == 2 and wheels:
                    index = stack.enter_context(serve_wheels(wheels, folder / "index"))
                rows.append(try_install(way, python, wheels, index, args.quickstart, folder))

    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
    for row in [HEADINGS, ["-" * width for width in widths], *rows]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    print(*skipped, sep="\n")
    return 1 if not rows or any("NO" in row or "none" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
