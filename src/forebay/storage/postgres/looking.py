"""Reads: counts from the tallies, ages and queries from the rows.

None of them locks or moves anything, or reads a payload that it was not asked for. Each is one statement, or one
snapshot, so that what it says was true at one moment.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

from forebay.ledger import Account, End, LedgerLine, Place, close_line
from forebay.query import Node
from forebay.record import Record
from forebay.rollout import Status
from forebay.staleness import EXPIRABLE
from forebay.storage.base import Holding, Usage
from forebay.storage.postgres import watermarks
from forebay.storage.postgres.rows import RECORD, RECORD_OF_G, from_text, read_record, to_text
from forebay.storage.postgres.schema import TALLY_COLUMNS
from forebay.storage.postgres.sql_query import condition

__all__ = [
    "USAGE",
    "accounts",
    "available",
    "count_statuses",
    "disagreements",
    "due",
    "holdings",
    "ledger",
    "read",
    "records",
    "usage",
]

Found: TypeAlias = "tuple[Record, bytes | None]"
"""A record and its frame."""

_BUFFERED = " + ".join(f"buffered_{status}" for status in Status)

USAGE = f"""
SELECT coalesce(sum(in_flight + leased + {_BUFFERED}), 0)::bigint AS groups, coalesce(sum(bytes), 0)::bigint AS bytes,
    coalesce(sum(reserved), 0)::bigint AS reserved, coalesce(sum({_BUFFERED}), 0)::bigint AS buffered,
    coalesce(sum(in_flight), 0)::bigint AS in_flight
FROM tallies"""

_SUMS = ", ".join(f"sum({column})::bigint AS {column}" for column in TALLY_COLUMNS)
_TALLIES = f"SELECT task_name, {_SUMS} FROM tallies GROUP BY task_name ORDER BY task_name"
_TALLY = f"SELECT task_name, {_SUMS} FROM tallies WHERE task_name = $1 GROUP BY task_name"
_SIZES = "SELECT task_name, size, sum(groups)::bigint AS groups FROM sizes"
_REASONS = "SELECT task_name, reason, sum(groups)::bigint AS groups FROM reasons"


async def usage(connection: Any) -> tuple[Usage, int]:
    """What is used of the capacity, and the buffered groups."""
    row = await connection.fetchrow(USAGE)
    return Usage(row["groups"], row["bytes"], row["reserved"]), row["buffered"]


async def count_statuses(
    connection: Any, tasks: Collection[str], statuses: Collection[Status]
) -> dict[str, dict[Status, int]]:
    """Buffered groups by task and status."""
    columns = ", ".join(f"sum(buffered_{status})::bigint AS {status}" for status in Status)
    rows = await connection.fetch(
        f"SELECT task_name, {columns} FROM tallies WHERE task_name = ANY($1) GROUP BY task_name",
        [to_text(task_name) for task_name in tasks],
    )
    found = {from_text(row["task_name"]): row for row in rows}
    return {
        task_name: {status: found[task_name][str(status)] if task_name in found else 0 for status in statuses}
        for task_name in tasks
    }


async def available(connection: Any, tasks: Collection[str], status: Status) -> dict[str, int]:
    """Buffered groups of a status that are not below their task's watermark: all but those that are."""
    names = [to_text(task_name) for task_name in tasks]
    rows = await connection.fetch(
        f"""
        SELECT name, coalesce((SELECT sum(buffered_{status}) FROM tallies t WHERE t.task_name = name), 0)::bigint
            - CASE WHEN $2 THEN coalesce((SELECT count(*) FROM accounts a, LATERAL (
                SELECT uid FROM groups g WHERE g.place = 'buffered' AND g.task_name = a.task_name AND g.status = $3
                    AND g.oldest_step < greatest(a.floor_oldest, a.floor_token)
                    AND (g.oldest_step < a.floor_oldest OR g.token_step < a.floor_token)
                UNION
                SELECT uid FROM groups g WHERE g.place = 'buffered' AND g.task_name = a.task_name AND g.status = $3
                    AND g.token_step IS DISTINCT FROM g.oldest_step AND g.token_step < a.floor_token
            ) stale WHERE a.task_name = name), 0) ELSE 0 END AS groups
        FROM unnest($1::text[]) AS name
        """,
        names,
        status in EXPIRABLE,
        str(status),
    )
    counts = {row["name"]: row["groups"] for row in rows}
    return {task_name: counts[name] for task_name, name in zip(tasks, names, strict=True)}


async def due(connection: Any, task_name: str, statuses: Collection[Status], limit: int) -> list[Found]:
    """Buffered rows below the watermark of their task, found through the indexes of age."""
    # Floors as subqueries of their own: whatever the planner knows of the tables, they bound the index scans.
    rows = await connection.fetch(
        f"""
        SELECT {RECORD_OF_G}, p.frame FROM (
            (SELECT uid FROM groups WHERE place = 'buffered' AND task_name = $1 AND status = ANY($2::text[])
                AND oldest_step < (SELECT greatest(floor_oldest, floor_token) FROM accounts WHERE task_name = $1)
                AND (oldest_step < (SELECT floor_oldest FROM accounts WHERE task_name = $1)
                    OR token_step < (SELECT floor_token FROM accounts WHERE task_name = $1)) LIMIT $3)
            UNION
            (SELECT uid FROM groups WHERE place = 'buffered' AND task_name = $1 AND status = ANY($2::text[])
                AND token_step IS DISTINCT FROM oldest_step
                AND token_step < (SELECT floor_token FROM accounts WHERE task_name = $1) LIMIT $3)
            LIMIT $3
        ) stale JOIN groups g USING (uid) LEFT JOIN payloads p USING (uid)
        WHERE g.place = 'buffered' ORDER BY array_position($2::text[], g.status), g.uid
        """,
        to_text(task_name),
        [str(status) for status in statuses],
        limit,
    )
    return [(read_record(row), row["frame"]) for row in rows]


