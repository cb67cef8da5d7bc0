"""G6: nothing too old is ever trained on, in 10,000 simulated steps of both managers.

Every run draws its own settings: how old groups of each task may grow, when new weights come (at any moment, also
while a batch is waited for, and often too late), answers with long tails, failures, hangs that only a timeout ends. A
run that fails is printed with its command:
    FOREBAY_RUN=17 python -m pytest tests/simulation/test_staleness_bound.py
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor

import pytest

from forebay import (
    AgentLoopManager,
    AsyncBatch,
    AsyncProduceStrategy,
    AsyncReplayBufferConfig,
    Budgets,
    DisaggregatedAgentLoopManager,
    ManagedTask,
    NoProgress,
    ReplayBuffer,
    RolloutState,
    Sampler,
    Status,
    SyncReplayBufferConfig,
    Timeouts,
    WeightsTooOld,
)
from forebay.core.staleness import group_staleness, staleness
from forebay.testing.simulate import LongTail, SimulatedEngine, check_ledger, check_nothing_lost, run

RUNS, SLOW_RUNS, STEPS, BATCH = 4, 400, 250, 2


class Running(SimulatedEngine):
    """An engine that takes new weights in the middle of an answer."""

    takes_weights_while_running = True


class World:
    """One run: a manager, its tasks and an engine, all drawn from a number."""

    def __init__(self, number: int) -> None:
        self.chance = chance = random.Random(number)
        self.seen: Counter[str] = Counter()
        config = chance.choice((AsyncReplayBufferConfig, AsyncReplayBufferConfig, SyncReplayBufferConfig))
        self.buffer: ReplayBuffer = config().build()
        interval = chance.choice((1, 1, 2, 3))
        self.engine = (Running if chance.random() < 0.2 else SimulatedEngine)(
            seed=number,
            lengths=LongTail(median=10, long_share=0.2, long_factor=chance.choice((5, 40)), max_tokens=500),
            failure_rate=chance.choice((0.0, 0.05)),
            hang_rate=chance.choice((0.0, 0.02)),
            abort_latency_s=chance.choice((0.0, 0.02)),
            slots=chance.choice((None, 4)),
        )
        tasks = [self._task(name, interval) for name in chance.choice((("math",), ("math", "code")))]
        self.disaggregated = number % 2 == 1
        self.manager: AgentLoopManager | DisaggregatedAgentLoopManager
        if self.disaggregated:
            self.manager = DisaggregatedAgentLoopManager(tasks, self.buffer, sync_weights_interval=interval)
        else:
            self.manager = AgentLoopManager(tasks, self.buffer, sync_weights_interval=interval)
        self.thresholds = {task.name: task.strategy.stale_threshold for task in tasks}
        limits = {task.name: task.strategy.limits.token_stale_threshold for task in tasks}
        self.token_thresholds = {name: limit for name, limit in limits.items() if limit is not None}
        self.sync_share = chance.choice((0.1, 0.3, 0.7, 1.0))  # of the steps that are followed by new weights
        self.train_s = chance.choice((0.05, 0.5))
        self.trained: dict[str, list[int]] = {task.name: [] for task in tasks}
        self.done = 0  # the last step whose weights there are
        self.syncing = asyncio.Lock()

    def _task(self, name: str, interval: int) -> ManagedTask:
        chance = self.chance
        max_staleness = chance.choice((0, 1, 2, 4))
        partial = (max_staleness + 1) * interval > 1 and chance.random() < 0.7
        strategy = AsyncProduceStrategy(
            self.buffer,
            over_sample_threshold=chance.choice((0.0, 0.5, 2.0)),
            enable_partial_rollout=partial,
            max_staleness=max_staleness,
            max_token_staleness=chance.choice((None, max_staleness // 2)) if partial else None,
            sync_weights_interval=interval,
            tail_batch_trigger_size=chance.choice((-1, 0, 0, 2)),
            reward_fn=lambda state: 1.0,
            timeouts=Timeouts(member_timeout_s=10, pause_timeout_s=2),
            budgets=Budgets(max_consecutive_failures=10_000),
            progress=NoProgress(),
        )
        sampler = Sampler([{"prompt": f"{n}"} for n in range(11)], group_size=chance.choice((1, 2)))
        weight = chance.choice((1.0, 2.0))
        return ManagedTask(name=name, sampler=sampler, agent_loop=self.engine, strategy=strategy, weight=weight)

    # --- the trainer --------------------------------------------------------------------------------

    async def train(self) -> None:
        manager = self.manager
        producer = syncer = None
        if isinstance(manager, DisaggregatedAgentLoopManager):
            producer = asyncio.create_task(manager.produce_loop(BATCH))
            syncer = asyncio.create_task(self.sync_now_and_then())
        for step in range(1, STEPS + 1):
            if isinstance(manager, DisaggregatedAgentLoopManager):
                while not await self.trained_ahead(manager, step):
                    await self.sync()
            else:
                due = self.chance.random() < self.sync_share
                if due or self.too_old(step, [*self.thresholds.values(), *self.token_thresholds.values()]):
                    self.engine.set_weights(self.done)
                async with manager.produce_batch(BATCH, step, model_step=self.engine.model_step) as batch:
                    await self.look_at(batch)
            self.done = step
            check_ledger(await self.buffer.ledger())
        if syncer is not None:
            syncer.cancel()
            await asyncio.wait((syncer,))
        await manager.shutdown()
        if producer is not None:
            await producer
        for name, trained in self.trained.items():
            await check_nothing_lost(self.buffer, name, trained)

    def too_old(self, step: int, thresholds: Iterable[int]) -> bool:
        return any(staleness(self.engine.model_step, step) >= threshold for threshold in thresholds)

    async def trained_ahead(self, manager: DisaggregatedAgentLoopManager, step: int) -> bool:
        """One step, with new weights after it now and then; False if the weights were too old for it."""
        refused: WeightsTooOld | None = None
        try:
            async with manager.get_batch(BATCH, step, timeout_s=10_000) as batch:
                await self.look_at(batch)
        except WeightsTooOld as late:
            refused = late
        if refused is not None:
            assert refused.step == step
            assert refused.model_step < self.done, "newer weights were asked for, and there are none"
            assert self.engine.model_step < self.done, "newer weights were asked for, and there are none"
            self.seen["weights too old"] += 1
            return False
        self.done = step
        if self.chance.random() < self.sync_share:
            await self.sync()
        return True

    async def sync(self) -> None:
        """Bring the weights that there are to the engine."""
        assert isinstance(self.manager, DisaggregatedAgentLoopManager)
        async with self.syncing:
            await self.manager.pause_produce()
            await asyncio.sleep(self.chance.choice((0.0, 0.1)))
            self.engine.set_weights(self.done)
            await self.manager.continue_produce(self.engine.model_step)

    async def sync_now_and_then(self) -> None:
        """At any moment, also while a batch is waited for or trained on."""
        while True:
            await asyncio.sleep(self.chance.expovariate(self.sync_share / 5))
            await self.sync()
            self.seen["syncs between"] += 1

    async def look_at(self, batch: AsyncBatch) -> None:
        assert len(batch.groups) == BATCH
        step = batch.step
        for name, groups in batch.groups_by_task.items():
            threshold = self.thresholds[name]
            for group in groups:
                stalest = group_staleness(group, step)
                assert stalest < threshold, f"G6: staleness {stalest} of {threshold} in {name} at step {step}"
                assert all(state.status is Status.COMPLETED for state in group)
                for state in group:
                    self.look_at_tokens(state, step, self.token_thresholds.get(name))
                self.seen["samples"] += len(group)
                self.seen["at the bound"] += threshold > 1 and stalest == threshold - 1
                self.seen["of several weights"] += any(len(state.version_spans) > 1 for state in group)
                self.trained[name].append(group[0].group_id or 0)
        await asyncio.sleep(self.chance.expovariate(1 / self.train_s))

    def look_at_tokens(self, state: RolloutState, step: int, threshold: int | None) -> None:
        assert state.response_ids is not None
        versions = [version for version, tokens in state.version_spans for _ in range(tokens)]
        assert len(versions) == len(state.response_ids), "a token of which nobody knows the age"
        if threshold is None:
            return
        assert state.response_mask is not None
        fresh = [staleness(version, step) < threshold for version in versions]
        assert [bool(kept) for kept in state.response_mask] == fresh, "G6: a token too old to be trained on"
        assert any(fresh), "nothing is left to train on"
        self.seen["masked tokens"] += fresh.count(False)

    def sum_up(self) -> Counter[str]:
        self.seen["steps"] = self.done
        stats = [task.strategy.figures(name) for name, task in self.manager.tasks.items()]
        self.seen["failures"] = sum(figures.failures for figures in stats)
        return self.seen


def explored(number: int) -> tuple[Counter[str], str | None]:
    """One run, in a process of a pool: what it saw, and what went wrong."""
    logging.disable(logging.CRITICAL)  # simulated failures are no news
    seen: Counter[str] = Counter()

    async def main() -> None:
        world = World(number)
        await world.train()
        seen.update(world.sum_up())

    try:
        run(main, seed=number, max_events=3_000_000)
    except Exception as error:
        command = f"FOREBAY_RUN={number} python -m pytest {__file__}"
        return seen, f"run {number}: {type(error).__name__}: {error}\n  rerun: {command}"
    return seen, None


def explore(numbers: Sequence[int]) -> Counter[str]:
    context = multiprocessing.get_context("spawn")
    total: Counter[str] = Counter()
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        results = list(pool.map(explored, numbers))
    problems = [problem for _, problem in results if problem is not None]
    assert not problems, "\n".join(problems[:5])
    for seen, _ in results:
        total.update(seen)
    return total


def test_g06_staleness_never_reaches_its_threshold_in_a_thousand_steps() -> None:
    chosen = os.environ.get("FOREBAY_RUN")
    if chosen is not None:
        _, problem = explored(int(chosen))
        assert problem is None, problem
        return
    seen = explore(range(RUNS))
    assert seen["steps"] == RUNS * STEPS == 1_000
    for rare in ("weights too old", "syncs between", "at the bound", "of several weights", "masked tokens", "failures"):
        assert seen[rare] > 10, f"hardly any {rare}: {seen}"


@pytest.mark.slow
def test_g06_staleness_never_reaches_its_threshold_in_a_hundred_thousand_steps() -> None:
    assert explore(range(RUNS, RUNS + SLOW_RUNS))["steps"] == SLOW_RUNS * STEPS == 100_000
