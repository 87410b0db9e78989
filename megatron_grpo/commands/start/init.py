"""The `megatron-grpo init` command: ask five questions and write the files of a first run. No torch.

Without a terminal (a pipe, a CI job) it asks nothing and takes the defaults.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_grpo.core.base.errors import ConfigError, Problem
from megatron_grpo.run import jobs
from megatron_grpo.run.rewards.loading import BUILT_IN

MODEL, DATA, REWARD, MEMORY = "Qwen/Qwen3-0.6B", "data.jsonl", "reward.py:correct", 80.0  # defaults; memory in GB
NUM_GENERATIONS, MICRO_BATCH, LEAST_BATCH = 8, 4, 128  # completions
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True, kw_only=True)
class InitAnswers:
    """Answers to the five questions of `init`.

    Args:
        model: Hub name or directory.
        data: Data set, as `--dataset` takes it.
        reward: Built-in reward, or a function as FILE.py:NAME.
        gpus: Number of GPUs.
        memory: Memory of one GPU, in GB.
    """

    model: str = MODEL
    data: str = DATA
    reward: str = REWARD
    gpus: int = 1
    memory: float = MEMORY

    def files(self) -> dict[str, str]:
        """Return the content of each file, by name."""
        unit = math.lcm(NUM_GENERATIONS, MICRO_BATCH * self.gpus)
        words = {name: _yaml(getattr(self, name)) for name in ("model", "data", "reward")}
        batch = {"generations": NUM_GENERATIONS, "batch": -(-LEAST_BATCH // unit) * unit, "micro_batch": MICRO_BATCH}
        files = {"config.yaml": _template("config.yaml").format(**words, **batch)}
        if self.reward == REWARD:
            files["reward.py"] = _template("reward.py.txt")
        plural = "" if self.gpus == 1 else "s"
        files["run.sh"] = _template("run.sh").format(gpus=self.gpus, s=plural, memory=f"{self.memory:g}")
        if self.data == DATA and not Path(DATA).exists():
            files[DATA] = "".join(f"{json.dumps(row)}\n" for row in _example_rows())
        return files


def run_init(argv: Sequence[str], plan: Callable[[list[str]], int]) -> int:
    """Ask the questions, write the files and plan the run.

    Args:
        argv: A directory; the current one by default.
        plan: The `plan` command.

    Returns:
        The exit code of the plan.

    Raises:
        ConfigError: The arguments are wrong, or a file exists already. Or the planned run cannot start; its files are written.
    """
    if len(argv) > 1 or argv[:1] and argv[0].startswith("-"):
        raise ConfigError(f"init takes one directory and no settings, not {' '.join(argv)!r}: `megatron-grpo init my_run`.")
    directory = Path(argv[0] if argv else ".").absolute()
    if existing := [name for name in ("config.yaml", "reward.py", "run.sh") if (directory / name).exists()]:
        raise ConfigError(f"init does not overwrite {', '.join(existing)} in {directory}: name another directory.")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"init cannot make the directory {directory}: {error.strerror}.") from error
    with chdir(directory):
        answers = _ask_questions() if sys.stdin is not None and sys.stdin.isatty() else _defaults()
        files = answers.files()
        for name, content in files.items():
            Path(name).write_text(content, encoding="utf-8")
        Path("run.sh").chmod(0o755)
        print(f"\nWrote {', '.join(files)} in {directory}. The plan of this run:\n", flush=True)
        words = ["--config", "config.yaml", "--world_size", str(answers.gpus), "--gpu_memory_gb", f"{answers.memory:g}"]
        enter = f"cd {shlex.quote(argv[0])}; " if argv else ""
        try:
            code = plan(words)
        except ConfigError as error:
            message = f"The files are written, but this run cannot start. Correct config.yaml, then `{enter}megatron-grpo plan "
            raise ConfigError([*error.problems, Problem(flags=(), message=f"{message}{shlex.join(words)}`.")]) from error
    print(f"\nNext: `{enter}megatron-grpo dry-run --config config.yaml` tries the data and the reward on a few rows; `bash run.sh` trains.")
    return code


def _defaults() -> InitAnswers:
    """Return and print the default answers."""
    gpus, memory = _gpus_here()
    answers = InitAnswers(gpus=gpus, memory=memory)
    summary = f"model {answers.model}, data {answers.data}, reward {answers.reward}, {gpus} GPU(s) of {memory:g} GB"
    print(f"Without a terminal, the defaults are used: {summary}.")
    return answers


def _ask_questions() -> InitAnswers:
    """Ask the five questions in the terminal."""
    gpus, memory = _gpus_here()
    print("Five questions; press Enter for the answer in brackets.")
    return InitAnswers(
        model=_ask("Model, a Hub name or a directory", MODEL),
        data=_ask("Data, a .jsonl or .parquet file or a Hub name", DATA),
        reward=_ask(f"Reward, FILE.py:FUNCTION or one of {', '.join(BUILT_IN)}", REWARD),
        gpus=int(_number("Number of GPUs", gpus, is_whole=True)),
        memory=_number("Memory of one GPU in GB", memory),
    )


def _ask(question: str, default: str) -> str:
    try:
        return input(f"{question} [{default}]: ").strip() or default
    except EOFError:  # Ctrl-D
        print()
        return default


def _number(question: str, default: float, *, is_whole: bool = False) -> float:
    while True:
        text = _ask(question, f"{default:g}")
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if 0 < number < math.inf and not (is_whole and number % 1):
            return number
        print(f"  {text!r} is not a {'whole number' if is_whole else 'number'} above 0.")


def _gpus_here() -> tuple[int, float]:
    """Return (number, memory of the smallest in GB) of the GPUs of this machine; without any, one of 80 GB."""
    memories = jobs.gpu_memories()
    return (len(memories), float(min(memories) // 1e9)) if memories else (1, MEMORY)


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _example_rows() -> list[dict[str, Any]]:
    """Return sums, as a data set to begin with."""
    pairs = [(11 + 7 * number % 89, 13 + 11 * number % 83) for number in range(256)]
    return [{"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": a + b} for a, b in pairs]


def _yaml(value: str) -> str:
    return yaml.safe_dump(value, width=math.inf, allow_unicode=True, default_flow_style=True).splitlines()[0]
