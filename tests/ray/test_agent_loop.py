"""A pool of actors keeps the contract of an agent loop, even if its actors die."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import pickle
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from forebay import (
    AgentLoop,
    AsyncProduceStrategy,
    Budgets,
    EngineError,
    EngineUnavailable,
    InvalidConfig,
    InvalidInput,
    NoProgress,
    ReplayBuffer,
    RolloutState,
    Sampler,
    Status,
    Timeouts,
    UnsupportedPayload,
    WrongEventLoop,
)
from forebay.ray import RayAgentLoop
from forebay.ray.loops.pool import LoopPool, Phase
from forebay.testing.simulate import check_nothing_lost
from tests.processes import HANG_S, finished
from tests.ray.conftest import LocalCluster
from tests.ray.loops import AheadOfTraining, Crashing, Raising, Scripted, WithoutEngine, group_of, make_raising
from tests.support import closed_ledger

SMALL: dict[str, Any] = {"num_cpus": 0.1}


def statuses(group: list[RolloutState]) -> list[Status]:
    return [state.status for state in group]


def tokens(group: list[RolloutState]) -> list[list[float] | None]:
    return [None if state.response_ids is None else list(state.response_ids) for state in group]


async def ask(loop: AgentLoop, method: str, *args: Any) -> Any:
    """Call a method of a plain loop, or of the only actor of a pool."""
    if isinstance(loop, RayAgentLoop):
        (answer,) = await loop.call_all(method, *args)
        return answer
    result = getattr(loop, method)(*args)
    return await result if asyncio.iscoroutine(result) else result


async def begin(loop: AgentLoop, group: list[RolloutState], **options: Any) -> asyncio.Task[list[RolloutState]]:
    """Start a group, and wait until all members have begun."""
    before = await ask(loop, "begun", 0)
    running = asyncio.create_task(loop.generate_group(group, **options))
    await ask(loop, "begun", before + len(group))
    return running


def pool_of(actors: int = 1, make_loop: Callable[[], AgentLoop] = Scripted, **options: Any) -> RayAgentLoop:
    return RayAgentLoop(make_loop, actors=actors, **({"actor_options": SMALL} | options))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in another process."""
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110  no event tells of it
            await asyncio.sleep(0.01)


async def until_up(loop: RayAgentLoop) -> None:
    await until(lambda: all(actor.phase is Phase.UP for actor in loop._pool.actors))


async def under_way(loop: RayAgentLoop, groups: int, do: str = "hang") -> list[asyncio.Task[list[RolloutState]]]:
    """Start n groups of two, all of them begun, spread over the actors."""
    running = [asyncio.create_task(loop.generate_group(group_of(2, do, group_id=number))) for number in range(groups)]
    await until(lambda: sum(loop.loads()) == groups)
    loads = loop.loads()
    assert max(loads) - min(loads) <= 1
    await loop.call_all("begun", 2 * min(loads))
    return running


@pytest.fixture(scope="module")
def shared(cluster: LocalCluster) -> Iterator[RayAgentLoop]:
    """One pool of one actor for many tests, each on its own event loop."""
    loop = pool_of(cancel_timeout_s=HANG_S)
    yield loop
    asyncio.run(loop.close())


@pytest.fixture(params=["plain", "pool"])
async def either(request: pytest.FixtureRequest) -> AsyncIterator[AgentLoop]:
    """The same tests for a loop in this process and for one in an actor."""
    if request.param == "plain":
        yield Scripted()
        return
    loop: RayAgentLoop = request.getfixturevalue("shared")
    await loop.call_all("reset")
    yield loop
    await loop.resume()
    assert loop.loads() == [0]


# --- the contract, local and remote -----------------------------------------------------------------------


async def test_every_member_is_returned_in_its_order_in_the_same_list(either: AgentLoop) -> None:
    group = group_of(4)
    returned = await either.generate_group(group)
    assert returned is group
    assert statuses(group) == [Status.COMPLETED] * 4
    assert [(state.group_id, state.rollout_id, state.attempt, state.num_tries) for state in group] == [
        (7, 70 + index, 2, 1) for index in range(4)
    ]
    assert tokens(group) == [[0, 0, 0]] * 4
    assert isinstance(group[0].response_ids, np.ndarray)
    assert group[0].response_ids.dtype == np.int32


async def test_completed_members_are_the_same_objects_and_not_generated_again(either: AgentLoop) -> None:
    group = group_of(3)
    group[1].status, group[1].response_ids = Status.COMPLETED, [5]
    done = group[1]
    before = await ask(either, "begun", 0)
    await either.generate_group(group)
    assert group[1] is done
    assert tokens(group) == [[0, 0, 0], [5], [0, 0, 0]]
    assert await ask(either, "begun", 0) == before + 2
    assert await either.generate_group(group) == group
    assert await ask(either, "begun", 0) == before + 2


