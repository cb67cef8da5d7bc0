"""Claims: which groups leave the buffer next, for whom, and their payloads; and how a claim is undone.

Rows are claimed with FOR UPDATE SKIP LOCKED: claims do not wait for each other, and each gets the first groups of the
order that no other is claiming. A claim that must be whole is refused only if the groups do not exist: if others have
them locked, it waits for these locks and looks again, because nothing would wake it.

Part 0 of a call in the table `calls` is its answer (see `storage.idempotency`). Beside that of a claim are the frames
of the groups that it took for good, each under the uid of its group; the server copies them. `Step.answer` writes both.
A second answer to one call is refused: another process has answered it meanwhile, and the step is rolled back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from forebay.codec.frame import encode_group
from forebay.core.ledger import End, Event, Place, Record, Row, check_move, take_event
from forebay.core.policy import ARRIVAL, CHOICE_ROWS, Order, checked_choice
from forebay.core.rollout import Status
from forebay.core.staleness import EXPIRABLE
from forebay.storage.base import Claim, Claimed, Purpose, Rows, TaskSummary
from forebay.storage.idempotency import Answered, Handed, claimed_rows, decode_kept, is_held, taken_for_good
from forebay.storage.payloads import Reading, Slices, in_slices, read_rows
from forebay.storage.postgres import accounts, owners, reads
from forebay.storage.postgres.columns import RECORD, read_record, to_text
from forebay.storage.postgres.moves import end_or_archive
from forebay.storage.postgres.schema import QUEUE, order_clause
from forebay.storage.postgres.step import NOW, Step
from forebay.storage.rules import claim_event, claimed_record, end_of, unclaimed_record

_SLICE_BYTES = 4 << 20
"""Frames that are asked for at once."""

_NO_FLOOR = -(2**63)


# --- what can be claimed ------------------------------------------------------------------------------


class Outlook:
    """What a claim finds: the figures of its tasks, and whether it changes something else first."""

    def __init__(self, claim: Claim, tasks: Mapping[str, TaskSummary], late: bool) -> None:
        self._claim = claim
        self._tasks = tasks
        clocks = [(tasks.get(task_name), clock) for task_name, clock in claim.clocks.items()]
        self.prepares = late or any(task is None or task.account.advance(clock) for task, clock in clocks)
        """Whether owners are to be reaped, or clocks to be advanced."""

    @property
    def is_worthwhile(self) -> bool:
        """Whether there is something to claim: for a whole claim, everything."""
        found = [(wanted, self._fresh(task_name)) for task_name, wanted in self._claim.wants.items()]
        if self._claim.whole:
            return all(fresh >= wanted for wanted, fresh in found)
        return any(min(wanted, fresh) > 0 for wanted, fresh in found)

    def _fresh(self, task_name: str) -> int:
        task = self._tasks.get(task_name) or TaskSummary()
        return sum(task.fresh.get(status, 0) for status in self._claim.statuses)

    def claimed(self, rows: Rows | None) -> Claimed:
        """The result of the claim, with these rows."""
        tasks = self._tasks
        return Claimed(
            rows,
            tuple([task_name for task_name, task in tasks.items() if task.due]),
            {task_name: task.account.limits for task_name, task in tasks.items()},
        )

    def nothing(self) -> Claimed:
        """The result of a claim that finds too little."""
        return self.claimed(None if self._claim.whole else {task_name: [] for task_name in self._claim.wants})


async def look(connection: Any, claim: Claim) -> Outlook:
    """What the claim finds now; one statement that locks nothing."""
    tasks, late = await reads.claimable(connection, claim.wants)
    return Outlook(claim, tasks, late)


# --- payloads -----------------------------------------------------------------------------------------


class Damaged(Exception):
    """Payloads that cannot be read: errors by uid. The claim was rolled back."""

    def __init__(self, errors: Mapping[int, str]) -> None:
        super().__init__(f"{len(errors)} groups are damaged")
        self.errors = errors


async def _read_frames(
    connection: Any, records: Sequence[Record], reading: Reading, then: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Read the payloads of records, in order, and do `then`.

    The server is never idle meanwhile: while some frames are decoded here, it reads the next ones, or does `then`.
    """
    slices = list(in_slices(records, lambda record: record.bytes, _SLICE_BYTES))

    def start(index: int) -> asyncio.Task[Any]:
        if index == len(slices):
            return asyncio.ensure_future(then())
        uids = [record.uid for record in slices[index]]
        return asyncio.ensure_future(connection.fetch("SELECT uid, frame FROM payloads WHERE uid = ANY($1)", uids))

    coming = start(0)
    try:
        for index, part in enumerate(slices):
            frames = {row["uid"]: row["frame"] for row in await coming}
            coming = start(index + 1)
            await asyncio.sleep(0)  # so that it is sent
            for record in part:
                await reading.add(record, frames.pop(record.uid, None))
        await coming
    except BaseException:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        raise


# --- claiming -----------------------------------------------------------------------------------------


