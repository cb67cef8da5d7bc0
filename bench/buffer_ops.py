"""What the operations of a buffer cost, by the number of groups that it holds.

Groups of 8 samples of 1,000 tokens (ids, logprobs and mask as arrays; groups share them, so that a large buffer
fits into memory). CPU time: medians, of the faster half of five rounds. Beside Forebay a plain rival: a dict of
records that is scanned on every read.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from _harness import Verdict, arguments, cpu_us, duration, quiet, table
from _rival import ScanningBuffer
from forebay import FIFOReplayPolicy, ReplayBuffer, ReplayPolicy, RolloutState, StalenessReplayPolicy, Status

TASKS = ("math", "code", "chat", "tools")
SAMPLES, TOKENS, STEPS = 8, 1_000, 100
IDS = np.arange(TOKENS, dtype=np.int64)
LOGPROBS = np.zeros(TOKENS, dtype=np.float32)
MASK = np.ones(TOKENS, dtype=np.int8)
PROMPT = np.arange(200, dtype=np.int64)


def group(status: Status = Status.COMPLETED) -> list[RolloutState]:
    message = [{"role": "user", "content": "What is 17 times 23?"}]
    return [
        RolloutState(
            message=message,
            prompt_ids=PROMPT,
            response="391",
            response_ids=IDS,
            logprobs=LOGPROBS,
            response_mask=MASK,
            finish_reason="stop",
            reward={"score": 0.5},
            status=status,
        )
        for _ in range(SAMPLES)
    ]


async def fill(buffer: Any, groups: int) -> None:
    """Steps 0 to 99 in turn over four tasks, so that every step has a hundredth of each task."""
    for number in range(groups):
        await buffer.put(group(), TASKS[number % 4], model_step=(number // 4) % STEPS)


class Ops:
    """The measured operations; each leaves the buffer as full as it was."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    async def measure(self, rounds: int, repeat: int, refresh_groups: int) -> dict[str, float]:
        """Every operation in turn, several rounds over, so that a slow spell of the machine meets all of them."""
        figures: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, value in (await self._round(repeat, refresh_groups)).items():
                figures.setdefault(name, []).append(value)
        return {name: quiet(values) for name, values in figures.items()}

    async def _round(self, repeat: int, refresh_groups: int) -> dict[str, float]:
        buffer = self.buffer
        takes, batches, puts = [], [], []
        for _ in range(repeat):
            takes.append(await cpu_us(lambda: buffer.get(128, "math", Status.COMPLETED), 1))
            puts += [await self._put("math", number) for number in range(128)]
            batches.append(await cpu_us(lambda: buffer.take_batch(dict.fromkeys(TASKS, 32)), 1))
            puts += [await self._put(TASKS[number % 4], number) for number in range(128)]
        return {
            "get(128)": statistics.median(takes),
            "take_batch 4x32": statistics.median(batches),
            "count": await cpu_us(lambda: buffer.count("math", Status.COMPLETED), repeat * 10),
            "is_ready x4": await cpu_us(lambda: buffer.is_ready(dict.fromkeys(TASKS, 32)), repeat * 10),
            "count_statuses 4x7": await cpu_us(lambda: buffer.count_statuses(TASKS, list(Status)), repeat * 2),
            "put 8 samples": statistics.median(puts),
            "refresh per group": await self._refresh(refresh_groups),
        }

    async def _put(self, task_name: str, number: int) -> float:
        ready = group()
        return await cpu_us(lambda: self.buffer.put(ready, task_name, model_step=number % STEPS), 1)

    async def _refresh(self, groups: int) -> float:
        """A task of which half expires, beside everything else that is stored; per group that expires."""
        for model_step in (0, 10):
            for _ in range(groups):
                await self.buffer.put(group(), "ageing", model_step=model_step)
        thresholds = dict.fromkeys(TASKS, 1_000_000) | {"ageing": 5}
        start = time.thread_time_ns()
        expired = await self.buffer.refresh_staleness(task_stale_thresholds=thresholds, current_train_step=10)
        elapsed_us = (time.thread_time_ns() - start) / 1_000
        assert expired["ageing"] == groups, expired
        await self.buffer.get(groups, "ageing", Status.EXPIRED)
        await self.buffer.get(groups, "ageing", Status.COMPLETED)
        return elapsed_us / groups


