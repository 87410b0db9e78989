"""Run a Harbor trial as an episode, with Harbor's task, agent, container and verifier (`uv tool install harbor`).

Use it with `--agent examples/agent/harbor_agent.py:solve`. HARBOR_TRIAL is the configuration of the trial without its task
(`harbor trial schema`), as JSON:
{"agent": {"name": "terminus-2", "model_name": "openai/policy"}, "environment": {"type": "docker"}}.
`python examples/agent/harbor_agent.py DIR > tasks.jsonl` writes the tasks that `harbor download` has put into DIR as a data set.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

# The endpoint answers 401 when a limit of the episode is reached; the trial is graded then.
GRADED = {"should_grade": True, "has_valid_reward": True}


async def solve(row, endpoint):
    """Run the trial of the row's task and return its rewards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        trial = {"task": {"path": row["task"]}, "trials_dir": folder, "trial_name": "trial"}
        trial |= json.loads(os.environ["HARBOR_TRIAL"])
        trial["override_error_policy"] = {
            "AuthenticationError": GRADED,
            "AgentAuthenticationError": GRADED,
        }
        Path(folder, "trial.json").write_text(json.dumps(trial))
        command = ["harbor", "trial", "start", "--config", f"{folder}/trial.json"]
        env, output = os.environ | endpoint.variables, Path(folder, "output.txt")
        with output.open("wb") as file:
            process = await asyncio.create_subprocess_exec(*command, env=env, stdout=file, stderr=file)
        try:
            status = await process.wait()
        finally:
            if process.returncode is None:  # cancelled at agent_timeout: Harbor stops its container
                process.send_signal(signal.SIGINT)
                await process.wait()
        if status:
            raise RuntimeError(f"harbor: {output.read_text()[-200:]}")
        result = json.loads(Path(folder, "trial", "result.json").read_text())
    if not result["reward_valid"]:
        error = result["exception_info"] or {}
        raise RuntimeError(error.get("exception_message", "the trial has no reward"))
    return result["verifier_result"]["rewards"]


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).resolve().glob("*/instruction.md")):
        prompt = [{"role": "user", "content": path.read_text()}]
        print(json.dumps({"prompt": prompt, "task": str(path.parent)}))
