"""The sharded part of a checkpoint: Megatron-Core's `torch_dist` format, written in this process, with errors that every rank learns of.

Megatron's own writer starts a manager process and forks writers. Here that is not wanted: a process of which the launcher knows nothing
outlives a killed run, and forking a process that holds an engine and collective threads is a gamble. The files are the same.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint import FileSystemWriter  # noqa: TID251 - the file format
from torch.distributed.checkpoint.api import CheckpointException  # noqa: TID251 - the file format
from torch.distributed.checkpoint.state_dict_saver import save as save_torch_dist  # noqa: TID251 - the file format

from megatron_grpo.checkpoint.strangers import nothing_runs, refuse_extra_state
from megatron_grpo.errors import RunError
from megatron_grpo.parallel import collectives

# What writing and reading may raise. torch's CheckpointException is a BaseException; torch.save reports a full disk as RuntimeError.
FAILURES = (OSError, RuntimeError, ValueError, KeyError, CheckpointException, CheckpointingException)


class CheckpointError(RunError):
    """A checkpoint could not be written or read. Raised on every rank, with what went wrong on each."""


@contextmanager
def agreed(what: str) -> Iterator[None]:
    """Leave together: a failure of one rank in the block is raised on all, instead of leaving the others in a collective.

    Inside the block no rank may wait for another, unless what it calls brings errors to all ranks by itself.
    """
    problem, cause = None, None
    try:
        yield
    except FAILURES as error:
        problem, cause = _describe(error), error
    problems = collectives.from_all(problem)
    if any(problems):
        # What torch has already brought to all ranks names its rank and reads alike everywhere: once is enough.
        texts = [text if text.startswith("rank ") else f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
        raise CheckpointError(f"{what}: {'; '.join(dict.fromkeys(texts))}") from cause


def write_sharded(state: dict[str, Any], directory: Path) -> None:
    """Writes a sharded state dict. Collective. Afterwards `directory` is what Megatron-Core's `dist_checkpointing.load` reads."""
    with agreed("describing the model and optimizer"):
        sharded, common = save_preprocess(state)
    with agreed(f"writing {directory}"):
        if collectives.rank() == 0:
            save_to(directory / "common.pt", common)
            save_config(CheckpointingConfig("torch_dist", 1), str(directory))
    with agreed(f"writing {directory}"):
        by_global_name, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
        save_torch_dist(
            mcore_to_pyt_state_dict(by_global_name, False),
            storage_writer=_Writer(directory, single_file_per_rank=True, sync_files=True, thread_count=1),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def read_sharded(state: dict[str, Any], directory: Path, *, partly: bool = False) -> dict[str, Any]:
    """Reads into the tensors that `state` describes, under any layout. Collective. Nothing may be lacking there, and nothing left over.

    partly: what is left over is not wanted; a model without its optimizer, say.
    """
    with agreed(f"loading {directory} into this model"), nothing_runs(directory):
        mine = {leaf.key for leaf in nested_values(load_preprocess(state)[0]) if isinstance(leaf, ShardedBase)}
        held = {part.key for part in load_sharded_metadata(str(directory)).values()}
    wanted = set().union(*collectives.from_all(mine))
    if wanted - held:
        raise CheckpointError(f"it lacks {_some(wanted - held)}")
    # "_extra_state" is what Transformer Engine's layers keep beside their weights: nothing, unless they compute in FP8.
    left_over = {name for name in held - wanted if not name.endswith("_extra_state")}
    if left_over and not partly:
        raise CheckpointError(f"it holds {_some(left_over)}, which this run has no use for")
    with agreed(f"loading {directory} into this model"), nothing_runs(directory):
        loaded = dist_checkpointing.load(state, str(directory), strict=StrictHandling.RAISE_UNEXPECTED)
        refuse_extra_state(loaded)
        return loaded


def _some(names: set[str]) -> str:
    shown = sorted(names)[:2]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def save_to(path: Path, value: Any) -> None:
    """`torch.save`, onto the disk. Through an open file: given a name, torch reports a full disk as "iostream error"."""
    with path.open("wb") as stream:
        torch.save(value, stream)
        stream.flush()
        os.fsync(stream.fileno())


def sharded_files(directory: Path) -> list[str]:
    """Names of the files this rank has written of a sharded state dict."""
    names = [path.name for path in directory.glob(f"__{collectives.rank()}_*.distcp")]
    return sorted(names + [name for name in (".metadata", "metadata.json", "common.pt") if collectives.rank() == 0])


def random_state() -> dict[str, Any]:
    """Every generator of this process, in types that load without pickle."""
    version, words, gauss = random.getstate()
    legacy = np.random.get_state()
    assert isinstance(legacy, tuple)  # a dict where another bit generator has been set
    name, keys, position, has_gauss, cached = legacy
    state = {
        "world_size": collectives.num_ranks(),
        "python": [version, list(words), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "megatron": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(path: Path) -> None:
    """Sets the generators to what `random_state` returned, if this rank has a file from a run with as many ranks.

    Under another number of ranks there is nothing to restore: prompts and sampling do not draw from them, so it does not matter.
    """
    if not path.exists():
        return
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["world_size"] != collectives.num_ranks():
        return
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _describe(error: BaseException) -> str:
    """One line. Of torch's CheckpointException, whose own text is `ranks:dict_keys([0])`, the failures inside."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {_describe(inner)}" for rank, (inner, _) in error.failures.items())
    error = _first_cause(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"


def _first_cause(error: BaseException) -> BaseException:
    """torch's zip writer, closed on a full disk, hides the OSError behind RuntimeErrors about an unexpected position."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__ if isinstance(cause, RuntimeError) else None
    return cause or error


class _Writer(FileSystemWriter):
    """torch's writer; what it raises travels to the other ranks without its context, so the context is raised."""

    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise _first_cause(error) from error
