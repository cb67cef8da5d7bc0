"""Disaggregated: a producer in the background runs ahead of the consumer, as far as the weights allow.

The producer fills step after step, at most to `model_step + stale_threshold`: results for later steps would be too old
when they arrive. At that bound it replaces groups that expire or are filtered. The consumer waits for changes of the
buffer; a failure of the producer, or its end, reaches it at once.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TypeAlias

from forebay.buffer.lease import Lease, LeaseAttempt
from forebay.core.aio import DATA, Deadline, in_thread, uncancelled
from forebay.core.ledger import Clock, LedgerLine
from forebay.core.validate import checked_integer
from forebay.errors import BufferClosed, InvalidInput, ProducerStopped, StorageError, WaitTimeout, WeightsTooOld
from forebay.manager.agreement import Agreed
from forebay.manager.base import Manager
from forebay.manager.ranks import divide, take_part
from forebay.manager.results import AsyncBatch, BatchRequest
from forebay.manager.schedule import ProduceProgress

log = logging.getLogger(__name__)

LoadWeights: TypeAlias = "Callable[[int], Awaitable[None] | None]"


class ProducerState(enum.StrEnum):
    """What the producer is doing."""

    RUNNING = "running"
    PAUSED = "paused"  # until continue_produce
    CLOSED = "closed"


class DisaggregatedAgentLoopManager(Manager):
    """Produces in the background.

    producer = asyncio.create_task(manager.produce_loop(64))
    async with manager.get_batch(64, train_step) as batch:
        await asyncio.to_thread(train, batch.groups)
    await manager.pause_produce()                     # around a weight update
    load_weights(engine)
    await manager.continue_produce(model_step=train_step)
    """

    _pauses_on_resume = True
    producer_state = ProducerState.RUNNING
    _loop_running: asyncio.Future[None] | None = None
    _batch_size: int | None = None  # of the producer
    _failure: BaseException | None = None
    _load_weights: LoadWeights | None = None
    _tries = 0  # in a row, with an engine that was unreachable
    _loaded: int | None = None  # the weights that `load_weights` has loaded
    _holds = 0
    _held: asyncio.Future[None] | None = None  # done when the producer draws nothing
    _released: asyncio.Future[None] | None = None

    # --- the producer ---------------------------------------------------------------------------------

    async def produce_loop(self, batch_size: int, *, load_weights: LoadWeights | None = None) -> None:
        """Fill the steps to come until `shutdown`, or until the buffer is closed.

        Errors are raised here, and by the next `get_batch`. On a shared store, producers in any number of processes
        divide the work, and wait until a trainer begins. `load_weights(model_step)`, a function or a coroutine
        function, loads weights into engines of this process before it generates with them.
        """
        self._check_open()
        checked_integer("batch_size", batch_size, least=1)
        if self._loop_running is not None:
            raise InvalidInput("produce_loop is already running; one producer per manager")
        self._loop_running = asyncio.get_running_loop().create_future()
        self._failure, self._batch_size, self._load_weights = None, batch_size, load_weights
        self._loaded = None
        try:
            # For steps that an earlier run trained nothing may be generated with weights that are too old for them.
            self._asked = max(self._asked, await self._patiently(self._store_step))
            self._set_clock()
            while not self._closed:
                if self._holds:
                    await self._wait_for_release()
                else:
                    await self._patiently(self._produce_round)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if self._closed or isinstance(error, BufferClosed):
                return  # the run is over; `get_batch` gets the error from the buffer
            self._failure = error
            log.warning("producer_failed", exc_info=error)
            raise
        finally:
            ended, self._loop_running = self._loop_running, None
            _end(self._held)
            try:
                await self._clean_up()
                await uncancelled(self._stop_producing())
            finally:
                ended.set_result(None)
                self._internals.nudge()

    async def _stop_producing(self) -> None:
        """Tell the other members of the run; without it they learn of it when the lease of this one ends."""
        self._joined.discard("produces")
        with suppress(StorageError, BufferClosed):
            await self.run.leave(failure=self._failure, produces_only=True)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Draw nothing meanwhile. Groups in flight continue."""
        self._holds += 1
        if self._held is None and self._loop_running is not None:
            self._held = asyncio.get_running_loop().create_future()
        self._internals.nudge()
        try:
            if self._held is not None:
                await asyncio.shield(self._held)
            yield
        finally:
            self._holds -= 1
            if not self._holds:
                self._held = None
                _end(self._released)

    async def _wait_for_release(self) -> None:
        self._released = asyncio.get_running_loop().create_future()
        _end(self._held)
        await self._released

    async def set_batch_size(self, batch_size: int) -> None:
        """Fill steps with this number of groups from now on."""
        self._batch_size = checked_integer("batch_size", batch_size, least=1)
        await self._join(batch_size, trains=True)
        self._internals.nudge()

    async def _produce_round(self) -> None:
        """Fill one more step; at the bound, or in a pause, wait until there is something to do."""
        batch_size = self._batch_size
        assert batch_size is not None
        await self._join(batch_size, produces=True)
        if self.run.member is None:  # removed: the run was resumed, or this process was taken for dead
            self._joined.clear()
            await self._close_strategies()
            return
        if self.producer_state is ProducerState.PAUSED or self.run.agreed.paused:
            await self._follow_pause()
            return
        if self._internals.shared and not self.run.agreed.begun:
            await self._until(lambda: self.run.agreed.begun or self.run.agreed.paused, "a trainer to begin the run")
            return
        if self._load_weights is not None and self._loaded != self.model_step:
            await self._load(self._load_weights, self.model_step)
            return
        model_step, future = self.model_step, self.progress.producer_future_step
        next_step = self.progress.next_consumer_step
        upto, newer = min(future, self.bound), f"newer weights than those of step {model_step}"
        if upto < next_step or self._is_behind():
            seen = (model_step, next_step)
            await self._until(lambda: (self.model_step, self.next_train_step) != seen or self._is_stopped(), newer)
            return
        sizes = await self._plan(batch_size, upto)
        if not await self._produce(sizes, lambda name, line: self._target(name, line, upto)):
            await self._leave_to_others()
            return
        self._tries = 0
        if upto == future:
            await self.run.change(lambda agreed, progress: progress.skip_to(future + 1))
            return
        missing = partial(self._when_missing, model_step, upto)
        await self._internals.until(missing, f"{newer}, or something to replace", list(self.tasks))

    async def _leave_to_others(self) -> None:
        """If an engine is unreachable, and other producers work: let them have the groups, and try again later."""
        loops = [task.agent_loop for task in self.tasks.values() if self.run.leaves_to_others(task.agent_loop.outage)]
        if not loops:
            return
        self._tries += 1
        reason = loops[0].outage.describe()
        await self._close_strategies()
        await self.run.set_away(reason)
        log.warning("producer_away tries=%d reason=%s: other producers generate its groups", self._tries, reason)
        with suppress(WaitTimeout):
            await self._until(self._is_stopped, "an engine to be back", min(5.0 * 2 ** (self._tries - 1), 60.0))
        for loop in loops:
            loop.outage.forget()
        await self.run.set_away(None)

    async def _load(self, load_weights: LoadWeights, model_step: int) -> None:
        loading = await in_thread(lambda: load_weights(model_step), pool=DATA)
        if loading is not None:
            await loading
        self._loaded = model_step

    async def _plan(self, batch_size: int, train_step: int, *, skips: bool = False) -> dict[str, int]:
        """The groups of a step by task; it is planned if it was not yet. `skips`: producers continue from it."""

        def edit(agreed: Agreed, progress: ProduceProgress) -> dict[str, int]:
            sizes = progress.plan(batch_size, train_step, leased=self.leased_steps if skips else None)
            if skips:
                progress.skip_to(train_step)
            return sizes

        return await self.run.change(edit)

    async def _follow_pause(self) -> None:
        """Stop generating when another process pauses the run, confirm it, and wait until it continues."""
        epoch, member = self.run.agreed.epoch, self.run.member
        if self.producer_state is ProducerState.RUNNING and member is not None and member.idle < epoch:
            await self.run.confirm(epoch, "followed")
            await self._pause_strategies(self._to_pause())
            await self.run.confirm(epoch, "idle")

        def continues() -> bool:
            agreed = self.run.agreed
            return self.producer_state is not ProducerState.PAUSED and (not agreed.paused or agreed.epoch != epoch)

        await self._until(continues, "continue_produce")

    async def _until(self, condition: Callable[[], bool], what: str, timeout_s: float | None = None) -> None:
        async def attempt() -> bool | None:
            await self.run.read()
            return self._closed or self._holds > 0 or condition() or self.run.member is None or None

        await self._internals.until(attempt, what, list(self.tasks), timeout_s)

    def _target(self, name: str, line: LedgerLine, upto: int) -> int | None:
        owed = self.progress.owed(name, upto)
        return line.get("trained", 0) + owed if owed else None

    @property
    def bound(self) -> int:
        """The last train step for which the present weights are fresh enough, for every task."""
        active = [task.strategy.reach for task in self.tasks.values() if task.weight > 0]
        return self.model_step + min(active)

    def _is_behind(self) -> bool:
        """Whether results of the present weights are too old when they arrive."""
        return self.steps.train_step > self.bound

    def _is_stopped(self) -> bool:
        paused = self.producer_state is not ProducerState.RUNNING or self.run.agreed.paused
        return self._closed or self._holds > 0 or paused or self.run.member is None

    async def _when_missing(self, model_step: int, upto: int) -> bool | None:
        summary = await self._internals.summary(self.tasks)  # first: it may bring a new plan, and no other wake-up
        if self.model_step != model_step or self._is_stopped() or self.bound > upto:
            return True
        for name in self.tasks:
            target = self._target(name, summary.task(name).line(), upto)
            if target is not None and summary.task(name).produced < target:
                return True
        return None

    # --- the consumer ---------------------------------------------------------------------------------

    def get_batch(
        self, batch_size: int, train_step: int, *, timeout_s: float | None = None, rank: int = 0, world_size: int = 1
    ) -> BatchRequest:
        """The leased batch of a train step: await it, or enter it with `async with`.

        WeightsTooOld if the producer's weights are too old for this step: bring newer ones (`pause_produce`,
        `continue_produce`) and ask again. EndOfData if the data sets have no group left for it.

        Ranks of one trainer, each with a manager on the shared store, get whole groups, balanced by tokens: rank 0
        leases the batch and does all else that a trainer does; the others get their parts. Rank 0 acknowledges when
        all ranks have; if one gives its part back or dies, that is LostLease.
        """
        checked_integer("world_size", world_size, least=1)
        if checked_integer("rank", rank, least=0) >= world_size:
            raise InvalidInput(f"rank is {rank} of world_size {world_size}; expected 0 to {world_size - 1}")
        if rank:
            return BatchRequest(lambda: self._grant_part(train_step, rank, world_size, timeout_s))
        return BatchRequest(lambda: self._grant(batch_size, train_step, timeout_s, world_size))

    async def _grant_part(self, step: int, rank: int, world_size: int, timeout_s: float | None) -> AsyncBatch:
        """The part of a batch of another rank than the first."""
        self._check_open()
        began = asyncio.get_running_loop().time()
        await self._join(None)
        lease = await take_part(self.run, self._internals, self._patiently, step, rank, world_size, timeout_s)
        batch = await self._result(step, {}, lease, asyncio.get_running_loop().time() - began)
        lease.on_ack = None  # rank 0 counts the step
        self._leases.remove(lease)
        return batch

    async def _grant(self, batch_size: int, train_step: int, timeout_s: float | None, world_size: int) -> AsyncBatch:
        self._check_open()
        checked_integer("batch_size", batch_size, least=1)
        checked_integer("train_step", train_step, least=1)
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(2):
            await asyncio.sleep(0)  # a producer that was started just now gets to its first step
        if self._loop_running is not None and batch_size != self._batch_size:
            raise InvalidInput(
                f"get_batch asks for {batch_size} groups, but produce_loop fills steps of {self._batch_size}; use one "
                "batch size for both"
            )
        self._check_failure()
        await self._settle_owed()
        await self._join(batch_size, trains=True)
        await self._patiently(lambda: self._refuse_store_ahead(train_step, self.model_step))
        if train_step > max(self.bound, self.progress.next_consumer_step):
            # It can have no groups, and steps before it are not done: their groups must not become too old now.
            await self._refuse_at_end(train_step)
            raise self._too_old(train_step)
        self._asked = max(self._asked, train_step)
        await self._patiently(lambda: self._plan(batch_size, train_step, skips=True))
        self._set_clock()
        self._internals.nudge()  # the producer may owe more than before
        deadline = Deadline(timeout_s)
        lease: Lease | None = None
        while lease is None:
            sizes = await self._patiently(lambda: self._plan(batch_size, train_step))  # maybe without a task by now
            self._refuse_empty(train_step, sizes, batch_size)
            lease = await self._patiently(partial(self._wait_for, sizes, train_step, deadline))
        batch = await self._result(train_step, sizes, lease, loop.time() - began)
        if world_size > 1:
            try:
                await divide(self.run, self._patiently, batch, world_size, timeout_s)
            except BaseException as error:
                await lease.settle_on_exit(error)
                raise
        return batch

    def _too_old(self, step: int) -> WeightsTooOld:
        return WeightsTooOld(step, self.model_step, f"they are fresh enough up to step {self.bound}")

    async def _wait_for(self, sizes: dict[str, int], train_step: int, deadline: Deadline) -> Lease | None:
        """The batch of a step as it is planned; None if the plan has changed."""
        wants = {name: groups for name, groups in sizes.items() if groups}
        lease = self._internals.lease_attempt(wants, train_step)

        async def attempt() -> LeaseAttempt | bool | None:
            self._check_open()
            self._check_failure()  # at once, not when its groups have been used up
            planned = self.progress.planned.get(train_step)
            if planned is None or any(planned.sizes.get(name, 0) != groups for name, groups in sizes.items()):
                return False
            if await lease.claim():
                return lease
            if self._is_behind():
                await self._refuse_at_end(train_step)
                raise self._too_old(train_step)
            await self._check_producers()
            return None

        names = ", ".join(f"{groups} of task {name!r}" for name, groups in wants.items())
        what = f"the batch of train step {train_step}: {names}"
        try:
            found = await self._internals.until(
                attempt, what, list(wants), timeout_s=deadline.left_s(), wants=sizes, calm_s=self.run.calm_s
            )
        except WaitTimeout as late:
            explanation = f"{late.explanation}\n{await self._explain_tasks()}"
            raise WaitTimeout(what, deadline.timeout_s or 0.0, explanation) from late.__cause__
        return await found.grant() if isinstance(found, LeaseAttempt) else None

    async def _check_producers(self) -> None:
        """ProducerStopped if no producer can complete the batch. Those of a shared store may still come."""
        if self._loop_running is not None:
            return
        summary = await self.run.read()
        if any(summary.task(name).in_flight for name in self.tasks) or self.run.agreed.producers(self.run.owners):
            return
        failures = [f"{owner}: {each.failure}" for owner, each in self.run.agreed.members.items() if each.failure]
        if failures:
            raise ProducerStopped(f"every producer has stopped; {'; '.join(failures)}; start them when this is fixed")
        if not self._internals.shared:
            raise ProducerStopped(
                "the batch is incomplete, nothing is in flight, and produce_loop is not running; start it with "
                "asyncio.create_task(manager.produce_loop(batch_size))"
            )

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise ProducerStopped(
                f"the producer failed: {type(self._failure).__name__}: {self._failure}; its groups are kept: "
                "start produce_loop again when the cause is fixed"
            ) from self._failure

    # --- around a weight update -----------------------------------------------------------------------

    async def pause_produce(self) -> float:
        """Stop generating, and bring in all groups in flight, before new weights; the seconds that this took.

        Agent loops that take new weights while they run are not stopped.
        """
        self._check_open()
        stopping = self._to_pause()
        if not stopping:
            return 0.0
        self.producer_state = ProducerState.PAUSED
        began = asyncio.get_running_loop().time()
        await self._join(None, trains=True)

        def pause(agreed: Agreed, progress: ProduceProgress) -> None:
            agreed.paused = True

        epoch = await self._patiently(lambda: self.run.begin_epoch(pause))
        await self._pause_strategies(stopping)
        timeouts = [task.strategy.settings.timeouts for task in self.tasks.values()]
        patience_s = max(each.pause_timeout_s + each.cancel_timeout_s + each.idle_timeout_s for each in timeouts)
        await self._patiently(lambda: self.run.until_idle(epoch, patience_s))
        return asyncio.get_running_loop().time() - began

    def _to_pause(self) -> list[str]:
        """Tasks whose agent loops are stopped while they get new weights."""
        return [name for name, task in self.tasks.items() if not task.agent_loop.takes_weights_while_running]

    async def continue_produce(self, model_step: int) -> None:
        """Generate again, with the weights of `model_step`."""
        self._check_open()
        checked_integer("model_step", model_step, least=0)
        await self._join(None, trains=True)
        await self._patiently(self.run.read)
        self._refuse_older(model_step)

        def proceed(agreed: Agreed, progress: ProduceProgress) -> None:
            if model_step > agreed.model_step:
                progress.skipped.clear()
            agreed.model_step, agreed.begun = model_step, True
            if not progress.begun:
                progress.skip_to(model_step + 1)  # a run that starts from weights of a later step

        await self._patiently(lambda: self._internals.advance(dict.fromkeys(self.tasks, Clock(model_step=model_step))))
        await self._patiently(lambda: self.run.proceed(proceed))
        self.producer_state = ProducerState.RUNNING
        self._internals.nudge()
        log.info("weights_updated model_step=%d", model_step)

    def _refuse_older(self, model_step: int) -> None:
        if model_step < self.model_step:
            raise InvalidInput(
                f"continue_produce with the weights of step {model_step}, but those of step {self.model_step} were "
                f"already used; load those and continue with them, from train step {self.next_train_step} on, or use "
                "resume to go back to a checkpoint, or begin with a new store (another #name)"
            )

    async def resume(self, path: str | os.PathLike[str]) -> int:
        """See `Manager.resume`; generation waits for `continue_produce`, when the weights are in the engine."""
        if self._loop_running is not None and self.producer_state is ProducerState.RUNNING:
            raise InvalidInput("produce_loop is running; resume before it is started, or after pause_produce")
        model_step = await super().resume(path)
        self.producer_state = ProducerState.PAUSED
        return model_step

    async def shutdown(self) -> None:
        """Stop the producer; all groups in flight are back in the buffer when this returns. The buffer stays open."""
        self.producer_state = ProducerState.CLOSED
        _end(self._released)
        try:
            await super().shutdown()
        finally:  # also if it failed: the caller may close the buffer next
            if self._loop_running is not None:
                await uncancelled(self._loop_running)

    async def stats(self) -> dict[str, float]:
        """See `Manager.stats`; also whether the producer runs."""
        flat = await super().stats()
        flat["forebay/manager/bound_step"] = self.bound
        flat["forebay/manager/producer_running"] = float(
            self._loop_running is not None and self.producer_state is ProducerState.RUNNING
        )
        return flat

    def _describe(self) -> str:
        elsewhere = sorted(owner for owner in self.run.agreed.producers(self.run.owners) if owner != self.run.owner)
        if self._failure is not None:
            producer = f"failed: {self._failure}"
        elif self._loop_running is not None:
            producer = str(self.producer_state)
        elif elsewhere:
            producer = "not running here"
        elif self._internals.shared:
            producer = "not running: no producer takes part in the run (start one with `forebay produce`)"
        else:
            producer = "not running (produce_loop was not started, or has ended)"
        if elsewhere:
            state = "paused" if self.run.agreed.paused else "running"
            producer += f", {state} in {len(elsewhere)} other processes: {', '.join(map(self.run.state_of, elsewhere))}"
        future = self.progress.producer_future_step
        if future > self.bound:
            filling = f"keeping the steps up to {self.bound} filled, the last one that these weights are fresh for"
        else:
            filling = f"filling step {future}, at most up to {self.bound}"
        return f"{super()._describe()}; producer {producer}, {filling}"


def _end(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
