"""The trainer: gets batches that the producers fill, "trains", and gives the engines new weights.

    STORE=postgresql://... ENGINES=http://127.0.0.1:8001,http://127.0.0.1:8002 python trainer.py [--steps 60]

It may be killed and started again at any moment: with --checkpoints it continues after its last checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from plane import make_loader, post

import forebay


async def load_weights(step: int) -> None:
    for url in os.environ["ENGINES"].split(","):
        await asyncio.to_thread(post, f"{url}/weights", {"step": step})


async def train(steps: int, checkpoints: Path | None) -> None:
    async with make_loader(checkpoints) as loader:
        start = None if checkpoints is None else await loader.resume(load_weights)
        if start is None:
            await loader.update_weights(load_weights, 0)  # begins the run: producers wait for this
        async for batch in loader.batches((start or 0) + 1, steps):
            versions = sorted({span[0] for group in batch.groups for state in group for span in state.version_spans})
            await asyncio.sleep(0.01)  # the optimiser step
            await loader.update_weights(load_weights)  # meanwhile all producers are paused, and their engines idle
            if checkpoints is not None:
                await loader.save(batch.step)
            print(f"step {batch.step}: {len(batch.groups)} groups of the weights of steps {versions}", flush=True)
        ledger = (await loader.ledger())["sums"]
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
