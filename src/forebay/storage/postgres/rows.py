"""Rows of the tables and the values of the house: records, facts and tags as columns, and back.

What goes in comes out: tags are kept as MessagePack beside the values that queries look at. PostgreSQL's text
cannot hold the character NUL; it is written with an escape that keeps the order of code points.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import msgspec

from forebay.codec.frame import decode_group
from forebay.core.ledger import Place
from forebay.core.record import NO_TAGS, Record, Row, Scalar, SessionIds, Tags, identify, number_rollouts
from forebay.core.rollout import Status
from forebay.errors import DamagedData, InvalidInput
from forebay.storage.base import Content

__all__ = [
    "COLUMNS",
    "RECORD",
    "RECORD_OF_G",
    "RESERVED_AFTER",
    "content_arrays",
    "exact_number",
    "from_text",
    "read_record",
    "read_row",
    "record_values",
    "to_text",
]

_RECORD_COLUMNS = (
    "uid",
    "timestamp_id",
    "task_name",
    "group_id",
    "status",
    "place",
    "samples",
    "tokens",
    "bytes",
    "num_tries",
    "reward",
    "oldest_step",
    "newest_step",
    "token_step",
    "given_staleness",
    "unjudged",
    "created_at",
    "moved_at",
    "priority",
    "attempt",
    "deliveries",
    "revision",
    "owner",
    "lease_id",
    "train_step",
    "reserved_bytes",
    "session_ids",
    "tags",
)
RECORD = ", ".join(_RECORD_COLUMNS)
"""The columns of a record, for SELECT and RETURNING."""

RECORD_OF_G = ", ".join(f"g.{column}" for column in _RECORD_COLUMNS)
"""The same, where `groups` is called g."""

RESERVED_AFTER = """CASE WHEN u.status IN ('init', 'expired', 'aborted') THEN g.reserved_bytes ELSE u.bytes END"""
"""`capacity.reserved_after` in SQL, where new facts are called u."""

COLUMNS = (*_RECORD_COLUMNS, "tag_values", "archive_id", "trained_as")
"""All columns of `groups`, for COPY."""

_STATUS = {str(status): status for status in Status}
_PLACE = {str(place): place for place in Place}
_encode = msgspec.msgpack.Encoder().encode
_decode_sessions = msgspec.msgpack.Decoder(SessionIds).decode
_decode_tags = msgspec.msgpack.Decoder(dict[str, str | int | float | bool | None]).decode


# --- text ---------------------------------------------------------------------------------------------


def to_text(text: str) -> str:
    """Text as PostgreSQL can hold it; InvalidInput for half of a surrogate pair, which is no text.

    >>> to_text("a\\x00b") < to_text("a\\x01b") < to_text("a\\x02b")
    True
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"{text!r} has a surrogate that stands alone; it cannot be stored as text") from None
    if "\0" in text or "\1" in text:
        return text.replace("\1", "\1\2").replace("\0", "\1\1")
    return text


def from_text(text: str) -> str:
    """What `to_text` was given."""
    return text.replace("\1\1", "\0").replace("\1\2", "\1") if "\1" in text else text


def exact_number(number: int | float) -> str:
    """Digits that compare as the number does, also with numbers of the other type.

    A float that is whole is written exactly; any other in its shortest form, which lies between the same whole
    numbers and the same floats as itself.

    >>> exact_number(1e16), exact_number(0.1), exact_number(float("-inf"))
    ('10000000000000000', '0.1', '-Infinity')
    """
    if isinstance(number, int):
        return str(number)
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return str(int(number)) if number.is_integer() else repr(number)


def _tag_json(value: Scalar) -> str:
    if isinstance(value, str):
        return json.dumps(to_text(value))
    if isinstance(value, bool):
        return "true" if value else "false"
    assert value is not None
    number = exact_number(value)
    return f'["{number}"]' if number.endswith("y") else number  # JSON has no infinity


