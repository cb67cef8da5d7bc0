"""Sampling: uniform over what may be drawn, exactly as many as asked for, the same rows wherever they are kept."""

from __future__ import annotations

import gc
import mmap
import random
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.checkpoint.files import FileOps
from forebay.errors import BufferClosed, InvalidConfig, InvalidInput, InvalidTrajectory, WaitTimeout
from forebay.trajectory import MixedReplay, TrajectoryReplayBuffer
from forebay.trajectory.pool import BlockPool
from forebay.trajectory.schema import Layout
from tests.processes import HANG_S, finished
from tests.trajectory.tagged import (
    Made,
    assert_rows,
    assert_same,
    assert_sequences,
    flat,
    made_at_random,
    make,
    plain,
    runs_of,
    to_torch,
)

SEEDS = st.integers(0, 2**32 - 1)


class TinySegments(TrajectoryReplayBuffer):
    _segment_bytes = 3000  # three rows or so


def small(number: int = 0, steps: int = 4, envs: int = 2, **more: Any) -> dict[str, Any]:
    """A trajectory whose rewards say which cell they are of."""
    cells = number * 1000 + np.arange(steps * envs, dtype=np.float64).reshape(steps, envs)
    return {"rewards": cells, **more}


def several(seed: int, count: int, *, text: bool = False) -> dict[int, Made]:
    generator = np.random.default_rng(seed)
    return {k: made_at_random(k, generator, text=text) for k in range(count)}


def assert_uniform(counts: Mapping[Any, int], cells: Iterable[Any]) -> None:
    """Chi-square: far from what chance could do (six sigmas), if it is not uniform."""
    cells = list(cells)
    assert set(counts) <= set(cells)
    expected = sum(counts.values()) / len(cells)
    assert expected >= 50, "too few draws to tell"
    statistic = sum((counts.get(cell, 0) - expected) ** 2 / expected for cell in cells)
    freedom = len(cells) - 1
    assert abs(statistic - freedom) < 6 * (2 * freedom) ** 0.5 + 6


def assert_equal_batches(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    mine, theirs = flat(one), flat(other)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert_same(plain(mine[name]), plain(theirs[name]), name)


# --- which rows -----------------------------------------------------------------------------------------


def test_every_valid_transition_is_as_likely_as_any_other() -> None:
    """Not every trajectory: a long one is drawn from more often."""
    made = several(1, 12)
    cells = [(k, t, b) for k, one in made.items() for t, b in one.valid]
    assert any(len(one.valid) < one.steps * one.envs for one in made.values())
    with TrajectoryReplayBuffer(seed=11) as buffer:
        buffer.add_trajectories([one.given for one in made.values()])
        assert buffer.num_transitions == len(cells)
        counts: Counter[Any] = Counter()
        for _ in range(10):
            batch = buffer.sample(4000)
            counts.update(zip(*(batch[name].tolist() for name in ("trajectory_id", "step", "env")), strict=True))
    assert_uniform(counts, cells)


def test_draws_with_replacement_and_exactly_as_many_as_asked_for() -> None:
    """The reference gives 8 rows when 100 of 8 are asked for."""
    made = make(0)
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([made.given])
        for count in (1, 7, 8, 9, 100, 5000):
            batch = buffer.sample(count)
            assert {len(leaf) for leaf in flat(batch).values()} == {count}
        assert_rows(batch, {0: made})


def test_without_replacement_nothing_is_drawn_twice_in_a_call() -> None:
    made = several(3, 5)
    cells = {(k, t, b) for k, one in made.items() for t, b in one.valid}
    with TrajectoryReplayBuffer(seed=5) as buffer:
        buffer.add_trajectories([one.given for one in made.values()])
        for count in (1, 2, len(cells) - 1, len(cells)):
            rows = assert_rows(buffer.sample(count, replace=False), made, newest=4)
            assert len(set(rows)) == count
        assert set(rows) == cells
        with pytest.raises(InvalidInput, match=f"{len(cells) + 1} different rows .* has {len(cells)}"):
            buffer.sample(len(cells) + 1, replace=False)
        counts: Counter[Any] = Counter()
        first: Counter[Any] = Counter()
        for _ in range(1500):
            batch = buffer.sample(8, replace=False)
            drawn = list(zip(*(batch[name].tolist() for name in ("trajectory_id", "step", "env")), strict=True))
            counts.update(drawn)
            first.update(drawn[:1])
    assert_uniform(counts, cells)
    assert set(first) <= cells
    assert max(first.values()) < 5 * 1500 / len(cells) + 20  # the order is drawn, too


def test_rows_are_what_philox_says_in_the_order_in_which_it_says_it() -> None:
    """The rows of the window, trajectory after trajectory and env after env, are numbered; numpy draws the numbers."""
    made = several(4, 6)
    rows = [
        (k, t, b) for k, one in made.items() for b in range(one.envs) for t in range(one.steps) if (t, b) in one.valid
    ]
    numbers = np.random.Generator(np.random.Philox(key=[77, 3])).integers(0, len(rows), 50)
    with TrajectoryReplayBuffer(seed=77, rank=3) as buffer:
        for one in made.values():
            buffer.add_trajectories([one.given])
        assert assert_rows(buffer.sample(50), made) == [rows[k] for k in numbers]


@pytest.mark.parametrize("seed", [0, 1, 1234, 2**32, 2**63, 2**64 - 1])
def test_seed_and_rank_decide_what_is_drawn(seed: int) -> None:
    """Of seeds above 2**63 many used to be the same one."""

    def drawn(seed: int, rank: int) -> list[int]:
        with TrajectoryReplayBuffer(seed=seed, rank=rank) as buffer:
            buffer.add_trajectories([small(steps=50)])
            found: list[int] = buffer.sample(20)["step"].tolist()
            return found

    same = drawn(seed, 0)
    assert same == drawn(seed, 0)
    others = [drawn(seed - 1 if seed else 5, 0), drawn(seed, 1), drawn(seed, 2), drawn(1 if seed == 0 else 0, seed)]
    assert len({tuple(found) for found in [same, *others]}) == 5


@pytest.mark.parametrize("wrong", [-1, 2**64, 1.5, True, "1", None])
def test_seeds_are_whole_numbers(wrong: Any) -> None:
    with pytest.raises(InvalidInput):
        TrajectoryReplayBuffer(seed=wrong)
    with pytest.raises(InvalidInput):
        TrajectoryReplayBuffer(rank=wrong)


def test_no_global_random_state_is_touched(tmp_path: Path) -> None:
    def states() -> tuple[Any, ...]:
        name, keys, *rest = list[Any](np.random.get_state())
        return name, keys.tolist(), rest, random.getstate(), torch.get_rng_state().tolist()

    before = states()
    made = several(1, 3)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "a") as buffer:
        buffer.add_trajectories([one.given for one in made.values()], durable=True)
        buffer.sample(20)
        buffer.sample(5, sequence_length=1, replace=False)
        buffer.save_checkpoint(tmp_path / "b")
        buffer.load_checkpoint(tmp_path / "b")
        MixedReplay({buffer: 1.0}).sample(9, shuffle=True)
        buffer.clear()
    assert states() == before


