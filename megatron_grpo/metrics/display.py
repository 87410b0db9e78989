"""What a person at the terminal sees: one live line (or, in a file, a line every so often), warnings above it, a table at the end."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SECONDS_BETWEEN_LINES = 10.0


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        """Whoever read this has gone (`train | head`). The run goes on; rich would end it."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Display:
    """The progress of one run on one console. On a terminal one line that is redrawn; elsewhere plain lines, now and then."""

    def __init__(self, console: Console | None = None):
        self.console = console or _Terminal(highlight=False)
        self._live: Live | None = None
        self._handler: logging.Handler | None = None
        self._last_line = float("-inf")
        self._began: tuple[int, float] | None = None
        self._shown: dict[str, float] = {}
        self._drawn: tuple[int, int | None, float] | None = None

    def start(self, step: int) -> None:
        """step: optimizer steps done before."""
        self._began = (step, time.monotonic())
        self._handler = _Above(self.console)
        logging.getLogger("megatron_grpo").addHandler(self._handler)
        if self.console.is_terminal:
            # No refreshing thread: reward functions fork, and a fork while another thread holds the console's lock can hang.
            self._live = Live(Text("waiting for the first optimizer step"), console=self.console, auto_refresh=False)
            self._live.start(refresh=True)

    def show(self, **values: float) -> None:
        """Values that the line shows, by name, from its next drawing on until they are replaced."""
        self._shown |= values
        if self._drawn and self._live:
            self._draw(*self._drawn)

    def step(self, step: int, total: int | None, *, seconds: float) -> None:
        """Draws the line after an optimizer step that took so many seconds."""
        self._drawn = (step, total, seconds)
        self._draw(step, total, seconds)

    def _draw(self, step: int, total: int | None, seconds: float) -> None:
        parts = [*(f"{name} {_number(value)}" for name, value in self._shown.items()), f"{_number(seconds)} s/step"]
        left = self._seconds_left(step, total)
        if left is not None:
            parts.append(f"{_duration(left)} left")
        if self._live:
            line = Table.grid(padding=(0, 2))
            bar = [ProgressBar(total=total, completed=step, width=24)] if total else []
            line.add_row(Text(f"step {step}{f'/{total}' if total else ''}", style="bold"), *bar, Text("  ".join(parts)))
            self._live.update(line, refresh=True)
            return
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES or step == total:
            self._last_line = now
            self.say(f"step {step}{f'/{total}' if total else ''}  {'  '.join(parts)}")

    def say(self, text: str) -> None:
        """A line that stays, above the live one."""
        self.console.print(escape(text), soft_wrap=True, highlight=False)

    def stop(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None
        if self._handler:
            logging.getLogger("megatron_grpo").removeHandler(self._handler)
            self._handler = None

    def compare(self, title: str, heads: tuple[str, str], rows: Sequence[tuple[str, float, float]]) -> None:
        """The before/after table. rows: (name, before, after)."""
        table = Table(title=title, title_justify="left", title_style="bold")
        table.add_column("")
        for head in (*heads, "change"):
            table.add_column(head, justify="right")
        for name, before, after in rows:
            table.add_row(name, _number(before), _number(after), f"{after - before:+.4g}")
        self.console.print(table)

    def _seconds_left(self, step: int, total: int | None) -> float | None:
        if not total or not self._began or step <= self._began[0]:
            return None
        return (time.monotonic() - self._began[1]) / (step - self._began[0]) * (total - step)


class _Above(logging.Handler):
    """Log records of this program as lines above the live one."""

    def __init__(self, console: Console):
        super().__init__(logging.INFO)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        text = escape(record.getMessage())
        if record.levelno >= logging.WARNING:
            text = f"[yellow]{record.levelname.lower()}:[/yellow] {text}"
        self.console.print(text, soft_wrap=True, highlight=False)


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _duration(seconds: float) -> str:
    """9 s, 4:05, 2:07:30"""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
