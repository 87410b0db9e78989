"""`--agent examples/agent/openenv_agent.py:solve`: an environment of OpenEnv (`pip install "megatron-grpo[openenv]"`), played in text.

OPENENV_URL is the URL of its server, OPENENV_ACTION the field of its action that takes what the model says, for example `message`.
Columns of the data set: `prompt`, the instructions; `reset`, the arguments of `reset`, such as a seed, so that a group plays one game.
"""

import json
import os

import openai
from openenv.core import GenericEnvClient


async def solve(row, endpoint):
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
            said = reply.choices[0].message.content
            messages.append({"role": "assistant", "content": said})
            result = await env.step({os.environ["OPENENV_ACTION"]: said})
            reward += result.reward or 0.0
    return reward
