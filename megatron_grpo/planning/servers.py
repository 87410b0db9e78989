"""What `plan` says of rollout servers: how many there are, what they are asked at a time, and who pushes what to them."""

from __future__ import annotations

from typing import Any

from megatron_grpo.batching.batch_sizes import BatchSizes
from megatron_grpo.config.config import Config
from megatron_grpo.config.servers import CALLS, FROM_FILE, addresses_of, chunk_size


def servers_of(cfg: Config, sizes: BatchSizes) -> dict[str, Any] | None:
    """The `servers` object of `plan --json`; None where no servers sample.

    num_servers: those that are named; files may name others by and by. prompts_per_call: of a server that holds vllm_max_num_seqs sequences
    as it does by default, which is not known before it answers.
    """
    rollout = cfg.rollout
    if rollout.vllm_mode != "server":
        return None
    addresses = [str(address) for address in addresses_of(rollout)]
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


def told(servers: dict[str, Any], push_bytes: int | None) -> list[str]:
    """The same in lines. push_bytes: of one push, where the model is known."""
    some = ", ".join(servers["addresses"][:4]) + (", ..." if len(servers["addresses"]) > 4 else "")
    files = f"{' and ' if some else ''}whoever writes to {', '.join(servers['files'])}" if servers["files"] else ""
    lines = [
        f"{servers['num_servers'] or 'no'} rollout server{'s' * (servers['num_servers'] != 1)} named: {some}{files}",
        f"each is asked {servers['prompts_per_call']} prompts a call, {servers['calls_per_server']} calls at a time (if it decodes "
        f"{servers['max_num_seqs']} sequences together, its default)",
    ]
    sent = f"{push_bytes / 1e9:.3g} GB, " if push_bytes is not None else ""
    lines.append(f"a push is {sent}gathered to rank 0, which sends each byte once for all workers of all servers")
    return lines
