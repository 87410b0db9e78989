"""The reward `math`: 1 if the completion's answer equals the correct one as mathematics, else 0; None if the row has no correct answer.

Equality is decided by math-verify. It can hang beyond its own timeout and requires a main thread, so it only runs in a child process that
is killed at a deadline; an answer that cannot be compared in time counts as wrong. Correct answers that are not mathematics ("yes",
"Paris") are compared as text, as in the reward `accuracy`.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from megatron_grpo.core.base.cleanup import die_with_parent
from megatron_grpo.core.base.errors import SECRET, config_error
from megatron_grpo.plugins.rewards.answers import alternatives, final_answer, needed_columns, right_answers, same_answer
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.rewards.protocol import RowFailure, Score, read_text

_FIRST_LOOK = 1.0  # seconds; rows that take longer are retried after all other rows have their scores
_LONGEST_BARE = 200  # characters; a longer text without an answer marker is not an answer
_MEMORY = 4 << 30  # bytes of address space: 10**(10**10) raises MemoryError instead of exhausting the machine
_STARTUP = 120.0  # seconds for imports on a busy machine
_MODULE = "megatron_grpo.plugins.rewards.math"  # this one, as the child runs it
_SLOW = RowFailure(kind="slow", reason="took longer than its first time limit")  # never leaves this module


class MathReward:
    """The reward `math`."""

    def __init__(self, *, needs: tuple[tuple[str, ...], ...], row_seconds: float, batch_seconds: float):
        self.needs, self.row_seconds, self.batch_seconds = needs, row_seconds, batch_seconds
        self.child = MathVerifyProcess()

    def __call__(self, completions: list[Any], **columns: Any) -> list[Score | RowFailure]:
        deadline = time.monotonic() + self.batch_seconds
        rows = [(read_text(completion), right) for completion, right in zip(completions, right_answers(columns, self.needs))]
        scores = [self._score(text, right, min(self.row_seconds, _FIRST_LOOK), deadline) for text, right in rows]
        for row, score in enumerate(scores):
            if score is _SLOW:
                second_score = self._score(*rows[row], self.row_seconds, deadline) if self.row_seconds > _FIRST_LOOK else 0.0
                scores[row] = 0.0 if isinstance(second_score, RowFailure) else second_score
        return scores

    def _score(self, text: str, right: Any, seconds: float, deadline: float) -> Score | RowFailure:
        answers = alternatives(right)
        if not answers:
            return None
        answer_given = final_answer(text)
        if any(same_answer(answer_given, final_answer(answer)) for answer in answers):
            return 1.0  # equal as text: math-verify is not needed
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return RowFailure(kind="timeout", reason=f"reached its reward_timeout of {self.batch_seconds:g} s before this row,")
        try:
            return self.child.ask({"text": text, "given": answer_given, "answers": answers}, min(seconds, remaining))
        except ChildDiedError:
            return _SLOW

    def close(self) -> None:
        """Stop the child process."""
        self.child.close()


def build_math(config: Config) -> MathReward:
    """Create the reward. Raises ConfigError if math-verify is not installed."""
    if find_spec("math_verify") is None:
        message = "Reward `math` needs the extra `math`: pip install 'megatron-grpo[math]'. Reward `accuracy` compares text without it."
        raise config_error("reward_funcs", message)
    settings = config.rewards
    return MathReward(needs=needed_columns(config), row_seconds=settings.math_timeout, batch_seconds=settings.reward_timeout)


def _prepare() -> Callable[[Any], float]:
    """Import math-verify and return the function that answers one request. Runs in the child only."""
    import logging

    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)  # it warns that its timeouts are disabled; the parent kills this process instead
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def read(text: str) -> list[Any]:
        return parse(text, targets, parsing_timeout=None)

    def boxed(answer: str) -> list[Any]:
        # A bare answer is often LaTeX without dollar signs, or an interval or a set that is only parsed inside a box.
        return read(f"\\boxed{{{answer}}}") or read(answer)

    right_answer = lru_cache(maxsize=1024)(lambda answer: boxed(final_answer(answer)))  # the same for a whole group

    def readings(request: Any) -> Iterator[list[Any]]:
        yield read(request["text"])
        if "\\boxed" not in request["text"] and len(request["given"]) <= _LONGEST_BARE:
            yield boxed(request["given"])

    def equal(request: Any) -> float:
        try:
            rights = [right_answer(answer) for answer in request["answers"]]
            return float(any(verify(right, reading, timeout_seconds=None) for reading in readings(request) for right in rights))
        except Exception:  # noqa: BLE001 - sympy may raise anything for a model's output: such an answer is wrong
            return 0.0

    return equal


# ---- the child process: it answers each JSON line with another, and is killed if it does not answer in time


class ChildDiedError(Exception):
    """Error raised if the child process ended or was killed before it answered; the message says which. The next request gets a new one."""


class ChildBrokenError(Exception):
    """Error raised if the child process cannot start; the message is that of the child."""


class MathVerifyProcess:
    """A new interpreter, started at the first request and after each death.

    It is not a fork, because a rank has threads, a GPU context and gigabytes of memory that a child must not inherit. It ends with its
    parent, even if the parent is killed by SIGKILL, and even while it is stuck in C code: the kernel ensures that with a parent-death
    signal and an alarm.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def ask(self, request: Any, seconds: float) -> Any:
        """Return the child's response to a request.

        Args:
            seconds: Time limit, without the start of the child.

        Raises:
            ChildDiedError: If the child does not answer in time, or ends.
            ChildBrokenError: If the child cannot start.
        """
        process = self._ensure_started()
        line = json.dumps({"seconds": seconds, "request": request}).encode() + b"\n"
        try:
            _pipe(process.stdin).write(line)
            _pipe(process.stdin).flush()
        except BrokenPipeError:
            self.close()
            raise ChildDiedError("the checking process ended") from None
        return self._read(process, seconds)

    def close(self) -> None:
        """Kill the child, if it is running."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process, self._unread = None, b""

    def _ensure_started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        package = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        # Without keys, because the child processes a model's output and needs none.
        environ = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
        self._process = process = subprocess.Popen(
            # -P: no current directory on the path, where a user's file.py may be called like a standard module.
            [sys.executable, "-P", "-m", _MODULE, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        try:
            ready = self._read(process, _STARTUP)
        except ChildDiedError as error:
            raise ChildBrokenError(f"python -m {_MODULE} did not start: {error}") from error
        if ready != "ready":
            self.close()
            raise ChildBrokenError(f"python -m {_MODULE} did not start: {ready}")
        return process

    def _read(self, process: subprocess.Popen[bytes], seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        descriptor = _pipe(process.stdout).fileno()
        while b"\n" not in self._unread:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                self.close()
                raise ChildDiedError(f"no result within {seconds:g} s")
            received = os.read(descriptor, 1 << 16)
            if not received:
                self.close()
                raise ChildDiedError("the checking process ended")
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "the child was started with pipes"
    return stream


def serve() -> None:
    """Answer requests until the input closes. Runs in the child."""
    die_with_parent(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep prints of libraries out of the responses

    def reply(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        answer = _prepare()
    except Exception as error:  # noqa: BLE001 - reported by the parent
        reply(f"{type(error).__name__}: {error}")
        return
    reply("ready")
    for line in sys.stdin.buffer:
        message = json.loads(line)
        # The default action of SIGALRM kills, also inside C code that never returns: nothing outlives a parent that could not kill it.
        signal.setitimer(signal.ITIMER_REAL, message["seconds"] + 5)
        result = answer(message["request"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(result)


if __name__ == "__main__":
    serve()
