"""What `storage=` of a loader may be, and the buffer that it makes."""

from __future__ import annotations

from typing import TypeAlias

from forebay.buffer.buffer import ReplayBuffer
from forebay.buffer.group_ends import OnGroupEnd
from forebay.config import ReplayBufferConfig
from forebay.core.policy import FIFOReplayPolicy, StalenessReplayPolicy
from forebay.errors import InvalidConfig
from forebay.loader.plane import Mode
from forebay.storage.base import Storage
from forebay.storage.urls import build_storage

StorageLike: TypeAlias = str | Storage | ReplayBuffer | ReplayBufferConfig


def open_buffer(
    storage: StorageLike, mode: Mode, max_groups: int | None, max_bytes: int | None, on_group_end: OnGroupEnd | None
) -> tuple[ReplayBuffer, bool]:
    """The buffer of a loader, and whether the loader closes it."""
    if isinstance(storage, (ReplayBuffer, ReplayBufferConfig)):
        for name, value in (("max_groups", max_groups), ("max_bytes", max_bytes)):
            if value is not None:
                raise InvalidConfig(f"{name} belongs to the buffer that was given as storage; set it there")
        if isinstance(storage, ReplayBufferConfig):
            return storage.build(on_group_end=on_group_end), True
        if on_group_end is not None:
            raise InvalidConfig("on_group_end belongs to the buffer that was given as storage; set it there")
        return storage, False
    built = build_storage(storage) if isinstance(storage, str) else storage
    policy = FIFOReplayPolicy() if mode == "in_turns" else StalenessReplayPolicy()
    buffer = ReplayBuffer(policy, built, max_groups=max_groups, max_bytes=max_bytes, on_group_end=on_group_end)
    return buffer, True
