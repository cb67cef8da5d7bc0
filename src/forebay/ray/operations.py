"""The operations of a hosted storage, by the names under which clients call them.

Each takes its checked arguments and the exchange that it is part of: the frames and objects that came, and those that
go back. They are the contract of `storage.base`, and add nothing to it but the way of a stream through many calls.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from forebay.codec.frame import decode_group
from forebay.core.ledger import Account, Event, GroupEnd
from forebay.core.record import Record, Row
from forebay.core.rollout import Group, Status
from forebay.errors import InvalidInput, LostLease
from forebay.ray import wire
from forebay.ray.frames import FrameStorage, add_to, framed
from forebay.ray.wire import Message, PackedFrames, Parcel, Request, RowHead
from forebay.storage.base import Arrival, Claim, Claimed, Content, Revision, Settings, Snapshot, Storage
from forebay.storage.idempotency import CALL, Call

__all__ = ["OPERATIONS", "UID_BITS", "Book", "Exchange", "HostSpec", "Operations"]

UID_BITS = 40
"""Every shard numbers its groups in a range of its own: the bits above tell the shard."""

_STREAM_BYTES = 4 << 20
_STREAM_ROWS = 512


class HostSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a host is made for. `settings` None: the first owner that comes brings them."""

    name: str
    settings: Settings | None = None
    lease_s: float | None = None
    wait_places: int = 64
    shard: int = 0


class Book:
    """The calls of one client that are not confirmed yet."""

    def __init__(self) -> None:
        self.answers: dict[int, asyncio.Future[Message]] = {}
        self.claims: dict[int, Claimed] = {}
        self.withdrawn: set[int] = set()
        """Claims that were undone before they came."""
        self.owners: set[str] = set()
        self.confirmed = 0
        self.heard_at = time.monotonic()

    def confirm(self, sequence: int) -> None:
        self.heard_at = time.monotonic()
        self.confirmed = max(self.confirmed, sequence)
        self.withdrawn = {number for number in self.withdrawn if number > sequence}
        for known in [number for number in self.answers if number <= sequence]:
            if self.answers[known].done():
                del self.answers[known]
                self.claims.pop(known, None)


