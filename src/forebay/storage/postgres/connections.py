"""Connections to the server, and how one step of the storage runs on them.

`Connections` lends them; they belong to one event loop and are opened as needed. `Connections.step` runs one step: one
transaction, whole or not at all.
- A step that the server rolled back for the sake of another (deadlock, serialization) runs again from its start.
- A step whose caller is cancelled is rolled back. If the cancel comes while the commit is under way, the step is
  brought to its end, and a claim is then undone: nothing is held by a caller that never learned of it.
- A server that goes away is StorageUnavailable; nothing half done is left. If that happened during the commit, the
  outcome of a claim is looked up as soon as the server is back, and a claim that nobody learned of is undone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Generic, TypeVar

import asyncpg

from forebay.errors import StorageUnavailable
from forebay.storage.postgres.tally import Tally
from forebay.storage.postgres.transactions import GONE, LOST, roll_back, transaction

__all__ = ["Connections", "Step"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_RUNS = 20  # of a step that others made the server roll back
_ROLLED_BACK = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError)

# A process that stands still in the middle of a step must not hold its locks for ever.
# Every query has its index; a plan made while the tables were small must not scan them when they have grown.
_SETUP = """
SELECT set_config('search_path', $1, false), set_config('enable_seqscan', 'off', false),
    set_config('enable_bitmapscan', 'off', false), set_config('jit', 'off', false),
    set_config('client_min_messages', 'error', false),
    set_config('idle_in_transaction_session_timeout', '30s', false),
    set_config('synchronous_commit',
        CASE WHEN $2 THEN 'off' WHEN current_setting('synchronous_commit') = 'off' THEN 'on'
        ELSE current_setting('synchronous_commit') END, false)
"""


class Step:
    """One transaction under way: its connection, and what it changes in the counts."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.tally = Tally()
        self.tasks: set[str] = set()
        """Tasks whose waiters are woken after the commit."""

    def wake(self, task_name: str) -> None:
        self.tasks.add(task_name)


Work = Callable[[Step], Awaitable[T]]
Undo = Callable[[Step, T], Awaitable[None]]


class _Run(Generic[T]):
    """What the caller and the task of a step tell each other."""

    def __init__(self) -> None:
        self.abandoned = False
        self.committing = False


