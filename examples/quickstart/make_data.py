"""The quickstart's data: sums of two two-digit numbers, as prompts and answers.

Every one of the 8,100 sums is in exactly one of the two files, so the held-out ones are never trained on. Which ones are held out
depends on the seed alone.

    python examples/quickstart/make_data.py --output examples/quickstart/data --seed 0 --num_test 400
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path


def make_rows(seed: int) -> list[dict[str, str]]:
    """All sums in an order that the seed decides: `{"prompt": "12+34=", "answer": "46"}`."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(rows)
    return rows


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("examples/quickstart/data"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_test", type=int, default=400, help="held-out sums")
    args = parser.parse_args()

    rows = make_rows(args.seed)
    if not 0 < args.num_test < len(rows):
        parser.error(f"--num_test must be between 1 and {len(rows) - 1}, the number of sums less one; it is {args.num_test}")
    args.output.mkdir(parents=True, exist_ok=True)
    write_rows(args.output / "test.jsonl", rows[: args.num_test])
    write_rows(args.output / "train.jsonl", rows[args.num_test :])
    print(f"[data] {len(rows) - args.num_test} sums to train on and {args.num_test} held out, in {args.output}")


if __name__ == "__main__":
    main()
