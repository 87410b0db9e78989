"""What vLLM is asked, and how its answers are read: by an engine inside the trainer as by one behind HTTP. Written for vLLM 0.32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_grpo.base.errors import ConfigError
from megatron_grpo.config.grammar import FIELD
from megatron_grpo.config.kept import MOST
from megatron_grpo.rollout.engine import SamplingSettings
from megatron_grpo.types import Kept

# vLLM keeps every word that is as likely as the last of the top_k. So many of these travel besides; of more (logits that were rounded to
# bfloat16 may be equal) the first ones do, and the token counts as drawn among them: `whole_or_cut`.
TIES = 8
KEPT_OPTIONS = {"max_logprobs": MOST + TIES}  # of every engine: it may be asked what was left of the vocabulary


def take_logprobs_as_they_come() -> None:
    """In the process that asks an engine, before its first request; calling it again changes nothing.

    vLLM makes Python objects of every word whose log-prob it tells, and spells it: without spelling 0.4 ms a token for 256 words, 25 kB.
    Here a token has two arrays, of the words that were left, itself first, which takes 0.05 ms; or its log-prob alone.
    """
    from vllm.v1.engine import output_processor
    from vllm.v1.engine.logprobs import LogprobsProcessor

    right: Any = LogprobsProcessor
    if output_processor.LogprobsProcessor is not right:
        return

    class AsTheyCome(right):
        @classmethod
        def from_new_request(cls, tokenizer: Any, request: Any) -> Any:
            if not request.sampling_params.flat_logprobs:  # a request that scores
                return right.from_new_request(tokenizer, request)
            made = super().from_new_request(None, request)
            made.logprobs = []
            return made

        def _update_sample_logprobs(self, told: Any) -> None:
            all_ids, all_logprobs, *_ = told
            for row_ids, row in zip(all_ids, all_logprobs, strict=True):
                self.cumulative_logprob += float(row[0])
                if not self.num_logprobs:
                    self.logprobs.append((None, (float(row[0]),)))
                    continue
                is_left = row[: 1 + self.num_logprobs] > -np.inf  # other requests may ask for more
                is_left[0] = True
                here = is_left.nonzero()[0]
                self.logprobs.append((row_ids[here], row[here]))

    processor: Any = output_processor
    processor.LogprobsProcessor = AsTheyCome


def sampling_params(sampling: SamplingSettings, seed: int | None, *, vocab_size: int, **more: Any) -> Any:
    """vLLM's SamplingParams. more: of its own arguments. Raises ValueError for what it does not take."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    asked = dict(sampling.more)
    if isinstance(asked.get("structured_outputs"), Mapping):
        asked["structured_outputs"] = StructuredOutputsParams(**asked["structured_outputs"])
    if bias := asked.get("logit_bias"):
        asked["logit_bias"] = {int(token): float(value) for token, value in bias.items()}  # JSON's keys are words

    return SamplingParams(
        n=sampling.n, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p, seed=seed,
        max_tokens=sampling.max_completion_length, stop=list(sampling.stop), stop_token_ids=list(sampling.stop_token_ids),
        # The sampled token's; and those of the words that may be left, where they are wanted. Flat: see `take_logprobs_as_they_come`.
        logprobs=num_asked(sampling.top_k, vocab_size) if sampling.tells_kept else 0, flat_logprobs=True,
        **asked, **more,
    )  # fmt: skip


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


def sampled_logprobs(output: Any) -> list[float]:
    """One for each token of a completion that has ended by itself. Raises RuntimeError for one that was aborted."""
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a completion with finish_reason {output.finish_reason!r}")
    logprobs = [float(of_words[0]) for _, of_words in output.logprobs]  # the sampled token comes first at each position
    if len(logprobs) != len(output.token_ids):
        raise RuntimeError(f"vLLM returned {len(logprobs)} log-probs for {len(output.token_ids)} tokens")
    return logprobs


def sampled(output: Any, sampling: SamplingSettings, vocab_size: int) -> tuple[list[float], Kept | None]:
    """(as `sampled_logprobs`; what was left of the vocabulary for each token, where that was asked). Raises RuntimeError as that does,
    and ConfigError where a grammar has no way on in the model's vocabulary."""
    if output.finish_reason == "error" and sampling.more.get(FIELD):
        raise ConfigError(
            f"vLLM ended a completion with an error under {FIELD} {sampling.more[FIELD]}: no word of the model's vocabulary may come "
            "next, for its tokenizer cannot write what is asked for; or the log of vLLM has another reason."
        )
    logprobs = sampled_logprobs(output)
    if not sampling.tells_kept:
        return logprobs, None
    form = len(logprobs), 1 + num_asked(sampling.top_k, vocab_size)
    ids, of_words = np.zeros(form, dtype=np.int32), np.full(form, -np.inf, dtype=np.float32)
    for place, (left, values) in enumerate(output.logprobs):
        ids[place, : len(left)], of_words[place, : len(left)] = left, values
    told, kept = whole_or_cut(ids, of_words, vocab_size)
    return told.tolist(), kept


def scoring_requests(ids: Sequence[int]) -> list[tuple[Sequence[int], Any]]:
    """The two requests that score a sequence, for `scores`: tokens, in the long form, and parameters.

    Prompt log-probs never read the prefix cache, so alone they could not tell a stale one; sampling does, so the last token is scored by
    a request of its own.
    """
    from vllm import SamplingParams

    whole = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    last = SamplingParams(temperature=0.0, max_tokens=1, logprob_token_ids=[ids[-1]], detokenize=False)
    return [(ids, whole), (ids[:-1], last)]


def scores(ids: Sequence[int], fresh: Any, cached: Any) -> list[float]:
    """log p of each token after the first, from the answers to `scoring_requests`."""
    logprobs = [position[token].logprob for position, token in zip(fresh.prompt_logprobs[1:-1], ids[1:-1], strict=True)]
    return [*logprobs, cached.outputs[0].logprobs[0][ids[-1]].logprob]


def whole_request() -> Any:
    """Parameters that score a whole sequence in one request, which never reads the prefix cache."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)


def whole_scores(ids: Sequence[int], output: Any) -> list[float]:
    """log p of each token after the first, from the answer to `whole_request`. Raises RuntimeError where vLLM scored other tokens."""
    flat = output.prompt_logprobs
    if list(flat.token_ids) != list(ids[1:]):
        raise RuntimeError(f"vLLM scored {len(flat.token_ids)} tokens of a sequence of {len(ids)}, or others than it was given")
    return list(flat.logprobs)
