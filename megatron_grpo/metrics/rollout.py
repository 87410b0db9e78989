"""What a rollout says about itself: metrics of rewards and lengths, and the completions themselves in a table."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_grpo.files import written_whole
from megatron_grpo.types import Progress, ScoredGroup

logger = logging.getLogger(__name__)


class Judged(Protocol):
    """What is read of `grpo.advantages`' result: arrays [num_groups, G], and [num_groups, G, num_reward_funcs]."""

    advantages: np.ndarray
    rewards: np.ndarray
    rewards_per_func: np.ndarray
    is_dead: np.ndarray


def rollout_stats(scored: Sequence[ScoredGroup], judged: Judged, reward_names: Sequence[str]) -> dict[str, float]:
    """Metrics of one rollout, named and defined as in TRL: standard deviations divide by n - 1; `reward_std` is a mean over groups."""
    lengths = np.array([len(completion.token_ids) for one in scored for completion in one.group.completions])
    is_clipped = np.array([completion.finish_reason == "length" for one in scored for completion in one.group.completions])
    stats = {"reward": _mean(judged.rewards), "reward_std": _mean([_std(group) for group in judged.rewards])}
    for place, name in enumerate(reward_names):
        values = judged.rewards_per_func[..., place]
        stats |= {f"rewards/{name}/mean": _mean(values), f"rewards/{name}/std": _std(values)}
    stats["frac_reward_zero_std"] = _mean(judged.is_dead)
    stats |= {
        "completions/mean_length": _mean(lengths),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": _mean(is_clipped),
    }
    return stats


def _mean(values: Any) -> float:
    """Over what is not NaN; NaN over nothing."""
    values = np.asarray(values, dtype=np.float64)
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else float("nan")


def _std(values: Any) -> float:
    values = np.asarray(values, dtype=np.float64)
    values = values[~np.isnan(values)]
    return float(values.std(ddof=1)) if values.size > 1 else 0.0 if values.size else float("nan")


class Completions:
    """`completions/step_*.parquet`: a row per completion, a file per rollout. The number is the version of the weights that sampled it;
    a second rollout by the same weights ends in `_1`.

    every: write every so many rollouts, 0 for never. Only rank 0 writes.
    """

    def __init__(self, output_dir: str | Path, *, reward_names: Sequence[str], every: int = 1, rank: int = 0):
        self.directory = Path(output_dir) / "completions"
        self.reward_names, self.every, self.rank = tuple(reward_names), every, rank
        self._latest = (-1, 0)  # version, and how many files it has

    def start(self, progress: Progress) -> None:
        """Forgets what a resumed run has not sampled yet."""
        if self.rank == 0:
            for path in self.directory.glob("step_*.parquet"):
                if int(path.stem.split("_")[1]) >= progress.step:
                    path.unlink()

    def write(self, rollout: int, scored: Sequence[ScoredGroup], judged: Judged) -> Path | None:
        """Writes a rollout when it is due; returns the file. rollout: its number, from 0; groups in the order of `judged`'s rows."""
        if self.rank or not self.every or rollout % self.every:
            return None
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table(self._columns(rollout, scored, judged))
        self.directory.mkdir(parents=True, exist_ok=True)
        version = scored[0].group.version
        place = self._latest[1] if self._latest[0] == version else 0
        self._latest = (version, place + 1)
        path = self.directory / f"step_{version:06d}{f'_{place}' if place else ''}.parquet"
        with written_whole(path) as stream:
            pyarrow.parquet.write_table(table, stream)
        return path

    def _columns(self, rollout: int, scored: Sequence[ScoredGroup], judged: Judged) -> dict[str, list[Any]]:
        rows = [(one.group, place, completion) for one in scored for place, completion in enumerate(one.group.completions)]
        columns: dict[str, list[Any]] = {
            "rollout": [rollout] * len(rows),
            "version": [group.version for group, _, _ in rows],
            "prompt_number": [group.prompt.number for group, _, _ in rows],
            "dataset_row": [group.prompt.row for group, _, _ in rows],
            "generation": [place for _, place, _ in rows],
            "prompt": [_text(group.prompt.raw) for group, _, _ in rows],
            "completion": [completion.text for _, _, completion in rows],
            "reward": _nullable(judged.rewards),
        }
        for place, name in enumerate(self.reward_names):
            columns[f"rewards/{name}"] = _nullable(judged.rewards_per_func[..., place])
        return columns | {
            "advantage": _nullable(judged.advantages),
            "num_prompt_tokens": [len(group.prompt.token_ids) for group, _, _ in rows],
            "num_completion_tokens": [len(completion.token_ids) for _, _, completion in rows],
            "finish_reason": [completion.finish_reason for _, _, completion in rows],
        }


def _text(raw: Any) -> str:
    """A prompt as one string: chat messages as JSON."""
    return raw if isinstance(raw, str) else json.dumps([dict(message) for message in raw], ensure_ascii=False, default=str)


def _nullable(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in np.asarray(values, dtype=np.float64).ravel()]
