"""A storage around an engine in this process.

Every operation is one synchronous step of the engine, a method of the same name, after which `_finish` calls the
listeners. A durable storage writes the change to disk in `_finish` first, and reads payloads in `_loaded`. Defined here
are only operations that yield to the event loop in between, need payloads, or read counts.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Collection, Mapping
from typing import Any

from forebay.core.ledger import Account, Place, Record, Row
from forebay.core.query import Node, pins, predicate
from forebay.core.rollout import Status
from forebay.core.staleness import EXPIRABLE, NO_FLOORS
from forebay.errors import InvalidInput
from forebay.storage.base import Listener, Operation, Storage, Summary, TaskSummary
from forebay.storage.idempotency import Kept, Returned
from forebay.storage.local.engine import Engine
from forebay.storage.local.table import Table
from forebay.storage.rules import StreamCheck, copied, is_used
from forebay.storage.values import Holding, Reaped, Snapshot

log = logging.getLogger(__name__)

_SLICE = 512
"""Records examined before the event loop gets its turn."""


class LocalStorage(Storage):
    """A storage that lives in this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._listeners: list[Listener] = []

    async def _perform(self, operation: Operation, /, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._engine, operation.name)(*args, **kwargs)
        if operation.changes:
            await self._finish(Returned(operation.name, result) if operation.once else None)
        return result

    async def _finish(self, answer: Kept | None = None) -> None:
        """End a change: a durable storage writes it here, with the `answer` that a repeated call gets."""
        self._notify(self._engine.changed())

    def _notify(self, tasks: Collection[str]) -> None:
        if tasks:
            for listener in tuple(self._listeners):
                try:
                    listener(tasks)
                except Exception:
                    # The change is stored; a failing listener concerns its owner, not the caller.
                    log.exception("listener_failed")

    async def _loaded(self, rows: list[Row]) -> list[Row]:
        """Rows with their payload, for storages that keep it elsewhere."""
        return rows

    def _check(self) -> None:
        """Assert that indexes, counts and rows agree."""
        self._engine.table.check()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def beat(self, owner: str) -> None:
        self._engine.owners.beat(owner)

    async def reap(self) -> Reaped:
        reaped = self._engine.reap()
        if reaped.returned:
            await self._finish()
        return reaped

    # --- moves --------------------------------------------------------------------------------------

    async def discard(self, node: Node, reason: str) -> dict[str, int]:
        discarded: Counter[str] = Counter()
        async for row in self._matching(node, place=frozenset({Place.BUFFERED})):
            if row.record.place is Place.BUFFERED:
                self._engine.discard_row(row, reason)
                discarded[row.record.task_name] += 1
        await self._finish(Returned("discard", dict(discarded)))
        return dict(discarded)

    async def rewind(self, model_step: int, tasks: Collection[str] | None = None) -> dict[str, int]:
        rows = self._engine.archive.trained_after(self._engine.table, model_step, tasks)
        rewound = self._engine.rewind_rows(await self._loaded(rows) if rows else rows, model_step, tasks)
        await self._finish()
        return rewound

    # --- reads --------------------------------------------------------------------------------------

    async def _matching(self, node: Node, limit: int | None = None, **pinned: frozenset[Any]) -> AsyncIterator[Row]:
        """Up to `limit` rows that match a tree, in order of uid, each as of when it is read."""
        matches, found = predicate(node), 0
        for examined, uid in enumerate(self._engine.table.candidates(pins(node) | pinned)):
            if found == limit:
                return
            if examined % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            row = self._engine.table.get(uid)
            if row is not None and matches(row.record):
                found += 1
                yield row

    async def records(self, node: Node, limit: int | None) -> list[Record]:
        return [row.record async for row in self._matching(node, limit)]

    async def due(self, task_name: str, statuses: Collection[Status], limit: int) -> list[Row]:
        account = self._engine.accounts.get(task_name) or Account()
        rows: list[Row] = []
        for status in statuses:
            if len(rows) < limit:
                rows += self._engine.table.stale(task_name, status, account.floors, limit - len(rows))
        return await self._loaded(rows) if rows else rows

    async def read(self, uid: int) -> Row | None:
        row = self._engine.table.get(uid)
        loaded = [] if row is None else await self._loaded([row])
        return loaded[0] if loaded else None

    def __len__(self) -> int:
        return len(self._engine.table)

    async def summary(
        self, tasks: Collection[str] | None = None, *, holdings: bool = False, owners: bool = False
    ) -> Summary:
        engine = self._engine
        names = engine.accounts if tasks is None else [name for name in tasks if name in engine.accounts]
        return Summary(
            {task_name: self._task_summary(task_name) for task_name in names},
            engine.table.usage(),
            self._holdings() if holdings else (),
            engine.archive.saved_step,
            engine.owners.living() if owners else (),
        )

    def _task_summary(self, task_name: str) -> TaskSummary:
        table, account = self._engine.table, self._engine.accounts[task_name]
        statuses = {status: n for status in Status if (n := table.count(task_name, status))}
        fresh, floors = statuses, account.floors
        if floors is not NO_FLOORS:
            fresh = dict(statuses)
            for status in EXPIRABLE:
                if status in fresh:
                    fresh[status] = table.count_fresh(task_name, status, floors)
        places, tokens = (table.places(task_name, tokens=tokens) for tokens in (False, True))
        return TaskSummary(copied(account), statuses, fresh, places, tokens)

    def _holdings(self) -> list[Holding]:
        now, table = self._engine.clock(), self._engine.table
        held: dict[tuple[str, Place, str], list[Record]] = {}
        for owner in table.owners():
            for row in table.held(owner):
                held.setdefault((row.record.task_name, row.record.place, owner), []).append(row.record)
        holdings = []
        for (task_name, place, owner), records in held.items():
            oldest = min(records, key=lambda record: (record.moved_at, record.uid))
            age_s = max(0.0, now - oldest.moved_at)
            holdings.append(Holding(task_name, place, owner, len(records), oldest.group_id, age_s))
        return sorted(holdings, key=lambda holding: -holding.oldest_age_s)

    # --- streams ------------------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        engine = self._engine
        rows = self._stream(engine.table.rows())
        # Until the stream is dropped, whether it was read or not.
        engine.streams += 1
        weakref.finalize(rows, self._end_stream)
        accounts = {task_name: copied(account) for task_name, account in engine.accounts.items()}
        return Snapshot(accounts, engine.next_uid, engine.next_timestamp_id, rows)

    def _end_stream(self) -> None:
        self._engine.streams -= 1

    async def _stream(self, rows: list[Row]) -> AsyncGenerator[Row, None]:
        for index, row in enumerate(rows):
            if index % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            yield row

    def _check_empty(self) -> None:
        if is_used(self._engine.accounts):
            raise InvalidInput("a stream is restored into an empty storage; this one has been used; nothing restored")

    async def restore(
        self, accounts: Mapping[str, Account], next_uid: int, next_timestamp_id: int, rows: AsyncIterable[Row]
    ) -> None:
        table = self._engine.make_table(self._engine.settings)
        await self._fill(table, accounts, next_uid, next_timestamp_id, rows)
        await self._finish(Returned("restore", None))

    async def _fill(
        self,
        table: Table,
        accounts: Mapping[str, Account],
        next_uid: int,
        next_timestamp_id: int,
        rows: AsyncIterable[Row],
    ) -> None:
        """Fill a table with checked rows, and adopt it."""
        check = StreamCheck(accounts, next_uid, next_timestamp_id)
        archived: deque[int] = deque()
        async for row in rows:
            check.row(row.record)
            table.add(row)
            if row.record.place is Place.ARCHIVED:
                archived.append(row.record.uid)
        check.end()
        self._check_empty()
        self._engine.adopt(table, accounts, archived, next_uid, next_timestamp_id)
