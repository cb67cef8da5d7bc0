"""Several servers behind one loop and one control: routing, moves, updates that some servers miss.

The servers are `engine_server`: real HTTP, and each logprob names the weights that made its token. `make test-engines`
tests the same with two live vLLM servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import (
    EngineError,
    EngineRestarted,
    EngineUnavailable,
    InvalidConfig,
    InvalidInput,
    OpenAIAgentLoop,
    RolloutState,
    SampleParams,
    Status,
)
from forebay.agent_loop.outage import Outage
from forebay.engines import EngineControls, SGLangControl, VLLMControl
from tests.engine_server import EngineServer, save_weights, wrong_spans
from tests.openai_server import Script
from tests.processes import HANG_S
from tests.support import closed_ledger
from tests.test_engines import CONTROLS, plane, until

Weights = Callable[[int], Path]


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    return lambda step: save_weights(tmp_path / f"step_{step}", step)


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.agent_loop.monitor._FASTEST_START_S", 0.0)
    defaults = Outage.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "first_delay_s", 0.02)


@asynccontextmanager
async def servers_of(weights: Weights, number: int = 2, **fields: Any) -> AsyncIterator[list[EngineServer]]:
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(EngineServer(started_with=weights(0), **fields)) for _ in range(number)
        ]
        for server in servers:
            server.usual = Script(pause_s=0.0005)
        yield servers


def loop_of(servers: list[EngineServer], **settings: Any) -> OpenAIAgentLoop:
    params = SampleParams(max_tokens=settings.pop("max_tokens", 20))
    urls = [server.url for server in servers]
    return OpenAIAgentLoop(urls, "policy", sample_params=params, **({"backoff_s": 0.001} | settings))


def controls_of(servers: list[EngineServer], **settings: Any) -> EngineControls:
    return EngineControls([CONTROLS[server.kind](server.root, down_timeout_s=HANG_S) for server in servers], **settings)


def members(group_id: int, number: int, **fields: Any) -> list[RolloutState]:
    prompt = [group_id, 7]
    return [
        RolloutState(message=[], task_name="t", group_id=group_id, rollout_id=100 * group_id + n, prompt_ids=prompt)
        for n in range(number)
    ]


def made_by(groups: list[list[RolloutState]]) -> set[int]:
    """The steps of the weights that generated the tokens of some groups."""
    return {int(-value) - 1 for group in groups for state in group for value in np.asarray(state.logprobs)}


def length(state: RolloutState) -> int:
    return 0 if state.response_ids is None else len(state.response_ids)


def _generates(server: EngineServer) -> bool:
    return server.active > 0


def prompts_at(server: EngineServer) -> list[int]:
    return [request.body["prompt"][0] for request in server.received]


# --- routing --------------------------------------------------------------------------------------------


async def test_groups_go_to_the_server_with_the_fewest_requests_and_stay_together(weights: Weights) -> None:
    async with servers_of(weights, 3) as servers, loop_of(servers) as loop:
        for server in servers:
            server.usual = Script(pause_s=0.01)
        await asyncio.gather(*(loop.generate_group(members(group, 4)) for group in range(6)))
        assert [len(server.received) for server in servers] == [8, 8, 8]
        for group in range(6):
            assert sum(group in prompts_at(server) for server in servers) == 1
        assert loop.in_flight == {server.root: 0 for server in servers}


async def test_one_large_group_does_not_leave_the_other_servers_idle(weights: Weights) -> None:
    async with servers_of(weights) as servers, loop_of(servers) as loop:
        for server in servers:
            server.usual = Script(pause_s=0.01)
        await loop.generate_group(members(1, 40))
        one, other = sorted(len(server.received) for server in servers)
        assert one + other == 40
        assert other <= one + max(8, one // 2)


@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "leave", "return"]), st.integers(0, 5)), max_size=120))
def test_a_chosen_server_is_usable_and_hardly_more_loaded_than_the_least(moves: list[tuple[str, int]]) -> None:
    async def play() -> None:
        loop = OpenAIAgentLoop([f"http://server-{n}:1/v1" for n in range(3)], "policy")
        router = loop._router
        running: list[Any] = []
        for move, number in moves:
            server = router.servers[number % 3]
            if move == "begin":
                state = members(number, 1)[0]
                usable = [each for each in router.servers if each.usable]
                least = min((each.in_flight for each in usable), default=0)
                chosen = router.choose(state)
                assert (chosen is None) == (not usable)
                if chosen is not None:
                    assert chosen.usable
                    assert chosen.in_flight <= least + max(8, least // 2)
                    assert router.choose(state) is chosen, "the same rollout again"
                    chosen.in_flight += 1
                    running.append(chosen)
            elif move == "end" and running:
                running.pop(number % len(running)).in_flight -= 1
            elif move == "leave":
                router.leave(server, "a test")
            elif move == "return":
                server.gone = None
        await loop.close()

    asyncio.run(play())


async def test_a_later_turn_goes_to_the_server_of_the_rollout(weights: Weights) -> None:
    async with servers_of(weights) as servers, loop_of(servers) as loop:
        first, second = members(1, 1), members(2, 1)
        for _ in range(3):  # each turn continues after the response so far
            for group in (second, first):
                await loop.generate_group(group, enable_partial_rollout=True)
                group[0].status = Status.INIT
                group[0].sample_params = SampleParams(max_tokens=length(group[0]) + 20)
        assert length(first[0]) == length(second[0]) == 60
        for number in (1, 2):
            assert sum(number in prompts_at(server) for server in servers) == 1


async def test_a_server_that_is_away_leaves_and_returns(weights: Weights, caplog: pytest.LogCaptureFixture) -> None:
    async with servers_of(weights) as servers, loop_of(servers) as loop:
        await servers[0].kill()
        done = await loop.generate_group(members(1, 4))
        assert {state.status for state in done} == {Status.COMPLETED}
        assert not loop.outage.away
        assert f"{servers[0].root} gets no requests" in (loop.explain_wait() or "")
        await servers[0].start_again()
        await until(lambda: "server_back" in caplog.text)
        assert loop.explain_wait() is None
        await asyncio.gather(*(loop.generate_group(members(group, 4)) for group in (5, 6)))
        assert len(servers[0].received) == 4


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_g03_requests_of_a_killed_server_move_with_their_tokens(
    weights: Weights, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.agent_loop.monitor._FASTEST_START_S", HANG_S)
    most = 300
    async with servers_of(weights, kind=kind) as servers:
        controls = controls_of(servers)
        async with loop_of(servers, engine=controls, max_tokens=most, max_retries=0) as loop:
            await controls.update_weights(weights(1), model_step=1)
            await loop.weights_loaded(1)
            generating = [asyncio.create_task(loop.generate_group(members(group, 3))) for group in (1, 2)]
            await until(lambda: all(sum(r.sent > 20 for r in server.received) == 3 for server in servers))
            received = [request.sent for request in servers[0].received]
            await servers[0].kill()
            groups = await asyncio.gather(*generating)
        states = [state for group in groups for state in group]
        assert {state.status for state in states} == {Status.COMPLETED}
        assert all(np.array_equal(np.asarray(state.logprobs), [-2.0] * most) for state in states)
        moved = [request.body["max_tokens"] for request in servers[1].received[3:]]
        assert len(moved) == 3
        assert all(left < most for left in moved), "no request starts again"
        assert sum(most - left for left in moved) >= sum(received) - 3 * 5  # sent, and perhaps not yet received


async def test_g13_a_restarted_server_gets_its_weights_again_while_the_others_work(
    weights: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    trained: list[list[RolloutState]] = []
    async with servers_of(weights) as servers:
        controls = controls_of(servers)
        async with loop_of(servers, engine=controls, max_tokens=60) as loop, plane(loop) as (manager, buffer):
            producing = asyncio.create_task(manager.produce_loop(2))
            for step in range(1, 6):
                async with manager.get_batch(2, step, timeout_s=HANG_S) as batch:
                    trained += batch.groups
                update = await controls.update_weights(weights(step), model_step=step, manager=manager)
                assert update.servers == 2
                victim = servers[step % 2]
                await until(partial(_generates, victim))
                caplog.clear()
                await victim.restart()
                await until(lambda: "server_back" in caplog.text)
                assert victim.step == step
            async with manager.get_batch(2, 6, timeout_s=HANG_S) as batch:
                trained += batch.groups
            await manager.shutdown()
            await producing
            assert (await closed_ledger(buffer)).get("failed", 0) == 0
    assert wrong_spans(trained) == []
    assert all(state.num_tries <= 1 for group in trained for state in group)


async def test_g13_a_server_that_restarted_without_a_control_leaves(weights: Weights) -> None:
    async with servers_of(weights) as servers, loop_of(servers, max_tokens=60) as loop:
        for server in servers:
            server.load(weights(1))
        await loop.weights_loaded(1)
        await servers[0].restart()
        groups = await asyncio.gather(*(loop.generate_group(members(group, 2)) for group in (1, 2)))
        assert made_by(groups) == {1}
        await servers[1].restart()
        with pytest.raises(EngineRestarted, match="none of 2 servers"):
            await loop.generate_group(members(3, 2))
        for server in servers:
            server.load(weights(1))
        await loop.weights_loaded(1)
        done = await loop.generate_group(members(4, 2))
        assert {state.status for state in done} == {Status.COMPLETED}


async def test_requests_wait_only_if_no_server_is_left(weights: Weights) -> None:
    async with servers_of(weights) as servers, loop_of(servers, max_tokens=60) as loop:
        for server in servers:
            await server.kill()
        generating = asyncio.create_task(loop.generate_group(members(1, 2)))
        await until(lambda: loop.outage.away)
        assert "each of" in (loop.explain_wait() or "")
        await servers[1].start_again()
        done = await generating
        assert {state.status for state in done} == {Status.COMPLETED}
        assert not loop.outage.away


async def test_all_servers_away_for_down_timeout_s_end_producing(weights: Weights) -> None:
    async with servers_of(weights) as servers, loop_of(servers, down_timeout_s=0.3) as loop:
        for server in servers:
            await server.kill()
        with pytest.raises(EngineUnavailable, match="no try was spent"):
            await loop.generate_group(members(1, 2))


async def test_servers_that_answer_questions_but_no_request_end_producing(weights: Weights) -> None:
    async with servers_of(weights) as servers, loop_of(servers, down_timeout_s=0.5) as loop:
        for server in servers:
            server.usual = Script(status=503, body=b"")
        with pytest.raises(EngineUnavailable, match="no try was spent"):
            await loop.generate_group(members(1, 2))


# --- updates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_g13_a_server_that_misses_an_update_loads_it_when_it_is_back(
    weights: Weights, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    trained: list[list[RolloutState]] = []
    async with servers_of(weights, kind=kind) as servers:
        controls = controls_of(servers, grace_s=0.1)
        async with loop_of(servers, engine=controls, max_tokens=60) as loop, plane(loop) as (manager, buffer):
            producing = asyncio.create_task(manager.produce_loop(2))
            for step in range(1, 6):
                async with manager.get_batch(2, step, timeout_s=HANG_S) as batch:
                    trained += batch.groups
                if step == 2:
                    await until(lambda: servers[0].active >= 1)
                    await servers[0].kill()
                if step == 4:
                    await servers[0].start_again()
                    await until(lambda: "weights_loaded_late" in caplog.text)
                    assert servers[0].step == 3
                update = await controls.update_weights(weights(step), model_step=step, manager=manager)
                assert update.servers == (1 if step in (2, 3) else 2)
            async with manager.get_batch(2, 6, timeout_s=HANG_S) as batch:
                trained += batch.groups
            await manager.shutdown()
            await producing
            await closed_ledger(buffer)
    assert wrong_spans(trained) == []


async def test_an_update_does_not_wait_for_a_server_that_missed_the_last_one(
    weights: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    async with servers_of(weights) as servers:
        controls = controls_of(servers, grace_s=0.1)
        await servers[1].kill()
        assert (await controls.update_weights(weights(1), model_step=1)).servers == 1
        controls.grace_s = HANG_S * 10
        async with asyncio.timeout(HANG_S):
            assert (await controls.update_weights(weights(2), model_step=2)).servers == 1
        assert [control.behind for control in controls.controls] == [False, True]
        await servers[1].start_again()
        assert (await controls.update_weights(weights(3), model_step=3)).servers == 2
        assert [server.version for server in servers] == ["3", "3"]


async def test_an_update_that_too_few_servers_take_raises_and_can_be_repeated(weights: Weights) -> None:
    async with servers_of(weights) as servers:
        controls = EngineControls([VLLMControl(server.root, down_timeout_s=0.2) for server in servers], min_ready=2)
        async with loop_of(servers, engine=controls) as loop, plane(loop) as (manager, _):
            producing = asyncio.create_task(manager.produce_loop(2))
            async with manager.get_batch(2, 1, timeout_s=HANG_S):
                pass
            await servers[0].kill()
            with pytest.raises(EngineUnavailable, match=r"only 1 of 2 servers .*min_ready is 2.*repeat the update"):
                await controls.update_weights(weights(1), model_step=1, manager=manager)
            assert str(manager.producer_state) == "paused"
            await servers[0].start_again()
            assert (await controls.update_weights(weights(1), model_step=1, manager=manager)).servers == 2
            async with manager.get_batch(2, 2, timeout_s=HANG_S) as batch:
                assert wrong_spans(batch.groups) == []
            await manager.shutdown()
            await producing


async def test_g13_a_server_that_took_half_of_an_update_leaves_until_it_has_all(
    weights: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    async with servers_of(weights) as servers:
        controls = controls_of(servers)
        servers[0].partial_updates = 1
        async with loop_of(servers, engine=controls) as loop:
            assert (await controls.update_weights(weights(1), model_step=1)).servers == 1
            await loop.weights_loaded(1)
            group = await loop.generate_group(members(1, 2))
            assert made_by([group]) == {1}
            assert not servers[0].received
            await until(lambda: "server_back" in caplog.text)
            assert servers[0].step == 1


async def test_wrong_files_are_refused_before_any_server_is_paused(weights: Weights, tmp_path: Path) -> None:
    async with servers_of(weights) as servers:
        controls = controls_of(servers)
        async with loop_of(servers, engine=controls) as loop, plane(loop) as (manager, _):
            producing = asyncio.create_task(manager.produce_loop(2))
            with pytest.raises(InvalidInput):
                await controls.update_weights(tmp_path / "nothing", model_step=1, manager=manager)
            async with manager.get_batch(2, 1, timeout_s=HANG_S):
                pass
            await manager.shutdown()
            await producing
        assert not any(server.loads for server in servers)


async def test_idle_of_several_servers_ignores_one_that_is_gone(weights: Weights) -> None:
    async with servers_of(weights) as servers:
        controls = controls_of(servers)
        await servers[0].kill()
        await controls.idle()
        servers[1].hold_tails = True
        controls.controls[1].idle_timeout_s = 0.1
        servers[1].tails = 1
        with pytest.raises(EngineError, match="still runs requests"):
            await controls.idle()
        servers[1].tails, servers[1].hold_tails = 0, False


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: EngineControls([]), "expected controls"),
        (lambda: EngineControls([VLLMControl("http://a:1")], min_ready=2), "there are 1 servers"),
        (lambda: EngineControls([VLLMControl("http://a:1"), SGLangControl("http://a:1")]), "two controls"),
        (lambda: OpenAIAgentLoop([], "m"), "base_url is empty"),
        (lambda: OpenAIAgentLoop(["http://localhost:1/v1", "http://127.0.0.1:1/v1"], "m"), "twice"),
        (
            lambda: OpenAIAgentLoop(
                ["http://a:1/v1", "http://b:1/v1"], "m", engine=EngineControls([VLLMControl("http://a:1")])
            ),
            "expected the same servers",
        ),
    ],
)
def test_bad_settings_of_several_servers_are_refused(build: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        build()
