"""Weights of a real server: a pause is a barrier, an update is complete, and every token has the right version.

The server is `engine_server`: real HTTP with the paths of vLLM and SGLang. `make test-engines` tests the same with real
vLLM and SGLang servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from forebay import (
    AgentLoop,
    AsyncProduceStrategy,
    AsyncReplayBufferConfig,
    DisaggregatedAgentLoopManager,
    EngineError,
    EngineRestarted,
    EngineUnavailable,
    FunctionAgentLoop,
    InvalidConfig,
    InvalidInput,
    ManagedTask,
    NoProgress,
    OpenAIAgentLoop,
    ReplayBuffer,
    RolloutState,
    SampleParams,
    Sampler,
    Status,
    Timeouts,
)
from forebay.agent_loop.monitor import Unreachable
from forebay.agent_loop.outage import Outage
from forebay.agent_loop.server import until_idle
from forebay.engines import EngineControl, SGLangControl, VLLMControl
from forebay.engines.weights import Tensor, check_update
from tests.engine_server import TENSORS, EngineServer, save_weights, wrong_spans
from tests.openai_server import Script
from tests.processes import HANG_S
from tests.support import closed_ledger

CONTROLS: dict[str, type[EngineControl]] = {"vllm": VLLMControl, "sglang": SGLangControl}
PROMPTS = [{"prompt": f"question {n}", "prompt_ids": [n, 7]} for n in range(20)]


@pytest.fixture
def weights(tmp_path: Path) -> Callable[[int], Path]:
    return lambda step: save_weights(tmp_path / f"step_{step}", step)


@pytest.fixture(autouse=True)
def restarts_in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.agent_loop.monitor._FASTEST_START_S", 0.0)
    defaults = Outage.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "first_delay_s", 0.02)  # until it is asked again


@pytest.fixture(params=["vllm", "sglang"])
async def server(request: pytest.FixtureRequest, weights: Callable[[int], Path]) -> AsyncIterator[EngineServer]:
    async with EngineServer(started_with=weights(0), kind=request.param) as running:
        running.usual = Script(pause_s=0.0005)
        yield running


@pytest.fixture
def control(server: EngineServer) -> EngineControl:
    return CONTROLS[server.kind](server.root, idle_timeout_s=30)


def loop_of(server: EngineServer, **settings: Any) -> OpenAIAgentLoop:
    params = SampleParams(max_tokens=settings.pop("max_tokens", 20))
    return OpenAIAgentLoop(server.url, "policy", sample_params=params, **({"backoff_s": 0.001} | settings))


@asynccontextmanager
async def plane(
    loop: AgentLoop, *, groups: int = 4, **timeouts: float
) -> AsyncIterator[tuple[DisaggregatedAgentLoopManager, ReplayBuffer]]:
    """A manager for a loop; it has produced nothing yet."""
    buffer = AsyncReplayBufferConfig(max_groups=64).build()
    strategy = AsyncProduceStrategy(
        buffer,
        over_sample_threshold=1.0,
        max_staleness=3,
        enable_partial_rollout=True,
        progress=NoProgress(),
        timeouts=Timeouts(**timeouts),
    )
    task = ManagedTask(name="math", sampler=Sampler(PROMPTS, group_size=2), agent_loop=loop, strategy=strategy)
    async with DisaggregatedAgentLoopManager([task], buffer) as manager:
        yield manager, buffer


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


# --- a pause is a barrier -------------------------------------------------------------------------------


@pytest.mark.parametrize("controlled", [True, False])
async def test_g13_a_pause_returns_when_the_server_has_stopped_our_requests(
    server: EngineServer, control: EngineControl, controlled: bool
) -> None:
    server.tail_ticks = 30
    async with (
        loop_of(server, max_tokens=100_000, engine=control if controlled else None) as loop,
        plane(loop) as (manager, _),
    ):
        producing = asyncio.create_task(manager.produce_loop(4))
        for step in (1, 2):
            await until(lambda: server.active >= 4)
            await manager.pause_produce()
            assert server.running == 0
            server.version = str(step)
            await manager.continue_produce(step)
    await producing


async def test_g13_a_pause_raises_if_the_server_does_not_stop_and_can_be_repeated(server: EngineServer) -> None:
    server.hold_tails = True
    async with loop_of(server, max_tokens=100_000) as loop, plane(loop, idle_timeout_s=1.5) as (manager, buffer):
        producing = asyncio.create_task(manager.produce_loop(4))
        await until(lambda: server.active >= 4)
        with pytest.raises(EngineError, match="still runs requests"):
            await manager.pause_produce()
        assert (await closed_ledger(buffer)).keys() == {"issued", "buffered"}
        server.hold_tails = False
        await manager.pause_produce()
        assert server.running == 0
    await producing


async def test_a_server_that_is_gone_is_idle(server: EngineServer, control: EngineControl) -> None:
    await server.__aexit__(None, None, None)
    await control.idle()
    async with loop_of(server) as loop:
        await loop.idle()
    await server.__aenter__()


async def test_idle_reads_the_gauges_of_a_server_without_developer_mode(weights: Callable[[int], Path]) -> None:
    async with EngineServer(started_with=weights(0), kind="vllm") as server:
        server._vllm_is_paused = None  # type: ignore[method-assign, assignment]
        server.tails = 1
        idle = asyncio.create_task(VLLMControl(server.root).idle())
        await until(lambda: server.asked.count("GET /metrics") >= 5)
        assert not idle.done()
        server.tails = 0
        await idle


async def test_a_repeated_snapshot_does_not_make_a_server_idle() -> None:
    """SGLang reports zero for a request that has just begun; only later snapshots include it."""
    snapshots = iter([1.0] * 20 + [2.0, 2.0, 3.0])
    asked = 0

    async def get(path: str) -> bytes | None:
        nonlocal asked
        asked += 1
        timestamp = next(snapshots)
        return b'{"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "timestamp": %g}]}' % timestamp

    await until_idle(get, "http://here")
    assert asked == 23


async def test_a_function_loop_may_have_an_idle_function() -> None:
    calls = []
    begun = asyncio.Event()

    async def answer(state: RolloutState) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def idle() -> None:
        calls.append(1)

    async with plane(FunctionAgentLoop(answer, idle=idle)) as (manager, _):
        producing = asyncio.create_task(manager.produce_loop(2))
        await begun.wait()
        await manager.pause_produce()
    await producing
    assert calls == [1]


# --- an update is complete ------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [4, pytest.param(8, marks=pytest.mark.slow)])
async def test_g13_every_version_span_names_the_weights_that_generated_it(
    server: EngineServer, control: EngineControl, weights: Callable[[int], Path], steps: int
) -> None:
    server.tail_ticks = 10
    trained: list[list[RolloutState]] = []
    async with loop_of(server, engine=control, max_tokens=60) as loop, plane(loop) as (manager, buffer):
        producing = asyncio.create_task(manager.produce_loop(4))
        for step in range(1, steps + 1):
            async with manager.get_batch(4, step, timeout_s=HANG_S) as batch:
                trained += batch.groups
            await until(lambda: server.active >= 2)
            update = await control.update_weights(weights(step), model_step=step, manager=manager)
            assert (update.checked, update.unchecked) == (5, 0)
            assert (server.version, server.step, server.running) == (str(step), step, 0)
        await manager.pause_produce()
        await closed_ledger(buffer)
    await producing
    assert wrong_spans(trained) == []
    assert server.updates_while_busy == 0
    assert sum(len(state.version_spans) > 1 for group in trained for state in group) > steps


async def refused(server: EngineServer) -> None:
    # The update is repeated once for vLLM: its first load after an error can fail with the same error.
    server.refuse_updates = 2 if server.kind == "vllm" else 1


async def taken_in_part(server: EngineServer) -> None:
    server.partial_updates = 1


async def not_versioned(server: EngineServer) -> None:
    server.keep_version = 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [(refused, "answered (500|400)"), (taken_in_part, "only part of the weights"), (not_versioned, "reports version")],
)
async def test_g13_no_token_counts_after_an_incomplete_update(
    server: EngineServer,
    control: EngineControl,
    weights: Callable[[int], Path],
    fault: Callable[[EngineServer], Awaitable[None]],
    words: str,
) -> None:
    trained: list[list[RolloutState]] = []
    async with loop_of(server, engine=control, max_tokens=40) as loop, plane(loop) as (manager, buffer):
        producing = asyncio.create_task(manager.produce_loop(2))
        async with manager.get_batch(2, 1, timeout_s=HANG_S) as batch:
            trained += batch.groups
        await fault(server)
        with pytest.raises(EngineError, match=words):
            await control.update_weights(weights(1), model_step=1, manager=manager)
        assert (await closed_ledger(buffer)).get("in_flight", 0) == 0
        received = len(server.received)
        await manager.continue_produce(1)  # although the update failed
        with pytest.raises(EngineRestarted, match=r"may not have the weights of step .* failed"):
            await producing
        assert len(server.received) == received
        await manager.pause_produce()
        await control.update_weights(weights(1), model_step=1, manager=manager)
        producing = asyncio.create_task(manager.produce_loop(2))
        for step in (2, 3):
            async with manager.get_batch(2, step, timeout_s=HANG_S) as batch:
                trained += batch.groups
    await producing
    assert wrong_spans(trained) == []


@pytest.mark.parametrize(
    ("names", "shape", "words"),
    [
        (TENSORS[1:], (2, 3), "1 tensors are missing .the first: 'model.embed_tokens.weight'"),
        ((*TENSORS, "model.layers.7.mlp.up_proj.weight"), (2, 3), "1 tensors are new"),
        (TENSORS, (3, 2), "8 tensors have a different shape"),
    ],
)
async def test_weights_that_would_break_a_server_are_refused_before_it_is_touched(
    server: EngineServer, control: EngineControl, tmp_path: Path, names: Any, shape: Any, words: str
) -> None:
    async with loop_of(server, engine=control) as loop, plane(loop) as (manager, _):
        bad = save_weights(tmp_path / "bad", 5, names, shape=shape)
        with pytest.raises(InvalidInput, match=words):
            await control.update_weights(bad, model_step=5, manager=manager)
        assert str(manager.producer_state) == "running"
    assert server.loads == 0


async def test_directories_without_weights_are_refused(
    server: EngineServer, control: EngineControl, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"\xff" * 40)
    for directory, words in (("nowhere", "no directory"), ("empty", "no safetensors"), ("torn", "cannot be read")):
        with pytest.raises(InvalidInput, match=words):
            await control.update_weights(tmp_path / directory, model_step=1)
    assert server.loads == 0


async def test_a_server_that_freed_its_tensors_cannot_be_updated(weights: Callable[[int], Path]) -> None:
    """vLLM on a CPU without the worker extension would take half of every update, and report success."""
    async with EngineServer(started_with=weights(0), kind="vllm") as server:
        server.weights["model.layers.0.mlp.down_proj.weight"] = b""
        with pytest.raises(EngineError, match="cannot load new weights completely: it repacked 1 of 5 tensors"):
            await VLLMControl(server.root).update_weights(weights(1), model_step=1)
        assert (server.loads, server.paused) == (0, False)


async def test_the_start_up_weights_can_be_passed_in(server: EngineServer, weights: Callable[[int], Path]) -> None:
    started_with, server.started_with = server.started_with, Path("/nowhere")
    server.model_path = "/nowhere"
    unknown = CONTROLS[server.kind](server.root)
    assert (await unknown.update_weights(weights(1), model_step=1)).unchecked == len(TENSORS)
    assert (await unknown.update_weights(weights(2), model_step=2)).checked == 5
    server.started_with = started_with
    await server.restart()
    given = CONTROLS[server.kind](server.root, weights=started_with)
    assert (await given.update_weights(weights(1), model_step=1)).checked == 5


async def test_without_verification_no_checksums_are_requested(
    server: EngineServer, weights: Callable[[int], Path]
) -> None:
    plain = CONTROLS[server.kind](server.root, verify=False)
    await plain.update_weights(weights(1), model_step=1)
    assert not [path for path in server.asked if "checker" in path]
    assert server.step == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"url": "http://here/v1"},
        {"url": "ftp://here"},
        {"idle_timeout_s": 0},
        {"load_timeout_s": True},
        {"down_timeout_s": 0},
    ],
)
def test_bad_settings_of_a_control_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        VLLMControl(**({"url": "http://here"} | settings))


async def test_an_update_of_vllm_without_developer_mode_says_what_to_set(weights: Callable[[int], Path]) -> None:
    async with EngineServer(started_with=weights(0), kind="anonymous") as server:
        with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
            await VLLMControl(server.root, weights=weights(0)).update_weights(weights(1), model_step=1)


# --- a restarted server serves its start-up weights -----------------------------------------------------


@pytest.mark.parametrize("held", [True, False])
async def test_g13_a_control_loads_the_weights_again_after_a_restart(
    server: EngineServer, control: EngineControl, weights: Callable[[int], Path], held: bool
) -> None:
    trained: list[list[RolloutState]] = []
    async with loop_of(server, engine=control, max_tokens=60, max_retries=8) as loop, plane(loop) as (manager, _):
        producing = asyncio.create_task(manager.produce_loop(2))
        for step in range(1, 5):
            async with manager.get_batch(2, step, timeout_s=HANG_S) as batch:
                trained += batch.groups
            await control.update_weights(weights(step), model_step=step, manager=manager)
            if held:
                await until(lambda: server.active >= 2)  # so that streams are interrupted
            await server.restart()
            assert server.step == 0
        async with manager.get_batch(2, 5, timeout_s=HANG_S) as batch:
            trained += batch.groups
    await producing
    assert wrong_spans(trained) == []
    assert {step for group in trained for state in group for step, _ in state.version_spans} > {0}


def _enough(server: EngineServer, streams: int) -> Callable[[], bool]:
    return lambda: sum(request.sent > 9 for request in server.received) == streams


async def test_g03_tokens_of_a_server_that_died_before_it_said_who_it_is_count(
    server: EngineServer, control: EngineControl, weights: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had answered just before, after it was loaded again; then a kill came between its tokens and its answer."""
    monkeypatch.setattr("forebay.agent_loop.monitor._FASTEST_START_S", HANG_S)
    most = 500
    async with loop_of(server, engine=control, max_tokens=most, max_retries=0) as loop:
        await control.update_weights(weights(1), model_step=1)
        await loop.weights_loaded(1)
        group = [
            RolloutState(message=[], task_name="math", group_id=1, prompt_ids=[7, 8], rollout_id=n) for n in (1, 2)
        ]
        server.silent = True
        generating = asyncio.create_task(loop.generate_group(group))
        for kills in (1, 2):
            await until(_enough(server, 2 * kills))
            await server.kill()
            await until(lambda: loop.outage.away)
            await server.start_again()
        members = await generating
    assert all(np.array_equal(np.asarray(state.logprobs), [-2.0] * most) for state in members)  # of step 1
    assert len(server.received) == 6
    left = [request.body["max_tokens"] for request in server.received]
    assert left[:2] == [most, most]
    assert all(after < before for before, after in zip(left, left[2:], strict=False))


