"""Random states of all ranks, in one file in which each distinct state is stored once.

They do not determine which rows are trained: prompts, sampling and order have separate generators, seeded by number. The states here are
used by dropout of adapters, and by whatever a reward function does. Most ranks have equal states: the generators of Python, NumPy and
torch start alike everywhere; Megatron-Core's differ by tensor, pipeline and expert rank, but not by data-parallel rank. A file therefore
holds the distinct states, and an index per rank and generator.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from megatron.core import tensor_parallel

from megatron_grpo.core.base.files import parse_json
from megatron_grpo.core.parallel import collectives

FILE = "rng.npz"
MEGATRON = "megatron."  # prefix of the states that Megatron-Core keeps for its parallel roles


def gather_states() -> bytes | None:
    """Return the contents of the file on rank 0, and None elsewhere. Collective.

    Ranks exchange a 64-bit hash per generator, and rank 0 receives each distinct state once.
    """
    local = states()
    names = sorted(local)
    marks = collectives.all_gather_object([int.from_bytes(blake2b(local[name], digest_size=8).digest()) for name in names])
    first = [{mark: rank for rank, mark in reversed(list(enumerate(column)))} for column in zip(*marks, strict=True)]
    gathered = collectives.gather_object(
        {name: local[name] for name, ranks in zip(names, first, strict=True) if collectives.rank() in ranks.values()}
    )
    if gathered is None:
        return None
    arrays: dict[str, np.ndarray] = {}
    for name, column, ranks in zip(names, zip(*marks, strict=True), first, strict=True):
        senders = sorted(ranks.values())
        positions = {mark: senders.index(rank) for mark, rank in ranks.items()}
        arrays[f"{name}/of_rank"] = np.array([positions[mark] for mark in column], dtype=np.int32)
        arrays |= {f"{name}/{position}": np.frombuffer(gathered[rank][name], dtype=np.uint8) for position, rank in enumerate(senders)}
    stream = io.BytesIO()
    np.savez_compressed(stream, allow_pickle=False, **arrays)
    return stream.getvalue()


def restore(path: Path) -> None:
    """Restore the generators of this rank, if the file is from a run with the same number of ranks.

    With another number of ranks nothing is restored. This is acceptable because these generators do not determine which rows are trained.
    """
    with np.load(path, allow_pickle=False) as file:
        names = [name.removesuffix("/of_rank") for name in file.files if name.endswith("/of_rank")]
        if any(len(file[f"{name}/of_rank"]) != collectives.num_ranks() for name in names):
            return
        set_states({name: file[f"{name}/{file[f'{name}/of_rank'][collectives.rank()]}"].tobytes() for name in names})


def states() -> dict[str, bytes]:
    """Return the state of every generator of this process, by name."""
    legacy = np.random.get_state()
    assert isinstance(legacy, tuple)  # it would be a dict if another bit generator had been set
    name, keys, *remaining = legacy
    result = {
        "python": json.dumps(random.getstate()).encode(),
        "numpy": json.dumps([name, keys.tolist(), *remaining]).encode(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_available():
        result["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return result | {f"{MEGATRON}{role}": state.cpu().numpy().tobytes() for role, state in tracked.items()}


def set_states(states: Mapping[str, bytes]) -> None:
    """Set the generators of this process to states from `states`.

    Args:
        states: State of each generator, by name.
    """
    version, words, gauss = parse_json(states["python"])
    random.setstate((version, tuple(words), gauss))
    name, keys, *remaining = parse_json(states["numpy"])
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *remaining))
    torch.set_rng_state(_tensor(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(states["cuda"]))
    roles = {name.removeprefix(MEGATRON): _tensor(state) for name, state in states.items() if name.startswith(MEGATRON)}
    tensor_parallel.get_cuda_rng_tracker().set_states(roles)


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
