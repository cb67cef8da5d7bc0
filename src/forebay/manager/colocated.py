"""Colocated: one call produces a batch, pauses, and hands it out; generation and training take turns."""

from __future__ import annotations

import asyncio
import os

from forebay.checks import whole_number
from forebay.errors import InvalidInput
from forebay.ledger import LedgerLine
from forebay.manager.base import Manager
from forebay.manager.results import BatchRequest, ProduceBatchResult, ProduceStatus
from forebay.staleness import staleness

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
        self._refuse_what_is_too_old(train_step, model_step)
        self._producing = True
        try:
            self.progress.change_batch_size(batch_size)
            sizes = self.progress.plan(batch_size, train_step)
            self.progress.skip_to(train_step)
            self.steps.model_step, self._asked = model_step, train_step
            self._set_clock()
            await self.replay_buffer.refresh_staleness(
                task_stale_thresholds={name: task.strategy.stale_threshold for name, task in self.tasks.items()},
                current_train_step=train_step,
            )
            wants = {name: groups for name, groups in sizes.items() if groups}
            loop = asyncio.get_running_loop()
            began = loop.time()
            while True:
                with self.replay_buffer.asking(sizes):
                    complete = await self._produce(sizes, lambda name, line: self._target(sizes[name], line))
                self._check_open()
                await self._pause_strategies(self.tasks)
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

    def _target(self, groups: int, line: LedgerLine) -> int | None:
        # What others hold, also this manager's for another step, is not there for this one.
        return line.get("trained", 0) + line.get("leased", 0) + groups if groups else None

    def _refuse_what_is_too_old(self, train_step: int, model_step: int) -> None:
        for name, task in self.tasks.items():
            if (
                task.weight > 0
                and staleness(model_step, train_step) >= task.strategy.reach
                and not task.agent_loop.takes_weights_while_running
            ):
                raise InvalidInput(
                    f"what weights of model_step={model_step} generate is too old for train_step={train_step} when it "
                    f"arrives (the stale threshold of task {name!r} is {task.strategy.reach}), so the batch "
                    "would never fill; sync the weights first, or raise max_staleness or sync_weights_interval"
                )

    async def resume(self, path: str | os.PathLike[str]) -> int:
        """As for every manager; not while a batch is being produced."""
        if self._producing:
            raise InvalidInput("a batch is being produced; resume before that, or when it has ended")
        return await super().resume(path)
