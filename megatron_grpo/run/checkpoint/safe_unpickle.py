"""Read untrusted checkpoints: pickles in them are accepted if they are data, and rejected if they would execute code.

torch reads `.metadata` with a plain `pickle.load`, and objects besides the tensors with `torch.load(weights_only=False)`. Both execute
what the file requests. Both are called deep inside torch and Megatron-Core, which accept no other reader, so they are replaced while a
checkpoint is read, and restored afterwards.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.distributed.checkpoint import filesystem  # noqa: TID251 - the file format

from megatron_grpo.core.base.errors import one_line
from megatron_grpo.core.base.files import parse_json

# Classes and functions in `.metadata`: checkpoints of torch 2.6 to 2.13 and Megatron-Core 0.16 to 0.19 contain no others.
_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES = {
    **dict.fromkeys((_METADATA, name) for name in (
        "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata", "TensorProperties", "MetadataIndex",
        "StorageMeta", "_MEM_FORMAT_ENCODING")),
    **dict.fromkeys([("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout")]),
    **dict.fromkeys([("torch", "Size"), ("collections", "OrderedDict"), ("builtins", "set"), ("builtins", "frozenset")]),
    **dict.fromkeys((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
}  # fmt: skip


class UnsafePickleError(ValueError):
    """Error raised if a file of a checkpoint would execute code when it is read."""


class _Data(pickle._Unpickler):
    """Unpickler in Python; the one in C has no hook for the state that a pickle sets."""

    dispatch = dict(pickle._Unpickler.dispatch)

    def _build(self: Any) -> None:
        instance, state = self.stack[-2:]
        if not is_dataclass(type(instance)) or not (hasattr(instance, "__setstate__") or isinstance(state, dict)):
            raise UnsafePickleError(f".metadata sets the state of an unexpected object: {one_line(instance, repr, 80)}")
        self.load_build()

    dispatch[pickle.BUILD[0]] = _build

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _NAMES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # used by Python 3.11.0 to 3.11.3 to pickle enum members
            return _member
        raise UnsafePickleError(f".metadata names {module}.{name}, which is not allowed: it would execute code when read")


def _member(kind: Any, name: Any) -> Enum:
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise UnsafePickleError(f".metadata asks for {name!r} of {kind!r}, which is not allowed: it would execute code when read")
    return kind.__members__[name]


@contextmanager
def without_code_execution(directory: Path) -> Iterator[None]:
    """Make torch and Megatron-Core read the checkpoint in `directory` without executing its contents, inside the `with` block.

    Raises:
        UnsafePickleError: If a file requests more than data, or refers to files outside of the directory.
    """
    _check_format(directory)
    resolved = directory.resolve()
    files = [path.name for path in directory.iterdir() if path.resolve().parent == resolved]
    if outside := {path.name for path in directory.iterdir()}.difference(files):
        raise UnsafePickleError(f"{min(outside)} is a link to outside the checkpoint. Replace it with a copy.")
    load, pickles = torch.load, filesystem.pickle

    def data_alone(*args: Any, **options: Any) -> Any:
        try:
            return load(*args, **{**options, "weights_only": True})
        except pickle.UnpicklingError as error:
            match = re.search(r"GLOBAL (\S+)", str(error))  # torch's message goes on to explain how to execute it anyway
            fault = f"names {match[1]}" if match else "is not plain data"
            raise UnsafePickleError(
                f"an object in the checkpoint {fault}, which is not allowed: it would execute code when read"
            ) from error

    def metadata(stream: Any) -> Any:
        metadata = _Data(stream).load()
        for part in metadata.storage_data.values():
            if part.relative_path not in files:
                raise UnsafePickleError(f".metadata refers to a file outside the checkpoint: {one_line(part.relative_path)}")
        return metadata

    torch.load = data_alone
    filesystem.pickle = cast(Any, SimpleNamespace(**vars(pickle) | {"load": metadata}))
    try:
        yield
    finally:
        torch.load, filesystem.pickle = load, pickles


def _check_format(directory: Path) -> None:
    """Reject other formats, whose readers use pickles in other ways."""
    config = parse_json((directory / "metadata.json").read_text(encoding="utf-8"))
    formats = (config.get("sharded_backend"), config.get("common_backend", "torch"))
    if formats != ("torch_dist", "torch"):
        raise UnsafePickleError(
            f"Unsupported checkpoint formats {formats[0]!r} and {formats[1]!r} in metadata.json. Supported: 'torch_dist' and 'torch'."
        )


def refuse_extra_state(state: Mapping[str, Any]) -> None:
    """Reject extra state of Transformer Engine's layers, which would be unpickled. Without FP8 it is empty.

    Raises:
        UnsafePickleError: If some extra state is not empty.
    """
    for name, value in state.items():
        if isinstance(value, Mapping):
            refuse_extra_state(value)
        elif name.endswith("_extra_state") and not _is_nothing(value):
            raise UnsafePickleError(f"{name} is not empty and would be unpickled; without FP8 it must be empty")


def _is_nothing(value: Any) -> bool:
    if isinstance(value, io.BytesIO):
        try:
            return torch.load(io.BytesIO(value.getvalue()), weights_only=True) is None
        except (pickle.UnpicklingError, EOFError, RuntimeError):
            return False
    return value is None or (isinstance(value, torch.Tensor) and value.numel() == 0)