@pytest.mark.parametrize("wrong", [0, -3, 1.5, True, "4", None])
def test_how_many_is_a_whole_number_from_one(wrong: Any) -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([small()])
        before = buffer.get_stats()["transitions"]
        with pytest.raises(InvalidInput, match="num_chunks"):
            buffer.sample(wrong)
        if wrong is not None:
            with pytest.raises(InvalidInput, match="sequence_length"):
                buffer.sample(2, sequence_length=wrong)
        assert buffer.sample(np.int64(3))["step"].shape == (3,)  # type: ignore[arg-type]
        assert buffer.get_stats()["transitions"] == before


def test_an_empty_buffer_says_that_it_is() -> None:
    with TrajectoryReplayBuffer() as buffer:
        with pytest.raises(InvalidInput, match=r"7 transitions were asked for; the buffer is empty"):
            buffer.sample(7)
        buffer.add_trajectories([small()])
        buffer.clear()
        with pytest.raises(InvalidInput, match=r"7 transitions .* there are none: the window has 0 trajectories"):
            buffer.sample(7)
        with pytest.raises(InvalidInput, match=r"7 runs of 2 continuing steps .* none"):
            buffer.sample(7, sequence_length=2)


def test_what_is_not_valid_is_stored_and_never_drawn() -> None:
    made = {
        0: make(0, invalid=[(t, 0) for t in range(4)]),
        1: make(1, invalid=[(t, b) for t in range(4) for b in (0, 1)]),
    }
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([made[1].given])
        with pytest.raises(InvalidInput, match="1 trajectories with 0 transitions"):
            buffer.sample(1)
        assert len(buffer) == 1
        buffer.add_trajectories([made[0].given, made[1].given])
        known = {0: made[1], 1: made[0], 2: made[1]}
        rows = assert_rows(buffer.sample(200), known, newest=2)
        assert {b for _, _, b in rows} == {1}
        back = buffer.trajectory(2)
        assert not back.valid.any()  # type: ignore[union-attr]
        assert_same(plain(back.actions), made[1].want["actions"], "actions")


# --- sequences ------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, count=st.integers(1, 5), length=st.integers(1, 5))
def test_sequences_are_continuing_steps_from_every_start(seed: int, count: int, length: int) -> None:
    made = several(seed, count)
    starts = {(k, t, b) for k, one in made.items() for t, b in runs_of(one, length)}
    with TrajectoryReplayBuffer(seed=seed) as buffer:
        buffer.add_trajectories([one.given for one in made.values()])
        if not starts:
            with pytest.raises(InvalidInput, match=f"runs of {length} continuing steps"):
                buffer.sample(3, sequence_length=length)
            return
        batch = buffer.sample(len(starts), sequence_length=length, replace=False)
        assert batch["step"].shape == (len(starts), length)
        assert batch["curr_obs"]["image"].shape == (len(starts), length, 14, 14, 3)
        rows = assert_rows(batch, made, newest=count - 1)
        assert_sequences(rows, made, length)
        assert set(rows[::length]) == starts
        rows = assert_rows(buffer.sample(40, sequence_length=length), made, newest=count - 1)
        assert_sequences(rows, made, length)
        with pytest.raises(InvalidInput, match=str(len(starts))):
            buffer.sample(len(starts) + 1, sequence_length=length, replace=False)


def test_what_ends_a_sequence() -> None:
    """A done step, a stop without a reset, the end of an epoch, a gap, a step that is not valid; and nothing else."""
    made = make(
        0, steps=16, envs=1, epochs=2, extra=["dones"], ends=[(1, 0)], stops=[(4, 0)], gaps=[(10, 0)], invalid=[(13, 0)]
    )
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([made.given])
        batch = buffer.sample(400, sequence_length=2)
        assert {tuple(pair) for pair in batch["step"].tolist()} == {
            (0, 1), (2, 3), (3, 4), (5, 6), (6, 7), (8, 9), (9, 10), (11, 12), (14, 15)
        }  # fmt: skip
        threes = buffer.sample(100, sequence_length=3)["step"].tolist()
        assert {tuple(three) for three in threes} == {(2, 3, 4), (5, 6, 7), (8, 9, 10)}
        with pytest.raises(InvalidInput, match=r"5 runs of 4 continuing steps were asked for, and there are none"):
            buffer.sample(5, sequence_length=4)


