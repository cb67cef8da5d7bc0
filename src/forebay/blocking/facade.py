"""Blocking methods made from native ones, one line each: `put = blocking(native.ReplayBuffer.put)`.

The made method has the parameters, the result type and the docstring of the native one, also for `help()` and type
checkers. It runs the native method of `self.native` on the event loop, so overrides in subclasses apply, and waits for
the result. What an interrupt does to a call is the business of `thread`.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import logging
from collections.abc import Callable, Coroutine
from functools import partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from forebay.blocking.thread import LoopThread
from forebay.core import aio

__all__ = ["Facade", "LoopOwner", "blocking", "on_loop", "result_of"]

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
N = TypeVar("N")
N_co = TypeVar("N_co", covariant=True)
F = TypeVar("F", bound="Facade[Any]")


class Facade(Generic[N_co]):
    """A native object, and the thread whose event loop it lives on."""

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
