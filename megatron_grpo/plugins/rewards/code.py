"""The reward `code`: the share of a row's tests that the Python program in the completion passes; None if the row has no tests.

The program is the last fenced block of the completion. Tests are snippets with assertions, which run in a separate process and call the
program in its process (hidden_tests.py), or pairs of standard input and expected output. Both processes run in a sandbox (sandbox.py)
with limits on time, memory, files and network.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron_grpo.core.base.errors import ConfigError, Problem, one_line
from megatron_grpo.core.base.files import parse_json
from megatron_grpo.plugins.rewards.answers import right_answers
from megatron_grpo.plugins.rewards.hidden_tests import find_test_problem
from megatron_grpo.plugins.rewards.jail import NO_LANDLOCK
from megatron_grpo.plugins.rewards.sandbox import SandboxResult, run_program, why_unsafe
from megatron_grpo.run.config.settings import Config, RewardConfig
from megatron_grpo.run.rewards.protocol import RowFailure, Score, read_text

COLUMNS = ("tests", "test_list", "test_cases")
_FENCE = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL | re.IGNORECASE)


class CodeReward:
    """The reward `code`.

    Args:
        landlock: Whether Landlock is required, see `run_program`.
    """

    needs = (COLUMNS,)

    def __init__(self, settings: RewardConfig, *, landlock: str):
        self.settings, self.landlock = settings, landlock

    def __call__(self, completions: list[Any], **columns: Any) -> list[Score | RowFailure]:
        deadline = time.monotonic() + self.settings.reward_timeout
        tests = right_answers(columns, self.needs)
        rows = zip(completions, tests, columns.get("entry_point") or [None] * len(completions))
        with ThreadPoolExecutor(self.settings.code_num_workers, thread_name_prefix="reward-code") as pool:
            return list(pool.map(lambda row: self._score(read_text(row[0]), row[1], row[2], deadline), rows))

    def _score(self, text: str, tests: Any, entry_point: Any, deadline: float) -> Score | RowFailure:
        try:
            snippets, pairs = read_tests(tests)
            snippets = [_called(snippet, entry_point) for snippet in snippets]
        except ValueError as error:
            return RowFailure(kind="tests", reason=f"cannot read the tests of this row ({one_line(error)})")
        if not snippets and not pairs:
            return None
        if fault := next(filter(None, map(find_test_problem, snippets)), None):
            return _unusable(fault)
        program = find_program(text)
        passed = 0
        if snippets:
            outcome = self._run(program, deadline, tests=snippets)
            if isinstance(outcome, RowFailure):
                return outcome
            verdicts = outcome.passed
            if fault := next((verdict for verdict in verdicts if isinstance(verdict, str)), None):
                return _unusable(fault)
            passed += verdicts.count(True)
        for test_input, expected in pairs:
            outcome = self._run(program, deadline, standard_input=test_input, as_main=True)
            if isinstance(outcome, RowFailure):
                return outcome
            passed += outcome.clean and split_output(outcome.output) == split_output(expected)
        share = passed / (len(snippets) + len(pairs))
        return float(share == 1) if self.settings.code_all_or_nothing else share

    def _run(self, program: str, deadline: float, **options: Any) -> SandboxResult | RowFailure:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return RowFailure(kind="timeout", reason=f"reached its reward_timeout of {self.settings.reward_timeout:g} s before this row,")
        seconds = min(self.settings.code_timeout, remaining)
        return run_program(program, seconds=seconds, memory_mb=self.settings.code_memory_mb, landlock=self.landlock, **options)


def _unusable(fault: str) -> RowFailure:
    return RowFailure(kind="tests", reason=f"cannot use a test of this row, which {one_line(fault)},")


def _called(test: str, entry_point: Any) -> str:
    """Append the call of `check` to a test of HumanEval, which only defines it; the argument is the column entry_point."""
    defines, calls = re.search(r"^def check\(", test, re.MULTILINE), re.search(r"^check\(", test, re.MULTILINE)
    return f"{test}\ncheck({entry_point})\n" if entry_point and defines and not calls else test


def find_program(text: str) -> str:
    """Return the last fenced block of a text, even if truncated; without a block, the text after the last `</think>`."""
    text = text.rpartition("</think>")[2]
    blocks = _FENCE.findall(text)
    return blocks[-1] if blocks else text


def read_tests(tests: Any) -> tuple[list[str], list[tuple[str, str]]]:
    """Parse the tests of a row.

    Args:
        tests: One snippet, a list of snippets or of {"input": ..., "output": ...}, {"inputs": [...], "outputs": [...]}, or any of these
            as JSON.

    Returns:
        Snippets, and (standard input, expected output) pairs.

    Raises:
        ValueError: If the tests have any other form.
    """
    if isinstance(tests, str):
        if tests.lstrip()[:1] not in ("[", "{"):
            return ([tests] if tests.strip() else []), []
        tests = parse_json(tests)
    if tests is None:
        return [], []
    if isinstance(tests, Mapping):
        if not {"inputs", "outputs"} <= set(tests):
            raise ValueError(f"an object with {sorted(tests)}; expected inputs and outputs")
        if len(tests["inputs"]) != len(tests["outputs"]):
            raise ValueError(f"{len(tests['inputs'])} inputs and {len(tests['outputs'])} outputs")
        return [], [(str(test_input), str(expected)) for test_input, expected in zip(tests["inputs"], tests["outputs"])]
    snippets, pairs = [], []
    for test in tests:
        if isinstance(test, str):
            snippets.append(test)
        elif isinstance(test, Mapping) and "output" in test:
            pairs.append((str(test.get("input") or ""), str(test["output"])))
        else:
            raise ValueError(f"a test {test!r}; expected a snippet, or an object with input and output")
    return snippets, pairs


def split_output(output: str) -> list[str]:
    """Return output in the form that is compared: lines without trailing space, without empty lines at the end."""
    return [line.rstrip() for line in output.rstrip().splitlines()]


def build_code(config: Config) -> CodeReward:
    """Create the reward. Raises ConfigError on a machine that cannot sandbox programs."""
    landlock = "may" if config.rewards.code_without_landlock else "must"
    reason = why_unsafe(landlock=landlock)
    if reason is not None:
        raise ConfigError([_unheld(reason)])
    return CodeReward(config.rewards, landlock=landlock)


def _unheld(reason: str) -> Problem:
    if reason.endswith(NO_LANDLOCK):
        message = (
            "Reward `code` cannot sandbox programs on this machine: its kernel has no Landlock (Linux 5.13 and later with `landlock` in "
            "/sys/kernel/security/lsm), so a program could read every file that you can. Use code_without_landlock true to run them anyway."
        )
        return Problem(flags=("reward_funcs", "code_without_landlock"), message=message, nearest={"code_without_landlock": [True]})
    message = f"Reward `code` cannot sandbox programs on this machine: {reason}. It needs Linux with seccomp, on x86_64 or aarch64."
    return Problem(flags=("reward_funcs",), message=message)
