"""Write DeepScaleR as the training set and MATH-500 as the held-out set, from the Hub. Needs the extra [data]."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

SETS = {"train": ("agentica-org/DeepScaleR-Preview-Dataset", "train"), "test": ("HuggingFaceH4/MATH-500", "test")}
ASK = "You may run Python to compute or to check. Put the final answer into \\boxed{}."


def main() -> None:
    """Write train.jsonl and test.jsonl into `--out`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data", help="directory to write train.jsonl and test.jsonl to")
    out = parser.parse_args().out

    from datasets import load_dataset

    out.mkdir(parents=True, exist_ok=True)
    for name, (dataset, split) in SETS.items():
        rows = [make_row(one["problem"], one["answer"]) for one in load_dataset(dataset, split=split)]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{out / name}.jsonl: {len(lines)} problems")


def make_row(problem: str, answer: object) -> dict:
    """Return a row with a chat prompt and the answer as text."""
    return {"prompt": [{"role": "user", "content": f"{problem}\n{ASK}"}], "answer": str(answer)}


if __name__ == "__main__":
    main()
