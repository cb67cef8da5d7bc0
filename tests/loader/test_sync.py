"""`RolloutLoader` in one process: threads, interrupts at chosen moments, and the end."""

from __future__ import annotations

import _thread
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

from forebay import (
    AsyncBatch,
    AsyncRolloutLoader,
    Batch,
    Budgets,
    BufferClosed,
    InvalidInput,
    LostLease,
    MemoryStorage,
    RolloutLoader,
    RolloutState,
    Status,
    StorageError,
    Task,
    Timeouts,
    TooManyFailures,
    WaitTimeout,
    WeightsTooOld,
    WrongEventLoop,
)
from forebay.blocking import thread as blocking_thread
from forebay.loader.functions import Stop
from forebay.storage.base import Storage
from tests.interrupts import interrupted
from tests.processes import HANG_S, finished
from tests.test_suspending import suspending

Function: TypeAlias = Callable[[RolloutState], Awaitable[None]]

TASK = "math"
PROMPTS = [{"prompt": f"question {number}", "prompt_ids": [number] * (1 + number % 5)} for number in range(40)]
MODES = ("in_turns", "ahead")
each_mode = pytest.mark.parametrize("mode", MODES)

# --- tools ----------------------------------------------------------------------------------------------


async def answer(state: RolloutState) -> None:
    await asyncio.sleep(0)
    state.response, state.response_ids = "four", [1, 2, 3]
    state.status = Status.COMPLETED


async def never(state: RolloutState) -> None:
    await asyncio.Event().wait()


async def fail(state: RolloutState) -> None:
    raise RuntimeError("the engine is down")


async def first_step_only(state: RolloutState) -> None:
    await (answer(state) if (state.group_id or 0) < 4 else never(state))


def make(function: Function = answer, *, mode: Any = "ahead", groups: int = 4, **options: Any) -> RolloutLoader:
    budgets = Budgets(max_consecutive_failures=3)
    task = Task(TASK, PROMPTS, function, group_size=2, shuffle=False, budgets=budgets)
    defaults: dict[str, Any] = {"max_staleness": 1, "timeout_s": HANG_S, "progress": None}
    return RolloutLoader(task, batch_groups=groups, mode=mode, **(defaults | options))


def line(loader: RolloutLoader) -> Counter[str]:
    """The ledger of the task, which is closed."""
    return closed(loader.ledger().get(TASK, {}))


def closed(found: Any) -> Counter[str]:
    figures = Counter({name: int(n) for name, n in found.items()})
    assert figures["issued"] == sum(figures.values()) - figures["issued"]
    return figures


def line_in(storage: Storage) -> Counter[str]:
    """The ledger of a storage whose loader is closed."""
    return closed(asyncio.run(storage.summary()).ledger()[TASK])


def ids(batch: Batch) -> list[int]:
    return sorted(group[0].group_id or 0 for group in batch.groups)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "the condition was never met"
        time.sleep(0.001)


def waits(loader: RolloutLoader, what: str = "completed groups|train step 1: 4") -> Callable[[], bool]:
    """Whether a thread waits for a batch, in either mode."""
    return lambda: any(part in loader.explain_wait() for part in what.split("|"))


def no_load(step: int) -> None:
    """Weights that need not be loaded."""


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


def test_it_has_every_verb_with_the_same_parameters() -> None:
    internal = {"begin_resume", "begin_update", "call_hook", "end_update", "next_step_of", "take_back", "hand_out"}
    internal |= {"evaluated", "next_batch", "open", "produce"}
    for name, verb in inspect.getmembers(AsyncRolloutLoader, inspect.isfunction):
        if not name.startswith("_") and name not in internal:
            ours = getattr(RolloutLoader, name)
            assert inspect.signature(ours).parameters == inspect.signature(verb).parameters, name
    for name, _ in inspect.getmembers(AsyncRolloutLoader, lambda value: isinstance(value, property)):
        assert hasattr(RolloutLoader, name) or name in ("batch_groups", "manager"), name


