"""Payloads of durable storages: frames of the codec, read back as groups with the identity of their record.

Encoding and decoding never hold the event loop for long: they go slice by slice. A damaged payload does not keep the
others from being read; its group ends as failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from forebay.codec.frame import decode_group, encode_group
from forebay.core.ledger import Record, Row, identify, number_rollouts
from forebay.core.rollout import Group
from forebay.errors import DamagedData, UnreadableData
from forebay.storage.base import Storage

log = logging.getLogger(__name__)

DAMAGED = "its payload was damaged on disk"
"""The reason with which a group ends whose payload cannot be read."""

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


async def encoded(groups: Iterable[Group]) -> list[bytes]:
    """The frames of groups."""
    frames = []
    slices = Slices()
    for group in groups:
        frames.append(encode_group(group))
        await slices.add(len(frames[-1]))
    return frames


async def read_rows(records: Iterable[Record], frames: Mapping[int, bytes]) -> Reading:
    """Rows with their payloads; `frames` by uid."""
    reading = Reading()
    for record in records:
        await reading.add(record, frames.get(record.uid))
    return reading


async def fail_damaged(storage: Storage, where: object, damaged: Mapping[int, str]) -> None:
    """End groups whose payload cannot be read as failed; `damaged` has the errors by uid."""
    for uid, error in damaged.items():
        log.error("payload_damaged store=%s uid=%d %s", where, uid, error)
    if damaged:
        await storage.fail(dict.fromkeys(damaged, DAMAGED))


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
