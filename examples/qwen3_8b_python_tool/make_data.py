"""DeepScaleR's problems to train on and MATH-500 to hold out, from the Hub as .jsonl. Needs the extra [data]."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

SETS = {"train": ("agentica-org/DeepScaleR-Preview-Dataset", "train"), "test": ("HuggingFaceH4/MATH-500", "test")}
ASK = "You may run Python to compute or to check. Put the final answer into \\boxed{}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data", help="directory to write train.jsonl and test.jsonl to")
    out = parser.parse_args().out

    from datasets import load_dataset

    out.mkdir(parents=True, exist_ok=True)
    for name, (dataset, split) in SETS.items():
        lines = [
            json.dumps(make_row(one["problem"], one["answer"]), ensure_ascii=False) + "\n" for one in load_dataset(dataset, split=split)
        ]
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{out / name}.jsonl: {len(lines)} problems")


def make_row(problem: str, answer: object) -> dict:
    return {"prompt": [{"role": "user", "content": f"{problem}\n{ASK}"}], "answer": str(answer)}


if __name__ == "__main__":
    main()