def test_a_batch_has_all_attributes_of_an_async_one() -> None:
    with make() as loader:
        batch = next(loader.batches(1))
        for name in (name for name in dir(AsyncBatch) if not name.startswith("_")):
            assert hasattr(batch, name) or name == "give_back", name
        assert (batch.step, len(batch.groups), batch.open) == (1, 4, True)
        assert batch.groups_by_task == {TASK: batch.groups}
        assert batch.task_batch_sizes == {TASK: 4}
        assert batch.task_results[TASK].produced_groups >= 4
        assert batch.stats()["forebay/math/batch/batch_size"] == 4
        assert repr(batch) == "<Batch for train step 1: 4 groups, held>"
        batch.ack()
        assert repr(batch) == "<Batch for train step 1: 4 groups, settled>"


# --- training -------------------------------------------------------------------------------------------


@each_mode
def test_a_loop_in_a_thread_trains_every_group_once(mode: str) -> None:
    trained: list[int] = []

    def train(loader: RolloutLoader) -> None:
        for batch in loader.batches(1, 6):
            trained.extend(ids(batch))
            loader.update_weights(no_load)

    with make(mode=mode) as loader, concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(train, loader).result(timeout=HANG_S)
        assert len(trained) == len(set(trained)) == 24
        assert line(loader)["trained"] == 24
        assert (loader.next_step, loader.model_step) == (7, 6)
        assert "next train step 7" in loader.explain_wait()


@each_mode
def test_a_batch_is_acknowledged_when_the_next_one_is_asked_for_and_not_earlier(mode: str) -> None:
    with make(mode=mode) as loader:
        batches = loader.batches(1, 2)
        next(batches)
        assert (line(loader)["trained"], line(loader)["leased"], loader.next_step) == (0, 4, 1)
        next(batches)
        assert (line(loader)["trained"], line(loader)["leased"], loader.next_step) == (4, 4, 2)
        with pytest.raises(StopIteration):
            next(batches)
        assert (line(loader)["trained"], line(loader)["leased"], loader.next_step) == (8, 0, 3)


@each_mode
def test_an_update_and_a_save_acknowledge_the_batches_up_to_their_step(mode: str, tmp_path: Path) -> None:
    with make(mode=mode, max_staleness=3, checkpoints=tmp_path) as loader:
        batches = loader.batches(1, ahead=3)
        leased = [next(batches) for _ in range(3)]
        loader.update_weights(no_load, 1)
        assert ([batch.open for batch in leased], loader.next_step) == ([False, True, True], 2)
        loader.save(2)
        assert ([batch.open for batch in leased], loader.next_step) == ([False, False, True], 3)
        assert (line(loader)["trained"], line(loader)["leased"]) == (8, 4)


@pytest.mark.parametrize("how", ["ack", "update", "save"])
def test_a_later_step_that_is_acknowledged_passes_over_one_that_was_given_back(how: str, tmp_path: Path) -> None:
    with make(mode="ahead", max_staleness=3, checkpoints=tmp_path) as loader:
        batches = loader.batches(1, ahead=3)
        first, second, third = (next(batches) for _ in range(3))
        second.nack()
        if how == "ack":
            first.ack()
            third.ack()
        elif how == "update":
            loader.update_weights(no_load, 3)
        else:
            loader.save(3)
        assert (line(loader)["trained"], loader.next_step) == (8, 4)
        again = next(batches)
        assert (again.step, ids(again)) == (4, ids(second))  # its groups are not lost


@each_mode
@pytest.mark.parametrize("how", ["break", "exception"])
def test_a_batch_that_was_left_is_handed_out_again_by_the_next_call(mode: str, how: str) -> None:
    with make(mode=mode) as loader:
        with contextlib.suppress(ZeroDivisionError):
            for batch in loader.batches(1, 3):
                left = ids(batch)
                if how == "break":
                    break
                raise ZeroDivisionError
        assert (line(loader)["leased"], line(loader)["trained"]) == (4, 0)
        again = next(loader.batches(1, 3))
        assert ids(again) == left
        assert (line(loader)["leased"], line(loader)["trained"]) == (4, 0)


def test_an_exception_in_a_with_block_returns_the_batch() -> None:
    with make() as loader:
        batch = next(loader.batches(1))
        with pytest.raises(RuntimeError, match="out of memory"), batch:
            raise RuntimeError("out of memory")
        assert not batch.open
        assert (line(loader)["leased"], line(loader)["trained"], loader.next_step) == (0, 0, 1)
        with next(loader.batches(1)) as again:
            assert ids(again) == ids(batch)
        assert (line(loader)["trained"], loader.next_step) == (4, 2)


