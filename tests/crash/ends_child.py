"""The process that is killed inside `on_group_end`: it takes groups for good, and writes down what it heard of.

Arguments: the directory, and the number of the event at which the process is killed before it wrote it down (0: none).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from forebay import GroupEnd, ReplayBuffer, Status
from forebay.storage.sqlite import SQLiteStorage
from forebay.testing import make_group

TASK = "math"
GROUPS = 3
"""That each process puts and takes."""


async def work(directory: Path, killed_at: int) -> None:
    events = 0

    def heard(event: GroupEnd) -> None:
        nonlocal events
        events += 1
        if events == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        with (directory / "heard").open("a") as file:
            file.write(f"{event.group_id}\n")
            file.flush()
            os.fsync(file.fileno())

    async with ReplayBuffer(storage=SQLiteStorage(directory / "store.db"), on_group_end=heard) as buffer:
        for _ in range(GROUPS):
            await buffer.put(make_group(), TASK)
        await buffer.get(GROUPS, TASK, Status.COMPLETED)


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1]), int(sys.argv[2])))
