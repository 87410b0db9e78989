"""Check of replicas: compare, bit for bit, tensors that tensor, context, pipeline, expert or data parallel ranks hold in common.

Megatron-Core keeps copies equal by the same operations on each of them, but never checks that they are. A gradient that is not summed over
a group, different data on ranks that should share it, or a flipped bit leave the loss falling, with a wrong gradient. The check runs every
few steps, before the optimizer. Each rank computes a fingerprint of every tensor (`analysis.fingerprint`), and each group reduces the
maximum and minimum of each fingerprint: one collective per group, 16 bytes per tensor. If all are equal, nothing else is sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from megatron_grpo.commands.analysis.fingerprint import fingerprint
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.parallel.state import ParallelState
from megatron_grpo.core.policy.router import routers
from megatron_grpo.core.policy.sharded_state import chain, is_distributed, iterate_runs, steps_counted
from megatron_grpo.core.types import GlobalBatch, RowKey
from megatron_grpo.core.weights.mapping import is_of_adapter
from megatron_grpo.core.weights.names import ShardSplit

# Kinds of values in the order in which a fault spreads: the first kind that differs is its origin.
KINDS = ("group", "list", "data", "weight", "mark", "reference", "random numbers", "log-probs", "gradient", "moment", "number")
GROUPS = {
    "TP": "tensor-parallel ranks",
    "DP": "data and context parallel ranks",
    "CP": "context-parallel ranks",
    "PP": "pipeline ranks",
    "EDP": "expert-data-parallel ranks",
    "ETP": "expert-tensor-parallel ranks",
    "all": "ranks",
    "EP": "expert-parallel ranks",
    "": "copies on one rank",
}
SHOWN = 4  # maximum differences that are listed
_FEWEST = torch.iinfo(torch.int64).min
Held = tuple[str, str, tuple[str, ...], torch.Tensor | int]  # kind, name, groups that hold it in common, the tensor or its fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMismatch:
    """Copies of one value that differ between ranks.

    Args:
        kind: Kind of the value, one of KINDS.
        name: Name of the value.
        over: Group that was compared, a key of GROUPS.
        copies: (rank, fingerprint) of the compared copies.
    """

    kind: str
    name: str
    over: str
    copies: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        rank = self.copies[0][0] if self.copies else None
        if self.kind == "group":
            return f"{self.name} of rank {rank} is not the group of its {GROUPS[self.over]}"
        if self.kind == "mark":
            message = f"{self.name} is sharded over {GROUPS[self.over]} and not marked as sharded: the gradient norm counts "
            return message + "the first rank's part alone"
        if not self.over:
            return f"{self.name} of rank {rank} differs from its rounded float32 copy"
        nouns = {"log-probs": f"the {self.name}", "reference": f"the reference's {self.name}"}
        nouns |= dict.fromkeys(("list", "number", "data", "weight"), self.name)
        noun = nouns.get(self.kind, f"the {self.kind} of {self.name}")
        return f"values of {noun} differ between the {GROUPS[self.over]} {self._sides()}"

    def _sides(self) -> str:
        """Return the ranks in groups that agree, smaller groups first, because they are more likely to be faulty."""
        sides: dict[int, list[int]] = {}
        for rank, number in self.copies:
            sides.setdefault(number, []).append(rank)
        parts = sorted(sides.values(), key=lambda ranks: (len(ranks), -ranks[0]) if len(sides) < len(self.copies) else (0, ranks[0]))
        return " and ".join(", ".join(map(str, ranks)) for ranks in parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaCheckResult:
    """All differences that a check found, the likeliest origin first.

    Args:
        step: Optimizer step that was about to run, counted from 1.
        equal_at: Step of the last check without differences; None if there was none.
        mismatches: Differences.
        mine: This rank's copies of the first differences, by "kind name".
    """

    step: int
    equal_at: int | None
    mismatches: tuple[ReplicaMismatch, ...]
    mine: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __str__(self) -> str:
        num_more = len(self.mismatches) - SHOWN
        since_text = "this is the first check" if self.equal_at is None else f"all replicas were equal at step {self.equal_at}"
        lines = "; ".join(map(str, self.mismatches[:SHOWN])) + (f"; and {num_more} more" if num_more > 0 else "")
        return f"replica check before optimizer step {self.step} ({since_text}): {lines}"


class ReplicaCheck:
    """Check of replicas at the first optimizer step of a run and at every `interval`-th one.

    Args:
        interval: Interval in optimizer steps; 0 for no checks.
    """

    def __init__(self, interval: int):
        self.every = interval
        self._equal_at: int | None = None
        self._has_looked = False
        self._lists: dict[str, bool] = {}  # by group: whether its ranks have the same tensors

    def is_due(self, step: int) -> bool:
        """Return whether the next step needs a check; the same on every rank."""
        return self.every > 0 and (not self._has_looked or step % self.every == 0)

    @torch.no_grad()
    def compare(
        self, policy: Any, batch: GlobalBatch, metrics: Mapping[str, float], logprobs: Mapping[RowKey, np.ndarray]
    ) -> ReplicaCheckResult | None:
        """Compare all replicas, after the gradient is summed and before the optimizer runs. Collective; the same result on every rank.

        Returns:
            The differences; None if there are none.
        """
        self._has_looked = True
        values = list(replicated_values(policy, batch, metrics, logprobs))
        mismatches = [*_strange_groups(policy), *_unmarked(policy), *_rounded(policy)]
        groups = list_process_groups(policy.parallel)
        for name, group in groups.items():
            if collectives.num_ranks(group) > 1:
                mismatches += self._compared(name, group, [value for value in values if name in value[2]], policy.parallel)
        if not collectives.all_reduce_max(len(mismatches)):
            self._equal_at = batch.step + 1
            return None
        all_mismatches = dict.fromkeys(mismatch for part in collectives.all_gather_object(mismatches) for mismatch in part)
        sorted_mismatches = tuple(sorted(all_mismatches, key=lambda mismatch: KINDS.index(mismatch.kind)))
        first = {f"{mismatch.kind} {mismatch.name}" for mismatch in sorted_mismatches[:SHOWN]}
        tensors = {f"{kind} {name}": value for kind, name, _, value in values if isinstance(value, torch.Tensor)}
        own_copies = {name: tensor for name, tensor in tensors.items() if name in first}
        return ReplicaCheckResult(step=batch.step + 1, equal_at=self._equal_at, mismatches=sorted_mismatches, mine=own_copies)

    def _compared(self, group_name: str, group: Any, values_held: Sequence[Held], parallel: ParallelState) -> list[ReplicaMismatch]:
        """Return the differences within one group. Ranks without a tensor are ignored for it. Collective over the group."""
        if group_name not in self._lists:
            names = _parse_number(json.dumps([entry[:2] for entry in values_held]))
            copies = collectives.all_gather_object((parallel.rank, names), group)
            self._lists[group_name] = len({names for _, names in copies}) == 1
            if not self._lists[group_name]:
                return [ReplicaMismatch(kind="list", name="the list of tensors", over=group_name, copies=tuple(copies))]
        if not values_held or not self._lists[group_name]:
            return []
        absent = torch.tensor([value is _ABSENT for *_, value in values_held], device=parallel.device)
        fingerprints = [fingerprint(value) if isinstance(value, torch.Tensor) else torch.tensor(value) for *_, value in values_held]
        numbers = torch.stack([number.to(parallel.device) for number in fingerprints])
        extremes = torch.cat([numbers, ~numbers]).masked_fill_(absent.repeat(2), _FEWEST)
        largest, smallest = collectives.max_(extremes, group).chunk(2)
        is_present = (largest != _FEWEST) | (smallest != _FEWEST)
        differs = torch.nonzero(is_present & (largest != ~smallest)).flatten().tolist()
        if not differs:
            return []
        values = [None if bool(absent[i]) else int(numbers[i]) for i in differs]
        copies = collectives.all_gather_object((parallel.rank, values), group)
        having = [tuple((rank, own[n]) for rank, own in copies if own[n] is not None) for n in range(len(differs))]
        return [
            ReplicaMismatch(kind=values_held[index][0], name=values_held[index][1], over=group_name, copies=own)
            for index, own in zip(differs, having, strict=True)
        ]


def list_process_groups(parallel: ParallelState) -> dict[str, Any]:
    """Return the process groups by the keys of GROUPS, in the same order on every rank."""
    return {"TP": parallel.tp_group, "CP": parallel.cp_group, "PP": parallel.pp_group, "DP": parallel.dp_cp_group,
            "EDP": parallel.edp_group, "ETP": parallel.etp_group, "all": None}  # fmt: skip


# ---- values that must be equal ---------------------------------------------------------------------------------------------------------

# Attributes of modules and of their shared `pg_collection`.
_HELD = {"tp_group": "TP", "_tp_group": "TP", "cp_group": "CP", "ep_group": "EP", "pg_collection.tp": "TP", "pg_collection.cp": "CP",
         "pg_collection.pp": "PP", "pg_collection.ep": "EP", "pg_collection.expt_tp": "ETP"}  # fmt: skip
_ABSENT = torch.zeros(0)  # this rank has no such tensor


def replicated_values(
    policy: Any, batch: GlobalBatch, metrics: Mapping[str, float], logprobs: Mapping[RowKey, np.ndarray]
) -> Iterator[Held]:  # fmt: skip
    """Yield all values of this rank that other ranks hold too, in the same order on all ranks of a group."""
    yield from _data(batch)
    for name, tensor in list_tensors(policy).items():
        yield "weight", name, _list_groups(policy, name), tensor
    yield from _tied(policy)
    if policy.reference is not None and policy.reference.chunks is not policy.wrapped:  # with adapters, it is the policy without them
        for name, tensor in policy.exchange.tensors(policy.reference.chunks).items():
            yield "reference", name, _list_groups(policy, name), tensor
    yield from _random(policy)
    if policy.parallel.is_last_stage:
        together = np.concatenate([np.zeros(0, dtype=np.float32), *(logprobs[key] for key in sorted(logprobs))])
        yield "log-probs", "log-probs of the training forward", ("TP", "CP"), torch.from_numpy(together)
    yield from _iterate_optimizer_state(policy)
    yield from _numbers(policy, batch, metrics)


def list_tensors(policy: Any) -> dict[str, torch.Tensor]:
    """Return parameters (including adapters) and checkpointed buffers, by their names in the whole model."""
    tensors = dict(policy.exchange.tensors(policy.chunks))
    return tensors | (policy.adapters.exchange.tensors(policy.chunks) if policy.adapters is not None else {})


def _list_groups(policy: Any, name: str) -> tuple[str, ...]:
    """Return the groups whose ranks hold the same shard of a tensor."""
    kind = _kind(policy, name)
    copies, model_parallel = ("EDP", "ETP") if kind.is_expert else ("DP", "TP")
    return (copies, model_parallel) if kind.cut is ShardSplit.REPLICATED else (copies,)


def _kind(policy: Any, name: str) -> Any:
    exchange = policy.adapters.exchange if is_of_adapter(name) else policy.exchange
    return exchange.map.entry(name)


def _data(batch: GlobalBatch) -> Iterator[Held]:
    """Yield the training data of a data-parallel rank, before context parallelism splits it."""
    for entry in fields(batch.micro_batches[0]) if batch.micro_batches else ():
        digest = blake2b(digest_size=8)
        for micro in batch.micro_batches:
            value = getattr(micro, entry.name)
            if entry.name == "images":
                value = tuple(picture.key for picture in value)
            digest.update(np.ascontiguousarray(value).tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
        yield "data", entry.name, ("TP", "CP", "PP"), int.from_bytes(digest.digest(), "little", signed=True)


def _tied(policy: Any) -> Iterator[Held]:
    """Yield the embedding and the output layer tied to it, on the first and last pipeline stage."""
    if policy.parallel.pp_size == 1 or not getattr(policy.chunks[0], "share_embeddings_and_output_weights", False):
        return
    tensors = list_tensors(policy)
    tensor = tensors.get("embedding.word_embeddings.weight", tensors.get("output_layer.weight"))
    yield "weight", "embedding.word_embeddings.weight (tied with the head)", ("PP",), _ABSENT if tensor is None else tensor
    if not is_distributed(policy.optimizer):  # its gradient shards differ between stages
        gradient = getattr(tensor, "main_grad", None)
        yield "gradient", "embedding.word_embeddings.weight (tied with the head)", ("PP",), _ABSENT if gradient is None else gradient


def _random(policy: Any) -> Iterator[Held]:
    """Yield the state of the generator from which ranks with the same input sample dropout."""
    if policy.adapters is not None and policy.adapters.settings.dropout:
        state = torch.cuda.get_rng_state() if policy.parallel.device.type == "cuda" else torch.get_rng_state()
        yield "random numbers", "dropout", ("TP",), state


def _iterate_optimizer_state(policy: Any) -> Iterator[Held]:
    """Yield summed gradients, Adam's moments, and the float32 weights of the optimizer.

    A distributed optimizer gives each rank its own range of each, so these are compared over TP.
    """
    names = {id(tensor): name for name, tensor in list_tensors(policy).items()}
    for parameter, _, gradient, _, states in _trained(policy):
        name = names[id(parameter)]
        groups = _list_groups(policy, name)
        if is_distributed(policy.optimizer):
            groups = tuple(group for group in groups if group in ("TP", "ETP"))
        yield "gradient", name, groups, gradient
        for state_name, tensor in sorted(states.items()):
            if isinstance(tensor, torch.Tensor) and tensor.dim():
                yield "moment", f"{name} ({state_name})", groups, tensor


def _trained(policy: Any) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, Mapping[str, Any]]]:
    """Yield (parameter, this rank's part of it, of its gradient and of its float32 weights, optimizer state of that part)."""
    if is_distributed(policy.optimizer):
        for parameter, start, end, states in iterate_runs(policy.optimizer):
            own, gradient = (x.detach().view(-1)[start:end] for x in (parameter, parameter.main_grad))  # type: ignore[attr-defined]
            yield parameter, own, gradient, states["param"], states
        return
    for parameter in (parameter for chunk in policy.chunks for parameter in chunk.parameters() if parameter.requires_grad):
        main: Any = getattr(parameter, "main_param", parameter)
        optimizer_states = (part.optimizer.state for part in chain(policy.optimizer))
        states = next((states[main] for states in optimizer_states if main in states), {})
        yield parameter, parameter.detach(), parameter.main_grad, main, states


def _numbers(policy: Any, batch: GlobalBatch, metrics: Mapping[str, float]) -> Iterator[Held]:
    """Yield the scalars that every rank uses or computes."""
    for name in ("step", "num_sequences", "num_loss_tokens", "num_tokens", "num_contexts", "staleness", "lag"):
        yield "number", f"{name} of the batch", ("all",), _parse_number(repr(np.asarray(getattr(batch, name)).tolist()))
    for name in ("loss", "grad_norm", "learning_rate"):
        yield "number", name, ("all",), _parse_number(repr(float(metrics.get(name, 0.0))))
    counted = {router.num_routed_tokens for router in routers(policy.chunks)}
    yield "number", "the token counts of routers", ("all",), _parse_number(repr(counted)) if counted else _ABSENT
    yield "number", "the state of the gradient check", ("all",), _parse_number(json.dumps(policy.gradient_check_state(), sort_keys=True))
    yield "number", "the steps of the schedule", ("all",), int(policy.version)
    yield "number", "Adam's steps", ("TP", "DP"), steps_counted(policy.optimizer)


# ---- checks of one rank ----------------------------------------------------------------------------------------------------------------


def _strange_groups(policy: Any) -> list[ReplicaMismatch]:
    """Find process groups in modules of Megatron-Core that are not those of the job.

    A collective over such a group would mix data of other replicas.
    """
    p, mismatches = policy.parallel, []
    ranks = {over: collectives.members(group) for over, group in ({"EP": p.ep_group} | list_process_groups(p)).items()}
    checked: set[tuple[int, str]] = set()
    for chunk in policy.chunks:
        for name, module in chunk.named_modules():
            for attribute, over in _HELD.items():
                owner, _, attr = attribute.rpartition(".")
                group = getattr(getattr(module, owner, None) if owner else module, attr, None)
                its = "ETP" if over == "TP" and ".experts" in name and not owner else over
                if group is None or (id(group), its) in checked:
                    continue
                checked.add((id(group), its))
                if not isinstance(group, list) and collectives.members(group) != ranks[its]:
                    mismatches.append(ReplicaMismatch(kind="group", name=f"{name}.{attribute}", over=its, copies=((p.rank, 0),)))
    return mismatches


def _unmarked(policy: Any) -> list[ReplicaMismatch]:
    """Find sharded weights without Megatron's mark for them. For adapters in experts, the mark has another meaning."""
    group = policy.parallel
    mismatches = []
    for name, tensor in policy.exchange.tensors(policy.chunks).items():
        kind = _kind(policy, name)
        over, size = ("ETP", group.etp_size) if kind.is_expert else ("TP", group.tp_size)
        if size > 1 and kind.cut is not ShardSplit.REPLICATED and not getattr(tensor, "tensor_model_parallel", False):
            mismatches.append(ReplicaMismatch(kind="mark", name=name, over=over, copies=()))
    return mismatches


def _rounded(policy: Any) -> list[ReplicaMismatch]:
    """Find bfloat16 weights that differ from the rounded float32 weights of the optimizer."""
    names = {id(tensor): name for name, tensor in list_tensors(policy).items()}
    pairs = [(names[id(p)], weight, main) for p, weight, _, main, _ in _trained(policy) if weight.dtype is not main.dtype]
    pairs = [pair for pair in pairs if pair[1].device == pair[2].device]
    if not pairs:
        return []
    # NaN is ignored here: the gradient check finds it.
    rounded = [(weight, main.detach().to(weight.dtype).view_as(weight)) for _, weight, main in pairs]
    is_different = torch.stack([((weight != master) & ~(weight.isnan() & master.isnan())).any() for weight, master in rounded]).tolist()
    return [
        ReplicaMismatch(kind="weight", name=name, over="", copies=((policy.parallel.rank, 0),))
        for (name, _, _), is_wrong in zip(pairs, is_different, strict=True)
        if is_wrong
    ]


# ---- numbers ---------------------------------------------------------------------------------------------------------------------------


def _parse_number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
