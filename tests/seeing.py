"""Vision-language models with random weights, images of all kinds, and prompts with them, for tests of data and samplers."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests import vision_cases

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))


def write_seeing(folder: Path, kind: str = "qwen2_5_vl") -> Path:
    """Write a checkpoint with tokenizer and image processor; norms and biases are random too."""
    import make_tiny_vlm

    model, _ = make_tiny_vlm.initialize_model(folder, kind, draws_norms=True)
    model.save_pretrained(folder)
    if kind == "qwen3_vl_moe":
        vision_cases.as_on_the_hub(folder)
    return folder


def picture(height: int, width: int, *, seed: int = 0, mode: str = "RGB") -> Any:
    """Return a PIL image of waves with one bright corner, so that a rotation changes it."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    planes = [127 + 120 * np.sin(x / rng.uniform(5, 30) + rng.uniform(0, 6)) * np.cos(y / rng.uniform(5, 30)) for _ in range(3)]
    pixels = np.stack(planes, -1).astype(np.uint8)
    pixels[: height // 3, : width // 3] = (250, 20, 20)
    return Image.fromarray(pixels).convert(mode)


def as_bytes(image: Any, form: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def hf_logprobs(model: Any, sequence: Any, temperature: float = 1.0) -> np.ndarray:
    """Return transformers' log-probs of a sequence's tokens after the first, with its images: float32 [T - 1]."""
    import torch

    from tests.vision_cases import compute_logits

    with torch.no_grad():
        logits = compute_logits(model, sequence).float() / temperature
    return logits[:-1].log_softmax(-1).gather(1, torch.from_numpy(sequence.token_ids)[1:, None])[:, 0].numpy()
