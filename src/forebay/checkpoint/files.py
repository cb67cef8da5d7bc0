"""Every file operation of a checkpoint goes through one object, so that tests can make the n-th operation fail.

`FileOps` adds two things to the operating system: completeness (a write writes everything, a read returns everything
up to the end of the file) and caution (a new file never replaces an existing one, a symbolic link is never read). It
raises OSError; its callers turn that into errors of Forebay.
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

_CHUNK_BYTES = 4096
_MAX_TRANSFER = 2**30  # one system call moves less than 2 GiB
_MAX_PARTS = 1024  # IOV_MAX
_WRITE_BYTES = 2**20  # one call that writes many megabytes costs several times as much per byte
# The errors of file systems without such locks; some network file systems cannot lock directories.
_NO_LOCKS = frozenset((errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EINVAL))


class NotAPlainFile(OSError):
    """The path is a symbolic link, a directory, a pipe or a device."""


class FileOps:
    """Plain files by descriptor."""

    # --- directories

    def is_directory(self, path: Path) -> bool | None:
        """Whether a path is a directory; None if it does not exist."""
        return path.is_dir() if path.exists() else None

    def make_directory(self, path: Path) -> None:
        """Create a directory, and sync its parent."""
        try:
            path.mkdir()
        except FileExistsError:  # another process just created it
            return
        parent = self.open_directory(path.parent)
        try:
            self.sync(parent)
        finally:
            self.close(parent)

    def make_directories(self, path: Path) -> list[Path]:
        """Create a directory and its missing parents; returns the created ones, the innermost first.

        NotADirectoryError, with its name, if a parent is a file.
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
        return os.listdir(path)  # noqa: PTH208 - names, not paths

    def open_directory(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def lock(self, descriptor: int) -> None:
        """Lock against other writers until the descriptor is closed; BlockingIOError if another one holds the lock."""
        import fcntl  # POSIX only; importing this module must work everywhere

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
        """Give a plain file a second name; FileExistsError if that name is taken."""
        if not stat.S_ISREG(source.lstat().st_mode):
            raise NotAPlainFile(errno.EINVAL, "not a plain file", str(source))
        os.link(source, target, follow_symlinks=False)

    def same_file(self, first: Path, second: Path) -> bool:
        """Whether two names belong to one file; symbolic links are not followed."""
        return os.path.samestat(first.lstat(), second.lstat())

    def identity(self, file: Path | int) -> tuple[int, int] | None:
        """Device and inode of a path or a descriptor; None if the path does not exist."""
        try:
            found = os.stat(file)  # noqa: PTH116 - also takes a descriptor
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_dev, found.st_ino

    def remove(self, path: Path) -> None:
        path.unlink()

    # --- files

    def create(self, path: Path) -> int:
        """Create a file and open it for writing; FileExistsError if it exists."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def append(self, path: Path, size: int) -> int:
        """Cut an existing file off after `size` bytes, and open it for appending."""
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
            # Without O_NONBLOCK this would wait for a writer to open a pipe.
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
        """Write all parts one after another without joining them: bytes, or other contiguous memory."""
        # Cast to bytes, because the length of a view counts items. An empty view cannot be cast.
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
            while rest:  # a signal interrupted it, or the disk is nearly full
                part = call.pop()[-rest:]
                left.appendleft(part)
                rest -= len(part)

    def read(self, descriptor: int, count: int, offset: int) -> bytes:
        """`count` bytes from `offset`; fewer only at the end of the file."""
        pieces = []
        while count and (data := os.pread(descriptor, min(count, _MAX_TRANSFER), offset)):
            pieces.append(data)
            count -= len(data)
            offset += len(data)
        return b"".join(pieces)  # a single piece is not copied

    def sync(self, descriptor: int) -> None:
        """Write the content of a file, or the entries of a directory, to the disk."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)


class ForwardReader:
    """Reads a file from start to end: large pieces without a copy, small pieces from a chunk that was read ahead."""

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        """`read` takes a number of bytes and an offset."""
        self.position = 0
        self._read = read
        self._chunk = b""
        self._chunk_at = 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes; fewer only at the end of the file."""
        start = self.position - self._chunk_at
        if start + count > len(self._chunk):
            self._chunk = self._read(max(count, _CHUNK_BYTES), self.position)
            self._chunk_at, start = self.position, 0
        if count < _CHUNK_BYTES:
            data = self._chunk[start : start + count]
        else:
            data, self._chunk = self._chunk, b""  # it was read for this call alone
            self._chunk_at = self.position + len(data)
        self.position += len(data)
        return data
