"""Settling of the values of another system: readers of one name, and steps that follow from several names.

A reader takes the words after a name and all foreign names of the run. It returns native settings that are not yet parsed, and raises
InvalidValueError for a value that cannot be translated. A step takes the native values and the foreign names, and yields changes. Both are
named in the tables, with an argument behind the name if they take one. What needs no arithmetic is data of a table: `apply_rule` is the
step that reads a rule, and `read_case` the reader of a value that is one of several words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from megatron_grpo.commands.compat.foreign_args import NOTE, OFF, FrameworkArgs, SettingChange
from megatron_grpo.commands.compat.tables import contents, sentence
from megatron_grpo.core.base.files import parse_json, parse_yaml
from megatron_grpo.plugins.servers.rules import ENGINE_SETTINGS
from megatron_grpo.run.config.read import format_value
from megatron_grpo.run.config.table import FALSE, TRUE, InvalidValueError, table

BUILT_IN_REWARDS = (
    "environment",
    *("math", "accuracy", "format", "length", "soft_overlong", "cosine", "repetition", "code", "reward_model", "llm_judge"),
)


# Settings of this package that name what plays an episode.
OWN_EPISODES = ("environment", "tools", "agent_command", "rollout_func")


CONDITION = re.compile(r"(not )?(?:(given|typed|their) )?([\w.$]+)(?:(=|>| includes )(.+))?")


def is_met(condition: str, values: Mapping[str, Any], args: FrameworkArgs) -> bool:
    """Return whether a condition of a rule holds. `a | b` holds if one of the two does, and `not a` if `a` does not.

    `name` is a native setting that is neither false, 0, empty nor none; `name=word` one with that value, `name>1` a larger one,
    `name includes word` a list; `given name` is one that was set, to any value. `typed name` is a foreign name that was typed,
    `typed name=word` with that word, and `their name=word` one whose value, typed or by default, is the word.
    """
    if " | " in condition:
        return any(is_met(part, values, args) for part in condition.split(" | "))
    match = CONDITION.fullmatch(condition)
    assert match, condition
    is_denied, kind, name, sign, word = match.groups()
    if kind == "given":
        holds = name in values
    elif kind == "typed":
        holds = name in args and word in (None, args.text(name))
    elif kind == "their":
        holds = args.is_true(name) if word == "true" else args.text(name) == word
    elif sign == " includes ":
        holds = word in values.get(name, ())
    elif sign == ">":
        holds = (values.get(name) or 0) > int(word)
    elif sign:
        holds = name in values and format_value(values[name]) == word
    else:
        holds = bool(values.get(name))
    return holds != bool(is_denied)


def apply_rule(values: Mapping[str, Any], args: FrameworkArgs, rule: Mapping[str, Any], title: str) -> Iterator[SettingChange]:
    """Apply a rule of a table if its conditions hold (`if`, see `is_met`).

    `then` has further steps. `drop` names native settings that are reset, and `unread` foreign names that have another value than their
    default: without one of them the rule does not apply, and `{names}` in the text is their list. `set` has native settings: null resets
    one, `=name` is the value of another setting, and `their name` the number behind a foreign name. `note` or `refuse` has the text, and
    `default` the foreign name and its default, if this is a default that was not typed.
    """
    if not all(is_met(condition, values, args) for condition in rule.get("if", ())):
        return
    for step in rule.get("then", ()):
        yield from step(values, args)
    dropped = [name for name in rule.get("drop", "").split() if name in values]
    names = dropped + args.find_changed(rule.get("unread", "").split())
    if not names and {"drop", "unread"} & set(rule):
        return
    words = {"title": title, "names": " and ".join(names), "have": "have" if len(names) > 1 else "has"}
    text = rule.get("refuse", rule.get("note", "")).format_map({**contents("common")["sentences"], **values, **words})
    if "refuse" in rule:
        raise InvalidValueError(text)
    settings = {name: _settled(value, values, args) for name, value in rule.get("set", {}).items()}
    default = tuple(rule["default"]) if "default" in rule else None
    yield SettingChange(values=dict.fromkeys(dropped) | settings, note=text, untyped=default)


def _settled(value: Any, values: Mapping[str, Any], args: FrameworkArgs) -> Any:
    """Return a value of a rule's `set`."""
    if isinstance(value, str) and value.startswith("="):
        return values.get(value[1:], table()[value[1:]].default)
    return args.number(value.removeprefix("their ")) if isinstance(value, str) and value.startswith("their ") else value


