"""A buffer's session with its storage: open it once, send heartbeats, wait for changes, close it.

All first calls share one opening. Closing the session ends its waits with BufferClosed and gives its groups back. A
session belongs to one event loop at a time. Waits wake on the change itself (G11); where owners have deadlines, they
wake for those, too.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar
from weakref import WeakKeyDictionary

from forebay.buffer import explain
from forebay.buffer.group_ends import GroupEnds
from forebay.core.aio import ANY_TASK, FILES, Changes, Deadline, Heartbeat, in_thread
from forebay.core.capacity import Settings, fits
from forebay.core.ledger import Facts
from forebay.core.rollout import DRAWABLE, Status
from forebay.errors import BufferClosed, InvalidConfig, WaitTimeout, WrongEventLoop
from forebay.storage.base import Storage, Summary
from forebay.storage.values import Ready

T = TypeVar("T")

SHARED_LEASE_S = 60.0


class Session:
    """One owner's use of a storage. `after_open` runs once, before the first call continues."""

    def __init__(
        self, storage: Storage, settings: Settings, lease_s: float | None, after_open: Callable[[], Awaitable[None]]
    ) -> None:
        self.storage = storage
        self.settings = settings
        self.lease_s = SHARED_LEASE_S if lease_s is None and storage.shared else lease_s
        self.owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.waits: list[explain.Wait] = []
        self.closed = False
        self.heartbeat: Heartbeat | None = None
        self.group_ends: GroupEnds | None = None
        self.producers: WeakKeyDictionary[object, frozenset[str]] = WeakKeyDictionary()
        self._after_open = after_open
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changes: Changes | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._opening: asyncio.Future[None] | None = None
        self._opened = False
        self._asked: list[Mapping[str, int]] = []
        self._nudges = 0
        self._calm: list[asyncio.Future[None]] = []
        self._next_reap = 0.0  # when dead owners may be found again
        self._refused: Facts | None = None  # of the last prompt, if it did not fit

    # --- opening and closing --------------------------------------------------------------------------

    async def ready(self) -> Changes:
        """Check that the storage can be used from here, and open it at the first use."""
        self.check_open()
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._bind(loop)
        if not self._opened:
            # All first calls wait for one opening, which continues if one of them is cancelled.
            if self._opening is None:
                self._opening = asyncio.ensure_future(self._open())
            await asyncio.shield(self._opening)
        assert self._changes is not None
        return self._changes

    def check_open(self) -> None:
        """BufferClosed after `close`."""
        if self.closed:
            raise BufferClosed("this buffer is closed; make a new one")

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not None and not self._loop.is_closed():
            raise WrongEventLoop(
                "this buffer belongs to another event loop that still runs; use forebay.blocking to share a buffer "
                "between threads"
            )
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._loop = loop
        self._next_reap = 0.0
        self._opening = None
        self._changes = Changes(loop)
        self._unsubscribe = self.storage.subscribe(self._changes.notify)
        if self._opened and self.group_ends is not None:  # on another loop before
            self.group_ends.tell_from(self._changes)

    async def _open(self) -> None:
        try:
            await self.storage.open(self.owner, self.settings, self.lease_s)
            if self.lease_s is not None:
                self.heartbeat = Heartbeat(lambda: self.storage.beat(self.owner), self.lease_s / 3)
            await self.storage.reap()
            await self._after_open()
            if self.group_ends is not None:
                assert self._changes is not None
                await self.storage.note_ends()
                self.group_ends.tell_from(self._changes)
            self._opened = True
        except BaseException:
            self._opening = None  # the next call tries again
            await self._release()
            raise

    async def close(self) -> None:
        """End every wait, give every group back. Closing twice is allowed."""
        self.closed = True
        if self._changes is not None:
            self._changes.close()
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        if self._opening is not None and not self._opening.done():
            await asyncio.wait((self._opening,))
        if self.group_ends is not None:
            await self.group_ends.stop()
        if self._opening is not None or self._opened:
            await self._release()
            self._opening, self._opened = None, False

    async def _release(self) -> None:
        heartbeat, self.heartbeat = self.heartbeat, None
        if heartbeat is not None:
            await in_thread(heartbeat.stop)
        await self.storage.close(self.owner)

    def nudge(self) -> None:
        """Let every wait try again, at once: something outside the storage changed."""
        self.hurry()
        if self._changes is not None:
            self._changes.notify()

    def hurry(self) -> None:
        """Let waits that woke try again at once (see `until`): the change was one of this process."""
        self._nudges += 1
        for waiter in self._calm:
            if not waiter.done():
                waiter.set_result(None)

    async def _nudged_within(self, seconds: float) -> None:
        """Wait for a nudge, for a while."""
        waiter = asyncio.get_running_loop().create_future()
        self._calm.append(waiter)
        try:
            if seconds > 0:
                await asyncio.wait((waiter,), timeout=seconds)
        finally:
            self._calm.remove(waiter)
            waiter.cancel()

    # --- waiting --------------------------------------------------------------------------------------

    async def until(
        self,
        attempt: Callable[[], Awaitable[T | None]],
        what: str,
        tasks: Collection[str],
        timeout_s: float | None = None,
        ready: Callable[[], Ready] | None = None,
        wants: Mapping[str, int] | None = None,
        *,
        needs_room: bool = True,
        calm_s: Callable[[], float] = lambda: 0.0,
    ) -> T:
        """Repeat an attempt after every change of the tasks until it returns something; `explain_wait` lists it.

        WaitTimeout explains what was missing. `ready()`: the least that has to be available, for a storage that can
        wait for that by itself. `wants`: the batch of completed groups that it waits for; InvalidConfig if that can
        never come. `needs_room`: it may also wait for capacity, which any task can free. `calm_s()`: the least time
        between two attempts unless `nudge` or `hurry` is called; for storages that many processes change all the time.
        """
        changes = await self.ready()
        deadline = Deadline(timeout_s)
        bounded = self.settings.max_groups is not None or self.settings.max_bytes is not None
        # The check of `wants` depends on other tasks, too.
        woken_by = ANY_TASK if bounded and (needs_room or wants is not None) else tasks
        ticket = changes.ticket(woken_by)
        found = await attempt()
        if found is not None:
            return found
        with self.listed(what, tasks):
            while True:
                if wants is not None:
                    await self.check_can_come(wants)
                nudges, tried = self._nudges, asyncio.get_running_loop().time()
                await self._wait(changes, ticket, deadline, what, ready and ready(), woken_by)
                if self._nudges == nudges and (least_s := calm_s()):
                    await self._nudged_within(tried + least_s - asyncio.get_running_loop().time())
                ticket = changes.ticket(woken_by)
                found = await attempt()
                if found is not None:
                    return found

    @contextmanager
    def listed(self, what: str, tasks: Collection[str]) -> Iterator[None]:
        """List a wait while the block runs, for `explain_wait`."""
        wait = explain.Wait(what, tasks, asyncio.get_running_loop().time())
        self.waits.append(wait)
        try:
            yield
        finally:
            self.waits.remove(wait)

    async def _wait(
        self, changes: Changes, ticket: int, deadline: Deadline, what: str, ready: Ready | None, tasks: Collection[str]
    ) -> None:
        """Until something changed, the next deadline of an owner passed, or our own time is up."""
        clock = asyncio.get_running_loop().time
        if clock() >= self._next_reap:
            reaped = await self.storage.reap()
            if reaped.returned:
                return
            # The deadline of an owner that opens later is not known yet: reap again within the time of a lease.
            ends = [seconds for seconds in (reaped.next_s, self.lease_s) if seconds is not None]
            self._next_reap = clock() + min(ends, default=math.inf)
        left_s = deadline.left_s()
        if left_s == 0:
            assert deadline.timeout_s is not None
            raise WaitTimeout(what, deadline.timeout_s, await self.explain())
        left_s = min(math.inf if left_s is None else left_s, max(0.0, self._next_reap - clock()))
        await changes.wait(ticket, None if left_s == math.inf else left_s, lambda: self.storage.watch(ready), tasks)

    @property
    def produced(self) -> frozenset[str] | None:
        """The tasks that managers produce with this buffer; None without a manager."""
        return frozenset().union(*self.producers.values()) if self.producers else None

    # --- what can never come --------------------------------------------------------------------------

    @contextmanager
    def asking(self, wants: Mapping[str, int]) -> Iterator[None]:
        """Within this block producers of this buffer work only for the caller, which waits for this batch."""
        self._asked.append(wants)
        try:
            yield
        finally:
            self._asked.remove(wants)

    async def refused(self, prompt: Facts) -> None:
        """A prompt does not fit. InvalidConfig if a caller of `asking` would wait forever."""
        is_news, self._refused = self._refused is None, prompt
        for wants in self._asked:
            await self.check_can_come(wants)
        if is_news:
            self.nudge()  # waits check whether their batch can still come

    def accepted(self) -> None:
        """The last prompts fitted."""
        self._refused = None

    async def check_can_come(self, wants: Mapping[str, int]) -> None:
        """InvalidConfig if a batch is incomplete and can never be complete.

        That is: the next prompt of a producer of this buffer does not fit, nothing is in flight, leased, or buffered
        to be generated again, the buffered groups are not enough, and no other caller waits for any of them: they
        belong to the tasks of this batch (also those of which it wants none) or to tasks that no manager produces.
        """
        if self._refused is None:
            return
        # While nothing is in flight a group can start as soon as its prompt fits; see `capacity`.
        needed = self._refused.bytes
        summary = await self.storage.summary()
        if fits(summary.usage, self.settings, 1, needed) or self._may_change(summary, wants):
            return
        buffered = ", ".join(
            f"{summary.task(name).fresh.get(Status.COMPLETED, 0)} of {n} groups of task {name!r}"
            for name, n in wants.items()
            if n > 0
        )
        raise InvalidConfig(
            f"a batch can never be complete: {buffered} are buffered, none is in flight or leased, and the next prompt "
            f"({needed:,} bytes without responses) does not fit; "
            f"{explain.capacity(summary, self.settings, self.produced)}. Raise the limit, or ask for less"
        )

    def _may_change(self, summary: Summary, wants: Mapping[str, int]) -> bool:
        """Whether a batch may still come although the next prompt does not fit."""
        lines = summary.ledger()
        if any(line["in_flight"] or line["leased"] for line in lines.values()):
            return True
        # Groups of tasks that no manager produces are not drawn again, and no caller waits for them.
        produced = [name for name in lines if self.produced is None or name in self.produced]
        others = lines if self.storage.shared else produced
        if any(lines[name]["buffered"] for name in others if name not in wants):
            return True
        if any(summary.task(name).statuses.get(status, 0) for name in produced for status in DRAWABLE):
            return True
        return all(summary.task(name).fresh.get(Status.COMPLETED, 0) >= n for name, n in wants.items())

    async def explain(self) -> str:
        """See `ReplayBuffer.explain_wait`."""
        summary = await self.storage.summary(holdings=True)
        now = asyncio.get_running_loop().time()
        text = explain.explanation(self.waits, now, summary, self.settings, self.produced)
        return "\n".join([text, *explain.full_pools((FILES,))])
