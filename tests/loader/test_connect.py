"""`connect`: a trainer, and its ranks, on what other processes produce. Here they are other loaders on one server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay import AsyncReplayBufferConfig, AsyncRolloutLoader, InvalidConfig, InvalidInput, WaitTimeout
from forebay.buffer.internal import internals
from tests.loader.plane import Engine, ids, task
from tests.storage.postgres_server import dsn, new_name


@asynccontextmanager
async def producing(loader: AsyncRolloutLoader) -> AsyncIterator[None]:
    """Run the producer of a loader that does not train, as `forebay produce` does."""
    running = asyncio.create_task(loader.produce())
    try:
        yield
    finally:
        await loader.manager.shutdown()
        await running


def producer(url: str, batch_groups: int = 4, lease_s: float | None = None) -> AsyncRolloutLoader:
    tasks = [task(Engine(0), "math", weight=3.0), task(Engine(0), "code")]
    ages: dict[str, Any] = {"max_staleness": 2, "max_token_staleness": 1, "sync_weights_interval": 2}
    storage = AsyncReplayBufferConfig(storage=url, max_groups=64, keep_trained=3, lease_s=lease_s)
    return AsyncRolloutLoader(tasks, batch_groups=batch_groups, storage=storage, progress=None, **ages)


async def test_a_trainer_gets_tasks_sizes_and_weights_from_the_producers() -> None:
    url = f"{dsn()}#{new_name()}"
    async with producer(url) as there, producing(there):
        trainer = await AsyncRolloutLoader.connect(url, timeout_s=60, progress=None)
        async with trainer:
            assert {name: each.weight for name, each in trainer.tasks.items()} == {"math": 3.0, "code": 1.0}
            sizes = []
            async for batch in trainer.batches(1, 4):
                sizes.append({name: len(groups) for name, groups in batch.groups_by_task.items()})
                await trainer.update_weights(lambda: None)
            assert sizes == [{"math": 3, "code": 1}] * 4
            assert (await trainer.ledger())["math"]["trained"] == 12


async def test_ranks_get_their_parts_and_rank_0_acknowledges_after_all() -> None:
    url = f"{dsn()}#{new_name()}"

    async def train(rank: int) -> list[list[int]]:
        seen = []
        loader = await AsyncRolloutLoader.connect(url, rank=rank, world_size=2, timeout_s=60, progress=None)
        async with loader:
            async for batch in loader.batches(1, 3):
                seen.append(ids(batch))
                if rank:
                    with pytest.raises(InvalidInput, match="update_weights is up to rank 0"):
                        await loader.update_weights(lambda: None)
                    await batch.ack()
                else:
                    await loader.update_weights(lambda: None)
        return seen

    async with producer(url, batch_groups=6) as there, producing(there):
        parts = await asyncio.gather(train(0), train(1))
        assert all(len(one) == len(other) == 3 for one, other in zip(*parts, strict=True))
        ledger = await there.ledger()
        assert sum(line["trained"] for line in ledger.values()) == 18


async def test_ranks_without_a_start_continue_where_rank_0_resumed(tmp_path: Path) -> None:
    url = f"{dsn()}#{new_name()}"

    async def train(rank: int, end: int) -> list[int]:
        loader = await AsyncRolloutLoader.connect(
            url, rank=rank, world_size=2, timeout_s=60, progress=None, checkpoints=tmp_path
        )
        steps = []
        async with loader:
            if rank == 0:
                await loader.resume(lambda: None)
            async for batch in loader.batches(end=end):
                steps.append(batch.step)
                if rank == 0:
                    await loader.update_weights(lambda: None)
                    await loader.save(batch.step)
                else:
                    await batch.ack()
        return steps

    async with producer(url, batch_groups=6) as there, producing(there):
        assert [*await asyncio.gather(train(0, 2), train(1, 2))] == [[1, 2], [1, 2]]
        assert [*await asyncio.gather(train(0, 4), train(1, 4))] == [[3, 4], [3, 4]]


async def test_a_trainer_may_come_before_its_producers() -> None:
    url = f"{dsn()}#{new_name()}"
    connecting = asyncio.create_task(AsyncRolloutLoader.connect(url, timeout_s=60, lease_s=5.0, progress=None))
    await asyncio.sleep(0.1)
    async with producer(url) as there, producing(there), await connecting as trainer:
        assert (trainer.buffer.max_groups, set(trainer.tasks)) == (64, {"math", "code"})
        assert len((await anext(trainer.batches(1))).groups) == 4


async def test_a_trainer_keeps_its_groups_as_long_as_the_producers_do() -> None:
    url = f"{dsn()}#{new_name()}"
    async with producer(url, lease_s=17.0) as there, producing(there):
        for given, expected in ((None, 17.0), (9.0, 9.0)):
            async with await AsyncRolloutLoader.connect(url, timeout_s=60, lease_s=given, progress=None) as trainer:
                assert internals(trainer.buffer).session.lease_s == expected


async def test_connect_says_what_is_missing() -> None:
    url = f"{dsn()}#{new_name()}"
    with pytest.raises(WaitTimeout, match="a producer to begin"):
        await AsyncRolloutLoader.connect(url, timeout_s=0.05)
    for store in ("memory", "sqlite:///x.db"):
        with pytest.raises(InvalidConfig, match="belongs to one process"):
            await AsyncRolloutLoader.connect(store)
    with pytest.raises(InvalidInput, match="rank is 2 of world_size 2"):
        await AsyncRolloutLoader.connect(url, rank=2, world_size=2)
