"""Translation of slime beyond its table: readers of single names, and steps for several names together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.commands.compat.foreign_args import FrameworkArgs, SettingChange
from megatron_grpo.commands.compat.settle import find_dp_size, idle, in_steps, own_rewards, read_mapping
from megatron_grpo.commands.compat.tables import sentence
from megatron_grpo.run.config.table import InvalidValueError

_KL = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}


def ranks(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Return world_size as nodes times GPUs per node."""
    return {"world_size": args.integer("actor_num_nodes") * args.integer("actor_num_gpus_per_node")}


def _whole_files(words: Sequence[str]) -> None:
    if parts := [word for word in words if re.search(r"@\[.*\]$", word)]:
        raise InvalidValueError(f"({' '.join(parts)}) selects a part of a file, which is not supported. Write that part to a separate file")


def prompts(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read prompt_data; a part of a file (path@[0:16]) is refused."""
    _whole_files(words)
    return {"dataset": list(words)}


def offload(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read offload, which covers trainer and sampler."""
    return {} if words[0].lower() == "false" else {"offload_model": "true", "sleep_level": 2}


def held_out(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read eval_prompt_data: pairs of name and path, or a single path."""
    _whole_files(words)
    if len(words) == 1:
        return {"eval_dataset": words[0]}
    if len(words) % 2:
        raise InvalidValueError(f"({' '.join(words)}) requires a name and a path for each set")
    return {"eval_datasets": dict(zip(words[::2], words[1::2]))}


def judge(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    r"""Read rm_type: `math` compares the content of \boxed{} with the label, like the built-in reward; others are refused."""
    if args.get("reward_funcs"):
        return {}
    if list(words) == ["math"]:
        return {"reward_funcs": ["math"]}
    return own_rewards(words, args, "a reward model of slime")


def services(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read use_wandb and use_tensorboard."""
    names = [name for name in ("wandb", "tensorboard") if args.is_true(f"use_{name}")]
    return {"report_to": names} if names else {}


def images(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read multimodal_keys; only images are supported."""
    columns = read_mapping(words, '{"image": "images"}')
    if other_kinds := [kind for kind in columns if kind != "image"]:
        raise InvalidValueError(f"({', '.join(other_kinds)}): images are the only supported modality")
    return {} if columns.get("image", "images") == "images" else {"columns": {columns["image"]: "images"}}


def environment(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read environment variables of the ranks; quantization-aware training is refused."""
    if re.search(r"OPEN_TRAINING_INT4_FAKE_QAT_FLAG\W+1", " ".join(words)):
        raise InvalidValueError(
            f"sets OPEN_TRAINING_INT4_FAKE_QAT_FLAG, with which slime simulates INT4 weights in training: {sentence('QUANTIZED')}"
        )
    return {}


def bucket(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read update_weight_buffer_size, in bytes, as weight_sync_bucket_mb, in MiB."""
    return {"weight_sync_bucket_mb": max(1, int(words[0]) >> 20)}


def settle_importance_sampling(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Translate use_tis with its bounds."""
    if args.is_true("use_tis"):
        low = args.number("tis_clip_low") or None
        settings = {"rollout_importance_sampling_mode": "token_truncate", "rollout_importance_sampling_min": low}
        yield SettingChange(values=settings | {"rollout_importance_sampling_threshold": args.number("tis_clip")})


def settle_seeds(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Note that the seed of the sampler is not separate."""
    if {"seed", "rollout_seed"} <= set(args) and args.text("seed") != args.text("rollout_seed"):
        yield SettingChange(note=f"seed {args.text('seed')} is also the seed of prompts and sampling: rollout_seed is not read.")


def settle_sizes(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Compute the batch sizes, and count rollouts in optimizer steps."""
    prompts, n = args.integer("rollout_batch_size"), args.integer("n_samples_per_prompt")
    batch = args.integer("global_batch_size")
    if "num_steps_per_rollout" in args and prompts:
        steps = args.integer("num_steps_per_rollout")
        if not steps or prompts * n % steps:
            raise InvalidValueError(
                f"num_steps_per_rollout ({steps}) does not divide rollout_batch_size x n_samples_per_prompt = {prompts * n}"
            )
        if batch and batch != prompts * n // steps:
            raise InvalidValueError(
                f"global_batch_size ({batch}) is not {prompts} x {n} / num_steps_per_rollout ({steps}) = {prompts * n // steps}"
            )
        batch = prompts * n // steps
        yield SettingChange(values={"global_batch_size": batch})
    if not batch:
        batch = args.integer("micro_batch_size") * find_dp_size(values)
        yield SettingChange(
            values={"global_batch_size": batch}, note=f"Megatron-LM's global_batch_size is micro_batch_size x dp_size: {batch}."
        )
    names = {"max_steps": "num_rollout", "save_steps": "save_interval", "eval_steps": "eval_interval"}
    yield from in_steps(values, max(1, prompts * n // batch), names)
    if "max_steps" in values and "num_train_epochs" in values:
        yield SettingChange(
            values={"num_train_epochs": None}, note="num_rollout takes precedence: slime ignores num_epoch if both are set."
        )
    if args.is_true("use_dynamic_batch_size"):
        tokens = args.integer("max_tokens_per_gpu") * values.get("context_parallel_size", 1)
        if not tokens:
            raise InvalidValueError("use_dynamic_batch_size requires max_tokens_per_gpu, in slime too")
        note = f"use_dynamic_batch_size: micro-batches of up to {tokens} tokens, and micro_batch_size is not read."
        yield SettingChange(values={"max_tokens_per_micro_batch": tokens, "micro_batch_size": 1}, note=note)
    if "over_sampling_batch_size" in args and prompts:
        yield SettingChange(values={"oversample_ratio": args.integer("over_sampling_batch_size") / prompts})
    if "dynamic_sampling_filter_path" in args:
        path = args.text("dynamic_sampling_filter_path")
        if not path.endswith("check_reward_nonzero_std"):
            raise InvalidValueError(f"dynamic_sampling_filter_path ({path}) is not supported: {sentence('PLUGIN_PATHS')}")
        yield SettingChange(
            values={"dynamic_sample": True}, note="dynamic_sampling_filter_path check_reward_nonzero_std is dynamic_sample."
        )


def settle_loss(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Translate advantage_estimator and the average of the loss."""
    average = "dapo" if args.is_true("calculate_per_token_loss") else "grpo"
    high = float(args.text("eps_clip_high", str(values.get("epsilon", 0.2))))
    kind = args.choice("advantage_estimator", ("grpo", "gspo", "cispo"))
    settings: dict[str, Any] = {"loss_type": average, "epsilon_high": high}
    if kind == "gspo":
        settings["importance_sampling_level"] = "sequence"
    elif kind == "cispo":
        if values.get("epsilon", 0.2) < 1 or average != "dapo":
            raise InvalidValueError(
                "advantage_estimator (cispo) has the lower bound 1 - eps_clip of the ratio in slime; here it is a mean over tokens without "
                "a lower bound. Use eps_clip 1.0 and calculate_per_token_loss"
            )
        settings = {"loss_type": "cispo", "epsilon_high": 1 + high, "epsilon": None}
    description = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
    yield SettingChange(
        values=settings,
        note=f"advantage_estimator {kind}, averaged by {'token' if average == 'dapo' else 'sample'}, is {description} here.",
    )


def settle_kl(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Translate use_kl_loss with its coefficient and estimator."""
    if "beta" in values or not args.is_true("use_kl_loss"):
        yield from idle(args, "kl_loss_coef kl_loss_type", "use_kl_loss")
        return
    beta, kind = args.number("kl_loss_coef"), args.choice("kl_loss_type", _KL)
    if beta:
        yield SettingChange(
            values={"beta": beta, "kl_estimator": _KL[kind]}, note=f"kl_loss_coef {beta:g} of {kind} is beta with {_KL[kind]} here."
        )


def settle_teacher(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Translate the teacher of on-policy distillation.

    A teacher in Megatron is supported except for its file format; an SGLang server is not. Source: apply_opd_kl_to_advantages in slime's
    loss.py, whose log-probs are scaled by the sampling temperature as here.
    """
    kind, path = args.text("opd_type"), args.text("opd_teacher_load")
    if kind != "megatron":
        raise InvalidValueError(
            f"opd_type ({kind}): SGLang servers are not supported as teachers. Start megatron-grpo serve --frozen true --model TEACHER, "
            "and pass its URL as teacher_model_server"
        )
    if not (Path(path) / "config.json").is_file():
        raise InvalidValueError(
            f"opd_teacher_load ({path}) is a checkpoint of Megatron-LM. Pass the original Hugging Face checkpoint as teacher_model"
        )
    yield SettingChange(values={"teacher_model": path}, note="opd_teacher_load with opd_type megatron is teacher_model.")
