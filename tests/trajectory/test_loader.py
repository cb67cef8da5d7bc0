"""The prefetching loader: what fails reaches who waits, nothing is drawn too early, no thread is left behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from forebay.errors import BufferClosed, InvalidConfig, InvalidInput, WaitTimeout
from forebay.trajectory import MixedReplay, TrajectoryDataset, TrajectoryReplayBuffer
from tests.processes import HANG_S
from tests.trajectory.tagged import assert_rows, make


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        if thread.name == "forebay-prefetch":
            thread.join(HANG_S)
            assert not thread.is_alive()


class Counted:
    """A source that counts what is drawn from it, and that can be made to wait or to fail."""

    def __init__(self, *, fails_at: int | None = None, ready: bool = True) -> None:
        self.drawn = 0
        self.waits = 0
        self.each = threading.Semaphore(0)  # released once a batch was drawn
        self.waiting = threading.Event()
        self.ready = threading.Event()
        self._fails_at = fails_at
        if ready:
            self.ready.set()

    def sample(self, num_chunks: int) -> dict[str, Any]:
        if self.drawn == self._fails_at:
            raise OSError("the disk is gone")
        self.drawn += 1
        self.each.release()
        return {"number": self.drawn, "size": num_chunks}

    def wait_ready(self, min_transitions: int = 1, timeout_s: float | None = None) -> None:
        self.waits += 1
        self.waiting.set()
        assert self.ready.wait(HANG_S)

    def settle(self, count: int) -> None:
        """Until so many were drawn; and no more than that."""
        while self.drawn < count:
            assert self.each.acquire(timeout=HANG_S)
        while self.each.acquire(blocking=False):
            pass
        assert not self.each.acquire(timeout=0.05)
        assert self.drawn == count


def soon(batches: Iterator[Any]) -> Any:
    """The next batch; a failure instead of a wait without end if there is none."""
    got: list[Any] = []

    def take() -> None:
        try:
            got.append(next(batches))
        except BaseException as error:
            got.append(error)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert got, "nothing ever came"
    if isinstance(got[0], BaseException):
        raise got[0]
    return got[0]


def small(steps: int = 4) -> dict[str, Any]:
    return {"rewards": np.arange(steps, dtype=np.float32).reshape(steps, 1)}


def test_batches_are_those_that_sampling_gives_in_that_order() -> None:
    made = [make(k) for k in range(3)]
    with TrajectoryReplayBuffer(seed=4) as buffer, TrajectoryReplayBuffer(seed=4) as twin:
        for one in (buffer, twin):
            one.add_trajectories([each.given for each in made])
        loader = DataLoader(TrajectoryDataset(buffer, 16), batch_size=None)
        held = []
        for batch, _ in zip(loader, range(12), strict=False):
            held.append(batch)
        for batch in held:  # and what is held was not written over
            expected = twin.sample(16)
            assert batch["step"].tolist() == expected["step"].tolist()
            assert batch["curr_obs"]["word"] == expected["curr_obs"]["word"]
            assert_rows(batch, dict(enumerate(made)), newest=2)


def test_a_mix_can_be_loaded_from() -> None:
    with TrajectoryReplayBuffer() as one, TrajectoryReplayBuffer() as two:
        for buffer in (one, two):
            buffer.add_trajectories([small()])
        batches = iter(TrajectoryDataset(MixedReplay({one: 0.5, two: 0.5}), 6))
        assert next(batches)["source"].tolist() == [0, 0, 0, 1, 1, 1]
        del batches


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_no_more_is_drawn_than_is_kept_ready(prefetch: int) -> None:
    """A batch that is drawn early is older than it need be. It used to be one more than was said."""
    source = Counted()
    batches = iter(TrajectoryDataset(source, 3, prefetch=prefetch))
    source.settle(prefetch)
    for k in range(1, 5):
        assert next(batches) == {"number": k, "size": 3}
        source.settle(prefetch + k)


def test_what_fails_reaches_who_asks_for_the_next_batch() -> None:
    """After what was ready, and again and again. In the reference the consumer waits for ever."""
    source = Counted(fails_at=3)
    batches = iter(TrajectoryDataset(source, 1, prefetch=2))
    assert [soon(batches)["number"] for _ in range(3)] == [1, 2, 3]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            soon(batches)


def test_a_failure_goes_through_a_data_loader() -> None:
    loader = iter(DataLoader(TrajectoryDataset(Counted(fails_at=1), 1), batch_size=None))
    assert soon(loader)["number"] == 1
    with pytest.raises(OSError, match="the disk is gone"):
        soon(loader)


def test_a_buffer_that_is_closed_ends_the_iteration_with_that_error() -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.add_trajectories([small()])
    batches = iter(TrajectoryDataset(buffer, 4))
    next(batches)
    buffer.close()
    with pytest.raises(BufferClosed):
        soon(list(batches) for _ in range(1))


def test_nothing_is_drawn_before_there_is_enough() -> None:
    with TrajectoryReplayBuffer() as buffer:
        batches = iter(TrajectoryDataset(buffer, 4, min_transitions=10))
        got: list[Any] = []

        def consume() -> None:
            got.append(next(batches))

        consumer = threading.Thread(target=consume)
        consumer.start()
        buffer.add_trajectories([small(4)])
        buffer.add_trajectories([small(5)])
        assert got == []
        buffer.add_trajectories([small(4)])
        consumer.join(HANG_S)
        assert len(got[0]["step"]) == 4


def test_the_wait_is_one_wait() -> None:
    """Not a loop that asks again and again."""
    source = Counted(ready=False)
    batches = iter(TrajectoryDataset(source, 1))
    assert source.waiting.wait(HANG_S)
    assert (source.waits, source.drawn) == (1, 0)
    source.ready.set()
    assert next(batches)["number"] == 1
    source.settle(3)
    assert source.waits == 1


def test_a_wait_in_vain_says_so() -> None:
    with TrajectoryReplayBuffer() as buffer:
        batches = iter(TrajectoryDataset(buffer, 4, timeout_s=0.01))
        with pytest.raises(WaitTimeout, match="0 trajectories"):
            soon(batches)


def test_closing_ends_the_thread_and_the_iteration() -> None:
    source = Counted()
    batches: Any = iter(TrajectoryDataset(source, 1))
    thread = batches._thread
    assert thread.daemon
    assert next(batches)["number"] == 1
    batches.close()
    batches.close()
    thread.join(HANG_S)
    assert not thread.is_alive()
    with pytest.raises(StopIteration):
        next(batches)


def test_closing_wakes_who_waits_for_a_batch() -> None:
    source = Counted(ready=False)
    batches: Any = iter(TrajectoryDataset(source, 1))
    ended: list[Any] = []

    def consume() -> None:
        ended.append(list(batches))

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert source.waiting.wait(HANG_S)
    batches.close()
    consumer.join(HANG_S)
    assert ended == [[]]
    source.ready.set()


def test_closing_before_the_first_batch_is_fine() -> None:
    source = Counted(ready=False)
    batches: Any = iter(TrajectoryDataset(source, 1))
    batches.close()
    source.ready.set()
    batches._thread.join(HANG_S)
    assert source.drawn == 0


def test_dropping_the_iterator_ends_its_thread() -> None:
    source = Counted()
    batches: Any = iter(TrajectoryDataset(source, 1))
    thread = batches._thread
    next(batches)
    del batches
    thread.join(HANG_S)
    assert not thread.is_alive()
    loader = iter(DataLoader(TrajectoryDataset(source, 1), batch_size=None))
    next(loader)
    threads = [thread for thread in threading.enumerate() if thread.name == "forebay-prefetch"]
    assert len(threads) == 1
    del loader
    gc.collect()
    threads[0].join(HANG_S)
    assert not threads[0].is_alive()


def test_every_iteration_is_its_own() -> None:
    source = Counted()
    dataset = TrajectoryDataset(source, 1, prefetch=1)
    one, other = iter(dataset), iter(dataset)
    numbers = sorted(next(batches)["number"] for batches in (one, other, one, other))
    assert len(set(numbers)) == 4


def test_worker_processes_are_refused_with_the_reason() -> None:
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([small()])
        batches: Any = iter(DataLoader(TrajectoryDataset(buffer, 4), batch_size=None, num_workers=2))
        with pytest.raises(InvalidConfig, match=r"one process.*num_workers=0"):
            next(batches)
        # Torch would wait five seconds for each worker, and take one that is killed for a crash.
        signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]
        batches._worker_pids_set = False
        for worker in batches._workers:
            worker.terminate()
        assert len(buffer.sample(3)["step"]) == 3


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"batch_size": 1.5}, {"min_transitions": 0}, {"prefetch": 0}], ids=repr
)
def test_arguments_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        TrajectoryDataset(Counted(), **{"batch_size": 4, **wrong})
