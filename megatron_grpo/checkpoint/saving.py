"""Saving a run and putting it back. Every method is collective over all ranks; read `Checkpoints.save` first.

A save has three parts. What is to be saved is *taken*: described, and copied where the rest is to happen beside training. Then it is
*written*, by each rank alone. When all ranks have, rank 0 *publishes* it: description, manifest, name, pointer. Written and published is in
a thread with `async_save`; the ranks go from one part to the next together, where the loop calls `advance` or somebody waits in `finish`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_grpo.base import activity
from megatron_grpo.base.cleanup import begun
from megatron_grpo.base.errors import ConfigError, config_error
from megatron_grpo.base.files import mark, written_whole
from megatron_grpo.checkpoint import rng_state
from megatron_grpo.checkpoint.best import Best
from megatron_grpo.checkpoint.distributed import CheckpointError, ShardedWriter, agreed, read_sharded
from megatron_grpo.checkpoint.manifest import CONFIG, Folder, Manifest, damage, facts
from megatron_grpo.checkpoint.resume import OURS, Candidate, Resume, several, unusable
from megatron_grpo.checkpoint.resume_compatibility import Difference
from megatron_grpo.checkpoint.samples import file_of, files_of_samples, read_samples
from megatron_grpo.checkpoint.written import RUN
from megatron_grpo.parallel import collectives
from megatron_grpo.types import Progress

if TYPE_CHECKING:
    from megatron_grpo.batching.schedule import ScheduledStep
    from megatron_grpo.config.config import RunConfig
    from megatron_grpo.data.prompts import PromptStream

__all__ = ["CheckpointError", "Checkpoints"]


Policy = Any  # policy.policy.Policy, a room beside this one
SampleBuffer = Any  # the rows that wait to be trained: trainer.pending.SampleBuffer, of a room above


@dataclass(slots=True)
class Underway:
    """A save that has been taken. publishes: it is written, and rank 0 publishes it; other ranks have nothing to do."""

    step: int
    facts: Mapping[str, Any]
    task: Future[Any]
    publishes: bool = False


RECORDED = "trained.npz"  # in a checkpoint's directory and not among its files: written when its first step is about to train them
GOES_ON, FAILED = 1, 2  # what a rank says of its part of a save; the largest counts


class Checkpoints:
    """Saves and restores a run under `output_dir`/checkpoints.

    resume: how the run begins, as `resume.judge_resume` found it. cfg: when and how to save. replicas: the group of ranks that may hold
    what this rank holds, and share the writing of it; None for all. say: how rank 0 tells a line (by default: prints it).
    """

    def __init__(self, resume: Resume, cfg: RunConfig, *, replicas: Any = None, say: Callable[[str], None] | None = None):
        self.resume, self.cfg, self.say = resume, cfg, say or partial(print, flush=True)
        self.folder = Folder(resume.output_dir / "checkpoints")
        self._saved_at = time.monotonic()
        self._sharded = ShardedWriter(replicas, staged=cfg.async_save)
        self.best: Best | None = None  # hears which are published, and says which one stays whatever its age; set by who knows the metric
        self._chosen: Candidate | None = None
        self._saved_step: int | None = None  # the last that is complete
        self._underway: Underway | None = None
        self._unproven: set[int] = set()  # steps of checkpoints of which it is not known whether they are good

    # -- saving ------------------------------------------------------------------------------------------------------------------------

    def are_due(self, step: int) -> bool:
        """After so many optimizer steps: every `save_steps` of them."""
        return self.cfg.save_steps > 0 and step % self.cfg.save_steps == 0

    def is_time(self) -> bool:
        """Whether `save_interval_seconds` have passed since the last checkpoint, or since the run began to train: by this rank's clock."""
        return 0 < self.cfg.save_interval_seconds <= time.monotonic() - self._saved_at

    def has_trained(self, version: int, step: int) -> None:
        """Optimizer step `step`, the last one, was trained on what weights of `version` had sampled: checkpoints up to it are good."""
        if collectives.rank() > 0:
            return
        try:
            self._unproven -= {saved for saved in self._unproven if saved <= version and self.folder.mark_good(saved, trained=step)}
        except OSError as error:  # the step is as good as it was
            self.say(f"WARNING: that a checkpoint is good cannot be written down ({error.strerror}); the next step tries again")

    def record(self, step: ScheduledStep, pending: SampleBuffer) -> None:
        """Before an optimizer step is taken: if a checkpoint holds the weights that it starts from, its rows are written beside it, in the
        order of the step. The checkpoint is as whole without them. Collective, where rows are recorded at all."""
        if not self.cfg.record_rows or step.index != (self._underway.step if self._underway else self._saved_step):
            return
        rows = pending.of_step(step)
        if collectives.rank() > 0:
            return
        for place in (self.folder.directory(step.index), self.folder.being_written(step.index), self.folder.directory(step.index)):
            try:
                with written_whole(place / RECORDED) as stream:
                    stream.write(file_of(rows))
                return
            except FileNotFoundError:  # it is being written beside the steps, or has just been published
                continue
            except OSError as error:
                self.say(f"WARNING: the rows of step {step.index + 1} cannot be written beside its checkpoint ({error.strerror})")
                return

    def last_good(self, step: int) -> Path | None:
        """The last checkpoint up to `step` whose weights are known to have trained. Rank 0 looks. Collective."""
        return collectives.broadcast_object(self.folder.last_good(step) if collectives.rank() == 0 else None)

    def save(self, progress: Progress, pending: SampleBuffer, policy: Policy, prompts: PromptStream) -> bool:
        """One checkpoint, unless this step has just been saved. With `async_save` it is complete after `finish`, or after some `advance`.

        Waits for the one before. Raises CheckpointError on every rank, and leaves no partial directory, when any rank cannot write.
        """
        step, first = progress.step, collectives.rank() == 0
        if step == (self._underway.step if self._underway else self._saved_step):
            return False
        self.finish()
        with self._removed_if_it_fails(step):
            random = rng_state.collect()
            with agreed(f"creating {self.folder.being_written(step)}"):
                if first:
                    self.folder.begin(step)
                others = self._others(progress, pending, policy, prompts)
            if random is not None:
                others[f"{OURS}/{rng_state.FILE}"] = random
            with policy.resident("all"):
                write = self._sharded.taken(policy.sharded_state_dict(is_loading=False), others)
                task = self._begun(partial(write, self.folder.being_written(step)))
                self._underway = Underway(step, self._facts(progress, pending), task)
        if not self.cfg.async_save:
            self.finish()
        self._saved_at = time.monotonic()
        return True

    def advance(self) -> None:
        """Between two steps: takes a save under way one part further, if all ranks are done with theirs; waits for none.

        Raises CheckpointError on every rank if one of them has failed.
        """
        save = self._underway
        if save is None:
            return
        mine = GOES_ON if not save.task.done() else FAILED if save.task.exception() else 0
        if collectives.all_reduce_max(mine) != GOES_ON:
            self._complete_part(save)

    def finish(self) -> None:
        """Returns when no save is under way. Raises CheckpointError on every rank if it has failed on any."""
        while self._underway is not None:
            self._complete_part(self._underway)

    def _complete_part(self, save: Underway) -> None:
        """Waits for this part of all ranks, and begins the next."""
        with self._removed_if_it_fails(save.step):
            if save.publishes:
                with agreed(f"publishing {self.folder.directory(save.step)}"):
                    save.task.result()
                self._saved_step, self._underway = save.step, None
                activity.saved()
                self._unproven.add(save.step)
                if collectives.rank() == 0:
                    self._unproven &= {save.step, *self.folder.steps()}
                return
            with agreed(f"writing {self.folder.being_written(save.step)}"):
                written = save.task.result()
            publish = self._sharded.told(written)
            save.task = self._begun(partial(self._publish, save, publish))
            save.publishes = True

    def _begun(self, work: Callable[[], Any]) -> Future[Any]:
        return begun(work, name="checkpoint", beside=self.cfg.async_save)

    def _publish(self, save: Underway, describe: Callable[[Path], dict[str, Any]] | None) -> None:
        """On rank 0, for which alone there is something to describe."""
        if describe is not None:
            files = describe(self.folder.being_written(save.step))
            self.folder.commit(save.step, save.facts, files)
            mark(self.resume.output_dir, RUN, saved=save.step)
            if self.best is not None:
                self.best.published(save.step)
            self.folder.retain(self.cfg.save_total_limit, newest=save.step, best=self.best.step if self.best else None)

    @contextmanager
    def _removed_if_it_fails(self, step: int) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self._underway = None
            if collectives.rank() == 0:
                self.folder.abandon(step)
            kept = f"the last complete one is of step {self._saved_step}" if self._saved_step else "this run has written none before"
            raise CheckpointError(f"The checkpoint of step {step} failed and was removed; {kept}. {error}") from error

    def _others(self, progress: Progress, pending: SampleBuffer, policy: Policy, prompts: PromptStream) -> dict[str, bytes]:
        """Files of this rank that are not sharded, by name: its rows, and on rank 0 what is the same for all."""
        files = {}
        if rows := pending.to_save():
            files[f"{OURS}/pending/rank_{collectives.rank():05d}.npz"] = file_of(rows)
        if collectives.rank() == 0:
            files[f"{OURS}/progress.json"] = f"{json.dumps(asdict(progress))}\n".encode()
            files[f"{OURS}/prompts.json"] = f"{json.dumps(prompts.state())}\n".encode()
            files[f"{OURS}/guard.json"] = f"{json.dumps(policy.guard_state())}\n".encode()
            config = self.resume.output_dir / "config.yaml"
            if config.exists():
                files[CONFIG] = config.read_bytes()
        return files

    def _facts(self, progress: Progress, pending: SampleBuffer) -> dict[str, Any]:
        """The manifest; `versions` is the ledger of what is pending, by rollout."""
        versions = {str(row.rollout): row.version for row in pending.rows.values()}
        return facts(self.resume.origin, progress, world_size=collectives.num_ranks(), torch=torch.__version__, num_pending=len(pending),
                     versions=versions)  # fmt: skip

    # -- restoring ---------------------------------------------------------------------------------------------------------------------

    def choose(self) -> Path | None:
        """Reads every byte of the checkpoint to be continued, or of the one before it where that is damaged; None for a fresh run.

        Before any model loads. Says what was chosen. Raises ConfigError on every rank if all are damaged.
        """
        resume = collectives.broadcast_object(self.resume)  # one view of the directory, where a file system may show files late
        first, refused = collectives.rank() == 0, []
        for line in resume.notes if first else ():
            self.say(line)
        for candidate in resume.candidates:
            with activity.phase("restoring"):
                faults = damage_of(candidate.manifest)
            if faults:
                refused.append(several(faults))
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

    def learned(self, name: str, fingerprint: str) -> None:
        """What the run is made of besides, which nobody knew when it began: its checkpoints tell it, and it is said where the checkpoint
        that it continues tells another. The same on every rank."""
        origin = self.resume.origin
        self.resume = replace(self.resume, origin=replace(origin, content={**origin.content, name: fingerprint}))
        before = self._chosen.manifest.origin.content.get(name, fingerprint) if self._chosen else fingerprint
        if before != fingerprint and collectives.rank() == 0:
            self.say(f"Changed since that checkpoint:\n  {Difference(name=name, was=before, now=fingerprint, verdict='said')}")

    def restore(self, policy: Policy, prompts: PromptStream, nothing: SampleBuffer) -> tuple[Progress, SampleBuffer]:
        """Puts the run back to where the chosen checkpoint was taken; a fresh run is at step 0 with nothing pending.

        nothing: what is pending then.
        Raises ConfigError where the checkpoint does not fit the model that has been built.
        """
        self._saved_at = time.monotonic()
        if self._chosen is None:
            self._go_on_with_best(0, is_ours=False)
            return Progress(), nothing
        directory = self._chosen.manifest.directory
        try:
            with policy.resident("all"), activity.phase("restoring"):
                with_optimizer = "optim" not in self.resume.without
                described = policy.sharded_state_dict(is_loading=True, with_optimizer=with_optimizer)
                state = read_sharded(described, directory, partly=not with_optimizer)
                policy.load_sharded_state_dict(state, with_optimizer=with_optimizer)
        except CheckpointError as error:
            raise config_error(
                "resume",
                f"{directory} is undamaged but does not fit this run's model or optimizer: {error}. "
                "Resume with the model and optimizer settings in its grpo/config.yaml.",
            ) from error
        with agreed(f"reading {directory / OURS}"):
            ours = directory / OURS
            progress = Progress(**json.loads((ours / "progress.json").read_text()))
            prompts.restore(json.loads((ours / "prompts.json").read_text()))
            if (ours / "guard.json").exists():  # a checkpoint from before there was a guard that remembers has none
                policy.restore_guard(json.loads((ours / "guard.json").read_text()))
            if "rng" in self.resume.without:
                pass
            elif self._chosen.manifest.format < 3:
                rng_state.restore_from_own_file(ours / "rng" / f"rank_{collectives.rank():05d}.pt")
            else:
                rng_state.restore(ours / rng_state.FILE)
            files = files_of_samples(ours)[collectives.rank() :: collectives.num_ranks()]
            mine = [replace(one, shown=prompts.pictures_of(one.prompt_number)) for path in files for one in read_samples(path)]
        pending = nothing.restored(mine)
        is_ours = directory.parent.resolve() == self.folder.path.resolve()
        self._go_on_with_best(progress.step, is_ours=is_ours)
        if is_ours:
            self._saved_step = progress.step
            if not self._chosen.manifest.is_good:
                self._unproven.add(progress.step)
        if collectives.rank() == 0:
            self.folder.sweep()
        return progress, pending

    def _go_on_with_best(self, step: int, *, is_ours: bool) -> None:
        """Forgets which was best of a future that was given up."""
        if self.best is not None and collectives.rank() == 0:
            self.best.go_on(step, is_saved=is_ours)


def damage_of(manifest: Manifest) -> list[str]:
    """Checks every byte of a checkpoint, the files dealt out over the ranks; the same answer on all of them. Collective."""
    files = manifest.files
    mine = sorted(files)[collectives.rank() :: collectives.num_ranks()]
    found = collectives.all_gather_object(damage(manifest.directory, {name: files[name] for name in mine}))
    return [sentence for sentences in found for sentence in sentences]
