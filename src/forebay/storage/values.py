"""Plain values that operations of a storage take and return."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

import msgspec

from forebay.core.ledger import Account, Facts, Place, Row, Tags
from forebay.core.rollout import Group, Status


class Content(msgspec.Struct, frozen=True, gc=False):
    """A group to be stored. `facts` are those of `describe(group)`; None leaves tags or priority as they are.

    `frame` is the group as bytes (`codec.frame.encode_group`), for backends that store those; the backend makes it.
    """

    group: Group
    facts: Facts
    tags: Tags | None = None
    priority: float | None = None
    frame: bytes | None = None


class Revision(msgspec.Struct, frozen=True, gc=False):
    """A change of a buffered row; it applies only if the row still has this revision.

    `content` None: the group is stale and not retryable; it ends as discarded.
    """

    uid: int
    revision: int
    content: Content | None


class Holding(msgspec.Struct, frozen=True):
    """The groups of one task that one owner holds at one place."""

    task_name: str
    place: Place
    owner: str
    groups: int
    oldest_group_id: int
    oldest_age_s: float


class Reaped(msgspec.Struct, frozen=True):
    """Groups that came back from dead owners, by task, and the seconds until the next owner's deadline."""

    returned: Mapping[str, int]
    next_s: float | None


class Snapshot(msgspec.Struct, frozen=True):
    """Everything in a storage at one moment. `rows` streams in order of uid, once; close it if you stop early.

    A row is good until the next one is asked for.
    """

    accounts: Mapping[str, Account]
    next_uid: int
    next_timestamp_id: int
    rows: AsyncGenerator[Row, None]


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """What a wait is for: n fresh buffered groups of a status by task, and capacity for groups and bytes."""

    wants: Mapping[str, int] = {}
    status: Status = Status.COMPLETED
    room_groups: int = 0
    room_bytes: int = 0
