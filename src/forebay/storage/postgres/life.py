"""The life of a buffer in PostgreSQL, and what is read of it: who has it open, who wakes whom, what it holds.

What is done to groups is in `storage`, which builds on this.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, ClassVar, TypeVar

from forebay.core.ledger import Account, LedgerLine
from forebay.core.query import Node
from forebay.core.record import Record
from forebay.core.rollout import Status
from forebay.storage.base import Holding, Listener, Reaped, Settings, Storage, Usage
from forebay.storage.postgres import arriving, looking, owners
from forebay.storage.postgres.companion import EVERYTHING, Companion
from forebay.storage.postgres.connections import Connections, Step
from forebay.storage.postgres.schema import ensure_schema
from forebay.storage.postgres.transactions import READ, transaction
from forebay.storage.urls import checked_name

__all__ = ["PostgresLife"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_AGAIN_S = 0.5
_SLICE_GROUPS = 256
"""Groups that one transaction of a discard ends."""


class PostgresLife(Storage):
    """A buffer that is opened, closed and looked at."""

    shared: ClassVar[bool] = True
    durable: ClassVar[bool] = True

    def __init__(
        self, dsn: str, name: str = "forebay", *, max_connections: int = 8, connect_timeout_s: float = 10.0
    ) -> None:
        self.name = checked_name(name)
        self._connections = Connections(
            dsn, name, max_connections=max_connections, timeout_s=connect_timeout_s, committed=self._committed
        )
        self._settings = Settings()
        self._leases: dict[str, float | None] = {}
        self._gone: set[str] = set()  # owners that were closed
        self._listeners: list[Listener] = []
        self._companion: Companion | None = None
        self._newcomers = arriving.Newcomers()
        self._created = False
        self._store_id: str | None = None
        self._uses = 0
        self._streams = 0
        self._buffered = 0
        self._tasks: set[str] = set()  # all that were ever heard of here

    def __repr__(self) -> str:
        return f"<PostgresStorage {self.name!r}: {self._buffered} buffered groups>"

    @property
    def store_id(self) -> str | None:
        """Names this buffer in this database for good; known from the first use on."""
        return self._store_id

    # --- life ---------------------------------------------------------------------------------------

    async def open(self, owner: str, settings: Settings, lease_s: float | None) -> None:
        async with self._used():
            await self._connections.step(lambda step: owners.register(step, self.name, owner, settings, lease_s))
            self._settings = settings
            self._leases[owner] = lease_s
            self._gone.discard(owner)
            await self._look_at_usage()
            if self._companion is None:
                self._companion = Companion(
                    self.name, lambda: self._connections.connect(asynchronous=True), self._heard
                )
            companion = self._companion
            try:
                await companion.listening()
            except BaseException:
                self._leases.pop(owner, None)
                if self._companion is companion:
                    self._companion = None
                    await companion.stop()
                raise

    async def close(self, owner: str) -> None:
        async with self._used():
            self._leases.pop(owner, None)
            self._gone.add(owner)
            await self._connections.step(lambda step: owners.leave(step, owner))
            if not self._leases:
                self._streams = 0  # those that nobody read to their end

    def beat(self, owner: str) -> None:
        lease_s, companion = self._leases.get(owner), self._companion
        if lease_s is not None and companion is not None:
            companion.beat(owner, lease_s)

    async def reap(self) -> Reaped:
        async with self._used():
            async with self._connections.lend() as connection:
                known = await owners.look(connection)
                self._buffered = (await looking.usage(connection))[1]
            returned: dict[str, int] = {}
            pending = [other.left_s for other in known if other.left_s > 0]
            for late in known:
                if late.is_due:
                    released = await self._connections.step(partial(owners.bury, name=late.name))
                    for task_name, groups in (released or {}).items():
                        returned[task_name] = returned.get(task_name, 0) + groups
                    if released is None:
                        pending.append(_LOOK_AGAIN_S)  # it has a new deadline, which is not known here
                    else:
                        # It may have died before it could tell what it had done.
                        self._tell(EVERYTHING)
        return Reaped(returned, min(pending) if pending else None)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _heard(self, tasks: Collection[str] | None) -> None:
        """Others changed these tasks (None: any). In the companion's thread."""
        named = list(self._tasks) if tasks is None else tasks
        for listener in tuple(self._listeners):
            try:
                listener(named)
            except Exception:
                # What was stored is stored; a listener that fails is its owner's trouble, not the caller's.
                log.exception("listener_failed")

    def _tell(self, tasks: Collection[str] | None) -> None:
        self._heard(tasks)
        if self._companion is not None:
            self._companion.tell(tasks)

    def _committed(self, step: Step) -> None:
        """A step of this process was done: know it, wake those who wait here and elsewhere."""
        self._buffered = max(0, self._buffered + step.tally.buffered)
        if step.tasks:
            self._tasks |= step.tasks
            self._tell(list(step.tasks))

    @asynccontextmanager
    async def _used(self) -> AsyncIterator[None]:
        """Connected as long as somebody has it open, or an operation is under way."""
        self._uses += 1
        try:
            if not self._created:
                async with self._connections.lend() as connection:
                    self._store_id = await ensure_schema(connection, self.name)
                self._created = True
            yield
        finally:
            await self._leave()

    async def _leave(self) -> None:
        self._uses -= 1
        await self._disconnect_if_idle()

    def _end_stream(self) -> None:
        self._streams = max(0, self._streams - 1)

    async def _disconnect_if_idle(self) -> None:
        if not self._uses and not self._streams and not self._leases:
            companion, self._companion = self._companion, None
            if companion is not None:
                await companion.stop()
            await self._connections.close()

    async def _read(self, look: Callable[[Any], Awaitable[T]]) -> T:
        async with self._used(), self._connections.lend() as connection:
            return await look(connection)

    async def _look_at_usage(self) -> Usage:
        used, self._buffered = await self._read(looking.usage)
        return used

    # --- reads --------------------------------------------------------------------------------------

    async def count_statuses(
        self, tasks: Collection[str], statuses: Collection[Status]
    ) -> dict[str, dict[Status, int]]:
        return await self._read(lambda connection: looking.count_statuses(connection, tasks, statuses))

    async def available(self, tasks: Collection[str], status: Status) -> dict[str, int]:
        return await self._read(lambda connection: looking.available(connection, tasks, status))

    async def ledger(self, *, tokens: bool = False) -> dict[str, LedgerLine]:
        return await self._read(lambda connection: looking.ledger(connection, tokens))

    async def account(self, task_name: str) -> Account:
        return (await self._accounts(task_name)).get(task_name) or Account()

    async def accounts(self) -> dict[str, Account]:
        return await self._accounts(None)

    async def _accounts(self, task_name: str | None) -> dict[str, Account]:
        async def look(connection: Any) -> dict[str, Account]:
            async with transaction(connection, READ):
                return await looking.accounts(connection, task_name)

        accounts = await self._read(look)
        self._tasks |= accounts.keys()
        return accounts

    async def usage(self) -> Usage:
        return await self._look_at_usage()

    async def holdings(self) -> list[Holding]:
        return await self._read(looking.holdings)

    async def records(self, node: Node, limit: int | None) -> list[Record]:
        return await self._read(lambda connection: looking.records(connection, node, limit))

    def __len__(self) -> int:
        return self._buffered

    async def verify(self) -> Sequence[str]:
        """Where the counts and the rows disagree, as sentences; empty if all is well."""

        async def look(connection: Any) -> Sequence[str]:
            async with transaction(connection, READ):
                return await looking.disagreements(connection)

        return await self._read(look)
