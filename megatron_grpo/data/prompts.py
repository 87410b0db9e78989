"""The prompts of a run: reading and checking a data set before anything is loaded, and the seeded, resumable stream of prompts.

The order is a function of (seed, epoch) alone, so every rank and every parallel layout derives the same order, and the whole state is one
small dict. An epoch is a permutation without replacement; the next epoch follows directly. No prompt is padded, and none is dropped
unless `dataset_drop_last` leaves out those that do not fill a rollout (docs/data.md).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.config.config import DataConfig
from megatron_grpo.config.evaluation import SPLIT
from megatron_grpo.data import checks
from megatron_grpo.data.chat import PromptEncoder
from megatron_grpo.data.checks import Encode, PromptRows
from megatron_grpo.data.image_dataset import places
from megatron_grpo.data.image_processing import ImageProcessorSpec
from megatron_grpo.data.mixing import part_of_flag, permutation, read_sets
from megatron_grpo.data.tokens import FEW, TokenTable, key_of, shared
from megatron_grpo.types import Image, Prompt


def load_rows(
    cfg: DataConfig,
    *,
    dataset: str | None = None,
    flag: str = "dataset",
    image_spec: ImageProcessorSpec | None = None,
    is_blind: bool = True,
    seed: int = 0,
) -> PromptRows:
    """Read the data set and check that every row holds a prompt (`check_rows`).

    Args:
        cfg: Data settings.
        dataset: Data set to read instead of `cfg.dataset`, for the held-out set.
        flag: Setting that names the data set, for error messages.
        image_spec: Image processor of the model; None for a text model or an unknown model.
        is_blind: Whether the model is known to take text only. Ignored if `image_spec` is given.
        seed: Seed of the run, used to sample rows.

    Raises:
        ConfigError: If the data set cannot be read or a row holds no usable prompt.
    """
    names = names_of(cfg, dataset, flag)
    rows = read_sets(cfg, names, flag=flag, seed=seed, part=part_of_flag(flag, cfg))
    return checks.check_rows(rows, cfg, names, flag=flag, image_spec=image_spec, is_blind=is_blind)


def names_of(cfg: DataConfig, dataset: str | None, flag: str) -> list[str]:
    """Return the names of the data sets that a setting refers to.

    Args:
        cfg: Data settings.
        dataset: Name that replaces `cfg.dataset`, or None.
        flag: The setting.
    """
    name = cfg.dataset if dataset is None else dataset
    return [name, *cfg.further_datasets] if flag in ("dataset", SPLIT) else [name]


def open_stream(
    cfg: DataConfig,
    tokenizer: Any,
    *,
    seed: int,
    dataset: str | None = None,
    shuffle: bool | None = None,
    flag: str = "dataset",
    image_spec: ImageProcessorSpec | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    data_seed: int | None = None,
) -> PromptStream:
    """Read and check a data set, tokenize its prompts, and open its stream.

    Args:
        cfg: Data settings.
        tokenizer: Tokenizer of the model.
        seed: Seed of the order.
        dataset: Replaces `cfg.dataset`, for the held-out set.
        shuffle: Replaces `cfg.dataset_shuffle`.
        flag: Setting that names the data set.
        image_spec: Image processor of the model, or None for a text model.
        tools: JSON schemas shown to the model if completions are episodes; None if they are single answers.
        data_seed: Seed for sampling rows and for the held-out split. Default: `seed`.

    Raises:
        ConfigError: If the data set cannot be read, or a prompt fails a check.
    """
    rows = load_rows(cfg, dataset=dataset, flag=flag, image_spec=image_spec, seed=seed if data_seed is None else data_seed)
    if tools is not None:
        checks.check_for_episodes(rows, flag)
    checks.check_template(rows, tokenizer, flag)
    encode = PromptEncoder.of(cfg, tokenizer, image_spec, tools)

    def looked_at() -> TokenTable:
        checks.check_images(rows)
        return checks.tokenised(rows, encode, flag)

    if cfg.load_from_cache_file and len(rows) > FEW:
        rows = replace(rows, digest=rows.fingerprint())
        stamp = f" {rows.image_store.stamp()}" if rows.image_store is not None else ""
        tokens = shared(key_of(rows.fingerprint() + stamp, encode), looked_at)
    else:
        tokens = looked_at()
    rows = checks.check_lengths(rows, encode, cfg, flag=flag, tokens=tokens)
    return PromptStream(rows, encode, seed=seed, shuffle=cfg.dataset_shuffle if shuffle is None else shuffle)


class PromptStream:
    """An endless stream of prompts in a seeded order. `number` counts prompts over the whole run; row and epoch follow from it.

    Args:
        rows: Checked rows of the data set.
        encode: Maps a prompt to token IDs.
        seed: Seed of the order.
        shuffle: Whether each epoch is a permutation; False keeps the order of the data set.
    """

    # Entries of a state that must agree on resume: name, the setting it comes from, and the format of its value in messages.
    COMPARED: tuple[tuple[str, str, str], ...] = (
        ("seed", "seed", "{}"),
        ("shuffle", "dataset_shuffle", "{}"),
        ("num_rows", "dataset", "{} rows"),
        ("drops_last", "dataset_drop_last", "{}"),
    )
    whole = 1  # prompts per epoch are a multiple of this (dataset_drop_last)

    def __init__(self, rows: PromptRows, encode: Encode, *, seed: int, shuffle: bool = True):
        self.rows, self.encode, self.seed, self.shuffle = rows, encode, seed, shuffle
        self.taken = 0
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        """Return the number of prompts in the data set."""
        return len(self.rows)

    @property
    def per_epoch(self) -> int:
        """Number of prompts that one epoch takes from the data set."""
        return len(self) // self.whole * self.whole

    @property
    def longest_prompt(self) -> int:
        """Length of the longest prompt in tokens.

        Raises:
            ValueError: If `check_lengths` has not been called on the rows.
        """
        if self.rows.longest_prompt is None:
            raise ValueError("call check_lengths before opening a stream")
        return self.rows.longest_prompt

    def take(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts, continuing into the next epoch if necessary."""
        prompts = [self._prompt(number) for number in range(self.taken, self.taken + count)]
        self.taken += count
        return prompts

    def give_back(self, count: int) -> None:
        """Return the last `count` prompts to the stream; the next `take` yields them again."""
        self.taken -= count

    def state(self) -> dict[str, Any]:
        """Return everything needed to continue from here, as JSON-serializable values."""
        found = {"taken": self.taken, "seed": self.seed, "shuffle": self.shuffle, "num_rows": len(self), "fingerprint": self._fingerprint()}
        return found | ({"drops_last": f"true ({self.per_epoch} prompts per epoch)"} if self.per_epoch < len(self) else {})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ConfigError: If seed, order or data set differ from those of the saved state.
        """
        problems = self.problems_with(state)
        if problems:
            raise ConfigError(problems)
        self.taken = int(state["taken"])

    def problems_with(self, state: Mapping[str, Any]) -> list[Problem]:
        """Return the reasons why this stream cannot continue from a saved state; empty if it can."""
        now, problems = self.state(), list[Problem]()
        # A streamed data set has another order and other entries in its state, so nothing else can be compared then.
        compared = self.COMPARED if state.get("streaming", False) == now.get("streaming", False) else (("streaming", "streaming", "{}"),)
        for name, flag, value in compared:
            if state.get(name, False) != now.get(name, False):
                was, found = value.format(state.get(name, False)), value.format(now.get(name, False))
                message = f"The checkpoint was written with {flag} {was}, but this run has {found}, so it would not continue with the \
remaining prompts of that run. Use {was}, or start a new run in another output_dir."
                problems.append(Problem(flags=(flag,), message=message))
        return problems or self._of_other_rows(state)

    def _of_other_rows(self, state: Mapping[str, Any]) -> list[Problem]:
        if state["fingerprint"] == self._fingerprint():
            return []
        message = f"The data set has the same number of rows as at the checkpoint ({len(self)}), but their content differs. Restore it, \
or start a new run in another output_dir."
        return [Problem(flags=("dataset",), message=message)]

    def row_of(self, number: int) -> int:
        """Return the data set row of prompt `number` of the run."""
        rows, index, first = self._found(number)
        return first + int(rows.keep[index])

    def _found(self, number: int) -> tuple[PromptRows, int, int]:
        """Locate prompt `number` of the run: (rows that contain it, its index in them, data set row of their first row)."""
        epoch, place = divmod(number, self.per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, permutation(len(self), self.seed, epoch) if self.shuffle else np.arange(len(self)))
        return self.rows, int(self._order[1][place]), 0

    def _prompt(self, number: int) -> Prompt:
        rows, index, first = self._found(number)
        row = int(rows.keep[index])
        token_ids = tuple(checks.encoded(rows, self.encode, index)) if rows.tokens is None else rows.tokens[row]
        columns, images = rows.columns(index), _placed(rows, index, token_ids)
        return Prompt(number=number, row=first + row, raw=rows.raw(index), token_ids=token_ids, columns=columns, images=images)

    def images_of(self, number: int) -> tuple[tuple[int, Image], ...]:
        """Return ((position, image), ...) of prompt `number` of the run without taking it. Checkpoints do not store images."""
        return () if self.rows.image_store is None else self._prompt(number).images

    def _fingerprint(self) -> int:
        """Return a checksum of up to 16 evenly spaced prompts, to detect another file under the same name."""
        picked = sorted({round(i * (len(self) - 1) / 15) for i in range(16)})
        return zlib.crc32(json.dumps([self.rows.raw(index) for index in picked], default=str).encode())


def _placed(rows: PromptRows, index: int, token_ids: Sequence[int]) -> tuple[tuple[int, Image], ...]:
    image_store = rows.image_store
    return () if image_store is None else places(token_ids, rows.images(index), image_store.image_spec.image_token)
