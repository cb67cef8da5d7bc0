"""The blocking buffer: the methods of the native one, from any thread."""

from __future__ import annotations

import concurrent.futures
import inspect
import pydoc
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay import AsyncReplayBufferConfig, BufferClosed, Status, WaitTimeout, WrongEventLoop, blocking
from forebay.testing import make_group
from tests.interrupts import interrupted
from tests.processes import HANG_S


@pytest.fixture
def buffer() -> Iterator[blocking.ReplayBuffer]:
    with blocking.ReplayBuffer(AsyncReplayBufferConfig(max_groups=64)) as buffer:
        yield buffer


# For samplers, producers and managers, which run on the buffer's own loop and use the native buffer. Another thread
# would get answers that are already out of date.
HOOKS = {
    "asking",
    "bounded_bytes",
    "completed_and_taken",
    "give_back_owed",
    "issue",
    "lease_attempt",
    "max_groups",
    "nudge",
    "others_hold",
    "position",
    "produced",
    "produces",
    "redraw",
    "resume_with",
    "room",
    "save_with",
    "train_steps",
    "try_lease",
    "until",
}


def test_it_has_every_method_with_the_same_parameters_and_documentation() -> None:
    assert [name for name in sorted(HOOKS) if hasattr(blocking.ReplayBuffer, name)] == []
    for name, method in inspect.getmembers(forebay.ReplayBuffer, inspect.isfunction):
        if not name.startswith("_") and name not in HOOKS:
            ours = getattr(blocking.ReplayBuffer, name)
            assert inspect.isfunction(ours), name
            assert inspect.signature(ours).parameters == inspect.signature(method).parameters, name
            if name not in ("close", "lease_batch"):  # which differ for synchronous code
                assert (ours.__doc__, inspect.signature(ours)) == (method.__doc__, inspect.signature(method)), name


def test_help_shows_the_parameters_the_result_and_the_documentation() -> None:
    shown = pydoc.plain(pydoc.render_doc(blocking.ReplayBuffer))
    assert "count(self, task_name: 'str', group_status: 'Status') -> 'int'" in shown
    assert "Buffered groups of a task and status" in shown
    assert ") -> 'Lease'\n" in shown
    assert "Wait for a full batch and lease it" in shown


def test_a_method_that_the_native_class_overrides_is_called() -> None:
    class Counting(forebay.ReplayBuffer):
        async def count(self, task_name: str, group_status: Status) -> int:
            return 1_000 + await super().count(task_name, group_status)

    with blocking.ReplayBuffer(Counting()) as buffer:
        assert buffer.count("math", Status.COMPLETED) == 1_000


def test_wrong_arguments_are_a_type_error_of_the_caller(buffer: blocking.ReplayBuffer) -> None:
    with pytest.raises(TypeError, match="no_such_option"):
        buffer.count("math", Status.COMPLETED, no_such_option=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="train_step"):
        buffer.lease_batch({"math": 1})  # type: ignore[call-arg]


def test_every_method_works(buffer: blocking.ReplayBuffer, tmp_path: Path) -> None:
    buffer.set_limits("math", stale_threshold=9)
    uid = buffer.put(make_group(score=1.0), "math", model_step=0)
    assert uid is not None
    buffer.put_many([make_group(), make_group(status=Status.ABORTED)], "math", model_step=1)
    assert len(buffer) == 3
    assert buffer.count("math", Status.COMPLETED) == 2
    assert buffer.count_statuses(["math"], [Status.ABORTED]) == {"math": {Status.ABORTED: 1}}
    assert buffer.is_ready({"math": 2})
    buffer.wait_ready({"math": 2}, timeout_s=HANG_S)
    assert [record.uid for record in buffer.query({"reward": 1.0})] == [uid]
    assert buffer.read(uid) is not None
    assert buffer.set_priority({uid: 2.0}) == 1
    with buffer.lease_batch({"math": 1}, train_step=1, timeout_s=HANG_S) as lease:
        assert lease.train_step == 1
        assert len(lease.groups) == len(lease.groups_by_task["math"]) == 1
    buffer.lease_batch({"math": 1}, train_step=1).nack()
    buffer.lease_batch({"math": 1}, train_step=1).ack()
    assert buffer.refresh_staleness(task_stale_thresholds={"math": 1}, current_train_step=1) == {"math": 0}
    assert buffer.get(1, "math", Status.COMPLETED) == []
    assert buffer.take_batch({"math": 1}) == ({"math": []}, {"math": 0})
    buffer.save(tmp_path / "checkpoint", model_step=1)
    with blocking.ReplayBuffer(AsyncReplayBufferConfig()) as fresh:
        assert fresh.resume(tmp_path / "checkpoint") == 1
        assert len(fresh) == 1
    assert buffer.discard({}, "the end") == 1
    assert buffer.ledger()["math"]["trained"] == 2
    assert buffer.reasons() == {"math": {"the end": 1}}
    assert buffer.stats()["forebay/math/discarded"] == 1
    assert "nothing is waiting" in buffer.explain_wait()
    with pytest.raises(WaitTimeout):
        buffer.lease_batch({"math": 1}, train_step=1, timeout_s=0)


