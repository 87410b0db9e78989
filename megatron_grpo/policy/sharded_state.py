"""What of a policy goes into a checkpoint, described so that any other layout can read it.

Megatron-Core calls this a sharded state dict: every tensor carries its global name, global shape and this rank's place in it. The optimizer
uses the "fully reshardable" form: Adam moments are cut like the parameters they belong to, not like the flat buffers of one DP layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# mem_efficient gathers the moments over gloo in host memory: the other way needs 12 bytes a parameter on the GPU, where there is no room.
RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}


def sharded_state(chunks: Sequence[Any], optimizer: Any, scheduler: Any, *, is_loading: bool) -> dict[str, Any]:
    """The sharded state dict of this rank. Collective: every rank calls it.

    chunks: the model chunks of this stage, each wrapped in Megatron's DistributedDataParallel (one, or `vpp` of them).
    optimizer: a MegatronOptimizer; None leaves it out. scheduler: anything with `state_dict()`; None leaves it out.
    is_loading: describe where to load to, instead of what to save.
    """
    models = {name: chunk.module.sharded_state_dict(metadata=dict(RESHARDABLE)) for name, chunk in _named(chunks)}
    state: dict[str, Any] = dict(models)
    if optimizer is not None:
        # With a single chunk Megatron expects the chunk's own dict, not a dict of chunks.
        whole = models["model"] if len(chunks) == 1 else models
        _make_room(optimizer)
        state["optimizer"] = optimizer.sharded_state_dict(whole, is_loading=is_loading, metadata=dict(RESHARDABLE))
        for _, values in _parts(optimizer, state["optimizer"]):
            if "param_state" in values and values["param_state"] is None:  # only the first rank of each DP group has gathered something
                del values["param_state"]
    if scheduler is not None:
        state["scheduler"] = scheduler.state_dict()
    return state


def load_state(chunks: Sequence[Any], optimizer: Any, scheduler: Any, state: dict[str, Any]) -> None:
    """Puts back what `megatron.core.dist_checkpointing.load` made of `sharded_state(..., is_loading=True)`.

    Weights, moments and step counts are the checkpoint's; settings of the optimizer (learning rate, betas, weight decay) stay this run's.
    """
    for name, chunk in _named(chunks):
        chunk.module.load_state_dict(state[name])
    if optimizer is not None:
        _load_optimizer(optimizer, state["optimizer"])
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])


def _make_room(optimizer: Any) -> None:
    """Gives Adam its moments, all zero, before the first step. (Megatron forgets `step` of torch's Adam.)"""
    for part in _chain(optimizer):
        if isinstance(part.optimizer, torch.optim.Adam):  # AdamW is a kind of Adam
            for parameter in (p for group in part.optimizer.param_groups for p in group["params"]):
                if not part.optimizer.state[parameter]:
                    part.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        elif part.init_state_fn is not None and not part.optimizer.state:
            part.init_state_fn(part.optimizer, part.config)


def _load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict`, with a detour for the distributed optimizer over torch's own Adam (no Transformer Engine, no Apex).

    Megatron-Core 0.16 looks for Adam's `step` among the tensors of the checkpoint, where it is not: it has it in the parameter groups.
    And it gives all parameters the same step tensor, which torch then advances once for each of them.
    """
    moments = [(part, values.pop("param_state")) for part, values in _parts(optimizer, state)
               if "param_state" in values and isinstance(part.optimizer, torch.optim.Adam)]
    settings = [[{name: value for name, value in group.items() if name not in ("params", "step")} for group in part.optimizer.param_groups]
                for part in _chain(optimizer)]
    optimizer.load_state_dict(state)
    for part, groups in zip(_chain(optimizer), settings, strict=True):
        for group, own in zip(part.optimizer.param_groups, groups, strict=True):
            group.update(own)
    for part, values in moments:
        entries = list(part.optimizer.state.values())
        steps = [entry.pop("step") for entry in entries]
        part.load_parameter_state_from_fully_reshardable(values)
        for entry, step in zip(entries, steps, strict=True):
            entry["step"] = step.clone()


def _chain(optimizer: Any) -> list[Any]:
    """Dense and expert parameters have an optimizer each."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _parts(optimizer: Any, state: dict[Any, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Each optimizer of the chain with its own state."""
    chain = _chain(optimizer)
    return [(chain[0], state)] if len(chain) == 1 else [(part, state[i]) for i, part in enumerate(chain)]


def _named(chunks: Sequence[Any]) -> list[tuple[str, Any]]:
    if len(chunks) == 1:
        return [("model", chunks[0])]
    return [(f"model{i}", chunk) for i, chunk in enumerate(chunks)]
