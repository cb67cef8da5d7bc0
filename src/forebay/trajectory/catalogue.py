"""The catalogue of a native store: a SQLite database whose row for a trajectory is its commit point.

It knows the schema, the texts, the segments and, for each trajectory, where its rows are and their crc. One writer, in
one thread; any number of readers. What it says is not trusted: only plain tables are read, and `Listing.check` decides
whether the numbers can be.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np

from forebay.errors import DamagedData, StorageError
from forebay.trajectory.listing import ROW, Listing
from forebay.trajectory.schema import Layout, Schema, check_names, read_schema

__all__ = ["FORMAT", "NAME", "Catalogue"]

NAME = "catalogue.db"
FORMAT = "forebay-trajectories"
VERSION = 1
MAX_TEXTS, MAX_TEXT_BYTES = 2**24, 2**16

_COLUMNS = tuple(name for name in (ROW.names or ()) if name not in ("runs", "chains"))
_MOST = 2**62
# NULL is what SQLite makes of a reward that is not a number.
_DECLARED = ", ".join(name if name == "reward" else f"{name} NOT NULL" for name in _COLUMNS[1:])
_SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE texts (code INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE segments (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, sealed INTEGER NOT NULL);
CREATE TABLE trajectories (
    id INTEGER PRIMARY KEY, {_DECLARED}, runs BLOB NOT NULL, chains BLOB NOT NULL
);
CREATE INDEX trajectories_by_segment ON trajectories (segment);
"""
_FRESH = f"""
INSERT INTO meta VALUES ('format', '{FORMAT}'), ('version', {VERSION}), ('next_id', 0), ('floor_id', 0), ('clean', 1);
"""
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_OBJECTS = "SELECT type, name, tbl_name, sql FROM sqlite_master"
# What ANALYZE leaves; it helps and does nothing else.
_STATISTICS = {
    ("table", "sqlite_stat1", "sqlite_stat1", "CREATE TABLE sqlite_stat1(tbl,idx,stat)"),
    ("table", "sqlite_stat4", "sqlite_stat4", "CREATE TABLE sqlite_stat4(tbl,idx,neq,nlt,ndlt,sample)"),
}


@cache
def _plain() -> frozenset[tuple[Any, ...]]:
    """Everything that a catalogue consists of, as SQLite describes it."""
    database = sqlite3.connect(":memory:")
    try:
        database.executescript(_SCHEMA)
        return frozenset(database.execute(_OBJECTS))
    finally:
        database.close()


