"""The sharded model in training, as the loop sees it: it scores tokens, takes a step, and streams its weights as Hugging Face has them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megatron_grpo.batching.split import BatchCut, cut_up, filled_up
from megatron_grpo.grpo.entropy import entropy_threshold
from megatron_grpo.grpo.loss import GrpoLoss, LossInputs
from megatron_grpo.grpo.metrics import combine, finish
from megatron_grpo.parallel.context import sum_over_context
from megatron_grpo.parallel.layout import sequence_alignment
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.policy import pipeline, sharded_state
from megatron_grpo.policy.exchange import WeightExchange
from megatron_grpo.policy.router import routers
from megatron_grpo.policy.stream import LocalBatch
from megatron_grpo.types import AnchoredSample, GlobalBatch, MicroBatch, Sample


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedStep:
    """What one optimizer step says of itself. logprobs: of this rank's rows, at the trained positions; empty off the last stage."""

    metrics: dict[str, float]
    logprobs: Mapping[tuple[int, int], np.ndarray]
    was_skipped: bool


class Policy:
    """Every method is collective: all ranks call it, with the same arguments unless it says otherwise."""

    def __init__(
        self,
        *,
        chunks,
        wrapped,
        optimizer,
        scheduler,
        loss: GrpoLoss,
        reference,
        exchange: WeightExchange,
        parallel: ParallelState,
        micro_batch_size: int,
        max_tokens_per_micro_batch: int | None = None,
        beta: float = 0.0,
        reference_moves: bool = False,
    ):
        """reference: model chunks like `chunks`, or None. reference_moves: it is not the model that the run began with, so it is saved."""
        self.chunks, self.wrapped, self.optimizer, self.scheduler = chunks, wrapped, optimizer, scheduler
        self.loss, self.reference, self.exchange, self.parallel = loss, reference, exchange, parallel
        self.beta, self.reference_moves = beta, reference_moves
        align_sequence, align_stream = sequence_alignment(parallel.layout, parallel.sequence_parallel)
        self.cut = BatchCut(
            dp_rank=parallel.dp_rank,
            dp_size=parallel.dp_size,
            micro_batch_size=micro_batch_size,
            align_sequence=align_sequence,
            align_stream=align_stream,
            # Megatron-Core's interleaved schedule runs micro-batches in groups of PP.
            multiple=parallel.pp_size if parallel.layout.vpp else 1,
            max_tokens=max_tokens_per_micro_batch,
            # Per token and layer: 24 hidden^2 operations in matrices, 2 * length * hidden in causal attention.
            even_length=12.0 * chunks[0].config.hidden_size,
            # The all-gather dispatcher takes as many tokens from every expert-parallel rank.
            even_streams=parallel.ep_size > 1 and chunks[0].config.moe_token_dispatcher_type == "allgather",
        )

    # ---- scoring -------------------------------------------------------------------------------------------------------------

    def score(self, samples: Sequence[Sample], *, model=None, temperature: float | None = None) -> list[np.ndarray]:
        """Log-probs of the trained tokens of each sample, float32 [T], 0 where the loss mask is false. Every rank gets all of them.

        Samples are spread over data-parallel ranks. model: the chunks to ask (default: the policy). temperature: instead of the sampler's.
        """
        if not samples:
            return []
        filled = filled_up(samples, self.cut)
        mine, micro_batches = cut_up(
            [dataclasses.replace(sample, version=0) for sample in filled],  # as if on-policy: no old log-probs are asked for
            [np.zeros(len(sample.token_ids)) for sample in filled],
            self.cut,
            trained_at=0,
        )

        def keep(batch: MicroBatch, local: LocalBatch, logprobs, entropy):
            return logprobs.sum() * 0.0, (batch, self._whole(batch, local, logprobs))

        kept = pipeline.run(model or self.wrapped, micro_batches, keep, self.parallel, with_entropy=False, forward_only=True,
                            temperature=temperature)  # fmt: skip
        values = {}
        if self.parallel.speaks_for_its_rows:
            for rows, (batch, logprobs) in zip(mine, kept, strict=True):
                for place, i in enumerate(rows):
                    values[i] = logprobs[batch.sequence == place]
        scored = [np.zeros(len(sample.token_ids), dtype=np.float32) for sample in samples]
        for found in self.parallel.all_gather_objects(values):
            for i, logprobs in found.items():
                if i < len(samples):
                    scored[i][samples[i].loss_mask] = logprobs
        return scored

    def _whole(self, batch: MicroBatch, local: LocalBatch, values: torch.Tensor) -> np.ndarray:
        """[c] on each context-parallel rank -> [C] on all of them."""
        whole = torch.zeros(len(batch.targets), device=self.parallel.device)
        whole[torch.from_numpy(local.trained).to(whole.device)] = values.detach().float()
        if self.parallel.cp_size > 1:
            dist.all_reduce(whole, group=self.parallel.cp_group)
        return whole.cpu().numpy()

    def score_tokens(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Teacher-forced log-probs at temperature 1 of every token but the first: float32 [len - 1] per sequence."""
        samples = [_bare_sample(np.asarray(tokens, dtype=np.int64)) for tokens in sequences]
        return [scored[1:] for scored in self.score(samples, temperature=1.0)]

    def anchor(self, samples: Sequence[Sample]) -> list[AnchoredSample]:
        """Samples with the log-probs that the current weights give them. The forward-only pass of batching.md section 3."""
        return [sample.anchored(logprobs, "recompute") for sample, logprobs in zip(samples, self.score(samples), strict=True)]

    def kl_to_reference(self, samples: Sequence[Sample]) -> np.ndarray:
        """beta * sum over trained tokens of (log p - log p_ref), float64 [number of samples]: what `kl_in_reward` subtracts."""
        ours, theirs = self.score(samples), self.score(samples, model=self.reference)
        return np.array([self.beta * (a.astype(np.float64) - b).sum() for a, b in zip(ours, theirs, strict=True)])

    # ---- training ------------------------------------------------------------------------------------------------------------

    def train_step(self, batch: GlobalBatch) -> TrainedStep:
        """One optimizer step on this rank's share of a global batch.

        A batch in which no token trains (everything filtered) changes nothing: no gradient, no moment decay.
        """
        reference = self._reference_logprobs(batch) if self.loss.needs_reference else {}
        threshold = self._entropy_threshold(batch) if self.loss.needs_entropy_threshold else None
        for router in routers(self.chunks):
            router.num_routed_tokens = batch.num_computed_tokens
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        kept = pipeline.run(
            self.wrapped,
            batch.micro_batches,
            lambda micro, local, logprobs, entropy: self._loss(batch, micro, local, logprobs, entropy, reference, threshold),
            self.parallel,
            with_entropy=self.loss.needs_entropy,
            forward_only=False,
        )
        metrics = self._reduce_logs([logs for logs, *_ in kept])
        metrics["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        was_skipped = batch.num_loss_tokens == 0
        if not was_skipped:
            _, grad_norm, _ = self.optimizer.step()
            if not np.isfinite(grad_norm):
                raise FloatingPointError(f"the gradient norm is {grad_norm}: these weights are lost; resume from the last checkpoint")
            metrics["grad_norm"] = float(grad_norm)
        self.scheduler.step(increment=1)
        logprobs = {}
        for _, micro, values in kept:
            for place, row in enumerate(micro.rows):
                logprobs[row] = values[micro.sequence == place]
        return TrainedStep(metrics=metrics, logprobs=logprobs, was_skipped=was_skipped)

    def _loss(self, batch: GlobalBatch, micro: MicroBatch, local: LocalBatch, logprobs, entropy, reference, threshold):
        held, device = torch.from_numpy(local.trained), self.parallel.device

        def mine(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array)[held].to(device)

        inputs = LossInputs(
            weights=mine(micro.weights),
            advantages=mine(micro.advantages),
            sampler_logprobs=mine(micro.sampler_logprobs),
            old_logprobs=mine(micro.old_logprobs),
            sequence=mine(micro.sequence),
            num_sequences=micro.num_sequences,
            num_loss_tokens=batch.num_loss_tokens,
        )
        loss, logs = self.loss(
            inputs,
            logprobs=logprobs,
            entropy=entropy,
            ref_logprobs=mine(reference[id(micro)]) if reference else None,
            entropy_threshold=threshold,
            sum_over_context=lambda x: sum_over_context(x, self.parallel.cp_group),
        )
        return loss, (logs, micro, self._whole(micro, local, logprobs))

    def _reference_logprobs(self, batch: GlobalBatch) -> dict[int, np.ndarray]:
        """[C] of each micro-batch, by its id, on ranks of the last stage."""
        return dict(self._forward(self.reference, batch, lambda logprobs, entropy: logprobs, with_entropy=False))

    def _entropy_threshold(self, batch: GlobalBatch) -> float | None:
        """The entropy above which a token of this global batch trains; None off the last stage, where nobody asks."""
        entropies = dict(self._forward(self.wrapped, batch, lambda logprobs, entropy: entropy, with_entropy=True))
        if not self.parallel.is_last_stage:
            return None
        mine = [(entropies[id(micro)], micro.weights > 0) for micro in batch.micro_batches]
        everyone = [pair for pairs in self.parallel.all_gather_objects(mine, self.parallel.dp_group) for pair in pairs]
        return entropy_threshold([values for values, _ in everyone], [mask for _, mask in everyone], self.loss.top_entropy_quantile)

    def _forward(self, model, batch: GlobalBatch, pick, *, with_entropy: bool) -> list[tuple[int, np.ndarray]]:
        return pipeline.run(
            model,
            batch.micro_batches,
            lambda micro, local, logprobs, entropy: (
                logprobs.sum() * 0.0,
                (id(micro), self._whole(micro, local, pick(logprobs, entropy))),
            ),
            self.parallel,
            with_entropy=with_entropy,
            forward_only=True,
        )

    def _reduce_logs(self, logs) -> dict[str, float]:
        """Logs of this rank's micro-batches -> the step's metrics, on every rank. Only ranks of the last stage have any."""
        metrics = None
        if self.parallel.is_last_stage:
            mine = combine(logs)
            names, sums = list(mine.sums), torch.stack(list(mine.sums.values())).to(self.parallel.device)
            tops, maxima = list(mine.maxima), torch.stack(list(mine.maxima.values())).to(self.parallel.device)
            dist.all_reduce(sums, group=self.parallel.dp_cp_group)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self.parallel.dp_cp_group)
            metrics = finish(dict(zip(names, sums.tolist(), strict=True)), dict(zip(tops, maxima.tolist(), strict=True)))
        return self.parallel.broadcast_from_last_stage(metrics)

    # ---- weights -------------------------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) of every weight, on every rank, as they are now."""
        self._complete_weights()
        return self.exchange.named_weights(self.chunks)

    def _complete_weights(self) -> None:
        """With overlap_param_gather a step leaves each rank its own share of the new weights; the next forward would fetch the rest."""
        for chunk in self.wrapped:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    @torch.no_grad()
    def move_reference(self, alpha: float) -> None:
        """reference = alpha * policy + (1 - alpha) * reference, weight by weight (TR-DPO, arXiv:2404.09656); 1 copies the policy."""
        self._complete_weights()
        ours = self.exchange.tensors(self.chunks)
        for name, theirs in self.exchange.tensors(self.reference).items():
            theirs.lerp_(ours[name].to(theirs.dtype), alpha)

    def sharded_state_dict(self, *, is_loading: bool):
        """What a checkpoint holds of this policy; see `policy.sharded_state`."""
        self._complete_weights()
        moving = self.reference if self.reference_moves else None
        return sharded_state.sharded_state(self.wrapped, self.optimizer, self.scheduler, reference=moving, is_loading=is_loading)

    def load_sharded_state_dict(self, state) -> None:
        moving = self.reference if self.reference_moves else None
        sharded_state.load_state(self.wrapped, self.optimizer, self.scheduler, state, reference=moving)

    @contextlib.contextmanager
    def resident(self):
        """The policy is in its device's memory inside this block. It always is, unless it was asked to make room for the sampler."""
        yield


def _bare_sample(token_ids: np.ndarray) -> Sample:
    mask = np.ones(len(token_ids), dtype=bool)
    mask[0] = False
    return Sample(
        row=0, rollout=0, prompt_number=0, version=0, token_ids=token_ids, loss_mask=mask,
        sampler_logprobs=np.zeros(len(token_ids), dtype=np.float32), advantage=0.0, is_dead=False, is_truncated=False,
    )  # fmt: skip
