"""A run that starts behind the store that it opens is refused at once, with the ways out; rightful starts are not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forebay import (
    AgentLoopManager,
    AsyncProduceStrategy,
    DisaggregatedAgentLoopManager,
    FunctionAgentLoop,
    ReplayBuffer,
    RolloutState,
    Sampler,
    Storage,
    StoreAhead,
    Task,
)
from forebay.storage.postgres import PostgresStorage
from forebay.storage.sqlite import SQLiteStorage
from tests.storage.postgres_server import Schemas, dsn
from tests.support import closed_ledger, turns
from tests.test_sampler import records

Reopen = Callable[[], Storage]


@pytest.fixture(autouse=True)
def _no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut would lose is tested elsewhere."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def postgres() -> Iterator[Reopen]:
    schemas = Schemas()
    made = schemas.make()
    yield lambda: PostgresStorage(dsn(), made.name)
    schemas.drop_all()


@pytest.fixture(params=["sqlite", "postgres"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Reopen:
    """Opens one durable store again and again."""
    if request.param == "sqlite":
        return lambda: SQLiteStorage(tmp_path / "store.db")
    made: Reopen = request.getfixturevalue("postgres")
    return made


class Plane:
    """One start of a training script."""

    def __init__(self, storage: Storage, max_staleness: int) -> None:
        self.generated = 0
        self.buffer = ReplayBuffer(storage=storage)
        self.task = Task(
            name="math",
            sampler=Sampler(records(200)),
            agent_loop=FunctionAgentLoop(self._answer),
            strategy=AsyncProduceStrategy(self.buffer, max_staleness=max_staleness),
        )

    async def _answer(self, state: RolloutState) -> None:
        self.generated += 1
        state.response_ids = [1]


@asynccontextmanager
async def colocated(storage: Storage, max_staleness: int = 0) -> AsyncIterator[tuple[AgentLoopManager, Plane]]:
    plane = Plane(storage, max_staleness)
    async with AgentLoopManager(plane.task, plane.buffer) as manager:
        yield manager, plane
    await plane.buffer.close()


@asynccontextmanager
async def disaggregated(
    storage: Storage, max_staleness: int = 0
) -> AsyncIterator[tuple[DisaggregatedAgentLoopManager, Plane]]:
    plane = Plane(storage, max_staleness)
    async with DisaggregatedAgentLoopManager(plane.task, plane.buffer) as manager:
        yield manager, plane
    await plane.buffer.close()


async def train(manager: AgentLoopManager, first: int, last: int) -> None:
    for step in range(first, last + 1):
        async with manager.produce_batch(4, step, model_step=step - 1):
            pass


async def five_steps(reopen: Reopen) -> None:
    """A run that trains five steps, and is gone before it saved any weights."""
    async with colocated(reopen()) as (manager, _):
        await train(manager, 1, 5)


@pytest.mark.parametrize("max_staleness", [0, 20])
async def test_a_colocated_run_does_not_start_behind_its_store(reopen: Reopen, max_staleness: int) -> None:
    await five_steps(reopen)
    async with colocated(reopen(), max_staleness) as (manager, plane):
        for _ in range(2):
            with pytest.raises(
                StoreAhead, match=r"up to train step 5.* checkpoint.* step 6 with model_step=5.* new store"
            ):
                await train(manager, 1, 1)
        assert plane.generated == 0
        assert await closed_ledger(plane.buffer) == {"issued": 20, "trained": 20}


@pytest.mark.parametrize("max_staleness", [0, 20])
async def test_a_disaggregated_run_does_not_start_behind_its_store(reopen: Reopen, max_staleness: int) -> None:
    await five_steps(reopen)
    async with disaggregated(reopen(), max_staleness) as (manager, plane):
        producer = asyncio.create_task(manager.produce_loop(4))
        with pytest.raises(StoreAhead, match=r"continue_produce\(5\)"):
            await manager.get_batch(4, 1)
        if not max_staleness:
            assert plane.generated == 0, "what would be too old on arrival is not generated"
        await manager.shutdown()
        await producer


async def test_a_run_continues_after_the_last_step_of_the_store(reopen: Reopen) -> None:
    await five_steps(reopen)
    async with colocated(reopen()) as (manager, _):
        await train(manager, 6, 7)
    async with disaggregated(reopen()) as (other, plane):
        producer = asyncio.create_task(other.produce_loop(4))
        await other.continue_produce(7)
        async with other.get_batch(4, 8):
            pass
        assert (await closed_ledger(plane.buffer))["trained"] == 32
        await other.shutdown()
        await producer


async def test_a_producer_behind_the_store_waits_for_newer_weights(reopen: Reopen) -> None:
    await five_steps(reopen)
    async with disaggregated(reopen()) as (manager, plane):
        producer = asyncio.create_task(manager.produce_loop(4))
        while "newer weights than those of step 0" not in await manager.explain_wait():
            await turns()
        assert plane.generated == 0
        await manager.continue_produce(5)
        async with manager.get_batch(4, 6):
            pass
        await manager.shutdown()
        await producer


async def test_a_run_that_died_in_a_step_starts_with_that_step(reopen: Reopen) -> None:
    async with colocated(reopen()) as (manager, _):
        await train(manager, 1, 4)
        await manager.produce_batch(4, 5, model_step=4).__aenter__()  # never acknowledged
    async with colocated(reopen()) as (manager, plane):
        await train(manager, 5, 5)
        assert (await closed_ledger(plane.buffer))["trained"] == 20


async def test_an_older_checkpoint_sets_the_store_back(reopen: Reopen, tmp_path: Path) -> None:
    async with colocated(reopen()) as (manager, _):
        await train(manager, 1, 2)
        await manager.save(tmp_path / "checkpoint", 2)
        await train(manager, 3, 5)
    async with colocated(reopen()) as (manager, plane):
        assert await manager.resume(tmp_path / "checkpoint") == 2
        await train(manager, 3, 5)
        assert (await closed_ledger(plane.buffer))["trained"] == 20


async def test_a_process_a_step_behind_the_others_on_a_store_is_not_refused(postgres: Reopen) -> None:
    async with colocated(postgres(), 4) as (ahead, _), colocated(postgres(), 4) as (behind, plane):
        await train(ahead, 1, 2)
        async with ahead.produce_batch(4, 3, model_step=2):
            await train(behind, 2, 3)
        assert (await closed_ledger(plane.buffer))["trained"] == 20


async def test_a_process_whose_weights_are_too_old_for_the_store_is_refused_beside_others(postgres: Reopen) -> None:
    async with colocated(postgres()) as (ahead, _), colocated(postgres()) as (behind, plane):
        await train(ahead, 1, 2)
        async with ahead.produce_batch(4, 3, model_step=2):
            with pytest.raises(StoreAhead):
                await train(behind, 2, 2)
        assert plane.generated == 0
