"""What several systems share: functions that read one name, and parts of their SETTLE."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_grpo.compat.foreign_args import OFF, Change, Given, Reader
from megatron_grpo.config.servers import OF_THE_ENGINE
from megatron_grpo.config.table import TRUE, InvalidValueError

BUILT_IN_REWARDS = (
    "environment",
    *("math", "accuracy", "format", "length", "soft_overlong", "cosine", "repetition", "code", "reward_model", "llm_judge"),
)


def where_true(settings: str) -> Reader:
    """Our settings where theirs is true; else it says nothing. settings: names and values in turn."""
    words = settings.split()
    return lambda theirs, given: dict(zip(words[::2], words[1::2])) if theirs[0].lower() in TRUE else {}


def no_token(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """The sentence does not repeat what was typed."""
    if " ".join(words).lower() in OFF:
        return {}
    raise InvalidValueError("is a secret, and settings are written to files: the environment variable HF_TOKEN holds it")


def listed(words: Sequence[str]) -> list[str]:
    """The words of a Hydra list: "['a', 'b']" or [a,b]."""
    joined = " ".join(words).strip().removeprefix("[").removesuffix("]")
    return [part.strip().strip("'\"") for part in joined.split(",") if part.strip()]


_LENGTHS = ("completions/mean_length", "completions/clipped_ratio")


def best(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """transformers compares what an evaluation tells, and puts eval_ before a name that lacks it."""
    name = " ".join(words)
    asked = name.removeprefix("eval_")
    by_function = re.fullmatch(r"rewards/(.+?)(/mean)?", asked)
    if name.lower() in OFF:
        return {}
    if asked == "reward" or name == "eval" or name.startswith("eval/"):
        return {"metric_for_best_model": "eval" if asked == "reward" else name}
    if by_function:
        return {"metric_for_best_model": f"eval/{re.split('[.:]', by_function[1])[-1]}"}
    if asked in _LENGTHS:
        return {"metric_for_best_model": f"eval/{asked.partition('/')[2]}"}
    raise InvalidValueError(
        f"({name}) is nothing that an evaluation tells here. Use eval_reward, eval_rewards/NAME/mean, eval_{_LENGTHS[0]}"
    )


def datasets(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """One file or several, all rows of all."""
    found = [name for word in words for name in listed([word])]
    return {"dataset": found[0], "further_datasets": found[1:]} if found else {}


def held_out(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """Several files are several sets, each under the name of its folder and file."""
    found = [name for word in words for name in listed([word])]
    if len(found) < 2:
        return {"eval_dataset": found[0]} if found else {}
    return {"eval_datasets": {"_".join(name.rsplit(".", 1)[0].split("/")[-2:]): name for name in found}}


def betas(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    found = [part for word in words for part in listed([word])]
    if len(found) != 2:
        raise InvalidValueError(f"needs two numbers, not {' '.join(words)!r}")
    return {"adam_beta1": found[0], "adam_beta2": found[1]}


def own_rewards(what: str) -> Reader:
    """A reward of theirs, which does nothing where reward_funcs says what judges here."""

    def read(words: Sequence[str], given: Given) -> Mapping[str, Any]:
        if not given.get("reward_funcs"):
            raise InvalidValueError(f"({' '.join(words)}) is {what}, and not there: rewards come from reward_funcs. Add --reward_funcs")
        return {}

    return read


def of_pictures(values: Mapping[str, Any], *, title: str, says: str) -> Iterator[Change]:
    """A script that says that its model sees: the tower trains there. says: the name that says so.

    Without one the model itself says it, where its config.json is at hand (`Dialect.trains_tower`).
    """
    if values.get("tuner_type") == "lora" or values.get("adapters"):
        return
    if thawed := {name: False for name in ("freeze_vit", "freeze_aligner") if name not in values}:
        said = " and ".join(f"{name} false" for name in thawed)
        yield Change(values=thawed, note=f"{says}: {title} trains the tower of a model that sees where nobody says otherwise: {said}.")


def idle_schedule(values: Mapping[str, Any], given: Given, *, style: str) -> Iterator[Change]:
    """Words of a decay that their program does not read with the decay that it has. style: theirs, where nobody names one."""
    style = values.get("lr_decay_style", style)
    of = {"lr_decay_iters": style != "constant", "lr_wsd_decay_iters": style == "WSD", "lr_wsd_decay_style": style == "WSD"}
    if found := [name for name, is_read in of.items() if not is_read and values.get(name) is not None]:
        note = f"{' and '.join(found)} {'do' if len(found) > 1 else 'does'} nothing with lr_decay_style {style}, here as there."
        yield Change(values=dict.fromkeys(found), note=note)


# EngineArgs of vLLM that are settings here, and mean the same.
_SAME = ("max_model_len", "max_num_seqs", "enforce_eager", "gpu_memory_utilization", "enable_prefix_caching")
_OF_THE_ENGINE = {name: f"vllm_{name}" for name in _SAME}


_FLOW = re.compile(r"([{,]\s*['\"]?\w+['\"]?):(?=\S)")  # Hydra wants no space there


def _nested(words: Mapping[str, Any]) -> dict[str, Any]:
    """a.b=1 as {"a": {"b": 1}}."""
    found: dict[str, Any] = {}
    for name, value in words.items():
        *sections, last = name.split(".")
        inner = found
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return found


def of_vllm(values: Mapping[str, Any], given: Given, *, prefix: str, apart: Sequence[str] = ()) -> Iterator[Change]:
    """Words for vLLM's EngineArgs: one mapping, or a name each behind `prefix`. apart: those that have a row of their own."""
    import yaml

    flow = _FLOW.sub(r"\1: ", given.text(prefix, "{}"))
    whole_of_it = {} if flow.lower() in OFF else yaml.safe_load(flow)
    if not isinstance(whole_of_it, dict):
        raise InvalidValueError(f"{prefix} ({given.text(prefix, '')}) needs a mapping, such as {{max_model_len: 4096}}")
    names = [name for name in given if name.startswith(f"{prefix}.") and name not in apart]
    words = {**whole_of_it, **{name.removeprefix(f"{prefix}."): yaml.safe_load(" ".join(given[name])) for name in names}}
    ours = {_OF_THE_ENGINE[name]: value for name, value in words.items() if name in _OF_THE_ENGINE and value is not None}
    if clash := [name for name, value in ours.items() if values.get(name, value) != value]:
        raise InvalidValueError(f"{prefix} says {clash[0]} {ours[clash[0]]}, which is {values[clash[0]]} elsewhere. Keep one of them")
    more = _nested({name: value for name, value in words.items() if name not in _OF_THE_ENGINE and value is not None})
    if ours or more:
        note = f"{prefix} is handed to vLLM's EngineArgs: {', '.join([*ours, *(['vllm_engine_kwargs'] if more else [])])}."
        yield Change(values=ours | ({"vllm_engine_kwargs": {**values.get("vllm_engine_kwargs", {}), **more}} if more else {}), note=note)


