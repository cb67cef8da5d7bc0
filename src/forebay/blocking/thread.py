"""An event loop in a thread of its own, and calls into it that can be interrupted at any moment.

Promises: a caller never waits for a loop that has ended, or for itself; an interrupted call leaves nothing running and
nothing held; once the thread is closing, nothing new gets in, and everything in it ends. It knows neither buffers nor
managers.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from forebay.core.aio import see_through
from forebay.errors import BufferClosed, ForebayError, WrongEventLoop

__all__ = ["LoopThread", "seen_through"]

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Coroutine[Any, Any, T]

_END_S = 15.0
"""How long work that was cancelled may take to end before it is left behind; agent loops alone get ten seconds."""

_EXIT_S = 5.0
"""How long a process that forgot to close stays for that."""


class _Latch:
    """In the place of a future's condition, between one waiter and the loop: opened once, and no lock otherwise.

    A condition is a lock of Python code, which an interrupt can leave locked for ever: the loop would then wait for it
    at the end of the work, and everybody for the loop.
    """

    def __init__(self) -> None:
        self._closed = threading.Lock()
        self._closed.acquire()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self, timeout: float | None = None) -> None:
        self._closed.acquire(timeout=-1 if timeout is None else timeout)

    def notify_all(self) -> None:
        self._closed.release()


class _Call(Generic[T]):
    """Work that one thread waits for. What happens on the loop is `begin` and `_end`; nobody else completes it."""

    def __init__(self, work: Work[T]) -> None:
        self.work = work
        self.task: asyncio.Task[T] | None = None
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.future._condition = _Latch()  # type: ignore[assignment]

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self.task = loop.create_task(self.work)
        self.task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T]) -> None:
        error = None if task.cancelled() else task.exception()
        if self.future.done():
            return  # it was left behind, and nobody waits for it
        if task.cancelled():
            self.future.cancel()
        elif error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())

    async def leave(self, undo: Callable[[T], Work[None]] | None) -> None:
        """Whoever waited has gone: cancel it, or undo what it brought."""
        if self.task is None:  # callbacks run in order: the interrupt was faster than the work
            self.work.close()
            return
        if not self.task.done():
            self.task.cancel()
            await asyncio.wait((self.task,))
        if undo is not None and not self.task.cancelled() and self.task.exception() is None:
            try:
                await undo(self.task.result())
            except ForebayError as error:  # the interrupt is the one to hear of
                log.warning("not_given_back what=%r error=%s", self.task.result(), error)


class LoopThread:
    """Runs coroutines for other threads. `name`: what is said to be closed when it is; `last` runs before it ends."""

    def __init__(self, name: str, last: Callable[[], Work[None]] | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.last = last
        self._name = name
        self._guard = threading.Lock()
        self._closing = False
        self._ending: concurrent.futures.Future[None] | None = None
        self._failed: BaseException | None = None  # of the last coroutine
        self._ended = False
        self._futures: set[concurrent.futures.Future[Any]] = set()  # that are not done
        self._thread = threading.Thread(target=self._run, name=f"forebay-{name}", daemon=True)
        _threads.add(self)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while not self._ended:
                try:
                    self.loop.run_forever()
                except BaseException:
                    # A sys.exit() in somebody's coroutine, which asyncio passes on to us; the others go on.
                    log.warning("loop_interrupted name=%s", self._name, exc_info=True)
        finally:
            self.loop.close()
            _threads.discard(self)

    # --- calls ----------------------------------------------------------------------------------------

    def check_open(self) -> None:
        if self._closing:
            raise BufferClosed(f"this blocking {self._name} is closed; make a new one")

    def _refuse_itself(self) -> None:
        if threading.current_thread() is self._thread:
            raise WrongEventLoop(
                f"a blocking call from the {self._name}'s own event loop would wait for itself; use `.native` there"
            )

    def submit(self, work: Work[T]) -> concurrent.futures.Future[T]:
        """Have it run; cancelled when the thread is stopped."""
        try:
            self._refuse_itself()
            with self._guard:
                self.check_open()
                future = asyncio.run_coroutine_threadsafe(work, self.loop)
                self.loop.call_soon_threadsafe(self._watch, future)
                return future
        except ForebayError:
            work.close()
            raise

    def call(self, work: Work[T], undo: Callable[[T], Work[None]] | None = None) -> T:
        """Wait for work on the loop. If the caller is interrupted, cancel it, or undo what it brought.

        Both have happened when the interrupt surfaces; a second one does not wait for that.
        """
        call, begun = _Call(work), False
        try:
            self._begin(call)
            begun = True
            return call.future.result()
        except concurrent.futures.CancelledError:
            raise BufferClosed(f"the {self._name} was closed while this call was under way") from None
        except BaseException as error:
            refused = not begun and isinstance(error, ForebayError)
            if not refused and (undo is not None or not call.future.done()):
                leaving = _Call(call.leave(undo))
                with suppress(BufferClosed, concurrent.futures.CancelledError, concurrent.futures.TimeoutError):
                    self._begin(leaving)
                    leaving.future.result(_END_S)
            raise

    def _begin(self, call: _Call[Any]) -> None:
        try:
            self._refuse_itself()
            with self._guard:
                self.check_open()
                self.loop.call_soon_threadsafe(call.begin, self.loop)
                self.loop.call_soon_threadsafe(self._watch, call.future)
        except ForebayError:
            call.work.close()
            raise

    def _watch(self, future: concurrent.futures.Future[Any]) -> None:
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)

    # --- the end --------------------------------------------------------------------------------------

    def stop(self, *, wait: bool = True) -> None:
        """Run the last coroutine, cancel everything else, end the thread. Later callers wait for the first.

        If the last one failed, the first caller hears of it, when all has ended.
        """
        self._refuse_itself()
        with self._guard:
            self._closing = True
            first = self._ending is None
            if self._ending is None:
                self._ending = asyncio.run_coroutine_threadsafe(self._shut_down(), self.loop)
        if wait:
            self._thread.join()
            if first and self._failed is not None:
                raise self._failed

    async def _shut_down(self) -> None:
        try:
            if self.last is not None:
                await self.last()
        except BaseException as error:
            self._failed = error
        try:
            await self._end_others()
            await self.loop.shutdown_asyncgens()
            await asyncio.sleep(0)  # what ended just now tells its future
        finally:
            for future in list(self._futures):
                future.cancel()  # of those that were left behind: nobody shall wait for them
            self._ended = True
            self.loop.stop()

    async def _end_others(self) -> None:
        # What was submitted before is a task by now: callbacks run in order.
        seen: set[asyncio.Task[Any]] = set()
        deadline = self.loop.time() + _END_S
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks - seen:  # a cancel may start others, which bring back what was cancelled
                task.cancel()
            seen |= tasks
            left_s = deadline - self.loop.time()
            if left_s <= 0:
                log.warning("tasks_left_behind names=%s: they do not heed a cancel", [t.get_name() for t in tasks])
                break
            await asyncio.wait(tasks, timeout=left_s)
        for task in seen:
            if task.done() and not task.cancelled():
                task.exception()  # taken note of; whoever submitted it has it

    def end_with_the_process(self, wait_s: float) -> None:
        """Stop, and wait for that for so long; whatever goes wrong matters to nobody any more."""
        if self._thread.is_alive():  # not in a process that was forked from ours
            self.stop(wait=False)
            self._thread.join(wait_s)


_threads: set[LoopThread] = set()


@atexit.register
def _end_with_the_process() -> None:
    # A script that ends without closing, by its own error, say: groups go back, and asyncio has nothing to complain of.
    deadline = time.monotonic() + _EXIT_S
    for thread in list(_threads):
        thread.end_with_the_process(max(0.0, deadline - time.monotonic()))


async def seen_through(begin: Callable[[], Work[T]]) -> T:
    """Do something that must not be left half done: a cancel is passed on when it has ended."""
    future = asyncio.ensure_future(begin())
    cancelled = await see_through(future)
    result = future.result()
    if cancelled is not None:
        raise cancelled
    return result
