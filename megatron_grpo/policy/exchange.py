"""Weights between this rank's Megatron shards and full Hugging Face tensors. `weights` does the arithmetic; here is who holds what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from megatron_grpo.parallel.state import ParallelState
from megatron_grpo.weights.mapping import WeightMap, with_global_numbers
from megatron_grpo.weights.names import Cut


@dataclass(frozen=True, slots=True)
class _Owned:
    """A parameter of the whole model and the coordinates that hold it. `ep_rank` is 0 for a parameter that every expert rank holds."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pp_rank: int
    ep_rank: int
    order: int  # place on its stage


class WeightExchange:
    """Loads, and streams out, the weights of the model chunks of one pipeline."""

    def __init__(self, weight_map: WeightMap, parallel: ParallelState):
        self.map, self.parallel = weight_map, parallel

    def tensors(self, chunks: Sequence[GPTModel]) -> dict[str, torch.Tensor]:
        """This rank's parameters (and the buffers that a checkpoint holds) under their names in the whole model."""
        found = {}
        for chunk in chunks:
            first_layer = min((layer.layer_number for layer in chunk.decoder.layers), default=1) - 1
            num_experts = chunk.config.num_moe_experts or 0
            first_expert = self.parallel.ep_rank * (num_experts // self.parallel.ep_size)
            for local, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
                name = with_global_numbers(local, first_layer=first_layer, first_expert=first_expert)
                if isinstance(tensor, torch.nn.Parameter) or name in self._buffers():
                    found[name] = tensor
        return found

    def _buffers(self) -> frozenset[str]:
        return frozenset(name for name in self.map.megatron_names() if self.map.kind(name).is_buffer)

    @torch.no_grad()
    def load(self, chunks: Sequence[GPTModel], read: Callable[[str], torch.Tensor]) -> None:
        """Fills every parameter from a checkpoint; `read` gives the full Hugging Face tensor of a name."""
        p = self.parallel
        for name, tensor in self.tensors(chunks).items():
            self._mark(name, tensor)
            shard = self.map.load(
                name, read, tp_rank=p.tp_rank, tp_size=p.tp_size, expert_tp_rank=p.etp_rank, expert_tp_size=p.etp_size
            )
            if shard.shape != tensor.shape:
                raise ValueError(f"{name}: Megatron holds {tuple(tensor.shape)} here, the checkpoint's share is {tuple(shard.shape)}")
            tensor.copy_(shard)

    def _mark(self, name: str, tensor: torch.Tensor) -> None:
        """Says how a parameter is shared, where Megatron's initialisation, which is skipped, would have said it."""
        kind = self.map.kind(name)
        if kind.cut is not Cut.REPLICATED:
            # Without it the gradient norm counts the shards of the first TP rank only.
            tensor.tensor_model_parallel, tensor.partition_dim, tensor.partition_stride = True, int(kind.cut is Cut.ROW), 1
        if kind.is_expert:
            # Megatron says so only where EP > 1; with EP 1 and ETP below TP, experts have a data-parallel group of their own as well.
            tensor.allreduce = False

    @torch.no_grad()
    def named_weights(self, chunks: Sequence[GPTModel]) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) of every weight, on every rank, one Megatron parameter at a time.

        Collective. A yielded tensor is the receiver's: it is no view of a live parameter. Peak memory is one full parameter.
        """
        return self.stream(self.tensors(chunks))

    @torch.no_grad()
    def stream(self, mine: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """As `named_weights`, for tensors that are sharded as the parameters they are named after: their gradients, say."""
        for owned in self._catalogue(mine):
            shards = self._gather(owned, mine.get(owned.name))
            yield from ((name, tensor.clone()) for name, tensor in self.map.export(owned.name, shards))

    def _catalogue(self, mine: dict[str, torch.Tensor]) -> list[_Owned]:
        """Every exported parameter of the model once, in the same order on every rank."""
        p = self.parallel
        here = []
        for order, (name, tensor) in enumerate(mine.items()):
            kind = self.map.kind(name)
            if kind.is_exported:
                here.append(_Owned(name, tuple(tensor.shape), tensor.dtype, p.pp_rank, p.ep_rank if kind.is_expert else 0, order))
        over_pp = [owned for rank in p.all_gather_objects(here, p.pp_group) for owned in rank]
        over_both = {owned.name: owned for rank in p.all_gather_objects(over_pp, p.ep_group) for owned in rank}
        return sorted(over_both.values(), key=lambda owned: (owned.pp_rank, owned.ep_rank, owned.order))

    def _gather(self, owned: _Owned, tensor: torch.Tensor | None) -> list[torch.Tensor]:
        """All tensor-parallel shards of one parameter, on every rank: gathered where it lives, then sent over stages and expert ranks."""
        p, kind = self.parallel, self.map.kind(owned.name)
        group = p.etp_group if kind.is_expert else p.tp_group
        # Every rank of the owning stage (and expert rank) takes part in the gather; a replicated parameter is its own only shard.
        holds = p.pp_rank == owned.pp_rank and (not kind.is_expert or p.ep_rank == owned.ep_rank)
        count = 1 if kind.cut is Cut.REPLICATED else group.size()
        shards = [torch.empty(owned.shape, dtype=owned.dtype, device=p.device) for _ in range(count)]
        if holds:
            if count == 1:
                shards = [tensor.detach().clone()]
            else:
                dist.all_gather(shards, tensor.detach().contiguous(), group=group)
        for sender, size, over in ((owned.ep_rank, p.ep_size if kind.is_expert else 1, p.ep_group), (owned.pp_rank, p.pp_size, p.pp_group)):
            if size == 1:
                continue
            is_ep = over is p.ep_group
            if is_ep and p.pp_rank != owned.pp_rank:
                continue  # expert ranks agree inside the owning stage first; then that stage tells the others
            for shard in shards:
                dist.broadcast(shard, src=dist.get_global_rank(over, sender), group=over)
        return shards
