"""Several processes on one store, in virtual time: producers share the work, follow pauses, die and come back.

A process is a manager with its own buffer, engine and link to the storage. A link that is cut raises for ever, as the
storage of a killed process would; a link that hangs answers nothing until it is released. A run that fails is printed
with its command:
    FOREBAY_RUN=17 python -m pytest tests/simulation/test_processes.py
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterable, Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest

from forebay import (
    AsyncProduceStrategy,
    Budgets,
    DisaggregatedAgentLoopManager,
    MemoryStorage,
    NoProgress,
    ProduceBatchResult,
    ProduceStatus,
    ReplayBuffer,
    Sampler,
    StalenessReplayPolicy,
    Task,
    Timeouts,
)
from forebay.core.ledger import Account, Row
from forebay.core.staleness import group_staleness
from forebay.errors import StorageError
from forebay.storage.base import Listener, Operation, Reaped, Snapshot, Storage
from forebay.testing.simulate import LongTail, SimulatedEngine, check_ledger, check_nothing_lost, run

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
        self.buffer = ReplayBuffer(
            StalenessReplayPolicy(), self.link, lease_s=LEASE_S, max_groups=options.get("max_groups", 64)
        )
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
            budgets=Budgets(max_consecutive_failures=1_000),
            progress=NoProgress(),
        )
        sampler = Sampler([{"prompt": f"{n}"} for n in range(options.get("prompts", 23))], prompt_repeat_k=2)
        self.task = Task(name="math", sampler=sampler, agent_loop=self.engine, strategy=strategy)
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
        self.most_live = 0

    @property
    def processes(self) -> list[Process]:
        return [self.trainer, *self.producers]

    async def replace(self, index: int) -> None:
        """Kill a producer; another one takes its place some time later."""
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

    def look_at(self, batch: ProduceBatchResult, step: int) -> None:
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
            assert live <= bound * BATCH + budget, f"{live} groups for {bound} steps"

    async def train(self, steps: int) -> None:
        killing: list[asyncio.Task[None]] = []
        for step in range(1, steps + 1):
            while True:
                async with self.trainer.manager.get_batch(BATCH, step, timeout_s=10_000) as batch:
                    if batch.status is ProduceStatus.NORMAL:
                        self.look_at(batch, step)
                        await asyncio.sleep(self.chance.choice((0.1, 3.0)))
                        break
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
            await Cluster(number).train(steps=12)

        try:
            run(main, seed=number)
        except BaseException as error:
            error.add_note(f"FOREBAY_RUN={number} python -m pytest tests/simulation/test_processes.py")
            raise
