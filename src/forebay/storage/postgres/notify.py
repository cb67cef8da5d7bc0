"""The notifier of a storage: one more connection, on an event loop in its own thread.

It listens for changes of other processes, notifies them of changes of this one, and renews the deadlines of owners, so
that a trainer whose event loop is busy keeps its leases. A notification is sent after the commit that it reports, and
pending ones are sent as one: inside the transaction it would make every commit of the server wait for the one before.
(If a process dies in between, it misses its deadline, and the process that reaps it wakes all others.)

If the connection breaks, the notifier connects again with growing pauses and a warning, and then wakes every listener.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from forebay.core.aio import in_thread
from forebay.errors import ForebayError
from forebay.storage.postgres.columns import from_text, to_text
from forebay.storage.postgres.connections import LOST
from forebay.storage.postgres.owners import RENEW

log = logging.getLogger(__name__)

EVERYTHING = None
"""Given instead of task names: any task may have changed."""

_MAX_PAYLOAD_BYTES = 7_000  # the server takes 8,000
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_BEAT_TIMEOUT_S = 10.0

_FAILED: tuple[type[BaseException], ...] = (ForebayError, *LOST)
_FAILED_BEAT: tuple[type[BaseException], ...] = (*_FAILED, FutureTimeout)


class Notifier:
    """`heard` is called in the notifier's thread with the tasks that other processes changed."""

    def __init__(
        self, name: str, connect: Callable[[], Awaitable[Any]], heard: Callable[[Collection[str] | None], None]
    ) -> None:
        self._name = name
        self._channel = f"forebay_{name}"
        self._connect = connect
        self._heard = heard
        self._loop = asyncio.new_event_loop()
        self._first: Future[None] = Future()
        self._pending: set[str] | None = set()
        self._connection: Any = None
        self._stopping = False
        self._event = asyncio.Event()  # there is something to do
        self._using = asyncio.Lock()
        self._thread = threading.Thread(target=self._run, name=f"forebay-postgres-{name}", daemon=True)
        self._thread.start()

    async def listening(self) -> None:
        """Wait until it listens for the first time; raises if it cannot."""
        await asyncio.wrap_future(self._first)

    def tell(self, tasks: Collection[str] | None) -> None:
        """Notify the other processes that tasks changed. From any thread; never waits."""
        with contextlib.suppress(RuntimeError):  # it has just stopped
            self._loop.call_soon_threadsafe(self._add, tasks)

    def _add(self, tasks: Collection[str] | None) -> None:
        if tasks is None or self._pending is None:
            self._pending = None
        else:
            self._pending.update(tasks)
        self._event.set()

    def beat(self, owner: str, lease_s: float) -> None:
        """Renew a deadline. Blocks the calling thread; a failure is logged, the next heartbeat may succeed."""
        beating = self._beat(owner, lease_s)
        try:
            done = asyncio.run_coroutine_threadsafe(beating, self._loop)
        except RuntimeError:  # it has just stopped
            beating.close()
            return
        try:
            done.result(_BEAT_TIMEOUT_S + 1)
        except _FAILED_BEAT as error:
            log.warning("postgres_beat_failed buffer=%s owner=%s %r", self._name, owner, error)

    async def _beat(self, owner: str, lease_s: float) -> None:
        connection = self._connection
        if connection is None:
            raise ConnectionError("the notifier is not connected")
        async with self._using:
            try:
                await connection.execute(RENEW, to_text(owner), lease_s, timeout=_BEAT_TIMEOUT_S)
            except LOST:
                connection.terminate()  # also one that no longer answers: a new one may
                raise

    async def stop(self) -> None:
        """Send pending notifications and end the thread."""

        def end() -> None:
            self._stopping = True
            self._event.set()

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(end)
        await in_thread(self._thread.join)

    # --- in its thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            log.exception("postgres_notifier_failed buffer=%s", self._name)
            if not self._first.done():  # so that `listening` does not wait forever
                self._first.set_exception(error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stopping:
            try:
                self._connection = await self._connect()
                await self._connection.add_listener(self._channel, self._hear)
                self._connection.add_termination_listener(self._lost)
                if self._first.done():
                    log.warning("postgres_listener_back buffer=%s", self._name)
                    self._heard(EVERYTHING)
                else:
                    self._first.set_result(None)
                pause_s = _FIRST_PAUSE_S
                await self._attend()
            except _FAILED as error:
                if not self._first.done():
                    self._first.set_exception(error)
                    return
                if not self._stopping:
                    log.warning("postgres_listener_lost buffer=%s retry_s=%.2f %r", self._name, pause_s, error)
                with contextlib.suppress(TimeoutError):
                    self._event.clear()
                    await asyncio.wait_for(self._stopped(), pause_s)
                pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)
            finally:
                connection, self._connection = self._connection, None
                if connection is not None:
                    try:
                        await connection.close(timeout=5)
                    except LOST:
                        connection.terminate()

    async def _stopped(self) -> None:
        while not self._stopping:
            await self._event.wait()
            if not self._stopping:
                self._event.clear()

    async def _attend(self) -> None:
        """Send notifications until the connection is lost or `stop` is called."""
        while True:
            while self._pending is None or self._pending:
                pending, self._pending = self._pending, set()
                try:
                    async with self._using:
                        await self._connection.execute(
                            "SELECT pg_notify($1, $2)", self._channel, _payload(pending), timeout=_BEAT_TIMEOUT_S
                        )
                except BaseException:
                    self._add(pending)
                    raise
            if self._stopping:
                return
            await self._event.wait()
            self._event.clear()
            if self._connection.is_closed() and not self._stopping:
                raise ConnectionError("the listening connection was closed")

    def _lost(self, connection: Any) -> None:
        self._event.set()

    def _hear(self, connection: Any, pid: int, channel: str, payload: str) -> None:
        if pid != connection.get_server_pid():  # this process has called its listeners already
            tasks = json.loads(payload)
            self._heard(None if tasks is None else [from_text(task_name) for task_name in tasks])


def _payload(tasks: Collection[str] | None) -> str:
    payload = json.dumps(None if tasks is None else sorted(to_text(task_name) for task_name in tasks))
    return payload if len(payload) <= _MAX_PAYLOAD_BYTES else json.dumps(None)
