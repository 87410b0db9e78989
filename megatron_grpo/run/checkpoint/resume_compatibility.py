"""Verdicts on settings that change between a checkpoint and the run that continues it. No torch.

`core/settings.py` and `run/config/settings.py` have a verdict for every setting:

refused    the checkpoint cannot be continued with another value
between    may change if no rollout is in progress, and is reported; refused if rows wait that were sampled with the old value
said       may change; reported once as a difference: the run is no longer the same, or its work is divided differently among ranks
free       only changes where and how fast the same is computed, or what is logged; not reported

Of the sizes, those that determine which rows a step trains are compared. For settings that name a model, a data set or a reward file, the
contents are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_grpo.core.base.errors import Problem
from megatron_grpo.core.field import OnResume
from megatron_grpo.core.grpo.zero_gradient import DECIDING, zero_gradient_kinds
from megatron_grpo.run.checkpoint.fingerprints import FLAGS
from megatron_grpo.run.checkpoint.manifest import Manifest, RunFingerprint
from megatron_grpo.run.config.read import format_value
from megatron_grpo.run.config.table import keys, table
from megatron_grpo.run.config.write import absolute_paths

_OTHER_MATRICES = "a checkpoint contains the trainable parameters, which would be different ones"
FREEZING = tuple(keys()["freeze_kwargs"])
_WHY = {
    "torch_dtype": "the dtypes of weights and optimizer moments would differ",
    "use_distributed_optimizer": "the optimizer moments have another layout",
    **dict.fromkeys(
        ("seed", "dataset_shuffle", "dataset_drop_last", "streaming", "shuffle_buffer_size"),
        "the remaining prompts would have another order",
    ),
    "sync_ref_model": "checkpoints contain the reference model only if it is updated",
    "beta": "checkpoints contain the reference model only if it is updated",
    "model": "the weights and the KL reference would be of different models",
    **dict.fromkeys(("tuner_type", "lora_rank", "target_modules", "target_regex", "exclude_modules", "rank_pattern"), _OTHER_MATRICES),
    **dict.fromkeys(("lora_alpha", "use_rslora", "alpha_pattern"), "the same matrices would be a different adapter"),
    **dict.fromkeys(FREEZING, "the checkpoint has optimizer moments of the trained parameters only"),
    "lora_dtype": "the dtypes of weights and optimizer moments would differ",
    "adapters": "it determines ranks, alphas, target modules and the KL reference",
    "ref_adapters": "the KL reference would be another model",
    "mcore_model": "the KL reference is the initial weights of the run",
    "ref_model": "the KL reference would be another model",
    "vocabulary": "the same token IDs would mean other tokens",
    "data set": "the remaining prompts would be other ones",
}
_REFERENCE_SETTINGS = ("sync_ref_model", "beta")  # changes between two values with the same `_keeps_reference` are only reported
NEW_RUN = "or start a new run in another --output_dir"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeDifference:
    """A setting or content that has changed. `verdict` is explained at the top of this module."""

    name: str
    was: Any
    now: Any
    verdict: OnResume

    def __str__(self) -> str:
        return f"{self.name}  {show_value(self.was)} -> {show_value(self.now)}"


def changes_since(old: RunFingerprint, new: RunFingerprint) -> list[ResumeDifference]:
    """Return all differences between two runs whose verdict is not "free". Values unknown to either side are not compared."""
    return [*_settings(old, new), *_contents(old, new)]


def _settings(old: RunFingerprint, new: RunFingerprint) -> Iterator[ResumeDifference]:
    # Sizes are compared after they have been computed: a run may give the same sizes by other settings.
    old_values, new_values = {**old.settings, **absolute_paths(old.settings), **old.sizes}, {**new.settings, **new.sizes}
    # Rows that were left out have no old log-probs, so they cannot be computed after their first pass.
    has_left_out = bool(zero_gradient_kinds(old_values) - zero_gradient_kinds(new_values))
    for name, value in new_values.items():
        verdict: OnResume = table()[name].on_resume if name in table() else "said"
        if name in _REFERENCE_SETTINGS:
            verdict = "refused" if _keeps_reference(old_values) != _keeps_reference(new_values) else "said"
        if name in DECIDING and has_left_out and verdict == "said":
            verdict = "between"
        if name == "mcore_model" and new_values.get("beta") and not _keeps_reference(new_values):
            verdict = "refused" if not (value and old_values.get(name)) else "said"  # if both are given, their contents are compared
        if name in old_values and old_values[name] != value and verdict != "free":
            yield ResumeDifference(name=name, was=old_values[name], now=value, verdict=verdict)
    if new_values:
        for name in old_values.keys() - new_values.keys() - table().keys():  # a setting that only the version that wrote the checkpoint has
            yield ResumeDifference(name=name, was=old_values[name], now="(unknown here)", verdict="said")


@cache
def sampling_settings() -> frozenset[str]:
    """Return the settings that a partial completion depends on: with another value it is not continued but sampled again."""
    sampling = "num_generations max_completion_length temperature top_k top_p min_p stop stop_token_ids generation_kwargs vllm_mode".split()
    return frozenset({*sampling, *(name for name, setting in table().items() if setting.group == "data")})


def _keeps_reference(settings: Mapping[str, Any]) -> bool:
    """Return whether checkpoints contain the reference model.

    They do only if it moves. Any other reference is the model that the run began with.
    """
    return bool(settings.get("sync_ref_model") and settings.get("beta"))


def _contents(old: RunFingerprint, new: RunFingerprint) -> Iterator[ResumeDifference]:
    for name, value in new.content.items():
        if old.content.get(name, value) != value:
            yield ResumeDifference(name=name, was=old.content[name], now=value, verdict="refused" if name in FLAGS else "said")


def list_problems(
    changes: list[ResumeDifference], manifest: Manifest, *, is_between_rollouts: bool, typed_names: Mapping[str, str]
) -> list[Problem]:
    """Return the changes that prevent continuing a checkpoint, as problems in the user's terms.

    Args:
        changes: Differences, from `changes_since`.
        is_between_rollouts: Whether the checkpoint lies between two rollouts with the sizes of this run.
    """
    problems = [_refusal(change, manifest, typed_names) for change in changes if change.verdict == "refused"]
    sizes = [change for change in changes if change.verdict == "between" and change.name in manifest.origin.sizes]
    other_changes = [change for change in changes if change.verdict == "between" and change not in sizes]
    stuck = [*(other_changes if manifest.num_pending else []), *(sizes if manifest.num_pending or not is_between_rollouts else [])]
    if stuck:
        pending, step = manifest.num_pending, manifest.step
        uneven = f"{manifest.progress.num_rollouts} rollouts would not equal {step} optimizer steps"
        reason = f"{pending} of its samples are not trained yet" if pending else uneven
        names = [typed_names.get(change.name, change.name) for change in stuck]
        changed = ", ".join(f"{name} was {show_value(change.was)} and is {show_value(change.now)}" for name, change in zip(names, stuck))
        noun = "sizes" if not set(stuck) & set(other_changes) else "values"
        message = (
            f"{changed}, and {manifest.directory} cannot be continued with other {noun}: {reason}. Resume with the old {noun}, or start "
            "a new run from its weights (--model OLD_OUTPUT_DIR/hf, another --output_dir)."
        )
        nearest = {name: [change.was] for name, change in zip(names, stuck)}
        problems.append(Problem(flags=(*names, "resume"), nearest=nearest, message=message))
    return problems


def _refusal(change: ResumeDifference, manifest: Manifest, typed_names: Mapping[str, str]) -> Problem:
    setting = FLAGS.get(change.name, change.name)
    name = typed_names.get(setting, setting)
    if change.name in FLAGS:
        change_text = f"The {change.name} ({change.now}) is not the one of {manifest.directory} ({change.was})"
        use, nearest = f"Restore it (--{name})", {}
    else:
        change_text = f"{name} is {show_value(change.now)}, but was {show_value(change.was)} for {manifest.directory}"
        use, nearest = f"Use {name} {show_value(change.was)}", {name: [change.was]}
    reason = _WHY.get(change.name, "")
    return Problem(flags=(name, "resume"), message=f"{change_text}: {reason}. {use}, {NEW_RUN}.", nearest=nearest)


def show_value(value: Any) -> str:
    """Return the value of a setting as a command line has it, with a sign for an empty one."""
    if isinstance(value, Mapping):
        return str(value)
    return format_value(value) or ('""' if isinstance(value, str) else "(none)")
