"""Is this installation, is this SQLite store in order; and the repair of what an accident left behind.

Every check is a `Finding`: ok, a warning or an error, one sentence, and what to do. Nothing is printed, and only
`repair` writes. It holds the process lock while it does, changes nothing that could be read again, and keeps
the ledger closed: a group whose payload is gone ends as failed, as SQLiteStorage would end it when it met it. What
SQLite itself calls damaged, an account that does not add up, and a payload that is intact but that this
installation cannot read are reported and left alone: to guess there would lose what could still be saved.
"""

from __future__ import annotations

import enum
import platform
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec

from forebay.codec.frame import decode_account, decode_group, encode_account
from forebay.core.ledger import Account, End, Place, open_ledger
from forebay.core.record import Record
from forebay.errors import DamagedData, InvalidConfig, InvalidInput, StorageError, UnreadableData
from forebay.storage.sqlite import schema
from forebay.storage.sqlite.lock import ProcessLock, check_file_system, file_system_of, holder_of

__all__ = ["Finding", "Level", "examine_installation", "examine_store", "has_wal_reset_fault", "repair_store"]

Progress = Callable[[int, int], None]

PAYLOAD_DAMAGED = "its payload was damaged on disk"
_EXTRAS = ("pandas", "asyncpg", "httpx", "torch", "ray")
_LEAST_SQLITE = (3, 38, 0)  # the view `samples` uses ->>
_LARGE_WAL_BYTES = 64 * 2**20  # what the store itself cuts it back to
_TABLES = {"meta", "accounts", "group_rows", "payloads"}
_RESUME = "resume the last checkpoint into a new store"


class Level(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True):
    """What a check found, and what to do about it."""

    name: str
    level: Level
    message: str
    advice: str | None = None


# --- the installation ---------------------------------------------------------------------------------


def examine_installation(directory: Path) -> list[Finding]:
    """Python, SQLite, packages, and the file system of a directory. Imports nothing that is heavy."""
    # An older Python does not come as far as this.
    python = Finding("python", Level.OK, f"Python {platform.python_version()} (3.11 or newer is needed)")
    return [python, _sqlite(sqlite3.sqlite_version), *_packages(), _extras(), _directory(directory)]


def has_wal_reset_fault(release: tuple[int, ...]) -> bool:
    """Whether a SQLite release can corrupt a WAL when two connections write or checkpoint at the same time.

    >>> [has_wal_reset_fault(r) for r in ((3, 6, 23), (3, 7, 0), (3, 40, 1), (3, 51, 2), (3, 51, 3), (3, 53, 0))]
    [False, True, True, True, False, False]
    >>> [has_wal_reset_fault(r) for r in ((3, 44, 5), (3, 44, 6), (3, 50, 6), (3, 50, 7))]  # mended there, too
    [True, False, True, False]
    """
    if not (3, 7, 0) <= release < (3, 51, 3):
        return False
    return not any(release[:2] == fixed[:2] and release >= fixed for fixed in ((3, 44, 6), (3, 50, 7)))


def _sqlite(text: str) -> Finding:
    release = tuple(int(part) for part in text.split("."))
    if release < _LEAST_SQLITE:
        return Finding("sqlite", Level.ERROR, f"SQLite {text} is too old for SQLiteStorage", "use 3.38 or newer")
    if has_wal_reset_fault(release):
        return Finding(
            "sqlite",
            Level.WARNING,
            f"SQLite {text} has the WAL-reset fault (3.7.0 to 3.51.2: two connections that write or checkpoint at once "
            "can corrupt a database); Forebay lets one connection write and checkpoint, so its stores are safe as long "
            "as nobody else writes to them",
            "open stores read-only with other programs, or use SQLite 3.51.3 or newer",
        )
    return Finding("sqlite", Level.OK, f"SQLite {text}, without the WAL-reset fault")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _packages() -> Iterator[Finding]:
    for package in ("forebay", "msgspec", "numpy", "click"):
        found = _version(package)
        level = Level.WARNING if found is None else Level.OK
        yield Finding(package, level, f"{package} {found or 'does not say its version'}")


