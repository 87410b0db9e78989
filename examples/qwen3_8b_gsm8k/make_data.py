"""GSM8K from the Hub as .jsonl: a chat prompt and the number that answers it. Needs the extra [data]."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ASK = "Think step by step, and put the final number into \\boxed{}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data", help="directory to write train.jsonl and test.jsonl to")
    out = parser.parse_args().out

    from datasets import load_dataset

    out.mkdir(parents=True, exist_ok=True)
    for split, rows in load_dataset("openai/gsm8k", "main").items():
        lines = [json.dumps(make_row(example["question"], example["answer"]), ensure_ascii=False) + "\n" for example in rows]
        (out / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{out / split}.jsonl: {len(lines)} problems")


def make_row(question: str, answer: str) -> dict:
    """The data set's answers end in `#### 1,234`."""
    return {"prompt": [{"role": "user", "content": f"{question}\n{ASK}"}], "answer": answer.rsplit("####", 1)[1].strip().replace(",", "")}


if __name__ == "__main__":
    main()
