"""What `real` asks of a whole global batch before its step: each rollout's part of its group's loss, and the slope there.

The loss of a group is log(1 + sum over A > 0 of exp(-s / tau)) + log(1 + sum over A < 0 of exp(s / tau)), where s is the mean over a
rollout's trained tokens of logp - old; groups without a rollout on either side have none (arXiv 2602.05630, with its anchor logits of 0).
A step's loss is the mean over its groups. Plain numbers: the rows may lie anywhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np


def classification(
    scores: Sequence[float], advantages: Sequence[float], groups: Sequence[Hashable], trains: Sequence[bool], *, tau: float
) -> tuple[np.ndarray, np.ndarray]:
    """(values, slopes), float64 [rows]. The mean of `values` over all rows is the loss, that of `slopes` its derivative by each score.

    scores: s of each row. groups: any name of its group, all of whose rows are here. trains: whether anything of it does; if not, it takes
    no part in its group's sums. A rollout with A = 0, which no reward judged or which is just average, is on neither side.
    """
    s, a, does = np.asarray(scores, dtype=np.float64) / tau, np.asarray(advantages), np.asarray(trains, dtype=bool)
    values, slopes = np.zeros(len(s)), np.zeros(len(s))
    rows: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    share = len(s) / max(len(rows), 1)  # a mean over rows of what counts once a group
    for members in rows.values():
        here = np.array(members)
        sides = [(here[(a[here] > 0) & does[here]], -1.0), (here[(a[here] < 0) & does[here]], 1.0)]
        if not all(len(side) for side, _ in sides):
            continue
        for side, sign in sides:
            highest = max(0.0, (sign * s[side]).max())  # the anchor's logit is 0
            parts = np.exp(sign * s[side] - highest)
            total = np.exp(-highest) + parts.sum()
            values[side] = share * (highest + np.log(total)) / len(side)
            slopes[side] = share * sign / tau * parts / total
    return values, slopes
