"""Completions that are interrupted at a weight sync and continue with the new weights; `PartialGeneration` on an engine in the ranks.

A completion consists of parts, each sampled by one request. The next part has the tokens so far in its prompt, a seed of its own, and the
rest of the length limit. In the ranks, interruptions fall on a number of engine steps, never on a time, so a run is repeatable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import count
from typing import Protocol

import numpy as np

from megatron_grpo.core.arrays import SamplingMask
from megatron_grpo.core.base import activity
from megatron_grpo.core.base.errors import CancelledError
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.rollout.engine import PartialCompletion, SampledTurn, SamplingSettings, make_completion
from megatron_grpo.core.rollout.turns import DONE, GIVES_UP, WAITS, EngineAssignment, Key, request_seed
from megatron_grpo.core.types import Completion, Group, Prompt

# Engine steps between two agreements whether all engines have the groups that the trainer waits for: interruptions are multiples of it.
STEPS_BETWEEN_AGREEMENTS = 16


class StepwiseEngine(Protocol):
    """An engine that samples parts of completions step by step; `rollout.turns.EngineTurnSampler` is one."""

    def submit(self, key: Key, token_ids: Sequence[int], *, seed: int, max_tokens: int, num_sampled: int | None = None) -> None:
        """Request a part.

        Args:
            key: (prompt number, index in its group).
            token_ids: Prompt and tokens so far.
            seed: Seed of the part.
            max_tokens: Maximum number of tokens to sample.
            num_sampled: Number of the last `token_ids` that belong to the completion.
        """

    def poll(self) -> Sequence[tuple[Key, SampledTurn]]:
        """Run one step, and return the parts that ended in it."""

    def interrupt(self) -> Sequence[tuple[Key, SampledTurn]]:
        """Abort all parts, and return what each has sampled."""

    def abort(self) -> None:
        """Abort all parts."""


def part_seed(run_seed: int, prompt_number: int, generation: int, num_sampled: int, *, n: int) -> int:
    """Return the seed of a part, a function of the arguments alone. The first part has the seed of a completion that is not interrupted.

    With one seed for all parts, a part would repeat the random numbers of the one before it.

    Args:
        generation: Index of the completion in its group.
        num_sampled: Tokens of the completion that earlier parts have sampled.
    """
    return request_seed(run_seed, prompt_number, generation, f"part {num_sampled}" if num_sampled else 0, n=n)


def append_part(partial: PartialCompletion | None, key: Key, part: SampledTurn, limit: int) -> PartialCompletion:
    """Return a completion with a further part.

    Args:
        partial: The completion so far; None if this is its first part.
        key: (prompt number, index in its group).
        limit: Maximum number of tokens of the completion.
    """
    begin = 0 if partial is None else len(partial.token_ids)
    tokens, logprobs = np.array(part.token_ids, dtype=np.int64), np.array(part.logprobs, dtype=np.float32)
    finish_reason = "stop" if not part.is_cut else "length" if begin + len(tokens) >= limit else ""
    mask = part.sampling_mask
    if partial is None:
        number, generation = key
        completion = PartialCompletion(
            prompt_number=number, place=generation, token_ids=tokens, logprobs=logprobs, versions=(part.version,), starts=(0,),
            finish_reason=finish_reason,
        )  # fmt: skip
    else:
        completion = replace(
            partial, token_ids=np.concatenate([partial.token_ids, tokens]), logprobs=np.concatenate([partial.logprobs, logprobs]),
            versions=(*partial.versions, part.version), starts=(*partial.starts, begin), finish_reason=finish_reason,
        )  # fmt: skip
        if mask is not None and partial.sampling_mask is not None:
            mask = SamplingMask.joined([partial.sampling_mask, mask])
    completion = replace(completion, text=part.text) if finish_reason and part.text else completion
    return completion if mask is None else replace(completion, mask_offsets=mask.at, mask_ids=mask.ids)


def join_versions(parts: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join consecutive parts of one version.

    Args:
        parts: (weights version, begin, end) of each part.
    """
    result: list[tuple[int, int, int]] = []
    for version, begin, end in parts:
        if result and result[-1][0] == version:
            result[-1] = (version, result[-1][1], end)
        else:
            result.append((version, begin, end))
    return result


