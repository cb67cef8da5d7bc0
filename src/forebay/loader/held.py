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
    """Open batches, in order of their steps."""

    def __init__(self) -> None:
        self._batches: list[AsyncBatch] = []

    def add(self, batch: AsyncBatch) -> None:
        self._batches.append(batch)

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
        """Give all batches back. Those that are lost are back already."""
        for batch in reversed(self.open()):
            try:
                await uncancelled(batch.nack())
            except LostLease as lost:
                log.warning("lease_lost step=%d %s", batch.step, lost)
        self._batches.clear()

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

    async def call_hook(self, name: str) -> None: ...


class Batches(AsyncIterator[AsyncBatch]):
    """The iterator of `AsyncRolloutLoader.batches`. Dropping it does nothing."""

    def __init__(self, loader: _Loader, step: int | None, end: int | None, ahead: int, timeout_s: float | None) -> None:
        self._loader = loader
        self.step, self.end, self.ahead, self.timeout_s = step, end, ahead, timeout_s
        self.begun = False
        self.last: AsyncBatch | None = None

    def repeat_returned(self) -> None:
        """If the last batch was given back, its step is next again."""
        if self.last is not None and self.last.returned:
            self.step = self.last.step

    async def __anext__(self) -> AsyncBatch:
        step = await self._loader.next_step_of(self)
        if step is None:
            raise StopAsyncIteration
        await self._loader.call_hook("on_generate")
        batch = await self._loader.next_batch(self, step)
        if batch is None:
            raise StopAsyncIteration
        await self._loader.call_hook("on_train")
        return batch
