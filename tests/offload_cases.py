"""Training with all memory offloaded between phases, against training without offload, bit for bit.

For `tests/distributed/test_memory_offload.py` and, with all layouts, `tools/parity.py --only offload`. On a CPU the host's copy is ordinary
memory, and the storages are emptied all the same.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests import parity_cases as cases
from tests.parity_cases import EP, PP, SP, TP, VPP

STEPS = 3
OVERLAPPED = dict(overlap_grad_reduce=True, overlap_param_gather=True)
LOW = dict(use_precision_aware_optimizer=True, main_grads_dtype="bf16", main_params_dtype="fp16", exp_avg_dtype="fp8",
           exp_avg_sq_dtype="fp16")  # fmt: skip
# Name -> (model of `parity_cases.MODELS`, ranks, settings).
LAYOUTS: Mapping[str, tuple[str, int, dict[str, Any]]] = {
    "dense tied DP2": ("dense", 2, {}),
    "overlapped gather and reduce": ("dense", 2, OVERLAPPED),
    "PP2": ("dense", 2, {PP: 2}),
    "PP2 VPP2": ("dense", 2, {PP: 2, VPP: 2}),
    "TP2": ("dense", 2, {TP: 2, SP: True}),
    "plain optimizer": ("dense", 2, dict(use_distributed_optimizer=False)),
    "DP2 with reference": ("dense", 2, dict(beta=0.1)),
    "DP2 with reference, overlapped": ("dense", 2, OVERLAPPED | dict(beta=0.1)),
    "PP2 VPP2, overlapped, a reference that follows": (
        "dense", 4, {PP: 2, VPP: 2} | OVERLAPPED | dict(beta=0.1, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.25),
    ),
    "MoE EP2": ("MoE", 2, {EP: 2}),
    "MoE EP2, plain optimizer": ("MoE", 2, {EP: 2} | dict(use_distributed_optimizer=False)),
    "MLA EP2": ("MLA", 2, {EP: 2}),
    "few bits, DP2, overlapped": ("dense", 2, OVERLAPPED | LOW),
    "few bits, PP2 VPP2": ("dense", 2, {PP: 2, VPP: 2} | LOW | dict(main_params_dtype="fp32", exp_avg_dtype="bf16")),
    "few bits, MoE EP2": ("MoE", 2, {EP: 2} | LOW),
    "few bits, LoRA TP2": ("dense", 2, {TP: 2, SP: True} | LOW | dict(tuner_type="lora")),
    "LoRA DP2": ("dense", 2, dict(tuner_type="lora")),
    "LoRA TP2, from an adapter": ("dense", 2, {TP: 2, SP: True} | dict(tuner_type="lora", beta=0.1, adapters="random")),
    "LoRA MoE EP2": ("MoE", 2, {EP: 2} | dict(tuner_type="lora", beta=0.1)),
}  # fmt: skip
# Of a rank, beside the host's copies: states of generators, rotary frequencies, Adam's step counters, what the last pass left in a router.
SMALL = 32 << 10


def read_size_inputs(name: str, dtype: str, folder: Path, *, layers: int = 4) -> tuple[Path, int, dict[str, Any]]:
    """Return the model's directory, the number of ranks, and the settings."""
    from tests.lora_cases import write_random_adapter
    from tests.tiny_models import write_tiny

    model, world, settings = LAYOUTS[name]
    path = write_tiny(folder / "model", **cases.MODELS[model] | {"layers": layers})
    if settings.get("adapters"):
        settings = settings | {"adapters": str(write_random_adapter(path, folder / "adapter"))}
    return path, world, cases.MODEL_SETTINGS.get(model, {}) | settings | {"torch_dtype": dtype, "adam_eps": 1e-8}


Breaks = Callable[[Any, Callable[[], None]], None]
"""(policy, a function that gives all away and takes it back): another way to make the same trip, which must show."""


def differences(
    rank: int, world: int, path: Path, settings: Mapping[str, Any], folder: Path, breaks: Sequence[Breaks] = ()
) -> dict[str, list[str]]:
    """Return what differs from training without offload, by operation; empty if nothing does. For `run_ranks`."""
    cfg = cases.settings(**settings)
    parallel, rollouts = cases.join(cfg, world), cases.stored_rollout(path, num_steps=STEPS, vocab=125)
    right = list(_train(_policy(path, cfg, parallel, ()), rollouts))
    found: dict[str, list[str]] = {}

    def unlike(policy, first: int, last: int = STEPS, away=_leave) -> list[str]:
        states = _train(policy, rollouts[first:last], first, away=away)
        return [one for step, state in enumerate(states, first) for one in _unlike(state, right[step], f"step {step}")]

    before = set(_held(None))
    policy = _policy(path, cfg, parallel, ALL)
    found["offload"] = unlike(policy, 0, 2) + _left_behind(policy, before)
    _save(policy, folder / "saved")
    found["offload"] += unlike(policy, 2)
    resumed = _policy(path, cfg, parallel, ALL)
    _leave(resumed)
    _load(resumed, folder / "saved")
    found["resumed"] = unlike(resumed, 2)
    for break_ in breaks:
        policy = _policy(path, cfg, parallel, ALL)
        try:
            found[break_.__name__] = unlike(policy, 0, 2, away=lambda policy, break_=break_: break_(policy, lambda: _trip(policy)))
        except IncompleteOffloadError as error:
            found[break_.__name__] = [str(error)]
    return found


