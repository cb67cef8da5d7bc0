"""Memory for batches: page-aligned, and used again when the last array or tensor on it is gone.

Fresh memory costs more than the copy into it. A block is lent as one array; every column of a batch is a view of it, so
the block is free when all of them are. That can happen in any thread and in the middle of anything, so returning a
block takes no lock.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np

__all__ = ["BlockPool"]

_KEPT = 8  # blocks that wait to be used again


class BlockPool:
    """Lends blocks of memory."""

    def __init__(self) -> None:
        self._free: deque[mmap.mmap] = deque(maxlen=_KEPT)
        self._lent: dict[int, tuple[weakref.ref[Any], mmap.mmap]] = {}

    def lend(self, size: int) -> np.ndarray[Any, Any]:
        """At least `size` bytes that nobody else has, with whatever was in them before."""
        block = self._find(size)
        array = np.frombuffer(block, np.uint8)
        key = id(array)

        def give_back(_: object) -> None:
            _, free = self._lent.pop(key)
            self._free.append(free)  # one too many pushes the oldest out

        self._lent[key] = (weakref.ref(array, give_back), block)
        return array

    def _find(self, size: int) -> mmap.mmap:
        for _ in range(_KEPT):
            try:
                block = self._free.popleft()
            except IndexError:
                break
            if size <= len(block) <= 2 * size + mmap.PAGESIZE:
                return block
            self._free.append(block)
        block = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # touching it for the first time then costs half
            with suppress(OSError):
                block.madvise(mmap.MADV_HUGEPAGE)
        return block
