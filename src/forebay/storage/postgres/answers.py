"""The answers of calls that may be repeated: the table `calls`, written in the transaction of their effect.

Part 0 of a call is its answer (see `storage.idempotency`). Beside that of a claim are the frames of the groups that it
took for good, each under the uid of its group; the server copies them. `Step.answer` writes both. A second answer to
one call is refused: another process has answered it meanwhile, and the step of this one is rolled back.
"""

from __future__ import annotations

from typing import Any

from forebay.core.ledger import Row
from forebay.storage.base import Claimed
from forebay.storage.idempotency import Answered, Handed, claimed_rows, decode_kept, is_held, value_of
from forebay.storage.payloads import Reading
from forebay.storage.postgres.claims import undo
from forebay.storage.postgres.columns import to_text
from forebay.storage.postgres.step import Step

__all__ = ["forget", "look", "retract"]


async def retract(connection: Any, client: str, sequence: int) -> bool:
    """Drop the answer of a call that is undone; whether it existed."""
    dropped = await connection.fetch(
        "DELETE FROM calls WHERE client = $1 AND sequence = $2 RETURNING part", to_text(client), sequence
    )
    return bool(dropped)


async def forget(connection: Any, client: str) -> None:
    """Drop all answers of a client."""
    await connection.execute("DELETE FROM calls WHERE client = $1", to_text(client))


async def look(step: Step, client: str, sequence: int) -> Answered | Exception | None:
    """The answer of a call. For a claim that lost some of its groups: the error to raise, after the commit.

    The other groups of such a claim are put back: its caller will hear of none of them.
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
        return Answered(value_of(kept))
    held = {record.uid: record for record in kept.held()}
    if held:
        now = await step.lock("g.uid = ANY($1)", list(held))
        here = [record.uid for record in now if is_held(record, held[record.uid])]
        rows = await connection.fetch("SELECT uid, frame FROM payloads WHERE uid = ANY($1)", here)
        frames |= {row["uid"]: row["frame"] for row in rows}
    reading = Reading()
    records = [record for task_records in kept.records.values() for record in task_records]
    for record in records:
        await reading.add(record, frames.get(record.uid))
    lost = len(records) - len(reading.rows)
    if not lost:
        return Answered(Claimed(claimed_rows(kept, reading.rows)))
    # Groups that cannot be read go back as well, if their frame exists: the next claim ends them as failed.
    await undo(step, claimed_rows(kept, (Row(record, ()) for record in records)), frames)
    await retract(connection, client, sequence)
    return kept.lost(lost)
