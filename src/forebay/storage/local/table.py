"""Where an engine keeps rows: the table of all of them, and the archive of trained ones.

A table finds, keeps and counts rows; it checks nothing and decides nothing (the engine does). MemoryStorage brings one
with indexes, PandasStorage a plain one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from forebay.core.capacity import Usage
from forebay.core.ledger import Account, Place, Record, Row
from forebay.core.query import Pins
from forebay.core.rollout import Status
from forebay.core.staleness import Floors


class Table(ABC):
    """Rows, found in every way that the rules ask for."""

    @abstractmethod
    def add(self, row: Row) -> None:
        """A row with a new uid, larger than all before; or one that had left, put back."""

    @abstractmethod
    def replace(self, old: Record, row: Row) -> None:
        """A new version of the row that `old` describes."""

    @abstractmethod
    def remove(self, records: Sequence[Record]) -> None:
        """Rows of one task, place and status."""

    @abstractmethod
    def get(self, uid: int) -> Row | None: ...

    @abstractmethod
    def find(self, task_name: str, group_id: int) -> Row | None: ...

    @abstractmethod
    def held(self, owner: str) -> list[Row]:
        """The rows of an owner, in flight or leased, in order of uid."""

    @abstractmethod
    def owners(self) -> Collection[str]:
        """The owners that have rows."""

    @abstractmethod
    def first(self, task_name: str, status: Status, n: int, floors: Floors, *, by_group: bool) -> list[Row]:
        """The first n buffered rows that are fresh, in the table's order or in order of group_id."""

    @abstractmethod
    def stale(self, task_name: str, status: Status, floors: Floors, limit: int) -> list[Row]:
        """Up to `limit` buffered rows that are not fresh."""

    @abstractmethod
    def count(self, task_name: str, status: Status) -> int:
        """Buffered rows."""

    @abstractmethod
    def count_fresh(self, task_name: str, status: Status, floors: Floors) -> int:
        """Buffered rows that are fresh."""

    @abstractmethod
    def places(self, task_name: str, *, tokens: bool) -> dict[Place, int]:
        """Groups, or their tokens, by place."""

    @abstractmethod
    def usage(self) -> Usage: ...

    @abstractmethod
    def candidates(self, pins: Pins) -> Iterable[int]:
        """Uids of all rows that can match, in ascending order, as of now."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """All rows in order of uid."""

    @abstractmethod
    def __len__(self) -> int:
        """Buffered rows of all tasks."""

    def check(self) -> None:
        """Assert that every index and count is what the rows say."""
        assert len(self) == sum(row.record.place is Place.BUFFERED for row in self.rows())


class Archive:
    """The uids of archived rows, oldest first, and the step of the last saved weights.

    `durable`: groups stay until weights that were trained on them are saved.
    """

    def __init__(self, *, durable: bool) -> None:
        self.uids: deque[int] = deque()
        self.saved_step: int | None = None  # of all tasks that are not in `saved_steps`
        self.saved_steps: dict[str, int] = {}
        self.is_used = False  # whether anything was ever saved
        self._durable = durable

    def save(self, model_step: int, accounts: Mapping[str, Account], *, whole: bool) -> None:
        """Weights of this step were saved with these tasks; `whole`: these are all."""
        self.is_used = True
        for account in accounts.values():
            account.saved_step = None if whole else model_step
        if whole:
            self.saved_step = model_step
            self.saved_steps.clear()
        else:
            self.saved_steps |= dict.fromkeys(accounts, model_step)

    def needs(self, record: Record) -> bool:
        """Whether the weights that were trained on a group can still be lost, and the group be needed again."""
        step, saved = record.train_step, self.saved_steps.get(record.task_name, self.saved_step)
        return self._durable and saved is not None and step is not None and step > saved

    def trim(self, table: Table, keep: int) -> None:
        """Remove the oldest rows beyond `keep`, as far as they are not needed."""
        needed: list[int] = []
        while len(self.uids) + len(needed) > keep and self.uids:
            uid = self.uids.popleft()
            oldest = table.get(uid)
            if oldest is not None and self.needs(oldest.record):
                needed.append(uid)
                if not self.saved_steps:
                    break  # one clock for all: everything after it is needed, too
            elif oldest is not None:
                table.remove((oldest.record,))
        self.uids.extendleft(reversed(needed))

    def take_back(self, table: Table, row: Row) -> bool:
        """Buffer a row again that was taken for good; whether it had left."""
        record, now = row.record, table.get(row.record.uid)
        if now is not None:
            if now.record.place is not Place.ARCHIVED:
                return False  # it is already back
            self.uids.remove(record.uid)
            table.replace(now.record, Row(record, now.group))
        elif table.find(record.task_name, record.group_id) is not None:
            return False  # its identity was put again by hand
        else:
            table.add(row)
        return True

    def trained_after(self, table: Table, model_step: int, tasks: Collection[str] | None) -> list[Row]:
        """The rows of these tasks (None: of all) that were trained for a later step than that of these weights."""
        rows = [row for uid in self.uids if (row := table.get(uid)) is not None]
        rows = [row for row in rows if row.record.train_step is not None and row.record.train_step > model_step]
        return [row for row in rows if tasks is None or row.record.task_name in tasks]
