"""Weight sync from the policy to the rollout engine, and verification that the engine samples from these weights.

A sync can fail without an error: a packed copy of a tied head or of an expert keeps its old value, part of a layer is lost, the KV cache of
the old weights is used with the new ones, or one engine of several misses the update. All of these show only in log-probs, so after every
sync both sides score the same probe sequences. Only this module knows both the policy and the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from megatron_grpo.core.base import activity
from megatron_grpo.core.base.cleanup import CleanUp
from megatron_grpo.core.base.errors import WeightsNotFiniteError
from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.policy.gradient_check import describe_weights, weights_not_finite
from megatron_grpo.core.rollout.engine import ReceiverChangedError, WeightReceiver, WeightSyncError
from megatron_grpo.core.types import TokenSequence
from megatron_grpo.core.weights.buckets import NO_VERSION, TensorSlice, WeightUpdate, joined

if TYPE_CHECKING:
    import torch

    from megatron_grpo.core.policy.policy import Policy
    from megatron_grpo.core.policy.reference import FrozenPolicy

logger = logging.getLogger(__name__)
Value = TypeVar("Value")

__all__ = ["WeightSyncManager", "SyncStats", "WeightSyncError", "check_weights", "sync"]

# float32: trainer and engine differ by their order of summation, 1e-5 on models of 50 M parameters; a stale weight shows as 1e-1 and more.
# So the largest difference of any token is bounded.
FLOAT32_MAX = 1e-3
# bfloat16: single tokens differ by 0.05, and by up to 0.7 where a router's decision flips, so the bound is on means: they stay below 0.05,
# while stale weights or a stale cache give 1 and more. The mean over tokens read through the prefix cache (one a probe) is over fewer, so
# it may be twice as large.
BFLOAT16_MEAN = 0.2
BFLOAT16_MEAN_CACHED = 0.4
# The share of the trainer's change under a trial adapter that an engine shows too is 1 if it applies the adapter, and 0 if it ignores it.
# It is measured over all tokens of the probes, so it also detects adapters whose effect is below the bounds above. Its standard error must
# be at most a fifth of its bound.
FOLLOWED = 0.5
FOLLOWED_ERROR = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncStats:
    """Statistics of a weight sync.

    Differences are |trainer - engine| log-probs of the probes over all engines, in nats; NaN: nothing was checked.

    Args:
        image_difference_max: Largest difference over the probes with an image.
    """

    num_tensors: int = 0
    num_bytes: int = 0
    logp_difference_max: float = float("nan")
    logp_difference_mean: float = float("nan")
    image_difference_max: float = float("nan")


class WeightSyncManager:
    """Keeper of the engine's weights: syncs the policy's weights to it and verifies that it uses them.

    If adapters train, the first check is a trial with an adapter far from zero: a new adapter changes nothing, so an engine that ignores it
    would agree.
    """

    def __init__(
        self, policy: Policy | FrozenPolicy, receiver: WeightReceiver, *, verify: bool, is_low_precision: bool = False,
        starts_as_checkpoint: bool = True, print_line: Callable[[str], None] | None = None, hint: str = "",
    ):  # fmt: skip
        """Set up the manager.

        Args:
            verify: Compare log-probs after every sync, and once before the first: the engine read the checkpoint separately, and both sides
                must agree on it.
            is_low_precision: Whether the trainer is not float32.
            starts_as_checkpoint: Whether the policy of version 0 is the checkpoint.
            print_line: Prints how well both sides agree on probes with images, at the first check and after the first sync.
        """
        self._print_line, self._num_printed, self._hint = print_line, 0, hint
        self.policy, self.receiver, self.verify, self.is_low_precision = policy, receiver, verify, is_low_precision
        self._is_proven, self._has_policy = not verify, starts_as_checkpoint

    def sync_weights(self, version: int) -> SyncStats | None:
        """Sync the weights, unless the engine has this version. Collective over all ranks.

        Returns:
            The statistics, or None if there was nothing to do.

        Raises:
            WeightSyncError: The weights of some engine differ from the trainer's. Raised on every rank.
            WeightsNotFiniteError: The trainer's weights are not finite.
            NoRolloutServerError: No rollout server is available.
        """
        if self._is_proven and self._has_policy and self.receiver.version == version:
            return None
        while True:
            try:
                if self.receiver.prepare():
                    self._is_proven = not self.verify
                return self._sync_weights(version)
            except WeightSyncError as error:
                if self._hint:
                    raise WeightSyncError(f"{error}\n{self._hint}") from error
                raise
            except ReceiverChangedError as changed:
                if collectives.rank() == 0:
                    logger.warning("%s. The weights are synced again.", changed)

    def _sync_weights(self, version: int) -> SyncStats:
        if not self._is_proven:
            self._check_adapter()
        stats = SyncStats()
        if not self._has_policy or self.receiver.version != version:
            stats = sync(self.policy, self.receiver, version=version, verify=self.verify, is_low_precision=self.is_low_precision)
        else:
            stats = check_weights(self.policy, self.receiver, version=version, is_low_precision=self.is_low_precision)
        self._is_proven = self._has_policy = True
        self._print_image_difference(version, stats)
        return stats

    def _print_image_difference(self, version: int, stats: SyncStats) -> None:
        if self._print_line is not None and self._num_printed < 2 and not np.isnan(stats.image_difference_max):
            self._num_printed += 1
            difference = f"{stats.image_difference_max:.1e} nats"
            self._print_line(
                f"Images: in probes with an image, sampler and trainer differ by at most {difference} per token "
                f"(weights of version {version})."
            )

    def _check_adapter(self) -> None:
        """Verify with a trial adapter that the engine applies adapters.

        Afterwards the engine has no version, so the weights are synced next; unless there is no adapter to try.
        """
        with self.policy.trial() as update:
            if update is None:
                return
            if update.kind == "adapter" and not self.receiver.has_base:
                self.policy.free_memory(keep="weights")
                with self.policy.on_device("weights"):
                    _send_weights(self.receiver, next(self.policy.updates(NO_VERSION, has_base=False)))
            with_trial = np.concatenate(_logprobs(self.policy, self.receiver.probes()))
            self.policy.free_memory(keep="weights")
            _send_weights(self.receiver, replace(update, version=NO_VERSION))
            check_weights(self.policy, self.receiver, version=NO_VERSION, is_low_precision=self.is_low_precision)
            engine_logprobs = {name: np.concatenate(scores) for name, scores in self.receiver.scores(self.receiver.probes()).items()}
        without_trial = np.concatenate(_logprobs(self.policy, self.receiver.probes()))
        local = {name: _followed_share(scores, with_trial, without_trial) for name, scores in engine_logprobs.items()}
        problem = _trial_problem(_gather_by_engine(local))
        if problem:
            raise WeightSyncError(problem)


def sync(
    policy: Policy | FrozenPolicy, receiver: WeightReceiver, *, version: int, verify: bool, is_low_precision: bool = False
) -> SyncStats:
    """Push the policy's weights to the engine. Collective over all ranks.

    Args:
        verify: Compare log-probs afterwards.
        is_low_precision: Whether the trainer is not float32.
    """
    num_tensors = num_bytes = 0
    policy.free_memory(keep="weights")
    with policy.on_device("weights"):
        if not verify:
            check_finite(policy)
        for update in policy.updates(version, has_base=receiver.has_base):
            counted = _send_weights(receiver, update)
            num_tensors, num_bytes = num_tensors + counted.num_tensors, num_bytes + counted.num_bytes
    stats = check_weights(policy, receiver, version=version, is_low_precision=is_low_precision) if verify else SyncStats()
    return replace(stats, num_tensors=num_tensors, num_bytes=num_bytes)


def _send_weights(receiver: WeightReceiver, update: WeightUpdate) -> _CountingIterator:
    counted = _CountingIterator(update.tensors)
    with CleanUp(counted.finish):
        receiver.load_weights(replace(update, tensors=counted if getattr(receiver, "takes_slices", False) else joined(counted)))
    return counted


def check_weights(policy: Policy | FrozenPolicy, receiver: WeightReceiver, *, version: int, is_low_precision: bool = False) -> SyncStats:
    """Compare the log-probs of trainer and engines on the probes, over all engines. Collective over all ranks.

    Called once before the first rollout, it verifies that both sides loaded the same checkpoint.

    Args:
        version: Expected version of the engine's weights; NO_VERSION for a trial adapter.
        is_low_precision: Whether the trainer is not float32.

    Raises:
        WeightSyncError: The log-probs differ too much, or an engine has another version. Raised on every rank, with the numbers.
        WeightsNotFiniteError: The trainer's weights are not finite.
    """
    probes = receiver.probes()
    expected = _logprobs(policy, probes)
    if not all(np.isfinite(policy_logprobs).all() for policy_logprobs in expected):
        with policy.on_device("weights"):
            check_finite(policy)
    policy.free_memory()  # scoring wakes the engine's KV cache, which sampling then uses
    reports_here = {}
    for name, scores in receiver.scores(probes).items():
        differences = [
            np.abs(np.asarray(engine_logprobs) - policy_logprobs) for engine_logprobs, policy_logprobs in zip(scores, expected, strict=True)
        ]
        uncached, cached = np.concatenate([d[:-1] for d in differences]), np.array([d[-1] for d in differences])
        with_images = [float(d.max()) for d, probe in zip(differences, probes, strict=True) if probe.images]
        reports_here[name] = _EngineDifferences(
            version=receiver.version, uncached=uncached, cached=cached, with_images=max(with_images, default=float("nan"))
        )
    reports = _gather_by_engine(reports_here)
    problem = _problem(reports, version, is_low_precision or receiver.dtype != "float32")
    if problem:
        raise WeightSyncError(problem)
    differences_of_all = np.concatenate([np.concatenate([report.uncached, report.cached]) for report in reports.values()])
    worst = max(report.with_images for report in reports.values())
    return SyncStats(
        logp_difference_max=float(differences_of_all.max()),
        logp_difference_mean=float(differences_of_all.mean()),
        image_difference_max=worst,
    )


def check_finite(policy: Policy | FrozenPolicy) -> None:
    """Raise WeightsNotFiniteError if some weight of the policy is not finite. Collective over all ranks."""
    if weights := weights_not_finite(policy.chunks):
        raise WeightsNotFiniteError(f"The run ends: {describe_weights(weights)}.")


def _gather_by_engine(local: Mapping[str, Value]) -> dict[str, Value]:
    """Return the findings of all ranks, by the engine's name. Collective."""
    return {name: value for part in collectives.all_gather_object(dict(local)) for name, value in part.items()}


