"""Weights that vLLM copies past their loaders, in a layer-wise reload. Written for vLLM 0.32, whose gpt-oss does so with experts and sinks.

In a layer-wise reload parameters are shells without memory until a layer's loaders have been given all that it needs. What is copied into a
shell is gone, vLLM counts it as loaded, and at the end puts the layer's old weights back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_grpo.rollout.vllm_table import Named

_GPT_OSS = "vllm.model_executor.models.gpt_oss"
_ADDED_ONCE = ".experts.down_proj_bias"  # vLLM zeroes it in place on all tensor-parallel ranks but the first


def catch_copies(model: torch.nn.Module) -> None:
    """In a layer-wise reload that has begun: what is copied into experts goes to a loader, what is copied into sinks to the live ones."""
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
            loading.copy_ = _Copy(loading)


class _Copy:
    """In place of a shell's `copy_`, once."""

    def __init__(self, shell: Any):
        self.shell = shell

    def __call__(self, part: torch.Tensor) -> None:
        del self.shell.copy_  # else what is made of the shell would have it, and be copied into later
        self.shell.weight_loader(self.shell, part)


def kept_whole(named: Named) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors, with copies of those that vLLM changes as it loads them."""
    return ((name, tensor.clone() if name.endswith(_ADDED_ONCE) else tensor) for name, tensor in named)
