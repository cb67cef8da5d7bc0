"""Problems that users found with live engines and tool-using agents, each as the program that shows it (G13)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import (
    AgentLoop,
    AsyncProduceStrategy,
    AsyncReplayBufferConfig,
    Budgets,
    DisaggregatedAgentLoopManager,
    EngineUnavailable,
    FunctionAgentLoop,
    ManagedTask,
    NoProgress,
    OpenAIAgentLoop,
    ReplayBuffer,
    RolloutState,
    SampleParams,
    Sampler,
    Status,
    SyncProduceStrategy,
    Timeouts,
    TooManyFailures,
)
from forebay.core.rollout import versioned_tokens
from forebay.testing import simulate
from tests.openai_server import CompletionServer, answer_to
from tests.support import closed_ledger

RECORDS = [{"prompt": f"q{n}", "prompt_ids": [n, 1]} for n in range(10)]
TURNS = [[1] * 5, [2] * 5]


def strategy_of(buffer: ReplayBuffer, **settings: Any) -> AsyncProduceStrategy:
    defaults: dict[str, Any] = {"progress": NoProgress(), "max_staleness": 2}
    return AsyncProduceStrategy(buffer, **(defaults | settings))


async def batches_over_a_pause(loop: AgentLoop, *, partial: bool, **timeouts: float) -> list[list[RolloutState]]:
    """Four groups for step 2 whose first turn was generated with older weights."""
    buffer = AsyncReplayBufferConfig().build()
    strategy = strategy_of(buffer, enable_partial_rollout=partial, timeouts=Timeouts(**timeouts))
    task = ManagedTask(name="agent", sampler=Sampler(RECORDS), agent_loop=loop, strategy=strategy)
    async with DisaggregatedAgentLoopManager([task], buffer) as manager:
        producing = asyncio.create_task(manager.produce_loop(4))
        await asyncio.sleep(3)
        await manager.pause_produce()
        await manager.continue_produce(1)
        async with manager.get_batch(4, 2, timeout_s=600) as batch:
            groups = batch.groups
        await closed_ledger(buffer, "agent")
    await producing
    return groups


class ToolLoop(AgentLoop):
    """Two turns with a tool between them; a pause ends the tool early."""

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        if not state.response_ids:
            state.response_ids, state.finish_reason = list(TURNS[0]), "tool_calls"  # as the engine reports
        for _ in range(20):  # the tool runs
            await asyncio.sleep(1)
            if self.paused:
                state.status = Status.ABORTED
                return state
        state.response_ids = [*state.response_ids, *TURNS[1]]
        state.finish_reason, state.status = "stop", Status.COMPLETED
        return state


async def tool_function(state: RolloutState) -> None:
    if not state.response_ids:
        state.response_ids, state.finish_reason = list(TURNS[0]), "stop"
    await asyncio.sleep(20)
    state.response_ids = [*state.response_ids, *TURNS[1]]


class InnerTurns(AgentLoop):
    """Each turn sets COMPLETED, as a call of `super().generate` does; cancelled in the tool between them."""

    deaf = False

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        for turn in TURNS[len(state.response_ids or ()) // 5 :]:
            state.response_ids = [*(state.response_ids or ()), *turn]
            state.finish_reason, state.status = "stop", Status.COMPLETED
            tool = asyncio.ensure_future(asyncio.sleep(20))
            while not tool.done():
                try:
                    await asyncio.wait((tool,))
                except asyncio.CancelledError:
                    if not self.deaf:
                        raise
        return state


class DeafTurns(InnerTurns):
    deaf = True


LOOPS: dict[str, tuple[Callable[[], AgentLoop], dict[str, float]]] = {
    "returns aborted": (ToolLoop, {}),
    "cancelled by the pause": (lambda: FunctionAgentLoop(tool_function), {}),
    "cancelled after a time-out": (InnerTurns, {"pause_timeout_s": 2.0, "pause_interval_s": 1.0}),
    "ignores the cancel": (DeafTurns, {"pause_timeout_s": 2.0, "pause_interval_s": 1.0, "cancel_timeout_s": 1.0}),
}


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("how", LOOPS)
def test_g13_an_interrupted_dialogue_is_never_completed(how: str, partial: bool) -> None:
    """Field report 1: the finish reason (or status) of an earlier turn does not complete an interrupted dialogue."""
    make, timeouts = LOOPS[how]
    groups = simulate.run(lambda: batches_over_a_pause(make(), partial=partial, **timeouts))
    assert [list(state.response_ids or ()) for group in groups for state in group] == [TURNS[0] + TURNS[1]] * 4


class TurnByTurn(OpenAIAgentLoop):
    """A tool loop that calls `super().generate` for each turn. A pause interrupts every second tool."""

    tools = 0

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        for end in (10, 28):
            if versioned_tokens(state) >= end:
                continue
            state.sample_params = SampleParams(max_tokens=end)
            await super().generate(state, enable_partial_rollout=True)
            if state.status is not Status.COMPLETED:
                return state
            if end == 10:
                self.tools += 1
                if self.tools % 2:
                    await self.until_paused()
        return state


async def test_g13_turns_of_a_completion_server_are_never_cut_short() -> None:
    async with CompletionServer() as server, TurnByTurn(server.url, "policy") as loop:
        buffer = AsyncReplayBufferConfig().build()
        strategy = strategy_of(buffer, enable_partial_rollout=True, max_staleness=8, over_sample_threshold=2.0)
        task = ManagedTask(name="agent", sampler=Sampler(RECORDS), agent_loop=loop, strategy=strategy)
        members: list[RolloutState] = []
        async with DisaggregatedAgentLoopManager([task], buffer) as manager:
            producing = asyncio.create_task(manager.produce_loop(4))
            for step in range(1, 6):
                async with manager.get_batch(4, step, timeout_s=60) as batch:
                    members += [state for group in batch.groups for state in group]
                await manager.pause_produce()
                await manager.continue_produce(step)
        await producing
    assert [versioned_tokens(state) for state in members] == [28] * 20
    assert any(len(state.version_spans) > 1 for state in members)


class Agent(OpenAIAgentLoop):
    """Two turns of five tokens with a tool between them, whose tokens have no training signal."""

    tool = (901, 902, 903)

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        steps = state.loop_state = state.loop_state or {"turns": 0}
        while True:
            state.sample_params = SampleParams(max_tokens=versioned_tokens(state) + 5)
            await super().generate(state, enable_partial_rollout=enable_partial_rollout)
            if state.status is not Status.COMPLETED:
                return state
            steps["turns"] += 1
            if steps["turns"] == 2:
                return state
            await self.call_tool(state)

    async def call_tool(self, state: RolloutState) -> None:
        assert isinstance(state.response_ids, np.ndarray)
        assert isinstance(state.logprobs, np.ndarray)
        state.response_mask = [1] * len(state.response_ids) + [0] * len(self.tool)
        state.response_ids = [*state.response_ids.tolist(), *self.tool]
        state.logprobs = [*state.logprobs.tolist(), *[0.0] * len(self.tool)]


@pytest.mark.parametrize("partial", [True, False])
async def test_g13_a_turn_keeps_the_turns_before_it(partial: bool) -> None:
    async with CompletionServer() as server, Agent(server.url, "policy") as loop:
        buffer = AsyncReplayBufferConfig().build()
        strategy = strategy_of(buffer, enable_partial_rollout=partial)
        await strategy.produce_batch(loop, Sampler(RECORDS), 2, "agent", train_step=1, model_step=0)
        async with buffer.lease_batch({"agent": 2}, train_step=1) as lease:
            members = [state for group in lease.groups for state in group]
    for state in members:
        assert isinstance(state.prompt_ids, list)
        prompt = [int(token) for token in state.prompt_ids]
        first = answer_to(prompt, 5)
        second = answer_to([*prompt, *first, *Agent.tool], 5)
        assert np.array_equal(np.array(state.response_ids), [*first, *Agent.tool, *second])
        assert state.response_mask == [1] * 5 + [0] * 3 + [1] * 5


class UnreachableTool(Agent):
    async def call_tool(self, state: RolloutState) -> None:
        raise ConnectionRefusedError("the sandbox at 10.0.0.9 refused")


@pytest.mark.parametrize("partial", [True, False])
async def test_a_tool_that_cannot_be_reached_is_not_taken_for_an_engine_that_is_away(
    partial: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with CompletionServer() as server, UnreachableTool(server.url, "policy") as loop:
        buffer = AsyncReplayBufferConfig().build()
        strategy = strategy_of(buffer, enable_partial_rollout=partial, budgets=Budgets(max_consecutive_failures=6))
        with pytest.raises(TooManyFailures, match="ConnectionRefusedError: the sandbox at"):
            await strategy.produce_batch(loop, Sampler(RECORDS), 2, "agent", train_step=1, model_step=0)
        line = await closed_ledger(buffer, "agent")
    assert line["issued"] <= 6
    assert len(server.received) <= 8  # a request for each attempt, and those that the error found running
    assert not [record for record in caplog.records if "engine_away" in record.getMessage()]


async def test_a_lost_connection_while_the_server_is_away_spends_no_try() -> None:
    class BothAway(Agent):
        async def call_tool(self, state: RolloutState) -> None:
            await server.__aexit__()
            raise ConnectionResetError("a request of the subclass to the same machine")

    server = CompletionServer()
    async with server, BothAway(server.url, "policy", down_timeout_s=0.05, backoff_s=0.001) as loop:
        group = [RolloutState(message=[], rollout_id=0, group_id=0, prompt_ids=[1, 2])]
        with pytest.raises(EngineUnavailable, match="was unreachable"):
            await loop.generate_group(group)
    assert [(state.status, state.num_tries) for state in group] == [(Status.ABORTED, 0)]


async def agent(state: RolloutState) -> None:
    """Three turns, appended to the message as in every chat loop, and counted in extra_fields."""
    ids = list(state.response_ids) if state.response_ids is not None else []
    while len(state.message) < 7:
        ids += [1, 2, 3]
        state.response_ids = ids
        state.message += [{"role": "assistant", "content": "call"}, {"role": "tool", "content": "obs"}]
        state.extra_fields["turns"] = state.extra_fields.get("turns", 0) + 1


def check_whole(groups: list[list[RolloutState]]) -> None:
    for state in (state for group in groups for state in group):
        assert (len(state.response_ids or ()), len(state.message), state.extra_fields["turns"]) == (9, 7, 3)


async def produced(buffer: ReplayBuffer, sampler: Sampler, step: int, **settings: Any) -> None:
    strategy = strategy_of(buffer, max_staleness=0, **settings)
    await strategy.produce_batch(FunctionAgentLoop(agent), sampler, 4, "t", train_step=step, model_step=step - 1)
    await asyncio.sleep(0.1)
    await strategy.pause()


@pytest.mark.parametrize("kind", ["memory", "pandas", "sqlite"])
async def test_g13_an_expired_dialogue_starts_again_from_its_prompt(kind: str, tmp_path: Path) -> None:
    """Field report 2: it does not keep the messages of the expired attempt, and is never empty."""
    storage = f"sqlite:///{tmp_path}/store.db" if kind == "sqlite" else kind
    buffer = AsyncReplayBufferConfig(storage=storage).build()
    sampler = Sampler(RECORDS, shuffle=False)
    await produced(buffer, sampler, 1, over_sample_threshold=1.0)
    async with buffer.lease_batch({"t": 4}, train_step=1, timeout_s=60) as lease:
        check_whole(lease.groups)
    await produced(buffer, sampler, 2)  # the four that were over-issued are too old now
    async with buffer.lease_batch({"t": 4}, train_step=2, timeout_s=60) as lease:
        check_whole(lease.groups)
        assert {state.group_id for group in lease.groups for state in group} == {4, 5, 6, 7}
    await buffer.close()


async def test_g13_a_prompts_only_checkpoint_holds_prompts_as_issued(tmp_path: Path) -> None:
    buffer, sampler = AsyncReplayBufferConfig().build(), Sampler(RECORDS, shuffle=False)
    await produced(buffer, sampler, 1)
    await buffer.save(tmp_path / "checkpoint", model_step=0, no_save_replay_buffer=True)
    resumed = AsyncReplayBufferConfig().build()
    await resumed.resume(tmp_path / "checkpoint")
    await produced(resumed, Sampler(RECORDS, shuffle=False), 1)
    async with resumed.lease_batch({"t": 4}, train_step=1, timeout_s=60) as lease:
        check_whole(lease.groups)
        assert {state.group_id for group in lease.groups for state in group} == {0, 1, 2, 3}


@pytest.mark.parametrize("partial", [True, False])
async def test_g13_a_retry_after_a_failure_starts_from_the_prompt(partial: bool) -> None:
    failed: set[int | None] = set()

    async def fails_once(state: RolloutState) -> None:
        await agent(state)
        if state.rollout_id not in failed:
            failed.add(state.rollout_id)
            raise ConnectionError("the tool is away")

    buffer = AsyncReplayBufferConfig().build()
    strategy = strategy_of(buffer, enable_partial_rollout=partial)
    await strategy.produce_batch(FunctionAgentLoop(fails_once), Sampler(RECORDS), 4, "t", train_step=1, model_step=0)
    async with buffer.lease_batch({"t": 4}, train_step=1, timeout_s=60) as lease:
        check_whole(lease.groups)


async def answered(
    record: RolloutState, answer: Callable[[RolloutState], Awaitable[None]], **settings: Any
) -> tuple[RolloutState, SyncProduceStrategy]:
    buffer = AsyncReplayBufferConfig().build()
    strategy = SyncProduceStrategy(buffer, progress=NoProgress())
    sampler = Sampler([record], **settings)
    await strategy.produce_batch(FunctionAgentLoop(answer), sampler, 1, "t", train_step=5, model_step=4)
    async with buffer.lease_batch({"t": 1}, train_step=5, timeout_s=60) as lease:
        return lease.groups[0][0], strategy


async def engine(state: RolloutState) -> None:
    assert state.response is None
    state.response, state.response_ids = "4", [4]


def gold() -> RolloutState:
    return RolloutState(
        message=[{"role": "user", "content": "2 + 2"}],
        response="4 (gold)",
        response_ids=[9],
        finish_reason="stop",
        status=Status.COMPLETED,
        reward={"score": 1.0},
        loop_state={"turn": 1},
    )


async def test_g13_a_response_of_the_data_set_is_dropped_and_counted() -> None:
    """S2: a gold answer is not trained on as if the policy had generated it."""
    state, strategy = await answered(gold(), engine)
    assert (state.response, state.reward, state.loop_state, state.version_spans) == ("4", None, None, ((4, 1),))
    assert strategy.stats()["forebay/t/produce/dropped_responses"] == 1


async def test_offline_data_is_used_as_it_is() -> None:
    async def nobody(state: RolloutState) -> None:
        raise AssertionError("nothing is to be generated")

    state, strategy = await answered(gold(), nobody, offline=True)
    assert (state.response, state.response_ids) == ("4 (gold)", [9])
    assert strategy.stats()["forebay/t/produce/dropped_responses"] == 0


async def test_g13_an_expired_group_with_an_answer_is_generated() -> None:
    """S3: also a group that a user puts as EXPIRED with its old answer."""
    buffer = AsyncReplayBufferConfig().build()
    old = gold()
    old.status = Status.EXPIRED
    await buffer.put([old], "t")
    strategy = SyncProduceStrategy(buffer, progress=NoProgress())
    await strategy.produce_batch(FunctionAgentLoop(engine), Sampler(RECORDS), 1, "t", train_step=5, model_step=4)
    async with buffer.lease_batch({"t": 1}, train_step=5, timeout_s=60) as lease:
        assert lease.groups[0][0].response == "4"
        assert lease.groups[0][0].message == old.message
    assert strategy.stats()["forebay/t/produce/dropped_responses"] == 1


async def test_g13_completed_without_a_token_spends_a_try_and_never_reaches_a_trainer() -> None:
    attempts = 0

    async def empty_at_first(state: RolloutState) -> None:
        nonlocal attempts
        attempts += 1
        state.response_ids, state.status = [] if attempts == 1 else [1], Status.COMPLETED

    buffer = AsyncReplayBufferConfig().build()
    strategy = SyncProduceStrategy(buffer, progress=NoProgress())
    await strategy.produce_batch(
        FunctionAgentLoop(empty_at_first), Sampler(RECORDS), 1, "t", train_step=1, model_step=0
    )
    async with buffer.lease_batch({"t": 1}, train_step=1, timeout_s=60) as lease:
        (state,) = lease.groups[0]
        assert (state.response_ids, state.num_tries) == ([1], 1)


async def test_tool_calls_without_a_status_end_a_turn_and_not_a_sample() -> None:
    async def calls(state: RolloutState) -> None:
        state.response_ids, state.finish_reason = [1], "tool_calls"

    (state,) = await FunctionAgentLoop(calls).generate_group([RolloutState(message=[], rollout_id=1)])
    assert state.status is Status.FAILED
    assert "ends a turn" in str(state.error_msg)


def test_an_unjudged_group_is_only_judged_and_does_not_count_as_waiting() -> None:
    """Also without partial rollout: its answer is kept, and it triggers no tail batch."""
    generated: list[int | None] = []

    async def answer(state: RolloutState) -> None:
        generated.append(state.rollout_id)
        state.response_ids = [1, 2]

    async def slow(state: RolloutState) -> float:
        await asyncio.sleep(100)
        return 1.0

    async def main() -> None:
        buffer = AsyncReplayBufferConfig().build()
        strategy = strategy_of(
            buffer, reward_fn=slow, tail_batch_trigger_size=2, timeouts=Timeouts(judge_timeout_s=1.0)
        )
        sampler, loop = Sampler(RECORDS), FunctionAgentLoop(answer)
        producing = asyncio.create_task(strategy.produce_batch(loop, sampler, 4, "t", train_step=1, model_step=0))
        await asyncio.sleep(5)
        await strategy.pause()
        assert not (await producing).complete
        records = await buffer.query({"unjudged": 1})
        assert [(record.status, record.tokens) for record in records] == [(Status.ABORTED, 2)] * 4
        production = await strategy.produce_batch(loop, sampler, 4, "t", train_step=2, model_step=1)
        assert (production.complete, production.tail) == (True, False)
        assert sorted(generated, key=str) == sorted(set(generated), key=str)
        async with buffer.lease_batch({"t": 4}, train_step=2, timeout_s=600) as lease:
            members = [state for group in lease.groups for state in group]
            assert {state.rollout_id for state in members} == set(generated)
            assert {state.version_spans for state in members} == {((0, 2),)}
            assert not any(state.unjudged for state in members)
        await strategy.close()

    simulate.run(main)
