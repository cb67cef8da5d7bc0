"""Colocated: one call produces a batch, pauses, and hands it out; generation and training take turns."""

from __future__ import annotations

import asyncio

from forebay.checks import whole_number
from forebay.errors import InvalidInput
from forebay.manager.base import Manager
from forebay.manager.results import BatchRequest, ProduceBatchResult, ProduceStatus

__all__ = ["AgentLoopManager"]


class AgentLoopManager(Manager):
    """Produces and consumes in turns.

    async with manager.produce_batch(64, train_step, model_step=train_step - 1) as batch:
        train(batch.groups)
    """

    _producing = False

    def produce_batch(self, batch_size: int, train_step: int, *, model_step: int) -> BatchRequest:
        """A batch for one train step: await it (taken for good), or enter it with `async with` (a lease).

        Runs the tasks' strategies together until the batch is there, pauses what is still under way and keeps it.
        """
        return BatchRequest(lambda: self._grant(batch_size, train_step, model_step))

    async def _grant(self, batch_size: int, train_step: int, model_step: int) -> ProduceBatchResult:
        self._check_open()
        whole_number("batch_size", batch_size, least=1)
        whole_number("train_step", train_step, least=1)
        whole_number("model_step", model_step, least=0)
        if model_step < self.model_step:
            raise InvalidInput(f"model_step is {model_step}, but weights of step {self.model_step} were used already")
        if self._producing:
            raise InvalidInput("a batch is being produced already; one call at a time")
        self._producing = True
        try:
            sizes = self.progress.plan(batch_size, train_step)
            self.progress.producer_future_step = max(self.progress.producer_future_step, train_step)
            self.steps.train_step, self.steps.model_step = train_step, model_step
            await self.replay_buffer.refresh_staleness(
                task_stale_thresholds={name: task.strategy.stale_threshold for name, task in self.tasks.items()},
                current_train_step=train_step,
            )
            wants = {name: groups for name, groups in sizes.items() if groups}
            loop = asyncio.get_running_loop()
            began = loop.time()
            while True:
                complete = await self._produce(sizes, sizes)
                self._check_open()
                await self._pause_strategies()
                lease = await self.replay_buffer.try_lease(wants, train_step=train_step) if complete else None
                if lease is not None:
                    break
                # Somebody else took or discarded groups meanwhile, or paused us: produce what is missing now.
            return await self._result(train_step, ProduceStatus.NORMAL, sizes, lease, loop.time() - began)
        except BaseException:
            await self._close_strategies()
            raise
        finally:
            self._producing = False
