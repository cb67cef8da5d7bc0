"""The operations of a hosted storage: those of `table`, and streams through many calls.

Most operations run on the storage as they are. This file has the others: owners that come and leave, claims that may be
withdrawn by a caller that has gone, and snapshots and restores, whose rows travel in many calls.

A host in memory keeps groups as they came over the wire (`FrameStorage`), so that a group is encoded once, by the
producer, and decoded once, by the trainer. The frames of one put are slices of one piece of memory, which is freed with
the last of them. References in samples are kept beside the frame, and dropped with the row.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from forebay.codec.frame import decode_group
from forebay.core.capacity import Settings
from forebay.core.ledger import Account, Record, Row
from forebay.core.rollout import Group, Status, group_status
from forebay.errors import InvalidInput, LostLease
from forebay.ray.table import Operation
from forebay.ray.wire import Frame, Frames, Message
from forebay.storage.base import Claim, Claimed, Rows, Storage
from forebay.storage.idempotency import CALL, Answered, Call, CallMemory
from forebay.storage.local.engine import Engine
from forebay.storage.local.memory import MemoryStorage, MemoryTable
from forebay.storage.local.storage import LocalStorage
from forebay.storage.values import Content


class _FrameEngine(Engine):
    def _keep(self, record: Record, content: Content) -> Group:
        return content.group  # its reader gives it its identity

    def _status_of(self, row: Row) -> Status:
        frame = row.group
        assert isinstance(frame, Frame)
        return group_status(decode_group(frame.data, frame.references, checksum=False))

    def _handed(self, rows: list[Row]) -> list[Row]:
        return rows  # a frame never changes: no copy is needed


class FrameStorage(MemoryStorage):
    """MemoryStorage whose groups are frames."""

    def __init__(self) -> None:
        LocalStorage.__init__(self, _FrameEngine(lambda settings: MemoryTable(settings.order)))


UID_BITS = 40
"""Every shard numbers its groups in its own range: the bits above these are the number of the shard."""

_STREAM_BYTES = 4 << 20
_STREAM_ROWS = 512


class HostSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a host is made for. `settings` None: the first owner brings them."""

    name: str
    settings: Settings | None = None
    lease_s: float | None = None
    wait_places: int = 64
    shard: int = 0


class Book:
    """The calls of one client that are not confirmed yet."""

    def __init__(self) -> None:
        self.answers: dict[int, asyncio.Future[Message]] = {}
        self.claims: dict[int, Rows] = {}
        self.withdrawn: set[int] = set()  # claims that were withdrawn before they arrived
        self.owners: set[str] = set()
        self.confirmed = 0
        self.heard_at = time.monotonic()

    def confirm(self, sequence: int) -> None:
        """The client has seen all answers up to this one."""
        self.heard_at = time.monotonic()
        self.confirmed = max(self.confirmed, sequence)
        self.withdrawn = {number for number in self.withdrawn if number > sequence}
        for known in [number for number in self.answers if number <= sequence]:
            if self.answers[known].done():
                del self.answers[known]
                self.claims.pop(known, None)


class Exchange(Call, frozen=True):
    """The call that an operation runs for."""

    book: Book


