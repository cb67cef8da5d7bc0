"""The plain rivals of the durable stores: the same rows, columns and indexes, without a buffer around them.

They get frames and column values that are ready to be written, check nothing, count nothing and decode nothing.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from forebay.codec.frame import encode_group
from forebay.core.ledger import Place, Record, describe
from forebay.core.rollout import Group, Status
from forebay.storage.sqlite import schema

__all__ = ["Entry", "Numbers", "PlainPostgres", "PlainSQLite", "Rival"]

T = TypeVar("T")

TASK = "math"


class Entry:
    """A group that is ready to be written."""

    def __init__(self, record: Record, frame: bytes, summary: str) -> None:
        self.record = record
        self.frame = frame
        self.summary = summary


class Numbers:
    """Entries with numbers of their own, made before the clock runs."""

    def __init__(self) -> None:
        self._last = 0

    def entries(self, groups: Sequence[Group], frames: Sequence[bytes]) -> list[Entry]:
        made = []
        for group, frame in zip(groups, frames, strict=True):
            self._last += 1
            facts = describe(group)
            record = Record(
                uid=self._last,
                timestamp_id=self._last,
                task_name=TASK,
                group_id=-self._last,
                status=facts.status,
                place=Place.BUFFERED,
                samples=facts.samples,
                tokens=facts.tokens,
                bytes=facts.bytes,
                num_tries=facts.num_tries,
                reward=facts.reward,
                oldest_step=facts.oldest_step,
                newest_step=facts.newest_step,
                token_step=facts.token_step,
                given_staleness=facts.given_staleness,
                created_at=1e9,
                moved_at=1e9,
            )
            made.append(Entry(record, frame, schema.summary_of(group)))
        return made


def frames_of(groups: Sequence[Group]) -> list[bytes]:
    return [encode_group(group) for group in groups]


class Rival(Protocol):
    """What is measured beside a buffer. `put_ready` and `put_one` get what `ready` made outside of the clock."""

    def ready(self, entries: Sequence[Entry]) -> Any: ...

    async def put_many(self, ready: Any) -> None: ...

    async def put_one(self, ready: Any) -> None: ...

    async def take(self, n: int) -> list[bytes]: ...

    async def close(self) -> None: ...


_PAYLOAD = "INSERT INTO payloads (uid, frame, summary) VALUES (?, ?, ?)"
_INSERT = f"INSERT INTO group_rows ({', '.join(schema.COLUMNS)}) VALUES ({', '.join('?' * len(schema.COLUMNS))})"
_TAKE = f"""
SELECT {", ".join(f"g.{name}" for name in schema.COLUMNS)}, p.frame FROM group_rows g JOIN payloads p ON p.uid = g.uid
WHERE g.place = 'buffered' AND g.task_name = ? AND g.status = ? ORDER BY g.timestamp_id LIMIT ?"""


class PlainSQLite:
    """sqlite3 in a thread, write-ahead log, synchronous=FULL."""

    def __init__(self, path: Path) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        schema.create(self._connection)

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def transaction() -> T:
            self._connection.execute("BEGIN IMMEDIATE")
            result = work(self._connection)
            self._connection.execute("COMMIT")
            return result

        return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)

    def ready(self, entries: Sequence[Entry]) -> Any:
        rows = [schema.values_of(entry.record) for entry in entries]
        return rows, [(entry.record.uid, entry.frame, entry.summary) for entry in entries]

    async def put_many(self, ready: Any) -> None:
        rows, payloads = ready

        def work(connection: sqlite3.Connection) -> None:
            connection.executemany(_INSERT, rows)
            connection.executemany(_PAYLOAD, payloads)

        await self._do(work)

    async def put_one(self, ready: Any) -> None:
        await self.put_many(ready)

    async def take(self, n: int) -> list[bytes]:
        def work(connection: sqlite3.Connection) -> list[bytes]:
            rows = connection.execute(_TAKE, (TASK, Status.COMPLETED.value, n)).fetchall()
            uids = [(row[0],) for row in rows]
            connection.executemany("DELETE FROM group_rows WHERE uid = ?", uids)
            connection.executemany("DELETE FROM payloads WHERE uid = ?", uids)
            return [row[-1] for row in rows]

        return await self._do(work)

    async def close(self) -> None:
        self._thread.shutdown()
        self._connection.close()


class PlainPostgres:
    """asyncpg with a pool as large as the storage's own; its tables were made by a storage."""

    def __init__(self, pool: Any, columns: Sequence[str], values: Callable[[Record], Sequence[Any]]) -> None:
        self._pool = pool
        self._columns = list(columns)
        self._values = values
        marks = ", ".join(f"${i + 1}" for i in range(len(columns)))
        self._insert = f"INSERT INTO groups ({', '.join(columns)}) VALUES ({marks})"
        self._take = f"""
            SELECT {", ".join(f"g.{name}" for name in columns)}, p.frame FROM groups g JOIN payloads p ON p.uid = g.uid
            WHERE g.place = 'buffered' AND g.task_name = $1 AND g.status = $2 ORDER BY g.timestamp_id, g.uid LIMIT $3
            FOR UPDATE OF g SKIP LOCKED"""

    def ready(self, entries: Sequence[Entry]) -> Any:
        rows = [tuple(self._values(entry.record)) for entry in entries]
        return rows, [(entry.record.uid, entry.frame) for entry in entries]

    async def put_many(self, ready: Any) -> None:
        rows, payloads = ready
        async with self._pool.acquire() as connection, connection.transaction():
            await connection.copy_records_to_table("groups", columns=self._columns, records=rows)
            await connection.copy_records_to_table("payloads", columns=["uid", "frame"], records=payloads)

    async def put_one(self, ready: Any) -> None:
        (row,), (payload,) = ready
        async with self._pool.acquire() as connection, connection.transaction():
            await connection.execute(self._insert, *row)
            await connection.execute("INSERT INTO payloads (uid, frame) VALUES ($1, $2)", *payload)

    async def take(self, n: int) -> list[bytes]:
        async with self._pool.acquire() as connection, connection.transaction():
            rows = await connection.fetch(self._take, TASK, Status.COMPLETED.value, n)
            uids = [row["uid"] for row in rows]
            await connection.execute("DELETE FROM groups WHERE uid = ANY($1)", uids)
            await connection.execute("DELETE FROM payloads WHERE uid = ANY($1)", uids)
            return [row["frame"] for row in rows]

    async def close(self) -> None:
        await self._pool.close()
