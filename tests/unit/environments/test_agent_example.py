"""The example with mini-swe-agent: its data, and the real program through the endpoint against scripted answers."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_grpo.environments.agent_programs import AgentProgram
from megatron_grpo.environments.agents import AgentPlayer
from megatron_grpo.rollout.engine import SamplingSettings
from tests.agents import Ledger, compare, prompt, stage

EXAMPLE = Path(__file__).parents[3] / "examples" / "agent_swe"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    words, sys.argv = sys.argv, ["make_data.py", "--out", str(folder), "--most", "2"]
    try:
        runpy.run_path(str(EXAMPLE / "make_data.py"), run_name="__main__")
    finally:
        sys.argv = words
    return [json.loads(line) for name in ("train", "test") for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def passed(*args):
    return runpy.run_path(str(EXAMPLE / "verdict.py"))["passed"](*args)


def test_each_task_has_a_bug_that_the_hidden_tests_notice_and_the_repaired_module_passes(rows, tmp_path):
    modules = runpy.run_path(str(EXAMPLE / "make_data.py"))["MODULES"]
    assert len(rows) == 8 and {row["module"] for row in rows} == set(modules)
    for row in rows[:3]:
        module = tmp_path / row["module"]
        module.write_text(row["files"][row["module"]])
        assert passed(row, tmp_path, "", []) == 0.0
        module.write_text(modules[row["module"]][1])
        assert passed(row, tmp_path, "", []) == 1.0
        module.unlink()
        module.symlink_to("/etc/passwd")
        assert passed(row, tmp_path, "", []) == 0.0
        module.unlink()


@pytest.mark.skipif(find_spec("minisweagent") is None, reason="needs mini-swe-agent: pip install mini-swe-agent")
def test_mini_swe_agent_repairs_a_module_through_the_endpoint_and_every_token_is_accounted_for(rows):
    row = next(one for one in rows if one["module"] == "roman.py")
    right = runpy.run_path(str(EXAMPLE / "make_data.py"))["MODULES"]["roman.py"][1]
    calls = [
        f"cat > roman.py << 'EOF'\n{right}\nEOF\npython3 -c 'import roman; print(roman.write(4))'",
        "ls",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    ]
    answers = ["I look first, and call nothing."] + [
        "<tool_call>\n" + json.dumps({"name": "bash", "arguments": {"command": call}}) + "\n</tool_call>" for call in calls
    ]

    class Scripted(Ledger):
        """Answers in their order."""

        def submit(self, key, token_ids, *, seed, max_tokens):
            self.answers = [answers[min(len(self.sampled), 3)]]
            super().submit(key, token_ids, seed=seed, max_tokens=max_tokens)

    words = [sys.executable, str(EXAMPLE / "agent.py")]
    program = AgentProgram(words, verdict=passed, columns=["files"], variables=["PYTHONPATH"])
    asked = replace(prompt(**{name: row[name] for name in ("module", "files", "tests")}), raw=row["prompt"])
    ledger = Scripted()
    player = AgentPlayer(
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
