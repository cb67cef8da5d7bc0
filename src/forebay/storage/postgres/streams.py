"""Everything out as a stream, and a stream in: how a store is saved, moved and restored.

A snapshot reads one moment (REPEATABLE READ) on a connection of its own while others go on; it holds a bounded number
of bytes however much is stored. A restore is one transaction: COPY, slice by slice, visible when all of it is there and
the ledger of every task closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from typing import Any

import asyncpg

from forebay.codec.frame import encode_group
from forebay.core.ledger import Account, Place, check_closed
from forebay.core.record import Record, Row
from forebay.core.rollout import group_status
from forebay.errors import DamagedData, InvalidInput, StorageUnavailable
from forebay.storage.postgres import watermarks
from forebay.storage.postgres.connections import Connections, Step
from forebay.storage.postgres.rows import COLUMNS, RECORD_OF_G, read_record, read_row, record_values, to_text
from forebay.storage.postgres.schema import TALLY_COLUMNS
from forebay.storage.postgres.tally import tally_values
from forebay.storage.postgres.transactions import LOST

__all__ = ["Stream", "restore"]

_SLICE_ROWS = 128
_SLICE_BYTES = 8 << 20

_HEADS = f"""
SELECT {RECORD_OF_G}, coalesce(octet_length(p.frame), 0) AS frame_bytes FROM groups g LEFT JOIN payloads p USING (uid)
WHERE g.uid > $1 ORDER BY g.uid LIMIT {_SLICE_ROWS}"""
_FRAMES = "SELECT uid, frame FROM payloads WHERE uid = ANY($1)"


class Stream:
    """The rows of one moment. It has a connection until nobody can read from it any more, or the storage is closed."""

    def __init__(self, connections: Connections, connection: Any, ended: Callable[[], None]) -> None:
        self._connections = connections
        self._connection = connection
        self._ended = ended
        self._open = True
        self._loop = asyncio.get_running_loop()

    def rows(self) -> AsyncGenerator[Row, None]:
        rows = self._rows(self._connection)
        # A generator that nobody ever reads from has no end of its own.
        weakref.finalize(rows, self._forgotten)
        return rows

    def _forgotten(self) -> None:
        if self._open:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its connections with it
                self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._connections.discard(self._connection)
            self._ended()

    async def _rows(self, connection: Any) -> AsyncGenerator[Row, None]:
        above = 0
        try:
            while heads := await connection.fetch(_HEADS, above):
                above = heads[-1]["uid"]
                for slice_ in _slices(heads):
                    frames = await connection.fetch(_FRAMES, [row["uid"] for row in slice_])
                    by_uid = {row["uid"]: row["frame"] for row in frames}
                    for row in slice_:
                        yield _read(row, by_uid.pop(row["uid"], None))
        except LOST as error:
            raise StorageUnavailable(f"the database went away while a snapshot was read: {error}") from error
        finally:
            self._end()


def _read(row: Any, frame: bytes | None) -> Row:
    record = read_record(row)
    try:
        return read_row(record, frame)
    except DamagedData as error:
        raise DamagedData(f"the payload of group uid {record.uid} was damaged on disk: {error}") from None


def _slices(heads: list[Any]) -> list[list[Any]]:
    slices: list[list[Any]] = [[]]
    size = 0
    for row in heads:
        if slices[-1] and size + row["frame_bytes"] > _SLICE_BYTES:
            slices.append([])
            size = 0
        slices[-1].append(row)
        size += row["frame_bytes"]
    return slices


async def restore(
    step: Step, accounts: Mapping[str, Account], next_uid: int, next_timestamp_id: int, rows: AsyncIterable[Row]
) -> None:
    """Fill an empty store. InvalidInput, and nothing restored, if it is not empty or the stream contradicts itself."""
    connection = step.connection
    await connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")  # the stream may be slow
    await connection.execute("LOCK TABLE groups, accounts, tallies IN SHARE ROW EXCLUSIVE MODE")
    if await connection.fetchval(
        "SELECT EXISTS (SELECT FROM groups) OR EXISTS (SELECT FROM accounts) OR EXISTS (SELECT FROM tallies)"
    ):
        raise InvalidInput("a stream is restored into an empty storage; this one has been used; nothing restored")
    last_uid = archived = 0
    records: list[tuple[Any, ...]] = []
    frames: list[tuple[int, bytes]] = []
    size = 0
    async for row in rows:
        record = row.record
        _check_follows(record, last_uid, next_uid, next_timestamp_id, accounts)
        last_uid = record.uid
        if record.place is Place.ARCHIVED:
            archived += 1
            records.append(record_values(record, archived, group_status(row.group)))
        else:
            records.append(record_values(record))
        frames.append((record.uid, encode_group(row.group)))
        size += len(frames[-1][1])
        if size >= _SLICE_BYTES or len(records) >= _SLICE_ROWS * 8:
            await _copy(connection, records, frames)
            records, frames, size = [], [], 0
    await _copy(connection, records, frames)
    await _restore_accounts(step, accounts)
    await connection.execute(
        "SELECT setval('uids', $1, false), setval('arrivals', $2, false), setval('hand_ids', $3, false), "
        "setval('archive_ids', $4, false)",
        next_uid,
        next_timestamp_id,
        max([1, *(-account.next_hand_id for account in accounts.values())]),
        archived + 1,
    )


def _check_follows(
    record: Record, last_uid: int, next_uid: int, next_timestamp_id: int, accounts: Mapping[str, Account]
) -> None:
    if not last_uid < record.uid < next_uid or record.timestamp_id >= next_timestamp_id:
        raise InvalidInput(f"row {record.uid} does not follow row {last_uid} below {next_uid}; nothing restored")
    if record.task_name not in accounts:
        raise InvalidInput(f"row {record.uid} is of task {record.task_name!r}, which has no account; nothing restored")


async def _copy(connection: Any, records: list[tuple[Any, ...]], frames: list[tuple[int, bytes]]) -> None:
    try:
        await connection.copy_records_to_table("groups", columns=COLUMNS, records=records)
        await connection.copy_records_to_table("payloads", columns=("uid", "frame"), records=frames)
    except asyncpg.UniqueViolationError as error:
        raise InvalidInput(f"a group stands twice in the stream ({error.detail}); nothing restored") from None


async def _restore_accounts(step: Step, accounts: Mapping[str, Account]) -> None:
    """The accounts and their counts, if they agree with the rows."""
    connection = step.connection
    counts: dict[str, list[tuple[str, str, int, int, int, int]]] = {}
    for row in await connection.fetch(
        "SELECT task_name, place, status, count(*) AS groups, sum(tokens)::bigint AS tokens, sum(bytes)::bigint AS "
        "bytes, sum(greatest(0, reserved_bytes - bytes))::bigint FROM groups GROUP BY task_name, place, status"
    ):
        counts.setdefault(row["task_name"], []).append(tuple(row)[1:])
    columns = ", ".join(TALLY_COLUMNS)
    values = ", ".join(f"($2::bigint[])[{i + 1}]" for i in range(len(TALLY_COLUMNS)))
    for task_name, account in accounts.items():
        name = to_text(task_name)
        found = counts.get(name, [])
        places, tokens = dict.fromkeys(Place, 0), dict.fromkeys(Place, 0)
        for place, _, groups, held_tokens, _, _ in found:
            places[Place(place)] += groups
            tokens[Place(place)] += held_tokens
        check_closed(account, places, tokens, task_name)
        await connection.execute(
            f"INSERT INTO tallies (task_name, shard, {columns}) SELECT $1::text, 0, {values}",
            name,
            tally_values(account, found),
        )
        await connection.executemany(
            "INSERT INTO reasons (task_name, reason, shard, groups) VALUES ($1, $2, 0, $3)",
            [(name, to_text(reason), groups) for reason, groups in account.reasons.items()],
        )
        await connection.executemany(
            "INSERT INTO sizes (task_name, size, shard, groups) VALUES ($1, $2, 0, $3)",
            [(name, size, groups) for size, groups in account.sizes.items()],
        )
        await connection.execute(
            "INSERT INTO accounts (task_name, cursor, source_state) VALUES ($1, $2, $3)",
            name,
            account.cursor,
            account.source_state,
        )
        if account.watermark is not None:
            await watermarks.write(connection, task_name, account.watermark)
        step.wake(task_name)
        step.tally.buffered += places[Place.BUFFERED]
