"""LoRA on Megatron's parallel linear layers, in every layout (LoRA: arXiv:2106.09685).

A layer remains Megatron's module under the same name, so that loading, weight streams and checkpoints of the base do not change. It gains
one term,
    y += spread(B) (scale * A x)
where a layer that fuses several modules has their A stacked, and each row of B is multiplied with the A of its own module only.
`weights.lora` has names and sizes.

Sharding of the matrices, and what their gradients need (P modules, rank r):
                     lora_a [P*r, in]     lora_b [out, r]      h = A x
  column-parallel    whole                cut as the weight    each rank's rows of B use all of h: its gradient is summed over TP
  row-parallel       cut as the weight    whole                summed over TP
The matrix that is whole on every rank is the *shared* one. Under sequence parallelism a rank has only its own tokens, so its gradient of
the shared matrix is partial; the attribute `sequence_parallel` makes Megatron sum the partial gradients once a step. In experts under
expert tensor parallelism the dispatcher gathers tokens and sums outputs, so nothing is done to h, and the gradient of the shared matrix is
summed in the matrix's own backward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_grpo.core.parallel.autograd import copy_to_ranks
from megatron_grpo.core.policy.hf_export import MegatronToHF
from megatron_grpo.core.policy.model import let_gradients_in
from megatron_grpo.core.weights.adapters import Read, adapter_map, even_sizes, padded, random_adapter_far_from_zero, trimmed
from megatron_grpo.core.weights.lora import (
    AdapterUpdateRequest,
    B,
    LoraSettings,
    Sizes,
    find_module,
    linear_modules,
    own_sizes,
    widest_rank,
)
from megatron_grpo.core.weights.names import ShardSplit

TRAINED, REFERENCE = "lora", "ref"  # prefixes of the matrices: `lora_a` and `lora_b` train, `ref_a` and `ref_b` are frozen


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _LoraSharding:
    """Sharding of a layer's LoRA matrices over ranks."""

    group: Any
    is_column: bool
    is_gated: bool  # the gate rows and the up rows of B are cut separately
    is_expert: bool
    sequence_parallel: bool
    sums_outside: bool  # the dispatcher gathers tokens and sums outputs over `group`


