"""Checkpoints of trajectories: all of it or the one before, loaded by any number of ranks, drawing on as before."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from forebay.checkpoint.files import FileOps
from forebay.errors import CheckpointError, DamagedData, ForebayError, InvalidInput, StorageError
from forebay.trajectory import TrajectoryReplayBuffer
from forebay.trajectory.checkpoint import ENVELOPE, open_contents
from forebay.trajectory.listing import ROW
from forebay.trajectory.store import Store
from tests.failing_files import Failing
from tests.trajectory.crash_child import Buffer, check_batch, check_trajectory, make
from tests.trajectory.test_store import apart, check_all, column_files, filled, ids_of, killed, opened, reading, settle

Trajectories = TrajectoryReplayBuffer


def in_memory(keys: Sequence[int] = (), **options: Any) -> Buffer:
    buffer = Buffer(**{"sample_window_size": 0, "arrays": "numpy", **options})
    if keys:
        buffer.add_trajectories([make(key) for key in keys])
    return buffer


def loaded(path: Path, *shard: Any, **options: Any) -> Buffer:
    buffer = in_memory(**{name: options.pop(name) for name in ("seed", "rank") if name in options})
    buffer.load_checkpoint(path, *shard, **options)
    return buffer


def keys_of(buffer: TrajectoryReplayBuffer) -> list[int]:
    """Which trajectories are there, by their content: ids may have been given anew."""
    found = []
    for number in ids_of(buffer):  # type: ignore[arg-type]
        trajectory = buffer.trajectory(number)
        key = int(np.asarray(trajectory.versions)[0, 0])
        check_trajectory(trajectory, key)
        found.append(key)
    if found:
        check_batch(buffer.sample(128), by_id=False)
    buffer._check()
    return found


def same_draws(one: TrajectoryReplayBuffer, other: TrajectoryReplayBuffer) -> None:
    """Both go on with the same random sequence over the same rows."""
    for options in ({}, {"replace": False}, {"sequence_length": 2}):
        first, second = (buffer.sample(4, **options) for buffer in (one, other))
        _compare(first, second)


def _compare(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            _compare(one[name], other[name])
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    else:
        assert one == other


def files_of(path: Path) -> dict[str, tuple[int, str]]:
    """Every file of a checkpoint: its size, and what is in it."""
    return {
        str(entry.relative_to(path)): (entry.stat().st_size, sha256(entry.read_bytes()).hexdigest())
        for entry in sorted(path.rglob("*"))
        if entry.is_file()
    }


def manifest_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "rank_0" / "manifest.json").read_bytes())["manifest"]
    return found


# --- what goes in comes out ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "store", "loaded"])
def test_g12_a_loaded_buffer_of_trajectories_draws_on_as_the_saved_one(tmp_path: Path, kind: str) -> None:
    keys = range(30)
    if kind == "store":
        buffer = opened(tmp_path / "store", seed=7)
        for key in keys:
            buffer.add_trajectories([make(key)])
    else:
        buffer = in_memory(keys, seed=7)
    buffer.sample(5)
    buffer.sample(3, sequence_length=2)
    if kind == "loaded":
        buffer.save_checkpoint(tmp_path / "first")
        buffer = loaded(tmp_path / "first", seed=99)
    buffer.save_checkpoint(tmp_path / "checkpoint")
    before = files_of(tmp_path / "checkpoint")
    again = loaded(tmp_path / "checkpoint", seed=1)
    assert again.get_stats()["next_id"] == 30
    same_draws(buffer, again)
    assert ids_of(again) == list(keys)
    assert keys_of(again) == list(keys)
    for one in (buffer, again):
        one.sample(128)  # as keys_of did
        assert one.add_trajectories([make(30)]) == [30]
    buffer.sample(128)
    same_draws(loaded(tmp_path / "checkpoint"), loaded(tmp_path / "checkpoint"))
    assert files_of(tmp_path / "checkpoint") == before
    buffer.close()


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    import torch

    chance = np.random.default_rng(0)
    shape = (5, 2)
    names = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bfloat16"]
    names += ["uint16", "uint32", "uint64"]
    inputs = {}
    for name in names:
        dtype = getattr(torch, name)
        size = torch.empty((), dtype=dtype).element_size()
        raw = chance.integers(0, 2 if name == "bool" else 256, (*shape, 3 * size), np.uint8)
        inputs[name] = torch.from_numpy(raw).view(dtype)
    inputs["scalar"] = torch.from_numpy(chance.random(shape))
    inputs["nothing"] = torch.empty((*shape, 0, 3))
    inputs["large"] = torch.from_numpy(chance.integers(0, 256, (*shape, 40, 40), np.uint8))
    with Trajectories(arrays="torch") as buffer:
        buffer.add_trajectories([{"rewards": torch.zeros(shape), "forward_inputs": inputs}])
        buffer.save_checkpoint(tmp_path)
    with Trajectories(arrays="torch") as buffer:
        buffer.load_checkpoint(tmp_path)
        batch = buffer.sample(64)
        for name, values in inputs.items():
            found = batch["forward_inputs"][name]
            expected = values[batch["step"], batch["env"]]
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
            assert found.reshape(-1).view(torch.uint8).equal(expected.reshape(-1).view(torch.uint8)), name


def test_a_checkpoint_of_nothing_and_one_of_an_empty_window(tmp_path: Path) -> None:
    """Previously the random sequence began anew after an empty checkpoint."""
    one = in_memory(seed=3)
    one.save_checkpoint(tmp_path / "nothing")
    other = in_memory(range(5))
    other.load_checkpoint(tmp_path / "nothing")
    assert len(other) == 0
    with pytest.raises(InvalidInput, match="none"):
        other.sample(1)
    for buffer, first in ((one, 0), (other, 5)):
        assert buffer.add_trajectories([make(0), make(1)]) == [first, first + 1], "ids grow"
    assert one.sample(20)["step"].tolist() == other.sample(20)["step"].tolist()
    one.clear()
    one.save_checkpoint(tmp_path / "cleared")
    third = loaded(tmp_path / "cleared")
    assert len(third) == 0
    assert third.add_trajectories([make(2)]) == [2]
    with pytest.raises(ForebayError, match="versions"):
        third.add_trajectories([{name: value for name, value in make(3).items() if name != "versions"}])


def test_seeds_and_ranks_of_every_size_are_different_sequences(tmp_path: Path) -> None:
    """Previously seeds from 2**63 on were rounded to a few."""
    drawn = set()
    for seed in (0, 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1):
        for rank in (0, 1, 2**64 - 1):
            buffer = in_memory(range(20), seed=seed, rank=rank)
            buffer.save_checkpoint(tmp_path / f"{seed}-{rank}")
            again = in_memory(rank=rank)
            again.load_checkpoint(tmp_path / f"{seed}-{rank}")
            first = tuple(buffer.sample(16)["trajectory_id"].tolist())
            assert tuple(again.sample(16)["trajectory_id"].tolist()) == first
            drawn.add(first)
    assert len(drawn) == 7 * 3


# --- ranks --------------------------------------------------------------------------------------------


def save_ranks(path: Path, counts: Sequence[int]) -> list[Buffer]:
    """Ranks that have so many trajectories each, with keys that go on from rank to rank; their ids do not."""
    buffers, key = [], 0
    for rank, count in enumerate(counts):
        buffer = in_memory(range(key, key + count), rank=rank)
        if count:
            buffer.sample(3 + rank)
        buffer.save_checkpoint(path)
        buffers.append(buffer)
        key += count
    return buffers


@pytest.mark.parametrize(
    ("counts", "world_size", "sizes"),
    [
        ((7,), 3, (3, 2, 2)),
        ((2, 1, 2, 1, 1), 3, (3, 2, 2)),
        ((4, 0, 4), 2, (4, 4)),
        ((1,), 3, (1, 0, 0)),
        ((3, 3), 5, (2, 1, 1, 1, 1)),
        ((10,), 1, (10,)),
        ((2, 3, 4), 1, (9,)),
        ((1,) * 12, 2, (6, 6)),
    ],
)
def test_g04_any_number_of_ranks_takes_all_trajectories_once(
    tmp_path: Path, counts: tuple[int, ...], world_size: int, sizes: tuple[int, ...]
) -> None:
    save_ranks(tmp_path, counts)
    taken = [keys_of(loaded(tmp_path, True, rank, world_size, rank=rank)) for rank in range(world_size)]
    assert tuple(map(len, taken)) == sizes
    assert [key for keys in taken for key in keys] == list(range(sum(counts))), "contiguous, in order"
    assert keys_of(loaded(tmp_path)) == list(range(sum(counts))), "not distributed: everything"


def test_g04_with_as_many_ranks_each_gets_its_own_trajectories_and_its_sequence(tmp_path: Path) -> None:
    saved = save_ranks(tmp_path, (3, 4, 5))
    for rank, buffer in enumerate(saved):
        again = loaded(tmp_path, True, rank, 3, rank=rank, seed=4)
        same_draws(buffer, again)
        assert keys_of(again) == keys_of(buffer)
        assert ids_of(again) == ids_of(buffer)


def test_ranks_of_another_number_draw_differently_and_reproducibly(tmp_path: Path) -> None:
    """Previously every rank that loaded everything drew the same."""
    save_ranks(tmp_path, (20, 20))
    drawn = [
        tuple(loaded(tmp_path, *shard, rank=rank).sample(16)["versions"].tolist())
        for rank in range(3)
        for shard in ((True, rank, 3), (False, rank, 3))
        for _ in range(2)
    ]
    assert len(set(drawn)) == len(drawn) // 2
    assert drawn[::2] == drawn[1::2]


def test_texts_of_several_directories_stay_with_their_trajectories(tmp_path: Path) -> None:
    """Each has texts of its own; also after the joined ones are saved, cut and joined again."""
    save_ranks(tmp_path / "a", (5, 6, 7))
    joined = loaded(tmp_path / "a")
    joined.add_trajectories([make(key) for key in range(18, 24)])
    assert keys_of(joined) == list(range(24))
    joined.save_checkpoint(tmp_path / "b")
    for rank in range(4):
        part = loaded(tmp_path / "b", True, rank, 4, rank=rank)
        part.save_checkpoint(tmp_path / "c")
    again = loaded(tmp_path / "c")
    assert keys_of(again) == list(range(24))
    again.load_checkpoint(tmp_path / "a")
    again.load_checkpoint(tmp_path / "b")
    assert keys_of(again) == list(range(24))


def test_a_directory_with_a_rank_missing_inside_is_said(tmp_path: Path) -> None:
    save_ranks(tmp_path, (2, 2, 2))
    (tmp_path / "rank_1" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="rank_1"):
        loaded(tmp_path)
    with pytest.raises(CheckpointError, match="no trajectories"):
        loaded(tmp_path / "rank_1")
    with pytest.raises(CheckpointError, match="no directory"):
        loaded(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="local_rank is 3"):
        loaded(tmp_path, True, 3, 3)


def test_ranks_with_other_fields_are_not_mixed(tmp_path: Path) -> None:
    in_memory([0]).save_checkpoint(tmp_path)
    other = in_memory(rank=1)
    other.add_trajectories([{**make(0), "versions": make(0)["versions"].astype(np.int32)}])
    other.save_checkpoint(tmp_path)
    with pytest.raises(InvalidInput, match="versions is I64"):
        loaded(tmp_path)


# --- parts --------------------------------------------------------------------------------------------


def test_g08_buffers_of_trajectories_that_belong_together_are_saved_and_loaded_together(tmp_path: Path) -> None:
    main, demo = in_memory(range(8)), in_memory(range(100, 120), seed=5)
    demo.sample(3)
    main.save_checkpoint(tmp_path, parts={"demo": demo})
    again, others = in_memory(), in_memory()
    again.load_checkpoint(tmp_path, parts={"demo": others})
    same_draws(main, again)
    same_draws(demo, others)
    assert (keys_of(again), keys_of(others)) == (list(range(8)), list(range(100, 120)))
    assert keys_of(loaded(tmp_path)) == list(range(8)), "the main one alone"
    with pytest.raises(CheckpointError, match="no part 'other'; it has demo, replay"):
        again.load_checkpoint(tmp_path, parts={"other": others})
    for verb in (again.save_checkpoint, again.load_checkpoint):
        for parts in ({"replay": others}, {"demo": again}, {"a": others, "b": others}):
            with pytest.raises(InvalidInput, match="expected other buffers"):
                verb(tmp_path, parts=parts)
    shares = []
    for rank in range(3):
        main, demo = in_memory(rank=rank), in_memory(rank=rank)
        main.load_checkpoint(tmp_path, True, rank, 3, parts={"demo": demo})
        shares.append((keys_of(main), keys_of(demo)))
    assert [len(keys) for keys, _ in shares] == [3, 3, 2]
    assert [key for _, keys in shares for key in keys] == list(range(100, 120))


def test_g08_parts_of_trajectories_are_loaded_all_or_none(tmp_path: Path) -> None:
    in_memory(range(8)).save_checkpoint(tmp_path, parts={"demo": in_memory(range(50, 60))})
    damage(tmp_path, "demo")
    main, demo = in_memory(range(3)), in_memory(range(60, 62))
    with pytest.raises(DamagedData, match="checksum"):
        main.load_checkpoint(tmp_path, parts={"demo": demo})
    assert (keys_of(main), keys_of(demo)) == ([0, 1, 2], [60, 61])


def damage(path: Path, part: str = "replay") -> None:
    """Flip a byte of a row."""
    (entry,) = manifest_of(path)["parts"][part]["segments"]
    target = path / "rank_0" / f"seg-{entry['name']}-1.col"
    data = bytearray(target.read_bytes())
    data[7] ^= 1
    target.write_bytes(data)


# --- all or nothing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "for_good"), [(errno.ENOSPC, False), (errno.EIO, True)], ids=["once", "for good"])
@pytest.mark.parametrize("kind", ["memory", "store"])
@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_g08_whichever_file_operation_fails_a_whole_checkpoint_of_trajectories_is_there(
    tmp_path: Path, stride: int, code: int, for_good: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    buffer = in_memory(range(5)) if kind == "memory" else opened(tmp_path / "store")
    if kind == "store":
        for key in range(5):
            buffer.add_trajectories([make(key)])
    demo = in_memory(range(70, 73))
    template = tmp_path / "template"
    buffer.save_checkpoint(template, parts={"demo": demo})
    buffer.add_trajectories([make(key) for key in range(5, 40)], durable=kind == "store")
    outcomes = set()
    path, n = tmp_path / "checkpoint", 0
    while True:
        shutil.copytree(template, path)
        buffer._files = files = Failing(n, code, for_good=for_good)
        error = _failure(lambda: buffer.save_checkpoint(path, parts={"demo": demo}))
        failed = error is not None
        if failed:
            assert os.strerror(code) in str(error)
            assert str(tmp_path) in str(error)
        assert files.open_descriptors == set(), files.calls[n : n + 1]
        again, others = in_memory(), in_memory()
        again.load_checkpoint(path, parts={"demo": others})
        found = len(again)
        outcomes.add((failed, found))
        assert found == 40 if not failed else found in (5, 40)
        if failed and "replace" not in files.calls[:n]:
            assert found == 5
        check_batch(again.sample(64))
        assert len(others) == 3
        buffer._files = None
        buffer.save_checkpoint(path)
        assert len(loaded(path)) == 40
        shutil.rmtree(path)
        if len(files.calls) <= n:
            break
        n += stride
    assert outcomes == {(True, 5), (True, 40), (False, 40)}
    assert n > 25
    buffer.close()


def _failure(call: Callable[[], object]) -> CheckpointError | None:
    try:
        call()
    except CheckpointError as error:
        return error
    return None


def test_g08_a_load_that_fails_leaves_the_buffer_of_trajectories_as_it_was(tmp_path: Path) -> None:
    in_memory(range(10, 30)).save_checkpoint(tmp_path / "damaged")
    damage(tmp_path / "damaged")
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([make(key) for key in range(10)])
        expected = loaded_copy(buffer, tmp_path / "copy")
        for path in (tmp_path / "damaged", tmp_path / "nowhere", tmp_path):
            with pytest.raises(ForebayError):
                buffer.load_checkpoint(path)
        segments = dict(buffer._segments)
        same_draws(buffer, expected)
        check_all(buffer, range(10))
        assert buffer.add_trajectories([make(10)], durable=True) == [10]
        assert buffer._segments == segments
        buffer.load_checkpoint(tmp_path / "damaged", verify=False)
        assert len(buffer) == 20


def test_a_load_of_rlinf_files_that_fails_leaves_the_buffer_as_it_was(tmp_path: Path) -> None:
    """Previously it was emptied first."""
    in_memory(range(6), trajectory_format="pt").save_checkpoint(tmp_path / "pt")
    other = in_memory()
    other.add_trajectories([{**make(0), "prev_values": np.zeros((1, 1))}])
    with pytest.raises(InvalidInput, match="prev_values"):
        other.load_checkpoint(tmp_path / "pt")
    assert ids_of(other) == [0]
    same = in_memory(range(20, 23))
    same.load_checkpoint(tmp_path / "pt")
    same.save_checkpoint(tmp_path / "native")
    for buffer in (same, loaded(tmp_path / "native")):
        assert set(buffer.sample(200)["versions"].tolist()) == set(range(6))
        assert len(buffer) == 6


def loaded_copy(buffer: Buffer, path: Path) -> Buffer:
    buffer.save_checkpoint(path)
    return loaded(path)


def test_g08_a_loader_of_trajectories_that_is_overtaken_by_saves_finds_the_newer_ones(tmp_path: Path) -> None:
    """Previously a segment that two saves had removed meanwhile was called missing."""

    class Overtaken(FileOps):
        """Two saves are done just before the n-th file is opened."""

        def __init__(self, target: Path, at: int) -> None:
            self.target, self.at = target, at
            self.opens: list[str] = []

        def open(self, path: Path) -> tuple[int, int]:
            self.opens.append(path.name)
            if len(self.opens) == self.at + 1:
                for _ in range(2):
                    in_memory(range(20, 29)).save_checkpoint(self.target)
            return super().open(path)

    for at in range(8):
        in_memory(range(5)).save_checkpoint(tmp_path / str(at))
        buffer = in_memory()
        buffer._files = files = Overtaken(tmp_path / str(at), at)
        buffer.load_checkpoint(tmp_path / str(at))
        assert keys_of(buffer) in (list(range(20, 29)), list(range(5)))
        assert len(files.opens) > at
        assert at or keys_of(buffer)[0] == 20
    for at in range(5):
        path = tmp_path / f"again-{at}"
        in_memory(range(5)).save_checkpoint(path)
        found = open_contents(path / "rank_0", files=Overtaken(path, at))
        assert len(found.listing) in (5, 9)


def test_g02_a_checkpoint_of_trajectories_can_be_saved_while_threads_add_and_sample(tmp_path: Path) -> None:
    failed: list[BaseException] = []
    ended = threading.Event()

    def forever(work: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                while not ended.is_set():
                    work()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    lock, keys = threading.Lock(), iter(range(10**6))
    options: dict[str, Any] = {"sample_window_size": 15, "retain": "window", "cache_size": 3}
    with opened(tmp_path / "store", max_pending_bytes=50_000, **options) as buffer:

        def add() -> None:
            with lock:
                key = next(keys)
                assert buffer.add_trajectories([make(key)]) == [key]

        add()
        threads = [forever(add), forever(lambda: check_batch(buffer.sample(32)))]
        threads += [forever(lambda: check_batch(buffer.sample(32)))]
        try:
            sizes = []
            for number in range(10):
                path = tmp_path / "checkpoint" / str(number % 2)
                buffer.save_checkpoint(path)
                again = loaded(path)
                found = ids_of(again)
                assert found == list(range(found[0], found[-1] + 1))
                check_all(again, found)
                sizes.append(found[-1])
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        assert not failed
        assert sizes == sorted(sizes)
        assert sizes[-1] > 50


def test_a_segment_that_is_just_removed_is_not_saved(tmp_path: Path) -> None:
    """Previously a save could list a segment whose removal was under way, and then not find its files."""

    class Slow(FileOps):
        """The writer is in the middle of a commit that also removes, until the save links its first file."""

        def write(self, descriptor: int, parts: Sequence[Any]) -> None:
            if armed.is_set() and not waiting.is_set():
                waiting.set()
                linking.wait(0.5)
            super().write(descriptor, parts)

    class Hooked(Buffer):
        _segment_bytes = 1

    class Links(FileOps):
        def link(self, source: Path, target: Path) -> None:
            linking.set()
            armed.clear()
            settle(buffer)
            super().link(source, target)

    armed, waiting, linking = threading.Event(), threading.Event(), threading.Event()
    Hooked._files = Slow()
    buffer = opened(tmp_path / "store", Hooked, sample_window_size=4, retain="window", cache_size=0)
    with buffer:
        buffer.add_trajectories([make(key) for key in range(4)], durable=True)
        settle(buffer)
        assert buffer._writer is not None
        # What leaves the window now is not removed before the commit that is held up.
        buffer._writer.holds += 1
        buffer.add_trajectories([make(key) for key in range(4, 8)], durable=True)
        with buffer._changed:
            armed.set()
            buffer._files = Links()
        buffer._writer.holds -= 1
        buffer.add_trajectories([make(key) for key in range(8, 12)])
        assert waiting.wait(60)
        buffer.save_checkpoint(tmp_path / "checkpoint")
    again = loaded(tmp_path / "checkpoint")
    assert set(range(8, 12)) <= set(keys_of(again))


# --- files --------------------------------------------------------------------------------------------


def test_sealed_segments_are_linked_and_a_checkpoint_is_untouched_by_what_follows(tmp_path: Path) -> None:
    with opened(tmp_path / "store", sample_window_size=10, retain="window", cache_size=2) as buffer:
        for key in range(40):
            buffer.add_trajectories([make(key)])
        settle(buffer)
        buffer.save_checkpoint(tmp_path / "checkpoint")
        linked = [path for path in column_files(tmp_path / "checkpoint" / "rank_0") if path.stat().st_nlink > 1]
        sealed = [segment for segment in buffer._segments.values() if segment.sealed]
        assert len(linked) == 3 * len(sealed) > 0
        before = files_of(tmp_path / "checkpoint")
        kept = loaded(tmp_path / "checkpoint")
        found = keys_of(kept)
        assert found[-10:] == list(range(30, 40))
        for key in range(40, 120):
            buffer.add_trajectories([make(key)])
        settle(buffer)
        assert not any((tmp_path / "store" / "rank_0" / path.name).exists() for path in linked), "all were freed there"
        buffer.clear()
    with opened(tmp_path / "store", sample_window_size=10, retain="window") as buffer:
        buffer.add_trajectories([make(key) for key in range(120, 200)])
    shutil.rmtree(tmp_path / "store")
    assert files_of(tmp_path / "checkpoint") == before
    assert keys_of(kept) == keys_of(loaded(tmp_path / "checkpoint")) == found


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP])
def test_where_links_fail_segments_are_copied(tmp_path: Path, code: int) -> None:
    class NoLinks(FileOps):
        def link(self, source: Path, target: Path) -> None:
            links.append(source)
            if len(links) != 2:  # one of them works, of a segment that is then copied whole
                raise OSError(code, os.strerror(code))
            super().link(source, target)

    links: list[Path] = []
    with opened(tmp_path / "store") as buffer:
        for key in range(40):
            buffer.add_trajectories([make(key)])
        buffer.flush()
        buffer._files = NoLinks()
        buffer.save_checkpoint(tmp_path / "checkpoint")
        assert len(links) > 2
    files = column_files(tmp_path / "checkpoint" / "rank_0")
    assert all(path.stat().st_nlink == 1 for path in files)
    named = {entry["name"] for entry in manifest_of(tmp_path / "checkpoint")["parts"]["replay"]["segments"]}
    assert {path.name.split("-")[1] for path in files} == named, "nothing is left over"
    shutil.rmtree(tmp_path / "store")
    assert keys_of(loaded(tmp_path / "checkpoint")) == list(range(40))


def test_a_buffer_outlives_the_checkpoint_that_it_was_loaded_from(tmp_path: Path) -> None:
    """Previously it could not be saved any more once that directory was rotated away."""
    in_memory(range(10)).save_checkpoint(tmp_path / "0")
    buffer = loaded(tmp_path / "0")
    for step in range(1, 6):
        shutil.rmtree(tmp_path / str(step - 1))
        buffer.add_trajectories([make(9 + step)])
        assert keys_of(buffer) == list(range(10 + step))
        buffer.save_checkpoint(tmp_path / str(step))
        if step % 2:
            buffer.load_checkpoint(tmp_path / str(step))
    assert keys_of(loaded(tmp_path / "5")) == list(range(15))


def test_a_checkpoint_is_saved_over_the_one_that_was_loaded(tmp_path: Path) -> None:
    buffer = in_memory(range(5))
    for key in range(5, 10):
        buffer.save_checkpoint(tmp_path)
        buffer = loaded(tmp_path)
        buffer.add_trajectories([make(key)])
        buffer.save_checkpoint(tmp_path)
    assert keys_of(buffer) == keys_of(loaded(tmp_path)) == list(range(10))
    buffer.clear()
    for _ in range(2):
        buffer.save_checkpoint(tmp_path)
    assert column_files(tmp_path / "rank_0") == [], "what no checkpoint names is removed"


def test_a_checkpoint_is_not_saved_into_a_store_nor_a_store_opened_in_a_checkpoint(tmp_path: Path) -> None:
    """Previously the files of the open segment were swept as leftovers."""
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([make(key) for key in range(20)], durable=True)
        before = files_of(tmp_path).keys()
        with pytest.raises(InvalidInput, match="is a store"):
            buffer.save_checkpoint(tmp_path)
        assert files_of(tmp_path).keys() == before
        check_all(buffer, range(20))
        buffer.save_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(InvalidInput, match="is a checkpoint"):
        opened(tmp_path / "checkpoint")
    with opened(tmp_path) as buffer:
        check_all(buffer, range(20))


# --- stores -------------------------------------------------------------------------------------------


def test_a_store_of_trajectories_can_be_loaded_as_a_checkpoint(tmp_path: Path) -> None:
    filled(tmp_path / "store", range(40))
    before = files_of(tmp_path / "store")
    whole = loaded(tmp_path / "store")
    assert keys_of(whole) == list(range(40))
    assert whole.add_trajectories([make(40)]) == [40]
    shares = [keys_of(loaded(tmp_path / "store", True, rank, 3, rank=rank)) for rank in range(3)]
    assert [len(keys) for keys in shares] == [14, 13, 13]
    assert [key for keys in shares for key in keys] == list(range(40))
    unchanged = files_of(tmp_path / "store")
    assert {name: unchanged[name] for name in before if name.endswith((".col", ".db"))} == {
        name: before[name] for name in before if name.endswith((".col", ".db"))
    }
    path = column_files(tmp_path / "store" / "rank_0")[0]
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedData, match="checksum"):
        loaded(tmp_path / "store")


def test_a_store_that_is_being_written_can_be_loaded_and_what_is_saved_of_it_stays(tmp_path: Path) -> None:
    """Previously the open segment was linked, and the checkpoint grew with it."""
    with opened(tmp_path / "store") as writer:
        writer.add_trajectories([make(key) for key in range(15)], durable=True)
        buffer = loaded(tmp_path / "store")
        assert keys_of(buffer) == list(range(15))
        buffer.save_checkpoint(tmp_path / "checkpoint")
        before = files_of(tmp_path / "checkpoint")
        for key in range(15, 40):
            writer.add_trajectories([make(key)], durable=True)
        assert keys_of(buffer) == list(range(15))
        assert files_of(tmp_path / "checkpoint") == before
        opened_files = column_files(killed(tmp_path / "store", tmp_path / "copy"))
        assert opened_files
        writer.load_checkpoint(tmp_path / "store")
        check_all(writer, range(40))
    assert keys_of(loaded(tmp_path / "checkpoint")) == list(range(15))


def test_a_cleared_store_is_loaded_without_what_was_cleared(tmp_path: Path) -> None:
    with opened(tmp_path) as buffer:
        buffer.add_trajectories([make(key) for key in range(5)])
        buffer.clear()
        buffer.add_trajectories([make(5), make(6)])
    assert keys_of(loaded(tmp_path)) == [5, 6]


@pytest.mark.parametrize("retain", ["all", "window"])
def test_a_checkpoint_can_be_loaded_into_a_buffer_with_a_store(tmp_path: Path, retain: str) -> None:
    in_memory(range(100, 130)).save_checkpoint(tmp_path / "checkpoint")
    with opened(tmp_path / "store", sample_window_size=20, retain=retain) as buffer:
        buffer.add_trajectories([make(key) for key in range(50)])
        buffer.load_checkpoint(tmp_path / "checkpoint")
        assert keys_of(buffer) == list(range(110, 130))
        first = int(buffer.get_stats()["next_id"])
        assert first == 50
        for key in range(50, 60):
            assert buffer.add_trajectories([make(key)], durable=key % 2 == 0) == [key]
        assert keys_of(buffer) == [*range(120, 130), *range(50, 60)]
        settle(buffer)
        buffer.save_checkpoint(tmp_path / "both")
        assert keys_of(buffer) == [*range(120, 130), *range(50, 60)]
    again = loaded(tmp_path / "both")
    assert keys_of(again)[-20:] == [*range(120, 130), *range(50, 60)]
    with opened(tmp_path / "store") as buffer:
        found = ids_of(buffer)
        assert found[-10:] == list(range(50, 60))
        check_all(buffer, found)
    with opened(tmp_path / "fresh") as buffer:
        buffer.load_checkpoint(tmp_path / "checkpoint")
        assert buffer.add_trajectories([make(30)], durable=True) == [30]
        assert keys_of(buffer) == [*range(100, 130), 30]
    with opened(tmp_path / "fresh") as buffer:
        check_all(buffer, [30])


def test_fields_that_a_store_does_not_have_are_not_loaded_into_it(tmp_path: Path) -> None:
    other = in_memory()
    other.add_trajectories([{**make(0), "prev_values": np.zeros((1, 1))}])
    other.save_checkpoint(tmp_path / "checkpoint")
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([make(0)])
        with pytest.raises(InvalidInput, match="other fields"):
            buffer.load_checkpoint(tmp_path / "checkpoint")
        check_all(buffer, [0])
    plain = in_memory(range(3))
    plain.load_checkpoint(tmp_path / "checkpoint")
    assert "prev_values" in plain.sample(1)


def test_what_a_reader_draws_stays_while_a_load_ends(tmp_path: Path) -> None:
    """Previously what left the window while a load ended was unmapped under who was reading it."""
    apart(
        """
