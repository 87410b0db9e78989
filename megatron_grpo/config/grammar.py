"""What bounds the words of a completion: a regular expression, a JSON schema, a list of answers or a grammar, for vLLM. No torch.

In training they go with a `top_k`, or with the largest: the words that both leave for a token travel with it (`config.kept`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_grpo.config.config import Config, RolloutConfig
from megatron_grpo.config.tuner import Pair

FIELD, REGEX = "structured_outputs", "vllm_structured_outputs_regex"  # of vLLM's SamplingParams; a setting of its own
# One of these says what may be written, and is of this form.
KINDS: Mapping[str, tuple[type, ...]] = {
    "regex": (str,), "json": (str, dict), "choice": (list,), "grammar": (str,), "json_object": (bool,), "structural_tag": (str,),
}  # fmt: skip
# vLLM takes these in a request too, and looks at those of the engine alone. At whitespace_pattern it looks nowhere.
OF_THE_ENGINE = ("disable_any_whitespace", "disable_additional_properties")
_FORMS = {str: "a string", dict: "an object", list: "a list of strings", bool: "true"}


def of_training(rollout: RolloutConfig) -> Mapping[str, Any] | None:
    """As vLLM's `structured_outputs` has it, whichever setting said it; None where completions are drawn freely."""
    regex = rollout.vllm_structured_outputs_regex
    return rollout.generation_kwargs.get(FIELD) if regex is None else {"regex": regex}


def flag_of(rollout: RolloutConfig) -> str:
    """The setting that says it."""
    return REGEX if rollout.vllm_structured_outputs_regex is not None else "generation_kwargs"


def sampling_fields_of(rollout: RolloutConfig) -> Mapping[str, Any]:
    """What training gives vLLM's SamplingParams besides its own settings."""
    regex = rollout.vllm_structured_outputs_regex
    return rollout.generation_kwargs if regex is None else {**rollout.generation_kwargs, FIELD: {"regex": regex}}


def asked(cfg: Config) -> Iterator[tuple[str, Any]]:
    """(setting, what it bounds completions by), of training and of evaluation."""
    if (bound := of_training(cfg.rollout)) is not None:
        yield flag_of(cfg.rollout), bound
    if (bound := cfg.eval.eval_generation_kwargs.get(FIELD)) is not None:
        yield "eval_generation_kwargs", bound


def fault(bound: Any) -> str | None:
    """What is wrong with its form, as the end of a sentence."""
    if not isinstance(bound, Mapping):
        return 'is an object such as {"regex": "[0-9]+"}' + f", not {bound!r}"
    if engine := [name for name in bound if name in OF_THE_ENGINE]:
        return f"has {engine[0]}, which vLLM does not read there. Its engine has it: vllm_engine_kwargs structured_outputs_config"
    if unknown := [name for name in bound if name not in KINDS]:
        return f"has no {unknown[0]}. It has one of {', '.join(KINDS)}"
    given = [name for name in KINDS if bound.get(name) is not None]
    if len(given) != 1:
        return f"has one of {', '.join(KINDS)}, and here are {' and '.join(given) or 'none of them'}"
    value = bound[given[0]]
    is_right = type(value) in KINDS[given[0]] and bool(value)
    if isinstance(value, list):
        is_right = is_right and all(isinstance(one, str) and one for one in value)
    return None if is_right else f"has {value!r} as {given[0]}. Give {' or '.join(_FORMS[form] for form in KINDS[given[0]])}, not empty"


def pairs(cfg: Config) -> Iterator[Pair]:
    """(settings, what is wrong, nearest values) of each problem."""
    rollout = cfg.rollout
    if rollout.vllm_structured_outputs_regex is not None and rollout.generation_kwargs.get(FIELD) is not None:
        message = f"{REGEX} and generation_kwargs {FIELD} both say what completions are bounded by. Keep one of them."
        yield (REGEX, "generation_kwargs"), message, {}
    for flag, bound in asked(cfg):
        if wrong := fault(bound):
            what = f"{REGEX}: {FIELD}" if flag == REGEX else f"{flag}: {FIELD}"
            yield (flag,), f"{what} {wrong}.", {}
