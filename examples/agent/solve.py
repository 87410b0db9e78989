"""What a run needs to train `my_agent.py`: a function that plays one episode with it, or a verdict on the program's folder."""

import sys
from pathlib import Path

import openai

sys.path.insert(0, str(Path(__file__).parent))
import my_agent

CLIENT = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="-", max_retries=0)  # its connections serve all episodes


async def solve(row, endpoint):
    """`--agent`: one episode in the run's process."""
    client = CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    try:
        said = await my_agent.answer(client, row["prompt"][-1]["content"])
    except openai.AuthenticationError:  # a limit of the episode is reached
        said = ""
    return float((said or "").strip() == row["answer"])


def passed(row, folder, output, messages):
    """`--agent_verdict`, with `--agent_command "python examples/agent/my_agent.py"`."""
    written = folder / "answer.txt"
    return float(written.is_file() and written.read_text().strip() == row["answer"])
