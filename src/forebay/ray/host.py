"""The host of a buffer: a storage on one event loop, behind calls that name an operation of the storage's contract.

It knows nothing of Ray: `actor` puts it into an actor, and tests may call it directly. Promises:
- A call that changes something is done once: it carries its client and a number, and if it comes again, it gets the
  same answer. Answers are remembered until the client has confirmed them; a durable storage keeps them with the effect.
- A wait is one call, answered when what it waits for may be there; there are so many places for waits, no more.
- What dead clients held comes back by itself, at their deadline.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec

from forebay.core.aio import in_thread
from forebay.core.capacity import fits
from forebay.core.ledger import Account
from forebay.core.references import as_values
from forebay.core.staleness import EXPIRABLE
from forebay.errors import BufferClosed, ForebayError, InvalidInput, TooManyWaits
from forebay.ray import wire
from forebay.ray.operations import OPERATIONS, Book, Exchange, HostSpec, Operations
from forebay.ray.wire import Message, PackedFrames, Payload, Request
from forebay.storage.base import Ready, Storage
from forebay.storage.idempotency import CALL, Answered, Call

__all__ = ["Host", "Ledgers", "Wait"]

log = logging.getLogger(__name__)

_LOOK_S = 5.0  # for deadlines that were not known at the last look
_LEFT_WAITS = 1_000
_LEAVE_S = 10.0  # streams of a client that was not heard of for at least so long
_FORGET_S = 3_600.0  # answers of a client that was not heard of for so long

Ledgers: TypeAlias = "tuple[int, dict[str, dict[str, int]], dict[str, dict[str, int]], dict[str, Account]]"
"""After so many changes: ledger lines in groups and in tokens, and accounts."""

_STAND_TASKS = 8
"""Up to so many tasks, every answer says how the ledger stands; with more, only the note does."""


class Wait:
    """One call that waits. `over` is set in any case; `error` says why, if what it waits for cannot be looked at."""

    def __init__(self, wait_id: str, client: str, since: int, ready: Ready | None) -> None:
        self.wait_id = wait_id
        self.client = client
        self.since = since
        self.ready = ready
        self.over = threading.Event()
        self.error: ForebayError | None = None


class Host:
    """Serves one storage, on one event loop. It has no tasks of its own: somebody calls `attend` again and again.

    `changed` is called after every call that changed something, for those who note how the ledger stands (`ledgers`);
    `poke`, from any thread, when `attend` has something to do.
    """

    def __init__(
        self,
        storage: Storage,
        spec: HostSpec,
        *,
        restarted: bool = False,
        changed: Callable[[], None] | None = None,
        poke: Callable[[], None] = lambda: None,
    ) -> None:
        self.storage = storage
        self.spec = spec
        self._restarted = restarted
        self._changed = changed
        self._operations = Operations(storage, spec, restarted=restarted, poke=poke)
        self._owner = f"host of {spec.name}/{spec.shard}-{uuid.uuid4().hex[:8]}"
        self._books: dict[str, Book] = {}
        self._newcomers: set[str] = set()  # clients whose first call was in this life of the host
        self._version = time.time_ns() // 1_000  # goes on growing when a host is restarted
        self._changes = 0
        self._waits: dict[str, Wait] = {}
        self._left: dict[str, None] = {}  # waits whose end came before them
        self._poke = poke
        self._closed = False

    async def start(self) -> None:
        """Open the storage, and take over what an earlier life left in it."""
        self.storage.subscribe(self._heard)
        settings = self.spec.settings
        if settings is not None:
            await self.storage.open(self._owner, settings, None)
            await self._operations.begin_uids()

    async def stop(self) -> None:
        """End every wait and close the storage; what owners hold stays theirs if it is durable."""
        self._closed = True
        for wait in self._waits.values():
            wait.over.set()
        for stream, _ in list(self._operations.streams.values()):
            await stream.aclose()
        if not self.storage.durable:
            for owner in list(self._operations.owners):
                await self.storage.close(owner)
        if self.spec.settings is not None:
            await self.storage.close(self._owner)

    def _heard(self, tasks: Collection[str]) -> None:
        """The storage changed: within a call, which looks after those who wait at its end, or from elsewhere."""
        self._version += 1
        if self._waits and CALL.get() is None:
            self._poke()

    async def attend(self) -> float:
        """Bring back what late owners held, and look after those who wait; in how many seconds to come again."""
        delay_s = _LOOK_S
        try:
            reaped = await self.storage.reap()
            if reaped.next_s is not None:
                delay_s = min(_LOOK_S, max(0.01, reaped.next_s))
            if reaped.returned:
                log.warning("holders_lost buffer=%s returned=%s", self.spec.name, dict(reaped.returned))
                await self._stand()
            await self._serve_waits()
            await self._forget_silent()
        except ForebayError as error:
            log.warning("reap_failed buffer=%s %s", self.spec.name, error)
        except Exception:
            # Whatever it was, what dead clients hold has to come back.
            log.exception("reap_failed buffer=%s", self.spec.name)
        return delay_s

    async def _forget_silent(self) -> None:
        """What clients began and left: those who live are heard of three times in a lease's time."""
        now = time.monotonic()
        lease_s = self.spec.lease_s
        for client, book in list(self._books.items()):
            silent_s = now - book.heard_at
            if lease_s is not None and silent_s > lease_s:
                for wait in self._waits.values():
                    if wait.client == client:
                        wait.over.set()
                if silent_s > max(2 * lease_s, _LEAVE_S):
                    await self._operations.abandon(client)
            if silent_s > _FORGET_S and all(answer.done() for answer in book.answers.values()):
                del self._books[client]
                self._newcomers.discard(client)
                await self.storage.forget(client)

    # --- calls ----------------------------------------------------------------------------------------

    async def call(self, head: bytes, payload: Payload, objects: Sequence[Any]) -> Message:
        """Do what a call asks for, once, and answer it."""
        request: Request = wire.decoded(head, Request)
        if request.sequence == 0:
            return await self._perform(request, payload, objects)
        if request.sequence == 1:
            self._newcomers.add(request.client)
        book = self._book(request.client)
        book.confirm(request.confirmed)
        answer = book.answers.get(request.sequence)
        if answer is None and request.sequence <= book.confirmed:
            error = InvalidInput(f"call {request.sequence} of {request.client} comes again after its answer was seen")
            failed = wire.Answer(self._version, len(self.storage), None, wire.failure_of(error), wire.NOTHING)
            return wire.encoded(failed), b"", []
        if answer is not None:
            return await asyncio.shield(answer)
        answer = book.answers[request.sequence] = asyncio.get_running_loop().create_future()
        try:
            message = await self._perform(request, payload, objects)
        except BaseException as error:
            answer.set_exception(error)
            answer.exception()  # it is raised here; nobody else need look at it
            raise
        answer.set_result(message)
        return message

    def _book(self, client: str) -> Book:
        book = self._books.get(client)
        if book is None:
            book = self._books[client] = Book()
        return book

    async def _perform(self, request: Request, payload: Payload, objects: Sequence[Any]) -> Message:
        version = self._version  # before the look: whatever changes during it counts as later
        due: list[str] | None = None
        try:
            if self._closed:
                raise BufferClosed(f"the host of buffer {self.spec.name!r} is closing")
            operation = OPERATIONS.get(request.op)
            if operation is None:
                raise InvalidInput(f"unknown operation {request.op!r}")
            kind, method = operation
            args = wire.decoded(request.body, kind)
            call = Exchange(request, self._book(request.client), PackedFrames(payload, objects), objects)
            token = CALL.set(Call(request.client, request.sequence, request.confirmed) if request.sequence else None)
            try:
                with as_values():  # what a durable storage decodes here is only encoded again
                    stored = await self._stored(request)
                    if stored is not None:
                        result = self._answer_again(request.op, stored.value, call)
                    else:
                        result = await method(self._operations, args, call)
            finally:
                CALL.reset(token)
        except ForebayError as error:
            failed = wire.Answer(version, len(self.storage), None, wire.failure_of(error), wire.NOTHING)
            return wire.encoded(failed), b"", []
        if call.tasks:
            with suppress(ForebayError):  # what was asked for is done
                due = await self._due(call.tasks)
        stand = None
        if request.sequence:
            stand = await self._stand()
            if self._waits and self._version > version:
                await self._serve_waits()
        answer = wire.Answer(version, len(self.storage), due, None, msgspec.Raw(wire.encoded(result)), stand)
        return wire.encoded(answer), call.parcel.whole(), call.parcel.objects

    async def _stored(self, request: Request) -> Answered | None:
        if not request.sequence or not self._restarted or request.client in self._newcomers:
            return None
        return await self.storage.answer(request.client, request.sequence)

    def _answer_again(self, op: str, value: Any, call: Exchange) -> Any:
        log.info("call_repeated buffer=%s op=%s", self.spec.name, op)
        return call.claimed(value) if op == "claim" else value

    async def ledgers(self) -> Ledgers:
        """How the ledger stands, for a note."""
        lines, tokens = await self.storage.ledger(), await self.storage.ledger(tokens=True)
        return self._changes, lines, tokens, await self.storage.accounts()

    async def _stand(self) -> wire.Stand | None:
        if self._changed is None:
            return None
        self._changes += 1
        self._changed()
        lines = await self.storage.ledger()
        return wire.Stand(self._changes, lines) if len(lines) <= _STAND_TASKS else None

    async def _due(self, tasks: Iterable[str]) -> list[str]:
        """Of which tasks something is below the watermark. Counts only; nothing is read."""
        named = list(dict.fromkeys(tasks))
        counts = await self.storage.count_statuses(named, list(EXPIRABLE))
        due: set[str] = set()
        for status in EXPIRABLE:
            if any(counts[task_name][status] for task_name in named):
                fresh = await self.storage.available(named, status)
                due |= {task_name for task_name in named if fresh[task_name] < counts[task_name][status]}
        return [task_name for task_name in named if task_name in due]

    # --- waits and beats ------------------------------------------------------------------------------

    async def begin_wait(self, head: bytes) -> Wait:
        """Take a place to wait; the wait is over when something changed since, and what it is for may be there."""
        request: Request = wire.decoded(head, Request)
        wait_id, since, ready = wire.decoded(request.body, tuple[str, int, Ready | None])
        if len(self._waits) >= self.spec.wait_places:
            raise TooManyWaits(
                f"{len(self._waits)} calls wait at the host of buffer {self.spec.name!r}, and there are "
                f"{self.spec.wait_places} places; have fewer processes wait, or create it with more wait_places"
            )
        wait = self._waits[wait_id] = Wait(wait_id, request.client, since, ready)
        if self._closed or wait_id in self._left or since > self._version:  # then it is of an earlier life
            wait.over.set()
        await self._serve_waits()
        return wait

    async def end_wait(self, wait: Wait) -> bytes:
        """Leave the place; how things stand."""
        self._waits.pop(wait.wait_id, None)
        failure = None if wait.error is None else wire.failure_of(wait.error)
        return wire.encoded(wire.Answer(self._version, len(self.storage), [], failure, wire.NOTHING))

    async def leave_wait(self, wait_id: str) -> None:
        """Whoever waits has gone, or goes before the wait arrives."""
        wait = self._waits.get(wait_id)
        if wait is not None:
            wait.over.set()
        else:
            self._left[wait_id] = None
            while len(self._left) > _LEFT_WAITS:
                del self._left[next(iter(self._left))]

    async def _serve_waits(self) -> None:
        for wait in list(self._waits.values()):
            if wait.over.is_set() or self._version <= wait.since:
                continue
            try:
                over = wait.ready is None or await self._is_ready(wait.ready)
            except ForebayError as error:
                wait.error, over = error, True
            if over:
                wait.over.set()

    async def _is_ready(self, ready: Ready) -> bool:
        if ready.wants:
            available = await self.storage.available(list(ready.wants), ready.status)
            return all(available[task_name] >= n for task_name, n in ready.wants.items())
        settings = self.spec.settings
        if settings is None or (settings.max_groups is None and settings.max_bytes is None):
            return True
        return fits(await self.storage.usage(), settings, ready.room_groups, ready.room_bytes)

    async def beat(self, owner: str, client: str, confirmed: int) -> None:
        """An owner lives."""
        await self.confirm(client, confirmed)
        await self._operations.welcome_back(owner)
        await in_thread(lambda: self.storage.beat(owner))

    async def confirm(self, client: str, confirmed: int) -> None:
        """A client has seen all answers up to this one."""
        book = self._books.get(client)
        if book is not None:
            book.confirm(confirmed)