from tests.trajectory.test_checkpoint import *
root = Path(sys.argv[1])
in_memory(range(8)).save_checkpoint(root / "checkpoint")
buffer = in_memory([0], sample_window_size=8)
go_on, drawn, batches, readers = threading.Event(), threading.Event(), [], []
fill = Gatherer.fill
def slow(self, *arguments):
    if threading.current_thread() is not threading.main_thread():
        drawn.set()
        assert go_on.wait(HANG_S)
    fill(self, *arguments)
Gatherer.fill = slow
become = Buffer._become
def hooked(self, *arguments):
    become(self, *arguments)
    readers.append(threading.Thread(target=lambda: batches.append(buffer.sample(300))))
    readers[0].start()
    assert drawn.wait(HANG_S)
    buffer.add_trajectories([make(key) for key in range(8, 16)])
Buffer._become = hooked
buffer.load_checkpoint(root / "checkpoint")
go_on.set()
readers[0].join()
check_batch(batches[0])
""",
        tmp_path,
    )


# --- hostile ------------------------------------------------------------------------------------------


def reseal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Alter the manifest as somebody would who knows the format."""
    target = path / "rank_0" / "manifest.json"
    body = json.loads(ENVELOPE.open(target.read_bytes(), target))
    change(body)
    target.write_bytes(ENVELOPE.seal(json.dumps(body).encode()))


