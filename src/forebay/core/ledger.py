"""Records and accounts: where a group can be, how it can end, which moves are legal, and the description of a group.

The ledger is closed (guarantee G1): per task, `issued` equals the groups in flight, buffered and leased plus
those that ended as trained, filtered, failed or discarded. In tokens the same holds with one more exit, `reset`: tokens
that were thrown away while their group stayed. This file is the table of moves and the account of a task; it stores no
groups. A storage keeps the counts in step with its rows and asks here before it moves one.

A record describes a group without its payload; policies, queries, counts and inspection use records only. `describe`
computes the part that follows from the samples whenever a group is put or revised; the rest (place, owner, attempt,
lease, times) belongs to the storage. Records are frozen: a list of them is a consistent snapshot.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec

from forebay.core.payload import group_sizes, remember_prompt
from forebay.core.rollout import (
    DRAWABLE,
    Group,
    RolloutState,
    Status,
    carries_response,
    group_reward,
    group_status,
    group_tokens,
)
from forebay.core.staleness import (
    NO_FLOORS,
    NO_LIMITS,
    Floors,
    Limits,
    group_newest_step,
    group_oldest_step,
    group_token_step,
)
from forebay.errors import InvalidInput


class Place(enum.StrEnum):
    """Where a group that has a row is."""

    IN_FLIGHT = "in_flight"  # a producer holds it
    BUFFERED = "buffered"
    LEASED = "leased"  # a trainer holds it
    ARCHIVED = "archived"  # it ended as trained and is kept for reading; counted only by its end

    __hash__ = str.__hash__


class End(enum.StrEnum):
    """How a group leaves for good."""

    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    DISCARDED = "discarded"

    __hash__ = str.__hash__


class Event(enum.StrEnum):
    """What moves a group."""

    DRAWN = "a prompt is drawn"
    PUT = "a group is put by hand"
    RETURNED = "a drawn group comes back"
    FILTERED = "the filter rejects it"
    SPENT = "its tries are spent"
    STALE = "it is stale and not retryable"
    ABANDONED = "its producer was cancelled or died"
    LEASED = "it is leased to a trainer"
    ACKED = "the trainer acknowledges it"
    REJECTED = "the trainer rejects it"
    NACKED = "the trainer gives it back, or lost its lease"
    TAKEN = "it is taken for good"
    REDRAWN = "it is drawn again"
    TAKEN_FAILED = "it was put by hand as failed, and is taken"
    TAKEN_FILTERED = "it was put by hand as filtered, and is taken"
    DISCARDED = "it is discarded by a query"
    REWOUND = "the weights that were trained on it are lost"

    __hash__ = str.__hash__


Target: TypeAlias = "Place | End"

MOVES: dict[Event, tuple[frozenset[Place | None], Target]] = {
    Event.DRAWN: (frozenset({None}), Place.IN_FLIGHT),
    Event.PUT: (frozenset({None}), Place.BUFFERED),
    Event.RETURNED: (frozenset({Place.IN_FLIGHT}), Place.BUFFERED),
    Event.FILTERED: (frozenset({Place.IN_FLIGHT}), End.FILTERED),
    Event.SPENT: (frozenset({Place.IN_FLIGHT}), End.FAILED),
    # A group put by hand can be stale on arrival: it is issued and discarded in one step.
    Event.STALE: (frozenset({None, Place.IN_FLIGHT, Place.BUFFERED}), End.DISCARDED),
    Event.ABANDONED: (frozenset({Place.IN_FLIGHT}), Place.BUFFERED),
    Event.LEASED: (frozenset({Place.BUFFERED}), Place.LEASED),
    Event.ACKED: (frozenset({Place.LEASED}), End.TRAINED),
    Event.REJECTED: (frozenset({Place.LEASED}), End.DISCARDED),
    Event.NACKED: (frozenset({Place.LEASED}), Place.BUFFERED),
    Event.TAKEN: (frozenset({Place.BUFFERED}), End.TRAINED),
    Event.REDRAWN: (frozenset({Place.BUFFERED}), Place.IN_FLIGHT),
    Event.TAKEN_FAILED: (frozenset({Place.BUFFERED}), End.FAILED),
    Event.TAKEN_FILTERED: (frozenset({Place.BUFFERED}), End.FILTERED),
    Event.DISCARDED: (frozenset({Place.BUFFERED}), End.DISCARDED),
    # The one way back from an end: durable storages archive what no saved weights were trained on yet.
    Event.REWOUND: (frozenset({Place.ARCHIVED}), Place.BUFFERED),
}
"""From which places an event may move a group, and where to. None: it has no row yet."""


def check_move(event: Event, place: Place | None) -> Target:
    """Where `event` moves a group that is at `place`; InvalidInput if it may not."""
    origins, target = MOVES[event]
    if place not in origins:
        allowed = ", ".join(sorted(str(origin) for origin in origins))
        raise InvalidInput(f"{event.value!r} moves groups from {allowed}; this one is at {place}")
    return target


_TAKEN = {
    **dict.fromkeys(DRAWABLE, Event.REDRAWN),
    Status.FAILED: Event.TAKEN_FAILED,
    Status.FILTERED: Event.TAKEN_FILTERED,
}


def take_event(status: Status) -> Event:
    """The event of taking a group of this status for good, without a lease."""
    return _TAKEN.get(status, Event.TAKEN)


def arrival_event(place: Place | None, status: Status, *, stale: bool) -> Event:
    """The event of putting a group of this status: by hand (it has no place yet), or back from its producer."""
    if stale:
        return Event.STALE
    if place is None:
        return Event.PUT
    if status is Status.FILTERED:
        return Event.FILTERED
    return Event.SPENT if status is Status.FAILED else Event.RETURNED


class Clock(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New steps, limits and epoch of a task; None leaves one as it is. Steps and epochs only move forward."""

    train_step: int | None = None
    model_step: int | None = None
    limits: Limits | None = None
    epoch: int | None = None


