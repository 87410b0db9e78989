"""Partial rollouts: completions that are interrupted at weight syncs and continue with the new weights, and the check of their versions.

Rollouts arrive in order, each at its own sampling step. The prompts of later rollouts are sampled in slots of the engine that are free
while the last long completions of the arriving rollout end. In the trainer's ranks, what is unfinished then is interrupted and kept here
until the next sampling step. Rollout servers continue while the trainer trains, and are interrupted before the next weight sync.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from megatron_grpo.core.base.cleanup import CleanUp
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.rollout.engine import Engine, InterruptibleSampler, PartialCompletion, SamplingSettings, WeightSyncError
from megatron_grpo.core.trainer.weight_sync import BFLOAT16_MEAN, FLOAT32_MAX
from megatron_grpo.core.types import Group, Prompt, TokenSequence
from megatron_grpo.plugins.partial_rollouts.engine import PartialGeneration
from megatron_grpo.run.config.settings import Config

if TYPE_CHECKING:
    from megatron_grpo.core.policy.policy import Policy
    from megatron_grpo.plugins.partial_rollouts.engine import PartialGeneration

logger = logging.getLogger(__name__)
STATS = ("rollout/partial_rows", "rollout/partial_tokens", "rollout/recomputed_tokens", "rollout/ahead_share")


def build_partial_rollouts(cfg: Config, policy: Policy, sampler: Engine) -> PartialRollouts:
    """Build the sampler of a run whose completions are interrupted at weight syncs, as `run.plug_ins.BuildPartialRollouts`."""
    if hasattr(sampler, "partial_generation"):
        sampler.partial_generation = PartialGeneration
    check = VersionCheck(
        policy=policy, count=cfg.rollout.verify_versions, temperature=cfg.rollout.temperature,
        is_low_precision=cfg.model.torch_dtype != "float32" or sampler.dtype != "float32",
    )  # fmt: skip
    in_background = cfg.rollout.vllm_mode == "server"
    return PartialRollouts(cast(InterruptibleSampler, sampler), check=check if check.count else None, in_background=in_background)


class PartialRollouts:
    """A `Sampler` whose completions continue over weight syncs.

    Inside `sampling` it answers from a generation that also samples prompts of later rollouts; elsewhere it is the sampler itself.

    Args:
        check: Check of the tokens' versions; None without one.
        in_background: Whether the sampler needs nothing of the trainer's ranks, so completions continue until `interrupt`.
    """

    def __init__(self, sampler: InterruptibleSampler, *, check: VersionCheck | None = None, in_background: bool = False):
        self._sampler, self._check, self._in_background = sampler, check, in_background
        self._kept: list[PartialCompletion] = []  # of this rank, as of the last `commit` or `interrupt`
        self._found: list[PartialCompletion] = []  # of this rank, after the last interruption
        self._generation: PartialGeneration | None = None
        self._prompts: dict[int, Prompt] = {}  # of the last `sampling`, by number
        self._version = 0  # that the last `sampling` sampled with
        self._first = 0  # number of the first prompt that the next rollout needs
        self._restart: Callable[[], None] = lambda: None
        self._stats: dict[str, float] = dict.fromkeys(STATS, 0.0)  # of the last interruption

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSettings, *, seed: int) -> list[Group]:
        if self._generation is None:
            return self._sampler.generate(prompts, sampling, seed=seed)
        self._prompts |= {prompt.number: prompt for prompt in prompts}
        return self._generation.groups(prompts)

    def wake_up(self) -> AbstractContextManager[None]:
        return self._sampler.wake_up()

    @contextmanager
    def sampling(self, prompts: Sequence[tuple[Prompt, int]], sampling: SamplingSettings, *, seed: int) -> Iterator[None]:
        """Continue and begin the completions of these prompts inside the block, and interrupt them at its end. Collective.

        In the background, they continue after the block until `interrupt`, also if the block ends with an error; a checkpoint that is saved
        then has what was sampled. Elsewhere nothing changes before `commit`, so such a checkpoint has what was there before the block.

        Args:
            prompts: (prompt, oldest version that its tokens may have), in the order in which they are needed. Completions with an older
                token are dropped and sampled anew: prompts that were given back, or a smaller `async_rollout_depth` after a resume.
        """
        oldest, default = {prompt.number: version for prompt, version in prompts}, prompts[0][1]  # later rounds may need other prompts too
        usable = [completion for completion in self._kept if completion.versions[0] >= oldest.get(completion.prompt_number, default)]
        self._prompts = {prompt.number: prompt for prompt, _ in prompts}
        num_dropped = sum(collectives.all_gather_object(len(self._kept) - len(usable)))
        if num_dropped and collectives.rank() == 0:
            logger.warning(
                "%d partial completions are dropped and sampled again: they have tokens that would be older than async_rollout_depth "
                "allows when their rollout is trained.",
                num_dropped,
            )
        generation = self._sampler.resume([prompt for prompt, _ in prompts], sampling, seed=seed, partial=usable)
        self._generation, self._version = generation, generation.version
        with CleanUp(lambda: None if self._in_background else self._close()):
            yield
            if not self._in_background:
                self._found = generation.interrupt()

        def restart() -> None:
            later = [prompt for prompt, _ in prompts if prompt.number >= self._first]
            self._generation = self._sampler.resume(later, sampling, seed=seed, partial=self._found)

        self._restart = restart

    def _close(self) -> None:
        generation, self._generation = self._generation, None
        if generation is not None:
            generation.abort()

    def interrupt(self, *, restarts: bool = False) -> None:
        """Interrupt what is sampled in the background, and keep it for the next `sampling` and for checkpoints. Collective.

        Args:
            restarts: Continue it at once, with the same weights.
        """
        generation, self._generation = self._generation, None
        if generation is not None:
            self._found = generation.interrupt()
            self._kept = self._count(self._first)
            if restarts:
                self._restart()

    def stats(self, first: int) -> dict[str, float]:
        """Return the metrics of the last interruption, and check the versions of tokens that the present weights sampled. Collective.

        Args:
            first: Number of the first prompt that the next rollout needs.

        Raises:
            WeightSyncError: The log-probs of interrupted completions are not those of the weights that sampled them.
        """
        later = self._generation.sampled() if self._generation is not None else self._count(first)
        return self._stats | (self._check(later, self._prompts, self._version) if self._check else {})

    def _count(self, first: int) -> list[PartialCompletion]:
        """Set the metrics of an interruption, and return what it left for later rollouts. Collective."""
        unfinished = [completion for completion in self._found if completion.prompt_number >= first]
        num_sampled = [completion.num_sampled_by(self._version) for completion in self._found]
        counts = np.array([
            len(unfinished), sum(len(completion.token_ids) for completion in unfinished),
            sum(len(completion.token_ids) - num for completion, num in zip(self._found, num_sampled, strict=True) if num),
            sum(completion.num_sampled_by(self._version) for completion in unfinished), sum(num_sampled),
        ])  # fmt: skip
        rows, tokens, recomputed, ahead_tokens, all_tokens = sum(collectives.all_gather_object(counts)).tolist()
        self._stats = dict(zip(STATS, (rows, tokens, recomputed, ahead_tokens / max(1, all_tokens)), strict=True))
        return unfinished

    def commit(self, first: int) -> None:
        """Keep what was sampled for later rollouts, for the next `sampling` and for checkpoints.

        Args:
            first: Number of the first prompt that the next rollout needs.
        """
        sampled = self._kept if self._in_background else self._found
        self._kept, self._found, self._first = [completion for completion in sampled if completion.prompt_number >= first], [], first

    def to_save(self) -> list[PartialCompletion]:
        """Return the partial completions that this rank writes to a checkpoint."""
        return self._kept

    def restore(self, partial: Sequence[PartialCompletion]) -> None:
        """Continue with the partial completions of a checkpoint."""
        self._kept = list(partial)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionCheck:
    """Check that interrupted tokens come from the weights that they name: the policy scores some of them.

    A wrong version, a KV cache that was kept over a weight sync, and parts that were joined wrongly all show here, at the sampling step
    where they occur.

    Args:
        count: Completions to score.
        is_low_precision: Whether the trainer or the sampler is not float32.
    """

    policy: Policy
    count: int
    is_low_precision: bool
    temperature: float

    def __call__(self, partial: Sequence[PartialCompletion], prompts: dict[int, Prompt], version: int) -> dict[str, float]:
        """Compare the sampler's and the policy's log-probs of the tokens that the policy's version sampled. Collective.

        Returns:
            The metrics; none if nothing was sampled by this version.

        Raises:
            WeightSyncError: The log-probs differ too much. Raised on every rank.
        """
        local = {completion.key: completion for completion in partial if completion.num_sampled_by(version)}
        chosen = sorted(key for part in collectives.all_gather_object(list(local)) for key in part)[: self.count]
        gathered = collectives.all_gather_object([local[key] for key in chosen if key in local])
        completions = sorted((completion for part in gathered for completion in part), key=lambda completion: completion.key)
        if not completions:
            return {}
        sequences = [_last_part(completion, prompts[completion.prompt_number], version) for completion in completions]
        with self.policy.on_device("weights"):
            scored = self.policy.scorer.score(sequences)
        logprobs = np.concatenate(
            [completion.logprobs[-sequence.num_masked :] for completion, sequence in zip(completions, sequences, strict=True)]
        )
        policy = np.concatenate([values[sequence.mask] for values, sequence in zip(scored, sequences, strict=True)])
        differences = np.abs(logprobs - policy)
        worst, mean = float(differences.max()), float(differences.mean())
        bound = (BFLOAT16_MEAN if self.is_low_precision else FLOAT32_MAX) * max(1.0, 1 / self.temperature)
        if not (mean if self.is_low_precision else worst) <= bound:  # NaN is not within the bound
            worst_index = np.repeat(range(len(sequences)), [completion.num_masked for completion in sequences])[np.argmax(differences)]
            raise WeightSyncError(
                f"Interrupted completions do not come from the weights of version {version}: their log-probs differ from the policy's by "
                f"{worst:.3g} at most and {mean:.3g} on average over {len(differences)} tokens of {len(completions)} completions, more "
                "than "
                f"{bound:g} {'on average' if self.is_low_precision else 'at a token'} (the largest: prompt "
                f"{completions[worst_index].prompt_number}). The KV "
                "cache was kept over a weight sync, or the parts of a completion were joined wrongly. To go on without the check, use "
                "verify_versions 0."
            )
        return {"sampling/version_error/mean": mean, "sampling/version_error/max": worst}


def _last_part(completion: PartialCompletion, prompt: Prompt, version: int) -> TokenSequence:
    """Return a partial completion as a sequence in which the tokens that a version sampled, the last ones, are scored."""
    token_ids = np.array([*prompt.token_ids, *completion.token_ids.tolist()], dtype=np.int64)
    num_scored = completion.num_sampled_by(version)
    mask, offsets, ids = np.arange(len(token_ids)) >= len(token_ids) - num_scored, None, None
    if completion.sampling_mask is not None:
        part = completion.sampling_mask.take(np.arange(len(completion.token_ids) - num_scored, len(completion.token_ids)))
        offsets, ids = part.at, part.ids
    return TokenSequence(token_ids=token_ids, mask=mask, mask_offsets=offsets, mask_ids=ids)
