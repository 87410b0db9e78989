"""Teacher models that score the rows of a rollout: one on separate servers, or one on the training ranks.

`teacher.servers` queries the servers, `policy.passes` computes log-probs on the ranks, and `grpo.objectives.teacher_log_ratio` uses the
result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_grpo.core.base.activity import Timers
from megatron_grpo.core.base.errors import CancelledError, ConfigError, NoRolloutServerError, RunError
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.parallel.state import ParallelState
from megatron_grpo.core.policy.memory_offload import PolicyOffloader, Role
from megatron_grpo.core.policy.passes import ModelScorer
from megatron_grpo.core.policy.policy import batch_partitioner
from megatron_grpo.core.trainer.sample_buffer import DistributedRows, move_to_dp_ranks, score_rows, send_to_dp_ranks, without_experts
from megatron_grpo.core.types import RowKey, TokenSequence
from megatron_grpo.core.weights.shape import ModelShape
from megatron_grpo.plugins.teacher.servers import TeacherRequirements, TeacherServerGroup, TokensToScore
from megatron_grpo.run.assemble.policy import decide_sharing, frozen, prepare_model
from megatron_grpo.run.checkpoint.fingerprints import TEACHER
from megatron_grpo.run.config.settings import Config
from megatron_grpo.run.models import config_of_teacher

if TYPE_CHECKING:
    from megatron_grpo.core.train import StopRequest
    from megatron_grpo.run.checkpoint.saving import Checkpoints
    from megatron_grpo.run.inputs import ValidatedInputs

Ask = Callable[[Sequence[TokensToScore]], Sequence[np.ndarray]]
"""Function of a teacher's servers: tokens -> log-probs of each from its `first` on, float32."""

REPORTED = (ConfigError, RunError, NoRolloutServerError, CancelledError)  # errors of rank 0 that are raised on all ranks


def build_served_teacher(
    cfg: Config, inputs: ValidatedInputs, parallel: ParallelState, *, stop: StopRequest, checkpoints: Checkpoints, timers: Timers,
    offload: Collection[Role] = (),
) -> ServedTeacher:  # fmt: skip
    """Connect to the frozen servers that hold the teacher, as `run.plug_ins.BuildTeacher`. Collective."""
    requirements = TeacherRequirements.from_config(cfg, inputs.shape, inputs.tokenizer, inputs.longest_prompt)
    servers = TeacherServerGroup.build(cfg, requirements, stop.should_cancel) if parallel.is_rank_zero else None
    facts = (servers.fingerprint, servers.logprobs) if servers else ()
    teacher = ServedTeacher(parallel, *facts)
    checkpoints.record_fingerprint(TEACHER, teacher.fingerprint)
    return teacher


def build_held_teacher(
    cfg: Config, inputs: ValidatedInputs, parallel: ParallelState, *, stop: StopRequest, checkpoints: Checkpoints, timers: Timers,
    offload: Collection[Role] = (),
) -> LocalTeacher:  # fmt: skip
    """Load a frozen teacher into the training ranks, as `run.plug_ins.BuildTeacher`. Collective."""
    path = inputs.teacher_path
    assert path is not None
    shape = ModelShape.from_pretrained(path)
    teacher_cfg = config_of_teacher(cfg, shape, inputs.shape)
    _, loaded_chunks = prepare_model(teacher_cfg, shape, parallel, model_path=path)
    chunks = frozen(loaded_chunks())
    cut = batch_partitioner(
        parallel,
        chunks[0].config,
        micro_batch_size=cfg.batch.micro_batch_size,
        max_tokens=cfg.batch.max_tokens_per_micro_batch,
        min_saving_ratio=decide_sharing(teacher_cfg, shape, parallel).min_saving_ratio,
    )
    leaves = cfg.grpo.offload_teacher_model or "reference" in offload
    return LocalTeacher(cfg.grpo.teacher_model or str(path), ModelScorer(chunks, parallel, cut), timers, leaves=leaves)


