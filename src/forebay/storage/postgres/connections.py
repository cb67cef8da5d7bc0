"""Connections to the server, and how one step of the storage runs on them.

Connections come from a pool of asyncpg, one for each event loop. `Connections.step` runs one step: one transaction,
completely or not at all.
- A step that the server rolled back in favour of another (deadlock, serialization) runs again from its start.
- A step whose caller is cancelled is rolled back. If the cancel arrives during the commit, the step finishes, and a
  claim is then undone: no caller holds groups that it never learned of.
- If the server goes away, StorageUnavailable is raised and nothing is half done. If it went away during the commit,
  the outcome of a claim is looked up as soon as the server is back, and a claim that did commit is undone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeAlias, TypeVar

import asyncpg

from forebay.core.aio import see_through
from forebay.core.capacity import Settings
from forebay.errors import StorageUnavailable
from forebay.storage.postgres.step import Step

log = logging.getLogger(__name__)

AWAY = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,  # the server shuts down, or starts
    asyncpg.TooManyConnectionsError,
)
"""The server says that it cannot serve us."""

LOST: tuple[type[BaseException], ...] = (
    *AWAY,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,  # TimeoutError included
)
"""Raised when the server is away or goes away; the last three are raised for other reasons as well."""

READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
"""Begins a transaction that reads one moment."""


def is_closed(connection: Any) -> bool:
    """Whether a connection can no longer be used; a pool refuses even the question then."""
    try:
        return bool(connection.is_closed())
    except asyncpg.InterfaceError:
        return True


@asynccontextmanager
async def transaction(connection: Any, begin: str = "BEGIN") -> AsyncIterator[None]:
    """One transaction. (asyncpg's own takes one whose start was cancelled to be still open.)"""
    try:
        await connection.execute(begin)
        yield
    except BaseException:
        await roll_back(connection)
        raise
    await connection.execute("COMMIT")


async def roll_back(connection: Any) -> None:
    """End a transaction without effect.

    Always: after a cancelled statement the connection does not know yet whether a transaction is open.
    """
    if is_closed(connection):
        return
    try:
        await connection.execute("ROLLBACK")
    except BaseException as error:
        if not is_closed(connection):
            connection.terminate()
        if not isinstance(error, LOST):
            raise


T = TypeVar("T")
Work: TypeAlias = "Callable[[Step], Awaitable[T]]"
Undo: TypeAlias = "Callable[[Step, T], Awaitable[None]]"

_MAX_RUNS = 20  # of a step that the server rolls back in favour of others
_ROLLED_BACK = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError)
_CLOSE_S = 5.0

# A process that is stopped in the middle of a step must not hold its locks forever.
# Every query has its index; a plan that was made while the tables were small must not scan them when they have grown.
_SETUP = """
SELECT set_config('search_path', $1, false), set_config('enable_seqscan', 'off', false),
    set_config('enable_bitmapscan', 'off', false), set_config('jit', 'off', false),
    set_config('plan_cache_mode', 'force_generic_plan', false),
    set_config('client_min_messages', 'error', false),
    set_config('idle_in_transaction_session_timeout', '30s', false),
    set_config('synchronous_commit',
        CASE WHEN $2 THEN 'off' WHEN current_setting('synchronous_commit') = 'off' THEN 'on'
        ELSE current_setting('synchronous_commit') END, false)
"""


class _Run:
    """State that the caller of a step shares with the task that runs it."""

    def __init__(self) -> None:
        self.abandoned = False
        self.committing = False


