"""Save and restore a run. Every method is collective over all ranks; start reading at `Checkpoints.save`.

A save has three parts. The state is *taken*: described, and copied if the rest happens during training. Then each rank *writes* its share
without communication. When all ranks have written, rank 0 *publishes* the checkpoint: description, manifest, rename, pointer. With
`async_save` writing and publishing happen in a thread; the ranks move from one part to the next together, when the training loop calls
`advance` or `finish`.
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

from megatron_grpo.core.base import activity
from megatron_grpo.core.base.cleanup import run_in_thread
from megatron_grpo.core.base.errors import ConfigError, config_error
from megatron_grpo.core.base.files import atomic_write, parse_json, read_object, write_mark
from megatron_grpo.core.metadata import Progress
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.rollout.engine import PartialCompletion
from megatron_grpo.core.types import Sample
from megatron_grpo.run.checkpoint import rng_state
from megatron_grpo.run.checkpoint.distributed import CheckpointError, ShardedWriter, errors_on_all_ranks, read_sharded
from megatron_grpo.run.checkpoint.manifest import CONFIG, MIB, CheckpointDirectory, Manifest, find_damage, manifest_content
from megatron_grpo.run.checkpoint.output_files import RUN, BestCheckpoint
from megatron_grpo.run.checkpoint.resume import OURS, ResumeCandidate, ResumePlan, join_faults, unusable

if TYPE_CHECKING:
    from megatron_grpo.core.batching.schedule import ScheduledStep
    from megatron_grpo.run.config.settings import RunConfig
    from megatron_grpo.run.data.prompts import PromptStream

__all__ = ["CheckpointError", "Checkpoints"]


Policy = Any  # policy.policy.Policy, which this package does not import
PartialRollouts = Any  # plugins.partial_rollouts.trainer.PartialRollouts, which this package does not import
MetricsLogger = Any  # metrics.metrics_logger.MetricsLogger, which this package does not import
SampleBuffer = Any  # rows waiting to be trained: core.trainer.sample_buffer.SampleBuffer, which this package does not import


@dataclass(slots=True)
class PendingSave:
    """A save whose state has been taken.

    Args:
        step: Optimizer step of the checkpoint.
        facts: Contents of its manifest besides step, number and files.
        task: The part in progress.
        is_publishing: Whether the files are written and rank 0 is publishing; other ranks have nothing to do then.
    """

    step: int
    facts: Mapping[str, Any]
    task: Future[Any]
    is_publishing: bool = False


METRICS = "metrics.json"  # of rollouts in the checkpoint that no step has reported; there are some if the run stopped before their step
RECORDED = "trained.npz"  # rows of the first step after a checkpoint; in its directory, but not among the files of its manifest
GOES_ON, FAILED = 1, 2  # status of a rank's part of a save; the maximum over ranks applies


class Checkpoints:
    """Writer and reader of a run's checkpoints under `output_dir`/checkpoints.

    Args:
        resume: How the run begins, as `resume.plan_resume` returned it.
        replicas: Process group of the ranks that may hold the same state as this rank, and share the writing of it; None for all ranks.
        print_line: Called on rank 0 with each message. Default: print.
    """

    def __init__(self, resume: ResumePlan, cfg: RunConfig, *, replicas: Any = None, print_line: Callable[[str], None] | None = None):
        self.resume, self.cfg, self.print_line = resume, cfg, print_line or partial(print, flush=True)
        self.folder = CheckpointDirectory(resume.output_dir / "checkpoints")
        self._saved_at = time.monotonic()
        self._sharded = ShardedWriter(replicas, staged=cfg.async_save)
        # Tracks the best checkpoint, which is never deleted; set by the caller that knows the metric.
        self.best: BestCheckpoint | None = None
        self.logger: MetricsLogger | None = None  # whose metrics of rollouts wait for their step; set by the caller
        self.partial: PartialRollouts | None = None  # completions that a weight sync interrupted; set by the caller, if the run has them
        self._chosen: ResumeCandidate | None = None
        self._saved_step: int | None = None  # step of the last complete checkpoint
        self._underway: PendingSave | None = None
        self._unproven: set[int] = set()  # steps of checkpoints not yet known to be good

    # -- saving ------------------------------------------------------------------------------------------------------------------------

    def are_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step` optimizer steps: every `save_steps`."""
        return self.cfg.save_steps > 0 and step % self.cfg.save_steps == 0

    def is_time(self) -> bool:
        """Return whether `save_interval_seconds` have passed on this rank's clock since the last checkpoint, or since training began."""
        return 0 < self.cfg.save_interval_seconds <= time.monotonic() - self._saved_at

    def has_trained(self, version: int, step: int) -> None:
        """Mark checkpoints as good after a training step.

        Args:
            version: Version of the weights that sampled the step's rows. Checkpoints up to it are good.
        """
        if collectives.rank() > 0:
            return
        try:
            self._unproven -= {saved for saved in self._unproven if saved <= version and self.folder.mark_good(saved, trained=step)}
        except OSError as error:  # the training step itself is unaffected
            self.print_line(f"WARNING: a checkpoint cannot be marked as good ({error.strerror}); the next step tries again")

    def record(self, step: ScheduledStep, buffer: SampleBuffer) -> None:
        """Write the rows of an optimizer step next to the checkpoint that the step starts from, in the order of the step.

        Called before the step. Does nothing if there is no checkpoint of these weights; the checkpoint is complete without the rows.
        Collective if `record_rows` is set.
        """
        if not self.cfg.record_rows or step.index != (self._underway.step if self._underway else self._saved_step):
            return
        rows = buffer.list_step_samples(step)
        if collectives.rank() > 0:
            return
        from megatron_grpo.run.checkpoint.samples import serialize_samples

        for directory in (self.folder.directory(step.index), self.folder.being_written(step.index), self.folder.directory(step.index)):
            try:
                with atomic_write(directory / RECORDED) as stream:
                    stream.write(serialize_samples(rows))
                return
            except FileNotFoundError:  # the directory has another name while it is written, or has just been renamed
                continue
            except OSError as error:
                self.print_line(f"WARNING: the rows of step {step.index + 1} cannot be written to its checkpoint ({error.strerror})")
                return

    def last_good(self, step: int) -> Path | None:
        """Return the directory of the last checkpoint up to `step` whose weights have trained, as found by rank 0. Collective."""
        return collectives.broadcast_object(self.folder.last_good(step) if collectives.rank() == 0 else None)

    def save(self, progress: Progress, buffer: SampleBuffer, policy: Policy, prompts: PromptStream) -> bool:
        """Save one checkpoint, unless this step has just been saved. Collective.

        Waits for the previous save. With `async_save` the checkpoint is complete after `finish`, or after some calls of `advance`.

        Returns:
            False if a checkpoint of this step exists already.

        Raises:
            CheckpointError: On every rank, if any rank cannot write. No partial directory is left.
        """
        step, first = progress.step, collectives.rank() == 0
        if step == (self._underway.step if self._underway else self._saved_step):
            return False
        self.finish()
        with self._removed_if_it_fails(step):
            random = rng_state.gather_states()
            with errors_on_all_ranks(f"creating {self.folder.being_written(step)}"):
                if first:
                    self.folder.begin(step)
                other_files = self._others(progress, buffer, policy, prompts)
            if random is not None:
                other_files[f"{OURS}/{rng_state.FILE}"] = random
            with policy.on_device("all"):
                write = self._sharded.capture(policy.sharded_state_dict(is_loading=False), other_files)
                task = self._begun(partial(write, self.folder.being_written(step)))
                self._underway = PendingSave(step, self._facts(progress, buffer), task)
        if not self.cfg.async_save:
            self.finish()
        self._saved_at = time.monotonic()
        return True

    def advance(self) -> None:
        """Start the next part of a save in progress if all ranks have finished the current one.

        Does not wait for a part to finish. Collective, between two steps.

        Raises:
            CheckpointError: On every rank, if the part has failed on any rank.
        """
        save = self._underway
        if save is None:
            return
        own_state = GOES_ON if not save.task.done() else FAILED if save.task.exception() else 0
        if collectives.all_reduce_max(own_state) != GOES_ON:
            self._complete_part(save)

    def finish(self) -> None:
        """Wait until no save is in progress. Collective.

        Raises:
            CheckpointError: On every rank, if the save has failed on any rank.
        """
        while self._underway is not None:
            self._complete_part(self._underway)

    def _complete_part(self, save: PendingSave) -> None:
        """Wait until all ranks have finished this part, and start the next."""
        with self._removed_if_it_fails(save.step):
            if save.is_publishing:
                with errors_on_all_ranks(f"publishing {self.folder.directory(save.step)}"):
                    save.task.result()
                self._saved_step, self._underway = save.step, None
                activity.report_saved()
                self._unproven.add(save.step)
                if collectives.rank() == 0:
                    self._unproven &= {save.step, *self.folder.steps()}
                return
            with errors_on_all_ranks(f"writing {self.folder.being_written(save.step)}"):
                written = save.task.result()
            publish = self._sharded.gather_files(written)
            save.task = self._begun(partial(self._publish, save, publish))
            save.is_publishing = True

    def _begun(self, work: Callable[[], Any]) -> Future[Any]:
        return run_in_thread(work, name="checkpoint", in_thread=self.cfg.async_save)

    def _publish(self, save: PendingSave, describe: Callable[[Path], dict[str, Any]] | None) -> None:
        """Publish the checkpoint on rank 0, the only rank with something to describe."""
        if describe is not None:
            files = describe(self.folder.being_written(save.step))
            self.folder.commit(save.step, save.facts, files)
            write_mark(self.resume.output_dir, RUN, saved=save.step)
            if self.best is not None:
                self.best.record_saved(save.step)
            self.folder.retain(self.cfg.save_total_limit, newest=save.step, best=self.best.step if self.best else None)

    @contextmanager
    def _removed_if_it_fails(self, step: int) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self._underway = None
            if collectives.rank() == 0:
                self.folder.abandon(step)
            last = f"the last complete checkpoint is of step {self._saved_step}"
            remark = last if self._saved_step else "this run has no earlier checkpoint"
            raise CheckpointError(f"The checkpoint of step {step} failed and was removed; {remark}. {error}") from error

    def _others(self, progress: Progress, buffer: SampleBuffer, policy: Policy, prompts: PromptStream) -> dict[str, bytes]:
        """Return the unsharded files of this rank by name: its pending rows, and on rank 0 the state that is equal on all ranks."""
        files = {}
        samples_by_kind = {Sample: buffer.to_save(), PartialCompletion: self.partial.to_save() if self.partial is not None else []}
        for kind, samples in samples_by_kind.items():
            if samples:
                from megatron_grpo.run.checkpoint.samples import FOLDERS, serialize_samples

                files[f"{OURS}/{FOLDERS[kind]}/rank_{collectives.rank():05d}.npz"] = serialize_samples(samples)
        if collectives.rank() == 0:
            files[f"{OURS}/progress.json"] = f"{json.dumps(asdict(progress))}\n".encode()
            files[f"{OURS}/prompts.json"] = f"{json.dumps(prompts.state())}\n".encode()
            files[f"{OURS}/guard.json"] = f"{json.dumps(policy.gradient_check_state())}\n".encode()
            if self.logger is not None and (stats := self.logger.compute_unreported_stats()):
                files[f"{OURS}/{METRICS}"] = f"{json.dumps(stats, default=float)}\n".encode()
            config = self.resume.output_dir / "config.yaml"
            if config.exists():
                files[CONFIG] = config.read_bytes()
        return files

    def _facts(self, progress: Progress, buffer: SampleBuffer) -> dict[str, Any]:
        """Return the contents of the manifest. `versions` maps each pending rollout to the version of the weights that sampled it."""
        versions = dict(zip(map(str, buffer.rows.rollout.tolist()), buffer.rows.version.tolist(), strict=True))
        return manifest_content(
            self.resume.origin, progress,
            world_size=collectives.num_ranks(), torch=torch.__version__, num_pending=len(buffer), versions=versions,
        )  # fmt: skip

    # -- restoring ---------------------------------------------------------------------------------------------------------------------

    def choose(self) -> Path | None:
        """Choose the checkpoint to continue by reading every byte of it, or of the previous one if it is damaged. Collective.

        Called before any model is loaded. Prints the choice.

        Returns:
            The directory of the checkpoint; None for a new run.

        Raises:
            ConfigError: On every rank, if all checkpoints are damaged or the chosen one is incompatible with this run.
        """
        # One view of the directory for all ranks: network file systems may show new files late.
        resume = collectives.broadcast_object(self.resume)
        first, refusals = collectives.rank() == 0, []
        for line in resume.notes if first else ():
            self.print_line(line)
        for candidate in resume.candidates:
            if faults := verify_files(candidate.manifest):
                refusals.append(join_faults(faults))
                if first:
                    self.print_line(f"WARNING: {candidate.manifest.directory} is damaged; trying the previous one: {refusals[-1]}")
                continue
            if candidate.problems:
                raise ConfigError(candidate.problems)
            if first:
                for line in resume.lines(candidate):
                    self.print_line(line)
            self._chosen = candidate
            return candidate.manifest.directory
        if refusals:
            raise unusable(refusals)
        return None

    def recorded(self, name: str) -> str | None:
        """Return the fingerprint of a content in the checkpoint that the run continues; None if there is none."""
        return self._chosen.manifest.origin.content.get(name) if self._chosen else None

    def record_fingerprint(self, name: str, fingerprint: str) -> None:
        """Record a fingerprint that was not known when the run began, for the manifests of its checkpoints.

        Prints a message if the checkpoint that the run continues has another fingerprint. Must be the same on every rank.
        """
        origin = self.resume.origin
        self.resume = replace(self.resume, origin=replace(origin, content={**origin.content, name: fingerprint}))
        old_fingerprint = self.recorded(name)
        if old_fingerprint not in (None, fingerprint) and collectives.rank() == 0:
            from megatron_grpo.run.checkpoint.resume_compatibility import ResumeDifference

            self.print_line(
                f"Changed since that checkpoint:\n  {ResumeDifference(name=name, was=old_fingerprint, now=fingerprint, verdict='said')}"
            )

    def restore(self, policy: Policy, prompts: PromptStream, empty: SampleBuffer) -> tuple[Progress, SampleBuffer]:
        """Restore the state of the chosen checkpoint. A new run starts at step 0 with nothing pending. Collective.

        Args:
            empty: An empty buffer, returned for a new run.

        Returns:
            Counters of the run, and the buffer of rows waiting to be trained.

        Raises:
            ConfigError: If the checkpoint does not fit the model or optimizer that has been built.
        """
        self._saved_at = time.monotonic()
        if self._chosen is None:
            self._resume_best(0, is_ours=False)
            return Progress(), empty
        directory = self._chosen.manifest.directory
        try:
            with policy.on_device("all"), activity.phase("restoring"):
                with_optimizer = "optim" not in self.resume.without
                described = policy.sharded_state_dict(is_loading=True, with_optimizer=with_optimizer)
                state = read_sharded(described, directory, partly=not with_optimizer)
                policy.load_sharded_state_dict(state, with_optimizer=with_optimizer)
        except CheckpointError as error:
            raise config_error(
                "resume",
                f"{directory} is not damaged but does not match this run's model or optimizer: {error}. Resume with the model and "
                "optimizer settings in its grpo/config.yaml.",
            ) from error
        with errors_on_all_ranks(f"reading {directory / OURS}"):
            folder = directory / OURS
            progress = Progress(**parse_json((folder / "progress.json").read_text()))
            prompts.restore(parse_json((folder / "prompts.json").read_text()))
            if (folder / "guard.json").exists():  # old checkpoints have no guard state
                policy.restore_gradient_check(parse_json((folder / "guard.json").read_text()))
            if self.logger is not None:
                self.logger.restored_stats = read_object(folder / METRICS)
            if "rng" not in self.resume.without:
                rng_state.restore(folder / rng_state.FILE)
            samples = [replace(sample, images=prompts.list_images(sample.prompt_number)) for sample in _read_share(folder, Sample)]
            interrupted = _read_share(folder, PartialCompletion)
        buffer = empty.restored(samples)
        self._restore_partial(interrupted)
        is_ours = directory.parent.resolve() == self.folder.path.resolve()
        self._resume_best(progress.step, is_ours=is_ours)
        if is_ours:
            self._saved_step = progress.step
            if not self._chosen.manifest.is_good:
                self._unproven.add(progress.step)
        if collectives.rank() == 0:
            self.folder.sweep()
        return progress, buffer

    def _restore_partial(self, interrupted: list[PartialCompletion]) -> None:
        """Hand interrupted completions of the checkpoint to the run, or report that it cannot continue them. Collective."""
        from megatron_grpo.run.checkpoint.resume_compatibility import sampling_settings

        changed = [change.name for change in self._chosen.changes if change.name in sampling_settings()] if self._chosen else []
        if self.partial is not None and not changed:
            self.partial.restore(interrupted)
        elif dropped := sum(collectives.all_gather_object(len(interrupted))):
            if collectives.rank() == 0:
                reason = ", ".join(changed or ["async_rollout_depth"])
                self.print_line(f"{dropped} partial completions of the checkpoint are dropped and sampled again: {reason} changed.")

    def _resume_best(self, step: int, *, is_ours: bool) -> None:
        """Restore the record of the best checkpoint, without steps after the one that the run continues from."""
        if self.best is not None and collectives.rank() == 0:
            self.best.resume(step, is_saved=is_ours)


def _read_share(folder: Path, kind: type) -> list[Any]:
    """Read this rank's share of the pending rows or partial completions of a checkpoint."""
    from megatron_grpo.run.checkpoint.samples import read_samples, sample_files

    files = sample_files(folder, kind)[collectives.rank() :: collectives.num_ranks()]
    return [sample for path in files for sample in read_samples(path, kind)]


def verify_files(manifest: Manifest) -> list[str]:
    """Check every byte of a checkpoint, with the files divided among the ranks. Collective.

    Args:
        manifest: Manifest of the checkpoint; the same on all ranks.

    Returns:
        A sentence per damaged file, the same list on all ranks.
    """
    files = manifest.files
    own_files = sorted(files)[collectives.rank() :: collectives.num_ranks()]
    with activity.phase("restoring", total=sum(-(-files[name]["bytes"] // MIB) for name in own_files), unit="MiB"):
        sentences_of_ranks = collectives.all_gather_object(find_damage(manifest.directory, {name: files[name] for name in own_files}))
    return [sentence for sentences in sentences_of_ranks for sentence in sentences]
