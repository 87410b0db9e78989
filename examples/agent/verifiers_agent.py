"""Run episodes of verifiers with its tasks, harness and rewards (`pip install "megatron-grpo[verifiers]"`).

Use it with `--agent examples/agent/verifiers_agent.py:solve`. VERIFIERS_ENV is the configuration of the environment as JSON:
{"taskset": {"id": "gsm8k-v1"}, "agent": {"runtime": {"type": "docker"}}}.
`python examples/agent/verifiers_agent.py 500 > tasks.jsonl` writes the first 500 tasks as a data set.
"""

import functools
import json
import os
import sys
from itertools import islice

import verifiers.v1 as vf


@functools.cache
def load_environment():
    """Return the environment of VERIFIERS_ENV, loaded once."""
    return vf.load_environment(vf.resolve_env_config(json.loads(os.environ["VERIFIERS_ENV"])))


@functools.cache
def find_task(number):
    """Return the task at an index of the task set."""
    return next(islice(load_environment().taskset, number, None))


async def solve(row, endpoint):
    """Run one episode and return its rewards by name, and their sum as `reward`."""
    headers = {"x-api-key": endpoint.api_key}
    client = vf.EvalClientConfig(base_url=endpoint.base_url, headers=headers)
    context = vf.ModelContext(model="policy", client=client)
    episode = await load_environment().run_episode(find_task(row["task"]), context)
    for error in episode.errors + [e for trace in episode.traces for e in trace.errors]:
        if not endpoint.is_over():  # an episode that a limit has ended has a reward
            raise RuntimeError(f"{error.type}: {error.message}")
    rewards = {}
    for trace in episode.traces:
        rewards |= {name: one.value for name, one in trace.rewards.items() if one is not None}
    return {**rewards, "reward": sum(trace.reward for trace in episode.traces)}


if __name__ == "__main__":
    for number, task in enumerate(islice(load_environment().taskset, int(sys.argv[1]))):
        prompt = [{"role": "user", "content": task.data.prompt_text}]
        print(json.dumps({"prompt": prompt, "task": number}))
