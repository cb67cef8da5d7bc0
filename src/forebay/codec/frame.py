"""Groups as frames: the samples of a group as bytes, and read again without being trusted.

A frame of a group has the layout of `values`, the magic "FBG1", and one of three versions. The head of version 1 has
two parts: for each sample the index of the sample that has its prompt (itself, or an earlier one), and the samples. So
the prompt is written once for all members that share it.

A group with references (see `core.references`) is a frame of version 2: the head has a third part, the values of
resolved references, each once, and extension 3 is an index into them. Extension 4 is an index into a list of references
that travels beside the frame. Values hold no references.

A group of which an agent loop changed the prompt (see `core.payload`) is a frame of version 3: the head has a fourth
part with one entry per member: None, or the index of a sample and a difference. The samples after the members are
prompts as issued; such a member has the fields of its prompt with the difference applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import replace

from forebay.codec.values import ENCODE_ERRORS, READ_ERRORS, Buffer, ValueReader, ValueWriter, split_frame
from forebay.core.payload import apply_difference, difference
from forebay.core.references import Resolved, is_reference, put_back
from forebay.core.rollout import (
    COLUMNS,
    FIELDS,
    ISSUED_FIELDS,
    LEAVES,
    NUMBERS,
    PROMPT_FIELDS,
    USER_FIELDS,
    Group,
    RolloutState,
    SampleParams,
    prompt_of,
    same_value,
)
from forebay.core.validate import check_group
from forebay.errors import DamagedData, InvalidGroup, UnsupportedPayload

_MAGIC = b"FBG1"
_VERSION, _WITH_REFERENCES, _WITH_CHANGES = 1, 2, 3
_MAX_SAMPLES = 65_536

_BLANK = RolloutState(message=[])
_NO_PROMPT = {name: getattr(_BLANK, name) for name in PROMPT_FIELDS}
_NOT_ISSUED = {name: getattr(_BLANK, name) for name in (*ISSUED_FIELDS, "issued")}


# --- write ----------------------------------------------------------------------------------------------


def encode_group(group: Sequence[RolloutState], references: list[Any] | None = None) -> bytes:
    """A group as one frame; UnsupportedPayload names the value that is not plain data.

    References are appended to the list, each once, and have to travel beside the frame. Without a list, a group may
    only have references that were resolved.
    """
    return b"".join(encode_parts(group, references))


def encode_parts(
    group: Sequence[RolloutState], references: list[Any] | None = None, *, checksum: bool = True
) -> list[Any]:
    """The pieces of the frame of a group, in order. Arrays are not copied: their own buffers are pieces.

    Without a checksum (zero in its place), only a reader that does not check it accepts the frame: for transports that
    detect damage themselves.
    """
    if len(group) > _MAX_SAMPLES:
        raise UnsupportedPayload(f"a group of {len(group)} samples; expected at most {_MAX_SAMPLES}")
    writer = ValueWriter(references)
    prompts: list[int] = []
    samples: list[RolloutState] = []
    changes: list[tuple[int, Any] | None] = []
    if any(state.issued is not None for state in group):
        group, changes = _apart(group, writer)
    for index, state in enumerate(group):
        source = _prompt_source(group, prompts, state)
        prompts.append(source)
        written = state.__copy__() if source == index else replace(state, **_NO_PROMPT)
        for name in _check_types(written, index):
            value = getattr(written, name)
            plain = writer.plain(value, f"$[{index}].{name}", 0)
            if plain is not value:
                setattr(written, name, plain)
        samples.append(written)
    version = _WITH_CHANGES if changes else _WITH_REFERENCES if writer.refers else _VERSION
    try:
        # Each version adds one part.
        head = writer.encode((prompts, samples, writer.values or None, changes)[: version + 1])
    except ENCODE_ERRORS as error:
        raise UnsupportedPayload(f"{_culprit(group, writer) or '$'}: {error}") from None
    return writer.frame(_MAGIC, version, head, checksum=checksum)


def _prompt_source(group: Sequence[RolloutState], prompts: Sequence[int], state: RolloutState) -> int:
    """The index of the sample to take the prompt from: the first one, that of the previous sample, or its own."""
    prompt = prompt_of(state)
    for source in {0, prompts[-1]} if prompts else ():
        if all(map(same_value, prompt, prompt_of(group[source]))):
            return source
    return len(prompts)


def _apart(
    group: Sequence[RolloutState], writer: ValueWriter
) -> tuple[list[RolloutState], list[tuple[int, Any] | None]]:
    """Members without their issued fields, followed by the prompts as issued; and the changes of each member."""
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
        _check_types(state, index)
        changed = {
            name: [writer.plain(part, f"$[{index}].{name}", 0) for part in parts]
            for name, parts in difference(state, prompt).items()
        }
        changes.append((issued[id(prompt)], changed))
        members.append(replace(state, **_NOT_ISSUED))
    return members + prompts, changes


def _culprit(group: Sequence[RolloutState], writer: ValueWriter) -> str | None:
    """The path of the value that could not be encoded, found by encoding every field alone."""

    def hook(value: Any) -> Any:
        if type(value) is Resolved:
            return value.value
        return None if is_reference(value) else writer.array(value)

    encode = Encoder(enc_hook=hook).encode
    for index, state in enumerate(group):
        for name in FIELDS:
            value = getattr(state, name)
            path = f"$[{index}].{name}"
            if FIELDS[name].column and type(value) is list:
                for position, item in enumerate(value):
                    try:
                        encode(item)
                    except Exception:
                        return f"{path}[{position}] ({type(item).__name__})"
            try:
                encode(value)
            except Exception:
                return path
    return None


# --- types ----------------------------------------------------------------------------------------------

# Not these two: readers accept a status as a string and spans as a list, and `check_group` converts them.
_TYPED_FIELDS = tuple(name for name in FIELDS if name not in ("status", "version_spans"))
_typed_fields_of: Callable[[RolloutState], tuple[Any, ...]] = attrgetter(*_TYPED_FIELDS)
_LISTS_OF_DICTS = tuple(name for name, field in FIELDS.items() if field.of_dicts)
_good_types: dict[tuple[type, ...], tuple[tuple[str, ...], tuple[str, ...]]] = {}
"""Combinations of field types that passed, with the fields to look into; a run has only a few combinations."""


def _check_types(state: RolloutState, index: int) -> tuple[str, ...]:
    """UnsupportedPayload for a field of a type that no reader would accept.

    Returns the fields that hold nested data, which the caller has to check.
    """
    found = tuple(map(type, _typed_fields_of(state)))
    known = _good_types.get(found)
    if known is None:
        kinds = dict(zip(_TYPED_FIELDS, found, strict=True))
        for name, kind in kinds.items():
            if FIELDS[name].types and kind not in FIELDS[name].types:
                what = "reference" if kind is Resolved else kind.__name__
                raise UnsupportedPayload(f"$[{index}].{name}: a {what}; expected {FIELDS[name].expected}")
        nested = tuple(name for name in USER_FIELDS if kinds[name] not in LEAVES)
        known = nested, tuple(name for name in COLUMNS if kinds[name] is list)
        if len(_good_types) < 1_000:
            _good_types[found] = known
    nested, lists = known
    for name in _LISTS_OF_DICTS:
        for position, item in enumerate(getattr(state, name) or ()):
            if type(item) is not dict:
                raise UnsupportedPayload(f"$[{index}].{name}[{position}]: a {type(item).__name__}; expected a dict")
    for name in lists:
        column = getattr(state, name)
        if not NUMBERS.issuperset(map(type, column)):
            position = next(i for i, item in enumerate(column) if type(item) not in NUMBERS)
            kind = type(column[position])
            raise UnsupportedPayload(f"$[{index}].{name}[{position}]: a {kind.__name__}; expected a number")
    if state.sample_params is not None:
        try:
            msgspec.convert(msgspec.to_builtins(state.sample_params), SampleParams)
        except (msgspec.ValidationError, TypeError) as error:
            raise UnsupportedPayload(f"$[{index}].sample_params: {error}") from None
    return nested


# --- read -----------------------------------------------------------------------------------------------


class _Head(msgspec.Struct, array_like=True, gc=False):
    """The head of version 1. `prompts[i]` is the index of the sample that has the prompt of sample i."""

    prompts: list[int]
    samples: list[RolloutState]


class _RawHead(msgspec.Struct, array_like=True, gc=False):
    """The head of later versions. The values are decoded first, because the samples and changes refer to them."""

    prompts: list[int]
    samples: msgspec.Raw
    values: msgspec.Raw
    changes: msgspec.Raw = msgspec.Raw(b"\xc0")


_decode_raw_head = Decoder(_RawHead).decode
_Changes = list[tuple[int, dict[str, list[Any]]] | None]


def decode_group(frame: Buffer, references: Sequence[Any] | None = None, *, checksum: bool = True) -> Group:
    """The samples of a frame, arrays as read-only views of it; DamagedData if it is not an intact frame of a group.

    `references` are those that came beside the frame. Values in the frame are put back, each once: see
    `references.put_back`. Without `checksum`, the checksum is not compared: see `encode_parts`.
    """
    view = memoryview(frame).cast("B").toreadonly()
    head, body, version = split_frame(view, _MAGIC, _WITH_CHANGES, "group", checksum=checksum)
    reader = ValueReader(body)
    try:
        if version == _VERSION:
            content = reader.decode(head, _Head)
            group = _with_prompts(content.prompts, content.samples)
        else:
            group = _read_raw_head(_decode_raw_head(head), reader, references, version)
        check_group(group, group[0].task_name or "")
    except READ_ERRORS as error:
        raise DamagedData(f"a group frame of {len(view)} bytes cannot be read: {error}") from None
    return group


def _read_raw_head(raw: _RawHead, reader: ValueReader, references: Sequence[Any] | None, version: int) -> Group:
    values = reader.decode_values(raw.values)
    reader.values, reader.beside = put_back(values) if values else values, references
    samples = _with_prompts(raw.prompts, reader.decode(raw.samples, list[RolloutState]))
    if version != _WITH_CHANGES:
        return samples
    changes = reader.decode(raw.changes, _Changes)
    members = len(changes)
    if not 1 <= members <= len(samples):
        raise InvalidGroup(f"changes of {members} members among {len(samples)} samples")
    for index, (state, change) in enumerate(zip(samples, changes, strict=False)):
        if change is not None:
            source, changed = change
            if not members <= source < len(samples):
                raise InvalidGroup(f"a prompt as issued at {source}, outside of {members} to {len(samples) - 1}")
            apply_difference(state, samples[source], changed)
            _check_types(state, index)
    return samples[:members]


def _with_prompts(prompts: list[int], samples: list[RolloutState]) -> Group:
    """The samples, each with its prompt."""
    if not 1 <= len(samples) <= _MAX_SAMPLES or len(prompts) != len(samples):
        raise InvalidGroup(
            f"{len(samples)} samples with {len(prompts)} prompts; the numbers must match, and be 1 to {_MAX_SAMPLES}"
        )
    for index, source in enumerate(prompts):
        if samples[index].issued is not None:
            raise InvalidGroup(f"sample {index} has a sample inside")
        if source == index:
            continue
        if not 0 <= source < index or prompts[source] != source:
            raise InvalidGroup(f"sample {index} has its prompt from sample {source}, which does not have one itself")
        for name, value in zip(PROMPT_FIELDS, prompt_of(samples[source]), strict=True):
            setattr(samples[index], name, value)
    return tuple(samples)
