"""Restrictions of sampling: structured outputs (regex, JSON schema, choice, grammar), and rules for top_k, top_p and min_p. No torch.

The trainer's softmax runs over the tokens that remain, so that its log-probs are those of the distribution sampled from. The ids of these
tokens travel with every token, from the sampler to the training step. Structured outputs are combined with `top_k`, or with the largest
one.

`unreadable_reason` parses regular expressions, schemas and grammars with vLLM's parsers before any model loads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Literal

from megatron_grpo.core.base.errors import Problem
from megatron_grpo.core.rollout.sampling_mask import (
    FIELD,
    MOST,
    REGEX,
    find_mask_flag,
    samples_from_part,
    training_structured_outputs,
)
from megatron_grpo.core.settings import RolloutConfig
from megatron_grpo.run.config.rules import Rule
from megatron_grpo.run.config.settings import Config

# Kinds of structured outputs, of which one is given, with the types of their values.
KINDS: Mapping[str, tuple[type, ...]] = {
    "regex": (str,), "json": (str, dict), "choice": (list,), "grammar": (str,), "json_object": (bool,), "structural_tag": (str,),
}  # fmt: skip
# vLLM accepts these in a request too, but reads those of the engine only. It reads whitespace_pattern nowhere.
ENGINE_OPTIONS = ("disable_any_whitespace", "disable_additional_properties")
_FORMS = {str: "a string", dict: "an object", list: "a list of strings", bool: "true"}
USUAL = 64  # suggested instead of a top_k of 1


def structured_outputs_settings(cfg: Config) -> Iterator[tuple[str, Any]]:
    """Yield (setting, structured outputs) for training and for evaluation."""
    if (bound := training_structured_outputs(cfg.rollout)) is not None:
        yield find_mask_flag(cfg.rollout), bound
    if (bound := cfg.eval.eval_generation_kwargs.get(FIELD)) is not None:
        yield "eval_generation_kwargs", bound


def structured_outputs_fault(bound: Any) -> str | None:
    """Return what is wrong with the form of structured outputs, as the end of a sentence; None if it is valid.

    Args:
        bound: The value, in the form of vLLM's `structured_outputs`.
    """
    if not isinstance(bound, Mapping):
        return 'is an object such as {"regex": "[0-9]+"}' + f", not {bound!r}"
    if engine := [name for name in bound if name in ENGINE_OPTIONS]:
        return f"has {engine[0]}, which vLLM does not read there. Use vllm_engine_kwargs structured_outputs_config"
    if unknown := [name for name in bound if name not in KINDS]:
        return f"has no key {unknown[0]}. Supported: {', '.join(KINDS)}"
    kinds = [name for name in KINDS if bound.get(name) is not None]
    if len(kinds) != 1:
        return f"requires exactly one of {', '.join(KINDS)}; it has {' and '.join(kinds) or 'none'}"
    value = bound[kinds[0]]
    is_right = type(value) in KINDS[kinds[0]] and bool(value)
    if isinstance(value, list):
        is_right = is_right and all(isinstance(item, str) and item for item in value)
    return None if is_right else f"has {value!r} as {kinds[0]}. Use {' or '.join(_FORMS[form] for form in KINDS[kinds[0]])}, not empty"


def describe(rollout: RolloutConfig) -> str:
    """Return the restrictions in words, such as `top_k 5 and top_p 0.9`."""
    cuts = {"top_k": (rollout.top_k, 0), "top_p": (rollout.top_p, 1), "min_p": (rollout.min_p, 0)}
    parts = [f"{name} {value:g}" for name, (value, disabled_value) in cuts.items() if value != disabled_value]
    return " and ".join([*parts, *(["structured outputs"] if training_structured_outputs(rollout) is not None else [])])


# ---- rules


def _faults(c: SimpleNamespace) -> list[dict[str, Any]]:
    return [
        {"flag": flag, "wrong": fault_text}
        for flag, bound in structured_outputs_settings(c.cfg)
        if (fault_text := structured_outputs_fault(bound))
    ]


def _cut(c: SimpleNamespace) -> dict[str, Any] | None:
    """Return the message fields of a problem if less than the whole vocabulary is sampled from."""
    if not samples_from_part(c.cfg.rollout):
        return None
    is_bounded = training_structured_outputs(c.cfg.rollout) is not None
    flag = "top_k" if c.top_k else "top_p" if c.top_p < 1 else "min_p" if c.min_p else find_mask_flag(c.cfg.rollout)
    return {"flag": flag, "cuts": describe(c.cfg.rollout), "them": "them" if is_bounded else "top_k, top_p and min_p"}


# fmt: off
GRAMMAR = (
    Rule("vllm_structured_outputs_regex generation_kwargs",
         lambda c: c.vllm_structured_outputs_regex is not None and c.generation_kwargs.get(FIELD) is not None,
         "vllm_structured_outputs_regex and generation_kwargs structured_outputs both constrain completions. Use one of them."),
    Rule("{flag}", _faults, "{flag}: structured_outputs {wrong}."),
)

# Rules of training. Evaluations may sample from any distribution, and recorded rows have been sampled already.
SAMPLING_MASK = (
    Rule("top_k", lambda c: c.top_k > MOST,
         f"top_k ({{top_k}}) is more than {MOST}: the IDs of the remaining tokens are stored with every sampled token, because the "
         f"trainer's softmax is over them. Use {MOST}, or 0 (off).", {"top_k": [MOST, 0]}),
    Rule("top_k", lambda c: c.top_k == 1,
         f"top_k (1) keeps only the most likely token, whose log-prob is then always 0, so nothing would train. Use {USUAL}, or 0 (off).",
         {"top_k": [USUAL, 0]}),
    Rule("min_p", lambda c: c.min_p == 1,
         "min_p (1) keeps only the most likely token, whose log-prob is then always 0, so nothing would train. Use a smaller value.",
         {"min_p": [0.0]}),
    Rule("{flag} rollout_func", lambda c: c.rollout_func is not None and _cut(c),
         "{cuts} is not supported with rollout_func: the requests that sampled the returned tokens are unknown, and with them the sampling "
         "masks. Omit {them}."),
)

NOTE = Rule("", lambda c: not c.top_k and _cut(c),
            f"Note: {{cuts}} without top_k implies top_k {MOST}: the IDs of the remaining tokens are stored with every sampled token, "
            "because the trainer's softmax is over them. Less likely tokens are never sampled in training.")
# fmt: on


def structured_outputs_problems(cfg: Config) -> list[Problem]:
    """Return problems with structured outputs of training and evaluation that vLLM's parsers reject.

    Empty where the parsers are not installed: servers may have them.
    """
    problems = []
    for flag, bound in structured_outputs_settings(cfg):
        if structured_outputs_fault(bound) is None and (reason := parser_error(bound)) is not None:
            name = next(name for name in ("regex", "json", "grammar", "structural_tag") if bound.get(name) is not None)
            flag_text = REGEX if flag == REGEX else f"{flag}: {FIELD} {name}"
            problems.append(Problem(flags=(flag,), message=f"{flag_text} ({bound[name]}) cannot be used for sampling: {reason}."))
    return problems


def parser_error(bound: Mapping[str, Any]) -> str | None:
    """Return the first parser's error in one line if no parser accepts the structured output; None if one does."""
    messages = []
    for reading in _readings(bound):
        try:
            reading()
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            messages.append(_in_one_line(str(error)))
        else:
            return None
    return messages[0] if messages else None


