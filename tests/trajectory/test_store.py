"""Trajectories on disk: what was acknowledged is there, whatever tore, failed or raced; and nothing half is drawn."""

from __future__ import annotations

import errno
import gc
import logging
import os
import shutil
import socket
import sqlite3
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.checkpoint.files import FileOps
from forebay.errors import BufferClosed, DamagedData, InvalidTrajectory, StorageError, StorageInUse
from forebay.trajectory import TrajectoryReplayBuffer
from forebay.trajectory.catalogue import Catalogue
from forebay.trajectory.gather import Gatherer
from forebay.trajectory.region import PAGE_BYTES, Region
from forebay.trajectory.segments import file_names
from forebay.trajectory.space import Space
from forebay.trajectory.store import Store
from tests.failing_files import Failing
from tests.processes import HANG_S, finished, started
from tests.trajectory.crash_child import Buffer, check_batch, check_trajectory, make

ROOT = Path(__file__).parent.parent.parent


class Large(Buffer):
    """All in one segment."""

    _segment_bytes = 10**7


def opened(path: Path, kind: type[Buffer] = Buffer, **options: Any) -> Buffer:
    options = {"auto_save": True, "auto_save_path": path, "sample_window_size": 0, "arrays": "numpy", **options}
    return kind(**options)


def reading(path: Path, **options: Any) -> Buffer:
    return opened(path, auto_save=False, read_only=True, **options)


def filled(path: Path, keys: Sequence[int], kind: type[Buffer] = Buffer, **options: Any) -> Path:
    """A store with these trajectories, closed; the directory of its files."""
    with opened(path, kind, **options) as buffer:
        for key in keys:
            assert buffer.add_trajectories([make(key)]) == [key]
    return path / "rank_0"


def killed(path: Path, target: Path) -> Path:
    """What is left of a store if its process ends now. By another process: SQLite's locks end with a close in ours."""
    target.mkdir(parents=True)
    subprocess.run(["cp", "-r", str(path / "rank_0"), str(target)], check=True)
    return target / "rank_0"


def ids_of(buffer: Buffer) -> list[int]:
    return [] if buffer._window is None else [int(number) for number in buffer._window.index.listing().rows["id"]]


def check_all(buffer: Buffer, ids: Sequence[int]) -> None:
    """These trajectories are there, bit for bit, and no other is."""
    assert ids_of(buffer) == list(ids)
    for number in ids:
        check_trajectory(buffer.trajectory(number), number)
    if ids:
        check_batch(buffer.sample(256))
    buffer._check()


def column_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.suffix == ".col")


def disk_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in column_files(directory))


def settle(buffer: Buffer) -> None:
    """Until the writer has nothing left to do."""
    buffer.flush()
    writer = buffer._writer
    assert writer is not None
    with buffer._changed:
        while not writer.idle and writer.error is None:
            assert buffer._changed.wait(HANG_S)


PROGRAM = "import sys\nfrom tests.trajectory.test_store import *"


def apart(code: str, *arguments: object) -> str:
    """Run it in a process of its own, which may crash."""
    done = finished("-X", "faulthandler", "-c", f"{PROGRAM}\n{code}", *arguments)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of stores: what is synced when is not asked of the disk."""
    prepare = Catalogue._prepare_to_write

    def unsynced(self: Catalogue) -> None:
        prepare(self)
        self._db.execute("PRAGMA synchronous = OFF")

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(Catalogue, "_prepare_to_write", unsynced)


@pytest.fixture
def _quiet() -> Iterator[None]:
    """Thousands of damaged stores, each of which says so."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


# --- going on -----------------------------------------------------------------------------------------


def test_g07_a_store_of_trajectories_goes_on_where_it_was_and_ids_grow_over_clear_and_restarts(tmp_path: Path) -> None:
    filled(tmp_path, range(10))
    with opened(tmp_path) as buffer:
        check_all(buffer, range(10))
        assert (buffer.durable_id, buffer.get_stats()["next_id"]) == (9, 10)
        assert buffer.add_trajectories([make(10), make(11)], durable=True) == [10, 11]
        buffer.clear()
        assert (len(buffer), buffer.durable_id) == (0, 11)
        assert buffer.add_trajectories([make(12)]) == [12]
        check_all(buffer, [12])
    with opened(tmp_path) as buffer:
        check_all(buffer, [12])
        buffer.clear()
    with opened(tmp_path) as buffer:
        check_all(buffer, [])
        assert buffer.add_trajectories([make(13)], durable=True) == [13]
    with reading(tmp_path) as buffer:
        check_all(buffer, [13])


def test_the_window_of_a_store_is_that_of_who_opens_it(tmp_path: Path) -> None:
    filled(tmp_path, range(20), sample_window_size=3)
    for size, ids in ((0, range(20)), (5, range(15, 20)), (1, [19]), (99, range(20))):
        with reading(tmp_path, sample_window_size=size) as buffer:
            check_all(buffer, ids)
    with reading(tmp_path, max_transitions=25) as buffer:
        assert len(buffer) > 1
        assert buffer.num_transitions <= 25
        check_all(buffer, range(20 - len(buffer), 20))


def test_results_do_not_depend_on_what_is_resident_or_where_rows_are(tmp_path: Path) -> None:
    drawn = []
    for number, (cache, kind) in enumerate([(0, Buffer), (3, Large), (50, Buffer)]):
        with opened(tmp_path / str(number), kind, cache_size=cache, sample_window_size=12) as buffer:
            for key in range(30):
                buffer.add_trajectories([make(key)], durable=key % 3 == 0)
            buffer.flush()
            drawn += [buffer.sample(64), buffer.sample(8, sequence_length=2), buffer.sample(20, replace=False)]
            buffer.clear_cache()
            drawn.append(buffer.sample(64))
    with TrajectoryReplayBuffer(sample_window_size=12, arrays="numpy") as memory:
        memory.add_trajectories([make(key) for key in range(30)])
        expected = [memory.sample(64), memory.sample(8, sequence_length=2), memory.sample(20, replace=False)]
        expected.append(memory.sample(64))
    for k, batch in enumerate(drawn):
        for name in ("trajectory_id", "step", "env", "rewards", "age"):
            assert batch[name].tolist() == expected[k % 4][name].tolist()
        assert batch["next_obs"]["image"].tobytes() == expected[k % 4]["next_obs"]["image"].tobytes()
        assert batch["curr_obs"]["task"] == expected[k % 4]["curr_obs"]["task"]


