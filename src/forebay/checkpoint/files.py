"""The file seam: every file operation of a checkpoint goes through one object.

`FileOps` adds nothing to what the operating system does except for completeness (a write writes all, a read reads all
that is there) and caution (a new file is never an existing one, a file that is read is never a symbolic link). It
raises OSError; its callers say what that means. Tests subclass it to make the n-th operation fail.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["FileOps", "ForwardReader", "NotAPlainFile"]

_CHUNK_BYTES = 4096
_MAX_TRANSFER = 2**30  # one system call moves less than 2 GiB
_MAX_PARTS = 1024  # IOV_MAX
_WRITE_BYTES = 2**20  # one call that writes many megabytes costs several times as much per byte
# What file systems without such locks answer; some network file systems have none for directories.
_NO_LOCKS = frozenset((errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EINVAL))


class NotAPlainFile(OSError):
    """What was to be read is a symbolic link, a directory, a pipe, a device."""


class FileOps:
    """Plain files by descriptor."""

    # --- directories

    def is_directory(self, path: Path) -> bool | None:
        """None if there is nothing."""
        return path.is_dir() if path.exists() else None

    def make_directory(self, path: Path) -> None:
        """Make one that lasts: its parent is synced."""
        try:
            path.mkdir()
        except FileExistsError:  # by another process, just now
            return
        parent = self.open_directory(path.parent)
        try:
            self.sync(parent)
        finally:
            self.close(parent)

    def make_directories(self, path: Path) -> list[Path]:
        """Make a directory and those above it that are missing: these, the innermost first.

        NotADirectoryError, with its name, if there is a file on the way.
        """
        missing, parent = [], path
        while (found := self.is_directory(parent)) is None:
            missing.append(parent)
            parent = parent.parent
        if not found:
            raise NotADirectoryError(errno.ENOTDIR, "it is a file", str(parent))
        for parent in reversed(missing):
            self.make_directory(parent)
        return missing

    def list_directory(self, path: Path) -> list[str]:
        return os.listdir(path)  # noqa: PTH208 - names are wanted, not paths

    def open_directory(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def lock(self, descriptor: int) -> None:
        """Lock against other writers until the descriptor is closed; BlockingIOError if there is one."""
        import fcntl  # not everywhere; reading the package must not need it

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a plain file a second name; FileExistsError if something has that name already."""
        if not stat.S_ISREG(source.lstat().st_mode):
            raise NotAPlainFile(errno.EINVAL, "not a plain file", str(source))
        os.link(source, target, follow_symlinks=False)

    def same_file(self, first: Path, second: Path) -> bool:
        """Whether two names are of one file; symbolic links are not followed."""
        return os.path.samestat(first.lstat(), second.lstat())

    def identity(self, file: Path | int) -> tuple[int, int] | None:
        """Device and inode of a path or a descriptor; None if nothing has that name."""
        try:
            found = os.stat(file)  # noqa: PTH116 - of a descriptor, too
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_dev, found.st_ino

    def remove(self, path: Path) -> None:
        path.unlink()

    # --- files

    def create(self, path: Path) -> int:
        """Open a file that does not exist yet for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def append(self, path: Path, size: int) -> int:
        """Open a file that exists for writing at its end, cut off after `size` bytes first."""
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def truncate(self, descriptor: int, size: int) -> None:
        """Cut a file off after `size` bytes."""
        os.ftruncate(descriptor, size)

    def open(self, path: Path) -> tuple[int, int]:
        """Open a plain file for reading: its descriptor and its size. Never follows a symbolic link."""
        try:
            # A pipe without a writer would otherwise be waited for.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
                raise NotAPlainFile(error.errno, "not a plain file", str(path)) from None
            raise
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise NotAPlainFile(errno.EINVAL, "not a plain file", str(path))
        return descriptor, status.st_size

    def write(self, descriptor: int, parts: Sequence[Buffer]) -> None:
        """Write all parts one after another, without joining them: bytes, or other contiguous memory."""
        # As bytes: the length of a view is a number of items. A view of nothing cannot be cast.
        left = deque(view.cast("B") for part in parts if (view := memoryview(part)).nbytes)
        while left:
            call: list[memoryview] = []
            size = 0
            while left and size < _WRITE_BYTES and len(call) < _MAX_PARTS:
                part = left.popleft()
                if len(part) > _WRITE_BYTES - size:
                    left.appendleft(part[_WRITE_BYTES - size :])
                    part = part[: _WRITE_BYTES - size]
                call.append(part)
                size += len(part)
            rest = size - os.writev(descriptor, call)
            while rest:  # a signal, or a disk that is nearly full
                part = call.pop()[-rest:]
                left.appendleft(part)
                rest -= len(part)

    def read(self, descriptor: int, count: int, offset: int) -> bytes:
        """`count` bytes from `offset`; fewer only where the file ends."""
        data = os.pread(descriptor, min(count, _MAX_TRANSFER), offset)
        if len(data) == count or not data:
            return data
        pieces = [data]
        have = len(data)
        while have < count and data:
            data = os.pread(descriptor, min(count - have, _MAX_TRANSFER), offset + have)
            pieces.append(data)
            have += len(data)
        return b"".join(pieces)

    def sync(self, descriptor: int) -> None:
        """On return the disk has it: of a file its content, of a directory its entries."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)


class ForwardReader:
    """Reads a file from its start to its end: what is large without a copy, what is small from a chunk read ahead."""

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        """`read` is given a number of bytes and an offset."""
        self.position = 0
        self._read = read
        self._chunk = b""
        self._chunk_at = 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes; fewer only where the file ends."""
        start = self.position - self._chunk_at
        if start + count > len(self._chunk):
            self._chunk = self._read(max(count, _CHUNK_BYTES), self.position)
            self._chunk_at, start = self.position, 0
        if count < _CHUNK_BYTES:
            data = self._chunk[start : start + count]
        else:
            data, self._chunk = self._chunk, b""  # read for this alone
            self._chunk_at = self.position + len(data)
        self.position += len(data)
        return data
