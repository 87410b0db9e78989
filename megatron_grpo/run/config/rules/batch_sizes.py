"""Checks the batch sizes of a configuration, and finds the nearest valid value of a size."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from math import gcd, isqrt, lcm

from megatron_grpo.core.base.errors import ConfigError, Problem
from megatron_grpo.core.batching.batch_sizes import BatchSizes
from megatron_grpo.core.batching.sizes import SIZES, WORLD, SizeInputs, SizeModel, SizeRule, inputs_of
from megatron_grpo.core.settings import Config
from megatron_grpo.run.config.rules.settings import validate
from megatron_grpo.run.config.rules.sizes import lower_bounds, minimum, rules


def checked_sizes(
    cfg: Config, *, num_layers: int | None = None, num_experts: int | None = None, model: SizeModel | None = None
) -> BatchSizes:
    """Derive the sizes of a configuration.

    Args:
        cfg: The configuration.
        num_layers: Number of layers of the model, if known.
        num_experts: Number of experts of the model, if known; 0 is a dense model.
        model: All that is known of the model; takes precedence over `num_layers` and `num_experts`.

    Raises:
        ConfigError: Sizes do not fit. Names each of them, with the nearest values that fit.
    """
    model = model or SizeModel(num_layers=num_layers, num_experts=num_experts)
    if problems := size_problems(cfg, model, others_pass=not validate(cfg)):
        raise ConfigError(problems)
    return BatchSizes.from_config(cfg, model)


# Rules that are not about multiples (uneven pipeline stages) cannot narrow the search; past this many misses a side counts as empty.
MOST_CANDIDATES = 5_000


def size_problems(
    cfg: Config, model: SizeModel | None = None, *, others_pass: bool = True, unreadable: Collection[str] = ()
) -> list[Problem]:
    """Return all problems with the sizes, with the user's names of the settings to change.

    Args:
        cfg: The configuration.
        model: Known properties of the model.
        others_pass: Whether the rest of the configuration is valid, so that a change of one size can make all of it pass. Otherwise no
            nearest values are offered.
        unreadable: Settings whose values could not be parsed; rules about them are skipped.
    """
    inputs = inputs_of(cfg, model)
    names = {flag: cfg.origins[flag].name if flag in cfg.origins else cfg.typed.get(flag, flag) for flag in inputs.values}
    unread = {flag for flag, name in names.items() if name in unreadable} | set(unreadable)
    broken = [rule for rule in broken_rules(inputs) if not unread & set(rule.flags)]
    problems = []
    for rule in broken:
        flags = list(dict.fromkeys(flag for flag in rule.flags if flag in inputs.values or flag == "sequence_parallel"))
        typed_flags = [flag for flag in flags if flag in inputs.typed or cfg.sources.get(flag, "default") != "default"]
        blamed = typed_flags or [flag for flag in flags if flag in SIZES or flag in inputs.typed] or flags
        nearest_values = {}
        if others_pass and not unreadable:
            nearest_values = {flag: nearest(inputs, flag) for flag in flags if flag in inputs.values and _changeable(flag, cfg)}
        proposals = {names[flag]: values for flag, values in nearest_values.items() if values and flag in blamed}
        other_proposals = {
            names[flag]: values for flag, values in nearest_values.items() if values and flag not in blamed and flag in SIZES
        }
        problems.append(
            Problem(
                flags=tuple(names.get(flag, flag) for flag in blamed),
                nearest=proposals,
                message=_sentence(rule.text(), proposals or other_proposals),
            )
        )
    return problems


def _changeable(flag: str, cfg: Config) -> bool:
    return not (flag == WORLD and cfg.sources.get(WORLD) == "launcher")


def _sentence(core: str, proposals: Mapping[str, Sequence[int]]) -> str:
    if not proposals:
        return f"{core}."
    ways = [f"{flag} {' or '.join(map(str, values))}" for flag, values in proposals.items()]
    return f"{core}. Use {', or '.join(ways)}."


def broken_rules(inputs: SizeInputs) -> list[SizeRule]:
    """Return the rules that the sizes violate, without those that only follow from another violated rule.

    A size that is too small hides only the rules that it takes part in: the others are checked with its minimum in its place.

    Args:
        inputs: The typed sizes.
    """
    violated = [rule for rule in lower_bounds(inputs) if rule.broken]
    too_small = {flag for rule in violated for flag in rule.flags}
    for flag in too_small:
        inputs = inputs.with_value(flag, minimum(inputs, flag))
    broken: dict[str, SizeRule] = {}
    for rule in rules(inputs):
        if rule.broken and not any(key in broken for key in rule.after):
            broken[rule.key] = rule
    return violated + [rule for rule in broken.values() if not too_small & set(rule.flags)]


def nearest(inputs: SizeInputs, flag: str) -> list[int]:
    """Return at most two values of `flag` that violate no rule: the nearest one below and above the present one.

    Args:
        inputs: The typed sizes; `flag` is among them.
        flag: The flag to change.
    """
    present = inputs.values[flag]
    least = minimum(inputs, flag)
    if any(rule.broken for rule in lower_bounds(inputs) if rule.flags != (flag,)):
        return []
    step, bound = _sieve(inputs, flag)
    if bound is not None:
        divisors = sorted(d * step for d in _divisors(bound // step)) if bound % step == 0 else []
        lower: Iterator[int] = (d for d in reversed(divisors) if least <= d < present)
        higher: Iterator[int] = (d for d in divisors if d > present and d >= least)
    else:
        first = max(present + 1, least)
        lower = iter(range((present - 1) // step * step, least - 1, -step)) if present > least else iter(())
        higher = iter(range(-(-first // step) * step, first + step * (MOST_CANDIDATES + 1), step))
    result: list[int] = []
    for side in (lower, higher):
        result += islice((v for v in islice(side, MOST_CANDIDATES) if not broken_rules(inputs.with_value(flag, v))), 1)
    return result


def _sieve(inputs: SizeInputs, flag: str) -> tuple[int, int | None]:
    """Return (s, n): every value that violates no rule is a multiple of s and, unless n is None, divides n.

    Both sides of a rule are products of flags, so a flag enters each side linearly or not at all; two evaluations tell which.
    """
    rules_at_1, rules_at_2 = ({rule.key: rule for rule in rules(inputs.with_value(flag, value))} for value in (1, 2))
    step, bound = 1, None
    for key in rules_at_1.keys() & rules_at_2.keys():
        a, b = rules_at_1[key], rules_at_2[key]
        if not a.holds and (flag not in a.flags or a.needs_removal):
            return 1, 0  # broken, and not by the value of this flag
        sides = [(*a.ratio, *b.ratio), *([(*a.ratio[::-1], *b.ratio[::-1])] if a.equal else [])]
        for top, bottom, top_two, bottom_two in sides:
            if top * bottom_two == top_two * bottom:
                if bottom == 0 or top % bottom:
                    return 1, 0  # broken whatever the value
            elif top_two == 2 * top and bottom_two == bottom:
                step = lcm(step, bottom // gcd(bottom, top))
            elif top_two == top and bottom_two == 2 * bottom:
                quotient = top // bottom if top % bottom == 0 else 0
                if not quotient:
                    return 1, 0  # no value can mend this rule
                bound = quotient if bound is None else gcd(bound, quotient)
    return step, bound


def _divisors(n: int) -> list[int]:
    if n < 1:
        return []
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
