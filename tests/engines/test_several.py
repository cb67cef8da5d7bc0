"""Two live vLLM servers behind one loop: one is killed and started again while a run trains. Nothing is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.engines import EngineControls, VLLMControl
from tests.engines.conftest import UPDATES
from tests.engines.plane import GROUPS, LIMIT_S, open_plane
from tests.engines.reference import Reference
from tests.engines.servers import Server, vllm_server

log = logging.getLogger(__name__)

_MEMBERS = 6
_TOKENS = 600
_KILL, _START = 3, 5  # before the updates to these steps


@pytest.fixture
def other(versions: list[Path], tmp_path: Path) -> Iterator[Server]:
    """Another running server of the same model."""
    server = vllm_server(versions[0], tmp_path / "other.log")
    server.start()
    yield server
    server.kill()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.engine("vllm")
async def test_g03_a_server_that_is_killed_while_another_works_costs_no_token_and_no_try(
    server: Server, other: Server, versions: list[Path], reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="forebay")
    controls = EngineControls([VLLMControl(server.url), VLLMControl(other.url)], grace_s=1.0)
    took: list[int] = []
    async with open_plane([server, other], members=_MEMBERS, max_tokens=_TOKENS, control=controls) as plane:
        producer = plane.produce()
        starting: asyncio.Future[None] | None = None
        for step in range(1, UPDATES + 1):
            await plane.train(step)
            await plane.streamed.more(200)
            if step == _KILL:
                assert plane.loop.in_flight[other.url] > 0
                await asyncio.to_thread(other.kill)
                await _until(lambda: plane.loop.in_flight[other.url] == 0)  # its requests moved
                assert plane.loop.in_flight[server.url] > 0
            if step == _START:
                starting = asyncio.ensure_future(asyncio.to_thread(other.start))
            update = await controls.update_weights(versions[step], model_step=step, manager=plane.manager)
            took.append(update.servers)
        assert starting is not None
        await starting
        await _until(lambda: not controls.controls[1].behind)
        for step in range(UPDATES + 1, UPDATES + 4):
            await plane.train(step)
        await plane.manager.shutdown()
        await producer
        samples = await plane.samples()
        assert await plane.failed() == 0

    findings = reference.check(samples)
    log.info("findings %s, servers that took each update %s", findings, took)
    assert not findings.wrong
    assert not findings.ambiguous
    assert took[: _KILL - 1] == [2] * (_KILL - 1)
    assert took[_KILL - 1 : _START - 1] == [1] * (_START - _KILL)
    assert len(plane.trained) == (UPDATES + 3) * GROUPS * _MEMBERS
    assert all(state.num_tries <= 1 for state in plane.trained)
