"""Faults that no loss shows, each put into a real policy on real ranks between two steps, and the report of the second step's check.

`FAULTS` has them by name. Numbers in it are those of findings in NVIDIA/Megatron-LM issue 7452 that a fault resembles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch

from megatron_grpo.commands.analysis.replica_check import ReplicaCheck, list_tensors
from tests import parity_cases as cases
from tests.step_dump_cases import flip, make_samples

TP, SP, CP, PP, EP = cases.TP, cases.SP, cases.CP, cases.PP, cases.EP
PLAIN = dict(use_distributed_optimizer=False)
NORM, QKV = "decoder.layers.1.input_layernorm.weight", "decoder.layers.0.self_attention.linear_qkv.weight"
Q_NORM, EXPERT = "decoder.layers.0.self_attention.q_layernorm.weight", "decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault.

    spoil(policy, rank): applied after the first step. wrap(policy, rank): a context around the second. late(policy, rank): applied when the
    gradient of the second is reduced. batch(batch, rank): changes the second batch. says: part of the first finding; None if there must be
    none.
    """

    settings: dict[str, Any]
    says: str | None
    model: str = "dense"
    finding: int | None = None
    spoil: Callable[[Any, int], None] | None = None
    wrap: Callable[[Any, int], contextlib.AbstractContextManager] | None = None
    late: Callable[[Any, int], None] | None = None
    batch: Callable[[Any, int], Any] | None = None


class ReplicaCheckObserver:
    """A step observer that checks replicas after it has applied `late`."""

    def __init__(self, policy: Any, check: ReplicaCheck, late=None):
        self.policy, self.check, self.late, self.found, self.metrics = policy, check, late, None, {}

    def on_gradients_reduced(self, seen):
        if self.late is not None:
            self.late(self.policy, self.policy.parallel.rank)
        self.metrics = dict(seen.metrics)
        self.found = self.check.compare(self.policy, seen.batch, seen.metrics, seen.logprobs)

    def on_pre_optimizer_step(self, seen, skipped_step):
        pass


# ---- what goes wrong ---------------------------------------------------------------------------------------------------------------------


def on_second(change: Callable[[Any], None]) -> Callable[[Any, int], None]:
    return lambda policy, rank: change(policy) if rank == 1 else None


def flip_bit(name: str, *, bit: int = 0):
    return on_second(lambda policy: flip(list_tensors(policy)[name], 1, bit))


def without(function: str):
    """Leave out one of the reductions at the end of Megatron-Core's backward pass."""

    @contextlib.contextmanager
    def wrap(policy, rank):
        with mock.patch.object(sys.modules["megatron.core.distributed.finalize_model_grads"], function, lambda *args, **kwargs: None):
            yield

    return wrap


def skip_reduction(name: str):
    """Restore each rank's own gradient after the reduction."""

    @contextlib.contextmanager
    def wrap(policy, rank):
        config, finish = policy.wrapped[0].config, policy.wrapped[0].config.finalize_model_grads_func
        parameter = list_tensors(policy)[name]

        def keep(model, *args, **kwargs):
            own = parameter.main_grad.clone()
            finish(model, *args, **kwargs)
            parameter.main_grad.copy_(own)

        config.finalize_model_grads_func = keep
        try:
            yield
        finally:
            config.finalize_model_grads_func = finish

    return wrap


def log_probs_off(by: float, *, ranks: tuple[int, ...] = (1,)):
    @contextlib.contextmanager
    def wrap(policy, rank):
        from megatron_grpo.core.policy.passes import StepLoss

        loss = StepLoss.__call__

        def off(*others):
            *others, logprobs, entropy = others
            return loss(*others, logprobs + by * (rank in ranks), entropy)

        with mock.patch.object(StepLoss, "__call__", off), mock.patch.object(StepLoss, "make_slope", lambda *args: None):
            yield

    return wrap


def change_rows(name: str, change: Callable[[np.ndarray], np.ndarray]):
    def batch(batch, rank):
        if rank != 1:
            return batch
        micros = tuple(dataclasses.replace(micro, **{name: change(getattr(micro, name))}) for micro in batch.micro_batches)
        return dataclasses.replace(batch, micro_batches=micros)

    return batch


def change_moment(policy: Any) -> None:
    inner = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])[0].optimizer
    next(iter(inner.state.values()))["exp_avg"].mul_(1 + 1e-6)


def faster(policy: Any) -> None:
    for group in policy.optimizer.param_groups:
        group["lr"] *= 2


def unmark(policy: Any, rank: int) -> None:
    del list_tensors(policy)[QKV].tensor_model_parallel


def isolate_group(path: str, attribute: str):
    """Give a module a process group of only its own rank."""

    def late(policy, rank):
        import torch.distributed as dist

        groups = [dist.new_group([one]) for one in range(dist.get_world_size())]
        holder = policy.chunks[0].get_submodule(path)
        *outer, last = attribute.split(".")
        for name in outer:
            holder = getattr(holder, name)
        setattr(holder, last, groups[rank])

    return late


