"""Third-party programs and environments on the agent endpoint, with scripted answers; every token is accounted for.

pip install --no-deps --target packages -r tools/agent_packages.txt
MEGATRON_GRPO_EXTRA_AGENTS=packages pytest tests/unit/environments/test_agent_example.py

That test runs this file in a process that has the packages. No folder is needed if mini-swe-agent and the extras verifiers and openenv
are installed: pytest tests/unit/environments/agents_of_others.py
"""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

from megatron_grpo.core.rollout.engine import SamplingSettings
from megatron_grpo.plugins.environments.agent_programs import AgentProgram
from megatron_grpo.plugins.environments.agents import AgentLoop
from tests.agents import Ledger, compare, played, prompt, stage

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_mini_swe_agent_repairs_a_module_through_the_endpoint_and_every_token_is_accounted_for():
    data = runpy.run_path(str(EXAMPLES / "agent_swe" / "make_data.py"))
    hint, right, tests = data["MODULES"]["roman.py"]
    passed = runpy.run_path(str(EXAMPLES / "agent_swe" / "verdict.py"))["passed"]
    calls = [
        f"cat > roman.py << 'EOF'\n{right}\nEOF\npython3 -c 'import roman; print(roman.write(4))'",
        "ls",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    ]
    answers = ["I look first, and call nothing."] + [
        "<tool_call>\n" + json.dumps({"name": "bash", "arguments": {"command": call}}) + "\n</tool_call>" for call in calls
    ]

    class Scripted(Ledger):
        """Returns scripted answers in order."""

        def submit(self, key, token_ids, *, seed, max_tokens):
            self.answers = [answers[min(len(self.sampled), 3)]]
            super().submit(key, token_ids, seed=seed, max_tokens=max_tokens)

    words = [sys.executable, str(EXAMPLES / "agent_swe" / "agent.py")]
    program = AgentProgram(words, verdict=passed, columns=["files"], variables=["PYTHONPATH"])
    task = [{"role": "user", "content": data["ASK"].format(module="roman.py", hint=hint)}]
    asked = replace(prompt(module="roman.py", files={"roman.py": next(data["make_bugs"](right))}, tests=tests), raw=task)
    ledger = Scripted()
    player = AgentLoop(
        stage(program, timeout=120.0, needs_reward=True), [asked], SamplingSettings(n=1, max_completion_length=30_000), seed=3
    )
    try:
        while not player.advance(ledger, 0.5, version=7):
            pass
    finally:
        player.close()
    [done] = player.groups()[0].completions
    assert (done.finish_reason, done.record.numbers.fault) == ("done", ""), done.columns["agent_output"]
    assert done.record.turn_rewards[-1] == 1.0 and done.record.numbers.num_turns == 4
    assert compare(ledger, player)["trained"] == 4
    assert any("IV" in message["content"] for message in done.record.messages if message["role"] == "tool")


# ---- environments of others

COUNT = """
import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

class CountData(vf.TaskData):
    target: int

class CountTask(vf.Task[CountData]):
    @vf.reward
    async def says_ok(self, trace):
        return self.data.target * float(trace.last_reply.count("ok"))

class CountTaskset(vf.Taskset[CountTask]):
    def load(self):
        return [CountTask(CountData(prompt=f"count to {target}", target=target)) for target in (3, 5)]

class TwoTurns(vf.Harness):
    APPENDS_SYSTEM_PROMPT, NEEDS_CONTAINER, EXECUTES_CODE = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages, temperature=0.0)
                messages += [{"role": "assistant", "content": reply.choices[0].message.content}, {"role": "user", "content": "again"}]
        return ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["CountTaskset", "TwoTurns"]
"""


def load_solve(name):
    return runpy.run_path(str(EXAMPLES / "agent" / f"{name}_agent.py"))["solve"]


def test_verifiers_harness_runs_its_tasks_through_the_endpoint(tmp_path, monkeypatch):
    (tmp_path / "count_to.py").write_text(COUNT)
    monkeypatch.syspath_prepend(tmp_path)
    config = {"taskset": {"id": "count-to"}, "agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "count-to"}}}
    monkeypatch.setenv("VERIFIERS_ENV", json.dumps(config))
    ledger = Ledger(answers=["ok"])
    rows, player = played(load_solve("verifiers"), ledger, n=2, needs_reward=True, columns={"task": 1})
    assert [(row.finish_reason, row.record.numbers.fault) for row in rows] == [("done", "")] * 2
    assert [row.record.turn_rewards for row in rows] == [(None, 5.0)] * 2 and rows[0].columns["says_ok"] == 5.0
    assert compare(ledger, player)["trained"] == 4 and [len(row.sequence.contexts) for row in rows] == [1, 1]
    assert rows[0].record.messages[0] == {"role": "user", "content": "count to 5"}


def test_openenv_environment_runs_through_the_endpoint(monkeypatch):
    import socket
    import threading

    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Say(Action):
        message: str

    class Heard(Observation):
        text: str

    class Game(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            self._state = State(step_count=0)
            return Heard(text=f"seed {seed}", done=False)

        def step(self, action, timeout_s=None, **kwargs):
            self._state.step_count += 1
            return Heard(text="more", reward=0.5 * (action.message == "ok"), done=self._state.step_count == 3)

        @property
        def state(self):
            return self._state

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_fastapi_app(Game, Say, Heard, max_concurrent_envs=8), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    monkeypatch.setenv("OPENENV_URL", f"http://127.0.0.1:{listening.getsockname()[1]}")
    monkeypatch.setenv("OPENENV_ACTION", "message")
    ledger = Ledger(is_split=False, answers=["ok"])
    try:
        rows, player = played(load_solve("openenv"), ledger, n=2, needs_reward=True, columns={"reset": {"seed": 7}})
    finally:
        server.should_exit = True
        thread.join(10)
    assert [(row.finish_reason, row.record.numbers.fault) for row in rows] == [("done", "")] * 2
    assert [row.record.turn_rewards for row in rows] == [(None, None, 1.5)] * 2 and compare(ledger, player)["trained"] == 6
    assert "seed 7" in rows[0].record.messages[1]["content"]
