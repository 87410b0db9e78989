"""`--agent examples/agent/verifiers_agent.py:solve`: tasks, harness and rewards of verifiers (`pip install "megatron-grpo[verifiers]"`).

VERIFIERS_ENV is the configuration of the environment as JSON: {"taskset": {"id": "gsm8k-v1"}, "agent": {"runtime": {"type": "docker"}}}.
`python examples/agent/verifiers_agent.py 500 > tasks.jsonl` writes its first 500 tasks as a data set.
"""

import functools
import json
import os
import sys
from itertools import islice

import verifiers.v1 as vf


@functools.cache
def load_environment():
    return vf.load_environment(vf.resolve_env_config(json.loads(os.environ["VERIFIERS_ENV"])))


@functools.cache
def find_task(number):
    return next(islice(load_environment().taskset, number, None))


async def solve(row, endpoint):
    client = vf.EvalClientConfig(base_url=endpoint.base_url, headers={"x-api-key": endpoint.api_key})
    episode = await load_environment().run_episode(find_task(row["task"]), vf.ModelContext(model="policy", client=client))
    for error in episode.errors + [error for trace in episode.traces for error in trace.errors]:
        if not endpoint.is_over():  # else a limit has ended the episode, which has a reward
            raise RuntimeError(f"{error.type}: {error.message}")
    columns = {name: reward.value for trace in episode.traces for name, reward in trace.rewards.items() if reward is not None}
    return {**columns, "reward": sum(trace.reward for trace in episode.traces)}


if __name__ == "__main__":
    for number, one in enumerate(islice(load_environment().taskset, int(sys.argv[1]))):
        print(json.dumps({"prompt": [{"role": "user", "content": one.data.prompt_text}], "task": number}))
