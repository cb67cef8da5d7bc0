"""Ends of groups that a callback has not been told of yet, and which owner reports them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice

from forebay.core.ledger import GroupEnd

__all__ = ["Outbox"]

log = logging.getLogger(__name__)

_MAX_ENDS = 100_000
"""Ends that are kept in memory while nobody reports them; older ones are dropped."""


class Outbox:
    """Noted ends by number. `bounded`: old ones are dropped when nobody reports them."""

    def __init__(self, *, bounded: bool) -> None:
        self.noting = False
        self.ends: dict[int, GroupEnd] = {}
        self.next_number = 1
        self._bounded = bounded
        self._reporters: dict[str, set[int]] = {}

    def note(self, end: GroupEnd) -> None:
        """Keep the end of a group until it is forgotten."""
        self.ends[self.next_number] = end
        self.next_number += 1
        if self._bounded and len(self.ends) > _MAX_ENDS:
            if not self.next_number % 1_000:
                log.warning("group_ends_dropped: more than %d wait for on_group_end, which is too slow", _MAX_ENDS)
            self.drop(next(iter(self.ends)))

    def drop(self, number: int) -> None:
        """Remove one end."""
        self.ends.pop(number, None)

    def retract(self, end: GroupEnd) -> None:
        """Remove the end of a group that came back."""
        for number in [number for number, noted in self.ends.items() if noted == end]:
            self.drop(number)

    def take(self, owner: str, limit: int) -> list[tuple[int, GroupEnd]]:
        """Up to `limit` ends that no other owner reports, oldest first."""
        taken = {number for other, numbers in self._reporters.items() if other != owner for number in numbers}
        free = ((number, end) for number, end in self.ends.items() if number not in taken)
        found = list(islice(free, limit))
        if found:
            self._reporters.setdefault(owner, set()).update(number for number, _ in found)
        return found

    def forget(self, numbers: Sequence[int]) -> None:
        """Remove ends that were reported."""
        for number in numbers:
            self.drop(number)
        for held in self._reporters.values():
            held.difference_update(numbers)

    def release(self, owner: str) -> None:
        """Let other owners report the ends of this one."""
        self._reporters.pop(owner, None)