async def longest_hold_ms(work: Callable[[], Awaitable[Any]]) -> tuple[float, float]:
    """The longest the loop was held while `work` ran: CPU time of the loop's thread, and wall time."""
    longest_cpu = longest_wall = 0.0
    done = False

    async def tick() -> None:
        nonlocal longest_cpu, longest_wall
        cpu, wall = time.thread_time(), time.perf_counter()
        while not done:
            await asyncio.sleep(0)
            now_cpu, now_wall = time.thread_time(), time.perf_counter()
            longest_cpu, longest_wall = max(longest_cpu, now_cpu - cpu), max(longest_wall, now_wall - wall)
            cpu, wall = now_cpu, now_wall

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0)
    await work()
    await asyncio.sleep(0)
    done = True
    await ticker
    return longest_cpu * 1_000, longest_wall * 1_000


async def holds(buffer: ReplayBuffer, groups: int) -> dict[str, tuple[float, float]]:
    """Operations that touch much, each beside a task that wants the loop. The collector is off: it has its own row."""
    batch = [group() for _ in range(1_024)]
    halved = dict.fromkeys(TASKS, STEPS // 2)
    gc.collect()
    gc.disable()
    try:
        return {
            "put_many 1,024": await longest_hold_ms(lambda: buffer.put_many(batch, "math", model_step=99)),
            "query of everything": await longest_hold_ms(lambda: buffer.query({"tags.none": "x"})),
            "take_batch 4x256": await longest_hold_ms(lambda: buffer.take_batch(dict.fromkeys(TASKS, 256))),
            "stats": await longest_hold_ms(buffer.stats),
            f"refresh of {groups // 2:,}": await longest_hold_ms(
                lambda: buffer.refresh_staleness(task_stale_thresholds=halved, current_train_step=STEPS)
            ),
        }
    finally:
        gc.enable()


async def run(sizes: list[int], quick: bool, verdict: Verdict) -> None:
    limits = {
        "get(128)": 1_000.0, "take_batch 4x32": 1_000.0, "count": 10.0, "is_ready x4": 100.0,
        "count_statuses 4x7": 100.0, "put 8 samples": 60.0, "refresh per group": 60.0,
    }  # fmt: skip
    policies: list[ReplayPolicy] = [FIFOReplayPolicy(), StalenessReplayPolicy()]
    for policy in policies:
        name = type(policy).__name__
        measured: dict[int, dict[str, float]] = {}
        for size in sizes:
            buffer = ReplayBuffer(policy)
            await fill(buffer, size)
            measured[size] = await Ops(buffer).measure(rounds=5, repeat=5, refresh_groups=256)
            if size == 100_000:
                gc.collect()
                start = time.thread_time()
                gc.collect()
                collector_ms = (time.thread_time() - start) * 1_000
                held = await holds(buffer, size)
            await buffer.close()
            del buffer
        rival_size = 10_000 if quick else 100_000
        rival = ScanningBuffer(by_staleness=isinstance(policy, StalenessReplayPolicy))
        await fill(rival, rival_size)
        rivals = await Ops(rival).measure(rounds=1, repeat=1 if quick else 3, refresh_groups=64)

        print(f"{name}: CPU time by the number of buffered groups (rival: {rival_size:,} groups)")
        rows = []
        for op, limit in limits.items():
            growth = measured[100_000][op] / measured[1_000][op]
            verdict.at_most(f"{name}/{op}", measured[100_000][op], limit, "us")
            verdict.at_most(f"{name}/{op}/growth", growth, 3.0, "x")
            rows.append(
                [op, *(duration(measured[size][op]) for size in sizes), f"{growth:.2f}x", duration(limit),
                 duration(rivals[op]), f"{rivals[op] / measured[rival_size][op]:,.1f}x"]
            )  # fmt: skip
        table(["operation", *(f"{size:,}" for size in sizes), "growth", "limit", "rival", "rival/ours"], rows)

        print(f"{name}: longest hold of the event loop at 100,000 groups (limit 20 ms)")
        table(["while", "CPU", "wall"], [[op, f"{cpu:.1f} ms", f"{wall:.1f} ms"] for op, (cpu, wall) in held.items()])
        for op, (cpu, _) in held.items():
            verdict.at_most(f"{name}/hold/{op}", cpu, 20.0, "ms")
        print(f"Python's collector, full collection: {collector_ms:.1f} ms (limit 100 ms)\n")
        verdict.at_most(f"{name}/collector", collector_ms, 100.0, "ms")


def main() -> None:
    options = arguments(__doc__)
    sizes = [1_000, 10_000, 100_000] if options.quick else [1_000, 10_000, 100_000, 1_000_000]
    verdict = Verdict("buffer_ops", options)
    asyncio.run(run(sizes, options.quick, verdict))
    verdict.finish()


if __name__ == "__main__":
    main()
