"""The buffer on a storage that gives way at every call, as a database does: cancels and closes at any moment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from forebay import BufferClosed, ForebayError, LostLease, MemoryStorage, ReplayBuffer, Status, sample_staleness
from forebay.buffer.internal import internals
from forebay.storage.base import OPERATIONS, Storage
from forebay.testing import make_group
from tests.processes import HANG_S
from tests.support import closed_ledger


def suspending(seed: int) -> MemoryStorage:
    """A MemoryStorage whose calls let others run before and after they take effect."""
    chance = random.Random(seed)
    storage = MemoryStorage()

    def wrapped(call: Callable[..., Awaitable[Any]], *, undone: bool) -> Callable[..., Awaitable[Any]]:
        async def suspended(*arguments: Any, **named: Any) -> Any:
            for _ in range(chance.randint(0, 2)):
                await asyncio.sleep(0)
            result = await call(*arguments, **named)
            if not undone:  # a claim must not be cancelled after it took effect
                for _ in range(chance.randint(0, 2)):
                    await asyncio.sleep(0)
            return result

        return suspended

    for name in {*OPERATIONS, *Storage.__abstractmethods__} - {"beat", "subscribe", "__len__"}:
        setattr(storage, name, wrapped(getattr(storage, name), undone=name == "claim"))
    return storage


@pytest.mark.parametrize("seed", range(60))
async def test_g05_cancels_and_closes_at_any_moment_leave_no_hold_without_a_holder(seed: int) -> None:
    chance = random.Random(seed)
    storage = suspending(seed)
    buffers = [ReplayBuffer(storage=storage, max_groups=40) for _ in range(2)]
    for buffer in buffers:
        await buffer.set_limits("math", stale_threshold=3)
    step = 1

    async def produce(buffer: ReplayBuffer) -> None:
        while True:
            for group in await internals(buffer).redraw(2, "math"):
                for state in group:
                    state.status, state.response_ids, state.version_spans = Status.COMPLETED, [1], ()
                await buffer.put(group, "math", model_step=max(0, step - 2))
            await buffer.put(make_group(1, tokens=1), "math", model_step=max(0, step - chance.randint(1, 6)))

    async def train(buffer: ReplayBuffer) -> None:
        nonlocal step
        while True:
            train_step = step
            async with buffer.lease_batch({"math": chance.randint(1, 3)}, train_step=train_step) as lease:
                for group in lease.groups:
                    assert all(sample_staleness(state, train_step) < 3 for state in group), "G6"
                await asyncio.sleep(0)
            step += chance.randint(0, 1)

    async def look(buffer: ReplayBuffer) -> None:
        while True:
            await closed_ledger(buffer)
            await buffer.refresh_staleness(task_stale_thresholds={"math": None}, current_train_step=step)

    works = [asyncio.create_task(work(buffer)) for work in (produce, train, look) for buffer in buffers]
    for _ in range(chance.randint(10, 300)):
        await asyncio.sleep(0)
    for work in works:
        if chance.random() < 0.5:
            work.cancel()
    await asyncio.sleep(0)
    for buffer in buffers:
        await buffer.close()
    for ended in await asyncio.wait_for(asyncio.gather(*works, return_exceptions=True), HANG_S):
        assert isinstance(ended, (asyncio.CancelledError, BufferClosed, LostLease)), repr(ended)
    ledger = await closed_ledger(ReplayBuffer(storage=storage, max_groups=40))
    assert "leased" not in ledger
    assert "in_flight" not in ledger


async def test_g06_concurrent_first_calls_all_know_the_limits_of_the_past() -> None:
    storage = suspending(3)
    past = ReplayBuffer(storage=storage)
    await past.set_limits("math", stale_threshold=2)
    await past.put(make_group(), "math", model_step=0)
    await past.refresh_staleness(task_stale_thresholds={"math": None}, current_train_step=1)
    await past.close()
    for _ in range(20):
        buffer = ReplayBuffer(storage=storage)
        leases = [buffer.lease_batch({"math": 1}, train_step=9, timeout_s=0) for _ in range(3)]
        outcomes = await asyncio.gather(*(lease.__aenter__() for lease in leases), return_exceptions=True)
        assert all(isinstance(outcome, TimeoutError) for outcome in outcomes), outcomes
        await buffer.close()


async def test_closing_while_opening_leaves_nothing_open() -> None:
    for turns in range(12):
        storage = suspending(turns)
        buffer = ReplayBuffer(storage=storage, lease_s=30.0)
        first = asyncio.ensure_future(buffer.put(make_group(), "math"))
        for _ in range(turns):
            await asyncio.sleep(0)
        await buffer.close()
        assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], (ForebayError, int))
        assert buffer._session.heartbeat is None
        assert not storage._engine.owners.open


async def test_a_close_that_was_cancelled_can_be_repeated() -> None:
    for turns in range(6):
        storage = suspending(turns)
        buffer = ReplayBuffer(storage=storage)
        await buffer.put(make_group(), "math")
        await buffer.lease_batch({"math": 1}, train_step=1)
        closing = asyncio.ensure_future(buffer.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await buffer.close()
        assert await closed_ledger(ReplayBuffer(storage=storage)) == {"issued": 1, "buffered": 1}
