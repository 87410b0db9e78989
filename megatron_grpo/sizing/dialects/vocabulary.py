"""What the tables of dialects share: batch sizes as rows, and the reward functions that are built in here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_grpo.settings.foreign import OFF, Change, reads
from megatron_grpo.settings.servers import OF_THE_ENGINE
from megatron_grpo.settings.table import BadValue, Setting
from megatron_grpo.sizing.sizes import NATIVE

BUILT_IN_REWARDS = (
    "environment",
    *("math", "accuracy", "format", "length", "soft_overlong", "cosine", "repetition", "code", "reward_model", "llm_judge"),
)
NATIVE_SIZES = tuple(flag for flags in NATIVE.values() for flag in flags)


def _no_token(words: Sequence[str], given: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
    """The sentence does not repeat what was typed."""
    if " ".join(words).lower() in OFF:
        return {}
    raise BadValue("is a secret, and settings are written to files: the environment variable HF_TOKEN holds it")


TOKEN = reads(_no_token, "the environment variable HF_TOKEN holds it")


def size(name: str, default: int | None, help: str) -> Setting:
    return Setting(name=name, group="foreign", kind="int", default=default, help=help, optional=default is None)


def sizes(*rows: Setting) -> dict[str, Setting]:
    return {row.name: row for row in rows}


def of_servers(values: Mapping[str, Any], *, program: str) -> Iterator[Change]:
    """Where servers sample: what an engine is started with is theirs. program: what starts servers in the other system."""
    if values.get("vllm_mode") != "server":
        return
    yield Change(values={}, note=f"vllm_mode server: start servers with `megatron-grpo serve`, for those of `{program}` speak another way.")
    if found := [name for name in OF_THE_ENGINE if name in values]:
        note = f"{', '.join(found)}: the engine is the server's, so give {'them' if len(found) > 1 else 'it'} to `megatron-grpo serve`."
        yield Change(values=dict.fromkeys(found), note=note)


def of_the_hub(values: Mapping[str, Any]) -> Iterator[Change]:
    """A repository that is named, and not pushed to, is nothing in transformers."""
    idle = [name for name in ("hub_model_id", "hub_private_repo") if name in values] if not values.get("push_to_hub") else []
    if idle:
        yield Change(values=dict.fromkeys(idle), note=f"{' and '.join(idle)} does nothing without push_to_hub, here as there.")
