"""The prompts of a run: mixing and checking data sets before anything is loaded, and the seeded, resumable stream of prompts. No torch.

The order is a function of (seed, epoch) alone, so every rank and every parallel layout derives the same order, and the whole state is one
small dict. An epoch is a permutation without replacement; the next epoch follows directly. No prompt is padded, and none is dropped
unless `dataset_drop_last` leaves out those that do not fill a rollout (docs/data.md).

The mixture of several data sets follows from settings and seed alone too: `read_sets` reads whole data sets; `open_sets` yields rows in
the same order one at a time, without sampling or shuffling.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from megatron_grpo.core.base.errors import ConfigError, Problem, config_error
from megatron_grpo.core.images import ImageProcessorSpec
from megatron_grpo.core.settings import DataConfig
from megatron_grpo.core.types import Image, Prompt
from megatron_grpo.run.config.evaluation import SPLIT
from megatron_grpo.run.data import checks, files
from megatron_grpo.run.data.chat import PromptEncoder
from megatron_grpo.run.data.checks import Encode, PromptRows
from megatron_grpo.run.data.files import Row, Rows, Source, SourceRow, concatenated, open_source, plain_name, read_rows
from megatron_grpo.run.data.image_dataset import places
from megatron_grpo.run.data.tokens import FEW, TokenTable, cached_table, key_of

Part = Literal["all", "trained", "held out"]
_SPLIT_EPOCH = 1 << 62  # epoch number of the held-out permutation, distinct from all epochs of a run
_DRAW_EPOCH = _SPLIT_EPOCH + 1


def read_sets(cfg: DataConfig, names: Sequence[str], *, flag: str, seed: int, part: Part) -> Rows:
    """Read the rows of several data sets.

    Args:
        cfg: Data settings.
        names: Data sets, each optionally with a `#count` suffix.
        flag: Setting that names them, for error messages.
        seed: Seed for sampling rows and for the held-out split.
        part: Which rows to return, as divided by `split_dataset_ratio`.

    Raises:
        ConfigError: If a data set cannot be read, or a count or ratio leaves no rows.
    """
    sets = [_read_set(name, cfg, flag=flag, seed=seed) for name in names]
    rows = (
        sets[0]
        if len(sets) == 1
        else Rows([(rows_of_set, rows_of_set.place) for rows_of_set in sets], _merged([len(rows_of_set) for rows_of_set in sets], cfg))
    )
    if part == "all" or not cfg.split_dataset_ratio:
        return rows
    return Rows([(rows, rows.place)], _part(len(rows), cfg.split_dataset_ratio, seed, part, flag))


def open_sets(cfg: DataConfig, names: Sequence[str], flag: str) -> Source:
    """Open several data sets for streaming.

    Args:
        cfg: Data settings.
        names: Data sets, each optionally with a `#count` suffix.
        flag: Setting that names them, for error messages.

    Raises:
        ConfigError: If a data set cannot be opened.
    """
    sources = [_open_set(name, cfg, flag) for name in names]
    if len(sources) > 1 and cfg.interleave_prob:
        return _mixed(sources, cfg.interleave_prob, ends_with_first=cfg.stopping_strategy == "first_exhausted")
    return concatenated(sources)


# ---- one data set


def _with_count(name: str) -> tuple[str, int | None]:
    """Split `name#n` into (name, n)."""
    plain = plain_name(name)
    return plain, None if plain == name else int(name.rpartition("#")[2])


def _read_set(name: str, cfg: DataConfig, *, flag: str, seed: int) -> Rows:
    """Read a data set and select the number of rows in its name.

    `name#n` gives n rows: the whole set as often as it fits into n, and the remainder sampled (the first rows, if dataset_shuffle is
    false).
    """
    plain, count = _with_count(name)
    rows = read_rows(plain, split=cfg.dataset_split, flag=flag)
    if count is not None and count < 1:
        raise config_error(flag, f"{flag} ({name}) requests {count} of {len(rows)} rows. Use at least 1.")
    if count is not None:
        repeats, remainder = divmod(count, len(rows))
        order = permutation(len(rows), seed, _DRAW_EPOCH) if cfg.dataset_shuffle else np.arange(len(rows))
        rows = Rows([(rows, rows.place)], np.concatenate([*([np.arange(len(rows))] * repeats), np.sort(order[:remainder])]))
    return Rows([(rows, rows.place)], convert=partial(files.convert_row, columns=column_renames(rows[0], cfg.columns, flag)))


def _open_set(name: str, cfg: DataConfig, flag: str) -> Source:
    """Open a data set for streaming. `name#n` gives its first n rows, starting again if it has fewer.

    The first row is read, to check that it exists and has the columns to rename.
    """
    plain, count = _with_count(name)
    if count is not None and count < 1:
        raise config_error(flag, f"{flag} ({name}) requests {count} rows. Use at least 1.")
    source = open_source(plain, cfg.dataset_split, flag)
    first = next(source(None), None)
    if first is None:
        raise config_error(flag, f"{flag} {plain!r} has no rows.")
    if isinstance(first.row, str):
        raise config_error(flag, f"{first.stands} is not a JSON object: {first.row}.")
    source = _converted(source, partial(files.convert_row, columns=column_renames(first.row, cfg.columns, flag)))
    return source if count is None else _limited(source, count)


def column_renames(first: Mapping[str, Any], columns: Mapping[str, str], flag: str) -> dict[str, str]:
    """Return the column renames that apply to a data set, new names by old names.

    Args:
        first: First row of the data set.
        columns: Renames requested by the setting `columns`. A name with dots is a value inside a column, and may be on either side.
        flag: Setting that names the data set, for error messages.

    Raises:
        ConfigError: If a column does not exist, or a new name is already in use.
    """
    setting = "eval_columns" if flag.startswith("eval_") else "columns"
    columns = dict((new, old) if "." in new else (old, new) for old, new in columns.items())
    missing = [old for old, new in columns.items() if files.nested_value(first, old) is files.ABSENT and new not in first]
    if missing:
        message = f"{setting}: the first row of {flag} has no {', '.join(missing)}; it has {', '.join(first) or 'none'}."
        raise config_error((setting, flag), message)
    renamed = {old: new for old, new in columns.items() if files.nested_value(first, old) is not files.ABSENT}
    clashing = [new for new in renamed.values() if new in first and new not in renamed]
    if clashing:
        message = f"{setting}: the first row of {flag} already has a column {', '.join(clashing)}. Rename that column too."
        raise config_error((setting, flag), message)
    return renamed


def _converted(source: Source, convert: Callable[[Row], Row]) -> Source:
    def begin(position: Any) -> Iterator[SourceRow]:
        for entry in source(position):
            yield entry if isinstance(entry.row, str) else entry._replace(row=convert(entry.row))

    return begin


def _limited(source: Source, count: int) -> Source:
    """Limit a source to `count` rows. A position is [rows before it, position in the source]."""

    def begin(position: Any) -> Iterator[SourceRow]:
        num_read, inner = position or (0, None)
        reader = source(inner)
        while num_read < count:
            entry = next(reader, None)
            if entry is None:
                reader = source(None)
                entry = _existing(next(reader, None))
            num_read += 1
            yield entry._replace(after=[num_read, entry.after])

    return begin


def _existing(entry: SourceRow | None) -> SourceRow:
    """Return a row that existed when its data set was last read.

    Raises:
        ConfigError: If it no longer exists; a data set without rows could never yield its share.
    """
    if entry is None:
        raise config_error("dataset", "A data set of `dataset` has fewer rows than when this run last read it. Restore its files.")
    return entry


# ---- several


def _merged(sizes: Sequence[int], cfg: DataConfig) -> np.ndarray:
    """Return the order of the rows of several data sets, as row numbers of their concatenation.

    Without weights the sets follow one another. With weights they are interleaved as evenly as possible at every position. A set that is
    exhausted starts again, until the first set is exhausted or until all have been (stopping_strategy).
    """
    starts = np.concatenate([[0], np.cumsum(sizes)])
    if not cfg.interleave_prob or min(cfg.interleave_prob) <= 0:  # a weight of 0 or less is rejected elsewhere
        return np.arange(starts[-1])
    weights = np.array(cfg.interleave_prob) / sum(cfg.interleave_prob)
    # Set i yields its k-th row when its share reaches k - 1/2; the sets are merged in the order of these positions.
    rounds = np.array(sizes) / weights
    length = rounds.min() if cfg.stopping_strategy == "first_exhausted" else rounds.max()
    counts = [max(1, int(np.floor(length * weight + 1e-9))) for weight in weights]
    positions = np.concatenate([(np.arange(count) + 0.5) / weight for count, weight in zip(counts, weights, strict=True)])
    numbers = np.concatenate([start + np.arange(count) % size for start, count, size in zip(starts, counts, sizes)])
    return numbers[np.argsort(positions, kind="stable")]


def _mixed(sources: Sequence[Source], weights: Sequence[float], *, ends_with_first: bool) -> Source:
    """Interleave sources of unknown length like `_merged`. A source that is exhausted starts again.

    A position holds, per source, the rows it has yielded, the position in it, and its length if known. The length becomes known with the
    last row, so by then a set may have yielded one row more than its share of the epoch.
    """
    shares = [weight / sum(weights) for weight in weights]

    def incomplete(counts: Sequence[int], sizes: Sequence[int | None]) -> list[int]:
        """Return the sources that have not yielded their share of the epoch."""
        rounds = [size / share for size, share in zip(sizes, shares, strict=True) if size is not None]
        if not rounds or (not ends_with_first and len(rounds) < len(sources)):
            return list(range(len(sources)))
        length = min(rounds) if ends_with_first else max(rounds)
        return [number for number, count in enumerate(counts) if count < max(1, int(length * shares[number] + 1e-9))]

    def begin(position: Any) -> Iterator[SourceRow]:
        empty = [None] * len(sources)
        counts, positions, sizes = [list(values) for values in position or ([0] * len(sources), empty, empty)]
        readers = [source(begin_at) for source, begin_at in zip(sources, positions, strict=True)]
        next_entries = [_existing(next(reader, None)) for reader in readers]
        while open_ones := incomplete(counts, sizes):
            number = min(open_ones, key=lambda i: (counts[i] + 0.5) / shares[i])
            entry, following = next_entries[number], next(readers[number], None)
            counts[number] += 1
            positions[number] = entry.after
            if following is None:
                sizes[number] = sizes[number] or counts[number]
                positions[number], readers[number] = None, sources[number](None)
                following = _existing(next(readers[number], None))
            next_entries[number] = following
            yield entry._replace(after=[list(counts), list(positions), list(sizes)])

    return begin


def _part(size: int, ratio: float, seed: int, part: Part, flag: str) -> np.ndarray:
    if ratio >= 1:  # rejected by the checks of the settings
        return np.arange(size)
    num_held = max(1, round(size * ratio))
    if num_held >= size:
        message = f"split_dataset_ratio ({ratio}) would hold out {num_held} of {size} rows, leaving none for training."
        raise config_error(("split_dataset_ratio", "dataset"), message)
    order = permutation(size, seed, _SPLIT_EPOCH)
    return np.sort(order[:num_held] if part == "held out" else order[num_held:])


def part_of_flag(flag: str, cfg: DataConfig) -> Part:
    """Return the part of the training data that the rows of a setting come from.

    Args:
        flag: The setting.
        cfg: Data settings.
    """
    return "held out" if flag == SPLIT else "trained" if flag == "dataset" and cfg.split_dataset_ratio else "all"


def permutation(size: int, seed: int, epoch: int, block: int = 0) -> np.ndarray:
    """Return a permutation of range(size), int64 [size], that depends on (seed, epoch, block) alone.

    It sorts the raw stream of a counter-based generator (Philox). NumPy guarantees that stream across versions, but not
    `Generator.permutation`.

    Args:
        size: Number of elements.
        seed: Seed of the run.
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
    check_split(cfg, names, flag)
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


