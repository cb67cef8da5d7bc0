"""The managers for synchronous code: a producer in the background, batches in threads without an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import inspect
import logging
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import forebay
from forebay import (
    AsyncProduceStrategy,
    Budgets,
    BufferClosed,
    FunctionAgentLoop,
    InvalidInput,
    LostLease,
    NoProgress,
    ProducerState,
    ProducerStopped,
    ProduceStatus,
    ReplayBuffer,
    RolloutState,
    Sampler,
    Status,
    StorageError,
    SyncProduceStrategy,
    Task,
    TooManyFailures,
    WaitTimeout,
    WrongEventLoop,
    blocking,
)
from forebay.blocking import thread as blocking_thread
from forebay.manager.base import Manager
from tests.interrupts import interrupted
from tests.processes import HANG_S, finished, started
from tests.test_suspending import suspending

Function: TypeAlias = Callable[[RolloutState], Awaitable[None]]
Blocking: TypeAlias = blocking.AgentLoopManager | blocking.DisaggregatedAgentLoopManager

TASK = "math"
PROMPTS = [{"prompt": f"question {number}", "prompt_ids": [number] * (1 + number % 5)} for number in range(40)]

# --- tools ----------------------------------------------------------------------------------------------


async def answer(state: RolloutState) -> None:
    await asyncio.sleep(0.001)
    state.response, state.response_ids = "four", [1, 2, 3]
    state.status = Status.COMPLETED


async def never(state: RolloutState) -> None:
    await asyncio.Event().wait()


async def fail(state: RolloutState) -> None:
    raise RuntimeError("the engine is down")


def disaggregated(
    function: Function = answer, *, max_staleness: int = 1, buffer: ReplayBuffer | None = None
) -> forebay.DisaggregatedAgentLoopManager:
    buffer = ReplayBuffer() if buffer is None else buffer
    strategy = AsyncProduceStrategy(
        buffer, max_staleness=max_staleness, progress=NoProgress(), budgets=Budgets(max_consecutive_failures=3)
    )
    sampler = Sampler(PROMPTS, prompt_repeat_k=2, shuffle=False)
    task = Task(name=TASK, sampler=sampler, agent_loop=FunctionAgentLoop(function), strategy=strategy)
    return forebay.DisaggregatedAgentLoopManager(task, buffer)


def colocated(function: Function = answer, *, buffer: ReplayBuffer | None = None) -> forebay.AgentLoopManager:
    buffer = ReplayBuffer() if buffer is None else buffer
    strategy = SyncProduceStrategy(buffer, progress=NoProgress())
    sampler = Sampler(PROMPTS, prompt_repeat_k=2, shuffle=False)
    task = Task(name=TASK, sampler=sampler, agent_loop=FunctionAgentLoop(function), strategy=strategy)
    return forebay.AgentLoopManager(task, buffer)


@contextlib.contextmanager
def running(
    function: Function = answer, batch_size: int = 4, *, max_staleness: int = 1, buffer: ReplayBuffer | None = None
) -> Iterator[blocking.DisaggregatedAgentLoopManager]:
    native = disaggregated(function, max_staleness=max_staleness, buffer=buffer)
    with blocking.DisaggregatedAgentLoopManager(native) as manager:
        manager.start(batch_size)
        yield manager


def line(manager: Blocking) -> Counter[str]:
    """The ledger of the task, which is closed."""
    figures = Counter(manager.ledger().get(TASK, {}))
    assert figures["issued"] == sum(figures.values()) - figures["issued"]
    return figures


def ids(batch: blocking.Batch) -> list[int]:
    return sorted(group[0].group_id or 0 for group in batch.groups)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "the condition was never met"
        time.sleep(0.001)


def has_waiting(manager: Blocking, what: str) -> Callable[[], bool]:
    return lambda: what in manager.explain_wait()


@pytest.fixture(autouse=True)
def _no_complaints(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No exception is left unretrieved (asyncio logs those), and no thread is left running."""
    before = threading.enumerate()
    yield
    complaints = [
        record.getMessage()
        for when in ("setup", "call")
        for record in caplog.get_records(when)
        if record.name == "asyncio" and record.levelno >= logging.ERROR
    ]
    assert complaints == []
    until(lambda: not any(_is_left(thread.name) for thread in threading.enumerate() if thread not in before))


