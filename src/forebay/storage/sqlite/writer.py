"""How changes get from memory to disk: noted in a journal, written by one connection in a dedicated thread.

The table of a SQLite store is the one of MemoryStorage without payloads. Table, engine and outbox note every change in
one journal, and the storage hands the journal to the writer, which writes it in one transaction. Jobs run in the order
in which they were submitted. Jobs that wait during a commit share the next one (group commit): a job is answered after
the transaction that holds it is on disk. A failing transaction is rolled back completely, and everything that was built
on it fails with it, until `recover` is called: the state in memory then differs from the disk, and is read again.

The answers of calls (see `storage.idempotency`) are rows of the table `calls`: part 0 is the answer; with that of a
claim are the frames of the groups that it took for good, each under the uid of its group.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from forebay.codec.records import encode_end
from forebay.core.capacity import Settings
from forebay.core.ledger import GroupEnd, Record, Row
from forebay.core.policy import Order
from forebay.core.rollout import Group
from forebay.errors import StorageError, StorageVanished
from forebay.storage.idempotency import Call, Handed, Kept
from forebay.storage.local.engine import Engine
from forebay.storage.local.memory import MemoryTable
from forebay.storage.local.owners import Outbox
from forebay.storage.local.table import Table
from forebay.storage.sqlite import schema
from forebay.storage.sqlite.schema import summary_of
from forebay.storage.values import Content

ON_DISK: Group = ()
"""The payload of a row whose samples are on disk."""

Payload = tuple[bytes, str]
"""A frame and the summary of its samples."""


class Journal:
    """Changes since the journal was last handed to the writer."""

    def __init__(self) -> None:
        self.records: dict[int, Record | None] = {}  # None: removed
        self.payloads: dict[int, Payload] = {}
        self.ends: dict[int, bytes | None] = {}  # None: removed

    def __bool__(self) -> bool:
        return bool(self.records) or bool(self.ends)

    def take(self) -> Journal:
        """The changes until now; this journal is empty afterwards."""
        taken = Journal()
        taken.records, self.records = self.records, taken.records
        taken.payloads, self.payloads = self.payloads, taken.payloads
        taken.ends, self.ends = self.ends, taken.ends
        return taken

    @property
    def bytes(self) -> int:
        """The size of the frames that are to be written."""
        return sum(len(frame) for frame, _ in self.payloads.values())


class JournalTable(MemoryTable):
    """The indexes of memory without payloads. Every change is noted, once there is a journal."""

    def __init__(self, order: Order, journal: Journal | None = None) -> None:
        super().__init__(order)
        self.journal = journal

    def add(self, row: Row) -> None:
        super().add(Row(row.record, ON_DISK))
        if self.journal is not None:
            self.journal.records[row.record.uid] = row.record

    def replace(self, old: Record, row: Row) -> None:
        super().replace(old, Row(row.record, ON_DISK))
        if self.journal is not None:
            self.journal.records[row.record.uid] = row.record

    def remove(self, records: Sequence[Record]) -> None:
        super().remove(records)
        if self.journal is not None:
            for record in records:
                self.journal.records[record.uid] = None
                self.journal.payloads.pop(record.uid, None)


class _JournaledOutbox(Outbox):
    def __init__(self, journal: Journal) -> None:
        super().__init__(bounded=False)
        self._journal = journal

    def note(self, end: GroupEnd) -> None:
        self._journal.ends[self.next_number] = encode_end(end)
        super().note(end)

    def drop(self, number: int) -> None:
        if number in self.ends:
            self._journal.ends[number] = None
        super().drop(number)


class JournaledEngine(Engine):
    """An engine whose changes are noted, payloads as frames."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self.journal = Journal()

        def make_table(settings: Settings) -> Table:
            return JournalTable(settings.order, self.journal)

        super().__init__(make_table, durable=True, clock=clock)
        self.outbox = _JournaledOutbox(self.journal)

    def _keep(self, record: Record, content: Content) -> Group:
        assert content.frame is not None
        self.journal.payloads[record.uid] = (content.frame, summary_of(content.group))
        return ON_DISK

    def _handed(self, rows: list[Row]) -> list[Row]:
        return rows  # their payloads are read from disk, for the caller alone


