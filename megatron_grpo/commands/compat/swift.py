"""Translation of Megatron-SWIFT beyond its table: readers of single names, and steps for several names together."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_grpo.commands.compat.foreign_args import NOTE, FrameworkArgs, SettingChange
from megatron_grpo.commands.compat.settle import BUILT_IN_REWARDS, OWN_EPISODES, as_in_training, holds_out
from megatron_grpo.commands.compat.tables import sentence
from megatron_grpo.core.base.files import parse_json, read_text
from megatron_grpo.run.config.table import InvalidValueError

_REWARDS = {"accuracy": "math", "format": "format", "cosine": "cosine", "repetition": "repetition", "soft_overlong": "soft_overlong"}
_ONLY_OURS = tuple(name for name in BUILT_IN_REWARDS if name not in _REWARDS)  # of `math` there, GRPO cannot call the function


def _find_plugin_rewards(args: FrameworkArgs) -> dict[str, str]:
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


def reward_funcs(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read reward_funcs: built-in rewards of Megatron-SWIFT and rewards of plugins are translated."""
    plugin_rewards = _find_plugin_rewards(args)
    unread = [word for word in words if word not in (*_REWARDS, *_ONLY_OURS, *plugin_rewards) and ":" not in word]
    if unread:
        plugins = args.get("external_plugins", ())
        reason = f"no file of external_plugins ({', '.join(plugins)}) that can be read registers it as orms['{unread[0]}'] = Class. "
        raise InvalidValueError(
            f"({', '.join(unread)}) is a reward function of Megatron-SWIFT or of a plugin, and is not available here: "
            f"{reason if plugins else ''}Use a function or a class as {(*plugins, 'path/to/file.py')[0]}:name; {', '.join(_REWARDS)} are "
            "translated"
        )
    return {"reward_funcs": [plugin_rewards.get(word, _REWARDS.get(word, word)) for word in words]}


