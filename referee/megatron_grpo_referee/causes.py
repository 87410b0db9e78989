"""Known causes of differences. Each changes one thing in the reference, and is named if it reproduces a differing number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_grpo_referee import reference
from megatron_grpo_referee.dump import Dump, DumpedMicroBatch, DumpedRow, group_indices
from megatron_grpo_referee.reference import Counted, ReferenceCompletion

TOKEN_MEANS = ("dapo", "bnpo", "cispo", "vespo", "fipo")
ROW_MEANS = ("grpo", "sapo")
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LEVELS = {"token": "of each token", "sequence": "of the sequence", "sequence_token": "of the sequence, with the gradient of each token"}
Weights = Callable[..., list[Any]]  # arguments and result as `rule`


def changed(s: Any, **values: Any) -> SimpleNamespace:
    """Return settings with other values."""
    return SimpleNamespace(**vars(s) | values)


def rule(batch: Counted, s: Any, longest: int, micro: DumpedMicroBatch, rows: Sequence[DumpedRow]) -> list[Any]:
    """Return the token weights as the system defines them: a mean over tokens divides by the system's count, `bnpo` by its own."""
    if s.loss_type in TOKEN_MEANS and s.loss_type != "bnpo" and micro.tokens:
        return [m / micro.tokens for _, m in batch]
    return reference.token_weights(batch, s, longest)


@dataclass(frozen=True)
class Change:
    """Change of the reference that represents one possible cause.

    Args:
        cause: Sentence that names it.
        settings: Settings that differ.
        row: Function that changes a completion.
        objective: Function that returns the loss of each token.
        kl: Function that returns the KL estimate; None: that of the system.
        weights: Function that returns token weights.
        factor: Factor of loss and gradients.
        drops: Function that returns whether a row is left out.
    """

    cause: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    _: KW_ONLY
    row: Callable[[ReferenceCompletion], ReferenceCompletion] = lambda completion: completion
    objective: Callable[..., Any] = reference.objective
    kl: Callable[..., Any] | None = None
    weights: Weights = rule
    factor: float = 1.0
    drops: Callable[[DumpedRow], bool] = lambda row: False


# ---- token weights -----------------------------------------------------------------------------------------------------------------------


def _as(loss_type: str) -> Weights:
    return lambda batch, s, longest, **of: rule(batch, changed(s, loss_type=loss_type), longest, **of)


def _own_tokens(batch: Counted, s: Any, longest: int, **of: Any) -> list[Any]:
    return reference.token_weights(batch, s, longest)


def _explain_width(batch: Counted, s: Any, longest: int, micro: DumpedMicroBatch, **of: Any) -> list[Any]:
    return rule(batch, s, micro.width or longest, micro, **of)


def _divided_by(dump: Dump, count: Callable[[DumpedRow, DumpedMicroBatch], float]) -> Weights:
    """Return token weights with another length: the row's own in a mean over rows, else that of all rows."""
    total = sum(count(row, dump.micro_batches[row.micro_batch]) for row in dump.rows)
    factor = total / max(sum(row.mask.sum() for row in dump.rows), 1.0)

    def weights(batch: Counted, s: Any, longest: int, micro: DumpedMicroBatch, rows: Sequence[DumpedRow]) -> list[Any]:
        counts = [max(count(row, micro), 1.0) for row in rows]
        if s.loss_type in ROW_MEANS:
            return [m / (len(batch) * n) for (_, m), n in zip(batch, counts, strict=True)]
        return [m / (micro.tokens * factor if micro.tokens else sum(counts)) for _, m in batch]

    return weights


WEIGHTS = {  # loss_type -> loss types with the same weights, cause
    "grpo": (ROW_MEANS, "length bias: each completion is divided by its own length"),
    "dapo": (TOKEN_MEANS, "a mean over all tokens, instead of a mean over completions"),
    "bnpo": (TOKEN_MEANS, "a mean over the tokens of each micro-batch, instead of a mean over completions"),
    "dr_grpo": (("dr_grpo",), "a sum over tokens divided by max_completion_length"),
    "sequence_sum": (("sequence_sum", "luspo"), "a sum over the tokens of each completion, divided by no length"),
}
MASKS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "the mask is shifted by one token: it begins one token later": lambda mask: np.append(0.0, mask[:-1]),
    "the mask is shifted by one token: it begins one token earlier": lambda mask: np.append(mask[1:], 0.0),
    "the first token of each completion is left out": lambda mask: mask * (mask.cumsum() > 1),
    "the last token, the end of the text, of each completion is left out": lambda mask: mask * (mask[::-1].cumsum()[::-1] > 1),
    "masked tokens trained and counted": np.ones_like,
}


