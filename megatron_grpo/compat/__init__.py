"""The vocabularies of other systems: their batch sizes as products of their own flags, and what each of their other names is here."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_grpo.batching.sizes import NATIVE, Product
from megatron_grpo.compat.cs336 import CS336
from megatron_grpo.compat.explain import explain, length_there
from megatron_grpo.compat.ms_swift import MS_SWIFT
from megatron_grpo.compat.skyrl import SKYRL, SKYRL_DOC
from megatron_grpo.compat.slime import SLIME
from megatron_grpo.compat.swift import SWIFT
from megatron_grpo.compat.trl import TRL
from megatron_grpo.compat.verl import VERL
from megatron_grpo.config.foreign import Dialect

__all__ = ["DIALECTS", "PRODUCTS", "explain", "length_there"]

# By what --dialect takes; `swift` is short for `swift-megatron`.
DIALECTS: Mapping[str, Dialect] = {
    "trl": TRL,
    "skyrl": SKYRL,
    "skyrl-doc": SKYRL_DOC,
    "swift-megatron": SWIFT,
    "swift": SWIFT,
    "ms-swift": MS_SWIFT,
    "cs336": CS336,
    "verl": VERL,
    "slime": SLIME,
}

_OF_TRL: Mapping[str, Product] = {
    "micro": ("per_device_train_batch_size",),
    "accumulation": ("gradient_accumulation_steps",),
    "window": ("steps_per_generation",),
    "generation": ("generation_batch_size",),
    "group": ("num_generations",),
    "passes": ("num_iterations",),
}
PRODUCTS: Mapping[str, Mapping[str, Product]] = {
    "trl": _OF_TRL,
    "ms-swift": _OF_TRL,
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
    # Both batches are counted in prompts: RayPPOTrainer repeats prompts n times, and its workers multiply the mini-batch by n.
    "verl": {
        "micro": ("ppo_micro_batch_size_per_gpu",),
        "global": ("ppo_mini_batch_size", "rollout.n"),
        "generation": ("train_batch_size", "rollout.n"),
        "group": ("rollout.n",),
        "passes": ("ppo_epochs",),
    },
    "slime": {
        "micro": ("micro_batch_size",),
        "global": ("global_batch_size",),
        "accumulation": ("gradient_accumulation_steps",),  # which nobody can type there
        "generation": ("rollout_batch_size", "n_samples_per_prompt"),
        "group": ("n_samples_per_prompt",),
        "passes": (),  # one pass over a rollout, always
    },
    "cs336": {
        "micro": ("micro_train_batch_size",),
        "global": ("train_batch_size",),
        "accumulation": ("gradient_accumulation_steps",),
        "generation": ("rollout_batch_size",),
        "group": ("group_size",),
        "passes": ("epochs_per_rollout_batch",),
    },
}
