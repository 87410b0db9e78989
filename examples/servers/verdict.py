"""Check that the run reached the quickstart's accuracy, and that its three servers received the weights that they should.

    python examples/servers/verdict.py output/servers output/servers_logs

Exit with code 0 if it passes; else print the problems and exit with code 1.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))
from verdict import find_problems

WEIGHTS_RECEIVED = re.compile(r"weights: received version (\d+) in")


def read_received_versions(log: Path) -> list[int]:
    """Return the weight versions that a server received, in the order of its log."""
    return [int(version) for version in WEIGHTS_RECEIVED.findall(log.read_text(encoding="utf-8"))] if log.exists() else []


def main() -> int:
    """Print the problems and the verdict of a run and the logs of its servers."""
    run, logs = Path(sys.argv[1]), Path(sys.argv[2])
    problems, summary = find_problems(run)
    one, two, three = (read_received_versions(logs / f"{name}.log") for name in ("one", "two", "three"))
    if not one or not two or one[-1] >= two[-1]:
        problems.append("server one did not stop receiving weights before server two")
    if not three or three[-1] != two[-1]:
        problems.append("server three did not receive the last weights that server two received")
    if any(versions != sorted(versions) for versions in (one, two, three)):  # repeated if another server was lost during a sync
        problems.append("a server received an older version after a newer one")
    for problem in problems:
        print(f"[verdict] {problem}")
    given = f"weight syncs of the servers: {len(one)}, {len(two)} and {len(three)}"
    print(f"VERDICT: {'FAILED' if problems else 'PASSED'}: {summary}; {given} (see {run})")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
