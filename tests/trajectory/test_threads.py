"""Many threads on one buffer: no torn row, no error but those that are right, nobody waits for ever.

Every row that is drawn says in each of its fields which cell of which trajectory it is of; a row whose fields disagree
was torn. Waits of threads have a time limit that only matters if something is wrong.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.checkpoint.files import FileOps
from forebay.errors import BufferClosed, InvalidInput, InvalidTrajectory, StorageError
from forebay.trajectory import MixedReplay, TrajectoryReplayBuffer
from tests.processes import HANG_S
from tests.trajectory.tagged import Made, assert_rows, flat, made_at_random, make, plain


class TinySegments(TrajectoryReplayBuffer):
    _segment_bytes = 60_000

    def __init__(self, **options: Any) -> None:
        super().__init__(max_pending_bytes=200_000, **options)  # so that nobody waits long for the writer


class Known:
    """Trajectories that are added again and again, as tables in which a drawn row is looked up."""

    def __init__(self, count: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.made = [made_at_random(k, generator, most_steps=8, text=False) for k in range(count)]
        cells = [(k, t, b) for k, one in enumerate(self.made) for t in range(one.steps) for b in range(one.envs)]
        self.number, self.step, self.env = (np.array(column) for column in zip(*cells, strict=True))
        self.valid = np.array([(t, b) in self.made[k].valid for k, t, b in cells])
        self.goes_on = np.array([(t, b) in self.made[k].goes_on for k, t, b in cells])
        self.want = {
            name: np.concatenate([one.want[name].reshape(-1, *one.want[name].shape[2:]) for one in self.made])
            for name in self.made[0].want
        }
        self._cell_of = {int(version): k for k, version in enumerate(self.want["versions"].tolist())}
        assert len(self._cell_of) == len(cells), "the versions do not tell cells apart"

    def check(self, batch: dict[str, Any], length: int = 1) -> list[tuple[int, int]]:
        """Raise if a row is torn; otherwise (id, which trajectory) of each row."""
        named = {name: plain(leaf) for name, leaf in flat(batch).items()}
        lead = named["step"].ndim
        named = {name: leaf.reshape(-1, *leaf.shape[lead:]) for name, leaf in named.items()}
        ids, steps, envs, _ = (named.pop(name) for name in ("trajectory_id", "step", "env", "age"))
        rows = np.array([self._cell_of[version] for version in named["versions"].tolist()])
        assert np.array_equal(self.step[rows], steps), "a row of another step"
        assert np.array_equal(self.env[rows], envs), "a row of another env"
        assert self.valid[rows].all(), "a row that must not be drawn"
        for name, leaf in named.items():
            assert leaf.tobytes() == self.want[name][rows].tobytes(), f"torn: {name}"
        if length > 1:
            pairs = rows.reshape(-1, length)
            assert self.goes_on[pairs[:, :-1]].all(), "a sequence over a break"
            assert (self.step[pairs[:, 1:]] == self.step[pairs[:, :-1]] + 1).all()
            assert (np.diff(ids.reshape(-1, length)) == 0).all(), "a sequence over two trajectories"
        return list(zip(ids.tolist(), self.number[rows].tolist(), strict=True))


class Team:
    """Threads that do something again and again until they are told to stop; what they raise is kept."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.errors: list[BaseException] = []
        self.turns: dict[str, int] = {}
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], object], *, every_s: float = 0.0) -> None:
        def run() -> None:
            try:
                while not self.stop.is_set():
                    work()
                    self.turns[name] = self.turns.get(name, 0) + 1
                    if every_s:
                        self.stop.wait(every_s)
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def until(self, turns: int, *names: str) -> None:
        """Until each of these had so many turns, or somebody failed."""
        while not self.errors and min(self.turns.get(name, 0) for name in names) < turns:
            self.stop.wait(0.001)

    def end(self) -> None:
        self.stop.set()
        self.join()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(HANG_S)
            assert not thread.is_alive(), f"{thread.name} never ends"


