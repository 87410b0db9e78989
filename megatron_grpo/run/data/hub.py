"""Data sets that the package `datasets` reads: those of the Hugging Face Hub, and those that `save_to_disk` wrote."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megatron_grpo.core.base.errors import ConfigError, config_error, first_line, one_line
from megatron_grpo.core.base.files import parse_json
from megatron_grpo.run.data.files import RawRow, Source, choose_split, import_extra

_datasets = partial(import_extra, "datasets", "from the Hugging Face Hub")


def saved_by_datasets(directory: str, split: str, flag: str) -> Any:
    """Load a data set, or one split of several, saved by `datasets.save_to_disk`, mapped into memory.

    Args:
        split: Split to load if there are several, as for `choose_split`.

    Raises:
        ConfigError: If the split does not exist, files are missing or damaged, or the package `datasets` is not installed.
    """
    datasets, path = _datasets(flag), Path(directory)
    try:
        if (path / "dataset_dict.json").is_file():
            path /= choose_split(parse_json((path / "dataset_dict.json").read_text())["splits"], split, directory, flag)
        return datasets.load_from_disk(str(path))
    except ConfigError:
        raise
    except Exception as error:  # files that are missing or damaged: whatever their readers raise
        message = f"{flag} {directory!r} cannot be read as saved by `save_to_disk`: {one_line(error, first_line)}. Save it again."
        raise config_error(flag, message) from error


def from_hub(dataset: str, split: str, flag: str, *, streaming: bool = False) -> Any:
    """Load a data set from the Hub.

    Args:
        dataset: Hub name, `name` or `name:subset`.
        split: Split to load, as for `choose_split`.
        streaming: Whether `datasets` reads rows on demand instead of downloading the data set first.

    Raises:
        ConfigError: If the data set cannot be loaded, or the package `datasets` is not installed.
    """
    datasets = _datasets(flag)
    name, _, subset = dataset.partition(":")
    try:
        if not split:
            split = choose_split(datasets.get_dataset_split_names(name, subset or None), split, dataset, flag)
        return datasets.load_dataset(name, subset or None, split=split, **({"streaming": True} if streaming else {}))
    except (OSError, ValueError, RuntimeError) as error:  # not found, offline, unknown split or subset: datasets has no one base for them
        raise config_error(
            flag, f"{flag} {dataset!r} is not a local path, and loading it from the Hub failed: {one_line(error, first_line)}"
        ) from error


def stream_hub(dataset: str, split: str, flag: str) -> Source:
    """Open a data set of the Hub for streaming. A position is [rows before it, state of the `datasets` iterator].

    Args:
        dataset: Hub name, as for `from_hub`.
    """

    def begin(position: Any) -> Iterator[RawRow]:
        row, state = position or (0, None)
        rows = from_hub(dataset, split, flag, streaming=True)
        if state is not None:
            rows.load_state_dict(state)
        try:
            for number, values in enumerate(rows, start=row):
                yield RawRow([number + 1, rows.state_dict()], f"{dataset} row {number}", values)
        except Exception as error:
            reason = one_line(error, first_line)
            raise config_error(flag, f"Reading {dataset} from the Hub failed ({type(error).__name__}: {reason}).") from error

    return begin
