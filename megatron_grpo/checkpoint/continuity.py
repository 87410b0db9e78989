"""What may change between a checkpoint and the run that continues it: a verdict for every setting. No torch.

refused    the checkpoint cannot be continued with another value
between    may change where no rollout is under way, and is said; refused where rows wait that were sampled with the old value
said       may change; printed once, as a difference, for the run is another one from here on, or is cut for ranks in another way
free       changes where and how fast the same is computed, or what is written beside it; nothing is said

What a setting only names (a model, a data set, a reward file) is compared by its content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_grpo.base.errors import Problem
from megatron_grpo.checkpoint.manifest import Manifest, Origin

_TABLE = {
    "refused": """
        torch_dtype seed dataset_shuffle dataset_drop_last streaming shuffle_buffer_size sync_ref_model use_distributed_optimizer
        tuner_type lora_rank lora_alpha use_rslora lora_dtype target_modules target_regex exclude_modules rank_pattern alpha_pattern
        freeze_llm freeze_vit freeze_aligner
        freeze_parameters freeze_parameters_regex trainable_parameters trainable_parameters_regex
    """,
    "between": """
        generation_batch_size global_batch_size num_generations num_iterations old_logprobs temperature router_replay_mode
        min_pixels max_pixels
    """,
    "said": """
        fp8_format fp8_recipe
        model trust_remote_code
        transformer_impl share_prompts moe_aux_loss_coeff moe_z_loss_coeff lora_dropout adapters ref_adapters vllm_enable_lora
        dataset further_datasets interleave_prob stopping_strategy columns split_dataset_ratio
        dataset_split max_prompt_length truncation_strategy system enable_thinking chat_template_kwargs generation_kwargs
        vllm_structured_outputs_regex
        vllm_mode same_bits async_rollout_depth max_completion_length top_p top_k min_p stop stop_token_ids vllm_dtype
        environment tools max_turns turn_history turn_discount environment_timeout max_failed_episodes tool_call_parser
        reward_funcs reward_weights reward_timeout reward_on_error answer_column accuracy_exact math_timeout format_tags length_target
        cosine_min_len_value_wrong cosine_max_len_value_wrong cosine_min_len_value_correct cosine_max_len_value_correct cosine_max_len
        repetition_n_grams repetition_max_penalty code_timeout code_memory_mb code_all_or_nothing reward_model reward_model_url
        reward_model_max_length llm_judge_url llm_judge_model llm_judge_prompt llm_judge_max_score llm_judge_max_tokens
        loss_type epsilon epsilon_high delta importance_sampling_level sapo_temperature_pos sapo_temperature_neg beta kl_estimator
        vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg fipo_decay_rate fipo_clip_range fipo_clip_high_only fipo_safety_threshold
        real_tau
        use_bias_correction_kl kl_in_reward entropy_coef use_adaptive_entropy
        entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
        top_entropy_quantile advantage_estimator scale_rewards
        multi_objective_aggregation overlong_filter exclude_dead_groups dynamic_sample max_resample_times oversample_ratio
        rollout_importance_sampling_mode rollout_importance_sampling_threshold rollout_importance_sampling_min rollout_is_geometric
        off_policy_sequence_mask_delta ref_model_sync_steps ref_model_mixup_alpha soft_max_length soft_cache_length
        lr vit_lr aligner_lr min_lr lr_decay_style lr_decay_iters lr_wsd_decay_iters lr_wsd_decay_style lr_warmup_iters
        lr_warmup_fraction lr_warmup_init weight_decay weight_decay_incr_style start_weight_decay end_weight_decay
        adam_beta1 adam_beta2 adam_eps clip_grad
        use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype
        skip_grad_norm_above skip_grad_norm_factor max_skipped_steps
        max_steps num_train_epochs eval_dataset eval_datasets eval_num_prompts eval_reward num_generations_eval eval_temperature
        eval_pass_threshold eval_seed rollout_func eval_top_p eval_top_k eval_min_p eval_max_completion_length eval_generation_kwargs
        vllm_engine_kwargs megatron_extra_kwargs ref_model cast_lm_head_to_fp32 mcore_model
        teacher_model teacher_model_server teacher_kl_coef
        world_size tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split pipeline_model_parallel_layout
        microbatch_group_size_per_vp_stage decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
        context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel
    """,
    "free": """
        bf16 async_generate stop_drain_seconds stop_after_minutes stop_before_end_seconds requeue merge_lora
        padded_vocab_multiple recompute_granularity recompute_method recompute_num_layers recompute_modules vit_gradient_checkpointing
        logprob_chunk_size pad_to_multiple_of
        moe_token_dispatcher_type
        distributed_timeout_minutes rank_heartbeat_timeout
        cp_comm_type moe_permute_fusion moe_shared_expert_overlap moe_enable_deepep
        micro_batch_size gradient_accumulation_steps steps_per_generation allow_unaligned_generation max_tokens_per_micro_batch
        vllm_tensor_parallel_size vllm_gpu_memory_utilization vllm_kv_cache_memory_mb vllm_max_model_len vllm_max_num_seqs
        vllm_enforce_eager vllm_enable_prefix_caching sleep_level logp_difference_warn verify_weight_push
        weight_sync_bucket_mb vllm_server_host vllm_server_port vllm_server_base_url vllm_server_timeout vllm_server_ca
        vllm_server_token_file offload_model offload_optimizer code_num_workers code_without_landlock
        reward_model_batch_size reward_concurrency max_environment_concurrency llm_judge_api_key_env log_entropy
        overlap_grad_reduce overlap_param_gather optimizer_cpu_offload optimizer_offload_fraction save_interval_seconds
        record_rows
        audit audit_steps audit_action capsules capsule_weights_gb
        output_dir save_steps save_total_limit async_save resume report_to logging_steps max_shard_size
        metric_for_best_model greater_is_better load_best_model_at_end finetune no_load_optim no_load_rng
        log_completions_steps log_completions_nodes overwrite_output_dir
        export_hf eval_steps load_from_cache_file run_name project push_to_hub hub_model_id hub_private_repo
        plan_rollouts num_prompts gpu_memory_gb lengths json png dialect
        rollout_func_timeout data_root limit_images offload_teacher_model
        host port vllm_data_parallel_size address_file token_file ssl_certfile ssl_keyfile metrics frozen
    """,
}  # bf16 is another spelling of torch_dtype, async_generate of async_rollout_depth. Of the sizes, those are compared that decide which
# rows a step trains.
VERDICTS: Mapping[str, str] = {name: verdict for verdict, names in _TABLE.items() for name in names.split()}
# Content -> the setting that names it. Another content is refused; of everything that is not here it is said.
FLAGS = {"model": "model", "vocabulary": "model", "data set": "dataset", "adapters": "adapters", "ref_adapters": "ref_adapters",
         "ref_model": "ref_model", "mcore_model": "mcore_model"}  # fmt: skip
CONTENT: Mapping[str, str] = dict.fromkeys(FLAGS, "refused")
_OTHER_MATRICES = "a checkpoint holds what trains, and that would be something else"
FREEZING = (
    "freeze_llm",
    "freeze_vit",
    "freeze_aligner",
    "freeze_parameters",
    "freeze_parameters_regex",
    "trainable_parameters",
    "trainable_parameters_regex",
)
_WHY = {
    "torch_dtype": "the weights and moments of one are not those of the other",
    "use_distributed_optimizer": "the moments are described in another way",
    **dict.fromkeys(
        ("seed", "dataset_shuffle", "dataset_drop_last", "streaming", "shuffle_buffer_size"),
        "the prompts that are left would come in another order",
    ),
    "sync_ref_model": "only a run whose reference moves keeps it in its checkpoints",
    "beta": "only a run whose reference moves keeps it in its checkpoints",
    "model": "the weights, and the reference that the KL is measured against, would be of two models",
    **dict.fromkeys(("tuner_type", "lora_rank", "target_modules", "target_regex", "exclude_modules", "rank_pattern"), _OTHER_MATRICES),
    **dict.fromkeys(("lora_alpha", "use_rslora", "alpha_pattern"), "the same matrices would be another adapter"),
    **dict.fromkeys(FREEZING, "what was frozen has no moments in it, and what trains has no other place"),
    "lora_dtype": "the weights and moments of one are not those of the other",
    "adapters": "ranks, alphas and targets come from that file, and so does the reference of the KL",
    "ref_adapters": "the KL would be measured against another model",
    "mcore_model": "the KL is measured against the weights that the run began with",
    "ref_model": "the KL would be measured against another model",
    "vocabulary": "the same token ids would be other words",
    "data set": "the prompts that are left would be other ones",
}
_OF_THE_REFERENCE = ("sync_ref_model", "beta")  # between two values that agree in `_keeps_reference` they are only said
NEW_RUN = "or begin a new run in another --output_dir"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A setting or a content that is not what it was. `verdict` as in the table."""

    name: str
    was: Any
    now: Any
    verdict: str

    def __str__(self) -> str:
        return f"{self.name}  {_plain(self.was)} -> {_plain(self.now)}"


