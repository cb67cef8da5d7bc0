"""The manager of a loader in either mode: in turns with training, or ahead of it. Only this module tells them apart."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal, TypeAlias

from forebay.buffer.buffer import ReplayBuffer
from forebay.buffer.internal import internals
from forebay.core.aio import Turns, ignore_exception
from forebay.core.capacity import check_ever_fits
from forebay.errors import ForebayError, InvalidConfig, ProducerStopped
from forebay.manager.colocated import AgentLoopManager
from forebay.manager.disaggregated import DisaggregatedAgentLoopManager, LoadWeights
from forebay.manager.results import AsyncBatch
from forebay.manager.schedule import allocate
from forebay.manager.task import ManagedTask, spare_groups

Mode: TypeAlias = Literal["in_turns", "ahead"]


def checked_mode(mode: Mode | None, max_staleness: int, *, hooks: bool, produce: bool) -> Mode:
    """The mode, by default the one for this staleness; InvalidConfig if it contradicts the other settings."""
    chosen = mode or ("ahead" if max_staleness else "in_turns")
    if chosen not in ("in_turns", "ahead"):
        raise InvalidConfig(f"mode is {mode!r}; expected 'in_turns' or 'ahead'")
    if chosen == "ahead" and hooks:
        raise InvalidConfig(
            "on_generate and on_train are called between generating and training, which mode='ahead' does at the same "
            "time; use mode='in_turns', or leave them out"
        )
    if chosen == "in_turns" and not produce:
        raise InvalidConfig("produce=False needs mode='ahead': other processes generate while this one trains")
    return chosen


class Plane:
    """A manager, its producer if it runs ahead, and the weights that generate."""

    def __init__(
        self,
        mode: Mode,
        tasks: Sequence[ManagedTask],
        buffer: ReplayBuffer,
        *,
        sync_weights_interval: int,
        drop_last: bool,
        produces: bool,
        storage_retry_s: float,
    ) -> None:
        kind = AgentLoopManager if mode == "in_turns" else DisaggregatedAgentLoopManager
        self.manager: AgentLoopManager | DisaggregatedAgentLoopManager = kind(
            tasks,
            buffer,
            sync_weights_interval=sync_weights_interval,
            drop_last=drop_last,
            storage_retry_s=storage_retry_s,
        )
        self.ranks: dict[str, int] = {}  # rank and world_size of a trainer in several processes
        self._produces = produces
        self._turns = Turns()
        self._weights = 0  # in turns: the step of the weights that generate
        self._producer: asyncio.Task[None] | None = None
        self._surfaced: asyncio.Task[None] | None = None  # a producer whose failure was raised

    def refuse_deadlock(self, groups: int) -> None:
        """InvalidConfig if a batch can never fit into the buffer."""
        tasks, buffer = self.manager.tasks, self.manager.replay_buffer
        check_ever_fits(internals(buffer).session.settings, groups)
        sizes, _ = allocate(groups, {name: task.weight for name, task in tasks.items()}, {})
        spare_groups(tasks, sizes, buffer.max_groups)

    @property
    def model_step(self) -> int:
        """The step of the weights that generate."""
        return self._weights if isinstance(self.manager, AgentLoopManager) else self.manager.model_step

    @property
    def started(self) -> bool:
        """Whether a producer was started."""
        return self._producer is not None

    async def lease(self, groups: int, step: int, timeout_s: float) -> AsyncBatch:
        """The batch of a step. A failure of the producer is raised as it is, once; the next call starts another one."""
        if isinstance(self.manager, AgentLoopManager):
            async with self._turns():  # a request that was interrupted may still be ending
                return await self.manager.produce_batch(groups, step, model_step=self._weights, timeout_s=timeout_s)
        self._start(self.manager, groups)
        try:
            return await self.manager.get_batch(groups, step, timeout_s=timeout_s, **self.ranks)
        except ProducerStopped as stopped:
            self._surfaced = self._producer
            if isinstance(stopped.__cause__, ForebayError):
                raise stopped.__cause__ from None
            raise

    def _start(self, manager: DisaggregatedAgentLoopManager, groups: int) -> None:
        if self._produces and (self._producer is None or self._producer is self._surfaced):
            self._producer = asyncio.create_task(manager.produce_loop(groups), name="produce_loop")
            self._producer.add_done_callback(ignore_exception)  # `get_batch` raises its failure

    async def produce(self, groups: int, load_weights: LoadWeights | None) -> None:
        """Only produce, until this is closed."""
        if isinstance(self.manager, AgentLoopManager):
            raise InvalidConfig("a producer for a trainer in another process needs mode='ahead'")
        await self.manager.produce_loop(groups, load_weights=load_weights)

    def fits(self, groups: int) -> bool:
        """Whether steps of this number of groups fit into the buffer."""
        limit = self.manager.replay_buffer.max_groups
        return limit is None or groups <= limit

    async def resize(self, groups: int) -> None:
        """Have steps of this number of groups from now on. Those that are leased keep theirs."""
        if isinstance(self.manager, DisaggregatedAgentLoopManager):
            await self.manager.set_batch_size(groups)

    async def shrink(self, step: int, sizes: dict[str, int]) -> None:
        """A step that was handed out has only these groups; the others are for the next one."""
        leased = self.manager.leased_steps
        await self.manager.run.change(lambda agreed, progress: progress.shrink(step, sizes, leased=leased))

    async def pause_produce(self) -> float:
        """Bring in everything that is in flight, before new weights; in turns nothing is."""
        return 0.0 if isinstance(self.manager, AgentLoopManager) else await self.manager.pause_produce()

    async def continue_produce(self, model_step: int) -> None:
        """Generate again, with the weights of this step."""
        if isinstance(self.manager, DisaggregatedAgentLoopManager):
            await self.manager.continue_produce(model_step)
        self._weights = model_step

    async def close(self) -> None:
        """Stop producing, and return the groups in flight."""
        try:
            await self.manager.shutdown()
        finally:
            if self._producer is not None:
                await asyncio.wait((self._producer,))
