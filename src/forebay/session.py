"""A buffer's session with its storage: opened once, beaten for, waited on, closed.

All first calls share one opening. Everything that was begun ends when the session is closed: waits with BufferClosed,
holds by going back. A session lives on one event loop at a time. Waits wake on the change itself (G11); where holders
have deadlines, they wake for those, too.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

from forebay import report
from forebay.errors import BufferClosed, InvalidInput, NoRoom, WaitTimeout, WrongEventLoop
from forebay.rollout import Status
from forebay.storage.base import Ready, Reaped, Settings, Storage
from forebay.threads import in_thread
from forebay.waiting import Changes, Deadline, Heartbeat, Waits

__all__ = ["SHARED_LEASE_S", "Session"]

T = TypeVar("T")

SHARED_LEASE_S = 60.0
_NONE_REAPED = Reaped({}, None)


class Session:
    """One owner's use of a storage. `after_open` runs once, before the first call goes on."""

    def __init__(
        self, storage: Storage, settings: Settings, lease_s: float | None, after_open: Callable[[], Awaitable[None]]
    ) -> None:
        self.storage = storage
        self.settings = settings
        self.lease_s = SHARED_LEASE_S if lease_s is None and storage.shared else lease_s
        self.owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.waits = Waits()
        self.closed = False
        self.heartbeat: Heartbeat | None = None
        self._after_open = after_open
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changes: Changes | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._opening: asyncio.Future[None] | None = None
        self._opened = False
        self._reap_at = 0.0

    # --- life -----------------------------------------------------------------------------------------

    async def ready(self) -> Changes:
        """Check that the storage can be used from here, and open it at the first use."""
        self.check_open()
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._bind(loop)
        if not self._opened:
            # All first calls wait for one opening, which goes on if one of them is cancelled.
            if self._opening is None:
                self._opening = asyncio.ensure_future(self._open())
            await asyncio.shield(self._opening)
        assert self._changes is not None
        return self._changes

    def check_open(self) -> None:
        if self.closed:
            raise BufferClosed("this buffer is closed; make a new one")

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not None and not self._loop.is_closed():
            raise WrongEventLoop(
                "this buffer lives on another event loop that still runs; use forebay.blocking to share a buffer "
                "between threads"
            )
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._loop = loop
        self._opening = None
        self._changes = Changes(loop)
        self._unsubscribe = self.storage.subscribe(self._changes.notify)

    async def _open(self) -> None:
        try:
            await self.storage.open(self.owner, self.settings, self.lease_s)
            if self.lease_s is not None:
                self.heartbeat = Heartbeat(lambda: self.storage.beat(self.owner), self.lease_s / 3)
            await self._after_open()
            await self.storage.reap()
            self._opened = True
        except BaseException:
            self._opening = None  # the next call tries again
            await self._release()
            raise

    async def close(self) -> None:
        """End every wait, give back what is held. Closing twice is allowed."""
        self.closed = True
        if self._changes is not None:
            self._changes.close()
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        if self._opening is not None and not self._opening.done():
            await asyncio.wait((self._opening,))
        if self._opening is not None or self._opened:
            await self._release()
            self._opening, self._opened = None, False

    async def _release(self) -> None:
        heartbeat, self.heartbeat = self.heartbeat, None
        if heartbeat is not None:
            await in_thread(heartbeat.stop)
        await self.storage.close(self.owner)

    def nudge(self) -> None:
        """Let every wait look again."""
        if self._changes is not None:
            self._changes.notify()

    async def reap(self) -> None:
        """Bring back what dead holders had, if the time of one of them can be up."""
        if self.storage.reaps_itself:
            return
        now = asyncio.get_running_loop().time()
        if self.storage.shared and now < self._reap_at:
            return  # asking costs a round trip there
        reaped = await self.storage.reap()
        wait_s = self.lease_s if reaped.next_s is None else reaped.next_s
        self._reap_at = now + (SHARED_LEASE_S if wait_s is None else wait_s) / 2

    # --- waiting --------------------------------------------------------------------------------------

    async def until(
        self,
        attempt: Callable[[], Awaitable[T | None]],
        what: str,
        tasks: Collection[str],
        timeout_s: float | None,
        ready: Ready | None = None,
    ) -> T:
        """Repeat an attempt after every change until it finds something; WaitTimeout explains what was missing.

        `ready`: what has to be there at the least, for a storage that can wait for that by itself.
        """
        changes = await self.ready()
        deadline = Deadline(timeout_s)
        ticket = changes.ticket
        found = await attempt()
        if found is not None:
            return found
        with self.waits.listed(what, tasks):
            while True:
                await self._wait(changes, ticket, deadline, what, ready)
                ticket = changes.ticket
                found = await attempt()
                if found is not None:
                    return found

    async def with_room(
        self,
        attempt: Callable[[], Awaitable[T]],
        what: str,
        task_name: str,
        sizes: Sequence[int],
        timeout_s: float | None,
    ) -> T:
        """Repeat a step until there is room for it; refuse at once what can never fit."""
        changes = await self.ready()
        ticket = changes.ticket
        try:
            return await attempt()
        except NoRoom as full:
            for limit, needed, unit in (
                (self.settings.max_groups, len(sizes), "groups"),
                (self.settings.max_bytes, sum(sizes), "bytes"),
            ):
                if limit is not None and needed > limit:
                    raise InvalidInput(
                        f"{needed} {unit} can never fit into a buffer of {limit} {unit}; put less at once, or raise "
                        f"max_{unit}"
                    ) from full
        deadline = Deadline(timeout_s)
        ready = Ready(room_groups=len(sizes), room_bytes=sum(sizes))
        with self.waits.listed(what, (task_name,)):
            while True:
                await self._wait(changes, ticket, deadline, what, ready)
                ticket = changes.ticket
                try:
                    return await attempt()
                except NoRoom:
                    continue

    async def _wait(self, changes: Changes, ticket: int, deadline: Deadline, what: str, ready: Ready | None) -> None:
        """Until something changed, the next deadline of a holder passed, or our own time is up."""
        reaped = _NONE_REAPED if self.storage.reaps_itself else await self.storage.reap()
        if reaped.returned:
            return
        left_s = deadline.left_s()
        if left_s == 0:
            assert deadline.timeout_s is not None
            raise WaitTimeout(what, deadline.timeout_s, await self.explain())
        # A holder that came after this look has no deadline in it: look again within a lease's time.
        ends = [seconds for seconds in (left_s, reaped.next_s, self.lease_s) if seconds is not None]
        await changes.wait(ticket, min(ends) if ends else None, lambda: self.storage.watch(ready))

    async def explain(self) -> str:
        """What is being waited for, what there is of it, and who holds the rest."""
        ledger = await self.storage.ledger()
        return report.explanation(
            self.waits,
            asyncio.get_running_loop().time(),
            ledger,
            await self.storage.count_statuses(list(ledger), list(Status)),
            await self.storage.holdings(),
            await self.storage.usage(),
            self.settings.max_groups,
            self.settings.max_bytes,
        )
