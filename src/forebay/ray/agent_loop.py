"""An agent loop as a pool of Ray actors: `RayAgentLoop` keeps the contract of `AgentLoop`, whatever becomes of them.

What it promises, beyond what every loop does
- A group goes to the actor that has the fewest under way; while none is up, or all are full, it waits for a place.
- The groups of an actor that dies come back as ABORTED, as they were given, and are retried by whoever produces them
  (G3). They spend no try, unless they were with an actor that died several times in a row: then it may be the group
  that kills actors. Ray restarts the actor. Before it gets a group it is paused if the pool is, and has the calls that
  `call_all(keep=True)` made. Actors that keep dying, or that cannot come back, are an EngineError, not a wait.
- What an actor's loop raises is an EngineError here, with the remote traceback as its note.
- Samples are sent as codec frames. A member that cannot be sent back is FAILED, and costs none of its siblings.
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
from forebay.checks import whole_number
from forebay.codec import decode_group, encode_group
from forebay.errors import EngineError, InvalidConfig, InvalidInput
from forebay.produce.settings import positive_seconds
from forebay.produce.work import look_at
from forebay.ray.loop_actor import Answer, KeptCall, Started
from forebay.ray.loop_pool import LoopPool, Phase, Slot, ending, engine_error, first_line
from forebay.rollout import RolloutState, Status
from forebay.waiting import RESOLUTION_S

__all__ = ["RayAgentLoop"]

log = logging.getLogger(__name__)

_DIED = (exceptions.RayActorError, exceptions.NodeDiedError)
_LOST = (*_DIED, exceptions.ObjectLostError)  # the last: an answer that was on a node that died
_FAREWELL_S = 5.0
_EXCUSED_DEATHS = 3  # of actors in a row that had the same group; after these it spends tries


class RayAgentLoop(AgentLoop):
    """Runs the agent loop that `make_loop()` makes in each of `actors` actors.

    - `make_loop`: a class, or a function that Ray can send. It is called in the actor's process, on its event loop.
    - `max_groups_per_actor`: groups beyond it wait here, first come, first served.
    - `actor_options`: what Ray is to give each actor: `num_cpus`, `num_gpus`, `resources`, `runtime_env`,
      `scheduling_strategy` (otherwise they are spread over the nodes), ...
    - `cancel_timeout_s`: how long a cancelled group waits for what its actor has by then. Keep it below the
      `cancel_timeout_s` of the producer's Timeouts.

    The actors belong to this object, and end with it. It cannot be sent to another process: make it where it is used,
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
        try:
            whole_number("actors", actors, least=1)
            if max_groups_per_actor is not None:
                whole_number("max_groups_per_actor", max_groups_per_actor, least=1)
        except InvalidInput as error:
            raise InvalidConfig(str(error)) from None
        self._cancel_timeout_s = positive_seconds("cancel_timeout_s", cancel_timeout_s)
        self._make_loop = make_loop
        self._numbers = itertools.count(1)
        self._interrupted: dict[tuple[str | None, int | None], int] = {}  # groups; how many actors in a row they lost
        self._pool = LoopPool(
            make_loop, actors=actors, max_groups_per_actor=max_groups_per_actor, actor_options=actor_options
        )

    def __repr__(self) -> str:
        actors = ", ".join(f"{slot.phase.value} ({slot.load})" for slot in self._pool.slots)
        return f"<RayAgentLoop of {len(self._pool.slots)} actors: {actors}>"

    def __reduce__(self) -> NoReturn:
        raise InvalidInput("a RayAgentLoop cannot be sent to another process: its actors end with it; make one there")

    def loads(self) -> list[int]:
        """The groups that each actor has under way."""
        return [slot.load for slot in self._pool.slots]

    @property
    def takes_weights_while_running(self) -> bool:  # type: ignore[override]
        """As the loop that is made says.

        If `make_loop` is not its class, only an actor can tell: this then blocks until one is up. `await start()`
        before, and it does not.
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
        """Answer one sample, as a group of its own."""
        return await self.generate_group([state], enable_partial_rollout=enable_partial_rollout)

    async def generate_group(
        self, group: list[RolloutState], *, enable_partial_rollout: bool = False
    ) -> list[RolloutState]:
        """Have a group generated by an actor. See the top of this file, and of `agent_loop.base`."""
        if all(state.status is Status.COMPLETED for state in group):
            return group
        while True:
            slot = await self._pool.place()
            if slot is None:
                _abort(group)
                return group
            if await self._send(slot, group, enable_partial_rollout):
                return group

    async def _send(self, slot: Slot, group: list[RolloutState], partial: bool) -> bool:
        """Have it generated there; False if the actor turned out to be a new one, and did nothing."""
        pool, epoch, number = self._pool, slot.epoch, next(self._numbers)
        try:
            references: list[Any] = []
            frame = encode_group(group, references)
            call = slot.handle.generate.remote(epoch, number, frame, references, partial)
        except BaseException:
            slot.add_load(-1)
            pool.stir()
            raise
        future: asyncio.Future[Answer] = ending(call, first=lambda: slot.add_load(-1))
        future.add_done_callback(lambda _: pool.stir())
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError:
            await self._stop([(slot, number, future)])
            if future.done() and future.exception() is None:
                _fill(group, future.result())
            raise
        error = future.exception()
        if isinstance(error, _LOST):
            self._lost(slot, epoch, error, group)
            return True
        if error is not None:
            raise EngineError(f"an actor of the agent loop cannot generate a group: {first_line(error)}") from error
        answer = future.result()
        if answer.kind == "refused":
            pool.down(slot, epoch, None)
            return False
        pool.deaths = 0
        key = (group[0].task_name, group[0].group_id)
        interrupted = self._interrupted.pop(key, 0)
        _fill(group, answer)
        if answer.trouble is not None:
            raise engine_error("the agent loop of an actor", answer.trouble)
        if answer.kind == "ended":
            self._interrupted[key] = interrupted + 1
            _abort(group, "its actor was started anew")
        elif answer.kind == "cancelled":
            raise asyncio.CancelledError  # it did that itself: as with a local loop
        return True

    def excuses(self, group: Sequence[RolloutState]) -> bool:
        """Whether the actor of a group died, and not so often that it may be the group's fault."""
        return 0 < self._interrupted.get((group[0].task_name, group[0].group_id), 0) <= _EXCUSED_DEATHS

    def _lost(self, slot: Slot, epoch: int, error: BaseException, group: list[RolloutState]) -> None:
        pool = self._pool
        if isinstance(error, _DIED):
            pool.down(slot, epoch, error)
        if pool.deaths > pool.patience:
            raise EngineError(
                f"actors of the agent loop died {pool.deaths} times, and no group was answered in between; the last "
                f"time: {first_line(error)}"
            )
        key = (group[0].task_name, group[0].group_id)
        self._interrupted[key] = self._interrupted.get(key, 0) + 1
        _abort(group, "the agent loop was closed" if pool.closed else f"its actor died: {first_line(error)}")

    async def _stop(self, calls: Sequence[tuple[Slot, int, asyncio.Future[Answer]]]) -> None:
        """Tell actors to stop calls, and wait for the end of them, within limits; a further cancel waits, too."""
        if ray.is_initialized():
            for slot, number, _ in calls:
                slot.handle.stop.remote(number)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._cancel_timeout_s
        left = {future for *_, future in calls if not future.done()}
        while left and (left_s := deadline - loop.time()) > RESOLUTION_S:
            try:
                left = (await asyncio.wait(left, timeout=left_s))[1]
            except asyncio.CancelledError:
                continue
        for slot, _, future in calls:
            if not future.done():
                log.warning("actor_ignores_cancel actor=%d: left behind", slot.index)
            future.add_done_callback(look_at)

    # --- pausing, and other calls to all --------------------------------------------------------------

    async def pause(self) -> None:
        """Ask what is under way to end soon, on every actor. One that is restarted meanwhile comes up paused."""
        await super().pause()
        self._pool.paused = True
        self._pool.tend()
        self._pool.stir()
        await self._say(paused=True)

    async def resume(self) -> None:
        """Generate again."""
        self._pool.tend()
        if await self._say(paused=False):
            self._pool.paused = False
            await super().resume()

    async def idle(self) -> None:
        """Wait until the engine of every actor that is up has stopped our requests."""
        await self._ask_all("call", KeptCall(0, "idle", (), {}))

    async def weights_loaded(self, model_step: int) -> None:
        """Tell all actors, and those that are restarted later."""
        await self.call_all("weights_loaded", model_step, keep=True)

    async def _say(self, *, paused: bool) -> bool:
        """Tell all actors; False if something else was said meanwhile."""
        pool = self._pool
        pool.sequence += 1
        sequence, pool.told_pause = pool.sequence, paused
        await self._ask_all("set_paused", sequence, paused)
        return sequence == pool.sequence

    async def call_all(self, method: str, /, *args: Any, keep: bool = False, **kwargs: Any) -> list[Any]:
        """Call a method of every actor's loop, sync or async; what they returned, in the order of the actors.

        For new weights, say. Arguments may be references: put large ones once. `keep`: the last such call of this
        method is made again on every actor that is restarted, before it gets a group. Actors that are starting for the
        first time are waited for. One that is being restarted, or that dies meanwhile, has no answer in the list.
        """
        if not isinstance(method, str) or not method:
            raise InvalidInput(f"call_all got {method!r} as a method; expected its name")
        await self._pool.until_started()
        if not self._pool.hopeful:
            raise self._pool.hopeless()
        call = self._pool.keep(method, args, kwargs) if keep else KeptCall(0, method, args, kwargs)
        return [answer.value for answer in await self._ask_all("call", call)]

    async def _ask_all(self, method: str, *args: Any) -> list[Answer]:
        """The same call to all actors that are up; raises what the first of them raised."""
        asked: list[tuple[Slot, int, asyncio.Future[Answer]]] = []
        for slot in self._pool.slots:
            if slot.phase is Phase.UP:
                number = next(self._numbers)
                called = getattr(slot.handle, method).remote(slot.epoch, number, *args)
                asked.append((slot, number, ending(called)))
        if not asked:
            return []
        epochs = [slot.epoch for slot, *_ in asked]
        try:
            await asyncio.wait([future for *_, future in asked])
        except asyncio.CancelledError:
            await self._stop(asked)
            raise
        answers, raised = [], None
        for (slot, _, future), epoch in zip(asked, epochs, strict=True):
            error = future.exception()
            answer = None if error is not None else future.result()
            if isinstance(error, _DIED):
                self._pool.down(slot, epoch, error)
            elif answer is None:
                raised = raised or EngineError(f"actor {slot.index} could not do it: {first_line(error)}")
            elif answer.trouble is not None:
                raised = raised or engine_error(f"the agent loop of actor {slot.index}", answer.trouble)
            elif answer.kind == "refused":
                self._pool.down(slot, epoch, None)
            elif answer.kind == "done":
                answers.append(answer)
        if raised is not None:
            raise raised
        return answers

    # --- starting and ending --------------------------------------------------------------------------

    async def start(self) -> None:
        """Wait until all actors are up; EngineError if one cannot be. Groups need not wait for this."""
        await self._pool.until_started()
        for slot in self._pool.slots:
            if slot.error is not None and not slot.was_up:
                raise slot.error

    async def close(self) -> None:
        """End the actors; their loops are closed before, if they can be. What is under way comes back as ABORTED."""
        pool = self._pool
        if pool.closed:
            return
        pool.closed = True
        pool.stir()
        farewells = []
        if ray.is_initialized():
            up = [slot for slot in pool.slots if slot.phase is Phase.UP]
            farewells = [ending(slot.handle.close.remote()) for slot in up]
        try:
            if farewells:
                await asyncio.wait(farewells, timeout=_FAREWELL_S)
        finally:
            for farewell in farewells:
                farewell.add_done_callback(look_at)
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
    left = [slot.call for slot in pool.slots if slot.phase is Phase.STARTING]
    while left:
        (call, *_), left = ray.wait(left, num_returns=1)
        try:
            started = ray.get(call)
        except exceptions.RayError as failure:
            error = EngineError(f"an actor of the agent loop did not start: {first_line(failure)}")
        else:
            if isinstance(started, Started):
                return started.takes_weights_while_running
            error = engine_error("starting the agent loop of an actor", started)
    raise error or EngineError("no actor of the agent loop is up, and nobody waits for one; await start() before")


def _fill(group: list[RolloutState], answer: Answer) -> None:
    """Put into the caller's list what an actor has; members that were COMPLETED before stay the same objects."""
    if answer.kind == "refused" or (answer.frame is None and answer.kind != "done"):
        return
    returned = () if answer.frame is None else decode_group(answer.frame, answer.references)
    finished = {_identity(state): state for state in group if state.status is Status.COMPLETED}
    group[:] = [state if state.rollout_id is None else finished.get(_identity(state), state) for state in returned]


def _identity(state: RolloutState) -> tuple[int | None, int]:
    return state.rollout_id, state.segment


def _abort(group: list[RolloutState], reason: str | None = None) -> None:
    """To be generated again, from what there is."""
    for state in group:
        if state.status is not Status.COMPLETED:
            state.status = Status.ABORTED
            state.error_msg = reason or state.error_msg
