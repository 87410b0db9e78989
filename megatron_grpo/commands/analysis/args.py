"""Arguments of `mismatch` and `compare-losses`, and the settings that belong to them, validated before a model loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_grpo.core.base.errors import ConfigError, Problem, config_error, problem_with
from megatron_grpo.core.types import Sample
from megatron_grpo.run.checkpoint.fingerprints import list_settings
from megatron_grpo.run.checkpoint.manifest import MANIFEST, CheckpointDirectory, Manifest, find_damage
from megatron_grpo.run.checkpoint.samples import read_samples
from megatron_grpo.run.checkpoint.saving import RECORDED
from megatron_grpo.run.config import ParsedConfig
from megatron_grpo.run.config.read import split_flags
from megatron_grpo.run.config.rules import grpo as validation
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.open_checkpoint import settings_over, undamaged_checkpoint

Parse = Callable[[Sequence[str]], ParsedConfig]


# ---- mismatch --------------------------------------------------------------------------------------------------------------------------

ROWS = 16  # rows that are compared by default


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchArgs:
    """Arguments of `mismatch`.

    Args:
        name: What is examined, for the report.
        cfg: Settings of the run under the typed ones.
        run: Output directory of a run; None for the files of a model.
        checkpoint: Checkpoint directory; None for the initial weights of a run, or for a model.
        step: Optimizer step of the weights.
        row: Row whose operations are compared; None for the one with the largest difference.
        num_rows: Rows whose log-probs are compared.
        dtype: dtype of both sides; None for the run's.
    """

    name: str
    cfg: Config
    run: Path | None = None
    checkpoint: Path | None = None
    step: int = 0
    row: int | None = None
    num_rows: int = ROWS
    dtype: str | None = None


def read_mismatch_args(argv: Sequence[str], parse: Parse) -> MismatchArgs:
    """Parse and validate the command line of `mismatch`.

    Raises:
        ConfigError: With all problems.
    """
    if not argv or argv[0].startswith("--"):
        raise ConfigError("mismatch needs a directory first: an output_dir, one of its checkpoints (checkpoints/iter_0000100), or a model.")
    own_values, other_words = split_flags(argv[1:], ("--row", "--rows", "--dtype"))
    parsed = parse([*other_words, *(word for dtype in own_values["--dtype"] for word in ("--torch_dtype", dtype))])
    problems = [
        problem_with(name, f"{name} ({value or 'nothing'}) must be a whole number, {least} or more.")
        for name, least in (("row", 0), ("rows", 1))
        for value in own_values[f"--{name}"]
        if not value.isdecimal() or int(value) < least
    ]
    problems += parsed.problems
    try:
        subject = _subject(Path(argv[0]), parsed, parse)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    row, num_rows, dtype = (values[-1] if values else None for values in own_values.values())
    return replace(subject, row=None if row is None else int(row), num_rows=int(num_rows or ROWS), dtype=dtype)


def _subject(path: Path, parsed: ParsedConfig, parse: Parse) -> MismatchArgs:
    typed_cfg, path = parsed.config, path.absolute()
    if (path / MANIFEST).is_file():
        run_directory = path.parent.parent
        return _read_checkpoint_args(path, typed_cfg, run=run_directory if (run_directory / "metrics.jsonl").is_file() else None)
    if (path / "checkpoints").is_dir() or (path / "metrics.jsonl").is_file():
        if checkpoints := CheckpointDirectory(path / "checkpoints").complete_checkpoints():
            return _read_checkpoint_args(checkpoints[0].directory, typed_cfg, run=path)
        if not (path / "config.yaml").is_file():
            raise config_error("mismatch", f"mismatch: {path} has neither a checkpoint nor a config.yaml, so its model is not known.")
        run_cfg = parse(["--config", str(path / "config.yaml")]).config
        cfg = settings_over(typed_cfg, list_settings(run_cfg))
        return MismatchArgs(name=f"{path}, which has no checkpoint: the weights it began with", run=path, cfg=cfg)
    if (path / "config.json").is_file():
        return MismatchArgs(name=str(path), cfg=typed_cfg.with_values({"model": str(path)}))
    fault = "holds no run (metrics.jsonl), checkpoint (manifest.json) or model (config.json)"
    fault_text = "is a file, not a directory" if path.is_file() else fault
    raise config_error("mismatch", f"mismatch: {path} {fault_text if path.exists() else 'does not exist'}.")


def _read_checkpoint_args(directory: Path, typed_cfg: Config, *, run: Path | None) -> MismatchArgs:
    manifest = undamaged_checkpoint(directory)
    cfg = settings_over(typed_cfg, manifest.origin.settings)
    return MismatchArgs(name=str(directory), run=run, checkpoint=directory, step=manifest.step, cfg=cfg)


# ---- compare-losses ----------------------------------------------------------------------------------------------------------------------

# Settings of the loss on given rows. All other settings determine the rows or their advantages.
TRIED = frozenset(
    """loss_type epsilon epsilon_high delta importance_sampling_level sapo_temperature_pos sapo_temperature_neg vespo_k_pos vespo_lambda_pos
    vespo_k_neg vespo_lambda_neg fipo_decay_rate fipo_clip_range fipo_clip_high_only fipo_safety_threshold real_tau beta kl_estimator
    use_bias_correction_kl entropy_coef top_entropy_quantile overlong_filter exclude_zero_std_groups rollout_importance_sampling_mode
    rollout_importance_sampling_threshold rollout_importance_sampling_min rollout_is_geometric off_policy_sequence_mask_delta
    teacher_kl_coef""".split()
)
SIZES = ("global_batch_size", "staleness")
# Settings of the run that are not applied, in addition to those of `run.open_checkpoint`: micro-batches must suit the layout of this job.
_OTHERS = ("micro_batch_size", "max_tokens_per_micro_batch", "optimizer_cpu_offload", "record_rows", "sync_ref_model")
OWN = "the run's own"

_problem, _refused = partial(problem_with, "variant"), partial(config_error, "compare-losses")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Settings under which a recorded step is repeated.

    Args:
        name: Typed text of the variant.
        cfg: The run's settings with the variant's values.
        num_rows: Rows that train, from the first.
        staleness: Optimizer steps by which the weights are later than the recorded ones.
    """

    name: str
    cfg: Config
    num_rows: int
    staleness: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareLossesArgs:
    """Arguments of `compare-losses`.

    Args:
        run: Output directory of the run.
        checkpoint: Checkpoint with the recorded rows.
        step: Optimizer steps before the weights of the checkpoint.
        cfg: Settings of the run under the typed ones.
        variants: The run's own settings, then each `--variant`.
        later: Later checkpoints of the run, by the number of steps after this one.
    """

    run: Path
    checkpoint: Path
    step: int
    cfg: Config
    variants: tuple[Variant, ...]
    later: Mapping[int, Path] = field(default_factory=dict)


