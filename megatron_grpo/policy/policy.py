"""The sharded model in training, as the loop sees it: it scores sequences, takes a step, and yields its weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch

from megatron_grpo.base.activity import Timers
from megatron_grpo.batching.prefix_groups import Alignment
from megatron_grpo.batching.split import BatchPartitioner
from megatron_grpo.grpo.loss import GrpoLoss
from megatron_grpo.grpo.metrics import combine, finish
from megatron_grpo.parallel import collectives
from megatron_grpo.parallel.layout import sequence_alignment
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.policy import bad_gradient_search, passes, sharded_state
from megatron_grpo.policy.guard import Gradient, GradientCheck, SkipCounter, SkippedStep
from megatron_grpo.policy.hf_export import MegatronToHF
from megatron_grpo.policy.memory_offload import Part, PolicyOffloader, Role, tensors_of
from megatron_grpo.policy.optimizer import Trainable, gradient_norm, own_norm, reload_main_params
from megatron_grpo.policy.passes import ModelScorer
from megatron_grpo.policy.reference import Reference
from megatron_grpo.policy.router import routers
from megatron_grpo.policy.step_loss import StepLoss
from megatron_grpo.types import GlobalBatch, RowKey, TrainingMicroBatch
from megatron_grpo.weights.buckets import NO_VERSION, WeightUpdate
from megatron_grpo.weights.vision_towers import MEGATRON as TOWER


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedStep:
    """What one optimizer step says of itself. logprobs: of this share's rows, at the trained positions; empty off the last stage."""

    metrics: dict[str, float]
    logprobs: Mapping[RowKey, np.ndarray]  # none of a refused step: what it says of its rows may be what was wrong with it
    skipped: str | None = None  # why the optimizer did not act
    refusal: SkippedStep | None = None  # where it was the guard that kept it from acting


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SummedGradient:
    """What is known of a step when its gradient is summed: no weight has moved. logprobs, references: by row, of the rows of this rank's
    share, on ranks of the last stage; empty elsewhere."""

    batch: GlobalBatch
    metrics: Mapping[str, float]
    logprobs: Mapping[RowKey, np.ndarray]
    references: Mapping[RowKey, np.ndarray]


class GradientHooks(Protocol):
    """Looks on while a step is taken. May raise: the run ends, its weights unharmed. Collective."""

    def summed(self, seen: SummedGradient) -> None:
        """The gradient is in the buffers, and nobody has judged it."""

    def judged(self, seen: SummedGradient, refusal: SkippedStep | None) -> None:
        """The guard has spoken, and the optimizer has not acted. Of a refused step the buffers hold nothing that means anything."""


def cut_for(
    parallel: ParallelState,
    megatron: Any,
    *,
    micro_batch_size: int,
    max_tokens: int | None,
    min_saving_ratio: float | None = None,
    rank_multiple: int = 1,
) -> BatchPartitioner:
    """How this layout and this model want batches cut. megatron: Megatron-Core's configuration of the model; rank_multiple: see
    `sequence_alignment`; others: see `BatchPartitioner`."""
    sequence, stream = sequence_alignment(parallel.layout, parallel.sequence_parallel, rank_multiple)
    return BatchPartitioner(
        dp_size=parallel.dp_size,
        micro_batch_size=micro_batch_size,
        alignment=Alignment(sequence=sequence, stream=stream),
        # Megatron-Core's interleaved schedule runs micro-batches in groups of PP.
        multiple=parallel.pp_size if parallel.layout.vpp else 1,
        max_tokens=max_tokens,
        min_saving_ratio=min_saving_ratio,
        # Per token and layer: 24 hidden^2 operations in matrices, 2 * length * hidden in causal attention.
        balance_length=12.0 * megatron.hidden_size,
        # The all-gather dispatcher takes as many tokens from every expert-parallel rank.
        pad_to_longest=parallel.ep_size > 1 and megatron.moe_token_dispatcher_type == "allgather",
    )


