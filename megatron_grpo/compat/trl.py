"""TRL: `trl grpo`, GRPOConfig and the TrainingArguments of transformers beneath it, ModelConfig and the data arguments of its script."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_grpo.compat import aside, features, turns
from megatron_grpo.compat.vocabulary import (
    BEST,
    BUILT_IN_REWARDS,
    NATIVE_SIZES,
    TOKEN,
    Given,
    as_in_training,
    drops_last,
    holds_out,
    of_servers,
    of_the_hub,
    size,
    sizes,
    text_of,
    together,
    whole,
)
from megatron_grpo.config.foreign import (
    OFF,
    SET_ASIDE,
    Change,
    Default,
    Dialect,
    Foreign,
    Reader,
    default,
    kept,
    lacks,
    not_there,
    only,
    reads,
    same,
    shown,
)
from megatron_grpo.config.table import FALSE, TRUE, BadValue

ADAPTIVE = ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")
_REWARDS = {"accuracy_reward": "math", "get_soft_overlong_punishment": "soft_overlong"}
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _is_on(words: Sequence[str]) -> bool:
    word = (words[0] if words else "true").lower()
    if word not in (*TRUE, *FALSE):
        raise BadValue(f"needs true or false, not {word!r}")
    return word in TRUE


def _recompute(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    return _FULL if _is_on(words) else {"recompute_granularity": None}


def _use_peft(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    return {"tuner_type": "lora" if _is_on(words) else "full"}


def _sleep(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    return {"sleep_level": 2 if _is_on(words) else 0}


def _correction(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    return {} if _is_on(words) else {"rollout_importance_sampling_mode": "none"}


def _reward_funcs(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    unread = [word for word in words if word not in (*_REWARDS, *BUILT_IN_REWARDS) and not {".", ":"} & set(word)]
    if unread:
        raise BadValue(
            f"({', '.join(unread)}) is a reward function of TRL that is not there. Name a function as path/to/file.py:function or "
            f"package.module:function; {', '.join(_REWARDS)} are translated"
        )
    found: dict[str, Any] = {"reward_funcs": [_REWARDS.get(word, word if ":" in word else ":".join(word.rsplit(".", 1))) for word in words]}
    if "get_soft_overlong_punishment" in words:  # its script builds it with these
        found |= {"soft_max_length": 1280, "soft_cache_length": 256}
    return found


def _warmup(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """A number of steps, or below 1 a share of the run."""
    try:
        share = float(words[0])
    except (ValueError, IndexError):
        share = 1.0
    return {"lr_warmup_fraction" if 0 < share < 1 else "lr_warmup_iters": list(words)}


_IDLE_OF_MODEL = ("attn_implementation", "use_cache", "device_map", "low_cpu_mem_usage")


def _of_model(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    try:
        found = {} if " ".join(words).lower() in OFF else dict(json.loads(" ".join(words)))
    except ValueError:
        raise BadValue(f'needs a mapping as JSON, such as {{"dtype": "bfloat16"}}, not {" ".join(words)!r}') from None
    ours = {"torch_dtype": "torch_dtype", "dtype": "torch_dtype", "trust_remote_code": "trust_remote_code"}
    if others := [name for name in found if name not in (*ours, *_IDLE_OF_MODEL)]:
        raise BadValue(f"({', '.join(others)}): the model is read as its config.json says; dtype and trust_remote_code are translated")
    return {ours[name]: shown(value) for name, value in found.items() if name in ours}


def _no_limit(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    return {} if words in (["-1"], ["-1.0"]) else {"max_steps": list(words)}


def _steps(name: str) -> Reader:
    def read(words: Sequence[str], given: Given) -> Mapping[str, Any]:
        if re.fullmatch(r"0?\.\d+", " ".join(words)):
            raise BadValue(f"({' '.join(words)}) is a share of the run in TRL, and here a number of optimizer steps. Give that")
        return {name: list(words)}

    return read


def lowest_lr(values: Mapping[str, Any], given: Given) -> Iterator[Change]:
    """lr_scheduler_kwargs of transformers' cosine_with_min_lr, as one mapping or a name each."""
    words = " ".join(given.get("lr_scheduler_kwargs", ["{}"]))
    try:
        found = {} if words.lower() in OFF else dict(json.loads(words))
    except (ValueError, TypeError):
        found = dict(word.partition("=")[::2] for word in given["lr_scheduler_kwargs"])
    prefix = "lr_scheduler_kwargs."
    found |= {name.removeprefix(prefix): " ".join(word) for name, word in given.items() if name.startswith(prefix)}
    style = " ".join(given.get("lr_scheduler_type", ["linear"]))
    if others := [name for name in found if name not in ("min_lr", "min_lr_rate") or style != "cosine_with_min_lr"]:
        raise BadValue(f"lr_scheduler_kwargs ({', '.join(others)}) of {style}: min_lr and min_lr_rate of cosine_with_min_lr are translated")
    lr = float(values.get("lr", 1e-6))
    lowest = float(found["min_lr"]) if found.get("min_lr") else lr * float(found.get("min_lr_rate") or 0)
    if lowest:
        yield Change(values={"min_lr": lowest}, note=f"lr_scheduler_kwargs of cosine_with_min_lr: min_lr {lowest:g}.")