@pytest.mark.parametrize("flag", ["dones", "terminations", "truncations"])
@pytest.mark.parametrize("kind", ["bool", "uint8", "float32", "bfloat16"])
def test_each_flag_alone_ends_a_sequence(flag: str, kind: str) -> None:
    """Also one of the primitive steps of an action chunk, and also as a number."""
    flags = torch.zeros(6, 2, 3)
    flags[2, 1, 0] = flags[4, 0, 2] = 1
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([small(0, 6, 2, **{flag: flags.to(getattr(torch, kind))})])
        batch = buffer.sample(300, sequence_length=2)
        pairs = {(t, b) for (t, _), (b, _) in zip(batch["step"].tolist(), batch["env"].tolist(), strict=True)}
    assert pairs == {(t, b) for t in range(5) for b in range(2)} - {(2, 1), (4, 0)}


def test_a_run_never_goes_on_from_one_environment_into_the_next() -> None:
    """Their rows are neighbours, and without observations nothing else tells them apart."""
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([small(0, 3, 4), small(1, 3, 4)])
        batch = buffer.sample(300, sequence_length=3)
        assert (batch["step"] == torch.tensor([0, 1, 2])).all()
        assert (batch["env"] == batch["env"][:, :1]).all()
        with pytest.raises(InvalidInput, match="runs of 4"):
            buffer.sample(1, sequence_length=4)


def test_sequences_are_uniform_over_starts() -> None:
    made = several(8, 14)
    starts = [(k, t, b) for k, one in made.items() for t, b in runs_of(one, 2)]
    with TrajectoryReplayBuffer(seed=2) as buffer:
        buffer.add_trajectories([one.given for one in made.values()])
        batch = buffer.sample(100 * len(starts), sequence_length=2)
    first = (batch[name][:, 0].tolist() for name in ("trajectory_id", "step", "env"))
    assert_uniform(Counter(zip(*first, strict=True)), starts)


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2)), min_size=5, max_size=40),
    window=st.integers(1, 4),
    seed=SEEDS,
)
def test_sums_of_many_lengths_follow_a_moving_window(steps: list[tuple[int, int]], window: int, seed: int) -> None:
    """Sums by length are kept and brought up to date when they are used, some of them long after."""
    generator = np.random.default_rng(seed)
    made: dict[int, Made] = {}
    with TrajectoryReplayBuffer(sample_window_size=window) as buffer:
        for length, count in steps:
            for _ in range(count):
                one = made_at_random(len(made), generator, most_steps=14, text=False)
                made[buffer.add_trajectories([one.given])[0]] = one
            live = {k: made[k] for k in list(made)[-window:]}
            if length == 0:
                starts = [(k, t, b) for k, one in live.items() for t, b in one.valid]
            else:
                starts = [(k, t, b) for k, one in live.items() for t, b in runs_of(one, length)]
            if not starts:
                with pytest.raises(InvalidInput):
                    buffer.sample(1, sequence_length=length or None)
                continue
            batch = buffer.sample(len(starts), sequence_length=length or None, replace=False)
            rows = assert_rows(batch, live, newest=len(made) - 1)
            assert sorted(rows[:: length or 1]) == sorted(starts)
        buffer._check()


# --- the same from everywhere ---------------------------------------------------------------------------


STORED = [
    {"cache_size": 0},
    {"cache_size": 1},
    {"cache_size": 5},
    {"cache_size": 100},
    {"enable_cache": False, "cache_size": 7},
]


@pytest.mark.parametrize("options", STORED, ids=repr)
def test_batches_do_not_depend_on_where_rows_are(options: dict[str, Any], tmp_path: Path) -> None:
    generator = np.random.default_rng(6)
    made: dict[int, Made] = {}
    with (
        TrajectoryReplayBuffer(seed=9, sample_window_size=7) as memory,
        TinySegments(seed=9, sample_window_size=7, auto_save=True, auto_save_path=tmp_path, **options) as stored,
    ):
        for turn in range(14):
            some = [made_at_random(len(made) + k, generator) for k in range(1 + turn % 3)]
            ids = memory.add_trajectories([one.given for one in some])
            assert stored.add_trajectories([one.given for one in some], durable=turn % 4 == 0) == ids
            made.update(zip(ids, some, strict=True))
            if turn % 5 == 3:
                stored.flush()
                stored.clear_cache()
                memory.clear_cache()
            for arguments in ({}, {"replace": False}, {"sequence_length": 2}):
                count = 3 if "replace" in arguments else 20
                one, other = memory.sample(count, **arguments), stored.sample(count, **arguments)
                assert_equal_batches(one, other)
                assert_rows(other, made, newest=max(made))
            stored._check()
        assert (len(memory), memory.num_transitions) == (len(stored), stored.num_transitions)
        live = [buffer.get_stats()["live_bytes"] for buffer in (memory, stored)]
        assert live[0] == live[1]
    # Opened again, it has the same window; a buffer that starts with the same draws the same of it.
    with (
        TrajectoryReplayBuffer(seed=21, sample_window_size=7) as memory,
        TinySegments(seed=21, sample_window_size=7, auto_save=True, auto_save_path=tmp_path, **options) as again,
        TrajectoryReplayBuffer(seed=21, sample_window_size=7, auto_save_path=tmp_path, read_only=True) as looker,
    ):
        memory.add_trajectories([made[k].given for k in sorted(made)])
        for _ in range(3):
            batches = [buffer.sample(50) for buffer in (memory, again, looker)]
            assert_equal_batches(batches[0], batches[1])
            assert_equal_batches(batches[0], batches[2])
            assert_rows(batches[1], made, newest=max(made))


