"""What does not go together, as rows: which settings, when, what is said of it, and what works instead. No torch.

A room's `validation.py` holds its rows; here, what a room of settings means is beside them (`tuner`, `servers` ...). `broken` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

from megatron_grpo.base.errors import Problem
from megatron_grpo.config.config import Config
from megatron_grpo.config.read import COMMAND_LINE


@dataclass(frozen=True, slots=True)
class Rule:
    """One refusal.

    flags: the settings it is about, separated by spaces.
    when: whether it applies, of the settings by name. A mapping instead of True holds further words for the sentence; a list of mappings
        is a refusal each.
    says: the sentence. `{beta}` is the setting's value, or a word that `when` found; so may flags have them.
    use: values that work by setting, or a function of the settings and words that gives them.
    """

    flags: str
    when: Callable[[SimpleNamespace], Any]
    says: str
    use: Mapping[str, Any] | Callable[[SimpleNamespace], Mapping[str, Any]] = field(default_factory=dict)


# Of a tuple of rules only the first that applies is said.
Rules = Iterable[Rule | tuple[Rule, ...]]


def settings_of(cfg: Config, **more: Any) -> SimpleNamespace:
    """Every setting by its name, whichever group it is in; `cfg` itself, and what else the rules of a room look at.

    player: the setting that says who answers between turns, where `plays`. teacher: the one that names a teacher, or None.
    """
    known = {name: value for section in cfg.groups().values() for name, value in vars(section).items()}
    player = "environment" if cfg.turns.environment else "tools"
    return SimpleNamespace(**known, cfg=cfg, **{"plays": cfg.turns.plays, "player": player, "teacher": cfg.grpo.teacher_flag, **more})


@cache
def _defaults() -> SimpleNamespace:
    return settings_of(Config())


def changed(c: SimpleNamespace, *names: str) -> list[dict[str, Any]]:
    """The words of a refusal for each of these whose value is not its default: `name`, `value`, and `off`, which is the default."""
    others = [name for name in names if getattr(c, name) != getattr(_defaults(), name)]
    return [{"name": name, "value": getattr(c, name), "off": getattr(_defaults(), name)} for name in others]


def given(c: SimpleNamespace, *names: str) -> list[dict[str, Any]]:
    """The same for each of these on the command line. (A file that a run has written has every setting.)"""
    return [{"name": name, "value": getattr(c, name)} for name in names if c.cfg.sources.get(name) == COMMAND_LINE]


def in_typed_names(cfg: Config, problem: Problem) -> Problem:
    """The same, of the names that the user typed."""
    return Problem(
        flags=tuple(cfg.typed.get(flag, flag) for flag in problem.flags),
        message=problem.message,
        nearest={cfg.typed.get(flag, flag): values for flag, values in problem.nearest.items()},
    )


def broken(rules: Rules, c: SimpleNamespace) -> Iterator[Problem]:
    """A problem for each rule that applies, in the settings' own names. c: of `settings_of`."""
    for rule in rules:
        if isinstance(rule, tuple):
            yield from next(filter(None, (list(broken([one], c)) for one in rule)), ())
            continue
        found = rule.when(c)
        for more in found if isinstance(found, list) else [found] if found else []:
            words = SimpleNamespace(**vars(c) | (more if isinstance(more, dict) else {}))
            use = rule.use(words) if callable(rule.use) else rule.use
            yield Problem(
                flags=tuple(rule.flags.format_map(vars(words)).split()),
                message=rule.says.format_map(vars(words)),
                nearest={flag: list(values) for flag, values in use.items()},
            )
