"""Where rows are: two tables of strips, in which memory and mapped files share one numbering of rows.

The lower half of the rows is memory: taken, written, given back, used again, so that a full window touches no fresh
page. The upper half is for files, whose rows begin at multiples of the page size, so that any strip can map them. A
gather does not know the difference. Who hands out a row keeps it from being used again while a reader may look at it:
nothing here counts readers, and nothing here is locked.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from forebay.errors import StorageError
from forebay.trajectory.region import PAGE_BYTES, Region, RowAllocator
from forebay.trajectory.schema import Layout, Strip

__all__ = ["Space", "Table"]

_MOST_ADDRESSES, _LEAST_ADDRESSES = 2**41, 2**28


class Table:
    """The strips of one table, over reserved addresses."""

    def __init__(self, strips: Sequence[Strip]) -> None:
        self.strips = tuple(strips)
        self.row_bytes = sum(strip.row_bytes for strip in strips)
        self._regions, rows = _reserve([strip.row_bytes for strip in strips])
        self.rows = rows
        self.raw: list[np.ndarray[Any, Any]] = []
        """By strip: rows of plain bytes."""
        self.columns: list[list[np.ndarray[Any, Any]]] = []
        """By strip and field: its values in all rows."""
        for strip, region in zip(self.strips, self._regions, strict=True):
            data = region.bytes[: rows * strip.row_bytes]
            self.raw.append(data.reshape(rows, strip.row_bytes))
            records = data.view(strip.dtype())
            self.columns.append([records[f"f{k}"] for k in range(len(strip.fields))])
        self._memory = RowAllocator(0, rows // 2)
        self._files = RowAllocator(rows // 2, rows, align=PAGE_BYTES)

    @property
    def memory_rows(self) -> int:
        """How many rows of memory were ever in use at a time; they are kept to be used again."""
        return self._memory.used_until

    def take(self, rows: int) -> int:
        """Rows of memory: the first of them."""
        if not self.strips or not rows:
            return 0
        first = self._memory.take(rows)
        try:
            for strip, region in zip(self.strips, self._regions, strict=True):
                region.commit((first + rows) * strip.row_bytes)
        except BaseException:
            self._memory.give_back(first, rows)
            raise
        return first

    def give_back(self, first: int, rows: int) -> None:
        if self.strips:
            self._memory.give_back(first, rows)

    def map_files(self, descriptors: Sequence[int], rows: int) -> int:
        """Map one file for each strip, with room for so many rows: the first row. Rows not written yet must wait."""
        if not self.strips:
            return 0
        rows = max(rows, 1)
        try:
            first = self._files.take(rows)
        except MemoryError as error:
            raise StorageError(f"files of {rows} rows cannot be mapped: {error}; use a smaller window") from None
        try:
            for strip, region, descriptor in zip(self.strips, self._regions, descriptors, strict=True):
                region.map_file(first * strip.row_bytes, descriptor, rows * strip.row_bytes)
        except BaseException:
            self.unmap(first, rows)
            raise
        return first

    def populate(self, first: int, rows: int) -> None:
        """Bring rows of a mapped file into memory."""
        for strip, region in zip(self.strips, self._regions, strict=True):
            region.populate(first * strip.row_bytes, rows * strip.row_bytes)

    def unmap(self, first: int, rows: int) -> None:
        if not self.strips:
            return
        rows = max(rows, 1)
        for strip, region in zip(self.strips, self._regions, strict=True):
            region.unmap(first * strip.row_bytes, rows * strip.row_bytes)
        self._files.give_back(first, rows)


class Space:
    """The two tables of a buffer."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.steps = Table(layout.steps)
        self.observations = Table(layout.observations)

    @property
    def memory_bytes(self) -> int:
        return sum(table.memory_rows * table.row_bytes for table in (self.steps, self.observations))


def _reserve(row_bytes: Sequence[int]) -> tuple[list[Region], int]:
    """A range of addresses for each strip, all for the same number of rows: as many as the process may have."""
    if not row_bytes:
        return [], 0
    addresses = _MOST_ADDRESSES
    while addresses >= _LEAST_ADDRESSES:
        rows = addresses // sum(row_bytes) // (2 * PAGE_BYTES) * (2 * PAGE_BYTES)
        if rows:
            try:
                return [Region(rows * size) for size in row_bytes], rows
            except MemoryError:  # the process has a limit (ulimit -v), or there are many spaces
                if addresses == _MOST_ADDRESSES and gc.collect():  # of buffers that an error held, perhaps
                    with suppress(MemoryError):
                        return [Region(rows * size) for size in row_bytes], rows
        addresses //= 2
    raise StorageError(
        f"no addresses for rows of {sum(row_bytes)} bytes can be reserved; raise the limit of the process (ulimit -v)"
    )
