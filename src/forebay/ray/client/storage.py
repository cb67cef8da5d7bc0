"""RayStorage: the contract of `storage.base`, each operation one call to the actor that hosts the groups.

Groups are encoded here and owned by the host when `put` returns; a trainer gets read-only views of the answer. The
host's storage applies the rules; the buffer around this one judges ages and waits.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from forebay.core.aio import see_through, uncancelled
from forebay.core.capacity import Settings
from forebay.core.ledger import Account, Record, Row, identify, number_rollouts
from forebay.core.references import resolve_group
from forebay.errors import BufferLost, ForebayError, StorageUnavailable
from forebay.ray import references, wire
from forebay.ray.client.link import Link, Reply, heard
from forebay.ray.table import OPERATIONS, Operation, TableStorage
from forebay.ray.wire import Parcel
from forebay.storage.base import Claim, Claimed, Draw, Listener, Rows, Summary
from forebay.storage.idempotency import taken_for_good
from forebay.storage.values import Content, Ready, Snapshot

log = logging.getLogger(__name__)

_BEAT_TIMEOUT_S = 10.0
_CONFIRM_BYTES = 1 << 20
"""The host keeps an answer until it is confirmed, usually by the next call; a larger answer is confirmed at once."""
_CLOSE_S = 10.0
"""How long `close` waits for a host that does not answer."""
_PATIENCE_S = 5.0
"""How long a cancelled call waits for its answer: long enough for any host that runs."""
_CHUNK_BYTES = 4 << 20
_CHUNK_ROWS = 512
_SLICE_GROUPS = 32
"""Groups that are encoded before the event loop gets its turn."""


class RayStorage(TableStorage):
    """A storage that another process of the cluster hosts."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._store_id = link.hello.store_id
        self._listeners: list[Listener] = []
        self._heard = 0  # the version of the storage in the last answer
        self._buffered = 0
        self._group_bytes = 0.0  # of a group, by the last claims
        self.beat_timeout_s = _BEAT_TIMEOUT_S

    def __repr__(self) -> str:
        return f"<RayStorage {self.link.hello.name!r}: {self._buffered} buffered groups>"

    @property
    def durable(self) -> bool:  # type: ignore[override]
        return self.link.hello.durable

    @property
    def store_id(self) -> str | None:
        return self._store_id

    def __len__(self) -> int:
        return self._buffered

    # --- calls ----------------------------------------------------------------------------------------

    async def _run(self, operation: Operation, arguments: tuple[Any, ...]) -> Any:
        """One call. If a change is cancelled, its answer is awaited all the same, so that listeners hear of it."""
        parcel = Parcel(checksums=self.link.hello.checksums)
        packed = [await _packed(argument, parcel) for argument in arguments]
        if operation.carried is not None:
            parcel.objects.append(packed[operation.carried])
            packed[operation.carried] = None
        sequence, future = self.link.begin(operation, packed, parcel)
        if operation.changes:
            try:
                cancelled = await self._answered(sequence, future)
            finally:
                self.link.seen(sequence)
            if cancelled is not None:
                if future.done():
                    with suppress(Exception):  # the caller gets its cancel in any case
                        self._learn(await self.link.finish(future))
                raise cancelled
        return self._learn(await self.link.finish(future)).read(operation.result)

    async def _answered(self, sequence: int, future: asyncio.Future[Any]) -> asyncio.CancelledError | None:
        """Wait for the answer of a call; returns the cancel that arrived meanwhile.

        After a cancel it waits a few seconds at most: a host that is restarting may take long.
        """
        try:
            await self.link.answered(future)
        except asyncio.CancelledError as cancelled:
            patience = asyncio.ensure_future(asyncio.wait((future,), timeout=_PATIENCE_S))
            await see_through(patience)
            if not future.done():
                log.warning("call_left_behind buffer=%s sequence=%d", self.link.hello.name, sequence)
            return cancelled
        return None

    def _learn(self, reply: Reply) -> Reply:
        """Take over what an answer says of the storage; raises the error that it has."""
        answer = reply.answer
        self._news(answer)
        if answer.changed:
            self._tell(answer.changed)
        if answer.failure is not None:
            raise wire.error_of(answer.failure)
        return reply

    def _news(self, answer: wire.Answer) -> None:
        if answer.version:
            self._buffered = answer.buffered
        if answer.version > self._heard:
            self._heard = answer.version
            self._tell(())  # any task may have changed

    def _tell(self, tasks: Collection[str]) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(tasks)
            except Exception:
                # The change is stored; a failing listener concerns its owner, not the caller.
                log.exception("listener_failed")

    # --- opening and closing ------------------------------------------------------------------------

    async def open(self, owner: str, settings: Settings, lease_s: float | None) -> None:
        if lease_s is not None:
            self.beat_timeout_s = min(_BEAT_TIMEOUT_S, lease_s / 3)  # a late answer must not delay the next heartbeats
        self._store_id = await self._run(OPERATIONS["open"], (owner, settings, lease_s))

    async def close(self, owner: str) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._run(OPERATIONS["close"], (owner,))
        except (BufferLost, StorageUnavailable) as gone:  # the owner holds nothing there any more, or not for long
            log.info("closed_without_host owner=%s %s", owner, gone)
        except TimeoutError:
            # Its heartbeats have ended: its groups come back at its deadline.
            log.warning("closed_without_host owner=%s buffer=%s does not answer", owner, self.link.hello.name)

    def beat(self, owner: str) -> None:
        heard([self.link.beat(owner)], self.beat_timeout_s)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def watch(self, ready: Ready | None) -> asyncio.Future[None] | None:
        return asyncio.ensure_future(self.watch_since(ready))

    async def watch_since(self, ready: Ready | None, version: int | None = None) -> None:
        """One long call: until something changed after a version (None: the last answer) and `ready` may hold."""
        since = self._heard if version is None else version
        answer = await self.link.wait((uuid.uuid4().hex, since, ready))
        if answer.version < since:  # from a host that was restarted on a node whose clock is behind
            self._heard = 0
        self._news(answer)

    # --- claims ---------------------------------------------------------------------------------------

    async def claim(self, claim: Claim) -> Claimed:
        while True:
            expected = self._group_bytes * sum(claim.wants.values())
            sequence, future = self.link.begin(OPERATIONS["claim"], (claim,), Parcel(), expected_bytes=expected)
            try:
                cancelled = await self._answered(sequence, future)
                if cancelled is not None:
                    await self._withdraw(sequence, claim, future)
                    raise cancelled
                reply = self._learn(await self.link.finish(future))
                try:
                    claimed: Claimed = reply.read(Claimed)
                    rows = [row for found in (claimed.rows or {}).values() for row in found]
                    lost = await _lost(rows, reply)
                except BaseException:
                    await self._withdraw(sequence, claim, future)
                    raise
                if lost:
                    await self._withdraw(sequence, claim, future)
                    await self.fail(lost)
                    continue
            finally:
                self.link.seen(sequence)
            for row in rows:
                if taken_for_good(row.record):
                    number_rollouts(row.group, row.record.group_id)
            if rows:
                self._group_bytes += (reply.size / len(rows) - self._group_bytes) / 2
            if reply.size > _CONFIRM_BYTES or reply.frames.objects:
                self.link.confirm()
            return claimed

    async def _withdraw(self, sequence: int, claim: Claim, future: asyncio.Future[Any]) -> None:
        """Put back the groups of a claim that no caller will get, also after errors."""
        operation = OPERATIONS["withdraw"]
        if not future.done():  # the host does not answer: it gets both calls when it does
            number, left = self.link.begin(operation, (sequence, claim), Parcel())
            left.add_done_callback(lambda _: self.link.seen(number))
            return
        if future.cancelled() or future.exception() is not None:
            return
        withdrawing = asyncio.ensure_future(self._run(operation, (sequence, claim)))
        await see_through(withdrawing)
        error = None if withdrawing.cancelled() else withdrawing.exception()
        if error is not None:
            log.warning("claim_not_withdrawn buffer=%s %s", self.link.hello.name, error)

    async def undo(self, claim: Claim, rows: Rows) -> None:
        if self.durable:
            rows = {
                task_name: [Row(row.record, await resolve_group(row.group)) for row in found]
                for task_name, found in rows.items()
            }
        await self._run(OPERATIONS["undo"], (claim, rows))

    async def issue(self, task_name: str, contents: Sequence[Content], draw: Draw) -> list[Record]:
        records: list[Record] = await self._run(OPERATIONS["issue"], (task_name, list(contents), draw))
        for content, record in zip(contents, records, strict=False):
            identify(content.group, task_name, record.group_id)
        return records

    # --- reads ----------------------------------------------------------------------------------------

    async def summary(
        self, tasks: Collection[str] | None = None, *, holdings: bool = False, owners: bool = False
    ) -> Summary:
        """See `Storage.summary`. If the host is lost, the summary of all tasks comes from its last note."""
        try:
            asked = None if tasks is None else list(tasks)
            summary: Summary = await self._run(OPERATIONS["summary"], (asked, holdings, owners))
            return summary
        except BufferLost:
            note = await self.link.note() if tasks is None else None
            if note is None:
                raise
            return note.summary()

    # --- streams --------------------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        accounts, next_uid, next_timestamp_id, stream_id = await self._run(OPERATIONS["snapshot"], ())
        return Snapshot(accounts, next_uid, next_timestamp_id, self._stream(stream_id))

    async def _stream(self, stream_id: str) -> AsyncGenerator[Row, None]:
        try:
            while rows := await self._run(OPERATIONS["stream"], (stream_id,)):
                for row in rows:
                    yield row
        finally:
            with suppress(ForebayError):  # then it is gone anyway
                await self._run(OPERATIONS["end_stream"], (stream_id,))

    async def restore(
        self, accounts: Mapping[str, Account], next_uid: int, next_timestamp_id: int, rows: AsyncIterable[Row]
    ) -> None:
        restore = await self.begin_restore(accounts, next_uid, next_timestamp_id)
        complete = False
        try:
            async for row in rows:
                if not await restore.add(row):
                    break
            complete = True
        finally:
            await uncancelled(restore.end(complete=complete))
        self._tell(accounts)

    async def begin_restore(self, accounts: Mapping[str, Account], next_uid: int, next_timestamp_id: int) -> Restore:
        """Begin a restore; the caller adds the rows, and ends it."""
        return Restore(self, await self._run(OPERATIONS["restore"], (dict(accounts), next_uid, next_timestamp_id)))


