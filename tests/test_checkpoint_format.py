"""The directory format of checkpoints: the old one or the new one, complete, or a typed error; never wrong data."""

from __future__ import annotations

import errno
import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from forebay.checkpoint.files import FileOps
from forebay.checkpoint.format import MAX_RECORD_BYTES, CheckpointWriter, Manifest, RecordFile, open_checkpoint
from forebay.checkpoint.publish import MAX_MANIFEST_BYTES
from forebay.errors import CheckpointError, DamagedData, InvalidInput
from tests.failing_files import Failing

Entries = list[tuple[bytes, bytes]]

OLD: Entries = [(b"old-%d" % i, bytes([i]) * (i * 50)) for i in range(4)]
NEW: Entries = [(b"new-%d" % i, bytes([200 + i]) * (i * 70)) for i in range(5)]
FACTS = Manifest(
    next_uid=7, next_timestamp_id=9, accounts={"math": b"\x00\xff", "ünïcode": b""}, extra={"a": [1, None]}
)
REFUSED = (DamagedData, CheckpointError)


def save(path: Path, entries: Entries, files: FileOps | None = None, facts: Manifest = FACTS) -> Manifest:
    with CheckpointWriter(path, files) as writer:
        writer.write(entries)
        return writer.publish(facts)


def failure(action: Callable[[], object]) -> CheckpointError | None:
    try:
        action()
    except CheckpointError as error:
        return error
    return None


def load(path: Path, files: FileOps | None = None) -> Entries:
    """What a careful reader gets: all of it verified, or an error."""
    with open_checkpoint(path, files) as checkpoint:
        checkpoint.verify()
        return list(checkpoint.entries())


def record_files(path: Path) -> list[str]:
    return sorted(name.name for name in path.iterdir() if name.suffix == ".fbr")


def reads_truth_or_stops(path: Path, truth: Entries) -> None:
    """Entries that are yielded before an error are the ones that were written there."""
    seen: Entries = []

    def read() -> None:
        with open_checkpoint(path) as checkpoint:
            seen.extend(checkpoint.entries())

    with pytest.raises(REFUSED):
        read()
    assert seen == truth[: len(seen)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of saves: what is synced when is checked by the order of operations, not by the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    save(path, OLD)
    return path


# --- what goes in comes out ---------------------------------------------------------------------------


def test_a_checkpoint_reads_back_as_it_was_written(tmp_path: Path) -> None:
    facts = Manifest(
        next_uid=1,
        next_timestamp_id=2,
        accounts={"math": bytes(range(256))},
        store_id="s",
        model_step=3,
        replay_buffer_saved=False,
        extra={"limits": {"a": 1.5, "b": [True, None, "ü"]}},
    )
    written = save(tmp_path / "new" / "deep", OLD, facts=facts)
    with open_checkpoint(str(tmp_path / "new" / "deep")) as checkpoint:
        checkpoint.verify()
        assert checkpoint.file == written.files[0]
        assert list(checkpoint.entries()) == OLD
        assert list(checkpoint.entries()) == OLD, "it can be read again"
        found = checkpoint.manifest
    assert found == written
    assert (found.accounts, found.extra, found.store_id) == (facts.accounts, facts.extra, "s")
    assert (found.model_step, found.replay_buffer_saved, found.files[0].entries) == (3, False, len(OLD))
    assert found.created_at == pytest.approx(time.time(), abs=60)
    assert found.forebay_version


@pytest.mark.parametrize("size", [0, 1, 4079, 4080, 4081, 4095, 4096, 4097, 100_000, 3_000_000])
def test_frames_of_every_size_around_the_buffers_round_trip(tmp_path: Path, size: int) -> None:
    entries = [(b"r" * (i % 3), os.urandom(size)) for i in range(5)] + [(b"x" * MAX_RECORD_BYTES, b"")]
    save(tmp_path, entries)
    assert load(tmp_path) == entries


def test_many_small_entries_and_none_at_all(tmp_path: Path) -> None:
    entries = [(b"%d" % i, b"" if i % 2 else b"f") for i in range(5000)]
    save(tmp_path, entries)
    assert load(tmp_path) == entries
    save(tmp_path, [])
    assert load(tmp_path) == []


def test_a_write_that_the_system_does_in_pieces_is_completed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writev, pread = os.writev, os.pread
    monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, [memoryview(parts[0])[:7]]))
    monkeypatch.setattr(os, "pread", lambda fd, count, at: pread(fd, min(count, 5), at))
    save(saved, NEW)
    assert load(saved) == NEW


