"""A Hugging Face checkpoint directory, written so that it is there completely or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.base.files import directory_whole
from megatron_grpo.config.remote_code import files_named
from megatron_grpo.weights.families import family_of
from megatron_grpo.weights.shape import read_config
from megatron_grpo.weights.stored import INDEX, SINGLE

# What makes a directory loadable besides its weights. Named one by one, since model directories also hold other formats and pictures.
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
_FLOAT32 = (".e_score_correction_bias",)  # added to scores that differ in the third digit


@contextmanager
def checkpoint_directory(out: Path) -> Iterator[Path]:
    """`files.directory_whole`, with a ConfigError where `out` is something else."""
    try:
        with directory_whole(out) as partial:
            yield partial
    except FileExistsError as error:
        raise ConfigError([Problem(flags=("output_dir",), message=str(error))]) from error


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """One .safetensors file. What the machine refuses is an OSError here too, of which callers know what to do."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        if found := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
        raise


class HfWriter:
    """`with HfWriter(out, source) as write: write(name, tensor)`; leaving the block without an error puts `out` in place.

    Tensors go to numbered shards of at most `max_shard_bytes`, with an index where there is more than one. config.json, the tokenizer,
    code of its own that these name, and the generation settings come from `source`; config.json says the dtype that was written. `out`
    may be an earlier checkpoint, which is replaced, or an empty directory, but nothing else. `expected`: names that must all have been
    written.
    """

    def __init__(
        self,
        out: str | Path,
        source: str | Path,
        *,
        dtype: torch.dtype | None = None,
        max_shard_bytes: int = 5 * 1000**3,
        expected: frozenset[str] | None = None,
        config_changes: Mapping[str, Any] | None = None,
    ):
        self.out, self.source = Path(out), Path(source)
        self.dtype, self.max_shard_bytes, self.expected = dtype, max_shard_bytes, expected
        self.config_changes = dict(config_changes or {})
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
        """Takes a copy: the tensor may be a live parameter, and may change afterwards."""
        if name in self._sizes:
            raise ValueError(f"{name} is written twice")
        keeps_dtype = self.dtype is None or not tensor.is_floating_point() or name.endswith(_FLOAT32)
        dtype = tensor.dtype if self.dtype is None or keeps_dtype else self.dtype
        copy = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        self._sizes[name] = copy.nbytes
        self._dtypes[dtype] = self._dtypes.get(dtype, 0) + copy.nbytes
        if self._pending and self._pending_bytes + copy.nbytes > self.max_shard_bytes:
            self._flush()
        self._pending[name] = copy
        self._pending_bytes += copy.nbytes

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

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
            where = {name: file for file, names in zip(files, self._shards, strict=True) for name in names}
            index = {"metadata": {"total_size": sum(self._sizes.values())}, "weight_map": dict(sorted(where.items()))}
            (self._partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write_config(self) -> None:
        config = {**read_config(self.source), **self.config_changes}
        if family_of(config).has_prediction_layers:  # they are not in the export
            config |= {key: 0 for key in ("num_nextn_predict_layers", "num_mtp_layers") if key in config}
        written = str(max(self._dtypes, key=self._dtypes.__getitem__)).removeprefix("torch.")
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = written
        (self._partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
