"""torchrun --max-restarts starts a job again however it ended. Where that mends nothing, the new attempt ends at once, without imports."""

from __future__ import annotations

from contextlib import suppress

from megatron_grpo.base import launcher
from megatron_grpo.base.errors import EXIT_CONFIG, EXIT_INTERRUPTED

_WHY = {
    EXIT_CONFIG: "what was refused is refused again with the same number of processes",
    EXIT_INTERRUPTED: "the run was asked to stop, and is saved: the same command continues it",
}


def note_end(code: int) -> None:
    """For further attempts on this machine: this one ended with `code`, and another would too. It holds for as many ranks as now if it
    is about settings."""
    launched = launcher.read()
    if launched.ended is not None:
        with suppress(OSError), launched.ended.open("a") as stream:  # else the attempts take longer
            stream.write(f"{code} {launched.world_size}\n")


def ended_before() -> tuple[int, str] | None:
    """(exit code, why it is that one) where this attempt is to end at once."""
    launched = launcher.read()
    try:
        lines = [line.split() for line in launched.ended.read_text().splitlines()] if launched.ended is not None else []
    except OSError:
        return None
    for code, world_size in lines:
        if int(code) == EXIT_INTERRUPTED or int(world_size) == launched.world_size:
            return int(code), f"torchrun started the job again, and this attempt ends at once: {_WHY[int(code)]}."
    return None
