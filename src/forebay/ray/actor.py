"""The Ray actor around a host: threads in which Ray's calls arrive, and one event loop on which everything happens.

Calls are in three groups, so that none waits behind another kind: operations, waits (each holds a thread for as long as
it waits), and signs of life. A host that cannot open its storage says so in every answer, and tries again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import msgspec
import ray

import forebay
from forebay.errors import ForebayError
from forebay.ray import packing, wire
from forebay.ray.frames import FrameStorage
from forebay.ray.host import Host
from forebay.ray.notes import Note, NoteWriter
from forebay.ray.operations import HostSpec
from forebay.ray.runner import Inline, InThread, Runner
from forebay.ray.wire import Message, Payload
from forebay.storage.base import Storage
from forebay.storage.urls import IN_MEMORY, build_storage

__all__ = ["NAMESPACE", "SPARE_THREADS", "BufferActor", "actor_name"]

log = logging.getLogger(__name__)

NAMESPACE = "forebay"

_LONGEST_WAIT_S = 300.0

SPARE_THREADS = 8
"""Threads beyond the places for waits, in which those who find none are told so."""


def actor_name(name: str, shard: int) -> str:
    """Under which name the actor of a shard is found."""
    return name if shard == 0 else f"{name}#{shard}"


class BufferActor:
    """Hosts one storage. Made by `forebay.ray.RayReplayBuffer.create`."""

    def __init__(
        self, spec: HostSpec, storage: str, shards: int = 1, settings: wire.BufferSettings | None = None
    ) -> None:
        context = ray.get_runtime_context()
        self._spec = spec
        self._url = storage
        self._shards = shards
        self._settings = settings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray warns of a name that it uses itself in there
            self._restarted = bool(context.was_current_actor_reconstructed)
        self._actor_id = context.get_actor_id() or ""
        self._host: Host | None = None
        self._notes: NoteWriter | None = None
        self._runner: Runner = Inline() if storage in IN_MEMORY else InThread()
        self._starting = asyncio.Lock()
        self._something = threading.Event()
        threading.Thread(target=self._attend, name="forebay-attendant", daemon=True).start()

    # No method here may be async: Ray would make another kind of actor of it.

    @ray.method(concurrency_group="operations")
    def hello(self) -> Message:
        """What this host is, once its storage is open."""
        return self._runner.run(_hello(self))

    @ray.method(concurrency_group="operations")
    def call(self, first: bytes, *more: Any) -> Any:
        head, payload, objects = packing.message_of_arguments(first, more)
        answer = self._runner.run(_call(self, head, payload, objects))
        return packing.results_of(answer, wire.decoded(head, wire.Request).returns)

    @ray.method(concurrency_group="waits")
    def wait(self, head: bytes) -> bytes:
        try:
            host = self._runner.run(_started(self))
            wait = self._runner.run(host.begin_wait(head))
        except ForebayError as error:
            return _failed(error)[0]
        # Then the client asks again: a place must not be held for ever by one that has gone.
        wait.over.wait(_LONGEST_WAIT_S)
        return self._runner.run(host.end_wait(wait))

    @ray.method(concurrency_group="signs")
    def leave_wait(self, wait_id: str) -> None:
        if self._host is not None:
            self._runner.run(self._host.leave_wait(wait_id))

    @ray.method(concurrency_group="signs")
    def beat(self, owner: str, client: str, confirmed: int) -> None:
        self._runner.run(_beat(self, owner, client, confirmed))

    @ray.method(concurrency_group="signs")
    def confirm(self, client: str, confirmed: int) -> None:
        if self._host is not None:
            self._runner.run(self._host.confirm(client, confirmed))

    @ray.method(concurrency_group="signs")
    def stop(self) -> None:
        """Close the storage: the end is meant."""
        if self._host is not None:
            self._runner.run(self._host.stop())
        if self._notes is not None:
            self._notes.end()

    def _build(self) -> Storage:
        storage = FrameStorage() if self._url == "memory" else build_storage(self._url)
        if hasattr(storage, "holders_outlive_s"):
            storage.holders_outlive_s = self._spec.lease_s  # clients live on when their host is restarted
        return storage

    def _attend(self) -> None:
        """What a host does by itself: in a thread of its own, at deadlines and when it is poked."""
        delay_s = 1.0
        while True:
            self._something.wait(delay_s)
            self._something.clear()
            host = self._host
            if host is not None:
                delay_s = self._runner.run(host.attend())

    def _note(self) -> Note:
        assert self._host is not None
        version, lines, tokens, accounts = self._runner.run(self._host.ledgers())
        return Note(version, lines, tokens, {name: account.reasons for name, account in accounts.items()})


async def _started(actor: BufferActor) -> Host:
    async with actor._starting:
        if actor._host is None:
            storage = actor._build()
            if not storage.durable and actor._notes is None:
                actor._notes = NoteWriter(actor._actor_id, actor._note)
            host = Host(
                storage,
                actor._spec,
                restarted=actor._restarted,
                changed=None if actor._notes is None else actor._notes.changed,
                poke=actor._something.set,
            )
            try:
                await host.start()
            except BaseException:
                await host.stop()  # the next one to open it must not find it in use by us
                raise
            actor._host = host
            if actor._notes is not None:
                actor._notes.changed()  # so that one that is lost before its first change is known, too
            log.info("host_started buffer=%s restarted=%s", actor._spec.name, actor._restarted)
        return actor._host


async def _hello(actor: BufferActor) -> Message:
    try:
        host = await _started(actor)
    except ForebayError as error:
        return _failed(error)
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


async def _call(actor: BufferActor, head: bytes, payload: Payload, objects: Sequence[Any]) -> Message:
    host = actor._host
    if host is None:
        try:
            host = await _started(actor)
        except ForebayError as error:
            return _failed(error)
    return await host.call(head, payload, objects)


async def _beat(actor: BufferActor, owner: str, client: str, confirmed: int) -> None:
    host = await _started(actor)
    await host.beat(owner, client, confirmed)


def _failed(error: ForebayError) -> Message:
    return wire.encoded(wire.Answer(0, 0, [], wire.failure_of(error), wire.NOTHING)), b"", []
