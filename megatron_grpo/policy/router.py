"""What the policy's routers do beside Megatron-Core's: a z-loss that depends on the global batch alone, and experts chosen before.

Megatron-Core means its z-loss over the tokens of one micro-batch on one rank, and trusts later divisions to make that right; which ones
happen differs between its versions and layouts. Here it is what every other loss is: a sum over tokens with a weight fixed in advance.

A router must know which micro-batch it routes, and may not remember it: others run between a forward and its recompute. Megatron-Core hands
a padding mask on, recomputed or not, but makes it bool; so the mask has the binary digits of the micro-batch's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_grpo.parallel import collectives
from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.policy.packed_batch import LocalBatch
from megatron_grpo.types import MicroBatch


class RouterPass:
    """One pass of a model, as its routers see it."""

    def __init__(self, *, replays: bool = False, records: bool = False):
        """replays: tokens take the experts that their micro-batch names. records: what the routers chose is kept (`recorded`)."""
        self.replays, self.records = replays, records
        self.batches: Mapping[int, LocalBatch] = {}  # by number
        self.in_forward = -1  # the number of the micro-batch whose forward runs, where none is recomputed
        self._recorded: dict[tuple[int, int], torch.Tensor] = {}  # (micro-batch, layer) -> int64 [tokens of the router, k]
        self._counts: torch.Tensor | None = None  # float64 [3], see `metrics`

    def choose(self, scores: torch.Tensor, own: torch.Tensor, router: PolicyRouter, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores, experts) [t, k] of tokens of a micro-batch whose router would take the experts `own`."""
        if self.records:
            self._recorded[number, router.place] = own
        if not self.replays:
            return scores.gather(1, own), own
        given = self.batches[number].experts.get(router.place)
        forced = torch.full_like(own, -1) if given is None else router.own_share(given).long()
        if torch.is_grad_enabled():  # once a token, recomputed or not
            self._count(own, forced, router.copies.double())
        chosen = torch.where(forced[:, :1] >= 0, forced, own)
        return scores.gather(1, chosen), chosen

    def _count(self, own: torch.Tensor, forced: torch.Tensor, copies: torch.Tensor) -> None:
        agreement = (own[:, :, None] == forced[:, None, :]).any(dim=1).double().mean(dim=1)
        counts = torch.stack([torch.ones_like(copies), (forced[:, 0] >= 0).double(), agreement]) @ copies
        self._counts = counts if self._counts is None else self._counts + counts

    def metrics(self, parallel: ParallelState) -> dict[str, float]:
        """Of a pass that trained, over all ranks and layers. Collective; empty where nothing is replayed."""
        if not self.replays:
            return {}
        counts = torch.zeros(3, dtype=torch.float64) if self._counts is None else self._counts
        counts = counts.to(parallel.device)
        tokens, replayed, agreeing = collectives.add_(counts, None).tolist()
        found = {"routing/replayed": replayed / max(tokens, 1)}
        return found | ({"routing/agreement": agreeing / replayed} if replayed else {})

    def recorded(self, micro_batches: Sequence[MicroBatch], parallel: ParallelState, shape: tuple[int, int]) -> list[np.ndarray]:
        """int16 [T, MoE layers, k] of each micro-batch, on every rank of its share. shape: MoE layers of the whole model, k. Collective."""
        found = []
        for micro in micro_batches:
            whole = torch.zeros(micro.num_tokens, *shape, dtype=torch.int32, device=parallel.device)
            held = torch.from_numpy(self.batches[micro.number].held).to(parallel.device)
            if parallel.sequence_parallel:
                held = held.chunk(parallel.tp_size)[parallel.tp_rank]
            if parallel.sequence_parallel or parallel.tp_rank == 0:  # without it all of them have the same tokens
                for layer in range(shape[0]):
                    if (micro.number, layer) in self._recorded:
                        whole[held, layer] = self._recorded[micro.number, layer].int()
            for group in (parallel.tp_group, parallel.cp_group, parallel.pp_group):
                collectives.add_(whole, group)
            found.append(whole.cpu().numpy().astype(np.int16))
        return found


