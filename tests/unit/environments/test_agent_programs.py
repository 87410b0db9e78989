"""Programs as agents: their inputs, limits, exit and leftover processes."""

# ruff: noqa: E501 - answers, requests and programs stand on one line each

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.plugins.environments import agent_programs
from megatron_grpo.plugins.environments.agent_programs import AgentProgram, _missing_script, load_agent
from megatron_grpo.run.config.settings import Config
from tests.agents import Ledger, played

ASKS = """
import json, os, subprocess, sys, time, urllib.request
def ask(text="hi"):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
                                     {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def make_program(tmp_path: Path, text: str, **options) -> AgentProgram:
    (tmp_path / "agent.py").write_text(ASKS + text)
    return AgentProgram([sys.executable, str(tmp_path / "agent.py")], **options)


def run_program_episodes(tmp_path: Path, text: str, *, n: int = 1, ledger: Ledger | None = None, rules=None, **options):
    rows, _ = played(
        make_program(tmp_path, text, **options), ledger or Ledger(), n=n, **{"timeout": 60.0, "timeout_of_call": 150.0} | (rules or {})
    )
    return rows[0] if n == 1 else rows


def find_processes(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [int(entry.parent.name)] * (
                mark.encode() in entry.read_bytes() and (entry.parent / "stat").read_text().split()[2] != "Z"
            )
        except OSError:
            pass
    return found


def test_agent_program_receives_key_prompt_and_columns_but_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("MY_SETTING", "seen")
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    text = """
ask()
json.dump({"env": dict(os.environ), "row": json.load(open(os.environ["AGENT_ROW"])), "cwd": os.getcwd(), "files": os.listdir("..")}, open("found", "w"))
print("done by", 42)
"""
    found = {}

    def verdict(row, folder, output, messages):
        found.update(json.loads((folder / "found").read_text()), output=output, last=messages[-1], row_of_run=row, at=str(folder))
        return {"reward": 0.75, "size": 5}

    row = run_program_episodes(tmp_path, text, verdict=verdict, columns=["hint"], variables=["MY_SETTING"], rules={"needs_reward": True})
    assert row.finish_reason == "done" and row.record.turn_rewards == (0.75,)
    assert row.columns["size"] == 5 and row.columns["agent_output"] == found["output"] == "done by 42\n"
    environment = found["env"]
    assert set(environment) - {"LC_CTYPE", "LANG", "LC_ALL", "TZ"} == {
        "PATH", "HOME", "TMPDIR", "AGENT_ROW", "MY_SETTING", "OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY",
        "CLAUDE_CODE_ATTRIBUTION_HEADER",
    }  # fmt: skip
    assert environment["OPENAI_API_KEY"] not in ("the user's own", "secret") and environment["HOME"] == found["cwd"] == found["at"]
    assert found["row"] == {"prompt": [{"role": "user", "content": "q0"}], "hint": None} and sorted(found["files"]) == ["home", "row.json"]
    assert found["last"]["role"] == "assistant" and not Path(found["at"]).exists()


ENDS = {
    "exit status": ("ask()\nprint('a')\nsys.exit('no such tool')", "error", "ended with exit status 1: no such tool"),
    "signal": ("ask()\nos.kill(os.getpid(), 11)", "error", "SIGSEGV"),
    "asks nothing": ("pass", "error", "sent no request"),
    "exception": ("ask()\n1 / 0", "error", "ZeroDivisionError: division by zero"),
    "output": ("ask()\nwhile True: print('x' * 100_000)", "error", "more than 1 MiB of output"),
}


@pytest.mark.parametrize("how", ENDS)
def test_agent_program_that_fails_trains_nothing_and_reports_its_last_line(tmp_path, monkeypatch, how):
    monkeypatch.setattr(agent_programs, "MOST_OUTPUT", 1 << 20)
    text, reason, fault = ENDS[how]
    row = run_program_episodes(tmp_path, text)
    assert row.finish_reason == reason and fault in row.record.numbers.fault


def test_agent_program_memory_is_limited(tmp_path):
    row = run_program_episodes(tmp_path, "ask()\nx = bytearray(2 << 30)", memory_mb=512)
    assert row.finish_reason == "error" and "MemoryError" in row.record.numbers.fault


BAD_VERDICTS = ["raise ValueError('bad')", "raise SystemExit(3)", "return float('nan')", "return 10**400", "return 'good'", "return None",
                "return {'reward': 1, 'lock': (lambda: 0)}", "return {'reward': 1, 'completions': 2}"]  # fmt: skip


@pytest.mark.parametrize("value", BAD_VERDICTS)
def test_agent_program_with_invalid_verdict_trains_nothing(tmp_path, value):
    scope: dict = {}
    exec(f"def verdict(row, folder, output, messages):\n    {value}", scope)
    row = run_program_episodes(tmp_path, "ask()", verdict=scope["verdict"], rules={"needs_reward": True})
    assert row.finish_reason == "invalid" and "agent_verdict" in row.record.numbers.fault and not any(row.record.turn_rewards)


def test_agent_program_at_time_limit_is_killed_with_children_and_scored(tmp_path):
    mark = f"left-behind-{os.getpid()}"
    text = f"""
