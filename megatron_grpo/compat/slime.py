"""Translation of slime beyond its table: readers of single names, and SETTLE for several names together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.compat.common import (
    asked_once,
    holds_out,
    idle,
    idle_schedule,
    in_steps,
    layout,
    of_pictures,
    of_servers,
    own_rewards,
)
from megatron_grpo.compat.foreign_args import Change, Given
from megatron_grpo.compat.tables import sentence
from megatron_grpo.config.table import InvalidValueError

_KL = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}


def ranks(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """Return world_size as nodes times GPUs per node.

    Args:
        words: Words of its value, as typed.
        given: All foreign names of the run, with their words.
    """
    return {"world_size": given.whole("actor_num_nodes", 1) * given.whole("actor_num_gpus_per_node", 8)}


def _whole_files(words: Sequence[str]) -> None:
    if parts := [word for word in words if re.search(r"@\[.*\]$", word)]:
        raise InvalidValueError(f"({' '.join(parts)}) selects a part of a file, which is not supported. Write that part to a separate file")


def prompts(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """Read prompt_data; a part of a file (path@[0:16]) is refused.

    Args:
        words: Words of its value, as typed.
        given: All foreign names of the run, with their words.
    """
    _whole_files(words)
    return {"dataset": list(words)}


def seed(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """Read rollout_seed, which is ignored if seed is given.

    Args:
        words: Words of its value, as typed.
        given: All foreign names of the run, with their words.
    """
    return {} if "seed" in given else {"seed": list(words)}


def offload(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """Read offload, which covers trainer and sampler.

    Args:
        words: Words of its value, as typed.
        given: All foreign names of the run, with their words.
    """
    return {} if words[0].lower() == "false" else {"offload_model": "true", "sleep_level": 2}


def held_out(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """Read eval_prompt_data: pairs of name and path, or a single path.

    Args:
        words: Words of its value, as typed.
        given: All foreign names of the run, with their words.
    """
    _whole_files(words)
    if len(words) == 1:
        return {"eval_dataset": words[0]}
    if len(words) % 2:
        raise InvalidValueError(f"({' '.join(words)}) requires a name and a path for each set")
    return {"eval_datasets": dict(zip(words[::2], words[1::2]))}


def judge(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    r"""Read rm_type: `math` compares the content of \boxed{} with the label, like the built-in reward; others are refused.

    Args:
        words: Words of its value, as typed.
        given: All foreign names of the run, with their words.
    """
    if given.get("reward_funcs"):
        return {}
    if list(words) == ["math"]:
        return {"reward_funcs": ["math"]}
    return own_rewards("a reward model of slime")(words, given)


def services(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """Read use_wandb and use_tensorboard.

    Args:
        words: Words of its value, as typed.
        given: All foreign names of the run, with their words.
    """
    found = [name for name in ("wandb", "tensorboard") if given.is_true(f"use_{name}")]
    return {"report_to": found} if found else {}


def column(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """Read input_key as the prompt column.

    Args:
        words: Words of its value, as typed.
        given: All foreign names of the run, with their words.
    """
    return {} if list(words) in (["prompt"], ["messages"]) else {"columns": {words[0]: "prompt"}}


def pictures(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """Read multimodal_keys; only images are supported.

    Args:
        words: Words of its value, as typed.
        given: All foreign names of the run, with their words.
    """
    try:
        found = dict(json.loads(" ".join(words)))
    except ValueError:
        raise InvalidValueError(f'needs a mapping as JSON, such as {{"image": "images"}}, not {" ".join(words)!r}') from None
    if others := [kind for kind in found if kind != "image"]:
        raise InvalidValueError(f"({', '.join(others)}): images are the only supported modality")
    return {} if found.get("image", "images") == "images" else {"columns": {found["image"]: "images"}}


def environment(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """Read environment variables of the ranks; quantization-aware training is refused.

    Args:
        words: Words of its value, as typed.
        given: All foreign names of the run, with their words.
    """
    if re.search(r"OPEN_TRAINING_INT4_FAKE_QAT_FLAG\W+1", " ".join(words)):
        raise InvalidValueError(
            f"sets OPEN_TRAINING_INT4_FAKE_QAT_FLAG, with which slime simulates INT4 weights in training: {sentence('QUANTIZED')}"
        )
    return {}


def bucket(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """Read update_weight_buffer_size, in bytes, as weight_sync_bucket_mb, in MiB.

    Args:
        words: Words of its value, as typed.
        given: All foreign names of the run, with their words.
    """
    return {"weight_sync_bucket_mb": max(1, int(words[0]) >> 20)}


def _rest(values: Mapping[str, Any], given: Given) -> Iterator[Change]:
    """Yield the changes that follow from several of slime's names, except for sizes, loss and KL."""
    yield from of_servers(values, program="slime")
    yield from idle_schedule(values, given, style="linear")
    if given.is_true("use_tis"):
        low = given.number("tis_clip_low", 0)
        found = {"rollout_importance_sampling_mode": "token_truncate", "rollout_importance_sampling_min": low or None}
        yield Change(values=found | {"rollout_importance_sampling_threshold": given.number("tis_clip", 2.0)})
    else:
        yield from idle(given, {"tis_clip": "2.0", "tis_clip_low": "0"}, without="use_tis")
    if given.is_true("use_opsm"):
        yield Change(values={"off_policy_sequence_mask_delta": given.number("opsm_delta", 1e-4)})
    yield from _teacher(values, given)
    yield from layout(values, given.text("expert_tensor_parallel_size", "none"))
    if not given.is_true("colocate"):
        note = "without colocate slime samples on separate GPUs: vllm_mode server here, with `megatron-grpo serve`."
        yield Change(note=note)
    if given.text("rollout_seed", given.text("seed", "")) != given.text("seed", given.text("rollout_seed", "")):
        yield Change(note=f"seed {given.text('seed', '')} is also the seed of prompts and sampling: rollout_seed is not read.")
    if "apply_chat_template" in given:
        yield Change(note="apply_chat_template: a string prompt is used without a template here; write it as chat messages.")
    if "multimodal_keys" in given:
        yield from of_pictures(values, title="slime", says="multimodal_keys")
    if values.get("eval_steps") and not holds_out(values):
        yield Change(values={"eval_steps": None}, note="eval_interval has no effect without eval_prompt_data.")
    yield from asked_once(values, eval_temperature=values.get("temperature", 1.0))


