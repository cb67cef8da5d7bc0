"""How groups come in: drawn prompts are issued, drawn groups come back, others are put by hand.

The rules are those of `local`: who gives back must still hold, under its attempt; all of a put or none of it. A put by
hand of a few groups is one statement, one way to the server and back; many bytes go through COPY.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from msgspec.structs import replace

from forebay.capacity import MAX_SIZES, check_room, reservations, reserved_after, response_size
from forebay.codec import encode_group
from forebay.errors import CursorMoved, DuplicateGroup, LostLease
from forebay.ledger import End, Event, Place, arrival_event, check_move
from forebay.record import Record, group_end, identify
from forebay.storage.base import Arrival, Content, Settings, Usage
from forebay.storage.contents import new_record
from forebay.storage.postgres.connections import Step
from forebay.storage.postgres.leaving import end_records
from forebay.storage.postgres.rows import COLUMNS, RECORD_OF_G, RESERVED_AFTER, content_arrays, read_record, to_text
from forebay.storage.postgres.schema import advisory_key
from forebay.storage.postgres.tally import ADD_TALLY, Tally

__all__ = ["Frames", "Newcomers", "hold_room", "issue", "put", "put_new"]

COPY_BYTES = 1 << 20
"""Frames of this size together go through COPY; below, one statement with arrays is faster."""

_SLICE_BYTES = 4 << 20
"""Frames made before the event loop gets its turn: a few milliseconds."""

_NOW = "(SELECT extract(epoch FROM clock_timestamp())::double precision)"

_FACT_TYPES = (
    "text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[], $8::double precision[], $9::bigint[], "
    "$10::bigint[], $11::bigint[], $12::bigint[], $13::bigint[], $14::double precision[], $15::boolean[], "
    "$16::bytea[], $17::jsonb[], $18::bytea[]"
)
_FACTS = (
    "status, samples, tokens, bytes, num_tries, reward, oldest_step, newest_step, token_step, given_staleness, "
    "unjudged, priority, has_tags, tags, tag_values, session_ids"
)

_INSERT = f"""
INSERT INTO groups ({", ".join(COLUMNS)})
SELECT nextval('uids'), nextval('arrivals'), u.task_name, u.group_id, u.status, $19, u.samples, u.tokens, u.bytes,
    u.num_tries, u.reward, u.oldest_step, u.newest_step, u.token_step, u.given_staleness, u.unjudged,
    {_NOW}, {_NOW}, coalesce(u.priority, 0), $20, 0, 0, $21, NULL, NULL, u.reserved_bytes, u.session_ids, u.tags,
    u.tag_values, NULL, NULL
FROM unnest($1::text[], $2::bigint[], $3::{_FACT_TYPES}, $22::bigint[])
    AS u (task_name, group_id, {_FACTS}, reserved_bytes)
RETURNING uid, timestamp_id, created_at, group_id"""

_INSERT_ALL = f"""
WITH new AS ({_INSERT}),
stored AS (
    INSERT INTO payloads (uid, frame)
    SELECT new.uid, f.frame FROM new JOIN unnest($2::bigint[], $23::bytea[]) AS f (group_id, frame) USING (group_id)
),
counted AS ({ADD_TALLY.replace("$1::text", "($1::text[])[1]").replace("$2::bigint[]", "$24::bigint[]")})
SELECT * FROM new"""

_RETURN = f"""
UPDATE groups g SET timestamp_id = u.timestamp_id, place = 'buffered', owner = NULL, moved_at = {_NOW},
    status = u.status, samples = u.samples, tokens = u.tokens, bytes = u.bytes, num_tries = u.num_tries,
    reward = u.reward, oldest_step = u.oldest_step, newest_step = u.newest_step, token_step = u.token_step,
    given_staleness = u.given_staleness, unjudged = u.unjudged, revision = g.revision + 1,
    reserved_bytes = {RESERVED_AFTER}, session_ids = u.session_ids,
    priority = coalesce(u.priority, g.priority),
    tags = CASE WHEN u.has_tags THEN u.tags ELSE g.tags END,
    tag_values = CASE WHEN u.has_tags THEN u.tag_values ELSE g.tag_values END
