"""Run mini-swe-agent on one row: write the row's files into the working directory and start the agent.

If AGENT_IMAGE is set, each command runs in a container of that image without a network; otherwise it runs with your rights on this
machine.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_GLOBAL_CONFIG_DIR": os.environ["TMPDIR"]}

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.docker import DockerEnvironment
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.openrouter_model import OpenRouterModel

SYSTEM = "You are a programmer who works in a shell. Each answer is one call of bash. Commands run in the folder of the task."
TASK = "{{task}}\n\nWhen it is done, run: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def main() -> None:
    """Run the agent on the row in AGENT_ROW."""
    row, here = json.loads(Path(os.environ["AGENT_ROW"]).read_text()), Path.cwd()
    for name, text in row["files"].items():
        (here / name).write_text(text)
    if image := os.environ.get("AGENT_IMAGE"):
        run_args = ["--rm", "--network", "none", "--memory", "2g", "-v", f"{here}:/task"]
        shell = DockerEnvironment(image=image, cwd="/task", run_args=run_args, timeout=30)
    else:
        shell = LocalEnvironment(cwd=str(here), timeout=30)
    model = OpenRouterModel(model_name="policy")  # plain HTTP chat completions, with the URL below
    model._api_url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    model._api_key = os.environ["OPENAI_API_KEY"]
    agent = DefaultAgent(model, shell, system_template=SYSTEM, instance_template=TASK, cost_limit=0)
    try:
        agent.run(row["prompt"][-1]["content"])
    except Exception as error:
        # The endpoint answers 401 when a limit of the episode is reached.
        if type(error).__name__ != "OpenRouterAuthenticationError":
            raise
        print("episode limit reached", file=sys.stderr)


if __name__ == "__main__":
    main()