def _extras() -> Finding:
    found = {package: _version(package) for package in _EXTRAS}
    there = ", ".join(f"{package} {release}" for package, release in found.items() if release is not None)
    missing = ", ".join(package for package, release in found.items() if release is None)
    advice = f"install what you use of: {missing}" if missing else None
    return Finding("extras", Level.OK, f"installed: {there or 'none'}; not installed: {missing or 'none'}", advice)


def _directory(directory: Path) -> Finding:
    finding = _file_system(directory / "store.db")
    if finding.level is Level.OK:
        return finding
    return Finding(finding.name, Level.WARNING, "this directory is on a network file system", finding.advice)


def _file_system(path: Path) -> Finding:
    try:
        check_file_system(path)
    except InvalidConfig as error:
        return Finding("file system", Level.ERROR, str(error), "keep stores on a local disk, or use PostgreSQL")
    kind = file_system_of(path.parent)
    known = "this system does not tell its type" if kind is None else f"{kind}, not a network file system we know"
    return Finding("file system", Level.OK, known)


# --- a store ------------------------------------------------------------------------------------------


def examine_store(path: Path, progress: Progress | None = None) -> list[Finding]:
    """Everything about a SQLite store, read-only; also while a process writes to it. Reads every payload once.

    InvalidInput or StorageError if there is no such file. `progress` gets the payloads done, and how many there are.
    """
    _check_path(path)
    holder = holder_of(path)
    findings = [_file_system(path), _lock(holder), _wal(path)]
    try:
        with _connected(path, "ro") as connection:
            # One moment for everything: a process that writes goes on meanwhile.
            connection.execute("BEGIN")
            findings.append(_schema(connection))
            if findings[-1].level is not Level.ERROR:
                findings.append(_integrity(connection))
            if findings[-1].level is not Level.ERROR:
                findings += _Scan(connection, progress).findings(held=holder is not None)
    except sqlite3.Error as error:
        findings.append(Finding("database", Level.ERROR, f"SQLite cannot read it: {error}", _RESUME))
    return findings


def repair_store(path: Path, progress: Progress | None = None) -> list[str]:
    """Mend what an accident left behind, in one transaction, and say what was done.

    StorageInUse if a process has the store open. Does nothing to a file that is not a sound store of this version.
    """
    _check_path(path)
    check_file_system(path)
    try:
        with _connected(path, "ro") as connection:
            if _schema(connection).level is Level.ERROR:
                return []
        lock = ProcessLock(path.with_name(path.name + ".lock"))
        try:
            with _connected(path, "rw") as connection:
                if _integrity(connection).level is Level.ERROR:
                    return []
                connection.execute("BEGIN IMMEDIATE")
                done = list(_Scan(connection, progress).repair())
                connection.execute("COMMIT")
                return [*done, *_truncate(connection, path)]
        finally:
            lock.release()
    except sqlite3.Error as error:
        raise StorageError(f"{path} could not be repaired: {error}; it is as it was") from error


def _check_path(path: Path) -> None:
    if path.is_dir():
        raise InvalidInput(f"a SQLite store is a file; {path} is a directory")
    if not path.exists():
        raise StorageError(f"there is no store at {path}")


@contextmanager
def _connected(path: Path, mode: Literal["ro", "rw"]) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode={mode}", uri=True, isolation_level=None)
    try:
        yield connection
    finally:
        connection.close()


def _lock(holder: str | None) -> Finding:
    if holder is None:
        return Finding("lock", Level.OK, "no process has it open for writing")
    return Finding("lock", Level.OK, f"open for writing by {holder}", "close it there before --fix")


