"""Write the data sets of the quickstart: sums of two two-digit numbers as prompts, with their answers.

Each of the 8,100 sums is in exactly one of train.jsonl and test.jsonl. The seed determines which sums are held out.

    python examples/quickstart/make_data.py --output examples/quickstart/data --seed 0 --num_test 400
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path


def make_rows(seed: int) -> list[dict[str, str]]:
    """Return all sums as `{"prompt": "12+34=", "answer": "46"}`, shuffled with the seed."""
    numbers = range(10, 100)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in numbers]
    random.Random(seed).shuffle(rows)
    return rows


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write the two files into `--output`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("examples/quickstart/data"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_test", type=int, default=400, help="number of held-out sums")
    args = parser.parse_args()

    rows = make_rows(args.seed)
    if not 0 < args.num_test < len(rows):
        parser.error(f"--num_test is {args.num_test}; it must be between 1 and {len(rows) - 1}")
    args.output.mkdir(parents=True, exist_ok=True)
    write_rows(args.output / "test.jsonl", rows[: args.num_test])
    write_rows(args.output / "train.jsonl", rows[args.num_test :])
    num_train = len(rows) - args.num_test
    print(f"[data] {num_train} training sums and {args.num_test} held-out sums in {args.output}")


if __name__ == "__main__":
    main()
