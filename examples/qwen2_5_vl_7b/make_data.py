"""Geometry3K from the Hub: its figures as files, and .jsonl with a chat prompt, the names of its figures and the answer. Needs [data]."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ASK = "Think step by step, and put the final answer into \\boxed{}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data", help="directory to write to")
    out = parser.parse_args().out

    from datasets import load_dataset

    for split in ("train", "test"):
        (out / split).mkdir(parents=True, exist_ok=True)
        rows = load_dataset("hiyouga/geometry3k", split=split)
        lines = [
            json.dumps(make_row(example, out, f"{split}/{number:05d}"), ensure_ascii=False) + "\n" for number, example in enumerate(rows)
        ]
        (out / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{out / split}.jsonl: {len(lines)} problems")


def make_row(example: dict[str, Any], out: Path, name: str) -> dict[str, Any]:
    """A problem says <image> where each of its figures belongs."""
    names = [f"{name}.{place}.png" for place in range(len(example["images"]))]
    for picture, file in zip(example["images"], names, strict=True):
        picture.save(out / file)
    return {"prompt": [{"role": "user", "content": f"{example['problem']}\n{ASK}"}], "images": names, "answer": example["answer"]}


if __name__ == "__main__":
    main()
