"""What the loader costs: CPU time per batch, beside the manager that it composes, used directly.

Both run the same tasks, prompts, steps and weight updates in memory, with an engine that answers at once, in turns and
ahead. The order of the two alternates, and the medians of the CPU times are compared.

    python bench/loader.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from forebay import (
    AgentLoopManager,
    AsyncProduceStrategy,
    AsyncReplayBufferConfig,
    AsyncRolloutLoader,
    DisaggregatedAgentLoopManager,
    FunctionAgentLoop,
    ManagedTask,
    NoProgress,
    RolloutState,
    Sampler,
    SyncReplayBufferConfig,
    Task,
)

LIMIT = 1.1
GROUPS, MEMBERS, TOKENS = 32, 4, 256
Mode = Literal["in_turns", "ahead"]

_TOKENS = list(range(TOKENS))
_LOGPROBS = [-0.5] * TOKENS


async def answer(state: RolloutState) -> None:
    state.response_ids, state.logprobs = _TOKENS, _LOGPROBS


def score(state: RolloutState) -> float:
    return 1.0


PROMPTS = [{"prompt": f"question {number}", "prompt_ids": [number]} for number in range(1000)]


async def with_manager(mode: Mode, steps: int) -> int:
    config = SyncReplayBufferConfig() if mode == "in_turns" else AsyncReplayBufferConfig()
    async with config.build() as buffer:
        strategy = AsyncProduceStrategy(buffer, max_staleness=1, reward_fn=score, progress=NoProgress())
        sampler = Sampler(PROMPTS, group_size=MEMBERS)
        task = ManagedTask(name="math", sampler=sampler, agent_loop=FunctionAgentLoop(answer), strategy=strategy)
        trained = 0
        if mode == "in_turns":
            async with AgentLoopManager([task], buffer) as manager:
                for step in range(1, steps + 1):
                    async with manager.produce_batch(GROUPS, step, model_step=step - 1, timeout_s=3600) as batch:
                        trained += len(batch.groups)
            return trained
        async with DisaggregatedAgentLoopManager([task], buffer) as ahead:
            producer = asyncio.create_task(ahead.produce_loop(GROUPS))
            for step in range(1, steps + 1):
                async with ahead.get_batch(GROUPS, step, timeout_s=3600) as batch:
                    trained += len(batch.groups)
                await ahead.pause_produce()
                await ahead.continue_produce(step)
        await producer
        return trained


async def with_loader(mode: Mode, steps: int) -> int:
    task = Task("math", PROMPTS, answer, reward=score, group_size=MEMBERS)
    trained = 0
    async with AsyncRolloutLoader(task, batch_groups=GROUPS, max_staleness=1, mode=mode) as loader:
        async for batch in loader.batches(1, steps):
            trained += len(batch.groups)
            await loader.update_weights(lambda: None)
    return trained


def cpu_s(work: Callable[[Mode, int], Awaitable[int]], mode: Mode, steps: int) -> float:
    async def main() -> None:
        assert await work(mode, steps) == steps * GROUPS

    began = time.process_time()
    asyncio.run(main())
    return time.process_time() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds: within a minute")
    quick = parser.parse_args().quick
    steps, rounds = (25, 7) if quick else (100, 15)
    print(f"{steps} batches of {GROUPS} groups of {MEMBERS} x {TOKENS} tokens, {rounds} rounds, CPU time per batch\n")
    missed = []
    modes: tuple[Mode, ...] = ("in_turns", "ahead")
    for chosen in modes:
        for work in (with_manager, with_loader):
            cpu_s(work, chosen, 3)  # imports and first calls
        pairs = []
        for number in range(rounds):
            order = (with_manager, with_loader) if number % 2 else (with_loader, with_manager)
            times = {work: cpu_s(work, chosen, steps) for work in order}
            pairs.append((times[with_manager], times[with_loader]))
        manager, loader = (statistics.median(times) / steps * 1e3 for times in zip(*pairs, strict=True))
        ratio = statistics.median(mine / theirs for theirs, mine in pairs)
        print(f"{chosen:9} manager {manager:7.2f} ms   loader {loader:7.2f} ms   {ratio:.3f}x (at most {LIMIT}x)")
        if ratio > LIMIT:
            missed.append(f"{chosen} {ratio:.3f}x")
    print("FIGURES REACHED: all 2" if not missed else f"FIGURES MISSED: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
