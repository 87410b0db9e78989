"""Decide which checkpoint a run continues, before a process group, a model or an engine exists and before anything is written. No torch.

`plan_resume` is the entry point. It reads names, sizes and manifests; `Checkpoints.choose` verifies every byte later, with the files
divided among the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_grpo.core.base.errors import ConfigError, Problem, config_error, problem_with
from megatron_grpo.core.base.files import parse_json
from megatron_grpo.run import jobs
from megatron_grpo.run.checkpoint.fingerprints import list_settings, vocabulary_fingerprint
from megatron_grpo.run.checkpoint.manifest import (
    MANIFEST,
    POINTER,
    CheckpointDirectory,
    Manifest,
    RunFingerprint,
    find_damage,
    read_manifest,
)
from megatron_grpo.run.checkpoint.output_files import holds_run, overwrite_obstacle, restart_obstacle

if TYPE_CHECKING:
    from megatron_grpo.core.batching.schedule import TrainingSchedule
    from megatron_grpo.run.checkpoint.resume_compatibility import ResumeDifference
    from megatron_grpo.run.config.settings import Config
    from megatron_grpo.run.data.prompts import PromptStream
    from megatron_grpo.run.inputs import ValidatedInputs

_FLAG = "mcore_model"
OURS = "grpo"  # directory in a checkpoint for files that Megatron-Core does not know


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeCandidate:
    """A checkpoint with a readable manifest.

    Args:
        manifest: Its manifest.
        changes: Differences between its run and this one.
        problems: Reasons why this run cannot continue it; empty if it can.
    """

    manifest: Manifest
    changes: tuple[ResumeDifference, ...] = ()
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
    """Decision on how a run begins: from the first undamaged one of `candidates` (best first), or from scratch without any.

    Args:
        output_dir: Output directory of the run.
        candidates: Checkpoints to try, in order.
        origin: Settings and fingerprints of this run, for its own checkpoints.
        wipes: Whether to remove the files of an earlier run first.
        requested: Path given with --resume; "" without one.
        num_steps: Optimizer steps of the whole run, if known.
        notes: Messages for the user, one line each.
        without: "optim", "rng": parts of the requested checkpoint to ignore. A restart continues from the run's own checkpoint with all
            its parts.
    """

    output_dir: Path
    candidates: tuple[ResumeCandidate, ...] = ()
    origin: RunFingerprint = RunFingerprint()
    wipes: bool = False
    requested: str = ""
    num_steps: int | None = None
    notes: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def lines(self, chosen: ResumeCandidate) -> list[str]:
        """Return the messages about the checkpoint that the run continues, one line each."""
        manifest, total = chosen.manifest, self.num_steps
        pending = f", {manifest.num_pending} sampled completions pending" if manifest.num_pending else ""
        lines = [f"Resuming from {manifest.directory}: {manifest.step}{f' of {total}' if total else ''} optimizer steps done{pending}."]
        lines.append(self._standing(manifest))
        if self.without:
            parts = " and ".join({"optim": "optimizer state", "rng": "RNG state"}[part] for part in self.without)
            lines.append(f"Not loaded, as requested: {parts}.")
        if chosen.changes:
            lines += ["Changed since that checkpoint:", *(f"  {change}" for change in chosen.changes)]
        if total is not None and manifest.step >= total:
            remedy = "To continue it, increase --max_steps (or --num_train_epochs)."
            lines.append(f"The run is complete ({total} optimizer steps). {remedy}")
        return lines

    def _standing(self, chosen: Manifest) -> str:
        """Describe whether the weights of a checkpoint have trained since; if not, name the last one whose weights have."""
        if chosen.is_good:
            return "It is confirmed good: its weights have been used for sampling and training."
        confirmed = [
            candidate.manifest for candidate in self.candidates if candidate.manifest.is_good and candidate.manifest.step < chosen.step
        ]
        remark = f" The last confirmed one is {confirmed[0].directory} (use it with --resume)." if confirmed else ""
        return f"It is not confirmed good yet: no step has been trained from it, as usual for the newest checkpoint.{remark}"


def plan_resume(
    cfg: Config,
    schedule: TrainingSchedule,
    content: Mapping[str, str],
    prompts: PromptStream | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ResumePlan:
    """Decide how a run with these settings begins. Writes nothing.

    Args:
        content: Fingerprints of this run, from `fingerprints.compute_fingerprints`.
        prompts: Stream of prompts, if the data set has been read.

    Raises:
        ConfigError: With all reasons why the run cannot begin.
    """
    origin = RunFingerprint(
        settings=list_settings(cfg), content=dict(content), sizes=schedule.sizes.stream_sizes, job=jobs.job_ids(environ)
    )
    resume = find_checkpoints(cfg.run.output_dir, cfg.run.resume, overwrites=cfg.run.overwrite_output_dir, origin=origin, environ=environ)
    candidates = tuple(_compare(candidate.manifest, origin, cfg, schedule, prompts) for candidate in resume.candidates)
    if candidates and candidates[0].problems:
        raise ConfigError(candidates[0].problems)
    left_out = {"optim": cfg.run.no_load_optim, "rng": cfg.run.no_load_rng}
    left_out_parts = tuple(part for part, is_left_out in left_out.items() if is_left_out and resume.requested)
    return replace(resume, candidates=candidates, num_steps=schedule.num_steps, without=left_out_parts)


def _compare(
    manifest: Manifest, origin: RunFingerprint, cfg: Config, schedule: TrainingSchedule, prompts: PromptStream | None
) -> ResumeCandidate:
    """Compare the run that wrote a checkpoint with this one."""
    from megatron_grpo.run.checkpoint.resume_compatibility import changes_since, list_problems

    changes = changes_since(manifest.origin, origin)
    is_between = schedule.is_between_rollouts(manifest.step, manifest.progress.num_rollouts)
    problems = list_problems(changes, manifest, is_between_rollouts=is_between, typed_names=cfg.typed)
    problems += _problems_inside(manifest, prompts, named_flags={flag for problem in problems for flag in problem.flags})
    return ResumeCandidate(manifest=manifest, changes=tuple(changes), problems=tuple(problems))


def find_checkpoints(
    output_dir: str | Path,
    resume: str = "auto",
    *,
    overwrites: bool = False,
    origin: RunFingerprint | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ResumePlan:
    """Find the checkpoints that `--resume` refers to, without those that have missing or truncated files.

    With `overwrites` or "never" none are returned, except at a restart, when a job continues from its own checkpoints.

    Args:
        resume: Value of --resume: "auto", "never" or a path.

    Raises:
        ConfigError: If a requested checkpoint does not exist, or the settings conflict with the contents of `output_dir`.
    """
    out, origin = Path(output_dir), origin or RunFingerprint(job=jobs.job_ids(environ))
    in_the_way = next((path for path in (out, *out.parents) if path.exists() and not path.is_dir()), None)
    if in_the_way:
        fault = "is a file" if in_the_way == out else f"cannot be created: {in_the_way} is a file"
        raise config_error("output_dir", f"output_dir ({out}) {fault}. Use a directory.")
    restart = jobs.restart(environ)
    if obstacle := overwrite_obstacle(out) or (restart_obstacle(out) if restart or not overwrites else None):
        raise config_error("output_dir", f"output_dir: {obstacle}")
    new_run = ResumePlan(output_dir=out, origin=origin)
    requested = "" if resume in ("auto", "never") else resume
    if overwrites and requested:
        raise config_error(
            ("overwrite_output_dir", "resume"),
            f"overwrite_output_dir starts a new run, but resume ({resume}) continues one. Leave one of them out.",
        )
    if overwrites or resume == "never":
        return _start_new_run(new_run, restart, overwrites=overwrites)
    newest = _newest(out) if requested and not Path(requested).resolve().is_relative_to(out.resolve()) else None
    if newest and restart:  # at the first start output_dir held no checkpoint: the lines below ensure that
        note = f"resume ({resume}) is ignored: a restart ({restart}) continues from its own checkpoints."
        return _candidates(replace(new_run, notes=(note,)))
    new_run = _candidates(replace(new_run, requested=requested))
    if newest:
        raise config_error(
            ("resume", "output_dir"),
            f"output_dir ({out}) contains {newest.directory}, but resume ({resume}) is a checkpoint of another run. Use --resume auto "
            "to continue the one in output_dir, or another output_dir.",
        )
    return new_run


def _start_new_run(resume: ResumePlan, restart: str, *, overwrites: bool) -> ResumePlan:
    """Begin a new run, as overwrite_output_dir and --resume never request; but continue if the same job has written checkpoints before."""
    out, flag = resume.output_dir, "overwrite_output_dir" if overwrites else "resume never"
    newest, job = _newest(out), resume.origin.job
    its_job = newest.origin.job if newest else {}
    writer = next((f"{name}={value}" for name, value in job.items() if its_job.get(name) == value), "")
    different = next((name for name in job if name in its_job and its_job[name] != job[name]), None)
    if restart and newest and different and not writer:  # the restart can neither continue nor remove the checkpoints
        raise config_error(
            ("output_dir", "resume"),
            f"{flag} does not remove checkpoints at a restart ({restart}), but {newest.directory} was written by another job "
            f"({different}={its_job[different]}, not {job[different]}). Remove it yourself, or use another output_dir.",
        )
    if restart or writer:
        reason = f"this is a restart ({restart})" if restart else f"this job ({writer}) wrote the checkpoints in {out}"
        note = f"{flag} is ignored: {reason}, and a job continues its own run. Use another output_dir to start a new run."
        return _candidates(replace(resume, notes=(note,)))
    if not overwrites and holds_run(out):
        raise config_error(
            ("output_dir", "resume"),
            f"output_dir ({out}) contains an earlier run, but resume is never. Use --resume auto to continue it, "
            "--overwrite_output_dir to replace it, or another output_dir.",
        )
    return replace(resume, wipes=overwrites)


def find_recorded(name: str, cfg: Config) -> str | None:
    """Return a fingerprint of the run that `cfg` continues; None if it continues none, or one that has not recorded it."""
    with suppress(ConfigError):  # reported where the run is planned
        candidates = find_checkpoints(cfg.run.output_dir, cfg.run.resume, overwrites=cfg.run.overwrite_output_dir).candidates
        return candidates[0].manifest.origin.content.get(name) if candidates else None
    return None


def _candidates(resume: ResumePlan) -> ResumePlan:
    """Add the checkpoints at the path `requested`, or else those in output_dir."""
    source = Path(resume.requested) if resume.requested else resume.output_dir
    if source.exists() and not source.is_dir():
        raise config_error("resume" if resume.requested else "output_dir", f"{source} is a file, expected a directory.")
    is_checkpoint = bool(resume.requested) and ((source / MANIFEST).exists() or source.name.startswith("iter_"))
    inner = source / "checkpoints"
    folder = CheckpointDirectory(inner if inner.is_dir() or not resume.requested else source)
    pointer = None if is_checkpoint else folder.pointer()
    manifests = [read_manifest(source)] if is_checkpoint else folder.candidates()
    complete, faults = _separate_damaged(manifests)
    candidates, notes = tuple(ResumeCandidate(manifest=manifest) for manifest in complete), list(resume.notes)
    if isinstance(pointer, str):
        raise config_error("resume", f"{pointer}. Remove it; the checkpoints are found without it.")
    if not candidates and faults:
        raise unusable(faults)
    if not candidates and pointer is not None:
        raise config_error(
            ("resume", "output_dir"),
            f"{folder.path / POINTER} names step {pointer}, but its checkpoint is missing. Restore {folder.directory(pointer)}, or "
            "start again with --resume never --overwrite_output_dir.",
        )
    if not candidates and resume.requested:
        raise config_error(
            "resume",
            f"resume ({resume.requested}) has no checkpoint: expected a directory with {MANIFEST} or iter_* in it. Use auto to start a "
            "new run if there is none.",
        )
    if candidates and pointer not in (None, candidates[0].manifest.step):
        used = candidates[0].manifest.directory
        notes.append(
            f"{folder.path / POINTER} names step {pointer}; the latest checkpoint {used} is used instead. Use --resume to select "
            "another one."
        )
    if not candidates and holds_run(resume.output_dir):
        notes.append(f"{resume.output_dir} contains records of a run but no checkpoint: the run starts again and replaces them.")
    notes += [f"WARNING: a checkpoint is skipped: {text}." for text in faults]
    return replace(resume, candidates=candidates, notes=tuple(notes))


def _separate_damaged(manifests: list[Manifest | str]) -> tuple[list[Manifest], list[str]]:
    """Separate checkpoints without missing or truncated files from the others, with a sentence for each of the latter."""
    complete, refusals = [], []
    for manifest in manifests:
        if isinstance(manifest, str):
            refusals.append(manifest)
        elif faults := find_damage(manifest.directory, manifest.files, read_bytes=False):
            refusals.append(join_faults(faults))
        else:
            complete.append(manifest)
    return complete, refusals


def _problems_inside(manifest: Manifest, prompts: PromptStream | None, named_flags: set[str]) -> list[Problem]:
    """Return the problems with continuing a checkpoint that its small files show. Unreadable files are damage, which `choose` reports."""
    from megatron_grpo.run.checkpoint.samples import FOLDERS, sample_files, unreadable_reason

    problems = []
    own_files = manifest.directory / OURS
    try:
        for reason in (unreadable_reason(path, kind) for kind in FOLDERS for path in sample_files(own_files, kind)):
            if reason:
                problems.append(Problem(flags=("resume",), message=f"{reason}. Resume with the version that wrote it."))
        if prompts is not None:
            problems += prompts.problems_with(parse_json((own_files / "prompts.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, EOFError):
        pass
    return [problem for problem in problems if not set(problem.flags) & (named_flags - {"resume"})]


def unusable(refusals: list[str]) -> ConfigError:
    """Return the error for the case that every checkpoint was rejected.

    Args:
        refusals: The reasons, a sentence each.
    """
    return config_error(
        "resume",
        f"No usable checkpoint to resume from: {'. '.join(refusals)}. Restore the files, name another checkpoint with --resume, or "
        "start again with --resume never --overwrite_output_dir.",
    )


def join_faults(faults: list[str]) -> str:
    """Join fault messages, naming the first three and counting the rest."""
    return f"{'; '.join(faults[:3])}{f' and {len(faults) - 3} more files' if len(faults) > 3 else ''}"


def _newest(out: Path) -> Manifest | None:
    return next(iter(CheckpointDirectory(out / "checkpoints").complete_checkpoints()), None)


# -- start from the weights of a checkpoint, without its state (`--mcore_model`) -----------------------------------------------------------


def read_initial_weights(path: str | Path) -> Manifest:
    """Return the manifest of the checkpoint at `path`, checked by names and sizes.

    Raises:
        ConfigError: If there is no usable checkpoint.
    """
    source = Path(path)
    if not source.is_dir():
        raise config_error(
            _FLAG,
            f"{_FLAG} ({path}) {'is a file' if source.exists() else 'does not exist'}. Use a directory like OLD/checkpoints/iter_0000100.",
        )
    inner = source / "checkpoints"
    is_one = (source / MANIFEST).exists()
    manifests = [read_manifest(source)] if is_one else CheckpointDirectory(inner if inner.is_dir() else source).candidates()
    complete, refusals = _separate_damaged(manifests)
    if complete:
        return complete[0]
    foreign = (".metadata", "metadata.json", "common.pt", POINTER)
    foreign_files = [*(source / name for name in foreign if (source / name).exists()), *source.glob("iter_*"), *source.glob("mp_rank_*")]
    if foreign_files and not any((path / MANIFEST).exists() for path in foreign_files):
        raise config_error(
            _FLAG,
            f"{_FLAG} ({path}) is a Megatron-Core checkpoint of another program, whose tensor names differ. Export it to Hugging Face "
            "format there, and use the result as model.",
        )
    raise config_error(
        _FLAG,
        f"{_FLAG} ({path}) has no megatron_grpo checkpoint{': ' + join_faults(refusals) if refusals else f' ({MANIFEST} is missing)'}.",
    )


def checkpoint_path(path: str) -> str:
    """Return the absolute directory of the checkpoint at `path`.

    Without one, return `path` itself, made absolute; `read_initial_weights` reports the problem.

    Args:
        path: Checkpoint, run or `checkpoints` directory.
    """
    try:
        return str(read_initial_weights(path).directory.absolute())
    except ConfigError:
        return str(Path(path).absolute())


def initial_weights_problems(cfg: Config, inputs: ValidatedInputs) -> list[Problem]:
    """Return the reasons why a run cannot start from the weights of `mcore_model`.

    Args:
        inputs: Inputs read so far: the directory of the run's Hugging Face model, if known.

    Raises:
        ConfigError: If there is no usable checkpoint.
    """
    path = cfg.run.mcore_model
    if not path:
        return []
    from megatron_grpo.run.checkpoint.resume_compatibility import FREEZING, show_value

    manifest = read_initial_weights(path)
    trained, problems = manifest.origin, []
    for name in ("tuner_type", *FREEZING):  # settings that determine which part of the model's weights a checkpoint holds
        trained_value, value = trained.settings.get(name, getattr(cfg.tuner, name)), getattr(cfg.tuner, name)
        if trained_value != value:
            message = (
                f"{_FLAG} ({path}) was trained with {name} {show_value(trained_value)}, but this run has {show_value(value)}: its "
                f"weights do not match. Use {name} {show_value(trained_value)}, or export it and use the result as model."
            )
            problems.append(problem_with((_FLAG, name), message))
    if vocabulary := compare_vocabulary(manifest, inputs.model_path):
        problems.append(problem_with((_FLAG, "model"), f"{_FLAG} ({path}) {vocabulary}"))
    return problems


def compare_vocabulary(manifest: Manifest, model_path: Path | None) -> str | None:
    """Compare the vocabulary of a model with that of a checkpoint. Return the end of a sentence about a mismatch, or None.

    Args:
        model_path: Directory of the Hugging Face model, if known.
    """
    stored = manifest.origin.content.get("vocabulary")
    fingerprint = vocabulary_fingerprint(model_path) if model_path is not None else None
    if stored and fingerprint and stored != fingerprint:
        return "was trained with another vocabulary than the model's, so the same token IDs mean other tokens. Use its own model."
    return None
