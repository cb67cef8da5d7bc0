"""The tables of a SQLite store, and its stable views.

    group_rows   one row a group: every field of `ledger.Record`; tags as JSON
    payloads     one row a group: the samples as a codec frame, and a summary of them as JSON for people
    accounts     one row a task: `ledger.Account` as MessagePack
    meta         schema_version, store_id, next_uid, next_timestamp_id, saved_step, notes_ends, restoring
    ends         one row a group that ended and was not reported yet, if `meta.notes_ends`
    calls        the answers of calls that may be repeated (see `storage.idempotency`)

People and tools read the views `groups` and `samples`, whose columns stay: Datasette, DuckDB or the sqlite3 shell open
them as they are. Counting and choosing never read a payload.
"""

from __future__ import annotations

import sqlite3
import uuid
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from forebay.core.ledger import Place, Record
from forebay.core.rollout import Group, Status
from forebay.errors import DamagedData, InvalidConfig, StorageError, UnreadableData

SCHEMA_VERSION = 5
APPLICATION_ID = 0x46424159  # "FBAY"

COLUMNS = Record.__struct_fields__
_SCALARS = {int: "INTEGER", float: "REAL", str: "TEXT", Status: "TEXT", Place: "TEXT"}
_KINDS: dict[Any, str] = {
    **{kind: f"{sql} NOT NULL" for kind, sql in _SCALARS.items()},
    **{kind | None: sql for kind, sql in _SCALARS.items()},
}
_TYPES = {name: _KINDS.get(kind, "TEXT NOT NULL") for name, kind in get_type_hints(Record).items()}
_TYPES["uid"] = "INTEGER PRIMARY KEY"
_VIEW_COLUMNS = (
    "uid, timestamp_id, task_name, group_id, status, place, samples, tokens, bytes, num_tries, unjudged, deliveries, "
    "reward, priority, oldest_step, newest_step, created_at, moved_at, attempt, owner, train_step, tags"
)

_CALLS = """
CREATE TABLE IF NOT EXISTS calls (
  client TEXT NOT NULL, sequence INTEGER NOT NULL, part INTEGER NOT NULL, data BLOB NOT NULL,
  PRIMARY KEY (client, sequence, part));
"""

