"""The simulated loop: a clock that jumps, an order that a seed decides, and ends for what would not end."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from forebay.core.aio import in_thread
from forebay.errors import ForebayError, InvalidInput
from forebay.testing import simulate
from forebay.testing.simulate import NotSimulated, SimulatedLoop, SimulationLimit, SimulationStuck
from tests.processes import finished

SEEDS = range(100)


def loop_now() -> SimulatedLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    return loop


# --- the clock ----------------------------------------------------------------------------------------


def test_a_year_of_hourly_naps_moves_the_clock_by_a_year() -> None:
    async def main() -> float:
        for _ in range(365 * 24):
            await asyncio.sleep(3600)
        return loop_now().time()

    assert simulate.run(main) == 365 * 24 * 3600


def test_the_clock_starts_at_zero_and_stands_still_while_something_is_ready() -> None:
    async def main() -> tuple[float, float]:
        start = loop_now().time()
        for _ in range(1000):
            await asyncio.sleep(0)
        return start, loop_now().time()

    assert simulate.run(main) == (0.0, 0.0)


def test_timers_fire_in_the_order_of_their_times_and_exactly_then() -> None:
    async def main() -> list[tuple[float, float]]:
        fired: list[tuple[float, float]] = []

        async def nap(duration_s: float) -> None:
            await asyncio.sleep(duration_s)
            fired.append((duration_s, loop_now().time()))

        await asyncio.gather(*(nap(duration_s) for duration_s in (5, 0.1, 3, 86_400 * 30, 2)))
        return fired

    for seed in SEEDS:
        assert simulate.run(main, seed=seed) == [(s, s) for s in (0.1, 2, 3, 5, 86_400 * 30)]


def test_a_task_that_spins_does_not_starve_a_timer_that_is_due() -> None:
    async def main() -> None:
        rung = asyncio.Event()
        loop_now().call_later(0, rung.set)
        while not rung.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)

    simulate.run(main, max_events=100)


def test_cancelled_timers_do_not_pile_up() -> None:
    async def main() -> int:
        for _ in range(2000):
            async with asyncio.timeout(86_400):
                await asyncio.sleep(0.001)
        return len(loop_now()._scheduled)

    assert simulate.run(main) < 300


# --- the order ----------------------------------------------------------------------------------------


async def interleaving() -> list[str]:
    """Workers that meet at a queue, a lock, an event, timers that are due together, and sets of futures."""
    trace: list[str] = []
    queue: asyncio.Queue[int] = asyncio.Queue(2)
    lock, rung = asyncio.Lock(), asyncio.Event()

    async def work(name: str) -> None:
        await rung.wait()
        for item in range(3):
            async with lock:
                trace.append(f"{name} locks at {loop_now().time()}, event {loop_now().events}")
                await asyncio.sleep(0.5)
            await queue.put(item)
            trace.append(f"{name} put {item}, got {await queue.get()}")

    async def wait(name: str) -> None:
        waiter = loop_now().create_future()
        waiters.add(waiter)
        await waiter
        trace.append(f"{name} woken")

    waiters: set[asyncio.Future[None]] = set()
    tasks = {asyncio.create_task(work(name)) for name in "abcdef"}
    tasks |= {asyncio.create_task(wait(name), name=name) for name in "ghijklm"}
    await asyncio.sleep(1)
    rung.set()
    for waiter in waiters:  # a set, whose order is that of hashes
        waiter.set_result(None)
    trace.extend(task.get_name() for task in tasks)
    await asyncio.wait(tasks)
    naps = [asyncio.create_task(asyncio.sleep(1, name)) for name in "uvwxyz"]
    return trace + [await nap for nap in asyncio.as_completed(naps)]


def test_the_same_seed_gives_the_same_events_and_other_seeds_give_others() -> None:
    traces = {}
    litter = []
    for seed in range(20):
        traces[seed] = simulate.run(interleaving, seed=seed)
        litter.append([asyncio.Event() for _ in range(seed * 7)])  # moves what comes next to other addresses
        assert simulate.run(interleaving, seed=seed) == traces[seed]
    assert len({tuple(trace) for trace in traces.values()}) > 10


def test_the_same_seed_gives_the_same_events_in_another_process() -> None:
    program = (
        "from forebay.testing import simulate; from tests.simulation.test_loop import interleaving; "
        "print(*simulate.run(interleaving, seed=5), sep='\\n')"
    )
    environments = [{**os.environ, "PYTHONHASHSEED": hash_seed} for hash_seed in ("1", "2")]
    printed = [finished("-c", program, env=env) for env in environments]
    assert printed[0].stdout.splitlines() == printed[1].stdout.splitlines() == simulate.run(interleaving, seed=5)


async def order_of(start: Callable[[list[int]], object]) -> list[int]:
    ran: list[int] = []
    start(ran)
    await asyncio.sleep(10)
    return ran


def create_tasks(ran: list[int]) -> object:
    async def work(number: int) -> None:
        ran.append(number)

    return [asyncio.create_task(work(number)) for number in range(6)]


def ring_together(ran: list[int]) -> object:
    return [loop_now().call_at(1, ran.append, number) for number in range(6)]


def call_soon(ran: list[int]) -> object:
    return [loop_now().call_soon(ran.append, number) for number in range(6)]


def add_done_callbacks(ran: list[int]) -> object:
    future = loop_now().create_future()
    for number in range(6):
        future.add_done_callback(lambda _, number=number: ran.append(number))  # type: ignore[misc]
    future.set_result(None)
    return future


@pytest.mark.parametrize("start", [create_tasks, ring_together])
def test_tasks_and_timers_that_are_ready_together_run_in_any_order(start: Callable[[list[int]], object]) -> None:
    orders = {tuple(simulate.run(order_of(start), seed=seed)) for seed in SEEDS}
    assert len(orders) > 50
    assert {order[0] for order in orders} == set(range(6))


@pytest.mark.parametrize("start", [call_soon, add_done_callbacks])
def test_plain_callbacks_and_those_of_one_future_keep_their_order(start: Callable[[list[int]], object]) -> None:
    assert {tuple(simulate.run(order_of(start), seed=seed)) for seed in SEEDS} == {tuple(range(6))}


def test_a_done_callback_has_run_when_a_later_waiter_of_its_future_goes_on() -> None:
    async def main() -> None:
        under_way = set()
        task = asyncio.create_task(asyncio.sleep(1))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
        others = [asyncio.create_task(asyncio.sleep(1)) for _ in range(5)]
        await task
        assert not under_way
        await asyncio.wait(others)

    for seed in SEEDS:
        simulate.run(main, seed=seed)


@pytest.mark.parametrize("start", [create_tasks, call_soon, add_done_callbacks])
def test_without_a_seed_the_order_is_that_of_asyncio(start: Callable[[list[int]], object]) -> None:
    assert simulate.run(order_of(start), seed=None) == list(range(6))


# --- asyncio's own tools, whatever the order ------------------------------------------------------------


async def gather_keeps_the_order_of_its_arguments() -> None:
    async def later(value: int) -> int:
        await asyncio.sleep(value % 3)
        return value

    assert await asyncio.gather(*map(later, range(9))) == list(range(9))
    results = await asyncio.gather(asyncio.sleep(1, 1), _raise_later(), return_exceptions=True)
    assert results[0] == 1
    assert isinstance(results[1], KeyError)


async def _raise_later() -> None:
    await asyncio.sleep(1)
    raise KeyError("later")


async def wait_returns_what_is_done() -> None:
    tasks = [asyncio.create_task(asyncio.sleep(second)) for second in (1, 1, 2, 3)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert done | pending == set(tasks)
    assert done <= set(tasks[:2])
    assert done
    done, pending = await asyncio.wait(tasks, timeout=1.5)
    assert done == set(tasks[:3])
    done, pending = await asyncio.wait(tasks)
    assert not pending


async def time_limits_hold() -> None:
    assert await asyncio.wait_for(asyncio.sleep(1, "in time"), 2) == "in time"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.sleep(3), 2)
    with pytest.raises(TimeoutError):
        await nap_within_two_limits()
    async with asyncio.timeout(1) as limit:
        limit.reschedule(None)
        await asyncio.sleep(10)
    assert loop_now().time() == 14


async def nap_within_two_limits() -> None:
    async with asyncio.timeout(1), asyncio.timeout(5):
        await asyncio.sleep(10)


async def queues_lose_nothing() -> None:
    queue: asyncio.Queue[int] = asyncio.Queue(3)
    got: list[int] = []

    async def produce(start: int) -> None:
        for item in range(start, start + 10):
            await queue.put(item)

    async def consume() -> None:
        while True:
            got.append(await queue.get())
            queue.task_done()

    consumers = [asyncio.create_task(consume()) for _ in range(3)]
    await asyncio.gather(*(produce(start) for start in (0, 10, 20)))
    await queue.join()
    for consumer in consumers:
        consumer.cancel()
    await asyncio.gather(*consumers, return_exceptions=True)
    assert sorted(got) == list(range(30))


async def locks_exclude() -> None:
    lock, semaphore, inside = asyncio.Lock(), asyncio.Semaphore(2), {"lock": 0, "semaphore": 0}

    async def enter(name: str, guard: asyncio.Lock | asyncio.Semaphore, most: int) -> None:
        try:
            async with asyncio.timeout(1.5), guard:
                inside[name] += 1
                assert inside[name] <= most
                await asyncio.sleep(0.5)
                inside[name] -= 1
        except TimeoutError:
            inside.setdefault("late", 1)

    await asyncio.gather(
        *(enter("lock", lock, 1) for _ in range(5)), *(enter("semaphore", semaphore, 2) for _ in range(8))
    )
    assert "late" in inside
    assert not lock.locked()


async def events_and_conditions_wake_all() -> None:
    rung, condition = asyncio.Event(), asyncio.Condition()
    woken: list[int] = []

    async def wait(number: int) -> None:
        await rung.wait()
        async with condition:
            await condition.wait_for(lambda: len(woken) == number)
            woken.append(number)
            condition.notify_all()

    waits = asyncio.gather(*map(wait, range(6)))
    await asyncio.sleep(1)
    rung.set()
    await waits
    assert woken == list(range(6))


async def task_groups_cancel_the_others() -> None:
    ended = []

    async def member(fails: bool) -> None:
        try:
            await asyncio.sleep(1 if fails else 2)
            raise KeyError
        finally:
            await asyncio.sleep(0.5)
            ended.append(fails)

    async def all_members() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(member(number == 3))

    with pytest.raises(ExceptionGroup) as caught:
        await all_members()
    assert len(ended) == 5
    assert [type(error) for error in caught.value.exceptions] == [KeyError]


async def generators_end() -> None:
    closed = []

    async def numbers() -> AsyncIterator[int]:
        try:
            for number in range(5):
                yield number
                await asyncio.sleep(1)
        finally:
            await asyncio.sleep(1)
            closed.append(loop_now().time())

    async def read(stop: int) -> None:
        async for number in numbers():
            if number == stop:
                break

    await asyncio.gather(read(2), read(9), read(0))
    await asyncio.sleep(2)
    assert len(closed) == 3


async def shields_and_cancels_work() -> None:
    inner = asyncio.create_task(asyncio.sleep(2, "inner"))
    outer = asyncio.create_task(asyncio.wait_for(asyncio.shield(inner), 1))
    with pytest.raises(TimeoutError):
        await outer
    assert await inner == "inner"
    task = asyncio.create_task(asyncio.sleep(9))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    first = [await future for future in asyncio.as_completed([asyncio.sleep(s, s) for s in (3, 1, 2)])]
    assert first == [1, 2, 3]


@pytest.mark.parametrize(
    "program",
    [
        gather_keeps_the_order_of_its_arguments,
        wait_returns_what_is_done,
        time_limits_hold,
        queues_lose_nothing,
        locks_exclude,
        events_and_conditions_wake_all,
        task_groups_cancel_the_others,
        generators_end,
        shields_and_cancels_work,
    ],
)
def test_asyncio_works_in_any_order(program: Callable[[], Coroutine[Any, Any, None]]) -> None:
    for seed in (None, *SEEDS):
        simulate.run(program, seed=seed, max_events=10_000)


# --- executors ------------------------------------------------------------------------------------------


def test_work_for_a_thread_runs_inline_and_lets_others_run_meanwhile() -> None:
    async def main() -> list[str]:
        ran = []
        other = asyncio.create_task(asyncio.sleep(0))
        other.add_done_callback(lambda _: ran.append("other"))
        await asyncio.to_thread(ran.append, "inline")
        future = loop_now().run_in_executor(None, int, "7")
        assert future.done()
        assert await in_thread(lambda: 8) == 8
        ran.append(str(await future))
        with pytest.raises(ValueError, match="invalid literal"):
            await asyncio.to_thread(int, "seven")
        return ran

    for seed in SEEDS:
        assert sorted(simulate.run(main, seed=seed)) == ["7", "inline", "other"]


def test_a_loop_around_to_thread_ends_at_the_limit() -> None:
    async def main() -> None:
        while True:
            await asyncio.to_thread(int)

    with pytest.raises(SimulationLimit, match="max_events=50"):
        simulate.run(main, max_events=50)


# --- what would not end ---------------------------------------------------------------------------------


async def wait_for_nobody() -> None:
    await asyncio.Event().wait()


async def wait_through_others() -> None:
    await wait_for_nobody()


def line_of(function: Callable[..., object], offset: int = 1) -> str:
    return f"{__file__}:{inspect.getsourcelines(function)[1] + offset} in {function.__name__}"


def test_a_wait_that_nobody_ends_is_an_error_that_names_the_task_and_the_line() -> None:
    async def main() -> None:
        await asyncio.sleep(2.5)
        await asyncio.gather(asyncio.create_task(wait_through_others(), name="the patient one"))

    with pytest.raises(SimulationStuck) as caught:
        simulate.run(main)
    message = str(caught.value)
    assert isinstance(caught.value, ForebayError)
    assert f"the patient one: {line_of(wait_for_nobody)}, there in " in message
    assert f"locks.py:{message.rpartition('locks.py:')[2]}".endswith(" in wait")
    assert line_of(main, 2) in message
    assert "at 2.5 virtual seconds" in message
    assert len(caught.value.waiting) == 2


def test_a_message_about_many_tasks_stays_short() -> None:
    async def main() -> None:
        await asyncio.gather(*(wait_for_nobody() for _ in range(100)))

    with pytest.raises(SimulationStuck, match=r"and 81 more") as caught:
        simulate.run(main)
    assert len(caught.value.waiting) == 101
    assert len(str(caught.value).splitlines()) == 22


def test_a_timer_at_infinity_is_no_timer() -> None:
    with pytest.raises(SimulationStuck):
        simulate.run(asyncio.sleep(float("inf")))


def test_a_livelock_ends_at_the_limit_of_events() -> None:
    async def spin() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(SimulationLimit, match=r"after 1000 events.*sleep\(0\)"):
        simulate.run(spin, max_events=1000)


def test_a_program_that_goes_on_for_ever_ends_at_the_limit_of_seconds() -> None:
    async def tick() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(10)

    with pytest.raises(SimulationLimit, match="at 90 virtual seconds: the next timer is at 100 s, beyond"):
        simulate.run(tick, max_seconds=95)


def test_a_program_may_use_its_limits_up() -> None:
    async def main() -> None:
        await asyncio.sleep(10)

    simulate.run(main, max_events=4, max_seconds=10)


def test_sockets_are_refused() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs, pytest.raises(NotSimulated, match="no sockets"):
            loop_now().add_reader(ours, print)

    simulate.run(main)


# --- faults ---------------------------------------------------------------------------------------------


def test_a_fault_comes_right_before_the_event_of_its_number() -> None:
    seen: list[tuple[str, int]] = []

    async def main() -> None:
        for _ in range(5):
            seen.append(("event", loop_now().events))
            await asyncio.sleep(0)

    faults = [(number, lambda number=number: seen.append(("fault", number))) for number in (1, 3, 4, 4, 99)]
    simulate.run(main, faults=faults)
    assert seen == [
        ("fault", 1),
        ("event", 1),
        ("event", 2),
        ("fault", 3),
        ("event", 3),
        ("fault", 4),
        ("fault", 4),
        ("event", 4),
        ("event", 5),
    ]


def test_a_fault_may_cancel_a_task_at_every_event_of_its_life() -> None:
    async def main(at: int) -> str:
        lock = asyncio.Lock()

        async def work() -> str:
            for _ in range(3):
                async with lock:
                    await asyncio.sleep(1)
            return "finished"

        tasks = [asyncio.create_task(work()) for _ in range(3)]
        loop_now().at_event(at, tasks[0].cancel)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert not lock.locked()
        assert results[1:] == ["finished", "finished"]
        return "cancelled" if isinstance(results[0], asyncio.CancelledError) else str(results[0])

    outcomes = [simulate.run(main(at), seed=at) for at in range(2, 60)]
    assert outcomes[0] == "cancelled"
    assert outcomes[-1] == "finished"


def test_what_a_fault_raises_ends_the_run_and_every_task_still_ends() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(9)
        finally:
            ended.append(loop_now().time())

    async def main() -> None:
        await asyncio.gather(*(work() for _ in range(4)))

    def fail() -> None:
        raise ZeroDivisionError

    for number in range(1, 12):
        ended.clear()
        with pytest.raises(ZeroDivisionError):
            simulate.run(main, faults=[(number, fail)], seed=number)
        assert len(ended) == min(max(number - 2, 0), 4)  # those that had begun


def test_a_fault_may_add_another_for_the_same_event() -> None:
    seen = []

    async def main() -> None:
        loop = loop_now()
        loop.at_event(3, lambda: loop.at_event(3, lambda: seen.append(loop.events)))
        for _ in range(5):
            await asyncio.sleep(0)

    simulate.run(main)
    assert seen == [2]


def test_a_fault_for_an_event_that_has_been_is_refused() -> None:
    async def main() -> None:
        loop_now().at_event(1, print)

    with pytest.raises(InvalidInput, match="event 1 has already run"):
        simulate.run(main)


# --- the end of a run -----------------------------------------------------------------------------------


def test_tasks_that_are_left_are_cancelled_and_awaited() -> None:
    ended = []

    async def linger() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(5)
            ended.append(loop_now().time())

    async def main() -> str:
        task = asyncio.create_task(linger())
        await asyncio.sleep(1)
        return task.get_name()

    assert simulate.run(main, max_seconds=2) == "Task-2"
    assert ended == [6]


def test_generators_that_are_left_are_closed() -> None:
    closed = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(1)
            closed.append(True)

    left = numbers()

    async def main() -> None:
        await anext(left)

    simulate.run(main)
    assert closed == [True]


async def ignore_cancels() -> None:
    while True:
        try:
            await wait_for_nobody()
        except asyncio.CancelledError:
            continue


def test_a_task_that_cannot_be_cancelled_is_named() -> None:
    async def main() -> None:
        task = asyncio.create_task(ignore_cancels(), name="stubborn one")
        await asyncio.wait([task], timeout=1)

    with pytest.raises(SimulationStuck, match="stubborn one: "):
        simulate.run(main)


def test_what_the_program_raises_is_raised_even_if_others_cannot_end() -> None:
    async def main() -> None:
        task = asyncio.create_task(ignore_cancels())
        await asyncio.wait([task], timeout=1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        simulate.run(main)


def test_the_event_loop_of_the_thread_is_as_it_was() -> None:
    before = asyncio.new_event_loop()
    asyncio.set_event_loop(before)
    try:
        simulate.run(asyncio.sleep(1))
        assert asyncio.get_event_loop_policy().get_event_loop() is before
    finally:
        asyncio.set_event_loop(None)
        before.close()


async def test_it_is_refused_on_a_running_loop() -> None:
    with pytest.raises(InvalidInput, match="running event loop"):
        simulate.run(wait_for_nobody)


def test_what_is_no_program_is_refused() -> None:
    with pytest.raises(InvalidInput, match="expected a coroutine function"):
        simulate.run(lambda: 7)  # type: ignore[arg-type, return-value]


def test_the_loop_serves_asyncio_runners_too() -> None:
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        assert runner.run(asyncio.sleep(3600, "done")) == "done"
        assert runner.get_loop().time() == 3600
