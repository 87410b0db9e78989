"""Interfaces of a rollout engine: `Sampler` generates completions, `WeightReceiver` holds the weights. Independent of vLLM.

The module also holds the settings of one round of sampling and the seed of one prompt. Every engine must agree on both, so that a run is
repeatable whatever the number of engines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from megatron_grpo.core.arrays import SamplingMask
from megatron_grpo.core.rollout.sampling_mask import list_sampling_fields, max_mask_tokens, samples_from_part
from megatron_grpo.core.settings import RolloutConfig
from megatron_grpo.core.types import Completion, Group, Image, Prompt, TokenSequence
from megatron_grpo.core.weights.buckets import WeightUpdate

# Completion i of a prompt is sampled with the prompt's seed + i (vLLM's rule), so the seeds of prompts are this far apart.
SEEDS_PER_PROMPT = 1024
# The log-prob of a token with probability 1 may exceed 0 by the rounding of a float32 softmax; by no more than this, in nats.
ROUNDING = 1e-5


class WeightSyncError(RuntimeError):
    """Error of an engine whose weights are not those of the trainer. Sampling on would train on another policy's data."""


class ReceiverChangedError(Exception):
    """Loss of the weight receiver, with no weights on the remaining servers. Raised on every rank.

    Restart the weight update from its beginning.
    """


class WeightsLostError(Exception):
    """Loss of the weights on every server during sampling. Raised on every rank.

    After the next weight update, the interrupted request continues from where it was.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """Sampling parameters of one round of generation.

    Log-probs are those of the distribution that tokens are sampled from: after temperature, min-p, top-k and top-p.

    Args:
        n: Completions per prompt.
        max_completion_length: Maximum length of a completion in tokens.
        temperature: Temperature; 0 is greedy.
        top_k: Top-k; 0 is off.
        min_p: Fraction of the most likely token's probability; 0 is off.
        returns_sampling_mask: Whether to return each token's sampling mask: what top_k, top_p, min_p and a grammar left; needs top_k.
        more: Further fields of vLLM's SamplingParams, as in JSON.
        stop_token_ids: Token IDs that end a completion, in addition to the model's end-of-text IDs.
    """

    n: int
    max_completion_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    returns_sampling_mask: bool = False
    stop: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, cfg: RolloutConfig, *, num_generations: int) -> SamplingSettings:
        """Build the settings from the rollout configuration.

        Args:
            num_generations: Completions per prompt.
        """
        return cls(n=num_generations, max_completion_length=cfg.max_completion_length, temperature=cfg.temperature, top_p=cfg.top_p,
                   top_k=max_mask_tokens(cfg), min_p=cfg.min_p, returns_sampling_mask=samples_from_part(cfg),
                   more=list_sampling_fields(cfg), stop=tuple(cfg.stop),
                   stop_token_ids=tuple(cfg.stop_token_ids))  # fmt: skip

    def greedy(self) -> SamplingSettings:
        """Return settings for one completion per prompt that takes the most likely token at each position."""
        return SamplingSettings(n=1, max_completion_length=self.max_completion_length, temperature=0.0, more=self.more, stop=self.stop,
                                stop_token_ids=self.stop_token_ids)  # fmt: skip


def prompt_seed(run_seed: int, prompt_number: int, n: int) -> int:
    """Return the seed of a prompt's first completion, a function of the three arguments alone.

    The seed is below 2**32, because torch's CPU generator ignores higher bits. No two of 4 million successive prompts share a seed (n <=
    1024).
    """
    offset = int.from_bytes(hashlib.blake2b(str(run_seed).encode(), digest_size=4).digest(), "big")
    gap = SEEDS_PER_PROMPT * -(-n // SEEDS_PER_PROMPT)
    return (offset + prompt_number * gap) % 2**32


def make_completion(
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    text: str,
    finish_reason: str,
    version: int,
    spans: Sequence[tuple[int, int, int]] = (),
    experts: np.ndarray | None = None,
    images: tuple[tuple[int, Image], ...] = (),
    sampling_mask: SamplingMask | None = None,
) -> Completion:
    """Build the completion for one answer to one prompt.

    Args:
        prompt_ids: Token IDs of the prompt.
        token_ids: Sampled token IDs of the answer.
        logprobs: The sampler's log-prob of each answer token, in nats.
        spans: (weights version, begin, end) of its stretches, as indices into `token_ids`, if several versions sampled it.
        experts: int16 [T, MoE layers, k], experts that the sampler chose for prompt and answer; None if not recorded.
        images: (index in the sequence, image) of each image in the prompt.
        sampling_mask: Sampling mask of the answer tokens; None without filtering.

    Raises:
        ValueError: `token_ids` and `logprobs` differ in length.
    """
    if len(token_ids) != len(logprobs):
        raise ValueError(f"{len(logprobs)} log-probs for {len(token_ids)} tokens")
    opening = len(prompt_ids)
    tokens = np.array([*prompt_ids, *token_ids], dtype=np.int64)
    values = np.zeros(len(tokens), dtype=np.float32)
    values[opening:] = logprobs
    return Completion(
        sequence=TokenSequence(
            token_ids=tokens,
            mask=np.arange(len(tokens)) >= opening,
            images=images,
            experts=experts,
            mask_offsets=None if sampling_mask is None else sampling_mask.at,
            mask_ids=None if sampling_mask is None else sampling_mask.ids,
        ),
        logprobs=values,
        text=text,
        finish_reason=finish_reason,
        versions=tuple((sampled_by, opening + begin, opening + end) for sampled_by, begin, end in spans)
        or ((version, opening, len(tokens)),),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """One sampled turn of an episode.

    Args:
        token_ids: Token IDs, including the one that ended it.
        is_cut: Whether it was truncated at max_tokens.
        version: Version of the weights.
        sampling_mask: The sampling mask, where it is returned.
        text: Text of the completion that it ends, from rollout servers.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_cut: bool
    version: int
    sampling_mask: SamplingMask | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialCompletion:
    """Sampled tokens of a completion that was interrupted by a weight sync, or that has ended before its group was complete.

    It consists of parts, each sampled by one request: a later part has the earlier ones in its prompt, and computes them anew.

    Args:
        place: Index in its group.
        token_ids: Token IDs, int64 [n]; without the prompt.
        logprobs: Log-prob of each token, float32 [n]; of each token by the weights that sampled it.
        versions: Weights version of each part, ascending.
        starts: Index of the first token of each part.
        finish_reason: "stop" or "length"; empty while it is unfinished.
        mask_offsets: Sampling mask of the n tokens, as in `TokenSequence`.
        text: Text of an ended completion from rollout servers; elsewhere it is made from the tokens.
    """

    prompt_number: int
    place: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: tuple[int, ...]
    starts: tuple[int, ...]
    finish_reason: str = ""
    mask_offsets: np.ndarray | None = None
    mask_ids: np.ndarray | None = None
    text: str = ""

    @property
    def key(self) -> tuple[int, int]:
        """(prompt number, index in its group)."""
        return self.prompt_number, self.place

    @property
    def sampling_mask(self) -> SamplingMask | None:
        """Sampling mask of its tokens, or None without filtering."""
        return None if self.mask_offsets is None or self.mask_ids is None else SamplingMask(self.mask_offsets, self.mask_ids)

    @property
    def parts(self) -> tuple[tuple[int, int, int], ...]:
        """(weights version, begin, end) of each part, as indices of its tokens."""
        return tuple(zip(self.versions, self.starts, (*self.starts[1:], len(self.token_ids)), strict=True))

    def num_sampled_by(self, version: int) -> int:
        """Return the number of its tokens that a version sampled."""
        return sum(end - begin for sampled_by, begin, end in self.parts if sampled_by == version)


