"""PostgresStorage: the contract of `storage.base`, one transaction for each operation.

An operation is a function of the same name: in `moves` if it changes something, in `reads` if not. Defined here are the
operations that need more than one step, or state of this process. The storage keeps no rows: all of them are in the
database, and `len` is as of the last read. It connects when it is first used and disconnects when its last owner
closes; it may then be used again, also on another event loop. If the server is away, operations raise
StorageUnavailable; when it is back, the storage continues.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, ClassVar, TypeVar

import asyncpg

from forebay.core.capacity import Settings
from forebay.core.ledger import Account, Clock, GroupEnd, Record, Row
from forebay.core.query import Node
from forebay.core.rollout import Status
from forebay.errors import BufferClosed, CursorMoved, DuplicateGroup, EpochMoved, LostLease, NoRoom
from forebay.storage.base import Arrival, Claim, Claimed, Draw, Listener, Operation, Purpose, Rows, Storage, Summary
from forebay.storage.idempotency import CALL, Answered, Call, CallMemory, Returned
from forebay.storage.payloads import fail_damaged, read_rows
from forebay.storage.postgres import accounts, claims, moves, owners, puts, reads
from forebay.storage.postgres.connections import READ, Connections, Work, transaction
from forebay.storage.postgres.notify import EVERYTHING, Notifier
from forebay.storage.postgres.schema import advisory_key, ensure_schema
from forebay.storage.postgres.step import Step
from forebay.storage.urls import checked_name
from forebay.storage.values import Content, Reaped, Snapshot

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_AGAIN_S = 0.5
"""When to look again for an owner that another process is reaping."""

_DISCARD_GROUPS = 256
"""Groups that one transaction of a discard ends."""

_REFUSALS = (CursorMoved, DuplicateGroup, EpochMoved, LostLease, NoRoom)


class PostgresStorage(Storage, CallMemory):
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
        self._leases: dict[str, float | None] = {}  # lease_s of the owners that are open here
        self._closed: set[str] = set()  # owners
        self._listeners: list[Listener] = []
        self._notifier: Notifier | None = None
        self._hand_ids = puts.HandIds()
        self._store_id: str | None = None
        self._uses = 0
        self._streams: set[reads.Stream] = set()
        self._buffered = 0
        self._tasks: set[str] = set()  # all that were ever named here
        self._drawn: dict[tuple[str, int], Record] = {}  # as they are in flight, by task and group id

    def __repr__(self) -> str:
        return f"<PostgresStorage {self.name!r}: {self._buffered} buffered groups>"

    @property
    def store_id(self) -> str | None:
        """Names this buffer in this database permanently; known from the first use on."""
        return self._store_id

    # --- opening and closing ------------------------------------------------------------------------

    async def open(self, owner: str, settings: Settings, lease_s: float | None) -> None:
        async with self._used():
            await self._connections.step(lambda step: owners.register(step, self.name, owner, settings, lease_s))
            self._connections.settings = settings
            self._leases[owner] = lease_s
            self._closed.discard(owner)
            await self.summary(())
            if self._notifier is None:
                self._notifier = Notifier(self.name, lambda: self._connections.connect(asynchronous=True), self._heard)
            notifier = self._notifier
            try:
                await notifier.listening()
            except BaseException:
                self._leases.pop(owner, None)
                if self._notifier is notifier:
                    self._notifier = None
                    await notifier.stop()
                raise

    async def present_settings(self) -> tuple[Settings, float | None] | None:
        """The settings and the longest `lease_s` that others have this buffer open with; None if nobody has."""
        connection = await self._connections.connect()
        try:
            return await owners.present_settings(connection)
        finally:
            await connection.close()

    async def close(self, owner: str) -> None:
        async with self._used():
            self._leases.pop(owner, None)
            self._closed.add(owner)
            await self._connections.step(lambda step: owners.leave(step, owner))
            self._drawn = {key: record for key, record in self._drawn.items() if record.owner != owner}
            if not self._leases:
                for stream in list(self._streams):  # those that were not read to the end
                    stream.end()

    def _check_owner(self, owner: str) -> None:
        if owner in self._closed:
            raise BufferClosed(f"{owner} was closed, and can no longer hold groups")

    def beat(self, owner: str) -> None:
        lease_s, notifier = self._leases.get(owner), self._notifier
        if lease_s is not None and notifier is not None:
            notifier.beat(owner, lease_s)

    async def reap(self) -> Reaped:
        async with self._used():
            async with self._connections.lend() as connection:
                late, next_s = await owners.next_deadline(connection)
            returned: dict[str, int] | None = {}
            if late:
                returned = await self._connections.step(owners.reap)
                if returned is None:
                    next_s = min(_LOOK_AGAIN_S, next_s or _LOOK_AGAIN_S)
            return Reaped(returned or {}, next_s)

    @asynccontextmanager
    async def _used(self) -> AsyncIterator[None]:
        """Connected while an owner has it open, or an operation or a stream is in progress."""
        self._uses += 1
        try:
            if self._store_id is None:
                self._store_id = await self._connections.step(lambda step: ensure_schema(step.connection, self.name))
            yield
        finally:
            self._uses -= 1
            await self._disconnect_if_idle()

    async def _disconnect_if_idle(self) -> None:
        if not self._uses and not self._streams and not self._leases:
            notifier, self._notifier = self._notifier, None
            if notifier is not None:
                await notifier.stop()
            if not self._uses:
                await self._connections.close()

    async def _perform(self, operation: Operation, /, *args: Any, **kwargs: Any) -> Any:
        if operation.changes:
            work = getattr(moves, operation.name)
            return await self._step(
                lambda step: work(step, *args, **kwargs), operation.name if operation.once else None
            )
        look = getattr(reads, operation.name)
        return await self._read(lambda connection: look(connection, *args, **kwargs))

    async def _read(self, look: Callable[[Any], Awaitable[T]]) -> T:
        async with self._used(), self._connections.lend() as connection:
            return await look(connection)

    async def _step(self, work: Work[T], remembered: str | None = None, **options: Any) -> T:
        """Run one step, once. `remembered`: the operation whose answer is remembered."""
        async with self._used():
            return await self._once(lambda: self._connections.step(_answering(work, remembered), **options))

    # --- wake-ups -----------------------------------------------------------------------------------

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _heard(self, tasks: Collection[str] | None) -> None:
        """Tasks changed (None: any). Also called in the notifier's thread."""
        named = list(self._tasks) if tasks is EVERYTHING else tasks
        for listener in tuple(self._listeners):
            try:
                listener(named)
            except Exception:
                # The change is stored; a failing listener concerns its owner, not the caller.
                log.exception("listener_failed")

    def _committed(self, step: Step) -> None:
        """After a step of this process: wake waiters here and elsewhere."""
        self._buffered = max(0, self._buffered + step.counters.buffered)
        self._tasks |= step.tasks
        tasks = EVERYTHING if step.wakes_all else list(step.tasks)
        if tasks is EVERYTHING or tasks:
            self._heard(tasks)
            if self._notifier is not None:
                self._notifier.tell(tasks)

    # --- calls that may be repeated -----------------------------------------------------------------

    async def _once(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Run an operation. If its call was answered by another process meanwhile, return that answer.

        An operation that collides with a group which did not exist when it looked runs again, and then finds the group.
        """
        call = CALL.get()
        for _ in range(10):
            try:
                return await attempt()
            except asyncpg.UniqueViolationError as error:
                refusal: Exception = error
                if error.table_name != "calls":
                    self._hand_ids.forget()
                    continue
            except _REFUSALS as error:
                refusal = error  # perhaps because of what this very call did
            found = None if call is None else await self.answer(call.client, call.sequence)
            if found is not None:
                answer: T = found.value
                return answer
            if not isinstance(refusal, asyncpg.UniqueViolationError):
                raise refusal
        return await attempt()

    async def answer(self, client: str, sequence: int) -> Answered | None:
        async with self._used():
            # A step: commits that are in doubt are resolved first, and their claims undone.
            found = await self._connections.step(lambda step: claims.answer(step, client, sequence))
        if isinstance(found, Exception):
            raise found
        return found

    async def forget(self, client: str) -> None:
        await self._read(lambda connection: claims.forget(connection, client))

    # --- arriving -----------------------------------------------------------------------------------

    async def issue(self, task_name: str, contents: Sequence[Content], draw: Draw) -> list[Record]:
        self._check_owner(draw.owner)
        frames = puts.Frames(contents)
        records = await self._step(
            lambda step: puts.issue(step, task_name, contents, frames, draw),
            "issue",
            lock=self._room if draw.share is not None or puts.is_bounded(self._connections.settings) else None,
        )
        if draw.owner in self._closed:  # closed meanwhile
            await self.release(draw.owner)
            self._check_owner(draw.owner)
        self._drawn |= {(record.task_name, record.group_id): record for record in records}
        return records

    @property
    def _room(self) -> int:
        """The lock of steps that check the capacity, or a share: they run one after the other."""
        return advisory_key(self.name, "room")

    async def put(self, arrivals: Sequence[Arrival], *, owner: str) -> list[Record]:
        if not arrivals:
            return []
        frames = puts.Frames([arrival.content for arrival in arrivals])
        async with self._used():
            return await self._once(lambda: self._put(arrivals, frames, owner))

    async def _put(self, arrivals: Sequence[Arrival], frames: puts.Frames, owner: str) -> list[Record]:
        settings = self._connections.settings
        by_hand = [arrival.task_name for arrival in arrivals if arrival.group_id is None]
        named = {arrival.group_id for arrival in arrivals if arrival.group_id is not None}
        hand_ids = iter(await self._hand_ids.take(self._connections, by_hand, named) if by_hand else ())
        group_ids = [next(hand_ids) if a.group_id is None else a.group_id for a in arrivals]
        drawn = [
            self._drawn.pop((a.task_name, group_id), None) for a, group_id in zip(arrivals, group_ids, strict=True)
        ]
        if puts.is_quick(arrivals, drawn, frames):
            known = [record for record in drawn if record is not None]
            work = partial(puts.put, arrivals=arrivals, group_ids=group_ids, frames=frames, owner=owner, drawn=known)
            with suppress(asyncpg.DivisionByZeroError):  # another process holds one by now: the step below says which
                return await self._connections.step(work, single=True)
        return await self._connections.step(
            _answering(lambda step: puts.put(step, arrivals, group_ids, frames, owner=owner), "put"),
            single=puts.is_single(arrivals, frames, settings),
            lock=self._room if puts.may_need_room(arrivals, settings) else None,
        )

    # --- claims -------------------------------------------------------------------------------------

    async def claim(self, claim: Claim) -> Claimed:
        self._check_owner(claim.owner)
        self._tasks |= claim.wants.keys()
        async with self._used():
            call = CALL.get()
            claimed = await self._once(lambda: self._claim(claim, call))
            if call is not None and not any((claimed.rows or {}).values()):  # perhaps this very call has claimed them
                found = await self.answer(call.client, call.sequence)
                claimed = claimed if found is None else found.value
            if claim.purpose is Purpose.DRAW:
                rows = [row.record for found in (claimed.rows or {}).values() for row in found]
                self._drawn |= {(record.task_name, record.group_id): record for record in rows}
            return claimed

    async def _claim(self, claim: Claim, call: Call | None) -> Claimed:
        async def undo(step: Step, claimed: Claimed | None) -> None:
            # If the answer was dropped, the client has seen it: it repeated the call elsewhere, and holds the groups.
            if claimed is None or not claimed.rows:
                return
            if call is None or await claims.retract(step.connection, call.client, call.sequence):
                await claims.undo(step, claimed.rows)

        settings, waiting = self._connections.settings, False
        # Claims by a user's policy look at the same groups: they run one after the other.
        lock = None if settings.choose is None else advisory_key(self.name, "choose")
        lock = lock if claim.share is None else self._room  # draws ask no policy
        while True:
            await self._connections.resolve_doubts()  # they may hold the groups that are wanted
            async with self._connections.lend() as connection:
                outlook = await claims.look(connection, claim)
            if not outlook.prepares and not outlook.is_worthwhile:
                return outlook.nothing()
            work = partial(claims.claim, claim=claim, outlook=outlook, waiting=waiting)
            try:
                claimed = await self._connections.step(work, undo, lock=lock)
            except claims.Damaged as found:
                await fail_damaged(self, self.name, found.errors)
                continue
            if claimed is None:
                waiting = True
                continue
            if claim.owner in self._closed:  # closed meanwhile
                await self._connections.step(partial(undo, claimed=claimed))
                self._check_owner(claim.owner)
            return claimed

    async def undo(self, claim: Claim, rows: Rows) -> None:
        call = CALL.get()

        async def work(step: Step) -> None:
            await claims.undo(step, rows)
            if call is not None:
                await claims.retract(step.connection, call.client, call.sequence)

        await self._step(work)

    # --- groups that were claimed, or are buffered --------------------------------------------------

    async def advance(self, clocks: Mapping[str, Clock]) -> None:
        async with self._used():
            async with self._connections.lend() as connection:
                known = await accounts.read(connection, clocks)
            if any(name not in known or known[name].advance(clock) for name, clock in clocks.items()):
                await self._connections.step(lambda step: accounts.advance(step, clocks))

    async def due(self, task_name: str, statuses: Collection[Status], limit: int) -> list[Row]:
        return await self._load(lambda connection: reads.due(connection, task_name, statuses, limit))

    async def discard(self, node: Node, reason: str) -> dict[str, int]:
        async with self._used():
            return await self._once(lambda: self._discard(node, reason))

    async def _discard(self, node: Node, reason: str) -> dict[str, int]:
        discarded: Counter[str] = Counter()
        async with self._connections.lend() as connection:
            uids = await moves.matching(connection, node)

        async def work(step: Step, start: int) -> dict[str, int]:
            found = await moves.discard_some(step, uids[start : start + _DISCARD_GROUPS], node, reason)
            if start + _DISCARD_GROUPS >= len(uids):
                step.answer(Returned("discard", dict(discarded + Counter(found))))
            return found

        for start in range(0, len(uids), _DISCARD_GROUPS):
            discarded.update(await self._connections.step(partial(work, start=start)))
        return dict(discarded)

    # --- ends and reads -----------------------------------------------------------------------------

    async def ends(self, owner: str, limit: int) -> list[tuple[int, GroupEnd]]:
        self._check_owner(owner)
        if not await self._read(lambda connection: connection.fetchval("SELECT EXISTS (SELECT FROM ends)")):
            return []
        return await self._step(lambda step: moves.ends(step, owner, limit))

    async def summary(
        self, tasks: Collection[str] | None = None, *, holdings: bool = False, owners: bool = False
    ) -> Summary:
        look = partial(reads.summary, tasks=tasks, holdings=holdings, owners=owners)
        summary, self._buffered = await self._read(look)
        self._tasks.update(tasks or (), summary.tasks)
        return summary

    async def read(self, uid: int) -> Row | None:
        rows = await self._load(lambda connection: reads.read(connection, uid))
        return rows[0] if rows else None

    async def _load(self, look: Callable[[Any], Awaitable[list[reads.Found]]]) -> list[Row]:
        """Rows with their payloads. Those that are damaged end as failed."""
        found = await self._read(look)
        frames = {record.uid: frame for record, frame in found if frame is not None}
        reading = await read_rows([record for record, _ in found], frames)
        await fail_damaged(self, self.name, reading.damaged)
        return reading.rows

    def __len__(self) -> int:
        return self._buffered

    async def verify(self) -> Sequence[str]:
        """Where the counts and the rows disagree, as sentences; empty if they agree."""

        async def look(connection: Any) -> Sequence[str]:
            async with transaction(connection, READ):
                return await reads.problems(connection)

        return await self._read(look)

    # --- streams ------------------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        async with self._used():
            connection = await self._connections.take()
            stream = reads.Stream(connection, self._streams.discard)
            self._streams.add(stream)
            try:
                with self._connections.watched(connection):
                    return await stream.snapshot()
            except BaseException:
                stream.end()
                raise

    async def restore(
        self, accounts: Mapping[str, Account], next_uid: int, next_timestamp_id: int, rows: AsyncIterable[Row]
    ) -> None:
        # A stream can be read once: a restore that the server rolled back is not repeated.
        await self._step(
            lambda step: puts.restore(step, accounts, next_uid, next_timestamp_id, rows), "restore", once=True
        )


def _answering(work: Work[T], operation: str | None) -> Work[T]:
    """A step that remembers what it returns as the answer of an operation, if that is given."""

    async def run(step: Step) -> T:
        result = await work(step)
        if operation is not None:
            step.answer(Returned(operation, result))
        return result

    return run
