"""Write one part of a checkpoint, and compute file fingerprints, for tests of checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_sharded(state: dict[str, Any], directory: Path) -> None:
    """Write one sharded state dict with the checkpoint writer and nothing else. Collective."""
    from megatron_grpo.run.checkpoint.distributed import ShardedWriter, errors_on_all_ranks

    writer = ShardedWriter()
    write = writer.capture(state, {})
    with errors_on_all_ranks(f"writing {directory}"):
        written = write(directory)
    sync_weights = writer.gather_files(written)
    with errors_on_all_ranks(f"writing {directory}"):
        if sync_weights is not None:
            sync_weights(directory)


def fingerprints(root: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of the files under `root`."""
    contents = {name: (root / name).read_bytes() for name in names}
    return {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()}
