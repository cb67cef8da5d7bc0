"""The one connection that writes, in a dedicated thread.

Jobs run in the order in which they were submitted. Jobs that wait during a commit share the next one (group
commit): a job is answered after the transaction that holds it is on disk. A failing transaction is rolled back
whole, and everything that was built on it fails with it, until `recover` is called: the caller's picture of the
store is then no longer true, and has to be read again.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from forebay.errors import StorageError, StorageVanished
from forebay.storage.sqlite.transaction import Transaction

__all__ = ["Writer"]

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
        """Done when the connection is there; carries the error if it could not be made."""
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
        """Checkpoint the log now and then; nobody waits for it. SQLite's own limit stays as a backstop."""
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
        "check the file system; what was acknowledged before is safe"
    )
    failure.__cause__ = error
    return failure