class Sampler(Protocol):
    """Source of completions. Every rank of the trainer holds one instance and calls it at the same points of the program.

    A sampler that can stop in the middle of a request, because the run was asked to stop and has no time left for it, has an attribute
    `should_cancel: Callable[[], bool]`. It is set once, before the first request. Where it returns true on a rank that still waits for
    completions, `generate`, `GenerationFuture.groups` and `GenerationFuture.wait` without a limit raise CancelledError within seconds, on
    every rank.
    """

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        """Generate `sampling.n` completions for each prompt. Collective over all ranks.

        Each group is complete and on one rank. A rank's groups keep the order of the prompts. Each prompt derives its own seed
        (`prompt_seed`), so a group depends neither on the number of engines that share the work nor on the rank that receives it.

        Args:
            prompts: Prompts, the same on every rank.
            sampling: Sampling parameters, the same on every rank.
            seed: Seed of the run, the same on every rank.

        Returns:
            The groups whose rewards this rank computes.

        Raises:
            ConfigError: A prompt and its completion cannot fit.
            WeightSyncError: The engine holds no weights.
            WeightsLostError: The engine lost its weights during generation.
            CancelledError: `should_cancel` returned true on a rank that waited.
        """

    def wake_up(self) -> AbstractContextManager[None]:
        """Return a context manager for `generate`: the engine takes the memory that it samples with, and releases it at the end."""


