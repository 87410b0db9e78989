"""Results of evaluations: evaluations.jsonl, a table for the terminal, and files in evaluations/.

    evaluations.jsonl                       one object per evaluation of a set
    evaluations/NAME/prompts.jsonl          mean score of each prompt; pairs two evaluations prompt by prompt
    evaluations/NAME/step_000100.parquet    one row per completion

Only rank 0 writes. docs/evaluation.md defines each number and its error.
"""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.run.config.evaluation import ALONE, ks, name_curve
from megatron_grpo.run.metrics.records import BestEffort, JsonlFile, to_python_number, write_table

logger = logging.getLogger(__name__)
Numbers = Mapping[str, Any]
EACH = "pass@1/"  # prefix of one reward's pass@1, if there are several rewards


# ---- estimates and their standard errors -------------------------------------------------------------------------------------------------
# scores: float64 [P, n] of P prompts with n completions each; NaN where a completion has no score, which is left out. Pure numpy.


def prompt_means(scores: np.ndarray) -> np.ndarray:
    """Return the mean score of each prompt: float64 [P], NaN for a prompt without scores.

    Args:
        scores: Score of each completion, float64 [P, n]; NaN is left out.
    """
    count = (~np.isnan(scores)).sum(axis=1)
    return np.where(count > 0, np.nansum(scores, axis=1) / np.maximum(count, 1), np.nan)


def mean_over_prompts(values: np.ndarray) -> tuple[float, float]:
    """Return the mean and its standard error, treating the prompts as a sample of all possible prompts.

    There is one value per prompt. Completions of one prompt are not independent, so their number does not enter.

    Args:
        values: float64 [P]; NaN is left out.

    Returns:
        (mean, standard error). The error of a single value is NaN; both are NaN without values.
    """
    known = values[~np.isnan(values)]
    if not len(known):
        return math.nan, math.nan
    return float(known.mean()), float(known.std(ddof=1) / math.sqrt(len(known))) if len(known) > 1 else math.nan


def sampling_error(scores: np.ndarray) -> float:
    """Return the standard error of the mean of `prompt_means` for these very prompts: the variation due to the seed alone.

    A prompt with one score has no variance estimate and gets the mean of the others'. NaN if all prompts have one score.

    Args:
        scores: Score of each completion, float64 [P, n]; NaN is left out.
    """
    count = (~np.isnan(scores)).sum(axis=1)
    scores, count = scores[count > 0], count[count > 0]
    has_several = count > 1
    if not has_several.any():
        return math.nan
    squares = np.nansum((scores - prompt_means(scores)[:, None]) ** 2, axis=1)
    variance = squares / np.maximum(count - 1, 1)
    variance = np.where(has_several, variance, variance[has_several].mean())
    return float(math.sqrt((variance / count).sum()) / len(scores))


def pass_at_k(num_right: np.ndarray, num_sampled: np.ndarray, k: int) -> np.ndarray:
    """Return the unbiased pass@k of each prompt: float64 [P], 1 - C(n - c, k) / C(n, k). NaN if n < k.

    It is the share of a prompt's k-subsets with a correct completion (Chen et al. 2021, arXiv:2107.03374, section 2.1).

    Args:
        num_right: c, int [P].
        num_sampled: n, int [P].
    """
    right, sampled = np.asarray(num_right)[:, None], np.asarray(num_sampled)[:, None]
    index = np.arange(k)[None, :]
    ratios = np.clip(sampled - right - index, 0, None) / np.maximum(sampled - index, 1)
    return np.where(sampled[:, 0] >= k, 1.0 - ratios.prod(axis=1), np.nan)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvaluationResult:
    """Result of one evaluation of one set. Numbers are the same on every rank.

    Args:
        name: Of the set.
        n: Completions asked of each prompt.
        temperature: 0 is greedy.
        score: Name of the reward that is the score.
        question: Equal for two evaluations with the same task and prompts.
        rows: Of each prompt in its data set.
        scores: Score of each completion, float64 [P, n]; NaN where a completion has no score.
        pass_threshold: Score from which each completion counts as right, [P, n]; of each completion.
        pass_scores: Scores that decide it, float64 [P, n]; None: `scores`.
        pass_of: Rule of a weighted sum, such as `math` or `weighted sum >= 1.2`; "" for a single reward.
        others: Further means: of every reward, of lengths.
        table: Completions by column, on rank 0.
    """

    name: str
    n: int
    temperature: float
    score: str
    question: str
    rows: Sequence[int]
    scores: np.ndarray
    pass_threshold: float | np.ndarray
    pass_scores: np.ndarray | None = None
    pass_of: str = ""
    others: Mapping[str, float] = field(default_factory=dict)
    table: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def means(self) -> np.ndarray:
        """Mean score of each prompt, float64 [P]."""
        return prompt_means(self.scores)

    def numbers(self) -> dict[str, Any]:
        """Return the numbers for evaluations.jsonl. NaN means that a number cannot be estimated."""
        is_scored = ~np.isnan(self.scores)
        num_scored = is_scored.sum(axis=1)
        pass_scores = self.scores if self.pass_scores is None else self.pass_scores
        num_right = (np.nan_to_num(pass_scores, nan=-math.inf) >= self.pass_threshold).sum(axis=1)
        num_judged = (~np.isnan(pass_scores)).sum(axis=1)
        mean, error = mean_over_prompts(self.means)
        key = f"mean@{self.n}"
        numbers: dict[str, Any] = {
            "name": self.name,
            "score": self.score,
            "num_prompts": int((num_scored > 0).sum()),
            "n": self.n,
            "temperature": self.temperature,
            key: mean,
            f"{key}/stderr": error,
            f"{key}/stderr_seed": 0.0 if not self.temperature else sampling_error(self.scores),
        }
        for k in ks(self.n):
            chances = pass_at_k(num_right, num_judged, k)
            numbers[f"pass@{k}"] = mean_over_prompts(chances)[0]
        if self.pass_of:
            numbers["pass_of"] = self.pass_of
        numbers["unscored"] = int((~is_scored).sum())
        return numbers | {name: value for name, value in self.others.items() if name not in numbers}


