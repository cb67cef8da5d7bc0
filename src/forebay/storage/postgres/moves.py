"""Operations on groups that were claimed or are buffered: settled, released, archived, revised, discarded, ended.

A function that is named like an operation of the contract is that operation: `PostgresStorage` runs it as one step.
Rows are locked in order of uid before they change, so that two steps do not deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from forebay.codec.records import decode_end
from forebay.core.ledger import End, Event, GroupEnd, Place, Record, check_move
from forebay.core.query import Node
from forebay.core.rollout import Status
from forebay.storage.payloads import encoded
from forebay.storage.postgres import accounts
from forebay.storage.postgres.columns import RECORD, condition, read_record, to_text
from forebay.storage.postgres.step import NEW, Step
from forebay.storage.rules import abandoned_record, end_of, lost_lease, nacked_record, revised_record, rewound_record
from forebay.storage.values import Revision

# The oldest beyond `keep_trained`, except those that no saved weights were trained on yet.
_TRIM = """
WITH trimmed AS (
    DELETE FROM groups WHERE uid IN (
        SELECT uid FROM groups WHERE place = 'archived'
            AND (moved_at, uid) <= (
                SELECT moved_at, uid FROM groups WHERE place = 'archived' ORDER BY moved_at DESC, uid DESC
                OFFSET $1 LIMIT 1)
            AND NOT coalesce(train_step > coalesce(
                (SELECT a.saved_step FROM accounts a WHERE a.task_name = groups.task_name),
                (SELECT saved_step FROM store)), false)
        FOR UPDATE SKIP LOCKED
    ) RETURNING uid
)
DELETE FROM payloads WHERE uid IN (SELECT uid FROM trimmed)"""

_TAKE_ENDS = """
UPDATE ends SET owner = $1 WHERE number IN (
    SELECT number FROM ends e WHERE owner IS NULL OR owner = $1
        OR NOT EXISTS (SELECT FROM owners o WHERE o.owner = e.owner AND NOT o.reaped)
    ORDER BY number LIMIT $2 FOR UPDATE SKIP LOCKED
) RETURNING number, data"""


# --- leases -------------------------------------------------------------------------------------------


async def settle(step: Step, lease_id: str, uids: Sequence[int], event: Event, reason: str | None = None) -> None:
    target = check_move(event, Place.LEASED)
    wanted = set(uids)
    rows = await step.connection.fetch(
        f"SELECT {RECORD}, coalesce((SELECT a.saved_step FROM accounts a WHERE a.task_name = g.task_name), "
        "(SELECT saved_step FROM store)) AS saved_step FROM groups g "
        "WHERE uid = ANY($1) AND lease_id = $2 AND place = 'leased' ORDER BY uid FOR UPDATE OF g",
        list(wanted),
        to_text(lease_id),
    )
    if len(rows) < len(wanted):
        raise lost_lease(len(wanted) - len(rows), len(wanted), lease_id)
    records = [read_record(row) for row in rows]
    if isinstance(target, End):
        saved = {record.task_name: row["saved_step"] for record, row in zip(records, rows, strict=True)}
        await end_or_archive(step, records, target, reason, saved)
    else:
        _nack(step, records)


async def end_or_archive(
    step: Step, records: Sequence[Record], end: End, reason: str | None, saved_steps: Mapping[str, int | None] = {}
) -> None:
    """End locked rows. Trained ones are kept if the settings say so, or while no saved weights were trained on them."""
    saved = [(record.train_step or 0, saved_steps.get(record.task_name)) for record in records]
    unsaved = any(saved_step is not None and train_step > saved_step for train_step, saved_step in saved)
    if end is not End.TRAINED or not (step.settings.keep_trained or unsaved):
        for record in records:
            step.end(record, end, reason)
        return
    for record in records:
        step.archive(record)
    await step.write()
    await step.connection.execute(_TRIM, step.settings.keep_trained)


def _nack(step: Step, records: Sequence[Record]) -> None:
    for record in records:
        check_move(Event.NACKED, record.place)
        step.store(record, nacked_record(record, NEW))
        step.wake(record.task_name)


async def release(step: Step, *owners: str) -> dict[str, int]:
    records = await step.lock("g.owner = ANY($1)", [to_text(owner) for owner in owners])
    _nack(step, [record for record in records if record.place is Place.LEASED])
    for record in records:
        if record.place is Place.IN_FLIGHT:
            check_move(Event.ABANDONED, record.place)
            step.store(record, abandoned_record(record, NEW, NEW))
            step.wake(record.task_name)
    return dict(Counter(record.task_name for record in records))


async def write_plan(step: Step, task_name: str, content: bytes, *, revision: int) -> bool:
    await accounts.ensure(step.connection, (task_name,))
    written = await step.connection.fetchval(
        "UPDATE accounts SET plan = $2, plan_revision = $3 + 1 WHERE task_name = $1 AND plan_revision = $3 RETURNING 1",
        to_text(task_name),
        content,
        revision,
    )
    if written:
        step.wake(task_name)
    return bool(written)


# --- the archive --------------------------------------------------------------------------------------


async def saved(step: Step, model_step: int, tasks: Collection[str] | None = None) -> None:
    await _save(step, model_step, tasks)
    await step.connection.execute(_TRIM, step.settings.keep_trained)


async def _save(step: Step, model_step: int, tasks: Collection[str] | None) -> None:
    if tasks is None:
        await step.connection.execute("UPDATE store SET saved_step = $1", model_step)
        await step.connection.execute("UPDATE accounts SET saved_step = NULL WHERE saved_step IS NOT NULL")
        return
    await accounts.ensure(step.connection, tasks)
    names = [to_text(task_name) for task_name in tasks]
    await step.connection.execute("UPDATE accounts SET saved_step = $1 WHERE task_name = ANY($2)", model_step, names)


async def rewind(step: Step, model_step: int, tasks: Collection[str] | None = None) -> dict[str, int]:
    connection = step.connection
    rows = await connection.fetch(
        f"SELECT {RECORD}, trained_as FROM groups g WHERE place = 'archived' AND train_step > $1 "
        "AND ($2::text[] IS NULL OR task_name = ANY($2)) ORDER BY uid FOR UPDATE",
        model_step,
        None if tasks is None else [to_text(task_name) for task_name in tasks],
    )
    records = [read_record(row) for row in rows]
    for row, record in zip(rows, records, strict=True):
        check_move(Event.REWOUND, record.place)
        step.store(record, rewound_record(record, Status(row["trained_as"]), NEW))
        step.counters.end(record.task_name, End.TRAINED, -record.tokens, None, groups=-1)
        step.wake(record.task_name)
    known = await accounts.read(connection, tasks, lock=True)
    for account in known.values():
        account.rewind(model_step)
    await accounts.write(connection, known)
    await _save(step, model_step, tasks)
    step.tasks |= known.keys()  # some of their groups may be fresh again
    return dict(Counter(record.task_name for record in records))


# --- buffered groups ----------------------------------------------------------------------------------


async def revise(step: Step, revisions: Sequence[Revision]) -> list[bool]:
    frames = iter(await encoded(revision.content.group for revision in revisions if revision.content is not None))
    uids = [revision.uid for revision in revisions]
    current = {record.uid: record for record in await step.lock("g.uid = ANY($1) AND g.place = 'buffered'", uids)}
    applied = []
    for revision in revisions:
        frame = None if revision.content is None else next(frames)
        record = current.get(revision.uid)
        if record is None or record.revision != revision.revision:
            applied.append(False)
            continue
        applied.append(True)
        step.wake(record.task_name)
        if revision.content is None:
            step.end(current.pop(record.uid), end_of(Event.STALE, record.place), "stale")
        else:
            current[record.uid] = revised = revised_record(record, revision.content)
            step.store(record, revised, frame)
            step.counters.add(record.task_name, "reset_tokens", max(0, record.tokens - revised.tokens))
    return applied


async def matching(connection: Any, node: Node) -> list[int]:
    """The buffered groups that match a tree."""
    parameters: list[Any] = []
    matches = condition(node, parameters)
    rows = await connection.fetch(f"SELECT uid FROM groups WHERE place = 'buffered' AND {matches}", *parameters)
    return sorted(row["uid"] for row in rows)


async def discard_some(step: Step, uids: Sequence[int], node: Node, reason: str) -> dict[str, int]:
    """End those of the groups that are still buffered and still match; groups by task."""
    parameters: list[Any] = [uids]
    matches = condition(node, parameters)
    records = await step.lock(f"uid = ANY($1) AND place = 'buffered' AND {matches}", *parameters)
    for record in records:
        step.end(record, end_of(Event.DISCARDED, record.place), reason)
    return dict(Counter(record.task_name for record in records))


async def fail(step: Step, reasons: Mapping[int, str]) -> dict[str, int]:
    failed: Counter[str] = Counter()
    for record in await step.lock("g.uid = ANY($1)", list(reasons)):
        if record.place is Place.ARCHIVED:  # it has already ended
            step.remove(record)
        else:
            step.end(record, End.FAILED, reasons[record.uid])
            failed[record.task_name] += 1
    return dict(failed)


async def set_priority(step: Step, priorities: Mapping[int, float]) -> int:
    status = await step.connection.execute(
        "UPDATE groups g SET priority = u.priority FROM unnest($1::bigint[], $2::double precision[]) AS u "
        "(uid, priority) WHERE g.uid = u.uid",
        list(priorities),
        list(priorities.values()),
    )
    return int(status.split()[-1])


# --- reported ends ------------------------------------------------------------------------------------


async def note_ends(step: Step) -> None:
    await step.connection.execute("UPDATE store SET notes_ends = true WHERE NOT notes_ends")


async def ends(step: Step, owner: str, limit: int) -> list[tuple[int, GroupEnd]]:
    rows = await step.connection.fetch(_TAKE_ENDS, to_text(owner), limit)
    return sorted((row["number"], decode_end(row["data"])) for row in rows)


async def forget_ends(step: Step, numbers: Sequence[int]) -> None:
    await step.connection.execute("DELETE FROM ends WHERE number = ANY($1)", list(numbers))
