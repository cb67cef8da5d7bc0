"""Pins: a reader holds what it saw, and what was let go meanwhile waits for it.

Rows are not counted one by one. A reader pins the present generation; what is let go gets the number of the generation
in which it could still be seen, and is let go for good when no pin is that old. All of it is done under the lock of
who owns the rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

__all__ = ["Pins"]


class Pins:
    """Generations of readers, and what waits for the old ones."""

    def __init__(self) -> None:
        self._generation = 0
        self._readers: dict[int, int] = {}
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def pin(self) -> int:
        generation = self._generation
        self._readers[generation] = self._readers.get(generation, 0) + 1
        return generation

    def unpin(self, generation: int) -> None:
        left = self._readers[generation] - 1
        if left:
            self._readers[generation] = left
            return
        del self._readers[generation]
        oldest = min(self._readers, default=self._generation + 1)
        while self._waiting and self._waiting[0][0] < oldest:
            self._waiting.popleft()[1]()

    def let_go(self, action: Callable[[], None]) -> None:
        """Do this when nobody who could see it is left: now, if nobody reads."""
        if not self._readers:
            action()
            return
        self._waiting.append((self._generation, action))
        self._generation += 1

    @property
    def waiting(self) -> int:
        return len(self._waiting)
