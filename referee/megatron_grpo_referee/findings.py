"""Comparison of each number of a dump with the reference, in the order in which a step computes them.

Each number is recomputed from the dump's numbers before it, so that a difference is reported where it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from megatron_grpo_referee import reference
from megatron_grpo_referee.causes import MODES, Change, advantage_causes, advantages, changed, changes, factor_changes
from megatron_grpo_referee.dump import ROUNDING, Dump, DumpedMicroBatch, DumpedRow, group_indices, refusal
from megatron_grpo_referee.tracked import Tracked, value_and_gradients

LOGPROBS = {"float32": 1e-4, "bfloat16": 3e-2}  # mean difference in nats between two forward passes with the same weights
Values = Any  # a sequence: a number, or an array, of each row
Causes = Iterable[tuple[str, Values]]  # (cause, numbers with it), computed lazily
UNKNOWN = "no known cause reproduces it"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Comparison of one quantity.

    Args:
        quantity: Name.
        theirs: Number of the dump, at the largest difference.
        ours: Number of the reference, at the largest difference.
        factor: Least-squares factor from ours to theirs over all numbers; None if ours is 0.
        difference: Largest difference, relative to the rounding limit.
        num_different: Rows that differ by more than rounding.
        num_rows: Rows compared.
        row: Row of the largest difference; -1 for a number of the step.
        cause: Known cause that reproduces it; empty if nothing differs.
    """

    quantity: str
    theirs: float
    ours: float
    factor: float | None
    difference: float
    num_different: int
    num_rows: int
    row: int
    cause: str = ""

    @property
    def is_different(self) -> bool:
        """Whether it differs by more than rounding."""
        return self.num_different > 0


def compare(quantity: str, theirs: Values, ours: Values, limits: Values, causes: Causes, rows: Sequence[int] = (-1,)) -> Finding:
    """Compare a quantity, and name the cause if it differs.

    Args:
        theirs: Numbers of the dump, one or an array per row.
        causes: (cause, numbers with it), tried in order.
        rows: Indices of the rows; -1 for a number of the step.
    """
    away = list(map(_away, theirs, ours, limits))
    worst, num_different = int(np.argmax(away)), sum(one > 1 for one in away)
    their_parts, our_parts = np.atleast_1d(theirs[worst]), np.atleast_1d(ours[worst])
    place = int(np.argmax(np.nan_to_num(np.abs(their_parts - our_parts), nan=np.inf)))
    matching = (cause for cause, values in causes if _agree(theirs, values, limits))
    return Finding(
        quantity=quantity, theirs=float(their_parts[place]), ours=float(our_parts[place]), factor=_factor(theirs, ours),
        difference=away[worst], num_different=num_different, num_rows=len(rows), row=rows[worst],
        cause=next(matching, UNKNOWN) if num_different else "",
    )  # fmt: skip


def _away(theirs: Any, ours: Any, limit: Any) -> float:
    """Return the largest difference relative to its limit; infinity if a number is not finite on one side."""
    with np.errstate(invalid="ignore"):
        away = np.abs(np.atleast_1d(theirs) - np.atleast_1d(ours)) / np.maximum(limit, 1e-300)
    return float(np.nan_to_num(away, nan=np.inf).max(initial=0.0))


def _agree(theirs: Values, ours: Values, limits: Values) -> bool:
    return max(map(_away, theirs, ours, limits)) <= 1


def _factor(theirs: Values, ours: Values) -> float | None:
    flat_theirs, flat_ours = np.hstack(theirs), np.hstack(ours)
    power = float((flat_ours**2).sum())
    return float((flat_theirs * flat_ours).sum()) / power if power else None


def findings(dump: Dump, s: Any) -> list[Finding]:
    """Return the comparisons that the dump allows, in the order of a step.

    Args:
        s: Settings: the names of GrpoConfig, and num_generations, reward_weights, max_completion_length, temperature and weights.
    """
    parts = (_advantages, _logprobs, _old_logprobs, _correction, _tokens, _kl, _loss)
    return [finding for part in parts for finding in part(dump, s)]


