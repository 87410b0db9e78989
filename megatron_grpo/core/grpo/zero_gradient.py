"""Rows whose gradient is zero by construction. They are left out of every pass of the model. No torch, no numpy.

A row adds the sum over its tokens of u * (c * l + beta * kl), and of the entropy bonus, to the loss (docs/algorithms.md). Its gradient is
zero for every value of the weights if its token weight u is 0, or if its advantage is 0 and nothing but the objective l looks at it: each
l has the advantage as a factor. Denominators are fixed before rows are left out, so they count all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

    from megatron_grpo.core.metadata import TrainingRows

RowKind = Literal["no_token", "truncated", "zero_std", "zero_advantage"]
# The settings that `zero_gradient_kinds` reads.
DECIDING = ("compute_zero_advantage_rows", "moe_z_loss_coeff", "loss_type", "overlong_filter", "exclude_zero_std_groups",
            "beta", "kl_in_reward", "teacher_model", "teacher_model_server",
            "entropy_coef", "use_adaptive_entropy", "top_entropy_quantile")  # fmt: skip


def zero_gradient_kinds(settings: Mapping[str, Any]) -> frozenset[RowKind]:
    """Return the kinds of rows that have no gradient with these settings.

    Args:
        settings: Every setting by name. Without `compute_zero_advantage_rows` (a checkpoint of an earlier version) all rows are computed.
    """
    get = settings.get
    if get("compute_zero_advantage_rows", True):
        return frozenset()
    if get("moe_z_loss_coeff"):  # a loss of every routed token, whatever its weight
        return frozenset()
    if get("loss_type") == "real":  # a mean over the groups of the rows that it is given
        return frozenset()
    kinds: set[RowKind] = {"no_token"}
    if get("overlong_filter"):
        kinds.add("truncated")
    if get("exclude_zero_std_groups"):
        kinds.add("zero_std")
    reasons = (
        get("beta") and not get("kl_in_reward"),  # the KL in the loss; a KL in the reward is part of the advantage
        get("teacher_model") or get("teacher_model_server"),  # a token's advantage is the row's plus that of the teacher
        get("entropy_coef") or get("use_adaptive_entropy"),  # the bonus, and the mean that adapts its coefficient
        get("top_entropy_quantile", 1.0) < 1.0,  # the entropies of these tokens move the threshold of the others
    )
    if not any(reasons):
        kinds.add("zero_advantage")
    return frozenset(kinds)


def has_zero_gradient(rows: TrainingRows, kinds: frozenset[RowKind]) -> np.ndarray:
    """Return whether rows are of one of these kinds, bool [n].

    Args:
        kinds: Result of `zero_gradient_kinds`.
    """
    rows_by_reason = {"no_token": rows.num_masked == 0, "truncated": rows.is_truncated, "zero_std": rows.is_zero_std,
               "zero_advantage": rows.is_zero_advantage}  # fmt: skip
    return reduce(or_, (rows_by_reason[kind] for kind in kinds), rows.num_masked < 0)
