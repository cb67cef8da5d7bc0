"""How a message becomes the arguments, or the results, of one call of Ray: in as few and as cheap pieces as it takes.

Ray carries pieces of up to 100 KB within the call itself; a larger one becomes an object of shared memory, which costs
a millisecond or two more. So a small message is one piece of bytes, a larger one some pieces, and only one that would
need more than a handful goes by way of an object, as a whole. References, which only Ray can carry, go beside.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from forebay.errors import DamagedData
from forebay.ray.wire import Message, Parcel, Payload

__all__ = ["PIECE_BYTES", "arguments_of", "message_of_arguments", "message_of_results", "results_of", "returns_for"]

PIECE_BYTES = 96 << 10
_MAX_PIECES = 5
_LENGTHS = struct.Struct("<II")  # of the head and of the payload that follows it


def arguments_of(head: bytes, parcel: Parcel, objects: list[Any]) -> list[Any]:
    """The arguments of a call: the head with what fits beside it, the objects, and more pieces."""
    if len(head) + parcel.size <= PIECE_BYTES:
        first = _packed(head, parcel.payload())
        return [first, objects] if objects else [first]
    if parcel.size <= PIECE_BYTES * _MAX_PIECES:
        return [_packed(head, b""), objects, *_split(parcel.payload())]
    return [_packed(head, b""), objects, parcel.chunks()]


def message_of_arguments(first: bytes, more: Sequence[Any]) -> Message:
    """The message that came as arguments; its payload is memory of our own."""
    head, payload = _unpacked(first)
    if not more:
        return head, payload, []
    objects, *pieces = more
    if len(pieces) == 1 and isinstance(pieces[0], list):
        pieces = pieces[0]
    return head, b"".join(pieces) if pieces else payload, list(objects)


def returns_for(expected_bytes: float) -> int:
    """How many results to ask for, if an answer of this size is expected."""
    if not PIECE_BYTES < expected_bytes <= PIECE_BYTES * (_MAX_PIECES - 1):
        return 1
    return 2 + int(expected_bytes // PIECE_BYTES)  # the head has the first one for itself


def results_of(message: Message, returns: int) -> Any:
    """So many results as were asked for."""
    head, payload, objects = message
    first: Any = message
    pieces: list[bytes] = []
    if not objects:
        if len(head) + len(payload) <= PIECE_BYTES:
            first = _packed(head, bytes(payload))
        elif returns > 1 and len(payload) <= (returns - 1) * PIECE_BYTES and len(head) <= PIECE_BYTES:
            first, pieces = _packed(head, b""), _split(payload)
    return first if returns == 1 else (first, *pieces, *[b""] * (returns - 1 - len(pieces)))


def message_of_results(first: Any, more: Sequence[bytes]) -> Message:
    """The message that came as results."""
    if not isinstance(first, bytes):
        head, payload, objects = first
        return head, payload, objects
    head, payload = _unpacked(first)
    return head, b"".join(more) if any(more) else payload, []


def _packed(head: bytes, payload: bytes) -> bytes:
    return b"".join((_LENGTHS.pack(len(head), len(payload)), head, payload))


def _unpacked(data: bytes) -> tuple[bytes, bytes]:
    if len(data) < _LENGTHS.size:
        raise DamagedData(f"a message of {len(data)} bytes; expected at least {_LENGTHS.size}")
    head, payload = _LENGTHS.unpack_from(data)
    start = _LENGTHS.size
    if start + head + payload != len(data):
        raise DamagedData(f"a message of {len(data)} bytes says that it has {start + head + payload}")
    # Copies of at most a piece: what is kept of them begins where memory is aligned.
    return data[start : start + head], data[start + head :]


def _split(payload: Payload) -> list[bytes]:
    """The payload in pieces that Ray carries within the call."""
    buffer: Any = payload  # an array lends its bytes, too
    view = memoryview(buffer)
    return [bytes(view[start : start + PIECE_BYTES]) for start in range(0, len(payload), PIECE_BYTES)]
