"""Messages between a client and the host of a buffer: checked MessagePack beside the frames of groups.

A call is a head (`Request`), one payload with the frames of its groups one after the other, and a list of objects that
only Ray can carry: references in samples, a policy's function, a query. An answer is the same: `Answer`, payload,
objects. Groups are never pickled. `parcel` has the payload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from forebay import errors
from forebay.core.ledger import Record, Row
from forebay.core.policy import Order
from forebay.core.rollout import Group
from forebay.errors import DamagedData, ForebayError, StorageError
from forebay.storage.base import Arrival, Claimed, Content, Revision

__all__ = [
    "NOTHING",
    "PROTOCOL",
    "Answer",
    "BufferSettings",
    "FrameSizes",
    "Hello",
    "Request",
    "Stand",
    "Version",
    "carries_groups",
    "decoded",
    "encoded",
    "error_of",
    "failed",
    "failure_of",
    "with_groups",
]

PROTOCOL = 2


# --- heads --------------------------------------------------------------------------------------------


class BufferSettings(msgspec.Struct, frozen=True):
    """The settings of the buffers around a hosted storage. A policy's function stays with the host."""

    policy: str
    order: Order
    lease_s: float
    limits: dict[str, Any]  # max_groups, max_bytes, expect_group_bytes, keep_trained


class Version(msgspec.Struct, frozen=True):
    """The part of `Hello` that every version can read."""

    protocol: int
    version: str


class Hello(Version, frozen=True):
    """How a host introduces itself."""

    name: str
    incarnation: str
    durable: bool
    checksums: bool  # whether frames have them: frames that stay in memory as they came do not
    store_id: str | None
    shards: int
    settings: BufferSettings | None  # None: it hosts a storage without a buffer


FrameSizes: TypeAlias = list[tuple[int, int]]
"""Of every frame in the payload, in order: its bytes, and the number of its references."""


class Request(msgspec.Struct, array_like=True, gc=False):
    """The head of a call. `sequence` numbers the calls of a client that change something; 0: this one does not.

    The client has seen all answers up to `confirmed`; the host need not remember them. `returns`: the number of
    results that the answer is split into.
    """

    op: str
    client: str
    sequence: int
    confirmed: int
    body: msgspec.Raw
    frames: FrameSizes = []
    returns: int = 1


class Failure(msgspec.Struct, array_like=True):
    """An error of ours, so that it arrives with its own type."""

    kind: str
    message: str
    fields: dict[str, Any]


class Stand(msgspec.Struct, array_like=True):
    """The ledger in groups after a number of changes."""

    version: int
    lines: dict[str, dict[str, int]]


class Answer(msgspec.Struct, array_like=True, gc=False):
    """The head of an answer, with what the host knows now.

    `version` counts the changes of the storage that waiters may wait for, as of the beginning of the call. `changed`:
    the tasks that the call itself changed. `stand`: the ledger after a change of a storage in memory.
    """

    version: int
    buffered: int
    changed: list[str]
    failure: Failure | None
    body: msgspec.Raw
    stand: Stand | None = None
    frames: FrameSizes = []


NOTHING = msgspec.Raw(msgspec.msgpack.encode(None))

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encoded(value: Any) -> bytes:
    """A head or a part of one as bytes."""
    return _encoder.encode(value)


def decoded(data: bytes | msgspec.Raw, kind: Any) -> Any:
    """The value of this type that the bytes encode, or DamagedData."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise DamagedData(f"a message of {len(bytes(data))} bytes cannot be read: {error}") from None


# --- values with groups -------------------------------------------------------------------------------

Change: TypeAlias = "Callable[[Group, Record | None], Group]"


def with_groups(value: Any, change: Change) -> Any:
    """Arguments or a result, each group in them replaced by what `change` returns for it and its record.

    Both sides visit the groups in the same order: the sender replaces them by nothing, the receiver puts them back.
    """
    kind = type(value)
    if kind is tuple:
        return tuple([with_groups(item, change) for item in value])
    if kind is list:  # all items of a list have one type
        return [with_groups(item, change) for item in value] if carries_groups(value) else value
    if kind is dict:
        lists = any(type(item) is list for item in value.values())
        return {key: with_groups(item, change) for key, item in value.items()} if lists else value
    if kind is Row:
        return Row(value.record, change(value.group, value.record))
    if kind is Content:
        return replace(value, group=change(value.group, None))
    if kind is Arrival or kind is Revision:
        return replace(value, content=with_groups(value.content, change))
    return replace(value, rows=with_groups(value.rows, change)) if kind is Claimed else value


def carries_groups(items: Sequence[Any]) -> bool:
    """Whether the items of a list have groups."""
    return bool(items) and type(items[0]) in (Row, Content, Arrival, Revision)


# --- errors -------------------------------------------------------------------------------------------


def failure_of(error: ForebayError) -> Failure:
    """An error as plain data."""
    fields = {name: value for name, value in vars(error).items() if _is_plain(value)}
    return Failure(type(error).__name__, str(error), fields)


def failed(error: ForebayError, version: int = 0, buffered: int = 0) -> bytes:
    """The head of an answer that is an error."""
    return encoded(Answer(version, buffered, [], failure_of(error), NOTHING))


def error_of(failure: Failure) -> ForebayError:
    """The error that a failure describes, made without running its constructor."""
    kind = getattr(errors, failure.kind, None)
    if not isinstance(kind, type) or not issubclass(kind, ForebayError):
        return StorageError(f"{failure.kind}: {failure.message}")
    error = kind.__new__(kind, failure.message)
    Exception.__init__(error, failure.message)
    vars(error).update(failure.fields)
    return error


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (str, int, float, bool))
