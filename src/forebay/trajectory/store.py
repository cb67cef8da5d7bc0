"""A native store: a directory with a catalogue and segments, which one process writes and any number read.

    catalogue.db               what is there (see `catalogue`)
    seg-<16 hex digits>-<k>.col  the rows (see `segments`)
    catalogue.db.lock          held by the writing process

`Store.load` says what can be used: what the catalogue names and the files have. After an unclean stop the rows of the
open segment are checked against their crc, and what is torn is left out (and, by the writing process, forgotten). The
catalogue's row is the commit point, and it is written after the rows are synced: what was durable is there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from forebay.checkpoint.files import FileOps
from forebay.checkpoint.publish import MANIFEST
from forebay.errors import DamagedData, InvalidConfig, StorageError, StorageVanished
from forebay.storage.sqlite.lock import ProcessLock, check_file_system
from forebay.trajectory.catalogue import NAME, Catalogue
from forebay.trajectory.listing import Listing, SegmentRows
from forebay.trajectory.schema import Layout
from forebay.trajectory.segments import SEGMENT_FILE, Segment, damaged, doing, file_names, open_files, rows_in_files
from forebay.trajectory.space import Space

__all__ = ["Store", "is_store", "segment_limit"]

_log = logging.getLogger(__name__)

LEAST_SEGMENT_BYTES, MOST_SEGMENT_BYTES = 4 * 2**20, 256 * 2**20


def is_store(directory: Path) -> bool:
    return (directory / NAME).is_file()


def segment_limit(retained_bytes: int) -> int:
    """How large a segment gets: an eighth of what is kept, so that little is kept for too long.

    >>> segment_limit(0) // 2**20, segment_limit(2**30) // 2**20, segment_limit(2**40) // 2**20
    (4, 128, 256)
    """
    return min(max(retained_bytes // 8, LEAST_SEGMENT_BYTES), MOST_SEGMENT_BYTES)


class Store:
    """An open store."""

    def __init__(self, directory: str | PathLike[str], *, read_only: bool, files: FileOps | None = None) -> None:
        self.directory = Path(directory).absolute()
        self.read_only = read_only
        self.files = files or FileOps()
        self._lock: ProcessLock | None = None
        self._identities: dict[Path, tuple[int, int]] = {}
        if (self.directory / MANIFEST).exists():
            raise InvalidConfig(
                f"{self.directory} is a checkpoint, which is never written to; load it with load_checkpoint()"
            )
        for name in (NAME, f"{NAME}.lock"):
            if (self.directory / name).is_symlink():
                raise DamagedData(f"{self.directory / name} is a symbolic link; a store has plain files only")
        if read_only:
            if not is_store(self.directory):
                raise StorageError(f"there is no trajectory store in {self.directory}: {NAME} is missing")
        else:
            self._make_directory()
            check_file_system(self.directory)
            with doing("lock", self.directory):
                self._lock = ProcessLock(self.directory / f"{NAME}.lock")
        try:
            self.catalogue = Catalogue(
                self.directory / NAME, read_only=read_only, may_create=not read_only and not self._segment_files()
            )
            self.catalogue.hold()
            schema = self.catalogue.schema()
            self.layout = None if schema is None else Layout(schema)
            self.texts = self.catalogue.texts()
            self.next_id = self.catalogue.number("next_id")
            self.floor_id = self.catalogue.number("floor_id")
            if self.floor_id > self.next_id:
                raise DamagedData(f"{self.catalogue.path} has floor_id {self.floor_id} and next_id {self.next_id}")
            self.left_out = 0  # trajectories that were damaged
        except BaseException:
            self.close(clean=False)
            raise

    def load(self, space: Space | None) -> tuple[Listing, dict[int, Segment]]:
        """Every trajectory that is whole, and the segments by number, not mapped. For writing: sweep and mend."""
        numbers, clean = self.catalogue.segments(), self.catalogue.number("clean")
        if self.layout is None or space is None:
            if numbers:
                raise DamagedData(f"{self.catalogue.path} has segments and no schema")
            self.catalogue.release()
            self._begin({})
            return Listing.empty(), {}
        listing = self.catalogue.listing()
        self.catalogue.release()
        if len(listing) and int(listing.rows["id"][-1]) >= self.next_id:
            raise DamagedData(f"{self.catalogue.path} would give an id twice: next_id is {self.next_id}")
        segments = {number: self._segment(name, sealed) for number, (name, sealed) in numbers.items()}
        if problems := {number: segment.problem for number, segment in segments.items() if segment.problem}:
            # The process that writes may have let go of them since the catalogue was read.
            still = self.catalogue.segments()
            gone = [number for number in problems if number not in still]
            segments = {number: segment for number, segment in segments.items() if number not in gone}
            listing = listing.chosen(np.flatnonzero(~np.isin(listing.rows["segment"], gone)))
            for number in problems.keys() - gone:
                _log.warning("a segment cannot be read, and its trajectories are left out: %s", problems[number])
        listing = self._without_missing_rows(listing, segments)
        listing.check({number: segment.rows for number, segment in segments.items()}, self.layout, len(self.texts))
        if not clean:
            listing = self._without_torn_rows(listing, segments, space)
        for number, segment in segments.items():
            if not segment.sealed:  # its writer may cut off what is behind the last trajectory
                segment.rows = SegmentRows.used_by(listing.rows[listing.rows["segment"] == number])
        self._begin(segments)
        return listing, segments

    def _begin(self, segments: dict[int, Segment]) -> None:
        if not self.read_only:
            self._sweep(segments)
            self.catalogue.set_meta(clean=0)  # from here on SQLite has its write-ahead log
            for path in (self.catalogue.path, self.catalogue.log_path):
                with doing("check", path):
                    identity = self.files.identity(path)
                if identity is not None:
                    self._identities[path] = identity

    def check_in_place(self, opened: Mapping[Path, tuple[int, int] | None] | None = None) -> None:
        """StorageVanished unless the catalogue, and files that are open, still have their names."""
        for path, identity in {**self._identities, **(opened or {})}.items():
            with doing("check", path):
                found = self.files.identity(path)
            if found is None or found != identity:
                raise StorageVanished(
                    f"{path} {'is missing' if found is None else 'is another file now'}: it was deleted, moved or "
                    "replaced while the store was open"
                )

    def committed(self) -> Listing:
        """What is durable now; read apart from the connection that writes."""
        catalogue = Catalogue(self.directory / NAME, read_only=True)
        try:
            return catalogue.listing()
        finally:
            catalogue.close()

    def close(self, *, clean: bool) -> None:
        """Let others write. `clean` says that all that was written was committed."""
        catalogue: Catalogue | None = getattr(self, "catalogue", None)
        try:
            if catalogue is not None:
                try:
                    if clean and not self.read_only:
                        catalogue.set_meta(clean=1)
                finally:
                    catalogue.close()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def _make_directory(self) -> None:
        with doing("create", self.directory):
            try:
                self.files.make_directories(self.directory)
            except NotADirectoryError as error:
                raise InvalidConfig(f"auto_save_path leads to a directory; {error.filename} is a file") from None

    def _segment_files(self) -> list[str]:
        with doing("list", self.directory):
            return [name for name in self.files.list_directory(self.directory) if SEGMENT_FILE.fullmatch(name)]

    def _segment(self, name: str, sealed: bool) -> Segment:
        """A segment with as many rows as its files have; none if one is missing."""
        assert self.layout is not None
        if not isinstance(name, str):
            raise DamagedData(f"{self.catalogue.path} has a segment without a name")
        names = file_names(name, self.layout)
        try:
            with open_files(self.directory, names, self.files) as opened:
                rows = rows_in_files([size for _, size in opened], self.layout)
        except DamagedData as error:
            return Segment(self.directory, name, SegmentRows(0, 0), sealed=sealed, problem=str(error))
        return Segment(self.directory, name, rows, sealed=sealed)

    def _without_missing_rows(self, listing: Listing, segments: dict[int, Segment]) -> Listing:
        rows = listing.rows
        nothing = SegmentRows(0, 0)
        have = [segments[n].rows if n in segments else nothing for n in rows["segment"].tolist()]
        there = np.array(have, np.int64).reshape(-1, 2)
        with np.errstate(over="ignore"):
            steps = rows["first_step"] + rows["steps"] * rows["envs"] <= there[:, 0]
            observations = rows["first_observation"] + rows["observations"] <= there[:, 1]
        return self._kept(listing, steps & observations, "are not whole in their files", segments)

    def _without_torn_rows(self, listing: Listing, segments: dict[int, Segment], space: Space) -> Listing:
        """The process that wrote last did not close: the open segment may have been torn by a power loss."""
        opened = {number: segment for number, segment in segments.items() if not segment.sealed and segment.rows.steps}
        which = np.flatnonzero(np.isin(listing.rows["segment"], list(opened)))
        keep = np.ones(len(listing), bool)
        try:
            for segment in opened.values():
                map_segment(segment, space, self.files)
            keep[which[damaged(listing.chosen(which), opened, space)]] = False
        finally:
            for segment in opened.values():
                segment.unmap(space)
        return self._kept(listing, keep, "do not have their checksum", segments)

    def _kept(self, listing: Listing, keep: np.ndarray[Any, Any], why: str, segments: dict[int, Segment]) -> Listing:
        if keep.all():
            return listing
        gone = listing.rows[~keep]
        _log.warning("%d trajectories %s and are left out: %s", len(gone), why, gone["id"][:20].tolist())
        self.left_out += len(gone)
        # Of a sealed segment, or of one that cannot be read, a file may come back.
        torn = [row for row in gone if _is_torn(segments.get(int(row["segment"])))]
        if not self.read_only and torn:
            for row in torn:
                segments[int(row["segment"])].is_torn = True
            with self.catalogue.transaction():
                self.catalogue.remove([int(row["id"]) for row in torn])
        return listing.chosen(np.flatnonzero(keep))

    def _sweep(self, segments: dict[int, Segment]) -> None:
        """Remove files of segments that were never committed, or that were let go."""
        if self.read_only:
            return
        known = {segment.name for segment in segments.values()}
        with suppress(StorageError):
            for name in self._segment_files():
                if name.split("-")[1] not in known:
                    with suppress(OSError):
                        self.files.remove(self.directory / name)


def _is_torn(segment: Segment | None) -> bool:
    return segment is not None and not segment.sealed and not segment.problem


def map_segment(segment: Segment, space: Space, files: FileOps) -> None:
    """Map the files of a segment, once they are known to have its rows."""
    if segment.mapped:
        return
    names = file_names(segment.name, space.layout)
    with open_files(segment.directory, names, files) as opened:
        have = rows_in_files([size for _, size in opened], space.layout)
        if have.steps < segment.rows.steps or have.observations < segment.rows.observations:
            raise DamagedData(
                f"segment {segment.name} in {segment.directory} has {have.steps} and {have.observations} rows; "
                f"{segment.rows.steps} and {segment.rows.observations} are listed"
            )
        segment.map(space, [descriptor for descriptor, _ in opened], segment.rows)
