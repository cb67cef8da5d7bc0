"""A database that is stopped and started again under a running plane costs time only."""

from __future__ import annotations

import asyncio
import logging

import pytest

from forebay import (
    AsyncProduceStrategy,
    DisaggregatedAgentLoopManager,
    FunctionAgentLoop,
    ManagedTask,
    ReplayBuffer,
    RolloutState,
    Sampler,
    Status,
)
from forebay.produce import NoProgress
from forebay.storage.postgres import PostgresStorage
from forebay.testing.simulate import check_ledger
from tests.processes import HANG_S
from tests.storage.postgres_server import Server


async def answer(state: RolloutState) -> None:
    await asyncio.sleep(0.005)
    state.response_ids, state.response, state.status = [1, 2, 3], "x", Status.COMPLETED


async def test_g03_a_database_that_is_away_for_a_while_costs_time_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "forebay.manager")
    server = await asyncio.to_thread(Server)
    try:
        buffer = ReplayBuffer(storage=PostgresStorage(server.dsn, "outage"), lease_s=4 * HANG_S)
        strategy = AsyncProduceStrategy(buffer, max_staleness=2, over_sample_threshold=1.0, progress=NoProgress())
        sampler = Sampler([{"prompt": f"q{i}"} for i in range(500)], group_size=2)
        task = ManagedTask(name="math", sampler=sampler, agent_loop=FunctionAgentLoop(answer), strategy=strategy)
        manager = DisaggregatedAgentLoopManager([task], buffer, storage_retry_s=HANG_S)
        trained: list[int | None] = []
        async with manager:
            producer = asyncio.create_task(manager.produce_loop(4))
            for step in range(1, 15):
                async with manager.get_batch(4, step, timeout_s=HANG_S) as batch:
                    trained += [group[0].group_id for group in batch.groups]
                    if step % 4 == 0:  # while a batch is held, and groups are generated
                        outages = caplog.text.count("storage_away")
                        await asyncio.to_thread(server.stop)
                        asking = asyncio.create_task(manager.ledger())  # a producer that is done touches no storage
                        while caplog.text.count("storage_away") == outages:  # noqa: ASYNC110
                            await asyncio.sleep(0.01)
                        await asyncio.to_thread(server.start)
                        await asking
                await manager.continue_produce(step)
        await producer
        assert len(trained) == len(set(trained)) == 56
        check_ledger(await buffer.ledger())
        assert (await buffer.ledger())["math"]["failed"] == 0
        await buffer.close()
    finally:
        await asyncio.to_thread(server.end)
    assert caplog.text.count("storage_back") >= 2
