"""An event loop in its own thread, and native methods as blocking ones: `put = blocking(native.ReplayBuffer.put)`.

Guarantees: no caller waits for a loop that has ended, or from the loop for itself. An interrupted call leaves no task
running and nothing leased. Once the thread is closing, it refuses new work and ends all of its tasks. A blocking method
has the parameters, the result type and the docstring of the native one, also for `help()` and type checkers, and calls
the native one by name, so overrides in subclasses apply. This module knows neither buffers nor managers.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from forebay.core import aio
from forebay.errors import BufferClosed, ForebayError, WrongEventLoop

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
N = TypeVar("N")
N_co = TypeVar("N_co", covariant=True)
F = TypeVar("F", bound="Facade[Any]")
Work = Coroutine[Any, Any, T]
Begin = Callable[[], Work[T]]
Undo = Callable[[T], Work[None]]

_END_S = 15.0
"""How long cancelled tasks may take to end before they are abandoned; agent loops alone get ten seconds."""

_NOTICE_S = 0.5
"""A signal that arrives just before a thread blocks does not wake it: Python looks for it again after this time."""

_EXIT_S = 5.0
"""How long a process that exits without closing waits for its loops to end."""


class Call(Generic[T]):
    """A coroutine that runs on the loop while one other thread waits for its result.

    The waiting thread blocks in `SimpleQueue.get`, which is C code: an interrupt ends the wait and leaves no lock held.
    `concurrent.futures.Future` and `threading.Event` wait in Python code, where an interrupt can leave their lock held;
    the loop would then block forever when the coroutine ends.
    """

    def __init__(self, begin: Begin[T]) -> None:
        self._begin = begin  # not a coroutine yet: a call that never starts leaves none unawaited
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._task: asyncio.Task[T] | None = None  # while it runs
        self._result: tuple[T] | None = None
        self.error: BaseException | None = None  # raised by the coroutine

    async def _run(self) -> T:
        return await self._begin()

    def start(self) -> asyncio.Task[T]:
        """Create the task. On the loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._end)
        return self._task

    def _end(self, task: asyncio.Task[T]) -> None:
        # The task must be freed on the loop's thread: asyncio then runs Python code, which would swallow an interrupt.
        self._task = None
        if not task.cancelled():
            self.error = task.exception()
            self._result = None if self.error is not None else (task.result(),)
        self._ended.put(None)

    def cancel(self) -> None:
        """End the wait though the task does not end. On the loop."""
        self._ended.put(None)

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result. CancelledError if the task was cancelled or abandoned, `queue.Empty` at the timeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = _NOTICE_S if deadline is None else deadline - time.monotonic()
            try:
                self._ended.get(timeout=max(0.0, min(left_s, _NOTICE_S)))
            except queue.Empty:
                if deadline is not None and left_s <= _NOTICE_S:
                    raise
            else:
                break
        if self.error is not None:
            raise self.error
        if self._result is None:
            raise asyncio.CancelledError
        return self._result[0]

    async def leave(self, undo: Undo[T] | None) -> None:
        """The caller was interrupted: cancel the task, or undo its result. On the loop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if undo is not None and self._result is not None:
            try:
                await undo(self._result[0])
            except ForebayError as error:  # the caller must see the interrupt, not this
                log.warning("not_given_back what=%r error=%s", self._result[0], error)


class LoopThread:
    """Runs coroutines for other threads.

    `name`: the word for the closed object in errors. `cleanup`: the coroutine that runs first when the thread stops.
    """

    def __init__(self, name: str, cleanup: Begin[None] | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.cleanup = cleanup
        self._name = name
        self._guard = threading.Lock()
        self._closing = False
        self._ending: concurrent.futures.Future[None] | None = None
        self._cleanup_error: BaseException | None = None
        self._ended = False
        self._pending: set[Call[Any] | concurrent.futures.Future[Any]] = set()
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
                    # asyncio lets the sys.exit() of a coroutine through to here; the other coroutines continue.
                    log.warning("loop_interrupted name=%s", self._name, exc_info=True)
        finally:
            self.loop.close()
            _threads.discard(self)

    # --- calls ----------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """BufferClosed if the thread is closing or closed."""
        if self._closing:
            raise BufferClosed(f"this blocking {self._name} is closed; make a new one")

    def refuse_itself(self) -> None:
        """WrongEventLoop if this thread is the caller."""
        if threading.current_thread() is self._thread:
            raise WrongEventLoop(
                f"a blocking call from the {self._name}'s own event loop would wait for itself; use `.native` there"
            )

    def submit(self, work: Work[T]) -> concurrent.futures.Future[T]:
        """Run a coroutine without waiting for it; `stop` cancels it."""
        try:
            self.refuse_itself()
            with self._guard:
                self.check_open()
                future = asyncio.run_coroutine_threadsafe(work, self.loop)
                self.loop.call_soon_threadsafe(self._watch, future)
                return future
        except ForebayError:
            work.close()
            raise

    def _watch(self, future: concurrent.futures.Future[Any]) -> None:
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)

    def call(self, begin: Begin[T], undo: Undo[T] | None = None) -> T:
        """Run a coroutine function and wait for its result.

        If the caller is interrupted, the coroutine is cancelled, or its result undone, before the interrupt surfaces. A
        second interrupt surfaces at once.
        """
        call = Call(begin)
        try:
            self._schedule(call)
            return call.result()
        except asyncio.CancelledError:
            raise BufferClosed(f"the {self._name} was closed while this call was in progress") from None
        except BaseException:
            if call.error is None:
                leaving = Call(partial(call.leave, undo))
                # ForebayError: the loop refuses this call, too, so it never started the first one or has cancelled it.
                with suppress(ForebayError, asyncio.CancelledError, queue.Empty):
                    self._schedule(leaving)
                    leaving.result(_END_S)
            raise

    def _schedule(self, call: Call[Any]) -> None:
        self.refuse_itself()
        with self._guard:
            self.check_open()
            self.loop.call_soon_threadsafe(self._start, call)

    def _start(self, call: Call[Any]) -> None:
        self._pending.add(call)
        call.start().add_done_callback(lambda _: self._pending.discard(call))

    # --- closing --------------------------------------------------------------------------------------

    def stop(self, *, wait: bool = True) -> None:
        """Run `cleanup`, cancel all other tasks, end the thread. Later callers wait for the first one.

        If `cleanup` failed, its error is raised to the first caller, after everything has ended.
        """
        self.refuse_itself()
        with self._guard:
            self._closing = True
            first = self._ending is None
            if self._ending is None:
                self._ending = asyncio.run_coroutine_threadsafe(self._shut_down(), self.loop)
        if wait:
            self._thread.join()
            if first and self._cleanup_error is not None:
                raise self._cleanup_error

    async def _shut_down(self) -> None:
        try:
            if self.cleanup is not None:
                await self.cleanup()
        except BaseException as error:
            self._cleanup_error = error
        try:
            await self._end_others()
            await self.loop.shutdown_asyncgens()
            await asyncio.sleep(0)  # tasks that have just ended release their waiting threads
        finally:
            for pending in list(self._pending):
                pending.cancel()  # its task was abandoned: no thread may wait for it any longer
            self._ended = True
            self.loop.stop()

    async def _end_others(self) -> None:
        # All that was submitted before is a task by now: the loop runs callbacks in order.
        seen: set[asyncio.Task[Any]] = set()
        deadline = self.loop.time() + _END_S
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks - seen:  # a cancelled task may start others, which return its groups
                task.cancel()
            seen |= tasks
            left_s = deadline - self.loop.time()
            if left_s <= 0:
                log.warning("tasks_left_behind names=%s: they ignore their cancel", [t.get_name() for t in tasks])
                break
            await asyncio.wait(tasks, timeout=left_s)
        for task in seen:
            if task.done() and not task.cancelled():
                task.exception()  # retrieved here; the caller that submitted it has it, too


_threads: set[LoopThread] = set()


@atexit.register
def _end_with_the_process() -> None:
    # For a script that exits without closing, because of an error for example: its groups are returned, and asyncio
    # finds no task that is still pending.
    deadline = time.monotonic() + _EXIT_S
    for each in list(_threads):
        if each._thread.is_alive():  # False in a forked child process
            each.stop(wait=False)
            each._thread.join(max(0.0, deadline - time.monotonic()))


class Facade(Generic[N_co]):
    """A native object, and the thread of the event loop that it belongs to."""

    def __init__(self, native: N_co, thread: LoopThread) -> None:
        self.native = native
        self._thread = thread


class LoopOwner(Facade[N_co]):
    """A facade with its own thread, which ends when the facade is closed or its `with` block ends."""

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine, such as a producer, on the event loop of this object; `close` cancels it."""
        return self._thread.submit(work)

    def close(self) -> None:
        """End every wait with BufferClosed, return groups to the buffer, stop the loop. Closing twice is allowed."""
        self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise
            log.exception("close_failed: the error of the block is raised instead")