def reindex(path: Path, change: Callable[[list[np.ndarray[Any, Any]]], object]) -> None:
    """Alter the index: rows, runs and chains."""
    part = manifest_of(path)["parts"]["replay"]
    target = path / "rank_0" / part["index"]
    data = target.read_bytes()
    rows = np.frombuffer(data, ROW, part["trajectories"]).copy()
    pairs = np.frombuffer(data, "<i8", 2 * (part["runs"] + part["chains"]), rows.nbytes).reshape(-1, 2)
    texts = data[len(data) - part["texts_bytes"] :]
    arrays = [rows, pairs[: part["runs"]].copy(), pairs[part["runs"] :].copy()]
    change(arrays)
    data = b"".join(array.tobytes() for array in arrays) + texts
    target.write_bytes(data)
    counts = dict(zip(("trajectories", "runs", "chains"), map(len, arrays), strict=True))
    reseal(path, lambda body: body["parts"]["replay"].update(counts, index_crc32=crc32(data)))


def _part(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["parts"]["replay"].update(values)


def _segment(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["parts"]["replay"]["segments"][0].update(values)


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "index-escapes": _part(index="../index-0123456789abcdef.rows"),
    "index-absolute": _part(index="/etc/passwd"),
    "index-other": _part(index="manifest.json"),
    "index-missing": _part(index="index-0123456789abcdef.rows"),
    "segment-escapes": _segment(name="../../../etc/pass"),
    "segment-long": _segment(name="a" * 10**6),
    "segment-missing": _segment(name="0123456789abcdef"),
    "segment-more-steps": _segment(steps=10**9),
    "segment-huge": _segment(steps=2**62, observations=2**62),
    "segment-too-huge": _segment(steps=2**63),
    "segment-below": _segment(steps=-1),
    "segment-fewer": _segment(steps=1),
    "segment-fewer-observations": _segment(observations=1),
    "segment-twice": lambda body: body["parts"]["replay"]["segments"].append(body["parts"]["replay"]["segments"][0]),
    "segments-none": _part(segments=[]),
    "count-more": _part(trajectories=11),
    "count-huge": _part(trajectories=2**62),
    "count-below": _part(trajectories=-1),
    "runs-more": _part(runs=10**6),
    "runs-for-chains": lambda body: body["parts"]["replay"].update(
        runs=body["parts"]["replay"]["runs"] - 1, chains=body["parts"]["replay"]["chains"] + 1
    ),
    "crc": _part(index_crc32=1),
    "next-id": _part(next_id=9),
    "texts-none": _part(texts_bytes=0),
    "texts-more": _part(texts_bytes=10**6),
    "schema-none": _part(schema=None),
    "schema-text": _part(schema="steps"),
    "schema-empty": _part(schema={"steps": []}),
    "random-text": _part(random={"counter": "x"}),
    "random-short": lambda body: body["parts"]["replay"]["random"].update(counter=[1]),
    "random-huge": lambda body: body["parts"]["replay"]["random"].update(counter=[2**64] * 4),
    "random-below": lambda body: body["parts"]["replay"]["random"].update(key=[-1, 0]),
    "random-position": lambda body: body["parts"]["replay"]["random"].update(buffer_pos=5),
    "random-half": lambda body: body["parts"]["replay"]["random"].update(uinteger=2**32),
    "parts-list": lambda body: body.update(parts=[]),
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    in_memory(range(10)).save_checkpoint(path)
    return path


@pytest.fixture
def saved(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "saved"))


@pytest.mark.parametrize("name", MANIFESTS)
def test_g08_a_manifest_of_trajectories_that_cannot_be_is_refused(saved: Path, name: str) -> None:
    reseal(saved, MANIFESTS[name])
    for verify in (True, False):
        buffer = in_memory(range(20, 23))
        with pytest.raises((DamagedData, CheckpointError)) as refused:
            buffer.load_checkpoint(saved, verify=verify)
        assert len(str(refused.value)) < 1_000
        assert keys_of(buffer) == [20, 21, 22]
    # It can be saved over.
    in_memory(range(4)).save_checkpoint(saved)
    assert keys_of(loaded(saved)) == [0, 1, 2, 3]


def test_g08_any_altered_byte_of_a_checkpoint_of_trajectories_is_found(saved: Path) -> None:
    chance = np.random.default_rng(0)
    for path in sorted((saved / "rank_0").iterdir()):
        data = path.read_bytes()
        for at in {0, len(data) - 1, *chance.integers(0, len(data), 12).tolist()}:
            altered = bytearray(data)
            altered[at] ^= 1 << int(chance.integers(8))
            path.write_bytes(altered)
            with pytest.raises((DamagedData, CheckpointError)):
                loaded(saved)
        for size in (0, 1, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:size])
            with pytest.raises((DamagedData, CheckpointError)):
                loaded(saved)
        path.write_bytes(data)
    assert keys_of(loaded(saved)) == list(range(10))


