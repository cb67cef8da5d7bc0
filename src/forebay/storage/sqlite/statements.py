"""Work for the writer: what is read and written in its thread, as functions of a connection.

The answers of calls (see `storage.calls`) are rows of the table `calls`: part 0 is the answer; beside that of a claim
lie the frames of the groups that it took for good, each under the uid of its group.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from forebay.storage.idempotency import Call, Handed, Kept, encode_kept
from forebay.storage.sqlite import schema
from forebay.storage.sqlite.journal import Journal

__all__ = [
    "emptied",
    "forgetting",
    "in_turn",
    "inserting",
    "reading",
    "remembered",
    "remembering",
    "restored",
    "retracting",
    "writing",
]

T = TypeVar("T")
Work: TypeAlias = Callable[[sqlite3.Connection], T]


def in_turn(*works: Work[Any] | None) -> Work[None] | None:
    """Several pieces of work as one; None if there is none."""
    given = [work for work in works if work is not None]
    if not given:
        return None

    def run(connection: sqlite3.Connection) -> None:
        for work in given:
            work(connection)

    return run


# --- groups -------------------------------------------------------------------------------------------


def writing(journal: Journal, accounts: Mapping[str, bytes], meta: Mapping[str, int | None]) -> Work[None]:
    """Make what changed in memory last."""

    def write(connection: sqlite3.Connection) -> None:
        removed = [(uid,) for uid, record in journal.records.items() if record is None]
        changed = [schema.values_of(record) for record in journal.records.values() if record is not None]
        if removed:
            connection.executemany("DELETE FROM group_rows WHERE uid = ?", removed)
            connection.executemany("DELETE FROM payloads WHERE uid = ?", removed)
        if changed:
            connection.executemany(schema.upsert_sql, changed)
        if journal.frames:
            connection.executemany(
                "INSERT OR REPLACE INTO payloads (uid, frame, summary) VALUES (?, ?, ?)",
                [(uid, frame, journal.summaries[uid]) for uid, frame in journal.frames.items()],
            )
        for number, data in journal.ends.items():
            if data is None:
                connection.execute("DELETE FROM ends WHERE number = ?", (number,))
            else:
                connection.execute("INSERT INTO ends (number, data) VALUES (?, ?)", (number, data))
        if accounts:
            connection.executemany("INSERT OR REPLACE INTO accounts VALUES (?, ?)", list(accounts.items()))
        if meta:
            connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", list(meta.items()))

    return write


def reading(uids: Sequence[int]) -> Work[dict[int, bytes]]:
    """The frames of groups, as far as they are there."""

    def read(connection: sqlite3.Connection) -> dict[int, bytes]:
        frames: dict[int, bytes] = {}
        for start in range(0, len(uids), 500):
            part = uids[start : start + 500]
            marks = ", ".join("?" * len(part))
            frames.update(connection.execute(f"SELECT uid, frame FROM payloads WHERE uid IN ({marks})", part))
        return frames

    return read


def inserting(part: Sequence[tuple[list[object], tuple[int, bytes, str]]]) -> Work[None]:
    """Add groups that are restored."""

    def insert(connection: sqlite3.Connection) -> None:
        connection.executemany(schema.upsert_sql, [values for values, _ in part])
        connection.executemany("INSERT INTO payloads (uid, frame, summary) VALUES (?, ?, ?)", [p for _, p in part])

    return insert


def restored(connection: sqlite3.Connection) -> None:
    """Say that a restore has come to its end."""
    connection.execute("DELETE FROM meta WHERE key = 'restoring'")


def emptied(connection: sqlite3.Connection) -> None:
    """Make the store as if it were new."""
    for table in ("group_rows", "payloads", "accounts"):
        connection.execute(f"DELETE FROM {table}")
    connection.execute("DELETE FROM meta WHERE key NOT IN ('store_id', 'notes_ends')")


# --- answers ------------------------------------------------------------------------------------------


def remembering(call: Call, kept: Kept) -> Work[None]:
    """Write the answer of a call, and drop those that its client has seen. Before payloads of taken groups go."""

    def remember(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM calls WHERE client = ? AND sequence <= ?", (call.client, call.confirmed))
        _drop(connection, call.client, call.sequence)
        connection.execute(
            "INSERT INTO calls (client, sequence, part, data) VALUES (?, ?, 0, ?)",
            (call.client, call.sequence, encode_kept(kept)),
        )
        if isinstance(kept, Handed):
            connection.executemany(
                "INSERT INTO calls (client, sequence, part, data) SELECT ?, ?, uid, frame FROM payloads WHERE uid = ?",
                [(call.client, call.sequence, record.uid) for record in kept.ended()],
            )

    return remember


def remembered(client: str, sequence: int) -> Work[dict[int, bytes]]:
    """What is stored of a call: under 0 its answer, under their uids the frames of what it took for good."""
    # Not decoded here: an answer that is damaged must not cost the transaction that others share.
    return lambda connection: dict(
        connection.execute("SELECT part, data FROM calls WHERE client = ? AND sequence = ?", (client, sequence))
    )


def retracting(client: str, sequence: int) -> Work[None]:
    """Drop the answer of a call that was undone."""
    return lambda connection: _drop(connection, client, sequence)


def forgetting(client: str) -> Work[None]:
    """Drop all answers of a client."""

    def forget(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM calls WHERE client = ?", (client,))

    return forget


def _drop(connection: sqlite3.Connection, client: str, sequence: int) -> None:
    connection.execute("DELETE FROM calls WHERE client = ? AND sequence = ?", (client, sequence))
