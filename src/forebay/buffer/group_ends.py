"""Calls a user's function for every group that leaves for good: `on_group_end(event)`.

The storage notes an end in the very step that moves the group (an outbox), and forgets the note when the callback has
returned. So a durable store reports every end at least once, over any crash; one in memory at most once. The callback
runs in the process of the buffer that has it: awaited if it is async, else in a dedicated thread. An
exception in it is logged and counted, and stops nothing. A lease that a checkpoint counts as trained ends there, and is
not reported.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from forebay.core.aio import Changes, Pool, in_thread
from forebay.core.ledger import GroupEnd
from forebay.errors import BufferClosed, InvalidConfig
from forebay.storage.base import Storage

log = logging.getLogger(__name__)

OnGroupEnd: TypeAlias = "Callable[[GroupEnd], Awaitable[object] | object]"

_SLICE_EVENTS = 64
_LAST_EVENTS_S = 10.0
"""How long closing a buffer waits for callbacks; the next buffer reports the remaining notes of a durable store."""

_RETRY_S = 1.0


class GroupEnds:
    """Reports the groups that end to a callback, from the event loop of its buffer."""

    def __init__(self, storage: Storage, owner: str, callback: OnGroupEnd) -> None:
        if not callable(callback):
            raise InvalidConfig(f"on_group_end is {callback!r:.80}; expected a function of one event")
        self._storage = storage
        self._owner = owner
        self._callback = callback
        self._pool = Pool("group-end", 1)
        self._task: asyncio.Task[None] | None = None
        self.told = 0
        self.failed = 0

    def tell_from(self, changes: Changes) -> None:
        """Report the ends that the storage notes, in the background of the running loop."""
        self._task = asyncio.create_task(self._run(changes), name="on_group_end")

    async def stop(self) -> None:
        """Wait until all ends so far are reported. The task then stops, because its changes are closed."""
        task, self._task = self._task, None
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            await asyncio.wait((task,), timeout=_LAST_EVENTS_S)
            if not task.done():
                log.warning("group_ends_not_told: a callback still runs after %g s", _LAST_EVENTS_S)
                task.cancel()
                await asyncio.wait((task,))

    async def _run(self, changes: Changes) -> None:
        closed = False
        while True:
            ticket = changes.ticket()
            try:
                if await self._tell():
                    continue
                if closed:
                    return
                await changes.wait(ticket, None, lambda: self._storage.watch(None))
            except BufferClosed:
                if closed:
                    return
                closed = True  # once more: a group may have ended just before
            except Exception as error:  # the storage is unavailable; its notes stay
                log.warning("group_ends_not_told error=%r", error)
                if closed:
                    return
                await asyncio.sleep(_RETRY_S)

    async def _tell(self) -> bool:
        """Report some ends; whether there were any."""
        noted = await self._storage.ends(self._owner, _SLICE_EVENTS)
        durable = self._storage.durable
        told: list[int] = []
        try:
            for number, event in noted:
                if not durable:  # at most once: an interrupted callback counts as called
                    await self._storage.forget_ends((number,))
                try:
                    await self._call(event)
                except Exception:
                    self.failed += 1
                    log.exception(
                        "on_group_end_failed task=%s group=%d end=%s", event.task_name, event.group_id, event.end
                    )
                else:
                    self.told += 1
                told.append(number)
        finally:
            if told and durable:
                await self._storage.forget_ends(told)
        return bool(noted)

    async def _call(self, event: GroupEnd) -> None:
        result: Any
        if inspect.iscoroutinefunction(self._callback):
            result = self._callback(event)
        else:
            result = await in_thread(lambda: self._callback(event), pool=self._pool)
        if inspect.isawaitable(result):
            await result
