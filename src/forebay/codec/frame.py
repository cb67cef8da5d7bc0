"""Bytes and groups: how samples, records and accounts are written, and read without being trusted.

A group is one frame:

    magic "FBG1" | version u8 | 3 x 0 | head bytes u32 | body bytes u64 | crc32 of all the rest u32 | head | body

The head is MessagePack: the samples, with the prompt written once for all members that share it. The body is the raw
buffers of the arrays, each aligned to 16 bytes; where an array stood, the head has extension 1 (dtype, shape,
offset). Extension 2 is a tuple, 3 and 4 are references. There are no others, and none can name code: reading a frame
creates plain data and arrays, or raises DamagedData (G9). Arrays are decoded as read-only views of the frame, without a
copy.

A group with references (see `references`) is a frame of version 2: its head has the values of resolved references as a
third part, each once, and extension 3 is an index into them. Extension 4 is an index into the references that travel
beside the frame, for whoever can carry them. Values hold no references.

A group of which an agent loop changed the prompt (see `issued`) is a frame of version 3: as version 2, with a fourth
part that has for each member None, or the index of a sample and a difference. Samples behind the members are prompts as
issued; such a member has the fields of its prompt with the difference applied.

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

from forebay.codec.payload import COLUMNS, LEAVES, check_types, same_prompt
from forebay.core.dtypes import BFLOAT16, CODE_OF, DTYPES, bfloat16_dtype
from forebay.core.issued import apply_difference, difference
from forebay.core.ledger import Account, GroupEnd
from forebay.core.record import Record
from forebay.core.references import Resolved, is_reference, put_back
from forebay.core.rollout import MAX_DEPTH, MAX_DIMENSIONS, Group, RolloutState
from forebay.core.validate import check_group
from forebay.errors import DamagedData, InvalidGroup, InvalidInput, UnreadableData, UnsupportedPayload

__all__ = [
    "MAX_FRAME_BYTES",
    "decode_account",
    "decode_end",
    "decode_group",
    "decode_record",
    "encode_account",
    "encode_end",
    "encode_group",
    "encode_parts",
    "encode_record",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

_MAGIC = b"FBG1"
_VERSION, _WITH_REFERENCES, _WITH_CHANGES = 1, 2, 3
_START = struct.Struct("<4sB3xIQ")
_HEADER = struct.Struct("<4sB3xIQI")
_ALIGNMENT = 16
_MAX_SAMPLES = 65_536
_MAX_VALUES = 65_536

MAX_FRAME_BYTES = 4 * 2**30
"""No group is larger: what claims to be is refused before anything is allocated."""

_ARRAY, _TUPLE, _VALUE, _BESIDE = 1, 2, 3, 4
_BFLOAT16 = DTYPES[BFLOAT16][0]
_DTYPE_OF = {code: dtype for dtype, code in CODE_OF.items()}
_VECTOR = struct.Struct("<BBQQ")
_INDEX = struct.Struct("<I")
_PADDING = [bytes(count) for count in range(_ALIGNMENT)]


class _Head(msgspec.Struct, array_like=True, gc=False):
    """`prompts[i]` is the member that sample i has its prompt from: itself, or an earlier one."""

    prompts: list[int]
    samples: list[RolloutState]


class _HeadWithValues(msgspec.Struct, array_like=True, gc=False):
    """As it is written: `values` of references, or None if all of them travel beside the frame."""

    prompts: list[int]
    samples: list[RolloutState]
    values: list[Any] | None


class _HeadWithChanges(msgspec.Struct, array_like=True, gc=False):
    """As it is written. `changes` are those of the members; the samples behind them are prompts as issued."""

    prompts: list[int]
    samples: list[RolloutState]
    values: list[Any] | None
    changes: list[tuple[int, Any] | None]


class _RawHead(msgspec.Struct, array_like=True, gc=False):
    """The same as it is read: the values first, because the samples and changes refer to them."""

    prompts: list[int]
    samples: msgspec.Raw
    values: msgspec.Raw
    changes: msgspec.Raw = msgspec.Raw(b"\xc0")


# --- write --------------------------------------------------------------------------------------------


def encode_group(group: Sequence[RolloutState], references: list[Any] | None = None) -> bytes:
    """A group as one frame; UnsupportedPayload names the value that is not plain data.

    References are appended to the list, each once, and have to travel beside the frame; without a list they must have
    been resolved.
    """
    return b"".join(encode_parts(group, references))


def encode_parts(
    group: Sequence[RolloutState], references: list[Any] | None = None, *, checksum: bool = True
) -> list[Any]:
    """The pieces that make the frame of a group, in order: buffers that are still those of its arrays.

    Without a checksum (zero in its place) it is for a reader who does not ask for one: in memory, over a safe way.
    """
    if len(group) > _MAX_SAMPLES:
        raise UnsupportedPayload(f"a group of {len(group)} samples; expected at most {_MAX_SAMPLES}")
    arrays = _ArrayWriter(references)
    prompts: list[int] = []
    samples: list[RolloutState] = []
    changes: list[tuple[int, Any] | None] = []
    if any(state.issued is not None for state in group):
        group, changes = _apart(group, arrays)
    for index, state in enumerate(group):
        # Members share the prompt of the first, or (another prompt further on) that of their neighbour.
        sources = {0, prompts[-1]} if prompts else ()
        source = next((i for i in sources if same_prompt(group[i], state)), index)
        prompts.append(source)
        written = state.__copy__()
        if source != index:
            written.message = []
            written.prompt_ids = written.mm_info = written.reward_model = written.data_source = None
            written.tools = written.tool_choice = None
        for name in check_types(written, index):
            value = getattr(written, name)
            plain = arrays.plain(value, f"$[{index}].{name}", 0)
            if plain is not value:
                setattr(written, name, plain)
        samples.append(written)
    version = _WITH_CHANGES if changes else _WITH_REFERENCES if arrays.refers else _VERSION
    try:
        if version == _VERSION:
            head = arrays.encode(_Head(prompts, samples))
        elif version == _WITH_CHANGES:
            head = arrays.encode(_HeadWithChanges(prompts, samples, arrays.values or None, changes))
        else:
            head = arrays.encode(_HeadWithValues(prompts, samples, arrays.values or None))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UnsupportedPayload(f"{_culprit(group, arrays) or '$'}: {error}") from None
    padding = -(_HEADER.size + len(head)) % _ALIGNMENT
    body = [_PADDING[padding], *arrays.buffers]
    start = _START.pack(_MAGIC, version, len(head), padding + arrays.size)
    crc = 0
    if checksum:
        crc = crc32(head, crc32(start))
        for part in body:
            crc = crc32(part, crc)
    return [start, crc.to_bytes(4, "little"), head, *body]


def _apart(
    group: Sequence[RolloutState], arrays: _ArrayWriter
) -> tuple[list[RolloutState], list[tuple[int, Any] | None]]:
    """Members without the fields of their prompts, the prompts as issued behind them, and what each member changed."""
    issued: dict[int, int] = {}
    members: list[RolloutState] = []
    prompts: list[RolloutState] = []
    changes: list[tuple[int, Any] | None] = []
    for index, state in enumerate(group):
        prompt = state.issued
        if prompt is None:
            members.append(state)
            changes.append(None)
            continue
        if id(prompt) not in issued:
            issued[id(prompt)] = len(group) + len(prompts)
            prompts.append(prompt)
        check_types(state, index)
        changed = {
            name: [arrays.plain(part, f"$[{index}].{name}", 0) for part in parts]
            for name, parts in difference(state, prompt).items()
        }
        changes.append((issued[id(prompt)], changed))
        member = state.__copy__()
        member.message, member.extra_fields, member.issued = [], {}, None
        member.prompt_ids = member.mm_info = member.reward_model = member.data_source = None
        member.tools = member.tool_choice = member.session_id = member.sample_params = None
        members.append(member)
    return members + prompts, changes


class _ArrayWriter:
    """Collects the buffers of the arrays that an encoder meets, and the references with their values."""

    def __init__(self, references: list[Any] | None) -> None:
        self.refers = False
        self.values: list[Any] = []
        self._value_index: dict[Resolved, Ext] = {}
        self._beside = references
        self._beside_index: dict[Any, Ext] | None = None
        self._in_value = False
        self.buffers: list[Any] = []  # whatever lends its bytes
        self.size = 0
        self._encoder = Encoder(enc_hook=self.hook)
        self.encode = self._encoder.encode
        self._written: dict[int, tuple[np.ndarray[Any, Any], Ext]] = {}

    def hook(self, value: object) -> Ext:
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
        if kind in LEAVES:
            return value
        if depth >= MAX_DEPTH:
            raise UnsupportedPayload(f"{path[:120]}: nested deeper than {MAX_DEPTH} levels")
        if kind is dict:
            if LEAVES.issuperset(map(type, value.values())) and set(map(type, value)) <= _TEXTS:
                return value
            for key in value:
                if type(key) is not str:
                    raise UnsupportedPayload(f"{path}: a key is {key!r}; expected texts as keys")
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
                except (TypeError, ValueError, OverflowError, RecursionError) as error:
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
            raise UnsupportedPayload(
                f"{what} is unknown here; `import forebay.ray` makes it a reference, before any put"
            )
        raise UnsupportedPayload(
            f"{what} is not plain data; expected texts, numbers, bools, None, bytes, lists, tuples, dicts and numpy "
            "arrays of them (numpy scalars: .item(); torch tensors: .numpy())"
        )

    def _value(self, resolved: Resolved, path: str) -> Ext:
        ext = self._value_index.get(resolved)
        if ext is None:
            if len(self.values) == _MAX_VALUES:
                raise UnsupportedPayload(f"{path}: one reference more than {_MAX_VALUES} in a group")
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


_TEXTS = frozenset((str,))


def _culprit(group: Sequence[RolloutState], arrays: _ArrayWriter) -> str | None:
    """The path of what could not be encoded, found the slow way."""

    def hook(value: Any) -> Any:
        if type(value) is Resolved:
            return value.value
        return None if is_reference(value) else arrays.hook(value)

    encode = Encoder(enc_hook=hook).encode
    for index, state in enumerate(group):
        for name in RolloutState.__struct_fields__:
            value = getattr(state, name)
            path = f"$[{index}].{name}"
            if name in COLUMNS and type(value) is list:
                for position, item in enumerate(value):
                    try:
                        msgspec.msgpack.encode(item)
                    except Exception:
                        return f"{path}[{position}] ({type(item).__name__})"
            try:
                encode(value)
            except Exception:
                return path
    return None


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
    beside: Sequence[Any] | None = None  # what extension 4 refers to
    values: Sequence[Any] | None = None  # what extension 3 refers to
    value_bytes: int | None = None  # of the arrays in values, while those are read


_reading = _Reading()


def decode_group(frame: Buffer, references: Sequence[Any] | None = None, *, checksum: bool = True) -> Group:
    """The samples of a frame, arrays as read-only views of it; DamagedData if it is not one.

    `checksum`: whether it has to match; see `encode_parts`. `references`: those that came beside the frame. Values that
    are in the frame are put back, each once: see `references.put_back`.
    """
    view = memoryview(frame).cast("B").toreadonly()
    head, body, version = _split(view, checksum)
    _reading.body, _reading.depth = body, 0
    try:
        if version == _VERSION:
            group = _with_prompts(_group_decoder.decode(head))
        else:
            group = _read_head(head, references, version)
        check_group(group, group[0].task_name or "")
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, InvalidInput, OverflowError) as error:
        raise DamagedData(f"a group frame of {len(view)} bytes cannot be read: {error}") from None
    finally:
        _reading.body = memoryview(b"")
        _reading.values = _reading.beside = _reading.value_bytes = None
    return group


def _read_head(head: memoryview, references: Sequence[Any] | None, version: int) -> Group:
    raw = _raw_head_decoder.decode(head)
    # Several arrays may lie on the same bytes, but putting them back copies each: bounded as a group is.
    _reading.value_bytes = 0
    values = _values_decoder.decode(raw.values) or []
    _reading.value_bytes = None
    if len(values) > _MAX_VALUES:
        raise InvalidGroup(f"{len(values)} references; expected at most {_MAX_VALUES}")
    _reading.values, _reading.beside, _reading.depth = put_back(values) if values else values, references, 0
    samples = _with_prompts(_Head(raw.prompts, _samples_decoder.decode(raw.samples)))
    if version != _WITH_CHANGES:
        return samples
    changes = _changes_decoder.decode(raw.changes)
    members = len(changes)
    for state, change in zip(samples, changes, strict=False):
        if change is not None:
            source, changed = change
            if not members <= source < len(samples):
                raise InvalidGroup(f"a prompt as issued at {source}, outside of {members} to {len(samples) - 1}")
            apply_difference(state, samples[source], changed)
            check_types(state, source)
    if not 1 <= members <= len(samples):
        raise InvalidGroup(f"changes of {members} members among {len(samples)} samples")
    return samples[:members]


def _split(view: memoryview, checksum: bool) -> tuple[memoryview, memoryview, int]:
    if len(view) < _HEADER.size:
        raise DamagedData(f"a group frame has at least {_HEADER.size} bytes; this one has {len(view)}")
    magic, version, head_bytes, body_bytes, crc = _HEADER.unpack_from(view)
    if magic != _MAGIC:
        raise DamagedData(f"a group frame starts with {_MAGIC!r}; this one with {magic!r}")
    expected = _HEADER.size + head_bytes + body_bytes
    if expected != len(view) or expected > MAX_FRAME_BYTES:
        raise DamagedData(f"a group frame says that it has {expected} bytes; there are {len(view)}")
    if checksum and crc32(view[_HEADER.size :], crc32(view[: _START.size])) != crc:
        raise DamagedData(f"the checksum of a group frame of {len(view)} bytes does not match: it was altered")
    if not _VERSION <= version <= _WITH_CHANGES or bytes(view[5:8]) != b"\0\0\0":
        raise UnreadableData(
            f"a group frame of version {version}; this Forebay reads versions {_VERSION} to {_WITH_CHANGES}: use a "
            "newer Forebay"
        )
    # The padding between them belongs to neither.
    start = _HEADER.size + head_bytes
    return view[_HEADER.size : start], view[start + (-start % _ALIGNMENT) :], version


def _with_prompts(content: _Head) -> Group:
    samples, prompts = content.samples, content.prompts
    if not 1 <= len(samples) <= _MAX_SAMPLES or len(prompts) != len(samples):
        raise InvalidGroup(f"{len(samples)} samples with {len(prompts)} prompts; expected as many, and at least one")
    for index, source in enumerate(prompts):
        if samples[index].issued is not None:
            raise InvalidGroup(f"sample {index} has a sample inside")
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
        if _reading.depth > MAX_DEPTH + 1:
            raise InvalidGroup(f"tuples nested deeper than {MAX_DEPTH} levels")
        items = _value_decoder.decode(data)
        _reading.depth -= 1
        if type(items) is not list:
            raise InvalidGroup("a tuple that is none")
        return tuple(items)
    if code == _ARRAY:
        array = _read_array(data)
        if _reading.value_bytes is not None:
            _reading.value_bytes += array.nbytes
            if _reading.value_bytes > MAX_FRAME_BYTES:
                raise InvalidGroup(f"references to more than {MAX_FRAME_BYTES} bytes")
        return array
    if code == _VALUE:
        return _read_reference(_reading.values, data)
    if code == _BESIDE:
        return _read_reference(_reading.beside, data)
    raise InvalidGroup(f"an extension of type {code}; there are only 1 (an array), 2 (a tuple), 3 and 4 (references)")


def _read_reference(known: Sequence[Any] | None, data: memoryview) -> Any:
    if known is None:
        raise InvalidGroup("a reference in a frame that has none, inside a value, or without what came beside it")
    if len(data) != _INDEX.size:
        raise InvalidGroup(f"a reference described by {len(data)} bytes")
    (index,) = _INDEX.unpack(data)
    if index >= len(known):
        raise InvalidGroup(f"reference {index} of {len(known)}")
    return known[index]


def _read_array(data: memoryview) -> np.ndarray[Any, Any]:
    if len(data) < 10 or data[1] > MAX_DIMENSIONS or len(data) != 2 + 8 * (data[1] + 1):
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
_raw_head_decoder = Decoder(_RawHead)
_samples_decoder = Decoder(list[RolloutState], ext_hook=_read_extension)
_values_decoder = Decoder(list[Any] | None, ext_hook=_read_extension)
_changes_decoder = Decoder(list[tuple[int, dict[str, list[Any]]] | None], ext_hook=_read_extension)


# --- records and accounts -----------------------------------------------------------------------------

encode_record = Encoder().encode
encode_account = Encoder().encode
encode_end = Encoder().encode
_record_decoder = Decoder(Record)
_account_decoder = Decoder(Account)
_end_decoder = Decoder(GroupEnd)


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


def decode_end(data: Buffer) -> GroupEnd:
    """The end of a group, or DamagedData."""
    try:
        return _end_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedData(f"the end of a group cannot be read: {error}") from None