_INSERT_PAYLOAD = "INSERT OR REPLACE INTO payloads (uid, frame, summary) VALUES (?, ?, ?)"
_INSERT_CALL = "INSERT INTO calls (client, sequence, part, data)"


class Transaction:
    """SQL over the connection of the writer."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.execute = connection.execute

    # --- groups ---------------------------------------------------------------------------------------

    def write(self, journal: Journal, accounts: Mapping[str, bytes], meta: Mapping[str, int | None]) -> None:
        """Write what changed in memory."""
        removed = [(uid,) for uid, record in journal.records.items() if record is None]
        changed = [record for record in journal.records.values() if record is not None]
        self._many("DELETE FROM group_rows WHERE uid = ?", removed)
        self._many("DELETE FROM payloads WHERE uid = ?", removed)
        self.insert(changed, journal.payloads)
        self._many("DELETE FROM ends WHERE number = ?", [(n,) for n, data in journal.ends.items() if data is None])
        ends = [(number, data) for number, data in journal.ends.items() if data is not None]
        self._many("INSERT INTO ends (number, data) VALUES (?, ?)", ends)
        self._many("INSERT OR REPLACE INTO accounts VALUES (?, ?)", accounts.items())
        self._many("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta.items())

    def insert(self, records: Iterable[Record], payloads: Mapping[int, Payload]) -> None:
        """Write rows and payloads."""
        self._many(schema.upsert_sql, [schema.values_of(record) for record in records])
        self._many(_INSERT_PAYLOAD, [(uid, frame, summary) for uid, (frame, summary) in payloads.items()])

    def _many(self, sql: str, values: Iterable[Any]) -> None:
        values = list(values)
        if values:
            self.connection.executemany(sql, values)

    def frames(self, uids: Sequence[int]) -> dict[int, bytes]:
        """The frames of groups, as far as they exist."""
        frames: dict[int, bytes] = {}
        for start in range(0, len(uids), 500):
            part = uids[start : start + 500]
            marks = ", ".join("?" * len(part))
            frames.update(self.execute(f"SELECT uid, frame FROM payloads WHERE uid IN ({marks})", part))
        return frames

    def records(self) -> list[Record]:
        """The records of all rows, in order of uid."""
        rows = self.execute(f"SELECT {', '.join(schema.COLUMNS)} FROM group_rows ORDER BY uid").fetchall()
        return [schema.record_of(row) for row in rows]

    # --- restoring ------------------------------------------------------------------------------------

    def begin_restore(self) -> None:
        """Note that rows are being restored: a store that is found like this is emptied."""
        self.execute("INSERT OR REPLACE INTO meta VALUES ('restoring', 1)")

    def end_restore(self) -> None:
        """Note that the restore is complete."""
        self.execute("DELETE FROM meta WHERE key = 'restoring'")

    def empty(self) -> None:
        """Delete all groups and accounts."""
        for table in ("group_rows", "payloads", "accounts"):
            self.execute(f"DELETE FROM {table}")
        self.execute("DELETE FROM meta WHERE key NOT IN ('store_id', 'notes_ends')")

    # --- answers --------------------------------------------------------------------------------------

    def remember(self, call: Call, kept: Kept) -> None:
        """Write the answer of a call, and drop those that its client has seen. Before taken payloads are removed."""
        self.execute("DELETE FROM calls WHERE client = ? AND sequence <= ?", (call.client, call.confirmed))
        self.retract(call.client, call.sequence)
        self.execute(f"{_INSERT_CALL} VALUES (?, ?, 0, ?)", (call.client, call.sequence, msgspec.msgpack.encode(kept)))
        if isinstance(kept, Handed):
            taken = [(call.client, call.sequence, record.uid) for record in kept.ended()]
            self._many(f"{_INSERT_CALL} SELECT ?, ?, uid, frame FROM payloads WHERE uid = ?", taken)

    def remembered(self, client: str, sequence: int) -> dict[int, bytes]:
        """What is stored of a call: under 0 its answer, under their uids the frames of groups that it took for good."""
        # Not decoded here: a damaged answer must not cost the transaction that others share.
        return dict(self.execute("SELECT part, data FROM calls WHERE client = ? AND sequence = ?", (client, sequence)))

    def retract(self, client: str, sequence: int) -> None:
        """Drop the answer of a call that was undone."""
        self.execute("DELETE FROM calls WHERE client = ? AND sequence = ?", (client, sequence))

    def forget(self, client: str) -> None:
        """Drop all answers of a client."""
        self.execute("DELETE FROM calls WHERE client = ?", (client,))


T = TypeVar("T")

_MAX_BATCH = 256
_CHECKPOINT_BYTES = 4 * 2**20
"""How much may be written before the log is folded into the database, after the answers are out."""


class _Job:
    def __init__(self, work: Callable[[Transaction], Any], *, alone: bool, always: bool, size: int) -> None:
        self.work = work
        self.size = size
        self.alone = alone or always
        self.always = always
        self.future: Future[Any] = Future()


class Writer:
    """A thread that owns a connection."""

    def __init__(self, connect: Callable[[], sqlite3.Connection], check: Callable[[], None]) -> None:
        """`check` is called before every commit, which does not happen if it raises."""
        self._check = check
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._failure: StorageError | None = None
        self._written = 0
        self._opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(connect,), name="forebay-sqlite", daemon=True)
        self._thread.start()

    def opened(self) -> Future[None]:
        """Done when the connection is open; carries the error if it cannot be opened."""
        return self._opened

    def submit(
        self, work: Callable[[Transaction], T], *, alone: bool = False, always: bool = False, size: int = 0
    ) -> Future[T]:
        """Run work, which writes about `size` bytes, inside a transaction.

        `alone`: outside of one, after everything before it is committed. `always`: like that, also after a failure.
        """
        job = _Job(work, alone=alone, always=always, size=size)
        self._queue.put(job)
        return job.future

    @property
    def failed(self) -> bool:
        """Whether a transaction failed, so that everything is refused until `recover`."""
        return self._failure is not None

    def recover(self) -> None:
        """Accept work again after a failure."""
        self._failure = None

    def close(self) -> None:
        """Finish all submitted jobs, then close the connection. Waits."""
        self._queue.put(None)
        self._thread.join()

    # --- in the thread ------------------------------------------------------------------------------

    def _run(self, connect: Callable[[], sqlite3.Connection]) -> None:
        try:
            connection = connect()
        except BaseException as error:
            self._opened.set_exception(error)
            return
        self._opened.set_result(None)
        try:
            while self._step(connection):
                pass
        finally:
            connection.close()

    def _step(self, connection: sqlite3.Connection) -> bool:
        """One transaction of all waiting jobs; False at the end."""
        batch: list[_Job] = []
        job = self._queue.get()
        while job is not None and not job.alone:
            batch.append(job)
            if len(batch) == _MAX_BATCH or self._queue.empty():
                break
            job = self._queue.get()
        if batch:
            self._commit(connection, batch)
        if job is None:
            return False
        if job.alone:
            self._answer(job, connection)
        return True

    def _commit(self, connection: sqlite3.Connection, batch: list[_Job]) -> None:
        if self._failure is None:
            try:
                connection.execute("BEGIN IMMEDIATE")
                transaction = Transaction(connection)
                results = [job.work(transaction) for job in batch]
                self._check()
                connection.execute("COMMIT")
            except BaseException as error:
                self._failure = _failed(error)
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            else:
                for job, result in zip(batch, results, strict=True):
                    job.future.set_result(result)
                self._fold(connection, sum(job.size for job in batch))
                return
        for job in batch:
            job.future.set_exception(self._failure)

    def _fold(self, connection: sqlite3.Connection, written: int) -> None:
        """Checkpoint the log now and then; no caller waits for it. SQLite's own limit stays as a backstop."""
        self._written += written
        if self._written >= _CHECKPOINT_BYTES:
            self._written = 0
            with suppress(sqlite3.Error):
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def _answer(self, job: _Job, connection: sqlite3.Connection) -> None:
        try:
            if self._failure is not None and not job.always:
                raise self._failure
            job.future.set_result(job.work(Transaction(connection)))
        except sqlite3.Error as error:
            job.future.set_exception(_failed(error))
        except BaseException as error:
            job.future.set_exception(error)


def _failed(error: BaseException) -> StorageError:
    if isinstance(error, StorageVanished):
        return error
    failure = StorageError(
        f"the SQLite store could not be written: {error}; nothing of this step was stored. Free disk space or "
        "check the file system; everything acknowledged before is safe"
    )
    failure.__cause__ = error
    return failure