class Restore:
    """A restore in progress, whose rows travel in chunks."""

    def __init__(self, storage: RayStorage, restore_id: str) -> None:
        self._storage = storage
        self._id = restore_id
        self._rows: list[Row] = []
        self._bytes = 0
        self._open = True  # whether the host takes more rows

    async def add(self, row: Row) -> bool:
        """Add a row; False if the restore has failed; its end reports the reason."""
        self._rows.append(row)
        self._bytes += row.record.bytes
        if self._bytes >= _CHUNK_BYTES or len(self._rows) >= _CHUNK_ROWS:
            await self._send()
        return self._open

    async def _send(self) -> None:
        rows, self._rows, self._bytes = self._rows, [], 0
        self._open = await self._storage._run(OPERATIONS["restore_rows"], (self._id, rows))

    async def end(self, *, complete: bool) -> None:
        """Restore all rows, or (not `complete`) none. Raises the error of a restore that has failed."""
        if complete and self._open and self._rows:
            await self._send()
        await self._storage._run(OPERATIONS["end_restore"], (self._id, complete or not self._open))


async def _packed(argument: Any, parcel: Parcel) -> Any:
    """An argument without its groups, which go into the parcel, in slices that leave the event loop free."""
    if not isinstance(argument, list) or len(argument) <= _SLICE_GROUPS or not wire.carries_groups(argument):
        return wire.with_groups(argument, parcel.add_group)
    packed: list[Any] = []
    for start in range(0, len(argument), _SLICE_GROUPS):
        packed += wire.with_groups(argument[start : start + _SLICE_GROUPS], parcel.add_group)
        await asyncio.sleep(0)
    return packed


async def _lost(rows: list[Row], reply: Reply) -> dict[int, str]:
    """The groups whose references are lost because their owners died, with that reason."""
    held = {row.record.uid: found for row, found in zip(rows, reply.frames.references, strict=True) if found}
    if not held:
        return {}
    lost = await references.lost([reference for found in held.values() for reference in found])
    return {uid: reason for uid, found in held.items() for reference in found if (reason := lost.get(reference))}