def test_a_cleared_window_stays_cleared_once_that_was_flushed(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as buffer:
        buffer.add_trajectories([make(key) for key in range(3)])
        buffer.clear()
        buffer.flush()
        killed(tmp_path / "a", tmp_path / "b")
    with opened(tmp_path / "b") as buffer:
        check_all(buffer, [])
        assert buffer.add_trajectories([make(3)]) == [3]


def test_a_reward_that_is_not_a_number_is_stored_as_every_other(tmp_path: Path) -> None:
    rewards = [np.nan, np.inf, -np.inf]
    with opened(tmp_path) as buffer:
        for key, reward in enumerate(rewards):
            trajectory = make(key)
            trajectory["rewards"][0, 0] = reward
            buffer.add_trajectories([trajectory], durable=True)
    with opened(tmp_path) as buffer:
        assert len(buffer) == 3
        assert np.isnan(buffer.get_stats()["reward_sum"])
        for key, reward in enumerate(rewards):
            found = np.asarray(buffer.trajectory(key).rewards)
            assert np.array_equal(found[0, 0], reward, equal_nan=True)


def test_a_number_that_could_not_be_read_back_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        for longest, fits in ((2**62, True), (2**62 + 1, False), (2**63, False)):
            trajectory = {**make(0), "max_episode_length": longest}
            if fits:
                buffer.add_trajectories([trajectory], durable=True)
            else:
                with pytest.raises(InvalidTrajectory, match="max_episode_length"):
                    buffer.add_trajectories([trajectory])
    with opened(tmp_path) as buffer:
        assert buffer.trajectory(0).max_episode_length == 2**62


def test_rows_that_are_resident_are_found_in_their_file_later(tmp_path: Path) -> None:
    """Previously the file of a sealed segment was unmapped while rows of it were still to be read from it."""
    apart(
        """
class Tiny(Buffer):
    _segment_bytes = 6_000
for cache in (0, 5):
    for window in (1, 4, 0):
        path = Path(sys.argv[1]) / f"{cache}-{window}"
        with opened(path, Tiny, cache_size=cache, sample_window_size=window, retain="window") as buffer:
            for key in range(16):
                buffer.add_trajectories([make(key)], durable=key % 3 > 0)
                check_batch(buffer.sample(100))
                buffer._check()
            buffer.clear_cache()
            check_batch(buffer.sample(300))
        shutil.rmtree(path)
""",
        tmp_path,
    )


def test_rows_that_become_durable_while_their_segment_is_left_can_be_drawn(tmp_path: Path) -> None:
    """Previously a segment was sealed, and could be unmapped, before what had just been written to it was counted."""
    apart(
        """
from forebay.trajectory.writer import Writer
path = Path(sys.argv[1])
with TrajectoryReplayBuffer(arrays="numpy") as memory:
    memory.add_trajectories([make(key) for key in range(3)])
    three = memory.get_stats()["live_bytes"]
class Three(Buffer):
    _segment_bytes = three
close = Writer._close_full
def close_and_add(self):
    close(self)
    if adds:  # committed, and not known to be
        buffer.add_trajectories([make(adds.pop())])
Writer._close_full = close_and_add
adds = []
buffer = opened(path, Three, cache_size=0, sample_window_size=4)
buffer.add_trajectories([make(0), make(1)], durable=True)
settle(buffer)
adds.append(5)
buffer.add_trajectories([make(2), make(3), make(4)], durable=True)
settle(buffer)
assert not adds
check_all(buffer, range(2, 6))
buffer.close()
""",
        tmp_path,
    )


def test_a_closed_buffer_ends_with_its_last_user(tmp_path: Path) -> None:
    """Previously its range of addresses, of which a process has few, waited for the collector of cycles."""
    gc.collect()
    gc.disable()
    try:
        for kind in (opened, reading):
            buffer = kind(tmp_path)
            if kind is opened:
                buffer.add_trajectories([make(key) for key in range(30)])
            buffer.sample(5)
            assert buffer._window is not None
            ended = weakref.ref(buffer._window.space)
            buffer.close()
            assert ended() is not None
            del buffer
            assert ended() is None
    finally:
        gc.enable()


def test_many_buffers_that_nobody_closed_do_not_use_up_the_addresses() -> None:
    for _ in range(60):
        buffer = TrajectoryReplayBuffer(arrays="numpy")
        buffer.add_trajectories([make(0)])
        buffer.itself = buffer  # type: ignore[attr-defined]
        assert buffer._window is not None
        assert buffer._window.space.steps.rows > 2**30, "as many as the first one has"


def test_memory_that_grows_stays_out_of_files_that_are_mapped(tmp_path: Path) -> None:
    """Previously it was doubled on into them, where few addresses could be had (ulimit -v)."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * PAGE_BYTES)
    region = Region(10 * 2**20)
    with path.open("rb") as file:
        region.map_file(5 * 2**20, file.fileno(), PAGE_BYTES)
    for until in (1, 2**22 + 1, 5 * 2**20):
        region.commit(until)
        region.bytes[until - 1] = 7
    assert (region.bytes[5 * 2**20 : 5 * 2**20 + PAGE_BYTES] == ord("x")).all()


def test_everything_at_once_from_threads(tmp_path: Path) -> None:
    """No error, no torn row, no crash: with segments and windows so small that everything happens all the time."""
    for segment_bytes, window, cache in ((1, 6, 0), (15_000, 20, 5)):
        apart(STRESS, tmp_path / "root", segment_bytes, window, cache, 7)


@pytest.mark.slow
def test_everything_at_once_from_threads_for_long(tmp_path: Path) -> None:
    for segment_bytes, window, cache in ((1, 6, 0), (15_000, 20, 5), (4_000, 0, 2), (10**6, 30, 100)):
        apart(STRESS, tmp_path / "root", segment_bytes, window, cache, 500)


STRESS = """
import itertools, random
from forebay.errors import InvalidInput
root, segment, window, cache, turns = Path(sys.argv[1]), *map(int, sys.argv[2:])
class Tiny(Buffer):
    _segment_bytes = segment
limits = {"max_transitions": 40} if not window else {"retain": "window"}
buffer = opened(root / "store", Tiny, sample_window_size=window, cache_size=cache, **limits)
keys, ended, failed, counts = itertools.count(), threading.Event(), [], {}
def add(chance):
    durable = chance.random() < 0.3
    buffer.add_trajectories([make(next(keys)) for _ in range(chance.choice((1, 1, 3)))], durable=durable)
def sample(chance):
    try:
        check_batch(buffer.sample(chance.choice((1, 32, 200))), by_id=False)
        buffer.sample(4, sequence_length=2)
    except InvalidInput as error:
        assert "none" in str(error), error
def read(chance):
    ids = ids_of(buffer)
    if ids:
        try:
            found = buffer.trajectory(chance.choice(ids))
        except InvalidInput as error:
            assert "not in the window" in str(error), error
        else:
            check_trajectory(found, int(found.versions[0, 0]))
    buffer.get_stats()
    buffer._check()
def change(chance):
    which = chance.random()
    if which < 0.4:
        buffer.save_checkpoint(root / str(chance.randrange(2)))
    elif which < 0.8:
        buffer.load_checkpoint(root / str(chance.randrange(2)), verify=chance.random() < 0.5)
    elif which < 0.9:
        buffer.clear_cache()
    else:
        buffer.clear()
def forever(work, seed):
    chance = random.Random(seed)
    try:
        while not ended.is_set():
            work(chance)
            counts[work] = counts.get(work, 0) + 1
    except BaseException:
        ended.set()
        raise
threading.excepthook = lambda found: failed.append(found.exc_value)
add(random.Random(0))
for name in "01":
    buffer.save_checkpoint(root / name)
works = (add, add, sample, sample, read, change)
threads = [threading.Thread(target=forever, args=(work, seed)) for seed, work in enumerate(works)]
for thread in threads:
    thread.start()
while not ended.wait(0.01) and min(counts.get(work, 0) for work in works) < turns:
    pass
ended.set()
for thread in threads:
    thread.join()
if failed:
    raise failed[0]
buffer._check()
buffer.close()
shutil.rmtree(root)
"""


# --- torn ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", ["first", "second"])
def test_g07_trajectories_survive_an_unclean_stop(tmp_path: Path, session: str) -> None:
    if session == "second":
        filled(tmp_path / "a", range(5))
    first = 0 if session == "first" else 5
    with opened(tmp_path / "a") as buffer:
        for key in range(first, 40):
            buffer.add_trajectories([make(key)])
        buffer.flush()
        killed(tmp_path / "a", tmp_path / "b")
        with pytest.raises(StorageInUse):
            opened(tmp_path / "a")
    with reading(tmp_path / "b") as buffer:
        check_all(buffer, range(40))
    with opened(tmp_path / "b") as buffer:
        check_all(buffer, range(40))
        assert buffer.add_trajectories([make(40)], durable=True) == [40]
        check_all(buffer, range(41))
    with opened(tmp_path / "b") as buffer:
        check_all(buffer, range(41))


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.slow)])
def test_g07_a_torn_tail_costs_the_torn_trajectories_only(tmp_path: Path, stride: int) -> None:
    """Every length of every column file, over its last 4 KB; in the quick run every 29th and those at an end."""
    with opened(tmp_path / "a", Large) as buffer:
        for key in range(19):
            buffer.add_trajectories([make(key)])
        buffer.flush()
        directory = killed(tmp_path / "a", tmp_path / "b")
    store = Store(directory, read_only=True)
    assert store.layout is not None
    space = Space(store.layout)
    everything, segments = store.load(space)
    rows = everything.rows
    assert len(rows) == 19
    (segment,) = segments.values()
    strips = (*store.layout.steps, *store.layout.observations)
    left = []
    for k, (name, strip) in enumerate(zip(file_names(segment.name, store.layout), strips, strict=True)):
        path = directory / name
        data = path.read_bytes()
        if k < len(store.layout.steps):
            ends = (rows["first_step"] + rows["steps"] * rows["envs"]) * strip.row_bytes
        else:
            ends = (rows["first_observation"] + rows["observations"]) * strip.row_bytes
        assert ends.max() == len(data)
        edges, torn = set(ends.tolist()), set()
        for size in range(len(data) - 1, max(len(data) - 4096, 0) - 1, -1):
            if size % stride and not {size, size + 1} & edges:
                continue
            os.truncate(path, size)
            whole = np.flatnonzero(ends <= size).tolist()
            found, _ = store.load(space)
            assert found.rows["id"].tolist() == whole, f"{name} cut off after {size} bytes"
            torn.add(19 - len(whole))
            if size % 397 < stride or size == len(data) - 1:
                with reading(tmp_path / "b") as buffer:
                    check_all(buffer, whole)
                    assert buffer.get_stats()["left_out_damaged"] == 19 - len(whole)
        assert len(torn) >= 3, "the last 4 KB hold several trajectories"
        left.append(path.stat().st_size)
        path.write_bytes(data)
    store.close(clean=False)
    assert len(left) == 3
    # Who writes goes on behind what is whole.
    for number, (path, size) in enumerate(
        (path, path.stat().st_size - cut) for path in column_files(directory) for cut in (1, 700, 2500)
    ):
        target = killed(tmp_path / "b", tmp_path / f"c{number}")
        os.truncate(target / path.name, size)
        with opened(tmp_path / f"c{number}", Large) as buffer:
            whole = ids_of(buffer)
            assert len(whole) < 19
            assert buffer.add_trajectories([make(19), make(20)], durable=True) == [19, 20]
            check_all(buffer, [*whole, 19, 20])
        with opened(tmp_path / f"c{number}", Large) as buffer:
            check_all(buffer, [*whole, 19, 20])
            assert buffer.get_stats()["left_out_damaged"] == 0, "what is torn was forgotten"


@pytest.mark.parametrize("session", ["first", "second"])
@pytest.mark.usefixtures("_quiet")
def test_g07_flipped_bytes_after_an_unclean_stop_cost_no_other_trajectories(tmp_path: Path, session: str) -> None:
    """Previously nothing was checked if the process that made the store was killed."""
    if session == "second":
        filled(tmp_path / "a", range(3), Large)
    with opened(tmp_path / "a", Large) as buffer:
        buffer.add_trajectories([make(key) for key in range(0 if session == "first" else 3, 20)], durable=True)
        directory = killed(tmp_path / "a", tmp_path / "b")
    store = Store(directory, read_only=True)
    assert store.layout is not None
    space = Space(store.layout)
    everything, segments = store.load(space)
    (segment,) = segments.values()
    strips = (*store.layout.steps, *store.layout.observations)
    chance = np.random.default_rng(0)
    for k, (name, strip) in enumerate(zip(file_names(segment.name, store.layout), strips, strict=True)):
        data = (directory / name).read_bytes()
        for row in everything.rows:
            if k < len(store.layout.steps):
                first, rows = int(row["first_step"]), int(row["steps"] * row["envs"])
            else:
                first, rows = int(row["first_observation"]), int(row["observations"])
            at = int(chance.integers(first * strip.row_bytes, (first + rows) * strip.row_bytes))
            altered = bytearray(data)
            altered[at] ^= 1 << int(chance.integers(8))
            (directory / name).write_bytes(altered)
            found, _ = store.load(space)
            assert found.rows["id"].tolist() == [key for key in range(20) if key != row["id"]]
        (directory / name).write_bytes(data)
    store.close(clean=False)
    path = column_files(directory)[0]
    altered = bytearray(path.read_bytes())
    altered[1] ^= 1
    path.write_bytes(altered)
    with opened(tmp_path / "b", Large) as buffer:
        check_all(buffer, range(1, 20))
        assert buffer.add_trajectories([make(20)]) == [20]
    with opened(tmp_path / "b", Large) as buffer:
        check_all(buffer, range(1, 21))


@pytest.mark.usefixtures("_quiet")
def test_g07_a_lost_or_cut_off_segment_costs_its_trajectories_only(tmp_path: Path) -> None:
    directory = filled(tmp_path, range(60))
    with sqlite3.connect(directory / "catalogue.db") as catalogue:
        placed = catalogue.execute("SELECT id, name, sealed FROM trajectories JOIN segments ON segment = number")
        by_segment: dict[tuple[str, int], list[int]] = {}
        for number, name, sealed in placed:
            by_segment.setdefault((name, sealed), []).append(number)
    catalogue.close()
    assert len(by_segment) > 3

    def cut(path: Path) -> None:
        os.truncate(path, 100)

    def link(path: Path) -> None:
        path.rename(path.with_suffix(".moved"))
        path.symlink_to(path.with_suffix(".moved"))

    def directory_instead(path: Path) -> None:
        path.unlink()
        path.mkdir()

    def pipe(path: Path) -> None:
        path.unlink()
        os.mkfifo(path)

    for (name, _), ids in by_segment.items():
        harms: list[Callable[[Path], None]] = [Path.unlink, cut, link, directory_instead, pipe]
        for number, harm in enumerate(harms):
            path = directory / f"seg-{name}-{number % 3}.col"
            data = path.read_bytes()
            harm(path)
            with reading(tmp_path) as buffer:
                left = ids_of(buffer)
                if harm is cut:  # the first ones of it may be whole
                    assert set(range(60)) - set(ids) <= set(left) < set(range(60))
                else:
                    assert left == [k for k in range(60) if k not in ids]
                check_all(buffer, left)
                assert buffer.get_stats()["left_out_damaged"] == 60 - len(left)
            if path.is_dir():
                path.rmdir()
            path.unlink(missing_ok=True)
            path.write_bytes(data)
    with reading(tmp_path) as buffer:
        check_all(buffer, range(60))


@pytest.mark.parametrize("retain", ["all", "window"])
@pytest.mark.parametrize("sealed", [1, 0], ids=["sealed", "open"])
@pytest.mark.usefixtures("_quiet")
def test_g07_trajectories_of_a_file_that_comes_back_are_back(tmp_path: Path, sealed: int, retain: str) -> None:
    """Previously a store whose open segment had lost a file could not be opened for writing any more."""
    directory = filled(tmp_path, range(60))
    with sqlite3.connect(directory / "catalogue.db") as catalogue:
        query = "SELECT number, name FROM segments WHERE sealed = ? ORDER BY number DESC"
        number, name = catalogue.execute(query, (sealed,)).fetchone()
        ids = [row[0] for row in catalogue.execute("SELECT id FROM trajectories WHERE segment = ?", (number,))]
    catalogue.close()
    lost = directory / f"seg-{name}-1.col"
    lost.rename(tmp_path / "elsewhere")
    left = [key for key in range(60) if key not in ids]
    with opened(tmp_path, retain=retain) as buffer:
        check_all(buffer, left)
        assert buffer.add_trajectories([make(60)], durable=True) == [60]
        settle(buffer)
        buffer.save_checkpoint(tmp_path / "checkpoint")
    with opened(tmp_path, retain=retain) as buffer:
        check_all(buffer, [*left, 60])
    (tmp_path / "elsewhere").rename(lost)
    with opened(tmp_path, retain=retain) as buffer:
        check_all(buffer, range(61))
    with TrajectoryReplayBuffer(sample_window_size=0, arrays="numpy") as buffer:
        buffer.load_checkpoint(tmp_path / "checkpoint")
        assert len(buffer) == len(left) + 1


@pytest.mark.usefixtures("_quiet")
def test_g07_a_torn_write_ahead_log_costs_the_last_trajectories_only(tmp_path: Path) -> None:
    with opened(tmp_path / "a", Large) as buffer:
        buffer.add_trajectories([make(0)], durable=True)
        settled = (tmp_path / "a" / "rank_0" / "catalogue.db-wal").stat().st_size
        for key in range(1, 8):
            buffer.add_trajectories([make(key)], durable=True)
        directory = killed(tmp_path / "a", tmp_path / "b")
    log = (directory / "catalogue.db-wal").read_bytes()
    assert len(log) > settled
    before = 0
    for number, size in enumerate([*range(settled, len(log), 2_731), len(log)]):
        target = killed(tmp_path / "b", tmp_path / f"c{number}")
        os.truncate(target / "catalogue.db-wal", size)
        with opened(tmp_path / f"c{number}", Large) as buffer:
            found = len(buffer)
            assert found >= max(before, 1)
            check_all(buffer, range(found))
            assert buffer.add_trajectories([make(found)], durable=True) == [found]
            check_all(buffer, range(found + 1))
        with opened(tmp_path / f"c{number}", Large) as buffer:
            check_all(buffer, range(found + 1))
        before = found
    assert before == 8
    # A flipped byte ends the log where it is.
    for at in range(settled + 100, len(log), 9_973):
        target = killed(tmp_path / "b", tmp_path / f"d{at}")
        altered = bytearray(log)
        altered[at] ^= 4
        (target / "catalogue.db-wal").write_bytes(altered)
        with opened(tmp_path / f"d{at}", Large) as buffer:
            check_all(buffer, range(len(buffer)))
            assert 1 <= len(buffer) < 8


@pytest.mark.parametrize("how", ["missing", "empty", "not yet anything in it"])
def test_g07_a_lost_catalogue_is_said_and_its_trajectories_are_left_alone(tmp_path: Path, how: str) -> None:
    """Previously a new catalogue was made, and all segments were removed as leftovers."""
    directory = filled(tmp_path / "a", range(20))
    before = column_files(directory)
    data = (directory / "catalogue.db").read_bytes()
    for path in directory.glob("catalogue.db*"):
        path.unlink()
    if how == "empty":
        (directory / "catalogue.db").touch()
    elif how != "missing":
        sqlite3.connect(directory / "catalogue.db").execute("PRAGMA journal_mode = WAL").connection.close()
    for _ in range(2):
        with pytest.raises(DamagedData, match="segments are there"):
            opened(tmp_path / "a")
        with pytest.raises(StorageError):
            reading(tmp_path / "a")
    assert column_files(directory) == before
    for path in directory.glob("catalogue.db*"):
        path.unlink()
    (directory / "catalogue.db").write_bytes(data)
    with opened(tmp_path / "a") as buffer:
        check_all(buffer, range(20))


def test_leftovers_of_a_stop_are_swept_and_other_files_are_left_alone(tmp_path: Path) -> None:
    directory = filled(tmp_path, range(20))
    others = ["notes.txt", "seg-1.col", "seg-0123456789abcdef-0.col.bak", "seg-0123456789ABCDEF-0.col"]
    leftovers = ["seg-0123456789abcdef-0.col", "seg-0123456789abcdef-2.col"]
    before = column_files(directory)
    for name in [*others, *leftovers]:
        (directory / name).write_text(name)
    with reading(tmp_path) as buffer:
        check_all(buffer, range(20))
    assert (directory / leftovers[0]).exists(), "who reads changes nothing"
    with opened(tmp_path) as buffer:
        check_all(buffer, range(20))
    names = {path.name for path in directory.iterdir()}
    assert names >= {*others, *(path.name for path in before)}
    assert names.isdisjoint(leftovers)


def test_g07_rows_are_on_disk_before_their_trajectories_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power loss takes is what was not synced: at every commit that is nothing which it lists."""
    unsynced: set[int] = set()  # descriptors
    unnamed: set[str] = set()  # files whose names are not on disk yet
    directories: set[int] = set()
    commits = []

    class Watched(FileOps):
        def create(self, path: Path) -> int:
            unnamed.add(path.name)
            return super().create(path)

        def write(self, descriptor: int, parts: Sequence[Any]) -> None:
            unsynced.add(descriptor)
            super().write(descriptor, parts)

        def open_directory(self, path: Path) -> int:
            descriptor = super().open_directory(path)
            directories.add(descriptor)
            return descriptor

        def sync(self, descriptor: int) -> None:
            super().sync(descriptor)
            unsynced.discard(descriptor)
            if descriptor in directories:
                unnamed.clear()

        def close(self, descriptor: int) -> None:
            assert descriptor not in unsynced
            directories.discard(descriptor)
            super().close(descriptor)

    class Synced(Buffer):
        _segment_bytes = 8_000
        _files = Watched()

    add = Catalogue.add

    def listed(self: Catalogue, listing: Any) -> None:
        assert not unsynced
        assert not unnamed
        assert self._db.execute("PRAGMA synchronous").fetchone() == (2,)
        assert self._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        commits.append(len(listing))
        add(self, listing)

    monkeypatch.setattr(Catalogue, "add", listed)
    for first in (0, 20):
        with opened(tmp_path, Synced) as buffer:
            for key in range(first, first + 20):
                buffer.add_trajectories([make(key)], durable=key % 3 == 0)
    assert sum(commits) == 40
    with opened(tmp_path) as buffer:
        check_all(buffer, range(40))


# --- one writes, many read ----------------------------------------------------------------------------


def test_a_second_writer_of_trajectories_is_told_who_has_them(tmp_path: Path) -> None:
    code = "buffer = opened(Path(sys.argv[1]))\nbuffer.add_trajectories([make(0)], durable=True)\n"
    code += "print('open', flush=True)\ninput()"
    with started("-c", f"{PROGRAM}\n{code}", tmp_path) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        with pytest.raises(StorageInUse) as refused:
            opened(tmp_path)
        assert f"process {child.pid} on {socket.gethostname()}" in str(refused.value)
        with reading(tmp_path) as buffer:
            check_all(buffer, [0])
    with opened(tmp_path) as buffer:
        check_all(buffer, [0])
        with pytest.raises(StorageInUse, match=f"process {os.getpid()} on"):
            opened(tmp_path)
        with opened(tmp_path, rank=1) as other:
            assert other.add_trajectories([make(0)]) == [0]
        check_all(buffer, [0])


@pytest.mark.parametrize("retain", ["all", "window"])
def test_g02_trajectories_are_whole_for_who_opens_a_store_that_is_written(
    tmp_path: Path, retain: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Previously a reader could find texts, segments and trajectories of different moments, and call that damage."""

    class Small(Buffer):
        _segment_bytes = 15_000

    failed: list[BaseException] = []
    ended = threading.Event()
    writer = opened(tmp_path, Small, sample_window_size=8, retain=retain)

    def write() -> None:
        try:
            for key in range(250):
                writer.add_trajectories([make(key)], durable=key % 4 == 0)
        except BaseException as error:
            failed.append(error)
        ended.set()

    writer.add_trajectories([make(0)], durable=True)
    writer.clear()
    writer.flush()
    thread = threading.Thread(target=write)
    opens, last = 0, -1
    with pytest.raises(AssertionError, match="rewards"):
        check_trajectory(make_object(1), 2)  # the check does check
    thread.start()
    try:
        while not ended.is_set():
            with reading(tmp_path, sample_window_size=8) as buffer:
                found = ids_of(buffer)
                assert buffer.get_stats()["left_out_damaged"] == 0
                if found:
                    assert found == list(range(found[0], found[-1] + 1))
                    assert found[-1] >= last
                    last = found[-1]
                    keys = buffer.sample(128)
                    check_batch({**keys, "trajectory_id": keys["trajectory_id"] - 1})
            opens += 1
    finally:
        thread.join()
        writer.close()
    assert not failed
    assert opens > 20
    assert not caplog.records, "nothing was called damaged"


@pytest.mark.parametrize("stop", ["clean", "unclean"])
def test_a_store_in_a_directory_that_may_not_be_written_can_be_read(stop: str) -> None:
    """Previously SQLite wanted to write beside a catalogue that nobody had open."""
    root = Path(tempfile.mkdtemp(prefix="trajectories-"))  # pytest's own may not be entered by others
    root.chmod(0o755)
    if stop == "clean":
        directory = filled(root / "store", range(20))
    else:
        with opened(root / "other") as buffer:
            buffer.add_trajectories([make(key) for key in range(20)], durable=True)
            directory = killed(root / "other", root / "store")
    directory.chmod(0o555)
    found = apart(
        """
if not os.getuid():
    os.setgid(65534)
    os.setuid(65534)
with reading(Path(sys.argv[1])) as buffer:
    check_all(buffer, range(20))
with TrajectoryReplayBuffer(arrays="numpy") as buffer:
    buffer.load_checkpoint(sys.argv[1])
    check_batch(buffer.sample(100))
try:
    opened(Path(sys.argv[1]))
except StorageError as error:
    print(type(error).__name__)
""",
        root / "store",
    )
    assert found.split() == ["StorageError"]
    directory.chmod(0o755)
    shutil.rmtree(root)


def make_object(key: int) -> Any:
    with TrajectoryReplayBuffer(arrays="numpy") as buffer:
        buffer.add_trajectories([make(key)])
        return buffer.trajectory(0)


def test_a_buffer_that_came_through_a_fork_is_refused(tmp_path: Path) -> None:
    found = apart(
        """
buffer = opened(Path(sys.argv[1]))
buffer.add_trajectories([make(0), make(1)])
pid = os.fork()
if not pid:
    uses = {
        "add": lambda: buffer.add_trajectories([make(2)]), "sample": lambda: buffer.sample(1), "flush": buffer.flush,
        "len": lambda: len(buffer), "stats": buffer.get_stats, "clear": buffer.clear, "cache": buffer.clear_cache,
        "save": lambda: buffer.save_checkpoint(sys.argv[1]), "load": lambda: buffer.load_checkpoint(sys.argv[1]),
        "wait": buffer.wait_ready, "trajectory": lambda: buffer.trajectory(0), "id": lambda: buffer.durable_id,
    }
    for name, use in uses.items():
        try:
            use()
        except BufferClosed as error:
            assert "fork" in str(error)
        else:
            print("allowed:", name, flush=True)
    buffer.close()
    try:
        opened(Path(sys.argv[1]))
    except StorageInUse:
        print("the parent has it", flush=True)
    with reading(Path(sys.argv[1])) as own:
        print(len(own) in (0, 1, 2), flush=True)
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
check_all(buffer, [0, 1])
buffer.add_trajectories([make(2)], durable=True)
buffer.close()
with opened(Path(sys.argv[1])) as buffer:
    check_all(buffer, [0, 1, 2])
""",
        tmp_path,
    )
    assert found.splitlines() == ["the parent has it", "True"]


# --- what is kept -------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment_bytes", [1, pytest.param(30_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "limits",
    [{"retain": "window", "sample_window_size": 10}, {"max_transitions": 60}, {"max_bytes": 60_000}],
    ids=["window", "transitions", "bytes"],
)
def test_disk_is_freed_by_whole_segments_also_while_readers_sample(
    tmp_path: Path, limits: dict[str, Any], segment_bytes: int
) -> None:
    class Small(Buffer):
        _segment_bytes = segment_bytes

    failed: list[BaseException] = []
    ended = threading.Event()
    buffer = opened(tmp_path, Small, cache_size=2, **limits)

    def read() -> None:
        while not ended.is_set():
            try:
                if len(buffer):
                    check_batch(buffer.sample(64))
            except BaseException as error:
                failed.append(error)
                return

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    biggest = 0
    for key in range(80):
        size = buffer.get_stats()["live_bytes"]
        buffer.add_trajectories([make(key)])
        biggest = max(biggest, int(buffer.get_stats()["live_bytes"] - size))
        if key % 5 == 0:
            settle(buffer)
            stats = buffer.get_stats()
            assert disk_bytes(tmp_path / "rank_0") <= stats["live_bytes"] + 2 * max(segment_bytes, biggest)
            assert disk_bytes(tmp_path / "rank_0") == stats["disk_bytes"]
    ended.set()
    for thread in threads:
        thread.join()
    assert not failed
    kept = ids_of(buffer)
    assert kept[-1] == 79
    assert len(kept) < 40
    check_all(buffer, kept)
    buffer.close()
    with sqlite3.connect(tmp_path / "rank_0" / "catalogue.db") as catalogue:
        (listed,) = catalogue.execute("SELECT count(*) FROM trajectories").fetchone()
        assert listed < 60, "what is gone is not listed either"
    catalogue.close()
    with opened(tmp_path, Small, **limits) as buffer:
        check_all(buffer, kept)
        assert buffer.add_trajectories([make(80)]) == [80]


def test_without_limits_everything_is_kept(tmp_path: Path) -> None:
    with opened(tmp_path, sample_window_size=2) as buffer:
        for key in range(50):
            buffer.add_trajectories([make(key)])
            buffer.flush()
        check_all(buffer, [48, 49])
        buffer.clear()
        buffer.add_trajectories([make(50)])
    with sqlite3.connect(tmp_path / "rank_0" / "catalogue.db") as catalogue:
        assert catalogue.execute("SELECT count(*) FROM trajectories").fetchone() == (51,)
    catalogue.close()


def test_a_reader_in_the_middle_of_a_batch_keeps_what_it_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that it saw leaves the window, and its files are removed, before it copies a row."""

    class Tiny(Buffer):
        _segment_bytes = 1

    drawn, go_on = threading.Event(), threading.Event()
    fill = Gatherer.fill

    def slow_fill(self: Gatherer, *arguments: Any) -> None:
        if threading.current_thread() is reader:
            drawn.set()
            assert go_on.wait(HANG_S)
        fill(self, *arguments)

    monkeypatch.setattr(Gatherer, "fill", slow_fill)
    batches: list[dict[str, Any]] = []
    with opened(tmp_path, Tiny, sample_window_size=4, retain="window", cache_size=0) as buffer:
        buffer.add_trajectories([make(key) for key in range(4)], durable=True)
        settle(buffer)
        old = column_files(tmp_path / "rank_0")
        reader = threading.Thread(target=lambda: batches.append(buffer.sample(500)))
        reader.start()
        assert drawn.wait(HANG_S)
        for key in range(4, 40):
            buffer.add_trajectories([make(key)])
        settle(buffer)
        assert not any(path.exists() for path in old)
        go_on.set()
        reader.join()
        check_batch(batches[0])
        assert set(batches[0]["trajectory_id"].tolist()) == set(range(4))
        check_all(buffer, range(36, 40))
        assert buffer._window is not None
        assert not buffer._window.pins.waiting


# --- disks that fail ----------------------------------------------------------------------------------


def _adds(buffer: Buffer, first: int, acknowledged: list[int], added: list[int]) -> None:
    for key in range(first, first + 8):
        assert buffer.add_trajectories([make(key)]) == [key]
        added.append(key)
        if key % 2:
            buffer.flush()
            acknowledged.append(key)


@pytest.mark.parametrize(("code", "for_good"), [(errno.ENOSPC, False), (errno.EIO, True)], ids=["once", "for good"])
@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("_quiet", "_quick")
def test_g07_whichever_file_operation_fails_no_trajectory_is_lost(
    tmp_path: Path, stride: int, code: int, for_good: bool
) -> None:
    """What was acknowledged is on disk. What was not is written by the next flush, or can be saved elsewhere."""
    filled(tmp_path / "template", range(5))
    n, outcomes = 0, set()
    while True:
        path = tmp_path / str(n)
        shutil.copytree(tmp_path / "template", path)
        files = Failing(n, code, for_good=for_good)

        class Faulty(Buffer):
            _segment_bytes = 20_000
            _files = files

        acknowledged, added = [4], list(range(5))
        buffer = None
        error: StorageError | None = None
        written = 5
        try:
            buffer = opened(path, Faulty)
            _adds(buffer, 5, acknowledged, added)
            buffer.flush()
        except StorageError as raised:
            error = raised
            assert os.strerror(code) in str(error), "the error says what"
        if buffer is not None:
            outcomes.add(error is not None)
            count = buffer._next_id
            assert set(added) <= set(range(count))
            check_all(buffer, range(count))
            acknowledged.append(buffer.durable_id)
            if error is not None:
                with pytest.raises(StorageError, match="cannot be written"):
                    buffer.add_trajectories([make(99)])
            if error is not None and for_good:
                buffer._files = None  # another disk
                for verb in (buffer.flush, buffer.close):
                    with pytest.raises(StorageError, match="cannot be written"):
                        verb()
                    buffer.save_checkpoint(tmp_path / "rescued")
                    with Buffer(sample_window_size=0, arrays="numpy") as rescued:
                        rescued.load_checkpoint(tmp_path / "rescued")
                        check_all(rescued, range(count))
                    shutil.rmtree(tmp_path / "rescued")
            else:
                if error is not None:
                    buffer.flush()
                written = count
                with suppress(StorageError):  # the last operations may be those that fail
                    buffer.close()
        assert files.open_descriptors == set(), f"operation {n} ({files.calls[n : n + 1]}) leaks a file"
        with opened(path) as again:
            found = ids_of(again)
            assert max(acknowledged) <= found[-1] <= max(added) + 1
            assert len(found) >= written
            check_all(again, range(len(found)))
            assert again.add_trajectories([make(len(found))]) == [len(found)]
        shutil.rmtree(path)
        if len(files.calls) <= n:
            break
        n += stride
    assert outcomes == {True, False}
    assert n > 60


def test_g07_a_full_disk_under_the_catalogue_costs_no_acknowledged_trajectory(tmp_path: Path) -> None:
    """Files of this process may not grow beyond a limit: also SQLite's cannot be written then."""
    found = apart(
        """
import resource
for number, limit in enumerate((80_000, 100_000, 150_000, 250_000, 400_000)):
    path = Path(sys.argv[1]) / str(number)
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == 0
        continue
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    buffer = opened(path)
    added = -1
    try:
        for key in range(10_000):
            buffer.add_trajectories([make(key)], durable=True)
            added = key
    except StorageError:
        pass
    assert added >= 0
    check_batch(buffer.sample(100))
    assert len(buffer) >= added + 1
    print(number, added, buffer.durable_id, flush=True)
    try:
        buffer.close()
    except StorageError:
        os._exit(0)
    os._exit(1)
""",
        tmp_path,
    )
    lines = [list(map(int, line.split())) for line in found.splitlines()]
    assert len(lines) == 5
    for number, added, durable in lines:
        assert added <= durable
        with opened(tmp_path / str(number)) as buffer:
            last = ids_of(buffer)[-1]
            assert last >= durable
            check_all(buffer, range(last + 1))
            assert buffer.add_trajectories([make(last + 1)], durable=True) == [last + 1]


def test_a_store_that_cannot_be_closed_cleanly_is_closed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = opened(tmp_path)
    buffer.add_trajectories([make(0)], durable=True)
    with monkeypatch.context() as patch:

        def fails(self: Catalogue, **values: Any) -> None:
            raise StorageError("the disk is full")

        patch.setattr(Catalogue, "set_meta", fails)
        with pytest.raises(StorageError, match="disk is full"):
            buffer.close()
    with opened(tmp_path) as buffer:
        check_all(buffer, [0])


# --- waiting for the writer ---------------------------------------------------------------------------


class Gate(FileOps):
    """A disk that waits until it may write."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.fails = False
        self.asked = threading.Event()
        self.peaks: list[int] = []
        self.pending: Callable[[], int] = lambda: 0

    def write(self, descriptor: int, parts: Sequence[Any]) -> None:
        self.asked.set()
        self.peaks.append(self.pending())
        assert self.may_write.wait(HANG_S)
        if self.fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(descriptor, parts)


@contextmanager
def gated(path: Path, max_pending_bytes: int) -> Iterator[tuple[Buffer, Gate]]:
    gate = Gate()

    class Gated(Buffer):
        _files = gate

    buffer = opened(path, Gated, max_pending_bytes=max_pending_bytes)
    gate.pending = lambda: int(buffer._writer.pending_bytes) if buffer._writer is not None else 0
    try:
        yield buffer, gate
    finally:
        gate.may_write.set()
        try:
            buffer.close()
        except StorageError:
            assert gate.fails


def _blocked(call: Callable[[], Any], outcome: list[Any]) -> threading.Thread:
    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive(), outcome
    return thread


def test_add_waits_for_the_disk_once_max_pending_bytes_wait(tmp_path: Path) -> None:
    with gated(tmp_path, 4_000) as (buffer, gate):
        assert buffer.add_trajectories([make(0)]) == [0]
        outcome: list[Any] = []
        thread = _blocked(lambda: buffer.add_trajectories([make(key) for key in range(1, 4)]), outcome)
        check_batch(buffer.sample(50))
        assert len(buffer) == 1, "all or none"
        gate.may_write.set()
        thread.join(HANG_S)
        assert outcome == [[1, 2, 3]]
        # More than there is ever room for goes alone.
        assert len(buffer.add_trajectories([make(key) for key in range(4, 40)])) == 36
        buffer.flush()
        assert buffer.durable_id == 39
        check_all(buffer, range(40))


def test_no_more_than_max_pending_bytes_wait_however_many_threads_add(tmp_path: Path) -> None:
    """Previously what several threads were just copying was not counted."""
    with gated(tmp_path, 30_000) as (buffer, gate):
        gate.may_write.set()
        failed: list[BaseException] = []

        def add() -> None:
            try:
                for _ in range(15):
                    buffer.add_trajectories([make(3)])
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=add) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        buffer.flush()
        assert gate.pending() == 0
        assert 10_000 < max(gate.peaks) <= 30_000
        assert len(buffer) == 120


def test_an_error_of_the_disk_reaches_an_add_that_waits(tmp_path: Path) -> None:
    with gated(tmp_path, 2_000) as (buffer, gate):
        buffer.add_trajectories([make(0)])
        outcome: list[Any] = []
        threads = [_blocked(lambda: buffer.add_trajectories([make(1)]), outcome), _blocked(buffer.flush, outcome)]
        gate.fails = True
        gate.may_write.set()
        for thread in threads:
            thread.join(HANG_S)
        assert [type(error) for error in outcome] == [StorageError] * 2
        assert all(os.strerror(errno.ENOSPC) in str(error) for error in outcome)
        check_all(buffer, [0])


def test_closing_ends_an_add_that_waits_and_writes_what_was_added(tmp_path: Path) -> None:
    with gated(tmp_path, 2_000) as (buffer, gate):
        buffer.add_trajectories([make(0)])
        outcome: list[Any] = []
        waiting = _blocked(lambda: buffer.add_trajectories([make(1)]), outcome)
        closing = _blocked(buffer.close, [])
        waiting.join(HANG_S)
        assert [type(error) for error in outcome] == [BufferClosed]
        gate.may_write.set()
        closing.join(HANG_S)
    with opened(tmp_path) as buffer:
        check_all(buffer, [0])
