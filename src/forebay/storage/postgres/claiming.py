"""Claims: which groups leave the buffer next, for whom, and their payloads.

Rows are claimed with FOR UPDATE SKIP LOCKED: claimers do not wait for each other, and each gets the first groups of the
order that nobody else is claiming. A claim that must be whole says no only if the groups were not there: if others
merely had them locked, it waits for those and looks again, because nothing would wake it. The rules are `local`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from forebay.codec import encode_group
from forebay.errors import DamagedData, UnreadableData
from forebay.ledger import End, Event, Place, check_move, take_event
from forebay.policy import ARRIVAL, CHOICE_ROWS, Order, checked_choice
from forebay.record import Record, Row, group_end
from forebay.rollout import Status
from forebay.staleness import EXPIRABLE
from forebay.storage.base import Claim, Claimed, Purpose, Settings
from forebay.storage.calls import Handed, taken_for_good
from forebay.storage.local import claim_event
from forebay.storage.postgres.connections import Step
from forebay.storage.postgres.leaving import archive
from forebay.storage.postgres.rows import COLUMNS, RECORD, read_record, read_row, record_values, to_text
from forebay.storage.postgres.schema import SHELF, advisory_key, order_clause

__all__ = ["Damaged", "Reading", "claim", "count_qualifying", "undo_claim"]

Taken = list[tuple[Record, Record]]
"""Of each claimed group: the record before and after."""

_FRAME_SLICE_BYTES = 4 << 20
"""Frames that are read before the event loop gets its turn: a few milliseconds."""

_EPOCH = "extract(epoch FROM clock_timestamp())::double precision"
_NO_FLOOR = -(2**63)

_QUALIFIES = f"""
FROM groups WHERE place = 'buffered' AND {SHELF} = $2
    AND (oldest_step IS NULL OR oldest_step >=
        coalesce(greatest($3::bigint, (SELECT floor_oldest FROM accounts WHERE task_name = $1 AND $5)), {_NO_FLOOR}))
    AND (token_step IS NULL OR token_step >=
        coalesce(greatest($4::bigint, (SELECT floor_token FROM accounts WHERE task_name = $1 AND $5)), {_NO_FLOOR}))"""
_COUNT = f"SELECT count(*) FROM (SELECT {_QUALIFIES} LIMIT $6) q"
_LEASE = f"""
UPDATE groups g SET place = 'leased', owner = $2, lease_id = $3, train_step = $4, deliveries = deliveries + 1,
    moved_at = {_EPOCH} WHERE uid = ANY($1) RETURNING {RECORD}"""
_REDRAW = f"""
UPDATE groups g SET place = 'in_flight', owner = $2, attempt = attempt + 1, moved_at = {_EPOCH}
WHERE uid = ANY($1) RETURNING {RECORD}"""


def _arguments(claim: Claim, task_name: str, status: Status) -> list[Any]:
    """What _QUALIFIES asks for. Only what can expire is judged by its age."""
    floors = claim.floors.get(task_name)
    ages = status in EXPIRABLE
    oldest, token = (floors.oldest, floors.token) if floors is not None and ages else (None, None)
    name = to_text(task_name)
    return [name, f"{name}/{status}", oldest, token, ages]


async def count_qualifying(connection: Any, claim: Claim) -> bool:
    """Whether everything that a whole claim wants is there, locked or not."""
    for task_name, wanted in claim.wants.items():
        missing = wanted
        for status in claim.statuses:
            if missing > 0:
                missing -= await connection.fetchval(_COUNT, *_arguments(claim, task_name, status), missing)
        if missing > 0:
            return False
    return True


class Damaged(Exception):
    """Payloads that cannot be read: errors by uid. The claim was rolled back."""

    def __init__(self, errors: Mapping[int, str]) -> None:
        super().__init__(f"{len(errors)} groups are damaged")
        self.errors = errors


class Reading:
    """Rows with their payloads, and the errors of those that are damaged."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.damaged: dict[int, str] = {}

    def add(self, record: Record, frame: bytes | None) -> None:
        try:
            self.rows.append(read_row(record, frame))
        except UnreadableData:  # intact, but not to be read here
            raise
        except DamagedData as error:
            self.damaged[record.uid] = str(error)


