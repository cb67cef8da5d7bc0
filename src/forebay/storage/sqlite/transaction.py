"""What is read and written in the writer's thread: a thin layer of SQL over its connection.

The answers of calls (see `storage.idempotency`) are rows of the table `calls`: part 0 is the answer; beside that of a
claim are the frames of the groups that it took for good, each under the uid of its group.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forebay.core.ledger import Record
from forebay.storage.idempotency import Call, Handed, Kept, encode_kept
from forebay.storage.sqlite import schema
from forebay.storage.sqlite.journal import Journal, Payload

__all__ = ["Transaction"]

_INSERT_PAYLOAD = "INSERT OR REPLACE INTO payloads (uid, frame, summary) VALUES (?, ?, ?)"
_INSERT_CALL = "INSERT INTO calls (client, sequence, part, data)"


class Transaction:
    """SQL over the connection of the writer."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.execute = connection.execute

    # --- groups ---------------------------------------------------------------------------------------

    def write(self, journal: Journal, accounts: Mapping[str, bytes], meta: Mapping[str, int | None]) -> None:
        """Write what changed in memory."""
        removed = [(uid,) for uid, record in journal.records.items() if record is None]
        changed = [record for record in journal.records.values() if record is not None]
        self._many("DELETE FROM group_rows WHERE uid = ?", removed)
        self._many("DELETE FROM payloads WHERE uid = ?", removed)
        self.insert(changed, journal.payloads)
        self._many("DELETE FROM ends WHERE number = ?", [(n,) for n, data in journal.ends.items() if data is None])
        ends = [(number, data) for number, data in journal.ends.items() if data is not None]
        self._many("INSERT INTO ends (number, data) VALUES (?, ?)", ends)
        self._many("INSERT OR REPLACE INTO accounts VALUES (?, ?)", accounts.items())
        self._many("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta.items())

    def insert(self, records: Iterable[Record], payloads: Mapping[int, Payload]) -> None:
        """Write rows and payloads."""
        self._many(schema.upsert_sql, [schema.values_of(record) for record in records])
        self._many(_INSERT_PAYLOAD, [(uid, frame, summary) for uid, (frame, summary) in payloads.items()])

    def _many(self, sql: str, values: Iterable[Any]) -> None:
        values = list(values)
        if values:
            self.connection.executemany(sql, values)

    def frames(self, uids: Sequence[int]) -> dict[int, bytes]:
        """The frames of groups, as far as they exist."""
        frames: dict[int, bytes] = {}
        for start in range(0, len(uids), 500):
            part = uids[start : start + 500]
            marks = ", ".join("?" * len(part))
            frames.update(self.execute(f"SELECT uid, frame FROM payloads WHERE uid IN ({marks})", part))
        return frames

    def records(self) -> list[Record]:
        """The records of all rows, in order of uid."""
        rows = self.execute(f"SELECT {', '.join(schema.COLUMNS)} FROM group_rows ORDER BY uid").fetchall()
        return [schema.record_of(row) for row in rows]

    # --- restoring ------------------------------------------------------------------------------------

    def begin_restore(self) -> None:
        """Note that rows are being restored: a store that is found like this is emptied."""
        self.execute("INSERT OR REPLACE INTO meta VALUES ('restoring', 1)")

    def end_restore(self) -> None:
        """Note that the restore is complete."""
        self.execute("DELETE FROM meta WHERE key = 'restoring'")

    def empty(self) -> None:
        """Make the store as if it were new."""
        for table in ("group_rows", "payloads", "accounts"):
            self.execute(f"DELETE FROM {table}")
        self.execute("DELETE FROM meta WHERE key NOT IN ('store_id', 'notes_ends')")

    # --- answers --------------------------------------------------------------------------------------

    def remember(self, call: Call, kept: Kept) -> None:
        """Write the answer of a call, and drop those that its client has seen. Before taken payloads are removed."""
        self.execute("DELETE FROM calls WHERE client = ? AND sequence <= ?", (call.client, call.confirmed))
        self.retract(call.client, call.sequence)
        self.execute(f"{_INSERT_CALL} VALUES (?, ?, 0, ?)", (call.client, call.sequence, encode_kept(kept)))
        if isinstance(kept, Handed):
            taken = [(call.client, call.sequence, record.uid) for record in kept.ended()]
            self._many(f"{_INSERT_CALL} SELECT ?, ?, uid, frame FROM payloads WHERE uid = ?", taken)

    def remembered(self, client: str, sequence: int) -> dict[int, bytes]:
        """What is stored of a call: under 0 its answer, under their uids the frames of groups that it took for good."""
        # Not decoded here: a damaged answer must not cost the transaction that others share.
        return dict(self.execute("SELECT part, data FROM calls WHERE client = ? AND sequence = ?", (client, sequence)))

    def retract(self, client: str, sequence: int) -> None:
        """Drop the answer of a call that was undone."""
        self.execute("DELETE FROM calls WHERE client = ? AND sequence = ?", (client, sequence))

    def forget(self, client: str) -> None:
        """Drop all answers of a client."""
        self.execute("DELETE FROM calls WHERE client = ?", (client,))
