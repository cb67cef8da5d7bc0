"""What becomes of groups that are there: settled, given back, archived, revised, discarded.

Rows are locked in order of uid before they change, so that steps do not wait for each other in a circle. The rules are
those of `local`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from forebay.codec.records import decode_end
from forebay.core.ledger import End, Event, GroupEnd, Place, check_move, rewound_watermark
from forebay.core.query import Node
from forebay.core.record import Record, group_end
from forebay.errors import LostLease
from forebay.storage.base import Revision, Settings
from forebay.storage.postgres import watermarks
from forebay.storage.postgres.connections import Step
from forebay.storage.postgres.rows import RECORD, RECORD_OF_G, RESERVED_AFTER, content_arrays, read_record, to_text
from forebay.storage.postgres.sql_query import condition

__all__ = [
    "archive",
    "discard",
    "end_records",
    "fail",
    "matching",
    "release",
    "revise",
    "rewind",
    "saved",
    "set_priority",
    "settle",
    "take_ends",
]

_EPOCH = "extract(epoch FROM clock_timestamp())::double precision"
_NACK = f"""
UPDATE groups g SET place = 'buffered', owner = NULL, lease_id = NULL, train_step = NULL, moved_at = {_EPOCH}
WHERE uid = ANY($1) AND place = 'leased'"""
_ABANDON = f"""
UPDATE groups g SET place = 'buffered', status = 'aborted', owner = NULL, timestamp_id = u.timestamp_id,
    revision = revision + 1, moved_at = {_EPOCH}
FROM (SELECT uid, nextval('arrivals') AS timestamp_id FROM unnest($1::bigint[]) AS u (uid)) u
WHERE g.uid = u.uid RETURNING {RECORD_OF_G}"""
_ARCHIVE = f"""
UPDATE groups g SET place = 'archived', status = 'archived', trained_as = status, owner = NULL, lease_id = NULL,
    revision = revision + 1, moved_at = {_EPOCH}, archive_id = u.archive_id
FROM (SELECT uid, nextval('archive_ids') AS archive_id FROM unnest($1::bigint[]) AS u (uid)) u WHERE g.uid = u.uid"""
_TRIM = """
DELETE FROM groups WHERE uid IN (
    SELECT uid FROM groups WHERE place = 'archived'
        AND archive_id <= (
            SELECT archive_id FROM groups WHERE place = 'archived' ORDER BY archive_id DESC OFFSET $1 LIMIT 1)
        AND NOT coalesce(train_step > (SELECT saved_step FROM store), false)
    FOR UPDATE SKIP LOCKED
) RETURNING uid"""
_REWIND = f"""
UPDATE groups g SET place = 'buffered', status = trained_as, trained_as = NULL, archive_id = NULL, train_step = NULL,
    revision = revision + 1, moved_at = {_EPOCH}
WHERE place = 'archived' AND train_step > $1 RETURNING {RECORD}"""
_REVISE = f"""
UPDATE groups g SET status = u.status, samples = u.samples, tokens = u.tokens, bytes = u.bytes,
    num_tries = u.num_tries, reward = u.reward, oldest_step = u.oldest_step, newest_step = u.newest_step,
    token_step = u.token_step, given_staleness = u.given_staleness, unjudged = u.unjudged, revision = u.revision,
    reserved_bytes = {RESERVED_AFTER}, session_ids = u.session_ids,
    priority = coalesce(u.priority, g.priority), tags = CASE WHEN u.has_tags THEN u.tags ELSE g.tags END,
    tag_values = CASE WHEN u.has_tags THEN u.tag_values ELSE g.tag_values END
FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[],
    $8::double precision[], $9::bigint[], $10::bigint[], $11::bigint[], $12::bigint[], $13::bigint[],
    $14::double precision[], $15::boolean[], $16::bytea[], $17::jsonb[], $18::bytea[])
    AS u (uid, revision, status, samples, tokens, bytes, num_tries, reward, oldest_step, newest_step, token_step,
    given_staleness, unjudged, priority, has_tags, tags, tag_values, session_ids)
