"""The actors of a `RayAgentLoop`: their states, and the choice of an actor for each group.

For each actor one call is always pending, and its end changes the actor's state. `start` returns when the actor is up,
`watch` fails when it dies, and `ping` returns when Ray has restarted it, after which it has to `start` again. An actor
is broken if its loop cannot be made (it is retried after a delay), and dead if Ray will not restart it. A restarted
actor gets groups only after `start` has given it the pause and the repeated calls that the other actors have.

All of this runs on the event loop of the caller, without threads and without polling.
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
from contextlib import suppress
from enum import Enum
from typing import Any

import ray
from ray import exceptions

from forebay.agent_loop.base import AgentLoop
from forebay.core.aio import ignore_exception, in_thread
from forebay.errors import EngineError, InvalidConfig, NoCluster, WrongEventLoop
from forebay.ray.client.link import check_cluster, first_line
from forebay.ray.loops.actor import KINDS, LoopActor, MethodCall, RemoteError
from forebay.ray.references import as_future

log = logging.getLogger(__name__)

_MAX_CONCURRENCY = 100_000  # `stop` must get through, however many groups are running
_RESERVED_OPTIONS = {"concurrency_groups", "get_if_exists", "lifetime", "max_concurrency", "max_pending_calls"}
_RESERVED_OPTIONS |= {"max_restarts", "max_task_retries", "name", "namespace"}
_PERMANENT = (exceptions.ActorDiedError, exceptions.ActorUnschedulableError, exceptions.RuntimeEnvSetupError)
_MAX_RETRY_S = 60.0


class Phase(Enum):
    """The state of an actor. In the first three a call is pending."""

    STARTING = "starting"
    UP = "up"
    RESTARTING = "restarting"
    BROKEN = "broken"
    DEAD = "dead"


class PooledActor:
    """One actor and its state."""

    def __init__(self, index: int, handle: Any) -> None:
        self.index = index
        self.handle = handle
        self.phase = Phase.STARTING
        self.epoch = 0  # the number of its starts
        self.started_with = (0, 0)  # the pause sequence and the version of repeated calls that `start` sent
        self.call: Any = None  # the reference of the pending `start`, `watch` or `ping`
        self.listener: asyncio.AbstractEventLoop | None = None  # that waits for the pending call
        self.was_up = False
        self.error: EngineError | None = None
        self.retry_at = 0.0
        self.retry_s = 1.0
        self._load = 0
        self._lock = threading.Lock()  # calls end on a thread of Ray

    @property
    def load(self) -> int:
        """The number of groups that it generates."""
        return self._load

    def add_load(self, groups: int) -> None:
        with self._lock:
            self._load += groups


class LoopPool:
    """The actors of a `RayAgentLoop`. They end with this object."""

    def __init__(
        self,
        make_loop: Callable[[], AgentLoop],
        *,
        actors: int,
        max_groups_per_actor: int | None,
        actor_options: Mapping[str, Any] | None,
    ) -> None:
        check_cluster()
        try:
            self._make_loop = ray.put(make_loop)  # once, for all starts
        except (TypeError, ValueError) as error:
            raise InvalidConfig(f"make_loop cannot be sent to an actor: {error}") from None
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self.paused = False  # no groups are sent
        self.closed = False
        self.takes_weights: bool | None = None
        self.deaths = 0  # since the last answered group
        self.pause_sequence = 0  # counts pauses and resumes that were sent
        self.pause_sent = False  # the last of them
        self._repeated: dict[str, MethodCall] = {}
        self._version = 0
        self._max_groups = max_groups_per_actor
        self._next_index = 0
        self._waiting: deque[asyncio.Future[PooledActor | None]] = deque()
        self._changes: list[asyncio.Future[None]] = []  # wait for any change
        handles = _create(actors, actor_options)
        self.actors = [PooledActor(index, handle) for index, handle in enumerate(handles)]
        self._end = weakref.finalize(self, _kill_in_thread, handles)
        self._end.atexit = False  # they end with the process anyway
        for actor in self.actors:
            self._start(actor)

    @property
    def max_deaths(self) -> int:
        """More deaths than this without an answered group are an error."""
        return 3 * len(self.actors)

    @property
    def usable(self) -> bool:
        """Whether an actor is up, or may come up."""
        return any(actor.call is not None for actor in self.actors)

    def check_open(self) -> None:
        """Raise if the pool was closed, or if there is no cluster."""
        if self.closed:
            raise EngineError("the agent loop was closed, and its actors with it; create a new one")
        check_cluster()  # otherwise Ray would start a cluster at the next call

    async def end(self) -> None:
        """End the actors."""
        self._end.detach()
        await in_thread(lambda: _kill([actor.handle for actor in self.actors]))

    def repeat(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MethodCall:
        """A call that restarted actors get, too. Only the last call of each method is repeated."""
        self._version += 1
        self._repeated[method] = MethodCall(self._version, method, args, kwargs)
        return self._repeated[method]

    # --- choosing an actor ----------------------------------------------------------------------------

    async def acquire(self) -> PooledActor | None:
        """The least loaded actor that is up and below its limit, with one more group counted; None in a pause.

        Waits for one, first come, first served. Equally loaded actors take turns.
        """
        self.refresh()
        granted: asyncio.Future[PooledActor | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(granted)
        self.notify()
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                actor = granted.result()
                if actor is not None:
                    self.release(actor)
            raise
        finally:
            if granted in self._waiting:
                self._waiting.remove(granted)

    def release(self, actor: PooledActor) -> None:
        """A group that was counted for this actor is not sent."""
        actor.add_load(-1)
        self.notify()

    def notify(self) -> None:
        """Something changed: assign actors to waiting groups, or end their wait."""
        changes, self._changes = self._changes, []
        for change in changes:
            if not change.done() and not change.get_loop().is_closed():
                change.set_result(None)
        while self._waiting:
            granted = self._waiting[0]
            if granted.done() or granted.get_loop().is_closed():
                self._waiting.popleft()
            elif self.closed:
                granted.set_exception(EngineError("the agent loop was closed while a group waited for an actor"))
            elif self.paused:
                granted.set_result(None)
            elif (actor := self._least_loaded()) is not None:
                actor.add_load(1)
                granted.set_result(actor)
            elif not self.usable:
                granted.set_exception(self.unusable_error())
            else:
                return

    def _least_loaded(self) -> PooledActor | None:
        limit, count = self._max_groups, len(self.actors)
        free = [actor for actor in self.actors if actor.phase is Phase.UP and (limit is None or actor.load < limit)]
        if not free:
            return None
        actor = min(free, key=lambda actor: (actor.load, (actor.index - self._next_index) % count))
        self._next_index = actor.index + 1
        return actor

    async def until_started(self) -> None:
        """Wait until every actor was up once, or has failed to start."""
        self.refresh()
        while any(actor.call is not None and not actor.was_up for actor in self.actors):
            change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._changes.append(change)
            await change
            self.check_open()

    # --- the states of an actor -----------------------------------------------------------------------

    def refresh(self) -> None:
        """Listen to all actors on this event loop, and retry broken ones whose delay has passed."""
        self.check_open()
        self._use_this_event_loop()
        usable = self.usable
        for actor in self.actors:
            if actor.phase is Phase.BROKEN and (not usable or time.monotonic() >= actor.retry_at):
                self._await_restart(actor)
            self._listen(actor)

    def _use_this_event_loop(self) -> None:
        """Listen on this event loop from now on; WrongEventLoop while another one is in use."""
        loop = asyncio.get_running_loop()
        if self.event_loop is loop:
            return
        busy = bool(self._waiting) or any(actor.load for actor in self.actors)
        if busy and self.event_loop is not None and self.event_loop.is_running():
            raise WrongEventLoop(
                "the agent loop generates groups on another event loop, which is running; use it from there (with a "
                "blocking manager: manager.submit(agent_loop.call_all(...)))"
            )
        self.event_loop = loop

    def _start(self, actor: PooledActor) -> None:
        """Make the actor's loop, or bring it up to date."""
        actor.epoch += 1
        actor.phase = Phase.STARTING
        actor.started_with = (self.pause_sequence, self._version)
        calls = sorted(self._repeated.values())
        actor.call = actor.handle.start.remote(
            actor.epoch, self._make_loop, self.pause_sequence, self.pause_sent, calls
        )
        actor.listener = None

    def _await_restart(self, actor: PooledActor) -> None:
        """Wait until Ray has restarted an actor, if it has to."""
        actor.phase, actor.call, actor.listener = Phase.RESTARTING, actor.handle.ping.remote(), None

    def _listen(self, actor: PooledActor) -> None:
        loop = asyncio.get_running_loop()
        if actor.call is None or actor.listener is loop:
            return
        actor.listener = loop
        # With a weak reference: dropping the pool ends its actors, although calls are pending.
        ended = functools.partial(_pending_call_ended, weakref.ref(self), actor, actor.call)
        as_future(actor.call).add_done_callback(ended)

    def pending_call_ended(self, actor: PooledActor, call: asyncio.Future[Any]) -> None:
        """The pending call of an actor has ended."""
        error = call.exception()
        if not ray.is_initialized():
            self._set_dead(actor, NoCluster("the cluster is gone"))
        elif actor.phase is Phase.UP:
            self.lost(actor, actor.epoch, error)
        elif error is None and actor.phase is Phase.RESTARTING:
            self._start(actor)
        elif error is None:
            self._started(actor, call.result())
        elif isinstance(error, _PERMANENT):
            self._set_dead(actor, error)
        else:
            died = isinstance(error, exceptions.RayActorError)
            self.deaths += died
            if died and self.deaths <= self.max_deaths:
                self._await_restart(actor)
            else:
                self._set_broken(actor, EngineError(f"actor {actor.index} did not start: {first_line(error)}"))
        self._listen(actor)
        self.notify()

    def _started(self, actor: PooledActor, started: bool | RemoteError) -> None:
        if isinstance(started, RemoteError):
            self._set_broken(actor, engine_error(f"starting the agent loop of actor {actor.index}", started))
        elif actor.started_with != (self.pause_sequence, self._version):
            self._start(actor)  # a pause or a call was sent to the other actors meanwhile
        else:
            self.takes_weights = started
            actor.phase, actor.was_up, actor.error, actor.retry_s = Phase.UP, True, None, 1.0
            actor.call, actor.listener = actor.handle.watch.remote(actor.epoch), None
            log.info("actor_up actor=%d epoch=%d", actor.index, actor.epoch)

    def lost(self, actor: PooledActor, epoch: int, error: BaseException | None) -> None:
        """An actor that was up died or was restarted; counted once for every epoch."""
        if actor.epoch != epoch or actor.phase is not Phase.UP or self.closed:
            return
        self.deaths += 1
        why = "it was restarted" if error is None else first_line(error)
        log.warning("actor_lost actor=%d groups=%d error=%s", actor.index, actor.load, why)
        self._await_restart(actor)
        self._listen(actor)
        self.notify()

    def _set_dead(self, actor: PooledActor, error: BaseException) -> None:
        actor.phase, actor.call = Phase.DEAD, None
        actor.error = EngineError(f"actor {actor.index} is dead, and Ray will not restart it: {first_line(error)}")
        log.error("actor_dead actor=%d error=%s", actor.index, first_line(error))

    def _set_broken(self, actor: PooledActor, error: EngineError) -> None:
        actor.phase, actor.call, actor.error = Phase.BROKEN, None, error
        actor.retry_at = time.monotonic() + actor.retry_s
        actor.retry_s = min(2 * actor.retry_s, _MAX_RETRY_S)
        log.error("actor_broken actor=%d", actor.index, exc_info=error)

    def unusable_error(self) -> EngineError:
        """Why no group can be generated; prefers the error of a broken actor, which can be fixed."""
        actors = sorted(self.actors, key=lambda actor: actor.phase is not Phase.BROKEN)
        last = next((actor.error for actor in actors if actor.error is not None), None)
        error = EngineError(f"none of the {len(actors)} actors of the agent loop is up: {last}")
        for note in getattr(last, "__notes__", ()):
            error.add_note(note)
        return error


