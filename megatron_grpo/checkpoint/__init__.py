"""Checkpoints of a run: everything that decides what happens next, complete on disk or not there at all.

Read `Checkpoints.save` first. `folder` owns names, renames and checksums, `distributed` the Megatron part, `samples` the pending samples.
docs/checkpoints.md is the page for users.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from megatron_grpo.checkpoint import folder
from megatron_grpo.checkpoint.distributed import (
    CheckpointError,
    agreed,
    random_state,
    read_sharded,
    restore_random_state,
    save_to,
    sharded_files,
    write_sharded,
)
from megatron_grpo.checkpoint.folder import Folder
from megatron_grpo.checkpoint.samples import read_samples, write_samples
from megatron_grpo.errors import ConfigError, Problem
from megatron_grpo.types import Progress, Row, Sample

if TYPE_CHECKING:
    from megatron_grpo.batching.split import BatchCut

__all__ = ["CheckpointError", "Checkpoints", "holds_run", "resumes_from", "start_afresh"]

logger = logging.getLogger(__name__)
OURS = "grpo"  # what Megatron-Core knows nothing of lies in this directory of a checkpoint
WRITTEN_BY_A_RUN = ("checkpoints", "completions", "plots", "hf", "metrics.jsonl", "evaluations.jsonl", "schedule.jsonl", "tensorboard")


class ShardedPolicy(Protocol):
    """What a checkpoint asks of a policy; `policy.sharded_state` has both halves."""

    def sharded_state_dict(self, *, is_loading: bool) -> dict[str, Any]: ...

    def load_sharded_state_dict(self, state: dict[str, Any]) -> None: ...


class Pending(Protocol):
    """The rows that wait to be trained; `megatron_grpo.pending`."""

    rows: Mapping[Any, Row]

    def __len__(self) -> int: ...

    def to_save(self) -> list[Sample]: ...

    def restored(self, samples: Sequence[Sample], cut: BatchCut) -> Pending: ...


class PromptState(Protocol):
    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Checkpoints:
    """Saves and restores a run under `output_dir`/checkpoints. Every method is collective over all ranks.

    save_steps: optimizer steps between checkpoints, 0 for none but those asked for with `save`. save_total_limit: how many are kept
    (None: all). resume: "auto" takes the newest good one of this output_dir, if there is any; "never"; or a directory: a checkpoint, or one
    that holds them. sizes: of the run's batches, noted in each checkpoint.
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        save_steps: int,
        save_total_limit: int | None,
        resume: str = "auto",
        sizes: Mapping[str, int | str] | None = None,
    ):
        self.output_dir = Path(output_dir)
        self.folder = Folder(self.output_dir / "checkpoints")
        self.save_steps, self.save_total_limit, self.resume, self.sizes = save_steps, save_total_limit, resume, dict(sizes or {})
        self._saved_step: int | None = None

    # -- saving ------------------------------------------------------------------------------------------------------------------------

    def save_if_due(self, progress: Progress, pending: Pending, policy: ShardedPolicy, prompts: PromptState) -> bool:
        """Saves after every `save_steps` optimizer steps; says whether it did."""
        due = self.save_steps > 0 and progress.step % self.save_steps == 0
        return due and self.save(progress, pending, policy, prompts)

    def save(self, progress: Progress, pending: Pending, policy: ShardedPolicy, prompts: PromptState) -> bool:
        """Writes one checkpoint, unless this step has just been saved.
        Raises CheckpointError on every rank, and leaves no partial directory, when any rank cannot write.
        """
        step = progress.step
        if step == self._saved_step:
            return False
        first = dist.get_rank() == 0
        try:
            with agreed(f"creating {self.folder.path}"):
                if first:
                    self.folder.begin(step)
            writing = self.folder.being_written(step)
            write_sharded(policy.sharded_state_dict(is_loading=False), writing)
            with agreed(f"writing {writing}"):
                names = self._write_ours(writing / OURS, progress, pending, prompts) + sharded_files(writing)
                mine = folder.fingerprints(writing, names)
            files = _gather(mine)
            with agreed(f"publishing {self.folder.directory(step)}"):
                if first:
                    self.folder.commit(step, _facts(progress, pending, self.sizes), files)
        except CheckpointError as error:
            if first:
                self.folder.abandon(step)
            kept = f"the last complete one is of step {self._saved_step}" if self._saved_step else "this run has written none before"
            raise CheckpointError(f"The checkpoint of step {step} failed and was removed; {kept}. {error}") from error
        self._saved_step = step
        if first:
            self.folder.retain(self.save_total_limit, newest=step)
        return True

    def _write_ours(self, ours: Path, progress: Progress, pending: Pending, prompts: PromptState) -> list[str]:
        """Writes what is not sharded; returns the names, relative to the checkpoint, of the files of this rank."""
        (ours / "rng").mkdir(parents=True, exist_ok=True)
        generators = ours / "rng" / f"rank_{dist.get_rank():05d}.pt"
        save_to(generators, random_state())
        paths = [generators]
        if rows := pending.to_save():
            (ours / "pending").mkdir(exist_ok=True)
            paths.append(ours / "pending" / f"rank_{dist.get_rank():05d}.npz")
            write_samples(paths[-1], rows)
        if dist.get_rank() == 0:
            folder.write_durably(ours / "progress.json", json.dumps(asdict(progress)) + "\n")
            folder.write_durably(ours / "prompts.json", json.dumps(prompts.state()) + "\n")
            paths += [ours / "progress.json", ours / "prompts.json"]
            if (self.output_dir / "config.yaml").exists():
                paths.append(Path(shutil.copy(self.output_dir / "config.yaml", ours / "config.yaml")))
        for path in paths:
            folder.sync_file(path)
        return [str(path.relative_to(ours.parent)) for path in paths]

    # -- restoring ---------------------------------------------------------------------------------------------------------------------

    def restore(self, policy: ShardedPolicy, prompts: PromptState, nothing: Pending, cut: BatchCut) -> tuple[Progress, Pending]:
        """Puts the run back to where its checkpoint was taken; a fresh run is at step 0 with nothing pending.

        nothing: what is pending then. cut: says which rank is home to which row.

        Raises ConfigError where a checkpoint was asked for and is damaged, or where there are checkpoints and all of them are.
        """
        directory = self._choose()
        if directory is None:
            return Progress(), nothing
        try:
            policy.load_sharded_state_dict(read_sharded(policy.sharded_state_dict(is_loading=True), directory))
        except CheckpointError as error:
            raise ConfigError(
                [
                    Problem(
                        flags=("resume",),
                        message=(
                            f"{directory} is undamaged but does not fit this run's model or optimizer: {error}. "
                            "Resume with the model and optimizer settings in its grpo/config.yaml."
                        ),
                    )
                ]
            ) from error
        with agreed(f"reading {directory / OURS}"):
            ours = directory / OURS
            progress = Progress(**json.loads((ours / "progress.json").read_text()))
            prompts.restore(json.loads((ours / "prompts.json").read_text()))
            mine = [sample for path in _pending_files(ours)[dist.get_rank() :: dist.get_world_size()] for sample in read_samples(path)]
            restore_random_state(ours / "rng" / f"rank_{dist.get_rank():05d}.pt")
        pending = nothing.restored(mine, cut)
        if directory.parent.resolve() == self.folder.path.resolve():
            self._saved_step = progress.step
        if dist.get_rank() == 0:
            self.folder.sweep()
            logger.info("resumed from %s: %d optimizer steps done, %d samples pending", directory, progress.step, len(pending))
        return progress, pending

    def _choose(self) -> Path | None:
        """The checkpoint to resume from, read in full and found undamaged; None for a fresh run. The same on every rank."""
        if self.resume == "never":
            return None
        tries = _from_first_rank(_candidates(self.output_dir, self.resume))
        refused = []
        for directory in tries:
            found = _damage_of(directory)
            if not found:
                return directory
            refused.append(f"{'; '.join(found[:3])}{f' and {len(found) - 3} more files' if len(found) > 3 else ''}")
            if directory is not tries[-1] and dist.get_rank() == 0:
                logger.warning("checkpoint %s is damaged, trying the one before it: %s", directory, refused[-1])
        if refused:
            raise ConfigError(
                [
                    Problem(
                        flags=("resume",),
                        message=(
                            f"No usable checkpoint to resume from: {'. '.join(refused)}. "
                            "Restore the files, name another checkpoint with --resume, or begin again with "
                            "--resume never --overwrite_output_dir."
                        ),
                    )
                ]
            )
        if self.resume != "auto":
            raise ConfigError(
                [
                    Problem(
                        flags=("resume",),
                        message=(
                            f"resume ({self.resume}) holds no checkpoint: expected a directory with {folder.MANIFEST}, "
                            "or one with iter_* in it. "
                            "Use auto to begin afresh where there is none."
                        ),
                    )
                ]
            )
        return None


