"""slime: the flags of its train.py, which are its own, Megatron-LM's, and SGLang's behind `--sglang-`.

Source: slime/utils/arguments.py, and what its schedule (dp_schedule.py), its loss and its RolloutManager do with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_grpo.compat import features, slime_aside, slime_teacher
from megatron_grpo.compat.slime_settle import PLUGIN, SETTLE
from megatron_grpo.compat.vocabulary import DISPATCHER, NATIVE_SIZES, Given, is_true, own_rewards, size, sizes, together, whole
from megatron_grpo.config.foreign import Default, Dialect, Foreign, default, kept, lacks, not_there, only, only_task, reads, same
from megatron_grpo.config.table import BadValue


def _ranks(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    return {"world_size": whole(given, "actor_num_nodes", 1) * whole(given, "actor_num_gpus_per_node", 8)}


def _whole_files(words: Sequence[str]) -> None:
    if parts := [word for word in words if re.search(r"@\[.*\]$", word)]:
        raise BadValue(f"({' '.join(parts)}) takes a part of a file; rows of files are used whole. Write that part to a file of its own")


def _prompts(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    _whole_files(words)
    return {"dataset": list(words)}


def _seed(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    return {} if "seed" in given else {"seed": list(words)}


def _offload(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    return {} if words[0].lower() == "false" else {"offload_model": "true", "sleep_level": 2}


def _held_out(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """A name and a path each; one word alone is a path."""
    _whole_files(words)
    if len(words) == 1:
        return {"eval_dataset": words[0]}
    if len(words) % 2:
        raise BadValue(f"({' '.join(words)}) needs a name and a path for each set")
    return {"eval_datasets": dict(zip(words[::2], words[1::2]))}


def _judge(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """Its `math` compares what stands in \\boxed{} with the label, as the built-in one does; its others are not there."""
    if given.get("reward_funcs"):
        return {}
    if list(words) == ["math"]:
        return {"reward_funcs": ["math"]}
    return own_rewards("a judge of slime")(words, given)


def _services(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    found = [name for name in ("wandb", "tensorboard") if is_true(given, f"use_{name}", "false")]
    return {"report_to": found} if found else {}


def _column(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    return {} if list(words) in (["prompt"], ["messages"]) else {"columns": {words[0]: "prompt"}}


def _pictures(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    try:
        found = dict(json.loads(" ".join(words)))
    except ValueError:
        raise BadValue(f'needs a mapping as JSON, such as {{"image": "images"}}, not {" ".join(words)!r}') from None
    if others := [kind for kind in found if kind != "image"]:
        raise BadValue(f"({', '.join(others)}): of what models see and hear pictures alone are there")
    return {} if found.get("image", "images") == "images" else {"columns": {found["image"]: "images"}}


def _environment(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    if re.search(r"OPEN_TRAINING_INT4_FAKE_QAT_FLAG\W+1", " ".join(words)):
        raise BadValue(f"sets OPEN_TRAINING_INT4_FAKE_QAT_FLAG, with which slime trains as if weights were INT4: {features.QUANTIZED}")
    return {}


def _switch(native: str, value: Any) -> Foreign:
    def read(words: Sequence[str], given: Given) -> Mapping[str, Any]:
        return {native: value} if words[0].lower() != "false" else {}

    return reads(read, f"`{native}` {value}")


_LOSS = together("`loss_type`, `importance_sampling_level` and `advantage_estimator`, of all names of the loss")
_BELOW = together("`beta` and `kl_estimator`, of all names of the KL")
_CORRECT = together("`rollout_importance_sampling_mode` token_truncate with its bounds, of all three names")
_PACKED = together("`max_tokens_per_micro_batch`, which is `max_tokens_per_gpu` times `context_parallel_size`")

NAMES: Mapping[str, Foreign] = {
    "moe_token_dispatcher_type": DISPATCHER,
    "hf_checkpoint": same("model"),
    "save": same("output_dir"),
    "save_interval": same("save_steps"),
    "use_wandb": reads(_services, "`report_to` wandb"),
    "use_tensorboard": reads(_services, "`report_to` tensorboard"),
    "load": Foreign(why="weights are read from hf_checkpoint, and a run goes on from the checkpoints in its output_dir"),
    "ref_load": Foreign(why="the reference is the model as it was at the start; nothing has to be converted before"),
    "actor_num_nodes": reads(_ranks, "`world_size`, which is nodes times GPUs"),
    "actor_num_gpus_per_node": reads(_ranks, "`world_size`, which is nodes times GPUs"),
    "colocate": together("a note where it is left out: engines beside the ranks are `vllm_mode` server"),
    "rollout_num_gpus": together("a note: engines beside the ranks are `vllm_mode` server and `megatron-grpo serve`"),
    "rollout_num_gpus_per_engine": same("vllm_tensor_parallel_size"),
    "offload": reads(_offload, "`offload_model` true and `sleep_level` 2"),
    "offload_train": _switch("offload_model", "true"),
    "no_offload_train": _switch("offload_model", "false"),
    "offload_rollout": _switch("sleep_level", 2),
    "no_offload_rollout": _switch("sleep_level", 0),
    "sglang_mem_fraction_static": same("vllm_gpu_memory_utilization"),
    "sglang_max_running_requests": same("vllm_max_num_seqs"),
    "sglang_context_length": same("vllm_max_model_len"),
    # Data.
    "prompt_data": reads(_prompts, "`dataset`; a part of a file, path@[0:16], is refused"),
    "input_key": reads(_column, "`columns`, where it is neither prompt nor messages"),
    "label_key": same("answer_column"),
    "rollout_shuffle": same("dataset_shuffle"),
    "rollout_seed": reads(_seed, "`seed`, which is of prompts, sampling and all else, where seed is left out"),
    "rollout_max_prompt_len": same("max_prompt_length"),
    "apply_chat_template": together("a note: chat prompts are written by the template here, and a string prompt is taken as it stands"),
    "apply_chat_template_kwargs": same("chat_template_kwargs"),
    "multimodal_keys": reads(
        _pictures, "`columns`, where pictures are not in images, and `freeze_vit` and `freeze_aligner` false; only image is there"
    ),
    "train_env_vars": reads(_environment, "variables of its ranks: quantisation in training is refused"),
    "$RUNTIME_ENV_JSON": reads(_environment, "variables of its ranks: quantisation in training is refused"),
    "eval_prompt_data": reads(_held_out, "`eval_dataset`; of several with names, `eval_datasets`"),
    "eval_interval": same("eval_steps"),
    "eval_config": lacks("held-out sets are named by eval_datasets"),
    "n_samples_per_eval_prompt": same("num_generations_eval"),
    "eval_temperature": same("eval_temperature"),
    "eval_top_k": same("eval_top_k", {"-1": "0"}),
    "eval_max_response_len": same("eval_max_completion_length"),
    "eval_min_new_tokens": lacks(features.EVAL_SAMPLING),
    **not_there("max_prompt_length and vllm_max_model_len bound held-out prompts too", "eval_max_prompt_len", "eval_max_context_len"),
    **not_there("columns and answer_column name the columns of all sets alike", "eval_input_key", "eval_label_key", "eval_tool_key"),
    "num_rollout": same("max_steps"),
    "num_epoch": same("num_train_epochs"),
    "start_rollout_id": lacks("a run goes on from its checkpoint, which knows where it was", "0"),
    "num_steps_per_rollout": together("`steps_per_generation`: global_batch_size is rollout_batch_size x n_samples_per_prompt / it"),
    # Sampling.
    "rollout_temperature": same("temperature"),
    "rollout_top_p": same("top_p"),
    "rollout_top_k": same("top_k", {"-1": "0"}),
    "rollout_max_response_len": same("max_completion_length"),
    "rollout_max_context_len": same("vllm_max_model_len"),
    "rollout_stop": same("stop"),
    "rollout_stop_token_ids": same("stop_token_ids"),
    "rollout_skip_special_tokens": Foreign(why="rewards are given the text without special tokens, and completion_ids with them"),
    "update_weight_buffer_size": reads(
        lambda words, given: {"weight_sync_bucket_mb": max(1, int(words[0]) >> 20)}, "`weight_sync_bucket_mb`, in MiB"
    ),
    "update_weights_interval": lacks(features.AHEAD, "1"),
    "over_sampling_batch_size": together("`oversample_ratio`, which is it over rollout_batch_size"),
    "dynamic_sampling_filter_path": together("`dynamic_sample`, where it is check_reward_nonzero_std; others are refused"),
    "partial_rollout": lacks(features.AHEAD),
    "mask_offpolicy_in_partial_rollout": lacks(features.AHEAD),
    "rollout_external_engine_addrs": lacks(features.SERVER),
    "keep_old_actor": lacks("old log-probs are those of the weights that sampled"),
    "release_train": lacks("ranks stay; offload_model and offload_optimizer make room while vLLM samples"),
    # The mathematics.
    "advantage_estimator": _LOSS,
    "calculate_per_token_loss": _LOSS,
    "eps_clip": same("epsilon"),
    "eps_clip_high": _LOSS,
    "eps_clip_c": same("delta"),
    "entropy_coef": same("entropy_coef"),
    "use_kl_loss": _BELOW,
    "kl_loss_coef": _BELOW,
    "kl_loss_type": _BELOW,
    "use_unbiased_kl": same("use_bias_correction_kl"),
    "kl_coef": lacks(
        "its grpo does not read it (get_grpo_returns); use_kl_loss and kl_loss_coef put a KL into the loss", "0", "0.0", "0.00"
    ),
    "ref_update_interval": lacks("the reference follows with sync_ref_model, by optimizer steps"),
    "disable_grpo_std_normalization": _switch("scale_rewards", "none"),
    "disable_rewards_normalization": lacks("advantages are normalised by advantage_estimator and scale_rewards"),
    "normalize_advantages": lacks("advantages are normalised by advantage_estimator and scale_rewards"),
    "disable_compute_advantages_and_returns": lacks(features.OTHER_TASK),
    "loss_type": only_task("policy_loss", features.OTHER_TASK),
    "use_rollout_logprobs": _switch("old_logprobs", "rollout"),
    "use_tis": _CORRECT,
    "tis_clip": _CORRECT,
    "tis_clip_low": _CORRECT,
    "use_opsm": together("`off_policy_sequence_mask_delta`, which is opsm_delta"),
    "opsm_delta": together("`off_policy_sequence_mask_delta`, where use_opsm is given"),
    "use_routing_replay": _switch("router_replay_mode", "R2"),
    "use_rollout_routing_replay": _switch("router_replay_mode", "R3"),
    **dict.fromkeys(slime_teacher.NAMES, together("`teacher_model` and `teacher_kl_coef`, of all names of the teacher")),
    **not_there(features.TEACHER, "opd_teacher_ckpt_step"),
    "value_clip": Foreign(why="there is no critic; what asks for one is advantage_estimator ppo"),
    # Batches, of which the sizes are a table of their own.
    "use_dynamic_batch_size": _PACKED,
    "max_tokens_per_gpu": _PACKED,
    "balance_data": Foreign(why="rows are dealt so that ranks have alike many tokens wherever a token budget packs them"),
    "balance_by_flops": Foreign(why="rows are dealt so that ranks have alike many tokens wherever a token budget packs them"),
    "log_probs_chunk_size": same("logprob_chunk_size", {"-1": "1024"}),
    # Rewards.
    "rm_type": reads(_judge, "`reward_funcs` math, where it is math; for others reward_funcs has to be given"),
    "custom_rm_path": reads(own_rewards("a function with slime's signature"), "nothing; reward_funcs has to be given"),
    "rm_url": reads(own_rewards("a judge of slime"), "nothing; reward_funcs has to be given"),
    **not_there("a reward is a number", "reward_key", "eval_reward_key"),
    **not_there("a reward function is given many completions at a time, groups whole or not", "group_rm"),
    # Megatron-LM's own.
    "optimizer": only("adam", features.OTHER_OPTIMIZER),
    "attention_dropout": lacks("models are trained without dropout", "0", "0.0"),
    "hidden_dropout": lacks("models are trained without dropout", "0", "0.0"),
    "accumulate_allreduce_grads_in_fp32": only("true", "main_grads_dtype says in which dtype gradients are summed"),
    "attention_softmax_in_fp32": only("true", "the softmax of attention is float32"),
    "num_virtual_stages_per_pipeline_rank": same("virtual_pipeline_model_parallel_size"),
    "num_layers_per_virtual_pipeline_stage": lacks("virtual_pipeline_model_parallel_size says how many chunks a stage has"),
    "moe_router_load_balancing_type": Foreign(why="it does nothing with moe_aux_loss_coeff 0, and other values are refused"),
    "mtp_num_layers": lacks(features.MTP, "0"),
    "enable_mtp_training": lacks(features.MTP),
    **not_there(features.QUANTIZED, "fp16", "sglang_kv_cache_dtype", "sglang_quantization"),
    "freeze_params_name_list": lacks("freeze_parameters_regex is compared with Hugging Face's names, these with Megatron's"),
    "only_train_params_name_list": lacks("trainable_parameters_regex is compared with Hugging Face's names, these with Megatron's"),
    "freeze_indexer": lacks(features.OTHER_MODEL),
    "allgather_cp": lacks("context parallelism is zigzag"),
    "use_stateless_adam": lacks(features.OTHER_OPTIMIZER),
    "reset_optimizer_states": lacks(features.OTHER_OPTIMIZER),
    "train_backend": only("megatron", features.SHARDED_ELSEWHERE),
    "ref_ckpt_step": lacks(features.RESUMED_ELSEWHERE),
    "num_critic_only_steps": lacks(features.CRITIC, "0"),
    "disable_rollout_global_dataset": lacks("prompts come from dataset"),
    **not_there(PLUGIN, *slime_aside.PLUGINS),
    "rollout_function_path": only("slime.rollout.sglang_rollout.generate_rollout", PLUGIN),
    "eval_function_path": lacks(PLUGIN),
    "data_source_path": only("slime.rollout.data_source.RolloutDataSourceWithBuffer", PLUGIN),
    "megatron_config_path": lacks("of several roles there is the actor alone; its settings are flags"),
    "custom_config_path": lacks("settings come from --config and the command line"),
    **slime_aside.NAMES,
}

DEFAULTS: Sequence[Default] = (
    default("actor_num_gpus_per_node", 8, world_size=8),
    default("rollout_shuffle", False, dataset_shuffle=False),
    default("lr_decay_style", "linear"),
    default("weight_decay", 0.01),
    default("adam_beta2", 0.999),
    default("use_bias_correction_kl", False),
    default("seed", 1234),
    Default(name="save_total_limit", theirs="all", native={"save_total_limit": None}),
    kept("colocate", False, "vllm_mode colocate"),
)


SLIME = Dialect(
    name="slime",
    title="slime",
    hides=[name for name in NATIVE_SIZES if name not in ("global_batch_size", "micro_batch_size")],
    names=NAMES,
    patterns=slime_aside.PATTERNS,
    defaults=DEFAULTS,
    settle=SETTLE,
    trains_tower=True,
    settings=sizes(
        size("rollout_batch_size", None, "prompts in one rollout"),
        size("n_samples_per_prompt", 1, "completions per prompt"),
        size("global_batch_size", None, "completions in one optimizer step"),
        size("micro_batch_size", 1, "completions in one forward on one DP rank"),
    ),
)
