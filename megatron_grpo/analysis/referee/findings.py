"""Compares each number of a dump with the reference, in the order in which a step computes them.

Each number is recomputed from what the dump says of the numbers before it, so that a difference appears where it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from megatron_grpo.analysis.referee import reference
from megatron_grpo.analysis.referee.causes import MODES, Change, advantage_changes, changes
from megatron_grpo.analysis.referee.dump import ROUNDING, Dump, DumpedMicroBatch, DumpedRow, refusal
from megatron_grpo.analysis.referee.reference import Formulas, ReferenceCompletion
from megatron_grpo.analysis.referee.tracked import Tracked, value_and_gradients

LOGPROBS = {"float32": 1e-4, "bfloat16": 3e-2}  # nats: mean difference of two forwards of the same weights
Values = Sequence[np.ndarray]
Variants = list[tuple[str, Callable[[], Values]]]  # (cause, numbers with it)
UNKNOWN = "no known cause reproduces it"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Comparison of one quantity.

    Args:
        quantity: Name.
        theirs: Number of the dump, at the place of the largest difference.
        ours: Number of the reference, at that place.
        factor: Least-squares factor from ours to theirs over all places; None if ours is 0.
        difference: Largest difference, in units of what rounding explains.
        num_different: Rows in which it differs by more than rounding.
        num_rows: Rows compared.
        row: Row of the largest difference; -1 for a number of the step.
        cause: Known cause that reproduces it; empty where nothing differs.
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


def compare(quantity: str, theirs: Values, ours: Values, limits: Values, rows: Sequence[int],
            variants: Iterable[tuple[str, Callable[[], Values]]] = ()) -> Finding:  # fmt: skip
    """Compare a quantity, and name the cause if it differs.

    Args:
        quantity: Name.
        theirs: Numbers of the dump, one array per row.
        ours: Numbers of the reference.
        limits: Differences that rounding explains.
        rows: Indices of the rows.
        variants: (cause, numbers with it), tried in order.
    """
    away = [_away(t, o, limit) for t, o, limit in zip(theirs, ours, limits, strict=True)]
    worst = int(np.argmax(away)) if away else 0
    flat_theirs, flat_ours = np.concatenate([np.atleast_1d(t) for t in theirs]), np.concatenate([np.atleast_1d(o) for o in ours])
    power = float((flat_ours**2).sum())
    place = int(np.argmax(np.nan_to_num(np.abs(np.atleast_1d(theirs[worst]) - np.atleast_1d(ours[worst])), nan=np.inf)))
    num_different = sum(one > 1 for one in away)
    cause = ""
    if num_different:
        matching = (name for name, values in variants if max(map(_away, theirs, values(), limits)) <= 1)
        cause = next(matching, UNKNOWN)
    return Finding(
        quantity=quantity, theirs=float(np.atleast_1d(theirs[worst])[place]), ours=float(np.atleast_1d(ours[worst])[place]),
        factor=float((flat_theirs * flat_ours).sum()) / power if power else None, difference=away[worst], num_different=num_different,
        num_rows=len(rows), row=rows[worst], cause=cause,
    )  # fmt: skip


def _away(theirs: np.ndarray, ours: np.ndarray, limit: Any) -> float:
    """Return the largest difference in units of its limit; infinite where a number is not finite on one side."""
    with np.errstate(invalid="ignore"):
        away = np.abs(np.atleast_1d(theirs) - np.atleast_1d(ours)) / np.maximum(limit, 1e-300)
    return float(np.nan_to_num(away, nan=np.inf).max(initial=0.0))


def findings(dump: Dump, s: Any) -> list[Finding]:
    """Return the comparisons that the dump allows, in the order of a step.

    Args:
        dump: The dump.
        s: Settings: the names of GrpoConfig, and num_generations, reward_weights, max_completion_length, temperature and weights.
    """
    parts = (_advantages, _logprobs, _old_logprobs, _correction, _tokens, _kl, _loss)
    return [finding for part in parts for finding in part(dump, s)]


# ---- advantages --------------------------------------------------------------------------------------------------------------------------


def advantages(rows: Sequence[DumpedRow], s: Any, *, epsilon: float, groups: Sequence[Any] | None = None, weights: Sequence[float] = (),
               deviation: Callable[[Sequence[float]], float] = reference.std, is_centred: bool = True,
               missing: float | None = None) -> np.ndarray:  # fmt: skip
    """Return the advantages of rows, [rows].

    Args:
        rows: Rows with rewards.
        s: Settings.
        epsilon: Number added to a standard deviation.
        groups: Group of each row; the rows' own without.
        weights: Weights of the reward functions; those of the settings without.
        deviation: Standard deviation of some rewards.
        is_centred: Whether the group's mean is subtracted.
        missing: Number for a missing reward.
    """
    keys = [row.group for row in rows] if groups is None else groups
    places: dict[Any, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    rewards = [[[missing if r is None else r for r in rows[i].rewards or ()] for i in group] for group in places.values()]
    weights = weights or s.reward_weights or [1.0] * len(rewards[0][0])
    penalty = None
    if s.kl_in_reward and s.beta:
        completions = [[_completion(rows[i]) for i in group] for group in places.values()]
        penalty = [reference.kl_penalty(group, s.beta) for group in completions]
    values = reference.advantages(rewards, weights, s, penalty, epsilon=epsilon, deviation=deviation)
    found = np.zeros(len(rows))
    for group, mine, given in zip(places.values(), values, rewards, strict=True):
        totals = [reference.total(row, weights) or 0.0 for row in given]
        scale = deviation(totals) + epsilon if s.scale_rewards == "group" else 1.0
        found[group] = mine if is_centred else [t / scale for t in totals]
    return found


def _advantages(dump: Dump, s: Any) -> Iterator[Finding]:
    order = sorted((i for i, row in enumerate(dump.rollout) if row.rewards is not None), key=lambda i: dump.rollout[i].position)
    rows = [dump.rollout[i] for i in order]
    if all(row.advantage is None for row in rows) or incomplete_groups(dump, s):
        return
    if len(s.reward_weights or rows[0].rewards or ()) != len(rows[0].rewards or ()):
        raise refusal(f"reward_weights ({s.reward_weights}) must have {len(rows[0].rewards or ())} numbers, as the dump has rewards.")
    ours = advantages(rows, s, epsilon=dump.epsilon)
    theirs = np.array([mine if row.advantage is None else row.advantage for row, mine in zip(rows, ours, strict=True)])
    limits = np.zeros(len(rows))
    for group in dict.fromkeys(row.group for row in rows):
        places = [i for i, row in enumerate(rows) if row.group == group]
        size = max((abs(r) for i in places for r in rows[i].rewards or () if r is not None), default=0.0)
        sums = [sum(r or 0.0 for r in rows[i].rewards or ()) for i in places]
        unit = np.ptp(ours[places]) / np.ptp(sums) if np.ptp(sums) else 1 / dump.epsilon  # equal rewards: rounding over epsilon
        limits[places] = ROUNDING["float32"] * (1 + np.abs(ours[places])) + 1e-6 * size * min(unit, 1 / dump.epsilon)
    variants: Variants = [
        (cause, partial(_scored, rows, {"s": s, "epsilon": dump.epsilon} | changed))
        for cause, changed in advantage_changes(rows, s, dump.epsilon)
    ]
    whitened = (ours - ours.mean()) / (ours.std(ddof=1) + 1e-8)
    variants.append(("the sign of the advantages is flipped", partial(_each, -ours)))
    others = s.num_generations / max(s.num_generations - 1, 1)
    variants.append(("leave-one-out baseline, divided by a standard deviation too", partial(_each, ours * others)))
    variants.append(("the advantages are whitened over the batch once more", partial(_each, whitened)))
    yield compare("advantages", _each(theirs), _each(ours), _each(limits), order, variants)


def _scored(rows: Sequence[DumpedRow], changed: dict[str, Any]) -> list[np.ndarray]:
    return _each(advantages(rows, **changed))


def _each(values: np.ndarray) -> list[np.ndarray]:
    return [np.asarray(value) for value in values]


def incomplete_groups(dump: Dump, s: Any) -> bool:
    """Return whether the dump contains a part of a group only, so that its advantages cannot be recomputed.

    Args:
        dump: The dumped step.
        s: Settings of the run.
    """
    groups = [row.group for row in dump.rollout if row.rewards is not None]
    return any(groups.count(group) < s.num_generations for group in set(groups))


# ---- log-probs, correction, tokens, KL ---------------------------------------------------------------------------------------------------


def _logprobs(dump: Dump, s: Any) -> Iterator[Finding]:
    order = [i for i, row in enumerate(dump.rows) if row.tokens is not None and row.logp is not None]
    if s.weights is None or not order:
        return
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(s.weights, dtype=torch.float32).eval()

    def values(temperature: float) -> list[np.ndarray]:
        found = []
        for row in (dump.rows[i] for i in order):
            ids, length = torch.as_tensor(np.asarray(row.tokens), dtype=torch.int64), len(row.mask)
            with torch.no_grad():
                logits = model(ids[None], use_cache=False).logits[0, -length - 1 : -1]
            found.append(reference.token_logprobs(logits, ids[-length:], temperature)[0].numpy() * row.mask)
        return found

    theirs = [np.nan_to_num(np.asarray(dump.rows[i].logp)) * dump.rows[i].mask for i in order]
    limits = [np.asarray(10 * LOGPROBS[dump.dtype])] * len(order)
    variants: Variants = [(f"temperature not applied: they are the log-probs at 1 instead of {s.temperature:g}", partial(values, 1.0)),
                          ("temperature applied twice", partial(values, s.temperature**2)),
                          ("the temperature is inverted", partial(values, 1 / s.temperature))]  # fmt: skip
    yield compare("log-probs", theirs, values(s.temperature), limits, order, variants)


def _old_logprobs(dump: Dump, s: Any) -> Iterator[Finding]:
    """The mean over a row: single tokens of two forwards may differ by more."""
    order = [i for i, row in enumerate(dump.rows) if row.logp is not None and row.old is not None and row.mask.any()]
    if not dump.is_fresh or not order:
        return

    def means(name: str) -> list[np.ndarray]:
        """Add |other - current| of each token, so that opposite differences do not cancel."""
        rows: Any = [dump.rows[i] for i in order]
        return [np.nan_to_num(row.logp + np.abs(getattr(row, name) - row.logp))[row.mask > 0].mean() for row in rows]

    theirs, limits = means("old"), [np.asarray(LOGPROBS[dump.dtype])] * len(order)
    variants: Variants = [
        (f"old log-probs of the wrong version: they are the {words}", partial(means, name))
        for name, words in (("sampler", "sampler's"), ("ref", "reference's"))
        if all(getattr(dump.rows[i], name) is not None for i in order)
    ]
    variants.append(("old log-probs of the wrong version, or of another temperature", lambda: theirs))
    yield compare("old log-probs", theirs, means("logp"), limits, order, variants)


def _correction(dump: Dump, s: Any) -> Iterator[Finding]:
    order = [i for i, row in enumerate(dump.rollout) if row.correction is not None and row.sampler is not None and row.mask.any()]
    if not order or s.rollout_importance_sampling_mode == "none":
        return

    def factors(change: Change = Change(), power: float = 1.0) -> list[np.ndarray]:  # noqa: B008 - frozen
        settings = change.apply(s)
        made = [change.row(replace(_completion(dump.rollout[i]), correction=None), dump.rollout[i]) for i in order]
        return [reference.rollout_importance(c, settings).value ** power * dump.rollout[i].mask for c, i in zip(made, order, strict=True)]

    theirs = [dump.rollout[i].correction * dump.rollout[i].mask for i in order]
    ours = factors()
    bounds_off = {"rollout_importance_sampling_threshold": np.inf, "rollout_importance_sampling_min": None}
    unbounded = Change("the correction for the sampler is not bounded", bounds_off)
    rounding, is_mask = ROUNDING[dump.dtype], s.rollout_importance_sampling_mode.endswith("mask")
    bounds = [s.rollout_importance_sampling_threshold, s.rollout_importance_sampling_min or np.inf] if is_mask else []
    limits = [
        sum((_near(np.abs(rho - bound), rounding) for bound in bounds), rounding * (1 + o))
        for o, rho in zip(ours, factors(unbounded), strict=True)
    ]
    changed = [
        Change("the correction for the sampler is applied to the wrong side: sampler over trainer",
               row=lambda c, row: replace(c, old_logp=c.sampler_logp, sampler_logp=c.old)),
        Change("the correction for the sampler uses the current log-probs instead of the old ones",
               row=lambda c, row: replace(c, old_logp=None)),
        unbounded,
        Change("the lower bound of the correction is not applied", {"rollout_importance_sampling_min": None}),
        Change("the correction is bounded on the wrong side: below by its upper bound",
               bounds_off | {"rollout_importance_sampling_min": s.rollout_importance_sampling_threshold}),
        Change(f"the correction of a sequence is the {'product' if s.rollout_is_geometric else 'geometric mean'}",
               {"rollout_is_geometric": not s.rollout_is_geometric}),
        *(Change(f"the correction is {mode}", {"rollout_importance_sampling_mode": mode}) for mode in MODES),
    ]  # fmt: skip
    variants: Variants = [("the correction for the sampler is applied twice", partial(factors, power=2.0)),
                          ("the correction for the sampler is not applied", partial(factors, power=0.0)),
                          *((change.cause, partial(factors, change)) for change in changed)]  # fmt: skip
    yield compare("correction", theirs, ours, limits, order, variants)


def _near(distance: np.ndarray, bound: float) -> np.ndarray:
    """Return infinity where a number is so close to a bound that rounding decides on which side it is."""
    return np.where(distance < bound, np.inf, 0.0)


def _tokens(dump: Dump, s: Any) -> Iterator[Finding]:
    if dump.num_tokens is None or not dump.rows:
        return
    masks = [0.0 if s.overlong_filter and row.is_truncated else row.mask.sum() for row in dump.rows]
    counts = {
        "truncated rows kept: overlong_filter is not applied": sum(row.mask.sum() for row in dump.rows),
        "masked tokens counted": sum(row.length for row in dump.rows),
        "padding counted": sum(dump.micro_batches[row.micro_batch].width for row in dump.rows),
        "the tokens of one rank only": sum(masks) / dump.ranks,
    }
    one = [np.asarray(0.5)]
    variants: Variants = [(cause, partial(_each, np.array([count]))) for cause, count in counts.items()]
    yield compare("tokens in the mean", [np.asarray(dump.num_tokens)], [np.asarray(sum(masks))], one, [-1], variants)


def _kl(dump: Dump, s: Any) -> Iterator[Finding]:
    """The logged KL, a mean over the tokens of all micro-batches."""
    if any(micro.kl is None for micro in dump.micro_batches) or not dump.micro_batches or not s.beta:
        return
    rows = [row for row in dump.rows if row.logp is not None and row.ref is not None and row.mask.any()]
    tokens = [sum(row.mask.sum() for row in rows if row.micro_batch == i) for i in range(len(dump.micro_batches))]
    if not rows:
        return

    def mean(change: Change = Change(), is_size: bool = False) -> list[np.ndarray]:  # noqa: B008 - frozen
        settings, formula = change.apply(s), change.formulas.get("kl", dump.kl)
        total = 0.0
        for row in rows:
            c = change.row(_completion(row), row)
            value = formula(c, reference.ratio(c, settings), settings).value * row.mask
            total += float(np.abs(value).sum() if is_size else value.sum())
        return [np.asarray(total / sum(tokens))]

    theirs = [np.asarray(sum((micro.kl or 0.0) * n for micro, n in zip(dump.micro_batches, tokens, strict=True)) / sum(tokens))]
    # k3 subtracts numbers of the size of 1
    limits = [np.asarray(ROUNDING[dump.dtype] * float(mean(is_size=True)[0]) + (1e-6 if dump.dtype == "float32" else 1e-2))]
    variants: Variants = [(change.cause, partial(mean, change)) for change in changes(dump, s) if "KL" in change.cause]
    yield compare("kl", theirs, mean(), limits, [-1], variants)


# ---- loss and gradient -------------------------------------------------------------------------------------------------------------------


@dataclass
class Evaluated:
    """Loss of a step, and its derivative by each log-prob of each row."""

    loss: float
    gradients: list[np.ndarray]


def _completion(row: DumpedRow) -> ReferenceCompletion:
    def array(values: np.ndarray | None, missing: float = 0.0) -> Tracked:
        full = np.full_like(row.mask, missing) if values is None else values
        return Tracked(full if np.isnan(missing) else np.where(row.mask > 0, np.nan_to_num(full, nan=missing), np.nan_to_num(full)))

    nan = float("nan")
    return ReferenceCompletion(
        mask=Tracked(row.mask), logp=array(row.logp if row.logp is not None else row.old), entropy=array(row.entropy),
        sampler_logp=array(row.sampler, nan), ref_logp=array(row.ref),
        old_logp=None if row.old is None else array(row.old), advantage=row.advantage or 0.0, is_truncated=row.is_truncated,
        is_zero_std=row.is_zero_std, group=row.group, correction=None if row.correction is None else array(row.correction),
    )  # fmt: skip


def evaluate(dump: Dump, s: Any, change: Change = Change()) -> Evaluated:  # noqa: B008 - frozen
    """Return loss and gradients of the step: the mean over rows of the losses of its micro-batches.

    Args:
        dump: The dump.
        s: Settings.
        change: Difference from the reference.
    """
    s, loss, gradients = change.apply(s), 0.0, [np.zeros_like(row.mask) for row in dump.rows]
    for number, micro in enumerate(dump.micro_batches):
        mine = [i for i, row in enumerate(dump.rows) if row.micro_batch == number]
        kept = [i for i in mine if not change.drops(dump.rows[i])]
        rows, share = [dump.rows[i] for i in kept], change.factor * len(mine) / len(dump.rows)
        logps = [_completion(row).logp.array for row in rows]
        results = (value_and_gradients(partial(_micro_batch_loss, dump, rows, micro, s, change, mask), logps)
                   for mask in _entropy_masks(dump, s))  # fmt: skip
        value, found = min(results, key=partial(_distance, rows, micro))
        loss += share * value
        for i, gradient in zip(kept, found, strict=True):
            gradients[i] = share * gradient
    return Evaluated(loss, gradients)


def _distance(rows: Sequence[DumpedRow], micro: DumpedMicroBatch, found: tuple[float, list[np.ndarray]]) -> float:
    """Return the distance of a micro-batch's gradients from the dump's, or of its loss without gradients."""
    if any(row.gradient is None for row in rows):
        return abs(found[0] - (micro.loss or 0.0))
    return sum(float(np.abs(ours - micro.scale * np.asarray(row.gradient)).sum()) for row, ours in zip(rows, found[1], strict=True))


def _entropy_masks(dump: Dump, s: Any) -> list[Callable[..., Any]]:
    """Return masks of `top_entropy_quantile`: rounding decides on tokens whose entropy is the quantile, so that each is tried."""
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
    batch = [change.row(replace(_completion(row), logp=logp), row) for row, logp in zip(rows, logps, strict=True)]
    formulas = Formulas(weights=lambda batch, s, longest: change.weights(batch, s, longest, micro, counted),
                        **{"kl": dump.kl, "entropy_kept": kept, **change.formulas})  # fmt: skip
    return reference.grpo_loss(batch, s, s.max_completion_length, formulas)


def _loss(dump: Dump, s: Any) -> Iterator[Finding]:
    """Loss and gradient. A cause has to reproduce both."""
    if not dump.micro_batches or not dump.rows or any(row.logp is None for row in dump.rows):
        return
    ours, order = evaluate(dump, s), range(len(dump.rows))
    share = [len([row for row in dump.rows if row.micro_batch == n]) / len(dump.rows) for n in range(len(dump.micro_batches))]
    has_loss = all(micro.loss is not None for micro in dump.micro_batches)
    has_gradient = all(row.gradient is not None for row in dump.rows)
    loss = sum(part * (micro.loss or 0.0) for part, micro in zip(share, dump.micro_batches, strict=True))
    size = evaluate(dump, s, Change(formulas={"objective": _size(reference.objective), "kl": _size(dump.kl)})).loss
    rounding = ROUNDING[dump.dtype]
    limit = [np.asarray(rounding * (abs(size) + abs(ours.loss)) + 1e-12)]
    scales = [share[row.micro_batch] * dump.micro_batches[row.micro_batch].scale for row in dump.rows]
    theirs = [np.asarray(row.gradient) * scale for row, scale in zip(dump.rows, scales, strict=True)] if has_gradient else []
    largest = max((np.abs(g).max(initial=0.0) for g in ours.gradients), default=0.0)
    limits = [rounding * largest + 1e-12 + _ties(row, s, rounding) for row in dump.rows]
    found, names = [np.asarray(loss)], list[str]()

    def reproduced(change: Change) -> bool:
        other = evaluate(dump, s, change)
        of_loss = not has_loss or _away(found[0], np.asarray(other.loss), limit[0]) <= 1
        return of_loss and (not has_gradient or max(map(_away, theirs, other.gradients, limits)) <= 1)

    def causes(found: Values) -> Iterator[tuple[str, Callable[[], Values]]]:
        """Yield the cause of both, which is looked for once."""
        if not names:
            known = (change.cause for change in changes(dump, s) if reproduced(change))
            names.append(next(known, None) or _scaled(theirs, ours, limits))
        yield names[0], lambda: found

    if has_loss:
        yield compare("loss", found, [np.asarray(ours.loss)], limit, [-1], causes(found))
    if has_gradient:
        yield compare("gradient", theirs, ours.gradients, limits, list(order), causes(theirs))


def _scaled(theirs: Values, ours: Evaluated, limits: Values) -> str:
    """Describe a common factor of all gradients, if there is one."""
    power = sum(float((o**2).sum()) for o in ours.gradients)
    factor = sum(float((t * o).sum()) for t, o in zip(theirs, ours.gradients)) / power if power and theirs else 0.0
    if theirs and max(map(_away, theirs, ours.gradients, limits)) <= 1:
        return "no known cause: the gradients agree, so that it is a term without a gradient by the log-probs (an entropy bonus)"
    if factor and max(_away(t, factor * o, limit) for t, o, limit in zip(theirs, ours.gradients, limits, strict=True)) <= 1:
        return f"no known cause: every gradient is multiplied by {factor:.5g}"
    return UNKNOWN


def _size(formula: Callable[..., Any]) -> Callable[..., Any]:
    return lambda c, r, s: Tracked(np.abs(formula(c, r, s).value))


def _ties(row: DumpedRow, s: Any, rounding: float) -> np.ndarray:
    """Return infinity for tokens whose ratio is so close to a bound that rounding decides whether it is clipped."""
    if row.old is None or row.logp is None:
        return np.zeros_like(row.mask)
    ratio = reference.ratio(_completion(row), s).value
    high = s.epsilon if s.epsilon_high is None else s.epsilon_high
    bounds = [1 - s.epsilon, 1 + high, high if s.loss_type == "cispo" else np.inf, s.delta or np.inf]
    return sum((_near(np.abs(ratio - bound), rounding) for bound in bounds), np.zeros_like(row.mask))
