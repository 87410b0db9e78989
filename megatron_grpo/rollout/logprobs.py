"""Log-probs that no distribution has: NaN, infinite, or above 0. A completion with one of them is refused where it arrives.

Its tokens cannot be trusted to be draws of the policy, so none of them is trained. Taken as they are, NaN would mean a ratio of 1 between
trainer and sampler, and -inf the largest ratio there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_grpo.types import Completion, Group

# A certain token may come out above 0 by the rounding of a float32 softmax; by no more than this, in nats.
ROUNDING = 1e-5


class ImpossibleLogprobs(RuntimeError):
    """The sampler's log-probs are those of no distribution: its weights, or its arithmetic, are broken."""


def first_impossible(logprobs: np.ndarray) -> int | None:
    """The place of the first log-prob that no distribution has."""
    wrong = np.flatnonzero(~np.isfinite(logprobs) | (logprobs > ROUNDING))
    return int(wrong[0]) if len(wrong) else None


def refuse_impossible(groups: Sequence[Group]) -> tuple[list[Group], list[str]]:
    """The groups, in which a completion with an impossible log-prob `is_refused`; and what was seen in each such completion."""
    found: list[str] = []

    def judged(group: Group, place: int, completion: Completion) -> Completion:
        drawn = completion.logprobs[completion.sequence.mask]
        wrong = first_impossible(drawn)
        if wrong is None:
            return completion
        found.append(
            f"completion {place} of prompt {group.prompt.number} (row {group.prompt.row} of the data), token {wrong + 1} of "
            f"{len(drawn)}: {drawn[wrong]}"
        )
        return replace(completion, logprobs=np.where(completion.sequence.mask, np.float32(np.nan), np.float32(0.0)))

    kept = [replace(group, completions=tuple(judged(group, place, one) for place, one in enumerate(group.completions))) for group in groups]
    return kept, found


def warning_of(found: Sequence[str], total: int) -> str | None:
    """What a person should be told of the completions refused, of all that were sampled together; None where there are none.

    Raises ImpossibleLogprobs where that leaves no completion.
    """
    if not found:
        return None
    said = f"{len(found)} of {total} completions have a log-prob that no distribution has (the first: {found[0]})"
    if len(found) == total:
        raise ImpossibleLogprobs(f"{said}. The sampler's weights or its arithmetic are broken.")
    return f"{said}: nothing of them is trained"
