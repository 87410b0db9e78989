"""Load weights and adapters into a vLLM engine, in this process or in a server. Written for vLLM 0.32.

The first sync goes through vLLM's layer-wise reload and is recorded: which part of which tensor becomes which part of which weight. As soon
as vLLM has loaded a layer, the same tensors are written into it again by the record, and must leave the same bits. If they do in all
layers, later syncs use that table (`vllm_weight_layout`). If not, or where a layer is quantized, the reload stays, and a warning states
the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from megatron_grpo.core.rollout import vllm_patches
from megatron_grpo.core.rollout.engine import WeightSyncError
from megatron_grpo.core.rollout.vllm_weight_layout import CopyRecord, Named, Pack, WeightLayoutRecorder, is_bitwise_equal
from megatron_grpo.core.weights.buckets import WeightUpdate, joined
from megatron_grpo.core.weights.lora import A, B, LoraSync, find_module

logger = logging.getLogger(__name__)

TOWER = "visual."  # prefix of the names of vision-tower weights in vLLM


class WeightLoader:
    """Loader of synced weights into one engine, in the process that holds its weights. It keeps the table of copies between syncs."""

    def __init__(self) -> None:
        self.tables: dict[bool, CopyRecord] = {}  # by whether the weight sync contains the vision tower
        self.reason: str | None = None  # why there can be no table
        self._loaded_buffers: set[str] = set()  # buffers that are weights, by vLLM's names
        self.pack: Pack = vllm_patches.pack

    @property
    def table(self) -> CopyRecord | None:
        """Table of weight syncs without a vision tower."""
        return self.tables.get(False)

    def load(self, worker: Any, tensors: Iterable[tuple[str, Any]], *, has_tower: bool = False, is_tower_there: bool = False) -> list[str]:
        """Replace all weights of a vLLM worker; return the names of those that did not arrive.

        After an error the engine holds the weights of no version, and accepts the next weight sync.

        Args:
            tensors: (Hugging Face name, full tensor or `TensorSlice`) pairs.
            has_tower: Whether the vision tower is among them.
            is_tower_there: If not, whether the engine has the vision tower already, so that it need not arrive.

        Raises:
            WeightSyncError: A tensor does not match the first weight sync, or a buffer changed.
        """
        from vllm.config import set_current_vllm_config

        model = worker.model_runner.get_model()
        buffers = copy_buffers(worker)
        with set_current_vllm_config(worker.vllm_config), torch.no_grad():
            table = self.tables.get(has_tower)
            if table is not None and table.is_as_learnt():
                missing = table.load(tensors, self.pack)
                vllm_patches.settle_attention(model, worker.vllm_config.model_config.dtype)
            elif self.reason is None:
                missing = self._learn(worker, model, joined(tensors), has_tower=has_tower, is_tower_there=is_tower_there)
            else:
                # vLLM changes some tensors as it loads them
                copied = ((name, tensor.clone() if name.endswith(_ADDED_ONCE) else tensor) for name, tensor in joined(tensors))
                missing = self._reload(worker, model, copied)
                vllm_patches.pack_experts(model.modules(), self.pack)
            vllm_patches.pack_heads(model, self.pack)
        refuse_changed(worker, buffers, "The weight update", besides=self._loaded_buffers)
        return _unless_there(missing, has_tower, is_tower_there)

    def _learn(self, worker: Any, model: torch.nn.Module, tensors: Named, *, has_tower: bool, is_tower_there: bool) -> list[str]:
        recorder = WeightLayoutRecorder(model, self.pack)
        with vllm_patches.layers_watched(recorder.layer), recorder:
            missing = self._reload(worker, model, recorder.record_names(tensors))
        vllm_patches.pack_experts((module for module in model.modules() if module not in recorder.packed), self.pack)
        if not _unless_there(missing, has_tower, is_tower_there):
            table, self.reason = recorder.outcome()
            if table is not None:
                self.tables[has_tower] = table
        if self.reason is not None:
            logger.warning("Weight updates use vLLM's own reload, which is slower: %s.", self.reason)
        return missing

    def _reload(self, worker: Any, model: Any, tensors: Named) -> list[str]:
        expected, loaded = _reload(worker, model, tensors)
        self._loaded_buffers |= loaded - expected
        return sorted(expected - loaded)


def copy_buffers(worker: Any) -> dict[str, torch.Tensor]:
    """Copy to the host what vLLM's model holds besides weights, such as rotary tables. A reload and a sleep remove and restore them."""
    return {name: buffer.detach().to("cpu", copy=True) for name, buffer in worker.model_runner.get_model().named_buffers()}


