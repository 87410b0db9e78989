"""Writes model directories: of a whole model as transformers reads it, of an adapter as PEFT does. Complete or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_grpo.core.base.errors import config_error
from megatron_grpo.core.base.files import atomic_directory
from megatron_grpo.core.weights import lora
from megatron_grpo.core.weights.families import find_family
from megatron_grpo.core.weights.hf_files import HfReader
from megatron_grpo.core.weights.safetensors_files import INDEX, SINGLE
from megatron_grpo.core.weights.shape import read_config
from megatron_grpo.run.config.remote_code import files_named

# Files besides weights that make a directory loadable. Listed one by one, since model directories also contain other formats and images.
COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "tekken.json",
    "chat_template*",
    "processor_config.json",
    "preprocessor_config.json",
)
_FLOAT32 = (".e_score_correction_bias",)  # added to scores that differ in the third digit, so they keep float32
_AS_IN_SOURCE = (".linear_attn.A_log", ".linear_attn.dt_bias", ".linear_attn.norm.weight")  # trained in float32; files differ


@contextmanager
def checkpoint_directory(out: Path) -> Iterator[Path]:
    """Write a directory with `files.atomic_directory`, as a context manager.

    Raises:
        ConfigError: `out` exists and is something else.
    """
    try:
        with atomic_directory(out) as partial:
            yield partial
    except FileExistsError as error:
        raise config_error("output_dir", str(error)) from error


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write one .safetensors file.

    Raises:
        OSError: The operating system refused the write; safetensors' own exception is converted so that callers can handle it.
    """
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        if match := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(match[1]), os.strerror(int(match[1])), str(path)) from error
        raise


class HfWriter:
    """Writer of a checkpoint, as a context manager: `with HfWriter(out, source) as write: write(name, tensor)`.

    Leaving the block without an error moves the finished directory to `out`. Tensors go to numbered shards with an index, or to one file if
    they fit. config.json, the tokenizer, the custom code that these name, and the generation settings are copied from `source`; config.json
    states the dtype that was written.

    Args:
        out: Output directory: new, empty, or an earlier checkpoint, which is replaced.
        dtype: Dtype of floating-point tensors, except those that some models keep in float32. Default: as they come.
        max_shard_bytes: Largest size of a shard in bytes.
        expected: Names that must all be written, and no others.

    Raises:
        ConfigError: `out` is something else.
        ValueError: A tensor is written twice, or the tensors are not those in `expected`.
    """

    def __init__(
        self,
        out: str | Path,
        source: str | Path,
        *,
        dtype: torch.dtype | None = None,
        max_shard_bytes: int = 5 * 1000**3,
        expected: frozenset[str] | None = None,
    ):
        self.out, self.source = Path(out), Path(source)
        self.dtype, self.max_shard_bytes, self.expected = dtype, max_shard_bytes, expected
        self._stack = ExitStack()
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[tuple[str, ...]] = []  # names in each finished shard
        self._sizes: dict[str, int] = {}  # bytes of everything written
        self._dtypes: dict[torch.dtype, int] = {}

    def __enter__(self) -> HfWriter:
        self._partial = self._stack.enter_context(checkpoint_directory(self.out))
        self._stack.push(lambda kind, *_: None if kind else self._finish())
        return self

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor. It is copied, so it may be a live parameter that changes afterwards."""
        if name in self._sizes:
            raise ValueError(f"{name} is written twice")
        keeps_dtype = self.dtype is None or not tensor.is_floating_point() or name.endswith(_FLOAT32)
        dtype = tensor.dtype if self.dtype is None or keeps_dtype else self.dtype
        if self.dtype is not None and name.endswith(_AS_IN_SOURCE):
            dtype = self._reader(name).dtype
        copy = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        self._sizes[name] = copy.nbytes
        self._dtypes[dtype] = self._dtypes.get(dtype, 0) + copy.nbytes
        if self._pending and self._pending_bytes + copy.nbytes > self.max_shard_bytes:
            self._flush()
        self._pending[name] = copy
        self._pending_bytes += copy.nbytes

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @cached_property
    def _reader(self) -> HfReader:
        return HfReader(self.source)

    def _flush(self) -> None:
        save_tensors(self._pending, self._partial / f"shard-{len(self._shards)}")
        self._shards.append(tuple(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _finish(self) -> None:
        missing = sorted((self.expected or frozenset()) - self._sizes.keys())
        extra = sorted(self._sizes.keys() - self.expected) if self.expected is not None else []
        if missing or extra:
            raise ValueError(
                f"incomplete export to {self.out}: {len(missing)} tensors missing {missing[:3]}, {len(extra)} unknown {extra[:3]}"
            )
        self._flush()
        self._name_shards()
        self._write_config()
        for pattern in COMPANIONS:
            for path in self.source.glob(pattern):
                if path.is_file():
                    shutil.copyfile(path, self._partial / path.name)
        for name in files_named(self.source):
            shutil.copyfile(self.source / name, self._partial / name)

    def _name_shards(self) -> None:
        count = len(self._shards)
        files = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for i, file in enumerate(files):
            os.replace(self._partial / f"shard-{i}", self._partial / file)
        if count > 1:
            file_of_name = {name: file for file, names in zip(files, self._shards, strict=True) for name in names}
            index = {"metadata": {"total_size": sum(self._sizes.values())}, "weight_map": dict(sorted(file_of_name.items()))}
            (self._partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write_config(self) -> None:
        config = read_config(self.source)
        if find_family(config).has_prediction_layers:  # they are not in the export
            for level in (config, config.get("text_config") or {}):
                level |= {key: 0 for key in ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers") if key in level}
        written = str(max(self._dtypes, key=self._dtypes.__getitem__)).removeprefix("torch.")
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = written
        (self._partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_adapter(
    directory: str | Path, named_tensors: Iterable[tuple[str, torch.Tensor]], config: Mapping[str, Any], base: Mapping[str, str]
) -> None:
    """Write an adapter that PEFT, transformers and vLLM can read. The directory appears complete or not at all.

    Args:
        named_tensors: (name by `peft_name`, matrix). Consumed once and kept in memory, because an adapter is small.
        config: Content of adapter_config.json (`LoraSettings.to_peft`).
    """
    tensors = {lora.PREFIX + name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named_tensors}
    with checkpoint_directory(Path(directory)) as partial:
        save_tensors(tensors, partial / lora.WEIGHTS)
        (partial / lora.CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (partial / lora.BASE).write_text(json.dumps(dict(base), indent=2) + "\n", encoding="utf-8")
