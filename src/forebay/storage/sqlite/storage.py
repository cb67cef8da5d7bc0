"""SQLiteStorage: the embedded durable store. What it acknowledged survives `kill -9` (G7).

Decisions are made in memory, by the engine and indexes of MemoryStorage, over the metadata of all groups; one writer
thread writes every change to the database, and a call returns when its transaction is on disk. So choosing and counting
cost what they cost in memory, payloads stay on disk, and after a crash the store is as of the last commit. One process
writes; any number may read the file (views `groups` and `samples`).

A payload that was damaged on disk costs its group, which ends as failed with that reason, never the store.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from forebay.codec.frame import decode_group, encode_group
from forebay.codec.records import decode_account, decode_end, encode_account
from forebay.core.aio import in_thread, see_through
from forebay.core.capacity import Settings
from forebay.core.ledger import Account, Place, Record, Row, identify
from forebay.errors import BufferClosed, DamagedData, InvalidConfig, InvalidInput, StorageError
from forebay.storage.base import Arrival, Claim, Claimed, Draw, Rows
from forebay.storage.idempotency import (
    CALL,
    Answered,
    Call,
    CallMemory,
    Handed,
    Kept,
    Returned,
    claimed_rows,
    decode_kept,
    is_held,
    taken_for_good,
)
from forebay.storage.local.storage import LocalStorage
from forebay.storage.payloads import encoded, fail_damaged, read_rows
from forebay.storage.sqlite import schema
from forebay.storage.sqlite.lock import OpenFiles, ProcessLock, check_file_system
from forebay.storage.sqlite.writer import ON_DISK, JournaledEngine, JournalTable, Payload, Transaction, Writer
from forebay.storage.values import Content, Revision, Snapshot

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[Transaction], T]

_STREAM_GROUPS = 64


class _State(msgspec.Struct):
    """What a store holds, without payloads."""

    meta: dict[str, Any]
    accounts: dict[str, bytes]
    table: JournalTable
    archived: deque[int]
    ends: dict[int, bytes]


class SQLiteStorage(LocalStorage, CallMemory):
    """A durable store in one file.

    `synchronous="NORMAL"` is faster and may lose the last commits in a power cut; never in a crash of the process.
    `holders_outlive_s`: owners that held groups when the previous process ended keep them if they send a heartbeat
    within this many seconds. By default owners are taken to have ended with that process.
    """

    durable = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Literal["FULL", "NORMAL"] = "FULL",
        clock: Callable[[], float] = time.time,
        holders_outlive_s: float | None = None,
    ) -> None:
        if synchronous not in ("FULL", "NORMAL"):
            raise InvalidConfig(f"synchronous is {synchronous!r}; expected 'FULL' or 'NORMAL'")
        self._engine: JournaledEngine = JournaledEngine(clock=clock)
        super().__init__(self._engine)
        self.path = Path(path).resolve()  # the lock belongs to the file, whatever links lead to it
        self.holders_outlive_s = holders_outlive_s
        self._synchronous = synchronous
        self._writer: Writer | None = None
        self._lock: ProcessLock | None = None
        self._files: OpenFiles | None = None
        self._process = os.getpid()
        self._store_id: str | None = None
        self._written_accounts: dict[str, bytes] = {}
        self._written_meta: dict[str, int | None] = {}
        self._recovering = False
        self._restoring = False
        self._opening = asyncio.Lock()

    @property
    def store_id(self) -> str | None:
        """Given when the store was made; known once it is open."""
        return self._store_id

    # --- opening and closing ------------------------------------------------------------------------

    async def open(self, owner: str, settings: Settings, lease_s: float | None) -> None:
        async with self._opening:
            if self._writer is None:
                await self._start(settings)
            await super().open(owner, settings, lease_s)

    async def _start(self, settings: Settings) -> None:
        check_file_system(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = ProcessLock(self.path.with_name(self.path.name + ".lock"))
        self._process = os.getpid()
        try:
            self._writer = Writer(self._connect, self._check_in_place)
            await asyncio.wrap_future(self._writer.opened())
            self._engine.settings = settings
            self._adopt(await self._do(self._read_all, always=True))
            await self._release_previous()
        except BaseException:
            await self._stop()
            raise

    async def close(self, owner: str) -> None:
        async with self._opening:
            if self._writer is not None:
                try:
                    await super().close(owner)
                except StorageError:  # its groups cannot be given back, but the store can be closed
                    self._engine.owners.open.discard(owner)
                    raise
                finally:
                    if not self._engine.owners.open:
                        await self._stop()

    async def _stop(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            await in_thread(writer.close)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _connect(self) -> sqlite3.Connection:
        connection = schema.connect(self.path, self._synchronous)
        self._files = OpenFiles(self.path)
        return connection

    def _check_in_place(self) -> None:
        if self._files is not None:
            self._files.check_in_place()

    async def _release_previous(self) -> None:
        """Groups of the owners in the previous process come back, at once or at their deadline."""
        for owner in list(self._engine.table.owners()):
            if self.holders_outlive_s is None:
                self._engine.release(owner)
            else:
                self._engine.owners.expect(owner, self.holders_outlive_s)
        await self._finish()

    def _read_all(self, transaction: Transaction) -> _State:
        meta: dict[str, Any] = dict(transaction.execute("SELECT key, value FROM meta"))
        if meta.get("restoring"):
            log.warning("restore_incomplete path=%s the store is emptied", self.path)
            transaction.empty()
            meta = {key: value for key, value in meta.items() if key in ("store_id", "notes_ends")}
        accounts = dict(transaction.execute("SELECT task_name, data FROM accounts"))
        # The table is built here, in the writer's thread, and leaves the event loop free.
        records = transaction.records()
        table = JournalTable(self._engine.settings.order)
        for record in records:
            table.add(Row(record, ON_DISK))
        archived = [record for record in records if record.place is Place.ARCHIVED]
        archived.sort(key=lambda record: (record.moved_at, record.uid))
        ends = dict(transaction.execute("SELECT number, data FROM ends ORDER BY number"))
        return _State(meta, accounts, table, deque(record.uid for record in archived), ends)

    def _adopt(self, state: _State) -> None:
        """Replace the state in memory by the one on disk."""
        engine, meta = self._engine, state.meta
        engine.journal.take()
        self._store_id = str(meta["store_id"])
        engine.next_uid = int(meta.get("next_uid") or 1)
        engine.next_timestamp_id = int(meta.get("next_timestamp_id") or 1)
        engine.archive.saved_step = meta.get("saved_step")
        engine.accounts = {task_name: decode_account(data) for task_name, data in state.accounts.items()}
        saved = {task_name: account.saved_step for task_name, account in engine.accounts.items()}
        engine.archive.saved_steps = {task_name: step for task_name, step in saved.items() if step is not None}
        engine.archive.is_used = bool(engine.archive.saved_steps) or engine.archive.saved_step is not None
        engine.table, engine.archive.uids = state.table, state.archived
        state.table.journal = engine.journal
        outbox = engine.outbox
        outbox.noting = bool(meta.get("notes_ends"))
        outbox.ends = {number: decode_end(data) for number, data in state.ends.items()}
        outbox.next_number = max([outbox.next_number, *(number + 1 for number in outbox.ends)])
        self._written_accounts = state.accounts
        self._written_meta = self._meta()

    # --- the writer ---------------------------------------------------------------------------------

    def _submit(self, work: Work[T], *, alone: bool = False, always: bool = False, size: int = 0) -> Future[T]:
        if os.getpid() != self._process:
            raise StorageError(f"{self.path} was opened before a fork; open it again in the child process")
        if self._writer is None:
            raise BufferClosed(f"{self.path} is closed; open it first")
        return self._writer.submit(work, alone=alone, always=always, size=size)

    async def _do(self, work: Work[T], *, alone: bool = False, always: bool = False) -> T:
        """Submit work and wait for its outcome; a cancel is passed on only after that is known."""
        result, cancelled = await self._outcome(self._submit(work, alone=alone, always=always))
        if cancelled is not None:
            raise cancelled
        return result

    async def _outcome(self, submitted: Future[T]) -> tuple[T, asyncio.CancelledError | None]:
        """The result of submitted work, and the cancel that arrived meanwhile."""
        future = asyncio.wrap_future(submitted)
        cancelled = await see_through(future)
        try:
            return future.result(), cancelled
        except StorageError:
            await self._reload()
            raise

    async def _reload(self) -> None:
        """After a failed commit memory is ahead of the disk: replace it by the stored state.

        Until memory is replaced the writer refuses everything, so nothing that was decided on the lost state is
        ever written.
        """
        writer = self._writer
        if writer is None or self._recovering or not writer.failed:
            return
        self._recovering = True
        try:
            state = await asyncio.wrap_future(writer.submit(self._read_all, always=True))
            self._adopt(state)
            writer.recover()
            log.error("store_reloaded path=%s after a failed write", self.path)
        finally:
            self._recovering = False

    def _meta(self) -> dict[str, int | None]:
        engine = self._engine
        return {
            "next_uid": engine.next_uid,
            "next_timestamp_id": engine.next_timestamp_id,
            "saved_step": engine.archive.saved_step,
            "notes_ends": int(engine.outbox.noting),
        }

    def _take_changes(self) -> Work[None] | None:
        """Everything that changed in memory since the last time, as work for the writer."""
        accounts = {}
        for task_name, account in self._engine.accounts.items():
            data = encode_account(account)
            if self._written_accounts.get(task_name) != data:
                accounts[task_name] = self._written_accounts[task_name] = data
        meta = self._meta()
        changed_meta = {key: value for key, value in meta.items() if self._written_meta.get(key) != value}
        journal = self._engine.journal.take()
        if not journal and not accounts and not changed_meta:
            return None
        self._written_meta = meta
        return lambda transaction: transaction.write(journal, accounts, changed_meta)

    def _write(self, *works: Work[Any], size: int = 0) -> Future[list[Any]] | None:
        """Submit work and what changed in memory as one transaction; None if there is nothing to do."""
        size, changes = size + self._engine.journal.bytes, self._take_changes()
        every = works if changes is None else (*works, changes)
        return self._submit(lambda transaction: [work(transaction) for work in every], size=size) if every else None

    async def _finish(self, answer: Kept | None = None) -> None:
        await self._commit(*_remembering(answer))

    async def _commit(self, *works: Work[None]) -> None:
        """Do work and write what changed, in one transaction; then call the listeners."""
        tasks = self._engine.changed()
        submitted = self._write(*works)
        cancelled = None if submitted is None else (await self._outcome(submitted))[1]
        self._notify(tasks)
        if cancelled is not None:
            raise cancelled

    # --- payloads -----------------------------------------------------------------------------------

    async def _framed(self, contents: Sequence[Content]) -> list[Content]:
        """Contents with their frames, made before anything changes: what cannot be stored is refused here."""
        frames = await encoded(content.group for content in contents)
        return [replace(content, frame=frame) for content, frame in zip(contents, frames, strict=True)]

    async def issue(self, task_name: str, contents: Sequence[Content], draw: Draw) -> list[Record]:
        framed = await self._framed(contents)
        self._check_not_restoring()
        records = await super().issue(task_name, framed, draw)
        for content, record in zip(contents, records, strict=False):
            identify(content.group, task_name, record.group_id)
        return records

    async def put(self, arrivals: Sequence[Arrival], *, owner: str) -> list[Record]:
        contents = await self._framed([arrival.content for arrival in arrivals])
        framed = [replace(arrival, content=content) for arrival, content in zip(arrivals, contents, strict=True)]
        self._check_not_restoring()
        return await super().put(framed, owner=owner)

    async def revise(self, revisions: Sequence[Revision]) -> list[bool]:
        contents = iter(await self._framed([r.content for r in revisions if r.content is not None]))
        framed = [r if r.content is None else replace(r, content=next(contents)) for r in revisions]
        return await super().revise(framed)

    async def _loaded(self, rows: list[Row]) -> list[Row]:
        records = [row.record for row in rows]
        frames = await self._do(lambda transaction: transaction.frames([record.uid for record in records]))
        reading = await read_rows(records, frames)
        await fail_damaged(self, self.path, reading.damaged)
        return reading.rows

    # --- claims -------------------------------------------------------------------------------------

    async def claim(self, claim: Claim) -> Claimed:
        while True:
            claimed = self._engine.claim(claim)
            if not any((claimed.rows or {}).values()):
                await self._finish()
                return claimed
            assert claimed.rows is not None
            loaded = await self._claimed(claim, claimed.rows)
            if loaded is not None:
                return replace(claimed, rows=loaded)

    async def _claimed(self, claim: Claim, rows: Rows) -> Rows | None:
        """Write a claim and read its payloads, in one transaction; None if some are damaged: then claim again."""
        call, tasks = CALL.get(), self._engine.changed()
        handed = Handed.of(claim, {task_name: [row.record for row in found] for task_name, found in rows.items()})
        claimed = [row.record for found in rows.values() for row in found]
        uids = [record.uid for record in claimed]
        submitted = self._write(lambda t: t.frames(uids), *_remembering(handed), size=4_096 * len(uids))
        assert submitted is not None
        (frames, *_), cancelled = await self._outcome(submitted)
        try:
            if cancelled is not None:
                raise cancelled
            reading = await read_rows(claimed, frames)
        except BaseException:  # cancelled; or intact, but not readable here
            await self._put_back(claim, rows, frames, call)
            raise
        if reading.damaged:
            await self._put_back(claim, rows, frames, call)
            await fail_damaged(self, self.path, reading.damaged)
            return None
        self._notify(tasks)
        return claimed_rows(handed, reading.rows)

    async def undo(self, claim: Claim, rows: Rows) -> None:
        ended = [row for found in rows.values() for row in found if taken_for_good(row.record)]
        frames = await encoded(row.group for row in ended)
        by_uid = {row.record.uid: frame for row, frame in zip(ended, frames, strict=True)}
        await self._put_back(claim, rows, by_uid, CALL.get())

    async def _put_back(self, claim: Claim, rows: Rows, frames: Mapping[int, bytes], call: Call | None) -> None:
        """Undo a claim, and drop its answer. `frames`: the payloads of groups that were taken for good."""
        table = self._engine.table
        gone = [row.record.uid for found in rows.values() for row in found if table.get(row.record.uid) is None]
        self._engine.undo(claim, rows)
        for uid in gone:
            if table.get(uid) is not None:
                self._engine.journal.payloads[uid] = _payload(frames.get(uid, b""))
        await self._commit(*([] if call is None else [lambda t: t.retract(call.client, call.sequence)]))

    # --- calls that may come twice --------------------------------------------------------------------

    async def answer(self, client: str, sequence: int) -> Answered | None:
        frames = await self._do(lambda transaction: transaction.remembered(client, sequence))
        if 0 not in frames:
            return None
        kept = decode_kept(frames.pop(0))
        if not isinstance(kept, Handed):
            return Answered(kept.value)
        held = [record.uid for record in kept.held()]
        if held:
            frames |= await self._do(lambda transaction: transaction.frames(held))
        handed = [record for records in kept.records.values() for record in records]
        reading = await read_rows(handed, frames)
        here = [row for row in reading.rows if taken_for_good(row.record) or self._is_held(row.record)]
        if len(here) < len(handed):
            # Its caller cannot have all of them: it gets none, and holds none that it never learns of.
            rows = claimed_rows(kept, [Row(record, ()) for record in handed])
            await self._put_back(kept.claim, rows, frames, Call(client, sequence, 0))
            raise kept.lost(len(handed) - len(here))
        return Answered(Claimed(claimed_rows(kept, here)))

    def _is_held(self, claimed: Record) -> bool:
        row = self._engine.table.get(claimed.uid)
        return row is not None and is_held(row.record, claimed)

    async def forget(self, client: str) -> None:
        await self._do(lambda transaction: transaction.forget(client))

    # --- streams ------------------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        engine = self._engine
        self._write()
        rows = engine.table.rows()
        accounts = {name: decode_account(encode_account(account)) for name, account in engine.accounts.items()}
        next_uid, next_timestamp_id = engine.next_uid, engine.next_timestamp_id
        # Everything up to here is committed when this runs, and nothing after it: the reader sees exactly `rows`.
        reader = await self._do(self._pinned_reader, alone=True)
        return Snapshot(accounts, next_uid, next_timestamp_id, self._stream_from(reader, rows))

    def _pinned_reader(self, transaction: Transaction) -> sqlite3.Connection:
        reader = sqlite3.connect(
            f"{self.path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM meta").fetchone()
        return reader

    async def _stream_from(self, reader: sqlite3.Connection, rows: list[Row]) -> AsyncGenerator[Row, None]:
        transaction = Transaction(reader)
        try:
            for start in range(0, len(rows), _STREAM_GROUPS):
                part = [row.record for row in rows[start : start + _STREAM_GROUPS]]
                frames = await in_thread(partial(transaction.frames, [record.uid for record in part]))
                reading = await read_rows(part, frames)
                for uid, error in reading.damaged.items():
                    raise DamagedData(f"the payload of group uid {uid} was damaged on disk: {error}")
                for row in reading.rows:
                    yield row
        finally:
            reader.close()

    async def restore(
        self, accounts: Mapping[str, Account], next_uid: int, next_timestamp_id: int, rows: AsyncIterable[Row]
    ) -> None:
        self._check_empty()
        self._check_not_restoring()
        self._restoring = True
        table = JournalTable(self._engine.settings.order)
        try:
            await self._do(Transaction.begin_restore)
            await self._fill(table, accounts, next_uid, next_timestamp_id, self._stored(rows))
        except BaseException:
            self._written_meta, self._written_accounts = {}, {}
            await self._do(Transaction.empty)
            await self._finish()  # limits that were set before
            raise
        finally:
            self._restoring = False
        table.journal = self._engine.journal
        await self._commit(*_remembering(Returned("restore", None)), Transaction.end_restore)

    def _check_not_restoring(self) -> None:
        if self._restoring:  # a restore that fails empties the store
            raise InvalidInput(f"{self.path} is being restored; put and draw when that has ended")

    async def _stored(self, rows: AsyncIterable[Row]) -> AsyncIterator[Row]:
        """Rows as they come; after they were checked they are written."""
        part: list[Row] = []
        async for row in rows:
            yield row
            part.append(row)
            if len(part) == _STREAM_GROUPS:
                await self._insert(part)
                part = []
        await self._insert(part)

    async def _insert(self, rows: Sequence[Row]) -> None:
        payloads = {row.record.uid: (encode_group(row.group), schema.summary_of(row.group)) for row in rows}
        await self._do(lambda transaction: transaction.insert([row.record for row in rows], payloads))


def _remembering(answer: Kept | None) -> list[Work[None]]:
    """The work that remembers an answer, if the operation belongs to a call that may be repeated."""
    call = CALL.get()
    return [] if call is None or answer is None else [lambda transaction: transaction.remember(call, answer)]


def _payload(frame: bytes) -> Payload:
    try:
        return frame, schema.summary_of(decode_group(frame))
    except DamagedData:
        return frame, "[]"
