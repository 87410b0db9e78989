"""verl: Hydra overrides (`actor_rollout_ref.actor.optim.lr=1e-6`) or nested YAML.

Keys below lack `actor_rollout_ref.`, `data.` and `trainer.`. Source: ppo_trainer.yaml, ppo_megatron_trainer.yaml, and what its workers and
its RayPPOTrainer do with them. A mini-batch is counted in prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_grpo.compat import features, verl_aside, verl_reads
from megatron_grpo.compat.verl_settle import PROCESSOR_CACHES, SETTLE
from megatron_grpo.compat.vocabulary import (
    DATASETS,
    DISPATCHER,
    HELD_OUT,
    LOGGERS,
    NATIVE_SIZES,
    OF_THE_OPTIMIZER,
    TEMPLATE_WORDS,
    betas,
    listed,
    own_rewards,
    size,
    sizes,
    together,
)
from megatron_grpo.config.foreign import Default, Dialect, Foreign, default, kept, lacks, only, reads, same

_MEGATRON, _OPTIM, _TRANSFORMER = "actor.megatron.", "actor.optim.", "actor.megatron.override_transformer_config."
_OPTIMIZER, _LORA, _RIGHT = "actor.optim.override_optimizer_config.", "model.lora.", "algorithm.rollout_correction."

NAMES: Mapping[str, Foreign] = {
    "model.path": same("model"),
    "project_name": same("project"),
    "experiment_name": same("run_name"),
    "logger": LOGGERS,
    "default_local_dir": same("output_dir"),
    "nnodes": reads(verl_reads.ranks, "`world_size`, which is nodes times GPUs"),
    "n_gpus_per_node": reads(verl_reads.ranks, "`world_size`, which is nodes times GPUs"),
    "total_epochs": same("num_train_epochs"),
    "total_training_steps": same("max_steps"),
    "save_freq": same("save_steps", {"-1": "0"}),
    "test_freq": same("eval_steps", {"-1": "0"}),
    "max_actor_ckpt_to_keep": same("save_total_limit"),
    "resume_mode": same("resume", {"disable": "never"}),
    "resume_from_path": reads(verl_reads.resumed, "nothing; with resume_mode resume_path it is refused"),
    "actor.checkpoint.async_save": same("async_save"),
    # Data.
    "train_files": DATASETS,
    "val_files": HELD_OUT,
    "max_prompt_length": same("max_prompt_length"),
    "max_response_length": same("max_completion_length"),
    "shuffle": same("dataset_shuffle"),
    "seed": same("seed"),
    "filter_overlong_prompts": verl_reads.TOO_LONG,
    "truncation": verl_reads.TOO_LONG,
    "prompt_key": reads(verl_reads.column("prompt"), "`columns`, where it is not prompt"),
    "image_key": reads(verl_reads.column("images"), "`columns`, where it is not images"),
    "gen_batch_size": together("nothing, where it is `train_batch_size`; another number is refused"),
    "train_max_samples": lacks("all rows of a data set are used", "-1"),
    "val_max_samples": same("eval_num_prompts", {"-1": "none"}),
    "validation_shuffle": lacks(features.EVALUATION),
    "apply_chat_template_kwargs.enable_thinking": same("enable_thinking"),
    "apply_chat_template_kwargs": TEMPLATE_WORDS,
    "tokenizer": lacks(features.VERSIONS),
    "custom_cls.path": lacks("data sets are rows of files; classes of one's own are not loaded"),
    "sampler.class_path": lacks("prompts come in a seeded order, or in the file's (dataset_shuffle)"),
    "datagen.path": lacks("data sets are rows of files; classes of one's own are not loaded"),
    "tool_config_path": lacks(features.TURNS),
    "trust_remote_code": verl_reads.TRUSTS,
    # Sampling.
    "rollout.temperature": same("temperature"),
    "rollout.top_p": same("top_p"),
    "rollout.top_k": same("top_k", {"-1": "0"}),
    "rollout.prompt_length": same("max_prompt_length"),
    "rollout.response_length": same("max_completion_length"),
    "rollout.dtype": same("vllm_dtype"),
    "rollout.gpu_memory_utilization": same("vllm_gpu_memory_utilization"),
    "rollout.enforce_eager": same("vllm_enforce_eager"),
    "rollout.enable_prefix_caching": same("vllm_enable_prefix_caching"),
    "rollout.tensor_model_parallel_size": same("vllm_tensor_parallel_size"),
    "rollout.max_model_len": same("vllm_max_model_len"),
    "rollout.max_num_seqs": same("vllm_max_num_seqs"),
    "rollout.limit_images": same("limit_images"),
    "rollout.checkpoint_engine.update_weights_bucket_megabytes": same("weight_sync_bucket_mb"),
    "rollout.free_cache_engine": reads(verl_reads.sleep, "`sleep_level` 2"),
    "rollout.enable_rollout_routing_replay": verl_reads.REPLAY,
    "rollout.val_kwargs.n": same("num_generations_eval"),
    "rollout.val_kwargs.temperature": same("eval_temperature"),
    "rollout.val_kwargs.top_p": same("eval_top_p"),
    "rollout.val_kwargs.top_k": same("eval_top_k", {"-1": "0"}),
    "rollout.name": only("vllm", "sampling is by vLLM alone"),
    "rollout.do_sample": only("true", "completions are drawn, never greedy"),
    "rollout.ignore_eos": lacks("a completion ends with the model's end-of-text token"),
    "rollout.over_sample_rate": lacks("oversample_ratio samples more groups than are wanted, whole ones", "0", "0.0"),
    "rollout.multi_turn.enable": lacks(features.TURNS),
    "rollout.multi_turn.format": same("tool_call_parser"),
    "rollout.agent.agent_loop_config_path": lacks(features.TURNS),
    "rollout.agent.default_agent_loop": only("single_turn_agent", features.TURNS),
    "rollout.agent.custom_async_server.path": lacks("sampling is by vLLM alone"),
    "rollout.skip_rollout": lacks("completions that were dumped are not read"),
    "rollout.quantization": lacks(features.QUANTIZED),
    "rollout.mtp": lacks(features.MTP),
    "rollout.engine_kwargs.sglang": lacks("sampling is by vLLM alone"),
    "rollout.engine_kwargs.trtllm": lacks("sampling is by vLLM alone"),
    "rollout.engine_kwargs.vllm": verl_reads.ENGINE,
    **{f"rollout.engine_kwargs.vllm.{name}": Foreign(why=features.MEMORY) for name in PROCESSOR_CACHES},
    **{
        f"rollout.{name}_parallel_size": lacks("engines are split by tensor parallelism alone", "1")
        for name in ("data", "expert", "pipeline_model")
    },
    # The layout.
    **{
        f"{_MEGATRON}{name}": same(name)
        for name in (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
            *("context_parallel_size", "expert_model_parallel_size", "sequence_parallel", "use_distributed_optimizer", "seed"),
        )
    },
    f"{_MEGATRON}expert_tensor_parallel_size": together("`expert_tensor_parallel_size`; null is the tensor parallel size"),
    f"{_MEGATRON}dtype": same("torch_dtype"),
    f"{_MEGATRON}param_offload": verl_reads.offload("offload_model"),
    f"{_MEGATRON}grad_offload": verl_reads.offload("offload_model"),
    f"{_MEGATRON}optimizer_offload": verl_reads.offload("offload_optimizer"),
    f"{_MEGATRON}forward_only": lacks("the policy trains"),
    "actor.ulysses_sequence_parallel_size": same("context_parallel_size"),
    "actor.fsdp_config.ulysses_sequence_parallel_size": same("context_parallel_size"),
    "actor.fsdp_config.param_offload": verl_reads.offload("offload_model"),
    "actor.fsdp_config.optimizer_offload": verl_reads.offload("offload_optimizer"),
    "actor.fsdp_config.forward_only": lacks("the policy trains"),
    "actor.fsdp_config.seed": same("seed"),
    **{
        f"{_TRANSFORMER}{name}": same(name)
        for name in (*("recompute_granularity", "recompute_method", "recompute_num_layers", "moe_aux_loss_coeff"), "moe_z_loss_coeff")
    },
    f"{_TRANSFORMER}moe_token_dispatcher_type": DISPATCHER,
    f"{_TRANSFORMER}recompute_modules": reads(lambda words, given: {"recompute_modules": listed(words)}, "`recompute_modules`"),
    f"{_TRANSFORMER}num_layers_in_first_pipeline_stage": same("decoder_first_pipeline_num_layers"),
    f"{_TRANSFORMER}num_layers_in_last_pipeline_stage": same("decoder_last_pipeline_num_layers"),
    f"{_TRANSFORMER}moe_router_load_balancing_type": lacks("load-balancing losses depend on the layout"),
    **{
        f"{_TRANSFORMER}{name}": same(name)
        for name in (
            *("account_for_loss_in_pipeline_split", "account_for_embedding_in_pipeline_split", "moe_permute_fusion", "moe_enable_deepep"),
            *("moe_shared_expert_overlap", "pipeline_model_parallel_layout", "fp8_recipe"),
        )
    },
    f"{_TRANSFORMER}fp8": same("fp8_format"),
    # What trains.
    "model.lora.rank": reads(verl_reads.rank, "`tuner_type` lora and `lora_rank`"),
    "model.lora_rank": reads(verl_reads.rank, "`tuner_type` lora and `lora_rank`"),
    "model.lora.alpha": verl_reads.of_adapter("lora_alpha"),
    "model.lora_alpha": verl_reads.of_adapter("lora_alpha"),
    "model.lora.dropout": verl_reads.of_adapter("lora_dropout"),
    "model.lora.dtype": verl_reads.of_adapter("lora_dtype"),
    "model.lora.merge": together("`vllm_enable_lora`, which is false where it is true"),
    **{
        f"{section}{name}": together(f"`{name}`, with tuner_type lora")
        for section in ("model.", _LORA)
        for name in ("target_modules", "exclude_modules")
    },
    "model.lora_adapter_path": same("adapters"),
    "model.lora.adapter_path": same("adapters"),
    "model.lora.type": together("a note: what is not canonical_lora shares one A between q, k and v, here each has its own"),
    "model.lora.lora_A_init_method": lacks(features.LORA_START, "xavier", "kaiming", "uniform"),
    "model.lora.lora_B_init_method": only("zero", features.LORA_START),
    "model.override_config.moe_config.freeze_moe_router": verl_reads.ROUTERS,
    "model.override_config.model_config": lacks(features.BUILT),
    "model.override_config": lacks(features.BUILT),
    "model.enable_gradient_checkpointing": together(
        "`recompute_granularity` full, where verl trains with FSDP; with Megatron it is not read"
    ),
    "model.trust_remote_code": verl_reads.TRUSTS,
    "model.external_lib": lacks("modules of one's own are not imported by name"),
    "model.custom_chat_template": lacks("prompts are written by the model's own chat template"),
    "model.hf_config_path": lacks(features.VERSIONS),
    "model.tokenizer_path": lacks(features.VERSIONS),
    "model.mtp.enable": lacks(features.MTP),
    "actor.freeze_vision_tower": reads(
        lambda words, given: dict.fromkeys(("freeze_vit", "freeze_aligner"), list(words)),
        "`freeze_vit` and `freeze_aligner`, for its tower is both; both false, of a model that sees, where nobody says this",
    ),
    # The optimizer.
    f"{_OPTIM}lr": same("lr"),
    f"{_OPTIM}betas": reads(betas, "`adam_beta1` and `adam_beta2`"),
    f"{_OPTIM}weight_decay": same("weight_decay"),
    f"{_OPTIM}clip_grad": same("clip_grad"),
    "actor.grad_clip": same("clip_grad"),
    f"{_OPTIM}lr_decay_style": same("lr_decay_style"),
    f"{_OPTIM}lr_scheduler_type": same("lr_decay_style"),
    f"{_OPTIM}warmup_style": same("lr_decay_style"),
    f"{_OPTIM}min_lr": same("min_lr"),
    f"{_OPTIM}lr_warmup_steps": same("lr_warmup_iters", {"-1": "0"}),
    f"{_OPTIM}lr_warmup_steps_ratio": same("lr_warmup_fraction", {"0.0": "none", "0": "none"}),
    f"{_OPTIM}min_lr_ratio": together("`min_lr`, which is this times lr"),
    f"{_OPTIM}num_cycles": lacks("a cosine goes half a period", "0.5"),
    f"{_OPTIM}optimizer": lacks(features.OTHER_OPTIMIZER, "adam", "adamw"),
    f"{_OPTIM}lr_warmup_init": same("lr_warmup_init"),
    f"{_OPTIM}lr_decay_steps": same("lr_decay_iters"),
    f"{_OPTIM}weight_decay_incr_style": same("weight_decay_incr_style"),
    f"{_OPTIM}lr_wsd_decay_style": same("lr_wsd_decay_style"),
    f"{_OPTIM}lr_wsd_decay_steps": same("lr_wsd_decay_iters"),
    f"{_OPTIM}zero_indexed_step": Foreign(why="whether the first step counts as 0 or 1 in its schedule: one step of warm-up"),
    f"{_OPTIM}total_training_steps": lacks("the schedule is as long as the run (max_steps, num_train_epochs)", "-1"),
    **{f"{_OPTIMIZER}{name}": row for name, row in OF_THE_OPTIMIZER.items()},
    # The mathematics.
    "actor.clip_ratio_low": same("epsilon"),
    "actor.clip_ratio_high": verl_reads.LOSS,
    "actor.clip_ratio": Foreign(
        why="verl reads clip_ratio_low and clip_ratio_high, which are 0.2 where nobody says otherwise, in its place"
    ),
    "actor.tau_pos": same("sapo_temperature_pos"),
    "actor.tau_neg": same("sapo_temperature_neg"),
    "actor.clip_ratio_c": verl_reads.LOSS,
    "actor.loss_agg_mode": verl_reads.LOSS,
    "actor.policy_loss.loss_mode": verl_reads.LOSS,
    "actor.loss_scale_factor": lacks("Dr. GRPO divides by max_completion_length"),
    "actor.entropy_coeff": same("entropy_coef"),
    "actor.calculate_entropy": same("log_entropy"),
    "actor.use_kl_loss": verl_reads.KL,
    "actor.kl_loss_coef": verl_reads.KL,
    "actor.kl_loss_type": verl_reads.KL,
    "algorithm.use_kl_in_reward": verl_reads.KL,
    "algorithm.kl_ctrl.kl_coef": verl_reads.KL,
    "algorithm.kl_penalty": verl_reads.KL,
    "algorithm.kl_ctrl.type": only("fixed", "beta is constant"),
    "algorithm.norm_adv_by_std_in_grpo": same("scale_rewards", {"true": "group", "false": "none"}),
    "algorithm.adv_estimator": together("`advantage_estimator`: grpo, rloo; its others are refused"),
    "algorithm.use_pf_ppo": lacks("completions are not drawn again by their rewards"),
    "algorithm.filter_groups.enable": same("dynamic_sample"),
    "algorithm.filter_groups.max_num_gen_batches": same("max_resample_times"),
    "algorithm.filter_groups.metric": Foreign(why="a group is dead where its rewards are equal"),
    "actor.shuffle": lacks("rows are trained in the order of the timetable"),
    "actor.router_replay.mode": same("router_replay_mode"),
    "actor.router_replay.record_file": lacks("what routers chose is not written to files"),
    "actor.router_replay.replay_file": lacks("what routers chose is not read from files"),
    "actor.load_weight": only("true", "the policy starts from the model's weights"),
    f"{_RIGHT}rollout_is": together("`rollout_importance_sampling_mode`: token is token_truncate, sequence is sequence_truncate"),
    f"{_RIGHT}rollout_is_threshold": reads(verl_reads.threshold, "`rollout_importance_sampling_threshold`"),
    f"{_RIGHT}rollout_is_batch_normalize": lacks("the weights of the correction are not normalised"),
    f"{_RIGHT}rollout_rs": lacks("of its corrections rollout_is is translated"),
    f"{_RIGHT}rollout_rs_threshold": lacks("of its corrections rollout_is is translated"),
    f"{_RIGHT}bypass_mode": verl_reads.BYPASS,
    f"{_RIGHT}loss_type": only("ppo_clip", "the loss is clipped"),
    # Batches, of which the sizes are a table of their own.
    "actor.use_dynamic_bsz": verl_reads.PACKED,
    "actor.ppo_max_token_len_per_gpu": verl_reads.PACKED,
    "actor.ppo_micro_batch_size": together("`micro_batch_size`, which is this over the data-parallel size"),
    # Rewards.
    "custom_reward_function.path": reads(own_rewards("a function with verl's signature"), "nothing; reward_funcs has to be given"),
    "reward_model.enable": lacks("a reward model is the reward function reward_model: reward_funcs reward_model, and its directory"),
    "reward_model.reward_manager": lacks("rewards come from reward_funcs", "naive", "dapo", "batch"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": verl_reads.SOFT,
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": verl_reads.SOFT,
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": lacks("it is the weight of soft_overlong: reward_weights", "1", "1.0"),
    "reward_model.reward_kwargs.max_resp_len": verl_reads.SOFT,
    "reward_model.sandbox_fusion.url": lacks("programs are run by the reward code"),
    "reward_model.reward_loop_module_path": reads(own_rewards("a reward loop of verl"), "nothing; reward_funcs has to be given"),
    "reward_manager.name": lacks(
        "rewards come from reward_funcs", "naive", "dapo", "batch", "${oc.select:reward_model.reward_manager,naive}"
    ),
    "reward_manager.source": only("register", "rewards come from reward_funcs"),
    "reward_manager.module.path": reads(own_rewards("a reward manager of verl"), "nothing; reward_funcs has to be given"),
    # Its trainers that sample on other GPUs, or into a running step.
    **{
        f"rollout.{name}": lacks(features.APART, "0", instead=("vllm_mode server",))
        for name in ("nnodes", "n_gpus_per_node", "total_rollout_steps")
    },
    **{f"rollout.{name}": lacks(features.APART, instead=("vllm_mode server",)) for name in ("test_freq", "total_epochs")},
    "val_only": lacks("`megatron-grpo eval` scores a checkpoint"),
    "critic.enable": lacks(features.CRITIC),
    **verl_aside.NAMES,
}

DEFAULTS: Sequence[Default] = (
    default("actor.optim.weight_decay", 0.01, weight_decay=0.01),
    default("actor.optim.betas", "0.9 0.999", adam_beta2=0.999),
    default("data.max_prompt_length", 512, max_prompt_length=512),
    default("data.max_response_length", 512, max_completion_length=512),
    Default(name="use_bias_correction_kl", theirs="it has none", native={"use_bias_correction_kl": False}),
    default("rollout.gpu_memory_utilization", 0.5, vllm_gpu_memory_utilization=0.5),
    default("rollout.tensor_model_parallel_size", 2, vllm_tensor_parallel_size=2),
    default("trainer.total_epochs", 30, num_train_epochs=30.0),
    default("trainer.n_gpus_per_node", 8, world_size=8),
    Default(name="trainer.max_actor_ckpt_to_keep", theirs="none", native={"save_total_limit": None}),
    kept("rollout.free_cache_engine", True, "sleep_level 0"),
    kept("algorithm.adv_estimator", "gae", "grpo"),
    kept("trainer.logger", "console wandb", "none"),
)

VERL = Dialect(
    name="verl",
    title="verl",
    hides=NATIVE_SIZES,
    prefixes=("actor_rollout_ref.", "actor.", "data."),
    sections=("actor_rollout_ref.", "data.", "trainer."),
    heads={
        "actor_rollout_ref.": "actor model rollout",
        "data.": """apply_chat_template_kwargs custom_cls datagen filter_overlong_prompts gen_batch_size image_key max_prompt_length
            max_response_length prompt_key sampler seed shuffle tokenizer tool_config_path train_batch_size train_files train_max_samples
            truncation trust_remote_code val_files val_max_samples validation_shuffle""",
        "trainer.": """default_local_dir experiment_name logger max_actor_ckpt_to_keep n_gpus_per_node nnodes project_name
            resume_from_path resume_mode save_freq test_freq total_epochs total_training_steps val_only""",
    },
    names=NAMES,
    patterns=verl_aside.PATTERNS,
    defaults=DEFAULTS,
    settle=SETTLE,
    trains_tower=True,
    settings=sizes(
        size("train_batch_size", 1024, "prompts in one rollout"),
        size("ppo_mini_batch_size", 256, "prompts in one optimizer step"),
        size("ppo_micro_batch_size_per_gpu", 1, "completions in one forward on one DP rank"),
        size("rollout.n", 1, "completions per prompt"),
        size("ppo_epochs", 1, "passes over one rollout"),
    ),
)
