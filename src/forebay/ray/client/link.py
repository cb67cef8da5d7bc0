"""The calls of one client to one host: numbered, awaited, with typed errors.

A call that changes something has a number, so that the host runs it once however often Ray sends it. Failures on the
way are typed errors: no cluster, no such buffer, another version, a host that is restarting (Ray sends the call again
by itself), a dead host, with the number of groups that were lost with it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import uuid
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import ray
from ray import exceptions

import forebay
from forebay.core.aio import ignore_exception, in_thread
from forebay.errors import (
    BufferLost,
    ForebayError,
    NoCluster,
    NoSuchBuffer,
    StorageError,
    StorageUnavailable,
    VersionMismatch,
)
from forebay.ray import wire
from forebay.ray.host import notes
from forebay.ray.host.actor import NAMESPACE, actor_name
from forebay.ray.references import as_future
from forebay.ray.table import Operation
from forebay.ray.wire import Answer, Frames, Hello, Parcel, arguments_of, message_of_results, returns_for

log = logging.getLogger(__name__)

_LOOK_S = 5.0
"""How often a call without an answer checks whether this process is still in the cluster: Ray does not report it."""


def check_cluster() -> None:
    """NoCluster unless this process has joined a cluster."""
    if not ray.is_initialized():
        raise NoCluster(
            "this process has not joined a Ray cluster; call ray.init(address=...) first, or ray.init() for a local one"
        )


def first_line(error: BaseException | None) -> str:
    """The type and the first line of an error: Ray's messages fill a page."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def heard(beats: Sequence[Any], timeout_s: float) -> None:
    """Wait for the answers to heartbeats; raises the error of one that failed or was not answered in time."""
    ray.wait(list(beats), num_returns=len(beats), timeout=timeout_s)
    ray.get(list(beats), timeout=0)


def find_host(name: str, shard: int = 0) -> Any:
    """The actor that hosts a shard of a buffer; NoSuchBuffer, or BufferLost if it died with its groups."""
    check_cluster()
    try:
        return ray.get_actor(actor_name(name, shard), namespace=NAMESPACE)
    except ValueError:
        actor_id = notes.last_actor(actor_name(name, shard))
        note = None if actor_id is None else notes.read_note(actor_id)
        if note is not None:
            raise lost(name, note, "its actor is gone") from None
        raise NoSuchBuffer(
            f"no buffer {name!r} in the namespace {NAMESPACE!r} of this cluster; create it first, or check the name"
        ) from None


def lost(name: str, note: notes.Note, why: str) -> BufferLost:
    """The error that says how many groups were lost with a host."""
    groups = note.lost()
    counted = ", ".join(f"{task_name}: {count}" for task_name, count in groups.items())
    return BufferLost(
        f"the buffer {name!r} was hosted in memory and is lost ({why}): {sum(groups.values())} groups are gone"
        f"{f' ({counted})' if counted else ''}; create it again and resume from the last checkpoint, or create it on "
        "sqlite:///... or postgresql://..., which outlive their actor",
        groups,
    )


class Reply(NamedTuple):
    """The answer of a host; `size`: the bytes of its payload."""

    answer: Answer
    frames: Frames
    size: int

    def read(self, kind: Any) -> Any:
        """The result, of this type, with its groups."""
        return wire.with_groups(wire.decoded(self.answer.body, kind), lambda _, record: self.frames.group(record))