async def claim(
    step: Step,
    claim: Claim,
    name: str,
    settings: Settings,
    *,
    waiting: bool,
    remember: Callable[[Handed], Awaitable[None]] | None = None,
) -> Claimed | None:
    """Claim and read; None if it must be whole and is not. `waiting`: do not skip what others have locked.

    `remember` writes what was claimed, while all payloads are there.
    """
    taken = await _take(step, claim, name, settings, waiting=waiting)
    if taken is None:
        return None
    # Before the commit: what cannot be read must not be claimed.
    found = Reading()
    records = [record for task_name in claim.wants for _, record in taken[task_name]]
    if records and remember is not None:
        by_task = {task_name: [record for _, record in taken[task_name]] for task_name in claim.wants}
        await remember(Handed.of(claim, by_task))
    if records:
        await _read_frames(step.connection, records, found.add, lambda: _finish_ended(step, taken, settings))
        if found.damaged:
            raise Damaged(found.damaged)
    rows = iter(found.rows)
    return {name: [next(rows) for _ in taken[name]] for name in claim.wants}


async def _take(step: Step, claim: Claim, name: str, settings: Settings, *, waiting: bool) -> dict[str, Taken] | None:
    """Lock and move what is claimed; None if it must be whole and is not. `waiting`: do not skip locked rows."""
    choosing = settings.choose is not None and claim.purpose is not Purpose.DRAW
    if choosing:
        # Those who choose look at the same rows: one after the other.
        await step.connection.execute("SELECT pg_advisory_xact_lock($1)", advisory_key(name, "choose"))
    chosen: list[tuple[str, Status, list[int]]] = []
    # In one order for all, so that those who wait do not wait in a circle.
    for task_name in sorted(claim.wants):
        missing = claim.wants[task_name]
        for status in claim.statuses:
            if missing <= 0:
                break
            if choosing:
                uids = await _choose(step, claim, task_name, status, missing, settings)
            else:
                named = [list(claim.group_ids)] if claim.group_ids else []
                sql = _lock_sql(claim.purpose, status, settings.order, waiting, named=bool(named))
                rows = await step.connection.fetch(sql, *_arguments(claim, task_name, status), missing, *named)
                uids = [row["uid"] for row in rows]
            missing -= len(uids)
            if uids:
                chosen.append((task_name, status, uids))
        if claim.whole and missing > 0:
            return None
    taken: dict[str, Taken] = {task_name: [] for task_name in claim.wants}
    for task_name, status, uids in chosen:
        taken[task_name] += await _move(step, claim, status, uids, settings)
        if claim.purpose is Purpose.TAKE:
            step.wake(task_name)
    return taken


def _lock_sql(purpose: Purpose, status: Status, order: Order, waiting: bool, *, named: bool) -> str:
    by, index = order_clause(order), ""
    if purpose is Purpose.DRAW:
        by = "group_id, uid"
        index = "AND status IN ('init', 'expired', 'aborted')" if take_event(status) is Event.REDRAWN else ""
    if named:
        index += " AND group_id = ANY($7::bigint[])"
    return f"SELECT uid {_QUALIFIES} {index} ORDER BY {by} LIMIT $6 FOR UPDATE {'' if waiting else 'SKIP LOCKED'}"


