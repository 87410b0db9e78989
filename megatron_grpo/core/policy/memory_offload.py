"""Offload of the policy's memory to the host while the sampler needs the device.

Memory moves by storage, not by tensor. Megatron-Core's flat buffers, parameters, gradients and the optimizer's shards are views of each
other, and moving a view by itself separates it from the others without an error. So whole storages are copied, emptied and filled again:
every view stays valid, and nothing is rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from megatron_grpo.core.base.activity import Timers
from megatron_grpo.core.policy.sharded_state import torch_optimizers, unwrapped

Role = Literal["weights", "reference", "optimizer", "gradients"]
Part = Literal["nothing", "weights", "reference", "all"]
# Roles that each part needs. A storage that tensors of two roles share has the first of the two: float32 main weights are views of weights.
ROLES: tuple[Role, ...] = ("weights", "reference", "optimizer", "gradients")
NEEDS: dict[Part, tuple[Role, ...]] = {"nothing": (), "weights": ROLES[:1], "reference": ROLES[:2], "all": ROLES}
CHUNK = 256 << 20  # bytes of host memory that are pinned at once; torch rounds the size of pinned memory up to a power of two


class PolicyOffloader:
    """Offload of the policy's memory to the host and back. Gradients are not copied: they come back as zeros.

    A little stays on the device: Adam's step counters, rotary frequencies, and the states of random number generators.

    Args:
        tensors_by_role: Returns every tensor of the policy with its role, as they are at the time of the call.
        movable: Roles that may be offloaded.

    Attributes:
        offloaded_bytes: Bytes of this rank that are offloaded, after the latest `offload`.
    """

    def __init__(
        self,
        tensors_by_role: Callable[[], Iterable[tuple[Role, torch.Tensor]]],
        movable: Collection[Role],
        device: torch.device,
        timers: Timers,
    ):
        self._held, self.movable, self._device, self._timers = tensors_by_role, movable, device, timers
        self._offloaded: dict[Role, list[tuple[torch.UntypedStorage, int]]] = {}
        self._host: dict[Role, list[torch.Tensor]] = {role: [] for role in ROLES}
        self._in_use: list[Part] = []
        self.offloaded_bytes = 0

    @contextmanager
    def on_device(self, part: Part) -> Iterator[None]:
        """Keep what a part needs on the device while the block runs; offloaded memory comes back first.

        Args:
            part: Part that the block needs: "weights", "reference" (with the weights) or "all".
        """
        if any(role in self._offloaded for role in NEEDS[part]):
            with self._timers("offload"):
                for role in NEEDS[part]:
                    self._reload(role)
                self._wait()
        self._in_use.append(part)
        try:
            yield
        finally:
            self._in_use.pop()

    def offload(self, *, keep: Part = "nothing") -> None:
        """Offload everything that may be offloaded and that `keep` does not need.

        Raises:
            RuntimeError: Inside a `on_device` block that needs what would be offloaded.
        """
        if used := [part for part in self._in_use if not set(NEEDS[part]) <= set(NEEDS[keep])]:
            raise RuntimeError(f"the policy cannot be offloaded while {used[-1]} is in use")
        leaving = [role for role in ROLES if role in self.movable and role not in NEEDS[keep] and role not in self._offloaded]
        if leaving:
            with self._timers("offload"):
                self._offload_roles(leaving)
        self.offloaded_bytes = sum(size for storages in self._offloaded.values() for _, size in storages)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the sampler's allocator does not see what torch keeps for itself

    def require(self, part: Part) -> None:
        """Check that everything a part needs is on the device: kernels would read memory that has been freed.

        Raises:
            RuntimeError: If any of it is offloaded.
        """
        if missing := [role for role in NEEDS[part] if role in self._offloaded]:
            raise RuntimeError(f"{' and '.join(missing)} of the policy are offloaded; call this inside `on_device({part!r})`")

    # ---- implementation ----------------------------------------------------------------------------------------------------------

    def _offload_roles(self, roles: Sequence[Role]) -> None:
        """Offload roles. All copies are made before the first storage is emptied: a host without enough memory leaves the policy whole."""
        storages = self._storages()
        for role in roles:
            if role != "gradients":
                self._copy(role, storages[role], to_host=True)
        self._wait()
        for role in roles:
            self._offloaded[role] = [(storage, storage.nbytes()) for storage in storages[role]]
            for storage in storages[role]:
                storage.resize_(0)

    def _reload(self, role: Role) -> None:
        if role not in self._offloaded:
            return
        for storage, size in self._offloaded[role]:
            storage.resize_(size)
        storages = [storage for storage, _ in self._offloaded.pop(role)]
        if role == "gradients":
            for storage in storages:
                self._bytes(storage).zero_()
        else:
            self._copy(role, storages, to_host=False)

    def _storages(self) -> dict[Role, list[torch.UntypedStorage]]:
        """Return the storages on the device by role, each once. Offloaded ones are empty and not among them."""
        storages: dict[int, tuple[Role, torch.UntypedStorage]] = {}
        for role, tensor in sorted(self._held(), key=lambda item: ROLES.index(item[0])):
            storage = tensor.untyped_storage()
            if tensor.device.type == self._device.type and storage.nbytes():  # an optimizer may be on the host permanently
                storages.setdefault(storage._cdata, (role, storage))
        return {role: [storage for storage_role, storage in storages.values() if storage_role == role] for role in ROLES}

    def _copy(self, role: Role, storages: Sequence[torch.UntypedStorage], *, to_host: bool) -> None:
        """Copy between these storages and the role's memory on the host, where they are concatenated."""
        host = self._host_memory(role, sum(storage.nbytes() for storage in storages))
        chunk = offset = 0
        for storage in storages:
            remaining = self._bytes(storage)
            while len(remaining):
                host_part = host[chunk][offset : offset + len(remaining)]
                device_part, remaining = remaining[: len(host_part)], remaining[len(host_part) :]
                target, source = (host_part, device_part) if to_host else (device_part, host_part)
                target.copy_(source, non_blocking=True)
                chunk, offset = (chunk, offset + len(host_part)) if offset + len(host_part) < len(host[chunk]) else (chunk + 1, 0)

    def _host_memory(self, role: Role, size: int) -> list[torch.Tensor]:
        """Return at least `size` bytes of host memory, allocated once and reused."""
        host, is_pinned = self._host[role], self._device.type == "cuda"
        missing = size - sum(map(len, host))
        while missing > 0:
            host.append(torch.empty(min(CHUNK, 1 << (missing - 1).bit_length()), dtype=torch.uint8, pin_memory=is_pinned))
            missing -= len(host[-1])
        return host

    def _bytes(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def _wait(self) -> None:
        """Wait until all copies are done, because other streams and the sampler's allocator are not ordered after this one."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def require_on_device(chunks: Iterable[torch.nn.Module]) -> None:
    """Check that the weights of a model are on the device.

    Raises:
        RuntimeError: If weights are offloaded.
    """
    for chunk in chunks:
        if any(parameter.numel() and not parameter.untyped_storage().nbytes() for parameter in chunk.parameters()):
            raise RuntimeError("the model's weights are offloaded; compute log-probs inside `on_device`")


def iterate_tensors(policy: Any) -> Iterator[tuple[Role, torch.Tensor]]:
    """Yield every tensor that a `Policy` holds from step to step, with its role."""
    reference = policy.reference.chunks if policy.reference is not None else ()
    models: tuple[tuple[Role, Sequence[torch.nn.Module]], ...] = (("weights", policy.chunks), ("reference", reference))
    for role, chunks in models:
        for module in map(unwrapped, chunks):
            yield from ((role, tensor.data) for tensor in (*module.parameters(), *module.buffers()))
    for wrapped in policy.wrapped:
        for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers):
            if buffer.param_data is not None:  # with a distributed optimizer; it includes padding
                yield "weights", buffer.param_data
            yield "gradients", buffer.grad_data
    for inner in torch_optimizers(policy.optimizer):
        yield from (("optimizer", master.data) for group in inner.param_groups for master in group["params"])
        states = (value for state in inner.state.values() for value in state.values())
        yield from (("optimizer", value) for value in states if isinstance(value, torch.Tensor) and value.dim())
