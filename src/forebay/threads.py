"""Blocking work off the event loop, seen through to its end.

A thread cannot be cancelled. A call here that is cancelled therefore waits until its work has ended, undoes what it
brought, and only then passes the cancel on: nothing is left running, open or half done behind the caller.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Turns", "in_thread", "see_through"]

T = TypeVar("T")


class Turns:
    """A lock for whatever event loop runs: what it guards may outlive one."""

    def __init__(self) -> None:
        self._lock: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    def __call__(self) -> asyncio.Lock:
        loop = asyncio.get_running_loop()
        if self._lock is None or self._lock[0] is not loop:
            self._lock = (loop, asyncio.Lock())
        return self._lock[1]


async def see_through(future: asyncio.Future[T]) -> asyncio.CancelledError | None:
    """Wait until a future is done, whatever happens; the cancel that arrived meanwhile, if one did."""
    cancelled = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


async def in_thread(work: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
    """The result of work that blocks; `undo` gets it if the caller was cancelled meanwhile."""
    # Not asyncio.to_thread, which makes a task: a loop that shuts down would cancel that, and lose what it brought.
    context = contextvars.copy_context()
    future = asyncio.get_running_loop().run_in_executor(None, lambda: context.run(work))
    cancelled = await see_through(future)
    if cancelled is None:
        return future.result()
    if undo is not None and future.exception() is None:
        undo(future.result())
    raise cancelled
