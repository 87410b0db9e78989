"""Suggestions for unknown names. Tables of names take precedence over similarity, and no suggestion is better than a harmful one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from megatron_grpo.commands.compat.foreign_args import NOTHING, SourceFramework
from megatron_grpo.commands.compat.tables import contents
from megatron_grpo.core.base.errors import Problem
from megatron_grpo.run.config.read import COMMAND_LINE
from megatron_grpo.run.config.table import close_to, names, table

ALIKE = 0.8  # difflib's ratio above which two names count as a typing error

# Sizes among these names that some systems count in prompts.
COUNTED_IN_PROMPTS = (*("train_batch_size", "rollout_batch_size", "policy_mini_batch_size", "ppo_mini_batch_size", "mini_batch_size"),)


@cache
def by_name(part: str) -> Mapping[str, str]:
    """Return `same_as` or `sentences` of suggestions.yaml: the setting, or the sentence, for each name.

    Args:
        part: `same_as` or `sentences`.
    """
    return {name: text for text, names in contents("suggestions")[part].items() for name in names.split()}


def suggestion(name: str, dialects: Mapping[str, SourceFramework], *, hidden: Collection[str] = ()) -> str:
    """Return a sentence, with a leading space, on what to type instead of an unknown name."""
    last = name.rpartition(".")[2]
    for key in (name, ".".join(name.split(".")[-2:]), last):
        sentence = _from_tables(key, dialects, hidden)
        if sentence:
            return sentence
    return _alike(name, last, hidden)


def _from_tables(name: str, dialects: Mapping[str, SourceFramework], hidden: Collection[str]) -> str:
    if sentence := by_name("sentences").get(name):
        is_setting = sentence.partition(" ")[0] in names()  # settings keep their spelling
        return f" {sentence if is_setting else sentence[0].upper() + sentence[1:]}"
    if (native := by_name("same_as").get(name)) and native not in hidden:
        counted = ", and counts completions: prompts times num_generations" if name in COUNTED_IN_PROMPTS else ""
        return f" Here it is called {native}{counted}."
    for dialect in dialects.values():
        row = dialect.row(name)[1]
        if row is None:
            continue
        if row.native:
            return f" {dialect.title}'s {name} is called {row.native} here." if row.native != name else ""
        if row.hint:
            return f" {dialect.title}'s {name} is set here with {row.hint.replace('`', '')}."
        if row.lacks:
            return f" It is a {dialect.title} setting: {row.lacks}. Omit it."
        if row.read is None:
            reason = f" ({row.why})" if row.why and row.why != NOTHING else ""
            return f" It is a {dialect.title} setting that affects neither sampling nor training here{reason}. Omit it."
    return ""


def value_hint(name: str, raw: Any) -> str:
    """Return a sentence, with a leading space, on what to type for a word that is no value of the setting `name`; "" if none is known.

    Args:
        raw: What was typed; case and punctuation do not matter.
    """

    def plain(word: object) -> str:
        return re.sub(r"[^a-z0-9+]", "", str(word).lower())

    word = plain(raw[0] if isinstance(raw, list) and len(raw) == 1 else raw)
    same = [choice for choice in getattr(table().get(name), "choices", ()) if plain(choice) == word]
    sentences = {text for text, words in contents("suggestions")["values"].get(name, {}).items() if word in words.split()}
    return "".join(f" {text[0].upper()}{text[1:]}." for text in [*(f"use {choice}" for choice in same), *sentences])


LIST = " `megatron-grpo train --help` lists all settings."


def _alike(name: str, last: str, hidden: Collection[str]) -> str:
    candidates = [candidates for candidates, setting in names().items() if setting.name not in hidden]
    if last != name and last in candidates:
        section, groups = name.rpartition(".")[0], sorted({setting.group for setting in table().values()})
        if section in groups or hidden:  # or of a dialect, which has other sections
            return f" {last} is a setting: on the command line, use --{last}."
        return f" {last} is a setting, but {section} is not a section. Sections: {', '.join(groups)}."
    close = close_to(last, [*candidates, "config", "print_config"], limit=1, cutoff=ALIKE)
    return f" Did you mean {close[0]}?" if close else LIST


def reads_as(unknown: Sequence[str], dialects: Mapping[str, SourceFramework]) -> tuple[SourceFramework, list[str]] | None:
    """Return the dialect that knows more than half of these names, and at least three; and the names it knows."""
    best: tuple[SourceFramework, list[str]] | None = None
    for dialect in dialects.values():
        known_names = [name for name in unknown if dialect.knows(name)]
        if best is None or len(known_names) > len(best[1]):
            best = dialect, known_names
    return best if best and len(best[1]) >= 3 and 2 * len(best[1]) > len(unknown) else None


def problems_of_unknown(
    names_by_source: Mapping[str, Sequence[str]], dialect: SourceFramework | None, dialects: Mapping[str, SourceFramework]
) -> Iterator[Problem]:
    """Yield problems for unknown names, with suggestions.

    A source full of another system's names is one problem; each other name is one problem.

    Args:
        dialect: Dialect in use, if any.
    """
    for source, unknown in names_by_source.items():
        source_text = "" if source == COMMAND_LINE else f" in {source}"
        reads = reads_as(unknown, dialects) if dialect is None else None
        if reads:
            other_dialect, known_names = reads
            subject = "This command line" if source == COMMAND_LINE else source
            examples = ", ".join(known_names[:4]) + (f" and {len(known_names) - 4} more" if len(known_names) > 4 else "")
            message = f"{subject} looks like a {other_dialect.title} file ({examples}). Add `--dialect {other_dialect.name}`."
            yield Problem(flags=tuple(known_names), message=message)
        hints = {name: _hint(name, dialect, dialects) for name in unknown if not reads or name not in reads[1]}
        if dialect and len(unexplained := [name for name, hint in hints.items() if LIST in hint]) > 1:
            message = f"{', '.join(unexplained)}{source_text} are neither settings nor known {dialect.title} names, so they may \
change the training."
            yield Problem(flags=tuple(unexplained), message=message)
            hints = {name: hint for name, hint in hints.items() if name not in unexplained}
        for name, hint in hints.items():
            yield Problem(flags=(name,), message=f"{name}{source_text} is not a setting.{hint}")


def _hint(name: str, dialect: SourceFramework | None, dialects: Mapping[str, SourceFramework]) -> str:
    if dialect is None:
        return suggestion(name, dialects)
    sizes = list(dialect.settings)
    if sizes and close_to(name, [*sizes, *dialect.hides], limit=1, cutoff=ALIKE):
        return f" Batch sizes in the {dialect.name} dialect: {', '.join(sizes)}."
    sentence = suggestion(name, dialects, hidden=dialect.hides)
    return f"{sentence} It is not a known {dialect.title} name either, so it may change the training."
