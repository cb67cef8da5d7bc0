"""The progress of producing: a bar on a terminal, otherwise a log line from time to time.

A `Progress` is called whenever the progress of a task changes. The default draws on standard error if that is a
terminal, and logs every ten seconds otherwise; `NoProgress` does neither.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from functools import cache
from typing import Protocol, TextIO

from forebay.produce.stats import Figures

__all__ = ["NoProgress", "Progress", "TerminalProgress", "bar", "default_progress"]

log = logging.getLogger(__name__)

_DRAW_INTERVAL_S = 0.1
_LOG_INTERVAL_S = 10.0


class Progress(Protocol):
    """Receives the progress of tasks. Called often, on the event loop: it must be quick."""

    def update(self, task_name: str, available: int, target: int, in_flight: int, figures: Figures) -> None:
        """Groups available toward a cumulative target, groups in flight, and the counts so far."""


class NoProgress:
    """Shows nothing."""

    def update(self, task_name: str, available: int, target: int, in_flight: int, figures: Figures) -> None:
        pass


class TerminalProgress:
    """One line for all tasks, redrawn in place; without a terminal, a log line every ten seconds."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._next_s: dict[str | None, float] = {}  # by task for the log; None: the line on the terminal
        self._lines: dict[str, str] = {}
        self._width = 0

    def update(self, task_name: str, available: int, target: int, in_flight: int, figures: Figures) -> None:
        stream = sys.stderr if self._stream is None else self._stream
        terminal = _is_terminal(stream)
        now, key = time.monotonic(), None if terminal else task_name
        due = now >= self._next_s.get(key, 0.0)
        if not due and not (terminal and available >= target):
            return
        counts = (
            f"{figures.completed} done, {in_flight} in flight, {figures.filtered} filtered, {figures.failed} failed"
        )
        self._next_s[key] = now + (_DRAW_INTERVAL_S if terminal else _LOG_INTERVAL_S)
        if not terminal:
            log.info("produce_progress task=%s available=%d target=%d %s", task_name, available, target, counts)
            return
        missing = max(0, target - available)
        self._lines[task_name] = f"{task_name} {bar(target - missing, target)} {counts}"
        line = "  ".join(self._lines.values())
        with suppress(OSError, ValueError):  # the stream is closed, or cannot encode a name; neither ends a run
            stream.write("\r" + line.ljust(self._width))
            stream.flush()
        self._width = len(line)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()  # None in a process without a console
    except ValueError:  # closed
        return False


def bar(done: int, total: int, width: int = 16) -> str:
    """A progress bar as a string.

    >>> bar(3, 4, width=8)
    '[######..] 3/4'
    """
    filled = width if total <= 0 else width * min(done, total) // total
    return f"[{'#' * filled}{'.' * (width - filled)}] {done}/{total}"


@cache
def default_progress() -> TerminalProgress:
    """The instance that all strategies of a process share, so that they draw one line."""
    return TerminalProgress()
