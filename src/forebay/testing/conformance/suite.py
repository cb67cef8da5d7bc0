"""The base of the conformance tests: a storage under test, and short names for the calls that they repeat."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from forebay.core.capacity import Settings, Usage
from forebay.core.ledger import Account, Record, Row, Tags, describe
from forebay.core.policy import FIFOReplayPolicy, ReplayPolicy
from forebay.core.query import parse
from forebay.core.rollout import RolloutState, Status
from forebay.storage.base import Arrival, Claim, Draw, Purpose, Rows, Storage, TaskSummary
from forebay.storage.values import Content
from forebay.testing.samples import make_group

S = TypeVar("S", bound="Suite")

ME, OTHER = "me", "other"
COMPLETED, ABORTED, EXPIRED, INIT = Status.COMPLETED, Status.ABORTED, Status.EXPIRED, Status.INIT


@contextmanager
def raises(kind: type[Exception], *parts: str) -> Iterator[None]:
    """AssertionError unless the block raises this error with all of these parts in its message."""
    try:
        yield
    except kind as error:
        found = str(error)
    else:
        raise AssertionError(f"{kind.__name__} was expected, and nothing was raised")
    assert all(part in found for part in parts), f"{parts} was expected in: {found}"


def content(group: Sequence[RolloutState], *, tags: Tags | None = None, priority: float | None = None) -> Content:
    return Content(tuple(group), describe(group), tags, priority)


def arrival(group: Sequence[RolloutState], task_name: str = "math", **more: Any) -> Arrival:
    tags, priority = more.pop("tags", None), more.pop("priority", None)
    return Arrival(
        task_name=task_name, content=content(group, tags=tags, priority=priority), group_id=group[0].group_id, **more
    )


def claim_of(n: int, *statuses: Status, purpose: Purpose = Purpose.TAKE, task_name: str = "math", **more: Any) -> Claim:
    lease = {"lease_id": "lease", "train_step": 5} if purpose is Purpose.LEASE else {}
    wants = {task_name: n}
    return Claim(wants=wants, statuses=statuses or (COMPLETED,), purpose=purpose, **{"owner": ME, **lease, **more})


class Store:
    """A storage with the calls that the tests repeat."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    async def put(self, *groups: Sequence[RolloutState], task_name: str = "math", **more: Any) -> list[Record]:
        arrivals = [arrival(group, task_name, **more) for group in groups]
        return await self.storage.put(arrivals, owner=ME)

    async def issue(self, n: int = 1, *, cursor: int = 0, task_name: str = "math", owner: str = ME) -> list[Record]:
        contents = [content(make_group(status=INIT)) for _ in range(n)]
        return await self.storage.issue(task_name, contents, Draw(owner, cursor))

    async def claim(self, n: int, *statuses: Status, task_name: str = "math", **more: Any) -> list[Row]:
        return (await self.claimed(claim_of(n, *statuses, task_name=task_name, **more)))[task_name]

    async def claimed(self, claim: Claim) -> Rows:
        rows = (await self.storage.claim(claim)).rows
        assert rows is not None
        return rows

    async def lease(self, n: int, lease_id: str = "lease", **more: Any) -> list[Row]:
        return await self.claim(n, purpose=Purpose.LEASE, lease_id=lease_id, whole=True, **more)

    async def count(self, status: Status = COMPLETED, task_name: str = "math") -> int:
        return (await self.summary(task_name)).statuses.get(status, 0)

    async def summary(self, task_name: str = "math") -> TaskSummary:
        return (await self.storage.summary((task_name,))).task(task_name)

    async def account(self, task_name: str = "math") -> Account:
        return (await self.summary(task_name)).account

    async def fresh(self, status: Status = COMPLETED, task_name: str = "math") -> int:
        return (await self.summary(task_name)).fresh.get(status, 0)

    async def usage(self) -> Usage:
        return (await self.storage.summary(())).usage

    async def line(self, task_name: str = "math", *, tokens: bool = False) -> dict[str, int]:
        """The ledger of a task without its zeros; closed, or the test fails."""
        line = (await self.summary(task_name)).line(tokens=tokens)
        assert line["issued"] == sum(line.values()) - line["issued"], f"G1: the ledger of {task_name} is open: {line}"
        return {name: n for name, n in line.items() if n}

    async def records(self, **query: Any) -> list[Record]:
        return await self.storage.records(parse(query), None)

    async def only(self, **query: Any) -> Record:
        records = await self.records(**query)
        assert len(records) == 1, records
        return records[0]


def uids(rows: Sequence[Row]) -> list[int]:
    return [row.record.uid for row in rows]


class Suite(ABC):
    """The base of every part of the suite."""

    lease_s = 1.0  # long for a test that waits, and short for a busy machine

    @abstractmethod
    def make_storage(self) -> Storage:
        """A new, empty storage that is not open yet."""

    def advance_clock(self, storage: Storage, seconds: float) -> None:
        """Let the storage's clock advance. By default by waiting; a storage with its own clock may be faster."""
        time.sleep(seconds)


def storage_test(
    policy: ReplayPolicy | None = None, **settings: Any
) -> Callable[[Callable[[S, Store], Awaitable[None]]], Callable[[S], None]]:
    """Make a test of a coroutine method. It gets a new storage with these settings; its ledgers close afterwards."""
    chosen = policy or FIFOReplayPolicy()

    def decorate(body: Callable[[S, Store], Awaitable[None]]) -> Callable[[S], None]:
        async def run(suite: S) -> None:
            storage = suite.make_storage()
            await storage.open(ME, Settings(order=chosen.order, choose=chosen.choose, **settings), None)
            try:
                await body(suite, Store(storage))
                for task_name in (await storage.summary()).tasks:
                    await Store(storage).line(task_name)
                    await Store(storage).line(task_name, tokens=True)
            finally:
                await storage.close(ME)

        def test(self: S) -> None:
            asyncio.run(run(self))

        return test

    return decorate
