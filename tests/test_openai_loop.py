"""The loop for completion servers, against a real server on loopback: what it sends, keeps, retries and refuses."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from forebay import OpenAIAgentLoop, RolloutState, SampleParams, Status
from forebay.agent_loop.completion import EventReader, Interrupted, WrongAnswer, read_piece
from forebay.agent_loop.http import _delay_s
from forebay.engines import VLLMControl
from forebay.errors import EngineError, EngineUnavailable, InvalidConfig, InvalidInput
from tests.openai_server import CompletionServer, Script, answer_to, logprob_of, text_of
from tests.processes import HANG_S
from tests.support import turns

PROMPT = [11, 7, 503]
BUDGET = 12
ANSWER = answer_to(PROMPT, BUDGET)


@pytest.fixture
async def server() -> AsyncIterator[CompletionServer]:
    async with CompletionServer() as server:
        yield server


@pytest.fixture
async def loop(server: CompletionServer) -> AsyncIterator[OpenAIAgentLoop]:
    async with loop_for(server) as loop:
        yield loop


def loop_for(server: CompletionServer, **settings: Any) -> OpenAIAgentLoop:
    defaults: dict[str, Any] = {"sample_params": SampleParams(max_tokens=BUDGET), "backoff_s": 0.001}
    return OpenAIAgentLoop(server.url, "policy", **(defaults | settings))


def sample(rollout_id: int = 0, **fields: Any) -> RolloutState:
    prompt: dict[str, Any] = {"message": [], "rollout_id": rollout_id, "group_id": 0, "prompt_ids": PROMPT}
    return RolloutState(**(prompt | fields))


def begun(tokens: int, *, arrays: bool = False, **fields: Any) -> RolloutState:
    """A sample that was aborted after n tokens."""
    ids = ANSWER[:tokens]
    columns: dict[str, Any] = {"response_ids": ids, "logprobs": [logprob_of(token) for token in ids]}
    if arrays:
        columns = {"response_ids": np.array(ids), "logprobs": np.array(columns["logprobs"], dtype=np.float32)}
        for column in columns.values():
            column.setflags(write=False)
    text = "".join(map(text_of, ids))
    return sample(**({"status": Status.ABORTED, "finish_reason": "abort", "response": text} | columns | fields))


def holds(state: RolloutState, ids: Sequence[int]) -> bool:
    """Whether the response is exactly these tokens, with their logprobs and text."""
    assert state.response_ids is not None
    assert state.logprobs is not None
    return (
        list(state.response_ids) == list(ids)
        and list(state.logprobs) == [logprob_of(token) for token in ids]
        and state.response == "".join(map(text_of, ids))
    )


async def answered(loop: OpenAIAgentLoop, state: RolloutState, *, partial: bool = False) -> RolloutState:
    async with asyncio.timeout(HANG_S):
        return await loop.generate(state, enable_partial_rollout=partial)


async def until_away(loop: OpenAIAgentLoop) -> None:
    while loop.outage.describe() is None:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def delivered() -> None:
    """Let the loop read what the server has sent."""
    await asyncio.sleep(0.01)
    await turns(20)


# --- requests and answers -----------------------------------------------------------------------------


async def test_a_prompt_is_answered_with_ids_logprobs_and_text(loop: OpenAIAgentLoop, server: CompletionServer) -> None:
    state = sample()
    assert await answered(loop, state) is state
    assert holds(state, ANSWER)
    assert (state.status, state.finish_reason) == (Status.COMPLETED, "length")
    assert isinstance(state.response_ids, np.ndarray)
    assert isinstance(state.logprobs, np.ndarray)
    assert (str(state.response_ids.dtype), str(state.logprobs.dtype)) == ("int64", "float32")
    assert state.tokens == PROMPT
    assert state.tokens is not PROMPT
    assert state.version_spans == ()
    assert state.response_mask is None


async def test_the_request_has_the_required_fields_and_omits_unset_ones(server: CompletionServer) -> None:
    params = SampleParams(
        max_tokens=BUDGET,
        temperature=0.0,
        top_k=5,
        min_p=0.1,
        presence_penalty=0.0,
        frequency_penalty=-0.5,
        stop=("END",),
        stop_token_ids=(1001,),
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
    )
    async with loop_for(server, sample_params=params, extra_body={"guided_regex": "[0-9]+", "logprobs": 2}) as loop:
        await answered(loop, sample(sample_params=SampleParams(top_k=7, seed=3)))
    assert server.received[0].body == {
        "model": "policy",
        "prompt": PROMPT,
        "stream": True,
        "return_token_ids": True,
        "logprobs": 2,
        "guided_regex": "[0-9]+",
        "max_tokens": BUDGET,
        "temperature": 0.0,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.0,
        "frequency_penalty": -0.5,
        "seed": 3,
        "stop": ["END"],
        "stop_token_ids": [1001],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }


async def test_none_in_extra_body_removes_a_field(server: CompletionServer) -> None:
    async with loop_for(server, extra_body={"return_token_ids": None}) as loop:
        await answered(loop, sample())
    assert "return_token_ids" not in server.received[0].body


async def test_a_stop_token_ends_the_answer(loop: OpenAIAgentLoop) -> None:
    state = await answered(loop, sample(sample_params=SampleParams(stop_token_ids=(ANSWER[4],))))
    assert holds(state, ANSWER[:5])
    assert (state.status, state.finish_reason) == (Status.COMPLETED, "stop")


async def test_without_max_tokens_the_server_chooses(server: CompletionServer) -> None:
    async with loop_for(server, sample_params=None) as loop:
        state = await answered(loop, sample())
    assert "max_tokens" not in server.received[0].body
    assert holds(state, answer_to(PROMPT, 16))


@pytest.mark.parametrize(
    "script",
    [
        Script(plain=True),
        Script(plain=True, ids="logprobs"),
        Script(ids="logprobs"),
        Script(tokens_per_chunk=5),
        Script(noise=True),
        Script(bytes_per_chunk=7),
        Script(pause_s=0.001),
    ],
)
async def test_every_valid_form_of_an_answer_is_read(server: CompletionServer, script: Script) -> None:
    server.usual = script
    async with loop_for(server) as loop:
        assert holds(await answered(loop, sample()), ANSWER)
    assert len(server.received) == 1


async def test_a_slow_server_is_waited_for_as_long_as_it_is_not_silent(server: CompletionServer) -> None:
    server.usual = Script(pause_s=0.1)
    async with loop_for(server, read_timeout_s=1, max_retries=0) as loop:
        assert holds(await answered(loop, sample()), ANSWER)  # takes 1.2 s


async def test_connections_are_reused(loop: OpenAIAgentLoop, server: CompletionServer) -> None:
    for _ in range(5):
        await answered(loop, sample())
    assert (len(server.received), server.connections) == (5, 1)


async def test_prompts_may_be_arrays_and_are_not_changed(loop: OpenAIAgentLoop, server: CompletionServer) -> None:
    prompt = np.array(PROMPT, dtype=np.int32)
    prompt.setflags(write=False)
    state = await answered(loop, sample(prompt_ids=prompt))
    assert holds(state, ANSWER)
    assert server.received[0].body["prompt"] == PROMPT
    assert isinstance(state.tokens, np.ndarray)
    assert state.prompt_ids is prompt


@pytest.mark.parametrize("prompt_ids", [None, [], np.array([], dtype=np.int64)])
async def test_a_sample_without_prompt_ids_is_refused(loop: OpenAIAgentLoop, prompt_ids: Any) -> None:
    with pytest.raises(InvalidInput, match="give the sampler a `tokenize`"):
        await answered(loop, sample(prompt_ids=prompt_ids))


async def test_a_field_that_cannot_be_sent_is_refused_and_not_dropped(loop: OpenAIAgentLoop) -> None:
    with pytest.raises(InvalidInput, match=r"mm_info \(image\)"):
        await answered(loop, sample(mm_info={"image": b"..."}))
    with pytest.raises(InvalidInput, match="prompt_ids of rollout 0 of group 0 has an item that is not an integer"):
        await answered(loop, sample(prompt_ids=[1.5]))


@pytest.mark.parametrize(
    ("reason", "status"), [("abort", Status.ABORTED), ("stop", Status.COMPLETED), ("weird", Status.FAILED)]
)
async def test_the_finish_reason_becomes_the_status(server: CompletionServer, reason: str, status: Status) -> None:
    server.usual = Script(finish_reason=reason)
    async with loop_for(server) as loop:
        state = await answered(loop, sample(error_msg="of an earlier try"))
    assert (state.status, state.finish_reason) == (status, reason)
    assert holds(state, ANSWER)
    if status is Status.FAILED:
        assert state.error_msg == "the server ended with finish_reason 'weird'"
    if status is Status.COMPLETED:
        assert state.error_msg is None


# --- continuing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize("there", range(BUDGET + 1))
async def test_an_answer_interrupted_at_any_token_and_continued_equals_an_uninterrupted_one(
    loop: OpenAIAgentLoop, server: CompletionServer, there: int, arrays: bool
) -> None:
    state = begun(there, arrays=arrays, version_spans=((3, there),) if there else ())
    await answered(loop, state, partial=True)
    assert holds(state, ANSWER)
    assert (state.status, state.finish_reason) == (Status.COMPLETED, "length")
    assert isinstance(state.response_ids, np.ndarray if arrays else list), "what goes in comes out"
    assert isinstance(state.logprobs, np.ndarray if arrays else list)
    assert state.version_spans == (((3, there),) if there else ())
    if there == BUDGET:
        assert server.received == [], "nothing is left to ask for"
    else:
        (request,) = server.received
        assert request.body["prompt"] == PROMPT + ANSWER[:there] == state.tokens
        assert request.body["max_tokens"] == BUDGET - there


@pytest.mark.parametrize("arrays", [False, True])
async def test_existing_columns_are_never_changed_in_place(loop: OpenAIAgentLoop, arrays: bool) -> None:
    state = begun(5, arrays=arrays)
    ids, logprobs = state.response_ids, state.logprobs
    await answered(loop, state, partial=True)
    assert ids is not None
    assert logprobs is not None
    assert list(ids) == ANSWER[:5]
    assert len(logprobs) == 5


@pytest.mark.parametrize("mask", [[0, 1, 1], np.array([0, 1, 1], dtype=np.int8)])
async def test_a_mask_is_extended_by_ones(loop: OpenAIAgentLoop, mask: Any) -> None:
    state = await answered(loop, begun(3, response_mask=mask), partial=True)
    assert state.response_mask is not None
    assert list(state.response_mask) == [0, *[1] * (BUDGET - 1)]
    assert type(state.response_mask) is type(mask)
    assert getattr(state.response_mask, "dtype", None) == getattr(mask, "dtype", None)
    assert len(mask) == 3


async def test_existing_columns_of_other_types_lose_no_precision(loop: OpenAIAgentLoop) -> None:
    ids, logprobs = np.array(ANSWER[:2], dtype=np.uint16), np.array([-0.1, -0.2])
    state = await answered(loop, begun(2, response_ids=ids, logprobs=logprobs), partial=True)
    assert isinstance(state.response_ids, np.ndarray)
    assert isinstance(state.logprobs, np.ndarray)
    assert state.response_ids.dtype == np.int64
    assert state.logprobs[:2].tolist() == [-0.1, -0.2]


async def test_min_tokens_shrinks_with_the_budget(loop: OpenAIAgentLoop, server: CompletionServer) -> None:
    for there in (3, 9):
        await answered(loop, begun(there, sample_params=SampleParams(min_tokens=8)), partial=True)
    assert [request.body["min_tokens"] for request in server.received] == [5, 0]


async def test_a_response_that_ends_in_a_stop_token_is_complete(
    loop: OpenAIAgentLoop, server: CompletionServer
) -> None:
    state = begun(5, sample_params=SampleParams(stop_token_ids=(ANSWER[4],)))
    await answered(loop, state, partial=True)
    assert (state.status, state.finish_reason) == (Status.COMPLETED, "stop")
    assert holds(state, ANSWER[:5])
    assert server.received == []


@pytest.mark.parametrize("mask", [[1] * 4 + [0], np.array([1] * 4 + [0])], ids=["list", "array"])
async def test_a_stop_token_of_a_tool_does_not_end_the_answer(loop: OpenAIAgentLoop, mask: Any) -> None:
    """Chat templates close the turn of a tool with the token that closes the turns of the model."""
    state = begun(5, response_mask=mask, sample_params=SampleParams(stop_token_ids=(ANSWER[4],)))
    await answered(loop, state)
    assert (state.status, state.finish_reason) == (Status.COMPLETED, "length")
    assert holds(state, ANSWER)
    assert list(state.response_mask if state.response_mask is not None else ()) == [1] * 4 + [0] + [1] * (BUDGET - 5)


async def test_without_partial_rollout_a_sample_starts_from_its_prompt(
    loop: OpenAIAgentLoop, server: CompletionServer
) -> None:
    state = begun(5, version_spans=((3, 5),), response_mask=[1] * 5, reward={"score": 1.0})
    assert await loop.generate_group([state]) == [state]
    assert holds(state, ANSWER)
    assert (state.version_spans, state.response_mask, state.reward) == ((), None, None)
    assert server.received[0].body["prompt"] == PROMPT


async def test_a_response_without_the_beginning_of_its_text_has_no_text(loop: OpenAIAgentLoop) -> None:
    state = await answered(loop, begun(5, response=None), partial=True)
    assert state.response is None
    assert list(state.response_ids or ()) == ANSWER


@pytest.mark.parametrize(
    "columns", [{"logprobs": None}, {"logprobs": [-1.0]}, {"response_mask": [1]}, {"logprobs": np.zeros(4)}]
)
async def test_misaligned_columns_cannot_be_continued(loop: OpenAIAgentLoop, columns: Any) -> None:
    with pytest.raises(InvalidInput, match=r"has 3 response_ids but [014] entries in"):
        await answered(loop, begun(3, **columns), partial=True)


# --- pausing and cancelling ---------------------------------------------------------------------------


async def test_a_pause_keeps_the_tokens_and_the_server_sees_the_disconnect(
    loop: OpenAIAgentLoop, server: CompletionServer
) -> None:
    server.usual = Script(hold_after=5)
    state = sample()
    generating = asyncio.create_task(answered(loop, state))
    await server.until(lambda seen: bool(seen.received) and seen.received[0].sent == 5)
    await delivered()
    await loop.pause()
    await generating
    assert (state.status, state.finish_reason) == (Status.ABORTED, "abort")
    assert holds(state, ANSWER[:5])
    await server.until(lambda seen: seen.aborted == 1 and seen.active == 0)


async def test_a_paused_answer_is_continued_after_resume(loop: OpenAIAgentLoop, server: CompletionServer) -> None:
    server.scripts.append(Script(hold_after=5))
    state = sample()
    generating = asyncio.create_task(answered(loop, state))
    await server.until(lambda seen: bool(seen.received) and seen.received[0].sent == 5)
    await delivered()
    await loop.pause()
    await generating
    await loop.resume()
    await answered(loop, state, partial=True)
    assert holds(state, ANSWER)
    assert state.status is Status.COMPLETED


async def test_members_in_a_pause_are_returned_unchanged(loop: OpenAIAgentLoop, server: CompletionServer) -> None:
    await loop.pause()
    group = [begun(5), sample(1), sample(2, status=Status.COMPLETED, response="kept")]
    await loop.generate_group(group)
    assert [state.status for state in group] == [Status.ABORTED, Status.ABORTED, Status.COMPLETED]
    state = await answered(loop, begun(5))
    assert state.status is Status.ABORTED
    assert holds(state, ANSWER[:5]), "also without partial rollout"
    assert server.received == []


async def test_a_sample_that_has_finished_stays_completed_in_a_pause(
    loop: OpenAIAgentLoop, server: CompletionServer
) -> None:
    server.usual = Script(hold_end=True)  # it is finished, but the stream stays open
    state = sample()
    generating = asyncio.create_task(answered(loop, state))
    await server.until(lambda seen: bool(seen.received) and seen.received[0].sent == BUDGET)
    await delivered()
    await loop.pause()
    await generating
    assert state.status is Status.COMPLETED
    assert holds(state, ANSWER)


async def test_a_pause_ends_a_member_that_waits_for_a_free_slot(server: CompletionServer) -> None:
    server.usual = Script(hold_after=1)
    async with loop_for(server, max_concurrency=1) as loop:
        group = [sample(member) for member in range(3)]
        generating = asyncio.create_task(loop.generate_group(group))
        await server.until(lambda seen: bool(seen.received) and seen.received[0].sent == 1)
        await delivered()
        await loop.pause()
        async with asyncio.timeout(HANG_S):
            await generating
    assert [state.status for state in group] == [Status.ABORTED] * 3
    assert [state.response_ids is None for state in group].count(True) == 2
    assert len(server.received) == 1


@pytest.mark.parametrize("script", [Script(silent=True), Script(status=503)])
async def test_a_pause_ends_waiting_for_a_server_and_for_the_next_attempt(
    server: CompletionServer, script: Script
) -> None:
    server.usual = script
    async with loop_for(server, backoff_s=30) as loop:
        state = begun(2)
        generating = asyncio.create_task(answered(loop, state, partial=True))
        await server.until(lambda seen: len(seen.received) == 1)
        await delivered()
        await loop.pause()
        async with asyncio.timeout(HANG_S):
            await generating
    assert (state.status, state.finish_reason) == (Status.ABORTED, "abort")
    assert holds(state, ANSWER[:2])


async def test_a_pause_before_the_first_token_leaves_no_response(
    loop: OpenAIAgentLoop, server: CompletionServer
) -> None:
    server.usual = Script(silent=True)
    state = sample()
    generating = asyncio.create_task(answered(loop, state))
    await server.until(lambda seen: len(seen.received) == 1)
    await loop.pause()
    await generating
    assert (state.status, state.response, state.response_ids, state.logprobs) == (Status.ABORTED, None, None, None)


async def test_a_cancelled_group_keeps_the_tokens_of_its_members(
    loop: OpenAIAgentLoop, server: CompletionServer
) -> None:
    server.usual = Script(hold_after=4)
    group = [sample(0), begun(2, rollout_id=1), sample(2)]
    generating = asyncio.create_task(loop.generate_group(group, enable_partial_rollout=True))
    await server.until(lambda seen: [request.sent for request in seen.received] == [4, 4, 4])
    await delivered()
    generating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await generating
    assert [state.status for state in group] == [Status.ABORTED] * 3
    assert holds(group[0], ANSWER[:4])
    assert holds(group[1], ANSWER[:6])
    assert holds(group[2], ANSWER[:4])
    await server.until(lambda seen: seen.aborted == 3)


async def test_many_pauses_do_not_exhaust_the_connections(server: CompletionServer) -> None:
    async with loop_for(server, max_concurrency=2) as loop:
        for turn in range(30):
            generating = asyncio.create_task(loop.generate_group([sample(member) for member in range(4)]))
            for _ in range(turn):
                await asyncio.sleep(0)  # a little further each time: connecting, sending, reading
            await loop.pause()
            await generating
            await loop.resume()
        group = [sample(member) for member in range(4)]
        async with asyncio.timeout(HANG_S):
            await loop.generate_group(group)
    assert all(holds(state, ANSWER) for state in group)


# --- transient failures -------------------------------------------------------------------------------

_PASSING = {
    "refused": Script(refuse=True),
    "408": Script(status=408, body=b"late"),
    "425": Script(status=425, body=b"early"),
    "429": Script(status=429, body=b"slow down", headers=(("Retry-After", "0"),)),
    "500": Script(status=500, body=b"oh"),
    "502": Script(status=502, body=b""),
    "503": Script(status=503, body=b"starting"),
    "504": Script(status=504, body=b"gateway"),
    "garbage": Script(body=b"<html>maintenance</html>"),
    "garbage as JSON": Script(plain=True, body=b"<html>maintenance</html>"),
    "no text": Script(plain=True, body=b'{"choices": [{"text": "\xff"}]}'),
    "a very deep document": Script(plain=True, body=b'{"error": ' + b"[" * 100_000),
    "half a JSON document": Script(plain=True, body=b'{"choices": [{"text": "<1'),
    "a body shorter than announced": Script(plain=True, body=b'{"choices": [', body_length=100),
    "no JSON in the stream": Script(body=b"data: {oops\n\n", headers=(("Content-Type", "text/event-stream"),)),
    "cut": Script(cut_after=4),
    "cut at once": Script(cut_after=0),
    "an end without a reason": Script(end_after=4),
    "an error in the stream": Script(report_after=0),
    "a refusal in the middle of a stream": Script(report_after=3, report_code=400),
    "an error without a code": Script(report_after=0, report_code=None),
    "silence": Script(silent=True),
    "silence in the middle": Script(hold_after=4),
}


_AWAY = ("refused", "502", "503", "504", "a body shorter than announced", "cut", "cut at once")


@pytest.mark.parametrize("trouble", _PASSING)
async def test_a_transient_failure_costs_no_token(
    server: CompletionServer, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.scripts.extend([_PASSING[trouble]] * 2)
    async with loop_for(server, read_timeout_s=1 if "silence" in trouble else HANG_S) as loop:
        state = await answered(loop, sample())
    assert holds(state, ANSWER)
    assert (state.status, state.finish_reason) == (Status.COMPLETED, "length")
    assert len(server.received) == 3
    for request, later in zip(server.received, server.received[1:], strict=False):
        assert (
            later.body["prompt"]
            == request.body["prompt"] + ANSWER[BUDGET - request.body["max_tokens"] :][: request.sent]
        )
        assert later.body["max_tokens"] == request.body["max_tokens"] - request.sent
    retried = [record.getMessage() for record in caplog.records if record.name == "forebay.agent_loop.http"]
    outages = [record.getMessage() for record in caplog.records if record.name == "forebay.agent_loop.outage"]
    if trouble in _AWAY:
        assert retried == []
        assert [line.split()[0] for line in outages] == ["engine_away", "engine_back"] * (len(outages) // 2)
    else:
        assert len(retried) == 2
        assert all(line.startswith(f"request_retried url={server.url}/completions attempt=2") for line in retried[:1])


async def test_a_server_that_starts_late_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    async with OpenAIAgentLoop(
        f"http://127.0.0.1:{port}/v1", "policy", sample_params=SampleParams(max_tokens=BUDGET), backoff_s=0.001
    ) as loop:
        group = [sample(member) for member in range(4)]
        generating = asyncio.create_task(loop.generate_group(group))
        await until_away(loop)
        async with CompletionServer(port=port):
            await generating
        assert all(holds(state, ANSWER) for state in group)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["engine_away", "engine_back"]


async def test_a_server_that_stays_unreachable_ends_producing_and_spends_no_try(server: CompletionServer) -> None:
    server.usual = Script(status=503, body=b"no engine")
    async with loop_for(server, down_timeout_s=0.05) as loop:
        group = [sample(member) for member in range(2)]
        with pytest.raises(EngineUnavailable, match=r"was unreachable for .* status 503: no engine"):
            await loop.generate_group(group)
    assert [(state.status, state.num_tries) for state in group] == [(Status.ABORTED, 0)] * 2


async def test_tokens_are_kept_when_a_server_stays_unreachable(server: CompletionServer) -> None:
    server.scripts.append(Script(cut_after=4))
    server.usual = Script(refuse=True)
    async with loop_for(server, down_timeout_s=0.05) as loop:
        group = [sample()]
        with pytest.raises(EngineUnavailable):
            await loop.generate_group(group, enable_partial_rollout=True)
    assert group[0].status is Status.ABORTED
    assert holds(group[0], ANSWER[:4])


async def test_a_request_that_always_loses_its_connection_fails(server: CompletionServer) -> None:
    """The request may be what crashes the server."""
    server.usual = Script(cut_after=0)
    async with loop_for(server) as loop:
        with pytest.raises(EngineError, match="11 failed attempts in a row"):
            await answered(loop, sample())


async def test_a_paused_loop_does_not_wait_for_an_unreachable_server(server: CompletionServer) -> None:
    server.usual = Script(refuse=True)
    async with loop_for(server, backoff_s=30) as loop:
        generating = asyncio.create_task(loop.generate_group([sample()]))
        await until_away(loop)
        await loop.pause()
        (state,) = await generating
    assert state.status is Status.ABORTED


async def test_the_error_after_the_last_attempt_has_the_url_the_count_and_the_cause(server: CompletionServer) -> None:
    server.usual = Script(status=500, body=b"no engine")
    async with loop_for(server, max_retries=2) as loop:
        with pytest.raises(EngineError) as caught:
            await answered(loop, sample())
    assert str(caught.value) == (
        f"{server.url}/completions: gave up after 3 failed attempts in a row; the last one: status 500: no engine"
    )
    assert len(server.received) == 3


async def test_a_silent_server_is_an_error(server: CompletionServer) -> None:
    server.usual = Script(silent=True)
    async with loop_for(server, read_timeout_s=0.01, max_retries=1) as loop:
        with pytest.raises(EngineError, match="2 failed attempts in a row; the last one: ReadTimeout"):
            await answered(loop, sample())
    await server.until(lambda seen: seen.aborted == 2)


async def test_new_tokens_reset_the_count_of_retries(server: CompletionServer) -> None:
    server.usual = Script(cut_after=1)
    async with loop_for(server, max_retries=1) as loop:
        state = await answered(loop, sample())
    assert holds(state, ANSWER)
    assert len(server.received) == BUDGET


async def test_a_connection_lost_after_the_last_token_needs_no_further_request(server: CompletionServer) -> None:
    server.usual = Script(end_after=BUDGET)
    async with loop_for(server, max_retries=0) as loop:
        state = await answered(loop, sample())
        assert (state.status, state.finish_reason) == (Status.COMPLETED, "length")
        server.usual = Script(cut_after=5)
        state = await answered(loop, sample(sample_params=SampleParams(stop_token_ids=(ANSWER[4],))))
        assert (state.status, state.finish_reason) == (Status.COMPLETED, "stop")
    assert holds(state, ANSWER[:5])
    assert len(server.received) == 2


async def test_retry_after_delays_the_next_attempt(server: CompletionServer, monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []

    def recorded(*arguments: Any) -> float:
        delays.append(_delay_s(*arguments))
        return delays[-1]

    monkeypatch.setattr("forebay.agent_loop.http._delay_s", recorded)
    server.scripts.append(Script(status=429, headers=(("Retry-After", "0.05"),), body=b"busy"))
    async with loop_for(server) as loop:
        await answered(loop, sample())
    assert delays == [0.05]


@pytest.mark.parametrize("when", ["-1", "nan", "inf", "Wed, 21 Oct 2026 07:28:00 GMT", "9" * 400, ""])
async def test_a_retry_after_that_is_not_a_number_is_ignored(server: CompletionServer, when: str) -> None:
    server.scripts.append(Script(status=429, headers=(("Retry-After", when),), body=b"busy"))
    async with loop_for(server) as loop:
        assert holds(await answered(loop, sample()), ANSWER)


async def test_a_stream_that_stays_open_after_its_last_token_is_not_waited_for(
    server: CompletionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.agent_loop.endpoint._DRAIN_S", 0.01)
    server.scripts.append(Script(hold_end=True))
    async with loop_for(server) as loop:
        assert holds(await answered(loop, sample()), ANSWER)
        assert holds(await answered(loop, sample()), ANSWER)
    assert len(server.received) == 2


# --- permanent failures -------------------------------------------------------------------------------

_LASTING = {
    "status 400: prompt too long": Script(status=400, body=b"prompt too long"),
    "status 401": Script(status=401, body=b""),
    "status 404: no such model": Script(status=404, body=b"no such model"),
    "status 422": Script(status=422, body=b"x" * 100_000),
    "status 307": Script(status=307, headers=(("Location", "http://127.0.0.1:1/"),), body=b""),
    "status 501": Script(status=501, body=b""),
    "text without token ids; the server must support `return_token_ids`": Script(ids=None),
    "text without token ids; the server must": Script(ids=None, logprobs=None),
    "text before the first token id": Script(
        body=b'data: {"choices": [{"text": "a", "token_ids": []}]}\n\n',
        headers=(("Content-Type", "text/event-stream"),),
    ),
    "1 token ids with 0 logprobs in one chunk; the server must send one logprob for each token": Script(logprobs=-1),
    "1 token ids with 0 logprobs": Script(logprobs=None),
    "1 token ids with 2 logprobs": Script(logprobs=1),
    "1 token ids with 0 logprobs in": Script(null_logprobs=True),
    "5 token ids with 4 logprobs": Script(logprobs=-1, tokens_per_chunk=5),
    "more tokens than max_tokens": Script(extra_tokens=1),
    "error 400 in the answer: the engine stumbled": Script(report_after=0, report_code=400),
    "the answer is not a completion": Script(plain=True, body=b'{"choices": "many"}'),
    "not a completion: Expected `object`": Script(plain=True, body=b"[1, 2]"),
    "Expected `int` >= 0 - at `$.choices[0].token_ids[0]`": Script(
        plain=True, body=b'{"choices": [{"token_ids": [-1]}]}'
    ),
    "the answer is compressed": Script(body=b"\x1f\x8b", headers=(("Content-Encoding", "gzip"),)),
}


@pytest.mark.parametrize("message", _LASTING)
async def test_a_permanent_failure_is_an_error_at_once(server: CompletionServer, message: str) -> None:
    server.usual = _LASTING[message]
    async with loop_for(server) as loop:
        with pytest.raises(EngineError) as caught:
            await answered(loop, sample())
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{server.url}/completions: ")
    assert len(str(caught.value)) < 500, "of a long body, the beginning"
    assert len(server.received) == 1


async def test_a_404_for_a_base_url_without_v1_hints_at_it(server: CompletionServer) -> None:
    params = SampleParams(max_tokens=BUDGET)
    async with OpenAIAgentLoop(server.url.removesuffix("/v1"), "policy", sample_params=params) as loop:
        with pytest.raises(EngineError, match=r"status 404.*; base_url usually ends in /v1"):
            await answered(loop, sample())


async def test_an_answer_that_is_too_large_is_refused_before_it_is_kept(server: CompletionServer) -> None:
    stream = (("Content-Type", "text/event-stream"),)
    server.scripts.append(Script(body=b"data: " + b"x" * 500_000, headers=stream))
    server.scripts.append(Script(body=b"data: " + b"x" * 5000 + b"\n", headers=stream))
    server.scripts.append(Script(plain=True, body=b"[", body_length=10**15))
    server.scripts.append(Script(plain=True, body=b"x" * 5000, body_length=-1))
    async with loop_for(server, max_response_bytes=4096) as loop:
        for _ in range(4):
            with pytest.raises(EngineError, match=r"4096 bytes \(max_response_bytes\)"):
                await answered(loop, sample())
        assert holds(await answered(loop, sample()), ANSWER)


async def test_a_member_that_fails_does_not_affect_the_others(server: CompletionServer) -> None:
    server.scripts.append(Script(status=400, body=b"not you"))
    async with loop_for(server) as loop:
        group = [sample(member) for member in range(4)]
        await loop.generate_group(group)
    statuses = [state.status for state in group]
    assert (statuses.count(Status.COMPLETED), statuses.count(Status.FAILED)) == (3, 1)
    failed = group[statuses.index(Status.FAILED)]
    assert failed.error_msg == f"EngineError: {server.url}/completions: status 400: not you"
    assert failed.response_ids is None
    assert sorted(state.rollout_id or 0 for state in group) == [0, 1, 2, 3]


async def test_a_closed_loop_can_be_used_again_on_another_event_loop(server: CompletionServer) -> None:
    loop = loop_for(server, max_concurrency=1)

    async def use() -> None:
        await asyncio.gather(*[answered(loop, sample(member)) for member in range(3)])
        await loop.close()
        await loop.close()

    for _ in range(2):
        await asyncio.to_thread(asyncio.run, use())


# --- limits, keys, clients ----------------------------------------------------------------------------


async def test_requests_in_flight_are_bounded_over_all_groups(server: CompletionServer) -> None:
    server.usual = Script(hold_after=1)
    async with loop_for(server, max_concurrency=3) as loop:
        groups = [[sample(member) for member in range(4)] for _ in range(3)]
        generating = [asyncio.create_task(loop.generate_group(group)) for group in groups]
        await server.until(lambda seen: seen.active == 3)
        await delivered()
        assert len(server.received) == 3
        server.go.set()
        await asyncio.gather(*generating)
    assert all(holds(state, ANSWER) for group in groups for state in group)
    assert (len(server.received), server.most_active) == (12, 3)


async def test_a_member_that_waits_for_its_next_attempt_does_not_hold_a_slot(server: CompletionServer) -> None:
    server.scripts.append(Script(status=503, body=b""))
    async with loop_for(server, max_concurrency=1, backoff_s=30) as loop:
        waiting = asyncio.create_task(answered(loop, sample()))
        await server.until(lambda seen: len(seen.received) == 1)
        assert holds(await answered(loop, sample(1)), ANSWER)
        await loop.pause()
        await waiting


async def test_the_key_is_sent_as_bearer_and_never_shown(
    server: CompletionServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = "sk-very-secret"
    server.scripts.append(Script(status=503, body=f"cannot take {key}".encode()))
    server.scripts.append(Script(status=401, body=f"wrong key {key}".encode()))
    async with loop_for(server, api_key=key) as loop:
        group = [sample()]
        await loop.generate_group(group)
        assert group[0].error_msg == f"EngineError: {server.url}/completions: status 401: wrong key ***"
        event = json.dumps({"error": {"message": key, "code": 400}}).encode()
        for server.usual in (Script(status=500, body=key.encode()), Script(plain=True, body=event)):
            group = [sample()]
            await loop.generate_group(group)
            assert str(group[0].error_msg).endswith(": ***")
        assert key not in repr(loop) + caplog.text
    assert {request.headers["authorization"] for request in server.received} == {f"Bearer {key}"}
    with pytest.raises(InvalidConfig) as caught:
        loop_for(server, api_key=key + "\n")
    assert key not in str(caught.value)


async def test_prompts_are_not_logged(server: CompletionServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="forebay")
    server.scripts.append(Script(cut_after=3))
    async with loop_for(server) as loop:
        await answered(loop, sample(prompt_ids=[987654321, 123456789], message=[{"content": "tell me"}]))
    assert "engine_away" in caplog.text
    assert not any(part in caplog.text for part in ("987654321", "123456789", "tell me"))


async def test_without_a_key_no_authorization_is_sent(loop: OpenAIAgentLoop, server: CompletionServer) -> None:
    await answered(loop, sample())
    assert "authorization" not in server.received[0].headers
    assert server.received[0].headers["accept-encoding"] == "identity"


def test_certificates_are_verified_with_https(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(httpx.AsyncHTTPTransport, "__init__", lambda self, **settings: asked.append(settings["verify"]))
    for url in ("https://host/v1", "HTTPS://host/v1", "http://host/v1"):
        OpenAIAgentLoop(url, "policy")
    assert asked == [True, True, False]


async def test_proxies_of_the_environment_are_ignored(
    server: CompletionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    async with loop_for(server, max_retries=0) as loop:
        assert holds(await answered(loop, sample()), ANSWER)


async def test_a_client_of_the_user_is_used_and_left_open(server: CompletionServer) -> None:
    async with httpx.AsyncClient(headers={"X-Mine": "yes"}, follow_redirects=True, trust_env=False) as client:
        async with loop_for(server, client=client) as loop:
            await answered(loop, sample())
            server.scripts.append(Script(status=302, headers=(("Location", f"{server.url}/completions"),), body=b""))
            with pytest.raises(EngineError, match="status 302"):
                await answered(loop, sample())
        assert not client.is_closed
    assert server.received[0].headers["x-mine"] == "yes"
    assert len(server.received) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_url": "127.0.0.1:8000"}, "base_url is '127.0.0.1:8000'; expected a URL like"),
        ({"base_url": "ftp://host/v1"}, "base_url is 'ftp://host/v1'"),
        ({"base_url": "http://"}, "base_url is 'http://'"),
        ({"base_url": None}, "base_url is None"),
        ({"base_url": "http://host:port/v1"}, "base_url is 'http://host:port/v1'"),
        ({"base_url": "http://me:hunter2@host/v1"}, "base_url has a user, a query or a fragment"),
        ({"base_url": "http://host/v1?key=hunter2"}, "base_url has a user, a query or a fragment"),
        ({"model": ""}, "model is ''"),
        ({"sample_params": {"top_k": 1}}, "sample_params is {'top_k': 1}; expected SampleParams or None"),
        ({"api_key": ""}, "api_key (not shown) is empty"),
        ({"max_concurrency": 0}, "max_concurrency is 0; expected an integer of at least 1"),
        ({"max_concurrency": 1.5}, "max_concurrency is 1.5; expected"),
        ({"max_concurrency": True}, "max_concurrency is True"),
        ({"connect_timeout_s": 0}, "connect_timeout_s is 0; expected a positive number of seconds"),
        ({"read_timeout_s": -1}, "read_timeout_s is -1; expected a positive number of seconds"),
        ({"read_timeout_s": float("nan")}, "read_timeout_s is nan"),
        ({"read_timeout_s": "9"}, "read_timeout_s is '9'"),
        ({"max_retries": -1}, "max_retries is -1; expected an integer of at least 0"),
        ({"backoff_s": float("inf")}, "backoff_s is inf"),
        ({"backoff_s": -0.5}, "backoff_s is -0.5; expected a number of seconds, 0 or more"),
        ({"max_response_bytes": 0}, "max_response_bytes is 0"),
        ({"extra_body": [1]}, "extra_body is [1]; expected a mapping"),
        ({"extra_body": {"prompt": "x"}}, "extra_body has 'prompt', which the loop sets itself"),
        ({"extra_body": {"n": 2}}, "extra_body has 'n'"),
        ({"extra_body": {"temperature": 0}}, "extra_body has 'temperature'"),
        ({"extra_body": {"x": object()}}, "extra_body cannot be written as JSON"),
        ({"engine": "http://127.0.0.1:8000"}, "engine is 'http://127.0.0.1:8000'; expected a control"),
        (
            {"engine": VLLMControl("http://127.0.0.1:8001")},
            "the loop sends requests to http://127.0.0.1:8000, but its engine controls http://127.0.0.1:8001",
        ),
        ({"client": "httpx"}, "client is 'httpx'; expected an httpx.AsyncClient"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_expected_value(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        OpenAIAgentLoop(**({"base_url": "http://127.0.0.1:8000/v1", "model": "policy"} | settings))
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("root", ["http://localhost:8000", "http://127.0.0.1:8000/", "HTTP://[::1]:8000"])
def test_the_control_of_the_same_server_is_accepted(root: str) -> None:
    OpenAIAgentLoop("http://127.0.0.1:8000/v1", "policy", engine=VLLMControl(root))


def test_a_trailing_slash_of_the_url_is_ignored() -> None:
    assert OpenAIAgentLoop("http://127.0.0.1:8000/v1/", "policy").url == "http://127.0.0.1:8000/v1/completions"


# --- the protocol -------------------------------------------------------------------------------------


def test_a_stream_reads_the_same_wherever_it_is_split() -> None:
    stream = b': ping\r\n\r\ndata: {"a": 1}\n\ndata:{"b": 2}\r\n\r\nevent: x\ndata: [DONE]\n\ndata: unfinished'
    for first in range(len(stream) + 1):
        for second in (first, min(first + 3, len(stream))):
            reader = EventReader(max_bytes=32)
            payloads = reader.feed(stream[:first]) + reader.feed(stream[first:second]) + reader.feed(stream[second:])
            assert payloads == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


def test_a_line_longer_than_the_limit_is_refused() -> None:
    assert EventReader(max_bytes=8).feed(b"data: ab\n") == [b"ab"]
    for kept, more in ((b"", b"data: abc\n"), (b"", b"data: abc"), (b"data", b": abc"), (b"data", b": abc\n")):
        reader = EventReader(max_bytes=8)
        reader.feed(kept)
        with pytest.raises(WrongAnswer, match="longer than 8 bytes"):
            reader.feed(more)


def test_errors_are_read_in_every_form_that_servers_use() -> None:
    for message in ({"error": {"message": "no", "code": 400}}, {"object": "error", "message": "no", "code": 400}):
        with pytest.raises(WrongAnswer, match="error 400 in the answer: no"):
            read_piece(json.dumps(message).encode(), begun=False)
        with pytest.raises(Interrupted, match="error 400 in the answer: no"):
            read_piece(json.dumps(message).encode(), begun=True)
    with pytest.raises(Interrupted, match="error None in the answer: out of memory"):
        read_piece(b'{"error": "out of memory"}', begun=False)


async def test_text_that_was_held_back_may_arrive_without_ids(loop: OpenAIAgentLoop, server: CompletionServer) -> None:
    piece = read_piece(b'{"choices": [{"text": "tail", "token_ids": [], "finish_reason": "stop"}]}', begun=True)
    assert piece == ([], [], "tail", "stop", (), None)
    server.usual = Script(plain=True, body=b'{"choices": [{"text": "tail", "token_ids": [], "finish_reason": "stop"}]}')
    state = await answered(loop, begun(1), partial=True)
    assert (state.status, state.response) == (Status.COMPLETED, text_of(ANSWER[0]) + "tail")
    assert list(state.response_ids or ()) == ANSWER[:1]


@pytest.mark.parametrize(
    "name", ["token_id:", "token_id:-1", "token_id:x", "token:1", "token_id:²", "token_id:" + "9" * 30]
)
def test_token_names_that_are_not_ids_are_refused(name: str) -> None:
    choice = {"text": "a", "logprobs": {"tokens": [name], "token_logprobs": [-1.0]}}
    with pytest.raises(WrongAnswer, match="text without token ids"):
        read_piece(json.dumps({"choices": [choice]}).encode(), begun=True)


async def test_the_seed_of_a_continuation_depends_on_the_tokens_before_it(server: CompletionServer) -> None:
    server.scripts.append(Script(cut_after=3))
    async with loop_for(server) as loop:
        for _ in range(2):
            params = SampleParams(seed=7, max_tokens=BUDGET)
            await answered(loop, sample(prompt_ids=PROMPT, sample_params=params))
    first, continued, whole = (request.body["seed"] for request in server.received)
    assert first == whole
    assert continued != first


# --- names of hosts -----------------------------------------------------------------------------------


async def test_g10_a_name_is_resolved_while_tools_fill_the_default_executor(server: CompletionServer) -> None:
    released = threading.Event()
    running = asyncio.get_running_loop()
    hung = [running.run_in_executor(None, released.wait) for _ in range(40)]  # it has at most 32 threads
    try:
        server.url = f"http://localhost:{server.port}/v1"
        async with loop_for(server, connect_timeout_s=HANG_S, down_timeout_s=HANG_S) as loop:
            for _ in range(2):
                assert holds(await answered(loop, sample()), ANSWER)
        assert {request.headers["host"] for request in server.received} == {f"localhost:{server.port}"}
    finally:
        released.set()
        await asyncio.gather(*hung)


async def test_a_name_that_does_not_exist_is_an_engine_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*args: object, **settings: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    async with OpenAIAgentLoop("http://engine.invalid/v1", "policy", backoff_s=0.001, down_timeout_s=0.05) as loop:
        with pytest.raises(EngineUnavailable, match=r"engine\.invalid cannot be resolved"):
            await answered(loop, sample())


async def test_all_addresses_of_a_name_are_tried(server: CompletionServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.2", 0))  # nobody listens there
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("127.0.0.2", "127.0.0.1")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **settings: found)
        server.url = f"http://engine.invalid:{server.port}/v1"
        async with loop_for(server, down_timeout_s=HANG_S) as loop:
            assert holds(await answered(loop, sample()), ANSWER)


class FailsOneProbe(CompletionServer):
    """Ends its first answer early, and does not say which process it is when it is asked after that."""

    probes = 0

    async def control(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        self.probes += path == "/metrics"
        if self.probes == 2:  # the first one confirmed the tokens
            return 503, b""
        return await super().control(method, path, body)


async def test_an_abort_followed_by_a_failed_probe_is_an_outage_and_its_tokens_stay() -> None:
    async with FailsOneProbe() as server:
        server.scripts.append(Script(finish_reason="abort", extra_tokens=4 - BUDGET))
        async with loop_for(server) as loop:
            state = await answered(loop, sample())
    assert server.probes > 2
    assert holds(state, ANSWER)
    assert state.status is Status.COMPLETED
    assert [request.body["prompt"] for request in server.received] == [PROMPT, PROMPT + ANSWER[:4]]
