"""Find the nearest values with which a whole configuration passes if one flag is changed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import gcd, isqrt, lcm

from megatron_grpo.batching.rules import lower_bounds, minimum, rules
from megatron_grpo.batching.sizes import SizeRule, TypedSizes

# Rules that are not about multiples (uneven pipeline stages) cannot narrow the search; past this many misses a side counts as empty.
MOST_CANDIDATES = 5_000


def broken_rules(inputs: TypedSizes) -> list[SizeRule]:
    """Return the rules that the sizes violate, without those that only follow from another violated rule.

    A size that is too small hides only the rules that it takes part in: the others are checked with its minimum in its place.

    Args:
        inputs: The typed sizes.
    """
    below = [rule for rule in lower_bounds(inputs) if rule.broken]
    too_small = {flag for rule in below for flag in rule.flags}
    for flag in too_small:
        inputs = inputs.with_value(flag, minimum(inputs, flag))
    broken: dict[str, SizeRule] = {}
    for rule in rules(inputs):
        if rule.broken and not any(key in broken for key in rule.after):
            broken[rule.key] = rule
    return below + [rule for rule in broken.values() if not too_small & set(rule.flags)]


def nearest(inputs: TypedSizes, flag: str) -> list[int]:
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
        below: Iterator[int] = (d for d in reversed(divisors) if least <= d < present)
        above: Iterator[int] = (d for d in divisors if d > present and d >= least)
    else:
        first = max(present + 1, least)
        below = iter(range((present - 1) // step * step, least - 1, -step)) if present > least else iter(())
        above = iter(range(-(-first // step) * step, first + step * (MOST_CANDIDATES + 1), step))
    found: list[int] = []
    for side in (below, above):
        found += islice((v for v in islice(side, MOST_CANDIDATES) if not broken_rules(inputs.with_value(flag, v))), 1)
    return found


def _sieve(inputs: TypedSizes, flag: str) -> tuple[int, int | None]:
    """Return (s, n): every value that violates no rule is a multiple of s and, unless n is None, divides n.

    Both sides of a rule are products of flags, so a flag enters each side linearly or not at all; two evaluations tell which.
    """
    one, two = ({rule.key: rule for rule in rules(inputs.with_value(flag, value))} for value in (1, 2))
    step, bound = 1, None
    for key in one.keys() & two.keys():
        a, b = one[key], two[key]
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