def _wal(path: Path) -> Finding:
    size = 0
    with suppress(FileNotFoundError):
        resolved = path.resolve()
        size = resolved.with_name(resolved.name + "-wal").stat().st_size
    if size > _LARGE_WAL_BYTES:
        message = f"the write-ahead log has {size:,} bytes: a reader has been open for long, or a process died"
        return Finding("wal", Level.WARNING, message, "close long readers; --fix writes it back")
    return Finding("wal", Level.OK, f"the write-ahead log has {size:,} bytes")


def _schema(connection: sqlite3.Connection) -> Finding:
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if application_id != schema.APPLICATION_ID:
        return Finding("schema", Level.ERROR, "this database was not made by Forebay", "check the path")
    if found != schema.SCHEMA_VERSION:
        message = f"schema version {found}; this Forebay knows version {schema.SCHEMA_VERSION}"
        return Finding("schema", Level.ERROR, message, "use a newer Forebay")
    missing = sorted(_TABLES - tables)
    if missing or not connection.execute("SELECT count(*) FROM meta WHERE key = 'store_id'").fetchone()[0]:
        message = f"it is incomplete ({', '.join(missing) or 'its identity'} missing): its making was interrupted"
        return Finding("schema", Level.ERROR, message, "if it was new, remove the file; else " + _RESUME)
    return Finding("schema", Level.OK, f"schema version {found}")


def _integrity(connection: sqlite3.Connection) -> Finding:
    try:
        problems = [text for (text,) in connection.execute("PRAGMA integrity_check(5)")]
    except sqlite3.DatabaseError as error:
        problems = [str(error)]
    if problems == ["ok"]:
        return Finding("database", Level.OK, "SQLite finds its structure whole")
    return Finding("database", Level.ERROR, f"SQLite finds it damaged: {'; '.join(problems)}", _RESUME)


def _truncate(connection: sqlite3.Connection, path: Path) -> list[str]:
    before = _wal(path).message
    if connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:  # busy
        return ["the write-ahead log could not be emptied: a reader has the store open"]
    return [] if before == _wal(path).message else ["the write-ahead log was written back and emptied"]