async def claim(step: Step, claim: Claim, outlook: Outlook, *, waiting: bool) -> Claimed | None:
    """Reap, advance clocks, claim and read; None if it must be whole, and others have some of the groups locked.

    `waiting`: wait for locked groups instead of passing over them.
    """
    if outlook.prepares:
        await owners.reap(step)
        await accounts.advance(step, claim.clocks)
        await step.write()
        outlook = await look(step.connection, claim)
        if not outlook.is_worthwhile:
            return outlook.nothing()
    if claim.share is not None:
        left = {task: await reads.share_of(step.connection, claim.share, task) for task in claim.wants}
        claim = replace(claim, wants={task: min(n, left[task]) for task, n in claim.wants.items()})
    chosen = await _choose(step, claim, waiting=waiting)
    if chosen is None:
        return None if step.settings.choose is None else outlook.nothing()  # a policy may choose fewer than there are
    now, found = chosen
    taken: dict[str, list[Record]] = {task_name: [] for task_name in claim.wants}
    ended: list[tuple[End, list[Record]]] = []
    for task_name, status, records in found:
        target = check_move(claim_event(claim.purpose, status), Place.BUFFERED)
        if isinstance(target, End):
            ended.append((target, records))
            taken[task_name] += records
        else:
            after = [claimed_record(record, claim, now) for record in records]
            for before, moved in zip(records, after, strict=True):
                step.store(before, moved)
            taken[task_name] += after
        if claim.purpose is Purpose.TAKE:
            step.wake(task_name)

    async def write() -> None:
        # The answer copies payloads that are removed with it.
        step.answer(Handed.of(claim, taken))
        for end, records in ended:
            await end_or_archive(step, records, end, None)
        await step.write()

    records = [record for task_name in claim.wants for record in taken[task_name]]
    reading = Reading()
    if records:
        # Before the commit: groups that cannot be read must not be claimed.
        await _read_frames(step.connection, records, reading, write)
        if reading.damaged:
            raise Damaged(reading.damaged)
    rows = iter(reading.rows)
    return outlook.claimed({task_name: [next(rows) for _ in taken[task_name]] for task_name in claim.wants})


Found = list[tuple[str, Status, list[Record]]]


async def _choose(step: Step, claim: Claim, *, waiting: bool) -> tuple[float, Found] | None:
    """The server's time, and locked records by task and status; None if `whole` and some are missing."""
    choosing = step.settings.choose is not None and claim.purpose is not Purpose.DRAW
    missing = {task_name: wanted for task_name, wanted in sorted(claim.wants.items()) if wanted > 0}
    now = 0.0
    chosen: Found = []
    for status in claim.statuses:
        if choosing:
            found = {task: await _choose_by_policy(step, task, status, n, claim) for task, n in missing.items()}
            now = await step.connection.fetchval(f"SELECT {NOW}")
        else:
            lock = "FOR UPDATE OF g" if waiting else "FOR UPDATE OF g SKIP LOCKED"
            now, found = await _select(step, missing, status, claim, step.settings.order, lock)
        for task_name, records in found.items():
            if records:
                chosen.append((task_name, status, records))
                missing[task_name] -= len(records)
        missing = {task_name: wanted for task_name, wanted in missing.items() if wanted > 0}
        if not missing:
            break
    return None if claim.whole and missing else (now, chosen)


async def _select(
    step: Step, wants: Mapping[str, int], status: Status, claim: Claim, order: Order, lock: str
) -> tuple[float, dict[str, list[Record]]]:
    """The server's time, and the first fresh records of a status by task. Only EXPIRABLE ones are judged by age."""
    by, index, named = order_clause(order), "", [list(claim.group_ids)] if claim.group_ids else []
    if claim.purpose is Purpose.DRAW:
        by = "group_id, uid"
        # So that the index of groups that are drawn again fits.
        index = "AND status IN ('init', 'expired', 'aborted')" if take_event(status) is Event.REDRAWN else ""
    if named:
        index += " AND group_id = ANY($5::bigint[])"
    names = [to_text(task_name) for task_name in wants]
    rows = await step.connection.fetch(
        f"""
        SELECT r.*, {NOW} AS now FROM unnest($1::text[], $2::bigint[]) AS w (task_name, wanted)
        LEFT JOIN accounts a ON $4 AND a.task_name = w.task_name
        CROSS JOIN LATERAL (
            SELECT {RECORD} FROM groups g WHERE place = 'buffered' AND {QUEUE} = w.task_name || '/' || $3 {index}
                AND (oldest_step IS NULL OR oldest_step >= coalesce(a.floor_oldest, {_NO_FLOOR}))
                AND (token_step IS NULL OR token_step >= coalesce(a.floor_token, {_NO_FLOOR}))
            ORDER BY {by} LIMIT w.wanted {lock}
        ) r""",
        names,
        list(wants.values()),
        status,
        status in EXPIRABLE,
        *named,
    )
    found: dict[str, list[Record]] = {task_name: [] for task_name in wants}
    for record in map(read_record, rows):
        found[record.task_name].append(record)
    return rows[0]["now"] if rows else 0.0, found


