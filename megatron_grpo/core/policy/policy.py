"""The sharded model in training, as the training loop sees it.

A `Policy` scores sequences (through its `scorer`), takes optimizer steps and streams its weights to the sampler.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch

from megatron_grpo.core.base.activity import Timers
from megatron_grpo.core.batching.prefix_groups import Alignment
from megatron_grpo.core.batching.split import BatchPartitioner
from megatron_grpo.core.grpo.loss import GrpoLoss
from megatron_grpo.core.grpo.metrics import combine, finish
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.parallel.layout import sequence_alignment
from megatron_grpo.core.parallel.state import ParallelState
from megatron_grpo.core.policy import gradient_check as checks
from megatron_grpo.core.policy import passes, sharded_state
from megatron_grpo.core.policy.gradient_check import GradientCheck, GradientStats, SkipCounter, SkippedStep
from megatron_grpo.core.policy.hf_export import MegatronToHF
from megatron_grpo.core.policy.memory_offload import Part, PolicyOffloader, Role, iterate_tensors
from megatron_grpo.core.policy.optimizer import TrainableModel, gradient_norm, own_norm, reload_main_params
from megatron_grpo.core.policy.passes import ModelScorer, StepLoss
from megatron_grpo.core.policy.router import routers
from megatron_grpo.core.types import GlobalBatch, RowKey, TrainingMicroBatch
from megatron_grpo.core.weights.buckets import NO_VERSION, WeightUpdate
from megatron_grpo.core.weights.vision_towers import MEGATRON as TOWER

if TYPE_CHECKING:
    from megatron_grpo.core.policy.reference import Reference


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedStep:
    """Results of one optimizer step.

    Args:
        metrics: The metrics of the step, by name; the same on every rank.
        logprobs: Log-probs of the rows of this data-parallel rank at the trained positions, by row. Empty on ranks that are not on the last
            pipeline stage, and after a step that the gradient check refused, where they may be the numbers that are wrong.
        skipped: Why the optimizer did not act; None if it did.
        skipped_step: Details of the skipped step if the gradient check refused it.
    """

    metrics: dict[str, float]
    logprobs: Mapping[RowKey, np.ndarray]
    skipped: str | None = None
    skipped_step: SkippedStep | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReducedGradient:
    """A step whose gradient has been summed over all ranks and whose weights have not been updated.

    Args:
        batch: The global batch of the step.
        metrics: The metrics of the step so far, by name; the same on every rank.
        logprobs: Log-probs of the rows of this data-parallel rank, by row, on ranks of the last pipeline stage; empty elsewhere.
        references: The reference's log-probs of the same rows, as `logprobs`; empty if the loss has no reference.
    """

    batch: GlobalBatch
    metrics: Mapping[str, float]
    logprobs: Mapping[RowKey, np.ndarray]
    references: Mapping[RowKey, np.ndarray]


class GradientHooks(Protocol):
    """Hooks called during a training step. Collective.

    A hook may raise: this stops the run before the optimizer updates any weight.
    """

    def on_gradients_reduced(self, gradient: ReducedGradient) -> None:
        """Run after the gradient has been summed into the buffers and before the gradient check.

        Args:
            gradient: The batch with its metrics and log-probs.
        """

    def on_pre_optimizer_step(self, gradient: ReducedGradient, skipped_step: SkippedStep | None) -> None:
        """Run after the gradient check and before the optimizer acts.

        Args:
            gradient: The same object that `on_gradients_reduced` received.
            skipped_step: Why the step is skipped; None if it is taken. If it is skipped, the gradient buffers hold no meaningful values.
        """


def batch_partitioner(
    parallel: ParallelState,
    megatron: Any,
    *,
    micro_batch_size: int,
    max_tokens: int | None,
    min_saving_ratio: float | None = None,
    rank_multiple: int = 1,
) -> BatchPartitioner:
    """Return the partitioner that cuts batches as this layout and this model need it.

    Args:
        micro_batch_size: Completions per micro-batch.
        max_tokens: Token budget per micro-batch; see `BatchPartitioner`.
        min_saving_ratio: Least share of tokens that a shared prefix must save; see `BatchPartitioner`.
        rank_multiple: Multiple of the tokens that one rank computes; see `sequence_alignment`.
    """
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
    """The model that trains: optimizer steps, weight streams, checkpoint state and memory offload.

    Every method is collective: all ranks call it, with the same arguments unless its docstring says otherwise.

    Args:
        scorer: Scorer of the same model.
        reference: The reference model; None if neither the loss nor a reward needs one.
        gradient_check: Check that decides before each optimizer step whether the gradient may be used.
    """

    def __init__(
        self,
        model: TrainableModel,
        scorer: ModelScorer,
        *,
        loss: GrpoLoss,
        reference: Reference | None,
        gradient_check: GradientCheck,
        exchange: MegatronToHF,
        timers: Timers | None = None,
        offload: Collection[Role] = (),
    ):
        self.chunks, self.wrapped, self.optimizer, self.scheduler = model.chunks, model.wrapped, model.optimizer, model.scheduler
        self.loss, self.reference, self.gradient_check, self.skips = loss, reference, gradient_check, SkipCounter()
        self.entropy = loss.adaptive  # current state of the adaptive coefficient; None if the coefficient is constant
        self.sums = model.sums
        self.adapters, self.trains_tower = model.adapters, model.trains_tower
        self.scorer, self.parallel, self.cut = scorer, scorer.parallel, scorer.cut
        self.exchange, self.timers = exchange, timers or Timers()
        self.offloader = PolicyOffloader(partial(iterate_tensors, self), offload, self.parallel.device, self.timers)

    # ---- training ------------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the weights: the number of optimizer steps so far, skipped steps included."""
        return self.scheduler.num_steps

    def train_step(self, batch: GlobalBatch, hooks: GradientHooks | None = None) -> TrainedStep:
        """Take one optimizer step on this rank's share of a global batch.

        A batch without trained tokens (everything filtered) and a batch whose gradient is refused change no weight, no moment and no step
        count of Adam. The learning-rate schedule advances all the same, because its rates belong to steps.

        Args:
            batch: The micro-batches of this data-parallel rank, with token weights fixed over the whole step.
            hooks: Hooks that run before the optimizer acts.

        Returns:
            The metrics of the step, the log-probs of its rows, and why it was skipped if it was.

        Raises:
            RuntimeError: If part of the policy's memory is offloaded.
        """
        self.offloader.require("all")
        with self.timers("ref_logprobs"):
            reference = self._references(batch)
        loss = StepLoss(self.loss, batch, self.scorer, reference, self.entropy)
        for router in routers(self.chunks):
            router.num_routed_tokens = batch.num_computed_tokens
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        routing = self.scorer.router_pass()
        results = passes.train(self.wrapped, batch.micro_batches, loss, self.parallel, routing)
        metrics = self._reduce_logs([logs for logs, *_ in results]) | routing.metrics(self.parallel)
        metrics["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        if self.offloader.movable:
            metrics["memory/offloaded_gb"] = self.offloader.offloaded_bytes / 1e9
        skipped: str | None = "all completions were filtered, no token is trained"
        skipped_step: SkippedStep | None = None
        logprobs = _by_row((micro, values) for _, micro, values in results)
        if batch.num_loss_tokens > 0:
            local_sum = self.sums.own
            metrics["grad_norm"] = gradient_norm(self.optimizer, float(local_sum), metrics["loss"])
            references = _by_row(zip(batch.micro_batches, reference))
            gradient = ReducedGradient(batch=batch, metrics=metrics, logprobs=logprobs, references=references)
            if hooks is not None:
                hooks.on_gradients_reduced(gradient)
            allowed = self.gradient_check.allows(GradientStats(step=batch.step, norm=metrics["grad_norm"]))
            self.skips = self.skips.after(is_skipped=not allowed)
            if not allowed:
                skipped_step = self._refusal(loss, metrics["grad_norm"], local_sum)
            if hooks is not None:
                hooks.on_pre_optimizer_step(gradient, skipped_step)
            skipped = skipped_step.why if skipped_step else None
            if allowed:
                self.optimizer.step()
                metrics |= self._entropy_moves(metrics)
        metrics["skipped_iterations"] = self.skips.total
        self.scheduler.step(increment=1)
        if self.reference is not None:
            self.reference.after_step(batch.step + 1, self.tensors)
        return TrainedStep(metrics=metrics, logprobs={} if skipped_step else logprobs, skipped=skipped, skipped_step=skipped_step)

    def _entropy_moves(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Update the adaptive entropy coefficient after a step. Collective.

        Returns the next step's coefficient and the one that this step applied, as metrics.
        """
        if self.entropy is None or "entropy" not in metrics:
            return {}
        entropy = collectives.all_reduce_max(metrics["entropy"])  # one number for all ranks, so that all are on the same side of the target
        applied, self.entropy = self.entropy.applied, self.entropy.after(entropy)
        return {"entropy_coef": self.entropy.coef, "entropy_coef/applied": applied}

    def _references(self, batch: GlobalBatch) -> list[np.ndarray]:
        """Return the reference's log-probs by micro-batch, float32 [C], on ranks of the last stage. Collective.

        The list is empty on other stages, and everywhere if the loss does not use a reference.
        """
        return self.reference.last_stage_logprobs(batch.micro_batches) if self.loss.needs_reference and self.reference else []

    def _refusal(self, loss: StepLoss, norm: float, local_sum: torch.Tensor) -> SkippedStep:
        """Find the origin of a gradient that the gradient check refused. Collective.

        Args:
            local_sum: Norm of this rank's own gradient, before any sum over ranks.
        """
        reason = getattr(self.gradient_check, "reason", None) or f"the gradient was rejected (norm {norm:.4g})"
        finite = math.isfinite(norm)
        ranks = () if finite else checks.ranks_not_finite(local_sum)
        weights = () if finite else checks.weights_not_finite(self.chunks)
        bad_micro_batches, num_more = ((), 0) if weights else checks.find_bad_micro_batches(
            self.wrapped, loss.batch.micro_batches, self._run_alone(loss), self.parallel, references=loss.reference, finite=finite
        )  # fmt: skip
        return SkippedStep(why=reason, skips=self.skips, ranks=ranks, weights=weights, bad_micro_batches=bad_micro_batches, more=num_more)

    def _run_alone(self, loss: StepLoss) -> checks.RunAlone:
        def run_alone(micro: TrainingMicroBatch) -> np.ndarray | None:
            results = passes.train(self.wrapped, [micro] * self.cut.multiple, loss, self.parallel, self.scorer.router_pass())
            return results[0][2] if results else None

        return run_alone

    def each_alone(self, batch: GlobalBatch) -> Iterator[tuple[TrainingMicroBatch, np.ndarray | None, float]]:
        """Run every micro-batch of this rank's share by itself. Collective.

        The optimizer does not act.

        Yields:
            The micro-batch; its log-probs, float32 [C], on ranks of the last stage and None elsewhere; and the norm of the gradient that it
            adds on this rank.
        """
        run_alone = self._run_alone(StepLoss(self.loss, batch, self.scorer, self._references(batch), self.entropy))
        for micro, logprobs in checks.each_alone(self.wrapped, batch.micro_batches, run_alone):
            yield micro, logprobs, float(own_norm(self.wrapped))

    def gradient_check_state(self) -> dict[str, Any]:
        """Return the state of the gradient check for a checkpoint, as JSON; the same on every rank.

        It holds the counts of skipped steps, what the check remembers, and the adaptive entropy coefficient if there is one.
        """
        state = {"skips": asdict(self.skips), "guard": getattr(self.gradient_check, "state", dict)()}
        return state | ({"entropy": self.entropy.state()} if self.entropy else {})

    def restore_gradient_check(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the gradient check and the adaptive entropy coefficient from `gradient_check_state()`.

        Args:
            state: State from `gradient_check_state()`.
        """
        self.skips = SkipCounter(**state["skips"])
        if state["guard"] and (restore := getattr(self.gradient_check, "restore", None)):
            restore(state["guard"])
        self.restore_entropy(state)

    def restore_entropy(self, state: Mapping[str, Any]) -> None:
        """Restore the adaptive entropy coefficient from `gradient_check_state()`.

        Does nothing if the saved run or this one uses a constant coefficient.

        Args:
            state: State from `gradient_check_state()`.
        """
        if self.entropy is not None and "entropy" in state:
            self.entropy = self.entropy.restored(state["entropy"])

    def _reduce_logs(self, logs) -> dict[str, float]:
        """Reduce the logs of this rank's micro-batches to the metrics of the step, on every rank. Collective.

        Only ranks of the last stage have logs.
        """
        metrics = None
        if self.parallel.is_last_stage:
            local, group = combine(logs), self.parallel.dp_cp_group
            sums = collectives.add_(torch.stack(list(local.sums.values())).to(self.parallel.device), group).tolist()
            maxima = collectives.max_(torch.stack(list(local.maxima.values())).to(self.parallel.device), group).tolist()
            metrics = finish(dict(zip(local.sums, sums, strict=True)), dict(zip(local.maxima, maxima, strict=True)))
        return self.parallel.from_last_stage(metrics)

    # ---- weights -------------------------------------------------------------------------------------------------------------

    def updates(self, version: int, *, has_base: bool) -> Iterator[WeightUpdate]:
        """Yield the weight updates that a sampler needs to hold this policy.

        Args:
            has_base: Whether the sampler already holds the weights that do not change: the base weights of an adapter, and a frozen vision
                tower.
        """
        with_tower = self.exchange.map.shape.vision is not None and (self.trains_tower or not has_base)
        if self.adapters is None or self.adapters.adapter_sync == "merged":
            kind: Literal["weights", "merged"] = "weights" if self.adapters is None else "merged"
            tensors = self._stream(kind, with_tower=with_tower, in_slices=True)
            yield WeightUpdate(kind=kind, version=version, tensors=tensors, moves_tower=with_tower)
        else:
            if not has_base:
                base = self.exchange.stream(self.tensors(), "weights", in_slices=True)
                yield WeightUpdate(kind="weights", version=NO_VERSION, tensors=base, moves_tower=with_tower)
            yield WeightUpdate(kind="adapter", version=version, tensors=self.named_adapters(), config=self.adapters.config)

    @contextlib.contextmanager
    def trial(self) -> Iterator[WeightUpdate | None]:
        """Set the adapters to values far from zero inside the block, to test that a sampler applies them.

        Yields the weight update that a sampler which holds the base must load to agree with this policy; None if there are no adapters. The
        adapters get their own values back at the end.
        """
        if self.adapters is None:
            yield None
            return
        with self.on_device("weights"):
            self.tensors()  # gathers all parameters before the adapters are saved
            saved = self.adapters.randomize(seed=0)
        try:
            yield list(self.updates(NO_VERSION, has_base=True))[-1]
        finally:
            with self.on_device("weights"):
                self.adapters.restore(saved)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, full tensor) of every weight, on every rank, with adapters merged."""
        return self._stream("weights" if self.adapters is None else "merged", with_tower=True)

    def _stream(self, kind: str, *, with_tower: bool, in_slices: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        local = self.tensors()
        if self.exchange.map.shape.vision and not with_tower:
            local, kind = {name: tensor for name, tensor in local.items() if not name.startswith(TOWER)}, f"{kind} but the tower"
        prepare = {} if self.adapters is None else {"prepare": self.adapters.merged}
        return self.exchange.stream(local, kind, in_slices=in_slices, **prepare)

    def named_adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full matrix) of every adapter, on every rank, with current values.

        Names are those of PEFT's files without their prefix.
        """
        assert self.adapters is not None, "named_adapters() needs tuner_type lora"
        self.tensors()  # gathers all parameters
        return self.adapters.named()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters by their names in the whole model, all of them up to date.

        Raises:
            RuntimeError: If the weights are offloaded.
        """
        self.offloader.require("weights")
        for chunk in self.wrapped:
            # With overlap_param_gather a step leaves each rank its own share of the new weights; the next forward would gather the rest.
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        return self.exchange.tensors(self.chunks)

    def sharded_state_dict(self, *, is_loading: bool, with_optimizer: bool = True):
        """Return what a checkpoint holds of this policy; see `policy.sharded_state`.

        Args:
            is_loading: Describe where to load to, instead of what to save.

        Raises:
            RuntimeError: If part of the policy's memory is offloaded.
        """
        self.offloader.require("all")
        self.tensors()  # gathers all parameters before they are described
        return sharded_state.sharded_state(self.wrapped, self.optimizer if with_optimizer else None, self.scheduler,
                                           reference=self._saved_reference(), is_loading=is_loading)  # fmt: skip

    def load_sharded_state_dict(self, state: dict[str, Any], *, with_optimizer: bool = True) -> None:
        """Load what was read into the state of `sharded_state_dict(is_loading=True)`.

        Args:
            state: The sharded state dict after loading.
            with_optimizer: Load the optimizer's state. If False, its main weights are set to the loaded weights of the model.
        """
        optimizer = self.optimizer if with_optimizer else None
        sharded_state.load_state(self.wrapped, optimizer, self.scheduler, state, reference=self._saved_reference())
        if not with_optimizer:
            reload_main_params(self.optimizer, self.wrapped)

    def _saved_reference(self) -> Sequence[Any] | None:
        return (self.reference.saved_chunks or None) if self.reference is not None else None

    # ---- memory offload ------------------------------------------------------------------------------------------------------

    def on_device(self, part: Part) -> AbstractContextManager[None]:
        """Keep what the block needs in the device's memory.

        The policy computes only inside such a block, unless nothing was ever offloaded. A save that continues in the background needs
        its block until its last byte has been copied.

        Args:
            part: "weights"; "reference" for the weights and those of the reference; or "all", which an optimizer step and a checkpoint
                need.
        """
        return self.offloader.on_device(part)

    def free_memory(self, *, keep: Part = "nothing") -> None:
        """Free device memory for the sampler: offload what `--offload_model` and `--offload_optimizer` name.

        Raises:
            RuntimeError: Inside a `on_device` block that needs more than `keep`.
        """
        self.exchange.forget_memory()
        for chunk in self.chunks:
            if chunk.vision is not None:
                chunk.vision.forget()
        if self.adapters is not None:
            self.adapters.exchange.forget_memory()
        self.offloader.offload(keep=keep)


def _by_row(results: Iterable[tuple[TrainingMicroBatch, np.ndarray]]) -> dict[RowKey, np.ndarray]:
    """Split values at the trained positions, [C] per micro-batch, by row."""
    return {row: row_values for micro, values in results for row, row_values in zip(micro.rows, micro.by_sequence(values), strict=True)}