FROM (
    SELECT *, nextval('arrivals') AS timestamp_id FROM unnest($1::bigint[], $2::bigint[], $3::{_FACT_TYPES})
    AS u (uid, attempt, {_FACTS})
) u
WHERE g.uid = u.uid AND g.place = 'in_flight'
RETURNING {RECORD_OF_G}"""

_LOCK = f"""
SELECT {RECORD_OF_G}
FROM groups g JOIN unnest($1::text[], $2::bigint[]) AS u (task_name, group_id)
    ON g.task_name = u.task_name AND g.group_id = u.group_id
ORDER BY g.uid FOR UPDATE OF g"""

_REPLACE_FRAMES = """
UPDATE payloads p SET frame = u.frame FROM unnest($1::bigint[], $2::bytea[]) AS u (uid, frame) WHERE p.uid = u.uid"""


class Newcomers:
    """Group ids for groups put by hand, a block at a time: negative, from a sequence, with gaps."""

    BLOCK = 256

    def __init__(self) -> None:
        self._ids: list[int] = []

    async def take(self, connections: Any, task_names: Sequence[str]) -> list[int]:
        """An id for each group; never one that a user put there."""
        while (missing := len(task_names) - len(self._ids)) > 0:
            async with connections.lend() as connection:
                drawn = await connection.fetch(
                    "SELECT id FROM (SELECT -nextval('hand_ids') AS id FROM generate_series(1, $1)) d WHERE NOT EXISTS "
                    "(SELECT FROM groups g WHERE g.task_name = ANY($2) AND g.group_id = d.id) ORDER BY id DESC",
                    max(missing, self.BLOCK),
                    [to_text(task_name) for task_name in set(task_names)],
                )
            self._ids += [row["id"] for row in drawn]
        taken, self._ids = self._ids[: len(task_names)], self._ids[len(task_names) :]
        return taken

    def forget(self) -> None:
        """Someone uses ids of this block: take the next ones."""
        self._ids = []


class Frames:
    """The frames of contents, without their identity: that is the row's.

    Small ones are made at once. Many bytes are made while COPY sends them: the server works meanwhile.
    """

    def __init__(self, contents: Sequence[Content]) -> None:
        self._contents = contents
        self.large = sum([content.facts.bytes for content in contents]) >= COPY_BYTES
        self._made = [] if self.large else [encode_group(content.group) for content in contents]

    def pick(self, indexes: Sequence[int]) -> list[bytes]:
        """Some of them, as a list."""
        return [self._made[i] if self._made else encode_group(self._contents[i].group) for i in indexes]

    async def stream(self, uids: Sequence[int], indexes: Sequence[int]) -> AsyncIterator[tuple[int, bytes]]:
        """Rows of `payloads` for COPY."""
        size = 0
        for uid, index in zip(uids, indexes, strict=True):
            frame = encode_group(self._contents[index].group)
            size += len(frame)
            if size >= _SLICE_BYTES:
                size = 0
                await asyncio.sleep(0)
            yield uid, frame


async def hold_room(
    step: Step, name: str, settings: Settings, usage_sql: str, groups: int, sizes: Callable[[Usage, int], list[int]]
) -> list[int]:
    """NoRoom unless so many more groups fit; `sizes(usage, groups in flight)` are their bytes, which it returns.

    Only with a capacity, steps that need room wait for each other.
    """
    if settings.max_groups is None and settings.max_bytes is None:
        return sizes(Usage(0, 0, 0), 0)
    await step.connection.execute("SELECT pg_advisory_xact_lock($1)", advisory_key(name, "room"))
    used = await step.connection.fetchrow(usage_sql)
    usage = Usage(used["groups"], used["bytes"], used["reserved"])
    needed = sizes(usage, used["in_flight"])
    check_room(usage, settings, groups, sum(needed))
    return needed


async def store_frames(
    connection: Any, uids: Sequence[int], frames: Frames, indexes: Sequence[int] | None = None
) -> None:
    """Write the payloads of new rows."""
    chosen = range(len(uids)) if indexes is None else indexes
    if frames.large:
        await connection.copy_records_to_table(
            "payloads", columns=("uid", "frame"), records=frames.stream(uids, chosen)
        )
    else:
        await connection.execute(
            "INSERT INTO payloads (uid, frame) SELECT * FROM unnest($1::bigint[], $2::bytea[])",
            uids,
            frames.pick(chosen),
        )


# --- issue --------------------------------------------------------------------------------------------


async def issue(
    step: Step,
    task_name: str,
    contents: Sequence[Content],
    frames: Frames,
    *,
    owner: str,
    cursor: int,
    source_state: bytes | None,
    room: Any,
    settings: Settings,
) -> list[Record]:
    """Write prompts as in flight and advance the cursor."""
    connection, name, n = step.connection, to_text(task_name), len(contents)
    await connection.execute("INSERT INTO accounts (task_name) VALUES ($1) ON CONFLICT DO NOTHING", name)
    found = await connection.fetchval("SELECT cursor FROM accounts WHERE task_name = $1 FOR UPDATE", name)
    if found != cursor:
        raise CursorMoved(task_name, cursor, found)
    taken = await connection.fetchval(
        "SELECT group_id FROM groups WHERE task_name = $1 AND group_id BETWEEN $2 AND $3 ORDER BY group_id LIMIT 1",
        name,
        cursor,
        cursor + n - 1,
    )
    if taken is not None:
        raise DuplicateGroup(
            f"group {taken} of task {task_name!r} is to be drawn, but was put by hand; groups that are put by hand "
            "beside a sampler must have no group_id, or a negative one"
        )
    sizes = {} if settings.max_bytes is None else await _sizes(connection, name)
    prompts = [content.facts for content in contents]
    reserved = []
    if n:
        reserved = await room(step, n, lambda used, flying: reservations(prompts, sizes, settings, used, flying))
    check_move(Event.DRAWN, None)
    step.tally.add(task_name, "issued", n)
    step.tally.add(task_name, "issued_tokens", sum(content.facts.tokens for content in contents))
    records = await _insert(step, task_name, range(cursor, cursor + n), contents, Place.IN_FLIGHT, owner, 1, reserved)
    await store_frames(connection, [record.uid for record in records], frames)
    await connection.execute(
        "UPDATE accounts SET cursor = cursor + $2, source_state = coalesce($3, source_state) WHERE task_name = $1",
        name,
        n,
        source_state,
    )
    for content, record in zip(contents, records, strict=True):
        identify(content.group, task_name, record.group_id)
    return records


async def _sizes(connection: Any, name: str) -> dict[int, int]:
    """The sizes of responses of a task, whose account is locked; too many of them count half from now on."""
    sql = "SELECT size, sum(groups)::bigint AS groups FROM sizes WHERE task_name = $1 GROUP BY size"
    sizes = {row["size"]: row["groups"] for row in await connection.fetch(sql, name)}
    if sum(sizes.values()) >= MAX_SIZES:
        await connection.execute("UPDATE sizes SET groups = groups / 2 WHERE task_name = $1", name)
        await connection.execute("DELETE FROM sizes WHERE task_name = $1 AND groups = 0", name)
    return sizes


async def _insert(
    step: Step,
    task_name: str,
    group_ids: Sequence[int],
    contents: Sequence[Content],
    place: Place,
    owner: str | None,
    attempt: int,
    reserved: Sequence[int] | None = None,
) -> list[Record]:
    if not contents:
        return []
    sizes = [0] * len(contents) if reserved is None else reserved
    arguments = _insert_arguments(task_name, group_ids, contents, place, owner, attempt, sizes)
    rows = await step.connection.fetch(_INSERT, *arguments)
    records = _new_records(rows, task_name, group_ids, contents, place, owner, attempt, sizes)
    for record in records:
        step.tally.enter(record)
    return records


def _insert_arguments(
    task_name: str,
    group_ids: Sequence[int],
    contents: Sequence[Content],
    place: Place,
    owner: str | None,
    attempt: int,
    reserved: Sequence[int],
) -> list[Any]:
    return [
        [to_text(task_name)] * len(contents),
        list(group_ids),
        *content_arrays(contents),
        str(place),
        attempt,
        None if owner is None else to_text(owner),
        [reserved_after(size, content.facts) for size, content in zip(reserved, contents, strict=True)],
    ]


def _new_records(
    rows: Sequence[Any],
    task_name: str,
    group_ids: Sequence[int],
    contents: Sequence[Content],
    place: Place,
    owner: str | None,
    attempt: int,
    reserved: Sequence[int],
) -> list[Record]:
    stored = {row["group_id"]: row for row in rows}
    return [
        _new_record(stored[group_id], task_name, group_id, content, place, owner, attempt, size)
        for group_id, content, size in zip(group_ids, contents, reserved, strict=True)
    ]


def _new_record(
    stored: Any,
    task_name: str,
    group_id: int,
    content: Content,
    place: Place,
    owner: str | None,
    attempt: int,
    reserved_bytes: int = 0,
) -> Record:
    return new_record(
        content,
        uid=stored["uid"],
        timestamp_id=stored["timestamp_id"],
        task_name=task_name,
        group_id=group_id,
        place=place,
        now=stored["created_at"],
        owner=owner,
        attempt=attempt,
        reserved_bytes=reserved_bytes,
    )


# --- put ----------------------------------------------------------------------------------------------


async def put_new(
    step: Step, task_name: str, group_ids: Sequence[int], arrivals: Sequence[Arrival], frames: Frames
) -> list[Record]:
    """New groups of one task, put by hand, in one statement that commits by itself."""
    tally = Tally()
    contents = [arrival.content for arrival in arrivals]
    for arrival in arrivals:
        check_move(arrival_event(None, arrival.content.facts.status, stale=False), None)
        issued_tokens, reset_tokens = arrival.tokens(0)
        tally.add(task_name, "issued_tokens", issued_tokens)
        tally.add(task_name, "reset_tokens", reset_tokens)
    stub = {"uid": 0, "timestamp_id": 0, "created_at": 0.0}
    for group_id, content in zip(group_ids, contents, strict=True):
        tally.enter(_new_record(stub, task_name, group_id, content, Place.BUFFERED, None, 0))
    tally.add(task_name, "issued", len(contents))
    nothing = [0] * len(contents)
    arguments = _insert_arguments(task_name, group_ids, contents, Place.BUFFERED, None, 0, nothing)
    made = frames.pick(range(len(contents)))
    rows = await step.connection.fetch(_INSERT_ALL, *arguments, made, tally.values(task_name))
    step.tally.buffered = tally.buffered
    step.wake(task_name)
    return _new_records(rows, task_name, group_ids, contents, Place.BUFFERED, None, 0, nothing)


async def put(
    step: Step,
    arrivals: Sequence[Arrival],
    group_ids: Sequence[int],
    frames: Frames,
    *,
    owner: str,
    room: Any,
    settings: Settings,
) -> list[Record]:
    """Any put: returns and groups by hand, of any tasks. `group_ids` has one for each arrival."""
    places = await _check_arrivals(step, arrivals, owner)
    new = [i for i, row in enumerate(places) if row is None and not arrivals[i].stale]
    if new:
        await room(step, len(new), lambda used, flying: [arrivals[i].content.facts.bytes for i in new])
    records: dict[int, Record] = {}
    returning: list[int] = []
    ending: list[tuple[int, End]] = []
    stale: list[int] = []
    for index, (arrival, row) in enumerate(zip(arrivals, places, strict=True)):
        place = None if row is None else row.place
        target = check_move(arrival_event(place, arrival.content.facts.status, stale=arrival.stale), place)
        issued_tokens, reset_tokens = arrival.tokens(0 if row is None else row.tokens)
        step.tally.add(arrival.task_name, "issued_tokens", issued_tokens)
        step.tally.add(arrival.task_name, "reset_tokens", reset_tokens)
        if row is None:
            step.tally.add(arrival.task_name, "issued", 1)
            if isinstance(target, End):
                stale.append(index)
                step.tally.end(arrival.task_name, target, arrival.content.facts.tokens, arrival.reason)
        else:
            if settings.max_bytes is not None and (size := response_size(arrival.content.facts)) is not None:
                step.tally.note_size(arrival.task_name, size)
            if isinstance(target, End):
                ending.append((index, target))
            else:
                returning.append(index)
        step.wake(arrival.task_name)
    for task_name in dict.fromkeys(arrivals[i].task_name for i in new):
        chosen = [i for i in new if arrivals[i].task_name == task_name]
        contents = [arrivals[i].content for i in chosen]
        ids = [group_ids[i] for i in chosen]
        stored = await _insert(step, task_name, ids, contents, Place.BUFFERED, None, 0)
        await store_frames(step.connection, [record.uid for record in stored], frames, chosen)
        records |= zip(chosen, stored, strict=True)
    if returning:
        held = {i: row for i in returning if (row := places[i]) is not None}
        records |= await _bring_back(step, arrivals, held, frames)
    for index, end in ending:
        row = places[index]
        assert row is not None
        arrival = arrivals[index]
        facts = arrival.content.facts
        last = replace(row, session_ids=facts.session_ids)
        await end_records(step, [last], end, arrival.reason, tokens=facts.tokens)
        records[index] = replace(last, tokens=facts.tokens, status=facts.status)
    for index in stale:
        numbers = await step.connection.fetchrow(
            f"SELECT nextval('uids') AS uid, nextval('arrivals') AS timestamp_id, {_NOW} AS created_at"
        )
        arrival = arrivals[index]
        records[index] = _new_record(
            numbers, arrival.task_name, group_ids[index], arrival.content, Place.BUFFERED, None, 0
        )
        step.tally.note_end(group_end(records[index], End.DISCARDED, arrival.reason))
    return [records[index] for index in range(len(arrivals))]


async def _bring_back(
    step: Step, arrivals: Sequence[Arrival], held: dict[int, Record], frames: Frames
) -> dict[int, Record]:
    uids = [record.uid for record in held.values()]
    contents = [arrivals[i].content for i in held]
    arguments = [uids, [record.attempt for record in held.values()], *content_arrays(contents)]
    rows = await step.connection.fetch(_RETURN, *arguments)
    assert len(rows) == len(held), "rows that are locked stay as they are"
    stored = {row["uid"]: read_record(row) for row in rows}
    if frames.large:
        await step.connection.execute("DELETE FROM payloads WHERE uid = ANY($1)", uids)
        await store_frames(step.connection, uids, frames, list(held))
    else:
        await step.connection.execute(_REPLACE_FRAMES, uids, frames.pick(list(held)))
    for record in held.values():
        step.tally.leave(record)
        step.tally.enter(stored[record.uid])
    return {i: stored[record.uid] for i, record in held.items()}


async def _check_arrivals(step: Step, arrivals: Sequence[Arrival], owner: str) -> list[Record | None]:
    """The rows in flight that the arrivals bring back (None: by hand), locked; or an error."""
    named: dict[tuple[str, int], Arrival] = {}
    for arrival in arrivals:
        if arrival.group_id is not None:
            identity = (arrival.task_name, arrival.group_id)
            if identity in named:
                raise DuplicateGroup(f"group {arrival.group_id} of task {arrival.task_name!r} stands twice in one put")
            named[identity] = arrival
    if not named:
        return [None] * len(arrivals)
    rows = await step.connection.fetch(
        _LOCK, [to_text(task_name) for task_name, _ in named], [group_id for _, group_id in named]
    )
    found = {(record.task_name, record.group_id): record for record in map(read_record, rows)}
    cursors = await _cursors(step, [i for i in named if i not in found and i[1] >= 0 and named[i].attempt is None])
    return [
        None
        if arrival.group_id is None
        else _returning(arrival, arrival.group_id, found.get((arrival.task_name, arrival.group_id)), cursors, owner)
        for arrival in arrivals
    ]


async def _cursors(step: Step, unknown: Sequence[tuple[str, int]]) -> dict[str, int]:
    """The cursors that ids put by hand are compared with; they stay where they are until the commit."""
    if not unknown:
        return {}
    rows = await step.connection.fetch(
        "SELECT task_name, cursor FROM accounts WHERE task_name = ANY($1) ORDER BY task_name FOR SHARE",
        [to_text(task_name) for task_name in {task_name for task_name, _ in unknown}],
    )
    by_name = {row["task_name"]: row["cursor"] for row in rows}
    return {task_name: by_name.get(to_text(task_name), 0) for task_name, _ in unknown}


def _returning(
    arrival: Arrival, group_id: int, record: Record | None, cursors: dict[str, int], owner: str
) -> Record | None:
    task_name, attempt = arrival.task_name, arrival.attempt
    if record is not None and record.place is Place.IN_FLIGHT:
        if attempt == record.attempt or (attempt is None and record.owner == owner):
            return record
        raise LostLease(
            f"group {group_id} of task {task_name!r} is in flight under attempt {record.attempt}, held by "
            f"{record.owner}; attempt {attempt} of {owner} no longer holds it: drop this result"
        )
    if attempt is not None:
        where = "has ended" if record is None else f"is {record.place}"
        raise LostLease(
            f"group {group_id} of task {task_name!r} {where}; attempt {attempt} no longer holds it: drop this result"
        )
    if record is not None:
        raise DuplicateGroup(f"group {group_id} of task {task_name!r} is already there: it is {record.place}")
    if 0 <= group_id < cursors.get(task_name, 0):
        raise DuplicateGroup(f"group {group_id} of task {task_name!r} was drawn and has already ended")
    return None