async def test_g13_without_a_control_a_restart_is_an_error_that_says_what_to_do(
    server: EngineServer, weights: Callable[[int], Path]
) -> None:
    trained: list[list[RolloutState]] = []
    async with loop_of(server, max_tokens=60, max_retries=8) as loop, plane(loop) as (manager, buffer):
        producing = asyncio.create_task(manager.produce_loop(2))
        async with manager.get_batch(2, 1, timeout_s=HANG_S) as batch:
            trained += batch.groups
        for step in (1, 2):
            await manager.pause_produce()
            server.load(weights(step))
            await manager.continue_produce(step)
            await until(lambda: server.active >= 2)
            await server.restart()
            with pytest.raises(EngineRestarted, match="Push the weights again"):
                await producing
            assert (await closed_ledger(buffer)).get("in_flight", 0) == 0
            server.load(weights(step))
            await manager.continue_produce(step)
            producing = asyncio.create_task(manager.produce_loop(2))
            async with manager.get_batch(2, step + 1, timeout_s=HANG_S) as batch:
                trained += batch.groups
    await producing
    assert wrong_spans(trained) == []


async def test_at_step_0_a_restart_changes_nothing(server: EngineServer) -> None:
    async with loop_of(server, max_tokens=60, max_retries=8) as loop, plane(loop) as (manager, _):
        producing = asyncio.create_task(manager.produce_loop(2))
        await until(lambda: server.active >= 2)
        await server.restart()
        async with manager.get_batch(2, 1, timeout_s=HANG_S) as batch:
            assert wrong_spans(batch.groups) == []
    await producing


