"""Where prompts are read from, in which order, and from where to go on.

Two kinds of source. A map-style data set (`__len__` and `__getitem__`: a list, a Hugging Face data set, a torch
Dataset, a JSONL file) is read in an order that is a pure function of (seed, epoch, index): its position is one number,
any process can go on from it, and nothing is kept. An iterable loader (torchdata's StatefulDataLoader, a Hugging Face
IterableDataset, anything with `__iter__`) has a position of its own: `state_dict` / `load_state_dict` where it has
them, otherwise it is counted, and read again up to there after a restart: exact if it gives the same records each time
that it is made, and slow.

Nothing is iterated, indexed or opened before the first record is asked for. Each source tells what it is
(`fingerprint`), so that a position is not applied to another data set.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace

from forebay.core.fingerprint import SAMPLED_RECORDS, Fingerprint, digest, sampled_positions
from forebay.core.rollout import RolloutState
from forebay.core.validate import whole_number
from forebay.errors import DamagedData, InvalidDataset, InvalidRecord, UnsupportedPayload

__all__ = ["JSONLDataset", "LoaderSource", "MapSource", "Source", "open_source", "shuffled_index"]

log = logging.getLogger(__name__)

_ROUNDS = 8
_MASK = 2**64 - 1
_MAX_LINE_BYTES = 64 << 20


# --- order --------------------------------------------------------------------------------------------


def shuffled_index(seed: int, epoch: int, index: int, size: int) -> int:
    """Where the index-th record of an epoch stands in a data set: a permutation of range(size), computed for one index.

    A Feistel network over the next power of four, walked until it lands inside. The same for ever: no library's
    generator decides it, and resuming is an integer. Some microseconds, no memory.

    >>> sorted(shuffled_index(7, 0, i, 5) for i in range(5))
    [0, 1, 2, 3, 4]
    >>> [shuffled_index(7, epoch, 0, 1000) for epoch in range(4)]
    [271, 726, 538, 542]
    """
    keys = _round_keys(seed, epoch)
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            mixed = (right ^ key) * 0x9E3779B97F4A7C15 & _MASK
            mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & _MASK
            left, right = right, left ^ (mixed >> 32) & mask
        index = left << half | right
        if index < size:
            return index


@functools.lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.shake_128(f"forebay {seed} {epoch}".encode()).digest(8 * _ROUNDS)
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8))


# --- sources ------------------------------------------------------------------------------------------


class Source(Protocol):
    """What a sampler draws from: records by their number, from 0 on, in a fixed order."""

    inline: bool
    """Whether reading is quick enough for the event loop; otherwise it happens in a thread."""

    def read(self, cursor: int) -> tuple[int, Any]:
        """The cursor-th record, and its index for error messages."""

    def state(self) -> bytes | None:
        """Where to go on after the last record read; None if the cursor says it all."""

    def restore(self, cursor: int, state: bytes | None) -> None:
        """Go on at the cursor, where `state` was the state; nothing happens if it stands there."""

    def fingerprint(self, *, again: bool = False) -> Fingerprint:
        """What the data set is, as far as it is known; the first call may read records.

        `again`: read them once more, and leave out those that differ each time.
        """

    def __len__(self) -> int: ...


class MapSource:
    """A map-style data set in shuffled (or its own) order, epoch after epoch."""

    def __init__(self, dataset: Any, seed: int, shuffle: bool) -> None:
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._size: int | None = None
        self._fingerprint: Fingerprint | None = None
        self.inline = isinstance(dataset, (list, tuple))

    def __len__(self) -> int:
        return len(self._dataset)

    def index(self, cursor: int) -> int:
        """Which record is the cursor-th."""
        size = len(self._dataset)
        epoch, index = divmod(cursor, size)
        return shuffled_index(self._seed, epoch, index, size) if self._shuffle else index

    def read(self, cursor: int) -> tuple[int, Any]:
        self._checked_size()
        index = self.index(cursor)
        return index, self._record(index)

    def _checked_size(self) -> int:
        size = len(self._dataset)
        if size <= 0:
            raise InvalidDataset(f"the data set {_name(self._dataset)} is empty; expected at least one record")
        if self._size is None:
            self._size = size
        if size != self._size:
            raise InvalidDataset(
                f"the data set {_name(self._dataset)} has {size} records, and had {self._size} when it was first drawn "
                "from; positions in it no longer mean the same records"
            )
        return size

    def _record(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except InvalidDataset:
            raise
        except Exception as error:
            raise InvalidRecord(index, f"cannot be read: {type(error).__name__}: {error}") from error

    def fingerprint(self, *, again: bool = False) -> Fingerprint:
        before = self._fingerprint
        if before is None or again:
            size, own = self._checked_size(), _own_fingerprint(self._dataset)
            records: list[str | None] = []
            unverified: list[str] = []
            for at, index in enumerate(sampled_positions(size) if own is None else ()):
                hashed, skipped = self._digest(index)
                if before is not None and hashed != before.records[at]:
                    hashed, skipped = None, "it is not the same each time it is read"
                records.append(hashed)
                if skipped is not None:
                    unverified.append(f"record {index}: {skipped}")
            self._fingerprint = Fingerprint(
                kind="map-style",
                length=size,
                seed=self._seed,
                shuffle=self._shuffle,
                own=own,
                records=tuple(records),
                unverified=tuple(unverified),
            )
        assert self._fingerprint is not None
        return self._fingerprint

    def _digest(self, index: int) -> tuple[str | None, str | None]:
        try:
            return digest(self._record(index))
        except InvalidRecord as error:
            return None, f"reading it raised {type(error.__cause__ or error).__name__}"

    def state(self) -> bytes | None:
        return None

    def restore(self, cursor: int, state: bytes | None) -> None:
        """The cursor says it all."""


class LoaderSource:
    """An iterable loader: one producer, which goes on where the loader's own state says.

    The last record can be asked for again, so that a draw that came to nothing (cancelled, no room) skips none.
    """

    inline = False

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._stateful = callable(getattr(loader, "state_dict", None)) and callable(
            getattr(loader, "load_state_dict", None)
        )
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._delivered = 0  # in this epoch
        self._epoch_is_new = False  # it may show as an empty one first, see `_load`
        self._cursor = 0
        self._state: bytes | None = None  # at the cursor
        self._last: tuple[Any, bytes | None] | None = None  # the record before the cursor, and the state before it
        self._lost = False  # an error left the loader somewhere
        self._used = False
        self._state_keys: tuple[str, ...] | None = None
        self._fixed: Fingerprint | None = None
        self._first: dict[int, tuple[str | None, str | None]] = {}  # hashes of the first records, as far as they came

    def __len__(self) -> int:
        try:
            return len(self._loader)
        except TypeError:
            raise InvalidDataset(f"the loader {_name(self._loader)} does not know its length") from None

    def read(self, cursor: int) -> tuple[int, Any]:
        if self._last is not None and cursor == self._cursor - 1 and not self._lost:
            return cursor, self._last[0]
        if cursor != self._cursor or self._lost:
            raise InvalidDataset(
                f"the loader {_name(self._loader)} stands at record {self._cursor}, but record {cursor} was asked for: "
                "an iterable loader has one producer per task; use a map-style data set for several"
            )
        try:
            record = self._next()
            delivered = self._delivered + 1
            state = self._pack(delivered)
        except InvalidDataset:
            self._lost = True
            raise
        except Exception as error:
            self._lost = True
            raise InvalidDataset(
                f"the loader {_name(self._loader)} failed at record {cursor}: {type(error).__name__}: {error}"
            ) from error
        self._note(cursor, record)
        self._last = (record, self._state)
        self._state, self._delivered = state, delivered
        self._cursor += 1
        self._used = True
        return cursor, record

    def _next(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = self._iterate()
            try:
                record = next(self._iterator)
            except StopIteration:
                self._epoch += not self._epoch_is_new
                self._epoch_is_new = False
                self._delivered = 0
                self._iterator = None
                continue
            self._epoch_is_new = False
            return _single(record)
        raise InvalidDataset(f"the loader {_name(self._loader)} gave no record in a whole epoch; it is empty")

    def _iterate(self) -> Iterator[Any]:
        set_epoch = getattr(self._loader, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._epoch)
        return iter(self._loader)

    def _pack(self, delivered: int) -> bytes:
        content: dict[str, Any] = {"epoch": self._epoch, "delivered": delivered, "cursor": self._cursor + 1}
        if self._stateful:
            content["loader"] = state = self._loader.state_dict()
            self._state_keys = tuple(sorted(map(str, state))) if isinstance(state, Mapping) else ()
        try:
            return _pack(content)
        except UnsupportedPayload as error:
            raise InvalidDataset(f"the state of the loader {_name(self._loader)} is not plain data: {error}") from error

    def state(self) -> bytes | None:
        return self._state

    def restore(self, cursor: int, state: bytes | None) -> None:
        if not self._lost:
            if (cursor, state) == (self._cursor, self._state):
                return
            if self._last is not None and (cursor, state) == (self._cursor - 1, self._last[1]):
                return
        if state is not None:
            content = _unpack(state)
            if not isinstance(content, dict) or not all(
                type(content.get(name)) is int for name in ("epoch", "delivered", "cursor")
            ):
                raise DamagedData("the state of an iterable loader cannot be read; it was written by something else")
        elif cursor:
            raise InvalidDataset(
                f"{cursor} groups were drawn, but no loader's state is known: they came from a map-style data set, "
                "and an iterable loader cannot go on from there; start a task of another name"
            )
        elif self._stateful and self._used:
            raise InvalidDataset(
                f"the loader {_name(self._loader)} stands at record {self._cursor}, and cannot go back to its start "
                "for another task or buffer; give each of them a sampler and a loader of its own"
            )
        else:
            content = {"epoch": 0, "delivered": 0, "cursor": 0}
        if content["cursor"] != cursor:
            raise InvalidDataset(
                f"{cursor} groups were drawn, but the loader's state is that of record {content['cursor']}: the rest "
                "came from a map-style data set; an iterable loader cannot go on there; start a task of another name"
            )
        self._lost = True
        try:
            self._load(content)
        except InvalidDataset:
            raise
        except Exception as error:
            raise InvalidDataset(
                f"the loader {_name(self._loader)} cannot go on at record {cursor}: {type(error).__name__}: {error}"
            ) from error
        self._cursor, self._state, self._last = cursor, state, None
        self._lost = False

    def _load(self, content: dict[str, Any]) -> None:
        self._iterator, self._epoch_is_new = None, False
        self._epoch, self._delivered = content["epoch"], content["delivered"]
        if self._stateful and "loader" in content:
            self._used = True
            self._loader.load_state_dict(content["loader"])
            if self._delivered and self._delivered == self._length():
                # The epoch was over: some loaders go on with an empty one, others with the next one.
                self._epoch += 1
                self._delivered, self._epoch_is_new = 0, True
            return
        if not content["cursor"]:
            return
        log.warning("loader_skips_ahead records=%d epoch=%d", self._delivered, self._epoch)
        if not self._used and not callable(getattr(self._loader, "set_epoch", None)):
            # A generator that shuffles is where it was only after all the epochs before this one.
            for epoch in range(self._epoch):
                for cursor, record in enumerate(self._loader):
                    if not epoch:
                        self._note(cursor, _single(record))
        self._used = True
        self._iterator = self._iterate()
        for skipped in range(self._delivered):
            record = next(self._iterator, self)
            if record is self:
                raise InvalidDataset(
                    f"the loader {_name(self._loader)} ended after {skipped} records of epoch {self._epoch}; "
                    f"{self._delivered} had been drawn: it is not the one that was drawn from"
                )
            if not self._epoch:
                self._note(skipped, _single(record))

    def _note(self, cursor: int, record: Any) -> None:
        if cursor < SAMPLED_RECORDS:
            self._first[cursor] = digest(record)

    def fingerprint(self, *, again: bool = False) -> Fingerprint:
        if self._fixed is None:
            self._fixed = Fingerprint(
                kind="iterable",
                length=self._length(),
                loader=type(self._loader).__qualname__,
                own=_own_fingerprint(self._loader),
            )
        if self._fixed.own is not None:
            return self._fixed
        first = [self._first.get(cursor, (None, None)) for cursor in range(max(self._first, default=-1) + 1)]
        return replace(
            self._fixed,
            state_keys=self._state_keys,
            records=tuple(hashed for hashed, _ in first),
            unverified=tuple(f"record {cursor}: {skipped}" for cursor, (_, skipped) in enumerate(first) if skipped),
        )

    def _length(self) -> int | None:
        try:
            return len(self._loader)
        except (TypeError, NotImplementedError):
            return None


# --- the state of a loader ----------------------------------------------------------------------------


def _pack(value: Any) -> bytes:
    """A loader's state as bytes: a group's frame holds any plain data, and is checked when it is read."""
    from forebay.codec.frame import encode_group

    return encode_group([RolloutState(message=[], extra_fields={"state": _plain(value)})])


def _unpack(data: bytes) -> Any:
    from forebay.codec.frame import decode_group

    return _as_it_was(decode_group(data)[0].extra_fields.get("state"))


_MARK = "forebay:"


def _plain(value: Any) -> Any:
    """The value as a frame can hold it.

    Loaders of torch keep the state of their generator as a tensor, numpy's generators numbers of 128 bits; some have
    dicts whose keys are numbers.
    """
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith(_MARK) for key in value):
            return {key: _plain(item) for key, item in value.items()}
        return {f"{_MARK}items": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple([_plain(item) for item in value])
    if type(value) is int and not -(2**63) <= value < 2**63:
        return {f"{_MARK}int": hex(value)}
    if isinstance(value, np.generic):
        return _plain(value.item())
    if type(value).__module__ == "torch" and hasattr(value, "detach"):
        return {f"{_MARK}tensor": value.detach().cpu().numpy()}
    return value


def _as_it_was(value: Any) -> Any:
    if isinstance(value, dict):
        if f"{_MARK}items" in value:
            return {_as_it_was(key): _as_it_was(item) for key, item in value[f"{_MARK}items"]}
        if f"{_MARK}int" in value:
            return int(value[f"{_MARK}int"], 16)
        if f"{_MARK}tensor" in value:
            import torch  # type: ignore[import-not-found,unused-ignore]

            return torch.from_numpy(value[f"{_MARK}tensor"].copy())
        return {key: _as_it_was(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_as_it_was(item) for item in value])
    return value.copy() if isinstance(value, np.ndarray) else value


# --- what a user calls a data set -----------------------------------------------------------------------


def open_source(dataset: Any, *, seed: int, shuffle: bool) -> Source:
    """The source for whatever a user calls a data set; InvalidDataset says what would do."""
    whole_number("seed", seed)
    if isinstance(dataset, (str, Path)):
        dataset = JSONLDataset(dataset)
    if isinstance(dataset, Mapping):
        raise InvalidDataset("the data set is a mapping; expected a sequence of records (pass one of its splits)")
    # torch gives every data set a __getitem__; that of an IterableDataset only raises.
    iterable = any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not iterable:
        return MapSource(dataset, seed, shuffle)
    if hasattr(dataset, "__next__"):
        raise InvalidDataset(
            f"the data set {_name(dataset)} is an iterator, which can be read once only; expected a list, a data set "
            "with __len__ and __getitem__, a loader that can be iterated again, or the path of a JSONL file"
        )
    if hasattr(dataset, "__iter__"):
        return LoaderSource(dataset)
    raise InvalidDataset(
        f"{_name(dataset)} cannot be drawn from; expected a list, a data set with __len__ and __getitem__, a loader, "
        "or the path of a JSONL file"
    )


def _name(dataset: object) -> str:
    return f"{type(dataset).__module__}.{type(dataset).__qualname__}"


def _single(record: Any) -> Any:
    """The record in a batch of one: a loader with batch_size=1 and no collation."""
    return record[0] if isinstance(record, list) and len(record) == 1 else record


def _own_fingerprint(dataset: Any) -> str | None:
    """The hash of what the `fingerprint()` of a data set returns, if it has one."""
    own = getattr(dataset, "fingerprint", None)
    if not callable(own):
        return None
    hashed, skipped = digest(own())
    if skipped is not None:
        raise InvalidDataset(f"fingerprint() of {_name(dataset)} returned something else than plain data: {skipped}")
    return hashed


# --- files --------------------------------------------------------------------------------------------


class JSONLDataset:
    """A file with one JSON object per line, as a map-style data set. Keeps 8 bytes per record in memory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._offsets: array[int] | None = None
        self._identity: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self._index())

    def __getitem__(self, index: int) -> Any:
        offsets = self._index()
        if not 0 <= index < len(offsets):
            raise IndexError(index)
        try:
            with self.path.open("rb") as file:
                file.seek(offsets[index])
                line = file.readline(_MAX_LINE_BYTES + 1)
        except OSError as error:
            raise self._unreadable(error) from error
        if len(line) > _MAX_LINE_BYTES:
            raise InvalidRecord(
                index, f"({self.path}) is longer than {_MAX_LINE_BYTES >> 20} MiB; expected one JSON object per line"
            )
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidRecord(index, f"({self.path}) is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise InvalidRecord(index, f"({self.path}) is a {type(record).__name__}; expected a JSON object")
        return record

    def _index(self) -> array[int]:
        """Where every record starts; lines that are blank are no records."""
        try:
            stat = self.path.stat()
            identity = (stat.st_size, stat.st_mtime_ns)
            if self._offsets is None:
                self._offsets, self._identity = self._find_records(), identity
        except OSError as error:
            raise self._unreadable(error) from error
        if identity != self._identity:
            raise InvalidDataset(
                f"{self.path} has changed since it was opened; positions in it no longer mean the same records"
            )
        return self._offsets

    def _find_records(self) -> array[int]:
        offsets = array("q")
        start, within = 0, False
        with self.path.open("rb") as file:
            # In pieces: a file that is one endless line must not be read into memory to find that out.
            while piece := file.readline(_MAX_LINE_BYTES + 1):
                if not within and (len(piece) > _MAX_LINE_BYTES or not piece.isspace()):
                    offsets.append(start)
                start += len(piece)
                within = not piece.endswith(b"\n")
        return offsets

    def _unreadable(self, error: OSError) -> InvalidDataset:
        return InvalidDataset(f"the data set {self.path} cannot be read: {error.strerror}")
