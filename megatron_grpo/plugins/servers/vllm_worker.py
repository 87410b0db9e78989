"""Extension of vLLM's worker for rollout servers: it joins a link and receives weights and adapters from it. Written for vLLM 0.32.

vLLM imports this module in each worker before the model loads, since `worker_extension_cls` names its class. vLLM's own weight-transfer
engines are not used: they treat an update that fails at its end as still in progress.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from typing import Any

import torch

from megatron_grpo.core.rollout import vllm_patches
from megatron_grpo.core.rollout.engine import WeightSyncError
from megatron_grpo.core.rollout.experts import wire_cpu_runner
from megatron_grpo.core.rollout.vllm_weights import WeightLoader, drop_adapters, load_adapter, missing_sentence
from megatron_grpo.plugins.servers.weight_transfer import LinkError, WeightReceiverWorker

vllm_patches.patch_worker(on_gpu=torch.cuda.is_available())
if not torch.cuda.is_available():
    wire_cpu_runner()


class WeightTransferWorker:
    """Methods that vLLM's worker class inherits. Those that `collective_rpc` calls return an error message, or "" on success."""

    linked: WeightReceiverWorker | None = None
    loader: WeightLoader | None = None

    def join_link(self: Any, join: Mapping[str, Any]) -> str:
        """Join a link. The rank in the link follows from the worker's rank in its server.

        Args:
            join: The fields of `wire.JoinRequest`.
        """
        if self.linked is not None:
            self.linked.drop()
            self.linked = None
        parallel = self.vllm_config.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + self.rank
        try:
            self.linked = WeightReceiverWorker(
                address=join["address"], port=join["port"], rank=join["first_rank"] + worker, world=join["world"], name=join["name"],
                seconds=join["seconds"], device=self.device,
            )  # fmt: skip
        except LinkError as error:
            return f"worker {worker}: {error}"
        return ""

    def receive_weights(self: Any, link: str, has_tower: bool = False, is_tower_there: bool = False) -> str:
        """Receive all weights of the next weight sync and remove all adapters.

        Args:
            has_tower: Whether the weight sync contains the vision tower.
            is_tower_there: Whether an earlier weight sync contained it; see `WeightLoader.load`.
        """
        self.loader = self.loader or WeightLoader()
        try:
            with closing(self.linked_as(link).receive()) as tensors:
                missing = self.loader.load(self, tensors, has_tower=has_tower, is_tower_there=is_tower_there)
        except (LinkError, WeightSyncError) as error:
            return str(error)
        finally:
            if self.vllm_config.lora_config is not None:
                drop_adapters(self)
        return missing_sentence(missing) if missing else ""

    def receive_adapter(self: Any, link: str, number: int, config: Mapping[str, Any], modules: Collection[str]) -> str:
        """Receive the adapter of the next weight sync.

        Args:
            number: ID of the adapter in vLLM, new for each weight sync.
        """
        try:
            with closing(self.linked_as(link).receive()) as tensors:
                fault = load_adapter(self, number, config, tensors, modules)
        except LinkError as error:
            return str(error)
        return f"is incomplete: {fault}" if fault else ""

    def linked_as(self: Any, link: str) -> WeightReceiverWorker:
        """Return the joined link.

        Raises:
            LinkError: The worker has joined a link of another name or none.
        """
        if self.linked is None or self.linked.name != link:
            raise LinkError(f"this worker is not a member of the link {link!r}; join it first")
        return self.linked
