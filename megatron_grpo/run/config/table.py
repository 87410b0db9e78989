"""The settings of settings.py as a table for parsers, and the parsing of single values. No torch."""

from __future__ import annotations

import ast
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

from megatron_grpo.core.base.files import parse_json, read_text
from megatron_grpo.core.field import Setting
from megatron_grpo.run.config.settings import Config

# Groups of rarely used settings, each under one name that `--help` lists once: (topic, prefixes of the names of its keys). A key is a
# setting like any other, with its own flag.
MAPS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "recompute_kwargs": ("layers and modules of activation recompute", ("recompute_method",
                         "recompute_num_", "recompute_modules", "vit_gradient_")),
    "lora_kwargs": ("further settings of LoRA", ("lora_dropout", "use_rslora", "lora_dtype", "target_regex", "exclude_modules",
                                                            "rank_pattern", "alpha_pattern")),
    "freeze_kwargs": ("frozen weights with tuner_type full", ("freeze_", "trainable_")),
    "pipeline_kwargs": ("uneven pipeline stages", ("decoder_", "account_for_", "pipeline_model_parallel_layout", "microbatch_group_")),
    "kernel_kwargs": ("kernels and communication of Megatron-Core", ("cp_comm_", "moe_permute_", "moe_shared_", "moe_enable_")),
    "image_kwargs": ("images", ("data_root", "max_pixels", "min_pixels", "limit_images")),
    "server_kwargs": ("connection to servers", ("vllm_server_port", "vllm_server_timeout", "vllm_server_ca", "vllm_server_token_")),
    "turn_kwargs": ("further settings of episodes", ("turn_", "environment_timeout", "max_environment_", "max_failed_", "tool_call_")),
    "agent_kwargs": ("columns and limits of agents", ("agent_verdict", "agent_columns", "agent_env", "agent_timeout",
                                                                 "agent_memory_", "agent_host", "agent_port", "agent_ssl_",
                                                                 "max_agent")),
    "reward_kwargs": ("options of built-in rewards", ("accuracy_", "length_target", "cosine_", "repetition_", "code_", "reward_model",
                                                            "llm_judge_", "reward_concurrency")),
    "loss_kwargs": ("options of one loss_type", ("sapo_", "vespo_", "fipo_", "real_")),
    "entropy_kwargs": ("adaptive entropy bonus", ("use_adaptive_entropy", "entropy_coef_", "entropy_target")),
    "schedule_kwargs": ("learning rate and weight decay over the run", ("lr_decay_iters", "lr_wsd_", "lr_warmup_init",
                                                                        "weight_decay_incr_", "start_weight_", "end_weight_")),
    "skip_kwargs": ("skipped optimizer steps", ("skip_grad_", "max_skipped_")),
    "optimizer_dtypes": ("gradients and optimizer state below float32", ("use_precision_", "main_grads_", "main_params_", "exp_avg_")),
    "debug_kwargs": ("dumps and checks for debugging", ("record_rows", "check_replicas", "debug_dump_")),
    "stop_kwargs": ("time limits of a run", ("stop_drain_", "stop_after_", "stop_before_", "requeue")),
    "hub_kwargs": ("upload to the Hugging Face Hub", ("push_to_hub", "hub_")),
    "eval_sampling": ("sampling of held-out prompts", ("eval_temperature", "eval_top_", "eval_min_p", "eval_max_", "eval_generation_",
                                                            "eval_seed")),
}  # fmt: skip
TRUE, FALSE, NONE = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null")


def canonical(name: str) -> str:
    """Return the name with underscores and without leading dashes: `--micro-batch-size` becomes `micro_batch_size`."""
    return name.lstrip("-").replace("-", "_")


@cache
def table() -> Mapping[str, Setting]:
    """Return every setting by name, in the order of --help."""
    rows = {}
    for group, section in Config().groups().items():
        for f in fields(section):
            rows[f.name] = replace(f.metadata["setting"], name=f.name, group=group, default=getattr(section, f.name), **_type(str(f.type)))
    return rows


