"""One transaction in progress: an operation notes what it changes, and `Step.write` writes all of it in one statement.

The operation locks rows, decides in Python by the rules that all storages share, and notes records that are stored or
removed, ends, counts and the answer of its call. The counts of a task are columns of the table `counters` and change in
the transaction that changes the rows, so any one statement that reads them sees a closed ledger (G1). They are written
to the shard of the connection, so that two puts wait for each other only if they share a shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from forebay.codec.records import encode_end
from forebay.core.capacity import Settings
from forebay.core.ledger import MAX_REASONS, OTHER_REASONS, Account, End, GroupEnd, Place, Record, group_end
from forebay.core.rollout import Status
from forebay.storage.idempotency import CALL, Call, Handed, Kept
from forebay.storage.postgres.columns import COLUMNS, RECORD, read_record, record_values, to_text
from forebay.storage.rules import archived_record

BUFFERED = {status: f"buffered_{status}" for status in Status}
"""The columns that count buffered groups."""

COUNTERS = (
    "issued",
    "issued_tokens",
    "reset_tokens",
    "completed",
    "failures",
    "in_flight",
    "leased",
    *BUFFERED.values(),
    "in_flight_tokens",
    "buffered_tokens",
    "leased_tokens",
    "bytes",
    "reserved",
    *(str(end) for end in End),
    *(f"{end}_tokens" for end in End),
)
"""The counters of a task. `bytes` and `reserved` are those of the groups in flight, buffered and leased."""


class Counters:
    """The changes of one transaction. `buffered`: by how many groups the buffer grew."""

    def __init__(self) -> None:
        self._changes: dict[str, Counter[str]] = {}
        self._ends: dict[str, Account] = {}
        self.sizes: Counter[tuple[str, int]] = Counter()  # responses that came back, by task and rounded size
        self.buffered = 0

    def add(self, task_name: str, column: str, n: int) -> None:
        """Add to one counter."""
        self._changes.setdefault(task_name, Counter())[column] += n

    def enter(self, record: Record, sign: int = 1) -> None:
        """Count a row at its place (sign -1: no longer). Archived groups are outside every count but their end."""
        task_name, place = record.task_name, record.place
        if place is Place.ARCHIVED:
            return
        if place is Place.BUFFERED:
            self.buffered += sign
        changes = self._changes.setdefault(task_name, Counter())
        changes[BUFFERED[record.status] if place is Place.BUFFERED else str(place)] += sign
        changes[f"{place}_tokens"] += sign * record.tokens
        changes["bytes"] += sign * record.bytes
        changes["reserved"] += sign * record.reserve

    def end(self, task_name: str, end: End, tokens: int, reason: str | None, groups: int = 1) -> None:
        """Book groups out, by the rules of `Account.end`."""
        self._ends.setdefault(task_name, Account()).end(end, tokens, reason, groups=groups)

    def restore(self, task_name: str, account: Account) -> None:
        """Add everything that an account has counted."""
        for column in ("issued", "issued_tokens", "reset_tokens", "completed", "failures"):
            self.add(task_name, column, getattr(account, column))
        self._ends[task_name] = account
        for size, groups in account.sizes.items():
            self.sizes[task_name, size] += groups

    def changes(self) -> dict[str, list[int]]:
        """The changes of each task in the order of COUNTERS; tasks in one order, so that no two writers deadlock."""
        changes: dict[str, list[int]] = {}
        for task_name in sorted(self._changes.keys() | self._ends.keys()):
            counted = Counter(self._changes.get(task_name, {}))
            ends = self._ends.get(task_name) or Account()
            for end, groups in ends.ended.items():
                counted[str(end)] += groups
                counted[f"{end}_tokens"] += ends.ended_tokens.get(end, 0)
            changes[task_name] = [counted[column] for column in COUNTERS]
        return changes

    def reasons(self) -> list[tuple[str, str, int]]:
        """Task, reason and groups of what ended, in order."""
        return [
            (task_name, reason, groups)
            for task_name, ends in sorted(self._ends.items())
            for reason, groups in sorted(ends.reasons.items())
        ]


NEW = 0
"""In a record that is stored: the server fills in the next uid or timestamp_id, or its time."""

NOW = "extract(epoch FROM clock_timestamp())::double precision"

_CLOCK = f"clock AS MATERIALIZED (SELECT {NOW} AS now)"
_FILLED = {
    "uid": "CASE u.uid WHEN 0 THEN nextval('uids') ELSE u.uid END",
    "timestamp_id": "CASE u.timestamp_id WHEN 0 THEN nextval('arrivals') ELSE u.timestamp_id END",
    "created_at": "CASE u.created_at WHEN 0 THEN (SELECT now FROM clock) ELSE u.created_at END",
    "moved_at": "CASE u.moved_at WHEN 0 THEN (SELECT now FROM clock) ELSE u.moved_at END",
}
_STORE = f"""
INSERT INTO groups ({", ".join(COLUMNS)})
SELECT {", ".join(_FILLED.get(column, f"u.{column}") for column in COLUMNS)} FROM unnest({{}}) u
ON CONFLICT (uid) DO UPDATE SET {", ".join(f"{column} = excluded.{column}" for column in COLUMNS[1:])}
RETURNING uid, timestamp_id, task_name, group_id, created_at, moved_at"""
_GUARD = """
SELECT 1 / (count(*) = {})::int AS ok FROM (
    SELECT g.uid FROM groups g JOIN unnest({}, {}, {}, {}) AS u (uid, attempt, revision, priority)
        ON g.uid = u.uid AND g.attempt = u.attempt AND g.revision = u.revision AND g.priority = u.priority
    WHERE g.place = 'in_flight' FOR UPDATE OF g) h"""
_TASK, _GROUP = COLUMNS.index("task_name"), COLUMNS.index("group_id")
_STORE_FRAMES = """
INSERT INTO payloads (uid, frame)
SELECT s.uid, f.frame FROM stored s JOIN unnest({}, {}, {}) AS f (task_name, group_id, frame)
    ON s.task_name = f.task_name AND s.group_id = f.group_id