class Stress:
    """Adding, sampling, sequences, clearing, saving and loading at once."""

    def __init__(self, buffer: TrajectoryReplayBuffer, known: Known, directory: Path) -> None:
        self.buffer, self.known, self.directory = buffer, known, directory
        self.number_of: dict[int, int] = {}
        self.seen: set[tuple[int, int]] = set()
        self._turn = itertools.count()
        self._paths = itertools.count()

    def add(self) -> None:
        turn = next(self._turn)
        which = [(turn * 7 + k * 3) % len(self.known.made) for k in range(1 + turn % 3)]
        ids = self.buffer.add_trajectories([self.known.made[k].given for k in which])
        self.number_of.update(zip(ids, which, strict=True))

    def sample(self, length: int | None = None) -> None:
        try:
            batch = self.buffer.sample(64, sequence_length=length)
        except InvalidInput as error:
            if "there are none" in str(error) or "the buffer is empty" in str(error):  # just after a clear
                return
            raise
        self.seen.update(self.known.check(batch, length or 1))

    def look(self) -> None:
        stats = self.buffer.get_stats()
        assert 0 <= stats["trajectories"] <= 20
        try:
            back = self.buffer.trajectory(int(stats["next_id"]) - 3)
        except InvalidInput:
            return
        rows = [self.known._cell_of[int(version)] for version in plain(back.versions).reshape(-1)]
        assert len(set(self.known.number[rows].tolist())) == 1, "a trajectory of pieces"
        assert plain(back.actions).reshape(len(rows), -1).tobytes() == self.known.want["actions"][rows].tobytes()

    def save(self) -> None:
        path = self.directory / f"checkpoint-{next(self._paths) % 2}"
        self.buffer.save_checkpoint(path)
        with TrajectoryReplayBuffer(sample_window_size=0) as other:
            other.load_checkpoint(path)
            if other.num_transitions:
                self.seen.update(self.known.check(other.sample(64)))

    def load(self) -> None:
        self.buffer.save_checkpoint(self.directory / "own")
        self.buffer.load_checkpoint(self.directory / "own")

    def start(self, team: Team) -> None:
        for k in range(2):
            team.start(f"add {k}", self.add)
            team.start(f"sample {k}", self.sample)
        team.start("sequences", lambda: self.sample(2))
        team.start("look", self.look, every_s=0.002)
        team.start("save", self.save, every_s=0.05)
        team.start("clear", self.buffer.clear, every_s=0.3)
        team.start("clear_cache", self.buffer.clear_cache, every_s=0.02)
        team.start("load", self.load, every_s=0.25)

    def finish(self, team: Team) -> None:
        team.end()
        if team.errors:
            raise team.errors[0]
        self.buffer._check()
        assert sorted(self.number_of) == list(range(len(self.number_of)))
        assert {pair for pair in self.seen if self.number_of[pair[0]] != pair[1]} == set()


def everything_at_once(tmp_path: Path, *, stored: bool, turns: int) -> None:
    known = Known(40, seed=1)
    with TinySegments(
        sample_window_size=20, auto_save=stored, auto_save_path=tmp_path / "store", cache_size=3
    ) as buffer:
        stress, team = Stress(buffer, known, tmp_path), Team()
        stress.start(team)
        team.until(turns, "add 0", "sample 0", "sequences", "save", "clear", "load")
        stress.finish(team)


@pytest.mark.parametrize("stored", [False, True], ids=["memory", "directory"])
def test_everything_at_once(stored: bool, tmp_path: Path) -> None:
    everything_at_once(tmp_path, stored=stored, turns=4)


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True], ids=["memory", "directory"])
def test_everything_at_once_for_long(stored: bool, tmp_path: Path) -> None:
    everything_at_once(tmp_path, stored=stored, turns=200)


