"""Several processes on one store, in virtual time: producers share the work, follow pauses, die and come back.

A process is a manager with its own buffer, engine and link to the storage. A link that is cut raises from then on, as
the storage of a killed process would; a link that hangs answers nothing until it is released. A run that fails is
printed with its command:
    FOREBAY_RUN=17 python -m pytest tests/simulation/test_processes.py
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from forebay import (
    AsyncBatch,
    AsyncProduceStrategy,
    Budgets,
    DisaggregatedAgentLoopManager,
    FunctionAgentLoop,
    InvalidConfig,
    InvalidInput,
    LostLease,
    ManagedTask,
    MemoryStorage,
    NoProgress,
    ProducerStopped,
    ReplayBuffer,
    RolloutState,
    Sampler,
    StalenessReplayPolicy,
    Timeouts,
    WaitTimeout,
    WeightsTooOld,
)
from forebay.core.ledger import Account, Clock, Row
from forebay.core.staleness import group_staleness
from forebay.errors import StorageError
from forebay.storage.base import Listener, Operation, Storage
from forebay.storage.values import Reaped, Snapshot
from forebay.testing.simulate import LongTail, SimulatedEngine, check_ledger, check_nothing_lost, run
from tests.support import taken
from tests.test_strategy import simulated

RUNS, SLOW_RUNS, BATCH, LEASE_S = 200, 2_000, 4, 30.0


class Link(Storage):
    """The connection of one process to the storage that all share."""

    shared = True

    def __init__(self, storage: MemoryStorage) -> None:
        self.storage = storage
        self.cut = False
        self.operations = 0
        self.kill_at: int | None = None
        self.answers = asyncio.Event()
        self.answers.set()

    async def _perform(self, operation: Operation, /, *args: Any, **kwargs: Any) -> Any:
        await self._pass()
        return await getattr(self.storage, operation.name)(*args, **kwargs)

    async def _pass(self) -> None:
        await self.answers.wait()
        self.operations += 1
        if self.operations == self.kill_at:
            self.cut = True
        if self.cut:
            raise StorageError("this process was killed")

    def beat(self, owner: str) -> None:
        if not self.cut:
            self.storage.beat(owner)

    async def reap(self) -> Reaped:
        await self._pass()
        return await self.storage.reap()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        return self.storage.subscribe(listener)

    def __len__(self) -> int:
        return len(self.storage)

    async def snapshot(self) -> Snapshot:
        return await self.storage.snapshot()

    async def restore(
        self, accounts: Mapping[str, Account], next_uid: int, next_timestamp_id: int, rows: AsyncIterable[Row]
    ) -> None:
        await self.storage.restore(accounts, next_uid, next_timestamp_id, rows)


class Process:
    """One process: a buffer, an engine and a manager."""

    def __init__(self, storage: MemoryStorage, seed: int = 0, **options: Any) -> None:
        self.link = Link(storage)
        self.buffer = ReplayBuffer(StalenessReplayPolicy(), self.link, lease_s=LEASE_S, max_groups=64)
        self.engine = SimulatedEngine(
            seed=seed,
            lengths=options.get("lengths", LongTail(median=10, long_share=0.2, long_factor=5, max_tokens=100)),
        )
        strategy = AsyncProduceStrategy(
            self.buffer,
            over_sample_threshold=options.get("over_issue", 0.0),
            enable_partial_rollout=True,
            max_staleness=options.get("max_staleness", 2),
            timeouts=Timeouts(pause_timeout_s=5, idle_timeout_s=5),
            budgets=Budgets(max_consecutive_failures=options.get("max_failures", 1_000)),
            progress=NoProgress(),
        )
        prompts = [{"prompt": f"{n}"} for n in range(23)]
        self.task = ManagedTask(
            name=options.get("task", "math"),
            sampler=Sampler(prompts, group_size=options.get("group_size", 2)),
            agent_loop=FunctionAgentLoop(options["generate"]) if "generate" in options else self.engine,
            strategy=strategy,
            weight=options.get("weight", 1.0),
        )
        self.manager = DisaggregatedAgentLoopManager(self.task, self.buffer)
        self.beating = asyncio.create_task(self._beat())
        self.producing: asyncio.Task[None] | None = None

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            self.link.beat(self.buffer.owner)

    def produce(self) -> Process:
        self.producing = asyncio.create_task(self.manager.produce_loop(BATCH))
        return self

    async def kill(self) -> None:
        """As SIGKILL: from now on nothing that it does reaches the storage."""
        self.link.cut = True
        self.link.answers.set()
        self.beating.cancel()
        await self._end()

    async def stop(self) -> None:
        """As SIGTERM: give everything back."""
        with suppress(StorageError):
            await self.manager.shutdown()
            await self.buffer.close()
        self.beating.cancel()
        await self._end()

    async def _end(self) -> None:
        if self.producing is not None:
            self.producing.cancel()
            await asyncio.wait((self.producing,))
            if not self.producing.cancelled():
                self.producing.exception()


class Cluster:
    """Three producers and a trainer on one store, some of which are killed now and then."""

    def __init__(self, number: int) -> None:
        self.chance = random.Random(number)
        self.number = number
        self.storage = MemoryStorage(clock=asyncio.get_running_loop().time)
        self.over_issue = self.chance.choice((0.0, 0.5, 1.0))
        self.options = {"over_issue": self.over_issue, "max_staleness": self.chance.choice((1, 2, 3))}
        self.trainer = Process(self.storage, number, **self.options)
        self.producers = [Process(self.storage, number * 10 + n, **self.options).produce() for n in range(3)]
        self.trained: list[int] = []
        self.lost = 0  # groups that killed producers held

    @property
    def processes(self) -> list[Process]:
        return [self.trainer, *self.producers]

    async def replace(self, index: int) -> None:
        """Kill a producer; another one takes its place some time later."""
        holdings = (await self.storage.summary(holdings=True)).holdings
        self.lost += sum(each.groups for each in holdings if each.owner == self.producers[index].buffer.owner)
        await self.producers[index].kill()
        await asyncio.sleep(self.chance.choice((0.0, 5.0, 2 * LEASE_S)))
        process = Process(self.storage, self.chance.randrange(10**6), **self.options)
        process.engine.set_weights(self.trainer.engine.model_step)
        self.producers[index] = process.produce()

    async def sync(self, step: int) -> None:
        manager = self.trainer.manager
        await manager.pause_produce()
        for process in self.processes:
            process.engine.set_weights(step)
        await manager.continue_produce(step)

    def look_at(self, batch: AsyncBatch, step: int) -> None:
        threshold = self.trainer.task.strategy.stale_threshold
        for group in batch.groups:
            assert group_staleness(group, step) < threshold, f"too old at step {step}"  # G6
            for state in group:
                versions = [version for version, _ in state.version_spans]
                assert versions == sorted(versions)
                assert max(versions) < step
            self.trained.append(group[0].group_id or 0)

    async def check(self) -> None:
        ledger = await self.trainer.buffer.ledger()
        check_ledger(ledger)
        line = ledger.get("math", {})
        if line:
            live = line["issued"] - line["trained"] - line["filtered"] - line["failed"] - line["discarded"]
            bound = self.trainer.manager.bound - self.trainer.manager.next_train_step + 1
            budget = self.trainer.task.strategy.settings.over_issue(BATCH)
            assert live <= bound * BATCH + budget + self.lost, f"{live} groups for {bound} steps"

    async def train(self, steps: int) -> None:
        killing: list[asyncio.Task[None]] = []
        for step in range(1, steps + 1):
            while True:
                try:
                    async with self.trainer.manager.get_batch(BATCH, step, timeout_s=10_000) as batch:
                        self.look_at(batch, step)
                        await asyncio.sleep(self.chance.choice((0.1, 3.0)))
                    break
                except WeightsTooOld:
                    await self.sync(step - 1)
            await self.check()
            if self.chance.random() < 0.3:
                killing.append(asyncio.create_task(self.replace(self.chance.randrange(3))))
                await asyncio.gather(*killing)
                killing.clear()
            if self.chance.random() < 0.5:
                await self.sync(step)
        for process in self.producers:
            await process.stop()
        await asyncio.sleep(2 * LEASE_S)
        await self.storage.reap()
        await check_nothing_lost(self.trainer.buffer, "math", self.trained)
        assert len(self.trained) == steps * BATCH
        await self.trainer.stop()


@pytest.mark.parametrize(
    "runs", [pytest.param(RUNS, id="some"), pytest.param(SLOW_RUNS, id="many", marks=pytest.mark.slow)]
)
def test_g01_g03_g06_three_producers_share_the_work_of_a_run_and_lose_nothing(runs: int) -> None:
    chosen = os.environ.get("FOREBAY_RUN")
    for number in range(runs) if chosen is None else [int(chosen)]:

        async def main(number: int = number) -> None:
            await Cluster(number).train(steps=3)

        try:
            run(main, seed=number)
        except BaseException as error:
            error.add_note(f"FOREBAY_RUN={number} python -m pytest tests/simulation/test_processes.py")
            raise


async def begun(**options: Any) -> tuple[MemoryStorage, Process, list[Process]]:
    """A run of a trainer and three producers that has trained one step."""
    storage = MemoryStorage(clock=asyncio.get_running_loop().time)
    trainer = Process(storage, 1, **options)
    producers = [Process(storage, n, **options).produce() for n in range(2, 5)]
    async with trainer.manager.get_batch(BATCH, 1, timeout_s=100):
        pass
    return storage, trainer, producers


async def ended(*processes: Process) -> None:
    for process in processes:
        await process.stop()


SLOW = LongTail(median=5_000, max_tokens=6_000)


@simulated
async def test_a_pause_waits_no_longer_than_a_lease_for_a_hung_and_a_dead_producer() -> None:
    storage, trainer, producers = await begun()
    hung, dead, alive = producers
    async with trainer.manager.get_batch(BATCH, 2, timeout_s=100):
        pass
    hung.link.answers.clear()  # its event loop hangs, and its heartbeats continue
    await dead.kill()
    now = asyncio.get_running_loop().time
    began = now()
    await trainer.manager.pause_produce()
    assert now() - began <= LEASE_S + 5
    assert alive.manager.run.member is not None
    summary = (await storage.summary(("math",))).task("math")
    assert summary.in_flight == 0, "no producer has a group of the weights before"
    for process in (trainer, hung, alive):
        process.engine.set_weights(2)
    await trainer.manager.continue_produce(2)
    hung.link.answers.set()  # it finds that it was removed, drops what it has, and joins again
    for step in range(3, 6):
        async with trainer.manager.get_batch(BATCH, step, timeout_s=1_000) as batch:
            assert all(version in (0, 2) for group in batch.groups for version in versions(group))
        await trainer.manager.pause_produce()
        await trainer.manager.continue_produce(2)
    with pytest.raises(WeightsTooOld):
        await trainer.manager.get_batch(BATCH, 6, timeout_s=1_000)
    assert hung.buffer.owner in trainer.manager.run.agreed.members
    await ended(trainer, hung, alive)


def versions(group: list[RolloutState]) -> set[int]:
    return {version for state in group for version, _ in state.version_spans}


@simulated
async def test_nothing_is_drawn_between_a_pause_and_its_continue() -> None:
    storage, trainer, producers = await begun()
    await trainer.manager.pause_produce()
    before = (await storage.summary()).task("math").line()
    assert before["in_flight"] == 0
    await asyncio.sleep(500)
    assert (await storage.summary()).task("math").line() == before
    await trainer.manager.continue_produce(1)
    async with trainer.manager.get_batch(BATCH, 2, timeout_s=100):
        pass
    await ended(trainer, *producers)


@simulated
async def test_producers_wait_for_the_trainer_to_begin() -> None:
    storage = MemoryStorage(clock=asyncio.get_running_loop().time)
    producer = Process(storage).produce()
    await asyncio.sleep(100)
    assert "a trainer to begin the run" in await producer.manager.explain_wait()
    trainer = Process(storage, 1)
    await trainer.manager.continue_produce(7)
    producer.engine.set_weights(7)
    async with trainer.manager.get_batch(BATCH, 8, timeout_s=100) as batch:
        assert {version for group in batch.groups for version in versions(group)} == {7}
    await ended(trainer, producer)


@simulated
async def test_producers_that_wait_for_a_trainer_follow_its_pause() -> None:
    storage = MemoryStorage(clock=asyncio.get_running_loop().time)
    producer, trainer = Process(storage).produce(), Process(storage, 1)
    await asyncio.sleep(100)
    assert await trainer.manager.pause_produce() < LEASE_S, "the producer has confirmed it"
    await asyncio.sleep(100)
    assert (await storage.summary()).task("math").account.issued == 0
    await trainer.manager.continue_produce(0)
    async with trainer.manager.get_batch(BATCH, 1, timeout_s=100):
        pass
    await ended(trainer, producer)


@simulated
async def test_g11_a_trainer_without_producers_waits_and_says_so() -> None:
    storage = MemoryStorage(clock=asyncio.get_running_loop().time)
    trainer = Process(storage)
    with pytest.raises(WaitTimeout, match="no producer takes part"):
        await taken(trainer.manager.get_batch(BATCH, 1, timeout_s=100))
    producer = Process(storage, 1, lengths=SLOW).produce()
    with pytest.raises(WaitTimeout) as late:
        await taken(trainer.manager.get_batch(BATCH, 1, timeout_s=1))
    assert f"held by {producer.buffer.owner}" in str(late.value)
    await ended(trainer, producer)


@simulated
async def test_no_producer_takes_more_than_its_part_of_a_step() -> None:
    storage, trainer, producers = await begun(lengths=SLOW)
    taken = 0
    async with trainer.manager.get_batch(BATCH, 2, timeout_s=10_000):
        for _ in range(200):
            await asyncio.sleep(1)
            held = [
                each.groups for each in (await storage.summary(holdings=True)).holdings if each.place == "in_flight"
            ]
            assert max(held, default=0) <= -(-BATCH // len(producers))
            taken = max(taken, sum(held))
    assert taken == BATCH
    await ended(trainer, *producers)


@simulated
async def test_the_failure_of_every_producer_reaches_the_trainer() -> None:
    _, trainer, producers = await begun(max_failures=3)
    for process in producers:
        process.engine.failure_rate = 1.0

    async def train() -> None:
        for step in range(2, 30):
            async with trainer.manager.get_batch(BATCH, step, timeout_s=10_000):
                pass
            await trainer.manager.continue_produce(step)

    with pytest.raises(ProducerStopped, match="every producer has stopped"):
        await train()
    await ended(trainer, *producers)


@pytest.mark.parametrize("continues", [True, False])
def test_a_run_continues_after_a_trainer_that_died_in_the_middle_of_a_pause(continues: bool) -> None:
    @simulated
    async def main() -> None:
        storage, trainer, producers = await begun()
        await storage.advance({"math": Clock(epoch=99)})  # the first write of a pause; the second one never came
        await trainer.kill()
        next_trainer = Process(storage, 8)
        if continues:
            await next_trainer.manager.continue_produce(1)
            for process in producers:
                process.engine.set_weights(1)
        for step in (2, 3):
            async with next_trainer.manager.get_batch(BATCH, step, timeout_s=1_000):
                pass
        await ended(next_trainer, *producers)

    main()


@simulated
async def test_only_the_trainer_moves_the_train_step() -> None:
    storage, trainer, producers = await begun()
    await asyncio.sleep(100)  # producers fill the steps after it
    assert (await storage.summary()).task("math").line()["buffered"] > 0
    assert (await storage.summary()).task("math").account.train_step == 1
    await ended(trainer, *producers)


@simulated
async def test_a_pause_that_began_in_part_is_continued() -> None:
    storage, trainer, producers = await begun()
    await storage.advance({"math": Clock(epoch=99)})
    await trainer.manager.continue_produce(1)
    async with trainer.manager.get_batch(BATCH, 2, timeout_s=1_000):
        pass
    await ended(trainer, *producers)


@simulated
async def test_g03_others_generate_the_groups_of_a_producer_whose_engine_is_away() -> None:
    storage = MemoryStorage(clock=asyncio.get_running_loop().time)
    trainer, healthy = Process(storage, 1), Process(storage, 2).produce()
    sick = Process(storage, 3, generate=refused).produce()
    now, explained = asyncio.get_running_loop().time, ""
    for step in range(1, 6):
        began = now()
        async with trainer.manager.get_batch(BATCH, step, timeout_s=100):
            assert now() - began < 30
            await asyncio.sleep(2)
            explained += await trainer.manager.explain_wait()
        await trainer.manager.pause_produce()
        healthy.engine.set_weights(step)
        await trainer.manager.continue_produce(step)
    assert f"{sick.buffer.owner} (the engine of refused is unreachable" in explained
    line = (await storage.summary()).task("math").line()
    assert (line["trained"], line["failed"]) == (5 * BATCH, 0), "an outage spends no try"
    await ended(trainer, healthy, sick)


async def refused(state: RolloutState) -> None:
    raise ConnectionRefusedError("nothing listens there")


# --- who may take part ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"max_staleness": 1}, r"limits of task 'math' is .*stale_threshold': 3.* there, .*stale_threshold': 2.* here"),
        ({"group_size": 3}, "group_size of task 'math' is 2 there, 3 here"),
        ({"batch_size": 5}, "batch_size is 4 there, 5 here"),
        ({"task": "code"}, None),
    ],
)
def test_a_producer_with_other_settings_is_refused_with_the_difference(
    options: dict[str, Any], difference: str | None
) -> None:
    @simulated
    async def main() -> None:
        storage, trainer, producers = await begun()
        other = Process(storage, 9, **options)
        producing = other.manager.produce_loop(options.get("batch_size", BATCH))
        if difference is None:  # another task is another run
            task = asyncio.create_task(producing)
            await asyncio.sleep(1)
            assert not task.done()
            task.cancel()
            await asyncio.wait((task,))
        else:
            with pytest.raises(InvalidConfig, match=difference):
                await producing
        async with trainer.manager.get_batch(BATCH, 2, timeout_s=100):
            pass
        await ended(trainer, other, *producers)

    main()


@simulated
async def test_clocks_never_go_back() -> None:
    _, trainer, producers = await begun()
    await trainer.manager.pause_produce()
    await trainer.manager.continue_produce(1)
    with pytest.raises(InvalidInput, match="those of step 1 were already used"):
        await trainer.manager.continue_produce(0)
    with pytest.raises(InvalidInput, match="train step 1 was already acknowledged"):
        await taken(trainer.manager.get_batch(BATCH, 1))
    await ended(trainer, *producers)


@simulated
async def test_one_trainer_at_a_time_and_the_next_one_when_it_is_dead() -> None:
    storage, trainer, producers = await begun()
    second = Process(storage, 8)
    with pytest.raises(InvalidConfig, match=f"{trainer.buffer.owner} already trains 'math'"):
        await taken(second.manager.get_batch(BATCH, 2))
    await trainer.kill()
    now = asyncio.get_running_loop().time
    began = now()
    third = Process(storage, 8)
    async with third.manager.get_batch(BATCH, 2, timeout_s=10_000):
        assert now() - began <= LEASE_S + 5
    await ended(second, third, *producers)


def test_g04_a_resume_fences_the_producers_of_the_run_before(tmp_path: Path) -> None:
    @simulated
    async def main() -> None:
        storage = MemoryStorage(clock=asyncio.get_running_loop().time)
        first = Process(storage, 1)
        producers = [Process(storage, n).produce() for n in range(2, 5)]
        for step in (1, 2):
            async with first.manager.get_batch(BATCH, step, timeout_s=100):
                pass
            await first.manager.pause_produce()
            await first.manager.continue_produce(step)
        await first.manager.save(tmp_path / "checkpoint", 2)
        late = producers[0]
        late.link.answers.clear()  # it misses all that follows
        store = MemoryStorage(clock=asyncio.get_running_loop().time)
        await first.stop()
        again = Process(store, 1)
        for process in producers[1:]:
            await process.stop()
        assert await again.manager.resume(tmp_path / "checkpoint") == 2
        newcomers = [Process(store, n).produce() for n in range(5, 8)]
        await asyncio.sleep(100)
        assert (await store.summary()).task("math").in_flight == 0, "nothing is generated before continue_produce"
        await again.manager.continue_produce(2)
        for process in newcomers:
            process.engine.set_weights(2)
        async with again.manager.get_batch(BATCH, 3, timeout_s=100):
            pass
        late.link.answers.set()
        await ended(again, late, *newcomers)

    main()


def test_g04_producers_that_wait_draw_nothing_before_a_checkpoint_is_resumed(tmp_path: Path) -> None:
    @simulated
    async def main() -> None:
        first = Process(MemoryStorage(clock=asyncio.get_running_loop().time), 1)
        await first.manager.save(tmp_path / "checkpoint", 2)
        await first.stop()
        store = MemoryStorage(clock=asyncio.get_running_loop().time)
        producers = [Process(store, n).produce() for n in range(2, 5)]
        await asyncio.sleep(100)
        trainer = Process(store, 1)
        joining = trainer.manager.run.join

        async def slowly(*args: Any, **kwargs: Any) -> None:
            await joining(*args, **kwargs)
            await asyncio.sleep(100)  # producers learn that there is a trainer

        trainer.manager.run.join = slowly  # type: ignore[method-assign]
        assert await trainer.manager.resume(tmp_path / "checkpoint") == 2
        assert (await store.summary()).task("math").account.issued == 0
        await ended(trainer, *producers)

    main()


# --- ranks of a trainer ---------------------------------------------------------------------------------


async def with_ranks(world_size: int) -> tuple[MemoryStorage, list[Process], list[Process]]:
    storage = MemoryStorage(clock=asyncio.get_running_loop().time)
    ranks = [Process(storage, n) for n in range(world_size)]
    await ranks[0].manager.continue_produce(0)
    return storage, ranks, [Process(storage, n).produce() for n in range(5, 7)]


@simulated
async def test_ranks_of_a_trainer_divide_a_batch_and_acknowledge_it_together() -> None:
    storage, ranks, producers = await with_ranks(3)
    seen: list[list[int | None]] = []

    async def train(rank: int) -> None:
        for step in (1, 2, 3):
            async with ranks[rank].manager.get_batch(BATCH, step, rank=rank, world_size=3, timeout_s=500) as batch:
                seen.append([group[0].group_id for group in batch.groups])
                await asyncio.sleep(rank * 5)
                line = (await storage.summary()).task("math").line()
                assert line["trained"] == (step - 1) * BATCH, "nothing is acknowledged before all ranks have"
            if rank == 0:
                await ranks[0].manager.pause_produce()
                await ranks[0].manager.continue_produce(step)

    await asyncio.gather(*[train(rank) for rank in range(3)])
    groups = [group for part in seen for group in part]
    assert len(groups) == len(set(groups)) == 3 * BATCH
    assert {len(part) for part in seen} == {1, 2}
    assert (await storage.summary()).task("math").line()["trained"] == 3 * BATCH
    await ended(*ranks, *producers)


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_g05_a_batch_that_a_rank_did_not_train_on_comes_back(how: str) -> None:
    @simulated
    async def main() -> None:
        storage, ranks, producers = await with_ranks(2)

        async def second() -> None:
            with suppress(ZeroDivisionError, StorageError):
                async with ranks[1].manager.get_batch(BATCH, 1, rank=1, world_size=2, timeout_s=500):
                    if how == "dies":
                        await ranks[1].kill()
                    1 / 0  # noqa: B018

        async def first() -> None:
            async with ranks[0].manager.get_batch(BATCH, 1, rank=0, world_size=2, timeout_s=500):
                pass

        running = asyncio.create_task(second())
        with pytest.raises(LostLease, match="rank 1 did not train on its part of step 1"):
            await first()
        await running
        assert (await storage.summary()).task("math").line()["trained"] == 0
        async with ranks[0].manager.get_batch(BATCH, 1, timeout_s=500) as batch:
            assert len(batch.groups) == BATCH
        await ended(*ranks, *producers)

    main()


@simulated
async def test_a_rank_that_asks_for_another_step_is_refused() -> None:
    _, ranks, producers = await with_ranks(2)
    async with ranks[0].manager.get_batch(BATCH, 2, world_size=2, timeout_s=500) as batch:
        with pytest.raises(InvalidInput, match="rank 1 of 2 asks for train step 1, but rank 0 has leased train step 2"):
            await ranks[1].manager.get_batch(BATCH, 1, rank=1, world_size=2)

        async def second() -> int:
            async with ranks[1].manager.get_batch(BATCH, 2, rank=1, world_size=2) as part:
                return len(part.groups)

        running = asyncio.create_task(second())
    assert await running + len(batch.groups) == BATCH
    with pytest.raises(InvalidInput, match="rank is 2 of world_size 2"):
        ranks[0].manager.get_batch(BATCH, 3, rank=2, world_size=2)
    await ended(*ranks, *producers)


@simulated
async def test_g05_a_rank_does_not_leave_a_batch_that_rank_0_never_acknowledged() -> None:
    storage, ranks, producers = await with_ranks(2)
    first = ranks[0].manager.get_batch(BATCH, 1, rank=0, world_size=2, timeout_s=500)
    await first.__aenter__()

    async def second() -> None:
        async with ranks[1].manager.get_batch(BATCH, 1, rank=1, world_size=2, timeout_s=500):
            pass

    running = asyncio.create_task(second())
    await asyncio.sleep(5)
    assert not running.done(), "rank 0 has not acknowledged the batch"
    await ranks[0].kill()
    with pytest.raises(LostLease, match="rank 0 died before it acknowledged train step 1; ask for it again"):
        await running
    again = Process(storage, 9)
    both = [again.manager, ranks[1].manager]

    async def train(rank: int) -> int:
        async with both[rank].get_batch(BATCH, 1, rank=rank, world_size=2, timeout_s=500) as batch:
            return len(batch.groups)

    assert sum(await asyncio.gather(train(0), train(1))) == BATCH
    await ended(again, ranks[1], *producers)
