"""Ray's object references: wait for their values, put values back, and find out which are lost.

Importing this registers `ray.ObjectRef` with `core.references`. Nothing here calls `free`: Ray counts references, and
Forebay drops its own with the rows that hold them. An object lives no longer than its owner, the process that put it or
started the task that made it, even if others refer to it. So the process that puts a value back owns it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray import exceptions
from ray.experimental import get_object_locations

from forebay.core.aio import in_thread
from forebay.core.references import register
from forebay.errors import ReferenceLost, StorageError

_LOCATE_S = 5.0
_ASKED_AT_ONCE = 1_000  # Ray splits requests for more than 10,000
_CONFIRM_S = 15.0  # Ray itself reports after a second that an owner has died
_AGAIN_S = 1.0
_COPY_HERE = ""

_GONE: tuple[tuple[type[BaseException], str], ...] = (
    (exceptions.OwnerDiedError, "its owner died"),
    (exceptions.ObjectFreedError, "it was freed"),
    (exceptions.ObjectReconstructionFailedError, "all copies are lost, and it could not be made again"),
    (exceptions.ObjectLostError, "all copies are lost"),
    (exceptions.TaskCancelledError, "the task that makes it was cancelled"),
    (exceptions.RayTaskError, "the task that makes it failed"),
    (exceptions.RayActorError, "the actor that makes it died"),
    (exceptions.WorkerCrashedError, "the worker that makes it died"),
    (exceptions.NodeDiedError, "the node of the task that makes it died"),
    (exceptions.OutOfMemoryError, "the worker that makes it ran out of memory"),
    (exceptions.RuntimeEnvSetupError, "the task that makes it cannot run"),
    (exceptions.TaskUnschedulableError, "the task that makes it cannot run"),
    (exceptions.ActorUnschedulableError, "the actor that makes it cannot run"),
)
"""Errors that mean the end of an object, subclasses first. All others may be temporary, and fail no group."""


def as_future(reference: Any, *, first: Callable[[], None] | None = None) -> asyncio.Future[Any]:
    """The value of an object, or the result of a call, as a future. `first` runs before it is done, on any thread.

    Not `asyncio.wrap_future`: a cancel must not reach Ray's future, which Ray completes in any case, and the event
    loop may be closed by then.
    """
    loop = asyncio.get_running_loop()
    arrival: asyncio.Future[Any] = loop.create_future()

    def hand_over(source: concurrent.futures.Future[Any]) -> None:
        if arrival.done():  # the caller was cancelled
            return
        error = source.exception()
        if error is None:
            arrival.set_result(source.result())
        else:
            arrival.set_exception(error)

    def arrived(source: concurrent.futures.Future[Any]) -> None:
        if first is not None:
            first()
        with suppress(RuntimeError):  # the event loop is closed: nothing waits for the result
            loop.call_soon_threadsafe(hand_over, source)

    reference.future().add_done_callback(arrived)
    return arrival


async def resolve(reference: ray.ObjectRef[Any]) -> Any:
    """Wait for the value of an object without blocking the event loop; ReferenceLost if there will be none."""
    try:
        return await as_future(reference)
    except exceptions.RayError as error:
        reason = next((reason for kind, reason in _GONE if isinstance(error, kind)), None)
        if reason is None:
            raise StorageError(f"the value of a Ray object could not be fetched: {error}") from error
        raise ReferenceLost(f"a Ray object is lost: {reason}{_cause(error)}") from None


def _cause(error: BaseException) -> str:
    """The error of the user's own code, in one line: reasons are counted by their text."""
    cause = error.cause if isinstance(error, exceptions.RayTaskError) else None
    return "" if cause is None else f" ({type(cause).__name__}: {str(cause).partition(chr(10))[0][:80]})"


def put(value: Any) -> ray.ObjectRef[Any]:
    """A new object, owned by this process; StorageError if it does not fit."""
    try:
        return ray.put(value)
    except (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError) as error:
        raise StorageError(f"Ray's object store is too full for the value of a reference: {error}") from error


async def lost(references: Iterable[ray.ObjectRef[Any]]) -> dict[ray.ObjectRef[Any], str]:
    """The references whose owner has died, with the reason. Transfers nothing; takes milliseconds if there are none.

    Asks the owners where the objects are. An owner that does not answer may only be out of reach, so Ray is asked for
    the value: if the owner is dead and this node has no copy, Ray says so after a second. A copy on this node may be
    dropped at any moment, and is no use elsewhere: then the owner is asked again a second later. An object counts as
    there if this cannot be decided, or while it is still being made. Not noticed: an object whose owner is alive and
    whose only copy was on a node that died.
    """
    silent = await _silent(list(dict.fromkeys(references)))
    reasons = dict(zip(silent, await asyncio.gather(*[_verdict(reference) for reference in silent]), strict=True))
    here = [reference for reference, reason in reasons.items() if reason == _COPY_HERE]
    if here:
        await asyncio.sleep(_AGAIN_S)
        for reference in await _silent(here):
            reasons[reference] = "a Ray object is lost: its owner died"
    return {reference: reason for reference, reason in reasons.items() if reason}


async def _silent(references: list[ray.ObjectRef[Any]]) -> list[ray.ObjectRef[Any]]:
    """The references whose owner does not answer where they are."""
    asked = await asyncio.gather(*[in_thread(partial(_unlocated, owned)) for owned in _by_owner(references)])
    return [reference for silent in asked for reference in silent]


def _by_owner(references: list[ray.ObjectRef[Any]]) -> list[list[ray.ObjectRef[Any]]]:
    """The references by owner: Ray 2.60 ends this process if one call asks for the objects of several owners.

    It counts its requests while the first answers arrive, and is ready when all requests sent so far are answered;
    being ready twice is an error that nothing catches (`std::future_error`).
    """
    core: Any = ray._private.worker.global_worker
    owner_of = getattr(core.core_worker, "get_owner_address", None)
    if owner_of is None:
        return [[reference] for reference in references]
    owned: dict[bytes, list[list[ray.ObjectRef[Any]]]] = {}
    for reference in references:
        parts = owned.setdefault(owner_of(reference), [[]])
        if len(parts[-1]) == _ASKED_AT_ONCE:
            parts.append([])
        parts[-1].append(reference)
    return [part for parts in owned.values() for part in parts]


def _unlocated(references: list[ray.ObjectRef[Any]]) -> list[ray.ObjectRef[Any]]:
    try:
        located = get_object_locations(references, timeout_ms=int(_LOCATE_S * 1000))
    except exceptions.RayError:  # a timeout proves nothing
        return []
    return [reference for reference in references if reference not in located]


async def _verdict(reference: ray.ObjectRef[Any]) -> str | None:
    """Why an object is lost; None if that cannot be decided, _COPY_HERE if this node has a copy."""
    try:
        async with asyncio.timeout(_CONFIRM_S):
            await resolve(reference)
    except ReferenceLost as error:
        return str(error)
    except (TimeoutError, StorageError):
        return None
    return _COPY_HERE


register(ray.ObjectRef, resolve=resolve, put=put, available=ray.is_initialized)
