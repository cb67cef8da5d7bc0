"""The capacity of a buffer, and how much of it a group that is being generated will need.

Capacity is reserved when a group is issued: the bytes of its prompt, and for every member the 99th percentile of the
size of a response, measured in the groups of its task. The reservation is part of the group's record and gives way to
the true size when the group is back. So groups exceed `max_bytes` by at most what they grow beyond their reservations.
One group can start whenever nothing is in flight and its prompt fits: its reservation is then at most the free space,
so that one long response does not keep shorter ones out. Pure: storages keep the sizes by task (`Account.sizes`).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from forebay.core.ledger import Event, Facts, take_event
from forebay.core.policy import ARRIVAL, Choose, Order
from forebay.core.rollout import Status
from forebay.errors import InvalidConfig, NoRoom

EXPECT_GROUP_BYTES = 1 << 20
"""The assumed size of the responses of a group before the first group of its task is back."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that an owner opens a storage with."""

    order: Order = ARRIVAL
    choose: Choose | None = None
    max_groups: int | None = None
    max_bytes: int | None = None
    expect_group_bytes: int = EXPECT_GROUP_BYTES
    keep_trained: int = 0


class Usage(msgspec.Struct, frozen=True):
    """The used capacity: groups in flight, buffered and leased, and their bytes.

    `reserved`: bytes that are kept free for responses that are still to be generated.
    """

    groups: int
    bytes: int
    reserved: int


Sizes = Mapping[int, int]

MAX_SIZES = 1_024
"""At this number of responses all counts are halved, so that newer sizes weigh more."""


def response_size(facts: Facts) -> int | None:
    """The size of one response of a group, averaged over its members and rounded up; None if it has none.

    Rounded to one of four sizes for every power of two: at most a quarter too large, never too small.
    """
    if facts.status not in (Status.COMPLETED, Status.FILTERED):
        return None
    return rounded_up(-(-facts.response_bytes // facts.samples))


def rounded_up(size: int) -> int:
    """The next of four sizes for every power of two.

    >>> [rounded_up(size) for size in (0, 7, 9, 1_000, 1_025)]
    [0, 7, 10, 1024, 1280]
    """
    shift = max(0, size.bit_length() - 3)
    return -(-size >> shift) << shift


def note_size(sizes: dict[int, int], size: int) -> None:
    """Count one more response of a rounded size."""
    sizes[size] = sizes.get(size, 0) + 1
    if sum(sizes.values()) >= MAX_SIZES:
        kept = {known: count // 2 for known, count in sizes.items() if count > 1}
        sizes.clear()
        sizes.update(kept)


def response_size_p99(sizes: Sizes) -> int | None:
    """The 99th percentile of the responses seen; None before the first one.

    >>> response_size_p99({10: 990, 5_120: 10}), response_size_p99({10: 989, 5_120: 11}), response_size_p99({})
    (10, 5120, None)
    """
    above = sum(sizes.values()) // 100
    for size in sorted(sizes, reverse=True):
        above -= sizes[size]
        if above < 0:
            return size
    return None


def reservation(facts: Facts, sizes: Sizes, settings: Settings, usage: Usage, in_flight: int) -> int:
    """The bytes that are reserved for a prompt when it is issued.

    While no group is in flight it is at most the free space, and at least the size of the prompt.
    """
    if settings.max_bytes is None:
        return 0
    most = settings.max_bytes if in_flight else settings.max_bytes - usage.bytes - usage.reserved
    response = response_size_p99(sizes)
    grows = settings.expect_group_bytes if response is None else facts.samples * response
    return max(facts.bytes, min(facts.bytes - facts.response_bytes + grows, most))


def reserved_after(reserved_bytes: int, facts: Facts) -> int:
    """The reservation of a group that is stored again.

    A group that is still to be generated keeps it. A complete group reserves its true size: if it expires, the
    capacity to generate it again is still reserved.
    """
    return reserved_bytes if take_event(facts.status) is Event.REDRAWN else facts.bytes


def fits(usage: Usage, settings: Settings, groups: int, size: int) -> bool:
    """Whether this many more groups, of this many bytes together, fit."""
    max_groups, max_bytes = settings.max_groups, settings.max_bytes
    return (max_groups is None or usage.groups + groups <= max_groups) and (
        max_bytes is None or usage.bytes + usage.reserved + size <= max_bytes
    )


def check_ever_fits(settings: Settings, groups: int, size: int = 0) -> None:
    """InvalidConfig if this many groups, of this many bytes together, do not even fit into an empty buffer."""
    for limit, needed, unit in ((settings.max_groups, groups, "groups"), (settings.max_bytes, size, "bytes")):
        if limit is not None and needed > limit:
            raise InvalidConfig(
                f"{needed:,} {unit} can never fit into a buffer of max_{unit}={limit}; raise max_{unit}, or put or ask "
                "for less at once"
            )


def check_room(usage: Usage, settings: Settings, groups: int, size: int) -> None:
    """NoRoom unless this many more groups, of this many bytes together, fit."""
    if not fits(usage, settings, groups, size):
        raise NoRoom(
            f"no capacity for {groups} more groups of {size:,} bytes: {usage.groups} groups use {usage.bytes:,} bytes "
            f"and reserve {usage.reserved:,} more (max_groups={settings.max_groups}, max_bytes={settings.max_bytes})",
            groups,
            size,
        )
