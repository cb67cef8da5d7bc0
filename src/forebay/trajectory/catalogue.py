"""The catalogue of a native store: a SQLite database whose row for a trajectory is its commit point.

It knows the schema, the texts, the segments and, for each trajectory, where its rows are and their crc. One writer, in
one thread; any number of readers. What it says is not trusted: only plain tables are read, and `Listing.check` decides
whether the numbers can be.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np

from forebay.errors import DamagedData, StorageError
from forebay.trajectory.listing import ROW, Listing
from forebay.trajectory.schema import Layout, Schema, read_schema

__all__ = ["FORMAT", "NAME", "Catalogue"]

NAME = "catalogue.db"
FORMAT = "forebay-trajectories"
VERSION = 1
MAX_TEXTS, MAX_TEXT_BYTES = 2**24, 2**16

_COLUMNS = tuple(name for name in (ROW.names or ()) if name not in ("runs", "chains"))
_TABLES = {"meta", "texts", "segments", "trajectories"}
_SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE texts (code INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE segments (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, sealed INTEGER NOT NULL);
CREATE TABLE trajectories (
    id INTEGER PRIMARY KEY, {", ".join(f"{name} NOT NULL" for name in _COLUMNS[1:])}, runs BLOB NOT NULL,
    chains BLOB NOT NULL
);
CREATE INDEX trajectories_by_segment ON trajectories (segment);
"""


class Catalogue:
    """One open catalogue."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.path = path
        mode = "ro" if read_only else "rwc"
        with self._doing("open"):
            self._db = sqlite3.connect(
                f"file:{quote(str(path))}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False
            )
        try:
            self._prepare(read_only)
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, read_only: bool) -> None:
        with self._doing("open"):
            self._db.execute("PRAGMA trusted_schema = OFF")
            self._db.execute("PRAGMA busy_timeout = 5000")
            found = dict(self._db.execute("SELECT name, type FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"))
            if not found and not read_only:
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
                self.set_meta(format=FORMAT, version=VERSION, next_id=0, floor_id=0, clean=1)
                return
            others = {name for name, kind in found.items() if (kind != "table") == (name in _TABLES)}
            if not found.keys() >= _TABLES or others - {"trajectories_by_segment"}:
                raise DamagedData(f"{self.path} is not the catalogue of a trajectory store")
            if not read_only:
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")
        if self.meta("format") != FORMAT:
            raise DamagedData(f"{self.path} is not the catalogue of a trajectory store")
        version = self.meta("version")
        if version != VERSION:
            raise DamagedData(f"{self.path} is of version {version!r}; this Forebay reads {VERSION}: use a newer one")

    # --- reading

    def meta(self, key: str) -> Any:
        with self._doing("read"):
            row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def number(self, key: str) -> int:
        value = self.meta(key)
        if not isinstance(value, int) or value < 0:
            raise DamagedData(f"{self.path} has {key} {value!r:.100}; expected a whole number from 0")
        return value

    def schema(self) -> Schema | None:
        """None as long as there was no trajectory."""
        data = self.meta("schema")
        if data is None:
            return None
        if not isinstance(data, str):
            raise DamagedData(f"{self.path} has a schema that is no text")
        return read_schema(data.encode())

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
        return {number: (name, bool(sealed)) for number, name, sealed in rows}

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
                part[name] = [row[k] for row in rows]
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
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise DamagedData(f"{self.path} is damaged: {error}") from None
            raise StorageError(f"cannot {what} {self.path}: {error}") from error
        except sqlite3.Error as error:
            raise StorageError(f"cannot {what} {self.path}: {error}") from error


def _pairs(blobs: list[bytes]) -> np.ndarray[Any, Any]:
    return np.frombuffer(b"".join(blobs), "<i8").reshape(-1, 2)
