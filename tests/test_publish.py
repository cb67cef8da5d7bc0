"""The seam under every checkpoint: sealed manifests, files that are created or linked, and one moment of publishing."""

from __future__ import annotations

import errno
import json
import os
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.checkpoint.files import FileOps
from forebay.checkpoint.format import ENVELOPE as ROLLOUTS
from forebay.checkpoint.format import CheckpointWriter, open_checkpoint
from forebay.checkpoint.publish import DirectoryWriter, Envelope, open_plain, open_published
from forebay.errors import CheckpointError, DamagedData, InvalidInput, UnreadableData
from tests.failing_files import Failing
from tests.test_checkpoint_format import failure

ENVELOPE = Envelope("forebay-things", 3)
OURS = re.compile(r"(kept|made)-[0-9]+\.bin", re.ASCII)
Content = dict[str, bytes]

OLD: Content = {"kept-1.bin": b"one", "made-1.bin": b"old" * 100}
NEW: Content = {"kept-1.bin": b"one", "kept-2.bin": b"two" * 50, "made-2.bin": b"new" * 100}
NEXT: Content = {"kept-2.bin": NEW["kept-2.bin"], "made-3.bin": b"next"}
LAST: Content = {"kept-2.bin": NEW["kept-2.bin"], "made-4.bin": b"last"}


def names_in(body: bytes) -> set[str]:
    try:
        return set(json.loads(body))
    except ValueError as error:
        raise DamagedData(str(error)) from None


def writer_of(path: Path, files: FileOps | None = None) -> DirectoryWriter:
    return DirectoryWriter(path, ENVELOPE, ours=OURS, names_in=names_in, files=files)


