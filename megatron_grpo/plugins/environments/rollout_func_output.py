"""Validation of the return value of a rollout function, and its conversion to completions.

The form is that of TRL's `rollout_func`: a dict of lists with one entry per prompt that the function received. Values that would silently
train something else are refused: a mask under another name, a token without a log-prob, an invalid token ID. docs/rollout_func.md is the
page for users.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import numpy as np

from megatron_grpo.core.rollout.engine import ROUNDING
from megatron_grpo.core.types import Completion, Prompt, TokenSequence
from megatron_grpo.plugins.environments.protocol import find_invalid_columns
from megatron_grpo.run.python_objects import copy_for_user

IDS, PROMPT, LOGPROBS, MASK = "completion_ids", "prompt_ids", "logprobs", "env_mask"
_NOT_MASKS = ("completion_mask", "mask", "tool_mask", "loss_mask", "response_mask", "attention_mask")


class InvalidRolloutOutputError(Exception):
    """Error raised if the return value of a rollout function is invalid. The message completes the sentence `rollout_func NAME ...`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """Request for one completion. The requests of one group are adjacent.

    Args:
        prompt: Prompt as in the data set: a string or chat messages.
        token_ids: Token IDs of the prompt, rendered by the chat template.
        columns: Columns of its row.
        number: Number of the prompt in the run.
        generation: Index of the completion in its group.
        row: Row in the data set.
    """

    prompt: Any
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any]
    number: int
    generation: int
    row: int

    def __str__(self) -> str:
        return f"completion {self.generation} of prompt {self.number} (data-set row {self.row})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """Limits that the output of a rollout function must respect.

    Args:
        vocab_size: Size of the vocabulary; token IDs are below it.
        max_completion_length: Maximum length of a completion in tokens.
        max_model_len: Prompt plus completion, in tokens.
        end_ids: Token IDs that end a completion.
    """

    vocab_size: int
    max_completion_length: int
    max_model_len: int
    end_ids: frozenset[int] = field(default_factory=frozenset)


def completion_requests(prompts: Sequence[Prompt], n: int) -> list[CompletionRequest]:
    """Return the requests for the completions of some prompts, group by group."""
    return [
        CompletionRequest(
            prompt=copy_for_user(prompt.raw),
            token_ids=tuple(prompt.token_ids),
            columns=copy_for_user(dict(prompt.columns)),
            number=prompt.number,
            generation=i,
            row=prompt.row,
        )
        for prompt in prompts
        for i in range(n)
    ]


def convert_completions(
    returned: Any, requests: Sequence[CompletionRequest], limits: TokenLimits, *, version: int, decode: Callable[[Sequence[int]], str]
) -> list[Completion]:
    """Convert the return value of a rollout function to completions.

    Args:
        returned: A dict of lists with one entry per request: `completion_ids`, `logprobs`, and optionally `prompt_ids`, `env_mask` and
            columns for reward functions.
        limits: Limits of tokens and lengths.
        decode: Decodes token IDs to text.

    Returns:
        One completion per request, in order.

    Raises:
        InvalidRolloutOutputError: A value is missing or invalid.
    """
    columns = _columns(returned, len(requests))
    other_columns = {name: values for name, values in columns.items() if name not in (PROMPT, IDS, LOGPROBS, MASK)}
    openings: dict[int, tuple[int, ...]] = {}
    completions = []
    for i, request in enumerate(requests):
        opening = request.token_ids if PROMPT not in columns else _ids(columns[PROMPT][i], limits, f"{PROMPT} of {request}")
        if openings.setdefault(request.number, opening) != opening:
            raise InvalidRolloutOutputError(f"returned two {PROMPT} for one prompt ({request}); GRPO compares completions of one prompt.")
        answer = _ids(columns[IDS][i], limits, f"{IDS} of {request}")
        mask = _mask(columns[MASK][i], answer, request) if MASK in columns else np.ones(len(answer), dtype=bool)
        logprobs = _logprobs(columns[LOGPROBS][i], mask, request)
        _check_lengths(opening, answer, mask, limits, request)
        completions.append(_completion(opening, answer, mask, logprobs, limits, version=version, text=_text(opening, answer, decode),
                                 columns={name: copy_for_user(values[i]) for name, values in other_columns.items()}))  # fmt: skip
    return completions


def _text(opening: Sequence[int], answer: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    """Decode an answer in the context of its prompt, as vLLM does: some tokenizers drop the space at the beginning of a text."""
    head = decode(opening[-4:])
    text = decode([*opening[-4:], *answer])
    return text[len(head) :] if text.startswith(head) else decode(answer)


def _columns(returned: Any, count: int) -> dict[str, Sequence[Any]]:
    """Return the returned lists by name, after checking that all required ones are present and have `count` entries."""
    if not isinstance(returned, Mapping):
        raise InvalidRolloutOutputError(
            f"returned {_kind(returned)}; expected a dict of lists with {IDS} and {LOGPROBS}, one entry per prompt."
        )
    if fault := find_invalid_columns({name: values for name, values in returned.items() if name not in (PROMPT, IDS, LOGPROBS, MASK)}):
        raise InvalidRolloutOutputError(f"returned {fault}.")
    if missing := [name for name in (IDS, LOGPROBS) if returned.get(name) is None]:
        raise InvalidRolloutOutputError(
            f"returned no {' and no '.join(missing)}: every sampled token is trained against the log-prob it was sampled with."
        )
    if misnamed := [name for name in _NOT_MASKS if name in returned]:
        raise InvalidRolloutOutputError(f"returned {', '.join(misnamed)}, which is not used. Use {MASK}, with 1 for sampled tokens.")
    columns = {name: _listed(values, name) for name, values in returned.items() if values is not None}
    for name, values in columns.items():
        if len(values) != count:
            raise InvalidRolloutOutputError(
                f"returned {len(values)} {name} for {count} prompts; it receives each prompt once per completion."
            )
    return columns


def _listed(values: Any, name: str) -> Sequence[Any]:
    """Return a value as a list; arrays and tensors are converted."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
        raise InvalidRolloutOutputError(f"returned {name} {_kind(values)}; expected a list.")
    return values


