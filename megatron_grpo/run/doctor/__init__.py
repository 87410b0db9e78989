"""`megatron-grpo doctor`: what is installed, what each absence switches off, and whether it works here. No torch, no network, no settings.

What may crash (a broken library, a machine that refuses) is tried in processes of its own, so that it is told and not met.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from megatron_grpo.base.errors import EXIT_CRASH, EXIT_DONE, ConfigError
from megatron_grpo.run.doctor.check import Check
from megatron_grpo.run.doctor.machine import look_at_machine
from megatron_grpo.run.doctor.packages import look_at_packages
from megatron_grpo.run.doctor.trials import try_out

_SIGNS = {"ok": "ok", "absent": "-", "fails": "FAILS"}


def run_doctor(argv: list[str]) -> int:
    """Prints a table, or with --json one object; returns the exit code: 1 where something that a run needs fails."""
    if unknown := [word for word in argv if word != "--json"]:
        raise ConfigError(f"doctor takes --json and nothing else, not {unknown[0]}.")
    as_json, found = "--json" in argv, []
    for check in _checks():
        found.append(check)
        if not as_json:
            _tell(check)
    failed = [check for check in found if check.status == "fails"]
    if as_json:
        print(json.dumps({"passed": not failed, "checks": [asdict(check) for check in found]}, indent=1))
    elif failed:
        print(f"\n{len(failed)} of {len(found)} fail: {', '.join(check.name for check in failed)}.")
    else:
        print("\nAll that a run needs works.")
    return EXIT_CRASH if failed else EXIT_DONE


def _checks() -> Iterator[Check]:
    with tempfile.TemporaryDirectory(prefix="megatron_grpo_doctor_") as folder:
        known: dict[str, Check] = {}
        for part in (look_at_packages(), look_at_machine(), try_out(Path(folder), known)):
            yield from _remembered(part, known)


def _remembered(checks: Iterable[Check], known: dict[str, Check]) -> Iterator[Check]:
    for check in checks:
        known[check.name] = check
        yield check


def _tell(check: Check) -> None:
    width = max(60, min(140, shutil.get_terminal_size((120, 24)).columns))
    first = f"{_SIGNS[check.status]:<7}{check.name:<22}"
    print(textwrap.fill(check.found, width, initial_indent=first, subsequent_indent=" " * len(first)))
    if check.remedy:
        print(textwrap.fill(check.remedy, width, initial_indent=" " * len(first), subsequent_indent=" " * len(first)))
    sys.stdout.flush()
