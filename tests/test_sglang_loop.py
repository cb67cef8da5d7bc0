"""`SGLangGenerateLoop` against a real HTTP server that speaks SGLang's `/generate`.

Each logprob names the weights that generated its token, so that every version span can be compared with the truth.
`make test-engines ENGINE=sglang` tests the same with a live SGLang.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay import EngineError, InvalidConfig, OpenAIAgentLoop, RolloutState, SampleParams, SGLangGenerateLoop, Status
from forebay.agent_loop.outage import Outage
from forebay.engines import EngineControls, SGLangControl
from tests.engine_server import GenerateServer, save_weights, wrong_spans
from tests.openai_server import Script
from tests.processes import HANG_S
from tests.support import closed_ledger
from tests.test_engines import plane, until

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


@pytest.fixture
async def server(weights: Weights) -> AsyncIterator[GenerateServer]:
    async with GenerateServer(started_with=weights(0)) as running:
        running.usual = Script(pause_s=0.0005)
        yield running


def loop_of(*servers: GenerateServer, max_tokens: int = 20, **settings: Any) -> SGLangGenerateLoop:
    params = SampleParams(max_tokens=max_tokens)
    roots = [server.root for server in servers]
    return SGLangGenerateLoop(roots, sample_params=params, **({"backoff_s": 0.001} | settings))


def sample(**fields: Any) -> RolloutState:
    known: dict[str, Any] = {"message": [], "task_name": "t", "group_id": 1, "rollout_id": 1, "prompt_ids": [7, 8]}
    return RolloutState(**(known | fields))


def true(state: RolloutState) -> bool:
    """Whether every version is that of the weights that generated the token, and nothing is missing."""
    tokens = 0 if state.response_ids is None else len(state.response_ids)
    assert np.array_equal(np.asarray(state.response_ids), [(31 * 7 + 2 + n) % 1000 for n in range(tokens)])
    return not wrong_spans([[state]]) and sum(run for _, run in state.version_spans) == tokens


# --- the wire -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 50])
@pytest.mark.parametrize("form", ["whole", "incremental", "not streamed"])
async def test_g13_an_answer_is_the_same_in_every_form(
    server: GenerateServer, form: str, tokens_per_chunk: int
) -> None:
    server.usual = Script(tokens_per_chunk=tokens_per_chunk, plain=form == "not streamed")
    server.incremental = form == "incremental"
    async with loop_of(server, stream=form != "not streamed") as loop:
        state = await loop.generate(sample(), enable_partial_rollout=False)
    assert state.status is Status.COMPLETED
    assert state.finish_reason == "length"
    assert state.version_spans == ((0, 20),)
    assert true(state)
    assert state.response == "".join(f"<{token}>" for token in np.asarray(state.response_ids))


async def test_a_request_has_the_names_of_sglang(server: GenerateServer) -> None:
    params = SampleParams(max_tokens=9, min_tokens=2, temperature=0.5, seed=3, stop_token_ids=(999,))
    async with loop_of(server, extra_body={"return_hidden_states": False}) as loop:
        await loop.generate(sample(sample_params=params), enable_partial_rollout=False)
    assert server.received[0].body == {
        "input_ids": [7, 8],
        "sampling_params": {
            "max_new_tokens": 9,
            "min_new_tokens": 2,
            "temperature": 0.5,
            "sampling_seed": 4,
            "stop_token_ids": [999],
        },
        "return_logprob": True,
        "return_hidden_states": False,
        "stream": True,
    }


@pytest.mark.parametrize("incremental", [True, False])
async def test_an_abort_by_the_server_keeps_the_tokens(server: GenerateServer, incremental: bool) -> None:
    server.incremental = incremental
    server.scripts.append(Script(end_after=5))
    async with loop_of(server) as loop:
        state = await loop.generate(sample(), enable_partial_rollout=True)
        assert state.status is Status.ABORTED
        assert state.version_spans == ((0, 5),)
        state = await loop.generate(state, enable_partial_rollout=True)
    assert state.status is Status.COMPLETED
    assert state.version_spans == ((0, 20),)


@pytest.mark.parametrize("code", [400, 404])
async def test_an_error_before_the_first_token_is_final(server: GenerateServer, code: int) -> None:
    server.usual = Script(report_after=0, report_code=code)
    async with loop_of(server) as loop:
        with pytest.raises(EngineError, match=f"error {code} in the answer: the engine stumbled"):
            await loop.generate(sample(), enable_partial_rollout=False)
    assert len(server.received) == 1


async def test_an_error_in_the_middle_costs_no_token(server: GenerateServer) -> None:
    server.scripts.append(Script(report_after=6, report_code=500))
    async with loop_of(server) as loop:
        state = await loop.generate(sample(), enable_partial_rollout=False)
    assert true(state)
    assert server.received[1].body["sampling_params"]["max_new_tokens"] == 14


def _event(**meta: Any) -> bytes:
    return json.dumps({"text": "", "output_ids": [1, 2], "meta_info": {"completion_tokens": 2} | meta}).encode()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"choices": []}', "no output_ids or no meta_info"),
        (_event(), "0 output_token_logprobs"),
        (_event(output_token_logprobs=[[-1.0, 1, None]]), "1 output_token_logprobs"),
        (_event(output_token_logprobs=[[-1.0, 1, None], [-1.0, 3, None]]), "other tokens"),
        (_event(output_token_logprobs=[[-1.0, 1, None], [None, 2, None]]), "one for each token"),
        (_event(completion_tokens=7, output_token_logprobs=[[-1.0, 1, None], [-1.0, 2, None]]), "2 output_ids"),
        (_event(completion_tokens=-1), "2 output_ids"),
        (_event(output_token_logprobs=[[-1e99, 1, None], [-1.0, 2, None]]), "not one of /generate"),
    ],
)
async def test_a_wrong_answer_is_an_error_that_says_why(server: GenerateServer, body: bytes, words: str) -> None:
    server.usual = Script(plain=True, body=body)
    async with loop_of(server) as loop:
        with pytest.raises(EngineError, match=words):
            await loop.generate(sample(), enable_partial_rollout=False)


# --- versions -------------------------------------------------------------------------------------------


async def test_g13_weights_that_change_in_the_middle_of_an_answer_are_in_its_spans(
    server: GenerateServer, weights: Weights
) -> None:
    control = SGLangControl(server.root, while_running=True)
    server.usual = Script(hold_after=10)
    async with loop_of(server, engine=control) as loop:
        generating = asyncio.create_task(loop.generate(sample(), enable_partial_rollout=False))
        await server.until(lambda server: any(request.sent == 10 for request in server.received))
        await control.update_weights(weights(1), model_step=1)
        server.go.set()
        state = await generating
    assert state.version_spans == ((0, 10), (1, 10))
    assert true(state)
    assert len(server.received) == 1, "the request was not interrupted"


async def test_g13_tokens_of_a_lost_connection_count_if_the_weights_did_not_change(server: GenerateServer) -> None:
    server.scripts.append(Script(cut_after=7))
    async with loop_of(server) as loop:
        state = await loop.generate(sample(), enable_partial_rollout=False)
    assert true(state)
    assert server.received[1].body["sampling_params"]["max_new_tokens"] == 13


async def test_g13_tokens_of_a_lost_connection_do_not_count_if_the_weights_changed(
    server: GenerateServer, weights: Weights
) -> None:
    def change(position: int) -> None:
        if position == 5 and server.version == "default":
            server.load(weights(1))
            server.version = "1"

    server.between = change
    server.scripts.append(Script(cut_after=7))
    async with loop_of(server) as loop:
        state = await loop.generate(sample(), enable_partial_rollout=False)
    assert state.version_spans == ((1, 20),)
    assert true(state)
    assert server.received[1].body["sampling_params"]["max_new_tokens"] == 20


async def test_g13_a_pause_keeps_tokens_with_their_versions(server: GenerateServer) -> None:
    server.usual = Script(hold_after=10)
    async with loop_of(server) as loop:
        generating = asyncio.create_task(loop.generate(sample(), enable_partial_rollout=True))
        await server.until(lambda server: any(request.sent == 10 for request in server.received))
        await asyncio.sleep(0.05)  # for the loop to read them; fewer would be right, too
        await loop.pause()
        state = await generating
        assert state.status is Status.ABORTED
        assert true(state)
        await loop.resume()
        server.usual = Script()
        state = await loop.generate(state, enable_partial_rollout=True)
    assert state.status is Status.COMPLETED
    assert true(state)


async def test_a_version_that_is_no_number_is_that_of_the_start(server: GenerateServer) -> None:
    async with loop_of(server, start_step=4) as loop:
        state = await loop.generate(sample(), enable_partial_rollout=False)
    assert state.version_spans == ((4, 20),)


# --- a whole run ----------------------------------------------------------------------------------------


async def test_g13_updates_while_requests_run_interrupt_nothing_and_every_version_is_true(weights: Weights) -> None:
    trained: list[list[RolloutState]] = []
    async with GenerateServer(started_with=weights(0)) as one, GenerateServer(started_with=weights(0)) as other:
        one.usual = other.usual = Script(pause_s=0.001)
        controls = EngineControls([SGLangControl(each.root, while_running=True) for each in (one, other)], grace_s=0.1)
        async with loop_of(one, other, max_tokens=60, engine=controls) as loop, plane(loop) as (manager, buffer):
            producing = asyncio.create_task(manager.produce_loop(2))
            for step in range(1, 9):
                async with manager.get_batch(2, step, timeout_s=HANG_S) as batch:
                    trained += batch.groups
                await until(lambda: one.active + other.active > 0)
                if step == 4:
                    await one.kill()
                if step == 6:
                    await one.start_again()
                await controls.update_weights(weights(step), model_step=step, manager=manager)
            await manager.shutdown()
            await producing
            assert (await closed_ledger(buffer)).get("failed", 0) == 0
    assert wrong_spans(trained) == []
    assert any(len(state.version_spans) > 1 for group in trained for state in group)
    assert all(state.num_tries <= 1 for group in trained for state in group)


async def test_g13_a_restarted_server_gets_its_weights_again(server: GenerateServer, weights: Weights) -> None:
    control = SGLangControl(server.root, while_running=True)
    async with loop_of(server, max_tokens=200, engine=control) as loop:
        await control.update_weights(weights(1), model_step=1)
        generating = asyncio.create_task(loop.generate_group([sample(), sample(rollout_id=2)]))
        await until(lambda: sum(request.sent > 20 for request in server.received) == 2)
        await server.restart()
        states = await generating
    assert all(state.version_spans == ((1, 200),) and true(state) for state in states)
    assert server.step == 1


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: SGLangGenerateLoop("http://a:1/v1"), "without /v1"),
        (lambda: SGLangGenerateLoop("http://a:1", engine=SGLangControl("http://a:1")), "expected True"),
        (
            lambda: OpenAIAgentLoop("http://a:1/v1", "m", engine=SGLangControl("http://a:1", while_running=True)),
            "expected False",
        ),
        (lambda: SGLangGenerateLoop("http://a:1", extra_body={"sampling_params": {}}), "sets itself"),
    ],
)
def test_bad_settings_are_refused(build: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        build()
