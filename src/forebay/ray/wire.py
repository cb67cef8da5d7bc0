"""What travels between a client and the host of a buffer: checked MessagePack beside the frames of groups.

A call is a head (`Request`), one payload with the frames of its groups one behind the other, and a list of objects that
only Ray can carry: references that samples hold, a policy's function, a query. An answer is the same: `Answer`,
payload, objects. Frames begin at multiples of 16 bytes, so that the arrays in them are aligned where they are read.
Groups are never pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from forebay import errors
from forebay.codec.frame import decode_group, encode_parts
from forebay.core.ledger import Event, Watermark
from forebay.core.policy import Order
from forebay.core.record import Facts, Record, Row, Tags
from forebay.core.rollout import Group, Status
from forebay.errors import DamagedData, ForebayError, StorageError
from forebay.storage.base import Arrival, Content, Revision

__all__ = [
    "INLINE_BYTES",
    "NOTHING",
    "PROTOCOL",
    "Answer",
    "ArrivalHead",
    "BufferSettings",
    "ClaimedHead",
    "ContentHead",
    "DueArgs",
    "Hello",
    "IssueArgs",
    "Message",
    "OpenArgs",
    "PackedFrames",
    "Parcel",
    "Payload",
    "PutArgs",
    "Request",
    "RevisionHead",
    "RowHead",
    "SettleArgs",
    "Stand",
    "Version",
    "Watermarks",
    "decoded",
    "encoded",
    "error_of",
    "failure_of",
    "unpack_row",
]

PROTOCOL = 1

INLINE_BYTES = 100_000
"""Ray carries an argument or an answer up to this size within the call itself, and larger ones as objects."""

_CHUNK_BYTES = 256 << 10
_ALIGNMENT = 16
_PADDING = [bytes(count) for count in range(_ALIGNMENT)]

Payload: TypeAlias = "bytes | np.ndarray[Any, Any]"
Message: TypeAlias = "tuple[bytes, Payload, list[Any]]"
"""A head, the frames, and what only Ray can carry."""


class BufferSettings(msgspec.Struct, frozen=True):
    """How the buffers around a hosted storage are set. A policy's function stays with the host."""

    policy: str
    order: Order
    max_groups: int | None
    max_bytes: int | None
    expect_group_bytes: int
    keep_trained: int
    lease_s: float


class Version(msgspec.Struct, frozen=True):
    """The part of `Hello` that every version can read."""

    protocol: int
    version: str


class Hello(msgspec.Struct, frozen=True):
    """What a host says of itself."""

    protocol: int
    version: str
    name: str
    incarnation: str
    durable: bool
    checksums: bool  # whether frames have them: not those that stay in memory as they came
    store_id: str | None
    shards: int
    settings: BufferSettings | None  # None: of a storage without a buffer of its own


class Request(msgspec.Struct, array_like=True, gc=False):
    """The head of a call. `sequence` numbers the calls of a client that change something; 0: this one does not.

    All answers up to `confirmed` were seen by the client, and need not be remembered. `returns`: in how many results
    the answer is to come.
    """

    op: str
    client: str
    sequence: int
    confirmed: int
    body: msgspec.Raw
    returns: int = 1


class Failure(msgspec.Struct, array_like=True):
    """An error of ours, so that it arrives as what it is."""

    kind: str
    message: str
    fields: dict[str, Any]


class Stand(msgspec.Struct, array_like=True):
    """The ledger in groups after so many changes."""

    version: int
    lines: dict[str, dict[str, int]]


class Answer(msgspec.Struct, array_like=True, gc=False):
    """The head of an answer, with what the host knows now.

    `version` counts the changes of the storage that anybody may wait for; `due` names the tasks of this call of which
    groups are below the watermark (None: it was not looked at). `stand`: after a change of what is only in memory, how
    the ledger stands.
    """

    version: int
    buffered: int
    due: list[str] | None
    failure: Failure | None
    body: msgspec.Raw
    stand: Stand | None = None


class OpenArgs(msgspec.Struct, array_like=True):
    """An owner comes; the function of its policy, if any, is among the objects."""

    owner: str
    order: Order
    max_groups: int | None
    max_bytes: int | None
    expect_group_bytes: int
    keep_trained: int
    lease_s: float | None


class ContentHead(msgspec.Struct, array_like=True, gc=False):
    """A group to be stored, without its frame."""

    facts: Facts
    tags: Tags | None
    priority: float | None
    size: int
    references: int


class ArrivalHead(msgspec.Struct, array_like=True, gc=False):
    """A group that is put, without its frame."""

    task_name: str
    group_id: int | None
    attempt: int | None
    stale: bool
    reason: str | None
    content: ContentHead
    reset_tokens: int


class RevisionHead(msgspec.Struct, array_like=True, gc=False):
    """A change of a buffered group, without its frame."""

    uid: int
    revision: int
    content: ContentHead | None


class RowHead(msgspec.Struct, array_like=True, gc=False):
    """A row, without its frame."""

    record: Record
    size: int
    references: int


NOTHING = msgspec.Raw(msgspec.msgpack.encode(None))

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encoded(value: Any) -> bytes:
    """A head or a part of one as bytes."""
    return _encoder.encode(value)


