"""What changed in memory and is not on disk yet.

The table of a SQLite store is the one of MemoryStorage without payloads. Table, engine and outbox note every change in
one journal, and the storage hands the journal to the writer, which writes it in one transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from forebay.codec.records import encode_end
from forebay.core.capacity import Settings
from forebay.core.ledger import GroupEnd, Record, Row
from forebay.core.policy import Order
from forebay.core.rollout import Group
from forebay.storage.base import Content
from forebay.storage.local.engine import Engine
from forebay.storage.local.memory import MemoryTable
from forebay.storage.local.owners import Outbox
from forebay.storage.local.table import Table
from forebay.storage.sqlite.schema import summary_of

__all__ = ["ON_DISK", "Journal", "JournalTable", "JournaledEngine", "Payload"]

ON_DISK: Group = ()
"""The payload of a row whose samples are on disk."""

Payload = tuple[bytes, str]
"""A frame and the summary of its samples."""


class Journal:
    """Changes since the journal was last handed to the writer."""

    def __init__(self) -> None:
        self.records: dict[int, Record | None] = {}  # None: removed
        self.payloads: dict[int, Payload] = {}
        self.ends: dict[int, bytes | None] = {}  # None: removed

    def __bool__(self) -> bool:
        return bool(self.records) or bool(self.ends)

    def take(self) -> Journal:
        """The changes until now; this journal is empty afterwards."""
        taken = Journal()
        taken.records, self.records = self.records, taken.records
        taken.payloads, self.payloads = self.payloads, taken.payloads
        taken.ends, self.ends = self.ends, taken.ends
        return taken

    @property
    def bytes(self) -> int:
        """The size of the frames that are to be written."""
        return sum(len(frame) for frame, _ in self.payloads.values())


class JournalTable(MemoryTable):
    """The indexes of memory without payloads. Every change is noted, once there is a journal."""

    def __init__(self, order: Order, journal: Journal | None = None) -> None:
        super().__init__(order)
        self.journal = journal

    def add(self, row: Row) -> None:
        super().add(Row(row.record, ON_DISK))
        if self.journal is not None:
            self.journal.records[row.record.uid] = row.record

    def replace(self, old: Record, row: Row) -> None:
        super().replace(old, Row(row.record, ON_DISK))
        if self.journal is not None:
            self.journal.records[row.record.uid] = row.record

    def remove(self, records: Sequence[Record]) -> None:
        super().remove(records)
        if self.journal is not None:
            for record in records:
                self.journal.records[record.uid] = None
                self.journal.payloads.pop(record.uid, None)


class _JournaledOutbox(Outbox):
    def __init__(self, journal: Journal) -> None:
        super().__init__(bounded=False)
        self._journal = journal

    def note(self, end: GroupEnd) -> None:
        self._journal.ends[self.next_number] = encode_end(end)
        super().note(end)

    def drop(self, number: int) -> None:
        if number in self.ends:
            self._journal.ends[number] = None
        super().drop(number)


class JournaledEngine(Engine):
    """An engine whose changes are noted, payloads as frames."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self.journal = Journal()

        def make_table(settings: Settings) -> Table:
            return JournalTable(settings.order, self.journal)

        super().__init__(make_table, durable=True, clock=clock)
        self.outbox = _JournaledOutbox(self.journal)

    def _keep(self, record: Record, content: Content) -> Group:
        assert content.frame is not None
        self.journal.payloads[record.uid] = (content.frame, summary_of(content.group))
        return ON_DISK

    def _handed(self, rows: list[Row]) -> list[Row]:
        return rows  # their payloads are read from disk, for the caller alone
