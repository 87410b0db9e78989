"""Translation of SkyRL beyond its table: readers of single names, and CONVERSIONS for several names together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from megatron_grpo.commands.compat.foreign_args import OFF, ForeignArgs, SettingChange
from megatron_grpo.commands.compat.settle import (
    OWN_EPISODES,
    adapted,
    drops_last,
    holds_out,
    idle,
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

_ALGORITHM, _POLICY, _ENGINE, _LORA = "algorithm.", "policy.megatron_config.", "inference_engine.", "policy.model.lora."
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
_OF_MEGATRON = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
)
_COUNTED_IN_ROLLOUTS = {"max_steps": "max_training_steps", "save_steps": "ckpt_interval", "eval_steps": "eval_interval"}


def ranks(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Return world_size as nodes times GPUs per node.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    numbers = [(args.get(f"placement.policy_{name}") or ["1"])[0] for name in ("num_nodes", "num_gpus_per_node")]
    if not all(number.isdigit() for number in numbers):
        raise InvalidValueError(f"must be a whole number, not {' '.join(words)!r}")
    return {"world_size": int(numbers[0]) * int(numbers[1])}


def stop(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read stop strings.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    return {"stop": [] if list(words) == ["none"] else [part for word in words for part in listed([word])]}


def turns(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read max_turns; more than one turn needs environment or tools.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    if list(words) == ["1"]:
        return {}
    if not set(OWN_EPISODES) & set(args):
        raise InvalidValueError(f"({' '.join(words)}): {sentence('TURNS')}")
    return {"max_turns": list(words)}


def rank(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read the LoRA rank; 0 is full training.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    return {"tuner_type": "full"} if list(words) == ["0"] else {"tuner_type": "lora", "lora_rank": list(words)}


def routers(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read freeze_moe_router. Routers never train with LoRA.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    is_lora = args.text(f"{_LORA}rank", "0") != "0"
    return {"freeze_parameters_regex": r"\.gate\.weight$"} if words[0].lower() in TRUE and not is_lora else {}


def _loss(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    if "loss_type" in values:
        return
    kind, reduction = (
        args.text(f"{_ALGORITHM}policy_loss_type", "regular"),
        args.text(f"{_ALGORITHM}loss_reduction", "token_mean"),
    )
    loss = _LOSSES.get((kind, reduction))
    if kind in ("regular", "dual_clip") and reduction == "seq_mean_token_sum_norm":
        loss = {"loss_type": "dr_grpo"}
        divisor, longest = args.integer(f"{_ALGORITHM}max_seq_len", 0), args.integer("sampling_params.max_generate_length", 1024)
        if divisor != longest:
            raise InvalidValueError(
                f"algorithm.loss_reduction (seq_mean_token_sum_norm) divides by algorithm.max_seq_len ({divisor or 'not set'}), and "
                "dr_grpo by "
                f"max_completion_length ({longest}). Use algorithm.max_seq_len {longest}, or loss_type dr_grpo"
            )
    elif f"{_ALGORITHM}max_seq_len" in args:
        yield SettingChange(note="max_seq_len has no effect without loss_reduction seq_mean_token_sum_norm, in both systems.")
    if loss is None:
        raise InvalidValueError(
            f"algorithm.policy_loss_type ({kind}) with algorithm.loss_reduction ({reduction}) is not supported. Supported: "
            f"{', '.join(f'{a} with {b}' for a, b in _LOSSES)}"
        )
    if kind == "dual_clip":
        loss = {**loss, "delta": args.number(f"{_ALGORITHM}clip_ratio_c", 3.0)}
    if kind == "cispo":
        loss = {**loss, "epsilon_high": 1 + args.number(f"{_ALGORITHM}cispo.cispo_eps_clip_high", 4.0)}
    settings = ", ".join(f"{name} {value}" for name, value in loss.items())
    given_names = {f"{_ALGORITHM}policy_loss_type", f"{_ALGORITHM}loss_reduction"} & set(args)
    yield SettingChange(
        values=loss,
        note=f"policy_loss_type {kind} with loss_reduction {reduction} is {settings} here.",
        untyped=None if given_names else ("algorithm.loss_reduction", reduction),
    )


def _kl(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    if "beta" not in values:
        in_loss, in_reward = args.is_true(f"{_ALGORITHM}use_kl_loss", "true"), args.is_true(f"{_ALGORITHM}use_kl_in_reward")
        given_names = {f"{_ALGORITHM}{name}" for name in ("use_kl_loss", "use_kl_in_reward", "kl_loss_coef")} & set(args)
        beta = args.number(f"{_ALGORITHM}kl_loss_coef", 0.001) if in_loss or in_reward else 0.0
        yield SettingChange(
            values={"beta": beta, "kl_in_reward": in_reward and beta > 0},
            note=f"use_kl_loss ({str(in_loss).lower()}) and kl_loss_coef make beta {beta:g} here.",
            untyped=None if given_names else ("algorithm.kl_loss_coef", f"{beta:g}"),
        )
    if args.is_true(f"{_ALGORITHM}use_entropy_loss"):
        yield SettingChange(values={"entropy_coef": args.number(f"{_ALGORITHM}entropy_loss_coef", 0.01)})
    if args.text(f"{_ALGORITHM}advantage_estimator", "grpo") == "rloo":
        yield SettingChange(values={"advantage_estimator": "rloo", "scale_rewards": "none"})
    if f"{_ALGORITHM}overlong_buffer_len" in args:  # in SkyRL's example main_dapo
        longest = args.integer("sampling_params.max_generate_length", 1024)
        buffer = args.integer(f"{_ALGORITHM}overlong_buffer_len", 512)
        yield from soft_overlong(values, longest, buffer, f"{_ALGORITHM}overlong_buffer_len")


def _layout(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    ulysses = args.integer("policy.sequence_parallel_size", 1)
    strategy = args.text("strategy", "fsdp" if ulysses > 1 else "")  # fsdp is SkyRL's default
    if strategy in ("fsdp", "fsdp2"):
        unread = [name for name in _OF_MEGATRON if values.get(name, 1) not in (1, False)]
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
    if not args.is_true("gradient_checkpointing", "true"):
        yield SettingChange(values=dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers")))
    yield from layout(values, args.text(f"{_POLICY}expert_tensor_parallel_size", "none"), shards_norms_by_itself="SkyRL")


def _is_same(first: str, second: str) -> bool:
    try:
        return float(first) == float(second)
    except ValueError:
        return first == second


def _prompts_and_engines(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    """Yield the changes for prompts, engines and evaluations."""
    yield from of_servers(values, program="SkyRL")
    yield from drops_last(values, title="SkyRL")
    longest, bound = args.text("max_prompt_length", "512"), args.text("max_input_length", "")
    if {"environment", "tools"} & set(args):
        if bound:
            yield SettingChange(note="max_input_length limits the input of each turn in SkyRL; here max_completion_length limits the whole "
                              "episode after its prompt, including tokens of the environment.")  # fmt: skip
    elif bound not in ("", longest) and args.text("max_turns", "1") == "1":  # SkyRL refuses this too for a single turn
        raise InvalidValueError(
            f"max_input_length ({bound}) differs from max_prompt_length ({longest}), which limits the input. With one turn both are the "
            f"same, in SkyRL too. Use generator.max_input_length {longest}"
        )
    if "truncation_strategy" not in values:
        yield SettingChange(values={"truncation_strategy": "delete"}, untyped=("longer prompts", "dropped"))
    if args.is_true("vision_language_generator"):
        yield from train_tower_with_images(values, title="SkyRL", flag="vision_language_generator")
    for name, counterpart, reason in (
        ("ref.model.path", "policy.model.path", "the reference is the model at the start"),
        (f"{_ALGORITHM}temperature", "sampling_params.temperature", "log-probs are those of the sampling temperature"),
    ):
        eval_value, training_value = args.text(name, "none"), args.text(counterpart, "1.0" if "temperature" in counterpart else "")
        if eval_value.lower() not in OFF and not _is_same(eval_value, training_value):
            raise InvalidValueError(f"{name} ({eval_value}) differs from {counterpart} ({training_value}), and {reason}")
    stop, eval_stop = (listed(args.get(f"{name}sampling_params.stop", ())) for name in ("", "eval_"))
    if eval_stop not in ([], ["none"], ["null"], stop):
        raise InvalidValueError(
            f"eval_sampling_params.stop ({' '.join(eval_stop)}) differs from sampling_params.stop, which applies to both here"
        )
    yield from of_template(values, args, prefix="chat_template_kwargs")
    yield from of_vllm(values, args, prefix=f"{_ENGINE}engine_init_kwargs")
    yield from of_vllm(values, args, prefix="engine_init_kwargs")
    yield from one_eval_completion(values, eval_temperature=0.0, eval_top_p=1.0, eval_top_k=0, eval_min_p=0.0)
    if values.get("eval_steps") and not holds_out(values):
        yield SettingChange(
            values={"eval_steps": None}, note=f"eval_interval ({values['eval_steps']}) has no effect without data.val_data."
        )


def _steps(values: Mapping[str, Any], args: ForeignArgs, *, in_prompts: bool) -> Iterator[SettingChange]:
    """Convert train batches, which SkyRL's trainer counts (global_step of its RayPPOTrainer), to optimizer steps."""
    rollout = args.integer("train_batch_size", 1024) * (1 if in_prompts else args.integer("n_samples_per_prompt", 5))
    passes = args.integer("update_epochs_per_batch", 1)
    per_rollout = max(1, rollout // max(1, args.integer("policy_mini_batch_size", 256))) * passes
    yield from in_steps(values, per_rollout, _COUNTED_IN_ROLLOUTS)
    if "save_steps" not in values:
        yield SettingChange(values={"save_steps": 10 * per_rollout}, untyped=("ckpt_interval", "10"))
    if "eval_steps" not in values and holds_out(values):
        yield SettingChange(values={"eval_steps": 5 * per_rollout}, untyped=("eval_interval", "5"))


def _correction(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    section = f"{_ALGORITHM}off_policy_correction."
    level = args.text(f"{section}tis_ratio_type", "none")
    if level in ("token", "sequence"):
        cap = float(args.text(f"{section}{level}_tis_ratio_clip_high", "2.0" if level == "token" else "5.0"))
        yield SettingChange(values={"rollout_importance_sampling_mode": f"{level}_truncate", "rollout_importance_sampling_threshold": cap})
    elif level not in ("none", "null"):
        raise InvalidValueError(f"{section}tis_ratio_type ({level}) is not supported. Supported: token, sequence")
    elif args.is_true(f"{_ALGORITHM}use_tis"):
        cap = args.number(f"{_ALGORITHM}tis_imp_ratio_cap", -1.0)
        if cap <= 0:
            raise InvalidValueError(
                f"{_ALGORITHM}use_tis requires tis_imp_ratio_cap, in SkyRL too, whose default ({cap:g}) bounds every weight to it. "
                "Set it, such as 2.0"
            )
        yield SettingChange(values={"rollout_importance_sampling_mode": "token_truncate", "rollout_importance_sampling_threshold": cap})
    else:
        yield from idle(args, {f"{_ALGORITHM}tis_imp_ratio_cap": "-1.0"}, required_setting="use_tis")


def _ahead(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    if args.is_true("fully_async.enabled") and "async_rollout_depth" not in values:
        depth, has_depth = args.integer("fully_async.max_staleness_steps", 4), "fully_async.max_staleness_steps" in args
        yield SettingChange(
            values={"async_rollout_depth": depth}, untyped=None if has_depth else ("fully_async.max_staleness_steps", "4"),
            note="SkyRL's max_staleness_steps counts from the beginning of a group; async_rollout_depth is the largest age of a token in "
            "sampling steps. Nothing is discarded for its age, and caches are computed anew after a weight sync.",
        )  # fmt: skip


def _lora(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    if values.get("tuner_type") != "lora":
        yield from idle(args, {f"{_LORA}dropout": "0.0"}, required_setting=f"{_LORA}rank")
        return
    alpha = args.number(f"{_LORA}alpha", 16)
    has_alpha = f"{_LORA}alpha" in args
    if "lora_alpha" not in values:
        yield SettingChange(values={"lora_alpha": alpha}, untyped=None if has_alpha else ("policy.model.lora.alpha", "16"))
    settings = {"lora_dropout": args.number(f"{_LORA}dropout", 0), **adapted(args, _LORA)}
    yield SettingChange(values={name: value for name, value in settings.items() if name not in values})
    if args.text(f"{_POLICY}lora_config.lora_type", "lora") == "lora":
        yield SettingChange(
            note="SkyRL's lora_type lora has one matrix A for q, k and v, and one for gate and up; here each has a separate one, as in "
            "PEFT and in its canonical_lora.",
        )
    if args.is_true(f"{_POLICY}lora_config.merge_lora", "true"):
        yield SettingChange(
            note="SkyRL's lora_config.merge_lora true syncs merged weights to vLLM, where bfloat16 rounds away most of the first updates. "
            "Here the adapter is synced; vllm_enable_lora false syncs merged weights.",
        )


CONVERSIONS = (_loss, _kl, _correction, _layout, partial(_steps, in_prompts=True), _ahead, _lora, _prompts_and_engines)
CONVERSIONS_OF_THE_GUIDE = (*CONVERSIONS[:4], partial(_steps, in_prompts=False), *CONVERSIONS[5:])
