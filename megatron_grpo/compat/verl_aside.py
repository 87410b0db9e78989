"""verl's names that change nothing here, by what they are about, and whole sections of its files."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_grpo.compat import features
from megatron_grpo.compat.features import FILES, KERNELS, LOADING, LOGS, MEMORY
from megatron_grpo.compat.vocabulary import together
from megatron_grpo.config.foreign import Foreign, aside, lacks, only

_FSDP = "it is of its FSDP workers: here Megatron shards (tensor_model_parallel_size, use_distributed_optimizer)"
_MEGATRON, _TRANSFORMER = "actor.megatron.", "actor.megatron.override_transformer_config."
_OPTIMIZER = "actor.optim.override_optimizer_config."
_FROM_HF = "weights are read from model.path, the Hugging Face checkpoint, and nothing has to be converted before"

NAMES: Mapping[str, Foreign] = {
    **aside(
        *("log_val_generations", "rollout_data_dir", "validation_data_dir", "rollout.disable_log_stats", "disable_log_stats"), why=LOGS
    ),
    **aside(
        *("esi_redundant_time", "del_local_ckpt_after_load", "default_hdfs_dir", "max_critic_ckpt_to_keep", "actor.checkpoint"),
        *("actor.checkpoint.save_contents", "actor.checkpoint.load_contents", "rollout.skip_dump_dir"),
        why=FILES,
    ),
    **aside(
        *("balance_batch", "dataloader_num_workers", "filter_overlong_prompts_workers", "use_shm", "return_raw_input_ids"),
        *("return_raw_chat", "return_full_prompt", "return_multi_modal_inputs", "val_batch_size", "image_patch_size", "video_key"),
        *("reward_fn_key", "custom_cls.name", "sampler.class_name", "datagen.name", "val_before_train", "actor.data_loader_seed"),
        why=LOADING,
    ),
    **aside(
        *("device", "ray_wait_register_center_timeout", "use_legacy_worker_impl", "hybrid_engine", "nccl_timeout"),
        *("config_path", "config_name", "critic_warmup", "actor.rollout_n", "ref.rollout_n", "actor.strategy", "ref.strategy"),
        why="how its program is put together and started",
    ),
    **aside(
        *("actor.use_torch_compile", "actor.use_fused_kernels", "actor.use_prefix_grouper", "actor.use_remove_padding"),
        *("actor.entropy_from_logits_with_chunking", "actor.entropy_checkpointing", "model.use_liger", "model.use_fused_kernels"),
        *("model.use_remove_padding", "model.fused_kernel_options", "model.fused_kernel_options.impl_backend", "model.tiled_mlp.enabled"),
        *("model.tiled_mlp.num_shards", f"{_MEGATRON}use_remove_padding", "actor.calculate_sum_pi_squared"),
        *("actor.sum_pi_squared_checkpointing",),
        *(
            f"{_TRANSFORMER}{name}"
            for name in (
                *("attention_backend", "apply_rope_fusion", "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion"),
                *("gradient_accumulation_fusion", "deallocate_pipeline_outputs", "persist_layer_norm", "moe_grouped_gemm"),
                *("moe_router_dtype", "overlap_moe_expert_parallel_comm", "use_flash_attn"),
            )
        ),
        why=KERNELS,
    ),
    **aside(
        *("model.enable_activation_offload", "model.use_shm", "rollout.multi_stage_wake_up", f"{_OPTIMIZER}overlap_cpu_optimizer_d2h_h2d"),
        why=MEMORY,
    ),
    **aside(
        *("rollout.mode", "rollout.cudagraph_capture_sizes", "rollout.max_num_batched_tokens", "rollout.enable_chunked_prefill"),
        *("rollout.logprobs_mode", "rollout.scheduling_policy", "rollout.load_format", "rollout.skip_tokenizer_init"),
        *("rollout.calculate_log_probs", "rollout.agent.num_workers", "rollout.agent.custom_async_server.name"),
        *("rollout.checkpoint_engine.backend", "rollout.checkpoint_engine.engine_kwargs", "rollout.quantization_config_file"),
        "rollout.layered_summon",
        why="how the engine is started and fed; log-probs of the sampler always come with a completion",
    ),
    **aside("rollout.val_kwargs.do_sample", why="rollout.val_kwargs.temperature decides: 0 is greedy"),
    **aside(
        *(f"{_MEGATRON}{name}" for name in ("use_dist_checkpointing", "dist_checkpointing_path", "dist_checkpointing_prefix")),
        *(f"{_MEGATRON}{name}" for name in ("use_mbridge", "vanilla_mbridge")),
        why=_FROM_HF,
    ),
    **aside(
        *(f"{section}log_prob_{name}" for section in ("rollout.", "ref.") for name in ("micro_batch_size", "micro_batch_size_per_gpu")),
        *(f"{section}log_prob_{name}" for section in ("rollout.", "ref.") for name in ("use_dynamic_bsz", "max_token_len_per_gpu")),
        why="passes without a backward are packed as training is, up to 2,048 tokens at least",
    ),
    **aside(
        *(f"actor.policy_loss.{name}" for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")),
        why="it does nothing without loss_mode clip_cov or kl_cov, which are refused",
    ),
    **aside(
        *(
            "algorithm.gamma",
            "algorithm.lam",
            "algorithm.kl_ctrl.horizon",
            "algorithm.kl_ctrl.target_kl",
            "algorithm.pf_ppo.reweight_method",
        ),
        "algorithm.pf_ppo.weight_pow",
        why="it does nothing in GRPO with a fixed coefficient, there as here",
    ),
    **aside("model.lora.dropout_position", "model.lora.a2a_experimental", why="the adapter's dropout is before A, as in PEFT"),
    **{
        f"model.lora.freeze_{name}": only("true", "with tuner_type lora what has no adapter does not train")
        for name in ("vision_model", "vision_projection", "language_model")
    },
    **aside("model.mtp.enable_train", "model.mtp.enable_rollout", why="it does nothing without model.mtp.enable, which is refused"),
    **aside(
        "actor.optim.use_checkpoint_opt_param_scheduler", "actor.optim.override_optimizer_config", "actor.optim.optimizer_impl", why=FILES
    ),
    **aside(
        *("custom_reward_function.name", "reward_model.launch_reward_fn_async", "reward_model.num_workers", "reward_model.use_reward_loop"),
        *("reward_model.reward_loop_source", "reward_model.reward_loop_class_name", "reward_model.sandbox_fusion.max_concurrent"),
        *("reward_model.sandbox_fusion.memory_limit_mb", "reward_manager.module.name"),
        "reward_model.reward_kwargs.overlong_buffer_cfg.log",
        why="how rewards are called; reward_funcs names what judges, reward_timeout and reward_concurrency how long and how many",
    ),
}

PATTERNS: Mapping[str, Foreign] = {
    "*.profiler.*": Foreign(why=LOGS),
    "*._target_": Foreign(why="how its program is put together and started"),
    "global_profiler.*": Foreign(why=LOGS),
    "rollout.prometheus.*": Foreign(why=LOGS),
    "rollout.trace.*": Foreign(why=LOGS),
    "rollout.layer_name_map.*": Foreign(why="names of layers are those of the Hugging Face checkpoint"),
    "rollout.multi_turn.*": Foreign(why="it does nothing without rollout.multi_turn.enable, which is refused"),
    "rollout.engine_kwargs.sglang.*": Foreign(why="vLLM samples"),
    "rollout.engine_kwargs.trtllm.*": Foreign(why="vLLM samples"),
    "rollout.engine_kwargs.vllm.*": together("`vllm_engine_kwargs`, or the setting that says it"),
    "async_training.*": Foreign(lacks=features.AHEAD, is_task=True),
    "model.mtp.*": Foreign(why="it does nothing without model.mtp.enable, which is refused"),
    "ref.router_replay.*": Foreign(why="the reference chooses its experts itself"),
    "ref.*": Foreign(why="the reference is the model as it was at the start, cut and packed as the policy is"),
    "critic.*": Foreign(why="there is no critic; what asks for one is algorithm.adv_estimator"),
    "reward_model.*": Foreign(why="it does nothing without reward_model.enable, which is refused"),
    "actor.fsdp_config.*": Foreign(why=_FSDP),
    f"{_TRANSFORMER}*": lacks("of Megatron's own words the table in docs/arguments.md has those that are translated"),
    f"{_MEGATRON}override_*": lacks("of Megatron's own words the table in docs/arguments.md has those that are translated"),
    f"{_OPTIMIZER}*": lacks("of Megatron's own words the table in docs/arguments.md has those that are translated"),
    "transfer_queue.enable": lacks("rows go to their ranks once, by Megatron's own groups"),
    "transfer_queue.*": Foreign(why="it does nothing without transfer_queue.enable, which is refused"),
    "ray_kwargs.*": Foreign(why="Ray is not used: ranks are started by torchrun"),
    "hydra.*": Foreign(why="how its program is put together and started"),
    "npu_profile.*": Foreign(why=LOGS),
    "apply_chat_template_kwargs.*": together("`chat_template_kwargs`"),
    "model.override_config.*": lacks(features.BUILT),
}
