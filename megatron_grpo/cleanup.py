"""What must run however a block ends, without hiding why it ended."""

from __future__ import annotations

from collections.abc import Callable


class CleanUp:
    """`with CleanUp() as clean_up: ... clean_up.add(close)`: runs what was added, last first, however the block ends.

    All of it runs. The first error is the one that is raised; errors of the clean-up after another error are noted on that one.
    """

    def __init__(self, *steps: Callable[[], object]):
        self._steps = list(steps)

    def add(self, step: Callable[[], object]) -> None:
        self._steps.append(step)

    def __enter__(self) -> CleanUp:
        return self

    def __exit__(self, kind: object, first: BaseException | None, trace: object) -> None:
        came_in = first
        for step in reversed(self._steps):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - whatever closing raises, the other steps must run and the first error must stay
                if first is None:
                    first = error
                else:
                    first.add_note(f"Cleaning up after this failed too: {type(error).__name__}: {error}")
        if first is not None and came_in is None:
            raise first
