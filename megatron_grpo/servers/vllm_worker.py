"""What every worker of a rollout server can do besides vLLM's own: join a link, and take weights and adapters from it. vLLM 0.32.

vLLM imports this module in each worker before the model loads, for its class is named as `worker_extension_cls`. It is not one of vLLM's
own weight-transfer engines: those count an update that fails at its end as going on for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import closing
from typing import Any

import torch

from megatron_grpo.rollout import vllm_patches
from megatron_grpo.rollout.engine import WeightSyncError
from megatron_grpo.rollout.experts import wire_cpu_runner
from megatron_grpo.rollout.vllm_weights import WeightLoader, drop_adapters, missing_sentence, take_adapter
from megatron_grpo.servers.weight_transfer import LinkError, WeightReceiverWorker

vllm_patches.patch_worker(on_gpu=torch.cuda.is_available())
if not torch.cuda.is_available():
    wire_cpu_runner()


class WeightTransferWorker:
    """vLLM's worker class inherits these. Each returns the end of a sentence that says what is wrong, or "" where all is well."""

    linked: WeightReceiverWorker | None = None
    loader: WeightLoader | None = None

    def join_link(self: Any, join: Mapping[str, Any]) -> str:
        """join: the fields of `wire.Join`. The place in the link follows from the worker's place in its server."""
        self.leave_link()
        parallel = self.vllm_config.parallel_config
        place = parallel.data_parallel_index * parallel.world_size + self.rank
        try:
            self.linked = WeightReceiverWorker(
                address=join["address"], port=join["port"], rank=join["first_rank"] + place, world=join["world"], name=join["name"],
                seconds=join["seconds"], device=self.device,
            )  # fmt: skip
        except LinkError as error:
            return f"worker {place}: {error}"
        return ""

    def leave_link(self: Any) -> None:
        if self.linked is not None:
            self.linked.drop()
            self.linked = None

    def take_weights(self: Any, link: str, has_tower: bool = False, is_tower_there: bool = False) -> str:
        """All weights of the next push; of a model that sees perhaps without its tower, see `WeightLoader.load`."""
        self.loader = self.loader or WeightLoader()
        try:
            with closing(self.linked_as(link).receive()) as named:
                missing = self.loader.load(self, named, has_tower=has_tower, is_tower_there=is_tower_there)
        except (LinkError, WeightSyncError) as error:
            return str(error)
        finally:
            if self.vllm_config.lora_config is not None:
                drop_adapters(self)
        return missing_sentence(missing) if missing else ""

    def take_adapter(self: Any, link: str, number: int, config: Mapping[str, Any], modules: Collection[str]) -> str:
        """The adapter of the next push, under a number of its own."""
        try:
            with closing(self.linked_as(link).receive()) as named:
                wrong = take_adapter(self, number, config, named, modules)
        except LinkError as error:
            return str(error)
        return f"did not arrive whole: {wrong}" if wrong else ""

    def linked_as(self: Any, link: str) -> WeightReceiverWorker:
        """Raises LinkError for another link than the last one joined."""
        if self.linked is None or self.linked.name != link:
            raise LinkError(f"this worker is not a member of the link {link!r}; join it first")
        return self.linked