class Connections:
    """The connections of one process to one buffer. `committed` is called with every step that was committed."""

    def __init__(
        self, dsn: str, name: str, *, max_connections: int, timeout_s: float, committed: Callable[[Step], None]
    ) -> None:
        self._dsn = dsn
        self._name = name
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._committed = committed
        self.settings = Settings()  # of the owners
        self._pool: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()
        self._connected: weakref.WeakSet[Any] = weakref.WeakSet()
        self._doubts: list[tuple[str, Callable[[Step], Awaitable[None]]]] = []

    async def connect(self, *, asynchronous: bool = False) -> Any:
        """A new connection outside the pool; `asynchronous` commits are not waited for."""
        try:
            connection = await self._connect(self._dsn)
            await connection.fetchrow(_SETUP, f'"{self._name}"', asynchronous)
        except LOST as error:
            raise self._unavailable(error) from error
        return connection

    async def _connect(self, dsn: str, **more: Any) -> Any:
        settings = {"application_name": "forebay"}
        return await asyncpg.connect(dsn, timeout=self._timeout_s, server_settings=settings, **more)

    def _unavailable(self, error: BaseException) -> StorageUnavailable:
        return StorageUnavailable(
            f"the database of buffer {self._name!r} cannot be reached ({type(error).__name__}: {error}); nothing was "
            "done; try again when it is back"
        )

    # --- the pool -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Any]:
        """A connection for a while. An error of the connection is StorageUnavailable."""
        pool = await self._pool_of_loop()
        connection = await self._acquire(pool)
        try:
            with self.watched(connection):
                yield connection
        except BaseException:
            if not is_closed(connection) and connection.is_in_transaction():
                connection.terminate()  # an open transaction must not leak into the next step
            raise
        finally:
            with suppress(*LOST):
                await pool.release(connection)

    @contextmanager
    def watched(self, connection: Any) -> Iterator[None]:
        """Raises an error of the connection as StorageUnavailable."""
        try:
            yield
        except LOST as error:
            if isinstance(error, AWAY) or is_closed(connection):
                raise self._unavailable(error) from error
            raise

    async def take(self) -> Any:
        """A connection for longer; `terminate` ends it."""
        return await self._acquire(await self._pool_of_loop())

    async def _acquire(self, pool: Any) -> Any:
        try:
            return await pool.acquire()
        except LOST as error:
            raise self._unavailable(error) from error

    async def _pool_of_loop(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._pid != os.getpid():
            # The sockets are shared with the parent: nothing may be sent over them, not even a goodbye.
            self._pid, self._pool, self._connected = os.getpid(), None, weakref.WeakSet()
        if self._pool is None or self._loop is not loop:
            self._terminate()
            self._loop = loop
            self._pool = asyncpg.create_pool(
                self._dsn,
                min_size=0,
                max_size=self._max_connections,
                max_inactive_connection_lifetime=0,
                connect=self._connect,
                init=self._set_up,
                reset=_keep_settings,
            )
            await self._pool  # connects nothing yet, so that it does not wait
        return self._pool

    async def _set_up(self, connection: Any) -> None:
        self._connected.add(connection)
        await connection.fetchrow(_SETUP, f'"{self._name}"', False)

    def _terminate(self) -> None:
        for connection in list(self._connected):
            with suppress(RuntimeError, *LOST):  # its event loop may be closed
                connection.terminate()

    async def close(self) -> None:
        """Close all connections; those from `take` were ended before."""
        pool, self._pool = self._pool, None
        if pool is None or self._pid != os.getpid():
            return
        if self._loop is not asyncio.get_running_loop():
            self._terminate()
            return
        with suppress(*LOST):
            async with asyncio.timeout(_CLOSE_S):
                await pool.close()

    # --- steps --------------------------------------------------------------------------------------

    async def step(
        self,
        work: Work[T],
        undo: Undo[T] | None = None,
        *,
        single: bool = False,
        once: bool = False,
        lock: int | None = None,
    ) -> T:
        """Run one step.

        `single`: it is one statement, which commits by itself. `once`: it cannot run again. `lock`: an advisory lock
        that it holds until it ends. `undo` takes back what a claim did whose caller does not learn of it.
        """
        run = _Run()
        begin = "BEGIN" if lock is None else f"BEGIN; SELECT pg_advisory_xact_lock({lock})"
        task = asyncio.ensure_future(self._repeat(work, undo, run, None if single else begin, 1 if once else _MAX_RUNS))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            run.abandoned = True
            if not run.committing:
                task.cancel()
            if await _succeeds(task) and undo is not None:
                result = task.result()
                if not await _succeeds(asyncio.ensure_future(self.step(lambda step: undo(step, result)))):
                    log.warning("postgres_undo_failed buffer=%s", self._name)
            raise

    async def _repeat(self, work: Work[T], undo: Undo[T] | None, run: _Run, begin: str | None, runs: int) -> T:
        for attempt in range(1, runs + 1):
            try:
                await self.resolve_doubts()
                async with self.lend() as connection:
                    step = Step(connection, self.settings)
                    if begin is None:
                        run.committing = True
                        result = await work(step)
                    else:
                        result = await self._transact(step, work, undo, run, begin)
                self._committed(step)
                return result
            except _ROLLED_BACK as error:
                if attempt == runs:
                    raise
                run.committing = False
                log.info("postgres_step_repeated buffer=%s attempt=%d %s", self._name, attempt, type(error).__name__)
                await asyncio.sleep(random.uniform(0, 0.005 * attempt))
        raise AssertionError("unreachable")

    async def _transact(self, step: Step, work: Work[T], undo: Undo[T] | None, run: _Run, begin: str) -> T:
        connection = step.connection
        try:
            await connection.execute(begin)
            result = await work(step)
            await step.write()
            if run.abandoned:
                raise asyncio.CancelledError
        except BaseException:
            await roll_back(connection)
            raise
        run.committing = True
        try:
            await connection.execute("COMMIT")
        except LOST:
            if undo is not None and step.xid is not None:
                self._doubts.append((step.xid, lambda later: undo(later, result)))
            raise
        return result

    async def resolve_doubts(self) -> None:
        """Look up the commits whose outcome was lost with the connection; their callers got an error."""
        doubts, self._doubts = self._doubts, []
        while doubts:
            xid, undo = doubts[-1]
            try:
                async with self.lend() as connection:
                    outcome = await connection.fetchval("SELECT pg_xact_status($1::text::xid8)", xid)
                    step = Step(connection, self.settings)
                    if outcome == "committed":
                        async with transaction(connection):
                            await undo(step)
                            await step.write()
            except BaseException:
                self._doubts += doubts
                raise
            doubts.pop()
            if outcome == "in progress":
                self._doubts.append((xid, undo))
            elif step.tasks:
                self._committed(step)
                log.warning("postgres_doubtful_commit_undone buffer=%s", self._name)


async def _keep_settings(connection: Any) -> None:
    """Instead of RESET ALL between two users of a pooled connection: all of them need the same settings."""


async def _succeeds(task: asyncio.Future[Any]) -> bool:
    """Wait for a task through any number of cancels; whether it did its work."""
    await see_through(task)
    return not task.cancelled() and task.exception() is None
