"""Counts log-probs of trainer and sampler that are equal in every bit, with `--same_bits` and without. Writes docs/same_bits.md.

    python tools/same_bits.py [--models qwen3 mixtral ...] [--layouts 1 "TP2 SP" ...] [--dtype float32 bfloat16] [--steps 2]

Models and layouts are those of tests/same_bits_cases.py; ranks are real processes that talk over gloo. Takes half an hour on two cores;
with any of the arguments a part of it, and no page is written. Ends with 1 where a bit differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks share the cores
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import same_bits_cases as cases  # noqa: E402
from tests.ranks import RanksFailed, run_ranks  # noqa: E402

COLUMNS = ("packed", "alone", "prompts", "training")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=cases.MODELS, metavar="MODEL")
    parser.add_argument("--layouts", nargs="+", choices=cases.LAYOUTS, metavar="LAYOUT")
    parser.add_argument("--dtype", nargs="+", choices=cases.DTYPES)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps, with a push after each")
    args = parser.parse_args()
    in_part = any((args.models, args.layouts, args.dtype))
    rows, wrong = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for dtype in args.dtype or cases.DTYPES:
            for model in args.models or cases.MODELS:
                path = cases.write(Path(folder) / f"{model}, {dtype}", model, dtype)
                for layout in args.layouts or cases.LAYOUTS:
                    if cases.suits(model, layout, dtype):
                        found = count(path, layout, dtype, args.steps)
                        wrong += found is None or not all(one.is_exact for one in found.values())
                        rows.append((dtype, model, layout, found))
                        told = "failed" if found is None else ", ".join(f"{name} {found[name]}" for name in COLUMNS)
                        print(f"{dtype:8} {model:12} {layout:14} {told}", flush=True)
    if not in_part:
        (ROOT / "docs" / "same_bits.md").write_text(page(rows, args.steps), encoding="utf-8")
    print(f"{len(rows)} cases, {wrong} with other bits")
    return 1 if wrong else 0


def count(path: Path, layout: str, dtype: str, steps: int) -> dict[str, cases.Count] | None:
    """Over all ranks; None where they failed."""
    case = cases.LAYOUTS[layout]

    def body(rank, world):
        return cases.compare(rank, world, path, steps=steps, torch_dtype=dtype, **case.settings)

    try:
        found = run_ranks(body, case.world_size, timeout=600)
    except RanksFailed as error:  # the others go on
        print(error, file=sys.stderr)
        return None
    return {name: sum((one[name] for one in found), cases.Count()) for name in COLUMNS}


def page(rows, steps: int) -> str:
    import megatron.core
    import torch
    import vllm

    lines = [
        "# Equal bits, counted", "",
        "Log-probs of trainer and sampler that are equal in every bit under `--same_bits true` ([what it is](proof.md#equal-bits)), over "
        f"{steps} optimizer steps with a push after each. Packed: the trainer's scores of drawn tokens, several sequences in a stream, "
        "against what was sampled. Alone: one sequence at a time. Prompts: its scores of all tokens, prompts too, against the sampler's. "
        "Training: the forward pass of the optimizer step against what was sampled. Every rank counts. `python tools/same_bits.py` makes "
        "this page; a part of it is a test.", "",
        f"Made with vLLM {vllm.__version__}, megatron-core {megatron.core.__version__}, torch {torch.__version__}, one thread a rank, on "
        f"a processor with {cases.instructions()}.", "",
        "| dtype | model | layout | " + " | ".join(COLUMNS) + " |", "|---" * 7 + "|",
    ]  # fmt: skip
    for dtype, model, layout, found in rows:
        cells = ["failed"] * len(COLUMNS) if found is None else [str(found[name]) for name in COLUMNS]
        lines.append(f"| {dtype} | {model} | {layout} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