def body_of(content: Content) -> bytes:
    return json.dumps({name: sha256(data).hexdigest() for name, data in content.items()}).encode()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is synced when is checked by the order of operations, not by the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Where the files live that checkpoints share."""
    path = tmp_path / "store"
    path.mkdir()
    for name, data in (OLD | NEW).items():
        if name.startswith("kept"):
            (path / name).write_bytes(data)
    return path


def save(path: Path, content: Content, store: Path, files: FileOps | None = None) -> None:
    """Link what is kept, or copy it where that is impossible; make the rest."""
    with writer_of(path, files) as writer:
        for name, data in content.items():
            if not (name.startswith("kept") and writer.link(store / name, name)):
                descriptor = writer.create(name)
                writer.write(descriptor, [data[:2], b"", data[2:]])
                writer.finish(descriptor)
        writer.publish(body_of(content))


def load(path: Path, files: FileOps | None = None) -> Content:
    ops = files or FileOps()

    def take(body: bytes) -> Content:
        found = {}
        for name, digest in json.loads(body).items():
            descriptor, size = open_plain(path / name, ops)
            found[name] = ops.read(descriptor, size, 0)
            ops.close(descriptor)
            assert sha256(found[name]).hexdigest() == digest, "a published file is whole"
        return found

    return open_published(path, ENVELOPE, take, ops)


def listing(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


# --- the envelope -------------------------------------------------------------------------------------


def test_a_sealed_body_opens_byte_for_byte() -> None:
    body = b'{ "a":\n 1}'
    data = ENVELOPE.seal(body)
    assert json.loads(data)["manifest"] == {"a": 1}
    assert ENVELOPE.open(data, Path("here")) == body
    assert ENVELOPE.is_ours(data)
    assert ENVELOPE.is_ours(data[:30]), "a damaged one, too"
    assert not ROLLOUTS.is_ours(data)
    assert not ENVELOPE.is_ours(b"")


def test_every_altered_byte_every_other_length_and_an_older_version_is_refused() -> None:
    data = ENVELOPE.seal(b'{"a":1}')
    altered = [data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(len(data))]
    altered += [data[:i] for i in range(len(data))] + [data + b"\n", b" " + data]
    for wrong in [*altered, Envelope("forebay-things", 2).seal(b'{"a":1}')]:
        with pytest.raises(DamagedData, match="here"):
            ENVELOPE.open(wrong, Path("here"))


def test_another_version_is_unreadable_and_not_damaged() -> None:
    with pytest.raises(UnreadableData, match="version 4; this Forebay reads 3"):
        ENVELOPE.open(Envelope("forebay-things", 4).seal(b"{}"), Path("here"))
    with pytest.raises(UnreadableData, match=r"version 2, which an older Forebay wrote; .* reads only version 3"):
        ENVELOPE.open(Envelope("forebay-things", 2).seal(b"{}"), Path("here"))


def test_a_body_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.checkpoint.publish.MAX_MANIFEST_BYTES", 1000)
    ENVELOPE.seal(b"1" * 800)
    with pytest.raises(InvalidInput, match="expected at most 1000"):
        ENVELOPE.seal(b"1" * 1000)


def test_one_kind_of_checkpoint_where_another_is_expected_is_named(tmp_path: Path, store: Path) -> None:
    save(tmp_path / "things", OLD, store)
    with pytest.raises(DamagedData, match="has format 'forebay-things'; expected 'forebay-checkpoint'"):
        open_checkpoint(tmp_path / "things")
    before = listing(tmp_path / "things")
    with pytest.raises(InvalidInput, match=r"has format 'forebay-things'; .* use another directory"):
        CheckpointWriter(tmp_path / "things")
    assert listing(tmp_path / "things") == before
    assert load(tmp_path / "things") == OLD


# --- files that are linked ----------------------------------------------------------------------------


def test_a_linked_file_is_the_file_and_is_reused_by_the_next_save(tmp_path: Path, store: Path) -> None:
    path = tmp_path / "deep" / "things"
    save(path, OLD, store)
    assert (path / "kept-1.bin").samefile(store / "kept-1.bin")
    save(path, NEW, store)
    assert load(path) == NEW
    assert (store / "kept-1.bin").stat().st_nlink == 2
    assert listing(path) == {"manifest.json", *OLD, *NEW}, "the generation before it stays"
    save(path, NEXT, store)
    assert load(path) == NEXT
    assert listing(path) == {"manifest.json", *NEW, *NEXT}
    save(path, LAST, store)
    assert listing(path) == {"manifest.json", *NEXT, *LAST}
    assert (store / "kept-1.bin").stat().st_nlink == 1
    assert (store / "kept-1.bin").read_bytes() == b"one", "removing a link leaves the file"


def test_linking_twice_and_linking_a_file_to_itself_change_nothing(tmp_path: Path, store: Path) -> None:
    path = tmp_path / "things"
    save(path, OLD, store)
    with writer_of(path) as writer:
        assert writer.previous == set(OLD)
        assert writer.link(path / "made-1.bin", "made-1.bin")
        assert writer.link(store / "kept-1.bin", "kept-1.bin")
        assert writer.link(store / "kept-1.bin", "kept-1.bin")
        writer.publish(body_of(OLD))
    assert load(path) == OLD


def test_another_file_under_the_name_is_refused_and_left(tmp_path: Path, store: Path) -> None:
    path = tmp_path / "things"
    save(path, OLD, store)
    (path / "kept-2.bin").write_bytes(NEW["kept-2.bin"])
    with writer_of(path) as writer, pytest.raises(CheckpointError, match="another file has that name"):
        writer.link(store / "kept-2.bin", "kept-2.bin")
    with pytest.raises(CheckpointError, match="has ended"):
        writer.create("made-9.bin")
    assert (path / "kept-2.bin").read_bytes() == NEW["kept-2.bin"]
    assert load(path) == OLD


def test_a_symbolic_link_under_the_name_is_another_file(tmp_path: Path, store: Path) -> None:
    (tmp_path / "kept-1.bin").symlink_to(store / "kept-1.bin")
    with writer_of(tmp_path) as writer, pytest.raises(CheckpointError, match="another file has that name"):
        writer.link(store / "kept-1.bin", "kept-1.bin")


@pytest.mark.parametrize("kind", ["symlink", "directory", "missing"])
def test_only_plain_files_are_linked(tmp_path: Path, store: Path, kind: str) -> None:
    source = tmp_path / "source"
    if kind == "symlink":
        source.symlink_to(store / "kept-1.bin")
    elif kind == "directory":
        source.mkdir()
    with writer_of(tmp_path / "things") as writer, pytest.raises(CheckpointError, match=r"plain file|No such file"):
        writer.link(source, "kept-1.bin")
    assert listing(tmp_path / "things") == set()


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS])
def test_where_links_are_impossible_the_caller_copies(tmp_path: Path, store: Path, code: int) -> None:
    class Linkless(FileOps):
        def link(self, source: Path, target: Path) -> None:
            raise OSError(code, os.strerror(code))

    path = tmp_path / "things"
    save(path, OLD, store, Linkless())
    assert load(path) == OLD
    assert (store / "kept-1.bin").stat().st_nlink == 1


def test_aborting_removes_new_links_and_leaves_earlier_files(tmp_path: Path, store: Path) -> None:
    path = tmp_path / "things"
    save(path, OLD, store)
    before = listing(path)
    with writer_of(path) as writer:
        assert writer.link(store / "kept-1.bin", "kept-1.bin")
        assert writer.link(store / "kept-2.bin", "kept-2.bin")
        writer.create("made-2.bin")
        assert listing(path) == before | {"kept-2.bin", "made-2.bin"}
    assert listing(path) == before
    assert (store / "kept-2.bin").exists()
    assert load(path) == OLD


# --- what a writer refuses, and what it sweeps --------------------------------------------------------


@pytest.mark.parametrize("name", ["manifest.json", "other.bin", "../made-1.bin", "made-1.bin\n", ""])
def test_only_names_of_the_format_are_created_or_linked(tmp_path: Path, store: Path, name: str) -> None:
    with writer_of(tmp_path / "things") as writer, pytest.raises(InvalidInput, match="not a file name"):
        writer.create(name)
    with writer_of(tmp_path / "things") as writer, pytest.raises(InvalidInput, match="not a file name"):
        writer.link(store / "kept-1.bin", name)
    assert listing(tmp_path / "things") == set()


def test_a_manifest_that_names_a_missing_file_is_not_published(tmp_path: Path, store: Path) -> None:
    path = tmp_path / "things"
    save(path, OLD, store)
    with writer_of(path) as writer, pytest.raises(InvalidInput, match=r"made-2\.bin"):
        writer.publish(body_of({"made-1.bin": b"", "made-2.bin": b""}))
    with writer_of(path) as writer, pytest.raises(DamagedData):
        writer.publish(b"{")
    assert load(path) == OLD


def test_files_that_are_still_open_are_finished_and_those_not_named_removed(tmp_path: Path) -> None:
    files = Failing(None, 0)
    with writer_of(tmp_path, files) as writer:
        first, second = writer.create("made-1.bin"), writer.create("made-2.bin")
        writer.write(first, [b"a"])
        writer.finish(first)
        with pytest.raises(InvalidInput, match="not an open file"):
            writer.write(first, [b"a"])
    assert listing(tmp_path) == set()
    with writer_of(tmp_path, files) as writer:
        for number in (1, 2):
            writer.write(writer.create(f"made-{number}.bin"), [b"a"])
        files.calls.clear()
        writer.publish(body_of({"made-1.bin": b"a"}))
    assert second not in files.open_descriptors
    assert files.open_descriptors == set()
    assert files.calls[:10] == [
        "sync", "close", "sync", "close", "create", "write", "sync", "close", "sync", "replace",
    ]  # fmt: skip
    assert listing(tmp_path) == {"manifest.json", "made-1.bin"}


def test_no_file_is_removed_when_the_manifest_before_is_damaged(tmp_path: Path, store: Path) -> None:
    path = tmp_path / "things"
    save(path, OLD, store)
    (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes()[:-5])
    with writer_of(path) as writer:
        assert writer.previous is None
    (path / "manifest.json").write_bytes(ENVELOPE.seal(b"nonsense"))
    save(path, NEW, store)
    assert load(path) == NEW
    assert listing(path) == {"manifest.json", *OLD, *NEW}
    save(path, NEXT, store)
    assert listing(path) == {"manifest.json", *NEW, *NEXT}, "by the next save"


def test_only_one_writer_at_a_time(tmp_path: Path) -> None:
    with writer_of(tmp_path), pytest.raises(CheckpointError, match="in progress"):
        writer_of(tmp_path)
    writer_of(tmp_path).abort()


# --- buffers of every kind ----------------------------------------------------------------------------


@pytest.mark.parametrize("in_pieces", [False, True])
def test_every_kind_of_memory_is_written_by_its_bytes(
    tmp_path: Path, in_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writev = os.writev
    if in_pieces:
        monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, [memoryview(parts[0])[:7]]))
    arrays = [np.arange(6, dtype=kind).reshape(2, 3) for kind in ("<f8", "<f4", "<f2", "<i8", "<u2", "u1", "i1")]
    arrays += [np.ones((3, 2), bool), np.empty((0, 3)), np.empty((4, 0), "<f4"), np.array(7.5)]
    parts: list[Any] = [
        b"start",
        b"",
        bytearray(b"middle"),
        *arrays,
        *[array.data for array in arrays],
        memoryview(b""),
    ]
    with writer_of(tmp_path) as writer:
        writer.write(writer.create("made-1.bin"), parts)
        writer.publish(body_of({"made-1.bin": b""}))
    expected = b"startmiddle" + b"".join(array.tobytes() for array in arrays) * 2
    assert (tmp_path / "made-1.bin").read_bytes() == expected


# --- disks that fail ----------------------------------------------------------------------------------


@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("existing", [False, True], ids=["first save", "later save"])
def test_g08_whichever_file_operation_fails_a_reader_sees_the_old_or_the_new(
    tmp_path: Path, store: Path, code: int, for_good: bool, existing: bool
) -> None:
    outcomes, seen, n = set(), set(), 0
    while True:
        path = tmp_path / f"{n}"
        if existing:
            save(path, OLD, store)
        files = Failing(n, code, for_good=for_good)
        failed = failure(lambda path=path, files=files: save(path, NEW, store, files))  # type: ignore[misc]
        seen.update(files.calls)
        assert failed is None or (str(path) in str(failed) and os.strerror(code) in str(failed))
        assert files.open_descriptors == set(), f"operation {n} ({files.calls[n:]}) leaks a file"
        try:
            found = load(path)
        except CheckpointError:
            assert not existing
            found = {}
        assert found == NEW if failed is None else found in (NEW, OLD if existing else {})
        if failed is not None and "replace" not in files.calls[:n]:
            assert found == (OLD if existing else {})
        outcomes.add((failed is not None, found == NEW))
        for name in ("kept-1.bin", "kept-2.bin"):
            assert (store / name).read_bytes() == NEW[name], "what is shared is never touched"
        save(path, NEXT, store)  # also over what could not be removed
        save(path, LAST, store)
        assert load(path) == LAST
        assert listing(path) == {"manifest.json", *NEXT, *LAST}, "nothing of the failed save is left for good"
        if len(files.calls) <= n:
            break
        n += 1
    assert outcomes >= {(True, False), (False, True), (True, True)}
    assert {"link", "create", "write", "sync", "replace"} <= seen
    assert ("same_file" in seen) == existing
