"""slime's names that change nothing here, by what they are about; and Megatron-LM's that describe the model, whose config.json says it."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_grpo.compat.features import FILES, KERNELS, LOADING, LOGS, MEMORY
from megatron_grpo.config.foreign import Foreign, aside, not_there

PLUGINS = (
    *("custom_generate_function_path", "rollout_sample_hook_path", "custom_rollout_log_function_path", "buffer_filter_path"),
    *("custom_eval_rollout_log_function_path", "rollout_data_postprocess_path", "custom_loss_function_path"),
    *("custom_advantage_function_path", "custom_tis_function_path", "custom_pg_loss_reducer_function_path"),
    *("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path", "rollout_sample_filter_path"),
    *("rollout_all_samples_process_path", "custom_megatron_init_path", "custom_megatron_before_log_prob_hook_path"),
    *("custom_megatron_before_train_step_hook_path", "custom_model_provider_path", "custom_update_weight_post_write_path"),
)

NAMES: Mapping[str, Foreign] = {
    **aside(
        *("swiglu", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention", "num_query_groups"),
        *("use_rotary_position_embeddings", "disable_bias_linear", "normalization", "norm_epsilon", "rotary_base", "vocab_size"),
        *("kv_channels", "qk_layernorm", "untie_embeddings_and_output_weights", "position_embedding_type", "rotary_percent"),
        *("num_experts", "moe_router_topk", "moe_router_score_function", "moe_layer_freq", "moe_ffn_hidden_size"),
        *("moe_shared_expert_intermediate_size", "moe_router_pre_softmax", "moe_router_enable_expert_bias", "add_qkv_bias"),
        *("moe_router_bias_update_rate", "moe_router_topk_scaling_factor", "v_head_dim", "rotary_scaling_factor", "qk_pos_emb_head_dim"),
        *("qk_head_dim", "multi_latent_attention", "kv_lora_rank", "q_lora_rank", "use_gated_attention", "attention_output_gate"),
        *("apply_layernorm_1p", "max_position_embeddings", "mscale", "mscale_all_dim", "moe_router_num_groups", "moe_router_group_topk"),
        *("use_rope_scaling", "no_position_embedding", "rotary_interleaved", "post_self_attn_layernorm", "post_mlp_layernorm"),
        *("moe_shared_expert_gate", "spec", "seq_length", "padded_vocab_size", "model_name", "tokenizer_model", "tokenizer_type"),
        why="the model's own config.json says it",
    ),
    **aside(
        *("attention_backend", "moe_grouped_gemm", "moe_router_dtype", "no_rope_fusion"),
        *("no_masked_softmax_fusion", "no_gradient_accumulation_fusion", "enable_experimental", "deterministic_mode", "qwen_gdn_backend"),
        *("moe_token_drop_policy", "recompute_loss_function", "no_check_for_nan_in_loss_and_grad"),
        *("log_probs_max_tokens_per_gpu", "data_pad_size_multiplier"),
        why=KERNELS,
    ),
    **aside("overlap_cpu_optimizer_d2h_h2d", "use_distributed_post", why=MEMORY),
    **aside(
        *("num_gpus_per_node", "distributed_backend", "http_proxy", "runtime_env_json", "address", "working_dir", "prefill_num_servers"),
        *("use_fault_tolerance", "rollout_health_check_interval", "rollout_health_check_timeout", "rollout_health_check_first_wait"),
        *("rollout_data_transport", "rollout_buffer_url", "fetch_trajectory_retry_times", "min_batch_collection_ratio"),
        *("update_weight_mode", "update_weight_transport", "update_weight_disk_dir", "update_weight_disk_keep_files"),
        *(
            "update_weight_delta_encoding",
            "update_weight_delta_checksum",
            "update_weight_local_checkpoint_dir",
            "check_weight_update_equal",
        ),
        why="how its program is started and how weights travel; here each push is whole, and checked by log-probs",
    ),
    **aside("metadata_key", "tool_key", "rollout_task_type", "loss_mask_type", "skip_eval_before_train", why=LOADING),
    **aside("no_save_optim", "no_save_rng", "save_hf", why=FILES),
    **aside(
        *("wandb_mode", "wandb_dir", "wandb_host", "wandb_team", "wandb_group", "disable_wandb_random_suffix"),
        *("wandb_always_use_train_step", "wandb_run_id", "tb_project_name", "tb_experiment_name", "log_multi_turn"),
        *("log_passrate", "log_reward_category", "log_correct_samples", "use_rollout_entropy", "get_mismatch_metrics"),
        *("save_debug_rollout_data", "load_debug_rollout_data_subsample", "save_debug_train_data", "dump_details"),
        *("memory_snapshot_dir", "memory_snapshot_num_steps", "profile_target", "memory_recorder", "record_memory_history"),
        why=LOGS + "; report_to says where metrics go",
    ),
    **aside("wandb_key", why="it is a secret: the environment variable WANDB_API_KEY holds it"),
    **aside("gamma", "lambd", why="it does nothing without advantage_estimator ppo, which is refused"),
    **aside("mtp_loss_scaling_factor", why="it does nothing without mtp_num_layers, which is refused"),
    **aside(
        *("ci_test", "ci_disable_kl_checker", "ci_train_rollout_logprob_abs_diff_threshold", "ci_save_grad_norm", "ci_load_grad_norm"),
        why="checks of its own tests",
    ),
    **not_there(
        "parts of its program alone; `rehearse` tries a run here, and `eval` samples without training",
        *("debug_rollout_only", "debug_train_only", "load_debug_rollout_data", "load_forge_rollout_data"),
    ),
}

PATTERNS: Mapping[str, Foreign] = {
    "sglang_*": Foreign(why="it is SGLang's own, and vLLM samples here"),
    "router_*": Foreign(why="it is SGLang's own, and vLLM samples here"),
    "megatron_deepgemm_*": Foreign(why=KERNELS),
}
