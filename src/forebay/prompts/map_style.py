"""Map-style data sets: records by index, in an order that is a pure function of (seed, epoch, index).

A map-style data set has `__len__` and `__getitem__`: a list, a Hugging Face data set, a torch Dataset, a JSONL file.
The position in it is one number, so any process can continue from it, and no other state is kept. Nothing is read
before the first record is asked for.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

from forebay.core.fingerprint import Fingerprint, digest, own_digest, sampled_positions, type_name
from forebay.errors import InvalidDataset, InvalidRecord

__all__ = ["MapSource", "shuffled_index"]

_ROUNDS = 8
_MASK = 2**64 - 1


def shuffled_index(seed: int, epoch: int, index: int, size: int) -> int:
    """The position in a data set of the index-th record of an epoch: a permutation of range(size), for one index.

    A Feistel network over the next power of four, applied until the result is below `size`. It depends on no library's
    random generator, so the order never changes. Takes microseconds and no memory.

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


class MapSource:
    """A map-style data set in shuffled order, or in its own order, epoch after epoch."""

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
        """The position in the data set of the cursor-th record."""
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
            raise InvalidDataset(f"the data set {type_name(self._dataset)} is empty; expected at least one record")
        if self._size is None:
            self._size = size
        if size != self._size:
            raise InvalidDataset(
                f"the data set {type_name(self._dataset)} has {size} records, but had {self._size} at the first draw; "
                "positions in it no longer mean the same records"
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
            size, own = self._checked_size(), own_digest(self._dataset)
            records: list[str | None] = []
            unverified: list[str] = []
            for at, index in enumerate(sampled_positions(size) if own is None else ()):
                hashed, skipped = self._digest(index)
                if before is not None and hashed != before.records[at]:
                    hashed, skipped = None, "it differs each time it is read"
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
        """Nothing to do: the cursor is the whole state."""