def test_g09_links_in_a_checkpoint_of_trajectories_are_not_followed(saved: Path, tmp_path: Path) -> None:
    for path in sorted((saved / "rank_0").iterdir()):
        path.rename(tmp_path / "elsewhere")
        for harm in (lambda p: p.symlink_to(tmp_path / "elsewhere"), Path.mkdir, os.mkfifo):
            harm(path)
            with pytest.raises((DamagedData, CheckpointError, InvalidInput)):
                loaded(saved)
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        (tmp_path / "elsewhere").rename(path)
    assert keys_of(loaded(saved)) == list(range(10))


def test_an_index_that_leads_elsewhere_is_refused_and_never_crashes(saved: Path) -> None:
    """Previously counts of runs whose sum wraps around were believed."""
    apart(
        """
from tests.trajectory.test_checkpoint import *
from tests.trajectory.test_checkpoint import _part, _segment
import resource
resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
saved = Path(sys.argv[1])
part = manifest_of(saved)["parts"]["replay"]
kept = {path: path.read_bytes() for path in (saved / "rank_0").iterdir()}
def attack(name, change, *, refused=True):
    reindex(saved, change)
    for verify in (False, True):
        try:
            buffer = loaded(saved, verify=verify)
            buffer.sample(64)
            assert not refused, name
        except DamagedData:
            pass
    for path, data in kept.items():
        path.write_bytes(data)
def wrapping(arrays):
    rows = np.zeros(2**16, ROW)
    rows["id"] = rows["first_step"] = rows["first_observation"] = np.arange(2**16)
    rows["steps"] = rows["envs"] = rows["epochs"] = rows["observations"] = 1
    rows["runs"] = rows["chains"] = 2**48
    arrays[:] = [rows, np.zeros((0, 2), "<i8"), np.zeros((0, 2), "<i8")]
for path in column_files(saved / "rank_0"):
    os.truncate(path, 2**26)
reseal(saved, _segment(steps=2**16, observations=2**16))
reseal(saved, _part(next_id=2**17))
attack("wrapping", wrapping)
def wrapping_places(arrays):
    wrapping(arrays)
    rows = arrays[0][:2].copy()
    rows["runs"] = [2**63 - 1, -(2**63) + 1]
    arrays[0] = rows
attack("wrapping both ways", wrapping_places)
values = (-1, -(2**63), 2**63 - 1, 2**62, 2**48, 2**32, 10**6, 0)
for name in ROW.names[:-3]:
    for value in values:
        if name in ("longest", "texts") and value >= 0 or name in ("id", "segment", "first_step") and value == 0:
            continue
        if name == "weights" and value == 0 or name == "first_observation" and value == 0:
            continue
        attack(f"{name} {value}", lambda arrays: arrays[0][name].__setitem__(5, value), refused=name != "longest")
for k, name in ((1, "runs"), (2, "chains")):
    for column in (0, 1):
        for value in values[:-1]:
            attack(f"{name} {column} {value}", lambda arrays: arrays[k][2].__setitem__(column, value))
chance = np.random.default_rng(0)
for _ in range(150):
    def noise(arrays):
        array = arrays[int(chance.integers(3))]
        raw = array.view(np.uint8).reshape(-1)
        raw[chance.integers(0, len(raw), int(chance.integers(1, 5)))] = chance.integers(0, 256)
    attack("noise", noise, refused=False)
assert keys_of(loaded(saved)) == list(range(10))
""",
        saved,
    )