def first_different(found: Sequence[Finding]) -> Finding | None:
    """Return the first finding that differs by more than rounding."""
    return next((one for one in found if one.is_different), None)


# ---- advantages, log-probs, correction, tokens, KL ---------------------------------------------------------------------------------------


def _advantages(dump: Dump, s: Any) -> Iterator[Finding]:
    order = sorted((i for i, row in enumerate(dump.rollout) if row.rewards is not None), key=lambda i: dump.rollout[i].position)
    rows = [dump.rollout[i] for i in order]
    if all(row.advantage is None for row in rows) or incomplete_groups(dump, s):
        return
    number = len(rows[0].rewards or ())
    if len(s.reward_weights or rows[0].rewards or ()) != number:
        raise refusal(f"reward_weights ({s.reward_weights}) must have {number} numbers, as the dump has rewards.")
    ours = advantages(rows, s, epsilon=dump.epsilon)
    theirs = [mine if row.advantage is None else row.advantage for row, mine in zip(rows, ours, strict=True)]
    limits = ROUNDING["float32"] * (1 + np.abs(ours))
    for places in group_indices(row.group for row in rows):
        rewards = np.array([rows[i].rewards for i in places], dtype=float)
        sums = np.nansum(rewards, axis=1)
        unit = np.ptp(ours[places]) / np.ptp(sums) if np.ptp(sums) else np.inf  # equal rewards: rounding over epsilon
        limits[places] += 1e-6 * np.nanmax(np.abs(rewards), initial=0.0) * min(unit, 1 / dump.epsilon)
    yield compare("advantages", theirs, ours, limits, advantage_causes(rows, s, dump.epsilon), order)


def incomplete_groups(dump: Dump, s: Any) -> bool:
    """Return whether the dump has only a part of a group, so that advantages cannot be recomputed."""
    return any(len(places) < s.num_generations for places in group_indices(row.group for row in dump.rollout if row.rewards is not None))


def _logprobs(dump: Dump, s: Any) -> Iterator[Finding]:
    order = [i for i, row in enumerate(dump.rows) if row.tokens is not None and row.logp is not None]
    if s.weights is None or not order:
        return
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(s.weights, dtype=torch.float32).eval()
    rows: Any = [dump.rows[i] for i in order]

    @torch.no_grad()
    def values(row: DumpedRow, temperature: float) -> np.ndarray:
        ids, length = torch.as_tensor(np.asarray(row.tokens), dtype=torch.int64), len(row.mask)
        logits = model(ids[None], use_cache=False).logits[0, -length - 1 : -1]
        return reference.token_logprobs(logits, ids[len(ids) - length :], temperature)[0].numpy() * row.mask

    theirs = [np.nan_to_num(row.logp) * row.mask for row in rows]
    temperatures = {f"temperature not applied: they are the log-probs at 1 instead of {s.temperature:g}": 1.0,
                    "temperature applied twice": s.temperature**2, "the temperature is inverted": 1 / s.temperature}  # fmt: skip
    causes = ((cause, [values(row, temperature) for row in rows]) for cause, temperature in temperatures.items())
    ours = [values(row, s.temperature) for row in rows]
    yield compare("log-probs", theirs, ours, [10 * LOGPROBS[dump.dtype]] * len(order), causes, order)


