"""A trainer that dies before its first save while producers on its store live on: the next one starts over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from forebay import (
    AsyncRolloutLoader,
    DisaggregatedAgentLoopManager,
    ReplayBuffer,
    RolloutState,
    StalenessReplayPolicy,
    Task,
)
from forebay.buffer.internal import internals
from forebay.storage.postgres import PostgresStorage
from tests.processes import HANG_S
from tests.storage import postgres_server

TASK, BATCH = "math", 4


@pytest.fixture
def schema() -> Iterator[str]:
    name = postgres_server.new_name()
    yield name
    postgres_server.drop(name)


async def answer(state: RolloutState) -> None:
    state.response, state.response_ids = "four", [4]


def open_buffer(schema: str) -> ReplayBuffer:
    storage = PostgresStorage(postgres_server.dsn(), schema)
    return ReplayBuffer(StalenessReplayPolicy(), storage, lease_s=HANG_S)


def make(buffer: ReplayBuffer, *, produce: bool) -> AsyncRolloutLoader:
    task = Task(TASK, [{"prompt": f"question {number}"} for number in range(9)], answer)
    return AsyncRolloutLoader(
        task,
        batch_groups=BATCH,
        max_staleness=1,
        mode="ahead",
        storage=buffer,
        checkpoints="unused",
        timeout_s=HANG_S,
        progress=None,
        produce=produce,
    )


async def die(buffer: ReplayBuffer) -> None:
    """As when the process of this buffer is killed: it sends no heartbeat any more, and its lease ends."""
    session = internals(buffer).session
    assert session.heartbeat is not None
    session.heartbeat.stop()
    schema = buffer.storage.name  # type: ignore[attr-defined]
    await postgres_server.execute(
        f'UPDATE "{schema}".owners SET deadline = clock_timestamp() WHERE owner = $1', session.owner
    )


@pytest.mark.parametrize("steps", [1, 3])
async def test_a_trainer_starts_over_while_producers_live(schema: str, steps: int) -> None:
    async with AsyncExitStack() as stack:
        producing = await stack.enter_async_context(open_buffer(schema))
        producer = await stack.enter_async_context(make(producing, produce=True).manager)
        assert isinstance(producer, DisaggregatedAgentLoopManager)
        loop = asyncio.create_task(producer.produce_loop(BATCH))
        lost = await stack.enter_async_context(open_buffer(schema))
        dying = make(lost, produce=False)
        assert await dying.resume() is None
        async for _ in dying.batches(1, steps):
            await dying.update_weights(lambda: None)
        await die(lost)

        again = await stack.enter_async_context(open_buffer(schema))
        async with make(again, produce=False) as loader:
            assert await loader.resume() is None
            assert (await loader.ledger())[TASK]["trained"] == 0
            assert (loader.next_step, loader.model_step) == (1, 0)
            trained: list[int] = []
            async for batch in loader.batches(1, 4):
                trained += [group[0].group_id or 0 for group in batch.groups]
                async with asyncio.timeout(HANG_S / 6):  # far less than the lease of a producer that misses the pause
                    await loader.update_weights(lambda: None)
            drawn, _ = await internals(again).position(TASK)
            held = [record.group_id for record in await again.query({"task_name": TASK, "place": "buffered"})]
            line = (await loader.ledger())[TASK]
            assert line["trained"] == len(trained) == len(set(trained)) == 4 * BATCH
            assert line["in_flight"] + len(trained) + len(held) == drawn, "a group was lost with the weights"
        await producer.shutdown()
        await loop
