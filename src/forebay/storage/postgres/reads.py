"""Reads: counts from the counters, ages and queries from the rows, and everything as a stream.

None of them locks or moves anything, or reads a payload that it was not asked for. Each is one statement, so that its
result was true at one moment. A stream reads one moment (REPEATABLE READ) on its own connection while others continue;
it needs a bounded number of bytes however much is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

from forebay.core.capacity import Usage
from forebay.core.ledger import Account, End, Place, Record, Row
from forebay.core.query import Node
from forebay.core.rollout import Status
from forebay.core.staleness import EXPIRABLE
from forebay.errors import DamagedData, StorageUnavailable
from forebay.storage import rules
from forebay.storage.base import Share, Summary, TaskSummary
from forebay.storage.payloads import in_slices, read_row
from forebay.storage.postgres.accounts import ACCOUNT, read_account
from forebay.storage.postgres.columns import RECORD, condition, from_text, read_record, to_text
from forebay.storage.postgres.connections import LOST, READ, is_closed
from forebay.storage.postgres.owners import IS_LATE, LIVES
from forebay.storage.postgres.step import BUFFERED, COUNTERS, NOW
from forebay.storage.values import Holding, Snapshot

Found: TypeAlias = "tuple[Record, bytes | None]"
"""A record and its frame."""

_BUFFERED = " + ".join(BUFFERED.values())
USAGE = f"""
SELECT coalesce(sum(in_flight + leased + {_BUFFERED}), 0)::bigint AS used_groups,
    coalesce(sum(bytes), 0)::bigint AS used_bytes, coalesce(sum(reserved), 0)::bigint AS used_reserved,
    coalesce(sum({_BUFFERED}), 0)::bigint AS used_buffered, coalesce(sum(in_flight), 0)::bigint AS used_in_flight
FROM counters"""

SIZES = """
(SELECT json_object_agg(size, n) FROM (
    SELECT size, sum(groups)::bigint AS n FROM sizes WHERE task_name = {} GROUP BY size) z)"""
"""The sizes of a task's responses, for `sizes_of`."""

_SUMS = ", ".join(f"coalesce(sum({name}), 0)::bigint AS {name}" for name in COUNTERS)

# Rows of a task (its account is called a) that are too old. No token of a group is older than its oldest one, so that
# the index of the oldest step bounds both conditions.
_TOO_OLD = """
SELECT g.uid, g.status FROM groups g WHERE g.place = 'buffered' AND g.task_name = a.task_name
    AND g.status = ANY({statuses}) AND g.oldest_step < greatest(a.floor_oldest, a.floor_token)
    AND (g.oldest_step < a.floor_oldest OR g.token_step < a.floor_token)"""
_EXPIRABLE = f"'{{{','.join(EXPIRABLE)}}}'::text[]"

# The figures of a task (called k) from its account and its counters.
FIGURES = f"""
    a.task_name IS NOT NULL OR c.shards > 0 AS known, {ACCOUNT}, c.*,
    (SELECT json_object_agg(status, n) FROM (
        SELECT old.status, count(*) AS n FROM ({_TOO_OLD.format(statuses=_EXPIRABLE)}) old GROUP BY old.status
    ) counted) AS too_old"""
OF_TASK = f"""
LEFT JOIN accounts a ON a.task_name = k.task_name
LEFT JOIN LATERAL (SELECT count(*) AS shards, {_SUMS} FROM counters WHERE task_name = k.task_name) c ON true"""

_CLAIMABLE = f"""
SELECT k.task_name, EXISTS (SELECT FROM owners o WHERE {IS_LATE}) AS late, {FIGURES}
FROM unnest($1::text[]) AS k (task_name) {OF_TASK}"""

_HOLDINGS = f"""
SELECT json_agg(json_build_array(task_name, place, owner, n, oldest, greatest(0, {NOW} - since)) ORDER BY since) FROM (
    SELECT task_name, place, owner, count(*) AS n, (array_agg(group_id ORDER BY moved_at, uid))[1] AS oldest,
        min(moved_at) AS since
    FROM groups WHERE owner IS NOT NULL AND $2 GROUP BY task_name, place, owner) held"""

_SUMMARY = f"""
SELECT s.saved_step AS store_saved_step, u.*, -h.last_value - h.is_called::int AS next_hand_id,
    ({_HOLDINGS}) AS holdings,
    (SELECT array_agg(owner ORDER BY owner) FROM owners WHERE $3 AND ({LIVES})) AS living, k.task_name, {FIGURES},
    (SELECT json_object_agg(reason, n ORDER BY reason) FROM (
        SELECT reason, sum(groups)::bigint AS n FROM reasons WHERE task_name = k.task_name GROUP BY reason
    ) r WHERE n <> 0) AS reasons,
    {SIZES.format("k.task_name")} AS sizes
FROM store s CROSS JOIN ({USAGE}) u CROSS JOIN hand_ids h
LEFT JOIN (SELECT task_name FROM accounts UNION SELECT task_name FROM counters) k
    ON $1::text[] IS NULL OR k.task_name = ANY($1) {OF_TASK}
ORDER BY k.task_name"""


