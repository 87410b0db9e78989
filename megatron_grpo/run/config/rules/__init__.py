"""Rules about settings that do not go together, as rows: which settings, when, the message, and what works instead. No torch.

The rows about a group of settings are in a file here (`tuner`, `grpo` ...), those of a plug-in in its `rules.py`; `PLUG_INS` says when
these are imported. `broken_rules` evaluates them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import SimpleNamespace
from typing import Any

from megatron_grpo.core.base.errors import Problem
from megatron_grpo.run.config.read import COMMAND_LINE
from megatron_grpo.run.config.settings import Config, TurnsConfig
from megatron_grpo.run.plug_ins import PLUGINS, PlugIn


@dataclass(frozen=True, slots=True)
class Rule:
    """One reason to reject a configuration.

    Args:
        flags: The settings it is about, separated by spaces.
        when: Whether it applies, given the settings by name. A mapping instead of True holds further words for the message; a list of
            mappings yields one problem each.
        says: The message. `{beta}` is replaced by the setting's value, or by a word that `when` returned; flags may contain such words too.
        use: Values that work, by setting; or a function from settings and words to them.
    """

    flags: str
    when: Callable[[SimpleNamespace], Any]
    says: str
    use: Mapping[str, Any] | Callable[[SimpleNamespace], Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlugInRules:
    """Rules of a plug-in, in their place among the others. They are imported only if one of its settings differs from its default.

    Args:
        path: Their dotted name below `plugins`.
        settings: The settings, separated by spaces. While all have their defaults, none of the rules applies.
    """

    path: str
    settings: str


# Of a tuple of rules only the first that applies is reported.
Rules = Iterable[Rule | PlugInRules | tuple[Rule, ...]]
_TEACHER = "teacher_model teacher_model_server"
PLUG_INS = {
    "a teacher": PlugInRules("teacher.rules.RULES", f"{_TEACHER} offload_teacher_model"),
    "a teacher, mathematics": PlugInRules("teacher.rules.GRPO_RULES", f"{_TEACHER} teacher_kl_coef"),
    "warnings of a teacher": PlugInRules("teacher.rules.WARNINGS", _TEACHER),
    "servers": PlugInRules("servers.rules.RULES", "vllm_mode vllm_server_host vllm_server_base_url"),
    "warnings of servers": PlugInRules("servers.rules.WARNINGS", "vllm_mode"),
    "partial rollouts": PlugInRules("partial_rollouts.rules.RULES", "async_rollout_depth"),
    "episodes": PlugInRules("environments.rules.EPISODES", " ".join(setting.name for setting in fields(TurnsConfig))),
    "warnings of agents": PlugInRules("environments.rules.WARNINGS", "agent agent_command"),
    "a rollout function": PlugInRules("environments.rules.ROLLOUT_FUNC", "rollout_func rollout_func_timeout"),
}


def make_namespace(cfg: Config, **extra: Any) -> SimpleNamespace:
    """Return all settings by name, regardless of their group, with `cfg` and what else the rules of a package need.

    Args:
        **extra: Further names for the rules. Always added are `plays`; `player`, the setting that names the environment, tools or agent;
            `players`, the word for them; and `teacher`, the setting that names a teacher, or None.
    """
    values = {name: value for section in cfg.groups().values() for name, value in vars(section).items()}
    players = "agents" if cfg.turns.has_agent else "environments and tools"
    return SimpleNamespace(
        **values,
        cfg=cfg,
        **{"plays": cfg.turns.plays, "player": cfg.turns.player, "players": players, "teacher": cfg.grpo.teacher_flag, **extra},
    )


@cache
def _defaults() -> SimpleNamespace:
    return make_namespace(Config())


def changed(c: SimpleNamespace, *names: str) -> list[dict[str, Any]]:
    """Return the message fields of a problem for each setting that is not at its default: `name`, `value`, and `off` (the default)."""
    changed_names = [name for name in names if getattr(c, name) != getattr(_defaults(), name)]
    return [{"name": name, "value": getattr(c, name), "off": getattr(_defaults(), name)} for name in changed_names]


def typed_fields(c: SimpleNamespace, *names: str) -> list[dict[str, Any]]:
    """Return the message fields of a problem for each of these settings that was typed on the command line: `name` and `value`.

    Configuration files do not count, because a file that a run has written contains every setting.
    """
    return [{"name": name, "value": getattr(c, name)} for name in names if c.cfg.sources.get(name) == COMMAND_LINE]


def in_typed_names(cfg: Config, problem: Problem) -> Problem:
    """Return the problem with the names that the user typed."""
    typed = {flag: cfg.typed.get(flag, flag) for flag in problem.flags}
    unnamed = {flag: name for flag, name in typed.items() if not re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.]*\w)", problem.message)}
    return Problem(
        flags=tuple(typed.values()),
        message=problem.message + "".join(f" {flag} was typed as {name}." for flag, name in unnamed.items() if name != flag),
        nearest={cfg.typed.get(flag, flag): values for flag, values in problem.nearest.items()},
    )


def broken_rules(rules: Rules, c: SimpleNamespace) -> Iterator[Problem]:
    """Yield a problem for each rule that applies, with the settings' own names.

    Args:
        rules: Rules; of a tuple of rules only the first one that applies is reported.
    """
    for rule in rules:
        if isinstance(rule, PlugInRules):
            if changed(c, *rule.settings.split()):
                yield from broken_rules(PlugIn[Rules](f"{PLUGINS}.{rule.path}").load(), c)
            continue
        if isinstance(rule, tuple):
            yield from next(filter(None, (list(broken_rules([alternative], c)) for alternative in rule)), ())
            continue
        broken_by = rule.when(c)
        for values in broken_by if isinstance(broken_by, list) else [broken_by] if broken_by else []:
            words = SimpleNamespace(**vars(c) | (values if isinstance(values, dict) else {}))
            use = rule.use(words) if callable(rule.use) else rule.use
            yield Problem(
                flags=tuple(rule.flags.format_map(vars(words)).split()),
                message=rule.says.format_map(vars(words)),
                nearest={flag: list(values) for flag, values in use.items()},
            )
