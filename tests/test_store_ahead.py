"""A run that starts behind its store, or goes back further than the store can, is refused with the ways out."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forebay import (
    AgentLoopManager,
    AsyncProduceStrategy,
    CheckpointTooOld,
    DisaggregatedAgentLoopManager,
    FunctionAgentLoop,
    InvalidConfig,
    ManagedTask,
    ReplayBuffer,
    RolloutState,
    Sampler,
    Status,
    Storage,
    StoreAhead,
)
from forebay.storage.postgres import PostgresStorage
from forebay.storage.sqlite import SQLiteStorage
from forebay.testing import make_group
from tests.storage.postgres_server import Schemas, dsn
from tests.support import closed_ledger, taken, turns
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

    def __init__(
        self,
        storage: Storage,
        max_staleness: int,
        keep_trained: int = 0,
        lease_s: float | None = None,
        name: str = "math",
    ) -> None:
        self.generated = 0
        self.buffer = ReplayBuffer(storage=storage, keep_trained=keep_trained, lease_s=lease_s)
        self.task = ManagedTask(
            name=name,
            sampler=Sampler(records(200)),
            agent_loop=FunctionAgentLoop(self._answer),
            strategy=AsyncProduceStrategy(self.buffer, max_staleness=max_staleness),
        )

    async def _answer(self, state: RolloutState) -> None:
        self.generated += 1
        state.response_ids = [1]


@asynccontextmanager
async def colocated(
    storage: Storage, max_staleness: int = 0, keep_trained: int = 0, lease_s: float | None = None, name: str = "math"
) -> AsyncIterator[tuple[AgentLoopManager, Plane]]:
    plane = Plane(storage, max_staleness, keep_trained, lease_s, name)
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


async def train(
    manager: AgentLoopManager, first: int, last: int, checkpoints: Path | None = None
) -> list[set[int | None]]:
    """The ids of the groups of each step; every step is saved if a directory is given."""
    trained = []
    for step in range(first, last + 1):
        async with manager.produce_batch(4, step, model_step=step - 1) as batch:
            trained.append({group[0].group_id for group in batch.groups})
        if checkpoints is not None:
            await manager.save(checkpoints / str(step), step)
    return trained


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
                StoreAhead,
                match=r"up to train step 5.* checkpoint.*update_weights\(load, 5\), then train step 6.* new store",
            ):
                await train(manager, 1, 1)
        assert plane.generated == 0
        assert await closed_ledger(plane.buffer) == {"issued": 20, "trained": 20}


@pytest.mark.parametrize("max_staleness", [0, 20])
async def test_a_disaggregated_run_does_not_start_behind_its_store(reopen: Reopen, max_staleness: int) -> None:
    await five_steps(reopen)
    async with disaggregated(reopen(), max_staleness) as (manager, plane):
        producer = asyncio.create_task(manager.produce_loop(4))
        with pytest.raises(StoreAhead, match=r"update_weights\(load, 5\)"):
            await taken(manager.get_batch(4, 1))
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
        # On a store that other processes share, a producer waits for the trainer to name its weights.
        while not re.search("newer weights than those of step 0|a trainer to begin", await manager.explain_wait()):
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
        await manager.produce_batch(4, 5, model_step=4)  # never acknowledged
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


async def test_g04_a_save_before_the_first_step_is_what_a_crash_before_the_next_one_is_resumed_from(
    reopen: Reopen, tmp_path: Path
) -> None:
    async with colocated(reopen()) as (manager, _):
        await manager.save(tmp_path / "checkpoint", 0)
        trained = await train(manager, 1, 3)
    async with colocated(reopen()) as (manager, plane):
        assert await manager.resume(tmp_path / "checkpoint") == 0
        assert await train(manager, 1, 3) == trained
        assert await closed_ledger(plane.buffer) == {"issued": 12, "trained": 12}


@pytest.mark.parametrize("keep_trained", [0, 3, 4, 11, 12, 13])
async def test_g04_a_store_goes_back_to_every_checkpoint_that_it_has_all_later_groups_of_and_refuses_older_ones(
    reopen: Reopen, tmp_path: Path, keep_trained: int
) -> None:
    checkpoints, steps = tmp_path / "checkpoints", 4
    async with colocated(reopen(), keep_trained=keep_trained) as (manager, plane):
        trained = await train(manager, 1, steps, checkpoints)
    retained = min(keep_trained // 4, steps - 1)  # steps whose groups are all there
    async with colocated(reopen(), keep_trained=keep_trained) as (manager, plane):
        before = await plane.buffer.query({}), await plane.buffer.ledger(), (await plane.buffer.storage.summary()).tasks
        for step in range(1, steps - retained):
            with pytest.raises(
                CheckpointTooOld,
                match=rf"model step {step} .*{4 * (steps - step) - keep_trained} groups of task 'math'.*model step 4.*"
                r"later checkpoint.*empty store.*keep_trained",
            ):
                await manager.resume(checkpoints / str(step))
        assert before == (
            await plane.buffer.query({}),
            await plane.buffer.ledger(),
            (await plane.buffer.storage.summary()).tasks,
        )
        first = steps - retained
        assert await manager.resume(checkpoints / str(first)) == first
        assert await train(manager, first + 1, steps) == trained[first:]
        assert await closed_ledger(plane.buffer) == {"issued": 16, "trained": 16}


async def test_g04_a_checkpoint_that_is_too_old_for_its_store_is_resumed_into_an_empty_one(
    reopen: Reopen, tmp_path: Path
) -> None:
    async with colocated(reopen()) as (manager, _):
        trained = await train(manager, 1, 4, tmp_path / "checkpoints")
    async with colocated(SQLiteStorage(tmp_path / "other.db")) as (manager, plane):
        assert await manager.resume(tmp_path / "checkpoints" / "2") == 2
        assert await train(manager, 3, 4) == trained[2:]
        assert await closed_ledger(plane.buffer) == {"issued": 16, "trained": 16}


async def test_g04_saving_earlier_weights_again_does_not_hide_that_later_groups_were_dropped(
    reopen: Reopen, tmp_path: Path
) -> None:
    async with ReplayBuffer(storage=reopen()) as buffer:
        await buffer.put_many([make_group() for _ in range(2)], "math", model_step=0)
        for step in (1, 2):
            async with buffer.lease_batch({"math": 1}, train_step=step):
                pass
            await buffer.save(tmp_path / str(step), model_step=step)
        await buffer.save(tmp_path / "0", model_step=0)
        with pytest.raises(CheckpointTooOld):
            await buffer.resume(tmp_path / "1")


async def test_the_last_checkpoint_is_resumed_although_groups_were_taken_for_good_since(
    reopen: Reopen, tmp_path: Path
) -> None:
    async with ReplayBuffer(storage=reopen()) as buffer:
        await buffer.put_many([make_group() for _ in range(3)], "math", model_step=0)
        await buffer.save(tmp_path / "checkpoint", model_step=0)
        assert len(await buffer.get(1, "math", Status.COMPLETED)) == 1
        async with buffer.lease_batch({"math": 1}, train_step=1):
            pass
        assert await buffer.resume(tmp_path / "checkpoint") == 0
        assert await closed_ledger(buffer) == {"issued": 3, "buffered": 2, "trained": 1}


async def test_a_second_trainer_of_a_task_is_refused(postgres: Reopen) -> None:
    async with colocated(postgres()) as (ahead, _), colocated(postgres(), lease_s=1) as (behind, plane):
        await train(ahead, 1, 2)
        with pytest.raises(StoreAhead):
            await train(behind, 1, 1)
        with pytest.raises(InvalidConfig, match="already trains 'math' on this store"):
            await train(behind, 3, 3)
        assert plane.generated == 0


async def test_g04_a_run_is_resumed_without_touching_another_on_the_same_store(
    postgres: Reopen, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with colocated(postgres(), name="code") as (other, plane):
        await train(other, 1, 3)
        await other.save(tmp_path / "other", 3)  # from now on the store keeps the later groups of this run, too
        async with colocated(postgres()) as (manager, _):
            await train(manager, 1, 2)
            await manager.save(tmp_path / "checkpoint", 2)
            await train(manager, 3, 4)
        await train(other, 4, 8)
        async with colocated(postgres()) as (manager, _):
            assert await manager.resume(tmp_path / "checkpoint") == 2
            assert (await manager.ledger())["math"]["trained"] == 8
            assert (await manager.ledger())["code"]["trained"] == 32
            await train(manager, 3, 4)
        await other.save(tmp_path / "other", 8)
        trained = await train(other, 9, 10)
        assert len(trained[0] | trained[1]) == 8
        ledger = await plane.buffer.ledger()
        assert (ledger["math"]["trained"], ledger["code"]["trained"]) == (16, 40)
    assert "tasks_kept_aside" not in caplog.text
