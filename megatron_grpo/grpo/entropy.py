"""The entropy above which a token trains (`--top_entropy_quantile`): one threshold for the whole global batch, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def entropy_threshold(entropies: Sequence[np.ndarray], masks: Sequence[np.ndarray], top_quantile: float) -> float:
    """The threshold that keeps the tokens in the top `top_quantile` of entropy (arXiv 2506.01939: 0.2).

    entropies, masks: one array per sample of the global batch (all ranks), nats and bool; only masked-in tokens are ranked. Which tokens
    are kept is what a quantile with linear interpolation says, ties included; the number returned lies halfway between the lowest kept
    and the highest dropped entropy, so that rounding in another layout or packing cannot move a token across it.
    """
    if top_quantile >= 1.0:
        return -np.inf
    ranked = [np.asarray(entropy, dtype=np.float64)[np.asarray(mask, dtype=bool)] for entropy, mask in zip(entropies, masks, strict=True)]
    values = np.concatenate(ranked) if ranked else np.zeros(0)
    if values.size == 0:
        return -np.inf
    values.sort()
    # The 1e-9 keeps 10 * (1 - 0.7) = 3.0000000000000004 from dropping one token more than 10 * 0.3 does.
    lowest_kept = values[math.ceil((values.size - 1) * (1.0 - top_quantile) - 1e-9)]
    num_dropped = np.searchsorted(values, lowest_kept)  # ties with the lowest kept one are kept
    return float((lowest_kept + values[num_dropped - 1]) / 2.0) if num_dropped else -np.inf
