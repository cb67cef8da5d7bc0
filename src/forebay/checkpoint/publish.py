"""Directories whose `manifest.json` is the commit point: the base of every kind of checkpoint.

The manifest is a sealed JSON document, which carries its format and its checksum:

    {"format":"<format>","version":<version>,"sha256":"<of the body>","manifest":<body>}

`Envelope` seals and opens it. `DirectoryWriter` writes files into a directory and then replaces the manifest;
`open_published` reads them.

Guaranteed (G8): a reader finds the old manifest or the new one, with every file that it names, whichever operation
failed. New files are synced before the manifest is renamed. Files of this format that neither the new manifest nor the
one before it names are removed after that; other files are never removed. One writer at a time. Nothing that is read
is trusted, executed (G9), or followed out of the directory.

Not here: what the body of a manifest and the other files mean. All calls block; callers use a thread. POSIX only.
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
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from forebay.checkpoint.files import FileOps, NotAPlainFile
from forebay.errors import CheckpointError, DamagedData, InvalidInput, UnreadableData

if TYPE_CHECKING:
    from typing_extensions import Buffer

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 * 2**20
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)  # raised by decoding foreign bytes

MANIFEST_LEFTOVER = re.compile(r"manifest-[0-9a-f]{16}\.tmp", re.ASCII)
_MIDDLE, _CLOSING = b'","manifest":', b"}\n"
# The errors of file systems that have no hard links, or none for this file; a copy works there.
_CANNOT_LINK = frozenset(
    (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
)

T = TypeVar("T")


@contextmanager
def doing(what: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the action and the path."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {what} {path}: {error.strerror or error}") from error


# --- the manifest -------------------------------------------------------------------------------------


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
        """The document with this body, which is JSON; InvalidInput if it is too long."""
        data = self._sealed(body)
        if len(data) > MAX_MANIFEST_BYTES:
            raise InvalidInput(
                f"the manifest of a checkpoint has {len(data)} bytes; expected at most {MAX_MANIFEST_BYTES}"
            )
        return data

    def open(self, data: bytes, path: Path) -> bytes:
        """The body, byte for byte as it was sealed; DamagedData, or UnreadableData if it has another version."""
        try:
            found = _format_decoder.decode(data)
        except UNREADABLE as error:
            raise DamagedData(f"{path} is not the manifest of a checkpoint: {error}") from None
        if found.format != self.format:
            raise DamagedData(f"{path} has format {found.format[:100]!r}; expected {self.format!r}")
        if found.version > self.version:
            raise UnreadableData(
                f"{path} has version {found.version}; this Forebay reads {self.version}: use a newer one"
            )
        if 1 <= found.version < self.version:
            raise UnreadableData(
                f"{path} has version {found.version}, which an older Forebay wrote; this Forebay reads only version "
                f"{self.version}: finish that run with the older Forebay, or start a new run in another directory"
            )
        body = data[len(self._before_digest()) + 64 + len(_MIDDLE) : -len(_CLOSING)]
        if data != self._sealed(body):
            raise DamagedData(f"{path} does not match its checksum: it was altered")
        return body

    def is_ours(self, data: bytes) -> bool:
        """Whether a document starts like this format, in any version; the rest may be damaged."""
        return data.startswith(self._opening())

    def _opening(self) -> bytes:
        return f'{{"format":"{self.format}",'.encode()

    def _before_digest(self) -> bytes:
        return self._opening() + f'"version":{self.version},"sha256":"'.encode()

    def _sealed(self, body: bytes) -> bytes:
        return b"".join([self._before_digest(), sha256(body).hexdigest().encode(), _MIDDLE, body, _CLOSING])


def encode_body(manifest: Any) -> bytes:
    """A manifest (a struct with `extra`) as JSON; InvalidInput unless decoding it returns an equal manifest."""
    try:
        body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        # JSON would change nan, tuples, and keys that are not strings: they are refused.
        same = msgspec.json.decode(body, type=type(manifest)) == manifest
    except (*UNREADABLE, TypeError) as error:
        raise InvalidInput(f"the manifest of a checkpoint cannot be written as JSON: {error}") from None
    if not same:
        raise InvalidInput(f"`extra` of a checkpoint is {manifest.extra!r}; expected plain JSON")
    return body


# --- read ---------------------------------------------------------------------------------------------


def open_published(directory: str | PathLike[str], envelope: Envelope, take: Callable[[bytes], T], files: FileOps) -> T:
    """The result of `take`, called with the verified body of the manifest.

    `take` opens every file that it will read (`open_plain`), so that later saves do not disturb it. If it raises
    FileNotFoundError, it is called again with the manifest that exists then.
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
            # Two saves since the manifest was read have removed its files; then there is another manifest.
            if data == before:
                raise DamagedData(f"{error.filename} is missing, but {path / MANIFEST} names it") from None
            before = data
    raise CheckpointError(f"{path} is saved more often than it can be opened; try again")


def read_manifest(directory: Path, files: FileOps) -> bytes:
    """The bytes of the manifest, unverified; FileNotFoundError, DamagedData or CheckpointError."""
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
    """Open a plain file: its descriptor and its size; FileNotFoundError, DamagedData or CheckpointError."""
    try:
        return files.open(path)
    except FileNotFoundError:
        raise
    except NotAPlainFile:
        raise DamagedData(f"{path} is a symbolic link, a directory or a device; expected a plain file") from None
    except OSError as error:
        raise CheckpointError(f"cannot open {path}: {error.strerror or error}") from error