def test_saving_and_loading_again_and_again_keeps_texts_as_they_are(tmp_path: Path) -> None:
    """Each load used to add all texts once more, so that they doubled with every round."""
    made = {k: make(k) for k in range(3)}
    with TrajectoryReplayBuffer() as demo:
        demo.add_trajectories([one.given for one in made.values()])
        demo.save_checkpoint(tmp_path / "demo")
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
        buffer.add_trajectories([make(9, weights="other").given])
        buffer.load_checkpoint(tmp_path / "demo")
        assert_rows(buffer.sample(60), made)
        count = len(buffer.texts())
        for turn in range(4):
            buffer.save_checkpoint(tmp_path / str(turn))
            buffer.load_checkpoint(tmp_path / str(turn))
            buffer.load_checkpoint(tmp_path / "demo")
            assert_rows(buffer.sample(60), made)
            assert buffer.trajectory(0).curr_obs["task"] == made[0].want["curr_obs.task"].tolist()
        assert len(buffer.texts()) == count
    counts = []
    for turn in range(4):  # a run that is resumed again and again, in its own directory
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "store") as buffer:
            buffer.load_checkpoint(tmp_path / str(turn + 3))
            new = buffer.add_trajectories([make(turn + 20, text=True).given])[0]
            made[new] = make(turn + 20)
            assert_rows(buffer.sample(60), made)
            buffer.save_checkpoint(tmp_path / str(turn + 4))
            counts.append(len(buffer.texts()))
    assert max(np.diff(counts)) < 30


def test_without_torch_the_same_is_drawn() -> None:
    program = """
import sys
sys.modules["torch"] = None
import numpy as np
from forebay.trajectory import MixedReplay, TrajectoryReplayBuffer
with TrajectoryReplayBuffer(seed=5, rank=2) as buffer:
    buffer.add_trajectories([{"rewards": np.zeros((30, 2)), "curr_obs": {"x": ["a", "b"]}}])
    batch = MixedReplay({buffer: 1}).sample(20)
    print(type(batch["step"]).__name__, batch["step"].tolist(), batch["curr_obs"]["x"])
    try:
        TrajectoryReplayBuffer(arrays="torch")
    except ValueError as error:
        print(error)
"""
    found = finished("-c", program)
    assert found.returncode == 0, found.stderr
    with TrajectoryReplayBuffer(seed=5, rank=2) as buffer:
        buffer.add_trajectories([{"rewards": np.zeros((30, 2)), "curr_obs": {"x": ["a", "b"]}}])
        batch = buffer.sample(20)
    first, second = found.stdout.splitlines()
    assert first == f"ndarray {batch['step'].tolist()} {batch['curr_obs']['x']}"
    assert "forebay[torch]" in second


def test_torch_and_numpy_draw_the_same() -> None:
    made = several(2, 4, text=True)
    with TrajectoryReplayBuffer(arrays="torch") as one, TrajectoryReplayBuffer(arrays="numpy") as other:
        for buffer, change in ((one, dict), (other, to_torch)):
            buffer.add_trajectories([change(each.given) for each in made.values()])
        tensors, arrays = one.sample(30), other.sample(30)
        assert_equal_batches(tensors, arrays)
        assert all(isinstance(leaf, (torch.Tensor, list)) for leaf in flat(tensors).values())
        assert all(isinstance(leaf, (np.ndarray, list)) for leaf in flat(arrays).values())
        assert (one.arrays, other.arrays) == ("torch", "numpy")
    with TrajectoryReplayBuffer() as buffer:
        assert buffer.arrays == "torch"
    with pytest.raises(InvalidConfig, match="'jax'"):
        TrajectoryReplayBuffer(arrays="jax")  # type: ignore[arg-type]


# --- the window -----------------------------------------------------------------------------------------


def test_the_newest_trajectories_are_sampled_and_know_their_age() -> None:
    made: dict[int, Made] = {}
    with TrajectoryReplayBuffer(sample_window_size=3) as buffer:
        for k in range(10):
            made[k] = make(k, steps=2 + k % 3, text=False)
            assert buffer.add_trajectories([made[k].given]) == [k]
            live = {n: made[n] for n in range(max(0, k - 2), k + 1)}
            rows = assert_rows(buffer.sample(80), live, newest=k)
            assert {n for n, _, _ in rows} == set(live)
            assert len(buffer) == len(live)
            assert buffer.num_transitions == sum(one.transitions for one in live.values())
            assert [buffer.is_ready(n) for n in (0, len(live), len(live) + 1)] == [True, True, False]
            buffer._check()
        assert buffer.add_trajectories([one.given for one in made.values()]) == list(range(10, 20))
        assert_rows(buffer.sample(50), {17: made[7], 18: made[8], 19: made[9]}, newest=19)
        stats = buffer.get_stats()
        assert (stats["added_total"], stats["evicted_total"], stats["next_id"]) == (20, 17, 20)
        assert (stats["age_max"], stats["age_mean"]) == (2, 1.0)


def test_a_window_of_zero_is_all() -> None:
    with TrajectoryReplayBuffer(sample_window_size=0) as buffer:
        for _ in range(3):
            buffer.add_trajectories([small(steps=1, envs=1) for _ in range(200)])
        assert len(buffer) == buffer.num_transitions == 600
        assert len(set(buffer.sample(600, replace=False)["trajectory_id"].tolist())) == 600


def test_a_window_of_transitions() -> None:
    """Only those that can be drawn count; the newest trajectory always stays."""
    with TrajectoryReplayBuffer(max_transitions=20, sample_window_size=0) as buffer:
        for k in range(6):
            buffer.add_trajectories([small(k, 4, 2)])
            assert buffer.num_transitions <= 20
        assert set(buffer.sample(100)["trajectory_id"].tolist()) == {4, 5}
        buffer.add_trajectories([small(6, 4, 2, valid=np.zeros((4, 2), bool))])
        assert (len(buffer), buffer.num_transitions) == (3, 16)
        buffer.add_trajectories([small(7, 20, 2, valid=np.arange(40).reshape(20, 2) % 2 == 0)])
        assert (len(buffer), buffer.num_transitions) == (2, 20)
        before = buffer.get_stats()["added_total"]
        with pytest.raises(InvalidTrajectory, match="it has 21 transitions; max_transitions is 20"):
            buffer.add_trajectories([small(8, 21, 1)])
        with pytest.raises(InvalidTrajectory, match="trajectory 1 of 2"):
            buffer.add_trajectories([small(8, 1, 1), small(8, 21, 1)])
        assert (len(buffer), buffer.get_stats()["added_total"]) == (2, before)
        with pytest.raises(InvalidConfig, match="max_transitions is 20"):
            buffer.wait_ready(21)


