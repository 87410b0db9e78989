"""SkyRL: Hydra overrides (`trainer.policy.optimizer_config.lr=1e-6`) or nested YAML. Keys below lack `trainer.` and `generator.`.

Source: its SkyRLTrainConfig and what its trainer does with it. Its code counts a mini-batch in prompts, its guide in completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_grpo.settings.foreign import Change, Default, Dialect, Foreign, aside, default, kept, lacks, not_there, only, reads, same
from megatron_grpo.settings.table import TRUE, BadValue
from megatron_grpo.sizing.dialects import features
from megatron_grpo.sizing.dialects.vocabulary import NATIVE_SIZES, size, sizes

_ALGORITHM, _POLICY, _ENGINE, _LORA = "algorithm.", "policy.megatron_config.", "inference_engine.", "policy.model.lora."

# (policy_loss_type, loss_reduction) -> what it is here. All other pairs are refused.
_LOSSES: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("regular", "token_mean"): {"loss_type": "dapo"},
    ("regular", "sequence_mean"): {"loss_type": "grpo"},
    ("dual_clip", "token_mean"): {"loss_type": "dapo"},
    ("dual_clip", "sequence_mean"): {"loss_type": "grpo"},
    ("gspo", "token_mean"): {"loss_type": "dapo", "importance_sampling_level": "sequence_token"},
    ("gspo", "sequence_mean"): {"loss_type": "grpo", "importance_sampling_level": "sequence_token"},
    ("cispo", "token_mean"): {"loss_type": "cispo"},
    ("sapo", "sequence_mean"): {"loss_type": "sapo"},
}


def _one(text: Sequence[str]) -> list[str]:
    """The words of a Hydra list: "['a', 'b']" or [a,b]."""
    joined = " ".join(text).strip().removeprefix("[").removesuffix("]")
    return [part.strip().strip("'\"") for part in joined.split(",") if part.strip()]


def _dataset(native: str) -> Foreign:
    def read(words: Sequence[str], given: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
        found = [name for word in words for name in _one([word])]
        if len(found) > 1:
            raise BadValue(f"({' '.join(found)}) names {len(found)} data sets; one file, directory or Hub name is taken here")
        return {native: found[0]} if found else {}

    return reads(read, native)


def _betas(words: Sequence[str], given: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
    found = [part for word in words for part in _one([word])]
    if len(found) != 2:
        raise BadValue(f"needs two numbers, not {' '.join(words)!r}")
    return {"adam_beta1": found[0], "adam_beta2": found[1]}


def _ranks(words: Sequence[str], given: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
    numbers = [(given.get(f"placement.policy_{name}") or ["1"])[0] for name in ("num_nodes", "num_gpus_per_node")]
    if not all(number.isdigit() for number in numbers):
        raise BadValue(f"needs a whole number, not {' '.join(words)!r}")
    return {"world_size": int(numbers[0]) * int(numbers[1])}


def _stop(words: Sequence[str], given: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
    return {"stop": [] if list(words) == ["none"] else [part for word in words for part in _one([word])]}


def _environment(words: Sequence[str], given: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
    if not given.get("reward_funcs"):
        raise BadValue(f"({' '.join(words)}) is an environment of SkyRL, and not there: rewards come from reward_funcs. Add --reward_funcs")
    return {}


def _rank(words: Sequence[str], given: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
    return {"tuner_type": "full"} if list(words) == ["0"] else {"tuner_type": "lora", "lora_rank": list(words)}


def _routers(words: Sequence[str], given: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
    """They do not train under LoRA anyway."""
    is_lora = _text(given, f"{_LORA}rank", "0") != "0"
    return {"freeze_parameters_regex": r"\.gate\.weight$"} if words[0].lower() in TRUE and not is_lora else {}


def _replay(words: Sequence[str], given: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
    """Its trainer replays what its sampler returns."""
    return {"router_replay_mode": "R3"} if words[0].lower() in TRUE else {}


def _forever(native: str) -> Foreign:
    """-1 (and 0) is never, or no bound."""
    return same(native, {"-1": "0"})


def _text(given: Mapping[str, Sequence[str]], name: str, otherwise: str) -> str:
    return " ".join(given.get(name, [otherwise]))


def _is_true(given: Mapping[str, Sequence[str]], name: str, otherwise: str) -> bool:
    return _text(given, name, otherwise).lower() == "true"


_READ_TOGETHER = Foreign(read=lambda words, given: {})  # `settle` below reads these, several at a time

NAMES: Mapping[str, Foreign] = {
    "policy.model.path": same("model"),
    "project_name": same("project"),
    "run_name": same("run_name"),
    "policy.optimizer_config.lr": same("lr"),
    "policy.optimizer_config.adam_betas": reads(_betas, "adam_beta1 and adam_beta2"),
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
    f"{_POLICY}expert_tensor_parallel_size": _READ_TOGETHER,
    **{
        f"{_POLICY}transformer_config_kwargs.{name}": same(name)
        for name in ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
    },
    **{f"{_POLICY}ddp_config.{name}": same(name) for name in ("overlap_grad_reduce", "overlap_param_gather")},
    **{f"{_POLICY}optimizer_config_kwargs.{name}": same(name) for name in ("optimizer_cpu_offload", "optimizer_offload_fraction")},
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
    "data.train_data": _dataset("dataset"),
    "data.val_data": _dataset("eval_dataset"),
    "train_data": _dataset("dataset"),  # a file's section `data` is one of ours too, and disappears
    "val_data": _dataset("eval_dataset"),
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
    f"{_ALGORITHM}advantage_estimator": lacks("here it is grpo or rloo; its others are not there", "grpo", "rloo"),
    **{
        f"{_ALGORITHM}{name}": _READ_TOGETHER
        for name in (
            *("policy_loss_type", "loss_reduction", "clip_ratio_c", "use_kl_loss", "kl_loss_coef", "use_entropy_loss", "use_kl_in_reward"),
            *("entropy_loss_coef", "cispo.cispo_eps_clip_high", "use_tis", "tis_imp_ratio_cap", "off_policy_correction.tis_ratio_type"),
            *("off_policy_correction.token_tis_ratio_clip_high", "off_policy_correction.sequence_tis_ratio_clip_high"),
        )
    },
    # Asked for, and not there.
    "strategy": lacks(features.SHARDED_ELSEWHERE, "megatron"),
    "environment.env_class": reads(_environment, "reward_funcs"),
    "max_turns": lacks(features.TURNS, "1"),
    "placement.colocate_all": only("true", features.SERVER),
    f"{_LORA}rank": reads(_rank, "tuner_type lora and lora_rank"),
    f"{_LORA}alpha": _READ_TOGETHER,
    f"{_LORA}dropout": _READ_TOGETHER,
    f"{_LORA}target_modules": _READ_TOGETHER,
    f"{_LORA}exclude_modules": _READ_TOGETHER,
    f"{_LORA}init_method": only("kaiming", features.LORA_START),
    f"{_POLICY}lora_config.lora_type": _READ_TOGETHER,
    f"{_POLICY}lora_config.merge_lora": _READ_TOGETHER,
    "policy.sequence_parallel_size": lacks("sequences are cut by context_parallel_size", "1"),
    "sampling_params.min_p": lacks(features.SAMPLING, "0", "0.0"),
    "sampling_params.repetition_penalty": lacks(features.SAMPLING, "1", "1.0"),
    "sampling_params.additional_kwargs": lacks(features.SAMPLING),
    "ref.model.path": lacks("the reference model is the model as it was at the start"),
    "update_ref_every_epoch": lacks("the reference follows the policy with sync_ref_model alone"),
    f"{_POLICY}virtual_pipeline_model_parallel_size": same("virtual_pipeline_model_parallel_size"),
    f"{_POLICY}moe_router_load_balancing_type": lacks("load-balancing losses depend on the layout"),
    f"{_POLICY}moe_enable_routing_replay": reads(_replay, "router_replay_mode"),
    f"{_POLICY}freeze_moe_router": reads(_routers, "freeze_parameters_regex"),
    f"{_POLICY}mtp_num_layers": lacks(features.MTP, "0"),
    f"{_ALGORITHM}dynamic_sampling.type": lacks("its ways to resample are not there; dynamic_sample draws further prompts for dead groups"),
    f"{_ALGORITHM}advantage_batch_normalize": lacks("advantages are normalised by advantage_estimator and scale_rewards alone"),
    f"{_ALGORITHM}temperature": lacks("log-probs are those of the sampling temperature"),
    f"{_ALGORITHM}kl_ctrl.type": lacks("beta is constant", "fixed"),
    f"{_ALGORITHM}off_policy_correction.sequence_mask_metric": lacks("of its corrections tis_ratio_type is translated"),
    f"{_ALGORITHM}cispo.cispo_eps_clip_low": lacks("the ratio has no lower bound in cispo here", "1", "1.0"),
    f"{_ALGORITHM}cispo.cispo_anchor": only("old", "the ratio is taken against old log-probs"),
    "fully_async.enabled": lacks(features.AHEAD),
    "mtp.enabled": lacks(features.MTP),
    "recompute_old_logprobs_per_minibatch": only("true", "old log-probs are those of the weights that sampled"),
    "resume_path": lacks(features.RESUMED_ELSEWHERE),
    "zero_reward_on_non_stop": lacks("a truncated completion keeps its reward; overlong_filter takes it out of the loss"),
    "step_wise_trajectories": lacks(features.TURNS),
    "vision_language_generator": lacks("pictures come in the column images, and nothing has to be chosen for them", "false"),
    "max_input_length": lacks("max_prompt_length bounds what goes in"),
    "eval_n_samples_per_prompt": same("num_generations_eval"),
    "chat_template.name_or_path": lacks("prompts are written by the model's own chat template"),
    f"{_ENGINE}backend": lacks("sampling is by vLLM alone", "vllm"),
    "backend": lacks("sampling is by vLLM alone", "vllm"),
    f"{_ENGINE}run_engines_locally": only("true", features.SERVER),
    "run_engines_locally": only("true", features.SERVER),
    **{f"{_ENGINE}{name}": lacks(features.SERVER) for name in ("external_proxy_url", "external_server_urls", "enable_pd")},
    **{
        f"{_ENGINE}{name}": lacks("engines are split by tensor parallelism alone", "1")
        for name in ("pipeline_parallel_size", "expert_parallel_size", "data_parallel_size")
    },
    f"{_ENGINE}enable_return_routed_experts": _READ_TOGETHER,
    f"{_ENGINE}speculative_config": lacks("speculative decoding is not there"),
    **not_there(
        "of its corrections tis_ratio_type is translated",
        *(
            f"{_ALGORITHM}off_policy_correction.{name}_threshold_{end}"
            for name in ("outlier_token_is", "token_mask_is")
            for end in ("low", "high")
        ),
    ),
    **not_there(features.CRITIC, "critic.model.path", "critic.optimizer_config.lr", f"{_ALGORITHM}value_clip"),
    **aside(
        *(
            "logger",
            "tags",
            "log_path",
            "ckpt_path",
            "hf_save_interval",
            "dump_data_batch",
            "dump_eval_results",
        ),
        *(
            "print_example_interval",
            "num_logger_eval_samples",
            "num_logger_train_samples",
            "log_example_interval",
            "enable_ray_gpu_monitor",
        ),
        *("micro_forward_batch_size_per_gpu", "use_sample_packing", "remove_microbatch_padding", "flash_attn", "eval_batch_size"),
        *("eval_before_train", "critic_mini_batch_size", "gradient_checkpointing", "gradient_checkpointing_use_reentrant"),
        *("use_expandable_segments", "disable_fast_tokenizer", "sequence_parallel_backend", "vocab_entropy_chunk_size", "batched"),
        *("vocab_entropy_chunk_memory_mb", "fused_lm_head_logprob", "fused_lm_head_logprob_backend", "use_cache_salt"),
        *("use_conversation_multi_turn", "append_eos_token_after_stop_str_in_multi_turn", "sampling_params.logprobs"),
        *("placement.colocate_policy_ref", "placement.ref_num_nodes", "placement.ref_num_gpus_per_node", "placement.critic_num_nodes"),
        *("placement.critic_num_gpus_per_node", "data.dataloader.num_workers", "data.dataloader.persistent_workers"),
        *("policy.optimizer_config.offload_after_step", "policy.use_torch_compile", "policy.record_memory", "ref.sequence_parallel_size"),
        *(f"{_POLICY}{name}" for name in ("moe_grouped_gemm", "moe_router_dtype", "moe_per_layer_logging", "empty_cuda_cache")),
        *(f"{_POLICY}{name}" for name in ("dist_ckpt_optim_fully_reshardable", "async_dist_ckpt_strategy")),
        *(f"{_LORA}{name}" for name in ("lora_sync_path", "max_loras", "max_cpu_loras")),
        f"{_POLICY}transformer_config_kwargs.gradient_accumulation_fusion",
        *(f"ref.megatron_config.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model")),
        "ref.megatron_config.expert_tensor_parallel_size",
        *(f"{_ENGINE}{name}" for name in ("num_engines", "weight_sync_backend", "async_engine", "enable_chunked_prefill")),
        *(f"{_ENGINE}{name}" for name in ("max_num_batched_tokens", "vllm_v1_disable_multiproc", "enable_ray_prometheus_stats")),
        *(f"{_ENGINE}{name}" for name in ("distributed_executor_backend", "served_model_name", "weight_transfer_threshold_cuda_ipc_GB")),
        *("num_inference_engines", "weight_sync_backend", "async_engine", "enable_chunked_prefill", "max_num_batched_tokens"),
        *("vllm_v1_disable_multiproc", "environment.skyrl_gym.max_env_workers", f"{_ALGORITHM}value_head_prefix"),
        *(f"{_ALGORITHM}{name}" for name in ("lambd", "gamma", "kl_ctrl.kl_target", "kl_ctrl.horizon", "zero_variance_filter_tol")),
        *(f"{_ALGORITHM}dynamic_sampling.{name}" for name in ("max_sample_batches", "min_replace_ratio")),
    ),
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
    default("ckpt_interval", 10, save_steps=10),
    Default(name="max_ckpts_to_keep", theirs="all", native={"save_total_limit": None}),
    kept("strategy", "fsdp", "megatron"),
    kept("logger", "wandb", "none"),
)


def settle(values: Mapping[str, Any], given: Mapping[str, Sequence[str]]) -> Iterator[Change]:
    """The loss, the KL and the corrections, each of which SkyRL says with several names; and what its sizes imply."""
    kind, reduction = _text(given, f"{_ALGORITHM}policy_loss_type", "regular"), _text(given, f"{_ALGORITHM}loss_reduction", "token_mean")
    if "loss_type" not in values:
        loss = _LOSSES.get((kind, reduction))
        if loss is None:
            raise BadValue(
                f"algorithm.policy_loss_type ({kind}) with algorithm.loss_reduction ({reduction}) is not there. "
                f"There are: {', '.join(f'{a} with {b}' for a, b in _LOSSES)}"
            )
        if kind == "dual_clip":
            loss = {**loss, "delta": float(_text(given, f"{_ALGORITHM}clip_ratio_c", "3.0"))}
        if kind == "cispo":
            loss = {**loss, "epsilon_high": 1 + float(_text(given, f"{_ALGORITHM}cispo.cispo_eps_clip_high", "4.0"))}
        said = ", ".join(f"{name} {value}" for name, value in loss.items())
        typed = {f"{_ALGORITHM}policy_loss_type", f"{_ALGORITHM}loss_reduction"} & set(given)
        yield Change(
            values=loss,
            note=f"policy_loss_type {kind} with loss_reduction {reduction} is {said} here.",
            untyped=None if typed else ("algorithm.loss_reduction", reduction),
        )
    if "beta" not in values:
        in_loss, in_reward = _is_true(given, f"{_ALGORITHM}use_kl_loss", "true"), _is_true(given, f"{_ALGORITHM}use_kl_in_reward", "false")
        typed = {f"{_ALGORITHM}{name}" for name in ("use_kl_loss", "use_kl_in_reward", "kl_loss_coef")} & set(given)
        beta = float(_text(given, f"{_ALGORITHM}kl_loss_coef", "0.001")) if in_loss or in_reward else 0.0
        yield Change(
            values={"beta": beta, "kl_in_reward": in_reward and beta > 0},
            note=f"use_kl_loss ({str(in_loss).lower()}) and kl_loss_coef make beta {beta:g} here.",
            untyped=None if typed else ("algorithm.kl_loss_coef", f"{beta:g}"),
        )
    if _is_true(given, f"{_ALGORITHM}use_entropy_loss", "false"):
        yield Change(values={"entropy_coef": float(_text(given, f"{_ALGORITHM}entropy_loss_coef", "0.01"))})
    yield from _correction(given)
    estimator = _text(given, f"{_ALGORITHM}advantage_estimator", "grpo")
    if estimator == "rloo":
        yield Change(values={"advantage_estimator": "rloo", "scale_rewards": "none"})
    yield from _layout(values, given)
    if values.get("tuner_type") == "lora":
        yield from _lora(values, given)
    if values.get("eval_steps") and not values.get("eval_dataset"):
        yield Change(values={"eval_steps": None}, note=f"eval_interval ({values['eval_steps']}) does nothing without data.val_data.")


def _correction(given: Mapping[str, Sequence[str]]) -> Iterator[Change]:
    section = f"{_ALGORITHM}off_policy_correction."
    level = _text(given, f"{section}tis_ratio_type", "none")
    if level in ("token", "sequence"):
        cap = float(_text(given, f"{section}{level}_tis_ratio_clip_high", "2.0" if level == "token" else "5.0"))
        yield Change(values={"rollout_importance_sampling_mode": f"{level}_truncate", "rollout_importance_sampling_threshold": cap})
    elif level not in ("none", "null"):
        raise BadValue(f"{section}tis_ratio_type ({level}) is not there. It is token or sequence")
    elif _is_true(given, f"{_ALGORITHM}use_tis", "false"):
        cap = float(_text(given, f"{_ALGORITHM}tis_imp_ratio_cap", "2.0"))
        yield Change(values={"rollout_importance_sampling_mode": "token_truncate", "rollout_importance_sampling_threshold": cap})


def _lora(values: Mapping[str, Any], given: Mapping[str, Sequence[str]]) -> Iterator[Change]:
    alpha = float(_text(given, f"{_LORA}alpha", "16"))
    typed = f"{_LORA}alpha" in given
    if "lora_alpha" not in values:
        yield Change(values={"lora_alpha": alpha}, untyped=None if typed else ("policy.model.lora.alpha", "16"))
    found: dict[str, Any] = {"lora_dropout": float(_text(given, f"{_LORA}dropout", "0"))}
    for name in ("target_modules", "exclude_modules"):
        words = [part for word in given.get(f"{_LORA}{name}", ()) for part in _one([word]) if part not in ("none", "null")]
        found |= {name: words} if words else {}
    yield Change(values={name: value for name, value in found.items() if name not in values})
    if _text(given, f"{_POLICY}lora_config.lora_type", "lora") == "lora":
        yield Change(
            values={},
            note="SkyRL's lora_type lora has one matrix A for q, k and v, and one for gate and up; here each has its own, as in PEFT "
            "and in its canonical_lora.",
        )
    if _is_true(given, f"{_POLICY}lora_config.merge_lora", "true"):
        yield Change(
            values={},
            note="SkyRL's lora_config.merge_lora true pushes merged weights to vLLM, where bfloat16 rounds most of the first updates away. "
            "Here it gets the adapter; vllm_enable_lora false pushes merged weights.",
        )


def _layout(values: Mapping[str, Any], given: Mapping[str, Sequence[str]]) -> Iterator[Change]:
    tensor = values.get("tensor_model_parallel_size", 1)
    if tensor > 1 and "sequence_parallel" not in values:
        yield Change(
            values={"sequence_parallel": True}, note="SkyRL shards norms over tensor-parallel ranks by itself: sequence_parallel true."
        )
    expert = _text(given, f"{_POLICY}expert_tensor_parallel_size", "none")
    if "expert_tensor_parallel_size" not in values:
        yield Change(values={"expert_tensor_parallel_size": tensor if expert in ("none", "null") else int(expert)})


def _dialect(name: str) -> Dialect:
    return Dialect(
        name=name,
        title="SkyRL",
        hides=NATIVE_SIZES,
        prefixes=("trainer.algorithm.", "trainer.", "generator.sampling_params.", "generator."),
        sections=("trainer.", "generator."),
        names=NAMES,
        defaults=DEFAULTS,
        settle=settle,
        settings=sizes(
            size("train_batch_size", 1024, "prompts in one rollout"),
            size("policy_mini_batch_size", 256, "prompts (the code) or completions (the guide) in one optimizer step"),
            size("micro_train_batch_size_per_gpu", 1, "completions in one forward on one DP rank"),
            size("n_samples_per_prompt", 5, "completions per prompt"),
            size("update_epochs_per_batch", 1, "passes over one rollout"),
        ),
    )


SKYRL, SKYRL_DOC = _dialect("skyrl"), _dialect("skyrl-doc")