def _masked(mask: Callable[[np.ndarray], Any]) -> Callable[[ReferenceCompletion], ReferenceCompletion]:
    return lambda c: replace(c, mask=c.mask.new_tensor(mask(c.mask.value)))


def weight_changes(dump: Dump, s: Any) -> Iterator[Change]:
    """Yield causes in the token weights and in the choice of counted rows."""
    yield Change("truncated rows kept: overlong_filter is not applied", {"overlong_filter": False})
    yield Change("truncated rows left out, although overlong_filter is off", {"overlong_filter": True})
    yield Change("mean of micro-batch means: each micro-batch is divided by its own tokens", weights=_own_tokens)
    yield Change("masked tokens counted in the mean", weights=_divided_by(dump, lambda row, micro: row.length))
    yield Change("divided by the padded length instead of max_completion_length", weights=_explain_width)
    yield Change("padding in the mean", weights=_divided_by(dump, lambda row, micro: micro.width or row.length))
    for cause, mask in MASKS.items():
        yield Change(cause, row=_masked(mask), weights=_own_tokens)
    yield Change("masked tokens trained", row=_masked(np.ones_like), weights=_divided_by(dump, lambda row, micro: row.mask.sum()))
    for loss_type, (same, cause) in WEIGHTS.items():
        if s.loss_type not in same:
            yield Change(cause, weights=_as(loss_type))
    yield Change("rows without a trained token left out of the mean", drops=lambda row: not row.mask.any())
    yield Change("groups with equal rewards kept in the mean", {"exclude_zero_std_groups": False})
    if not s.exclude_zero_std_groups:
        yield Change("groups with equal rewards left out of the mean", drops=lambda row: row.is_zero_std or row.advantage == 0)


def scale_changes(dump: Dump, s: Any) -> Iterator[Change]:
    """Yield causes that scale loss and gradients."""
    micro_batches = len(dump.micro_batches) / dump.ranks
    for count, words in ((micro_batches, "the number of micro-batches"), (dump.ranks, "the number of ranks")):
        if count > 1:
            yield Change(f"not divided by {words}", factor=count)
            yield Change(f"divided by {words} once more", factor=1 / count)


# ---- ratio, clip, correction, KL, entropy ----------------------------------------------------------------------------------------------


def ratio_changes(dump: Dump, s: Any) -> Iterator[Change]:
    """Yield causes in the importance ratio and the sign of the advantage."""
    yield Change("staleness ignored: the ratio is 1", row=lambda c: replace(c, old_logp=None))
    cause = "old log-probs of the wrong version: they are the sampler's"
    yield Change(cause, row=lambda c: replace(c, old_logp=c.sampler_logp.where(c.sampler_logp == c.sampler_logp, c.old)))
    yield Change("old log-probs of the wrong version: they are the reference's", row=lambda c: replace(c, old_logp=c.ref_logp))
    yield Change("the importance ratio is inverted: old over current", objective=lambda c, r, t: reference.objective(c, 1.0 / r, t))
    for level, words in LEVELS.items():
        yield Change(f"the importance ratio is that {words}", {"importance_sampling_level": level})
    yield Change("the sign of the advantages is flipped", row=lambda c: replace(c, advantage=-c.advantage))


def clip_changes(dump: Dump, s: Any) -> Iterator[Change]:
    """Yield causes in the bounds of the ratio."""
    low, high = s.epsilon, reference.epsilon_high(s)
    if s.loss_type == "cispo":
        yield Change("not clipped: cispo's bound is not applied", {"epsilon_high": math.inf})
        yield Change("cispo's bound is 1 + epsilon_high instead of epsilon_high", {"epsilon_high": 1.0 + high})
        yield Change("the weight of cispo is not detached", objective=lambda c, r, t: -r.clamp(max=high) * c.advantage * c.logp)
    elif s.loss_type == "sapo":
        temperatures = {"sapo_temperature_pos": s.sapo_temperature_neg, "sapo_temperature_neg": s.sapo_temperature_pos}
        yield Change("sapo's temperatures are swapped", temperatures)
    else:
        cause, plain = "clip on the wrong side: the larger surrogate is taken", changed(s, delta=None)
        yield Change(cause, objective=lambda c, r, t: reference.clipped(r, -c.advantage, plain))
        yield Change("clip on the wrong side: epsilon and epsilon_high are swapped", {"epsilon": high, "epsilon_high": low})
        yield Change("epsilon_high is not applied: both bounds are epsilon", {"epsilon_high": low})
        yield Change("not clipped", {"epsilon": math.inf, "epsilon_high": math.inf, "delta": None})
        yield Change("delta (dual clip) is not applied", {"delta": None})
        yield Change("delta is added to 1", {"delta": s.delta and 1.0 + s.delta})
        cause = "the ratio is clipped without the minimum, so that clipped tokens of both signs lose their gradient"
        yield Change(cause, objective=lambda c, r, t: r.clamp(1.0 - low, 1.0 + high) * -c.advantage)


