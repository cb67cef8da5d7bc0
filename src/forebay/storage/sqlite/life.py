"""The life of a SQLite store: opened by one process, read into memory, changed, and read anew if a change failed.

Memory has the metadata of all groups. Every change is noted there (`journal`), handed to the writer as one piece of
work, and answered when it is on disk. What is done to groups is in `SQLiteStorage`, which builds on this.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

from forebay.codec import decode_account, decode_end, encode_account, encode_end
from forebay.errors import BufferClosed, DamagedData, InvalidConfig, StorageError
from forebay.ledger import GroupEnd, Place
from forebay.policy import Order
from forebay.storage.base import Settings
from forebay.storage.calls import CALL, Kept
from forebay.storage.local import LocalStorage
from forebay.storage.sqlite import schema
from forebay.storage.sqlite.journal import Journal, JournalTable, State
from forebay.storage.sqlite.place import OpenFiles, ProcessLock, check_file_system
from forebay.storage.sqlite.statements import emptied, in_turn, remembering, writing
from forebay.storage.sqlite.writer import Writer
from forebay.storage.table import Table
from forebay.threads import in_thread, see_through

__all__ = ["SQLiteLife"]

log = logging.getLogger(__name__)

T = TypeVar("T")
_SLICE_BYTES = 2**19  # of frames, encoded or decoded before the event loop gets its turn
_STREAM_GROUPS = 64
_UNKNOWN: Mapping[int, float] = {}


class SQLiteLife(LocalStorage):
    """A store that is opened and closed, and whose changes last."""

    durable = True

    holders_outlive_s: float | None = None
    """If set before it is opened: who held groups when the last process ended keeps them, and has so many seconds from
    then on to be heard of (`beat`, `open`). Otherwise holders are taken to have ended with that process."""

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
        self._files: OpenFiles | None = None
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
                self._writer = Writer(self._connect, self._check_in_place)
                await asyncio.wrap_future(self._writer.opened())
                self._settings = settings
                await self._load()
            except BaseException:
                await self._stop()
                raise

    async def close(self, owner: str) -> None:
        async with self._opening:
            if self._writer is not None:
                try:
                    await super().close(owner)
                except StorageError:  # what it held cannot be given back, but the store can be left
                    self._open.discard(owner)
                    raise
                finally:
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
        self._files = OpenFiles(self.path)
        return connection

    def _check_in_place(self) -> None:
        if self._files is not None:
            self._files.check_in_place()

    async def _load(self) -> None:
        """Read everything but payloads; what a process that is gone held comes back, at once or when its time is up."""
        self._adopt(await self._do(self._read_all, always=True))
        for owner in list(self._table.owners()):
            if self.holders_outlive_s is None:
                self._release(owner)
            else:
                self._deadlines[owner] = (self.holders_outlive_s, self._deadline_clock() + self.holders_outlive_s)
        await self._finish(())

    def _read_all(self, connection: sqlite3.Connection) -> State:
        meta: dict[str, Any] = dict(connection.execute("SELECT key, value FROM meta"))
        if meta.get("restoring"):
            log.warning("restore_incomplete path=%s the store is emptied", self.path)
            emptied(connection)
            meta = {key: value for key, value in meta.items() if key in ("store_id", "notes_ends")}
        accounts = dict(connection.execute("SELECT task_name, data FROM accounts"))
        rows = connection.execute(f"SELECT {', '.join(schema.COLUMNS)} FROM group_rows ORDER BY uid").fetchall()
        # The table is built here, in the writer's thread: the event loop has no part in it.
        records = [schema.record_of(row) for row in rows]
        table = JournalTable(self._settings.order)
        for record in records:
            table.load(record)
        archived = [record for record in records if record.place is Place.ARCHIVED]
        archived.sort(key=lambda record: (record.moved_at, record.uid))
        ends = dict(connection.execute("SELECT number, data FROM ends ORDER BY number"))
        return State(meta, accounts, table, deque(record.uid for record in archived), ends)

    def _adopt(self, state: State) -> None:
        """Make memory what is on disk."""
        meta = state.meta
        self._store_id = str(meta["store_id"])
        self._next_uid = int(meta.get("next_uid") or 1)
        self._next_timestamp_id = int(meta.get("next_timestamp_id") or 1)
        self._saved_step = meta.get("saved_step")
        self._notes_ends = bool(meta.get("notes_ends"))
        self._accounts = {task_name: decode_account(data) for task_name, data in state.accounts.items()}
        self._written_accounts = state.accounts
        self._written_meta = self._meta()
        self._table, self._archived = state.table, state.archived
        self._ends = {number: decode_end(data) for number, data in state.ends.items()}
        self._next_end = max([self._next_end, *(number + 1 for number in self._ends)])

    def _note_end(self, end: GroupEnd) -> None:
        self._rows.journal.ends[self._next_end] = encode_end(end)
        super()._note_end(end)

    def _drop_end(self, number: int) -> None:
        if number in self._ends:
            self._rows.journal.ends[number] = None
        super()._drop_end(number)

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
            "notes_ends": int(self._notes_ends),
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
        return writing(journal, accounts, changed_meta)

    async def _finish(self, tasks: Collection[str], answer: Kept | None = None) -> None:
        call = CALL.get()
        await self._commit(tasks, None if call is None or answer is None else remembering(call, answer))

    async def _commit(self, tasks: Collection[str], more: Callable[[sqlite3.Connection], None] | None) -> None:
        """Make what changed last, with something more in the same transaction; then the listeners hear of it."""
        size = sum(map(len, self._rows.journal.frames.values()))
        write = in_turn(self._take_changes(), more)
        cancelled = None
        if write is not None:
            _, cancelled = await self._see_through(self._submit(write, size=size))
        await super()._finish(tasks)
        if cancelled is not None:
            raise cancelled
