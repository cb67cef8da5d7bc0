"""What checks and offline tools report: findings, progress, and lists, dates and sizes as people read them.

Every package may use this; only `forebay.cli` prints it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TypeAlias

import msgspec


class Level(enum.StrEnum):
    """How serious a finding is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True):
    """The result of one check, in one sentence, and what to do about it."""

    name: str
    level: Level
    message: str
    advice: str | None = None


Progress: TypeAlias = Callable[[int, int], None]
"""Called with the amount that is done and the total."""


class Steps:
    """Adds up finished steps and reports them to a `Progress`, at most a thousand times."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total = progress, total
        self._done = self._reported = 0

    def more(self, count: int = 1) -> None:
        self._done += count
        # Drawing a progress bar costs more than many a step.
        enough = (self._done - self._reported) * 1000 >= self._total or self._done == self._total
        if self._progress is not None and self._total and enough:
            self._reported = self._done
            self._progress(self._done, self._total)

    def counted(self) -> Progress:
        """A `Progress` for one part of the work: the steps that it reports as done are added here."""
        start = self._done

        def update(done: int, total: int) -> None:
            self.more(start + done - self._done)

        return update


def first_of(items: Sequence[object], most: int = 10) -> str:
    """The first of many items, and the number of the others.

    >>> first_of([1, 2, 3]), first_of(range(20), 3)
    ('1, 2, 3', '0, 1, 2 and 17 more')
    """
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def date_text(seconds: float) -> str:
    """A Unix time as people read it, in UTC.

    >>> date_text(1_700_000_000), date_text(1e30)
    ('2023-11-14 22:13:20+00:00', 'an invalid date')
    """
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return "an invalid date"


def size_text(size: int) -> str:
    """A number of bytes as people read it.

    >>> size_text(999), size_text(104_200_000), size_text(2_000_000_000_000_000)
    ('999 bytes', '104.2 MB', '2,000.0 TB')
    """
    if size < 1000:
        return f"{size} bytes"
    number, unit = size / 1000, "kB"
    for larger in ("MB", "GB", "TB"):
        if number < 1000:
            break
        number, unit = number / 1000, larger
    return f"{number:,.1f} {unit}"
