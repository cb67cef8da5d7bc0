"""The batches that a loader has handed out, and the iterator that asks for them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Protocol

from forebay.core.aio import uncancelled
from forebay.errors import InvalidInput, LostLease
from forebay.manager.results import AsyncBatch

log = logging.getLogger(__name__)


class Held:
    """Open batches, in order of their steps. `pending` is leased, but its caller has not got it yet."""

    def __init__(self) -> None:
        self._batches: list[AsyncBatch] = []
        self.pending: AsyncBatch | None = None

    def hand_out(self, batches: Batches) -> None:
        """The caller gets the batch that is pending; only from now on can it be acknowledged."""
        if self.pending is not None:
            batches.give(self.pending)
            self._batches = sorted([*self._batches, self.pending], key=lambda batch: batch.step)
            self.pending = None

    def open(self) -> list[AsyncBatch]:
        """The batches that were neither acknowledged nor given back."""
        self._batches = [batch for batch in self._batches if batch.open]
        return self._batches

    async def acknowledge(self, upto: int | None = None) -> None:
        """Acknowledge the batches up to a step, or all."""
        for batch in list(self.open()):
            if upto is None or batch.step <= upto:
                await uncancelled(batch.ack())  # an interrupt must not leave it open after the storage has it

    async def give_back(self) -> None:
        """Give all batches back, except for those that were acknowledged while the storage was away."""
        for batch in list(self.open()):
            await uncancelled(batch.lease.settle_owed())
        for batch in reversed(self.open()):
            await self._nack(batch)
        self._batches.clear()
        await self.give_back_pending()

    async def give_back_pending(self) -> None:
        """Give back a batch that its caller has never seen. It can be asked for again."""
        if (batch := self.pending) is not None:
            await self._nack(batch)
            self.pending = None

    async def _nack(self, batch: AsyncBatch) -> None:
        try:
            await uncancelled(batch.nack())
        except LostLease as lost:  # it is back already
            log.warning("lease_lost step=%d %s", batch.step, lost)

    def trained_step(self, latest: int | None) -> int:
        """The step that was trained: the one that is leased, or else the latest. InvalidInput if it is not clear."""
        steps = [batch.step for batch in self.open()]
        if len(steps) > 1:
            listed = ", ".join(map(str, steps))
            raise InvalidInput(f"the batches of steps {listed} are leased; say which step the weights are of")
        if not steps and latest is None:
            raise InvalidInput(
                "no batch is leased or acknowledged; say which step the weights are of: update_weights(load, step)"
            )
        return max([*steps, latest or 0])

    def refuse_after(self, latest: int, step: int, verb: str) -> None:
        """InvalidInput if a step is after the latest one, and after those that are leased."""
        latest = max([latest, *[batch.step for batch in self.open()]])
        if step > latest:
            raise InvalidInput(
                f"{verb} names step {step}, but the last batch that is leased or acknowledged is that of step "
                f"{latest}; name a step that was trained"
            )

    def refuse_more_than(self, ahead: int) -> None:
        """InvalidInput if this number of batches is open."""
        if len(held := self.open()) >= ahead:
            raise InvalidInput(
                f"{len(held)} batches are leased, and batches(ahead={ahead}) allows no more; acknowledge that of step "
                f"{held[0].step} first, or raise ahead"
            )


class _Loader(Protocol):
    async def next_step_of(self, batches: Batches) -> int | None: ...

    async def next_batch(self, batches: Batches, step: int) -> AsyncBatch | None: ...

    def hand_out(self, batches: Batches) -> None: ...

    async def take_back(self) -> None: ...

    async def call_hook(self, name: str) -> None: ...


class Batches(AsyncIterator[AsyncBatch]):
    """The iterator of `AsyncRolloutLoader.batches`. Dropping it does nothing."""

    def __init__(self, loader: _Loader, step: int | None, end: int | None, ahead: int, timeout_s: float | None) -> None:
        self._loader = loader
        self.step, self.end, self.ahead, self.timeout_s = step, end, ahead, timeout_s
        self.begun = False
        self._given: list[AsyncBatch] = []  # that are open, or were given back

    def give(self, batch: AsyncBatch) -> None:
        """A batch is handed out."""
        self._given = [other for other in self._given if other.step != batch.step] + [batch]
        self.step = max(batch.step + 1, self.step or 1)

    def next_step(self, first: int) -> int | None:
        """The first step that was given back, or the one after the last; None at the end.

        `first`: the first step that was not acknowledged. Steps before it are over, also those that were given back.
        """
        self._given = [batch for batch in self._given if batch.open or (batch.returned and batch.step >= first)]
        returned = [batch.step for batch in self._given if batch.returned]
        step = min(returned) if returned else self.step
        return None if self.end is not None and step is not None and step > self.end else step

    async def __anext__(self) -> AsyncBatch:
        step = await self._loader.next_step_of(self)
        if step is None:
            raise StopAsyncIteration
        await self._loader.call_hook("on_generate")
        batch = await self._loader.next_batch(self, step)
        if batch is None:
            raise StopAsyncIteration
        try:
            await self._loader.call_hook("on_train")
        except BaseException:
            await uncancelled(self._loader.take_back())
            raise
        self._loader.hand_out(self)
        return batch