def score_of_record(record: Numbers) -> tuple[str, float | None]:
    """Return (name of the set, score) of a line of evaluations.jsonl.

    An older version wrote only rewards, with the score first.
    """
    key = f"mean@{record['n']}" if "n" in record and "name" in record else next((name for name in record if name != "step"), "")
    value = record.get(key)
    return str(record.get("name", ALONE)), float(value) if isinstance(value, (int, float)) else None


def curves_in(records: Iterable[Numbers]) -> dict[str, list[tuple[int, float]]]:
    """Return the points (step, score) of each curve, for plots."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        name, score = score_of_record(record)
        if score is not None:
            curves.setdefault(name_curve(name), []).append((record["step"], score))
    return curves


def compare_evaluations(first: Numbers, last: Numbers) -> list[tuple[str, float, float]]:
    """Return (name, before, after) for each number worth comparing: means, but no counts and no errors.

    Args:
        last: A later line of the same set.
    """
    rows = [name for name in first if name not in ("step", "n", "num_prompts", "temperature", "unscored") and "change" not in name]
    return [
        (name, first[name], last[name])
        for name in rows
        if isinstance(first[name], (int, float)) and isinstance(last.get(name), (int, float)) and "/stderr" not in name
    ]


class Evaluations:
    """All evaluations in one folder.

    Args:
        replaces: Whether an evaluation replaces an earlier one at the same step, as in a resumed run. The eval command keeps all.
        writes_completions: Whether to write tables of completions.
    """

    def __init__(self, folder: Path, *, replaces: bool = True, writes_completions: bool = True):
        self.folder, self.replaces, self.writes_completions = folder, replaces, writes_completions
        self.records: list[dict[str, Any]] = []
        self._file = JsonlFile(folder / "evaluations.jsonl")
        self._best_effort = BestEffort()

    def start(self, step: int = sys.maxsize) -> None:
        """Read existing evaluations, drop those beyond `step` optimizer steps, and warn if a line is missing.

        Args:
            step: Number of optimizer steps from which the run continues.
        """
        self._keep_until(step)
        for directory in self._directories():
            recorded_steps = {record["step"] for record in self.records if score_of_record(record)[0] == directory.name}
            missing = {line["step"] for line in JsonlFile(directory / "prompts.jsonl").all()} - recorded_steps
            if missing:
                logger.warning("%s has no line of %s at step %s: it was cut or removed", self._file.path, directory.name, sorted(missing))

    def _keep_until(self, step: int) -> None:
        self._file.cut(step)
        self.records = self._file.all()
        for directory in self._directories():
            JsonlFile(directory / "prompts.jsonl").cut(step)
            for path in directory.glob("step_*.parquet"):
                match = re.fullmatch(r"step_(\d{6,})(_\d+)?\.parquet", path.name)
                if match and int(match[1]) > step:
                    path.unlink()

    def add(self, step: int, evaluation: EvaluationResult, **extra: Any) -> dict[str, Any]:
        """Write one evaluation.

        Args:
            extra: Further entries of the record, such as `model` where steps alone do not identify the weights.

        Returns:
            The record, as written to the file.
        """
        if self.replaces and any(old["step"] == step and score_of_record(old)[0] == evaluation.name for old in self.records):
            self._keep_until(step - 1)
        prompts = JsonlFile(self.folder / "evaluations" / evaluation.name / "prompts.jsonl")
        prompts.cut(step - 1 if self.replaces else sys.maxsize)  # a run killed during this evaluation may have left its line
        numbers = evaluation.numbers()
        record = {"step": step, **numbers, **self._change(prompts, evaluation), **extra}
        record = {name: to_python_number(value) for name, value in record.items()}
        self._file.append(record)  # write this first: later evaluations are compared with it
        self.records.append(record)
        means = [to_python_number(mean) for mean in evaluation.means]
        prompts.append({"step": step, "question": evaluation.question, **extra, "rows": list(evaluation.rows), "means": means})
        if self.writes_completions and evaluation.table:
            with self._best_effort(f"the completions of evaluations in {self.folder}"):
                self._write(prompts.path.parent, step, evaluation.table)
        return record

    def first_and_last(self) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the first and last record of every set that was evaluated at least twice. Sets are compared by name."""
        for name in dict.fromkeys(score_of_record(record)[0] for record in self.records):
            records = [record for record in self.records if score_of_record(record)[0] == name]
            if len(records) > 1:
                yield records[0], records[-1]

    def _directories(self) -> list[Path]:
        root = self.folder / "evaluations"
        return [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []

    def _change(self, prompts: JsonlFile, evaluation: EvaluationResult) -> Numbers:
        """Return the change since the first evaluation of the same question, paired by prompt; empty if this is the first."""
        previous = (
            next((line for line in prompts.all() if line["question"] == evaluation.question), None) if prompts.path.exists() else None
        )
        if previous is None:
            return {}
        means = np.array([math.nan if mean is None else mean for mean in previous["means"]], dtype=np.float64)
        mean, error = mean_over_prompts(evaluation.means - means)
        return {"change": mean, "change/stderr": error, "change/since": previous.get("model", previous["step"])}

    def _write(self, directory: Path, step: int, table: Mapping[str, Sequence[Any]]) -> None:
        name = f"step_{step:06d}"
        number = 0 if self.replaces else len(list(directory.glob(f"{name}*.parquet")))
        write_table(directory / f"{name}{f'_{number}' if number else ''}.parquet", table)


def describe(records: Sequence[Numbers]) -> tuple[str, list[str], list[list[str]]]:
    """Return a table of evaluations for the terminal, with one column per set.

    Returns:
        (how completions were sampled, headings after the first column, rows).
    """
    sampling_texts = dict.fromkeys(
        f"{record['n']} completions of each prompt at temperature {record['temperature']:g}" if record["temperature"] else "greedy"
        for record in records
    )
    first = next((record["change/since"] for record in records if "change/since" in record), "")
    since_text = f" since step {first}" if isinstance(first, int) else f" from {first}" if first else ""
    passes = sorted({int(name[5:]) for record in records for name in record if re.fullmatch(r"pass@\d+", name)})
    scores = dict.fromkeys(name.removeprefix(EACH) for record in records for name in record if name.startswith(EACH))
    rules = {f" ({record['pass_of']})" for record in records if "pass_of" in record}
    pass_of = rules.pop() if len(rules) == 1 else ""
    figures: dict[str, list[str]] = {
        "prompts": [f"{record['num_prompts']:,}" for record in records],
        "score": [str(record["score"]) if scores else "" for record in records],
        "mean": [f"{_mean(record)} ± {_mean(record, '/stderr')}" for record in records],
        "seed alone": [f"± {_mean(record, '/stderr_seed')}" if record["n"] > 1 else "" for record in records],
        **{f"pass@{k}{pass_of}": [_number(record.get(f"pass@{k}")) for record in records] for k in passes},
        **{score: [f"{_number(record.get(score))}, pass@1 {_number(record.get(EACH + score))}" for record in records] for score in scores},
        f"change{since_text}": [_describe_change(record) for record in records],
        "tokens": [_number(record.get("mean_length")) for record in records],
        "unscored": [f"{record['unscored']:,}" if record["unscored"] else "" for record in records],
    }
    rows = [[figure, *cells] for figure, cells in figures.items() if any(cells)]
    return "; ".join(sampling_texts), [str(record["name"]) for record in records], rows


def _mean(record: Numbers, part: str = "") -> str:
    return _number(record.get(f"mean@{record['n']}{part}"))


def _describe_change(record: Numbers) -> str:
    return f"{record['change']:+.3f} ± {_number(record['change/stderr'])}" if record.get("change") is not None else ""


def _number(value: Any) -> str:
    if value is None:
        return "?"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
