"""The policy's routers: a z-loss that depends on the global batch alone, and replay of recorded experts.

Megatron-Core averages its z-loss over the tokens of one micro-batch on one rank and relies on later divisions to correct this; which
divisions happen differs between its versions and layouts. Here the z-loss is like every other loss: a sum over tokens with a weight fixed
in advance.

A router must know which micro-batch it routes and must not remember it, because other micro-batches run between a forward and its
recomputation. Megatron-Core passes a padding mask on, recomputed or not, but converts it to bool; so the mask holds the binary digits of
the micro-batch's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter

from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.parallel.state import ParallelState
from megatron_grpo.core.policy.packed_batch import LocalBatch
from megatron_grpo.core.types import MicroBatch

# Megatron-Core 0.16 imports this only with Transformer Engine, and in each forward of a router compares it with None: on a GPU too.
vars(moe_utils).setdefault("te_general_gemm", None)


class RouterReplayPass:
    """One pass of a model, as its routers use it.

    Args:
        replays: Tokens take the experts that their micro-batch names.
        records: The experts that the routers choose are stored for `recorded`.
    """

    def __init__(self, *, replays: bool = False, records: bool = False):
        self.replays, self.records = replays, records
        self.batches: Mapping[int, LocalBatch] = {}  # by number
        self.in_forward = -1  # the number of the micro-batch whose forward is running (not a recomputation)
        self._recorded: dict[tuple[int, int], torch.Tensor] = {}  # (micro-batch, layer) -> int64 [tokens of the router, k]
        self._counts: torch.Tensor | None = None  # float64 [3], see `metrics`

    def choose(
        self, scores: torch.Tensor, chosen_now: torch.Tensor, router: PolicyRouter, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of the tokens of one micro-batch.

        Args:
            scores: Router scores, [t, experts].
            chosen_now: Experts that the router would choose, int64 [t, k].
            number: Number of the micro-batch.

        Returns:
            The scores of the chosen experts, [t, k]; and the experts, int64 [t, k].
        """
        if self.records:
            self._recorded[number, router.place] = chosen_now
        if not self.replays:
            return scores.gather(1, chosen_now), chosen_now
        recorded = self.batches[number].experts.get(router.place)
        replayed = torch.full_like(chosen_now, -1) if recorded is None else router.own_share(recorded).long()
        if torch.is_grad_enabled():  # once per token, recomputed or not
            self._count(chosen_now, replayed, router.copies.double())
        chosen = torch.where(replayed[:, :1] >= 0, replayed, chosen_now)
        return scores.gather(1, chosen), chosen

    def _count(self, chosen_now: torch.Tensor, replayed: torch.Tensor, copies: torch.Tensor) -> None:
        agreement = (chosen_now[:, :, None] == replayed[:, None, :]).any(dim=1).double().mean(dim=1)
        counts = torch.stack([torch.ones_like(copies), (replayed[:, 0] >= 0).double(), agreement]) @ copies
        self._counts = counts if self._counts is None else self._counts + counts

    def metrics(self, parallel: ParallelState) -> dict[str, float]:
        """Return the replay metrics of a training pass, over all ranks and layers. Collective.

        Empty if nothing is replayed.
        """
        if not self.replays:
            return {}
        counts = torch.zeros(3, dtype=torch.float64) if self._counts is None else self._counts
        counts = counts.to(parallel.device)
        tokens, replayed, agreeing = collectives.add_(counts, None).tolist()
        metrics = {"routing/replayed": replayed / max(tokens, 1)}
        return metrics | ({"routing/agreement": agreeing / replayed} if replayed else {})

    def recorded(self, micro_batches: Sequence[MicroBatch], parallel: ParallelState, shape: tuple[int, int]) -> list[np.ndarray]:
        """Return the recorded experts of each micro-batch, int16 [T, MoE layers, k], on every model-parallel rank. Collective."""
        routes = []
        for micro in micro_batches:
            full = torch.zeros(micro.num_tokens, *shape, dtype=torch.int32, device=parallel.device)
            local_positions = torch.from_numpy(self.batches[micro.number].held).to(parallel.device)
            if parallel.sequence_parallel:
                local_positions = local_positions.chunk(parallel.tp_size)[parallel.tp_rank]
            if parallel.sequence_parallel or parallel.tp_rank == 0:  # without sequence parallelism all TP ranks have the same tokens
                for layer in range(shape[0]):
                    if (micro.number, layer) in self._recorded:
                        full[local_positions, layer] = self._recorded[micro.number, layer].int()
            for group in (parallel.tp_group, parallel.cp_group, parallel.pp_group):
                collectives.add_(full, group)
            routes.append(full.cpu().numpy().astype(np.int16))
        return routes


