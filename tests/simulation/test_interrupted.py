"""Interrupt anywhere: a run is stopped at any event, resumed from its last checkpoint, and finished (G4).

Thirty small steps of two tasks, over several epochs, with failures and filters on. At the end every group that was
ever drawn is found exactly once: trained, filtered, failed, or still held. A point that fails is printed with its
command:
    FOREBAY_POINT=disaggregated-full-17 python -m pytest tests/simulation/test_interrupted.py
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay import (
    AgentLoopManager,
    AsyncProduceStrategy,
    AsyncReplayBufferConfig,
    Budgets,
    DisaggregatedAgentLoopManager,
    ManagedTask,
    NoProgress,
    ReplayBuffer,
    RolloutState,
    Sampler,
    SyncProduceStrategy,
)
from forebay.buffer.internal import internals
from forebay.core.staleness import group_staleness
from forebay.testing.simulate import LongTail, SimulatedEngine, SimulatedLoop, check_ledger, run

STEPS, BATCH, SAVE_EVERY, INTERVAL = 30, 4, 4, 1
POINTS, SLOW_POINTS = 2, 1_000  # of each kind and mode; tests/loader has more of them in `make test`
FEW = 50  # not worth the processes of a pool
TASKS = {"math": 2.0, "code": 1.0}


def judged(state: RolloutState) -> float:
    """The same score for the same answer, whenever it is judged."""
    return random.Random(f"{state.task_name} {state.rollout_id} {state.num_tries}").random()


def rejected(group: list[RolloutState]) -> bool | str:
    return group[0].reward is None or group[0].reward["score"] > 0.12 or "dull"


class Run:
    """One life of a process: a buffer, two tasks, a manager; what it did is written into the history."""

    def __init__(self, kind: str, seed: int, history: History) -> None:
        self.history = history
        self.buffer: ReplayBuffer = AsyncReplayBufferConfig().build()
        self.engine = SimulatedEngine(
            seed=seed,  # Equal order needs that no two groups end at the same moment: lengths that hardly ever agree.
            lengths=LongTail(median=3000, max_tokens=100_000)
            if kind == "sync"
            else LongTail(median=20, max_tokens=120),
            tokens_per_second=15_000 if kind == "sync" else 100,
            failure_rate=0.05,
            abort_latency_s=0.02,
        )
        options: dict[str, Any] = {
            "reward_fn": judged,
            "is_valid_sample_fn": rejected,
            "progress": NoProgress(),
            "max_tries": 2,
            "budgets": Budgets(max_consecutive_failures=1_000),
            "sync_weights_interval": INTERVAL,
        }
        tasks = []
        for name, weight in TASKS.items():
            strategy = (
                SyncProduceStrategy(self.buffer, **options)
                if kind == "sync"
                else AsyncProduceStrategy(
                    self.buffer, over_sample_threshold=0.5, enable_partial_rollout=True, max_staleness=1, **options
                )
            )
            prompts = [{"prompt": f"{name} question {number}"} for number in range(17)]
            sampler = Sampler(prompts, group_size=2, seed=seed)
            tasks.append(
                ManagedTask(name=name, sampler=sampler, agent_loop=self.engine, strategy=strategy, weight=weight)
            )
        self.manager: AgentLoopManager | DisaggregatedAgentLoopManager
        if kind == "disaggregated":
            self.manager = DisaggregatedAgentLoopManager(tasks, self.buffer, sync_weights_interval=INTERVAL)
        else:
            self.manager = AgentLoopManager(tasks, self.buffer, sync_weights_interval=INTERVAL)

    async def train(self, directory: Path, *, prompts_only: bool) -> None:
        """From where the checkpoint is, if there is one, to the last step."""
        step = 1
        if (directory / "manifest.json").exists():
            model_step = await self.manager.resume(directory)
            self.history.rewind(model_step)
            self.engine.set_weights(model_step)
            step = model_step + 1
        producer = None
        if isinstance(self.manager, DisaggregatedAgentLoopManager):
            await self.manager.continue_produce(self.engine.model_step)
            producer = asyncio.create_task(self.manager.produce_loop(BATCH))
        while step <= STEPS:
            request = (
                self.manager.get_batch(BATCH, step)
                if isinstance(self.manager, DisaggregatedAgentLoopManager)
                else self.manager.produce_batch(BATCH, step, model_step=self.engine.model_step)
            )
            async with request as batch:
                assert len(batch.groups) == BATCH
                thresholds = {name: task.strategy.stale_threshold for name, task in self.manager.tasks.items()}
                for name, groups in batch.groups_by_task.items():
                    assert all(group_staleness(group, step) < thresholds[name] for group in groups)
                await asyncio.sleep(0.3)
                self.history.leased(step, batch.groups_by_task)
            self.history.trained(step)
            check_ledger(await self.buffer.ledger())
            if isinstance(self.manager, DisaggregatedAgentLoopManager):
                await self.manager.pause_produce()
                self.engine.set_weights(step)
                await self.manager.continue_produce(step)
            else:
                self.engine.set_weights(step)
            if step % SAVE_EVERY == 0:
                await self.manager.save(directory, step, no_save_replay_buffer=prompts_only)
            step += 1
        await self.manager.shutdown()
        if producer is not None:
            await producer


class History:
    """Which groups were trained at which step, as the weights see it: a resume forgets what came after its step."""

    def __init__(self) -> None:
        self.steps: dict[int, list[tuple[str, int]]] = {}
        self._leased: dict[int, list[tuple[str, int]]] = {}

    def leased(self, step: int, groups: dict[str, list[list[RolloutState]]]) -> None:
        self._leased[step] = [(name, group[0].group_id or 0) for name in groups for group in groups[name]]

    def trained(self, step: int) -> None:
        self.steps[step] = self._leased[step]

    def rewind(self, model_step: int) -> None:
        self.steps = {step: groups for step, groups in self.steps.items() if step <= model_step}

    def flat(self) -> list[tuple[str, int]]:
        return [group for step in sorted(self.steps) for group in self.steps[step]]


async def account_for_all(buffer: ReplayBuffer, history: History, steps: int = STEPS) -> None:
    """Every group that was drawn is there exactly once."""
    trained = history.flat()
    assert sorted(history.steps) == list(range(1, steps + 1)), "a step is missing"
    assert len(trained) == len(set(trained)), "a group was trained twice"
    ledger = await buffer.ledger()
    check_ledger(ledger)
    for name, line in ledger.items():
        mine = [group_id for task, group_id in trained if task == name]
        held = [record.group_id for record in await buffer.query({"task_name": name})]
        assert line["trained"] == len(mine), f"{name}: {line} but {len(mine)} were trained"
        assert line["in_flight"] == line["leased"] == 0
        assert not set(mine) & set(held), "trained, and still held"
        drawn, _ = await internals(buffer).position(name)
        ended = line["filtered"] + line["failed"] + line["discarded"]
        assert len(mine) + len(held) + ended == drawn == line["issued"], f"{name}: of {drawn} drawn some are missing"


def interrupted(
    kind: str, directory: Path, seed: int, at_event: int | None, *, prompts_only: bool
) -> tuple[History, int]:
    """A run that is stopped dead at an event, and another that goes on; the history, and the events of the first."""
    history = History()
    events = 0

    class Killed(BaseException):
        pass

    def kill() -> None:
        raise Killed

    async def first() -> None:
        nonlocal events
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        if at_event is not None:
            loop.at_event(at_event, kill)
        life = Run(kind, seed, history)
        await life.train(directory, prompts_only=prompts_only)
        await account_for_all(life.buffer, history)
        events = loop.events

    async def second() -> None:
        life = Run(kind, seed, history)
        await life.train(directory, prompts_only=prompts_only)
        await account_for_all(life.buffer, history)

    try:
        run(first, seed=None if kind == "sync" else seed)  # equal order needs equal ties, too
    except Killed:
        if not (directory / "manifest.json").exists():
            history.rewind(0)
        run(second, seed=None if kind == "sync" else seed + 1)
    return history, events


def survived(point: tuple[str, str, int, int, str]) -> str | None:
    """One interruption, perhaps in a process of a pool; what went wrong, or None."""
    kind, mode, number, events, directory = point
    os.fsync = _no_fsync  # type: ignore[assignment]
    chance = random.Random(number)
    seed, at_event = chance.randrange(1_000), chance.randrange(2, events)
    try:
        with quiet():
            interrupted(kind, Path(directory) / f"{number}", seed, at_event, prompts_only=mode == "prompts")
    except Exception as error:
        command = f"FOREBAY_POINT={kind}-{mode}-{number} python -m pytest {__file__}"
        return f"{type(error).__name__}: {error}\n  rerun: {command}"
    return None


@contextmanager
def quiet() -> Iterator[None]:
    """Simulated failures are no news."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _no_fsync(descriptor: int) -> None:
    """What a power cut would lose is tested elsewhere; here only the process dies."""