def _old_logprobs(dump: Dump, s: Any) -> Iterator[Finding]:
    """Compare the mean over each row, because single tokens of two forward passes may differ by more than rounding."""
    order = [i for i, row in enumerate(dump.rows) if row.logp is not None and row.old is not None and row.mask.any()]
    if not dump.is_fresh or not order:
        return
    rows: Any = [dump.rows[i] for i in order]

    def means(name: str) -> list[float]:
        """Add |other - current| of each token, so that opposite differences do not cancel."""
        return [np.nan_to_num(row.logp + np.abs(getattr(row, name) - row.logp))[row.mask > 0].mean() for row in rows]

    def causes() -> Causes:
        for name, words in (("sampler", "sampler's"), ("ref", "reference's")):
            if all(getattr(row, name) is not None for row in rows):
                yield f"old log-probs of the wrong version: they are the {words}", means(name)
        yield "old log-probs of the wrong version, or of another temperature", means("old")

    yield compare("old log-probs", means("old"), means("logp"), [LOGPROBS[dump.dtype]] * len(order), causes(), order)


def _correction(dump: Dump, s: Any) -> Iterator[Finding]:
    order = [i for i, row in enumerate(dump.rollout) if row.correction is not None and row.sampler is not None and row.mask.any()]
    mode, low, high = s.rollout_importance_sampling_mode, s.rollout_importance_sampling_min, s.rollout_importance_sampling_threshold
    if not order or mode == "none":
        return
    rows: Any = [dump.rollout[i] for i in order]

    def factors(change: Change) -> list[np.ndarray]:
        made, settings = [change.row(replace(row.completion, correction=None)) for row in rows], changed(s, **change.settings)
        return [reference.rollout_importance(c, settings).value * row.mask for c, row in zip(made, rows, strict=True)]

    unbounded = {"rollout_importance_sampling_threshold": np.inf, "rollout_importance_sampling_min": None}
    causes = [
        Change("the correction for the sampler is applied to the wrong side: sampler over trainer",
               row=lambda c: replace(c, old_logp=c.sampler_logp, sampler_logp=c.old)),
        Change("the correction for the sampler uses the current log-probs instead of the old ones",
               row=lambda c: replace(c, old_logp=None)),
        Change("the correction for the sampler is not bounded", unbounded),
        Change("the lower bound of the correction is not applied", {"rollout_importance_sampling_min": None}),
        Change("the correction is bounded on the wrong side: below by its upper bound",
               unbounded | {"rollout_importance_sampling_min": high}),
        Change(f"the correction of a sequence is the {'product' if s.rollout_is_geometric else 'geometric mean'}",
               {"rollout_is_geometric": not s.rollout_is_geometric}),
        *(Change(f"the correction is {other}", {"rollout_importance_sampling_mode": other}) for other in MODES),
        *factor_changes(s),
    ]  # fmt: skip
    rounding, ours = ROUNDING[dump.dtype], factors(Change())
    bounds = (high, low or np.inf) if mode.endswith("mask") else ()
    limits = [rounding * (1 + o) + _near(rho, bounds, rounding) for o, rho in zip(ours, factors(Change(settings=unbounded)), strict=True)]
    theirs = [row.correction * row.mask for row in rows]
    yield compare("correction", theirs, ours, limits, ((change.cause, factors(change)) for change in causes), order)


def _near(numbers: np.ndarray, bounds: Sequence[float], rounding: float) -> np.ndarray:
    """Return infinity for numbers so close to a bound that rounding decides on which side they are, else 0."""
    return np.where(np.any([np.abs(numbers - bound) < rounding for bound in bounds], axis=0), np.inf, 0.0)


def _tokens(dump: Dump, s: Any) -> Iterator[Finding]:
    if dump.num_tokens is None or not dump.rows:
        return
    ours = sum(0.0 if s.overlong_filter and row.is_truncated else row.mask.sum() for row in dump.rows)
    causes = {
        "truncated rows kept: overlong_filter is not applied": sum(row.mask.sum() for row in dump.rows),
        "masked tokens counted": sum(row.length for row in dump.rows),
        "padding counted": sum(dump.micro_batches[row.micro_batch].width for row in dump.rows),
        "the tokens of one rank only": ours / dump.ranks,
    }
    yield compare("tokens in the mean", [dump.num_tokens], [ours], [0.5], ((cause, [count]) for cause, count in causes.items()))


