"""RayStorage: the contract of `storage.base`, each operation one call to the actor that hosts the groups.

What a producer puts is encoded here and owned by the host when `put` returns; what a trainer gets are read-only views
of the answer. The rules stay where they are: the host's storage decides, the buffer around this one ages and waits.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from msgspec.structs import replace

from forebay.core.aio import see_through
from forebay.core.ledger import Account, Event, GroupEnd, LedgerLine, Watermark
from forebay.core.query import Node
from forebay.core.record import Record, Row, identify, number_rollouts
from forebay.core.references import resolve_group
from forebay.core.rollout import Status
from forebay.errors import BufferLost, ForebayError, StorageUnavailable
from forebay.ray import references, wire
from forebay.ray.link import Link, Reply, heard
from forebay.ray.wire import ArrivalHead, ContentHead, Parcel, RevisionHead, RowHead
from forebay.storage.base import (
    Arrival,
    Claim,
    Claimed,
    Content,
    Holding,
    Listener,
    Purpose,
    Ready,
    Reaped,
    Revision,
    Settings,
    Snapshot,
    Storage,
    Usage,
)

__all__ = ["RayStorage"]

log = logging.getLogger(__name__)

_BEAT_TIMEOUT_S = 10.0
_CONFIRM_BYTES = 1 << 20
"""The host keeps an answer until it is confirmed, usually by the next call: a large one is not left there for that."""
_CLOSE_S = 10.0
"""How long `close` waits for a host that is away."""
_PATIENCE_S = 5.0
"""How long a cancelled call waits for its answer: long enough for any host that is there."""
_CHUNK_BYTES = 4 << 20
_CHUNK_ROWS = 512


class RayStorage(Storage):
    """A storage that another process of the cluster hosts."""

    shared: ClassVar[bool] = True
    reaps_itself: ClassVar[bool] = True
    claims_with_watermarks: ClassVar[bool] = True

    def __init__(self, link: Link) -> None:
        self._link = link
        self._store_id = link.hello.store_id
        self._listeners: list[Listener] = []
        self._heard = 0
        self._buffered = 0
        self._not_due: set[str] = set()
        self._group_bytes = 0.0  # of a group, as the last claims brought them
        self._tasks: set[str] = set()
        self.beat_timeout_s = _BEAT_TIMEOUT_S

    def __repr__(self) -> str:
        return f"<RayStorage {self._link.hello.name!r}: {self._buffered} buffered groups>"

    @property
    def durable(self) -> bool:  # type: ignore[override]
        return self._link.hello.durable

    @property
    def store_id(self) -> str | None:
        return self._store_id

    def _parcel(self) -> Parcel:
        return Parcel(checksums=self._link.hello.checksums)

    # --- calls ----------------------------------------------------------------------------------------

    async def _call(
        self, op: str, body: Any, kind: Any, *, changing: bool, tasks: Iterable[str] = (), **carried: Any
    ) -> Any:
        """One call; what its answer says, as `kind`.

        A change that is cancelled is seen through, so that those who wait here hear of it.
        """
        if not changing:
            return self._learn(await self._link.call(op, body, **carried), tasks).read(kind)
        sequence, future = self._link.begin(op, body, changing=True, **carried)
        try:
            cancelled = await self._seen_through(sequence, future)
        finally:
            self._link.seen(sequence)
        if cancelled is not None:
            self._tell(self._tasks)
            raise cancelled
        return self._learn(await self._link.finish(future), tasks).read(kind)

    async def _seen_through(self, sequence: int, future: asyncio.Future[wire.Message]) -> asyncio.CancelledError | None:
        """Wait for the end of a call; the cancel that arrived meanwhile. A host that is away ends our patience."""
        try:
            await self._link.answered(future)
        except asyncio.CancelledError as cancelled:
            patience = asyncio.ensure_future(asyncio.wait((future,), timeout=_PATIENCE_S))
            await see_through(patience)
            if not future.done():
                log.warning("call_left_behind buffer=%s sequence=%d", self._link.hello.name, sequence)
            return cancelled
        return None

    def _learn(self, reply: Reply, tasks: Iterable[str] = ()) -> Reply:
        """Take up what an answer says of the storage, or raise the error that it is."""
        answer = reply.answer
        if answer.due is not None:
            self._not_due.update(tasks)
            self._not_due.difference_update(answer.due)
        self._news(answer)
        if answer.failure is not None:
            raise wire.error_of(answer.failure)
        return reply

    def _news(self, answer: wire.Answer) -> None:
        if answer.version:
            self._buffered = answer.buffered
        if answer.version > self._heard:
            self._heard = answer.version
            self._tell(self._tasks)

    def _tell(self, tasks: Collection[str]) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(list(tasks))
            except Exception:
                # What was stored is stored; a listener that fails is its owner's trouble, not the caller's.
                log.exception("listener_failed")

    # --- life -----------------------------------------------------------------------------------------

    async def open(self, owner: str, settings: Settings, lease_s: float | None) -> None:
        args = wire.OpenArgs(
            owner,
            settings.order,
            settings.max_groups,
            settings.max_bytes,
            settings.expect_group_bytes,
            settings.keep_trained,
            lease_s,
        )
        objects = [] if settings.choose is None else [settings.choose]
        if lease_s is not None:
            self.beat_timeout_s = min(_BEAT_TIMEOUT_S, lease_s / 3)  # a late answer must not delay the next beats
        self._store_id = await self._call("open", args, str | None, changing=True, objects=objects)

    async def close(self, owner: str) -> None:
        self._not_due.clear()  # what it held comes back, and may have grown too old meanwhile
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._call("close", owner, None, changing=True)
        except (BufferLost, StorageUnavailable) as gone:  # it holds nothing there any more, or not for long
            log.info("closed_without_host owner=%s %s", owner, gone)
        except TimeoutError:
            # Its beats have ended: what it held comes back at its deadline.
            log.warning("closed_without_host owner=%s buffer=%s is away", owner, self._link.hello.name)

    def beat(self, owner: str) -> None:
        heard([self.send_beat(owner)], self.beat_timeout_s)

    def send_beat(self, owner: str) -> Any:
        """A heartbeat whose answer the caller waits for, for at most `beat_timeout_s`."""
        return self._link.beat(owner)

    async def reap(self) -> Reaped:
        returned, next_s = await self._call("reap", None, tuple[dict[str, int], float | None], changing=True)
        self._not_due.clear()
        return Reaped(returned, next_s)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def watch(self, ready: Ready | None) -> asyncio.Future[None] | None:
        return asyncio.ensure_future(self.watch_since(ready))

    async def watch_since(self, ready: Ready | None, version: int | None = None) -> None:
        """One long call: until something changed after a version (None: the last answer), and this may be there."""
        since = self._heard if version is None else version
        answer = await self._link.wait((uuid.uuid4().hex, since, ready))
        if answer.version < since:  # of a host that began anew, by a clock that is behind
            self._heard = 0
        self._news(answer)

    def may_be_due(self, task_name: str) -> bool:
        return task_name not in self._not_due

    # --- moves ----------------------------------------------------------------------------------------

    async def issue(
        self, task_name: str, contents: Sequence[Content], *, owner: str, cursor: int, source_state: bytes | None = None
    ) -> list[Record]:
        parcel = self._parcel()
        heads: list[ContentHead] = []
        for content in contents:
            heads.append(parcel.content(content))
            await _give_way(heads)
        args = (task_name, heads, owner, cursor, source_state)
        records: list[Record] = await self._call("issue", args, list[Record], changing=True, parcel=parcel)
        for content, record in zip(contents, records, strict=True):
            identify(content.group, task_name, record.group_id)
        return records

    async def put(self, arrivals: Sequence[Arrival], *, owner: str) -> list[Record]:
        parcel = self._parcel()
        heads: list[ArrivalHead] = []
        for arrival in arrivals:
            heads.append(parcel.arrival(arrival))
            await _give_way(heads)
        tasks = {arrival.task_name for arrival in arrivals}
        self._tasks |= tasks
        records: list[Record] = await self._call(
            "put", (heads, owner), list[Record], changing=True, tasks=tasks, parcel=parcel
        )
        self._tell(tasks)
        return records

    async def claim(self, claim: Claim) -> Claimed | None:
        self._tasks |= claim.wants.keys()
        body = _claim_body(claim)
        while True:
            expected_bytes = self._group_bytes * sum(claim.wants.values())
            sequence, future = self._link.begin("claim", body, changing=True, expected_bytes=expected_bytes)
            try:
                cancelled = await self._seen_through(sequence, future)
                if cancelled is not None:
                    await self._undo_unseen(sequence, claim, future)
                    raise cancelled
                reply = self._learn(await self._link.finish(future), claim.wants)
                try:
                    claimed, held = self._claimed(claim, reply)
                    lost = await _lost(held)
                except BaseException:
                    await self._undo_unseen(sequence, claim, future)
                    raise
                if lost:
                    await self._undo_unseen(sequence, claim, future)
                    await self.fail(lost)
                    continue
            finally:
                self._link.seen(sequence)
            groups = sum(map(len, claimed.values())) if claimed else 0
            if groups:
                self._group_bytes += (reply.size / groups - self._group_bytes) / 2
            if reply.size > _CONFIRM_BYTES or reply.frames.has_objects:
                self._link.confirm()
            if claim.purpose is Purpose.TAKE and claimed:
                self._tell([task_name for task_name, rows in claimed.items() if rows])
            return claimed

    def _claimed(self, claim: Claim, reply: Reply) -> tuple[Claimed | None, dict[int, tuple[Any, ...]]]:
        """What was claimed, and by uid the references that its samples hold."""
        heads = reply.read(wire.ClaimedHead)
        if heads is None:
            return None, {}
        claimed: Claimed = {}
        held: dict[int, tuple[Any, ...]] = {}
        for task_name in claim.wants:
            rows = []
            for head in heads.get(task_name, ()):
                row, found = wire.unpack_row(head, reply.frames, checksums=self._link.hello.checksums)
                if found:
                    held[head.record.uid] = found
                identify(row.group, task_name, head.record.group_id)
                if claim.purpose is Purpose.TAKE:
                    number_rollouts(row.group, head.record.group_id)
                rows.append(row)
            claimed[task_name] = rows
        return claimed, held

    async def _undo_unseen(self, sequence: int, claim: Claim, future: asyncio.Future[wire.Message]) -> None:
        """What a claim took that nobody will get goes back, whatever else happens."""
        if not future.done():  # the host is away: it will get both calls when it is back
            undo, left = self._link.begin("undo", (sequence, _claim_body(claim)), changing=True)
            left.add_done_callback(lambda _: self._link.seen(undo))
            return
        if future.cancelled() or future.exception() is not None:
            return
        undoing = asyncio.ensure_future(
            self._call("undo", (sequence, _claim_body(claim)), None, changing=True, tasks=claim.wants)
        )
        await see_through(undoing)
        error = None if undoing.cancelled() else undoing.exception()
        if error is not None:
            log.warning("claim_not_undone buffer=%s %s", self._link.hello.name, error)

    async def undo(self, claim: Claim, claimed: Claimed) -> None:
        parcel = self._parcel()
        heads: dict[str, list[RowHead]] = {}
        for task_name, rows in claimed.items():
            heads[task_name] = []
            for row in rows:
                group = row.group if self.keeps_references else await resolve_group(row.group)
                heads[task_name].append(RowHead(row.record, *parcel.add_group(group)))
        await self._call("undo_rows", (_claim_body(claim), heads), None, changing=True, parcel=parcel)
        self._not_due.clear()
        self._tell(claimed)

    async def fail(self, reasons: Mapping[int, str]) -> dict[str, int]:
        failed: dict[str, int] = await self._call("fail", dict(reasons), dict[str, int], changing=True)
        self._tell(failed)
        return failed

    async def settle(self, lease_id: str, uids: Sequence[int], event: Event, reason: str | None = None) -> None:
        await self._call("settle", (lease_id, list(uids), event, reason), None, changing=True)
        if event is Event.NACKED:
            self._not_due.clear()  # what comes back may have grown too old meanwhile
        self._tell(self._tasks)

    async def release(self, owner: str) -> dict[str, int]:
        released: dict[str, int] = await self._call("release", owner, dict[str, int], changing=True)
        self._not_due.clear()
        self._tell(released)
        return released

    async def set_watermark(self, watermarks: Mapping[str, Watermark]) -> None:
        await self.mark(watermarks)
        self._tell(watermarks)

    async def mark(self, watermarks: Mapping[str, Watermark]) -> None:
        """Set watermarks without waking anybody here: for an attempt, which a waiter repeats when it is woken."""
        self._tasks |= watermarks.keys()
        await self._call("set_watermark", dict(watermarks), None, changing=True, tasks=watermarks)

    async def due(self, task_name: str, statuses: Collection[Status], limit: int) -> list[Row]:
        reply = await self._link.call("due", (task_name, list(statuses), limit))
        rows = self._rows(self._learn(reply))
        if not rows and task_name not in (reply.answer.due or ()):
            self._not_due.add(task_name)
        return rows

    async def revise(self, revisions: Sequence[Revision]) -> list[bool]:
        parcel = self._parcel()
        heads: list[RevisionHead] = []
        for revision in revisions:
            heads.append(parcel.revision(revision))
            await _give_way(heads)
        applied: list[bool] = await self._call("revise", heads, list[bool], changing=True, parcel=parcel)
        self._tell(self._tasks)
        return applied

    async def discard(self, node: Node, reason: str) -> dict[str, int]:
        discarded: dict[str, int] = await self._call("discard", reason, dict[str, int], changing=True, objects=[node])
        self._tell(discarded)
        return discarded

    async def set_priority(self, priorities: Mapping[int, float]) -> int:
        changed: int = await self._call("set_priority", dict(priorities), int, changing=True)
        return changed

    async def saved(self, model_step: int) -> None:
        await self._call("saved", model_step, None, changing=True)

    async def saved_step(self) -> int | None:
        step: int | None = await self._call("saved_step", None, int | None, changing=False)
        return step

    async def rewind(self, model_step: int) -> dict[str, int]:
        rewound: dict[str, int] = await self._call("rewind", model_step, dict[str, int], changing=True)
        self._not_due.clear()
        self._tell(rewound)
        return rewound

    # --- reads ----------------------------------------------------------------------------------------

    async def count_statuses(
        self, tasks: Collection[str], statuses: Collection[Status]
    ) -> dict[str, dict[Status, int]]:
        body = (list(tasks), list(statuses))
        counts: dict[str, dict[Status, int]] = await self._call(
            "count_statuses", body, dict[str, dict[Status, int]], changing=False
        )
        return counts

    async def available(self, tasks: Collection[str], status: Status) -> dict[str, int]:
        found: dict[str, int] = await self._call("available", (list(tasks), status), dict[str, int], changing=False)
        return found

    async def ledger(self, *, tokens: bool = False) -> dict[str, LedgerLine]:
        try:
            lines: dict[str, LedgerLine] = await self._call("ledger", tokens, dict[str, dict[str, int]], changing=False)
        except BufferLost:
            note = await self._link.note()
            if note is None:
                raise
            return note.ledger(tokens=tokens)
        return lines

    async def note_ends(self) -> None:
        await self._call("note_ends", None, None, changing=False)

    async def ends(self, owner: str, limit: int) -> list[tuple[int, GroupEnd]]:
        ends: list[tuple[int, GroupEnd]] = await self._call(
            "ends", (owner, limit), list[tuple[int, GroupEnd]], changing=False
        )
        return ends

    async def forget_ends(self, numbers: Sequence[int]) -> None:
        await self._call("forget_ends", list(numbers), None, changing=False)

    async def account(self, task_name: str) -> Account:
        account: Account = await self._call("account", task_name, Account, changing=False)
        return account

    async def accounts(self) -> dict[str, Account]:
        try:
            accounts: dict[str, Account] = await self._call("accounts", None, dict[str, Account], changing=False)
        except BufferLost:
            note = await self._link.note()
            if note is None:
                raise
            return note.accounts()
        self._tasks |= accounts.keys()
        return accounts

    async def usage(self) -> Usage:
        usage: Usage = await self._call("usage", None, Usage, changing=False)
        return usage

    async def holdings(self) -> list[Holding]:
        holdings: list[Holding] = await self._call("holdings", None, list[Holding], changing=False)
        return holdings

    async def records(self, node: Node, limit: int | None) -> list[Record]:
        records: list[Record] = await self._call("records", limit, list[Record], changing=False, objects=[node])
        return records

    async def read(self, uid: int) -> Row | None:
        rows = self._rows(self._learn(await self._link.call("read", uid)))
        return rows[0] if rows else None

    def _rows(self, reply: Reply) -> list[Row]:
        rows = []
        for head in reply.read(list[RowHead]):
            row, _ = wire.unpack_row(head, reply.frames, checksums=self._link.hello.checksums)
            identify(row.group, row.record.task_name, row.record.group_id)
            rows.append(row)
        return rows

    def __len__(self) -> int:
        return self._buffered

    # --- streams --------------------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        kind = tuple[dict[str, Account], int, int, str]
        accounts, next_uid, next_timestamp_id, stream_id = await self._call("snapshot", None, kind, changing=True)
        return Snapshot(accounts, next_uid, next_timestamp_id, self._stream(stream_id))

    async def _stream(self, stream_id: str) -> AsyncGenerator[Row, None]:
        try:
            while rows := await self._next_rows(stream_id):
                for row in rows:
                    yield row
        finally:
            with suppress(ForebayError):  # then it is gone anyway
                await self._call("end_stream", stream_id, None, changing=True)

    async def _next_rows(self, stream_id: str) -> list[Row]:
        # A call that moves the stream on is done once, like every change.
        sequence, future = self._link.begin("stream", stream_id, changing=True)
        try:
            return self._rows(self._learn(await self._link.finish(future)))
        finally:
            self._link.seen(sequence)

    async def restore(
        self, accounts: Mapping[str, Account], next_uid: int, next_timestamp_id: int, rows: AsyncIterable[Row]
    ) -> None:
        body = (dict(accounts), next_uid, next_timestamp_id)
        restore_id: str = await self._call("restore", body, str, changing=True)
        complete = False
        try:
            if await self._send_rows(restore_id, rows):
                complete = True
        finally:
            ending = asyncio.ensure_future(
                self._call("end_restore", (restore_id, complete), None, changing=True, tasks=())
            )
            cancelled = await see_through(ending)
            self._not_due.clear()
        ending.result()
        if cancelled is not None:
            raise cancelled

    async def _send_rows(self, restore_id: str, rows: AsyncIterable[Row]) -> bool:
        parcel, heads, size = self._parcel(), list[RowHead](), 0
        async for row in rows:
            head = RowHead(row.record, *parcel.add_group(row.group))
            heads.append(head)
            size += head.size
            if size >= _CHUNK_BYTES or len(heads) >= _CHUNK_ROWS:
                if not await self._call("restore_rows", (restore_id, heads), bool, changing=True, parcel=parcel):
                    return True  # it has failed; its end says why
                parcel, heads, size = self._parcel(), [], 0
        if heads:
            await self._call("restore_rows", (restore_id, heads), bool, changing=True, parcel=parcel)
        return True


async def _lost(held: Mapping[int, tuple[Any, ...]]) -> dict[int, str]:
    """Groups whose references can no longer be got, because those who made them died; with that reason."""
    if not held:
        return {}
    lost = await references.lost([reference for found in held.values() for reference in found])
    return {uid: reason for uid, found in held.items() for reference in found if (reason := lost.get(reference))}


def _claim_body(claim: Claim) -> Claim:
    return replace(claim, wants=dict(claim.wants), floors=dict(claim.floors), watermarks=dict(claim.watermarks))


async def _give_way(done: list[Any]) -> None:
    """Leave the event loop its turn while many groups are encoded."""
    if len(done) % 32 == 0:
        await asyncio.sleep(0)
