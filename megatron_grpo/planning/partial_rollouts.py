"""Forecast of the sampling time that partial rollouts save, by simulating one engine with measured lengths. No torch."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from statistics import mean
from typing import Any

from megatron_grpo.batching.batch_sizes import BatchSizes
from megatron_grpo.config.config import RolloutConfig
from megatron_grpo.planning.token_counts import Lengths

DEPTHS, ORDERS = (1, 2, 3), 5  # depths and random orders of the prompts
NUM_ROLLOUTS, FIRST = 10, 3  # simulated rollouts, and the first one that counts: before it, more completions begin than later
STEP, RECOMPUTED = 500.0, 2.0  # time of an engine step, and of a token that is computed anew, in units of one request in a step


def forecast(sizes: BatchSizes, rollout: RolloutConfig, lengths: Lengths) -> dict[str, Any]:
    """Return how many times faster than with `async_rollout_depth` 0 rollouts are sampled at other depths.

    Args:
        sizes: Batch sizes and layout.
        rollout: Settings of the engines.
        lengths: (prompt, completion) lengths in tokens; `num_generations` consecutive lines are a group.
    """
    n, num_engines = sizes.num_generations, max(1, sizes.layout.world_size // rollout.vllm_tensor_parallel_size)
    tokens = [completion for _, completion in lengths]
    groups = [tokens[i : i + n] for i in range(0, len(tokens) - n + 1, n)] or [(tokens * n)[:n]]
    num_groups, gains = -(-sizes.num_rollout_prompts // num_engines), dict[int, list[float]]()
    for order in range(ORDERS):
        rng = random.Random(order)
        rollouts = [[length for _ in range(num_groups) for length in rng.choice(groups)] for _ in range(NUM_ROLLOUTS)]
        waiting = sampling_time(rollouts, rollout.vllm_max_num_seqs, 0)
        for depth in DEPTHS:
            gains.setdefault(depth, []).append(waiting / sampling_time(rollouts, rollout.vllm_max_num_seqs, depth))
    return {
        "speedup_of_sampling": {
            str(depth): {"mean": mean(speedups), "min": min(speedups), "max": max(speedups)} for depth, speedups in gains.items()
        },
        "groups_of_engine": num_groups,
        "assumptions": [
            f"a step of an engine takes as long as {STEP:g} requests add to it, and a token that is computed anew {RECOMPUTED:g} times as "
            f"long as one request adds; {ORDERS} random orders of the prompts"
        ],
    }  # fmt: skip


def sampling_time(rollouts: Sequence[Sequence[int]], slots: int, depth: int) -> float:
    """Return the time to sample rollouts in order, on an engine whose requests all advance by a token a step.

    Args:
        rollouts: Length of each completion of each rollout, in tokens. The first `FIRST` rollouts do not count.
        slots: Largest number of running requests.
        depth: Sampling steps that a rollout may begin ahead of its own.
    """
    remaining, total = [list(rollout) for rollout in rollouts], 0.0
    for r in range(len(remaining)):
        queue = deque((k, i) for k in range(r, min(r + depth + 1, len(remaining))) for i, tokens in enumerate(remaining[k]) if tokens)
        running, finished, seconds = list[tuple[int, int, int]](), 0, 0.0
        num_open = sum(tokens > 0 for tokens in remaining[r])
        while num_open:
            while queue and len(running) < slots:
                k, i = queue.popleft()
                seconds += RECOMPUTED * (rollouts[k][i] - remaining[k][i])
                heappush(running, (finished + remaining[k][i], k, i))
            seconds += (running[0][0] - finished) * (STEP + len(running))
            finished, k, i = heappop(running)
            remaining[k][i] = 0
            num_open -= k == r
        for end, k, i in running:
            remaining[k][i] = end - finished
        total += seconds if FIRST <= r < len(remaining) - max(DEPTHS) else 0.0
    return total
