"""The functions that connect `my_agent.py` to a run: `solve` for `--agent`, `passed` for `--agent_verdict`."""

import sys
from pathlib import Path

import openai

sys.path.insert(0, str(Path(__file__).parent))
import my_agent

# One client, so that all episodes share its connections; each episode sets its own URL and key.
CLIENT = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="-", max_retries=0)


async def solve(row, endpoint):
    """Run one episode in the process of the run, and return 1.0 if the answer is right."""
    client = CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    try:
        text = await my_agent.answer(client, row["prompt"][-1]["content"])
    except openai.AuthenticationError:  # a limit of the episode is reached
        text = ""
    return float((text or "").strip() == row["answer"])


def passed(row, folder, output, messages):
    """Return 1.0 if the answer that `--agent_command "python examples/agent/my_agent.py"` has written is right."""
    path = folder / "answer.txt"
    return float(path.is_file() and path.read_text().strip() == row["answer"])
