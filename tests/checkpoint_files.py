"""What tests of checkpoints write and measure themselves: one part alone, and files as the manifest counts them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_sharded(state: dict[str, Any], directory: Path) -> None:
    """One sharded state dict, by the writer of checkpoints, with nothing beside it. Collective."""
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
    """Size and SHA-256 of files under `root`."""
    contents = {name: (root / name).read_bytes() for name in names}
    return {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()}
