"""Every bad input of tests/bad_inputs.py, against `plan` and `train`: the exit code, one report, no traceback, what was typed.

    python tools/bad_inputs.py [-k PATTERN] [-v]

Runs the commands in this process, up to where `train` would join the other ranks. Prints what was met badly and the count; ends with 1
where anything was. CI runs a part of it: tests/unit/test_bad_inputs.py.
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", metavar="PATTERN", help="only cases in whose name this is found")
    parser.add_argument("-v", action="store_true", help="print what was said in each case that was met badly")
    args = parser.parse_args()
    wanted = re.compile(args.k)
    cases = [case for case in bad_inputs.everything() if wanted.search(case.name)]
    began, bad = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        good = bad_inputs.write_good(Path(folder) / "good")
        for number, case in enumerate(cases):
            try:
                problems, output = bad_inputs.faults_of(case, Path(folder) / str(number), good)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                problems, output = [f"{type(error).__name__} came out of the program: {error}"], ""
            bad += bool(problems)
            for problem in problems:
                print(f"{case.name}: {problem}", flush=True)
            if problems and args.v:
                print(output, flush=True)
    print(f"{len(cases) - bad} of {len(cases)} bad inputs were met well ({time.monotonic() - began:.0f} s)")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
