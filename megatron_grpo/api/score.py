"""`score`: reward functions on recorded completions, called as a run calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_grpo.api.settings import explicit_settings
from megatron_grpo.commands.html import grid
from megatron_grpo.core.base.errors import ConfigError, config_error
from megatron_grpo.core.grpo.advantages import total_rewards
from megatron_grpo.run import python_objects

_SHOWN = 20  # rows of the table in a notebook
_WIDTH = 80  # characters of a completion in it


@dataclass(frozen=True, slots=True)
class ScoreTable(Sequence[dict[str, Any]]):
    """Scores of completions: a sequence with one dict per completion, which `pandas.DataFrame` accepts.

    Args:
        names: Names of the reward functions, as in the metrics of a run.
        rows: The rows that were scored, each with the score of each function under its name, and `reward`: their weighted sum, without
            those that are None; None if all are.
    """

    names: tuple[str, ...]
    rows: list[dict[str, Any]] = field(repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def _repr_html_(self) -> str:
        cells = [[str(row["completion"])[:_WIDTH], *(row[name] for name in self.names), row["reward"]] for row in self.rows[:_SHOWN]]
        remark = f", the first {_SHOWN}" if len(self.rows) > _SHOWN else ""
        return grid(f"Scores of {len(self.rows)} completions{remark}", ["completion", *self.names, "reward"], cells)


def score(reward_funcs: Any, rows: Sequence[Mapping[str, Any]], args: Any = None) -> ScoreTable:
    """Score recorded completions as a run does: the same arguments, timeout, handling of failures and weights. No model is loaded.

    Args:
        reward_funcs: One reward function or several, as for `GRPOTrainer`.
        rows: One mapping per completion with `completion` (text or chat messages), `prompt` if a function takes it, `completion_ids` if one
            takes them, and the columns of the data set.
        args: Settings, as for `GRPOTrainer`, such as `reward_weights`, `reward_timeout` and `reward_on_error`.

    Raises:
        ConfigError: If a function cannot be loaded, or a row has no completion.
        RewardError: If a function fails, unless `reward_on_error` is none.
    """
    from megatron_grpo.api.trainer import GRPOTrainer
    from megatron_grpo.run.rewards import scoring
    from megatron_grpo.run.rewards.loading import check_columns, close_rewards, load_rewards
    from megatron_grpo.run.rewards.protocol import RewardBatch

    trainer = GRPOTrainer(reward_funcs=reward_funcs, args=explicit_settings(args))
    parsed = trainer.parsed()
    if parsed.problems:
        raise ConfigError(parsed.problems)
    python_objects.provide(trainer.objects)
    if incomplete := [number for number, row in enumerate(rows) if "completion" not in row]:
        raise config_error("rows", f"rows: row {incomplete[0]} has no `completion` ({len(incomplete)} of {len(rows)} rows have none).")
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in ("prompt", "completion", "completion_ids")]
    functions = load_rewards(parsed.config)
    try:
        check_columns(functions, names, flag="rows")
        batch = RewardBatch(
            prompts=[row.get("prompt", "") for row in rows], completions=[row["completion"] for row in rows],
            completion_ids=[row.get("completion_ids", ()) for row in rows],
            columns={name: [row.get(name) for row in rows] for name in names},
            labels=[f"row {number}" for number in range(len(rows))],
        )  # fmt: skip
        scores_of_rows = scoring.score(functions, batch).rows
    finally:
        close_rewards(functions)
    weights = parsed.config.rewards.reward_weights or [1.0] * len(functions)
    if len(weights) != len(functions):
        raise config_error("reward_weights", f"reward_weights has {len(weights)} values for {len(functions)} reward functions.")
    own_names = tuple(function.name for function in functions)
    totals = total_rewards(np.array(scores_of_rows, dtype=np.float64).reshape(len(rows), len(functions)), weights)
    return ScoreTable(
        own_names,
        [
            {**row, **dict(zip(own_names, scores)), "reward": None if np.isnan(total) else float(total)}
            for row, scores, total in zip(rows, scores_of_rows, totals)
        ],
    )
