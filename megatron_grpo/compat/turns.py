"""Turns in the words of Megatron-SWIFT and TRL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_grpo.compat.vocabulary import Given
from megatron_grpo.config.foreign import Change, Foreign, only, reads, same
from megatron_grpo.config.table import BadValue

GYM = "gym_scheduler"  # Megatron-SWIFT's scheduler that plays an `Env`


def _of_a_class(words: Sequence[str], what: str) -> Mapping[str, Any]:
    (name,) = words
    if ":" not in name:
        raise BadValue(f"({name}) is {what} that Megatron-SWIFT knows by name, and not there. Name a class as path/to/file.py:Class")
    return {"environment": name}


def _scheduler(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    return {} if list(words) == [GYM] and "gym_env" in given else _of_a_class(words, "a scheduler")


def _gym_env(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    return _of_a_class(words, "an environment")


def _use_gym_env(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """What it adds is in `of_swift`."""
    return {}


def _max_turns(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    """Nothing where who answers is refused already: a limit of turns would be a second mistake about the same."""
    refused = [word for name in ("gym_env", "multi_turn_scheduler") for word in given.get(name, ()) if ":" not in word and word != GYM]
    return {} if refused else {"max_turns": list(words)}


SWIFT: Mapping[str, Foreign] = {
    "multi_turn_scheduler": reads(_scheduler, "environment"),
    "gym_env": reads(_gym_env, "environment"),
    "use_gym_env": reads(_use_gym_env, "reward_funcs environment"),
    "max_turns": reads(_max_turns, "`max_turns`, which is 8 where nobody says it"),
    "completion_length_limit_scope": only(
        "total", "max_completion_length is of the whole episode here. Use total, and max_completion_length times max_turns"
    ),
    "vllm_server_pass_dataset": Foreign(),  # an environment always gets its row
    "agent_template": only("hermes", "tools are shown by the model's own chat template, and tool_call_parser reads calls"),
}


def of_swift(values: Mapping[str, Any], given: Given) -> Iterator[Change]:
    """What Megatron-SWIFT makes of several of them together."""
    if not (values.get("environment") or values.get("tools")):
        if list(given.get("use_gym_env", ())) == ["true"] and not {"gym_env", "multi_turn_scheduler"} & set(given):
            raise BadValue("use_gym_env (true) rewards what an environment says, and none is named: give gym_env path/to/file.py:Class. "
                           "What a row says of it (env_config) is not read")  # fmt: skip
        return
    if list(given.get("use_gym_env", ())) == ["true"] and "environment" not in values.get("reward_funcs", ()):
        yield Change(
            values={"reward_funcs": [*values.get("reward_funcs", ()), "environment"]},
            note="use_gym_env true: what the environment gives is a reward, the built-in `environment`.",
        )
    if "completion_length_limit_scope" not in given:
        yield Change(
            values={},
            note="max_completion_length is of one turn in Megatron-SWIFT (completion_length_limit_scope per_round) where nobody says it. "
            "Here it is of the whole episode after its prompt, the environment's words included.",
        )
    if "max_turns" not in values:
        yield Change(values={}, note="max_turns is without a limit in Megatron-SWIFT where nobody says it, and 8 here.")
    yield from not_left(values, "Megatron-SWIFT")


def not_left(values: Mapping[str, Any], title: str) -> Iterator[Change]:
    """Longer prompts are cut on the left where nobody says otherwise, which does not go with turns."""
    if (values.get("environment") or values.get("tools")) and "truncation_strategy" not in values and "max_prompt_length" in values:
        yield Change(
            values={"truncation_strategy": "delete"},
            note=f"{title} cuts longer prompts on the left, which does not go with environments and tools: truncation_strategy delete.",
        )


def _iterations(words: Sequence[str], given: Given) -> Mapping[str, Any]:
    try:
        return {"max_turns": int(words[0]) + 1}
    except (ValueError, IndexError):
        raise BadValue(f"needs a number of rounds of tool calls, not {' '.join(words)!r}") from None


TRL: Mapping[str, Foreign] = {
    "max_tool_calling_iterations": reads(_iterations, "max_turns, which is one more: it counts what the model says, not rounds of tools"),
    "tools": same("tools"),
    "environment_factory": same("environment"),
}


def of_trl(values: Mapping[str, Any], given: Given) -> Iterator[Change]:
    if values.get("environment") or values.get("tools"):
        if "max_turns" not in values:
            yield Change(values={}, note="max_tool_calling_iterations is without a limit in TRL where nobody says it; max_turns is 8 here.")
        yield from not_left(values, "TRL")
