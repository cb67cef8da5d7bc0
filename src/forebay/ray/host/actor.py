"""The Ray actor around a host: threads in which Ray's calls arrive, and one event loop on which everything runs.

Calls are in three groups, so that none waits behind another kind: operations, waits (each holds a thread while it
waits), and heartbeats. A host that cannot open its storage reports that in every answer, and tries again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import ray

import forebay
from forebay.errors import ForebayError
from forebay.ray import wire
from forebay.ray.host.frames import FrameStorage
from forebay.ray.host.host import Host
from forebay.ray.host.notes import NoteWriter
from forebay.ray.host.operations import HostSpec
from forebay.ray.parcel import Message, message_of_arguments, results_of
from forebay.storage.base import Storage
from forebay.storage.sqlite import SQLiteStorage
from forebay.storage.urls import IN_MEMORY, SQLITE_URL, build_storage

__all__ = ["HEARTBEATS", "NAMESPACE", "OPERATIONS", "SPARE_THREADS", "WAITS", "BufferActor", "actor_name"]

log = logging.getLogger(__name__)

T = TypeVar("T")

NAMESPACE = "forebay"
OPERATIONS, WAITS, HEARTBEATS = "operations", "waits", "heartbeats"
"""The groups of calls; each has its own threads."""

SPARE_THREADS = 8
"""Extra threads used to reject waits when all `wait_places` are taken."""

_LONGEST_WAIT_S = 300.0


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

    @ray.method(concurrency_group=OPERATIONS)
    def hello(self) -> Message:
        """Introduce this host, once its storage is open."""
        return self._loop.run(_served(self, lambda host: _hello(self, host)))

    @ray.method(concurrency_group=OPERATIONS)
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
        # Then the client asks again: a client that has gone must not hold its place forever.
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
