"""How a model sees: what becomes of a picture before its first layer, as the files beside its weights say.

How many tokens a picture has follows from its size alone, so the lengths of a data set are known without a pixel. Patches are made by
transformers' own image processor, with its Pillow backend wherever they are made: its torchvision backend resizes to other pixels.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.base.errors import ConfigError, Problem
from megatron_grpo.data.images import LARGEST_RATIO, ImageError

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from megatron_grpo.config.config import DataConfig

Grid = tuple[int, int, int]  # frames, rows and columns of patches
MOST_CACHED = 512 << 20  # bytes of patches that are kept
MANY_TOKENS = 4096  # of one picture: more is worth a word
_FILE = "preprocessor_config.json"
# What the image processor is told, and the value that holds where the file says nothing.
_SETTINGS: Mapping[str, Any] = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "merge_size": 2, "patch_size": 14,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711], "resample": 3,
    "rescale_factor": 1 / 255, "temporal_patch_size": 2,
}  # fmt: skip
_SMALLEST, _LARGEST = 56 * 56, 28 * 28 * 1280  # pixels, where the file says nothing
VARIABLES = {"max_pixels": "MAX_PIXELS", "min_pixels": "MIN_PIXELS"}  # Megatron-SWIFT's names in the environment


@dataclass(frozen=True, kw_only=True)
class ImageProcessorSpec:
    """Everything that decides which tokens and patches a picture becomes."""

    image_token: int  # stands for each part of a picture
    around: tuple[int, int]  # tokens before and behind a picture
    min_pixels: int
    max_pixels: int
    settings: Mapping[str, Any] = field(repr=False)  # of transformers' image processor, without its sizes

    @classmethod
    def of(cls, model_path: str | Path, *, min_pixels: int | None = None, max_pixels: int | None = None) -> ImageProcessorSpec | None:
        """What the files of a model say; None for a model of text. Raises ConfigError.

        min_pixels, max_pixels: instead of the model's own.
        """
        config = _read(Path(model_path) / "config.json")
        if not sees(config):
            return None
        told = _read(Path(model_path) / _FILE)
        size = told.get("size") or {}
        vision = config["vision_config"]
        settings = {name: told.get(name, default) for name, default in _SETTINGS.items()}
        for ours, theirs in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size"), ("temporal_patch_size",) * 2):
            if vision.get(theirs, settings[ours]) != settings[ours]:
                raise _wrong(f"{_FILE} has {ours} {settings[ours]}, and config.json {theirs} {vision[theirs]}", "model")
        found = cls(
            image_token=config["image_token_id"],
            around=(config["vision_start_token_id"], config["vision_end_token_id"]),
            min_pixels=min_pixels or size.get("shortest_edge") or told.get("min_pixels") or _SMALLEST,
            max_pixels=max_pixels or size.get("longest_edge") or told.get("max_pixels") or _LARGEST,
            settings=settings,
        )
        found._require_sense()
        return found

    def _require_sense(self) -> None:
        if self.max_pixels < self.side**2:
            raise _wrong(
                f"max_pixels ({self.max_pixels}) is less than one token of a picture has: {self.side} x {self.side} = {self.side**2}. "
                f"Use {self.side**2} or more",
                "max_pixels",
            )
        if self.min_pixels > self.max_pixels:
            raise _wrong(f"min_pixels ({self.min_pixels}) is more than max_pixels ({self.max_pixels})", "min_pixels", "max_pixels")

    @property
    def patch(self) -> int:
        """Pixels of a side."""
        return self.settings["patch_size"]

    @property
    def merge(self) -> int:
        """So many by so many patches are one token."""
        return self.settings["merge_size"]

    @property
    def side(self) -> int:
        """Pixels of the side of a token."""
        return self.patch * self.merge

    @property
    def channels(self) -> int:
        """Numbers of a patch."""
        return 3 * self.settings["temporal_patch_size"] * self.patch**2

    @property
    def processor_size(self) -> dict[str, int]:
        """As transformers' image processor takes it, in pixels in spite of the names."""
        return {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}

    @cached_property
    def digest(self) -> str:
        """Of all that decides what becomes of a picture."""
        facts = {"settings": dict(self.settings), "size": self.processor_size, "token": self.image_token}
        return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()

    def grid(self, height: int, width: int) -> Grid:
        """Patches of a picture of this many pixels. Raises ImageError for a strip."""
        rows, columns = resized(height, width, factor=self.side, min_pixels=self.min_pixels, max_pixels=self.max_pixels)
        return 1, rows // self.patch, columns // self.patch

    def tokens(self, grid: Grid) -> int:
        return math.prod(grid) // self.merge**2

    def patches(self, image: Image) -> np.ndarray:
        """float32 [patches, channels] of an upright RGB picture."""
        return self._processor(images=[image], return_tensors="np")["pixel_values"]

    @cached_property
    def _processor(self) -> Any:
        try:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Processor
        except ModuleNotFoundError:  # transformers 4: its class without "Fast" in its name is Pillow's
            from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as Processor  # type: ignore[assignment]  # the older name
        return Processor(size=self.processor_size, **self.settings)