async def _choose(step: Step, claim: Claim, task_name: str, status: Status, n: int, settings: Settings) -> list[int]:
    """What a policy of the user's own chooses. Nobody else chooses meanwhile; what was discarded is chosen anew."""
    assert settings.choose is not None
    sql = f"SELECT {RECORD} {_QUALIFIES} ORDER BY {order_clause(ARRIVAL)} LIMIT $6"
    while True:
        rows = await step.connection.fetch(sql, *_arguments(claim, task_name, status), CHOICE_ROWS)
        uids = checked_choice(settings.choose, [read_record(row) for row in rows], n)
        revisions = {row["uid"]: row["revision"] for row in rows}
        locked = await step.connection.fetch(
            "SELECT uid FROM groups g JOIN unnest($1::bigint[], $2::bigint[]) AS u (uid, revision) USING (uid) "
            "WHERE place = 'buffered' AND g.revision = u.revision ORDER BY uid FOR UPDATE OF g",
            uids,
            [revisions[uid] for uid in uids],
        )
        if len(locked) == len(uids):
            return uids


async def _move(step: Step, claim: Claim, status: Status, uids: list[int], settings: Settings) -> Taken:
    connection = step.connection
    target = check_move(claim_event(claim.purpose, status), Place.BUFFERED)
    owner = to_text(claim.owner)
    archiving = target is End.TRAINED and settings.keep_trained > 0
    if archiving:
        rows = await connection.fetch(f"SELECT {RECORD} FROM groups WHERE uid = ANY($1)", uids)
    elif isinstance(target, End):
        rows = await connection.fetch(f"DELETE FROM groups WHERE uid = ANY($1) RETURNING {RECORD}", uids)
    elif target is Place.LEASED:
        rows = await connection.fetch(_LEASE, uids, owner, claim.lease_id, claim.train_step)
    else:
        rows = await connection.fetch(_REDRAW, uids, owner)
    after = {row["uid"]: read_record(row) for row in rows}
    moved: Taken = []
    for uid in uids:
        record = after[uid]
        before = replace(record, place=Place.BUFFERED)
        step.tally.leave(before)
        if not isinstance(target, End):
            step.tally.enter(record)
        moved.append((before, record))
    if isinstance(target, End):
        tokens = sum([record.tokens for record in after.values()])
        step.tally.end(moved[0][0].task_name, target, tokens, None, len(uids))
        for record in after.values():
            step.tally.note_end(group_end(record, target, None))
    return moved


