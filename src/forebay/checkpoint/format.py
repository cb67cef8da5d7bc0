"""The directory format of checkpoints of groups: a crash leaves the old one, and nothing that is read is trusted.

A checkpoint is a directory with `manifest.json`, the commit point, and the record file that it names:

    manifest.json       sealed as `publish` describes, of format "forebay-checkpoint", version 2
    groups-<16 hex>.fbr  magic "FBR1" | version u8 | 3 x 0 | the 16 hex digits of its name | entries
    an entry            record bytes u32 | frame bytes u64 | crc32 u32 | record | frame

Each crc32 covers the lengths, the record and the frame and continues the one before it (the first continues that of
the file's header), so that an entry is valid only where it was written; the last one is in the manifest. Numbers are
little-endian.

Guaranteed (G8): a reader finds the old checkpoint or the new one, complete, whichever operation failed: a save uses
new file names and leaves the rest to `publish`. A reader keeps its files open, so later saves do not disturb it.
Nothing read here is executed (G9), followed out of the directory, or allocated because a length said so.

`saved_rows` decodes the entries; what a record says about its group is computed again from the group. A checkpoint that
`check_contents` accepts can be resumed: every checksum matches, every record and group decodes, and the ledgers close.
All calls block; callers use a thread. POSIX only.
"""

from __future__ import annotations

import re
import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias
from zlib import crc32

import msgspec
from msgspec import Meta
from msgspec.structs import asdict, replace

from forebay.checkpoint.files import FileOps, ForwardReader
from forebay.checkpoint.publish import (
    MANIFEST,
    UNREADABLE,
    DirectoryWriter,
    Envelope,
    doing,
    encode_body,
    open_plain,
    open_published,
)
from forebay.codec.frame import decode_group
from forebay.codec.records import decode_account, decode_record
from forebay.codec.values import MAX_FRAME_BYTES
from forebay.core.ledger import Account, Place, Record, Row, describe, open_ledger
from forebay.core.references import as_values
from forebay.core.report import Progress, Steps
from forebay.core.rollout import Group, Status
from forebay.errors import CheckpointError, DamagedData, InvalidInput, UnreadableData

ENVELOPE = Envelope("forebay-checkpoint", 2)  # 1: Forebay 0.1, whose accounts lack issued tokens
MAX_RECORD_BYTES = 2**20

_RECORD_FILE = re.compile(r"groups-[0-9a-f]{16}\.fbr", re.ASCII)

_FILE_HEADER = struct.Struct("<4sB3x16s")
_MAGIC, _FILE_VERSION = b"FBR1", 1
_LENGTHS = struct.Struct("<IQ")
_ENTRY = struct.Struct("<IQI")

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class RecordFile(msgspec.Struct, frozen=True, kw_only=True):
    """A record file, as the manifest describes it."""

    name: Annotated[str, Meta(pattern=rf"\A{_RECORD_FILE.pattern}\Z")]
    bytes: Count
    entries: Count
    crc32: Annotated[int, Meta(ge=0, lt=2**32)]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint contains. `accounts`: encoded, by task. `extra`: plain JSON of the caller."""

    next_uid: Count
    next_timestamp_id: Count
    accounts: dict[str, bytes]
    store_id: str | None = None
    model_step: Count | None = None
    replay_buffer_saved: bool = True  # False: prompts only
    extra: dict[str, Any] = {}
    # `publish` fills these in.
    created_at: float = 0.0
    forebay_version: str = ""
    files: Annotated[tuple[RecordFile, ...], Meta(min_length=1, max_length=1)] = ()


# --- write --------------------------------------------------------------------------------------------


class CheckpointWriter:
    """Writes one checkpoint into a directory: `write` its entries, then `publish`.

    Leaving its `with` block aborts it unless it was published, and so does a failure: the old checkpoint stays. Threads
    take turns, so that a thread which a cancelled save left behind does no harm.
    """

    def __init__(self, directory: str | PathLike[str], files: FileOps | None = None) -> None:
        """Create the directory if it is missing; InvalidInput if it is a file, or has another program's manifest."""
        self._turns = threading.Lock()
        nonce = secrets.token_hex(8)
        path = Path(directory) / MANIFEST
        self._writer = DirectoryWriter(
            directory,
            ENVELOPE,
            ours=_RECORD_FILE,
            names_in=lambda body: {_decode_manifest(body, path).files[0].name},
            files=files,
        )
        self._name, self._entries = f"groups-{nonce}.fbr", 0
        self._descriptor = self._writer.create(self._name)
        header = _FILE_HEADER.pack(_MAGIC, _FILE_VERSION, nonce.encode())
        self._bytes, self._crc = len(header), crc32(header)
        self._writer.write(self._descriptor, [header])

    def write(self, entries: Iterable[tuple[bytes, bytes]]) -> None:
        """Add entries of a record and a frame, which may be empty; many at once cost fewer system calls."""
        parts: list[bytes] = []
        with self._turns, self._writer.or_abort():
            for record, frame in entries:
                if len(record) > MAX_RECORD_BYTES or len(frame) > MAX_FRAME_BYTES:
                    raise InvalidInput(
                        f"an entry has a record of {len(record)} bytes and a frame of {len(frame)}; expected at most "
                        f"{MAX_RECORD_BYTES} and {MAX_FRAME_BYTES}"
                    )
                lengths = _LENGTHS.pack(len(record), len(frame))
                self._crc = crc32(frame, crc32(record, crc32(lengths, self._crc)))
                self._entries += 1
                self._bytes += _ENTRY.size + len(record) + len(frame)
                parts += (lengths + self._crc.to_bytes(4, "little") + record, frame)
            self._writer.write(self._descriptor, parts)

    def publish(self, manifest: Manifest) -> Manifest:
        """Make this the checkpoint of the directory. On return it is on disk, and the last but one is removed."""
        from forebay import __version__  # here: `forebay` may still be importing

        file = RecordFile(name=self._name, bytes=self._bytes, entries=self._entries, crc32=self._crc)
        manifest = msgspec.structs.replace(manifest, created_at=time.time(), forebay_version=__version__, files=(file,))
        with self._turns, self._writer.or_abort():
            self._writer.publish(encode_body(manifest))
        return manifest

    def abort(self) -> None:
        """Remove the written files and release the directory. Does nothing after `publish`."""
        with self._turns:
            self._writer.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


