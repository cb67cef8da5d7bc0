"""The plane of `examples/several_processes`, in a process that kills itself at a counted operation of its storage.

KILL_AT=n: at the n-th operation; KILL_AFTER=1: when it has been carried out and before its caller learns of it.
TRAINED=path: the trainer writes the groups of every batch there.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "several_processes"))

import plane

from forebay import AsyncRolloutLoader


def arm(kind: type[Any], method: str) -> None:
    """Have the process die at the n-th call of a method."""
    at, after = int(os.environ.get("KILL_AT", 0)), os.environ.get("KILL_AFTER") == "1"
    original, numbers = getattr(kind, method), itertools.count(1)

    async def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        number = next(numbers)
        if number == at and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = await original(self, *args, **kwargs)
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    if at:
        setattr(kind, method, counted)


def make_loader(checkpoints: Path | None = None) -> AsyncRolloutLoader:
    if os.environ["STORE"].startswith("ray:"):
        from forebay.ray import RayStorage

        arm(RayStorage, "_run")
    else:
        from forebay.storage.postgres.connections import Connections

        arm(Connections, "step")
    return plane.make_loader(checkpoints)


async def train(steps: int, checkpoints: Path, trained: Path) -> None:
    async def load_weights(step: int) -> None:
        for url in os.environ["ENGINES"].split(","):
            await asyncio.to_thread(plane.post, f"{url}/weights", {"step": step})

    async with make_loader(checkpoints) as loader:
        start = await loader.resume(load_weights)
        if start is None:
            await loader.update_weights(load_weights, 0)
            await loader.save(0)
        async for batch in loader.batches((start or 0) + 1, steps):
            spans = [span for group in batch.groups for state in group for span in state.version_spans]
            line = {
                "step": batch.step,
                "groups": [group[0].group_id for group in batch.groups],
                "versions": sorted({version for version, _ in spans}),
            }
            with trained.open("a") as file:
                file.write(json.dumps(line) + "\n")
            await loader.update_weights(load_weights)
            await loader.save(batch.step)


if __name__ == "__main__":
    asyncio.run(train(int(sys.argv[1]), Path(sys.argv[2]), Path(os.environ["TRAINED"])))