NAMES: Mapping[str, Foreign] = {
    "warmup_steps": reads(_warmup, "`lr_warmup_iters`; below 1 `lr_warmup_fraction`"),
    "max_steps": reads(_no_limit, "max_steps; leave it out where there is no limit"),
    "scale_rewards": same("scale_rewards", {"true": "group", "false": "none"}),
    "lr_scheduler_type": same("lr_decay_style", {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}),
    "lr_scheduler_kwargs": together("`min_lr`, of min_lr or min_lr_rate; other words are refused"),
    **{name: reads(_steps(name), f"`{name}`; a share of the run is refused") for name in ("save_steps", "eval_steps", "logging_steps")},
    "vllm_max_model_length": same("vllm_max_model_len"),
    "shuffle_dataset": same("dataset_shuffle"),
    "dataset_name": same("dataset"),
    "dataset_train_split": same("dataset_split"),
    "router_aux_loss_coef": same("moe_aux_loss_coeff"),
    "vllm_importance_sampling_mode": same("rollout_importance_sampling_mode"),
    "vllm_importance_sampling_cap": same("rollout_importance_sampling_threshold"),
    "vllm_importance_sampling_clip_max": same("rollout_importance_sampling_threshold"),
    "vllm_importance_sampling_clip_min": same("rollout_importance_sampling_min"),
    "vllm_importance_sampling_correction": reads(_correction, "rollout_importance_sampling_mode"),
    "vllm_enable_sleep_mode": reads(_sleep, "sleep_level 2"),
    "gradient_checkpointing": reads(_recompute, "recompute_granularity full, recompute_method uniform, recompute_num_layers 1"),
    "reward_funcs": reads(_reward_funcs, "reward_funcs"),
    "reward_model_name_or_path": lacks(
        "a reward model is the reward function reward_model here: reward_funcs reward_model, and its directory"
    ),
    "chat_template_kwargs.enable_thinking": same("enable_thinking"),
    "model_init_kwargs.torch_dtype": same("torch_dtype"),
    "model_init_kwargs.dtype": same("torch_dtype"),
    "model_init_kwargs.attn_implementation": SET_ASIDE,
    "model_init_kwargs.use_cache": SET_ASIDE,
    # Asked for, and not there.
    "use_vllm": only("true", "sampling is by vLLM alone"),
    "use_peft": reads(_use_peft, "tuner_type lora"),
    "lora_r": same("lora_rank"),
    "lora_target_modules": same("target_modules"),
    "lora_target_parameters": lacks(features.LORA_TARGETS),
    "lora_modules_to_save": lacks(features.MODULES_TO_SAVE),
    "lora_task_type": lacks(features.OTHER_TASK, "causal_lm"),
    "use_dora": lacks(features.DORA),
    "peft_config": lacks("it is an object of Python: give use_peft and its values as lora_r, lora_alpha, lora_target_modules"),
    "eval_strategy": lacks(features.EPOCH, "no", "steps"),
    "evaluation_strategy": lacks(features.EPOCH, "no", "steps"),
    "save_strategy": lacks(features.EPOCH, "steps", "no"),
    "optim": lacks(features.OTHER_OPTIMIZER, "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"),
    "min_p": same("min_p", {"none": "0"}),
    "repetition_penalty": lacks(features.PENALTY, "1", "1.0"),
    "model_revision": lacks(features.VERSIONS, "main"),
    "model_init_kwargs.trust_remote_code": same("trust_remote_code"),
    "vllm_model_impl": only("vllm", "vLLM's own models sample"),
    "dataset_config": lacks(features.SUBSET),
    "dataset_streaming": same("streaming"),
    "label_smoothing_factor": lacks(features.OTHER_TASK, "0", "0.0"),
    "neftune_noise_alpha": lacks("no noise is added to embeddings"),
    "metric_for_best_model": BEST,
    "resume_from_checkpoint": same("resume", {"true": "auto", "false": "never"}),
    "hub_token": TOKEN,
    "config_file": lacks("accelerate's own file is not read: give its num_processes"),
    **turns.TRL,
    **not_there(features.TURNS, "rollout_func"),
    **not_there(features.QUANTIZED, "fp16", "load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"),
    **not_there(features.QUANTIZED, "bnb_4bit_quant_storage"),
    **not_there(features.SHARDED_ELSEWHERE, "deepspeed", "fsdp", "fsdp_config", "parallelism_config", "accelerator_config"),
    **not_there("sampling is by vLLM alone", "use_transformers_continuous_batching", "use_transformers_paged", "cache_implementation"),
    **not_there("sampling is by vLLM alone", "transformers_continuous_batching_config"),
    **not_there("several data sets are the words of dataset, with interleave_prob as their weights", "datasets"),
    "auto_find_batch_size": lacks("batch sizes are as they are given; plan says whether they fit into memory"),
    **not_there("optimizers are built in", "optim_args", "optim_target_modules"),
    "model_init_kwargs": reads(_of_model, "`torch_dtype` and `trust_remote_code`; what asks for another model is refused"),
    "bf16_full_eval": lacks("evaluation samples with the weights as they are pushed"),
    "fp16_full_eval": lacks(features.QUANTIZED),
    "eval_delay": lacks("evaluation comes every eval_steps, from the start", "0"),
    "hub_revision": lacks("exports are pushed to the main branch of a repository"),
    "ignore_data_skip": lacks("a run that goes on takes the prompts that come next"),
    "use_cpu": lacks("ranks compute on what the machine has"),
    "debug": lacks("underflow and TPU debugging are of its Trainer"),
    "enable_jit_checkpoint": lacks("stop_after_minutes, stop_before_end_seconds and signals save a run that has to end (docs/stops.md)"),
    **aside.TRL,
}