def _logprobs(policy: Policy | FrozenPolicy, probes: Sequence[TokenSequence]) -> list[np.ndarray]:
    """Return the trainer's log-probs of each probe, float32 [T - 1]."""
    with policy.on_device("weights"):
        return [scored[1:] for scored in policy.scorer.score(probes, temperature=1.0)]


def _followed_share(engine_logprobs: np.ndarray, with_trial: np.ndarray, without_trial: np.ndarray) -> tuple[float, float]:
    """Return how much of the trainer's change the engine shows too.

    Returns:
        (share of the trainer's change from untried to tried, by least squares; its standard error).
    """
    moved, followed = with_trial.astype(np.float64) - without_trial, np.asarray(engine_logprobs, dtype=np.float64) - without_trial
    length = float(moved @ moved)
    if not length:
        return 0.0, float("inf")
    share = float(moved @ followed) / length
    return share, float(np.sqrt(((followed - share * moved) ** 2).mean() / length))


def _trial_problem(shares_by_engine: Mapping[str, tuple[float, float]]) -> str | None:
    """Return the problem with a trial adapter, or None.

    The comparisons are written so that NaN is a problem.

    Args:
        shares_by_engine: (share, standard error) of each engine, by its name.
    """
    shares = ", ".join(f"{name} {share:.2f} +- {error:.2g}" for name, (share, error) in shares_by_engine.items())
    if not all(error <= FOLLOWED_ERROR for _, error in shares_by_engine.values()):
        return (
            "The adapter check is inconclusive: the trial adapter changes the trainer's log-probs too little to detect an engine "
            f"that ignores it (share of the change seen in the engines: {shares}). Use more target modules or float32, or skip the "
            "check with verify_weight_sync false."
        )
    if not all(abs(share - 1) <= FOLLOWED for share, _ in shares_by_engine.values()):
        return (
            f"The rollout engine ignores the trial adapter or applies only a part of it: share of the change seen in the engines: {shares}."
        )
    return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _EngineDifferences:
    """Differences of one engine. `cached` covers the probes' last tokens, read through the prefix cache."""

    version: int
    uncached: np.ndarray
    cached: np.ndarray
    with_images: float = float("nan")  # the largest of a probe with an image


