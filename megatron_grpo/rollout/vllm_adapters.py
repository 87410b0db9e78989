"""The adapter that a vLLM engine samples with: one at a time, from memory, each under a name of its own. Written for vLLM 0.32."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from megatron_grpo.rollout import vllm_patches
from megatron_grpo.rollout.adapters import LoraPush
from megatron_grpo.rollout.engine import WeightSyncError
from megatron_grpo.weights.lora import A, B, module_of
from megatron_grpo.weights.update import WeightUpdate


def lora_options(push: LoraPush) -> dict[str, Any]:
    """Arguments of a vLLM engine with room for one adapter, on the modules that have one and no others."""
    return {
        "enable_lora": True,
        "max_loras": 1,  # a new adapter drives the old one out; nothing is being sampled then
        "max_cpu_loras": 1,
        "max_lora_rank": push.slot_rank,
        "lora_target_modules": push.last_words,
    }


def sampler_obstacle(architecture: str, *, on_gpu: bool) -> str | None:
    """Why vLLM's model of this architecture takes no adapters, as the end of a sentence; None where it does. Imports vLLM."""
    vllm_patches.prepare_environment(on_gpu=on_gpu)
    from vllm.model_executor.models import ModelRegistry, supports_lora

    known = ModelRegistry.models.get(architecture)
    if known is not None and supports_lora(known.load_model_cls()):
        return None
    return f"vLLM's {architecture} takes no adapters"


class AdapterSlot:
    """Holds the adapter of one engine. modules: Hugging Face names of those that every adapter of this run is on."""

    def __init__(self, llm: Any, modules: frozenset[str]):
        self._llm, self._modules = llm, modules
        self._number = 0  # of adapters taken
        self.request: Any = None  # vLLM's LoRARequest, which every request must carry; None: there is no adapter

    def take(self, update: WeightUpdate) -> None:
        """Replaces the adapter. Raises WeightSyncError where it did not arrive whole; then there is none."""
        self.request = None
        self._number += 1
        with vllm_patches.trainer_untouched():
            (wrong,) = self._llm.collective_rpc(take_adapter, args=(self._number, update.config, update.tensors, self._modules))
        if wrong:
            raise WeightSyncError(f"the adapter of version {update.version} did not arrive whole: {wrong}.")
        self.request = adapter_request(self._number, update.version)

    def drop(self) -> None:
        """There is no adapter any more."""
        self.request = None
        self._llm.collective_rpc(drop_adapters)


def adapter_request(number: int, version: int) -> Any:
    """vLLM's name for an adapter that it took from memory, which every request must carry.

    The prefix cache tells adapters apart by their names, so it never answers for an older one. The path is never opened: the engine has
    this number already, and if it ever lost it sampling would end for want of such a file.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{number}-of-version-{version}", number, f"/pushed-from-memory/{number}")


def take_adapter(
    worker: Any, number: int, config: Mapping[str, Any], named: Iterable[tuple[str, torch.Tensor]], modules: Collection[str]
) -> str:
    """Runs in the engine: takes an adapter under a number of its own. Returns what of it did not arrive; "" if all did.

    modules: Hugging Face names of those that every adapter of this run is on.
    """
    # Copies: vLLM keeps them on the host, and multiplies B by the scale in place.
    tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named}
    sent = {module_of(name) for name in tensors}
    wrong = {
        "came with one of their two matrices": {module for module in sent if not {module + A, module + B} <= tensors.keys()},
        "have an adapter in this run and were not sent": set(modules) - sent,
        "were sent and have no adapter in this run": sent - set(modules),
    }
    if not any(wrong.values()):
        ignored = sent - set(_receive(worker, number, config, tensors))
        wrong = {"were ignored by vLLM, which has no such modules or gives them no adapter": ignored}
    return "; ".join(f"{len(names)} modules {what} ({_some(names)})" for what, names in wrong.items() if names)


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:4]) + ", ..." * (len(ordered) > 4)


def _receive(worker: Any, number: int, config: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> list[str]:
    """Runs in the engine: what vLLM does with an adapter's files, from memory. Returns the modules that it took, by our names.

    vLLM looks for no name that it does not know: without looking for each of them here it would drop them without an error.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.utils import parse_fine_tuned_lora_name

    loras = worker.model_runner.lora_manager
    manager = loras._adapter_manager
    helper = PEFTHelper.from_dict(dict(config))
    helper.validate_legal(loras.lora_config)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    renames = None if mapper is None else mapper.get_rename_mapper()
    model = LoRAModel.from_lora_tensors(
        number, tensors, helper, device="cpu", dtype=loras.lora_config.lora_dtype, model_vocab_size=loras.vocab_size,
        weights_mapper=renames,
    )  # fmt: skip
    known = {part for name in manager.modules for part in (name, *manager.packed_modules.get(name, ()))}
    theirs = {module_of(name): parse_fine_tuned_lora_name(name, renames)[0] for name in tensors}
    taken = [ours for ours, name in theirs.items() if name in known and name in model.loras]
    if len(taken) == len(theirs):
        manager.add_adapter(model)  # it packs q, k and v into one, with nothing where a module has no adapter
        manager.activate_adapter(number)
    return taken


def drop_adapters(worker: Any) -> None:
    """Runs in the engine, after its weights were replaced: adapters belonged to what was there before."""
    worker.model_runner.reset_lora_state()
