"""What vLLM is asked, and how its answers are read: by an engine inside the trainer as by one behind HTTP. Written for vLLM 0.32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_grpo.rollout.engine import SamplingSettings


def sampling_params(sampling: SamplingSettings, seed: int | None, **more: Any) -> Any:
    """vLLM's SamplingParams. more: of its own arguments. Raises ValueError for what it does not take."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    asked = dict(sampling.more)
    if isinstance(asked.get("structured_outputs"), Mapping):
        asked["structured_outputs"] = StructuredOutputsParams(**asked["structured_outputs"])
    if bias := asked.get("logit_bias"):
        asked["logit_bias"] = {int(token): float(value) for token, value in bias.items()}  # JSON's keys are words

    return SamplingParams(
        n=sampling.n, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=seed,
        max_tokens=sampling.max_completion_length, stop=list(sampling.stop), stop_token_ids=list(sampling.stop_token_ids),
        logprobs=0, flat_logprobs=True,  # the sampled token's only, in lists instead of an object a token
        **asked, **more,
    )  # fmt: skip


def sampled_logprobs(output: Any) -> list[float]:
    """One for each token of a completion that has ended by itself. Raises RuntimeError for one that was aborted."""
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a completion with finish_reason {output.finish_reason!r}")
    flat = output.logprobs
    logprobs = [flat.logprobs[start] for start in flat.start_indices]  # the sampled token comes first at each position
    if len(logprobs) != len(output.token_ids):
        raise RuntimeError(f"vLLM returned {len(logprobs)} log-probs for {len(output.token_ids)} tokens")
    return logprobs


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
