"""Merging and splitting directories of trajectories: what comes out, what is refused, what an interruption leaves."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.checkpoint.files import FileOps
from forebay.errors import CheckpointError, DamagedData, ForebayError, InvalidInput, StorageInUse
from forebay.trajectory import Trajectory, TrajectoryReplayBuffer
from forebay.trajectory.checkpoint import open_contents
from forebay.trajectory.spool import Spool
from forebay.trajectory.tools import merge, split
from tests.trajectory.directories import Interrupted, make, read, snapshot, tag_of, tags, write, write_ranks


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is synced when is not what is tested here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def flip(path: Path, position: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.unlink()  # a linked file stays as it is elsewhere
    path.write_bytes(data)


def loaded(path: Path, **options: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(sample_window_size=0, arrays="numpy")
    buffer.load_checkpoint(path, **options)
    return buffer


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


# --- merge --------------------------------------------------------------------------------------------


def test_ranks_are_merged_in_numeric_order_interleaved_by_id_and_numbered_anew(tmp_path: Path) -> None:
    write_ranks(tmp_path / "ranks", [2] * 11 + [3])
    outcome = merge(tmp_path / "ranks", tmp_path / "out", copy=True)
    expected = [100 * rank for rank in range(12)] + [100 * rank + 1 for rank in range(12)] + [1102]
    assert tags(tmp_path / "out") == dict(enumerate(expected))
    assert (outcome.trajectories, outcome.transitions, outcome.done, outcome.removed) == (25, 150, True, [])
    assert [Path(source).name for source in outcome.sources] == [f"rank_{rank}" for rank in range(12)]
    with loaded(tmp_path / "out") as buffer:
        assert len(buffer) == 25
        batch = buffer.sample(200)
        assert (batch["curr_obs"]["states"][:, 0] // 100 == batch["rewards"]).all()
        assert buffer.add_trajectories([make(9)]) == [25]


@pytest.mark.parametrize("kinds", [("checkpoint",), ("store",), ("checkpoint", "store")], ids="-".join)
@pytest.mark.parametrize("copy", [True, False], ids=["copy", "move"])
def test_sources_may_be_checkpoints_stores_or_both(tmp_path: Path, kinds: Any, copy: bool) -> None:
    write_ranks(tmp_path / "ranks", [4, 3, 5], kinds=kinds)
    before = snapshot(tmp_path / "ranks")
    ordered = sorted((k, 100 * rank + k) for rank, size in enumerate((4, 3, 5)) for k in range(size))
    merge(tmp_path / "ranks", tmp_path / "out", copy=copy)
    assert tags(tmp_path / "out") == dict(enumerate(tag for _, tag in ordered))
    assert snapshot(tmp_path / "ranks") == (before if copy else {})
    assert names(tmp_path) == ["out", "ranks"]
    if not copy:
        assert names(tmp_path / "ranks") == []


def test_sealed_segments_are_linked_and_copied_where_links_fail(tmp_path: Path) -> None:
    class Linkless(FileOps):
        def link(self, source: Path, target: Path) -> None:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    write_ranks(tmp_path / "ranks", [5, 5], kinds=("store",))
    merge(tmp_path / "ranks", tmp_path / "linked", copy=True)
    merge(tmp_path / "ranks", tmp_path / "copied", copy=True, files=Linkless())
    links = {
        name: max(file.stat().st_nlink for file in (tmp_path / name).glob("*.col")) for name in ("linked", "copied")
    }
    assert links == {"linked": 2, "copied": 1}
    assert tags(tmp_path / "linked") == tags(tmp_path / "copied")


def test_texts_of_ranks_with_other_tables_stay_with_their_trajectories(tmp_path: Path) -> None:
    for rank, order in enumerate(([0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 1, 2])):
        write(tmp_path / "ranks", [make(tag) for tag in order], rank=rank)
    merge(tmp_path / "ranks", tmp_path / "out", copy=False)
    merge([tmp_path / "out", write(tmp_path / "more", [make(7), make(5)])], tmp_path / "again", copy=False)
    assert list(tags(tmp_path / "again").values()) == [0, 7, 2, 5, 1, 0, 1, 1, 2, 1, 2, 0, 0, 2]
    with loaded(tmp_path / "again") as buffer:
        batch = buffer.sample(300)
    assert batch["curr_obs"]["task"] == [f"task {int(tag) % 3}" for tag in batch["rewards"]]
    assert len(open_contents(tmp_path / "again").texts) < 40, "equal tables are kept once"


def test_several_parts_are_merged_each(tmp_path: Path) -> None:
    for rank in range(2):
        with (
            TrajectoryReplayBuffer(rank=rank, arrays="numpy") as buffer,
            TrajectoryReplayBuffer(arrays="numpy") as demo,
        ):
            buffer.add_trajectories([make(rank), make(rank + 10)])
            demo.add_trajectories([Trajectory(rewards=np.full((2, 1), rank, np.float64))])
            buffer.save_checkpoint(tmp_path / "ranks", parts={"demo": demo})
    assert merge(tmp_path / "ranks", tmp_path / "out", copy=True).parts == {"demo": 2, "replay": 4}
    assert list(tags(tmp_path / "out").values()) == [0, 1, 10, 11]
    assert [found.rewards[0, 0] for found in read(tmp_path / "out", "demo").values()] == [0, 1]
    split(tmp_path / "out", tmp_path / "first", 1, copy=False)
    assert (len(read(tmp_path / "out", "demo")), list(tags(tmp_path / "out").values())) == (2, [1, 10, 11])


def test_ranks_without_a_trajectory_are_merged_too(tmp_path: Path) -> None:
    write_ranks(tmp_path / "ranks", [0, 2, 0])
    merge(tmp_path / "ranks", tmp_path / "out", copy=True)
    assert tags(tmp_path / "out") == {0: 100, 1: 101}
    write_ranks(tmp_path / "nothing", [0, 0])
    assert merge(tmp_path / "nothing", tmp_path / "empty", copy=False).trajectories == 0
    assert len(open_contents(tmp_path / "empty").listing) == 0


def test_five_ranks_become_three_by_loading_and_by_merging(tmp_path: Path) -> None:
    write_ranks(tmp_path / "ranks", [3, 1, 4, 1, 5], kinds=("checkpoint", "store"))
    everything = sorted(100 * rank + k for rank, size in enumerate((3, 1, 4, 1, 5)) for k in range(size))
    merge(tmp_path / "ranks", tmp_path / "out", copy=True)
    for path in (tmp_path / "ranks", tmp_path / "out"):
        shares = []
        for rank in range(3):
            with loaded(path, is_distributed=True, local_rank=rank, world_size=3) as buffer:
                ids = buffer.sample(100)["trajectory_id"]
                shares.append({tag_of(buffer.trajectory(number)) for number in np.unique(ids)})
        assert [len(share) for share in shares] == [5, 5, 4]
        assert sorted(tag for share in shares for tag in share) == everything


def test_a_source_that_is_no_longer_needed_keeps_files_of_others(tmp_path: Path) -> None:
    directory = write(tmp_path / "ranks", [make(0)])
    (directory / "notes.txt").write_text("mine")
    merge(directory, tmp_path / "out", copy=False)
    assert names(directory) == ["notes.txt"]


# --- differing fields ---------------------------------------------------------------------------------


def test_fields_that_differ_are_refused_by_name_filled_or_dropped(tmp_path: Path) -> None:
    extra: dict[str, Any] = {"prev_values": np.ones((3, 2, 1), np.float32), "versions": np.full((3, 2), 7)}
    write(tmp_path / "ranks", [make(0), make(1)], rank=0)
    write(tmp_path / "ranks", [make(100, **extra)], rank=1)
    with pytest.raises(InvalidInput, match=r"prev_values is F32 \[T, B, 1\] in .*rank_1 and missing in .*rank_0; fill"):
        merge(tmp_path / "ranks", tmp_path / "out", copy=True)
    with pytest.raises(InvalidInput, match="versions is I64"):
        merge(tmp_path / "ranks", tmp_path / "out", copy=True, drop=["prev_values"])
    before = read(tmp_path / "ranks" / "rank_1")[0]
    outcome = merge(tmp_path / "ranks", tmp_path / "out", copy=True, drop=["prev_values"], fill={"versions": "-3"})
    assert outcome.rewritten == 3
    found = read(tmp_path / "out")
    assert tags(tmp_path / "out") == {0: 0, 1: 100, 2: 1}
    assert all(trajectory.prev_values is None for trajectory in found.values())
    assert [np.unique(found[k].versions).tolist() for k in range(3)] == [[-3], [7], [-3]]
    outcome = merge(tmp_path / "ranks", tmp_path / "both", copy=True, fill={"prev_values": 0.5, "versions": "0"})
    assert outcome.rewritten == 2, "what has all fields is taken as it is"
    assert (read(tmp_path / "both")[0].prev_values == 0.5).all()
    assert (read(tmp_path / "both")[1].prev_values == before.prev_values).all()


def test_dropping_a_dict_drops_what_is_in_it_and_filling_text_is_text(tmp_path: Path) -> None:
    write(tmp_path / "ranks", [make(0)], rank=0)
    write(tmp_path / "ranks", [make(1, next_obs={}, curr_obs={"states": make(1).curr_obs["states"]})], rank=1)
    with pytest.raises(InvalidInput, match=r"curr_obs\.task is STRING \[T, B\] in .*rank_0 and missing in .*rank_1"):
        merge(tmp_path / "ranks", tmp_path / "out", copy=True, drop=["next_obs"])
    merge(tmp_path / "ranks", tmp_path / "out", copy=True, drop=["next_obs"], fill={"curr_obs.task": "5"})
    found = read(tmp_path / "out")
    assert [trajectory.curr_obs["task"][0] for trajectory in found.values()] == [["task 0"] * 2, ["5"] * 2]
    assert all(not trajectory.next_obs for trajectory in found.values())


def test_a_field_of_another_shape_can_only_be_dropped(tmp_path: Path) -> None:
    write(tmp_path / "ranks", [make(0)], rank=0)
    write(tmp_path / "ranks", [make(1, actions=np.zeros((3, 2, 5), np.float32))], rank=1)
    for fill in ({}, {"actions": "0"}):
        with pytest.raises(InvalidInput, match=r"actions is F32 \[T, B, 2\] in .* and F32 \[T, B, 5\] in .*dropped"):
            merge(tmp_path / "ranks", tmp_path / "out", copy=True, fill=fill)
    merge(tmp_path / "ranks", tmp_path / "out", copy=True, drop=["actions"])
    assert [trajectory.actions for trajectory in read(tmp_path / "out").values()] == [None, None]


@pytest.mark.parametrize(
    ("fill", "drop", "message"),
    [
        ({"acton": "0"}, [], "'acton' cannot be filled; there are actions"),
        ({}, ["acton"], "'acton' cannot be dropped; there are actions"),
        ({}, ["rewards"], "'rewards' cannot be dropped"),
        ({"actions": "0"}, ["actions"], "'actions' cannot be filled"),
        ({"versions": "1.5"}, [], "the fill of 'versions' is '1.5'"),
        ({"versions": "abc"}, [], "the fill of 'versions' is 'abc'"),
        ({"versions": str(2**63)}, [], "the fill of 'versions'"),
        ({"versions": "0", "dones": "2"}, [], "the fill of 'dones' is '2'"),
        ({"versions": "0", "curr_obs.task": 3}, [], "the fill of 'curr_obs.task' is 3; expected text"),
    ],
)
def test_fills_and_drops_that_make_no_sense_are_refused(
    tmp_path: Path, fill: dict[str, Any], drop: list[str], message: str
) -> None:
    write(tmp_path / "ranks", [make(0)], rank=0)
    write(tmp_path / "ranks", [make(1, versions=np.zeros((3, 2), np.int64))], rank=1)
    before = snapshot(tmp_path)
    with pytest.raises(InvalidInput, match=message):
        merge(tmp_path / "ranks", tmp_path / "out", copy=False, fill=fill, drop=drop)
    assert snapshot(tmp_path) == before


def test_what_is_rewritten_keeps_epochs_times_and_what_may_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spool, "segment_bytes", 500)
    valid = np.array([[True, True], [True, False], [True, False], [True, True]])
    epochs = make(5, 4, dones=np.zeros((6, 2), bool), next_obs={}, valid=valid)
    write(tmp_path / "ranks", [make(tag, 4, next_obs={}) for tag in range(9)] + [epochs])
    merge(tmp_path / "ranks", tmp_path / "out", copy=True, drop=["actions"])
    old, new = (open_contents(path).listing for path in (tmp_path / "ranks" / "rank_0", tmp_path / "out"))
    for name in ("epochs", "steps", "envs", "transitions", "reward", "longest", "added_at", "runs", "chains"):
        assert (old.rows[name] == new.rows[name]).all(), name
    assert new.rows["epochs"][-1] == 2
    assert (old.runs == new.runs).all()
    assert (old.chains == new.chains).all()
    assert len(open_contents(tmp_path / "out").segments) > 2


def test_the_same_fields_in_another_order_are_the_same_fields(tmp_path: Path) -> None:
    """Loading ranks whose observations came in another order returned one field's rows as another's."""
    values = {name: np.full((2, 1, 1), k, np.float32) for k, name in enumerate("abc")}
    for rank, order in enumerate(("abc", "cab")):
        obs = {name: values[name] for name in order}
        write(tmp_path / "ranks", [Trajectory(rewards=np.zeros((2, 1)), curr_obs=obs, next_obs=obs)], rank=rank)
    merge(tmp_path / "ranks", tmp_path / "out", copy=True)
    for path in (tmp_path / "ranks", tmp_path / "out"):
        with loaded(path) as buffer:
            batch = buffer.sample(20)
        assert [np.unique(batch["curr_obs"][name]).tolist() for name in "abc"] == [[0], [1], [2]]


# --- split --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("amount", [4, 5])
@pytest.mark.parametrize("kind", ["checkpoint", "store"])
def test_both_sides_of_a_split_are_complete(tmp_path: Path, kind: Any, amount: int) -> None:
    directory = write(tmp_path / "source", [make(tag) for tag in range(10)], kind=kind)
    outcome = split(tmp_path / "source", tmp_path / "first", amount, copy=False)
    assert (outcome.trajectories, outcome.remaining) == (amount, 10 - amount)
    assert tags(tmp_path / "first") == {k: k for k in range(amount)}
    assert tags(directory) == {k: k for k in range(amount, 10)}
    for path, size in ((tmp_path / "first", amount), (tmp_path / "source", 10 - amount)):
        with loaded(path) as buffer:
            assert len(buffer) == size
    if kind == "store":
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "source", arrays="numpy") as buffer:
            assert (len(buffer), buffer.add_trajectories([make(10)])) == (10 - amount, [10])
        assert list(tags(directory)) == list(range(amount, 11))
    merge([directory, tmp_path / "first"], tmp_path / "again", copy=False)
    assert list(tags(tmp_path / "again").values()) == list(range(11 if kind == "store" else 10))


@pytest.mark.parametrize("kind", ["checkpoint", "store"])
def test_a_split_with_copy_leaves_the_source_whole(tmp_path: Path, kind: Any) -> None:
    write(tmp_path / "source", [make(tag) for tag in range(5)], kind=kind)
    before = snapshot(tmp_path / "source")
    assert split(tmp_path / "source", tmp_path / "first", 2, copy=True).remaining == 5
    assert snapshot(tmp_path / "source") == before
    assert tags(tmp_path / "first") == {0: 0, 1: 1}


def test_a_split_frees_segments_that_only_the_other_side_has(tmp_path: Path) -> None:
    store = write(tmp_path / "store", [make(tag) for tag in range(10)], kind="store")
    merge(store, tmp_path / "checkpoint", copy=True)
    for directory in (store, tmp_path / "checkpoint"):
        before = len(list(directory.glob("*.col")))
        split(directory, directory.with_name("first"), 9, copy=False)
        assert len(list(directory.glob("*.col"))) < before
        assert tags(directory) == {9: 9}


def test_the_random_sequence_of_the_source_goes_on_after_a_split(tmp_path: Path) -> None:
    directory = write(tmp_path / "source", [make(tag) for tag in range(5)])
    before = open_contents(directory).random
    split(directory, tmp_path / "first", 2, copy=False)
    assert before is not None
    assert open_contents(directory).random == before
    assert open_contents(tmp_path / "first").random is None


@pytest.mark.parametrize("amount", [0, -1, 5, 6])
def test_a_split_that_leaves_one_side_empty_is_refused(tmp_path: Path, amount: int) -> None:
    write(tmp_path / "source", [make(tag) for tag in range(5)])
    before = snapshot(tmp_path)
    with pytest.raises(InvalidInput, match=f"{amount} trajectories were to be split off; there are 5: expected 1 to 4"):
        split(tmp_path / "source", tmp_path / "first", amount, copy=False)
    assert snapshot(tmp_path) == before


def test_a_split_of_several_ranks_is_refused(tmp_path: Path) -> None:
    write_ranks(tmp_path / "ranks", [2, 2])
    with pytest.raises(InvalidInput, match="2 directories, of as many ranks; merge them first"):
        split(tmp_path / "ranks", tmp_path / "first", 1, copy=False)


# --- what is refused ----------------------------------------------------------------------------------


def test_an_existing_target_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "source", [make(0), make(1)])
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = snapshot(tmp_path)
    for name in ("empty", "file", "dangling", "source"):
        with pytest.raises(InvalidInput, match="exists already"):
            merge(tmp_path / "source", tmp_path / name, copy=False)
        with pytest.raises(InvalidInput, match="exists already"):
            split(tmp_path / "source", tmp_path / name, 1, copy=False)
    with pytest.raises(InvalidInput, match="is a file"):
        merge(tmp_path / "source", tmp_path / "file" / "below", copy=False)
    assert snapshot(tmp_path) == before


def test_a_store_that_is_written_to_is_refused(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store", arrays="numpy") as buffer:
        buffer.add_trajectories([make(0), make(1)], durable=True)
        for dry_run in (True, False):
            with pytest.raises(StorageInUse, match="open for writing by this process"):
                merge(tmp_path / "store", tmp_path / "out", copy=True, dry_run=dry_run)
            with pytest.raises(StorageInUse, match="open for writing by this process"):
                split(tmp_path / "store", tmp_path / "out", 1, copy=True, dry_run=dry_run)
    assert merge(tmp_path / "store", tmp_path / "out", copy=True).trajectories == 2


def test_what_would_be_there_twice_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path / "source", [make(tag) for tag in range(6)], kind="store")
    merge(directory, tmp_path / "saved", copy=True)
    with pytest.raises(InvalidInput, match="was named twice"):
        merge([directory, tmp_path / "source"], tmp_path / "out", copy=True)
    with pytest.raises(InvalidInput, match=r"trajectory 0 of .* and trajectory 0 of .* are the same"):
        merge([directory, tmp_path / "saved"], tmp_path / "out", copy=True)
    with pytest.raises(InvalidInput, match="are the same"):
        merge([directory, tmp_path / "saved"], tmp_path / "out", copy=True, dry_run=True)


def test_segments_of_one_name_in_different_files_are_kept_apart(tmp_path: Path) -> None:
    write(tmp_path / "source", [make(tag) for tag in range(6)])
    split(tmp_path / "source", tmp_path / "first", 3, copy=False)
    shutil.copytree(tmp_path / "first", tmp_path / "copied")
    flip(next((tmp_path / "source" / "rank_0").glob("*-0.col")))  # a row of trajectory 0, which is not its own any more
    merge([tmp_path / "source", tmp_path / "copied"], tmp_path / "out", copy=False)
    assert tags(tmp_path / "out") == {k: k for k in range(6)}


def test_what_has_no_trajectories_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="there"):
            merge(path, tmp_path / "out", copy=False)
    write_ranks(tmp_path / "ranks", [1, 1, 1])
    shutil.rmtree(tmp_path / "ranks" / "rank_1")
    (tmp_path / "ranks" / "rank_1").mkdir()
    with pytest.raises(CheckpointError, match=r"rank_1 has no trajectories.* not complete"):
        merge(tmp_path / "ranks", tmp_path / "out", copy=False)
    with pytest.raises(InvalidInput, match="no directory was named"):
        merge([], tmp_path / "out", copy=False)


def test_a_checkpoint_is_not_saved_into_a_store(tmp_path: Path) -> None:
    """Its segments were taken for leftovers of a save, and removed."""
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, arrays="numpy") as buffer:
        buffer.add_trajectories([make(0)], durable=True)
        before = names(tmp_path / "rank_0")
        with pytest.raises(InvalidInput, match="is a store of trajectories; save a checkpoint of it to another"):
            buffer.save_checkpoint(tmp_path)
        assert names(tmp_path / "rank_0") == before
    assert tags(tmp_path / "rank_0") == {0: 0}


# --- damage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["checkpoint", "store"])
@pytest.mark.parametrize("drop", [[], ["actions"]], ids=["linked", "rewritten"])
def test_damage_is_found_before_anything_is_changed(tmp_path: Path, kind: Any, drop: list[str]) -> None:
    write_ranks(tmp_path / "ranks", [3, 9], kinds=(kind,))
    rank = tmp_path / "ranks" / "rank_1"
    contents = open_contents(rank)
    last = contents.segments[int(contents.listing.rows["segment"][-1])]  # of a store the one that still grows
    assert last.sealed is (kind == "checkpoint")
    flip(rank / f"seg-{last.name}-0.col", -3)
    before = snapshot(tmp_path)
    for copy in (True, False):
        with pytest.raises(DamagedData, match=r"trajectory 8 of .*rank_1"):
            merge(tmp_path / "ranks", tmp_path / "out", copy=copy, drop=drop)
    if not drop:
        with pytest.raises(DamagedData, match=r"trajectory 8 of .*rank_1"):
            merge([rank], tmp_path / "out", copy=False)
    assert snapshot(tmp_path) == before
    outcome = merge(tmp_path / "ranks", tmp_path / "out", copy=True, drop=["dones", *drop], skip_damaged=True)
    assert (outcome.trajectories, outcome.left_out) == (11, 1)
    assert [found.rewards[0, 0] for found in read(tmp_path / "out").values()][-1] == 107
    with pytest.raises(InvalidInput, match="without copy would remove"):
        merge(tmp_path / "ranks", tmp_path / "more", copy=False, skip_damaged=True)


def test_a_store_that_lost_a_file_is_not_moved(tmp_path: Path) -> None:
    directory = write(tmp_path / "store", [make(tag) for tag in range(9)], kind="store")
    first = open_contents(directory).segments[1]
    (directory / f"seg-{first.name}-0.col").unlink()
    with pytest.raises(DamagedData, match=r"trajectories of .* are not whole"):
        merge(directory, tmp_path / "out", copy=False)
    with pytest.raises(DamagedData, match=r"trajectories of .* are not whole"):
        split(directory, tmp_path / "out", 1, copy=False)
    outcome = merge(directory, tmp_path / "out", copy=True, skip_damaged=True)
    assert outcome.left_out > 0
    assert outcome.left_out + outcome.trajectories == 9


# --- what others do meanwhile -------------------------------------------------------------------------


class Overtaken(FileOps):
    """Somebody else does something once the result is in its place."""

    def __init__(self, target: Path, action: Callable[[], object]) -> None:
        self._target, self._action = target, action

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        if target == self._target:
            self._action()


def test_a_source_that_was_saved_to_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    runs: dict[str, Callable[..., object]] = {"merge": merge, "split": partial(split, count=1)}
    for name, run in runs.items():
        directory, target = write(tmp_path / name, [make(0), make(1)]), tmp_path / f"{name} out"
        files = Overtaken(target, partial(write, tmp_path / name, [make(7)]))
        with pytest.raises(CheckpointError, match=r"out is complete, but the source could not be changed: .*meanwhile"):
            run(directory, target, copy=False, files=files)
        assert tags(directory) == {0: 7}
        assert len(tags(target)) == (2 if name == "merge" else 1)


def test_a_target_that_somebody_else_made_meanwhile_is_kept(tmp_path: Path) -> None:
    class Late(FileOps):
        def sync(self, descriptor: int) -> None:
            (tmp_path / "out").mkdir(exist_ok=True)

    write(tmp_path / "source", [make(0), make(1)])
    before = snapshot(tmp_path)
    with pytest.raises(InvalidInput, match="exists already"):
        merge(tmp_path / "source", tmp_path / "out", copy=False, files=Late())
    assert snapshot(tmp_path) == before
    assert names(tmp_path) == ["out", "source"]


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    write(tmp_path / "source", [make(0), make(1)])
    left = tmp_path / ".out-0123456789abcdef.tmp" / "new"
    left.mkdir(parents=True)
    (left / "seg-0123456789abcdef-0.col").write_bytes(b"half")
    (tmp_path / ".other-0123456789abcdef.tmp").mkdir()
    merge(tmp_path / "source", tmp_path / "out", copy=True)
    assert names(tmp_path) == [".other-0123456789abcdef.tmp", "out", "source"]


# --- dry runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["checkpoint", "store"])
def test_a_dry_run_says_what_a_run_would_and_touches_nothing(tmp_path: Path, kind: Any) -> None:
    write_ranks(tmp_path / "ranks", [3, 4], kinds=(kind,))
    before, there = snapshot(tmp_path), names(tmp_path)
    planned = merge(tmp_path / "ranks", tmp_path / "a" / "out", copy=False, drop=["actions"], dry_run=True)
    parted = split(tmp_path / "ranks" / "rank_0", tmp_path / "first", 1, copy=False, dry_run=True)
    assert (snapshot(tmp_path), names(tmp_path)) == (before, there)
    assert (planned.done, planned.rewritten, parted.remaining) == (False, 7, 2)
    assert len(planned.removed) == 2
    done = merge(tmp_path / "ranks", tmp_path / "a" / "out", copy=False, drop=["actions"])
    assert {name: getattr(done, name) for name in done.__struct_fields__ if name != "done"} == {
        name: getattr(planned, name) for name in planned.__struct_fields__ if name != "done"
    }


# --- interrupted --------------------------------------------------------------------------------------


def fails(code: int) -> Callable[[], BaseException]:
    return lambda: OSError(code, os.strerror(code))


WAYS: dict[str, Callable[[int | None], Interrupted]] = {
    "disk full once": lambda at: Interrupted(at, fails(errno.ENOSPC), after=False, for_good=False),
    "disk failing": lambda at: Interrupted(at, fails(errno.EIO), after=False, for_good=True),
    "Ctrl-C before": lambda at: Interrupted(at, KeyboardInterrupt, after=False, for_good=False),
    "Ctrl-C after": lambda at: Interrupted(at, KeyboardInterrupt, after=True, for_good=False),
}


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("drop", [[], ["dones"]], ids=["linked", "rewritten"])
def test_whatever_interrupts_a_merge_each_side_is_complete_or_untouched(
    tmp_path: Path, way: str, drop: list[str], stride: int
) -> None:
    write_ranks(tmp_path / "template", [2, 2], kinds=("checkpoint", "store"))
    everything = {0: 0, 1: 100, 2: 1, 3: 101}
    outcomes = set()
    for n in count(0, stride * (2 if drop else 1)):
        place = tmp_path / "place"
        shutil.copytree(tmp_path / "template", place / "ranks")
        ranks = {rank: snapshot(place / "ranks" / rank) for rank in ("rank_0", "rank_1")}
        files = WAYS[way](n)
        try:
            merge(place / "ranks", place / "out", copy=False, drop=drop, files=files)
            failed = False
        except (ForebayError, KeyboardInterrupt):
            failed = True
        complete = (place / "out").exists()
        if complete:
            assert tags(place / "out") == everything
        elif way != "disk failing":
            assert [entry.name for entry in place.iterdir()] == ["ranks"], "something was left behind"
        for rank, before in ranks.items():
            left = snapshot(place / "ranks" / rank) if (place / "ranks" / rank).exists() else {}
            is_there = any(name in left for name in ("manifest.json", "catalogue.db"))
            assert left == before if is_there else complete, f"{rank} is neither whole nor gone ({n})"
            outcomes.add((complete, is_there))
        shutil.rmtree(place)
        if not failed and len(files.calls) <= n:
            break
    assert {(False, True), (True, False)} <= outcomes
    assert (False, False) not in outcomes


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("kind", ["checkpoint", "store"])
def test_whatever_interrupts_a_split_no_trajectory_is_on_neither_side(
    tmp_path: Path, way: str, kind: Any, stride: int
) -> None:
    write(tmp_path / "template", [make(tag) for tag in range(5)], kind=kind)
    outcomes = set()
    for n in count(0, stride):
        place = tmp_path / "place"
        shutil.copytree(tmp_path / "template", place / "source")
        before = snapshot(place / "source")
        files = WAYS[way](n)
        try:
            split(place / "source", place / "first", 2, copy=False, files=files)
            failed = False
        except (ForebayError, KeyboardInterrupt):
            failed = True
        left = tags(place / "source" / "rank_0")
        complete = (place / "first").exists()
        assert left in ({k: k for k in range(5)}, {k: k for k in range(2, 5)})
        if complete:
            assert tags(place / "first") == {0: 0, 1: 1}
        else:
            assert snapshot(place / "source") == before
            assert way == "disk failing" or [entry.name for entry in place.iterdir()] == ["source"]
        outcomes.add((complete, len(left)))
        shutil.rmtree(place)
        if not failed and len(files.calls) <= n:
            break
    assert {(False, 5), (True, 3)} <= outcomes
    assert (False, 3) not in outcomes
