"""Disks that are full, directories that vanish, buffers that nobody closes: nothing that was added is lost silently."""

from __future__ import annotations

import errno
import gc
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from forebay.checkpoint.files import FileOps
from forebay.errors import BufferClosed, StorageError, StorageInUse, StorageVanished
from forebay.trajectory.store import Store
from tests.trajectory.crash_child import Buffer, make
from tests.trajectory.test_store import Large, apart, check_all, ids_of, opened, settle


class Tiny(Buffer):
    """A trajectory a segment."""

    _segment_bytes = 1


def loaded(path: Path) -> Buffer:
    """What a checkpoint holds."""
    buffer = Buffer(sample_window_size=0, arrays="numpy")
    buffer.load_checkpoint(path)
    return buffer


def writer_threads() -> int:
    return sum(thread.name == "forebay-trajectories" for thread in threading.enumerate())


# --- a directory that vanishes --------------------------------------------------------------------------


def _replace(store: Path) -> None:
    other = store.with_name("other")
    with opened(other) as buffer:
        buffer.add_trajectories([make(0)])
    shutil.rmtree(store)
    (other / "rank_0").rename(store)


def _replace_by_a_file(store: Path) -> None:
    shutil.rmtree(store)
    store.write_bytes(b"")


def _remove(pattern: str) -> Callable[[Path], None]:
    def remove(store: Path) -> None:
        for path in store.glob(pattern):
            path.unlink()

    return remove


VANISHING: dict[str, Callable[[Path], object]] = {
    "deleted": shutil.rmtree,
    "parent deleted": lambda store: shutil.rmtree(store.parent),
    "moved": lambda store: store.rename(store.with_name("elsewhere")),
    "replaced": _replace,
    "a file instead": _replace_by_a_file,
    "catalogue deleted": _remove("catalogue.db"),
    "log deleted": _remove("catalogue.db-wal"),
    "rows deleted": _remove("*.col"),
}


@pytest.mark.parametrize("kind", [Large, Tiny])
@pytest.mark.parametrize("how", VANISHING)
def test_g07_durable_is_an_error_when_the_directory_vanished_and_memory_can_be_saved(
    tmp_path: Path, how: str, kind: type[Buffer]
) -> None:
    buffer = opened(tmp_path / "store", kind, cache_size=1)
    buffer.add_trajectories([make(key) for key in range(5)], durable=True)
    VANISHING[how](tmp_path / "store" / "rank_0")
    with pytest.raises(StorageVanished, match="Only memory has trajectory 5:"):
        buffer.add_trajectories([make(5)], durable=True)
    assert buffer.durable_id == 4
    with pytest.raises(StorageVanished, match="flush"):
        buffer.add_trajectories([make(6)])
    with pytest.raises(StorageVanished):
        buffer.flush()
    check_all(buffer, range(6))
    buffer.save_checkpoint(tmp_path / "rescued")
    check_all(loaded(tmp_path / "rescued"), range(6))
    with pytest.raises(StorageVanished, match="save_checkpoint"):
        buffer.close()
    buffer.save_checkpoint(tmp_path / "after close")
    check_all(loaded(tmp_path / "after close"), range(6))
    for call in (lambda: buffer.sample(1), buffer.flush, lambda: buffer.add_trajectories([make(6)])):
        with pytest.raises(BufferClosed):
            call()
    buffer.trajectory_format = "pt"
    buffer.save_checkpoint(tmp_path / "as RLinf reads it")
    assert len(loaded(tmp_path / "as RLinf reads it")) == 6


@pytest.mark.parametrize("how", VANISHING)
def test_g07_flush_and_close_notice_a_directory_that_vanished_with_nothing_to_write(tmp_path: Path, how: str) -> None:
    buffer = opened(tmp_path / "store", Large)
    buffer.add_trajectories([make(0)], durable=True)
    VANISHING[how](tmp_path / "store" / "rank_0")
    with pytest.raises(StorageVanished):
        buffer.flush()
    with pytest.raises(StorageVanished):
        buffer.close()


