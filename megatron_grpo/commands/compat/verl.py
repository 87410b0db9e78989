"""Translation of verl beyond its table: readers of single names, and steps for several names together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_grpo.commands.compat.foreign_args import OFF, FrameworkArgs, OtherTaskError, SettingChange
from megatron_grpo.commands.compat.settle import adapted, find_dp_size, holds_out, idle, idle_schedule, in_steps, listed
from megatron_grpo.commands.compat.tables import sentence
from megatron_grpo.run.config.table import InvalidValueError


def resumed(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Refuse resume_from_path with resume_mode resume_path."""
    if args.text("resume_mode") == "resume_path":
        raise InvalidValueError(f"({' '.join(words)}): {sentence('RESUMED_ELSEWHERE')}")
    return {}


def ranks(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Return world_size as nodes times GPUs per node."""
    return {"world_size": args.integer("nnodes") * args.integer("n_gpus_per_node")}


def _has_adapter(args: FrameworkArgs) -> bool:
    ranks = [args.text(name) for name in ("model.lora.rank", "model.lora_rank")]
    paths = [args.text(name).lower() for name in ("model.lora_adapter_path", "model.lora.adapter_path")]
    return any(rank != "0" for rank in ranks) or any(path not in OFF for path in paths)


def make_adapter_reader(words: Sequence[str], args: FrameworkArgs, native: str) -> Mapping[str, Any]:
    """Read a setting that has no effect without an adapter, as in verl."""
    return {native: list(words)} if _has_adapter(args) else {}


def recompute_modules(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read a list of modules to recompute."""
    return {"recompute_modules": listed(words)}


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
_SCHEDULE_ARGS = {
    "lr_warmup_iters": "actor.optim.lr_warmup_steps",
    "lr_decay_iters": "actor.optim.lr_decay_steps",
    "lr_wsd_decay_iters": "actor.optim.lr_wsd_decay_steps",
}
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def settle_loss(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Translate loss_mode with loss_agg_mode."""
    average, high = args.choice("actor.loss_agg_mode", _AVERAGED), args.number("actor.clip_ratio_high")
    mode = args.choice("actor.policy_loss.loss_mode", ("vanilla", "gspo", "sapo", "cispo"))
    settings: dict[str, Any] = {"loss_type": _AVERAGED[average], "epsilon_high": high}
    if mode == "vanilla":
        settings["delta"] = args.number("actor.clip_ratio_c")
    elif mode == "gspo":  # independent of loss_agg_mode
        settings |= {"loss_type": "grpo", "importance_sampling_level": "sequence_token"}
    elif mode == "sapo":
        settings = {"loss_type": "sapo"}
    else:
        if average != "token-mean" or values.get("epsilon", 0.2) < 1:
            raise InvalidValueError(
                "actor.policy_loss.loss_mode (cispo) has the lower bound 1 - clip_ratio_low of the ratio in verl; here it is a mean over "
                "tokens without a lower bound. Use clip_ratio_low 1 and loss_agg_mode token-mean"
            )
        settings = {"loss_type": "cispo", "epsilon_high": 1 + high, "epsilon": None}
    given_names = {"actor.policy_loss.loss_mode", "actor.loss_agg_mode"} & set(args)
    description = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
    yield SettingChange(
        values=settings,
        note=f"loss_mode {mode} with loss_agg_mode {average} is {description} here.",
        untyped=None if given_names else ("actor.loss_agg_mode", average),
    )


def settle_kl(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Translate the KL, which is in the loss or in the reward."""
    if "beta" in values:
        return
    in_loss, in_reward = args.is_true("actor.use_kl_loss"), args.is_true("algorithm.use_kl_in_reward")
    loss, reward = args.number("actor.kl_loss_coef"), args.number("algorithm.kl_ctrl.kl_coef")
    in_loss, in_reward = in_loss and loss > 0, in_reward and reward > 0
    if in_loss and in_reward:
        raise InvalidValueError(
            "actor.use_kl_loss and algorithm.use_kl_in_reward are both true; the KL is in the loss or in the reward here"
        )
    if not in_loss:
        yield from idle(args, "actor.kl_loss_coef actor.kl_loss_type", "actor.use_kl_loss")
    if not in_loss and not in_reward:
        return
    name = "algorithm.kl_penalty" if in_reward else "actor.kl_loss_type"
    kind = args.text(name)
    if kind not in _KL or (in_reward and _KL[kind] != "k1"):
        raise InvalidValueError(f"{name} ({kind}) is not supported. Supported: {'kl' if in_reward else ', '.join(_KL)}")
    beta = reward if in_reward else loss
    settings = {"beta": beta, "kl_in_reward": in_reward} | ({} if in_reward else {"kl_estimator": _KL[kind]})
    yield SettingChange(
        values=settings, note=f"{name} {kind} with its coefficient is beta {beta:g}, {'in the reward' if in_reward else _KL[kind]}."
    )


def settle_advantages(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Translate adv_estimator."""
    name = args.text("algorithm.adv_estimator")
    if "advantage_estimator" in values and name != "gae":
        return
    if name == "gae":
        raise OtherTaskError(f"algorithm.adv_estimator (gae): {sentence('CRITIC')}")
    remark = f". verl whitens over tokens; advantage_estimator {name} whitens over completions" if name in _OVER_TOKENS else ""
    yield SettingChange(values=_ESTIMATORS[args.choice("algorithm.adv_estimator", _ESTIMATORS, remark)])


def settle_correction(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Translate rollout_correction.rollout_is."""
    name = "algorithm.rollout_correction.rollout_is"
    if args.text(name) not in ("none", "null"):
        yield SettingChange(values={"rollout_importance_sampling_mode": f"{args.choice(name, ('token', 'sequence'))}_truncate"})


def settle_packing(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Translate the size of a micro-batch, in completions or in tokens."""
    total_size = args.text("actor.ppo_micro_batch_size")
    if total_size not in ("none", "null"):
        ranks = find_dp_size(values)
        per_rank = args.integer("actor.ppo_micro_batch_size") // ranks
        if not per_rank:
            raise InvalidValueError(
                f"actor.ppo_micro_batch_size ({total_size}) is divided by the data-parallel size, which is larger ({ranks})"
            )
        note = f"ppo_micro_batch_size {total_size} is for all {ranks} data-parallel ranks: ppo_micro_batch_size_per_gpu {per_rank}."
        yield SettingChange(values={"ppo_micro_batch_size_per_gpu": per_rank}, note=note)
    if not args.is_true("actor.use_dynamic_bsz"):
        return
    tokens = args.integer("actor.ppo_max_token_len_per_gpu") * values.get("context_parallel_size", 1)
    settings = {"max_tokens_per_micro_batch": tokens, "ppo_micro_batch_size_per_gpu": 1}
    if "max_tokens_per_micro_batch" in values:
        settings.pop("max_tokens_per_micro_batch")
    yield SettingChange(
        values=settings, note=f"use_dynamic_bsz: micro-batches of up to {tokens} tokens, and ppo_micro_batch_size_per_gpu is not read."
    )


def settle_fsdp(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Note how weights are sharded here, for a run without a name of verl's Megatron workers."""
    names = args.text("config_name") + args.text("actor.strategy")
    if "megatron" in names or any(name.startswith("actor.megatron.") for name in args):
        return
    yield SettingChange(
        note="None of these names is of verl's Megatron workers: FSDP workers shard weights over all ranks. Here a rank holds complete "
        "weights, except with tensor_model_parallel_size, pipeline_model_parallel_size and expert_model_parallel_size.",
    )
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if args.is_true("model.enable_gradient_checkpointing") and not set(recompute) & set(values):
        yield SettingChange(values=recompute, untyped=("model.enable_gradient_checkpointing", "true"))


def settle_truncation(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Translate truncation and filter_overlong_prompts."""
    truncation = "delete" if args.is_true("filter_overlong_prompts") else args.text("truncation")
    strategy = {"error": "raise"}.get(truncation, truncation)
    if strategy not in ("raise", "left", "delete"):
        raise InvalidValueError(f"data.truncation ({truncation}) is not supported. Supported: error, left")
    if "truncation_strategy" not in values and strategy != "raise":
        yield SettingChange(values={"truncation_strategy": strategy})


def settle_schedule(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Convert rollouts to optimizer steps: global_steps of verl's RayPPOTrainer, and the learning-rate schedule of its workers."""
    unread = list(idle_schedule(values, args, "constant"))
    yield from unread
    values = {name: value for name, value in values.items() if not any(name in change.values for change in unread)}
    batch = args.integer("train_batch_size")
    prompts = args.integer("gen_batch_size", batch)
    if prompts != batch:
        raise InvalidValueError(
            f"data.gen_batch_size ({prompts}) is the number of prompts that verl loads for one rollout, instead of train_batch_size "
            f"({batch}). Set it as train_batch_size, and omit gen_batch_size"
        )
    rollouts = batch // max(1, args.integer("actor.ppo_mini_batch_size", args.integer("ppo_mini_batch_size")))
    per_rollout = max(1, rollouts) * args.integer("actor.ppo_epochs", args.integer("ppo_epochs"))
    names = {"max_steps": "trainer.total_training_steps", "save_steps": "trainer.save_freq", "eval_steps": "trainer.test_freq"}
    unused = {} if holds_out(values) else {"eval_steps"}
    counted = {native: foreign for native, foreign in names.items() if native not in unused}
    yield from in_steps(values, per_rollout, counted | _SCHEDULE_ARGS)
    if values.get("lr_warmup_iters"):
        yield SettingChange(values={"lr_warmup_fraction": None})
    if "actor.optim.min_lr_ratio" in args and args.text("actor.optim.min_lr_ratio") not in ("none", "null"):
        yield SettingChange(values={"min_lr": values.get("lr", 1e-6) * args.number("actor.optim.min_lr_ratio")})


def settle_lora(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Take verl's defaults of an adapter."""
    section = "model.lora." if "model.lora.rank" in args else "model."
    settings: dict[str, Any] = {} if values.get("adapters") else adapted(args, section)
    if not (values.get("adapters") or f"{section}alpha" in args or f"{section}lora_alpha" in args):
        settings["lora_alpha"] = 32.0 if section == "model.lora." else 16.0
    yield SettingChange(values=settings)
