"""Functions of the user that a loader calls, plain or async, and work that a request to stop ends."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

from forebay.core.aio import see_through, uncancelled
from forebay.errors import InvalidInput

T = TypeVar("T")
Load: TypeAlias = Callable[..., Any]
"""`load(step)` or `load()`, plain or async; or an `EngineControl`."""
Hook: TypeAlias = Callable[[], Any]


def call_load(load: Load, step: int) -> Any:
    """Call `load(step)`, or `load()` if it takes no argument."""
    return load(step) if _takes(load, step) else load()


def check_load(load: object, path: object) -> None:
    """InvalidInput unless `load` is a function, or, with a path, an `EngineControl`."""
    control = hasattr(load, "update_weights")
    if control != (path is not None) or not (control or callable(load)):
        raise InvalidInput(
            f"update_weights got {load!r:.80} and path={path!r:.80}; expected a function of the step, or an "
            "EngineControl and the path of its weights"
        )
    if path is None and callable(load) and not _takes(load, 0) and not _takes(load):
        raise InvalidInput(f"{load!r:.80} needs more than one argument; expected load(step), or load()")


def _takes(load: Load, *arguments: object) -> bool:
    """Whether a function can be called with these arguments, as far as it says."""
    try:
        inspect.signature(load).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return bool(arguments)
    return True


async def settled(returned: Any) -> Any:
    """The result of a plain or an async function."""
    return await returned if isinstance(returned, Awaitable) else returned


class Stop:
    """A request to stop, which ends a wait at once."""

    def __init__(self) -> None:
        self.requested = False
        self._event: asyncio.Event | None = None

    def request(self) -> None:
        """Ask for it. On the event loop."""
        self.requested = True
        if self._event is not None:
            self._event.set()

    async def unless(self, work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]]) -> T | None:
        """The result of some work, or None if it was cancelled because of the request.

        `undo` gets a result that exists though the caller was cancelled.
        """
        self._event = asyncio.Event()
        working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._event.wait())
        cancelled = None
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError as error:
            cancelled = error
        self._event = None
        stopping.cancel()
        if not working.done():
            working.cancel()
            cancelled = await see_through(working) or cancelled
        if cancelled is not None:
            if not working.cancelled() and working.exception() is None:
                await uncancelled(undo(working.result()))
            raise cancelled
        return None if working.cancelled() else working.result()


class Signals:
    """Handlers of signals on the running event loop, and those of the user, which come back."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}

    def handle(self, numbers: Sequence[signal.Signals], handler: Callable[[], None]) -> None:
        """Call a function when one of these signals arrives."""
        for number in numbers:
            self._before[number] = signal.getsignal(number)
            asyncio.get_running_loop().add_signal_handler(number, handler)

    def restore(self) -> None:
        """Have the handlers of before again."""
        while self._before:
            number, handler = self._before.popitem()
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set from Python


class Update:
    """Weights that are being loaded, or could not be."""

    def __init__(self) -> None:
        self.step: int | None = None
        self._by: object = None  # the call that began it
        self._failed = False
        self._changed = asyncio.Event()

    def begin(self, step: int, by: object = None) -> None:
        """The weights of a step are to be loaded, perhaps for the second time."""
        self.step, self._by, self._failed = step, by, False

    @contextmanager
    def running(self) -> Iterator[None]:
        """A part of the update. If it raises, the update has failed until it is begun again."""
        try:
            yield
        except BaseException:
            self.fail()
            raise

    def failed_by(self, by: object) -> None:
        """A call has failed: if it began this update, its weights could not be loaded."""
        if self._by is by:
            self.fail()

    def fail(self) -> None:
        """The weights could not be loaded."""
        self._failed = self.step is not None
        self._wake()

    def end(self) -> None:
        """The weights are loaded."""
        self.step, self._failed = None, False
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def idle(self) -> None:
        """Wait while weights are being loaded."""
        while self.step is not None and not self._failed:
            await self._changed.wait()

    async def ended(self) -> None:
        """Wait while weights are being loaded. InvalidInput if they could not be."""
        await self.idle()
        if self.step is not None:
            raise InvalidInput(
                f"the weights of step {self.step} were not loaded, and generating is paused; repeat "
                f"update_weights(load, {self.step}) first"
            )