def factor_changes(s: Any) -> Iterator[Change]:
    """Yield causes in the use of the correction for the sampler."""
    rho = partial(reference.rollout_importance, s=s)
    yield Change("the correction for the sampler is applied twice", row=lambda c: replace(c, correction=rho(c) * rho(c)))
    yield Change("the correction for the sampler is not applied", row=lambda c: replace(c, correction=reference.ones_like(c.mask)))
    cause = "the correction for the sampler is applied to the wrong side: it divides"
    yield Change(cause, row=lambda c: replace(c, correction=1.0 / rho(c).clamp(min=1e-6)))


def correction_changes(dump: Dump, s: Any) -> Iterator[Change]:
    """Yield causes in the factors for off-policy data, and in the entropy."""
    if s.rollout_importance_sampling_mode != "none" or any(row.correction is not None for row in dump.rows):
        yield from factor_changes(s)
    else:
        for mode in MODES:
            yield Change(
                f"a correction for the sampler is applied ({mode}), although it is off", {"rollout_importance_sampling_mode": mode}
            )
    yield Change("off_policy_sequence_mask_delta is not applied", {"off_policy_sequence_mask_delta": None})
    yield Change("top_entropy_quantile is not applied", {"top_entropy_quantile": 1.0})
    yield Change("the entropy bonus has the wrong sign", {"entropy_coef": -s.entropy_coef})
    yield Change("the entropy bonus is not applied", {"entropy_coef": 0.0})
    yield Change("top_entropy_quantile keeps the tokens with the lowest entropy", row=lambda c: replace(c, entropy=-c.entropy))


def kl_changes(dump: Dump, s: Any) -> Iterator[Change]:
    """Yield causes in the KL term."""
    if not s.beta:
        return
    yield Change("KL of the wrong sign: it is subtracted", {"beta": -s.beta})
    cause = "KL of the wrong sign: log-probs of policy and reference are exchanged"
    yield Change(cause, kl=lambda c, r, t: dump.kl(replace(c, logp=c.ref_logp, ref_logp=c.logp), r, t))
    for estimator in ("k1", "k2", "k3"):
        yield Change(f"another KL estimator: {estimator} instead of {s.kl_estimator}", {"kl_estimator": estimator})
    yield Change("the KL estimate is not multiplied by the importance ratio", {"use_bias_correction_kl": False})
    yield Change("the KL estimate is multiplied by the importance ratio", {"use_bias_correction_kl": True})
    yield Change("the KL term is not applied", {"beta": 0.0})
    yield Change("KL of the wrong reference: its log-probs are the old ones", row=lambda c: replace(c, ref_logp=c.old))
    yield Change("the KL term is in the loss, and kl_in_reward has it in the reward", {"kl_in_reward": False})
    yield Change("the KL term is added twice", {"beta": 2 * s.beta})
    cause = "the KL estimate is corrected for the sampler"
    yield Change(cause, kl=lambda c, r, t: reference.kl(c, r, t) * reference.rollout_importance(c, t))
    yield Change("the KL estimate is not corrected for the sampler", kl=reference.kl)


def changes(dump: Dump, s: Any) -> Iterator[Change]:
    """Yield the known causes of a different loss or gradient, the more frequent first, except those that equal the settings."""
    for kind in (weight_changes, scale_changes, ratio_changes, clip_changes, correction_changes, kl_changes):
        yield from (change for change in kind(dump, s) if not change.settings or changed(s, **change.settings) != s)


# ---- advantages --------------------------------------------------------------------------------------------------------------------------


def population_std(values: Sequence[float]) -> float:
    """Return the standard deviation with divisor n.

    Args:
        values: Numbers; None where a reward does not apply.
    """
    return float(np.std(values)) if values else 0.0