# --- counts -------------------------------------------------------------------------------------------


def usage_of(row: Any) -> Usage:
    """The usage in a row that has the columns of USAGE."""
    return Usage(row["used_groups"], row["used_bytes"], row["used_reserved"])


def sizes_of(row: Any) -> dict[int, int]:
    """The sizes in a row that has a column SIZES."""
    return {int(size): n for size, n in _counts(row["sizes"]).items()}


def _counts(data: str | None) -> dict[str, int]:
    return {} if data is None else json.loads(data)


async def summary(
    connection: Any, tasks: Collection[str] | None, holdings: bool, owners: bool = False
) -> tuple[Summary, int]:
    """Every count of these tasks (None: of all), and the number of buffered groups."""
    names = None if tasks is None else [to_text(task_name) for task_name in tasks]
    rows = await connection.fetch(_SUMMARY, names, holdings, owners)
    first = rows[0]
    found = {}
    for row in rows:
        if row["task_name"] is not None:
            task = _task_summary(row)
            task.account.next_hand_id = row["next_hand_id"]
            task.account.reasons = {from_text(reason): n for reason, n in _counts(row["reasons"]).items()}
            task.account.sizes = sizes_of(row)
            found[from_text(row["task_name"])] = task
    held = [
        Holding(from_text(task_name), Place(place), from_text(owner), groups, oldest, age_s)
        for task_name, place, owner, groups, oldest, age_s in json.loads(first["holdings"] or "[]")
    ]
    living = [from_text(owner) for owner in first["living"] or ()]
    return Summary(found, usage_of(first), held, first["store_saved_step"], living), first["used_buffered"]


def _task_summary(row: Any) -> TaskSummary:
    account: Account = read_account(row)
    account.issued, account.issued_tokens = row["issued"], row["issued_tokens"]
    account.reset_tokens = row["reset_tokens"]
    account.completed, account.failures = row["completed"], row["failures"]
    account.ended = {end: row[str(end)] for end in End if row[str(end)]}
    account.ended_tokens = {end: row[f"{end}_tokens"] for end in End if row[str(end)]}
    statuses = {status: n for status, column in BUFFERED.items() if (n := row[column])}
    fresh = dict(statuses)
    for status, n in _counts(row["too_old"]).items():
        fresh[Status(status)] -= n
    places = {Place.BUFFERED: sum(statuses.values()), **{place: row[str(place)] for place in _HELD}}
    tokens = {place: row[f"{place}_tokens"] for place in (Place.BUFFERED, *_HELD)}
    return TaskSummary(account, statuses, fresh, places, tokens)


_HELD = (Place.IN_FLIGHT, Place.LEASED)


async def share_of(connection: Any, share: Share, task_name: str) -> int:
    """As `share_left`, read now."""
    row = await connection.fetchrow(_CLAIMABLE, [to_text(task_name)])
    return share_left(share, task_name, row)


async def claimable(connection: Any, tasks: Collection[str]) -> tuple[dict[str, TaskSummary], bool]:
    """The figures of the known ones among tasks (without reasons and sizes), and whether an owner is to be reaped."""
    rows = await connection.fetch(_CLAIMABLE, [to_text(task_name) for task_name in tasks])
    found = {from_text(row["task_name"]): _task_summary(row) for row in rows if row["known"]}
    return found, bool(rows) and rows[0]["late"]


def share_left(share: Share, task_name: str, row: Any) -> int:
    """How many groups of a task a share still allows to draw, from a row that has the columns of FIGURES."""
    task = _task_summary(row)
    return rules.share_left(share, task_name, task.account.epoch, task.produced + task.in_flight)


# --- rows ---------------------------------------------------------------------------------------------


async def due(connection: Any, task_name: str, statuses: Collection[Status], limit: int) -> list[Found]:
    """Buffered rows that are too old by the clock and limits of their task."""
    rows = await connection.fetch(
        f"""
        SELECT {RECORD}, p.frame FROM accounts a
        CROSS JOIN LATERAL ({_TOO_OLD.format(statuses="$2::text[]")} LIMIT $3) old
        JOIN groups g ON g.uid = old.uid LEFT JOIN payloads p ON p.uid = g.uid
        WHERE a.task_name = $1 ORDER BY array_position($2::text[], g.status), g.uid""",
        to_text(task_name),
        list(statuses),
        limit,
    )
    return [(read_record(row), row["frame"]) for row in rows]


async def records(connection: Any, node: Node, limit: int | None) -> list[Record]:
    """The records that match a tree, in order of uid."""
    parameters: list[Any] = [limit]
    matches = condition(node, parameters)
    rows = await connection.fetch(
        f"SELECT {RECORD} FROM groups g WHERE {matches} ORDER BY uid LIMIT $1::bigint", *parameters
    )
    return [read_record(row) for row in rows]


