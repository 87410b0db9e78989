"""What trainer and engine both score after a push: the same token sequences on every rank, at every call, whatever engine it is."""

from __future__ import annotations

from typing import Any

import numpy as np

BLOCK = 32  # tokens: the largest block of the prefix cache
LENGTH = 2 * BLOCK + 2  # two full blocks, then the token that is read through the cache
NUM_PROBES = 4


def probe_sequences(tokenizer: Any, *, vocab_size: int, max_model_len: int) -> list[tuple[int, ...]]:
    """Ordinary tokens at random. vocab_size: of the model; a tokenizer may know more words, or fewer."""
    special = set(tokenizer.all_special_ids)
    ordinary = np.array([token for token in range(min(len(tokenizer), vocab_size)) if token not in special])
    # One position is left for the token that vLLM always generates.
    length = min(LENGTH, max_model_len - 1)
    return [tuple(row) for row in np.random.default_rng(0).choice(ordinary, (NUM_PROBES, length)).tolist()]
