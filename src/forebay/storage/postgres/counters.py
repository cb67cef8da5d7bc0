"""What one transaction changes in the counts of tasks.

The counts of a task are columns of the table `counters` and change in the transaction that changes the rows, so any
one statement that reads them sees a closed ledger (G1). Here they are only added up; `step` writes them.
"""

from __future__ import annotations

from collections import Counter

from forebay.core.ledger import Account, End, Place, Record
from forebay.core.rollout import Status

__all__ = ["BUFFERED", "COUNTERS", "Counters"]

BUFFERED = {status: f"buffered_{status}" for status in Status}
"""The columns that count buffered groups."""

COUNTERS = (
    "issued",
    "issued_tokens",
    "reset_tokens",
    "in_flight",
    "leased",
    *BUFFERED.values(),
    "in_flight_tokens",
    "buffered_tokens",
    "leased_tokens",
    "bytes",
    "reserved",
    *(str(end) for end in End),
    *(f"{end}_tokens" for end in End),
)
"""The counters of a task. `bytes` and `reserved` are those of the groups in flight, buffered and leased."""


class Counters:
    """The changes of one transaction. `buffered`: by how many groups the buffer grew."""

    def __init__(self) -> None:
        self._changes: dict[str, Counter[str]] = {}
        self._ends: dict[str, Account] = {}
        self.sizes: Counter[tuple[str, int]] = Counter()  # responses that came back, by task and rounded size
        self.buffered = 0

    def add(self, task_name: str, column: str, n: int) -> None:
        """Add to one counter."""
        self._changes.setdefault(task_name, Counter())[column] += n

    def enter(self, record: Record, sign: int = 1) -> None:
        """Count a row at its place (sign -1: no longer). Archived groups are outside every count but their end."""
        task_name, place = record.task_name, record.place
        if place is Place.ARCHIVED:
            return
        if place is Place.BUFFERED:
            self.buffered += sign
        changes = self._changes.setdefault(task_name, Counter())
        changes[BUFFERED[record.status] if place is Place.BUFFERED else str(place)] += sign
        changes[f"{place}_tokens"] += sign * record.tokens
        changes["bytes"] += sign * record.bytes
        changes["reserved"] += sign * record.reserve

    def leave(self, record: Record) -> None:
        """Count a row no longer at its place."""
        self.enter(record, -1)

    def end(self, task_name: str, end: End, tokens: int, reason: str | None, groups: int = 1) -> None:
        """Book groups out, by the rules of `Account.end`."""
        self._ends.setdefault(task_name, Account()).end(end, tokens, reason, groups=groups)

    def restore(self, task_name: str, account: Account) -> None:
        """Add everything that an account has counted."""
        for column in ("issued", "issued_tokens", "reset_tokens"):
            self.add(task_name, column, getattr(account, column))
        self._ends[task_name] = account
        for size, groups in account.sizes.items():
            self.sizes[task_name, size] += groups

    def changes(self) -> dict[str, list[int]]:
        """The changes of each task in the order of COUNTERS; tasks in one order, so that no two writers deadlock."""
        changes: dict[str, list[int]] = {}
        for task_name in sorted(self._changes.keys() | self._ends.keys()):
            counted = Counter(self._changes.get(task_name, {}))
            ends = self._ends.get(task_name) or Account()
            for end, groups in ends.ended.items():
                counted[str(end)] += groups
                counted[f"{end}_tokens"] += ends.ended_tokens.get(end, 0)
            changes[task_name] = [counted[column] for column in COUNTERS]
        return changes

    def reasons(self) -> list[tuple[str, str, int]]:
        """Task, reason and groups of what ended, in order."""
        return [
            (task_name, reason, groups)
            for task_name, ends in sorted(self._ends.items())
            for reason, groups in sorted(ends.reasons.items())
        ]