def test_a_batch_is_settled_by_its_own_methods() -> None:
    with make(max_staleness=3) as loader:
        batches = loader.batches(1, ahead=2)
        first = next(batches)
        first.reject(first.groups[:1], "no gradient")
        assert len(first.groups) == 3
        second = next(batches)
        with pytest.raises(InvalidInput, match="batch of step 1 is still leased"):
            second.ack()
        with pytest.raises(InvalidInput, match="acknowledge that of step 1 first"):
            next(batches)
        first.ack()
        second.nack()
        with pytest.raises(LostLease):
            second.ack()
        figures = line(loader)
        assert (figures["trained"], figures["discarded"], figures["leased"]) == (3, 1, 0)


def test_ranks_share_a_batch() -> None:
    with make(groups=5) as loader:
        batch = next(loader.batches(1))
        shards = [batch.shard(rank, 2) for rank in range(2)]
        assert sorted(len(shard) for shard in shards) == [2, 3]
        assert sorted(group[0].group_id or 0 for shard in shards for group in shard) == ids(batch)


def test_weights_that_are_too_old_are_an_error_that_an_update_ends() -> None:
    with make(max_staleness=0) as loader:
        batches = loader.batches(1, 2)
        next(batches)
        with pytest.raises(WeightsTooOld):
            next(batches)
        assert line(loader)["trained"] == 4
        loader.update_weights(no_load)
        assert [batch.step for batch in loader.batches(2, 2)] == [2]


def test_batches_that_were_leased_ahead_are_settled_from_other_threads() -> None:
    with make(max_staleness=3) as loader, concurrent.futures.ThreadPoolExecutor(2) as pool:
        batches = loader.batches(1, ahead=3)
        leased = [next(batches) for _ in range(3)]
        assert sorted(group for batch in leased for group in ids(batch)) == list(range(12))
        for batch in leased:
            pool.submit(batch.ack).result(timeout=HANG_S)
        assert (line(loader)["trained"], loader.next_step) == (12, 4)


def test_many_threads_that_train_read_and_fail_lose_and_duplicate_no_group() -> None:
    trained: list[int] = []
    guard = threading.Lock()  # one trainer at a time, whichever it is: steps are acknowledged in order
    stop = threading.Event()

    def train(loader: RolloutLoader, seed: int) -> None:
        for attempt in range(12):
            with guard, contextlib.suppress(ZeroDivisionError):
                step = loader.next_step
                with next(loader.batches(step, step)) as batch:
                    if (attempt + seed) % 3 == 0:
                        raise ZeroDivisionError
                    trained.extend(ids(batch))
                loader.update_weights(no_load)

    def watch(loader: RolloutLoader) -> None:
        while not stop.is_set():
            line(loader)
            loader.stats()
            loader.explain_wait()

    with make(groups=3) as loader, concurrent.futures.ThreadPoolExecutor(4) as pool:
        watching = pool.submit(watch, loader)
        try:
            for future in [pool.submit(train, loader, seed) for seed in range(3)]:
                future.result(timeout=HANG_S)
        finally:
            stop.set()
        watching.result(timeout=HANG_S)
        assert len(trained) == len(set(trained)) == 3 * 24
        assert line(loader)["trained"] == 3 * 24


# --- failing --------------------------------------------------------------------------------------------


@each_mode
def test_a_failure_of_the_producer_surfaces_and_the_next_call_tries_again(mode: str) -> None:
    working = threading.Event()

    async def sometimes(state: RolloutState) -> None:
        await (answer(state) if working.is_set() else fail(state))

    with make(sometimes, mode=mode) as loader:
        with pytest.raises(TooManyFailures, match="the engine is down"):
            next(loader.batches(1))
        working.set()
        assert len(next(loader.batches(1)).groups) == 4


def test_a_failure_surfaces_in_a_wait() -> None:
    engine_down = threading.Event()

    async def until_it_fails(state: RolloutState) -> None:
        await asyncio.to_thread(engine_down.wait, HANG_S)
        await fail(state)

    with make(until_it_fails) as loader, concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, loader.batches(1))
        until(waits(loader))
        engine_down.set()
        with pytest.raises(TooManyFailures, match="the engine is down"):
            waiting.result(timeout=HANG_S)


