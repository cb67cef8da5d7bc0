"""Checks of a SQLite store and of the SQLite library, and the repair of a store after an accident.

Every check is a `Finding`; nothing is printed. Examining only reads. Repairing holds the process lock, changes nothing
that could still be read, and keeps the ledger closed: a group whose payload is lost ends as failed, as SQLiteStorage
ends it. Three faults are reported and left alone, because a guess could lose data that can still be saved: damage
that SQLite itself reports, an account that does not add up, and an intact payload that this installation cannot read.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from forebay.codec.frame import decode_group
from forebay.codec.records import decode_account, encode_account
from forebay.core.ledger import Account, End, Place, Record, open_ledger
from forebay.core.report import Finding, Level, Progress, Steps, first_of, size_text
from forebay.errors import DamagedData, InvalidConfig, InvalidInput, StorageError, UnreadableData
from forebay.storage.payloads import DAMAGED
from forebay.storage.sqlite import schema
from forebay.storage.sqlite.lock import ProcessLock, check_file_system, file_system_of, holder_of
from forebay.storage.sqlite.writer import Transaction

_LEAST_SQLITE = (3, 38, 0)  # the view `samples` uses ->>
_LARGE_WAL_BYTES = 64 * 2**20  # the store itself keeps it below this size
_RESUME = "resume the last checkpoint into a new store"


# --- the library and the file system ------------------------------------------------------------------


def has_wal_reset_fault(release: tuple[int, ...]) -> bool:
    """Whether a SQLite release can corrupt a WAL when two connections write or checkpoint at the same time.

    >>> [has_wal_reset_fault(r) for r in ((3, 6, 23), (3, 7, 0), (3, 40, 1), (3, 51, 2), (3, 51, 3), (3, 53, 0))]
    [False, True, True, True, False, False]
    >>> [has_wal_reset_fault(r) for r in ((3, 44, 5), (3, 44, 6), (3, 50, 6), (3, 50, 7))]  # fixed there, too
    [True, False, True, False]
    """
    if not (3, 7, 0) <= release < (3, 51, 3):
        return False
    return not any(release[:2] == fixed[:2] and release >= fixed for fixed in ((3, 44, 6), (3, 50, 7)))


def examine_library(version: str) -> Finding:
    """Whether SQLiteStorage can use this version of SQLite."""
    release = tuple(int(part) for part in version.split("."))
    if release < _LEAST_SQLITE:
        return Finding("sqlite", Level.ERROR, f"SQLite {version} is too old for SQLiteStorage", "use 3.38 or newer")
    if has_wal_reset_fault(release):
        return Finding(
            "sqlite",
            Level.WARNING,
            f"SQLite {version} has the WAL-reset fault (3.7.0 to 3.51.2: two connections that write or checkpoint at "
            "the same time can corrupt a database); Forebay lets one connection write and checkpoint, so its stores "
            "are safe as long as no other program writes to them",
            "open stores read-only with other programs, or use SQLite 3.51.3 or newer",
        )
    return Finding("sqlite", Level.OK, f"SQLite {version}, without the WAL-reset fault")


def examine_file_system(path: Path) -> Finding:
    """Whether a store may be at this path."""
    try:
        check_file_system(path)
    except InvalidConfig as error:
        return Finding("file system", Level.ERROR, str(error), "keep stores on a local disk, or use PostgreSQL")
    kind = file_system_of(path.parent)
    known = "the operating system does not tell its type" if kind is None else f"{kind}, no known network file system"
    return Finding("file system", Level.OK, known)


# --- a store ------------------------------------------------------------------------------------------


def examine_store(path: Path, progress: Progress | None = None) -> list[Finding]:
    """Check everything about a SQLite store, read-only; a process may write to it. Reads every payload once.

    InvalidInput or StorageError if there is no such file. `progress` counts payloads.
    """
    _check_path(path)
    holder = holder_of(path)
    lock = Finding("lock", Level.OK, "no process has it open for writing")
    if holder is not None:
        lock = Finding("lock", Level.OK, f"open for writing by {holder}", "close it there before --fix")
    findings = [examine_file_system(path), lock, _examine_wal(path)]
    try:
        with connected(path, "ro") as connection:
            # One transaction: every check sees the same moment while another process continues to write.
            connection.execute("BEGIN")
            schema.check(connection)
            findings.append(Finding("schema", Level.OK, f"schema version {schema.SCHEMA_VERSION}"))
            if problems := integrity_problems(connection):
                return [*findings, Finding("database", Level.ERROR, f"SQLite reports damage: {problems}", _RESUME)]
            findings.append(Finding("database", Level.OK, "SQLite reports no damage"))
            return findings + _Scan(connection, progress).findings(held=holder is not None)
    except DamagedData as error:
        return [*findings, Finding("schema", Level.ERROR, str(error))]
    except sqlite3.Error as error:
        return [*findings, Finding("database", Level.ERROR, f"SQLite cannot read it: {error}", _RESUME)]


def repair_store(path: Path, progress: Progress | None = None) -> list[str]:
    """Repair a store after an accident, in one transaction; returns what was done, as sentences.

    StorageInUse if a process has the store open. A file that is not an intact store of this version is not changed.
    """
    _check_path(path)
    check_file_system(path)
    try:
        with connected(path, "ro") as connection:  # before the lock leaves its file beside a foreign database
            schema.check(connection)
        lock = ProcessLock(path.with_name(path.name + ".lock"))
        try:
            with connected(path, "rw") as connection:
                if integrity_problems(connection):
                    return []
                connection.execute("BEGIN IMMEDIATE")
                done = list(_Scan(connection, progress).repair())
                connection.execute("COMMIT")
                return [*done, *_truncate_wal(connection, path)]
        finally:
            lock.release()
    except DamagedData:
        return []
    except sqlite3.Error as error:
        raise StorageError(f"{path} could not be repaired: {error}; it was not changed") from error


def _check_path(path: Path) -> None:
    if path.is_dir():
        raise InvalidInput(f"a SQLite store is a file; {path} is a directory")
    if not path.exists():
        raise StorageError(f"there is no store at {path}")


@contextmanager
def connected(path: Path, mode: Literal["ro", "rw"]) -> Iterator[sqlite3.Connection]:
    """A connection to an existing database, closed at the end."""
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode={mode}", uri=True, isolation_level=None)
    try:
        yield connection
    finally:
        connection.close()


def integrity_problems(connection: sqlite3.Connection) -> str:
    """The damage that SQLite finds in the structure of a database; empty if there is none.

    sqlite3.Error if the database cannot be read for another reason.
    """
    try:
        found = [str(problem) for (problem,) in connection.execute("PRAGMA integrity_check(5)")]
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise
        return str(error)
    return "" if found == ["ok"] else "; ".join(found)


def _wal_bytes(path: Path) -> int:
    resolved = path.resolve()
    with suppress(FileNotFoundError):
        return resolved.with_name(resolved.name + "-wal").stat().st_size
    return 0


def _examine_wal(path: Path) -> Finding:
    size = _wal_bytes(path)
    message = f"the write-ahead log has {size_text(size)}"
    if size > _LARGE_WAL_BYTES:
        message += ": a reader has been open for a long time, or a process died"
        return Finding("wal", Level.WARNING, message, "close long readers; --fix writes the log back")
    return Finding("wal", Level.OK, message)


def _truncate_wal(connection: sqlite3.Connection, path: Path) -> list[str]:
    before = _wal_bytes(path)
    if connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:  # busy
        return ["the write-ahead log could not be emptied: a reader has the store open"]
    return [] if before == _wal_bytes(path) else ["the write-ahead log was written back and emptied"]


class _Scan:
    """Everything in a store, compared: rows with payloads, accounts with rows. One payload in memory at a time."""

    def __init__(self, connection: sqlite3.Connection, progress: Progress | None) -> None:
        self._connection = connection
        self._restoring = bool(connection.execute("SELECT value FROM meta WHERE key = 'restoring'").fetchone())
        self._records: dict[int, Record] = {}
        self._bad_rows: dict[int, str] = {}
        self._accounts: dict[str, Account] = {}
        self._bad_accounts: list[str] = []
        self._orphans: list[int] = []
        self._damaged: dict[int, str] = {}
        self._unreadable: dict[int, str] = {}  # intact: written by a newer version, or a package is missing
        for values in connection.execute(f"SELECT {', '.join(schema.COLUMNS)} FROM group_rows"):
            uid = values[schema.COLUMNS.index("uid")]
            try:
                self._records[uid] = schema.record_of(values)
            except DamagedData as error:
                self._bad_rows[uid] = str(error)
        for task_name, data in connection.execute("SELECT task_name, data FROM accounts"):
            try:
                self._accounts[task_name] = decode_account(data)
            except (DamagedData, TypeError) as error:
                self._bad_accounts.append(f"the account of task {task_name!r} cannot be read: {error}")
        self._missing = self._read_payloads(progress)
        self._open = [] if self._restoring else list(self._open_ledgers())

    def _read_payloads(self, progress: Progress | None) -> list[int]:
        """Sort payloads by their condition; returns the uids of rows without one."""
        missing = set(self._records)
        steps = Steps(progress, self._connection.execute("SELECT count(*) FROM payloads").fetchone()[0])
        for uid, frame in self._connection.execute("SELECT uid, frame FROM payloads"):
            missing.discard(uid)
            if uid not in self._records and uid not in self._bad_rows:
                self._orphans.append(uid)
            elif not isinstance(frame, bytes):
                self._damaged[uid] = "it is not bytes"
            else:
                try:
                    decode_group(frame)
                except UnreadableData as error:
                    self._unreadable[uid] = str(error)
                except DamagedData as error:
                    self._damaged[uid] = str(error)
            steps.more()
        return sorted(missing)

    def _open_ledgers(self) -> Iterator[str]:
        places: Counter[tuple[str, Place]] = Counter()
        tokens: Counter[tuple[str, Place]] = Counter()
        for record in self._records.values():
            places[record.task_name, record.place] += 1
            tokens[record.task_name, record.place] += record.tokens
        for task_name in sorted({*self._accounts, *(task_name for task_name, _ in places)}):
            account = self._accounts.get(task_name)
            if account is None:
                yield f"task {task_name!r} has groups, but no account that can be read"
                continue
            groups, held = ({place: count[task_name, place] for place in Place} for count in (places, tokens))
            yield from open_ledger(account, groups, held, task_name)

    def findings(self, *, held: bool) -> list[Finding]:
        if self._restoring:
            message, advice = "a restore is in progress", "wait for it to finish"
            if not held:
                message = "a restore was interrupted: the store counts as empty"
                advice = "--fix empties it, as does opening it; then resume the checkpoint again"
            return [Finding("restore", Level.WARNING, message, advice)]
        fails = "--fix ends these groups as failed"
        delete = "--fix keeps them while a ledger is open" if self._open else "--fix deletes them"
        missing, orphans = ([f"uid {uid}" for uid in uids] for uids in (self._missing, self._orphans))
        damaged, unreadable = (
            [f"uid {uid}: {error}" for uid, error in errors.items()] for errors in (self._damaged, self._unreadable)
        )
        return [
            Finding("restore", Level.OK, "no restore was interrupted"),
            _listed("rows", f"{len(self._records):,} groups", list(self._bad_rows.values()), _RESUME),
            _listed("accounts", f"{len(self._accounts):,} tasks", self._bad_accounts, _RESUME),
            _listed("rows without payload", "none", missing, fails),
            _listed("damaged payloads", "none", damaged, fails),
            _listed("unreadable payloads", "none", unreadable, "not repaired: install the version or package it needs"),
            _listed("payloads without row", "none", orphans, delete, level=Level.WARNING),
            _listed("ledger", "closed for every task", self._open, f"not repaired: {_RESUME}"),
        ]

    def repair(self) -> Iterator[str]:
        """Write the repairs, inside the caller's transaction; yields what was done."""
        run = self._connection.execute
        if self._restoring:
            Transaction(self._connection).empty()
            yield "emptied the store, whose restore was interrupted: resume the checkpoint again"
            return
        for uid in (*self._missing, *self._damaged):
            record = self._records.get(uid)
            account = None if record is None else self._accounts.get(record.task_name)
            if record is None or account is None:
                continue
            name = f"group {record.group_id} of task {record.task_name!r}"
            if record.place is Place.ARCHIVED:  # it already ended as trained
                yield f"removed {name} from the archive of trained groups: {DAMAGED}"
            else:
                account.end(End.FAILED, record.tokens, DAMAGED)
                run("UPDATE accounts SET data = ? WHERE task_name = ?", (encode_account(account), record.task_name))
                yield f"ended {name} as failed: {DAMAGED}"
            run("DELETE FROM group_rows WHERE uid = ?", (uid,))
            run("DELETE FROM payloads WHERE uid = ?", (uid,))
        if self._orphans and not (self._open or self._bad_accounts):
            self._connection.executemany("DELETE FROM payloads WHERE uid = ?", [(uid,) for uid in self._orphans])
            yield f"deleted {len(self._orphans):,} payloads without a row"


def _listed(name: str, good: str, problems: list[str], advice: str, *, level: Level = Level.ERROR) -> Finding:
    """A finding about many problems: their number, and the first three."""
    if not problems:
        return Finding(name, Level.OK, good)
    return Finding(name, level, f"{len(problems):,}: {first_of(problems, 3)}", advice)
