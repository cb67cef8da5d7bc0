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
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar
from weakref import WeakKeyDictionary

from forebay import report
from forebay.capacity import fits
from forebay.errors import BufferClosed, InvalidConfig, InvalidInput, NoRoom, WaitTimeout, WrongEventLoop
from forebay.group_ends import GroupEnds
from forebay.record import Facts
from forebay.rollout import Status
from forebay.storage.base import Ready, Reaped, Settings, Storage
from forebay.threads import FILES, in_thread
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
        self.group_ends: GroupEnds | None = None
        self.producers: WeakKeyDictionary[object, frozenset[str]] = WeakKeyDictionary()
        self._asked: list[Mapping[str, int]] = []
        self._refused: tuple[Facts, ...] | None = None  # the prompts that found no room last

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
        if self._opened and self.group_ends is not None:  # on another loop before
            self.group_ends.tell_from(self._changes)

    async def _open(self) -> None:
        try:
            await self.storage.open(self.owner, self.settings, self.lease_s)
            if self.lease_s is not None:
                self.heartbeat = Heartbeat(lambda: self.storage.beat(self.owner), self.lease_s / 3)
            await self._after_open()
            await self.storage.reap()
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
        """End every wait, give back what is held. Closing twice is allowed."""
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
        wants: Mapping[str, int] | None = None,
    ) -> T:
        """Repeat an attempt after every change until it finds something; WaitTimeout explains what was missing.

        `ready`: what has to be there at the least, for a storage that can wait for that by itself. `wants`: the batch
        of completed groups that it waits for; InvalidConfig at once if that can never come.
        """
        changes = await self.ready()
        deadline = Deadline(timeout_s)
        ticket = changes.ticket
        found = await attempt()
        if found is not None:
            return found
        with self.waits.listed(what, tasks):
            while True:
                if wants is not None:
                    await self.check_can_come(wants)
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
        timeout_s: float | None,
        prompts: Sequence[Facts] = (),
    ) -> T:
        """Repeat a step until there is room for it; refuse at once what can never fit.

        `prompts`: those that the step issues.
        """
        changes = await self.ready()
        ticket = changes.ticket
        try:
            done = await attempt()
        except NoRoom as full:
            ready = self._needed(full, prompts)
            if prompts:
                await self.refused(prompts)
        else:
            self._refused = None
            return done
        deadline = Deadline(timeout_s)
        with self.waits.listed(what, (task_name,)):
            while True:
                await self._wait(changes, ticket, deadline, what, ready)
                ticket = changes.ticket
                try:
                    return await attempt()
                except NoRoom as full:
                    ready = self._needed(full, prompts)

    def _needed(self, full: NoRoom, prompts: Sequence[Facts]) -> Ready:
        """The room that a step has to wait for; InvalidInput if there can never be so much."""
        for limit, needed, unit in (
            (self.settings.max_groups, full.groups, "groups"),
            (self.settings.max_bytes, full.bytes, "bytes"),
        ):
            if limit is not None and needed > limit:
                raise InvalidInput(
                    f"{needed} {unit} can never fit into a buffer of {limit} {unit}; put less at once, or raise "
                    f"max_{unit}"
                ) from full
        # A single prompt may need less than it did when others were in flight; see `capacity`.
        return Ready(room_groups=full.groups, room_bytes=prompts[0].bytes if len(prompts) == 1 else full.bytes)

    @property
    def produced(self) -> frozenset[str] | None:
        """The tasks that managers produce with this buffer; None without a manager."""
        return frozenset().union(*self.producers.values()) if self.producers else None

    # --- what can never come --------------------------------------------------------------------------

    @contextmanager
    def asking(self, wants: Mapping[str, int]) -> Iterator[None]:
        """Within this block producers of this buffer work for nobody but the caller, who waits for this batch."""
        self._asked.append(wants)
        try:
            yield
        finally:
            self._asked.remove(wants)

    async def refused(self, prompts: Sequence[Facts]) -> None:
        """Prompts (none: of any size) found no room. InvalidConfig if the producer would wait forever, too."""
        is_news, self._refused = self._refused is None, tuple(prompts)
        for wants in self._asked:
            await self.check_can_come(wants)
        if is_news:
            self.nudge()  # perhaps those who wait for a batch wait in vain

    async def check_can_come(self, wants: Mapping[str, int]) -> None:
        """InvalidConfig if a batch is not there and can never be.

        That is: a producer of this buffer found no room for its next prompt, nothing is in flight, leased, or buffered
        to be generated again, what is buffered is not enough, and nobody else waits to take any of it: it belongs to
        the tasks of this batch (also those of which it wants none) or to tasks that nobody produces.
        """
        if self._refused is None:
            return
        prompts = self._refused
        ledger = await self.storage.ledger()
        if any(line["in_flight"] or line["leased"] for line in ledger.values()):
            return
        # What nobody produces is not drawn again, and nobody waits for it.
        tasks = [name for name in ledger if self.produced is None or name in self.produced]
        others = ledger if self.storage.shared else tasks
        if any(ledger[name]["buffered"] for name in others if name not in wants):
            return
        again = await self.storage.count_statuses(tasks, (Status.INIT, Status.EXPIRED, Status.ABORTED))
        available = await self.storage.available(list(wants), Status.COMPLETED)
        if any(any(counts.values()) for counts in again.values()) or all(
            available[name] >= n for name, n in wants.items()
        ):
            return
        # One group can start in any room that its prompt fits into; see `capacity`.
        needed = sum(facts.bytes for facts in prompts)
        usage = await self.storage.usage()
        if fits(usage, self.settings, max(1, len(prompts)), needed) or await self.storage.ledger() != ledger:
            return
        there = ", ".join(f"{available[name]} of {n} groups of task {name!r}" for name, n in wants.items() if n > 0)
        raise InvalidConfig(
            f"a batch can never be complete: {there} are there, nothing is in flight or leased, and the next prompt "
            f"({needed:,} bytes without responses) finds no room; "
            f"{report.capacity(usage, self.settings, ledger, self.produced)}. Raise the limit, or ask for less"
        )

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
        text = report.explanation(
            self.waits,
            asyncio.get_running_loop().time(),
            ledger,
            await self.storage.count_statuses(list(ledger), list(Status)),
            await self.storage.holdings(),
            await self.storage.usage(),
            self.settings,
            self.produced,
        )
        return "\n".join([text, *report.full_pools((FILES,))])
