"""Waiting: for groups, for room, until closed; never by polling, never for what cannot come."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from forebay import BufferClosed, MemoryStorage, ReplayBuffer, Sampler, Status, WaitTimeout, WrongEventLoop
from forebay.buffer.internal import internals
from forebay.core.aio import Changes
from forebay.testing import make_group
from tests.processes import HANG_S
from tests.support import closed_ledger, draw, turns


async def test_is_ready_ignores_tasks_asked_for_nothing() -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(), "math")
    assert await buffer.is_ready({"math": 1, "code": 0, "chat": -1})
    assert not await buffer.is_ready({"math": 2})
    assert await buffer.is_ready({})


async def test_ready_agrees_with_what_a_lease_would_get() -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(), "math", model_step=0)
    await buffer.refresh_staleness(task_stale_thresholds={"math": 2}, current_train_step=4)
    await buffer.put(make_group(), "math", model_step=0)  # too old already, and not judged at the door
    assert not await buffer.is_ready({"math": 1})
    with pytest.raises(WaitTimeout):
        await buffer.wait_ready({"math": 1}, timeout_s=0)


async def test_a_put_into_a_full_buffer_waits_for_room() -> None:
    buffer = ReplayBuffer(max_groups=2)
    await buffer.put_many([make_group(), make_group()], "math")
    putting = asyncio.ensure_future(buffer.put_many([make_group(), make_group()], "math"))
    await turns()
    lease = await buffer.lease_batch({"math": 1}, train_step=1)
    await turns()
    assert not putting.done(), "what is leased still takes its place"
    await lease.ack()
    await turns()
    assert not putting.done(), "there is room for one of two"
    await buffer.get(1, "math", Status.COMPLETED)
    assert len(await putting) == 2


async def test_drawing_waits_for_room_and_returning_never_does() -> None:
    buffer = ReplayBuffer(max_groups=1)
    sampler = Sampler([{"prompt": f"q{n}"} for n in range(9)], group_size=2).with_buffer(buffer)
    (group,) = await sampler.draw(1, "math")
    drawing = asyncio.ensure_future(sampler.draw(1, "math"))
    await turns()
    assert not drawing.done()
    for state in group:
        state.status, state.response = Status.COMPLETED, "x"
    await buffer.put(group, "math")
    await buffer.get(1, "math", Status.COMPLETED)
    ((state, _),) = await drawing
    assert state.group_id == 1


async def test_a_put_that_times_out_stores_nothing() -> None:
    buffer = ReplayBuffer(max_bytes=1_000)
    await buffer.put(make_group(tokens=20), "math")
    with pytest.raises(WaitTimeout, match="capacity for 1 groups"):
        await buffer.put(make_group(tokens=20), "math", timeout_s=0)
    assert await closed_ledger(buffer) == {"issued": 1, "buffered": 1}


async def test_closing_ends_every_wait() -> None:
    buffer = ReplayBuffer(max_groups=1)
    await buffer.put(make_group(), "math")
    waits = [
        asyncio.ensure_future(buffer.wait_ready({"code": 1})),
        asyncio.ensure_future(buffer.lease_batch({"code": 1}, train_step=1).__aenter__()),
        asyncio.ensure_future(buffer.put(make_group(), "math")),
    ]
    await turns()
    await buffer.close()
    for ended in await asyncio.gather(*waits, return_exceptions=True):
        assert isinstance(ended, BufferClosed)


async def test_many_waiters_share_what_arrives() -> None:
    buffer = ReplayBuffer()
    taken: list[int] = []

    async def train(step: int) -> None:
        async with buffer.lease_batch({"math": 2}, train_step=step) as lease:
            taken.extend(group[0].group_id or 0 for group in lease.groups)

    trainers = [asyncio.create_task(train(step)) for step in range(1, 11)]
    for number in range(20):
        await buffer.put(make_group(group_id=number), "math")
        await turns(1)
    await asyncio.gather(*trainers)
    assert sorted(taken) == list(range(20))


async def test_a_timeout_in_between_does_not_lose_the_wake_up_of_others() -> None:
    buffer = ReplayBuffer()
    patient = asyncio.ensure_future(buffer.wait_ready({"math": 1}))
    with pytest.raises(WaitTimeout):
        await buffer.wait_ready({"math": 1}, timeout_s=0.001)
    await buffer.put(make_group(), "math")
    await asyncio.wait_for(patient, HANG_S)


async def test_a_dead_holder_is_noticed_when_its_time_is_up() -> None:
    storage = MemoryStorage()
    dead, alive = ReplayBuffer(storage=storage, lease_s=0.05), ReplayBuffer(storage=storage)
    await dead.put(make_group(), "math")
    await dead.lease_batch({"math": 1}, train_step=1)
    assert dead._session.heartbeat is not None
    dead._session.heartbeat.stop()  # what a killed process does
    lease = await alive.lease_batch({"math": 1}, train_step=1, timeout_s=HANG_S)
    assert len(lease.groups) == 1


class Counted(MemoryStorage):
    """Counts heartbeats."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock=clock)
        self.beats = threading.Semaphore(0)

    def beat(self, owner: str) -> None:
        super().beat(owner)
        self.beats.release()


