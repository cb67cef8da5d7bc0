"""Plain values as bytes: a frame with MessagePack and the buffers of arrays, checked before anything of it is used.

A frame is:

    magic 4 bytes | version u8 | 3 x 0 | head bytes u32 | body bytes u64 | crc32 of all the rest u32 | head | body

The head is MessagePack. The body is the raw buffers of the arrays, each aligned to 16 bytes; in place of an array, the
head has extension 1 (dtype, shape, offset). Extension 2 is a tuple, 3 and 4 are references (see `frame`). There are no
other extensions, and none can name code: reading a frame creates plain data and arrays, or raises DamagedData (G9).
Arrays are read-only views of the frame, without a copy.

Lists stay lists, arrays stay arrays, tuples stay tuples. A value of any other type is UnsupportedPayload, with its
path.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias
from zlib import crc32

import msgspec
import numpy as np
from msgspec.msgpack import Decoder, Encoder, Ext

from forebay.core.dtypes import BFLOAT16, CODE_OF, DTYPES, bfloat16_dtype
from forebay.core.references import Resolved, is_reference
from forebay.core.rollout import LEAVES, MAX_DEPTH, MAX_DIMENSIONS
from forebay.errors import DamagedData, InvalidInput, UnreadableData, UnsupportedPayload

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_FRAME_BYTES = 4 * 2**30
"""No frame is larger: one that claims to be is refused before anything is allocated."""
MAX_REFERENCES = 65_536

ENCODE_ERRORS = (TypeError, ValueError, OverflowError, RecursionError)
"""What an encoder raises for a value that MessagePack cannot hold."""
READ_ERRORS = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, InvalidInput, OverflowError)
"""What decoders and the checks of decoded values raise for damaged bytes."""

_START = struct.Struct("<4sB3xIQ")
_HEADER = struct.Struct("<4sB3xIQI")
_ALIGNMENT = 16
_PADDING = [bytes(count) for count in range(_ALIGNMENT)]

_ARRAY, _TUPLE, _VALUE, _BESIDE = 1, 2, 3, 4
_BFLOAT16 = DTYPES[BFLOAT16][0]
_DTYPE_OF = {code: dtype for dtype, code in CODE_OF.items()}
_VECTOR = struct.Struct("<BBQQ")
_INDEX = struct.Struct("<I")
_STRINGS = frozenset((str,))


# --- any plain value ------------------------------------------------------------------------------------

_MAGIC, _VERSION = b"FBV1", 1


def encode_value(value: Any) -> bytes:
    """A plain value as one frame; UnsupportedPayload names the part that is not plain data."""
    writer = ValueWriter()
    plain = writer.plain(value, "$", 0)
    try:
        head = writer.encode(plain)
    except ENCODE_ERRORS as error:
        raise UnsupportedPayload(f"$: {error}") from None
    return b"".join(writer.frame(_MAGIC, _VERSION, head))


def decode_value(frame: Buffer) -> Any:
    """The value of a frame that `encode_value` wrote, arrays as read-only views of it; DamagedData otherwise.

    >>> decode_value(encode_value({"position": 7, "order": (1, 2)}))
    {'position': 7, 'order': (1, 2)}
    """
    view = memoryview(frame).cast("B").toreadonly()
    head, body, _ = split_frame(view, _MAGIC, _VERSION, "value")
    try:
        return ValueReader(body).decode(head)
    except READ_ERRORS as error:
        raise DamagedData(f"a value frame of {len(view)} bytes cannot be read: {error}") from None


# --- write ----------------------------------------------------------------------------------------------


class ValueWriter:
    """Makes one frame: collects the buffers of the arrays that its encoder meets, and references with their values."""

    def __init__(self, references: list[Any] | None = None) -> None:
        self.refers = False  # whether any reference was met
        self.values: list[Any] = []  # of resolved references
        self._value_index: dict[Resolved, Ext] = {}
        self._beside = references
        self._beside_index: dict[Any, Ext] | None = None
        self._in_value = False
        self._buffers: list[Any] = []  # objects with the buffer protocol
        self._size = 0
        self._written: dict[int, tuple[np.ndarray[Any, Any], Ext]] = {}

    def encode(self, value: Any) -> bytes:
        """MessagePack of a value that went through `plain`."""
        # Not kept on self: a cycle of writer and encoder would keep the arrays until the cycle collector runs.
        return Encoder(enc_hook=self.array).encode(value)

    def frame(self, magic: bytes, version: int, head: bytes, *, checksum: bool = True) -> list[Any]:
        """The pieces of the frame, in order. Arrays are not copied: their own buffers are pieces."""
        padding = -(_HEADER.size + len(head)) % _ALIGNMENT
        body = [_PADDING[padding], *self._buffers]
        start = _START.pack(magic, version, len(head), padding + self._size)
        crc = 0
        if checksum:
            crc = crc32(head, crc32(start))
            for part in body:
                crc = crc32(part, crc)
        return [start, crc.to_bytes(4, "little"), head, *body]

    def array(self, value: object) -> Ext:
        """Add an array to the body; TypeError for anything else. An encoder calls this for every unknown type."""
        if not isinstance(value, np.ndarray):
            raise TypeError(f"a {type(value).__name__} is not plain data")
        known = self._written.get(id(value))
        if known is not None and known[0] is value:
            return known[1]
        code = CODE_OF.get(value.dtype)
        array = value if code is not None and value.flags.c_contiguous else _contiguous(value)
        offset = self._size
        size = array.nbytes
        if size:
            self._buffers.append(array)
        padding = -size % _ALIGNMENT
        if padding:
            self._buffers.append(_PADDING[padding])
        self._size += size + padding
        if code is None:
            code = _dtype_code(value.dtype)
        if array.ndim == 1:
            ext = Ext(_ARRAY, _VECTOR.pack(code, 1, offset, array.size))
        else:
            ext = Ext(_ARRAY, struct.pack(f"<BB{array.ndim + 1}Q", code, array.ndim, offset, *array.shape))
        self._written[id(value)] = (value, ext)
        return ext

    def plain(self, value: Any, path: str, depth: int) -> Any:
        """The value itself if it is plain data, a copy with tuples as extensions, or UnsupportedPayload."""
        kind = type(value)
        if kind in LEAVES:
            return value
        if depth >= MAX_DEPTH:
            raise UnsupportedPayload(f"{path[:120]}: nested deeper than {MAX_DEPTH} levels")
        if kind is dict:
            if LEAVES.issuperset(map(type, value.values())) and _STRINGS.issuperset(map(type, value)):
                return value
            for key in value:
                if type(key) is not str:
                    raise UnsupportedPayload(f"{path}: a key is {key!r}; expected strings as keys")
            changed = {
                key: plain
                for key, item in value.items()
                if type(item) not in LEAVES and (plain := self.plain(item, f"{path}.{key}", depth + 1)) is not item
            }
            return {**value, **changed} if changed else value
        if kind is list or kind is tuple:
            items = [
                item if type(item) in LEAVES else self.plain(item, f"{path}[{i}]", depth + 1)
                for i, item in enumerate(value)
            ]
            if kind is tuple:
                try:
                    return Ext(_TUPLE, self.encode(items))
                except ENCODE_ERRORS as error:
                    raise UnsupportedPayload(f"{path}: {error}") from None
            return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
        if kind is np.ndarray:
            try:
                _dtype_code(value.dtype)
            except TypeError as error:
                raise UnsupportedPayload(f"{path}: {error}") from None
            if value.ndim > MAX_DIMENSIONS:
                raise UnsupportedPayload(
                    f"{path}: an array of {value.ndim} dimensions; expected at most {MAX_DIMENSIONS}"
                )
            return value
        if kind is Resolved or is_reference(value):
            self.refers = True
            if self._in_value:
                raise UnsupportedPayload(
                    f"{path}: a reference inside the value of another; expected values of plain data"
                )
            return self._value(value, path) if kind is Resolved else self._reference(value, path)
        what = f"{path}: a {kind.__module__}.{kind.__qualname__}"
        if kind.__module__.partition(".")[0] == "ray":
            raise UnsupportedPayload(f"{what} is unknown; `import forebay.ray` before any put makes it a reference")
        raise UnsupportedPayload(
            f"{what} is not plain data; expected strings, numbers, bools, None, bytes, and lists, tuples, dicts and "
            "numpy arrays of them (numpy scalars: .item(); torch tensors: .numpy())"
        )

    def _value(self, resolved: Resolved, path: str) -> Ext:
        ext = self._value_index.get(resolved)
        if ext is None:
            if len(self.values) == MAX_REFERENCES:
                raise UnsupportedPayload(f"{path}: more than {MAX_REFERENCES} references in one group")
            self._in_value = True
            self.values.append(self.plain(resolved.value, f"{path} (its value)", 0))
            self._in_value = False
            ext = self._value_index[resolved] = Ext(_VALUE, _INDEX.pack(len(self.values) - 1))
        return ext

    def _reference(self, reference: Any, path: str) -> Ext:
        if self._beside is None:
            raise UnsupportedPayload(f"{path}: a {type(reference).__name__} that was not resolved cannot be stored")
        if self._beside_index is None:
            self._beside_index = {known: Ext(_BESIDE, _INDEX.pack(index)) for index, known in enumerate(self._beside)}
        ext = self._beside_index.get(reference)
        if ext is None:
            ext = self._beside_index[reference] = Ext(_BESIDE, _INDEX.pack(len(self._beside)))
            self._beside.append(reference)
        return ext


def _contiguous(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    little = array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array
    contiguous = np.ascontiguousarray(little).reshape(array.shape)
    # numpy has no buffer protocol for dtypes of other packages.
    return contiguous.view(np.uint16) if array.dtype.name == "bfloat16" else contiguous


def _dtype_code(dtype: np.dtype[Any]) -> int:
    code = CODE_OF.get(dtype)
    if code is not None:
        return code
    if dtype.name == "bfloat16":
        return _BFLOAT16
    code = CODE_OF.get(dtype.newbyteorder("<"))
    if code is None:
        raise TypeError(f"an array of {dtype} is not plain data; expected one of {', '.join(DTYPES)}")
    return code


# --- read -----------------------------------------------------------------------------------------------


def split_frame(
    view: memoryview, magic: bytes, newest: int, kind: str, *, checksum: bool = True
) -> tuple[memoryview, memoryview, int]:
    """The head, the body and the version of a frame; DamagedData if it is not an intact one of this magic."""
    if len(view) < _HEADER.size:
        raise DamagedData(f"a {kind} frame has at least {_HEADER.size} bytes; this one has {len(view)}")
    found, version, head_bytes, body_bytes, crc = _HEADER.unpack_from(view)
    if found != magic:
        raise DamagedData(f"a {kind} frame starts with {magic!r}; this one with {found!r}")
    expected = _HEADER.size + head_bytes + body_bytes
    if expected != len(view) or expected > MAX_FRAME_BYTES:
        raise DamagedData(f"the header of a {kind} frame says {expected} bytes; it has {len(view)}")
    if checksum and crc32(view[_HEADER.size :], crc32(view[: _START.size])) != crc:
        raise DamagedData(f"the checksum of a {kind} frame of {len(view)} bytes does not match: it was altered")
    if not 1 <= version <= newest or bytes(view[5:8]) != b"\0\0\0":
        versions = "version 1" if newest == 1 else f"versions 1 to {newest}"
        raise UnreadableData(f"a {kind} frame of version {version}; this Forebay reads {versions}: use a newer Forebay")
    # The padding between head and body belongs to neither.
    start = _HEADER.size + head_bytes
    return view[_HEADER.size : start], view[start + (-start % _ALIGNMENT) :], version


class ValueReader:
    """Reads the extensions of one frame. Set `values` and `beside` before decoding what refers to them."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._depth = 0
        self._tuples: Decoder[Any] | None = None  # decodes the items of tuples
        self.values: Sequence[Any] | None = None  # what extension 3 refers to
        self.beside: Sequence[Any] | None = None  # what extension 4 refers to
        self._array_bytes: int | None = None  # counts the arrays in values, while `decode_values` reads them

    def decode(self, data: Buffer | msgspec.Raw, kind: Any = Any) -> Any:
        """The value of a piece of the head, checked against a type."""
        try:
            return Decoder(kind, ext_hook=self._extension).decode(data)
        finally:
            self._tuples = None  # a cycle of reader and decoder would keep the frame until the cycle collector runs

    def decode_values(self, data: msgspec.Raw) -> list[Any]:
        """The values of references."""
        # Several arrays may use the same bytes, but putting them back copies each: bounded as a frame is.
        self._array_bytes = 0
        values: list[Any] = self.decode(data, list[Any] | None) or []
        self._array_bytes = None
        if len(values) > MAX_REFERENCES:
            raise InvalidInput(f"{len(values)} references; expected at most {MAX_REFERENCES}")
        return values

    def _extension(self, code: int, data: memoryview) -> Any:
        if code == _ARRAY:
            array = self._array(data)
            if self._array_bytes is not None:
                self._array_bytes += array.nbytes
                if self._array_bytes > MAX_FRAME_BYTES:
                    raise InvalidInput(f"references to more than {MAX_FRAME_BYTES} bytes")
            return array
        if code == _TUPLE:
            self._depth += 1
            if self._depth > MAX_DEPTH + 1:
                raise InvalidInput(f"tuples nested deeper than {MAX_DEPTH} levels")
            if self._tuples is None:
                self._tuples = Decoder(ext_hook=self._extension)
            items = self._tuples.decode(data)
            self._depth -= 1
            if type(items) is not list:
                raise InvalidInput(f"extension {_TUPLE} is a {type(items).__name__}; expected a list")
            return tuple(items)
        if code == _VALUE:
            return _referred(self.values, data)
        if code == _BESIDE:
            return _referred(self.beside, data)
        raise InvalidInput(f"an extension of type {code}; expected 1 (an array), 2 (a tuple), 3 or 4 (references)")

    def _array(self, data: memoryview) -> np.ndarray[Any, Any]:
        if len(data) < 10 or data[1] > MAX_DIMENSIONS or len(data) != 2 + 8 * (data[1] + 1):
            raise InvalidInput(f"an array described by {len(data)} bytes")
        body = self._body
        dtype = _DTYPE_OF.get(data[0])
        if dtype is not None and data[1] == 1:  # nearly every array is a token column
            _, _, offset, items = _VECTOR.unpack(data)
            if items and offset + items * dtype.itemsize <= len(body):
                return np.frombuffer(body, dtype, items, offset)
        code, dimensions, offset, *shape = struct.unpack(f"<BB{data[1] + 1}Q", data)
        if dtype is None:
            if code != _BFLOAT16:
                raise InvalidInput(f"an array of unknown type {code}")
            dtype = bfloat16_dtype()
        items = prod(shape)
        if offset + items * dtype.itemsize > len(body) or max(shape, default=0) > MAX_FRAME_BYTES:
            raise InvalidInput(f"an array of {items} {dtype} at byte {offset} does not fit into {len(body)} bytes")
        if items == 0:
            try:
                array = np.empty(shape, dtype)
            except (ValueError, MemoryError):
                raise InvalidInput(f"an empty array of shape {shape}") from None
            array.setflags(write=False)
            return array
        if code == _BFLOAT16:
            flat = np.frombuffer(body, np.uint16, items, offset).view(dtype)
        else:
            flat = np.frombuffer(body, dtype, items, offset)
        return flat if dimensions == 1 else flat.reshape(shape)


def _referred(known: Sequence[Any] | None, data: memoryview) -> Any:
    if known is None:
        raise InvalidInput("a reference inside a value, or in a frame without references")
    if len(data) != _INDEX.size:
        raise InvalidInput(f"a reference described by {len(data)} bytes")
    (index,) = _INDEX.unpack(data)
    if index >= len(known):
        raise InvalidInput(f"reference {index} of {len(known)}")
    return known[index]