async def _choose_by_policy(step: Step, task_name: str, status: Status, n: int, claim: Claim) -> list[Record]:
    """The records that a user's policy chooses. It chooses again if a chosen group was discarded meanwhile."""
    choose = step.settings.choose
    assert choose is not None
    while True:
        _, offered = await _select(step, {task_name: CHOICE_ROWS}, status, claim, ARRIVAL, "")
        by_uid = {record.uid: record for record in offered[task_name]}
        uids = checked_choice(choose, offered[task_name], n)
        locked = {record.uid: record for record in await step.lock("g.uid = ANY($1) AND g.place = 'buffered'", uids)}
        if all(uid in locked and locked[uid].revision == by_uid[uid].revision for uid in uids):
            return [locked[uid] for uid in uids]


# --- undoing ------------------------------------------------------------------------------------------


async def undo(step: Step, rows: Rows, frames: Mapping[int, bytes] | None = None) -> None:
    """Put back claimed rows whose caller never learned of them, each to its old place in the order.

    Rows that have moved since are left alone. `frames`: of groups that were taken for good, if they are not decoded.
    """
    claimed = [row for found in rows.values() for row in found]
    present = {record.uid: record for record in await step.lock("uid = ANY($1)", [row.record.uid for row in claimed])}
    ended = []
    for row in claimed:
        now = present.get(row.record.uid)
        if taken_for_good(row.record):
            if now is None or now.place is Place.ARCHIVED:
                ended.append(row)
        elif now is not None and is_held(now, row.record):
            step.store(now, unclaimed_record(now))
            step.wake(now.task_name)
    if ended:
        await _undo_ends(step, ended, present, frames)


async def _undo_ends(
    step: Step, rows: Sequence[Row], present: Mapping[int, Record], frames: Mapping[int, bytes] | None
) -> None:
    """Groups that were taken for good come back as they were, from the archive or with their frame."""
    names = [to_text(row.record.task_name) for row in rows]
    ids = [row.record.group_id for row in rows]
    found = await step.connection.fetch(
        "SELECT g.uid, g.task_name, g.group_id FROM groups g JOIN unnest($1::text[], $2::bigint[]) "
        "AS u (task_name, group_id) ON g.task_name = u.task_name AND g.group_id = u.group_id",
        names,
        ids,
    )
    by_identity = {(row["task_name"], row["group_id"]): row["uid"] for row in found}
    back: list[Record] = []
    slices = Slices()
    for name, row in zip(names, rows, strict=True):
        record = row.record
        frame = None
        if by_identity.get((name, record.group_id), record.uid) != record.uid:
            continue  # its identity was put again by hand
        if record.uid not in present:
            if frames is not None and record.uid not in frames:
                continue
            frame = encode_group(row.group) if frames is None else frames[record.uid]
            await slices.add(len(frame))
        end = end_of(take_event(record.status), Place.BUFFERED)
        step.store(present.get(record.uid), record, frame)
        step.counters.end(record.task_name, end, -record.tokens, None, groups=-1)
        step.wake(record.task_name)
        back.append(record)
    await step.connection.execute(
        "DELETE FROM ends e USING unnest($1::text[], $2::bigint[], $3::bigint[]) AS u (task_name, group_id, delivery) "
        "WHERE e.task_name = u.task_name AND e.group_id = u.group_id AND e.delivery = u.delivery",
        [to_text(record.task_name) for record in back],
        [record.group_id for record in back],
        [record.deliveries for record in back],
    )


# --- answers of calls ---------------------------------------------------------------------------------


async def retract(connection: Any, client: str, sequence: int) -> bool:
    """Drop the answer of a call that is undone; whether it existed."""
    dropped = await connection.fetch(
        "DELETE FROM calls WHERE client = $1 AND sequence = $2 RETURNING part", to_text(client), sequence
    )
    return bool(dropped)


async def forget(connection: Any, client: str) -> None:
    """Drop all answers of a client."""
    await connection.execute("DELETE FROM calls WHERE client = $1", to_text(client))


async def answer(step: Step, client: str, sequence: int) -> Answered | Exception | None:
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
        return Answered(kept.value)
    held = {record.uid: record for record in kept.held()}
    if held:
        now = await step.lock("g.uid = ANY($1)", list(held))
        here = [record.uid for record in now if is_held(record, held[record.uid])]
        rows = await connection.fetch("SELECT uid, frame FROM payloads WHERE uid = ANY($1)", here)
        frames |= {row["uid"]: row["frame"] for row in rows}
    records = [record for task_records in kept.records.values() for record in task_records]
    reading = await read_rows(records, frames)
    lost = len(records) - len(reading.rows)
    if not lost:
        return Answered(Claimed(claimed_rows(kept, reading.rows)))
    # Groups that cannot be read go back as well, if their frame exists: the next claim ends them as failed.
    await undo(step, claimed_rows(kept, (Row(record, ()) for record in records)), frames)
    await retract(connection, client, sequence)
    return kept.lost(lost)