def sees(config: Mapping[str, Any]) -> bool:
    """Whether a model with this config.json has eyes."""
    return "vision_config" in config and "image_token_id" in config


def resized(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) that Qwen's image processor resizes to: multiples of `factor`, about as wide and high as before, between the bounds.

    transformers' `smart_resize` (Apache-2.0), which is behind an import of torch. Raises ImageError where it would fail.
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


def eyes_of(cfg: DataConfig, model_path: str | Path) -> ImageProcessorSpec | None:
    """How the model of a run sees, with the run's own bounds. Raises ConfigError."""
    bounds = {name: getattr(cfg, name) or _of_environment(variable) for name, variable in VARIABLES.items()}
    return ImageProcessorSpec.of(model_path, min_pixels=bounds["min_pixels"], max_pixels=bounds["max_pixels"])


def said_of_bounds(cfg: DataConfig) -> list[str]:
    """Which of two bounds on the size of pictures holds: what was typed, or what the environment has."""
    said = []
    for name, variable in VARIABLES.items():
        typed, found = getattr(cfg, name), os.environ.get(variable)
        if found is None or str(typed) == found:
            continue
        over = f"{variable} {found} of the environment"
        said.append(f"{name} {typed} holds, not {over}." if typed else f"{over} holds: {name} is not set.")
    return said


def _of_environment(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        name = next(name for name, other in VARIABLES.items() if other == variable)
        raise _wrong(f"{variable} in the environment is {text!r}, which is no number of pixels. Unset it, or give {name}", name)
    return int(text)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _wrong(
            f"{path.name} is missing beside the model ({path.parent}), and it says how pictures become patches", "model"
        ) from error
    except (OSError, ValueError) as error:
        raise _wrong(f"{path} cannot be read as JSON: {error}", "model") from error
    if not isinstance(found, dict):
        raise _wrong(f"{path} holds no JSON object", "model")
    return found


def _wrong(sentence: str, *flags: str) -> ConfigError:
    return ConfigError([Problem(flags=flags, message=f"{sentence}.")])


class PatchCache:
    """Patches of pictures that were made last, by key, up to so many bytes."""

    def __init__(self, most_bytes: int = MOST_CACHED):
        self.most_bytes = most_bytes
        self._held: OrderedDict[str, np.ndarray] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> np.ndarray | None:
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def put(self, key: str, patches: np.ndarray) -> None:
        with self._lock:
            if key in self._held or patches.nbytes > self.most_bytes:
                return
            self._held[key] = patches
            self._num_bytes += patches.nbytes
            while self._num_bytes > self.most_bytes:
                self._num_bytes -= self._held.popitem(last=False)[1].nbytes
