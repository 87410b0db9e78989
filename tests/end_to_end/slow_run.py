"""`megatron-grpo`, as torchrun or Slurm starts it, with answers from a table: no vLLM, and as slow as a test asks.

PACE in the environment is a folder. Where it holds a file `sampling`, answers by the weights whose version stands in it, and by newer ones,
wait until that changes.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from megatron_grpo import cli


def engine(cfg, inputs, parallel):
    from tests.end_to_end.scripted import read_answers
    from tests.scripted_engine import ScriptedEngine

    answer, pace = read_answers(cfg, inputs.model_path), Path(os.environ.get("PACE", "/nonexistent"))

    def waits(version):
        try:
            return version >= int((pace / "sampling").read_text())
        except (OSError, ValueError):  # none, or just being written
            return False

    def slowly(prompt, place, version):
        while waits(version) and not made.should_cancel():
            (pace / f"waits.{parallel.rank}").touch()
            time.sleep(0.02)
        return answer(prompt, place, version)

    made = ScriptedEngine(slowly)
    return made


if __name__ == "__main__":
    from tests.end_to_end.runs import without_plots

    without_plots()
    sys.exit(cli.main(engine=engine))