def advantages(rows: Sequence[DumpedRow], s: Any, *, epsilon: float, groups: Sequence[Any] = (), weights: Sequence[float] = (),
               deviation: Callable[[Sequence[float]], float] = reference.std, is_centered: bool = True,
               missing: float | None = None) -> np.ndarray:  # fmt: skip
    """Return the advantages of rows, [rows].

    Args:
        groups: Group of each row; the rows' own without.
        weights: Weights of the reward functions; those of the settings without.
        is_centered: Whether the group's mean is subtracted.
    """
    places = group_indices(groups or [row.group for row in rows])
    rewards = [[[missing if r is None else r for r in rows[i].rewards or ()] for i in group] for group in places]
    weights = weights or s.reward_weights or [1.0] * len(rewards[0][0])
    penalty = None
    if s.kl_in_reward and s.beta:
        penalty = [reference.kl_penalty([rows[i].completion for i in group], s.beta) for group in places]
    values = reference.advantages(rewards, weights, s, penalty, epsilon=epsilon, deviation=deviation)
    found = np.zeros(len(rows))
    for group, mine, given in zip(places, values, rewards, strict=True):
        totals = [reference.total(row, weights) or 0.0 for row in given]
        scale = deviation(totals) + epsilon if s.scale_rewards == "group" else 1.0
        found[group] = mine if is_centered else [t / scale for t in totals]
    return found


def advantage_causes(rows: Sequence[DumpedRow], s: Any, epsilon: float) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (cause, advantages with it).

    Args:
        rows: Rows in the order of the rollout.
    """
    size, number = s.num_generations, len(rows)
    prompts = max(number // size, 1)
    ours, equal = advantages(rows, s, epsilon=epsilon), [1.0] * len(rows[0].rewards or ())

    def having(t: Any = s, epsilon: float = epsilon, **arguments: Any) -> np.ndarray:
        return advantages(rows, t, epsilon=epsilon, **arguments)

    def scaled(**values: Any) -> SimpleNamespace:
        return changed(s, **{"advantage_estimator": "grpo", "multi_objective_aggregation": "sum_then_normalize"} | values)

    yield "n instead of n - 1 in the standard deviation", having(deviation=population_std)
    for scale, words in (("group", "divided by the deviation of the group"), ("batch", "divided by the deviation of the batch"),
                         ("none", "not divided by a standard deviation")):  # fmt: skip
        if scale != s.scale_rewards or s.advantage_estimator != "grpo":
            yield words, having(scaled(scale_rewards=scale))
    yield "group over the wrong ranks: every G-th completion is a group", having(groups=[i % prompts for i in range(number)])
    for n in (*(size // parts for parts in (2, 4, 8) if size % parts == 0), 2 * size, 4 * size, number):
        if 1 < n != size and number % n == 0:
            words = f"each part of {n} is normalized by itself" if n < size else f"{n // size} prompts are one group"
            words = "the whole batch is one group" if n == number else words
            yield f"group over the wrong ranks: {words}", having(groups=[i // n for i in range(number)])
    shifted = [(i + size // 2) // size % prompts for i in range(number)]
    yield "groups are shifted: they do not begin with a prompt", having(groups=shifted)
    yield "leave-one-out baseline", having(changed(s, advantage_estimator="rloo"))
    yield "the group's mean is not subtracted", having(is_centered=False)
    yield "reward_weights are not applied", having(weights=equal)
    yield "reward_weights are in another order", having(weights=(s.reward_weights or equal)[::-1])
    yield "only the first reward function counts", having(weights=[1.0] + [0.0] * (len(equal) - 1))
    yield "a missing reward counts as 0", having(missing=0.0)
    for other in (1e-4, 1e-6, 1e-8, 0.0):
        yield f"{other:g} instead of {epsilon:g} is added to the standard deviation", having(epsilon=other)
    yield "each function is normalized by itself (gdpo)", having(scaled(multi_objective_aggregation="normalize_then_sum"))
    yield "the weighted sum of rewards is normalized (not gdpo)", having(scaled())
    batch_mean = having(scaled(scale_rewards="batch"), deviation=population_std)
    yield "n instead of n - 1 in the standard deviation, which is that of the batch", batch_mean
    yield "the sign of the advantages is flipped", -ours
    yield "leave-one-out baseline, divided by a standard deviation too", ours * size / max(size - 1, 1)
    yield "the advantages are whitened over the batch once more", (ours - ours.mean()) / (ours.std(ddof=1) + 1e-8)
