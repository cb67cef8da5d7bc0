"""What changed in memory and is not on disk yet.

The table of a SQLite store is the one of MemoryStorage without payloads: it notes every row that changes, and the
storage hands the notes to the writer, which makes them last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from forebay.core.policy import Order
from forebay.core.record import Record, Row
from forebay.core.rollout import Group
from forebay.storage.local.memory import MemoryTable

__all__ = ["Journal", "JournalTable", "State", "payload_of"]

ON_DISK: Group = ()


class Journal:
    """What changed in memory since it was last handed to the writer."""

    def __init__(self) -> None:
        self.records: dict[int, Record | None] = {}  # None: removed
        self.frames: dict[int, bytes] = {}
        self.summaries: dict[int, str] = {}
        self.ends: dict[int, bytes | None] = {}  # None: removed

    def __bool__(self) -> bool:
        return bool(self.records) or bool(self.ends)


class JournalTable(MemoryTable):
    """The indexes of memory without payloads; every change is noted."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.journal = Journal()

    def add(self, row: Row) -> None:
        super().add(self._noted(row))

    def replace(self, old: Record, row: Row) -> None:
        super().replace(old, self._noted(row))

    def remove(self, records: Sequence[Record]) -> None:
        super().remove(records)
        for record in records:
            self.journal.records[record.uid] = None
            self.journal.frames.pop(record.uid, None)

    def _noted(self, row: Row) -> Row:
        uid = row.record.uid
        self.journal.records[uid] = row.record
        if isinstance(row.group, Payload):
            self.journal.frames[uid] = row.group.frame
            self.journal.summaries[uid] = row.group.summary
        return Row(row.record, ON_DISK)

    def load(self, record: Record) -> None:
        """A row that is on disk already."""
        super().add(Row(record, ON_DISK))


class Payload(tuple[()]):
    """Stands in a row for samples that are bytes by now."""

    frame: bytes
    summary: str


def payload_of(frame: bytes, summary: str) -> Group:
    payload = Payload()
    payload.frame, payload.summary = frame, summary
    return cast(Group, payload)


class State(msgspec.Struct):
    """What a store holds, without payloads."""

    meta: dict[str, Any]
    accounts: dict[str, bytes]
    table: JournalTable
    archived: deque[int]
    ends: dict[int, bytes]
