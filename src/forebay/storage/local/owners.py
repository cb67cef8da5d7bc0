"""The owners of a local storage: their deadlines, and the ends of groups that each of them reports.

Both are state of this process; the engine decides what follows from a missed deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import islice

from forebay.core.ledger import GroupEnd

log = logging.getLogger(__name__)

_MAX_ENDS = 100_000
"""Ends that are kept in memory while no owner reports them; older ones are dropped."""


class Owners:
    """Which owners have a storage open, and until when."""

    def __init__(self, clock: Callable[[], float]) -> None:
        # Setting the wall clock must not end leases; a clock that a test gives serves for both.
        self._clock = time.monotonic if clock is time.time else clock
        self.open: set[str] = set()
        self.closed: set[str] = set()
        self.deadlines: dict[str, tuple[float, float]] = {}  # owner: (lease_s, deadline)

    def enter(self, owner: str, lease_s: float | None) -> None:
        """Register an owner."""
        self.open.add(owner)
        self.closed.discard(owner)
        self.deadlines.pop(owner, None)
        if lease_s is not None:
            self.expect(owner, lease_s)

    def leave(self, owner: str) -> None:
        """Forget an owner that was closed."""
        self.closed.add(owner)
        self.open.discard(owner)
        self.deadlines.pop(owner, None)

    def expect(self, owner: str, lease_s: float) -> None:
        """Set the deadline of the owner's next heartbeat."""
        self.deadlines[owner] = (lease_s, self._clock() + lease_s)

    def beat(self, owner: str) -> None:
        """Renew the deadline of an owner."""
        if (known := self.deadlines.get(owner)) is not None:
            self.expect(owner, known[0])

    def living(self) -> list[str]:
        """The owners that have it open, without those whose deadline has passed."""
        late, _ = self.late()
        return sorted(self.open.difference(late))

    def late(self) -> tuple[list[str], float | None]:
        """The owners whose deadline has passed, and the seconds until the next deadline of another one."""
        now = self._clock()
        left = {owner: deadline - now for owner, (_, deadline) in list(self.deadlines.items())}
        pending = [seconds for seconds in left.values() if seconds > 0]
        return [owner for owner, seconds in left.items() if seconds <= 0], min(pending, default=None)


class Outbox:
    """Ends of groups that were not reported to a callback yet, by number. `bounded`: old ones are dropped."""

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
