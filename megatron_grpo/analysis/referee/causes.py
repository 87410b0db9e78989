"""Known causes: each is the reference with one thing changed, and is named where it reproduces a number that differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_grpo.analysis.referee import reference
from megatron_grpo.analysis.referee.dump import Dump, DumpedMicroBatch, DumpedRow
from megatron_grpo.analysis.referee.reference import Counted, ReferenceCompletion

TOKEN_MEANS = ("dapo", "bnpo", "cispo", "vespo", "fipo")
ROW_MEANS = ("grpo", "sapo")
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
Row = Callable[[ReferenceCompletion, DumpedRow], ReferenceCompletion]
# (counted completions, settings, max_completion_length, micro-batch, its rows) -> token weights
Weights = Callable[[Counted, Any, int, DumpedMicroBatch, Sequence[DumpedRow]], list[Any]]


def rule(batch: Counted, s: Any, longest: int, micro: DumpedMicroBatch, rows: Sequence[DumpedRow]) -> list[Any]:
    """Return the token weights as the system defines them: a mean over tokens divides by what it counted, `bnpo` by its own tokens."""
    if s.loss_type in TOKEN_MEANS and s.loss_type != "bnpo" and micro.tokens:
        return [m / micro.tokens for _, m in batch]
    return reference.token_weights(batch, s, longest)


@dataclass(frozen=True)
class Change:
    """Change of the reference formulas that represents one possible cause.

    Args:
        cause: Sentence that names it.
        settings: Settings that differ.
        row: Changes a completion.
        formulas: Formulas of the loss that differ.
        weights: Token weights.
        factor: Factor of loss and gradients.
        drops: Whether a row is left out.
    """

    cause: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    _: KW_ONLY
    row: Row = lambda completion, row: completion
    formulas: Mapping[str, Any] = field(default_factory=dict)
    weights: Weights = rule
    factor: float = 1.0
    drops: Callable[[DumpedRow], bool] = lambda row: False

    def apply(self, s: Any) -> SimpleNamespace:
        """Return the settings with those that differ.

        Args:
            s: Settings of the run.
        """
        return SimpleNamespace(**vars(s) | self.settings)


# ---- token weights -----------------------------------------------------------------------------------------------------------------------


def _as(loss_type: str) -> Weights:
    return lambda batch, s, longest, micro, rows: rule(batch, SimpleNamespace(**vars(s) | {"loss_type": loss_type}), longest, micro, rows)


def _own_tokens(batch: Counted, s: Any, longest: int, *unused: Any) -> list[Any]:
    return reference.token_weights(batch, s, longest)


def _divided_by(dump: Dump, count: Callable[[DumpedRow, DumpedMicroBatch], float]) -> Weights:
    """Return weights with another length of each row: of the row itself in a mean over rows, else of all rows."""
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


def _unmasked(c: ReferenceCompletion, row: DumpedRow) -> ReferenceCompletion:
    return replace(c, mask=reference.ones_like(c.mask))


def _shifted(places: int, c: ReferenceCompletion, row: DumpedRow) -> ReferenceCompletion:
    mask = np.roll(row.mask, places)
    mask[0 if places > 0 else -1] = 0.0
    return replace(c, mask=c.mask.new_tensor(mask))


def _without(place: int, c: ReferenceCompletion, row: DumpedRow) -> ReferenceCompletion:
    mask = row.mask.copy()
    mask[np.flatnonzero(mask)[place : place + 1 or None]] = 0.0
    return replace(c, mask=c.mask.new_tensor(mask))


def _of_width(batch: Counted, s: Any, longest: int, micro: DumpedMicroBatch, rows: Sequence[DumpedRow]) -> list[Any]:
    return reference.token_weights(batch, s, micro.width or longest)


def weight_changes(dump: Dump, s: Any) -> Iterator[Change]:
    """Yield causes in the token weights and in the rows that count.

    Args:
        dump: The dumped step.
        s: Settings of the run.
    """
    if s.overlong_filter:
        yield Change("truncated rows kept: overlong_filter is not applied", {"overlong_filter": False})
    else:
        yield Change("truncated rows left out, although overlong_filter is off", {"overlong_filter": True})
    if s.loss_type in TOKEN_MEANS:
        yield Change("mean of micro-batch means: each micro-batch is divided by its own tokens", weights=_own_tokens)
    yield Change("masked tokens counted in the mean", weights=_divided_by(dump, lambda row, micro: row.length))
    if s.loss_type == "dr_grpo":
        yield Change("divided by the padded length instead of max_completion_length", weights=_of_width)
    yield Change("padding in the mean", weights=_divided_by(dump, lambda row, micro: micro.width or row.length))
    for places, words in ((1, "later"), (-1, "earlier")):
        shifted = partial(_shifted, places)
        yield Change(f"the mask is shifted by one token: it begins one token {words}", row=shifted, weights=_own_tokens)
    for place, words in ((0, "first token"), (-1, "last token, the end of the text,")):
        yield Change(f"the {words} of each completion is left out", row=partial(_without, place), weights=_own_tokens)
    yield Change("masked tokens trained and counted", row=_unmasked, weights=_own_tokens)
    yield Change("masked tokens trained", row=_unmasked, weights=_divided_by(dump, lambda row, micro: row.mask.sum()))
    for loss_type, (same, cause) in WEIGHTS.items():
        if s.loss_type not in same:
            yield Change(cause, weights=_as(loss_type))
    yield Change("rows without a trained token left out of the mean", drops=lambda row: not row.mask.any())
    if s.exclude_zero_std_groups:
        yield Change("groups with equal rewards kept in the mean", {"exclude_zero_std_groups": False})
    else:
        yield Change("groups with equal rewards left out of the mean", drops=lambda row: row.is_zero_std or row.advantage == 0)


# ---- ratio, clip, correction, KL, entropy ----------------------------------------------------------------------------------------------


def _high(s: Any) -> float:
    return s.epsilon if s.epsilon_high is None else s.epsilon_high


def ratio_changes(dump: Dump, s: Any) -> Iterator[Change]:
    """Yield causes in the importance ratio, its clip and the sign of the advantage.

    Args:
        dump: The dumped step.
        s: Settings of the run.
    """
    yield Change("staleness ignored: the ratio is 1", row=lambda c, row: replace(c, old_logp=None))
    yield Change(
        "old log-probs of the wrong version: they are the sampler's",
        row=lambda c, row: replace(c, old_logp=c.sampler_logp.where(c.sampler_logp == c.sampler_logp, c.old)),
    )
    yield Change("old log-probs of the wrong version: they are the reference's", row=lambda c, row: replace(c, old_logp=c.ref_logp))
    inverted = {"objective": lambda c, r, t: reference.objective(c, 1.0 / r, t)}
    yield Change("the importance ratio is inverted: old over current", formulas=inverted)
    levels = {"token": "of each token", "sequence": "of the sequence", "sequence_token": "of the sequence, with the gradient of each token"}
    for level, words in levels.items():
        if level != s.importance_sampling_level:
            yield Change(f"the importance ratio is that {words}", {"importance_sampling_level": level})
    yield Change("the sign of the advantages is flipped", row=lambda c, row: replace(c, advantage=-c.advantage))
    if s.loss_type == "cispo":
        high = 5.0 if s.epsilon_high is None else s.epsilon_high
        yield Change("not clipped: cispo's bound is not applied", {"epsilon_high": math.inf})
        yield Change("cispo's bound is 1 + epsilon_high instead of epsilon_high", {"epsilon_high": 1.0 + high})
        yield Change(
            "the weight of cispo is not detached", formulas={"objective": lambda c, r, t: -r.clamp(max=high) * c.advantage * c.logp}
        )
    elif s.loss_type == "sapo":
        negative, positive = s.sapo_temperature_neg, s.sapo_temperature_pos
        yield Change("sapo's temperatures are swapped", {"sapo_temperature_pos": negative, "sapo_temperature_neg": positive})
    else:
        yield from clip_changes(s)


def clip_changes(s: Any) -> Iterator[Change]:
    """Yield causes in the bounds of the ratio.

    Args:
        s: Settings of the run.
    """
    high = _high(s)
    larger = {"objective": lambda c, r, t: reference.clipped(r, -reference.token_advantage(c, t), t)}
    yield Change("clip on the wrong side: the larger surrogate is taken", {"delta": None}, formulas=larger)
    yield Change("clip on the wrong side: epsilon and epsilon_high are swapped", {"epsilon": high, "epsilon_high": s.epsilon})
    yield Change("epsilon_high is not applied: both bounds are epsilon", {"epsilon_high": s.epsilon})
    yield Change("not clipped", {"epsilon": math.inf, "epsilon_high": math.inf, "delta": None})
    yield Change("delta (dual clip) is not applied", {"delta": None})
    if s.delta is not None:
        yield Change("delta is added to 1", {"delta": 1.0 + s.delta})
    yield Change(
        "the ratio is clipped without the minimum, so that clipped tokens of both signs lose their gradient",
        formulas={"objective": lambda c, r, t: r.clamp(1.0 - t.epsilon, 1.0 + high) * -c.advantage},
    )


def correction_changes(dump: Dump, s: Any) -> Iterator[Change]:
    """Yield causes in the factors for off-policy data.

    Args:
        dump: The dumped step.
        s: Settings of the run.
    """

    def factor(of: Callable[[Any], Any]) -> Row:
        return lambda c, row: replace(c, correction=of(reference.rollout_importance(c, s)))

    if s.rollout_importance_sampling_mode != "none" or any(row.correction is not None for row in dump.rows):
        yield Change("the correction for the sampler is applied twice", row=factor(lambda rho: rho * rho))
        yield Change("the correction for the sampler is not applied", row=factor(lambda rho: reference.ones_like(rho)))
        divides = factor(lambda rho: 1.0 / rho.clamp(min=1e-6))
        yield Change("the correction for the sampler is applied to the wrong side: it divides", row=divides)
    else:
        for mode in MODES:
            cause = f"a correction for the sampler is applied ({mode}), although it is off"
            yield Change(cause, {"rollout_importance_sampling_mode": mode})
    if s.off_policy_sequence_mask_delta is not None:
        yield Change("off_policy_sequence_mask_delta is not applied", {"off_policy_sequence_mask_delta": None})
    if s.top_entropy_quantile < 1:
        yield Change("top_entropy_quantile is not applied", {"top_entropy_quantile": 1.0})
        yield Change("top_entropy_quantile keeps the tokens with the lowest entropy", row=lambda c, row: replace(c, entropy=-c.entropy))
    if s.entropy_coef:
        yield Change("the entropy bonus has the wrong sign", {"entropy_coef": -s.entropy_coef})
        yield Change("the entropy bonus is not applied", {"entropy_coef": 0.0})


def kl_changes(dump: Dump, s: Any) -> Iterator[Change]:
    """Yield causes in the KL term.

    Args:
        dump: The dumped step.
        s: Settings of the run.
    """
    if not s.beta:
        return
    yield Change("KL of the wrong sign: it is subtracted", {"beta": -s.beta})
    exchanged = {"kl": lambda c, r, t: dump.kl(replace(c, logp=c.ref_logp, ref_logp=c.logp), r, t)}
    yield Change("KL of the wrong sign: log-probs of policy and reference are exchanged", formulas=exchanged)
    for estimator in ("k1", "k2", "k3"):
        if estimator != s.kl_estimator:
            yield Change(f"another KL estimator: {estimator} instead of {s.kl_estimator}", {"kl_estimator": estimator})
    verb = "is not multiplied by" if s.use_bias_correction_kl else "is multiplied by"
    yield Change(f"the KL estimate {verb} the importance ratio", {"use_bias_correction_kl": not s.use_bias_correction_kl})
    yield Change("the KL term is not applied", {"beta": 0.0})
    yield Change("KL of the wrong reference: its log-probs are the old ones", row=lambda c, row: replace(c, ref_logp=c.old))
    if s.kl_in_reward:
        yield Change("the KL term is in the loss, and kl_in_reward has it in the reward", {"kl_in_reward": False})
    else:
        yield Change("the KL term is added twice", {"beta": 2 * s.beta})
    corrected = {"kl": lambda c, r, t: reference.kl(c, r, t) * reference.rollout_importance(c, t)}
    yield Change("the KL estimate is corrected for the sampler", formulas=corrected)
    yield Change("the KL estimate is not corrected for the sampler", formulas={"kl": reference.kl})


def scale_changes(dump: Dump, s: Any) -> Iterator[Change]:
    """Yield causes that scale everything.

    Args:
        dump: The dumped step.
        s: Settings of the run.
    """
    micro_batches = len(dump.micro_batches) / dump.ranks
    for count, words in ((micro_batches, "the number of micro-batches"), (dump.ranks, "the number of ranks")):
        if count > 1:
            yield Change(f"not divided by {words}", factor=count)
            yield Change(f"divided by {words} once more", factor=1 / count)


def changes(dump: Dump, s: Any) -> Iterator[Change]:
    """Yield every known cause of another loss or gradient, the more frequent first.

    Args:
        dump: The dumped step.
        s: Settings of the run.
    """
    for kind in (weight_changes, scale_changes, ratio_changes, correction_changes, kl_changes):
        yield from kind(dump, s)


# ---- advantages --------------------------------------------------------------------------------------------------------------------------


def population_std(values: Sequence[float]) -> float:
    """Return the standard deviation over n.

    Args:
        values: Numbers; None where a reward does not apply.
    """
    return math.sqrt(sum((v - reference.mean(values)) ** 2 for v in values) / len(values)) if values else 0.0


def advantage_changes(rows: Sequence[DumpedRow], s: Any, epsilon: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (cause, changed arguments of `findings.advantages`).

    Args:
        rows: Rows in the order of the rollout.
        s: Settings.
        epsilon: Number that the system adds to a standard deviation.
    """
    size, number = s.num_generations, len(rows)

    def settings(**values: Any) -> dict[str, Any]:
        plain = {"advantage_estimator": "grpo", "multi_objective_aggregation": "sum_then_normalize"}
        return {"s": SimpleNamespace(**{**vars(s), **plain, **values})}

    yield "n instead of n - 1 in the standard deviation", {"deviation": population_std}
    for scale, words in (("group", "divided by the deviation of the group"), ("batch", "divided by the deviation of the batch"),
                         ("none", "not divided by a standard deviation")):  # fmt: skip
        if scale != s.scale_rewards or s.advantage_estimator != "grpo":
            yield words, settings(scale_rewards=scale)
    yield "group over the wrong ranks: every G-th completion is a group", {"groups": [i % max(number // size, 1) for i in range(number)]}
    for parts in (2, 4, 8):
        if size % parts == 0 and size > parts:
            part = size // parts
            yield f"group over the wrong ranks: each part of {part} is normalised by itself", {"groups": [i // part for i in range(number)]}
    for times in (2, 4, number // size):
        if times > 1 and number % (size * times) == 0:
            words = "the whole batch is one group" if times * size == number else f"{times} prompts are one group"
            yield f"group over the wrong ranks: {words}", {"groups": [i // (size * times) for i in range(number)]}
    shifted = [(i + size // 2) // size % max(number // size, 1) for i in range(number)]
    yield "groups are shifted: they do not begin with a prompt", {"groups": shifted}
    yield "leave-one-out baseline", {"s": SimpleNamespace(**{**vars(s), "advantage_estimator": "rloo"})}
    yield "the group's mean is not subtracted", {"is_centred": False}
    equal = [1.0] * len(rows[0].rewards or ())
    yield "reward_weights are not applied", {"weights": equal}
    yield "reward_weights are in another order", {"weights": (s.reward_weights or equal)[::-1]}
    yield "only the first reward function counts", {"weights": [1.0] + [0.0] * (len(equal) - 1)}
    yield "a missing reward counts as 0", {"missing": 0.0}
    for other in (1e-4, 1e-6, 1e-8, 0.0):
        if other != epsilon:
            yield f"{other:g} instead of {epsilon:g} is added to the standard deviation", {"epsilon": other}
    yield "each function is normalised by itself (gdpo)", settings(multi_objective_aggregation="normalize_then_sum")
    yield "the weighted sum of rewards is normalised (not gdpo)", settings()
    of_batch = settings(scale_rewards="batch") | {"deviation": population_std}
    yield "n instead of n - 1 in the standard deviation, which is that of the batch", of_batch