async def test_a_restarted_server_counts_with_trust_restarts(
    server: EngineServer, weights: Callable[[int], Path]
) -> None:
    async with loop_of(server, max_tokens=60, max_retries=8, trust_restarts=True) as loop, plane(loop) as (manager, _):
        await manager.continue_produce(1)
        server.load(weights(1))
        server.started_with = weights(1)
        producing = asyncio.create_task(manager.produce_loop(2))
        await until(lambda: server.active >= 2)
        await server.restart()
        async with manager.get_batch(2, 2, timeout_s=HANG_S) as batch:
            assert wrong_spans(batch.groups) == []
    await producing


async def test_a_restarted_server_that_reports_the_current_version_counts(
    server: EngineServer, weights: Callable[[int], Path]
) -> None:
    async with loop_of(server, max_tokens=60, max_retries=8) as loop, plane(loop) as (manager, _):
        server.load(weights(3))
        await manager.continue_produce(3)
        producing = asyncio.create_task(manager.produce_loop(2))
        await until(lambda: server.active >= 2)
        server.started_with, server.started_version = weights(3), "3"
        await server.restart()
        async with manager.get_batch(2, 4, timeout_s=HANG_S) as batch:
            assert wrong_spans(batch.groups) == []
    await producing


async def test_g13_a_server_that_does_not_identify_itself_does_not_count_after_a_lost_connection(
    weights: Callable[[int], Path],
) -> None:
    async with EngineServer(started_with=weights(0), kind="anonymous") as server:
        server.usual = Script(pause_s=0.0005)
        async with loop_of(server, max_tokens=40) as loop, plane(loop) as (manager, _):
            server.load(weights(1))
            await manager.continue_produce(1)
            producing = asyncio.create_task(manager.produce_loop(2))
            async with manager.get_batch(2, 2, timeout_s=HANG_S) as batch:
                assert wrong_spans(batch.groups) == []
            await until(lambda: server.active >= 2)
            await server.restart()
            with pytest.raises(EngineRestarted, match="does not say whether it restarted"):
                await producing


