"""How long the plane keeps others waiting: a consumer for its batch, and new weights for a pause.

Wake-up: a disaggregated manager, on policy, so that the consumer is waiting when the last group of its batch lands;
from the return of `generate` of the batch's last member to the consumer's block running. Groups of 8 samples of 1,000
tokens (arrays) that take 1 ms to 5 ms per group of the batch, at random. The rival polls once a second, as the
reference system does.

Pause: 64 groups of 8 in flight in an engine that ends them 50 ms after it was asked to, with the tokens they have;
`pause_produce` and `continue_produce`, without these 50 ms: wall time, and CPU time of the loop's thread from the first
member's return on, which is what an idle machine would show. Beside it the same engine with a bare gather: waking
512 members and collecting what they return, with nothing kept of it.

    python bench/latency.py [--quick]
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time

import numpy as np

from _harness import Verdict, arguments, table
from forebay import (
    AgentLoop,
    AsyncProduceStrategy,
    AsyncReplayBufferConfig,
    DisaggregatedAgentLoopManager,
    ManagedTask,
    NoProgress,
    RolloutState,
    Sampler,
    Status,
)

SAMPLES, TOKENS = 8, 1_000
IN_FLIGHT, ENGINE_MS = 64, 50.0
POLL_S = 1.0
WAKE_UP_MS, PAUSE_MS = 5.0, 10.0
IDS, LOGPROBS = np.arange(TOKENS), np.full(TOKENS, -0.5, dtype=np.float32)


class Short(AgentLoop):
    """Answers after a moment, a random one for every group."""

    def __init__(self, longest_s: float) -> None:
        self.longest_s = longest_s
        self.returned_at: dict[int, float] = {}

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        group_id = state.group_id or 0
        await asyncio.sleep(random.Random(group_id).uniform(0.001, self.longest_s))
        state.response_ids, state.logprobs, state.response, state.status = IDS, LOGPROBS, "391", Status.COMPLETED
        self.returned_at[group_id] = time.perf_counter()
        return state


class Endless(AgentLoop):
    """Answers for ever; asked for a pause, it gives what it has after `ENGINE_MS`."""

    def __init__(self) -> None:
        self.generating = 0
        self.all_generate = asyncio.Event()
        self.first_return_cpu = 0.0  # of those that generate together

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        self.generating += 1
        if self.generating == IN_FLIGHT * SAMPLES:
            self.all_generate.set()
        await self.until_paused()
        await asyncio.sleep(ENGINE_MS / 1e3)
        if self.generating == IN_FLIGHT * SAMPLES:
            self.first_return_cpu = time.thread_time()
            self.all_generate.clear()
        self.generating -= 1
        state.response_ids, state.logprobs, state.response, state.status = IDS, LOGPROBS, "39", Status.ABORTED
        return state


def manager_of(agent_loop: AgentLoop, *, max_staleness: int, partial: bool) -> DisaggregatedAgentLoopManager:
    buffer = AsyncReplayBufferConfig().build()
    strategy = AsyncProduceStrategy(
        buffer,
        max_staleness=max_staleness,
        enable_partial_rollout=partial,
        reward_fn=lambda state: 1.0,
        progress=NoProgress(),
    )
    prompts = [{"prompt": f"What is {number} times 23?", "prompt_ids": list(range(50))} for number in range(500)]
    sampler = Sampler(prompts, group_size=SAMPLES)
    task = ManagedTask(name="math", sampler=sampler, agent_loop=agent_loop, strategy=strategy)
    return DisaggregatedAgentLoopManager(task, buffer)


# --- waking up ----------------------------------------------------------------------------------------


async def wake_ups_ms(batch_size: int, batches: int) -> list[float]:
    """From the last member's return to the consumer's block."""
    engine = Short(longest_s=0.005 * batch_size)
    manager = manager_of(engine, max_staleness=0, partial=False)
    producer = asyncio.create_task(manager.produce_loop(batch_size))
    measured = []
    for step in range(1, batches + 1):
        async with manager.get_batch(batch_size, step) as batch:
            now = time.perf_counter()
            last = max(engine.returned_at[group[0].group_id or 0] for group in batch.groups)
            measured.append((now - last) * 1e3)
        await manager.pause_produce()
        await manager.continue_produce(step)
    await manager.shutdown()
    await producer
    return measured


async def polled_ms(batches: int) -> list[float]:
    """The rival: look, and sleep a second if the batch is not there. Batches take up to two seconds."""
    measured = []
    for number in range(batches):
        engine = Short(longest_s=0.02)
        ready: list[list[RolloutState]] = []
        begins_s = random.Random(number).uniform(0.0, 2 * POLL_S)

        async def produce(
            engine: Short = engine, ready: list[list[RolloutState]] = ready, begins_s: float = begins_s
        ) -> None:
            await asyncio.sleep(begins_s)
            group = [RolloutState(message=[], group_id=0) for _ in range(SAMPLES)]
            ready.append(await engine.generate_group(group))

        producer = asyncio.create_task(produce())
        while not ready:  # noqa: ASYNC110 - this is what is measured
            await asyncio.sleep(POLL_S)
        measured.append((time.perf_counter() - engine.returned_at[0]) * 1e3)
        await producer
    return measured


# --- pausing ------------------------------------------------------------------------------------------


async def pauses_ms(rounds: int) -> tuple[list[float], list[float]]:
    """Of `pause_produce` and `continue_produce`, beyond what the engine takes: wall and CPU time."""
    engine = Endless()
    manager = manager_of(engine, max_staleness=2, partial=True)
    producer = asyncio.create_task(manager.produce_loop(IN_FLIGHT))
    wall, cpu = [], []
    for _ in range(rounds):
        await engine.all_generate.wait()
        start = time.perf_counter()
        await manager.pause_produce()
        await manager.continue_produce(0)
        wall.append((time.perf_counter() - start) * 1e3 - ENGINE_MS)
        cpu.append((time.thread_time() - engine.first_return_cpu) * 1e3)
    await manager.shutdown()
    await producer
    return wall, cpu


async def bare_pauses_ms(rounds: int) -> tuple[list[float], list[float]]:
    """The same engine and members, gathered into a list."""
    engine = Endless()
    wall, cpu = [], []
    for _ in range(rounds):
        groups = [[RolloutState(message=[]) for _ in range(SAMPLES)] for _ in range(IN_FLIGHT)]
        generating = asyncio.gather(*[engine.generate_group(group) for group in groups])
        await engine.all_generate.wait()
        start = time.perf_counter()
        await engine.pause()
        await generating
        await engine.resume()
        wall.append((time.perf_counter() - start) * 1e3 - ENGINE_MS)
        cpu.append((time.thread_time() - engine.first_return_cpu) * 1e3)
    return wall, cpu


def main() -> None:
    options = arguments(__doc__)
    verdict = Verdict("latency", options)
    batches = {4: 100, 64: 30} if options.quick else {4: 1_000, 64: 200}
    polls, rounds = (10, 50) if options.quick else (60, 500)
    wake_ups = {size: asyncio.run(wake_ups_ms(size, number)) for size, number in batches.items()}
    polled = asyncio.run(polled_ms(polls))
    pauses, pauses_cpu = asyncio.run(pauses_ms(rounds))
    bare, bare_cpu = asyncio.run(bare_pauses_ms(rounds))

    rival = statistics.median(polled)
    rows = []
    for size, measured in wake_ups.items():
        median = statistics.median(measured)
        ratio = f"{rival / median:,.0f}x"
        rows.append([f"get_batch of {size} groups", *shown(measured), f"< {WAKE_UP_MS:.0f} ms", ratio])
        verdict.at_most(f"wake-up, batch of {size}", median, WAKE_UP_MS, "ms")
    rows.append(["polling once a second", *shown(polled), "", ""])
    print("From the last group's return to the consumer's block")
    table(["", "median", "99th percentile", "asked", "polling/ours"], rows)

    print(f"Pause and continue with {IN_FLIGHT} groups of {SAMPLES} in flight, beyond the engine's {ENGINE_MS:.0f} ms")
    table(
        ["", "median", "99th percentile", "CPU", "asked"],
        [
            [
                "pause_produce + continue_produce",
                *shown(pauses),
                f"{statistics.median(pauses_cpu):.2f} ms",
                f"< {PAUSE_MS:.0f} ms",
            ],
            ["bare gather", *shown(bare), f"{statistics.median(bare_cpu):.2f} ms", ""],
        ],
    )
    verdict.at_most("pause beyond the engine", statistics.median(pauses), PAUSE_MS, "ms")
    verdict.finish()


def shown(measured: list[float]) -> list[str]:
    return [f"{statistics.median(measured):.2f} ms", f"{statistics.quantiles(measured, n=100)[98]:.2f} ms"]


if __name__ == "__main__":
    main()