async def _read_frames(
    connection: Any,
    records: Sequence[Record],
    read: Callable[[Record, bytes | None], Any],
    then: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    """Hand every record and its frame to `read`, in order, and do `then`.

    The server is never idle for it: while some frames are read here, it prepares the next ones, or does `then`.
    """
    slices: list[list[Record]] = [[]]
    size = 0
    for record in records:
        if slices[-1] and size + record.bytes > _FRAME_SLICE_BYTES:
            slices.append([])
            size = 0
        slices[-1].append(record)
        size += record.bytes

    def ask(index: int) -> asyncio.Task[Any]:
        if index == len(slices):
            return asyncio.ensure_future(then())
        uids = [record.uid for record in slices[index]]
        return asyncio.ensure_future(connection.fetch("SELECT uid, frame FROM payloads WHERE uid = ANY($1)", uids))

    coming = ask(0)
    try:
        for index, part in enumerate(slices):
            frames = {row["uid"]: row["frame"] for row in await coming}
            coming = ask(index + 1)
            await asyncio.sleep(0)  # so that it is sent
            for record in part:
                read(record, frames.pop(record.uid, None))
        await coming
    except BaseException:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        raise


async def _finish_ended(step: Step, taken: Mapping[str, Taken], settings: Settings) -> None:
    """The payloads of groups that were taken for good go, or stay in the archive."""
    ended = [before for rows in taken.values() for before, after in rows if after.place is Place.BUFFERED]
    kept = [before.uid for before in ended if take_event(before.status) is Event.TAKEN and settings.keep_trained]
    if kept:
        await archive(step, kept, settings.keep_trained)
    gone = [before.uid for before in ended if before.uid not in set(kept)]
    if gone:
        await step.connection.execute("DELETE FROM payloads WHERE uid = ANY($1)", gone)


async def undo_claim(step: Step, claim: Claim, claimed: Claimed, frames: Mapping[int, bytes] | None = None) -> None:
    """Put back what a caller claimed that never learned of it, each to its place in the order.

    What has moved on since is left alone. `frames`: of groups that were taken for good, if they are not decoded.
    """
    for task_name, rows in claimed.items():
        ended = [row for row in rows if taken_for_good(row.record)]
        held = [row.record for row in rows if not taken_for_good(row.record)]
        back = await _undo_ends(step, ended, frames) if ended else 0
        uids = [record.uid for record in held]
        if not held:
            found = []
        elif claim.purpose is Purpose.LEASE:
            found = await step.connection.fetch(
                "UPDATE groups SET place = 'buffered', owner = NULL, lease_id = NULL, train_step = NULL, "
                "deliveries = deliveries - 1 WHERE uid = ANY($1) AND lease_id = $2 AND place = 'leased' RETURNING uid",
                uids,
                claim.lease_id,
            )
        else:
            found = await step.connection.fetch(
                "UPDATE groups g SET place = 'buffered', owner = NULL FROM unnest($1::bigint[], $2::bigint[]) AS u "
                "(uid, attempt) WHERE g.uid = u.uid AND place = 'in_flight' AND g.attempt = u.attempt AND owner = $3 "
                "RETURNING g.uid",
                uids,
                [record.attempt for record in held],
                to_text(claim.owner),
            )
        known = {row["uid"] for row in found}
        for record in held:
            if record.uid in known:
                step.tally.leave(record)
                step.tally.enter(replace(record, place=Place.BUFFERED))
        if back or known:
            step.wake(task_name)


async def _undo_ends(step: Step, rows: Sequence[Row], frames: Mapping[int, bytes] | None) -> int:
    """Groups that were taken for good come back as they were, from the archive or from memory; how many did."""
    connection = step.connection
    names = [to_text(row.record.task_name) for row in rows]
    present = await connection.fetch(
        "SELECT uid, place FROM groups WHERE uid = ANY($1) ORDER BY uid FOR UPDATE", [row.record.uid for row in rows]
    )
    back_already = {row["uid"] for row in present if row["place"] != str(Place.ARCHIVED)}
    same_identity = await connection.fetch(
        "SELECT g.uid, g.group_id FROM groups g JOIN unnest($1::text[], $2::bigint[]) AS u (task_name, group_id) "
        "USING (task_name, group_id)",
        names,
        [row.record.group_id for row in rows],
    )
    archived = {row["uid"] for row in present} - back_already
    put_again = {row["group_id"] for row in same_identity if row["uid"] not in archived}
    chosen = [row for row in rows if row.record.uid not in back_already and row.record.group_id not in put_again]
    if frames is not None:
        chosen = [row for row in chosen if row.record.uid in frames]
    records = [row.record for row in chosen]
    uids = [record.uid for record in records]
    stored = [(row.record.uid, encode_group(row.group) if frames is None else frames[row.record.uid]) for row in chosen]
    await connection.execute("DELETE FROM groups WHERE uid = ANY($1)", uids)
    await connection.execute("DELETE FROM payloads WHERE uid = ANY($1)", uids)
    await connection.copy_records_to_table("groups", columns=COLUMNS, records=[record_values(r) for r in records])
    await connection.copy_records_to_table("payloads", columns=("uid", "frame"), records=stored)
    for record in records:
        end = check_move(take_event(record.status), Place.BUFFERED)
        assert isinstance(end, End)
        step.tally.enter(record)
        step.tally.end(record.task_name, end, -record.tokens, None, groups=-1)
        await connection.execute(
            "DELETE FROM ends WHERE task_name = $1 AND group_id = $2 AND delivery = $3",
            to_text(record.task_name),
            record.group_id,
            record.deliveries,
        )
    return len(records)
