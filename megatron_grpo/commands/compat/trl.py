"""Translation of TRL beyond its table: readers of single names, and steps for several names together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_grpo.commands.compat.foreign_args import OFF, FrameworkArgs, SettingChange
from megatron_grpo.commands.compat.settle import BUILT_IN_REWARDS, as_in_training, holds_out, read_mapping
from megatron_grpo.core.base.files import parse_json
from megatron_grpo.run.config.read import format_value
from megatron_grpo.run.config.table import InvalidValueError

_REWARDS = {"accuracy_reward": "math", "get_soft_overlong_punishment": "soft_overlong"}


def peft_config(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read a LoraConfig of a Python file, whose defaults are PEFT's. Other objects are refused."""
    if list(words) == ["LoraConfig"]:
        return {"tuner_type": "lora"}
    raise InvalidValueError(
        f"({' '.join(words)}) is a Python object. Use use_peft, and its values as lora_r, lora_alpha, lora_target_modules"
    )


def reward_funcs(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read reward_funcs: TRL's built-in rewards are translated, and functions are named as file.py:function or module:function."""
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


def warmup(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read warmup_steps: a number of steps, or a fraction of the run if below 1."""
    try:
        share = float(words[0])
    except (ValueError, IndexError):
        share = 1.0
    return {"lr_warmup_fraction" if 0 < share < 1 else "lr_warmup_iters": list(words)}


_IDLE_OF_MODEL = ("attn_implementation", "use_cache", "device_map", "low_cpu_mem_usage")


def read_model_kwargs(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read the supported keys of model_init_kwargs."""
    kwargs = {} if " ".join(words).lower() in OFF else read_mapping(words, '{"dtype": "bfloat16"}')
    translated = {"torch_dtype": "torch_dtype", "dtype": "torch_dtype", "trust_remote_code": "trust_remote_code"}
    if untranslated := [name for name in kwargs if name not in (*translated, *_IDLE_OF_MODEL)]:
        raise InvalidValueError(
            f"({', '.join(untranslated)}): only dtype and trust_remote_code are translated; everything else comes from the model's "
            "config.json"
        )
    return {translated[name]: format_value(value) for name, value in kwargs.items() if name in translated}


def held_out_split(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read dataset_test_split: the split of dataset_name that TRL's script evaluates on. It has no effect where nothing is evaluated."""
    if args.get("eval_dataset"):
        return {"eval_dataset_split": list(words)}
    has_eval = args.get("eval_strategy", args.get("evaluation_strategy", ["no"])) != ["no"]
    return {"eval_dataset": args["dataset_name"], "eval_dataset_split": list(words)} if has_eval and args.get("dataset_name") else {}


def steps(words: Sequence[str], args: FrameworkArgs, native: str) -> Mapping[str, Any]:
    """Read a step interval. A fraction of the run is refused."""
    if re.fullmatch(r"0?\.\d+", " ".join(words)):
        raise InvalidValueError(
            f"({' '.join(words)}) is a share of the run in TRL, and a number of optimizer steps here. Use a number of steps"
        )
    return {native: list(words)}


def lowest_lr(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Translate lr_scheduler_kwargs of transformers' cosine_with_min_lr, given as one mapping or as one name each."""
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


def iterations(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read max_tool_calling_iterations: max_turns is one more, because it counts completions instead of rounds of tool calls."""
    try:
        return {"max_turns": int(words[0]) + 1}
    except (ValueError, IndexError):
        raise InvalidValueError(f"must be a number of rounds of tool calls, not {' '.join(words)!r}") from None


def settle_evaluation(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Evaluate with the generation config of training."""
    if holds_out(values):
        yield SettingChange(values=as_in_training(values, 1.0, args.integer("num_generations")))


def settle_intervals(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Read the strategies of saving and evaluation."""
    if args.text("save_strategy").lower() in ("no", *OFF):
        yield SettingChange(values={"save_steps": 0}, note="save_strategy no: save_steps 0.")
    has_no_eval = args.get("eval_strategy", args.get("evaluation_strategy", ["no"])) == ["no"]
    if values.get("eval_steps") and (has_no_eval or not holds_out(values)):
        reason = "eval_strategy is no" if has_no_eval else "eval_dataset is not set"
        yield SettingChange(values={"eval_steps": None}, note=f"eval_steps ({values['eval_steps']}) has no effect: {reason}.")
    if not has_no_eval and holds_out(values) and not values.get("eval_steps"):
        yield SettingChange(values={"eval_steps": values.get("logging_steps", 10)}, untyped=("eval_steps", "logging_steps"))
