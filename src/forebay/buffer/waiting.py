"""Waiting without polling, and saying what for.

A waiter takes a ticket, reads the storage, and, if it does not find what it needs, waits for a change after its
ticket. The storage's listener turns every change into one wake-up of the waiters of the tasks that changed, from any
thread. Waits are listed while they last, so that `explain_wait` can name them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from forebay.errors import BufferClosed

__all__ = ["ANY_TASK", "Changes", "Heartbeat", "Wait", "Waits"]

log = logging.getLogger(__name__)

ANY_TASK: frozenset[str] = frozenset()
"""The tasks of a waiter that any change may concern, and of a change that may concern any waiter."""


class Changes:
    """Wakes waiters when the storage changed. Belongs to one event loop; `notify` is for any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._all = 0  # changes
        self._any = 0  # changes that concern every waiter
        self._by_task: dict[str, int] = {}
        self._closed = False
        self._waiters: dict[asyncio.Future[None], Collection[str]] = {}

    def ticket(self, tasks: Collection[str] = ANY_TASK) -> int:
        """Take it before looking; a later change of these tasks ends the wait."""
        if not tasks:
            return self._all
        return self._any + sum(self._by_task.get(task_name, 0) for task_name in tasks)

    def notify(self, tasks: Collection[str] = ANY_TASK) -> None:
        """Wake the waiters of these tasks."""
        if self._loop.is_closed():
            return  # nobody can be waiting there any more
        if threading.get_ident() == self._thread:
            self._wake(tasks)
        else:
            with suppress(RuntimeError):  # it was closed just now
                self._loop.call_soon_threadsafe(self._wake, tasks)

    def _wake(self, tasks: Collection[str]) -> None:
        self._all += 1
        if not tasks:
            self._any += 1
        for task_name in tasks:
            self._by_task[task_name] = self._by_task.get(task_name, 0) + 1
        for waiter, wanted in list(self._waiters.items()):
            if not tasks or not wanted or any(task_name in wanted for task_name in tasks):
                del self._waiters[waiter]
                if not waiter.done():
                    waiter.set_result(None)

    def close(self) -> None:
        """End every wait, now and later, with BufferClosed."""
        self._closed = True
        self._wake(ANY_TASK)

    async def wait(
        self,
        ticket: int,
        timeout_s: float | None,
        watch: Callable[[], asyncio.Future[None] | None] | None = None,
        tasks: Collection[str] = ANY_TASK,
    ) -> None:
        """Until one of these tasks changed after the ticket, or for `timeout_s`.

        `watch` has the storage report changes, if it has to be asked to; if that fails, so does the wait.
        """
        if self.ticket(tasks) == ticket and not self._closed:
            waiter = self._loop.create_future()
            self._waiters[waiter] = tasks
            watching = None if watch is None else watch()
            try:
                if watching is not None:
                    await asyncio.wait((waiter, watching), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                    if watching.done() and not self._closed:
                        watching.result()
                elif timeout_s is None:
                    await waiter
                else:
                    await asyncio.wait((waiter,), timeout=timeout_s)
            finally:
                self._waiters.pop(waiter, None)
                waiter.cancel()
                if watching is not None:
                    watching.cancel()
        else:
            await asyncio.sleep(0)  # an attempt that itself causes changes must not keep the loop from others
        if self._closed:
            raise BufferClosed("the buffer was closed while this call was waiting; nothing was taken")


class Wait:
    """One wait in progress."""

    def __init__(self, what: str, tasks: Collection[str], since: float) -> None:
        self.what = what
        self.tasks = tasks
        self.since = since


class Waits:
    """The waits in progress, oldest first."""

    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}

    def __iter__(self) -> Iterator[Wait]:
        return iter(list(self._waits.values()))

    def __len__(self) -> int:
        return len(self._waits)

    @contextmanager
    def listed(self, what: str, tasks: Collection[str]) -> Iterator[None]:
        """List a wait while the block runs."""
        wait = Wait(what, tasks, asyncio.get_running_loop().time())
        self._waits[id(wait)] = wait
        try:
            yield
        finally:
            del self._waits[id(wait)]


class Heartbeat:
    """Calls `beat` every `interval_s` from a dedicated thread, so that a busy event loop keeps its leases."""

    def __init__(self, beat: Callable[[], None], interval_s: float) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forebay-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._beat()
            except Exception:
                # One failed heartbeat is no reason to lose every lease; the next one may arrive.
                log.warning("heartbeat_failed", exc_info=True)

    def stop(self) -> None:
        """Stop the heartbeat, and wait for one in progress."""
        self._stop.set()
        self._thread.join()