async def test_a_member_that_raises_is_failed_and_the_others_finish(either: AgentLoop) -> None:
    group = [*group_of(2), *group_of(3, "raise")[2:]]
    await either.generate_group(group)
    assert statuses(group) == [Status.COMPLETED, Status.COMPLETED, Status.FAILED]
    assert group[2].error_msg == "ValueError: no such tool"


async def test_an_exception_that_cannot_be_sent_fails_its_member(either: AgentLoop) -> None:
    group = await either.generate_group(group_of(2, "unspeakable"))
    assert statuses(group) == [Status.FAILED] * 2
    assert group[0].error_msg == "Unspeakable: unspeakable"


async def test_a_rollout_may_have_several_segments(either: AgentLoop) -> None:
    group = await either.generate_group(group_of(2, "segments"))
    assert [(state.rollout_id, state.segment) for state in group] == [(70, 0), (70, 1), (71, 0), (71, 1)]


async def test_a_continued_member_keeps_its_tokens_and_versions_in_front(either: AgentLoop) -> None:
    group = group_of(2, response_ids=[4, 5], version_spans=((3, 2),))
    await either.generate_group(group, enable_partial_rollout=True)
    assert tokens(group) == [[4, 5, 0, 0, 0]] * 2
    assert group[0].version_spans == ((3, 2),)


async def test_a_loop_may_change_the_prompt_of_one_member(either: AgentLoop) -> None:
    """Members share their prompt in a frame, but not in the loop."""
    message = [{"role": "user", "content": "?"}]
    group = group_of(2, "change")
    for state in group:
        state.message = [dict(message[0])]
    await either.generate_group(group)
    assert [state.message[0]["content"] for state in group] == ["?!", "?!"]


async def test_members_that_arrive_in_a_pause_are_returned_at_once_and_unchanged(either: AgentLoop) -> None:
    await either.pause()
    await either.pause()
    assert either.paused
    group = group_of(3, "hang", error_msg="earlier")
    group[0].status = Status.COMPLETED
    group[1].response_ids = [3]
    assert statuses(await either.generate_group(group)) == [Status.COMPLETED, Status.ABORTED, Status.ABORTED]
    assert tokens(group) == [None, [3], None]
    assert group[1].error_msg == "earlier"
    await either.resume()
    await either.resume()
    assert not either.paused
    assert statuses(await either.generate_group(group_of())) == [Status.COMPLETED] * 2


async def test_a_pause_ends_running_members_with_their_tokens(either: AgentLoop) -> None:
    running = await begin(either, group_of(3, "hang"))
    await either.pause()
    group = await running
    assert statuses(group) == [Status.ABORTED] * 3
    assert tokens(group) == [[0, 0]] * 3


async def test_a_cancel_leaves_the_members_in_the_list(either: AgentLoop) -> None:
    group = [*group_of(2, "hang"), *group_of(3, "answer")[2:]]
    running = await begin(either, group)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert statuses(group) == [Status.ABORTED, Status.ABORTED, Status.COMPLETED]
    assert tokens(group) == [[0, 0], [0, 0], [0, 0, 0]]


async def test_a_timeout_is_a_cancel(either: AgentLoop) -> None:
    group = group_of(1, "hang")
    before = await ask(either, "begun", 0)

    limit = asyncio.timeout(None)

    async def generate() -> None:
        async with limit:
            await either.generate_group(group)

    generating = asyncio.create_task(generate())
    await ask(either, "begun", before + 1)
    limit.reschedule(0)
    with pytest.raises(TimeoutError):
        await generating
    assert statuses(group) == [Status.ABORTED]


async def test_a_single_sample_is_generated(either: AgentLoop) -> None:
    (state,) = group_of(1)
    answered = await either.generate(state, enable_partial_rollout=False)
    (answer,) = [answered] if isinstance(answered, RolloutState) else answered
    assert (answer.rollout_id, answer.status) == (70, Status.COMPLETED)


async def test_samples_may_hold_references(either: AgentLoop, cluster: LocalCluster) -> None:
    image = ray.put(np.arange(5))
    group = group_of(2, mm_info={"pixels": image})
    await either.generate_group(group)
    assert [state.mm_info for state in group] == [{"pixels": image}] * 2


