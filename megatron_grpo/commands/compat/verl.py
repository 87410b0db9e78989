"""Translation of verl beyond its table: readers of single names, and CONVERSIONS for several names together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_grpo.commands.compat.foreign_args import OFF, ForeignArgs, OtherTaskError, Reader, SettingChange
from megatron_grpo.commands.compat.settle import (
    OWN_EPISODES,
    adapted,
    drops_last,
    holds_out,
    idle,
    idle_schedule,
    in_steps,
    layout,
    listed,
    of_servers,
    of_template,
    of_vllm,
    one_eval_completion,
    soft_overlong,
    train_tower_with_images,
)
from megatron_grpo.commands.compat.tables import sentence
from megatron_grpo.run.config.table import TRUE, InvalidValueError


def resumed(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Refuse resume_from_path with resume_mode resume_path.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    if args.text("resume_mode", "auto") == "resume_path":
        raise InvalidValueError(f"({' '.join(words)}): {sentence('RESUMED_ELSEWHERE')}")
    return {}


def ranks(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Return world_size as nodes times GPUs per node.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    return {"world_size": args.integer("nnodes", 1) * args.integer("n_gpus_per_node", 8)}


def column(native: str) -> Reader:
    """Return a reader of a column name, for the native column `native`.

    Args:
        native: Native setting that names the column.
    """

    def reader(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
        return {} if list(words) == [native] else {"columns": {words[0]: native}}

    return reader


def sleep(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read free_cache_engine as sleep_level.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    return {"sleep_level": 2 if words[0].lower() in TRUE else 0}


def rank(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read the LoRA rank; 0 is no adapter.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    return {} if list(words) == ["0"] else {"tuner_type": "lora", "lora_rank": list(words)}


def _has_adapter(args: ForeignArgs) -> bool:
    ranks = [args.text(name, "0") for name in ("model.lora.rank", "model.lora_rank")]
    paths = [args.text(name, "none").lower() for name in ("model.lora_adapter_path", "model.lora.adapter_path")]
    return any(rank != "0" for rank in ranks) or any(path not in OFF for path in paths)


def of_adapter(native: str) -> Reader:
    """Return a reader for the setting `native` that has no effect without an adapter, as in verl.

    Args:
        native: Name of the setting.
    """
    return lambda words, args: {native: list(words)} if _has_adapter(args) else {}


def recompute_modules(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read a list of modules to recompute.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    return {"recompute_modules": listed(words)}


def tower(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read freeze_vision_tower, which covers the tower and its aligner.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    return dict.fromkeys(("freeze_vit", "freeze_aligner"), list(words))


def turns(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read max_assistant_turns, which has no effect without something that plays episodes.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    return {"max_turns": list(words)} if set(OWN_EPISODES) & set(args) and " ".join(words).lower() not in OFF else {}


def threshold(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read rollout_is_threshold.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    return {} if " ".join(words).lower() in OFF else {"rollout_importance_sampling_threshold": list(words)}


_AVERAGED = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "dr_grpo",
}
_ESTIMATORS = {
    "grpo": {},
    "grpo_vectorized": {},
    "rloo": {"advantage_estimator": "rloo", "scale_rewards": "none"},
    "rloo_vectorized": {"advantage_estimator": "rloo", "scale_rewards": "none"},
}
_OVER_TOKENS = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")  # the native estimators of these names differ
_OF_THE_SCHEDULE = {
    "lr_warmup_iters": "actor.optim.lr_warmup_steps",
    "lr_decay_iters": "actor.optim.lr_decay_steps",
    "lr_wsd_decay_iters": "actor.optim.lr_wsd_decay_steps",
}
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def _loss(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    mode, average = args.text("actor.policy_loss.loss_mode", "vanilla"), args.text("actor.loss_agg_mode", "token-mean")
    if average not in _AVERAGED:
        raise InvalidValueError(f"actor.loss_agg_mode ({average}) is not supported. Supported: {', '.join(_AVERAGED)}")
    high = args.number("actor.clip_ratio_high", 0.2)
    settings: dict[str, Any] = {"loss_type": _AVERAGED[average], "epsilon_high": high}
    if mode == "vanilla":
        settings["delta"] = args.number("actor.clip_ratio_c", 3.0)
    elif mode == "gspo":  # independent of loss_agg_mode
        settings |= {"loss_type": "grpo", "importance_sampling_level": "sequence_token"}
    elif mode == "sapo":
        settings = {"loss_type": "sapo"}
    elif mode == "cispo":
        if average != "token-mean" or values.get("epsilon", 0.2) < 1:
            raise InvalidValueError(
                "actor.policy_loss.loss_mode (cispo) has the lower bound 1 - clip_ratio_low of the ratio in verl; here it is a mean over "
                "tokens without a lower bound. Use clip_ratio_low 1 and loss_agg_mode token-mean"
            )
        settings = {"loss_type": "cispo", "epsilon_high": 1 + high, "epsilon": None}
    else:
        raise InvalidValueError(f"actor.policy_loss.loss_mode ({mode}) is not supported. Supported: vanilla, gspo, sapo, cispo")
    given_names = {"actor.policy_loss.loss_mode", "actor.loss_agg_mode"} & set(args)
    description = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
    yield SettingChange(
        values=settings,
        note=f"loss_mode {mode} with loss_agg_mode {average} is {description} here.",
        untyped=None if given_names else ("actor.loss_agg_mode", average),
    )
    if average == "token-mean" and mode != "gspo" and args.text("use_legacy_worker_impl", "auto") != "disable":
        note = "verl's legacy workers average token-mean over each micro-batch, then over these; here it is over all tokens of a step."
        yield SettingChange(note=note)
    if average == "seq-mean-token-sum-norm" and mode == "vanilla":
        yield SettingChange(
            note="verl's seq-mean-token-sum-norm does not divide by the number of completions in a micro-batch; dr_grpo does."
        )


def _kl(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    if "beta" in values:
        return
    in_loss, in_reward = args.is_true("actor.use_kl_loss"), args.is_true("algorithm.use_kl_in_reward")
    loss, reward = args.number("actor.kl_loss_coef", 0.001), args.number("algorithm.kl_ctrl.kl_coef", 0.001)
    in_loss, in_reward = in_loss and loss > 0, in_reward and reward > 0
    if in_loss and in_reward:
        raise InvalidValueError(
            "actor.use_kl_loss and algorithm.use_kl_in_reward are both true; the KL is in the loss or in the reward here"
        )
    if not in_loss:
        yield from idle(args, {"actor.kl_loss_coef": "0.001", "actor.kl_loss_type": "low_var_kl"}, required_setting="actor.use_kl_loss")
    if not in_loss and not in_reward:
        return
    name = "algorithm.kl_penalty" if in_reward else "actor.kl_loss_type"
    kind = args.text(name, "kl" if in_reward else "low_var_kl")
    if kind not in _KL or (in_reward and _KL[kind] != "k1"):
        raise InvalidValueError(f"{name} ({kind}) is not supported. Supported: {'kl' if in_reward else ', '.join(_KL)}")
    beta = reward if in_reward else loss
    settings = {"beta": beta, "kl_in_reward": in_reward} | ({} if in_reward else {"kl_estimator": _KL[kind]})
    yield SettingChange(
        values=settings, note=f"{name} {kind} with its coefficient is beta {beta:g}, {'in the reward' if in_reward else _KL[kind]}."
    )


def _advantages(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    name = args.text("algorithm.adv_estimator", "grpo")
    if "advantage_estimator" in values and name != "gae":
        return
    if name == "gae":
        raise OtherTaskError(f"algorithm.adv_estimator (gae): {sentence('CRITIC')}")
    if name not in _ESTIMATORS:
        remark = f". verl whitens over tokens; advantage_estimator {name} whitens over completions" if name in _OVER_TOKENS else ""
        raise InvalidValueError(f"algorithm.adv_estimator ({name}) is not supported. Supported: {', '.join(_ESTIMATORS)}{remark}")
    if _ESTIMATORS[name]:
        yield SettingChange(values=_ESTIMATORS[name])


def _correction(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    level = args.text("algorithm.rollout_correction.rollout_is", "none")
    if level in ("token", "sequence"):
        yield SettingChange(values={"rollout_importance_sampling_mode": f"{level}_truncate"})
    elif level not in ("none", "null"):
        raise InvalidValueError(f"algorithm.rollout_correction.rollout_is ({level}) is not supported. Supported: token, sequence")


def _packing(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    of_all = args.text("actor.ppo_micro_batch_size", "none")
    if of_all not in ("none", "null"):
        shared = 1
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            shared *= values.get(name, 1)
        ranks = values.get("world_size", 8) // max(1, shared)
        per_rank = args.integer("actor.ppo_micro_batch_size", 1) // max(1, ranks)
        if not per_rank:
            raise InvalidValueError(
                f"actor.ppo_micro_batch_size ({of_all}) is divided by the data-parallel size, which is larger ({ranks})"
            )
        note = f"ppo_micro_batch_size {of_all} is for all {ranks} data-parallel ranks: ppo_micro_batch_size_per_gpu {per_rank}."
        yield SettingChange(values={"ppo_micro_batch_size_per_gpu": per_rank}, note=note)
    if not args.is_true("actor.use_dynamic_bsz"):
        return
    tokens = args.integer("actor.ppo_max_token_len_per_gpu", 16384) * values.get("context_parallel_size", 1)
    settings = {"max_tokens_per_micro_batch": tokens, "ppo_micro_batch_size_per_gpu": 1}
    if "max_tokens_per_micro_batch" in values:
        settings.pop("max_tokens_per_micro_batch")
    yield SettingChange(
        values=settings, note=f"use_dynamic_bsz: micro-batches of up to {tokens} tokens, and ppo_micro_batch_size_per_gpu is not read."
    )


def _layout(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    yield from layout(values, args.text("actor.megatron.expert_tensor_parallel_size", "none"), shards_norms_by_itself="verl")
    if "actor.ulysses_sequence_parallel_size" in args and values.get("context_parallel_size", 1) > 1:
        yield SettingChange(
            note="ulysses_sequence_parallel_size is context_parallel_size: ring attention, not attention parallel over heads."
        )
    megatron = any(name.startswith("actor.megatron.") for name in args) or "megatron" in (
        args.text("config_name", "") + args.text("actor.strategy", "")
    )
    if megatron:
        return
    yield SettingChange(
        note="None of these names is of verl's Megatron workers: FSDP workers shard weights over all ranks. Here a rank holds complete "
        "weights, except with tensor_model_parallel_size, pipeline_model_parallel_size and expert_model_parallel_size.",
    )
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if args.is_true("model.enable_gradient_checkpointing", "true") and not set(recompute) & set(values):
        yield SettingChange(values=recompute, untyped=("model.enable_gradient_checkpointing", "true"))


def _data(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    yield from drops_last(values, title="verl")
    truncation = args.text("truncation", "error")
    strategy = {"error": "raise", "left": "left"}.get(truncation)
    if args.is_true("filter_overlong_prompts"):
        strategy = "delete"
    if strategy is None:
        raise InvalidValueError(f"data.truncation ({truncation}) is not supported. Supported: error, left")
    if "truncation_strategy" not in values and strategy != "raise":
        yield SettingChange(values={"truncation_strategy": strategy})
    buffer = "reward_model.reward_kwargs.overlong_buffer_cfg."
    if args.is_true(f"{buffer}enable"):
        longest = args.integer("reward_model.reward_kwargs.max_resp_len", args.integer("max_response_length", 512))
        yield from soft_overlong(values, longest, args.integer(f"{buffer}len", 0), "overlong_buffer_cfg")
    if "image_key" in args:
        yield from train_tower_with_images(values, title="verl", flag="image_key")
    yield from one_eval_completion(values, eval_temperature=0.0, eval_top_p=1.0, eval_top_k=0)
    if values.get("eval_steps") and not holds_out(values):
        yield SettingChange(values={"eval_steps": None}, note="trainer.test_freq has no effect without data.val_files.")


def _schedule(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    """Convert rollouts to optimizer steps: global_steps of verl's RayPPOTrainer, and the learning-rate schedule of its workers."""
    unread = [change for change in idle_schedule(values, args, style="constant")]
    yield from unread
    values = {name: value for name, value in values.items() if not any(name in change.values for change in unread)}
    prompts = args.integer("gen_batch_size", args.integer("train_batch_size", 1024))
    if prompts != args.integer("train_batch_size", 1024):
        raise InvalidValueError(
            f"data.gen_batch_size ({prompts}) is the number of prompts that verl loads for one rollout, instead of train_batch_size "
            f"({args.integer('train_batch_size', 1024)}). Set it as train_batch_size, and omit gen_batch_size"
        )
    rollouts = args.integer("train_batch_size", 1024) // max(
        1, args.integer("actor.ppo_mini_batch_size", args.integer("ppo_mini_batch_size", 256))
    )
    per_rollout = max(1, rollouts) * args.integer("actor.ppo_epochs", args.integer("ppo_epochs", 1))
    names = {"max_steps": "trainer.total_training_steps", "save_steps": "trainer.save_freq", "eval_steps": "trainer.test_freq"}
    unused = {} if holds_out(values) else {"eval_steps"}
    counted = {native: foreign for native, foreign in names.items() if native not in unused}
    yield from in_steps(values, per_rollout, counted | _OF_THE_SCHEDULE)
    if values.get("lr_warmup_iters"):
        yield SettingChange(values={"lr_warmup_fraction": None})
    if "actor.optim.min_lr_ratio" in args and args.text("actor.optim.min_lr_ratio", "0") not in ("none", "null"):
        yield SettingChange(values={"min_lr": values.get("lr", 1e-6) * args.number("actor.optim.min_lr_ratio", 0)})