def check_split(cfg: DataConfig, names: Sequence[str], flag: str) -> None:
    """Check that a split that is not the default has an effect on some data set.

    Args:
        cfg: Data settings.
        names: Names of the data sets.
        flag: Setting that names them.

    Raises:
        ConfigError: If all data sets are single files or rows of a program.
    """
    setting, defaults = ("eval_dataset_split", ("", "train", "test")) if flag.startswith("eval_") else ("dataset_split", ("train",))
    if cfg.dataset_split not in defaults and not any(files.has_splits(plain_name(name), flag) for name in names):
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

    def tokenized() -> TokenTable:
        checks.check_images(rows)
        return checks.tokenised(rows, encode, flag)

    if cfg.load_from_cache_file and len(rows) > FEW:
        rows = replace(rows, digest=rows.fingerprint())
        stamp = f" {rows.image_store.stamp()}" if rows.image_store is not None else ""
        tokens = cached_table(key_of(rows.fingerprint() + stamp, encode), tokenized)
    else:
        tokens = tokenized()
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
    epoch_multiple = 1  # prompts per epoch are a multiple of this (dataset_drop_last)

    def __init__(self, rows: PromptRows, encode: Encode, *, seed: int, shuffle: bool = True):
        self.rows, self.encode, self.seed, self.shuffle = rows, encode, seed, shuffle
        self.taken = 0
        # Taken before user code runs, which may hold the rows.
        self._fingerprint = _compute_checksum([rows.raw(index) for index in _spread(len(rows))])
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        """Return the number of prompts in the data set."""
        return len(self.rows)

    @property
    def per_epoch(self) -> int:
        """Number of prompts that one epoch takes from the data set."""
        return len(self) // self.epoch_multiple * self.epoch_multiple

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
        """Return the next `count` prompts, continuing into the next epoch if necessary.

        Args:
            count: Number of prompts.
        """
        prompts = [self._prompt(number) for number in range(self.taken, self.taken + count)]
        self.taken += count
        return prompts

    def give_back(self, count: int) -> None:
        """Return the last `count` prompts to the stream; the next `take` yields them again.

        Args:
            count: Number of prompts.
        """
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

        Args:
            state: State from `state()`.

        Raises:
            ConfigError: If seed, order or data set differ from those of the saved state.
        """
        problems = self.problems_with(state)
        if problems:
            raise ConfigError(problems)
        self.taken = int(state["taken"])

    def problems_with(self, state: Mapping[str, Any]) -> list[Problem]:
        """Return the reasons why this stream cannot continue from a saved state; empty if it can.

        Args:
            state: State from `state()`.
        """
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
        return problems or self._of_other_rows(state)

    def _of_other_rows(self, state: Mapping[str, Any]) -> list[Problem]:
        if state["fingerprint"] == self._fingerprint:
            return []
        message = f"The data set has the same number of rows as at the checkpoint ({len(self)}), but their content differs. Restore it, \
or start a new run in another output_dir."
        return [Problem(flags=("dataset",), message=message)]

    def row_of(self, number: int) -> int:
        """Return the data set row of prompt `number` of the run.

        Args:
            number: Number of the prompt since the start of the run, from 0.
        """
        rows, index, first = self._found(number)
        return first + int(rows.keep[index])

    def _found(self, number: int) -> tuple[PromptRows, int, int]:
        """Locate prompt `number` of the run: (rows that contain it, its index in them, data set row of their first row)."""
        epoch, index = divmod(number, self.per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, permutation(len(self), self.seed, epoch) if self.shuffle else np.arange(len(self)))
        return self.rows, int(self._order[1][index]), 0

    def _prompt(self, number: int) -> Prompt:
        rows, index, first = self._found(number)
        row = int(rows.keep[index])
        token_ids = tuple(checks.encoded(rows, self.encode, index)) if rows.tokens is None else rows.tokens[row]
        columns, images = rows.columns(index), _place_images(rows, index, token_ids)
        return Prompt(number=number, row=first + row, raw=rows.raw(index), token_ids=token_ids, columns=columns, images=images)

    def images_of(self, number: int) -> tuple[tuple[int, Image], ...]:
        """Return ((position, image), ...) of prompt `number` of the run without taking it. Checkpoints do not store images.

        Args:
            number: Number of the prompt since the start of the run, from 0.
        """
        return () if self.rows.image_store is None else self._prompt(number).images


def _spread(size: int) -> list[int]:
    """Return up to 16 evenly spaced indices."""
    return sorted({round(i * (size - 1) / 15) for i in range(16)}) if size else []


def _compute_checksum(values: Sequence[Any]) -> int:
    """Return a checksum of prompts, to detect another file under the same name."""
    return zlib.crc32(json.dumps(values, default=str).encode())


def _place_images(rows: PromptRows, index: int, token_ids: Sequence[int]) -> tuple[tuple[int, Image], ...]:
    image_store = rows.image_store
    return () if image_store is None else places(token_ids, rows.images(index), image_store.image_spec.image_token)
