"""The images of a data set: which row has which images, their positions in the prompt's tokens, and their patches on demand.

An image is a reference. Its header is read when a prompt is taken from the stream, its pixels when a rank of the first pipeline stage
trains on it. Every rank reads the same rows, so no image is sent between processes: a message names the data set, the row and the index
in it, and the receiver looks the image up.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from megatron_grpo.core.base.errors import ConfigError, Problem
from megatron_grpo.core.images import (
    Grid,
    ImageError,
    ImageProcessorSpec,
    ImageSource,
    compute_image_key,
    decode_image,
    make_image_source,
    num_tokens,
)
from megatron_grpo.run.data.files import NAMED_ROWS, ConcatRows, images_of_row

if TYPE_CHECKING:
    import numpy as np

    from megatron_grpo.core.types import Image

MOST_CACHED = 512 << 20  # bytes of patches in the cache
MOST_DECODED = 2_000_000_000  # pixels decoded before a run, to find files damaged after their headers
_OPEN: WeakValueDictionary[str, ImageStore] = WeakValueDictionary()


class PatchCache:
    """Least-recently-used cache of image patches, by image key. Thread-safe.

    Args:
        most_bytes: Capacity in bytes.
    """

    def __init__(self, most_bytes: int = MOST_CACHED):
        self.most_bytes = most_bytes
        self._held: OrderedDict[str, np.ndarray] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> np.ndarray | None:
        """Return the cached patches of an image, or None.

        Args:
            key: Key of the image (`Image.key`).
        """
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def put(self, key: str, patches: np.ndarray) -> None:
        """Add patches, and evict the least recently used ones if the cache is full. Patches larger than the cache are not added.

        Args:
            key: Key of the image (`Image.key`).
            patches: float32 [patches, channels].
        """
        with self._lock:
            if key in self._held or patches.nbytes > self.most_bytes:
                return
            self._held[key] = patches
            self._num_bytes += patches.nbytes
            while self._num_bytes > self.most_bytes:
                self._num_bytes -= self._held.popitem(last=False)[1].nbytes


class ImageFile:
    """An `Image` of a data set. All users of the image share one object.

    Args:
        index: Index of the image in the row.
        source: Where the bytes are.
    """

    __slots__ = ("__weakref__", "_key", "image_store", "grid", "index", "merge", "row", "source")

    def __init__(self, image_store: ImageStore, row: int, index: int, source: ImageSource, grid: Grid):
        self.image_store, self.row, self.index, self.source, self.grid = image_store, row, index, source, grid
        self.merge = image_store.image_spec.merge
        self._key = ""

    @property
    def key(self) -> str:
        """Digest of the file's bytes and of all processor settings; equal only for images that become equal patches."""
        self._key = self._key or compute_image_key(self.source.read(), self.image_store.image_spec)
        return self._key

    @property
    def name(self) -> str:
        """Name for messages."""
        return self.source.name

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the image in a prompt."""
        return self.image_store.image_spec.tokens(self.grid)

    def data(self) -> bytes:
        """Return the bytes of the file.

        Raises:
            ConfigError: If the file has changed since the run first read it, or cannot be read.
        """
        with self.image_store.as_config_error(self.row, self.source):
            data = self.source.read()
            key = compute_image_key(data, self.image_store.image_spec)
            if self._key and key != self._key:
                raise ImageError("has changed since this run first read it")
            self._key = key
            return data

    def patches(self) -> np.ndarray:
        """Return the patches, float32 [patches, channels], from the cache if possible.

        Raises:
            ConfigError: If the file has changed or cannot be decoded.
        """
        patches = self.image_store.cache.get(self.key)
        if patches is None:
            with self.image_store.as_config_error(self.row, self.source):
                patches = self.image_store.image_spec.patches(decode_image(self.data()))
                if len(patches) != prod(self.grid):
                    raise ImageError(f"has {len(patches)} patches, but its header declares {prod(self.grid)}")
            self.image_store.cache.put(self.key, patches)
        return patches

    def __reduce__(self) -> tuple[Any, ...]:
        return _found_again, (self.image_store.name, self.row, self.index)

    def __repr__(self) -> str:
        return f"<{self.source.name}, {self.num_tokens} tokens>"


def _found_again(image_store: str, row: int, index: int) -> Image:
    if image_store not in _OPEN:
        raise RuntimeError(f"received an image of data set {image_store}, which this process has not opened")
    return _OPEN[image_store].images(row)[index]


class ImageStore:
    """The images of a data set's rows."""

    def __init__(self, rows: ConcatRows, image_spec: ImageProcessorSpec, *, root: str | Path, flag: str = "dataset"):
        """Register the images of a data set in this process. No file is opened.

        Args:
            root: Directory that must contain all image paths.
        """
        self.rows, self.image_spec, self.root, self.flag = rows, image_spec, Path(root), flag
        self.cache = PatchCache()
        self.name = f"{flag} {len(rows)} {image_spec.digest}"
        self._known: WeakValueDictionary[tuple[int, int], ImageFile] = WeakValueDictionary()
        _OPEN[self.name] = self

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of images of each row, int64 [rows]."""
        import numpy as np  # `plan` without a data set does not import NumPy

        return np.array([len(images_of_row(row)) for row in self.rows], dtype=np.int64)

    def images(self, row: int) -> tuple[ImageFile, ...]:
        """Return the images of a row in the order of their placeholders. Reads their headers.

        Raises:
            ConfigError: If an image cannot be used.
        """
        sources = images_of_row(self.rows[row])
        return tuple(self._image(row, index, source) for index, source in enumerate(sources))

    def _image(self, row: int, index: int, value: Any) -> ImageFile:
        image = self._known.get((row, index))
        if image is None:
            name = value if isinstance(value, str) else "an image"
            with self.as_config_error(row, ImageSource(str(name))):
                source = make_image_source(value, self.root)
                image = ImageFile(self, row, index, source, self.image_spec.grid(*source.size()))
            self._known[row, index] = image
        return image

    @contextmanager
    def as_config_error(self, row: int, source: ImageSource) -> Iterator[None]:
        """Convert ImageError in the `with` block to a ConfigError that names row and file."""
        try:
            yield
        except ImageError as fault:
            raise ConfigError([Problem(flags=(self.flag,), message=self.sentence(row, source, fault))]) from fault

    def sentence(self, row: int, source: ImageSource, fault: object) -> str:
        """Return an error message about an image."""
        return f"{self.rows.place(row)}: image {source.name} {fault}."

    def stamp(self) -> str:
        """Return a digest of path, size and modification time of all image files; it changes when a file is rewritten."""
        digest = hashlib.sha256(self.image_spec.digest.encode())
        for row in self.counts.nonzero()[0]:
            for value in images_of_row(self.rows[int(row)]):
                with suppress(ImageError, OSError):
                    path = make_image_source(value, self.root).path
                    if path is not None:
                        facts = path.stat()
                        digest.update(f"{path} {facts.st_size} {facts.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def identity(self, row: int) -> list[str]:
        """Return an identifier per image of a row: the path of its file, or a digest of the bytes in the row. Raises ImageError."""
        sources = [make_image_source(value, self.root) for value in images_of_row(self.rows[row])]
        return [str(source.path) if source.held is None else hashlib.sha256(source.held).hexdigest() for source in sources]

    def num_bytes(self, row: int) -> list[int]:
        """Return the file size of each image of a row in bytes. Detects a changed data set without reading the files."""
        sizes = []
        for value in images_of_row(self.rows[row]):
            with suppress(ImageError, OSError):
                source = make_image_source(value, self.root)
                sizes.append(len(source.held) if source.held is not None else source.path.stat().st_size if source.path else 0)
        return sizes

    # ---- checks before anything is loaded

    def faults(self, rows: Sequence[int]) -> list[Problem]:
        """Check the images of rows: first all headers, and if those are valid, the image data.

        At most `MOST_DECODED` pixels are decoded, in the order of the rows.

        Returns:
            One problem that describes all faults, or an empty list.
        """
        faults: list[str] = []
        to_decode: list[tuple[int, ImageSource]] = []
        num_pixels = 0
        for row in rows:
            for value in images_of_row(self.rows[row]):
                source = ImageSource(value if isinstance(value, str) else "in the row")
                try:
                    source = make_image_source(value, self.root)
                    height, width = source.size()
                    self.image_spec.grid(height, width)
                except ImageError as fault:
                    faults.append(self.sentence(row, source, fault))
                    continue
                num_pixels += height * width
                if num_pixels <= MOST_DECODED:
                    to_decode.append((row, source))
        if not faults:
            faults = self._damaged(to_decode)
        remark = f" {len(faults) - NAMED_ROWS} more images cannot be used." if len(faults) > NAMED_ROWS else ""
        return [Problem(flags=(self.flag,), message=" ".join(faults[:NAMED_ROWS]) + remark)] if faults else []

    def _damaged(self, images: Sequence[tuple[int, ImageSource]]) -> list[str]:
        def fault(item: tuple[int, ImageSource]) -> str | None:
            row, source = item
            try:
                decode_image(source.read())
            except ImageError as fault:
                return self.sentence(row, source, fault)
            return None

        with ThreadPoolExecutor(max_workers=4) as pool:  # decoders release the interpreter lock
            return [sentence for sentence in pool.map(fault, images) if sentence]


# ---- tokens


def expand_image_tokens(short: Sequence[int], images: Sequence[Image], image_token: int) -> list[int]:
    """Repeat each image token as often as its image has tokens.

    Args:
        short: Token IDs with one image token per image.
        images: Images, in order.
        image_token: The image token.

    Raises:
        ValueError: If the numbers of image tokens and images differ.
    """
    if short.count(image_token) != len(images):
        raise ValueError(f"the prompt has {short.count(image_token)} image tokens, but the row has {len(images)} images")
    remaining, long = iter(images), list[int]()
    for token in short:
        long += [image_token] * num_tokens(next(remaining)) if token == image_token else [token]
    return long


def places(token_ids: Sequence[int], images: Sequence[Image], image_token: int) -> tuple[tuple[int, Image], ...]:
    """Return ((index of its first token, image), ...) in the expanded token IDs.

    Args:
        token_ids: Token IDs after `expand_image_tokens`.
        images: Images, in order.
        image_token: The image token.
    """
    result, position = [], 0
    for image in images:
        position = token_ids.index(image_token, position)
        result.append((position, image))
        position += num_tokens(image)
    return tuple(result)