def _type(annotation: str) -> dict[str, Any]:
    """Return the fields of `Setting` that an annotation implies, such as `list[str]` or `Literal["a", "b"] | None`."""
    kind = annotation.removesuffix("| None").strip()
    is_list, is_map = kind.startswith("list["), kind.startswith("dict[str, ")
    choices: Sequence[str] = ()
    if kind.startswith("Literal["):
        kind, choices = "str", ast.literal_eval(f"({kind.removeprefix('Literal[').removesuffix(']')},)")
    elif is_list or is_map:
        kind = kind.removeprefix("list[").removeprefix("dict[str, ").removesuffix("]")
    return {"kind": kind, "choices": choices, "optional": annotation.endswith("| None"), "is_list": is_list, "is_map": is_map}


@cache
def keys() -> Mapping[str, Sequence[str]]:
    """Return the names of the settings of each map in `MAPS`."""
    return {name: [setting for setting in table() if setting.startswith(begins)] for name, (_, begins) in MAPS.items()}


@cache
def names() -> Mapping[str, Setting]:
    """Return every setting by each of its names, including aliases."""
    return {**table()} | {name: setting for setting in table().values() for name in setting.aliases}


class InvalidValueError(ValueError):
    """A value that a setting cannot have.

    Args:
        message: Phrase that completes "<name> ...".
    """

    def __init__(self, message: str, suggestions: Sequence[Any] = ()):
        super().__init__(message)
        self.suggestions = list(suggestions)


def read_value(setting: Setting, raw: Any) -> Any:
    """Return the value of a setting from what was typed.

    Args:
        raw: Words after a flag (a list), or the value of a YAML key. An empty list after a flag means true for a boolean; () is an empty
            list.

    Raises:
        InvalidValueError: With a phrase that completes "<name> ...".
    """
    words = list(raw) if isinstance(raw, (list, tuple)) else [raw]
    if setting.is_map:
        return _map(setting, words)
    if setting.is_list:
        if _is_none(words) and "none" not in setting.choices and setting.default != ["none"]:
            words = []
        if "" in words:
            raise InvalidValueError(f"has an empty value among {len(words)}. Remove it" if len(words) > 1 else "is empty. Omit it")
        return [_scalar(setting, word) for word in words]
    if not words and setting.kind == "bool" and raw != ():
        return True
    if len(words) != 1:
        text = " ".join(map(str, words))
        raise InvalidValueError(f"takes one value, but got {len(words)} ({text})" if words else "requires a value")
    word = words[0]
    if _is_none(words) and word not in setting.choices:
        if setting.optional:
            return None
        if setting.kind == "str" and setting.default == "":
            return ""
        if word is None or setting.kind != "str" or not setting.choices:
            raise InvalidValueError(f"cannot be none. Expected {_article(setting)}")
    return _scalar(setting, word)


def _is_none(words: Sequence[Any]) -> bool:
    return len(words) == 1 and (words[0] is None or (isinstance(words[0], str) and words[0].lower() in NONE))


def _map(setting: Setting, words: Sequence[Any]) -> dict[str, Any]:
    """Return the {"name": value} of a YAML mapping, of JSON in one word, or of words `name=value`."""
    if _is_none(words):
        return {}
    values: dict[str, Any] = {}
    for word in words:
        if isinstance(word, str) and word.lstrip().startswith("{"):
            try:
                word = parse_json(word)
            except ValueError as error:
                raise InvalidValueError(f"is not valid JSON: {error}") from error
        if not isinstance(word, dict):
            # Values (paths) may contain "=", and so may names (patterns), depending on the kind.
            name, equals, value = str(word).partition("=") if setting.kind in ("str", "Any") else str(word).rpartition("=")
            if not equals or not name:
                raise InvalidValueError(f"requires name=value, or a JSON object, not {word!r}")
            word = {name: _as_json(value) if setting.kind == "Any" else value}
        if twice := values.keys() & word.keys():
            raise InvalidValueError(f"sets {', '.join(sorted(map(str, twice)))} more than once")
        values.update({str(name): value if setting.kind == "Any" else _scalar(setting, value) for name, value in word.items()})
    return values


