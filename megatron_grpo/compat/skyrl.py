"""SkyRL: Hydra overrides (`trainer.policy.optimizer_config.lr=1e-6`) or nested YAML. Keys below lack `trainer.` and `generator.`.

Source: its SkyRLTrainConfig and what its trainer does with it. Its code counts a mini-batch in prompts, its guide in completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_grpo.compat import aside, features
from megatron_grpo.compat.skyrl_settle import settle
from megatron_grpo.compat.vocabulary import (
    DATASETS,
    HELD_OUT,
    LOGGERS,
    NATIVE_SIZES,
    OF_THE_OPTIMIZER,
    TEMPLATE_WORDS,
    Given,
    betas,
    listed,
    own_rewards,
    size,
    sizes,
    text_of,
    together,
    where_true,
)
from megatron_grpo.config.foreign import Default, Dialect, Foreign, default, kept, lacks, not_there, only, reads, same
from megatron_grpo.config.table import TRUE, BadValue

_SERVED = ("vllm_mode server",)
_ALGORITHM, _POLICY, _ENGINE, _LORA = "algorithm.", "policy.megatron_config.", "inference_engine.", "policy.model.lora."


def _ranks(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    numbers = [(given.get(f"placement.policy_{name}") or ["1"])[0] for name in ("num_nodes", "num_gpus_per_node")]
    if not all(number.isdigit() for number in numbers):
        raise BadValue(f"needs a whole number, not {' '.join(words)!r}")
    return {"world_size": int(numbers[0]) * int(numbers[1])}


def _stop(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    return {"stop": [] if list(words) == ["none"] else [part for word in words for part in listed([word])]}


def _turns(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    if list(words) == ["1"]:
        return {}
    if not {"environment", "tools"} & set(given):
        raise BadValue(f"({' '.join(words)}): {features.TURNS}")
    return {"max_turns": list(words)}


def _rank(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    return {"tuner_type": "full"} if list(words) == ["0"] else {"tuner_type": "lora", "lora_rank": list(words)}


def _routers(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """They do not train under LoRA anyway."""
    is_lora = text_of(given, f"{_LORA}rank", "0") != "0"
    return {"freeze_parameters_regex": r"\.gate\.weight$"} if words[0].lower() in TRUE and not is_lora else {}


def _forever(native: str) -> Foreign:
    """-1 (and 0) is never, or no bound."""
    return same(native, {"-1": "0"})


# `settle` below reads these, several at a time.
_LOSS = together("loss_type, importance_sampling_level, delta and epsilon_high, with others of its names")
_KL = together("beta, kl_in_reward and entropy_coef, with others of its names")
_CORRECT = together("rollout_importance_sampling_mode and its threshold, with others of its names")


_OF_OPTIMIZER = f"of these words {', '.join(OF_THE_OPTIMIZER)} are translated"
_ENGINE_WORDS = together("`vllm_engine_kwargs`, or the setting that says it (`vllm_max_model_len`)")
_RECOMPUTE = "of these words those of recomputation, pipeline splits, FP8 and experts' kernels are translated"

NAMES: Mapping[str, Foreign] = {
    "policy.model.path": same("model"),
    "project_name": same("project"),
    "run_name": same("run_name"),
    "logger": LOGGERS,
    "gradient_checkpointing": together("no `recompute_granularity` where it is false"),
    "policy.optimizer_config.lr": same("lr"),
    "policy.optimizer_config.adam_betas": reads(betas, "adam_beta1 and adam_beta2"),
    "policy.optimizer_config.weight_decay": same("weight_decay"),
    "policy.optimizer_config.max_grad_norm": same("clip_grad"),
    "policy.optimizer_config.num_warmup_steps": same("lr_warmup_iters"),
    "policy.optimizer_config.scheduler": same("lr_decay_style", {"constant_with_warmup": "constant"}),
    **{
        f"{_POLICY}{name}": same(name)
        for name in (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"),
            *("moe_token_dispatcher_type", "moe_aux_loss_coeff"),
        )
    },
    f"{_POLICY}expert_tensor_parallel_size": together("`expert_tensor_parallel_size`; null is the tensor parallel size"),
    **{
        f"{_POLICY}transformer_config_kwargs.{name}": same(name)
        for name in (
            *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
            *("account_for_loss_in_pipeline_split", "account_for_embedding_in_pipeline_split", "moe_permute_fusion", "moe_enable_deepep"),
            *("moe_shared_expert_overlap", "pipeline_model_parallel_layout", "moe_z_loss_coeff", "fp8_recipe"),
        )
    },
    f"{_POLICY}transformer_config_kwargs.fp8": same("fp8_format"),
    f"{_POLICY}transformer_config_kwargs.num_layers_in_first_pipeline_stage": same("decoder_first_pipeline_num_layers"),
    f"{_POLICY}transformer_config_kwargs.num_layers_in_last_pipeline_stage": same("decoder_last_pipeline_num_layers"),
    **{f"{_POLICY}ddp_config.{name}": same(name) for name in ("overlap_grad_reduce", "overlap_param_gather")},
    **{f"{_POLICY}optimizer_config_kwargs.{name}": row for name, row in OF_THE_OPTIMIZER.items()},
    f"{_POLICY}async_dist_ckpt_save": same("async_save"),
    "placement.policy_num_nodes": reads(_ranks, "world_size, which is nodes times GPUs"),
    "placement.policy_num_gpus_per_node": reads(_ranks, "world_size, which is nodes times GPUs"),
    "max_prompt_length": same("max_prompt_length"),
    "sampling_params.max_generate_length": same("max_completion_length"),
    "sampling_params.temperature": same("temperature"),
    "sampling_params.top_p": same("top_p"),
    "sampling_params.top_k": same("top_k", {"-1": "0"}),
    "sampling_params.stop": reads(_stop, "stop"),
    "chat_template_kwargs.enable_thinking": same("enable_thinking"),
    "chat_template_kwargs": TEMPLATE_WORDS,
    "data.train_data": DATASETS,
    "data.val_data": HELD_OUT,
    "train_data": DATASETS,  # a file's section `data` is one of ours too, and disappears
    "val_data": HELD_OUT,
    "epochs": same("num_train_epochs"),
    "max_training_steps": same("max_steps"),
    "ckpt_interval": _forever("save_steps"),
    "max_ckpts_to_keep": same("save_total_limit", {"-1": "none"}),
    "eval_interval": _forever("eval_steps"),
    "export_path": same("output_dir"),
    "resume_mode": same("resume", {"latest": "auto", "none": "never", "null": "never"}),
    "seed": same("seed"),
    "bf16": same("bf16"),
    "apply_overlong_filtering": same("overlong_filter"),
    "max_tokens_per_microbatch": same("max_tokens_per_micro_batch", {"-1": "none"}),
    "logprobs_chunk_size": same("logprob_chunk_size"),
    # The engine; older files have the same names without `inference_engine`.
    **{
        f"{section}{theirs}": same(native)
        for section, theirs, native in (
            (_ENGINE, "tensor_parallel_size", "vllm_tensor_parallel_size"),
            ("", "inference_engine_tensor_parallel_size", "vllm_tensor_parallel_size"),
            *((section, "gpu_memory_utilization", "vllm_gpu_memory_utilization") for section in (_ENGINE, "")),
            *((section, "enforce_eager", "vllm_enforce_eager") for section in (_ENGINE, "")),
            *((section, "enable_prefix_caching", "vllm_enable_prefix_caching") for section in (_ENGINE, "")),
            *((section, "max_num_seqs", "vllm_max_num_seqs") for section in (_ENGINE, "")),
            *((section, "model_dtype", "vllm_dtype") for section in (_ENGINE, "")),
        )
    },
    # The mathematics.
    f"{_ALGORITHM}kl_estimator_type": same("kl_estimator"),
    f"{_ALGORITHM}eps_clip_low": same("epsilon"),
    f"{_ALGORITHM}eps_clip_high": same("epsilon_high"),
    f"{_ALGORITHM}grpo_norm_by_std": same("scale_rewards", {"true": "group", "false": "none"}),
    f"{_ALGORITHM}zero_variance_filter": same("exclude_dead_groups"),
    f"{_ALGORITHM}sapo.tau_pos": same("sapo_temperature_pos"),
    f"{_ALGORITHM}sapo.tau_neg": same("sapo_temperature_neg"),
    f"{_ALGORITHM}advantage_estimator": lacks(
        "here it is grpo or rloo; its others are not there, and ours of their own are given as --advantage_estimator",
        "grpo",
        "rloo",
        instead=("advantage_estimator",),
    ),
    **dict.fromkeys((f"{_ALGORITHM}{name}" for name in ("policy_loss_type", "loss_reduction", "clip_ratio_c")), _LOSS),
    f"{_ALGORITHM}cispo.cispo_eps_clip_high": _LOSS,
    **dict.fromkeys((f"{_ALGORITHM}{name}" for name in ("use_kl_loss", "kl_loss_coef", "use_kl_in_reward")), _KL),
    **dict.fromkeys((f"{_ALGORITHM}{name}" for name in ("use_entropy_loss", "entropy_loss_coef")), _KL),
    **dict.fromkeys((f"{_ALGORITHM}{name}" for name in ("use_tis", "tis_imp_ratio_cap")), _CORRECT),
    **{
        f"{_ALGORITHM}off_policy_correction.{name}": _CORRECT
        for name in ("tis_ratio_type", "token_tis_ratio_clip_high", "sequence_tis_ratio_clip_high")
    },
    # Asked for, and not there.
    "strategy": together("a note where it is fsdp or fsdp2: here Megatron shards (`tensor_model_parallel_size`)"),
    "environment.env_class": reads(own_rewards("an environment of SkyRL"), "reward_funcs"),
    "max_turns": reads(_turns, "`max_turns`, with `environment` or `tools`; without them more than one is refused"),
    "placement.colocate_all": only("true", features.SERVER, instead=_SERVED),
    f"{_LORA}rank": reads(_rank, "tuner_type lora and lora_rank"),
    **{
        f"{_LORA}{theirs}": together(f"`{ours}`, with tuner_type lora")
        for theirs, ours in (
            *(("alpha", "lora_alpha"), ("dropout", "lora_dropout")),
            *((name, name) for name in ("target_modules", "exclude_modules")),
        )
    },
    f"{_LORA}init_method": only("kaiming", features.LORA_START),
    f"{_POLICY}lora_config.lora_type": together("a note: lora shares one A between q, k and v, here each has its own"),
    f"{_POLICY}lora_config.merge_lora": together("a note: the engine gets the adapter, unless `vllm_enable_lora` is false"),
    "policy.sequence_parallel_size": together("`context_parallel_size`, with strategy fsdp"),
    "sampling_params.min_p": same("min_p"),
    "sampling_params.repetition_penalty": lacks(features.PENALTY, "1", "1.0"),
    "sampling_params.additional_kwargs": lacks(features.SAMPLING),
    "ref.model.path": together("nothing, where it is policy.model.path; another model is refused"),
    "update_ref_every_epoch": lacks("the reference follows the policy with sync_ref_model alone"),
    f"{_POLICY}virtual_pipeline_model_parallel_size": same("virtual_pipeline_model_parallel_size"),
    f"{_POLICY}moe_router_load_balancing_type": lacks("load-balancing losses depend on the layout"),
    f"{_POLICY}moe_enable_routing_replay": where_true("router_replay_mode", router_replay_mode="R3"),
    f"{_POLICY}freeze_moe_router": reads(_routers, "freeze_parameters_regex"),
    f"{_POLICY}mtp_num_layers": lacks(features.MTP, "0"),
    f"{_ALGORITHM}dynamic_sampling.type": lacks("its ways to resample are not there; dynamic_sample draws further prompts for dead groups"),
    f"{_ALGORITHM}advantage_batch_normalize": lacks("advantages are normalised by advantage_estimator and scale_rewards alone"),
    f"{_ALGORITHM}temperature": together("nothing, where it is sampling_params.temperature; another number is refused"),
    f"{_ALGORITHM}kl_ctrl.type": lacks("beta is constant", "fixed"),
    f"{_ALGORITHM}off_policy_correction.sequence_mask_metric": lacks("of its corrections tis_ratio_type is translated"),
    f"{_ALGORITHM}cispo.cispo_eps_clip_low": lacks("the ratio has no lower bound in cispo here", "1", "1.0"),
    f"{_ALGORITHM}cispo.cispo_anchor": only("old", "the ratio is taken against old log-probs"),
    "fully_async.enabled": lacks(features.AHEAD, instead=features.AHEAD_INSTEAD),
    "mtp.enabled": lacks(features.MTP),
    "recompute_old_logprobs_per_minibatch": only("true", "old log-probs are those of the weights that sampled"),
    "resume_path": lacks(features.RESUMED_ELSEWHERE),
    "zero_reward_on_non_stop": lacks("a truncated completion keeps its reward; overlong_filter takes it out of the loss"),
    "step_wise_trajectories": lacks("an episode is one sequence, which is trained whole"),
    "vision_language_generator": together("`freeze_vit` and `freeze_aligner` false; pictures come in the column images"),
    "max_input_length": together("nothing, where it is max_prompt_length; another number is refused"),
    f"{_ALGORITHM}overlong_buffer_len": together("the reward `soft_overlong` beside `reward_funcs` (of its example main_dapo)"),
    f"{_ALGORITHM}overlong_buffer_penalty_factor": lacks("it is the weight of soft_overlong: reward_weights", "1", "1.0"),
    "eval_n_samples_per_prompt": same("num_generations_eval"),
    "chat_template.name_or_path": lacks("prompts are written by the model's own chat template"),
    f"{_ENGINE}backend": lacks("sampling is by vLLM alone", "vllm"),
    "backend": lacks("sampling is by vLLM alone", "vllm"),
    f"{_ENGINE}run_engines_locally": only("true", features.SERVER, instead=_SERVED),
    "run_engines_locally": only("true", features.SERVER, instead=_SERVED),
    **{f"{_ENGINE}{name}": lacks(features.SERVER, instead=_SERVED) for name in ("external_proxy_url", "external_server_urls")},
    **{
        f"{_ENGINE}{name}": lacks("engines are split by tensor parallelism alone", "1")
        for name in ("pipeline_parallel_size", "expert_parallel_size", "data_parallel_size")
    },
    f"{_ENGINE}enable_return_routed_experts": Foreign(why="router_replay_mode R3 (moe_enable_routing_replay) asks the engine for them"),
    f"{_ENGINE}speculative_config": lacks(features.SPECULATES),
    **not_there(
        "of its corrections tis_ratio_type is translated",
        *(
            f"{_ALGORITHM}off_policy_correction.{name}_threshold_{end}"
            for name in ("outlier_token_is", "token_mask_is")
            for end in ("low", "high")
        ),
    ),
    **not_there(features.CRITIC, "critic.model.path", "critic.optimizer_config.lr", f"{_ALGORITHM}value_clip"),
    "critic.sequence_parallel_size": lacks(features.CRITIC, "1"),
    f"{_ALGORITHM}max_seq_len": _LOSS,
    f"{_POLICY}moe_router_score_function": lacks(features.BUILT),
    f"{_POLICY}moe_router_enable_expert_bias": lacks(features.BUILT),
    f"{_ENGINE}engine_init_kwargs": _ENGINE_WORDS,
    "engine_init_kwargs": _ENGINE_WORDS,
    **not_there("prompts and answers are computed by the same engines", f"{_ENGINE}enable_pd", f"{_ENGINE}router_init_kwargs"),
    f"{_ENGINE}num_prefill": lacks("prompts and answers are computed by the same engines", "0"),
    "chat_template.source": lacks("prompts are written by the model's own chat template", "name"),
    "merge_stepwise_output": Foreign(why="it does nothing without step_wise_trajectories, which is refused"),
    "eval_sampling_params.temperature": same("eval_temperature"),
    "eval_sampling_params.top_p": same("eval_top_p"),
    "eval_sampling_params.top_k": same("eval_top_k", {"-1": "0"}),
    "eval_sampling_params.min_p": same("eval_min_p"),
    "eval_sampling_params.repetition_penalty": lacks(features.EVAL_SAMPLING, "1", "1.0"),
    "eval_sampling_params.max_generate_length": same("eval_max_completion_length"),
    "eval_sampling_params.stop": together("nothing, where it is sampling_params.stop; others are refused"),
    "eval_sampling_params.additional_kwargs": lacks(features.EVAL_SAMPLING),
    **{
        f"{_POLICY}ddp_config.{name}": only("true", "gradients are reduced in float32, and summed by token weights")
        for name in ("grad_reduce_in_fp32", "average_in_collective")
    },
    f"{_POLICY}optimizer_config_kwargs.overlap_cpu_optimizer_d2h_h2d": Foreign(why=features.MEMORY),
    **aside.SKYRL,
}

PATTERNS: Mapping[str, Foreign] = {
    f"{_ENGINE}engine_init_kwargs.*": _ENGINE_WORDS,
    "engine_init_kwargs.*": _ENGINE_WORDS,
    f"{_ENGINE}delta_weight_sync.*": Foreign(why="how weights travel; here each push is whole, and checked by log-probs"),
    "policy.torch_profiler_config.*": Foreign(why=features.LOGS),
    "chat_template_kwargs.*": together("`chat_template_kwargs`"),
    "sampling_params.additional_kwargs.*": lacks(features.SAMPLING),
    "eval_sampling_params.additional_kwargs.*": lacks(features.EVAL_SAMPLING),
    "fully_async.simulate_*": lacks(features.AHEAD, "30.0", "0.0", instead=features.AHEAD_INSTEAD),
    "fully_async.*": Foreign(why="it does nothing without fully_async.enabled, which is refused"),
    "policy.fsdp_config.*": Foreign(why="it is of its FSDP workers: here Megatron shards"),
    "policy.language_model_only": where_true(
        "`freeze_vit` and `freeze_aligner` true; the tower is held all the same", freeze_vit=True, freeze_aligner=True
    ),
    "*language_model_only": Foreign(why="the tower is held, and does nothing where no prompt has pictures"),
    "policy.model.fake_int4_qat.enabled": lacks(features.QUANTIZED),
    "policy.model.fake_int4_qat.*": Foreign(why="it does nothing without fake_int4_qat.enabled, which is refused"),
    "policy.inference_only_init": lacks("the policy trains"),
    "*model_config_kwargs": lacks(features.BUILT),
    f"{_POLICY}optimizer_config_kwargs": lacks(_OF_OPTIMIZER),
    f"{_POLICY}optimizer_config_kwargs.*": lacks(_OF_OPTIMIZER),
    f"{_POLICY}transformer_config_kwargs": lacks(_RECOMPUTE),
    f"{_POLICY}transformer_config_kwargs.*": lacks(_RECOMPUTE),
    f"{_POLICY}hf_export_config.*": Foreign(why=features.FILES),
    f"{_POLICY}mtp_*": Foreign(why="it does nothing without mtp_num_layers, which is refused"),
    "mtp.*": Foreign(why="it does nothing without mtp.enabled, which is refused"),
    "ref.*": Foreign(why="the reference is the model as it was at the start, cut as the policy is"),
    f"{_ALGORITHM}clip_cov.*": Foreign(why="it does nothing without policy_loss_type clip_cov, which is refused"),
    f"{_ALGORITHM}kl_cov.*": Foreign(why="it does nothing without policy_loss_type kl_cov, which is refused"),
    f"{_ALGORITHM}dppo.*": Foreign(why="it does nothing without policy_loss_type dppo, which is refused"),
    f"{_ALGORITHM}off_policy_correction.*_mask_*": Foreign(why="it does nothing without sequence_mask_metric, which is refused"),
    "environment.skyrl_gym.*": Foreign(why="its environments are not there; environment and tools name yours"),
}

DEFAULTS: Sequence[Default] = (
    default("policy.optimizer_config.weight_decay", 0.01, weight_decay=0.01),
    default("policy.optimizer_config.adam_betas", "0.9 0.999", adam_beta2=0.999),
    default("max_prompt_length", 512),
    default("sampling_params.max_generate_length", 1024, max_completion_length=1024),
    Default(name="use_bias_correction_kl", theirs="it has none", native={"use_bias_correction_kl": False}),
    default(
        f"{_POLICY}transformer_config_kwargs.recompute_granularity",
        "full",
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    ),
    default("inference_engine.gpu_memory_utilization", 0.8, vllm_gpu_memory_utilization=0.8),
    default("inference_engine.max_num_seqs", 1024, vllm_max_num_seqs=1024),
    Default(name="max_ckpts_to_keep", theirs="all", native={"save_total_limit": None}),
    kept("strategy", "fsdp", "megatron"),
    kept("logger", "wandb", "none"),
)


def _dialect(name: str) -> Dialect:
    return Dialect(
        name=name,
        title="SkyRL",
        hides=NATIVE_SIZES,
        prefixes=("trainer.algorithm.", "trainer.", "generator.sampling_params.", "generator."),
        sections=("trainer.", "generator."),
        heads={
            "trainer.": """algorithm bf16 ckpt_interval critic epochs eval_interval export_path fully_async gradient_checkpointing logger
                logprobs_chunk_size max_ckpts_to_keep max_prompt_length max_tokens_per_microbatch max_training_steps mtp placement policy
                micro_train_batch_size_per_gpu policy_mini_batch_size project_name recompute_old_logprobs_per_minibatch ref resume_mode
                resume_path run_name seed strategy train_batch_size update_epochs_per_batch update_ref_every_epoch""",
            "generator.": """apply_overlong_filtering chat_template chat_template_kwargs eval_n_samples_per_prompt eval_sampling_params
                inference_engine max_input_length max_turns n_samples_per_prompt sampling_params step_wise_trajectories
                vision_language_generator zero_reward_on_non_stop""",
        },
        names=NAMES,
        patterns=PATTERNS,
        defaults=DEFAULTS,
        settle=settle(in_prompts=name == "skyrl"),
        trains_tower=True,
        settings=sizes(
            size("train_batch_size", 1024, "prompts in one rollout"),
            size("policy_mini_batch_size", 256, "prompts (the code) or completions (the guide) in one optimizer step"),
            size("micro_train_batch_size_per_gpu", 1, "completions in one forward on one DP rank"),
            size("n_samples_per_prompt", 5, "completions per prompt"),
            size("update_epochs_per_batch", 1, "passes over one rollout"),
        ),
    )


SKYRL, SKYRL_DOC = _dialect("skyrl"), _dialect("skyrl-doc")