OTHER_REASONS = "(other reasons)"
MAX_REASONS = 256
_MAX_REASON_CHARACTERS = 200


def kept_reason(end: End, reason: str | None) -> str | None:
    """Why a group ended, as a string of a bounded length: messages may hold anything. None if it was trained."""
    if end is End.TRAINED:
        return None
    text = (reason or end.value)[:_MAX_REASON_CHARACTERS]
    return text if text.isascii() else text.encode(errors="replace").decode()


class Account(msgspec.Struct, kw_only=True):
    """The counts of a task that its rows do not have: how many groups were issued, how they ended, and why."""

    issued: int = 0
    cursor: int = 0  # groups drawn from the data set; the group_id of the next one
    next_hand_id: int = -1  # the group_id of the next group put by hand without one
    ended: dict[End, int] = msgspec.field(default_factory=dict)
    ended_tokens: dict[End, int] = msgspec.field(default_factory=dict)
    reasons: dict[str, int] = msgspec.field(default_factory=dict)
    issued_tokens: int = 0  # generated tokens that arrived with groups, counted as they arrive
    sizes: dict[int, int] = msgspec.field(default_factory=dict)  # responses by rounded size; see `capacity`
    reset_tokens: int = 0  # issued tokens that were thrown away while their group stayed: too old, or dropped
    train_step: int | None = None  # the latest step that groups of the task were asked for
    model_step: int | None = None  # of the weights that generate now
    limits: Limits = NO_LIMITS
    source_state: bytes | None = None  # of the data set, as of the cursor: `fingerprint.SourceState`
    epoch: int = 0  # draws of an earlier epoch are refused; a pause and a resume raise it
    completed: int = 0  # drawn groups that came back complete
    failures: int = 0  # attempts that failed
    saved_step: int | None = None  # of the last save of this task alone; else that of the whole store counts
    plan: bytes | None = None  # what the managers of the task agree on: `manager.run.Run`
    plan_revision: int = 0  # how often it was written

    @property
    def floors(self) -> Floors:
        """The model steps below which groups of the task are too old."""
        return NO_FLOORS if self.train_step is None else self.limits.floors(self.train_step)

    def advance(self, clock: Clock) -> bool:
        """Move the clocks and replace the limits as far as `clock` gives them; whether anything changed."""
        before = self.train_step, self.model_step, self.limits, self.epoch
        self.train_step = _later(self.train_step, clock.train_step)
        self.model_step = _later(self.model_step, clock.model_step)
        self.limits = self.limits if clock.limits is None else clock.limits
        self.epoch = max(self.epoch, clock.epoch or 0)
        return before != (self.train_step, self.model_step, self.limits, self.epoch)

    def rewind(self, model_step: int) -> None:
        """Set the clocks back to the weights of `model_step`: the next train step is the one after it."""
        if self.train_step is not None:
            self.train_step = min(self.train_step, model_step + 1)
        if self.model_step is not None:
            self.model_step = min(self.model_step, model_step)

    def end(self, end: End, tokens: int, reason: str | None, *, groups: int = 1) -> None:
        """Book groups out. Reasons are kept up to a number of distinct ones: messages may hold anything."""
        kept = kept_reason(end, reason)
        if kept is not None and kept not in self.reasons and len(self.reasons) >= MAX_REASONS:
            kept = OTHER_REASONS
        self.ended[end] = self.ended.get(end, 0) + groups
        self.ended_tokens[end] = self.ended_tokens.get(end, 0) + tokens
        if kept is not None:
            self.reasons[kept] = self.reasons.get(kept, 0) + groups
            if not self.reasons[kept]:
                del self.reasons[kept]  # all groups of this reason were put back


