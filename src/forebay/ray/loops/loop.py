"""`RayAgentLoop`: an agent loop as a pool of Ray actors, with the contract of `AgentLoop` even if actors die.

What it promises, beyond the contract of every loop
- A group goes to the actor with the fewest running groups. If no actor is up, or all are at their limit, it waits.
- The groups of an actor that dies are returned as ABORTED, as they were passed in, and the producer retries them (G3).
  They spend no try, unless several actors in a row died with the same group: then the group may be the cause. Ray
  restarts the actor. Before it gets a group it has the pause of the pool and the calls of `call_all(keep=True)`.
  Actors that keep dying, or that cannot be restarted, are an EngineError and not a wait.
- An exception in an actor's loop is an EngineError here, with the remote traceback as its note.
- Samples are sent as codec frames. A member that cannot be sent back is FAILED; the others are kept.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Self

import ray
from ray import exceptions

from forebay.agent_loop.base import AgentLoop
from forebay.buffer.internal import mark_aborted
from forebay.codec.frame import decode_group, encode_group
from forebay.core.aio import ignore_exception, see_through
from forebay.core.rollout import RolloutState, Status
from forebay.core.validate import integer_setting, positive_seconds
from forebay.errors import EngineError, InvalidConfig, InvalidInput
from forebay.ray.client.link import first_line
from forebay.ray.loops.actor import MethodCall, RemoteError, Reply
from forebay.ray.loops.pool import LoopPool, Phase, PooledActor, engine_error
from forebay.ray.references import as_future

log = logging.getLogger(__name__)

_DIED = (exceptions.RayActorError, exceptions.NodeDiedError)
_LOST = (*_DIED, exceptions.ObjectLostError)  # the last: a reply that was on a node that died
_CLOSE_S = 5.0
_EXCUSED_DEATHS = 3  # of actors in a row that had the same group; further ones spend tries


class RayAgentLoop(AgentLoop):
    """Runs the agent loop that `make_loop()` returns in each of `actors` actors.

    - `make_loop`: a class, or a function that Ray can send. It is called in the actor's process, on its event loop.
    - `max_groups_per_actor`: further groups wait in this process, first come, first served.
    - `actor_options`: Ray's options for each actor: `num_cpus`, `num_gpus`, `resources`, `runtime_env`,
      `scheduling_strategy` (by default the actors are spread over the nodes), ...
    - `cancel_timeout_s`: how long a cancelled group waits for the samples of its actor. Keep it below the
      `cancel_timeout_s` of the producer's Timeouts.

    The actors belong to this object and end with it. It cannot be sent to another process: create it where it is used,
    which may be an actor. Use it from one event loop at a time.

        async with RayAgentLoop(MyLoop, actors=8, actor_options={"num_gpus": 1}) as loop:
            await strategy.produce_batch(loop, sampler, 64, "math", train_step=1, model_step=0)
    """

    def __init__(
        self,
        make_loop: Callable[[], AgentLoop],
        *,
        actors: int,
        max_groups_per_actor: int | None = None,
        actor_options: Mapping[str, Any] | None = None,
        cancel_timeout_s: float = 8.0,
    ) -> None:
        if not callable(make_loop) or isinstance(make_loop, AgentLoop):
            raise InvalidConfig(f"make_loop is {make_loop!r:.80}; expected a function that makes an AgentLoop")
        integer_setting("actors", actors, least=1)
        if max_groups_per_actor is not None:
            integer_setting("max_groups_per_actor", max_groups_per_actor, least=1)
        self._cancel_timeout_s = positive_seconds("cancel_timeout_s", cancel_timeout_s)
        self._make_loop = make_loop
        self._numbers = itertools.count(1)
        self._deaths: dict[tuple[str | None, int | None], int] = {}  # by group: how many actors in a row died with it
        self._pool = LoopPool(
            make_loop, actors=actors, max_groups_per_actor=max_groups_per_actor, actor_options=actor_options
        )

    def __repr__(self) -> str:
        actors = ", ".join(f"{actor.phase.value} ({actor.load})" for actor in self._pool.actors)
        return f"<RayAgentLoop of {len(self._pool.actors)} actors: {actors}>"

    def __reduce__(self) -> NoReturn:
        raise InvalidInput("a RayAgentLoop cannot be sent to another process: its actors end with it; create one there")

    def loads(self) -> list[int]:
        """The number of running groups of each actor."""
        return [actor.load for actor in self._pool.actors]

    @property
    def takes_weights_while_running(self) -> bool:  # type: ignore[override]
        """As the loops in the actors.

        If `make_loop` is not a class, only an actor knows, and this blocks until one is up; `await start()` first to
        avoid that.
        """
        pool = self._pool
        if pool.takes_weights is None:
            maker = self._make_loop.func if isinstance(self._make_loop, functools.partial) else self._make_loop
            if isinstance(maker, type) and issubclass(maker, AgentLoop):
                pool.takes_weights = bool(maker.takes_weights_while_running)
            else:
                pool.takes_weights = _ask_takes_weights(pool)
        return pool.takes_weights

    # --- generating -----------------------------------------------------------------------------------

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> Sequence[RolloutState]:
        """Generate one sample, as a group."""
        return await self.generate_group([state], enable_partial_rollout=enable_partial_rollout)

    async def generate_group(
        self, group: list[RolloutState], *, enable_partial_rollout: bool = False
    ) -> list[RolloutState]:
        """Generate a group on an actor. See the top of this file, and of `agent_loop.base`."""
        if all(state.status is Status.COMPLETED for state in group):
            return group
        while True:
            actor = await self._pool.acquire()
            if actor is None:
                mark_aborted(group)
                return group
            if await self._generate_on(actor, group, enable_partial_rollout):
                return group

    async def _generate_on(self, actor: PooledActor, group: list[RolloutState], partial: bool) -> bool:
        """Generate a group on this actor; False if the actor had restarted and refused it."""
        pool, epoch, number = self._pool, actor.epoch, next(self._numbers)
        try:
            references: list[Any] = []
            frame = encode_group(group, references)
            call = actor.handle.generate.remote(epoch, number, frame, references, partial)
        except BaseException:
            pool.release(actor)
            raise
        future: asyncio.Future[Reply] = as_future(call, first=lambda: actor.add_load(-1))
        future.add_done_callback(lambda _: pool.notify())
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError:
            await self._stop([(actor, number, future)])
            if future.done() and future.exception() is None:
                _fill(group, future.result())
            raise
        error = future.exception()
        if isinstance(error, _LOST):
            self._lost(actor, epoch, error, group)
            return True
        if error is not None:
            raise EngineError(f"an actor of the agent loop cannot generate a group: {first_line(error)}") from error
        reply = future.result()
        if reply.kind == "refused":
            pool.lost(actor, epoch, None)
            return False
        pool.deaths = 0
        key = _key(group)
        deaths = self._deaths.pop(key, 0)
        _fill(group, reply)
        if reply.error is not None:
            raise engine_error("the agent loop of an actor", reply.error)
        if reply.kind == "restarted":
            self._deaths[key] = deaths + 1
            mark_aborted(group, "its actor was restarted")
        elif reply.kind == "cancelled":
            raise asyncio.CancelledError  # the loop cancelled itself: as with a local loop
        return True

    def excuses(self, group: Sequence[RolloutState]) -> bool:
        """Whether the actor of a group died, and not so often that the group may be the cause."""
        return 0 < self._deaths.get(_key(group), 0) <= _EXCUSED_DEATHS

    def _lost(self, actor: PooledActor, epoch: int, error: BaseException, group: list[RolloutState]) -> None:
        pool = self._pool
        if isinstance(error, _DIED):
            pool.lost(actor, epoch, error)
        if pool.deaths > pool.max_deaths:
            raise EngineError(
                f"actors of the agent loop died {pool.deaths} times, and no group was answered in between; the last "
                f"time: {first_line(error)}"
            )
        self._deaths[_key(group)] = self._deaths.get(_key(group), 0) + 1
        mark_aborted(group, "the agent loop was closed" if pool.closed else f"its actor died: {first_line(error)}")

    async def _stop(self, calls: Sequence[tuple[PooledActor, int, asyncio.Future[Reply]]]) -> None:
        """Tell actors to stop calls, and wait for `cancel_timeout_s` until they have; a further cancel waits, too."""
        if ray.is_initialized():
            for actor, number, _ in calls:
                actor.handle.stop.remote(number)
        ended = asyncio.gather(*(future for *_, future in calls), return_exceptions=True)
        await see_through(ended, self._cancel_timeout_s)
        for actor, _, future in calls:
            if not future.done():
                log.warning("actor_ignores_cancel actor=%d: left behind", actor.index)
            future.add_done_callback(ignore_exception)

    # --- pausing, and other calls to all actors -------------------------------------------------------

    async def pause(self) -> None:
        """Ask running members to end soon, on every actor. An actor that is restarted meanwhile is paused, too."""
        await super().pause()
        self._pool.paused = True
        self._pool.refresh()
        self._pool.notify()
        await self._send_paused(True)

    async def resume(self) -> None:
        """Generate again."""
        self._pool.refresh()
        if await self._send_paused(False):
            self._pool.paused = False
            await super().resume()

    async def idle(self) -> None:
        """Wait until the engine of every actor that is up has stopped our requests."""
        await self._ask_all("call", MethodCall(0, "idle", (), {}))

    async def weights_loaded(self, model_step: int) -> None:
        """Tell all actors, and those that are restarted later."""
        await self.call_all("weights_loaded", model_step, keep=True)

    async def _send_paused(self, paused: bool) -> bool:
        """Tell all actors; False if a later pause or resume was sent meanwhile."""
        pool = self._pool
        pool.pause_sequence += 1
        sequence, pool.pause_sent = pool.pause_sequence, paused
        await self._ask_all("set_paused", sequence, paused)
        return sequence == pool.pause_sequence

    async def call_all(self, method: str, /, *args: Any, keep: bool = False, **kwargs: Any) -> list[Any]:
        """Call a method (sync or async) of every actor's loop; returns the results in the order of the actors.

        To load new weights, for example. Arguments may be references: put large ones once. `keep`: the last such call
        of this method is repeated on every restarted actor, before it gets a group. Waits for actors that start for
        the first time. An actor that is restarting, or that dies meanwhile, has no result in the list.
        """
        if not isinstance(method, str) or not method:
            raise InvalidInput(f"call_all got {method!r} as the method; expected its name")
        await self._pool.until_started()
        if not self._pool.usable:
            raise self._pool.unusable_error()
        call = self._pool.repeat(method, args, kwargs) if keep else MethodCall(0, method, args, kwargs)
        return [reply.value for reply in await self._ask_all("call", call)]

    async def _ask_all(self, method: str, *args: Any) -> list[Reply]:
        """Make the same call to all actors that are up; raises the error of the first that raised."""
        asked: list[tuple[PooledActor, int, asyncio.Future[Reply]]] = []
        for actor in self._pool.actors:
            if actor.phase is Phase.UP:
                number = next(self._numbers)
                called = getattr(actor.handle, method).remote(actor.epoch, number, *args)
                asked.append((actor, number, as_future(called)))
        if not asked:
            return []
        epochs = [actor.epoch for actor, *_ in asked]
        try:
            await asyncio.wait([future for *_, future in asked])
        except asyncio.CancelledError:
            await self._stop(asked)
            raise
        replies, raised = [], None
        for (actor, _, future), epoch in zip(asked, epochs, strict=True):
            error = future.exception()
            reply = None if error is not None else future.result()
            if isinstance(error, _DIED):
                self._pool.lost(actor, epoch, error)
            elif reply is None:
                raised = raised or EngineError(f"the call to actor {actor.index} failed: {first_line(error)}")
            elif reply.error is not None:
                raised = raised or engine_error(f"the agent loop of actor {actor.index}", reply.error)
            elif reply.kind == "refused":
                self._pool.lost(actor, epoch, None)
            elif reply.kind == "done":
                replies.append(reply)
        if raised is not None:
            raise raised
        return replies

    # --- starting and closing -------------------------------------------------------------------------

    async def start(self) -> None:
        """Wait until all actors are up; EngineError if one cannot start. Groups need not wait for this."""
        await self._pool.until_started()
        for actor in self._pool.actors:
            if actor.error is not None and not actor.was_up:
                raise actor.error

    async def close(self) -> None:
        """Close the loops that have a `close` method, and end the actors. Running groups are returned as ABORTED."""
        pool = self._pool
        if pool.closed:
            return
        pool.closed = True
        pool.notify()
        closing = []
        if ray.is_initialized():
            closing = [as_future(actor.handle.close.remote()) for actor in pool.actors if actor.phase is Phase.UP]
        try:
            if closing:
                await asyncio.wait(closing, timeout=_CLOSE_S)
        finally:
            for future in closing:
                future.add_done_callback(ignore_exception)
            await pool.end()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


def _ask_takes_weights(pool: LoopPool) -> bool:
    pool.check_open()
    error = None
    left = [actor.call for actor in pool.actors if actor.phase is Phase.STARTING]
    while left:
        (call, *_), left = ray.wait(left, num_returns=1)
        try:
            started = ray.get(call)
        except exceptions.RayError as failure:
            error = EngineError(f"an actor of the agent loop did not start: {first_line(failure)}")
        else:
            if not isinstance(started, RemoteError):
                return bool(started)
            error = engine_error("starting the agent loop of an actor", started)
    raise error or EngineError("no actor of the agent loop is up or starting; await start() first")


def _fill(group: list[RolloutState], reply: Reply) -> None:
    """Replace the list's members by those in the reply; members that were COMPLETED before stay the same objects."""
    if reply.kind == "refused" or (reply.frame is None and reply.kind != "done"):
        return
    returned = () if reply.frame is None else decode_group(reply.frame, reply.references)
    completed = {_identity(state): state for state in group if state.status is Status.COMPLETED}
    group[:] = [state if state.rollout_id is None else completed.get(_identity(state), state) for state in returned]


def _key(group: Sequence[RolloutState]) -> tuple[str | None, int | None]:
    return group[0].task_name, group[0].group_id


def _identity(state: RolloutState) -> tuple[int | None, int]:
    return state.rollout_id, state.segment