def read_compare_losses_args(argv: Sequence[str], parse: Parse) -> CompareLossesArgs:
    """Parse and validate the command line of `compare-losses`.

    Args:
        argv: The output directory of a run, `--step N`, any number of `--variant "name=value ..."`, and settings
            of this job (layout, --json).

    Raises:
        ConfigError: With all problems.
    """
    if not argv or argv[0].startswith("-"):
        example = 'megatron-grpo compare-losses OUTPUT_DIR --variant "loss_type=vespo"'
        raise _refused(f"compare-losses needs the output_dir of a run first: {example}")
    run = Path(argv[0])
    own_values, other_words = split_flags(argv[1:], ("--variant", "--step"))
    variant_texts, steps = own_values.values()
    parsed = parse(other_words)
    manifest, later_checkpoints = _checkpoint(run, steps[-1] if steps else None)
    samples = read_samples(manifest.directory / RECORDED)
    cfg = _settings(parsed.config, manifest)
    problems = list(parsed.problems)
    if manifest.origin.settings.get("sync_ref_model") and (cfg.grpo.beta or any("beta" in text for text in variant_texts)):
        problems.append(problem_with("sync_ref_model", "compare-losses: the reference of the run changes (sync_ref_model): not supported. "
                                                       "Name a run with a fixed reference, or without one."))  # fmt: skip
    variants = [Variant(name=OWN, cfg=cfg, num_rows=len(samples))]
    for text in variant_texts:
        variant, variant_problems = _variant(text, cfg, samples, later_checkpoints, parse)
        problems += variant_problems
        variants += [variant] if variant else []
    if problems:
        raise ConfigError(problems)
    return CompareLossesArgs(
        run=run, checkpoint=manifest.directory, step=manifest.step, cfg=cfg, variants=tuple(variants), later=later_checkpoints
    )


