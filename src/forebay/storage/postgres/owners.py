"""Who has a buffer open, with which settings, and until when: the table `owners`.

Deadlines are judged by the server's clock alone. An owner that is late loses what it holds when somebody reaps; it may
beat again afterwards and go on, but what it held is no longer its own.
"""

from __future__ import annotations

from typing import Any

import msgspec

from forebay.errors import InvalidConfig
from forebay.storage.base import Settings
from forebay.storage.postgres import leaving
from forebay.storage.postgres.connections import Step
from forebay.storage.postgres.rows import from_text, to_text
from forebay.storage.postgres.schema import advisory_key, replace_order_index, settings_text

__all__ = ["Deadline", "bury", "leave", "look", "register"]

_KEEP_S = 86_400.0
"""How long an owner that stopped beating is remembered."""

_LOOK = """
SELECT owner, reaped, extract(epoch FROM deadline - clock_timestamp())::double precision AS left_s,
    EXISTS (SELECT FROM groups g WHERE g.owner = o.owner) AS holds
FROM owners o WHERE deadline IS NOT NULL"""

_REGISTER = """
INSERT INTO owners (owner, lease_s, deadline) VALUES ($1, $2, clock_timestamp() + make_interval(secs => $2))
ON CONFLICT (owner) DO UPDATE SET lease_s = excluded.lease_s, deadline = excluded.deadline, reaped = false"""


class Deadline(msgspec.Struct, frozen=True):
    """How long an owner has left. `name` is as it is stored."""

    name: str
    left_s: float
    is_due: bool


async def register(step: Step, name: str, owner: str, settings: Settings, lease_s: float | None) -> None:
    """Open a buffer for an owner. All who have it open agree on the settings; the first one brings them."""
    connection, wanted = step.connection, settings_text(settings)
    await connection.execute("SELECT pg_advisory_xact_lock($1)", advisory_key(name, "settings"))
    stored = await connection.fetchval("SELECT settings FROM store")
    if stored != wanted:
        if await connection.fetchval(
            "SELECT EXISTS (SELECT FROM owners WHERE deadline IS NULL OR deadline > clock_timestamp())"
        ):
            raise InvalidConfig(
                f"the buffer {name!r} is open with {stored}, and was to be opened with {wanted}; all buffers on one "
                "storage need the same policy and limits"
            )
        await replace_order_index(connection, settings.order)
        await connection.execute("UPDATE store SET settings = $1", wanted)
    await connection.execute(_REGISTER, to_text(owner), lease_s)


async def leave(step: Step, owner: str) -> None:
    """Release what an owner holds, and forget it."""
    await leaving.release(step, owner)
    await step.connection.execute("DELETE FROM owners WHERE owner = $1", to_text(owner))


async def look(connection: Any) -> list[Deadline]:
    """The owners that have a deadline. Due are those that were not reaped yet, or hold something again."""
    return [
        Deadline(row["owner"], row["left_s"], row["left_s"] <= 0 and (row["holds"] or not row["reaped"]))
        for row in await connection.fetch(_LOOK)
    ]


async def bury(step: Step, name: str) -> dict[str, int] | None:
    """Release what a late owner holds; None if it beat after all, or somebody else is at it."""
    connection = step.connection
    late = await connection.fetchval(
        "SELECT true FROM owners WHERE owner = $1 AND deadline <= clock_timestamp() FOR UPDATE SKIP LOCKED", name
    )
    if not late:
        return None
    released = await leaving.release(step, from_text(name))
    await connection.execute("UPDATE owners SET reaped = true WHERE owner = $1", name)
    await connection.execute(
        "DELETE FROM owners WHERE reaped AND deadline < clock_timestamp() - make_interval(secs => $1)", _KEEP_S
    )
    return released