def template(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """JSON, or a mapping as Hydra writes it."""
    import yaml

    text = " ".join(words)
    try:
        found = {} if text.lower() in OFF else yaml.safe_load(_FLOW.sub(r"\1: ", text))
    except yaml.YAMLError:
        found = None
    if not isinstance(found, dict):
        raise InvalidValueError(f"needs a mapping, such as {{enable_thinking: false}}, not {text!r}")
    return {"chat_template_kwargs": found} if found else {}


def of_template(values: Mapping[str, Any], given: Given, *, prefix: str) -> Iterator[Change]:
    """Words for the chat template, a name each behind `prefix`; enable_thinking has a setting of its own."""
    import yaml

    names = [name for name in given if name.startswith(f"{prefix}.") and not name.endswith(".enable_thinking")]
    if words := {name.removeprefix(f"{prefix}."): yaml.safe_load(" ".join(given[name])) for name in names}:
        yield Change(values={"chat_template_kwargs": {**values.get("chat_template_kwargs", {}), **words}},
                     note=f"{prefix} is handed to the chat template: chat_template_kwargs.")  # fmt: skip


def adapted(given: Given, section: str) -> dict[str, list[str]]:
    """Which layers have adapters, and which not, where their `section` names any."""
    found: dict[str, list[str]] = {}
    for name in ("target_modules", "exclude_modules"):
        words = [part for word in given.get(f"{section}{name}", ()) for part in listed([word]) if part not in ("none", "null")]
        found |= {name: words} if words else {}
    return found


def soft_overlong(values: Mapping[str, Any], longest: int, buffer: int, name: str) -> Iterator[Change]:
    """DAPO's punishment of long completions, which is a reward beside the others here. name: theirs."""
    found: dict[str, Any] = {"soft_max_length": longest, "soft_cache_length": buffer}
    if values.get("reward_funcs") and "soft_overlong" not in values["reward_funcs"]:
        found["reward_funcs"] = [*values["reward_funcs"], "soft_overlong"]
    yield Change(values=found, note=f"{name} is the reward soft_overlong, beside what reward_funcs names.")


def in_steps(values: Mapping[str, Any], per_rollout: int, names: Mapping[str, str]) -> Iterator[Change]:
    """Settings that the other system counts in rollouts, and that are optimizer steps here. names: native -> theirs."""
    found = {name: values[name] for name in names if values.get(name)}
    if found and per_rollout > 1:
        said = ", ".join(f"{names[name]} {count} is {name} {count * per_rollout}" for name, count in found.items())
        yield Change(
            values={name: count * per_rollout for name, count in found.items()},
            note=f"One step of theirs is one rollout, and {per_rollout} optimizer steps here: {said}.",
        )


def loggers(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """The terminal and files are told anyway."""
    found = [name.lower() for word in words for name in listed([word]) if name.lower() not in ("console", "file", *OFF)]
    if unknown := [name for name in found if name not in SERVICES]:
        raise InvalidValueError(f"({', '.join(unknown)}) is not there. There are: {', '.join(SERVICES)}")
    return {"report_to": found} if found else {}


SERVICES = ("tensorboard", "wandb", "swanlab", "mlflow", "trackio")


def holds_out(values: Mapping[str, Any]) -> bool:
    """Whether any prompts are held out, under whichever of our names."""
    return any(values.get(name) for name in ("eval_dataset", "eval_datasets", "split_dataset_ratio"))


def asked_once(values: Mapping[str, Any], **how: float) -> Iterator[Change]:
    """Held-out prompts are answered once where nobody says otherwise. how: their program's own settings of evaluation."""
    if holds_out(values):
        found = {"num_generations_eval": 1, **how}
        if not values.get("eval_temperature", how["eval_temperature"]):  # greedy
            cuts = ("eval_top_p", "eval_top_k", "eval_min_p")
            idle = [name for name in cuts if values.get(name)]
            if idle:
                yield Change(values=dict.fromkeys(idle), note=f"{' and '.join(idle)} does nothing at temperature 0, here as there.")
            if (values.get("num_generations_eval") or 1) > 1:
                said = f"{values['num_generations_eval']} greedy answers to a prompt are one answer: num_generations_eval 1."
                yield Change(values={"num_generations_eval": 1}, note=said)
            found = {name: value for name, value in found.items() if name not in cuts}
        yield Change(values={name: value for name, value in found.items() if name not in values})


def as_in_training(values: Mapping[str, Any], temperature: float, group: int) -> Mapping[str, Any]:
    """How held-out prompts are answered where their program knows one way of sampling. temperature, group: theirs unsaid."""
    if values.get("eval_temperature") == 0:  # ours, and greedy
        return {}
    ours = {"eval_temperature": values.get("temperature", temperature), "num_generations_eval": group}
    return {name: value for name, value in ours.items() if values.get(name) is None}


def layout(values: Mapping[str, Any], expert: str, *, shards_norms_by_itself: str = "") -> Iterator[Change]:
    """What Megatron-Core makes of tensor parallelism. expert: their expert tensor parallel size, as typed; shards_...: who does that."""
    tensor = values.get("tensor_model_parallel_size", 1)
    if tensor > 1 and "sequence_parallel" not in values and shards_norms_by_itself:
        note = f"{shards_norms_by_itself} shards norms over tensor-parallel ranks by itself: sequence_parallel true."
        yield Change(values={"sequence_parallel": True}, note=note)
    if values.get("sequence_parallel") and tensor == 1:
        yield Change(values={"sequence_parallel": None}, note="sequence_parallel does nothing without tensor parallelism, here as there.")
    if values.get("fp8_format") and "fp8_recipe" not in values:
        yield Change(note="fp8_recipe is delayed in Megatron-Core where nobody says it, which is not there: it is tensorwise here.")
    if "expert_tensor_parallel_size" not in values:
        yield Change(values={"expert_tensor_parallel_size": tensor if expert in ("none", "null") else int(expert)})


def idle(given: Given, defaults: Mapping[str, str], *, without: str) -> Iterator[Change]:
    """Names that do nothing because `without` is not on, there as here, where somebody gave them. defaults: theirs by name, which whole
    files hold."""
    found = [name for name, default in defaults.items() if given.text(name, default).lower() != default]
    if found:
        yield Change(note=f"{' and '.join(found)} {'do' if len(found) > 1 else 'does'} nothing without {without}, here as there.")


def of_servers(values: Mapping[str, Any], *, program: str) -> Iterator[Change]:
    """Where servers sample: what an engine is started with is theirs. program: what starts servers in the other system."""
    if values.get("vllm_mode") != "server":
        return
    yield Change(note=f"vllm_mode server: start servers with `megatron-grpo serve`, for those of `{program}` speak another way.")
    if found := [name for name in OF_THE_ENGINE if name in values]:
        note = f"{', '.join(found)}: the engine is the server's, so give {'them' if len(found) > 1 else 'it'} to `megatron-grpo serve`."
        yield Change(values=dict.fromkeys(found), note=note)


def of_the_hub(values: Mapping[str, Any]) -> Iterator[Change]:
    """A repository that is named, and not pushed to, is nothing in transformers."""
    idle = [name for name in ("hub_model_id", "hub_private_repo") if name in values] if not values.get("push_to_hub") else []
    if idle:
        yield Change(values=dict.fromkeys(idle), note=f"{' and '.join(idle)} does nothing without push_to_hub, here as there.")


def drops_last(values: Mapping[str, Any], *, title: str) -> Iterator[Change]:
    """Of a system whose epochs end with their last whole rollout."""
    if values.get("streaming"):
        note = f"streaming: {title} leaves out what does not fill a rollout where an epoch ends; here a rollout goes on into the next one."
        yield Change(note=note)
    elif "dataset_drop_last" not in values:
        yield Change(values={"dataset_drop_last": True}, untyped=("drop_last", "true"))


def not_left(values: Mapping[str, Any], title: str) -> Iterator[Change]:
    """Longer prompts are cut on the left where nobody says otherwise, which does not go with turns."""
    if (values.get("environment") or values.get("tools")) and "truncation_strategy" not in values and "max_prompt_length" in values:
        yield Change(
            values={"truncation_strategy": "delete"},
            note=f"{title} cuts longer prompts on the left, which does not go with environments and tools: truncation_strategy delete.",
        )
