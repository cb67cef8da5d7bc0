"""Blocking work off the event loop, in threads that nobody else uses.

asyncio's default executor belongs to the user: tools and engines that block fill it. Forebay's work therefore runs in
pools of its own, one per kind of work, so that a data set that hangs does not keep a checkpoint from being written.
Their threads are daemons: a call that never returns does not keep the process from exiting.

A thread cannot be cancelled. A cancelled call waits until its work has ended, undoes its result, and only then passes
the cancel on. If the work has not ended `CANCEL_GRACE_S` later, it is left behind: the caller gets its cancel, and the
result is undone when it comes.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

__all__ = ["CANCEL_GRACE_S", "DATA", "FILES", "Pool", "Turns", "grace", "in_thread", "see_through", "start_thread"]

T = TypeVar("T")
log = logging.getLogger(__name__)

CANCEL_GRACE_S = 5.0
_IDLE_S = 10.0


class Pool(Executor):
    """At most `max_threads` daemon threads, made when they are needed; they end when they are idle."""

    def __init__(self, name: str, max_threads: int, use: str = "") -> None:
        self.name = name
        self.use = use or name
        self.max_threads = max_threads
        self.running = 0  # calls that were begun and have not ended
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0  # calls that no thread has taken yet
        self._idle = 0
        self._threads = 0

    def __repr__(self) -> str:
        return f"<Pool {self.name}: {self.running} of {self.max_threads} threads busy, {self._waiting} calls waiting>"

    @property
    def waiting(self) -> int:
        """Calls that no thread has begun."""
        return self._waiting

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run a call in a thread."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting += 1
            self._calls.put((future, lambda: fn(*args, **kwargs)))
            if self._idle < self._waiting and self._threads < self.max_threads:
                self._threads += 1
                threading.Thread(target=self._work, name=f"forebay-{self.name}", daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            try:
                future, call = self._calls.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    self._idle -= 1
                    if self._calls.empty():
                        self._threads -= 1
                        return
                continue
            with self._lock:
                self._idle -= 1
                self._waiting -= 1
                self.running += 1
            try:
                if future.set_running_or_notify_cancel():
                    try:
                        result = call()
                    except BaseException as error:
                        future.set_exception(error)
                    else:
                        future.set_result(result)
                        del result
            finally:
                with self._lock:
                    self.running -= 1
                del future, call  # an idle thread holds nothing of its last call


FILES = Pool("files", 8, "checkpoints and other files")
DATA = Pool("data", 64, "data sets")


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


async def in_thread(work: Callable[[], T], *, pool: Pool = FILES, undo: Callable[[T], object] | None = None) -> T:
    """The result of work that blocks; `undo` gets it if the caller was cancelled meanwhile."""
    future = start_thread(work, pool=pool)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if future.cancelled():
            raise  # by its own work
        await grace(future)
        future.add_done_callback(lambda done: _undo(done, undo))
        raise


def start_thread(work: Callable[[], T], *, pool: Pool = FILES) -> asyncio.Future[T]:
    """Begin work that blocks. The future is not to be cancelled: the thread would not notice."""
    # Not asyncio.to_thread, which makes a task: a loop that shuts down would cancel that, and lose what it brought.
    context = contextvars.copy_context()
    return asyncio.get_running_loop().run_in_executor(pool, lambda: context.run(work))


async def grace(future: asyncio.Future[Any]) -> None:
    """Give work of a cancelled caller a moment to end; whatever has not ended then is left behind."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CANCEL_GRACE_S
    while not future.done() and (left_s := deadline - loop.time()) > 0:
        try:
            await asyncio.wait((future,), timeout=left_s)
        except asyncio.CancelledError:
            continue  # the caller passes its first one on
    if not future.done():
        log.warning("call_left_behind: a thread did not end within %g s of a cancel", CANCEL_GRACE_S)
        future.add_done_callback(_undo)


def _undo(done: asyncio.Future[T], undo: Callable[[T], object] | None = None) -> None:
    if not done.cancelled() and done.exception() is None and undo is not None:
        undo(done.result())
