"""Files of a run, as `report` and `watch` read them. Nothing is written, and the run may continue meanwhile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.base.files import parse_json, read_object
from megatron_grpo.run.config.evaluation import SUM, name_curve
from megatron_grpo.run.config.read import read_file
from megatron_grpo.run.metrics.evaluations import curves_in
from megatron_grpo.run.metrics.records import EVENTS, JsonlFile

Points = Sequence[tuple[int, float]]  # (optimizer step, value), ascending
Row = Mapping[str, Any]


class RunFiles:
    """Contents of an `output_dir`. Files that are missing are empty.

    Args:
        folder: The `output_dir`.
        name: Name of the run, for headings; default: the name of the folder.

    Attributes:
        steps: Records of metrics.jsonl.
        evaluations: Records of evaluations.jsonl.
        events: Records of events.jsonl.
        plan: Object in plan.json.
        settings: Settings by name, from config.yaml.
    """

    def __init__(self, folder: Path, name: str = ""):
        self.folder, self.name = folder, name or folder.absolute().name
        files = ("metrics.jsonl", "evaluations.jsonl", EVENTS)
        self.steps, self.evaluations, self.events = (JsonlFile(folder / file).all() for file in files)
        self.plan = read_object(folder / "plan.json")
        entries, _ = read_file(str(folder / "config.yaml"))
        self.settings = {entry.name: [] if entry.raw == () else entry.raw for entry in entries}

    @property
    def total(self) -> int | None:
        """Optimizer steps of the whole run; None if unknown."""
        total = self.plan.get("num_steps") or self.settings.get("max_steps")
        return total if isinstance(total, int) else None

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def end(self) -> str:
        """Sentence about the end of the run; empty if it runs, or if it was killed."""
        if self.total and self.step >= self.total and not (self.events and self.events[-1]["kind"] == "failed"):
            return "The run is finished."
        last = self.events[-1] if self.events else {}
        return str(last["text"]) if last.get("kind") in ("stopped", "failed") else ""

    def series(self, metric: str) -> Points:
        """Return the points of a metric."""
        return [(record["step"], record[metric]) for record in self.steps if is_number(record.get(metric))]

    def held_out(self) -> dict[str, Points]:
        """Return the scores of each evaluation set, by its name."""
        names = {name_curve(str(record.get("name", ""))): str(record.get("name", "")) for record in self.evaluations}
        return {names.get(curve, curve): points for curve, points in curves_in(self.evaluations).items()}

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase over all steps, the longest first."""
        excluded = ("time/step", "time/rollout_overlapped")
        names = dict.fromkeys(name for record in self.steps for name in record if name.startswith("time/") and name not in excluded)
        seconds = {name.removeprefix("time/"): sum(value for _, value in self.series(name)) for name in names}
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def changes(self) -> list[dict[str, Any]]:
        """Return held-out answers whose score differs between the first and the last evaluation of their set, or does not.

        Returns:
            {"set", "prompt", "before", "after", "score_before", "score_after", "first", "last"} of each answer to the same prompt.
        """
        changes = []
        folder, scored_by = self.folder / "evaluations", {record.get("name"): str(record.get("score", "")) for record in self.evaluations}
        for set_folder in sorted(folder.iterdir()) if folder.is_dir() else ():
            files = sorted(set_folder.glob("step_*.parquet"))
            if len(files) < 2:
                continue
            score = scored_by.get(set_folder.name, "")
            last_rows = {(row["dataset_row"], row["generation"]): row for row in read_rows(files[-1])}
            first, last = (int(file.stem.split("_")[1]) for file in (files[0], files[-1]))
            for row in read_rows(files[0]):
                last_row = last_rows.get((row["dataset_row"], row["generation"]))
                if last_row is None or last_row["prompt"] != row["prompt"]:  # another question, or another data set of this name
                    continue
                scores = self._score_row(row, score), self._score_row(last_row, score)
                if all(map(is_number, scores)):
                    changes.append({
                        "set": set_folder.name, "prompt": row["prompt"], "before": row["completion"], "after": last_row["completion"],
                        "score_before": scores[0], "score_after": scores[1], "first": first, "last": last,
                    })  # fmt: skip
        return changes

    def _score_row(self, row: Row, score: str) -> float | None:
        """Return the score of a row of an evaluation set, whose evaluations name what the score is."""
        rewards = [value for key, value in row.items() if key.startswith("rewards/")]
        if score != SUM and (len(rewards) == 1 or f"rewards/{score}" in row):
            return row.get(f"rewards/{score}", rewards[0])
        weights = self.settings.get("reward_weights") or [1.0] * len(rewards)
        scored = [(value, weight) for value, weight in zip(rewards, weights, strict=False) if value is not None]
        return sum(value * weight for value, weight in scored) if scored else None

    def last_groups(self) -> list[list[Row]]:
        """Return the groups of the newest rollout in completions/, those whose rewards differ most first."""
        paths = sorted((self.folder / "completions").glob("step_*"))
        files = sorted(paths[-1].glob("*.parquet")) if paths and paths[-1].is_dir() else paths[-1:]
        groups: dict[int, list[Row]] = {}
        for file in files:
            for row in read_rows(file):
                if is_number(row["reward"]):
                    groups.setdefault(row["prompt_number"], []).append(row)
        ordered = [sorted(rows, key=lambda row: -row["reward"]) for rows in groups.values()]
        return sorted(ordered, key=lambda rows: rows[-1]["reward"] - rows[0]["reward"])


