"""The changes of the counts that one transaction makes, and how they are written with it.

The rows and the counts change in one transaction, so any one statement that reads them sees a closed ledger (G1). A
transaction adds to the shard of its own connection: two puts wait for each other only if they share a shard.
The rows are written last, task by task in one order, so that no two transactions wait for each other in a circle.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from forebay.codec.records import encode_end
from forebay.core.ledger import MAX_REASONS, OTHER_REASONS, Account, End, GroupEnd, Place
from forebay.core.record import Record
from forebay.storage.postgres.rows import to_text
from forebay.storage.postgres.schema import SHARDS, TALLY_COLUMNS

__all__ = ["ADD_TALLY", "Tally", "tally_values"]


ADD_TALLY = f"""
INSERT INTO tallies AS t (task_name, shard, {", ".join(TALLY_COLUMNS)})
SELECT $1::text, pg_backend_pid() % {SHARDS}, {", ".join(f"($2::bigint[])[{i + 1}]" for i in range(len(TALLY_COLUMNS)))}
ON CONFLICT (task_name, shard) DO UPDATE SET {", ".join(f"{c} = t.{c} + excluded.{c}" for c in TALLY_COLUMNS)}
"""

_ADD_TALLY_IN_STEP = f"{ADD_TALLY} RETURNING pg_current_xact_id()::text, (SELECT notes_ends FROM store)"

_ADD_REASON = f"""
INSERT INTO reasons AS r (task_name, reason, shard, groups)
SELECT $1, CASE
    WHEN EXISTS (SELECT FROM reasons WHERE task_name = $1 AND reason = $2) THEN $2
    WHEN (SELECT count(DISTINCT reason) FROM reasons WHERE task_name = $1) < $4 THEN $2
    ELSE $5 END, pg_backend_pid() % {SHARDS}, $3
ON CONFLICT (task_name, reason, shard) DO UPDATE SET groups = r.groups + excluded.groups
"""


_ADD_SIZE = f"""
INSERT INTO sizes AS s (task_name, size, shard, groups) VALUES ($1, $2, pg_backend_pid() % {SHARDS}, $3)
ON CONFLICT (task_name, size, shard) DO UPDATE SET groups = s.groups + excluded.groups
"""


class Tally:
    """What one transaction changes. `buffered` is by how many groups the buffer grew."""

    def __init__(self) -> None:
        self._deltas: dict[str, dict[str, int]] = {}
        self._ends: dict[str, Account] = {}
        self._sizes: Counter[tuple[str, int]] = Counter()
        self._group_ends: list[GroupEnd] = []
        self.buffered = 0

    def add(self, task_name: str, column: str, n: int) -> None:
        deltas = self._deltas.setdefault(task_name, {})
        deltas[column] = deltas.get(column, 0) + n

    def enter(self, record: Record, sign: int = 1) -> None:
        """A row came to its place (or, with sign -1, left it)."""
        task_name, place = record.task_name, record.place
        if place is Place.ARCHIVED:
            self._deltas.setdefault(task_name, {})
            return
        if place is Place.BUFFERED:
            self.buffered += sign
            self.add(task_name, f"buffered_{record.status}", sign)
        else:
            self.add(task_name, str(place), sign)
        self.add(task_name, f"{place}_tokens", sign * record.tokens)
        self.add(task_name, "bytes", sign * record.bytes)
        self.add(task_name, "reserved", sign * record.reserve)

    def leave(self, record: Record) -> None:
        self.enter(record, -1)

    def end(self, task_name: str, end: End, tokens: int, reason: str | None, groups: int = 1) -> None:
        """Groups are booked out, under the rules of `Account.end`."""
        self._ends.setdefault(task_name, Account()).end(end, tokens, reason, groups=groups)

    def note_end(self, end: GroupEnd) -> None:
        """A group ended; written if the store notes that."""
        self._group_ends.append(end)

    def note_size(self, task_name: str, size: int) -> None:
        """A response of this rounded size is back; see `capacity`."""
        self._sizes[task_name, size] += 1

    def values(self, task_name: str) -> list[int]:
        """The changes of a task in the order of TALLY_COLUMNS."""
        deltas = dict(self._deltas.get(task_name, {}))
        ends = self._ends.get(task_name)
        if ends is not None:
            for end, groups in ends.ended.items():
                deltas[str(end)] = deltas.get(str(end), 0) + groups
                deltas[f"{end}_tokens"] = deltas.get(f"{end}_tokens", 0) + ends.ended_tokens[end]
        return [deltas.get(column, 0) for column in TALLY_COLUMNS]

    async def flush(self, connection: Any) -> str | None:
        """Write the changes, as the last step before the commit; the number of the transaction, if there were any."""
        xid: str | None = None
        notes_ends = False
        for task_name in sorted(self._deltas.keys() | self._ends.keys()):
            name = to_text(task_name)
            xid, notes_ends = await connection.fetchrow(_ADD_TALLY_IN_STEP, name, self.values(task_name))
            ends = self._ends.get(task_name)
            for reason, groups in sorted(ends.reasons.items()) if ends is not None else ():
                await connection.execute(_ADD_REASON, name, to_text(reason), groups, MAX_REASONS, OTHER_REASONS)
        for (task_name, size), groups in sorted(self._sizes.items()):
            await connection.execute(_ADD_SIZE, to_text(task_name), size, groups)
        if notes_ends and self._group_ends:
            await connection.executemany(
                "INSERT INTO ends (task_name, group_id, delivery, data) VALUES ($1, $2, $3, $4)",
                [(to_text(e.task_name), e.group_id, e.delivery, encode_end(e)) for e in self._group_ends],
            )
        return xid


def tally_values(account: Account, records: Any) -> list[int]:
    """The counters of a task that has these records, for a restore."""
    tally = Tally()
    task_name = ""
    tally.add(task_name, "issued", account.issued)
    tally.add(task_name, "issued_tokens", account.issued_tokens)
    tally.add(task_name, "reset_tokens", account.reset_tokens)
    for end, groups in account.ended.items():
        tally.add(task_name, str(end), groups)
    for end, tokens in account.ended_tokens.items():
        tally.add(task_name, f"{end}_tokens", tokens)
    for place, status, groups, tokens, size, reserved in records:
        if place == str(Place.ARCHIVED):
            continue
        tally.add(task_name, f"buffered_{status}" if place == str(Place.BUFFERED) else place, groups)
        tally.add(task_name, f"{place}_tokens", tokens)
        tally.add(task_name, "bytes", size)
        tally.add(task_name, "reserved", reserved)
    return tally.values(task_name)
