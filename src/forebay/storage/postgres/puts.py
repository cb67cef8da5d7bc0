"""How groups arrive: drawn prompts are issued, drawn groups come back, others are put by hand, or a stream is restored.

A put by hand of a few groups without a capacity is one statement, so that it takes one round trip; many bytes go
through COPY. A restore is one transaction, visible when all of it is stored and the ledger of every task closes.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Collection, Mapping, Sequence
from typing import Any

from forebay.codec.frame import encode_group
from forebay.core.capacity import MAX_SIZES, Settings, check_room, response_size
from forebay.core.ledger import Account, End, Event, Place, Record, Row, arrival_event, check_move, identify
from forebay.core.rollout import Status, group_status
from forebay.errors import CursorMoved, InvalidInput
from forebay.storage.base import Arrival, Draw
from forebay.storage.idempotency import CALL
from forebay.storage.payloads import Slices
from forebay.storage.postgres import accounts
from forebay.storage.postgres.columns import COLUMNS, RECORD, from_text, read_record, record_values, to_text
from forebay.storage.postgres.reads import FIGURES, OF_TASK, SIZES, USAGE, share_left, sizes_of, summary, usage_of
from forebay.storage.postgres.step import NEW, NOW, Step
from forebay.storage.rules import (
    StreamCheck,
    check_return,
    drawn_by_hand,
    duplicate_in_put,
    ended_record,
    fitting,
    is_used,
    new_record,
    restored_accounts,
    returned_record,
)
from forebay.storage.values import Content

COPY_BYTES = 1 << 20
"""Frames of this size together go through COPY; below, one statement with arrays is faster."""

_BEFORE_ISSUE = f"""
SELECT (SELECT cursor FROM accounts WHERE task_name = $1 FOR UPDATE) AS position,
    (SELECT min(group_id) FROM groups WHERE task_name = $1 AND group_id BETWEEN $2 AND $3) AS taken,
    {SIZES.format("$1")} AS sizes, u.*, {FIGURES}
FROM ({USAGE}) u CROSS JOIN (SELECT $1::text AS task_name) k {OF_TASK}"""

_FIND = f"""
SELECT {RECORD} FROM groups g JOIN unnest($1::text[], $2::bigint[]) AS u (task_name, group_id)
    ON g.task_name = u.task_name AND g.group_id = u.group_id