def _problem(reports: Mapping[str, _EngineDifferences], version: int, is_low_precision: bool) -> str | None:
    """Return the problem with the reports, by the engine's name, or None."""
    other_versions = {name: report.version for name, report in reports.items() if report.version != version}
    if other_versions:
        return f"After the weight sync to {_name(version)}, these engines have another version: {other_versions} (engine: version)"

    def is_good(differences: np.ndarray, mean_bound: float) -> bool:
        # Written so that NaN is not good.
        return bool(differences.mean() <= mean_bound if is_low_precision else differences.max() <= FLOAT32_MAX)

    bad_uncached = [name for name, report in reports.items() if not is_good(report.uncached, BFLOAT16_MEAN)]
    bad_cached = [name for name, report in reports.items() if not is_good(report.cached, BFLOAT16_MEAN_CACHED)]
    if not bad_uncached and not bad_cached:
        return None
    bound = (
        f"a mean of {BFLOAT16_MEAN} ({BFLOAT16_MEAN_CACHED} through the prefix cache)" if is_low_precision else f"{FLOAT32_MAX} at a token"
    )
    different = {name: reports[name] for name in reports if name in {*bad_uncached, *bad_cached}}
    lines = [
        f"The rollout engine does not sample from {_name(version)}.",
        f"Its log-probs of the probe sequences differ from the trainer's by more than {bound}:",
    ]
    lines += [
        f"  {name}: max {report.uncached.max():.3g}, mean {report.uncached.mean():.3g}; "
        f"through the prefix cache: max {report.cached.max():.3g}, mean {report.cached.mean():.3g}"
        for name, report in different.items()
    ]
    if not bad_uncached:
        hint = "Only tokens read through the prefix cache differ: it was not reset and has keys and values of older weights"
    elif len(different) < len(reports):
        hint = "Only some engines differ: they missed the weight sync, or the ranks of one engine received different tensors"
    else:
        hint = "All engines differ: a weight has its old value (tied head, packed experts), or arrived under a wrong name or incomplete"
        hint += "; or the adapter is ignored" * (version == NO_VERSION)
    return "\n".join([*lines, f"  {hint}."])


def _name(version: int) -> str:
    return "the trial adapter" if version == NO_VERSION else f"the weights of version {version}"


class _CountingIterator:
    """Iterator that passes tensors on and counts them and their bytes."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor | TensorSlice]]):
        self._named = iter(tensors)
        self.num_tensors = self.num_bytes = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | TensorSlice]]:
        for name, tensor in self._named:
            self.num_tensors += not isinstance(tensor, TensorSlice) or tensor.is_last
            self.num_bytes += tensor.nbytes
            activity.advance()
            yield name, tensor

    def finish(self) -> None:
        """Consume what a receiver that failed or stopped has left.

        The other ranks are sent these tensors too, and would wait for this rank.
        """
        for _ in self._named:
            activity.advance()
