"""The actors of a `RayAgentLoop`: which are up, and which of them gets the next group.

Every actor is always waited for by one call of ours, and whatever that call ends with moves it on: `start` makes it be
up, `watch` fails when it dies, `hello` is answered when Ray has restarted it, and then it is to `start` again. It is
broken if its loop cannot be made (tried again in time), and dead if Ray will not restart it. A restarted actor gets
groups only after `start` brought it to where the others are: paused or not, and with the calls that are to be kept.

All of that happens on the event loop of whoever uses the pool, one at a time: there is no thread. Nothing is polled.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from enum import Enum
from typing import Any

import ray
from ray import exceptions

from forebay.agent_loop.base import AgentLoop
from forebay.errors import EngineError, InvalidConfig, NoCluster, WrongEventLoop
from forebay.produce.work import look_at
from forebay.ray.link import check_cluster
from forebay.ray.loop_actor import KINDS, KeptCall, LoopActor, Started, Trouble
from forebay.threads import in_thread

__all__ = ["LoopPool", "Phase", "Slot", "ending", "engine_error", "first_line"]

log = logging.getLogger(__name__)

_MAX_CONCURRENCY = 100_000  # a word to stop gets through, however many groups are under way
_OWN_OPTIONS = frozenset(
    (
        "concurrency_groups",
        "get_if_exists",
        "lifetime",
        "max_concurrency",
        "max_pending_calls",
        "max_restarts",
        "max_task_retries",
        "name",
        "namespace",
    )
)
_FOR_GOOD = (exceptions.ActorDiedError, exceptions.ActorUnschedulableError, exceptions.RuntimeEnvSetupError)
_MAX_RETRY_S = 60.0


class Phase(Enum):
    """Where an actor stands: the first three have a call that waits for it."""

    STARTING = "starting"
    UP = "up"
    RESTARTING = "restarting"
    BROKEN = "broken"
    DEAD = "dead"


class Slot:
    """One actor, and what the pool knows of it."""

    def __init__(self, index: int, handle: Any) -> None:
        self.index = index
        self.handle = handle
        self.phase = Phase.STARTING
        self.epoch = 0  # counts its starts
        self.told = (0, 0)  # the pause and the kept calls that `start` brought
        self.call: Any = None  # the reference of `start`, `watch` or `hello`
        self.heard_on: asyncio.AbstractEventLoop | None = None
        self.was_up = False
        self.error: EngineError | None = None
        self.retry_at = 0.0
        self.retry_s = 1.0
        self._load = 0
        self._lock = threading.Lock()  # calls end on a thread of Ray's

    @property
    def load(self) -> int:
        """Groups under way."""
        return self._load

    def add_load(self, groups: int) -> None:
        with self._lock:
            self._load += groups


class LoopPool:
    """The actors. They end with this object."""

    def __init__(
        self,
        make_loop: Callable[[], AgentLoop],
        *,
        actors: int,
        max_groups_per_actor: int | None,
        actor_options: Mapping[str, Any] | None,
    ) -> None:
        remote = _remote_class(actor_options)
        check_cluster()
        try:
            self._make_loop = ray.put(make_loop)  # once, for all starts to come
        except (TypeError, ValueError) as error:
            raise InvalidConfig(f"make_loop cannot be sent to an actor: {error}") from None
        self.home: asyncio.AbstractEventLoop | None = None
        self.paused = False  # nothing is handed out then
        self.closed = False
        self.takes_weights: bool | None = None
        self.deaths = 0  # since a group was answered
        self.sequence = 0  # of what was said of pausing, and the last word
        self.told_pause = False
        self._kept: dict[str, KeptCall] = {}
        self._version = 0
        self._max_groups = max_groups_per_actor
        self._turn = 0
        self._waiting: deque[asyncio.Future[Slot | None]] = deque()
        self._watching: list[asyncio.Future[None]] = []  # for any change
        try:
            handles = [remote.remote() for _ in range(actors)]
        except (TypeError, ValueError) as error:
            raise _refused_options(actor_options, error) from None
        self.slots = [Slot(index, handle) for index, handle in enumerate(handles)]
        self._end = weakref.finalize(self, _kill_elsewhere, handles)
        self._end.atexit = False  # they end with the process in any case
        for slot in self.slots:
            self._begin(slot)

    @property
    def patience(self) -> int:
        """How many deaths without an answered group in between are bad luck."""
        return 3 * len(self.slots)

    @property
    def hopeful(self) -> bool:
        """Whether an actor is up, or may come up."""
        return any(slot.call is not None for slot in self.slots)

    def check_open(self) -> None:
        """Raise if the pool was closed, or if there is no cluster."""
        if self.closed:
            raise EngineError("the agent loop was closed, and its actors with it; make a new one")
        check_cluster()  # Ray would start another one at the next call

    async def end(self) -> None:
        """End the actors."""
        self._end.detach()
        await in_thread(lambda: _kill([slot.handle for slot in self.slots]))

    def keep(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KeptCall:
        """A call that every actor has to have got; the last one of a method counts."""
        self._version += 1
        self._kept[method] = KeptCall(self._version, method, args, kwargs)
        return self._kept[method]

    # --- places ---------------------------------------------------------------------------------------

    async def place(self) -> Slot | None:
        """The least loaded actor that is up and has room, with one more group counted; None in a pause.

        Waits for one, first come, first served. Equally loaded ones take turns.
        """
        self.tend()
        place: asyncio.Future[Slot | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self.stir()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                slot = place.result()
                if slot is not None:
                    slot.add_load(-1)
                    self.stir()
            raise
        finally:
            if place in self._waiting:
                self._waiting.remove(place)

    def stir(self) -> None:
        """Something changed: hand out what room there is, and let go who waits in vain."""
        changes, self._watching = self._watching, []
        for change in changes:
            if not change.done() and not change.get_loop().is_closed():
                change.set_result(None)
        while self._waiting:
            place = self._waiting[0]
            if place.done() or place.get_loop().is_closed():
                self._waiting.popleft()
            elif self.closed:
                place.set_exception(EngineError("the agent loop was closed while a group waited for an actor"))
            elif self.paused:
                place.set_result(None)
            elif (slot := self._least_loaded()) is not None:
                slot.add_load(1)
                place.set_result(slot)
            elif not self.hopeful:
                place.set_exception(self.hopeless())
            else:
                return

    def _least_loaded(self) -> Slot | None:
        full, count = self._max_groups, len(self.slots)
        free = [slot for slot in self.slots if slot.phase is Phase.UP and (full is None or slot.load < full)]
        if not free:
            return None
        slot = min(free, key=lambda slot: (slot.load, (slot.index - self._turn) % count))
        self._turn = slot.index + 1
        return slot

    async def until_started(self) -> None:
        """Until every actor was up once, or has failed to be."""
        self.tend()
        while any(slot.call is not None and not slot.was_up for slot in self.slots):
            change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watching.append(change)
            await change
            self.check_open()

    # --- the walk of an actor -------------------------------------------------------------------------

    def tend(self) -> None:
        """See to it that this event loop hears of every actor, and that broken ones get another chance in time."""
        self.check_open()
        self._move_in()
        hopeful = self.hopeful
        for slot in self.slots:
            if slot.phase is Phase.BROKEN and (not hopeful or time.monotonic() >= slot.retry_at):
                self._restart(slot)
            self._listen(slot)

    def _move_in(self) -> None:
        """From now on this event loop is the one that hears of actors; WrongEventLoop while another one works here."""
        loop = asyncio.get_running_loop()
        if self.home is loop:
            return
        busy = bool(self._waiting) or any(slot.load for slot in self.slots)
        if busy and self.home is not None and self.home.is_running():
            raise WrongEventLoop(
                "the agent loop has groups under way on another event loop, which is running; use it from there (a "
                "blocking manager: manager.submit(agent_loop.call_all(...)))"
            )
        self.home = loop

    def _begin(self, slot: Slot) -> None:
        """Have an actor make its loop, or come up to date."""
        slot.epoch += 1
        slot.phase = Phase.STARTING
        slot.told = (self.sequence, self._version)
        kept = sorted(self._kept.values())
        slot.call = slot.handle.start.remote(slot.epoch, self._make_loop, self.sequence, self.told_pause, kept)
        slot.heard_on = None

    def _restart(self, slot: Slot) -> None:
        """Wait for Ray to restart an actor, if it has to."""
        slot.phase, slot.call, slot.heard_on = Phase.RESTARTING, slot.handle.hello.remote(), None

    def _listen(self, slot: Slot) -> None:
        loop = asyncio.get_running_loop()
        if slot.call is None or slot.heard_on is loop:
            return
        slot.heard_on = loop
        # Weakly: whoever drops the pool ends its actors, though they are waited for.
        hear = functools.partial(_hear, weakref.ref(self), slot, slot.call)
        ending(slot.call).add_done_callback(hear)

    def heard(self, slot: Slot, call: asyncio.Future[Any]) -> None:
        """The call that waited for an actor has ended."""
        error = call.exception()
        if not ray.is_initialized():
            self._give_up(slot, NoCluster("the cluster is gone"))
        elif slot.phase is Phase.UP:
            self.down(slot, slot.epoch, error)
        elif error is None and slot.phase is Phase.RESTARTING:
            self._begin(slot)
        elif error is None:
            self._started(slot, call.result())
        elif isinstance(error, _FOR_GOOD):
            self._give_up(slot, error)
        else:
            died = isinstance(error, exceptions.RayActorError)
            self.deaths += died
            if died and self.deaths <= self.patience:
                self._restart(slot)
            else:
                self._set_broken(slot, EngineError(f"actor {slot.index} did not start: {first_line(error)}"))
        self._listen(slot)
        self.stir()

    def _started(self, slot: Slot, started: Started | Trouble) -> None:
        if isinstance(started, Trouble):
            self._set_broken(slot, engine_error(f"starting the agent loop of actor {slot.index}", started))
        elif slot.told != (self.sequence, self._version):
            self._begin(slot)  # something was said to all meanwhile, and not to this one
        else:
            self.takes_weights = started.takes_weights_while_running
            slot.phase, slot.was_up, slot.error, slot.retry_s = Phase.UP, True, None, 1.0
            slot.call, slot.heard_on = slot.handle.watch.remote(slot.epoch), None
            log.info("actor_up actor=%d epoch=%d", slot.index, slot.epoch)

    def down(self, slot: Slot, epoch: int, error: BaseException | None) -> None:
        """An actor that was up is no longer what it was; counts once for every epoch."""
        if slot.epoch != epoch or slot.phase is not Phase.UP or self.closed:
            return
        self.deaths += 1
        log.warning("actor_lost actor=%d groups=%d error=%s", slot.index, slot.load, first_line(error))
        self._restart(slot)
        self._listen(slot)
        self.stir()

    def _give_up(self, slot: Slot, error: BaseException) -> None:
        slot.phase, slot.call = Phase.DEAD, None
        slot.error = EngineError(f"actor {slot.index} is dead, and Ray will not restart it: {first_line(error)}")
        log.error("actor_dead actor=%d error=%s", slot.index, first_line(error))

    def _set_broken(self, slot: Slot, error: EngineError) -> None:
        slot.phase, slot.call, slot.error = Phase.BROKEN, None, error
        slot.retry_at = time.monotonic() + slot.retry_s
        slot.retry_s = min(2 * slot.retry_s, _MAX_RETRY_S)
        log.error("actor_broken actor=%d", slot.index, exc_info=error)

    def hopeless(self) -> EngineError:
        """Why no group can be generated; of several reasons one that can be mended."""
        slots = sorted(self.slots, key=lambda slot: slot.phase is not Phase.BROKEN)
        last = next((slot.error for slot in slots if slot.error is not None), None)
        error = EngineError(f"none of the {len(slots)} actors of the agent loop is up: {last}")
        for note in getattr(last, "__notes__", ()):
            error.add_note(note)
        return error


def _hear(pool: weakref.ref[LoopPool], slot: Slot, call: Any, future: asyncio.Future[Any]) -> None:
    look_at(future)
    alive = pool()
    if alive is not None and alive.home is future.get_loop() and slot.call is call and not alive.closed:
        alive.heard(slot, future)


def _remote_class(actor_options: Mapping[str, Any] | None) -> Any:
    if actor_options is not None and not isinstance(actor_options, Mapping):
        raise InvalidConfig(f"actor_options is {actor_options!r:.80}; expected a mapping of options for Ray")
    options = dict(actor_options or {})
    own = sorted(_OWN_OPTIONS & options.keys())
    if own:
        raise InvalidConfig(f"actor_options has {', '.join(own)}, which RayAgentLoop sets itself; leave them out")
    options = {"scheduling_strategy": "SPREAD", **options}
    fixed = {"max_restarts": -1, "max_task_retries": 0, "max_concurrency": _MAX_CONCURRENCY}
    try:
        return ray.remote(LoopActor).options(**fixed, **options)
    except (TypeError, ValueError) as error:
        raise _refused_options(actor_options, error) from None


def _refused_options(actor_options: Mapping[str, Any] | None, error: Exception) -> InvalidConfig:
    return InvalidConfig(f"Ray refuses actor_options={dict(actor_options or {})!r:.200}: {error}")


def _kill(handles: Sequence[Any]) -> None:
    for handle in handles:
        if not ray.is_initialized():
            return
        try:
            ray.kill(handle)
        except Exception as error:  # it is gone, or of another cluster
            log.info("actor_not_ended error=%s", first_line(error))


def _kill_elsewhere(handles: Sequence[Any]) -> None:
    # The garbage collector may have called us on the very thread of Ray's that `kill` would wait for.
    with suppress(RuntimeError):  # no new threads: the interpreter ends, and the actors with it
        threading.Thread(target=_kill, args=(handles,), name="forebay-end-actors", daemon=True).start()


def ending(call: Any, *, first: Callable[[], None] | None = None) -> asyncio.Future[Any]:
    """How a call of an actor ends, on this event loop. `first` is done before anyone hears of it, on any thread.

    Not `asyncio.wrap_future`: a cancel must not reach Ray's future, which Ray completes in any case, and the event
    loop may be closed by then.
    """
    loop = asyncio.get_running_loop()
    end: asyncio.Future[Any] = loop.create_future()

    def hand_over(source: futures.Future[Any]) -> None:
        if end.done():
            return
        error = source.exception()
        if error is not None:
            end.set_exception(error)
        else:
            end.set_result(source.result())

    def arrive(source: futures.Future[Any]) -> None:
        if first is not None:
            first()
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(hand_over, source)

    call.future().add_done_callback(arrive)
    return end


def engine_error(what: str, trouble: Trouble) -> EngineError:
    """What an actor's loop raised."""
    # The traceback is a note: messages are counted as reasons, and it would make each one its own.
    kind: type[EngineError] = KINDS.get(trouble.kind, EngineError)
    error = kind(f"{what} raised {trouble.message}")
    error.add_note(f"In the actor:\n{trouble.traceback}")
    return error


def first_line(error: BaseException | None) -> str:
    """An error of Ray's in short: they go on for a page."""
    if error is None:
        return "it was restarted"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