@each_mode
def test_a_timeout_explains_the_wait(mode: str) -> None:
    with make(never, mode=mode) as loader, pytest.raises(WaitTimeout, match="batch of train step 1"):
        next(loader.batches(1, timeout_s=0.01))


@each_mode
def test_no_caller_hangs_when_an_agent_calls_sys_exit(mode: str) -> None:
    """asyncio raises SystemExit out of `run_forever`; the thread has to run the loop again for the waiting callers."""

    async def leave(state: RolloutState) -> None:
        await asyncio.sleep(0)
        sys.exit(3)

    with make(leave, mode=mode) as loader:
        with pytest.raises((BufferClosed, SystemExit, Exception)):
            next(loader.batches(1))
        assert line(loader)["in_flight"] == 0


def test_a_blocking_call_from_the_loop_itself_is_refused_instead_of_hanging() -> None:
    refused: list[str] = []

    async def calls_back(state: RolloutState) -> None:
        verbs: list[Callable[[], object]] = [loader.ledger, lambda: next(batches), loader.close, lambda: loader.save(1)]
        for verb in verbs:
            with pytest.raises(WrongEventLoop, match="wait for itself"):
                verb()
            refused.append("")
        await answer(state)

    loader = make(calls_back, groups=1)
    with loader:
        batches = loader.batches(1)
        next(batches).ack()
        assert line(loader)["trained"] == 1, "a refused close has closed the loader"
    assert len(refused) >= 4


# --- interrupts -----------------------------------------------------------------------------------------


@each_mode
def test_an_interrupted_wait_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    with make(mode=mode) as loader:
        batches = loader.batches(1, 2)
        with interrupted(monkeypatch, after_the_result=False):
            next(batches)
        assert (line(loader)["leased"], line(loader)["trained"]) == (0, 0)
        assert "the batch of train step 1" not in loader.explain_wait()
        assert [batch.step for batch in loader.batches(1, 2)] == [1, 2]


@contextlib.contextmanager
def interrupted_lease(
    monkeypatch: pytest.MonkeyPatch, loader: RolloutLoader, *, after_the_result: bool
) -> Iterator[None]:
    """Ctrl-C while a batch is leased: `next` makes two blocking calls, and this is the second one, with an `undo`."""
    call = loader._call

    def interrupt(begin: Any, undo: Any = None) -> Any:
        if undo is None:
            return call(begin)
        with interrupted(monkeypatch, after_the_result=after_the_result):
            call(begin, undo)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loader, "_call", interrupt)
        with pytest.raises(KeyboardInterrupt):
            yield


@each_mode
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("after_the_result", [False, True])
def test_a_batch_granted_while_the_caller_is_interrupted_is_returned(
    monkeypatch: pytest.MonkeyPatch, seed: int, mode: str, after_the_result: bool
) -> None:
    with make(mode=mode, storage=suspending(seed)) as loader:
        batches = loader.batches(1, 2)
        with interrupted_lease(monkeypatch, loader, after_the_result=after_the_result):
            next(batches)
        figures = line(loader)
        assert (figures["leased"], figures["trained"], loader.next_step) == (0, 0, 1)
        with pytest.raises(InvalidInput, match="no batch is leased"):
            loader.update_weights(no_load)
        batch = next(batches)  # the same iterator continues with the step that nobody saw
        assert (batch.step, ids(batch)) == (1, [0, 1, 2, 3])


@pytest.mark.parametrize("verb", ["next", "update_weights", "save"])
@pytest.mark.parametrize("seed", range(3))
def test_an_interrupted_acknowledgement_happens_or_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str, seed: int
) -> None:
    """A batch that the storage has acknowledged is not open, and its step is counted."""
    with make(storage=suspending(seed), checkpoints=tmp_path) as loader:
        batches = loader.batches(1, 3)
        batch = next(batches)
        calls: dict[str, Callable[[], object]] = {
            "next": lambda: next(batches),
            "update_weights": lambda: loader.update_weights(no_load),
            "save": lambda: loader.save(1),
        }
        with interrupted(monkeypatch, after_the_result=False):
            calls[verb]()
        trained = line(loader)["trained"]
        assert (trained, batch.open, loader.next_step) in ((4, False, 2), (0, True, 1))
        if batch.open:
            batch.ack()
        loader.save(1)
        assert (line(loader)["trained"], line(loader)["leased"], loader.next_step) == (4, 0, 2)