def changes_since(before: Origin, now: Origin) -> list[Difference]:
    """All that differs and is not free. What either side does not know is not compared."""
    return [*_settings(before, now), *_contents(before, now)]


def _settings(before: Origin, now: Origin) -> Iterator[Difference]:
    # Sizes are compared as they were worked out: a run may have typed the same ones in other words.
    was, are = {**before.settings, **before.sizes}, {**now.settings, **now.sizes}
    for name, value in are.items():
        verdict = VERDICTS.get(name, "said")
        if name in _OF_THE_REFERENCE:
            verdict = "refused" if _keeps_reference(was) != _keeps_reference(are) else "said"
        if name == "mcore_model" and are.get("beta") and not _keeps_reference(are):
            verdict = "refused" if not (value and was.get(name)) else "said"  # two that are given are compared by their content
        if name in was and was[name] != value and verdict != "free":
            yield Difference(name=name, was=was[name], now=value, verdict=verdict)
    if are:
        for name in was.keys() - are.keys() - VERDICTS.keys():  # a setting of the version that wrote it
            yield Difference(name=name, was=was[name], now="(unknown here)", verdict="said")


def _keeps_reference(settings: Mapping[str, Any]) -> bool:
    """A reference that moves is part of a checkpoint; any other is the model that the run began with."""
    return bool(settings.get("sync_ref_model") and settings.get("beta"))


