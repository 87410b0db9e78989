"""Megatron-SWIFT: `megatron rlhf --rlhf_type grpo`. Sizes have the same names and meanings; much else does not.

Source: its MegatronArguments, RLHFMegatronArgumentsMixin and BaseArguments, and what its GRPO trainer does with them.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_grpo.base.files import read_text
from megatron_grpo.compat import aside, features, turns
from megatron_grpo.compat.swift_settle import SETTLE
from megatron_grpo.compat.vocabulary import BEST, BUILT_IN_REWARDS, DISPATCHER, TOKEN, Given
from megatron_grpo.config.foreign import OFF, Default, Dialect, Foreign, default, kept, lacks, not_there, only, only_task, reads, same
from megatron_grpo.config.table import BadValue

_REWARDS = {"accuracy": "math", "format": "format", "cosine": "cosine", "repetition": "repetition", "soft_overlong": "soft_overlong"}
_ONLY_OURS = tuple(name for name in BUILT_IN_REWARDS if name not in (*_REWARDS, "math"))  # its `math` is another one


def _of_plugins(given: Given) -> dict[str, str]:
    """path:Class of each reward that a plugin registers as `orms["name"] = Class`, by name. The files are read, not run."""
    found: dict[str, str] = {}
    for file in given.get("external_plugins", ()):
        with suppress(OSError, SyntaxError, ValueError):
            for line in ast.parse(read_text(file)).body:
                if isinstance(line, ast.Assign) and isinstance(line.value, ast.Name) and isinstance(of := line.targets[0], ast.Subscript):
                    found |= {str(ast.literal_eval(of.slice)): f"{file}:{line.value.id}"} if ast.unparse(of.value) == "orms" else {}
    return found


def _reward_funcs(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    of_plugins = _of_plugins(given)
    unread = [word for word in words if word not in (*_REWARDS, *_ONLY_OURS, *of_plugins) and ":" not in word]
    if unread:
        plugins = given.get("external_plugins", ())
        where = f"no file of external_plugins ({', '.join(plugins)}) that can be read here registers it as orms['{unread[0]}'] = Class. "
        raise BadValue(
            f"({', '.join(unread)}) is a reward function of Megatron-SWIFT or of a plugin of its own, and not there: "
            f"{where if plugins else ''}Name a function or a class as {(*plugins, 'path/to/file.py')[0]}:name; {', '.join(_REWARDS)} "
            "are translated"
        )
    return {"reward_funcs": [of_plugins.get(word, _REWARDS.get(word, word)) for word in words]}


def _plugins(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """Refused where nothing of it is used; what is named of it and not there has a sentence of its own."""
    others = [word for word in given.get("reward_funcs", ()) if word not in (*_REWARDS, *_ONLY_OURS)]
    if not others and not {"gym_env", "multi_turn_scheduler"} & set(given):
        raise BadValue(f"({' '.join(words)}): {features.PLUGINS}")
    return {}


def _dataset(native: str) -> Foreign:
    def read(words: Sequence[str], given: Given) -> Mapping[str, Any]:
        if len(words) != 1 and native != "dataset":
            raise BadValue(f"({' '.join(words)}) names {len(words)} data sets; give each a name in eval_datasets")
        names = [one if Path(one).exists() else one.removeprefix("hf::").removeprefix("HF::") for one in words]
        if strange := [one for one in names if ":" in one and not Path(one).exists() and not re.match(r"[^:/]+/[^:/]+:[^:/]+$", one)]:
            raise BadValue(f"({strange[0]}) names another hub; a file, a directory, or a Hub name (owner/name:subset) is taken here")
        return {native: names[0]} | ({"further_datasets": names[1:]} if names[1:] else {})

    return reads(read, f"the same names here, {native}, without a hub before `::`")


def _one_adapter(native: str) -> Foreign:
    def read(words: Sequence[str], given: Given) -> Mapping[str, Any]:
        if len(words) != 1:
            raise BadValue(f"({' '.join(words)}) names {len(words)} adapters; one is trained, and one is the reference")
        return {native: words[0]}

    return reads(read, native)


def _minutes(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    try:
        return {"distributed_timeout_minutes": float(words[0]) / 60}
    except (ValueError, IndexError):
        raise BadValue(f"needs seconds, not {' '.join(words)!r}") from None


def _columns(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """Its standard names on the right: query is what is asked; others are columns that rewards may read, under the same name."""
    text = " ".join(words).strip()
    try:
        found = json.loads(text) if text.startswith("{") else dict(word.rsplit("=", 1) for word in words)
    except ValueError:
        raise BadValue(f'needs a mapping as JSON, such as {{"question": "query"}}, not {text!r}') from None
    if "history" in found.values():
        raise BadValue("(history): earlier turns of a conversation stand in a column messages here")
    return {"columns": {theirs: "prompt" if name == "query" else name for theirs, name in found.items()}}


def _finetune(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    return {"finetune": list(words)} if given.get("mcore_model") else {}


NAMES: Mapping[str, Foreign] = {
    "moe_token_dispatcher_type": DISPATCHER,
    # The same under another name, or with other words for its values.
    "train_iters": same("max_steps"),
    "val_dataset": _dataset("eval_dataset"),
    "dataset": _dataset("dataset"),
    "max_length": same("max_prompt_length"),
    "truncation_strategy": Foreign(native="truncation_strategy"),
    "reward_funcs": reads(_reward_funcs, "reward_funcs"),
    "system": reads(lambda words, given: {"system": [" ".join(words).replace("\\n", "\n")]}, "`system`; \\n is a line break"),
    "top_k": same("top_k", {"-1": "0"}),
    "recompute_granularity": same("recompute_granularity"),
    "vllm_max_num_seqs": same("vllm_max_num_seqs"),
    "ddp_timeout": reads(_minutes, "distributed_timeout_minutes"),
    "rollout_importance_sampling_mode": same("rollout_importance_sampling_mode"),
    "val_dataset_shuffle": only("false", features.EVALUATION),
    # Asked for, and not there.
    "resume_from_checkpoint": lacks(features.RESUMED_ELSEWHERE),
    "rlhf_type": only_task("grpo", features.OTHER_TASK),
    "task_type": only_task("causal_lm", features.OTHER_TASK),
    "use_vllm": only("true", "sampling is by vLLM alone"),
    "use_ray": Foreign(lacks="Ray is not used: ranks are started by torchrun", off=OFF, is_task=True),
    "adapters": _one_adapter("adapters"),
    "ref_adapters": _one_adapter("ref_adapters"),
    "lora_bias": only("none", features.LORA_BIAS),
    "init_weights": only("true", features.LORA_START),
    "use_dora": lacks(features.DORA),
    "lorap_lr_ratio": lacks(features.ONE_LR),
    "finetune": reads(_finetune, "`finetune`, with `mcore_model`; it does nothing without"),
    "optimizer": only("adam", features.OTHER_OPTIMIZER),
    "freeze_parameters_ratio": lacks(features.FREEZE_RATIO, "0", "0.0"),
    "repetition_penalty": lacks(features.PENALTY, "1", "1.0"),
    "loss_scale": only("last_round", "the loss covers the completion, whole and alone", instead=("multi_turn_scheduler", "gym_env")),
    "calculate_per_token_loss": lacks("loss_type says what the loss is averaged over"),
    "moe_router_load_balancing_type": lacks("load-balancing losses depend on the layout"),
    "metric_for_best_model": BEST,
    "save_strategy": only("steps", features.EPOCH),
    "ddp_backend": only("nccl", "the backend follows from the machine"),
    "cp_partition_mode": only("zigzag", "context parallelism is zigzag here"),
    "columns": reads(_columns, "`columns`; its query is our prompt"),
    "$MAX_PIXELS": same("max_pixels"),  # set before the command
    "$MIN_PIXELS": same("min_pixels"),
    "vllm_limit_mm_per_prompt": lacks("limit_images says how many pictures a prompt may show; it is as many as the data have"),
    "template_backend": only("jinja", "prompts are written by the model's own chat template"),
    "use_chat_template": only("true", "chat prompts are written by the model's own chat template; a string prompt is taken as it stands"),
    "mtp_num_layers": lacks(features.MTP, "0"),
    "label_smoothing": lacks(features.OTHER_TASK, "0", "0.0"),
    **turns.SWIFT,
    "external_plugins": reads(_plugins, "reward_funcs path/to/file.py:function, environment path/to/file.py:Class"),
    "accumulate_allreduce_grads_in_fp32": only("true", "main_grads_dtype says in which dtype gradients are summed"),
    "attention_softmax_in_fp32": only("true", "the softmax of attention is float32 here"),
    **not_there(features.MODULES_TO_SAVE, "modules_to_save"),
    **not_there(features.LORA_TARGETS, "target_parameters"),
    **not_there("adapters of its own format are not read; give a directory in PEFT's as adapters", "mcore_adapter", "mcore_ref_adapter"),
    **not_there(
        features.OTHER_ADAPTERS,
        *("use_swift_lora", "adapter_act", "adapter_length", "reft_layer_key", "reft_layers", "reft_rank", "reft_intervention_type"),
        *("reft_args", "vera_rank", "vera_projection_prng_key", "vera_dropout", "vera_d_initial", "boft_block_size", "boft_block_num"),
        *("boft_dropout", "fourier_n_frequency", "fourier_scaling", "llamapro_num_new_blocks", "llamapro_num_groups"),
        *("adalora_target_r", "adalora_init_r", "adalora_tinit", "adalora_tfinal", "adalora_deltaT", "adalora_beta1", "adalora_beta2"),
        "adalora_orth_reg_weight",
    ),
    **not_there(
        features.LORA_START,
        *("lora_ga_batch_size", "lora_ga_iters", "lora_ga_max_length", "lora_ga_direction", "lora_ga_scale", "lora_ga_stable_gamma"),
    ),
    **not_there(
        features.SPARSE_UPDATES,
        *("lisa_activated_layers", "lisa_step_interval", "use_galore", "galore_target_modules", "galore_rank", "use_q_galore"),
        *("galore_update_proj_gap", "galore_scale", "galore_proj_type", "galore_optim_per_parameter", "galore_with_embedding"),
    ),
    "vllm_data_parallel_size": lacks(features.ENGINES, "1"),
    **not_there(features.IMAGES, *("vit_gradient_checkpointing_kwargs", "vit_attn_impl", "vllm_mm_processor_cache_gb", "norm_bbox")),
    **not_there(features.TEACHER, "teacher_model_type", "teacher_model_revision", "teacher_tag_key", "teacher_adapters"),
    **not_there(features.GKD, "gkd_logits_topk", "seq_kd", "lmbda", "sft_alpha"),
    **not_there(features.QUANTIZED, *("fp16", "fp8_param_gather", "fp4_format", "fp4_param_gather", "quant_method", "quant_bits")),
    **not_there(features.OTHER_LOSS, "rpo_alpha", "reference_free", "enable_dft_loss", "enable_channel_loss"),
    **not_there(features.DROPS_TOKENS, "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"),
    **not_there(features.PLUGINS, "custom_register_path", "callbacks", "reward_model_plugin", "custom_dataset_info"),
    **not_there(
        "a reward model is the reward function reward_model: reward_funcs reward_model, and reward_model its directory", "reward_model"
    ),
    **not_there(features.TOKENISED_ELSEWHERE, "cached_dataset", "cached_val_dataset"),
    **not_there(features.RESUMED_ELSEWHERE, "load_args"),
    **not_there(features.RESUMED_ELSEWHERE, "mcore_ref_model"),
    **not_there(features.VERSIONS, "model_revision", "rope_scaling", "new_special_tokens", "model_kwargs"),
    **not_there(features.VERSIONS, "perform_initialization", "init_strategy", "language_model_only"),
    **not_there("prompts are written by the model's own chat template", "template", "response_prefix", "preserve_thinking"),
    **not_there(features.SHARDED_ELSEWHERE, "use_megatron_fsdp", "deepspeed", "fsdp"),
    **not_there(features.OTHER_OPTIMIZER, "apply_wd_to_qk_layernorm"),
    "hub_token": TOKEN,
    "apply_query_key_layer_scaling": lacks("scores of attention are not scaled by the number of the layer"),
    "eval_iters": lacks("eval_num_prompts is the number of held-out prompts that are asked", "-1"),
    "tuner_backend": only("peft", features.OTHER_ADAPTERS),
    "add_non_thinking_prefix": only("true", "prompts are written by the model's own chat template"),
    "disable_ignore_empty_think": lacks("the loss covers the completion, whole and alone"),
    "disable_auto_column_mapping": lacks(features.COLUMNS),
    "load_data_args": lacks(features.RESUMED_ELSEWHERE),
    "moe_layer_recompute": lacks("recompute_granularity selective with recompute_modules moe does it"),
    "skip_megatron_init": lacks("it is for its Ray pipeline, and Ray is not used"),
    "mhc_recompute_layer_num": lacks(features.OTHER_MODEL),
    "use_fused_mhc": lacks(features.OTHER_MODEL),
    "csa_dense_mode": lacks(features.OTHER_MODEL),
    "linear_decoupled_in_proj": lacks(features.OTHER_MODEL),
    "apply_dsa_kernel_fusion": lacks(features.OTHER_MODEL),
    "dsa_indexer_loss_coeff": lacks(features.OTHER_MODEL, "0", "0.0"),
    "dsa_indexer_use_sparse_loss": lacks(features.OTHER_MODEL),
    "mtp_shared_weights": lacks(features.MTP),
    "mtp_decoder_input_detach": lacks(features.MTP),
    "stream": lacks(features.OTHER_TASK),
    "num_beams": lacks(features.SAMPLING, "1"),
    "structured_outputs_regex": same("vllm_structured_outputs_regex"),
    "data_parallel_sharding_strategy": lacks(features.SHARDED_ELSEWHERE, "optim_grads_params"),
    "sequence_parallel_size": lacks("sequences are cut by context_parallel_size", "1"),
    **aside.SWIFT,
}

DEFAULTS: Sequence[Default] = (
    default("beta", 0.04),
    default("lr", 1e-5),
    default("lr_decay_style", "cosine"),
    default("weight_decay", 0.1),
    default("temperature", 0.9),
    default("max_completion_length", 512),
    default("truncation_strategy", "left"),
    Default(name="use_bias_correction_kl", theirs="it has none", native={"use_bias_correction_kl": False}),
    default("recompute_granularity", "selective"),
    default("vllm_gpu_memory_utilization", 0.9),
    default("save_steps", 500),
    Default(name="save_total_limit", theirs="none", native={"save_total_limit": None}),
    kept("report_to", "tensorboard", "none"),
    kept("logging_steps", 5, 1),
    kept("offload_model", "false", "auto"),
    kept("offload_optimizer", "false", "auto"),
    kept("fp8_recipe", "delayed", "tensorwise"),
    kept("use_hf", "false (ModelScope's hub)", "true (Hugging Face's hub)"),
)


SWIFT = Dialect(name="swift-megatron", title="Megatron-SWIFT", names=NAMES, defaults=DEFAULTS, settle=SETTLE)
