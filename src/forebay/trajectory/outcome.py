"""What merging, splitting and importing tell: what was done, and how far they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

__all__ = ["DEFAULT_SEED", "Outcome", "Progress", "Steps"]

Progress: TypeAlias = Callable[[int, int], None]
"""Called with how much is done, and of how much."""

DEFAULT_SEED = 1234
"""Of what has none; that of a TrajectoryReplayBuffer."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What was done; what would be, if `done` is False."""

    target: str
    sources: list[str]
    done: bool
    trajectories: int
    transitions: int
    bytes: int
    parts: dict[str, int] = {}
    """Trajectories by part."""
    rewritten: int = 0
    """Trajectories whose rows were made anew, because fields were filled or dropped."""
    left_out: int = 0
    """Trajectories that are damaged."""
    removed: list[str] = []
    """Directories that are no longer there."""
    remaining: int | None = None
    """Trajectories that stay in the source of a split."""


class Steps:
    """Adds up what is done for a `Progress`."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total = progress, total
        self._done = self._told = 0

    def more(self, count: int = 1) -> None:
        self._done += count
        # A thousand times at most: to show it costs more than many a step.
        enough = (self._done - self._told) * 1000 >= self._total or self._done == self._total
        if self._progress is not None and self._total and enough:
            self._told = self._done
            self._progress(self._done, self._total)

    def counted(self) -> Progress:
        """For who says how much is done of a part."""
        start = self._done

        def update(done: int, total: int) -> None:
            self.more(start + done - self._done)

        return update
