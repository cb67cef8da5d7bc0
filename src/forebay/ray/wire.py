"""Messages between a client and the host of a buffer: checked MessagePack beside the frames of groups.

A call is a head (`Request`), one payload with the frames of its groups one after the other, and a list of objects that
only Ray can carry: references in samples, a policy's function, a query. An answer is the same: `Answer`, payload,
objects. Groups are never pickled.

The frames of a payload begin at multiples of 16 bytes, so that the arrays in them are aligned where they are read. Ray
carries arguments and results of up to 100 KB within the call itself; a larger one becomes an object of shared memory,
which costs a millisecond or two more. So a small message is one piece of bytes, a larger one a few pieces, and only a
message that would need more than a handful becomes one object.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace

from forebay import errors
from forebay.codec.frame import decode_group, encode_parts
from forebay.core.ledger import Record, Row, identify
from forebay.core.policy import Order
from forebay.core.rollout import Group
from forebay.errors import DamagedData, ForebayError, StorageError
from forebay.storage.base import Arrival, Claimed
from forebay.storage.values import Content, Revision

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
    """An error of Forebay, sent so that it keeps its type."""

    kind: str
    message: str
    fields: dict[str, Any]


class Stand(msgspec.Struct, array_like=True):
    """The ledger in groups, after `version` changes."""

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
encoded = msgspec.msgpack.Encoder().encode
_decoder = functools.cache(msgspec.msgpack.Decoder)


def decoded(data: bytes | msgspec.Raw, kind: Any) -> Any:
    """The value of this type that the bytes encode, or DamagedData."""
    try:
        return _decoder(kind).decode(data)
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


_PIECE_BYTES = 96 << 10
_MAX_PIECES = 5
_CHUNK_BYTES = 256 << 10
_ALIGNMENT = 16
_PADDING = [bytes(count) for count in range(_ALIGNMENT)]
_LENGTHS = struct.Struct("<II")  # of the head and of the payload that follows it

Payload: TypeAlias = "bytes | np.ndarray[Any, Any]"
Message: TypeAlias = "tuple[bytes, Payload, list[Any]]"
"""A head, the frames, and the objects that only Ray can carry."""


class Frame(tuple[()]):
    """A group that is not decoded: takes the place of its samples."""

    data: memoryview
    start: int  # in the buffer that it is a slice of
    references: tuple[Any, ...]


class Parcel:
    """Frames and objects to be sent. `checksums`: whether the frames are to have them."""

    def __init__(self, *, checksums: bool = True) -> None:
        self.objects: list[Any] = []
        self.frames: FrameSizes = []
        self.size = 0
        self._checksums = checksums
        self._parts: list[Any] = []
        self._run_end: tuple[Any, int, int] | None = None  # the last part, if it may grow: its buffer, start, end

    def add_group(self, group: Group, record: Record | None = None) -> Group:
        """Put a group into the parcel, encoded; nothing stays where it was, see `with_groups`."""
        if isinstance(group, Frame):
            return self._add_frame(group)
        references: list[Any] = []
        parts = encode_parts(group, references, checksum=self._checksums)
        size = sum([memoryview(part).nbytes for part in parts])
        self._parts += parts
        self._run_end = None
        self.size += size
        padding = -size % _ALIGNMENT
        if padding:
            self._parts.append(_PADDING[padding])
            self.size += padding
        self._note(size, references)
        return ()

    def _add_frame(self, frame: Frame) -> Group:
        """Frames that follow each other in one buffer, such as those of one put, stay one piece."""
        whole: Any = frame.data.obj
        size, start = len(frame.data), frame.start
        end = start + size + -size % _ALIGNMENT
        run = self._run_end
        if run is not None and run[0] is whole and run[2] == start:
            start = run[1]
            self.size -= run[2] - run[1]
            self._parts.pop()
        self._parts.append(memoryview(whole).cast("B")[start:end])
        self.size += end - start
        self._run_end = (whole, start, end)
        self._note(size, frame.references)
        return ()

    def _note(self, size: int, references: Sequence[Any]) -> None:
        self.frames.append((size, len(references)))
        self.objects += references

    def payload(self) -> bytes:
        """All frames in one piece of bytes, for few of them."""
        return b"".join(self._parts)

    def chunks(self) -> list[np.ndarray[Any, Any]]:
        """All frames as arrays of some size, for Ray to write into one object.

        Arrays of that size reuse memory of the process; one large array would be allocated by the system each time.
        """
        chunks: list[np.ndarray[Any, Any]] = []
        parts: list[Any] = []
        size = 0
        for part in self._parts:
            parts.append(part)
            size += memoryview(part).nbytes
            if size >= _CHUNK_BYTES:
                chunks.append(_array(parts))
                parts, size = [], 0
        if parts:
            chunks.append(_array(parts))
        return chunks

    def whole(self) -> Payload:
        """All frames in one piece: bytes, or, if large, an array, which its reader gets without a copy."""
        return self.payload() if self.size <= _PIECE_BYTES else _array(self._parts)


def _array(parts: list[Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), np.uint8)


class Frames:
    """Reads the frames and references of a message, one after the other. `checksums`: whether frames have them."""

    def __init__(self, payload: Payload, objects: Sequence[Any], sizes: FrameSizes, *, checksums: bool = True) -> None:
        buffer: Any = payload  # an array lends its bytes, too
        self._view = memoryview(buffer).cast("B").toreadonly()
        self._sizes = iter(sizes)
        self._checksums = checksums
        self._used = 0
        self.objects = objects
        self.offset = 0  # where the next frame begins
        self.references: list[tuple[Any, ...]] = []  # of the frames that were read

    def next(self) -> Frame:
        """The next frame, as a view, and its references."""
        size, references = next(self._sizes, (-1, 0))
        end = self.offset + size
        if size < 0 or references < 0 or end > len(self._view) or self._used + references > len(self.objects):
            raise DamagedData(
                f"a frame of {size} bytes at {self.offset} with {references} references; the payload has "
                f"{len(self._view)} bytes and {len(self.objects)} references"
            )
        frame = Frame()
        frame.data, frame.start = self._view[self.offset : end], self.offset
        frame.references = tuple(self.objects[self._used : self._used + references])
        self.offset = end + -size % _ALIGNMENT
        self._used += references
        self.references.append(frame.references)
        return frame

    def group(self, record: Record | None) -> Group:
        """The next group, with the identity of its record; its arrays are read-only views of the payload."""
        frame = self.next()
        group = decode_group(frame.data, frame.references, checksum=self._checksums)
        if record is not None:
            identify(group, record.task_name, record.group_id)
        return group


# --- arguments and results of Ray's calls ---------------------------------------------------------------


def arguments_of(head: bytes, parcel: Parcel) -> list[Any]:
    """The arguments of a call: the head with a small payload beside it, the objects, and more pieces."""
    if len(head) + parcel.size <= _PIECE_BYTES:
        first = _joined(head, parcel.payload())
        return [first, parcel.objects] if parcel.objects else [first]
    if parcel.size <= _PIECE_BYTES * _MAX_PIECES:
        return [_joined(head, b""), parcel.objects, *_split(parcel.payload())]
    return [_joined(head, b""), parcel.objects, parcel.chunks()]


def message_of_arguments(first: bytes, more: Sequence[Any]) -> Message:
    """The message that came as arguments; its payload is memory of this process."""
    head, payload = _parted(first)
    if not more:
        return head, payload, []
    objects, *pieces = more
    if len(pieces) == 1 and isinstance(pieces[0], list):
        pieces = pieces[0]
    return head, b"".join(pieces) if pieces else payload, list(objects)


def returns_for(expected_bytes: float) -> int:
    """The number of results to ask for, if an answer of this size is expected."""
    if not _PIECE_BYTES < expected_bytes <= _PIECE_BYTES * (_MAX_PIECES - 1):
        return 1
    return 2 + int(expected_bytes // _PIECE_BYTES)  # the first one is for the head


def results_of(message: Message, returns: int) -> Any:
    """A message as the number of results that was asked for."""
    head, payload, objects = message
    first: Any = message
    pieces: list[bytes] = []
    if not objects:
        if len(head) + len(payload) <= _PIECE_BYTES:
            first = _joined(head, bytes(payload))
        elif returns > 1 and len(payload) <= (returns - 1) * _PIECE_BYTES and len(head) <= _PIECE_BYTES:
            first, pieces = _joined(head, b""), _split(payload)
    return first if returns == 1 else (first, *pieces, *[b""] * (returns - 1 - len(pieces)))


def message_of_results(first: Any, more: Sequence[bytes]) -> Message:
    """The message that came as results."""
    if not isinstance(first, bytes):
        head, payload, objects = first
        return head, payload, objects
    head, payload = _parted(first)
    return head, b"".join(more) if any(more) else payload, []


def _joined(head: bytes, payload: bytes) -> bytes:
    return b"".join((_LENGTHS.pack(len(head), len(payload)), head, payload))


def _parted(data: bytes) -> tuple[bytes, bytes]:
    if len(data) < _LENGTHS.size:
        raise DamagedData(f"a message of {len(data)} bytes; expected at least {_LENGTHS.size}")
    head, payload = _LENGTHS.unpack_from(data)
    start = _LENGTHS.size
    if start + head + payload != len(data):
        raise DamagedData(f"a message of {len(data)} bytes says that it has {start + head + payload}")
    # Copies of at most a piece: frames that are kept then begin where memory is aligned.
    return data[start : start + head], data[start + head :]


def _split(payload: Payload) -> list[bytes]:
    """The payload in pieces that Ray carries within the call."""
    buffer: Any = payload  # an array lends its bytes, too
    view = memoryview(buffer)
    return [bytes(view[start : start + _PIECE_BYTES]) for start in range(0, len(payload), _PIECE_BYTES)]
