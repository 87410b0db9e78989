"""Open image files: read the size from the header, or decode to upright RGB. Used by the trainer and the sampler.

Both must see the same pixels, so both decode a file's bytes with `decoded`. Image files are untrusted input: only formats whose decoders
are plain arithmetic are opened, and no image that would fill the memory. Needs Pillow (the extra `images`); no torch.
"""

from __future__ import annotations

import io
import stat
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 89_478_485  # Pillow warns of a decompression bomb above this
MOST_BYTES = 256 << 20  # largest file
LARGEST_RATIO = 200  # longer side to shorter side: Qwen's bound
# Other formats of Pillow start programs (EPS), or have decoders that few people review.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_BROKEN = (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error, zlib.error)
_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap height and width
_ORIENTATION = 0x0112


class ImageError(ValueError):
    """The problem with an image, as the end of a sentence whose subject is the image."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Location of the bytes of an image: a file, or memory."""

    name: str  # name for messages
    path: Path | None = None
    held: bytes | None = None

    def read(self) -> bytes:
        """Return the bytes of the image. Raises ImageError."""
        if self.held is not None:
            return self.held
        assert self.path is not None
        with _as_fault():
            _require_file(self.path)
            return self.path.read_bytes()

    def size(self) -> tuple[int, int]:
        """Return (height, width) in pixels of the upright image, from the header alone. Raises ImageError."""
        with _as_fault():
            if self.path is not None:
                _require_file(self.path)
            with self.path.open("rb") if self.path is not None else io.BytesIO(self.held or b"") as stream, _opened(stream) as image:
                width, height = image.size
                return (width, height) if _orientation(image) in _SIDEWAYS else (height, width)


def source_of(given: Any, root: Path) -> ImageSource:
    """Return the source of an image in a data set row.

    Args:
        given: A path, bytes, {"bytes", "path"} as in parquet files, or a PIL image.
        root: Directory that must contain all paths.

    Raises:
        ImageError: If the value is of another type, is a URL, or lies outside of `root`.
    """
    if isinstance(given, Mapping) and {"bytes", "path"} & given.keys():
        held, name = given.get("bytes"), given.get("path")
        if held is None and name is None:
            raise ImageError("has neither bytes nor a path")
        return source_of(name, root) if held is None else ImageSource(str(name or "bytes"), held=bytes(held))
    if isinstance(given, (bytes, bytearray, memoryview)):
        return ImageSource("bytes", held=bytes(given))
    if isinstance(given, str):
        return _file(given, root)
    if hasattr(given, "getexif") and hasattr(given, "save"):
        return ImageSource(str(getattr(given, "filename", "") or "a PIL image"), held=as_png(given))
    raise ImageError(f"is of type {type(given).__name__}; expected a path, bytes or {{'bytes', 'path'}}")


def _file(name: str, root: Path) -> ImageSource:
    if "://" in name or name.startswith("data:"):
        raise ImageError(f"is the URL {name[:80]!r}, and URLs are not downloaded; save the images and use file paths")
    if not name or "\0" in name:
        raise ImageError(f"has the invalid path {name!r}")
    path, inside = root / Path(name), root.resolve()
    found = path.resolve()
    if not found.is_relative_to(inside):
        raise ImageError(f"is {name!r}, outside of data_root ({inside}). Use a data_root that contains it")
    return ImageSource(name, path=found)


def decoded(data: bytes) -> Image:
    """Decode an image as the model receives it: upright and RGB, on white where it is transparent. Raises ImageError."""
    with _as_fault(), _opened(io.BytesIO(data)) as image:
        turn = _orientation(image)
        image.load()
        return _upright(_rgb(image), turn)


def as_png(image: Image) -> bytes:
    """Encode an image as PNG bytes from which `decoded` restores the same pixels. Raises ImageError."""
    with _as_fault():
        turn = _orientation(image)
        image.load()
        stream = io.BytesIO()
        _upright(_rgb(image), turn).save(stream, "PNG")
        return stream.getvalue()


def require_pillow() -> str | None:
    """Return a sentence that says how to install Pillow, or None if it is installed."""
    return None if find_spec("PIL") else "Reading images needs the extra `images`: pip install 'megatron-grpo[images]'."


def _require_file(path: Path) -> None:
    """Raise ImageError unless the path is a regular file of at most `MOST_BYTES` bytes. Reading a device would never end."""
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise ImageError("is not a file")
    if facts.st_size > MOST_BYTES:
        raise ImageError(f"has {facts.st_size:,} bytes, more than the maximum of {MOST_BYTES:,}")


@contextmanager
def _opened(stream: Any) -> Iterator[Image]:
    from PIL import Image, TiffImagePlugin, WebPImagePlugin  # noqa: F401 - plugins that must be imported to be registered

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of decompression bombs, which are rejected below, and of damaged metadata
        with Image.open(stream, formats=FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise ImageError(f"has {width:,} x {height:,} pixels, more than the maximum of {MOST_PIXELS:,} (a decompression bomb?)")
            if max(width, height) > LARGEST_RATIO * min(width, height):
                raise ImageError(f"is {width} x {height} pixels: one side is more than {LARGEST_RATIO} times the other")
            yield image


@contextmanager
def _as_fault() -> Iterator[None]:
    """Convert every exception that a decoder raises to ImageError."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except ImageError:
        raise
    except FileNotFoundError as error:
        raise ImageError("does not exist") from error
    except UnidentifiedImageError as error:
        raise ImageError(f"is not a {', '.join(FORMATS)} file, or is damaged") from error
    except (Image.DecompressionBombError, *_BROKEN) as error:
        raise ImageError(f"cannot be read: {getattr(error, 'strerror', None) or error or type(error).__name__}") from error


def _orientation(image: Image) -> int:
    """Return the EXIF orientation (1 is upright) from the header, so that sizes from the header agree with the pixels."""
    if image.format == "TIFF":  # Pillow rotates TIFF files while loading, and reports the rotated size
        return 1
    if image.format == "PNG" and not {"exif", "Raw profile type exif", "xmp"} & image.info.keys():
        return 1  # getexif() would decode the whole image to look for data after the pixels
    found = image.getexif().get(_ORIENTATION, 1)
    return found if found in range(1, 9) else 1


def _upright(image: Image, orientation: int) -> Image:
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM, 5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE, 8: Transpose.ROTATE_90,
    }  # fmt: skip
    return image.transpose(turns[orientation]) if orientation in turns else image


def _rgb(image: Image) -> Image:
    from PIL import Image as images

    if image.mode == "F":
        raise ImageError("has floating-point pixels without a defined value range")
    if image.mode.startswith("I"):  # 16-bit grayscale, which Pillow would clip at 255
        import numpy as np  # `plan` of a text model does not import NumPy

        return images.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        whole = image.convert("RGBA")
        on_white = images.new("RGBA", whole.size, (255, 255, 255, 255))
        on_white.alpha_composite(whole)
        return on_white.convert("RGB")
    return image.convert("RGB")