async def test_weights_of_an_unreachable_server_cannot_be_reported_as_loaded(server: EngineServer) -> None:
    await server.__aexit__(None, None, None)
    async with loop_of(server) as loop:
        with pytest.raises(EngineError, match="step 3 was reported as loaded, but the server is unreachable"):
            await loop.weights_loaded(3)
    await server.__aenter__()


@pytest.mark.parametrize("controlled", [True, False])
async def test_g13_a_new_run_uses_no_token_of_the_weights_of_an_earlier_run(
    server: EngineServer, control: EngineControl, weights: Callable[[int], Path], controlled: bool
) -> None:
    await CONTROLS[server.kind](server.root).update_weights(weights(3), model_step=3)  # by the earlier run
    async with loop_of(server, engine=control if controlled else None) as loop, plane(loop) as (manager, _):
        with pytest.raises(EngineRestarted, match=r"reports version 3, but step 0 is needed.*update_weights"):
            await manager.produce_loop(2)
        assert not server.received
        if controlled:
            await control.update_weights(weights(0), model_step=0, manager=manager)
        else:
            await server.restart()
        producing = asyncio.create_task(manager.produce_loop(2))
        async with manager.get_batch(2, 1, timeout_s=HANG_S) as batch:
            assert wrong_spans(batch.groups) == []
    await producing


