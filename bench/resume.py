"""Saving and resuming the whole plane: 10,000 groups buffered and 1,000 in flight, in memory, through a manager.

Groups of 8 samples: prompts of 200 tokens, responses of 1,000 (ids, logprobs and mask as arrays of their own). They get
there as in a run: drawn, generated and put by a disaggregated manager, whose engine then leaves the last 1,000
unanswered. Saved while they are in flight, and resumed by another manager; in full, and with `no_save_replay_buffer`.
Seconds are wall time, the fastest of the rounds. The longest hold of the event loop is measured as in `buffer_ops`: CPU
time of the loop's thread, and wall time beside it; the least of the rounds, the collector off.

The rival: pickle of the same groups, in one call, written with fsync, and loaded again. It holds the loop all the time.

    python bench/resume.py [--quick]
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from _harness import Verdict, arguments, duration, table
from buffer_ops import longest_hold_ms
from forebay import (
    AgentLoop,
    AsyncProduceStrategy,
    AsyncReplayBufferConfig,
    DisaggregatedAgentLoopManager,
    ManagedTask,
    NoProgress,
    ReplayBuffer,
    RolloutState,
    Sampler,
    Status,
)

SAMPLES, PROMPT_TOKENS, TOKENS = 8, 200, 1_000
STEPS = 10  # that are buffered; the one after them is in flight
HOLD_MS, SHARE = 20.0, 5.0
TASK = "math"
PROMPTS_ONLY = ", prompts only"
MB = 1e6


class Engine(AgentLoop):
    """Answers so many groups at once, and the others never."""

    def __init__(self, groups: int) -> None:
        self.all_there = asyncio.Event()
        self._groups = groups
        self._unanswered = groups // STEPS * SAMPLES
        self._random = np.random.default_rng(0)

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        if (state.group_id or 0) >= self._groups:
            self._unanswered -= 1
            if not self._unanswered:
                self.all_there.set()
            await self.until_paused()
            state.status = Status.ABORTED
            return state
        state.response_ids = self._random.integers(0, 150_000, TOKENS, dtype=np.int64)
        state.logprobs = -self._random.random(TOKENS, dtype=np.float32)
        state.response_mask = np.ones(TOKENS, dtype=np.int8)
        state.response, state.finish_reason, state.status = "391", "stop", Status.COMPLETED
        return state


def prompt_of(record: dict[str, Any]) -> RolloutState:
    prompt_ids = np.random.default_rng(record["number"]).integers(0, 150_000, PROMPT_TOKENS, dtype=np.int64)
    message = [{"role": "user", "content": f"What is {record['number']} times 23?"}]
    return RolloutState(message=message, prompt_ids=prompt_ids)


def plane(groups: int, buffer: ReplayBuffer) -> DisaggregatedAgentLoopManager:
    """A manager that runs ahead: so many groups get buffered, and the next batch, a tenth of it, is in flight."""
    strategy = AsyncProduceStrategy(buffer, max_staleness=STEPS, reward_fn=lambda state: 0.5, progress=NoProgress())
    dataset = [{"number": number} for number in range(2 * groups)]
    sampler = Sampler(dataset, group_size=SAMPLES, to_rollout_state=prompt_of)
    task = ManagedTask(name=TASK, sampler=sampler, agent_loop=Engine(groups), strategy=strategy)
    return DisaggregatedAgentLoopManager(task, buffer)


async def fill(manager: DisaggregatedAgentLoopManager, groups: int) -> asyncio.Task[None]:
    """Have the manager produce; its producer, when there is nothing more to come."""
    producer = asyncio.create_task(manager.produce_loop(groups // STEPS))
    engine = manager.tasks[TASK].agent_loop
    assert isinstance(engine, Engine)
    await asyncio.wait_for(engine.all_there.wait(), timeout=300)
    line = (await manager.ledger())[TASK]
    assert (line["buffered"], line["in_flight"]) == (groups, groups // STEPS), line
    return producer


# --- measuring ----------------------------------------------------------------------------------------


class Best:
    """The least of every figure over the rounds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.holds: dict[str, tuple[float, float]] = {}

    def took(self, what: str, seconds: float) -> None:
        self.seconds[what] = min(seconds, self.seconds.get(what, seconds))

    async def run(self, what: str, timed: Callable[[], Awaitable[Any]], held: Callable[[], Awaitable[Any]]) -> None:
        """Time it once by itself, and once beside a task that wants the loop."""
        gc.collect()
        gc.disable()
        try:
            start = time.perf_counter()
            await timed()
            self.took(what, time.perf_counter() - start)
            found = await longest_hold_ms(held)
        finally:
            gc.enable()
        self.holds[what] = min(found, self.holds.get(what, found))


async def emptied(groups: int) -> DisaggregatedAgentLoopManager:
    """Another manager like the first, on a buffer of its own that is open."""
    manager = plane(groups, AsyncReplayBufferConfig().build())
    await manager.ledger()
    return manager


