"""Which tensors a Hugging Face checkpoint holds, and in which files. Read from the headers alone, without torch: `plan` asks too."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_grpo.base.errors import ConfigError, Problem

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit


def stored_names(directory: str | Path) -> dict[str, str]:
    """Tensor name -> file name. Raises ConfigError where files are missing, damaged or of another format."""
    directory = Path(directory)
    index = directory / INDEX
    if index.is_file():
        where = _index(index)
        files = sorted(set(where.values()))
        if absent := [file for file in files if not (directory / file).is_file()]:
            raise wrong(f"{index} names {len(files)} files and {len(absent)} are missing: {', '.join(absent[:5])}.")
        for file in files:
            stored_shapes(directory / file)
        return where
    single = directory / SINGLE
    if not single.is_file():
        others = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = f" It has {others[0]}: convert it to safetensors first (transformers' save_pretrained does)." if others else ""
        raise wrong(f"{directory} has neither {SINGLE} nor {INDEX}.{hint}")
    return dict.fromkeys(stored_shapes(single), SINGLE)


def _index(path: Path) -> dict[str, str]:
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise wrong(f"{path} is not the index of a checkpoint: {type(error).__name__}: {error}.") from error
    if not found or not all(isinstance(file, str) for file in found.values()):
        raise wrong(f"{path} is not the index of a checkpoint: its weight_map names {'a file that is no text' if found else 'no tensor'}.")
    return found


def stored_shapes(path: Path, *, flag: str = "model") -> dict[str, tuple[int, ...]]:
    """The size of each tensor of one file: eight bytes of length, a JSON header, and the tensors, to the last byte of the file.

    flag: the setting that named it. Raises ConfigError where the file is damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            if length > min(size, _LONGEST_HEADER):
                raise ValueError(length)
            header = json.loads(file.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
            shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
        except (ValueError, AttributeError, KeyError, TypeError, IndexError):
            raise wrong(f"{path} cannot be read as safetensors; it is damaged or was not downloaded completely.", flag) from None
    wanted = 8 + length + end
    if size != wanted:
        raise wrong(f"{path} has {size} bytes where its header says {wanted}; it is damaged or was not downloaded completely.", flag)
    return shapes


def wrong(message: str, flag: str = "model") -> ConfigError:
    """Of one file. flag: the setting that names it."""
    return ConfigError([Problem(flags=(flag,), message=f"{flag}: {message}")])