def decoded(data: bytes | msgspec.Raw, kind: Any) -> Any:
    """What bytes stand for; DamagedData if they are not of this kind."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise DamagedData(f"a call of {len(bytes(data))} bytes cannot be read: {error}") from None


# --- frames -------------------------------------------------------------------------------------------


class Parcel:
    """Frames and references on their way. `checksums`: whether the frames are to have them."""

    def __init__(self, *, checksums: bool = True) -> None:
        self.objects: list[Any] = []
        self._checksums = checksums
        self._parts: list[Any] = []
        self._size = 0
        self._run_end: tuple[Any, int, int] | None = None  # where the last part could go on: its buffer, start, end

    def add_group(self, group: Group) -> tuple[int, int]:
        """Encode a group into the parcel; the size of its frame, and how many references it has."""
        references: list[Any] = []
        parts = encode_parts(group, references, checksum=self._checksums)
        self.objects += references
        size = sum([memoryview(part).nbytes for part in parts])
        self._parts += parts
        self._pad(size)
        return size, len(references)

    def add_frame(self, frame: bytes | memoryview, start: int | None = None) -> None:
        """Add a frame; `start`: where it is in the buffer that it is a slice of.

        Frames that stand there one behind the other, as those of one put do, stay one piece.
        """
        size = len(frame)
        if start is not None and isinstance(frame, memoryview):
            end = start + size + -size % _ALIGNMENT
            run = self._run_end
            if run is not None and run[0] is frame.obj and run[2] == start:
                start = run[1]
                self._size -= run[2] - run[1]
                self._parts.pop()
            whole: Any = frame.obj
            self._parts.append(memoryview(whole).cast("B")[start:end])
            self._size += end - start
            self._run_end = (frame.obj, start, end)
            return
        self._parts.append(frame)
        self._pad(size)

    def _pad(self, size: int) -> None:
        self._size += size
        padding = -size % _ALIGNMENT
        if padding:
            self._parts.append(_PADDING[padding])
            self._size += padding
        self._run_end = None

    @property
    def size(self) -> int:
        return self._size

    def payload(self) -> bytes:
        """All frames in one piece of bytes, for few of them."""
        return b"".join(self._parts)

    def chunks(self) -> list[np.ndarray[Any, Any]]:
        """All frames as arrays of some size, for Ray to write into one object.

        Pieces of that size come from memory that is warm; one piece of all would be fetched from the system each time.
        """
        chunks: list[np.ndarray[Any, Any]] = []
        part_of: list[Any] = []
        size = 0
        for part in self._parts:
            part_of.append(part)
            size += memoryview(part).nbytes
            if size >= _CHUNK_BYTES:
                chunks.append(_array(part_of))
                part_of, size = [], 0
        if part_of:
            chunks.append(_array(part_of))
        return chunks

    def whole(self) -> Payload:
        """All frames in one piece: bytes, or, if large, an array, which its reader gets without a copy."""
        if self._size <= INLINE_BYTES:
            return self.payload()
        return _array(self._parts)

    def content(self, content: Content) -> ContentHead:
        size, references = self.add_group(content.group)
        return ContentHead(content.facts, content.tags, content.priority, size, references)

    def arrival(self, arrival: Arrival) -> ArrivalHead:
        return ArrivalHead(
            arrival.task_name,
            arrival.group_id,
            arrival.attempt,
            arrival.stale,
            arrival.reason,
            self.content(arrival.content),
            arrival.reset_tokens,
        )

    def revision(self, revision: Revision) -> RevisionHead:
        content = None if revision.content is None else self.content(revision.content)
        return RevisionHead(revision.uid, revision.revision, content)


def _array(parts: list[Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), np.uint8)


class PackedFrames:
    """Reads the frames and references of a call or an answer, one after the other."""

    def __init__(self, payload: Payload, objects: Sequence[Any]) -> None:
        buffer: Any = payload  # an array lends its bytes, too
        self._view = memoryview(buffer).cast("B").toreadonly()
        self._objects = objects
        self._offset = 0
        self._used = 0

    @property
    def has_objects(self) -> bool:
        return bool(self._objects)

    @property
    def offset(self) -> int:
        """Where the next frame begins."""
        return self._offset

    def next(self, size: int, references: int) -> tuple[memoryview, tuple[Any, ...]]:
        """The next frame, as a view, and what it refers to."""
        end = self._offset + size
        if size < 0 or references < 0 or end > len(self._view) or self._used + references > len(self._objects):
            raise DamagedData(
                f"a frame of {size} bytes at {self._offset} with {references} references; the payload has "
                f"{len(self._view)} bytes and {len(self._objects)} references"
            )
        frame = self._view[self._offset : end]
        self._offset = end + -size % _ALIGNMENT
        refers = tuple(self._objects[self._used : self._used + references])
        self._used += references
        return frame, refers


def unpack_row(head: RowHead, frames: PackedFrames, *, checksums: bool) -> tuple[Row, tuple[Any, ...]]:
    """A row with its samples, arrays as read-only views of the payload, and the references that they hold."""
    frame, references = frames.next(head.size, head.references)
    return Row(head.record, decode_group(frame, references, checksum=checksums)), references


# --- errors -------------------------------------------------------------------------------------------


def failure_of(error: ForebayError) -> Failure:
    """An error as plain data."""
    fields = {name: value for name, value in vars(error).items() if _is_plain(value)}
    return Failure(type(error).__name__, str(error), fields)


def error_of(failure: Failure) -> ForebayError:
    """The error that a failure stands for, without running its constructor."""
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


# What the longer bodies consist of, named once for both sides.
ClaimedHead: TypeAlias = dict[str, list[RowHead]] | None
IssueArgs: TypeAlias = tuple[str, list[ContentHead], str, int, bytes | None]
PutArgs: TypeAlias = tuple[list[ArrivalHead], str]
SettleArgs: TypeAlias = tuple[str, list[int], Event, str | None]
DueArgs: TypeAlias = tuple[str, list[Status], int]
Watermarks: TypeAlias = dict[str, Watermark]