def test_an_exception_in_the_block_returns_the_leased_groups(buffer: blocking.ReplayBuffer) -> None:
    buffer.put(make_group(), "math")
    with pytest.raises(RuntimeError), buffer.lease_batch({"math": 1}, train_step=1) as lease:
        raise RuntimeError("out of memory")
    assert not lease.native.open
    assert buffer.ledger()["math"]["buffered"] == 1


def test_a_lease_can_reject(buffer: blocking.ReplayBuffer) -> None:
    buffer.put(make_group(), "math")
    with buffer.lease_batch({"math": 1}, train_step=1) as lease:
        lease.reject(lease.groups, "no gradient")
    assert buffer.reasons() == {"math": {"no gradient": 1}}


def test_many_threads_lose_and_duplicate_no_group(buffer: blocking.ReplayBuffer) -> None:
    producers, groups_each = 4, 150
    total = producers * groups_each
    taken: list[int] = []
    guard = threading.Lock()

    def produce(number: int) -> None:
        for i in range(groups_each):
            buffer.put(make_group(group_id=number * groups_each + i), "math", model_step=0, timeout_s=HANG_S)

    def train(seed: int) -> None:
        choice = random.Random(seed)
        while True:
            with guard:
                if len(taken) >= total:
                    return
            try:
                lease = buffer.lease_batch({"math": choice.randint(1, 3)}, train_step=1, timeout_s=0.01)
            except WaitTimeout:
                continue
            if choice.random() < 0.2:
                lease.nack()
                continue
            ids = [group[0].group_id or 0 for group in lease.groups]
            lease.ack()
            with guard:
                taken.extend(ids)

    def watch(stop: threading.Event) -> None:
        while not stop.is_set():
            line = buffer.ledger().get("math")
            assert line is None or line["issued"] == sum(line.values()) - line["issued"]
            buffer.stats()
            buffer.explain_wait()
            len(buffer)

    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(producers + 4) as pool:
        watcher = pool.submit(watch, stop)
        work = [pool.submit(produce, number) for number in range(producers)]
        # Up to two groups may be left that are too few for a batch of three; a batch of one takes them.
        work += [pool.submit(train, seed) for seed in range(3)]
        try:
            for future in work:
                future.result(timeout=HANG_S)
        finally:
            stop.set()
        watcher.result(timeout=HANG_S)
    assert sorted(taken) == list(range(total))
    assert buffer.ledger()["math"]["trained"] == total


def test_producers_run_on_the_buffers_own_loop(buffer: blocking.ReplayBuffer) -> None:
    async def produce() -> int:
        for _ in range(3):
            await buffer.native.put(make_group(), "math")
        return 3

    produced = buffer.submit(produce())
    buffer.wait_ready({"math": 3}, timeout_s=HANG_S)
    assert produced.result(timeout=HANG_S) == 3


def test_a_blocking_call_from_the_loop_itself_is_refused_instead_of_hanging(buffer: blocking.ReplayBuffer) -> None:
    async def produce() -> None:
        buffer.put(make_group(), "math")

    with pytest.raises(WrongEventLoop, match="wait for itself"):
        buffer.submit(produce()).result(timeout=HANG_S)


def test_an_interrupted_wait_leaves_nothing_behind(
    buffer: blocking.ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with interrupted(monkeypatch, after_the_result=False):
        buffer.lease_batch({"math": 1}, train_step=1)
    buffer.put(make_group(), "math")
    with buffer.lease_batch({"math": 1}, train_step=1, timeout_s=HANG_S) as lease:
        assert len(lease.groups) == 1
    assert "nothing is waiting" in buffer.explain_wait()


def test_a_lease_granted_while_the_caller_is_interrupted_is_returned(
    buffer: blocking.ReplayBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer.put(make_group(), "math")
    with interrupted(monkeypatch, after_the_result=True):
        buffer.lease_batch({"math": 1}, train_step=1)
    line = buffer.ledger()["math"]
    assert (line["buffered"], line["leased"]) == (1, 0)


def test_closing_ends_waits_in_other_threads_and_refuses_later_calls() -> None:
    buffer = blocking.ReplayBuffer(forebay.ReplayBuffer())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(buffer.wait_ready, {"math": 1})
        while "waited" not in buffer.explain_wait():
            pass
        buffer.close()
        with pytest.raises(BufferClosed):
            waiting.result(timeout=HANG_S)
    buffer.close()
    with pytest.raises(BufferClosed):
        buffer.put(make_group(), "math")


@pytest.mark.parametrize("closers", [1, 2])
def test_no_call_hangs_when_other_threads_close_the_buffer(closers: int) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(30):
            buffer = blocking.ReplayBuffer(forebay.ReplayBuffer())
            start = threading.Barrier(3 + closers)

            def call(buffer: blocking.ReplayBuffer = buffer, start: threading.Barrier = start) -> None:
                start.wait()
                try:
                    while True:
                        buffer.count("math", Status.COMPLETED)
                except BufferClosed:
                    return

            def close(buffer: blocking.ReplayBuffer = buffer, start: threading.Barrier = start) -> None:
                start.wait()
                buffer.close()

            with concurrent.futures.ThreadPoolExecutor(3 + closers) as pool:
                for future in [pool.submit(call) for _ in range(3)] + [pool.submit(close) for _ in range(closers)]:
                    future.result(timeout=HANG_S)
    finally:
        sys.setswitchinterval(before)