class Connections:
    """Connections of one process to one buffer. `committed` hears of every step that was done."""

    def __init__(
        self, dsn: str, name: str, *, max_connections: int, timeout_s: float, committed: Callable[[Step], None]
    ) -> None:
        self._dsn = dsn
        self._name = name
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._committed = committed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()
        self._idle: list[Any] = []
        self._lent: set[Any] = set()
        self._free = asyncio.Semaphore(max_connections)
        self._doubts: list[tuple[str, Callable[[Step], Awaitable[None]]]] = []

    async def connect(self, *, asynchronous: bool = False) -> Any:
        """A new connection of the caller's own; `asynchronous` commits are not waited for."""
        try:
            connection = await asyncpg.connect(
                self._dsn, timeout=self._timeout_s, server_settings={"application_name": "forebay"}
            )
            await connection.fetchrow(_SETUP, f'"{self._name}"', asynchronous)
        except LOST as error:
            raise self._unavailable(error) from error
        return connection

    def _unavailable(self, error: BaseException) -> StorageUnavailable:
        return StorageUnavailable(
            f"the database of buffer {self._name!r} cannot be reached ({type(error).__name__}: {error}); nothing was "
            "done; try again when it is back"
        )

    # --- lending ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Any]:
        """A connection for a while. An error of the connection is StorageUnavailable, and it is not lent again."""
        connection = await self.take()
        try:
            yield connection
        except BaseException as error:
            # Whatever was left open must not leak into the next step.
            lost = connection.is_closed()
            if lost or connection.is_in_transaction():
                self.discard(connection)
            if isinstance(error, GONE) or (lost and isinstance(error, LOST)):
                raise self._unavailable(error) from error
            raise
        finally:
            self.give_back(connection)

    async def take(self) -> Any:
        """A connection; to be given back or discarded."""
        self._adopt_loop()
        await self._free.acquire()
        try:
            while self._idle:
                connection = self._idle.pop()
                if not connection.is_closed():
                    break
            else:
                connection = await self.connect()
        except BaseException:
            self._free.release()
            raise
        self._lent.add(connection)
        return connection

    def give_back(self, connection: Any) -> None:
        if connection in self._lent:
            self._lent.remove(connection)
            self._free.release()
            if not connection.is_closed():
                self._idle.append(connection)

    def discard(self, connection: Any) -> None:
        if connection in self._lent:
            self._lent.remove(connection)
            self._free.release()
        _terminate(connection)

    def _adopt_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._pid != os.getpid():
            # The sockets are the parent's too: not even a goodbye may be sent over them.
            self._pid, self._idle, self._lent, self._loop = os.getpid(), [], set(), None
        if self._loop is not loop:
            for connection in (*self._idle, *self._lent):
                _terminate(connection)
            self._loop, self._idle, self._lent = loop, [], set()
            self._free = asyncio.Semaphore(self._max_connections)

    async def close(self) -> None:
        """Close what is idle, and end what an abandoned reader still has."""
        lent, idle = list(self._lent), self._idle
        self._idle = []
        for connection in lent:
            self.discard(connection)
        for connection in idle:
            try:
                await connection.close(timeout=5)
            except LOST:
                _terminate(connection)

    # --- steps --------------------------------------------------------------------------------------

    async def step(self, work: Work[T], undo: Undo[T] | None = None, *, single: bool = False, once: bool = False) -> T:
        """Run one step. `single`: it is one statement, which commits by itself. `once`: it cannot run again."""
        run: _Run[T] = _Run()
        task = asyncio.ensure_future(self._repeat(work, undo, run, single, 1 if once else _MAX_RUNS))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            run.abandoned = True
            if not run.committing:
                task.cancel()
            ended = await _outlive(task)
            if ended and undo is not None:
                result = task.result()
                cleanup = asyncio.ensure_future(self.step(lambda step: undo(step, result)))
                if not await _outlive(cleanup):
                    log.warning("postgres_undo_failed buffer=%s", self._name)
            raise

    async def _repeat(self, work: Work[T], undo: Undo[T] | None, run: _Run[T], single: bool, runs: int) -> T:
        for attempt in range(1, runs + 1):
            try:
                if self._doubts:
                    await self._resolve_doubts()
                async with self.lend() as connection:
                    step = Step(connection)
                    if single:
                        run.committing = True
                        result = await work(step)
                    else:
                        result = await self._transact(step, work, undo, run)
                self._committed(step)
                return result
            except _ROLLED_BACK as error:
                if attempt == runs:
                    raise
                run.committing = False
                log.info("postgres_step_repeated buffer=%s attempt=%d %s", self._name, attempt, type(error).__name__)
                await asyncio.sleep(random.uniform(0, 0.005 * attempt))
        raise AssertionError("unreachable")

    async def _transact(self, step: Step, work: Work[T], undo: Undo[T] | None, run: _Run[T]) -> T:
        connection = step.connection
        try:
            await connection.execute("BEGIN")
            result = await work(step)
            xid = await step.tally.flush(connection)
            if run.abandoned:
                raise asyncio.CancelledError
        except BaseException:
            await roll_back(connection)
            raise
        run.committing = True
        try:
            await connection.execute("COMMIT")
        except LOST:
            if undo is not None and xid is not None:
                self._doubts.append((xid, lambda later: undo(later, result)))
            raise
        return result

    async def _resolve_doubts(self) -> None:
        """Look up the commits whose outcome was lost with the connection; their callers were told of a failure."""
        doubts, self._doubts = self._doubts, []
        while doubts:
            xid, undo = doubts[-1]
            try:
                async with self.lend() as connection:
                    outcome = await connection.fetchval("SELECT pg_xact_status($1::text::xid8)", xid)
                    step = Step(connection)
                    if outcome == "committed":
                        async with transaction(connection):
                            await undo(step)
                            await step.tally.flush(connection)
            except BaseException:
                self._doubts += doubts
                raise
            doubts.pop()
            if outcome == "in progress":
                self._doubts.append((xid, undo))
            elif step.tasks:
                self._committed(step)
                log.warning("postgres_doubtful_commit_undone buffer=%s", self._name)


async def _outlive(task: asyncio.Future[Any]) -> bool:
    """Wait for a task through any number of cancels; whether it did its work."""
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait((task,))
    return not task.cancelled() and task.exception() is None


def _terminate(connection: Any) -> None:
    with suppress(RuntimeError, *LOST):  # its event loop may be closed
        connection.terminate()
