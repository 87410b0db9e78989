"""Names of other systems that change nothing here, by what they are about: neither what is sampled nor what is trained depends on them."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_grpo.compat.features import FILES, KERNELS, LOADING, LOGS, MEMORY
from megatron_grpo.config.foreign import Foreign, aside

PORT = "the link takes any free port"
_QUANT = "it does nothing without quantised weights, which are refused"
_MUON = "it does nothing without optimizer muon or sgd, which are refused"
_OTHER_TASK = "it does nothing in GRPO, there as here"

SWIFT: Mapping[str, Foreign] = {
    **aside("vllm_server_group_port", why=PORT),
    **aside(
        *("attention_backend", "attn_impl", "experts_impl", "masked_softmax_fusion", "bias_dropout_fusion", "bias_activation_fusion"),
        *("apply_rope_fusion", "gradient_accumulation_fusion", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl"),
        *("moe_grouped_gemm", "moe_router_dtype"),
        *("overlap_p2p_comm", "batch_p2p_comm", "align_param_gather", "align_grad_reduce", "tp_comm_overlap", "nccl_comm_warmup"),
        *("overlap_param_gather_with_optimizer_step", "optimizer_cuda_graph"),
        *("deterministic_mode", "vllm_disable_cascade_attn", "enable_npu_model_patch"),
        why=KERNELS,
    ),
    **aside(
        *("manual_gc", "manual_gc_steps", "manual_gc_eval", "offload_bridge", "move_model_batches"),
        *("device_map", "max_memory"),
        why=MEMORY,
    ),
    **aside(
        *("padding_free", "mlp_padding_free", "packing", "packing_length", "packing_num_proc", "packing_strategy", "padding_side"),
        *("sequence_packing_scheduler", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataset_num_proc", "download_mode", "lazy_tokenize", "strict", "remove_unused_columns"),
        *("train_dataloader_shuffle", "data_sharding", "data_seed", "group_by_length"),
        why=LOADING,
    ),
    **aside(
        *(
            "te_rng_tracker",
            "data_parallel_random_init",
            "use_cpu_initialization",
            "check_model",
            "model_type",
            "local_repo_path",
            "use_hf",
        ),
        *("bridge_backend", "model_name", "model_author", "local_rank", "ignore_args_error", "ray_exp_name"),
        why="how the program and the model are set up: names, seeds of weights that are read, hubs",
    ),
    **aside(
        *("save_safetensors", "save_missing_weights", "no_save_optim", "no_save_rng"),
        *("use_persistent_ckpt_worker", "dist_ckpt_save_pre_mcore_014", "dist_ckpt_optim_fully_reshardable"),
        *("distrib_optim_fully_reshardable_mem_efficient", "create_checkpoint_symlink", "add_version"),
        why=FILES,
    ),
    **aside(
        *("log_completions", "log_rollout_offpolicy_metrics", "wandb_log_unique_prompts", "tensorboard_dir"),
        *("tensorboard_queue_size", "logprobs", "top_logprobs"),
        why=LOGS,
    ),
    **aside("fp8_amax_history_len", "fp8_amax_compute_algo", why="it is of fp8_recipe delayed, which is not there"),
    **aside("moe_token_drop_policy", why="it does nothing without moe_expert_capacity_factor, which is refused"),
    **aside("mtp_loss_scaling_factor", why="it does nothing without mtp_num_layers, which is refused"),
    **aside(
        *("fp4_recipe", "hqq_axis", "bnb_4bit_compute_dtype"),
        *("bnb_4bit_quant_storage", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
        why=_QUANT,
    ),
    **aside(
        *("muon_coefficient_type", "muon_extra_scale_factor", "muon_fp32_matmul_prec", "muon_momentum", "muon_num_ns_steps"),
        *("muon_scalar_optimizer", "muon_scale_mode", "muon_split_qkv", "muon_tp_mode", "muon_use_nesterov", "sgd_momentum"),
        why=_MUON,
    ),
    **aside(
        *("calculate_KL", "center_rewards_coefficient", "desirable_weight", "undesirable_weight", "f_divergence_type", "mrl_dims"),
        *("num_labels", "problem_type", "max_new_tokens", "max_model_len", "is_binary_loss_scale"),
        why=_OTHER_TASK,
    ),
}

TRL: Mapping[str, Foreign] = {
    **aside("vllm_group_port", why=PORT),
    **aside(
        *("logging_strategy", "logging_dir", "logging_first_step", "log_completions", "num_completions_to_print"),
        *("log_unique_prompts", "log_multimodal", "log_completions_hub_repo", "wandb_log_unique_prompts", "logging_nan_inf_filter"),
        *("disable_tqdm", "log_level", "log_level_replica", "log_on_each_node", "include_num_input_tokens_seen", "trackio_space_id"),
        *("trackio_bucket_id", "trackio_static_space_id", "skip_memory_metrics"),
        why=LOGS,
    ),
    **aside(
        *("hub_strategy", "hub_always_push", "save_safetensors", "save_only_model", "save_on_each_node", "overwrite_output_dir_on_start"),
        "restore_callback_states_from_checkpoint",
        why=FILES,
    ),
    **aside(
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
        *("dataloader_drop_last", "dataloader_in_order", "dataloader_multiprocessing_context", "dataset_num_proc"),
        *("remove_unused_columns", "data_seed", "dataset_test_split", "label_names", "length_column_name"),
        why=LOADING,
    ),
    **aside(
        *("gradient_checkpointing_kwargs", "full_determinism", "use_liger_kernel", "use_liger_loss", "liger_kernel_config"),
        *("torch_compile", "torch_compile_backend", "torch_compile_mode", "tf32", "attn_implementation", "use_cache"),
        why=KERNELS,
    ),
    **aside("torch_empty_cache_steps", "ds3_gather_for_generation", why=MEMORY),
    **aside("disable_dropout", why="models are trained without dropout here; the adapter's is lora_dropout"),
    **aside(
        *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_backend", "ddp_timeout", "ddp_broadcast_buffers", "ddp_static_graph"),
        *("ignore_bias_buffers", "local_rank", "average_tokens_across_devices", "mixed_precision", "machine_rank", "main_process_ip"),
        *("main_process_port", "num_machines", "rdzv_backend"),
        why="how ranks find and talk to each other: the launcher and Megatron-Core do that here",
    ),
    **aside(
        *("do_train", "do_eval", "do_predict", "per_device_eval_batch_size", "prediction_loss_only", "batch_eval_metrics"),
        *("eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object", "include_for_metrics"),
        why="how its Trainer evaluates; here held-out prompts are sampled by the engine, all at a time",
    ),
    **aside("eval_on_start", why="held-out prompts are answered before and after a run where there are any, which trains nothing"),
    **aside("train_sampling_strategy", why="GRPOTrainer has a sampler of its own, which shuffle_dataset decides, there as here"),
}

_MEGATRON, _LORA, _ENGINE, _ALGORITHM = "policy.megatron_config.", "policy.model.lora.", "inference_engine.", "algorithm."
SKYRL: Mapping[str, Foreign] = {
    **aside(
        *("tags", "log_path", "dump_data_batch", "dump_eval_results", "print_example_interval", "num_logger_eval_samples"),
        *("num_logger_train_samples", "log_example_interval", "enable_ray_gpu_monitor", f"{_MEGATRON}moe_per_layer_logging"),
        *("sampling_params.logprobs", "eval_sampling_params.logprobs", f"{_ENGINE}enable_ray_prometheus_stats", "policy.record_memory"),
        why=LOGS,
    ),
    **aside(
        *("ckpt_path", "hf_save_interval", f"{_LORA}lora_sync_path"),
        *(f"{_MEGATRON}{name}" for name in ("dist_ckpt_optim_fully_reshardable", "async_dist_ckpt_strategy", "async_save_prestage_to_cpu")),
        why=FILES,
    ),
    **aside(
        *("micro_forward_batch_size_per_gpu", "use_sample_packing", "remove_microbatch_padding", "flash_attn"),
        *("gradient_checkpointing_use_reentrant", "fused_lm_head_logprob", "fused_lm_head_logprob_backend", "policy.use_torch_compile"),
        *(f"{_MEGATRON}{name}" for name in ("moe_grouped_gemm", "moe_router_dtype")),
        f"{_MEGATRON}transformer_config_kwargs.gradient_accumulation_fusion",
        "sequence_parallel_backend",
        why=KERNELS,
    ),
    **aside(
        *("use_expandable_segments", "vocab_entropy_chunk_size", "vocab_entropy_chunk_memory_mb"),
        *("policy.optimizer_config.offload_after_step", f"{_MEGATRON}empty_cuda_cache", f"{_ENGINE}use_expandable_segments"),
        f"{_ENGINE}offload_kv_for_weight_sync",
        why=MEMORY,
    ),
    **aside(
        *("eval_batch_size", "eval_before_train", "disable_fast_tokenizer", "batched", "use_cache_salt", "dataloader.num_workers"),
        *("data.dataloader.num_workers", "data.dataloader.persistent_workers", "dataloader.persistent_workers"),
        "environment.skyrl_gym.max_env_workers",
        why=LOADING,
    ),
    **aside("use_conversation_multi_turn", "append_eos_token_after_stop_str_in_multi_turn", why="it does nothing in one turn"),
    **aside(
        *("placement.colocate_policy_ref", "placement.ref_num_nodes", "placement.ref_num_gpus_per_node", "placement.critic_num_nodes"),
        *("placement.critic_num_gpus_per_node", "ref.sequence_parallel_size", "critic_mini_batch_size"),
        why="the reference lies where the policy lies, and there is no critic",
    ),
    **aside(*(f"{_LORA}{name}" for name in ("max_loras", "max_cpu_loras")), f"{_ENGINE}fully_sharded_loras", why="one adapter trains"),
    **aside(
        *(f"{_ENGINE}{name}" for name in ("num_engines", "weight_sync_backend", "async_engine", "enable_chunked_prefill")),
        *(f"{_ENGINE}{name}" for name in ("max_num_batched_tokens", "vllm_v1_disable_multiproc", "distributed_executor_backend")),
        *(f"{_ENGINE}{name}" for name in ("served_model_name", "weight_transfer_threshold_cuda_ipc_GB")),
        *("num_inference_engines", "weight_sync_backend", "async_engine", "enable_chunked_prefill", "max_num_batched_tokens"),
        "vllm_v1_disable_multiproc",
        why="how engines are started and fed; all ranks sample here, vllm_tensor_parallel_size of them with each engine",
    ),
    **aside(
        *(f"{_ALGORITHM}{name}" for name in ("lambd", "gamma", "value_head_prefix")),
        why="it does nothing without a critic, which is refused",
    ),
    **aside(
        *(f"{_ALGORITHM}{name}" for name in ("kl_ctrl.kl_target", "kl_ctrl.horizon")),
        why="it does nothing with kl_ctrl.type fixed, and others are refused",
    ),
    **aside(f"{_ALGORITHM}zero_variance_filter_tol", why="a group is dead here where its rewards are equal"),
    **aside(
        *(f"{_ALGORITHM}dynamic_sampling.{name}" for name in ("max_sample_batches", "min_replace_ratio")),
        why="it does nothing without dynamic_sampling.type, which is refused",
    ),
}
