"""Translation of Megatron-SWIFT beyond its table: readers of single names, and CONVERSIONS for several names together."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from megatron_grpo.commands.compat.foreign_args import NOTE, ForeignArgs, Reader, SettingChange
from megatron_grpo.commands.compat.settle import (
    BUILT_IN_REWARDS,
    OWN_EPISODES,
    as_in_training,
    holds_out,
    idle_schedule,
    not_left,
    of_servers,
    of_the_hub,
)
from megatron_grpo.commands.compat.tables import sentence
from megatron_grpo.core.base.files import parse_json, read_text
from megatron_grpo.run.config.table import InvalidValueError

_REWARDS = {"accuracy": "math", "format": "format", "cosine": "cosine", "repetition": "repetition", "soft_overlong": "soft_overlong"}
_ONLY_OURS = tuple(name for name in BUILT_IN_REWARDS if name not in _REWARDS)  # of `math` there, GRPO cannot call the function


def _of_plugins(args: ForeignArgs) -> dict[str, str]:
    """Return path:Class of each reward that a plugin registers as `orms["name"] = Class`, by name. The files are not run."""
    result: dict[str, str] = {}
    for file in args.get("external_plugins", ()):
        with suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # deep nesting is one of the last two
            for line in ast.parse(read_text(file)).body:
                if (
                    isinstance(line, ast.Assign)
                    and isinstance(line.value, ast.Name)
                    and isinstance(target := line.targets[0], ast.Subscript)
                ):
                    result |= (
                        {str(ast.literal_eval(target.slice)): f"{file}:{line.value.id}"} if ast.unparse(target.value) == "orms" else {}
                    )
    return result


def reward_funcs(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read reward_funcs: built-in rewards of Megatron-SWIFT and rewards of plugins are translated.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    of_plugins = _of_plugins(args)
    unread = [word for word in words if word not in (*_REWARDS, *_ONLY_OURS, *of_plugins) and ":" not in word]
    if unread:
        plugins = args.get("external_plugins", ())
        reason = f"no file of external_plugins ({', '.join(plugins)}) that can be read registers it as orms['{unread[0]}'] = Class. "
        raise InvalidValueError(
            f"({', '.join(unread)}) is a reward function of Megatron-SWIFT or of a plugin, and is not available here: "
            f"{reason if plugins else ''}Use a function or a class as {(*plugins, 'path/to/file.py')[0]}:name; {', '.join(_REWARDS)} are "
            "translated"
        )
    return {"reward_funcs": [of_plugins.get(word, _REWARDS.get(word, word)) for word in words]}


def plugins(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read external_plugins; refused if nothing of them is used. Missing names in them are reported where they are used.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    unknown_funcs = [word for word in args.get("reward_funcs", ()) if word not in (*_REWARDS, *_ONLY_OURS)]
    if not unknown_funcs and not {"gym_env", "multi_turn_scheduler"} & set(args):
        raise InvalidValueError(f"({' '.join(words)}): {sentence('PLUGINS')}")
    return {}


def dataset(native: str) -> Reader:
    """Return a reader of data set names, for the setting `native`. Other hubs than Hugging Face are refused.

    Args:
        native: Name of the setting.
    """

    def reader(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
        if len(words) != 1 and native != "dataset":
            raise InvalidValueError(f"({' '.join(words)}) has {len(words)} data sets. Use eval_datasets, with a name for each")
        names = [word if Path(word).exists() else word.removeprefix("hf::").removeprefix("HF::") for word in words]
        if other_hub := [
            name for name in names if ":" in name and not Path(name).exists() and not re.match(r"[^:/]+/[^:/]+:[^:/]+$", name)
        ]:
            raise InvalidValueError(f"({other_hub[0]}) is on another hub. Use a file, a directory, or a Hub name (owner/name:subset)")
        return {native: names[0]} | ({"further_datasets": names[1:]} if names[1:] else {})

    return reader


def one_adapter(native: str) -> Reader:
    """Return a reader of a single adapter, for the setting `native`.

    Args:
        native: Name of the setting.
    """

    def reader(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
        if len(words) != 1:
            raise InvalidValueError(f"({' '.join(words)}) has {len(words)} adapters. One adapter is trained, and one is the reference")
        return {native: words[0]}

    return reader


def minutes(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read ddp_timeout, which is in seconds.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    try:
        return {"distributed_timeout_minutes": float(words[0]) / 60}
    except (ValueError, IndexError):
        raise InvalidValueError(f"must be a number of seconds, not {' '.join(words)!r}") from None


def columns(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read the mapping of columns to Megatron-SWIFT's standard names.

    `query` is the prompt here; other standard names are columns that rewards may read under the same name.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    text = " ".join(words).strip()
    try:
        columns = parse_json(text) if text.startswith("{") else dict(word.rsplit("=", 1) for word in words)
    except ValueError:
        raise InvalidValueError(f'needs a mapping as JSON, such as {{"question": "query"}}, not {text!r}') from None
    if "history" in columns.values():
        raise InvalidValueError("(history): earlier turns of a conversation must be in a column messages here")
    return {"columns": {column: "prompt" if name == "query" else name for column, name in columns.items()}}


def finetune(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read finetune, which has no effect without mcore_model.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    return {"finetune": list(words)} if args.get("mcore_model") else {}


def system(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    r"""Read the system prompt; \n is a line break.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    return {"system": [" ".join(words).replace("\\n", "\n")]}


