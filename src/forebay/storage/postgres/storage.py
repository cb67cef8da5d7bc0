"""PostgresStorage: the contract of `storage.base`, one transaction for each operation.

It keeps no rows: everything is in the database, and what this process knows (`len`) is as of its last look. It connects
when it is first used and disconnects when its last owner closes; it may then be used again, also on another event
loop. A server that is away is StorageUnavailable; when it is back, the storage goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import asyncpg

from forebay.codec import encode_group
from forebay.errors import BufferClosed, CursorMoved, DuplicateGroup, LostLease, NoRoom
from forebay.ledger import Account, Event, GroupEnd, Watermark
from forebay.query import Node
from forebay.record import Record, Row
from forebay.rollout import Status
from forebay.storage.base import Arrival, Claim, Claimed, Content, Revision, Snapshot, Usage
from forebay.storage.calls import CALL, Answered, Applied, Call, Counted, Done, Handed, Stored, claimed_rows, value_of
from forebay.storage.postgres import answers, arriving, claiming, leaving, looking, streams
from forebay.storage.postgres import watermarks as marks
from forebay.storage.postgres.connections import Step
from forebay.storage.postgres.life import PostgresLife
from forebay.storage.postgres.transactions import READ

__all__ = ["PostgresStorage"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_AGAIN_S = 0.5
_SLICE_GROUPS = 256
"""Groups that one transaction of a discard ends."""


class PostgresStorage(PostgresLife):
    """Groups in a PostgreSQL database, in a schema named like the buffer.

    `dsn` is what asyncpg connects to. A process uses at most `max_connections` at once, and one more to listen.
    """

    # --- moves --------------------------------------------------------------------------------------

    async def _room(self, step: Step, groups: int, sizes: Callable[[Usage, int], list[int]]) -> list[int]:
        return await arriving.hold_room(step, self.name, self._settings, looking.USAGE, groups, sizes)

    async def _anew(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat a step that met a group which was not there when it looked; then it finds it."""
        for _ in range(10):
            try:
                return await attempt()
            except asyncpg.UniqueViolationError as error:
                if answers.is_done_elsewhere(error):
                    raise
                self._newcomers.forget()
        return await attempt()

    async def _once(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Do what a call asks. If another process did it meanwhile (one that was thought dead), give its answer."""
        call = CALL.get()
        if call is None:
            return await attempt()
        while True:
            refusal: Exception | None = None
            try:
                return await attempt()
            except asyncpg.UniqueViolationError as error:
                if not answers.is_done_elsewhere(error):
                    raise
            except (CursorMoved, DuplicateGroup, LostLease, NoRoom) as error:
                refusal = error  # perhaps because of what this very call did
            found = await self.answer(call.client, call.sequence)
            if found is not None:
                answer: T = found.value
                return answer
            if refusal is not None:
                raise refusal

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
                settings=self._settings,
            )

        self._check_owner(owner)
        async with self._used():
            kept = answers.kept_with(work, Stored)
            records = await self._once(lambda: self._anew(lambda: self._connections.step(kept)))
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
            return await self._once(lambda: self._anew(lambda: self._put(arrivals, frames, owner)))

    async def _put(self, arrivals: Sequence[Arrival], frames: arriving.Frames, owner: str) -> list[Record]:
        by_hand = [arrival.task_name for arrival in arrivals if arrival.group_id is None]
        hand_ids = iter(await self._newcomers.take(self._connections, by_hand) if by_hand else ())
        group_ids = [next(hand_ids) if a.group_id is None else a.group_id for a in arrivals]
        if self._is_simple(arrivals, frames):
            task_name = arrivals[0].task_name

            async def put_new(step: Step) -> list[Record]:
                return await arriving.put_new(step, task_name, group_ids, arrivals, frames)

            # With its answer it is more than one statement.
            return await self._connections.step(answers.kept_with(put_new, Stored), single=CALL.get() is None)

        async def put(step: Step) -> list[Record]:
            return await arriving.put(
                step, arrivals, group_ids, frames, owner=owner, room=self._room, settings=self._settings
            )

        return await self._connections.step(answers.kept_with(put, Stored))

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
        self._check_owner(claim.owner)
        async with self._used():
            call = CALL.get()
            claimed = await self._once(lambda: self._claim(claim, call))
            if claimed is None and call is not None:  # perhaps because this very call has claimed it
                found = await self.answer(call.client, call.sequence)
                claimed = None if found is None else found.value
            return claimed

    async def _claim(self, claim: Claim, call: Call | None) -> Claimed | None:
        async def work(step: Step, waiting: bool) -> Claimed | None:
            remember = None if call is None else partial(answers.store, step.connection, call)
            return await claiming.claim(step, claim, self.name, self._settings, waiting=waiting, remember=remember)

        async def undo(step: Step, claimed: Claimed | None) -> None:
            # An answer that is gone was seen: what is in doubt here was repeated elsewhere, and is held.
            if claimed is not None and (
                call is None or await answers.retract(step.connection, call.client, call.sequence)
            ):
                await claiming.undo_claim(step, claim, claimed)

        waiting = False
        while True:
            if claim.whole:
                async with self._connections.lend() as connection:
                    if not await claiming.count_qualifying(connection, claim):
                        return None
            try:
                done = await self._connections.step(partial(work, waiting=waiting), undo)
            except claiming.Damaged as found:
                await self._fail_damaged(found.errors)
                continue
            if done is None:
                waiting = True
                continue
            if claim.owner in self._gone:  # closed meanwhile
                await self._connections.step(partial(undo, claimed=done))
                self._check_owner(claim.owner)
            return done

    async def undo(self, claim: Claim, claimed: Claimed) -> None:
        call = CALL.get()

        async def work(step: Step) -> None:
            await claiming.undo_claim(step, claim, claimed)
            if call is not None:
                await answers.retract(step.connection, call.client, call.sequence)

        async with self._used():
            await self._anew(lambda: self._connections.step(work))

    async def settle(self, lease_id: str, uids: Sequence[int], event: Event, reason: str | None = None) -> None:
        async with self._used():
            kept = answers.kept_with(
                lambda step: leaving.settle(step, lease_id, uids, event, reason, self._settings), lambda _: Done()
            )
            await self._once(lambda: self._connections.step(kept))

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

    async def read(self, uid: int) -> Row | None:
        rows = await self._load(lambda connection: looking.read(connection, uid))
        return rows[0] if rows else None

    async def _load(self, look: Callable[[Any], Awaitable[list[looking.Found]]]) -> list[Row]:
        """Rows with their payloads. Those that are damaged end as failed."""
        async with self._used():
            async with self._connections.lend() as connection:
                found = await look(connection)
            reading = claiming.Reading()
            for record, frame in found:
                reading.add(record, frame)
            if reading.damaged:
                await self._fail_damaged(reading.damaged)
            return reading.rows

    async def _fail_damaged(self, damaged: Mapping[int, str]) -> None:
        for uid, error in damaged.items():
            log.error("payload_damaged buffer=%s uid=%d %s", self.name, uid, error)
        await self.fail(dict.fromkeys(damaged, "its payload was damaged on disk"))

    async def fail(self, reasons: Mapping[int, str]) -> dict[str, int]:
        async with self._used():
            return await self._connections.step(lambda step: leaving.fail(step, reasons))

    async def revise(self, revisions: Sequence[Revision]) -> list[bool]:
        frames: list[bytes | None] = []
        for revision in revisions:
            frames.append(None if revision.content is None else encode_group(revision.content.group))
            await asyncio.sleep(0)
        async with self._used():
            kept = answers.kept_with(lambda step: leaving.revise(step, revisions, frames), Applied)
            return await self._once(lambda: self._connections.step(kept))

    async def discard(self, node: Node, reason: str) -> dict[str, int]:
        async with self._used():
            return await self._once(lambda: self._discard(node, reason))

    async def _discard(self, node: Node, reason: str) -> dict[str, int]:
        discarded = Counted({})
        async with self._connections.lend() as connection:
            uids = await leaving.matching(connection, node)
        for start in range(0, len(uids), _SLICE_GROUPS):
            chosen = uids[start : start + _SLICE_GROUPS]
            work = partial(leaving.discard, uids=chosen, node=node, reason=reason)
            count = partial(_with_more, discarded)
            is_last = start + _SLICE_GROUPS >= len(uids)
            discarded = count(await self._connections.step(answers.kept_with(work, count) if is_last else work))
        return discarded.groups

    async def set_priority(self, priorities: Mapping[int, float]) -> int:
        async with self._used():
            return await self._connections.step(lambda step: leaving.set_priority(step, priorities))

    async def saved(self, model_step: int) -> None:
        async with self._used():
            await self._connections.step(lambda step: leaving.saved(step, model_step, self._settings.keep_trained))

    async def saved_step(self) -> int | None:
        return await self._read(lambda connection: connection.fetchval("SELECT saved_step FROM store"))

    async def rewind(self, model_step: int) -> dict[str, int]:
        async with self._used():
            return await self._connections.step(lambda step: leaving.rewind(step, model_step))

    # --- ends -----------------------------------------------------------------------------------------

    async def note_ends(self) -> None:
        await self._read(
            lambda connection: connection.execute("UPDATE store SET notes_ends = true WHERE NOT notes_ends")
        )

    async def ends(self, owner: str, limit: int) -> list[tuple[int, GroupEnd]]:
        self._check_owner(owner)
        async with self._used():
            async with self._connections.lend() as connection:
                if not await connection.fetchval("SELECT EXISTS (SELECT FROM ends)"):
                    return []
            return await self._connections.step(lambda step: leaving.take_ends(step, owner, limit))

    async def forget_ends(self, numbers: Sequence[int]) -> None:
        await self._read(
            lambda connection: connection.execute("DELETE FROM ends WHERE number = ANY($1)", list(numbers))
        )

    # --- calls that may come twice --------------------------------------------------------------------

    async def answer(self, client: str, sequence: int) -> Answered | None:
        async with self._used():
            # A step: commits that are in doubt are resolved first, and what they claimed is undone.
            found = await self._anew(lambda: self._connections.step(lambda step: answers.look(step, client, sequence)))
        if found is None:
            return None
        kept, rows, lost = found
        if not isinstance(kept, Handed):
            return Answered(value_of(kept))
        if lost:
            raise kept.lost(lost)
        return Answered(claimed_rows(kept, rows))

    async def forget(self, client: str) -> None:
        await self._read(lambda connection: answers.forget(connection, client))

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
            kept = answers.kept_with(
                lambda step: streams.restore(step, accounts, next_uid, next_timestamp_id, rows), lambda _: Done()
            )
            await self._once(lambda: self._connections.step(kept, once=True))
            await self._look_at_usage()


def _with_more(counted: Counted, records: Sequence[Record]) -> Counted:
    """Groups by task, with those of some more records."""
    groups = dict(counted.groups)
    for record in records:
        groups[record.task_name] = groups.get(record.task_name, 0) + 1
    return Counted(groups)