@pytest.mark.parametrize("where", ["plain", "pool"])
async def test_a_loop_that_raises_keeps_its_completed_members(cluster: LocalCluster, where: str) -> None:
    loop = Raising() if where == "plain" else pool_of(make_loop=Raising)
    group = group_of(2)
    with pytest.raises(RuntimeError if where == "plain" else EngineError, match="the engine is down") as raised:
        await loop.generate_group(group)
    assert statuses(group) == [Status.COMPLETED, Status.INIT]
    if where == "pool":
        assert str(raised.value) == "the agent loop of an actor raised RuntimeError: the engine is down"
        (note,) = raised.value.__notes__
        assert "loops.py" in note
    group = group_of(2, "cancelled")
    running = asyncio.create_task(loop.generate_group(group))
    with pytest.raises(asyncio.CancelledError):
        await running
    assert statuses(group) == [Status.COMPLETED, Status.INIT]
    if isinstance(loop, RayAgentLoop):
        assert await loop.generate_group(group_of(2, "nothing")) == []
        returned = await loop.generate_group(group_of(2, "foreign"))
        assert [state.rollout_id for state in returned] == [70]
        await loop.close()


async def test_a_member_that_cannot_be_sent_back_does_not_affect_the_others(shared: RayAgentLoop) -> None:
    for do in ("unsendable", "unequal"):
        group = [*group_of(2), *group_of(3, do)[2:]]
        await shared.generate_group(group)
        assert statuses(group) == [Status.COMPLETED, Status.COMPLETED, Status.FAILED]
        assert "the agent loop returned a sample that cannot be sent" in (group[2].error_msg or "")


async def test_a_group_that_cannot_be_sent_is_an_error_and_adds_no_load(shared: RayAgentLoop) -> None:
    group = group_of(1)
    group[0].extra_fields["object"] = object()
    with pytest.raises(UnsupportedPayload, match="object"):
        await shared.generate_group(group)
    assert shared.loads() == [0]


# --- which actor ------------------------------------------------------------------------------------------


async def test_groups_go_to_the_least_loaded_actor_and_take_turns(cluster: LocalCluster) -> None:
    async with pool_of(3) as loop:
        for _ in range(6):
            await loop.generate_group(group_of(1))
        assert await loop.call_all("begun", 0) == [2, 2, 2]
        running = [asyncio.create_task(loop.generate_group(group_of(1, "hang"))) for _ in range(4)]
        await until(lambda: sum(loop.loads()) == 4)
        assert sorted(loop.loads()) == [1, 1, 2]
        busiest = loop.loads().index(2)
        for _ in range(4):
            await loop.generate_group(group_of(1))
        begun = await loop.call_all("begun", 0)
        assert [begun[index] - 2 - loop.loads()[index] for index in range(3) if index != busiest] == [2, 2]
        await loop.pause()
        await asyncio.gather(*running)
        assert loop.loads() == [0, 0, 0]


async def test_groups_beyond_the_limit_wait_first_come_first_served(cluster: LocalCluster) -> None:
    async with pool_of(1, max_groups_per_actor=1) as loop:
        ended: list[int] = []

        async def generate(number: int) -> None:
            await loop.generate_group(group_of(1, "wait", group_id=number))
            ended.append(number)

        running = [asyncio.create_task(generate(number)) for number in range(5)]
        await until(lambda: loop.loads() == [1])
        running.pop(2).cancel()  # a cancelled one leaves no gap
        await asyncio.sleep(0.1)
        assert loop.loads() == [1]
        await loop.call_all("release")
        await asyncio.gather(*running)
        assert ended == [0, 1, 3, 4]


async def test_groups_wait_for_actors_that_cannot_be_scheduled_yet(cluster: LocalCluster) -> None:
    """A cluster may grow: here the second actor fits only after the first has ended."""
    options = {"resources": {"scarce": 0.6}, "num_cpus": 0}
    first = pool_of(1, actor_options=options)
    await first.start()
    second = pool_of(1, actor_options=options)
    waiting = asyncio.create_task(second.generate_group(group_of()))
    done, _ = await asyncio.wait((waiting,), timeout=1)
    assert not done
    await first.close()
    assert statuses(await asyncio.wait_for(waiting, HANG_S)) == [Status.COMPLETED] * 2
    await second.close()


async def test_groups_that_wait_for_an_actor_are_returned_at_once_in_a_pause(cluster: LocalCluster) -> None:
    async with pool_of(1, max_groups_per_actor=1) as loop:
        running = await begin(loop, group_of(1, "hang"))
        waiting = asyncio.create_task(loop.generate_group(group_of(2, "hang")))
        await asyncio.sleep(0)
        await loop.pause()
        assert statuses(await waiting) == [Status.ABORTED] * 2
        assert statuses(await running) == [Status.ABORTED]
        assert await loop.call_all("begun", 0) == [1]


