"""The trainer: leases batches that the producers fill, "trains", and gives the engines new weights.

    STORE=postgresql://... ENGINES=http://127.0.0.1:8001,http://127.0.0.1:8002 python trainer.py [--steps 60]

It may be killed and started again at any moment: with --checkpoints it continues after its last checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from plane import BATCH, make_manager, post

import forebay


async def train(steps: int, checkpoints: Path | None) -> None:
    engines = os.environ["ENGINES"].split(",")
    manager = make_manager()
    buffer = manager.replay_buffer

    async def load_weights(step: int) -> None:
        for url in engines:
            await asyncio.to_thread(post, f"{url}/weights", {"step": step})

    async with buffer, manager:
        done = 0
        if checkpoints is not None and (checkpoints / "manifest.json").exists():
            done = await manager.resume(checkpoints)
        await load_weights(done)
        await manager.continue_produce(done)
        for step in range(done + 1, steps + 1):
            async with manager.get_batch(BATCH, step, timeout_s=600) as batch:
                versions = sorted(
                    {span[0] for group in batch.groups for state in group for span in state.version_spans}
                )
                await asyncio.sleep(0.01)  # the optimiser step
            await manager.pause_produce()  # all producers have stopped, and their engines are idle
            await load_weights(step)
            await manager.continue_produce(step)
            if checkpoints is not None:
                await manager.save(checkpoints, step)
            print(f"step {step}: {len(batch.groups)} groups of the weights of steps {versions}", flush=True)
        ledger = (await manager.ledger())["sums"]
        print({name: groups for name, groups in ledger.items() if groups}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoints", type=Path, help="a directory for the checkpoint")
    options = parser.parse_args()
    try:
        asyncio.run(train(options.steps, options.checkpoints))
    except forebay.ForebayError as error:
        raise SystemExit(f"trainer: {error}") from None


if __name__ == "__main__":
    main()
