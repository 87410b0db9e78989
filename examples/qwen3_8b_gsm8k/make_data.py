"""Write GSM8K from the Hub as .jsonl with chat prompts and numeric answers. Needs the extra [data]."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ASK = "Think step by step, and put the final number into \\boxed{}."


def main() -> None:
    """Write train.jsonl and test.jsonl into `--out`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data", help="directory to write train.jsonl and test.jsonl to")
    out = parser.parse_args().out

    from datasets import load_dataset

    out.mkdir(parents=True, exist_ok=True)
    for split, rows in load_dataset("openai/gsm8k", "main").items():
        made = [make_row(example["question"], example["answer"]) for example in rows]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in made]
        (out / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{out / split}.jsonl: {len(lines)} problems")


def make_row(question: str, answer: str) -> dict:
    """Return a row with a chat prompt and the number after the `####` of GSM8K's answer."""
    number = answer.rsplit("####", 1)[1].strip().replace(",", "")
    return {"prompt": [{"role": "user", "content": f"{question}\n{ASK}"}], "answer": number}


if __name__ == "__main__":
    main()