# --- read ---------------------------------------------------------------------------------------------


def open_checkpoint(directory: str | PathLike[str], files: FileOps | None = None) -> Checkpoint:
    """Open the checkpoint of a directory, and check its manifest and the sizes of its files; close it, or use `with`.

    CheckpointError if there is none or it cannot be read; DamagedData if its content is wrong.
    """
    path, ops = Path(directory), files or FileOps()
    return open_published(
        path, ENVELOPE, lambda body: Checkpoint(path, _decode_manifest(body, path / MANIFEST), ops), ops
    )


class Checkpoint:
    """An open checkpoint. Later saves do not change what it reads."""

    def __init__(self, directory: Path, manifest: Manifest, files: FileOps) -> None:
        """Use `open_checkpoint`."""
        self.directory, self.manifest = directory, manifest
        (self.file,) = manifest.files
        self._path, self._files = directory / self.file.name, files
        self._descriptor: int | None
        self._descriptor, size = open_plain(self._path, files)
        if size != self.file.bytes:
            self.close()
            raise DamagedData(f"{self._path} has {size} bytes; its manifest says {self.file.bytes}")

    def verify(self) -> None:
        """Read every entry and check its checksum; DamagedData if one does not match."""
        for _ in self.entries():
            pass

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):
                self._files.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, count: int, offset: int) -> bytes:
        if self._descriptor is None:
            raise CheckpointError(f"the checkpoint in {self.directory} was closed while it was read")
        with doing("read", self._path):
            return self._files.read(self._descriptor, count, offset)

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Every (record, frame) in the order of writing, one in memory at a time; DamagedData at an altered one.

        The entries before that are intact, but not all: call `verify` first to take all or nothing.
        """
        file, path = self.file, self._path
        stream = ForwardReader(self._read)

        def take(count: int) -> bytes:
            data = stream.take(count)
            if len(data) < count:
                raise DamagedData(f"{path} ends at byte {stream.position}: it was cut off")
            return data

        header = take(_FILE_HEADER.size)
        magic, version, nonce = _FILE_HEADER.unpack(header)
        if magic != _MAGIC or f"groups-{nonce.decode('latin-1')}.fbr" != file.name or any(header[5:8]):
            raise DamagedData(f"{path} does not start like a record file of its name")
        if version != _FILE_VERSION:
            raise UnreadableData(f"{path} has version {version}; this Forebay reads {_FILE_VERSION}: use a newer one")
        crc = crc32(header)
        entries = 0
        while stream.position < file.bytes:
            start = stream.position
            entry = take(_ENTRY.size)
            record_bytes, frame_bytes, expected = _ENTRY.unpack(entry)
            if record_bytes > MAX_RECORD_BYTES or frame_bytes > MAX_FRAME_BYTES:
                raise DamagedData(f"{path}: the entry at byte {start} claims {record_bytes} and {frame_bytes} bytes")
            if record_bytes + frame_bytes > file.bytes - stream.position:
                raise DamagedData(f"{path}: the entry at byte {start} is longer than the rest of the file")
            record, frame = take(record_bytes), take(frame_bytes)
            crc = crc32(frame, crc32(record, crc32(entry[: _LENGTHS.size], crc)))
            if crc != expected:
                raise DamagedData(f"{path}: the checksum of the entry at byte {start} does not match: it was altered")
            entries += 1
            yield record, frame
        if entries != file.entries or crc != file.crc32:
            raise DamagedData(
                f"{path} has {entries} entries with checksum {crc:08x}; its manifest says "
                f"{file.entries} with {file.crc32:08x}"
            )


# --- the manifest -------------------------------------------------------------------------------------


_manifest_decoder = msgspec.json.Decoder(Manifest)


def _decode_manifest(body: bytes, path: Path) -> Manifest:
    try:
        return _manifest_decoder.decode(body)
    except UNREADABLE as error:
        raise DamagedData(f"{path} cannot be read: {error}") from None


def saved_accounts(manifest: Manifest) -> dict[str, Account]:
    """The account of each task."""
    return {task_name: decode_account(data) for task_name, data in manifest.accounts.items()}


def saved_rows(checkpoint: Checkpoint) -> Iterator[Row]:
    """The groups and their records, in the order of their uids; DamagedData names the group that cannot be read."""
    prompts_only = not checkpoint.manifest.replay_buffer_saved
    for data, frame in checkpoint.entries():
        record = decode_record(data)
        try:
            group = decode_group(frame)
        except DamagedData as error:
            raise type(error)(f"{_name(record)}: {error}") from None
        if record.place is not Place.BUFFERED:
            raise DamagedData(f"{_name(record)} is saved as {record.place}; a checkpoint holds buffered groups only")
        if prompts_only:
            for state in group:
                state.tokens = state.prompt_ids  # as they were issued
        yield Row(_described(record, group), group)


def _described(record: Record, group: Group) -> Record:
    facts = asdict(describe(group))
    del facts["response_bytes"]
    if record.status is Status.ABORTED and facts["status"] in (Status.INIT, Status.EXPIRED):
        facts["status"] = Status.ABORTED  # its producer ended; see `record.present`
    return replace(record, **facts)


def _name(record: Record) -> str:
    return f"group {record.group_id} of task {record.task_name!r} (uid {record.uid})"


class Contents(msgspec.Struct):
    """The sums over all groups of a checkpoint, by task."""

    groups: Counter[str]
    tokens: Counter[str]
    statuses: dict[str, Counter[str]]


def check_contents(checkpoint: Checkpoint, progress: Progress | None = None) -> Contents:
    """Read everything and check that it can be resumed; DamagedData says why not. One group in memory at a time."""
    manifest = checkpoint.manifest
    accounts = saved_accounts(manifest)
    contents = Contents(Counter(), Counter(), {task_name: Counter() for task_name in accounts})
    steps = Steps(progress, checkpoint.file.entries)
    seen: set[tuple[str, int]] = set()
    last_uid = 0
    with as_values():
        for row in saved_rows(checkpoint):
            record = row.record
            if not last_uid < record.uid < manifest.next_uid:
                raise DamagedData(f"{_name(record)} is out of order after uid {last_uid}, below {manifest.next_uid}")
            if record.timestamp_id >= manifest.next_timestamp_id:
                raise DamagedData(f"{_name(record)} has timestamp_id {record.timestamp_id}, at or above the next one")
            if (record.task_name, record.group_id) in seen:
                raise DamagedData(f"{_name(record)} appears twice in the checkpoint")
            if record.task_name not in accounts:
                raise DamagedData(f"{_name(record)} belongs to a task that has no account")
            seen.add((record.task_name, record.group_id))
            last_uid = record.uid
            contents.groups[record.task_name] += 1
            contents.tokens[record.task_name] += record.tokens
            contents.statuses[record.task_name][str(record.status)] += 1
            steps.more()
    for task_name, account in accounts.items():
        groups, tokens = ({Place.BUFFERED: count[task_name]} for count in (contents.groups, contents.tokens))
        for problem in open_ledger(account, groups, tokens, task_name):
            raise DamagedData(f"the ledger does not close: {problem}")
    return contents
