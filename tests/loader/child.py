"""A training process that uses `RolloutLoader` as users do, and ends as it is told: killed, by a signal, or well.

The weights of a step are a file: every group that they were trained on, by step. It is written before `loader.save` is
called, so a checkpoint always finds the weights that it names. Beside the files there is a log with a line for each
event. A process can be killed at the n-th operation of its storage after an event, before or after the operation.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import forebay
from forebay import Batch, Budgets, ReplayBuffer, ReplayBufferConfig, RolloutLoader, RolloutState, Task
from forebay.buffer.internal import internals
from forebay.errors import EngineError
from forebay.loader.store import StorageLike
from forebay.testing.simulate import check_ledger
from tests.crash.manager_child import MAX_TRIES, PROMPTS, SAMPLES, TASKS, Trained, accepted, fails, score
from tests.processes import HANG_S

BATCH, SAVE_EVERY, KEEP = 4, 3, 2
LEASE_S = 3.0
"""Of stores that several processes share: the trainer that is started next waits for it."""


class Doom(NamedTuple):
    """Kill this process at an operation of its storage, counted from the n-th `event`; at the event itself if 0."""

    event: str = "started"
    number: int = 1
    operation: int = 0
    after: bool = False

    @classmethod
    def parsed(cls, text: str) -> Doom:
        event, number, operation, after = text.split(":")
        return cls(event, int(number), int(operation), after == "after")

    def __str__(self) -> str:
        return f"{self.event}:{self.number}:{self.operation}:{'after' if self.after else 'before'}"


class Log:
    """Lines that are in the file when `write` returns. Each is an event, which may be the last one."""

    def __init__(self, directory: Path, doom: Doom | None) -> None:
        self._doom = doom
        self._events = 0
        self._operations: int | None = None  # since the event of the doom
        self._descriptor = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.listeners: list[Callable[[str], None]] = []

    def write(self, event: str, *words: object) -> None:
        os.write(self._descriptor, f"{' '.join(map(str, (event, *words)))}\n".encode())
        if self._doom is not None and event == self._doom.event:
            self._events += 1
            if self._events == self._doom.number:
                self._operations = 0
                if not self._doom.operation:
                    _kill()
        for listener in self.listeners:
            listener(event)

    def counts(self) -> bool:
        """Count an operation of the storage; whether it is the last one."""
        if self._doom is None or self._operations is None:
            return False
        self._operations += 1
        return self._operations == self._doom.operation

    @property
    def kills_after(self) -> bool:
        return self._doom is not None and self._doom.after


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def count_operations(kind: type[Any], method: str, log: Log) -> None:
    """Have every call of a method count, and the last one kill the process."""
    original = getattr(kind, method)

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        last = log.counts()
        if last and not log.kills_after:
            _kill()
        result = original(*args, **kwargs)
        if last:
            _kill()
        return result

    @functools.wraps(original)
    async def counted_coroutine(*args: Any, **kwargs: Any) -> Any:
        last = log.counts()
        if last and not log.kills_after:
            _kill()
        result = await original(*args, **kwargs)
        if last:
            _kill()
        return result

    setattr(kind, method, counted_coroutine if asyncio.iscoroutinefunction(original) else counted)


def open_store(url: str, log: Log) -> StorageLike:
    """The storage that a URL names, `ray:name` included, with its operations counted."""
    if url == "memory":
        from forebay.storage.local.storage import LocalStorage

        count_operations(LocalStorage, "_finish", log)
        return url
    if url.startswith("sqlite:"):
        from forebay.storage.sqlite.writer import Writer

        count_operations(Writer, "_commit", log)
        return url
    if url.startswith("ray:"):
        import ray

        from forebay.ray import RayReplayBuffer
        from forebay.ray.client.storage import RayStorage

        count_operations(RayStorage, "_run", log)
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.ERROR)
        return RayReplayBuffer.connect(url.removeprefix("ray:"))
    from forebay.storage.postgres.connections import Connections

    count_operations(Connections, "step", log)
    return ReplayBufferConfig(policy="staleness", storage=url, lease_s=LEASE_S)


# --- weights ------------------------------------------------------------------------------------------


class Weights:
    """What a model was trained on, in memory and, by step, in files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.trained: Trained = {}
        self.in_engine: int | None = None  # None: those of an engine that was just started are not known

    def file(self, step: int) -> Path:
        return self._directory / f"weights-{step}.json"

    def save(self, step: int) -> None:
        part = self._directory / "weights.part"
        part.write_text(json.dumps({str(number): groups for number, groups in self.trained.items()}))
        part.replace(self.file(step))

    def load(self, step: int) -> None:
        """Into the trainer and into the engine."""
        content = json.loads(self.file(step).read_text())
        self.trained = {int(number): [(name, group) for name, group in groups] for number, groups in content.items()}
        self.in_engine = step

    def push(self, step: int) -> None:
        """From the trainer into the engine."""
        assert max(self.trained) == step
        self.in_engine = step


def groups_of(batch: Batch) -> list[tuple[str, int]]:
    return [(name, group[0].group_id or 0) for name in TASKS for group in batch.groups_by_task[name]]


# --- the program --------------------------------------------------------------------------------------