def test_a_manifest_without_replay_buffer_saved_counts_as_saved(saved: Path) -> None:
    reseal(saved, lambda manifest: manifest.pop("replay_buffer_saved"))
    with open_checkpoint(saved) as checkpoint:
        assert checkpoint.manifest.replay_buffer_saved


def test_values_that_cannot_be_written_are_refused_and_the_old_checkpoint_stays(saved: Path) -> None:
    extras: list[Any] = [{"x": float("nan")}, {"x": object()}, {"x": (1, 2)}, {1: 2}]
    wrong = [Manifest(next_uid=1, next_timestamp_id=1, accounts={}, extra=extra) for extra in extras]
    wrong.append(Manifest(next_uid=-1, next_timestamp_id=1, accounts={}))
    wrong.append(Manifest(next_uid=1, next_timestamp_id=1, accounts={"\ud800": b""}))
    wrong.append(Manifest(next_uid=1, next_timestamp_id=1, accounts={"big": bytes(MAX_MANIFEST_BYTES)}))
    for facts in wrong:
        with pytest.raises(InvalidInput):
            save(saved, NEW, facts=facts)
    with CheckpointWriter(saved) as writer, pytest.raises(InvalidInput, match="at most"):
        writer.write([(bytes(MAX_RECORD_BYTES + 1), b"")])
    assert load(saved) == OLD
    assert len(list(saved.iterdir())) == 2


# --- generations --------------------------------------------------------------------------------------


def test_the_previous_generation_stays_until_the_next_save(tmp_path: Path) -> None:
    first, second, third = (save(tmp_path, entries).files[0].name for entries in (OLD, NEW, OLD))
    assert record_files(tmp_path) == sorted([second, third])
    assert first not in record_files(tmp_path)
    assert load(tmp_path) == OLD


def test_g08_a_reader_keeps_the_generation_that_it_opened_over_later_saves(saved: Path) -> None:
    with open_checkpoint(saved) as checkpoint:
        entries = checkpoint.entries()
        seen = [next(entries)]
        save(saved, NEW)
        seen.append(next(entries))
        save(saved, NEW)
        save(saved, NEW)
        seen.extend(entries)
        assert seen == OLD
        checkpoint.verify()
    assert load(saved) == NEW


def test_a_reader_that_is_overtaken_while_it_opens_finds_the_newer_checkpoint(saved: Path) -> None:
    class Overtaken(FileOps):
        def open(self, path: Path) -> tuple[int, int]:
            if path.suffix == ".fbr" and saves:
                saves.pop()
                save(saved, NEW)
                save(saved, NEW)
            return super().open(path)

    saves = [1]
    with open_checkpoint(saved, Overtaken()) as checkpoint:
        assert list(checkpoint.entries()) == NEW


def test_other_files_in_the_directory_are_left_alone(saved: Path) -> None:
    others = ["model.safetensors", "groups-1.fbr", "groups-0123456789abcdef.fbr.bak", "Xgroups-0123456789abcdef.fbr"]
    others += ["groups-0123456789ABCDEF.fbr", "manifest.json.bak", "manifest-1.tmp"]
    for name in others:
        (saved / name).write_text(name)
    (saved / "groups-00000000000000dd.fbr").mkdir()
    leftovers = ["groups-0123456789abcdef.fbr", "manifest-0123456789abcdef.tmp"]
    for name in leftovers:
        (saved / name).write_text(name)
    save(saved, NEW)
    left = {path.name for path in saved.iterdir()}
    assert left >= {*others, "groups-00000000000000dd.fbr"}
    assert left.isdisjoint(leftovers)
    assert load(saved) == NEW


def test_two_saves_to_one_directory_at_a_time_are_refused(saved: Path) -> None:
    with CheckpointWriter(saved) as writer:
        writer.write(NEW[:1])
        with pytest.raises(CheckpointError, match="in progress"):
            CheckpointWriter(saved)
        writer.publish(FACTS)
    assert load(saved) == NEW[:1]
    save(saved, NEW)


def test_an_aborted_save_leaves_nothing(saved: Path) -> None:
    before = sorted(saved.iterdir())
    with CheckpointWriter(saved) as writer:
        writer.write(NEW[:1])
    with pytest.raises(CheckpointError, match="has ended"):
        writer.write([(b"", b"")])
    with pytest.raises(CheckpointError, match="has ended"):
        writer.publish(FACTS)
    assert sorted(saved.iterdir()) == before
    assert load(saved) == OLD