# --- readers without Forebay --------------------------------------------------------------------------


NUMPY = {"BOOL": "?", "U8": "u1", "I32": "<i4", "I64": "<i8", "F32": "<f4", "STRING": "<i4"}
INDEX = np.dtype(
    [(name, "<i8") for name in ("id", "segment", "first_step", "first_observation", "steps", "envs", "epochs")]
    + [(name, "<i8") for name in ("observations", "transitions", "runs", "chains", "longest", "weights", "texts")]
    + [("crc", "<i8"), ("reward", "<f8"), ("added_at", "<f8")]
)


def columns_of(directory: Path, name: str, files: list[dict[str, Any]]) -> dict[tuple[str, ...], Any]:
    """The columns of a segment, by table and path."""
    found = {}
    for k, file in enumerate(files):
        raw = np.memmap(directory / f"seg-{name}-{k}.col", np.uint8, "r").reshape(-1, file["row_bytes"])
        for item in file["fields"]:
            dtype = np.dtype((NUMPY[item["dtype"]], tuple(item["shape"])))
            rows = raw[:, item["offset"] : item["offset"] + dtype.itemsize].copy()
            values = rows.view(NUMPY[item["dtype"]]).reshape(len(raw), *item["shape"])
            found[(file["table"], *item["path"])] = values
    return found