@pytest.mark.parametrize("after_the_result", [False, True])
def test_an_interrupted_ack_is_carried_out(monkeypatch: pytest.MonkeyPatch, after_the_result: bool) -> None:
    with make(storage=suspending(0)) as loader:
        batch = next(loader.batches(1))
        with interrupted(monkeypatch, after_the_result=after_the_result):
            batch.ack()
        until(lambda: not batch.open)
        assert (line(loader)["leased"], line(loader)["trained"], loader.next_step) == (0, 4, 2)


def test_a_second_interrupt_surfaces_at_once_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the first one waits for a generation that ignores its cancel."""
    begun, released = threading.Event(), threading.Event()

    async def stubborn(state: RolloutState) -> None:
        begun.set()
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.to_thread(released.wait, HANG_S)
        await answer(state)

    interrupts: list[int] = []

    def interrupt(self: blocking_thread.Call[Any], timeout_s: float | None = None) -> object:
        assert begun.wait(HANG_S)
        interrupts.append(1)
        raise KeyboardInterrupt

    with make(stubborn, mode="in_turns") as loader:
        batches = loader.batches(1)
        call = loader._call

        def lease_interrupted(begin: Any, undo: Any = None) -> Any:
            if undo is not None:
                patch.setattr(blocking_thread.Call, "result", interrupt)
            return call(begin, undo)

        with monkeypatch.context() as patch:
            patch.setattr(loader, "_call", lease_interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(batches)
        assert len(interrupts) == 2
        released.set()
        until(lambda: not getattr(loader.native.manager, "_producing"))  # noqa: B009
        assert (line(loader)["in_flight"], line(loader)["leased"]) == (0, 0)
        assert ids(next(batches)) == [0, 1, 2, 3]


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """SIGINT interrupts, also where the tests run in the background of a script, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@each_mode
@pytest.mark.usefixtures("_ctrl_c")
def test_an_interrupt_that_no_system_call_notices_ends_a_wait(mode: str) -> None:
    """As one that arrives just before the thread blocks: Python has it, and the operating system wakes nobody."""
    sent = threading.Event()

    async def interrupts(state: RolloutState) -> None:
        while not waiting.is_set():  # noqa: ASYNC110 - it is set once, before anything else happens
            await asyncio.sleep(0)
        if not sent.is_set():
            sent.set()
            _thread.interrupt_main()
        await never(state)

    waiting = threading.Event()
    timed_out: list[WaitTimeout] = []
    with make(interrupts, mode=mode) as loader:
        lease = loader.native.next_batch

        async def leasing(*args: Any) -> Any:
            waiting.set()
            try:
                return await lease(*args)
            except WaitTimeout as late:
                timed_out.append(late)

        loader.native.next_batch = leasing  # type: ignore[assignment, method-assign]
        with pytest.raises(KeyboardInterrupt):
            next(loader.batches(1, timeout_s=30.0))
        assert sent.is_set()
        assert not timed_out, "the interrupt was noticed when the wait had ended by itself"


@pytest.mark.parametrize("after_the_result", [False, True])
def test_an_interrupted_update_can_be_repeated(monkeypatch: pytest.MonkeyPatch, after_the_result: bool) -> None:
    loads: list[int] = []

    def load(step: int) -> None:
        loads.append(step)
        if len(loads) == 1:
            raise KeyboardInterrupt

    with make() as loader:
        next(loader.batches(1))
        with pytest.raises(KeyboardInterrupt):
            loader.update_weights(load)
        with pytest.raises(InvalidInput, match="repeat update_weights"):
            next(loader.batches(2))
        with interrupted(monkeypatch, after_the_result=after_the_result):
            loader.update_weights(load)
        loader.update_weights(load)
        assert (loads, loader.model_step) == ([1, 1], 1)
        assert next(loader.batches(2)).step == 2


