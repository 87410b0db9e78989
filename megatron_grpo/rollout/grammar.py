"""Check that regular expressions, schemas and grammars parse, before any model loads. No torch unless there is one to check."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

from megatron_grpo.base.errors import Problem
from megatron_grpo.config.config import Config
from megatron_grpo.config.sampling_mask import FIELD, REGEX, asked, fault


def unreadable(cfg: Config) -> list[Problem]:
    """Return problems with structured outputs of training and evaluation that vLLM's parsers reject.

    Empty where the parsers are not installed: servers may have them.

    Args:
        cfg: The configuration.
    """
    found = []
    for flag, bound in asked(cfg):
        if fault(bound) is None and (why := why_unreadable(bound)) is not None:
            name = next(name for name in ("regex", "json", "grammar", "structural_tag") if bound.get(name) is not None)
            what = REGEX if flag == REGEX else f"{flag}: {FIELD} {name}"
            found.append(Problem(flags=(flag,), message=f"{what} ({bound[name]}) cannot be used for sampling: {why}."))
    return found


def why_unreadable(bound: Mapping[str, Any]) -> str | None:
    """Return the first parser's error in one line if no parser accepts the structured output; None if one does.

    Args:
        bound: Structured-output settings of valid form.
    """
    messages = []
    for read in _readings(bound):
        try:
            read()
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

        of = xgrammar.Grammar
        if regex is not None:
            yield lambda: of.from_regex(regex)
        elif text is not None:
            yield lambda: of.from_json_schema(text)
        elif grammar is not None:
            yield lambda: of.from_ebnf(grammar)
            yield lambda: of.from_lark(grammar)
        elif tag is not None:
            yield lambda: of.from_structural_tag(tag)
            yield lambda: [(one["begin"], one["schema"], one["end"]) for one in json.loads(tag)["structures"]]  # the older form
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

    if wrong := llguidance.LLMatcher.validate_grammar(llguidance.grammar_from(kind, text), None):
        raise ValueError(wrong)


def _in_one_line(text: str) -> str:
    """Return xgrammar's message without the source location at its start: "[12:30:01] /project/cpp/parser.cc:83: "."""
    line = " ".join(text.split())
    head, _, rest = line.partition(": ")
    return (rest if head.startswith("[") and rest else line).rstrip(".")