def _readings(bound: Mapping[str, Any]) -> Iterator[Callable[[], Any]]:
    """Yield parsers in the order in which vLLM tries them; vLLM uses the first that accepts."""
    regex, grammar, tag = bound.get("regex"), bound.get("grammar"), bound.get("structural_tag")
    schema = bound.get("json")
    text = schema if schema is None or isinstance(schema, str) else json.dumps(schema)
    if not any((regex, grammar, tag, text)):
        return  # a list of choices, or any JSON
    if find_spec("xgrammar") is not None:
        import xgrammar

        grammar_type = xgrammar.Grammar
        if regex is not None:
            yield lambda: grammar_type.from_regex(regex)
        elif text is not None:
            yield lambda: grammar_type.from_json_schema(text)
        elif grammar is not None:
            yield lambda: grammar_type.from_ebnf(grammar)
            yield lambda: grammar_type.from_lark(grammar)
        elif tag is not None:
            yield lambda: grammar_type.from_structural_tag(tag)
            yield lambda: [(item["begin"], item["schema"], item["end"]) for item in json.loads(tag)["structures"]]  # the older form
    if find_spec("llguidance") is not None:
        if regex is not None:
            yield partial(_guidance, "regex", regex)
        elif text is not None:
            yield partial(_guidance, "json_schema", text)
        elif grammar is not None:
            yield partial(_guidance, "grammar", grammar)


def _guidance(kind: Literal["regex", "json_schema", "grammar"], text: str) -> None:
    """Parse with llguidance; raise ValueError if it rejects the text."""
    import llguidance

    if fault_text := llguidance.LLMatcher.validate_grammar(llguidance.grammar_from(kind, text), None):
        raise ValueError(fault_text)


def _in_one_line(text: str) -> str:
    """Return xgrammar's message without the source location at its start: "[12:30:01] /project/cpp/parser.cc:83: "."""
    line = " ".join(text.split())
    head, _, remainder = line.partition(": ")
    return (remainder if head.startswith("[") and remainder else line).rstrip(".")
