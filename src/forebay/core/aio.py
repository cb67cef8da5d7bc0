"""Threads, cancellation and waiting: blocking work off the event loop, in dedicated threads.

asyncio's default executor belongs to the user: tools and engines that block fill it. Forebay's work therefore runs in
its own pools, one per kind of work, so that a data set that hangs does not keep a checkpoint from being written. Their
 threads are daemons: a call that never returns does not keep the process from exiting.

A thread cannot be cancelled. A cancelled call waits until its work has ended, undoes its result, and only then passes
the cancel on. If the work has not ended `CANCEL_GRACE_S` later, it is left behind: the caller gets its cancel, and the
result is undone when it comes.

Code of the user is run by `run_user_code`: with a limit that the caller chooses, cancelled when the limit is reached,
and left behind if it ignores the cancel.

Waiting is not polling: a waiter takes a ticket, reads the storage, and, if it does not find what it needs, waits for a
change after its ticket (`Changes`). The storage's listener turns every change into one wake-up of the waiters of the
tasks that changed, from any thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

from forebay.errors import BufferClosed, InvalidInput

log = logging.getLogger(__name__)

T = TypeVar("T")

CANCEL_GRACE_S = 5.0
_IDLE_S = 10.0


class Pool(Executor):
    """At most `max_threads` daemon threads, made when they are needed; they end when they are idle."""

    def __init__(self, name: str, max_threads: int, use: str = "") -> None:
        self.name = name
        self.use = use or name
        self.max_threads = max_threads
        self.running = 0  # calls that were begun and have not ended
        self.waiting = 0  # calls that no thread has taken yet
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = 0

    def __repr__(self) -> str:
        return f"<Pool {self.name}: {self.running} of {self.max_threads} threads busy, {self.waiting} calls waiting>"

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run a call in a thread."""
        future: Future[T] = Future()
        with self._lock:
            self.waiting += 1
            self._calls.put((future, lambda: fn(*args, **kwargs)))
            if self._idle < self.waiting and self._threads < self.max_threads:
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
                self.waiting -= 1
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
    """A lock for the running event loop, in an object that may outlive that loop."""

    def __init__(self) -> None:
        self._lock: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    def __call__(self) -> asyncio.Lock:
        loop = asyncio.get_running_loop()
        if self._lock is None or self._lock[0] is not loop:
            self._lock = (loop, asyncio.Lock())
        return self._lock[1]


async def see_through(future: asyncio.Future[T], timeout_s: float | None = None) -> asyncio.CancelledError | None:
    """Wait until a future is done, for `timeout_s` at most. A cancel of the caller does not end it, and is returned."""
    deadline, cancelled = Deadline(timeout_s), None
    while not future.done() and (left_s := deadline.left_s()) != 0:
        try:
            await asyncio.wait((future,), timeout=left_s)
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


async def uncancelled(work: Awaitable[T]) -> T:
    """The result of work that must not stop halfway: a cancel of the caller is raised when the work has ended."""
    future = asyncio.ensure_future(work)
    cancelled = await see_through(future)
    result = future.result()
    if cancelled is not None:
        raise cancelled
    return result


