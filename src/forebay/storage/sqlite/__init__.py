"""SQLiteStorage: the embedded durable store. What it answered for survives `kill -9` (G7).

Decisions are made in memory, by the very rules and indexes of MemoryStorage, over the metadata of all groups; every
change is written to the database by one writer thread, and a call returns when its transaction is on disk. So
choosing and counting cost what they cost in memory, payloads stay on disk, and after a crash the store is as of the
last commit. One process writes; any number may read the file (views `groups` and `samples`).

A payload that was damaged on disk costs its group, which ends as failed with that reason, never the store.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence

from msgspec.structs import replace

from forebay.codec.frame import decode_group, encode_group
from forebay.codec.records import decode_account, encode_account
from forebay.core.aio import in_thread
from forebay.core.ledger import Account, Place
from forebay.core.record import Record, Row, identify, number_rollouts
from forebay.core.rollout import Group
from forebay.errors import DamagedData, InvalidInput, UnreadableData
from forebay.storage.base import Arrival, Claim, Claimed, Content, Purpose, Revision, Snapshot
from forebay.storage.idempotency import (
    CALL,
    Answered,
    Call,
    Done,
    Handed,
    claimed_rows,
    decode_kept,
    is_held,
    taken_for_good,
    value_of,
)
from forebay.storage.local.base import check_stream_end, check_stream_row
from forebay.storage.local.engine import LocalStorage
from forebay.storage.sqlite import schema
from forebay.storage.sqlite.journal import JournalTable, payload_of
from forebay.storage.sqlite.life import SQLiteLife
from forebay.storage.sqlite.statements import (
    emptied,
    forgetting,
    in_turn,
    inserting,
    reading,
    remembered,
    remembering,
    restored,
    retracting,
)

__all__ = ["SQLiteStorage"]

log = logging.getLogger(__name__)

_SLICE_BYTES = 2**19  # of frames, encoded or decoded before the event loop gets its turn
_STREAM_GROUPS = 64
_UNKNOWN: Mapping[int, float] = {}


class SQLiteStorage(SQLiteLife):
    """A durable store in one file.

    `synchronous="NORMAL"` is faster and may lose the last commits in a power cut; never in a crash of the process.
    """

    # --- payloads -----------------------------------------------------------------------------------

    def _kept(self, content: Content, task_name: str, group_id: int) -> Group:
        assert content.frame is not None
        return payload_of(content.frame, schema.summary_of(content.group))

    async def _encoded(self, contents: Sequence[Content]) -> list[Content]:
        """Contents with their frames, made before anything changes: what cannot be stored is refused here."""
        encoded = []
        pending = 0
        for content in contents:
            frame = encode_group(content.group)
            encoded.append(replace(content, frame=frame))
            pending += len(frame)
            if pending >= _SLICE_BYTES:
                pending = 0
                await asyncio.sleep(0)
        return encoded

    async def issue(
        self, task_name: str, contents: Sequence[Content], *, owner: str, cursor: int, source_state: bytes | None = None
    ) -> list[Record]:
        encoded = await self._encoded(contents)
        records = await super().issue(task_name, encoded, owner=owner, cursor=cursor, source_state=source_state)
        for content, record in zip(contents, records, strict=True):
            identify(content.group, task_name, record.group_id)
        return records

    async def put(self, arrivals: Sequence[Arrival], *, owner: str) -> list[Record]:
        encoded = await self._encoded([arrival.content for arrival in arrivals])
        return await super().put(
            [replace(arrival, content=content) for arrival, content in zip(arrivals, encoded, strict=True)], owner=owner
        )

    async def revise(self, revisions: Sequence[Revision]) -> list[bool]:
        contents = iter(await self._encoded([r.content for r in revisions if r.content is not None]))
        encoded = [r if r.content is None else replace(r, content=next(contents)) for r in revisions]
        return await super().revise(encoded)

    async def claim(self, claim: Claim) -> Claimed | None:
        call = CALL.get()
        while True:
            chosen = self._choose(claim)
            if chosen is None:
                return None
            moved_at = {row.record.uid: row.record.moved_at for _, _, rows in chosen for row in rows}
            claimed = self._claim(claim, chosen)
            remember = None
            if call is not None and moved_at:
                records = {task_name: [row.record for row in rows] for task_name, rows in claimed.items()}
                remember = remembering(call, Handed.of(claim, records))
            frames_of = reading(list(moved_at))
            write = in_turn(remember, self._take_changes())

            def work(
                connection: sqlite3.Connection,
                frames_of: Callable[[sqlite3.Connection], dict[int, bytes]] = frames_of,
                write: Callable[[sqlite3.Connection], None] | None = write,
            ) -> dict[int, bytes]:
                frames = frames_of(connection)
                if write is not None:
                    write(connection)
                return frames

            frames, cancelled = await self._see_through(self._submit(work, size=4_096 * len(moved_at)))
            if cancelled is not None:
                await self._put_back(_with_payloads(claimed, frames), call, moved_at)
                raise cancelled
            try:
                loaded, damaged = await self._decoded([row for rows in claimed.values() for row in rows], frames)
            except BaseException:  # intact, but not to be read here; or cancelled
                await self._put_back(_with_payloads(claimed, frames), call, moved_at)
                raise
            if damaged:
                await self._put_back(_with_payloads(claimed, frames), call, moved_at)
                await self._fail_damaged(damaged)
                continue
            by_uid = {row.record.uid: row for row in loaded}
            if claim.purpose is Purpose.TAKE:
                await LocalStorage._finish(self, [task_name for task_name, rows in claimed.items() if rows])
            return {
                task_name: [by_uid[row.record.uid] for row in rows if row.record.uid in by_uid]
                for task_name, rows in claimed.items()
            }

    async def undo(self, claim: Claim, claimed: Claimed) -> None:
        kept: Claimed = {}
        pending = 0
        for task_name, rows in claimed.items():
            kept[task_name] = []
            for row in rows:
                if taken_for_good(row.record):
                    frame = encode_group(row.group)
                    row = Row(row.record, payload_of(frame, schema.summary_of(row.group)))
                    pending += len(frame)
                kept[task_name].append(row)
                if pending >= _SLICE_BYTES:
                    pending = 0
                    await asyncio.sleep(0)
        await self._put_back(kept, CALL.get())

    async def _put_back(self, claimed: Claimed, call: Call | None, moved_at: Mapping[int, float] = _UNKNOWN) -> None:
        """Undo a claim, and drop its answer. What was taken for good comes with its payload."""
        tasks = self._undo(claimed, moved_at)
        await self._commit(tasks, None if call is None else retracting(call.client, call.sequence))

    async def _fail_damaged(self, damaged: Mapping[int, str]) -> None:
        """Groups whose payload cannot be read end as failed."""
        for uid, error in damaged.items():
            log.error("payload_damaged path=%s uid=%d %s", self.path, uid, error)
        await self.fail(dict.fromkeys(damaged, "its payload was damaged on disk"))

    async def _loaded(self, rows: list[Row]) -> list[Row]:
        frames = await self._do(reading([row.record.uid for row in rows]))
        loaded, damaged = await self._decoded(rows, frames)
        if damaged:
            await self._fail_damaged(damaged)
        return loaded

    async def read(self, uid: int) -> Row | None:
        row = self._table.get(uid)
        loaded = [] if row is None else await self._loaded([row])
        return loaded[0] if loaded else None

    async def _decoded(self, rows: Sequence[Row], frames: Mapping[int, bytes]) -> tuple[list[Row], dict[int, str]]:
        loaded: list[Row] = []
        damaged: dict[int, str] = {}
        pending = 0
        for row in rows:
            record = row.record
            pending += len(frames.get(record.uid, b"")) + 4_096
            if pending >= _SLICE_BYTES:
                pending = 0
                await asyncio.sleep(0)
            try:
                frame = frames.get(record.uid)
                if frame is None:
                    raise DamagedData("its payload is missing")
                group = decode_group(frame)
                identify(group, record.task_name, record.group_id)
                number_rollouts(group, record.group_id)
                loaded.append(Row(record, group))
            except UnreadableData:
                raise
            except DamagedData as error:
                damaged[record.uid] = str(error)
        return loaded, damaged

    # --- calls that may come twice --------------------------------------------------------------------

    async def answer(self, client: str, sequence: int) -> Answered | None:
        frames = await self._do(remembered(client, sequence))
        if 0 not in frames:
            return None
        kept = decode_kept(frames.pop(0))
        if not isinstance(kept, Handed):
            return Answered(value_of(kept))
        held = kept.held()
        if held:
            frames |= await self._do(reading([record.uid for record in held]))
        handed = [Row(record, ()) for records in kept.records.values() for record in records]
        loaded, _ = await self._decoded(handed, frames)
        here = [row for row in loaded if taken_for_good(row.record) or self._is_held(row.record)]
        if len(here) < len(handed):
            # Its caller cannot have all of it: it gets nothing, and holds nothing that it never learns of.
            await self._put_back(_with_payloads(claimed_rows(kept, handed), frames), Call(client, sequence, 0))
            raise kept.lost(len(handed) - len(here))
        return Answered(claimed_rows(kept, here))

    def _is_held(self, claimed: Record) -> bool:
        row = self._table.get(claimed.uid)
        return row is not None and is_held(row.record, claimed)

    async def forget(self, client: str) -> None:
        await self._do(forgetting(client))

    # --- streams ------------------------------------------------------------------------------------

    async def snapshot(self) -> Snapshot:
        write = self._take_changes()
        if write is not None:
            self._submit(write)
        rows = self._table.rows()
        accounts = {task_name: decode_account(encode_account(account)) for task_name, account in self._accounts.items()}
        next_uid, next_timestamp_id = self._next_uid, self._next_timestamp_id
        # Everything up to here is committed when this runs, and nothing after it: the reader sees exactly `rows`.
        reader = await self._do(self._pinned_reader, alone=True)
        return Snapshot(accounts, next_uid, next_timestamp_id, self._stream_from(reader, rows))

    def _pinned_reader(self, connection: sqlite3.Connection) -> sqlite3.Connection:
        reader = sqlite3.connect(
            f"{self.path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM meta").fetchone()
        return reader

    async def _stream_from(self, reader: sqlite3.Connection, rows: list[Row]) -> AsyncGenerator[Row, None]:
        try:
            for start in range(0, len(rows), _STREAM_GROUPS):
                part = rows[start : start + _STREAM_GROUPS]
                read = reading([row.record.uid for row in part])
                frames = await in_thread(lambda read=read: read(reader))  # type: ignore[misc]
                loaded, damaged = await self._decoded(part, frames)
                for uid, error in damaged.items():
                    raise DamagedData(f"the payload of group uid {uid} was damaged on disk: {error}")
                for row in loaded:
                    yield row
        finally:
            reader.close()

    async def restore(
        self, accounts: Mapping[str, Account], next_uid: int, next_timestamp_id: int, rows: AsyncIterable[Row]
    ) -> None:
        if self._accounts or self._table.rows():
            raise InvalidInput("a stream is restored into an empty storage; this one has been used; nothing restored")
        await self._do(lambda connection: connection.execute("INSERT OR REPLACE INTO meta VALUES ('restoring', 1)"))
        table = JournalTable(self._settings.order)
        archived: deque[int] = deque()
        try:
            last_uid = 0
            part: list[tuple[list[object], tuple[int, bytes, str]]] = []
            async for row in rows:
                check_stream_row(row.record, last_uid, next_uid, next_timestamp_id, accounts, table)
                last_uid = row.record.uid
                frame = encode_group(row.group)
                part.append((schema.values_of(row.record), (last_uid, frame, schema.summary_of(row.group))))
                table.load(row.record)
                if row.record.place is Place.ARCHIVED:
                    archived.append(last_uid)
                if len(part) == _STREAM_GROUPS:
                    await self._do(inserting(part))
                    part = []
            if part:
                await self._do(inserting(part))
            check_stream_end(accounts, table)
        except BaseException:
            self._written_meta = {}
            await self._do(emptied)
            raise
        self._table, self._archived = table, archived
        self._accounts = {task_name: decode_account(encode_account(account)) for task_name, account in accounts.items()}
        self._next_uid, self._next_timestamp_id = next_uid, next_timestamp_id
        call = CALL.get()
        remember = None if call is None else remembering(call, Done())
        await self._commit(list(accounts), in_turn(remember, restored))


def _with_payloads(claimed: Claimed, frames: Mapping[int, bytes]) -> Claimed:
    """Claimed rows, those that were taken for good with what is to be stored again."""
    return {
        task_name: [_with_payload(row, frames) if taken_for_good(row.record) else row for row in rows]
        for task_name, rows in claimed.items()
    }


def _with_payload(row: Row, frames: Mapping[int, bytes]) -> Row:
    frame = frames.get(row.record.uid, b"")
    return Row(row.record, payload_of(frame, _summary_of_frame(frame)))


def _summary_of_frame(frame: bytes) -> str:
    try:
        return schema.summary_of(decode_group(frame))
    except DamagedData:
        return "[]"