class _Restore:
    """A restore in progress: rows arrive call after call."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.rows: asyncio.Queue[list[Row] | None] = asyncio.Queue(2)
        self.done: asyncio.Future[None]
        self.abandoned = False

    async def stream(self) -> AsyncIterator[Row]:
        while (rows := await self.rows.get()) is not None:
            for row in rows:
                yield row
        if self.abandoned:
            raise InvalidInput("the restore was given up by its client; nothing restored")

    async def hand(self, rows: list[Row] | None) -> None:
        """Pass rows (None: the end) to the storage, unless it has ended the restore."""
        passing = asyncio.ensure_future(self.rows.put(rows))
        await asyncio.wait((passing, self.done), return_when=asyncio.FIRST_COMPLETED)
        passing.cancel()


class Operations:
    """Runs operations on one storage. `poke` is called when there may be new deadlines."""

    def __init__(self, storage: Storage, spec: HostSpec, *, restarted: bool, poke: Callable[[], None]) -> None:
        self.storage = storage
        self.spec = spec
        self.owners: set[str] = set()
        self.streams: dict[str, tuple[AsyncGenerator[Row, None], str]] = {}
        self.restores: dict[str, _Restore] = {}
        self._poke = poke
        self._restarted = restarted
        self._memory = storage if isinstance(storage, CallMemory) else None
        self._frames = isinstance(storage, FrameStorage)
        self._opening = asyncio.Lock()

    async def run(self, operation: Operation, arguments: tuple[Any, ...], call: Exchange) -> Any:
        """Run an operation for a client: by a method of that name here, or else on the storage."""
        own = getattr(self, f"_run_{operation.name}", None)
        if own is not None:
            return await own(call, *arguments)
        if "owner" in operation.parameters:
            await self.welcome_back(arguments[operation.parameters.index("owner")])
        return await operation.call(self.storage, arguments)

    def next_group(self, frames: Frames) -> Group:
        """The next group of a call, as the storage keeps it."""
        frame = frames.next()
        return cast(Group, frame) if self._frames else decode_group(bytes(frame.data), frame.references)

    # --- answers that a durable storage remembers ---------------------------------------------------

    async def answer(self, client: str, sequence: int) -> Answered | None:
        """What a call returned, if a durable storage remembers it."""
        return None if self._memory is None else await self._memory.answer(client, sequence)

    async def forget(self, client: str) -> None:
        """Drop the remembered answers of a client."""
        if self._memory is not None:
            await self._memory.forget(client)

    # --- owners ---------------------------------------------------------------------------------------

    async def begin_uids(self) -> None:
        """Make an empty storage number its groups in the range of its shard."""
        first = (self.spec.shard << UID_BITS) + 1
        snapshot = await self.storage.snapshot()
        await snapshot.rows.aclose()
        if snapshot.next_uid < first and not snapshot.accounts:
            await self.storage.restore({}, first, snapshot.next_timestamp_id, _nothing())

    async def welcome_back(self, owner: str) -> None:
        """After a restart of the host, owners continue under their names."""
        if self._restarted and owner not in self.owners and self.spec.settings is not None:
            async with self._opening:
                if owner not in self.owners:
                    await self.storage.open(owner, self.spec.settings, self.spec.lease_s)
                    self.owners.add(owner)
                    self._poke()

    async def _run_open(self, call: Exchange, owner: str, settings: Settings, lease_s: float | None) -> str | None:
        if self.spec.settings is not None:
            settings = replace(settings, choose=self.spec.settings.choose)  # clients do not have the function
        await self.storage.open(owner, settings, lease_s)
        if not self.owners:
            await self.begin_uids()
        self.owners.add(owner)
        call.book.owners.add(owner)
        self._poke()
        return self.storage.store_id

    async def _run_close(self, call: Exchange, owner: str) -> None:
        await self.abandon(call.client)
        call.book.owners.discard(owner)
        if not call.book.owners and owner in self.owners:
            await self.forget(call.client)
        self.owners.discard(owner)
        await self.storage.close(owner)

    async def abandon(self, client: str) -> None:
        """End the streams and restores that a client has not finished."""
        for stream_id, (stream, holder) in list(self.streams.items()):
            if holder == client:
                del self.streams[stream_id]
                await stream.aclose()
        for restore_id, restore in list(self.restores.items()):
            if restore.client == client:
                del self.restores[restore_id]
                restore.done.cancel()
                await asyncio.wait((restore.done,))

    # --- claims ---------------------------------------------------------------------------------------

    async def _run_claim(self, call: Exchange, claim: Claim) -> Claimed:
        await self.welcome_back(claim.owner)
        claimed = await self.storage.claim(claim)
        rows = claimed.rows
        if rows is None or not any(rows.values()):
            return claimed
        if call.sequence in call.book.withdrawn:
            await self.storage.undo(claim, rows)
            return replace(claimed, rows=None)
        call.book.claims[call.sequence] = rows
        return claimed

    async def _run_withdraw(self, call: Exchange, sequence: int, claim: Claim) -> None:
        """Put back the groups of a claim whose caller has gone, also if the claim has yet to arrive."""
        rows = call.book.claims.pop(sequence, None)
        if rows is None:
            call.book.withdrawn.add(sequence)
            with suppress(LostLease):  # then they are already back
                stored = await self.answer(call.client, sequence)
                rows = None if stored is None else stored.value.rows
        if rows is not None:
            # As part of the claim's own call, whose answer is removed with it: a repeated withdrawal finds nothing.
            token = CALL.set(Call(call.client, sequence, call.confirmed))
            try:
                await self.storage.undo(claim, rows)
            finally:
                CALL.reset(token)

    # --- streams --------------------------------------------------------------------------------------

    async def _run_snapshot(self, call: Exchange) -> tuple[dict[str, Account], int, int, str]:
        snapshot = await self.storage.snapshot()
        stream_id = uuid.uuid4().hex
        self.streams[stream_id] = (snapshot.rows, call.client)
        return dict(snapshot.accounts), snapshot.next_uid, snapshot.next_timestamp_id, stream_id

    async def _run_stream(self, call: Exchange, stream_id: str) -> list[Row]:
        known = self.streams.get(stream_id)
        if known is None:
            raise InvalidInput("this snapshot no longer exists: its host was restarted, or it was closed")
        rows: list[Row] = []
        size = 0
        async for row in known[0]:
            rows.append(row)
            size += row.record.bytes
            if size >= _STREAM_BYTES or len(rows) >= _STREAM_ROWS:
                break
        if not rows:
            del self.streams[stream_id]
        return rows

    async def _run_end_stream(self, call: Exchange, stream_id: str) -> None:
        known = self.streams.pop(stream_id, None)
        if known is not None:
            await known[0].aclose()

    async def _run_restore(
        self, call: Exchange, accounts: dict[str, Account], next_uid: int, next_timestamp_id: int
    ) -> str:
        restore_id = uuid.uuid4().hex
        restore = self.restores[restore_id] = _Restore(call.client)
        restore.done = asyncio.ensure_future(
            self.storage.restore(accounts, next_uid, next_timestamp_id, restore.stream())
        )
        return restore_id

    async def _run_restore_rows(self, call: Exchange, restore_id: str, rows: list[Row]) -> bool:
        """Whether the storage takes more rows."""
        restore = self._restoring(restore_id)
        await restore.hand(rows)
        return not restore.done.done()

    async def _run_end_restore(self, call: Exchange, restore_id: str, complete: bool) -> None:
        restore = self._restoring(restore_id)
        restore.abandoned = not complete
        try:
            await restore.hand(None)
            await restore.done
        except InvalidInput:
            if complete:
                raise
        finally:
            del self.restores[restore_id]

    def _restoring(self, restore_id: str) -> _Restore:
        restore = self.restores.get(restore_id)
        if restore is None:
            raise InvalidInput("this restore no longer exists: its host was restarted; nothing was restored")
        return restore


async def _nothing() -> AsyncIterator[Row]:
    rows: tuple[Row, ...] = ()
    for row in rows:
        yield row
