"""Run an episode in an OpenEnv environment with text actions (`pip install "megatron-grpo[openenv]"`).

Use it with `--agent examples/agent/openenv_agent.py:solve`. OPENENV_URL is the URL of the environment's server; OPENENV_ACTION is the field
of the action that takes the model's text, for example `message`. Columns of the data set: `prompt`, the instructions; `reset`, the
arguments of `reset`, such as a seed, so that all episodes of a group start alike.
"""

import json
import os

import openai
from openenv.core import GenericEnvClient


async def solve(row, endpoint):
    """Run one episode and return the sum of its rewards."""
    client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
    messages, reward = list(row["prompt"]), 0.0
    async with client, GenericEnvClient(base_url=os.environ["OPENENV_URL"]) as env:
        result = await env.reset(**row.get("reset", {}))
        while not result.done:
            messages.append({"role": "user", "content": json.dumps(result.observation)})
            try:
                reply = await client.chat.completions.create(model="policy", messages=messages)
            except openai.AuthenticationError:  # a limit of the episode is reached
                break
            text = reply.choices[0].message.content
            messages.append({"role": "assistant", "content": text})
            result = await env.step({os.environ["OPENENV_ACTION"]: text})
            reward += result.reward or 0.0
    return reward