@pytest.mark.parametrize("stored", [False, True], ids=["memory", "directory"])
@pytest.mark.parametrize("after", [1, 10, pytest.param(40, marks=pytest.mark.slow)])
def test_closing_in_the_middle_is_the_only_error(stored: bool, after: int, tmp_path: Path) -> None:
    known = Known(10, seed=2)
    buffer = TinySegments(sample_window_size=20, auto_save=stored, auto_save_path=tmp_path / "store", cache_size=3)
    stress, team = Stress(buffer, known, tmp_path), Team()
    stress.start(team)
    team.start("wait", lambda: buffer.wait_ready(10**9))
    team.until(after, "add 0", "sample 0")
    buffer.close()
    team.join()
    assert {type(error) for error in team.errors} == {BufferClosed}
    assert len(team.errors) == 11
    if stored:  # and what is there is whole
        with TinySegments(sample_window_size=0, auto_save_path=tmp_path / "store", read_only=True) as again:
            assert again.get_stats()["left_out_damaged"] == 0
            if again.num_transitions:
                known.check(again.sample(500))


def test_a_fork_cannot_use_the_buffer() -> None:
    """Threads and locks do not come along; it says so instead of hanging."""
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([small()])
        child = os.fork()
        if not child:
            code = 1
            try:
                calls: list[Callable[[], object]] = [
                    lambda: buffer.sample(1),
                    lambda: buffer.add_trajectories([small()]),
                    lambda: len(buffer),
                    buffer.clear,
                    buffer.flush,
                ]
                for call in calls:
                    with pytest.raises(BufferClosed, match="after a fork"):
                        call()
                buffer.close()  # which is nothing here
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert buffer.sample(2)["step"].shape == (2,)


# --- the first one --------------------------------------------------------------------------------------


def together(count: int, work: Callable[[int], object]) -> list[Any]:
    """What each of so many threads gave or raised that began at the same time."""
    barrier = threading.Barrier(count)
    results: list[Any] = [None] * count

    def run(k: int) -> None:
        barrier.wait(HANG_S)
        try:
            results[k] = work(k)
        except BaseException as error:
            results[k] = error

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    return results


def test_the_first_trajectory_may_come_from_several_threads() -> None:
    for _ in range(10):
        made = {k: make(k, steps=2 + k % 3) for k in range(6)}
        with TrajectoryReplayBuffer() as buffer:
            results = together(6, lambda k: buffer.add_trajectories([made[k].given]))  # noqa: B023
            ids = {number: made[k] for k, (number,) in enumerate(results)}
            assert sorted(ids) == list(range(6))
            assert_rows(buffer.sample(100), ids, newest=5)


def test_the_first_trajectory_of_several_threads_fixes_the_schema() -> None:
    for _ in range(10):
        made = [make(k, text=k % 2 == 0) for k in range(4)]
        with TrajectoryReplayBuffer() as buffer:
            results = together(4, lambda k: buffer.add_trajectories([made[k].given]))  # noqa: B023
            added: dict[int, Made] = {}
            for k, result in enumerate(results):
                if isinstance(result, InvalidTrajectory):
                    continue
                added[result[0]] = made[k]
            assert len(added) == 2
            assert len({one.want.keys() >= {"curr_obs.word"} for one in added.values()}) == 1
            assert_rows(buffer.sample(50), added, newest=1)


