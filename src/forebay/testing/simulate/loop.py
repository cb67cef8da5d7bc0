"""An event loop with a virtual clock and a seeded order of tasks.

What it promises
- Time is virtual and starts at 0.0. When nothing is ready the clock jumps to the next timer; it never sleeps.
- Ready callbacks are shuffled by the seed before each turn. Callbacks of one future keep their order, and so
  do plain `call_soon` callbacks, as asyncio documents; tasks and timers have no order to rely on. Seed None: FIFO.
- The same seed and the same program: the same events in the same order, also in another process. For that, futures
  and tasks of this loop hash by number instead of by address, so that sets of them have one order. The program itself
  must avoid sets of strings or of coroutines (`as_completed` makes one: give it tasks), wall clocks, and finalizers
  that wait for the garbage collector.
- A program that waits forever ends as SimulationStuck, which lists where each task waits; one that runs forever ends
  as SimulationLimit.
- Work for an executor runs inline, at once. Awaiting it gives other tasks a turn, as a thread would.

There are no sockets, pipes, signals or other threads: they wake no task here. A task that polls with `sleep(0)` keeps
virtual time from moving, and ends at the limit.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from forebay.core.validate import checked_integer
from forebay.errors import ForebayError, InvalidInput

T = TypeVar("T")

_WIND_UP_EVENTS = 1_000_000
"""The limit for the tasks that `run` cancels at its end."""

_SHOWN_TASKS = 20
_ASYNCIO = Path(asyncio.__file__).parent


class SimulationStuck(ForebayError):
    """Nothing is ready and no timer is set. `waiting` has a line for every pending task: where it waits."""

    def __init__(self, problem: str, loop: SimulatedLoop) -> None:
        self.waiting = tuple(f"{task.get_name()}: {_place(task)}" for task in loop._pending())
        shown = [f"  {line}" for line in self.waiting[:_SHOWN_TASKS]]
        if len(self.waiting) > _SHOWN_TASKS:
            shown.append(f"  ... and {len(self.waiting) - _SHOWN_TASKS} more")
        head = f"after {loop.events} events, at {loop.time():g} virtual seconds: {problem}; tasks that are pending:"
        super().__init__("\n".join([head, *(shown or ["  none"])]))


class SimulationLimit(SimulationStuck):
    """More events, or more virtual seconds, than allowed: the program never ends, or the limit is too low."""


class NotSimulated(ForebayError):
    """The program asked for a socket or a pipe; there are none in virtual time."""


class SimulatedLoop(asyncio.SelectorEventLoop):
    """The loop; `run` is the usual way to use it.

    An event costs about what it costs on asyncio's own loop: there is no system call, but a draw for the order.
    """

    events: int
    """How many callbacks have run (or begun)."""

    # asyncio has no public way to change the clock of a loop or the order in which it runs what is ready; every
    # loop in virtual time replaces `_run_once`. These names are what asyncio's own `_run_once` uses, and are the
    # same in Python 3.11 to 3.14. Handles are Any because `_when` and `_scheduled` are private to them.
    _ready: deque[Any]
    _scheduled: list[Any]
    _stopping: bool
    _timer_cancelled_count: int

    def __init__(self, seed: int | None = 0, *, max_events: int = 10_000_000, max_seconds: float | None = None) -> None:
        self._max_events = checked_integer("max_events", max_events, least=1)
        if max_seconds is not None and not max_seconds >= 0:
            raise InvalidInput(f"max_seconds is {max_seconds!r}; expected a number of virtual seconds, or None")
        self._max_seconds = math.inf if max_seconds is None else max_seconds
        self._random = None if seed is None else random.Random(checked_integer("seed", seed))
        self._now = 0.0
        self._numbers = 0
        self._faults: dict[int, list[Callable[[], object]]] = {}
        self.events = 0
        self._watch()
        super().__init__(_NoFiles())

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._now

    def at_event(self, number: int, callback: Callable[[], object]) -> None:
        """Call `callback()` right before the callback with this number (from 1) runs.

        It runs between two callbacks, on the loop but in no task: it may set events, and cancel or create tasks. Its
        exceptions end the run. Several callbacks for one number run in the order of these calls.
        """
        number = checked_integer("number", number)
        if number <= self.events:
            raise InvalidInput(f"event {number} has already run; expected a number above {self.events}")
        self._faults.setdefault(number, []).append(callback)
        self._watch()

    def create_future(self) -> asyncio.Future[Any]:
        """A future that hashes by number."""
        future = _Future(loop=self)
        future.number = self._numbers = self._numbers + 1
        return future

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """A task that hashes by number. A task factory that was set goes first."""
        # Not our own factory: Python 3.13.0 calls every unnamed task of a factory "None".
        if self.get_task_factory() is not None:
            return super().create_task(coro, **options)
        number = self._numbers = self._numbers + 1
        if options.get("name") is None:  # asyncio's own number continues over all loops of the process
            options["name"] = f"Task-{number}"
        return _Task(coro, number=number, loop=self, **options)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """The work, done: its future has the result or the exception. No executor is used."""
        future: _Done = _Done(loop=self)
        future.number = self._numbers = self._numbers + 1
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    # --- the turn -------------------------------------------------------------------------------------

    def _run_once(self) -> None:
        ready = self._ready
        if not ready and not self._stopping:
            self._jump()
        scheduled = self._scheduled
        while scheduled and scheduled[0]._when <= self._now:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        if self._random is not None and len(ready) > 1:
            self._shuffle(self._random.random)
        for _ in range(len(ready)):  # what these make ready has its turn next time
            if self.events >= self._mark:
                self._reach_mark()  # before the handle leaves: an error here must not lose its turn
            handle = ready.popleft()
            if not handle._cancelled:
                self.events += 1
                handle._run()

    def _shuffle(self, draw: Callable[[], float]) -> None:
        ready = self._ready
        drawn: list[tuple[float, int, Any]] = []
        same: dict[int, float] = {}  # the draw that the callbacks of one future share; 0 is for plain ones
        for index in range(len(ready)):  # taken out and put back, never replaced: a thread may append meanwhile
            handle = ready.popleft()
            if handle._cancelled:
                continue
            args = handle._args
            if args and isinstance(args[0], asyncio.Future):  # done callbacks, wake-ups, the timer of a sleep
                key = same.setdefault(id(args[0]), draw())
            elif type(handle) is asyncio.TimerHandle or isinstance(
                getattr(handle._callback, "__self__", None), asyncio.Task
            ):
                key = draw()
            else:
                key = same.setdefault(0, draw())
            drawn.append((key, index, handle))
        drawn.sort(reverse=True)
        ready.extendleft([handle for _, _, handle in drawn])

    def _jump(self) -> None:
        scheduled = self._scheduled
        if len(scheduled) > 100 and self._timer_cancelled_count * 2 > len(scheduled):
            for handle in scheduled:
                handle._scheduled = not handle._cancelled
            scheduled[:] = [handle for handle in scheduled if not handle._cancelled]
            heapq.heapify(scheduled)
            self._timer_cancelled_count = 0
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
            self._timer_cancelled_count -= 1
        if not scheduled or scheduled[0]._when == math.inf:
            raise SimulationStuck("nothing is ready and no timer is set, so it would wait forever", self)
        when = scheduled[0]._when
        if when > self._max_seconds:
            raise SimulationLimit(
                f"the next timer is at {when:g} s, beyond max_seconds={self._max_seconds:g}; raise it, or see what "
                "never ends",
                self,
            )
        self._now = max(self._now, when)

    # --- faults and limits ----------------------------------------------------------------------------

    def _watch(self) -> None:
        # One number to compare with for every event, whatever is due there.
        self._mark = min([self._max_events, *(number - 1 for number in self._faults)])

    def _reach_mark(self) -> None:
        while self._faults.get(self.events + 1):  # one may add another for this very event
            self._faults[self.events + 1].pop(0)()
        self._faults.pop(self.events + 1, None)
        self._watch()
        if self.events >= self._max_events:
            raise SimulationLimit(
                f"max_events={self._max_events} have run; raise it, or see what never ends (polling with "
                "sleep(0) never lets virtual time move)",
                self,
            )

    # --- the end --------------------------------------------------------------------------------------

    def _pending(self) -> list[asyncio.Task[Any]]:
        tasks = [task for task in asyncio.all_tasks(self) if not task.done()]
        return sorted(tasks, key=lambda task: task.number if isinstance(task, _Task) else 0)

    def _wind_up(self) -> None:
        """Cancel and await what is left, as `asyncio.run` does. Without faults, and with separate limits."""
        self._faults.clear()
        self._max_events = self.events + _WIND_UP_EVENTS
        self._max_seconds = math.inf
        self._watch()
        left = self._pending()
        for task in left:
            task.cancel()
        if left:
            self.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        for task in left:
            if not task.cancelled() and (error := task.exception()) is not None:
                message = f"task {task.get_name()} failed when it was cancelled at the end of the simulation"
                self.call_exception_handler({"message": message, "exception": error, "task": task})
        self.run_until_complete(self.shutdown_asyncgens())


def run(
    main: Callable[[], Coroutine[Any, Any, T]] | Coroutine[Any, Any, T],
    *,
    seed: int | None = 0,
    max_events: int = 10_000_000,
    max_seconds: float | None = None,
    faults: Sequence[tuple[int, Callable[[], object]]] = (),
) -> T:
    """The result of an async program, run to its end in virtual time on a new loop.

    `faults` are (event number, callback), see `SimulatedLoop.at_event`. Tasks that are left at the end are cancelled
    and awaited. What the program raises is raised; SimulationStuck and SimulationLimit end it from outside.
    """
    if asyncio._get_running_loop() is not None:
        raise InvalidInput(
            "run was called on a running event loop; call it from a plain function, not from a coroutine"
        )
    loop = SimulatedLoop(seed, max_events=max_events, max_seconds=max_seconds)
    try:
        for number, callback in faults:
            loop.at_event(number, callback)
        coroutine = main() if callable(main) else main
        if not asyncio.iscoroutine(coroutine):
            raise InvalidInput(f"run got {main!r:.80}; expected a coroutine function without arguments, or a coroutine")
        try:
            result = loop.run_until_complete(coroutine)
        except BaseException:
            with suppress(SimulationStuck):  # the first error says more
                loop._wind_up()
            raise
        loop._wind_up()
        return result
    finally:
        for task in loop._pending():  # those that refused to end: the error says more than a log would
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()


# --- what the loop is made of ---------------------------------------------------------------------------


class _Future(asyncio.Future[Any]):
    number: int

    def __hash__(self) -> int:
        return self.number


class _Done(_Future):
    """Done from the start, but a task that awaits it lets others run first: a thread never answers within the turn.

    It also keeps a loop around `to_thread` from running forever without one event.
    """

    def __await__(self) -> Generator[Any, None, Any]:
        yield
        return self.result()

    __iter__ = __await__


class _Task(asyncio.Task[Any]):
    def __init__(self, coro: Any, *, number: int, **options: Any) -> None:
        self.number = number  # first: asyncio hashes the task while it builds it
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.number


class _NoFiles(selectors.BaseSelector):
    """Knows the one socket with which asyncio wakes a loop, never looks at it, and refuses any other."""

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if self._keys:
            raise NotSimulated(
                "a simulated loop has no sockets, pipes or signals: real input and output take real time; put a "
                "simulated part in their place"
            )
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[fileobj] = key = selectors.SelectorKey(fileobj, fd, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


def _place(task: asyncio.Task[Any]) -> str:
    """Where a task waits: its innermost frame, and the one of its own code if that is within asyncio."""
    frames = list(_frames(task.get_coro()))
    if not frames:
        return f"{task.get_coro()!r:.80}"
    own = [frame for frame in frames if Path(frame.f_code.co_filename).parent != _ASYNCIO]
    inner = frames[-1]
    outer = own[-1] if own else inner
    return _position(outer) if outer is inner else f"{_position(outer)}, there in {_position(inner)}"


def _frames(awaited: Any) -> Iterator[FrameType]:
    while awaited is not None:
        for kind in ("cr", "gi", "ag"):  # coroutines, generators, asynchronous generators
            if hasattr(awaited, f"{kind}_frame"):
                frame = getattr(awaited, f"{kind}_frame")
                if frame is not None:
                    yield frame
                awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
                break
        else:
            return


def _position(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
