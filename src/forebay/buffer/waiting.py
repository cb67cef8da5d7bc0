"""Waiting without polling, and saying what for.

A waiter takes a ticket, looks at the storage, and if it does not find what it needs waits for a change after its
ticket. The storage's listener turns every change into one wake-up, from whatever thread. Waits are listed while
they last, so that `explain_wait` can tell what they are for.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from forebay.errors import BufferClosed

__all__ = ["Changes", "Heartbeat", "Wait", "Waits"]

log = logging.getLogger(__name__)


class Changes:
    """Wakes those who wait for a change of the storage. Belongs to one event loop; `notify` is for any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._seen = 0
        self._closed = False
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def ticket(self) -> int:
        """Take it before looking; whatever changes afterwards ends the wait."""
        return self._seen

    def notify(self, tasks: Collection[str] = ()) -> None:
        if self._loop.is_closed():
            return  # nobody can be waiting there any more
        if threading.get_ident() == self._thread:
            self._wake()
        else:
            with suppress(RuntimeError):  # it was closed just now
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._seen += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def close(self) -> None:
        """End every wait, now and later, with BufferClosed."""
        self._closed = True
        self._wake()

    async def wait(
        self, ticket: int, timeout_s: float | None, watch: Callable[[], asyncio.Future[None] | None] | None = None
    ) -> None:
        """Until something changed after the ticket, or for `timeout_s`.

        `watch` begins what has the storage tell of changes, if it has to be asked to; if that fails, so does the wait.
        """
        if self._seen == ticket and not self._closed:
            waiter = self._loop.create_future()
            self._waiters.add(waiter)
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
                self._waiters.discard(waiter)
                waiter.cancel()
                if watching is not None:
                    watching.cancel()
        else:
            await asyncio.sleep(0)  # whoever causes changes by looking at them must not keep the loop from others
        if self._closed:
            raise BufferClosed("the buffer was closed while this call was waiting; nothing was taken")


class Wait:
    """One wait under way."""

    def __init__(self, what: str, tasks: Collection[str], since: float) -> None:
        self.what = what
        self.tasks = tasks
        self.since = since


class Waits:
    """The waits under way, oldest first."""

    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}

    def __iter__(self) -> Iterator[Wait]:
        return iter(list(self._waits.values()))

    def __len__(self) -> int:
        return len(self._waits)

    @contextmanager
    def listed(self, what: str, tasks: Collection[str]) -> Iterator[None]:
        wait = Wait(what, tasks, asyncio.get_running_loop().time())
        self._waits[id(wait)] = wait
        try:
            yield
        finally:
            del self._waits[id(wait)]


class Heartbeat:
    """Calls `beat` every `interval_s` from a thread of its own, so that a busy event loop keeps its leases."""

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
                # One beat that fails is no reason to lose every lease; the next one may come through.
                log.warning("heartbeat_failed", exc_info=True)

    def stop(self) -> None:
        """Stop beating, and wait for a beat that is under way."""
        self._stop.set()
        self._thread.join()