def read_case(words: Sequence[str], args: FrameworkArgs, cases: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read a value for which a table has `cases`: the native settings of each word; `$` in them is what was typed.

    `true`, `false` and `nothing` stand for all their spellings, and `other` for any other word. Without the conditions in `if` the name
    has no effect.
    """
    text, word = " ".join(words), words[0].lower()
    if not all(is_met(condition, {}, args) for condition in cases.get("if", ())):
        return {}
    stands_for = {"true": word in TRUE, "false": word in FALSE, "nothing": text.lower() in OFF, "other": True}
    settings = next((settings for case, settings in cases.items() if case != "if" and stands_for.get(case, case == text)), None)
    if settings is None:
        raise InvalidValueError(f"must be true or false, not {word!r}")
    return {name: list(words) if value == "$" else value for name, value in settings.items()}


def where_true(words: Sequence[str], args: FrameworkArgs, settings: str) -> Mapping[str, Any]:
    """Return native settings if the foreign value is true, else none."""
    parts = settings.split()
    return dict(zip(parts[::2], parts[1::2])) if words[0].lower() in TRUE else {}


def column(words: Sequence[str], args: FrameworkArgs, names: str) -> Mapping[str, Any]:
    """Read the name of a column. It is renamed unless it is one of `names`."""
    return {} if len(words) == 1 and words[0] in names.split() else {"columns": {words[0]: names.split()[0]}}


def read_mapping(words: Sequence[str], example: str) -> dict[str, Any]:
    """Return a mapping that is written as JSON."""
    try:
        return dict(parse_json(" ".join(words)))
    except ValueError:
        raise InvalidValueError(f"needs a mapping as JSON, such as {example}, not {' '.join(words)!r}") from None


def no_token(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Refuse a Hub token. The message does not repeat the secret."""
    if " ".join(words).lower() in OFF:
        return {}
    raise InvalidValueError("is a secret, and settings are written to files. Use the environment variable HF_TOKEN")


def listed(words: Sequence[str]) -> list[str]:
    """Return the words of a Hydra list: "['a', 'b']" or [a,b]."""
    joined = " ".join(words).strip().removeprefix("[").removesuffix("]")
    return [part.strip().strip("'\"") for part in joined.split(",") if part.strip()]


_LENGTHS = ("completions/mean_length", "completions/clipped_ratio")


def best(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read metric_for_best_model: transformers compares metrics of an evaluation, and adds eval_ to a name without it."""
    name = " ".join(words)
    metric = name.removeprefix("eval_")
    by_function = re.fullmatch(r"rewards/(.+?)(/mean)?", metric)
    if name.lower() in OFF:
        return {}
    if metric == "reward" or name == "eval" or name.startswith("eval/"):
        return {"metric_for_best_model": "eval" if metric == "reward" else name}
    if by_function:
        return {"metric_for_best_model": f"eval/{re.split('[.:]', by_function[1])[-1]}"}
    if metric in _LENGTHS:
        return {"metric_for_best_model": f"eval/{metric.partition('/')[2]}"}
    raise InvalidValueError(f"({name}) is not a metric of an evaluation here. Use eval_reward, eval_rewards/NAME/mean, eval_{_LENGTHS[0]}")


def datasets(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read one or several training files; all their rows are used."""
    names = [name for word in words for name in listed([word])]
    return {"dataset": names[0], "further_datasets": names[1:]} if names else {}


def held_out(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read evaluation files. Several files are several sets, each named after its folder and file."""
    names = [name for word in words for name in listed([word])]
    if len(names) < 2:
        return {"eval_dataset": names[0]} if names else {}
    return {"eval_datasets": {"_".join(name.rsplit(".", 1)[0].split("/")[-2:]): name for name in names}}


def betas(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read Adam's two betas."""
    values = [part for word in words for part in listed([word])]
    if len(values) != 2:
        raise InvalidValueError(f"requires two numbers, not {' '.join(words)!r}")
    return {"adam_beta1": values[0], "adam_beta2": values[1]}


def own_rewards(words: Sequence[str], args: FrameworkArgs, description: str) -> Mapping[str, Any]:
    """Read a foreign reward or environment, which cannot be used here: a note if one of this run is given, else refused."""
    is_environment = "environment" in description
    own = next((name for name in (*(OWN_EPISODES if is_environment else ()), "reward_funcs") if args.get(name)), "")
    ways = f" {sentence('OWN_EPISODES')}." if is_environment else ""
    if not own:
        raise InvalidValueError(
            f"({' '.join(words)}) is {description}, which is not supported: rewards come from reward_funcs. Add --reward_funcs"
            f"{'.' if ways else ''}{ways.removesuffix('.')}"
        )
    return {NOTE: f"({' '.join(words)}) is {description}, which is not run; {own} is used.{ways if own == 'reward_funcs' else ''}"}


def train_tower(values: Mapping[str, Any], args: FrameworkArgs, system_and_flag: str) -> Iterator[SettingChange]:
    """Train the vision tower where a script says that the model takes images, as the other system does by default.

    Without such a name the model's config.json decides, if it is available (`SourceFramework.trains_tower`).
    """
    if values.get("tuner_type") == "lora" or values.get("adapters"):
        return
    title, flag = system_and_flag.split()
    if thawed := {name: False for name in ("freeze_vit", "freeze_aligner") if name not in values}:
        settings = " and ".join(f"{name} false" for name in thawed)
        yield SettingChange(values=thawed, note=f"{flag}: {title} trains the vision tower by default: {settings}.")


def idle_schedule(values: Mapping[str, Any], args: FrameworkArgs, style: str) -> Iterator[SettingChange]:
    """Drop settings of learning-rate decay that the other system ignores with its decay style.

    Args:
        style: Default decay style of the other system.
    """
    style = values.get("lr_decay_style", style)
    is_read_by_name = {"lr_decay_iters": style != "constant", "lr_wsd_decay_iters": style == "WSD", "lr_wsd_decay_style": style == "WSD"}
    if idle_names := [name for name, is_read in is_read_by_name.items() if not is_read and values.get(name) is not None]:
        note = (
            f"{' and '.join(idle_names)} {'have' if len(idle_names) > 1 else 'has'} no effect with lr_decay_style {style}, in both systems."
        )
        yield SettingChange(values=dict.fromkeys(idle_names), note=note)


# EngineArgs of vLLM that are settings here, with the same meaning.
_SAME = ("max_model_len", "max_num_seqs", "enforce_eager", "gpu_memory_utilization", "enable_prefix_caching")
_ENGINE_ARGS = {name: f"vllm_{name}" for name in _SAME}
# EngineArgs of vLLM's image caches, which have their own rows in verl's table.
_PROCESSOR_CACHES = [f"rollout.engine_kwargs.vllm.{name}" for name in ("disable_mm_preprocessor_cache", "mm_processor_cache_gb")]


_FLOW = re.compile(r"([{,]\s*['\"]?\w+['\"]?):(?=\S)")  # Hydra needs no space after the colon, YAML does


def _nested(words: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a.b=1 to {"a": {"b": 1}}."""
    result: dict[str, Any] = {}
    for name, value in words.items():
        *sections, last = name.split(".")
        inner = result
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return result


def convert_engine_args(values: Mapping[str, Any], args: FrameworkArgs, prefix: str) -> Iterator[SettingChange]:
    """Translate vLLM EngineArgs, given as one mapping or as one name each behind `prefix`.

    Raises:
        InvalidValueError: The value is not a mapping, or contradicts a native setting.
    """
    flow = _FLOW.sub(r"\1: ", args.text(prefix, "{}"))
    whole_of_it = {} if flow.lower() in OFF else _read(flow, prefix)
    if not isinstance(whole_of_it, dict):
        raise InvalidValueError(f"{prefix} ({args.text(prefix, '')}) requires a mapping, such as {{max_model_len: 4096}}")
    names = [name for name in args if name.startswith(f"{prefix}.") and name not in _PROCESSOR_CACHES]
    words = {**whole_of_it, **{name.removeprefix(f"{prefix}."): _read(" ".join(args[name]), name) for name in names}}
    settings = {_ENGINE_ARGS[name]: value for name, value in words.items() if name in _ENGINE_ARGS and value is not None}
    if clash := [name for name, value in settings.items() if values.get(name, value) != value]:
        raise InvalidValueError(
            f"{prefix} sets {clash[0]} to {settings[clash[0]]}, but it is {values[clash[0]]} elsewhere. Use one of them"
        )
    engine_kwargs = _nested({name: value for name, value in words.items() if name not in _ENGINE_ARGS and value is not None})
    if settings or engine_kwargs:
        note = f"{prefix} is passed to vLLM's EngineArgs: {', '.join([*settings, *(['vllm_engine_kwargs'] if engine_kwargs else [])])}."
        yield SettingChange(
            values=settings | ({"vllm_engine_kwargs": {**values.get("vllm_engine_kwargs", {}), **engine_kwargs}} if engine_kwargs else {}),
            note=note,
        )


def _read(text: str, name: str = "") -> Any:
    try:
        return parse_yaml(text)[0]
    except ValueError as error:
        raise InvalidValueError(f"{name} ({text[:200]}) cannot be read: {error}".lstrip()) from error


def template(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read chat_template_kwargs as JSON or as a Hydra mapping."""
    text = " ".join(words)
    kwargs = {} if text.lower() in OFF else _read(_FLOW.sub(r"\1: ", text))
    if not isinstance(kwargs, dict):
        raise InvalidValueError(f"requires a mapping, such as {{enable_thinking: false}}, not {text!r}")
    return {"chat_template_kwargs": kwargs} if kwargs else {}


def convert_template(values: Mapping[str, Any], args: FrameworkArgs, prefix: str) -> Iterator[SettingChange]:
    """Translate arguments of the chat template, given as one name each behind `prefix`. enable_thinking has a separate setting."""
    names = [name for name in args if name.startswith(f"{prefix}.") and not name.endswith(".enable_thinking")]
    if words := {name.removeprefix(f"{prefix}."): _read(" ".join(args[name]), name) for name in names}:
        yield SettingChange(values={"chat_template_kwargs": {**values.get("chat_template_kwargs", {}), **words}},
                     note=f"{prefix} is passed to the chat template: chat_template_kwargs.")  # fmt: skip


def adapted(args: FrameworkArgs, section: str) -> dict[str, list[str]]:
    """Return target_modules and exclude_modules from the foreign `section`, if it has any."""
    result: dict[str, list[str]] = {}
    for name in ("target_modules", "exclude_modules"):
        words = [part for word in args.get(f"{section}{name}", ()) for part in listed([word]) if part not in ("none", "null")]
        result |= {name: words} if words else {}
    return result


def soft_overlong(values: Mapping[str, Any], args: FrameworkArgs, names: str) -> Iterator[SettingChange]:
    """Translate DAPO's penalty for long completions to the reward soft_overlong (arXiv:2503.14476), added to reward_funcs.

    Args:
        names: Name for messages; foreign name of the tokens before the longest completion's end at which the penalty starts; foreign names
            of the longest completion's tokens, of which the first that was typed or has a default counts.
    """
    name, buffer, *lengths = names.split()
    longest = next((length for length in lengths if length in args or length in args.defaults), lengths[-1])
    changes: dict[str, Any] = {"soft_max_length": args.integer(longest), "soft_cache_length": args.integer(buffer)}
    if values.get("reward_funcs") and "soft_overlong" not in values["reward_funcs"]:
        changes["reward_funcs"] = [*values["reward_funcs"], "soft_overlong"]
    yield SettingChange(values=changes, note=f"{name} is the reward soft_overlong, in addition to reward_funcs.")


def in_steps(values: Mapping[str, Any], per_rollout: int, names: Mapping[str, str]) -> Iterator[SettingChange]:
    """Convert settings that the other system counts in rollouts to optimizer steps.

    Args:
        per_rollout: Optimizer steps per rollout.
        names: Native name -> foreign name.
    """
    in_rollouts = {name: values[name] for name in names if values.get(name)}
    if in_rollouts and per_rollout > 1:
        conversions = ", ".join(f"{names[name]} {count} is {name} {count * per_rollout}" for name, count in in_rollouts.items())
        yield SettingChange(
            values={name: count * per_rollout for name, count in in_rollouts.items()},
            note=f"One step of that system is one rollout, which is {per_rollout} optimizer steps here: {conversions}.",
        )


def loggers(words: Sequence[str], args: FrameworkArgs) -> Mapping[str, Any]:
    """Read the list of experiment trackers. The console and files are always written, so they are dropped."""
    services = [name.lower() for word in words for name in listed([word]) if name.lower() not in ("console", "file", *OFF)]
    if unknown := [name for name in services if name not in SERVICES]:
        raise InvalidValueError(f"({', '.join(unknown)}) is not supported. Supported: {', '.join(SERVICES)}")
    return {"report_to": services} if services else {}


SERVICES = ("tensorboard", "wandb", "swanlab", "mlflow", "trackio")


def holds_out(values: Mapping[str, Any]) -> bool:
    """Return whether any native setting names held-out prompts."""
    return any(values.get(name) for name in ("eval_dataset", "eval_datasets", "split_dataset_ratio"))


def one_eval_completion(values: Mapping[str, Any], args: FrameworkArgs, mapping: str) -> Iterator[SettingChange]:
    """Sample one completion per held-out prompt by default.

    Args:
        mapping: Default evaluation settings of the other system, as YAML, by native name; includes eval_temperature. `=name` is the value
            of another setting.
    """
    if holds_out(values):
        defaults = {name: _settled(value, values, args) for name, value in parse_yaml(mapping)[0].items()}
        settings = {"num_generations_eval": 1, **defaults}
        if not values.get("eval_temperature", defaults["eval_temperature"]):  # greedy
            cuts = ("eval_top_p", "eval_top_k", "eval_min_p")
            idle = [name for name in cuts if values.get(name)]
            if idle:
                yield SettingChange(
                    values=dict.fromkeys(idle), note=f"{' and '.join(idle)} has no effect at temperature 0, in both systems."
                )
            if (values.get("num_generations_eval") or 1) > 1:
                note = f"{values['num_generations_eval']} greedy completions of a prompt are identical: num_generations_eval 1."
                yield SettingChange(values={"num_generations_eval": 1}, note=note)
            settings = {name: value for name, value in settings.items() if name not in cuts}
        yield SettingChange(values={name: value for name, value in settings.items() if name not in values})


def as_in_training(values: Mapping[str, Any], temperature: float, group: int) -> Mapping[str, Any]:
    """Return evaluation settings for a system that samples held-out prompts as in training.

    Args:
        temperature: Default temperature of the other system.
        group: Completions per prompt.
    """
    if values.get("eval_temperature") == 0:  # set natively, to greedy
        return {}
    defaults = {"eval_temperature": values.get("temperature", temperature), "num_generations_eval": group}
    return {name: value for name, value in defaults.items() if values.get(name) is None}


def find_dp_size(values: Mapping[str, Any]) -> int:
    """Return the number of data-parallel ranks; 8 ranks if their number is not set."""
    sizes = (values.get(f"{name}_parallel_size", 1) for name in ("tensor_model", "pipeline_model", "context"))
    return max(1, values.get("world_size", 8) // max(1, prod(sizes)))


def set_expert_parallel(values: Mapping[str, Any], args: FrameworkArgs, name: str) -> Iterator[SettingChange]:
    """Set the tensor-parallel size of experts, which by default is that of other layers."""
    if "expert_tensor_parallel_size" not in values:
        size = args.text(name)
        tensor = values.get("tensor_model_parallel_size", 1)
        yield SettingChange(values={"expert_tensor_parallel_size": tensor if size in ("", "none", "null") else int(size)})


def idle(args: FrameworkArgs, names: str, required_setting: str) -> Iterator[SettingChange]:
    """Note names that have no effect because `required_setting` is off, in the other system too.

    Args:
        names: Names. Complete configuration files contain defaults too, which are not noted.
    """
    rule = {"unread": names, "note": f"{{names}} {{have}} no effect without {required_setting}, in both systems."}
    return apply_rule({}, args, rule, "")


def convert_servers(values: Mapping[str, Any], args: FrameworkArgs, program: str) -> Iterator[SettingChange]:
    """Adjust settings for vllm_mode server: settings of the engine belong to the server."""
    if values.get("vllm_mode") != "server":
        return
    yield SettingChange(note=f"vllm_mode server: start servers with `megatron-grpo serve`; servers of `{program}` use another protocol.")
    if names := [name for name in ENGINE_SETTINGS if name in values]:
        note = f"{', '.join(names)}: settings of the server's engine; pass {'them' if len(names) > 1 else 'it'} to `megatron-grpo serve`."
        yield SettingChange(values=dict.fromkeys(names), note=note)
