"""The door of the buffer: how the samples that a caller hands in become an arrival for the storage.

Checked, compared with the prompt as issued, stamped with versions, judged for age, described, in this order. The
samples change hands here: the buffer keeps the very objects (their arrays become read-only), because copying eight of
them for every group would cost more than all the rest. A group that is refused keeps its content; at the most it was
stamped.

For storages that keep no references, what is stored gets their values first, so that sizes count them. A value that is
lost fails its group with that reason, and none of the other groups of the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from forebay.core.issued import settle_changes
from forebay.core.record import Facts, Tags, describe
from forebay.core.references import any_kind, resolve_or_fail, without_references
from forebay.core.rollout import (
    Group,
    RolloutState,
    Status,
    VersionSpans,
    group_status,
    group_tokens,
    lacks_tokens,
    versioned_tokens,
)
from forebay.core.sizes import freeze_arrays
from forebay.core.staleness import EXPIRABLE, Limits, check_versions, expire_members, sample_staleness, stamp
from forebay.core.validate import check_group, plain_columns
from forebay.errors import InvalidGroup, InvalidInput, UnsupportedPayload
from forebay.storage.base import Arrival, Content, Storage

__all__ = [
    "admit",
    "content_of",
    "expire_content",
    "lost_reason",
    "needs_values",
    "resolve_arrivals",
    "resolve_contents",
]


def admit(
    items: Sequence[RolloutState],
    task_name: str,
    *,
    model_step: int | None,
    train_step: int | None,
    limits: Limits,
    tags: Tags | None,
    priority: float | None,
) -> Arrival:
    """The arrival of one group, or InvalidGroup that says what is wrong with it."""
    group_id, attempt = check_group(items, task_name)
    group = tuple(items)
    for index, state in enumerate(group):
        if state.status is Status.COMPLETED and lacks_tokens(state):
            raise InvalidGroup(
                f"member {index} (rollout {state.rollout_id}) of group {group_id} of task {task_name!r} is COMPLETED "
                "without a token; expected tokens in response_ids, a response without response_ids (text only), or "
                "an agent trace (input_ids, labels)"
            )
        settle_changes(state)
        if state.error_msg is not None and not state.error_msg.isascii():
            state.error_msg = state.error_msg.encode(errors="replace").decode()  # messages may hold anything
    if model_step is not None:
        _stamp(group, model_step)
    stale = False
    reset_tokens = 0
    if train_step is not None:
        check_versions(group)
        for state in group:
            state.seq_staleness = sample_staleness(state, train_step)
        if group_status(group) in EXPIRABLE:
            expired = expire_members(group, limits.floors(train_step))
            if limits.retryable:
                if expired is not None:
                    reset_tokens = group_tokens(group) - group_tokens(expired)
                    group = expired
            else:
                stale = expired is not None or group_status(group) is Status.EXPIRED
    return Arrival(
        task_name=task_name,
        content=content_of(group, tags, priority, task_name),
        group_id=group_id,
        attempt=attempt,
        stale=stale,
        reason="stale" if stale else _last_error(group),
        reset_tokens=reset_tokens,
    )


def _stamp(group: Group, model_step: int) -> None:
    spans: VersionSpans = ()
    for state in group:
        tokens = versioned_tokens(state)
        if state.version_spans or not spans or spans[0][1] != tokens:
            spans = stamp(state.version_spans, tokens, model_step)
        state.version_spans = spans
        if len(spans) != 1 or spans[0][0] != model_step:
            spans = ()  # only members of one version and length share their spans


def content_of(group: Group, tags: Tags | None, priority: float | None, task_name: str | None = None) -> Content:
    """A group of the buffer's own as the storage wants it; UnsupportedPayload says what no frame can hold."""
    if priority is not None and (not isinstance(priority, (int, float)) or not abs(priority) <= 1e300):
        raise InvalidInput(f"priority is {priority!r:.80}; expected a finite number")
    freeze_arrays(group)
    try:
        facts = _described(group)
    except UnsupportedPayload as error:
        name = f"group {group[0].group_id} of task {task_name or group[0].task_name!r}"
        raise UnsupportedPayload(f"{name}: {_with_path(group, error)}") from None
    return Content(group, facts, tags, priority)


def _described(group: Group) -> Facts:
    try:
        return describe(group)
    except UnsupportedPayload:
        if not plain_columns(group):
            raise
    return describe(group)


def _with_path(group: Group, error: UnsupportedPayload) -> UnsupportedPayload:
    """What is wrong with a payload, said by the codec, which knows the path of every value."""
    from forebay.codec.frame import encode_group  # imported here: the buffer works without it

    try:
        encode_group(group, [])
    except UnsupportedPayload as found:
        return found
    return error


def expire_content(group: Group, limits: Limits, train_step: int) -> Content | None:
    """What a stored group that is due becomes; None if it is to be dropped.

    If no member is below the floors after all, it stays as it is, with its facts computed anew.
    """
    expired = expire_members(group, limits.floors(train_step))
    if expired is not None and not limits.retryable:
        return None
    return content_of(expired or group, None, None)


def _last_error(group: Group) -> str | None:
    return next((state.error_msg for state in reversed(group) if state.error_msg), None)


# --- references -----------------------------------------------------------------------------------------


def needs_values(storage: Storage) -> bool:
    """Whether groups have to be looked through before they are handed to a storage."""
    return any_kind() and storage.durable


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