def holds_run(output_dir: str | Path) -> bool:
    """Whether `output_dir` holds what an earlier run wrote."""
    return any((Path(output_dir) / name).exists() for name in WRITTEN_BY_A_RUN)


def start_afresh(output_dir: str | Path) -> None:
    """Removes what an earlier run wrote to `output_dir`, and nothing else. For one rank, before anything is built."""
    for name in WRITTEN_BY_A_RUN:
        path = Path(output_dir) / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def resumes_from(output_dir: str | Path, resume: str) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that a run with these settings would continue, and its manifest, neither of them checked; None where there is none.

    For a first look before anything is built: `Checkpoints.restore` decides.
    """
    for directory in _candidates(output_dir, resume):
        manifest = folder.read_manifest(directory)
        if not isinstance(manifest, str):
            return directory, manifest
    return None


def _facts(progress: Progress, pending: Pending, sizes: Mapping[str, int | str]) -> dict[str, Any]:
    """What a person wants to know of a checkpoint without loading it; `versions` is the ledger of what is pending, by rollout."""
    return {
        "format": 1,
        "progress": asdict(progress),
        "batch": dict(sizes),
        "world_size": dist.get_world_size(),
        "torch": torch.__version__,
        "num_pending": len(pending),
        "versions": {str(row.rollout): row.version for row in pending.rows.values()},
    }


def _candidates(output_dir: str | Path, resume: str) -> list[Path]:
    """Where to look, best first. `--resume path` names a checkpoint itself, the `checkpoints/` it lies in, or the output_dir of a run."""
    if resume == "never":
        return []
    if resume == "auto":
        source = Folder(Path(output_dir) / "checkpoints")
    else:
        path = Path(resume)
        if (path / folder.MANIFEST).exists() or path.name.startswith("iter_"):
            return [path]
        inner = path / "checkpoints"
        source = Folder(inner if inner.is_dir() else path)
    return [source.directory(step) for step in source.candidates()]


def _pending_files(ours: Path) -> list[Path]:
    """Each rank that held rows wrote one; the first format had one for all."""
    return [path for path in (ours / "pending.npz",) if path.exists()] + sorted((ours / "pending").glob("rank_*.npz"))


def _damage_of(directory: Path) -> list[str]:
    """Checks every byte of a checkpoint, the files dealt out over the ranks; the same answer on all of them."""
    [manifest] = _from_first_rank([folder.read_manifest(directory)])
    if isinstance(manifest, str):
        return [manifest]
    names = sorted(manifest["files"])[dist.get_rank() :: dist.get_world_size()]
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, folder.damage(directory, {name: manifest["files"][name] for name in names}))
    return [sentence for sentences in found for sentence in sentences]


def _gather(mine: dict[str, Any]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, mine)
    return {name: entry for part in parts for name, entry in part.items()}


def _from_first_rank(values: list[Any]) -> list[Any]:
    """Rank 0's view of the directory, so that a file system that shows files late cannot lead two ranks to two checkpoints."""
    box = [values]
    dist.broadcast_object_list(box, src=0)
    return box[0]
