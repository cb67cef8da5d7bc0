"""Which strategy trains on what, and how fast: hours of training in virtual time.

Settings (the same for all): 200 steps of 64 groups; a data set of 5,000 prompts, a quarter of them with answers eight
times as long (lognormal lengths around 200 tokens, at most 4,096); an engine that decodes one batch's worth of
sequences at once, 100 tokens per second each, and needs 0.2 s to abort; 10 s of training per step; new weights after
every step. Groups of 8 samples (2 with --quick). Beside them the rival that drops what it aborts.

    python bench/strategies.py [--quick]

Asked for, of every default setting: the share of long prompts among the trained ones within 2 points of that in the
data set, and at most 10 steps between a prompt's issue and its training.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

from _harness import Verdict, arguments, table
from _reference_strategy import train_dropping
from forebay import AsyncReplayBufferConfig
from forebay.produce import AsyncProduceStrategy, NoProgress, ProduceStrategy, SyncProduceStrategy
from forebay.prompts.sampler import Sampler
from forebay.testing.simulate import SimulatedEngine, TrainingReport, run, train

STEPS, BATCH, PROMPTS, TRAIN_S = 200, 64, 5_000, 10.0

STRATEGIES: dict[str, tuple[type[ProduceStrategy], dict[str, Any]]] = {
    "sync": (SyncProduceStrategy, {}),
    "async, over-issue 1.0": (AsyncProduceStrategy, {"over_sample_threshold": 1.0}),
    "+ partial rollout": (
        AsyncProduceStrategy,
        {"over_sample_threshold": 1.0, "enable_partial_rollout": True, "max_staleness": 1},
    ),
    "+ tail batch of 64": (
        AsyncProduceStrategy,
        {
            "over_sample_threshold": 1.0,
            "enable_partial_rollout": True,
            "max_staleness": 1,
            "tail_batch_trigger_size": 64,
        },
    ),
}


def engine_for(samples: int) -> SimulatedEngine:
    return SimulatedEngine(seed=1, slots=BATCH * samples, abort_latency_s=0.2)


def simulate(kind: type[ProduceStrategy], options: dict[str, Any], samples: int) -> tuple[TrainingReport, float]:
    """The report of one strategy, and the share of long prompts in what it trained on."""

    async def main() -> tuple[TrainingReport, float]:
        buffer = AsyncReplayBufferConfig().build()
        engine = engine_for(samples)
        sampler = Sampler([{"prompt": f"question {number}"} for number in range(PROMPTS)], group_size=samples)
        strategy = kind(buffer, progress=NoProgress(), **options)
        report = await train(strategy, engine, sampler, steps=STEPS, batch_size=BATCH, train_s=TRAIN_S)
        return report, long_share(engine, report.group_ids)

    return run(main)


def long_share(engine: SimulatedEngine, group_ids: list[int]) -> float:
    return sum(map(engine.is_long, group_ids)) / len(group_ids)


def rival(samples: int) -> tuple[float, float, int]:
    """Of the one that drops: steps per hour, share of long prompts, prompts lost."""

    async def main() -> tuple[float, float, int]:
        engine = engine_for(samples)
        trained, drawn = await train_dropping(
            engine, steps=STEPS, batch_size=BATCH, samples=samples, over=1.0, train_s=TRAIN_S
        )
        hours = asyncio.get_running_loop().time() / 3600
        return STEPS / hours, long_share(engine, trained), drawn - len(trained)

    return run(main)


def main() -> None:
    options = arguments(__doc__)
    samples = 2 if options.quick else 8
    verdict = Verdict("strategies", options)
    dataset = long_share(engine_for(samples), list(range(STEPS * BATCH)))
    rows = []
    speed_of_sync = 0.0
    for name, (kind, settings) in STRATEGIES.items():
        report, long = simulate(kind, settings, samples)
        waited = max(max(step.waited_steps) for step in report.steps)
        producing_s = sum(step.produce_s + step.pause_s for step in report.steps)
        per_hour = STEPS * 3600 / report.elapsed_s
        speed_of_sync = speed_of_sync or per_hour
        rows.append(
            [
                name,
                f"{per_hour:.1f}",
                f"{per_hour / speed_of_sync:.2f}x",
                f"{100 * (1 - report.busy_s / (BATCH * samples * producing_s)):.0f} %",
                f"{100 * (1 - report.tokens_trained / report.tokens_generated):.0f} %",
                f"{statistics.mean(age for step in report.steps for age in step.staleness):.2f}",
                f"{100 * long:.1f} %",
                f"{waited}",
                f"{report.ledger['discarded'] + report.ledger['failed']}",
            ]
        )
        verdict.at_most(f"{name}: long prompts off by", 100 * abs(long - dataset), 2, "points")
        verdict.at_most(f"{name}: longest wait of a prompt", waited, 10, "steps")
    per_hour, long, lost = rival(samples)
    rows.append(
        [
            "rival: drops what it aborts",
            f"{per_hour:.1f}",
            f"{per_hour / speed_of_sync:.2f}x",
            "",
            "",
            "",
            f"{100 * long:.1f} %",
            "for ever",
            f"{lost}",
        ]
    )
    print(f"{STEPS} steps of {BATCH} groups of {samples}; {100 * dataset:.1f} % of the prompts are long\n")
    table(
        ["strategy", "steps/h", "to sync", "idle", "tokens lost", "staleness", "long", "max wait", "prompts lost"], rows
    )
    verdict.finish()


if __name__ == "__main__":
    main()