class ServedTeacher:
    """Teacher on separate servers. Every rank has this object; only rank 0 queries the servers."""

    def __init__(self, parallel: ParallelState, gather: Callable[[], str] | None = None, ask: Ask | None = None):
        """Wait for the servers. Collective. An error of `gather` is raised on every rank.

        Args:
            gather: Waits for the servers and returns the teacher's fingerprint. On rank 0 alone.
            ask: Queries the servers for log-probs. On rank 0 alone.
        """
        self._parallel, self._ask = parallel, ask
        self.fingerprint = collectives.run_on_rank_zero(gather or str, REPORTED)  # fingerprint of the teacher, on every rank

    def __call__(self, placed: DistributedRows) -> dict[RowKey, np.ndarray]:
        """Score rows, see `rollouts.Teacher`. The log-probs are of the full softmax at temperature 1. Collective.

        Raises:
            ConfigError, RunError, NoRolloutServerError, CancelledError: Errors of `ask`, raised on every rank.
        """
        local = dict(placed.sequences) if self._parallel.is_model_parallel_src else {}
        sequences = {key: sequence for part in collectives.exchange({0: local}) for key, sequence in part.items()}
        logprobs_by_key: dict[RowKey, np.ndarray] = {}

        def score() -> None:
            logprobs_by_key.update(self._scored(sequences))

        collectives.run_on_rank_zero(score, REPORTED)
        dp_ranks = placed.rows.dp_rank[placed.rows.find_indices(*np.array(list(logprobs_by_key), dtype=np.int64).reshape(-1, 2).T)].tolist()
        return send_to_dp_ranks(
            ((dp_rank, key, values) for dp_rank, (key, values) in zip(dp_ranks, logprobs_by_key.items(), strict=True)), self._parallel
        )

    def _scored(self, sequences: Mapping[RowKey, TokenSequence]) -> dict[RowKey, np.ndarray]:
        assert self._ask is not None  # rank 0 alone asks
        result = {key: np.zeros(len(sequence.token_ids), dtype=np.float32) for key, sequence in sequences.items()}
        to_score, slices = [], []
        for key, sequence in sequences.items():
            for begin, end in sequence.contexts:
                sampled = np.flatnonzero(sequence.mask[begin:end])
                if len(sampled):
                    first, last = int(sampled[0]), int(sampled[-1]) + 1
                    to_score.append(TokensToScore(ids=tuple(sequence.token_ids[begin : begin + last].tolist()), first=first))
                    slices.append((key, slice(begin + first, begin + last)))
        for (key, part), logprobs in zip(slices, self._ask(to_score), strict=True):
            result[key][part] = np.where(sequences[key].mask[part], logprobs, 0.0)
        return result


class LocalTeacher:
    """Frozen teacher model on the training ranks, beside the policy.

    It scores as old log-probs are computed: by the same forward pass, at the sampling temperature and with the sampling masks. Its router
    chooses the experts without replay.
    """

    def __init__(self, name: str, scorer: ModelScorer, timers: Timers, *, leaves: bool):
        """Set up the teacher.

        Args:
            scorer: Computes log-probs of the teacher.
            leaves: Whether the weights are on the host between scorings.
        """
        self._name, self._scorer = name, scorer
        movable: tuple[Role, ...] = ("weights",) if leaves else ()
        self._offloader = PolicyOffloader(self._tensors, movable, scorer.parallel.device, timers)
        self._free_memory()

    def __call__(self, placed: DistributedRows) -> dict[RowKey, np.ndarray]:
        """Score rows, see `rollouts.Teacher`. Collective.

        Raises:
            RunError: A log-prob is not finite. Raised on every rank.
        """
        bare = {key: replace(sequence, experts=None) for key, sequence in placed.sequences.items()}  # recorded experts are the policy's
        scorer, parallel = self._scorer, self._scorer.parallel
        with self._offloader.on_device("weights"):
            scored = score_rows(replace(placed, sequences=bare), score=without_experts(scorer.logprobs), cut=scorer.cut, parallel=parallel)
        self._free_memory()
        num_invalid = sum(not np.isfinite(values).all() for values in scored.logprobs.values())
        if collectives.all_reduce_max(num_invalid):
            raise RunError(f"The teacher ({self._name}) returned log-probs that are not finite.")
        return move_to_dp_ranks(scored.logprobs, scored.rows, placed.rows.dp_rank, parallel)

    def _free_memory(self) -> None:
        if self._offloader.movable:
            self._offloader.offload()

    def _tensors(self) -> Iterator[tuple[Role, torch.Tensor]]:
        for chunk in self._scorer.model:
            yield from (("weights", tensor.data) for tensor in (*chunk.parameters(), *chunk.buffers()))
