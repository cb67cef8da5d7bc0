"""PostgresStorage: the contract of `storage.base`, one transaction for each operation.

It keeps no rows: everything is in the database, and what this process knows (`len`) is as of its last look. It connects
when it is first used and disconnects when its last owner closes; it may then be used again, also on another event
loop. A server that is away is StorageUnavailable; when it is back, the storage goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, ClassVar, TypeVar

import asyncpg

from forebay.codec import encode_group
from forebay.errors import BufferClosed
from forebay.ledger import Account, Event, LedgerLine, Watermark
from forebay.query import Node
from forebay.record import Record, Row
from forebay.rollout import Status
from forebay.storage.base import (
    Arrival,
    Claim,
    Claimed,
    Content,
    Holding,
    Listener,
    Reaped,
    Revision,
    Settings,
    Snapshot,
    Storage,
    Usage,
)
from forebay.storage.postgres import arriving, claiming, leaving, looking, owners, streams
from forebay.storage.postgres import watermarks as marks
from forebay.storage.postgres.companion import EVERYTHING, Companion
from forebay.storage.postgres.connections import Connections, Step
from forebay.storage.postgres.schema import checked_name, ensure_schema
from forebay.storage.postgres.transactions import READ, transaction

__all__ = ["PostgresStorage"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_AGAIN_S = 0.5
_SLICE_GROUPS = 256
"""Groups that one transaction of a discard ends."""


class PostgresStorage(Storage):
    """Groups in a PostgreSQL database, in a schema named like the buffer.

    `dsn` is what asyncpg connects to. A process uses at most `max_connections` at once, and one more to listen.
    """

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

    # --- moves --------------------------------------------------------------------------------------

    async def _room(self, step: Step, groups: int, size: int) -> None:
        await arriving.check_room(step, self.name, self._settings, looking.USAGE, groups, size)

    async def _anew(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat a step that met a group which was not there when it looked; then it finds it."""
        for _ in range(10):
            try:
                return await attempt()
            except asyncpg.UniqueViolationError:
                self._newcomers.forget()
        return await attempt()

    async def issue(
        self, task_name: str, contents: Sequence[Content], *, owner: str, cursor: int, source_state: bytes | None = None
    ) -> list[Record]:
        frames = arriving.Frames(contents)

        async def work(step: Step) -> list[Record]:
            return await arriving.issue(
                step,
                task_name,
                contents,
                frames,
                owner=owner,
                cursor=cursor,
                source_state=source_state,
                room=self._room,
            )

        self._check_owner(owner)
        async with self._used():
            records = await self._anew(lambda: self._connections.step(work))
            if owner in self._gone:  # closed meanwhile
                await self.release(owner)
                self._check_owner(owner)
            return records

    def _check_owner(self, owner: str) -> None:
        if owner in self._gone:
            raise BufferClosed(f"{owner} was closed, and can hold nothing any more")

    async def put(self, arrivals: Sequence[Arrival], *, owner: str) -> list[Record]:
        if not arrivals:
            return []
        frames = arriving.Frames([arrival.content for arrival in arrivals])
        async with self._used():
            return await self._anew(lambda: self._put(arrivals, frames, owner))

    async def _put(self, arrivals: Sequence[Arrival], frames: arriving.Frames, owner: str) -> list[Record]:
        by_hand = [arrival.task_name for arrival in arrivals if arrival.group_id is None]
        hand_ids = iter(await self._newcomers.take(self._connections, by_hand) if by_hand else ())
        group_ids = [next(hand_ids) if a.group_id is None else a.group_id for a in arrivals]
        if self._is_simple(arrivals, frames):
            task_name, contents = arrivals[0].task_name, [arrival.content for arrival in arrivals]
            return await self._connections.step(
                lambda step: arriving.put_new(step, task_name, group_ids, contents, frames), single=True
            )
        return await self._connections.step(
            lambda step: arriving.put(step, arrivals, group_ids, frames, owner=owner, room=self._room)
        )

    def _is_simple(self, arrivals: Sequence[Arrival], frames: arriving.Frames) -> bool:
        """Whether one statement is enough: new groups of one task, not many bytes, and nobody counts the room."""
        settings, task_name = self._settings, arrivals[0].task_name
        return (
            settings.max_groups is None
            and settings.max_bytes is None
            and all(a.group_id is None and not a.stale and a.task_name == task_name for a in arrivals)
            and not frames.large
        )

    async def claim(self, claim: Claim) -> Claimed | None:
        async def work(step: Step, waiting: bool) -> claiming.Done | None:
            return await claiming.claim(step, claim, self.name, self._settings, waiting=waiting)

        async def undo(step: Step, done: claiming.Done | None) -> None:
            await claiming.undo_claim(step, claim, done)

        self._check_owner(claim.owner)
        async with self._used():
            waiting = False
            while True:
                if claim.whole:
                    async with self._connections.lend() as connection:
                        if not await claiming.count_qualifying(connection, claim):
                            return None
                try:
                    done = await self._connections.step(partial(work, waiting=waiting), undo)
                except claiming.Damaged as found:
                    await self._fail(found.errors)
                    continue
                if done is None:
                    waiting = True
                    continue
                if claim.owner in self._gone:  # closed meanwhile
                    await self._connections.step(partial(undo, done=done))
                    self._check_owner(claim.owner)
                return done[1]

    async def settle(self, lease_id: str, uids: Sequence[int], event: Event, reason: str | None = None) -> None:
        async with self._used():
            await self._connections.step(
                lambda step: leaving.settle(step, lease_id, uids, event, reason, self._settings)
            )

    async def release(self, owner: str) -> dict[str, int]:
        async with self._used():
            return await self._connections.step(lambda step: leaving.release(step, owner))

    async def set_watermark(self, watermarks: Mapping[str, Watermark]) -> None:
        async with self._used():
            async with self._connections.lend() as connection:
                news = marks.news(await marks.read(connection, watermarks), watermarks)
            if news:
                await self._connections.step(lambda step: marks.advance(step, watermarks))

    async def due(self, task_name: str, statuses: Collection[Status], limit: int) -> list[Row]:
        return await self._load(lambda connection: looking.due(connection, task_name, statuses, limit))

    async def _load(self, look: Callable[[Any], Awaitable[list[looking.Found]]]) -> list[Row]:
        """Rows with their payloads. Those that are damaged end as failed."""
        async with self._used():
            async with self._connections.lend() as connection:
                found = await look(connection)
            reading = claiming.Reading()
            for record, frame in found:
                reading.add(record, frame)
            if reading.damaged:
                await self._fail(reading.damaged)
            return reading.rows

    async def _fail(self, damaged: Mapping[int, str]) -> None:
        for uid, error in damaged.items():
            log.error("payload_damaged buffer=%s uid=%d %s", self.name, uid, error)
        await self._connections.step(lambda step: leaving.fail_damaged(step, list(damaged)))

    async def revise(self, revisions: Sequence[Revision]) -> list[bool]:
        frames: list[bytes | None] = []
        for revision in revisions:
            frames.append(None if revision.content is None else encode_group(revision.content.group))
            await asyncio.sleep(0)
        async with self._used():
            return await self._connections.step(lambda step: leaving.revise(step, revisions, frames))

    async def discard(self, node: Node, reason: str) -> dict[str, int]:
        discarded: dict[str, int] = {}
        async with self._used():
            async with self._connections.lend() as connection:
                uids = await leaving.matching(connection, node)
            for start in range(0, len(uids), _SLICE_GROUPS):
                chosen = uids[start : start + _SLICE_GROUPS]
                for record in await self._connections.step(
                    partial(leaving.discard, uids=chosen, node=node, reason=reason)
                ):
                    discarded[record.task_name] = discarded.get(record.task_name, 0) + 1
        return discarded

    async def set_priority(self, priorities: Mapping[int, float]) -> int:
        async with self._used():
            return await self._connections.step(lambda step: leaving.set_priority(step, priorities))

    async def saved(self, model_step: int) -> None:
        async with self._used():
            await self._connections.step(lambda step: leaving.saved(step, model_step, self._settings.keep_trained))

    async def rewind(self, model_step: int) -> dict[str, int]:
        async with self._used():
            return await self._connections.step(lambda step: leaving.rewind(step, model_step))

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

    async def read(self, uid: int) -> Row | None:
        rows = await self._load(lambda connection: looking.read(connection, uid))
        return rows[0] if rows else None

    def __len__(self) -> int:
        return self._buffered

    async def verify(self) -> Sequence[str]:
        """Where the counts and the rows disagree, as sentences; empty if all is well."""

        async def look(connection: Any) -> Sequence[str]:
            async with transaction(connection, READ):
                return await looking.disagreements(connection)

        return await self._read(look)

    # --- streams ------------------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        async with self._used():
            connection = await self._connections.take()
            try:
                await connection.execute("SET idle_in_transaction_session_timeout = 0")  # its reader may be slow
                await connection.execute(READ)
                accounts = await looking.accounts(connection)
                numbers = await connection.fetchrow(
                    "SELECT u.last_value + u.is_called::int AS uid, a.last_value + a.is_called::int AS timestamp_id "
                    "FROM uids u, arrivals a"
                )
            except BaseException:
                self._connections.discard(connection)
                raise
            self._streams += 1
            stream = streams.Stream(self._connections, connection, self._end_stream)
            return Snapshot(accounts, numbers["uid"], numbers["timestamp_id"], stream.rows())

    async def restore(
        self, accounts: Mapping[str, Account], next_uid: int, next_timestamp_id: int, rows: AsyncIterable[Row]
    ) -> None:
        async with self._used():
            # A stream can be read once: what the server rolled back is not tried again.
            await self._connections.step(
                lambda step: streams.restore(step, accounts, next_uid, next_timestamp_id, rows), once=True
            )
            await self._look_at_usage()
