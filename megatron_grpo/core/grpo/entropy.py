"""Entropy threshold of trained tokens (`--top_entropy_quantile`) and the adaptive entropy bonus.

The threshold is one for the whole global batch, over all ranks. The completions of one prompt share the context of their first token, so
those entropies are equal but for rounding, and rounding depends on how the batch was partitioned. A threshold between two of them would let
the partition choose which tokens train. So entropies this close are treated as a tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_grpo.core.settings import GrpoConfig

Counts = np.ndarray  # int64

# Rounding moves an entropy in proportion to itself: dH = -sum p (log p + H) dlogit, whose size is at most 2 H max|dlogit|. Measured between
# layouts and partitions in float32: 1e-5 of it at most, 2e-6 above 1 nat. The floor is for entropies near 0, where the rounding of the
# formula itself remains.
TIE_RELATIVE = 1e-4
TIE_NATS = 1e-5


def _alone(counts: Counts) -> Counts:
    return counts


def entropy_threshold(
    entropies: Sequence[np.ndarray], masks: Sequence[np.ndarray], top_quantile: float, *, over_ranks: Callable[[Counts], Counts] = _alone
) -> float:
    """Return the lowest entropy, in nats, of the top `top_quantile` of tokens (arXiv 2506.01939: 0.2).

    The tokens kept are those that a quantile with linear interpolation keeps, and those so little below the lowest of them that they tie
    with it. A rank's threshold moves by no more than its entropies do, and a tie is far wider than their rounding noise, so no partition
    divides it; nor does the loss, which computes the entropies again. Ties are not chained from neighbour to neighbour: in a large batch
    that chain would hold every token.

    Collective if `over_ranks` is.

    Args:
        entropies: One array per sample of this rank, in nats.
        masks: One bool array per sample; only tokens inside the mask are ranked.
        top_quantile: Fraction of tokens to keep, 1 or more for all.
        over_ranks: Sums counts over all ranks that have samples of the global batch; the entropies themselves are not communicated.

    Returns:
        The threshold in nats; -inf where all tokens, or none, are ranked.
    """
    if top_quantile >= 1.0:
        return -np.inf
    ranked = [np.asarray(entropy, dtype=np.float64)[np.asarray(mask, dtype=bool)] for entropy, mask in zip(entropies, masks, strict=True)]
    values = np.concatenate(ranked) if ranked else np.zeros(0)
    total = int(over_ranks(np.array([values.size], dtype=np.int64))[0])
    if total == 0:
        return -np.inf
    # The 1e-9 keeps 10 * (1 - 0.7) = 3.0000000000000004 from dropping one token more than 10 * 0.3 does.
    rank_index = math.ceil((total - 1) * (1.0 - top_quantile) - 1e-9)
    lowest_kept = _at_index(values, rank_index, over_ranks)
    return lowest_kept - max(TIE_RELATIVE * lowest_kept, TIE_NATS)


def _at_index(values: np.ndarray, index: int, over_ranks: Callable[[Counts], Counts]) -> float:
    """Return the value at index `index` of all ranks' values (float64) in sorted order, exactly; NaN is last.

    The value is found by its bits, eight at a time from the top: ranks sum 256 counts each time, and continue with the values that begin
    with the bits found so far. So the communication volume does not grow with the batch.
    """
    sign = np.uint64(1 << 63)
    bits = values.view(np.uint64)
    keys = np.where(bits & sign, ~bits, bits | sign)  # in the order of the numbers
    ordered = 0
    for shift in range(56, -8, -8):
        digits = (keys >> np.uint64(shift)).astype(np.int64) & 255
        counts = over_ranks(np.bincount(digits, minlength=256))
        ends = np.cumsum(counts)
        digit = int(np.searchsorted(ends, index, side="right"))
        index -= int(ends[digit] - counts[digit])
        ordered |= digit << shift
        keys = keys[digits == digit]
    ordered = ordered ^ (1 << 63) if ordered >> 63 else ~ordered & (1 << 64) - 1
    return float(np.array([ordered], dtype=np.uint64).view(np.float64)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveEntropy:
    """Coefficient of the entropy bonus after some optimizer steps (`--use_adaptive_entropy`).

    The rule is that of Skywork-OR1 (arXiv 2505.22312), as in TRL: the coefficient rises by `entropy_coef_delta` after a step whose entropy
    was at the target or below, else it falls; and it is applied only after such a step.

    Args:
        cfg: The GRPO settings.
        coef: The current coefficient.
        entropy: Entropy of the last step, in nats; infinite before the first.
    """

    cfg: GrpoConfig
    coef: float
    entropy: float = math.inf

    @classmethod
    def from_config(cls, cfg: GrpoConfig) -> AdaptiveEntropy | None:
        """Return the coefficient before the first step, or None if the settings make it constant."""
        return cls(cfg=cfg, coef=cfg.entropy_coef) if cfg.use_adaptive_entropy else None

    @property
    def applied(self) -> float:
        """Coefficient of the next step's bonus, the same in all of its micro-batches."""
        return self.coef if self.entropy <= self.cfg.entropy_target else 0.0

    def after(self, entropy: float) -> AdaptiveEntropy:
        """Return the coefficient after one more optimizer step.

        Args:
            entropy: Mean over all tokens that the step trained, in nats.
        """
        cfg, is_low = self.cfg, entropy <= self.cfg.entropy_target
        increased, decreased = self.coef + cfg.entropy_coef_delta, self.coef - cfg.entropy_coef_delta
        return replace(self, coef=min(increased, cfg.entropy_coef_max) if is_low else max(decreased, cfg.entropy_coef_min), entropy=entropy)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values. The rest comes from the settings."""
        return {"coef": self.coef, "entropy": self.entropy if math.isfinite(self.entropy) else None}

    def restored(self, state: Mapping[str, Any]) -> AdaptiveEntropy:
        """Return the coefficient with a saved state.

        Args:
            state: Result of `state()`, from a checkpoint.
        """
        return replace(self, coef=state["coef"], entropy=math.inf if state["entropy"] is None else state["entropy"])