def _is_left(name: str) -> bool:
    pools = ("files", "data", "judge", "names", "group-end")  # their idle threads wait for more work
    return name.startswith("forebay-") and name.removeprefix("forebay-") not in pools


# --- the same methods -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("native", "facade"),
    [
        (forebay.AgentLoopManager, blocking.AgentLoopManager),
        (forebay.DisaggregatedAgentLoopManager, blocking.DisaggregatedAgentLoopManager),
    ],
)
def test_they_have_every_method_with_the_same_parameters(native: type[Manager], facade: type[Blocking]) -> None:
    for name, verb in inspect.getmembers(native, inspect.isfunction):
        if not name.startswith("_"):
            ours = getattr(facade, "start" if name == "produce_loop" else name)
            assert inspect.signature(ours).parameters == inspect.signature(verb).parameters, name
    for name, _ in inspect.getmembers(native, lambda value: isinstance(value, property)):
        assert hasattr(facade, name), name


def test_a_batch_has_all_attributes_of_a_native_one() -> None:
    with running() as manager, manager.get_batch(4, 1, timeout_s=HANG_S) as batch:
        for name in (name for name in dir(forebay.ProduceBatchResult) if not name.startswith("_")):
            assert hasattr(batch, name), name
        assert (batch.train_step, batch.status, len(batch.groups)) == (1, ProduceStatus.NORMAL, 4)
        assert batch.groups_by_task == {TASK: batch.groups}
        assert batch.task_batch_sizes == {TASK: 4}
        assert batch.task_results[TASK].produced_groups >= 4
        assert batch.total("failed_groups") == 0
        assert batch.raw_reward_mean is None
        assert batch.wait_s >= 0
        assert batch.stats()["forebay/math/batch/batch_size"] == 4
        assert repr(batch) == "<Batch for train step 1: 4 groups, normal, held>"


# --- training -------------------------------------------------------------------------------------------


def test_a_training_thread_and_a_producer_in_the_background() -> None:
    trained: list[int] = []

    def train(manager: blocking.DisaggregatedAgentLoopManager) -> None:
        for step in range(1, 7):
            with manager.get_batch(4, step, timeout_s=HANG_S) as batch:
                assert batch.status is ProduceStatus.NORMAL
                trained.extend(ids(batch))
            assert manager.pause_produce() >= 0
            assert manager.producer_state is ProducerState.PAUSED
            manager.continue_produce(step)

    with running() as manager, concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(train, manager).result(timeout=HANG_S)
        assert len(trained) == len(set(trained)) == 24
        assert line(manager)["trained"] == 24
        assert (manager.next_train_step, manager.model_step, manager.bound) == (7, 6, 8)
        assert manager.stats()["forebay/manager/producer_running"] == 1
        assert "next train step 7" in manager.explain_wait()
        manager.shutdown()
        assert line(manager)["in_flight"] == 0
        with pytest.raises(BufferClosed):
            manager.get_batch(4, 7).take()


def test_colocated_production_takes_turns_with_training() -> None:
    with blocking.AgentLoopManager(colocated) as manager:
        with manager.produce_batch(3, 1, model_step=0) as batch:
            assert ids(batch) == [0, 1, 2]
            assert line(manager)["leased"] == 3
        assert ids(manager.produce_batch(3, 2, model_step=1).take()) == [3, 4, 5]
        assert line(manager)["trained"] == 6
        assert (manager.next_train_step, manager.model_step) == (3, 1)
        manager.submit(manager.buffer.discard({}, "the end")).result(timeout=HANG_S)


def test_a_batch_is_taken_for_good() -> None:
    with running() as manager:
        batch = manager.get_batch(4, 1, timeout_s=HANG_S).take()
        assert batch.lease is None
        assert len(batch.groups) == 4
        assert repr(batch) == "<Batch for train step 1: 4 groups, normal>"
        assert line(manager)["trained"] == 4
        assert manager.next_train_step == 2