def _kl(dump: Dump, s: Any) -> Iterator[Finding]:
    """Compare the logged KL, a mean over the tokens of all micro-batches."""
    rows = [row for row in dump.rows if row.logp is not None and row.ref is not None and row.mask.any()]
    if not rows or not s.beta or not dump.micro_batches or any(micro.kl is None for micro in dump.micro_batches):
        return

    def mean(change: Change, of: Callable[[Any], Any] = np.asarray) -> float:
        settings, formula, total = changed(s, **change.settings), change.kl or dump.kl, 0.0
        for row in rows:
            c = change.row(row.completion)
            total += (of(formula(c, reference.ratio(c, settings), settings).value) * row.mask).sum()
        return total / sum(row.mask.sum() for row in rows)

    theirs = np.average([dump.micro_batches[row.micro_batch].kl or 0.0 for row in rows], weights=[row.mask.sum() for row in rows])
    # k3 subtracts numbers close to 1
    limit = ROUNDING[dump.dtype] * mean(Change(), np.abs) + (1e-6 if dump.dtype == "float32" else 1e-2)
    causes = ((change.cause, [mean(change)]) for change in changes(dump, s) if "KL" in change.cause)
    yield compare("kl", [theirs], [mean(Change())], [limit], causes)


# ---- loss and gradient -------------------------------------------------------------------------------------------------------------------


def evaluate(dump: Dump, s: Any, change: Change = Change()) -> list[Any]:  # noqa: B008 - frozen
    """Return the loss of the step (mean over rows of the micro-batch losses) and the gradient of each row."""
    s, loss, gradients = changed(s, **change.settings), 0.0, [np.zeros_like(row.mask) for row in dump.rows]
    for number, (micro, share) in enumerate(zip(dump.micro_batches, dump.shares, strict=True)):
        kept = [i for i, row in enumerate(dump.rows) if row.micro_batch == number and not change.drops(row)]
        rows = [dump.rows[i] for i in kept]
        logps = [row.completion.logp.array for row in rows]
        results = (value_and_gradients(partial(_micro_batch_loss, dump, rows, micro, s, change, mask), logps)
                   for mask in _entropy_masks(dump, s))  # fmt: skip
        value, found = min(results, key=partial(_distance, rows, micro))
        loss += change.factor * share * value
        for i, gradient in zip(kept, found, strict=True):
            gradients[i] = change.factor * share * gradient
    return [loss, *gradients]


def _distance(rows: Sequence[DumpedRow], micro: DumpedMicroBatch, found: tuple[float, list[np.ndarray]]) -> float:
    """Return the difference between a micro-batch's gradients and the dump's, or between its losses if there are no gradients."""
    if any(row.gradient is None for row in rows):
        return abs(found[0] - (micro.loss or 0.0))
    return sum(float(np.abs(ours - micro.scale * np.asarray(row.gradient)).sum()) for row, ours in zip(rows, found[1], strict=True))


def _entropy_masks(dump: Dump, s: Any) -> list[Callable[..., Any]]:
    """Return the possible masks of `top_entropy_quantile`, because rounding decides on tokens whose entropy is the quantile."""
    if dump.is_native or s.top_entropy_quantile >= 1:
        return [reference.entropy_kept]

    def kept(offset: int, batch: Any, s: Any) -> Any:
        entropies = np.sort(np.concatenate([c.entropy.value[m.value > 0] for c, m in batch]))
        if not len(entropies):
            return [m for _, m in batch]
        lowest = int(np.ceil((len(entropies) - 1) * (1 - s.top_entropy_quantile) - 1e-9))
        other = min(max(lowest + offset, 0), len(entropies) - 1)
        threshold, last = np.quantile(entropies, 1 - s.top_entropy_quantile), entropies[max(other - (offset > 0), 0)]
        lowest = other if abs(last - threshold) <= 1e-5 * (1 + threshold) else lowest
        return [(c.entropy.detach() >= entropies[lowest]).double() for c, _ in batch]

    return [partial(kept, offset) for offset in range(-3, 5)]


