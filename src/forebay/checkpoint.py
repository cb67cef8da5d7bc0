"""The directory format of checkpoints: written so that a crash leaves the old one, read without being trusted.

A checkpoint is a directory with `manifest.json`, which is the commit point, and the record files that it names:

    manifest.json       sealed as `publish` describes, of format "forebay-checkpoint", version 1
    groups-<16 hex>.fbr  magic "FBR1" | version u8 | 3 x 0 | the 16 hex digits of its name | entries
    an entry            record bytes u32 | frame bytes u64 | crc32 u32 | record | frame

Each crc32 covers the lengths, the record and the frame and goes on from the one before it (the first from the file's
header), so that an entry fits only where it was written; the last one is in the manifest. Numbers are little-endian.

Promised (G8): a reader finds the old checkpoint or the new one, complete, whatever operation failed: a save writes
under fresh names and leaves the rest to `publish`. A reader holds its files open, so it is not cut off by later saves
either. Nothing read here is executed (G9), followed out of the directory, or allocated because a length said so.

Not here: what records and frames mean (`codec`), and when to save. Everything blocks; callers use a thread. POSIX only.
"""

from __future__ import annotations

import re
import secrets
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias
from zlib import crc32

import msgspec
from msgspec import Meta

from forebay.codec import MAX_FRAME_BYTES
from forebay.errors import CheckpointError, DamagedData, InvalidInput
from forebay.files import FileOps, ForwardReader
from forebay.publish import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    UNREADABLE,
    DirectoryWriter,
    Envelope,
    doing,
    open_plain,
    open_published,
)

__all__ = [
    "ENVELOPE",
    "MAX_MANIFEST_BYTES",
    "Checkpoint",
    "CheckpointWriter",
    "Manifest",
    "RecordFile",
    "open_checkpoint",
]

ENVELOPE = Envelope("forebay-checkpoint", 2)  # 1: Forebay 0.1, whose accounts lack issued tokens
MAX_RECORD_BYTES = 2**20

_RECORD_FILE = re.compile(r"groups-[0-9a-f]{16}\.fbr", re.ASCII)
_MAX_FILES = 64  # a reader holds them all open

_FILE_HEADER = struct.Struct("<4sB3x16s")
_MAGIC, _FILE_VERSION = b"FBR1", 1
_LENGTHS = struct.Struct("<IQ")
_ENTRY = struct.Struct("<IQI")