class Catalogue:
    """One open catalogue."""

    def __init__(self, path: Path, *, read_only: bool, may_create: bool = False) -> None:
        """`may_create`: there is nothing that it would be the catalogue of."""
        self.path, self.log_path = path, path.with_name(f"{path.name}-wal")
        try:
            self._open("mode=ro" if read_only else "mode=rwc", read_only, may_create)
        except StorageError:
            # Of a directory that may not be written SQLite reads what nobody writes only if it is told so.
            if not read_only or self._may_be_written():
                raise
            self._open("mode=ro&immutable=1", read_only, may_create)

    def _open(self, how: str, read_only: bool, may_create: bool) -> None:
        with self._doing("open"):
            self._db = sqlite3.connect(
                f"file:{quote(str(self.path))}?{how}", uri=True, isolation_level=None, check_same_thread=False
            )
        try:
            self._prepare(read_only, may_create)
        except BaseException:
            self._db.close()
            raise

    def _may_be_written(self) -> bool:
        log = self.log_path
        return os.access(self.path.parent, os.W_OK) or (log.exists() and log.stat().st_size > 0)

    def _prepare(self, read_only: bool, may_create: bool) -> None:
        with self._doing("open"):
            self._db.execute("PRAGMA trusted_schema = OFF")
            self._db.execute("PRAGMA busy_timeout = 5000")
            found = set(self._db.execute(_OBJECTS))
            if not found and read_only:
                raise StorageError(f"{self.path} has nothing in it yet: the process that makes it has not come to it")
            if not found and not may_create:
                raise DamagedData(
                    f"{self.path} is missing or empty, and segments are there; bring it back, or use another directory"
                )
            if not found:
                self._prepare_to_write()
                self._db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} {_FRESH} COMMIT;")
                return
        # A view, a trigger, a computed column would run what somebody else wrote: only what is made above is used.
        if not any(item[1] == "meta" for item in found & _plain()) or self.meta("format") != FORMAT:
            raise DamagedData(f"{self.path} is not the catalogue of a trajectory store")
        version = self.meta("version")
        if version != VERSION:
            raise DamagedData(f"{self.path} is of version {version!r}; this Forebay reads {VERSION}: use a newer one")
        if (other := found ^ _plain()) - _STATISTICS:
            names = sorted(str(item[1]) for item in other - _STATISTICS)
            raise DamagedData(f"{self.path} is not a catalogue as this Forebay makes it; see {', '.join(names)[:200]}")
        if not read_only:
            with self._doing("open"):
                self._prepare_to_write()

    def _prepare_to_write(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")

    # --- reading

    def hold(self) -> None:
        """Read one state of it from now on, whatever is written meanwhile, until `release`."""
        with self._doing("read"):
            self._db.execute("BEGIN")

    def release(self) -> None:
        if self._db.in_transaction:
            with self._doing("read"):
                self._db.execute("COMMIT")

    def meta(self, key: str) -> Any:
        with self._doing("read"):
            row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def number(self, key: str) -> int:
        value = self.meta(key)
        if not isinstance(value, int) or not 0 <= value <= _MOST:
            raise DamagedData(f"{self.path} has {key} {value!r:.100}; expected a whole number from 0 to {_MOST}")
        return value

    def schema(self) -> Schema | None:
        """None as long as there was no trajectory."""
        data = self.meta("schema")
        if data is None:
            return None
        if not isinstance(data, str):
            raise DamagedData(f"{self.path} has a schema that is no text")
        schema = read_schema(data.encode())
        check_names(schema)
        return schema

    def texts(self) -> list[str]:
        with self._doing("read"):
            rows = self._db.execute("SELECT code, text FROM texts ORDER BY code LIMIT ?", (MAX_TEXTS + 1,)).fetchall()
        if len(rows) > MAX_TEXTS or any(row[0] != k or not isinstance(row[1], str) for k, row in enumerate(rows)):
            raise DamagedData(f"{self.path} has texts that are not numbered from 0")
        return [text for _, text in rows]

    def segments(self) -> dict[int, tuple[str, bool]]:
        """By number: the name, and whether it is sealed."""
        with self._doing("read"):
            rows = self._db.execute("SELECT number, name, sealed FROM segments ORDER BY number").fetchall()
        found = {number: (name, bool(sealed)) for number, name, sealed in rows}
        if any(not 0 < number <= _MOST for number in found) or len({name for name, _ in found.values()}) < len(rows):
            raise DamagedData(f"{self.path} has a segment with an impossible number, or one that stands twice")
        return found

    def listing(self, *, segment: int | None = None) -> Listing:
        """All trajectories by id, or those of one segment. Not checked yet."""
        where, values = ("", ()) if segment is None else (" WHERE segment = ?", (segment,))
        parts, runs, chains = [], [], []
        with self._doing("read"):
            cursor = self._db.execute(
                f"SELECT {', '.join(_COLUMNS)}, runs, chains FROM trajectories{where} ORDER BY id", values
            )
            while rows := cursor.fetchmany(10_000):
                parts.append(self._part(rows))
                runs += [row[-2] for row in rows]
                chains += [row[-1] for row in rows]
        if not parts:
            return Listing.empty()
        found = np.concatenate(parts)
        return Listing(found, _pairs(runs), _pairs(chains))

    def _part(self, rows: list[tuple[Any, ...]]) -> np.ndarray[Any, Any]:
        part = np.empty(len(rows), ROW)
        try:
            for k, name in enumerate(_COLUMNS):
                values = [row[k] for row in rows]
                is_float = part.dtype[name].kind == "f"
                if not set(map(type, values)) <= ({float, type(None)} if is_float else {int}):
                    raise ValueError(f"{name} of a trajectory is of another type")
                part[name] = np.array(values, part.dtype[name])  # None is no number
            for name, k in (("runs", -2), ("chains", -1)):
                if any(not isinstance(row[k], bytes) or len(row[k]) % 16 for row in rows):
                    raise ValueError(f"{name} of a trajectory are no pairs")
                part[name] = [len(row[k]) // 16 for row in rows]
        except (ValueError, TypeError, OverflowError) as error:
            raise DamagedData(f"{self.path} has a row that cannot be read: {error}") from None
        return part

    # --- writing

    def set_meta(self, **values: Any) -> None:
        with self._doing("write"):
            self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", list(values.items()))

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, and on disk when it ends."""
        with self._doing("write"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def set_schema(self, layout: Layout) -> None:
        self.set_meta(
            schema=msgspec.json.encode(layout.schema).decode(), files=msgspec.json.encode(layout.files()).decode()
        )

    def add_texts(self, first: int, texts: Sequence[str]) -> None:
        self._db.executemany("INSERT INTO texts VALUES (?, ?)", list(enumerate(texts, first)))

    def add_segment(self, number: int, name: str) -> None:
        self._db.execute("INSERT INTO segments VALUES (?, ?, 0)", (number, name))

    def seal_segment(self, number: int) -> None:
        self._db.execute("UPDATE segments SET sealed = 1 WHERE number = ?", (number,))

    def add(self, listing: Listing) -> None:
        marks = ", ".join("?" * (len(_COLUMNS) + 2))
        rows, run, chain = [], 0, 0
        for row in listing.rows:
            runs, chains = int(row["runs"]), int(row["chains"])
            rows.append(
                (
                    *(row[name].item() for name in _COLUMNS),
                    listing.runs[run : run + runs].astype("<i8").tobytes(),
                    listing.chains[chain : chain + chains].astype("<i8").tobytes(),
                )
            )
            run, chain = run + runs, chain + chains
        self._db.executemany(f"INSERT INTO trajectories ({', '.join(_COLUMNS)}, runs, chains) VALUES ({marks})", rows)

    def remove(self, ids: Sequence[int]) -> None:
        self._db.executemany("DELETE FROM trajectories WHERE id = ?", [(number,) for number in ids])

    def remove_segment(self, number: int) -> None:
        self._db.execute("DELETE FROM trajectories WHERE segment = ?", (number,))
        self._db.execute("DELETE FROM segments WHERE number = ?", (number,))

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError as error:  # the message of SQLite names what is damaged, and is no UTF-8 itself
            raise DamagedData(f"{self.path} is damaged: {error}") from None
        except sqlite3.Error as error:
            # Text that is no UTF-8 is found by Python, which gives no code.
            code = getattr(error, "sqlite_errorcode", None)
            damaged = isinstance(error, sqlite3.OperationalError) if code is None else code & 0xFF in _DAMAGED
            if damaged:
                raise DamagedData(f"{self.path} is damaged: {error}") from None
            raise StorageError(f"cannot {what} {self.path}: {error}") from error


def _pairs(blobs: list[bytes]) -> np.ndarray[Any, Any]:
    return np.frombuffer(b"".join(blobs), "<i8").reshape(-1, 2)
