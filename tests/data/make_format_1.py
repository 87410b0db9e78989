"""Made tests/data/format_1.tar.xz: checkpoints of format 1, as commit 5dcdde2 wrote them, and what that code trained next from each.

Run it in a checkout of that commit: `PYTHONPATH=. python .../make_format_1.py OUT.tar.xz`. Paths inside are relative to the archive.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.end_to_end import scripted
from tests.end_to_end.runs import records, write_inputs
from tests.ranks import run_ranks

SAVED, STEPS = 4, 6  # between the two passes over the second rollout: its 12 rows are pending
CASES = {"one_rank": 1, "two_ranks": 2}
KEPT = ("step", "loss", "grad_norm", "reward", "kl", "staleness/mean", "num_tokens", "learning_rate")


def flags(inputs: list[str], case: str, steps: int) -> list[str]:
    more = (
        "--num_generations 2 --global_batch_size 8 --micro_batch_size 2 --allow_unaligned_generation true --generation_batch_size 12 "
        "--num_iterations 2 --temperature 0.9 --lr 2e-3 --adam_eps 1e-5 --clip_grad 0.5 --weight_decay 0.1 --beta 0.1 "
        "--log_completions_steps 0 --export_hf false"
    )
    return [*inputs, *more.split(), *f"--tensor_model_parallel_size {CASES[case]} --max_steps {steps} --output_dir {case}".split()]


def main(archive: Path, out: Path) -> None:
    os.chdir(out)
    tiny = dict(layers=1, hidden=8, heads=2, kv_heads=2, head_dim=8, ffn=8)
    inputs = [word.replace("./", "") for word in write_inputs(Path("."), rows=10, **tiny)]
    Path("flags.json").write_text(json.dumps({case: flags(inputs, case, STEPS) for case in CASES}, indent=1) + "\n")
    expected = {}
    for case, ranks in CASES.items():
        assert run_ranks(scripted.train, ranks, flags(inputs, case, SAVED)) == [0] * ranks
        shutil.copytree(case, "kept")
        assert run_ranks(scripted.train, ranks, flags(inputs, case, STEPS)) == [0] * ranks
        steps = records(Path(case) / "metrics.jsonl")[SAVED:]
        expected[case] = [{name: step[name] for name in KEPT if name in step} for step in steps]
        shutil.rmtree(case)
        shutil.move("kept", case)
        for path in Path(case).iterdir():
            if path.name not in ("checkpoints", "config.yaml"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for path in sorted(out.iterdir()):
            tar.add(path, path.name)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        main(Path(sys.argv[1]).resolve(), Path(work))