async def test_a_result_that_exists_when_the_caller_is_cancelled_is_undone() -> None:
    undone: list[str] = []

    async def work() -> str:
        asyncio.get_running_loop().call_soon(caller.cancel)  # before the caller learns that this has ended
        return "batch"

    async def undo(result: str) -> None:
        undone.append(result)

    unless = Stop().unless(work(), undo)
    caller = asyncio.create_task(unless)
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert undone == ["batch"]


_PROGRAM = """
import threading
from tests.loader.test_sync import HANG_S, first_step_only, make, never, no_load, until, waits

loader = make(first_step_only)
batches = loader.batches(1)
next(batches).ack()
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
while interrupts < 300:
    try:
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 3e-4))
        for _ in range(20):
            loader.ledger()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupt:
        interrupts += 1
assert loader.next_step == 2
loader.close()
"""
    done = finished("-c", _PROGRAM + hammer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_exits_without_closing_its_loader() -> None:
    done = finished("-c", _PROGRAM + "loader.stop()")
    assert (done.returncode, done.stderr) == (0, "")


# --- checkpoints ----------------------------------------------------------------------------------------


@each_mode
@pytest.mark.parametrize("prompts_only", [False, True])
def test_a_new_loader_resumes_a_checkpoint(tmp_path: Path, mode: str, prompts_only: bool) -> None:
    with make(mode=mode, checkpoints=tmp_path) as loader:
        batches = loader.batches(1)
        taken = ids(next(batches))
        loader.update_weights(no_load)
        next(batches)  # is leased when the checkpoint is written
        assert loader.save(1, prompts_only=prompts_only) == tmp_path / "step_1"
        with pytest.raises(InvalidInput, match="skip"):
            loader.save(0)
    with make(mode=mode, checkpoints=tmp_path) as fresh:
        loads: list[int] = []
        assert fresh.resume(load=loads.append) == 1
        assert (fresh.next_step, fresh.model_step, loads) == (2, 1, [1])
        for batch in fresh.batches(2, 3):
            taken += ids(batch)
        assert sorted(taken) == list(range(12))
        assert line(fresh)["trained"] == 12


def test_a_save_that_names_the_last_saved_weights_leaves_a_half_trained_batch_leased(tmp_path: Path) -> None:
    with make(checkpoints=tmp_path) as loader:
        batches = loader.batches(1)
        next(batches)
        loader.save(1)
        half = next(batches)
        loader.save(1)
        assert half.open
        assert (line(loader)["trained"], line(loader)["leased"]) == (4, 4)
    with make(checkpoints=tmp_path) as fresh:
        assert fresh.resume() == 1
        assert line(fresh)["trained"] == 4
        assert ids(next(fresh.batches(2))) == ids(half)


# --- the end --------------------------------------------------------------------------------------------


@each_mode
def test_closing_ends_waits_in_other_threads_and_refuses_later_calls(mode: str, tmp_path: Path) -> None:
    with make(never, mode=mode, checkpoints=tmp_path) as loader, concurrent.futures.ThreadPoolExecutor(1) as pool:
        batches = loader.batches(1)
        waiting = pool.submit(next, batches)
        until(waits(loader))
        loader.close()
        with pytest.raises(BufferClosed):
            waiting.result(timeout=HANG_S)
        loader.close()
        calls: list[Callable[[], object]] = [
            lambda: next(batches),
            lambda: next(loader.batches(1)),
            lambda: loader.update_weights(no_load, 1),
            lambda: loader.save(1),
            loader.resume,
            lambda: loader.evaluate(TASK),
            lambda: loader.set_weight(TASK, 1.0),
            loader.stats,
            loader.ledger,
            loader.explain_wait,
        ]
        for call in calls:
            with pytest.raises(BufferClosed, match="closed"):
                call()
        loader.stop()  # has nothing to stop


def test_stop_from_another_thread_ends_a_wait() -> None:
    with make(first_step_only) as loader, concurrent.futures.ThreadPoolExecutor(1) as pool:

        def train() -> list[int]:
            steps = []
            for batch in loader.batches(1):
                steps.append(batch.step)
                loader.update_weights(no_load)
            return steps

        training = pool.submit(train)
        until(waits(loader, "train step 2: 4"))
        loader.stop()
        assert training.result(timeout=HANG_S) == [1]


@each_mode
@pytest.mark.parametrize("in_block", [False, True])
def test_closing_returns_a_batch_that_is_being_trained_on(mode: str, in_block: bool) -> None:
    storage = MemoryStorage()
    loader = make(mode=mode, storage=storage)
    with loader:
        batch = next(loader.batches(1))
        if in_block:
            with batch:
                loader.close()  # gives it back, so the end of the block has nothing to acknowledge
    assert not batch.open
    assert (line_in(storage)["leased"], line_in(storage)["trained"]) == (0, 0)
    with pytest.raises((BufferClosed, LostLease)):
        batch.ack()


def test_closing_returns_groups_in_flight() -> None:
    storage = MemoryStorage()
    with make(never, storage=storage) as loader, concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, loader.batches(1))
        until(lambda: line(loader)["in_flight"] == 4)
        loader.close()
        with pytest.raises(BufferClosed):
            waiting.result(timeout=HANG_S)
    assert (line_in(storage)["in_flight"], line_in(storage)["buffered"]) == (0, 4)


