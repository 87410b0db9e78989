"""Terminal output of a run: two live status lines (or periodic lines in a file), warnings above it, and a table at the end."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_grpo.core.base import activity
from megatron_grpo.core.base.files import atomic_write_text
from megatron_grpo.run.metrics.records import BestEffort

SECONDS_BETWEEN_LINES = 10.0  # between step lines, if the output is no terminal
SECONDS_BETWEEN_SIGNS = 30.0  # between lines about a long phase, there
SECONDS_BETWEEN_DRAWINGS = 0.5
NOW = "now.json"  # in output_dir while a run runs: its step, phase and speed, written every second
RECENT_STEPS = 20  # from which the remaining time is estimated: completions may grow longer during a run


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        """Discard further output if the reader has closed the pipe (`train | head`). The run continues; rich would end it."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Display:
    """Progress display of one run on one console.

    On a terminal it is two lines that are redrawn, the run and its phase; elsewhere plain lines at intervals. A thread draws them from
    `activity`, because a phase may be long and occupies the main thread.
    """

    def __init__(self, console: Console | None = None, *, total: int | None = None, folder: Path | None = None):
        """Create a display.

        Args:
            console: Console to print to. Default: standard output.
            folder: Folder of now.json, which other programs read; None for none.
        """
        self.console, self.total = console or _Terminal(highlight=False), total
        self._now = folder / NOW if folder else None
        self._wrote_now = float("-inf")
        self._best_effort = BestEffort()
        self._live: Live | None = None
        self._handler: logging.Handler | None = None
        # Reward functions fork. A fork while drawing would leave locks in the child that are never released, so forks wait for it.
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._last_line, self._last_step = time.monotonic(), float("-inf")  # times of the last line and of the last step line
        self._marks: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS + 1)  # (step, its end) of recent steps, and of the start
        self._shown: dict[str, float] = {}
        self._step = 0
        self._seconds: float | None = None  # of the last optimizer step

    def open(self) -> None:
        """Start displaying phases. Does nothing the second time."""
        if self._handler is not None:
            return
        self._handler = _LogAboveLine(self.console)
        logging.getLogger("megatron_grpo").addHandler(self._handler)
        if self.console.is_terminal and self.console.file.isatty():  # with FORCE_COLOR, rich takes a file for a terminal
            self._live = Live(self._line(), console=self.console, auto_refresh=False)
            self._live.start(refresh=True)
        os.register_at_fork(before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._lock.release)
        threading.Thread(target=self._print_progress, name="display", daemon=True).start()

    def start(self, step: int) -> None:
        """Start the training loop.

        Args:
            step: Optimizer steps done before.
        """
        self.open()
        self._step = step
        self._marks.append((step, time.monotonic()))

    def show(self, **values: float) -> None:
        """Set values that the line shows, by name, until they are replaced."""
        self._shown |= values
        self._draw()

    def step(self, step: int, *, seconds: float) -> None:
        """Show that an optimizer step took `seconds`."""
        self._step, self._seconds, time_now = step, seconds, time.monotonic()
        self._marks.append((step, time_now))
        self._draw()
        if self._live is None and (time_now - self._last_step >= SECONDS_BETWEEN_LINES or step == self.total):
            self._last_step = time_now
            self.print_line(f"{self._number_of_step(step)}  {'  '.join(self._parts(step))}")

    def _print_progress(self) -> None:
        while not self._closed.wait(SECONDS_BETWEEN_DRAWINGS):
            with self._lock:
                self._draw()
                self._write_now()
                if self._live is None and time.monotonic() - self._last_line >= SECONDS_BETWEEN_SIGNS and activity.current():
                    self.print_line(f"{self._number_of_step(self._step)}  {describe_phase()}" if self._marks else describe_phase())

    def _write_now(self) -> None:
        if self._now is not None and not self._closed.is_set() and time.monotonic() - self._wrote_now >= 1.0:
            self._wrote_now = time.monotonic()
            with self._best_effort(NOW), suppress(FileNotFoundError):  # the folder was removed: what needs it reports that
                sign = {"time": time.time(), "step": self._step, "phase": describe_phase(), "speed": "  ".join(self._speed(self._step))}
                atomic_write_text(self._now, json.dumps(sign) + "\n")

    def _draw(self) -> None:
        with self._lock:
            if self._live and not self._closed.is_set():
                self._live.update(self._line(), refresh=True)

    def _line(self) -> Group:
        lines, phases = [], activity.current()
        if self._marks:
            # The most important values are first, because a narrow terminal cuts the end.
            values = sorted(self._shown.items(), key=lambda item: item[0] != "reward")
            texts = [*self._speed(self._step), *(f"{name} {_number(value)}" for name, value in values)]
            lines.append(progress_row(Text(self._number_of_step(self._step), style="bold"), self._step, self.total, "  ".join(texts)))
        lines.append(progress_row(Text(""), phases[-1].done if phases else 0, phases[-1].total if phases else None, describe_phase()))
        return Group(*lines)

    def _number_of_step(self, step: int) -> str:
        return f"step {step}{f'/{self.total}' if self.total else ''}"

    def _parts(self, step: int) -> list[str]:
        return [*(f"{name} {_number(value)}" for name, value in self._shown.items()), *self._speed(step)]

    def _speed(self, step: int) -> list[str]:
        seconds_left = self._seconds_left(step)
        speed = [f"{_number(self._seconds)} s/step"] if self._seconds is not None else []
        return [*speed, *([f"{describe_duration(seconds_left)} left"] if seconds_left is not None else [])]

    def print_line(self, text: str) -> None:
        """Print a permanent line above the live one."""
        with self._lock:
            self._last_line = time.monotonic()
            self.console.print(escape(text), soft_wrap=True, highlight=False)

    def stop(self) -> None:
        """Stop drawing. Warnings are still printed."""
        with self._lock:
            self._closed.set()
            if self._now is not None:
                with self._best_effort(NOW):
                    self._now.unlink(missing_ok=True)
            if self._live:
                self._live.stop()
                self._live = None

    def close(self) -> None:
        """Stop drawing and restore logging."""
        self.stop()
        if self._handler:
            logging.getLogger("megatron_grpo").removeHandler(self._handler)
            self._handler = None

    def table(self, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table.

        Args:
            heads: Headings of the columns after the first.
        """
        self.console.print(title, style="bold", markup=False)  # a title of the table would be broken at the table's width
        table = Table()
        table.add_column("")
        for head in heads:
            table.add_column(head, justify="right")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def compare(self, title: str, heads: tuple[str, str], rows: Sequence[tuple[str, float, float]]) -> None:
        """Print a before/after table.

        Args:
            rows: (name, before, after).
        """
        texts = [(name, _number(first), _number(last), f"{last - first:+.4g}") for name, first, last in rows]
        self.table(title, (*heads, "change"), texts)

    def _seconds_left(self, step: int) -> float | None:
        if not self.total or len(self._marks) < 2 or step >= self.total:
            return None
        (first, begin), (last, end) = self._marks[0], self._marks[-1]
        per_step = (end - begin) / max(1, last - first)
        return per_step * (self.total - step) - min(per_step, time.monotonic() - end)


def progress_row(head: Text, completed: int, total: int | None, text: str) -> Table:
    """Return a line of a display: its beginning, a bar, and text that a narrow terminal cuts.

    Args:
        head: Beginning of the line; may be empty.
        total: Amount to do; None leaves the bar out.
    """
    row = Table.grid(padding=(0, 1))
    bar = [ProgressBar(total=total, completed=completed, width=12)] if total else []
    row.add_row(*([head] if head.plain else []), *bar, Text(text, no_wrap=True, overflow="ellipsis"))
    return row


def describe_phase() -> str:
    """Return the current phase with its time: `sampling 312 of 1,024 completions, 0:41 left` or `starting vLLM, 0:20`.

    The remaining time is estimated if the phase counts something. Empty without a phase.
    """
    phases = activity.current()
    if not phases:
        return ""
    phase, seconds = phases[-1], time.monotonic() - phases[-1].began
    text = activity.describe((phases[0], phase) if phases[0].name == activity.WORDS["eval"] else (phase,))
    if phase.total and 0 < phase.done < phase.total:
        return f"{text}, {describe_duration(seconds / phase.done * (phase.total - phase.done))} left"
    return f"{text}, {describe_duration(seconds)}" if seconds >= 1.0 else text


class _LogAboveLine(logging.Handler):
    """Handler that prints this program's log records above the live line."""

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


def describe_duration(seconds: float) -> str:
    """Format seconds: 9 s, 4:05, 2:07:30."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, seconds_over = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_over:02d}" if hours else f"{minutes}:{seconds_over:02d}"
