"""A server that restarts serves its start-up weights again; no token of those counts under a later version."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from forebay.engines import EngineControl
from forebay.errors import EngineRestarted, ProducerStopped
from tests.engines.plain_http import complete, push_weights, weight_version
from tests.engines.plane import GROUPS, Plane, fresh_samples, open_plane
from tests.engines.reference import Reference
from tests.engines.servers import Server

log = logging.getLogger(__name__)

_MEMBERS = 4
_TOKENS = 400


async def _restart(server: Server) -> None:
    """Kill every process of the server, and start it again at the same address with its start-up weights."""
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)


async def _assert_versions_are_true(plane: Plane, reference: Reference, steps: set[int]) -> None:
    findings = reference.check(await plane.samples())
    log.info("findings %s", findings)
    assert not findings.wrong
    assert not findings.ambiguous
    assert findings.steps == steps


async def test_a_control_loads_the_weights_again_into_a_server_that_restarted(
    server: Server, versions: list[Path], reference: Reference, engine: str, control_class: type[EngineControl]
) -> None:
    control = control_class(server.url)
    async with open_plane(server, members=_MEMBERS, max_tokens=_TOKENS, control=control) as plane:
        producer = plane.produce()
        await plane.train(1)
        await control.update_weights(versions[1], model_step=1, manager=plane.manager)
        await plane.interrupt(1)
        await _restart(server)
        await plane.train(2)
        await plane.train(3)
        assert await weight_version(engine, server.url) == "1"
        await plane.streamed.more(300)
        await control.update_weights(versions[2], model_step=2, manager=plane.manager)
        await plane.train(4)
        await plane.train(5)
        await plane.manager.shutdown()
        await producer
        assert len(plane.trained) == 5 * GROUPS * _MEMBERS
        await _assert_versions_are_true(plane, reference, {0, 1, 2})


async def test_g03_a_server_that_is_killed_in_the_middle_costs_time_only(
    server: Server, versions: list[Path], reference: Reference, control_class: type[EngineControl]
) -> None:
    """Default settings: no group fails, no try is spent, no token that was received is lost."""
    control = control_class(server.url)
    async with open_plane(server, members=_MEMBERS, max_tokens=_TOKENS, control=control) as plane:
        await control.update_weights(versions[1], model_step=1)
        await plane.manager.continue_produce(1)
        producer = plane.produce()  # which has more to generate than is waited for below, however fast the server is
        for _ in range(2):
            await plane.streamed.more(300)
            await asyncio.to_thread(server.kill)
            away = plane.loop.outage.describe
            while away() is None:  # noqa: ASYNC110 - the producer notices by itself
                await asyncio.sleep(0.01)
            await asyncio.to_thread(server.start)
        await plane.train(2)
        await plane.train(3)
        await plane.manager.pause_produce()  # has time to ask a slow server whose tokens these are
        await plane.manager.shutdown()
        await producer
        assert await plane.failed() == 0
        assert {state.num_tries for state in await plane.samples()} == {0}
        assert await plane.tokens() == plane.streamed.tokens
        await _assert_versions_are_true(plane, reference, {1})


async def test_an_update_of_a_server_that_died_waits_for_it(
    server: Server, versions: list[Path], reference: Reference, control_class: type[EngineControl]
) -> None:
    control = control_class(server.url)
    async with open_plane(server, members=_MEMBERS, max_tokens=_TOKENS, control=control) as plane:
        producer = plane.produce()
        await plane.train(1)
        await control.update_weights(versions[1], model_step=1, manager=plane.manager)
        await plane.interrupt(1)
        await asyncio.to_thread(server.kill)
        update = asyncio.create_task(control.update_weights(versions[2], model_step=2, manager=plane.manager))
        await asyncio.to_thread(server.start)
        await update
        await plane.train(2)
        await plane.train(3)
        await plane.manager.shutdown()
        await producer
        assert len(plane.trained) == 3 * GROUPS * _MEMBERS
        await _assert_versions_are_true(plane, reference, {0, 1, 2})


async def test_without_a_control_a_restart_stops_the_producer_until_the_weights_are_pushed_again(
    server: Server, versions: list[Path], reference: Reference, engine: str
) -> None:
    async def update(plane: Plane, model_step: int) -> None:
        await plane.manager.pause_produce()
        await push_weights(engine, server.url, versions[model_step], str(model_step))
        await plane.manager.continue_produce(model_step)

    async with open_plane(server, members=_MEMBERS, max_tokens=_TOKENS) as plane:
        producer = plane.produce()
        await plane.train(1)
        await update(plane, 1)
        await plane.interrupt(1)
        await _restart(server)
        with pytest.raises(EngineRestarted):
            await producer
        with pytest.raises(ProducerStopped) as stopped:
            await plane.train(2)
        assert isinstance(stopped.value.__cause__, EngineRestarted)

        # The server does serve its start-up weights, and the loop takes nothing from it.
        assert await weight_version(engine, server.url) == "default"
        group = fresh_samples(1)
        with pytest.raises(EngineRestarted):
            await plane.loop.generate_group(group)
        assert group[0].response_ids is None
        await _assert_serves_startup_weights(server, reference)
        await _assert_versions_are_true(plane, reference, {0, 1})

        await update(plane, 1)
        producer = plane.produce()
        await plane.train(2)
        await update(plane, 2)
        await plane.train(3)
        await plane.train(4)
        await plane.manager.shutdown()
        await producer
        assert len(plane.trained) == 4 * GROUPS * _MEMBERS
        await _assert_versions_are_true(plane, reference, {0, 1, 2})


async def _assert_serves_startup_weights(server: Server, reference: Reference) -> None:
    state = fresh_samples(1)[0]
    await complete(server.url, state, 64)
    state.version_spans = ((0, 64),)
    findings = reference.check([state])
    assert not findings.wrong
    assert not findings.ambiguous