GYM = "gym_scheduler"  # Megatron-SWIFT's scheduler that runs an `Env`


def _class_argument(words: Sequence[str], args: ForeignArgs, description: str) -> Mapping[str, Any]:
    (name,) = words
    if ":" in name:
        return {"environment": name}
    if own := next((own for own in OWN_EPISODES if args.get(own)), ""):
        return {NOTE: f"({name}) is {description} registered in Megatron-SWIFT, which is not run; {own} is used."}
    raise InvalidValueError(
        f"({name}) is {description} registered in Megatron-SWIFT, which is not available here. Use a class as path/to/file.py:Class. "
        f"{sentence('OWN_EPISODES')}"
    )


def scheduler(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read multi_turn_scheduler as an environment class.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    return {} if list(words) == [GYM] and "gym_env" in args else _class_argument(words, args, "a scheduler")


def gym_env(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read gym_env as an environment class.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    return _class_argument(words, args, "an environment")


def use_gym_env(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Accept use_gym_env; `of_turns` translates it.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    return {}


def max_turns(words: Sequence[str], args: ForeignArgs) -> Mapping[str, Any]:
    """Read max_turns; ignored if the scheduler or environment is refused already, to avoid a second problem.

    Args:
        words: Words of its value, as typed.
        args: All foreign names of the run, with their words.
    """
    registered = [word for name in ("gym_env", "multi_turn_scheduler") for word in args.get(name, ()) if ":" not in word and word != GYM]
    return {} if registered and not set(OWN_EPISODES) & set(args) else {"max_turns": list(words)}


def of_turns(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    """Yield the changes for multi-turn runs.

    Args:
        values: Native settings read so far, by name.
        args: All foreign names of the run, with their words.

    Raises:
        InvalidValueError: use_gym_env without an environment.
    """
    if not (values.get("environment") or values.get("tools")):
        if list(args.get("use_gym_env", ())) == ["true"] and not {"gym_env", "multi_turn_scheduler"} & set(args):
            raise InvalidValueError(
                "use_gym_env (true) uses rewards of an environment, which is not set. Use gym_env path/to/file.py:Class. The column "
                "env_config of rows is not read"
            )
        return
    if list(args.get("use_gym_env", ())) == ["true"] and "environment" not in values.get("reward_funcs", ()):
        yield SettingChange(
            values={"reward_funcs": [*values.get("reward_funcs", ()), "environment"]},
            note="use_gym_env true: the environment's rewards are the built-in reward `environment`.",
        )
    if "completion_length_limit_scope" not in args:
        yield SettingChange(
            note="max_completion_length limits one turn in Megatron-SWIFT by default (completion_length_limit_scope per_round). Here it "
            "limits the whole episode after its prompt, including tokens of the environment.",
        )
    if "max_turns" not in values:
        yield SettingChange(note="max_turns is unlimited by default in Megatron-SWIFT, and 8 here.")
    yield from not_left(values, "Megatron-SWIFT")


def _convert(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    """Yield the changes specific to the Megatron trainer."""
    if "max_steps" in values and "num_train_epochs" in values and values.get("streaming"):
        yield SettingChange(
            values={"num_train_epochs": None}, note="train_iters takes precedence: Megatron-SWIFT ignores epochs with streaming."
        )
    elif "max_steps" in values and "num_train_epochs" in values:
        yield SettingChange(
            values={"max_steps": None},
            note=f"num_train_epochs ({values['num_train_epochs']:g}) sets the length of the run: Megatron-SWIFT recomputes train_iters "
            f"({values['max_steps']}) if both are set.",
        )
    if values.get("sequence_parallel") and values.get("tensor_model_parallel_size", 1) == 1:
        yield SettingChange(values={"sequence_parallel": None}, note="sequence_parallel has no effect without TP, in both systems.")
    yield from idle_schedule(values, args, style="cosine")
    if values.get("weight_decay_incr_style", "constant") != "constant" and "start_weight_decay" in values:
        note = "weight_decay has no effect with start_weight_decay and end_weight_decay, in both systems."
        yield SettingChange(values={"weight_decay": 0.0}, note=note)
    idle = [name for name in ("no_load_optim", "no_load_rng") if values.get(name)]
    if idle and values.get("finetune", True):
        note = f"{' and '.join(idle)} has no effect unless finetune is false, in both systems: a new run starts without them."
        yield SettingChange(values=dict.fromkeys(idle), note=note)
    yield from _tuner(values)


def _common_changes(values: Mapping[str, Any], args: ForeignArgs, *, tuner: str) -> Iterator[SettingChange]:
    """Yield the changes common to both trainers: rows, evaluation, servers, and the loss. `tuner`: default tuner_type."""
    if values.get("shuffle_buffer_size") and not values.get("streaming"):
        yield SettingChange(
            values={"shuffle_buffer_size": None}, note="shuffle_buffer_size has no effect without streaming, in both systems."
        )
    if values.get("interleave_prob") and not values.get("further_datasets"):
        yield SettingChange(values={"interleave_prob": None}, note="interleave_prob has no effect with one dataset, in both systems.")
    if values.get("eval_steps") and not holds_out(values):
        yield SettingChange(
            values={"eval_steps": None},
            note=f"eval_steps ({values['eval_steps']}) has no effect without val_dataset or split_dataset_ratio, in both systems.",
        )
    max_model_len, required = (
        values.get("vllm_max_model_len"),
        values.get("max_prompt_length", 0) + values.get("max_completion_length", 512),
    )
    if max_model_len and max_model_len < required and values.get("vllm_mode") != "server" and not values.get("environment"):
        note = (
            f"vllm_max_model_len ({max_model_len}) truncates completions in ms-swift; here it is max_length + max_completion_length, "
            f"{required}."
        )
        yield SettingChange(values={"vllm_max_model_len": required}, note=note)
    if values.get("vllm_enable_lora") is False and values.get("tuner_type", tuner) == "full":
        yield SettingChange(values={"vllm_enable_lora": None}, note="vllm_enable_lora has no effect with tuner_type full, in both systems.")
    yield from of_servers(values, program="swift rollout")
    if values.get("vllm_mode") == "server" and not any(values.get(name) for name in OWN_EPISODES):
        yield SettingChange(note=f"What differs: an episode has one turn. A `swift rollout` of another script may play more "
                            f"(multi_turn_scheduler, gym_env), which is not known here. {sentence('OWN_EPISODES')}.")  # fmt: skip
    yield from of_the_hub(values)
    if holds_out(values):  # by the request_config of training
        yield SettingChange(values=as_in_training(values, 0.9, values.get("num_generations", 8)))
        if not values.get("eval_steps"):
            yield SettingChange(values={"eval_steps": values.get("save_steps", 500)}, untyped=("eval_steps", "save_steps"))
    yield from _loss(values)


def _loss(values: Mapping[str, Any]) -> Iterator[SettingChange]:
    """Yield the changes for the loss, its corrections and a teacher."""
    mode = values.get("rollout_importance_sampling_mode", "none")
    if mode.startswith("sequence_"):
        remark = (
            " It then weights each token by its own ratio; here tokens have the ratio of the sequence." if mode == "sequence_mask" else ""
        )
        yield SettingChange(
            values={"rollout_is_geometric": True},
            note=f"rollout_importance_sampling_mode {mode} uses the geometric mean over a sequence in Megatron-SWIFT: rollout_is_geometric "
            f"true.{remark}",
        )
    if values.get("loss_type") == "cispo" and values.get("epsilon_high") is None:
        yield SettingChange(values={"epsilon_high": values.get("epsilon", 0.2)})
    if values.get("loss_type") == "real":
        yield SettingChange(
            note="loss_type real: a completion whose reward equals its group's mean counts as wrong in Megatron-SWIFT; here it counts on "
            "neither side. A group may be in several micro-batches.",
        )
    if values.get("teacher_model_server"):
        requirement = "must be a server of `megatron-grpo serve --frozen true` here; Megatron-SWIFT uses vLLM's or its own API"
        yield SettingChange(note=f"teacher_model_server {requirement}.")
    elif "teacher_kl_coef" in values and not values.get("teacher_model"):
        yield SettingChange(values={"teacher_kl_coef": None}, note="teacher_kl_coef has no effect without a teacher, in both systems.")
    if "repetition" in values.get("reward_funcs", ()):
        yield SettingChange(note="The reward repetition counts n-grams of tokens here, of words in Megatron-SWIFT.")


def _tuner(values: Mapping[str, Any]) -> Iterator[SettingChange]:
    """Yield the changes for LoRA: its defaults, and tuner_type lora if only an adapter is given."""
    adapter_names = [name for name in ("adapters", "ref_adapters") if values.get(name)]
    if values.get("tuner_type", "full") != "lora" and adapter_names:
        yield SettingChange(
            values={"tuner_type": "lora"}, note=f"{' and '.join(adapter_names)}: as in Megatron-SWIFT, this implies tuner_type lora."
        )
    elif values.get("tuner_type", "full") != "lora":
        if "merge_lora" in values:
            yield SettingChange(values={"merge_lora": None}, note="merge_lora has no effect with tuner_type full, in both systems.")
        if any(values.get(f"{name}{end}") for name in ("freeze_parameters", "trainable_parameters") for end in ("", "_regex")):
            remark = (
                "matched against Hugging Face names here; Megatron-SWIFT matches names of Megatron's modules, which count layers by "
                "pipeline stage"
            )
            yield SettingChange(note=f"freeze_parameters and trainable_parameters, and their _regex, are {remark}.")
        return
    yield from adapter(values)
    if "merge_lora" not in values and values.get("export_hf", True):
        yield SettingChange(values={"merge_lora": True}, untyped=("merge_lora", "true"))
    yield SettingChange(
        note="Megatron-SWIFT has one matrix A for q, k and v, and one for gate and up; here each has a separate one, as in PEFT."
    )


def adapter(values: Mapping[str, Any]) -> Iterator[SettingChange]:
    """Apply Megatron-SWIFT's LoRA defaults.

    Args:
        values: Native settings read so far, by name.
    """
    if values.get("target_regex") and "target_modules" in values:
        yield SettingChange(
            values={"target_modules": None}, note="target_regex takes precedence over target_modules, as in Megatron-SWIFT."
        )
    if "lr" not in values:
        yield SettingChange(values={"lr": 1e-4}, untyped=("lr", "0.0001"))
    if "lora_dropout" not in values:
        yield SettingChange(values={"lora_dropout": 0.05}, untyped=("lora_dropout", "0.05"))
    if "vllm_enable_lora" not in values:
        yield SettingChange(
            note="vllm_enable_lora defaults to false in Megatron-SWIFT: vLLM gets merged weights, and bfloat16 rounds away most of the "
            "first updates. Here it gets the adapter.",
        )


def _advantages(values: Mapping[str, Any], args: ForeignArgs) -> Iterator[SettingChange]:
    """Translate reinforce_plus_plus, which in Megatron-SWIFT subtracts the group's mean and divides by the std of scale_rewards.

    Its guide says `batch`.
    """
    estimator, scale = values.get("advantage_estimator", "grpo"), values.get("scale_rewards")
    if estimator != "grpo" and "kl_in_reward" not in values:
        yield SettingChange(values={"kl_in_reward": True}, untyped=("kl_in_reward", f"true with {estimator}"))
    if estimator == "reinforce_plus_plus":
        if scale in (None, "batch"):
            settings = {"advantage_estimator": "reinforce_plus_plus_baseline", "scale_rewards": "batch"}
        else:
            settings = {"advantage_estimator": "grpo"}
        description = ", ".join(f"{name} {value}" for name, value in settings.items())
        yield SettingChange(values=settings, note=f"advantage_estimator reinforce_plus_plus of Megatron-SWIFT is {description} here.")
    elif estimator == "rloo" and scale not in (None, "none"):
        raise InvalidValueError(
            f"advantage_estimator rloo with scale_rewards {scale} divides by a standard deviation; rloo is not scaled here. Use "
            "scale_rewards none"
        )


def of_both(tuner: str) -> tuple[Callable[..., Iterator[SettingChange]], ...]:
    """Return the parts of CONVERSIONS common to both trainers.

    Args:
        tuner: Default tuner_type.
    """
    return partial(_common_changes, tuner=tuner), of_turns, _advantages


CONVERSIONS = (_convert, *of_both("full"))