ON CONFLICT (uid) DO UPDATE SET frame = excluded.frame"""
_ANSWER = """
INSERT INTO calls (client, sequence, part, data) SELECT {0}, {1}, 0, {2}
UNION ALL SELECT {0}, {1}, uid, frame FROM payloads WHERE uid = ANY({3})"""
_NOTE_ENDS = """
INSERT INTO ends (task_name, group_id, delivery, data)
SELECT * FROM unnest({}, {}, {}, {}) WHERE (SELECT notes_ends FROM store)"""

_SHARD = "pg_backend_pid() % 16"
_COUNT = f"""
INSERT INTO counters AS c (task_name, shard, {", ".join(COUNTERS)})
SELECT task_name, {_SHARD}, {", ".join(COUNTERS)} FROM unnest({{}}) u
ON CONFLICT (task_name, shard) DO UPDATE SET {", ".join(f"{n} = c.{n} + excluded.{n}" for n in COUNTERS)}"""
_ADD_SIZES = f"""
INSERT INTO sizes AS s (task_name, size, shard, groups)
SELECT u.task_name, u.size, {_SHARD}, u.groups FROM unnest({{}}, {{}}, {{}}) AS u (task_name, size, groups)
ON CONFLICT (task_name, size, shard) DO UPDATE SET groups = s.groups + excluded.groups"""
_ADD_REASON = f"""
INSERT INTO reasons AS r (task_name, reason, shard, groups)
SELECT $1, CASE
    WHEN EXISTS (SELECT FROM reasons WHERE task_name = $1 AND reason = $2) THEN $2
    WHEN (SELECT count(DISTINCT reason) FROM reasons WHERE task_name = $1) < {MAX_REASONS} THEN $2
    ELSE '{OTHER_REASONS}' END, {_SHARD}, $3