async def ledger(connection: Any, tokens: bool) -> dict[str, LedgerLine]:
    """The closed ledger of every task, by one statement."""
    rows = await connection.fetch(
        f"SELECT * FROM (SELECT task_name FROM tallies UNION SELECT task_name FROM accounts) n "
        f"LEFT JOIN ({_TALLIES}) t USING (task_name) ORDER BY task_name"
    )
    lines = {}
    for row in rows:
        account, places = Account(), dict.fromkeys(Place, 0)
        if row["issued"] is not None:
            account = _ends(row)
            for place in (Place.IN_FLIGHT, Place.LEASED):
                places[place] = row[f"{place}_tokens" if tokens else str(place)]
            places[Place.BUFFERED] = (
                row["buffered_tokens"] if tokens else sum(row[f"buffered_{status}"] for status in Status)
            )
        lines[from_text(row["task_name"])] = close_line(account, places, tokens=tokens)
    return lines


def _ends(row: Any) -> Account:
    return Account(
        issued=row["issued"],
        ended={end: row[str(end)] for end in End if row[str(end)]},
        ended_tokens={end: row[f"{end}_tokens"] for end in End if row[str(end)]},
        issued_tokens=row["issued_tokens"],
        reset_tokens=row["reset_tokens"],
    )


async def accounts(connection: Any, task_name: str | None = None) -> dict[str, Account]:
    """The accounts of all tasks, or of one; inside a transaction that reads one snapshot."""
    if task_name is None:
        tallies = await connection.fetch(_TALLIES)
        positions = await connection.fetch("SELECT * FROM accounts")
        reasons = await connection.fetch(f"{_REASONS} GROUP BY task_name, reason ORDER BY reason")
        sizes = await connection.fetch(f"{_SIZES} GROUP BY task_name, size")
    else:
        name = to_text(task_name)
        tallies = await connection.fetch(_TALLY, name)
        positions = await connection.fetch("SELECT * FROM accounts WHERE task_name = $1", name)
        reasons = await connection.fetch(
            f"{_REASONS} WHERE task_name = $1 GROUP BY task_name, reason ORDER BY reason", name
        )
        sizes = await connection.fetch(f"{_SIZES} WHERE task_name = $1 GROUP BY task_name, size", name)
    next_hand_id = -await connection.fetchval("SELECT last_value + is_called::int FROM hand_ids")
    found = {row["task_name"]: _ends(row) for row in tallies}
    for row in positions:
        account = found.setdefault(row["task_name"], Account())
        account.cursor, account.source_state = row["cursor"], row["source_state"]
        account.watermark = watermarks.of_row(row)
    for row in reasons:
        if row["groups"]:
            found[row["task_name"]].reasons[from_text(row["reason"])] = row["groups"]
    for row in sizes:
        found[row["task_name"]].sizes[row["size"]] = row["groups"]
    for account in found.values():
        account.next_hand_id = next_hand_id
    return {from_text(name): found[name] for name in sorted(found)}


async def holdings(connection: Any) -> list[Holding]:
    """Who holds what, oldest first."""
    rows = await connection.fetch(
        """
        SELECT task_name, place, owner, count(*) AS groups,
            (array_agg(group_id ORDER BY moved_at, uid))[1] AS oldest_group_id,
            greatest(0, extract(epoch FROM clock_timestamp())::double precision - min(moved_at)) AS oldest_age_s
        FROM groups WHERE owner IS NOT NULL GROUP BY task_name, place, owner ORDER BY oldest_age_s DESC
        """
    )
    return [
        Holding(
            from_text(row["task_name"]),
            Place(row["place"]),
            from_text(row["owner"]),
            row["groups"],
            row["oldest_group_id"],
            row["oldest_age_s"],
        )
        for row in rows
    ]


async def records(connection: Any, node: Node, limit: int | None) -> list[Record]:
    """The records that match a tree, in order of uid."""
    parameters: list[Any] = [limit]
    matches = condition(node, parameters)
    rows = await connection.fetch(
        f"SELECT {RECORD} FROM groups WHERE {matches} ORDER BY uid LIMIT $1::bigint", *parameters
    )
    return [read_record(row) for row in rows]


async def read(connection: Any, uid: int) -> list[Found]:
    """The row of a group, if it is there."""
    rows = await connection.fetch(
        f"SELECT {RECORD_OF_G}, p.frame FROM groups g LEFT JOIN payloads p USING (uid) WHERE uid = $1", uid
    )
    return [(read_record(row), row["frame"]) for row in rows]


async def disagreements(connection: Any) -> Sequence[str]:
    """Where tallies, rows and payloads do not say the same; for tests and for the doctor."""
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
    for row in await connection.fetch(_TALLIES):
        for column in (*counted, *(f"buffered_{status}" for status in Status)):
            should = expected.pop((row["task_name"], column), 0)
            if row[column] != should:
                wrong.append(f"{row['task_name']}: {column} is {row[column]}, the rows say {should}")
    wrong += [f"{task_name}: {column} is missing" for (task_name, column), n in expected.items() if n]
    lonely = await connection.fetchval(
        "SELECT count(*) FROM groups FULL JOIN payloads p USING (uid) WHERE groups.uid IS NULL OR p.uid IS NULL"
    )
    if lonely:
        wrong.append(f"{lonely} rows without a payload, or payloads without a row")
    return wrong