def rebuilt(columns: dict[tuple[str, ...], Any], row: Any, texts: list[str]) -> dict[str, Any]:
    """A trajectory `[T, B, ...]` of its rows, which lie environment after environment."""
    steps, envs = int(row["steps"]), int(row["envs"])
    first, begin = int(row["first_step"]), int(row["first_observation"])

    def by_time(values: Any) -> Any:
        return values.reshape(envs, steps, *values.shape[1:]).swapaxes(0, 1)

    def of_steps(*path: str) -> Any:
        return columns[("steps", *path)][first : first + steps * envs]

    observed = {
        name: columns[("observations", name)][begin : begin + int(row["observations"])] for name in ("state", "image")
    }
    following = of_steps("#next")
    assert of_steps("#valid").all()
    codes = by_time(of_steps("curr_obs", "task")) + int(row["texts"])
    return {
        **{name: by_time(of_steps(name)) for name in ("rewards", "versions", "actions", "dones")},
        "curr_obs": {name: by_time(values[: steps * envs]) for name, values in observed.items()}
        | {"task": [[texts[code] for code in line] for line in codes.tolist()]},
        "next_obs": {name: by_time(values[following]) for name, values in observed.items()},
        "model_weights_id": texts[int(row["weights"])],
        "max_episode_length": int(row["longest"]),
    }