class PolicyRouter(TopKRouter):
    """Megatron's router with another z-loss: coeff / T * sum over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, section 3.3).

    T (`num_routed_tokens`) counts the tokens of the global batch that are no padding; set it before a forward that trains. A token that
    stands for several contexts counts in both as often.
    """

    num_routed_tokens: int = 0
    running: RouterPass
    copies: torch.Tensor  # int64 [t], multiplicity of the tokens that are being routed, and of no others: `routing` sets it

    @property
    def place(self) -> int:
        """Among the layers with experts of the whole model, from 0."""
        return sum(self.config.moe_layer_freq[: self.layer_number - 1])

    def own_share(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """Of this rank's tokens those that its router sees: sequence parallelism cuts them once more."""
        return of_tokens.chunk(self.tp_group.size())[self.tp_group.rank()] if self.config.sequence_parallel else of_tokens

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None):
        """padding_mask: bool [t, bits], the binary digits of one more than the number of the tokens' micro-batch; 0 is padding."""
        # Megatron-Core 0.16 has no mask for the layers that recompute_method block leaves out. They run once, in the forward of now.
        number = self.running.in_forward if padding_mask is None else _number_of(padding_mask)
        is_padding = number < 0  # all of it
        self.copies = logits.new_zeros(len(logits)).long() if is_padding else self.own_share(self.running.batches[number].multiplicity)
        self.router_replay: _Asked | None = None if is_padding else _Asked(self, number)
        try:
            return super().routing(logits, self.copies == 0)
        finally:
            self.router_replay = None
            del self.copies

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """logits [t, experts]."""
        if not self.config.moe_z_loss_coeff or not torch.is_grad_enabled():
            return logits  # scoring, or the first forward of recomputed layers
        per_token = torch.logsumexp(logits.float() if logits.dtype is torch.bfloat16 else logits, dim=-1).square()
        per_token = per_token * self.copies
        # 0 where no sequence of the global batch has a token to compute: then all here is padding.
        return _WithLoss.apply(logits, self.config.moe_z_loss_coeff / max(self.num_routed_tokens, 1) * per_token.sum())

    def _apply_expert_bias(self, routing_map, padding_mask=None) -> None:
        """Does nothing: the bias is part of the policy that samples, so it is not balanced here (see `model`)."""


def _number_of(padding_mask: torch.Tensor) -> int:
    """Of the micro-batch whose tokens these are; -1 where all of them are padding."""
    digits = padding_mask.long()
    return int((digits << torch.arange(digits.shape[1], device=digits.device)).sum(dim=1).max()) - 1


class _Asked:
    """Stands where Megatron-Core asks a RouterReplay of its own: one list for all models of a process, with targets that stay set."""

    def __init__(self, router: PolicyRouter, number: int):
        self.router, self.number = router, number

    def get_replay_topk(self, scores, topk, num_groups, group_topk, compute_topk):
        _, own = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        return self.router.running.choose(scores, own, self.router, self.number)


class _WithLoss(torch.autograd.Function):
    """Passes `x` on, and lets `loss` be minimised as well. Losses are not scaled: float32 and bfloat16 need no loss scale."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, loss: torch.Tensor):
        ctx.like = loss.new_ones(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, ctx.like


def replace_routers(model: torch.nn.Module) -> None:
    for router in routers([model]):
        router.__class__ = PolicyRouter  # re-classed in place: parameters, hooks and sharding stay


def routers(chunks: Sequence[torch.nn.Module]) -> Iterator[PolicyRouter]:
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter))


@contextmanager
def routed(model: Sequence[torch.nn.Module], batches: Sequence[LocalBatch], running: RouterPass) -> Iterator[None]:
    """Around a pass over these micro-batches, which the routers of `model` look up by their number."""
    running.batches = {batch.number: batch for batch in batches}
    mine = list(routers(model))
    for router in mine:
        router.running = running
    try:
        yield
    finally:
        for router in mine:
            del router.running
