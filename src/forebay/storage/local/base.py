"""The life, the reads and the streams of a storage that lives in this process, over any table of rows.

What changes rows is in `local`, which builds on this. `_finish`, `_loaded` and `_kept` are where a durable storage
differs: what makes a change last, where payloads are, and what is kept of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Collection, Mapping
from typing import Any

from msgspec.structs import replace

from forebay.core.ledger import Account, GroupEnd, LedgerLine, Place, check_closed, close_line
from forebay.core.policy import Order
from forebay.core.query import Node, pins, predicate
from forebay.core.record import Record, Row, identify
from forebay.core.rollout import Group, Status, group_status
from forebay.core.staleness import EXPIRABLE, Floors
from forebay.errors import BufferClosed, InvalidConfig, InvalidInput
from forebay.storage.base import Content, Holding, Listener, Settings, Snapshot, Storage, Usage
from forebay.storage.idempotency import Done, Kept
from forebay.storage.local.table import Table

__all__ = ["LocalBase", "check_stream_end", "check_stream_row"]

log = logging.getLogger(__name__)

_ANY_AGE = Floors()

_SLICE = 512
"""Records looked at before the event loop gets its turn."""


class LocalBase(Storage):
    """A storage over a table in this process: its life, its reads and its streams."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        # A wall clock that is set anew must not take leases away; a clock of a test's own serves for both.
        self._deadline_clock = time.monotonic if clock is time.time else clock
        self._settings = Settings()
        self._table = self._make_table(self._settings.order)
        self._accounts: dict[str, Account] = {}
        self._next_uid = 1
        self._next_timestamp_id = 1
        self._archived: deque[int] = deque()
        self._deadlines: dict[str, tuple[float, float]] = {}  # owner: (lease_s, deadline)
        self._open: set[str] = set()
        self._gone: set[str] = set()  # owners that were closed
        self._listeners: list[Listener] = []
        self._saved_step: int | None = None  # the model step of the last checkpoint
        self._notes_ends = False
        self._ends: dict[int, GroupEnd] = {}  # that nobody was told of, by number
        self._ends_of: dict[str, set[int]] = {}  # numbers by the owner that tells of them
        self._next_end = 1
        self._streams = 0  # snapshots under way; they still see groups that have left

    @abstractmethod
    def _make_table(self, order: Order) -> Table:
        """An empty table that keeps this order."""

    # --- life ------------------------------------------------------------------------------------

    async def open(self, owner: str, settings: Settings, lease_s: float | None) -> None:
        if not _same_settings(settings, self._settings):
            if self._open:
                raise InvalidConfig(
                    f"this storage is open with {self._settings}, and was to be opened with {settings}; all "
                    "buffers on one storage need the same policy and limits"
                )
            rows = self._table.rows()
            self._settings = settings
            self._table = self._make_table(settings.order)
            for row in rows:
                self._table.add(row)
        self._open.add(owner)
        self._gone.discard(owner)
        if lease_s is not None:
            self._deadlines[owner] = (lease_s, self._deadline_clock() + lease_s)
        else:
            self._deadlines.pop(owner, None)

    async def close(self, owner: str) -> None:
        self._gone.add(owner)  # before the release, which may give way to a claim that is under way
        await self.release(owner)
        self._open.discard(owner)
        self._deadlines.pop(owner, None)
        self._ends_of.pop(owner, None)

    def _check_owner(self, owner: str) -> None:
        if owner in self._gone:
            raise BufferClosed(f"{owner} was closed, and can hold nothing any more")

    def beat(self, owner: str) -> None:
        known = self._deadlines.get(owner)
        if known is not None:
            self._deadlines[owner] = (known[0], self._deadline_clock() + known[0])

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    # --- what a storage may do otherwise ---------------------------------------------------------

    async def _finish(self, tasks: Collection[str], answer: Kept | None = None) -> None:
        """The end of every change: a durable storage makes it last here. Then the listeners hear of it.

        `answer`: what the operation returns, for a storage that remembers it with the change.
        """
        if tasks:
            for listener in tuple(self._listeners):
                try:
                    listener(tasks)
                except Exception:
                    # What was stored is stored; a listener that fails is its owner's trouble, not the caller's.
                    log.exception("listener_failed")

    async def _loaded(self, rows: list[Row]) -> list[Row]:
        """Rows with their payload, for storages that keep it elsewhere."""
        return rows

    def _kept(self, content: Content, task_name: str, group_id: int) -> Group:
        """The payload of a row that is stored."""
        identify(content.group, task_name, group_id)
        return content.group

    def _status_of(self, row: Row) -> Status:
        """The status that the samples of a row make."""
        return group_status(row.group)

    # --- reads -----------------------------------------------------------------------------------

    async def count_statuses(
        self, tasks: Collection[str], statuses: Collection[Status]
    ) -> dict[str, dict[Status, int]]:
        count = self._table.count
        return {task_name: {status: count(task_name, status) for status in statuses} for task_name in tasks}

    async def available(self, tasks: Collection[str], status: Status) -> dict[str, int]:
        if status not in EXPIRABLE:
            return {task_name: self._table.count(task_name, status) for task_name in tasks}
        return {
            task_name: self._table.count_fresh(task_name, status, self._floors(task_name, None)) for task_name in tasks
        }

    async def ledger(self, *, tokens: bool = False) -> dict[str, LedgerLine]:
        return {
            task_name: close_line(account, self._table.places(task_name, tokens=tokens), tokens=tokens)
            for task_name, account in self._accounts.items()
        }

    async def account(self, task_name: str) -> Account:
        return _copied(self._accounts.get(task_name) or Account())

    async def accounts(self) -> dict[str, Account]:
        return {task_name: _copied(account) for task_name, account in self._accounts.items()}

    async def usage(self) -> Usage:
        return self._table.usage()

    async def holdings(self) -> list[Holding]:
        now = self._clock()
        held: dict[tuple[str, Place, str], list[Record]] = {}
        for owner in self._table.owners():
            for row in self._table.held(owner):
                held.setdefault((row.record.task_name, row.record.place, owner), []).append(row.record)
        holdings = []
        for (task_name, place, owner), records in held.items():
            oldest = min(records, key=lambda record: (record.moved_at, record.uid))
            age_s = max(0.0, now - oldest.moved_at)
            holdings.append(Holding(task_name, place, owner, len(records), oldest.group_id, age_s))
        return sorted(holdings, key=lambda holding: -holding.oldest_age_s)

    async def records(self, node: Node, limit: int | None) -> list[Record]:
        matches = predicate(node)
        found: list[Record] = []
        for looked_at, uid in enumerate(self._table.candidates(pins(node))):
            if limit is not None and len(found) >= limit:
                break
            if looked_at % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            row = self._table.get(uid)
            if row is not None and matches(row.record):
                found.append(row.record)
        return found

    async def read(self, uid: int) -> Row | None:
        row = self._table.get(uid)
        return None if row is None else (await self._loaded([row]))[0]

    def __len__(self) -> int:
        return len(self._table)

    # --- streams ---------------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        rows = self._stream(self._table.rows())
        # Until nobody can read from it any more, also if nobody ever does.
        self._streams += 1
        weakref.finalize(rows, self._end_stream)
        return Snapshot(await self.accounts(), self._next_uid, self._next_timestamp_id, rows)

    def _end_stream(self) -> None:
        self._streams -= 1

    async def _stream(self, rows: list[Row]) -> AsyncGenerator[Row, None]:
        for index, row in enumerate(rows):
            if index % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            yield row

    async def restore(
        self, accounts: Mapping[str, Account], next_uid: int, next_timestamp_id: int, rows: AsyncIterable[Row]
    ) -> None:
        table = self._make_table(self._settings.order)
        archived: deque[int] = deque()
        last_uid = 0
        async for row in rows:
            check_stream_row(row.record, last_uid, next_uid, next_timestamp_id, accounts, table)
            last_uid = row.record.uid
            table.add(row)
            if row.record.place is Place.ARCHIVED:
                archived.append(row.record.uid)
        check_stream_end(accounts, table)
        if self._accounts or self._table.rows():
            raise InvalidInput("a stream is restored into an empty storage; this one has been used; nothing restored")
        self._table, self._archived = table, archived
        self._accounts = {task_name: _copied(account) for task_name, account in accounts.items()}
        self._next_uid, self._next_timestamp_id = next_uid, next_timestamp_id
        await self._finish(list(accounts), Done())

    # --- small parts -----------------------------------------------------------------------------

    def _account(self, task_name: str) -> Account:
        account = self._accounts.get(task_name)
        if account is None:
            account = self._accounts[task_name] = Account()
        return account

    def _floors(self, task_name: str, more: Floors | None) -> Floors:
        account = self._accounts.get(task_name)
        if account is None or account.watermark is None:
            return more or Floors()
        floors = account.watermark.floors
        if more is None:
            return floors
        return Floors(_larger(floors.oldest, more.oldest), _larger(floors.token, more.token))


