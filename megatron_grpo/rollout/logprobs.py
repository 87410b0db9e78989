"""Log-probs that no distribution has: NaN, infinite, or above 0. A completion with one of them is refused where it arrives.

Its tokens cannot be trusted to be draws of the policy, so none of them is trained. Taken as they are, NaN would mean a ratio of 1 between
trainer and sampler, and -inf the largest ratio there is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_grpo.types import Completion, Group

# A certain token may come out above 0 by the rounding of a float32 softmax; by no more than this, in nats.
ROUNDING = 1e-5


class ImpossibleLogprobs(RuntimeError):
    """The sampler's log-probs are those of no distribution: its weights, or its arithmetic, are broken."""


def first_impossible(logprobs: Sequence[float]) -> int | None:
    """The place of the first log-prob that no distribution has."""
    values = np.asarray(logprobs, dtype=np.float64)
    wrong = np.flatnonzero(~np.isfinite(values) | (values > ROUNDING))
    return int(wrong[0]) if len(wrong) else None


def is_refused(completion: Completion) -> bool:
    return bool(completion.logprobs) and math.isnan(completion.logprobs[0])


def refuse_impossible(groups: Sequence[Group]) -> tuple[list[Group], str | None]:
    """The groups, in which a completion with an impossible log-prob has none at all (NaN); and what a person should be told, or None.

    Raises ImpossibleLogprobs where that leaves no completion.
    """
    found: list[str] = []

    def judged(group: Group, place: int, completion: Completion) -> Completion:
        wrong = first_impossible(completion.logprobs)
        if wrong is None:
            return completion
        found.append(
            f"completion {place} of prompt {group.prompt.number} (row {group.prompt.row} of the data), token {wrong + 1} of "
            f"{len(completion.logprobs)}: {completion.logprobs[wrong]}"
        )
        return replace(completion, logprobs=(math.nan,) * len(completion.logprobs))

    kept = [replace(group, completions=tuple(judged(group, place, one) for place, one in enumerate(group.completions))) for group in groups]
    total = sum(len(group.completions) for group in groups)
    if not found:
        return kept, None
    said = f"{len(found)} of {total} completions have a log-prob that no distribution has (the first: {found[0]})"
    if len(found) == total:
        raise ImpossibleLogprobs(f"{said}. The sampler's weights or its arithmetic are broken.")
    return kept, f"{said}: nothing of them is trained"
