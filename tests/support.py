"""What several tests share."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from forebay import AsyncBatch, BatchRequest, ReplayBuffer, RolloutState
from forebay.buffer.internal import internals
from forebay.testing import make_group

__all__ = ["calls_of", "closed_ledger", "turns"]


def calls_of(work: Callable[[], object]) -> int:
    """How many calls Python makes for something: a cost that every machine has in common."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


async def closed_ledger(buffer: ReplayBuffer, task_name: str = "math") -> dict[str, int]:
    """The ledger of a task without its zeros; all ledgers are closed, or the test fails."""
    for unit in ("tokens", "groups"):
        ledger = await buffer.ledger(tokens=unit == "tokens")
        for name, line in ledger.items():
            assert line["issued"] == sum(line.values()) - line["issued"], f"the ledger of {name} is open: {line} {unit}"
    return {name: n for name, n in ledger.get(task_name, {}).items() if n}


async def taken(request: BatchRequest) -> AsyncBatch:
    """A batch that was acknowledged at once."""
    async with request as batch:
        pass
    return batch


async def turns(n: int = 5) -> None:
    """Let everything that is ready run."""
    for _ in range(n):
        await asyncio.sleep(0)


async def draw(buffer: ReplayBuffer, n: int = 1, task_name: str = "math") -> list[list[RolloutState]]:
    """Issue n new prompts."""
    cursor, _ = await internals(buffer).position(task_name)
    prompts = [make_group(status="init") for _ in range(n)]  # type: ignore[arg-type]
    return (await internals(buffer).issue(prompts, task_name, cursor=cursor)).groups