def test_a_batch_is_requested_when_its_request_is_used_and_only_once() -> None:
    with running() as manager:
        request = manager.get_batch(4, 1, timeout_s=HANG_S)
        assert line(manager)["leased"] == 0
        request.take()
        with pytest.raises(InvalidInput, match="already asked for"):
            request.take()
        with pytest.raises(InvalidInput, match="already asked for"), request:
            pass


def test_an_exception_in_the_block_returns_the_batch() -> None:
    with running() as manager:
        request = manager.get_batch(4, 1, timeout_s=HANG_S)
        with pytest.raises(RuntimeError, match="out of memory"), request as batch:
            raise RuntimeError("out of memory")
        lost = ids(batch)
        assert batch.lease is not None
        assert not batch.lease.open
        figures = line(manager)
        assert (figures["leased"], figures["trained"], manager.next_train_step) == (0, 0, 1)
        with manager.get_batch(4, 1, timeout_s=HANG_S) as batch:
            assert ids(batch) == lost


def test_the_lease_of_a_batch_settles_it() -> None:
    with running(max_staleness=3) as manager:
        with manager.get_batch(4, 1, timeout_s=HANG_S) as batch:
            assert batch.lease is not None
            batch.lease.reject(batch.groups[:1], "no gradient")
            assert len(batch.groups) == len(batch.lease.groups) == 3
            batch.lease.ack()
            assert line(manager)["trained"] == 3
            assert not batch.lease.open
        with manager.get_batch(4, 2, timeout_s=HANG_S) as batch:
            assert batch.lease is not None
            batch.lease.nack()
            with pytest.raises(LostLease):
                batch.lease.ack()
        figures = line(manager)
        assert (figures["trained"], figures["discarded"], figures["leased"]) == (3, 1, 0)


def test_ranks_share_a_batch() -> None:
    with running(batch_size=5) as manager, manager.get_batch(5, 1, timeout_s=HANG_S) as batch:
        shards = [batch.shard(rank, 2) for rank in range(2)]
        assert [len(shard) for shard in shards] == [3, 2]
        assert sorted(group[0].group_id or 0 for shard in shards for group in shard) == ids(batch)
        assert batch.lease is not None
        assert batch.lease.shard(1, 2) == shards[1]


def test_weights_that_are_too_old_make_an_empty_batch() -> None:
    with running(max_staleness=0) as manager:
        manager.get_batch(4, 1, timeout_s=HANG_S).take()
        with manager.get_batch(4, 2, timeout_s=HANG_S) as batch:
            assert (batch.status, batch.groups, batch.lease) == (ProduceStatus.EXPIRED_BATCH, [], None)
        manager.continue_produce(1)
        assert len(manager.get_batch(4, 2, timeout_s=HANG_S).take().groups) == 4


def test_two_trainers_ask_for_different_steps() -> None:
    both_hold = threading.Barrier(2)

    def train(manager: blocking.DisaggregatedAgentLoopManager, step: int) -> list[int]:
        with manager.get_batch(4, step, timeout_s=HANG_S) as batch:
            both_hold.wait(HANG_S)
            return ids(batch)

    with running(max_staleness=3) as manager, concurrent.futures.ThreadPoolExecutor(2) as pool:
        training = [pool.submit(train, manager, step) for step in (2, 1)]
        groups = [group for future in training for group in future.result(timeout=HANG_S)]
        assert sorted(groups) == list(range(8))
        assert line(manager)["trained"] == 8
        assert manager.next_train_step == 3