async def test_a_control_that_knows_the_start_up_weights_updates_a_server_of_an_earlier_run(
    server: EngineServer, weights: Callable[[int], Path]
) -> None:
    await CONTROLS[server.kind](server.root).update_weights(weights(3), model_step=3)
    await CONTROLS[server.kind](server.root, weights=weights(0)).update_weights(weights(0), model_step=0)
    assert (server.step, server.version) == (0, "0")


async def test_g13_the_version_of_a_server_unreachable_at_step_0_is_checked_when_it_is_back(
    server: EngineServer, control: EngineControl, weights: Callable[[int], Path]
) -> None:
    await server.kill()
    async with loop_of(server, engine=control) as loop:
        await loop.weights_loaded(0)
        server.started_with, server.started_version = weights(3), "3"
        await server.start_again()
        with pytest.raises(EngineRestarted, match="reports version 3, but step 0 is needed"):
            await loop.generate_group([sample(0)])


@pytest.mark.parametrize(("version", "step"), [("default", 0), ("0", 0), ("3", 3), ("v3-final", 0)])
async def test_versions_that_name_no_other_step_are_accepted(
    server: EngineServer, control: EngineControl, version: str, step: int
) -> None:
    server.version = version
    async with loop_of(server, engine=control) as loop:
        await loop.weights_loaded(step)
        (state,) = await loop.generate_group([sample(0)])
    assert state.status is Status.COMPLETED


@pytest.mark.parametrize("version", ["default", "v3-final"])
async def test_g13_a_step_that_the_control_did_not_load_is_refused(server: EngineServer, version: str) -> None:
    server.version = version
    async with loop_of(server, engine=CONTROLS[server.kind](server.root)) as loop:
        with pytest.raises(EngineError, match=rf"{server.root} was not loaded .* of"):
            await loop.weights_loaded(3)
    async with loop_of(server, engine=CONTROLS[server.kind](server.root, trust_restarts=True)) as loop:
        await loop.weights_loaded(3)  # the user says that it has the current weights when it starts


@pytest.mark.parametrize("together", [True, False])
async def test_g13_several_servers_are_updated_together_or_none_of_their_tokens_count(
    weights: Callable[[int], Path], together: bool
) -> None:
    buffer = AsyncReplayBufferConfig().build()
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(EngineServer(started_with=weights(0))) for _ in range(2)]
        controls = [VLLMControl(server.root) for server in servers]
        tasks: list[ManagedTask] = []
        for server, control in zip(servers, controls, strict=True):
            loop = await stack.enter_async_context(loop_of(server, engine=control))
            strategy = AsyncProduceStrategy(buffer, over_sample_threshold=1.0, max_staleness=3, progress=NoProgress())
            name = f"task {len(tasks)}"
            tasks.append(ManagedTask(name=name, sampler=Sampler(PROMPTS), agent_loop=loop, strategy=strategy))
        manager = await stack.enter_async_context(DisaggregatedAgentLoopManager(tasks, buffer))
        producing = asyncio.create_task(manager.produce_loop(4))
        async with manager.get_batch(4, 1, timeout_s=HANG_S):
            pass
        if not together:
            await controls[0].update_weights(weights(1), model_step=1, manager=manager)
            with pytest.raises(EngineError, match=f"{servers[1].root} was not loaded by its control"):
                async with asyncio.timeout(HANG_S):
                    await producing
        await manager.pause_produce()
        for control in controls:
            await control.update_weights(weights(1), model_step=1)
        await manager.continue_produce(1)
        if not together:
            producing = asyncio.create_task(manager.produce_loop(4))
        for step in range(2, 6):  # tokens of step 0 are too old for the last of them
            async with manager.get_batch(4, step, timeout_s=HANG_S) as batch:
                assert wrong_spans(batch.groups) == []
        assert {model_step for group in batch.groups for state in group for model_step, _ in state.version_spans} == {1}
        await manager.shutdown()
        await producing


