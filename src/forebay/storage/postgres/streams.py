"""Everything out as a stream, and a stream in: how a store is saved, moved and restored.

A snapshot reads one moment (REPEATABLE READ) on its own connection while others continue; it needs a bounded number of
bytes however much is stored. A restore is one transaction: COPY, slice by slice, visible when all of it is stored and
the ledger of every task closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from operator import itemgetter
from typing import Any

from forebay.codec.frame import encode_group
from forebay.core.ledger import Account, Place, Row
from forebay.core.rollout import group_status
from forebay.errors import DamagedData, InvalidInput, StorageUnavailable
from forebay.storage.base import Snapshot
from forebay.storage.idempotency import Done
from forebay.storage.payloads import in_slices, read_row
from forebay.storage.postgres import accounts, reads
from forebay.storage.postgres.columns import COLUMNS, RECORD, read_record, record_values
from forebay.storage.postgres.step import Step
from forebay.storage.postgres.transactions import LOST, READ, is_closed
from forebay.storage.rules import StreamCheck, is_used, restored_accounts

__all__ = ["Stream", "restore"]

_SLICE_ROWS = 128
_SLICE_BYTES = 8 << 20

_HEADS = f"""
SELECT {RECORD}, coalesce(octet_length(p.frame), 0) AS frame_bytes FROM groups g LEFT JOIN payloads p USING (uid)
WHERE g.uid > $1 ORDER BY g.uid LIMIT {_SLICE_ROWS}"""
_FRAMES = "SELECT uid, frame FROM payloads WHERE uid = ANY($1)"
_NEXT_NUMBERS = """
SELECT u.last_value + u.is_called::int AS uid, a.last_value + a.is_called::int AS timestamp_id
FROM uids u, arrivals a"""


class Stream:
    """The rows of one moment. It has a connection until it is read to its end, or forgotten, or ended."""

    def __init__(self, connection: Any, ended: Callable[[Stream], None]) -> None:
        self._connection = connection
        self._ended = ended
        self._open = True
        self._loop = asyncio.get_running_loop()

    async def snapshot(self) -> Snapshot:
        """Begin to read."""
        connection = self._connection
        await connection.execute("SET idle_in_transaction_session_timeout = 0")  # its reader may be slow
        await connection.execute(READ)
        summary, _ = await reads.summary(connection, None, False)
        numbers = await connection.fetchrow(_NEXT_NUMBERS)
        rows = self._rows(connection)
        # A generator that nobody ever reads from never ends by itself.
        weakref.finalize(rows, self._forgotten)
        found = {task_name: task.account for task_name, task in summary.tasks.items()}
        return Snapshot(found, numbers["uid"], numbers["timestamp_id"], rows)

    def _forgotten(self) -> None:
        if self._open:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its connections with it
                self._loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        """Give up the connection."""
        if self._open:
            self._open = False
            if not is_closed(self._connection):
                self._connection.terminate()
            self._ended(self)

    async def _rows(self, connection: Any) -> AsyncGenerator[Row, None]:
        above = 0
        try:
            while heads := await connection.fetch(_HEADS, above):
                above = heads[-1]["uid"]
                for part in in_slices(heads, itemgetter("frame_bytes"), _SLICE_BYTES):
                    frames = await connection.fetch(_FRAMES, [row["uid"] for row in part])
                    by_uid = {row["uid"]: row["frame"] for row in frames}
                    for row in part:
                        yield _read(row, by_uid.pop(row["uid"], None))
        except LOST as error:
            raise StorageUnavailable(f"the database went away while a snapshot was read: {error}") from error
        finally:
            self.end()


def _read(row: Any, frame: bytes | None) -> Row:
    record = read_record(row)
    try:
        return read_row(record, frame)
    except DamagedData as error:
        raise DamagedData(f"the payload of group uid {record.uid} was damaged on disk: {error}") from None


async def restore(
    step: Step, saved: Mapping[str, Account], next_uid: int, next_timestamp_id: int, rows: AsyncIterable[Row]
) -> None:
    """Fill an empty store. InvalidInput, and nothing restored, if it is not empty or the stream contradicts itself."""
    connection, counters = step.connection, step.counters
    await connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")  # the stream may be slow
    await connection.execute("LOCK TABLE groups, accounts, counters IN SHARE ROW EXCLUSIVE MODE")
    summary, _ = await reads.summary(connection, None, False)
    present = {task_name: task.account for task_name, task in summary.tasks.items()}
    if is_used(present):
        raise InvalidInput("a stream is restored into an empty storage; this one has been used; nothing restored")
    check = StreamCheck(saved, next_uid, next_timestamp_id)
    records: list[tuple[Any, ...]] = []
    frames: list[tuple[int, bytes]] = []
    size = 0
    async for row in rows:
        record = row.record
        check.row(record)
        counters.enter(record)
        records.append(record_values(record, group_status(row.group) if record.place is Place.ARCHIVED else None))
        frames.append((record.uid, encode_group(row.group)))
        size += len(frames[-1][1])
        if size >= _SLICE_BYTES or len(records) >= _SLICE_ROWS * 8:
            await _copy(connection, records, frames)
            records, frames, size = [], [], 0
    await _copy(connection, records, frames)
    check.end()
    for task_name, account in saved.items():
        counters.restore(task_name, account)
        step.wake(task_name)
    await accounts.write(connection, restored_accounts(saved, present))
    await connection.execute(
        "SELECT setval('uids', $1, false), setval('arrivals', $2, false), setval('hand_ids', $3, false)",
        next_uid,
        next_timestamp_id,
        max([1, *(-account.next_hand_id for account in saved.values())]),
    )
    step.answer(Done())


async def _copy(connection: Any, records: list[tuple[Any, ...]], frames: list[tuple[int, bytes]]) -> None:
    await connection.copy_records_to_table("groups", columns=COLUMNS, records=records)
    await connection.copy_records_to_table("payloads", columns=("uid", "frame"), records=frames)
