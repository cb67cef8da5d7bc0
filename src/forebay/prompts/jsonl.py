"""JSONL files as map-style data sets: one JSON object per line, found by an index of 8 bytes per record.

The file is opened when the first record is asked for, and again for each record. A file that changes meanwhile is
refused.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

from forebay.errors import InvalidDataset, InvalidRecord

_MAX_LINE_BYTES = 64 << 20


class JSONLDataset:
    """A file with one JSON object per line, as a map-style data set. Blank lines are not records."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._offsets: array[int] | None = None
        self._identity: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self._index())

    def __getitem__(self, index: int) -> Any:
        offsets = self._index()
        if not 0 <= index < len(offsets):
            raise IndexError(index)
        try:
            with self.path.open("rb") as file:
                file.seek(offsets[index])
                line = file.readline(_MAX_LINE_BYTES + 1)
        except OSError as error:
            raise self._unreadable(error) from error
        if len(line) > _MAX_LINE_BYTES:
            raise InvalidRecord(
                index, f"({self.path}) is longer than {_MAX_LINE_BYTES >> 20} MiB; expected one JSON object per line"
            )
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidRecord(index, f"({self.path}) is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise InvalidRecord(index, f"({self.path}) is a {type(record).__name__}; expected a JSON object")
        return record

    def _index(self) -> array[int]:
        """The position in the file of every record; InvalidDataset if the file has changed."""
        try:
            stat = self.path.stat()
            identity = (stat.st_size, stat.st_mtime_ns)
            if self._offsets is None:
                self._offsets, self._identity = self._find_records(), identity
        except OSError as error:
            raise self._unreadable(error) from error
        if identity != self._identity:
            raise InvalidDataset(
                f"{self.path} has changed since it was opened; positions in it no longer mean the same records"
            )
        return self._offsets

    def _find_records(self) -> array[int]:
        offsets = array("q")
        start, within = 0, False
        with self.path.open("rb") as file:
            # In pieces, so that a file of one endless line is not read into memory.
            while piece := file.readline(_MAX_LINE_BYTES + 1):
                if not within and (len(piece) > _MAX_LINE_BYTES or not piece.isspace()):
                    offsets.append(start)
                start += len(piece)
                within = not piece.endswith(b"\n")
        return offsets

    def _unreadable(self, error: OSError) -> InvalidDataset:
        return InvalidDataset(f"the data set {self.path} cannot be read: {error.strerror}")
