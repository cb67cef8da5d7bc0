"""What is known of a group without opening it: its record.

Policies, queries, counts and inspection work on records and never touch a payload. `describe` computes the
part that follows from the samples, in one place, whenever a group is put or revised; the rest (place, owner,
attempt, lease, times) belongs to the storage. Records are frozen: a change makes a new one, so that a list of
them is a consistent snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

from forebay.core.ledger import End, GroupEnd, Place, kept_reason
from forebay.core.payload import group_sizes, remember_prompt
from forebay.core.rollout import Group, RolloutState, Status, carries_response, group_reward, group_status, group_tokens
from forebay.core.staleness import Floors, group_newest_step, group_oldest_step, group_token_step
from forebay.errors import InvalidInput

__all__ = [
    "Facts",
    "Record",
    "Row",
    "Scalar",
    "SessionIds",
    "Tags",
    "check_tags",
    "describe",
    "group_end",
    "identify",
    "is_fresh",
    "number_rollouts",
    "present",
    "separate_extra_fields",
]

Scalar: TypeAlias = str | int | float | bool | None
Tags: TypeAlias = Mapping[str, Scalar]

SessionIds: TypeAlias = tuple[int | str, ...]

NO_TAGS: Tags = {}


class Facts(msgspec.Struct, frozen=True, gc=False):
    """What follows from the samples of a group alone."""

    status: Status
    samples: int
    tokens: int
    bytes: int
    response_bytes: int  # of `bytes`, what is not the prompt's
    num_tries: int
    reward: float | None
    oldest_step: int | None
    newest_step: int | None
    token_step: int | None
    given_staleness: int
    unjudged: int  # 1 if nothing is left to generate, but reward and filter are still to come; else 0
    session_ids: SessionIds = ()


class Record(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The metadata of one group."""

    uid: int
    timestamp_id: int  # number of its arrival; order ties resolve by it
    task_name: str
    group_id: int
    status: Status
    place: Place
    samples: int
    tokens: int
    bytes: int
    num_tries: int
    reward: float | None
    oldest_step: int | None
    newest_step: int | None
    token_step: int | None  # least over the members of the newest trainable step; see `staleness`
    given_staleness: int  # `seq_staleness` as handed in, of a group without versions
    unjudged: int = 0  # see `Facts`
    created_at: float
    moved_at: float  # when it came to its place
    priority: float = 0.0
    attempt: int = 0  # how often it was handed to a producer; fences the earlier ones
    deliveries: int = 0  # how often it was leased to a trainer
    revision: int = 0  # counts the changes of status and payload
    owner: str | None = None  # who holds it, in flight or leased
    lease_id: str | None = None
    train_step: int | None = None  # for which it is leased, or was trained
    reserved_bytes: int = 0  # the size that is kept free for it; see `capacity`
    session_ids: SessionIds = ()  # of the members that have one
    tags: Tags = NO_TAGS

    @property
    def reserve(self) -> int:
        """The bytes that it may still grow by within its reservation."""
        return max(0, self.reserved_bytes - self.bytes)


def group_end(record: Record, end: End, reason: str | None) -> GroupEnd:
    """What is told of a group that ends."""
    return GroupEnd(
        record.task_name,
        record.group_id,
        record.deliveries,
        record.session_ids,
        end,
        kept_reason(end, reason),
        record.train_step,
    )


class Row(msgspec.Struct, frozen=True, gc=False):
    """A record with its payload, as it is stored; `present` makes from it what is handed out."""

    record: Record
    group: Group


def describe(group: Sequence[RolloutState]) -> Facts:
    """The facts of a checked group."""
    oldest = group_oldest_step(group)
    size, response_bytes = group_sizes(group)
    versioned = oldest is not None
    return Facts(
        group_status(group),
        len(group),
        group_tokens(group),
        size,
        response_bytes,
        max([state.num_tries for state in group]),
        group_reward(group),
        oldest,
        group_newest_step(group) if versioned else None,
        group_token_step(group) if versioned else None,
        0 if versioned else max([state.seq_staleness for state in group]),
        _waits_for_judging(group),
        tuple([state.session_id for state in group if state.session_id is not None]),
    )


def _waits_for_judging(group: Sequence[RolloutState]) -> int:
    waiting = [state.unjudged for state in group if state.status is not Status.COMPLETED]
    return int(bool(waiting) and all(waiting))


def is_fresh(record: Record, floors: Floors | None) -> bool:
    """Whether no member of the group is below the floors."""
    if floors is None:
        return True
    if floors.oldest is not None and record.oldest_step is not None and record.oldest_step < floors.oldest:
        return False
    return floors.token is None or record.token_step is None or record.token_step >= floors.token


def identify(group: Group, task_name: str, group_id: int) -> None:
    """Give the members of a group its identity as it is stored; no hand-out holds it."""
    for state in group:
        state.task_name = task_name
        state.group_id = group_id
        state.attempt = None


def number_rollouts(group: Sequence[RolloutState], group_id: int) -> None:
    """Number the members of a group that is handed out, if nobody else did; stored groups do without."""
    if group[0].rollout_id is None:
        samples = len(group)
        for index, state in enumerate(group):
            state.rollout_id = group_id * samples + index


def present(row: Row) -> list[RolloutState]:
    """Shallow copies of the members as they are handed out, with what the record knows better.

    The record is the authority on the attempt, and on a status that a move of the whole group brought about
    (abandoned by its producer, archived).
    """
    record = row.record
    members = [state.__copy__() for state in row.group]
    number_rollouts(members, record.group_id)
    if record.place is Place.IN_FLIGHT:
        for state in members:
            state.attempt = record.attempt
        remember_prompt(members)
    separate_extra_fields(members)
    if record.status is Status.ARCHIVED:
        for state in members:
            state.status = Status.ARCHIVED
    elif record.status is Status.ABORTED:
        for state in members:
            # One with a response has the status that decides what becomes of it.
            if state.status is not Status.COMPLETED and not carries_response(state):
                state.status = Status.ABORTED
    return members


def separate_extra_fields(members: Sequence[RolloutState]) -> None:
    """Siblings share their extra fields in the buffer; whoever gets them writes into them."""
    for state in members:
        state.extra_fields = state.extra_fields.copy()


_MAX_TAGS = 64


def check_tags(tags: Tags | None) -> Tags:
    """Tags as a dict of its own; InvalidInput unless all are named plain values."""
    if not isinstance(tags, Mapping):
        if tags is None:
            return NO_TAGS
        raise InvalidInput(f"tags are {tags!r:.80}; expected a dict of names and plain values")
    if not tags:
        return NO_TAGS
    if len(tags) > _MAX_TAGS:
        raise InvalidInput(f"{len(tags)} tags on one group; expected at most {_MAX_TAGS}")
    for name, value in tags.items():
        if type(name) is not str or not name:
            raise InvalidInput(f"a tag is named {name!r}; expected a text that is not empty")
        if value is not None and type(value) not in (str, int, float, bool):
            raise InvalidInput(f"tag {name!r} is a {type(value).__name__}; expected a text, a number, a bool or None")
        if type(value) is float and value != value:
            raise InvalidInput(f"tag {name!r} is not a number (nan); expected one that can be compared")
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise InvalidInput(f"tag {name!r} is {value}; expected a whole number of at most 64 bits")
    return dict(tags)
