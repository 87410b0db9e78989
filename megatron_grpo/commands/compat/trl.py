"""Translation of TRL beyond its table: readers of single names, and CONVERSIONS for several names together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_grpo.commands.compat.foreign_args import OFF, ForeignArgs, Reader, SettingChange
from megatron_grpo.commands.compat.settle import BUILT_IN_REWARDS, as_in_training, drops_last, holds_out, not_left, of_servers, of_the_hub
from megatron_grpo.core.base.files import parse_json
from megatron_grpo.run.config.read import format_value
from megatron_grpo.run.config.table import FALSE, TRUE, InvalidValueError, table

ADAPTIVE = ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")
_REWARDS = {"accuracy_reward": "math", "get_soft_overlong_punishment": "soft_overlong"}
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _is_on(words: Sequence[str]) -> bool:
    word = (words[0] if words else "true").lower()
    if word not in (*TRUE, *FALSE):
        raise InvalidValueError(f"must be true or false, not {word!r}")
    return word in TRUE


def recompute(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read gradient_checkpointing.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    return _FULL if _is_on(words) else {"recompute_granularity": None}


def use_peft(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read use_peft as tuner_type.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    return {"tuner_type": "lora" if _is_on(words) else "full"}


def peft_config(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read a LoraConfig of a Python file, whose defaults are PEFT's. Other objects are refused.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    if list(words) == ["LoraConfig"]:
        return {"tuner_type": "lora"}
    raise InvalidValueError(
        f"({' '.join(words)}) is a Python object. Use use_peft, and its values as lora_r, lora_alpha, lora_target_modules"
    )


def sleep(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read vllm_enable_sleep_mode as sleep_level.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    return {"sleep_level": 2 if _is_on(words) else 0}


def correction(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read vllm_importance_sampling_correction; false switches the correction off.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    return {} if _is_on(words) else {"rollout_importance_sampling_mode": "none"}


def reward_funcs(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read reward_funcs: TRL's built-in rewards are translated, and functions are named as file.py:function or module:function.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    unread = [word for word in words if word not in (*_REWARDS, *BUILT_IN_REWARDS) and not {".", ":"} & set(word)]
    if unread:
        raise InvalidValueError(
            f"({', '.join(unread)}) is a reward function of TRL that is not available here. Use a function as path/to/file.py:function or "
            f"package.module:function; {', '.join(_REWARDS)} are translated"
        )
    settings: dict[str, Any] = {
        "reward_funcs": [_REWARDS.get(word, word if ":" in word else ":".join(word.rsplit(".", 1))) for word in words]
    }
    if "get_soft_overlong_punishment" in words:  # TRL's script uses these values
        settings |= {"soft_max_length": 1280, "soft_cache_length": 256}
    return settings


def warmup(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read warmup_steps: a number of steps, or a fraction of the run if below 1.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    try:
        share = float(words[0])
    except (ValueError, IndexError):
        share = 1.0
    return {"lr_warmup_fraction" if 0 < share < 1 else "lr_warmup_iters": list(words)}


_IDLE_OF_MODEL = ("attn_implementation", "use_cache", "device_map", "low_cpu_mem_usage")


def of_model(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read the supported keys of model_init_kwargs.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    try:
        kwargs = {} if " ".join(words).lower() in OFF else dict(parse_json(" ".join(words)))
    except ValueError:
        raise InvalidValueError(f'needs a mapping as JSON, such as {{"dtype": "bfloat16"}}, not {" ".join(words)!r}') from None
    translated = {"torch_dtype": "torch_dtype", "dtype": "torch_dtype", "trust_remote_code": "trust_remote_code"}
    if untranslated := [name for name in kwargs if name not in (*translated, *_IDLE_OF_MODEL)]:
        raise InvalidValueError(
            f"({', '.join(untranslated)}): only dtype and trust_remote_code are translated; everything else comes from the model's "
            "config.json"
        )
    return {translated[name]: format_value(value) for name, value in kwargs.items() if name in translated}


def held_out_split(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read dataset_test_split: the split of dataset_name that TRL's script evaluates on. It has no effect where nothing is evaluated.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    if args.get("eval_dataset"):
        return {"eval_dataset_split": list(words)}
    has_eval = args.get("eval_strategy", args.get("evaluation_strategy", ["no"])) != ["no"]
    return {"eval_dataset": args["dataset_name"], "eval_dataset_split": list(words)} if has_eval and args.get("dataset_name") else {}


def no_limit(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read max_steps; -1 means no limit.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    return {} if words in (["-1"], ["-1.0"]) else {"max_steps": list(words)}


def steps(name: str) -> Reader:
    """Return a reader of a step interval. A fraction of the run is refused.

    Args:
        name: Foreign name of the interval.
    """

    def reader(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
        if re.fullmatch(r"0?\.\d+", " ".join(words)):
            raise InvalidValueError(
                f"({' '.join(words)}) is a share of the run in TRL, and a number of optimizer steps here. Use a number of steps"
            )
        return {name: list(words)}

    return reader


def lowest_lr(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    """Translate lr_scheduler_kwargs of transformers' cosine_with_min_lr, given as one mapping or as one name each.

    Args:
        values: Native settings read so far, by name.
        args: All foreign names of the run, with their words.
    """
    words = " ".join(args.get("lr_scheduler_kwargs", ["{}"]))
    try:
        kwargs = {} if words.lower() in OFF else dict(parse_json(words))
    except (ValueError, TypeError):
        kwargs = dict(word.partition("=")[::2] for word in args["lr_scheduler_kwargs"])
    prefix = "lr_scheduler_kwargs."
    kwargs |= {name.removeprefix(prefix): " ".join(word) for name, word in args.items() if name.startswith(prefix)}
    style = " ".join(args.get("lr_scheduler_type", ["linear"]))
    if untranslated := [name for name in kwargs if name not in ("min_lr", "min_lr_rate") or style != "cosine_with_min_lr"]:
        raise InvalidValueError(
            f"lr_scheduler_kwargs ({', '.join(untranslated)}) of {style}: only min_lr and min_lr_rate of cosine_with_min_lr are translated"
        )
    lr = float(values.get("lr", 1e-6))
    lowest = float(kwargs["min_lr"]) if kwargs.get("min_lr") else lr * float(kwargs.get("min_lr_rate") or 0)
    if lowest:
        yield SettingChange(values={"min_lr": lowest}, note=f"lr_scheduler_kwargs of cosine_with_min_lr: min_lr {lowest:g}.")


def iterations(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read max_tool_calling_iterations: max_turns is one more, because it counts completions instead of rounds of tool calls.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    try:
        return {"max_turns": int(words[0]) + 1}
    except (ValueError, IndexError):
        raise InvalidValueError(f"must be a number of rounds of tool calls, not {' '.join(words)!r}") from None


def convert(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    """Yield the changes that follow from several of TRL's names.

    Args:
        values: Native settings read so far, by name.
        args: All foreign names of the run, with their words.
    """
    yield from of_servers(values, program="trl vllm-serve")
    yield from drops_last(values, title="TRL")
    if values.get("vllm_mode") == "server" and not values.get("vllm_server_host") and not values.get("vllm_server_base_url"):
        yield SettingChange(values={"vllm_server_host": ["127.0.0.1"]}, untyped=("vllm_server_host", "0.0.0.0"))
    if holds_out(values):  # with the generation config of training
        yield SettingChange(values=as_in_training(values, 1.0, args.integer("num_generations", 8)))
    plays = values.get("environment") or values.get("tools")
    if "max_prompt_length" in values and "truncation_strategy" not in values and not plays:
        yield SettingChange(
            values={"truncation_strategy": "left"}, note="max_prompt_length: longer prompts are cut on the left, as in TRL."
        )
    if args.text("save_strategy", "steps").lower() in ("no", *OFF):
        yield SettingChange(values={"save_steps": 0}, note="save_strategy no: save_steps 0.")
    has_no_eval = args.get("eval_strategy", args.get("evaluation_strategy", ["no"])) == ["no"]
    if values.get("eval_steps") and (has_no_eval or not holds_out(values)):
        reason = "eval_strategy is no" if has_no_eval else "eval_dataset is not set"
        yield SettingChange(values={"eval_steps": None}, note=f"eval_steps ({values['eval_steps']}) has no effect: {reason}.")
    if values.get("loss_type") == "cispo" and values.get("epsilon_high") is None:
        yield SettingChange(values={"epsilon_high": values.get("epsilon", 0.2)})
    if not has_no_eval and holds_out(values) and not values.get("eval_steps"):
        yield SettingChange(values={"eval_steps": values.get("logging_steps", 10)}, untyped=("eval_steps", "logging_steps"))
    idle = [name for name in ADAPTIVE if name in values] if not values.get("use_adaptive_entropy") else []
    if idle:
        yield SettingChange(
            values=dict.fromkeys(idle), note=f"{' and '.join(idle)} has no effect without use_adaptive_entropy, in both systems."
        )
    if values.get("use_adaptive_entropy") and values.get("top_entropy_quantile", 1.0) < 1:
        note = "entropy_target is compared with the mean over all trained tokens here; in TRL over those of top_entropy_quantile."
        yield SettingChange(note=note)
    if values.get("tuner_type") == "lora":
        yield from _peft(values, _OF_PEFT if "peft_config" in args else _OF_TRL)
    yield from of_the_hub(values)
    if values.get("rollout_importance_sampling_mode") == "none":  # bounds of a correction that is off
        yield SettingChange(values={"rollout_importance_sampling_min": None})


# Defaults of the object that holds an adapter's settings: ModelConfig on TRL's command line, PEFT's LoraConfig in a Python file.
_OF_TRL = {"lora_rank": 16, "lora_alpha": 32.0, "lora_dropout": 0.05}
_OF_PEFT = {"lora_rank": 8, "lora_alpha": 8.0, "lora_dropout": 0.0}


def _peft(values: Mapping[str, Any], defaults: Mapping[str, float]) -> Iterator[SettingChange]:
    """Apply defaults of LoRA, and PEFT's default target modules."""
    for name, default in defaults.items():
        unread = name in values or values.get("adapters") and name != "lora_dropout"
        if not unread and default != table()[name].default:
            yield SettingChange(values={name: default}, untyped=(name.replace("rank", "r"), f"{default:g}"))
    if not {"target_modules", "target_regex"} & set(values) and not values.get("adapters"):
        yield SettingChange(values={"target_modules": ["q_proj", "v_proj"]}, untyped=("lora_target_modules", "PEFT's: q_proj v_proj"))


def of_turns(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    """Yield the changes for multi-turn runs.

    Args:
        values: Native settings read so far, by name.
        args: All foreign names of the run, with their words.
    """
    if values.get("environment") or values.get("tools"):
        if "max_turns" not in values:
            yield SettingChange(note="max_tool_calling_iterations is unlimited by default in TRL; max_turns is 8 here.")
        yield from not_left(values, "TRL")


CONVERSIONS = (convert, of_turns, lowest_lr)