def _as_json(word: str) -> Any:
    """Return the value after `name=`: parsed if it is JSON (`true`, `3`, `[1, 2]`), else the string."""
    try:
        return parse_json(word)
    except ValueError:
        return word


def _article(setting: Setting) -> str:
    return {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a word", "Any": "a mapping"}[setting.kind]


def _scalar(setting: Setting, word: Any) -> Any:
    if isinstance(word, (dict, list, tuple)) or word is None:
        raise InvalidValueError(f"must be {_article(setting)}, not {word!r}")
    text = ("true" if word else "false") if isinstance(word, bool) else str(word).strip()
    if setting.kind == "bool":
        if text.lower() in TRUE:
            return True
        if text.lower() in FALSE:
            return False
        raise InvalidValueError(f"must be true or false, not {text!r}", [True, False])
    if setting.kind in ("int", "float"):
        return _number(setting, word, text)
    if not text and setting.default != "" and setting.name != "system":
        raise InvalidValueError("is empty. Omit it, or set a value")
    if text in setting.refused:
        raise InvalidValueError(f"cannot be {text!r}: {setting.refused[text]}. Supported: {', '.join(setting.choices)}")
    if setting.choices and text not in setting.choices:
        close = close_to(text, setting.choices)
        raise InvalidValueError(f"cannot be {text!r}. Supported: {', '.join(setting.choices)}", close)
    return _text_or_file(text) if setting.name == "system" else text


def _text_or_file(text: str) -> str:
    """Return the content of a file if the text ends in .txt, as in Megatron-SWIFT, else the text itself."""
    if not text.endswith(".txt"):
        if os.path.isfile(text):
            raise InvalidValueError(
                f"({text}) is the name of a file, but would be used as the text itself: only files whose names end in .txt are read"
            )
        return text
    try:
        return read_text(text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InvalidValueError(f"({text}) cannot be read as a text file: {reason}") from None


def _number(setting: Setting, word: Any, text: str) -> int | float:
    error = InvalidValueError(f"must be {_article(setting)}, not {text!r}")
    if isinstance(word, bool):
        raise error
    try:
        if setting.kind == "int":
            try:
                return int(text)
            except ValueError:
                number = float(text)  # 1e3 and 4.0 are integers too
                if number != int(number):
                    raise error from None
                return int(number)
        number = float(text)  # PyYAML reads 1e-6 as a string, which is converted here
    except (ValueError, OverflowError):
        raise error from None
    if not math.isfinite(number):
        raise error
    return number


_UNITS = {"": 1, "b": 1, **{f"{letter}b": 1000**k for k, letter in enumerate("kmgt", 1)},
          **{f"{letter}ib": 1024**k for k, letter in enumerate("kmgt", 1)}}  # fmt: skip


def parse_byte_size(size: str) -> int | None:
    """Return a size in bytes: `5GB` is 5 * 1000**3, `5GiB` is 5 * 1024**3. None if it is not a size above 0.

    Args:
        size: Number and unit: KB, MB, GB, TB, or KiB, MiB, GiB, TiB.
    """
    match = re.fullmatch(r"([\d.]+)\s*([A-Za-z]*)", size.strip())
    try:
        return int(float(match[1]) * _UNITS[match[2].lower()]) or None if match else None
    except (KeyError, ValueError):
        return None


def close_to(word: str, known: Sequence[str], *, limit: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return the known names most similar to a word, best first.

    Args:
        limit: Maximum number of names.
        cutoff: Minimum similarity, 0 to 1.
    """
    import difflib  # takes 8 ms, needed only after a mistake

    return difflib.get_close_matches(word, known, n=limit, cutoff=cutoff)
