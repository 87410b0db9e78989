"""Made tests/data/format_2.tar.xz: checkpoints of format 2, as commit 6137351 wrote them, and what that code trained next from each.

Run it in a checkout of that commit, with tests/data/make_format_1.py beside it: `PYTHONPATH=. python .../make_format_2.py OUT.tar.xz`.
One rank, and two that share the optimizer, whose random generators have a file each.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.data import make_format_1 as maker

maker.CASES = {"one_rank": 1, "two_ranks": 2}
flags_of_format_1 = maker.flags


def flags(inputs: list[str], case: str, steps: int) -> list[str]:
    """As for format 1, but two ranks are data-parallel."""
    found = flags_of_format_1(inputs, case, steps)
    found[found.index("--tensor_model_parallel_size") + 1] = "1"
    return found


maker.flags = flags

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        maker.main(Path(sys.argv[1]).resolve(), Path(work))