def test_many_threads_that_train_read_and_fail_lose_and_duplicate_no_group() -> None:
    trained: list[int] = []
    guard = threading.Lock()  # one trainer at a time, whichever it is: steps are acknowledged in order
    stop = threading.Event()

    def train(manager: blocking.DisaggregatedAgentLoopManager, seed: int) -> None:
        for attempt in range(12):
            with guard, contextlib.suppress(ZeroDivisionError):
                step = manager.next_train_step
                with manager.get_batch(3, step, timeout_s=HANG_S) as batch:
                    assert batch.status is ProduceStatus.NORMAL
                    if (attempt + seed) % 3 == 0:
                        raise ZeroDivisionError
                    trained.extend(ids(batch))
                manager.continue_produce(step)

    def watch(manager: blocking.DisaggregatedAgentLoopManager) -> None:
        while not stop.is_set():
            line(manager)
            manager.stats()
            manager.explain_wait()

    with running(batch_size=3) as manager, concurrent.futures.ThreadPoolExecutor(4) as pool:
        watching = pool.submit(watch, manager)
        try:
            for future in [pool.submit(train, manager, seed) for seed in range(3)]:
                future.result(timeout=HANG_S)
        finally:
            stop.set()
        watching.result(timeout=HANG_S)
        assert len(trained) == len(set(trained)) == 3 * 24
        assert line(manager)["trained"] == 3 * 24


# --- starting and failing -------------------------------------------------------------------------------


def test_a_failure_of_the_producer_surfaces_in_get_batch() -> None:
    working = threading.Event()

    async def sometimes(state: RolloutState) -> None:
        await (answer(state) if working.is_set() else fail(state))

    with running(sometimes) as manager:
        with pytest.raises(ProducerStopped, match="the engine is down") as caught:
            manager.get_batch(4, 1, timeout_s=HANG_S).take()
        assert isinstance(caught.value.__cause__, TooManyFailures)
        with pytest.raises(ProducerStopped), manager.get_batch(4, 1, timeout_s=HANG_S):
            pass
        assert "failed" in manager.explain_wait()
        working.set()
        manager.start(4)
        assert len(manager.get_batch(4, 1, timeout_s=HANG_S).take().groups) == 4


def test_a_failure_surfaces_in_a_get_batch_that_is_waiting() -> None:
    engine_down = threading.Event()

    async def until_it_fails(state: RolloutState) -> None:
        await asyncio.to_thread(engine_down.wait, HANG_S)
        await fail(state)

    with running(until_it_fails) as manager, concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(manager.get_batch(4, 1).take)
        until(has_waiting(manager, "the batch of train step 1"))
        engine_down.set()
        with pytest.raises(ProducerStopped, match="the engine is down"):
            waiting.result(timeout=HANG_S)


def test_start_raises_the_error_of_a_producer_that_cannot_start() -> None:
    with blocking.DisaggregatedAgentLoopManager(disaggregated()) as manager:
        with pytest.raises(ProducerStopped):
            manager.get_batch(4, 1).take()
        with pytest.raises(InvalidInput, match="batch_size"):
            manager.start(0)
        manager.start(4)
        with pytest.raises(InvalidInput, match="is already running"):
            manager.start(4)
        manager.get_batch(4, 1, timeout_s=HANG_S).take()


def test_a_timeout_explains_the_wait() -> None:
    with running(never) as manager, pytest.raises(WaitTimeout, match="batch of train step 1"):
        manager.get_batch(4, 1, timeout_s=0.01).take()


def test_no_caller_hangs_when_an_agent_calls_sys_exit() -> None:
    """asyncio raises SystemExit out of `run_forever`; the thread has to run the loop again for the waiting callers."""

    async def leave(state: RolloutState) -> None:
        await asyncio.sleep(0.001)
        sys.exit(3)

    with running(leave) as manager:
        with pytest.raises((ProducerStopped, SystemExit)):
            manager.get_batch(4, 1, timeout_s=HANG_S).take()
        assert line(manager)["in_flight"] == 0


def test_a_manager_is_built_on_the_thread_of_its_loop() -> None:
    built_on: list[str] = []

    def build() -> forebay.DisaggregatedAgentLoopManager:
        built_on.append(threading.current_thread().name)
        assert asyncio.get_running_loop().is_running()
        return disaggregated()

    with blocking.DisaggregatedAgentLoopManager(build) as manager:
        assert built_on == ["forebay-manager"]
        assert manager.buffer is manager.native.replay_buffer
        assert repr(manager) == "<blocking DisaggregatedAgentLoopManager of tasks math>"