async def read(connection: Any, uid: int) -> list[Found]:
    """The row of a group, if it exists."""
    rows = await connection.fetch(
        f"SELECT {RECORD}, p.frame FROM groups g LEFT JOIN payloads p ON p.uid = g.uid WHERE g.uid = $1", uid
    )
    return [(read_record(row), row["frame"]) for row in rows]


async def problems(connection: Any) -> Sequence[str]:
    """Where counters, rows and payloads disagree, in a transaction that reads one moment."""
    rows = await connection.fetch(
        "SELECT task_name, place, status, count(*) AS groups, sum(tokens)::bigint AS tokens, sum(bytes)::bigint AS "
        "bytes, sum(greatest(0, reserved_bytes - bytes))::bigint AS reserved FROM groups WHERE place <> 'archived' "
        "GROUP BY task_name, place, status"
    )
    expected: dict[tuple[str, str], int] = {}
    for row in rows:
        task_name, place = row["task_name"], row["place"]
        column = f"buffered_{row['status']}" if place == "buffered" else place
        figures = ((column, "groups"), (f"{place}_tokens", "tokens"), ("bytes", "bytes"), ("reserved", "reserved"))
        for name, n in ((name, row[figure]) for name, figure in figures):
            expected[task_name, name] = expected.get((task_name, name), 0) + n
    wrong = []
    counted = ("in_flight", "leased", "bytes", "reserved", "in_flight_tokens", "buffered_tokens", "leased_tokens")
    for row in await connection.fetch(f"SELECT task_name, {_SUMS} FROM counters GROUP BY task_name"):
        for column in (*counted, *BUFFERED.values()):
            should = expected.pop((row["task_name"], column), 0)
            if row[column] != should:
                wrong.append(f"{row['task_name']}: {column} is {row[column]}, but the rows add up to {should}")
    wrong += [f"{task_name}: {column} is missing" for (task_name, column), n in expected.items() if n]
    unpaired = await connection.fetchval(
        "SELECT count(*) FROM groups FULL JOIN payloads p USING (uid) WHERE groups.uid IS NULL OR p.uid IS NULL"
    )
    if unpaired:
        wrong.append(f"{unpaired} rows without a payload, or payloads without a row")
    return wrong


# --- streams ------------------------------------------------------------------------------------------

_SLICE_ROWS = 128
_SLICE_BYTES = 8 << 20

_HEADS = f"""
SELECT {RECORD}, coalesce(octet_length(p.frame), 0) AS frame_bytes FROM groups g LEFT JOIN payloads p USING (uid)
WHERE g.uid > $1 ORDER BY g.uid LIMIT {_SLICE_ROWS}"""
_FRAMES = "SELECT uid, frame FROM payloads WHERE uid = ANY($1)"
_NEXT_NUMBERS = """
SELECT u.last_value + u.is_called::int AS uid, a.last_value + a.is_called::int AS timestamp_id
FROM uids u, arrivals a"""


class Stream:
    """The rows of one moment. It has a connection until it is read to its end, or forgotten, or ended."""

    def __init__(self, connection: Any, ended: Callable[[Stream], None]) -> None:
        self._connection = connection
        self._ended = ended
        self._open = True
        self._loop = asyncio.get_running_loop()

    async def snapshot(self) -> Snapshot:
        """Begin to read."""
        connection = self._connection
        await connection.execute("SET idle_in_transaction_session_timeout = 0")  # its reader may be slow
        await connection.execute(READ)
        found, _ = await summary(connection, None, False)
        numbers = await connection.fetchrow(_NEXT_NUMBERS)
        rows = self._rows(connection)
        # A generator that is never read never ends by itself.
        weakref.finalize(rows, self._forgotten)
        accounts = {task_name: task.account for task_name, task in found.tasks.items()}
        return Snapshot(accounts, numbers["uid"], numbers["timestamp_id"], rows)

    def _forgotten(self) -> None:
        if self._open:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its connections with it
                self._loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        """Give up the connection."""
        if self._open:
            self._open = False
            if not is_closed(self._connection):
                self._connection.terminate()
            self._ended(self)

    async def _rows(self, connection: Any) -> AsyncGenerator[Row, None]:
        above = 0
        try:
            while heads := await connection.fetch(_HEADS, above):
                above = heads[-1]["uid"]
                for part in in_slices(heads, itemgetter("frame_bytes"), _SLICE_BYTES):
                    frames = await connection.fetch(_FRAMES, [row["uid"] for row in part])
                    by_uid = {row["uid"]: row["frame"] for row in frames}
                    for row in part:
                        yield _read(row, by_uid.pop(row["uid"], None))
        except LOST as error:
            raise StorageUnavailable(f"the database went away while a snapshot was read: {error}") from error
        finally:
            self.end()


def _read(row: Any, frame: bytes | None) -> Row:
    record = read_record(row)
    try:
        return read_row(record, frame)
    except DamagedData as error:
        raise DamagedData(f"the payload of group uid {record.uid} was damaged on disk: {error}") from None
