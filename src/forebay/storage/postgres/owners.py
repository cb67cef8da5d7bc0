"""The table `owners`: the owners that have a buffer open, with which settings, and until when.

Deadlines are judged by the server's clock alone. An owner that missed its deadline loses its groups when another
process reaps it; it may send heartbeats again afterwards and continue, but it no longer holds these groups.
"""

from __future__ import annotations

from typing import Any

import asyncpg

from forebay.core.capacity import Settings
from forebay.storage.postgres import moves
from forebay.storage.postgres.columns import from_text, to_text
from forebay.storage.postgres.schema import advisory_key, read_settings, replace_order_index, settings_text
from forebay.storage.postgres.step import Step
from forebay.storage.rules import other_settings

_KEEP_S = 86_400.0
"""How long an owner that stopped sending heartbeats is remembered."""

# Not EXISTS: the planner might read the whole table for that.
IS_LATE = (
    "o.deadline <= clock_timestamp() "
    "AND (NOT o.reaped OR (SELECT g.uid FROM groups g WHERE g.owner = o.owner LIMIT 1) IS NOT NULL)"
)
"""Whether an owner (called o) is to be reaped: it was not yet, or holds groups again."""

LIVES = "deadline IS NULL OR deadline > clock_timestamp()"
"""Whether an owner has not missed its deadline."""

RENEW = """
INSERT INTO owners (owner, lease_s, deadline) VALUES ($1, $2, clock_timestamp() + make_interval(secs => $2))
ON CONFLICT (owner) DO UPDATE SET lease_s = excluded.lease_s, deadline = excluded.deadline, reaped = false"""
"""A heartbeat of an owner."""


async def register(step: Step, name: str, owner: str, settings: Settings, lease_s: float | None) -> None:
    """Open a buffer for an owner. All owners that have it open have the same settings; the first one sets them."""
    connection, wanted = step.connection, settings_text(settings)
    await connection.execute("SELECT pg_advisory_xact_lock($1)", advisory_key(name, "settings"))
    stored = await connection.fetchval("SELECT settings FROM store")
    if stored != wanted:
        if await connection.fetchval(f"SELECT EXISTS (SELECT FROM owners WHERE {LIVES})"):
            raise other_settings(f"the buffer {name!r}", stored, wanted)
        await replace_order_index(connection, settings.order)
        await connection.execute("UPDATE store SET settings = $1", wanted)
    await connection.execute(RENEW, to_text(owner), lease_s)


async def present_settings(connection: Any) -> tuple[Settings, float | None] | None:
    """The settings and the longest `lease_s` of the owners that have a buffer open; None if there are none."""
    living = f"SELECT count(*) AS number, max(lease_s) AS lease_s FROM owners WHERE {LIVES}"
    try:
        found = await connection.fetchrow(f"SELECT settings, lease_s FROM store, ({living}) AS living WHERE number > 0")
    except asyncpg.UndefinedTableError:
        return None
    return None if found is None else (read_settings(found["settings"]), found["lease_s"])


async def leave(step: Step, owner: str) -> None:
    """Release the groups of an owner, and forget it."""
    await moves.release(step, owner)
    await step.connection.execute("DELETE FROM owners WHERE owner = $1", to_text(owner))


async def next_deadline(connection: Any) -> tuple[bool, float | None]:
    """Whether an owner is to be reaped, and the seconds until the next deadline of another."""
    row = await connection.fetchrow(
        f"SELECT EXISTS (SELECT FROM owners o WHERE {IS_LATE}) AS late, (SELECT extract(epoch FROM min(deadline) - "
        "clock_timestamp())::double precision FROM owners WHERE deadline > clock_timestamp()) AS next_s"
    )
    return row["late"], row["next_s"]


async def reap(step: Step) -> dict[str, int] | None:
    """Release the groups of late owners, by task; None if they are not late after all, or being reaped by others."""
    connection = step.connection
    late = await connection.fetch(
        f"SELECT o.owner FROM owners o WHERE {IS_LATE} ORDER BY o.owner FOR UPDATE SKIP LOCKED"
    )
    if not late:
        return None
    names = [row["owner"] for row in late]
    released = await moves.release(step, *[from_text(name) for name in names])
    await connection.execute("UPDATE owners SET reaped = true WHERE owner = ANY($1)", names)
    await connection.execute(
        "DELETE FROM owners WHERE reaped AND deadline < clock_timestamp() - make_interval(secs => $1)", _KEEP_S
    )
    step.wakes_all = True  # an owner may have died before it could tell of its changes
    return released
