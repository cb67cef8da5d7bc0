"""A storage around an engine in this process.

Every operation is one synchronous step of the engine, after which `_finish` calls the listeners. A durable storage
writes the change to disk in `_finish` first, and reads payloads in `_loaded`.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Collection, Mapping, Sequence

from forebay.core.capacity import Settings
from forebay.core.ledger import Account, Clock, Event, GroupEnd, Place, Record, Row
from forebay.core.query import Node, pins, predicate
from forebay.core.rollout import Status
from forebay.errors import InvalidInput
from forebay.storage.base import (
    Arrival,
    Claim,
    Claimed,
    Content,
    Listener,
    Reaped,
    Revision,
    Rows,
    Snapshot,
    Storage,
    Summary,
)
from forebay.storage.idempotency import Applied, Counted, Done, Kept, Stored
from forebay.storage.local.engine import Engine
from forebay.storage.rules import StreamCheck, copied, is_used

__all__ = ["LocalStorage"]

log = logging.getLogger(__name__)

_SLICE = 512
"""Records examined before the event loop gets its turn."""


class LocalStorage(Storage):
    """A storage that lives in this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._listeners: list[Listener] = []

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

    # --- opening and closing ------------------------------------------------------------------------

    async def open(self, owner: str, settings: Settings, lease_s: float | None) -> None:
        self._engine.configure(settings)
        self._engine.enter(owner, lease_s)

    async def close(self, owner: str) -> None:
        self._engine.leave(owner)
        await self._finish()

    def beat(self, owner: str) -> None:
        self._engine.beat(owner)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def reap(self) -> Reaped:
        reaped = self._engine.reap()
        if reaped.returned:
            await self._finish()
        return reaped

    # --- moves --------------------------------------------------------------------------------------

    async def issue(
        self, task_name: str, contents: Sequence[Content], *, owner: str, cursor: int, source_state: bytes | None = None
    ) -> list[Record]:
        records = self._engine.issue(task_name, contents, owner, cursor, source_state)
        await self._finish(Stored(records))
        return records

    async def put(self, arrivals: Sequence[Arrival], *, owner: str) -> list[Record]:
        records = self._engine.put(arrivals, owner)
        await self._finish(Stored(records))
        return records

    async def claim(self, claim: Claim) -> Claimed:
        claimed = self._engine.take(claim, self._engine.choose(claim))
        await self._finish()
        return claimed

    async def undo(self, claim: Claim, rows: Rows) -> None:
        self._engine.undo(rows)
        await self._finish()

    async def settle(self, lease_id: str, uids: Sequence[int], event: Event, reason: str | None = None) -> None:
        self._engine.settle(lease_id, uids, event, reason)
        await self._finish(Done())

    async def release(self, owner: str) -> dict[str, int]:
        released = self._engine.release(owner)
        await self._finish()
        return released

    async def advance(self, clocks: Mapping[str, Clock]) -> None:
        self._engine.advance(clocks)
        await self._finish()

    async def due(self, task_name: str, statuses: Collection[Status], limit: int) -> list[Row]:
        rows = self._engine.due(task_name, statuses, limit)
        return await self._loaded(rows) if rows else rows

    async def revise(self, revisions: Sequence[Revision]) -> list[bool]:
        applied = self._engine.revise(revisions)
        await self._finish(Applied(applied))
        return applied

    async def discard(self, node: Node, reason: str) -> dict[str, int]:
        discarded: dict[str, int] = {}
        uids = list(self._engine.table.candidates(pins(node) | {"place": frozenset({Place.BUFFERED})}))
        for start in range(0, len(uids), _SLICE):
            if start:
                await asyncio.sleep(0)
            self._engine.discard(uids[start : start + _SLICE], node, reason, discarded)
        await self._finish(Counted(discarded))
        return discarded

    async def fail(self, reasons: Mapping[int, str]) -> dict[str, int]:
        failed = self._engine.fail(reasons)
        await self._finish()
        return failed

    async def set_priority(self, priorities: Mapping[int, float]) -> int:
        found = self._engine.set_priority(priorities)
        await self._finish()
        return found

    async def saved(self, model_step: int) -> None:
        self._engine.saved(model_step)
        await self._finish()

    async def rewind(self, model_step: int) -> dict[str, int]:
        rows = self._engine.trained_after(model_step)
        rewound = self._engine.rewind(await self._loaded(rows) if rows else rows, model_step)
        await self._finish()
        return rewound

    # --- ends ---------------------------------------------------------------------------------------

    async def note_ends(self) -> None:
        self._engine.outbox.noting = True
        await self._finish()

    async def ends(self, owner: str, limit: int) -> list[tuple[int, GroupEnd]]:
        self._engine.check_owner(owner)
        return self._engine.outbox.take(owner, limit)

    async def forget_ends(self, numbers: Sequence[int]) -> None:
        self._engine.outbox.forget(numbers)
        await self._finish()

    # --- reads --------------------------------------------------------------------------------------

    async def summary(self, tasks: Collection[str] | None = None, *, holdings: bool = False) -> Summary:
        return self._engine.summary(tasks, holdings)

    async def records(self, node: Node, limit: int | None) -> list[Record]:
        matches = predicate(node)
        found: list[Record] = []
        for examined, uid in enumerate(self._engine.table.candidates(pins(node))):
            if limit is not None and len(found) >= limit:
                break
            if examined % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            row = self._engine.table.get(uid)
            if row is not None and matches(row.record):
                found.append(row.record)
        return found

    async def read(self, uid: int) -> Row | None:
        row = self._engine.table.get(uid)
        loaded = [] if row is None else await self._loaded([row])
        return loaded[0] if loaded else None

    def __len__(self) -> int:
        return len(self._engine.table)

    # --- streams ------------------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        engine = self._engine
        rows = self._stream(engine.table.rows())
        # Until nobody can read from it any more, also if nobody ever does.
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
        check = StreamCheck(accounts, next_uid, next_timestamp_id)
        table = self._engine.empty_table()
        archived: deque[int] = deque()
        async for row in rows:
            check.row(row.record)
            table.add(row)
            if row.record.place is Place.ARCHIVED:
                archived.append(row.record.uid)
        check.end()
        self._check_empty()
        self._engine.adopt(table, accounts, archived, next_uid, next_timestamp_id)
        await self._finish(Done())