def refuse_changed(worker: Any, old_buffers: dict[str, torch.Tensor], action: str, *, besides: Collection[str] = ()) -> None:
    """Raise WeightSyncError if a buffer changed, bit for bit.

    Args:
        old_buffers: Earlier result of `copy_buffers`.
    """
    buffers = copy_buffers(worker)
    changed = sorted(
        name for name in old_buffers.keys() | buffers.keys()
        if name not in besides and (name not in old_buffers or name not in buffers or not is_bitwise_equal(old_buffers[name],
        buffers[name]))
    )  # fmt: skip
    if changed:
        raise WeightSyncError(f"{action} changed {len(changed)} of the engine's tensors that are not weights: {', '.join(changed[:4])}.")


def _reload(worker: Any, model: Any, tensors: Named) -> tuple[set[str], set[str]]:
    """Reload everything layer by layer. Return the names of all weights, and of those that arrived.

    Several reloads with a part each would produce garbage: a layer's kernel layout is made when the layer is complete.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    # A layer with room for an adapter is wrapped in another module, but its weights are loaded under their original names.
    expected = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    catch_copies(model)
    try:
        loaded = model.load_weights(tensors)
    except BaseException:
        for layer in model.modules():  # drop what arrived, which may be the cause: else the line below and the next reload fail too
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        raise
    finally:
        finalize_layerwise_reload(model, worker.vllm_config.model_config)  # else the next would continue where this one stopped
    return expected, set(loaded)


def _unless_there(missing: list[str], has_tower: bool, is_tower_there: bool) -> list[str]:
    """Return the missing names without those that a sync without a vision tower leaves unchanged, under vLLM's or the file's names."""
    left_out = is_tower_there and not has_tower
    return [name for name in missing if not (left_out and name.removeprefix("model.").startswith(TOWER))]


def missing_sentence(missing: list[str]) -> str:
    """Return the end of a sentence about a weight sync that did not contain all weights.

    Args:
        missing: Names of the weights that did not arrive.
    """
    return f"did not change {len(missing)} of the engine's weights: {', '.join(missing[:8])}{', ...' * (len(missing) > 8)}"


# ---- weights that vLLM copies past their loaders -------------------------------------------------------------------------------------


_GPT_OSS = "vllm.model_executor.models.gpt_oss"
_ADDED_ONCE = ".experts.down_proj_bias"  # vLLM zeroes it in place on all tensor-parallel ranks but the first


def catch_copies(model: torch.nn.Module) -> None:
    """Redirect direct copies in a layer-wise reload that has begun: to a loader for experts, to the live tensors for sinks.

    In such a reload parameters are shells without memory until a layer's loaders have received all that it needs. A copy into a shell, as
    vLLM 0.32 does with gpt-oss, is lost; vLLM counts it as loaded, and at the end restores the layer's old weights.
    """
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    for layer in model.modules():
        if type(layer).__module__ != _GPT_OSS or not layer._parameters:
            continue
        info = layerwise.get_layerwise_info(layer)
        if "w13_bias" not in layer._parameters:
            layerwise._place_kernel_tensors(layer, info)
            info.reset()
            continue
        for name, shell in layer.named_parameters(recurse=False):
            loading: Any = shell
            loading.weight_loader = default_weight_loader  # the copies are parts for this rank; vLLM's own loader takes single experts
            loading.weight_loader = layerwise.make_online_process_loader(layer, name)
            loading.copy_ = _CopyOnce(loading)


class _CopyOnce:
    """Replacement of a shell's `copy_`, for one call."""

    def __init__(self, shell: Any):
        self.shell = shell

    def __call__(self, part: torch.Tensor) -> None:
        del self.shell.copy_  # otherwise tensors made from the shell would inherit it, and redirect later copies
        self.shell.weight_loader(self.shell, part)


# ---- the adapter that an engine samples with: one at a time, from memory, each under a new name --------------------------------------