class PolicyRouter(TopKRouter):
    """Megatron's router with another z-loss, and with replay.

    The z-loss is coeff / T * sum over tokens of logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906, section 3.3). T (`num_routed_tokens`) is the
    number of tokens of the global batch without padding; set it before a forward that trains. A token that several contexts share counts
    once for each of them, in T and in the sum.

    Args:
        copies: Multiplicity of the tokens that are being routed; set only while `routing` runs; int64 [t].
    """

    num_routed_tokens: int = 0
    running: RouterReplayPass
    copies: torch.Tensor

    @property
    def place(self) -> int:
        """Index of this layer among the MoE layers of the whole model, from 0."""
        return sum(self.config.moe_layer_freq[: self.layer_number - 1])

    def own_share(self, token_rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of this rank's tokens that its router processes: sequence parallelism splits them once more.

        Args:
            token_rows: Rows of this rank's tokens, [t, ...].
        """
        return token_rows.chunk(self.tp_group.size())[self.tp_group.rank()] if self.config.sequence_parallel else token_rows

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None):
        """Route tokens.

        Args:
            logits: Router logits, [t, experts].
            padding_mask: Bool [t, bits], the binary digits of the number of the tokens' micro-batch plus one; 0 is padding. None in a layer
                that is not recomputed under recompute_method block.
        """
        # Megatron-Core 0.16 passes no mask to the layers that recompute_method block leaves out. They run once, in the current forward.
        number = self.running.in_forward if padding_mask is None else _find_micro_batch(padding_mask)
        is_padding = number < 0  # all tokens are padding
        self.copies = logits.new_zeros(len(logits)).long() if is_padding else self.own_share(self.running.batches[number].num_references)
        self.router_replay: _ReplayHook | None = None if is_padding else _ReplayHook(self, number)
        try:
            return super().routing(logits, self.copies == 0)
        finally:
            self.router_replay = None
            del self.copies

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Add the z-loss to the backward of the logits.

        Args:
            logits: Router logits, [t, experts].
            padding_mask: Not used.

        Returns:
            The logits, unchanged.
        """
        if not self.config.moe_z_loss_coeff or not torch.is_grad_enabled():
            return logits  # scoring, or the first forward of recomputed layers
        per_token = torch.logsumexp(logits.float() if logits.dtype is torch.bfloat16 else logits, dim=-1).square()
        per_token = per_token * self.copies
        # `num_routed_tokens` is 0 if no sequence of the global batch has a token to compute: then all tokens here are padding.
        return _AddAuxLoss.apply(logits, self.config.moe_z_loss_coeff / max(self.num_routed_tokens, 1) * per_token.sum())

    def _apply_expert_bias(self, routing_map, padding_mask=None) -> None:
        """Do nothing: the bias is part of the policy that samples, so it is not balanced here (see `model_config`)."""


def _find_micro_batch(padding_mask: torch.Tensor) -> int:
    """Return the number of the micro-batch that the tokens belong to; -1 if all of them are padding."""
    digits = padding_mask.long()
    return int((digits << torch.arange(digits.shape[1], device=digits.device)).sum(dim=1).max()) - 1


class _ReplayHook:
    """Replacement for Megatron-Core's RouterReplay, which has one list for all models of a process, with targets that stay set."""

    def __init__(self, router: PolicyRouter, number: int):
        self.router, self.number = router, number

    def get_replay_topk(self, scores, topk, num_groups, group_topk, compute_topk):
        _, chosen = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        return self.router.running.choose(scores, chosen, self.router, self.number)


class _AddAuxLoss(torch.autograd.Function):
    """Return `x` unchanged and add `loss` to what is minimised. Losses are not scaled: float32 and bfloat16 need no loss scale."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, loss: torch.Tensor):
        ctx.like = loss.new_ones(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad, ctx.like


def replace_routers(model: torch.nn.Module) -> None:
    """Turn Megatron's routers of a model into `PolicyRouter`s, in place: parameters, hooks and sharding stay.

    Args:
        model: Model chunk; changed in place.
    """
    for router in routers([model]):
        router.__class__ = PolicyRouter


def routers(chunks: Sequence[torch.nn.Module]) -> Iterator[PolicyRouter]:
    """Yield all routers of the model chunks."""
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter))


@contextmanager
def routers_replay(model: Sequence[torch.nn.Module], batches: Sequence[LocalBatch], running: RouterReplayPass) -> Iterator[None]:
    """Give the routers of a model the micro-batches of a pass, inside the block.

    Args:
        batches: This rank's parts of the micro-batches; routers find them by number.
    """
    running.batches = {batch.number: batch for batch in batches}
    local_routers = list(routers(model))
    for router in local_routers:
        router.running = running
    try:
        yield
    finally:
        for router in local_routers:
            del router.running
