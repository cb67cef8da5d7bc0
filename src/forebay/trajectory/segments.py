"""Segments: the column files in which rows of trajectories lie, a file for each strip.

    seg-<16 hex digits>-<k>.col    rows of the k-th strip, one after another, nothing else

`k` counts the strips of steps, then those of observations. A segment is written at its end only, and never again once
it is sealed; its name is new, so a file of that name has that content wherever it is linked to. How many rows count is
said elsewhere (a catalogue, a manifest). A file is opened as a plain file of the directory, and its size is checked,
before it is mapped: a row that is not there is never touched.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from forebay.checkpoint.files import FileOps, NotAPlainFile
from forebay.errors import DamagedData, StorageError
from forebay.trajectory.listing import Listing, SegmentRows
from forebay.trajectory.schema import Layout
from forebay.trajectory.space import Space, Table

__all__ = [
    "SEGMENT_FILE",
    "MissingFile",
    "Segment",
    "checksum",
    "doing",
    "file_names",
    "file_sizes",
    "new_name",
    "open_files",
    "rows_in_files",
]

SEGMENT_FILE = re.compile(r"seg-[0-9a-f]{16}-[0-9]{1,4}\.col", re.ASCII)
_NAME = re.compile(r"[0-9a-f]{16}", re.ASCII)


class MissingFile(DamagedData):
    """Kept apart from other damage: who writes may have let go of it just now."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is missing")
        self.path = path


def new_name() -> str:
    return secrets.token_hex(8)


def file_names(name: str, layout: Layout) -> list[str]:
    """The files of a segment, those of steps first."""
    if not _NAME.fullmatch(name):
        raise DamagedData(f"a segment is called {name[:100]!r}; expected 16 hexadecimal digits")
    return [f"seg-{name}-{k}.col" for k in range(len(layout.steps) + len(layout.observations))]


@contextmanager
def doing(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot {what} {path}: {error.strerror or error}") from error


class Segment:
    """A segment as this process knows it: where it is, and at which rows it is mapped."""

    def __init__(self, directory: Path, name: str, rows: SegmentRows, *, sealed: bool, problem: str = "") -> None:
        self.directory, self.name, self.rows, self.sealed = directory, name, rows, sealed
        self.problem = problem  # why its files cannot be read
        self.is_torn = False  # not all that was committed is there: nothing is added to it any more
        self.first_step = self.first_observation = 0
        self.capacity = rows
        self.mapped = False
        self.in_window = 0  # trajectories

    def map(self, space: Space, descriptors: Sequence[int], capacity: SegmentRows) -> None:
        steps = len(space.layout.steps)
        self.first_step = space.steps.map_files(descriptors[:steps], capacity.steps)
        try:
            self.first_observation = space.observations.map_files(descriptors[steps:], capacity.observations)
        except BaseException:
            space.steps.unmap(self.first_step, capacity.steps)
            raise
        self.capacity, self.mapped = capacity, True

    def has_files(self, layout: Layout) -> bool:
        """Whether its files still have their names; what is mapped of them outlives those."""
        return all((self.directory / name).exists() for name in file_names(self.name, layout))

    def unmap(self, space: Space) -> None:
        if self.mapped:
            self.mapped = False
            space.steps.unmap(self.first_step, self.capacity.steps)
            space.observations.unmap(self.first_observation, self.capacity.observations)


@contextmanager
def open_files(directory: Path, names: Sequence[str], files: FileOps) -> Iterator[list[tuple[int, int]]]:
    """Descriptor and size of each file of a segment; DamagedData if one is missing or is not a plain file."""
    opened: list[tuple[int, int]] = []
    try:
        for name in names:
            with doing("open", directory / name):
                opened.append(_open(files, directory / name))
        yield opened
    finally:
        for descriptor, _ in opened:
            with suppress(OSError):
                files.close(descriptor)


def _open(files: FileOps, path: Path) -> tuple[int, int]:
    try:
        return files.open(path)
    except FileNotFoundError:
        raise MissingFile(path) from None
    except NotAPlainFile:
        raise DamagedData(f"{path} is a symbolic link or a directory; expected a plain file") from None


def file_sizes(rows: SegmentRows, layout: Layout) -> list[int]:
    """How many bytes each file of a segment with these rows has."""
    return [strip.row_bytes * rows.steps for strip in layout.steps] + [
        strip.row_bytes * rows.observations for strip in layout.observations
    ]


def rows_in_files(sizes: Sequence[int], layout: Layout) -> SegmentRows:
    """How many whole rows files of these sizes have."""
    strips = (*layout.steps, *layout.observations)
    rows = [size // strip.row_bytes for size, strip in zip(sizes, strips, strict=True)]
    steps = len(layout.steps)
    return SegmentRows(min(rows[:steps]), min(rows[steps:], default=0))


def checksum(space: Space, first_step: int, steps: int, first_observation: int, observations: int) -> int:
    """The crc of the rows of a trajectory: strip after strip."""
    crc = 0
    for table, first, rows in ((space.steps, first_step, steps), (space.observations, first_observation, observations)):
        for part in row_bytes(table, first, rows):
            crc = crc32(part, crc)
    return crc


def row_bytes(table: Table, first: int, rows: int) -> list[memoryview]:
    """By strip: the memory of some rows."""
    return [raw[first : first + rows].reshape(-1).data for raw in table.raw]


def damaged(listing: Listing, segments: dict[int, Segment], space: Space, progress: Any = None) -> np.ndarray[Any, Any]:
    """Positions of the trajectories of mapped segments whose rows do not have their crc."""
    wrong = []
    for k, row in enumerate(listing.rows):
        segment = segments[int(row["segment"])]
        found = checksum(
            space,
            segment.first_step + int(row["first_step"]),
            int(row["steps"] * row["envs"]),
            segment.first_observation + int(row["first_observation"]),
            int(row["observations"]),
        )
        if found != row["crc"]:
            wrong.append(k)
        if progress is not None:
            progress(k + 1, len(listing))
    return np.array(wrong, np.int64)