DEFAULTS: Sequence[Default] = (
    default("loss_type", "dapo"),
    Default(name="vllm_importance_sampling_mode", theirs="sequence_mask", native={"rollout_importance_sampling_mode": "sequence_mask"}),
    Default(name="vllm_importance_sampling_clip_max", theirs="3.0", native={"rollout_importance_sampling_threshold": 3.0}),
    default("lr_scheduler_type", "linear", lr_decay_style="linear"),
    default("adam_beta2", 0.999),
    default("num_train_epochs", 3.0),
    default("max_completion_length", 512),
    default("gradient_checkpointing", True, **_FULL),
    default("vllm_gpu_memory_utilization", 0.3),
    default("save_steps", 500),
    Default(name="save_total_limit", theirs="none", native={"save_total_limit": None}),
    kept("logging_steps", 10, 1),
    kept("use_vllm", False, True),
)


def settle(values: Mapping[str, Any], given: Given) -> Iterator[Change]:
    """What TRL makes of several names together."""
    yield from of_servers(values, program="trl vllm-serve")
    yield from drops_last(values, title="TRL")
    if values.get("vllm_mode") == "server" and not values.get("vllm_server_host") and not values.get("vllm_server_base_url"):
        yield Change(values={"vllm_server_host": ["127.0.0.1"]}, untyped=("vllm_server_host", "0.0.0.0"))
    if holds_out(values):  # by the generation config of training
        yield Change(values=as_in_training(values, 1.0, whole(given, "num_generations", 8)))
    plays = values.get("environment") or values.get("tools")
    if "max_prompt_length" in values and "truncation_strategy" not in values and not plays:
        yield Change(
            values={"truncation_strategy": "left"}, note="max_prompt_length: TRL cuts longer prompts on the left; so is done here."
        )
    if text_of(given, "save_strategy", "steps").lower() in ("no", *OFF):
        yield Change(values={"save_steps": 0}, note="save_strategy no: save_steps 0.")
    off = given.get("eval_strategy", given.get("evaluation_strategy", ["no"])) == ["no"]
    if values.get("eval_steps") and (off or not holds_out(values)):
        why = "eval_strategy is no" if off else "there is no eval_dataset"
        yield Change(values={"eval_steps": None}, note=f"eval_steps ({values['eval_steps']}) does nothing: {why}.")
    if values.get("loss_type") == "cispo" and values.get("epsilon_high") is None:
        yield Change(values={"epsilon_high": values.get("epsilon", 0.2)})
    if not off and holds_out(values) and not values.get("eval_steps"):
        yield Change(values={"eval_steps": values.get("logging_steps", 10)}, untyped=("eval_steps", "logging_steps"))
    idle = [name for name in ADAPTIVE if name in values] if not values.get("use_adaptive_entropy") else []
    if idle:
        yield Change(values=dict.fromkeys(idle), note=f"{' and '.join(idle)} does nothing without use_adaptive_entropy, here as there.")
    if values.get("use_adaptive_entropy") and values.get("top_entropy_quantile", 1.0) < 1:
        note = "entropy_target is held against the mean over all trained tokens here; TRL's is over those of top_entropy_quantile."
        yield Change(values={}, note=note)
    if values.get("tuner_type") == "lora":
        yield from _peft(values)
    yield from of_the_hub(values)
    if values.get("rollout_importance_sampling_mode") == "none":  # the bounds of a correction that is off
        yield Change(values={"rollout_importance_sampling_min": None})


