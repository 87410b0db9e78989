"""Contents of safetensors files: the tensors of a Hugging Face checkpoint.

Reads only the file headers, without torch, so that `plan` can use it.
"""

from __future__ import annotations

from pathlib import Path

from megatron_grpo.core.base.errors import ConfigError, config_error
from megatron_grpo.core.base.files import parse_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit


def stored_names(directory: str | Path) -> dict[str, str]:
    """Return the file name of each tensor in a checkpoint directory.

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
    """Return a ConfigError about one file."""
    return config_error(flag, f"{flag}: {message}")
