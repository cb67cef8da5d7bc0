"""What an outage costs, in virtual time: time, and nothing else."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from forebay import (
    AgentLoop,
    AgentLoopManager,
    AsyncProduceStrategy,
    BatchRequest,
    Budgets,
    DisaggregatedAgentLoopManager,
    EngineError,
    FunctionAgentLoop,
    InvalidInput,
    ManagedTask,
    ProducerStopped,
    ReplayBuffer,
    RewardUnavailable,
    RolloutState,
    Sampler,
    Status,
    StorageUnavailable,
    SyncProduceStrategy,
    Timeouts,
)
from forebay.buffer.internal import internals
from forebay.produce import NoProgress
from forebay.storage.local.memory import MemoryStorage
from forebay.testing.simulate import check_ledger, run
from tests.support import taken

TASK = "math"
MEMBERS = 4


def now() -> float:
    return asyncio.get_running_loop().time()


def answer(state: RolloutState, tokens: int = 3) -> None:
    state.response_ids, state.logprobs = [1] * tokens, [-0.5] * tokens
    state.response, state.finish_reason, state.status = "x", "stop", Status.COMPLETED


class Plane:
    """A producer that runs ahead of a trainer, which takes a second for a step."""

    def __init__(self, loop: AgentLoop, *, batch_size: int = 8, members: int = MEMBERS, **options: Any) -> None:
        self.buffer = ReplayBuffer()
        self.batch_size = batch_size
        self.loop = loop
        strategy = AsyncProduceStrategy(self.buffer, progress=NoProgress(), **options)
        sampler = Sampler([{"prompt": f"q{i}"} for i in range(1000)], group_size=members, shuffle=False)
        task = ManagedTask(name=TASK, sampler=sampler, agent_loop=loop, strategy=strategy)
        self.manager = DisaggregatedAgentLoopManager([task], self.buffer)
        self.trained: list[list[RolloutState]] = []
        self.step_times: list[float] = []

    async def train(self, steps: int) -> None:
        async with self.manager:
            producer = asyncio.create_task(self.manager.produce_loop(self.batch_size))
            for step in range(1, steps + 1):
                async with self.manager.get_batch(self.batch_size, step, timeout_s=1_000_000) as batch:
                    self.trained += batch.groups
                    await asyncio.sleep(1)
                await self.manager.pause_produce()
                await self.manager.continue_produce(step)
                self.step_times.append(now())
                check_ledger(await self.buffer.ledger())
        await producer
        ids = [group[0].group_id for group in self.trained]
        assert len(ids) == len(set(ids)), "a group was trained on twice"


async def line(plane: Plane) -> dict[str, int]:
    return dict((await plane.buffer.ledger())[TASK])


# --- a tool that hangs ----------------------------------------------------------------------------------


class IgnoresPauses(AgentLoop):
    """A loop that looks at no pause: its calls run to their end, or until they are cancelled."""

    def __init__(self, function: Callable[[RolloutState], Awaitable[None]]) -> None:
        self.function = function

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        await self.function(state)
        return state


def one_hangs(hung: int | None) -> Callable[[RolloutState], Awaitable[None]]:
    """Answers take 10 s; one sample of one group never gets one."""

    async def generate(state: RolloutState) -> None:
        await asyncio.sleep(10)
        if hung is not None and state.group_id == hung and state.rollout_id == MEMBERS * hung:
            await asyncio.get_running_loop().create_future()
        answer(state)

    return generate


async def seconds_of(loop: AgentLoop, over: float, steps: int = 12) -> tuple[float, Plane]:
    """How long 12 steps of 8 groups of 4 samples take: 372 samples, and a few more."""
    plane = Plane(loop, over_sample_threshold=over)
    await plane.train(steps)
    return plane.step_times[-1], plane


@pytest.mark.parametrize("over", [0.125, 0.5, 1.0])
@pytest.mark.parametrize("hung", [0, 3, 20])
def test_a_hung_tool_delays_nothing_with_over_issue(over: float, hung: int) -> None:
    async def main() -> None:
        usual, _ = await seconds_of(FunctionAgentLoop(one_hangs(None)), over)
        began = now()
        plane = Plane(FunctionAgentLoop(one_hangs(hung)), over_sample_threshold=over)
        await plane.train(12)
        assert plane.step_times[-1] - began <= usual + 10
        assert hung not in {group[0].group_id for group in plane.trained}

    run(main)


@pytest.mark.parametrize("hung", [0, 20])
def test_a_hung_tool_that_ignores_pauses_costs_one_pause_timeout_and_its_grace(hung: int) -> None:
    async def main() -> None:
        usual, _ = await seconds_of(IgnoresPauses(one_hangs(None)), 0.5)
        began = now()
        plane = Plane(IgnoresPauses(one_hangs(hung)), over_sample_threshold=0.5)
        await plane.train(12)
        timeouts = Timeouts()
        assert plane.step_times[-1] - began <= usual + timeouts.pause_timeout_s + 3 * timeouts.pause_interval_s + 10
        assert (await line(plane))["failed"] == 1  # its tries were spent, and its siblings' work with them
        # The first pause waited for it as for all others; the last one knew it, and gave it one interval.
        assert await plane.buffer.reasons() == {TASK: {"did not end within pause_interval_s=5 of a pause": 1}}

    run(main)


@pytest.mark.parametrize("make", [FunctionAgentLoop, IgnoresPauses])
@pytest.mark.parametrize("hung", [0, 20])
def test_a_hung_tool_without_over_issue_costs_less_than_two_member_timeouts(make: Any, hung: int) -> None:
    async def main() -> None:
        usual, _ = await seconds_of(make(one_hangs(None)), 0.0)
        began = now()
        plane = Plane(make(one_hangs(hung)), over_sample_threshold=0.0)
        await plane.train(12)
        assert plane.step_times[-1] - began <= usual + 2 * Timeouts().member_timeout_s

    run(main)


def test_siblings_of_a_member_that_hangs_keep_their_tokens_and_their_tries() -> None:
    async def some(state: RolloutState) -> None:
        if state.rollout_id == 0 and not state.num_tries:
            await asyncio.get_running_loop().create_future()
        tokens = list(state.response_ids or [])
        for token in range(len(tokens), 20):
            await asyncio.sleep(10 if state.rollout_id == 3 else 100)
            state.response_ids = [*(state.response_ids or []), token]
            state.logprobs = [-0.5] * len(state.response_ids)
        if state.rollout_id == 1:
            answer(state, 20)
            state.response_ids = list(range(20))
            return
        state.finish_reason, state.status = "stop", Status.COMPLETED

    async def main() -> None:
        buffer = ReplayBuffer(max_groups=1)  # so that no other group completes the batch
        strategy = AsyncProduceStrategy(buffer, enable_partial_rollout=True, max_staleness=1, progress=NoProgress())
        sampler = Sampler([{"prompt": "q"}], group_size=4)
        await strategy.produce_batch(FunctionAgentLoop(some), sampler, 1, TASK, train_step=1, model_step=0)
        await strategy.pause()
        async with buffer.lease_batch({TASK: 1}, train_step=1) as lease:
            (group,) = lease.groups
        assert {state.group_id for state in group} == {0}
        # 18 tokens came within half an hour, and two more when they were continued.
        assert [list(state.response_ids or []) for state in group] == [list(range(20))] * 4
        # The last one had finished before the timeout. The first one hung, and then took longer than the timeout.
        assert [state.num_tries for state in group] == [2, 1, 1, 0]

    run(main)


# --- rewards --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [2, 5, 60])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", ["reward_fn", "group_reward_fn", "is_valid_sample_fn"])
def test_an_outage_of_the_reward_service_loses_nothing(seconds: float, plain: bool, kind: str) -> None:
    async def main() -> None:
        generated: Counter[int | None] = Counter()

        async def generate(state: RolloutState) -> None:
            await asyncio.sleep(1 + (state.rollout_id or 0) % 7)
            generated[state.rollout_id] += 1
            answer(state)

        def verdict(judged: Any) -> Any:
            if 30 < now() < 30 + seconds:
                raise ConnectionError("503")
            return True if kind == "is_valid_sample_fn" else [1.0] * MEMBERS if kind == "group_reward_fn" else 1.0

        async def slowly(judged: Any) -> Any:
            await asyncio.sleep(0.05)
            return verdict(judged)

        options: dict[str, Any] = {kind: verdict if plain else slowly}
        loop = FunctionAgentLoop(generate, cancel_on_pause=False)
        plane = Plane(loop, over_sample_threshold=0.5, max_staleness=20, **options)
        await plane.train(12)
        ledger = await line(plane)
        assert ledger["failed"] == ledger["filtered"] == 0
        assert ledger["trained"] == 12 * 8
        assert {state.num_tries for group in plane.trained for state in group} == {0}
        assert all(generated[state.rollout_id] == 1 for group in plane.trained for state in group)

    run(main)


def test_a_reward_that_stays_away_is_given_up_with_the_cause() -> None:
    async def main() -> None:
        def away(state: RolloutState) -> float:
            raise ConnectionError("503")

        async def generate(state: RolloutState) -> None:
            answer(state)

        buffer = ReplayBuffer()
        strategy = SyncProduceStrategy(buffer, reward_fn=away, max_tries=2, progress=NoProgress())
        with pytest.raises(RewardUnavailable, match=r"failed for 5\d\d s, .* ConnectionError: 503"):
            await strategy.produce_batch(
                FunctionAgentLoop(generate), Sampler([{"prompt": "q"}]), 2, TASK, train_step=1, model_step=0
            )
        assert now() == pytest.approx(600, abs=30)  # a call that would come later is not made
        ledger = await buffer.ledger()
        check_ledger(ledger)
        assert ledger[TASK]["failed"] == 0

    run(main)


@pytest.mark.parametrize("seconds", [1_000, 3_000])
@pytest.mark.parametrize("hangs", [False, True])
def test_a_long_outage_of_the_reward_service_is_an_error_that_costs_no_try(seconds: float, hangs: bool) -> None:
    async def main() -> None:
        generated: Counter[int | None] = Counter()

        async def generate(state: RolloutState) -> None:
            await asyncio.sleep(1 + (state.rollout_id or 0) % 5)
            generated[state.rollout_id] += 1
            answer(state)

        async def reward(state: RolloutState) -> float:
            if 30 < now() < 30 + seconds:
                if hangs:
                    await asyncio.get_running_loop().create_future()
                raise ConnectionError("503")
            return 1.0

        buffer = ReplayBuffer()
        strategy = AsyncProduceStrategy(
            buffer, max_staleness=20, over_sample_threshold=0.5, reward_fn=reward, progress=NoProgress()
        )
        sampler = Sampler([{"prompt": f"q{i}"} for i in range(500)], group_size=MEMBERS)
        loop = FunctionAgentLoop(generate, cancel_on_pause=False)
        task = ManagedTask(name=TASK, sampler=sampler, agent_loop=loop, strategy=strategy)
        trained: list[RolloutState] = []
        errors, step = 0, 1
        async with AgentLoopManager([task], buffer) as manager:
            while step <= 12:
                try:
                    async with manager.produce_batch(8, step, model_step=step - 1) as batch:
                        trained += [state for group in batch.groups for state in group]
                    step += 1
                except RewardUnavailable:
                    errors += 1
                    await asyncio.sleep(10)
        assert errors >= seconds // 700
        ledger = await buffer.ledger()
        check_ledger(ledger)
        assert ledger[TASK]["failed"] == 0
        assert len(trained) == 12 * 8 * MEMBERS
        assert {state.num_tries for state in trained} == {0}
        assert max(generated.values()) == 1

    run(main)


@pytest.mark.parametrize("over", [0.0, 0.5])
@pytest.mark.parametrize("bad", [{0}, {9}, {16, 17}])
def test_rewards_that_raise_for_some_groups_only_cost_those_groups(bad: set[int], over: float) -> None:
    async def main() -> None:
        async def generate(state: RolloutState) -> None:
            await asyncio.sleep(20 if state.group_id in bad else 1)
            answer(state)

        async def reward(state: RolloutState) -> float:
            if state.group_id in bad:
                raise KeyError("gold")
            return 1.0

        plane = Plane(FunctionAgentLoop(generate, cancel_on_pause=False), over_sample_threshold=over, reward_fn=reward)
        task = plane.manager.tasks[TASK]
        step, errors = 1, 0
        async with AgentLoopManager([task], plane.buffer) as manager:
            while step <= 12:
                try:
                    async with manager.produce_batch(8, step, model_step=step - 1) as batch:
                        assert not bad & {group[0].group_id for group in batch.groups}
                    step += 1
                except RewardUnavailable:
                    errors += 1
        assert errors <= (len(bad) > 1)  # several that are alone look like an outage, once
        check_ledger(await plane.buffer.ledger())

    run(main)


def test_a_reward_that_stays_away_is_given_up_over_all_attempts_when_pauses_come() -> None:
    async def main() -> None:
        def away(state: RolloutState) -> float:
            raise ConnectionError("503")

        async def generate(state: RolloutState) -> None:
            answer(state)

        buffer = ReplayBuffer()
        strategy = AsyncProduceStrategy(
            buffer, reward_fn=away, max_tries=1, max_staleness=1000, progress=NoProgress(), tail_after=10_000
        )
        sampler, loop = Sampler([{"prompt": "q"}]), FunctionAgentLoop(generate)
        judged_s = 0.0
        while not (failed := (await buffer.ledger()).get(TASK, {}).get("failed", 0)) and judged_s < 2000:
            producing = asyncio.create_task(strategy.produce_batch(loop, sampler, 1, TASK, train_step=1, model_step=0))
            await asyncio.sleep(20)  # shorter than the longest delay between two calls of a reward
            judged_s += 20
            await strategy.pause()
            await producing
        assert failed == 1
        # A call that would fall behind the end is not made, so the last delay (up to 30 s) may be missing.
        assert Timeouts().judge_give_up_s - 30 <= judged_s <= Timeouts().judge_give_up_s + 20
        assert any("ConnectionError: 503" in reason for reason in (await buffer.reasons())[TASK])

    run(main)


@pytest.mark.parametrize("over", [0.0, 0.5])
@pytest.mark.parametrize("hung", [0, 20])
def test_a_reward_that_hangs_costs_judge_give_up_s_once(hung: int, over: float) -> None:
    async def main() -> None:
        async def reward(state: RolloutState) -> float:
            if state.rollout_id == MEMBERS * hung:
                await asyncio.get_running_loop().create_future()
            return 1.0

        usual, _ = await seconds_of(FunctionAgentLoop(one_hangs(None)), over)
        began = now()
        plane = Plane(FunctionAgentLoop(one_hangs(None)), over_sample_threshold=over, reward_fn=reward)
        await plane.train(12)
        seconds, give_up_s = plane.step_times[-1] - began, Timeouts().judge_give_up_s
        assert seconds <= usual + (give_up_s if over == 0 else 0) + 60  # pauses wait for judging, a little
        assert hung not in {group[0].group_id for group in plane.trained}

    run(main)


@pytest.mark.parametrize("limit", [1, 5])
def test_reward_concurrency_bounds_the_calls_at_a_time(limit: int) -> None:
    async def main() -> None:
        running = most = 0

        async def reward(state: RolloutState) -> float:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(1)
            running -= 1
            return 1.0

        async def generate(state: RolloutState) -> None:
            answer(state)

        plane = Plane(FunctionAgentLoop(generate), reward_fn=reward, reward_concurrency=limit)
        await plane.train(1)
        assert most == limit

    run(main)


# --- engines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("seconds", [5, 60, 500])
def test_an_outage_of_the_engine_loses_nothing(seconds: float, partial: bool) -> None:
    async def main() -> None:
        async def generate(state: RolloutState) -> None:
            tokens = list(state.response_ids or [])
            while len(tokens) < 5:
                await asyncio.sleep(1)
                if 20 < now() < 20 + seconds:
                    raise ConnectionRefusedError("connection refused")
                tokens.append(len(tokens))
                state.response_ids, state.logprobs = list(tokens), [-0.5] * len(tokens)
            state.response, state.finish_reason, state.status = "x", "stop", Status.COMPLETED

        options: dict[str, Any] = {"enable_partial_rollout": True, "max_staleness": 1} if partial else {}
        plane = Plane(FunctionAgentLoop(generate), over_sample_threshold=0.5, **options)
        await plane.train(12)
        assert (await line(plane))["failed"] == 0
        assert {state.num_tries for group in plane.trained for state in group} == {0}
        assert all(list(state.response_ids or []) == [0, 1, 2, 3, 4] for group in plane.trained for state in group)

    run(main)


class TokenByToken(AgentLoop):
    """Five tokens, one a second; not while `away()`. Notes what it generates."""

    def __init__(self, away: Callable[[], bool], down_timeout_s: float = 600) -> None:
        self.away, self.down_timeout_s = away, down_timeout_s
        self.generated: list[tuple[int | None, int]] = []

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        assert enable_partial_rollout or state.response_ids is None
        tokens = list(state.response_ids or [])
        while len(tokens) < 5:
            await asyncio.sleep(1)
            if self.away():
                raise ConnectionRefusedError("connection refused")
            self.generated.append((state.rollout_id, len(tokens)))
            tokens.append(len(tokens))
            state.response_ids, state.logprobs = list(tokens), [-0.5] * len(tokens)
        state.response, state.finish_reason, state.status = "x", "stop", Status.COMPLETED
        return state


def test_tokens_that_came_before_an_outage_are_continued_without_partial_rollout() -> None:
    async def main() -> None:
        buffer = ReplayBuffer()
        loop = TokenByToken(lambda: 3 < now() < 40)
        strategy = SyncProduceStrategy(buffer, progress=NoProgress())
        await strategy.produce_batch(loop, Sampler([{"prompt": "q"}]), 2, TASK, train_step=1, model_step=0)
        groups = await buffer.get(2, TASK, Status.COMPLETED)
        assert [list(state.response_ids or []) for group in groups for state in group] == [[0, 1, 2, 3, 4]] * 2
        assert max(Counter(loop.generated).values()) == 1, "a token that had come was generated again"

    run(main)


@pytest.mark.parametrize("new_weights", [False, True])
def test_tokens_outlast_an_engine_that_is_given_up_until_the_weights_change(new_weights: bool) -> None:
    async def main() -> None:
        buffer = ReplayBuffer()
        loop = TokenByToken(lambda: 3 < now() < 40, down_timeout_s=10)
        strategy = AsyncProduceStrategy(buffer, max_staleness=5, progress=NoProgress())
        sampler = Sampler([{"prompt": "q"}])
        with pytest.raises(EngineError):
            await strategy.produce_batch(loop, sampler, 2, TASK, train_step=1, model_step=0)
        records = await buffer.query({"task_name": TASK})
        kept = [record for record in records if record.tokens]
        assert [(record.tokens, record.num_tries) for record in kept] == [(3, 0)] * 2
        await asyncio.sleep(40)
        await strategy.produce_batch(loop, sampler, 2, TASK, train_step=2, model_step=int(new_weights))
        groups = await buffer.get(2, TASK, Status.COMPLETED)
        assert {state.version_spans for group in groups for state in group} == {((int(new_weights), 5),)}
        again = [token for token, times in Counter(loop.generated).items() if times > 1]
        assert len(again) == (6 if new_weights else 0)

    run(main)


def test_an_answer_that_was_on_its_way_does_not_make_an_outage_a_fault_of_others() -> None:
    """One request was accepted before the server went, and is answered between the two failures of another."""

    async def main() -> None:
        async def generate(state: RolloutState) -> None:
            accepted = state.rollout_id == 1
            await asyncio.sleep(0.3 if accepted else 0.1)
            if not accepted and now() < 30:
                raise ConnectionRefusedError("connection refused")
            answer(state)

        group = [
            RolloutState(task_name=TASK, group_id=0, rollout_id=rollout, status=Status.INIT, message=[])
            for rollout in range(2)
        ]
        answered = await FunctionAgentLoop(generate).generate_group(group)
        assert [state.status for state in answered] == [Status.COMPLETED] * 2
        assert now() > 30

    run(main)


def test_an_engine_that_stays_away_ends_producing_and_spends_no_try() -> None:
    async def main() -> None:
        async def generate(state: RolloutState) -> None:
            raise ConnectionRefusedError("connection refused")

        buffer = ReplayBuffer()
        strategy = SyncProduceStrategy(buffer, progress=NoProgress())
        loop = FunctionAgentLoop(generate, down_timeout_s=100)
        with pytest.raises(EngineError, match=r"was unreachable .* \(down_timeout_s is 100\).* refused"):
            await strategy.produce_batch(loop, Sampler([{"prompt": "q"}]), 4, TASK, train_step=1, model_step=0)
        assert 90 <= now() <= 100
        records = await buffer.query({"task_name": TASK})
        assert 4 <= len(records) <= 12
        assert {(record.status, record.num_tries) for record in records} == {(Status.ABORTED, 0)}

    run(main)


def test_one_engine_of_two_is_not_given_up_while_the_other_works() -> None:
    async def main() -> None:
        buffer = ReplayBuffer()

        def task(name: str, until: float) -> ManagedTask:
            async def generate(state: RolloutState) -> None:
                await asyncio.sleep(1)
                if 5 < now() < until or now() > 3000:
                    raise ConnectionRefusedError(f"connection refused by the server of {name}")
                answer(state)

            return ManagedTask(
                name=name,
                sampler=Sampler([{"prompt": f"q{i}"} for i in range(100)]),
                agent_loop=FunctionAgentLoop(generate),
                strategy=AsyncProduceStrategy(buffer, max_staleness=1, progress=NoProgress()),
            )

        manager = DisaggregatedAgentLoopManager([task("a", 2000), task("b", 0)], buffer)
        async with manager:
            producer = asyncio.create_task(manager.produce_loop(4))

            async def train(first: int, last: int) -> None:
                for step in range(first, last + 1):
                    async with manager.get_batch(4, step, timeout_s=1e6):
                        await asyncio.sleep(1)
                    await manager.continue_produce(step)

            training = asyncio.create_task(train(1, 20))
            await asyncio.sleep(1000)
            assert "not giving up while another engine works" in await manager.explain_wait()
            await training
            assert 2000 < now() < 3000, "the run outlasted the outage of one server"
            await asyncio.sleep(3000 - now())
            with pytest.raises(ProducerStopped, match=r"EngineUnavailable: .* \(down_timeout_s is 600\)"):
                await train(21, 10_000)
            assert 3600 <= now() <= 3700, "when both are away the time counts"
        with pytest.raises(EngineError):
            await producer

    run(main)


def test_a_tool_that_cannot_be_reached_costs_its_own_group_only(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def generate(state: RolloutState) -> None:
            await asyncio.sleep(1)
            if (state.group_id or 0) % 5 == 0:
                raise ConnectionRefusedError("the sandbox of this tool is down")
            answer(state)

        plane = Plane(FunctionAgentLoop(generate), over_sample_threshold=0.5)
        await plane.train(12)
        assert plane.step_times[-1] <= 12 * 10
        assert (await line(plane))["failed"] >= 5

    run(main)
    assert "given up" not in caplog.text


@pytest.mark.parametrize("sync", [True, False])
def test_an_abort_that_nobody_asked_for_spends_a_try_and_backs_off(sync: bool) -> None:
    async def main() -> None:
        calls: Counter[int | None] = Counter()

        async def generate(state: RolloutState) -> None:
            calls[state.group_id] += 1
            if state.group_id == 1:
                state.finish_reason = "abort"
                return
            await asyncio.sleep(1)
            answer(state)

        buffer = ReplayBuffer()
        kind: Any = SyncProduceStrategy if sync else AsyncProduceStrategy
        strategy = kind(buffer, progress=NoProgress())
        sampler = Sampler([{"prompt": f"q{i}"} for i in range(9)], shuffle=False)
        for step in range(1, 6):
            await strategy.produce_batch(
                FunctionAgentLoop(generate), sampler, 2, TASK, train_step=step, model_step=step - 1
            )
            await strategy.pause()
            async with buffer.lease_batch({TASK: 2}, train_step=step):
                pass
        assert calls[1] == 3
        assert (await buffer.ledger())[TASK]["failed"] == 1
        (reason,) = (await buffer.reasons())[TASK]
        assert "although no pause was requested" in reason

    run(main)


# --- filters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2)]])
def test_over_issue_follows_the_acceptance_rate(seed: int) -> None:
    """At 90 % rejection, from the second batch on at most 1.5 times the time of a run that knew the rate."""

    async def seconds(over: float) -> list[float]:
        fate = random.Random(seed)

        async def generate(state: RolloutState) -> None:
            await asyncio.sleep(30 + 20 * random.Random(state.rollout_id).random())
            answer(state)

        plane = Plane(
            FunctionAgentLoop(generate, cancel_on_pause=False),
            batch_size=16,
            members=1,
            over_sample_threshold=over,
            is_valid_sample_fn=lambda group: fate.random() < 0.1,
        )
        began = now()
        await plane.train(8)
        return [after - before for before, after in zip([began, *plane.step_times], plane.step_times, strict=False)]

    async def main() -> None:
        adaptive, known = await seconds(0.0), await seconds(9.0)
        assert sum(adaptive[1:]) <= 1.5 * sum(known[1:])

    run(main, max_events=10_000_000)


def test_a_mastered_task_does_not_end_the_run_if_rejected_groups_are_accepted() -> None:
    async def main() -> None:
        async def generate(state: RolloutState) -> None:
            await asyncio.sleep(1)
            answer(state)

        plane = Plane(
            FunctionAgentLoop(generate),
            is_valid_sample_fn=lambda group: "zero_std",
            budgets=Budgets(max_consecutive_rejections=40, when_exhausted="accept"),
        )
        await plane.train(30)
        ledger = await line(plane)
        assert ledger["trained"] == 240
        assert 40 <= ledger["filtered"] <= 400
        attempts = plane.manager.tasks[TASK].strategy.figures(TASK).attempts - ledger["filtered"]
        assert attempts <= 3 * 240, "over-issue followed a rate that no longer holds"

    run(main)


def two_tasks(rejecting: Callable[[], bool], **budgets: Any) -> tuple[ReplayBuffer, DisaggregatedAgentLoopManager]:
    """A task whose groups are kept, and one whose groups are all rejected while `rejecting()`."""
    buffer = ReplayBuffer()

    async def generate(state: RolloutState) -> None:
        await asyncio.sleep(1)
        answer(state)

    tasks = [
        ManagedTask(
            name=name,
            sampler=Sampler([{"prompt": f"q{i}"} for i in range(9)]),
            agent_loop=FunctionAgentLoop(generate),
            strategy=AsyncProduceStrategy(
                buffer,
                max_staleness=2,
                is_valid_sample_fn=(lambda group: not rejecting()) if name == "mastered" else None,
                budgets=Budgets(**budgets),
                progress=NoProgress(),
            ),
        )
        for name in ("mastered", "new")
    ]
    return buffer, DisaggregatedAgentLoopManager(tasks, buffer)


def test_a_mastered_task_is_skipped_and_comes_back() -> None:
    async def main() -> None:
        step = 0
        buffer, manager = two_tasks(lambda: step < 5, when_exhausted="skip")
        mix = []
        async with manager:
            producer = asyncio.create_task(manager.produce_loop(4))
            for step in range(1, 9):
                async with manager.get_batch(4, step, timeout_s=10_000) as batch:
                    mix.append({name: len(groups) for name, groups in batch.groups_by_task.items() if groups})
                await manager.pause_produce()
                await manager.continue_produce(step)
                check_ledger(await buffer.ledger())
        await producer
        assert mix[:2] == [{"new": 4}] * 2
        assert {"mastered": 2, "new": 2} in mix[5:]

    run(main)


@pytest.mark.parametrize("choice", ["skip", "raise"])
def test_a_run_without_a_task_that_is_kept_ends_with_the_reason(choice: str) -> None:
    async def main() -> None:
        async def generate(state: RolloutState) -> None:
            answer(state)

        plane = Plane(
            FunctionAgentLoop(generate),
            is_valid_sample_fn=lambda group: "zero_std",
            budgets=Budgets(when_exhausted=choice, max_consecutive_rejections=50),  # type: ignore[arg-type]
        )
        found = r"'skip' found no other task" if choice == "skip" else "choose another when_exhausted"
        with pytest.raises(ProducerStopped, match=rf"TooManyRejections: \d+ groups .* zero_std.*{found}"):
            await plane.train(1)

    run(main)


# --- storages -------------------------------------------------------------------------------------------


class Away(MemoryStorage):
    """Not to be reached for a while, in virtual time."""

    def __init__(self, since: float, seconds: float) -> None:
        super().__init__()
        self.since, self.until = since, since + seconds

    def _check(self) -> None:
        if self.since <= now() < self.until:
            raise StorageUnavailable("the database cannot be reached; nothing was done; try again when it is back")

    async def put(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return await super().put(*args, **kwargs)

    async def issue(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return await super().issue(*args, **kwargs)

    async def claim(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return await super().claim(*args, **kwargs)

    async def settle(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return await super().settle(*args, **kwargs)

    async def summary(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return await super().summary(*args, **kwargs)

    async def advance(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return await super().advance(*args, **kwargs)


@pytest.mark.parametrize("since", [0, 0.5, 3, 5.5, 11])
@pytest.mark.parametrize("colocated", [False, True])
def test_a_storage_that_is_away_for_a_while_costs_time_only(since: float, colocated: bool) -> None:
    async def main() -> None:
        buffer = ReplayBuffer(storage=Away(since, 40))

        async def generate(state: RolloutState) -> None:
            await asyncio.sleep(1 + (state.rollout_id or 0) % 5)
            answer(state)

        strategy = AsyncProduceStrategy(buffer, max_staleness=3, over_sample_threshold=0.5, progress=NoProgress())
        sampler = Sampler([{"prompt": f"q{i}"} for i in range(500)])
        task = ManagedTask(name=TASK, sampler=sampler, agent_loop=FunctionAgentLoop(generate), strategy=strategy)
        trained: list[int | None] = []
        if colocated:
            async with AgentLoopManager([task], buffer) as manager:
                for step in range(1, 7):
                    async with manager.produce_batch(8, step, model_step=step - 1) as batch:
                        trained += [group[0].group_id for group in batch.groups]
        else:
            async with DisaggregatedAgentLoopManager([task], buffer) as ahead:
                producer = asyncio.create_task(ahead.produce_loop(8))
                for step in range(1, 7):
                    async with ahead.get_batch(8, step, timeout_s=1000) as batch:
                        trained += [group[0].group_id for group in batch.groups]
                        await asyncio.sleep(2)
                    await ahead.continue_produce(step)
            await producer
        assert len(trained) == len(set(trained)) == 48
        check_ledger(await buffer.ledger())
        assert (await buffer.ledger())[TASK]["failed"] == 0

    run(main)


def test_a_storage_that_stays_away_is_an_error() -> None:
    async def main() -> None:
        buffer = ReplayBuffer(storage=Away(5, 500))

        async def generate(state: RolloutState) -> None:
            await asyncio.sleep(3)
            answer(state)

        strategy = SyncProduceStrategy(buffer, progress=NoProgress())
        task = ManagedTask(
            name=TASK, sampler=Sampler([{"prompt": "q"}]), agent_loop=FunctionAgentLoop(generate), strategy=strategy
        )
        async with AgentLoopManager([task], buffer, storage_retry_s=30) as manager:
            async with manager.produce_batch(2, 1, model_step=0):
                pass
            with pytest.raises(StorageUnavailable):
                async with manager.produce_batch(2, 2, model_step=1):
                    pass
            assert 30 <= now() <= 40

    run(main)


class Trainer:
    """A manager, either kind, on a storage that is away when the test says so; `storage_retry_s` is 30."""

    def __init__(self, colocated: bool) -> None:
        self.storage = Away(math.inf, math.inf)
        self.buffer = ReplayBuffer(storage=self.storage, max_groups=4)

        async def generate(state: RolloutState) -> None:
            answer(state)

        strategy = AsyncProduceStrategy(self.buffer, max_staleness=5, progress=NoProgress())
        sampler = Sampler([{"prompt": f"q{i}"} for i in range(500)], shuffle=False)
        task = ManagedTask(name=TASK, sampler=sampler, agent_loop=FunctionAgentLoop(generate), strategy=strategy)
        kind = AgentLoopManager if colocated else DisaggregatedAgentLoopManager
        self.manager = kind([task], self.buffer, storage_retry_s=30)

    async def __aenter__(self) -> Trainer:
        if isinstance(self.manager, DisaggregatedAgentLoopManager):
            self.produce = asyncio.create_task(self.manager.produce_loop(4))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.manager.shutdown()
        if isinstance(self.manager, DisaggregatedAgentLoopManager):
            with suppress(StorageUnavailable):
                await self.produce

    def batch(self, step: int) -> BatchRequest:
        if isinstance(self.manager, AgentLoopManager):
            return self.manager.produce_batch(4, step, model_step=step - 1, timeout_s=1000)
        if self.produce.done():
            self.produce.exception()
            self.produce = asyncio.create_task(self.manager.produce_loop(4))
        return self.manager.get_batch(4, step, timeout_s=1000)

    def cut(self) -> None:
        self.storage.since = now()

    async def restore(self) -> None:
        await asyncio.sleep(100)
        self.storage.since = math.inf

    async def trains_in_an_outage(self, error: Exception | None = None) -> set[int | None]:
        """Train step 1, which may raise, while the storage goes away; the groups."""
        trained: set[int | None] = set()
        with suppress(StorageUnavailable):
            async with self.batch(1) as batch:
                trained = {group[0].group_id for group in batch.groups}
                self.cut()
                if error is not None:
                    raise error
            raise AssertionError("the storage was away, and nobody heard of it")
        return trained

    async def ledger(self) -> dict[str, int]:
        ledger = await self.buffer.ledger()
        check_ledger(ledger)
        return {place: n for place, n in ledger[TASK].items() if n}


@pytest.mark.parametrize("colocated", [False, True])
def test_a_batch_whose_acknowledgement_met_an_outage_is_acknowledged_before_the_next_one(colocated: bool) -> None:
    async def main() -> None:
        async with Trainer(colocated) as trainer:
            trained = await trainer.trains_in_an_outage()
            await trainer.restore()
            assert trainer.manager.next_train_step == 1
            async with trainer.batch(2) as batch:  # the buffer has room for one batch
                assert not trained & {group[0].group_id for group in batch.groups}
                assert trainer.manager.next_train_step == 2
                assert await trainer.ledger() == {"issued": 8, "leased": 4, "trained": 4}

    run(main)


@pytest.mark.parametrize("colocated", [False, True])
def test_a_step_that_was_acknowledged_late_is_not_handed_out_again(colocated: bool) -> None:
    async def main() -> None:
        async with Trainer(colocated) as trainer:
            await trainer.trains_in_an_outage()
            await trainer.restore()
            with pytest.raises(InvalidInput, match="train step 1 was already acknowledged; the next one is 2"):
                await trainer.batch(1)
            assert (await trainer.ledger())["trained"] == 4

    run(main)


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("awaited", [False, True])
def test_a_batch_that_could_not_be_given_back_in_an_outage_is_handed_out_again(colocated: bool, awaited: bool) -> None:
    async def main() -> None:
        async with Trainer(colocated) as trainer:
            if awaited:
                held = await trainer.batch(1)
                trainer.cut()
                with pytest.raises(StorageUnavailable):
                    await held.nack()
                assert held.open
            else:
                await trainer.trains_in_an_outage(ValueError("training failed"))
            await trainer.restore()
            async with trainer.batch(1) as batch:
                assert sorted(group[0].group_id or 0 for group in batch.groups) == [0, 1, 2, 3]
            assert (await trainer.ledger())["trained"] == 4

    run(main)


def test_a_batch_that_was_not_settled_in_an_outage_is_settled_at_the_end() -> None:
    async def main() -> None:
        async with Trainer(colocated=True) as trainer:
            await trainer.trains_in_an_outage()
            await trainer.restore()
        assert await trainer.ledger() == {"issued": 4, "trained": 4}

    run(main)


def test_a_claim_that_an_outage_interrupts_is_not_leased_forever() -> None:
    async def main() -> None:
        async with Trainer(colocated=True) as trainer:
            claims = internals(trainer.buffer).claims
            hand_out, calls = claims.hand_out, 0

            async def interrupted(*args: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == 1:
                    trainer.cut()
                    raise StorageUnavailable("the database cannot be reached")
                return await hand_out(*args)

            claims.hand_out = interrupted  # type: ignore[method-assign,assignment]
            with pytest.raises(StorageUnavailable):
                await trainer.batch(1)
            await trainer.restore()
            assert len((await taken(trainer.batch(1))).groups) == 4
            assert await trainer.ledger() == {"issued": 4, "trained": 4}

    run(main)
