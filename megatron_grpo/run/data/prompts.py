"""The prompts of a run: mixing and checking data sets before anything is loaded, and the seeded, resumable stream of prompts. No torch.

The order is a function of (seed, epoch) alone, so every rank and every parallel layout derives the same order, and the whole state is one
small dict. An epoch is a permutation without replacement; the next epoch follows directly. No prompt is padded, and none is dropped
unless `dataset_drop_last` leaves out those that do not fill a rollout (docs/data.md).

The mixture of several data sets follows from settings and seed alone too. `data.streamed` reads data sets a block at a time.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from megatron_grpo.core.base.errors import ConfigError, Problem, config_error
from megatron_grpo.core.images import ImageProcessorSpec
from megatron_grpo.core.types import Image, Prompt
from megatron_grpo.run.config.evaluation import SPLIT
from megatron_grpo.run.config.settings import DataConfig
from megatron_grpo.run.data import checks, files
from megatron_grpo.run.data.chat import PromptEncoder
from megatron_grpo.run.data.checks import PromptDataset, is_streamed, spread_indices
from megatron_grpo.run.data.files import ConcatRows, Row, read_rows, split_count
from megatron_grpo.run.data.tokens import FEW, TokenLists, cached_table, compute_cache_key

_SPLIT_EPOCH = 1 << 62  # epoch number of the held-out permutation, distinct from all epochs of a run
_DRAW_EPOCH = _SPLIT_EPOCH + 1
# An all-gather over ranks of (problem with the rank's rows, or ""; checksum of the rows).
Ask = Callable[[tuple[str, int]], Sequence[tuple[str, int]]]


def read_sets(cfg: DataConfig, names: Sequence[str], *, flag: str, seed: int) -> ConcatRows:
    """Read the rows of several data sets: all, or with `split_dataset_ratio` those that are trained or held out.

    Args:
        names: Data sets, each optionally with a `#count` suffix.

    Raises:
        ConfigError: If a data set cannot be read, a setting has no effect on it, or a count or ratio leaves no rows.
    """
    _check_split(cfg, names, flag)
    sets = [_read_set(name, cfg, flag=flag, seed=seed) for name in names]
    rows = sets[0] if len(sets) == 1 else ConcatRows([(part, part.place) for part in sets], _merged([len(part) for part in sets], cfg))
    if flag not in ("dataset", SPLIT) or not cfg.split_dataset_ratio:
        return rows
    return rows.select(_part(len(rows), cfg.split_dataset_ratio, seed, flag))


# ---- one data set


def _read_set(name: str, cfg: DataConfig, *, flag: str, seed: int) -> ConcatRows:
    """Read a data set and select the number of rows in its name.

    `name#n` gives n rows: the whole set as often as it fits into n, and the remainder sampled (the first rows, if dataset_shuffle is
    false).
    """
    plain, count = split_count(name)
    rows = read_rows(plain, split=cfg.dataset_split, flag=flag)
    size = len(rows)
    if count is not None and count < 1:
        raise config_error(flag, f"{flag} ({name}) requests {count} of {size} rows. Use at least 1.")
    if count is not None:
        order = permutation(size, seed, _DRAW_EPOCH) if cfg.dataset_shuffle else np.arange(size)
        rows = rows.select(np.concatenate([np.tile(np.arange(size), count // size), np.sort(order[: count % size])]))
    return rows.convert(conversion(rows[0], cfg, flag))


def conversion(first: Row, cfg: DataConfig, flag: str) -> Callable[[Row], Row]:
    """Return the function that gives rows of a data set the columns and chats of this package's form.

    Args:
        first: First row of the data set. A renamed column (`columns`) with dots in its name is a value inside a column.

    Raises:
        ConfigError: If a column to rename does not exist, or a new name is already in use.
    """
    setting = "eval_columns" if flag.startswith("eval_") else "columns"
    columns = dict((new, old) if "." in new else (old, new) for old, new in cfg.columns.items())
    missing = [old for old, new in columns.items() if files.nested_value(first, old) is files.ABSENT and new not in first]
    if missing:
        message = f"{setting}: the first row of {flag} has no {', '.join(missing)}; it has {', '.join(first) or 'none'}."
        raise config_error((setting, flag), message)
    renamed = {old: new for old, new in columns.items() if files.nested_value(first, old) is not files.ABSENT}
    clashing = [new for new in renamed.values() if new in first and new not in renamed]
    if clashing:
        message = f"{setting}: the first row of {flag} already has a column {', '.join(clashing)}. Rename that column too."
        raise config_error((setting, flag), message)
    return partial(files.convert_row, columns=renamed)


# ---- several data sets


def _merged(sizes: Sequence[int], cfg: DataConfig) -> np.ndarray:
    """Return the order of the rows of several data sets, as row numbers of their concatenation.

    Without weights the sets follow one another. With weights they are interleaved as evenly as possible at every position. A set that is
    exhausted starts again, until the first set is exhausted or until all have been (stopping_strategy).
    """
    starts = np.concatenate([[0], np.cumsum(sizes)])
    shares = find_shares(cfg, len(sizes))
    counts = rows_per_epoch(sizes, shares, cfg) if shares else None
    if counts is None:
        return np.arange(starts[-1])
    # Set i yields its k-th row when its share reaches k - 1/2; the sets are merged in the order of these positions.
    positions = np.concatenate([(np.arange(count) + 0.5) / share for count, share in zip(counts, shares, strict=True)])
    numbers = np.concatenate([start + np.arange(count) % size for start, count, size in zip(starts, counts, sizes)])
    return numbers[np.argsort(positions, kind="stable")]


def find_shares(cfg: DataConfig, num_sets: int) -> list[float]:
    """Return the share of each data set in the mixture; [] if they follow one another, also where the weights are rejected elsewhere.

    Args:
        num_sets: Number of data sets.
    """
    weights = cfg.interleave_prob
    return [weight / sum(weights) for weight in weights] if len(weights) == num_sets > 1 and min(weights) > 0 else []


def rows_per_epoch(sizes: Sequence[int | None], shares: Sequence[float], cfg: DataConfig) -> list[int] | None:
    """Return how many rows of each data set an epoch has; None while that depends on a set of unknown size.

    Args:
        sizes: Rows of each set; None where unknown.
        shares: Share of each set in the mixture.
    """
    rounds = [size / share for size, share in zip(sizes, shares, strict=True) if size is not None]
    ends_with_first = cfg.stopping_strategy == "first_exhausted"
    if not rounds or (not ends_with_first and len(rounds) < len(sizes)):
        return None
    length = min(rounds) if ends_with_first else max(rounds)
    return [max(1, int(length * share + 1e-9)) for share in shares]


def _part(size: int, ratio: float, seed: int, flag: str) -> np.ndarray:
    if ratio >= 1:  # rejected by the checks of the settings
        return np.arange(size)
    num_held = max(1, round(size * ratio))
    if num_held >= size:
        message = f"split_dataset_ratio ({ratio}) would hold out {num_held} of {size} rows, leaving none for training."
        raise config_error(("split_dataset_ratio", "dataset"), message)
    order = permutation(size, seed, _SPLIT_EPOCH)
    return np.sort(order[:num_held] if flag == SPLIT else order[num_held:])


def permutation(size: int, seed: int, epoch: int, block: int = 0) -> np.ndarray:
    """Return a permutation of range(size), int64 [size], that depends on (seed, epoch, block) alone.

    It sorts the raw stream of a counter-based generator (Philox). NumPy guarantees that stream across versions, but not
    `Generator.permutation`.

    Args:
        size: Number of elements.
        epoch: Number of the epoch.
        block: Number of the block in the epoch, for streamed data sets.
    """
    counter = np.array([0, 0, 0, block], dtype=np.uint64)  # the highest word, so that the counters of two blocks of an epoch never overlap
    keys = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64), counter=counter).random_raw(size)
    return np.argsort(keys, kind="stable")


def load_rows(
    cfg: DataConfig,
    *,
    dataset: str | None = None,
    flag: str = "dataset",
    image_spec: ImageProcessorSpec | None = None,
    is_blind: bool = True,
    seed: int = 0,
) -> PromptDataset:
    """Read the data set and check that every row holds a prompt (`check_rows`). Needs no tokenizer.

    With `streaming` only the first block of the training set is read.

    Args:
        dataset: Data set to read instead of `cfg.dataset`, for the held-out set.
        image_spec: Image processor of the model; None for a text model or an unknown model.
        is_blind: Whether the model is known to take text only. Ignored if `image_spec` is given.

    Raises:
        ConfigError: If the data set cannot be read or a row holds no usable prompt.
    """
    names = list_dataset_names(cfg, dataset, flag)
    check = partial(checks.check_rows, cfg=cfg, names=names, flag=flag, image_spec=image_spec, is_blind=is_blind)
    if is_streamed(cfg, flag):
        from megatron_grpo.run.data.streamed import open_sets, read_beginning

        return read_beginning(open_sets(cfg, names, flag), check, cfg)
    return check(read_sets(cfg, names, flag=flag, seed=seed))


def list_dataset_names(cfg: DataConfig, dataset: str | None, flag: str) -> list[str]:
    """Return the names of the data sets that a setting refers to.

    Args:
        dataset: Name that replaces `cfg.dataset`, or None.
    """
    name = cfg.dataset if dataset is None else dataset
    return [name, *cfg.further_datasets] if flag in ("dataset", SPLIT) else [name]


def _check_split(cfg: DataConfig, names: Sequence[str], flag: str) -> None:
    """Check that a split that is not the default has an effect on some data set.

    Raises:
        ConfigError: If all data sets are single files or rows of a program.
    """
    setting, defaults = ("eval_dataset_split", ("", "train", "test")) if flag.startswith("eval_") else ("dataset_split", ("train",))
    if cfg.dataset_split not in defaults and not any(files.has_splits(split_count(name)[0], flag) for name in names):
        message = f"{setting} ({cfg.dataset_split}) has no effect: {', '.join(names)} has no splits. Omit it."
        raise config_error((setting, flag), message)


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
) -> PromptStream:
    """Read and check a data set, tokenize its prompts, and open its stream. With `streaming` the training set is read during the run.

    Args:
        cfg: Data settings.
        tokenizer: Tokenizer of the model.
        seed: Seed of the order, of rows that are sampled, and of the held-out split.
        dataset: Replaces `cfg.dataset`, for the held-out set.
        shuffle: Replaces `cfg.dataset_shuffle`.
        flag: Setting that names the data set.
        image_spec: Image processor of the model, or None for a text model.
        tools: JSON schemas shown to the model if completions are episodes; None if they are single answers.

    Raises:
        ConfigError: If the data set cannot be read, or a prompt fails a check.
    """
    names, encode = list_dataset_names(cfg, dataset, flag), PromptEncoder.from_config(cfg, tokenizer, image_spec, tools)
    shuffle = cfg.dataset_shuffle if shuffle is None else shuffle

    def check(rows: ConcatRows) -> PromptDataset:
        prompts = checks.check_rows(rows, cfg, names, flag=flag, image_spec=image_spec)
        if tools is not None:
            checks.check_for_episodes(prompts, flag)
        return _tokenize(prompts, cfg, encode, flag)

    if is_streamed(cfg, flag):
        from megatron_grpo.run.data.streamed import StreamedPrompts, open_sets

        return StreamedPrompts(open_sets(cfg, names, flag), check, cfg=cfg, seed=seed, shuffle=shuffle)
    return PromptStream(check(read_sets(cfg, names, flag=flag, seed=seed)), seed=seed, shuffle=shuffle)


def _tokenize(rows: PromptDataset, cfg: DataConfig, encode: PromptEncoder, flag: str) -> PromptDataset:
    """Return the rows with their tokens, without those that are too long. Raises ConfigError if a prompt cannot be used."""
    is_block = is_streamed(cfg, flag)
    checks.check_template(rows, encode.tokenizer, flag)

    def tokenized() -> TokenLists:
        checks.check_images(rows)
        return checks.tokenised(rows, encode, flag)

    if cfg.load_from_cache_file and len(rows) > FEW and not is_block:
        rows = replace(rows, digest=rows.fingerprint())
        stamp = f" {rows.image_store.stamp()}" if rows.image_store is not None else ""
        tokens = cached_table(compute_cache_key(rows.fingerprint() + stamp, encode), tokenized)
    else:
        tokens = tokenized()
    return checks.check_lengths(rows, encode, cfg, flag=flag, tokens=tokens, may_be_none=is_block)


class PromptStream:
    """An endless stream of prompts in a seeded order. `number` counts prompts over the whole run; row and epoch follow from it.

    Args:
        rows: Rows with their tokens, from `check_lengths`.
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
    epoch_multiple = 1  # prompts per epoch are a multiple of this (dataset_drop_last)
    taken = 0  # prompts since the start of the run

    def __init__(self, rows: PromptDataset, *, seed: int, shuffle: bool = True):
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        # Taken before user code runs, which may hold the rows.
        self._fingerprint = _compute_checksum([rows.raw(index) for index in spread_indices(len(rows), 16)])
        self._order: tuple[Any, np.ndarray] = (None, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        """Return the number of prompts in the data set."""
        return len(self.rows)

    @property
    def per_epoch(self) -> int:
        """Number of prompts that one epoch takes from the data set."""
        return len(self) // self.epoch_multiple * self.epoch_multiple

    @property
    def longest_prompt(self) -> int:
        """Length of the longest prompt in tokens."""
        assert self.rows.longest_prompt is not None  # known since `check_lengths`
        return self.rows.longest_prompt

    def agree_by(self, gather: Ask) -> None:
        """Verify from here on that all ranks read the same rows. Rows that were read before the run have been compared by then.

        Raises:
            RowsError: On every rank, if the rows read so far differ.
        """

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
        result = {
            "taken": self.taken,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_rows": len(self),
            "fingerprint": self._fingerprint,
        }
        return result | ({"drops_last": f"true ({self.per_epoch} prompts per epoch)"} if self.per_epoch < len(self) else {})

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
        current, problems = self.state(), list[Problem]()
        # A streamed data set has another order and other entries in its state, so nothing else can be compared then.
        compared = (
            self.COMPARED if state.get("streaming", False) == current.get("streaming", False) else (("streaming", "streaming", "{}"),)
        )
        for name, flag, value in compared:
            if state.get(name, False) != current.get(name, False):
                old_text, new_text = value.format(state.get(name, False)), value.format(current.get(name, False))
                message = (
                    f"The checkpoint was written with {flag} {old_text}, but this run has {new_text}, so it would not continue with the \
remaining prompts of that run. Use {old_text}, or start a new run in another output_dir."
                )
                problems.append(Problem(flags=(flag,), message=message))
        return problems or self._check_other_rows(state)

    def _check_other_rows(self, state: Mapping[str, Any]) -> list[Problem]:
        if state["fingerprint"] == self._fingerprint:
            return []
        message = f"The data set has the same number of rows as at the checkpoint ({len(self)}), but their content differs. Restore it, \
or start a new run in another output_dir."
        return [Problem(flags=("dataset",), message=message)]

    def find_row(self, number: int) -> int:
        """Return the data set row of prompt `number` of the run.

        Args:
            number: Number of the prompt since the start of the run, from 0.
        """
        return self._found(number)[2]

    def _found(self, number: int) -> tuple[PromptDataset, int, int]:
        """Locate prompt `number` of the run: (rows that contain it, its index in them, its data set row)."""
        epoch, position = divmod(number, self.per_epoch)
        index = self._index_at(position, len(self), epoch)
        return self.rows, index, int(self.rows.keep[index])

    def _index_at(self, position: int, size: int, epoch: int, block: int = 0) -> int:
        """Return the index of the prompt at a position in the order of an epoch or a block of `size` prompts."""
        if self._order[0] != (epoch, block):
            order = permutation(size, self.seed, epoch, block) if self.shuffle else np.arange(size)
            self._order = ((epoch, block), order)
        return int(self._order[1][position])

    def _prompt(self, number: int) -> Prompt:
        rows, index, row = self._found(number)
        assert rows.tokens is not None  # known since `check_lengths`
        token_ids = rows.tokens[int(rows.keep[index])]
        columns, images = rows.columns(index), _place_images(rows, index, token_ids)
        return Prompt(number=number, row=row, raw=rows.raw(index), token_ids=token_ids, columns=columns, images=images)

    def list_images(self, number: int) -> tuple[tuple[int, Image], ...]:
        """Return ((position, image), ...) of prompt `number` of the run without taking it. Checkpoints do not store images.

        Args:
            number: Number of the prompt since the start of the run, from 0.
        """
        return () if self.rows.image_store is None else self._prompt(number).images


def _compute_checksum(values: Sequence[Any]) -> int:
    """Return a checksum of prompts, to detect another file under the same name."""
    return zlib.crc32(json.dumps(values, default=str).encode())


def _place_images(rows: PromptDataset, index: int, token_ids: Sequence[int]) -> tuple[tuple[int, Image], ...]:
    if rows.image_store is None:
        return ()
    from megatron_grpo.run.data.image_dataset import places

    return places(token_ids, rows.images(index), rows.image_store.image_spec.image_token)
