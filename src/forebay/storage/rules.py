"""How the record of a group follows from what was put: for a new row, and for one that is put or revised again."""

from __future__ import annotations

from msgspec.structs import replace

from forebay.core.capacity import reserved_after
from forebay.core.ledger import Place
from forebay.core.record import NO_TAGS, Record
from forebay.storage.base import Content

__all__ = ["new_record", "revised_record"]


def new_record(
    content: Content,
    *,
    uid: int,
    timestamp_id: int,
    task_name: str,
    group_id: int,
    place: Place,
    now: float,
    owner: str | None = None,
    attempt: int = 0,
    reserved_bytes: int = 0,
) -> Record:
    """The record of a group that had none."""
    facts = content.facts
    return Record(
        uid=uid,
        timestamp_id=timestamp_id,
        task_name=task_name,
        group_id=group_id,
        status=facts.status,
        place=place,
        samples=facts.samples,
        tokens=facts.tokens,
        bytes=facts.bytes,
        num_tries=facts.num_tries,
        reward=facts.reward,
        oldest_step=facts.oldest_step,
        newest_step=facts.newest_step,
        token_step=facts.token_step,
        given_staleness=facts.given_staleness,
        unjudged=facts.unjudged,
        created_at=now,
        moved_at=now,
        priority=0.0 if content.priority is None else content.priority,
        attempt=attempt,
        owner=owner,
        reserved_bytes=reserved_after(reserved_bytes, facts),
        session_ids=facts.session_ids,
        tags=NO_TAGS if content.tags is None else content.tags,
    )


def revised_record(record: Record, content: Content) -> Record:
    """The record of a group whose samples changed; tags and priority stay unless they are given anew."""
    facts = content.facts
    return replace(
        record,
        status=facts.status,
        samples=facts.samples,
        tokens=facts.tokens,
        bytes=facts.bytes,
        num_tries=facts.num_tries,
        reward=facts.reward,
        oldest_step=facts.oldest_step,
        newest_step=facts.newest_step,
        token_step=facts.token_step,
        given_staleness=facts.given_staleness,
        unjudged=facts.unjudged,
        revision=record.revision + 1,
        reserved_bytes=reserved_after(record.reserved_bytes, facts),
        session_ids=facts.session_ids,
        tags=record.tags if content.tags is None else content.tags,
        priority=record.priority if content.priority is None else content.priority,
    )
