"""Saving a run and putting it back. Every method is collective over all ranks; read `Checkpoints.save` first."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar

import torch

from megatron_grpo import activity
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
from megatron_grpo.checkpoint.manifest import CONFIG, facts
from megatron_grpo.checkpoint.resume import OURS, Candidate, Resume, several, unusable
from megatron_grpo.checkpoint.samples import files_of_samples, read_samples, write_samples
from megatron_grpo.errors import ConfigError, Problem
from megatron_grpo.files import sync, write_whole
from megatron_grpo.parallel import collectives
from megatron_grpo.types import Progress, Row, Sample

if TYPE_CHECKING:
    from megatron_grpo.batching.split import BatchCut

__all__ = ["CheckpointError", "Checkpoints"]


class ShardedPolicy(Protocol):
    """What a checkpoint asks of a policy; `policy.sharded_state` has both halves."""

    def sharded_state_dict(self, *, is_loading: bool) -> dict[str, Any]: ...

    def load_sharded_state_dict(self, state: dict[str, Any]) -> None: ...

    def resident(self, part: Literal["all"]) -> AbstractContextManager[None]:
        """Inside, everything that a checkpoint holds is in memory, and stays."""


class RowsToSave(Protocol):
    """The rows that wait to be trained; `megatron_grpo.pending`."""

    @property
    def rows(self) -> Mapping[Any, Row]: ...

    def __len__(self) -> int: ...

    def to_save(self) -> list[Sample]: ...

    def restored(self, samples: Sequence[Sample], cut: BatchCut) -> Self: ...


Rows = TypeVar("Rows", bound="RowsToSave")


class PromptState(Protocol):
    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class Checkpoints:
    """Saves and restores a run under `output_dir`/checkpoints.

    resume: how the run begins, as `resume.judge_resume` found it. save_steps: optimizer steps between checkpoints, 0 for none but those
    asked for with `save`. save_total_limit: how many are kept (None: all). say: how rank 0 tells a line (by default: prints it).
    """

    def __init__(
        self,
        resume: Resume,
        *,
        save_steps: int,
        save_total_limit: int | None,
        say: Callable[[str], None] | None = None,
    ):
        self.resume, self.say = resume, say or partial(print, flush=True)
        self.folder = Folder(resume.output_dir / "checkpoints")
        self.save_steps, self.save_total_limit = save_steps, save_total_limit
        self._chosen: Candidate | None = None
        self._saved_step: int | None = None

    # -- saving ------------------------------------------------------------------------------------------------------------------------

    def are_due(self, step: int) -> bool:
        """After so many optimizer steps: every `save_steps` of them."""
        return self.save_steps > 0 and step % self.save_steps == 0

    def save(self, progress: Progress, pending: RowsToSave, policy: ShardedPolicy, prompts: PromptState) -> bool:
        """Writes one checkpoint, unless this step has just been saved.

        Raises CheckpointError on every rank, and leaves no partial directory, when any rank cannot write.
        """
        step = progress.step
        if step == self._saved_step:
            return False
        first = collectives.rank() == 0
        try:
            with agreed(f"creating {self.folder.path}"):
                if first:
                    self.folder.begin(step)
            writing = self.folder.being_written(step)
            with policy.resident("all"):
                write_sharded(policy.sharded_state_dict(is_loading=False), writing)
            with agreed(f"writing {writing}"):
                names = self._write_ours(writing / OURS, progress, pending, prompts) + sharded_files(writing)
                mine = folder.fingerprints(writing, names)
            files = {name: entry for part in collectives.from_all(mine) for name, entry in part.items()}
            with agreed(f"publishing {self.folder.directory(step)}"):
                if first:
                    self.folder.commit(step, self._facts(progress, pending), files)
        except CheckpointError as error:
            if first:
                self.folder.abandon(step)
            kept = f"the last complete one is of step {self._saved_step}" if self._saved_step else "this run has written none before"
            raise CheckpointError(f"The checkpoint of step {step} failed and was removed; {kept}. {error}") from error
        self._saved_step = step
        activity.saved()
        if first:
            self.folder.retain(self.save_total_limit, newest=step)
        return True

    def _write_ours(self, ours: Path, progress: Progress, pending: RowsToSave, prompts: PromptState) -> list[str]:
        """Writes what is not sharded; returns the names, relative to the checkpoint, of the files of this rank."""
        (ours / "rng").mkdir(parents=True, exist_ok=True)
        generators = ours / "rng" / f"rank_{collectives.rank():05d}.pt"
        save_to(generators, random_state())
        paths = [generators]
        if rows := pending.to_save():
            paths.append(ours / "pending" / f"rank_{collectives.rank():05d}.npz")
            paths[-1].parent.mkdir(exist_ok=True)
            write_samples(paths[-1], rows)
        if collectives.rank() == 0:
            write_whole(ours / "progress.json", json.dumps(asdict(progress)) + "\n")
            write_whole(ours / "prompts.json", json.dumps(prompts.state()) + "\n")
            paths += [ours / "progress.json", ours / "prompts.json"]
            config = self.resume.output_dir / "config.yaml"
            if config.exists():
                paths.append(Path(shutil.copy(config, ours.parent / CONFIG)))
        for path in paths:
            sync(path)
        return [str(path.relative_to(ours.parent)) for path in paths]

    def _facts(self, progress: Progress, pending: RowsToSave) -> dict[str, Any]:
        """The manifest; `versions` is the ledger of what is pending, by rollout."""
        versions = {str(row.rollout): row.version for row in pending.rows.values()}
        return facts(self.resume.origin, progress, world_size=collectives.num_ranks(), torch=torch.__version__, num_pending=len(pending),
                     versions=versions)  # fmt: skip

    # -- restoring ---------------------------------------------------------------------------------------------------------------------

    def choose(self) -> Path | None:
        """Reads every byte of the checkpoint to be continued, or of the one before it where that is damaged; None for a fresh run.

        Before any model loads. Says what was chosen. Raises ConfigError on every rank if all are damaged.
        """
        resume = collectives.from_first(self.resume)  # one view of the directory, where a file system may show files late
        first, refused = collectives.rank() == 0, []
        for line in resume.notes if first else ():
            self.say(line)
        for candidate in resume.candidates:
            with activity.phase("restoring"):
                damage = _damage_of(candidate)
            if damage:
                refused.append(several(damage))
                if first:
                    self.say(f"WARNING: {candidate.manifest.directory} is damaged, and the one before it is tried: {refused[-1]}")
                continue
            if candidate.problems:
                raise ConfigError(candidate.problems)
            if first:
                for line in resume.lines(candidate):
                    self.say(line)
            self._chosen = candidate
            return candidate.manifest.directory
        if refused:
            raise unusable(refused)
        return None

    def restore(self, policy: ShardedPolicy, prompts: PromptState, nothing: Rows, cut: BatchCut) -> tuple[Progress, Rows]:
        """Puts the run back to where the chosen checkpoint was taken; a fresh run is at step 0 with nothing pending.

        nothing: what is pending then. cut: says which ranks are home to which row.
        Raises ConfigError where the checkpoint does not fit the model that has been built.
        """
        if self._chosen is None:
            return Progress(), nothing
        directory = self._chosen.manifest.directory
        try:
            with policy.resident("all"), activity.phase("restoring"):
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
            mine = [
                sample for path in files_of_samples(ours)[collectives.rank() :: collectives.num_ranks()] for sample in read_samples(path)
            ]
            restore_random_state(ours / "rng" / f"rank_{collectives.rank():05d}.pt")
        pending = nothing.restored(mine, cut)
        if directory.parent.resolve() == self.folder.path.resolve():
            self._saved_step = progress.step
        if collectives.rank() == 0:
            self.folder.sweep()
        return progress, pending


def _damage_of(candidate: Candidate) -> list[str]:
    """Checks every byte of a checkpoint, the files dealt out over the ranks; the same answer on all of them."""
    files = candidate.manifest.files
    mine = sorted(files)[collectives.rank() :: collectives.num_ranks()]
    found = collectives.from_all(folder.damage(candidate.manifest.directory, {name: files[name] for name in mine}))
    return [sentence for sentences in found for sentence in sentences]