def test_a_schema_that_changes_while_somebody_adds_leaves_no_half(tmp_path: Path) -> None:
    """A checkpoint with other fields is loaded between looking at a trajectory and storing it."""
    before, after = make(0, text=False), {"rewards": np.ones((2, 1))}
    with TrajectoryReplayBuffer() as other:
        other.add_trajectories([after])
        other.save_checkpoint(tmp_path)

    class Interrupted(TrajectoryReplayBuffer):
        def _wait_for_writer(self, size: int) -> None:
            if not hasattr(self, "was_here"):
                self.was_here = True
                thread = threading.Thread(target=self.load_checkpoint, args=(tmp_path,))
                # The lock is held here, so it is given up as a wait for the writer would.
                thread.start()
                while thread.is_alive():
                    self._changed.wait(0.01)
            super()._wait_for_writer(size)

    with Interrupted() as buffer:
        with pytest.raises(InvalidTrajectory, match="a checkpoint was loaded meanwhile"):
            buffer.add_trajectories([before.given])
        assert len(buffer) == 1
        assert buffer.sample(3)["rewards"].tolist() == [1.0] * 3
        buffer._check()
        assert buffer.add_trajectories([after]) == [1]


# --- waiting for the disk -------------------------------------------------------------------------------


class Disk(FileOps):
    """A disk that syncs only while it is told to, or that fails."""

    def __init__(self) -> None:
        self.go, self.arrived = threading.Event(), threading.Event()
        self.go.set()
        self.broken = False

    def sync(self, descriptor: int) -> None:
        if not self.go.is_set():
            self.arrived.set()
        assert self.go.wait(HANG_S)
        if self.broken:
            raise OSError(28, "No space left on device")
        super().sync(descriptor)


def on_disk(disk: Disk, path: Path, **options: Any) -> TrajectoryReplayBuffer:
    class Buffer(TrajectoryReplayBuffer):
        _files = disk

    return Buffer(auto_save=True, auto_save_path=path, **options)


