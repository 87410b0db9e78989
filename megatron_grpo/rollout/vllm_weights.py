"""All weights go into a vLLM engine here, into one of this process as into one of a server. Written for vLLM 0.32.

The first push goes through vLLM's layer-wise reload and is watched: which part of which tensor becomes which part of which weight. As soon
as vLLM has loaded a layer, the same tensors are written into it once more by what was seen, and must leave the same bits. If they do in
all layers, later pushes go by that table (`vllm_table`). If not, or where a layer is quantised, the reload stays, and a warning says why.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch

from megatron_grpo.rollout import vllm_patches
from megatron_grpo.rollout.engine import WeightSyncError
from megatron_grpo.rollout.vllm_copied import catch_copies, kept_whole
from megatron_grpo.rollout.vllm_lesson import Lesson, same_bits
from megatron_grpo.rollout.vllm_table import Named, Pack, Table

logger = logging.getLogger(__name__)

TOWER = "visual."  # how the names of the weights begin that see pictures, in vLLM


class WeightLoader:
    """Of one engine, in the process that holds its weights. Keeps the table from push to push."""

    def __init__(self) -> None:
        self.tables: dict[bool, Table] = {}  # of pushes with the weights that see pictures, and of those without
        self.reason: str | None = None  # why there will be none
        self._loaded_buffers: set[str] = set()  # those that are weights, by vLLM's names
        self.pack: Pack = vllm_patches.pack

    @property
    def table(self) -> Table | None:
        """The one of a model of text."""
        return self.tables.get(False)

    def load(self, worker: Any, named: Named, *, has_tower: bool = False, is_tower_there: bool = False) -> list[str]:
        """Replaces all weights of vLLM's `worker` by (Hugging Face name, full tensor); returns the names of those that did not come.

        has_tower: the weights that see pictures are among them. is_tower_there: if not, the engine has them, and they need not come.
        After an error the engine holds the weights of no version, and takes the next push. Raises WeightSyncError at a tensor that does not
        fit what the first push brought.
        """
        from vllm.config import set_current_vllm_config

        model = worker.model_runner.get_model()
        before = buffers_of(worker)
        with set_current_vllm_config(worker.vllm_config), torch.no_grad():
            table = self.tables.get(has_tower)
            if table is not None and table.is_as_learnt():
                missing = table.load(named, self.pack)
                vllm_patches.settle_attention(model, worker.vllm_config.model_config.dtype)
            elif self.reason is None:
                missing = self._learn(worker, model, named, has_tower=has_tower, is_tower_there=is_tower_there)
            else:
                missing = self._reload(worker, model, kept_whole(named))
                vllm_patches.pack_experts(model.modules(), self.pack)
            vllm_patches.pack_heads(model, self.pack)
        refuse_changed(worker, before, "the push", besides=self._loaded_buffers)
        return _unless_there(missing, has_tower, is_tower_there)

    def _learn(self, worker: Any, model: torch.nn.Module, named: Named, *, has_tower: bool, is_tower_there: bool) -> list[str]:
        lesson = Lesson(model, self.pack)
        with vllm_patches.layers_watched(lesson.layer), lesson:
            missing = self._reload(worker, model, lesson.heard(named))
        vllm_patches.pack_experts((module for module in model.modules() if module not in lesson.packed), self.pack)
        if not _unless_there(missing, has_tower, is_tower_there):
            table, self.reason = lesson.outcome()
            if table is not None:
                self.tables[has_tower] = table
        if self.reason is not None:
            logger.warning("Pushed weights go through vLLM's own reload, which is slower: %s.", self.reason)
        return missing

    def _reload(self, worker: Any, model: Any, named: Named) -> list[str]:
        expected, loaded = _reload(worker, model, named)
        self._loaded_buffers |= loaded - expected
        return sorted(expected - loaded)


def buffers_of(worker: Any) -> dict[str, torch.Tensor]:
    """On the host: what vLLM's model holds besides weights, as rotary tables. A reload and a sleep take them away and put them back."""
    return {name: buffer.detach().to("cpu", copy=True) for name, buffer in worker.model_runner.get_model().named_buffers()}


def refuse_changed(worker: Any, before: dict[str, torch.Tensor], what: str, *, besides: Collection[str] = ()) -> None:
    """Raises WeightSyncError where a buffer is not what it was, bit for bit. besides: those that are weights, and came with the others."""
    now = buffers_of(worker)
    changed = sorted(
        name for name in before.keys() | now.keys()
        if name not in besides and (name not in before or name not in now or not same_bits(before[name], now[name]))
    )  # fmt: skip
    if changed:
        raise WeightSyncError(f"{what} changed {len(changed)} of the engine's tensors that are no weights: {', '.join(changed[:4])}.")


def _reload(worker: Any, model: Any, named: Named) -> tuple[set[str], set[str]]:
    """One layer-wise reload of everything. Returns the names of all weights, and of those that came.

    Several reloads with a part each would give garbage: a layer's kernel layout is made when the layer is complete.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    # A layer with room for an adapter is inside another module, and its weights are loaded under their own names all the same.
    expected = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    catch_copies(model)
    try:
        loaded = model.load_weights(named)
    except BaseException:
        for layer in model.modules():  # forget what has come of it, which may be what failed: else the line below fails of it, and the next
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        raise
    finally:
        finalize_layerwise_reload(model, worker.vllm_config.model_config)  # else the next would go on where this one broke off
    return expected, set(loaded)


def _unless_there(missing: list[str], has_tower: bool, is_tower_there: bool) -> list[str]:
    """Less what a push without a tower leaves as it was, under vLLM's names or those of the file."""
    left_out = is_tower_there and not has_tower
    return [name for name in missing if not (left_out and name.removeprefix("model.").startswith(TOWER))]


def missing_sentence(missing: list[str]) -> str:
    """The end of a sentence that begins with the push."""
    return f"left {len(missing)} of the engine's weights as they were: {', '.join(missing[:8])}{', ...' * (len(missing) > 8)}"