def lora_options(lora: LoraSync) -> dict[str, Any]:
    """Return the arguments of a vLLM engine with room for one adapter, on the modules that have one and no others."""
    return {
        "enable_lora": True,
        "max_loras": 1,  # a new adapter evicts the old one; nothing is being sampled then
        "max_cpu_loras": 1,
        "max_lora_rank": lora.slot_rank,
        "lora_target_modules": lora.last_name_parts,
    }


def sampler_obstacle(architecture: str, *, on_gpu: bool) -> str | None:
    """Return why vLLM's model of this architecture supports no adapters, as the end of a sentence; None if it does. Imports vLLM.

    Args:
        on_gpu: Whether vLLM runs on a GPU.
    """
    vllm_patches.prepare_environment(on_gpu=on_gpu)
    from vllm.model_executor.models import ModelRegistry, supports_lora

    model_class = ModelRegistry.models.get(architecture)
    if model_class is not None and supports_lora(model_class.load_model_cls()):
        return None
    return f"vLLM's {architecture} does not support adapters"


class AdapterSlot:
    """Slot for the adapter of one engine."""

    def __init__(self, llm: Any, modules: frozenset[str]):
        self._llm, self._modules = llm, modules
        self._number = 0  # adapters loaded so far
        self.request: Any = None  # vLLM's LoRARequest, which every request must carry; None: there is no adapter

    def load(self, update: WeightUpdate) -> None:
        """Replace the adapter. After an error there is none.

        Raises:
            WeightSyncError: The adapter did not arrive complete.
        """
        self.request = None
        self._number += 1
        with vllm_patches.restore_process():
            (fault,) = self._llm.collective_rpc(load_adapter, args=(self._number, update.config, update.tensors, self._modules))
        if fault:
            raise WeightSyncError(f"The adapter of version {update.version} is incomplete: {fault}.")
        self.request = adapter_request(self._number, update.version)

    def drop(self) -> None:
        """Remove the adapter."""
        self.request = None
        self._llm.collective_rpc(drop_adapters)


def adapter_request(number: int, version: int) -> Any:
    """Return vLLM's name of an adapter loaded from memory, which every request must carry.

    The prefix cache distinguishes adapters by their names, so it never answers for an older one. The path is never opened: the engine has
    this number already, and if it ever lost it, sampling would fail because the file does not exist.

    Args:
        number: Number of the adapter in the engine.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{number}-of-version-{version}", number, f"/pushed-from-memory/{number}")


def load_adapter(
    worker: Any, number: int, config: Mapping[str, Any], named_tensors: Iterable[tuple[str, torch.Tensor]], modules: Collection[str]
) -> str:
    """Load an adapter under a new number; return what of it did not arrive, or "". Runs in the engine.

    Args:
        number: Number of the adapter in the engine.
    """
    # Copies: vLLM keeps them on the host, and multiplies B by the scale in place.
    tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named_tensors}
    sent_modules = {find_module(name) for name in tensors}
    faults = {
        "arrived with one of their two matrices": {module for module in sent_modules if not {module + A, module + B} <= tensors.keys()},
        "have an adapter in this run but were not sent": set(modules) - sent_modules,
        "were sent but have no adapter in this run": sent_modules - set(modules),
    }
    if not any(faults.values()):
        ignored = sent_modules - set(_receive(worker, number, config, tensors))
        faults = {"were ignored by vLLM, which has no such modules or does not support adapters on them": ignored}
    return "; ".join(f"{len(names)} modules {fault} ({_shorten(names)})" for fault, names in faults.items() if names)


def _shorten(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:4]) + ", ..." * (len(ordered) > 4)


def _receive(worker: Any, number: int, config: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> list[str]:
    """Load an adapter from memory as vLLM loads its files; return the modules that it accepted, by our names. Runs in the engine.

    vLLM does not check for names that it does not know: without the check here it would drop them without an error.
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
    module_parts = {part for name in manager.modules for part in (name, *manager.packed_modules.get(name, ()))}
    vllm_names = {find_module(name): parse_fine_tuned_lora_name(name, renames)[0] for name in tensors}
    active = [module for module, name in vllm_names.items() if name in module_parts and name in model.loras]
    if len(active) == len(vllm_names):
        manager.add_adapter(model)  # it packs q, k and v into one, with nothing where a module has no adapter
        manager.activate_adapter(number)
    return active


def drop_adapters(worker: Any) -> None:
    """Remove all adapters after the engine's weights were replaced: adapters belonged to the previous weights. Runs in the engine."""
    worker.model_runner.reset_lora_state()