def _pending_call_ended(
    pool: weakref.ref[LoopPool], actor: PooledActor, call: Any, future: asyncio.Future[Any]
) -> None:
    ignore_exception(future)
    alive = pool()
    if alive is not None and alive.event_loop is future.get_loop() and actor.call is call and not alive.closed:
        alive.pending_call_ended(actor, future)


def _create(actors: int, actor_options: Mapping[str, Any] | None) -> list[Any]:
    if actor_options is not None and not isinstance(actor_options, Mapping):
        raise InvalidConfig(f"actor_options is {actor_options!r:.80}; expected a mapping of options for Ray")
    options = dict(actor_options or {})
    reserved = sorted(_RESERVED_OPTIONS & options.keys())
    if reserved:
        raise InvalidConfig(f"actor_options has {', '.join(reserved)}, which RayAgentLoop sets itself; leave them out")
    fixed = {"max_restarts": -1, "max_task_retries": 0, "max_concurrency": _MAX_CONCURRENCY}
    try:
        remote: Any = ray.remote(LoopActor).options(**fixed, **{"scheduling_strategy": "SPREAD", **options})
        return [remote.remote() for _ in range(actors)]
    except (TypeError, ValueError) as error:
        raise InvalidConfig(f"Ray refuses actor_options={options!r:.200}: {error}") from None


def _kill(handles: Sequence[Any]) -> None:
    for handle in handles:
        if not ray.is_initialized():
            return
        try:
            ray.kill(handle)
        except Exception as error:  # it is gone, or belongs to another cluster
            log.info("actor_not_ended error=%s", first_line(error))


def _kill_in_thread(handles: Sequence[Any]) -> None:
    # The garbage collector may run this on the thread of Ray that `kill` would wait for.
    with suppress(RuntimeError):  # the interpreter is exiting and allows no new threads; the actors end with it
        threading.Thread(target=_kill, args=(handles,), name="forebay-end-actors", daemon=True).start()


def engine_error(what: str, remote: RemoteError) -> EngineError:
    """The error for an exception in an actor."""
    # The traceback is a note and not in the message: messages are counted as reasons, and would all be different.
    kind: type[EngineError] = KINDS.get(remote.kind, EngineError)
    error = kind(f"{what} raised {remote.message}")
    error.add_note(f"In the actor:\n{remote.traceback}")
    return error
