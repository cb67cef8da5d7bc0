"""A loader and a trainer, without a model: the life cycle of a group, and a ledger that closes.

Two tasks. The loader draws prompts (issued) and has them "generated" by an engine that takes its time and sometimes
fails. The trainer gets batches, trains for a moment, and sometimes "crashes", so that its batch is given back and
handed out again. Every second step the weights change, and the loader runs ahead as far as they are fresh enough.

    python examples/producers_and_trainer.py [--steps 40] [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import time

from forebay import RolloutLoader, RolloutState, Task

SYNC_EVERY = 2  # train steps between two weight updates


class Engine:
    """Stands for an inference engine: it answers after a while, with the weights that it has then."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.model_step = self.failures = 0

    async def generate(self, state: RolloutState) -> None:
        """Answer one sample; one attempt in fifty fails."""
        length = min(200, int(self.random.lognormvariate(3.0, 0.8)) + 1)
        await asyncio.sleep(length / 20_000)
        if self.random.random() < 0.02:
            self.failures += 1
            raise RuntimeError("no answer")
        state.response_ids = [self.random.randrange(1_000) for _ in range(length)]
        state.version_spans = ((self.model_step, length),)

    def load_weights(self, step: int) -> None:
        self.model_step = step


def prompts(task: str) -> list[dict[str, str]]:
    return [{"prompt": f"{task} question {number}"} for number in range(1_000)]


def train(loader: RolloutLoader, engine: Engine, steps: int, chance: random.Random) -> None:
    started = time.monotonic()
    crashes = groups = 0
    while loader.next_step <= steps:
        try:
            for batch in loader.batches(end=steps):  # continues with the first step that was not acknowledged
                time.sleep(0.002)  # the optimiser step
                if chance.random() < 0.1:
                    raise RuntimeError("the trainer crashed")
                if batch.step % SYNC_EVERY == 0:
                    loader.update_weights(engine.load_weights)
                else:
                    batch.ack()
                groups += len(batch.groups)
                staleness = max(result.staleness_max or 0 for result in batch.task_results.values())
                show_progress(batch.step, steps, groups, staleness, time.monotonic() - started)
        except RuntimeError:
            crashes += 1  # the next batches() gives the batch back
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


def run(steps: int, seed: int) -> None:
    engine, rewards = Engine(seed), random.Random(seed)
    tasks = [
        Task(name, prompts(name), engine.generate, reward=lambda _: rewards.random(), group_size=4, weight=weight)
        for name, weight in (("math", 3), ("code", 1))
    ]
    loader = RolloutLoader(
        tasks, batch_groups=8, max_staleness=1, sync_weights_interval=SYNC_EVERY, max_groups=256, progress=None
    )
    with loader:
        train(loader, engine, steps, random.Random(seed))
        report(loader, engine)


def report(loader: RolloutLoader, engine: Engine) -> None:
    ledger = loader.ledger()
    print("\nThe ledger, in groups:")
    print("task  " + "".join(f"{name:>11}" for name in next(iter(ledger.values()))))
    for task, line in ledger.items():
        print(f"{task:<6}" + "".join(f"{groups:>11}" for groups in line.values()))
        total = sum(line.values()) - line["issued"]
        assert total == line["issued"], f"the ledger of {task} is open"
    print("It is closed: for every task, issued is the sum of all the others.")
    print(f"{engine.failures} attempts of the engine failed; their samples were generated again.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="train steps (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, failures and crashes (default: 0)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}; expected at least 1")
    logging.getLogger("forebay").setLevel(logging.ERROR)  # every failed attempt is a warning, and some are wanted here
    try:
        run(options.steps, options.seed)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