async def test_a_live_holder_keeps_its_lease_by_beating() -> None:
    now = 0.0
    storage = Counted(lambda: now)
    holder, other = ReplayBuffer(storage=storage, lease_s=0.3), ReplayBuffer(storage=storage)
    await holder.put(make_group(), "math")
    lease = await holder.lease_batch({"math": 1}, train_step=1)
    now = 0.2
    while storage.beats.acquire(blocking=False):
        pass
    for _ in range(2):  # the first one may have looked at the clock before
        assert await asyncio.to_thread(storage.beats.acquire, timeout=HANG_S)
    now = 0.4
    with pytest.raises(WaitTimeout, match="held by"):
        await other.lease_batch({"math": 1}, train_step=1, timeout_s=0)
    await lease.ack()
    await holder.close()


async def test_changes_from_another_thread_wake_the_loop() -> None:
    changes = Changes(asyncio.get_running_loop())
    ticket = changes.ticket()
    threading.Thread(target=changes.notify).start()
    await asyncio.wait_for(changes.wait(ticket, None), HANG_S)
    assert changes.ticket() == ticket + 1


async def test_a_change_wakes_the_waiters_of_its_tasks_only() -> None:
    changes = Changes(asyncio.get_running_loop())
    waits = {
        name: asyncio.ensure_future(changes.wait(changes.ticket(tasks), None, None, tasks))
        for name, tasks in (("math", ("math",)), ("code", ("code", "chess")), ("any", ()))
    }
    await turns(2)
    changes.notify(("chess",))
    await turns(2)
    assert [name for name, wait in waits.items() if wait.done()] == ["code", "any"]
    changes.notify()
    await waits["math"]


async def test_a_change_between_look_and_wait_is_not_missed() -> None:
    changes = Changes(asyncio.get_running_loop())
    ticket = changes.ticket()
    changes.notify()
    await asyncio.wait_for(changes.wait(ticket, None), HANG_S)


def test_a_buffer_moves_to_a_new_loop_when_the_old_one_is_closed() -> None:
    buffer = ReplayBuffer()
    asyncio.run(buffer.put(make_group(), "math"))
    assert asyncio.run(buffer.count("math", Status.COMPLETED)) == 1


async def test_a_buffer_refuses_a_second_loop_that_runs_beside_the_first() -> None:
    buffer = ReplayBuffer()
    await buffer.put(make_group(), "math")
    with pytest.raises(WrongEventLoop, match=r"forebay\.blocking"):
        await asyncio.to_thread(asyncio.run, buffer.count("math", Status.COMPLETED))


async def test_what_a_dead_holder_had_is_there_for_those_who_do_not_wait() -> None:
    now = 0.0
    storage = MemoryStorage(clock=lambda: now)
    dead, alive = ReplayBuffer(storage=storage, lease_s=1e6), ReplayBuffer(storage=storage)
    await dead.put_many([make_group(), make_group(), make_group()], "math")
    await dead.lease_batch({"math": 3}, train_step=1)
    await draw(dead)
    now = 2e6
    assert await alive.is_ready({"math": 3})
    assert len(await alive.get(1, "math", Status.COMPLETED)) == 1
    assert len(await internals(alive).redraw(1, "math")) == 1
    assert len((await alive.lease_batch({"math": 2}, train_step=1, timeout_s=0)).groups) == 2
    await dead.close()


async def test_a_beat_that_fails_does_not_end_the_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[bool] = []
    enough = threading.Event()

    def beat(owner: str) -> None:
        beats.append(True)
        if len(beats) >= 3:
            enough.set()
        raise ConnectionError("the database blinked")

    buffer = ReplayBuffer(lease_s=0.03)
    monkeypatch.setattr(buffer.storage, "beat", beat)
    await buffer.put(make_group(), "math")
    assert await asyncio.to_thread(enough.wait, 30)
    await buffer.close()


async def test_a_listener_that_raises_does_not_fail_the_put() -> None:
    buffer = ReplayBuffer()

    def listen(tasks: object) -> None:
        raise RuntimeError("my own trouble")

    buffer.storage.subscribe(listen)
    await buffer.put(make_group(), "math")
    assert await closed_ledger(buffer) == {"issued": 1, "buffered": 1}


def test_a_waiter_left_on_a_closed_loop_does_not_trouble_others() -> None:
    storage = MemoryStorage()
    left = ReplayBuffer(storage=storage)

    async def wait_a_moment() -> None:
        waiting = asyncio.ensure_future(left.wait_ready({"math": 9}))
        await turns()
        assert not waiting.done()

    asyncio.run(wait_a_moment())
    asyncio.run(ReplayBuffer(storage=storage).put(make_group(), "math"))
