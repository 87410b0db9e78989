"""Checks the batch sizes of a configuration, and finds the nearest valid value of a size."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from math import gcd, isqrt, lcm

from megatron_grpo.core.base.errors import ConfigError, Problem
from megatron_grpo.core.batching.batch_sizes import BatchSizes
from megatron_grpo.core.parallel.layout import Layout
from megatron_grpo.run.config.rules.settings import validate
from megatron_grpo.run.config.rules.sizes import BatchSizeRule, lower_bounds, minimum, rules
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.config.sizes import (
    CP,
    EP,
    ETP,
    GROUP,
    PASSES,
    PP,
    SIZES,
    STEPS,
    TP,
    VPP,
    WORLD,
    BatchSizeInputs,
    DerivedSizes,
    ModelDivisors,
)


def checked_sizes(
    cfg: Config, *, num_layers: int | None = None, num_experts: int | None = None, model: ModelDivisors | None = None
) -> BatchSizes:
    """Derive the sizes of a configuration.

    Args:
        num_layers: Number of layers of the model, if known.
        num_experts: Number of experts of the model, if known; 0 is a dense model.
        model: All that is known of the model; takes precedence over `num_layers` and `num_experts`.

    Raises:
        ConfigError: Sizes do not fit. Names each of them, with the nearest values that fit.
    """
    model = model or ModelDivisors(num_layers=num_layers, num_experts=num_experts)
    if problems := size_problems(cfg, model, others_pass=not validate(cfg)):
        raise ConfigError(problems)
    inputs = BatchSizeInputs.from_config(cfg, model)
    v, sizes = inputs.values, DerivedSizes.from_inputs(inputs)
    return BatchSizes(
        layout=Layout(world_size=v[WORLD], tp=v[TP], pp=v[PP], vpp=v.get(VPP), cp=v[CP], ep=v[EP], etp=v[ETP]),
        micro_batch_size=int(sizes.micro),
        global_batch_size=int(sizes.global_batch.value),
        generation_batch_size=int(sizes.generation.value),
        num_generations=v[GROUP],
        num_iterations=v.get(PASSES, 1),
        # R2 replays the routing of the old log-prob pass.
        old_logprobs="always" if cfg.grpo.router_replay_mode == "R2" else cfg.batch.old_logprobs,
        async_rollout_depth=cfg.rollout.async_rollout_depth,
        partial_rollouts=cfg.rollout.partial_rollouts,
        has_servers=cfg.rollout.vllm_mode == "server",
    )


def with_derived_sizes(cfg: Config, sizes: BatchSizes) -> Config:
    """Return the configuration with the derived sizes filled in, so that what a run records is complete and in native names."""
    values = {name: getattr(sizes, name) for name in SIZES}
    if not isinstance(sizes.steps_per_generation, int):  # a fraction follows from the other sizes and could not be typed
        del values[STEPS]
    sources = {}
    for name, value in values.items():
        if name in cfg.origins and cfg.origins[name].text:
            sources[name] = f"derived from {cfg.origins[name].text}"
        elif cfg.origins or getattr(cfg.batch, name) != value:
            sources[name] = "derived from the other sizes"
    return cfg.with_values(values, sources=sources)


# ---- the problems, and the nearest valid values


# Rules that are not about multiples (uneven pipeline stages) cannot narrow the search; past this many misses a side counts as empty.
MOST_CANDIDATES = 5_000


def size_problems(
    cfg: Config, model: ModelDivisors | None = None, *, others_pass: bool = True, unreadable: Collection[str] = ()
) -> list[Problem]:
    """Return all problems with the sizes, with the user's names of the settings to change.

    Args:
        others_pass: Whether the rest of the configuration is valid, so that a change of one size can make all of it pass. Otherwise no
            nearest values are offered.
        unreadable: Settings whose values could not be parsed; rules about them are skipped.
    """
    inputs = BatchSizeInputs.from_config(cfg, model)
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
            fixed = {WORLD} if cfg.sources.get(WORLD) == "launcher" else set()
            nearest_values = {flag: nearest(inputs, flag) for flag in flags if flag in inputs.values and flag not in fixed}
        proposals = {names[flag]: values for flag, values in nearest_values.items() if values and flag in blamed}
        other_proposals = {
            names[flag]: values for flag, values in nearest_values.items() if values and flag not in blamed and flag in SIZES
        }
        problems.append(
            Problem(
                flags=tuple(names.get(flag, flag) for flag in blamed),
                nearest=proposals,
                message=_sentence(rule.text, proposals or other_proposals),
            )
        )
    return problems


def _sentence(core: str, proposals: Mapping[str, Sequence[int]]) -> str:
    if not proposals:
        return f"{core}."
    ways = [f"{flag} {' or '.join(map(str, values))}" for flag, values in proposals.items()]
    return f"{core}. Use {', or '.join(ways)}."


def broken_rules(inputs: BatchSizeInputs) -> list[BatchSizeRule]:
    """Return the rules that the sizes violate, without those that only follow from another violated rule.

    A size that is too small hides only the rules that it takes part in: the others are checked with its minimum in its place.
    """
    violated = [rule for rule in lower_bounds(inputs) if rule.broken]
    too_small = {flag for rule in violated for flag in rule.flags}
    for flag in too_small:
        inputs = inputs.with_value(flag, minimum(inputs, flag))
    broken: dict[str, BatchSizeRule] = {}
    for rule in rules(inputs):
        if rule.broken and not any(key in broken for key in rule.after):
            broken[rule.key] = rule
    return violated + [rule for rule in broken.values() if not too_small & set(rule.flags)]


def nearest(inputs: BatchSizeInputs, flag: str) -> list[int]:
    """Return at most two values of `flag` that violate no rule: the nearest one below and above the present one.

    Args:
        inputs: The typed sizes; `flag` is among them.
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
    for side in (lower, higher):  # no rule may be violated; `lower_bounds` hold
        result += islice((v for v in islice(side, MOST_CANDIDATES) if not any(r.broken for r in rules(inputs.with_value(flag, v)))), 1)
    return result


def _sieve(inputs: BatchSizeInputs, flag: str) -> tuple[int, int | None]:
    """Return (s, n): every value that violates no rule is a multiple of s and, unless n is None, divides n.

    Both sides of a rule are products of flags, so a flag multiplies or divides their ratio or leaves it; two evaluations tell which.
    """
    rules_at_1, rules_at_2 = ({rule.key: rule for rule in rules(inputs.with_value(flag, value))} for value in (1, 2))
    step, bound = 1, None
    for key in rules_at_1.keys() & rules_at_2.keys():
        a, b = rules_at_1[key], rules_at_2[key]
        if not a.holds and (flag not in a.flags or a.needs_removal):
            return 1, 0  # broken, and not by the value of this flag
        for at_1, at_2 in ((a.ratio, b.ratio), *(((1 / a.ratio, 1 / b.ratio),) if a.equal else ())):
            if at_2 == 2 * at_1:
                step = lcm(step, at_1.denominator)
            elif at_1.denominator > 1:
                return 1, 0  # broken whatever the value
            elif at_1 == 2 * at_2:
                bound = at_1.numerator if bound is None else gcd(bound, at_1.numerator)
    return step, bound


def _divisors(n: int) -> list[int]:
    if n < 1:
        return []
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
