"""Rules that every storage backend shares: how records follow from groups, which owner may return one, what fits.

Pure functions over records and accounts. A backend finds and changes rows; what is allowed, and what a row becomes, is
decided here, so that all backends answer alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from forebay.core.capacity import Settings, Usage, fits, reservation, reserved_after
from forebay.core.ledger import NO_TAGS, Account, End, Event, Facts, Place, Record, check_closed, check_move, take_event
from forebay.core.rollout import Status
from forebay.core.staleness import NO_LIMITS
from forebay.errors import DuplicateGroup, EpochMoved, InvalidConfig, InvalidInput, LostLease
from forebay.storage.base import Arrival, Claim, Purpose, Share
from forebay.storage.values import Content

_SHARED = tuple(name for name in Facts.__struct_fields__ if name in Record.__struct_fields__)


# --- records ------------------------------------------------------------------------------------------


def new_record(content: Content, *, now: float, reserved_bytes: int = 0, **fields: Any) -> Record:
    """The record of a group that had none; `fields` are those of `Record` that do not follow from its content."""
    return Record(
        created_at=now,
        moved_at=now,
        priority=0.0 if content.priority is None else content.priority,
        reserved_bytes=reserved_after(reserved_bytes, content.facts),
        tags=NO_TAGS if content.tags is None else content.tags,
        **_described(content.facts),
        **fields,
    )


def revised_record(record: Record, content: Content) -> Record:
    """The record of a group whose samples changed; tags and priority stay unless they are given."""
    facts = content.facts
    return replace(
        record,
        revision=record.revision + 1,
        reserved_bytes=reserved_after(record.reserved_bytes, facts),
        tags=record.tags if content.tags is None else content.tags,
        priority=record.priority if content.priority is None else content.priority,
        **_described(facts),
    )


def _described(facts: Facts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in _SHARED}


# Of a group that moves from one place to another.


def returned_record(record: Record, content: Content, timestamp_id: int, now: float) -> Record:
    """A group in flight that its producer brings back."""
    return replace(
        revised_record(record, content), timestamp_id=timestamp_id, place=Place.BUFFERED, owner=None, moved_at=now
    )


def ended_record(record: Record, content: Content) -> Record:
    """The last record of a group in flight that ends when its producer brings it back; its payload is not stored."""
    facts = content.facts
    return replace(record, tokens=facts.tokens, status=facts.status, session_ids=facts.session_ids)


def claimed_record(record: Record, claim: Claim, now: float) -> Record:
    """A buffered group that a claim leases, or hands to a producer."""
    if claim.purpose is not Purpose.LEASE:
        return replace(record, place=Place.IN_FLIGHT, owner=claim.owner, attempt=record.attempt + 1, moved_at=now)
    return replace(
        record,
        place=Place.LEASED,
        owner=claim.owner,
        lease_id=claim.lease_id,
        train_step=claim.train_step,
        deliveries=record.deliveries + 1,
        moved_at=now,
    )


def unclaimed_record(record: Record) -> Record:
    """A claimed group that goes back because its caller never learned of the claim."""
    deliveries = record.deliveries - (record.place is Place.LEASED)
    return replace(nacked_record(record, record.moved_at), deliveries=deliveries)


def nacked_record(record: Record, now: float) -> Record:
    """A leased group that goes back to its old place in the order."""
    return replace(record, place=Place.BUFFERED, owner=None, lease_id=None, train_step=None, moved_at=now)


def abandoned_record(record: Record, timestamp_id: int, now: float) -> Record:
    """A group in flight whose producer gave it up; it arrives again."""
    return replace(
        record,
        place=Place.BUFFERED,
        status=Status.ABORTED,
        owner=None,
        timestamp_id=timestamp_id,
        revision=record.revision + 1,
        moved_at=now,
    )


def archived_record(record: Record, now: float) -> Record:
    """A group that ended as trained, and is kept."""
    return replace(
        record,
        place=Place.ARCHIVED,
        status=Status.ARCHIVED,
        owner=None,
        lease_id=None,
        revision=record.revision + 1,
        moved_at=now,
    )


def rewound_record(record: Record, status: Status, now: float) -> Record:
    """An archived group that is buffered again, with the status of its samples."""
    return replace(
        record, place=Place.BUFFERED, status=status, train_step=None, revision=record.revision + 1, moved_at=now
    )


# --- moves --------------------------------------------------------------------------------------------


def end_of(event: Event, place: Place) -> End:
    """The end that an event is for a group at this place."""
    end = check_move(event, place)
    assert isinstance(end, End)
    return end


def claim_event(purpose: Purpose, status: Status) -> Event:
    """The event that claiming a group of this status is."""
    if purpose is Purpose.LEASE:
        return Event.LEASED
    return Event.REDRAWN if purpose is Purpose.DRAW else take_event(status)


def check_return(arrival: Arrival, group_id: int, found: Record | None, account: Account | None, owner: str) -> bool:
    """Whether an arrival brings back the row that was found under its identity; False: it was put by hand.

    LostLease if the arrival's attempt no longer holds the row; DuplicateGroup if the group exists, or was drawn and
    has ended.
    """
    name = f"group {group_id} of task {arrival.task_name!r}"
    attempt = arrival.attempt
    if found is not None and found.place is Place.IN_FLIGHT:
        if attempt == found.attempt or (attempt is None and found.owner == owner):
            return True
        raise LostLease(
            f"{name} is in flight under attempt {found.attempt}, held by {found.owner}; attempt {attempt} of {owner} "
            "no longer holds it: drop this result"
        )
    if attempt is not None:
        where = "has ended" if found is None else f"is {found.place}"
        raise LostLease(f"{name} {where}; attempt {attempt} no longer holds it: drop this result")
    if found is not None:
        raise DuplicateGroup(f"{name} already exists: it is {found.place}")
    if account is not None and 0 <= group_id < account.cursor:
        raise DuplicateGroup(f"{name} was drawn and has already ended")
    return False


def duplicate_in_put(task_name: str, group_id: int) -> DuplicateGroup:
    """The error for one identity that appears twice in a put."""
    return DuplicateGroup(f"group {group_id} of task {task_name!r} appears twice in one put")


def drawn_by_hand(task_name: str, group_id: int) -> DuplicateGroup:
    """The error for a prompt whose group id was put by hand."""
    return DuplicateGroup(
        f"group {group_id} of task {task_name!r} is to be drawn, but was put by hand; groups that are put by hand "
        "beside a sampler must have no group_id, or a negative one"
    )


def lost_lease(lost: int, groups: int, lease_id: str) -> LostLease:
    """The error for settling groups that a lease no longer holds."""
    return LostLease(
        f"{lost} of {groups} groups of lease {lease_id} were taken away (its holder was thought dead, or the buffer "
        "was closed or restored): nothing was settled, and these groups are handed out again"
    )


def share_left(share: Share, task_name: str, epoch: int, drawn: int) -> int:
    """How many groups of a task a share still allows to draw. EpochMoved unless the task is in its epoch.

    `drawn`: the groups of the task that are produced or in flight.
    """
    if share.epoch != epoch:
        raise EpochMoved(task_name, share.epoch, epoch)
    return max(0, share.most - drawn)


# --- capacity -----------------------------------------------------------------------------------------


def fitting(
    contents: Sequence[Content], sizes: Mapping[int, int], usage: Usage, settings: Settings, in_flight: int
) -> list[int]:
    """The reservations of the prompts that fit, from the first one on; see `capacity.reservation`.

    `in_flight`: the number of groups of all tasks that are in flight.
    """
    reserved: list[int] = []
    needed = 0
    for content in contents:
        size = reservation(content.facts, sizes, settings, usage, in_flight + len(reserved))
        needed += size
        if not fits(usage, settings, len(reserved) + 1, needed):
            break
        reserved.append(size)
    return reserved


def other_settings(what: str, present: object, wanted: object) -> InvalidConfig:
    """The error for opening a storage with other settings than its owners have."""
    return InvalidConfig(
        f"{what} is open with {present}, and cannot be opened with {wanted}; all buffers on one storage need the same "
        "policy and limits"
    )


def same_settings(one: Settings, other: Settings) -> bool:
    """Whether two owners open a storage alike."""
    # Two policies of one class are the same policy: bound methods only compare equal within one object.
    chooses = [getattr(settings.choose, "__func__", settings.choose) for settings in (one, other)]
    return chooses[0] is chooses[1] and replace(one, choose=None) == replace(other, choose=None)


# --- streams ------------------------------------------------------------------------------------------


def copied(account: Account) -> Account:
    """An account that shares nothing with the original."""
    changes: dict[str, Any] = {
        name: dict(getattr(account, name)) for name in ("ended", "ended_tokens", "reasons", "sizes")
    }
    return replace(account, **changes)


def is_used(accounts: Mapping[str, Account]) -> bool:
    """Whether groups were ever issued to a storage; clocks and limits alone do not count."""
    return any(account.issued for account in accounts.values())


def restored_accounts(saved: Mapping[str, Account], present: Mapping[str, Account]) -> dict[str, Account]:
    """The accounts of a storage that a stream is restored into; limits, epochs and plans that were set there stay."""
    accounts = {task_name: replace(copied(account), plan=None, saved_step=None) for task_name, account in saved.items()}
    for task_name, before in present.items():
        account = accounts.setdefault(task_name, copied(before))
        if before.limits != NO_LIMITS:
            account.limits = before.limits
        account.epoch = max(account.epoch, before.epoch)
        account.plan, account.plan_revision = before.plan, before.plan_revision
    return accounts


class StreamCheck:
    """Checks the rows of a stream that is restored: in order, each identity once, ledgers closed at the end.

    InvalidInput says what is wrong; the caller then restores nothing.
    """

    def __init__(self, accounts: Mapping[str, Account], next_uid: int, next_timestamp_id: int) -> None:
        self._accounts = accounts
        self._next_uid = next_uid
        self._next_timestamp_id = next_timestamp_id
        self._last_uid = 0
        self._seen: set[tuple[str, int]] = set()
        self._places: dict[str, tuple[dict[Place, int], dict[Place, int]]] = {name: ({}, {}) for name in accounts}

    def row(self, record: Record) -> None:
        """Check the next row."""
        if not self._last_uid < record.uid < self._next_uid or record.timestamp_id >= self._next_timestamp_id:
            raise InvalidInput(
                f"row {record.uid} is out of order after row {self._last_uid}, below {self._next_uid}; nothing restored"
            )
        identity = (record.task_name, record.group_id)
        if identity in self._seen:
            raise InvalidInput(
                f"group {record.group_id} of task {record.task_name!r} appears twice in the stream; nothing restored"
            )
        if record.task_name not in self._accounts:
            raise InvalidInput(
                f"row {record.uid} is of task {record.task_name!r}, which has no account; nothing restored"
            )
        self._last_uid = record.uid
        self._seen.add(identity)
        groups, tokens = self._places[record.task_name]
        groups[record.place] = groups.get(record.place, 0) + 1
        tokens[record.place] = tokens.get(record.place, 0) + record.tokens

    def end(self) -> None:
        """Check that the rows close the ledgers of the accounts."""
        for task_name, account in self._accounts.items():
            groups, tokens = self._places[task_name]
            check_closed(account, groups, tokens, task_name)
