"""Random histories of a trajectory buffer against plain lists: what is drawn is always what the lists say.

Segments hold about three rows, so that a handful of trajectories fills many of them. A sample can be begun and finished
much later, as a slow reader in another thread would: its rows must still be there.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import unittest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.errors import InvalidInput, InvalidTrajectory
from forebay.trajectory import TrajectoryReplayBuffer
from forebay.trajectory.region import RowAllocator
from tests.trajectory.tagged import Made, assert_rows, assert_sequences, made_at_random, make, plain, runs_of, to_torch

SEEDS = st.integers(0, 2**32 - 1)


class TinyBuffer(TrajectoryReplayBuffer):
    _segment_bytes = 3000


class Slow:
    """A sample that takes its time: begun as `sample` does it under the lock, to be finished later."""

    def __init__(
        self, buffer: TrajectoryReplayBuffer, count: int, length: int | None = None, *, pin: bool = True
    ) -> None:
        self.count, self.length = count, length
        self._changed, self._texts = buffer._changed, buffer._texts.known
        with self._changed:
            self._window, self._gatherer = buffer._drawable(count)
            self._drawn = self._window.index.draw(count, length, True, buffer._generator)
            self._pin = self._window.pins.pin() if pin else None

    def finish(self) -> dict[str, Any]:
        rows = self._drawn.rows(self.length)
        batch = self._gatherer.batch(len(rows.row))
        self._gatherer.fill(batch, 0, rows, self._window.space)
        if self._pin is not None:
            with self._changed:
                self._window.pins.unpin(self._pin)
        lead = (self.count,) if self.length is None else (self.count, self.length)
        return self._gatherer.finish(batch, self._texts, lead)


class Machine(RuleBasedStateMachine):
    """A buffer, and lists of (id, trajectory) that say what it must have."""

    stored = False

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="forebay-machine-"))
        self.next_id = 0
        self.window: list[tuple[int, Made]] = []
        self.kept: list[tuple[int, Made]] = []  # in the directory, and shown when it is opened
        self.content_floor = 0
        self.checkpoints: list[tuple[Path, list[tuple[int, Made]], int]] = []
        self.held: list[Any] = []
        self.added = self.evicted = 0

    @initialize(
        window=st.sampled_from([0, 1, 3, 5]),
        most=st.sampled_from([None, None, 40]),
        cache=st.sampled_from([0, 1, 5]),
        retain=st.sampled_from(["all", "all", "window"]),
    )
    def begin(self, window: int, most: int | None, cache: int, retain: Any) -> None:
        self.limit, self.most, self.retain = window, most, retain
        self.options: dict[str, Any] = {
            "sample_window_size": window, "max_transitions": most, "cache_size": cache, "retain": retain
        }  # fmt: skip
        self.buffer = self.opened()

    @property
    def keeps_all(self) -> bool:
        return self.retain == "all" and self.most is None

    def opened(self) -> TrajectoryReplayBuffer:
        return TinyBuffer(auto_save=self.stored, auto_save_path=self.directory / "store", **self.options)

    def within(self, found: list[tuple[int, Made]]) -> list[tuple[int, Made]]:
        """What the limits leave of trajectories that came one after another."""
        found = list(found)
        while len(found) > 1 and (
            (self.limit and len(found) > self.limit)
            or (self.most is not None and sum(made.transitions for _, made in found) > self.most)
        ):
            del found[0]
        return found

    # --- adding

    @rule(seeds=st.lists(SEEDS, min_size=1, max_size=3), as_tensors=st.booleans(), durable=st.booleans())
    def add(self, seeds: list[int], as_tensors: bool, durable: bool) -> None:
        new = [
            made_at_random(self.next_id + k, np.random.default_rng(seed), most_steps=5) for k, seed in enumerate(seeds)
        ]
        given = [to_torch(made.given) if as_tensors else made.given for made in new]
        ids = self.buffer.add_trajectories(given, durable=durable and self.stored)
        assert ids == list(range(self.next_id, self.next_id + len(new)))
        self.next_id += len(new)
        self.added += len(new)
        for item in zip(ids, new, strict=True):
            before = [*self.window, item]
            self.window = self.within(before)
            self.evicted += len(before) - len(self.window)
            self.kept.append(item)

    @precondition(lambda self: self.buffer.schema is not None)
    @rule(seed=SEEDS)
    def add_wrong(self, seed: int) -> None:
        good = made_at_random(self.next_id, np.random.default_rng(seed)).given
        wrong = dict(good)
        wrong.pop("actions") if seed % 2 else wrong.update(rewards=wrong["rewards"].astype(np.float64))
        with pytest.raises(InvalidTrajectory, match="trajectory 1 of 2"):
            self.buffer.add_trajectories([good, wrong])

    # --- sampling

    @rule(count=st.integers(1, 40))
    def sample(self, count: int) -> None:
        if not sum(made.transitions for _, made in self.window):
            with pytest.raises(InvalidInput):
                self.buffer.sample(count)
            return
        rows = assert_rows(self.buffer.sample(count), dict(self.window), newest=None)
        assert len(rows) == count

    @rule(length=st.integers(1, 4))
    def sample_everything(self, length: int) -> None:
        """Every start once: as many as there are, and no other."""
        starts = sorted((k, t, b) for k, made in self.window for t, b in runs_of(made, length))
        if not starts:
            with pytest.raises(InvalidInput):
                self.buffer.sample(1, sequence_length=length)
            return
        batch = self.buffer.sample(len(starts), sequence_length=length, replace=False)
        rows = assert_rows(batch, dict(self.window))
        assert_sequences(rows, dict(self.window), length)
        assert sorted(rows[::length]) == starts

    @precondition(lambda self: len(self.held) < 4 and any(made.transitions for _, made in self.window))
    @rule(count=st.integers(1, 20), length=st.sampled_from([None, 1, 2, 3]))
    def begin_to_sample(self, count: int, length: int | None) -> None:
        if length and not any(runs_of(made, length) for _, made in self.window):
            return
        self.held.append((Slow(self.buffer, count, length), dict(self.window)))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 3))
    def finish_to_sample(self, which: int) -> None:
        slow, known = self.held.pop(which % len(self.held))
        rows = assert_rows(slow.finish(), known)
        assert_sequences(rows, known, slow.length or 1)

    @precondition(lambda self: self.window)
    @rule(which=st.integers(0, 10))
    def look_at_one(self, which: int) -> None:
        number, made = self.window[which % len(self.window)]
        back = self.buffer.trajectory(number)
        assert np.array_equal(plain(back.actions), made.want["actions"])
        assert back.curr_obs["word"] == made.want["curr_obs.word"].tolist()
        assert back.next_obs["word"] == made.want["next_obs.word"].tolist()
        assert back.model_weights_id == made.given["model_weights_id"]

    # --- forgetting

    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.evicted += len(self.window)
        self.window, self.kept, self.content_floor = [], [], self.next_id

    @rule()
    def clear_cache(self) -> None:
        self.buffer.clear_cache()

    @rule()
    def flush(self) -> None:
        self.buffer.flush()
        if self.stored and self.next_id:
            assert self.buffer.durable_id >= (self.kept[-1][0] if self.kept else -1)

    @precondition(lambda self: self.stored)
    @rule()
    def reopen(self) -> None:
        self.buffer.close()
        self.buffer = self.opened()
        self.window = self.within(self.kept)
        self.content_floor = min(self.content_floor, self.kept[0][0]) if self.kept else self.content_floor
        self.added = self.evicted = 0
        assert self.buffer.get_stats()["left_out_damaged"] == 0

    # --- checkpoints

    @precondition(lambda self: len(self.checkpoints) < 3)
    @rule()
    def save(self) -> None:
        path = self.directory / f"checkpoint-{len(self.checkpoints)}"
        self.buffer.save_checkpoint(path)
        own = [item for item in self.kept if item[0] >= self.content_floor] if self.stored else []
        known = dict([*own, *self.window])
        with TinyBuffer(sample_window_size=0) as other:
            other.load_checkpoint(path)
            found = ids_of(other)
            if self.keeps_all or not self.stored:
                assert found == sorted(known)
            else:  # the rest may have been let go, and may still be there
                assert {number for number, _ in self.window} <= set(found) <= set(known)
            self.checkpoints.append((path, [(number, known[number]) for number in found], self.next_id))

    @precondition(lambda self: self.checkpoints and (self.keeps_all or not self.stored))
    @rule(which=st.integers(0, 2), verify=st.booleans())
    def load(self, which: int, verify: bool) -> None:
        path, content, next_id = self.checkpoints[which % len(self.checkpoints)]
        self.buffer.load_checkpoint(path, verify=verify)
        self.evicted += len(self.window)
        self.window = self.within(content)
        self.next_id = self.content_floor = max(self.next_id, next_id)

    @precondition(lambda self: self.checkpoints)
    @rule(which=st.integers(0, 2), world=st.integers(1, 4), seed=SEEDS)
    def load_into_ranks(self, which: int, world: int, seed: int) -> None:
        """Contiguous blocks, the larger ones first; each can be drawn from, and goes on with new ids."""
        path, content, next_id = self.checkpoints[which % len(self.checkpoints)]
        size, more = divmod(len(content), world)
        start = 0
        for rank in range(world):
            mine = content[start : start + size + (rank < more)]
            start += len(mine)
            with TrajectoryReplayBuffer(sample_window_size=0, rank=rank) as other:
                other.load_checkpoint(path, is_distributed=True, local_rank=rank, world_size=world)
                assert ids_of(other) == [number for number, _ in mine]
                made = made_at_random(7, np.random.default_rng(seed))
                known = dict(mine)
                known[other.add_trajectories([made.given])[0]] = made
                assert max(known) >= next_id or not mine
                if other.num_transitions:
                    assert_rows(other.sample(30), known)
                other._check()

    # --- always

    @invariant()
    def it_is_what_the_lists_say(self) -> None:
        if not hasattr(self, "buffer"):
            return
        buffer = self.buffer
        buffer._check()
        assert ids_of(buffer) == [number for number, _ in self.window]
        assert len(buffer) == len(self.window)
        assert buffer.num_transitions == sum(made.transitions for _, made in self.window)
        stats = buffer.get_stats()
        assert (stats["next_id"], stats["added_total"]) == (self.next_id, self.added)
        assert stats["evicted_total"] == self.evicted
        expected = sum(float(made.want["rewards"][t, b, 0]) for _, made in self.window for t, b in made.valid)
        assert stats["reward_sum"] == expected

    def teardown(self) -> None:
        try:
            while self.held:
                self.finish_to_sample(0)
            if hasattr(self, "buffer"):
                if not self.stored and self.buffer._window is not None:
                    assert self.buffer._window.pins.waiting == 0
                self.buffer.close()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)
            gc.collect()  # tracebacks of expected errors hold buffers, and each reserves many addresses


def ids_of(buffer: TrajectoryReplayBuffer) -> list[int]:
    if buffer._window is None:
        return []
    found: list[int] = buffer._window.index.listing().rows["id"].tolist()
    return found


class StoredMachine(Machine):
    """The same with a directory in which everything is saved."""

    stored = True


def _case(machine: type[Machine], examples: int) -> type[unittest.TestCase]:
    case: type[unittest.TestCase] = machine.TestCase
    case.settings = settings(  # type: ignore[attr-defined]
        max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return case


TestInMemory = _case(Machine, 5)
TestInADirectory = _case(StoredMachine, 5)


class LongMachine(Machine):
    """For `make test-slow`."""


class LongStoredMachine(StoredMachine):
    """For `make test-slow`."""


TestInMemoryForLong = pytest.mark.slow(_case(LongMachine, 500))
TestInADirectoryForLong = pytest.mark.slow(_case(LongStoredMachine, 500))


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 30)), max_size=60),
    align=st.sampled_from([1, 4]),
)
def test_rows_are_handed_out_once_and_come_back_whole(steps: list[tuple[bool, int, int]], align: int) -> None:
    allocator = RowAllocator(3, 10_000, align)
    taken: list[tuple[int, int]] = []
    for take, rows, which in steps:
        if take or not taken:
            start = allocator.take(rows)
            assert start >= 3
            assert start % align == 0
            mine = set(range(start, start + rows))
            assert not any(mine & set(range(other, other + size)) for other, size in taken)
            taken.append((start, rows))
        else:
            allocator.give_back(*taken.pop(which % len(taken)))
        allocator._check()
    peak = allocator.used_until
    for start, rows in taken:
        allocator.give_back(start, rows)
    allocator._check()
    if peak > allocator._first:  # one free run is left, and it is used before anything new is
        assert allocator.take(peak - allocator._first) == allocator._first
        assert allocator.used_until == peak


def test_rows_that_are_not_there_are_not_handed_out() -> None:
    allocator = RowAllocator(0, 10)
    allocator.take(6)
    with pytest.raises(MemoryError, match="5 rows of 10"):
        allocator.take(5)
    assert allocator.take(4) == 6


def test_the_machine_would_notice() -> None:
    """A row that is used again while somebody looks at it: what pins are there to prevent."""
    made = [make(k, steps=3, envs=1) for k in range(3)]
    with TinyBuffer(sample_window_size=1) as buffer:
        buffer.add_trajectories([made[0].given])
        slow = Slow(buffer, 5, pin=False)
        buffer.add_trajectories([made[1].given])
        buffer.add_trajectories([made[2].given])
        with pytest.raises(AssertionError):
            assert_rows(slow.finish(), {0: made[0]})


def test_sums_that_begin_anew_do_not_write_over_those_that_are_read() -> None:
    """Found by the machine: everything left the window, and the next draw put its sums where a slow reader looked."""
    breaks = [(1, 0), (4, 0)]
    made = [make(0, steps=8, envs=1, ends=breaks, invalid=breaks), *(make(k, steps=8, envs=1) for k in range(1, 4))]
    with TinyBuffer(sample_window_size=1) as buffer:
        for length in (None, 2):
            first = buffer.add_trajectories([made[0].given])[0]
            slow = Slow(buffer, 20, length)
            for one in made[1:]:
                buffer.add_trajectories([one.given])
            buffer.sample(5, sequence_length=length)
            assert_rows(slow.finish(), {first: made[0]})
