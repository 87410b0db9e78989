"""What is left of the vocabulary where top_k, top_p and min_p cut it: how vLLM says it, and what must be true of it.

vLLM is asked for the log-probs of more words than may be left; of those that were left out it says -inf. No torch and no vLLM: servers and
those who ask them read it too.
"""

from __future__ import annotations

import numpy as np

from megatron_grpo.base.errors import RunError
from megatron_grpo.types import Kept
from megatron_grpo.types import Sequence as Tokens

# vLLM keeps every word that is as likely as the last of the top_k. So many of these travel besides; of more (logits that were rounded to
# bfloat16 may be equal) the first ones do, and the token counts as drawn among them: `whole_or_cut`.
TIES = 8


class WrongKept(RunError):
    """The sampler did not say what it left of the vocabulary, or what cannot be. The trainer's softmax would be another one's."""


def num_asked(top_k: int, vocab_size: int) -> int:
    """Words of a position whose log-probs vLLM is asked for, besides the token's own."""
    return min(top_k + TIES, vocab_size)


def whole_or_cut(ids: np.ndarray, logprobs: np.ndarray, vocab_size: int) -> tuple[np.ndarray, Kept]:
    """What vLLM told of n tokens -> (float32 [n]: each one's log-prob, what it was drawn among).

    ids, logprobs: [n, 1 + words]; the drawn token first, then the likeliest words, it among them or not; -inf was left out. A set that may
    be larger than what was told is taken for what was told, and the log-prob is the one given that: log p - log(sum of p).
    """
    is_left = logprobs > -np.inf
    is_cut = is_left[:, 1:].all(axis=1) & (ids.shape[1] - 1 < vocab_size)
    is_left[:, 1:] &= ids[:, 1:] != ids[:, :1]  # it stands there already
    is_left[:, 0] = True
    of_cut = np.where(is_left, logprobs, -np.inf).astype(np.float64)
    told = logprobs[:, 0] - np.where(is_cut, np.log(np.exp(of_cut).sum(axis=1)), 0.0)
    at = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(is_left.sum(axis=1))])
    return told.astype(np.float32), Kept(at, ids[is_left].astype(np.int32))


def check(sequence: Tokens, top_k: int) -> None:
    """Each masked token is one of the different words that it was drawn among, no more of them than may travel. Raises WrongKept."""
    try:
        kept = sequence.kept
    except ValueError as error:
        raise WrongKept(f"the sampler does not say of each token of a completion among which words it drew it: {error}.") from error
    if kept is None and not sequence.num_masked:
        return
    if kept is None:
        raise WrongKept(f"the sampler did not say among which words it drew the {sequence.num_masked} tokens of a completion.")
    tokens, counts = sequence.token_ids[sequence.mask], kept.counts
    owners = np.repeat(np.arange(len(tokens)), counts)
    has_itself = np.zeros(len(tokens), dtype=bool)
    has_itself[owners[kept.ids == tokens[owners]]] = True
    most = 1 + top_k + TIES
    num_different = len(np.unique(owners << 32 | kept.ids))
    if not has_itself.all() or counts.max(initial=0) > most or num_different < len(kept.ids):
        place = int(np.argmin(has_itself)) if not has_itself.all() else int(np.argmax(counts))
        raise WrongKept(
            f"the sampler says that it drew token {place} of a completion ({tokens[place]}) among {counts[place]} words: the token itself "
            f"must be one of them, each once, and there are at most {most} with top_k {top_k}."
        )
