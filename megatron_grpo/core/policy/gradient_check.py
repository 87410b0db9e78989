"""Gradient checks: decide before the optimizer acts whether a gradient may be used, and find the rows that produced a refused one.

The search costs as much as the step did, so it runs only after a refused gradient.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from megatron_grpo.core.parallel import collectives
from megatron_grpo.core.parallel.state import ParallelState
from megatron_grpo.core.policy.optimizer import own_norm
from megatron_grpo.core.types import RowKey, TrainingMicroBatch

WINDOW = 128  # gradient norms in the running median
FEWEST = 16  # norms that the median needs
SHOWN = 8  # rows and ranks that a message lists

# Row -> {"rollout", "row", "prompt_number", "dataset_row"}
Places = Mapping[RowKey, Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStats:
    """A gradient summed over all ranks, before clipping. The same on every rank.

    Args:
        step: Optimizer steps done before it.
        norm: Norm over all parameters; infinite if any element of it, or the loss, is not finite on any rank.
    """

    step: int
    norm: float


class GradientCheck(Protocol):
    """Check that decides whether the optimizer may use a gradient.

    A check whose answers depend on earlier gradients also has `state()` (JSON, the same on every rank) and `restore(state)`, and a
    checkpoint holds that state.
    """

    def allows(self, gradient: GradientStats) -> bool:
        """Return whether the optimizer may use the gradient; if not, the step is skipped.

        Called once in every step that has something to train, on every rank; all ranks must return the same. It may raise instead: this
        stops the run before the optimizer updates any weight.

        Args:
            gradient: Gradient of the step, summed over ranks.
        """


class GradNormSpikeCheck:
    """Gradient check that refuses a gradient that is not finite or whose norm is above a bound.

    The median is that of the last `WINDOW` norms and needs `FEWEST` of them. Refused norms are among them, so that the median follows if
    all norms have grown. Norms of 0 are not: a step whose groups all have zero std says nothing about the other steps.

    Args:
        max_norm: Largest norm that is accepted; None for no bound.
        factor: Largest accepted multiple of the running median; None for no bound.
    """

    def __init__(self, *, max_norm: float | None = None, factor: float | None = None):
        self.above, self.factor = max_norm, factor
        self.reason: str | None = None  # why the last gradient was refused
        self._norms: deque[float] = deque(maxlen=WINDOW)

    def allows(self, gradient: GradientStats) -> bool:
        self.reason = self._find_reason(gradient.norm)
        if math.isfinite(gradient.norm) and gradient.norm > 0:
            self._norms.append(gradient.norm)
        return self.reason is None

    def _find_reason(self, norm: float) -> str | None:
        if not math.isfinite(norm):
            return "its gradient is not finite"
        if self.above is not None and norm > self.above:
            return f"its gradient norm {norm:.4g} is above {self.above:g} (skip_grad_norm_above)"
        if self.factor is not None and len(self._norms) >= FEWEST:
            median = statistics.median(self._norms)
            if norm > self.factor * median:
                return f"its gradient norm {norm:.4g} is above {self.factor:g} (skip_grad_norm_factor) x {median:.4g}, the running median"
        return None

    def state(self) -> dict[str, Any]:
        """Return the norms of the running median, as JSON."""
        return {"norms": list(self._norms)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the running median from `state()`."""
        self._norms = deque(state["norms"], maxlen=WINDOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipCounter:
    """Counts of the optimizer steps that the gradient check refused in this run.

    Args:
        in_a_row: Consecutive refused steps, the last one included.
    """

    total: int = 0
    in_a_row: int = 0

    def after(self, *, is_skipped: bool) -> SkipCounter:
        """Return the counts after one more step.

        Args:
            is_skipped: Whether the gradient of that step was refused.
        """
        return SkipCounter(total=self.total + is_skipped, in_a_row=self.in_a_row + 1 if is_skipped else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadMicroBatch:
    """A micro-batch that produces a refused gradient when it is run alone.

    Args:
        micro_batch: Its index among the micro-batches of its data-parallel rank.
        ranks: Ranks whose own part of its gradient is wrong, before any sum over ranks.
        norm: The largest norm of those parts.
        rows: The rows with a value that is not finite. If all values of its rows are finite, all rows of the micro-batch: then the error
            arose inside the model.
        what: Which value of the rows is not finite; empty if all are finite.
    """

    micro_batch: int
    ranks: tuple[int, ...]
    norm: float
    rows: tuple[RowKey, ...]
    what: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedStep:
    """Reason why a step was skipped, and what produced its gradient.

    Args:
        why: The reason, as a phrase.
        skips: Counts of skipped steps, this one included.
        ranks: Ranks whose own gradient was not finite, before any sum over ranks.
        weights: (rank, parameter) of parameters that are not finite themselves. If there are any, no search for micro-batches takes place.
        bad_micro_batches: The micro-batches that produce such a gradient alone.
        more: Number of further micro-batches that ranks reported.
    """

    why: str
    skips: SkipCounter
    ranks: tuple[int, ...] = ()
    weights: tuple[tuple[int, str], ...] = ()
    bad_micro_batches: tuple[BadMicroBatch, ...] = ()
    more: int = 0

    @property
    def rows(self) -> tuple[RowKey, ...]:
        """All rows of `bad_micro_batches`."""
        return tuple(row for bad in self.bad_micro_batches for row in bad.rows)

    def lines(self, row_info: Places) -> list[str]:
        """Return the description as lines of text.

        Args:
            row_info: Rollout, row, prompt number and data set row of each row.
        """
        if self.weights:
            return [describe_weights(self.weights)]
        lines = [_describe(bad, row_info) for bad in self.bad_micro_batches]
        if self.more:
            lines.append(f"and at least {self.more} more micro-batches")
        if self.ranks and not lines:
            lines.append(
                f"the gradient was not finite on {_several('rank', self.ranks)}, but finite when each micro-batch was run separately; "
                "if this repeats, check the hardware"
            )
        return lines

    def record(self, row_info: Places) -> dict[str, Any]:
        """Return the description as JSON.

        Args:
            row_info: Rollout, row, prompt number and data set row of each row.
        """
        bad_micro_batches = [
            {
                "micro_batch": item.micro_batch,
                "ranks": list(item.ranks),
                "what": item.what,
                "rows": [dict(row_info[row]) for row in item.rows],
            }
            for item in self.bad_micro_batches
        ]
        skips = {"in_a_row": self.skips.in_a_row, "skipped_iterations": self.skips.total}
        return {"why": self.why, **skips, "ranks": list(self.ranks), "weights": [list(item) for item in self.weights],
                "bad_micro_batches": bad_micro_batches, "more": self.more}  # fmt: skip


def describe_weights(weights: Sequence[tuple[int, str]]) -> str:
    """Return the sentence about weights that are not finite, without its full stop.

    Args:
        weights: Result of `weights_not_finite`.
    """
    names = "; ".join(f"rank {rank}: {name}" for rank, name in weights[:SHOWN])
    return f"the weights are not finite ({names}), so no further step can succeed"


def _describe(bad: BadMicroBatch, row_info: Places) -> str:
    template = "row {row} of rollout {rollout} (prompt {prompt_number}, row {dataset_row} of the data set)"
    rows = ", ".join(template.format(**row_info[row]) for row in bad.rows[:SHOWN]) + (", ..." if len(bad.rows) > SHOWN else "")
    norm = f", norm {bad.norm:.4g} alone" if math.isfinite(bad.norm) else ""
    cause = f": {bad.what} not finite" if bad.what else ""
    return f"{_several('rank', bad.ranks)}, micro-batch {bad.micro_batch}{norm}: {rows}{cause}"


def _several(noun: str, numbers: tuple[int, ...]) -> str:
    listed = ", ".join(map(str, numbers[:SHOWN])) + (", ..." if len(numbers) > SHOWN else "")
    return f"{noun}{'s' if len(numbers) > 1 else ''} {listed}"


MOST = 8  # micro-batches that a rank reports, and that the result lists
# Micro-batch -> its log-probs, float32 [C], on ranks of the last stage; None elsewhere. Leaves its gradient in the buffers.
RunAlone = Callable[[TrainingMicroBatch], "np.ndarray | None"]
BadRows = tuple[tuple[RowKey, ...], str]  # rows, and which of their values is not finite


def ranks_not_finite(local_sum: torch.Tensor) -> tuple[int, ...]:
    """Return the ranks whose own gradient was not finite. Collective."""
    return tuple(rank for rank, is_finite in enumerate(collectives.all_gather_object(math.isfinite(float(local_sum)))) if not is_finite)


def weights_not_finite(chunks: Sequence[torch.nn.Module]) -> tuple[tuple[int, str], ...]:
    """Return (rank, its first parameter that is not finite) of every rank that has one. Collective."""
    parameters = ((name, parameter) for chunk in chunks for name, parameter in chunk.named_parameters())
    local_name = next((name for name, parameter in parameters if not bool(torch.isfinite(parameter.detach()).all())), None)
    return tuple((rank, name) for rank, name in enumerate(collectives.all_gather_object(local_name)) if name is not None)


def find_bad_micro_batches(
    wrapped: Sequence[Any],
    micro_batches: Sequence[TrainingMicroBatch],
    run_alone: RunAlone,
    parallel: ParallelState,
    *,
    references: Sequence[np.ndarray],
    finite: bool,
) -> tuple[tuple[BadMicroBatch, ...], int]:
    """Run every micro-batch alone, without sums over ranks, and return those that produce such a gradient. Collective.

    The gradient buffers are left with arbitrary contents.

    Args:
        references: The reference's log-probs by micro-batch, float32 [C]; empty without a reference.
        finite: True if the refused gradient was finite: then the micro-batch with the largest gradient is returned. Otherwise those whose
            gradient is not finite, at most MOST.

    Returns:
        The micro-batches found, the same on every rank; and the number of further ones that ranks reported.
    """
    local: list[_MicroBatchReport] = []
    rows: dict[int, BadRows] = {}  # by micro-batch of this data-parallel rank, on ranks of the last stage
    for micro, logprobs in each_alone(wrapped, micro_batches, run_alone):
        if logprobs is not None:
            rows[micro.number] = non_finite_rows(micro, logprobs, references[micro.number] if references else None)
        is_wrong = bool(rows.get(micro.number, ((), ""))[1])
        norm, dense = float(own_norm(wrapped)), float(own_norm(wrapped, with_experts=False))
        if finite or is_wrong or not math.isfinite(norm):
            reported_norm = norm if math.isfinite(norm) else math.inf
            local.append(_MicroBatchReport(reported_norm, micro.number, finite or is_wrong or not math.isfinite(dense)))
    worst = sorted(local, key=lambda entry: -entry.norm)[: 1 if finite else MOST]
    by_micro_batch = _group_by_micro_batch(collectives.all_gather_object((parallel.dp_rank, worst)))
    worst_keys = sorted(by_micro_batch, key=lambda key: -max(entry.norm for entry, _ in by_micro_batch[key]))[: 1 if finite else MOST]
    reported = {(parallel.dp_rank, number): rows_and_cause for number, rows_and_cause in rows.items()} if parallel.reports_its_rows else {}
    parts = collectives.all_gather_object({key: reported[key] for key in worst_keys if key in reported})
    rows_by_key = {key: rows_and_cause for part in parts for key, rows_and_cause in part.items()}
    bad_micro_batches = (_culprit(by_micro_batch[key], *rows_by_key[key]) for key in sorted(worst_keys, key=lambda key: (key[1], key[0])))
    return tuple(bad_micro_batches), 0 if finite else len(by_micro_batch) - len(worst_keys)


def each_alone(
    wrapped: Sequence[Any], micro_batches: Sequence[TrainingMicroBatch], run_alone: RunAlone
) -> Iterator[tuple[TrainingMicroBatch, np.ndarray | None]]:
    """Yield every micro-batch with its log-probs, while its own gradient is in the buffers, not summed over ranks.

    Yields:
        The micro-batch; and its log-probs, float32 [C], on ranks of the last stage, None elsewhere.
    """
    for micro in micro_batches:
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        with _without_gradient_sums(wrapped):
            logprobs = run_alone(micro)
        yield micro, logprobs


class _MicroBatchReport(NamedTuple):
    """Report of one rank about one micro-batch.

    Args:
        norm: Norm of this rank's part of its gradient; infinite if it is not finite.
        micro_batch: Index of the micro-batch on its data-parallel rank.
        is_own: Whether something is wrong besides the gradients of experts, to which tokens of other ranks contribute.
    """

    norm: float
    micro_batch: int
    is_own: bool


def _group_by_micro_batch(
    reports: Sequence[tuple[int, list[_MicroBatchReport]]],
) -> dict[tuple[int, int], list[tuple[_MicroBatchReport, int]]]:
    """Group the reports by micro-batch.

    Returns:
        {(data-parallel rank, micro-batch): [(report, reporting rank)]}. If some rank reports `is_own` of a micro-batch index, reports about
        that index without `is_own` are left out.
    """
    origins = {entry.micro_batch for _, entries in reports for entry in entries if entry.is_own}
    by_micro_batch: dict[tuple[int, int], list[tuple[_MicroBatchReport, int]]] = {}
    for rank, (share, entries) in enumerate(reports):
        for entry in entries:
            if entry.is_own or entry.micro_batch not in origins:
                by_micro_batch.setdefault((share, entry.micro_batch), []).append((entry, rank))
    return by_micro_batch


def _culprit(entries: Sequence[tuple[_MicroBatchReport, int]], rows: tuple[RowKey, ...], cause: str) -> BadMicroBatch:
    norm = max(entry.norm for entry, _ in entries)
    ranks = tuple(rank for entry, rank in entries if entry.norm == norm)  # where it is finite, one has the largest part
    return BadMicroBatch(micro_batch=entries[0][0].micro_batch, ranks=ranks, norm=norm, rows=rows, what=cause)


def non_finite_rows(micro: TrainingMicroBatch, logprobs: np.ndarray, reference: np.ndarray | None) -> BadRows:
    """Return the rows with a value that is not finite, and the name of that value; all rows and "" if all values are finite.

    NaN is allowed where it means that there is no value, as in old, teacher and sampler log-probs.

    Args:
        logprobs: The policy's log-probs, float32 [C].
        reference: The reference's log-probs, float32 [C]; None without a reference.
    """
    numbers = {
        "the policy's log-probs": logprobs,
        "the reference's log-probs": reference,
        "advantages": micro.advantages,
        "token weights": micro.token_weights,
        "old log-probs": np.where(np.isnan(micro.old_logprobs), 0.0, micro.old_logprobs),
        "the teacher's log-probs": np.where(np.isnan(micro.teacher_logprobs), 0.0, micro.teacher_logprobs),
        "the sampler's log-probs": np.where(np.isnan(micro.sampler_logprobs), 0.0, micro.sampler_logprobs),
    }
    is_wrong = {name: ~np.isfinite(values) for name, values in numbers.items() if values is not None}
    names = [name for name, flags in is_wrong.items() if flags.any()]
    if not names:
        return micro.rows, ""
    indices = np.unique(micro.sequence[np.any([is_wrong[name] for name in names], axis=0)])
    return tuple(micro.rows[index] for index in indices.tolist()), " and ".join(names)


@contextmanager
def _without_gradient_sums(wrapped: Sequence[Any]) -> Iterator[None]:
    """Keep each rank's own gradient inside the block: no gradient is summed over ranks, neither during a pass nor after it."""
    config = wrapped[0].config
    names = ("finalize_model_grads_func", "no_sync_func", "grad_sync_func", "param_sync_func")
    saved = {name: getattr(config, name) for name in names}
    with ExitStack() as stack:
        for chunk in wrapped:
            stack.enter_context(chunk.no_sync())
        for name in names:
            setattr(config, name, nullcontext if name == "no_sync_func" else None)
        try:
            yield
        finally:
            for name, value in saved.items():
                setattr(config, name, value)