# --- actors that die --------------------------------------------------------------------------------------


async def test_g03_the_groups_of_a_killed_actor_are_returned_as_they_were_passed_in(cluster: LocalCluster) -> None:
    async with pool_of(2) as loop:
        running = await under_way(loop, 4)
        pids = await loop.call_all("pid")
        given = group_of(2, "hang", group_id=9, response_ids=[1, 2])
        given[0].status = Status.COMPLETED
        done = given[0]
        fifth = asyncio.create_task(loop.generate_group(given))
        await until(lambda: sum(loop.loads()) == 5)
        victim = loop.loads().index(3)
        os.kill(pids[victim], signal.SIGKILL)
        back = await asyncio.wait_for(fifth, HANG_S)
        assert back[0] is done
        assert statuses(back) == [Status.COMPLETED, Status.ABORTED]
        assert tokens(back) == [[1, 2], [1, 2]]
        assert "its actor died" in (back[1].error_msg or "")
        await until(lambda: sum(task.done() for task in running) == 2)
        lost = [task.result() for task in running if task.done()]
        assert [statuses(group) for group in lost] == [[Status.ABORTED] * 2] * 2
        assert [tokens(group) for group in lost] == [[None, None]] * 2
        # The other actor continues and takes new groups; later there are two again.
        assert loop.loads()[1 - victim] == 2
        assert statuses(await loop.generate_group(group_of())) == [Status.COMPLETED] * 2
        await until_up(loop)
        assert (await loop.call_all("pid"))[victim] != pids[victim]
        await loop.pause()
        stopped = [group for group in await asyncio.gather(*running) if group not in lost]
        assert [tokens(group) for group in stopped] == [[[0, 0]] * 2] * 2


@pytest.mark.parametrize(("deaths", "tries"), [(1, 0), pytest.param(4, 1, marks=pytest.mark.slow)])
async def test_an_actor_that_dies_costs_its_groups_no_try_unless_they_kill_actors(
    cluster: LocalCluster, tmp_path: Path, deaths: int, tries: int
) -> None:
    buffer = ReplayBuffer()
    strategy = AsyncProduceStrategy(buffer, progress=NoProgress())
    prompt = {"prompt": "?", "do": "die_at_first", "marks": str(tmp_path), "deaths": deaths}
    async with pool_of(2) as loop, asyncio.timeout(HANG_S):
        await strategy.produce_batch(loop, Sampler([prompt]), 1, "math", train_step=1, model_step=0)
        await strategy.pause()
    record, *others = await buffer.query({"task_name": "math"})
    assert record.num_tries == tries
    # One that spent a try rests, and a batch does not wait for it.
    assert tries or ((record.status, record.attempt), others) == ((Status.COMPLETED, deaths + 1), [])


async def test_an_engine_that_an_actor_cannot_reach_costs_no_try_and_no_token(cluster: LocalCluster) -> None:
    buffer = ReplayBuffer()
    strategy = AsyncProduceStrategy(buffer, progress=NoProgress(), enable_partial_rollout=True, max_staleness=1)
    async with pool_of(1, WithoutEngine) as loop, asyncio.timeout(HANG_S):
        with pytest.raises(EngineUnavailable, match="connection refused"):
            await strategy.produce_batch(loop, Sampler([{"prompt": "?"}]), 1, "math", train_step=1, model_step=0)
    (record,) = await buffer.query({"task_name": "math"})
    assert (record.status, record.num_tries, record.tokens) == (Status.ABORTED, 0, 2)


async def test_an_idle_actor_that_dies_costs_no_group(cluster: LocalCluster) -> None:
    async with pool_of(2) as loop:
        pids = await loop.call_all("pid")
        os.kill(pids[0], signal.SIGKILL)
        await until(lambda: loop._pool.actors[0].phase is not Phase.UP)
        for _ in range(3):
            assert statuses(await loop.generate_group(group_of())) == [Status.COMPLETED] * 2


async def test_an_actor_that_restarts_in_a_pause_is_paused(cluster: LocalCluster) -> None:
    async with pool_of(1) as loop:
        (pid,) = await loop.call_all("pid")
        await loop.pause()
        os.kill(pid, signal.SIGKILL)
        await until(lambda: loop._pool.actors[0].phase is not Phase.UP)
        assert statuses(await loop.generate_group(group_of())) == [Status.ABORTED] * 2
        await until_up(loop)
        assert await loop.call_all("is_paused") == [True]
        await loop.resume()
        assert await loop.call_all("is_paused") == [False]
        assert statuses(await loop.generate_group(group_of())) == [Status.COMPLETED] * 2