def test_g07_a_directory_that_vanishes_during_a_commit_is_noticed(tmp_path: Path) -> None:
    class Vanishing(FileOps):
        def sync(self, descriptor: int) -> None:
            super().sync(descriptor)
            if armed:
                shutil.rmtree(armed.pop())

    class Faulty(Large):
        _files = Vanishing()

    armed: list[Path] = []
    buffer = opened(tmp_path / "store", Faulty)
    buffer.add_trajectories([make(0)], durable=True)
    armed.append(tmp_path / "store")
    with pytest.raises(StorageVanished):
        buffer.add_trajectories([make(1)], durable=True)
    assert buffer.durable_id == 0
    buffer.save_checkpoint(tmp_path / "rescued")
    check_all(loaded(tmp_path / "rescued"), range(2))


def test_a_checkpoint_leaves_out_what_lost_its_files_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The window is read from files that have no names any more; what is older cannot be."""
    with opened(tmp_path / "store", Tiny, sample_window_size=3, cache_size=0) as buffer:
        for key in range(8):
            buffer.add_trajectories([make(key)], durable=True)
        for number in (2, 6):
            for path in (tmp_path / "store" / "rank_0").glob(f"seg-{buffer._segments[number + 1].name}-*"):
                path.unlink()
        with caplog.at_level(logging.WARNING):
            buffer.save_checkpoint(tmp_path / "checkpoint")
    assert [record.getMessage() for record in caplog.records] == [
        "1 trajectories lost their files and are not saved: [2]"
    ]
    check_all(loaded(tmp_path / "checkpoint"), [0, 1, 3, 4, 5, 6, 7])


def test_a_directory_that_comes_back_is_written_to_again(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with opened(store) as buffer:
        added = 0
        for _ in range(3):
            buffer.add_trajectories([make(key) for key in range(added, added + 5)], durable=True)
            store.rename(tmp_path / "elsewhere")
            with pytest.raises(StorageVanished):
                buffer.add_trajectories([make(added + 5)], durable=True)
            (tmp_path / "elsewhere").rename(store)
            buffer.flush()
            added += 6
            check_all(buffer, range(added))
    with opened(store) as buffer:
        check_all(buffer, range(18))


# --- a full disk ----------------------------------------------------------------------------------------


class Quota(FileOps):
    """A disk with room for so many bytes of rows."""

    def __init__(self, room: int | None = None) -> None:
        self.room = room
        self.used: dict[int, int] = {}  # by inode

    def write(self, descriptor: int, parts: Sequence[Any]) -> None:
        for part in parts:
            if self.room is not None and sum(self.used.values()) + len(part) > self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().write(descriptor, [part])
            self._look(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        super().truncate(descriptor, size)
        self._look(descriptor)

    def remove(self, path: Path) -> None:
        self.used.pop(path.stat().st_ino, None)
        super().remove(path)

    def _look(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        self.used[found.st_ino] = found.st_size


def on_quota(path: Path, segment_bytes: int, **options: Any) -> tuple[Buffer, Quota]:
    quota = Quota()

    class Limited(Buffer):
        _files = quota
        _segment_bytes = segment_bytes

    return opened(path, Limited, **options), quota


def sizes(count: int) -> list[int]:
    """How many bytes the first n trajectories take."""
    found = [0]
    with Buffer(sample_window_size=0, arrays="numpy") as buffer:
        for key in range(count):
            buffer.add_trajectories([make(key)])
            found.append(int(buffer.get_stats()["live_bytes"]))
    return found


@pytest.mark.parametrize("segment_bytes", [6_000, 10**7])
def test_those_of_a_group_commit_that_fit_are_durable(tmp_path: Path, segment_bytes: int) -> None:
    """For any number that fits, with and without trajectories that were durable before in the same segment."""
    needed = sizes(12)
    for before in (0, 3):
        for fits in range(before, 12):
            path = tmp_path / f"{before}-{fits}"
            buffer, quota = on_quota(path, segment_bytes)
            buffer.add_trajectories([make(key) for key in range(before)])
            buffer.flush()
            quota.room = needed[fits] + 100
            with pytest.raises(StorageError, match=f"{os.strerror(errno.ENOSPC)}.* trajector.* 11:"):
                buffer.add_trajectories([make(key) for key in range(before, 12)], durable=True)
            assert buffer.durable_id == fits - 1
            with pytest.raises(StorageError):
                buffer.flush()
            assert buffer.durable_id == fits - 1
            assert sum(quota.used.values()) == needed[fits], "what failed takes no room"
            quota.room = None
            buffer.flush()
            assert (buffer.durable_id, buffer.get_stats()["pending_bytes"]) == (11, 0)
            check_all(buffer, range(12))
            buffer.close()
            with opened(path) as again:
                check_all(again, range(12))


def test_a_full_disk_is_freed_by_what_need_not_be_kept(tmp_path: Path) -> None:
    """There is never room for both the oldest trajectory and the one that takes its place."""
    needed = sizes(40)
    buffer, quota = on_quota(tmp_path, 1, sample_window_size=4, retain="window")
    with buffer:
        for key in range(40):
            quota.room = needed[key + 1] - needed[max(key - 3, 0)]
            buffer.add_trajectories([make(key)], durable=True)
            settle(buffer)
        check_all(buffer, range(36, 40))


def test_a_failed_close_leaves_what_is_in_memory_to_be_saved(tmp_path: Path) -> None:
    buffer, quota = on_quota(tmp_path / "store", 10**7, sample_window_size=2)
    buffer.add_trajectories([make(key) for key in range(3)], durable=True)
    quota.room = 0
    buffer.add_trajectories([make(key) for key in range(3, 9)])
    with pytest.raises(StorageError, match="Only memory has trajectories 3 to 8:"):
        buffer.close()
    buffer._files = None  # another disk
    buffer.save_checkpoint(tmp_path / "rescued")
    check_all(loaded(tmp_path / "rescued"), range(3, 9))
    with opened(tmp_path / "store") as again:
        check_all(again, range(3))


def test_close_writes_what_failed_once_there_is_room(tmp_path: Path) -> None:
    buffer, quota = on_quota(tmp_path, 10**7)
    quota.room = 0
    with pytest.raises(StorageError, match=os.strerror(errno.ENOSPC)):
        buffer.add_trajectories([make(0), make(1)], durable=True)
    quota.room = None
    buffer.close()
    with opened(tmp_path) as again:
        check_all(again, range(2))


def test_a_checkpoint_holds_everything_while_the_disk_of_the_store_is_full(tmp_path: Path) -> None:
    """What left the window, on disk and not; what is in it, on disk and not."""
    buffer, quota = on_quota(tmp_path / "store", 6_000, sample_window_size=5, cache_size=1)
    buffer.add_trajectories([make(key) for key in range(10)], durable=True)
    quota.room = sum(quota.used.values())
    with pytest.raises(StorageError):
        buffer.add_trajectories([make(key) for key in range(10, 18)], durable=True)
    assert ids_of(buffer) == list(range(13, 18))
    buffer._files = None  # another disk
    buffer.save_checkpoint(tmp_path / "rescued")
    check_all(loaded(tmp_path / "rescued"), range(18))
    quota.room = None
    buffer.close()


@pytest.mark.parametrize("seeds", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_g07_full_disks_lose_nothing_whatever_is_done_in_between(tmp_path: Path, seeds: int) -> None:
    """Random adds under real limits of the size of files, which also SQLite's meet; then room is made."""
    apart(
        """
import random, resource
from tests.trajectory.test_failing_disk import *
failures = 0
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
for seed in range(int(sys.argv[2])):
    chance = random.Random(seed)
    path, added = Path(sys.argv[1]) / str(seed), 0
    kind = chance.choice((Buffer, Large))
    for life in range(3):
        limit(resource.RLIM_INFINITY)
        buffer = opened(path, kind, cache_size=chance.choice((0, 5)))
        acknowledged = added - 1
        check_all(buffer, range(added))
        for _ in range(chance.randrange(1, 20)):
            what = chance.random()
            try:
                if what < 0.3:
                    limit(chance.choice((0, chance.randrange(120_000), resource.RLIM_INFINITY)))
                elif what < 0.4:
                    buffer.flush()
                    acknowledged = added - 1
                else:
                    count = chance.choice((1, 2, 20))
                    durable = chance.random() < 0.5
                    before = buffer._next_id
                    try:
                        buffer.add_trajectories([make(key) for key in range(added, added + count)], durable=durable)
                    finally:
                        assert buffer._next_id - before in (0, count)
                        added = buffer._next_id
                    if durable:
                        acknowledged = added - 1
            except StorageError:
                failures += 1
            assert acknowledged <= buffer.durable_id
            assert ids_of(buffer) == list(range(added))
        rescued = Path(sys.argv[1]) / f"{seed}-{life}"
        limit(resource.RLIM_INFINITY)
        if chance.random() < 0.5:
            buffer.save_checkpoint(rescued)
            check_all(loaded(rescued), range(added))
        if chance.random() < 0.5:
            buffer.flush()
            assert buffer.durable_id == added - 1
        buffer.close()
    with opened(path) as buffer:
        check_all(buffer, range(added))
assert failures > 2 * int(sys.argv[2]), failures
""",
        tmp_path,
        seeds,
    )