_DDL = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE accounts (task_name TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE group_rows ({", ".join(f"{name} {_TYPES[name]}" for name in COLUMNS)});
CREATE UNIQUE INDEX group_identity ON group_rows (task_name, group_id);
CREATE INDEX group_order ON group_rows (place, task_name, status, timestamp_id);
CREATE TABLE ends (number INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE payloads (uid INTEGER PRIMARY KEY, frame BLOB NOT NULL, summary TEXT NOT NULL);
CREATE VIEW groups AS SELECT {_VIEW_COLUMNS} FROM group_rows;
CREATE VIEW samples AS
  SELECT g.uid, g.task_name, g.group_id, g.place, s.key AS position,
         s.value ->> 'rollout_id' AS rollout_id, s.value ->> 'segment' AS segment, s.value ->> 'status' AS status,
         s.value ->> 'tokens' AS tokens, s.value ->> 'reward' AS reward,
         s.value ->> 'finish_reason' AS finish_reason, s.value ->> 'num_tries' AS num_tries,
         s.value ->> 'error' AS error, s.value ->> 'prompt' AS prompt, s.value ->> 'response' AS response
  FROM group_rows g JOIN payloads p ON p.uid = g.uid, json_each(p.summary) s;
"""


def connect(path: Path, synchronous: str) -> sqlite3.Connection:
    """The connection that writes to a store, which is created if it does not exist."""
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=64)
    except sqlite3.Error as error:
        raise StorageError(f"{path} cannot be opened: {error}") from error
    try:
        connection.execute("PRAGMA page_size = 16384")  # of a new store; payloads are large
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise InvalidConfig(f"{path}: this file system does not allow SQLite's write-ahead log ({mode})")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        connection.execute("PRAGMA wal_autocheckpoint = 4096")  # 64 MB; the writer checkpoints earlier by itself
        connection.execute("PRAGMA cache_size = -65536")  # a batch of payloads must not spill
        connection.execute("PRAGMA temp_store = MEMORY")
        create(connection)
        return connection
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.OperationalError):
            raise StorageError(f"{path} cannot be opened: {error}") from error
        if isinstance(error, sqlite3.DatabaseError):
            raise DamagedData(f"{path} is not a SQLite database that can be read: {error}") from error
        raise


def create(connection: sqlite3.Connection) -> None:
    """Make the tables in a new database, or check that an existing one is ours and not newer."""
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not tables and not application_id:
        # One transaction, pragmas included: a crash leaves an empty file, or a whole store.
        connection.executescript(
            f"BEGIN IMMEDIATE; {_DDL} {_CALLS} INSERT INTO meta VALUES ('store_id', '{uuid.uuid4().hex}'); "
            f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
        )
    else:
        check(connection)
        connection.execute(_CALLS)


def check(connection: sqlite3.Connection) -> None:
    """DamagedData unless the database is a store, UnreadableData unless it has this version."""
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application_id != APPLICATION_ID:
        raise DamagedData("this SQLite database was not made by Forebay; choose another path")
    if version != SCHEMA_VERSION:
        raise UnreadableData(
            f"this store has schema version {version}; this Forebay reads version {SCHEMA_VERSION}: use the Forebay "
            "that made it, or a newer one"
        )
    if connection.execute("SELECT value FROM meta WHERE key = 'store_id'").fetchone() is None:
        raise DamagedData("this store has lost its store_id; resume the last checkpoint into a new store")


upsert_sql = (
    f"INSERT INTO group_rows ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))}) "
    f"ON CONFLICT (uid) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in COLUMNS if name != 'uid')}"
)

_json = msgspec.json.Encoder()
_TAGS = COLUMNS.index("tags")
_SESSIONS = COLUMNS.index("session_ids")
_STATUS = COLUMNS.index("status")
_PLACE = COLUMNS.index("place")


def values_of(record: Record) -> list[Any]:
    """The column values of a record."""
    values = [getattr(record, name) for name in COLUMNS]
    values[_TAGS] = _json.encode(record.tags).decode() if record.tags else "{}"
    values[_SESSIONS] = _json.encode(record.session_ids).decode() if record.session_ids else "[]"
    values[_STATUS] = record.status.value
    values[_PLACE] = record.place.value
    return values


def record_of(values: tuple[Any, ...]) -> Record:
    """The record with these column values; DamagedData if they are not valid."""
    try:
        fields = dict(zip(COLUMNS, values, strict=True))
        fields["tags"] = msgspec.json.decode(fields["tags"]) if fields["tags"] != "{}" else {}
        fields["session_ids"] = msgspec.json.decode(fields["session_ids"]) if fields["session_ids"] != "[]" else ()
        return msgspec.convert(fields, Record)
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise DamagedData(f"the row of group uid {values[0]!r} cannot be read: {error}") from None


_PROMPT_CHARACTERS = 500
_RESPONSE_CHARACTERS = 2_000


def summary_of(group: Group) -> str:
    """The samples of a group as JSON for people: who, what status, how long, which reward, the text's beginning."""
    samples = []
    for state in group:
        message = state.message[-1] if state.message else {}
        content = message.get("content") if isinstance(message, dict) else None
        score = (state.reward or {}).get("score")
        samples.append(
            {
                "rollout_id": state.rollout_id,
                "segment": state.segment,
                "status": state.status.value,
                "tokens": 0 if state.response_ids is None else len(state.response_ids),
                "reward": score if isinstance(score, (int, float)) else None,
                "finish_reason": state.finish_reason,
                "num_tries": state.num_tries,
                "error": state.error_msg,
                "prompt": content[:_PROMPT_CHARACTERS] if isinstance(content, str) else None,
                "response": None if state.response is None else state.response[:_RESPONSE_CHARACTERS],
            }
        )
    return _json.encode(samples).decode()
