"""For storages that keep no references: what is to be stored gets their values first, so that sizes count them.

A value that is lost fails its group with that reason; it is no reason to refuse the others of a call. Groups that end
on arrival lose their references instead: nobody needs those values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from forebay.intake import content_of
from forebay.references import any_kind, resolve_or_fail, without_references
from forebay.rollout import Group, Status
from forebay.storage.base import Arrival, Content, Storage

__all__ = ["lost_reason", "needs_values", "resolve_arrivals", "resolve_contents"]


def needs_values(storage: Storage) -> bool:
    """Whether groups have to be looked through before they are handed to a storage."""
    return any_kind() and not storage.keeps_references


async def resolve_arrivals(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Arrivals with values for their references."""
    return await asyncio.gather(*[_arrival(arrival) for arrival in arrivals])


async def resolve_contents(contents: Sequence[Content]) -> list[Content]:
    """Contents with values for their references."""
    return await asyncio.gather(*[_content(content) for content in contents])


def lost_reason(before: Content, after: Content) -> str | None:
    """Why a group was failed when it was resolved; None if it was not."""
    if after is before or after.facts.status is not Status.FAILED or before.facts.status is Status.FAILED:
        return None
    return after.group[0].error_msg


async def _arrival(arrival: Arrival) -> Arrival:
    before = arrival.content
    if _ends(arrival):
        return replace(arrival, content=_with_group(before, without_references(before.group)))
    content = await _content(before)
    if content is before:
        return arrival
    return replace(arrival, content=content, reason=lost_reason(before, content) or arrival.reason)


def _ends(arrival: Arrival) -> bool:
    """Whether a group leaves as it comes: too old, or drawn and of no use."""
    useless = arrival.content.facts.status in (Status.FAILED, Status.FILTERED)
    return arrival.stale or (useless and arrival.attempt is not None)


async def _content(content: Content) -> Content:
    return _with_group(content, await resolve_or_fail(content.group))


def _with_group(content: Content, group: Group) -> Content:
    return content if group is content.group else content_of(group, content.tags, content.priority)
