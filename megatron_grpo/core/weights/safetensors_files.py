"""Contents of safetensors files: the tensors of a Hugging Face checkpoint, and whether a PEFT adapter fits a model.

Reads only the file headers, without torch, so that `plan` can use it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_grpo.core.base.errors import ConfigError, Problem
from megatron_grpo.core.base.files import parse_json
from megatron_grpo.core.field import range_of
from megatron_grpo.core.settings import TunerConfig
from megatron_grpo.core.weights.lora import CONFIG, NO_ADAPTER, PREFIX, WEIGHTS, LoraSettings, own_name, own_sizes
from megatron_grpo.core.weights.shape import ModelShape

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit


def stored_names(directory: str | Path) -> dict[str, str]:
    """Return the file name of each tensor in a checkpoint directory.

    Args:
        directory: Directory of the checkpoint.

    Raises:
        ConfigError: Files are missing, damaged or in another format.
    """
    directory = Path(directory)
    index = directory / INDEX
    if index.is_file():
        file_of_name = _index(index)
        files = sorted(set(file_of_name.values()))
        if absent := [file for file in files if not (directory / file).is_file()]:
            raise file_error(f"{index} names {len(files)} files, of which {len(absent)} are missing: {', '.join(absent[:5])}.")
        for file in files:
            stored_shapes(directory / file)
        return file_of_name
    single = directory / SINGLE
    if not single.is_file():
        other_formats = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = f" It has {other_formats[0]}: convert it to safetensors first (transformers' save_pretrained does)." if other_formats else ""
        raise file_error(f"{directory} has neither {SINGLE} nor {INDEX}.{hint}")
    return dict.fromkeys(stored_shapes(single), SINGLE)


def _index(path: Path) -> dict[str, str]:
    try:
        weight_map = dict(parse_json(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise file_error(f"{path} is not a checkpoint index: {type(error).__name__}: {error}.") from error
    if not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
        raise file_error(
            f"{path} is not a checkpoint index: its weight_map {'has a file name that is not a string' if weight_map else 'is empty'}."
        )
    return weight_map


def stored_shapes(path: Path, *, flag: str = "model") -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in one safetensors file.

    The file has eight bytes of length, a JSON header, and the tensors, which must end at the last byte of the file.

    Args:
        path: The file.
        flag: Setting that named it, for error messages.

    Raises:
        ConfigError: The file is damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            if length > min(size, _LONGEST_HEADER):
                raise ValueError(length)
            header = parse_json(file.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
            shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
        except (ValueError, AttributeError, KeyError, TypeError, IndexError):
            raise file_error(f"{path} cannot be read as safetensors; it is damaged or was not downloaded completely.", flag) from None
    expected_size = 8 + length + end
    if size != expected_size:
        raise file_error(
            f"{path} has {size} bytes where its header says {expected_size}; it is damaged or was not downloaded completely.", flag
        )
    return shapes


def file_error(message: str, flag: str = "model") -> ConfigError:
    """Return a ConfigError about one file.

    Args:
        message: The sentence.
        flag: Setting that named the file.
    """
    return ConfigError([Problem(flags=(flag,), message=f"{flag}: {message}")])


def adapter_problems(directory: str | Path, settings: LoraSettings, shape: ModelShape, *, flag: str) -> list[Problem]:
    """Return the problems of an adapter's files with a model.

    Args:
        directory: Directory of the adapter.
        settings: Its configuration, already read.
        shape: Sizes of the model.
        flag: Setting that named the directory, for error messages.
    """
    if faults := [*_numbers(settings), *_expressions(settings)]:
        return [_flag_problem(flag, f"{directory}: its {CONFIG} has {message}") for message in faults]
    if unsupported := [name for name in settings.target_modules if name in NO_ADAPTER]:
        return [_flag_problem(flag, f"{directory}: an adapter on {name} is not supported: {NO_ADAPTER[name]}.") for name in unsupported]
    expected = {PREFIX + name: size for name, size in own_sizes(settings, shape).items()}
    # A target name that matches nothing in this model is harmless: the matrices are compared one by one.
    if not expected and (unfit := settings.problems(shape)):
        return [replace(problem, flags=(flag,), message=f"{flag}: {directory}: {problem.message}") for problem in unfit]
    path = Path(directory) / WEIGHTS
    if not path.is_file():
        pickled = (Path(directory) / "adapter_model.bin").is_file()
        hint = " It has adapter_model.bin: save it as safetensors first." if pickled else " PEFT's save_pretrained writes it."
        return [_flag_problem(flag, f"{directory} has no {WEIGHTS}.{hint}")]
    try:
        stored = stored_shapes(path, flag=flag)
    except ConfigError as error:
        return list(error.problems)
    stored_by_name = {
        PREFIX + own_name(name.removeprefix(PREFIX), shape) if name.startswith(PREFIX) else name: size for name, size in stored.items()
    }
    return [_flag_problem(flag, f"{path} {message}") for message in _differences(stored_by_name, expected)]


def _differences(stored: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for fault, names in (
        ("lacks", expected.keys() - stored.keys()),
        ("has, beyond its configuration,", stored.keys() - expected.keys()),
    ):
        if names:
            yield f"{fault} {len(names)} of this model's matrices: {_shorten(sorted(names))}."
    mismatched = [name for name, size in expected.items() if stored.get(name, size) != size]
    if mismatched:
        first = mismatched[0]
        remark = f" {len(mismatched) - 1} more differ." if len(mismatched) > 1 else ""
        yield f"has {first} with shape {stored[first]}; this model's module with the rank in {CONFIG} needs {expected[first]}.{remark}"


def _numbers(settings: LoraSettings) -> Iterator[str]:
    allowed = range_of(TunerConfig, "lora_rank")
    for name, rank in {"r": settings.rank, **{f"rank_pattern {key}": rank for key, rank in settings.rank_pattern.items()}}.items():
        if not isinstance(rank, int) or not allowed.admits(rank):
            yield f"{name} ({rank}), which must be {allowed}."
    for name, alpha in {
        "lora_alpha": settings.alpha,
        **{f"alpha_pattern {key}": alpha for key, alpha in settings.alpha_pattern.items()},
    }.items():
        if not isinstance(alpha, (int, float)) or not 0 < alpha < float("inf"):
            yield f"{name} ({alpha}), which must be a number above 0."


def _expressions(settings: LoraSettings) -> Iterator[str]:
    for pattern in (settings.target_regex, settings.exclude_regex, *settings.rank_pattern, *settings.alpha_pattern):
        try:
            re.compile(pattern or "")
        except (re.error, RecursionError, OverflowError) as error:
            yield f"a pattern ({pattern}) that is not a regular expression: {error}."


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def _flag_problem(flag: str, message: str) -> Problem:
    return Problem(flags=(flag,), message=f"{flag}: {message}")