@each_mode
def test_a_loader_closes_though_a_generation_ignores_its_cancel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    monkeypatch.setattr(blocking_thread, "_END_S", 0.05)
    ended = threading.Event()
    begun = threading.Event()

    async def stubborn(state: RolloutState) -> None:
        begun.set()
        while not ended.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    task = Task(TASK, PROMPTS, stubborn, group_size=2, timeouts=Timeouts(cancel_timeout_s=0.05, pause_timeout_s=0.05))
    storage = MemoryStorage()
    loader = RolloutLoader(task, batch_groups=2, max_staleness=1, mode=mode, storage=storage, progress=None)  # type: ignore[arg-type]
    with loader, concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, loader.batches(1))
        assert begun.wait(HANG_S)
        loader.close()
        with pytest.raises(BufferClosed):
            waiting.result(timeout=HANG_S)
    assert (line_in(storage)["in_flight"], line_in(storage)["leased"]) == (0, 0)
    ended.set()
    del waiting
    gc.collect()
    caplog.clear()  # asyncio logs the task, too, when it is collected


def test_close_raises_its_error_after_everything_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error tells that groups could not be returned and are still in flight."""

    async def broken(owner: str) -> None:
        raise StorageError("the disk is full")

    loader = make()
    next(loader.batches(1))
    monkeypatch.setattr(loader.native.buffer.storage, "close", broken)
    with pytest.raises(StorageError, match="disk is full"):
        loader.close()
    loader.close()


def test_the_error_of_a_block_is_raised_when_closing_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken() -> None:
        raise RuntimeError("cleaning up failed")

    def failing() -> RolloutLoader:
        loader = make()
        loader.native.plane.close = broken  # type: ignore[method-assign]
        return loader

    with pytest.raises(ValueError, match="the original"), failing():
        raise ValueError("the original")
    with pytest.raises(RuntimeError, match="cleaning up failed"), failing():
        pass


# --- signals of `stop_on` ---------------------------------------------------------------------------------


def test_the_handlers_of_a_program_are_restored() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with make(stop_on=(signal.SIGUSR1,)) as loader:
        batches = loader.batches(1)
        next(batches)
        signal.raise_signal(signal.SIGUSR1)
        assert list(batches) == []
        assert line(loader)["trained"] == 4
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_loader_that_another_thread_closes_passes_signals_on() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            loader = make(stop_on=(signal.SIGUSR1,))
            loader.__enter__()
            next(loader.batches(1))
            pool.submit(loader.close).result(timeout=HANG_S)
        signal.raise_signal(signal.SIGUSR1)
        assert got == [signal.SIGUSR1]
        loader.close()
        signal.raise_signal(signal.SIGUSR1)
        assert got == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_while_the_loader_closes_changes_nothing() -> None:
    """Programs that are told to end are often told twice; without a handler, the second time kills them."""
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        loader = make(stop_on=(signal.SIGUSR1,))
        close = loader.native.plane.close

        async def closing() -> None:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            await close()

        loader.native.plane.close = closing  # type: ignore[method-assign]
        with loader:
            next(loader.batches(1))
        assert got == []
        signal.raise_signal(signal.SIGUSR1)
        assert got == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