def test_a_window_of_bytes() -> None:
    row = 16  # a reward, and whether it is valid, padded
    with TrajectoryReplayBuffer(max_bytes=row * 10, sample_window_size=0) as buffer:
        for k in range(7):
            buffer.add_trajectories([small(k, 2, 2)])
            assert buffer.get_stats()["live_bytes"] == row * 4 * min(k + 1, 2)
        assert set(buffer.sample(100)["trajectory_id"].tolist()) == {5, 6}
        buffer.add_trajectories([small(7, 10, 1)])
        assert len(buffer) == 1
        with pytest.raises(InvalidTrajectory, match="bytes; max_bytes is 160"):
            buffer.add_trajectories([small(8, 11, 1)])
        buffer._check()


def test_a_trajectory_that_fits_once_its_observations_are_shared_is_taken() -> None:
    """It used to be refused for what it would take if every next observation were another one."""
    seen = np.arange(12 * 256, dtype=np.float32).reshape(12, 1, 256)  # of 1024 bytes
    one = small(0, 11, 1, curr_obs={"x": seen[:-1]}, next_obs={"x": seen[1:]})
    with TrajectoryReplayBuffer(max_bytes=12 * 1024 + 11 * 16) as buffer:
        buffer.add_trajectories([one])
        assert buffer.get_stats()["live_bytes"] == 12 * 1024 + 11 * 16
        buffer.add_trajectories([one])
        assert len(buffer) == 1
        apart = small(0, 11, 1, curr_obs={"x": seen[:-1]}, next_obs={"x": seen[1:] + 1})
        with pytest.raises(InvalidTrajectory, match="bytes; max_bytes"):
            buffer.add_trajectories([apart])
        assert len(buffer) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"sample_window_size": -1},
        {"cache_size": -1},
        {"max_transitions": 0},
        {"max_bytes": 0},
        {"max_pending_bytes": 0},
        {"retain": "some"},
        {"trajectory_format": "pkl"},
        {"trajectory_format": "npz"},
        {"auto_save": True},
        {"read_only": True},
        {"sample_window_size": 2.5},
    ],
    ids=repr,
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        TrajectoryReplayBuffer(**wrong)


def test_clear_empties_the_window_and_ids_go_on() -> None:
    made = make(0, text=False)
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([made.given] * 3)
        schema = buffer.schema
        buffer.clear()
        assert (len(buffer), buffer.num_transitions, buffer.get_stats()["live_bytes"]) == (0, 0, 0)
        assert buffer.schema == schema
        buffer._check()
        assert buffer.add_trajectories([made.given]) == [3]
        assert_rows(buffer.sample(9), {3: made}, newest=3)
        assert buffer.get_stats()["evicted_total"] == 3


def test_memory_of_what_left_is_used_again() -> None:
    with TrajectoryReplayBuffer(sample_window_size=5) as buffer:
        for k in range(8):
            buffer.add_trajectories([small(k, 6, 2)])
        full = buffer.get_stats()["memory_bytes"]
        for k in range(100):
            buffer.add_trajectories([small(k, 6, 2)])
        assert buffer.get_stats()["memory_bytes"] == full
        buffer.clear()
        buffer.add_trajectories([small(k, 6, 2) for k in range(5)])
        assert buffer.get_stats()["memory_bytes"] == full
        assert_no_row_is_lost(buffer)


def assert_no_row_is_lost(buffer: TrajectoryReplayBuffer) -> None:
    """Every row of memory is either free or of a trajectory of the window."""
    assert buffer._window is not None
    window = buffer._window
    assert window.pins.waiting == 0
    listing = window.index.listing().rows
    in_memory = listing[listing["segment"] == -1]
    for table, rows in (
        (window.space.steps, in_memory["steps"] * in_memory["envs"]),
        (window.space.observations, in_memory["observations"]),
    ):
        if table.strips:
            allocator = table._memory
            allocator._check()
            free = sum(end - start for start, end in zip(allocator._starts, allocator._ends, strict=True))
            assert allocator.used_until - allocator._first - free == int(rows.sum())


def test_a_failed_add_keeps_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(0)
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([made.given])
        for wrong in ({"model_weights_id": "\ud800"}, {"curr_obs": {**made.given["curr_obs"], "task": ["\ud800", ""]}}):
            for _ in range(3):
                with pytest.raises(InvalidTrajectory):
                    buffer.add_trajectories([made.given, {**made.given, **wrong}])
        monkeypatch.setattr("forebay.trajectory.texts.MAX_TEXTS", len(buffer.texts()))
        for _ in range(3):  # the table is full: it is only found out when everything else is done
            with pytest.raises(InvalidTrajectory, match="no room"):
                buffer.add_trajectories([made.given, {**made.given, "model_weights_id": "new"}])
        monkeypatch.setattr("forebay.trajectory.adding.write", failing)
        for _ in range(3):
            with pytest.raises(OSError, match="on purpose"):
                buffer.add_trajectories([made.given, made.given])
        assert len(buffer) == 1
        assert_no_row_is_lost(buffer)


def failing(*_: object) -> None:
    raise OSError("on purpose")


# --- waiting --------------------------------------------------------------------------------------------


