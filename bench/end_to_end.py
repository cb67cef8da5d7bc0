"""Running ahead beats taking turns: wall time and reward at equal numbers of trained groups; and what the plane costs.

1. An engine that sleeps for its token time (two shared cores cannot show it with the real one, where trainer and
engine fight
   for them): colocated and sync against disaggregated with over-issue and partial rollout, long-tailed lengths, a
   training step that takes as long as a typical answer. Asked: at most 0.8 of the wall time.
2. The real tiny transformer of examples/tiny_grpo in both modes, same steps, same seeds: the mean reward of the last
ten steps
   (no worse than 0.05 below, which is the noise between seeds), and the wall time of both, for information.
3. The share of the wall time of the real disaggregated run that the event loop's thread spent computing: Forebay and
the glue of the agent
   loop; engine and trainer have threads of their own. Asked: under 2 %.

    python bench/end_to_end.py [--quick]
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Literal

from _harness import Verdict, arguments, table
from forebay import (
    AgentLoopManager,
    AsyncProduceStrategy,
    AsyncReplayBufferConfig,
    DisaggregatedAgentLoopManager,
    ManagedTask,
    NoProgress,
    Sampler,
    SyncProduceStrategy,
)
from forebay.testing.simulate import LongTail, SimulatedEngine

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from tiny_grpo.run import Outcome, Settings, run

BATCH, SAMPLES, TRAIN_S = 16, 4, 0.12
LENGTHS = LongTail(median=100, sigma=0.6, long_share=0.25, long_factor=6, max_tokens=1_500)


async def sleeping(steps: int, *, ahead: bool) -> float:
    """Seconds for so many steps with an engine that sleeps."""
    buffer = AsyncReplayBufferConfig().build()
    engine = SimulatedEngine(seed=1, lengths=LENGTHS, tokens_per_second=1_500, slots=BATCH * SAMPLES)
    options: dict[str, Any] = {"reward_fn": lambda state: 1.0, "progress": NoProgress()}
    strategy = (
        AsyncProduceStrategy(buffer, over_sample_threshold=0.5, enable_partial_rollout=True, max_staleness=1, **options)
        if ahead
        else SyncProduceStrategy(buffer, **options)
    )
    sampler = Sampler([{"prompt": f"question {number}"} for number in range(500)], group_size=SAMPLES)
    task = ManagedTask(name="math", sampler=sampler, agent_loop=engine, strategy=strategy)
    began = time.monotonic()
    if ahead:
        async with DisaggregatedAgentLoopManager([task], buffer) as manager:
            producer = asyncio.create_task(manager.produce_loop(BATCH))
            for step in range(1, steps + 1):
                async with manager.get_batch(BATCH, step, timeout_s=60):
                    await asyncio.sleep(TRAIN_S)
                await manager.pause_produce()
                engine.set_weights(step)
                await manager.continue_produce(step)
            seconds = time.monotonic() - began
        await producer
    else:
        async with AgentLoopManager([task], buffer) as turns:
            for step in range(1, steps + 1):
                async with turns.produce_batch(BATCH, step, model_step=step - 1):
                    await asyncio.sleep(TRAIN_S)
                engine.set_weights(step)
            seconds = time.monotonic() - began
    return seconds


async def learning(steps: int, seed: int, mode: Literal["in_turns", "ahead"]) -> tuple[Outcome, float, float]:
    """A real run: its outcome, seconds per step, and the share of them that the loop's thread computed."""
    marks: list[tuple[float, float]] = []

    def mark(*_: object) -> None:
        marks.append((time.monotonic(), time.thread_time()))

    outcome = await run(Settings(steps=steps, seed=seed, mode=mode), on_step=mark)
    wall, computed = (marks[-1][i] - marks[0][i] for i in (0, 1))
    return outcome, wall / (len(marks) - 1), computed / wall


def last_rewards(outcome: Outcome) -> float:
    return statistics.mean(value for record in outcome.records[-10:] for value in record.rewards.values())


def main() -> None:
    options = arguments(__doc__)
    verdict = Verdict("end_to_end", options)
    steps = 30 if options.quick else 150
    turns, ahead = asyncio.run(sleeping(steps, ahead=False)), asyncio.run(sleeping(steps, ahead=True))
    print(f"{steps} steps of {BATCH} groups of {SAMPLES}, an engine that sleeps for its token time\n")
    table(
        ["mode", "wall", "ratio"],
        [["colocated, sync", f"{turns:.1f} s", ""], ["disaggregated", f"{ahead:.1f} s", f"{ahead / turns:.2f}"]],
    )
    verdict.at_most("disaggregated / colocated, wall time", ahead / turns, 0.8, "")

    seeds, steps = ((0,), 40) if options.quick else ((0, 1, 2), 240)
    rows, gaps, shares = [], [], []
    for seed in seeds:
        sync, sync_s, _ = asyncio.run(learning(steps, seed, "in_turns"))
        free, free_s, share = asyncio.run(learning(steps, seed, "ahead"))
        gaps.append(last_rewards(sync) - last_rewards(free))
        shares.append(share)
        rows.append(
            [
                f"seed {seed}",
                f"{last_rewards(sync):.3f}",
                f"{last_rewards(free):.3f}",
                f"{1e3 * sync_s:.0f} ms",
                f"{1e3 * free_s:.0f} ms",
                f"{100 * share:.1f} %",
            ]
        )
    print(f"the tiny transformer, {steps} steps of 24 groups of 8\n")
    table(["", "reward, sync", "reward, ahead", "step, sync", "step, ahead", "loop's thread"], rows)
    verdict.at_most("reward of the last ten steps, behind sync by", statistics.mean(gaps), 0.05, "")
    verdict.at_most("share of wall time in the loop's thread", 100 * statistics.median(shares), 2, "%")
    verdict.finish()


if __name__ == "__main__":
    main()