def _contents(before: Origin, now: Origin) -> Iterator[Difference]:
    for name, value in now.content.items():
        if before.content.get(name, value) != value:
            yield Difference(name=name, was=before.content[name], now=value, verdict=CONTENT.get(name, "said"))


def problems_of(changes: list[Difference], manifest: Manifest, *, is_between_rollouts: bool, typed: Mapping[str, str]) -> list[Problem]:
    """The changes that this checkpoint cannot be continued with, in the user's names. is_between_rollouts: in the sizes of this run."""
    problems = [_refusal(change, manifest, typed) for change in changes if change.verdict == "refused"]
    sizes = [change for change in changes if change.verdict == "between" and change.name in manifest.origin.sizes]
    others = [change for change in changes if change.verdict == "between" and change not in sizes]
    stuck = [*(others if manifest.num_pending else []), *(sizes if manifest.num_pending or not is_between_rollouts else [])]
    if stuck:
        pending, step = manifest.num_pending, manifest.step
        uneven = f"{manifest.progress.num_rollouts} rollouts are not {step} optimizer steps with them"
        why = f"{pending} of its samples are still to be trained" if pending else uneven
        names = [typed.get(change.name, change.name) for change in stuck]
        told = ", ".join(f"{name} was {_plain(change.was)} and is {_plain(change.now)}" for name, change in zip(names, stuck))
        what = "sizes" if not set(stuck) & set(others) else "values"
        problems.append(Problem(
            flags=(*names, "resume"), nearest={name: [change.was] for name, change in zip(names, stuck)},
            message=f"{told}, and {manifest.directory} cannot be continued with other {what}: {why}. Resume with the old ones, "
                    "or begin a new run from its weights (--model OLD_OUTPUT_DIR/hf, another --output_dir)."))  # fmt: skip
    return problems


def _refusal(change: Difference, manifest: Manifest, typed: Mapping[str, str]) -> Problem:
    setting = FLAGS.get(change.name, change.name)
    name = typed.get(setting, setting)
    if change.name in CONTENT:
        told, use = f"The {change.name} ({change.now}) is not the one of {manifest.directory} ({change.was})", f"Restore it (--{name})"
        nearest = {}
    else:
        told = f"{name} is {_plain(change.now)}, and was {_plain(change.was)} for {manifest.directory}"
        use, nearest = f"Use {name} {_plain(change.was)}", {name: [change.was]}
    why = _WHY.get(change.name, "")
    return Problem(flags=(name, "resume"), message=f"{told}: {why}. {use}, {NEW_RUN}.", nearest=nearest)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "(none)"
    return "none" if value is None else str(value) or '""'
