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
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from forebay.codec.frame import decode_group, encode_group
from forebay.codec.records import decode_account, decode_end, encode_account
from forebay.core.aio import in_thread, see_through
from forebay.core.capacity import Settings
from forebay.core.ledger import Account, Place, Record, Row, identify
from forebay.errors import BufferClosed, DamagedData, InvalidConfig, StorageError
from forebay.storage.base import Arrival, Claim, Claimed, Content, Revision, Rows, Snapshot
from forebay.storage.idempotency import (
    CALL,
    Answered,
    Call,
    CallMemory,
    Done,
    Handed,
    Kept,
    claimed_rows,
    decode_kept,
    is_held,
    taken_for_good,
    value_of,
)
from forebay.storage.local.storage import LocalStorage
from forebay.storage.payloads import Reading, Slices
from forebay.storage.rules import StreamCheck
from forebay.storage.sqlite import schema
from forebay.storage.sqlite.journal import JournaledEngine, JournalTable, Payload
from forebay.storage.sqlite.lock import OpenFiles, ProcessLock, check_file_system
from forebay.storage.sqlite.transaction import Transaction
from forebay.storage.sqlite.writer import Writer

__all__ = ["SQLiteStorage"]

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[Transaction], T]

_STREAM_GROUPS = 64
_NO_TIMES: Mapping[int, float] = {}


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
        self._opening = asyncio.Lock()

    @property
    def store_id(self) -> str | None:
        """Given when the store was made; known once it is open."""
        return self._store_id

    def _check(self) -> None:
        """Assert that indexes, counts and rows agree."""
        table = self._engine.table
        assert isinstance(table, JournalTable)
        table._check()

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
            await self._load()
        except BaseException:
            await self._stop()
            raise

    async def close(self, owner: str) -> None:
        async with self._opening:
            if self._writer is not None:
                try:
                    await super().close(owner)
                except StorageError:  # its groups cannot be given back, but the store can be closed
                    self._engine.open.discard(owner)
                    raise
                finally:
                    if not self._engine.open:
                        await self._stop()

    async def _stop(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            await in_thread(writer.close)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _connect(self) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, cached_statements=64)
        except sqlite3.Error as error:
            raise StorageError(f"{self.path} cannot be opened: {error}") from error
        try:
            connection.execute("PRAGMA page_size = 16384")  # of a new store; payloads are large
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise InvalidConfig(f"{self.path}: this file system does not allow SQLite's write-ahead log ({mode})")
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            connection.execute("PRAGMA journal_size_limit = 67108864")
            connection.execute("PRAGMA wal_autocheckpoint = 4096")  # 64 MB; the writer checkpoints earlier by itself
            connection.execute("PRAGMA cache_size = -65536")  # a batch of payloads must not spill
            connection.execute("PRAGMA temp_store = MEMORY")
            schema.create(connection)
        except sqlite3.OperationalError as error:
            connection.close()
            raise StorageError(f"{self.path} cannot be opened: {error}") from error
        except sqlite3.DatabaseError as error:
            connection.close()
            raise DamagedData(f"{self.path} is not a SQLite database that can be read: {error}") from error
        except BaseException:
            connection.close()
            raise
        self._files = OpenFiles(self.path)
        return connection

    def _check_in_place(self) -> None:
        if self._files is not None:
            self._files.check_in_place()

    async def _load(self) -> None:
        """Read everything but payloads; groups of owners that are gone come back, at once or at their deadline."""
        engine = self._engine
        self._adopt(await self._do(self._read_all, always=True))
        for owner in list(engine.table.owners()):
            if self.holders_outlive_s is None:
                engine.release(owner)
            else:
                deadline = engine.deadline_clock() + self.holders_outlive_s
                engine.deadlines[owner] = (self.holders_outlive_s, deadline)
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
        table = JournalTable(self._engine.settings.order, self._engine.journal)
        for record in records:
            table.load(record)
        archived = [record for record in records if record.place is Place.ARCHIVED]
        archived.sort(key=lambda record: (record.moved_at, record.uid))
        ends = dict(transaction.execute("SELECT number, data FROM ends ORDER BY number"))
        return _State(meta, accounts, table, deque(record.uid for record in archived), ends)

    def _adopt(self, state: _State) -> None:
        """Make memory what is on disk."""
        engine, meta = self._engine, state.meta
        engine.journal.take()
        self._store_id = str(meta["store_id"])
        engine.next_uid = int(meta.get("next_uid") or 1)
        engine.next_timestamp_id = int(meta.get("next_timestamp_id") or 1)
        engine.saved_step = meta.get("saved_step")
        engine.accounts = {task_name: decode_account(data) for task_name, data in state.accounts.items()}
        engine.table, engine.archived = state.table, state.archived
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
        """After a failed commit memory is ahead of the disk: forget it, and start from what is stored.

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
            "saved_step": engine.saved_step,
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

    async def _finish(self, answer: Kept | None = None) -> None:
        call = CALL.get()
        remember = None
        if call is not None and answer is not None:
            remember = _remembering(call, answer)
        await self._commit(remember)

    async def _commit(self, more: Work[None] | None) -> None:
        """Write what changed, and something more in the same transaction; then call the listeners."""
        tasks, size = self._engine.changed(), self._engine.journal.bytes
        write = _in_turn(self._take_changes(), more)
        cancelled = None
        if write is not None:
            _, cancelled = await self._outcome(self._submit(write, size=size))
        self._notify(tasks)
        if cancelled is not None:
            raise cancelled

    # --- payloads -----------------------------------------------------------------------------------

    async def _encoded(self, contents: Sequence[Content]) -> list[Content]:
        """Contents with their frames, made before anything changes: what cannot be stored is refused here."""
        encoded = []
        slices = Slices()
        for content in contents:
            frame = encode_group(content.group)
            encoded.append(replace(content, frame=frame))
            await slices.add(len(frame))
        return encoded

    async def issue(
        self, task_name: str, contents: Sequence[Content], *, owner: str, cursor: int, source_state: bytes | None = None
    ) -> list[Record]:
        encoded = await self._encoded(contents)
        records = await super().issue(task_name, encoded, owner=owner, cursor=cursor, source_state=source_state)
        for content, record in zip(contents, records, strict=False):
            identify(content.group, task_name, record.group_id)
        return records

    async def put(self, arrivals: Sequence[Arrival], *, owner: str) -> list[Record]:
        encoded = await self._encoded([arrival.content for arrival in arrivals])
        return await super().put(
            [replace(arrival, content=content) for arrival, content in zip(arrivals, encoded, strict=True)], owner=owner
        )

    async def revise(self, revisions: Sequence[Revision]) -> list[bool]:
        contents = iter(await self._encoded([r.content for r in revisions if r.content is not None]))
        encoded = [r if r.content is None else replace(r, content=next(contents)) for r in revisions]
        return await super().revise(encoded)

    async def _loaded(self, rows: list[Row]) -> list[Row]:
        frames = await self._do(lambda transaction: transaction.frames([row.record.uid for row in rows]))
        reading = await self._decoded(rows, frames)
        if reading.damaged:
            await self._fail_damaged(reading.damaged)
        return reading.rows

    async def _decoded(self, rows: Sequence[Row], frames: Mapping[int, bytes]) -> Reading:
        reading = Reading()
        for row in rows:
            await reading.add(row.record, frames.get(row.record.uid))
        return reading

    async def _fail_damaged(self, damaged: Mapping[int, str]) -> None:
        """Groups whose payload cannot be read end as failed."""
        for uid, error in damaged.items():
            log.error("payload_damaged path=%s uid=%d %s", self.path, uid, error)
        await self.fail(dict.fromkeys(damaged, "its payload was damaged on disk"))

    # --- claims -------------------------------------------------------------------------------------

    async def claim(self, claim: Claim) -> Claimed:
        while True:
            chosen = self._engine.choose(claim)
            moved_at = {row.record.uid: row.record.moved_at for _, _, rows in chosen or () for row in rows}
            claimed = self._engine.take(claim, chosen)
            rows = claimed.rows
            if not moved_at or rows is None:
                await self._finish()
                return claimed
            loaded = await self._claimed(claim, rows, moved_at)
            if loaded is not None:
                return replace(claimed, rows=loaded)

    async def _claimed(self, claim: Claim, rows: Rows, moved_at: Mapping[int, float]) -> Rows | None:
        """Write a claim and read its payloads, in one transaction; None if some are damaged: then claim again."""
        call = CALL.get()
        tasks = self._engine.changed()
        records = {task_name: [row.record for row in found] for task_name, found in rows.items()}
        remember = None if call is None else _remembering(call, Handed.of(claim, records))
        write = _in_turn(remember, self._take_changes())

        def work(transaction: Transaction) -> dict[int, bytes]:
            frames = transaction.frames(list(moved_at))
            if write is not None:
                write(transaction)
            return frames

        frames, cancelled = await self._outcome(self._submit(work, size=4_096 * len(moved_at)))
        try:
            if cancelled is not None:
                raise cancelled
            reading = await self._decoded([row for found in rows.values() for row in found], frames)
        except BaseException:  # cancelled; or intact, but not readable here
            await self._put_back(rows, frames, call, moved_at)
            raise
        if reading.damaged:
            await self._put_back(rows, frames, call, moved_at)
            await self._fail_damaged(reading.damaged)
            return None
        self._notify(tasks)
        by_uid = {row.record.uid: row for row in reading.rows}
        return {name: [by_uid[row.record.uid] for row in found] for name, found in rows.items()}

    async def undo(self, claim: Claim, rows: Rows) -> None:
        frames: dict[int, bytes] = {}
        slices = Slices()
        for row in [row for found in rows.values() for row in found if taken_for_good(row.record)]:
            frames[row.record.uid] = encode_group(row.group)
            await slices.add(len(frames[row.record.uid]))
        await self._put_back(rows, frames, CALL.get())

    async def _put_back(
        self, rows: Rows, frames: Mapping[int, bytes], call: Call | None, moved_at: Mapping[int, float] = _NO_TIMES
    ) -> None:
        """Undo a claim, and drop its answer. `frames`: the payloads of groups that were taken for good."""
        taken = [row.record.uid for found in rows.values() for row in found if taken_for_good(row.record)]
        gone = [uid for uid in taken if self._engine.table.get(uid) is None]
        self._engine.undo(rows, moved_at)
        for uid in gone:
            if self._engine.table.get(uid) is not None:
                self._engine.journal.payloads[uid] = _payload(frames.get(uid, b""))
        await self._commit(None if call is None else lambda t: t.retract(call.client, call.sequence))

    # --- calls that may come twice --------------------------------------------------------------------

    async def answer(self, client: str, sequence: int) -> Answered | None:
        frames = await self._do(lambda transaction: transaction.remembered(client, sequence))
        if 0 not in frames:
            return None
        kept = decode_kept(frames.pop(0))
        if not isinstance(kept, Handed):
            return Answered(value_of(kept))
        held = [record.uid for record in kept.held()]
        if held:
            frames |= await self._do(lambda transaction: transaction.frames(held))
        handed = [Row(record, ()) for records in kept.records.values() for record in records]
        reading = await self._decoded(handed, frames)
        here = [row for row in reading.rows if taken_for_good(row.record) or self._is_held(row.record)]
        if len(here) < len(handed):
            # Its caller cannot have all of them: it gets none, and holds none that it never learns of.
            await self._put_back(claimed_rows(kept, handed), frames, Call(client, sequence, 0))
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
        write = self._take_changes()
        if write is not None:
            self._submit(write)
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
                part = rows[start : start + _STREAM_GROUPS]
                uids = [row.record.uid for row in part]
                frames = await in_thread(lambda uids=uids: transaction.frames(uids))  # type: ignore[misc]
                reading = await self._decoded(part, frames)
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
        await self._do(Transaction.begin_restore)
        check = StreamCheck(accounts, next_uid, next_timestamp_id)
        table = JournalTable(self._engine.settings.order, self._engine.journal)
        archived: deque[int] = deque()
        try:
            part: list[Row] = []
            async for row in rows:
                check.row(row.record)
                table.load(row.record)
                if row.record.place is Place.ARCHIVED:
                    archived.append(row.record.uid)
                part.append(row)
                if len(part) == _STREAM_GROUPS:
                    await self._insert(part)
                    part = []
            await self._insert(part)
            check.end()
        except BaseException:
            self._written_meta, self._written_accounts = {}, {}
            await self._do(Transaction.empty)
            await self._finish()  # limits that were set before
            raise
        self._engine.adopt(table, accounts, archived, next_uid, next_timestamp_id)
        call = CALL.get()
        remember = None if call is None else _remembering(call, Done())
        await self._commit(_in_turn(remember, Transaction.end_restore))

    async def _insert(self, rows: Sequence[Row]) -> None:
        payloads = {row.record.uid: (encode_group(row.group), schema.summary_of(row.group)) for row in rows}
        await self._do(lambda transaction: transaction.insert([row.record for row in rows], payloads))


def _in_turn(*works: Work[None] | None) -> Work[None] | None:
    """Several pieces of work as one; None if there is none."""
    given = [work for work in works if work is not None]
    if not given:
        return None

    def run(transaction: Transaction) -> None:
        for work in given:
            work(transaction)

    return run


def _remembering(call: Call, kept: Kept) -> Work[None]:
    return lambda transaction: transaction.remember(call, kept)


def _payload(frame: bytes) -> Payload:
    try:
        return frame, schema.summary_of(decode_group(frame))
    except DamagedData:
        return frame, "[]"
