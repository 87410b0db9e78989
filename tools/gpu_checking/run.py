"""Run the steps of the GPU check in order, save and print their results; without a GPU, check only that each step could start.

`tools/gpu_check.sh` is the command; `steps` defines the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # as a script, only its own folder is on the path

from tools.gpu_checking import steps as table  # noqa: E402
from tools.gpu_checking.steps import STEPS, CommandStep, RunStep, Step  # noqa: E402

RESULTS = "gpu_check.json"
SECONDS_TO_LEAVE = 60.0  # that a stopped process has to exit
# Packages that the steps need on a machine that has torch only. The archive may have at most MOST_MIB MiB.
PACKED = ("megatron-core", "trl", "transformers", "tokenizers", "safetensors", "huggingface-hub", "hf-xet", "regex", "accelerate", "psutil",
          "pyyaml", "rich", "pygments", "markdown-it-py", "mdurl", "sentencepiece", "pytest", "pluggy", "iniconfig", "cloudpickle",
          "requests", "tqdm", "filelock", "packaging", "numpy")  # fmt: skip
MOST_MIB = 64


def list_gpus() -> list[str]:
    """Return the GPUs that the driver lists. torch is not asked, because CUDA_VISIBLE_DEVICES may hide GPUs from it."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    return [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]


class Check:
    """Results of one check, saved in its folder.

    Args:
        out: Folder of the check.
        minutes: Budget in minutes; no step starts after it.
    """

    def __init__(self, out: Path, minutes: float):
        self.out, self.budget = out, 60 * minutes
        self.file = out / RESULTS
        self.found: dict[str, dict] = json.loads(self.file.read_text())["steps"] if self.file.exists() else {}

    @property
    def seconds(self) -> float:
        """Seconds spent on steps in this and earlier calls."""
        return sum(one["seconds"] for one in self.found.values())

    def run(self, chosen: Sequence[Step]) -> None:
        """Run the steps that have no result yet and print each result."""
        for step in chosen:
            if self.found.get(step.name, {}).get("verdict") in ("PASS", "FAIL"):
                self.tell(step.name)
                continue
            begun = time.monotonic()
            verdict, note = self._outcome(step)
            self.note(step.name, verdict, time.monotonic() - begun, note or step.shows)
            self.tell(step.name)

    def _outcome(self, step: Step) -> tuple[str, str]:
        """Run a step and return (verdict, note)."""
        if lacks := [name for name in step.needs if importlib.util.find_spec(name) is None]:
            return "SKIP", f"{' and '.join(lacks)} not installed"
        if self.seconds >= self.budget:
            return "SKIP", f"the budget of {self.budget / 60:g} minutes is spent"
        log, end = self.out / f"{step.name}.log", time.monotonic() + step.seconds
        with log.open("w") as stream:
            for number, command in enumerate(step.commands):
                limit = end - time.monotonic()
                found = run_command(command, self.out, step.env, stream, limit)
                expected = (command.ends,) if isinstance(command, CommandStep) else command.ends
                if found not in expected:
                    how = f"did not end in {step.seconds} s" if found is None else f"ended with {found}, not {expected[0]}"
                    return "FAIL", f"command {number + 1} of {len(step.commands)} {how}; see {log}"
        try:
            said = step.judge(self.out, log.read_text(errors="replace"))
        except (OSError, KeyError, ValueError, StopIteration) as error:
            return "FAIL", f"the results cannot be read: {type(error).__name__}: {error}; see {log}"
        return ("FAIL", said.removeprefix("! ")) if said.startswith("!") else ("PASS", said)

    def note(self, name: str, verdict: str, seconds: float, note: str) -> None:
        """Save the result of a step."""
        self.found[name] = {"verdict": verdict, "seconds": round(seconds, 1), "note": note}
        failed = any(one["verdict"] == "FAIL" for one in self.found.values())
        whole = {"verdict": "FAIL" if failed else "PASS", "seconds": round(self.seconds, 1), "gpus": list_gpus(), "steps": self.found}
        partial = self.file.with_suffix(".part")
        partial.write_text(json.dumps(whole, indent=1))
        partial.replace(self.file)

    def tell(self, name: str) -> None:
        """Print the result of a step."""
        one = self.found[name]
        print(f"{one['verdict']} {name:<16} {one['seconds']:6.1f} s  {one['note']}", flush=True)


def run_command(command: CommandStep | RunStep, out: Path, env: Mapping[str, str], stream, limit: float) -> int | None:
    """Run a command and return its exit status; None if it did not end in `limit` seconds.

    Args:
        command: Command of a step.
        out: Folder of the check.
        env: Additional environment variables.
        stream: Log file.
        limit: Limit in seconds.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "4", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **env}
    if isinstance(command, CommandStep):
        return _wait(
            _start([word.replace("OUT", str(out)) if "OUT/" in word else word for word in command.words], environment, stream), limit
        )
    end = time.monotonic() + limit
    with _start_server(command, out, environment, stream, limit) as extra:
        if extra is None:
            return None
        process = _start([*command.make_words(out), *extra], environment, stream)
        if command.kills:
            path, before = out / command.folder / "metrics.jsonl", len(table.read_metrics(out / command.folder))
            while process.poll() is None and time.monotonic() < end:
                if path.exists() and len(table.read_metrics(out / command.folder)) >= before + command.after:
                    process.send_signal(getattr(signal, command.kills))
                    break
                time.sleep(0.05)  # polling interval: nothing signals that a step was written
            if command.kills == "SIGKILL":
                process.wait()
                time.sleep(5)  # time for child processes to end
        return _wait(process, end - time.monotonic())


def _start(words: Sequence[str], environment: Mapping[str, str], stream) -> subprocess.Popen:
    stream.write(f"$ {' '.join(words)}\n")
    stream.flush()
    return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)


def _wait(process: subprocess.Popen, limit: float) -> int | None:
    try:
        return process.wait(max(limit, 1.0))
    except subprocess.TimeoutExpired:
        _end(process)
        return None


def _end(process: subprocess.Popen) -> None:
    """End a process and all processes of its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(SECONDS_TO_LEAVE)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