async def test_a_restarted_actor_gets_the_calls_that_were_made_while_it_was_down(cluster: LocalCluster) -> None:
    async with pool_of(1) as loop:
        (pid,) = await loop.call_all("pid")
        os.kill(pid, signal.SIGKILL)
        await until(lambda: loop._pool.actors[0].phase is not Phase.UP)
        await loop.pause()
        assert await loop.call_all("load", 5, keep=True) == []
        await until_up(loop)
        assert await loop.call_all("is_paused") == [True]
        assert await loop.call_all("history") == [[5]]
        await loop.resume()
        assert tokens(await loop.generate_group(group_of(1))) == [[5, 5, 5]]


async def test_groups_wait_for_the_first_actor_that_is_back_when_all_are_down(cluster: LocalCluster) -> None:
    async with pool_of(2) as loop:
        for pid in await loop.call_all("pid"):
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not any(actor.phase is Phase.UP for actor in loop._pool.actors))
        assert statuses(await loop.generate_group(group_of())) == [Status.COMPLETED] * 2


async def test_a_sample_that_ends_the_event_loop_of_its_actor_does_not_hang(cluster: LocalCluster) -> None:
    """`sys.exit()` in a task ends the thread of the event loop; the actor must not stay alive without it."""
    async with pool_of(1) as loop:
        group = await asyncio.wait_for(loop.generate_group(group_of(2, "exit")), HANG_S)
        assert statuses(group) == [Status.ABORTED] * 2
        assert statuses(await loop.generate_group(group_of())) == [Status.COMPLETED] * 2