class GenerationFuture(Protocol):
    """Prompts whose completions are generated while the trainer does something else. Every rank holds one instance."""

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing is in progress. Collective.

        Args:
            seconds: Maximum time to wait, in seconds; None waits without a limit.

        Returns:
            Whether nothing is in progress any more, the same on every rank.

        Raises:
            CancelledError: Without a limit, `should_cancel` returned true on a rank that waited.
        """

    def groups(self) -> list[Group]:
        """Wait for the completions and return what `Sampler.generate` would have returned. Collective.

        Raises what `generate` raises, on every rank. After WeightsLostError it may be called again once there are weights, which may be
        newer; the remaining completions are then sampled with those.
        """

    def drop(self) -> None:
        """Abort what is in progress and discard the completions. Collective."""

    @property
    def seconds(self) -> float:
        """Time from the start to the last completion in seconds, measured on rank 0. Known once there is nothing to wait for."""


class BackgroundSampler(Sampler, Protocol):
    """A sampler that needs nothing of the trainer's ranks while it generates, so it can sample while they train."""

    def begin(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> GenerationFuture:
        """Start `generate` with the weights that the sampler holds now, and return at once. Collective.

        No weight update may arrive while completions are in progress (`WeightReceiver.load_weights`): a completion has one version.

        Args:
            prompts: As in `generate`.
            sampling: As in `generate`.
            seed: As in `generate`.
        """


class InterruptibleSampler(Sampler, Protocol):
    """A sampler whose completions can be interrupted, and can continue with other weights.

    The tokens so far become part of the prompt of the next request, and their keys and values are computed anew, so every token has one
    version, and its log-prob is that of one set of weights.
    """

    def resume(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int, partial: Sequence[PartialCompletion]) -> Any:
        """Request the completions of the prompts, and return before any is generated. Collective.

        Earlier prompts go first; later ones use the slots that these leave free.

        Args:
            prompts: Prompts, the same on every rank.
            sampling: As in `generate`.
            seed: As in `generate`.
            partial: Parts of their completions that were sampled. Each is on one rank, on whichever.

        Returns:
            The completions in progress: `plugins.partial_rollouts.engine.PartialGeneration`.
        """


class WeightReceiver(Protocol):
    """Holder of one version of the weights. It loads updates, and scores sequences so that the trainer can verify the weights."""

    @property
    def version(self) -> int:
        """Version of the weights that it samples with; NO_VERSION if it has none.

        It has none while it sleeps without weights, while a base waits for its adapter, during a trial update, and after a failed update.
        """

    @property
    def has_base(self) -> bool:
        """Whether it holds the base weights that an adapter of this run is added to. The same on every rank.

        These are the weights of the checkpoint, which it read itself or took in an update of kind "weights".
        """

    @property
    def dtype(self) -> str:
        """Compute dtype: "float32" or "bfloat16"."""

    def prepare(self) -> bool:
        """Make sure that the receivers of the next update are reachable. Called before every update. Collective over all ranks.

        Returns:
            Whether some receivers are new. A new one has not yet been seen to take an adapter.

        Raises:
            NoRolloutServerError: No server is reachable.
            CancelledError: As in `generate`.
        """

    def load_weights(self, update: WeightUpdate) -> None:
        """Replace the weights by an update, and hold the update's version from then on.

        An update of all weights also replaces an earlier adapter; an adapter replaces the previous adapter. Nearly all tensors of a layer
        are held until the layer is complete, so memory stays bounded if tensors arrive layer by layer.

        Its tensors are whole, unless the receiver has an attribute `takes_slices` that is true: then those that are larger than the rest
        of a bucket are `TensorSlice` objects, and no more than two buckets are in memory.

        Args:
            update: Weights or adapter, with their version.

        Raises:
            WeightSyncError: The update did not arrive complete, or does not fit.
            ReceiverChangedError: The receiver was lost on the way.
        """

    def probes(self) -> list[TokenSequence]:
        """Return single-context sequences to score after an update, the same on every rank and at every call.

        For a vision-language model, some of them contain an image.
        """

    def scores(self, sequences: Sequence[TokenSequence]) -> Mapping[str, list[list[float]]]:
        """Score sequences with the weights that it holds, at temperature 1.

        The last token of each sequence is computed as in sampling, reading the prefix cache; the others never come from a cache.

        Args:
            sequences: Single-context sequences.

        Returns:
            For each engine that this rank reports for, by its name: log p(token t | tokens before t) for t = 1, 2, ... of each sequence, in
            nats.

        Raises:
            ReceiverChangedError: The receiver was lost on the way.
        """


class Engine(Sampler, WeightReceiver, Protocol):
    """Sampler and weight receiver in one."""

    def close(self) -> None:
        """Free the engine. The trainer's process groups stay."""
