"""What a rollout engine is, as the two jobs it has: it answers prompts, and it holds weights. Nothing here knows vLLM.

Also the settings of one round of sampling, and the seed of one prompt: what every engine must agree on for a run to be repeatable
whatever the number of engines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_grpo.config.config import RolloutConfig
from megatron_grpo.config.sampling_mask import is_cut, sampling_fields_of, words_at_most
from megatron_grpo.types import Group, Prompt
from megatron_grpo.types import Sequence as Scored
from megatron_grpo.weights.buckets import WeightUpdate

# Completion i of a prompt is drawn with the prompt's seed + i (vLLM's rule), so prompts are this far apart.
SEEDS_PER_PROMPT = 1024
# A certain token's log-prob may come out above 0 by the rounding of a float32 softmax; by no more than this, in nats.
ROUNDING = 1e-5


class WeightSyncError(RuntimeError):
    """The engine does not hold the weights that the trainer holds. Sampling on would train on another policy's data."""


class ReceiverChangedError(Exception):
    """Who held the weights is not there any more, and who is left holds none: push again, from the beginning. Raised on every rank."""


class WeightsLostError(Exception):
    """Nobody who samples holds weights any more. Once they are pushed again, the same question goes on where it was. On every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How completions are drawn. Log-probs are those of the distribution drawn from: after temperature, min-p, top-k and top-p."""

    n: int  # completions per prompt
    max_completion_length: int  # tokens
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # of the likeliest word's probability; 0 is off
    tells_kept: bool = False  # of each token comes what top_k, top_p, min_p and a grammar left; needs top_k
    stop: tuple[str, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)  # of vLLM's SamplingParams, as JSON has them
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end-of-text ids

    @classmethod
    def of(cls, cfg: RolloutConfig, *, num_generations: int) -> SamplingSettings:
        return cls(n=num_generations, max_completion_length=cfg.max_completion_length, temperature=cfg.temperature, top_p=cfg.top_p,
                   top_k=words_at_most(cfg), min_p=cfg.min_p, tells_kept=is_cut(cfg), more=sampling_fields_of(cfg), stop=tuple(cfg.stop),
                   stop_token_ids=tuple(cfg.stop_token_ids))  # fmt: skip

    def greedy(self) -> SamplingSettings:
        """One completion per prompt, the likeliest token each time."""
        return SamplingSettings(n=1, max_completion_length=self.max_completion_length, temperature=0.0, more=self.more, stop=self.stop,
                                stop_token_ids=self.stop_token_ids)  # fmt: skip


def prompt_seed(run_seed: int, prompt_number: int, n: int) -> int:
    """The seed of one prompt's first completion: a function of the run's seed and the prompt's number alone.

    Below 2**32, because torch's CPU generator ignores higher bits. No two of 4 million successive prompts share a seed (n <= 1024).
    """
    offset = int.from_bytes(hashlib.blake2b(str(run_seed).encode(), digest_size=4).digest(), "big")
    gap = SEEDS_PER_PROMPT * -(-n // SEEDS_PER_PROMPT)
    return (offset + prompt_number * gap) % 2**32


class Sampler(Protocol):
    """Answers prompts. Every rank of the trainer holds one of these objects, and calls it at the same places of the program.

    One that can stop in the middle of a question, because the run was asked to stop and has no time left for it, has an attribute
    `gives_up: Callable[[], bool]`, which is set once, before the first question. Where it is true on some rank that still waits for
    answers, `generate` and a flight's `groups`, and its `wait` without a limit, raise CancelledError within seconds, on every rank.
    """

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        """Collective over all ranks, which pass the same arguments. Returns the groups that this rank is to judge.

        Each group is whole and on one rank; a rank's groups keep the order of the prompts. `seed` is the run's; each prompt derives its own
        (`prompt_seed`), so a group does not depend on how many engines share the work, nor on the rank that it ends on.
        Raises ConfigError where a prompt and its completion cannot fit, WeightSyncError where the engine holds no weights, WeightsLostError
        where it lost them on the way.
        """

    def awake(self) -> AbstractContextManager[None]:
        """Around `generate`: the engine takes the memory it needs to sample, and gives it back."""


class GenerationFuture(Protocol):
    """Prompts that are being answered while the trainer does something else. Every rank holds one of these objects."""

    def wait(self, seconds: float | None = None) -> bool:
        """Until nothing is under way any more, at most so long. Says whether it is so, the same on every rank. Collective."""

    def groups(self) -> list[Group]:
        """What `Sampler.generate` would have returned; waits for it. Collective; raises what `generate` raises, on every rank.

        After WeightsLostError it may be asked again, once there are weights, perhaps newer ones: what is left is answered by those.
        """

    def drop(self) -> None:
        """Nobody wants the answers any more: what is under way ends. Collective."""

    @property
    def seconds(self) -> float:
        """From the beginning to the last answer, as rank 0 saw it. Known once there is nothing to wait for."""


class BackgroundSampler(Sampler, Protocol):
    """A sampler that needs nothing of the trainer's ranks while it answers. It can then sample while they train."""

    def begin(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> GenerationFuture:
        """As `generate`, by the weights that it holds now; returns at once. Collective.

        No update may come while something is under way (`WeightReceiver.take`): a completion has one version.
        """


class WeightReceiver(Protocol):
    """Holds weights of a version, takes updates, and proves what it holds."""

    @property
    def version(self) -> int:
        """The version of the weights it samples with; NO_VERSION when it has none (asleep without weights, a base whose adapter is to come,
        a trial, or after a failed push)."""

    @property
    def has_base(self) -> bool:
        """Whether it holds the weights that an adapter of this run is added to: those of the checkpoint, which it read by itself or took
        in an update of kind "weights". The same on every rank."""

    @property
    def dtype(self) -> str:
        """What it computes in: "float32", "bfloat16"."""

    def prepare(self) -> bool:
        """Comes before every push: whoever is to take it is there afterwards. Whether some of them are new. Collective over all ranks.

        A new one was never seen to take an adapter. Raises NoRolloutServerError; CancelledError, as `generate` does.
        """

    def take(self, update: WeightUpdate) -> None:
        """Holds the update's version from now on. All weights take the place of an earlier adapter too; an adapter that of the one before.
        Raises WeightSyncError, or ReceiverChangedError.

        Nearly all of a layer's tensors are held until the layer is complete, so memory stays bounded when they come layer by layer.
        """

    def probes(self) -> list[Scored]:
        """Sequences of one context to score after a push: the same on every rank and at every call. If the model sees, some show a
        picture."""

    def scores(self, sequences: Sequence[Scored]) -> Mapping[str, list[list[float]]]:
        """Of each engine that this rank speaks for, by its name: log p(token t | tokens before t) at temperature 1, for t = 1, 2, ... of
        each sequence. Raises ReceiverChangedError.

        The last one is computed the way that sampling does, reading the prefix cache; the others never come from a cache.
        """


class Engine(Sampler, WeightReceiver, Protocol):
    """Both jobs in one."""

    def close(self) -> None:
        """Frees the engine. The trainer's process groups stay."""