class LoraLinear:
    """Mixin before one of Megatron's parallel linear layers (see `_adapted`), which adds LoRA.

    `Adapters` sets the attributes and registers the matrices.

    Args:
        lora_part: One-hot, the module that a row belongs to; None for one module; [rows, P].
        lora_use: The matrices that are added, TRAINED or REFERENCE; None for neither.
    """

    lora_place: _LoraSharding
    lora_part: torch.Tensor | None
    lora_use: str | None = None
    lora_dropout = 0.0

    def forward(self: Any, x, *args, **kwargs):
        out, bias = super().forward(x, *args, **kwargs)  # type: ignore[misc]  # of the layer that this is mixed into
        return (out if self.lora_use is None else out + self._delta(x, self.lora_use)), bias

    def _delta(self: Any, x, use: str):
        layout, (a, b, scale) = self.lora_place, (getattr(self, f"{use}_{part}") for part in ("a", "b", "scale"))
        is_cut = layout.group.size() > 1
        if is_cut and layout.sums_outside:
            a, b = (copy_to_ranks(a, layout.group), b) if layout.is_column else (a, copy_to_ranks(b, layout.group))
        inner = (F.linear(self._dropped(x), a) * scale).to(x.dtype)
        if is_cut and not layout.sums_outside:
            inner = self._shared_by_ranks(inner)
        return F.linear(inner, self._spread(b))

    def _shared_by_ranks(self: Any, inner):
        layout = self.lora_place
        if layout.is_column and layout.sequence_parallel:
            return gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True, group=layout.group)
        if layout.is_column:
            return copy_to_ranks(inner, layout.group)
        if layout.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(inner, group=layout.group)
        return reduce_from_tensor_model_parallel_region(inner, group=layout.group)

    def _spread(self: Any, b):
        """Put each row's values [rows, r] into the columns of its module's A, [rows, P * r]."""
        return b if self.lora_part is None else (b[:, None] * self.lora_part[:, :, None]).flatten(1)

    def _dropped(self: Any, x):
        if not (self.lora_dropout and self.training):
            return x
        with self._generator():
            return F.dropout(x, self.lora_dropout)

    def _generator(self) -> AbstractContextManager[Any]:
        """Return the random number generator for dropout.

        Ranks that hold the same x must sample the same mask, and ranks that hold different x different masks.
        """
        if self.lora_place.is_expert:
            return get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name())
        is_same = self.lora_place.is_column and not self.lora_place.sequence_parallel
        return nullcontext() if is_same else get_cuda_rng_tracker().fork()

    @torch.no_grad()
    def merged(self: Any) -> torch.Tensor:
        """Return this rank's shard of W + scale * B A.

        No communication is needed: B A is cut as W is.
        """
        delta = self._spread(self.lora_b).float() @ (self.lora_scale[:, None] * self.lora_a.float())
        return (self.weight.float() + delta).to(self.weight.dtype)

    def sharded_state_dict(self: Any, prefix="", sharded_offsets=(), metadata=None):
        """Describe the layer for a checkpoint, with both matrices.

        Megatron would take both matrices for replicated ones, and cuts gate and up separately for `weight` and `bias` only.

        Args:
            sharded_offsets: Offsets of the axes in front, as in Megatron-Core.
        """
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]  # of the layer that this is mixed into
        if not hasattr(self, "lora_a"):
            return state  # only the reference has an adapter here
        cut = {"lora_b": 0} if self.lora_place.is_column else {"lora_a": 1}
        local = make_sharded_tensors_for_checkpoint(
            {"lora_a": self.lora_a, "lora_b": self.lora_b}, prefix, cut, sharded_offsets,
            tp_group=self.lora_place.group, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip
        if self.lora_place.is_gated:
            local[f"{prefix}lora_b"] = apply_swiglu_sharded_factory(local[f"{prefix}lora_b"], sharded_offsets)
        return state | local


@functools.cache
def _adapted(linear: type) -> type:
    return type(f"Lora{linear.__name__}", (LoraLinear, linear), {})


class Adapters:
    """The LoRA adapters of one stage's model chunks. Methods that stream are collective.

    Making one freezes the chunks and adds adapters to their target modules; do this before DDP wraps the chunks.

    Args:
        read: Returns the initial values of an adapter matrix by name.
        adapter_sync: Content of a weight sync: the adapter, or weights with the adapter merged.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        base: MegatronToHF,
        settings: LoraSettings,
        read: Read,
        *,
        base_model: str,
        adapter_sync: AdapterUpdateRequest = "adapter",
    ):
        self.base_model, self.adapter_sync = base_model, adapter_sync
        shape = base.map.shape
        self.chunks, self.base, self.settings = chunks, base, settings
        self.sizes = own_sizes(settings, shape)
        self.exchange = self._make_exchange(settings)
        self._modules: dict[str, list[str]] = {}  # by Megatron linear
        for module in linear_modules(shape):
            self._modules.setdefault(module.megatron, []).append(module.name)
        self.linears: dict[str, Any] = {}  # layers that have matrices, by the name of the Megatron linear
        for chunk in chunks:
            chunk.requires_grad_(False)
        let_gradients_in(chunks)
        self._add(TRAINED, settings, read, self.exchange)
        self._use(TRAINED)

    def keep_reference(self, settings: LoraSettings, read: Read) -> None:
        """Make the base with another adapter the reference, instead of the base alone.

        Args:
            read: Returns the values of an adapter matrix by name.
        """
        self._add(REFERENCE, settings, read, self._make_exchange(settings))

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Turn the chunks into the reference inside the block."""
        self._use(REFERENCE)
        try:
            yield
        finally:
            self._use(TRAINED)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's matrices by their names in the whole model."""
        return self.exchange.tensors(self.chunks)

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full matrix) of every module, on every rank, with current values. Collective.

        Names are those of PEFT's files without their prefix.
        """
        return self.trimmed(self.tensors(), "adapter")

    def trimmed(self, local: dict[str, torch.Tensor], kind: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same as `named` for other tensors that are sharded like the matrices, such as their gradients. Collective.

        Args:
            kind: Name of the kind of stream; see `MegatronToHF.stream`.
        """
        return trimmed(self.exchange.stream(local, kind), self.sizes)

    @property
    def config(self) -> dict[str, Any]:
        """Contents of adapter_config.json."""
        return self.settings.to_peft(
            dict.fromkeys(map(find_module, self.sizes)), self.base_model, is_multimodal=self.base.map.shape.vision is not None
        )

    def merged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a parameter of the base with its adapter merged, if it has one."""
        linear = self._by_weight.get(id(tensor))
        return tensor if linear is None else linear.merged()

    def randomize(self, seed: int) -> dict[str, torch.Tensor]:
        """Set the adapters to values that change every log-prob, to test that a sampler uses them.

        The values are the same in every layout.

        Returns:
            The previous values, for `restore`.
        """
        local = self.tensors()
        saved = {name: tensor.detach().clone() for name, tensor in local.items()}
        read = padded(random_adapter_far_from_zero(self.settings, self.sizes, seed), self.sizes, self._even(self.settings))
        self.restore({name: self._shard(self.exchange, name, read) for name in local})
        return saved

    def restore(self, values: dict[str, torch.Tensor]) -> None:
        """Set the adapters to the values that `randomize` returned."""
        for name, tensor in self.tensors().items():
            tensor.data.copy_(values[name])

    # ---- construction ------------------------------------------------------------------------------------------------------------

    def _add(self, use: str, settings: LoraSettings, read: Read, weights: MegatronToHF) -> None:
        names, padded_sizes = {id(tensor): name for name, tensor in self.base.tensors(self.chunks).items()}, self._even(settings)
        read = padded(read, own_sizes(settings, self.base.map.shape), padded_sizes)
        for module in [module for chunk in self.chunks for module in chunk.modules()]:
            stem = names.get(id(getattr(module, "weight", None)), "").removesuffix(".weight")
            if not any(settings.find_lora_rank(name) for name in self._modules.get(stem, ())):
                continue
            if stem not in self.linears:
                self.linears[stem] = self._adapted(module, stem, weights, padded_sizes)
            linear = self.linears[stem]
            self._register(linear, stem, use, read, weights)
            scales = torch.tensor([settings.compute_lora_scale(module) for module in self._modules[stem]], dtype=torch.float32)
            scale = scales.repeat_interleave(getattr(linear, f"{use}_b").shape[1]).to(linear.weight.device)
            linear.register_buffer(f"{use}_scale", scale, persistent=False)
        self._by_weight = {id(linear.weight): linear for linear in self.linears.values() if hasattr(linear, "lora_a")}

    def _adapted(self, linear: Any, stem: str, weights: MegatronToHF, padded_sizes: Sizes) -> Any:
        """Turn a layer into a `LoraLinear`, in place: its parameters, hooks and sharding stay."""
        linear.__class__, linear.lora_dropout = _adapted(linear.__class__), self.settings.dropout
        kind = weights.map.entry(f"{stem}.lora_b")
        linear.lora_place = _LoraSharding(
            group=getattr(linear, "_tp_group", None) or linear.tp_group,  # Transformer Engine's layers have the first
            is_column=kind.cut is not ShardSplit.REPLICATED,
            is_gated=kind.cut is ShardSplit.GATED_COLUMN,
            is_expert=kind.is_expert,
            sequence_parallel=linear.sequence_parallel,
            sums_outside=getattr(linear, "explicit_expert_comm", kind.is_expert),
        )
        modules = self._modules[stem]
        # The module of each row: matrices filled with the module's number, packed and cut as B is.
        number = {module + B: float(index) for index, module in enumerate(modules)}
        rows = self._shard(weights, f"{stem}.lora_b", lambda name: torch.full(padded_sizes[name], number[name]))[:, 0].long()
        part = F.one_hot(rows, len(modules)).to(linear.weight) if len(modules) > 1 else None
        linear.register_buffer("lora_part", part, persistent=False)
        return linear

    def _register(self, linear: Any, stem: str, use: str, read: Read, weights: MegatronToHF) -> None:
        for matrix in "ab":
            shard = self._shard(weights, f"{stem}.lora_{matrix}", read).to(linear.weight.device, linear.weight.dtype)
            if use == REFERENCE:
                linear.register_buffer(f"{use}_{matrix}", shard, persistent=False)
            else:
                linear.register_parameter(f"{use}_{matrix}", torch.nn.Parameter(shard))
                weights.mark(f"{stem}.lora_{matrix}", getattr(linear, f"{use}_{matrix}"))
        if use == TRAINED:
            self._mark_shared(linear)

    def _mark_shared(self, linear: Any) -> None:
        """Set the attributes of the matrix that is whole on every rank: how its gradient is summed, and which rank counts it."""
        layout = linear.lora_place
        shared = linear.lora_a if layout.is_column else linear.lora_b
        # Never in experts: their gradients are summed over expert data parallelism, which TP ranks are part of.
        shared.sequence_parallel = layout.sequence_parallel and not layout.is_expert
        if layout.is_expert:
            # Megatron takes an unmarked parameter for a copy on every rank whose *dense* TP rank is not 0. So this names the counting rank.
            shared.tensor_model_parallel, shared.shared = layout.group.rank() == 0, layout.group.rank() != 0

    def _make_exchange(self, settings: LoraSettings) -> MegatronToHF:
        weights = adapter_map(self.base.map, widest_rank(settings, self.base.map.shape))
        return MegatronToHF(
            weights, self.base.parallel, converts_adapters=True, bucket_bytes=self.base.bucket_bytes, gather=self.base.gather
        )

    def _even(self, settings: LoraSettings) -> Sizes:
        """Return the sizes of all matrices of the whole model as Megatron's linears hold them."""
        return even_sizes(self.base.map.shape, widest_rank(settings, self.base.map.shape))

    def _shard(self, weights: MegatronToHF, name: str, read: Read) -> torch.Tensor:
        p = weights.parallel
        return weights.map.load(name, read, tp_rank=p.tp_rank, tp_size=p.tp_size, expert_tp_rank=p.etp_rank, expert_tp_size=p.etp_size)

    def _use(self, use: str) -> None:
        for linear in self.linears.values():
            linear.lora_use = use if hasattr(linear, f"{use}_a") else None