def tag_columns(tags: Tags) -> tuple[bytes | None, str | None]:
    """Tags as they are kept, and as queries look at them: a tag that is null is one that is not there."""
    if not tags:
        return None, None
    values = ",".join(
        f"{json.dumps(to_text(name))}:{_tag_json(value)}" for name, value in tags.items() if value is not None
    )
    return _encode(tags), f"{{{values}}}"


# --- records ------------------------------------------------------------------------------------------


def read_record(row: Any) -> Record:
    """The record of a row that has the columns of RECORD."""
    tags, owner = row["tags"], row["owner"]
    return Record(
        uid=row["uid"],
        timestamp_id=row["timestamp_id"],
        task_name=from_text(row["task_name"]),
        group_id=row["group_id"],
        status=_STATUS[row["status"]],
        place=_PLACE[row["place"]],
        samples=row["samples"],
        tokens=row["tokens"],
        bytes=row["bytes"],
        num_tries=row["num_tries"],
        reward=row["reward"],
        oldest_step=row["oldest_step"],
        newest_step=row["newest_step"],
        token_step=row["token_step"],
        given_staleness=row["given_staleness"],
        unjudged=row["unjudged"],
        created_at=row["created_at"],
        moved_at=row["moved_at"],
        priority=row["priority"],
        attempt=row["attempt"],
        deliveries=row["deliveries"],
        revision=row["revision"],
        owner=None if owner is None else from_text(owner),
        lease_id=row["lease_id"],
        train_step=row["train_step"],
        reserved_bytes=row["reserved_bytes"],
        session_ids=() if row["session_ids"] is None else _decode_sessions(row["session_ids"]),
        tags=NO_TAGS if tags is None else _decode_tags(tags),
    )


def read_row(record: Record, frame: bytes | None) -> Row:
    """A row with its payload; DamagedData if that cannot be read."""
    if frame is None:
        raise DamagedData("its payload is missing")
    group = decode_group(frame)
    # The record is the authority: frames are written before a group has its id.
    identify(group, record.task_name, record.group_id)
    number_rollouts(group, record.group_id)
    return Row(record, group)


def record_values(record: Record, archive_id: int | None = None, trained_as: Status | None = None) -> tuple[Any, ...]:
    """The values of COLUMNS. The last two are of a group in the archive: its number there, and its status before."""
    tags, tag_values = tag_columns(record.tags)
    return (
        record.uid,
        record.timestamp_id,
        to_text(record.task_name),
        record.group_id,
        str(record.status),
        str(record.place),
        record.samples,
        record.tokens,
        record.bytes,
        record.num_tries,
        record.reward,
        record.oldest_step,
        record.newest_step,
        record.token_step,
        record.given_staleness,
        record.unjudged,
        record.created_at,
        record.moved_at,
        record.priority,
        record.attempt,
        record.deliveries,
        record.revision,
        None if record.owner is None else to_text(record.owner),
        record.lease_id,
        record.train_step,
        record.reserved_bytes,
        _encode(record.session_ids) if record.session_ids else None,
        tags,
        tag_values,
        archive_id,
        None if trained_as is None else str(trained_as),
    )


def content_arrays(contents: Iterable[Content]) -> list[list[Any]]:
    """Contents as arrays, column by column: facts, priority, whether tags are given, tags, tag values, sessions."""
    columns: list[tuple[Any, ...]] = []
    for content in contents:
        facts = content.facts
        tags, tag_values = (None, None) if content.tags is None else tag_columns(content.tags)
        columns.append(
            (
                str(facts.status),
                facts.samples,
                facts.tokens,
                facts.bytes,
                facts.num_tries,
                facts.reward,
                facts.oldest_step,
                facts.newest_step,
                facts.token_step,
                facts.given_staleness,
                facts.unjudged,
                content.priority,
                content.tags is not None,
                tags,
                tag_values,
                _encode(facts.session_ids) if facts.session_ids else None,
            )
        )
    return [list(column) for column in zip(*columns, strict=True)]