def in_thread(work: Any) -> tuple[threading.Thread, list[Any]]:
    """A thread, and what it gave or raised."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result


def test_waiting_ends_when_enough_was_added() -> None:
    with TrajectoryReplayBuffer() as buffer:
        thread, result = in_thread(lambda: buffer.wait_ready(10))
        for _ in range(2):
            buffer.add_trajectories([small(0, 4, 1)])
            assert thread.is_alive()
        buffer.add_trajectories([small(0, 4, 1)])
        thread.join(HANG_S)
        assert result == [None]
        buffer.wait_ready(12, timeout_s=0)
        buffer.wait_ready(0)
        buffer.wait_ready()


def test_waiting_in_vain_says_what_there_is() -> None:
    with TrajectoryReplayBuffer(sample_window_size=2) as buffer:
        with pytest.raises(WaitTimeout, match=r"5 transitions.*\n.*0 trajectories with 0 transitions; 0 trajectories"):
            buffer.wait_ready(5, timeout_s=0.01)
        for _ in range(4):
            buffer.add_trajectories([small(0, 3, 1)])
        with pytest.raises(
            WaitTimeout, match=r"7 transitions.*\n.*2 trajectories with 6 transitions and is full; 4 trajectories"
        ):
            buffer.wait_ready(7, timeout_s=0)
        with pytest.raises(InvalidInput, match="min_transitions"):
            buffer.wait_ready(-1)


def test_waiting_for_what_was_added_goes_on_when_the_window_is_full() -> None:
    with TrajectoryReplayBuffer(sample_window_size=2) as buffer:
        buffer.add_trajectories([small(number) for number in range(3)])
        buffer.wait_added(3, timeout_s=0)
        thread, result = in_thread(lambda: buffer.wait_added(5, timeout_s=HANG_S))
        buffer.add_trajectories([small(number) for number in range(2)])
        thread.join(HANG_S)
        assert result == [None]
        with pytest.raises(WaitTimeout, match=r"6 trajectories added.*\n.*and is full; 5 trajectories"):
            buffer.wait_added(6, timeout_s=0)


def test_a_learner_can_be_paced_by_what_was_added() -> None:
    """Also when the window is full and has as much as ever."""
    with TrajectoryReplayBuffer(sample_window_size=2) as buffer:
        buffer.add_trajectories([small(steps=3)] * 5)
        buffer.wait_added(5, timeout_s=0)
        thread, result = in_thread(lambda: buffer.wait_added(7))
        buffer.add_trajectories([small(steps=3)])
        assert thread.is_alive()
        buffer.add_trajectories([small(steps=3)])
        thread.join(HANG_S)
        assert result == [None]
        with pytest.raises(WaitTimeout, match=r"8 trajectories added in all.*\n.*7 trajectories were added"):
            buffer.wait_added(8, timeout_s=0)
        with pytest.raises(InvalidInput, match="total"):
            buffer.wait_added(-1)


@pytest.mark.parametrize("wait", ["wait_ready", "wait_added"])
def test_closing_ends_a_wait(wait: str) -> None:
    buffer = TrajectoryReplayBuffer()
    thread, result = in_thread(lambda: getattr(buffer, wait)(1))
    buffer.close()
    thread.join(HANG_S)
    assert isinstance(result[0], BufferClosed)


def test_everything_but_close_says_that_it_is_closed(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([small()])
    buffer.close()
    calls: list[Any] = [
        lambda: buffer.sample(1),
        lambda: buffer.sample(1, sequence_length=2),
        lambda: buffer.add_trajectories([small()]),
        lambda: buffer.add_trajectories([]),
        lambda: buffer.wait_ready(1),
        lambda: len(buffer),
        lambda: buffer.is_ready(1),
        lambda: buffer.num_transitions,
        lambda: buffer.durable_id,
        lambda: buffer.trajectory(0),
        lambda: buffer.get_stats(),
        lambda: buffer.flush(),
        lambda: buffer.clear(),
        lambda: buffer.clear_cache(),
        lambda: buffer.save_checkpoint(tmp_path),
        lambda: buffer.load_checkpoint(tmp_path),
        lambda: MixedReplay({buffer: 1.0}).sample(1),
    ]
    for call in calls:
        with pytest.raises(BufferClosed):
            call()


# --- what is there --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "bool", "int64", "float16"])
def test_rewards_are_summed_over_what_may_be_drawn(kind: str) -> None:
    """Those of bfloat16 used to be summed by their bits."""
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]).to(getattr(torch, kind))
    valid = torch.tensor([[True, True], [True, False], [True, True]])
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([{"rewards": rewards}, {"rewards": rewards, "valid": valid}])
        stats = buffer.get_stats()
        assert (stats["reward_sum"], stats["transitions"]) == (7.0, 11)
        assert stats["reward_mean"] == pytest.approx(7 / 11)


def test_rewards_may_be_infinite_or_no_numbers() -> None:
    """Without a word of numpy, which is an error where warnings are."""
    with TrajectoryReplayBuffer() as buffer:
        for pair in ([np.inf, 1.0], [-np.inf, 1.0], [np.inf, -np.inf], [1e308, 1e308], [np.nan, 1.0]):
            buffer.add_trajectories([{"rewards": np.array(pair).reshape(2, 1)}])
            assert np.isnan(buffer.get_stats()["reward_sum"]) == (len(buffer) > 1)
            assert len(buffer.sample(4)["rewards"]) == 4


def test_figures_of_an_empty_buffer_are_there() -> None:
    with TrajectoryReplayBuffer() as buffer:
        empty = buffer.get_stats()
        assert {value for name, value in empty.items() if name != "age_max_s"} == {0, -1}
        buffer.add_trajectories([small()])
        full = buffer.get_stats()
        assert empty.keys() == full.keys()
        assert 0 <= full["age_max_s"] < 60
        assert full["disk_bytes"] == full["pending_bytes"] == 0
        assert (full["durable_id"], buffer.durable_id) == (-1, -1)
        buffer.flush()
        with pytest.raises(InvalidInput, match="auto_save"):
            buffer.add_trajectories([small()], durable=True)


def test_figures_touch_nothing() -> None:
    with TrajectoryReplayBuffer() as one, TrajectoryReplayBuffer() as other:
        for buffer in (one, other):
            buffer.add_trajectories([small(steps=40)])
        one.get_stats()
        repr(one)
        one.trajectory(0)
        assert one.sample(30)["step"].tolist() == other.sample(30)["step"].tolist()


@pytest.mark.parametrize("wrong", [3, -1, 99, 0])
def test_only_trajectories_of_the_window_can_be_looked_at(wrong: int) -> None:
    with TrajectoryReplayBuffer(sample_window_size=2) as buffer:
        with pytest.raises(InvalidInput, match="no trajectory"):
            buffer.trajectory(0)
        buffer.add_trajectories([small(k) for k in range(3)])
        with pytest.raises(InvalidInput, match="1 to 2"):
            buffer.trajectory(wrong)
        assert buffer.trajectory(2).rewards[0, 0] == 2000  # type: ignore[index]


# --- next observations are stored once ------------------------------------------------------------------


def observed(now: Any, after: Any) -> dict[str, Any]:
    return {"rewards": np.zeros(np.shape(now)[:2], np.float32), "curr_obs": {"x": now}, "next_obs": {"x": after}}


def extra_rows(buffer: TrajectoryReplayBuffer, cells: int) -> float:
    """How many observations are stored besides one for each step."""
    assert buffer.schema is not None
    layout = Layout(buffer.schema)
    return (buffer.get_stats()["live_bytes"] - cells * layout.step_bytes) / layout.observation_bytes - cells


def test_next_observations_are_compared_as_bits() -> None:
    """NaN is itself, and 0.0 is not -0.0."""
    nan, other_nan = np.float32(np.nan), np.array(0x7FC00001, np.uint32).view(np.float32)
    now = np.array([0.0, nan, -0.0, other_nan, 1.0], np.float32).reshape(5, 1, 1)
    exact = np.array([nan, -0.0, other_nan, 1.0, 2.0], np.float32).reshape(5, 1, 1)
    with TrajectoryReplayBuffer(arrays="numpy") as buffer:
        buffer.add_trajectories([observed(now, exact)])
        assert extra_rows(buffer, 5) == 1
        assert buffer.sample(9, sequence_length=5)["step"][0].tolist() == [0, 1, 2, 3, 4]
    off = np.array([other_nan, 0.0, nan, 1.0, 2.0], np.float32).reshape(5, 1, 1)
    with TrajectoryReplayBuffer(arrays="numpy") as buffer:
        buffer.add_trajectories([observed(now, off)])
        assert extra_rows(buffer, 5) == 4
        batch = buffer.sample(5, replace=False)
        assert_same(batch["next_obs"]["x"], off[batch["step"], 0], "next_obs")
        assert_same(batch["curr_obs"]["x"], now[batch["step"], 0], "curr_obs")


def test_images_are_stored_once() -> None:
    """What half a gigabyte becomes a quarter of: all but the last of each environment are there already."""
    frames = np.random.default_rng(0).integers(0, 256, (21, 3, 16, 16, 3), np.uint8)
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([observed(frames[:-1], frames[1:]), observed(frames[:-1].copy(), frames[1:].copy())])
        assert extra_rows(buffer, 120) == 6
        for k in (0, 1):
            back = buffer.trajectory(k)
            assert_same(back.next_obs["x"], frames[1:], "next_obs")


@settings(max_examples=80, deadline=None)
@given(
    seed=SEEDS,
    steps=st.integers(1, 12),
    envs=st.integers(1, 4),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    large=st.booleans(),
)
def test_those_that_differ_are_kept(seed: int, steps: int, envs: int, share: float, large: bool) -> None:
    """In one leaf, in one bit: only where all leaves are the following ones nothing more is stored."""
    generator = np.random.default_rng(seed)
    shapes = {"a": (3,), "b": (100, 100, 3) if large else (2,), "c": (), "d": (0,)}  # many bytes: compared by halves
    now = {name: generator.integers(0, 256, (steps, envs, *shape), np.uint8) for name, shape in shapes.items()}
    after = {name: np.concatenate([leaf[1:], leaf[:1]]) for name, leaf in now.items()}
    apart = np.zeros((steps, envs), bool)
    apart[-1] = True
    for t, b in np.argwhere(generator.random((steps, envs)) < share):
        leaf = after[str(generator.choice(["a", "b", "c"]))]
        cell = leaf[t, b].reshape(-1).copy()
        cell[generator.integers(len(cell))] ^= 1 << int(generator.integers(8))
        leaf[t, b] = cell.reshape(leaf.shape[2:])
        apart[t, b] = True
    with TrajectoryReplayBuffer(arrays="numpy") as buffer:
        given = {"rewards": np.zeros((steps, envs)), "curr_obs": now, "next_obs": after}
        buffer.add_trajectories([given])
        assert extra_rows(buffer, steps * envs) == np.count_nonzero(apart)
        back = buffer.trajectory(0)
        batch = buffer.sample(steps * envs, replace=False)
        for name in shapes:
            assert_same(back.curr_obs[name], now[name], name)
            assert_same(back.next_obs[name], after[name], name)
            assert_same(batch["curr_obs"][name], now[name][batch["step"], batch["env"]], name)
            assert_same(batch["next_obs"][name], after[name][batch["step"], batch["env"]], name)
        if not apart[:-1].all():
            pairs = buffer.sample(60, sequence_length=2)
            assert not apart[pairs["step"][:, 0], pairs["env"][:, 0]].any()


# --- memory of batches ----------------------------------------------------------------------------------


def addresses(batch: Mapping[str, Any]) -> dict[str, int]:
    return {
        name: leaf.data_ptr() if isinstance(leaf, torch.Tensor) else leaf.ctypes.data
        for name, leaf in flat(batch).items()
        if not isinstance(leaf, list)
    }


@pytest.mark.parametrize("arrays", ["torch", "numpy"])
def test_columns_are_aligned_contiguous_and_used_again_when_they_are_dropped(arrays: Any) -> None:
    made = make(0)
    with TrajectoryReplayBuffer(arrays=arrays) as buffer:
        buffer.add_trajectories([made.given])
        batch = buffer.sample(37)
        for name, leaf in flat(batch).items():
            if isinstance(leaf, torch.Tensor):
                assert leaf.is_contiguous(), name
            elif isinstance(leaf, np.ndarray):
                assert leaf.flags.c_contiguous, name
                assert leaf.flags.writeable, name
        first = addresses(batch)
        assert all(address % mmap.PAGESIZE == 0 for address in first.values())
        del batch, leaf
        for _ in range(3):
            batch = buffer.sample(37)
            assert addresses(batch) == first
            del batch


@pytest.mark.parametrize("arrays", ["torch", "numpy"])
def test_a_batch_that_is_held_is_never_overwritten(arrays: Any) -> None:
    """Also if only a piece of one column is left of it."""
    made = several(5, 6)
    held: list[tuple[Any, Any]] = []
    with TrajectoryReplayBuffer(arrays=arrays) as buffer:
        buffer.add_trajectories([one.given for one in made.values()])
        for k in range(60):
            batch = buffer.sample(16 + k % 3)
            leaves = [leaf for leaf in flat(batch).values() if not isinstance(leaf, list)]
            piece = leaves[k % len(leaves)][1:][::2]
            kept = {0: batch["curr_obs"], 1: {"x": piece}, 2: {"x": piece[:, None]}}[k % 3]
            if k % 7 == 0:
                kept = {"x": torch.utils.dlpack.from_dlpack(batch["rewards"])}
            held.append((kept, {name: plain(leaf).copy() for name, leaf in flat(kept).items()}))
            del batch, leaves, piece, kept
            if k % 4 == 3:
                held.pop(0)
    for kept, before in held:  # and after the buffer was closed
        for name, leaf in flat(kept).items():
            assert_same(plain(leaf), before[name], name)


def test_blocks_come_back_whoever_drops_them_last() -> None:
    pool = BlockPool()
    blocks = [pool.lend(5000) for _ in range(12)]
    assert len({block.ctypes.data for block in blocks}) == 12
    there = {block.ctypes.data for block in blocks}
    views = [block[10:20] for block in blocks]
    blocks.clear()
    assert pool.lend(5000).ctypes.data not in there  # all of them are still looked at
    drop = threading.Thread(target=views.clear)
    drop.start()
    drop.join()
    again = [pool.lend(5000) for _ in range(8)]
    assert {block.ctypes.data for block in again} <= there | {block.ctypes.data for block in again}
    assert len({block.ctypes.data for block in again} & there) >= 7  # it keeps eight
    assert len({block.ctypes.data for block in again}) == 8


def test_a_block_is_not_kept_for_what_is_much_smaller() -> None:
    pool = BlockPool()
    large = pool.lend(10 * 2**20)
    address = large.ctypes.data
    del large
    small_one = pool.lend(100)
    assert small_one.ctypes.data != address
    assert len(small_one) < 2 * 100 + 2 * mmap.PAGESIZE
    assert pool.lend(8 * 2**20).ctypes.data == address


# --- memory of callers ----------------------------------------------------------------------------------


class Stuck(FileOps):
    """A disk that syncs when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def sync(self, descriptor: int) -> None:
        self.go.wait(HANG_S)
        super().sync(descriptor)


