"""The process that kills itself: it draws, puts, leases, acknowledges and saves, and reports what it was promised.

Every line is written after the call returned ("did"), or before a call that may or may not happen ("try"). What the
parent finds after the kill must have every "did"; of the last "try" it may have all or nothing.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

from forebay import ReplayBuffer, RolloutState, StalenessReplayPolicy, Status
from forebay.buffer.internal import internals
from forebay.storage.sqlite import SQLiteStorage
from tests.doom import Doom

TASK = "math"


def answer(group_id: int) -> str:
    return f"answer to {group_id} " * (1 + group_id % 50)


async def work(directory: Path, seed: int, doom: Doom) -> None:
    choice = random.Random(seed)
    buffer = ReplayBuffer(StalenessReplayPolicy(), SQLiteStorage(directory / "store.db"), max_groups=40)
    step = seed * 1_000

    def report(word: str, verb: str, group_ids: list[int]) -> None:
        os.write(1, f"{word} {verb} {' '.join(map(str, group_ids))}\n".encode())
        doom.event()

    async def produce() -> None:
        while True:
            groups = await internals(buffer).redraw(choice.randint(0, 2), TASK)
            if not groups and len(buffer) < 30:
                number, _ = await internals(buffer).position(TASK)
                ids = [number, number + 1]
                prompts = [[RolloutState(message=[{"content": str(i)}]) for _ in range(2)] for i in ids]
                report("try", "issue", ids)
                groups = (await internals(buffer).issue(prompts, TASK, cursor=number)).groups
                report("did", "issue", ids)
            for group in groups:
                group_id = group[0].group_id or 0
                for state in group:
                    state.status, state.response, state.response_ids = Status.COMPLETED, answer(group_id), [1, 2]
                report("try", "put", [group_id])
                await buffer.put(group, TASK, model_step=step)
                report("did", "put", [group_id])
            await asyncio.sleep(0)

    async def train() -> None:
        nonlocal step
        while True:
            lease = await buffer.lease_batch({TASK: choice.randint(1, 4)}, train_step=step + 1)
            ids = [group[0].group_id or 0 for group in lease.groups]
            assert all(group[0].response == answer(i) for group, i in zip(lease.groups, ids, strict=True))
            if choice.random() < 0.2:
                await lease.nack()
                continue
            report("try", "ack", ids)
            await lease.ack()
            report("did", "ack", ids)
            step += 1
            if choice.random() < 0.1:
                await buffer.save(directory / "checkpoint", model_step=step)
                report("did", "save", [step])

    await asyncio.gather(*(produce() for _ in range(1)), train())


def main(directory: str, seed: str, events: str, calls: str) -> None:
    asyncio.run(work(Path(directory), int(seed), Doom(int(events), int(calls))))