def _checkpoint(run: Path, step: str | None) -> tuple[Manifest, dict[int, Path]]:
    manifests = {manifest.step: manifest for manifest in CheckpointDirectory(run / "checkpoints").complete_checkpoints()}
    recorded = [number for number in sorted(manifests) if (manifests[number].directory / RECORDED).is_file()]
    if not recorded:
        raise _refused(f"compare-losses: {run} has no checkpoint with recorded rows. Train with --record_rows true and --save_steps: the "
                       "rows that a checkpoint's first step trains are recorded beside it.")  # fmt: skip
    if step is not None and (not step.isdecimal() or int(step) not in recorded):
        those = ", ".join(map(str, recorded))
        raise _refused(f"compare-losses: step {step} has no recorded rows. Checkpoints that have them: {those}.")
    chosen = manifests[recorded[-1] if step is None else int(step)]
    if faults := find_damage(chosen.directory, chosen.files):
        raise _refused(f"compare-losses: {chosen.directory} is damaged: {faults[0]}.")
    return chosen, {number - chosen.step: manifests[number].directory for number in manifests if number > chosen.step}


def _settings(typed_cfg: Config, manifest: Manifest) -> Config:
    run_cfg = {name: value for name, value in manifest.origin.settings.items() if name not in _OTHERS}
    changes = {} if "micro_batch_size" in typed_cfg.typed else {"micro_batch_size": 1}
    beta = {} if "beta" in typed_cfg.typed else {"beta": run_cfg.get("beta", 0.0)}
    return settings_over(typed_cfg, run_cfg).with_values({"offload_model": "false", "offload_optimizer": "false"} | changes | beta)


def _variant(
    text: str, cfg: Config, samples: Sequence[Sample], later_checkpoints: Mapping[int, Path], parse: Parse
) -> tuple[Variant | None, list[Problem]]:
    pairs = [word.partition("=") for word in text.split()]
    if not pairs or not all(equals and value for _, equals, value in pairs):
        example = '--variant "loss_type=dapo epsilon_high=0.28"'
        return None, [_problem(f"variant ({text}) needs name=value, several in one pair of quotes: {example}.")]
    texts = {name.replace("-", "_"): value for name, _, value in pairs}
    sizes = {name: texts.pop(name) for name in SIZES if name in texts}
    numbers = {name: int(size) if size.isdecimal() else -1 for name, size in sizes.items()}
    group, num_rows, staleness = cfg.batch.num_generations, numbers.get("global_batch_size", len(samples)), numbers.get("staleness", 0)
    problems = list[Problem]()
    if "global_batch_size" in sizes and (not 0 < num_rows <= len(samples) or num_rows % group):
        nearest = sorted({max(group, min(num_rows, len(samples)) // group * group), len(samples)})
        problems.append(_problem(f"variant: global_batch_size ({sizes['global_batch_size']}) must be whole groups of {group} of the "
                                 f"{len(samples)} rows that the step trained, for example {' or '.join(map(str, nearest))}."))  # fmt: skip
    if staleness and staleness not in later_checkpoints:
        available = ", ".join(map(str, sorted(later_checkpoints))) or "none"
        message = f"variant: staleness ({sizes['staleness']}) needs a checkpoint of the run that many steps later. Available: {available}."
        problems.append(_problem(message))
    parsed = parse([part for name, value in texts.items() for part in (f"--{name}", value)])
    typed_names = set(parsed.config.typed)
    values: dict[str, Any] = {name: getattr(parsed.config.grpo, name) for name in typed_names & TRIED}
    changed = cfg.with_values(values)
    not_allowed = ", ".join(sorted(typed_names - TRIED))
    groups = {(sample.rollout, sample.prompt_number) for sample in samples[:num_rows]}
    faults = [
        (changed.grpo.kl_in_reward and values.get("beta") is not None,
         "beta is in the reward of this run (kl_in_reward), so the recorded advantages contain it."),
        ("teacher_kl_coef" in values and cfg.grpo.teacher_flag is None,
         "teacher_kl_coef weights a teacher's log-probs, and this run had no teacher."),
        (changed.grpo.loss_type == "real" and len(groups) * group != num_rows,
         "loss_type real needs whole groups, and the recorded step has incomplete ones."),
    ]  # fmt: skip
    problems += parsed.problems
    if not_allowed:
        problems.append(_problem(f"variant: {not_allowed} changes which rows are sampled or their rewards, but the rows are those that the "
                                 f"run recorded. Supported: {', '.join(sorted({*TRIED, *SIZES}))}."))  # fmt: skip
    problems += [*validation.problems(changed), *(_problem(f"variant: {message}") for is_wrong, message in faults if is_wrong)]
    return (None if problems else Variant(name=" ".join(text.split()), cfg=changed, num_rows=num_rows, staleness=staleness)), problems
