"""Progress of producing: a bar on a terminal, one line of the log now and then elsewhere.

A `Progress` is told how far each task is whenever that changes. The default one draws on standard error if that is a
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
    """Is told how far the tasks are. Called often, from the event loop: it must be quick."""

    def update(self, task_name: str, available: int, target: int, in_flight: int, figures: Figures) -> None:
        """Groups available towards a cumulative target, groups in flight, and what was counted so far."""


class NoProgress:
    """Says nothing."""

    def update(self, task_name: str, available: int, target: int, in_flight: int, figures: Figures) -> None:
        pass


class TerminalProgress:
    """One line for all tasks, redrawn in place; where there is no terminal, a line of the log now and then."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._next_s: dict[str | None, float] = {}  # by task in the log; None: the line on the terminal
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
        with suppress(OSError, ValueError):  # it was closed, or cannot show a name; neither ends a run
            stream.write("\r" + line.ljust(self._width))
            stream.flush()
        self._width = len(line)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()  # a process without a console has none
    except ValueError:  # it was closed
        return False


def bar(done: int, total: int, width: int = 16) -> str:
    """A bar of text.

    >>> bar(3, 4, width=8)
    '[######..] 3/4'
    """
    filled = width if total <= 0 else width * min(done, total) // total
    return f"[{'#' * filled}{'.' * (width - filled)}] {done}/{total}"


@cache
def default_progress() -> TerminalProgress:
    """The one that all strategies of a process share, so that they draw one line."""
    return TerminalProgress()
