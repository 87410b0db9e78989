"""What all ranks of a job must have alike, compared through the job's store before anything is made of it: groups are, too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from megatron_grpo.errors import ConfigError, Problem


def refuse_differences(store: Any, facts: Mapping[str, str], *, rank: int, world_size: int) -> None:
    """Raises one ConfigError on every rank where a fact is not the same on all: by name, with a rank and both values. Collective.

    store: nobody has used it for this before. Ranks that have what rank 0 has send and read a digest.
    """
    text = json.dumps(dict(facts), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if rank:
        theirs = facts if store.get("digest").decode() == digest else json.loads(store.get("facts"))
        mine = {name: facts.get(name, "none") for name in {**theirs, **facts} if facts.get(name) != theirs.get(name)}
        store.set(f"differs/{rank}", json.dumps(mine))
    else:
        store.set("facts", text)
        store.set("digest", digest)
        found: dict[str, str] = {}
        for other in range(1, world_size):
            for name, value in json.loads(store.get(f"differs/{other}")).items():
                found.setdefault(name, f"rank 0 has {facts.get(name, 'none')}, rank {other} has {value}")
        store.set("found", json.dumps(found))
    found = json.loads(store.get("found"))
    if not found:
        return
    store.set(f"heard/{rank}", "1")
    if not rank:  # it may hold the store that the others read from
        store.wait([f"heard/{other}" for other in range(world_size)])
    raise ConfigError([
        Problem(flags=(name,), message=f"{name} is not the same for all ranks: {told}. Give every machine the same.")
        for name, told in found.items()
    ])  # fmt: skip
