"""The answers of calls that may come twice: the table `calls`, written in the transaction of their effect.

Part 0 of a call is its answer (see `storage.calls`). Beside that of a claim lie the frames of the groups that it took
for good, each under the uid of its group; the server copies them, they do not travel. A second answer to one call is
refused: another process has done it meanwhile, and what this one was about to do is rolled back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import asyncpg

from forebay.core.record import Row
from forebay.storage.idempotency import CALL, Call, Handed, Kept, claimed_rows, decode_kept, encode_kept, is_held
from forebay.storage.postgres.claiming import Reading, undo_claim
from forebay.storage.postgres.connections import Step, Work
from forebay.storage.postgres.rows import RECORD, read_record, to_text

__all__ = ["forget", "is_done_elsewhere", "kept_with", "look", "retract", "store"]

T = TypeVar("T")

_SLICE_BYTES = 4 << 20
"""Frames that are read before the event loop gets its turn: a few milliseconds."""

_STORE = """
WITH seen AS (DELETE FROM calls WHERE client = $1 AND sequence <= $3)
INSERT INTO calls (client, sequence, part, data)
SELECT $1::text, $2::bigint, 0, $4::bytea
UNION ALL SELECT $1, $2, uid, frame FROM payloads WHERE uid = ANY($5::bigint[])"""


async def store(connection: Any, call: Call, kept: Kept) -> None:
    """Write the answer of a call, and drop those that its client has seen. Before payloads of taken groups go."""
    ended = [record.uid for record in kept.ended()] if isinstance(kept, Handed) else []
    await connection.execute(_STORE, to_text(call.client), call.sequence, call.confirmed, encode_kept(kept), ended)


def kept_with(work: Work[T], answer: Callable[[T], Kept]) -> Work[T]:
    """Work that writes its answer too, if it belongs to a call."""
    call = CALL.get()
    if call is None:
        return work

    async def both(step: Step) -> T:
        result = await work(step)
        await store(step.connection, call, answer(result))
        return result

    return both


def is_done_elsewhere(error: asyncpg.UniqueViolationError) -> bool:
    """Whether a step failed because its call was answered already."""
    return bool(error.table_name == "calls")


async def retract(connection: Any, client: str, sequence: int) -> bool:
    """Drop the answer of a call that is undone; whether it was there."""
    dropped = await connection.fetch(
        "DELETE FROM calls WHERE client = $1 AND sequence = $2 RETURNING part", to_text(client), sequence
    )
    return bool(dropped)


async def forget(connection: Any, client: str) -> None:
    """Drop all answers of a client."""
    await connection.execute("DELETE FROM calls WHERE client = $1", to_text(client))


async def look(step: Step, client: str, sequence: int) -> tuple[Kept, list[Row], int] | None:
    """The answer of a call; with that of a claim its rows, and how many of them it no longer holds.

    If it lost some, the others are put back: its caller will hear of none of them.
    """
    connection = step.connection
    found = await connection.fetch(
        "SELECT part, data FROM calls WHERE client = $1 AND sequence = $2", to_text(client), sequence
    )
    frames: dict[int, bytes] = {row["part"]: row["data"] for row in found}
    if 0 not in frames:
        return None
    kept = decode_kept(frames.pop(0))
    if not isinstance(kept, Handed):
        return kept, [], 0
    held = {record.uid: record for record in kept.held()}
    if held:
        now = await connection.fetch(
            f"SELECT {RECORD} FROM groups WHERE uid = ANY($1) ORDER BY uid FOR UPDATE", list(held)
        )
        here = [row["uid"] for row in now if is_held(read_record(row), held[row["uid"]])]
        rows = await connection.fetch("SELECT uid, frame FROM payloads WHERE uid = ANY($1)", here)
        frames |= {row["uid"]: row["frame"] for row in rows}
    reading = Reading()
    records = [record for found in kept.records.values() for record in found]
    size = 0
    for record in records:
        reading.add(record, frames.get(record.uid))
        size += record.bytes
        if size >= _SLICE_BYTES:
            size = 0
            await asyncio.sleep(0)
    lost = len(records) - len(reading.rows)
    if lost:
        # What cannot be read goes back as well, if its frame is there: the next claim meets it, and it ends as failed.
        await undo_claim(step, kept.claim, claimed_rows(kept, (Row(record, ()) for record in records)), frames)
        await retract(connection, client, sequence)
    return kept, reading.rows, lost
