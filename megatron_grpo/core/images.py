"""Images of vision-language models: file to pixels, size to number of tokens, pixels to patches, as the model's files specify.

The number of tokens of an image follows from its size alone, so the lengths of a data set are known without decoding a pixel. Patches are
always made by transformers' image processor with its Pillow backend: its torchvision backend resizes to different pixel values.

The trainer and the sampler must see the same pixels, so both decode a file's bytes with `decode_image`. Image files are untrusted input:
only formats whose decoders are plain arithmetic are opened, and no image that would fill the memory. Needs Pillow (the extra `images`); no
torch.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import stat
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.core.base.errors import ConfigError, Problem
from megatron_grpo.core.base.files import parse_json

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from megatron_grpo.core.types import Image as ImageOfRow


MOST_PIXELS = 89_478_485  # Pillow warns of a decompression bomb above this
MOST_BYTES = 256 << 20  # largest file
LARGEST_RATIO = 200  # longer side to shorter side: Qwen's bound
# Other formats of Pillow start programs (EPS), or have decoders that few people review.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_BROKEN = (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error, zlib.error)
_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap height and width
ORIENTATION = 0x0112


class ImageError(ValueError):
    """The problem with an image, as the end of a sentence whose subject is the image."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Location of the bytes of an image: a file, or memory.

    Args:
        name: Name for messages.
    """

    name: str
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


def make_image_source(value: Any, root: Path) -> ImageSource:
    """Return the source of an image in a data set row.

    Args:
        value: A path, bytes, {"bytes", "path"} as in parquet files, or a PIL image.
        root: Directory that must contain all paths.

    Raises:
        ImageError: If the value is of another type, is a URL, or lies outside of `root`.
    """
    if isinstance(value, Mapping) and {"bytes", "path"} & value.keys():
        content, name = value.get("bytes"), value.get("path")
        if content is None and name is None:
            raise ImageError("has neither bytes nor a path")
        return make_image_source(name, root) if content is None else ImageSource(str(name or "bytes"), held=bytes(content))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ImageSource("bytes", held=bytes(value))
    if isinstance(value, str):
        return _file(value, root)
    if hasattr(value, "getexif") and hasattr(value, "save"):
        return ImageSource(str(getattr(value, "filename", "") or "a PIL image"), held=as_png(value))
    raise ImageError(f"is of type {type(value).__name__}; expected a path, bytes or {{'bytes', 'path'}}")


def _file(name: str, root: Path) -> ImageSource:
    if "://" in name or name.startswith("data:"):
        raise ImageError(f"is the URL {name[:80]!r}, and URLs are not downloaded; save the images and use file paths")
    if not name or "\0" in name:
        raise ImageError(f"has the invalid path {name!r}")
    path, resolved_root = root / Path(name), root.resolve()
    resolved = path.resolve()
    if not resolved.is_relative_to(resolved_root):
        raise ImageError(f"is {name!r}, outside of data_root ({resolved_root}). Use a data_root that contains it")
    return ImageSource(name, path=resolved)


def decode_image(data: bytes) -> Image:
    """Decode an image as the model receives it: upright RGB pixels, on white where it is transparent. Raises ImageError.

    The image has no metadata. vLLM would rotate it again by its orientation tag, and caches images with an EXIF ImageID by that alone.
    """
    with _as_fault(), _opened(io.BytesIO(data)) as image:
        return _upright_pixels(image)


def as_png(image: Image) -> bytes:
    """Encode an image as PNG bytes from which `decode_image` restores the same pixels. Raises ImageError.

    Args:
        image: RGB image.
    """
    with _as_fault():
        stream = io.BytesIO()
        _upright_pixels(image).save(stream, "PNG")
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
    orientation = image.getexif().get(ORIENTATION, 1)
    return orientation if orientation in range(1, 9) else 1


def _upright_pixels(image: Image) -> Image:
    """Return the upright RGB pixels of an image, without its metadata, which Pillow keeps in every copy."""
    from PIL import Image as images

    turn = _orientation(image)
    image.load()
    upright = _rotate_upright(_rgb(image), turn)
    return images.frombytes("RGB", upright.size, upright.tobytes())


def _rotate_upright(image: Image, orientation: int) -> Image:
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
        rgba = image.convert("RGBA")
        on_white = images.new("RGBA", rgba.size, (255, 255, 255, 255))
        on_white.alpha_composite(rgba)
        return on_white.convert("RGB")
    return image.convert("RGB")


Grid = tuple[int, int, int]  # frames, rows and columns of patches
MANY_TOKENS = 4096  # tokens of one image above which a note is printed
_FILE = "preprocessor_config.json"
# Settings of the image processor, with the defaults for those that the file lacks.
_SETTINGS: Mapping[str, Any] = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "merge_size": 2, "patch_size": 14,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711], "resample": 3,
    "rescale_factor": 1 / 255, "temporal_patch_size": 2,
}  # fmt: skip
_SMALLEST, _LARGEST = 56 * 56, 28 * 28 * 1280  # pixels, if the file has no bounds
VARIABLES = {"max_pixels": "MAX_PIXELS", "min_pixels": "MIN_PIXELS"}  # Megatron-SWIFT's names in the environment


@dataclass(frozen=True, kw_only=True)
class ImageProcessorSpec:
    """All settings that determine the tokens and patches of an image.

    Args:
        image_token: Token ID that stands for each part of an image.
        around: Token IDs before and after an image.
        settings: Arguments of transformers' image processor, without its size bounds.
    """

    image_token: int
    around: tuple[int, int]
    min_pixels: int
    max_pixels: int
    settings: Mapping[str, Any] = field(repr=False)

    @classmethod
    def from_pretrained(
        cls, model_path: str | Path, *, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> ImageProcessorSpec | None:
        """Read the image settings from the files of a model.

        Args:
            model_path: Directory of a Hugging Face checkpoint.
            min_pixels: Replaces the model's lower bound on the number of pixels.
            max_pixels: Replaces the model's upper bound on the number of pixels.

        Returns:
            The settings; None for a text model.

        Raises:
            ConfigError: If files are missing or contradict each other, or the bounds are invalid.
        """
        config = _read(Path(model_path) / "config.json")
        if not is_multimodal(config):
            return None
        processor = _read(Path(model_path) / _FILE)
        size = processor.get("size") or {}
        vision = config["vision_config"]
        settings = {name: processor.get(name, default) for name, default in _SETTINGS.items()}
        for name, config_name in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size"), ("temporal_patch_size",) * 2):
            if vision.get(config_name, settings[name]) != settings[name]:
                raise _image_error(f"{_FILE} has {name} {settings[name]}, but config.json has {config_name} {vision[config_name]}", "model")
        spec = cls(
            image_token=config["image_token_id"],
            around=(config["vision_start_token_id"], config["vision_end_token_id"]),
            min_pixels=min_pixels or size.get("shortest_edge") or processor.get("min_pixels") or _SMALLEST,
            max_pixels=max_pixels or size.get("longest_edge") or processor.get("max_pixels") or _LARGEST,
            settings=settings,
        )
        spec._require_sense()
        return spec

    def _require_sense(self) -> None:
        if self.max_pixels < self.side**2:
            raise _image_error(
                f"max_pixels ({self.max_pixels}) is less than the pixels of one image token: {self.side} x {self.side} = {self.side**2}. "
                f"Use {self.side**2} or more",
                "max_pixels",
            )
        if self.min_pixels > self.max_pixels:
            raise _image_error(f"min_pixels ({self.min_pixels}) exceeds max_pixels ({self.max_pixels})", "min_pixels", "max_pixels")

    @property
    def patch(self) -> int:
        """Side of a patch in pixels."""
        return self.settings["patch_size"]

    @property
    def merge(self) -> int:
        """Side of a token in patches: merge x merge patches form one token."""
        return self.settings["merge_size"]

    @property
    def side(self) -> int:
        """Side of a token in pixels."""
        return self.patch * self.merge

    @property
    def channels(self) -> int:
        """Number of values in a patch."""
        return 3 * self.settings["temporal_patch_size"] * self.patch**2

    @property
    def processor_size(self) -> dict[str, int]:
        """Size bounds as transformers' image processor takes them, in pixels despite the key names."""
        return {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}

    @cached_property
    def digest(self) -> str:
        """Digest of all settings that affect the tokens and patches of an image."""
        facts = {"settings": dict(self.settings), "size": self.processor_size, "token": self.image_token}
        return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()

    def grid(self, height: int, width: int) -> Grid:
        """Return the patch grid of an image.

        Args:
            height: Height in pixels.
            width: Width in pixels.

        Raises:
            ImageError: If one side is too long relative to the other.
        """
        rows, columns = resized_size(height, width, factor=self.side, min_pixels=self.min_pixels, max_pixels=self.max_pixels)
        return 1, rows // self.patch, columns // self.patch

    def tokens(self, grid: Grid) -> int:
        """Return the number of tokens of an image with this patch grid.

        Args:
            grid: (frames, rows, columns) of patches.
        """
        return math.prod(grid) // self.merge**2

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an upright RGB image, float32 [patches, channels].

        Args:
            image: Image as `decode_image` returns it.
        """
        return self._processor(images=[image], return_tensors="np")["pixel_values"]

    @cached_property
    def _processor(self) -> Any:
        try:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Processor
        except ModuleNotFoundError:  # transformers 4: its class without "Fast" in its name is Pillow's
            from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as Processor  # type: ignore[assignment]  # the older name
        return Processor(size=self.processor_size, **self.settings)


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json belongs to a vision-language model."""
    return "vision_config" in config and "image_token_id" in config