class Link:
    """Calls one host. Use it from any thread or event loop."""

    def __init__(self, actor: Any, hello: Hello) -> None:
        self._actor = actor
        self.hello = hello
        self.client = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._worker = ray.get_runtime_context().get_worker_id()
        self._guard = threading.RLock()
        self._last = 0
        self._stand: wire.Stand | None = None
        self._method = functools.cache(lambda returns: actor.call.options(num_returns=returns))
        self._rest: weakref.WeakKeyDictionary[asyncio.Future[Any], list[Any]] = weakref.WeakKeyDictionary()
        self._open: set[int] = set()  # numbers of calls whose answer was not seen yet

    @classmethod
    def to(cls, actor: Any, name: str, *, timeout_s: float | None = None) -> Link:
        """A link to a host of the same version, once its storage is open. Blocks for that."""
        try:
            head, _, _ = ray.get(actor.hello.remote(), timeout=timeout_s)
        except exceptions.RayError as error:
            dead = isinstance(error, exceptions.RayActorError)
            note = notes.read_note(actor._actor_id.hex()) if dead else None
            if note is not None:
                raise lost(name, note, first_line(error)) from error
            raise StorageUnavailable(f"the host of buffer {name!r} does not answer: {first_line(error)}") from error
        answer: Answer = wire.decoded(head, Answer)
        if answer.failure is not None:
            raise wire.error_of(answer.failure)
        other: wire.Version = wire.decoded(answer.body, wire.Version)  # all else may look different there
        if (other.protocol, other.version) != (wire.PROTOCOL, forebay.__version__):
            raise VersionMismatch(
                f"the buffer {name!r} is hosted by Forebay {other.version} (protocol {other.protocol}); here is "
                f"{forebay.__version__} (protocol {wire.PROTOCOL}): install one version on all nodes"
            )
        return cls(actor, wire.decoded(answer.body, Hello))

    # --- calls ----------------------------------------------------------------------------------------

    def begin(
        self, operation: Operation, arguments: Any, parcel: Parcel, *, expected_bytes: float = 0
    ) -> tuple[int, asyncio.Future[Any]]:
        """Send a call; its number, and a future of its answer for `finish`. `expected_bytes`: in the answer."""
        sequence = 0
        with self._guard:
            if operation.changes:
                self._last = sequence = self._last + 1
                self._open.add(sequence)
            confirmed = self._confirmed()
        try:
            returns = returns_for(expected_bytes)
            body = msgspec.Raw(wire.encoded(arguments))
            request = wire.Request(operation.name, self.client, sequence, confirmed, body, parcel.frames, returns)
            return sequence, self._future(self._method(returns), *arguments_of(wire.encoded(request), parcel))
        except BaseException:
            self.seen(sequence)  # it was never sent
            raise

    def _future(self, method: Any, *args: Any) -> asyncio.Future[Any]:
        check_cluster()  # a call from outside of a cluster would have Ray start one
        try:
            sent = method.remote(*args)
            first, rest = (sent[0], sent[1:]) if isinstance(sent, list) else (sent, [])
            future = as_future(first)
            future.add_done_callback(ignore_exception)  # its caller may have gone
            if rest:
                self._rest[future] = rest
            return future
        except exceptions.RayError as error:
            failed = asyncio.get_running_loop().create_future()
            failed.set_exception(error)
            return failed
        except Exception as error:
            # Ray was shut down in this process: its errors then have no type.
            self._check_worker()
            raise StorageUnavailable(f"Ray cannot send this call: {error}") from error

    def _check_worker(self) -> None:
        check_cluster()
        if ray.get_runtime_context().get_worker_id() != self._worker:
            raise StorageUnavailable(
                f"this process has left the cluster since it connected to buffer {self.hello.name!r}, and joined a "
                "cluster again; connect to the buffer again"
            )

    async def answered(self, future: asyncio.Future[Any], *, long: bool = False) -> None:
        """Wait until a future is done; an error if it never will be. A cancel of this wait does not cancel the future.

        Logs while it waits for a host that is restarting, unless the call is meant to take `long`.
        """
        waited_s = 0.0
        while not future.done():
            await asyncio.wait((future,), timeout=_LOOK_S)
            if not future.done():
                self._check_worker()
                waited_s += _LOOK_S
                if not long:
                    log.warning("host_does_not_answer buffer=%s seconds=%g", self.hello.name, waited_s)

    def _confirmed(self) -> int:
        with self._guard:
            return min(self._open, default=self._last + 1) - 1

    def seen(self, sequence: int) -> None:
        """The answer of a call was seen, or is no longer waited for."""
        with self._guard:
            self._open.discard(sequence)

    async def finish(self, future: asyncio.Future[Any]) -> Reply:
        """The answer of a call; an error of Ray as ours."""
        try:
            await self.answered(future)
            rest = self._rest.pop(future, None)
            # These results came with the first one, within the same answer: this does not wait.
            more = [] if rest is None else ray.get(rest)
            head, payload, objects = message_of_results(future.result(), more)
        except exceptions.RayError as error:
            raise await self.translated(error) from error
        answer: Answer = wire.decoded(head, Answer)
        stand = answer.stand
        if stand is not None and (self._stand is None or stand.version > self._stand.version):
            self._stand = stand
        frames = Frames(payload, objects, answer.frames, checksums=self.hello.checksums)
        return Reply(answer, frames, len(payload))

    async def wait(self, body: Any) -> Answer:
        """One long call, which takes a place for waits. If it is cancelled, it frees its place."""
        head = wire.encoded(wire.Request("wait", self.client, 0, 0, msgspec.Raw(wire.encoded(body))))
        future = self._future(self._actor.wait, head)
        try:
            await self.answered(future, long=True)
            answer: Answer = wire.decoded(future.result(), Answer)
        except asyncio.CancelledError:
            future.cancel()
            if ray.is_initialized():
                self._actor.leave_wait.remote(body[0])
            raise
        except exceptions.RayError as error:
            raise await self.translated(error) from error
        if answer.failure is not None:
            raise wire.error_of(answer.failure)
        return answer

    def beat(self, owner: str) -> Any:
        """Send a heartbeat; `heard` waits for its answer."""
        check_cluster()
        return self._actor.beat.remote(owner, self.client, self._confirmed())

    def confirm(self) -> None:
        """Tell the host which answers it may forget, without waiting."""
        check_cluster()
        self._actor.confirm.remote(self.client, self._confirmed())

    # --- errors ---------------------------------------------------------------------------------------

    async def translated(self, error: exceptions.RayError) -> ForebayError:
        """An error of Ray as one of ours."""
        name = self.hello.name
        if isinstance(error, exceptions.RayTaskError):
            return StorageError(f"the host of buffer {name!r} failed: {first_line(error)}")
        if isinstance(error, exceptions.ActorUnavailableError):
            return StorageUnavailable(
                f"the host of buffer {name!r} cannot be reached just now ({first_line(error)}); try again"
            )
        if isinstance(error, (exceptions.RayActorError, exceptions.ActorUnschedulableError)):
            note = await self.note()
            if note is not None:
                return lost(name, note, first_line(error))
            if self.hello.durable:
                return StorageUnavailable(
                    f"the host of buffer {name!r} is gone and does not come back ({first_line(error)}); its groups are "
                    "in its storage: create the buffer again on it"
                )
            return NoSuchBuffer(f"the buffer {name!r} was destroyed ({first_line(error)})")
        return StorageUnavailable(f"the call to the host of buffer {name!r} failed: {first_line(error)}")

    async def note(self) -> notes.Note | None:
        """The last known ledger of a host that was lost; None if its storage is durable, or it was destroyed."""
        if self.hello.durable:
            return None
        try:
            note = await in_thread(lambda: notes.read_note(self.hello.incarnation))
            return None if note is None else note.with_stand(self._stand)
        except Exception as error:  # the cluster is gone; its errors then have no type
            log.warning("note_unreadable buffer=%s %s", self.hello.name, error)
            return None
