"""Translation of SkyRL beyond its table: readers of single names, and steps for several names together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_grpo.commands.compat.foreign_args import OFF, FrameworkArgs, SettingChange
from megatron_grpo.commands.compat.settle import OWN_EPISODES, adapted, holds_out, idle, in_steps, listed, set_expert_parallel
from megatron_grpo.commands.compat.tables import read_steps, sentence
from megatron_grpo.run.config.table import InvalidValueError

# (policy_loss_type, loss_reduction) -> native settings. All other pairs are refused.
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
_MEGATRON_ARGS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
)
_COUNTED_IN_ROLLOUTS = {"max_steps": "max_training_steps", "save_steps": "ckpt_interval", "eval_steps": "eval_interval"}


def ranks(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Return world_size as nodes times GPUs per node."""
    numbers = [(args.get(f"placement.policy_{name}") or ["1"])[0] for name in ("num_nodes", "num_gpus_per_node")]
    if not all(number.isdigit() for number in numbers):
        raise InvalidValueError(f"must be a whole number, not {' '.join(words)!r}")
    return {"world_size": int(numbers[0]) * int(numbers[1])}


def stop(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read stop strings."""
    return {"stop": [] if list(words) == ["none"] else [part for word in words for part in listed([word])]}


def turns(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read max_turns; more than one turn needs environment or tools."""
    if list(words) == ["1"]:
        return {}
    if not set(OWN_EPISODES) & set(args):
        raise InvalidValueError(f"({' '.join(words)}): {sentence('TURNS')}")
    return {"max_turns": list(words)}


def settle_loss(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Translate policy_loss_type with loss_reduction."""
    if "loss_type" in values:
        return
    kind, reduction = args.text("algorithm.policy_loss_type"), args.text("algorithm.loss_reduction")
    loss = _LOSSES.get((kind, reduction))
    if kind in ("regular", "dual_clip") and reduction == "seq_mean_token_sum_norm":
        loss = {"loss_type": "dr_grpo"}
        divisor, longest = args.integer("algorithm.max_seq_len"), args.integer("sampling_params.max_generate_length")
        if divisor != longest:
            raise InvalidValueError(
                f"algorithm.loss_reduction (seq_mean_token_sum_norm) divides by algorithm.max_seq_len ({divisor or 'not set'}), and "
                "dr_grpo by "
                f"max_completion_length ({longest}). Use algorithm.max_seq_len {longest}, or loss_type dr_grpo"
            )
    elif "algorithm.max_seq_len" in args:
        yield SettingChange(note="max_seq_len has no effect without loss_reduction seq_mean_token_sum_norm, in both systems.")
    if loss is None:
        raise InvalidValueError(
            f"algorithm.policy_loss_type ({kind}) with algorithm.loss_reduction ({reduction}) is not supported. Supported: "
            f"{', '.join(f'{a} with {b}' for a, b in _LOSSES)}"
        )
    if kind == "dual_clip":
        loss = {**loss, "delta": args.number("algorithm.clip_ratio_c")}
    if kind == "cispo":
        loss = {**loss, "epsilon_high": 1 + args.number("algorithm.cispo.cispo_eps_clip_high")}
    settings = ", ".join(f"{name} {value}" for name, value in loss.items())
    given_names = {"algorithm.policy_loss_type", "algorithm.loss_reduction"} & set(args)
    yield SettingChange(
        values=loss,
        note=f"policy_loss_type {kind} with loss_reduction {reduction} is {settings} here.",
        untyped=None if given_names else ("algorithm.loss_reduction", reduction),
    )


def settle_kl(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Translate the KL, which is in the loss or in the reward."""
    if "beta" in values:
        return
    in_loss, in_reward = args.is_true("algorithm.use_kl_loss"), args.is_true("algorithm.use_kl_in_reward")
    given_names = {"algorithm.use_kl_loss", "algorithm.use_kl_in_reward", "algorithm.kl_loss_coef"} & set(args)
    beta = args.number("algorithm.kl_loss_coef") if in_loss or in_reward else 0.0
    yield SettingChange(
        values={"beta": beta, "kl_in_reward": in_reward and beta > 0},
        note=f"use_kl_loss ({str(in_loss).lower()}) and kl_loss_coef make beta {beta:g} here.",
        untyped=None if given_names else ("algorithm.kl_loss_coef", f"{beta:g}"),
    )


def settle_layout(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Apply the layout of SkyRL's strategies."""
    ulysses = args.integer("policy.sequence_parallel_size")
    strategy = args.text("strategy", "fsdp" if ulysses > 1 else "")  # fsdp is SkyRL's default
    if strategy in ("fsdp", "fsdp2"):
        unread = [name for name in _MEGATRON_ARGS if values.get(name, 1) not in (1, False)]
        remark = f" {' and '.join(unread)} {'are' if len(unread) > 1 else 'is'} not read with it, in both systems." if unread else ""
        if ulysses > 1:
            remark += " sequence_parallel_size is context_parallel_size: ring attention here, not attention parallel over heads."
        yield SettingChange(
            values={**dict.fromkeys(unread), "context_parallel_size": ulysses},
            note=f"strategy {strategy} shards weights over all ranks. Here a rank holds complete weights, except with "
            f"tensor_model_parallel_size, pipeline_model_parallel_size and expert_model_parallel_size.{remark}",
        )
        values = {name: value for name, value in values.items() if name not in unread}
    elif strategy not in ("", "megatron"):
        raise InvalidValueError(f"trainer.strategy ({strategy}) is not supported. Supported: megatron, fsdp, fsdp2")
    elif ulysses > 1:
        raise InvalidValueError("policy.sequence_parallel_size splits sequences only with FSDP, in SkyRL too. Use context_parallel_size")
    if not args.is_true("gradient_checkpointing"):
        yield SettingChange(values=dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers")))
    for step in read_steps("skyrl", "tensor_parallel_that_shards_norms"):
        yield from step(values, args)
    yield from set_expert_parallel(values, args, "policy.megatron_config.expert_tensor_parallel_size")


def _is_same(first: str, second: str) -> bool:
    try:
        return float(first) == float(second)
    except ValueError:
        return first == second


def settle_input_bound(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Compare max_input_length, which limits a turn, with max_prompt_length."""
    longest, bound = args.text("max_prompt_length"), args.text("max_input_length")
    if {"environment", "tools"} & set(args):
        if bound:
            note = (
                "max_input_length limits the input of each turn in SkyRL; here max_completion_length limits the whole episode after its "
                "prompt, including tokens of the environment."
            )
            yield SettingChange(note=note)
    elif bound not in ("", longest) and args.text("max_turns") == "1":  # SkyRL refuses this too for a single turn
        raise InvalidValueError(
            f"max_input_length ({bound}) differs from max_prompt_length ({longest}), which limits the input. With one turn both are the "
            f"same, in SkyRL too. Use generator.max_input_length {longest}"
        )


def settle_counterparts(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Refuse names whose values differ from those of their counterparts, which are used for both here."""
    for name, counterpart, reason in (
        ("ref.model.path", "policy.model.path", "the reference is the model at the start"),
        ("algorithm.temperature", "sampling_params.temperature", "log-probs are those of the sampling temperature"),
    ):
        value, other = args.text(name), args.text(counterpart)
        if value.lower() not in OFF and not _is_same(value, other):
            raise InvalidValueError(f"{name} ({value}) differs from {counterpart} ({other}), and {reason}")
    stop, eval_stop = (listed(args.get(f"{name}sampling_params.stop", ())) for name in ("", "eval_"))
    if eval_stop not in ([], ["none"], ["null"], stop):
        raise InvalidValueError(
            f"eval_sampling_params.stop ({' '.join(eval_stop)}) differs from sampling_params.stop, which applies to both here"
        )
    yield from ()


def settle_steps(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Convert train batches, which SkyRL's trainer counts (global_step of its RayPPOTrainer), to optimizer steps."""
    in_prompts = values["dialect"] == "skyrl"  # its guide counts a mini-batch in completions
    rollout = args.integer("train_batch_size") * (1 if in_prompts else args.integer("n_samples_per_prompt"))
    passes = args.integer("update_epochs_per_batch")
    per_rollout = max(1, rollout // max(1, args.integer("policy_mini_batch_size"))) * passes
    yield from in_steps(values, per_rollout, _COUNTED_IN_ROLLOUTS)
    if "save_steps" not in values:
        yield SettingChange(values={"save_steps": 10 * per_rollout}, untyped=("ckpt_interval", "10"))
    if "eval_steps" not in values and holds_out(values):
        yield SettingChange(values={"eval_steps": 5 * per_rollout}, untyped=("eval_interval", "5"))


def settle_correction(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Translate off_policy_correction, and use_tis of older versions."""
    section = "algorithm.off_policy_correction."
    level = args.text(f"{section}tis_ratio_type")
    if level not in ("none", "null"):
        level = args.choice(f"{section}tis_ratio_type", ("token", "sequence"))
        cap = args.number(f"{section}{level}_tis_ratio_clip_high")
        yield SettingChange(values={"rollout_importance_sampling_mode": f"{level}_truncate", "rollout_importance_sampling_threshold": cap})
    elif args.is_true("algorithm.use_tis"):
        cap = args.number("algorithm.tis_imp_ratio_cap")
        if cap <= 0:
            raise InvalidValueError(
                f"algorithm.use_tis requires tis_imp_ratio_cap, in SkyRL too, whose default ({cap:g}) bounds every weight to it. Set it, "
                "such as 2.0"
            )
        yield SettingChange(values={"rollout_importance_sampling_mode": "token_truncate", "rollout_importance_sampling_threshold": cap})
    else:
        yield from idle(args, "algorithm.tis_imp_ratio_cap", "use_tis")


def settle_ahead(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Translate fully_async."""
    if args.is_true("fully_async.enabled") and "async_rollout_depth" not in values:
        depth, has_depth = args.integer("fully_async.max_staleness_steps"), "fully_async.max_staleness_steps" in args
        yield SettingChange(
            values={"async_rollout_depth": depth}, untyped=None if has_depth else ("fully_async.max_staleness_steps", "4"),
            note="SkyRL's max_staleness_steps counts from the beginning of a group; async_rollout_depth is the largest age of a token in "
            "sampling steps. Nothing is discarded for its age, and caches are computed anew after a weight sync.",
        )  # fmt: skip


def settle_lora(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Take SkyRL's defaults of an adapter."""
    if "lora_alpha" not in values:
        has_alpha = "policy.model.lora.alpha" in args
        alpha = args.number("policy.model.lora.alpha")
        yield SettingChange(values={"lora_alpha": alpha}, untyped=None if has_alpha else ("policy.model.lora.alpha", "16"))
    settings = {"lora_dropout": args.number("policy.model.lora.dropout"), **adapted(args, "policy.model.lora.")}
    yield SettingChange(values={name: value for name, value in settings.items() if name not in values})