def test_arrays_of_the_caller_are_not_held_while_they_wait_to_be_written(tmp_path: Path) -> None:
    files = Stuck()
    files.go.set()

    class Buffer(TrajectoryReplayBuffer):
        _files = files

    with Buffer(auto_save=True, auto_save_path=tmp_path) as buffer:
        files.go.clear()
        array = np.zeros((4, 2, 1000))
        gone = weakref.ref(array)
        buffer.add_trajectories([small(curr_obs={"x": array}, next_obs={"x": array})])
        assert buffer.get_stats()["pending_bytes"] > 0
        del array
        gc.collect()
        try:
            assert gone() is None
        finally:
            files.go.set()


@pytest.mark.parametrize("stored", [False, True], ids=["memory", "directory"])
def test_a_buffer_that_was_closed_and_dropped_gives_everything_back(stored: bool, tmp_path: Path) -> None:
    """At once, not when the garbage collector comes by: it may be gigabytes, and a range of addresses."""
    gc.collect()
    gc.disable()
    try:
        buffer = TrajectoryReplayBuffer(auto_save=stored, auto_save_path=tmp_path)
        buffer.add_trajectories([make(0).given])
        buffer.sample(5, sequence_length=2)
        assert buffer._window is not None
        gone = [weakref.ref(thing) for thing in (buffer, buffer._window.space, buffer._pool)]
        buffer.close()
        del buffer
        assert [reference() for reference in gone] == [None] * 3
    finally:
        gc.enable()


def shapes_of(batch: Mapping[str, Any]) -> Sequence[tuple[int, ...]]:
    return [plain(leaf).shape for leaf in flat(batch).values()]


def test_a_batch_of_one() -> None:
    made = make(0, steps=1, envs=1)
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([made.given])
        assert_rows(buffer.sample(1), {0: made}, newest=0)
        assert {shape[0] for shape in shapes_of(buffer.sample(1))} == {1}
        assert {shape[:2] for shape in shapes_of(buffer.sample(1, sequence_length=1))} == {(1, 1)}
