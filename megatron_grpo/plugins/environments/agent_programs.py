"""Agents of a run: the user's function, or a program started for each episode, and the function that returns its reward. No torch."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

from megatron_grpo.core.base.errors import config_error, describe_value, one_line
from megatron_grpo.plugins.environments.protocol import Environment, InvalidReplyError, as_finite_number, find_invalid_columns
from megatron_grpo.plugins.servers.addresses import find_certificate_fault
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.python_objects import copy_for_user
from megatron_grpo.run.rewards.loading import user_object

SECONDS_BETWEEN_LOOKS = 0.05
SECONDS_AFTER_END = 10.0  # in which a program may end by itself after its episode has ended
SECONDS_TO_TERMINATE = 5.0  # between SIGTERM and SIGKILL
SECONDS_TO_KILL = 5.0  # for what the program has started
OUTPUT, MOST_OUTPUT = 64 << 10, 16 << 20  # bytes of a program's output: that reward functions get, and that it may write
_INTERPRETER, _SCRIPTS = re.compile(r"uv|python[\d.]*|bash|sh|zsh|node|ruby|perl"), (".py", ".sh", ".js", ".mjs", ".rb", ".pl")
_WITHOUT_FILE = re.compile(r"-\w*[cme]")  # options after which an interpreter runs no file: python -m, bash -lc, node -e
_SUPERVISOR = Path(__file__).with_name("program_supervisor.py")


class AgentError(Exception):
    """Error raised if the agent failed; its episode is not trained. The message completes a sentence about the agent."""


@dataclass(slots=True, kw_only=True, eq=False)
class Endpoint:
    """Second argument of an agent function. Its key is valid until the function returns.

    Args:
        url: http://127.0.0.1:PORT, for clients of Anthropic's protocol.
        verdict_key: Key for POST /v1/verdict {"reward": 1.0} by a harness elsewhere; no environment variable holds it.
        timeout: Seconds of the episode.
        is_over: Whether the episode has ended, so further requests are refused.
        messages: The conversation so far, as the last request saw it.
        closed: Set when the rollout ends early.
        ended: Set when a program and all that it started have ended.
    """

    url: str
    api_key: str
    verdict_key: str
    timeout: float
    is_over: Callable[[], bool] = field(repr=False)
    messages: Callable[[], list[dict[str, Any]]] = field(repr=False)
    closed: threading.Event = field(repr=False, default_factory=threading.Event)
    ended: threading.Event = field(repr=False, default_factory=threading.Event)

    @property
    def base_url(self) -> str:
        """Base URL for clients of OpenAI's protocol."""
        return f"{self.url}/v1"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that the clients of both protocols read."""
        return {
            "OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.api_key, "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """Result of an agent's episode, besides its turns.

    Args:
        columns: Columns for reward functions.
        is_late: Whether the agent was ended by its timeout.
    """

    reward: float | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    is_late: bool = False


class AgentEnvironment(Environment):
    """Environment class of a run with agents. `load_agent` makes subclasses.

    Args:
        solve: Returns what `as_result` reads, or an awaitable of it.
        timeout_of_call: Seconds after which the call is given up; longer than the agent's, because its verdict is called after its end.
    """

    solve: ClassVar[Callable[[dict[str, Any], Endpoint], Any]]
    timeout_of_call: ClassVar[float]


def load_agent(cfg: Config) -> type[AgentEnvironment]:
    """Load the agent of a run. Imports user code.

    Raises:
        ConfigError: The function, the program, the verdict or the TLS certificate cannot be used.
    """
    turns = cfg.turns
    certfile = turns.agent_ssl_certfile
    if certfile is not None and (fault := find_certificate_fault(certfile, turns.agent_ssl_keyfile, "agent_ssl_keyfile")):
        raise config_error("agent_ssl_certfile", f"agent_ssl_certfile ({certfile}){fault}")
    if turns.agent is not None:
        solve = _function(turns.agent, "agent", "row, endpoint")
        return type("Agent", (AgentEnvironment,), {"solve": staticmethod(solve), "timeout_of_call": turns.agent_timeout})
    verdict = _function(turns.agent_verdict, "agent_verdict", "row, folder, output, messages") if turns.agent_verdict else None
    program = AgentProgram(
        _split_command(turns.agent_command or ""), verdict=verdict, columns=turns.agent_columns, variables=turns.agent_env,
        memory_mb=turns.agent_memory_mb,
    )  # fmt: skip
    to_end = SECONDS_AFTER_END + SECONDS_TO_TERMINATE + SECONDS_TO_KILL
    longest = 2 * turns.agent_timeout + to_end  # the program's time, and the verdict's
    return type("Agent", (AgentEnvironment,), {"solve": program, "timeout_of_call": longest})


def _function(spec: str, flag: str, arguments: str) -> Callable[..., Any]:
    function = user_object(spec, flag=flag)
    try:
        inspect.signature(function).bind(*arguments.split(", "))
    except (TypeError, ValueError) as error:
        raise config_error(flag, f"{flag}: {spec} must be a function that accepts ({arguments}): {one_line(error)}.") from error
    if inspect.isclass(function) or inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise config_error(flag, f"{flag}: {spec} is not a plain function.")
    return cast(Callable[..., Any], function)


def _split_command(command: str) -> list[str]:
    """Return the words of a command, with files made absolute, because each program runs in a folder of its own."""
    try:
        words = [str(Path(word).resolve()) if Path(word).is_file() else word for word in shlex.split(command)]
    except ValueError as error:
        raise config_error("agent_command", f"agent_command ({command}): {error}.") from error
    if not words or shutil.which(words[0]) is None:
        name = next(iter(words), "") or "nothing"
        raise config_error("agent_command", f"agent_command ({command}): {name} is not a program on this machine.")
    if script := _missing_script(words):
        raise config_error("agent_command", f"agent_command ({command}): {script} does not exist in {Path.cwd()}. Use the path of a file.")
    return words


def _missing_script(words: Sequence[str]) -> str | None:
    """Return the file that an interpreter is to run, if it does not exist."""
    arguments = words[1:] if _INTERPRETER.fullmatch(Path(words[0]).name) else ()
    script = next((word for word in arguments if _WITHOUT_FILE.fullmatch(word) or Path(word).suffix in _SCRIPTS or Path(word).exists()), "")
    return script if Path(script).suffix in _SCRIPTS and not Path(script).exists() else None


def as_result(value: Any, source: str) -> AgentResult:
    """Read the return value of an agent function or of `agent_verdict`.

    Args:
        value: A finite number, a dict with `reward` and columns for reward functions, or None.

    Raises:
        InvalidReplyError: It is something else.
    """
    columns = copy_for_user(dict(value)) if isinstance(value, Mapping) else {}
    reward = columns.pop("reward", None) if isinstance(value, Mapping) else value
    if fault := find_invalid_columns(columns):
        raise InvalidReplyError(f"{source} returned {fault}")
    number = as_finite_number(reward)
    if reward is not None and number is None:
        raise InvalidReplyError(f"{source} returned {describe_value(value)}; expected a finite number, a dict with reward, or None")
    return AgentResult(reward=number, columns=columns)


class AgentProgram:
    """Agent that is a program: started for each episode in its own folder and environment, and ended with all processes that it started.

    Args:
        verdict: Called after the program has ended: (row, folder, output, messages).
        memory_mb: Limit for the address space of a process; 0: none.
    """

    def __init__(
        self, words: Sequence[str], *, verdict: Callable[..., Any] | None = None, columns: Sequence[str] = (),
        variables: Sequence[str] = (), memory_mb: int = 0,
    ):  # fmt: skip
        self.words, self.verdict, self.columns, self.variables, self.memory_mb = list(words), verdict, columns, variables, memory_mb

    def __call__(self, row: dict[str, Any], endpoint: Endpoint) -> AgentResult:
        """Play one episode in the calling thread.

        Raises:
            AgentError: The program failed.
            InvalidReplyError: The verdict is not a reward.
        """
        with tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as name, tempfile.TemporaryFile() as output:
            folder = Path(name) / "home"
            folder.mkdir()
            (Path(name) / "row.json").write_text(
                json.dumps({"prompt": row["prompt"], **{column: row.get(column) for column in self.columns}}), encoding="utf-8"
            )
            is_late = self._run(folder, output, endpoint)
            size = output.seek(0, os.SEEK_END)
            output.seek(max(0, size - OUTPUT))
            text = output.read().decode("utf-8", "replace")
            result = AgentResult()
            if self.verdict is not None and endpoint.messages():
                try:
                    value = self.verdict(row, folder, text, endpoint.messages())
                except (Exception, SystemExit, KeyboardInterrupt) as error:
                    raise InvalidReplyError(f"agent_verdict raised {type(error).__name__}: {one_line(error)}") from error
                result = as_result(value, "agent_verdict")
                if result.reward is None:
                    raise InvalidReplyError("agent_verdict returned no reward; expected a finite number, or a dict with reward")
            return AgentResult(reward=result.reward, columns={**result.columns, "agent_output": text}, is_late=is_late)

    def _run(self, folder: Path, output: Any, endpoint: Endpoint) -> bool:
        """Run the program to its end. Returns whether its time was over."""
        inherited = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "TZ", *self.variables) if name in os.environ}
        own_variables = {"HOME": str(folder), "TMPDIR": str(folder), "AGENT_ROW": str(folder.parent / "row.json")}
        supervisor = [sys.executable, "-I", "-S", str(_SUPERVISOR), str(os.getpid()), str(self.memory_mb << 20), str(SECONDS_TO_TERMINATE)]
        process = subprocess.Popen(
            [*supervisor, *self.words], cwd=folder, env=inherited | own_variables | endpoint.variables, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        deadline, is_late = time.monotonic() + endpoint.timeout, False
        try:
            while process.poll() is None and not endpoint.closed.wait(SECONDS_BETWEEN_LOOKS):
                if os.fstat(output.fileno()).st_size > MOST_OUTPUT:
                    raise AgentError(f"wrote more than {MOST_OUTPUT >> 20} MiB of output")
                if endpoint.is_over():
                    deadline = min(deadline, time.monotonic() + SECONDS_AFTER_END)
                if is_late := time.monotonic() >= deadline:
                    break
        finally:
            _end(process)
            endpoint.ended.set()
        if endpoint.closed.is_set():
            raise AgentError("was ended with the rollout")
        if process.returncode and not is_late and not endpoint.is_over():
            output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT))
            lines = output.read().decode("utf-8", "replace").strip().splitlines()
            number = -process.returncode if process.returncode < 0 else process.returncode - 128
            end = signal.Signals(number).name if number in set(signal.Signals) else f"exit status {process.returncode}"
            raise AgentError(f"ended with {end}: {lines[-1][:300] if lines else 'it has written nothing'}")
        return is_late


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and all that it has started."""
    process.terminate()
    try:
        process.wait(SECONDS_TO_TERMINATE + SECONDS_TO_KILL)
    except subprocess.TimeoutExpired:  # it starts processes faster than they can be killed
        process.kill()
        process.wait()
