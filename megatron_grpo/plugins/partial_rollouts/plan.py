"""Forecast of the sampling time that partial rollouts save, by simulating one engine with measured lengths. No torch."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from statistics import mean
from typing import Any

from megatron_grpo.core.batching.batch_sizes import BatchSizes
from megatron_grpo.core.settings import RolloutConfig
from megatron_grpo.plugins.servers.addresses import list_addresses
from megatron_grpo.run.sharing import Lengths

DEPTHS, ORDERS = (1, 2, 3), 5  # depths and random orders of the prompts
NUM_ROLLOUTS, FIRST = 10, 3  # simulated rollouts, and the first one that counts: before it, more completions begin than later
STEP, RECOMPUTED = 500.0, 2.0  # time of an engine step, and of a token that is computed anew, in units of one request in a step


def forecast(sizes: BatchSizes, rollout: RolloutConfig, lengths: Lengths) -> dict[str, Any]:
    """Return how many times faster than with `async_rollout_depth` 0 rollouts are sampled at other depths.

    On servers it is relative to depth 1, where each rollout is sampled alone too, and the time of training is hidden.

    Args:
        lengths: (prompt, completion) lengths in tokens; `num_generations` consecutive lines are a group.
    """
    n, depths = sizes.num_generations, DEPTHS[1:] if sizes.has_servers else DEPTHS
    in_ranks = sizes.layout.world_size // rollout.vllm_tensor_parallel_size
    num_engines = max(1, len(list_addresses(rollout)) if sizes.has_servers else in_ranks)
    tokens = [completion for _, completion in lengths]
    groups = [tokens[i : i + n] for i in range(0, len(tokens) - n + 1, n)] or [(tokens * n)[:n]]
    num_groups, gains = -(-sizes.num_rollout_prompts // num_engines), dict[int, list[float]]()
    for order in range(ORDERS):
        rng = random.Random(order)
        rollouts = [[length for _ in range(num_groups) for length in rng.choice(groups)] for _ in range(NUM_ROLLOUTS)]
        times = {depth: sum(sampling_times(rollouts, rollout.vllm_max_num_seqs, depth)[FIRST : -max(DEPTHS)]) for depth in (0, *depths)}
        for depth in depths:
            gains.setdefault(depth, []).append(times[0] / times[depth])
    server_lines = (
        f"relative to depth 1, where sampling takes longer than training; each server has one engine of {rollout.vllm_max_num_seqs} "
        "requests (the default of megatron-grpo serve)"
    )
    return {
        "speedup_of_sampling": {
            str(depth): {"mean": mean(speedups), "min": min(speedups), "max": max(speedups)} for depth, speedups in gains.items()
        },
        "groups_of_engine": num_groups,
        "assumptions": [
            f"a step of an engine takes as long as {STEP:g} requests add to it, and a token that is computed anew {RECOMPUTED:g} times as "
            f"long as one request adds; {ORDERS} random orders of the prompts",
            *([server_lines] if sizes.has_servers else []),
        ],
    }


def sampling_times(
    rollouts: Sequence[Sequence[int]], slots: int, depth: int, *, step: float = STEP, recomputed: float = RECOMPUTED
) -> list[float]:
    """Return the time to sample each rollout, in order, on an engine whose requests all advance by a token a step.

    Args:
        rollouts: Length of each completion of each rollout, in tokens.
        slots: Largest number of running requests.
        depth: Sampling steps that a rollout may begin ahead of its own.
        step: Time of a step, in units of one request in it.
        recomputed: Time of a token that is computed anew, in the same units.
    """
    remaining, times = [list(rollout) for rollout in rollouts], list[float]()
    for r in range(len(remaining)):
        queue = deque((k, i) for k in range(r, min(r + depth + 1, len(remaining))) for i, tokens in enumerate(remaining[k]) if tokens)
        running, finished, seconds = list[tuple[int, int, int]](), 0, 0.0
        num_open = sum(tokens > 0 for tokens in remaining[r])
        while num_open:
            while queue and len(running) < slots:
                k, i = queue.popleft()
                seconds += recomputed * (rollouts[k][i] - remaining[k][i])
                heappush(running, (finished + remaining[k][i], k, i))
            seconds += (running[0][0] - finished) * (step + len(running))
            finished, k, i = heappop(running)
            remaining[k][i] = 0
            num_open -= k == r
        for end, k, i in running:
            remaining[k][i] = end - finished
        times.append(seconds)
    return times