def check_rebuilt(found: dict[str, Any], key: int) -> None:
    expected = make(key)
    expected["curr_obs"]["task"] = [expected["curr_obs"]["task"]] * len(expected["rewards"])
    _compare({**found, "curr_obs": dict(sorted(found["curr_obs"].items()))}, expected)


def test_a_store_can_be_read_with_sqlite_and_numpy_alone(tmp_path: Path) -> None:
    directory = filled(tmp_path, range(40))
    catalogue = sqlite3.connect(f"file:{directory / 'catalogue.db'}?mode=ro", uri=True)
    catalogue.row_factory = sqlite3.Row
    (described,) = catalogue.execute("SELECT value FROM meta WHERE key = 'files'").fetchone()
    texts = [text for _, text in catalogue.execute("SELECT code, text FROM texts ORDER BY code")]
    segments = {
        number: columns_of(directory, name, json.loads(described))
        for number, name in catalogue.execute("SELECT number, name FROM segments")
    }
    rows = catalogue.execute("SELECT * FROM trajectories ORDER BY id").fetchall()
    catalogue.close()
    assert len(rows) == 40
    assert len(segments) > 1
    for key, row in enumerate(rows):
        check_rebuilt(rebuilt(segments[row["segment"]], row, texts), key)
        assert np.frombuffer(row["runs"], "<i8").tolist() == [0, row["steps"] * row["envs"]]