class Policy:
    """Every method is collective: all ranks call it, with the same arguments unless it says otherwise."""

    def __init__(
        self,
        model: Trainable,
        scorer: ModelScorer,
        *,
        loss: GrpoLoss,
        reference: Reference | None,
        guard: GradientCheck,
        exchange: MegatronToHF,
        clock: Timers | None = None,
        offload: Collection[Role] = (),
    ):
        """scorer: of the model that trains. reference: None where neither loss nor reward asks for one. clock: told what the parts of a
        step take. offload: what leaves the device while the sampler works."""
        self.chunks, self.wrapped, self.optimizer, self.scheduler = model.chunks, model.wrapped, model.optimizer, model.scheduler
        self.loss, self.reference, self.guard, self.skips = loss, reference, guard, SkipCounter()
        self.entropy = loss.adaptive  # as it is now; None where the coefficient is constant
        self.sums = model.sums
        self.adapters, self.trains_tower = model.adapters, model.trains_tower
        self.scorer, self.parallel, self.cut = scorer, scorer.parallel, scorer.cut
        self.exchange, self.clock = exchange, clock or Timers()
        self.room = PolicyOffloader(partial(tensors_of, self), offload, self.parallel.device, self.clock)

    # ---- training ------------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Of its weights: the number of optimizer steps behind them, counting those in which the optimizer did not act."""
        return self.scheduler.num_steps

    def train_step(self, batch: GlobalBatch, beside: GradientHooks | None = None) -> TrainedStep:
        """One optimizer step on this rank's share of a global batch. beside: is told of it before the optimizer acts.

        A batch in which no token trains (everything filtered) and one that the guard refuses change nothing: no weight, no moment, no count
        of Adam's. The schedule goes on, for its rates belong to steps.
        """
        self.room.require("all")
        with self.clock("ref_logprobs"):
            reference = self._references(batch)
        loss = StepLoss(self.loss, batch, self.scorer, reference, self.entropy)
        for router in routers(self.chunks):
            router.num_routed_tokens = batch.num_computed_tokens
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        routing = self.scorer.router_pass()
        kept = passes.train(self.wrapped, batch.micro_batches, loss, self.parallel, routing)
        metrics = self._reduce_logs([logs for logs, *_ in kept]) | routing.metrics(self.parallel)
        metrics["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        if self.room.movable:
            metrics["memory/given_away_gb"] = self.room.given_bytes / 1e9
        skipped: str | None = "all completions were filtered, nothing was left to train"
        refusal: SkippedStep | None = None
        logprobs = _by_row((micro, values) for _, micro, values in kept)
        if batch.num_loss_tokens > 0:
            own = self.sums.own
            metrics["grad_norm"] = gradient_norm(self.optimizer, float(own), metrics["loss"])
            references = _by_row(zip(batch.micro_batches, reference))
            seen = SummedGradient(batch=batch, metrics=metrics, logprobs=logprobs, references=references)
            if beside is not None:
                beside.summed(seen)
            allowed = self.guard.allows(Gradient(step=batch.step, norm=metrics["grad_norm"]))
            self.skips = self.skips.after(refused=not allowed)
            if not allowed:
                refusal = self._refusal(loss, metrics["grad_norm"], own)
            if beside is not None:
                beside.judged(seen, refusal)
            skipped = refusal.why if refusal else None
            if allowed:
                self.optimizer.step()
                metrics |= self._entropy_moves(metrics)
        metrics["skipped_iterations"] = self.skips.total
        self.scheduler.step(increment=1)
        if self.reference is not None:
            self.reference.after_step(batch.step + 1, self.tensors)
        return TrainedStep(metrics=metrics, logprobs={} if refusal else logprobs, skipped=skipped, refusal=refusal)

    def _entropy_moves(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Once the optimizer has acted: the coefficient of the next step, and what this one's was applied as. Collective."""
        if self.entropy is None or "entropy" not in metrics:
            return {}
        found = collectives.all_reduce_max(metrics["entropy"])  # the very same number on every rank, on either side of the target
        applied, self.entropy = self.entropy.applied, self.entropy.after(found)
        return {"entropy_coef": self.entropy.coef, "entropy_coef/applied": applied}

    def _references(self, batch: GlobalBatch) -> list[np.ndarray]:
        """The reference's log-probs by micro-batch, on ranks of the last stage, if the loss asks for them. Collective."""
        return self.reference.last_stage_logprobs(batch.micro_batches) if self.loss.needs_reference and self.reference else []

    def _refusal(self, loss: StepLoss, norm: float, own: torch.Tensor) -> SkippedStep:
        """Who made the gradient of this norm, which the guard has refused. own: norm of this rank's own part. Collective."""
        why = getattr(self.guard, "refusal", None) or f"the gradient was refused (norm {norm:.4g})"
        finite = math.isfinite(norm)
        ranks = () if finite else bad_gradient_search.ranks_not_finite(own)
        weights = () if finite else bad_gradient_search.weights_not_finite(self.chunks)
        found, more = ((), 0) if weights else bad_gradient_search.search(
            self.wrapped, loss.batch.micro_batches, self._run_alone(loss), self.parallel, references=loss.reference, finite=finite
        )  # fmt: skip
        return SkippedStep(why=why, skips=self.skips, ranks=ranks, weights=weights, culprits=found, more=more)

    def _run_alone(self, loss: StepLoss) -> bad_gradient_search.RunAlone:
        def run_alone(micro: TrainingMicroBatch) -> np.ndarray | None:
            kept = passes.train(self.wrapped, [micro] * self.cut.multiple, loss, self.parallel, self.scorer.router_pass())
            return kept[0][2] if kept else None

        return run_alone

    def each_alone(self, batch: GlobalBatch) -> Iterator[tuple[TrainingMicroBatch, np.ndarray | None, float]]:
        """Every micro-batch of this rank's share by itself: its log-probs, on ranks of the last stage, and the norm of what it adds to this
        rank's gradient. The optimizer does not act. Collective."""
        alone = self._run_alone(StepLoss(self.loss, batch, self.scorer, self._references(batch), self.entropy))
        for micro, logprobs in bad_gradient_search.each_alone(self.wrapped, batch.micro_batches, alone):
            yield micro, logprobs, float(own_norm(self.wrapped))

    def guard_state(self) -> dict[str, Any]:
        """What a checkpoint holds of the guard, its count and a coefficient that moves, as JSON; the same on every rank."""
        state = {"skips": asdict(self.skips), "guard": getattr(self.guard, "state", dict)()}
        return state | ({"entropy": self.entropy.state()} if self.entropy else {})

    def restore_guard(self, state: Mapping[str, Any]) -> None:
        self.skips = SkipCounter(**state["skips"])
        if state["guard"] and (restore := getattr(self.guard, "restore", None)):
            restore(state["guard"])
        self.restore_entropy(state)

    def restore_entropy(self, state: Mapping[str, Any]) -> None:
        """state: of `guard_state`; of a run whose coefficient was constant it says nothing of it."""
        if self.entropy is not None and "entropy" in state:
            self.entropy = self.entropy.restored(state["entropy"])

    def _reduce_logs(self, logs) -> dict[str, float]:
        """Logs of this rank's micro-batches -> the step's metrics, on every rank. Only ranks of the last stage have any."""
        metrics = None
        if self.parallel.is_last_stage:
            mine, group = combine(logs), self.parallel.dp_cp_group
            sums = collectives.add_(torch.stack(list(mine.sums.values())).to(self.parallel.device), group).tolist()
            maxima = collectives.max_(torch.stack(list(mine.maxima.values())).to(self.parallel.device), group).tolist()
            metrics = finish(dict(zip(mine.sums, sums, strict=True)), dict(zip(mine.maxima, maxima, strict=True)))
        return self.parallel.from_last_stage(metrics)

    # ---- weights -------------------------------------------------------------------------------------------------------------

    def updates(self, version: int, *, has_base: bool) -> Iterator[WeightUpdate]:
        """What a sampler needs, one after another, to hold this policy, which is that of `version`.

        has_base: it holds the weights that an adapter stands beside, and a tower that nobody trains.
        """
        with_tower = self.exchange.map.shape.vision is not None and (self.trains_tower or not has_base)
        if self.adapters is None or self.adapters.push == "merged":
            kind: Literal["weights", "merged"] = "weights" if self.adapters is None else "merged"
            yield WeightUpdate(kind=kind, version=version, tensors=self._stream(kind, with_tower=with_tower), moves_tower=with_tower)
        else:
            if not has_base:
                base = self.exchange.stream(self.tensors(), "weights")
                yield WeightUpdate(kind="weights", version=NO_VERSION, tensors=base, moves_tower=with_tower)
            yield WeightUpdate(kind="adapter", version=version, tensors=self.named_adapters(), config=self.adapters.config)

    @contextlib.contextmanager
    def trial(self) -> Iterator[WeightUpdate | None]:
        """Inside, the adapters are far from zero; what a holder of the base must take to agree. None where weights train."""
        if self.adapters is None:
            yield None
            return
        with self.resident("weights"):
            self.tensors()  # complete, before some are put aside
            kept = self.adapters.put_far_from_zero(seed=0)
        try:
            yield list(self.updates(NO_VERSION, has_base=True))[-1]
        finally:
            with self.resident("weights"):
                self.adapters.put_back(kept)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) of every weight, on every rank, as they are now; adapters are added in."""
        return self._stream("weights" if self.adapters is None else "merged", with_tower=True)

    def _stream(self, kind: str, *, with_tower: bool) -> Iterator[tuple[str, torch.Tensor]]:
        mine = self.tensors()
        if self.exchange.map.shape.vision and not with_tower:
            mine, kind = {name: tensor for name, tensor in mine.items() if not name.startswith(TOWER)}, f"{kind} but the tower"
        return self.exchange.stream(mine, kind, **({} if self.adapters is None else {"prepare": self.adapters.merged}))

    def named_adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name of PEFT's files without its prefix, full matrix) of every adapter, on every rank, as they are now."""
        assert self.adapters is not None, "asked for where all weights train"
        self.tensors()  # complete
        return self.adapters.named()

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's parameters under their names in the whole model, complete."""
        self.room.require("weights")
        for chunk in self.wrapped:
            # With overlap_param_gather a step leaves each rank its own share of the new weights; the next forward would fetch the rest.
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        return self.exchange.tensors(self.chunks)

    def sharded_state_dict(self, *, is_loading: bool, with_optimizer: bool = True):
        """What a checkpoint holds of this policy; see `policy.sharded_state`."""
        self.room.require("all")
        self.tensors()  # complete, before they are described
        return sharded_state.sharded_state(self.wrapped, self.optimizer if with_optimizer else None, self.scheduler,
                                           reference=self._saved_reference(), is_loading=is_loading)  # fmt: skip

    def load_sharded_state_dict(self, state, *, with_optimizer: bool = True) -> None:
        optimizer = self.optimizer if with_optimizer else None
        sharded_state.load_state(self.wrapped, optimizer, self.scheduler, state, reference=self._saved_reference())
        if not with_optimizer:
            reload_main_params(self.optimizer, self.wrapped)

    def _saved_reference(self) -> SequenceOf[Any] | None:
        return (self.reference.saved_chunks or None) if self.reference is not None else None

    # ---- room for the sampler ------------------------------------------------------------------------------------------------

    def resident(self, part: Part) -> AbstractContextManager[None]:
        """What the block needs is in the device's memory: the weights, those of the reference besides, or all that a step and a checkpoint
        need. The policy computes only inside such a block, or where it was never asked to make room.

        A save that goes on in the background needs its block until its last byte has been copied.
        """
        return self.room.resident(part)

    def make_room(self, *, keep: Part = "nothing") -> None:
        """The sampler needs the memory now: gives away what `--offload_model` and `--offload_optimizer` say, but for what is kept."""
        self.exchange.forget_memory()
        for chunk in self.chunks:
            if chunk.vision is not None:
                chunk.vision.forget()
        if self.adapters is not None:
            self.adapters.exchange.forget_memory()
        self.room.make(keep=keep)


def _by_row(found: Iterable[tuple[TrainingMicroBatch, np.ndarray]]) -> dict[RowKey, np.ndarray]:
    """Values at the trained positions, [C] of a micro-batch -> of each of its rows."""
    return {row: of_row for micro, values in found for row, of_row in zip(micro.rows, micro.by_sequence(values), strict=True)}
