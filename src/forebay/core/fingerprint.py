"""Fingerprints of data sets: a few hundred bytes that show whether a data set was replaced by another one (G4).

A position in a data set means a record only as long as the data set is the same. So a task keeps a fingerprint beside
its position (`SourceState`), in the store and in every checkpoint. It has the length, the order, the group size, and
hashes of 16 records. `differences` compares two fingerprints. Values that cannot be hashed (an image object, a record
that cannot be read) are listed as unverified, and never count as a difference.

Records are hashed as plain data: every process and machine computes the same hash, never from an address or a `repr`.
This module reads no records; see `prompts.sources`.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import hashlib
import itertools
import uuid
from collections.abc import Mapping, Set
from pathlib import PurePath
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from forebay.core.rollout import LEAVES
from forebay.errors import DamagedData, InvalidDataset

SAMPLED_RECORDS = 16


class Fingerprint(msgspec.Struct, kw_only=True, frozen=True):
    """What is known about a data set. None: does not apply, or is not known."""

    kind: str  # "map-style", "iterable" or "prompt source"
    length: int | None = None
    seed: int | None = None
    shuffle: bool | None = None
    group_size: int = 1
    loader: str | None = None  # the class of an iterable loader
    state_keys: tuple[str, ...] | None = None  # of an iterable loader's state
    own: str | None = None  # hash of the data set's own `fingerprint()`, if it has that method
    records: tuple[str | None, ...] = ()  # hashes of the records at `sampled_positions`, or of the first ones drawn
    unverified: tuple[str, ...] = ()  # values that the hashes do not cover: one entry per record

    def completed(self, before: Fingerprint) -> Fingerprint:
        """This fingerprint, completed from an earlier one of the same data set."""
        pairs = itertools.zip_longest(self.records, before.records)
        return replace(
            self,
            state_keys=before.state_keys if self.state_keys is None else self.state_keys,
            records=tuple(earlier if own is None else own for own, earlier in pairs),
        )


class SourceState(msgspec.Struct, kw_only=True, frozen=True):
    """What a task keeps beside its cursor: the fingerprint of its data set, and the state of an iterable loader.

    A task that was given other prompts (`Sampler.set_prompts`) is at a later generation. Record numbers count from the
    cursor at which the generation began.
    """

    fingerprint: Fingerprint
    loader: bytes | None = None
    generation: int = 0
    begun_at: int = 0


_decoder = msgspec.msgpack.Decoder(SourceState)


def pack_state(state: SourceState) -> bytes:
    """A source's state as bytes; the same state gives the same bytes."""
    return msgspec.msgpack.encode(state)