def test_an_object_that_is_no_manager_is_refused() -> None:
    def build() -> Any:
        raise RuntimeError("no such engine")

    with pytest.raises(RuntimeError, match="no such engine"):
        blocking.AgentLoopManager(build)
    with pytest.raises(InvalidInput, match=r"expected a forebay\.AgentLoopManager"):
        blocking.AgentLoopManager(disaggregated())  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"expected a forebay\.DisaggregatedAgentLoopManager"):
        blocking.DisaggregatedAgentLoopManager(lambda: colocated())  # type: ignore[arg-type, return-value]


def test_a_blocking_call_from_the_loop_itself_is_refused_instead_of_hanging() -> None:
    with blocking.DisaggregatedAgentLoopManager(disaggregated()) as manager:

        async def call(verb: Callable[[], object]) -> object:
            return verb()

        for verb in (manager.ledger, manager.get_batch(4, 1).take, manager.close, lambda: manager.start(4)):
            with pytest.raises(WrongEventLoop, match="wait for itself"):
                manager.submit(call(verb)).result(timeout=HANG_S)


# --- interrupts -----------------------------------------------------------------------------------------


def test_an_interrupted_wait_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as manager:
        with interrupted(monkeypatch, after_the_result=False):
            manager.get_batch(4, 1).take()
        assert line(manager)["leased"] == 0
        assert "the batch of train step 1" not in manager.explain_wait()
        step = 2 if line(manager)["trained"] else 1  # it may have been taken for good at the last moment
        assert len(manager.get_batch(4, step, timeout_s=HANG_S).take().groups) == 4


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_granted_while_the_caller_is_interrupted_is_returned(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    with running(buffer=ReplayBuffer(storage=suspending(seed))) as manager:
        with interrupted(monkeypatch, after_the_result=True), manager.get_batch(4, 1, timeout_s=HANG_S):
            pytest.fail("entered")
        figures = line(manager)
        assert (figures["leased"], figures["trained"]) == (0, 0)
        assert ids(manager.get_batch(4, 1, timeout_s=HANG_S).take()) == [0, 1, 2, 3]


def test_interrupted_production_has_ended_when_the_interrupt_surfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next call is refused, because only one may produce at a time."""
    with blocking.AgentLoopManager(colocated) as manager:
        for _ in range(3):
            with interrupted(monkeypatch, after_the_result=False):
                manager.produce_batch(3, 1, model_step=0).take()
        with interrupted(monkeypatch, after_the_result=True), manager.produce_batch(3, 1, model_step=0):
            pytest.fail("entered")
        figures = line(manager)
        assert (figures["in_flight"], figures["leased"], figures["trained"]) == (0, 0, 0)
        assert ids(manager.produce_batch(3, 1, model_step=0).take()) == [0, 1, 2]


def test_an_interrupted_start_leaves_no_producer_running(monkeypatch: pytest.MonkeyPatch) -> None:
    with blocking.DisaggregatedAgentLoopManager(disaggregated()) as manager:
        for after_the_result in (False, True):
            with interrupted(monkeypatch, after_the_result=after_the_result):
                manager.start(4)
            assert manager.stats()["forebay/manager/producer_running"] == 0
        manager.start(4)
        manager.get_batch(4, 1, timeout_s=HANG_S).take()


def test_an_interrupt_at_the_end_of_the_block_waits_for_the_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(buffer=ReplayBuffer(storage=suspending(0))) as manager:
        with contextlib.ExitStack() as stack:
            stack.enter_context(manager.get_batch(4, 1, timeout_s=HANG_S))
            with interrupted(monkeypatch, after_the_result=False):
                stack.close()
        assert (line(manager)["leased"], line(manager)["trained"]) == (0, 4)
        assert manager.next_train_step == 2


_PROGRAM = """
import asyncio, sys, threading
from tests.test_blocking_manager import HANG_S, answer, disaggregated, has_waiting, never, until
from forebay import blocking

async def first_only(state):
    await (answer(state) if state.group_id < 8 else never(state))

manager = blocking.DisaggregatedAgentLoopManager(disaggregated(first_only))
manager.start(4)
manager.get_batch(4, 1, timeout_s=HANG_S).take()
"""


def test_no_caller_hangs_or_misses_an_interrupt_that_comes_at_any_moment() -> None:
    """No lock stays locked while the loop waits for it, and no finalizer swallows an interrupt (stderr is empty)."""
    hammer = """
import random, signal

class Interrupt(BaseException):
    pass

def interrupt(*_):
    raise Interrupt

signal.signal(signal.SIGALRM, interrupt)
chance, interrupts = random.Random(0), 0
while interrupts < 500:
    try:
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 3e-4))
        for _ in range(20):
            manager.ledger()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupt:
        interrupts += 1
