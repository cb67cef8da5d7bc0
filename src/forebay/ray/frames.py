"""Groups that stay frames: what a host keeps in memory is what came over the wire.

The rules and indexes are MemoryStorage's, which decides on records alone. So a group is encoded once, by the producer,
and decoded once, by the trainer. Frames of one put are slices of one piece of memory, which goes with the last of
them. References that samples hold lie beside the frame, and are dropped with the row.
"""

from __future__ import annotations

from typing import Any, cast

from forebay.codec.frame import decode_group
from forebay.core.record import Row
from forebay.core.rollout import Group, Status, group_status
from forebay.ray.wire import Parcel
from forebay.storage.base import Claim, Content
from forebay.storage.local.memory import MemoryStorage

__all__ = ["FrameStorage", "add_to", "framed"]


class Frame(tuple[()]):
    """Stands in a row for the samples."""

    data: memoryview
    start: int  # in the buffer that it is a slice of
    references: tuple[Any, ...]


def framed(data: memoryview, start: int, references: tuple[Any, ...]) -> Group:
    """A group that is not decoded."""
    frame = Frame()
    frame.data, frame.start, frame.references = data, start, references
    return cast(Group, frame)


def add_to(parcel: Parcel, group: Group) -> tuple[int, int]:
    """Put a group into a parcel, whether it was decoded or not; the size of its frame, and how many references."""
    if not isinstance(group, Frame):
        return parcel.add_group(group)
    parcel.add_frame(group.data, group.start)
    parcel.objects += group.references
    return len(group.data), len(group.references)


class FrameStorage(MemoryStorage):
    """MemoryStorage whose groups are frames."""

    def _kept(self, content: Content, task_name: str, group_id: int) -> Group:
        return content.group  # whoever decodes it gives it its identity

    def _status_of(self, row: Row) -> Status:
        frame = row.group
        assert isinstance(frame, Frame)
        return group_status(decode_group(frame.data, frame.references, checksum=False))

    def _claim_rows(self, task_name: str, status: Status, rows: list[Row], claim: Claim) -> list[Row]:
        groups = {row.record.uid: row.group for row in rows}
        claimed = super()._claim_rows(task_name, status, rows, claim)
        # A frame never changes: what is taken needs no copy, not even while it is being saved.
        return [Row(row.record, groups[row.record.uid]) for row in claimed]