@pytest.fixture(params=[1, pytest.param(None, marks=pytest.mark.slow)], ids=["few", "all"])
def max_deaths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the only actor of a pool may die without an answer; each start of an actor takes long."""
    if request.param is None:
        return 3
    monkeypatch.setattr(LoopPool, "max_deaths", request.param)
    return int(request.param)


async def test_a_group_that_kills_every_actor_is_an_error_after_some_deaths(
    cluster: LocalCluster, max_deaths: int
) -> None:
    """Otherwise it would be retried forever."""
    async with pool_of(1) as loop:
        assert loop._pool.max_deaths == max_deaths
        for _ in range(max_deaths):
            assert statuses(await loop.generate_group(group_of(1, "die"))) == [Status.ABORTED]
        with pytest.raises(EngineError, match=f"died {max_deaths + 1} times, and no group was answered"):
            await loop.generate_group(group_of(1, "die"))
        assert statuses(await loop.generate_group(group_of())) == [Status.COMPLETED] * 2
        assert loop._pool.deaths == 0


async def test_actors_that_cannot_be_restarted_are_an_error_and_not_a_wait(cluster: LocalCluster) -> None:
    async with pool_of(2) as loop:
        running = await under_way(loop, 2)
        ray.kill(loop._pool.actors[0].handle)
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await until(lambda: loop._pool.actors[0].phase is Phase.DEAD)
        assert statuses(await loop.generate_group(group_of())) == [Status.COMPLETED] * 2
        ray.kill(loop._pool.actors[1].handle)
        assert [statuses(group) for group in await asyncio.gather(*running)] == [[Status.ABORTED] * 2] * 2
        with pytest.raises(EngineError, match=r"none of the 2 actors .* Ray will not restart it"):
            await loop.generate_group(group_of())
        with pytest.raises(EngineError, match="none of the 2 actors"):
            await loop.call_all("pid")


@pytest.mark.slow
async def test_a_group_is_returned_when_its_node_is_lost_and_runs_again_on_another(
    cluster: LocalCluster, doomed_node: Any
) -> None:
    async with pool_of(1, actor_options={"resources": {"doomed": 1}, "num_cpus": 0}) as loop:
        assert await loop.call_all("node") == [doomed_node.node_id]
        (running,) = await under_way(loop, 1)
        cluster.kill_node(doomed_node)
        assert statuses(await asyncio.wait_for(running, HANG_S)) == [Status.ABORTED] * 2
        waiting = asyncio.create_task(loop.generate_group(group_of()))
        await asyncio.to_thread(cluster.wait_until_missed, doomed_node)
        assert not waiting.done()
        group = group_of()
        given_up = asyncio.create_task(loop.generate_group(group))
        await asyncio.sleep(0)
        given_up.cancel()  # a waiting group can be cancelled
        with pytest.raises(asyncio.CancelledError):
            await given_up
        another = cluster.add_node(resources={"doomed": 1})
        try:
            assert statuses(await asyncio.wait_for(waiting, HANG_S)) == [Status.COMPLETED] * 2
            assert await loop.call_all("node") == [another.node_id]
        finally:
            cluster.kill_node(another)
            cluster.wait_until_missed(another)


async def test_a_cancel_does_not_wait_for_an_actor_that_does_not_answer(cluster: LocalCluster) -> None:
    async with pool_of(1, cancel_timeout_s=0.5) as loop:
        group = group_of(2, "hang", response_ids=[1])
        running = await begin(loop, group)
        (pid,) = await loop.call_all("pid")
        os.kill(pid, signal.SIGSTOP)
        try:
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert statuses(group) == [Status.INIT] * 2
            assert tokens(group) == [[1], [1]]
            assert loop.loads() == [1]  # the actor may still generate it
        finally:
            os.kill(pid, signal.SIGCONT)
        await until(lambda: loop.loads() == [0])
        assert tokens(group) == [[1], [1]]
        assert statuses(await loop.generate_group(group_of())) == [Status.COMPLETED] * 2


# --- calls to all -----------------------------------------------------------------------------------------


async def test_a_method_is_called_on_every_actor(cluster: LocalCluster) -> None:
    async with pool_of(2) as loop:
        weights = ray.put(np.array([1, 2, 3]))
        assert await loop.call_all("load", weights, scale=2) == [12, 12]
        assert await loop.call_all("load", 4) == [4, 4]
        assert await loop.call_all("history") == [[12, 4]] * 2
        assert len(set(await loop.call_all("pid"))) == 2
        with pytest.raises(EngineError, match=r"actor 0 raised InvalidInput: Scripted has no method 'nothing'"):
            await loop.call_all("nothing")
        with pytest.raises(EngineError, match="raised Unspeakable: unspeakable"):
            await loop.call_all("unspeakable")
        with pytest.raises(EngineError, match="the call to actor 0 failed"):
            await loop.call_all("unpicklable")
        with pytest.raises(InvalidInput, match="expected its name"):
            await loop.call_all("")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await loop.call_all("never")
        assert tokens(await loop.generate_group(group_of(1))) == [[4, 4, 4]]


async def test_kept_calls_are_repeated_before_a_restarted_actor_gets_a_group(cluster: LocalCluster) -> None:
    async with pool_of(1) as loop:
        await loop.call_all("load", 1, keep=True)
        await loop.call_all("load", ray.put(2), keep=True, scale=3)
        await loop.call_all("load", 9)
        assert await loop.call_all("history") == [[1, 6, 9]]
        (running,) = await under_way(loop, 1)
        (pid,) = await loop.call_all("pid")
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(running, HANG_S)
        assert tokens(await loop.generate_group(group_of(1))) == [[6, 6, 6]]
        assert await loop.call_all("history") == [[6]]


async def test_calls_reach_actors_that_are_still_starting(cluster: LocalCluster) -> None:
    loop = pool_of(2)
    assert await loop.call_all("load", 3) == [3, 3]
    await loop.close()


# --- making, starting and ending --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"actors": 0}, "actors is 0; expected an integer of at least 1"),
        ({"actors": 1.5}, "actors is 1.5; expected an integer"),
        ({"actors": 1, "max_groups_per_actor": 0}, "max_groups_per_actor is 0"),
        ({"actors": 1, "cancel_timeout_s": 0}, "cancel_timeout_s is 0"),
        ({"actors": 1, "actor_options": 5}, "actor_options is 5; expected a mapping"),
        ({"actors": 1, "actor_options": {"name": "x", "lifetime": "detached"}}, "has lifetime, name, which"),
        ({"actors": 1, "actor_options": {"num_cpu": 1}}, "Ray refuses actor_options"),
        ({"actors": 1, "actor_options": {"num_cpus": -1}}, "Ray refuses actor_options"),
        ({"actors": 1, "make_loop": 5}, "make_loop is 5; expected a function"),
        ({"actors": 1, "make_loop": Scripted()}, "expected a function that makes an AgentLoop"),
        ({"actors": 1, "make_loop": functools.partial(dict, [sys._getframe()])}, "cannot be sent to an actor"),
    ],
)
def test_wrong_arguments_are_refused(cluster: LocalCluster, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidConfig, match=problem):
        RayAgentLoop(**({"make_loop": Scripted} | arguments))


def test_a_pool_without_a_cluster_is_refused() -> None:
    program = """
from forebay.errors import NoCluster
from forebay.ray import RayAgentLoop
from tests.ray.loops import Scripted
try:
    RayAgentLoop(Scripted, actors=1)
except NoCluster as error:
    assert "ray.init" in str(error)
    raise SystemExit(7)
