"""`megatron-grpo train` with a scripted engine, as a program: what a launcher starts in the tests of launching.

LATE_RANK and LATE_SECONDS in the environment hold that rank up before it does anything.
"""

from __future__ import annotations

import os
import sys
import time

from tests.ranks import ENVIRONMENT


def main() -> int:
    if os.environ.get("LATE_RANK") == os.environ.get("RANK", "0"):
        time.sleep(float(os.environ["LATE_SECONDS"]))
    os.environ.update(ENVIRONMENT)  # before torch is imported
    from tests.end_to_end.scripted import train

    return train(0, 0, sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
