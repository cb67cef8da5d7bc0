"""Where a SQLite store may be, and which process may write to it.

One process writes; a lock file beside the database says which. A network file system is refused: SQLite's WAL needs
shared memory that only one host has. Both are checked before the database is opened. While it is open, its files must
stay where they are: a change that is written to a deleted or moved file is lost.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import weakref
from pathlib import Path

from forebay.errors import InvalidConfig, StorageInUse, StorageVanished

_NETWORK = re.compile(
    "(fuse[.])?(nfs|cifs|smb|9p|ceph|lustre|gpfs|beegfs|glusterfs|afs|ncp|sshfs|s3fs|gcsfuse|goofys|rclone|juicefs|mfs)"
)


def file_system_of(path: Path) -> str | None:
    """The type of the file system that a path is on, None where the system does not tell."""
    try:
        mounts = Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    resolved = path.resolve()
    best, kind = -1, None
    for line in mounts:
        fields = line.split()
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[1]))
        # The last one counts: a mount hides what was mounted at the same place before.
        if (resolved == point or point in resolved.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind


def check_file_system(path: Path) -> None:
    kind = file_system_of(path)
    if kind is not None and _NETWORK.match(kind):
        raise InvalidConfig(
            f"{path} is on a network file system ({kind}), where SQLite's write-ahead log can corrupt the store; use a "
            "local disk"
        )


def holder_of(path: Path) -> str | None:
    """The process that has the store open for writing, as its lock file says; None if there is none."""
    try:
        descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # Shared, and only for this moment: the lock is asked for, not wanted.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return _holder(descriptor)
    finally:
        os.close(descriptor)


class OpenFiles:
    """The files of a store, as they were when it was opened."""

    def __init__(self, database: Path) -> None:
        paths = (database, database.with_name(database.name + "-wal"))
        self._opened = {path: identity for path in paths if (identity := _identity(path)) is not None}

    def check_in_place(self) -> None:
        """StorageVanished unless the same files are still there. Costs a system call for each."""
        for path, identity in self._opened.items():
            found = _identity(path)
            if found != identity:
                raise StorageVanished(
                    f"{path} {'is missing' if found is None else 'is another file now'}: it was deleted, moved or "
                    "replaced while the store was open; nothing of this step was stored. Move it back, or resume from "
                    "a checkpoint into a new store"
                )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _holder(descriptor: int) -> str:
    found = os.read(descriptor, 200).decode(errors="replace") or "another process"
    return f"this process ({found})" if found == _this_process() else found


class ProcessLock:
    """Held by the one process that writes; gone with it, however it ends."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(self._file)
            os.close(self._file)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise StorageInUse(
                f"{path.with_suffix('')} is open for writing by {holder}; one process writes to a SQLite store. Close "
                "it there first"
            ) from None
        try:
            os.ftruncate(self._file, 0)
            os.write(self._file, _this_process().encode())
        except BaseException:  # a full disk: the lock must not outlive the attempt
            self.release()
            raise
        # A child of a fork must not keep the lock alive after its parent.
        lock = weakref.ref(self)

        def release_in_child() -> None:
            held = lock()
            if held is not None:
                held.release()

        os.register_at_fork(after_in_child=release_in_child)

    def release(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