def _micro_batch_loss(dump: Dump, rows: Sequence[DumpedRow], micro: DumpedMicroBatch, s: Any, change: Change,
                      kept: Callable[..., Any], logps: Sequence[Tracked]) -> Any:  # fmt: skip
    counted = [row for row in rows if not (s.exclude_zero_std_groups and row.is_zero_std)]
    batch = [change.row(replace(row.completion, logp=logp)) for row, logp in zip(rows, logps, strict=True)]
    weights = partial(change.weights, micro=micro, rows=counted)
    formulas = reference.Formulas(weights=weights, objective=change.objective, kl=change.kl or dump.kl, entropy_kept=kept)
    return reference.grpo_loss(batch, s, s.max_completion_length, formulas)


def _loss(dump: Dump, s: Any) -> Iterator[Finding]:
    """Compare loss and gradient; a cause must reproduce both."""
    if not dump.micro_batches or not dump.rows or any(row.logp is None for row in dump.rows):
        return
    rounding, ours = ROUNDING[dump.dtype], evaluate(dump, s)
    has_loss, has_gradient = all(m.loss is not None for m in dump.micro_batches), all(row.gradient is not None for row in dump.rows)
    size = evaluate(dump, s, Change(objective=_size(reference.objective), kl=_size(dump.kl)))[0]
    largest = max(np.abs(gradient).max(initial=0.0) for gradient in ours[1:])
    # missing numbers are unknown
    limits = [rounding * (abs(size) + abs(ours[0])) + 1e-12 if has_loss else np.inf]
    limits += [rounding * largest + 1e-12 + _ties(row, s, rounding) if has_gradient else np.inf for row in dump.rows]
    scales = [share * micro.scale for share, micro in zip(dump.shares, dump.micro_batches, strict=True)]
    theirs: list[Any] = [sum(share * (micro.loss or 0.0) for share, micro in zip(dump.shares, dump.micro_batches, strict=True))]
    theirs += [0.0 if row.gradient is None else row.gradient * scales[row.micro_batch] for row in dump.rows]

    @cache
    def cause() -> str:
        known = (change.cause for change in changes(dump, s) if _agree(theirs, evaluate(dump, s, change), limits))
        return next(known, None) or (_scaled(theirs[1:], ours[1:], limits[1:]) if has_gradient else UNKNOWN)

    def causes(found: Values) -> Causes:
        yield cause(), found

    if has_loss:
        yield compare("loss", theirs[:1], ours[:1], limits[:1], causes(theirs[:1]))
    if has_gradient:
        yield compare("gradient", theirs[1:], ours[1:], limits[1:], causes(theirs[1:]), range(len(dump.rows)))


def _scaled(theirs: Values, ours: Values, limits: Values) -> str:
    """Describe a common factor of all gradients, if there is one."""
    if _agree(theirs, ours, limits):
        return "no known cause: the gradients agree, so that it is a term without a gradient by the log-probs (an entropy bonus)"
    factor = _factor(theirs, ours)
    if factor and _agree(theirs, [factor * one for one in ours], limits):
        return f"no known cause: every gradient is multiplied by {factor:.5g}"
    return UNKNOWN


def _size(formula: Callable[..., Any]) -> Callable[..., Any]:
    return lambda c, r, s: Tracked(np.abs(formula(c, r, s).value))


def _ties(row: DumpedRow, s: Any, rounding: float) -> np.ndarray:
    """Return infinity for tokens whose ratio is so close to a bound that rounding decides whether it is clipped."""
    if row.old is None:
        return np.zeros_like(row.mask)
    high = reference.epsilon_high(s)
    bounds = [1 - s.epsilon, 1 + high, high if s.loss_type == "cispo" else np.inf, s.delta or np.inf]
    return _near(reference.ratio(row.completion, s).value, bounds, rounding)
