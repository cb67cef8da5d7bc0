"""The training process that kills itself: two tasks, a manager on SQLite, weights that remember what they saw.

The weights of step n are a file of their own: every group that they were trained on, by step. So whatever they say is
exact, however the process died. They are written before the plane is saved for them, and the older ones are removed
after that: the checkpoint of the plane always finds the weights that it names.

Beside them a log: `resumed n` when a life begins, `trained ...` before a batch is acknowledged, `acked n` after it,
`outage n` when the engine, the reward service or the storage goes away, for a number of calls.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from pathlib import Path
from typing import Any

from forebay import (
    AgentLoopManager,
    AsyncProduceStrategy,
    Budgets,
    DisaggregatedAgentLoopManager,
    FunctionAgentLoop,
    ManagedTask,
    NoProgress,
    ReplayBuffer,
    RolloutState,
    Sampler,
    StalenessReplayPolicy,
)
from forebay.errors import EngineError, StorageUnavailable
from forebay.storage.sqlite import SQLiteStorage
from forebay.testing.simulate import check_ledger
from tests.doom import Doom
from tests.processes import HANG_S

TASKS = {"math": 2.0, "code": 1.0}
SAMPLES, MAX_TRIES, PROMPTS = 2, 2, 13
BATCH, SAVE_EVERY = 4, 3

Trained = dict[int, list[tuple[str, int]]]
"""Groups by the step that trained on them."""


# --- what becomes of a group, whoever generates it and how often --------------------------------------


def fails(task_name: str, rollout_id: int, num_tries: int) -> bool:
    return random.Random(f"fails {task_name} {rollout_id} {num_tries}").random() < 0.25


def score(task_name: str, rollout_id: int) -> float:
    return random.Random(f"score {task_name} {rollout_id}").random()


def fate(task_name: str, group_id: int) -> str:
    """How a group ends that gets to its end: failed, filtered or trained."""
    rollouts = range(group_id * SAMPLES, (group_id + 1) * SAMPLES)
    if any(all(fails(task_name, rollout, tried) for tried in range(MAX_TRIES)) for rollout in rollouts):
        return "failed"
    return "filtered" if score(task_name, rollouts[0]) < 0.15 else "trained"


class Outages:
    """One part of the world that goes away once in a life: for some calls, or until the process is killed."""

    def __init__(self, part: str, log: Log) -> None:
        self.part, self._log = part, log
        self._calls = self._left = 0
        self._endless = log.doomed

    def check(self, part: str, error: type[Exception]) -> None:
        """Raise the error if the part is away."""
        if part != self.part:
            return
        self._calls += 1
        if self._calls == 8:
            self._left = 5
            self._log.write("outage", self._calls)
        if self._left:
            self._left -= not self._endless
            raise error(f"the {part} is away")


outages: Outages | None = None


def check_part(part: str, error: type[Exception]) -> None:
    if outages is not None:
        outages.check(part, error)


class AwayStorage(SQLiteStorage):
    """A storage whose server is away now and then. SQLite has none; what it does when it is there is real."""

    async def put(self, *args: Any, **kwargs: Any) -> Any:
        check_part("storage", StorageUnavailable)
        return await super().put(*args, **kwargs)

    async def issue(self, *args: Any, **kwargs: Any) -> Any:
        check_part("storage", StorageUnavailable)
        return await super().issue(*args, **kwargs)

    async def claim(self, *args: Any, **kwargs: Any) -> Any:
        check_part("storage", StorageUnavailable)
        return await super().claim(*args, **kwargs)


async def answer(state: RolloutState) -> None:
    """Two tokens, a moment, two more; a pause or a kill finds it anywhere."""
    task_name, rollout_id = state.task_name or "", state.rollout_id or 0
    if state.response_ids is None:
        state.response_ids = [rollout_id, rollout_id]
    await asyncio.sleep(random.uniform(0, 0.004))
    check_part("engine", ConnectionRefusedError)
    if fails(task_name, rollout_id, state.num_tries):
        raise EngineError("simulated")
    state.response_ids = [rollout_id] * 4
    state.response, state.finish_reason = f"answer to {rollout_id}", "stop"


def judged(state: RolloutState) -> float:
    check_part("reward", ConnectionError)
    return score(state.task_name or "", state.rollout_id or 0)


def accepted(group: list[RolloutState]) -> bool | str:
    return score(group[0].task_name or "", group[0].rollout_id or 0) >= 0.15 or "dull"


# --- weights and log ----------------------------------------------------------------------------------


def weights_file(directory: Path, model_step: int) -> Path:
    return directory / f"weights-{model_step}.json"


def write_weights(directory: Path, model_step: int, trained: Trained) -> None:
    part = directory / "weights.part"
    part.write_text(json.dumps({str(step): groups for step, groups in trained.items()}))
    part.replace(weights_file(directory, model_step))


def read_weights(directory: Path, model_step: int) -> Trained:
    content = json.loads(weights_file(directory, model_step).read_text())
    return {int(step): [(task_name, group_id) for task_name, group_id in groups] for step, groups in content.items()}


class Log:
    """Lines that are in the file when `write` returns; each is an event, or with outages only these are."""

    def __init__(self, directory: Path, doom: Doom | None, *, outages: bool) -> None:
        self._doom = doom
        self._outages = outages
        self._descriptor = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *words: object) -> None:
        os.write(self._descriptor, f"{' '.join(map(str, words))}\n".encode())
        if self._doom is not None and (words[0] == "outage" or not self._outages):
            self._doom.event()

    @property
    def doomed(self) -> bool:
        """Whether the process will be killed."""
        return self._doom is not None


# --- training -----------------------------------------------------------------------------------------


def build_manager(kind: str, buffer: ReplayBuffer) -> AgentLoopManager | DisaggregatedAgentLoopManager:
    tasks = []
    for task_name, weight in TASKS.items():
        strategy = AsyncProduceStrategy(
            buffer,
            over_sample_threshold=0.5,
            enable_partial_rollout=True,
            max_staleness=1,
            max_tries=MAX_TRIES,
            reward_fn=judged,
            is_valid_sample_fn=accepted,
            budgets=Budgets(max_consecutive_failures=1_000, max_consecutive_rejections=1_000),
            progress=NoProgress(),
        )
        prompts = [{"prompt": f"{task_name} question {number}"} for number in range(PROMPTS)]
        sampler = Sampler(prompts, group_size=SAMPLES)
        loop = FunctionAgentLoop(answer)
        tasks.append(ManagedTask(name=task_name, sampler=sampler, agent_loop=loop, strategy=strategy, weight=weight))
    return (DisaggregatedAgentLoopManager if kind == "disaggregated" else AgentLoopManager)(tasks, buffer)


class Training:
    """One life of the process."""

    def __init__(self, directory: Path, kind: str, seed: int, doom: Doom | None) -> None:
        self.directory = directory
        self.checkpoint = directory / "checkpoint"
        self.chance = random.Random(seed)
        kind, _, part = kind.partition(" ")
        self.log = Log(directory, doom, outages=bool(part))
        if part:
            global outages
            outages = Outages(part, self.log)
        storage = AwayStorage(directory / "store.db", synchronous="NORMAL")
        self.buffer = ReplayBuffer(StalenessReplayPolicy(), storage)
        self.manager = build_manager(kind, self.buffer)
        self.trained: Trained = {}
        self.model_step = 0

    async def begin(self) -> None:
        """Take up the last checkpoint, or make the first one, before anything is drawn."""
        if (self.checkpoint / "manifest.json").exists():
            self.model_step = await self.manager.resume(self.checkpoint)
            self.trained = read_weights(self.directory, self.model_step)
        self.log.write("resumed", self.model_step)
        await self.check()
        if not self.model_step:
            await self.save()

    async def check(self) -> None:
        """The store agrees with the weights."""
        assert sorted(self.trained) == list(range(1, self.model_step + 1)), "the weights lack a step"
        ledger = await self.buffer.ledger()
        check_ledger(ledger)
        seen = [identity for groups in self.trained.values() for identity in groups]
        for task_name, line in ledger.items():
            mine = {group_id for name, group_id in seen if name == task_name}
            assert line["trained"] == len(mine), f"{task_name}: {len(mine)} are in the weights, but {line}"
            there = {
                record.group_id for record in await self.buffer.query({"task_name": task_name, "place": "buffered"})
            }
            assert not mine & there, f"{task_name}: in the weights, and handed out again: {mine & there}"

    async def save(self) -> None:
        """First the weights, then the plane; what is not needed any more goes last."""
        model_step = self.model_step
        write_weights(self.directory, model_step, self.trained)
        await self.manager.save(self.checkpoint, model_step, no_save_replay_buffer=self.chance.random() < 0.3)
        self.log.write("saved", model_step)
        for path in self.directory.glob("weights-*.json"):
            if path != weights_file(self.directory, model_step):
                path.unlink()

    async def step(self, *, saving: bool) -> None:
        """Train one step; with `saving`, the weights before it are saved while its batch is produced and trained."""
        step = self.model_step + 1
        saved = asyncio.create_task(self.save()) if saving else None
        if isinstance(self.manager, DisaggregatedAgentLoopManager):
            request = self.manager.get_batch(BATCH, step, timeout_s=HANG_S)
        else:
            request = self.manager.produce_batch(BATCH, step, model_step=self.model_step)
        async with request as batch:
            assert len(batch.groups) == BATCH
            groups = [(name, group[0].group_id or 0) for name in TASKS for group in batch.groups_by_task[name]]
            await asyncio.sleep(self.chance.uniform(0, 0.004))
            if saved is not None:
                await saved
            self.log.write("trained", step, *(f"{name}:{group_id}" for name, group_id in groups))
        self.log.write("acked", step)
        self.trained[step] = groups
        self.model_step = step
        check_ledger(await self.buffer.ledger())
        if isinstance(self.manager, DisaggregatedAgentLoopManager):
            await self.manager.pause_produce()
            await self.manager.continue_produce(step)

    async def run(self, steps: int | None) -> None:
        """Train for so many steps and end well; None: until the process is killed."""
        await self.begin()
        producer = None
        if isinstance(self.manager, DisaggregatedAgentLoopManager):
            await self.manager.continue_produce(self.model_step)
            producer = asyncio.create_task(self.manager.produce_loop(BATCH))
        last = None if steps is None else self.model_step + steps
        while last is None or self.model_step < last:
            due = self.model_step > 0 and self.model_step % SAVE_EVERY == 0
            meanwhile = self.chance.random() < 0.5
            if due and not meanwhile:
                await self.save()
            await self.step(saving=due and meanwhile)
        await self.save()
        await self.manager.shutdown()
        if producer is not None:
            await producer
        await self.buffer.close()


def main(directory: str, kind: str, seed: str, steps: str, *doom: str) -> None:
    """Train for so many steps; with a doom, until that."""
    logging.disable(logging.WARNING)  # simulated failures are no news
    training = Training(Path(directory), kind, int(seed), Doom(*map(int, doom)) if doom else None)
    asyncio.run(training.run(None if doom else int(steps)))
