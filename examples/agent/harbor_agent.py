"""`--agent examples/agent/harbor_agent.py:solve`: a trial of Harbor: its task, agent, container and verifier (`uv tool install harbor`).

HARBOR_TRIAL is the configuration of the trial without its task (`harbor trial schema`), as JSON:
{"agent": {"name": "terminus-2", "model_name": "openai/policy"}, "environment": {"type": "docker"}}.
`python examples/agent/harbor_agent.py FOLDER > tasks.jsonl` writes the tasks that `harbor download` has put into FOLDER as a data set.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

GRADED = {"should_grade": True, "has_valid_reward": True}  # after the endpoint's 401: a limit of the episode is reached


async def solve(row, endpoint):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        trial = {"task": {"path": row["task"]}, "trials_dir": folder, "trial_name": "trial", **json.loads(os.environ["HARBOR_TRIAL"])}
        trial["override_error_policy"] = {"AuthenticationError": GRADED, "AgentAuthenticationError": GRADED}
        Path(folder, "trial.json").write_text(json.dumps(trial))
        command, output = ["harbor", "trial", "start", "--config", f"{folder}/trial.json"], Path(folder, "output.txt")
        with output.open("wb") as file:
            process = await asyncio.create_subprocess_exec(*command, env=os.environ | endpoint.variables, stdout=file, stderr=file)
        try:
            status = await process.wait()
        finally:
            if process.returncode is None:  # the time is over: Harbor stops its container
                process.send_signal(signal.SIGINT)
                await process.wait()
        if status:
            raise RuntimeError(f"harbor: {output.read_text()[-200:]}")
        result = json.loads(Path(folder, "trial", "result.json").read_text())
    if not result["reward_valid"]:
        raise RuntimeError((result["exception_info"] or {}).get("exception_message", "the trial has no reward"))
    return result["verifier_result"]["rewards"]


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).resolve().glob("*/instruction.md")):
        print(json.dumps({"prompt": [{"role": "user", "content": path.read_text()}], "task": str(path.parent)}))
