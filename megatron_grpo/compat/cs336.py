"""The sizes of Stanford's CS336 assignment on GRPO. There is no program behind it, so there are no other names and no defaults to take."""

from megatron_grpo.compat.vocabulary import NATIVE_SIZES, size, sizes
from megatron_grpo.config.foreign import Dialect, same

_NAMES = {
    "n_grpo_steps": same("max_steps"),
    "sampling_temperature": same("temperature"),
    "sampling_max_tokens": same("max_completion_length"),
    "cliprange": same("epsilon"),
    "gpu_memory_utilization": same("vllm_gpu_memory_utilization"),
    "use_std_normalization": same("scale_rewards", {"true": "group", "false": "none"}),
}

CS336 = Dialect(
    name="cs336",
    title="CS336",
    hides=NATIVE_SIZES,
    names=_NAMES,
    settings=sizes(
        size("train_batch_size", None, "completions in one optimizer step"),
        size("micro_train_batch_size", None, "completions in one forward on one DP rank"),
        size("gradient_accumulation_steps", None, "micro-steps in one optimizer step"),
        size("rollout_batch_size", None, "completions in one rollout (default train_batch_size)"),
        size("group_size", 8, "completions per prompt"),
        size("epochs_per_rollout_batch", 1, "passes over one rollout"),
    ),
)