def halve(values: np.ndarray) -> np.ndarray:
    return values * 0.5


def shift(values: np.ndarray) -> np.ndarray:
    return np.concatenate([values[1:], values[:1]])


FAULTS: dict[str, Fault] = {
    "loss over the local vocabulary": Fault(
        settings={TP: 2}, finding=1, wrap=log_probs_off(0.01), says="the log-probs of the training forward differ between the tensor"
    ),
    "log-probs off by log(TP) on all ranks": Fault(settings={TP: 2}, finding=2, wrap=log_probs_off(math.log(2), ranks=(0, 1)), says=None),
    "divided by the share's own number of tokens": Fault(
        settings={}, finding=3, batch=lambda batch, rank: dataclasses.replace(batch, num_loss_tokens=batch.num_loss_tokens // (1 + rank)),
        says="num_loss_tokens of the batch differ between the ranks 0 and 1",
    ),
    "a layer with another tensor-parallel group": Fault(
        settings={TP: 2}, finding=4, late=isolate_group("decoder.layers.1.self_attention.linear_proj", "tp_group"),
        says="decoder.layers.1.self_attention.linear_proj.tp_group of rank 0 is not the group of its tensor-parallel ranks",
    ),
    "the embedding with another tensor-parallel group": Fault(
        settings={TP: 2, SP: True},
        finding=7,
        late=isolate_group("embedding.word_embeddings", "tp_group"),
        says="is not the group of its tensor",
    ),
    "a cut weight that is not marked": Fault(
        settings={TP: 2}, finding=8, spoil=unmark, says=f"{QKV} is sharded over tensor-parallel ranks and not marked as sharded"
    ),
    "weights of tokens by the context-parallel rank's own count": Fault(
        settings={CP: 2}, finding=9, batch=change_rows("token_weights", halve),
        says="token_weights differ between the context-parallel ranks 0 and 1",
    ),
    "the routers' number of tokens overwritten": Fault(
        settings={EP: 2}, model="MoE", finding=10, late=on_second(lambda policy: _count(policy)),
        says="the token counts of routers differ between the ranks 0 and 1",
    ),
    "a norm whose parts are not summed over TP": Fault(
        settings={TP: 2, SP: True}, finding=11, wrap=without("_allreduce_non_tensor_model_parallel_grads"), says="the gradient of "
    ),
    "the norm of queries, whose parts are not summed": Fault(
        settings={TP: 2, **PLAIN}, finding=11, wrap=without("_allreduce_non_tensor_model_parallel_grads"), says=Q_NORM.split(".")[-2]
    ),
    "a context-parallel group that was written over": Fault(
        settings={CP: 2}, finding=13, late=isolate_group("decoder.layers.0.self_attention", "pg_collection.cp"),
        says="is not the group of its context-parallel ranks",
    ),
    "a gradient that is not summed over DP": Fault(settings=PLAIN, wrap=skip_reduction(QKV), says=f"the gradient of {QKV} differ between"),
    "a gradient that is not summed over CP": Fault(
        settings={CP: 2, **PLAIN}, wrap=skip_reduction(QKV), says=f"the gradient of {QKV} differ"
    ),
    "experts' gradient that is not summed": Fault(
        settings=PLAIN, model="MoE", wrap=skip_reduction(EXPERT), says=f"the gradient of {EXPERT} differ between the expert-data"
    ),
    "the tied embedding's gradient that is not summed": Fault(
        settings={PP: 2, **PLAIN}, wrap=without("_allreduce_word_embedding_grads"), says="the gradient of embedding.word_embeddings.weight"
    ),
    "a tied head that went its own way": Fault(
        settings={PP: 2}, spoil=flip_bit("output_layer.weight"), says="embedding.word_embeddings.weight (tied with the head) differ"
    ),
    "weights that were not gathered": Fault(settings={}, spoil=flip_bit(QKV), says=f"{QKV} differ between the data and context"),
    "a copy of an expert": Fault(settings={}, model="MoE", spoil=flip_bit(EXPERT), says=f"{EXPERT} differ between the expert-data"),
    "a copy of a router": Fault(
        settings={TP: 2, SP: True}, model="MoE", spoil=flip_bit("decoder.layers.1.mlp.router.weight"), says="mlp.router.weight differ"
    ),
    "a moment that drifts": Fault(settings=PLAIN, spoil=on_second(change_moment), says="the moment of "),
    "a bfloat16 weight that is not its float32 copy": Fault(
        settings={TP: 2, "torch_dtype": "bfloat16"}, spoil=flip_bit(QKV), says=f"{QKV} of rank 1 differs from its rounded float32 copy"
    ),
    "another learning rate": Fault(settings={}, spoil=on_second(faster), says="learning_rate differ between the ranks 0 and 1"),
    "a guard that remembers something else": Fault(
        settings={}, spoil=on_second(lambda policy: policy.gradient_check._norms.append(1.0)), says="the state of the gradient check differ"
    ),
    "other tokens on a tensor-parallel rank": Fault(
        settings={TP: 2}, batch=change_rows("token_ids", shift), says="token_ids differ between the tensor-parallel ranks 0 and 1"
    ),
    "other advantages on a later stage": Fault(
        settings={PP: 2}, batch=change_rows("advantages", halve), says="advantages differ between the pipeline ranks 0 and 1"
    ),
    "a reference that is not one": Fault(
        settings={TP: 2, "beta": 0.05}, spoil=on_second(lambda policy: _reference(policy)), says=f"the reference's {NORM} differ"
    ),
    "dropout from other random numbers": Fault(
        settings={TP: 2, "tuner_type": "lora", "lora_dropout": 0.1}, spoil=on_second(lambda policy: torch.manual_seed(5)),
        says="the random numbers of dropout differ between the tensor-parallel ranks 0 and 1",
    ),
    "an adapter that went its own way": Fault(
        settings={TP: 2, "tuner_type": "lora", "beta": 0.05}, spoil=flip_bit("decoder.layers.0.self_attention.linear_qkv.lora_a"),
        says="linear_qkv.lora_a differ between the tensor-parallel ranks 0 and 1",
    ),
}  # fmt: skip
NOT_POSSIBLE = {
    5: "the mask of padding is cut by our router with the group that it holds, which the replica check compares (4, 7, 13)",
    6: "no model here has cross attention",
    12: "Megatron-FSDP is not used; a checkpoint's names have the layer's number in the whole model",
}


def _count(policy: Any) -> None:
    from megatron_grpo.core.policy.router import routers

    for router in routers(policy.chunks):
        router.num_routed_tokens -= 1


def _reference(policy: Any) -> None:
    flip(policy.exchange.tensors(policy.reference.chunks)[NORM], 1, 0)


# ---- running them ------------------------------------------------------------------------------------------------------------------------


def find_replica_faults(fault: Fault, path, samples, parallel, world: int) -> tuple[str | None, str | None, str | None]:
    """Return the findings of the first, clean step and of the second on this rank, and those of the log-prob check."""
    from megatron_grpo.run.assemble.output import version_check

    cfg = cases.settings(**cases.MODEL_SETTINGS.get(fault.model, {}) | dict(logprob_diff_warn=0.6) | fault.settings)
    policy, rank = cases.build(path, cfg, world, parallel), parallel.rank
    check, gap = ReplicaCheck(1), version_check(cfg)
    first = ReplicaCheckObserver(policy, check)
    policy.train_step(cases.make_batch(policy, make_samples(samples[0]), 0), first)
    assert gap(first.metrics) is None, first.metrics
    if fault.spoil is not None:
        fault.spoil(policy, rank)
    batch = cases.make_batch(policy, make_samples(samples[1]), 1)
    second = ReplicaCheckObserver(policy, check, fault.late)
    with fault.wrap(policy, rank) if fault.wrap is not None else contextlib.nullcontext():
        policy.train_step(batch if fault.batch is None else fault.batch(batch, rank), second)
    said = [None if one is None else str(one) for one in (first.found, second.found)]
    return said[0], said[1], gap(second.metrics)


def seeded(names, models, batches) -> dict[str, list]:
    """Return the findings of these faults on all ranks, on two ranks; faults of one layout share the ranks."""
    from tests.ranks import run_ranks

    by_layout: dict[str, list[str]] = {}
    for name in names:
        layout = {key: value for key, value in FAULTS[name].settings.items() if key in (TP, SP, CP, PP, EP)}
        by_layout.setdefault(repr(layout), []).append(name)
    found = {}
    for mine in by_layout.values():

        def body(rank, world, mine):
            parallel = cases.join(cases.settings(**FAULTS[mine[0]].settings), world)
            return [
                find_replica_faults(FAULTS[name], models[FAULTS[name].model], batches[FAULTS[name].model], parallel, world) for name in mine
            ]

        for name, *by_rank in zip(mine, *run_ranks(body, 2, mine, timeout=120 + 30 * len(mine)), strict=True):
            found[name] = by_rank
    return found


def clean(layout: cases.Case, model: str, path, runs, parallel_settings, steps: int = 2) -> list[list[str]]:
    """Return the findings of runs without a fault on rank 0, which must be none. runs: (settings, samples by step) of each."""
    from tests.ranks import run_ranks

    def body(rank, world):
        parallel, said = cases.join(cases.settings(**parallel_settings), world), []
        for settings, samples in runs:
            policy = cases.build(path, cases.settings(**settings), world, parallel)
            looks = ReplicaCheckObserver(policy, ReplicaCheck(1))
            found = []
            for index in range(steps):
                policy.train_step(cases.make_batch(policy, samples[index], index), looks)
                if looks.found is not None:
                    found.append(str(looks.found))
            said.append(found)
        return said

    return run_ranks(body, layout.world_size, timeout=60 + 30 * len(runs))[0]
