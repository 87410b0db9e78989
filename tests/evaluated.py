"""An evaluation of one prompt, for tests of its reports."""

from __future__ import annotations

import math

import numpy as np

from megatron_grpo.run.metrics.evaluations import EvaluationResult


def evaluated(*scores: float | None, name: str = "eval", question: str = "", **others: float) -> EvaluationResult:
    """Return an evaluation. scores: one score per completion. others: further means."""
    given = [math.nan if score is None else score for score in scores]
    return EvaluationResult(
        name=name, n=1, temperature=0.0, score="accuracy", question=question, rows=range(len(given)),
        scores=np.array(given, dtype=np.float64)[:, None], pass_threshold=1.0, others=others,
    )  # fmt: skip