# --- disks that fail ----------------------------------------------------------------------------------


def _operations(path: Path) -> list[str]:
    files = Failing(None, 0)
    save(path / "old" / "one", OLD)
    save(path / "old" / "one", NEW, files)
    return files.calls


def test_everything_is_synced_before_the_manifest_is_replaced_and_nothing_is_removed_earlier(tmp_path: Path) -> None:
    calls = _operations(tmp_path)
    groups, manifest = ["create", "write", "write", "sync", "close"], ["create", "write", "sync", "close"]
    assert calls[calls.index("create") :][:12] == [*groups, *manifest, "sync", "replace", "sync"]
    assert "remove" not in calls[: calls.index("replace")]


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("existing", [False, True], ids=["first save", "later save"])
def test_g08_whichever_file_operation_fails_a_whole_checkpoint_is_there(
    tmp_path: Path, code: int, for_good: bool, existing: bool
) -> None:
    operations = len(_operations(tmp_path)) + 10
    outcomes = set()
    for n in range(operations):
        path = tmp_path / f"{n}"
        if existing:
            save(path, NEW)
            save(path, OLD)
        files = Failing(n, code, for_good=for_good)
        failed = failure(lambda path=path, files=files: save(path, NEW, files))  # type: ignore[misc]
        if failed is not None:
            assert str(tmp_path) in str(failed), "the error says where"
            assert os.strerror(code) in str(failed), "and what"
        assert files.open_descriptors == set(), f"operation {n} ({files.calls[n:]}) leaks a file"
        try:
            found = load(path)
        except CheckpointError:
            assert not existing
            assert failed is not None
            found = []
        outcomes.add((failed is not None, found == NEW))
        assert found == NEW if failed is None else found in (NEW, OLD, [])
        if failed is not None and "replace" not in files.calls[:n]:
            assert found == (OLD if existing else [])
        save(path, OLD)
        assert load(path) == OLD
        # The new generation and the one that was valid before it; nothing of the failed save.
        leftovers = len(list(path.iterdir())) - 2
        assert leftovers == (1 if existing or found else 0), files.calls
    assert outcomes >= {(True, False), (False, True), (True, True)}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_whichever_file_operation_fails_reading_says_so(saved: Path, code: int) -> None:
    n = 0
    while True:
        files = Failing(n, code)
        failed = failure(lambda files=files: load(saved, files))  # type: ignore[misc]
        assert failed is None or str(saved) in str(failed)
        assert files.open_descriptors == set()
        if len(files.calls) <= n:
            break
        n += 1
    assert n >= 6


def test_reading_after_close_is_an_error_and_never_reads_another_file(saved: Path) -> None:
    save(saved, [(b"r", bytes(50_000))] * 3)
    with open_checkpoint(saved) as checkpoint:
        entries = checkpoint.entries()
        next(entries)
    with pytest.raises(CheckpointError, match="closed"):
        next(entries)


# --- damage -------------------------------------------------------------------------------------------


def _files(path: Path) -> Iterator[Path]:
    yield path / "manifest.json"
    yield path / record_files(path)[0]


def test_g08_every_prefix_of_every_file_is_refused(saved: Path) -> None:
    for file in _files(saved):
        data = file.read_bytes()
        for size in range(len(data) - 1, -1, -1):
            os.truncate(file, size)
            reads_truth_or_stops(saved, OLD)
        file.write_bytes(data + b"\0")
        reads_truth_or_stops(saved, OLD)
        file.write_bytes(data)
    assert load(saved) == OLD


