"""Reserved ranges of addresses: memory that grows in place, and files that are mapped side by side.

A strip of rows is one range of addresses, far larger than what is in it, so that row r is always at r times the row's
bytes: a gather over rows of memory and of any number of files is one gather, and to grow copies nothing. Reserving
costs nothing; only what is touched takes memory. Nothing is read here, and no size is trusted: who maps a file has
checked how long it is.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from bisect import bisect_left
from itertools import chain
from typing import Any

import numpy as np

from forebay.errors import StorageError

__all__ = ["PAGE_BYTES", "Region", "RowAllocator", "same_bytes"]

PAGE_BYTES = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

_NONE = 0
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_WILL_NEED, _HUGE_PAGES, _POPULATE_READ = 3, 14, 22  # Linux; others refuse what they do not know


def same_bytes(one: int, other: int, size: int) -> bool:
    """Whether `size` bytes at two addresses are equal."""
    return one == other or not _libc.memcmp(one, other, size)


class Region:
    """A range of addresses in which parts become memory or mapped files."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // PAGE_BYTES) * PAGE_BYTES
        address = _libc.mmap(None, self.size, _NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if address is None or address == _FAILED:
            raise MemoryError(f"no range of {self.size} addresses can be reserved")
        self.address = int(address)
        self._committed = 0
        memory: Any = (ctypes.c_uint8 * self.size).from_address(self.address)
        self.bytes: np.ndarray[Any, Any] = np.frombuffer(memory, np.uint8)
        # Not at exit: a thread may still be writing then, and the addresses end with the process.
        weakref.finalize(self, _libc.munmap, address, self.size).atexit = False

    def commit(self, until: int) -> None:
        """Make the first `until` bytes memory that can be written."""
        if until <= self._committed:
            return
        # In large steps: each is a system call. But not on into the half where files are mapped.
        wanted = min(max(until, 2 * self._committed, 2**22), max(until, self.size // 2))
        wanted = -(-wanted // PAGE_BYTES) * PAGE_BYTES
        start = self.address + self._committed
        if _libc.mprotect(start, wanted - self._committed, mmap.PROT_READ | mmap.PROT_WRITE):
            raise MemoryError(f"{wanted - self._committed} bytes: {os.strerror(ctypes.get_errno())}")
        _libc.madvise(start, wanted - self._committed, _HUGE_PAGES)  # where there are none, nothing happens
        self._committed = wanted

    def map_file(self, offset: int, descriptor: int, size: int) -> None:
        """Map a file read-only at a multiple of the page size. Rows that it does not have must not be touched."""
        address = _libc.mmap(self.address + offset, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0)
        if address == _FAILED or address is None:
            raise StorageError(
                f"a file of {size} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}; a process maps a limited "
                "number of files (vm.max_map_count): use a smaller window"
            )

    def populate(self, offset: int, size: int) -> None:
        """Bring a part of a mapped file into memory, as far as the system is willing to."""
        start = (self.address + offset) // PAGE_BYTES * PAGE_BYTES
        size = self.address + offset + size - start
        if _libc.madvise(start, size, _POPULATE_READ):
            _libc.madvise(start, size, _WILL_NEED)

    def unmap(self, offset: int, size: int) -> None:
        """Let a file go; its addresses stay reserved."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _libc.mmap(self.address + offset, size, _NONE, flags, -1, 0)


class RowAllocator:
    """Hands out runs of rows between `first` and `last`, and takes them back; what was given back is used first."""

    def __init__(self, first: int, last: int, align: int = 1) -> None:
        self._last, self._align = last, align
        self._first: int = -(-first // align) * align
        self.used_until = self._first
        self._starts: list[int] = []  # of free runs below used_until, in order
        self._ends: list[int] = []
        self._next = 0  # where the search goes on, as in a ring

    def take(self, rows: int) -> int:
        """The first row of a run; MemoryError if there is none left."""
        rows = -(-rows // self._align) * self._align
        count = len(self._starts)
        begin = bisect_left(self._starts, self._next)
        for k in chain(range(begin, count), range(begin)):
            start, end = self._starts[k], self._ends[k]
            if end - start >= rows:
                if end - start == rows:
                    del self._starts[k], self._ends[k]
                else:
                    self._starts[k] = start + rows
                self._next = start + rows
                return start
        # A free run at the very end grows with what is needed.
        start = self.used_until
        if self._ends and self._ends[-1] == start:
            start = self._starts[-1]
        if start + rows > self._last:
            raise MemoryError(f"{rows} rows of {self._last - self._first}: the reserved addresses are used up")
        if start != self.used_until:
            del self._starts[-1], self._ends[-1]
        self.used_until = start + rows
        self._next = self.used_until
        return start

    def give_back(self, start: int, rows: int) -> None:
        if not rows:
            return
        end = start + -(-rows // self._align) * self._align
        k = bisect_left(self._starts, start)
        if k < len(self._starts) and self._starts[k] == end:
            end = self._ends.pop(k)
            del self._starts[k]
        if k and self._ends[k - 1] == start:
            self._ends[k - 1] = end
            return
        self._starts.insert(k, start)
        self._ends.insert(k, end)

    def _check(self) -> None:
        """Free runs are in order, apart from each other, and inside."""
        before = self._first - 1
        for start, end in zip(self._starts, self._ends, strict=True):
            assert before < start < end <= self.used_until <= self._last
            before = end
