"""What crosses HTTP between a run and its teacher: tokens, and the log-probs of a model that stays what it is. See `rollout.wire`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_grpo.servers import wire

ROUTE = "/prompt_logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """POST /prompt_logprobs, of a frozen server: one line comes back for each sequence, in the order in which they end."""

    sequences: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]  # of each: the first token whose log-prob is wanted, at least 1

    def fault(self, max_model_len: int, vocab_size: int) -> str | None:
        """What no server of these sizes could do with it, as a sentence. One token is drawn besides, and thrown away."""
        if len(self.first) != len(self.sequences):
            return f"{len(self.first)} first tokens are told for {len(self.sequences)} sequences"
        for ids, first in zip(self.sequences, self.first, strict=True):
            if not 1 <= first < len(ids) < max_model_len:
                return (
                    f"a sequence of {len(ids)} tokens cannot be scored from token {first} on: it has at most {max_model_len - 1} "
                    "(max_model_len - 1) tokens, and the first one has no log-prob"
                )
            if not 0 <= min(ids) <= max(ids) < vocab_size:
                return f"token id {max(ids) if min(ids) >= 0 else min(ids)} is not among the {vocab_size} of the teacher's model"
        return None


def encode_scores(place: int, logprobs: Sequence[float]) -> bytes:
    """A line: log-probs of the sequence at this place of the body, float32."""
    return json.dumps({"place": place, "logprobs": wire.packed(logprobs, "<f4")}).encode() + b"\n"


def decode_scores(line: bytes) -> tuple[int, np.ndarray] | None:
    """None for an empty line. Raises Malformed, also where a line was cut off."""
    if not line.endswith(b"\n"):
        raise wire.Malformed("the stream of log-probs ends in the middle of a line")
    if not line.strip():
        return None
    try:
        form = json.loads(line)
        return int(form["place"]), wire.unpacked(form["logprobs"], "<f4")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise wire.Malformed(f"a line of log-probs is not of the expected form: {error!r}") from error