def make_tasks(weights: Weights, generate: Callable[[RolloutState], Any] | None = None) -> list[Task]:
    chance = random.Random()

    async def answer(state: RolloutState) -> None:
        """Two tokens, other work, two more; some answers fail."""
        assert weights.in_engine is not None, "generated before the weights were loaded"
        rollout_id = state.rollout_id or 0
        if state.response_ids is None:
            state.response_ids = [rollout_id, rollout_id]
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0)
        if fails(state.task_name or "", rollout_id, state.num_tries):
            raise EngineError("simulated")
        state.response_ids = [rollout_id] * 4
        state.response, state.finish_reason = f"answer to {rollout_id}", "stop"

    return [
        Task(
            name,
            [{"prompt": f"{name} question {number}"} for number in range(PROMPTS)],
            generate or answer,
            reward=lambda state: score(state.task_name or "", state.rollout_id or 0),
            group_size=SAMPLES,
            weight=weight,
            filters=(accepted,),
            max_tries=MAX_TRIES,
            over_issue=0.5,
            partial_rollout=True,
            budgets=Budgets(max_consecutive_failures=1_000, max_consecutive_rejections=1_000),
        )
        for name, weight in TASKS.items()
    ]


def make_loader(directory: Path, store: StorageLike, mode: Any, weights: Weights, **options: Any) -> RolloutLoader:
    return forebay.RolloutLoader(
        make_tasks(weights, options.pop("generate", None)),
        batch_groups=BATCH,
        max_staleness=1,
        mode=mode,
        storage=store,
        checkpoints=directory / "checkpoints",
        keep_checkpoints=KEEP,
        timeout_s=HANG_S,
        progress=None,
        **options,
    )


class Account(NamedTuple):
    """What a store says of a task."""

    line: dict[str, int]
    drawn: int
    held: list[int]


async def accounts_of(buffer: ReplayBuffer) -> dict[str, Account]:
    found = {}
    ledger = await buffer.ledger()
    check_ledger(ledger)
    for name in TASKS:
        drawn, _ = await internals(buffer).position(name)
        held = [record.group_id for record in await buffer.query({"task_name": name, "place": "buffered"})]
        found[name] = Account({key: int(n) for key, n in ledger.get(name, {}).items()}, drawn, held)
    return found


def check_store(loader: RolloutLoader, weights: Weights, step: int) -> None:
    """After a resume the store has trained what the weights have seen, and holds nothing of it."""
    assert sorted(weights.trained) == list(range(1, step + 1)), "the weights lack a step"
    seen = [identity for groups in weights.trained.values() for identity in groups]
    for name, account in loader._call(lambda: accounts_of(loader.native.buffer)).items():
        mine = {group_id for task_name, group_id in seen if task_name == name}
        line = account.line
        assert line.get("trained", 0) == len(mine), f"{name}: {len(mine)} groups are in the weights, but {line}"
        if not loader.native.buffer.storage.shared:  # others get back what a dead process held when its lease ends
            assert not line.get("leased"), f"{name}: leased after a resume: {line}"
        assert not mine & set(account.held), f"{name}: in the weights, and held: {mine & set(account.held)}"


def begin(loader: RolloutLoader, weights: Weights, log: Log) -> int:
    """Resume, or begin with untrained weights."""
    log.write("resuming")
    found = loader.resume(load=weights.load)
    weights.in_engine = found or 0
    log.write("resumed", found or 0, "from a checkpoint" if found is not None else "from nothing")
    check_store(loader, weights, found or 0)
    return found or 0


def train(loader: RolloutLoader, weights: Weights, log: Log, last: int | None) -> None:
    """The program of a user. Every other save is made in the body of the next batch, which is leased meanwhile."""
    start = begin(loader, weights, log)
    due: int | None = None
    for batch in loader.batches(start + 1, last):
        groups = groups_of(batch)
        assert len(groups) == BATCH
        log.write("training", batch.step)
        if due is not None:
            save(loader, weights, log, due)
            due = None
        weights.trained[batch.step] = groups
        log.write("trained", batch.step, *(f"{name}:{group_id}" for name, group_id in groups))
        loader.update_weights(weights.push)
        log.write("updated", batch.step)
        if batch.step % SAVE_EVERY == 0:
            due = batch.step
        if due is not None and (due % (2 * SAVE_EVERY) or due == last):
            save(loader, weights, log, due)
            due = None


def save(loader: RolloutLoader, weights: Weights, log: Log, step: int) -> None:
    """First the weights, then the loader."""
    weights.save(step)
    log.write("saving", step)
    loader.save(step)
    log.write("saved", step)


def report(loader: RolloutLoader, directory: Path) -> None:
    """Write what the store says, with nothing in flight."""

    async def accounts() -> dict[str, Account]:
        await loader.native.plane.pause_produce()
        return await accounts_of(loader.native.buffer)

    content = {name: account._asdict() for name, account in loader._call(accounts).items()}
    (directory / "accounts.json").write_text(json.dumps(content))


def main(directory: str, url: str, mode: str, last: str, doom: str = "") -> None:
    """Train up to a step; with a doom, until that."""
    logging.disable(logging.WARNING)  # simulated failures are no news
    log = Log(Path(directory), Doom.parsed(doom) if doom else None)
    weights = Weights(Path(directory))
    store = open_store(url, log)
    log.write("started")
    with make_loader(Path(directory), store, mode, weights) as loader:
        train(loader, weights, log, None if doom else int(last))
        report(loader, Path(directory))
    log.write("ended")