@pytest.mark.parametrize("mode", ["full", "prompts"])
@pytest.mark.parametrize("kind", ["colocated", "disaggregated"])
@pytest.mark.parametrize("count", [POINTS, pytest.param(SLOW_POINTS, marks=pytest.mark.slow)])
def test_g04_a_run_that_is_stopped_anywhere_skips_nothing_and_trains_nothing_twice(
    tmp_path: Path, count: int, kind: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", _no_fsync)
    _, events = interrupted(kind, tmp_path / "whole", 0, None, prompts_only=mode == "prompts")
    points = [(kind, mode, number, events, str(tmp_path)) for number in range(count)]
    chosen = os.environ.get("FOREBAY_POINT")
    if chosen is not None:
        points = [point for point in points if chosen == f"{point[0]}-{point[1]}-{point[2]}"]
        for point in points:
            assert survived(point) is None
        return
    if count <= FEW:
        outcomes = list(map(survived, points))
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
            outcomes = list(pool.map(survived, points, chunksize=10))
    problems = [problem for problem in outcomes if problem is not None]
    assert not problems, "\n".join(problems[:5])


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_g04_a_sync_run_saved_with_nothing_in_flight_repeats_its_steps_in_their_order(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", _no_fsync)
    whole, events = interrupted("sync", tmp_path / "whole", 5, None, prompts_only=False)
    for number in range(count):
        at_event = random.Random(number).randrange(2, events)
        parts, _ = interrupted("sync", tmp_path / f"{number}", 5, at_event, prompts_only=False)
        assert parts.steps == whole.steps