def _peft(values: Mapping[str, Any]) -> Iterator[Change]:
    """TRL's defaults of LoRA, and PEFT's of the layers that have an adapter."""
    if "lora_rank" not in values and not values.get("adapters"):
        yield Change(values={"lora_rank": 16}, untyped=("lora_r", "16"))
    if "lora_dropout" not in values:
        yield Change(values={"lora_dropout": 0.05}, untyped=("lora_dropout", "0.05"))
    if not {"target_modules", "target_regex"} & set(values) and not values.get("adapters"):
        yield Change(values={"target_modules": ["q_proj", "v_proj"]}, untyped=("lora_target_modules", "PEFT's: q_proj v_proj"))


TRL = Dialect(
    name="trl",
    title="TRL",
    hides=NATIVE_SIZES,
    trains_tower=True,
    implies={"allow_unaligned_generation": True},
    names=NAMES,
    defaults=DEFAULTS,
    patterns={"gradient_checkpointing_kwargs.*": Foreign(why=features.KERNELS), "lr_scheduler_kwargs.*": together("`min_lr`")},
    settle=(settle, turns.of_trl, lowest_lr),
    settings=sizes(
        size("per_device_train_batch_size", 8, "completions in one forward on one DP rank"),
        size("gradient_accumulation_steps", 1, "micro-steps in one optimizer step"),
        size("steps_per_generation", None, "micro-steps in one pass over a rollout (default gradient_accumulation_steps)"),
        size("generation_batch_size", None, "completions in one rollout, instead of steps_per_generation"),
        size("num_generations", 8, "completions per prompt"),
        size("num_iterations", 1, "passes over one rollout"),
    ),
)
