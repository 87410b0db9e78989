"""The policy's weights reach the rollout engine, and the engine proves that it samples from them. Only this module knows both.

A push can fail without an error: a packed copy of a tied head or of an expert stays as it was, part of a layer is lost, the KV cache of
the old weights is continued with the new ones, or one engine of several misses it. All of them show in log-probs, and in nothing else, so
after every push both sides score the same probe sequences.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megatron_grpo.rollout.completions import gather_over_all_ranks
from megatron_grpo.rollout.engine import RolloutEngine, WeightSyncError

if TYPE_CHECKING:
    import torch

__all__ = ["PushedPolicy", "SyncStats", "WeightSyncError", "check_weights", "sync_weights"]

# float32: trainer and engine differ by their order of summation, 1e-5 on models of 50 M parameters; a stale weight shows as 1e-1 and more.
# So the largest difference of any token is bounded.
FLOAT32_MAX = 1e-3
# bfloat16: single tokens differ by 0.05, and by up to 0.7 where a router's decision flips, so the bound is on means: they stay below 0.05,
# while stale weights or a stale cache give 1 and more. The mean over tokens read through the prefix cache (one a probe) is over fewer, so
# it may be twice as large.
BFLOAT16_MEAN = 0.2
BFLOAT16_MEAN_CACHED = 0.4


class PushedPolicy(Protocol):
    """What the policy offers to be pushed and checked. Both are collective over all ranks."""

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor), on every rank, layer by layer."""

    def score_tokens(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """log p(token t | before) at temperature 1 for t = 1, 2, ... of each sequence; the same on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncStats:
    """What a sync did. Differences are |trainer - engine| log-probs of the probes over all engines, in nats; NaN: nothing was checked."""

    version: int
    was_pushed: bool
    num_tensors: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    logp_difference_max: float = float("nan")
    logp_difference_mean: float = float("nan")


def sync_weights(policy: PushedPolicy, rollout: RolloutEngine, *, version: int, verify: bool) -> SyncStats:
    """Gives `rollout` the policy's weights, unless it has this version already. Collective over all ranks.

    verify: compare log-probs afterwards. Raises WeightSyncError, on every rank, where some engine does not hold what the trainer holds.
    """
    if rollout.version == version:
        return SyncStats(version=version, was_pushed=False)
    start = time.perf_counter()
    counted = _Counted(policy.named_weights())
    rollout.update_weights(counted, version=version)
    largest = mean = float("nan")
    if verify:
        largest, mean = check_weights(policy, rollout, version=version, is_coarse=counted.has_half_precision)
    return SyncStats(version=version, was_pushed=True, num_tensors=counted.num_tensors, num_bytes=counted.num_bytes,
                     seconds=time.perf_counter() - start, logp_difference_max=largest, logp_difference_mean=mean)  # fmt: skip


def check_weights(policy: PushedPolicy, rollout: RolloutEngine, *, version: int, is_coarse: bool = False) -> tuple[float, float]:
    """Compares what trainer and engines make of the probes; (max, mean) difference over all engines, in nats. Collective over all ranks.

    Once before the first rollout it proves that the checkpoint means the same to both. is_coarse: the trainer is not float32.
    Raises WeightSyncError on every rank, with the numbers.
    """
    probes = rollout.probes()
    expected = policy.score_tokens(probes)
    differences = [np.abs(np.asarray(theirs) - ours) for theirs, ours in zip(rollout.score(probes), expected, strict=True)]
    fresh, cached = np.concatenate([d[:-1] for d in differences]), np.array([d[-1] for d in differences])
    reports = gather_over_all_ranks(_Report(version=rollout.version, fresh=fresh, cached=cached))
    problem = _problem(reports, version, is_coarse or rollout.dtype != "float32")
    if problem:
        raise WeightSyncError(problem)
    every = np.concatenate([np.concatenate([report.fresh, report.cached]) for report in reports])
    return float(every.max()), float(every.mean())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Report:
    """What one rank's engine said. `cached`: the probes' last tokens, read through the prefix cache."""

    version: int
    fresh: np.ndarray
    cached: np.ndarray


def _problem(reports: Sequence[_Report], version: int, is_coarse: bool) -> str | None:
    others = {rank: report.version for rank, report in enumerate(reports) if report.version != version}
    if others:
        return f"after the push of version {version} the engines of these ranks hold another: {others} (rank: version)"

    def is_good(differences: np.ndarray, mean_bound: float) -> bool:
        # Written so that NaN is not good.
        return bool(differences.mean() <= mean_bound if is_coarse else differences.max() <= FLOAT32_MAX)

    bad_fresh = [rank for rank, report in enumerate(reports) if not is_good(report.fresh, BFLOAT16_MEAN)]
    bad_cached = [rank for rank, report in enumerate(reports) if not is_good(report.cached, BFLOAT16_MEAN_CACHED)]
    if not bad_fresh and not bad_cached:
        return None
    bound = f"a mean of {BFLOAT16_MEAN} ({BFLOAT16_MEAN_CACHED} through the prefix cache)" if is_coarse else f"{FLOAT32_MAX} at some token"
    bad = sorted({*bad_fresh, *bad_cached})
    lines = [
        f"the rollout engine does not sample from the weights of version {version}.",
        f"Its log-probs of the probe sequences differ from the trainer's by more than {bound}:",
    ]
    lines += [
        f"  rank {rank}: max {reports[rank].fresh.max():.3g}, mean {reports[rank].fresh.mean():.3g}; "
        f"through the prefix cache: max {reports[rank].cached.max():.3g}, mean {reports[rank].cached.mean():.3g}"
        for rank in bad
    ]
    if not bad_fresh:
        hint = "only tokens read through the prefix cache differ: it was not reset, and holds keys and values of older weights"
    elif len(bad) < len(reports):
        hint = "only some ranks are wrong: their engines missed the push, or the ranks of one engine received different tensors"
    else:
        hint = "every engine is wrong: some weight kept its old value (tied head, packed experts), or arrived under a wrong name or in part"
    return "\n".join([*lines, f"  {hint}."])


class _Counted:
    """Passes the stream on, and remembers how much it was."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]):
        self._named = named
        self.num_tensors = self.num_bytes = 0
        self.has_half_precision = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._named:
            self.num_tensors += 1
            self.num_bytes += tensor.numel() * tensor.element_size()
            self.has_half_precision |= tensor.element_size() < 4
            yield name, tensor