def runs_in(folders: Sequence[Path]) -> list[RunFiles]:
    """Read several runs, and give them different names.

    Args:
        folders: The `output_dir` of each.

    Raises:
        ConfigError: A folder holds no optimizer step of a run.
    """
    names = [folder.absolute().name for folder in folders]
    if len(set(names)) < len(names):
        names = ["/".join(folder.absolute().parts[-2:]) for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    runs = list(map(RunFiles, folders, names))
    if empty := [run.folder for run in runs if not run.steps]:
        kind = "has no optimizer step in metrics.jsonl" if empty[0].is_dir() else "is not a folder"
        raise ConfigError(f"{empty[0]} {kind}. Name the output_dir of a run that has trained for at least one optimizer step.")
    return runs


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a Parquet file, without columns of tokens."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    columns = ("prompt", "completion", "reward", "prompt_number", "version", "dataset_row", "generation")
    return file.read(columns=[name for name in file.schema_arrow.names if name in columns or name.startswith("rewards/")]).to_pylist()


def is_number(value: Any) -> bool:
    """Return whether a value of a record is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def downsample(points: Points, max_points: int) -> Points:
    """Return at most `max_points` points: means of neighbours, at the last step of each.

    Args:
        points: (step, value) pairs in the order of the steps.
        max_points: Maximum number of points.
    """
    size = -(-len(points) // max_points)
    if size < 2:
        return points
    parts = [points[begin : begin + size] for begin in range(0, len(points), size)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def format_text(value: Any, *, max_characters: int) -> str:
    """Return a prompt or completion as text to show, of at most `max_characters`.

    Args:
        value: Text; of a conversation its JSON.
        max_characters: Maximum number of characters.
    """
    text = str(value)
    if text.startswith("[{"):
        with suppress(ValueError):  # it is not JSON
            messages = parse_json(text)
            if all(isinstance(message, dict) and "role" in message for message in messages):
                text = "\n".join(f"{message['role']}: {message.get('content', '')}" for message in messages)
    # A bell, or a character that reverses the direction of the page.
    escaped = "".join(c if c.isprintable() or c in "\n\t" else f"\\u{ord(c):04x}" for c in text[:max_characters])
    return escaped + (f" … ({len(text) - max_characters:,} more characters)" if len(text) > max_characters else "")