# --- write --------------------------------------------------------------------------------------------


class DirectoryWriter:
    """Writes one generation of a directory: `create` or `link` its files, then `publish` the manifest that names them.

    A failure aborts it, and so does leaving its `with` block before `publish`: the old generation stays.
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
        """Create the directory if it is missing; InvalidInput if it is a file, or has another format's manifest.

        `ours` matches the names of this format's files and no others: such files are removed when no manifest needs
        them. `names_in` returns the names that the body of a manifest uses; DamagedData if it cannot be read.
        """
        self.directory = Path(directory).absolute()
        self._files = files or FileOps()
        self._envelope, self._ours, self._names_in = envelope, ours, names_in
        self._descriptors: dict[int, Path] = {}  # of open files; closed before the directory is unlocked
        self._directory_descriptor: int | None = None
        self._temporary: list[Path] = []  # created here, and not yet named by a manifest
        self._placed: set[str] = set()  # created or linked here
        self._open = True
        with self.or_abort():
            with doing("create", self.directory):
                try:
                    self._files.make_directories(self.directory)
                except NotADirectoryError as error:
                    raise InvalidInput(f"a checkpoint is a directory; {error.filename} is a file") from None
            self._lock_directory()
            # The names in the existing manifest; None if it is damaged.
            self.previous: set[str] | None = self._names_before()

    def create(self, name: str) -> int:
        """Open a new file for writing; InvalidInput if `ours` does not match its name."""
        with self.or_abort():
            self._check_name(name)
            descriptor = self._create(self.directory / name)
            self._placed.add(name)
            return descriptor

    def write(self, descriptor: int, parts: Sequence[Buffer]) -> None:
        """Write all parts to a file that `create` opened, without joining them."""
        with self.or_abort(), doing("write", self._path_of(descriptor)):
            self._files.write(descriptor, parts)

    def finish(self, descriptor: int) -> None:
        """Sync and close a file. `publish` does this for files that are still open."""
        with self.or_abort(), doing("sync", self._path_of(descriptor)):
            self._files.sync(descriptor)
            del self._descriptors[descriptor]
            self._files.close(descriptor)

    def link(self, source: Path, name: str) -> bool:
        """Give a synced file, which is never written again, a name here; False if it has to be copied instead.

        Also True if the file already has that name. CheckpointError if another file has it.
        """
        target = self.directory / name
        with self.or_abort(), doing(f"link {source} as", target):
            self._check_name(name)
            try:
                self._files.link(source, target)
            except FileExistsError:
                if not self._files.same_file(source, target):
                    raise CheckpointError(
                        f"cannot link {source} as {target}: another file has that name; copy it under a new name"
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
        """Make this the generation of the directory. On return it is on disk, and the last but one is removed.

        Every file that the body names must have been created or linked here, or be named by the manifest before it.
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
            # From here on the new manifest may be in force even if an error is reported: its files stay.
            self._temporary = [path for path in self._temporary if path.name not in names]
            with doing("replace", self.directory / MANIFEST):
                self._files.replace(temporary, self.directory / MANIFEST)
            self._temporary.remove(temporary)
            self._sync_directory("sync (the new checkpoint is in force, but may not survive a power loss)")
            self._sweep(names)
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove the files created here and unlock the directory. Does nothing after `publish`."""
        self._open = False
        # The next save removes files that cannot be removed now.
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
        """CheckpointError if it was published or aborted."""
        if not self._open:
            raise CheckpointError(f"this save to {self.directory} has ended; start another one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    @contextmanager
    def or_abort(self) -> Iterator[None]:
        """Abort this save if the block fails; CheckpointError if it was already published or aborted."""
        self.check_open()
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def _check_name(self, name: str) -> None:
        if not self._ours.fullmatch(name):
            raise InvalidInput(f"{name[:100]!r} is not a file name of the format in {self.directory}; choose another")

    def _path_of(self, descriptor: int) -> Path:
        if descriptor not in self._descriptors:
            raise InvalidInput(f"descriptor {descriptor} is not an open file of this save to {self.directory}")
        return self._descriptors[descriptor]

    def _lock_directory(self) -> None:
        # Another writer would remove the files of this one as leftovers.
        with doing("lock", self.directory):
            self._directory_descriptor = self._files.open_directory(self.directory)
            try:
                self._files.lock(self._directory_descriptor)
            except BlockingIOError:
                raise CheckpointError(f"another save to {self.directory} is in progress; wait for it") from None

    def _names_before(self) -> set[str] | None:
        path = self.directory / MANIFEST
        try:
            data = read_manifest(self.directory, self._files)
        except FileNotFoundError:
            return set()
        try:
            return self._names_in(self._envelope.open(data, path))
        except UnreadableData:  # it is not damaged, so it must not be overwritten
            raise
        except DamagedData as error:
            if self._envelope.is_ours(data):
                return None
            raise InvalidInput(f"{error}; saving would overwrite it: use another directory, or remove it") from None

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
        # The checkpoint is published: a file that cannot be removed now is no failure.
        with suppress(OSError):
            for name in self._files.list_directory(self.directory):
                if name not in keep and (self._ours.fullmatch(name) or MANIFEST_LEFTOVER.fullmatch(name)):
                    with suppress(OSError):
                        self._files.remove(self.directory / name)
