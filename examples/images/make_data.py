"""Draw images of colored shapes and write questions about their colors, number and sides.

Each image is drawn once, so no held-out image is trained on. Images are PNG files; a row names its images:

    {"messages": [{"role": "user", "content": "<image>How many shapes?"}], "images": ["train/00017.png"], "answer": "3", "kind": "count"}

    python examples/images/make_data.py --output examples/images/data --seed 0
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

SIDE = 56  # pixels
COLORS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (240, 210, 40)}
# The vision tower encodes only relative positions of patches, so a shape looks the same on both sides. With a frame around the image, a
# tower of two layers learns the sides within 450 supervised steps; without it, its answers are at chance after as many steps.
FRAME = (30, 30, 30)
KINDS = ("color", "count", "side")


def draw_image(shapes: list[tuple[str, int, int]], rng: random.Random) -> Image.Image:
    """Draw an image of 56 x 56 pixels.

    Args:
        shapes: (color, column, row) of each shape in a 2 x 2 grid. Its form, size and offset are random.
        rng: Source of the random numbers.
    """
    gray = rng.randrange(225, 256)
    image = Image.new("RGB", (SIDE, SIDE), (gray, gray, gray))
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, 0, SIDE - 1, SIDE - 1), outline=FRAME, width=2)
    for color, column, row in shapes:
        size = rng.randrange(13, 20)
        x, y = (cell * SIDE // 2 + rng.randrange(3, SIDE // 2 - size - 2) for cell in (column, row))
        (pen.ellipse if rng.random() < 0.5 else pen.rectangle)((x, y, x + size, y + size), fill=COLORS[color])
    return image


def make_row(kind: str, rng: random.Random) -> tuple[Image.Image, dict[str, Any]]:
    """Return an image and its row.

    The field `mistaken` has the two wrong answers of the warm-up: a word of the question, and the other side or color; for a count, one
    shape less.
    """
    if kind == "count":
        number = rng.randrange(2, 5)
        cells = rng.sample([(column, row) for column in (0, 1) for row in (0, 1)], number)
        shapes = [(rng.choice(list(COLORS)), *cell) for cell in cells]
        question, answer, mistaken = "How many shapes?", str(number), [str(number - 1)] * 2
    else:
        left, right = rng.sample(list(COLORS), 2)
        shapes = [(left, 0, rng.randrange(2)), (right, 1, rng.randrange(2))]
        side = rng.choice(("left", "right"))
        one, other = (left, right) if side == "left" else (right, left)
        question, answer, mistaken = f"Which color is {side}?", one, [side, other]
        if kind == "side":
            question, answer, mistaken = f"Where is {one}?", side, [one, "left" if side == "right" else "right"]
    row = {"messages": [{"role": "user", "content": f"<image>{question}"}], "answer": answer, "mistaken": mistaken, "kind": kind}
    return draw_image(shapes, rng), row


def write_dataset(folder: Path, name: str, count: int, rng: random.Random) -> None:
    """Write `count` images, and .jsonl files with all rows and with the rows of each kind."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        image, row = make_row(KINDS[number % len(KINDS)], rng)
        image.save(folder / name / f"{number:05d}.png")
        rows.append({**row, "images": [f"{name}/{number:05d}.png"]})
    files = {name: rows} | {f"{name}_{kind}": [row for row in rows if row["kind"] == kind] for kind in KINDS}
    for file, chosen in files.items():
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")


def main() -> None:
    """Write the training and the held-out data into `--output`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("examples/images/data"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_train", type=int, default=3000)
    parser.add_argument("--num_test", type=int, default=240, help="number of held-out images")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    write_dataset(args.output, "test", args.num_test, rng)
    write_dataset(args.output, "train", args.num_train, rng)
    print(f"[data] {args.num_train} training images and {args.num_test} held-out images in {args.output}")


if __name__ == "__main__":
    main()
