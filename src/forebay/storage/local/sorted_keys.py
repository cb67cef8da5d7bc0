"""A sorted collection of distinct keys that stays fast however many there are.

Keys are ints, or tuples, that compare with each other. They live in blocks of bounded length, so that adding or
removing one moves at most a block's pointers: a few microseconds at a million keys. It knows nothing of what the
keys mean.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, TypeAlias

__all__ = ["SortedKeys"]

Key: TypeAlias = Any


class SortedKeys:
    """Distinct keys in sorted order.

    >>> keys = SortedKeys([31, 12])
    >>> keys.add(23)
    >>> list(keys), keys.count_below(20)
    ([12, 23, 31], 1)
    """

    LOAD = 512
    """Blocks hold up to twice as many keys. Tests make it tiny, so that edges appear early."""

    __slots__ = ("_blocks", "_lasts", "_size")

    def __init__(self, keys: list[Key] | None = None) -> None:
        self._blocks: list[list[Key]] = []
        self._lasts: list[Key] = []
        self._size = 0
        for key in keys or ():
            self.add(key)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Key]:
        """All keys in order. The collection must not change meanwhile."""
        for block in self._blocks:
            yield from block

    def add(self, key: Key) -> None:
        """Put a key that is not there yet. O(log n + LOAD) with a tiny constant."""
        lasts = self._lasts
        if not lasts:
            self._blocks.append([key])
            lasts.append(key)
        else:
            if key > lasts[-1]:  # most keys arrive in order
                index = len(lasts) - 1
                block = self._blocks[index]
                block.append(key)
                lasts[index] = key
            else:
                index = bisect_left(lasts, key)
                block = self._blocks[index]
                insort(block, key)
            if len(block) > 2 * self.LOAD:
                self._split(index)
        self._size += 1

    def remove(self, key: Key) -> None:
        """Take a key out; KeyError if it is not there. O(log n + LOAD) with a tiny constant."""
        index = bisect_left(self._lasts, key)
        if index == len(self._lasts):
            raise KeyError(key)
        block = self._blocks[index]
        position = bisect_left(block, key)
        if block[position] != key:
            raise KeyError(key)
        del block[position]
        self._size -= 1
        if not block:
            del self._blocks[index], self._lasts[index]
        elif len(block) * 2 < self.LOAD and len(self._blocks) > 1:
            self._merge(index)
        else:
            self._lasts[index] = block[-1]

    def drop_first(self, count: int) -> None:
        """Take out the first keys; there must be so many."""
        self._size -= count
        while count:
            block = self._blocks[0]
            if count < len(block):
                del block[:count]
                return
            del self._blocks[0], self._lasts[0]
            count -= len(block)

    def first_below(self, key: Key, limit: int) -> list[Key]:
        """The first `limit` keys that sort before `key`."""
        found: list[Key] = []
        for block in self._blocks:
            if len(found) >= limit or block[0] >= key:
                break
            end = len(block) if block[-1] < key else bisect_left(block, key)
            found += block[: min(end, limit - len(found))]
        return found

    def count_below(self, key: Key) -> int:
        """How many keys sort before `key`."""
        index = bisect_left(self._lasts, key)
        below = sum(len(block) for block in self._blocks[:index])
        return below if index == len(self._blocks) else below + bisect_left(self._blocks[index], key)

    def _split(self, index: int) -> None:
        block = self._blocks[index]
        half = len(block) // 2
        self._blocks[index : index + 1] = [block[:half], block[half:]]
        self._lasts[index : index + 1] = [block[half - 1], block[-1]]

    def _merge(self, index: int) -> None:
        """Join a small block with its neighbour, so that scattered removals do not leave crumbs."""
        left = index - 1 if index else 0
        joined = self._blocks[left] + self._blocks[left + 1]
        self._blocks[left : left + 2] = [joined]
        self._lasts[left : left + 2] = [joined[-1]]
        if len(joined) > 2 * self.LOAD:
            self._split(left)

    def _check(self) -> None:
        """Assert every invariant."""
        keys = list(self)
        assert keys == sorted(set(keys)), "sorted and distinct"
        assert len(keys) == self._size, "the size is right"
        assert self._lasts == [block[-1] for block in self._blocks], "lasts are the last keys"
        assert all(1 <= len(block) <= 2 * self.LOAD for block in self._blocks), "blocks are within bounds"
