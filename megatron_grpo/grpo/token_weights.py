"""Token weights `u`: how much each trained token counts, fixed once per global batch, before it is cut for ranks and micro-batches.

Because the loss is the plain sum of `u * c * l`, no reduction afterwards divides by anything: not by micro-batches, not by ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenWeights:
    """of_rows: float64 [rows], what each trained token of a row counts. All zero without a loss token: the step is skipped."""

    of_rows: np.ndarray
    num_sequences: int  # N: completions that count, over the whole global batch
    num_loss_tokens: int  # sum of the masks that are left


def token_weights(
    num_masked: Sequence[int],
    *,
    loss_type: str,
    is_truncated: Sequence[bool],
    is_dead: Sequence[bool],
    max_completion_length: int,
    overlong_filter: bool = False,
    exclude_dead_groups: bool = False,
) -> TokenWeights:
    """`u` of every row of one global batch, all data-parallel ranks together: one number a row, from integers and flags alone.

    num_masked: trained tokens of each row. `overlong_filter` empties the mask of a truncated completion, which still counts in N;
    `exclude_dead_groups` takes the completions of dead groups out of N as well.
    """
    counts = [not (exclude_dead_groups and dead) for dead in is_dead]
    trains = [count and not (overlong_filter and truncated) for count, truncated in zip(counts, is_truncated, strict=True)]
    own = [int(num) * train for num, train in zip(num_masked, trains, strict=True)]
    num_sequences, num_loss_tokens = sum(counts), sum(own)
    norm = NORMALISATIONS[loss_type]
    weights = [float(num > 0) / norm(max(num_sequences, 1), max(num_loss_tokens, 1), max(num, 1), max_completion_length) for num in own]
    return TokenWeights(of_rows=np.array(weights, dtype=np.float64), num_sequences=num_sequences, num_loss_tokens=num_loss_tokens)


# loss_type -> what a trained token's weight is one over: of (completions, trained tokens, those of its row, max_completion_length).
NORMALISATIONS: dict[str, Callable[[int, int, int, int], float]] = {
    **dict.fromkeys(("grpo", "sapo", "real"), lambda sequences, tokens, own, longest: sequences * own),  # a mean of means
    **dict.fromkeys(("dapo", "bnpo", "cispo", "vespo", "fipo"), lambda sequences, tokens, own, longest: tokens),
    "dr_grpo": lambda sequences, tokens, own, longest: sequences * longest,
    # luspo: GSPO's loss of a sequence times its length
    **dict.fromkeys(("sequence_sum", "luspo"), lambda sequences, tokens, own, longest: sequences),
}
