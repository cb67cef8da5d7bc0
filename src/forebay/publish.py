"""Directories whose `manifest.json` is the commit point: the seam under every kind of checkpoint.

The manifest is a sealed JSON document, which says by itself what it is and that it is whole:

    {"format":"<format>","version":<version>,"sha256":"<of what follows>","manifest":{...}}

`Envelope` seals and opens it. `DirectoryWriter` brings files into a directory and then replaces the manifest;
`open_published` reads what is there.

Promised (G8): a reader finds the old manifest or the new one, with every file that it names, whatever operation
failed. New files are synced before the manifest is renamed. What neither the new manifest nor the one before it names
is removed after that, and nothing that does not look like a file of this format. One writer at a time. Nothing that is
read is trusted, executed (G9), or followed out of the directory.

Not here: what the body of a manifest and the other files mean. Everything blocks; callers use a thread. POSIX only.
"""

from __future__ import annotations

import errno
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from forebay.errors import CheckpointError, DamagedData, InvalidInput
from forebay.files import FileOps, NotAPlainFile

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "MANIFEST",
    "MANIFEST_LEFTOVER",
    "MAX_MANIFEST_BYTES",
    "UNREADABLE",
    "DirectoryWriter",
    "Envelope",
    "OtherVersion",
    "doing",
    "open_plain",
    "open_published",
    "read_manifest",
]

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 * 2**20
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)  # what decoding foreign bytes raises