class _Scan:
    """What a store holds, compared: rows with payloads, accounts with rows. One payload in memory at a time."""

    def __init__(self, connection: sqlite3.Connection, progress: Progress | None) -> None:
        self._connection = connection
        self._restoring = bool(connection.execute("SELECT value FROM meta WHERE key = 'restoring'").fetchone())
        self._records: dict[int, Record] = {}
        self._bad_rows: dict[int, str] = {}
        self._accounts: dict[str, Account] = {}
        self._bad_accounts: list[str] = []
        self._orphans: list[int] = []
        self._damaged: dict[int, str] = {}
        self._foreign: dict[int, str] = {}  # intact, but not readable with what is installed here
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
        """Sort payloads into what they are; the uids of rows that have none."""
        missing = set(self._records)
        (total,) = self._connection.execute("SELECT count(*) FROM payloads").fetchone()
        for done, (uid, frame) in enumerate(self._connection.execute("SELECT uid, frame FROM payloads"), 1):
            missing.discard(uid)
            if uid not in self._records and uid not in self._bad_rows:
                self._orphans.append(uid)
            elif not isinstance(frame, bytes):
                self._damaged[uid] = "it is not bytes"
            else:
                try:
                    decode_group(frame)
                except DamagedData as error:
                    (self._foreign if _is_intact(frame) else self._damaged)[uid] = str(error)
            if progress is not None and (done % 64 == 0 or done == total):
                progress(done, total)
        return sorted(missing)

    def _open_ledgers(self) -> Iterator[str]:
        places = Counter((record.task_name, record.place) for record in self._records.values())
        tokens: Counter[tuple[str, Place]] = Counter()
        for record in self._records.values():
            tokens[record.task_name, record.place] += record.tokens
        for task_name in sorted({*self._accounts, *(task_name for task_name, _ in places)}):
            account = self._accounts.get(task_name)
            if account is None:
                yield f"task {task_name!r} has groups, but no account that can be read"
                continue
            yield from open_ledger(
                account,
                {place: places[task_name, place] for place in Place},
                {place: tokens[task_name, place] for place in Place},
                task_name,
            )

    def findings(self, *, held: bool) -> list[Finding]:
        if self._restoring:
            message = "a restore is under way" if held else "a restore was interrupted: the store counts as empty"
            advice = "wait for it" if held else "--fix empties it, as does opening it; then resume the checkpoint again"
            return [Finding("restore", Level.WARNING, message, advice)]
        fails = "--fix ends these groups as failed"
        delete = "--fix keeps them while a ledger is open" if self._open else "--fix deletes them"
        missing, orphans = ([f"uid {uid}" for uid in uids] for uids in (self._missing, self._orphans))
        return [
            Finding("restore", Level.OK, "no restore was interrupted"),
            _listed("rows", f"{len(self._records):,} groups", list(self._bad_rows.values()), _RESUME),
            _listed("accounts", f"{len(self._accounts):,} tasks", self._bad_accounts, _RESUME),
            _listed("rows without payload", "none", missing, fails),
            _listed("damaged payloads", "none", _reasons(self._damaged), fails),
            _listed("unreadable payloads", "none", _reasons(self._foreign), "not repaired: see what it needs"),
            _listed("payloads without row", "none", orphans, delete, level=Level.WARNING),
            _listed("ledger", "issued is held or ended, for every task", self._open, f"not repaired: {_RESUME}"),
        ]

    def repair(self) -> Iterator[str]:
        """Write what mends it, inside the caller's transaction; yields what was done."""
        run = self._connection.execute
        if self._restoring:
            for table in ("group_rows", "payloads", "accounts"):
                run(f"DELETE FROM {table}")
            run("DELETE FROM meta WHERE key <> 'store_id'")
            yield "emptied the store, whose restore was interrupted: resume the checkpoint again"
            return
        for uid in (*self._missing, *self._damaged):
            record = self._records.get(uid)
            account = None if record is None else self._accounts.get(record.task_name)
            if record is None or account is None:
                continue
            name = f"group {record.group_id} of task {record.task_name!r}"
            if record.place is Place.ARCHIVED:  # it has ended as trained already
                yield f"removed {name} from the archive of what was trained: {PAYLOAD_DAMAGED}"
            else:
                account.end(End.FAILED, record.tokens, PAYLOAD_DAMAGED)
                run("UPDATE accounts SET data = ? WHERE task_name = ?", (encode_account(account), record.task_name))
                yield f"ended {name} as failed: {PAYLOAD_DAMAGED}"
            run("DELETE FROM group_rows WHERE uid = ?", (uid,))
            run("DELETE FROM payloads WHERE uid = ?", (uid,))
        if self._orphans and not (self._open or self._bad_accounts):
            self._connection.executemany("DELETE FROM payloads WHERE uid = ?", [(uid,) for uid in self._orphans])
            yield f"deleted {len(self._orphans):,} payloads without a row"


def _is_intact(frame: bytes) -> bool:
    """Whether a frame that cannot be read is nevertheless what was written: newer, or in need of a package."""
    try:
        decode_group(frame)
    except UnreadableData:
        return True
    except DamagedData:
        return False
    return True


def _reasons(errors: dict[int, str]) -> list[str]:
    return [f"uid {uid}: {error}" for uid, error in errors.items()]


def _listed(name: str, good: str, problems: list[str], advice: str, *, level: Level = Level.ERROR) -> Finding:
    """A finding of many problems: how many, and the first ones."""
    if not problems:
        return Finding(name, Level.OK, good)
    more = ", ..." if len(problems) > 3 else ""
    return Finding(name, level, f"{len(problems):,}: {', '.join(problems[:3])}{more}", advice)