@contextlib.contextmanager
def _start_server(command: RunStep, out: Path, environment: Mapping[str, str], stream, limit: float) -> Iterator[list[str] | None]:
    """Start the rollout server of a run and yield the flags that connect the run to it; None if the server did not start."""
    if not command.beside:
        yield []
        return
    address = out / "address"
    address.unlink(missing_ok=True)
    (out / "token").write_text("of-this-check-alone\n")
    (out / "token").chmod(0o600)
    process, end = _start(command.make_server_words(out), environment, stream), time.monotonic() + limit
    try:
        while not address.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.2)  # polling interval: nothing signals that the server is ready
        yield ["--vllm_server_base_url", address.read_text().strip()] if address.exists() else None
    finally:
        if process.poll() is None:
            _end(process)


# ---- without a GPU -----------------------------------------------------------------------------------------------------------------------


def find_problems(out: Path) -> list[str]:
    """Return the problems that would prevent a step from starting.

    Checked are the flags of runs (with `plan`), the names of tests (with pytest) and the arguments of benchmarks. Missing packages and
    hardware are not problems.
    """
    table.prepare(out)
    found, tests = [], list[str]()
    for step in STEPS:
        for command in step.commands:
            if isinstance(command, RunStep):
                found += [f"{step.name}: {problem}" for problem in _find_refusals(command, out)]
            elif "pytest" in command.words:
                tests += [word for word in command.words if word.startswith("tests/")]
            elif command.words[1].startswith("benchmarks/"):
                found += [f"{step.name}: {problem}" for problem in _find_unknown_words(command.words[2:])]
            elif command.words[1] != "-c" and not (ROOT / command.words[1]).exists():
                found.append(f"{step.name}: there is no {command.words[1]}")
        if step.name in {other.name for other in STEPS if other is not step}:
            found.append(f"two steps are called {step.name}")
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *dict.fromkeys(tests)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    if collected.returncode:
        found.append(f"pytest does not collect {' '.join(dict.fromkeys(tests))}: {collected.stdout.splitlines()[-1:]}")
    if sum(step.seconds for step in STEPS) > 3 * 60 * 25:  # limits are generous: a step normally takes a third of its limit
        found.append("the steps' limits together are more than three times 25 minutes")
    return found


def _find_refusals(command: RunStep, out: Path) -> list[str]:
    from megatron_grpo import cli

    said = io.StringIO()
    # The step makes the quickstart's model and data itself.
    made = {"quickstart": ["--model", str(out / "model"), "--dataset", str(out / "prompts.jsonl")]}.get(command.folder, [])
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = cli.main(["plan", *command.make_words(out)[4:], "--json", *made, *_get_server_flags(command)])
    return [] if status == 0 else [said.getvalue().strip()[-400:]]


def _get_server_flags(command: RunStep) -> list[str]:
    return ["--vllm_server_base_url", "http://127.0.0.1:8000"] if command.beside else []


def _find_unknown_words(words: Sequence[str]) -> list[str]:
    from benchmarks import gpu

    try:
        gpu.parse_arguments(list(words))
    except SystemExit:
        return [f"benchmarks/gpu.py does not take {' '.join(words)}"]
    return []


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("output/gpu_check"), help="folder of results and logs")
    parser.add_argument("--minutes", type=float, default=25.0, help="budget of all calls; no step starts after it")
    parser.add_argument("--only", nargs="+", choices=[step.name for step in STEPS], help="run only these steps")
    parser.add_argument(
        "--pack", type=Path, help="install the packages that the steps need besides torch and vLLM into this folder, and exit"
    )
    args = parser.parse_args(argv)
    if args.pack:
        return pack(args.pack)
    if not list_gpus():
        wrong = find_problems(args.out.resolve())
        print(*wrong, sep="\n", end="\n" if wrong else "")
        print(f"No GPU here: nothing was measured. The check itself: {len(STEPS)} steps, {len(wrong)} that would not begin.")
        return 2 if wrong else 0
    table.prepare(args.out.resolve())
    check = Check(args.out.resolve(), args.minutes)
    check.run([step for step in STEPS if not args.only or step.name in args.only])
    print((check.file).read_text())
    return int(any(one["verdict"] == "FAIL" for one in check.found.values()))


def pack(folder: Path) -> int:
    """Install the packages of `PACKED` into a folder for this Python, compress it and print the size; return the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    installed = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PACKED, str(ROOT)]
    )
    if installed.returncode:
        return 2
    archive = folder.with_suffix(".tar.xz")
    subprocess.run(["tar", "-C", str(folder), "--exclude", "__pycache__", "--exclude", "tests", "-cJf", str(archive), "."], check=True)
    size = archive.stat().st_size / 2**20
    print(f"{archive}: {size:.1f} MiB of at most {MOST_MIB}")
    return 0 if size <= MOST_MIB else 2


if __name__ == "__main__":
    sys.exit(main())