def _lora(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    if values.get("adapters"):
        yield SettingChange(values={"tuner_type": "lora"})
    elif values.get("tuner_type") != "lora":
        return
    section = "model.lora." if "model.lora.rank" in args else "model."
    settings: dict[str, Any] = adapted(args, section)
    if values.get("adapters"):
        settings = {}
    elif f"{section}alpha" not in args and f"{section}lora_alpha" not in args:
        settings["lora_alpha"] = 32.0 if section == "model.lora." else 16.0
    if args.is_true("model.lora.merge"):
        settings["vllm_enable_lora"] = False
    yield SettingChange(values=settings)
    if section == "model.lora." and args.text("model.lora.type", "lora") != "canonical_lora":
        yield SettingChange(
            note="verl's lora.type lora has one matrix A for q, k and v, and one for gate and up; here each has its own, as in PEFT.",
        )


def _engine(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    yield from of_servers(values, program="verl")
    section = "rollout.engine_kwargs.vllm"
    yield from of_template(values, args, prefix="apply_chat_template_kwargs")
    yield from of_vllm(values, args, prefix=section, except_names=[f"{section}.{name}" for name in PROCESSOR_CACHES])


# EngineArgs of vLLM's image caches, which have their own rows.
PROCESSOR_CACHES = ("disable_mm_preprocessor_cache", "mm_processor_cache_gb")
CONVERSIONS = (_loss, _kl, _advantages, _correction, _packing, _layout, _data, _schedule, _lora, _engine)
