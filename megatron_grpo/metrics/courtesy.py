"""What a run does for those who watch it, and can do without: a failure is said, and the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_grpo.base.errors import said_by

logger = logging.getLogger(__name__)


class Courtesy:
    """`with courtesy("plots"): ...` never raises. The first failure of each kind is a warning; `missed` counts them all."""

    def __init__(self) -> None:
        self.missed: dict[str, int] = {}

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # noqa: BLE001 - drawing libraries and services raise anything; rich exits on a closed pipe
            self.missed[what] = self.missed.get(what, 0) + 1
            if self.missed[what] == 1:
                self._say(f"{what} failed, and the run goes on without it: {type(error).__name__}: {said_by(error)}")

    def summary(self) -> None:
        """At the end: how often each of them failed, where it was more than the once that was said."""
        for what, times in self.missed.items():
            if times > 1:
                self._say(f"{what} failed {times} times")

    def _say(self, text: str) -> None:
        try:
            logger.warning(text)
        except (Exception, SystemExit):  # noqa: BLE001 - the terminal is what failed
            pass
