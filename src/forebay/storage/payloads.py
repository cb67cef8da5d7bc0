"""Payloads of durable storages: frames of the codec, read back as groups with the identity of their record.

Encoding and decoding never hold the event loop for long: they go slice by slice. A damaged payload does not keep the
others from being read; what becomes of its group is for the storage to decide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from forebay.codec.frame import decode_group
from forebay.core.ledger import Record, Row, identify, number_rollouts
from forebay.errors import DamagedData, UnreadableData

__all__ = ["Reading", "Slices", "in_slices", "read_row"]

T = TypeVar("T")

_SLICE_BYTES = 1 << 19
_ROW_BYTES = 4_096  # reading the smallest row takes about as long as decoding this many bytes


class Slices:
    """Gives the event loop its turn after every half megabyte of frames."""

    def __init__(self) -> None:
        self._pending = 0

    async def add(self, size: int) -> None:
        """Note that `size` bytes were encoded or decoded."""
        self._pending += size
        if self._pending >= _SLICE_BYTES:
            self._pending = 0
            await asyncio.sleep(0)


def in_slices(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Items in lists of at most `most` bytes, or of one item."""
    part: list[T] = []
    pending = 0
    for item in items:
        if part and pending + size(item) > most:
            yield part
            part, pending = [], 0
        part.append(item)
        pending += size(item)
    if part:
        yield part


def read_row(record: Record, frame: bytes | None) -> Row:
    """A row with its payload; DamagedData if the payload cannot be read."""
    if frame is None:
        raise DamagedData("its payload is missing")
    group = decode_group(frame)
    # The record is the authority: frames are written before a group has its id.
    identify(group, record.task_name, record.group_id)
    number_rollouts(group, record.group_id)
    return Row(record, group)


class Reading:
    """Rows with their payloads, and the errors of those that are damaged by uid."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.damaged: dict[int, str] = {}
        self._slices = Slices()

    async def add(self, record: Record, frame: bytes | None) -> None:
        """Read one payload."""
        await self._slices.add(len(frame or b"") + _ROW_BYTES)
        try:
            self.rows.append(read_row(record, frame))
        except UnreadableData:  # intact, but not readable here
            raise
        except DamagedData as error:
            self.damaged[record.uid] = str(error)