class PartialGeneration:
    """Completions of some prompts, in progress on one engine while its methods run. Every rank holds one.

    Attributes:
        version: Version of the weights that sample them.
    """

    def __init__(
        self, parts: StepwiseEngine, sampling: SamplingSettings, *, seed: int, version: int, share: EngineAssignment,
        decode_text: Callable[[Prompt, PartialCompletion], str], should_cancel: Callable[[], bool],
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ):  # fmt: skip
        """Set up the generation.

        Args:
            decode_text: Decodes a completion. Its parts are not decoded one by one, because a character may have bytes of two parts.
            should_cancel: Whether the run cancels what it waits for.
        """
        self._parts, self._sampling, self._seed, self.version, self._share = parts, sampling, seed, version, share
        self._decode_text, self._should_cancel, self._around = decode_text, should_cancel, context
        self._asked: set[int] = set()  # prompt numbers
        self._found: dict[Key, PartialCompletion] = {}

    def begin(self, prompts: Sequence[Prompt], partial: Iterable[PartialCompletion]) -> PartialGeneration:
        """Request the completions of the prompts. Collective.

        Returns:
            This object.
        """
        self._found = {completion.key: completion for completion in self._share.delivered(partial)}
        with self._around():
            self._ask(prompts)
        return self

    def _ask(self, prompts: Sequence[Prompt]) -> None:
        limit, n = self._sampling.max_completion_length, self._sampling.n
        for prompt in prompts:
            if prompt.number in self._asked or not self._share.is_sampled_here(prompt.number):
                continue
            self._asked.add(prompt.number)
            for generation in range(n):
                completion = self._found.get((prompt.number, generation))
                if completion is not None and completion.finish_reason:
                    continue
                tokens = () if completion is None else completion.token_ids.tolist()
                seed = part_seed(self._seed, prompt.number, generation, len(tokens), n=n)
                self._parts.submit(
                    (prompt.number, generation), (*prompt.token_ids, *tokens), seed=seed, max_tokens=limit - len(tokens),
                    num_sampled=len(tokens),
                )  # fmt: skip

    def _take(self, parts: Iterable[tuple[Key, SampledTurn]]) -> None:
        for key, part in parts:
            self._found[key] = append_part(self._found.get(key), key, part, self._sampling.max_completion_length)

    def groups(self, prompts: Sequence[Prompt]) -> list[Group]:
        """Generate until the groups of these prompts are complete, and return them as `Sampler.generate` does. Collective.

        Prompts that were not requested before are requested now. All others continue meanwhile.

        Raises:
            CancelledError: `should_cancel` returned true on some rank.
        """
        n = self._sampling.n
        open_ = {(prompt.number, generation) for prompt in prompts for generation in range(n) if self._share.is_sampled_here(prompt.number)}
        with self._around(), activity.phase("sampling", total=len(open_), unit="completions"):
            self._ask(prompts)
            for step in count():
                if step % STEPS_BETWEEN_AGREEMENTS == 0:
                    open_ -= {key for key in open_ if key in self._found and self._found[key].finish_reason}
                    state = GIVES_UP if self._should_cancel() else WAITS if open_ else DONE
                    worst = collectives.all_reduce_max(state)
                    if worst == GIVES_UP:
                        raise CancelledError
                    if worst == DONE:
                        break
                self._take(self._parts.poll())
        local = [prompt for prompt in prompts if self._share.find_leader(prompt.number) == self._share.rank]
        return [
            Group(prompt=prompt, completions=tuple(self._completion(prompt, self._found[prompt.number, i]) for i in range(n)))
            for prompt in local
        ]

    def _completion(self, prompt: Prompt, partial: PartialCompletion) -> Completion:
        return make_completion(
            prompt.token_ids, partial.token_ids.tolist(), partial.logprobs.tolist(), text=self._decode_text(prompt, partial),
            finish_reason=partial.finish_reason, version=partial.versions[0], spans=join_versions(partial.parts),
            sampling_mask=partial.sampling_mask,
        )  # fmt: skip

    def interrupt(self) -> list[PartialCompletion]:
        """Abort all that is unfinished, and return everything that was sampled, groups that were returned included. Collective.

        Each completion is on one rank. The number of engine steps until here is the same at every repetition of the run.
        """
        with self._around():
            self._take(self._parts.interrupt())
        return self.sampled()

    def sampled(self) -> list[PartialCompletion]:
        """Return what is known without an interruption: on servers parts that have ended, and in the ranks also those still open."""
        return [completion for key, completion in sorted(self._found.items()) if self._share.find_leader(key[0]) == self._share.rank]

    def abort(self) -> None:
        """Abort all that is unfinished, and discard it."""
        with self._around():
            self._parts.abort()