WHERE g.uid = u.uid RETURNING {RECORD_OF_G}"""
_REPLACE_FRAMES = """
UPDATE payloads p SET frame = u.frame FROM unnest($1::bigint[], $2::bytea[]) AS u (uid, frame) WHERE p.uid = u.uid"""

_TAKE_ENDS = """
UPDATE ends SET owner = $1 WHERE number IN (
    SELECT number FROM ends e WHERE owner IS NULL OR owner = $1
        OR NOT EXISTS (SELECT FROM owners o WHERE o.owner = e.owner AND NOT o.reaped)
    ORDER BY number LIMIT $2 FOR UPDATE SKIP LOCKED
) RETURNING number, data"""


# --- ends ---------------------------------------------------------------------------------------------


async def end_records(
    step: Step, records: Sequence[Record], end: End, reason: str | None, *, tokens: int | None = None
) -> None:
    """Book locked rows out and remove them. `tokens`: of what a single one held when it ended."""
    book_out(step, records, end, reason, tokens=tokens)
    uids = [record.uid for record in records]
    await step.connection.execute("DELETE FROM groups WHERE uid = ANY($1)", uids)
    await step.connection.execute("DELETE FROM payloads WHERE uid = ANY($1)", uids)


def book_out(step: Step, records: Sequence[Record], end: End, reason: str | None, *, tokens: int | None = None) -> None:
    for record in records:
        step.tally.leave(record)
        step.tally.end(record.task_name, end, record.tokens if tokens is None else tokens, reason)
        step.tally.note_end(group_end(record, end, reason))
        step.wake(record.task_name)


async def archive(step: Step, uids: Sequence[int], keep_trained: int) -> None:
    """Keep rows that ended as trained, to be looked at or needed again."""
    await step.connection.execute(_ARCHIVE, uids)
    await trimarchive(step, keep_trained)


async def trimarchive(step: Step, keep_trained: int) -> None:
    """Remove the oldest beyond `keep_trained`, except those that no saved weights were trained on yet."""
    trimmed = await step.connection.fetch(_TRIM, keep_trained)
    if trimmed:
        await step.connection.execute("DELETE FROM payloads WHERE uid = ANY($1)", [row["uid"] for row in trimmed])


async def saved(step: Step, model_step: int, keep_trained: int) -> None:
    """Weights of this step are safe, and so is the training up to them."""
    await step.connection.execute("UPDATE store SET saved_step = $1", model_step)
    await trimarchive(step, keep_trained)


async def rewind(step: Step, model_step: int) -> dict[str, int]:
    """Groups that were trained for later steps come back from the archive."""
    rewound: dict[str, int] = {}
    for record in map(read_record, await step.connection.fetch(_REWIND, model_step)):
        check_move(Event.REWOUND, Place.ARCHIVED)
        step.tally.enter(record)
        step.tally.end(record.task_name, End.TRAINED, -record.tokens, None, groups=-1)
        step.wake(record.task_name)
        rewound[record.task_name] = rewound.get(record.task_name, 0) + 1
    await step.connection.execute("UPDATE store SET saved_step = $1", model_step)
    for task_name, watermark in (await watermarks.read(step.connection, None)).items():
        back = rewound_watermark(watermark, model_step)
        if back is not None and back != watermark:
            await watermarks.write(step.connection, task_name, back)
            step.wake(task_name)
    return rewound


async def settle(
    step: Step, lease_id: str, uids: Sequence[int], event: Event, reason: str | None, settings: Settings
) -> None:
    """Acknowledge, give back or reject rows of a lease: all of them, or LostLease."""
    target = check_move(event, Place.LEASED)
    wanted = list(dict.fromkeys(uids))
    rows = await step.connection.fetch(
        f"SELECT {RECORD} FROM groups WHERE uid = ANY($1) AND lease_id = $2 AND place = 'leased' ORDER BY uid "
        "FOR UPDATE",
        wanted,
        lease_id,
    )
    if len(rows) < len(wanted):
        raise LostLease(
            f"{len(wanted) - len(rows)} of {len(wanted)} groups of lease {lease_id} were taken away (its holder was "
            "thought dead, or the buffer was closed or restored): nothing was settled, and these groups are handed "
            "out again"
        )
    by_uid = {row["uid"]: read_record(row) for row in rows}
    records = [by_uid[uid] for uid in wanted]
    if target is End.TRAINED:
        saved_step = await step.connection.fetchval("SELECT saved_step FROM store")
        unsaved = saved_step is not None and any((record.train_step or 0) > saved_step for record in records)
        if settings.keep_trained or unsaved:
            book_out(step, records, target, reason)
            await archive(step, wanted, settings.keep_trained)
            return
    if isinstance(target, End):
        await end_records(step, records, target, reason)
    else:
        await nack(step, records)


async def nack(step: Step, records: Sequence[Record]) -> None:
    """Locked leased rows go back to their old place in the order."""
    await step.connection.execute(_NACK, [record.uid for record in records])
    for record in records:
        check_move(Event.NACKED, record.place)
        step.tally.leave(record)
        step.tally.enter(replace(record, place=Place.BUFFERED))
        step.wake(record.task_name)


async def release(step: Step, owner: str) -> dict[str, int]:
    """Give back all that an owner holds."""
    rows = await step.connection.fetch(
        f"SELECT {RECORD} FROM groups WHERE owner = $1 ORDER BY uid FOR UPDATE", to_text(owner)
    )
    records = [read_record(row) for row in rows]
    leased = [record for record in records if record.place is Place.LEASED]
    if leased:
        await nack(step, leased)
    flying = [record for record in records if record.place is Place.IN_FLIGHT]
    if flying:
        await _abandon_locked(step, flying)
    released: dict[str, int] = {}
    for record in records:
        released[record.task_name] = released.get(record.task_name, 0) + 1
    return released


async def _abandon_locked(step: Step, records: Sequence[Record]) -> None:
    for record in records:
        check_move(Event.ABANDONED, record.place)
        step.tally.leave(record)
        step.wake(record.task_name)
    for row in await step.connection.fetch(_ABANDON, [record.uid for record in records]):
        step.tally.enter(read_record(row))


async def fail(step: Step, reasons: Mapping[int, str]) -> dict[str, int]:
    """End groups as failed, whoever holds them. Those in the archive have ended already, and go."""
    rows = await step.connection.fetch(
        f"SELECT {RECORD} FROM groups WHERE uid = ANY($1) ORDER BY uid FOR UPDATE", list(reasons)
    )
    failed: dict[str, int] = {}
    for record in map(read_record, rows):
        if record.place is not Place.ARCHIVED:
            book_out(step, [record], End.FAILED, reasons[record.uid])
            failed[record.task_name] = failed.get(record.task_name, 0) + 1
    uids = [row["uid"] for row in rows]
    await step.connection.execute("DELETE FROM groups WHERE uid = ANY($1)", uids)
    await step.connection.execute("DELETE FROM payloads WHERE uid = ANY($1)", uids)
    return failed


# --- changes in place ---------------------------------------------------------------------------------


async def revise(step: Step, revisions: Sequence[Revision], frames: Sequence[bytes | None]) -> list[bool]:
    """Change buffered rows that still have the revision that was seen."""
    rows = await step.connection.fetch(
        f"SELECT {RECORD} FROM groups WHERE uid = ANY($1) AND place = 'buffered' ORDER BY uid FOR UPDATE",
        [revision.uid for revision in revisions],
    )
    current = {row["uid"]: read_record(row) for row in rows}
    applied: list[bool] = []
    changed: dict[int, tuple[Revision, bytes]] = {}
    dropped: list[Record] = []
    for revision, frame in zip(revisions, frames, strict=True):
        record = current.get(revision.uid)
        # A row that stands here twice is changed once: the second revision speaks of what was before the first.
        fits = record is not None and record.revision == revision.revision and revision.uid not in changed
        applied.append(fits)
        if record is None or not fits:
            continue
        if revision.content is None:
            dropped.append(current.pop(revision.uid))
        else:
            assert frame is not None
            changed[revision.uid] = (revision, frame)
    if dropped:
        target = check_move(Event.STALE, Place.BUFFERED)
        assert isinstance(target, End)
        await end_records(step, dropped, target, "stale")
    if changed:
        contents = [revision.content for revision, _ in changed.values() if revision.content is not None]
        numbers = [revision.revision + 1 for revision, _ in changed.values()]
        rows = await step.connection.fetch(_REVISE, list(changed), numbers, *content_arrays(contents))
        await step.connection.execute(_REPLACE_FRAMES, list(changed), [frame for _, frame in changed.values()])
        for after in map(read_record, rows):
            before = current[after.uid]
            step.tally.leave(before)
            step.tally.enter(after)
            step.tally.add(after.task_name, "reset_tokens", max(0, before.tokens - after.tokens))
            step.wake(after.task_name)
    return applied


async def matching(connection: Any, node: Node) -> list[int]:
    """The buffered groups that match a tree."""
    parameters: list[Any] = []
    matches = condition(node, parameters)
    rows = await connection.fetch(f"SELECT uid FROM groups WHERE place = 'buffered' AND {matches}", *parameters)
    return sorted(row["uid"] for row in rows)


async def discard(step: Step, uids: Sequence[int], node: Node, reason: str) -> list[Record]:
    """End those of the groups that are still buffered and still match."""
    parameters: list[Any] = [uids]
    matches = condition(node, parameters)
    rows = await step.connection.fetch(
        f"SELECT {RECORD} FROM groups WHERE uid = ANY($1) AND place = 'buffered' AND {matches} ORDER BY uid FOR UPDATE",
        *parameters,
    )
    records = [read_record(row) for row in rows]
    target = check_move(Event.DISCARDED, Place.BUFFERED)
    assert isinstance(target, End)
    if records:
        await end_records(step, records, target, reason)
    return records


async def set_priority(step: Step, priorities: Mapping[int, float]) -> int:
    """Set priorities by uid; how many rows there were."""
    status = await step.connection.execute(
        "UPDATE groups g SET priority = u.priority FROM unnest($1::bigint[], $2::double precision[]) AS u "
        "(uid, priority) WHERE g.uid = u.uid",
        list(priorities),
        list(priorities.values()),
    )
    return int(status.split()[-1])


async def take_ends(step: Step, owner: str, limit: int) -> list[tuple[int, GroupEnd]]:
    """The first ends that nobody who lives is telling of; they are the owner's to tell of."""
    rows = await step.connection.fetch(_TAKE_ENDS, to_text(owner), limit)
    return sorted((row["number"], decode_end(row["data"])) for row in rows)
