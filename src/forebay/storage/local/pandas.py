"""PandasStorage: the plain storage, with a DataFrame to explore.

Every question is answered by scanning one frame of records with pandas; nothing is indexed. That makes it slow
(use it up to some thousand groups) and easy to believe: it is the oracle that other storages are compared with,
and `frame()` is what a person explores in a notebook.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from forebay.core.capacity import Usage
from forebay.core.ledger import Place, Record, Row, is_fresh
from forebay.core.policy import Order, order_key
from forebay.core.query import Pins
from forebay.core.rollout import Group, Status
from forebay.core.staleness import Floors
from forebay.storage.local.engine import Engine
from forebay.storage.local.storage import LocalStorage
from forebay.storage.local.table import Table

_COLUMNS = [name for name in Record.__struct_fields__ if name != "uid"]
_DTYPES: Any = {
    **dict.fromkeys(("timestamp_id", "group_id", "samples", "tokens", "bytes", "reserved_bytes", "num_tries"), "int64"),
    **dict.fromkeys(("deliveries", "attempt", "revision", "given_staleness", "unjudged"), "int64"),
    **dict.fromkeys(("oldest_step", "newest_step", "token_step", "train_step"), "Int64"),
    **dict.fromkeys(("created_at", "moved_at", "priority"), "float64"),
    "reward": "Float64",
}


class PandasStorage(LocalStorage):
    """A storage that answers from a DataFrame."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(Engine(lambda settings: _FrameTable(settings.order), clock=clock))

    def frame(self) -> pd.DataFrame:
        """The records of all groups as they are now, a row each, indexed by uid; yours to change."""
        table = self._engine.table
        assert isinstance(table, _FrameTable)
        return table.frame()


class _FrameTable(Table):
    def __init__(self, order: Order) -> None:
        self._key = order_key(order)
        self._groups: dict[int, Group] = {}
        self._records: dict[int, Record] = {}
        self._frame: pd.DataFrame | None = None

    def frame(self) -> pd.DataFrame:
        """Every column of every record, with its dtype also where there are no rows."""
        return self._made(_COLUMNS).astype(_DTYPES)

    def _made(self, columns: Sequence[str]) -> pd.DataFrame:
        records = self._records.values()
        content = {name: [getattr(record, name) for record in records] for name in columns}
        return pd.DataFrame(content, index=pd.Index(list(self._records), name="uid", dtype="int64"), dtype=object)

    @property
    def _scanned(self) -> pd.DataFrame:
        """The columns that questions are about, made again after a change."""
        if self._frame is None:
            columns = ("task_name", "group_id", "place", "status", "owner", "tokens", "bytes", "reserved_bytes")
            self._frame = self._made(columns)
        return self._frame

    # --- change -------------------------------------------------------------------------------------

    def add(self, row: Row) -> None:
        late = bool(self._records) and row.record.uid < next(reversed(self._records))
        self._records[row.record.uid] = row.record
        self._groups[row.record.uid] = row.group
        if late:  # one that had left was put back
            self._records = dict(sorted(self._records.items()))
        self._frame = None

    def replace(self, old: Record, row: Row) -> None:
        self._records[old.uid], self._groups[old.uid] = row.record, row.group
        self._frame = None

    def remove(self, records: Sequence[Record]) -> None:
        for record in records:
            del self._records[record.uid], self._groups[record.uid]
        self._frame = None

    # --- find ---------------------------------------------------------------------------------------

    def _rows(self, **values: object) -> list[Row]:
        """The rows that have these values in these columns."""
        frame = self._scanned
        mask = np.ones(len(frame), dtype=bool)
        for name, value in values.items():
            mask &= frame[name].to_numpy() == value
        return [self._row(int(uid)) for uid in frame.index[mask]]

    def _row(self, uid: int) -> Row:
        return Row(self._records[uid], self._groups[uid])

    def get(self, uid: int) -> Row | None:
        return self._row(uid) if uid in self._records else None

    def find(self, task_name: str, group_id: int) -> Row | None:
        rows = self._rows(task_name=task_name, group_id=group_id)
        return rows[0] if rows else None

    def held(self, owner: str) -> list[Row]:
        return self._rows(owner=owner)

    def owners(self) -> Collection[str]:
        return [str(owner) for owner in self._scanned["owner"].dropna().unique()]

    def _buffered(self, task_name: str, status: Status) -> list[Row]:
        return self._rows(task_name=task_name, place=Place.BUFFERED, status=status)

    def first(self, task_name: str, status: Status, n: int, floors: Floors, *, by_group: bool) -> list[Row]:
        rows = [row for row in self._buffered(task_name, status) if is_fresh(row.record, floors)]
        rows.sort(key=lambda row: row.record.group_id if by_group else self._key(row.record))
        return rows[:n]

    def stale(self, task_name: str, status: Status, floors: Floors, limit: int) -> list[Row]:
        return [row for row in self._buffered(task_name, status) if not is_fresh(row.record, floors)][:limit]

    def count(self, task_name: str, status: Status) -> int:
        return len(self._buffered(task_name, status))

    def count_fresh(self, task_name: str, status: Status, floors: Floors) -> int:
        return sum(is_fresh(row.record, floors) for row in self._buffered(task_name, status))

    def places(self, task_name: str, *, tokens: bool) -> dict[Place, int]:
        rows = {place: self._rows(task_name=task_name, place=place) for place in Place}
        return {place: sum(row.record.tokens if tokens else 1 for row in found) for place, found in rows.items()}

    def usage(self) -> Usage:
        frame = self._scanned
        live = frame[frame["place"] != Place.ARCHIVED]
        reserve = (live["reserved_bytes"] - live["bytes"]).clip(lower=0)
        return Usage(len(live), int(live["bytes"].sum()), int(reserve.sum()))

    def candidates(self, pins: Pins) -> Iterable[int]:
        return list(self._records)

    def rows(self) -> list[Row]:
        return [self._row(uid) for uid in self._records]

    def __len__(self) -> int:
        return len(self._rows(place=Place.BUFFERED))
