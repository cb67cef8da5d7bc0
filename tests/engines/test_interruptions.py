"""Interrupting a live engine: what was generated continues exactly, and a pause ends only when the server is idle."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from forebay import SampleParams, Status
from forebay.core.rollout import TokenColumn
from forebay.engines import EngineControl
from tests.engines.plane import LIMIT_S, fresh_samples, open_loop
from tests.engines.reference import TOLERANCE
from tests.engines.servers import Server

_MEMBERS = 8
_TOKENS = 300
_INTERRUPTIONS = 6
_UPDATES = 8


async def test_interrupted_greedy_samples_equal_uninterrupted_ones(server: Server) -> None:
    params = SampleParams(max_tokens=_TOKENS, temperature=0.0)
    async with asyncio.timeout(LIMIT_S), open_loop(server, params) as (loop, streamed):
        whole = await loop.generate_group(fresh_samples(_MEMBERS))
        group, interruptions, lengths = fresh_samples(_MEMBERS), 0, [0] * _MEMBERS
        for _ in range(_INTERRUPTIONS):
            streamed.events_per_stream = 20
            generating = asyncio.create_task(loop.generate_group(group, enable_partial_rollout=True))
            await streamed.until_stalled(sum(length < _TOKENS for length in lengths))
            await loop.pause()
            group = await generating
            await loop.resume()
            found = [0 if state.response_ids is None else len(state.response_ids) for state in group]
            interruptions += sum(old < new < _TOKENS for old, new in zip(lengths, found, strict=True))
            lengths = found
        streamed.events_per_stream = None
        group = await loop.generate_group(group, enable_partial_rollout=True)

    assert interruptions >= _MEMBERS * _INTERRUPTIONS // 2
    for expected, state in zip(whole, group, strict=True):
        assert state.status is expected.status is Status.COMPLETED
        np.testing.assert_array_equal(_column(state.response_ids), _column(expected.response_ids))
        np.testing.assert_allclose(_column(state.logprobs), _column(expected.logprobs), atol=TOLERANCE, rtol=0)
        assert len(_column(state.response_ids)) == _TOKENS
        assert len(set(_column(state.response_ids).tolist())) > _TOKENS // 10, "an answer that repeats shows nothing"


@pytest.mark.parametrize("waits_by", ["control", "loop without a control"])
async def test_a_pause_is_over_only_when_the_server_runs_nothing(
    waits_by: str, server: Server, versions: list[Path], engine: str, control_class: type[EngineControl]
) -> None:
    control = control_class(server.url) if waits_by == "control" else None
    params = SampleParams(max_tokens=900, temperature=1.0)
    async with asyncio.timeout(LIMIT_S), open_loop(server, params, control) as (loop, streamed):
        for update in range(_UPDATES):
            generating = asyncio.create_task(loop.generate_group(fresh_samples(_MEMBERS)))
            await streamed.more(_MEMBERS * 5)
            await loop.pause()
            interrupted = await generating
            assert {state.status for state in interrupted} == {Status.ABORTED}
            await loop.idle()
            await _assert_runs_nothing(engine, server, versions[update % 2])
            await loop.resume()


async def _assert_runs_nothing(engine: str, server: Server, version: Path) -> None:
    """By the word of its scheduler: vLLM then drops its cache, and SGLang loads weights without refusing."""
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=LIMIT_S) as client:
        if engine == "vllm":
            response = await client.post("/reset_prefix_cache")
            assert response.json() == {"success": True}
        else:
            response = await client.post("/update_weights_from_disk", json={"model_path": str(version)})
            assert response.status_code == 200, response.text


def _column(column: TokenColumn | None) -> NDArray[Any]:
    assert column is not None
    return np.asarray(column)