def resized_size(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return the size to which Qwen's image processor resizes an image.

    Height and width become multiples of `factor`, with about the same aspect ratio and a number of pixels within the bounds. Reimplements
    transformers' `smart_resize` (Apache-2.0), whose import needs torch.

    Args:
        factor: Side of a token in pixels.
        max_pixels: Upper bound on height x width.

    Returns:
        (height, width) in pixels.

    Raises:
        ImageError: If `smart_resize` would fail: one side is more than `LARGEST_RATIO` times the other.
    """
    if max(height, width) > LARGEST_RATIO * min(height, width):
        raise ImageError(f"is {width} x {height} pixels: one side is more than {LARGEST_RATIO} times the other")
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rows, columns


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _image_error(
            f"{path.name} is missing from the model directory ({path.parent}); it has the image processor settings", "model"
        ) from error
    except (OSError, ValueError) as error:
        raise _image_error(f"{path} cannot be read as JSON: {error}", "model") from error
    if not isinstance(content, dict):
        raise _image_error(f"{path} is not a JSON object", "model")
    return content


def _image_error(sentence: str, *flags: str) -> ConfigError:
    return ConfigError([Problem(flags=flags, message=f"{sentence}.")])


_KEY_BYTES = 16


def compute_image_key(data: bytes, image_spec: ImageProcessorSpec) -> str:
    """Return the key of an image: a digest of its bytes, keyed by the processor settings."""
    return hashlib.blake2b(data, digest_size=_KEY_BYTES, key=image_spec.digest.encode()).hexdigest()


def collapse_image_tokens(token_ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
    """Invert `expand_image_tokens`: keep one token per image.

    Args:
        token_ids: Token IDs after `expand_image_tokens`.
        spans: (first token, number of tokens) of each image. Image tokens outside of these spans are kept.
    """
    result, end = list[int](), 0
    for position, count in spans:
        result += [*token_ids[end:position], token_ids[position]]
        end = position + count
    return [int(token) for token in [*result, *token_ids[end:]]]


def num_tokens(image: ImageOfRow) -> int:
    """Return the number of tokens of an image."""
    frames, rows, columns = image.grid
    return frames * rows * columns // image.merge**2
