"""Run `plan` and `train` on each bad input of tests/bad_inputs.py and check the exit code and the error report.

    python tools/bad_inputs.py [-k PATTERN] [-v]

The commands run in this process, up to the point where `train` would join the other ranks. The tool prints each problem and the number of
inputs that were reported correctly; the exit code is 1 if there is any problem. CI runs a part of the inputs:
tests/unit/test_bad_inputs.py.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests import bad_inputs


def main() -> int:
    """Run the selected inputs, print the problems and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", metavar="PATTERN", help="regular expression; only inputs whose name matches")
    parser.add_argument("-v", action="store_true", help="print the output of each input with a problem")
    args = parser.parse_args()
    wanted = re.compile(args.k)
    cases = [case for case in bad_inputs.make_all_cases() if wanted.search(case.name)]
    began, bad = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        good = bad_inputs.write_good(Path(folder) / "good")
        for number, case in enumerate(cases):
            try:
                problems, output = bad_inputs.find_problems(case, Path(folder) / str(number), good)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                problems, output = [f"{type(error).__name__} was not caught: {error}"], ""
            bad += bool(problems)
            for problem in problems:
                print(f"{case.name}: {problem}", flush=True)
            if problems and args.v:
                print(output, flush=True)
    print(f"{len(cases) - bad} of {len(cases)} bad inputs were reported correctly ({time.monotonic() - began:.0f} s)")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