class IncompleteOffloadError(Exception):
    """The policy did not offload all of its memory, or offloaded more than that."""


def _trip(policy) -> None:
    if left := _left_behind(policy):
        raise IncompleteOffloadError("; ".join(left[:3]))
    with policy.on_device("all"):
        pass


ALL = ("weights", "reference", "gradients", "optimizer")


def _policy(path, cfg, parallel, offload):
    from megatron_grpo.run.assemble.policy import build_policy

    return build_policy(cfg, parallel, model_path=path, num_steps=100, offload=offload)


def _leave(policy) -> None:
    """Offload as before a rollout: first what a weight sync does not need, then the rest."""
    policy.free_memory(keep="weights")
    policy.free_memory()


@dataclasses.dataclass(frozen=True)
class StepState:
    """Result of a step: metrics, log-probs of policy and reference for a sequence, and the weights of the sync."""

    said: dict[str, float]
    scores: list[Any]
    weights: dict[str, torch.Tensor]


def _train(policy, rollouts, first: int = 0, *, away: Callable[[Any], None] = lambda policy: None) -> Iterator[StepState]:
    for index, rows in enumerate(rollouts, first):
        away(policy)
        with policy.on_device("reference"):
            scores = policy.scorer.score(rows[:2]) + (policy.reference.scorer.score(rows[:2]) if policy.reference is not None else [])
        away(policy)
        batch = cases.make_batch(policy, rows, index)
        with policy.on_device("all"):
            said = policy.train_step(batch).metrics
        policy.free_memory(keep="weights")
        with policy.on_device("weights"):
            weights = {name: tensor.clone() for name, tensor in policy.named_weights()}
            if policy.adapters is not None:
                weights |= {name: tensor.clone() for name, tensor in policy.named_adapters()}
        yield StepState({name: said[name] for name in ("loss", "grad_norm")}, scores, weights)


def _unlike(found: StepState, right: StepState, when: str) -> list[str]:
    wrong = [name for name, value in right.said.items() if found.said[name] != value]
    wrong += ["log-probs"] * any((one != other).any() for one, other in zip(found.scores, right.scores, strict=True))
    wrong += [name for name, tensor in right.weights.items() if not torch.equal(found.weights[name], tensor)]
    return [f"{when}: {name}" for name in wrong[:3]]


def _left_behind(policy, before: set[int] | None = None) -> list[str]:
    """Return what still holds memory after offload, by the names of torch's own lists and among all tensors of the process."""
    with policy.on_device("all"):
        named = {name: tensor for name, tensor in _named(policy) if tensor is not None}
        sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in named.values()}
    _leave(policy)
    left = [name for name, tensor in named.items() if tensor.untyped_storage().nbytes()]
    if not left and policy.offloader.offloaded_bytes != sum(sizes.values()):
        left.append(f"{policy.offloader.offloaded_bytes} bytes were given away of {sum(sizes.values())}")
    if before is not None:
        rest = sum(size for key, size in _held(policy).items() if key not in before)
        left += [f"{rest} bytes that nobody named"] * (rest > SMALL)
    return left


def _named(policy) -> Iterator[tuple[str, Any]]:
    chunks = {f"chunk {i}": chunk for i, chunk in enumerate(policy.chunks)}
    if policy.reference is not None:
        chunks |= {f"reference {i}": getattr(chunk, "module", chunk) for i, chunk in enumerate(policy.reference.scorer.model)}
    for where, chunk in chunks.items():
        yield from ((f"{where} {name}", tensor) for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()))
    for number, wrapped in enumerate(policy.wrapped):
        for place, buffer in enumerate((*wrapped.buffers, *wrapped.expert_parallel_buffers)):
            yield f"gradients {number} {place}", buffer.grad_data
            yield f"flat buffer {number} {place}", buffer.param_data
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        yield from ((f"master {id(p)}", p) for group in part.optimizer.param_groups for p in group["params"])
        for state in part.optimizer.state.values():
            yield from ((f"{name} {id(tensor)}", tensor) for name, tensor in state.items() if name != "step")


def _held(policy) -> dict[int, int]:
    """Return {storage: bytes} of all tensors of this process except host copies."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    host = {t.untyped_storage()._cdata for chunks in (policy.offloader._host.values() if policy else ()) for t in chunks}
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return {key: size for key, size in sizes.items() if key not in host}


def _save(policy, folder: Path) -> None:
    from megatron_grpo.core.parallel import collectives
    from tests.checkpoint_files import write_sharded

    folder.mkdir(parents=True, exist_ok=True)
    collectives.wait_for_all()
    with policy.on_device("all"):
        write_sharded(policy.sharded_state_dict(is_loading=False), folder)


def _load(policy, folder: Path) -> None:
    from megatron_grpo.run.checkpoint.distributed import read_sharded

    with policy.on_device("all"):
        policy.load_sharded_state_dict(read_sharded(policy.sharded_state_dict(is_loading=True), folder))
