"""ms-swift without Megatron: `swift rlhf --rlhf_type grpo`. Sizes and schedule are TRL's; rewards, data and adapters Megatron-SWIFT's.

Source: its RLHFArguments, GRPOArgumentsMixin and GRPOConfig.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_grpo.compat import features, swift, trl
from megatron_grpo.compat.swift_settle import adapter, of_both
from megatron_grpo.compat.vocabulary import NATIVE_SIZES, TOKEN, Given, drops_last, size, sizes, text_of, together
from megatron_grpo.config.foreign import OFF, Change, Default, Dialect, Foreign, aside, default, lacks, not_there, same
from megatron_grpo.config.table import BadValue

_DEEPSPEED = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
_SELF_DISTILLED = "distillation of a model into itself, by a column teacher_prompt, is not there"

NAMES: Mapping[str, Foreign] = {
    **trl.NAMES,
    **swift.NAMES,
    **{name: trl.NAMES[name] for name in ("save_strategy", "scale_rewards")},
    "deepspeed": together("a note: a rank holds the weights whole but for `tensor_model_parallel_size` and others; files are refused"),
    **dict.fromkeys(("max_new_tokens", "response_length"), same("max_completion_length")),
    "eval_dataset": lacks("its evaluation by EvalScope is not there; val_dataset names held-out prompts"),
    "vllm_speculative_config": lacks(features.SPECULATES),
    "early_stop_interval": lacks("a run is as long as max_steps or num_train_epochs say"),
    "advantage_reweight": lacks(_SELF_DISTILLED),
    "sdar_loss_coef": lacks(_SELF_DISTILLED, "0", "0.0"),
    "chord_sft_dataset": lacks("a supervised loss beside GRPO's (CHORD) is not there"),
    "swanlab_token": TOKEN,
    **not_there("engines are split by tensor parallelism alone", "vllm_enable_expert_parallel"),
    "vllm_pipeline_parallel_size": lacks("engines are split by tensor parallelism alone", "1"),
    **not_there(features.SHARDED_ELSEWHERE, "deepspeed_autotp_size", "zero_hpz_partition_size"),
    **not_there(features.RESUMED_ELSEWHERE, "resume_only_model"),
    **aside("use_logits_to_keep", "enable_flattened_weight_sync", "teacher_deepspeed", "safe_serialization", why=features.MEMORY),
    **aside("vllm_use_async_engine", "vllm_disable_custom_all_reduce", "vllm_max_lora_rank", why=features.KERNELS),
}
PATTERNS: Mapping[str, Foreign] = {
    **trl.TRL.patterns,
    **{name: Foreign(why="it does nothing without what is refused") for name in ("chord_*", "rlsd_*")},
    "swanlab_*": Foreign(why=features.LOGS),
}

_OF_MEGATRON = ("lr_decay_style", "recompute_granularity", "fp8_recipe")
_OF_TRL = ("gradient_checkpointing", "num_train_epochs", "use_vllm")
DEFAULTS: Sequence[Default] = (
    *(row for row in swift.DEFAULTS if row.name not in _OF_MEGATRON),
    *(row for row in trl.DEFAULTS if row.name in _OF_TRL),
    default("lr_scheduler_type", "cosine", lr_decay_style="cosine"),
)


def _settle(values: Mapping[str, Any], given: Given) -> Iterator[Change]:
    """What ms-swift makes of several names together, besides what both of its trainers do."""
    kind = text_of(given, "deepspeed", "none")
    if kind not in (*_DEEPSPEED, *OFF):
        raise BadValue(f"deepspeed ({kind}) is a file that is not read: {features.SHARDED_ELSEWHERE}. There are: {', '.join(_DEEPSPEED)}")
    if kind not in ("zero0", *OFF):
        note = f"deepspeed {kind}: optimizer state is sharded here (use_distributed_optimizer, optimizer_cpu_offload for the host), and a "
        yield Change(values={}, note=f"{note}rank holds weights whole but for tensor_model_parallel_size and its like.")
    if "tuner_type" not in values:
        yield Change(values={"tuner_type": "lora"}, untyped=("tuner_type", "lora"))
    if values.get("tuner_type", "lora") == "lora":
        yield from adapter(values)
    estimator = values.get("advantage_estimator", "grpo")
    if estimator != "grpo" and "kl_in_reward" not in values:
        yield Change(values={"kl_in_reward": True}, untyped=("kl_in_reward", f"true with {estimator}"))
    saves = text_of(given, "save_strategy", "steps").lower()
    if saves == "no":
        yield Change(values={"save_steps": 0}, note="save_strategy no: save_steps 0.")
    if text_of(given, "eval_strategy", saves).lower() == "no":
        yield Change(values={"eval_steps": None}, note="eval_strategy no: eval_steps 0.")
    yield from drops_last(values, title="ms-swift")


MS_SWIFT = Dialect(
    name="ms-swift",
    title="ms-swift",
    hides=NATIVE_SIZES,
    implies=trl.TRL.implies,
    names=NAMES,
    patterns=PATTERNS,
    defaults=DEFAULTS,
    settle=(*of_both("lora"), _settle, trl.lowest_lr),
    settings={**trl.TRL.settings, **sizes(size("per_device_train_batch_size", 1, "completions in one forward on one DP rank"))},
)
