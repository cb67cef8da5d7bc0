"""What the plane itself costs: producing with an engine that answers at once, and how soon a consumer has its batch.

Groups of 8 samples of 1,000 tokens (arrays), in memory: drawn, generated, rewarded, put, leased, acknowledged. Beside
it a bare loop: the same engine called with asyncio.gather and its results appended to a list. Latency: from the return
of `generate` of the last member to the waiting consumer holding its lease (the reference system polls once a second).

    python bench/produce_overhead.py [--quick]
"""

from __future__ import annotations

import asyncio
import statistics
import time

import numpy as np

from _harness import Verdict, arguments, quiet, table
from forebay import AgentLoop, AsyncProduceStrategy, AsyncReplayBufferConfig, NoProgress, RolloutState, Sampler, Status

SAMPLES, TOKENS, BATCH = 8, 1_000, 64
IDS, LOGPROBS = np.arange(TOKENS), np.full(TOKENS, -0.5, dtype=np.float32)


class Instant(AgentLoop):
    """Answers at once."""

    returned_at = 0.0

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        state.response_ids, state.logprobs, state.status = IDS, LOGPROBS, Status.COMPLETED
        state.response = "391"
        self.returned_at = time.perf_counter()
        return state


class Slow(Instant):
    """Answers after a moment, so that the consumer is waiting."""

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        await asyncio.sleep(0.002)
        return await super().generate(state, enable_partial_rollout=enable_partial_rollout)


def sampler() -> Sampler:
    prompts = [{"prompt": f"What is {number} times 23?", "prompt_ids": list(range(50))} for number in range(500)]
    return Sampler(prompts, group_size=SAMPLES)


async def through_forebay(steps: int) -> float:
    """CPU microseconds per group."""
    buffer = AsyncReplayBufferConfig().build()
    strategy = AsyncProduceStrategy(buffer, reward_fn=lambda state: 1.0, progress=NoProgress())
    engine, prompts = Instant(), sampler()
    start = time.thread_time()
    for step in range(1, steps + 1):
        await strategy.produce_batch(engine, prompts, BATCH, "math", train_step=step, model_step=step - 1)
        async with buffer.lease_batch({"math": BATCH}, train_step=step, timeout_s=0):
            pass
    return (time.thread_time() - start) / (steps * BATCH) * 1e6


async def through_a_list(steps: int) -> float:
    """The rival: CPU microseconds per group."""
    engine, done = Instant(), []
    start = time.thread_time()
    for _ in range(steps):
        groups = [
            [RolloutState(message=[{"role": "user", "content": "?"}]) for _ in range(SAMPLES)] for _ in range(BATCH)
        ]
        done.append(await asyncio.gather(*[engine.generate_group(group) for group in groups]))
        done.clear()
    return (time.thread_time() - start) / (steps * BATCH) * 1e6


async def latencies(batches: int) -> list[float]:
    """Milliseconds from the last answer to the consumer holding its batch."""
    buffer = AsyncReplayBufferConfig().build()
    strategy = AsyncProduceStrategy(buffer, reward_fn=lambda state: 1.0, progress=NoProgress())
    engine, prompts = Slow(), sampler()
    measured = []
    for step in range(1, batches + 1):
        producing = asyncio.ensure_future(
            strategy.produce_batch(engine, prompts, 4, "math", train_step=step, model_step=step - 1)
        )
        async with buffer.lease_batch({"math": 4}, train_step=step, timeout_s=60):
            measured.append((time.perf_counter() - engine.returned_at) * 1e3)
        await producing
    return measured


def main() -> None:
    options = arguments(__doc__)
    verdict = Verdict("produce_overhead", options)
    steps, rounds = (20, 5) if options.quick else (100, 7)
    ours = quiet([asyncio.run(through_forebay(steps)) for _ in range(rounds)])
    rival = quiet([asyncio.run(through_a_list(steps)) for _ in range(rounds)])
    waits = asyncio.run(latencies(100 if options.quick else 1_000))
    latency, worst = statistics.median(waits), statistics.quantiles(waits, n=100)[98]
    table(
        ["groups of 8", "CPU per group", "groups/s"],
        [
            ["Forebay: drawn to acknowledged", f"{ours:.0f} us", f"{1e6 / ours:,.0f}"],
            ["bare gather into a list", f"{rival:.0f} us", f"{1e6 / rival:,.0f}"],
            ["ratio", f"{ours / rival:.1f}x", ""],
        ],
    )
    print(f"last answer to the consumer's hands: median {latency:.2f} ms, 99th percentile {worst:.2f} ms\n")
    verdict.at_most("CPU per group of 8 (2,000 groups/s)", ours, 500, "us")
    verdict.at_most("last answer to batch", latency, 5, "ms")
    verdict.finish()


if __name__ == "__main__":
    main()