def _same_settings(one: Settings, other: Settings) -> bool:
    # Two policies of one class are the same policy: bound methods only compare equal within one object.
    chooses = [getattr(settings.choose, "__func__", settings.choose) for settings in (one, other)]
    return chooses[0] is chooses[1] and replace(one, choose=None) == replace(other, choose=None)


def check_stream_row(
    record: Record, last_uid: int, next_uid: int, next_timestamp_id: int, accounts: Mapping[str, Account], table: Table
) -> None:
    """InvalidInput if a row does not fit into the stream that is being restored."""
    if not last_uid < record.uid < next_uid or record.timestamp_id >= next_timestamp_id:
        raise InvalidInput(f"row {record.uid} does not follow row {last_uid} below {next_uid}; nothing restored")
    if table.find(record.task_name, record.group_id) is not None:
        raise InvalidInput(
            f"group {record.group_id} of task {record.task_name!r} stands twice in the stream; nothing restored"
        )
    if record.task_name not in accounts:
        raise InvalidInput(f"row {record.uid} is of task {record.task_name!r}, which has no account; nothing restored")


def check_stream_end(accounts: Mapping[str, Account], table: Table) -> None:
    """InvalidInput if the rows of a stream do not close the ledgers of its accounts."""
    for task_name, account in accounts.items():
        places, tokens = (table.places(task_name, tokens=tokens) for tokens in (False, True))
        check_closed(account, places, tokens, task_name)


def _larger(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return max(a, b)


def _copied(account: Account) -> Account:
    changes: dict[str, Any] = {
        "ended": dict(account.ended),
        "ended_tokens": dict(account.ended_tokens),
        "reasons": dict(account.reasons),
        "sizes": dict(account.sizes),
    }
    return replace(account, **changes)
