"""The host of a buffer, and the Ray actor around it: a storage on one event loop, behind calls to the `table`.

`Host` knows nothing of Ray; tests may call it directly. Promises:
- A call that changes something happens once: it carries its client and a number, and if it arrives again, it gets the
  same answer. Answers are remembered until the client has confirmed them; a durable storage keeps them with the effect.
- A wait is one call, answered when its condition may hold; the number of waits is limited.
- The groups of dead clients come back at their deadline.

The calls of the actor are in three groups, so that none waits behind another kind: operations, waits (each holds a
thread while it waits), and heartbeats. A host that cannot open its storage reports that in every answer, and tries
again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
import warnings
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import msgspec
import ray

import forebay
from forebay.core.aio import in_thread
from forebay.core.capacity import fits
from forebay.core.references import as_values
from forebay.errors import BufferClosed, ForebayError, InvalidInput, TooManyWaits
from forebay.ray import wire
from forebay.ray.host.notes import Note, NoteWriter
from forebay.ray.host.operations import Book, Exchange, FrameStorage, HostSpec, Operations
from forebay.ray.table import OPERATIONS
from forebay.ray.wire import Frames, Message, Parcel, Payload, Request, message_of_arguments, results_of
from forebay.storage.base import Storage
from forebay.storage.idempotency import CALL, Call
from forebay.storage.sqlite import SQLiteStorage
from forebay.storage.urls import IN_MEMORY, SQLITE_URL, build_storage
from forebay.storage.values import Ready

log = logging.getLogger(__name__)

T = TypeVar("T")

NAMESPACE = "forebay"
CALLS, WAITS, HEARTBEATS = "calls", "waits", "heartbeats"
"""The groups of calls; each has its own threads."""
SPARE_THREADS = 8
"""Extra threads used to reject waits when all `wait_places` are taken."""

_LONGEST_WAIT_S = 300.0
_LOOK_S = 5.0  # the longest time between two checks for deadlines
_LEFT_WAITS = 1_000
_LEAVE_S = 10.0  # at least this long after its last call, a client loses its streams
_FORGET_S = 3_600.0  # this long after its last call, the answers to a client are forgotten

_STAND_TASKS = 8
"""Up to this number of tasks every answer has the ledger; with more, only the note has it."""

_CHANGED: ContextVar[dict[str, None] | None] = ContextVar("forebay_changed", default=None)
"""The tasks that the call in progress changed; None outside of a call."""


class Wait(msgspec.Struct):
    """One call that waits. `over` is set in any case; `error` if its condition could not be checked."""

    wait_id: str
    client: str
    since: int
    ready: Ready | None
    over: threading.Event = msgspec.field(default_factory=threading.Event)
    error: ForebayError | None = None


class Host:
    """Serves one storage, on one event loop. It starts no tasks: its user calls `attend` again and again.

    `changed` is called after every call that changed something, so that the `note` is written; `poke`, from any thread,
    when `attend` has something to do.
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
        self.operations = Operations(storage, spec, restarted=restarted, poke=poke)
        self._restarted = restarted
        self._changed = changed
        self._owner = f"host of {spec.name}/{spec.shard}-{uuid.uuid4().hex[:8]}"
        self._books: defaultdict[str, Book] = defaultdict(Book)
        self._newcomers: set[str] = set()  # clients whose first call came after the start of this host
        self._version = time.time_ns() // 1_000  # continues to grow when a host is restarted
        self._changes = 0
        self._stands = changed is not None
        self._waits: dict[str, Wait] = {}
        self._left: deque[str] = deque(maxlen=_LEFT_WAITS)  # waits that ended before they arrived
        self._poke = poke
        self._closed = False

    async def start(self) -> None:
        """Open the storage."""
        self.storage.subscribe(self._heard)
        settings = self.spec.settings
        if settings is not None:
            await self.storage.open(self._owner, settings, None)
            await self.operations.begin_uids()

    async def stop(self) -> None:
        """End every wait and close the storage; owners keep their groups if it is durable."""
        self._closed = True
        for wait in self._waits.values():
            wait.over.set()
        for stream, _ in list(self.operations.streams.values()):
            await stream.aclose()
        if not self.storage.durable:
            for owner in list(self.operations.owners):
                await self.storage.close(owner)
        if self.spec.settings is not None:
            await self.storage.close(self._owner)

    def _heard(self, tasks: Collection[str]) -> None:
        """The storage changed: within a call, which serves the waits at its end, or from elsewhere."""
        self._version += 1
        changed = _CHANGED.get()
        if changed is not None:
            changed.update(dict.fromkeys(tasks))
        elif self._waits:
            self._poke()

    async def attend(self) -> float:
        """Release the groups of dead owners and serve the waits; returns the seconds until the next call is due."""
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
            # After any error the next call must still release the groups of dead clients.
            log.exception("reap_failed buffer=%s", self.spec.name)
        return delay_s

    async def _forget_silent(self) -> None:
        """Clean up after clients that went silent. A live client sends three heartbeats per lease."""
        now = time.monotonic()
        lease_s = self.spec.lease_s
        for client, book in list(self._books.items()):
            silent_s = now - book.heard_at
            if lease_s is not None and silent_s > lease_s:
                for wait in self._waits.values():
                    if wait.client == client:
                        wait.over.set()
                if silent_s > max(2 * lease_s, _LEAVE_S):
                    await self.operations.abandon(client)
            if silent_s > _FORGET_S and all(answer.done() for answer in book.answers.values()):
                del self._books[client]
                self._newcomers.discard(client)
                await self.operations.forget(client)

    # --- calls ----------------------------------------------------------------------------------------

    async def call(self, request: Request, payload: Payload, objects: Sequence[Any]) -> Message:
        """Run a call, once, and answer it."""
        if request.sequence == 0:
            return await self._perform(request, payload, objects)
        if request.sequence == 1:
            self._newcomers.add(request.client)
        book = self._books[request.client]
        book.confirm(request.confirmed)
        answer = book.answers.get(request.sequence)
        if answer is None and request.sequence <= book.confirmed:
            again = InvalidInput(f"call {request.sequence} of {request.client} arrived again after its answer was seen")
            return wire.failed(again, self._version, len(self.storage)), b"", []
        if answer is not None:
            return await asyncio.shield(answer)
        answer = book.answers[request.sequence] = asyncio.get_running_loop().create_future()
        try:
            message = await self._perform(request, payload, objects)
        except BaseException as error:
            answer.set_exception(error)
            answer.exception()  # raised below; retrieved, so that asyncio does not log it
            raise
        answer.set_result(message)
        return message

    async def _perform(self, request: Request, payload: Payload, objects: Sequence[Any]) -> Message:
        version = self._version  # as of before the operation: all changes during it count as later
        changed: dict[str, None] = {}
        tokens = (
            CALL.set(Call(request.client, request.sequence, request.confirmed) if request.sequence else None),
            _CHANGED.set(changed),
        )
        try:
            with as_values():  # values that a durable storage decodes here are only encoded again
                result = await self._result(request, Frames(payload, objects, request.frames))
        except ForebayError as error:
            return wire.failed(error, version, len(self.storage)), b"", []
        finally:
            CALL.reset(tokens[0])
            _CHANGED.reset(tokens[1])
        parcel = Parcel()
        body = msgspec.Raw(wire.encoded(wire.with_groups(result, parcel.add_group)))
        stand = None
        if request.sequence:
            stand = await self._stand()
            if self._waits and self._version > version:
                await self._serve_waits()
        answer = wire.Answer(version, len(self.storage), list(changed), None, body, stand, parcel.frames)
        return wire.encoded(answer), parcel.whole(), parcel.objects

    async def _result(self, request: Request, frames: Frames) -> Any:
        """The result of the operation, or of its first run, if a durable storage remembers that."""
        if self._closed:
            raise BufferClosed(f"the host of buffer {self.spec.name!r} is closing")
        operation = OPERATIONS.get(request.op)
        if operation is None:
            raise InvalidInput(f"unknown operation {request.op!r}")
        may_be_stored = request.sequence and self._restarted and request.client not in self._newcomers
        stored = await self.operations.answer(request.client, request.sequence) if may_be_stored else None
        if stored is not None:
            log.info("call_repeated buffer=%s op=%s", self.spec.name, request.op)
            return stored.value
        heads = wire.decoded(request.body, operation.arguments)
        arguments = wire.with_groups(heads, lambda group, record: self.operations.next_group(frames))
        if operation.carried is not None:
            arguments = (*arguments[: operation.carried], frames.objects[-1], *arguments[operation.carried + 1 :])
        call = Exchange(request.client, request.sequence, request.confirmed, self._books[request.client])
        return await self.operations.run(operation, arguments, call)

    async def note(self) -> Note:
        """The figures of all tasks, to be written down."""
        return Note(self._changes, (await self.storage.summary()).tasks)

    async def _stand(self) -> wire.Stand | None:
        """The ledger after a change, for the answer; has the note written, too."""
        if self._changed is None:
            return None
        self._changes += 1
        self._changed()
        if not self._stands:
            return None
        lines = (await self.storage.summary()).ledger()
        self._stands = len(lines) <= _STAND_TASKS
        return wire.Stand(self._changes, lines) if self._stands else None

    # --- waits and heartbeats -------------------------------------------------------------------------

    async def begin_wait(self, request: Request) -> Wait:
        """Begin a wait, which is over when something changed after a version, and its condition may hold."""
        wait_id, since, ready = wire.decoded(request.body, tuple[str, int, Ready | None])
        if len(self._waits) >= self.spec.wait_places:
            raise TooManyWaits(
                f"{len(self._waits)} calls wait at the host of buffer {self.spec.name!r}, which has "
                f"{self.spec.wait_places} places; let fewer processes wait, or create it with more wait_places"
            )
        wait = self._waits[wait_id] = Wait(wait_id, request.client, since, ready)
        if self._closed or wait_id in self._left or since > self._version:  # the last: from before a restart
            wait.over.set()
        await self._serve_waits()
        return wait

    async def end_wait(self, wait: Wait) -> bytes:
        """Free the place of a wait, and answer it."""
        self._waits.pop(wait.wait_id, None)
        failure = None if wait.error is None else wire.failure_of(wait.error)
        return wire.encoded(wire.Answer(self._version, len(self.storage), [], failure, wire.NOTHING))

    async def leave_wait(self, wait_id: str) -> None:
        """End a wait whose caller has gone, also if it has yet to arrive."""
        wait = self._waits.get(wait_id)
        if wait is not None:
            wait.over.set()
        else:
            self._left.append(wait_id)

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
            summary = await self.storage.summary(list(ready.wants))
            return all(summary.task(name).fresh.get(ready.status, 0) >= n for name, n in ready.wants.items())
        settings = self.spec.settings
        if settings is None or (settings.max_groups is None and settings.max_bytes is None):
            return True
        return fits((await self.storage.summary(())).usage, settings, ready.room_groups, ready.room_bytes)

    async def beat(self, owner: str, client: str, confirmed: int) -> None:
        """A heartbeat of an owner."""
        await self.confirm(client, confirmed)
        await self.operations.welcome_back(owner)
        await in_thread(lambda: self.storage.beat(owner))

    async def confirm(self, client: str, confirmed: int) -> None:
        """A client has seen all answers up to this one."""
        book = self._books.get(client)
        if book is not None:
            book.confirm(confirmed)