_FLUSH_BYTES, _FLUSH_PARTS = 2**20, 512

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class RecordFile(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest says of a record file."""

    name: str
    bytes: Count
    entries: Count
    crc32: Annotated[int, Meta(ge=0, lt=2**32)]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is of. `accounts` are opaque bytes per task; `extra` is the caller's, plain JSON."""

    next_uid: Count
    next_timestamp_id: Count
    accounts: dict[str, bytes]
    store_id: str | None = None
    model_step: Count | None = None
    replay_buffer_saved: bool = True  # one that does not say is treated as having it
    extra: dict[str, Any] = {}
    # `publish` fills these in.
    created_at: float = 0.0
    forebay_version: str = ""
    files: tuple[RecordFile, ...] = ()


# --- write --------------------------------------------------------------------------------------------


class CheckpointWriter:
    """Writes one checkpoint into a directory: `write` each entry, then `publish`.

    As a context manager it aborts unless it was published. A failure aborts, too: what was there before stays.
    """

    def __init__(self, directory: str | PathLike[str], files: FileOps | None = None) -> None:
        """Create the directory if it is missing; InvalidInput if it is a file, or holds another program's manifest."""
        nonce = secrets.token_hex(8)
        self._name = f"groups-{nonce}.fbr"
        header = _FILE_HEADER.pack(_MAGIC, _FILE_VERSION, nonce.encode())
        self._pending: list[bytes] = [header]
        self._pending_bytes = self._bytes = len(header)
        self._crc = crc32(header)
        self._entries = 0
        path = Path(directory) / MANIFEST
        self._writer = DirectoryWriter(
            directory,
            ENVELOPE,
            ours=_RECORD_FILE,
            names_in=lambda body: _names(_decode_manifest(body, path)),
            files=files,
        )
        self._descriptor = self._writer.create(self._name)

    def write(self, record: bytes, frame: bytes) -> None:
        """Add one entry; the frame may be empty."""
        self._writer.check_open()
        if len(record) > MAX_RECORD_BYTES or len(frame) > MAX_FRAME_BYTES:
            raise InvalidInput(
                f"an entry of {len(record)} and {len(frame)} bytes; a record has at most {MAX_RECORD_BYTES}, "
                f"a frame {MAX_FRAME_BYTES}"
            )
        lengths = _LENGTHS.pack(len(record), len(frame))
        self._crc = crc32(frame, crc32(record, crc32(lengths, self._crc)))
        self._entries += 1
        self._pending += (lengths + self._crc.to_bytes(4, "little") + record, frame)
        size = _ENTRY.size + len(record) + len(frame)
        self._bytes += size
        self._pending_bytes += size
        if self._pending_bytes >= _FLUSH_BYTES or len(self._pending) >= _FLUSH_PARTS:
            self._flush()

    def publish(self, manifest: Manifest) -> Manifest:
        """Make this the checkpoint of the directory. After a return it is on disk, and the last but one is gone."""
        from forebay import __version__  # the package imports this module before it has a version

        self._writer.check_open()
        try:
            file = RecordFile(name=self._name, bytes=self._bytes, entries=self._entries, crc32=self._crc)
            manifest = msgspec.structs.replace(
                manifest, created_at=time.time(), forebay_version=__version__, files=(file,)
            )
            body = _encode_manifest(manifest)
            self._flush()
            self._writer.publish(body)
        finally:
            self.abort()
        return manifest

    def abort(self) -> None:
        """Give up: remove what was written and let other writers in. Does nothing after `publish`."""
        self._pending.clear()
        self._writer.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def _flush(self) -> None:
        parts, self._pending, self._pending_bytes = self._pending, [], 0
        self._writer.write(self._descriptor, parts)


# --- read ---------------------------------------------------------------------------------------------


def open_checkpoint(directory: str | PathLike[str], files: FileOps | None = None) -> Checkpoint:
    """The checkpoint of a directory, its manifest and the sizes of its files checked; close it, or use `with`.

    CheckpointError if there is none or it cannot be read; DamagedData if it is not what it claims to be.
    """
    path, ops = Path(directory), files or FileOps()
    return open_published(
        path, ENVELOPE, lambda body: Checkpoint(path, _decode_manifest(body, path / MANIFEST), ops), ops
    )


class Checkpoint:
    """An open checkpoint. Later saves do not change what it reads."""

    def __init__(self, directory: Path, manifest: Manifest, files: FileOps) -> None:
        """Use `open_checkpoint`."""
        self.directory = directory
        self.manifest = manifest
        self._files = files
        self._descriptors: list[int] = []
        try:
            for file in manifest.files:
                descriptor, size = open_plain(directory / file.name, files)
                self._descriptors.append(descriptor)
                if size != file.bytes:
                    raise DamagedData(f"{directory / file.name} has {size} bytes; its manifest says {file.bytes}")
        except BaseException:
            self.close()
            raise

    @property
    def total_bytes(self) -> int:
        """Of all record files; what `verify` reports adds up to it."""
        return sum(file.bytes for file in self.manifest.files)

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Every (record, frame) in the order of writing, one in memory at a time; DamagedData where one is altered.

        What was yielded before that was intact, but incomplete: `verify` first to take all or nothing.
        """
        for index in range(len(self.manifest.files)):
            for record, frame, _ in self._file_entries(index):
                yield record, frame

    def verify(self, progress: Callable[[int], None] | None = None) -> None:
        """Read everything and check it; `progress` is called with the number of bytes checked since its last call."""
        report = progress or (lambda _: None)
        for index, file in enumerate(self.manifest.files):
            done = 0
            for _, _, position in self._file_entries(index):
                report(position - done)
                done = position
            report(file.bytes - done)

    def close(self) -> None:
        while self._descriptors:
            with suppress(OSError):
                self._files.close(self._descriptors.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _file_entries(self, index: int) -> Iterator[tuple[bytes, bytes, int]]:
        file = self.manifest.files[index]
        path = self.directory / file.name
        stream = ForwardReader(partial(self._read, index))

        def take(count: int) -> bytes:
            data = stream.take(count)
            if len(data) < count:
                raise DamagedData(f"{path} ends at byte {stream.position}: it was cut off")
            return data

        header = take(_FILE_HEADER.size)
        magic, version, nonce = _FILE_HEADER.unpack(header)
        if magic != _MAGIC or f"groups-{nonce.decode('latin-1')}.fbr" != file.name or any(header[5:8]):
            raise DamagedData(f"{path} does not start as a record file of its name does")
        if version != _FILE_VERSION:
            raise DamagedData(f"{path} is of version {version}; this Forebay reads {_FILE_VERSION}: use a newer one")
        crc = crc32(header)
        entries = 0
        while stream.position < file.bytes:
            start = stream.position
            entry = take(_ENTRY.size)
            record_bytes, frame_bytes, expected = _ENTRY.unpack(entry)
            if record_bytes > MAX_RECORD_BYTES or frame_bytes > MAX_FRAME_BYTES:
                raise DamagedData(f"{path}: an entry of {record_bytes} and {frame_bytes} bytes at byte {start}")
            if record_bytes + frame_bytes > file.bytes - stream.position:
                raise DamagedData(f"{path}: the entry at byte {start} is longer than what is left of the file")
            record, frame = take(record_bytes), take(frame_bytes)
            crc = crc32(frame, crc32(record, crc32(entry[: _LENGTHS.size], crc)))
            if crc != expected:
                raise DamagedData(f"{path}: the checksum of the entry at byte {start} does not match: it was altered")
            entries += 1
            yield record, frame, stream.position
        if entries != file.entries or crc != file.crc32:
            raise DamagedData(
                f"{path} has {entries} entries with checksum {crc:08x}; its manifest says "
                f"{file.entries} with {file.crc32:08x}"
            )

    def _read(self, index: int, count: int, offset: int) -> bytes:
        # By index: a descriptor number means another file once this one is closed.
        if index >= len(self._descriptors):
            raise CheckpointError(f"the checkpoint of {self.directory} was closed while it was read")
        with doing("read", self.directory / self.manifest.files[index].name):
            return self._files.read(self._descriptors[index], count, offset)


# --- the manifest -------------------------------------------------------------------------------------


_manifest_decoder = msgspec.json.Decoder(Manifest)


def _encode_manifest(manifest: Manifest) -> bytes:
    try:
        body = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        # What JSON would change (nan, tuples, keys that are no text) is refused instead.
        same = _manifest_decoder.decode(body) == manifest
    except (*UNREADABLE, TypeError) as error:
        raise InvalidInput(f"the manifest of a checkpoint cannot be written as JSON: {error}") from None
    if not same:
        raise InvalidInput(f"`extra` of a checkpoint is {manifest.extra!r}; expected plain JSON")
    return body


def _decode_manifest(body: bytes, path: Path) -> Manifest:
    try:
        manifest = _manifest_decoder.decode(body)
    except UNREADABLE as error:
        raise DamagedData(f"{path} cannot be read: {error}") from None
    for file in manifest.files:
        if not _RECORD_FILE.fullmatch(file.name):
            raise DamagedData(f"{path} names a file {file.name[:100]!r}; expected groups-<16 hex digits>.fbr")
    files = len(manifest.files)
    if len(_names(manifest)) != files or files > _MAX_FILES:
        raise DamagedData(f"{path} names {files} files; expected different ones, at most {_MAX_FILES}")
    return manifest


def _names(manifest: Manifest) -> set[str]:
    return {file.name for file in manifest.files}
