"""Ray's object references in samples: how to get their values, to put values back, and to tell which are lost.

Importing this registers `ray.ObjectRef` with `core.references`. Nothing here calls `free`: Ray counts references,
and Forebay's own go with the rows that hold them. An object lives no longer than its owner, the process that put it or
started the task that made it, whoever else refers to it. So whoever puts a value back owns it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray import exceptions
from ray.experimental import get_object_locations

from forebay.core.aio import in_thread
from forebay.core.references import register
from forebay.errors import ReferenceLost, StorageError

__all__ = ["lost", "put", "resolve"]

_LOCATE_S = 5.0
_ASKED_AT_ONCE = 1_000  # Ray makes several questions of more than 10,000
_CONFIRM_S = 15.0  # Ray itself says after a second that an owner has died
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
"""What is the end of an object, the special before the general. All other errors may pass: they fail no group."""


async def resolve(reference: ray.ObjectRef[Any]) -> Any:
    """The value of an object, waited for without holding the event loop; ReferenceLost if there will be none."""
    loop = asyncio.get_running_loop()
    arrival: asyncio.Future[Any] = loop.create_future()

    def hand_over(future: concurrent.futures.Future[Any]) -> None:
        if arrival.done():  # nobody waits any more
            return
        error = future.exception()
        if error is None:
            arrival.set_result(future.result())
        else:
            arrival.set_exception(error)

    def arrived(future: concurrent.futures.Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(hand_over, future)

    # Not awaited itself: a cancel of ours must not reach Ray's future, which Ray completes in any case.
    reference.future().add_done_callback(arrived)
    try:
        return await arrival
    except exceptions.RayError as error:
        reason = next((reason for kind, reason in _GONE if isinstance(error, kind)), None)
        if reason is None:
            raise StorageError(f"the value of a Ray object could not be fetched: {error}") from error
        raise ReferenceLost(f"a Ray object is lost: {reason}{_cause(error)}") from None


def _cause(error: BaseException) -> str:
    """What the user's own code raised, in one line: reasons are counted by their text."""
    cause = error.cause if isinstance(error, exceptions.RayTaskError) else None
    return "" if cause is None else f" ({type(cause).__name__}: {str(cause).partition(chr(10))[0][:80]})"


def put(value: Any) -> ray.ObjectRef[Any]:
    """A new object, owned by this process; StorageError if there is no room for it."""
    try:
        return ray.put(value)
    except (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError) as error:
        raise StorageError(f"no room in Ray's object store for the value of a reference: {error}") from error


async def lost(references: Iterable[ray.ObjectRef[Any]]) -> dict[ray.ObjectRef[Any], str]:
    """Those whose owner has died, with the reason; nothing is transferred. Milliseconds, unless there are some.

    Asks the owners where the objects are. One that does not answer may only be out of reach, so Ray is asked for the
    value: if the owner is dead and no copy on this node, it says so after a second. A copy here may go at any moment,
    and helps nobody elsewhere: then the owner's silence a second later decides. What cannot be told counts as there, as
    does what is still being made. Not seen: an object whose owner lives, and whose only copy was on a node that died.
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
    """Those whose owner does not say where they are."""
    asked = await asyncio.gather(*[in_thread(partial(_unlocated, owned)) for owned in _by_owner(references)])
    return [reference for silent in asked for reference in silent]


def _by_owner(references: list[ray.ObjectRef[Any]]) -> list[list[ray.ObjectRef[Any]]]:
    """What may be asked for in one call: Ray 2.60 ends this process if it is asked for the objects of several owners.

    It counts its questions while the first answers come in, and if all that were put so far are answered, it is ready;
    being ready twice is an error that nobody catches (`std::future_error`).
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
    except exceptions.RayError:  # it took too long, which tells nothing
        return []
    return [reference for reference in references if reference not in located]


async def _verdict(reference: ray.ObjectRef[Any]) -> str | None:
    """Why an object is lost; None if that cannot be told, and _COPY_HERE if it can be had in spite of its owner."""
    try:
        async with asyncio.timeout(_CONFIRM_S):
            await resolve(reference)
    except ReferenceLost as error:
        return str(error)
    except (TimeoutError, StorageError):
        return None
    return _COPY_HERE


register(ray.ObjectRef, resolve=resolve, put=put, available=ray.is_initialized)