# --- a buffer that nobody closes ------------------------------------------------------------------------


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_dropped_buffer_writes_what_waits_and_ends(tmp_path: Path, in_a_cycle: bool) -> None:
    gc.collect()
    threads = writer_threads()
    added = 0
    for _ in range(5):
        buffer = opened(tmp_path)
        check_all(buffer, range(added))
        buffer.add_trajectories([make(key) for key in range(added, added + 10)])
        added += 10
        assert writer_threads() == threads + 1
        assert buffer._window is not None
        ended = weakref.ref(buffer), weakref.ref(buffer._window.space)
        if in_a_cycle:
            buffer.itself = buffer  # type: ignore[attr-defined]
        del buffer
        if in_a_cycle:
            gc.collect()
        assert [reference() for reference in ended] == [None, None]
        assert writer_threads() == threads
    with opened(tmp_path) as buffer:
        check_all(buffer, range(added))


def test_a_buffer_dropped_after_an_error_tries_again_and_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for room in (None, 0):
        buffer, quota = on_quota(tmp_path / str(room), 10**7)
        quota.room = 0
        with pytest.raises(StorageError):
            buffer.add_trajectories([make(0), make(1)], durable=True)
        quota.room = room
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            del buffer
            gc.collect()  # the error that was raised had it
        said = [record.getMessage() for record in caplog.records]
        if room is None:
            assert said == []
        else:
            assert len(said) == 1
            assert "trajectories 0 to 1" in said[0]
            assert os.strerror(errno.ENOSPC) in said[0]
        with opened(tmp_path / str(room)) as again:
            check_all(again, range(2) if room is None else [])


