"""Colocated: one call produces a batch, pauses, and hands it out; generation and training take turns."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forebay.buffer.lease import Lease
from forebay.core.aio import Deadline
from forebay.core.rollout import Status
from forebay.core.validate import checked_integer
from forebay.errors import InvalidInput, WaitTimeout
from forebay.manager.agreement import Agreed
from forebay.manager.base import Manager
from forebay.manager.results import AsyncBatch, BatchRequest
from forebay.manager.schedule import ProduceProgress
from forebay.storage.base import TaskSummary


class AgentLoopManager(Manager):
    """Produces and consumes in turns.

    async with manager.produce_batch(64, train_step, model_step=train_step - 1) as batch:
        train(batch.groups)
    """

    _producing = False

    def produce_batch(
        self, batch_size: int, train_step: int, *, model_step: int, timeout_s: float | None = None
    ) -> BatchRequest:
        """A leased batch for one train step: await it, or enter it with `async with`.

        All strategies produce until the batch is complete; groups that are still in flight are then paused and kept.
        WaitTimeout, with an explanation, if that takes longer than `timeout_s`.
        """
        return BatchRequest(lambda: self._grant_in_time(batch_size, train_step, model_step, timeout_s))

    async def _grant_in_time(
        self, batch_size: int, train_step: int, model_step: int, timeout_s: float | None
    ) -> AsyncBatch:
        if timeout_s is None:
            return await self._grant(batch_size, train_step, model_step)
        left_s = Deadline(timeout_s).left_s() or 0.0
        explanation = ""

        async def expire(limit: asyncio.Timeout) -> None:
            nonlocal explanation
            await asyncio.sleep(left_s)
            explanation = await self.explain_wait()  # before the strategies are stopped
            limit.reschedule(asyncio.get_running_loop().time())

        try:
            async with asyncio.timeout(None) as limit:
                watching = asyncio.create_task(expire(limit))
                try:
                    return await self._grant(batch_size, train_step, model_step)
                finally:
                    watching.cancel()
        except TimeoutError as late:
            if isinstance(late, WaitTimeout) or not limit.expired():
                raise
            what = f"the batch of train step {train_step}: {batch_size} groups"
            raise WaitTimeout(what, timeout_s, explanation) from None

    async def _grant(self, batch_size: int, train_step: int, model_step: int) -> AsyncBatch:
        self._check_open()
        checked_integer("batch_size", batch_size, least=1)
        checked_integer("train_step", train_step, least=1)
        checked_integer("model_step", model_step, least=0)
        if model_step < self.model_step:
            raise InvalidInput(f"model_step is {model_step}, but weights of step {self.model_step} were already used")
        if self._producing:
            raise InvalidInput("a batch is already being produced; one call at a time")
        for name, task in self.tasks.items():
            if task.weight > 0 and task.strategy.is_too_old(task.agent_loop, model_step, train_step):
                await self._refuse_at_end(train_step)
                task.strategy.refuse_too_old(task.agent_loop, model_step, train_step, name)
        self._producing = True
        try:
            await self._settle_owed()
            await self._patiently(lambda: self._meet_store(train_step, model_step))
            await self._join(batch_size, trains=True, produces=True)
            self._asked = train_step
            await self._patiently(lambda: self._plan(batch_size, train_step, model_step))
            loop = asyncio.get_running_loop()
            began = loop.time()
            # None: another process took or discarded groups meanwhile, paused us, or a task is skipped from now on.
            while (lease := await self._patiently(lambda: self._attempt(batch_size, train_step))) is None:
                pass
            sizes = self.progress.sizes(train_step)
            return await self._result(train_step, sizes, lease, loop.time() - began)
        except BaseException:
            await self._clean_up()
            raise
        finally:
            self._producing = False

    async def _attempt(self, batch_size: int, train_step: int) -> Lease | None:
        sizes = await self._plan(batch_size, train_step, self.model_step)
        await self._internals.give_back_owed()  # before the producer waits for space in the buffer
        await self._set_clocks(train_step)
        wants = {name: groups for name, groups in sizes.items() if groups}
        self._refuse_empty(train_step, sizes, batch_size)
        with self._internals.asking(sizes):
            complete = await self._produce(sizes)
        self._check_open()
        await self._pause_strategies(self.tasks)
        if not complete:
            return None
        return await self._internals.try_lease(wants, train_step)

    async def _plan(self, batch_size: int, train_step: int, model_step: int) -> dict[str, int]:
        """The groups of a step by task; it is planned if it was not yet."""

        def edit(agreed: Agreed, progress: ProduceProgress) -> dict[str, int]:
            if model_step > agreed.model_step:
                progress.skipped.clear()
                agreed.model_step = model_step
            sizes = progress.plan(batch_size, train_step, leased=self.leased_steps)
            progress.skip_to(train_step)
            return sizes

        return await self.run.change(edit)

    def _missing(self, name: str, summary: TaskSummary) -> int:
        # Leased groups, also those of this manager for another step, are not available for this one.
        handed_out = sum(
            step.sizes.get(name, 0) for number, step in self.progress.planned.items() if number in self.leased_steps
        )
        completed = summary.fresh.get(Status.COMPLETED, 0)
        return max(0, self.progress.owed(name, self.progress.target_upto) - handed_out - completed)

    async def _meet_store(self, train_step: int, model_step: int) -> None:
        """Before the first step changes anything: a store that was trained further, or drawn from another data set."""
        if not self._met_store:
            for name, task in self.tasks.items():
                await task.sampler.compare_data(name, *await self._internals.position(name))
            await self._refuse_store_ahead(train_step, model_step)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Draw nothing meanwhile: not while a batch is being produced."""
        if self._producing:
            raise InvalidInput("a batch is being produced; do this before, or when it has ended")
        self._producing = True
        try:
            yield
        finally:
            self._producing = False

    async def resume(self, path: str | os.PathLike[str]) -> int:
        """See `Manager.resume`; not while a batch is being produced."""
        if self._producing:
            raise InvalidInput("a batch is being produced; resume before that, or when it has ended")
        return await super().resume(path)
