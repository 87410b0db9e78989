"""Every loss type x importance level x KL mode x advantage estimator, on a real policy in several layouts, against one float64 reference.

    python tools/combinations.py [--layouts 1 TP2 PP2 DP2 CP2]

Each of about a thousand legal combinations has other settings (clip ranges, corrections, filters, entropy) drawn at random, and is cut into
micro-batches of 1, 2 or 4 completions or packed, in turn. Prints the worst loss and the worst gradient tensor of each layout; ends with 1
where one is off by more than 1e-6 or 1e-5. Takes some minutes on two cores. CI runs a part of it: tests/distributed/test_combinations.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks share the cores
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests import combinations as every  # noqa: E402
from tests import parity_cases as cases  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["1", "TP2", "PP2", "DP2", "CP2"], choices=cases.LAYOUTS, metavar="LAYOUT")
    args = parser.parse_args()
    chosen, is_good = every.whole_product(), True
    with tempfile.TemporaryDirectory() as name:
        made = every.material(Path(name))
        right = every.expect(made, chosen, Path(name))
        for layout in args.layouts:
            start, case = time.perf_counter(), cases.LAYOUTS[layout]
            found = run_ranks(every.measure, case.world_size, made, case.settings, chosen, right, timeout=3600)[-1]
            loss, gradient = max(found.loss.values()), max(found.gradient.values())
            print(f"{layout:<8} {len(found.loss)} combinations  loss {loss:.1e}  gradient {gradient[0]:.1e} ({gradient[1]})  "
                  f"{time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip
            for wrong in found.beyond():
                print(f"    {wrong}")
            is_good &= not found.beyond()
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