async def check(manager: DisaggregatedAgentLoopManager, groups: int, *, prompts_only: bool) -> None:
    """Everything is there again, what was in flight as something to be generated."""
    statuses = (Status.COMPLETED, Status.ABORTED, Status.INIT)
    counts = (await manager.replay_buffer.count_statuses((TASK,), statuses))[TASK]
    in_flight = groups // STEPS
    expected = (0, 0, groups + in_flight) if prompts_only else (groups, in_flight, 0)
    assert tuple(counts[status] for status in statuses) == expected, counts
    assert manager.next_train_step == 1, manager.progress


async def ours(
    source: DisaggregatedAgentLoopManager, groups: int, path: Path, rounds: int, best: Best, *, prompts_only: bool
) -> int:
    """Save and resume; the bytes of the checkpoint."""
    suffix = PROMPTS_ONLY if prompts_only else ""

    async def save() -> None:
        await source.save(path, 0, no_save_replay_buffer=prompts_only)

    await save()
    size = bytes_of(path)  # before the next save, which keeps this one beside its own
    for _ in range(rounds):
        await best.run(f"save{suffix}", save, save)
        targets = [await emptied(groups), await emptied(groups)]
        timed, held = (partial(target.resume, path) for target in targets)
        await best.run(f"resume{suffix}", timed, held)
        for target in targets:
            await check(target, groups, prompts_only=prompts_only)
            await target.replay_buffer.close()
        del target, targets, timed, held
    shutil.rmtree(path)
    return size


def bytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


# --- the rival ----------------------------------------------------------------------------------------


async def groups_of(buffer: ReplayBuffer) -> list[tuple[RolloutState, ...]]:
    snapshot = await buffer.storage.snapshot()
    return [row.group async for row in snapshot.rows]


def pickled(groups: list[tuple[RolloutState, ...]], path: Path, rounds: int, best: Best) -> int:
    """Dump, write, fsync; read, load. The bytes of the file."""
    for _ in range(rounds):
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        data = pickle.dumps(groups, protocol=pickle.HIGHEST_PROTOCOL)
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        best.took("save, pickle", time.perf_counter() - start)
        del data
        start = time.perf_counter()
        loaded = pickle.loads(path.read_bytes())  # noqa: S301 - our own data, and only here
        best.took("resume, pickle", time.perf_counter() - start)
        assert len(loaded) == len(groups)
        del loaded
        gc.enable()
    size = path.stat().st_size
    path.unlink()
    return size


async def run(directory: Path, groups: int, rounds: int, verdict: Verdict) -> None:
    source = plane(groups, AsyncReplayBufferConfig().build())
    producer = await fill(source, groups)
    best = Best()
    full = await ours(source, groups, directory / "full", rounds, best, prompts_only=False)
    prompts = await ours(source, groups, directory / "prompts", rounds, best, prompts_only=True)
    plain = pickled(await groups_of(source.replay_buffer), directory / "groups.pickle", rounds, best)
    await source.shutdown()
    await producer

    print(f"{groups:,} groups of {SAMPLES} buffered, {groups // STEPS:,} in flight: the whole plane through a manager")
    sizes = {"": full, PROMPTS_ONLY: prompts, ", pickle": plain}
    rows = []
    for suffix, size in sizes.items():
        for verb in ("save", "resume"):
            what = f"{verb}{suffix}"
            seconds = best.seconds[what]
            cpu, wall = best.holds.get(what, (seconds * 1e3, seconds * 1e3))
            limit = f"<= {HOLD_MS:.0f} ms" if what in best.holds else ""
            ratio = f"{best.seconds[f'{verb}, pickle'] / seconds:.2f}x"
            rows.append(
                [what, duration(seconds * 1e6), f"{size / MB:,.1f} MB", f"{size / MB / seconds:,.0f} MB/s",
                 f"{cpu:.1f} ms", f"{wall:.1f} ms", limit, ratio]
            )  # fmt: skip
            if what in best.holds:
                verdict.at_most(f"hold/{what}", cpu, HOLD_MS, "ms")
    table(["operation", "seconds", "bytes", "rate", "held, CPU", "held, wall", "asked", "pickle/ours"], rows)
    share = 100 * prompts / full
    print(f"checkpoint with prompts only: {share:.2f} % of the full one (asked: under {SHARE:.0f} %)\n")
    verdict.at_most("prompts only", share, SHARE, "% of the full checkpoint")
    verdict.figures |= {name: {"value": value, "unit": "s"} for name, value in best.seconds.items()}
    verdict.figures |= {f"bytes{suffix}": {"value": size, "unit": "B"} for suffix, size in sizes.items()}
    verdict.finish()


def main() -> None:
    options = arguments(__doc__)
    verdict = Verdict("resume", options)
    groups = 1_000 if options.quick else 10_000
    with tempfile.TemporaryDirectory(prefix="forebay-resume-") as directory:
        asyncio.run(run(Path(directory), groups, 3, verdict))


if __name__ == "__main__":
    main()