ORDER BY g.uid FOR UPDATE OF g"""


class HandIds:
    """Group ids for groups that are put by hand, a block at a time: negative, from a sequence, with gaps."""

    BLOCK = 256

    def __init__(self) -> None:
        self._ids: list[int] = []

    async def take(self, connections: Any, task_names: Sequence[str], named: Collection[int]) -> list[int]:
        """An id for each group; none that a user has put, or names in this put."""
        self._ids = [group_id for group_id in self._ids if group_id not in named]
        while (missing := len(task_names) - len(self._ids)) > 0:
            async with connections.lend() as connection:
                drawn = await connection.fetch(
                    "SELECT id FROM (SELECT -nextval('hand_ids') AS id FROM generate_series(1, $1)) d WHERE NOT EXISTS "
                    "(SELECT FROM groups g WHERE g.task_name = ANY($2) AND g.group_id = d.id) ORDER BY id DESC",
                    max(missing, self.BLOCK),
                    [to_text(task_name) for task_name in set(task_names)],
                )
            self._ids += [row["id"] for row in drawn if row["id"] not in named]
        taken, self._ids = self._ids[: len(task_names)], self._ids[len(task_names) :]
        return taken

    def forget(self) -> None:
        """Somebody put ids of this block: take the next ones."""
        self._ids = []


class Frames:
    """The frames of contents, without their identity, which is that of the row.

    Small ones are encoded at once. Many bytes are encoded while COPY sends them: the server works meanwhile.
    """

    def __init__(self, contents: Sequence[Content]) -> None:
        self._contents = contents
        self.large = sum([content.facts.bytes for content in contents]) >= COPY_BYTES
        self._encoded = [] if self.large else [encode_group(content.group) for content in contents]

    def __getitem__(self, index: int) -> bytes | None:
        """A frame that goes into the statement of its record; None: it goes through COPY."""
        return None if self.large else self._encoded[index]

    async def copy(self, connection: Any, uids: dict[int, int]) -> None:
        """Write frames through COPY; `uids` by the index of the content."""

        async def rows() -> AsyncIterator[tuple[int, bytes]]:
            slices = Slices()
            for index, uid in uids.items():
                frame = encode_group(self._contents[index].group)
                await slices.add(len(frame))
                yield uid, frame

        await connection.copy_records_to_table("payloads", columns=("uid", "frame"), records=rows())


async def _write(step: Step, frames: Frames, stored: dict[int, Record]) -> dict[int, Record]:
    """Write what was noted, and large payloads; the stored records (by the index of their content) as written."""
    written = await step.write(counted=not frames.large)
    records = {index: written[record.task_name, record.group_id] for index, record in stored.items()}
    if frames.large and records:
        await frames.copy(step.connection, {index: record.uid for index, record in records.items()})
    return records


# --- issue --------------------------------------------------------------------------------------------


async def issue(step: Step, task_name: str, contents: Sequence[Content], frames: Frames, draw: Draw) -> list[Record]:
    """Write the prompts that fit as rows in flight, and advance the cursor."""
    connection, name, cursor = step.connection, to_text(task_name), draw.cursor
    arguments = (name, cursor, cursor + len(contents) - 1)
    while True:
        found = await connection.fetchrow(_BEFORE_ISSUE, *arguments)
        left = None if draw.share is None else share_left(draw.share, task_name, found)
        contents = contents[:left]
        if (found["position"] or 0) != cursor:
            raise CursorMoved(task_name, cursor, found["position"] or 0)
        if found["taken"] is not None:
            raise drawn_by_hand(task_name, found["taken"])
        reserved = fitting(contents, sizes_of(found), usage_of(found), step.settings, found["used_in_flight"])
        if not reserved or found["position"] is not None:
            break
        await accounts.ensure(connection, [task_name])  # the first prompts of the task: there was no account to lock
    stored: dict[int, Record] = {}
    for index, (content, size) in enumerate(zip(contents, reserved, strict=False)):
        check_move(Event.DRAWN, None)
        stored[index] = new_record(
            content,
            uid=NEW,
            timestamp_id=NEW,
            task_name=task_name,
            group_id=cursor + index,
            place=Place.IN_FLIGHT,
            now=NEW,
            owner=draw.owner,
            attempt=1,
            reserved_bytes=size,
        )
        step.store(None, stored[index], frames[index])
        step.counters.add(task_name, "issued", 1)
        step.counters.add(task_name, "issued_tokens", content.facts.tokens)
    if stored:
        step.also(
            "UPDATE accounts SET cursor = cursor + {}, source_state = coalesce({}, source_state) WHERE task_name = {}",
            (len(stored), "bigint"),
            (draw.source_state, "bytea"),
            (name, "text"),
        )
    if sum(sizes_of(found).values()) >= MAX_SIZES:  # what was counted so far counts half from now on
        await connection.execute("UPDATE sizes SET groups = groups / 2 WHERE task_name = $1", name)
        await connection.execute("DELETE FROM sizes WHERE task_name = $1 AND groups = 0", name)
    records = list((await _write(step, frames, stored)).values())
    for content, record in zip(contents, records, strict=False):
        identify(content.group, task_name, record.group_id)
    return records


# --- put ----------------------------------------------------------------------------------------------


def is_bounded(settings: Settings) -> bool:
    """Whether there is a capacity to check."""
    return settings.max_groups is not None or settings.max_bytes is not None


def is_single(arrivals: Sequence[Arrival], frames: Frames, settings: Settings) -> bool:
    """Whether one statement is enough: new groups, few bytes, no capacity to check, no answer to remember."""
    return (
        not is_bounded(settings)
        and all(arrival.group_id is None and not arrival.stale for arrival in arrivals)
        and not frames.large
        and CALL.get() is None
    )


def is_quick(arrivals: Sequence[Arrival], drawn: Sequence[Record | None], frames: Frames) -> bool:
    """Whether one statement is enough for groups that come back: drawn here, few bytes, none ends."""
    return (
        not frames.large
        and CALL.get() is None
        and all(
            record is not None
            and record.attempt == arrival.attempt
            and not arrival.stale
            and arrival.content.facts.status not in (Status.FILTERED, Status.FAILED)
            for arrival, record in zip(arrivals, drawn, strict=True)
        )
    )


def may_need_room(arrivals: Sequence[Arrival], settings: Settings) -> bool:
    """Whether a put has to be the only one that checks the capacity."""
    return is_bounded(settings) and any(arrival.attempt is None and not arrival.stale for arrival in arrivals)


async def put(
    step: Step,
    arrivals: Sequence[Arrival],
    group_ids: Sequence[int],
    frames: Frames,
    *,
    owner: str,
    drawn: Sequence[Record] = (),
) -> list[Record]:
    """Store arrivals: groups that come back, and groups by hand. `group_ids` has one for each arrival.

    `drawn`: their rows as this process drew them. The statement fails if another process holds one of them by now.
    """
    settings = step.settings
    rows: Sequence[Record | None] = drawn or await _returning(step, arrivals, owner)
    if drawn:
        step.guard(drawn)
    new = [arrival for arrival, row in zip(arrivals, rows, strict=True) if row is None and not arrival.stale]
    if new and may_need_room(arrivals, settings):
        usage = usage_of(await step.connection.fetchrow(USAGE))
        check_room(usage, settings, len(new), sum(arrival.content.facts.bytes for arrival in new))
    stored: dict[int, Record] = {}
    ended: dict[int, Record] = {}
    for index, (arrival, row) in enumerate(zip(arrivals, rows, strict=True)):
        task_name, content, counters = arrival.task_name, arrival.content, step.counters
        place = None if row is None else row.place
        target = check_move(arrival_event(place, content.facts.status, stale=arrival.stale), place)
        issued_tokens, reset_tokens = arrival.tokens(0 if row is None else row.tokens)
        counters.add(task_name, "issued_tokens", issued_tokens)
        counters.add(task_name, "reset_tokens", reset_tokens)
        counters.add(task_name, "failures", arrival.failed)
        step.wake(task_name)
        if row is None:
            counters.add(task_name, "issued", 1)
            record = await _by_hand(step, arrival, group_ids[index])
            if isinstance(target, End):
                step.book_out(record, target, arrival.reason)
                ended[index] = record
                continue
        else:
            if settings.max_bytes is not None and (size := response_size(content.facts)) is not None:
                counters.sizes[task_name, size] += 1
            if isinstance(target, End):
                ended[index] = ended_record(row, content)
                step.end(ended[index], target, arrival.reason, before=row)
                continue
            counters.add(task_name, "completed", content.facts.status is Status.COMPLETED)
            record = returned_record(row, content, NEW, NEW)
            if frames.large:
                step.drop_payload(row)
        step.store(row, record, frames[index])
        stored[index] = record
    written = await _write(step, frames, stored)
    return [ended[index] if index in ended else written[index] for index in range(len(arrivals))]


async def _by_hand(step: Step, arrival: Arrival, group_id: int) -> Record:
    """The record of a new group; one that ends at once has no row, and gets its numbers here."""
    uid, timestamp_id, now = NEW, NEW, float(NEW)
    if arrival.stale:
        uid, timestamp_id, now = await step.connection.fetchrow(f"SELECT nextval('uids'), nextval('arrivals'), {NOW}")
    return new_record(
        arrival.content,
        uid=uid,
        timestamp_id=timestamp_id,
        task_name=arrival.task_name,
        group_id=group_id,
        place=Place.BUFFERED,
        now=now,
    )


async def _returning(step: Step, arrivals: Sequence[Arrival], owner: str) -> list[Record | None]:
    """The rows in flight that the arrivals bring back (None: by hand), locked; or an error."""
    named: dict[tuple[str, int], Arrival] = {}
    for arrival in arrivals:
        if arrival.group_id is not None:
            identity = (arrival.task_name, arrival.group_id)
            if identity in named:
                raise duplicate_in_put(*identity)
            named[identity] = arrival
    if not named:
        return [None] * len(arrivals)
    rows = await step.connection.fetch(
        _FIND, [to_text(task_name) for task_name, _ in named], [group_id for _, group_id in named]
    )
    found = {(record.task_name, record.group_id): record for record in map(read_record, rows)}
    by_hand = {task_name for (task_name, n), arrival in named.items() if n >= 0 and arrival.attempt is None}
    cursors = await _cursors(step.connection, by_hand) if by_hand else {}
    returning: list[Record | None] = []
    for arrival in arrivals:
        row = None
        if arrival.group_id is not None:
            row = found.get((arrival.task_name, arrival.group_id))
            account = Account(cursor=cursors.get(arrival.task_name, 0))
            if not check_return(arrival, arrival.group_id, row, account, owner):
                row = None
        returning.append(row)
    return returning


async def _cursors(connection: Any, tasks: set[str]) -> dict[str, int]:
    """The cursors that ids put by hand are compared with; they stay as they are until the commit."""
    rows = await connection.fetch(
        "SELECT task_name, cursor FROM accounts WHERE task_name = ANY($1) ORDER BY task_name FOR SHARE",
        [to_text(task_name) for task_name in tasks],
    )
    return {from_text(row["task_name"]): row["cursor"] for row in rows}


# --- restore ------------------------------------------------------------------------------------------

_SLICE_ROWS = 1_024
_SLICE_BYTES = 8 << 20


async def restore(
    step: Step, saved: Mapping[str, Account], next_uid: int, next_timestamp_id: int, rows: AsyncIterable[Row]
) -> None:
    """Fill an empty store. InvalidInput, and nothing restored, if it is not empty or the stream contradicts itself."""
    connection, counters = step.connection, step.counters
    await connection.execute("SET LOCAL idle_in_transaction_session_timeout = 0")  # the stream may be slow
    await connection.execute("LOCK TABLE groups, accounts, counters IN SHARE ROW EXCLUSIVE MODE")
    found, _ = await summary(connection, None, False)
    present = {task_name: task.account for task_name, task in found.tasks.items()}
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
        if size >= _SLICE_BYTES or len(records) >= _SLICE_ROWS:
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


async def _copy(connection: Any, records: list[tuple[Any, ...]], frames: list[tuple[int, bytes]]) -> None:
    await connection.copy_records_to_table("groups", columns=COLUMNS, records=records)
    await connection.copy_records_to_table("payloads", columns=("uid", "frame"), records=frames)
