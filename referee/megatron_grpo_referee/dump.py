"""Dumps that `referee` compares: rows of an optimizer step with the numbers that a system computed for them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_grpo.core.base.errors import ConfigError, config_error
from megatron_grpo_referee import reference
from megatron_grpo_referee.tracked import Tracked

SYSTEMS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("systems.yaml").read_text(encoding="utf-8"))
ROUNDING = {"float32": 2e-5, "bfloat16": 3e-2}  # difference that rounding explains, relative to the sum of the magnitudes


@dataclass(frozen=True, kw_only=True, eq=False)
class DumpedRow:
    """One completion. Arrays are float64 [T], over its tokens; None: the dump lacks it.

    Args:
        mask: 1 where a token is trained.
        length: Tokens of the completion, trained or not.
        group: Name of its group.
        rewards: Reward of each function, None where a function does not apply.
        advantage: Advantage.
        logp: Log-probs of the policy in the training forward.
        old: Old log-probs of the importance ratio.
        ref: Log-probs of the reference.
        sampler: Log-probs of the sampler, NaN where it gave none.
        entropy: Entropies.
        correction: Factors of the correction for the sampler.
        gradient: Derivative of the loss of its micro-batch by each log-prob.
        is_truncated: Whether the completion reached the length limit.
        is_zero_std: Whether the rewards of its group are equal.
        micro_batch: Index of its micro-batch.
        position: Place of the row in the rollout, before a shuffle; -1: its place in the dump.
        tokens: Token ids of prompt and completion.
    """

    mask: np.ndarray = field(default_factory=lambda: np.zeros(0))
    length: int = 0
    group: Any = None
    rewards: Sequence[float | None] | None = None
    advantage: float | None = None
    logp: np.ndarray | None = None
    old: np.ndarray | None = None
    ref: np.ndarray | None = None
    sampler: np.ndarray | None = None
    entropy: np.ndarray | None = None
    correction: np.ndarray | None = None
    gradient: np.ndarray | None = None
    is_truncated: bool = False
    is_zero_std: bool = False
    micro_batch: int = 0
    position: int = -1
    tokens: np.ndarray | None = None

    @property
    def completion(self) -> reference.ReferenceCompletion:
        """The row as a completion of the reference: missing numbers are 0, and NaN for the sampler's log-probs."""

        def array(values: np.ndarray | None) -> Tracked:
            return Tracked(np.zeros_like(self.mask) if values is None else np.nan_to_num(values))

        return reference.ReferenceCompletion(
            mask=Tracked(self.mask), logp=array(self.old if self.logp is None else self.logp), entropy=array(self.entropy),
            sampler_logp=Tracked(np.full_like(self.mask, np.nan) if self.sampler is None else self.sampler), ref_logp=array(self.ref),
            old_logp=None if self.old is None else array(self.old), advantage=self.advantage or 0.0, is_truncated=self.is_truncated,
            is_zero_std=self.is_zero_std, group=self.group, correction=None if self.correction is None else array(self.correction),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DumpedMicroBatch:
    """One micro-batch on one rank.

    Args:
        loss: Its loss, scaled so that the loss of the step is the mean over rows of these; None: the dump lacks it.
        tokens: Number that a mean over tokens is divided by, in the same scale; None: the tokens of this micro-batch.
        width: Padded length of its rows.
        kl: Mean of its KL estimate that the system logged.
        scale: Factor of `loss`, and of the gradients, to the loss as the system returned it.
    """

    loss: float | None = None
    tokens: float | None = None
    width: int = 0
    kl: float | None = None
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Dump:
    """A dumped step.

    Args:
        source: System and version.
        rows: Rows in the order of the dump.
        micro_batches: Micro-batches of all ranks.
        ranks: Number of data-parallel ranks.
        step: Optimizer steps before this one; None if the dump does not say.
        epsilon: Number that the system adds to a standard deviation.
        settings: Settings that the dump itself contains.
        is_fresh: Whether the weights are those of the old log-probs.
        dtype: dtype in which the system computed the loss.
        num_tokens: Tokens that the system counted in the step; None if it does not count them.
        lacks: Data that the dump lacks, and how to add it.
        scored: The same rows as the system scored them, if it dumps them apart from the micro-batches; empty if not.
        kl: The KL estimate as the system defines it.
        is_native: Whether this package wrote it.
    """

    source: str
    rows: Sequence[DumpedRow]
    micro_batches: Sequence[DumpedMicroBatch] = ()
    ranks: int = 1
    step: int | None = None
    epsilon: float = 1e-4
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_fresh: bool = False
    dtype: str = "float32"
    num_tokens: float | None = None
    lacks: Sequence[str] = field(default=())
    scored: Sequence[DumpedRow] = field(default=())
    kl: Callable[..., Any] = reference.kl
    is_native: bool = False

    @property
    def rollout(self) -> Sequence[DumpedRow]:
        """Rows with rewards and corrections."""
        return self.scored or self.rows

    @property
    def shares(self) -> list[float]:
        """Share of each micro-batch of the rows."""
        return [sum(row.micro_batch == number for row in self.rows) / len(self.rows) for number in range(len(self.micro_batches))]


def group_indices(keys: Iterable[Any]) -> list[list[int]]:
    """Return the indices of the rows of each key, in the order of the first row.

    Args:
        keys: Name of the group, or number of the micro-batch, of each row.
    """
    places: dict[Any, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return [*places.values()]


def refusal(message: str) -> ConfigError:
    """Return the error that ends the command with a message."""
    return config_error("referee", f"referee: {message}")


UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, RuntimeError, pickle.UnpicklingError)


@contextmanager
def reading(path: Path, problem: str = "cannot be read") -> Iterator[None]:
    """Turn errors of reading inside the context into a message about an invalid file."""
    try:
        yield
    except UNREADABLE as error:
        raise refusal(f"{path} {problem} ({type(error).__name__}: {error}).") from None


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file, floats as float64.

    Raises:
        ConfigError: It cannot be read.
    """
    with reading(path), np.load(path, allow_pickle=False) as file:
        return {name: file[name].astype(np.float64) if file[name].dtype.kind == "f" else file[name] for name in file.files}


def read_rewards(values: Iterable[Any]) -> list[float | None]:
    """Return the rewards of a row: None where a function does not apply, which a dump has as None or NaN.

    Args:
        values: Reward of each function.
    """
    return [None if value is None or np.isnan(value) else float(value) for value in values]


def rows_of_table(table: Mapping[str, Sequence[Any]], system: str, s: Any) -> list[DumpedRow]:
    """Return the rows of a table of completions, where the groups are consecutive.

    Args:
        table: Values of each column.
    """
    columns = SYSTEMS[system]["columns"]
    functions = [name for name in table if name not in columns and all(isinstance(v, (int, float, type(None))) for v in table[name])]
    functions = functions[: s.num_reward_funcs or None]
    return [
        DumpedRow(group=str(i // s.num_generations), rewards=read_rewards(table[name][i] for name in functions), advantage=advantage)
        for i, advantage in enumerate(table[columns[-1]])
    ]


def files_of_step(path: Path, step: int | None, system: str) -> list[dict[str, np.ndarray]]:
    """Return the arrays of the hook's files of one step in the order of their names; without a number, of the last step.

    Ranks that share their rows (tensor parallelism) write the same arrays; only the first file of them is used.

    Args:
        step: Number of the step as the hook wrote it.

    Raises:
        ConfigError: There is no such file, a file has another version, or the file of a rank is missing.
    """
    paths, versions = [path] if path.is_file() else sorted(path.glob("*.npz")), tuple(SYSTEMS[system]["versions"])
    if not paths:
        raise refusal(f"{path} has no .npz file of the hook. The page of the system has the hook.")
    found = {one: load_arrays(one) for one in paths}
    for one, arrays in found.items():
        if "system" not in arrays or "step" not in arrays:
            raise refusal(f"{one} was not written by a hook of `referee`: it names no system and step.")
        writer = str(arrays["system"])
        if not writer.startswith(versions) or ".dev" in writer:  # pre-release versions have different rules
            raise refusal(f"{one} was written by {writer}. This version reads {' and '.join(versions)}.")
    steps = sorted({int(arrays["step"]) for arrays in found.values()})
    wanted = steps[-1] if step is None else step
    if wanted not in steps:
        raise refusal(f"{path} has no step {wanted}. It has: {', '.join(map(str, steps))}.")
    step_files = [(one.name.partition("_")[0], arrays) for one, arrays in found.items() if arrays["step"] == wanted]
    chosen = [*reversed({(number, int(arrays["rank"])): arrays for number, arrays in reversed(step_files)}.values())]
    missing = sorted(set(range(int(chosen[0]["ranks"]))) - {int(arrays["rank"]) for arrays in chosen})
    if missing and path.is_dir():
        raise refusal(f"{path} lacks the files of rank {', '.join(map(str, missing))} for step {wanted}.")
    return chosen


def make_dump(files: Sequence[dict[str, Any]], system: str, micro_batch: Callable[..., DumpedMicroBatch], **facts: Any) -> Dump:
    """Return the dump of a hook's files. Files without a loss contain rows as they were scored.

    Args:
        files: Arrays of each file.
        micro_batch: Function that returns the micro-batch of a file, given its arrays, and may add arrays.

    Raises:
        ConfigError: Advantages differ within a row.
    """
    first, trained = files[0], [arrays for arrays in files if "loss" in arrays]
    micro_batches = [micro_batch(arrays) for arrays in trained]
    rows = [row for number, arrays in enumerate(trained) for row in make_rows(arrays, system, micro_batch=number)]
    scored = [row for arrays in files if "loss" not in arrays for row in make_rows(arrays, system)]
    return Dump(
        source=str(first["system"]), rows=rows, scored=scored, micro_batches=micro_batches, ranks=int(first["ranks"]),
        step=int(first["step"]), dtype=str(first["dtype"]), **facts,
    )  # fmt: skip


ROW_READERS: dict[str, Callable[[Any], Any]] = {
    "is_truncated": bool, "group": str, "position": int, "length": int, "tokens": lambda ids: ids.astype(np.int64),
    "rewards": lambda values: read_rewards(np.atleast_1d(values)),
}  # fmt: skip


def make_rows(arrays: Mapping[str, Any], system: str, **common: Any) -> list[DumpedRow]:
    """Return the rows of arrays [B, T], or of [tokens of all rows] with `lengths` [B].

    Raises:
        ConfigError: Advantages differ within a row.
    """
    there = {name: arrays[key] for name, key in SYSTEMS[system]["arrays"].items() if key in arrays and arrays[key].ndim}
    if "lengths" in arrays:
        ends = np.cumsum(arrays["lengths"]).astype(int)[:-1]
        there = {name: np.split(array, ends) for name, array in there.items()}
    rows = []
    for i, mask in enumerate(there["mask"]):
        values: dict[str, Any] = {name: ROW_READERS[name](of[i]) for name, of in there.items() if name in ROW_READERS}
        length = values.setdefault("length", len(mask) if "lengths" in arrays else len(np.trim_zeros(mask, "b")))
        for name in there.keys() - ROW_READERS.keys() - {"advantage"}:
            values[name] = np.broadcast_to(there[name][i], mask.shape)[:length]
        if "correction" in values:
            values["correction"] = np.where(values["mask"] > 0, values["correction"], 0.0)
        if "advantage" in there:
            values["advantage"] = _advantage(there["advantage"][i], mask, common.get("position", i))
        rows.append(DumpedRow(**values, **common))
    return rows


def _advantage(given: np.ndarray, mask: np.ndarray, row: int) -> float | None:
    """Return the advantage of a row; None if it has one advantage per token and no token is trained."""
    values = given[mask > 0] if given.ndim else given[None]
    if len(values) and np.ptp(values) > 1e-6 * max(1.0, np.abs(values).max()):
        raise refusal(f"the advantages of row {row} differ by token (a teacher, or GAE), which is not supported.")
    return float(values[0]) if len(values) else None
