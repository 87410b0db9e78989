"""The batch vocabularies of other systems, as products of their own flags. docs/batching.md compares them."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_grpo.batching.sizes import NATIVE, Product
from megatron_grpo.flags.table import Dialect, Setting


def _int(name: str, default: int | None, help: str) -> Setting:
    return Setting(name=name, group="foreign", kind="int", default=default, help=help, optional=default is None)


def _settings(*rows: Setting) -> dict[str, Setting]:
    return {row.name: row for row in rows}


_NATIVE_NAMES = tuple(flag for flags in NATIVE.values() for flag in flags)

_SKYRL = _settings(
    _int("train_batch_size", 1024, "prompts in one rollout"),
    _int("policy_mini_batch_size", 256, "prompts (the code) or completions (the guide) in one optimizer step"),
    _int("micro_train_batch_size_per_gpu", 1, "completions in one forward on one DP rank"),
    _int("n_samples_per_prompt", 5, "completions per prompt"),
    _int("update_epochs_per_batch", 1, "passes over one rollout"),
)
_SKYRL_PREFIXES = ("trainer.algorithm.", "trainer.", "generator.sampling_params.", "generator.")

DIALECTS: Mapping[str, Dialect] = {
    "trl": Dialect(name="trl", hides=_NATIVE_NAMES, implies={"allow_unaligned_generation": True}, settings=_settings(
        _int("per_device_train_batch_size", 8, "completions in one forward on one DP rank"),
        _int("gradient_accumulation_steps", 1, "micro-steps in one optimizer step"),
        _int("steps_per_generation", None, "micro-steps in one pass over a rollout (default gradient_accumulation_steps)"),
        _int("generation_batch_size", None, "completions in one rollout, instead of steps_per_generation"),
        _int("num_generations", 8, "completions per prompt"),
        _int("num_iterations", 1, "passes over one rollout"),
    )),
    "skyrl": Dialect(name="skyrl", hides=_NATIVE_NAMES, prefixes=_SKYRL_PREFIXES, settings=_SKYRL),
    "skyrl-doc": Dialect(name="skyrl-doc", hides=_NATIVE_NAMES, prefixes=_SKYRL_PREFIXES, settings=_SKYRL),
    "swift-megatron": Dialect(name="swift-megatron"),
    "cs336": Dialect(name="cs336", hides=tuple(name for name in _NATIVE_NAMES if name != "num_generations"), settings=_settings(
        _int("train_batch_size", None, "completions in one optimizer step"),
        _int("micro_train_batch_size", None, "completions in one forward on one DP rank"),
        _int("gradient_accumulation_steps", None, "micro-steps in one optimizer step"),
        _int("rollout_batch_size", None, "completions in one rollout (default train_batch_size)"),
        _int("group_size", 8, "completions per prompt"),
        _int("epochs_per_rollout_batch", 1, "passes over one rollout"),
    )),
}

PRODUCTS: Mapping[str, Mapping[str, Product]] = {
    "trl": {"micro": ("per_device_train_batch_size",), "accumulation": ("gradient_accumulation_steps",),
            "window": ("steps_per_generation",), "generation": ("generation_batch_size",),
            "group": ("num_generations",), "passes": ("num_iterations",)},
    # What SkyRL's code does: a mini-batch is counted in prompts.
    "skyrl": {"micro": ("micro_train_batch_size_per_gpu",), "global": ("policy_mini_batch_size", "n_samples_per_prompt"),
              "generation": ("train_batch_size", "n_samples_per_prompt"), "group": ("n_samples_per_prompt",),
              "passes": ("update_epochs_per_batch",)},
    # What SkyRL's guide says: a mini-batch is counted in completions.
    "skyrl-doc": {"micro": ("micro_train_batch_size_per_gpu",), "global": ("policy_mini_batch_size",),
                  "generation": ("train_batch_size", "n_samples_per_prompt"), "group": ("n_samples_per_prompt",),
                  "passes": ("update_epochs_per_batch",)},
    "swift-megatron": NATIVE,
    "cs336": {"micro": ("micro_train_batch_size",), "global": ("train_batch_size",), "accumulation": ("gradient_accumulation_steps",),
              "generation": ("rollout_batch_size",), "group": ("group_size",), "passes": ("epochs_per_rollout_batch",)},
}
