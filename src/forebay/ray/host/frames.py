"""Groups that stay frames: a host in memory keeps them as they came over the wire.

The rules and indexes are those of MemoryStorage, which decides on records alone. So a group is encoded once, by the
producer, and decoded once, by the trainer. Frames of one put are slices of one piece of memory, which is freed with the
last of them. References in samples are kept beside the frame, and dropped with the row.
"""

from __future__ import annotations

from typing import Any, cast

from forebay.codec.frame import decode_group
from forebay.core.ledger import Record, Row
from forebay.core.rollout import Group, Status, group_status
from forebay.ray.parcel import Parcel
from forebay.storage.base import Content
from forebay.storage.local.engine import Engine
from forebay.storage.local.memory import MemoryStorage, MemoryTable
from forebay.storage.local.storage import LocalStorage

__all__ = ["FrameStorage", "add_to", "framed"]


class Frame(tuple[()]):
    """Takes the place of the samples in a row."""

    data: memoryview
    start: int  # in the buffer that it is a slice of
    references: tuple[Any, ...]


def framed(data: memoryview, start: int, references: tuple[Any, ...]) -> Group:
    """A group that is not decoded."""
    frame = Frame()
    frame.data, frame.start, frame.references = data, start, references
    return cast(Group, frame)


def add_to(parcel: Parcel, group: Group) -> Group:
    """Put a group into a parcel, whether it was decoded or not; nothing stays where it was."""
    if not isinstance(group, Frame):
        return parcel.add_group(group)
    parcel.add_frame(group.data, group.start, group.references)
    return ()


class _FrameEngine(Engine):
    def _keep(self, record: Record, content: Content) -> Group:
        return content.group  # its reader gives it its identity

    def _status_of(self, row: Row) -> Status:
        frame = row.group
        assert isinstance(frame, Frame)
        return group_status(decode_group(frame.data, frame.references, checksum=False))

    def _handed(self, rows: list[Row]) -> list[Row]:
        return rows  # a frame never changes: no copy is needed


class FrameStorage(MemoryStorage):
    """MemoryStorage whose groups are frames."""

    def __init__(self) -> None:
        LocalStorage.__init__(self, _FrameEngine(lambda settings: MemoryTable(settings.order)))
