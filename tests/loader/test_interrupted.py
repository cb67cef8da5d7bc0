"""Exactly once through the loader: a program is stopped at any event, and another life continues (G4, G5).

The program does what programs do: it trains, breaks out of the loop before it has trained, acknowledges by hand, raises
in the middle of a batch, leases ahead, updates weights, saves now and then. The weights remember every group that they
were trained on. At the end each step was trained once, no group twice, and every group that was drawn is there. A point
that fails is printed with its command:
    FOREBAY_POINT=ahead-17 python -m pytest tests/loader/test_interrupted.py
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest

from forebay import AsyncBatch, AsyncRolloutLoader, Budgets, RolloutState, Task
from forebay.testing.simulate import LongTail, SimulatedEngine, SimulatedLoop, run
from tests.simulation.test_interrupted import History, _no_fsync, account_for_all, quiet

STEPS, BATCH, SAVE_EVERY = 5, 3, 2
POINTS, SLOW_POINTS = 50, 500  # of each mode

Groups = list[tuple[str, int]]


class Killed(BaseException):
    pass


class Failed(Exception):
    """What the body of a loop raises."""


class Weights:
    """What was trained by step: in memory, and as it was saved."""

    def __init__(self) -> None:
        self.steps: dict[int, Groups] = {}
        self.saved: dict[int, dict[int, Groups]] = {}

    def history(self) -> History:
        history = History()
        history.steps = self.steps
        return history


def score(state: RolloutState) -> float:
    return random.Random(f"{state.task_name} {state.rollout_id} {state.num_tries}").random()


def keep(group: list[RolloutState]) -> bool | str:
    return group[0].reward is None or group[0].reward["score"] > 0.12 or "dull"


class Life:
    """One process: a loader, an engine, and a program that takes what chance says."""

    def __init__(self, mode: Any, seed: int, weights: Weights, directory: Path) -> None:
        self.weights, self.chance = weights, random.Random(seed)
        self.engine = SimulatedEngine(
            seed=seed,
            lengths=LongTail(median=20, max_tokens=120),
            tokens_per_second=100,
            failure_rate=0.05,
            abort_latency_s=0.02,
        )
        tasks = [
            Task(
                name,
                [{"prompt": f"{name} question {number}"} for number in range(17)],
                self.engine,
                reward=score,
                group_size=2,
                weight=weight,
                filters=[keep],
                max_tries=2,
                over_issue=0.5,
                partial_rollout=True,
                budgets=Budgets(max_consecutive_failures=1_000),
            )
            for name, weight in {"math": 2.0, "code": 1.0}.items()
        ]
        self.loader = AsyncRolloutLoader(
            tasks,
            batch_groups=BATCH,
            max_staleness=2,
            mode=mode,
            checkpoints=directory,
            keep_checkpoints=2,
            progress=None,
        )

    def load(self, step: int) -> None:
        self.weights.steps = dict(self.weights.saved[step])
        self.engine.set_weights(step)

    async def train(self) -> None:
        loader, chance = self.loader, self.chance
        self.weights.steps = {}
        async with loader:
            step = await loader.resume(self.load) or 0
            while step < STEPS:
                ahead = chance.choice((1, 1, 2))
                try:
                    step = await self.loop(step + 1, ahead)
                except Failed:
                    step = loader.next_step - 1
            if step % SAVE_EVERY:
                await self.save(step)
            await loader.plane.close()
            await account_for_all(loader.buffer, self.weights.history(), STEPS)

    async def loop(self, start: int, ahead: int) -> int:
        """Train from a step on; the last step that was acknowledged."""
        loader, chance = self.loader, self.chance
        waiting: list[AsyncBatch] = []
        batches = loader.batches(start, STEPS, ahead=ahead)
        while True:
            if len(waiting) < ahead:
                try:
                    waiting.append(await anext(batches))
                except StopAsyncIteration:
                    if not waiting:
                        return loader.next_step - 1
                if len(waiting) < ahead and chance.random() < 0.5:
                    continue
            batch = waiting.pop(0)
            what = chance.random()
            if what < 0.08:
                return loader.next_step - 1  # break before it was trained on: given back
            await asyncio.sleep(chance.random())
            if what < 0.14:
                raise Failed  # in the middle: half of it is no step of the weights
            self.weights.steps[batch.step] = [
                (name, group[0].group_id or 0) for name, groups in batch.groups_by_task.items() for group in groups
            ]
            how = chance.choice(("ack", "update", "update", "save"))
            if how == "ack":
                await batch.ack()
            if how == "save" or batch.step % SAVE_EVERY == 0:
                await self.save(batch.step)
            await loader.update_weights(self.engine.set_weights, batch.step)

    async def save(self, step: int) -> None:
        self.weights.saved[step] = dict(self.weights.steps)  # on disk before the loader is told
        await self.loader.save(step)


def interrupted(mode: Any, seed: int, at_event: int | None) -> int:
    """A program that is stopped dead at an event, and another life that finishes it; the events of the first."""
    weights, events = Weights(), 0
    directory = Path(tempfile.mkdtemp(prefix="forebay-"))

    def kill() -> None:
        raise Killed

    async def first() -> None:
        nonlocal events
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        if at_event is not None:
            loop.at_event(at_event, kill)
        await Life(mode, seed, weights, directory).train()
        events = loop.events

    try:
        run(first, seed=seed)
    except Killed:
        run(Life(mode, seed + 1, weights, directory).train, seed=seed + 1)
    return events


@pytest.mark.parametrize("mode", ["in_turns", "ahead"])
@pytest.mark.parametrize("count", [POINTS, pytest.param(SLOW_POINTS, marks=pytest.mark.slow)])
def test_g04_g05_a_program_that_is_stopped_anywhere_trains_every_group_once(
    count: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", _no_fsync)
    chosen = os.environ.get("FOREBAY_POINT")
    with quiet():
        events = min(interrupted(mode, seed, None) for seed in range(3))
        for number in range(count):
            if chosen in (None, f"{mode}-{number}"):
                chance = random.Random(number)
                try:
                    interrupted(mode, chance.randrange(1_000), chance.randrange(2, events))
                except Exception as error:
                    error.add_note(f"rerun: FOREBAY_POINT={mode}-{number} python -m pytest {__file__}")
                    raise
