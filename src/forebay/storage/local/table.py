"""What the rules of a local storage need from the place that keeps the rows.

A table finds, keeps and counts rows; it checks nothing and decides nothing (`local` does). MemoryStorage brings one
with indexes, PandasStorage a plain one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence

from forebay.core.capacity import Usage
from forebay.core.ledger import Place, Record, Row
from forebay.core.query import Pins
from forebay.core.rollout import Status
from forebay.core.staleness import Floors

__all__ = ["Table"]


class Table(ABC):
    """Rows, found in every way that the rules ask for. It checks nothing."""

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
        """What an owner holds, in flight or leased, in order of uid."""

    @abstractmethod
    def owners(self) -> Collection[str]:
        """Who holds anything."""

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