class _Restore:
    """A restore under way: rows come in call after call."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.rows: asyncio.Queue[list[Row] | None] = asyncio.Queue(2)
        self.done: asyncio.Future[None] | None = None
        self.abandoned = False

    async def stream(self) -> AsyncIterator[Row]:
        while (rows := await self.rows.get()) is not None:
            for row in rows:
                yield row
        if self.abandoned:
            raise InvalidInput("the restore was given up by its client; nothing restored")


class Exchange:
    """One call while it is served: what came with it, and what goes back with its answer."""

    def __init__(self, request: Request, book: Book, frames: PackedFrames, objects: Sequence[Any]) -> None:
        self.request = request
        self.book = book
        self.frames = frames
        self.objects = objects
        self.parcel = Parcel()
        self.tasks: list[str] = []
        """Tasks of which the client wants to know whether something is due."""

    def rows(self, rows: Iterable[Row]) -> list[RowHead]:
        return [RowHead(row.record, *add_to(self.parcel, row.group)) for row in rows]

    def claimed(self, claimed: Claimed | None) -> dict[str, list[RowHead]] | None:
        if claimed is None:
            return None
        return {task_name: self.rows(rows) for task_name, rows in claimed.items()}


class Operations:
    """What can be asked of one storage. `poke` is called when there may be new deadlines."""

    def __init__(self, storage: Storage, spec: HostSpec, *, restarted: bool, poke: Callable[[], None]) -> None:
        self.storage = storage
        self.spec = spec
        self.owners: set[str] = set()
        self.streams: dict[str, tuple[AsyncGenerator[Row, None], str]] = {}
        self._poke = poke
        self._restarted = restarted
        self._frames = isinstance(storage, FrameStorage)
        self._restores: dict[str, _Restore] = {}
        self._opening = asyncio.Lock()

    async def begin_uids(self) -> None:
        """See to it that an empty storage numbers its groups as a shard does."""
        first = (self.spec.shard << UID_BITS) + 1
        snapshot = await self.storage.snapshot()
        await snapshot.rows.aclose()
        if snapshot.next_uid < first and not snapshot.accounts:
            await self.storage.restore({}, first, snapshot.next_timestamp_id, _nothing())

    async def welcome_back(self, owner: str) -> None:
        """After a restart owners go on under the name that they had."""
        if self._restarted and owner not in self.owners and self.spec.settings is not None:
            async with self._opening:
                if owner not in self.owners:
                    await self.storage.open(owner, self.spec.settings, self.spec.lease_s)
                    self.owners.add(owner)
                    self._poke()

    async def _open(self, args: wire.OpenArgs, call: Exchange) -> str | None:
        settings = Settings(
            order=args.order,
            choose=call.objects[0] if call.objects else None,
            max_groups=args.max_groups,
            max_bytes=args.max_bytes,
            expect_group_bytes=args.expect_group_bytes,
            keep_trained=args.keep_trained,
        )
        if self.spec.settings is not None:
            settings = replace(settings, choose=self.spec.settings.choose)  # the one that came with the host
        await self.storage.open(args.owner, settings, args.lease_s)
        if not self.owners:
            await self.begin_uids()
        self.owners.add(args.owner)
        call.book.owners.add(args.owner)
        self._poke()
        return self.storage.store_id

    async def abandon(self, client: str) -> None:
        """End what a client began and did not bring to its end."""
        for stream_id, (stream, holder) in list(self.streams.items()):
            if holder == client:
                del self.streams[stream_id]
                await stream.aclose()
        for restore_id, restore in list(self._restores.items()):
            if restore.client == client and restore.done is not None:
                del self._restores[restore_id]
                restore.done.cancel()
                await asyncio.wait((restore.done,))

    async def _close(self, owner: str, call: Exchange) -> None:
        client = call.request.client
        await self.abandon(client)
        call.book.owners.discard(owner)
        if not call.book.owners and owner in self.owners:
            await self.storage.forget(client)
        self.owners.discard(owner)
        await self.storage.close(owner)

    async def _release(self, owner: str, call: Exchange) -> dict[str, int]:
        return await self.storage.release(owner)

    async def _reap_now(self, args: None, call: Exchange) -> tuple[dict[str, int], float | None]:
        reaped = await self.storage.reap()
        return dict(reaped.returned), reaped.next_s

    async def _issue(self, args: Any, call: Exchange) -> list[Record]:
        task_name, heads, owner, cursor, source_state = args
        await self.welcome_back(owner)
        contents = [self._content(head, call) for head in heads]
        return await self.storage.issue(task_name, contents, owner=owner, cursor=cursor, source_state=source_state)

    async def _put(self, args: Any, call: Exchange) -> list[Record]:
        heads, owner = args
        arrivals = [
            Arrival(
                task_name=head.task_name,
                content=self._content(head.content, call),
                group_id=head.group_id,
                attempt=head.attempt,
                stale=head.stale,
                reason=head.reason,
                reset_tokens=head.reset_tokens,
            )
            for head in heads
        ]
        call.tasks = [arrival.task_name for arrival in arrivals]
        return await self.storage.put(arrivals, owner=owner)

    def _content(self, head: wire.ContentHead, call: Exchange) -> Content:
        group = self._group(head.size, head.references, call)
        return Content(group, head.facts, head.tags, head.priority)

    def _group(self, size: int, references: int, call: Exchange) -> Group:
        start = call.frames.offset
        data, refers = call.frames.next(size, references)
        return framed(data, start, refers) if self._frames else decode_group(bytes(data), refers)

    async def _claim(self, claim: Claim, call: Exchange) -> dict[str, list[RowHead]] | None:
        await self.welcome_back(claim.owner)
        call.tasks = list(claim.wants)
        if claim.watermarks:
            await self.storage.set_watermark(claim.watermarks)
        claimed = await self.storage.claim(claim)
        if claimed is not None and call.request.sequence in call.book.withdrawn:
            await self.storage.undo(claim, claimed)
            return None
        if claimed is not None and any(claimed.values()):
            call.book.claims[call.request.sequence] = claimed
        return call.claimed(claimed)

    async def _undo(self, args: tuple[int, Claim], call: Exchange) -> None:
        sequence, claim = args
        claimed = call.book.claims.pop(sequence, None)
        if claimed is None:
            call.book.withdrawn.add(sequence)  # if it is still on its way
            with suppress(LostLease):  # then it is back already
                stored = await self.storage.answer(call.request.client, sequence)
                claimed = None if stored is None else stored.value
        if claimed is not None:
            # In the name of the claim, whose answer goes with it: an undo that comes again must find nothing.
            token = CALL.set(Call(call.request.client, sequence, call.request.confirmed))
            try:
                await self.storage.undo(claim, claimed)
            finally:
                CALL.reset(token)

    async def _undo_rows(self, args: tuple[Claim, dict[str, list[RowHead]]], call: Exchange) -> None:
        claim, heads = args
        claimed = {task_name: self._received(rows, call) for task_name, rows in heads.items()}
        await self.storage.undo(claim, claimed)

    def _received(self, heads: Iterable[RowHead], call: Exchange) -> list[Row]:
        return [Row(head.record, self._group(head.size, head.references, call)) for head in heads]

    async def _settle(self, args: tuple[str, list[int], Event, str | None], call: Exchange) -> None:
        await self.storage.settle(*args)

    async def _fail(self, reasons: dict[int, str], call: Exchange) -> dict[str, int]:
        return await self.storage.fail(reasons)

    async def _set_watermark(self, watermarks: Any, call: Exchange) -> None:
        call.tasks = list(watermarks)
        await self.storage.set_watermark(watermarks)

    async def _find_due(self, args: tuple[str, list[Status], int], call: Exchange) -> list[RowHead]:
        rows = await self.storage.due(*args)
        call.tasks = [args[0]]
        return call.rows(rows)

    async def _revise(self, heads: list[wire.RevisionHead], call: Exchange) -> list[bool]:
        return await self.storage.revise(
            [
                Revision(head.uid, head.revision, None if head.content is None else self._content(head.content, call))
                for head in heads
            ]
        )

    async def _discard(self, reason: str, call: Exchange) -> dict[str, int]:
        return await self.storage.discard(call.objects[0], reason)

    async def _set_priority(self, priorities: dict[int, float], call: Exchange) -> int:
        return await self.storage.set_priority(priorities)

    async def _saved(self, model_step: int, call: Exchange) -> None:
        await self.storage.saved(model_step)

    async def _saved_step(self, args: None, call: Exchange) -> int | None:
        return await self.storage.saved_step()

    async def _rewind(self, model_step: int, call: Exchange) -> dict[str, int]:
        return await self.storage.rewind(model_step)

    async def _note_ends(self, args: None, call: Exchange) -> None:
        await self.storage.note_ends()

    async def _ends(self, args: tuple[str, int], call: Exchange) -> list[tuple[int, GroupEnd]]:
        await self.welcome_back(args[0])
        return await self.storage.ends(*args)

    async def _forget_ends(self, numbers: list[int], call: Exchange) -> None:
        await self.storage.forget_ends(numbers)

    async def _count(self, args: tuple[list[str], list[Status]], call: Exchange) -> Any:
        return await self.storage.count_statuses(*args)

    async def _available(self, args: tuple[list[str], Status], call: Exchange) -> dict[str, int]:
        return await self.storage.available(*args)

    async def _ledger(self, tokens: bool, call: Exchange) -> dict[str, dict[str, int]]:
        return await self.storage.ledger(tokens=tokens)

    async def _account(self, task_name: str, call: Exchange) -> Account:
        return await self.storage.account(task_name)

    async def _accounts(self, args: None, call: Exchange) -> dict[str, Account]:
        return await self.storage.accounts()

    async def _usage(self, args: None, call: Exchange) -> Any:
        return await self.storage.usage()

    async def _holdings(self, args: None, call: Exchange) -> Any:
        return await self.storage.holdings()

    async def _records(self, limit: int | None, call: Exchange) -> list[Record]:
        return await self.storage.records(call.objects[0], limit)

    async def _read(self, uid: int, call: Exchange) -> list[RowHead]:
        row = await self.storage.read(uid)
        return call.rows([] if row is None else [row])

    # --- streams --------------------------------------------------------------------------------------

    async def _snapshot(self, args: None, call: Exchange) -> tuple[dict[str, Account], int, int, str]:
        snapshot: Snapshot = await self.storage.snapshot()
        stream_id = uuid.uuid4().hex
        self.streams[stream_id] = (snapshot.rows, call.request.client)
        return dict(snapshot.accounts), snapshot.next_uid, snapshot.next_timestamp_id, stream_id

    async def _stream(self, stream_id: str, call: Exchange) -> list[RowHead]:
        known = self.streams.get(stream_id)
        if known is None:
            raise InvalidInput("this snapshot is no longer there: its host was restarted, or it was closed")
        heads: list[RowHead] = []
        size = 0
        async for row in known[0]:
            heads += call.rows([row])
            size += heads[-1].size
            if size >= _STREAM_BYTES or len(heads) >= _STREAM_ROWS:
                break
        if not heads:
            del self.streams[stream_id]
        return heads

    async def _end_stream(self, stream_id: str, call: Exchange) -> None:
        known = self.streams.pop(stream_id, None)
        if known is not None:
            await known[0].aclose()

    async def _restore(self, args: tuple[dict[str, Account], int, int], call: Exchange) -> str:
        accounts, next_uid, next_timestamp_id = args
        restore_id = uuid.uuid4().hex
        restore = self._restores[restore_id] = _Restore(call.request.client)
        restore.done = asyncio.ensure_future(
            self.storage.restore(accounts, next_uid, next_timestamp_id, restore.stream())
        )
        return restore_id

    async def _restore_rows(self, args: tuple[str, list[RowHead]], call: Exchange) -> bool:
        """Whether more rows make sense."""
        restore_id, heads = args
        restore = self._restoring(restore_id)
        rows = self._received(heads, call)
        assert restore.done is not None
        passing = asyncio.ensure_future(restore.rows.put(rows))
        await asyncio.wait((passing, restore.done), return_when=asyncio.FIRST_COMPLETED)
        passing.cancel()
        return not restore.done.done()

    async def _end_restore(self, args: tuple[str, bool], call: Exchange) -> None:
        restore_id, complete = args
        restore = self._restoring(restore_id)
        assert restore.done is not None
        restore.abandoned = not complete
        ending = asyncio.ensure_future(restore.rows.put(None))
        await asyncio.wait((ending, restore.done), return_when=asyncio.FIRST_COMPLETED)
        try:
            await restore.done
        except InvalidInput:
            if complete:
                raise
        finally:
            ending.cancel()
            del self._restores[restore_id]

    def _restoring(self, restore_id: str) -> _Restore:
        restore = self._restores.get(restore_id)
        if restore is None:
            raise InvalidInput("this restore is no longer there: its host was restarted; nothing was restored")
        return restore


async def _nothing() -> AsyncIterator[Row]:
    rows: tuple[Row, ...] = ()
    for row in rows:
        yield row


_Method: TypeAlias = "Callable[[Operations, Any, Exchange], Awaitable[Any]]"
OPERATIONS: Mapping[str, tuple[Any, _Method]] = {
    "open": (wire.OpenArgs, Operations._open),
    "close": (str, Operations._close),
    "release": (str, Operations._release),
    "reap": (None, Operations._reap_now),
    "issue": (wire.IssueArgs, Operations._issue),
    "put": (wire.PutArgs, Operations._put),
    "claim": (Claim, Operations._claim),
    "undo": (tuple[int, Claim], Operations._undo),
    "undo_rows": (tuple[Claim, dict[str, list[RowHead]]], Operations._undo_rows),
    "settle": (wire.SettleArgs, Operations._settle),
    "fail": (dict[int, str], Operations._fail),
    "set_watermark": (wire.Watermarks, Operations._set_watermark),
    "due": (wire.DueArgs, Operations._find_due),
    "revise": (list[wire.RevisionHead], Operations._revise),
    "discard": (str, Operations._discard),
    "set_priority": (dict[int, float], Operations._set_priority),
    "saved": (int, Operations._saved),
    "saved_step": (None, Operations._saved_step),
    "rewind": (int, Operations._rewind),
    "note_ends": (None, Operations._note_ends),
    "ends": (tuple[str, int], Operations._ends),
    "forget_ends": (list[int], Operations._forget_ends),
    "count_statuses": (tuple[list[str], list[Status]], Operations._count),
    "available": (tuple[list[str], Status], Operations._available),
    "ledger": (bool, Operations._ledger),
    "account": (str, Operations._account),
    "accounts": (None, Operations._accounts),
    "usage": (None, Operations._usage),
    "holdings": (None, Operations._holdings),
    "records": (int | None, Operations._records),
    "read": (int, Operations._read),
    "snapshot": (None, Operations._snapshot),
    "stream": (str, Operations._stream),
    "end_stream": (str, Operations._end_stream),
    "restore": (tuple[dict[str, Account], int, int], Operations._restore),
    "restore_rows": (tuple[str, list[RowHead]], Operations._restore_rows),
    "end_restore": (tuple[str, bool], Operations._end_restore),
}