MANIFEST_LEFTOVER = re.compile(r"manifest-[0-9a-f]{16}\.tmp", re.ASCII)
_MIDDLE, _CLOSING = b'","manifest":', b"}\n"
# What a file system answers that has no hard links, or none for this file; a copy serves as well.
_CANNOT_LINK = frozenset(
    (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
)

T = TypeVar("T")


@contextmanager
def doing(what: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that says what could not be done, and where."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {what} {path}: {error.strerror or error}") from error


# --- the manifest -------------------------------------------------------------------------------------


class OtherVersion(DamagedData):
    """Written by a newer or an older Forebay. Kept apart from damage: it must not be overwritten."""


class _Format(msgspec.Struct):
    format: str
    version: int


_format_decoder = msgspec.json.Decoder(_Format)


@dataclass(frozen=True, slots=True)
class Envelope:
    """The sealed document of a format and a version."""

    format: str
    version: int

    def seal(self, body: bytes) -> bytes:
        """The document with this body, which is JSON; InvalidInput if it gets too long."""
        data = self._sealed(body)
        if len(data) > MAX_MANIFEST_BYTES:
            raise InvalidInput(
                f"the manifest of a checkpoint has {len(data)} bytes; expected at most {MAX_MANIFEST_BYTES}"
            )
        return data

    def open(self, data: bytes, path: Path) -> bytes:
        """The body, byte for byte as it was sealed; DamagedData, OtherVersion if another Forebay wrote it."""
        try:
            found = _format_decoder.decode(data)
        except UNREADABLE as error:
            raise DamagedData(f"{path} is not the manifest of a checkpoint: {error}") from None
        if found.format != self.format:
            raise DamagedData(f"{path} is of format {found.format[:100]!r}; expected {self.format!r}")
        if found.version > self.version:
            raise OtherVersion(
                f"{path} is of version {found.version}; this Forebay reads {self.version}: use a newer one"
            )
        if 1 <= found.version < self.version:
            raise OtherVersion(
                f"{path} is of version {found.version}, which an older Forebay wrote; this Forebay reads only version "
                f"{self.version}: finish that run with the Forebay that began it, or begin a new run in another "
                "directory"
            )
        body = data[len(self._before_digest()) + 64 + len(_MIDDLE) : -len(_CLOSING)]
        if data != self._sealed(body):
            raise DamagedData(f"{path} does not match its checksum: it was altered")
        return body

    def is_ours(self, data: bytes) -> bool:
        """Whether it starts as this format does, in whatever version; it may be damaged after that."""
        return data.startswith(self._opening())

    def _opening(self) -> bytes:
        return f'{{"format":"{self.format}",'.encode()

    def _before_digest(self) -> bytes:
        return self._opening() + f'"version":{self.version},"sha256":"'.encode()

    def _sealed(self, body: bytes) -> bytes:
        return b"".join([self._before_digest(), sha256(body).hexdigest().encode(), _MIDDLE, body, _CLOSING])


# --- read ---------------------------------------------------------------------------------------------


def open_published(directory: str | PathLike[str], envelope: Envelope, take: Callable[[bytes], T], files: FileOps) -> T:
    """What `take` makes of the body of the manifest, once it is verified.

    `take` opens every file that it will read (`open_plain`): later saves do not cut it off then. Where it raises
    FileNotFoundError it is called again with the manifest that is there by then.
    """
    path = Path(directory)
    with doing("open", path):
        found = files.is_directory(path)
    if found is False:
        raise InvalidInput(f"a checkpoint is a directory; {path} is a file")
    before = None
    for _ in range(10):
        try:
            data = read_manifest(path, files)
        except FileNotFoundError:
            raise CheckpointError(f"there is no checkpoint at {path}: {MANIFEST} is missing") from None
        body = envelope.open(data, path / MANIFEST)
        try:
            return take(body)
        except FileNotFoundError as error:
            # Two saves since the manifest was read would have swept its files; then there is another manifest.
            if data == before:
                raise DamagedData(f"{error.filename} is missing, which {path / MANIFEST} names") from None
            before = data
    raise CheckpointError(f"{path} is saved to faster than it can be opened; try again")


def read_manifest(directory: Path, files: FileOps) -> bytes:
    """The bytes of the manifest, not yet verified; FileNotFoundError, DamagedData or CheckpointError."""
    path = directory / MANIFEST
    descriptor, size = open_plain(path, files)
    try:
        if size > MAX_MANIFEST_BYTES:
            raise DamagedData(f"{path} has {size} bytes; a manifest has at most {MAX_MANIFEST_BYTES}")
        with doing("read", path):
            return files.read(descriptor, size, 0)
    finally:
        with suppress(OSError):
            files.close(descriptor)


def open_plain(path: Path, files: FileOps) -> tuple[int, int]:
    """The descriptor and the size of a plain file; FileNotFoundError, DamagedData or CheckpointError."""
    try:
        return files.open(path)
    except FileNotFoundError:
        raise
    except NotAPlainFile:
        raise DamagedData(f"{path} is a symbolic link or a directory; a checkpoint has plain files only") from None
    except OSError as error:
        raise CheckpointError(f"cannot open {path}: {error.strerror or error}") from error


# --- write --------------------------------------------------------------------------------------------


class DirectoryWriter:
    """Writes one generation of a directory: `create` or `link` its files, then `publish` the manifest that names them.

    Whatever fails ends it, and so does leaving a `with` before it was published: what was there before stays.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        envelope: Envelope,
        *,
        ours: re.Pattern[str],
        names_in: Callable[[bytes], set[str]],
        files: FileOps | None = None,
    ) -> None:
        """Create the directory if it is missing; InvalidInput if it is a file, or holds another format's manifest.

        `ours`: the names that files of this format have, and no others; such files are removed once they are not
        needed. `names_in`: the names that the body of a manifest uses; DamagedData if it cannot be read.
        """
        self.directory = Path(directory).absolute()
        self._files = files or FileOps()
        self._envelope, self._ours, self._names_in = envelope, ours, names_in
        self._descriptors: dict[int, Path] = {}  # of the files; closed before the lock of the directory is given up
        self._directory_descriptor: int | None = None
        self._temporary: list[Path] = []  # made here, and not yet named by any manifest
        self._placed: set[str] = set()  # created or linked here
        self._open = True
        with self._or_abort():
            self._make_directory()
            self._lock_directory()
            # The files of the manifest that is there; None if it is damaged and does not say.
            self.previous: set[str] | None = self._names_before()

    def create(self, name: str) -> int:
        """Open a new file for writing; InvalidInput if `ours` does not match its name."""
        with self._or_abort():
            self._check_name(name)
            descriptor = self._create(self.directory / name)
            self._placed.add(name)
            return descriptor

    def write(self, descriptor: int, parts: Sequence[Buffer]) -> None:
        """Write all parts to a file that `create` opened, without joining them."""
        with self._or_abort(), doing("write", self._path_of(descriptor)):
            self._files.write(descriptor, parts)

    def finish(self, descriptor: int) -> None:
        """Sync and close a file, so that not all stay open until `publish`, which does it for those that are."""
        with self._or_abort(), doing("sync", self._path_of(descriptor)):
            self._files.sync(descriptor)
            del self._descriptors[descriptor]
            self._files.close(descriptor)

    def link(self, source: Path, name: str) -> bool:
        """Give a file that is synced already, and never written again, a name here; False if it has to be copied.

        True, too, if it has that name already. CheckpointError if another file has it.
        """
        target = self.directory / name
        with self._or_abort(), doing(f"link {source} as", target):
            self._check_name(name)
            try:
                self._files.link(source, target)
            except FileExistsError:
                if not self._files.same_file(source, target):
                    raise CheckpointError(
                        f"cannot link {source} as {target}: another file has that name; copy it under a fresh one"
                    ) from None
            except OSError as error:
                if error.errno in _CANNOT_LINK:
                    return False
                raise
            else:
                self._temporary.append(target)
            self._placed.add(name)
        return True

    def publish(self, body: bytes) -> None:
        """Make this the content of the directory. After a return it is on disk, and the last but one is gone.

        A file that the body names was created or linked here, or was named by the manifest before it.
        """
        self.check_open()
        try:
            data, names = self._envelope.seal(body), self._names_in(body)
            if missing := names - self._placed - (self.previous or set()):
                raise InvalidInput(f"the manifest names {min(missing)!r}, which was not written to {self.directory}")
            for descriptor in list(self._descriptors):
                self.finish(descriptor)
            temporary = self.directory / f"manifest-{secrets.token_hex(8)}.tmp"
            descriptor = self._create(temporary)
            self.write(descriptor, [data])
            self.finish(descriptor)
            # The names must be on disk before the manifest that uses them.
            self._sync_directory("sync")
            # From here on the new manifest may be the valid one, whatever is reported: its files stay.
            self._temporary = [path for path in self._temporary if path.name not in names]
            with doing("replace", self.directory / MANIFEST):
                self._files.replace(temporary, self.directory / MANIFEST)
            self._temporary.remove(temporary)
            self._sync_directory("sync (the new checkpoint is in place, but may not survive a power loss)")
            self._sweep(names)
        finally:
            self.abort()

    def abort(self) -> None:
        """Give up: remove what was made here and let other writers in. Does nothing after `publish`."""
        self._open = False
        # What cannot be removed now is removed by the next save.
        for path in self._temporary:
            with suppress(OSError):
                self._files.remove(path)
        self._temporary.clear()
        while self._descriptors:
            with suppress(OSError):
                self._files.close(self._descriptors.popitem()[0])
        if self._directory_descriptor is not None:
            descriptor, self._directory_descriptor = self._directory_descriptor, None
            with suppress(OSError):
                self._files.close(descriptor)

    def check_open(self) -> None:
        """CheckpointError once it was published or aborted."""
        if not self._open:
            raise CheckpointError(f"this save to {self.directory} has ended; start another one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    @contextmanager
    def _or_abort(self) -> Iterator[None]:
        self.check_open()
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def _check_name(self, name: str) -> None:
        if not self._ours.fullmatch(name):
            raise InvalidInput(f"{name[:100]!r} is no name for a file of {self.directory}; it would never be removed")

    def _path_of(self, descriptor: int) -> Path:
        if descriptor not in self._descriptors:
            raise InvalidInput(f"descriptor {descriptor} is of no file that this save to {self.directory} has open")
        return self._descriptors[descriptor]

    def _make_directory(self) -> None:
        with doing("create", self.directory):
            try:
                self._files.make_directories(self.directory)
            except NotADirectoryError as error:
                raise InvalidInput(f"a checkpoint is a directory; {error.filename} is a file") from None

    def _lock_directory(self) -> None:
        # Another writer's sweep would take the files of this one for leftovers.
        with doing("lock", self.directory):
            self._directory_descriptor = self._files.open_directory(self.directory)
            try:
                self._files.lock(self._directory_descriptor)
            except BlockingIOError:
                raise CheckpointError(f"another save to {self.directory} is under way; wait for it") from None

    def _names_before(self) -> set[str] | None:
        path = self.directory / MANIFEST
        try:
            data = read_manifest(self.directory, self._files)
        except FileNotFoundError:
            return set()
        if not self._envelope.is_ours(data):
            what = "is not that of a checkpoint"
            with suppress(*UNREADABLE):
                if (found := _format_decoder.decode(data).format) != self._envelope.format:
                    what = f"is of format {found[:100]!r}; expected {self._envelope.format!r}: it is another's"
            raise InvalidInput(f"{path} {what} and would be overwritten; save to another directory, or remove it")
        try:
            return self._names_in(self._envelope.open(data, path))
        except OtherVersion:
            raise
        except DamagedData:
            return None

    def _create(self, path: Path) -> int:
        with doing("create", path):
            descriptor = self._files.create(path)
        self._temporary.append(path)
        self._descriptors[descriptor] = path
        return descriptor

    def _sync_directory(self, what: str) -> None:
        assert self._directory_descriptor is not None
        with doing(what, self.directory):
            self._files.sync(self._directory_descriptor)

    def _sweep(self, names: set[str]) -> None:
        if self.previous is None:
            return
        keep = self.previous | names | {MANIFEST}
        # The checkpoint is published: what cannot be removed now is no reason to call it failed.
        with suppress(OSError):
            for name in self._files.list_directory(self.directory):
                if name not in keep and (self._ours.fullmatch(name) or MANIFEST_LEFTOVER.fullmatch(name)):
                    with suppress(OSError):
                        self._files.remove(self.directory / name)