def started(work: Callable[[], object]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def small() -> dict[str, Any]:
    return {"rewards": np.zeros((10, 1)), "curr_obs": {"x": np.zeros((10, 1, 200))}}  # 16,160 bytes


def blocked(path: Path, disk: Disk) -> tuple[TrajectoryReplayBuffer, threading.Thread, list[Any]]:
    """A buffer whose disk does not answer, and a thread whose add waits for it."""
    buffer = on_disk(disk, path, max_pending_bytes=20_000)
    disk.go.clear()
    assert buffer.add_trajectories([small()]) == [0]
    assert disk.arrived.wait(HANG_S)
    thread, results = started(lambda: buffer.add_trajectories([small()]))
    deadline = time.monotonic() + HANG_S
    while not buffer._changed._waiters and time.monotonic() < deadline:  # type: ignore[attr-defined]
        thread.join(0.001)
    assert results == []
    assert 16_000 < buffer.get_stats()["pending_bytes"] <= 20_000
    assert len(buffer) == 1
    return buffer, thread, results


def test_an_add_that_waits_for_the_disk_goes_on_when_that_does(tmp_path: Path) -> None:
    disk = Disk()
    buffer, thread, results = blocked(tmp_path, disk)
    assert buffer.sample(5)["step"].shape == (5,)  # sampling does not wait
    disk.go.set()
    thread.join(HANG_S)
    assert results == [[1]]
    buffer.flush()
    assert (buffer.durable_id, buffer.get_stats()["pending_bytes"]) == (1, 0)
    buffer.close()


def test_an_add_that_waits_for_the_disk_ends_with_the_buffer(tmp_path: Path) -> None:
    disk = Disk()
    buffer, thread, results = blocked(tmp_path, disk)
    closing, closed = started(buffer.close)
    thread.join(HANG_S)
    assert isinstance(results[0], BufferClosed)
    assert closed == []  # it writes what it has
    disk.go.set()
    closing.join(HANG_S)
    assert closed == [None]
    with TrajectoryReplayBuffer(auto_save_path=tmp_path, read_only=True) as again:
        assert len(again) == 1


def test_an_add_that_waits_for_the_disk_fails_with_it(tmp_path: Path) -> None:
    disk = Disk()
    buffer, thread, results = blocked(tmp_path, disk)
    disk.broken = True
    disk.go.set()
    thread.join(HANG_S)
    assert isinstance(results[0], StorageError)
    assert "No space left" in str(results[0])
    assert buffer.sample(4)["step"].shape == (4,)
    for call in (lambda: buffer.add_trajectories([small()]), buffer.flush, buffer.clear, buffer.close):
        with pytest.raises(StorageError, match="No space left"):
            call()


def test_what_is_larger_than_all_room_goes_alone(tmp_path: Path) -> None:
    disk = Disk()
    with on_disk(disk, tmp_path, max_pending_bytes=1) as buffer:
        assert buffer.add_trajectories([small(), small()]) == [0, 1]
        assert buffer.add_trajectories([small()]) == [2]
        buffer.flush()
        assert buffer.durable_id == 2


def test_several_that_add_at_once_do_not_exceed_the_room_together(tmp_path: Path) -> None:
    """Room is taken before rows are copied: all of them used to find that there was still some."""
    disk = Disk()
    most = []

    class Watched(TrajectoryReplayBuffer):
        _files = disk

        def _wait_for_writer(self, size: int) -> None:
            super()._wait_for_writer(size)
            assert self._writer is not None
            most.append(self._writer.pending_bytes)
            if len(most) == 2:
                started_two.set()

    started_two = threading.Event()
    with Watched(auto_save=True, auto_save_path=tmp_path, max_pending_bytes=40_000) as buffer:
        disk.go.clear()
        threads = [started(lambda: buffer.add_trajectories([small()])) for _ in range(6)]
        assert started_two.wait(HANG_S)
        threads[0][0].join(0.05)
        assert len(most) == 2  # of 16,160 bytes each
        disk.go.set()
        for thread, _ in threads:
            thread.join(HANG_S)
        assert sorted(ids[0] for _, (ids,) in threads) == list(range(6))
        assert max(most) <= 40_000
        buffer.flush()
        assert buffer.get_stats()["pending_bytes"] == 0


# --- mixing ---------------------------------------------------------------------------------------------


def test_a_mix_keeps_its_shares_also_when_several_threads_draw() -> None:
    with TrajectoryReplayBuffer() as one, TrajectoryReplayBuffer() as other:
        for buffer in (one, other):
            buffer.add_trajectories([small()])
        mix = MixedReplay({one: 0.3, other: 0.7})
        found = together(8, lambda _: [mix.sample(3)["source"].sum().item() for _ in range(50)])
        assert abs(sum(map(sum, found)) - 0.7 * 1200) <= 1


@pytest.mark.parametrize("stored", [False, True], ids=["memory", "directory"])
@pytest.mark.parametrize("same_fields", [True, False], ids=["same fields", "other fields"])
def test_a_first_trajectory_that_comes_while_a_checkpoint_is_loaded(
    stored: bool, same_fields: bool, tmp_path: Path
) -> None:
    """What is loaded was found before the first trajectory came, and takes its place after that."""
    saved, first, later = make(0), make(1, text=same_fields), make(2)
    with TrajectoryReplayBuffer() as other:
        other.add_trajectories([saved.given] * 3)
        other.save_checkpoint(tmp_path / "saved")

    class Interrupted(TrajectoryReplayBuffer):
        def _become(self, *arguments: Any) -> None:
            assert self.add_trajectories([first.given]) == [0]
            super()._become(*arguments)

    with Interrupted(auto_save=stored, auto_save_path=tmp_path / "store") as buffer:
        try:
            buffer.load_checkpoint(tmp_path / "saved")
        except InvalidInput:
            # A store has one schema, and the first trajectory fixed it.
            assert stored
            buffer.flush()
            assert_rows(buffer.sample(20), {0: first}, newest=0)
            return
        buffer.flush()
        new = buffer.add_trajectories([later.given])[0]
        buffer.flush()
        known = {0: saved, 1: saved, 2: saved, new: later}
        assert len(buffer) == 4
        rows = assert_rows(buffer.sample(100), known)
        assert {number for number, _, _ in rows} == set(known)
        buffer._check()