def ignore_exception(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a future that has no other waiter, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()


class UserCall(NamedTuple, Generic[T]):
    """How a call of user code ended.

    `future`: has the result or the exception; it is not done if the code ignored its cancel and was left behind.
    `in_time`: the code ended before it was cancelled. `cancelled`: the caller was cancelled meanwhile, and has to raise
    this after its own cleanup.
    """

    future: asyncio.Future[T]
    in_time: bool
    cancelled: asyncio.CancelledError | None


async def run_user_code(
    work: Awaitable[T],
    *,
    until: Callable[[asyncio.Future[Any]], Awaitable[object]] | None = None,
    cancel_timeout_s: float | None = None,
) -> UserCall[T]:
    """Run code of the user; cancel it if it has not ended when `until` returns, or when the caller is cancelled.

    `until(future)` waits for the end of the code, and returns earlier when the code has to stop (a timeout, a pause);
    without it the code may take as long as it needs. If the code has not ended `cancel_timeout_s` after its cancel, it
    is left behind; None waits for it. Raises nothing: see `UserCall`.
    """
    future = asyncio.ensure_future(work)
    cancelled = None
    try:
        await (asyncio.wait((future,)) if until is None else until(future))
    except asyncio.CancelledError as error:
        cancelled = error
    in_time = future.done()
    if not in_time:
        future.cancel()
        cancelled = await see_through(future, cancel_timeout_s) or cancelled
        if not future.done():
            name = getattr(work, "__qualname__", work)
            log.warning("user_code_left_behind call=%s: it ignored a cancel for %g s", name, cancel_timeout_s)
    if future.done():
        ignore_exception(future)  # the caller may never retrieve it
    else:
        future.add_done_callback(ignore_exception)
    return UserCall(future, in_time, cancelled)


async def in_thread(work: Callable[[], T], *, pool: Pool = FILES, undo: Callable[[T], object] | None = None) -> T:
    """The result of work that blocks; `undo` gets it if the caller was cancelled meanwhile."""
    future = start_thread(work, pool=pool)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if future.cancelled():
            raise  # by its own work
        await grace(future)
        if undo is not None:
            future.add_done_callback(lambda done: done.cancelled() or done.exception() or undo(done.result()))
        raise


def start_thread(work: Callable[[], T], *, pool: Pool = FILES) -> asyncio.Future[T]:
    """Begin work that blocks. The future is not to be cancelled: the thread would not notice."""
    # Not asyncio.to_thread, which makes a task: a loop that shuts down would cancel that, and lose its result.
    context = contextvars.copy_context()
    return asyncio.get_running_loop().run_in_executor(pool, lambda: context.run(work))


async def grace(future: asyncio.Future[Any]) -> None:
    """Give work of a cancelled caller a moment to end; work that has not ended then is left behind."""
    await see_through(future, CANCEL_GRACE_S)  # the caller passes its first cancel on
    if not future.done():
        log.warning("call_left_behind: a thread did not end within %g s of a cancel", CANCEL_GRACE_S)
        future.add_done_callback(ignore_exception)


RESOLUTION_S = 1e-6
"""Less than this is no time left: on a clock that only timers move, a wait of a rounding error would never end."""


class Deadline:
    """A point in time on the event loop's clock; `timeout_s` None is never."""

    def __init__(self, timeout_s: float | None) -> None:
        if timeout_s is not None and (not isinstance(timeout_s, (int, float)) or timeout_s != timeout_s):
            raise InvalidInput(f"timeout_s is {timeout_s!r}; expected a number of seconds, or None")
        self.timeout_s = timeout_s
        self._at = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    def left_s(self) -> float | None:
        """Seconds left, 0 if it has passed, None if it never comes."""
        if self._at is None:
            return None
        left_s = self._at - asyncio.get_running_loop().time()
        return left_s if left_s > RESOLUTION_S else 0.0


ANY_TASK: frozenset[str] = frozenset()
"""The tasks of a waiter that any change may concern, and of a change that may concern any waiter."""


class Changes:
    """Wakes waiters when the storage changed. Belongs to one event loop; `notify` is for any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._all = 0  # changes
        self._any = 0  # changes that concern every waiter
        self._by_task: dict[str, int] = {}
        self._closed = False
        self._waiters: dict[asyncio.Future[None], Collection[str]] = {}

    def ticket(self, tasks: Collection[str] = ANY_TASK) -> int:
        """The number of changes of these tasks. Take it before reading: a later change ends the wait."""
        if not tasks:
            return self._all
        return self._any + sum(self._by_task.get(task_name, 0) for task_name in tasks)

    def notify(self, tasks: Collection[str] = ANY_TASK) -> None:
        """Wake the waiters of these tasks."""
        if self._loop.is_closed():
            return  # it has no waiters any more
        if threading.get_ident() == self._thread:
            self._wake(tasks)
        else:
            with suppress(RuntimeError):  # it was closed just now
                self._loop.call_soon_threadsafe(self._wake, tasks)

    def _wake(self, tasks: Collection[str]) -> None:
        self._all += 1
        if not tasks:
            self._any += 1
        for task_name in tasks:
            self._by_task[task_name] = self._by_task.get(task_name, 0) + 1
        for waiter, wanted in list(self._waiters.items()):
            if not tasks or not wanted or any(task_name in wanted for task_name in tasks):
                del self._waiters[waiter]
                if not waiter.done():
                    waiter.set_result(None)

    def close(self) -> None:
        """End every wait, now and later, with BufferClosed."""
        self._closed = True
        self._wake(ANY_TASK)

    async def wait(
        self,
        ticket: int,
        timeout_s: float | None,
        watch: Callable[[], asyncio.Future[None] | None] | None = None,
        tasks: Collection[str] = ANY_TASK,
    ) -> None:
        """Until one of these tasks changed after the ticket, or for `timeout_s`.

        `watch` asks the storage to report changes, if it has to be asked; if that fails, so does the wait.
        """
        if self.ticket(tasks) == ticket and not self._closed:
            waiter = self._loop.create_future()
            self._waiters[waiter] = tasks
            watching = None if watch is None else watch()
            try:
                if watching is not None:
                    await asyncio.wait((waiter, watching), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                    if watching.done() and not self._closed:
                        watching.result()
                elif timeout_s is None:
                    await waiter
                else:
                    await asyncio.wait((waiter,), timeout=timeout_s)
            finally:
                self._waiters.pop(waiter, None)
                waiter.cancel()
                if watching is not None:
                    watching.cancel()
        else:
            await asyncio.sleep(0)  # an attempt that itself causes changes must not keep the loop from others
        if self._closed:
            raise BufferClosed("the buffer was closed while this call was waiting; nothing was taken")


class Heartbeat:
    """Calls `beat` every `interval_s` from a dedicated thread, so that a busy event loop keeps its leases."""

    def __init__(self, beat: Callable[[], None], interval_s: float) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forebay-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._beat()
            except Exception:
                # One failed heartbeat is no reason to lose every lease; the next one may arrive.
                log.warning("heartbeat_failed", exc_info=True)

    def stop(self) -> None:
        """Stop the heartbeat, and wait for one in progress."""
        self._stop.set()
        self._thread.join()
