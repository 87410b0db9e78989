"""The batch vocabularies of other systems, as products of their own flags. docs/batching.md compares them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from megatron_grpo.settings.table import Dialect, Setting
from megatron_grpo.sizing.sizes import NATIVE, Product

if TYPE_CHECKING:
    from megatron_grpo.sizing.batch_sizes import BatchSizes


def _int(name: str, default: int | None, help: str) -> Setting:
    return Setting(name=name, group="foreign", kind="int", default=default, help=help, optional=default is None)


def _settings(*rows: Setting) -> dict[str, Setting]:
    return {row.name: row for row in rows}


_NATIVE_NAMES = tuple(flag for flags in NATIVE.values() for flag in flags)

# TRL's names for the correction of the mismatch between sampler and trainer.
_TRL_NAMES = {
    "vllm_importance_sampling_mode": "rollout_importance_sampling_mode",
    "vllm_importance_sampling_cap": "rollout_importance_sampling_threshold",
    "vllm_importance_sampling_clip_max": "rollout_importance_sampling_threshold",
    "vllm_importance_sampling_clip_min": "rollout_importance_sampling_min",
}

_SKYRL = _settings(
    _int("train_batch_size", 1024, "prompts in one rollout"),
    _int("policy_mini_batch_size", 256, "prompts (the code) or completions (the guide) in one optimizer step"),
    _int("micro_train_batch_size_per_gpu", 1, "completions in one forward on one DP rank"),
    _int("n_samples_per_prompt", 5, "completions per prompt"),
    _int("update_epochs_per_batch", 1, "passes over one rollout"),
)
_SKYRL_PREFIXES = ("trainer.algorithm.", "trainer.", "generator.sampling_params.", "generator.")

DIALECTS: Mapping[str, Dialect] = {
    "trl": Dialect(
        name="trl",
        hides=_NATIVE_NAMES,
        implies={"allow_unaligned_generation": True},
        renames=_TRL_NAMES,
        settings=_settings(
            _int("per_device_train_batch_size", 8, "completions in one forward on one DP rank"),
            _int("gradient_accumulation_steps", 1, "micro-steps in one optimizer step"),
            _int("steps_per_generation", None, "micro-steps in one pass over a rollout (default gradient_accumulation_steps)"),
            _int("generation_batch_size", None, "completions in one rollout, instead of steps_per_generation"),
            _int("num_generations", 8, "completions per prompt"),
            _int("num_iterations", 1, "passes over one rollout"),
        ),
    ),
    "skyrl": Dialect(name="skyrl", hides=_NATIVE_NAMES, prefixes=_SKYRL_PREFIXES, settings=_SKYRL),
    "skyrl-doc": Dialect(name="skyrl-doc", hides=_NATIVE_NAMES, prefixes=_SKYRL_PREFIXES, settings=_SKYRL),
    "swift-megatron": Dialect(name="swift-megatron"),
    "cs336": Dialect(
        name="cs336",
        hides=_NATIVE_NAMES,
        renames={"n_grpo_steps": "max_steps"},
        settings=_settings(
            _int("train_batch_size", None, "completions in one optimizer step"),
            _int("micro_train_batch_size", None, "completions in one forward on one DP rank"),
            _int("gradient_accumulation_steps", None, "micro-steps in one optimizer step"),
            _int("rollout_batch_size", None, "completions in one rollout (default train_batch_size)"),
            _int("group_size", 8, "completions per prompt"),
            _int("epochs_per_rollout_batch", 1, "passes over one rollout"),
        ),
    ),
}

PRODUCTS: Mapping[str, Mapping[str, Product]] = {
    "trl": {
        "micro": ("per_device_train_batch_size",),
        "accumulation": ("gradient_accumulation_steps",),
        "window": ("steps_per_generation",),
        "generation": ("generation_batch_size",),
        "group": ("num_generations",),
        "passes": ("num_iterations",),
    },
    # What SkyRL's code does: a mini-batch is counted in prompts.
    "skyrl": {
        "micro": ("micro_train_batch_size_per_gpu",),
        "global": ("policy_mini_batch_size", "n_samples_per_prompt"),
        "generation": ("train_batch_size", "n_samples_per_prompt"),
        "group": ("n_samples_per_prompt",),
        "passes": ("update_epochs_per_batch",),
    },
    # What SkyRL's guide says: a mini-batch is counted in completions.
    "skyrl-doc": {
        "micro": ("micro_train_batch_size_per_gpu",),
        "global": ("policy_mini_batch_size",),
        "generation": ("train_batch_size", "n_samples_per_prompt"),
        "group": ("n_samples_per_prompt",),
        "passes": ("update_epochs_per_batch",),
    },
    "swift-megatron": NATIVE,
    "cs336": {
        "micro": ("micro_train_batch_size",),
        "global": ("train_batch_size",),
        "accumulation": ("gradient_accumulation_steps",),
        "generation": ("rollout_batch_size",),
        "group": ("group_size",),
        "passes": ("epochs_per_rollout_batch",),
    },
}


def explain(dialect: str, plan: BatchSizes, foreign: Mapping[str, int], *, max_steps: int | None = None) -> Iterator[str]:
    """What is the same under the native names and what differs, in sentences for someone who moves from that system."""
    steps, a = plan.steps_per_generation, plan.gradient_accumulation_steps
    times = (
        f"{steps:g} optimizer step{'' if steps == 1 else 's'}"
        if plan.num_iterations == 1
        else f"{steps * plan.num_iterations:g} optimizer steps ({plan.num_iterations} passes of {steps:g})"
    )
    same = f"Your old setup took {times} per rollout of {plan.generation_batch_size} completions; so does this one"
    if dialect == "trl":
        w = plan.micro_steps_per_rollout
        yield (
            f"{same}. TRL counts steps_per_generation in micro-steps: {w} micro-steps / gradient_accumulation_steps {a} = "
            f"{steps:g}, which is "
            "what steps_per_generation means here."
        )
        yield (
            "What differs from TRL: it shuffles samples after generation, so that a prompt's group is spread over several "
            "steps; here groups "
            "stay together. Its defaults loss_type dapo and vllm_importance_sampling_mode sequence_mask (up to 3.0) are "
            "grpo and none here."
        )
    elif dialect in ("skyrl", "skyrl-doc"):
        mini, n, rollout = foreign["policy_mini_batch_size"], plan.num_generations, plan.generation_batch_size
        readings = {"skyrl": ("prompts, as SkyRL's code does", mini * n), "skyrl-doc": ("completions, as SkyRL's guide says", mini)}
        how, size = readings[dialect]
        other_how, other = readings["skyrl-doc" if dialect == "skyrl" else "skyrl"]
        yield (
            f"{same}. policy_mini_batch_size ({mini}) is read in {how}: {size} completions an optimizer step, with "
            f"gradient_accumulation_steps {a}. Read in {other_how}, it would be {other} completions and {rollout / other:g} "
            f"optimizer steps "
            "per rollout."
        )
    elif dialect == "swift-megatron":
        yield (
            f"{same}: names and meanings of the sizes are Megatron-SWIFT's. What differs: beta is 0.0 by default here and "
            f"0.04 there (set --beta "
            "0.04 for the same), and what it calls advantage_estimator reinforce_plus_plus is reinforce_plus_plus_baseline here."
        )
    elif dialect == "cs336":
        yield f"{same}. train_batch_size is global_batch_size, and n_grpo_steps is max_steps, counted in optimizer steps."
        per_rollout = steps * plan.num_iterations
        if max_steps is not None and per_rollout != 1:
            yield (
                f"n_grpo_steps ({max_steps}) counts optimizer steps here. With {per_rollout:g} optimizer steps per rollout this is "
                f"{max_steps / per_rollout:g} rollouts; for {max_steps} rollouts use max_steps {max_steps * per_rollout:g}."
            )
