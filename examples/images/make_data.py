"""The data of the example: drawn pictures of coloured shapes, and questions about colours, counts and places.

Every picture is drawn anew, so none of the held-out ones is ever trained on. Files are PNG, rows are as for any model that sees:

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
# A tower knows where patches stand to each other, and not where they stand: a shape looks the same left and right. By its frame a model of
# two layers tells the sides apart within 450 steps of supervised training; without, it answers by chance after as many.
FRAME = (30, 30, 30)
KINDS = ("color", "count", "side")


def draw_image(shapes: list[tuple[str, int, int]], rng: random.Random) -> Image.Image:
    """shapes: (colour, column, row) of each, in a grid of 2 x 2. Where in its quarter a shape stands, and its form, is left to chance."""
    grey = rng.randrange(225, 256)
    picture = Image.new("RGB", (SIDE, SIDE), (grey, grey, grey))
    pen = ImageDraw.Draw(picture)
    pen.rectangle((0, 0, SIDE - 1, SIDE - 1), outline=FRAME, width=2)
    for colour, column, row in shapes:
        size = rng.randrange(13, 20)
        x, y = (at * SIDE // 2 + rng.randrange(3, SIDE // 2 - size - 2) for at in (column, row))
        (pen.ellipse if rng.random() < 0.5 else pen.rectangle)((x, y, x + size, y + size), fill=COLORS[colour])
    return picture


def make_row(kind: str, rng: random.Random) -> tuple[Image.Image, dict[str, Any]]:
    """A picture and its question. `mistaken`: what one says who echoes the question, and who confuses left and right; or overlooks one."""
    if kind == "count":
        number = rng.randrange(2, 5)
        places = rng.sample([(column, row) for column in (0, 1) for row in (0, 1)], number)
        shapes = [(rng.choice(list(COLORS)), *place) for place in places]
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
    (folder / name).mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        picture, row = make_row(KINDS[number % len(KINDS)], rng)
        picture.save(folder / name / f"{number:05d}.png")
        rows.append({**row, "images": [f"{name}/{number:05d}.png"]})
    of = {name: rows} | {f"{name}_{kind}": [row for row in rows if row["kind"] == kind] for kind in KINDS}  # each kind by itself too
    for file, chosen in of.items():
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("examples/images/data"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_train", type=int, default=3000)
    parser.add_argument("--num_test", type=int, default=240, help="held-out pictures")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    write_dataset(args.output, "test", args.num_test, rng)
    write_dataset(args.output, "train", args.num_train, rng)
    print(f"[data] {args.num_train} pictures to train on and {args.num_test} held out, in {args.output}")


if __name__ == "__main__":
    main()