def unpack_state(data: bytes) -> SourceState:
    """The state that `pack_state` packed; DamagedData if the bytes are something else."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedData(f"the state of a data set cannot be read; Forebay did not write it: {error}") from None


def unverified_records(source_state: bytes | None) -> int:
    """The number of sampled records that a fingerprint does not cover completely. For figures: never raises."""
    try:
        return 0 if source_state is None else len(unpack_state(source_state).fingerprint.unverified)
    except DamagedData:
        return 0  # the next draw raises it


def sampled_positions(length: int) -> list[int]:
    """The positions whose records are hashed: spread evenly, the first and the last among them.

    >>> sampled_positions(4), sampled_positions(1000)[:3], len(sampled_positions(1000))
    ([0, 1, 2, 3], [0, 66, 133], 16)
    """
    if length <= SAMPLED_RECORDS:
        return list(range(length))
    return [index * (length - 1) // (SAMPLED_RECORDS - 1) for index in range(SAMPLED_RECORDS)]


def differences(was: Fingerprint, now: Fingerprint) -> dict[str, tuple[Any, Any]]:
    """The fields that differ, as (was, is). A field that one of them does not know is not a difference."""
    changes: dict[str, tuple[Any, Any]] = {}
    for name in ("kind", "length", "shuffle", "seed", "group_size", "loader", "state_keys", "own"):
        before, after = getattr(was, name), getattr(now, name)
        if before == after or before is None or after is None:
            continue
        if name == "seed" and not (was.shuffle and now.shuffle):
            continue  # without shuffling, the seed has no effect
        changes[name] = (before, after)
    if changes.keys() & {"kind", "length", "loader"}:
        return changes  # the hashes belong to other records
    for at, (before, after) in enumerate(zip(was.records, now.records, strict=False)):
        if None not in (before, after) and before != after:
            index = sampled_positions(now.length)[at] if now.kind == "map-style" and now.length is not None else at
            changes[f"record {index}"] = (before, after)
    return changes


# --- hashing ------------------------------------------------------------------------------------------


def digest(value: Any) -> tuple[str | None, str | None]:
    """The hash of a record, or None; and a short list of the values in it that have no hash, or None if all have one.

    The order of keys in mappings does not matter; a tuple has the hash of a list, a numpy number that of a number.

    >>> digest({"a": 1, "b": (2,)}) == digest({"b": [2], "a": np.int64(1)})
    True
    >>> digest({"image": object()})[1]
    '$.image is a builtins.object'
    """
    skipped: list[str] = []
    try:
        data = msgspec.msgpack.encode(_canonical(value, "$", skipped))
    except Exception as error:  # a value of a foreign class may raise anything
        return None, f"it cannot be encoded: {type(error).__name__}"
    return _hash(data), ", ".join(skipped[:4])[:_MAX_CHARACTERS] or None


def own_digest(dataset: Any) -> str | None:
    """The hash of the result of a data set's own `fingerprint()`; None if it has no such method."""
    own = getattr(dataset, "fingerprint", None)
    if not callable(own):
        return None
    hashed, skipped = digest(own())
    if skipped is not None:
        raise InvalidDataset(
            f"fingerprint() of {type_name(dataset)} returned a value that is not plain data: {skipped}"
        )
    return hashed


def type_name(value: object) -> str:
    """The full name of the type of a value.

    >>> type_name([])
    'builtins.list'
    """
    return f"{type(value).__module__}.{type(value).__qualname__}"


_MAX_CHARACTERS = 200
"""The length of the note about one record, which the store keeps."""
_AS_STRING = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, PurePath)


def _canonical(value: Any, path: str, skipped: list[str]) -> Any:
    """The value as scalars and lists. Any other type is a dict with one key that names the type."""
    kind = type(value)
    if kind in LEAVES:
        return value
    if isinstance(value, enum.Enum):
        return _canonical(value.value, path, skipped)
    if isinstance(value, np.generic):
        return _canonical(value.item(), path, skipped)
    if isinstance(value, (str, int, float)):
        return next(plain(value) for plain in (str, int, float) if isinstance(value, plain))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, (list, tuple)):
        if LEAVES.issuperset(map(type, value)):
            return value
        return [_canonical(item, f"{path}[{index}]", skipped) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        items = [
            (key, _canonical(value[key], f"{path}.{key:.40}" if isinstance(key, str) else path, skipped))
            for key in value
        ]
        return {"mapping": _sorted(items, path, skipped)}
    if isinstance(value, msgspec.Struct):
        return _canonical({name: getattr(value, name) for name in value.__struct_fields__}, path, skipped)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _canonical(
            {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, path, skipped
        )
    if isinstance(value, Set):
        return {"set": _sorted([(item, None) for item in value], path, skipped)}
    if kind.__module__ == "torch" and hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return {"array": [list(value.shape), _canonical(value.ravel().tolist(), path, skipped)]}
        content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return {"array": [str(value.dtype), list(value.shape), _hash(content)]}
    if isinstance(value, _AS_STRING):
        return {kind.__name__: str(value)}
    skipped.append(f"{path} is a {type_name(value)}")
    return {"unverified": None}


def _sorted(items: list[tuple[Any, Any]], path: str, skipped: list[str]) -> list[Any]:
    """Keys and items in turn, in the order of the encoded keys, which exists for keys of any type."""
    keyed = [(msgspec.msgpack.encode(_canonical(key, path, skipped)), item) for key, item in items]
    return [part for pair in sorted(keyed, key=lambda pair: pair[0]) for part in pair]


def _hash(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