# --- an update waits for an unreachable server ----------------------------------------------------------


def at(server: EngineServer, moment: str, event: Callable[[], Awaitable[None]]) -> None:
    """Call a function once, when the server gets a request for this path and before it answers."""
    answer = server.control
    pending = True

    async def control(method: str, path: str, body: Any) -> tuple[int, bytes]:
        nonlocal pending
        if pending and path.split("?")[0] == moment:
            pending = False
            await event()
        return await answer(method, path, body)

    server.control = control  # type: ignore[method-assign]


HOLD = {"vllm": "/pause", "sglang": "/flush_cache"}
LOAD = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}
VERSION = {"vllm": "/weight_info", "sglang": "/model_info"}


@pytest.mark.parametrize("verify", [True, False])
async def test_an_update_waits_for_an_unreachable_server(
    server: EngineServer, weights: Callable[[int], Path], verify: bool, caplog: pytest.LogCaptureFixture
) -> None:
    control = CONTROLS[server.kind](server.root, verify=verify)
    trained: list[list[RolloutState]] = []
    async with loop_of(server, engine=control, max_tokens=60) as loop, plane(loop) as (manager, buffer):
        producing = asyncio.create_task(manager.produce_loop(2))
        for step in (1, 2):
            async with manager.get_batch(2, step, timeout_s=HANG_S) as batch:
                trained += batch.groups
            await until(lambda: server.active >= 2)
            await server.kill()
            caplog.clear()
            update = asyncio.create_task(control.update_weights(weights(step), model_step=step, manager=manager))
            await until(lambda: "engine_away" in caplog.text and str(manager.producer_state) == "paused")
            assert not update.done()
            await until(lambda: "update_weights waits" in (control.explain_wait() or ""))
            assert f"update_weights waits: {server.root} is unreachable" in await manager.explain_wait()
            await server.start_again()
            assert (await update).checked == (5 if verify else 0)
            assert (server.version, server.step, server.paused) == (str(step), step, False)
        async with manager.get_batch(2, 3, timeout_s=HANG_S) as batch:
            trained += batch.groups
        await manager.pause_produce()
        assert (await closed_ledger(buffer)).get("failed", 0) == 0
    await producing
    assert wrong_spans(trained) == []
    assert server.updates_while_busy == 0


@pytest.mark.parametrize("moment", [HOLD, LOAD, VERSION])
@pytest.mark.parametrize("verify", [True, False])
async def test_an_update_starts_over_if_the_server_restarts_meanwhile(
    server: EngineServer, weights: Callable[[int], Path], moment: dict[str, str], verify: bool
) -> None:
    control = CONTROLS[server.kind](server.root, verify=verify)
    await control.update_weights(weights(1), model_step=1)
    restarts: list[asyncio.Task[None]] = []

    async def restart() -> None:
        restarts.append(asyncio.create_task(server.restart()))
        await asyncio.Event().wait()  # until this connection is closed

    at(server, moment[server.kind], restart)
    await control.update_weights(weights(2), model_step=2)
    assert len(restarts) == 1
    assert (server.version, server.step, server.paused) == ("2", 2, False)


@pytest.mark.parametrize("moment", [HOLD, LOAD, VERSION])
async def test_a_reload_waits_for_a_server_that_restarts_meanwhile(
    server: EngineServer, control: EngineControl, weights: Callable[[int], Path], moment: dict[str, str]
) -> None:
    restarts: list[asyncio.Task[None]] = []

    async def restart() -> None:
        restarts.append(asyncio.create_task(server.restart()))
        await asyncio.Event().wait()  # until this connection is closed

    async with loop_of(server, engine=control, max_tokens=60) as loop, plane(loop) as (manager, _):
        await control.update_weights(weights(1), model_step=1)
        await manager.continue_produce(1)
        await server.restart()
        at(server, moment[server.kind], restart)
        producing = asyncio.create_task(manager.produce_loop(2))
        async with manager.get_batch(2, 2, timeout_s=HANG_S) as batch:
            assert wrong_spans(batch.groups) == []
            assert {state.num_tries for group in batch.groups for state in group} == {0}
        assert len(restarts) == 1
    await producing


async def test_a_server_that_dies_in_a_pause_is_not_reported_as_busy(weights: Callable[[int], Path]) -> None:
    async def die() -> None:
        dying.append(asyncio.create_task(server.kill()))
        await asyncio.Event().wait()  # until this connection is closed

    dying: list[asyncio.Task[None]] = []
    async with EngineServer(started_with=weights(0)) as server:
        at(server, "/pause", die)
        with pytest.raises(EngineError, match="POST /pause got no answer"):
            await VLLMControl(server.root).idle()


