"""The entropy from which on a token trains (`--top_entropy_quantile`): one threshold for the whole global batch, over all ranks.

The completions of one prompt share the context of their first token, so those entropies are equal but for rounding, and rounding depends on
how the batch was cut. A threshold between two of them would let the cut choose what trains. So entropies this close are one tie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# Rounding moves an entropy in proportion to itself: dH = -sum p (log p + H) dlogit, whose size is at most 2 H max|dlogit|. Measured between
# layouts and cuts in float32: 1e-5 of it at most, 2e-6 above 1 nat. The floor is for entropies near 0, where the rounding of the formula
# itself is left.
TIE_RELATIVE = 1e-4
TIE_NATS = 1e-5


def entropy_threshold(entropies: Sequence[np.ndarray], masks: Sequence[np.ndarray], top_quantile: float) -> float:
    """The entropy, in nats, from which on a token is in the top `top_quantile` of entropy (arXiv 2506.01939: 0.2).

    entropies, masks: one array per sample of the global batch (all ranks), nats and bool; only masked-in tokens are ranked. -inf where all
    tokens, or none, are ranked.

    Kept is what a quantile with linear interpolation keeps, and what lies so little below the lowest of them that it ties with it. A rank's
    value moves by no more than the values do, and a tie is wider than their noise by far, so no cut divides it; nor does the loss, which
    computes entropies anew. Ties are not followed from neighbour to neighbour: in a large batch that chain would hold every token.
    """
    if top_quantile >= 1.0:
        return -np.inf
    ranked = [np.asarray(entropy, dtype=np.float64)[np.asarray(mask, dtype=bool)] for entropy, mask in zip(entropies, masks, strict=True)]
    values = np.concatenate(ranked) if ranked else np.zeros(0)
    if values.size == 0:
        return -np.inf
    # The 1e-9 keeps 10 * (1 - 0.7) = 3.0000000000000004 from dropping one token more than 10 * 0.3 does.
    place = math.ceil((values.size - 1) * (1.0 - top_quantile) - 1e-9)
    lowest_kept = float(np.partition(values, place)[place])
    return lowest_kept - max(TIE_RELATIVE * lowest_kept, TIE_NATS)