def blocking(
    method: Callable[Concatenate[N, P], Coroutine[Any, Any, R]], *, uncancelled: bool = False
) -> Callable[Concatenate[Facade[N], P], R]:
    """An async method as a blocking one. `uncancelled`: an interrupt surfaces only after the method has ended."""

    @wraps(method)
    def call(self: Facade[N], /, *args: P.args, **kwargs: P.kwargs) -> R:
        begin: Callable[[], Coroutine[Any, Any, R]] = partial(_native(self, method), *args, **kwargs)
        return self._thread.call((lambda: aio.uncancelled(begin())) if uncancelled else begin)

    return call


def on_loop(method: Callable[Concatenate[N, P], R]) -> Callable[Concatenate[Facade[N], P], R]:
    """A method that is not async, run on the event loop's thread because the native object is not thread-safe."""

    @wraps(method)
    def call(self: Facade[N], /, *args: P.args, **kwargs: P.kwargs) -> R:
        async def run() -> R:
            return _native(self, method)(*args, **kwargs)

        return self._thread.call(run)

    return call


def result_of(
    method: Callable[Concatenate[N, P], T],
) -> Callable[[Callable[[F, T], R]], Callable[Concatenate[F, P], R]]:
    """Decorate a method of a facade that handles the result of a native one; it takes the native one's arguments.

    The native method is called in the caller's thread: it must only create a request.
    """

    def decorate(handle: Callable[[F, T], R]) -> Callable[Concatenate[F, P], R]:
        @wraps(handle)
        def call(self: F, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return handle(self, _native(self, method)(*args, **kwargs))

        result = inspect.signature(handle).return_annotation
        call.__signature__ = inspect.signature(method).replace(return_annotation=result)  # type: ignore[attr-defined]
        return call

    return decorate


def _native(facade: Facade[N], method: Callable[Concatenate[N, P], R]) -> Callable[P, R]:
    """The method of that name of the native object, whose class may override it."""
    bound: Callable[P, R] = getattr(facade.native, method.__name__)
    return bound