def test_a_buffer_whose_last_reference_ends_in_its_writer_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dropping(FileOps):
        def sync(self, descriptor: int) -> None:
            super().sync(descriptor)
            if held and may_drop.wait(60):
                held.clear()

    class Held(Buffer):
        _files = Dropping()

    close = Store.close
    closed = threading.Event()

    def watched(self: Store, *, clean: bool) -> None:
        close(self, clean=clean)
        closed.set()

    monkeypatch.setattr(Store, "close", watched)
    may_drop = threading.Event()
    held: list[Buffer] = []
    held.append(opened(tmp_path, Held))
    held[0].add_trajectories([make(0), make(1)])
    may_drop.set()
    assert closed.wait(60)
    with opened(tmp_path) as buffer:
        check_all(buffer, range(2))


def test_what_waits_is_written_when_the_interpreter_ends(tmp_path: Path) -> None:
    apart("buffer = opened(Path(sys.argv[1]))\nbuffer.add_trajectories([make(key) for key in range(50)])", tmp_path)
    with opened(tmp_path) as buffer:
        check_all(buffer, range(50))


def test_a_dropped_buffer_in_a_forked_child_leaves_the_parents_alone(tmp_path: Path) -> None:
    apart(
        """
buffers = [opened(Path(sys.argv[1]))]
buffers[0].add_trajectories([make(0)], durable=True)
pid = os.fork()
if not pid:
    buffers.clear()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
buffers[0].add_trajectories([make(1)], durable=True)
try:
    opened(Path(sys.argv[1]))
except StorageInUse as error:
    assert "by this process (process " in str(error), error
else:
    raise AssertionError("the lock is held")
""",
        tmp_path,
    )
    with opened(tmp_path) as buffer:
        check_all(buffer, range(2))


def test_a_directory_that_this_process_has_open_is_said_to_be(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(StorageInUse, match=rf"by this process \(process {os.getpid()} on"):
        opened(tmp_path)