def actor_name(name: str, shard: int) -> str:
    """The name of the actor of a shard."""
    return name if shard == 0 else f"{name}#{shard}"


class _Loop:
    """Runs coroutines on one event loop for any thread.

    For a storage in memory, whose operations never wait, the calling thread runs the loop itself, one call at a time:
    that is the fastest. Operations that wait for a disk or a server overlap on a loop in its own thread.
    """

    def __init__(self, *, in_memory: bool) -> None:
        self._loop = asyncio.new_event_loop()
        self._turn = threading.Lock() if in_memory else None
        if not in_memory:
            threading.Thread(target=self._loop.run_forever, name="forebay-host", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and wait for its result."""
        if self._turn is None:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        with self._turn:
            return self._loop.run_until_complete(work)


class BufferActor:
    """Hosts one storage. Made by `forebay.ray.RayReplayBuffer.create`."""

    def __init__(
        self, spec: HostSpec, storage: str, shards: int = 1, settings: wire.BufferSettings | None = None
    ) -> None:
        context = ray.get_runtime_context()
        self._spec = spec
        self._shards = shards
        self._settings = settings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray warns of a name that it uses itself in there
            self._restarted = bool(context.was_current_actor_reconstructed)
        self._actor_id = context.get_actor_id() or ""
        self._notes: NoteWriter | None = None
        self._poked = threading.Event()
        self._use(storage)
        threading.Thread(target=self._attend, name="forebay-attendant", daemon=True).start()

    def _use(self, storage: str) -> None:
        self._url = storage
        self._host: Host | None = None
        self._loop = _Loop(in_memory=storage in IN_MEMORY)
        self._starting = asyncio.Lock()

    # No method here may be async: Ray would make another kind of actor of it.

    @ray.method(concurrency_group=CALLS)
    def hello(self) -> Message:
        """Introduce this host, once its storage is open."""
        return self._loop.run(_served(self, lambda host: _hello(self, host)))

    @ray.method(concurrency_group=CALLS)
    def call(self, first: bytes, *more: Any) -> Any:
        """Run an operation."""
        head, payload, objects = message_of_arguments(first, more)
        request: wire.Request = wire.decoded(head, wire.Request)
        answer = self._loop.run(_served(self, lambda host: host.call(request, payload, objects)))
        return results_of(answer, request.returns)

    @ray.method(concurrency_group=WAITS)
    def wait(self, head: bytes) -> bytes:
        """Wait for a change."""
        try:
            host = self._loop.run(_started(self))
            wait = self._loop.run(host.begin_wait(wire.decoded(head, wire.Request)))
        except ForebayError as error:
            return wire.failed(error)
        # After this time the client asks again: a dead client must not hold its place forever.
        wait.over.wait(_LONGEST_WAIT_S)
        return self._loop.run(host.end_wait(wait))

    @ray.method(concurrency_group=HEARTBEATS)
    def leave_wait(self, wait_id: str) -> None:
        """End a wait whose caller has gone."""
        if self._host is not None:
            self._loop.run(self._host.leave_wait(wait_id))

    @ray.method(concurrency_group=HEARTBEATS)
    def beat(self, owner: str, client: str, confirmed: int) -> None:
        """Renew the deadline of an owner."""
        host = self._loop.run(_started(self))
        self._loop.run(host.beat(owner, client, confirmed))

    @ray.method(concurrency_group=HEARTBEATS)
    def confirm(self, client: str, confirmed: int) -> None:
        """Forget the answers that a client has seen."""
        if self._host is not None:
            self._loop.run(self._host.confirm(client, confirmed))

    @ray.method(concurrency_group=HEARTBEATS)
    def stop(self) -> None:
        """Close the storage, because the buffer is destroyed."""
        if self._host is not None:
            self._loop.run(self._host.stop())
        if self._notes is not None:
            self._notes.end()

    def _build(self) -> Storage:
        if self._url == "memory":
            return FrameStorage()
        if self._url.startswith(SQLITE_URL):  # clients outlive a restart of their host
            return SQLiteStorage(self._url.removeprefix(SQLITE_URL), holders_outlive_s=self._spec.lease_s)
        return build_storage(self._url)

    def _attend(self) -> None:
        """Let the host do its own work at deadlines and when it is poked; runs in a dedicated thread."""
        delay_s = 1.0
        while True:
            self._poked.wait(delay_s)
            self._poked.clear()
            host = self._host
            if host is not None:
                delay_s = self._loop.run(host.attend())


async def _started(actor: BufferActor) -> Host:
    async with actor._starting:
        if actor._host is None:
            storage = actor._build()
            if not storage.durable and actor._notes is None:
                actor._notes = NoteWriter(actor._actor_id, lambda: actor._loop.run(actor._host.note()))  # type: ignore[union-attr]
            host = Host(
                storage,
                actor._spec,
                restarted=actor._restarted,
                changed=None if actor._notes is None else actor._notes.changed,
                poke=actor._poked.set,
            )
            try:
                await host.start()
            except BaseException:
                await host.stop()  # the next attempt to open it must not find it in use by this one
                raise
            actor._host = host
            if actor._notes is not None:
                actor._notes.changed()  # a host that is lost before its first change has a note, too
            log.info("host_started buffer=%s restarted=%s", actor._spec.name, actor._restarted)
        return actor._host


async def _served(actor: BufferActor, serve: Callable[[Host], Awaitable[Message]]) -> Message:
    host = actor._host
    if host is None:
        try:
            host = await _started(actor)
        except ForebayError as error:
            return wire.failed(error), b"", []
    return await serve(host)


async def _hello(actor: BufferActor, host: Host) -> Message:
    hello = wire.Hello(
        wire.PROTOCOL,
        forebay.__version__,
        actor._spec.name,
        actor._actor_id,
        host.storage.durable,
        not isinstance(host.storage, FrameStorage),
        host.storage.store_id,
        actor._shards,
        actor._settings,
    )
    answer = wire.Answer(0, len(host.storage), [], None, msgspec.Raw(wire.encoded(hello)))
    return wire.encoded(answer), b"", []