async def test_g11_explain_wait_shows_an_update_that_waits_for_a_busy_server(
    server: EngineServer, control: EngineControl, weights: Callable[[int], Path]
) -> None:
    async with loop_of(server, engine=control, max_tokens=100_000) as loop, plane(loop) as (manager, _):
        producing = asyncio.create_task(manager.produce_loop(2))
        await until(lambda: server.active >= 2)
        server.hold_tails = True
        update = asyncio.create_task(control.update_weights(weights(1), model_step=1, manager=manager))
        await until(lambda: any(HOLD[server.kind] in path for path in server.asked))
        await until(lambda: server.active == 0)
        assert f"{server.root} still runs requests (idle_timeout_s is 30), for " in await manager.explain_wait()
        server.hold_tails = False
        await update
        assert control.explain_wait() is None
    await producing


@pytest.mark.parametrize("verify", [True, False])
async def test_g13_an_update_split_between_two_processes_starts_over(
    server: EngineServer, weights: Callable[[int], Path], verify: bool
) -> None:
    """No request fails: the server restarts between two of them."""
    control = CONTROLS[server.kind](server.root, verify=verify)
    await control.update_weights(weights(1), model_step=1)

    async def become_another() -> None:
        server.start = (server.start or 0) + 1
        server._start_up()

    at(server, {"vllm": "/update_weight_version", "sglang": "/model_info"}[server.kind], become_another)
    await control.update_weights(weights(2), model_step=2)
    assert (server.version, server.step) == ("2", 2)


async def test_g13_an_update_of_a_restarted_server_is_compared_with_its_start_up_weights(
    server: EngineServer, control: EngineControl, weights: Callable[[int], Path]
) -> None:
    """Tensors that it did not take differ from the weights before the restart, too."""
    await control.update_weights(weights(1), model_step=1)
    await server.restart()
    server.partial_updates = 1
    with pytest.raises(EngineError, match="only part of the weights"):
        await control.update_weights(weights(2), model_step=2)
    assert (await control.update_weights(weights(2), model_step=2)).checked == 5
    assert server.step == 2


async def test_an_update_raises_if_the_server_stays_unreachable_and_can_be_repeated(
    server: EngineServer, weights: Callable[[int], Path]
) -> None:
    control = CONTROLS[server.kind](server.root, down_timeout_s=0.1)
    async with loop_of(server, engine=control, max_tokens=60) as loop, plane(loop) as (manager, buffer):
        producing = asyncio.create_task(manager.produce_loop(2))
        await until(lambda: server.active >= 2)
        await server.kill()
        for _ in range(2):
            with pytest.raises(EngineUnavailable, match=r"weights of step 1 were not loaded.*down_timeout_s is 0.1"):
                await control.update_weights(weights(1), model_step=1, manager=manager)
            assert str(manager.producer_state) == "paused"
            assert (await closed_ledger(buffer)).get("in_flight", 0) == 0
        await server.start_again()
        await control.update_weights(weights(1), model_step=1, manager=manager)
        async with manager.get_batch(2, 1, timeout_s=HANG_S) as batch:
            assert wrong_spans(batch.groups) == []
    await producing


# --- requests and reported versions ---------------------------------------------------------------------


def sample(rollout_id: int, **fields: Any) -> RolloutState:
    bare: dict[str, Any] = {"message": [], "prompt_ids": [1, 2], "rollout_id": rollout_id, "group_id": 0}
    return RolloutState(**(bare | fields))


async def test_members_of_a_group_get_different_seeds(server: EngineServer) -> None:
    async with loop_of(server) as loop:
        group = [sample(20 + index, sample_params=SampleParams(seed=7, max_tokens=2)) for index in range(4)]
        await loop.generate_group(group)
    assert sorted(request.body["seed"] for request in server.received) == [27, 28, 29, 30]


@pytest.mark.parametrize("token", [-1, 544, 100_000])
async def test_ids_outside_the_vocabulary_never_reach_a_server(server: EngineServer, token: int) -> None:
    async with loop_of(server, vocabulary=544) as loop:
        bad, good = await loop.generate_group([sample(0, prompt_ids=[1, token]), sample(1, prompt_ids=[0, 543])])
    assert (bad.status, good.status) == (Status.FAILED, Status.COMPLETED)
    assert f"include {token}; expected ids from 0 to 543" in str(bad.error_msg)
    assert [request.body["prompt"] for request in server.received] == [[0, 543]]