def _sizes(values: Mapping[str, Any], given: Given) -> Iterator[Change]:
    prompts, n = given.whole("rollout_batch_size", 0), given.whole("n_samples_per_prompt", 1)
    batch = given.whole("global_batch_size", 0)
    if "num_steps_per_rollout" in given and prompts:
        steps = given.whole("num_steps_per_rollout", 1)
        if not steps or prompts * n % steps:
            raise InvalidValueError(
                f"num_steps_per_rollout ({steps}) does not divide rollout_batch_size x n_samples_per_prompt = {prompts * n}"
            )
        if batch and batch != prompts * n // steps:
            raise InvalidValueError(
                f"global_batch_size ({batch}) is not {prompts} x {n} / num_steps_per_rollout ({steps}) = {prompts * n // steps}"
            )
        batch = prompts * n // steps
        yield Change(values={"global_batch_size": batch})
    if not batch:
        ranks = 1
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            ranks *= values.get(name, 1)
        batch = given.whole("micro_batch_size", 1) * max(1, values.get("world_size", 8) // max(1, ranks))
        yield Change(values={"global_batch_size": batch}, note=f"Megatron-LM's global_batch_size is micro_batch_size x dp_size: {batch}.")
    names = {"max_steps": "num_rollout", "save_steps": "save_interval", "eval_steps": "eval_interval"}
    yield from in_steps(values, max(1, prompts * n // batch), names)
    if "max_steps" in values and "num_train_epochs" in values:
        yield Change(values={"num_train_epochs": None}, note="num_rollout takes precedence: slime ignores num_epoch if both are set.")
    if given.is_true("use_dynamic_batch_size"):
        tokens = given.whole("max_tokens_per_gpu", 0) * values.get("context_parallel_size", 1)
        if not tokens:
            raise InvalidValueError("use_dynamic_batch_size requires max_tokens_per_gpu, in slime too")
        note = f"use_dynamic_batch_size: micro-batches of up to {tokens} tokens, and micro_batch_size is not read."
        yield Change(values={"max_tokens_per_micro_batch": tokens, "micro_batch_size": 1}, note=note)
    if "over_sampling_batch_size" in given and prompts:
        yield Change(values={"oversample_ratio": given.whole("over_sampling_batch_size", prompts) / prompts})
    if "dynamic_sampling_filter_path" in given:
        path = given.text("dynamic_sampling_filter_path", "")
        if not path.endswith("check_reward_nonzero_std"):
            raise InvalidValueError(f"dynamic_sampling_filter_path ({path}) is not supported: {sentence('PLUGIN_PATHS')}")
        yield Change(values={"dynamic_sample": True}, note="dynamic_sampling_filter_path check_reward_nonzero_std is dynamic_sample.")


def _loss(values: Mapping[str, Any], given: Given) -> Iterator[Change]:
    kind = given.text("advantage_estimator", "grpo")
    average = "dapo" if given.is_true("calculate_per_token_loss") else "grpo"
    high = float(given.text("eps_clip_high", str(values.get("epsilon", 0.2))))
    found: dict[str, Any] = {"loss_type": average, "epsilon_high": high}
    if kind == "gspo":
        found["importance_sampling_level"] = "sequence"
    elif kind == "cispo":
        if values.get("epsilon", 0.2) < 1 or average != "dapo":
            raise InvalidValueError(
                "advantage_estimator (cispo) has the lower bound 1 - eps_clip of the ratio in slime; here it is a mean over tokens without "
                "a lower bound. Use eps_clip 1.0 and calculate_per_token_loss"
            )
        found = {"loss_type": "cispo", "epsilon_high": 1 + high, "epsilon": None}
    elif kind != "grpo":
        raise InvalidValueError(f"advantage_estimator ({kind}) is not supported. Supported: grpo, gspo, cispo")
    said = ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)
    yield Change(
        values=found, note=f"advantage_estimator {kind}, averaged by {'token' if average == 'dapo' else 'sample'}, is {said} here."
    )


def _kl(values: Mapping[str, Any], given: Given) -> Iterator[Change]:
    if "beta" in values or not given.is_true("use_kl_loss"):
        yield from idle(given, {"kl_loss_coef": "0.0", "kl_loss_type": "k1"}, without="use_kl_loss")
        return
    beta, kind = given.number("kl_loss_coef", 0), given.text("kl_loss_type", "k1")
    if kind not in _KL:
        raise InvalidValueError(f"kl_loss_type ({kind}) is not supported. Supported: {', '.join(_KL)}")
    if beta:
        yield Change(
            values={"beta": beta, "kl_estimator": _KL[kind]}, note=f"kl_loss_coef {beta:g} of {kind} is beta with {_KL[kind]} here."
        )


def _teacher(values: Mapping[str, Any], given: Given) -> Iterator[Change]:
    """Translate on-policy distillation.

    A teacher in Megatron is supported except for its file format; an SGLang server is not. Source: apply_opd_kl_to_advantages in slime's
    loss.py, whose log-probs are scaled by the sampling temperature as here.
    """
    if not given.is_true("use_opd"):
        yield from idle(given, {"opd_type": "none", "opd_teacher_load": "none", "opd_kl_coef": "1.0"}, without="use_opd")
        return
    yield Change(values={"teacher_kl_coef": given.number("opd_kl_coef", 1.0)})
    if values.get("teacher_model") or values.get("teacher_model_server"):
        return
    kind, where = given.text("opd_type", "none"), given.text("opd_teacher_load", "none")
    if kind != "megatron":
        raise InvalidValueError(
            f"opd_type ({kind}): SGLang servers are not supported as teachers. Start megatron-grpo serve --frozen true --model TEACHER, "
            "and pass its URL as teacher_model_server"
        )
    if not (Path(where) / "config.json").is_file():
        raise InvalidValueError(
            f"opd_teacher_load ({where}) is a checkpoint of Megatron-LM. Pass the original Hugging Face checkpoint as teacher_model"
        )
    yield Change(values={"teacher_model": where}, note="opd_teacher_load with opd_type megatron is teacher_model.")


SETTLE = (_sizes, _loss, _kl, _rest)
