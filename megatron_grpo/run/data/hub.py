"""Distinguish local paths from Hub names, and fetch models and data sets from the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_grpo.core.base.errors import ConfigError, config_error, first_line, one_line
from megatron_grpo.core.base.files import parse_json
from megatron_grpo.run import python_objects

SUFFIXES = (".jsonl", ".json", ".parquet")  # of data set files
# Of files that are not read here, but are not names on the Hub either.
_OTHER_SUFFIXES = tuple(".csv .tsv .txt .ndjson .arrow .feather .xlsx .zip .gz .zst .bz2 .xz .tar .yaml .yml .py .pkl .bin .gguf".split())
_FETCHED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")


def is_path(name: str) -> bool:
    """Return whether a name can only be local, existing or not: a path, or an object of a program. A Hub name is `name` or `owner/name`.

    Args:
        name: Name from `--dataset` or `--model`.
    """
    return (
        python_objects.is_given(name)
        or name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or Path(name.partition("#")[0].lower()).suffix in (*SUFFIXES, *_OTHER_SUFFIXES)
    )


def find_model(name: str, *, flag: str = "model", with_code: bool = False) -> Path:
    """Return the directory of a Hugging Face checkpoint. A Hub name is downloaded first.

    Args:
        name: Directory or Hub name.
        flag: Setting that names the checkpoint, for error messages.
        with_code: Whether to download Python files as well. Nothing is executed.

    Raises:
        ConfigError: If there is no such directory and no such model on the Hub.
    """
    if not name:
        raise config_error("model", "model is missing. Use a Hugging Face checkpoint directory or a Hub name.")
    path = Path(name)
    if path.is_dir():
        return path.absolute()
    if is_path(name):
        fault = "is a file" if path.is_file() else "does not exist"
        models = sorted(config.parent.name for config in path.parent.glob("*/config.json"))[:8]
        nearby = f" In {path.parent}: {', '.join(models)}." if models else ""
        message = f"{flag} ({name}) {fault}. Use a directory with config.json, tokenizer files and *.safetensors, or a Hub name.{nearby}"
        raise config_error(flag, message)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=[*_FETCHED, *(["*.py"] if with_code else [])]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        message = (
            f"{flag} ({name}) is neither a local directory nor a model that can be downloaded from the Hub: {one_line(error, first_line)}"
        )
        raise config_error(flag, message) from error


def _datasets(flag: str) -> Any:
    if find_spec("datasets") is None:
        raise config_error(flag, "Reading from the Hugging Face Hub needs the extra `data`: pip install 'megatron-grpo[data]'.")
    import datasets

    return datasets


def choose_split(splits: Sequence[str], split: str, dataset: str, flag: str) -> str:
    """Return the split of a data set that is read.

    Args:
        splits: Splits that the data set has.
        split: Requested split. "", the default of held-out sets: test, or the only one.
        dataset: Name of the data set.
        flag: Setting that names it, for error messages.

    Raises:
        ConfigError: If the data set does not have the split.
    """
    chosen = split or (splits[0] if len(splits) == 1 else "test")
    if chosen in splits:
        return chosen
    is_held_out = flag.startswith("eval_")
    setting = "eval_dataset_split" if is_held_out else "dataset_split"
    use = next((name for name in splits if name != "train"), splits[0]) if is_held_out else splits[0]
    message = f"{flag} {dataset!r} has no split {chosen}; it has {', '.join(splits)}. Use {setting} {use}."
    raise config_error((setting, flag), message)


def saved_by_datasets(directory: str, split: str, flag: str) -> Any:
    """Load a data set, or one split of several, saved by `datasets.save_to_disk`, mapped into memory.

    Args:
        directory: The directory.
        split: Split to load if there are several, as for `choose_split`.
        flag: Setting that names the data set, for error messages.

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
        flag: Setting that names the data set, for error messages.
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