REPORTED = (
    b'{"choices": [{"text": "a", "token_ids": [5, 6, 7], "finish_reason": "stop", "logprobs": {"token_logprobs": '
    b"[-1, -1, -1]}%s}]%s}"
)
SPANS = b', "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]'
UNKNOWN = b', "weight_versions": [{"version": "default", "start": 0, "end": 3}]'


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (REPORTED % (SPANS, b""), ((3, 1), (4, 2))),
        (REPORTED % (b"", b', "metadata": {%s}' % SPANS[2:]), ((3, 1), (4, 2))),
        (REPORTED % (UNKNOWN, b""), ()),
        (REPORTED % (b"", b""), ()),
        (REPORTED % (SPANS.replace(b'"end": 3', b'"end": 9'), b""), ()),
        (REPORTED % (SPANS.replace(b'"start": 1', b'"start": 2'), b""), ()),
    ],
)
async def test_g13_versions_that_the_server_reports_are_stored(
    server: EngineServer, body: bytes, expected: tuple[tuple[int, int], ...]
) -> None:
    server.usual = Script(plain=True, body=body)
    async with loop_of(server, stream=False) as loop:
        (state,) = await loop.generate_group([sample(0)])
    assert server.received[0].body["stream"] is False
    assert state.version_spans == expected


async def test_versions_that_the_server_reports_follow_the_earlier_ones(server: EngineServer) -> None:
    server.usual = Script(plain=True, body=REPORTED % (SPANS, b""))
    early = sample(0, response_ids=[9, 9], logprobs=[-1.0, -1.0], version_spans=((3, 2),), status=Status.ABORTED)
    async with loop_of(server, stream=False) as loop:
        early.status = Status.INIT
        (state,) = await loop.generate_group([early], enable_partial_rollout=True)
    assert state.version_spans == ((3, 3), (4, 2))


async def test_a_control_ignores_proxies_of_the_environment(
    server: EngineServer, control: EngineControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert await control.version() == "default"
    assert isinstance(control._client(), httpx.AsyncClient)


# --- holds, ranks and doubts ----------------------------------------------------------------------------


async def test_a_cancelled_idle_does_not_leave_the_server_paused(weights: Callable[[int], Path]) -> None:
    async with EngineServer(started_with=weights(0), kind="vllm") as server:
        server.tails = 1
        waiting = asyncio.create_task(VLLMControl(server.root).idle())
        await until(lambda: any(path.startswith("POST /pause") for path in server.asked))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        server.tails = 0
        assert server.asked[-1] == "POST /resume"


async def test_idle_does_not_resume_a_server_that_an_update_holds(weights: Callable[[int], Path]) -> None:
    async with EngineServer(started_with=weights(0), kind="vllm") as server:
        control = VLLMControl(server.root)
        server.tails = 1
        idle = asyncio.create_task(control.idle())
        await until(lambda: any(path.startswith("POST /pause") for path in server.asked))
        control._held = True
        server.tails = 0
        await idle
        assert "POST /resume" not in server.asked


OLD = {"model.norm.weight": "a", "model.layers.0.self_attn.qkv_proj.weight": "b"}
NEW = {name: digest + "!" for name, digest in OLD.items()}


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({"tp0": OLD, "tp1": OLD}, {"tp0": NEW, "tp1": OLD}, "rank 'tp1' took none"),
        ({"tp0": OLD, "tp1": OLD}, {"tp0": NEW, "tp1": {**NEW, "model.norm.weight": "c"}}, "ranks had the same"),
        ({"tp0": OLD}, {"tp0": {**NEW, "model.norm.weight": "a"}}, "1 of 2 tensors did not change"),
        ({"tp0": {"other": "x"}}, {"tp0": {"other": "y"}}, "names its tensors differently"),
    ],
)
def test_an_update_that_some_ranks_did_not_take_is_an_error(before: Any, after: Any, words: str) -> None:
    names = ("model.norm.weight", "model.layers.0.self_attn.q_proj.weight")
    old = {name: Tensor("F32", (1,), b"old") for name in names}
    new = {name: Tensor("F32", (1,), b"new") for name in names}
    with pytest.raises(EngineError, match=words):
        check_update(old, new, before, after, "http://here")
    assert check_update(old, new, {"tp0": OLD}, {"tp0": NEW}, "http://here") == (2, 0)


async def test_only_the_step_that_the_control_loaded_can_be_reported(
    server: EngineServer, control: EngineControl, weights: Callable[[int], Path]
) -> None:
    await control.update_weights(weights(7), model_step=7)
    async with loop_of(server, engine=control) as loop:
        await loop.weights_loaded(7)
        with pytest.raises(EngineError, match="the weights of step 7 by its control, but step 8 was reported"):
            await loop.weights_loaded(8)


async def test_a_server_that_does_not_answer_is_not_idle() -> None:
    asked = 0

    async def get(path: str) -> bytes | None:
        nonlocal asked
        asked += 1
        if asked < 4:
            raise Unreachable("no answer") from httpx.ConnectTimeout("slow network")
        raise Unreachable("gone") from ConnectionRefusedError()

    await until_idle(get, "http://here")
    assert asked == 4