def test_a_checkpoint_can_be_read_with_json_and_numpy_alone(tmp_path: Path) -> None:
    save_ranks(tmp_path / "a", (5, 6))
    with opened(tmp_path / "store") as buffer:
        buffer.load_checkpoint(tmp_path / "a")
        for key in range(11, 60):
            buffer.add_trajectories([make(key)])
        buffer.save_checkpoint(tmp_path / "b")
    directory = tmp_path / "b" / "rank_0"
    part = json.loads((directory / "manifest.json").read_text())["manifest"]["parts"]["replay"]
    rows = np.fromfile(directory / part["index"], INDEX, part["trajectories"])
    count = 2 * (part["runs"] + part["chains"])
    pairs = np.fromfile(directory / part["index"], "<i8", count, offset=rows.nbytes).reshape(-1, 2)
    texts = json.loads((directory / part["index"]).read_bytes()[rows.nbytes + pairs.nbytes :])
    assert len(pairs) == part["runs"] + part["chains"] == rows["runs"].sum() + rows["chains"].sum()
    assert int(rows["transitions"].sum()) == int(pairs[: part["runs"], 1].sum())
    segments = [columns_of(directory, entry["name"], part["files"]) for entry in part["segments"]]
    assert len(rows) == 60
    assert len(segments) > 2
    for key, row in enumerate(rows):
        check_rebuilt(rebuilt(segments[row["segment"]], row, texts), key)


def test_a_reader_saves_what_it_sees_also_after_the_store_let_go_of_it(tmp_path: Path) -> None:
    with opened(tmp_path / "store", sample_window_size=5, retain="window") as writer:
        writer.add_trajectories([make(key) for key in range(30)], durable=True)
        reader = reading(tmp_path / "store", sample_window_size=10)
        found = ids_of(reader)
        for key in range(30, 80):
            writer.add_trajectories([make(key)])
        settle(writer)
        check_all(reader, found)
        reader.save_checkpoint(tmp_path / "checkpoint")
        reader.close()
    assert keys_of(loaded(tmp_path / "checkpoint")) == found


def test_a_store_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no trajectory store"):
        reading(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="is a file"):
        opened(tmp_path / "file")
    with pytest.raises(StorageError, match="no trajectory store"):
        Store(tmp_path, read_only=True)


def test_a_checkpoint_brings_back_what_its_caller_added(tmp_path: Path) -> None:
    buffer = in_memory(range(3))
    buffer.save_checkpoint(tmp_path / "a", extra={"step": 7, "name": ["x", None, 1.5]})
    assert in_memory(()).load_checkpoint(tmp_path / "a") == {"step": 7, "name": ["x", None, 1.5]}
    buffer.save_checkpoint(tmp_path / "b")
    assert in_memory(()).load_checkpoint(tmp_path / "b") == {}
    for extra in ({"x": float("nan")}, {"x": (1, 2)}, {"x": {1: 2}}, {"x": object()}):
        with pytest.raises(InvalidInput, match="JSON"):
            buffer.save_checkpoint(tmp_path / "c", extra=extra)
    assert not (tmp_path / "c" / "rank_0" / "manifest.json").exists()


def test_parts_that_are_loaded_together_are_of_one_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts were read one after another: a save in between gave one of the old and one of the new."""
    replay, demo = in_memory(range(4)), in_memory(range(2))
    replay.save_checkpoint(tmp_path, parts={"demo": demo})
    saves: list[list[int]] = []

    def open_and_save(directory: Path, part: str, files: Any) -> Any:
        found = open_contents(directory, part, files)
        if part == "replay" and len(saves) < 2:
            saves.append(replay.add_trajectories([make(4 + len(saves))]))
            demo.add_trajectories([make(2 + len(saves))])
            replay.save_checkpoint(tmp_path, parts={"demo": demo})
        return found

    monkeypatch.setattr("forebay.trajectory.restore.open_contents", open_and_save)
    found, found_demo = in_memory(()), in_memory(())
    found.load_checkpoint(tmp_path, parts={"demo": found_demo})
    assert len(saves) == 2
    assert (len(found), len(found_demo)) == (6, 4)


def test_a_byte_that_changed_on_disk_is_not_saved_under_a_new_checksum(tmp_path: Path) -> None:
    """Rows of the open segment were copied, and got the checksum of what they had become."""
    with opened(tmp_path / "store") as buffer:
        buffer.add_trajectories([make(key) for key in range(3)], durable=True)
        buffer.clear_cache()
        buffer.save_checkpoint(tmp_path / "saved")
        newest = max((tmp_path / "store" / "rank_0").glob("seg-*-0.col"), key=lambda path: path.stat().st_mtime_ns)
        with newest.open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([last[0] ^ 1]))
        with pytest.raises(DamagedData, match="does not have its checksum"):
            buffer.save_checkpoint(tmp_path / "saved")
    assert keys_of(loaded(tmp_path / "saved")) == [0, 1, 2]