def _ids(values: Any, limits: TokenLimits, noun: str) -> tuple[int, ...]:
    listed = _listed(values, noun)
    for index, value in enumerate(listed):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise InvalidRolloutOutputError(
                f"returned {noun} with {value!r} ({type(value).__name__}) at index {index}, which is not a token ID."
            )
        if not 0 <= int(value) < limits.vocab_size:
            raise InvalidRolloutOutputError(
                f"returned {noun} with {value} at index {index}, which is not a token ID (0 to {limits.vocab_size - 1}). Leave padding out."
            )
    return tuple(int(value) for value in listed)


def _mask(values: Any, answer: Sequence[int], request: CompletionRequest) -> np.ndarray:
    listed = _listed(values, f"{MASK} of {request}")
    if len(listed) != len(answer):
        raise InvalidRolloutOutputError(f"returned {len(listed)} values of {MASK} for {len(answer)} {IDS} of {request}; expected one each.")
    if invalid := [value for value in listed if not isinstance(value, (bool, Integral, float)) or value not in (0, 1)]:
        raise InvalidRolloutOutputError(
            f"returned {MASK} of {request} with {invalid[0]!r}; expected 1 for tokens sampled by the model, and 0 for others."
        )
    return np.array([bool(value) for value in listed], dtype=bool)


def _logprobs(values: Any, mask: np.ndarray, request: CompletionRequest) -> np.ndarray:
    """Return float32 log-probs [tokens], 0 where the mask is False."""
    listed = _listed(values, f"{LOGPROBS} of {request}")
    if len(listed) != len(mask):
        expected = f"one each, 0 where {MASK} is 0"
        raise InvalidRolloutOutputError(f"returned {len(listed)} {LOGPROBS} for {len(mask)} {IDS} of {request}; expected {expected}.")
    for index in np.flatnonzero(mask):
        value = listed[index]
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InvalidRolloutOutputError(
                f"returned {LOGPROBS} of {request} with {_kind(value)} at index {index}; expected one number per sampled token."
            )
        if not math.isfinite(value) or float(value) > ROUNDING:
            raise InvalidRolloutOutputError(
                f"returned {LOGPROBS} of {request} with {value} at index {index}; a log-prob is finite and at most 0."
            )
    return np.array([float(value) if sampled else 0.0 for value, sampled in zip(listed, mask, strict=True)], dtype=np.float32)


def _check_lengths(
    opening: Sequence[int], answer: Sequence[int], mask: np.ndarray, limits: TokenLimits, request: CompletionRequest
) -> None:
    if not opening:
        raise InvalidRolloutOutputError(f"returned empty {PROMPT} of {request}; the first token needs a context.")
    if not mask.any():
        raise InvalidRolloutOutputError(f"returned {request} without a sampled token, so it cannot be trained.")
    if len(answer) > limits.max_completion_length:
        raise InvalidRolloutOutputError(
            f"returned {len(answer)} {IDS} of {request}, and max_completion_length is {limits.max_completion_length}."
        )
    if (total := len(opening) + len(answer)) > limits.max_model_len:
        lengths = f"{len(opening)} {PROMPT} and {len(answer)} {IDS} of {request}: {total} tokens"
        raise InvalidRolloutOutputError(f"returned {lengths}, and vllm_max_model_len is {limits.max_model_len}.")


def _completion(
    opening: Sequence[int], answer: Sequence[int], mask: np.ndarray, logprobs: np.ndarray, limits: TokenLimits, *, version: int, text: str,
    columns: Mapping[str, Any],
) -> Completion:  # fmt: skip
    start, total = len(opening), len(opening) + len(answer)
    is_drawn = np.concatenate([np.zeros(start, dtype=bool), mask])
    is_cut = len(answer) >= limits.max_completion_length and answer[-1] not in limits.end_ids
    return Completion(
        sequence=TokenSequence(token_ids=np.array([*opening, *answer], dtype=np.int64), mask=is_drawn),
        logprobs=np.concatenate([np.zeros(start, dtype=np.float32), logprobs]),
        text=text,
        finish_reason="length" if is_cut else "stop",
        versions=((version, start, total),),
        columns=dict(columns),
    )


def _kind(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
