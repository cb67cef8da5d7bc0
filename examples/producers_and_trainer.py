"""Producers and a trainer around one buffer: the walk of a group, and a ledger that closes.

Two tasks. Prompts are drawn (issued) by producers, "generated" by an engine that takes its time, sometimes fails, and
is sometimes interrupted; what it interrupted is drawn again. A trainer leases batches, trains for a moment,
acknowledges, and now and then "crashes", so that its batch comes back. Every few steps the weights change, and
what has become too old is expired and generated anew. Nothing here is a model: it shows where the data goes.

    python examples/producers_and_trainer.py [--steps 40] [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time

from forebay import AsyncReplayBufferConfig, ReplayBuffer, RolloutState, Sampler, Status

BATCH = {"math": 6, "code": 2}
SAMPLES = 4  # answers per prompt
SYNC_EVERY = 2  # train steps between two weight updates


class Engine:
    """Stands for an inference engine: it answers after a while, with the weights that it has then."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.model_step = 0

    async def generate(self, group: list[RolloutState]) -> None:
        """Answer what is not answered yet; one in ten groups is interrupted, one in fifty fails."""
        length = min(200, int(self.random.lognormvariate(3.0, 0.8)) + 1)
        await asyncio.sleep(length / 20_000)
        fate = self.random.random()
        for state in group:
            if state.status is Status.COMPLETED:
                continue
            state.response_ids = [self.random.randrange(1_000) for _ in range(length)]
            state.version_spans = ((self.model_step, length),)
            state.reward = {"score": self.random.random()}
            state.status = Status.COMPLETED if fate > 0.12 else Status.ABORTED if fate > 0.02 else Status.FAILED
            state.error_msg = "engine: no answer" if state.status is Status.FAILED else None


async def produce(buffer: ReplayBuffer, engine: Engine, task: str) -> None:
    """Draw a prompt (one that has to be generated again first), have it answered, put it back."""
    prompts = [{"prompt": f"{task} question {number}"} for number in range(1_000)]
    sampler = Sampler(prompts, prompt_repeat_k=SAMPLES).with_buffer(buffer)
    while True:
        (group,) = await sampler.draw(1, task)  # waits while the buffer is full
        await engine.generate(group)
        await buffer.put(group, task)


async def train(buffer: ReplayBuffer, engine: Engine, steps: int, chance: random.Random) -> None:
    started = time.monotonic()
    crashes = groups = 0
    for step in range(1, steps + 1):
        trained = False
        while not trained:
            try:
                async with buffer.lease_batch(BATCH, train_step=step, timeout_s=60) as lease:
                    await asyncio.sleep(0.002)  # the optimiser step
                    if chance.random() < 0.1:
                        raise RuntimeError("the trainer crashed")
                    groups += len(lease.groups)
                    staleness = max(state.seq_staleness for group in lease.groups for state in group)
                trained = True
            except RuntimeError:
                crashes += 1  # the batch is back in the buffer
        if step % SYNC_EVERY == 0:
            engine.model_step = step
        show_progress(step, steps, groups, staleness, time.monotonic() - started)
    print(
        f"\n{steps} steps in {time.monotonic() - started:.1f} s; the trainer crashed {crashes} times, and lost nothing"
    )


def show_progress(step: int, steps: int, groups: int, staleness: int, seconds: float) -> None:
    text = (
        f"step {step:>3}/{steps}  {groups:>4} groups trained  staleness {staleness}  {groups / seconds:,.0f} groups/s"
    )
    if sys.stdout.isatty():
        done = 24 * step // steps
        print(f"\r[{'#' * done}{'.' * (24 - done)}] {text}", end="", flush=True)
    elif step % 10 == 0 or step == steps:
        print(text)


async def run(steps: int, seed: int) -> None:
    buffer = AsyncReplayBufferConfig(max_groups=256).build()
    engine = Engine(seed)
    for task in BATCH:
        await buffer.set_limits(task, stale_threshold=2 * SYNC_EVERY)
    producers = [asyncio.create_task(produce(buffer, engine, task)) for task in ("math", "math", "math", "code") * 4]
    try:
        await train(buffer, engine, steps, random.Random(seed))
    finally:
        for producer in producers:
            producer.cancel()
        await asyncio.gather(*producers, return_exceptions=True)
        await report(buffer)
        await buffer.close()


async def report(buffer: ReplayBuffer) -> None:
    ledger = await buffer.ledger()
    print("\nThe ledger, in groups:")
    print("task  " + "".join(f"{name:>11}" for name in next(iter(ledger.values()))))
    for task, line in ledger.items():
        print(f"{task:<6}" + "".join(f"{groups:>11}" for groups in line.values()))
        total = sum(line.values()) - line["issued"]
        assert total == line["issued"], f"the ledger of {task} is open"
    print("It is closed: for every task, issued is the sum of all the others.")
    for task, reasons in (await buffer.reasons()).items():
        for reason, groups in reasons.items():
            print(f"{task}: {groups} groups left as '{reason}'")
    stats = await buffer.stats()
    for task in ledger:
        print(f"{task}: {stats[f'forebay/{task}/tokens/reset']:,} tokens were generated anew because they grew too old")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="train steps (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, failures and crashes (default: 0)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; expected at least 1")
    try:
        asyncio.run(run(options.steps, options.seed))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
