"""Calls to rollout servers that a rollout is divided into, and their part of `plan`. No torch, and no connection is made."""

from __future__ import annotations

from typing import Any

from megatron_grpo.core.batching.batch_sizes import BatchSizes
from megatron_grpo.core.settings import RolloutConfig
from megatron_grpo.plugins.servers.addresses import FROM_FILE, list_addresses

CALLS = 2  # concurrent calls per server, each large enough to fill it, so that it is never half empty before the end


def chunk_size(num_prompts: int, *, n: int, num_servers: int, max_num_seqs: int) -> int:
    """Return the prompts of one call: enough to fill the server, at most an equal share of all calls to all servers.

    Args:
        num_servers: Number of servers.
        max_num_seqs: Sequences that a server processes at once.
    """
    return max(1, min(max_num_seqs // n, -(-num_prompts // (num_servers * CALLS))))


def plan_servers(rollout: RolloutConfig, sizes: BatchSizes) -> dict[str, Any]:
    """Return the `servers` object of `plan --json`.

    `num_servers` counts the servers named in the settings; address files may add others later. `prompts_per_call` assumes that a server
    decodes `vllm_max_num_seqs` sequences at a time (the server default), because the real value is known only once the server responds.
    """
    addresses = [str(address) for address in list_addresses(rollout)]
    prompts, n = sizes.num_rollout_prompts, sizes.num_generations
    return {
        "addresses": addresses,
        "files": [host.removeprefix(FROM_FILE) for host in rollout.vllm_server_host if host.startswith(FROM_FILE)],
        "num_servers": len(addresses),
        "calls_per_server": CALLS,
        "max_num_seqs": rollout.vllm_max_num_seqs,
        "prompts_per_call": chunk_size(prompts, n=n, num_servers=max(1, len(addresses)), max_num_seqs=rollout.vllm_max_num_seqs),
        "pushed_by": "rank 0",
    }