"""
    assert finished("-c", program).returncode == 7


async def test_a_loop_that_cannot_be_made_is_an_error_with_its_remote_traceback(cluster: LocalCluster) -> None:
    loop = pool_of(2, make_raising)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"none of the 2 actors .* raised LookupError: no engine here") as raised:
            await asyncio.wait_for(loop.generate_group(group_of()), HANG_S)
        assert "make_raising" in raised.value.__notes__[0]
    with pytest.raises(EngineError, match="LookupError: no engine here"):
        await loop.start()
    with pytest.raises(EngineError, match="LookupError: no engine here"):
        await loop.call_all("pid")
    await loop.close()
    with pytest.raises(EngineError, match="expected an AgentLoop"):
        async with pool_of(1, dict):  # type: ignore[arg-type]
            raise AssertionError("it was made")
    with pytest.raises(EngineError, match="LookupError"):
        _ = pool_of(1, make_raising).takes_weights_while_running


@pytest.mark.usefixtures("max_deaths")
async def test_an_actor_that_crashes_whenever_it_starts_is_an_error_and_not_a_wait(cluster: LocalCluster) -> None:
    loop = pool_of(1, Crashing)
    with pytest.raises(EngineError, match="did not start"):
        await asyncio.wait_for(loop.generate_group(group_of()), HANG_S)
    await loop.close()


async def test_a_pool_takes_weights_while_running_if_its_loops_do(cluster: LocalCluster) -> None:
    assert not pool_of(1).takes_weights_while_running
    assert pool_of(1, functools.partial(AheadOfTraining)).takes_weights_while_running
    assert await asyncio.to_thread(lambda: pool_of(1, lambda: AheadOfTraining()).takes_weights_while_running)
    async with pool_of(1, lambda: AheadOfTraining()) as loop:
        assert loop.takes_weights_while_running


async def test_a_pool_cannot_be_pickled(shared: RayAgentLoop) -> None:
    with pytest.raises(InvalidInput, match="create one there"):
        pickle.dumps(shared)


def test_a_pool_outlives_an_event_loop(cluster: LocalCluster) -> None:
    loop = pool_of(2)

    async def main(*, pause: bool) -> list[RolloutState]:
        running = asyncio.create_task(loop.generate_group(group_of(2, "hang" if pause else "answer")))
        if pause:
            await until(lambda: sum(loop.loads()) == 1)
            await loop.pause()
        return await running

    async def kill() -> None:
        for pid in await loop.call_all("pid"):
            os.kill(pid, signal.SIGKILL)

    assert statuses(asyncio.run(main(pause=False))) == [Status.COMPLETED] * 2
    assert statuses(asyncio.run(main(pause=True))) == [Status.ABORTED] * 2
    assert loop.paused
    asyncio.run(kill())  # no event loop listens when they die
    asyncio.run(loop.resume())
    for _ in range(3):
        assert set(statuses(asyncio.run(main(pause=False)))) <= {Status.COMPLETED, Status.ABORTED}
    assert statuses(asyncio.run(main(pause=False))) == [Status.COMPLETED] * 2
    asyncio.run(loop.close())


async def test_two_concurrent_event_loops_are_refused_and_two_consecutive_ones_are_not(cluster: LocalCluster) -> None:
    async with pool_of(1) as loop:

        def elsewhere() -> list[RolloutState]:
            return asyncio.run(loop.generate_group(group_of()))

        running = await begin(loop, group_of(1, "hang"))
        with pytest.raises(WrongEventLoop, match="submit"):
            await asyncio.to_thread(elsewhere)
        await loop.pause()
        await running
        await loop.resume()
        assert statuses(await asyncio.to_thread(elsewhere)) == [Status.COMPLETED] * 2
        assert statuses(await loop.generate_group(group_of())) == [Status.COMPLETED] * 2


async def test_close_ends_the_actors_and_returns_running_groups(cluster: LocalCluster) -> None:
    loop = pool_of(2, max_groups_per_actor=1)
    await loop.start()
    pids = await loop.call_all("pid")
    running = await under_way(loop, 2)
    waiting = asyncio.create_task(loop.generate_group(group_of()))
    await asyncio.sleep(0)
    await loop.close()
    await loop.close()
    assert [statuses(await task) for task in running] == [[Status.ABORTED] * 2] * 2
    assert (await running[0])[0].error_msg == "the agent loop was closed"
    with pytest.raises(EngineError, match="closed"):
        await waiting
    with pytest.raises(EngineError, match="closed"):
        await loop.generate_group(group_of())
    await until(lambda: not any(map(is_running, pids)))


async def test_a_pool_may_be_dropped_on_a_thread_of_ray(cluster: LocalCluster) -> None:
    """The garbage collector may run there; ending the actors must not wait for that very thread."""
    loop = pool_of(1)
    (pid,) = await loop.call_all("pid")
    holder = [loop]
    dropped = asyncio.get_running_loop().create_future()
    dropping = asyncio.get_running_loop()

    def drop(_: object) -> None:
        holder.clear()
        dropping.call_soon_threadsafe(dropped.set_result, None)

    never = loop._pool.actors[0].handle.watch.remote(0)
    del loop
    never.future().add_done_callback(drop)  # called by Ray, on one of its threads
    await asyncio.wait_for(dropped, HANG_S)
    await until(lambda: not is_running(pid))


async def test_actors_end_when_the_pool_is_dropped(cluster: LocalCluster) -> None:
    loop = pool_of(2)
    pids = await loop.call_all("pid")
    assert all(map(is_running, pids))
    del loop
    gc.collect()
    await until(lambda: not any(map(is_running, pids)))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_an_actor_may_own_a_pool(cluster: LocalCluster) -> None:
    class Trainer:
        async def train(self) -> list[str]:
            async with pool_of(1) as loop:
                return [str(state.status) for state in await loop.generate_group(group_of())]

    trainer: Any = ray.remote(Trainer).options(num_cpus=0.1).remote()
    training = asyncio.wrap_future(trainer.train.remote().future())
    assert await asyncio.wait_for(training, HANG_S) == ["completed", "completed"]


# --- producing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "batch", "seed"), [(3, 8, 0), *[pytest.param(5, 12, seed, marks=pytest.mark.slow) for seed in range(6)]]
)
async def test_g01_g03_nothing_is_lost_or_doubled_when_actors_are_killed_at_random(
    cluster: LocalCluster, steps: int, batch: int, seed: int
) -> None:
    """With real strategy, sampler and buffer: every drawn prompt is trained once, or still in the buffer."""
    chance = random.Random(seed)
    buffer = ReplayBuffer()
    generated = 0

    def count(group: list[RolloutState]) -> bool:
        nonlocal generated
        generated += 1
        return True

    strategy = AsyncProduceStrategy(
        buffer,
        over_sample_threshold=1.0,
        max_staleness=2,
        enable_partial_rollout=True,
        timeouts=Timeouts(pause_interval_s=0.5),
        max_tries=1000,  # how often a group is killed depends on how fast Ray restarts actors
        budgets=Budgets(max_consecutive_failures=1000),
        is_valid_sample_fn=count,
        progress=NoProgress(),
    )
    prompts = [{"prompt": f"question {number}", "do": "answer", "prompt_ids": [number]} for number in range(200)]
    sampler = Sampler(prompts, group_size=2)
    loop = pool_of(3, Slow)
    await loop.start()
    kills = 0

    async def kill() -> None:
        nonlocal kills
        while True:
            due = generated + chance.randint(5, batch + 3)
            await until(lambda due=due: generated >= due)  # type: ignore[misc]
            pids = await loop.call_all("pid")
            if pids:  # otherwise all are restarting
                os.kill(chance.choice(pids), signal.SIGKILL)
                kills += 1

    killing = asyncio.create_task(kill())
    trained: list[int] = []
    for step in range(1, steps + 1):
        async with asyncio.timeout(HANG_S):
            production = await strategy.produce_batch(
                loop, sampler, batch, "math", train_step=step, model_step=step - 1
            )
        assert production.complete
        await strategy.pause()
        async with buffer.lease_batch({"math": batch}, train_step=step, timeout_s=0) as lease:
            for group in lease.groups:
                assert [state.status for state in group] == [Status.COMPLETED] * 2
                assert len({state.rollout_id for state in group}) == 2
                trained.append(group[0].group_id or 0)
        await closed_ledger(buffer)
        await loop.call_all("load", step, keep=True)
    killing.cancel()
    await asyncio.wait((killing,))
    assert kills >= steps // 3
    await strategy.close()
    ledger = await closed_ledger(buffer)
    assert ledger["trained"] == steps * batch
    assert ledger.get("failed", 0) == ledger.get("in_flight", 0) == 0
    await check_nothing_lost(buffer, "math", trained)
    assert loop.loads() == [0, 0, 0]
    await loop.close()


class Slow(Scripted):
    """Answers after a random delay."""

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> Any:
        pausing = asyncio.ensure_future(self.until_paused())
        await asyncio.wait((pausing,), timeout=random.uniform(0.01, 0.4))
        pausing.cancel()
        if self.paused:
            state.status = Status.ABORTED
            return state
        return await super().generate(state, enable_partial_rollout=enable_partial_rollout)