def plugins(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read external_plugins; refused if nothing of them is used. Missing names in them are reported where they are used."""
    unknown_funcs = [word for word in args.get("reward_funcs", ()) if word not in (*_REWARDS, *_ONLY_OURS)]
    if not unknown_funcs and not {"gym_env", "multi_turn_scheduler"} & set(args):
        raise InvalidValueError(f"({' '.join(words)}): {sentence('PLUGINS')}")
    return {}


def dataset(words: Sequence[str], args: FrameworkArgs, native: str) -> Mapping[str, Any]:
    """Read data set names. Other hubs than Hugging Face are refused."""
    if len(words) != 1 and native != "dataset":
        raise InvalidValueError(f"({' '.join(words)}) has {len(words)} data sets. Use eval_datasets, with a name for each")
    names = [word if Path(word).exists() else word.removeprefix("hf::").removeprefix("HF::") for word in words]
    if other_hub := [name for name in names if ":" in name and not Path(name).exists() and not re.match(r"[^:/]+/[^:/]+:[^:/]+$", name)]:
        raise InvalidValueError(f"({other_hub[0]}) is on another hub. Use a file, a directory, or a Hub name (owner/name:subset)")
    return {native: names[0]} | ({"further_datasets": names[1:]} if names[1:] else {})


def one_adapter(words: Sequence[str], args: FrameworkArgs, native: str) -> Mapping[str, Any]:
    """Read a single adapter."""
    if len(words) != 1:
        raise InvalidValueError(f"({' '.join(words)}) has {len(words)} adapters. One adapter is trained, and one is the reference")
    return {native: words[0]}


def minutes(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read ddp_timeout, which is in seconds."""
    try:
        return {"distributed_timeout_minutes": float(words[0]) / 60}
    except (ValueError, IndexError):
        raise InvalidValueError(f"must be a number of seconds, not {' '.join(words)!r}") from None


def columns(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read the mapping of columns to Megatron-SWIFT's standard names.

    `query` is the prompt here; other standard names are columns that rewards may read under the same name.
    """
    text = " ".join(words).strip()
    try:
        columns = parse_json(text) if text.startswith("{") else dict(word.rsplit("=", 1) for word in words)
    except ValueError:
        raise InvalidValueError(f'needs a mapping as JSON, such as {{"question": "query"}}, not {text!r}') from None
    if "history" in columns.values():
        raise InvalidValueError("(history): earlier turns of a conversation must be in a column messages here")
    return {"columns": {column: "prompt" if name == "query" else name for column, name in columns.items()}}


def system(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    r"""Read the system prompt; \n is a line break."""
    return {"system": [" ".join(words).replace("\\n", "\n")]}


GYM = "gym_scheduler"  # Megatron-SWIFT's scheduler that runs an `Env`


def _class_argument(words: Sequence[str], args: FrameworkArgs, description: str) -> Mapping[str, Any]:
    (name,) = words
    if ":" in name:
        return {"environment": name}
    if own := next((own for own in OWN_EPISODES if args.get(own)), ""):
        return {NOTE: f"({name}) is {description} registered in Megatron-SWIFT, which is not run; {own} is used."}
    raise InvalidValueError(
        f"({name}) is {description} registered in Megatron-SWIFT, which is not available here. Use a class as path/to/file.py:Class. "
        f"{sentence('OWN_EPISODES')}"
    )


def scheduler(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read multi_turn_scheduler as an environment class."""
    return {} if list(words) == [GYM] and "gym_env" in args else _class_argument(words, args, "a scheduler")


def gym_env(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read gym_env as an environment class."""
    return _class_argument(words, args, "an environment")


def max_turns(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read max_turns; ignored if the scheduler or environment is refused already, to avoid a second problem."""
    registered = [word for name in ("gym_env", "multi_turn_scheduler") for word in args.get(name, ()) if ":" not in word and word != GYM]
    return {} if registered and not set(OWN_EPISODES) & set(args) else {"max_turns": list(words)}


def settle_gym_rewards(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Add the environment's rewards, which use_gym_env asks for."""
    rewards = values.get("reward_funcs", ())
    if "environment" not in rewards:
        note = "use_gym_env true: the environment's rewards are the built-in reward `environment`."
        yield SettingChange(values={"reward_funcs": [*rewards, "environment"]}, note=note)


def settle_no_load(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Drop no_load_optim and no_load_rng in a new run."""
    idle = [name for name in ("no_load_optim", "no_load_rng") if values.get(name)]
    if idle and values.get("finetune", True):
        note = f"{' and '.join(idle)} has no effect unless finetune is false, in both systems: a new run starts without them."
        yield SettingChange(values=dict.fromkeys(idle), note=note)


def settle_adapter_trains(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Set tuner_type lora if only an adapter is given."""
    names = [name for name in ("adapters", "ref_adapters") if values.get(name)]
    if names and values.get("tuner_type") != "lora":
        note = f"{' and '.join(names)}: as in Megatron-SWIFT, this implies tuner_type lora."
        yield SettingChange(values={"tuner_type": "lora"}, note=note)


def settle_engine_length(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Raise vllm_max_model_len to the longest sequence."""
    limit, required = values.get("vllm_max_model_len"), values.get("max_prompt_length", 0) + values.get("max_completion_length", 512)
    if limit and limit < required and values.get("vllm_mode") != "server" and not values.get("environment"):
        note = f"vllm_max_model_len ({limit}) truncates completions in ms-swift; here it is max_length + max_completion_length, {required}."
        yield SettingChange(values={"vllm_max_model_len": required}, note=note)


def settle_evaluation(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Evaluate with the request_config of training, whenever a checkpoint is saved."""
    if holds_out(values):
        yield SettingChange(values=as_in_training(values, 0.9, values.get("num_generations", 8)))
        if not values.get("eval_steps"):
            yield SettingChange(values={"eval_steps": values.get("save_steps", 500)}, untyped=("eval_steps", "save_steps"))


def settle_advantages(values: Mapping[str, Any], args: FrameworkArgs) -> Iterator[SettingChange]:
    """Translate reinforce_plus_plus, which in Megatron-SWIFT subtracts the group's mean and divides by the std of scale_rewards.

    Its guide says `batch`.
    """
    estimator, scale = values.get("advantage_estimator", "grpo"), values.get("scale_rewards")
    if estimator != "grpo" and "kl_in_reward" not in values:
        yield SettingChange(values={"kl_in_reward": True}, untyped=("kl_in_reward", f"true with {estimator}"))
    if estimator == "reinforce_plus_plus":
        settings = {"advantage_estimator": "grpo"}
        if scale in (None, "batch"):
            settings = {"advantage_estimator": "reinforce_plus_plus_baseline", "scale_rewards": "batch"}
        description = ", ".join(f"{name} {value}" for name, value in settings.items())
        yield SettingChange(values=settings, note=f"advantage_estimator reinforce_plus_plus of Megatron-SWIFT is {description} here.")
    elif estimator == "rloo" and scale not in (None, "none"):
        raise InvalidValueError(
            f"advantage_estimator rloo with scale_rewards {scale} divides by a standard deviation; rloo is not scaled here. Use "
            "scale_rewards none"
        )
