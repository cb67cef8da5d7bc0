"""Bytes and groups: how samples, records and accounts are written, and read without being trusted.

A group is one frame:

    magic "FBG1" | version u8 | 3 x 0 | head bytes u32 | body bytes u64 | crc32 of all the rest u32 | head | body

The head is MessagePack: the samples, with the prompt written once for all members that share it. The body is the raw
buffers of the arrays, each aligned to 16 bytes; where an array stood, the head has extension 1 (dtype, shape,
offset). Extension 2 is a tuple. There are no others, and none can name code: reading a frame creates plain data
and arrays, or raises DamagedData (G9). Arrays are decoded as read-only views of the frame, without a copy.

Lists stay lists, arrays stay arrays, tuples tuples. A value of any other type is UnsupportedPayload, with its path.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias
from zlib import crc32

import msgspec
import numpy as np
from msgspec.msgpack import Decoder, Encoder, Ext

from forebay.checks import check_group
from forebay.dtypes import BFLOAT16, CODE_OF, DTYPES, bfloat16_dtype
from forebay.errors import DamagedData, InvalidGroup, UnreadableData, UnsupportedPayload
from forebay.ledger import Account
from forebay.record import Record
from forebay.rollout import Group, RolloutState, SampleParams

__all__ = [
    "MAX_FRAME_BYTES",
    "decode_account",
    "decode_group",
    "decode_record",
    "encode_account",
    "encode_group",
    "encode_record",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

_MAGIC = b"FBG1"
_VERSION = 1
_START = struct.Struct("<4sB3xIQ")
_HEADER = struct.Struct("<4sB3xIQI")
_ALIGNMENT = 16
_MAX_DIMENSIONS = 8
_MAX_DEPTH = 64
_MAX_SAMPLES = 65_536

MAX_FRAME_BYTES = 4 * 2**30
"""No group is larger: what claims to be is refused before anything is allocated."""

_ARRAY, _TUPLE = 1, 2
_BFLOAT16 = DTYPES[BFLOAT16][0]
_DTYPE_OF = {code: dtype for dtype, code in CODE_OF.items()}
_VECTOR = struct.Struct("<BBQQ")
_PADDING = [bytes(count) for count in range(_ALIGNMENT)]

_PROMPT_FIELDS = ("message", "prompt_ids", "mm_info", "reward_model", "data_source", "tools", "tool_choice")
_USER_FIELDS = (
    "message",
    "data_source",
    "reward_model",
    "mm_info",
    "tools",
    "tool_choice",
    "tool_calls",
    "routed_experts",
    "reward",
    "extra_fields",
)
_COLUMNS = ("prompt_ids", "tokens", "response_ids", "logprobs", "response_mask", "input_ids", "labels")


class _Head(msgspec.Struct, array_like=True, gc=False):
    """`prompts[i]` is the member that sample i has its prompt from: itself, or an earlier one."""

    prompts: list[int]
    samples: list[RolloutState]


# --- write --------------------------------------------------------------------------------------------


def encode_group(group: Sequence[RolloutState]) -> bytes:
    """A group as one frame; UnsupportedPayload names the value that is not plain data."""
    if len(group) > _MAX_SAMPLES:
        raise UnsupportedPayload(f"a group of {len(group)} samples; expected at most {_MAX_SAMPLES}")
    arrays = _ArrayWriter()
    prompts: list[int] = []
    samples: list[RolloutState] = []
    for index, state in enumerate(group):
        # Members share the prompt of the first, or (another prompt further on) that of their neighbour.
        sources = {0, prompts[-1]} if prompts else ()
        source = next((i for i in sources if _same_prompt(group[i], state)), index)
        prompts.append(source)
        written = state.__copy__()
        if source != index:
            written.message = []
            written.prompt_ids = written.mm_info = written.reward_model = written.data_source = None
            written.tools = written.tool_choice = None
        for name in _check_types(written, index):
            value = getattr(written, name)
            plain = arrays.plain(value, f"$[{index}].{name}", 0)
            if plain is not value:
                setattr(written, name, plain)
        samples.append(written)
    try:
        head = arrays.encode(_Head(prompts, samples))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UnsupportedPayload(f"{_culprit(group, arrays) or '$'}: {error}") from None
    padding = -(_HEADER.size + len(head)) % _ALIGNMENT
    body = [_PADDING[padding], *arrays.buffers]
    start = _START.pack(_MAGIC, _VERSION, len(head), padding + arrays.size)
    crc = crc32(head, crc32(start))
    for part in body:
        crc = crc32(part, crc)
    return b"".join([start, crc.to_bytes(4, "little"), head, *body])


_NONE = type(None)
_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "task_name": (str, _NONE),
    "message": (list,),
    "reward_model": (dict, _NONE),
    "mm_info": (dict, _NONE),
    "tools": (list, _NONE),
    "session_id": (int, str, _NONE),
    "sample_params": (SampleParams, _NONE),
    "response": (str, _NONE),
    "finish_reason": (str, _NONE),
    "tool_calls": (list, _NONE),
    "reward": (dict, _NONE),
    "error_msg": (str, _NONE),
    "extra_fields": (dict,),
}
_NUMBERS = frozenset((int, float, bool))


def _check_types(state: RolloutState, index: int) -> tuple[str, ...]:
    """What is written must be readable: UnsupportedPayload for a field of a type that a reader would refuse.

    Returns the fields that hold more than a leaf, which have to be looked into.
    """
    found = tuple([type(getattr(state, name)) for name in _TYPED_FIELDS])
    nested = _good_types.get(found)
    if nested is None:
        _check_fields(state, index)
        kinds = zip(_TYPED_FIELDS, found, strict=True)
        nested = tuple(name for name, kind in kinds if name in _USER_FIELDS and kind not in _LEAVES)
        if len(_good_types) < 1_000:
            _good_types[found] = nested
    for name in ("message", "tools", "tool_calls"):
        for position, item in enumerate(getattr(state, name) or ()):
            if type(item) is not dict:
                raise UnsupportedPayload(f"$[{index}].{name}[{position}]: a {type(item).__name__}; expected a dict")
    for name in _COLUMNS:
        column = getattr(state, name)
        if column is None or type(column) is np.ndarray:
            continue
        if type(column) is not list:
            raise UnsupportedPayload(f"$[{index}].{name}: a {type(column).__name__}; expected a list or a numpy array")
        if not set(map(type, column)) <= _NUMBERS:
            position = next(i for i, item in enumerate(column) if type(item) not in _NUMBERS)
            kind = type(column[position]).__name__
            raise UnsupportedPayload(f"$[{index}].{name}[{position}]: a {kind}; expected a number")
    if state.sample_params is not None:
        try:
            msgspec.convert(msgspec.to_builtins(state.sample_params), SampleParams)
        except (msgspec.ValidationError, TypeError) as error:
            raise UnsupportedPayload(f"$[{index}].sample_params: {error}") from None
    return nested


_TYPED_FIELDS = (*_FIELD_TYPES, "data_source", "tool_choice", "routed_experts")
_good_types: dict[tuple[type, ...], tuple[str, ...]] = {}
"""Combinations of field types that passed, with the fields to look into: a run has a handful of them."""


def _check_fields(state: RolloutState, index: int) -> None:
    for name, kinds in _FIELD_TYPES.items():
        value = getattr(state, name)
        if type(value) not in kinds:
            expected = " or ".join("None" if kind is _NONE else kind.__name__ for kind in kinds)
            raise UnsupportedPayload(f"$[{index}].{name}: a {type(value).__name__}; expected {expected}")


class _ArrayWriter:
    """Collects the buffers of the arrays that an encoder meets."""

    def __init__(self) -> None:
        self.buffers: list[Any] = []  # whatever lends its bytes
        self.size = 0
        self._encoder = Encoder(enc_hook=self._hook)
        self.encode = self._encoder.encode
        self._written: dict[int, tuple[np.ndarray[Any, Any], Ext]] = {}

    def _hook(self, value: object) -> Ext:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"a {type(value).__name__} is not plain data")
        known = self._written.get(id(value))
        if known is not None and known[0] is value:
            return known[1]
        code = CODE_OF.get(value.dtype)
        array = value if code is not None and value.flags.c_contiguous else _contiguous(value)
        offset = self.size
        size = array.nbytes
        if size:
            self.buffers.append(array)
        padding = -size % _ALIGNMENT
        if padding:
            self.buffers.append(_PADDING[padding])
        self.size += size + padding
        if code is None:
            code = _dtype_code(value.dtype)
        if array.ndim == 1:
            ext = Ext(_ARRAY, _VECTOR.pack(code, 1, offset, array.size))
        else:
            ext = Ext(_ARRAY, struct.pack(f"<BB{array.ndim + 1}Q", code, array.ndim, offset, *array.shape))
        self._written[id(value)] = (value, ext)
        return ext

    def plain(self, value: Any, path: str, depth: int) -> Any:
        """The value itself if it is plain data, a copy with its tuples marked, or UnsupportedPayload."""
        kind = type(value)
        if kind in _LEAVES:
            return value
        if depth >= _MAX_DEPTH:
            raise UnsupportedPayload(f"{path[:120]}: nested deeper than {_MAX_DEPTH} levels")
        if kind is dict:
            if _LEAVES.issuperset(map(type, value.values())) and set(map(type, value)) <= _TEXTS:
                return value
            for key in value:
                if type(key) is not str:
                    raise UnsupportedPayload(f"{path}: a key is {key!r}; expected texts as keys")
            changed = {
                key: plain
                for key, item in value.items()
                if type(item) not in _LEAVES and (plain := self.plain(item, f"{path}.{key}", depth + 1)) is not item
            }
            return {**value, **changed} if changed else value
        if kind is list or kind is tuple:
            items = [
                item if type(item) in _LEAVES else self.plain(item, f"{path}[{i}]", depth + 1)
                for i, item in enumerate(value)
            ]
            if kind is tuple:
                try:
                    return Ext(_TUPLE, self.encode(items))
                except (TypeError, ValueError, OverflowError, RecursionError) as error:
                    raise UnsupportedPayload(f"{path}: {error}") from None
            return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
        if kind is np.ndarray:
            try:
                _dtype_code(value.dtype)
            except TypeError as error:
                raise UnsupportedPayload(f"{path}: {error}") from None
            if value.ndim > _MAX_DIMENSIONS:
                raise UnsupportedPayload(
                    f"{path}: an array of {value.ndim} dimensions; expected at most {_MAX_DIMENSIONS}"
                )
            return value
        raise UnsupportedPayload(
            f"{path}: a {kind.__module__}.{kind.__qualname__} is not plain data; expected texts, numbers, bools, None, "
            "bytes, lists, tuples, dicts and numpy arrays of them (numpy scalars: .item(); torch tensors: .numpy())"
        )


_LEAVES = frozenset((str, int, float, bool, type(None), bytes))
_TEXTS = frozenset((str,))


def _culprit(group: Sequence[RolloutState], arrays: _ArrayWriter) -> str | None:
    """The path of what could not be encoded, found the slow way."""
    for index, state in enumerate(group):
        for name in RolloutState.__struct_fields__:
            value = getattr(state, name)
            path = f"$[{index}].{name}"
            if name in _COLUMNS and type(value) is list:
                for position, item in enumerate(value):
                    try:
                        msgspec.msgpack.encode(item)
                    except Exception:
                        return f"{path}[{position}] ({type(item).__name__})"
            try:
                arrays.encode(value)
            except Exception:
                return path
    return None


def _same_prompt(one: RolloutState, other: RolloutState) -> bool:
    if (
        one.message is other.message
        and one.prompt_ids is other.prompt_ids
        and one.mm_info is other.mm_info
        and one.reward_model is other.reward_model
        and one.data_source is other.data_source
        and one.tools is other.tools
        and one.tool_choice is other.tool_choice
    ):
        return True
    return all(_same(getattr(one, name), getattr(other, name)) for name in _PROMPT_FIELDS)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    try:
        # 1 == 1.0 == True, and they are not the same: what goes in must come out.
        return bool(one == other) and repr(one) == repr(other)
    except ValueError:  # arrays inside, which have no single truth
        return False


def _contiguous(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    little = array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array
    contiguous = np.ascontiguousarray(little).reshape(array.shape)
    # numpy lends no buffer of a dtype that it does not know itself.
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


# --- read ---------------------------------------------------------------------------------------------


class _Reading(threading.local):
    """The body that the arrays of the frame being read are in."""

    body: memoryview = memoryview(b"")
    depth: int = 0


_reading = _Reading()


def decode_group(frame: Buffer) -> Group:
    """The samples of a frame, arrays as read-only views of it; DamagedData if it is not one."""
    view = memoryview(frame).cast("B").toreadonly()
    head, body = _split(view)
    _reading.body, _reading.depth = body, 0
    try:
        content = _group_decoder.decode(head)
        group = _with_prompts(content)
        check_group(group, group[0].task_name or "")
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, InvalidGroup, OverflowError) as error:
        raise DamagedData(f"a group frame of {len(view)} bytes cannot be read: {error}") from None
    finally:
        _reading.body = memoryview(b"")
    return group


def _split(view: memoryview) -> tuple[memoryview, memoryview]:
    if len(view) < _HEADER.size:
        raise DamagedData(f"a group frame has at least {_HEADER.size} bytes; this one has {len(view)}")
    magic, version, head_bytes, body_bytes, crc = _HEADER.unpack_from(view)
    if magic != _MAGIC:
        raise DamagedData(f"a group frame starts with {_MAGIC!r}; this one with {magic!r}")
    expected = _HEADER.size + head_bytes + body_bytes
    if expected != len(view) or expected > MAX_FRAME_BYTES:
        raise DamagedData(f"a group frame says that it has {expected} bytes; there are {len(view)}")
    if crc32(view[_HEADER.size :], crc32(view[: _START.size])) != crc:
        raise DamagedData(f"the checksum of a group frame of {len(view)} bytes does not match: it was altered")
    if version != _VERSION or bytes(view[5:8]) != b"\0\0\0":
        raise UnreadableData(
            f"a group frame of version {version}; this Forebay reads version {_VERSION}: use a newer Forebay"
        )
    # The padding between them belongs to neither.
    start = _HEADER.size + head_bytes
    return view[_HEADER.size : start], view[start + (-start % _ALIGNMENT) :]


def _with_prompts(content: _Head) -> Group:
    samples, prompts = content.samples, content.prompts
    if not 1 <= len(samples) <= _MAX_SAMPLES or len(prompts) != len(samples):
        raise InvalidGroup(f"{len(samples)} samples with {len(prompts)} prompts; expected as many, and at least one")
    for index, source in enumerate(prompts):
        if source == index:
            continue
        if not 0 <= source < index or prompts[source] != source:
            raise InvalidGroup(f"sample {index} has its prompt from sample {source}, which has none of its own")
        sample, prompt = samples[index], samples[source]
        sample.message, sample.prompt_ids, sample.mm_info = prompt.message, prompt.prompt_ids, prompt.mm_info
        sample.reward_model, sample.data_source = prompt.reward_model, prompt.data_source
        sample.tools, sample.tool_choice = prompt.tools, prompt.tool_choice
    return tuple(samples)


def _read_extension(code: int, data: memoryview) -> Any:
    if code == _TUPLE:
        _reading.depth += 1
        if _reading.depth > _MAX_DEPTH + 1:
            raise InvalidGroup(f"tuples nested deeper than {_MAX_DEPTH} levels")
        items = _value_decoder.decode(data)
        _reading.depth -= 1
        if type(items) is not list:
            raise InvalidGroup("a tuple that is none")
        return tuple(items)
    if code == _ARRAY:
        return _read_array(data)
    raise InvalidGroup(f"an extension of type {code}; there are only 1 (an array) and 2 (a tuple)")


def _read_array(data: memoryview) -> np.ndarray[Any, Any]:
    if len(data) < 10 or data[1] > _MAX_DIMENSIONS or len(data) != 2 + 8 * (data[1] + 1):
        raise InvalidGroup(f"an array described by {len(data)} bytes")
    dtype = _DTYPE_OF.get(data[0])
    if dtype is not None and data[1] == 1:  # nearly every array is a column of tokens
        _, _, offset, items = _VECTOR.unpack(data)
        if items and offset + items * dtype.itemsize <= len(_reading.body):
            return np.frombuffer(_reading.body, dtype, items, offset)
    code, dimensions, offset, *shape = struct.unpack(f"<BB{data[1] + 1}Q", data)
    if dtype is None:
        if code != _BFLOAT16:
            raise InvalidGroup(f"an array of unknown type {code}")
        dtype = bfloat16_dtype()
    items = prod(shape)
    if offset + items * dtype.itemsize > len(_reading.body) or max(shape, default=0) > MAX_FRAME_BYTES:
        raise InvalidGroup(f"an array of {items} {dtype} at byte {offset} does not fit into {len(_reading.body)} bytes")
    if items == 0:
        try:
            array = np.empty(shape, dtype)
        except (ValueError, MemoryError):
            raise InvalidGroup(f"an empty array of shape {shape}") from None
        array.setflags(write=False)
        return array
    if code == _BFLOAT16:
        flat = np.frombuffer(_reading.body, np.uint16, items, offset).view(dtype)
    else:
        flat = np.frombuffer(_reading.body, dtype, items, offset)
    return flat if dimensions == 1 else flat.reshape(shape)


_group_decoder = Decoder(_Head, ext_hook=_read_extension)
_value_decoder = Decoder(ext_hook=_read_extension)


# --- records and accounts -----------------------------------------------------------------------------

encode_record = Encoder().encode
encode_account = Encoder().encode
_record_decoder = Decoder(Record)
_account_decoder = Decoder(Account)


def decode_record(data: Buffer) -> Record:
    """A record, or DamagedData."""
    try:
        return _record_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedData(f"a record cannot be read: {error}") from None


def decode_account(data: Buffer) -> Account:
    """An account, or DamagedData."""
    try:
        return _account_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedData(f"an account cannot be read: {error}") from None
