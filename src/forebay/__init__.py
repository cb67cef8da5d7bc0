"""Forebay: the rollout data plane for reinforcement learning.

It stands between what generates and what learns, and owns every prompt from the moment it is drawn until the
trainer has confirmed that it trained on it. Start with `ReplayBuffer`; `forebay.blocking` has the same for trainers
that are not async.
"""

from forebay.buffer import ReplayBuffer
from forebay.config import AsyncReplayBufferConfig, ReplayBufferConfig, SyncReplayBufferConfig
from forebay.errors import (
    BufferClosed,
    CheckpointError,
    CursorMoved,
    DamagedData,
    DuplicateGroup,
    ForebayError,
    InvalidConfig,
    InvalidGroup,
    InvalidInput,
    InvalidQuery,
    LostLease,
    NoRoom,
    PolicyError,
    StorageError,
    StorageInUse,
    StorageUnavailable,
    UnreadableData,
    UnsupportedPayload,
    WaitTimeout,
    WrongEventLoop,
)
from forebay.lease import Lease
from forebay.ledger import End, Place
from forebay.policy import (
    Column,
    FIFOReplayPolicy,
    FreshestReplayPolicy,
    Order,
    PriorityReplayPolicy,
    ReplayPolicy,
    StalenessReplayPolicy,
)
from forebay.record import Record
from forebay.rollout import RolloutState, SampleParams, Status, finish_status, group_bytes, group_status
from forebay.staleness import group_staleness, sample_staleness, stale_threshold, staleness, token_mask
from forebay.storage.base import Storage
from forebay.storage.memory import MemoryStorage

__version__ = "0.1.0"

__all__ = [
    "AsyncReplayBufferConfig",
    "BufferClosed",
    "CheckpointError",
    "Column",
    "CursorMoved",
    "DamagedData",
    "DuplicateGroup",
    "End",
    "FIFOReplayPolicy",
    "ForebayError",
    "FreshestReplayPolicy",
    "InvalidConfig",
    "InvalidGroup",
    "InvalidInput",
    "InvalidQuery",
    "Lease",
    "LostLease",
    "MemoryStorage",
    "NoRoom",
    "Order",
    "Place",
    "PolicyError",
    "PriorityReplayPolicy",
    "Record",
    "ReplayBuffer",
    "ReplayBufferConfig",
    "ReplayPolicy",
    "RolloutState",
    "SampleParams",
    "StalenessReplayPolicy",
    "Status",
    "Storage",
    "StorageError",
    "StorageInUse",
    "StorageUnavailable",
    "SyncReplayBufferConfig",
    "UnreadableData",
    "UnsupportedPayload",
    "WaitTimeout",
    "WrongEventLoop",
    "finish_status",
    "group_bytes",
    "group_staleness",
    "group_status",
    "sample_staleness",
    "stale_threshold",
    "staleness",
    "token_mask",
]
