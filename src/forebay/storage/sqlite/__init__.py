"""SQLiteStorage: the embedded durable store. What it answered for survives `kill -9` (G7).

Decisions are made in memory, by the very rules and indexes of MemoryStorage, over the metadata of all groups; every
change is written to the database by one writer thread, and a call returns when its transaction is on disk. So
choosing and counting cost what they cost in memory, payloads stay on disk, and after a crash the store is as of the
last commit. One process writes; any number may read the file (views `groups` and `samples`).

A payload that was damaged on disk costs its group, which ends as failed with that reason, never the store.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

from msgspec.structs import replace

from forebay.codec import decode_account, decode_group, encode_account, encode_group
from forebay.errors import BufferClosed, DamagedData, InvalidConfig, InvalidInput, StorageError, UnreadableData
from forebay.ledger import MOVES, Account, End, Place
from forebay.policy import Order
from forebay.record import Record, Row, identify, number_rollouts
from forebay.rollout import Group
from forebay.storage.base import Arrival, Claim, Claimed, Content, Purpose, Revision, Settings, Snapshot
from forebay.storage.local import LocalStorage, claim_event
from forebay.storage.local_base import check_stream_end, check_stream_row
from forebay.storage.sqlite import schema
from forebay.storage.sqlite.journal import Journal, JournalTable, State, payload_of
from forebay.storage.sqlite.place import ProcessLock, check_file_system
from forebay.storage.sqlite.writer import Writer
from forebay.storage.table import Table
from forebay.threads import in_thread, see_through

__all__ = ["SQLiteStorage"]

log = logging.getLogger(__name__)

T = TypeVar("T")
_SLICE_BYTES = 2**19  # of frames, encoded or decoded before the event loop gets its turn
_STREAM_GROUPS = 64


class SQLiteStorage(LocalStorage):
    """A durable store in one file.

    `synchronous="NORMAL"` is faster and may lose the last commits in a power cut; never in a crash of the process.
    """

    durable = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Literal["FULL", "NORMAL"] = "FULL",
        clock: Callable[[], float] = time.time,
    ) -> None:
        if synchronous not in ("FULL", "NORMAL"):
            raise InvalidConfig(f"synchronous is {synchronous!r}; expected 'FULL' or 'NORMAL'")
        super().__init__(clock=clock)
        self.path = Path(path).resolve()  # the lock goes with the file, whatever links lead to it
        self._synchronous = synchronous
        self._writer: Writer | None = None
        self._lock: ProcessLock | None = None
        self._process = os.getpid()
        self._store_id: str | None = None
        self._written_accounts: dict[str, bytes] = {}
        self._written_meta: dict[str, int | None] = {}
        self._recovering = False
        self._opening = asyncio.Lock()

    def _make_table(self, order: Order) -> Table:
        return JournalTable(order)

    @property
    def store_id(self) -> str | None:
        """Given when the store was made; known once it is open."""
        return self._store_id

    @property
    def _rows(self) -> JournalTable:
        table = self._table
        assert isinstance(table, JournalTable)
        return table

    def _check(self) -> None:
        """Assert that indexes, counts and rows agree."""
        self._rows._check()

    # --- life ---------------------------------------------------------------------------------------

    async def open(self, owner: str, settings: Settings, lease_s: float | None) -> None:
        async with self._opening:
            await self._start(settings)
            await super().open(owner, settings, lease_s)

    async def _start(self, settings: Settings) -> None:
        if self._writer is None:
            check_file_system(self.path)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = ProcessLock(self.path.with_name(self.path.name + ".lock"))
            self._process = os.getpid()
            try:
                self._writer = Writer(self._connect)
                await asyncio.wrap_future(self._writer.opened())
                self._settings = settings
                await self._load()
            except BaseException:
                await self._stop()
                raise

    async def close(self, owner: str) -> None:
        async with self._opening:
            if self._writer is not None:
                await super().close(owner)
                if not self._open:
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
            connection.execute("PRAGMA wal_autocheckpoint = 4096")  # 64 MB; the writer folds the log earlier, by itself
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
        return connection

    async def _load(self) -> None:
        """Read everything but payloads; what a process that is gone held comes back."""
        self._adopt(await self._do(self._read_all, always=True))
        for owner in list(self._table.owners()):
            self._release(owner)
        await self._finish(())

    def _read_all(self, connection: sqlite3.Connection) -> State:
        meta: dict[str, Any] = dict(connection.execute("SELECT key, value FROM meta"))
        if meta.get("restoring"):
            log.warning("restore_incomplete path=%s the store is emptied", self.path)
            _emptied(connection)
            meta = {"store_id": meta["store_id"]}
        accounts = dict(connection.execute("SELECT task_name, data FROM accounts"))
        rows = connection.execute(f"SELECT {', '.join(schema.COLUMNS)} FROM group_rows ORDER BY uid").fetchall()
        # The table is built here, in the writer's thread: the event loop has no part in it.
        records = [schema.record_of(row) for row in rows]
        table = JournalTable(self._settings.order)
        for record in records:
            table.load(record)
        archived = [record for record in records if record.place is Place.ARCHIVED]
        archived.sort(key=lambda record: (record.moved_at, record.uid))
        return State(meta, accounts, table, deque(record.uid for record in archived))

    def _adopt(self, state: State) -> None:
        """Make memory what is on disk."""
        meta = state.meta
        self._store_id = str(meta["store_id"])
        self._next_uid = int(meta.get("next_uid") or 1)
        self._next_timestamp_id = int(meta.get("next_timestamp_id") or 1)
        self._saved_step = meta.get("saved_step")
        self._accounts = {task_name: decode_account(data) for task_name, data in state.accounts.items()}
        self._written_accounts = state.accounts
        self._written_meta = self._meta()
        self._table, self._archived = state.table, state.archived

    # --- the writer ---------------------------------------------------------------------------------

    def _submit(
        self, work: Callable[[sqlite3.Connection], T], *, alone: bool = False, always: bool = False, size: int = 0
    ) -> Future[T]:
        if os.getpid() != self._process:
            raise StorageError(f"{self.path} was opened before a fork; open it anew in the child process")
        if self._writer is None:
            raise BufferClosed(f"{self.path} is closed; open it first")
        return self._writer.submit(work, alone=alone, always=always, size=size)

    async def _do(self, work: Callable[[sqlite3.Connection], T], *, alone: bool = False, always: bool = False) -> T:
        """Submit work and see it through: a cancel is passed on only after the outcome is known."""
        result, cancelled = await self._see_through(self._submit(work, alone=alone, always=always))
        if cancelled is not None:
            raise cancelled
        return result

    async def _see_through(self, submitted: Future[T]) -> tuple[T, asyncio.CancelledError | None]:
        """What submitted work came to, and the cancel that arrived meanwhile."""
        future = asyncio.wrap_future(submitted)
        cancelled = await see_through(future)
        try:
            return future.result(), cancelled
        except StorageError:
            await self._read_anew()
            raise

    async def _read_anew(self) -> None:
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
            log.error("store_read_anew path=%s after a failed write", self.path)
        finally:
            self._recovering = False

    def _meta(self) -> dict[str, int | None]:
        return {
            "next_uid": self._next_uid,
            "next_timestamp_id": self._next_timestamp_id,
            "saved_step": self._saved_step,
        }

    def _take_changes(self) -> Callable[[sqlite3.Connection], None] | None:
        """Everything that changed in memory since the last time, as work for the writer."""
        journal = self._rows.journal
        accounts = {}
        for task_name, account in self._accounts.items():
            data = encode_account(account)
            if self._written_accounts.get(task_name) != data:
                accounts[task_name] = self._written_accounts[task_name] = data
        meta = self._meta()
        changed_meta = {key: value for key, value in meta.items() if self._written_meta.get(key) != value}
        if not journal and not accounts and not changed_meta:
            return None
        self._rows.journal = Journal()
        self._written_meta = meta

        def write(connection: sqlite3.Connection) -> None:
            removed = [(uid,) for uid, record in journal.records.items() if record is None]
            changed = [schema.values_of(record) for record in journal.records.values() if record is not None]
            if removed:
                connection.executemany("DELETE FROM group_rows WHERE uid = ?", removed)
                connection.executemany("DELETE FROM payloads WHERE uid = ?", removed)
            if changed:
                connection.executemany(schema.upsert_sql, changed)
            if journal.frames:
                connection.executemany(
                    "INSERT OR REPLACE INTO payloads (uid, frame, summary) VALUES (?, ?, ?)",
                    [(uid, frame, journal.summaries[uid]) for uid, frame in journal.frames.items()],
                )
            if accounts:
                connection.executemany("INSERT OR REPLACE INTO accounts VALUES (?, ?)", list(accounts.items()))
            if changed_meta:
                connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", list(changed_meta.items()))

        return write

    async def _finish(self, tasks: Collection[str]) -> None:
        size = sum(map(len, self._rows.journal.frames.values()))
        write = self._take_changes()
        if write is not None:
            _, cancelled = await self._see_through(self._submit(write, size=size))
            if cancelled is not None:
                raise cancelled
        await super()._finish(tasks)

    # --- payloads -----------------------------------------------------------------------------------

    def _kept(self, content: Content, task_name: str, group_id: int) -> Group:
        assert content.frame is not None
        return payload_of(content.frame, schema.summary_of(content.group))

    async def _encoded(self, contents: Sequence[Content]) -> list[Content]:
        """Contents with their frames, made before anything changes: what cannot be stored is refused here."""
        encoded = []
        pending = 0
        for content in contents:
            frame = encode_group(content.group)
            encoded.append(replace(content, frame=frame))
            pending += len(frame)
            if pending >= _SLICE_BYTES:
                pending = 0
                await asyncio.sleep(0)
        return encoded

    async def issue(
        self, task_name: str, contents: Sequence[Content], *, owner: str, cursor: int, source_state: bytes | None = None
    ) -> list[Record]:
        encoded = await self._encoded(contents)
        records = await super().issue(task_name, encoded, owner=owner, cursor=cursor, source_state=source_state)
        for content, record in zip(contents, records, strict=True):
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

    async def claim(self, claim: Claim) -> Claimed | None:
        while True:
            chosen = self._choose(claim)
            if chosen is None:
                return None
            before = [row for _, _, rows in chosen for row in rows]
            claimed = self._claim(claim, chosen)
            frames_of = _reading([row.record.uid for row in before])
            write = self._take_changes()

            def work(
                connection: sqlite3.Connection,
                frames_of: Callable[[sqlite3.Connection], dict[int, bytes]] = frames_of,
                write: Callable[[sqlite3.Connection], None] | None = write,
            ) -> dict[int, bytes]:
                frames = frames_of(connection)
                if write is not None:
                    write(connection)
                return frames

            frames, cancelled = await self._see_through(self._submit(work, size=4_096 * len(before)))
            if cancelled is not None:
                await self._undo(claim, before, frames)
                raise cancelled
            try:
                loaded, damaged = await self._decoded([row for rows in claimed.values() for row in rows], frames)
            except BaseException:  # intact, but not to be read here; or cancelled
                await self._undo(claim, before, frames)
                raise
            if damaged:
                await self._undo(claim, before, frames)
                await self._fail(damaged)
                continue
            by_uid = {row.record.uid: row for row in loaded}
            if claim.purpose is Purpose.TAKE:
                await LocalStorage._finish(self, [task_name for task_name, rows in claimed.items() if rows])
            return {
                task_name: [by_uid[row.record.uid] for row in rows if row.record.uid in by_uid]
                for task_name, rows in claimed.items()
            }

    async def _undo(self, claim: Claim, before: Sequence[Row], frames: Mapping[int, bytes]) -> None:
        """Put rows back as they were before a claim whose caller has gone, or that met a damaged payload."""
        for row in before:
            record = row.record
            target = MOVES[claim_event(claim.purpose, record.status)][1]
            if isinstance(target, End):
                self._account(record.task_name).end(target, -record.tokens, None, groups=-1)
            now = self._table.get(record.uid)
            if now is not None:
                if now.record.place is Place.ARCHIVED:
                    self._archived.remove(record.uid)
                self._table.replace(now.record, row)
            else:
                frame = frames.get(record.uid, b"")
                self._table.add(Row(record, payload_of(frame, _summary_of_frame(frame))))
        await self._finish({row.record.task_name for row in before})

    async def _fail(self, damaged: Mapping[int, str]) -> None:
        """Groups whose payload cannot be read end as failed."""
        tasks = set()
        for uid, error in damaged.items():
            row = self._table.get(uid)
            if row is not None:
                log.error("payload_damaged uid=%d group=%d %s", uid, row.record.group_id, error)
                tasks.add(row.record.task_name)
                if row.record.place is Place.ARCHIVED:  # it has ended already
                    self._archived.remove(uid)
                    self._table.remove((row.record,))
                else:
                    self._end(row, End.FAILED, "its payload was damaged on disk")
        await self._finish(tasks)

    async def _loaded(self, rows: list[Row]) -> list[Row]:
        frames = await self._do(_reading([row.record.uid for row in rows]))
        loaded, damaged = await self._decoded(rows, frames)
        if damaged:
            await self._fail(damaged)
        return loaded

    async def read(self, uid: int) -> Row | None:
        row = self._table.get(uid)
        loaded = [] if row is None else await self._loaded([row])
        return loaded[0] if loaded else None

    async def _decoded(self, rows: Sequence[Row], frames: Mapping[int, bytes]) -> tuple[list[Row], dict[int, str]]:
        loaded: list[Row] = []
        damaged: dict[int, str] = {}
        pending = 0
        for row in rows:
            record = row.record
            pending += len(frames.get(record.uid, b"")) + 4_096
            if pending >= _SLICE_BYTES:
                pending = 0
                await asyncio.sleep(0)
            try:
                frame = frames.get(record.uid)
                if frame is None:
                    raise DamagedData("its payload is missing")
                group = decode_group(frame)
                identify(group, record.task_name, record.group_id)
                number_rollouts(group, record.group_id)
                loaded.append(Row(record, group))
            except UnreadableData:
                raise
            except DamagedData as error:
                damaged[record.uid] = str(error)
        return loaded, damaged

    # --- streams ------------------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        write = self._take_changes()
        if write is not None:
            self._submit(write)
        rows = self._table.rows()
        accounts = {task_name: decode_account(encode_account(account)) for task_name, account in self._accounts.items()}
        next_uid, next_timestamp_id = self._next_uid, self._next_timestamp_id
        # Everything up to here is committed when this runs, and nothing after it: the reader sees exactly `rows`.
        reader = await self._do(self._pinned_reader, alone=True)
        return Snapshot(accounts, next_uid, next_timestamp_id, self._stream_from(reader, rows))

    def _pinned_reader(self, connection: sqlite3.Connection) -> sqlite3.Connection:
        reader = sqlite3.connect(
            f"{self.path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM meta").fetchone()
        return reader

    async def _stream_from(self, reader: sqlite3.Connection, rows: list[Row]) -> AsyncGenerator[Row, None]:
        try:
            for start in range(0, len(rows), _STREAM_GROUPS):
                part = rows[start : start + _STREAM_GROUPS]
                read = _reading([row.record.uid for row in part])
                frames = await in_thread(lambda read=read: read(reader))  # type: ignore[misc]
                loaded, damaged = await self._decoded(part, frames)
                for uid, error in damaged.items():
                    raise DamagedData(f"the payload of group uid {uid} was damaged on disk: {error}")
                for row in loaded:
                    yield row
        finally:
            reader.close()

    async def restore(
        self, accounts: Mapping[str, Account], next_uid: int, next_timestamp_id: int, rows: AsyncIterable[Row]
    ) -> None:
        if self._accounts or self._table.rows():
            raise InvalidInput("a stream is restored into an empty storage; this one has been used; nothing restored")
        await self._do(lambda connection: connection.execute("INSERT OR REPLACE INTO meta VALUES ('restoring', 1)"))
        table = JournalTable(self._settings.order)
        archived: deque[int] = deque()
        try:
            last_uid = 0
            part: list[tuple[list[object], tuple[int, bytes, str]]] = []
            async for row in rows:
                check_stream_row(row.record, last_uid, next_uid, next_timestamp_id, accounts, table)
                last_uid = row.record.uid
                frame = encode_group(row.group)
                part.append((schema.values_of(row.record), (last_uid, frame, schema.summary_of(row.group))))
                table.load(row.record)
                if row.record.place is Place.ARCHIVED:
                    archived.append(last_uid)
                if len(part) == _STREAM_GROUPS:
                    await self._do(_inserting(part))
                    part = []
            if part:
                await self._do(_inserting(part))
            check_stream_end(accounts, table)
        except BaseException:
            self._written_meta = {}
            await self._do(_emptied)
            raise
        self._table, self._archived = table, archived
        self._accounts = {task_name: decode_account(encode_account(account)) for task_name, account in accounts.items()}
        self._next_uid, self._next_timestamp_id = next_uid, next_timestamp_id
        write = self._take_changes()

        def finish(connection: sqlite3.Connection) -> None:
            if write is not None:
                write(connection)
            connection.execute("DELETE FROM meta WHERE key = 'restoring'")

        await self._do(finish)
        await LocalStorage._finish(self, list(accounts))


def _summary_of_frame(frame: bytes) -> str:
    try:
        return schema.summary_of(decode_group(frame))
    except DamagedData:
        return "[]"


def _reading(uids: Sequence[int]) -> Callable[[sqlite3.Connection], dict[int, bytes]]:
    def read(connection: sqlite3.Connection) -> dict[int, bytes]:
        frames: dict[int, bytes] = {}
        for start in range(0, len(uids), 500):
            part = uids[start : start + 500]
            marks = ", ".join("?" * len(part))
            frames.update(connection.execute(f"SELECT uid, frame FROM payloads WHERE uid IN ({marks})", part))
        return frames

    return read


def _inserting(part: Sequence[tuple[list[object], tuple[int, bytes, str]]]) -> Callable[[sqlite3.Connection], None]:
    def insert(connection: sqlite3.Connection) -> None:
        connection.executemany(schema.upsert_sql, [values for values, _ in part])
        connection.executemany("INSERT INTO payloads (uid, frame, summary) VALUES (?, ?, ?)", [p for _, p in part])

    return insert


def _emptied(connection: sqlite3.Connection) -> None:
    for table in ("group_rows", "payloads", "accounts"):
        connection.execute(f"DELETE FROM {table}")
    connection.execute("DELETE FROM meta WHERE key <> 'store_id'")
