"""Write Geometry3K from the Hub: its figures as PNG files, and .jsonl with prompts, file names and answers. Needs the extra [data]."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ASK = "Think step by step, and put the final answer into \\boxed{}."


def main() -> None:
    """Write both splits into `--out`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data", help="directory to write to")
    out = parser.parse_args().out

    from datasets import load_dataset

    for split in ("train", "test"):
        (out / split).mkdir(parents=True, exist_ok=True)
        rows = load_dataset("hiyouga/geometry3k", split=split)
        made = [make_row(example, out, f"{split}/{i:05d}") for i, example in enumerate(rows)]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in made]
        (out / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{out / split}.jsonl: {len(lines)} problems")


def make_row(example: dict[str, Any], out: Path, name: str) -> dict[str, Any]:
    """Write the figures of an example, and return its row. `<image>` in the problem marks the position of a figure."""
    names = [f"{name}.{i}.png" for i in range(len(example["images"]))]
    for image, file in zip(example["images"], names, strict=True):
        image.save(out / file)
    prompt = [{"role": "user", "content": f"{example['problem']}\n{ASK}"}]
    return {"prompt": prompt, "images": names, "answer": example["answer"]}


if __name__ == "__main__":
    main()