def test_g08_every_flipped_bit_is_refused(saved: Path) -> None:
    for path in _files(saved):
        with path.open("r+b", buffering=0) as file:
            for bit in range(8 * path.stat().st_size):
                byte = os.pread(file.fileno(), 1, bit // 8)
                os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << bit % 8]), bit // 8)
                reads_truth_or_stops(saved, OLD)
                os.pwrite(file.fileno(), byte, bit // 8)
    assert load(saved) == OLD


def test_damage_after_opening_is_found_while_reading(saved: Path) -> None:
    file = saved / record_files(saved)[0]
    with open_checkpoint(saved) as checkpoint:
        os.truncate(file, 60)
        with pytest.raises(DamagedData, match="cut off"):
            checkpoint.verify()


def test_a_damaged_generation_does_not_hinder_the_next_save(saved: Path) -> None:
    manifest, data = saved / "manifest.json", (saved / "manifest.json").read_bytes()
    manifest.write_bytes(data[: len(data) // 2])
    save(saved, NEW)
    assert load(saved) == NEW


def test_entries_in_another_order_or_of_another_file_are_refused(tmp_path: Path) -> None:
    same = [(b"1", b"aaaa"), (b"2", b"bbbb"), (b"3", b"cccc")]
    name, other = save(tmp_path / "a", same).files[0].name, save(tmp_path / "b", same).files[0].name
    file = tmp_path / "a" / name
    data = file.read_bytes()
    entries = [data[24 + i * 21 : 45 + i * 21] for i in range(3)]
    for order in ((1, 0, 2), (0, 2, 1), (0, 0, 2), (0, 1, 1)):
        file.write_bytes(data[:24] + b"".join(entries[i] for i in order))
        reads_truth_or_stops(tmp_path / "a", same)
    file.write_bytes((tmp_path / "b" / other).read_bytes())
    with pytest.raises(DamagedData, match="of its name"):
        load(tmp_path / "a")


# --- content that lies --------------------------------------------------------------------------------


def seal(body: bytes, version: int = 2) -> bytes:
    digest = sha256(body).hexdigest()
    return (
        f'{{"format":"forebay-checkpoint","version":{version},"sha256":"{digest}","manifest":'.encode() + body + b"}\n"
    )


def reseal(path: Path, change: Callable[[Any], object]) -> None:
    """Change the manifest, with a checksum that is right again."""
    manifest = json.loads((path / "manifest.json").read_bytes())["manifest"]
    change(manifest)
    (path / "manifest.json").write_bytes(seal(json.dumps(manifest).encode()))


def test_the_tests_seal_as_the_format_does(saved: Path) -> None:
    reseal(saved, lambda manifest: None)
    assert load(saved) == OLD


ESCAPES = ["../x", "/etc/passwd", "a/b", "..", "", "groups-0123456789abcdef.fbr\n", "groups-0123456789abcdef.fbr\0"]
ESCAPES += [
    "../groups-0123456789abcdef.fbr",
    "./groups-0123456789abcdef.fbr",
    "manifest.json",
    "groups-０123456789abcdef.fbr",
]


@pytest.mark.parametrize("name", ESCAPES)
def test_g09_a_manifest_cannot_name_files_outside_of_its_directory(saved: Path, name: str) -> None:
    reseal(saved, lambda manifest: manifest["files"][0].update(name=name))
    with pytest.raises(DamagedData, match=r"files\[0\]\.name"):
        open_checkpoint(saved)


@pytest.mark.parametrize("which", ["record file", "manifest"])
@pytest.mark.parametrize("kind", ["symlink", "dangling", "directory", "pipe"])
def test_g09_only_plain_files_are_read(saved: Path, tmp_path: Path, kind: str, which: str) -> None:
    file = saved / (record_files(saved)[0] if which == "record file" else "manifest.json")
    moved = file.rename(tmp_path / "elsewhere")
    if kind == "directory":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(moved if kind == "symlink" else tmp_path / "nothing")
    with pytest.raises(DamagedData, match="expected a plain file"):
        open_checkpoint(saved)
    if which == "manifest":
        with pytest.raises(DamagedData, match="expected a plain file"):
            CheckpointWriter(saved)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "not the manifest"),
        (b"{}", "not the manifest"),
        (b"[1, 2]", "not the manifest"),
        (b"\xff\xfe", "not the manifest"),
        (b"[" * 100_000, "not the manifest"),
        (b'{"format": "safetensors", "version": 1}', "'safetensors'"),
        (b'{"format": 1, "version": 1}', "not the manifest"),
        (b'{"format": "forebay-checkpoint", "version": 0}', "checksum"),
        (b'{"format": "forebay-checkpoint", "version": 2}', "checksum"),
        (b'{"format": "forebay-checkpoint", "version": 1}', "version 1, which an older Forebay wrote"),
        (seal(b"{}", 1), "version 1, which an older Forebay wrote"),
        (b'{"format": "forebay-checkpoint", "version": "1"}', "not the manifest"),
        (b'{"format": "forebay-checkpoint", "version": 3, "new": []}', "version 3; .* use a newer one"),
        (seal(b"{}", 3), "version 3"),
        (seal(b"{}"), "cannot be read"),
        (seal(b"[" * 100_000), "cannot be read|not the manifest"),
        (seal(b'{"next_uid":1,"next_timestamp_id":1,"accounts":{"a":"*"}}'), "accounts"),
    ],
)
def test_foreign_and_newer_manifests_are_refused_by_name(saved: Path, content: bytes, match: str) -> None:
    (saved / "manifest.json").write_bytes(content)
    with pytest.raises(DamagedData, match=match) as caught:
        open_checkpoint(saved)
    assert "manifest.json" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"name": "theirs"}',
        b'{"format":"forebay-checkpoint","version":3,"x":[]}',
        b'{"format":"forebay-checkpoint","version":1,"x":[]}',
    ],
)
def test_a_save_never_overwrites_a_foreign_newer_or_older_manifest(saved: Path, content: bytes) -> None:
    (saved / "manifest.json").write_bytes(content)
    before = sorted(saved.iterdir())
    with pytest.raises((InvalidInput, DamagedData), match=r"newer|older|another directory"):
        CheckpointWriter(saved)
    assert (saved / "manifest.json").read_bytes() == content
    assert sorted(saved.iterdir()) == before


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "twice": (lambda m: m["files"].append(m["files"][0]), r"length.*files"),
    "none": (lambda m: m.update(files=[]), r"length.*files"),
    "missing": (lambda m: m["files"][0].update(name="groups-0123456789abcdef.fbr"), "is missing"),
    "bytes": (lambda m: m["files"][0].update(bytes=2**62), "its manifest says"),
    "bytes beyond": (lambda m: m["files"][0].update(bytes=2**80), "cannot be read"),
    "negative": (lambda m: m["files"][0].update(bytes=-1), "cannot be read"),
    "entries": (lambda m: m["files"][0].update(entries=5), "its manifest says"),
    "crc32": (lambda m: m["files"][0].update(crc32=1), "its manifest says"),
    "crc32 beyond": (lambda m: m["files"][0].update(crc32=2**32), "cannot be read"),
    "no files": (lambda m: m["files"][0].pop("name"), "cannot be read"),
    "step": (lambda m: m.update(model_step=-1), "model_step"),
    "uid": (lambda m: m.update(next_uid="1"), "next_uid"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_manifest_that_lies_is_refused(saved: Path, what: str) -> None:
    change, match = WRONG[what]
    reseal(saved, change)
    with pytest.raises(DamagedData, match=match):
        load(saved)


@pytest.mark.parametrize(
    ("record_bytes", "frame_bytes"),
    [(2**32 - 1, 0), (0, 2**64 - 1), (0, 2**40), (0, 2**31), (2**20, 0), (2**20 + 1, 0)],
)
def test_huge_lengths_are_refused_before_anything_is_allocated(
    tmp_path: Path, record_bytes: int, frame_bytes: int
) -> None:
    nonce = "0123456789abcdef"
    header = struct.pack("<4sB3x16s", b"FBR1", 1, nonce.encode())
    lengths = struct.pack("<IQ", record_bytes, frame_bytes)
    crc = crc32(lengths, crc32(header))
    data = header + lengths + struct.pack("<I", crc)
    (tmp_path / f"groups-{nonce}.fbr").write_bytes(data)
    file = RecordFile(name=f"groups-{nonce}.fbr", bytes=len(data), entries=1, crc32=crc)
    manifest = {
        "next_uid": 0,
        "next_timestamp_id": 0,
        "accounts": {},
        "files": [{f: getattr(file, f) for f in file.__struct_fields__}],
    }
    (tmp_path / "manifest.json").write_bytes(seal(json.dumps(manifest).encode()))
    largest = []

    class Watching(FileOps):
        def read(self, descriptor: int, count: int, offset: int) -> bytes:
            largest.append(count)
            return super().read(descriptor, count, offset)

    with open_checkpoint(tmp_path, Watching()) as checkpoint, pytest.raises(DamagedData, match="entry"):
        checkpoint.verify()
    assert max(largest) <= 4096


def test_a_manifest_over_the_limit_is_refused_before_it_is_read(saved: Path) -> None:
    os.truncate(saved / "manifest.json", MAX_MANIFEST_BYTES + 1)
    with pytest.raises(DamagedData, match="at most"):
        open_checkpoint(saved)


def test_a_path_that_is_a_file_is_refused_and_one_without_a_checkpoint_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "below"):
        with pytest.raises(InvalidInput, match="is a file"):
            CheckpointWriter(path)
    with pytest.raises(InvalidInput, match="is a file"):
        open_checkpoint(file)
    assert file.read_text() == "mine"
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match="no checkpoint at"):
            open_checkpoint(path)