ON CONFLICT (task_name, reason, shard) DO UPDATE SET groups = r.groups + excluded.groups"""


class Step:
    """One transaction in progress."""

    def __init__(self, connection: Any, settings: Settings) -> None:
        self.connection = connection
        self.settings = settings
        self.counters = Counters()
        self.tasks: set[str] = set()
        """Tasks whose waiters are woken after the commit."""
        self.wakes_all = False
        self.xid: str | None = None
        """The number of the transaction, once it has written something."""
        self._stored: dict[tuple[str, int], tuple[Record, Status | None, bytes | None]] = {}
        self._removed: list[int] = []
        self._dropped_payloads: list[int] = []
        self._ends: list[GroupEnd] = []
        self._more: list[tuple[str, tuple[tuple[Any, str], ...]]] = []
        self._guard: list[tuple[Any, str]] = []
        self._answer: tuple[Call, Kept] | None = None

    async def lock(self, condition: str, *values: Any) -> list[Record]:
        """The records of rows (called g) that meet a condition, locked; in order of uid, so that no two deadlock."""
        rows = await self.connection.fetch(
            f"SELECT {RECORD} FROM groups g WHERE {condition} ORDER BY g.uid FOR UPDATE", *values
        )
        return [read_record(row) for row in rows]

    # --- noting -------------------------------------------------------------------------------------

    def wake(self, task_name: str) -> None:
        """Wake the waiters of a task after the commit."""
        self.tasks.add(task_name)

    def store(self, before: Record | None, after: Record, frame: bytes | None = None) -> None:
        """Store a record, in place of `before` if it has a row. Without a frame the payload stays."""
        if before is not None:
            self.counters.enter(before, -1)
        self.counters.enter(after)
        identity = (after.task_name, after.group_id)
        if frame is None and identity in self._stored:
            frame = self._stored[identity][2]
        trained_as = before.status if before is not None and after.place is Place.ARCHIVED else None
        self._stored[identity] = (after, trained_as, frame)

    def end(self, record: Record, end: End, reason: str | None, *, before: Record | None = None) -> None:
        """Book a group out, and remove its row. `before`: the row, if it changed when it ended."""
        self.book_out(record, end, reason)
        self.counters.enter(before or record, -1)
        self.remove(record)

    def archive(self, record: Record) -> None:
        """Book a group out as trained, and keep its row."""
        self.book_out(record, End.TRAINED, None)
        self.store(record, archived_record(record, NEW))

    def book_out(self, record: Record, end: End, reason: str | None) -> None:
        """Count a group as ended, and note its end if the store keeps ends."""
        self.counters.end(record.task_name, end, record.tokens, reason)
        self._ends.append(group_end(record, end, reason))
        self.wake(record.task_name)

    def remove(self, record: Record) -> None:
        """Remove a row and its payload."""
        self._stored.pop((record.task_name, record.group_id), None)
        self._removed.append(record.uid)

    def drop_payload(self, record: Record) -> None:
        """Remove a payload that is replaced by COPY afterwards."""
        self._dropped_payloads.append(record.uid)

    def also(self, sql: str, *values: tuple[Any, str]) -> None:
        """Do one more change in the same statement; see `_Statement.add`."""
        self._more.append((sql, values))

    def guard(self, records: Sequence[Record]) -> None:
        """Let the statement fail (DivisionByZeroError) unless these rows in flight are as they were when drawn."""
        rows = [(record.uid, record.attempt, record.revision, record.priority) for record in records]
        self._guard = [(len(rows), "bigint"), *_arrays(rows, "bigint", "bigint", "bigint", "double precision")]

    def answer(self, kept: Kept) -> None:
        """Remember what the operation returns, if it belongs to a call that may be repeated."""
        call = CALL.get()
        if call is not None:
            self._answer = (call, kept)

    # --- writing ------------------------------------------------------------------------------------

    async def write(self, *, counted: bool = True) -> dict[tuple[str, int], Record]:
        """Write what was noted; the stored records by identity, with what the server filled in.

        Counts are locked from then on until the commit; without `counted` they are left for the next write.
        """
        statement = _Statement()
        stored, self._stored = self._stored, {}
        rows = [record_values(record, trained_as) for record, trained_as, _ in stored.values()]
        if self._guard:
            statement.add("held", _GUARD, *self._guard)
            self._guard = []
        if stored:
            statement.add("stored", _STORE, (rows, "groups[]"))
            self._add_frames(statement, [(*identity, frame) for identity, (_, _, frame) in stored.items()])
        self._add_answer(statement)
        self._add_removed(statement)
        for number, (sql, values) in enumerate(self._more):
            statement.add(f"more{number}", sql, *values)
        self._more = []
        counters = self.counters
        if counted:
            self._add_counts(statement)
            self.counters = Counters()
            self.counters.buffered = counters.buffered
        if not statement.parts:
            return {}
        found = await self.connection.fetch(statement.sql(), *statement.values)
        self.xid = found[0]["xid"]
        if counted and (reasons := counters.reasons()):
            await self.connection.executemany(
                _ADD_REASON, [(to_text(task_name), to_text(reason), n) for task_name, reason, n in reasons]
            )
        filled = {(row["task_name"], row["group_id"]): row for row in found} if stored else {}
        written = {}
        for values, (identity, (record, _, _)) in zip(rows, stored.items(), strict=True):
            row = filled[values[_TASK], values[_GROUP]]
            written[identity] = replace(record, **{column: row[column] for column in _FILLED})
        return written

    def _add_frames(self, statement: _Statement, rows: list[tuple[str, int, bytes | None]]) -> None:
        given = [(to_text(task_name), group_id, frame) for task_name, group_id, frame in rows if frame is not None]
        if given:
            statement.add("frames", _STORE_FRAMES, *_arrays(given, "text", "bigint", "bytea"))

    def _add_answer(self, statement: _Statement) -> None:
        if self._answer is None:
            return
        (call, kept), self._answer = self._answer, None
        # It copies payloads that this statement removes.
        ended = [record.uid for record in kept.ended()] if isinstance(kept, Handed) else []
        client, data = to_text(call.client), msgspec.msgpack.encode(kept)
        statement.add(
            "seen",
            "DELETE FROM calls WHERE client = {} AND sequence <= {}",
            (client, "text"),
            (call.confirmed, "bigint"),
        )
        statement.add(
            "answered", _ANSWER, (client, "text"), (call.sequence, "bigint"), (data, "bytea"), (ended, "bigint[]")
        )

    def _add_removed(self, statement: _Statement) -> None:
        removed, dropped = self._removed, [*self._removed, *self._dropped_payloads]
        self._removed, self._dropped_payloads = [], []
        for table, uids in (("groups", removed), ("payloads", dropped)):
            if uids:
                statement.add(f"no_{table}", f"DELETE FROM {table} WHERE uid = ANY({{}})", (uids, "bigint[]"))

    def _add_counts(self, statement: _Statement) -> None:
        changes = [(to_text(task_name), 0, *counts) for task_name, counts in self.counters.changes().items()]
        sizes = [(to_text(task_name), size, n) for (task_name, size), n in sorted(self.counters.sizes.items())]
        ends = [(to_text(end.task_name), end.group_id, end.delivery, encode_end(end)) for end in self._ends]
        self._ends = []
        if changes:
            statement.add("counted", _COUNT, (changes, "counters[]"))
        if sizes:
            statement.add("sized", _ADD_SIZES, *_arrays(sizes, "text", "bigint", "bigint"))
        if ends:
            statement.add("ended", _NOTE_ENDS, *_arrays(ends, "text", "bigint", "bigint", "bytea"))


def _arrays(rows: list[tuple[Any, ...]], *types: str) -> list[tuple[list[Any], str]]:
    """Rows as one array for each column, with its type."""
    return [(list(column), f"{kind}[]") for column, kind in zip(zip(*rows, strict=True), types, strict=True)]


class _Statement:
    """One statement made of parts that each change a table."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self.values: list[Any] = []

    def add(self, name: str, sql: str, *values: tuple[Any, str]) -> None:
        """Add a part, and pass a value of the given type for each {} in it."""
        names = []
        for value, kind in values:
            self.values.append(value)
            names.append(f"${len(self.values)}::{kind}")
        self.parts[name] = sql.format(*names)

    def sql(self) -> str:
        """The statement; it returns the stored rows, and the number of the transaction."""
        parts = ", ".join(f"{name} AS ({sql})" for name, sql in self.parts.items())
        stored = ", stored.* FROM stored" if "stored" in self.parts else ""
        stored += ", held" if "held" in self.parts else ""
        return f"WITH {_CLOCK}, {parts} SELECT pg_current_xact_id()::text AS xid{stored}"