def _later(known: int | None, given: int | None) -> int | None:
    return given if known is None else known if given is None else max(known, given)


def arrival_tokens(before: int, arriving: int, kept: int) -> tuple[int, int]:
    """The tokens that an arrival issues, and those that it resets.

    `before`: in its row until now (0: it has none). `arriving`: as the producer gave it. `kept`: as it is stored.

    >>> arrival_tokens(0, 10, 0), arrival_tokens(4, 10, 10), arrival_tokens(10, 3, 3)
    ((10, 10), (6, 0), (0, 7))
    """
    return max(0, arriving - before), max(0, before - arriving) + arriving - kept


class GroupEnd(msgspec.Struct, frozen=True, gc=False):
    """A group left for good. (task_name, group_id, delivery) names the end; a durable store may report it twice."""

    task_name: str
    group_id: int
    delivery: int  # how often it was leased
    session_ids: tuple[int | str, ...]  # of the members that have one
    end: End
    reason: str | None  # why it was filtered, failed or discarded
    train_step: int | None  # for which it was leased


LedgerLine: TypeAlias = "dict[str, int]"


def close_line(account: Account, places: Mapping[Place, int], *, tokens: bool = False) -> LedgerLine:
    """The ledger of one task, in groups or in generated tokens; the latter has `reset` as well."""
    ended = account.ended_tokens if tokens else account.ended
    line = {str(place): places.get(place, 0) for place in (Place.IN_FLIGHT, Place.BUFFERED, Place.LEASED)}
    line |= {str(end): ended.get(end, 0) for end in End}
    if tokens:
        return {"issued": account.issued_tokens, **line, "reset": account.reset_tokens}
    return {"issued": account.issued, **line}


def open_ledger(
    account: Account, places: Mapping[Place, int], tokens: Mapping[Place, int], task_name: str
) -> Iterator[str]:
    """Where the ledger of a task does not close, in groups and in tokens."""
    for unit, line in (("groups", close_line(account, places)), ("tokens", close_line(account, tokens, tokens=True))):
        held = sum(line.values()) - line["issued"]
        if held != line["issued"]:
            yield f"task {task_name!r} issued {line['issued']:,} {unit}, but {held:,} are accounted for"


def check_closed(account: Account, places: dict[Place, int], tokens: dict[Place, int], task_name: str) -> None:
    """InvalidInput unless the ledger of a task that is restored closes."""
    for problem in open_ledger(account, places, tokens, task_name):
        raise InvalidInput(f"{problem}; nothing restored")


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
    response_bytes: int  # the part of `bytes` that is not the prompt
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
    owner: str | None = None  # the owner that holds it, in flight or leased
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
    """The report of a group that ends."""
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
    """A record with its payload, as it is stored; `present` makes the copies that are handed out."""

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
    """Write the identity of a group into its members, to store it; a stored group belongs to no attempt."""
    for state in group:
        state.task_name = task_name
        state.group_id = group_id
        state.attempt = None


def number_rollouts(group: Sequence[RolloutState], group_id: int) -> None:
    """Number the members of a group that is handed out, if they have no number yet; stored groups have none."""
    if group[0].rollout_id is None:
        samples = len(group)
        for index, state in enumerate(group):
            state.rollout_id = group_id * samples + index


def present(row: Row) -> list[RolloutState]:
    """Shallow copies of the members as they are handed out, corrected by the record.

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
            # A member with a response keeps its status, which decides how it is continued.
            if state.status is not Status.COMPLETED and not carries_response(state):
                state.status = Status.ABORTED
    return members


def separate_extra_fields(members: Sequence[RolloutState]) -> None:
    """Copy the extra fields, which members share in the buffer: the caller may change them."""
    for state in members:
        state.extra_fields = state.extra_fields.copy()


_MAX_TAGS = 64


def check_tags(tags: Tags | None) -> Tags:
    """A copy of the tags; InvalidInput unless all are named plain values."""
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
            raise InvalidInput(f"a tag is named {name!r}; expected a non-empty string")
        if value is not None and type(value) not in (str, int, float, bool):
            raise InvalidInput(f"tag {name!r} is a {type(value).__name__}; expected a string, a number, a bool or None")
        if type(value) is float and value != value:
            raise InvalidInput(f"tag {name!r} is not a number (nan); expected one that can be compared")
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise InvalidInput(f"tag {name!r} is {value}; expected an integer of at most 64 bits")
    return dict(tags)