ask()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", "{mark}"])
time.sleep(300)
"""
    row = run_program_episodes(tmp_path, text, verdict=lambda *args: 0.5, rules={"timeout": 4.0, "needs_reward": True})
    assert (row.finish_reason, row.record.turn_rewards) == ("max_seconds", (0.5,))
    assert row.sequence.mask.any() and not find_processes(mark)


LEFT_BEHIND = {
    "a child": 'subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", MARK])',
    "a daemon": """
if not os.fork():
    os.setsid()
    if not os.fork():
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(300)", MARK])
    os._exit(0)
""",
    "one that always starts another": r"""
if not os.fork():
    os.execv(sys.executable, [sys.executable, "-c", "import os\nwhile True:\n    if os.fork(): os._exit(0)\n    os.setsid()", MARK])
""",
}  # fmt: skip


@pytest.mark.parametrize("kind", LEFT_BEHIND)
def test_agent_program_leftover_processes_are_killed_before_scoring(tmp_path, kind):
    mark = f"left-behind-{os.getpid()}"
    seen = []
    text = f"MARK = {mark!r}\nask()\n{LEFT_BEHIND[kind]}\ntime.sleep(0.3)"
    row = run_program_episodes(tmp_path, text, verdict=lambda *args: float(seen.append(find_processes(mark)) is None))
    assert row.finish_reason == "done" and seen == [[]]


def test_agent_program_that_ignores_end_of_episode_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_programs, "SECONDS_AFTER_END", 0.5)
    monkeypatch.setattr(agent_programs, "SECONDS_TO_TERMINATE", 0.5)
    text = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
n = 0
while True:
    n += 1
    try:
        ask(str(n))
    except Exception:
        time.sleep(0.1)
"""
    began = time.monotonic()
    row = run_program_episodes(tmp_path, text, verdict=lambda *args: 0.25, rules={"max_turns": 2, "needs_reward": True})
    assert (row.finish_reason, row.record.turn_rewards) == ("max_turns", (None, 0.25))
    assert time.monotonic() - began < 30 and not find_processes(str(tmp_path / "agent.py"))


def test_agent_programs_run_up_to_the_concurrency_limit(tmp_path):
    text = """
import pathlib
here = pathlib.Path(__file__).parent
(here / f"run-{os.getpid()}").touch()
ask()
time.sleep(0.3)
(here / f"seen-{os.getpid()}").write_text(str(len(list(here.glob("run-*")))))
(here / f"run-{os.getpid()}").unlink()
"""
    rows = run_program_episodes(tmp_path, text, n=5, rules={"concurrency": 2})
    assert [row.finish_reason for row in rows] == ["done"] * 5
    assert max(int(path.read_text()) for path in tmp_path.glob("seen-*")) <= 2


# ---- what is refused before a run


def make_settings(**turns) -> Config:
    cfg = Config()
    return replace(cfg, turns=replace(cfg.turns, **turns))


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ({"agent_command": "no_such_program x"}, "no_such_program is not a program on this machine"),
        ({"agent_command": "python 'unclosed"}, "No closing quotation"),
        ({"agent_command": "python nosuch.py --out b.py"}, "nosuch.py does not exist in "),
        ({"agent_command": "bash -x gone.sh"}, "gone.sh does not exist in "),
        ({"agent_command": " "}, "nothing is not a program"),
        ({"agent": "SOLVE:whole", "agent_ssl_certfile": "none.pem"}, r"agent_ssl_certfile \(none.pem\) cannot be used: No such file"),
        ({"agent": "SOLVE:takes_one"}, "must be a function that accepts"),
        ({"agent": "SOLVE:Class"}, "not a plain function"),
        ({"agent": "SOLVE:missing"}, "missing"),
        ({"agent_command": "python x.py", "agent_verdict": "SOLVE:takes_one"}, "agent_verdict: "),
    ],
)
def test_agent_command_that_is_invalid_is_rejected_before_the_run(tmp_path, turns, words):
    (tmp_path / "solve.py").write_text(
        "def takes_one(row): pass\ndef whole(row, endpoint): pass\nclass Class:\n    def __init__(self, row, endpoint): pass\n"
    )
    with pytest.raises(ConfigError, match=words):
        load_agent(make_settings(**{name: value.replace("SOLVE", str(tmp_path / "solve.py")) for name, value in turns.items()}))


def test_agent_command_script_file_must_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("")
    missing = {
        "python gone.py": "gone.py",
        "python3.11 -X dev gone.py a.py": "gone.py",
        "uv run --with x python sub/gone.py": "sub/gone.py",
    }
    found = ("python a.py --out gone.py", "python -m gone.py", "bash -lc gone.py", "node -e gone.js", "swe-agent gone.py", "python")
    assert {command: _missing_script(command.split()) for command in (*missing, *found)} == missing | dict.fromkeys(found)
