"""`megatron-grpo` under torchrun or Slurm with scripted completions, without vLLM, and as slow as a test requests.

PACE in the environment names a directory. While it has a file `sampling`, completions of the weight version in that file, and of newer
ones, wait.
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