assert manager.next_train_step == 2
manager.close()
"""
    done = finished("-c", _PROGRAM + hammer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_exits_without_closing_its_manager() -> None:
    done = finished("-c", _PROGRAM + "manager.get_batch(4, 2).__enter__()")
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_ends_a_process_that_waits_for_a_batch() -> None:
    waiting = """
def tell():
    until(has_waiting(manager, "batch of train step 3"))
    print("waiting", flush=True)

with manager:
    manager.get_batch(4, 2, timeout_s=HANG_S).take()
    manager.continue_produce(1)
    threading.Thread(target=tell).start()
    try:
        manager.get_batch(4, 3).take()
    except KeyboardInterrupt:
        print(manager.ledger()["math"]["leased"])
        raise
"""
    with started("-c", _PROGRAM + waiting) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "waiting\n"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate()
    assert (out, err.splitlines()[-1]) == ("0\n", "KeyboardInterrupt")


# --- checkpoints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts_only", [False, True])
def test_a_new_manager_resumes_a_checkpoint(tmp_path: Path, prompts_only: bool) -> None:
    with running() as manager:
        taken = ids(manager.get_batch(4, 1, timeout_s=HANG_S).take())
        with manager.get_batch(4, 2, timeout_s=HANG_S):
            manager.save(tmp_path / "plane", 1, no_save_replay_buffer=prompts_only)
    with blocking.DisaggregatedAgentLoopManager(disaggregated) as fresh:
        assert fresh.resume(tmp_path / "plane") == 1
        assert (fresh.next_train_step, fresh.model_step) == (2, 1)
        fresh.start(4)
        assert fresh.producer_state is ProducerState.PAUSED
        fresh.continue_produce(1)
        for step in (2, 3):
            taken += ids(fresh.get_batch(4, step, timeout_s=HANG_S).take())
        assert sorted(taken) == list(range(12))
        assert line(fresh)["trained"] == 12


def test_a_new_colocated_manager_resumes_a_checkpoint(tmp_path: Path) -> None:
    with blocking.AgentLoopManager(colocated) as manager:
        manager.produce_batch(3, 1, model_step=0).take()
        manager.save(tmp_path / "plane", 1)
        with pytest.raises(InvalidInput, match="skip"):
            manager.save(tmp_path / "plane", 0)
    with blocking.AgentLoopManager(colocated) as fresh:
        step = fresh.resume(tmp_path / "plane") + 1
        assert ids(fresh.produce_batch(3, step, model_step=step - 1).take()) == [3, 4, 5]


# --- the end --------------------------------------------------------------------------------------------


def test_closing_ends_get_batch_in_other_threads_and_refuses_later_calls(tmp_path: Path) -> None:
    with running(never) as manager, concurrent.futures.ThreadPoolExecutor(2) as pool:
        request = manager.get_batch(4, 2)
        waiting = [pool.submit(manager.get_batch(4, 1).take), pool.submit(manager.get_batch(4, 1).__enter__)]
        until(has_waiting(manager, "the batch of train step 1"))
        manager.close()
        for future in waiting:
            with pytest.raises(BufferClosed):
                future.result(timeout=HANG_S)
        manager.close()
        calls: list[Callable[[], object]] = [
            lambda: manager.get_batch(4, 1),
            request.take,
            request.__enter__,
            lambda: manager.start(4),
            manager.pause_produce,
            lambda: manager.continue_produce(1),
            lambda: manager.save(tmp_path, 1),
            lambda: manager.resume(tmp_path),
            manager.stats,
            manager.ledger,
            manager.explain_wait,
            manager.shutdown,
            lambda: manager.submit(asyncio.sleep(0)),
        ]
        for call in calls:
            with pytest.raises(BufferClosed, match="manager is closed"):
                call()


def test_closing_ends_produce_batch_in_another_thread() -> None:
    with blocking.AgentLoopManager(colocated(never)) as manager, concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(manager.produce_batch(3, 1, model_step=0).take)
        until(has_waiting(manager, "task 'math' to have 3 completed groups"))
        manager.close()
        with pytest.raises(BufferClosed):
            waiting.result(timeout=HANG_S)
        with pytest.raises(BufferClosed):
            manager.produce_batch(3, 1, model_step=0)


def test_closing_returns_a_batch_that_is_being_trained_on(caplog: pytest.LogCaptureFixture) -> None:
    buffer = ReplayBuffer()
    with running(buffer=buffer) as manager:
        with pytest.raises(BufferClosed), manager.get_batch(4, 1, timeout_s=HANG_S):
            manager.close()
        assert asyncio.run(buffer.storage.summary()).ledger()[TASK]["leased"] == 0

    def train(manager: blocking.DisaggregatedAgentLoopManager) -> None:
        with manager.get_batch(4, 1, timeout_s=HANG_S):
            manager.close()
            raise RuntimeError("its own error")

    with running() as manager, pytest.raises(RuntimeError, match="its own error"):
        train(manager)
    assert "lease_lost" in caplog.text


def test_closing_returns_groups_in_flight() -> None:
    buffer = ReplayBuffer()
    with running(never, buffer=buffer) as manager:
        until(lambda: line(manager)["in_flight"] == 4)
    ledger = asyncio.run(buffer.storage.summary()).ledger()[TASK]
    assert (ledger["in_flight"], ledger["buffered"]) == (0, 4)


def test_a_manager_closes_though_a_task_ignores_its_cancel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(blocking_thread, "_END_S", 0.05)
    ended = threading.Event()

    async def stubborn() -> None:
        while not ended.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.5)
                ended.set()

    manager = blocking.DisaggregatedAgentLoopManager(disaggregated())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        left_behind = manager.submit(stubborn())
        waiting = pool.submit(left_behind.result)
        manager.close()
        with pytest.raises(concurrent.futures.CancelledError):
            waiting.result(timeout=HANG_S)
    assert "tasks_left_behind" in caplog.text
    ended.set()
    del left_behind, waiting
    gc.collect()
    caplog.clear()  # asyncio logs the task, too, when it is collected


def test_close_raises_its_error_after_everything_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error tells that groups could not be returned and are still in flight."""

    async def broken(owner: str) -> None:
        raise StorageError("the disk is full")

    manager = blocking.DisaggregatedAgentLoopManager(disaggregated())
    manager.start(4)
    monkeypatch.setattr(manager.buffer.storage, "close", broken)
    with pytest.raises(StorageError, match="disk is full"):
        manager.close()
    manager.close()


def test_the_error_of_a_block_is_raised_when_closing_fails_too() -> None:
    class FailsToClose(SyncProduceStrategy):
        async def close(self) -> None:
            await super().close()
            raise RuntimeError("cleaning up failed")

    def make() -> blocking.AgentLoopManager:
        buffer = ReplayBuffer()
        strategy = FailsToClose(buffer, progress=NoProgress())
        task = Task(name=TASK, sampler=Sampler(PROMPTS), agent_loop=FunctionAgentLoop(answer), strategy=strategy)
        return blocking.AgentLoopManager(lambda: forebay.AgentLoopManager([task], buffer))

    with pytest.raises(ValueError, match="the original"), make():
        raise ValueError("the original")
    with pytest.raises(RuntimeError, match="cleaning up failed"), make():
        pass
